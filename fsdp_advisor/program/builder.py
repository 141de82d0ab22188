"""Builds a step program: walks the tape's spans over all real layers and calls the engine's hooks in PyTorch's order."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import NamedTuple

from fsdp_advisor.model.fsdp_units import AT_ROOT, UnitId, unit_at
from fsdp_advisor.model.profile import Profile, Run
from fsdp_advisor.model.tape import BY_CODE, GENERATION_PHASES, REFERENCE_PHASES, ROOT, Op, Polynomial, Tape, TapePhase
from fsdp_advisor.program.accounts import Account, Phase, Stream
from fsdp_advisor.program.hooks import OrderInUnit, StepHooks
from fsdp_advisor.program.instructions import (
    NO_BUFFER,
    Alloc,
    BufferId,
    Compute,
    DropBatch,
    DropGraph,
    DropLoss,
    Free,
    HostWait,
    Instruction,
    MicroBatch,
    Reclassify,
    StepProgram,
    Visit,
)
from fsdp_advisor.program.spans import LayoutPart, Span, Steps, TapeLayout, tape_layout
from fsdp_advisor.program.storages import NO_STORAGES, Storages


def build_program(
    profile: Profile,
    tape: Tape,
    hooks: StepHooks,
    accumulation: int,
    *,
    only_first: frozenset[str] = frozenset(),
    trains: bool = True,
    keeps_graph: bool = True,
    compiled_embedding: bool = False,
) -> StepProgram:
    """The program of one steady-state step of `accumulation` micro-batches.

    Walks the first, the last and one other micro-batch, which stands for all those between. `only_first`: the phases of the tape that
    only the first micro-batch has. Without `trains` the program ends after the forwards, as an evaluation does. `keeps_graph`: the
    loop keeps a micro-batch's loss with its graph until the next loss. `compiled_embedding`: the embedding is compiled code.
    """
    layout = tape_layout(
        profile,
        tape,
        gradient_hooks=hooks.gradient_hooks,
        marked_units=hooks.marked_units,
        compiled_embedding=compiled_embedding,
    )
    step = StepBuilder()
    hooks.begin_step(step)
    if hooks.reference is not None:
        hooks.reference.begin_step(step)
    states = tuple(i for i in step.take() if isinstance(i, Alloc))
    micro_batches = []
    for index in range(min(accumulation, 3)):
        is_first, is_last = index == 0, index == min(accumulation, 3) - 1
        for each in (hooks, hooks.reference):
            if each is not None:
                each.begin_micro_batch(is_first=is_first, is_last=is_last)
        left_out = frozenset() if is_first else only_first
        walk = _MicroBatchWalk(profile, layout, hooks, step, left_out, keeps_graph)
        visits = tuple(walk.visits(is_first) if trains else walk.forwards())
        micro_batches.append(MicroBatch(accumulation - 2 if not (is_first or is_last) else 1, visits))
    if trains:
        if not keeps_graph:
            step.add(DropGraph())
        hooks.optimizer_step(step)
    return StepProgram(
        layout=layout,
        states=states,
        micro_batches=tuple(micro_batches),
        optimizer=Visit("optimizer", AT_ROOT, "optimizer step", step.take()),
        lazily_created=frozenset(step.lazily_created),
        first_step_transients=hooks.first_step_transients(),
        rebuilt_buckets=hooks.rebuilt_buckets(tape),
        gradient_stream=hooks.gradient_stream,
    )


class StepBuilder:
    """Collects instructions. Tracks the buffers that an engine has to free, and the tape's gradients."""

    def __init__(self) -> None:
        self.following: UnitId | None = None
        """The next layer after the current one in this direction."""
        self.lazily_created: set[BufferId] = set()
        """The states that the first step creates."""
        self._instructions: list[Instruction] = []
        self._buffers: list[Alloc] = []
        self._late_frees = 0
        self._gradients: dict[BufferId, None] = {}  # whole gradients that are alive, in order
        self._latest: dict[tuple[int, bool], BufferId] = {}  # (parameter, whether the root's) -> its latest gradient
        self._complete: set[BufferId] = set()  # gradients given by `take_gradient`
        self._of_layer: list[BufferId] = []
        self._of_root: list[BufferId] = []
        self._fresh: list[BufferId] = []
        self._owned: defaultdict[UnitId, list[tuple[OrderInUnit, BufferId]]] = defaultdict(list)

    def add(self, instruction: Instruction) -> None:
        self._instructions.append(instruction)

    def take(self) -> tuple[Instruction, ...]:
        """The instructions since the last call."""
        taken, self._instructions = tuple(self._instructions), []
        return taken

    # Memory

    def alloc(
        self,
        account: Account,
        storages: Storages = NO_STORAGES,
        stream: Stream = Stream.COMPUTE,
        *,
        per_batch: Polynomial | None = None,
    ) -> BufferId:
        """Allocate `storages`, or one storage of `per_batch` bytes (a polynomial in B and T), and return their buffer; NO_BUFFER if there
        is nothing to allocate.
        """
        if not storages.rounded and (per_batch is None or not any(per_batch)):
            return NO_BUFFER
        buffer = self._named(Alloc(len(self._buffers), account, stream, storages, per_batch))
        if account is Account.UNSHARDED_GRADIENTS:
            self._gradients[buffer] = None
        self.add(self._buffers[buffer])
        return buffer

    def alloc_in_first_step(self, account: Account, storages: Storages, stream: Stream = Stream.COMPUTE) -> BufferId:
        """Allocate states that the first step creates, and return their buffer."""
        buffer = self.alloc(account, storages, stream)
        if buffer != NO_BUFFER:
            self.lazily_created.add(buffer)
        return buffer

    def free(self, *buffers: BufferId, used_on: Stream | None = None) -> None:
        """Free buffers. `used_on`: another stream that may still use them; their reuse waits for it."""
        for buffer in buffers:
            if buffer == NO_BUFFER:
                continue
            allocated = self._buffers[buffer]
            other = None if used_on == allocated.stream else used_on
            if other is not None:
                self._late_frees += sum(1 for _ in allocated.storages.each())
            self._gradients.pop(buffer, None)
            self.add(Free(buffer, allocated.account, allocated.storages.rounded, allocated.per_batch, other))

    def transient(self, account: Account, storages: Storages, stream: Stream = Stream.COMPUTE) -> None:
        """Allocate and free immediately."""
        self.free(self.alloc(account, storages, stream))

    def reclassify(self, account: Account, *buffers: BufferId) -> None:
        """Count buffers in another account from now on."""
        for buffer in buffers:
            allocated = self._buffers[buffer]
            self._gradients.pop(buffer, None)
            self._buffers[buffer] = allocated._replace(account=account)
            self.add(Reclassify(buffer, allocated.storages.rounded, allocated.account, account))

    def late_frees(self) -> int:
        """The number of storages freed so far that another stream may still use (late frees). `wait` takes such a number."""
        return self._late_frees

    def wait(self, late_frees: int) -> None:
        """Make the host wait until the first `late_frees` late frees have ended."""
        self.add(HostWait(late_frees))

    # The tape's gradients

    def add_span(
        self,
        span: Span,
        layer: int,
        stream: Stream,
        owner_of: Callable[[int, bool], tuple[UnitId, OrderInUnit] | None],
    ) -> None:
        """Add the span's instruction. Each gradient that the span allocates becomes a buffer."""
        named = []
        for birth, parameter, at_root, storages in span.gradients:
            buffer = self._named(Alloc(len(self._buffers), Account.UNSHARDED_GRADIENTS, stream, storages))
            named.append((birth, buffer))
            self._gradients[buffer] = None
            self._latest[parameter, at_root] = buffer
            self._fresh.append(buffer)
            if (owner := owner_of(parameter, at_root)) is not None:
                self._owned[owner[0]].append((owner[1], buffer))
            (self._of_root if at_root else self._of_layer).append(buffer)
        self.add(Compute(span, layer, tuple(named)))

    def take_gradients(self, unit: UnitId) -> list[BufferId]:
        """The gradients of a unit's parameters since the last call."""
        if unit == AT_ROOT:
            taken, self._of_root = self._of_root, []
        else:
            taken, self._of_layer = self._of_layer, []
        return taken

    def take_owned_gradients(self, unit: UnitId) -> list[tuple[OrderInUnit, BufferId]]:
        """The gradients of a unit (`StepHooks.owner_of`) since the last call, in the order of their allocation."""
        return self._owned.pop(unit, [])

    def take_new_gradients(self, waiting: Collection[BufferId] = ()) -> list[BufferId]:
        """The gradients that were allocated since the last call. `waiting`: those that a later call takes."""
        taken = [gradient for gradient in self._fresh if gradient not in waiting]
        self._fresh = [gradient for gradient in self._fresh if gradient in waiting]
        return taken

    def gradient(self, parameter: int, *, at_root: bool) -> BufferId:
        """The latest gradient of one parameter of the current layer, or of the root; NO_BUFFER if it gets none."""
        return self._latest.get((parameter, at_root), NO_BUFFER)

    def take_gradient(self, parameter: int, *, at_root: bool) -> BufferId:
        """The same as `gradient` at the first call for a gradient; NO_BUFFER at later calls."""
        found = self.gradient(parameter, at_root=at_root)
        if found in self._complete:
            return NO_BUFFER
        self._complete.add(found)
        return found

    def whole_gradients(self) -> list[BufferId]:
        """Every unsharded gradient that is alive."""
        return list(self._gradients)

    def n_bytes(self, buffer: BufferId) -> int:
        return self._buffers[buffer].storages.rounded

    def begin_forward(self) -> None:
        self._of_layer, self._of_root, self._fresh = [], [], []
        self._owned.clear()

    def _named(self, alloc: Alloc) -> BufferId:
        self._buffers.append(alloc)
        return alloc.buffer


