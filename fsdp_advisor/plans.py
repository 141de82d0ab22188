"""From a request to plans: which strategies are asked for, and which backend does each."""

from __future__ import annotations

from fsdp_advisor.errors import UsageError
from fsdp_advisor.plan import Plan
from fsdp_advisor.request import EstimateRequest

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

OVERVIEW = (
    ("ddp", "none"),
    ("zero1", "none"),
    ("zero2", "none"),
    ("zero3", "none"),
    ("zero2", "optimizer"),
    ("zero3", "optimizer"),
    ("zero3", "parameters"),
)


def plans(request: EstimateRequest, *, seq_len: int) -> list[Plan]:
    """One plan per row of the answer. Raises UsageError where nothing can do what is asked."""
    if request.strategy != "all":
        return [_plan(request, request.strategy, request.offload, seq_len)]
    if request.offload == "none":
        rows = [*OVERVIEW, ("hsdp", "none")] if request.nnodes > 1 else list(OVERVIEW)
    else:
        rows = [(s, request.offload) for s in OFFLOADS[request.offload] if s != "hsdp" or request.nnodes > 1]
    possible = [(s, o) for s, o in rows if request.backend == "auto" or request.backend in OFFLOADS[o].get(s, ())]
    if not possible:
        raise UsageError(
            f"backend {request.backend} has no strategy with offload {request.offload}",
            hint="offload optimizer: deepspeed; offload parameters: fsdp2, fsdp1 or deepspeed",
        )
    return [_plan(request, s, o, seq_len) for s, o in possible]


def _plan(request: EstimateRequest, strategy: str, offload: str, seq_len: int) -> Plan:
    able = OFFLOADS[offload].get(strategy, ())
    if not able:
        with_it = ", ".join(OFFLOADS[offload])
        raise UsageError(
            f"strategy {strategy} cannot offload {offload}", hint=f"offload {offload} works with: {with_it}"
        )
    backend = able[0] if request.backend == "auto" else request.backend
    if backend not in able:
        what = f"strategy {strategy}" + (f" with offload {offload}" if offload != "none" else "")
        raise UsageError(f"backend {backend} has no {what}", hint=f"{what}: {', '.join(able)}")
    if request.offload_device == "nvme" and offload != "none" and backend != "deepspeed":
        raise UsageError(f"backend {backend} cannot offload to nvme", hint="only deepspeed can: --backend deepspeed")
    if strategy == "ddp":
        shards, replicas = 1, request.gpus
    elif strategy == "hsdp":
        shards, replicas = request.gpus // request.nnodes, request.nnodes
    else:
        shards, replicas = request.gpus, 1
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
    )
