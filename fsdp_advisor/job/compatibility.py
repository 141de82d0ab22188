"""Which strategies, backends, offloads and frameworks work together, and the plans of a request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from fsdp_advisor.errors import UsageError, assert_never
from fsdp_advisor.job.adaptation import adaptation_of, check_dtype
from fsdp_advisor.job.batch_layout import check_batch
from fsdp_advisor.job.choices import Backend, Offload, Strategy
from fsdp_advisor.job.compilation import (
    COMPILING,
    check_compile,
    check_graphs,
    compile_refusal,
)
from fsdp_advisor.job.evaluation import evaluation_of
from fsdp_advisor.job.fields import fields_of
from fsdp_advisor.job.fp8 import CONVERTING, check_fp8, fp8_refusal
from fsdp_advisor.job.frameworks import FRAMEWORKS
from fsdp_advisor.job.generation import check_generation, check_groups, generation_of
from fsdp_advisor.job.images import images_of
from fsdp_advisor.job.lora_kernels import check_lora_kernels, lora_kernels_refusal
from fsdp_advisor.job.losses import loss_code
from fsdp_advisor.job.optimizers import optimizer_refusal, unable_backends
from fsdp_advisor.job.plan import Plan
from fsdp_advisor.job.projection import check_projection
from fsdp_advisor.job.refusals import (
    check_fsdp_options,
    check_torchtitan,
    combination_refusal,
    replica_refusal,
    saving_refusal,
)
from fsdp_advisor.job.request import EstimateRequest
from fsdp_advisor.job.tiled_mlp import check_tiled_mlp, tiled_mlp_refusal, tiling_backends
from fsdp_advisor.job.training_task import check_task, reference_of
from fsdp_advisor.parallelism.mesh import Mesh

BACKENDS: dict[Strategy, tuple[Backend, ...]] = {
    "ddp": ("ddp",),
    "zero1": ("deepspeed",),
    "zero2": ("fsdp2", "fsdp1", "deepspeed"),
    "zero3": ("fsdp2", "fsdp1", "deepspeed"),
    "hsdp": ("fsdp2", "fsdp1"),
}
"""The backends of each strategy; the first is what `auto` means."""

OFFLOADS: dict[Offload, dict[Strategy, tuple[Backend, ...]]] = {
    "none": BACKENDS,
    "optimizer": {"zero1": ("deepspeed",), "zero2": ("deepspeed",), "zero3": ("deepspeed",)},
    "parameters": {"zero2": ("fsdp2", "fsdp1"), "zero3": ("fsdp2", "fsdp1", "deepspeed"), "hsdp": ("fsdp2", "fsdp1")},
}
"""The backends of each strategy with an offload. Optimizer offload exists only in DeepSpeed."""

OVERVIEW: tuple[tuple[Strategy, Offload], ...] = (
    ("ddp", "none"),
    ("zero1", "none"),
    ("zero2", "none"),
    ("zero3", "none"),
    ("zero2", "optimizer"),
    ("zero3", "optimizer"),
    ("zero3", "parameters"),
    ("hsdp", "none"),
)
"""The rows of an answer about all strategies."""


def label(strategy: Strategy, offload: Offload = "none") -> str:
    """The usual name of a strategy.

    >>> label("zero3", "optimizer")
    'ZeRO-3 + optimizer offload'
    """
    name = {"ddp": "DDP", "zero1": "ZeRO-1", "zero2": "ZeRO-2", "zero3": "ZeRO-3", "hsdp": "HSDP"}[strategy]
    return name + {"none": "", "optimizer": " + optimizer offload", "parameters": " + parameter offload"}[offload]


def mesh_of(strategy: Strategy, gpus: int, nnodes: int) -> Mesh:
    """The ranks of a strategy: HSDP shards within a node and replicates across nodes.

    >>> mesh_of("hsdp", 16, 2).dp_replicate, mesh_of("hsdp", 16, 2).dp_shard
    (2, 8)
    """
    match strategy:
        case "ddp":
            return Mesh(dp_replicate=gpus, nnodes=nnodes)
        case "hsdp":
            return Mesh(dp_replicate=nnodes, dp_shard=gpus // nnodes, nnodes=nnodes)
        case "zero1" | "zero2" | "zero3":
            return Mesh(dp_shard=gpus, nnodes=nnodes)
        case _:
            assert_never(strategy)


def check_request(request: EstimateRequest, seq_len: int) -> None:
    """Raises UsageError for options that contradict each other, whatever the plan."""
    check_task(request)
    check_dtype(request)
    check_generation(request, seq_len)
    check_batch(request)
    check_projection(request.optim, request.optim_args, request.optim_target_modules)


def plans(request: EstimateRequest, *, seq_len: int) -> list[Plan]:
    """One plan per row of the answer. Raises UsageError if no backend supports the request."""
    return plans_and_refusals(request, seq_len=seq_len)[0]


def plans_and_refusals(request: EstimateRequest, *, seq_len: int) -> tuple[list[Plan], list[tuple[str, UsageError]]]:
    """One plan per row of the answer, and the labels of rows that are left out because their backends cannot run them (`row_refusal`),
    with the reasons. Raises UsageError if no backend supports the request.
    """
    check_request(request, seq_len)
    check_groups(
        request,
        gpus=request.gpus,
        micro_batch_size=request.micro_batch_size,
        accumulation=request.gradient_accumulation_steps,
    )
    for check in (check_compile, check_graphs, check_fp8, check_tiled_mlp, check_lora_kernels):
        check(request)
    rows = (plan_of_row(request, s, o, seq_len) for s, o in _rows(request))
    refusals = {plan: row_refusal(plan) for plan in rows}
    left_out = [(label(plan.strategy, plan.offload), error) for plan, error in refusals.items() if error is not None]
    if len(left_out) == len(refusals):
        raise left_out[0][1]
    return [plan for plan, error in refusals.items() if error is None], left_out


def _rows(request: EstimateRequest) -> list[tuple[Strategy, Offload]]:
    """The requested row; or, for all strategies, the rows that a backend offers. Raises UsageError if there is none."""
    if request.strategy != "all":
        return [(request.strategy, request.offload)]
    rows = OVERVIEW if request.offload == "none" else tuple((s, request.offload) for s in OFFLOADS[request.offload])
    rows = tuple(row for row in rows if row[0] != "hsdp" or request.nnodes > 1)
    facts = FRAMEWORKS[request.framework]
    known = _able_backends(request, request.offload) if request.backend == "auto" else (request.backend,)
    offered = [(s, o) for s, o in rows if any(_offers(request, s, o, b) for b in known)]
    if facts.fsdp1_shards_fully and request.backend == "fsdp1":
        offered = [row for row in offered if row[0] == "zero3"]
    if not offered:
        unable = unable_backends(request.optim, request.framework)
        tried = (*known, *(b for b in facts.backends if b in unable))
        refusals = (optimizer_refusal(request.optim, b, o, request.framework) for b in tried for s, o in rows)
        raise next(filter(None, refusals), None) or UsageError(
            f"backend {request.backend} has no strategy with offload {request.offload}",
            hint="offload optimizer: deepspeed; offload parameters: fsdp2, fsdp1 or deepspeed",
        )
    return offered


def row_refusal(plan: Plan) -> UsageError | None:
    """Why the plan's backend cannot replicate over its ranks, or run what the request asks for. None if it can."""
    refusals = (replica_refusal, compile_refusal, fp8_refusal, tiled_mlp_refusal, lora_kernels_refusal, saving_refusal)
    return next((refused for each in refusals if (refused := each(plan)) is not None), None)


