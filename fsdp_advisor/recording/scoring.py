"""The forwards of a step that run without gradients, as a reference model's."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import nn

from fsdp_advisor.model.tape import ScoringPhase


class _Current:
    phase: ScoringPhase | None = None
    changed: Callable[[], None] | None = None


@contextlib.contextmanager
def phases_watched(changed: Callable[[], None]) -> Iterator[None]:
    """Context in which `changed` is called when a forward without gradients begins or ends."""
    _Current.changed = changed
    try:
        yield
    finally:
        _Current.changed = None


@contextlib.contextmanager
def scoring(phase: ScoringPhase) -> Iterator[None]:
    """Context in which a model runs without gradients, in this phase of the tape. In an evaluation, a reference model's forwards keep
    their own phase.
    """
    before = _Current.phase
    _enter(phase)
    try:
        with torch.no_grad():
            yield
    finally:
        _enter(before)


def _enter(phase: ScoringPhase | None) -> None:
    _Current.phase = phase
    if _Current.changed is not None:
        _Current.changed()


@contextlib.contextmanager
def without_checkpointing(module: nn.Module) -> Iterator[None]:
    """Context in which a model checkpoints nothing, as in forwards without gradients."""
    checkpointed = [m for m in module.modules() if getattr(m, "gradient_checkpointing", False)]
    for each in checkpointed:
        each.__dict__["gradient_checkpointing"] = False
    try:
        yield
    finally:
        for each in checkpointed:
            each.__dict__["gradient_checkpointing"] = True


def scoring_phase() -> ScoringPhase | None:
    """The phase of the forward without gradients that runs now; None if there is none."""
    return _Current.phase
