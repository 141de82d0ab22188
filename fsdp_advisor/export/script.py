"""A complete training script in plain PyTorch: FSDP2, or DDP, as the estimate assumes them.

Source: torch 2.13, torch.distributed.fsdp (`fully_shard`), torch.distributed.checkpoint, torch.nn.parallel; transformers 5.23.0.
"""

from __future__ import annotations

from fsdp_advisor.export.job import WEIGHTS, Job, Target, comments, header, no_8bit_on_fsdp2, with_environment
from fsdp_advisor.export.launch import RENDEZVOUS_PORT, SCRIPT
from fsdp_advisor.export.rendering import render
from fsdp_advisor.policies.optimizers import optimizer_named
from fsdp_advisor.policies.optimizers.interface import Refusal

AUTO = {
    "causal-lm": "AutoModelForCausalLM",
    "masked-lm": "AutoModelForMaskedLM",
    "seq2seq-lm": "AutoModelForSeq2SeqLM",
    "speech-seq2seq": "AutoModelForSpeechSeq2Seq",
    "image-classification": "AutoModelForImageClassification",
}
"""The class that transformers trains a task with."""

COMPUTE = {"bf16-mixed": "bfloat16", "fp16-mixed": "float16"}


def _cannot(job: Job, backend: str) -> str | None:
    if job.plan.backend != backend:
        return f"it trains with {'FSDP2' if backend == 'fsdp2' else 'DDP'}"
    if job.task is None:
        return "a bare parameter count is no model"
    optimizer = optimizer_named(job.plan.optim)
    if isinstance(optimizer.script, Refusal):
        return optimizer.script.reason
    return no_8bit_on_fsdp2(job.plan)


def _write(job: Job, checked: tuple[str, ...]) -> tuple[str, tuple[str, ...]]:
    plan = job.plan
    optimizer = optimizer_named(plan.optim).script
    assert job.task is not None and not isinstance(optimizer, Refusal)
    text = render(
        "train.py.jinja",
        header=comments(header(job, *checked)),
        launch=with_environment(job, _launch(job, SCRIPT)),
        script=SCRIPT,
        plan=plan,
        model=job.model_name,
        auto=AUTO[job.task],
        task=job.task,
        layers=list(job.layer_classes) if plan.wrap == "layer" else [],
        predicted=job.peaks.get(job.allocated or ""),
        fsdp=plan.backend == "fsdp2",
        reshard=plan.strategy in ("zero3", "hsdp"),
        offload=plan.offload == "parameters",
        weights=WEIGHTS[plan.precision],
        compute=COMPUTE.get(plan.precision),
        scaled=plan.precision == "fp16-mixed",
        checkpointing=plan.activation_checkpointing == "full",
        optimizer=optimizer.call(),
        bitsandbytes=optimizer.module.startswith("bitsandbytes"),
    )
    return text, ()


def _launch(job: Job, file: str) -> str:
    plan = job.plan
    where = "--standalone"
    if plan.nnodes > 1:
        where = f"--nnodes {plan.nnodes} --rdzv-backend c10d --rdzv-endpoint HEAD_NODE:{RENDEZVOUS_PORT}"
    return f"torchrun {where} --nproc-per-node {plan.ranks_per_node} {file}"


def _target(name: str, description: str, *, backend: str | None = None) -> Target:
    packages = ("torch", "transformers")
    return Target(
        name=name,
        description=description,
        file_name=SCRIPT,
        media_type="text/x-python",
        checked=packages,
        cannot=lambda job: _cannot(job, name),
        write=lambda job: _write(job, packages),
        usage=_launch,
        backend=backend,
    )


FSDP2 = _target("fsdp2", "PyTorch FSDP2 training script (Python)")
DDP = _target("ddp", "PyTorch DDP training script (Python)", backend="ddp")
