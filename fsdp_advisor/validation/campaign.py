"""Many cases one after the other: read from a file, shown as they go, recorded as they come, resumed where they stopped.

A campaign is a file of JSON lines, each the options of one request under the contract's names.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdp_advisor.errors import AdvisorError, UsageError
from fsdp_advisor.estimator import make_request
from fsdp_advisor.job.request import EstimateRequest
from fsdp_advisor.validation import records
from fsdp_advisor.validation.case import TIMEOUT_SECONDS, Case, Device
from fsdp_advisor.validation.records import Record, Rung

SHIPPED = Path(__file__).with_name("campaigns")


def shipped() -> list[str]:
    """Names of the campaigns that come with the package."""
    return sorted(path.stem for path in SHIPPED.glob("*.jsonl"))


def load(name: str, **overrides: Any) -> list[EstimateRequest]:
    """The requests of a shipped campaign or of a file. `overrides` replace an option in each.

    Raises UsageError where a line is no request, with its number.
    """
    path = SHIPPED / f"{name}.jsonl" if name in shipped() else Path(name)
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        known = ", ".join(shipped())
        raise UsageError(
            f"cannot read the campaign {name}: {error}", hint=f"shipped are {known}; or name a file"
        ) from None
    requests = []
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        try:
            values = json.loads(line)
        except ValueError as error:
            raise UsageError(f"{path}, line {number}: {error}", hint="each line is one JSON object") from None
        if not isinstance(values, dict):
            raise UsageError(
                f"{path}, line {number}: no JSON object", hint='as in {"model": "gpt2", "strategy": "ddp"}'
            )
        try:
            request = make_request({**values, **overrides})
        except AdvisorError as error:
            raise UsageError(f"{path}, line {number}: {error.message}", hint=error.hint) from None
        if request.strategy == "all":
            raise UsageError(
                f"{path}, line {number}: no strategy", hint="a case is one strategy: ddp, zero2, zero3 ..."
            )
        requests.append(request)
    if not requests:
        raise UsageError(f"{path}: no cases", hint="each line is one JSON object")
    return requests


def case_of(request: EstimateRequest, rung: Rung, device: Device, timeout_seconds: float | None = None) -> Case:
    return Case(request=request, rung=rung, device=device, timeout_seconds=timeout_seconds or TIMEOUT_SECONDS[rung])


@dataclass(frozen=True, slots=True)
class Event:
    """The campaign after `done` of `total` cases; `record` is the last one, None for cases that were done before."""

    done: int
    total: int
    record: Record | None = None


def run(cases: list[Case], path: Path, runner: Callable[[Case], Record] | None = None) -> Iterator[Event]:
    """Run the cases that `path` has no final record of, appending each as it ends.

    Raises KeyboardInterrupt after recording the case that Ctrl-C ended, UsageError when the disk is full.
    """
    if runner is None:
        from fsdp_advisor.validation import worker

        def runner(case: Case) -> Record:
            return worker.run(case)[0]

    before = records.read(path)[0] if path.exists() else []
    known = {r.detail.get("asked") for r in before if r.outcome in records.FINAL}
    waiting = [case for case in cases if identity(case) not in known]
    done = len(cases) - len(waiting)
    yield Event(done, len(cases))
    for case in waiting:
        record = runner(case)
        record.detail["asked"] = identity(case)
        records.append(path, record)
        if record.outcome == "interrupted":
            raise KeyboardInterrupt
        done += 1
        yield Event(done, len(cases), record)


def identity(case: Case) -> str:
    """A case as it was asked for: `asked` in the detail of its record, whose request is the one resolved."""
    return records.case_key(case.request.as_dict(), case.rung, "cpu" if case.rung == "simulate" else case.device)
