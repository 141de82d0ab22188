"""What one plan needs and how long its step takes: the only place where advice asks the waist."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from fsdp_advisor.advice.batches import Batches
from fsdp_advisor.advice.curve import Curve
from fsdp_advisor.advice.families import Family, Job
from fsdp_advisor.advice.fragmentation import Allocator, Fragmentation
from fsdp_advisor.errors import AdvisorError, MissingExtra
from fsdp_advisor.estimator import estimate_plan, tensor_bytes
from fsdp_advisor.hardware import Gpu, usual_host_bytes
from fsdp_advisor.job.plan import Plan
from fsdp_advisor.memory.allocator import AllocatorConf
from fsdp_advisor.model.resolve import Resolved
from fsdp_advisor.report import StrategyEstimate

Timer = Callable[[Resolved, Plan, Gpu], float | None]
"""Seconds of one optimizer step; None where they are not known."""


def anything_goes(plan: Plan) -> bool:
    """No plan is ruled out."""
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One configuration with its verdict.

    `needed_bytes` is what is known cheaply, allocated bytes with what CUDA and NCCL take (None: a bare parameter count, of
    which `state_bytes` are known). `walked`: what the caching allocator reserves, with its fragmentation and under the
    settings `allocator_conf`; None where the allocator was not walked. `known_bytes`, the best figure of these, is to be at
    most `available_bytes`, the GPU's memory less the margin. `host_available_bytes` None: not asked about, so that it is
    only said, and comes last, what takes more than `host_usual_bytes`.
    """

    plan: Plan
    gpu: str
    needed_bytes: int | None
    state_bytes: int
    available_bytes: int
    host_bytes_per_node: int
    host_available_bytes: int | None = None
    host_usual_bytes: int | None = None
    step_seconds: float | None = None
    walked: Fragmentation | None = None

    @property
    def family(self) -> Family:
        return Family.of(self.plan)

    @property
    def host_fits(self) -> bool | None:
        if self.host_available_bytes is None:
            return None
        return self.host_bytes_per_node <= self.host_available_bytes

    @property
    def host_unusual(self) -> bool:
        """Whether it takes more of the host than a usual node has, and what this one has is not known."""
        usual = self.host_usual_bytes
        return self.host_available_bytes is None and usual is not None and self.host_bytes_per_node > usual

    @property
    def fits(self) -> bool | None:
        if self.host_fits is False or self.known_bytes > self.available_bytes:
            return False
        if self.walked is not None:
            return self.walked.fits
        return None if self.needed_bytes is None else True

    @property
    def known_bytes(self) -> int:
        """The best figure known of what it needs on a GPU; of a bare parameter count its states, which are the least."""
        if self.walked is not None:
            return self.walked.device_bytes
        return self.state_bytes if self.needed_bytes is None else self.needed_bytes

    @property
    def global_batch_size(self) -> int:
        return self.plan.micro_batch_size * self.plan.gradient_accumulation_steps * self.plan.world_size

    @property
    def tokens_per_second_per_gpu(self) -> float | None:
        if not self.step_seconds:
            return None
        return self.global_batch_size * self.plan.seq_len / self.plan.world_size / self.step_seconds

    @property
    def label(self) -> str:
        return self.family.label

    @property
    def allocator_conf(self) -> str | None:
        """What PYTORCH_ALLOC_CONF has to say for it to fit, or was asked to say."""
        return self.walked.allocator_conf if self.walked else None

    @property
    def environment(self) -> dict[str, str]:
        """Variables to launch it with."""
        return {"PYTORCH_ALLOC_CONF": self.allocator_conf} if self.allocator_conf else {}

    @property
    def order(self) -> tuple[Any, ...]:
        """Total: the faster first, what is not timed last, then the simpler, then the larger micro-batch; after all others what
        takes an unusual host."""
        speed = self.tokens_per_second_per_gpu
        plan = self.plan
        return (self.host_unusual, speed is None, -(speed or 0.0), self.family.simplicity, -plan.micro_batch_size, plan.seq_len, plan.world_size, self.gpu)  # fmt: skip

    def as_dict(self) -> dict[str, Any]:
        plan = self.plan
        return {
            "strategy": plan.strategy,
            "backend": plan.backend,
            "offload": plan.offload,
            "offload_device": plan.offload_device if plan.offload != "none" else None,
            "activation_checkpointing": plan.activation_checkpointing,
            "micro_batch_size": plan.micro_batch_size,
            "gradient_accumulation_steps": plan.gradient_accumulation_steps,
            "global_batch_size": self.global_batch_size,
            "seq_len": plan.seq_len,
            "gpus": plan.world_size,
            "nnodes": plan.nnodes,
            "gpu": self.gpu,
            "fits": self.fits,
            "needed_bytes": self.needed_bytes,
            "available_bytes": self.available_bytes,
            "peak_reserved_bytes": self.walked.reserved_bytes if self.walked else None,
            "peak_device_bytes": self.walked.device_bytes if self.walked else None,
            "environment": self.environment,
            "host_bytes_per_node": self.host_bytes_per_node,
            "step_seconds": self.step_seconds,
            "tokens_per_second_per_gpu": self.tokens_per_second_per_gpu,
        }