def _offers(request: EstimateRequest, strategy: Strategy, offload: Offload, backend: Backend) -> bool:
    """Whether the backend supports the strategy with the offload, and can step the optimizer."""
    refused = optimizer_refusal(request.optim, backend, offload, request.framework)
    return backend in OFFLOADS[offload].get(strategy, ()) and refused is None


def _able_backends(request: EstimateRequest, offload: Offload) -> tuple[Backend, ...]:
    """The framework's backends that can step the optimizer and load the model. Only DeepSpeed offloads to NVMe."""
    unable = unable_backends(request.optim, request.framework)
    known = tuple(b for b in FRAMEWORKS[request.framework].backends if b not in unable)
    if request.compile != "none":
        adaptation = adaptation_of(request)
        if adaptation.in_one_graph or adaptation.quantization:
            known = ("ddp",)
    if offload != "none" and request.offload_device == "nvme":
        return tuple(b for b in known if b == "deepspeed")
    return known


def _backends(request: EstimateRequest, offload: Offload) -> tuple[Backend, ...]:
    """The backends among which `auto` chooses: the able ones that run compiled code, fp8 and a tiled MLP and save local state dicts if
    these are asked for.
    """
    known = _able_backends(request, offload)
    if request.compile != "none":
        known = tuple(b for b in known if b in COMPILING)
    if request.fp8 != "none":
        known = tuple(b for b in known if b in CONVERTING)
    if request.state_dict_type == "local":
        known = tuple(b for b in known if b != "fsdp2")
    if request.tiled_mlp != "none":
        known = tuple(b for b in known if b in tiling_backends(request.framework, request.gpus))
    return known


