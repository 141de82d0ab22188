"""Changes that make a job fit that ran out of memory, the cheapest first.

Some follow from the error or the snapshot alone: other processes, limits, fragmentation, memory that is kept by mistake. If the job is
known, its options are also changed one at a time and estimated; the excess of the failed run over its own estimate is added. The changes
of `advice.remedies` come last.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fsdp_advisor.advice import recommend_resolved
from fsdp_advisor.assumptions import stores_frozen_base_in_fp32
from fsdp_advisor.diagnosis.attribution import EARLIER_STEP
from fsdp_advisor.diagnosis.facts import Category, Change, Holding, Moment, OutOfMemory
from fsdp_advisor.diagnosis.prediction import DiagnosedJob, requests_logits
from fsdp_advisor.errors import AdvisorError
from fsdp_advisor.estimator import estimate_resolved
from fsdp_advisor.job.choices import half_dtype
from fsdp_advisor.job.fields import fields_of
from fsdp_advisor.job.frameworks import EXPANDABLE_SEGMENTS
from fsdp_advisor.job.losses import losses_without_logits
from fsdp_advisor.job.request import EstimateRequest
from fsdp_advisor.job.search_request import RecommendRequest
from fsdp_advisor.program.accounts import GROUPS
from fsdp_advisor.units import format_bytes, format_gib

_LARGE_SHARE = 0.1
"""No change is suggested for a category below this share of the memory."""
_SHARDED = ("zero2", "zero3")
_ENOUGH = ", which is enough"
_FUSED_LOSS = "use a fused or chunked loss, such as Liger's fused linear cross-entropy"
_LIKE_LOGITS = 2**30
"""A request of a backward pass of at least this size may be for the gradient of all logits; few other tensors are as large."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """The facts from which changes are derived. `lacking_in_estimate`: bytes by which the job's estimate exceeds the GPU."""

    error: OutOfMemory | None
    moment: Moment
    memory: Mapping[Category, int]
    holdings: Sequence[Holding]
    checkpointed: bool
    expandable: bool
    lacking_in_estimate: int = 0

    @property
    def lacking_bytes(self) -> int | None:
        """Bytes that the failed allocation lacked, or that the job lacks by its estimate, if that is more. None if unknown."""
        error = self.error
        if error is None or error.requested_bytes is None:
            return None
        free = error.free_bytes or 0
        if error.allowed_bytes is not None and error.reserved_bytes is not None:
            free = min(free, error.allowed_bytes - error.reserved_bytes)
        return max(error.requested_bytes - max(free, 0), self.lacking_in_estimate)


def changes(facts: Facts, job: DiagnosedJob | None) -> tuple[Change, ...]:
    """All changes to suggest: first freeing memory that is not needed, then changes of the job, then changes that are not enough alone."""
    if job is not None and (headroom := job.row.headroom_bytes) is not None and headroom < 0:
        facts = replace(facts, lacking_in_estimate=-headroom)
    general = [*_freeing(facts), *_less(facts, job)]
    if job is None:
        return tuple(general)
    enough = [change for change in general if change.because.endswith(_ENOUGH)]
    loss = [*_fused_loss(job, facts)]
    others = [change for change in general if change not in enough and not (loss and change.what == _FUSED_LOSS)]
    return (*enough, *loss, *_of_job(job, facts), *others)


def _fused_loss(job: DiagnosedJob, facts: Facts) -> Iterator[Change]:
    """A loss that never has all logits, if the job ran out of memory for them."""
    row, plan = job.row, job.plan
    of_logits = requests_logits(job, facts.error)
    losses = losses_without_logits(plan.loss_code, plan.framework, plan.task, job.report.task)
    loss_bytes = (row.at_peak or {}).get("loss", 0)
    if not losses or not loss_bytes or not (of_logits or facts.moment.phase == "loss"):
        return
    why = "the failed request has the size of all logits" if of_logits else "the error occurred in the loss"
    yield Change(
        what=f"--loss {' or '.join(losses)}",
        because=f"{why}, which such a loss never has at once; they hold {format_gib(loss_bytes)} at the estimate's peak",
        options={"loss": losses[0]},
        saves_bytes=loss_bytes,
    )


