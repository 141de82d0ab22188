"""Run a model's step under hooks, and record its events."""

from __future__ import annotations

import contextlib
import gc
import itertools
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_iter

from fsdp_advisor.model.fsdp_units import Units
from fsdp_advisor.model.tape import ROOT, Category, MarkedUnit, Op, Parts, TapePhase, Tiled
from fsdp_advisor.model.tape_key import TapeKey
from fsdp_advisor.model.tasks import task_of
from fsdp_advisor.recording.checkpointing import is_recomputing
from fsdp_advisor.recording.engines import FlatUnit, cast_floating, watch_input_gradients
from fsdp_advisor.recording.flash import in_scratch
from fsdp_advisor.recording.host import offloading, watched_copies
from fsdp_advisor.recording.loss_chunks import LossChunks
from fsdp_advisor.recording.operators import NONE, rows_and_columns
from fsdp_advisor.recording.places import HookedModule, Leaf, hooked_modules
from fsdp_advisor.recording.quantized import state_tensors
from fsdp_advisor.recording.remembered import Operators
from fsdp_advisor.recording.root_units import mark_root_units
from fsdp_advisor.recording.scoring import phases_watched, scoring_phase
from fsdp_advisor.recording.source import Source
from fsdp_advisor.recording.storages import StorageWatch
from fsdp_advisor.recording.take import RawSegment, Take
from fsdp_advisor.recording.tiled_mlp import gradients_wait
from fsdp_advisor.recording.tiles import current_parts, current_tile