class _MicroBatchWalk:
    """Walks one micro-batch: every real layer, forward and backward."""

    def __init__(
        self,
        profile: Profile,
        layout: TapeLayout,
        hooks: StepHooks,
        step: StepBuilder,
        left_out: frozenset[str],
        keeps_graph: bool,
    ) -> None:
        self._profile, self._layout, self._hooks, self._step = profile, layout, hooks, step
        self._left_out, self._keeps_graph = left_out, keeps_graph
        self._ran: set[StepHooks] = set()

    def visits(self, is_first: bool) -> Iterator[Visit]:
        step = self._step
        if not is_first:
            if not self._keeps_graph:
                step.add(DropGraph())
            step.add(DropBatch())
        step.begin_forward()
        yield from self._direction("forward", self._layout.forward)
        if not is_first:
            step.add(DropLoss(self._keeps_graph))
        yield from self._direction("backward", self._layout.backward)
        self._hooks.end_backward(step)
        yield Visit("backward", AT_ROOT, "end of backward", step.take())

    def forwards(self) -> Iterator[Visit]:
        """The forwards of a micro-batch without a backward."""
        self._step.begin_forward()
        yield from self._direction("forward", self._layout.forward)

    def _direction(self, phase: Phase, parts: tuple[LayoutPart, ...]) -> Iterator[Visit]:
        played = tuple(part for part in parts if part.phase not in self._left_out)
        entries = list(_entries(self._profile, played, backward=phase == "backward"))
        following = _following([entry.unit for entry in entries])
        generating = [at for at, entry in enumerate(entries) if entry.phase in GENERATION_PHASES]
        for at, (entry, after) in enumerate(zip(entries, following, strict=True)):
            self._step.following = after
            if at in generating[:1]:
                self._hooks.begin_generation(self._step)
            self._play(phase, entry)
            if at in generating[-1:]:
                self._hooks.end_generation(self._step)
            if phase == "backward" and entry.unit != AT_ROOT:
                self._hooks.layer_done(self._step, entry.unit)
            name = unit_name(self._profile, entry.unit)
            name = name if entry.phase in ("forward", "backward") else f"{entry.phase} {name}"
            yield Visit(phase, entry.unit, name, self._step.take(), entry.segment, entry.repetition)

    def _hooks_of(self, entry: _Entry) -> StepHooks:
        """The hooks that run around the unit: those of the reference model, or of the trained one."""
        is_reference = entry.phase in REFERENCE_PHASES
        return (self._hooks.reference if is_reference else None) or self._hooks

    def _play(self, phase: Phase, entry: _Entry) -> None:
        hooks, step, unit = self._hooks_of(entry), self._step, entry.unit
        for item in entry.steps:
            if isinstance(item, Span):
                step.add_span(item, entry.layer, hooks.gradient_stream, partial(hooks.owner_of, unit, entry.layer))
                continue
            at = unit_at(item.a, unit)
            match item.op:
                case Op.PRE_FORWARD if phase == "backward":
                    hooks.before_recomputation(step, at)
                case Op.POST_FORWARD if phase == "backward":
                    hooks.after_recomputation(step, at)
                case Op.PRE_FORWARD if item.b == BY_CODE:
                    hooks.gather_by_code(step, at)
                case Op.PRE_FORWARD:
                    if at == AT_ROOT:
                        hooks.begin_forward(with_gradients=entry.phase == "forward", repeated=hooks in self._ran)
                        self._ran.add(hooks)
                    hooks.pre_forward(step, at)
                case Op.POST_FORWARD:
                    hooks.post_forward(step, at)
                case Op.PRE_BACKWARD:
                    hooks.pre_backward(step, at)
                case Op.POST_BACKWARD:
                    hooks.post_backward(step, at)
                case Op.GRAD_READY:
                    gradient = step.take_gradient(item.a, at_root=bool(item.b))
                    hooks.gradient_ready(step, AT_ROOT if item.b else unit, item.a, gradient)
                case Op.ALLOC | Op.FREE:
                    raise AssertionError("allocations are in spans")


