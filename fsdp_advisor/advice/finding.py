"""`--find`: the largest micro-batch, the longest sequence, the fewest GPUs, the smallest GPU that fits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from fsdp_advisor.advice.batches import Batches, batches
from fsdp_advisor.advice.curve import Curve
from fsdp_advisor.advice.families import Family, Job, families
from fsdp_advisor.advice.judge import Candidate
from fsdp_advisor.advice.search import Search, choose, spread
from fsdp_advisor.errors import UsageError
from fsdp_advisor.estimator import gpu_of, tensor_bytes
from fsdp_advisor.hardware import Gpu, list_gpus
from fsdp_advisor.plan import Plan
from fsdp_advisor.request import MAX_GPUS, MAX_SEQ_LEN, RecommendRequest

USUAL_NODE = 8
"""GPUs of a node, where neither the request nor the table says."""
ONE_BY_ONE = 64
SHOWN_WORLDS = 4
"""Numbers of GPUs to look at: the fewest that fit, and twice as many each time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What was looked for: the answer (None: nothing fits), a row per alternative and the frontier around the answer.

    `rows` hold the best of each alternative: of each family, number of GPUs or type of GPU. `frontier`: memory against
    speed, ascending in both.
    """

    what: str
    answer: int | str | None
    because: str
    winner: Candidate | None
    rows: tuple[Candidate, ...]
    frontier: tuple[Candidate, ...]

    def as_dict(self) -> dict[str, Any]:
        return {
            "what": self.what,
            "answer": self.answer,
            "because": self.because,
            "rows": [c.as_dict() for c in self.rows],
            "frontier": [c.as_dict() for c in self.frontier],
        }


@dataclass(frozen=True, kw_only=True)
class Finder:
    """Looks around a search: along the micro-batch, the sequence, the number of GPUs, the type of GPU."""

    request: RecommendRequest
    search: Search
    max_seq_len: int | None

    def find(self) -> Finding:
        match self.request.find:
            case "batch":
                return self.batch()
            case "sequence":
                return self.sequence()
            case "gpus":
                return self.gpus()
            case _:
                return self.gpu_type()

    # The largest micro-batch

    def batch(self) -> Finding:
        """Of each family the largest micro-batch that fits; of all the largest, then the fastest."""
        search = self.search
        rows = [search.at(family, size) for family, size in search.settled.items()]
        rows.sort(key=lambda c: (-c.plan.micro_batch_size, c.order))
        winner = choose([c for c in rows if c.plan.micro_batch_size == rows[0].plan.micro_batch_size]) if rows else None
        return Finding(
            what="batch",
            answer=winner.plan.micro_batch_size if winner else None,
            because=f"the largest micro-batch on each of {search.job.gpus} GPUs that leaves the margin",
            winner=winner,
            rows=tuple(rows),
            frontier=search.frontier(),
        )

    # The longest sequence

    def sequence(self) -> Finding:
        """Of each family the most tokens that fit at the smallest micro-batch, up to the model's maximum."""
        search = self.search
        rows = [search.judge.candidate(self._of_length(f, n)) for f, n in self._lengths().items()]
        rows.sort(key=lambda c: (-c.plan.seq_len, c.order))
        winner = choose([c for c in rows if c.plan.seq_len == rows[0].plan.seq_len]) if rows else None
        size = search.batches.smallest
        because = f"the longest sequence at micro-batch {size} that leaves the margin"
        shown: tuple[Candidate, ...] = ()
        if winner:
            if winner.plan.seq_len == self.max_seq_len:
                because = f"the model's own maximum, which leaves the margin at micro-batch {size}"
            lengths = spread(range(1, winner.plan.seq_len + 1), 12)[1:]
            shown = tuple(search.judge.candidate(self._of_length(winner.family, n)) for n in lengths)
        return Finding(
            what="sequence",
            answer=winner.plan.seq_len if winner else None,
            because=because,
            winner=winner,
            rows=tuple(rows),
            frontier=shown,
        )

    def longest(self) -> int | None:
        """The most tokens that any family holds."""
        return max(self._lengths().values(), default=None)

    def _lengths(self) -> dict[Family, int]:
        most = self.max_seq_len or MAX_SEQ_LEN
        return {f: n for f in self.search.families if (n := self._longest(f, most)) is not None}

    def _longest(self, family: Family, most: int) -> int | None:
        judge = self.search.judge
        curve = Curve(lambda n: tensor_bytes(judge.model, self._of_length(family, n)))
        tokens = curve.largest_within(range(1, most + 1), judge.available_bytes)
        if tokens is None:
            return None
        low, high, at = 0, tokens + 1, tokens
        while high - low > 1:  # by the best known figure, which is never below the tensors
            found = judge.untimed(self._of_length(family, at))
            if found.host_fits is False:
                return None
            low, high = (low, at) if found.fits is False else (at, high)
            at = (low + high) // 2
        return low or None

    def _of_length(self, family: Family, tokens: int) -> Plan:
        search = self.search
        size = search.batches.smallest
        return family.plan(replace(search.job, seq_len=tokens), size, search.batches.accumulation(size))

    # The fewest GPUs

    def gpus(self) -> Finding:
        """The fewest GPUs on which anything fits, and the fastest on twice as many, four times ..."""
        most = self.request.gpus if self.request.gpus > 1 else MAX_GPUS
        name = self.search.judge.gpu.name
        worlds = self._worlds(most)
        least = self.fewest(most)
        if least is None:
            return Finding(
                what="gpus",
                answer=None,
                because=f"nothing fits on up to {worlds[-1]:,} {name}",
                winner=None,
                rows=(self.on(worlds[-1]).least(),),
                frontier=(),
            )
        shown = [n for i in range(SHOWN_WORLDS) if (n := least << i) in worlds]
        rows = tuple(found[0] for n in shown if (found := self.on(n).leaders))
        return Finding(
            what="gpus",
            answer=least,
            because=f"the fewest {name} on which anything leaves the margin",
            winner=rows[0],
            rows=rows,
            frontier=self.on(least).frontier(),
        )

    def fewest(self, most: int = MAX_GPUS) -> int | None:
        """The least number of GPUs on which something fits.

        More GPUs may need more of each: DDP's buckets begin with the second, and FSDP2 pads a tensor of 8 experts on 16
        GPUs to twice its size. So numbers are looked at one by one, up to ONE_BY_ONE and then from the last doubling on
        that holds nothing; only doublings that hold nothing at their end are passed over. Numbers on which the states
        alone, shared by all, are too much need no look.
        """
        worlds = [n for n in self._worlds(most) if self._states // n <= self.search.judge.available_bytes]
        near = [n for n in worlds if n <= ONE_BY_ONE]
        far = worlds[len(near) :]
        return self._first(near) or self._first(self._doubling(far))

    def _first(self, worlds: Sequence[int]) -> int | None:
        return next((n for n in worlds if self.on(n).anything_fits), None)

    def _doubling(self, worlds: Sequence[int]) -> Sequence[int]:
        """The stretch that ends in the first of the 1st, 2nd, 4th, 8th ... and last on which something fits."""
        passed, at = 0, 0
        while at < len(worlds) and not self.on(worlds[at]).anything_fits:
            passed = at + 1
            at = len(worlds) if passed == len(worlds) else min(2 * at + 1, len(worlds) - 1)
        return worlds[passed : at + 1]

    @cached_property
    def _states(self) -> int:
        """The least that any family keeps on a single GPU; N of them keep at best an Nth of it each."""
        search = self.search
        alone = replace(search.job, gpus=1, nnodes=1)
        return min(search.judge.untimed(f.plan(alone, 1)).state_bytes for f in search.families)

    def _worlds(self, most: int) -> list[int]:
        """Numbers of GPUs: each up to a node's, then whole nodes; those that divide the global batch."""
        per_node = self._per_node
        counts = [*range(1, min(per_node, most) + 1), *range(2 * per_node, most + 1, per_node)]
        able = [n for n in counts if self._batches(n) is not None]
        if not able:
            batches(self.request, world=1)  # says why
        return able

    def nodes(self, world: int) -> int:
        """How many nodes so many GPUs take."""
        return -(-world // self._per_node)

    @property
    def _per_node(self) -> int:
        if self.request.nnodes > 1:
            return self.request.gpus // self.request.nnodes
        return self.search.judge.gpu.gpus_per_node or USUAL_NODE

    def _batches(self, world: int) -> Batches | None:
        try:
            return batches(self.request, world=world)
        except UsageError:
            return None

    def on(self, world: int) -> Search:
        """The same search on another number of GPUs."""
        nodes = self.nodes(world)
        offloads = {f.offload for f in self.search.families}
        allowed = (f for f in families(self.request, nnodes=nodes) if f.offload in offloads)
        job = replace(self.search.job, gpus=world, nnodes=nodes)
        found = self._batches(world)
        assert found is not None
        judge = self.search.judge.on(self._gpu(self.search.judge.gpu.name, job))
        return Search(judge=judge, job=job, batches=found, families=judge.able(allowed, job, found))

    # The smallest GPU

    def gpu_type(self) -> Finding:
        """Every GPU of the table with its fastest plan; the one with the least memory that fits is the answer."""
        memory = {gpu.name: gpu.memory_bytes for gpu in list_gpus()}
        rows = sorted(self._on_each(), key=lambda c: (c.fits is False, memory[c.gpu], c.order))
        winner = rows[0] if rows and rows[0].fits is not False else None
        return Finding(
            what="gpu-type",
            answer=winner.gpu if winner else None,
            because=f"the GPU with the least memory of which {self.search.job.gpus} will do",
            winner=winner,
            rows=tuple(rows),
            frontier=self.on_gpu(winner.gpu).frontier() if winner else (),
        )

    def smallest_gpu(self) -> str | None:
        """The one with the least memory on which something fits."""
        able = sorted(self._able(), key=lambda g: (g.memory_bytes, g.name))
        return next((gpu.name for gpu in able if self.on_gpu(gpu.name).anything_fits), None)

    def on_gpu(self, name: str) -> Search:
        """The same search on another type of GPU."""
        return replace(self.search, judge=self.search.judge.on(self._gpu(name, self.search.job)))

    def _gpu(self, name: str, job: Job) -> Gpu:
        """The GPU with its part of the network that was asked for."""
        asked = self.request.as_estimate.model_copy(update={"gpu": name, "gpus": job.gpus, "nnodes": job.nnodes})
        return gpu_of(asked)[0]

    def _on_each(self) -> Iterator[Candidate]:
        for gpu in self._able():
            search = self.on_gpu(gpu.name)
            leaders = search.leaders
            yield leaders[0] if leaders else search.least()

    def _able(self) -> list[Gpu]:
        """GPUs that compute in the precision asked for."""
        return [g for g in list_gpus() if g.bf16_flops is not None or not self.request.precision.startswith("bf16")]
