"""One strategy, fully decided: what the arithmetic works on; and from a request to its plans."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cached_property, lru_cache
from operator import attrgetter
from typing import TYPE_CHECKING

from fsdp_advisor.errors import UsageError

if TYPE_CHECKING:
    from fsdp_advisor.job.request import EstimateRequest, OptimizerName


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A job on rank 0: `shard_degree` ranks share one copy of the states, `replica_degree` copies exist."""

    strategy: str
    backend: str
    offload: str = "none"
    offload_device: str = "cpu"
    shard_degree: int
    replica_degree: int = 1
    nnodes: int = 1
    precision: str = "bf16-mixed"
    optim: OptimizerName = "adamw_torch_fused"
    micro_batch_size: int = 1
    seq_len: int
    gradient_accumulation_steps: int = 1
    activation_checkpointing: str = "none"
    attention: str = "sdpa"
    backward_prefetch: str = "pre"
    framework: str = "torch"
    wrap: str = "layer"

    @cached_property
    def _hash(self) -> int:
        return hash(_values(self))

    def __hash__(self) -> int:
        """Computed once: what is remembered of a plan is looked up by it many times in an estimate."""
        return self._hash

    def __getstate__(self) -> dict[str, object]:
        return {name: getattr(self, name) for name in _FIELDS}

    @cached_property
    def any_batch(self) -> Plan:
        """The plan for whatever does not depend on the batch, so that plans which differ in it alone share that."""
        return _any_batch(self)

    @cached_property
    def any_step(self) -> Plan:
        """The plan for whatever does not depend on what a step computes: what is kept, loaded, saved and sent."""
        return _any_step(self)

    @property
    def world_size(self) -> int:
        return self.shard_degree * self.replica_degree

    @property
    def ranks_per_node(self) -> int:
        return self.world_size // self.nnodes

    @property
    def mixed(self) -> bool:
        return self.precision.endswith("-mixed")

    @property
    def param_bytes(self) -> int:
        """Bytes per element of the parameters an optimizer steps (fp32 masters under mixed precision)."""
        return 2 if self.precision == "bf16" else 4

    @property
    def compute_bytes(self) -> int:
        """Bytes per element in which forward and backward compute."""
        return 4 if self.precision == "fp32" else 2

    @property
    def prepared(self) -> bool:
        """Whether accelerate wraps the model, for its own loop or for the Trainer's."""
        return self.framework in ("accelerate", "trainer")

    @property
    def reduce_bytes(self) -> int:
        """Bytes per element in which FSDP reduces gradients.

        accelerate sets reduce_dtype to param_dtype (utils/dataclasses.py, FullyShardedDataParallelPlugin.set_mixed_precision).
        """
        return self.compute_bytes if self.prepared else self.param_bytes

    @property
    def clips(self) -> bool:
        """Whether gradients are clipped: the Trainer does by default (max_grad_norm = 1)."""
        return self.framework == "trainer"

    @property
    def defers_reduction(self) -> bool:
        """Whether gradients stay whole until the last micro-batch: accelerate's `accumulate` and the Trainer use `no_sync`."""
        return self.prepared and self.gradient_accumulation_steps > 1


_FIELDS = tuple(field.name for field in fields(Plan))
_values = attrgetter(*_FIELDS)


def _with(**fixed: object) -> Callable[[Plan], Plan]:
    """What gives the plan with these values in place of a plan's own: one object for all plans that differ in these alone."""
    names = [name for name in _FIELDS if name not in fixed]
    others = attrgetter(*names)

    @lru_cache(maxsize=2048)
    def made(values: tuple[object, ...]) -> Plan:
        return Plan(**fixed, **dict(zip(names, values, strict=True)))  # type: ignore[arg-type]

    return lambda plan: made(others(plan))


_any_batch = _with(micro_batch_size=1, seq_len=1)
_any_step = _with(
    micro_batch_size=1, seq_len=1, gradient_accumulation_steps=1, activation_checkpointing="none", attention="sdpa"
)


BACKENDS: dict[str, tuple[str, ...]] = {
    "ddp": ("ddp",),
    "zero1": ("deepspeed",),
    "zero2": ("fsdp2", "fsdp1", "deepspeed"),
    "zero3": ("fsdp2", "fsdp1", "deepspeed"),
    "hsdp": ("fsdp2", "fsdp1"),
}
"""Which backends do a strategy; the first is what `auto` means."""

OFFLOADS: dict[str, dict[str, tuple[str, ...]]] = {
    "none": {"ddp": BACKENDS["ddp"], **{s: BACKENDS[s] for s in ("zero1", "zero2", "zero3", "hsdp")}},
    "optimizer": {"zero1": ("deepspeed",), "zero2": ("deepspeed",), "zero3": ("deepspeed",)},
    "parameters": {"zero2": ("fsdp2", "fsdp1"), "zero3": ("fsdp2", "fsdp1", "deepspeed"), "hsdp": ("fsdp2", "fsdp1")},
}
"""Which backends do a strategy with an offload. `optimizer` offload exists in DeepSpeed alone."""

FRAMEWORK_BACKENDS: dict[str, tuple[str, ...]] = {
    "torch": ("ddp", "fsdp2", "fsdp1", "deepspeed"),
    "accelerate": ("ddp", "fsdp2", "fsdp1", "deepspeed"),
    "trainer": ("ddp", "fsdp2", "fsdp1", "deepspeed"),
    "deepspeed": ("deepspeed",),
}
"""What a framework trains with. `torch` is each backend by itself, DeepSpeed's own engine included."""

