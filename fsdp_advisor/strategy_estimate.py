"""One row of an answer: the figures of one strategy. Bytes are `int`; unknown values are None, and `not_modelled` says why."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fsdp_advisor.engines.job_peaks import JobPeaks
from fsdp_advisor.job.choices import Backend, Offload, Strategy
from fsdp_advisor.job.compatibility import label
from fsdp_advisor.job.plan import Plan
from fsdp_advisor.json_fields import json_value
from fsdp_advisor.memory.device import DeviceOverhead
from fsdp_advisor.memory.live import TimelinePoint
from fsdp_advisor.program.accounts import JobPhase, Phase
from fsdp_advisor.timing import StepTime

if TYPE_CHECKING:
    from fsdp_advisor.memory.allocator import AllocatorResult


@dataclass(frozen=True, slots=True)
class NotModelled:
    """An effect that the figures of a row lack, or the reason why `figures` (JSON keys, in words) are unknown. `hides_needed`: without it
    `needed_bytes` is unknown.
    """

    reason: str
    figures: str = ""
    hides_needed: bool = False

    def __str__(self) -> str:
        return f"{self.figures}: {self.reason}" if self.figures else self.reason


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyEstimate:
    """One strategy's figures on rank 0, which holds the largest shard. Bytes; None where unknown, with a reason in `not_modelled`.

    `needed_bytes` is the device memory at the worst moment of the job: reserved by the caching allocator, plus CUDA and NCCL.
    If the job completes on this GPU, it is the peak on this GPU; if not, the peak on a GPU that is large enough. So the GPU's
    side of `fits` is exactly `headroom_bytes >= 0`. `fits` is False too if a node's memory was given and the host lacks it, or if vLLM
    cannot start in its share of the GPU. Then `fails_in` names the phase.
    `states` are the bytes kept from step to step, of a bare parameter count by the textbook; `backend_keeps_bytes` is what the backend
    keeps of a bare count. `at_peak` are the bytes alive at the tensors' peak, by account.
    `paged_optimizer_bytes` is optimizer state in CUDA's managed memory. Neither `states` nor `at_peak` contains it: it uses free memory of
    the GPU and moves to the host when the GPU is full. `host_bytes_per_node` contains all of it; it is None if
    states are offloaded to NVMe, because swap buffers are not modelled.
    `evaluation` is the allocator's result of steps with the Trainer's evaluation between them; None without one.
    `units` describes the FSDP units of a wrap policy other than `layer`. `whole_reference_bytes`: of a reference model that FSDP2 gathers
    as one unit, when it is gathered; None without one. `searches_unused`: whether DDP has to search for parameters that
    get no gradient. `lora_kernels`: the parts of the model whose adapters run in axolotl's kernels.
    """

    plan: Plan
    fits: bool | None
    needed_bytes: int | None = None
    headroom_bytes: int | None = None
    peak_tensor_bytes: int | None = None
    peak_phase: Phase | None = None
    peak_where: str | None = None
    phase_peaks: dict[Phase, int] | None = None
    states: dict[str, int]
    backend_keeps_bytes: int | None = None
    parameter_parts: dict[str, int] | None = None
    at_peak: dict[str, int] | None = None
    host_bytes_per_node: int | None
    paged_optimizer_bytes: int = 0
    host_loading_bytes_per_node: dict[str, int] | None = None
    fused_loss_peak_bytes: int | None = None
    allocator: AllocatorResult | None = None
    evaluation: AllocatorResult | None = None
    step: StepTime | None = None
    overhead: DeviceOverhead | None = None
    job_peaks: JobPeaks | None = None
    units: str | None = None
    whole_reference_bytes: int | None = None
    searches_unused: bool = False
    lora_kernels: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    omissions: tuple[NotModelled, ...] = ()
    simulate_peak: Callable[[], int | None] | None = field(default=None, repr=False, compare=False)
    replay_timeline: Callable[[], tuple[TimelinePoint, ...]] | None = field(default=None, repr=False, compare=False)

    @property
    def strategy(self) -> Strategy:
        return self.plan.strategy

    @property
    def backend(self) -> Backend:
        return self.plan.backend

    @property
    def offload(self) -> Offload:
        return self.plan.offload

    @property
    def not_modelled(self) -> tuple[str, ...]:
        """`omissions` as text."""
        return tuple(map(str, self.omissions))

    @property
    def step_seconds(self) -> float | None:
        """Seconds of one optimizer step, with all its micro-batches; None if the time is unknown."""
        return None if self.step is None else _six_digits(self.step.seconds)

    @property
    def tokens_per_second_per_gpu(self) -> float | None:
        """Tokens per second and GPU, without padding; None if the time is unknown."""
        return None if self.step is None else round(self.step.tokens_per_second_per_gpu, 1)

    @property
    def samples_per_second_per_gpu(self) -> float | None:
        """Samples per second and GPU; None if the time is unknown."""
        if self.step is None:
            return None
        return _six_digits(self.step.tokens_per_second_per_gpu / self.plan.tokens_per_sequence)

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilization: useful FLOPs over the GPU's peak. Attention and padding count in full. None if the time is unknown."""
        return None if self.step is None else round(self.step.mfu, 4)

    @property
    def exposed_communication_share(self) -> float | None:
        """The fraction of the step in which collectives run and no compute hides them; None if the time is unknown."""
        return None if self.step is None else round(self.step.exposed_communication_share, 4)

    @property
    def step_seconds_range(self) -> tuple[float, float] | None:
        """(low, high) of `step_seconds`; None if the time is unknown."""
        return None if self.step is None else (_six_digits(self.step.low_seconds), _six_digits(self.step.high_seconds))

    @property
    def tokens_per_second_per_gpu_range(self) -> tuple[float, float] | None:
        """(low, high) of `tokens_per_second_per_gpu`; None if the time is unknown."""
        return None if self.step is None else _rounded(self.step.tokens_per_second_range, 1)

    @property
    def mfu_range(self) -> tuple[float, float] | None:
        """(low, high) of `mfu`; None if the time is unknown."""
        return None if self.step is None else _rounded(self.step.mfu_range, 4)

    @property
    def exposed_communication_share_range(self) -> tuple[float, float] | None:
        """(low, high) of `exposed_communication_share`; None if the time is unknown."""
        return None if self.step is None else _rounded(self.step.exposed_communication_share_range, 4)

    @property
    def step_breakdown(self) -> dict[str, float] | None:
        """Seconds of the step by cause; they sum to `step_seconds`. None if the time is unknown."""
        return None if self.step is None else {name: _six_digits(value) for name, value in self.step.breakdown.items()}

    @property
    def device_overhead_bytes_range(self) -> tuple[int, int] | None:
        """(low, high) of the bytes outside PyTorch: the CUDA context, kernels and NCCL. None if the peak is unknown."""
        return None if self.overhead is None else (self.overhead.low_bytes, self.overhead.high_bytes)

    @property
    def simulated_peak_bytes(self) -> int | None:
        """The tensors' peak of PyTorch's own code under fake tensors on a CPU. Computed when asked for."""
        return None if self.simulate_peak is None else self.simulate_peak()

    @property
    def timeline(self) -> tuple[TimelinePoint, ...]:
        """Live tensor bytes through the step; empty if the peak is unknown. Computed when asked for."""
        return () if self.replay_timeline is None else self.replay_timeline()

    @property
    def peak_allocated_bytes(self) -> int | None:
        """Peak of `torch.cuda.max_memory_allocated`: whole blocks of the caching allocator."""
        return None if self.allocator is None else self.allocator.allocated_peak_bytes

    @property
    def peak_reserved_bytes(self) -> int | None:
        """Peak of `torch.cuda.max_memory_reserved`: the allocator's blocks, those in its cache included."""
        return None if self.allocator is None else self.allocator.reserved_peak_bytes

    @property
    def peak_device_bytes(self) -> int | None:
        """Bytes that nvidia-smi shows during training: reserved memory plus the mean of the low and high estimates of CUDA and NCCL."""
        if self.allocator is None or self.overhead is None:
            return None
        return self.allocator.reserved_peak_bytes + self.overhead.middle_bytes

    @property
    def peak_device_bytes_range(self) -> tuple[int, int] | None:
        """(low, high) of `peak_device_bytes`: with the low and the high estimate of CUDA and NCCL."""
        if self.allocator is None or self.overhead is None:
            return None
        reserved = self.allocator.reserved_peak_bytes
        return reserved + self.overhead.low_bytes, reserved + self.overhead.high_bytes

    @property
    def fails_in(self) -> JobPhase | None:
        """The first phase of the job that does not fit, on the GPU or on the host; None if all fit or it is unknown."""
        return None if self.job_peaks is None else self.job_peaks.fails

    @property
    def vllm_missing_bytes(self) -> int:
        """By how much vLLM's share of the GPU is too small for vLLM to start; 0 if it may start, or does not run there."""
        vllm = None if self.job_peaks is None else self.job_peaks.vllm
        return 0 if vllm is None else vllm.missing_bytes

    @property
    def allocator_retries_per_step(self) -> int | None:
        """How often a steady step frees the cache and asks the driver again (`num_alloc_retries`)."""
        return None if self.allocator is None else self.allocator.retries_per_step

    @property
    def needed_breakdown(self) -> dict[str, int] | None:
        """The parts of `needed_bytes`: tensors alive at the peak by account, then NON_TENSOR_PARTS. None if no peak is known.

        `loading_or_saving` and `evaluation` are the bytes that these phases need in addition to the step's. `vllm` is a key only
        if vLLM runs on the same GPU; if vLLM sleeps during the step, it is the bytes that generation needs in addition to the step's.
        """
        if self.at_peak is None or self.allocator is None or self.overhead is None or self.needed_bytes is None:
            return None
        tensors = sum(self.at_peak.values())
        device = self.allocator.reserved_peak_bytes + self.overhead.middle_bytes
        beyond = self.needed_bytes - device
        generates, evaluates = self.worst_outside_steps == "generate", self.worst_outside_steps == "evaluate"
        vllm = self.overhead.vllm_bytes + (beyond if generates else 0)
        return {
            **self.at_peak,
            "libraries": self.allocator.allocated_peak_bytes - tensors,
            "fragmentation": self.allocator.reserved_peak_bytes - self.allocator.allocated_peak_bytes,
            "cuda_and_nccl": self.overhead.middle_bytes - self.overhead.vllm_bytes,
            **({"vllm": vllm} if vllm else {}),
            **({"evaluation": beyond} if evaluates else {}),
            "loading_or_saving": 0 if generates or evaluates else beyond,
        }

    @property
    def worst_outside_steps(self) -> JobPhase | None:
        """The phase outside the steps that needs most of the GPU; None if the phases are unknown."""
        if self.job_peaks is None:
            return None
        evaluates = (
            self.evaluation is not None and self.evaluation.reserved_peak_bytes >= self.job_peaks.bytes_outside_steps
        )
        return "evaluate" if evaluates else self.job_peaks.worst_outside_steps

    @property
    def only_evaluation_lacks(self) -> bool:
        """Whether the job does not fit because of its evaluation: the steps alone fit."""
        device = self.peak_device_bytes
        if device is None or self.needed_bytes is None or self.headroom_bytes is None:
            return False
        available = self.needed_bytes + self.headroom_bytes
        return self.needed_bytes > available >= device and self.worst_outside_steps == "evaluate"

    @property
    def kept_bytes(self) -> int:
        """Bytes that stay on the GPU from step to step."""
        return sum(self.states.values()) if self.backend_keeps_bytes is None else self.backend_keeps_bytes

    @property
    def known_bytes(self) -> int:
        """`needed_bytes`, or the states if that is unknown."""
        return self.kept_bytes if self.needed_bytes is None else self.needed_bytes

    @property
    def label(self) -> str:
        """The strategy's usual name: `ZeRO-3 + optimizer offload`."""
        return label(self.plan.strategy, self.plan.offload)

    def as_dict(self, *, timeline: bool = False) -> dict[str, Any]:
        """The JSON object of a row, as in `estimates` of the report's document."""
        result = {key: json_value(getattr(self, key)) for key in _KEYS}
        if self.evaluation is not None:
            result["evaluation"] = {
                "peak_allocated_bytes": self.evaluation.allocated_peak_bytes,
                "peak_reserved_bytes": self.evaluation.reserved_peak_bytes,
            }
        if timeline:
            result["timeline"] = [point._asdict() for point in self.timeline]
        return result


