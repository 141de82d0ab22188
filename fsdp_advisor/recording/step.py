"""Run a model's step under hooks, and record its events."""

from __future__ import annotations

import contextlib
import gc
from collections import Counter
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_iter

from fsdp_advisor.model.fsdp_units import Units
from fsdp_advisor.model.tape import ROOT, Category, MarkedUnit, Op
from fsdp_advisor.model.tape_key import TapeKey, repeats_each_forward
from fsdp_advisor.model.tasks import task_of
from fsdp_advisor.recording.checkpointing import is_recomputing
from fsdp_advisor.recording.engines import FlatUnit, cast_floating, watch_input_gradients
from fsdp_advisor.recording.flash import in_scratch
from fsdp_advisor.recording.hooked_modules import HookedModule, Leaf, hooked_modules
from fsdp_advisor.recording.host import offloading, watched_copies
from fsdp_advisor.recording.loss_chunks import LossChunks
from fsdp_advisor.recording.operators import NONE, rows_and_columns
from fsdp_advisor.recording.quantized import COPIES_OF_WEIGHTS, UNPACKING, state_tensors
from fsdp_advisor.recording.raw_steps import RawStep
from fsdp_advisor.recording.remembered import Operators
from fsdp_advisor.recording.root_units import mark_root_units
from fsdp_advisor.recording.router_loss import terms_recorded
from fsdp_advisor.recording.scoring import phases_watched
from fsdp_advisor.recording.source import Source
from fsdp_advisor.recording.step_events import StepEvents
from fsdp_advisor.recording.storages import StorageWatch
from fsdp_advisor.recording.tiled_mlp import gradients_wait
from fsdp_advisor.recording.tiles import current_tile, tiles_recorded
from fsdp_advisor.recording.unit_hooks import UnitHooks


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
        self._records = False
        self._events = StepEvents(
            lists_recomputed=key.checkpointing != "none" and not repeats_each_forward(key.checkpointing)
        )
        stacks = source.stacks(model)
        all_hooked = hooked_modules(model, stacks, units)
        self._leaves: list[torch.Tensor] = []
        self._flat: dict[nn.Module, FlatUnit] = {}
        self._parameters = self._assign(all_hooked)
        self._tied_shapes = _tied_shapes(model)
        for hooked in all_hooked:
            ends_stack = hooked.is_layer and hooked.layer == len(stacks[hooked.stack].layers) - 1
            UnitHooks(self._events, key, hooked, self._flat.get(hooked.module), ends_stack=ends_stack)
        modules = source.root_modules(model)
        if modules.head is not None and not key.compiles_whole:
            modules.head.register_forward_pre_hook(self._head_begins, with_kwargs=True)
        if key.marks_root_units and task_of(source.task).has_root_units:
            marked = modules
            if key.gathered_head:  # only generation calls the head itself, not the loss in its place
                marked = replace(modules, head=getattr(modules.head, "head", None))
            mark_root_units(
                marked,
                self._mark_root_unit,
                loss_takes_head=key.loss == "torchtitan",
                in_compiled_code=key.compiles_whole,
            )
        self._chunks = None
        if key.loss == "torchtitan":
            assert modules.head is not None
            self._chunks = LossChunks(modules.head)
            modules.head.register_forward_pre_hook(self._chunk_begins, with_kwargs=True)

    def _assign(self, all_hooked: list[HookedModule]) -> dict[int, Leaf]:
        """Each leaf parameter's module and index, by the parameter's `id`. Also registers hooks that run when its gradient is ready.

        A flat parameter belongs to a unit. Other parameters belong to their layer or to the root, whatever the units are.
        """
        flat = self._key.uses_flat_parameter
        order = {module: at for at, module in enumerate(self._model.modules())}
        chosen = [hooked for hooked in all_hooked if (hooked.is_unit if flat else hooked.number is None)]
        taken: set[int] = set()
        assigned = {}
        for hooked in sorted(
            chosen, key=lambda p: (p.stack == ROOT and p.number is None, -order[p.module] if flat else 0)
        ):
            module = hooked.module
            parameters = [p for p in module.parameters() if id(p) not in taken]
            taken |= {id(p) for p in parameters}
            if not parameters:
                continue
            if flat:
                mine = {id(p) for p in parameters}
                owners = [(m, n) for m in module.modules() for n, p in m._parameters.items() if id(p) in mine]
                # accelerate keeps trained parameters in fp32
                stored = torch.float32 if self._key.mixed else parameters[0].dtype
                unit = FlatUnit(owners, parameters, stored, use_orig_params=not self._key.flat_parameters)
                self._flat[module] = unit
                if hooked.number is not None:
                    unit.use_shards()
                parameters = [unit.flat]
            for index, parameter in enumerate(parameters, start=0 if hooked.number is None else hooked.number + 1):
                assigned[id(parameter)] = Leaf(hooked, index)
                if parameter.requires_grad:
                    parameter.register_post_accumulate_grad_hook(self._gradient_ready)
            self._leaves += parameters
        return assigned

    def run(self, micro_batch_size: int, seq_len: int) -> RawStep:
        """Run one step: forward, backward, and freeing the gradients."""
        self._events.reset()
        watch = StorageWatch(self._resized, sums_in_place=self._sums_in_place, call=self._called)
        watch.on_operator = self._operator
        states = [tensor for _, tensor in state_tensors(self._model)]
        buffers = dict(self._model.named_buffers())
        replaced = [buffers.pop(name) for name in self._replaced if name in buffers]
        for tensor in tree_iter([self._leaves, list(buffers.values()), states]):
            watch.ignore(tensor)
        del buffers  # the model's code may free some
        gc.collect()
        terms = terms_recorded(self._events.begin)
        with watch, watched_copies(self._copied), self._offloading(), terms, tiles_recorded():
            batch = self._source.batch(micro_batch_size, seq_len)
            if self._key.precision == "bf16":  # a trainer passes images and audio in the model's dtype
                batch = cast_floating(batch, torch.bfloat16)
            self._events.reset()
            self._records = True
            for tensor in replaced:  # replaced buffers live until the next step
                watch.see(tensor)
                if (storage := self._events.storage_of(tensor)) is not None:
                    storage.category = Category.INPUT
            del replaced
            self._inputs(batch)
            with self._phases_watched(), torch.autocast("cpu", torch.bfloat16, enabled=self._key.autocasts):
                loss = self._source.loss(self._model, batch)
            if self._key.engine.startswith("plain"):
                self._events.mark(Op.POST_FORWARD, MarkedUnit.OUTPUTS)
            self._events.begin_backward()
            loss.backward()
            raw_step = self._raw_step()
            self._records = False
            for leaf in self._leaves:
                leaf.grad = None
            if self._chunks is not None:
                self._chunks.forget()
            del loss, batch
        return raw_step

    def _offloading(self) -> contextlib.AbstractContextManager[None]:
        """Context that offloads saved tensors to host memory by the key's implementation.

        TRL's recognizes the weights as they were before an engine gathered or cast them.
        """
        known = self._model.parameters() if self._key.engine.startswith("plain") else ()
        return offloading(self._key.activation_offload, known)

    # Storages

    def _inputs(self, batch: dict[str, torch.Tensor]) -> None:
        for tensor in batch.values():
            if self._events.storage_of(tensor) is None:
                storage = tensor.untyped_storage()
                self._events.allocate(storage._cdata, storage.nbytes(), Category.INPUT)

    def _resized(self, key: int, before: int, after: int, operator: str, args: tuple[Any, ...]) -> None:
        if not self._records:
            return
        if before:
            self._events.free(key)
        if after:
            self._events.allocate(key, after, self._category_at_birth(operator, args))

    def _category_at_birth(self, operator: str, args: tuple[Any, ...]) -> int:
        if in_scratch():
            return Category.SCRATCH
        if self._unpacks(operator, args):
            return Category.DEQUANTIZED
        if (
            operator == "aten::_to_copy"
            and args
            and isinstance(args[0], torch.Tensor)
            and id(args[0]) in self._parameters
        ):
            return Category.CAST_PARAMETER
        if self._is_partial_gradient(operator, args):
            return Category.PARTIAL_GRADIENT
        return Category.LOSS if self._events.in_loss else Category.TEMPORARY

    def _is_partial_gradient(self, operator: str, args: tuple[Any, ...]) -> bool:
        """Whether an operator returns one of the partial gradients of a weight: a tied one, or the head's in a chunk of the loss."""
        sums_tied = self._tied_shapes and self._events.phase == "backward"
        if not sums_tied and self._chunks is None:
            return False
        shape = _weight_gradient_shape(operator, args)
        return bool(sums_tied and shape in self._tied_shapes) or (
            self._chunks is not None and shape == self._chunks.shape
        )

    def _unpacks(self, operator: str, args: tuple[Any, ...]) -> bool:
        """Whether an operator returns a whole weight that is packed, or another copy of one in a second dtype."""
        if operator not in COPIES_OF_WEIGHTS:
            return operator in UNPACKING
        if not isinstance(args[0], torch.Tensor):
            return False
        storage = self._events.storage_of(args[0])
        return args[0].dtype == torch.int8 or (storage is not None and storage.category == Category.DEQUANTIZED)

    def _called(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result, self._work = self._operators.call(func, args, kwargs)
        return result

    def _operator(self, func: Any, args: tuple[Any, ...]) -> None:
        if not self._records or current_tile() is not None:  # one tile represents all, so its work is not counted here
            return
        segment, work = self._events.segment, self._work
        if work is not NONE and work != NONE:
            segment.work.append(work)
            if segment.recomputed is not None and is_recomputing():
                segment.recomputed.append(work)
        if (summed := rows_and_columns(func, args)) is not None:
            self._events.stage(*summed)

    def _copied(self, n_bytes: int) -> None:
        self._events.segment.host_copies.append(n_bytes)

    def _raw_step(self) -> RawStep:
        for leaf in self._leaves:
            if leaf.grad is not None:
                self._count_as_gradient(leaf.grad, leaf)
        if self._chunks is not None and self._chunks.gradient is not None:
            self._count_as_gradient(self._chunks.gradient, self._chunks.weight)
        return self._events.raw_step()

    def _count_as_gradient(self, gradient: torch.Tensor, parameter: torch.Tensor) -> None:
        if (storage := self._events.storage_of(gradient)) is not None:
            of = self._parameters[id(parameter)]
            storage.category = Category.GRADIENT + 2 * of.number + (of.hooked.stack == ROOT)

    # Boundaries

    def _phases_watched(self) -> contextlib.AbstractContextManager[None]:
        """Context in which GRPO's generation and scoring get their own segments, because only some micro-batches have them."""
        return phases_watched(self._events.begin_root) if self._key.task == "grpo" else contextlib.nullcontext()

    def _mark_root_unit(self, op: Op, unit: MarkedUnit) -> None:
        """Record a mark of a unit within the root, once per forward, also if the unit has several tensors or runs several times."""
        if self._events.is_first((op, unit, self._events.forward_phase)):
            self._events.mark(op, unit)

    def _gradient_ready(self, parameter: torch.Tensor) -> None:
        if self._chunks is not None and self._events.phase == "forward":
            return  # the gradient of one chunk
        if self._key.tiled_mlp and (gradients_wait() or not self._events.is_first(id(parameter))):
            return  # later shards add to the gradient
        of = self._parameters[id(parameter)]
        self._events.mark(Op.GRAD_READY, of.number, int(of.hooked.stack == ROOT))
        if self._key.uses_flat_parameter:
            self._events.mark(Op.POST_BACKWARD, of.hooked.mark)
            if of.hooked.number is not None:  # recomputation may have stopped in it
                self._flat[of.hooked.module].use_shards()

    def _chunk_begins(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Hook the gradients of the head's inputs: when they are computed, the backward of this chunk of the loss ends. Returns the hooked
        inputs.
        """
        return watch_input_gradients(args, kwargs, self._chunk_ends)

    def _chunk_ends(self) -> None:
        """Sum the gradient of the head. Mark the end of the loss, where FSDP2 reduces it."""
        assert self._chunks is not None
        if self._chunks.add():
            self._events.mark(Op.GRAD_READY, self._parameters[id(self._chunks.weight)].number, 1)

    def _head_begins(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._events.phase != "forward":
            return
        self._events.in_loss = True
        for leaf in tree_iter((args, kwargs)):
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                leaf.register_hook(self._loss_ends)

    def _loss_ends(self, grad: torch.Tensor) -> None:
        self._events.in_loss = False


def _tied_shapes(model: nn.Module) -> set[tuple[int, ...]]:
    """Shapes of tied parameters. The partial gradients that autograd sums for them count as gradients too."""
    uses = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    return {tuple(p.shape) for p in model.parameters() if uses[id(p)] > 1}


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
