"""A step as the allocator sees it: every storage of every layer, allocated and freed, in order.

`Trace` hears what the `Ledger` hears. Where the ledger adds up a tape's stretches and jumps over layers that repeat, the trace
writes down each storage of each real layer.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fsdp_advisor.engines.transfer import WeightTransfer
from fsdp_advisor.memory.allocator.caching import FREE, FREE_LATER, MALLOC, STREAM_MASK, WAIT
from fsdp_advisor.memory.ledger import (
    AT_ROOT,
    COMMUNICATION,
    COMPUTE,
    PARAMETERS,
    UNSHARDED_GRADIENTS,
    Alive,
    Changes,
    Ledger,
    Place,
    Stretch,
)
from fsdp_advisor.memory.score import Events, Sized, stays_near
from fsdp_advisor.memory.storages import NO_STORAGES, Storages, round_up
from fsdp_advisor.model.profile import ROOT, Category, Op, Profile, Segment, Tape

LAUNCH_QUEUE = 1024
"""How many kernels the host may be ahead of the GPU: the next launch waits for room. An operator counts as one kernel.

Source: about 1000, measured (forums.developer.nvidia.com/t/68937, stackoverflow.com/questions/53970187); the number that
drivers are said to have. NVIDIA documents none.
"""

_ALLOC, _GRADIENT, _INPUT = int(Op.ALLOC), int(Category.GRADIENT), int(Category.INPUT)
_WHOLE_GRADIENT, _SCRATCH = int(Category.UNSHARDED_GRADIENT), int(Category.SCRATCH)
_NEAR, _FAR, _BORN = range(3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """What a job asks of the allocator. Operations as `caching` defines them, storages by number.

    `setup` is what stands before the first step; `first` and `following` are steps. `handed_on` are the storages that a step
    leaves to the next: (as it was born, as the next step knows it). `places` says where in a step: (operation, phase, where).
    """

    requests: tuple[int, ...]
    setup: tuple[int, ...]
    first: tuple[int, ...]
    following: tuple[int, ...]
    handed_on: tuple[tuple[int, int], ...]
    places: tuple[tuple[int, str, str], ...]

    def where(self, storage: int) -> tuple[str, str]:
        """The phase and the place in which a storage is allocated."""
        operation = storage * 4 + MALLOC
        at = self.following.index(operation) if operation in self.following else 0
        return next(((phase, where) for start, phase, where in reversed(self.places) if start <= at), ("forward", ""))


class Trace(Ledger):
    """One step in the steady state, written down. `steps()` is what comes of it once the step has been replayed."""

    def __init__(self, profile: Profile, tape: Tape, sized: Sized, *, gradient_stream: int = COMPUTE) -> None:
        super().__init__()
        self._gradient_stream = gradient_stream
        self._profile, self._tape, self._score = profile, tape, sized.score
        self._sizes = dict(zip(sized.score.sizes, sized.sizes, strict=True))
        self._requests: list[int] = []
        self._operations: list[int] = []
        self._places: list[tuple[int, str, str]] = []
        self._residents: list[tuple[int, int]] = []  # (account, storage) alive when a step begins
        self._recorded = [_recorded(profile, s) for s in range(len(profile.stacks))]
        self._at = [0] * len(profile.stacks)  # the real layer that is being played, by stack
        self._instances: dict[tuple[str, int], list[list[int]]] = {}  # by phase and stack: each real layer's births
        self._roots: dict[int, list[int]] = {}  # by segment of the root
        self._stretches: dict[Events, list[tuple[int, int, int, int]]] = {}
        self._gradients: dict[int, int] = {}  # storage -> parameter, of whole gradients that are alive
        self._by_number: dict[int, int] = {}  # parameter -> the storage of its last gradient
        self._own: list[int] = []
        self._root: list[int] = []
        self._fresh: list[int] = []
        self._changed: dict[int, int] = {}
        self._tape_born: list[tuple[int, int]] = []  # (storage, category), of this micro-batch
        self._batches: list[list[int]] = []  # of each micro-batch
        self._last: list[int] = []  # what the last micro-batch left behind, until there is another loss
        self._late = self._waited = self._launched = 0
        self._held_back: deque[tuple[int, int]] = deque()  # (kernels launched, late frees) at each late free
        self._entered = False
        self._second_forward = -1
        self._first_layer = self._first_weight = -1  # operations after which the two threads' first products are

    @property
    def follows_storages(self) -> bool:
        return True

    # What schedules tell

    def born(self, account: int, held: Storages, stream: int = COMPUTE) -> Alive:
        numbers = tuple([self._allocate(round_up(n_bytes) | stream) for n_bytes in held.each()])
        if account == UNSHARDED_GRADIENTS:
            self._gradients.update(dict.fromkeys(numbers, -1))
        if not self.resident:
            self._residents += [(account, number) for number in numbers]
        return account, held.rounded, numbers

    def died(self, alive: Alive, used_on: int | None = None) -> None:
        for number in alive[2]:
            self._gradients.pop(number, None)
            if (
                used_on is None or used_on == self._requests[number] & STREAM_MASK
            ):  # recordStream ignores the stream itself
                self._operations.append(number * 4 + FREE)
            else:
                self._operations.append(number * 4 + FREE_LATER)
                self._late += 1
                self._held_back.append((self._launched, self._late))

    def turned(self, alive: Alive, account: int) -> Alive:
        for number in alive[2]:
            self._gradients.pop(number, None)
        return account, alive[1], alive[2]

    def changed(self, account: int, net_bytes: int, stream: int, *changes: Changes) -> None:
        for name, n_bytes in (change for row in changes for change in row):
            if n_bytes:
                self._changed[name] = self._allocate(round_up(n_bytes) | stream)
            else:
                self._operations.append(self._changed.pop(name) * 4 + FREE)

    def gradients_of(self, place: Place) -> Alive:
        if place == AT_ROOT:
            numbers, self._root = self._root, []
        else:
            numbers, self._own = self._own, []
        return self._alive_gradients(numbers)

    def gradients_since_mark(self) -> Alive:
        numbers, self._fresh = self._fresh, []
        return self._alive_gradients(numbers)

    def gradient(self, parameter: int, at_root: bool, n_bytes: int) -> Alive:
        return UNSHARDED_GRADIENTS, n_bytes, (self._by_number[2 * parameter + at_root],)

    def all_gradients(self) -> Alive:
        return self._alive_gradients(list(self._gradients))

    def mark(self) -> int:
        return self._late

    def wait(self, mark: int) -> None:
        if mark > self._waited:
            self._waited = mark
            self._operations.append(mark * 4 + WAIT)

    # What the replay tells

    def begin_step(self) -> None:
        self.resident = [1]
        self._operations.clear()

    def begin(self, phase: str) -> None:
        self.phase = phase
        for s, recorded in enumerate(self._recorded):
            self._at[s] = len(recorded) if phase == "backward" else -1
            if phase != "optimizer":
                self._instances[phase, s] = [[] for _ in recorded]
        if phase == "forward":
            self._own, self._root, self._fresh = [], [], []

    def enter(self, place: Place, where: str) -> None:
        self.where = where
        self._places.append((len(self._operations), self.phase, where))
        self._entered = True
        while self._held_back and self._launched - self._held_back[0][0] >= LAUNCH_QUEUE:
            self.wait(self._held_back.popleft()[1])
        stack = place[0]
        if stack == ROOT:
            return
        if self._first_layer < 0:
            self._first_layer = len(self._operations)
        self._at[stack] += -1 if self.phase == "backward" else 1

    def begin_micro_batch(self, index: int) -> None:
        if index == 1:
            self._second_forward = len(self._operations)
        if index:
            over = {operation >> 2 for operation in self._operations if operation & 3 in (FREE, FREE_LATER)}
            left = [(number, category) for number, category in self._tape_born if number not in over]
            self._free(number for number, category in left if category == _INPUT)
            self._last = [number for number, category in left if category != _INPUT and category < _GRADIENT]
        self._tape_born = []
        self._batches.append([])

    def drop_last_loss(self) -> None:
        self._free(self._last)
        self._last = []

    def apply(self, stretch: Stretch) -> None:
        events = self._score.events[stretch.number]
        index = events[0]
        segment = self._tape.segments[index]
        if self._entered:
            self._launched += segment.operators
            self._entered = False
        if segment.stack == ROOT:
            births, at, instances = self._roots.setdefault(index, []), 0, [self._roots[index]]
            if events[1] == 0 or not births:
                births[:] = [-1] * len(self._tape.births[index])
        else:
            at, instances = self._at[segment.stack], self._instances[segment.phase, segment.stack]
            births = instances[at]
            if not births:
                births += [-1] * len(self._tape.births[index])
        changes = self._stretches.get(events)
        if changes is None:
            changes = self._stretches[events] = self._compile(*events)
        operations, requests = self._operations, self._requests
        for kind, a, b, c in changes:
            if kind == _BORN:
                number = len(requests)
                requests.append(a)
                operations.append(number * 4)
                births[b] = number
                self._tape_born.append((number, c))
                if c == _INPUT:
                    self._batches[-1].append(number)
                if c >= _GRADIENT:
                    self._made_gradient(number, c - _GRADIENT)
                if c >= _WHOLE_GRADIENT and c != _SCRATCH and self._first_weight < 0:
                    self._first_weight = len(operations)
            elif kind == _NEAR:
                source = instances if a == 0 else self._instances[_PHASES[a], segment.stack]
                operations.append(source[at + b][c] * 4 + FREE)
            else:
                self._free(self._far(a, b))

    def point(self, where: str, repeats: int = 1) -> None:
        pass

    # The tape's storages

    def _compile(self, index: int, start: int, end: int, last: bool) -> list[tuple[int, int, int, int]]:
        """A stretch as (_BORN, request, birth, category), (_NEAR, phase, layers away, birth) or (_FAR, segment, birth, 0)."""
        tape, left_out = self._tape, self._score.left_out
        segment = tape.segments[index]
        birth = sum(1 for op, _, _ in segment.events[:start] if op == _ALLOC)
        result = []
        for at, (op, a, b) in enumerate(segment.events[start:end], start):
            if op == _ALLOC:
                if b not in left_out and self._sizes[a]:
                    sums = b == _WHOLE_GRADIENT and _sums(tape, segment, at)
                    stream = self._gradient_stream if b >= _GRADIENT or sums else COMPUTE
                    result.append((_BORN, self._sizes[a] | stream, birth, b))
                birth += 1
            elif op == Op.FREE:
                size, category = tape.births[a][b]
                if category in left_out or not self._sizes[size]:
                    continue
                born = tape.segments[a]
                if stays_near(born, segment):
                    phase = 0 if born.phase == segment.phase else _PHASES.index(born.phase)
                    result.append((_NEAR, phase, born.layer - segment.layer, b))
                elif last:
                    result.append((_FAR, a, b, 0))
        return result

    def _far(self, segment: int, birth: int) -> list[int]:
        """The root's storage, or that of every layer which the recorded one stands for."""
        born = self._tape.segments[segment]
        if born.stack == ROOT:
            return [self._roots[segment][birth]]
        layers = zip(self._recorded[born.stack], self._instances[born.phase, born.stack], strict=True)
        return [births[birth] for recorded, births in layers if recorded == born.layer]

    def _made_gradient(self, number: int, parameter: int) -> None:
        self._gradients[number] = parameter
        self._by_number[parameter] = number
        self._fresh.append(number)
        (self._root if parameter & 1 else self._own).append(number)

    def _alive_gradients(self, numbers: list[int]) -> Alive:
        return UNSHARDED_GRADIENTS, sum(self._requests[n] & ~STREAM_MASK for n in numbers), tuple(numbers)

    def _allocate(self, request: int) -> int:
        number = len(self._requests)
        self._requests.append(request)
        self._operations.append(number * 4 + MALLOC)
        return number

    def _free(self, numbers: Iterable[int]) -> None:
        self._operations += [number * 4 + FREE for number in numbers]

    # What comes of it

    def steps(
        self,
        made_by_first_step: frozenset[int],
        workspaces: Sequence[int] = (),
        transfers: tuple[WeightTransfer, ...] = (),
        *,
        passing: Storages = NO_STORAGES,
        rebuilt: Storages = NO_STORAGES,
        batch_stands: bool = False,
    ) -> Steps:
        """`workspaces` are kept from the first matrix product on: that of the first layer; in the backward pass that which makes
        the first gradient of a weight, once its output is allocated (ATen/native/cuda/Blas.cpp, addmm_out_cuda_impl). `transfers` are
        how the parameters are loaded; without them they are simply there.

        `passing` is allocated and freed, one after the other, before the first step; `rebuilt` are DDP's buckets after it, during
        which one has all gradients. `batch_stands`: all micro-batches are the same one, which is there before the first step, and
        gradients are reduced in each: what is rebuilt is so at the second forward.
        What a step leaves takes the place of a storage of its size that died in it, or ends with the step (`zero_grad`).
        """
        if batch_stands:
            self._leave_out_batches()
        requests, step = list(self._requests), list(self._operations)
        residents = {number for _, number in self._residents}
        born = {operation >> 2 for operation in step if operation & 3 == MALLOC}
        over = {operation >> 2 for operation in step if operation & 3 in (FREE, FREE_LATER)}
        wanted: defaultdict[int, list[int]] = defaultdict(list)
        for number in sorted(residents & over, reverse=True):
            wanted[requests[number]].append(number)
        handed_on = []
        for number in sorted(born - over):
            if wanted[requests[number]]:
                handed_on.append((number, wanted[requests[number]].pop()))
            else:
                step.append(number * 4 + FREE)
        not_yet = {number for account, number in self._residents if account in made_by_first_step}
        optimizer = next((at for at, phase, _ in self._places if phase == "optimizer"), len(step))
        makes = [number for account, number in self._residents if account in made_by_first_step and number not in over]
        inserted = [(optimizer, [number * 4 + MALLOC for number in makes])]
        for at, n_bytes in zip((self._first_layer, self._first_weight), workspaces, strict=False):
            requests.append(n_bytes)
            inserted.append((at, [(len(requests) - 1) * 4 + MALLOC]))
        passes = range(len(requests), len(requests) + sum(1 for _ in passing.each()))
        requests += map(round_up, passing.each())
        inserted.append((0, [number * 4 + kind for number in passes for kind in (MALLOC, FREE)]))
        setup = self._set_up(requests, not_yet, transfers)
        if batch_stands:
            setup += [number * 4 + MALLOC for number in self._batches[0]]
        if rebuilt.exact:
            second = self._second_forward if batch_stands and self._second_forward >= 0 else len(step)
            inserted.append((second, self._rebuild(rebuilt, requests, setup)))
        first = list(step)
        for at, operations in sorted(inserted, key=lambda one: one[0], reverse=True):
            first[at:at] = operations
        skipped = {number * 4 + kind for number in not_yet & over for kind in (FREE, FREE_LATER)}
        return Steps(
            requests=tuple(requests),
            setup=tuple(setup),
            first=tuple(operation for operation in first if operation not in skipped),
            following=tuple(step),
            handed_on=tuple(handed_on),
            places=tuple(self._places),
        )

    def _rebuild(self, rebuilt: Storages, requests: list[int], setup: list[int]) -> list[int]:
        """One bucket for all of them in `setup`; and what it takes to put them in its place."""
        buckets = [number * 4 + MALLOC for account, number in self._residents if account == COMMUNICATION]
        at, whole = setup.index(buckets[0]), len(requests)
        setup[at : at + len(buckets)] = [whole * 4 + MALLOC]
        requests += map(round_up, (rebuilt.exact, *rebuilt.each()))
        return [whole * 4 + FREE, *(number * 4 + MALLOC for number in range(whole + 1, len(requests)))]

    def _leave_out_batches(self) -> None:
        batches = {number * 4 + kind for batch in self._batches for number in batch for kind in (MALLOC, FREE)}
        gone = [at for at, operation in enumerate(self._operations) if operation in batches]

        def moved(at: int) -> int:
            return at - bisect_left(gone, at)

        self._operations = [operation for operation in self._operations if operation not in batches]
        self._places = [(moved(at), phase, where) for at, phase, where in self._places]
        self._first_layer, self._first_weight = moved(self._first_layer), moved(self._first_weight)
        self._second_forward = moved(self._second_forward) if self._second_forward >= 0 else -1

    def _set_up(self, requests: list[int], not_yet: set[int], transfers: tuple[WeightTransfer, ...]) -> list[int]:
        """What stands before the first step, after what has passed through while it was loaded."""
        parameters: defaultdict[int, deque[int]] = defaultdict(deque)
        for account, number in self._residents:
            if account == PARAMETERS:
                parameters[requests[number]].append(number)
        setup: list[int] = []
        for one in transfers:
            begin = len(requests)
            requests += map(round_up, one.temporaries.each())
            passing = range(begin, len(requests))
            kept = [parameters[round_up(n_bytes)].popleft() for n_bytes in one.kept.each()]
            setup += [number * 4 + MALLOC for number in (*passing, *kept)]
            setup += [number * 4 + FREE for number in passing]
        loaded = {operation >> 2 for operation in setup}
        left = (number for _, number in self._residents if number not in not_yet and number not in loaded)
        return setup + [number * 4 + MALLOC for number in left]


_PHASES = ("", "forward", "backward")


def _sums(tape: Tape, segment: Segment, at: int) -> bool:
    """Whether what is born there is the sum of two gradients, which die at once: those of a weight that is used twice."""
    parts = 0
    for op, a, b in segment.events[at + 1 :]:
        if op == _ALLOC:
            break
        parts += op == Op.FREE and tape.births[a][b][0] == segment.events[at][1]
    return parts >= 2


def _recorded(profile: Profile, stack: int) -> list[int]:
    """Which recorded layer stands for each real one."""
    return [layer for run in profile.stacks[stack].runs for _ in range(run.repeats) for layer in run.pattern]