_KEYS = (
    "strategy", "backend", "offload", "fits", "needed_bytes", "needed_breakdown", "headroom_bytes", "peak_tensor_bytes",
    "peak_allocated_bytes", "peak_reserved_bytes", "peak_device_bytes", "simulated_peak_bytes", "peak_device_bytes_range",
    "allocator_retries_per_step", "allocator", "device_overhead_bytes_range", "peak_phase", "peak_where", "phase_peaks", "states",
    "kept_bytes", "parameter_parts", "at_peak", "fused_loss_peak_bytes", "paged_optimizer_bytes", "host_bytes_per_node",
    "host_loading_bytes_per_node", "tokens_per_second_per_gpu", "samples_per_second_per_gpu", "step_seconds", "mfu",
    "exposed_communication_share", "step_seconds_range", "tokens_per_second_per_gpu_range", "mfu_range",
    "exposed_communication_share_range", "step_breakdown", "evaluation", "job_peaks", "fails_in", "warnings", "not_modelled",
)  # fmt: skip
"""The JSON keys of a row."""


def _rounded(ends: tuple[float, float], digits: int) -> tuple[float, float]:
    return round(ends[0], digits), round(ends[1], digits)


def _six_digits(value: float) -> float:
    """A figure rounded to six significant digits. This is finer than the time model's error and gives the same digits on every machine.

    >>> _six_digits(0.309123456789)
    0.309123
    """
    return float(f"{value:.6g}")
