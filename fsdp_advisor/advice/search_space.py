"""The search space: every combination of strategy, backend, offload and checkpointing that a request leaves open."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from fsdp_advisor.job.batch_layout import check_batch
from fsdp_advisor.job.choices import Backend, Checkpointing, Offload, OffloadDevice, OptimizerName, Strategy
from fsdp_advisor.job.compatibility import OFFLOADS, label, mesh_of, refusal, shared_fields
from fsdp_advisor.job.frameworks import FRAMEWORKS
from fsdp_advisor.job.generation import check_generation
from fsdp_advisor.job.optimizers import backend_refusal, unable_backends
from fsdp_advisor.job.plan import Plan
from fsdp_advisor.job.projection import check_projection
from fsdp_advisor.job.search_request import RecommendRequest
from fsdp_advisor.job.training_task import check_task

CHECKPOINTING: tuple[Checkpointing, ...] = ("none", "full")
"""The policies that a search chooses from: no others have tapes in the catalog, and to record one takes seconds."""
DEVICES: tuple[OffloadDevice, ...] = ("cpu", "nvme")
SIMPLEST_FIRST: tuple[tuple[Backend, Strategy], ...] = (
    ("ddp", "ddp"),
    ("fsdp2", "zero2"),
    ("fsdp2", "zero3"),
    ("fsdp2", "hsdp"),
    ("fsdp1", "zero2"),
    ("fsdp1", "zero3"),
    ("fsdp1", "hsdp"),
    ("deepspeed", "zero1"),
    ("deepspeed", "zero2"),
    ("deepspeed", "zero3"),
)
"""PyTorch's own before DeepSpeed, which is a further dependency with a configuration of its own; less sharding before more."""


@dataclass(frozen=True, kw_only=True)
class StrategyChoice:
    """A strategy, backend, offload and activation checkpointing. With a micro-batch and accumulation it makes a plan."""

    strategy: Strategy
    backend: Backend
    offload: Offload = "none"
    offload_device: OffloadDevice = "cpu"
    activation_checkpointing: Checkpointing = "none"

    @classmethod
    def of(cls, plan: Plan) -> StrategyChoice:
        """The choice that a plan has made."""
        return cls(
            strategy=plan.strategy,
            backend=plan.backend,
            offload=plan.offload,
            offload_device=plan.offload_device if plan.offload != "none" else "cpu",
            activation_checkpointing=plan.activation_checkpointing,
        )

    @cached_property
    def simplicity_rank(self) -> tuple[int, ...]:
        """Sort key, the simplest first: no offload, then the order of SIMPLEST_FIRST, then no recomputation."""
        return (
            tuple(OFFLOADS).index(self.offload),
            DEVICES.index(self.offload_device),
            SIMPLEST_FIRST.index((self.backend, self.strategy)),
            self.activation_checkpointing != "none",
        )

    @property
    def label(self) -> str:
        """The choice in words: `ZeRO-3 + optimizer offload (deepspeed), checkpointing`."""
        to = " to NVMe" if self.offload_device == "nvme" else ""
        policy = self.activation_checkpointing
        checkpointing = {"none": "", "full": ", checkpointing"}.get(policy, f", checkpointing {policy}")
        return f"{label(self.strategy, self.offload)}{to} ({self.backend}){checkpointing}"

    def plan(self, base: Plan, micro_batch_size: int, accumulation: int = 1) -> Plan:
        """The plan `base` with this choice, on the same ranks."""
        return replace(
            base,
            strategy=self.strategy,
            backend=self.backend,
            offload=self.offload,
            offload_device=self.offload_device,
            activation_checkpointing=self.activation_checkpointing,
            mesh=mesh_of(self.strategy, base.world_size, base.nnodes),
            micro_batch_size=micro_batch_size,
            gradient_accumulation_steps=accumulation,
        )


