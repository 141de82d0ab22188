"""Campaigns: many cases that run one after the other. Each is recorded when it ends, and an interrupted campaign can be continued.

A campaign is a file of JSON lines; each line holds the options of one request under the names of the JSON interface.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdp_advisor.errors import AdvisorError, UsageError
from fsdp_advisor.job.adapter_fields import with_files_read
from fsdp_advisor.job.parsing import make_request
from fsdp_advisor.job.request import EstimateRequest
from fsdp_advisor.validation import records
from fsdp_advisor.validation.case import Case
from fsdp_advisor.validation.records import Record

_FOLDER = Path(__file__).with_name("campaigns")


def load(name: str, **overrides: Any) -> list[EstimateRequest]:
    """The requests of a campaign that comes with the package, or of a file. `overrides` replace options in all of them.

    Raises UsageError with the line number if a line is not a request for one strategy.
    """
    shipped = sorted(path.stem for path in _FOLDER.glob("*.jsonl"))
    path = _FOLDER / f"{name}.jsonl" if name in shipped else Path(name)
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        hint = f"the package has {', '.join(shipped)}; or name a file"
        raise UsageError(f"cannot read the campaign {name}: {error}", hint=hint) from None
    requests = []
    for number, line in enumerate(lines, 1):
        if line.strip() and not line.lstrip().startswith("#"):
            try:
                requests.append(_request(line, overrides))
            except AdvisorError as error:
                raise UsageError(f"{path}, line {number}: {error.message}", hint=error.hint) from None
    if not requests:
        raise UsageError(f"{path} has no cases", hint="each line is one JSON object")
    return requests


def _request(line: str, overrides: dict[str, Any]) -> EstimateRequest:
    """The request of one line. Raises AdvisorError."""
    example = 'for example {"model": "gpt2", "strategy": "ddp"}'
    try:
        values = json.loads(line)
    except ValueError as error:
        raise UsageError(str(error), hint=f"each line is one JSON object, {example}") from None
    if not isinstance(values, dict):
        raise UsageError("not a JSON object", hint=f"each line is one, {example}")
    request = make_request(with_files_read({**values, **overrides}))
    if request.strategy == "all":
        raise UsageError("no strategy", hint="a case has one strategy: ddp, zero2, zero3 ...")
    return request


@dataclass(frozen=True, slots=True)
class Event:
    """The progress of a campaign: `done` of `total` cases. `record`: the record of the case that has just ended; None if earlier runs
    of the campaign did these cases.
    """

    done: int
    total: int
    record: Record | None = None


def run(cases: list[Case], path: Path, run_case: Callable[[Case], Record]) -> Iterator[Event]:
    """Run the cases that have no final record in `path`, and append the record of each.

    Raises KeyboardInterrupt after recording the case that Ctrl-C ended, and UsageError if the disk is full.
    """
    earlier = records.read(path)[0] if path.exists() else []
    finished = {r.detail.get("asked") for r in earlier if r.outcome in records.FINAL}
    pending = [case for case in cases if _identity(case) not in finished]
    done = len(cases) - len(pending)
    yield Event(done, len(cases))
    for case in pending:
        record = run_case(case)
        record.detail["asked"] = _identity(case)
        records.append(path, record)
        if record.outcome == "interrupted":
            raise KeyboardInterrupt
        done += 1
        yield Event(done, len(cases), record)


def _identity(case: Case) -> str:
    """The case as requested. A record keeps it as `detail.asked`, because its `request` is the resolved one."""
    return records.case_key(case.request.as_dict(), case.mode, "cpu" if case.mode == "simulate" else case.device)
