"""A plan with its estimate, as a search compares it with others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fsdp_advisor.advice.search_space import StrategyChoice
from fsdp_advisor.job.losses import loss_option
from fsdp_advisor.job.plan import Plan
from fsdp_advisor.strategy_estimate import StrategyEstimate
from fsdp_advisor.units import format_gib


def is_round(size: int) -> bool:
    """Whether a micro-batch is a power of two or a multiple of 8.

    >>> [size for size in range(1, 30) if is_round(size)]
    [1, 2, 4, 8, 16, 24]
    """
    return size % 8 == 0 or size & (size - 1) == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A plan with its estimate, and whether it leaves the margin.

    `available_bytes` is the GPU's memory less the margin. `runs_in_available`: the plan's `needed_bytes` exceed that only because the
    allocator keeps a cache; the plan also completes within that memory, perhaps with allocator retries. `allocator_conf` is the value of
    PYTORCH_ALLOC_CONF that the estimate assumes (None: PyTorch's defaults). `host_available_bytes` is a node's memory if it is known, else
    None; `host_usual_bytes` is the usual memory of nodes with this GPU; `host_unlimited` allows plans that need more. `step_seconds` is
    None if the time of a step is unknown. `numerics_gain` is the factor by which the plan would be faster in 16 bits throughout, as FSDP
    and DeepSpeed compute; 1 unless it runs under autocast.
    """

    estimate: StrategyEstimate
    gpu: str
    available_bytes: int
    runs_in_available: bool = False
    allocator_conf: str | None = None
    host_available_bytes: int | None = None
    host_usual_bytes: int
    host_unlimited: bool = False
    step_seconds: float | None = None
    numerics_gain: float = 1.0

    @property
    def plan(self) -> Plan:
        return self.estimate.plan

    @property
    def choice(self) -> StrategyChoice:
        return StrategyChoice.of(self.plan)

    @property
    def label(self) -> str:
        """The choice in words. DDP on one GPU is called a plain training loop."""
        if self.plan.strategy == "ddp" and self.plan.world_size == 1:
            return self.choice.label.replace("DDP (ddp)", "plain PyTorch (ddp)")
        return self.choice.label

    @property
    def needed_bytes(self) -> int | None:
        """The estimate's `needed_bytes`; None for a bare parameter count."""
        return self.estimate.needed_bytes

    @property
    def state_bytes(self) -> int:
        return self.estimate.kept_bytes

    @property
    def known_bytes(self) -> int:
        """The estimate's `known_bytes`: what it needs, or the states if that is unknown."""
        return self.estimate.known_bytes

    @property
    def fits(self) -> bool | None:
        """Whether the estimate fits and leaves the margin; None if the part of its memory that is known does."""
        if self.estimate.fits is False or self.host_fits is False:
            return False
        if self.known_bytes > self.available_bytes and not self.runs_in_available:
            return False
        return None if self.needed_bytes is None else self.estimate.fits

    @property
    def host_bytes_per_node(self) -> int | None:
        return self.estimate.host_bytes_per_node

    @property
    def host_peak_bytes_per_node(self) -> int:
        """Host memory of a node in the phase that needs most, of those in which it is known: load, steps or save."""
        phases = self.estimate.job_peaks.phases.values() if self.estimate.job_peaks else ()
        return max([self.host_bytes_per_node or 0, *(phase.host_bytes_per_node or 0 for phase in phases)])

    @property
    def host_fits(self) -> bool | None:
        """Whether the host memory of a node is enough for every phase. None if what the steps need is unknown, or if the node's memory is
        unknown and they need no more than usual nodes have.
        """
        if self.host_available_bytes is not None:
            if self.host_peak_bytes_per_node > self.host_available_bytes:
                return False
            return None if self.host_bytes_per_node is None else True
        return False if self.host_unusual and not self.host_unlimited else None

    @property
    def host_unusual(self) -> bool:
        """Whether the plan needs more host memory than usual nodes have while the memory of this node is unknown."""
        return self.host_available_bytes is None and (self.host_bytes_per_node or 0) > self.host_usual_bytes

    @property
    def tokens_per_second_per_gpu(self) -> float | None:
        return self.plan.tokens_per_step / self.step_seconds if self.step_seconds else None

    @property
    def comparable_speed(self) -> float | None:
        """The speed for comparisons in equal numerics: `tokens_per_second_per_gpu` if everything were computed in 16 bits."""
        speed = self.tokens_per_second_per_gpu
        return None if speed is None else speed * self.numerics_gain

    @property
    def simplicity(self) -> tuple[Any, ...]:
        """Sort key, the simplest first: no offload, an allocator that needs no setting and no retries, the simplest engine, a
        round micro-batch.
        """
        choice, size = self.choice.simplicity_rank, self.plan.micro_batch_size
        retries = self.estimate.allocator is not None and self.estimate.allocator.retries_per_step > 0
        is_tight = self.allocator_conf is not None or retries
        return (choice[:3], is_tight, choice[3:], not is_round(size))

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables to launch it with."""
        return {"PYTORCH_ALLOC_CONF": self.allocator_conf} if self.allocator_conf else {}

    @property
    def order(self) -> tuple[Any, ...]:
        """Sort key, a total order: the faster first, then the simpler, then the larger micro-batch."""
        speed, plan = self.tokens_per_second_per_gpu, self.plan
        return (
            speed is None,
            -(speed or 0.0),
            self.choice.simplicity_rank,
            -plan.micro_batch_size,
            plan.seq_len,
            plan.world_size,
            self.gpu,
        )

    @property
    def gpu_memory_text(self) -> str:
        """Needed and available memory of a GPU, as in `needs 33.01 GiB, and 36.24 GiB are available`."""
        has = format_gib(self.available_bytes)
        if self.needed_bytes is None:
            return f"its states alone need {format_gib(self.state_bytes)}, and {has} are available"
        needs = f"needs {format_gib(self.needed_bytes)}"
        return (
            f"{needs} with the allocator's cache; {has} are enough with less cache"
            if self.runs_in_available
            else f"{needs}, and {has} are available"
        )

    @property
    def memory_text(self) -> str:
        """Needed and available memory of GPU and host."""
        text = self.gpu_memory_text
        if self.allocator_conf is not None:
            text += f", with PYTORCH_ALLOC_CONF={self.allocator_conf}"
        if missing := self.estimate.vllm_missing_bytes:
            text += f"; vLLM's share of the GPU lacks {format_gib(missing)}"
        if self.plan.offload != "none" or self.host_fits is False:
            limit = self.host_available_bytes
            if self.host_bytes_per_node is None and self.host_fits is None:
                return f"{text}; its host memory is unknown"
            host = self.host_bytes_per_node if limit is None else self.host_peak_bytes_per_node
            text += f"; and {format_gib(host or 0)} of host memory per node"
            if limit is not None:
                text += f", which has {format_gib(limit)}"
            elif self.host_unusual:
                text += f", which usually has {format_gib(self.host_usual_bytes)}"
        return text

    def as_dict(self) -> dict[str, Any]:
        plan, seconds, speed = self.plan, self.step_seconds, self.tokens_per_second_per_gpu
        return {
            "strategy": plan.strategy,
            "backend": plan.backend,
            "offload": plan.offload,
            "offload_device": plan.offload_device if plan.offload != "none" else None,
            "loss": loss_option(plan.loss_code),
            "activation_checkpointing": plan.activation_checkpointing,
            "activation_offload": plan.activation_offload,
            "micro_batch_size": plan.micro_batch_size,
            "gradient_accumulation_steps": plan.gradient_accumulation_steps,
            "global_batch_size": plan.global_batch_size,
            "seq_len": plan.seq_len,
            "gpus": plan.world_size,
            "nnodes": plan.nnodes,
            "gpu": self.gpu,
            "fits": self.fits,
            "needed_bytes": self.needed_bytes,
            "available_bytes": self.available_bytes,
            "runs_in_available": self.runs_in_available,
            "peak_reserved_bytes": self.estimate.peak_reserved_bytes,
            "peak_device_bytes": self.estimate.peak_device_bytes,
            "environment": self.environment,
            "host_bytes_per_node": self.host_bytes_per_node,
            "step_seconds": None if seconds is None else float(f"{seconds:.6g}"),  # as in a report
            "tokens_per_second_per_gpu": None if speed is None else round(speed, 1),
            "samples_per_second_per_gpu": None if speed is None else float(f"{speed / plan.tokens_per_sequence:.6g}"),
        }
