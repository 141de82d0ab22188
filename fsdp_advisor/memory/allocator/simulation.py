"""The bytes that a job reserves: its steps run through the caching allocator until the allocator's state repeats.

The simulation begins with the cache as loading leaves it: whole units or tensors are freed after they are sharded, but their
segments stay with PyTorch. (huggingface/accelerate, benchmarks/fsdp2/imgs, shows it for a model's embedding.)

Assumed: the host reads the loss after each step; gradients are set to None. The host runs ahead of the GPU as far as it can
(FSDP1's limit on all-gathers, the queue of kernel launches), which delays the reuse of storages with `record_stream`.
Collectives keep pace with computation.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from fsdp_advisor.memory.allocator.caching import CachingAllocator, OutOfMemory
from fsdp_advisor.memory.allocator.conf import DEFAULT_CONF, AllocatorConf
from fsdp_advisor.memory.allocator.job_operations import GRAPH, StepOperations
from fsdp_advisor.program.accounts import Stream

MAX_STEPS = 16
"""The maximum number of simulated steps, if the allocator's state does not repeat."""
RETRYING_STEPS = 4
"""After this number of consecutive steps with retries, every step is assumed to retry."""

Verdict = Literal["fits", "fits_with_retries", "does_not_fit"]
_RANK: dict[Verdict, int] = {"fits": 0, "fits_with_retries": 1, "does_not_fit": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatorResult:
    """The result of the simulation. Bytes.

    `verdict` says whether the steps run within the limit: `fits`, `fits_with_retries` (every steady step frees the cache and
    asks the driver again, or some steps do), `does_not_fit`.
    The peaks are those within the limit if the steps fit, else those without a limit.
    `allocated_peak_bytes` is `max_memory_allocated`, `reserved_peak_bytes` `max_memory_reserved`,
    `requested_peak_bytes` `requested_bytes.all.peak`, which only tests read. `steps_until_steady` is None if the state never repeated.
    `expandable_segments_help`: whether that setting ends the retries or makes the job fit; None if it was not tried.
    """

    allocated_peak_bytes: int
    requested_peak_bytes: int
    reserved_peak_bytes: int
    verdict: Verdict
    retries_per_step: int = 0
    steps_until_steady: int | None = None
    expandable_segments_help: bool | None = None

    def compared_with(self, expandable: AllocatorResult) -> AllocatorResult:
        """The result, with `expandable_segments_help` filled from that with expandable segments."""
        return replace(self, expandable_segments_help=_RANK[expandable.verdict] < _RANK[self.verdict])

    def as_dict(self) -> dict[str, Any]:
        """The JSON object: the result apart from the peaks, which are keys of the row."""
        return {name: getattr(self, name) for name in ("verdict", "expandable_segments_help", "steps_until_steady")}


def simulate_allocator(
    operations: StepOperations,
    *,
    conf: AllocatorConf = DEFAULT_CONF,
    limit_bytes: int | None = None,
    device_bytes: int | None = None,
) -> AllocatorResult:
    """Run a job's steps through the caching allocator.

    `limit_bytes`: memory that the driver has for segments (None: no limit). `device_bytes`: the device's whole memory (default:
    the limit).
    """
    within = _Run(operations, conf, limit_bytes, device_bytes)
    run = within if within.completes else _Run(operations, conf)
    return AllocatorResult(
        allocated_peak_bytes=run.allocator.allocated_peak,
        requested_peak_bytes=run.allocator.requested_peak,
        reserved_peak_bytes=run.allocator.driver.peak,
        verdict=within.verdict,
        retries_per_step=within.retries_per_step if within.verdict == "fits_with_retries" else 0,
        steps_until_steady=run.steady_after,
    )


def completes(operations: StepOperations, *, conf: AllocatorConf, limit_bytes: int, device_bytes: int) -> bool:
    """Whether a job's steps run within the limit, with or without retries."""
    return _Run(operations, conf, limit_bytes, device_bytes).completes


class _Run:
    """Runs the first step, then more steps until the allocator's state has occurred before.

    The state between steps is the addresses of the storages that stay alive. Most of them are allocated once and never move, so
    the driver's calls and the storages that one step carries over to the next determine the state.
    """

    def __init__(
        self,
        operations: StepOperations,
        conf: AllocatorConf,
        limit_bytes: int | None = None,
        device_bytes: int | None = None,
    ) -> None:
        self.operations, self.conf = operations, conf
        self.allocator = CachingAllocator(operations.requests, conf, limit_bytes=limit_bytes, device_bytes=device_bytes)
        self.steady_after: int | None = None
        self.retries_per_step = 0
        self.completes = True
        try:
            self._simulate()
        except OutOfMemory:
            self.completes = False

    def _simulate(self) -> None:
        self._repeat_steps()
        if self.operations.between:
            self.allocator.run(self.operations.between)
            self.allocator.begin_step(())
            self.allocator.run(self.operations.following)

    def _repeat_steps(self) -> None:
        operations, allocator, seen, retrying = self.operations, self.allocator, dict[tuple[int, ...], int](), 0
        allocator.run(operations.setup)
        allocator.allocated_peak, allocator.requested_peak = allocator.allocated, allocator.requested
        for number in range(1, MAX_STEPS + 1):
            before = allocator.retries
            allocator.run(operations.first if number == 1 else operations.following)
            allocator.begin_step(operations.carried_over)
            if number == 1 and operations.captured:
                self._capture()
            self.retries_per_step = allocator.retries - before
            retrying = retrying + 1 if self.retries_per_step else 0
            state = (allocator.driver.calls, *(allocator.address[known] for _, known in operations.carried_over))
            if retrying == RETRYING_STEPS:
                return
            if state in seen:
                self.steady_after = seen[state]
                return
            seen[state] = number

    def _capture(self) -> None:
        """Capture a graph: empty the cache, then run the captured operations in pools that keep their memory."""
        self.allocator.release_cached()
        self.allocator.run(self.operations.captured)
        self.allocator.begin_step()
        for stream in Stream:
            self.allocator.keep_pools(GRAPH + stream)

    @property
    def verdict(self) -> Verdict:
        if not self.completes:
            return "does_not_fit"
        # repeating steps make no driver calls: all retries happened before them
        steady = self.steady_after is not None
        return "fits" if steady or not self.allocator.retries else "fits_with_retries"