def _freeing(facts: Facts) -> Iterator[Change]:
    """Changes that free memory which training does not need at all."""
    error, lacking = facts.error, facts.lacking_bytes
    if error is not None and error.other_processes:
        total = sum(error.other_processes.values())
        pids = ", ".join(f"{pid} ({format_bytes(n)})" for pid, n in error.other_processes.items())
        shared = len(error.other_processes) > 1 and error.gpu == 0
        several = "; several ranks on one GPU: call torch.cuda.set_device(local_rank) first" if shared else ""
        yield Change(
            what=f"end the other processes on this GPU: {pids}{several}",
            because=f"they hold {format_bytes(total)}{_enough(total, lacking)}",
            saves_bytes=total,
        )
    outside = facts.memory.get("outside", 0)
    if error is not None and not error.other_processes and outside > _LARGE_SHARE * sum(facts.memory.values()):
        yield Change(
            what="look for other processes with nvidia-smi, and check that the GPU is the one of the job",
            because=f"{format_bytes(outside)} are in use outside of PyTorch's allocator{_enough(outside, lacking)}",
            saves_bytes=outside,
        )
    if error is not None and error.allowed_bytes is not None and error.total_bytes is not None:
        more = error.total_bytes - error.allowed_bytes
        if more > 0:
            yield Change(
                what="raise the limit of set_per_process_memory_fraction or per_process_memory_fraction",
                because=f"it allows {format_bytes(error.allowed_bytes)} of {format_bytes(error.total_bytes)}",
                saves_bytes=more,
            )
    fragmentation = facts.memory.get("fragmentation", 0)
    if not facts.expandable and lacking is not None and fragmentation >= max(lacking, 1):
        yield Change(
            what=f"set PYTORCH_ALLOC_CONF={EXPANDABLE_SEGMENTS} (before torch 2.9: PYTORCH_CUDA_ALLOC_CONF)",
            because=f"{format_bytes(fragmentation)} are reserved and in no tensor{_enough(fragmentation, lacking)}",
            options={"allocator_conf": EXPANDABLE_SEGMENTS},
            saves_bytes=fragmentation,
        )
    yield from _kept_by_mistake(facts)


def _kept_by_mistake(facts: Facts) -> Iterator[Change]:
    lacking = facts.lacking_bytes
    cache = sum(h.n_bytes for h in facts.holdings if "cache_utils.py" in h.where)
    if cache and facts.moment.phase in ("backward", "optimizer"):  # in forward, attention saves the same tensors
        yield Change(
            what="pass use_cache=False, or set model.config.use_cache = False",
            because=f"the cache of keys and values keeps {format_bytes(cache)} until the outputs are deleted",
            saves_bytes=cache,
        )
    left = sum(h.n_bytes for h in facts.holdings if h.where.startswith(EARLIER_STEP))
    if left > _LARGE_SHARE * sum(facts.memory.values()):
        yield Change(
            what="delete outputs and losses of the last step before the next one, and log loss.item() or loss.detach()",
            because=f"{format_bytes(left)} are left from earlier steps{_enough(left, lacking)}",
            saves_bytes=left,
        )