class _Entry(NamedTuple):
    """One real layer or root segment of a phase of the tape; `layer` is its number in forward order."""

    phase: TapePhase
    unit: UnitId
    layer: int
    steps: Steps
    segment: int
    repetition: tuple[int, int] | None


def _entries(profile: Profile, parts: tuple[LayoutPart, ...], *, backward: bool) -> Iterator[_Entry]:
    """Every real layer and root segment of one direction, in order."""
    for part in parts:
        if part.stack == ROOT:
            yield _Entry(part.phase, AT_ROOT, 0, part.steps[0], part.segments[0], None)
            continue
        layers = list(_real_layers(profile.stacks[part.stack].runs))
        if backward:
            layers.reverse()
        last = {recorded: at for at, (recorded, _, _) in enumerate(layers)}
        for at, (recorded, number, repetition) in enumerate(layers):
            if recorded not in part.steps:
                continue  # nothing below or in this layer is trained, so it has no backward
            is_last = recorded in part.last and last[recorded] == at
            steps = part.last[recorded] if is_last else part.steps[recorded]
            yield _Entry(part.phase, UnitId(part.stack, recorded), number, steps, part.segments[recorded], repetition)


def _real_layers(runs: tuple[Run, ...]) -> Iterator[tuple[int, int, tuple[int, int]]]:
    """(recorded layer, number of the real layer, (run, repetition)) in forward order."""
    number = 0
    for r, run in enumerate(runs):
        for repetition in range(run.repeats):
            for recorded in run.pattern:
                yield recorded, number, (r, repetition)
                number += 1


def _following(units: Sequence[UnitId]) -> list[UnitId | None]:
    """The next layer after each unit; None after the last."""
    result: list[UnitId | None] = []
    upcoming: UnitId | None = None
    for unit in reversed(units):
        result.append(upcoming)
        if not unit.is_outside_layers:
            upcoming = unit
    return result[::-1]


def unit_name(profile: Profile, unit: UnitId) -> str:
    """The name of a unit: `model.layers.LlamaDecoderLayer`, or the class of the root."""
    stack, layer = unit[:2]
    if stack == ROOT:
        return profile.root.kind
    return f"{profile.stacks[stack].path}.{profile.stacks[stack].units[layer].kind}"
