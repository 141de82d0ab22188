"""The questions about memory that a decision tree asks: does this strategy fit, with these activations and this micro-batch?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fsdp_advisor.advice.search import Search
from fsdp_advisor.advice.search_space import ActivationChoice, StrategyChoice
from fsdp_advisor.job.choices import Strategy
from fsdp_advisor.job.compatibility import label
from fsdp_advisor.job.losses import loss_words

_PATH_ORDER: tuple[Strategy, ...] = ("ddp", "zero1", "zero2", "hsdp", "zero3")
"""Strategies in the order in which the tree asks about them. Each shards more than the one before."""


@dataclass(frozen=True, slots=True)
class Question:
    """The question whether any of `choices` fits at the micro-batch `size`."""

    id: str
    text: str
    choices: tuple[StrategyChoice, ...]
    size: int


def memory_questions(search: Search) -> list[Question]:
    """The questions that the request leaves open, in the order in which they are asked."""
    ladder = _ladder(search)
    return [q for q in (*_strategy_questions(search, ladder), *_offload_questions(search, ladder)) if q.choices]


def _ladder(search: Search) -> list[ActivationChoice]:
    """Activation choices of the search in the order in which the tree tries them. Each saves more memory than the one before: first by
    its loss, then by checkpointing, then by offload.
    """
    ladder = [search.activation_choices[0]]
    for activations in search.activation_choices:
        if activations.is_beyond(ladder[-1]):
            ladder.append(activations)
    return ladder


def _strategy_questions(search: Search, ladder: Sequence[ActivationChoice]) -> Iterator[Question]:
    """Whether the strategies fit without offload: DDP in all its variants, then each sharded one, then the variants of the last."""
    preferred, smallest = search.batches.preferred, search.batches.smallest
    at = f" at micro-batch {preferred}" if len(search.batches.sizes) > 1 or preferred > 1 else ""
    small = f"micro-batch {smallest} and accumulation {search.batches.accumulation(smallest)}"
    strategies = [s for s in _PATH_ORDER if any(c.strategy == s for c in search.choices)]
    plain, *leaner = ladder
    yield Question("ddp", f"Does DDP fit{at}?", _choices(search, "ddp", plain), preferred)
    for activations in leaner:
        text = f"Does DDP with {_words(activations)} fit?"
        yield Question(f"ddp_{_id(activations)}", text, _choices(search, "ddp", activations), preferred)
    if smallest < preferred:
        yield Question("ddp_micro_batch", f"Does DDP with {small} fit?", _choices(search, "ddp", plain), smallest)
    for strategy in strategies:
        if strategy != "ddp":
            note = " (sharded within a node, replicated across nodes)" if strategy == "hsdp" else ""
            text = f"Does {label(strategy)}{note} fit{at}?"
            yield Question(strategy, text, _choices(search, strategy, plain), preferred)
    most = strategies[-1]
    if most == "ddp":
        return
    for activations in leaner:
        text = f"Does {label(most)} with {_words(activations)} fit?"
        yield Question(_id(activations), text, _choices(search, most, activations), preferred)
    if smallest < preferred:
        lean, possible = _most_saving(search, ladder, most)
        text = f"Does {label(most)} with {' and '.join(filter(None, (small, _words(lean))))} fit?"
        yield Question("micro_batch", text, possible, smallest)


def _offload_questions(search: Search, ladder: Sequence[ActivationChoice]) -> Iterator[Question]:
    """Whether offload to the CPU, then to NVMe, makes the job fit at the smallest micro-batch."""
    size = search.batches.smallest
    for id_, what, offload in (
        ("offload_optimizer", "optimizer offload to the CPU", "optimizer"),
        ("offload_parameters", "parameter offload to the CPU", "parameters"),
    ):
        lean, possible = _most_saving(search, ladder, None, offload)
        yield Question(id_, f"Does {_with(what, lean)} fit?", possible, size)
    lean, possible = _most_saving(search, ladder, None, "parameters", "nvme")
    if not possible:
        lean, possible = _most_saving(search, ladder, None, "optimizer", "nvme")
    yield Question("offload_nvme", f"Does {_with('offload to NVMe', lean)} fit?", possible, size)


def _with(what: str, activations: ActivationChoice) -> str:
    words = _words(activations)
    return f"{what} with {words}" if words else what


def _words(activations: ActivationChoice) -> str:
    """An activation choice in the words of a question; empty for a plain step."""
    return " and ".join(words for _, words in _parts(activations))


def _id(activations: ActivationChoice) -> str:
    """The id of a question about an activation choice: `checkpointing`, `loss`, `loss_selective`."""
    return "_".join(id_ for id_, _ in _parts(activations))


def _parts(activations: ActivationChoice) -> Iterator[tuple[str, str]]:
    """(id, words) of each part of an activation choice that a plain step does not have."""
    if loss := loss_words(activations.loss_code):
        yield "loss", loss
    policy = activations.activation_checkpointing
    if policy == "full":
        yield "checkpointing", "activation checkpointing"
    elif policy != "none":
        yield policy, f"{policy} activation checkpointing"
    if activations.activation_offload:
        yield "activation_offload", "activation offload"


def _most_saving(
    search: Search,
    ladder: Sequence[ActivationChoice],
    strategy: Strategy | None,
    offload: str = "none",
    device: str = "cpu",
) -> tuple[ActivationChoice, tuple[StrategyChoice, ...]]:
    """The last activation choice of the ladder that can be combined with the strategy and offload, and the strategy choices with it. If
    none can, the last of the ladder and no strategy choices.
    """
    for activations in reversed(ladder):
        if found := _choices(search, strategy, activations, offload, device):
            return activations, found
    return ladder[-1], ()


def _choices(
    search: Search,
    strategy: Strategy | None,
    activations: ActivationChoice,
    offload: str = "none",
    device: str = "cpu",
) -> tuple[StrategyChoice, ...]:
    """The strategy choices of the search with these properties. `strategy`: None for any."""
    return tuple(
        c
        for c in search.choices
        if strategy in (None, c.strategy)
        and (c.activations, c.offload, c.offload_device) == (activations, offload, device)
    )
