"""The text that a visitor pastes: a model's config.json, or another tool's configuration or training script."""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import quote_plus

from fsdp_advisor.configs import complete, from_texts
from fsdp_advisor.configs.nameless import file_name
from fsdp_advisor.errors import UsageError
from fsdp_advisor.job.config_reading import check_nothing_missing
from fsdp_advisor.job.fields import as_query, fields_of, read_fields
from fsdp_advisor.job.search_request import RecommendRequest

MAX_BYTES = 60_000
"""The bytes of a pasted text in an address: one of most letters and figures, three of other characters of ASCII, six to twelve of others.
The server reads 64 KiB of an address, in which the form has its other fields.
"""


def with_pasted_file(options: Mapping[str, str]) -> tuple[dict[str, str], tuple[str, ...]]:
    """(the options of a form, with those of a configuration or script pasted in place of a config.json; lines about what was read).

    The file's settings win, but not what it leaves open and is assumed. Raises UsageError for a file that is too long or cannot be read.
    """
    text = options.get("config", "")
    name = file_name(text) if text else None
    if (sent := len(quote_plus(text))) > MAX_BYTES:
        option = "estimate --model" if name is None else "check --config-file"
        raise UsageError(
            f"the pasted text has {sent:,} bytes in an address, and the page takes {MAX_BYTES:,}",
            hint=f"give the file to the command line: fsdp-advisor {option} FILE --gpu GPU",
        )
    if name is None:
        return dict(options), ()
    found = from_texts({name: text})
    check_nothing_missing(found.readings)
    form = {key: value for key, value in options.items() if key != "config"}
    known = fields_of(RecommendRequest)
    given = read_fields({key: value for key, value in form.items() if key in found.assumed}, known)
    kept = complete(found, given, RecommendRequest.SEARCHED)
    read = as_query({key: value for key, value in kept.options.items() if key in known})
    lines = tuple(line.strip() for reading in kept.readings for line in reading.lines)
    return form | read, lines
