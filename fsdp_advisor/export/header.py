"""The plan in words, and the comment lines that open an export."""

from __future__ import annotations

from typing import Any

import yaml

from fsdp_advisor.export.constants import VERSIONS
from fsdp_advisor.export.job import PEAKS, Job
from fsdp_advisor.job.compilation import compiled_text
from fsdp_advisor.job.frameworks import FRAMEWORK_NAMES
from fsdp_advisor.job.lora_kernels import kernels_text
from fsdp_advisor.job.plan import Plan
from fsdp_advisor.job.training_task import sequences_per_example
from fsdp_advisor.model.tasks import task_of
from fsdp_advisor.units import format_gib, format_speed, format_tokens

CACHE_FILLS_BELOW = 0.08
"""If a smaller share of the GPU's memory stays free, a header also says how much of the peak is allocated memory."""


def header(job: Job, *packages: str) -> str:
    """The header of a file, as comments of Python, YAML and shell. `packages` are those whose versions it names."""
    return "".join(f"# {line}".rstrip() + "\n" for line in summary(job, *packages))


def yaml_text(config: dict[str, Any], job: Job, *packages: str) -> str:
    """A YAML file with its header."""
    return header(job, *packages) + yaml.safe_dump(config, sort_keys=False)


def summary(job: Job, *packages: str) -> tuple[str, ...]:
    """The whole plan, its prediction and the versions it was checked against, one sentence per line."""
    versions = ", ".join(f"{package} {VERSIONS[package]}" for package in packages)
    lines = [
        job.title,
        *(f"{name}: {value}." for name, value in plan_items(job)),
        *(f"{name}: {value}." for name, value in prediction_items(job)),
        f"Checked against {versions}. Written by fsdp-advisor.",
    ]
    return tuple(map(printable_line, lines))


def _layout(plan: Plan) -> str:
    """The layout of the batch (packed or padded) and its images, as the end of a sentence."""
    packed = f", packed {plan.packing}" if plan.packing != "none" else ""
    free = ", padding-free" if plan.padding_free else ""
    images = f", with {plan.images}" if plan.images is not None else ""
    return packed + free + images + (f", {plan.padding_fraction:.0%} padding" if plan.padding_fraction else "")


def plan_items(job: Job) -> tuple[tuple[str, str], ...]:
    """The plan as pairs of a name and a value in words."""
    plan = job.plan
    steps, ranks = plan.gradient_accumulation_steps, plan.world_size
    batch = f"micro-batch {plan.micro_batch_size} x accumulation {steps} x ranks {ranks}"
    sharding = f", {plan.replica_degree} replicas of {plan.shard_degree} shards" if plan.strategy == "hsdp" else ""
    offload = plan.offload if plan.offload == "none" else f"{plan.offload} to {plan.offload_device}"
    offloaded = " with offload" if plan.activation_offload else ""
    example = "two sequences of " if sequences_per_example(plan.task) == 2 else ""
    items = [
        ("Strategy", f"{plan.strategy} by {plan.backend}{sharding}, offload {offload}, framework {plan.framework}"),
        (
            "Batch",
            f"{batch} = {plan.global_batch_size}, each of {example}{format_tokens(plan.seq_len)}{_layout(plan)}",
        ),
        (
            "Step",
            f"activation checkpointing {plan.activation_checkpointing}{offloaded}, {plan.attention} attention, {plan.optim}"
            + (f", loss {plan.loss_code}" if plan.loss_code != "full" else "")
            + (", Liger's kernels" if plan.use_liger_kernel else "")
            + (f", {compiled_text(plan)}" if plan.compile != "none" else "")
            + (f", fp8 {plan.fp8}" if plan.fp8 != "none" else "")
            + (f", MLP in shards ({plan.tiled_mlp})" if plan.tiled_mlp != "none" else "")
            + (f", experts {plan.experts_implementation}" if plan.experts_implementation != "grouped_mm" else "")
            + (f", kernel packages {plan.kernel_packages}" if plan.kernel_packages != "all" else "")
            + (f", task {plan.task}, reference {plan.reference}" if plan.task != "sft" else ""),
        ),
    ]
    if plan.evaluation is not None:
        items.append(("Evaluation", plan.evaluation.text))
    if plan.generation is not None:
        items.append(("Completions", plan.generation.text))
    if plan.backend in ("fsdp1", "fsdp2"):
        prefetch = f", backward prefetch {plan.backward_prefetch}" if plan.backend == "fsdp1" else ""
        items.append(("Units", f"wrap {plan.wrap}{prefetch}"))
    if job.adaptation.text:
        kernels = kernels_text(plan.framework, job.adaptation, job.lora_kernels)
        items.append(("Trained", ", ".join(filter(None, (job.adaptation.text, kernels)))))
    variables = ", ".join(f"{name}={value}" for name, value in job.environment.items())
    items.append(("Environment", variables or "no variables"))
    return tuple(items)


def prediction_items(job: Job) -> tuple[tuple[str, str], ...]:
    """The predicted memory and speed as pairs of a name and a value in words."""
    by = f" under {FRAMEWORK_NAMES[job.plan.framework]}" if job.plan.uses_accelerate else ""
    host_bytes = job.host_bytes_per_node
    host = f"{'unknown' if host_bytes is None else _gib_or_none(host_bytes)} in training"
    if job.loading is not None:
        way, n_bytes = job.loading
        host += f", {_gib_or_none(n_bytes)} while it loads the model ({way.replace('_', ' ')})"
    return (
        (f"Predicted peak per GPU{by}", _peak(job)),
        ("Predicted host memory per node", host),
        ("Predicted speed", _speed(job)),
    )


def _gib_or_none(n_bytes: int) -> str:
    return format_gib(n_bytes) if n_bytes else "none"


def _speed(job: Job) -> str:
    if job.tokens_per_second_per_gpu is None or job.step_seconds is None:
        return "unknown"
    task = task_of(job.task)
    per_item = 1 if task.takes_any_length else job.plan.seq_len
    rate = format_speed(job.tokens_per_second_per_gpu / per_item).replace("tokens", task.counted)
    return f"{rate} per GPU, {job.step_seconds:.3g} s per step"


def _peak(job: Job) -> str:
    if job.peak is None or job.margin is None:
        return "unknown"
    verdict = f"margin {100 * job.margin:.1f} %" if job.margin >= 0 else "it does not fit"
    peak, memory = format_gib(job.peaks[job.peak]), format_gib(job.gpu_memory_bytes)
    allocated = job.peaks.get("peak_allocated_bytes")
    cache = ""
    if allocated is not None and 0 <= job.margin < CACHE_FILLS_BELOW:
        cache = f" ({format_gib(allocated)} allocated; the allocator's cache fills the rest, and is freed when memory is needed)"
    return f"{peak} {PEAKS[job.peak]}{cache}; {job.gpu_name} has {memory}, {verdict}"


def printable_line(text: str) -> str:
    """`text` on one line, with "?" for characters that do not print.

    A model's name may come from the network. It must not be able to end the comment that contains it.
    """
    return "".join(c if c.isprintable() else "?" for c in " ".join(text.split()))
