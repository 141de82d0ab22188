"""`--find`: the largest micro-batch, the longest sequence, the fewest GPUs, the smallest GPU that fits."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from fsdp_advisor.advice.batches import Batches, batches
from fsdp_advisor.advice.curve import Curve
from fsdp_advisor.advice.families import Family, Job, families
from fsdp_advisor.advice.fragmentation import MOST_WALKS
from fsdp_advisor.advice.judge import Candidate
from fsdp_advisor.advice.search import Search, spread
from fsdp_advisor.advice.settling import LEANEST, anything, largest, settle
from fsdp_advisor.errors import UsageError
from fsdp_advisor.estimator import gpu_of, tensor_bytes
from fsdp_advisor.hardware import Gpu, list_gpus
from fsdp_advisor.job.plan import Plan
from fsdp_advisor.job.request import MAX_GPUS, MAX_SEQ_LEN, RecommendRequest

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
        """The largest micro-batch that any family fits, fragmentation counted; beside it each family's by the cheap figures."""
        search = self.search
        accumulating = search.batches.accumulation(search.batches.smallest) > 1
        winner, walked = largest(
            search,
            search.settled,
            search.batches.sizes,
            search.at,
            lambda f: search.judge.bytes.curve(f, search.job, accumulating=accumulating),
        )
        return Finding(
            what="batch",
            answer=winner.plan.micro_batch_size if winner else None,
            because=f"the largest micro-batch on each of {search.job.gpus} GPUs that leaves the margin",
            winner=winner,
            rows=_rows(winner, walked, (search.at(f, size) for f, size in search.settled.items())),
            frontier=tuple(c for c in search.frontier() if winner and _within(c, winner)),
        )

    # The longest sequence

    def sequence(self) -> Finding:
        """The most tokens that any family fits at the smallest micro-batch, up to the model's maximum, fragmentation counted."""
        search = self.search
        lengths = self._lengths()
        winner, walked = self._longest_of(lengths)
        size = search.batches.smallest
        because = f"the longest sequence at micro-batch {size} that leaves the margin"
        shown: tuple[Candidate, ...] = ()
        if winner:
            if winner.plan.seq_len == self.max_seq_len:
                because = f"the model's own maximum, which leaves the margin at micro-batch {size}"
            shorter = spread(range(1, winner.plan.seq_len + 1), 12)[1:]
            shown = tuple(search.judge.candidate(self._of_length(winner.family, n)) for n in shorter)
        return Finding(
            what="sequence",
            answer=winner.plan.seq_len if winner else None,
            because=because,
            winner=winner,
            rows=_rows(winner, walked, (search.judge.candidate(self._of_length(f, n)) for f, n in lengths.items())),
            frontier=shown,
        )

    def shorter(self) -> int | None:
        """The most tokens that fit, fewer than the job's, of the leanest. Families that hold fewer than another are not looked
        at further."""
        below = self.search.job.seq_len - 1
        found: dict[Family, int] = {}
        for family in reversed(self.search.recorded):  # the leanest first
            more = max(found.values(), default=0) + 1
            if more > below or self._curve(family)(more) > self.search.judge.available_bytes:
                continue
            if (tokens := self._longest(family)) is not None:
                found[family] = min(tokens, below)
        lean = sorted(found, key=lambda f: -found[f])[:LEANEST]
        winner, _ = self._longest_of({f: found[f] for f in lean})
        return winner.plan.seq_len if winner else None

    def _longest_of(self, bounds: dict[Family, int]) -> tuple[Candidate | None, dict[Family, Candidate]]:
        return largest(
            self.search,
            bounds,
            range(1, self._most_tokens + 1),
            lambda f, n: self.search.judge.candidate(self._of_length(f, n)),
            self._curve,
        )

    @property
    def _most_tokens(self) -> int:
        return self.max_seq_len or MAX_SEQ_LEN

    def _curve(self, family: Family) -> Curve:
        """Tensor bytes over the number of tokens."""
        if family not in self._curves:
            model = self.search.judge.model
            self._curves[family] = Curve(lambda n: tensor_bytes(model, self._of_length(family, n)))
        return self._curves[family]

    @cached_property
    def _curves(self) -> dict[Family, Curve]:
        return {}

    def _lengths(self) -> dict[Family, int]:
        """By family, the most tokens that fit by the cheap figures."""
        return {f: n for f in self.search.recorded if (n := self._longest(f)) is not None}

    def _longest(self, family: Family) -> int | None:
        judge = self.search.judge
        tokens = self._curve(family).largest_within(range(1, self._most_tokens + 1), judge.available_bytes)
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
        self.search.judge.allocator.allow(2 * MOST_WALKS)
        least = self.fewest(most)
        winner = _settled(self.on(least)) if least is not None else None
        if least is None or winner is None:
            return Finding(
                what="gpus",
                answer=None,
                because=f"nothing fits on up to {worlds[-1]:,} {name}",
                winner=None,
                rows=(self.on(worlds[-1]).least(),),
                frontier=(),
            )
        shown = [n for i in range(SHOWN_WORLDS) if (n := least << i) in worlds]
        rows = (winner, *(found[0] for n in shown[1:] if (found := self.on(n).leaders)))
        return Finding(
            what="gpus",
            answer=least,
            because=f"the fewest {name} on which anything leaves the margin",
            winner=winner,
            rows=rows,
            frontier=tuple(c for c in self.on(least).frontier() if _within(c, winner)),
        )

    def fewest(self, most: int = MAX_GPUS) -> int | None:
        """The least number of GPUs on which something fits, fragmentation counted."""
        first = self._fewest_cheaply(most)
        if first is None or self.search.judge.model.profile is None:
            return first
        worlds = [n for n in self._worlds(most) if n >= first]
        low, high, step = -1, 0, 1
        while not self._settles(worlds[high]):
            if high == len(worlds) - 1:
                return None
            low, high, step = high, min(high + step, len(worlds) - 1), 2 * step
        while high - low > 1:
            at = (low + high) // 2
            low, high = (low, at) if self._settles(worlds[at]) else (at, high)
        return worlds[high]

    def _settles(self, world: int) -> bool:
        found = anything(self.on(world))
        return found is not None and found.fits is not False

    def _fewest_cheaply(self, most: int) -> int | None:
        """The least number of GPUs on which something fits by the cheap figures.

        More GPUs may need more of each: DDP's buckets begin with the second, and FSDP2 pads a tensor of 8 experts on 16
        GPUs to twice its size. So numbers are looked at one by one, up to ONE_BY_ONE and then from the last doubling on
        that holds nothing; only doublings that hold nothing at their end are passed over. Numbers on which the states
        alone, shared by all, are too much need no look.
        """
        worlds = [n for n in self._worlds(most) if self._states // n <= self.search.judge.available_bytes]
        if len(worlds) > 1 and self._too_large_without_states(worlds[-1]):
            worlds = [n for n in worlds if n == 1]  # where nothing is sent
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

    def _too_large_without_states(self, world: int) -> bool:
        """Whether on so many GPUs all families need too much beside the states, which are all that more GPUs share."""
        search = self.on(world)
        size, steps = search.batches.smallest, search.batches.accumulation(search.batches.smallest)
        found = (search.judge.untimed(f.plan(search.job, size, steps)) for f in search.families)
        has = search.judge.available_bytes
        return all(c.needed_bytes is not None and c.needed_bytes - c.state_bytes > has for c in found)

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
        winner = None
        for at, row in enumerate(rows):
            if winner is not None or row.fits is False:
                break
            self.search.judge.allocator.allow(MOST_WALKS)
            winner = _settled(self.on_gpu(row.gpu))
            rows[at] = winner or self._nearest(row)
        rows.sort(key=lambda c: (c.fits is False, memory[c.gpu], c.order))
        return Finding(
            what="gpu-type",
            answer=winner.gpu if winner else None,
            because=f"the GPU with the least memory of which {self.search.job.gpus} will do",
            winner=winner,
            rows=tuple(rows),
            frontier=tuple(c for c in self.on_gpu(winner.gpu).frontier() if _within(c, winner)) if winner else (),
        )

    def smallest_gpu(self) -> str | None:
        """The one with the least memory on which something fits."""
        able = sorted(self._able(), key=lambda g: (g.memory_bytes, g.name))
        found = (anything(self.on_gpu(gpu.name)) for gpu in able)
        return next((c.gpu for c in found if c is not None and c.fits is not False), None)

    def _nearest(self, row: Candidate) -> Candidate:
        """What came nearest on that GPU, where nothing fits with fragmentation."""
        return anything(self.on_gpu(row.gpu)) or row

    def on_gpu(self, name: str) -> Search:
        """The same search on another type of GPU."""
        return replace(self.search, judge=self.search.judge.on(self._gpu(name, self.search.job)))

    def _gpu(self, name: str, job: Job) -> Gpu:
        """The GPU with its part of the network that was asked for."""
        asked = self.request.as_estimate.but(gpu=name, gpus=job.gpus, nnodes=job.nnodes)
        return gpu_of(asked)[0]

    def _on_each(self) -> Iterator[Candidate]:
        for gpu in self._able():
            search = self.on_gpu(gpu.name)
            leaders = search.leaders
            yield leaders[0] if leaders else search.least()

    def _able(self) -> list[Gpu]:
        """GPUs that compute in the precision asked for."""
        return [g for g in list_gpus() if g.bf16_flops is not None or not self.request.precision.startswith("bf16")]


def _settled(search: Search) -> Candidate | None:
    """The fastest that fits with fragmentation; the leanest are walked first, for they tell whether anything does."""
    lean = anything(search)
    if lean is None or lean.fits is False:
        return None
    return settle(search).winner or search.judge.plainly(lean)


def _rows(
    winner: Candidate | None, walked: dict[Family, Candidate], cheap: Iterable[Candidate]
) -> tuple[Candidate, ...]:
    """A row per family: what was walked as it came out, the others by the cheap figures; the largest first."""
    rows = [walked.get(c.family, c) for c in cheap]
    others = [c for c in rows if winner is None or c.family != winner.family]
    others.sort(key=lambda c: (c.fits is False, -c.plan.micro_batch_size, -c.plan.seq_len, c.order))
    return (*([winner] if winner else []), *others)


def _within(candidate: Candidate, winner: Candidate) -> bool:
    """Whether a point is not beyond what its family was found to fit."""
    return candidate.family != winner.family or candidate.plan.micro_batch_size <= winner.plan.micro_batch_size
