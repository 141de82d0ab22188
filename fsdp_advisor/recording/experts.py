"""Implementations of routed experts other than transformers' default, and the choices of a router.

transformers 5.23, integrations/moe.py: `grouped_mm` multiplies the tokens of all experts in one kernel; `batched_mm` gathers the weights
for each pair of a token and an expert; `eager`, a model's own code, is a loop over the experts that tokens choose.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fsdp_advisor.errors import NotRecordable
from fsdp_advisor.job.choices import ExpertsImplementation
from fsdp_advisor.model.experts import code_of
from fsdp_advisor.recording.source import Source, WrappedSource


class ExpertsSource(WrappedSource):
    """A model whose routed experts are computed by the given implementation."""

    def __init__(self, base: Source, implementation: ExpertsImplementation, imbalance: float) -> None:
        """`imbalance`: the tokens of the busiest expert, as a multiple of the mean. Only the loop of `eager` depends on it."""
        super().__init__(base)
        self._implementation = implementation
        if implementation == "eager":
            self.needs_values = True
            self.expert_imbalance = imbalance

    def configure(self, module: nn.Module, **code_path: Any) -> None:
        self._base.configure(module, **code_path)
        model: Any = module
        if model._can_set_experts_implementation():
            model.set_experts_implementation(self._implementation)
        elif self._implementation != "eager":
            raise NotRecordable(
                f"{self.name}: its code for experts is a loop; transformers has no {self._implementation} for it",
                hint="--experts-implementation eager",
            )


def with_experts(source: Source, implementation: ExpertsImplementation, imbalance: float) -> Source:
    """The source with this implementation of its experts. `grouped_mm` is transformers' default."""
    code = code_of(source.config().get("model_type"), implementation)
    return source if code == "grouped_mm" else ExpertsSource(source, code, imbalance)


def chosen_experts(rows: int, chosen: int, experts: int, imbalance: float) -> torch.Tensor:
    """The experts of each token, (rows, chosen). All experts are chosen equally often; with an imbalance above 1 the last one is chosen
    `imbalance` times as often as the mean, but at most once by a token, and the others equally often.

    The busiest expert is the last one, because the loop then needs most memory: all others already keep their activations.

    >>> chosen_experts(4, 2, 4, 1.0).tolist(), chosen_experts(4, 2, 4, 2.0).tolist()
    ([[0, 1], [2, 3], [0, 1], [2, 3]], [[3, 0], [3, 1], [3, 2], [3, 0]])
    """
    places = torch.arange(rows * chosen)
    if imbalance == 1.0 or experts <= chosen:
        return (places % experts).view(rows, chosen)
    busy = min(rows, round(imbalance * rows * chosen / experts))
    picked = torch.full((rows, chosen), experts - 1)
    others = torch.ones(rows, chosen, dtype=torch.bool)
    others[:busy, 0] = False
    count = rows * chosen - busy
    picked[others] = torch.arange(count) % (experts - 1)
    return picked
