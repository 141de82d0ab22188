"""What can be chosen: families of plans, which have everything in common but the batch, in order of simplicity."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from fsdp_advisor.job.plan import FRAMEWORK_BACKENDS, OFFLOADS, Plan, degrees, label, refusal
from fsdp_advisor.job.request import OptimizerName, RecommendRequest

STRATEGIES = ("ddp", "zero1", "zero2", "zero3", "hsdp")
CHECKPOINTING = ("none", "full")
DEVICES = ("cpu", "nvme")


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What all candidates have in common."""

    gpus: int
    nnodes: int
    seq_len: int
    precision: str
    optim: OptimizerName
    attention: str
    backward_prefetch: str = "pre"
    framework: str = "torch"
    wrap: str = "layer"

    @classmethod
    def of(cls, request: RecommendRequest, *, gpus: int, nnodes: int, seq_len: int) -> Job:
        return cls(
            gpus=gpus,
            nnodes=nnodes,
            seq_len=seq_len,
            precision=request.precision,
            optim=request.optim,
            attention=request.attention,
            backward_prefetch=request.backward_prefetch,
            framework=request.framework,
            wrap=request.wrap,
        )


@dataclass(frozen=True, kw_only=True)
class Family:
    """Plans of one strategy, backend, offload and activation checkpointing; one per micro-batch and accumulation."""

    strategy: str
    backend: str
    offload: str = "none"
    offload_device: str = "cpu"
    activation_checkpointing: str = "none"

    @classmethod
    def of(cls, plan: Plan) -> Family:
        return cls(
            strategy=plan.strategy,
            backend=plan.backend,
            offload=plan.offload,
            offload_device=plan.offload_device if plan.offload != "none" else "cpu",
            activation_checkpointing=plan.activation_checkpointing,
        )

    @cached_property
    def simplicity(self) -> tuple[int, ...]:
        """Smaller is simpler: what costs most time comes first (offload, then recomputation, then sharding), then the
        backend that `auto` would take."""
        return (
            tuple(OFFLOADS).index(self.offload),
            DEVICES.index(self.offload_device),
            CHECKPOINTING.index(self.activation_checkpointing),
            STRATEGIES.index(self.strategy),
            OFFLOADS[self.offload][self.strategy].index(self.backend),
        )

    @property
    def label(self) -> str:
        """As in `ZeRO-3 + optimizer offload (deepspeed), checkpointing`."""
        to = " to NVMe" if self.offload_device == "nvme" else ""
        recomputed = ", checkpointing" if self.activation_checkpointing == "full" else ""
        return f"{label(self.strategy, self.offload)}{to} ({self.backend}){recomputed}"

    def plan(self, job: Job, micro_batch_size: int, accumulation: int = 1) -> Plan:
        shards, replicas = degrees(self.strategy, job.gpus, job.nnodes)
        return Plan(
            strategy=self.strategy,
            backend=self.backend,
            offload=self.offload,
            offload_device=self.offload_device,
            shard_degree=shards,
            replica_degree=replicas,
            nnodes=job.nnodes,
            precision=job.precision,
            optim=job.optim,
            micro_batch_size=micro_batch_size,
            seq_len=job.seq_len,
            gradient_accumulation_steps=accumulation,
            activation_checkpointing=self.activation_checkpointing,
            attention=job.attention,
            backward_prefetch=job.backward_prefetch,
            framework=job.framework,
            wrap=job.wrap,
        )


def families(request: RecommendRequest, *, nnodes: int) -> tuple[Family, ...]:
    """Every family that the request leaves open, simplest first.

    HSDP on one node is ZeRO-3 and left out unless asked for. NVMe is looked at where host memory is limited (it takes as
    much of the GPU as the CPU does), or asked for. FSDP1 is looked at where it is named: `auto` means FSDP2, and FSDP1's
    record_stream holds back memory that only shows in reserved bytes. What the framework cannot do, or refuses, is left out.
    """
    backends_open = tuple(b for b in FRAMEWORK_BACKENDS[request.framework] if b != "fsdp1" or request.backend == b)
    devices = (request.offload_device,) if request.offload_device != "auto" else DEVICES
    if request.offload_device == "auto" and request.host_memory is None:
        devices = ("cpu",)
    found = [
        Family(
            strategy=strategy,
            backend=backend,
            offload=offload,
            offload_device=device,
            activation_checkpointing=checkpointing,
        )
        for offload, able in OFFLOADS.items()
        for strategy, backends in able.items()
        for backend in backends
        for device in (devices if offload != "none" else ("cpu",))
        for checkpointing in CHECKPOINTING
        if request.offload in ("auto", offload)
        and request.backend in ("auto", backend)
        and backend in backends_open
        and request.activation_checkpointing in ("auto", checkpointing)
        and (request.strategy == strategy or (request.strategy == "all" and (strategy != "hsdp" or nnodes > 1)))
        and (device == "cpu" or backend == "deepspeed")
        and refusal(
            strategy, backend, framework=request.framework, wrap=request.wrap, activation_checkpointing=checkpointing
        )
        is None
    ]
    return tuple(sorted(found, key=lambda family: family.simplicity))
