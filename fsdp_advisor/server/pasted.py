"""The text that a visitor pastes: a model's config.json, or another tool's configuration or training script."""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import urlencode

from fsdp_advisor.configs import complete, from_texts
from fsdp_advisor.configs.nameless import file_name
from fsdp_advisor.errors import UsageError
from fsdp_advisor.job.config_reading import check_nothing_missing
from fsdp_advisor.job.fields import as_query, fields_of, read_fields
from fsdp_advisor.job.search_request import RecommendRequest

MAX_BYTES = 60_000
"""The bytes of a form in an address: one of most letters and figures, three of other characters of ASCII, six to twelve of others.
The server's parser reads 64 KiB of an address; files that the page links to have longer paths.
"""


def with_pasted_file(options: Mapping[str, str]) -> tuple[dict[str, str], tuple[str, ...]]:
    """(the options of a form, with those of a configuration or script pasted in place of a config.json; lines about what was read).

    The file's settings win, but not over what it leaves open, such as the number of GPUs. Raises UsageError for a form that is too
    long, or a file that cannot be read.
    """
    if (sent := len(urlencode(options))) > MAX_BYTES:
        raise UsageError(
            f"the form has {sent:,} bytes in an address, and the page takes {MAX_BYTES:,}",
            hint="give files to the command line: fsdp-advisor estimate with --model, --config-file or --peft-config FILE",
        )
    text = options.get("config", "")
    name = file_name(text) if text else None
    if name is None:
        return dict(options), ()
    found = from_texts({name: text})
    check_nothing_missing(found.readings)
    form = {key: value for key, value in options.items() if key != "config"}
    known = fields_of(RecommendRequest)
    wins = {*found.assumed, *({"gpus"} - found.options.keys())}
    given = read_fields({key: value for key, value in form.items() if key in wins}, known)
    kept = complete(found, given, RecommendRequest.SEARCHED)
    read = as_query({key: value for key, value in kept.options.items() if key in known})
    lines = tuple(line.strip() for reading in kept.readings for line in reading.lines)
    return form | read, lines
