"""A step of PyTorch FSDP1 (`FullyShardedDataParallel`), by default with a unit per layer and the root.

Source: torch.distributed.fsdp._flat_param (`pre_unshard`, `unshard`, `post_unshard`) and _runtime_utils
(`_post_forward_reshard`, `_pre_backward_hook`, `_post_backward_hook`, `_reduce_grad`), torch 2.13.
FSDP1 calls `record_stream` on storages that are allocated on one stream and used on another. The allocator reuses such a
storage only after the GPU has finished with it. The host runs ahead of the GPU by at most two all-gathers (`_unshard` and
`_reshard` with `_FreeEventQueue`).
"""

from __future__ import annotations

from collections import defaultdict, deque

from fsdp_advisor.engines.forward_order import ForwardOrder
from fsdp_advisor.engines.fsdp1.units import UnitBytes, fsdp1_units
from fsdp_advisor.engines.optimizer_work import clips_gradients, gpu_step, host_step
from fsdp_advisor.engines.wrapping import marked_units
from fsdp_advisor.job.plan import Plan
from fsdp_advisor.model.fsdp_units import AT_ROOT, WHOLE, UnitId, module_mark, unit_at
from fsdp_advisor.model.profile import Profile
from fsdp_advisor.policies.optimizers import optimizer_of
from fsdp_advisor.program.accounts import Account, Stream
from fsdp_advisor.program.builder import StepBuilder
from fsdp_advisor.program.hooks import OrderInUnit, StepHooks
from fsdp_advisor.program.instructions import (
    ADDED_TENSORS,
    NO_BUFFER,
    AllGather,
    AllReduce,
    BufferId,
    Copy,
    HostTransfer,
    PythonHooks,
    ReduceScatter,
    Start,
    WaitFor,
)
from fsdp_advisor.program.storages import NO_STORAGES, Storages

MAX_INFLIGHT_ALL_GATHERS = 2
"""Source: torch.distributed.fsdp._limiter_utils, _FreeEventQueue."""


