"""Expand a step program into the caching allocator's operations: allocations and frees of every storage of every layer."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from typing import get_args

from fsdp_advisor.memory.allocator.caching import FREE, FREE_LATER, MALLOC, WAIT, operation, storage_of
from fsdp_advisor.memory.allocator.job_operations import StepOperations
from fsdp_advisor.model.tape import ROOT, ZERO, Category, Op, ScoringPhase, Segment, Tape, Tiled, value_at
from fsdp_advisor.program.accounts import Account, Stream
from fsdp_advisor.program.embedding_workspace import EmbeddingGradient, embedding_workspace_bytes
from fsdp_advisor.program.instructions import (
    Alloc,
    BufferId,
    Compute,
    CreateStates,
    DropBatch,
    DropGraph,
    DropLoss,
    Free,
    HostWait,
    Instruction,
    MicroBatch,
    StepProgram,
    Visit,
)
from fsdp_advisor.program.spans import Allocated, Span, storage_bytes
from fsdp_advisor.program.storages import Storages, WeightTransfer, round_up

LAUNCH_QUEUE = 1024
"""The number of kernels by which the host may be ahead of the GPU; the next launch waits. An operator counts as one kernel.

Source: about 1000, measured (forums.developer.nvidia.com/t/68937, stackoverflow.com/questions/53970187). NVIDIA documents none.
"""

_NEAR, _FAR, _ALLOC, _EMBEDDING = range(4)
_INPUT, _GRADIENT = int(Category.INPUT), int(Category.GRADIENT)
_PARTIAL_GRADIENT, _WORKSPACE = int(Category.PARTIAL_GRADIENT), int(Category.SCRATCH)
_TEMPORARY, _DEQUANTIZED, _LOSS = int(Category.TEMPORARY), int(Category.DEQUANTIZED), int(Category.LOSS)
_Drop = DropBatch | DropGraph | DropLoss


def step_operations(
    program: StepProgram,
    b: int,
    t: int,
    *,
    resident_threads: int = 0,
    workspace_bytes: Sequence[int] = (),
    loaded: Sequence[WeightTransfer] = (),
    one_batch: bool = False,
) -> StepOperations:
    """The operations of a program's steps at micro-batch `b` and `t` tokens.

    `resident_threads`: the number of threads that the GPU runs at once; 0 leaves out the workspaces that only a GPU's kernels have.
    `workspace_bytes`: cuBLAS workspaces of the threads that run forward and backward. `loaded`: the transfers that load the
    parameters; without them the parameters are allocated directly. `one_batch`: all micro-batches use the same tensors, which
    are allocated before the first step, and gradients are reduced in each micro-batch, so DDP rebuilds its buckets at the second
    forward.
    """
    sizes = storage_bytes(program.layout.tape, b, t, resident_threads)
    reader = _Reader(program, sizes, b, t, one_batch, on_gpu=resident_threads > 0)
    reader.read()
    return _Assembly(program, reader, [round_up(n) for n in workspace_bytes], loaded).operations()


class _Reader:
    """Expands a program into operations."""

    def __init__(
        self, program: StepProgram, sizes: Sequence[int], b: int, t: int, one_batch: bool, *, on_gpu: bool
    ) -> None:
        self._program, self._sizes, self._b, self._t, self._one_batch = program, sizes, b, t, one_batch
        self._embeddings = program.layout.embedding_gradients if on_gpu else {}
        self._tape = program.layout.tape
        self.requests: list[int] = []
        self.operations: list[int] = []
        self.visits: list[tuple[int, str, str]] = []
        self.residents: list[tuple[Account, int]] = []  # alive when a step begins
        self.lazily_created: dict[BufferId, tuple[int, ...]] = {}  # residents that the first step creates
        self.created_at: dict[BufferId, int] = {}  # indices of operations
        self.batch: list[int] = []  # inputs of the first micro-batch, if there is one batch
        self.first_layer = self.first_product = self.second_forward = -1  # indices of operations
        self._storages: dict[BufferId, tuple[int, ...]] = {}
        # by phase and stack: the storages of each real layer, by birth
        self._layers: dict[tuple[str, int], list[list[int]]] = {}
        self._roots: dict[int, list[int]] = {}  # by segment of the root: its storages, by birth
        self._compiled: dict[int, list[tuple[int, int, int, int]]] = {}
        self._inputs: list[int] = []
        # alive storages of this micro-batch that are neither inputs nor gradients, with their categories
        self._left_over: dict[int, int] = {}
        self._dropped_later: list[int] = []
        self._late = self._waited = self._launched = 0
        self._held_back: deque[tuple[int, int]] = deque()  # (kernels launched, late frees) at each late free
        self._entered = False

    def read(self) -> None:
        for alloc in self._program.states:
            numbers = self._allocate(alloc)
            self.residents += [(alloc.account, number) for number in numbers]
            if alloc.buffer in self._program.lazily_created:
                self.lazily_created[alloc.buffer] = numbers
        self.operations.clear()
        for index, micro_batch in enumerate(self._program.micro_batches):
            self._micro_batch(index, micro_batch)
        self._visit(self._program.optimizer)

    def _micro_batch(self, index: int, micro_batch: MicroBatch) -> None:
        if index == 1:
            self.second_forward = len(self.operations)
        for phase in _PHASES[1:]:
            for stack, recorded in enumerate(self._program.layout.recorded_layers):
                self._layers[phase, stack] = [[] for _ in recorded]
        for visit in micro_batch.visits:
            self._visit(visit)
        if index == 0:
            self._find_product_of_head()
            if self._one_batch:
                self.batch = list(self._inputs)

    def _find_product_of_head(self) -> None:
        """Let `first_product` be in the loss's backward if that computes products without a weight's gradient: of the first tile of logits,
        or of their gradient.
        """
        tape = self._tape
        for number, segment in enumerate(tape.segments):
            if segment.phase == "backward" and segment.stack == ROOT and segment.matmul_flops != ZERO:
                births = tape.births[number]
                if any(category >= _PARTIAL_GRADIENT and category != _WORKSPACE for _, category in births):
                    return
                of_loss = [birth for birth, (_, category) in enumerate(births) if category == _LOSS]
                tiles = [birth for birth in of_loss if isinstance(tape.sizes[births[birth][0]], Tiled)]
                outputs = [self._roots[number][birth] for birth in (*tiles[:1], *of_loss[-1:])]
                made = [self.operations.index(operation(MALLOC, output)) + 1 for output in outputs if output >= 0]
                self.first_product = min((at for at in (self.first_product, *made) if at >= 0), default=-1)
                return

    def _visit(self, visit: Visit) -> None:
        instructions = visit.instructions
        while instructions and isinstance(instructions[0], _Drop):  # before the visit begins
            self._drop(instructions[0])
            instructions = instructions[1:]
        self.visits.append((len(self.operations), visit.phase, visit.name))
        self._entered = True
        while self._held_back and self._launched - self._held_back[0][0] >= LAUNCH_QUEUE:
            self._wait(self._held_back.popleft()[1])
        if not visit.unit.is_outside_layers and self.first_layer < 0:
            self.first_layer = len(self.operations)
        for instruction in instructions:
            self._execute(instruction)

    def _execute(self, instruction: Instruction) -> None:
        if isinstance(instruction, Compute):
            self._compute(instruction)
        elif isinstance(instruction, Alloc):
            self._allocate(instruction)
        elif isinstance(instruction, Free):
            self._free(instruction)
        elif isinstance(instruction, HostWait):
            self._wait(instruction.late_frees)
        elif isinstance(instruction, _Drop):
            self._drop(instruction)
        elif isinstance(instruction, CreateStates):
            self.created_at[instruction.buffer] = len(self.operations)

    # Buffers

    def _allocate(self, alloc: Alloc) -> tuple[int, ...]:
        sizes: Iterable[int] = alloc.storages.each()
        if alloc.per_batch is not None:
            sizes = [value_at(alloc.per_batch, self._b, self._t)]
        numbers = tuple([self._malloc(round_up(n_bytes) | alloc.stream) for n_bytes in sizes])
        self._storages[alloc.buffer] = numbers
        return numbers

    def _free(self, free: Free) -> None:
        for number in self._storages.pop(free.buffer):
            if free.used_on is None:
                self.operations.append(operation(FREE, number))
            else:
                self.operations.append(operation(FREE_LATER, number))
                self._late += 1
                self._held_back.append((self._launched, self._late))

    def _wait(self, late_frees: int) -> None:
        if late_frees > self._waited:
            self._waited = late_frees
            self.operations.append(operation(WAIT, late_frees))

    def _malloc(self, request: int) -> int:
        number = len(self.requests)
        self.requests.append(request)
        self.operations.append(operation(MALLOC, number))
        return number

    # The tape's storages

    def _compute(self, compute: Compute) -> None:
        span = compute.span
        segment = self._tape.segments[span.segment]
        if self._entered:
            self._launched += segment.operators
            self._entered = False
        births, instances, at = self._births(segment, span, compute.layer)
        changes = self._compiled.get(span.number)
        if changes is None:
            changes = self._compiled[span.number] = self._compile(span, segment)
        operations, requests = self.operations, self.requests
        for kind, a, b, c in changes:
            if kind == _ALLOC:
                number = len(requests)
                requests.append(a)
                births[b] = number
                if c == _INPUT:
                    self._inputs.append(number)
                    if self._one_batch:
                        continue
                operations.append(number * 4 + MALLOC)
                if c < _GRADIENT and c != _INPUT:
                    self._left_over[number] = c
                if c >= _PARTIAL_GRADIENT and c != _WORKSPACE and self.first_product < 0:
                    self.first_product = len(operations)
            elif kind == _EMBEDDING:
                self._add_rows(self._embeddings[a, b])
            elif kind == _NEAR:
                source = instances if a == 0 else self._layers[_PHASES[a], segment.stack]
                self._free_storage(source[at + b][c])
            else:
                for number in self._far(a, b):
                    self._free_storage(number)
        for birth, buffer in compute.gradients:
            self._storages[buffer] = (births[birth],)

    def _add_rows(self, gradient: EmbeddingGradient) -> None:
        """Add the output's gradient to the embedding's, in a workspace."""
        indices = value_at(gradient.indices, self._b, self._t)
        workspace = embedding_workspace_bytes(indices, gradient.rows, gradient.columns)
        for number in [self._malloc(round_up(n_bytes)) for n_bytes in workspace]:
            self.operations.append(operation(FREE, number))

    def _free_storage(self, number: int) -> None:
        if self._one_batch and number in self._inputs:
            return
        self._left_over.pop(number, None)
        self.operations.append(number * 4 + FREE)

    def _births(self, segment: Segment, span: Span, layer: int) -> tuple[list[int], list[list[int]], int]:
        """(the storages of the span's segment by birth, those of every layer of its stack, index of this layer). The root counts as one
        layer.
        """
        count = len(self._tape.births[span.segment])
        if segment.stack == ROOT:
            births = self._roots.setdefault(span.segment, [-1] * count)
            return births, [births], 0
        instances = self._layers[segment.phase, segment.stack]
        births = instances[layer]
        if not births:
            births += [-1] * count
        return births, instances, layer

    def _compile(self, span: Span, segment: Segment) -> list[tuple[int, int, int, int]]:
        """A span as a list of (_ALLOC, request, birth, category), (_NEAR, phase, layers away, birth), (_FAR, segment,
        birth, 0) or (_EMBEDDING, segment, event, 0).
        """
        tape, sizes = self._tape, self._sizes
        result = []
        for event in span.events:
            if not sizes[event.size]:
                continue
            if isinstance(event, Allocated):
                category = _TEMPORARY if event.category == _DEQUANTIZED else event.category
                is_sum = category == _PARTIAL_GRADIENT and _sums_gradients(tape, segment, event.at)
                stream = self._program.gradient_stream if category >= _GRADIENT or is_sum else Stream.COMPUTE
                result.append((_ALLOC, sizes[event.size] | stream, event.birth, category))
                if (span.segment, event.at) in self._embeddings:
                    result.append((_EMBEDDING, span.segment, event.at, 0))
            elif event.is_near:
                born = tape.segments[event.segment]
                phase = 0 if born.phase == segment.phase else _PHASES.index(born.phase)
                result.append((_NEAR, phase, born.layer - segment.layer, event.birth))
            else:
                result.append((_FAR, event.segment, event.birth, 0))
        return result

    def _far(self, segment: int, birth: int) -> list[int]:
        """The storages of a birth in a distant segment: one of the root, or one of every layer that a recorded layer stands
        for.
        """
        born = self._tape.segments[segment]
        if born.stack == ROOT:
            return [self._roots[segment][birth]]
        recorded_layers = self._program.layout.recorded_layers[born.stack]
        layers = zip(recorded_layers, self._layers[born.phase, born.stack], strict=True)
        return [births[birth] for recorded, births in layers if recorded == born.layer]

    def _drop(self, instruction: _Drop) -> None:
        """Free tensors of the previous micro-batch: what its graph keeps, its inputs, or, when there is a new loss, what is left."""
        if isinstance(instruction, DropGraph):
            for number in [number for number, category in self._left_over.items() if category != _LOSS]:
                self._free_storage(number)
            return
        if isinstance(instruction, DropLoss):
            self.operations += [operation(FREE, number) for number in self._dropped_later]
            return
        if not self._one_batch:
            self.operations += [operation(FREE, number) for number in self._inputs]
        self._inputs = []
        self._dropped_later, self._left_over = list(self._left_over), {}


_PHASES = ("", "forward", "routers", "backward", *get_args(ScoringPhase))


def _sums_gradients(tape: Tape, segment: Segment, at: int) -> bool:
    """Whether the storage is the sum of two gradients of a weight that is used twice. Both are freed right after the
    sum is allocated.
    """
    parts = 0
    for op, a, b in segment.events[at + 1 :]:
        if op == Op.ALLOC:
            break
        parts += op == Op.FREE and tape.births[a][b][0] == segment.events[at][1]
    return parts >= 2


class _Assembly:
    """Puts setup, the first step and the following ones together."""

    def __init__(
        self, program: StepProgram, read: _Reader, workspaces: Sequence[int], loaded: Sequence[WeightTransfer]
    ) -> None:
        self._program, self._read, self._workspaces, self._loaded = program, read, workspaces, loaded
        self._requests = list(read.requests)
        self._step = list(read.operations)

    def operations(self) -> StepOperations:
        freed = {op >> 2 for op in self._step if op & 3 in (FREE, FREE_LATER)}
        carried_over = self._end_step(freed)
        not_yet = {number for numbers in self._read.lazily_created.values() for number in numbers}
        setup = self._setup(not_yet)
        first = self._first_step(freed, setup)
        skipped = {operation(kind, number) for number in not_yet & freed for kind in (FREE, FREE_LATER)}
        return StepOperations(
            requests=tuple(self._requests),
            setup=tuple(setup),
            first=tuple([operation for operation in first if operation not in skipped] if skipped else first),
            following=tuple(self._step),
            carried_over=tuple(carried_over),
            visits=tuple(self._read.visits),
        )

    def _end_step(self, freed: set[int]) -> list[tuple[int, int]]:
        """Free the storages that the step leaves alive, as `zero_grad` does, except replacements of states.

        A storage replaces a state of equal size that the step has freed. Returns pairs of their numbers: (replacement, replaced state).
        """
        requests = self._requests
        wanted: defaultdict[int, list[int]] = defaultdict(list)
        for number in sorted({number for _, number in self._read.residents} & freed, reverse=True):
            wanted[requests[number]].append(number)
        allocated = {op >> 2 for op in self._step if op & 3 == MALLOC}
        carried_over = []
        for number in sorted(allocated - freed):
            if wanted[requests[number]]:
                carried_over.append((number, wanted[requests[number]].pop()))
            else:
                self._step.append(operation(FREE, number))
        return carried_over

    def _first_step(self, freed: set[int], setup: list[int]) -> list[int]:
        """The first step also allocates cuBLAS workspaces, optimizer state and what the engine creates lazily.

        The forward workspace is allocated at the first layer; the backward one after the output of the first matrix product: the first
        gradient of a weight, or what the head computes before (ATen/native/cuda/Blas.cpp, addmm_out_cuda_impl).
        """
        read = self._read
        optimizer = next((at for at, phase, _ in read.visits if phase == "optimizer"), len(self._step))
        inserted = [
            (read.created_at.get(buffer, optimizer), [operation(MALLOC, n) for n in numbers if n not in freed])
            for buffer, numbers in reversed(read.lazily_created.items())
        ]
        for at, n_bytes in zip((read.first_layer, read.first_product), self._workspaces, strict=False):
            inserted.append((at, [operation(MALLOC, self._new(n_bytes))]))
        transients = [self._new(round_up(n)) for n in self._program.first_step_transients.each()]
        inserted.append((0, [operation(kind, number) for number in transients for kind in (MALLOC, FREE)]))
        rebuilt = self._program.rebuilt_buckets
        if rebuilt.exact:
            second = read.second_forward if read.batch and read.second_forward >= 0 else len(self._step)
            inserted.append((second, self._rebuild(rebuilt, setup)))
        first = list(self._step)
        for at, operations in sorted(inserted, key=lambda one: one[0], reverse=True):
            first[at:at] = operations
        return first

    def _new(self, request: int) -> int:
        self._requests.append(request)
        return len(self._requests) - 1

    def _rebuild(self, rebuilt: Storages, setup: list[int]) -> list[int]:
        """Replace the buckets in `setup` by one for all gradients. Return the operations that free it and allocate the rebuilt buckets."""
        buckets = [operation(MALLOC, n) for account, n in self._read.residents if account == Account.COMMUNICATION]
        at, whole = setup.index(buckets[0]), self._new(round_up(rebuilt.exact))
        setup[at : at + len(buckets)] = [operation(MALLOC, whole)]
        return [operation(FREE, whole), *(operation(MALLOC, self._new(round_up(n))) for n in rebuilt.each())]

    def _setup(self, not_yet: set[int]) -> list[int]:
        """The operations before the first step: the states, without those that a step creates (`not_yet`), and the temporary tensors of
        loading.
        """
        residents: defaultdict[int, deque[int]] = defaultdict(deque)
        for _, number in self._read.residents:
            if number not in not_yet:
                residents[self._requests[number]].append(number)
        temporaries_of = [[self._new(round_up(n)) for n in one.temporaries.each()] for one in self._loaded]
        by_transfer = [*zip(self._loaded, temporaries_of, strict=True)]
        setup = [operation(MALLOC, number) for one, numbers in by_transfer if one.is_loaded for number in numbers]
        late: list[int] = []  # temporaries of the previous transfer
        for one, temporaries in by_transfer:
            kept = [residents[round_up(n)].popleft() for n in one.kept.each()]
            setup += [] if one.is_loaded else [operation(MALLOC, number) for number in temporaries]
            setup += [operation(FREE, number) for number in late]
            setup += [operation(MALLOC, number) for number in kept]
            late = temporaries if one.frees_late else []
            setup += [operation(FREE, number) for number in temporaries if not one.frees_late]
        loaded = {storage_of(op) for op in setup}
        left = (number for _, number in self._read.residents if number not in not_yet and number not in loaded)
        return setup + [operation(MALLOC, number) for number in (*left, *self._read.batch)]
