"""The hooks of a training engine: what an engine adds to a step program at each unit."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fsdp_advisor.model.fsdp_units import UnitId
from fsdp_advisor.model.tape import Tape
from fsdp_advisor.program.accounts import Stream
from fsdp_advisor.program.instructions import BufferId
from fsdp_advisor.program.storages import NO_STORAGES, Storages

if TYPE_CHECKING:
    from fsdp_advisor.program.builder import StepBuilder

OrderInUnit = tuple[int, int, int]
"""A key that sorts the parameters of a unit in the model's order."""


class StepHooks:
    """The hooks of a training engine around the units of a step. Each hook adds instructions to the builder; the default hooks add none.

    `gradient_hooks`: whether `gradient_ready` is called. `marked_units`: the units within the root's code (`MarkedUnit`) that
    have hooks. `gradient_stream`: the stream on which autograd allocates gradients. `reference`: the hooks around the units of a
    reference model that is a copy; None if these hooks also run around the units of the reference.
    """

    reference: StepHooks | None = None
    gradient_hooks = False
    marked_units: frozenset[int] = frozenset()
    gradient_stream = Stream.COMPUTE

    def begin_step(self, step: StepBuilder) -> None:
        """Allocate the storages that are alive at the beginning of every step."""

    def begin_micro_batch(self, *, is_first: bool, is_last: bool) -> None:
        """Before a micro-batch."""

    def begin_forward(self, *, with_gradients: bool, repeated: bool) -> None:
        """Before a forward of the model. `with_gradients`: backward follows; `repeated`: it is not the first one of its micro-batch."""

    def begin_generation(self, step: StepBuilder) -> None:
        """Before the forwards in which transformers generates completions."""

    def end_generation(self, step: StepBuilder) -> None:
        """After the forwards in which transformers generates completions."""

    def pre_forward(self, step: StepBuilder, unit: UnitId) -> None:
        """Before a unit's forward."""

    def gather_by_code(self, step: StepBuilder, unit: UnitId) -> None:
        """The model's code gathers a unit within a layer, whose forward does not run, until backward ends."""

    def post_forward(self, step: StepBuilder, unit: UnitId) -> None:
        """After a unit's forward."""

    def pre_backward(self, step: StepBuilder, unit: UnitId) -> None:
        """Before a unit's backward."""

    def post_backward(self, step: StepBuilder, unit: UnitId) -> None:
        """After a unit's backward."""

    def before_recomputation(self, step: StepBuilder, unit: UnitId) -> None:
        """Before a unit within a layer runs again in backward, because the layer is checkpointed."""

    def after_recomputation(self, step: StepBuilder, unit: UnitId) -> None:
        """After a unit within a layer ran again in backward. Not called if checkpointing stopped in it, having all it needs."""

    def layer_done(self, step: StepBuilder, unit: UnitId) -> None:
        """After a layer's backward. Called for every layer, even if PyTorch runs no hook there."""

    def gradient_ready(self, step: StepBuilder, unit: UnitId, parameter: int, gradient: BufferId) -> None:
        """After a parameter's gradient is complete. `gradient`: NO_BUFFER if autograd added it to an earlier one."""

    def end_backward(self, step: StepBuilder) -> None:
        """After the backward pass."""

    def optimizer_step(self, step: StepBuilder) -> None:
        """Clipping and the optimizer's step."""

    def owner_of(
        self, unit_id: UnitId, number: int, parameter: int, at_root: bool
    ) -> tuple[UnitId, OrderInUnit] | None:
        """The unit of a gradient that the code of `unit_id` allocates, and the position of its parameter in the unit; None if the
        engine asks for gradients by `StepBuilder.take_gradients`.

        `number`: the real layer. `parameter`, `at_root`: as in `GradientBirth`.
        """
        return None

    def first_step_transients(self) -> Storages:
        """The storages that are allocated and freed one by one before the first forward."""
        return NO_STORAGES

    def rebuilt_buckets(self, tape: Tape) -> Storages:
        """The communication buffers that replace the initial ones after the first step; empty if those stay."""
        return NO_STORAGES
