"""The sweeps of `--find`: for the largest micro-batch, the longest sequence, the smallest number of GPUs, the smallest GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil
from typing import Any

from fsdp_advisor.advice.batches import batches, batches_if_possible, recorded_only
from fsdp_advisor.advice.candidate import Candidate
from fsdp_advisor.advice.curves import PeakVsSize, log_spaced
from fsdp_advisor.advice.largest_size import Largest, Sizes, largest
from fsdp_advisor.advice.search import FRONTIER_POINTS, Search
from fsdp_advisor.advice.search_space import StrategyChoice, base_plan, search_space
from fsdp_advisor.assumptions import gpu_of
from fsdp_advisor.errors import UsageError
from fsdp_advisor.gpu_support import check_gpu
from fsdp_advisor.hardware import Gpu, list_gpus, usual_gpus_per_node
from fsdp_advisor.job.choices import MAX_GPUS, MAX_SEQ_LEN, Find
from fsdp_advisor.job.compatibility import mesh_of
from fsdp_advisor.job.plan import Plan
from fsdp_advisor.job.search_request import RecommendRequest
from fsdp_advisor.json_fields import json_fields
from fsdp_advisor.units import format_gpus

SEQUENCE_STEP = 128
"""A sweep over sequence lengths tries multiples of this, which every attention kernel and GEMM tile divides evenly."""
SCANNED_WORLDS = 64
"""Numbers of GPUs up to this are tried one by one; larger ones in doubling steps."""
SHOWN_WORLDS = 4
"""Rows of a sweep over GPUs: the smallest number that fits, and twice as many each time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepResult:
    """The answer of a sweep (None: nothing fits), with the plan that fits (`winner`).

    `rows` are the plans that were evaluated, one per choice, number of GPUs or GPU type. `frontier`: the Pareto front of memory and speed
    around the answer, ascending in both.
    """

    what: Find
    answer: int | str | None
    because: str
    winner: Candidate | None
    rows: tuple[Candidate, ...]
    frontier: tuple[Candidate, ...]

    def as_dict(self) -> dict[str, Any]:
        return json_fields(self, without=("winner",))


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """A search varied in one dimension: micro-batch, sequence length, number of GPUs or GPU type.

    `allowed` says which plans may be searched, whatever their batch.
    """

    request: RecommendRequest
    search: Search
    allowed: Callable[[Plan], bool]

    def run(self) -> SweepResult:
        """The result of the sweep that the request's `find` names."""
        match self.request.find:
            case "batch":
                return self.largest_batch()
            case "sequence":
                return self.longest_sequence()
            case "gpus":
                return self.fewest_gpus()
            case "gpu-type":
                return self.smallest_gpu_type()
            case None:
                raise ValueError("the request asks for no sweep")

    # Micro-batch

    def largest_batch(self) -> SweepResult:
        """The largest micro-batch that fits with any choice."""
        search = self.search
        sizes = Sizes(search, search.batches.sizes, search.plan, self._lower_bound_of(search.plan))
        found = largest(sizes, search.max_micro_batches)
        return SweepResult(
            what="batch",
            answer=found.winner.plan.micro_batch_size if found.winner else None,
            because=f"the largest micro-batch per GPU that leaves the margin, on {format_gpus(search.base.world_size)}",
            winner=found.winner,
            rows=found.rows,
            frontier=_frontier(search, found.winner),
        )

    # Sequence length

    def longest_sequence(self) -> SweepResult:
        """The most tokens per sequence that fit at the smallest micro-batch, up to the model's maximum."""
        found = self._longest(self._max_tokens)
        winner, size = found.winner, self.search.batches.smallest
        because = f"the longest sequence at micro-batch {size} that leaves the margin"
        frontier: tuple[Candidate, ...] = ()
        if winner is not None:
            if winner.plan.seq_len == self._model_max:
                because = f"the model's own maximum, which leaves the margin at micro-batch {size}"
            elif winner.plan.seq_len == self._vllm_max:
                because = f"the longest that vLLM accepts, which leaves the margin at micro-batch {size}"
            shorter = log_spaced(self._lengths(winner.plan.seq_len - 1), 2 * FRONTIER_POINTS)[-FRONTIER_POINTS:]
            plans = (self._plan_of_length(winner.choice, tokens) for tokens in shorter)
            frontier = (*(c for c in map(self.search.evaluator.candidate, plans) if c.fits), winner)
        return SweepResult(
            what="sequence",
            answer=winner.plan.seq_len if winner else None,
            because=because,
            winner=winner,
            rows=found.rows,
            frontier=frontier,
        )

    def shorter_sequence(self) -> int | None:
        """The most tokens that fit, fewer than the job's; None if none do."""
        winner = self._longest(self.search.base.seq_len - 1).winner
        return winner.plan.seq_len if winner else None

    def _longest(self, most: int) -> Largest:
        """The search for the most tokens, up to `most`."""
        search, sizes = self.search, self._lengths(most)
        if not sizes:
            return Largest(None, ())
        lower_bound = self._lower_bound_of(self._plan_of_length)
        bounds: dict[StrategyChoice, int] = {}
        for choice in search.choices:
            if search.recording_error(choice) is not None or search.host_lacks(self._plan_of_length(choice, sizes[0])):
                continue
            tokens = lower_bound(choice).largest_within(sizes, search.evaluator.available_bytes)
            if tokens is not None:
                bounds[choice] = tokens
        return largest(Sizes(search, sizes, self._plan_of_length, lower_bound), bounds)

    def _plan_of_length(self, choice: StrategyChoice, tokens: int) -> Plan:
        return replace(self.search.plan(choice, self.search.batches.smallest), seq_len=tokens)

    @cached_property
    def _model_max(self) -> int | None:
        profile = self.search.evaluator.model.profile
        return profile.max_seq_len if profile is not None else None

    @property
    def _vllm_max(self) -> int | None:
        generation = self.search.base.generation
        return generation.max_length if generation else None

    def _lengths(self, most: int) -> Sequence[int]:
        """The sequence lengths to try: multiples of SEQUENCE_STEP up to `most`, and the maximum of the model or of vLLM; all lengths if
        there is no multiple. GRPO's sequences are longer than a completion.
        """
        generation = self.search.base.generation
        least = generation.completion_length + 1 if generation else 1
        most = min(most, self._vllm_max or most)
        multiples = range(SEQUENCE_STEP * ceil(least / SEQUENCE_STEP), most + 1, SEQUENCE_STEP)
        lengths = multiples or range(least, most + 1)
        return lengths if most not in (self._model_max, self._vllm_max) or most in lengths else (*lengths, most)

    @property
    def _max_tokens(self) -> int:
        return self._model_max or MAX_SEQ_LEN

    def _lower_bound_of(self, plan: Callable[[StrategyChoice, int], Plan]) -> Callable[[StrategyChoice], PeakVsSize]:
        """A function that returns a choice's lower bound as a function of the size that `plan` gets. Each point is computed once."""
        curves: dict[StrategyChoice, PeakVsSize] = {}

        def curve(choice: StrategyChoice) -> PeakVsSize:
            if choice not in curves:
                curves[choice] = PeakVsSize(lambda size: self.search.evaluator.lower_bound(plan(choice, size)))
            return curves[choice]

        return curve

    # Number of GPUs

    def fewest_gpus(self) -> SweepResult:
        """The smallest number of GPUs that fits, and the fastest plan on it and on twice as many, four times ..."""
        most = self.request.gpus if self.request.gpus > 1 else MAX_GPUS
        name, worlds = self.search.evaluator.gpu.name, self._worlds(most)
        least = self.min_gpus(most)
        winner = self.on_world(least).winner if least is not None else None
        if least is None or winner is None:
            return SweepResult(
                what="gpus",
                answer=None,
                because=f"nothing fits on up to {worlds[-1]:,} {name}",
                winner=None,
                rows=(self.on_world(worlds[-1]).smallest_footprint(),),
                frontier=(),
            )
        more = [n for i in range(1, SHOWN_WORLDS) if (n := least << i) in worlds]
        return SweepResult(
            what="gpus",
            answer=least,
            because=f"the smallest number of {name} on which a plan leaves the margin",
            winner=winner,
            rows=(winner, *(row for n in more if (row := self.on_world(n).winner) is not None)),
            frontier=_frontier(self.on_world(least), winner),
        )

    def min_gpus(self, most: int) -> int | None:
        """The smallest number of GPUs on which something fits; None if nothing does on up to `most`.

        Starts where the lower bound fits first, then doubles the step and bisects.
        """
        first = self._min_gpus_by_lower_bound(most)
        if first is None or self.search.evaluator.model.profile is None:
            return first
        worlds = [n for n in self._worlds(most) if n >= first]
        low, high, step = -1, 0, 1
        while self.on_world(worlds[high]).any_fit() is None:
            if high == len(worlds) - 1:
                return None
            low, high, step = high, min(high + step, len(worlds) - 1), 2 * step
        while high - low > 1:
            at = (low + high) // 2
            low, high = (low, at) if self.on_world(worlds[at]).any_fit() is not None else (at, high)
        return worlds[high]

    def _min_gpus_by_lower_bound(self, most: int) -> int | None:
        """The smallest number of GPUs on which the lower bound of any choice fits.

        More GPUs may need more memory: DDP's buckets begin with the second GPU, and FSDP2 pads a tensor of 8 experts on 16 GPUs
        to twice its size. So numbers are tried one by one up to SCANNED_WORLDS, and beyond only whole doublings are skipped.
        """
        available = self.search.evaluator.available_bytes
        worlds = [n for n in self._worlds(most) if self._min_states // n <= available]
        if len(worlds) > 1 and self._exceeds_without_states(worlds[-1]):
            worlds = [n for n in worlds if n == 1]  # one GPU has no communication buffers
        near = [n for n in worlds if n <= SCANNED_WORLDS]
        far = worlds[len(near) :]
        return self._first(near) or self._first(self._last_doubling(far))

    def _first(self, worlds: Sequence[int]) -> int | None:
        return next((n for n in worlds if self._may_fit(n)), None)

    def _may_fit(self, world: int) -> bool:
        """Whether the lower bound of any choice fits, at the smallest or the preferred micro-batch."""
        search = self.on_world(world)
        sizes = {search.batches.smallest, search.batches.preferred}
        return any(search.may_fit(choice, size) for choice in reversed(search.choices) for size in sizes)

    def _last_doubling(self, worlds: Sequence[int]) -> Sequence[int]:
        """The part of `worlds` that contains the first number that may fit. Only the 1st, 2nd, 4th, 8th, ... and last number are tried; the
        part ends at the first of these that may fit.
        """
        passed, at = 0, 0
        while at < len(worlds) and not self._may_fit(worlds[at]):
            passed = at + 1
            at = len(worlds) if passed == len(worlds) else min(2 * at + 1, len(worlds) - 1)
        return worlds[passed : at + 1]

    def _exceeds_without_states(self, world: int) -> bool:
        """Whether every choice exceeds the memory even without its states. More GPUs then do not help, because only states are sharded."""
        search = self.on_world(world)
        if search.evaluator.model.profile is None:
            return False
        size = search.batches.smallest
        plans = [search.plan(c, size) for c in search.choices if search.recording_error(c) is None]
        return all(
            search.evaluator.lower_bound(plan) - search.evaluator.state_bytes(plan) > search.evaluator.available_bytes
            for plan in plans
        )

    @cached_property
    def _min_states(self) -> int:
        """The smallest bytes of states of any choice on one GPU. With N GPUs each keeps at least an Nth of them."""
        search, alone = self.search, replace(self.search.base, mesh=mesh_of("ddp", 1, 1))
        return min(search.evaluator.state_bytes(choice.plan(alone, 1)) for choice in search.choices)

    def _worlds(self, most: int) -> list[int]:
        """Numbers of GPUs on which the job has batches: up to one node each number, then whole nodes."""
        per_node = self._gpus_per_node
        counts = [*range(1, min(per_node, most) + 1), *range(2 * per_node, most + 1, per_node)]
        possible = [n for n in counts if batches_if_possible(self.request, world=n) is not None]
        if not possible:
            batches(self.request, world=counts[0])  # raises an error with the reason
        return possible

    def nodes(self, world: int) -> int:
        """The number of nodes that `world` GPUs need."""
        return -(-world // self._gpus_per_node)

    @property
    def _gpus_per_node(self) -> int:
        if self.request.nnodes > 1:
            return self.request.gpus // self.request.nnodes
        return usual_gpus_per_node(self.search.evaluator.gpu)

    def on_world(self, world: int) -> Search:
        """The same search on another number of GPUs."""
        if world not in self._by_world:
            self._by_world[world] = self._on_world(world)
        return self._by_world[world]

    @cached_property
    def _by_world(self) -> dict[int, Search]:
        return {}

    def _on_world(self, world: int) -> Search:
        nodes = self.nodes(world)
        offloads = {choice.offload for choice in self.search.choices}
        activations = {choice.activations for choice in self.search.choices}
        choices = tuple(
            c
            for c in search_space(self.request, gpus=world, nnodes=nodes)
            if c.offload in offloads and c.activations in activations
        )
        name = self.search.evaluator.gpu.name
        return replace(
            self.search,
            evaluator=self.search.evaluator.on(self._gpu(name, world, nodes)),
            base=base_plan(self.request, gpus=world, nnodes=nodes, seq_len=self.search.base.seq_len),
            batches=recorded_only(batches(self.request, world=world), self.search.evaluator.model, self.search.base),
            choices=choices,
        ).limited_to(self.allowed)

    # GPU type

    def smallest_gpu_type(self) -> SweepResult:
        """Every GPU of the table with a fast plan; the answer is the one with the least memory that fits, with its fastest."""
        world, found = self.search.base.world_size, []
        for gpu in self._able_gpus():
            search = self.on_gpu(gpu.name)
            found.append((gpu.memory_bytes, search.first_fit or search.smallest_footprint()))
        found.sort(key=lambda row: (row[1].fits is False, row[0], row[1].order))
        rows = [candidate for _, candidate in found]
        winner = self.on_gpu(rows[0].gpu).winner if rows and rows[0].fits is not False else None
        if winner is not None:
            rows[0] = winner
        return SweepResult(
            what="gpu-type",
            answer=winner.gpu if winner else None,
            because=f"the GPU with the least memory on which a plan for {format_gpus(world)} leaves the margin",
            winner=winner,
            rows=tuple(rows),
            frontier=_frontier(self.on_gpu(winner.gpu), winner) if winner else (),
        )

    def smallest_gpu(self) -> str | None:
        """The GPU with the least memory on which something fits."""
        able = sorted(self._able_gpus(), key=lambda gpu: (gpu.memory_bytes, gpu.name))
        return next((gpu.name for gpu in able if self.on_gpu(gpu.name).any_fit() is not None), None)

    def on_gpu(self, name: str) -> Search:
        """The same search on another GPU type."""
        if name not in self._by_gpu:
            base = self.search.base
            gpu = self._gpu(name, base.world_size, base.nnodes)
            self._by_gpu[name] = self.search.on(self.search.evaluator.on(gpu))
        return self._by_gpu[name]

    @cached_property
    def _by_gpu(self) -> dict[str, Search]:
        return {}

    def _gpu(self, name: str, world: int, nodes: int) -> Gpu:
        """The GPU with the network that the request gives."""
        return gpu_of(self.request.as_estimate.but(gpu=name, gpus=world, nnodes=nodes))[0]

    def _able_gpus(self) -> list[Gpu]:
        """The GPUs of the table that compute in the request's precision and have the kernels that it needs."""
        in_bf16 = self.request.precision.startswith("bf16")
        return [g for g in list_gpus() if not (in_bf16 and g.bf16_flops is None) and self._suits(g)]

    def _suits(self, gpu: Gpu) -> bool:
        try:
            check_gpu(self.request.as_estimate, gpu)
        except UsageError:
            return False
        return True


def _frontier(search: Search, winner: Candidate | None) -> tuple[Candidate, ...]:
    """The search's frontier, without points beyond what the winner's choice fits."""
    if winner is None:
        return ()
    size = winner.plan.micro_batch_size
    return tuple(c for c in search.frontier() if c.choice != winner.choice or c.plan.micro_batch_size <= size)
