"""Days, GPU hours and money for a number of tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fsdp_advisor.advice.candidate import Candidate

SECONDS_PER_HOUR = 3600
HOURS_PER_DAY = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """Training on `tokens` tokens. `seconds` is None if the time of a step is unknown. `price`: one GPU for one hour."""

    tokens: int
    seconds: float | None
    gpus: int
    price: float | None = None

    @classmethod
    def of(cls, candidate: Candidate, tokens: int, price: float | None) -> Training:
        """The training of a candidate at the speed of its steady steps. Not counted: starting, saving and evaluating."""
        rate, gpus = candidate.tokens_per_second_per_gpu, candidate.plan.world_size
        return cls(tokens=tokens, seconds=tokens / (rate * gpus) if rate else None, gpus=gpus, price=price)

    @property
    def days(self) -> float | None:
        return None if self.seconds is None else self.seconds / SECONDS_PER_HOUR / HOURS_PER_DAY

    @property
    def gpu_hours(self) -> float | None:
        return None if self.seconds is None else self.seconds / SECONDS_PER_HOUR * self.gpus

    @property
    def cost(self) -> float | None:
        return None if self.gpu_hours is None or self.price is None else self.gpu_hours * self.price

    def as_dict(self) -> dict[str, Any]:
        return {"tokens": self.tokens, "days": self.days, "gpu_hours": self.gpu_hours, "price": self.price, "cost": self.cost}  # fmt: skip
