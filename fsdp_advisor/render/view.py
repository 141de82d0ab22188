"""`ReportView`: everything that text, Markdown, the page and the charts show of a report, prepared once."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from fsdp_advisor.job.adaptation import adaptation_of
from fsdp_advisor.job.choices import Backend
from fsdp_advisor.job.compilation import compiled_text
from fsdp_advisor.job.generation import generation_of
from fsdp_advisor.job.images import images_of
from fsdp_advisor.job.lora_kernels import kernels_text
from fsdp_advisor.model.tasks import task_of
from fsdp_advisor.render.parts import PARTS, STATES, MemoryPart, PartBytes, bar_parts
from fsdp_advisor.render.sizes import NONE, UNKNOWN, Sizes, format_rate
from fsdp_advisor.render.way_out import way_out
from fsdp_advisor.report import Report
from fsdp_advisor.strategy_estimate import StrategyEstimate
from fsdp_advisor.units import format_count
from fsdp_advisor.verdict import verdict_text


@dataclass(frozen=True, slots=True, kw_only=True)
class RowView:
    """One strategy. The figures are those of the estimate; the texts are the same figures as every interface writes them.

    `name` is the value for `--explain`. `states_bytes`: bytes that a rank keeps between steps. `throughput`: tokens or images (as the task
    counts) per second per GPU. `textbook_text`: the sum of `state_texts` for a bare parameter count, else
    None. `parts` sum to `needed_bytes`, or are only the states if the peak is unknown. `why` says where the peak is,
    or why it is unknown.
    """

    name: str
    label: str
    strategy: str
    offload: str
    backend: Backend
    fits: bool | None
    needed_bytes: int | None
    states_bytes: int
    host_bytes_per_node: int | None
    throughput: float | None
    parts: PartBytes
    needed_text: str
    states_text: str
    state_texts: dict[str, str]
    textbook_text: str | None
    host_text: str
    throughput_text: str
    verdict: str
    why: str
    specific_omissions: tuple[str, ...]

    @property
    def peak_known(self) -> bool:
        return self.needed_bytes is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Omission:
    """An effect that no figure contains, and the labels of the rows that lack it; no labels: all rows."""

    text: str
    labels: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportView:
    """A report as every interface shows it. `legend` are the parts that bars are made of, `footnotes` explain columns."""

    job: str
    job_items: tuple[str, ...]
    gpus: int
    gpu_name: str
    gpu_memory_bytes: int
    sizes: Sizes
    throughput_unit: str
    rows: tuple[RowView, ...]
    legend: tuple[MemoryPart, ...]
    footnotes: tuple[str, ...]
    warnings: tuple[str, ...]
    omissions: tuple[Omission, ...]
    way_out: str
    """What to change if nothing fits, or only plans with offload fit; empty otherwise."""

    @property
    def peaks_known(self) -> bool:
        """Whether any row has a peak."""
        return any(row.peak_known for row in self.rows)

    @property
    def timed(self) -> bool:
        """Whether any row has a throughput."""
        return any(row.throughput is not None for row in self.rows)

    @property
    def offloads(self) -> bool:
        return any(row.offload != NONE for row in self.rows)

    @property
    def uses_host(self) -> bool:
        return any(row.host_bytes_per_node for row in self.rows)

    @property
    def omission_lines(self) -> tuple[str, ...]:
        """Lines about effects that are missing from all rows, then about rows that lack more, with the command that names those effects."""
        common = [omission.text for omission in self.omissions if not omission.labels]
        lines = [f"Not modelled: {'; '.join(common)}."] if common else []
        if more := [row for row in self.rows if row.specific_omissions]:
            labels = ", ".join(row.label for row in more)
            lines.append(f"Some effects are not modelled for {labels}; see --explain {more[0].name}.")
        return tuple(lines)

    @property
    def explain_hint(self) -> str:
        """The options that explain the fastest row that fits (on one GPU the first: a plain training loop), or the smallest row, and one
        that does not fit; empty if no peak is known.
        """
        known = [row for row in self.rows if row.peak_known]
        if not known:
            return ""
        fitting = [row for row in known if row.fits]
        if not fitting:
            row = min(known, key=lambda row: row.needed_bytes or 0)
        else:
            row = fitting[0] if self.gpus == 1 else max(fitting, key=lambda row: row.throughput or 0.0)
        hint = f"For memory at the peak and through the step: --explain {row.name}"
        too_large = next((other for other in known if other.fits is False and other is not row), None)
        return hint if too_large is None else f"{hint}; why {too_large.label} does not fit: --explain {too_large.name}"


def report_view(report: Report) -> ReportView:
    """The view of a report."""
    sizes = Sizes.of(report)
    unit = f"{task_of(report.task).counted}/s"
    omissions = _omissions(report.estimates)
    rows = tuple(_row(report, estimate, sizes, omissions) for estimate in report.estimates)
    known = any(row.peak_known for row in rows)
    items = job_items(report)
    return ReportView(
        job=_job_line(report, sizes),
        job_items=items,
        gpus=report.request.gpus,
        gpu_name=report.gpu_name,
        gpu_memory_bytes=report.gpu_memory_bytes,
        sizes=sizes,
        throughput_unit=unit,
        rows=rows,
        legend=PARTS if known else (STATES,),
        footnotes=_footnotes(report, rows, sizes, unit),
        warnings=merge_warnings(report.estimates),
        omissions=omissions,
        way_out=way_out(report),
    )


def row_name(estimate: StrategyEstimate) -> str:
    """The name of a row for `--explain`: `zero3`, `zero3+optimizer`."""
    plan = estimate.plan
    return plan.strategy if plan.offload == "none" else f"{plan.strategy}+{plan.offload}"


def _row(report: Report, estimate: StrategyEstimate, sizes: Sizes, omissions: Sequence[Omission]) -> RowView:
    plan = estimate.plan
    rate = throughput_of(report, estimate)
    return RowView(
        name=row_name(estimate),
        label=estimate.label,
        strategy=estimate.label.partition(" ")[0],
        offload=plan.offload if plan.offload != "none" else NONE,
        backend=plan.backend,
        fits=estimate.fits,
        needed_bytes=estimate.needed_bytes,
        states_bytes=estimate.kept_bytes,
        host_bytes_per_node=estimate.host_bytes_per_node,
        throughput=rate,
        parts=bar_parts(estimate),
        needed_text=sizes.bare(estimate.needed_bytes),
        states_text=sizes.bare(estimate.kept_bytes),
        state_texts={name: sizes.bare(n) for name, n in estimate.states.items()},
        textbook_text=sizes.bare(sum(estimate.states.values())) if report.model_source == "count" else None,
        host_text=sizes.bare_or_none(estimate.host_bytes_per_node),
        throughput_text=UNKNOWN if rate is None else format_rate(rate),
        verdict=verdict_text(report, estimate, sizes.full),
        why=_why(estimate),
        specific_omissions=tuple(o.text for o in omissions if estimate.label in o.labels),
    )


def throughput_of(report: Report, estimate: StrategyEstimate) -> float | None:
    """Tokens, or images if the model reads images, per second per GPU; None if the time is unknown."""
    if estimate.step is None:
        return None
    return task_of(report.task).samples_or_tokens(estimate.step.tokens_per_second_per_gpu, report.seq_len)


def _why(estimate: StrategyEstimate) -> str:
    if estimate.peak_phase is None:
        return why_unknown(estimate)
    return f"the peak is in {estimate.peak_phase}, at {estimate.peak_where}"


def _footnotes(report: Report, rows: Sequence[RowView], sizes: Sizes, throughput_unit: str) -> tuple[str, ...]:
    """Sentences that explain the columns."""
    known = any(row.peak_known for row in rows)
    notes = [f"Sizes in {sizes.unit_with_meaning}."]
    if report.model_source == "count":
        notes.append("textbook: parameters P, gradients G and optimizer states O, by the formulas of the ZeRO paper.")
    if known:
        notes.append("needs: memory of one GPU at the worst moment of the job, with fragmentation, CUDA and NCCL.")
    kept = (
        "(parameters, gradients, optimizer state, buffers)" if report.model_source != "count" else "with this backend"
    )
    notes.append(f"states: what a rank keeps between steps {kept}.")
    if any(row.throughput is not None for row in rows):
        notes.append(f"{throughput_unit}: per GPU.")
    if any(row.host_bytes_per_node for row in rows):
        notes.append("host: memory per node.")
    on_gpu = {estimate.plan.strategy for estimate in report.estimates if estimate.plan.offload == "none"}
    if report.request.gpus == 1 and len(on_gpu) > 1:
        notes.append(
            "On one GPU, DDP is a plain training loop, and ZeRO shards nothing: without offload, its rows differ only in what their engines"
            " do."
        )
    return tuple(notes)


def batch_items(report: Report) -> tuple[str, ...]:
    """The micro-batch and the length of a sample; empty if the model is only a number of parameters."""
    if report.model_source == "count":
        return ()
    request = report.request
    length = task_of(report.task).of_length(report.seq_len, images=request.images_per_sample)
    return f"micro-batch {request.micro_batch_size}", length


def job_items(report: Report) -> tuple[str, ...]:
    """The options of the job that its figures depend on."""
    request = report.request
    has_step = report.model_source != "count"
    accumulation, checkpointing = request.gradient_accumulation_steps, request.activation_checkpointing
    reference = " with the reference's log-probabilities precomputed" if request.precompute_ref_log_probs else ""
    images, generation = images_of(request), generation_of(request)
    adaptation = adaptation_of(request).on_checkpoint(report.packed)
    kernels = max((row.lora_kernels for row in report.estimates), key=len, default=())
    shown_if = {
        **dict.fromkeys(batch_items(report), True),
        request.precision: True,
        request.optim: True,
        request.attention: has_step,
        f"accumulation {accumulation}": has_step and accumulation > 1,
        f"{'no' if checkpointing == 'none' else checkpointing} activation checkpointing": has_step,
        "Liger's kernels": request.use_liger_kernel,
        f"experts {request.experts_implementation}": request.experts_implementation != "grouped_mm",
        f"busiest expert {request.expert_imbalance:g} times the mean": request.expert_imbalance != 1.0,
        f"kernel packages {request.kernel_packages}": request.kernel_packages != "all",
        "activations on the host": request.activation_offload,
        compiled_text(request): request.compile != "none",
        f"MLP in shards ({request.tiled_mlp})": request.tiled_mlp != "none",
        adaptation.text: True,
        kernels_text(request.framework, adaptation, kernels): True,
        f"weights in {request.dtype}": request.dtype != "auto",
        "one FSDP unit" if request.wrap == "none" else f"FSDP units {request.wrap}": request.wrap != "layer",
        f"framework {request.framework}": request.framework != "torch",
        f"packed {request.packing}": request.packing != "none",
        "padding-free": request.padding_free,
        f"{request.padding_fraction:.0%} padding": request.padding_fraction > 0,
        str(images): images is not None,
        f"task {request.task}{reference}": request.task != "sft",
        generation.text if generation else "": True,
        f"weight {request.router_aux_loss_coef} of the routers' loss": request.router_aux_loss_coef is not None,
        f"offload to {request.offload_device}": request.offload != "none" and request.offload_device != "cpu",
    }
    return tuple(item for item, shown in shown_if.items() if item and shown)


def model_text(report: Report) -> str:
    """The model's name and size, `NAME (6.74B parameters)`, with the trainable parameters if they are fewer."""
    total, trainable = format_count(report.parameters), format_count(report.trainable_parameters)
    return f"{report.model_name} ({total} parameters{f', {trainable} trainable' if trainable != total else ''})"