def base_plan(request: RecommendRequest, *, gpus: int, nnodes: int, seq_len: int) -> Plan:
    """The part of a job that all its plans share, as a DDP plan; `StrategyChoice.plan` replaces the rest."""
    check_task(request)
    check_generation(request, seq_len)
    check_batch(request)
    check_projection(request.optim, request.optim_args, request.optim_target_modules)
    return Plan(
        strategy="ddp",
        backend="ddp",
        mesh=mesh_of("ddp", gpus, nnodes),
        seq_len=seq_len,
        **shared_fields(request),
    )


def on_ranks(base: Plan, *, gpus: int, nnodes: int) -> Plan:
    """The same base plan on another number of ranks."""
    return replace(base, mesh=mesh_of("ddp", gpus, nnodes))


def search_space(request: RecommendRequest, *, gpus: int, nnodes: int) -> tuple[StrategyChoice, ...]:
    """Every choice that the request leaves open on `gpus` ranks, the simplest first.

    Left out unless the request names them: HSDP on one node, which equals ZeRO-3; sharding on one GPU, which shards nothing,
    without offload; FSDP1 unless FSDP2 cannot step the optimizer, because `auto` means FSDP2; NVMe without a limit on host memory, because it needs as much of the GPU as offload to the CPU. Also left out is whatever the
    framework cannot do.
    """
    return tuple(
        sorted(
            (
                choice
                for offload, strategies in OFFLOADS.items()
                for strategy, backends in strategies.items()
                for backend in backends
                for device in (_devices(request) if offload != "none" else ("cpu",))
                for checkpointing in _checkpointing(request)
                if _is_open(
                    request,
                    choice := StrategyChoice(
                        strategy=strategy,
                        backend=backend,
                        offload=offload,
                        offload_device=device,
                        activation_checkpointing=checkpointing,
                    ),
                    gpus,
                    nnodes,
                )
            ),
            key=lambda choice: choice.simplicity_rank,
        )
    )


def _checkpointing(request: RecommendRequest) -> tuple[Checkpointing, ...]:
    asked = request.activation_checkpointing
    return CHECKPOINTING if asked == "auto" else (asked,)


def _devices(request: RecommendRequest) -> tuple[OffloadDevice, ...]:
    if request.offload_device != "auto":
        return (request.offload_device,)
    return ("cpu",) if request.host_memory is None else DEVICES


def _automatic(optim: OptimizerName) -> frozenset[Backend]:
    """The backends of `auto`: DDP, DeepSpeed, and FSDP2, or FSDP1 if FSDP2 cannot step the optimizer."""
    unable = unable_backends(optim)
    backends: tuple[Backend, ...] = ("ddp", "fsdp1" if "fsdp2" in unable else "fsdp2", "deepspeed")
    return frozenset(backends) - unable


def _is_pointless(request: RecommendRequest, choice: StrategyChoice, gpus: int, nnodes: int) -> bool:
    """Whether a simpler choice does the same on so few ranks."""
    if choice.strategy == "hsdp":
        return nnodes == 1
    ddp_is_open = request.backend == "auto" and "ddp" in FRAMEWORKS[request.framework].backends
    return gpus == 1 and ddp_is_open and choice.strategy != "ddp" and choice.offload == "none"


def _is_open(request: RecommendRequest, choice: StrategyChoice, gpus: int, nnodes: int) -> bool:
    """Whether the request allows the choice, and backend and framework support it."""
    strategy_open = request.strategy != "all" or not _is_pointless(request, choice, gpus, nnodes)
    return (
        request.strategy in ("all", choice.strategy)
        and strategy_open
        and request.offload in ("auto", choice.offload)
        and (
            request.backend == choice.backend
            or (request.backend == "auto" and choice.backend in _automatic(request.optim))
        )
        and choice.backend in FRAMEWORKS[request.framework].backends
        and backend_refusal(request.optim, choice.backend, choice.offload) is None
        and (choice.offload_device == "cpu" or choice.backend == "deepspeed")
        and refusal(
            choice.strategy,
            choice.backend,
            framework=request.framework,
            wrap=request.wrap,
            activation_checkpointing=choice.activation_checkpointing,
            activation_offload=request.activation_offload,
        )
        is None
    )
