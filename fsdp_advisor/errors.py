"""The exceptions of this package, as one tree.

    AdvisorError              base class: a message of one line, and a hint
    +-- UsageError            an impossible option, or options that contradict each other
    |   +-- InvalidOption     one option that does not exist or has an impossible value
    |   +-- UnknownModel
    |   +-- UnknownGpu
    +-- UnreadableConfig      a config.json that cannot be read or is invalid
    +-- UnreadableDiagnosis   a file with neither an out-of-memory error nor a memory snapshot
    +-- HubError              the Hugging Face hub did not answer, or refused the request
    +-- NotRecordable         a model that the recorder cannot run or describe
    |   +-- NoSuchAttention   an attention implementation that the model does not have
    |   +-- NotPolynomial     a model that must be recorded for each micro-batch and sequence length
    +-- MissingExtra          an optional package is not installed
    +-- MeasurementError      a validation run that failed
    +-- RehearsalError        a rehearsal that cannot start or be read

The message says what is wrong. The hint says what the user can do.
"""

from __future__ import annotations

from typing import NoReturn

MAX_MESSAGE = 400
"""Characters of a message that is shown, because it may quote hostile input."""


def assert_never(value: NoReturn) -> NoReturn:
    """The end of a `match`: mypy refuses it if a case is missing. `typing.assert_never` needs Python 3.11."""
    raise AssertionError(f"not handled: {value!r}")


class AdvisorError(Exception):
    """Base of all errors that a user can cause or encounter.

    `exit_status` is the exit status of the command line, `http_status` the status of the server's response.
    """

    exit_status = 2
    http_status = 422

    def __init__(self, message: str, *, hint: str) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        """The message and, on a second line, the hint."""
        return f"{self.message}\nhint: {self.hint}"


class UsageError(AdvisorError):
    """An option has an impossible value, or options contradict each other."""


class InvalidOption(UsageError):
    """An option that does not exist, is missing, or has an impossible value. `option` is its name with underscores."""

    def __init__(self, option: str, message: str, *, hint: str) -> None:
        super().__init__(message, hint=hint)
        self.option = option


class UnknownModel(UsageError):
    """No model has this name."""

    http_status = 404

    def __init__(self, name: str, *, hint: str) -> None:
        super().__init__(f"unknown model {name!r}", hint=hint)
        self.name = name


class UnknownGpu(UsageError):
    """No GPU has this name, and it is not a valid memory size."""

    http_status = 404

    def __init__(self, name: str, *, hint: str) -> None:
        super().__init__(f"unknown GPU {name!r}", hint=hint)
        self.name = name


class UnreadableConfig(AdvisorError):
    """A model configuration that cannot be read or does not describe a model."""


class UnreadableDiagnosis(AdvisorError):
    """A file that has neither an out-of-memory error nor a snapshot of the caching allocator."""


class HubError(AdvisorError):
    """The Hugging Face hub could not be reached, or refused the request."""

    http_status = 502


class NotRecordable(AdvisorError):
    """The recorder cannot run the model."""


class NotPolynomial(NotRecordable):
    """The sizes are not polynomials in batch size and sequence length, or the order of allocations depends on them."""

    def __init__(self, message: str) -> None:
        super().__init__(message, hint="such a model is recorded for one micro-batch and sequence length at a time")


class NoSuchAttention(NotRecordable):
    """The model has no such attention implementation."""

    def __init__(self, model: str, attention: str) -> None:
        super().__init__(f"{model} has no {attention} attention", hint="--attention eager works for every model")


ADAPTERS_EXTRA = "torch,adapters"
"""The package's extras with PEFT and bitsandbytes, as pip names them."""


class MissingExtra(AdvisorError):
    """The request needs torch, transformers or another optional package, which is not installed."""

    def __init__(self, message: str, *, extra: str = "torch", hint: str = "") -> None:
        """`extra`: the optional dependency that the default hint tells the user to install."""
        super().__init__(message, hint=hint or f"in a checkout of fsdp-advisor, run: pip install '.[{extra}]'")


class MeasurementError(AdvisorError):
    """A validation run ended without a result."""

    exit_status = 3


class RehearsalError(AdvisorError):
    """A rehearsal cannot start, or its result cannot be read."""


ErrorPayload = dict[str, str]
"""A serialized error: its class, its message and its hint."""


def to_payload(error: AdvisorError) -> ErrorPayload:
    """The error as a dictionary of strings, to store it or send it to another process."""
    return {"kind": type(error).__name__, "message": error.message, "hint": error.hint}


def from_payload(payload: ErrorPayload) -> AdvisorError:
    """The error that `to_payload` serialized; NotRecordable if its class no longer exists.

    >>> from_payload(to_payload(NoSuchAttention("Gemma2ForCausalLM", "sdpa")))
    NoSuchAttention('Gemma2ForCausalLM has no sdpa attention')
    """
    kind = globals().get(payload["kind"], NotRecordable)
    error: AdvisorError = Exception.__new__(kind)
    AdvisorError.__init__(error, payload["message"], hint=payload["hint"])
    return error