def _less(facts: Facts, job: DiagnosedJob | None) -> Iterator[Change]:
    """Changes that reduce memory which training needs in its present form, for the largest categories first. For a known job the
    estimate decides instead.
    """
    memory, lacking = facts.memory, facts.lacking_bytes
    limit = _LARGE_SHARE * sum(memory.values())
    found: list[tuple[int, Change]] = []
    loss, activations = memory.get("loss", 0), memory.get("activations", 0)
    if loss > limit:
        found.append((loss, Change(
            what=_FUSED_LOSS,
            because=f"logits and loss hold {format_bytes(loss)}{_enough(loss, lacking)}", saves_bytes=loss,
        )))  # fmt: skip
    if activations > limit and job is None:
        if not facts.checkpointed:
            found.append((activations, Change(
                what="switch on activation checkpointing",
                because=f"activations hold {format_bytes(activations)}; all but the layers' inputs can be recomputed",
                options={"activation_checkpointing": "full"}, saves_bytes=activations,
            )))  # fmt: skip
        found.append((activations // 2, Change(
            what="halve the micro-batch and double gradient accumulation",
            because=f"activations hold {format_bytes(activations)} and halve with it", saves_bytes=activations // 2,
        )))  # fmt: skip
    states = {name: memory.get(name, 0) for name in GROUPS["states"]}
    if sum(states.values()) > 3 * limit and job is None:
        largest = max(states, key=lambda name: states[name])
        found.append((sum(states.values()) // 2, Change(
            what="shard parameters, gradients and optimizer state (FSDP, ZeRO-3) over more GPUs, or offload them",
            because=f"they hold {format_bytes(sum(states.values()))}, most of it {largest}",
        )))  # fmt: skip
    if job is None and "allocated" in memory:
        yield from _without_categories(facts)
    yield from (change for _, change in sorted(found, key=lambda item: -item[0]))


def _without_categories(facts: Facts) -> Iterator[Change]:
    """General advice for an error message, by the moment at which it occurred."""
    match facts.moment.phase:
        case "loading":
            yield Change(
                what="shard the model while it loads: build it on the meta device, or load shards rank by rank",
                because="the error occurred while the model was loaded, before any activation",
            )
        case "optimizer":
            yield Change(
                what="shard the optimizer state over more GPUs (ZeRO, FSDP), use an 8-bit optimizer, or offload it",
                because="the error occurred in the optimizer step, which makes the optimizer state in its first step",
            )
        case "loss":
            yield Change(
                what=_FUSED_LOSS,
                because="the error occurred in the loss, which keeps several copies of the logits",
            )
            yield _smaller_batch()
        case "forward" | "backward":
            error = facts.error
            if facts.moment.phase == "backward" and error is not None and (error.requested_bytes or 0) >= _LIKE_LOGITS:
                yield Change(
                    what=f"if the request is sequences x tokens x vocabulary x 2 or 4 bytes, {_FUSED_LOSS}",
                    because=f"{format_gib(error.requested_bytes or 0)} are then the gradient of all logits, with which backward begins",
                )
            yield Change(
                what="switch on activation checkpointing",
                because=f"the error occurred in {facts.moment.phase}, where activations are largest",
                options={"activation_checkpointing": "full"},
            )
            yield _smaller_batch()
        case "unknown":
            yield _smaller_batch()


def _smaller_batch() -> Change:
    return Change(
        what="halve the micro-batch and double gradient accumulation, or shorten the sequence",
        because="activations and logits are proportional to both",
    )


def _of_job(job: DiagnosedJob, facts: Facts) -> Iterator[Change]:
    """Changes of the job's options after which its estimate fits, together with what the job used beyond its estimate."""
    if job.row.needed_bytes is None:
        return
    excess = _excess(job, facts.error)
    if job.row.fits and not excess:
        return
    seen: list[Mapping[str, Any]] = []
    for options, what in _attempts(job):
        needed = _needed(job, options)
        if needed is not None and needed + excess <= job.report.gpu_memory_bytes:
            seen.append(options)
            beyond = f", with the {format_gib(excess)} that this run used beyond its estimate" if excess else ""
            yield Change(
                what=what,
                because=f"the job then needs {format_gib(needed + excess)} of {format_gib(job.report.gpu_memory_bytes)}{beyond}",
                options=options,
                saves_bytes=job.row.needed_bytes - needed,
            )
    if job.row.fits:
        if not seen:
            yield Change(
                what=f"fsdp-advisor recommend --margin {_margin(job, excess):.0%}, with the options of the job",
                because=f"no single option saves the {format_gib(excess)} that this run used beyond its estimate",
            )
        return
    for remedy in _remedies(job):
        if dict(remedy.options) not in [dict(options) for options in seen]:
            yield Change(what=remedy.command or "change the loss", because=remedy.because, options=remedy.options)