def _job_line(report: Report, sizes: Sizes) -> str:
    request = report.request
    nodes = f" on {request.nnodes} nodes" if request.nnodes > 1 else ""
    gpus = f"{request.gpus} x {report.gpu_name} ({sizes.full(report.gpu_memory_bytes)}{' each' if request.gpus > 1 else ''}){nodes}"
    return f"{model_text(report)} on {gpus}: {', '.join(job_items(report))}"


_NUMBER = re.compile(r"\d+(\.\d+)?")


def merge_warnings(estimates: Sequence[StrategyEstimate]) -> tuple[str, ...]:
    """The rows' warnings, each once. Those that differ only in numbers share the first row's line, with `(likewise OTHER ROWS)`."""
    merged: dict[str, list[tuple[str, str]]] = {}
    for estimate in estimates:
        for warning in estimate.warnings:
            merged.setdefault(_NUMBER.sub("#", warning), []).append((estimate.label, warning))
    lines = []
    for (label, warning), *others in merged.values():
        if len(others) + 1 == len(estimates) and all(text == warning for _, text in others):
            lines.append(warning)
        else:
            likewise = f" (likewise {', '.join(other for other, _ in others)})" if others else ""
            lines.append(f"{label}: {warning}{likewise}")
    return tuple(lines)


def omitted_effects(estimate: StrategyEstimate) -> list[str]:
    """The effects that the row's figures lack, without the names of the JSON keys."""
    return [item.reason for item in estimate.omissions]


def why_unknown(estimate: StrategyEstimate) -> str:
    """Why a row has no `needed_bytes`: its step or evaluation is not recorded, or the model is only a parameter count."""
    return next((item.reason for item in estimate.omissions if item.hides_needed), "its step is not recorded")


def _omissions(estimates: Sequence[StrategyEstimate]) -> tuple[Omission, ...]:
    """The effects that figures do not contain: first those missing from all rows, then those missing from some."""
    labels: dict[str, list[str]] = {}
    for estimate in estimates:
        for text in dict.fromkeys(omitted_effects(estimate)):
            labels.setdefault(text, []).append(estimate.label)
    found = [
        Omission(text=text, labels=() if len(rows) == len(estimates) else tuple(rows)) for text, rows in labels.items()
    ]
    return tuple(sorted(found, key=lambda omission: bool(omission.labels)))
