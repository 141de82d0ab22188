"""The comment lines that open an export: the job, its batch, the predicted peak, and the versions checked against."""

from __future__ import annotations

from fsdp_advisor.export.constants import FRAMEWORK_NAMES, VERSIONS
from fsdp_advisor.export.job import PEAKS, Job
from fsdp_advisor.units import format_gib, format_tokens


def header(job: Job, *packages: str) -> str:
    """The header of a file, as comments of Python, YAML and shell. `packages` are those whose versions it names."""
    plan = job.plan
    steps, ranks = plan.gradient_accumulation_steps, plan.world_size
    batch = f"micro-batch {plan.micro_batch_size} x accumulation {steps} x ranks {ranks}"
    lines = [job.title, f"Batch: {batch} = {job.global_batch_size}, each of {format_tokens(plan.seq_len)}."]
    lines.append(_prediction(job))
    if job.environment:
        variables = ", ".join(f"{name}={value}" for name, value in job.environment.items())
        lines.append(f"Predicted with {variables} in the environment.")
    if plan.offload != "none":
        lines.append(f"Predicted host memory per node: {format_gib(job.host_bytes_per_node)}.")
    versions = ", ".join(f"{package} {VERSIONS[package]}" for package in packages)
    lines.append(f"Checked against {versions}. Written by fsdp-advisor.")
    return "".join(f"# {_printable_line(line)}".rstrip() + "\n" for line in lines)


def _prediction(job: Job) -> str:
    if job.peak is None or job.margin is None:
        return "Predicted peak: unknown."
    verdict = f"margin {100 * job.margin:.1f} %" if job.margin >= 0 else "it does not fit"
    peak, memory = format_gib(job.peaks[job.peak]), format_gib(job.gpu_memory_bytes)
    by = f" under {FRAMEWORK_NAMES[job.plan.framework]}" if job.plan.uses_accelerate else ""
    return f"Predicted peak per GPU{by}: {peak} {PEAKS[job.peak]}; {job.gpu_name} has {memory}, {verdict}."


def _printable_line(text: str) -> str:
    """`text` on one line, with "?" for characters that do not print.

    A model's name may come from the network. It must not be able to end the comment that contains it.
    """
    return "".join(c if c.isprintable() else "?" for c in " ".join(text.split()))
