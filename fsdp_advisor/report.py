"""The answer to a request: its rows, and the facts about the model and the GPU that they share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, overload

from fsdp_advisor.job.plan import Plan
from fsdp_advisor.job.request import EstimateRequest
from fsdp_advisor.model.multimodal import ImageModel
from fsdp_advisor.strategy_estimate import StrategyEstimate

SCHEMA_VERSION = 1


class Printable:
    """An answer that shows itself: `print(answer)` is the command line's text, and a notebook shows tables."""

    __slots__ = ()

    def __str__(self) -> str:
        from fsdp_advisor.render import answers

        return answers.as_text(self)

    def to_markdown(self) -> str:
        """The text of `--format markdown`."""
        from fsdp_advisor.render import answers

        return answers.as_markdown(self)

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        from fsdp_advisor.render import answers

        return answers.as_html(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapters:
    """The adapters of a model: PEFT's name of the method, and the number of elements that they add. Trained copies of base modules
    count.
    """

    method: str
    parameters: int


class Rows(Sequence[StrategyEstimate]):
    """The rows of a report, one for each of its `plans`. A row is estimated when it is first read.

    A search reads only the rows of the plans that it tries.
    """

    def __init__(self, plans: Iterable[Plan], estimate: Callable[[Plan], StrategyEstimate]) -> None:
        self.plans, self._estimate = tuple(plans), estimate
        self._made: dict[Plan, StrategyEstimate] = {}

    @classmethod
    def of(cls, estimates: Iterable[StrategyEstimate]) -> Rows:
        """Rows that are estimated already."""
        made = {row.plan: row for row in estimates}
        return cls(made, made.__getitem__)

    def of_plan(self, plan: Plan) -> StrategyEstimate:
        """The row of one of the plans. Raises AdvisorError as `estimate` does."""
        if plan not in self._made:
            self._made[plan] = self._estimate(plan)
        return self._made[plan]

    def __reduce__(self) -> tuple[object, ...]:
        return Rows.of, (tuple(self),)  # pickling estimates every row

    def __len__(self) -> int:
        return len(self.plans)

    def __iter__(self) -> Iterator[StrategyEstimate]:
        return map(self.of_plan, self.plans)

    @overload
    def __getitem__(self, at: int) -> StrategyEstimate: ...

    @overload
    def __getitem__(self, at: slice) -> tuple[StrategyEstimate, ...]: ...

    def __getitem__(self, at: int | slice) -> StrategyEstimate | tuple[StrategyEstimate, ...]:
        return self.of_plan(self.plans[at]) if isinstance(at, int) else tuple(map(self.of_plan, self.plans[at]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Report(Printable):
    """The answer to one request."""

    request: EstimateRequest
    seq_len: int
    model_name: str
    weights: str
    """The hub id or directory of the model's weights: not `model_name` if another model has the same shapes."""
    model_source: str
    parameters: int
    trainable_parameters: int
    gpu_name: str
    gpu_memory_bytes: int
    estimates: Rows
    task: str | None = None
    layer_classes: tuple[str, ...] = ()
    image_model: ImageModel | None = None
    largest_parameter_elements: int | None = None
    hidden_size: int | None = None
    adapters: Adapters | None = None
    notes: tuple[str, ...] = ()
    adapted_modules: tuple[str, ...] = ()
    """The modules that LoRA's adapters are on, if none were named; empty if they have no names of their own."""
    packed: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """The settings with which GPTQ or AWQ packed the model's checkpoint; empty for other checkpoints."""

    schema_version: ClassVar[int] = SCHEMA_VERSION
    recommendation: ClassVar[None] = None
    """Only the answer of `recommend` has one."""

    @property
    def model(self) -> dict[str, Any]:
        """The model as the JSON document describes it."""
        return {
            "name": self.model_name,
            "source": self.model_source,
            "parameters": self.parameters,
            "trainable_parameters": self.trainable_parameters,
            "adapters": None if self.adapters is None else asdict(self.adapters),
        }

    @property
    def gpu(self) -> dict[str, Any]:
        """The GPU as the JSON document describes it."""
        return {"name": self.gpu_name, "memory_bytes": self.gpu_memory_bytes}

    @property
    def config_files(self) -> list[dict[str, Any]]:
        """What was read of each configuration file, and what was not."""
        return [reading.as_dict() for reading in self.request.configs]

    @property
    def any_fits(self) -> bool:
        return any(e.fits for e in self.estimates)

    @property
    def closest_row(self) -> StrategyEstimate:
        """The row that needs least memory. Rows whose peak is unknown count only if no row's is known."""
        return min(self.estimates, key=lambda row: (row.needed_bytes is None, row.known_bytes))

    def as_dict(self, *, timeline: bool = False) -> dict[str, Any]:
        """The JSON document of `estimate --json` and of REST."""
        request = self.request.as_dict()
        request |= {"seq_len": self.seq_len, "gpu": self.gpu_name}
        return {
            "schema_version": self.schema_version,
            "model": self.model,
            "request": request,
            "gpu": self.gpu,
            "estimates": [e.as_dict(timeline=timeline) for e in self.estimates],
            "recommendation": self.recommendation,
            "notes": list(self.notes),
            "config_files": self.config_files,
        }