def _margin(job: DiagnosedJob, excess: int) -> float:
    """The margin that leaves the excess free in addition to `recommend`'s usual margin, at most 90 %."""
    return min(RecommendRequest(model=job.request.model).margin + excess / job.report.gpu_memory_bytes, 0.9)


def _excess(job: DiagnosedJob, error: OutOfMemory | None) -> int:
    """Bytes that the run needed when it failed, including the failed request, minus its estimate."""
    if error is None or error.requested_bytes is None or error.free_bytes is None or job.row.needed_bytes is None:
        return 0
    total = error.total_bytes or job.report.gpu_memory_bytes
    return max(total - error.free_bytes + error.requested_bytes - job.row.needed_bytes, 0)


def _attempts(job: DiagnosedJob) -> Iterator[tuple[dict[str, Any], str]]:
    """(options to try, description), ordered by their cost in time, the cheapest first."""
    plan, request = job.plan, job.request
    if not request.allocator_conf:
        yield {"allocator_conf": EXPANDABLE_SEGMENTS}, f"PYTORCH_ALLOC_CONF={EXPANDABLE_SEGMENTS}"
    if stores_frozen_base_in_fp32(request):
        yield {"dtype": (half := half_dtype(request.precision))}, f"--dtype {half}"
    batch, accumulation = plan.micro_batch_size, plan.gradient_accumulation_steps
    while batch % 2 == 0:
        batch, accumulation = batch // 2, accumulation * 2
        options = {"micro_batch_size": batch, "gradient_accumulation_steps": accumulation}
        yield options, f"--micro-batch-size {batch} --gradient-accumulation-steps {accumulation}"
    if plan.world_size > 1 and plan.strategy != "zero3":
        for strategy in _SHARDED[_SHARDED.index(plan.strategy) + 1 if plan.strategy in _SHARDED else 0 :]:
            yield {"strategy": strategy, "backend": "auto"}, f"--strategy {strategy}"
    if plan.activation_checkpointing == "none":
        yield {"activation_checkpointing": "full"}, "--activation-checkpointing full"


def _fixed(job: DiagnosedJob) -> dict[str, Any]:
    """The options of the job with the strategy of its row."""
    plan = job.plan
    values = {name: getattr(job.request, name) for name in fields_of(EstimateRequest)}
    decided = ("strategy", "backend", "offload", "offload_device", "micro_batch_size", "gradient_accumulation_steps")
    return values | {name: getattr(plan, name) for name in decided} | {"global_batch_size": None}


def _needed(job: DiagnosedJob, options: Mapping[str, Any]) -> int | None:
    """Bytes that the job needs with other options; None if it is impossible or unknown."""
    try:
        row = estimate_resolved(EstimateRequest(**(_fixed(job) | dict(options))), job.model).estimates[0]
    except (AdvisorError, ValueError):
        return None
    return row.needed_bytes


def _remedies(job: DiagnosedJob) -> Sequence[Any]:
    """The remedies of `recommend` if all options of the job are fixed; empty if it cannot search this job."""
    request = RecommendRequest(**(_fixed(job) | {"activation_checkpointing": job.plan.activation_checkpointing}))
    try:
        return recommend_resolved(job.report, job.model, request).remedies
    except AdvisorError:
        return ()


def _enough(saved: int, lacking: int | None) -> str:
    return _ENOUGH if lacking is not None and saved >= lacking > 0 else ""
