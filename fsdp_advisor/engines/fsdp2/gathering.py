"""Gathers and frees the parameters of FSDP2's units.

Source: torch.distributed.fsdp._fully_shard (torch 2.13): `FSDPParamGroup.unshard`, `wait_for_unshard`, `foreach_all_gather`,
`FSDPParam.to_sharded_post_forward`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Literal

from fsdp_advisor.engines.fsdp2.units import UnitBytes
from fsdp_advisor.job.plan import Plan
from fsdp_advisor.model.fsdp_units import UnitId
from fsdp_advisor.program.accounts import Account, Stream
from fsdp_advisor.program.builder import StepBuilder
from fsdp_advisor.program.instructions import NO_BUFFER, AllGather, BufferId, Copy, HostTransfer, Start, WaitFor
from fsdp_advisor.program.storages import NO_STORAGES, Storages

Pass = Literal["forward", "recomputation", "backward", "code"]
"""The pass through a unit for which it is gathered. ``code``: the model's code asks for it in forward, by `FSDPModule.unshard`, which runs
on the compute stream and keeps no output.
"""
_ALONE: tuple[Pass, ...] = ("backward", "code")
"""The passes whose all-gather does not run at the same time as earlier compute, and whose output is freed after the copy-out."""


class Gathering:
    """The gathered parameters of each unit in one step, and the outputs of all-gathers that are not copied to parameters yet."""

    def __init__(self, plan: Plan, units: Mapping[UnitId, UnitBytes]) -> None:
        self._plan, self._units = plan, units
        self._offload = plan.offload == "parameters"
        self._one_shard = plan.shard_degree == 1
        self._outputs: dict[UnitId, BufferId] = {}  # of all-gathers before their copy-out
        self._previous_output = NO_BUFFER  # forward keeps the last all-gather's output until the next copy-out
        self._unsharded: defaultdict[UnitId, list[list[BufferId]]] = defaultdict(list)
        self._kept_shards: defaultdict[UnitId, list[BufferId]] = defaultdict(list)  # shards kept after forward
        self.by_code: list[UnitId] = []
        """The units that the model's code has gathered, in the model's order."""

    def is_requested(self, unit: UnitId) -> bool:
        """Whether the unit's all-gather is issued, but its output not copied out."""
        return unit in self._outputs

    def is_unsharded(self, unit: UnitId) -> bool:
        return bool(self._unsharded[unit])

    def unsharded(self) -> list[UnitId]:
        """The units whose parameters are gathered, in order; one that several forwards have gathered stands there several times."""
        return [unit for unit, kept in sorted(self._unsharded.items()) for _ in kept]

    def unshard(self, step: StepBuilder, unit: UnitId, run: Pass) -> None:
        """Gather the unit's parameters for a pass through it, unless they were requested in advance, and copy them out."""
        if run == "code":
            self.by_code.append(unit)
        if unit not in self._outputs:
            self.request(step, unit, run, "after compute" if run in _ALONE else "with previous compute")
        if self._one_shard:
            self._copy_one_shard(step, unit)
        else:
            self._copy_out(step, unit, run)

    def request(self, step: StepBuilder, unit: UnitId, run: Pass, start: Start = "with next compute") -> None:
        """Copy the shards in and all-gather them. The output stays until the copy-out. If forward resharded to fewer ranks, backward
        gathers from those ranks only.
        """
        if self._one_shard:
            return
        sizes, stream = self._units[unit], Stream.COMPUTE if run == "code" else Stream.COPY_IN
        if run != "forward" and (ranks := self._plan.post_forward_ranks) is not None:
            copied = (
                Storages.of(sizes.gathered_bytes // ranks) if self._plan.mixed and not self._offload else NO_STORAGES
            )
            inputs = [step.alloc(Account.COMMUNICATION, copied, Stream.COPY_IN)]
            gather = AllGather(unit, sizes.gathered_bytes, start, "post_forward")
        else:
            inputs = (
                self._upload(step, unit, start, stream)
                if self._offload
                else [step.alloc(Account.COMMUNICATION, sizes.gather_input, stream)]
            )
            gather = AllGather(unit, sizes.gathered_bytes, start)
        self._outputs[unit] = step.alloc(Account.COMMUNICATION, sizes.gather_output, stream)
        step.free(*inputs)
        step.add(gather)

    def _upload(self, step: StepBuilder, unit: UnitId, start: Start, stream: Stream) -> list[BufferId]:
        """With offload, copy each shard to the GPU and cast it. All inputs live until the all-gather is issued."""
        inputs = []
        for n_bytes in self._units[unit].shards:
            shard = step.alloc(Account.COMMUNICATION, Storages.of(n_bytes.stored), stream)
            if n_bytes.computed != n_bytes.stored:
                cast = step.alloc(Account.COMMUNICATION, Storages.of(n_bytes.computed), stream)
                step.free(shard)
                shard = cast
            inputs.append(shard)
        step.add(HostTransfer(unit, self._own_bytes(unit), "parameters", start))
        return inputs

    def _copy_out(self, step: StepBuilder, unit: UnitId, run: Pass) -> None:
        """Copy the all-gather's output to parameters. In forward the output lives until the next unit's copy-out ends."""
        step.add(WaitFor(unit))
        sizes = self._units[unit].unsharded
        if self._plan.post_forward_ranks is None:
            unsharded = [step.alloc(Account.UNSHARDED_PARAMETERS, sizes)]
        else:
            unsharded = [step.alloc(Account.UNSHARDED_PARAMETERS, Storages.of(n_bytes)) for n_bytes in sizes.each()]
        self._unsharded[unit].append(unsharded)
        if run == "backward" and self._plan.post_forward_ranks is not None:
            count = len(unsharded)
            kept = self._kept_shards[unit]
            step.free(*kept[-count:])
            del kept[-count:]
        self._add_copies(step, unit)
        output = self._outputs.pop(unit)
        if run in _ALONE:
            step.free(output)
        else:
            step.free(self._previous_output)
            self._previous_output = output

    def _copy_one_shard(self, step: StepBuilder, unit: UnitId) -> None:
        """World size 1: copy each parameter to the GPU, cast it and copy it. Each of these copies lives until the next parameter's is
        made.
        """
        last = NO_BUFFER
        unsharded = []
        if self._offload:
            step.add(HostTransfer(unit, self._own_bytes(unit), "parameters", "with previous compute"))
            step.add(WaitFor(unit))
        for n_bytes in self._units[unit].shards:
            compute = Storages.of(n_bytes.computed)
            fresh = NO_BUFFER
            if self._offload:
                fresh = step.alloc(Account.COMMUNICATION, Storages.of(n_bytes.stored))
            if n_bytes.computed != n_bytes.stored:
                cast = step.alloc(Account.COMMUNICATION, compute)
                step.free(fresh)
                fresh = cast
            step.free(last)
            last = fresh
            unsharded.append(step.alloc(Account.UNSHARDED_PARAMETERS, compute))
        step.free(last)
        self._add_copies(step, unit)
        self._unsharded[unit].append(unsharded)

    def _own_bytes(self, unit: UnitId) -> int:
        """Bytes of a unit's parameters as this rank keeps them."""
        return sum(shard.stored for shard in self._units[unit].shards)

    def _add_copies(self, step: StepBuilder, unit: UnitId) -> None:
        """Add two copies: the cast of the shards into the all-gather's input, and the split of its output into parameters."""
        casts = sum(sum(shard) for shard in self._units[unit].shards if shard.computed != shard.stored)
        splits = 0 if self._one_shard else 2 * self._units[unit].gathered_bytes
        step.add(Copy(unit, casts + splits))

    def free(self, step: StepBuilder, unit: UnitId) -> None:
        """Free the unit's parameters."""
        step.free(*self._unsharded[unit].pop())

    def reshard_after_forward(self, step: StepBuilder, unit: UnitId) -> None:
        """Free the unit's parameters. If they are resharded to fewer ranks, first clone this rank's shard of each
        (`to_sharded_post_forward`).
        """
        ranks = self._plan.post_forward_ranks
        if ranks is None:
            self.free(step, unit)
            return
        whole = self._units[unit].unsharded.each()
        for gathered, n_bytes in zip(self._unsharded[unit].pop(), whole, strict=True):
            self._kept_shards[unit].append(step.alloc(Account.UNSHARDED_PARAMETERS, Storages.of(n_bytes // ranks)))
            step.free(gathered)

    def free_previous_output(self, step: StepBuilder) -> None:
        """Free the output of the last all-gather in forward or in a recomputation."""
        step.free(self._previous_output)
        self._previous_output = NO_BUFFER

    def end_backward(self, step: StepBuilder) -> None:
        """Free the outputs of all-gathers for units that turned out to have no backward (`finalize_backward`), and the last output."""
        self.by_code.clear()
        step.free(*self._outputs.values())
        self._outputs.clear()
        self.free_previous_output(step)
