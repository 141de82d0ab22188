"""What can go wrong, as one tree.

    AdvisorError              one or two lines for a person: what happened, and a hint
    +-- UsageError            an option, or options that contradict each other
    |   +-- InvalidOption     one option that does not exist or has an impossible value
    |   +-- UnknownModel
    |   +-- UnknownGpu
    +-- UnreadableConfig      a config.json that is not one
    +-- HubError              the hub did not answer, or refused
    +-- NotRecordable         a model whose memory is not a polynomial in batch and length
    |   +-- NoSuchAttention   an attention implementation that the model does not have
    +-- MissingExtra          an optional package is needed
    +-- MeasurementError      a run on real or simulated devices that could not be made

Every error carries a hint: what the reader can do next.
"""

from __future__ import annotations

from typing import NoReturn


class AdvisorError(Exception):
    """Base of all errors a user can cause or meet. ``exit_status`` is the command line's, ``http_status`` the server's."""

    exit_status = 2
    http_status = 422

    def __init__(self, message: str, *, hint: str) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return self.message


class UsageError(AdvisorError):
    """An option with an impossible value, or options that contradict each other."""


class InvalidOption(UsageError):
    """An option that does not exist, is missing, or has an impossible value. `option` is its name with underscores."""

    def __init__(self, option: str, message: str, *, hint: str) -> None:
        super().__init__(message, hint=hint)
        self.option = option


class UnknownModel(UsageError):
    http_status = 404

    def __init__(self, name: str, *, hint: str) -> None:
        super().__init__(f"unknown model {name!r}", hint=hint)
        self.name = name


class UnknownGpu(UsageError):
    http_status = 404

    def __init__(self, name: str, *, hint: str) -> None:
        super().__init__(f"unknown GPU {name!r}", hint=hint)
        self.name = name


class UnreadableConfig(AdvisorError):
    """A model configuration that cannot be read or does not describe a model."""


class HubError(AdvisorError):
    """The Hugging Face hub could not be reached, or refused."""

    http_status = 502


class NotRecordable(AdvisorError):
    """A model that the recorder cannot run, or whose sizes it cannot express as polynomials."""


class NoSuchAttention(NotRecordable):
    """The model has no such attention implementation."""

    def __init__(self, model: str, attention: str) -> None:
        super().__init__(f"{model} has no {attention} attention", hint="--attention eager works for every model")


class MissingExtra(AdvisorError):
    """An optional package is needed for what was asked."""

    def __init__(self, what: str, *, extra: str = "torch") -> None:
        super().__init__(what, hint=f"pip install 'fsdp-advisor[{extra}]'")


class MeasurementError(AdvisorError):
    """A validation run that ended without a figure."""

    exit_status = 3


ErrorPayload = dict[str, str]
"""An error as it is kept or sent: its class, its message and its hint."""


def to_payload(error: AdvisorError) -> ErrorPayload:
    return {"kind": type(error).__name__, "message": error.message, "hint": error.hint}


def from_payload(kept: ErrorPayload) -> AdvisorError:
    """The error that was told of, of its own class.

    >>> from_payload(to_payload(NoSuchAttention("Gemma2ForCausalLM", "sdpa")))
    NoSuchAttention('Gemma2ForCausalLM has no sdpa attention')
    """
    kind = globals().get(kept["kind"], NotRecordable)
    error: AdvisorError = Exception.__new__(kind)
    AdvisorError.__init__(error, kept["message"], hint=kept["hint"])
    return error


def assert_never(value: NoReturn) -> NoReturn:
    """Fail type checking unless all values are handled before. `typing.assert_never` exists from Python 3.11 on."""
    raise AssertionError(f"unhandled value: {value!r}")
