"""Policies of activation checkpointing: their text form (`full`, `every-2`), and the implementation that each selects."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

CHECKPOINTING_EXAMPLE = "none, full, reentrant, selective or every-N (such as every-2)"
SYNONYMS = {
    "true": "full", "yes": "full", "on": "full", "false": "none", "no": "none", "off": "none", "op": "selective",
}  # fmt: skip
"""Other words for a policy; `op` is torchtitan's."""
MAX_NUMBER = 1000

CheckpointingCode = Literal["none", "full", "reentrant", "every", "selective", "selective-trl"]
"""``selective``: torchtitan's policy; ``selective-trl``: TRL's own."""


OffloadCode = Literal["none", "inputs", "saved", "trl"]
"""The implementation that offloads activations to host memory. ``inputs``: transformers' code, for the inputs of checkpointed layers;
``saved``: PyTorch's `save_on_cpu` around the forward, for every tensor that is saved for backward; ``trl``: TRL's `OffloadActivations`, on
a separate stream, for every saved tensor except weights and small tensors.
"""


@dataclass(frozen=True, slots=True)
class CheckpointingPolicy:
    """The layers, and the operators in them, that are recomputed in backward.

    `full`: every layer. `reentrant`: every layer, by PyTorch's older implementation, which runs a nested backward for each layer
    (`use_reentrant=True`). `selective`: every layer, but outputs of the operators that torchtitan's SelectiveAC (or TRL's policy) names
    are kept. `every`: the first of each `number` layers, as transformers' `every_n_layers` counts them.
    """

    kind: Literal["none", "full", "reentrant", "selective", "every"]
    number: int = 0

    def __str__(self) -> str:
        return f"every-{self.number}" if self.kind == "every" else self.kind


def checkpointing_policy(text: str) -> CheckpointingPolicy | None:
    """Parse a policy; None if the text is not one. Case, blanks, dashes and underscores do not matter.

    >>> str(checkpointing_policy("Every_4")), str(checkpointing_policy("every-1")), checkpointing_policy("every-0")
    ('every-4', 'full', None)
    """
    word = re.sub(r"[\s_-]", "", text.lower())
    word = SYNONYMS.get(word, word)
    match word:
        case "none" | "full" | "reentrant" | "selective" as kind:
            return CheckpointingPolicy(kind)
    every = re.fullmatch(r"every0*(\d{1,4})", word, re.ASCII)
    if every is None or not 1 <= int(every[1]) <= MAX_NUMBER:
        return None
    return CheckpointingPolicy("every", int(every[1])) if int(every[1]) > 1 else CheckpointingPolicy("full")


def read_checkpointing(text: str) -> str | None:
    """The canonical spelling of a policy's text; None if it is not a policy."""
    policy = checkpointing_policy(text)
    return None if policy is None else str(policy)


def read_searched_checkpointing(text: str) -> str | None:
    """As `read_checkpointing`, but also accepts `auto`, with which a search chooses the policy."""
    return "auto" if text.strip().lower() == "auto" else read_checkpointing(text)


def policies_of_changed_layers(*, own_models: bool) -> tuple[str, ...]:
    """The policies that are modelled with compiled layers and with layers in fp8. `own_models`: those of torchtitan."""
    return ("none", "full", "selective") if own_models else ("none", "full")


def every_nth_layer(text: str) -> int:
    """N of `every-N`; 0 for other policies."""
    policy = checkpointing_policy(text)
    return policy.number if policy else 0