@dataclass(slots=True)
class Bytes:
    """Tensor bytes of one model's plans: the same on every GPU, so they are shared between them.

    Tensors are the least a plan needs: what is above the limit by them alone needs no other figure.
    """

    model: Resolved
    left_out: dict[Family, str] = field(default_factory=dict)
    _curves: dict[tuple[Family, Job, bool], Curve] = field(default_factory=dict)
    _recorded: set[tuple[Family, int]] = field(default_factory=set)
    _hints: dict[tuple[str, str, str, int], int] = field(default_factory=dict)

    def curve(self, family: Family, job: Job, *, accumulating: bool) -> Curve:
        """Over the micro-batch. Every accumulation from two on has the same peak."""
        key = (family, job, accumulating)
        if key not in self._curves:
            steps = 2 if accumulating else 1
            self._curves[key] = Curve(lambda size: tensor_bytes(self.model, family.plan(job, size, steps)))
        return self._curves[key]

    def largest(self, family: Family, job: Job, sizes: Sequence[int], limit: int) -> int | None:
        """The largest micro-batch within the limit, without accumulation; begun where the last such family ended."""
        alike = (family.strategy, family.offload, family.activation_checkpointing, limit)
        curve = self.curve(family, job, accumulating=False)
        found = curve.largest_within(sizes, limit, self._hints.get(alike))
        if found is not None:
            self._hints[alike] = found
        return found

    def recorded(self, family: Family, job: Job, sizes: Sequence[int]) -> bool:
        """Whether a family's recordings can be had at these micro-batches; `left_out` says why not."""
        wanted = {(family, min(size, 2)) for size in sizes}  # micro-batch 1 has a recording of its own
        if family not in self.left_out and not wanted <= self._recorded:
            try:
                for size in sizes:
                    self.curve(family, job, accumulating=False)(size)
                self._recorded |= wanted
            except AdvisorError as error:
                if isinstance(error, MissingExtra) and self.model.source != "catalog":
                    raise
                self.left_out[family] = str(error)
        return family not in self.left_out


