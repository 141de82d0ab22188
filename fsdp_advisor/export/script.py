"""A complete training script in plain PyTorch, for FSDP2 or DDP, that trains as the estimate assumes.

Source: torch 2.13, torch.distributed.fsdp (`fully_shard`), torch.distributed.checkpoint, torch.nn.parallel; transformers 5.23.0.
"""

from __future__ import annotations

from typing import Literal

from fsdp_advisor.export.adapters import packages as adapting_packages
from fsdp_advisor.export.adapters import template_values, weights
from fsdp_advisor.export.batches import batch_limit
from fsdp_advisor.export.checkpointing import checkpointing_call, saves_on_host, script_checkpointing_limit
from fsdp_advisor.export.constants import HEAD_NODE, PACKAGES, RENDEZVOUS_PORT, SCRIPT
from fsdp_advisor.export.header import header
from fsdp_advisor.export.job import Job
from fsdp_advisor.export.limits import NO_MODEL, needs_fsdp2, optimizer_limit
from fsdp_advisor.export.losses import loss_limit, script_call
from fsdp_advisor.export.losses import packages as loss_packages
from fsdp_advisor.export.model_arguments import model_arguments
from fsdp_advisor.export.rendering import render
from fsdp_advisor.export.target import Target, with_environment
from fsdp_advisor.job.choices import Backend, half_dtype
from fsdp_advisor.job.frameworks import BACKEND_NAMES
from fsdp_advisor.job.plan import Plan
from fsdp_advisor.model.tasks import AUTO_CLASSES
from fsdp_advisor.policies.optimizers import optimizer_of
from fsdp_advisor.policies.optimizers.interface import Refusal


def _unsupported(job: Job, backend: Backend) -> str | None:
    if job.plan.backend != backend:
        only = f"it trains only with {BACKEND_NAMES[backend]}"
        return f"{only}; {needs_fsdp2(job.plan)}" if (backend, job.plan.backend) == ("fsdp2", "fsdp1") else only
    if job.task is None:
        return NO_MODEL
    adaptation = job.adaptation
    if adaptation.peft and adaptation.method != "LORA":
        return f"its script makes adapters of LoRA alone, not of {adaptation.method}"
    if adaptation.quantization and backend == "fsdp2":
        return "its script shards no weights in 4 or 8 bits; use --framework accelerate or trainer"
    optimizer = optimizer_of(job.plan)
    if isinstance(optimizer.script, Refusal):
        return optimizer.script.reason
    return (
        loss_limit(job, "liger")
        or batch_limit(job)
        or script_checkpointing_limit(job)
        or optimizer_limit(job.plan, "torch")
    )


def _write(job: Job) -> tuple[str, tuple[str, ...]]:
    plan = job.plan
    optimizer = optimizer_of(plan).script
    assert job.task is not None and not isinstance(optimizer, Refusal)
    text = render(
        "train.py.jinja",
        header=header(job, *PACKAGES["torch"], *adapting_packages(job), *loss_packages(job), *_step_packages(plan)),
        launch=with_environment(job, torchrun_line(job, SCRIPT)),
        script=SCRIPT,
        plan=plan,
        model=job.model_name,
        auto=AUTO_CLASSES[job.task],
        task=job.task,
        layers=list(job.wrapped_classes),
        compiled=list(job.layer_classes),
        group_size=plan.wrap_policy.number if plan.wrap_policy.kind == "every" else 1,
        least=plan.wrap_policy.number if plan.wrap_policy.kind == "size" else 0,
        predicted=job.peaks.get(job.allocated or ""),
        fsdp=plan.backend == "fsdp2",
        reshard=plan.post_forward_ranks or plan.reshards,
        offload=plan.offload == "parameters",
        weights=weights(job),
        learning_rate=job.learning_rate,
        model_arguments=model_arguments(job),
        compute=half_dtype(plan.precision) if plan.mixed else None,
        scaled=plan.precision == "fp16-mixed",
        checkpointing=checkpointing_call(job),
        selective=plan.checkpointing == "selective",
        saves_on_host=saves_on_host(job),
        **template_values(job),
        optimizer=optimizer.call(),
        bitsandbytes=optimizer.module.startswith("bitsandbytes"),
        torchao=optimizer.module.startswith("torchao"),
        schedulefree=optimizer.has_modes,
        optimi=optimizer.module == "optimi",
        loss_call=script_call(job),
        searches_unused=job.searches_unused,
    )
    return text, ()


def _step_packages(plan: Plan) -> tuple[str, ...]:
    """The packages that change linear layers and feed-forward networks, except Liger's, which `losses.packages` returns."""
    tiles = plan.tiled_mlp != "none" and not plan.use_liger_kernel and plan.loss_code != "liger"
    return (*(("torchao",) if plan.fp8 != "none" else ()), *(("liger_kernel",) if tiles else ()))


def torchrun_line(job: Job, file: str) -> str:
    """The torchrun command that starts a script on one node, or on each of several."""
    plan = job.plan
    where = "--standalone"
    if plan.nnodes > 1:
        where = f"--nnodes {plan.nnodes} --rdzv-backend c10d --rdzv-endpoint {HEAD_NODE}:{RENDEZVOUS_PORT}"
    return f"torchrun {where} --nproc-per-node {plan.ranks_per_node} {file}"


def _target(name: Literal["ddp", "fsdp2"], description: str, *, backend: str | None = None) -> Target:
    return Target(
        name=name,
        description=description,
        file_name=SCRIPT,
        media_type="text/x-python",
        unsupported=lambda job: _unsupported(job, name),
        write=_write,
        usage=torchrun_line,
        consumer="torch",
        backend=backend,
        compiles="any",
        converts=True,
        tiles=True,
    )


FSDP2 = _target("fsdp2", "PyTorch FSDP2 training script (Python)")
DDP = _target("ddp", "PyTorch DDP training script (Python)", backend="ddp")