def plan_of_row(request: EstimateRequest, strategy: Strategy, offload: Offload, seq_len: int) -> Plan:
    """The plan of a row. Raises UsageError for a combination that is refused."""
    backend = _backend_of(request, strategy, offload)
    framework = request.framework
    refused = combination_refusal(strategy, backend, framework, request)
    refused = refused or optimizer_refusal(request.optim, backend, offload, framework)
    if refused is not None:
        raise refused
    if request.offload_device == "nvme" and offload != "none" and backend != "deepspeed":
        raise UsageError(f"backend {backend} cannot offload to nvme", hint="only deepspeed can: --backend deepspeed")
    plan = Plan(
        strategy=strategy,
        backend=backend,
        offload=offload,
        offload_device=request.offload_device,
        mesh=mesh_of(strategy, request.gpus, request.nnodes),
        micro_batch_size=request.micro_batch_size,
        seq_len=seq_len,
        gradient_accumulation_steps=request.gradient_accumulation_steps,
        activation_checkpointing=request.activation_checkpointing,
        **shared_fields(request),
    )
    check_fsdp_options(plan)
    check_torchtitan(plan)
    return plan


def _backend_of(request: EstimateRequest, strategy: Strategy, offload: Offload) -> Backend:
    """The backend of a row: the one that the request names, or else the framework's usual one for the strategy. Raises UsageError if the
    framework or the backend lacks the strategy or its offload.
    """
    able = OFFLOADS[offload].get(strategy, ())
    if not able:
        with_it = ", ".join(OFFLOADS[offload])
        raise UsageError(
            f"strategy {strategy} cannot offload {offload}", hint=f"offload {offload} works with: {with_it}"
        )
    known = FRAMEWORKS[request.framework].backends
    if request.backend not in ("auto", *known):
        raise UsageError(
            f"framework {request.framework} has no backend {request.backend}",
            hint=f"use --backend {' or '.join(known)}, or --framework torch",
        )
    possible = [b for b in able if b in known]
    if not possible:
        raise UsageError(
            f"framework {request.framework} has no strategy {strategy}",
            hint=f"{strategy} needs backend {' or '.join(able)}: use --framework torch",
        )
    if request.backend == "auto":
        return _usual_backend(request, strategy, offload, possible)
    if request.backend not in able:
        what = f"strategy {strategy}" + (f" with offload {offload}" if offload != "none" else "")
        hint = f"{what} needs backend {' or '.join(able)}"
        if strategy == "ddp" and request.backend == "fsdp1":
            hint += ", which keeps everything on each rank too; FSDP1's NO_SHARD is modelled on one GPU, and as hsdp with one GPU per node"
        raise UsageError(f"backend {request.backend} has no {what}", hint=hint)
    return request.backend


def _usual_backend(
    request: EstimateRequest, strategy: Strategy, offload: Offload, possible: Sequence[Backend]
) -> Backend:
    """The first possible backend that the request's other options allow, or else the first one."""
    usual = [b for b in possible if b in _backends(request, offload)]
    if unable_backends(request.optim, request.framework):  # others may have limits that the first does not have
        usual = [b for b in usual if not combination_refusal(strategy, b, request.framework, request)]
    return next(iter(usual), possible[0])


_OF_A_ROW = {
    "strategy", "backend", "offload", "offload_device", "micro_batch_size", "seq_len", "gradient_accumulation_steps",
    "activation_checkpointing",
}  # fmt: skip
"""The fields of a request that differ from row to row, or that a search varies."""


def shared_fields(request: EstimateRequest) -> dict[str, Any]:
    """The fields that all plans of a request share: all but strategy, backend, offload, mesh, checkpointing and batch."""
    common = fields_of(EstimateRequest)
    return {
        **{f.name: getattr(request, f.name) for f in fields(Plan) if f.name in common and f.name not in _OF_A_ROW},
        "loss_code": loss_code(request),
        "reference": reference_of(request),
        "generation": generation_of(request),
        "images": images_of(request),
        "evaluation": evaluation_of(request),
    }
