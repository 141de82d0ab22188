"""How a run ended, and what it reported until then. Imports no torch."""

from __future__ import annotations

import traceback
from dataclasses import asdict, dataclass, field
from typing import Any

from fsdp_advisor.errors import AdvisorError, MeasurementError
from fsdp_advisor.validation.choices import FAILED
from fsdp_advisor.validation.failures import free_memory, is_host_out_of_memory, is_out_of_memory, read_out_of_memory
from fsdp_advisor.validation.records import Outcome

_MESSAGE_CHARACTERS = 600
_TRACEBACK_CHARACTERS = 4000


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """The end of a run.

    `reported` holds the values that the run sent before it ended. `rank` is the rank that failed, if it is known.
    `rank_zero_elsewhere`: rank 0 runs on another node, so the record is written there.
    """

    outcome: Outcome
    reported: dict[str, Any] = field(default_factory=dict)
    message: str = ""
    detail: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    exit_status: int = FAILED
    hint: str = ""
    rank: int | None = None
    rank_zero_elsewhere: bool = False

    @classmethod
    def of_exception(cls, error: BaseException) -> RunResult:
        """The result of a run that raised `error`."""
        message = " ".join(str(error).split())[:_MESSAGE_CHARACTERS]
        if isinstance(error, AdvisorError):
            return cls(outcome="error", message=error.message, hint=error.hint, exit_status=error.exit_status)
        if is_out_of_memory(error):
            host = is_host_out_of_memory(error)
            sizes = read_out_of_memory(str(error))
            if "free_bytes" not in sizes:
                sizes = free_memory(host=host) | sizes
            detail = {"memory": "host" if host else "gpu", **sizes}
            return cls(outcome="oom", message=message or "out of memory", detail=detail, exit_status=1)
        if isinstance(error, (KeyboardInterrupt, SystemExit)):
            return cls(outcome="interrupted", message="interrupted")
        lines = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        detail = {"traceback": lines[-_TRACEBACK_CHARACTERS:]}
        return cls(outcome="error", message=f"{type(error).__name__}: {message}", detail=detail)

    def as_dict(self) -> dict[str, Any]:
        """The fields, for JSON. `RunResult(**values)` reverses it."""
        return asdict(self)

    def to_error(self) -> MeasurementError:
        """The result as an error with a hint, for the command line."""
        log = f"its log is {self.detail['log']}" if "log" in self.detail else ""
        hint = "; ".join(filter(None, (self.hint, log)))
        if not hint and self.outcome == "timeout":
            hint = "run it again with a larger --timeout"
        error = MeasurementError(
            self.message or self.outcome,
            hint=hint or "run it again, or with another --mode; --records FILE keeps the details",
        )
        error.exit_status = self.exit_status
        return error