class Fsdp1Step(StepHooks):
    """FSDP1's hooks around each unit. They hold the state of one program: make new ones for each program."""

    gradient_stream = Stream.ALL_GATHER
    """The stream on which autograd sums a unit's gradient: the all-gather's, because the parameters are views made on it."""

    def __init__(self, profile: Profile, plan: Plan) -> None:
        self._profile, self._plan = profile, plan
        self._offload = plan.offload == "parameters"
        self._one_shard = plan.shard_degree == 1
        self._uploads = self._offload and not plan.mixed  # `flat_param_to`, not `_use_low_precision_shard`
        self._uploads_whole = self._uploads and self._one_shard
        # On one rank every strategy is NO_SHARD: the cast copy is freed after forward (`FlatParamHandle.post_reshard`).
        self._reshard = plan.reshards or self._uploads_whole or (self._one_shard and plan.mixed)
        self.marked_units = marked_units(profile, plan)
        self._all, self.states = fsdp1_units(profile, plan.without_step)
        self._units, self._policy = self._all.by_id, self._all.policy
        # State within one micro-batch
        self._is_first = self._reduces = True
        self._repeated = False  # a forward of this micro-batch has run before
        # State within one step
        self._previous_gradients = NO_BUFFER
        self._prefetched: set[UnitId] = set()  # gathered in advance
        self._forward_order = ForwardOrder()
        self._ran_in_layer: set[UnitId] = set()  # units within the current layer that have run
        self._recomputed: set[UnitId] = set()  # units within checkpointed layers whose recomputation is over
        self._targets: dict[UnitId, UnitId | None] = {}  # the unit to prefetch after a unit's backward
        self._unsharded: defaultdict[UnitId, list[tuple[BufferId, BufferId]]] = defaultdict(list)
        self._unreduced: defaultdict[UnitId, deque[list[BufferId]]] = defaultdict(deque)  # reduction is deferred
        self._frozen: list[UnitId] = []  # layers without trained parameters whose backward is over
        self._offloaded: list[BufferId] = []
        # gradients of shards with only frozen parameters: no `param.grad` is a view of them
        self._unseen: list[BufferId] = []
        self._freed: deque[int] = deque()

    def unsharded(self, unit: UnitId) -> Storages:
        """The gathered parameters of a unit."""
        return self._units[unit].unsharded if unit in self._units else NO_STORAGES

    def begin_step(self, step: StepBuilder) -> None:
        step.alloc(Account.PARAMETERS, self.states.parameters)
        step.alloc_in_first_step(Account.OPTIMIZER, self.states.optimizer)
        step.alloc(Account.OTHER, self.states.buffers)
        if not self._plan.use_orig_params:  # `zero_grad` frees the gradients of flat parameters
            return
        # NO_SHARD keeps the gradients that autograd allocates
        stream = Stream.ALL_GATHER if self._one_shard and not self._plan.mixed else Stream.REDUCE_SCATTER
        self._previous_gradients = step.alloc_in_first_step(Account.GRADIENTS, self.states.gradients, stream)

    def begin_micro_batch(self, *, is_first: bool, is_last: bool) -> None:
        self._is_first = is_first
        self._reduces = is_last or not self._plan.defers_reduction
        self._repeated = False
        self._forward_order.clear()
        self._recomputed.clear()

    def begin_forward(self, *, with_gradients: bool, repeated: bool) -> None:
        self._repeated = repeated

    def pre_forward(self, step: StepBuilder, unit: UnitId) -> None:
        """Free flat gradients that `zero_grad` does not free: those of the last step, and those that are no parameter's `grad`
        (`_reset_flat_param_grad_info_if_needed`).
        """
        step.free(self._previous_gradients, *self._unseen)
        self._previous_gradients, self._unseen = NO_BUFFER, []
        if unit.part == WHOLE:
            self._ran_in_layer.clear()
        if unit not in self._units:
            return
        step.add(PythonHooks())
        is_sharded = self._is_first or self._reshard or not self._plan.defers_reduction
        if self._repeated and (unit == AT_ROOT or not self._reshard):
            is_sharded = False  # it is still gathered since the previous forward
        if is_sharded:
            if unit not in self._prefetched:
                self._unshard(step, unit, "with previous compute")
            self._prefetched.discard(unit)
            self._wait(step, unit)
            if self._plan.forward_prefetch and step.following is not None:
                self._prefetched.add(step.following)
                self._unshard(step, step.following, "with next compute")

    def post_forward(self, step: StepBuilder, unit: UnitId) -> None:
        """Free the unit's parameters. The root's stay until backward (`_post_forward_reshard`). So do uploaded ones under NO_SHARD, because
        autograd has saved them.
        """
        if unit not in self._units:
            return
        if not self._repeated:  # `record_post_forward` counts the first forward
            self._forward_order.record(unit, has_backward=unit not in self._ran_in_layer)
            self._ran_in_layer.add(unit)
        if self._reshard and unit != AT_ROOT and not self._uploads_whole:
            self._free(step, unit)

    def before_recomputation(self, step: StepBuilder, unit: UnitId) -> None:
        """Gather the unit unless it was prefetched (`_pre_forward_unshard`), or its backward has begun and gathered it, because the
        gradient of its output is that of the layer's. If recomputation stops in it, its backward finds it gathered.
        """
        if unit not in self._units or not self._reshard:
            return
        step.add(PythonHooks())
        in_backward = bool(self._unsharded[unit]) and not self._uploads_whole
        if unit not in self._prefetched and not in_backward:
            self._prefetched.add(unit)
            self._unshard(step, unit, "with previous compute")
        self._wait(step, unit)

    def after_recomputation(self, step: StepBuilder, unit: UnitId) -> None:
        """Free the unit's parameters; its backward gathers them again (`_post_forward_reshard`)."""
        if unit in self._units and self._reshard and not self._uploads_whole:
            self._free(step, unit)
            self._prefetched.discard(unit)
            self._recomputed.add(unit)

    def pre_backward(self, step: StepBuilder, unit: UnitId) -> None:
        if unit not in self._units:
            return
        step.add(PythonHooks())
        if not self._reshard:
            self._free_frozen(step)
            return
        if unit != AT_ROOT or self._uploads_whole:
            if unit not in self._prefetched:
                self._unshard(step, unit, "after compute")
            self._prefetched.discard(unit)
            self._wait(step, unit)
        target = self._forward_order.pop_target(unit)
        if target in self._prefetched or self._awaits_recomputation(target):
            target = None
        self._targets[unit] = target
        if target is not None and self._plan.backward_prefetch == "pre":
            self._prefetched.add(target)
            self._unshard(step, target, "with next compute")
        self._free_frozen(step)

    def _awaits_recomputation(self, unit: UnitId | None) -> bool:
        """Whether the unit's next forward is in a reentrant checkpoint. Only then does it get a backward, for which it can be prefetched
        (`_needs_pre_backward_unshard`).
        """
        within = unit is not None and unit.part != WHOLE and not unit.is_outside_layers
        return within and self._plan.checkpointing == "reentrant" and unit not in self._recomputed

    def layer_done(self, step: StepBuilder, unit: UnitId) -> None:
        """Remember a frozen layer: the hook that frees it runs after the next layer's hook before backward, on the same tensor."""
        if unit in self._units and not self._units[unit].trainable_elements and self._unsharded[unit]:
            self._frozen.append(unit)

    def _free_frozen(self, step: StepBuilder) -> None:
        """Free the parameters of the frozen layers whose backward is over (`_register_post_backward_reshard_only_hook`)."""
        for unit in self._frozen:
            self._free(step, unit)
        self._frozen.clear()

    def post_backward(self, step: StepBuilder, unit: UnitId) -> None:
        """Reduce and free the unit's gradient. While the reduction is deferred, the gradient stays, and so do parameters that
        are not resharded after forward (`_should_free_in_backward`).
        """
        if unit not in self._units:
            return
        if self._reduces or self._reshard:
            self._free(step, unit)
            if self._uploads_whole:
                self._free(step, unit)
        target = self._targets.get(unit)
        if self._prefetches_after(unit) and target is not None:
            self._prefetched.add(target)
            self._unshard(step, target, "after compute")
        gradients = (
            step.take_gradients(unit) if self._policy is None else [b for _, b in step.take_owned_gradients(unit)]
        )
        if not self._units[unit].trainable_elements:
            return
        if self._one_shard and not self._plan.mixed:  # NO_SHARD keeps the flat gradient itself
            if self._is_first:
                step.reclassify(Account.GRADIENTS, *gradients)
            else:
                step.free(*gradients)
                step.add(Copy(unit, ADDED_TENSORS * self._units[unit].gradients.exact))
            self._send_gradients(step, unit)
            return
        if self._plan.defers_reduction:
            if self._is_first:
                self._unreduced[unit].append(gradients)
            else:
                step.free(*gradients)  # autograd adds them to the earlier gradients
                added = self._units[unit].trainable_elements * self._units[unit].gathered_element_bytes
                step.add(Copy(unit, ADDED_TENSORS * added))
            if not self._reduces:
                return
            gradients = self._unreduced[unit].popleft()
        self._reduce(step, unit, gradients)

    def owner_of(
        self, unit_id: UnitId, number: int, parameter: int, at_root: bool
    ) -> tuple[UnitId, OrderInUnit] | None:
        """The unit of a flat parameter's gradient: the layer's own (`parameter` 0), or that of module `parameter` - 1 in it."""
        if self._policy is None:
            return None
        outer = AT_ROOT if at_root else unit_id
        return (outer if not parameter else unit_at(module_mark(parameter - 1, outer), outer)), (0, 0, parameter)

    def _prefetches_after(self, unit: UnitId) -> bool:
        return self._reshard and self._plan.backward_prefetch == "post" and unit != AT_ROOT

    def _reduce(self, step: StepBuilder, unit: UnitId, gradients: list[BufferId]) -> None:
        """Reduce the unit's gradients on the reduce-scatter stream (`_reduce_grad`)."""
        sizes, stream = self._units[unit], Stream.REDUCE_SCATTER
        reduce_input = step.alloc(Account.COMMUNICATION, sizes.reduce_input, stream)
        reduced = step.alloc(Account.COMMUNICATION, sizes.reduce_output, stream)
        output = step.alloc(Account.GRADIENTS, sizes.gradients, stream)
        self._send_gradients(step, unit)
        step.free(reduced)
        if self._offload:
            self._offloaded.append(output)
        elif not sizes.has_trained_piece:
            self._unseen.append(output)
        elif not self._is_first and not self._plan.defers_reduction:
            step.add(Copy(unit, ADDED_TENSORS * sizes.gradients.exact))
            step.free(output)
        step.free(reduce_input)
        step.free(*gradients, used_on=stream)

    def end_backward(self, step: StepBuilder) -> None:
        """Free the parameters of units without a backward (`_catch_all_reshard`), and the sharded gradients that were copied to
        the host, which FSDP1 does not free earlier (`_accumulate_sharded_grad`, `_offload_grad`, `prepare_gradient_for_optim`).
        """
        self._frozen.clear()
        if self._reduces or self._reshard:
            for unit, kept in self._unsharded.items():
                while kept:
                    self._free(step, unit)
                    self._prefetched.discard(unit)  # prefetched for a backward that it does not have (`_reshard`)
        step.free(*self._offloaded)
        self._offloaded = []

    def optimizer_step(self, step: StepBuilder) -> None:
        plan = self._plan
        own = self._profile.trainable_parameters / plan.shard_degree
        if clips_gradients(plan):
            step.transient(Account.TEMPORARIES, self._all.total(lambda unit: unit.norms))
        if self._offload:
            step.add(host_step(plan, own))
            return
        step.transient(Account.TEMPORARIES, self._optimizer_temporaries())
        step.add(gpu_step(self._profile, plan, own))

    def _optimizer_temporaries(self) -> Storages:
        if optimizer_of(self._plan).steps_one_by_one:
            each = (unit.optimizer_temporaries for unit in self._units.values())
            return max(each, key=lambda storages: storages.exact, default=NO_STORAGES)
        return self._all.total(lambda unit: unit.optimizer_temporaries)

    def first_step_transients(self) -> Storages:
        """Buffers that lazy initialization allocates and frees one by one (`init_flat_param_attributes`)."""
        return self._all.total(lambda unit: unit.initial)

    # Gathering

    def _unshard(self, step: StepBuilder, unit: UnitId, start: Start) -> None:
        """Gather the unit's parameters. An uploaded shard lives as long as they do, because they are views of it
        (`flat_param_to`).
        """
        sizes = self._units[unit]
        shard = step.alloc(Account.COMMUNICATION, sizes.gathered_shard, Stream.PRE_UNSHARD)
        step.transient(Account.COMMUNICATION, sizes.uploaded_shard, Stream.PRE_UNSHARD)
        if len(self._freed) >= MAX_INFLIGHT_ALL_GATHERS:
            step.wait(self._freed.popleft())
        unsharded = step.alloc(Account.UNSHARDED_PARAMETERS, sizes.unsharded, Stream.ALL_GATHER)
        if not self._uploads:
            step.free(shard, used_on=Stream.ALL_GATHER)
            shard = NO_BUFFER
        self._unsharded[unit].append((unsharded, shard))
        self._send_parameters(step, unit, sizes, start)

    def _free(self, step: StepBuilder, unit: UnitId) -> None:
        unsharded, shard = self._unsharded[unit].pop()
        step.free(unsharded, used_on=Stream.COMPUTE)
        self._freed.append(step.late_frees())
        step.free(shard, used_on=Stream.ALL_GATHER)

    # Time

    def _send_parameters(self, step: StepBuilder, unit: UnitId, sizes: UnitBytes, start: Start) -> None:
        plan = self._plan
        if self._offload:
            step.add(
                HostTransfer(unit, sizes.elements / plan.shard_degree * sizes.stored_element_bytes, "parameters", start)
            )
        step.add(AllGather(unit, sizes.elements * sizes.gathered_element_bytes, start))

    def _wait(self, step: StepBuilder, unit: UnitId) -> None:
        """Make compute wait for the all-gather, and count the cast of the shard into the compute dtype before it."""
        plan = self._plan
        step.add(WaitFor(unit))
        if plan.mixed:
            sizes = self._units[unit]
            own = sizes.elements / plan.shard_degree
            step.add(Copy(unit, own * (sizes.stored_element_bytes + sizes.gathered_element_bytes)))

    def _send_gradients(self, step: StepBuilder, unit: UnitId) -> None:
        plan, n = self._plan, self._plan.shard_degree
        sizes = self._units[unit]
        trainable = sizes.trainable_elements
        reduced = trainable * sizes.reduced_element_bytes
        if n > 1:
            step.add(Copy(unit, trainable * sizes.gathered_element_bytes + 2 * reduced))
        step.add(ReduceScatter(unit, reduced))
        if plan.replica_degree > 1:
            step.add(AllReduce(unit, reduced / n, "replica"))
        if self._offload:
            step.add(HostTransfer(unit, trainable / n * sizes.stored_element_bytes, "gradients"))