OVERVIEW = (
    ("ddp", "none"),
    ("zero1", "none"),
    ("zero2", "none"),
    ("zero3", "none"),
    ("zero2", "optimizer"),
    ("zero3", "optimizer"),
    ("zero3", "parameters"),
)


def label(strategy: str, offload: str = "none") -> str:
    """How people name a strategy.

    >>> label("zero3", "optimizer")
    'ZeRO-3 + optimizer offload'
    """
    name = {"ddp": "DDP", "zero1": "ZeRO-1", "zero2": "ZeRO-2", "zero3": "ZeRO-3", "hsdp": "HSDP"}[strategy]
    return name + {"none": "", "optimizer": " + optimizer offload", "parameters": " + full offload"}[offload]


def degrees(strategy: str, gpus: int, nnodes: int) -> tuple[int, int]:
    """Shard degree and replica degree.

    >>> degrees("ddp", 16, 2), degrees("zero3", 16, 2), degrees("hsdp", 16, 2)
    ((1, 16), (16, 1), (8, 2))
    """
    if strategy == "ddp":
        return 1, gpus
    if strategy == "hsdp":
        return gpus // nnodes, nnodes
    return gpus, 1


def plans(request: EstimateRequest, *, seq_len: int) -> list[Plan]:
    """One plan per row of the answer. Raises UsageError where nothing can do what is asked."""
    if request.strategy != "all":
        return [_plan(request, request.strategy, request.offload, seq_len)]
    if request.offload == "none":
        rows = [*OVERVIEW, ("hsdp", "none")] if request.nnodes > 1 else list(OVERVIEW)
    else:
        rows = [(s, request.offload) for s in OFFLOADS[request.offload] if s != "hsdp" or request.nnodes > 1]
    known = FRAMEWORK_BACKENDS[request.framework] if request.backend == "auto" else (request.backend,)
    possible = [(s, o) for s, o in rows if set(known) & set(OFFLOADS[o].get(s, ()))]
    if (request.framework, request.backend) == ("trainer", "fsdp1"):
        possible = [(s, o) for s, o in possible if s == "zero3"]
    if not possible:
        raise UsageError(
            f"backend {request.backend} has no strategy with offload {request.offload}",
            hint="offload optimizer: deepspeed; offload parameters: fsdp2, fsdp1 or deepspeed",
        )
    return [_plan(request, s, o, seq_len) for s, o in possible]


def refusal(
    strategy: str, backend: str, *, framework: str, wrap: str, activation_checkpointing: str
) -> UsageError | None:
    """What a framework fails at, and what is not known of a backend."""
    if wrap == "none" and backend == "fsdp1":
        return UsageError(
            "backend fsdp1 is estimated with a unit per layer alone", hint="--backend fsdp2 has --wrap none"
        )
    prepared = framework in ("accelerate", "trainer")
    if wrap == "none" and backend == "fsdp2" and prepared and activation_checkpointing == "full":
        return UsageError(
            "accelerate checkpoints the layers that it wraps, and wrap none wraps none", hint="--wrap layer"
        )
    if framework == "trainer" and backend == "fsdp1" and strategy != "zero3":
        return UsageError(
            f"framework trainer with backend fsdp1 has no {strategy}: transformers 5.23 always shards everything with FSDP1",
            hint="--backend fsdp2, or --framework accelerate",
        )
    return None


def _plan(request: EstimateRequest, strategy: str, offload: str, seq_len: int) -> Plan:
    able = OFFLOADS[offload].get(strategy, ())
    if not able:
        with_it = ", ".join(OFFLOADS[offload])
        raise UsageError(
            f"strategy {strategy} cannot offload {offload}", hint=f"offload {offload} works with: {with_it}"
        )
    known = FRAMEWORK_BACKENDS[request.framework]
    if request.backend not in ("auto", *known):
        raise UsageError(
            f"framework {request.framework} has no backend {request.backend}", hint=f"it trains with {', '.join(known)}"
        )
    if not any(b in known for b in able):
        raise UsageError(
            f"framework {request.framework} has no strategy {strategy}",
            hint=f"it trains with {', '.join(known)}; {strategy} is of {', '.join(able)}",
        )
    backend = next(b for b in able if b in known) if request.backend == "auto" else request.backend
    if backend not in able:
        what = f"strategy {strategy}" + (f" with offload {offload}" if offload != "none" else "")
        raise UsageError(f"backend {backend} has no {what}", hint=f"{what}: {', '.join(able)}")
    refused = refusal(
        strategy,
        backend,
        framework=request.framework,
        wrap=request.wrap,
        activation_checkpointing=request.activation_checkpointing,
    )
    if refused is not None:
        raise refused
    if request.offload_device == "nvme" and offload != "none" and backend != "deepspeed":
        raise UsageError(f"backend {backend} cannot offload to nvme", hint="only deepspeed can: --backend deepspeed")
    shards, replicas = degrees(strategy, request.gpus, request.nnodes)
    return Plan(
        strategy=strategy,
        backend=backend,
        offload=offload,
        offload_device=request.offload_device,
        shard_degree=shards,
        replica_degree=replicas,
        nnodes=request.nnodes,
        precision=request.precision,
        optim=request.optim,
        micro_batch_size=request.micro_batch_size,
        seq_len=seq_len,
        gradient_accumulation_steps=request.gradient_accumulation_steps,
        activation_checkpointing=request.activation_checkpointing,
        attention=request.attention,
        backward_prefetch=request.backward_prefetch,
        framework=request.framework,
        wrap=request.wrap,
    )