class Step:
    """Runs the model's step under hooks and records its events."""

    def __init__(
        self,
        source: Source,
        model: nn.Module,
        key: TapeKey,
        units: Units | None,
        replaced: Collection[str],
        operators: Operators,
        *,
        sums_in_place: bool,
    ) -> None:
        """Hook the units: those of a wrap policy, or if `units` is None the layers and the root. `replaced`: the names of the buffers that
        are part of the tape.
        """
        self._source, self._model, self._key = source, model, key
        self._replaced = replaced
        self._operators, self._work = operators, NONE
        self._sums_in_place = sums_in_place
        stacks = source.stacks(model)
        places = hooked_modules(model, stacks, units)
        self._last = {s: len(stack.layers) - 1 for s, stack in enumerate(stacks)}
        self._parameters = self._assign(places)
        self._cast = torch.bfloat16 if key.mixed else None
        for place in places:
            _UnitHooks(self, place)
        modules = source.root_modules(model)
        if modules.head is not None and not key.compiles_whole:
            modules.head.register_forward_pre_hook(self._head_begins, with_kwargs=True)
        if key.engine == "fsdp2" and task_of(source.task).has_root_units and not key.compiles_whole:
            marked = replace(modules, head=None) if key.gathered_head else modules
            mark_root_units(marked, self._mark_root_unit, loss_takes_head=key.loss == "torchtitan")
        self._chunks = None
        if key.loss == "torchtitan":
            assert modules.head is not None
            self._chunks = LossChunks(modules.head)
            modules.head.register_forward_pre_hook(self._chunk_begins, with_kwargs=True)
        self._reset()

    def _assign(self, places: list[HookedModule]) -> dict[int, Leaf]:
        """Each leaf parameter's place and index. Registers hooks that run when its gradient is ready.

        A flat parameter belongs to a unit. Other parameters belong to their layer or to the root, whatever the units are.
        """
        self._flat: dict[nn.Module, FlatUnit] = {}
        flat = self._key.uses_flat_parameter
        order = {module: at for at, module in enumerate(self._model.modules())}
        chosen = [place for place in places if (place.is_unit if flat else place.number is None)]
        taken: set[int] = set()
        assigned = {}
        for place in sorted(
            chosen, key=lambda p: (p.stack == ROOT and p.number is None, -order[p.module] if flat else 0)
        ):
            module = place.module
            parameters = [p for p in module.parameters() if id(p) not in taken]
            taken |= {id(p) for p in parameters}
            if not parameters:
                continue
            if flat:
                mine = {id(p) for p in parameters}
                owners = [(m, n) for m in module.modules() for n, p in m._parameters.items() if id(p) in mine]
                stored = torch.float32 if self._key.mixed else None  # accelerate keeps what is trained in fp32
                self._flat[module] = unit = FlatUnit(owners, parameters, stored)
                if place.number is not None:
                    unit.use_shards()
                parameters = [unit.flat]
            for index, parameter in enumerate(parameters, start=0 if place.number is None else place.number + 1):
                assigned[id(parameter)] = Leaf(place, index)
                if parameter.requires_grad:
                    parameter.register_post_accumulate_grad_hook(self._gradient_ready)
            self._leaves = [*getattr(self, "_leaves", ()), *parameters]
        return assigned

    def _reset(self) -> None:
        self._phase, self._recording = "forward", False
        self._segments = [RawSegment("forward", ROOT, 0)]
        self._sizes: list[int] = []
        self._category: list[int | None] = []
        self._columns: dict[int, int] = {}
        self._tiled: dict[int, Tiled] = {}
        self._divided: dict[int, Parts] = {}
        self._born_in: list[str] = []
        self._died_in: list[str | None] = []
        self._alive: dict[int, int] = {}
        self._in_loss = False
        self._seen: set[tuple[str, HookedModule]] = set()
        self._seen_of_root: set[tuple[Op, MarkedUnit, str]] = set()
        self._complete: set[int] = set()

    def run(self, micro_batch_size: int, seq_len: int) -> Take:
        """Run one step: forward, backward, and freeing the gradients."""
        self._reset()
        watch = StorageWatch(self._resized, sums_in_place=self._sums_in_place, call=self._called)
        watch.on_operator = self._operator
        states = [tensor for _, tensor in state_tensors(self._model)]
        buffers = dict(self._model.named_buffers())
        replaced = [buffers.pop(name) for name in self._replaced if name in buffers]
        for tensor in tree_iter([self._leaves, list(buffers.values()), states]):
            watch.ignore(tensor)
        del buffers  # the model's code may free some
        gc.collect()
        with watch, watched_copies(self._copied), self._offloading():
            batch = self._source.batch(micro_batch_size, seq_len)
            if self._key.precision == "bf16":  # a trainer passes images and audio in the model's dtype
                batch = cast_floating(batch, torch.bfloat16)
            self._reset()
            self._recording = True
            for tensor in replaced:
                watch.see(tensor)
                self._category[-1] = Category.INPUT  # which live until the next step
            del replaced
            self._inputs(batch)
            with self._phases_watched(), torch.autocast("cpu", torch.bfloat16, enabled=self._key.autocasts):
                loss = self._source.loss(self._model, batch)
            if self._key.engine.startswith("plain"):
                self._mark(Op.POST_FORWARD, MarkedUnit.OUTPUTS)
            self._phase = "backward"
            self._begin("backward", ROOT, 0)
            loss.backward()
            take = self._take()
            self._recording = False
            for leaf in self._leaves:
                leaf.grad = None
            if self._chunks is not None:
                self._chunks.forget()
            del loss, batch
        return take

    def _offloading(self) -> contextlib.AbstractContextManager[None]:
        """Context that keeps saved tensors in host memory, as the key says.

        TRL knows the weights before an engine gathers or casts them."""
        known = self._model.parameters() if self._key.engine.startswith("plain") else ()
        return offloading(self._key.activation_offload, known)

    # Storages

    def _inputs(self, batch: dict[str, torch.Tensor]) -> None:
        for tensor in batch.values():
            key = tensor.untyped_storage()._cdata
            if key not in self._alive:
                self._resized(key, 0, tensor.untyped_storage().nbytes(), "input", ())
                self._category[-1] = Category.INPUT

    def _resized(self, key: int, before: int, after: int, operator: str, args: tuple[Any, ...]) -> None:
        if not self._recording:
            return
        events = self._segments[-1].events
        if before and key in self._alive:
            storage = self._alive.pop(key)
            self._died_in[storage] = self._phase
            events.append((Op.FREE, storage, 0))
        if after:
            storage = len(self._sizes)
            self._alive[key] = storage
            if (tile := current_tile()) is not None:
                self._tiled[storage] = tile.size_of(after)
            if (parts := current_parts()) is not None:
                self._divided[storage] = parts
            self._sizes.append(0 if tile is not None else after)
            self._born_in.append(self._phase)
            self._died_in.append(None)
            self._category.append(self._category_at_birth(operator, args))
            events.append((Op.ALLOC, storage, 0))

    def _category_at_birth(self, operator: str, args: tuple[Any, ...]) -> int | None:
        if in_scratch():
            return Category.SCRATCH
        if (
            operator == "aten::_to_copy"
            and args
            and isinstance(args[0], torch.Tensor)
            and id(args[0]) in self._parameters
        ):
            return Category.CAST_PARAMETER
        shape = _weight_gradient_shape(operator, args)
        if (self._phase == "backward" and shape in self._tied_shapes) or (self._chunks and shape == self._chunks.shape):
            return Category.PARTIAL_GRADIENT
        return Category.LOSS if self._in_loss else None

    @property
    def _tied_shapes(self) -> set[tuple[int, ...]]:
        """Shapes of tied parameters. The partial gradients that autograd sums count as gradients too."""
        if not hasattr(self, "_tied"):
            uses: dict[int, int] = {}
            for _, p in self._model.named_parameters(remove_duplicate=False):
                uses[id(p)] = uses.get(id(p), 0) + 1
            self._tied = {tuple(p.shape) for p in self._model.parameters() if uses[id(p)] > 1}
        return self._tied

    def _called(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result, self._work = self._operators.call(func, args, kwargs)
        return result

    def _operator(self, func: Any, args: tuple[Any, ...]) -> None:
        if not self._recording or current_tile() is not None:  # to allocate a tile is no work, and one stands for all
            return
        segment, work = self._segments[-1], self._work
        if work != NONE:
            segment.work.append(work)
            if segment.recomputed is not None and is_recomputing():
                segment.recomputed.append(work)
        if (summed := rows_and_columns(func, args)) is not None:
            self._staged(*summed)

    def _copied(self, n_bytes: int) -> None:
        self._segments[-1].host_copies.append(n_bytes)

    def _staged(self, rows: int, columns: int) -> None:
        """Record the workspace of a sum over rows on a GPU, which lives as long as the sum runs."""
        storage = len(self._sizes)
        self._columns[storage] = columns
        self._sizes.append(rows)
        self._born_in.append(self._phase)
        self._died_in.append(self._phase)
        self._category.append(Category.SCRATCH)
        self._segments[-1].events += [(Op.ALLOC, storage, 0), (Op.FREE, storage, 0)]

    def _take(self) -> Take:
        for leaf in self._leaves:
            if leaf.grad is not None and (storage := self._alive.get(leaf.grad.untyped_storage()._cdata)) is not None:
                self._category[storage] = self._category_of_gradient(leaf)
        if self._chunks is not None and self._chunks.gradient is not None:
            self._category[self._alive[self._chunks.gradient.untyped_storage()._cdata]] = self._category_of_gradient(
                self._chunks.weight
            )
        categories = []
        for born, died, category in zip(self._born_in, self._died_in, self._category, strict=True):
            if category is None:
                category = Category.TEMPORARY if born == died else Category.ACTIVATION
            categories.append(int(category))
        for segment in self._segments:
            segment.events = _deaths_in_order(segment.events)
        return Take(self._segments, self._sizes, categories, self._columns, self._tiled, self._divided)

    def _category_of_gradient(self, parameter: torch.Tensor) -> int:
        of = self._parameters[id(parameter)]
        return Category.GRADIENT + 2 * of.number + (of.place.stack == ROOT)

    # Boundaries

    def _begin(self, phase: TapePhase, stack: int, layer: int) -> None:
        self._segments.append(RawSegment(phase, stack, layer))
        if phase == "backward" and stack != ROOT and self._key.checkpointing not in ("none", "full", "reentrant"):
            self._segments[-1].recomputed = []

    def _phases_watched(self) -> contextlib.AbstractContextManager[None]:
        """Context in which GRPO's generation and scores have segments of their own, because only some micro-batches have them."""
        return phases_watched(self._phase_changed) if self._key.task == "grpo" else contextlib.nullcontext()

    def _phase_changed(self) -> None:
        self._begin(self._forward_phase, ROOT, 0)
        self._in_loss = False

    @property
    def _forward_phase(self) -> TapePhase:
        """The phase of a forward that runs now."""
        return scoring_phase() or "forward"

    def _mark(self, op: Op, a: int, b: int = 0) -> None:
        self._segments[-1].events.append((op, int(a), b))

    def _mark_root_unit(self, op: Op, unit: MarkedUnit) -> None:
        """Record a mark of a unit within the root, once per forward, also if the unit has several tensors or runs several times."""
        mark = op, unit, self._forward_phase
        if mark not in self._seen_of_root:
            self._seen_of_root.add(mark)
            self._mark(op, unit)

    def _gradient_ready(self, parameter: torch.Tensor) -> None:
        if self._chunks is not None and self._phase == "forward":
            return  # of one chunk
        if self._key.tiled_mlp:  # later shards add to the gradient
            if gradients_wait() or id(parameter) in self._complete:
                return
            self._complete.add(id(parameter))
        of = self._parameters[id(parameter)]
        self._mark(Op.GRAD_READY, of.number, int(of.place.stack == ROOT))
        if self._key.uses_flat_parameter:
            self._mark(Op.POST_BACKWARD, of.place.mark)
            if of.place.number is not None:  # recomputation may have stopped in it
                self._flat[of.place.module].use_shards()

    def _view_gradient(self, grad: torch.Tensor | None) -> None:
        """Count the gradient of a view of a flat parameter. A packed weight has none."""
        if grad is None:
            return
        if (storage := self._alive.get(grad.untyped_storage()._cdata)) is not None:
            self._category[storage] = Category.PARTIAL_GRADIENT

    def _chunk_begins(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Hook a chunk of the loss on what FSDP2 hooks its end: the gradients of the head's inputs."""
        return watch_input_gradients(args, kwargs, self._chunk_ends)

    def _chunk_ends(self) -> None:
        """Sum the gradient of the head. Mark the end of the loss, where FSDP2 reduces it."""
        assert self._chunks is not None
        if self._chunks.add():
            self._mark(Op.GRAD_READY, self._parameters[id(self._chunks.weight)].number, 1)

    def _head_begins(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._phase != "forward":
            return
        self._in_loss = True
        for leaf in tree_iter((args, kwargs)):
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                leaf.register_hook(self._loss_ends)

    def _loss_ends(self, grad: torch.Tensor) -> None:
        self._in_loss = False


class _UnitHooks:
    """The hooks of one unit: they mark where its forward and its backward begin and end, as its engine's own hooks do.

    A layer that is recomputed runs its forward again in the backward. FSDP gathers it before that, with the hooks of the backward; so in
    a recomputation only units within a layer mark their forward.
    """

    def __init__(self, step: Step, place: HookedModule) -> None:
        self._step, self._place = step, place
        whole = place.number is None
        self._is_root = whole and place.stack == ROOT
        self._is_layer = whole and place.stack != ROOT
        self._is_within_layer = not whole and place.stack != ROOT
        self._of_fsdp2 = step._key.engine == "fsdp2" and place.is_unit
        before, after = self._before_forward, self._after_forward
        if step._key.compiles_whole:  # the graph breaks at hooks as it does at FSDP2's
            from torch.distributed.fsdp._fully_shard._fsdp_common import _dynamo_disable

            before, after = _dynamo_disable(before), _dynamo_disable(after)
        place.module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
        place.module.register_forward_hook(after)

    def _before_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        step, cast = self._step, self._step._cast
        recomputes = step._phase == "backward"
        if not recomputes:
            self._begin_forward()
        if self._of_fsdp2 and cast is not None:  # before it gathers: FSDPState._pre_forward
            args, kwargs = cast_floating((args, kwargs), cast)
        if not recomputes or self._is_within_layer:
            step._mark(Op.PRE_FORWARD, self._place.mark)
        if step._key.uses_flat_parameter and cast is not None and self._is_root:
            args, kwargs = cast_floating((args, kwargs), cast)
        if not recomputes or self._is_within_layer:
            self._use_views(module)
        if self._of_fsdp2 and not recomputes and torch.is_grad_enabled():
            args, kwargs = watch_input_gradients(args, kwargs, self._end_backward)
        return args, kwargs

    def _begin_forward(self) -> None:
        """Begin the segment of a layer, or of the root where it has none yet in this phase."""
        step, place = self._step, self._place
        if self._is_root and step._segments[-1].phase != step._forward_phase:
            step._begin(step._forward_phase, ROOT, 0)
            step._in_loss = False
        if self._is_layer:
            step._begin(step._forward_phase, place.stack, place.layer)

    def _use_views(self, module: nn.Module) -> None:
        """Let the parameters of an FSDP1 unit be views of its flat parameter."""
        unit = self._step._flat.get(module)
        if unit is not None and (torch.is_grad_enabled() or not unit.has_views):
            unit.use_views(self._step._view_gradient)

    def _after_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        step, place = self._step, self._place
        if place.number is not None and (unit := step._flat.get(module)) is not None:
            unit.use_shards()
        if step._phase == "backward":
            if self._is_within_layer:
                step._mark(Op.POST_FORWARD, place.mark)
            return None
        if self._is_root and step._key.autocasts_fsdp1:
            output = cast_floating(output, torch.float32)
        step._mark(Op.POST_FORWARD, place.mark)
        if self._is_layer and place.layer == step._last[place.stack]:
            step._begin(step._forward_phase, ROOT, place.stack + 1)
        for leaf in tree_iter(output):
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                leaf.register_hook(self._begin_backward)
        return output

    def _begin_backward(self, grad: torch.Tensor) -> None:
        """Begin the backward with the first gradient of an output."""
        step, place = self._step, self._place
        if ("pre", place) in step._seen:
            return
        step._seen.add(("pre", place))
        if self._is_layer:
            step._begin("backward", place.stack, place.layer)
        step._mark(Op.PRE_BACKWARD, place.mark)

    def _end_backward(self) -> None:
        """End the backward of an FSDP2 unit once the gradients of its inputs exist."""
        step, place = self._step, self._place
        if ("post", place) not in step._seen:
            step._seen.add(("post", place))
            step._mark(Op.POST_BACKWARD, place.mark)


def _deaths_in_order(events: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """The events with storages that are freed together in order of birth. Autocast frees its cache in the order of addresses."""
    ordered: list[tuple[int, int, int]] = []
    for together, group in itertools.groupby(events, key=lambda event: event[0] == Op.FREE):
        events_together = list(group)
        ordered += sorted(events_together) if together else events_together
    return ordered


def _weight_gradient_shape(operator: str, args: tuple[Any, ...]) -> tuple[int, ...] | None:
    """The shape of the weight gradient that an operator computes; None for other operators."""
    match operator:
        case "aten::mm":
            return (args[0].shape[0], args[1].shape[1])
        case "aten::embedding_dense_backward":
            return (args[2], args[0].shape[-1])
        case "aten::_to_copy":
            return tuple(args[0].shape)
    return None
