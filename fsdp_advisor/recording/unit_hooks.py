"""The hooks of a unit, which mark where its forward and its backward begin and end."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_iter

from fsdp_advisor.model.tape import BY_CODE, ROOT, Category, Op
from fsdp_advisor.model.tape_key import TapeKey
from fsdp_advisor.recording.engines import AdapterShards, FlatUnit, cast_floating, watch_input_gradients
from fsdp_advisor.recording.hooked_modules import HookedModule
from fsdp_advisor.recording.step_events import StepEvents


class UnitHooks:
    """The hooks of one unit. They report to `StepEvents` at the same points at which the engine's own hooks run.

    A checkpointed layer runs its forward again in backward. FSDP has then already gathered it in a backward hook, so in a recomputation
    only units within a layer mark their forward.
    """

    def __init__(
        self, events: StepEvents, key: TapeKey, hooked: HookedModule, flat: FlatUnit | None, *, ends_stack: bool
    ) -> None:
        """Hook the module of `hooked`. `flat`: its flat parameter under FSDP1. `ends_stack`: it is the last layer of its stack."""
        self._events, self._key, self._hooked, self._flat = events, key, hooked, flat
        self._ends_stack = ends_stack
        self._cast = torch.bfloat16 if key.mixed else None
        self._of_fsdp2 = key.engine == "fsdp2" and hooked.is_unit
        of_adapter = self._of_fsdp2 and key.mixed and key.wrap == "lora" and hooked.number is not None
        self._shards = AdapterShards(hooked.module) if of_adapter else None
        before, after = self._before_forward, self._after_forward
        if key.compiles_whole:  # a hook breaks the graph, as FSDP2's hooks do
            from torch.distributed.fsdp._fully_shard._fsdp_common import _dynamo_disable

            before, after = _dynamo_disable(before), _dynamo_disable(after)
        hooked.module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
        hooked.module.register_forward_hook(after)
        if key.lora_kernels and self._of_fsdp2 and key.wrap == "lora" and hooked.is_within_layer:
            hooked.module.unshard = self._unshard  # type: ignore[assignment]  # not a tensor

    def _before_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        recomputes = self._events.phase == "backward"
        if not recomputes:
            self._begin_forward()
        if self._of_fsdp2 and self._cast is not None:  # FSDPState._pre_forward casts before it gathers
            args, kwargs = cast_floating((args, kwargs), self._cast)
        if not recomputes or self._hooked.is_within_layer:
            self._events.mark(Op.PRE_FORWARD, self._hooked.mark)
        if self._key.uses_flat_parameter and self._cast is not None and self._hooked.is_root:
            args, kwargs = cast_floating((args, kwargs), self._cast)
        if not recomputes or self._hooked.is_within_layer:
            self._use_views()
            if self._shards is not None:
                self._shards.use_gathered()
        if self._of_fsdp2 and not recomputes and torch.is_grad_enabled():
            args, kwargs = watch_input_gradients(args, kwargs, self._end_backward)
        return args, kwargs

    def _unshard(self) -> None:
        """Gather a unit of an adapter, whose forward does not run, once per step: nothing frees it before the end of backward.

        Source: axolotl 0.19.0, kernels/lora.py, `get_lora_parameters`.
        """
        if self._events.is_first((Op.PRE_FORWARD, self._hooked)):
            self._events.mark(Op.PRE_FORWARD, self._hooked.mark, BY_CODE)
        if self._shards is not None:
            self._shards.use_gathered()

    def _begin_forward(self) -> None:
        """Begin the segment of a layer, or of the root if it has none yet in this phase."""
        events, hooked = self._events, self._hooked
        if hooked.is_root and events.segment.phase != events.forward_phase:
            events.begin_root()
        if hooked.is_layer:
            events.begin(events.forward_phase, hooked.stack, hooked.layer)

    def _use_views(self) -> None:
        """Replace the parameters of an FSDP1 unit by views of its flat parameter."""
        if self._flat is not None and (torch.is_grad_enabled() or not self._flat.has_views):
            self._flat.use_views(self._view_gradient)

    def _view_gradient(self, grad: torch.Tensor | None) -> None:
        """Set the category of the gradient of a view of a flat parameter. The view of a packed weight has no gradient."""
        if grad is not None and (storage := self._events.storage_of(grad)) is not None:
            storage.category = Category.PARTIAL_GRADIENT

    def _after_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        events, hooked = self._events, self._hooked
        if hooked.number is not None and self._flat is not None:
            self._flat.use_shards()
        if self._shards is not None:
            self._shards.use_shards()
        if events.phase == "backward":
            if hooked.is_within_layer:
                events.mark(Op.POST_FORWARD, hooked.mark)
                if self._flat is not None and self._key.checkpointing == "reentrant":
                    self._watch_output(output)  # the first forward, without a graph, had no hooks
            return None
        if hooked.is_root and self._key.autocasts_fsdp1:
            output = cast_floating(output, torch.float32)
        events.mark(Op.POST_FORWARD, hooked.mark)
        if self._ends_stack:
            events.begin(events.forward_phase, ROOT, hooked.stack + 1)
        self._watch_output(output)
        return output

    def _watch_output(self, output: Any) -> None:
        """Call `_begin_backward` with the gradient of each tensor of the output."""
        for leaf in tree_iter(output):
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                leaf.register_hook(self._begin_backward)

    def _begin_backward(self, grad: torch.Tensor) -> None:
        """Begin the backward with the first gradient of an output."""
        events, hooked = self._events, self._hooked
        if events.is_first((Op.PRE_BACKWARD, hooked)):
            if hooked.is_layer:
                events.begin("backward", hooked.stack, hooked.layer)
            events.mark(Op.PRE_BACKWARD, hooked.mark)

    def _end_backward(self) -> None:
        """End the backward of an FSDP2 unit once the gradients of its inputs exist."""
        if self._events.is_first((Op.POST_BACKWARD, self._hooked)):
            self._events.mark(Op.POST_BACKWARD, self._hooked.mark)