@dataclass(frozen=True, kw_only=True)
class Judge:
    """One model on one type of GPU."""

    model: Resolved
    gpu: Gpu
    margin: float
    timer: Timer
    host_available_bytes: int | None
    bytes: Bytes
    allocator: Allocator = field(default_factory=Allocator)
    allowed: Callable[[Plan], bool] = anything_goes

    @cached_property
    def available_bytes(self) -> int:
        return int(self.gpu.memory_bytes * (1 - self.margin))

    @cached_property
    def host_usual_bytes(self) -> int:
        return usual_host_bytes(self.gpu)

    def on(self, gpu: Gpu) -> Judge:
        """The same on another type of GPU."""
        return replace(self, gpu=gpu)

    def able(self, families: Iterable[Family], job: Job, batches: Batches) -> tuple[Family, ...]:
        """The families that are allowed and can be judged: by their recordings, or where these cannot be had, as too large by
        their states."""
        families = tuple(f for f in families if self.allowed(f.plan(job, batches.smallest)))
        if self.model.profile is None:
            return families
        sizes = batches.sizes[:2]  # a recording for micro-batch 1, and one for more
        return tuple(
            f
            for f in families
            if self.bytes.recorded(f, job, sizes) or self.untimed(f.plan(job, batches.smallest)).fits is False
        )

    def estimate(self, plan: Plan) -> StrategyEstimate:
        return estimate_plan(self.model, plan, self.gpu)

    def whole(self, candidate: Candidate) -> StrategyEstimate:
        """The whole row of what is recommended, the allocator's figures included."""
        conf = AllocatorConf.parse(candidate.allocator_conf) if candidate.allocator_conf else None
        return estimate_plan(self.model, candidate.plan, self.gpu, explain=True, walk="always", conf=conf)

    def candidate(self, plan: Plan) -> Candidate:
        """The plan with the best known figure of its bytes, and its time if it fits."""
        found = self.untimed(plan)
        return found if found.fits is False else self.timed(found)

    def timed(self, candidate: Candidate) -> Candidate:
        return replace(candidate, step_seconds=self.seconds(candidate.plan))

    def untimed(self, plan: Plan) -> Candidate:
        """The plan with the best known figure of its bytes."""
        estimate = self.estimate(plan)
        return Candidate(
            plan=plan,
            gpu=self.gpu.name,
            needed_bytes=estimate.needed_bytes,
            state_bytes=sum(estimate.states.values()),
            available_bytes=self.available_bytes,
            host_bytes_per_node=estimate.host_bytes_per_node,
            host_available_bytes=self.host_available_bytes,
            host_usual_bytes=self.host_usual_bytes,
        )

    def walked(self, candidate: Candidate, settings: Sequence[str | None] | None = None) -> tuple[Candidate, ...]:
        """A candidate through the caching allocator, under each of its settings until it fits. Empty: no walks are left."""
        settings = self.allocator.settings if settings is None else settings
        found = self.allocator.through(self.model, candidate.plan, self.gpu, self.available_bytes, settings)
        return tuple(replace(candidate, walked=fragmentation) for fragmentation in found)

    def plainly(self, fitting: Candidate) -> Candidate:
        """What fits, under PyTorch's own settings if it fits under them too."""
        if fitting.walked is None or fitting.allocator_conf == self.allocator.settings[0]:
            return fitting
        walked = self.walked(fitting, self.allocator.settings[:1])
        return walked[0] if walked and walked[0].fits else fitting

    def fits(self, plan: Plan) -> bool:
        """Whether a plan may run: by its tensors, and if these do not settle it, by the best known figure."""
        if Family.of(plan) in self.bytes.left_out:
            return False
        if self.model.profile is not None and tensor_bytes(self.model, plan) > self.available_bytes:
            return False
        return self.untimed(plan).fits is not False

    def seconds(self, plan: Plan) -> float | None:
        return self.timer(self.model, plan, self.gpu)

    def ceiling(self, family: Family, job: Job, batches: Batches) -> int | None:
        """The largest micro-batch that fits by its tensors; None where none does.

        With accumulation there is never less to hold, so what fits without it is the most that can.
        """
        sizes = batches.sizes
        if self.model.profile is None:  # nothing is known that grows
            return sizes[0]
        if family in self.bytes.left_out:
            return None
        once = self.bytes.largest(family, job, sizes, self.available_bytes)
        if once is None or batches.accumulation(once) == 1:
            return once
        sizes = sizes[: sizes.index(once) + 1]
        return self.bytes.curve(family, job, accumulating=True).largest_within(sizes, self.available_bytes, once)

    def settled(self, family: Family, job: Job, batches: Batches, ceiling: int) -> int | None:
        """The ceiling by the best known figure, which is never below the tensors."""
        sizes = batches.sizes
        low, high = -1, sizes.index(ceiling) + 1
        at = high - 1
        while high - low > 1:
            found = self.untimed(family.plan(job, sizes[at], batches.accumulation(sizes[at])))
            if found.host_fits is False:
                return None
            if found.fits is False:
                high = at
            else:
                low = at
            at = (low + high) // 2
        return sizes[low] if low >= 0 else None
