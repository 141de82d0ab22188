"""The bucket into which DeepSpeed copies gradients and from which it reduces them."""

from __future__ import annotations

from typing import Protocol

from fsdp_advisor.engines.deepspeed.buffers import Buffers, PendingGradients
from fsdp_advisor.engines.deepspeed.partitions import shard_elements
from fsdp_advisor.program.accounts import Account, Stream
from fsdp_advisor.program.builder import StepBuilder
from fsdp_advisor.program.instructions import NO_BUFFER, BufferId
from fsdp_advisor.program.storages import NO_STORAGES, Storages, round_up


class BucketGradient(Protocol):
    """The facts about a gradient that the bucket needs. `padded`: elements, padded to a multiple of the number of ranks. `owned`: of the
    flat buffer of its group, the elements that each rank owns (stages 1, 2).
    """

    @property
    def elements(self) -> int: ...
    @property
    def padded(self) -> int: ...
    @property
    def n_bytes(self) -> int: ...
    @property
    def oversized(self) -> bool: ...
    @property
    def owned(self) -> int: ...


class Bucket:
    """The bucket of one step. Source: the `ipg_buckets` of both optimizers (zero/stage_1_and_2.py, zero/stage3.py)."""

    def __init__(self, buffers: Buffers, ranks: int) -> None:
        self._buffers, self._ranks = buffers, ranks
        self._filled = PendingGradients()
        self._storage = NO_BUFFER  # stages 1, 2: the bucket itself
        self._is_last = False  # the last micro-batch
        self._oversized = NO_BUFFER  # a gradient larger than the bucket
        self._stream = Stream.REDUCE_SCATTER if buffers.sharded else Stream.COMPUTE  # only stage 3 overlaps by default
        self.averaged = NO_BUFFER
        """Stages 1, 2: rank 0's own gradients of this micro-batch."""

    def begin(self, *, is_last: bool) -> None:
        """Begin a micro-batch."""
        self._is_last, self.averaged = is_last, NO_BUFFER

    def setup(self, step: StepBuilder) -> None:
        """Allocate the bucket with the first gradient."""
        if self._storage == NO_BUFFER:
            self._storage = step.alloc(Account.COMMUNICATION, self._buffers.bucket)

    def release(self, step: StepBuilder) -> None:
        step.free(self._storage)
        self._storage = NO_BUFFER

    def take(self, step: StepBuilder, start: int, gradient: BucketGradient, buffer: BufferId) -> None:
        """Copy one gradient into the bucket and free it; an oversized one stays until it is reduced."""
        if self._filled.elements + gradient.elements > self._buffers.bucket_elements:
            self.reduce(step)
        if gradient.oversized:
            self._oversized = buffer
            if not self._buffers.sharded and self._buffers.offload_cast_bytes > 0:  # stages 1, 2 clone it to offload it
                self._oversized = step.alloc(Account.UNSHARDED_GRADIENTS, Storages.of(gradient.n_bytes))
                step.free(buffer)
        else:
            step.free(buffer)
        own = self._own_elements(start, gradient)
        self._filled.put(start, gradient.elements, gradient.padded, own, gradient.owned)

    def reduce(self, step: StepBuilder) -> None:
        """Reduce the gradients in the bucket, and keep rank 0's part."""
        if not self._filled.count:
            return
        copy_bytes = round_up(self._buffers.copy_bytes(self._filled, self._ranks))
        copy = step.alloc(Account.COMMUNICATION, Storages.of(copy_bytes), self._stream)
        temporaries = self._temporaries()
        if self._buffers.sharded:
            step.transient(Account.TEMPORARIES, temporaries, self._stream)
            step.free(copy)
        else:  # the copy is freed before gradients are moved to the host
            step.free(copy)
            step.transient(Account.TEMPORARIES, temporaries, self._stream)
        if self.averaged == NO_BUFFER and self._filled.largest_own:
            self.averaged = step.alloc(Account.GRADIENTS, self._buffers.averaged)
        if not self._oversized_stays:
            step.free(self._oversized)
        self._oversized = NO_BUFFER
        self._filled.clear()

    def _own_elements(self, start: int, gradient: BucketGradient) -> int:
        """The elements of a gradient that rank 0 keeps."""
        if self._buffers.sharded:
            return shard_elements(gradient.elements, self._ranks)
        return max(0, min(gradient.elements, gradient.owned - start))

    def _temporaries(self) -> Storages:
        """The GPU temporaries of moving rank 0's part to the host. Before the last micro-batch stage 3 copies back the
        gradients on the host; stages 1, 2 copy in place.
        """
        own = self._filled.largest_own
        if not own or not self._buffers.offload_cast_bytes:
            return NO_STORAGES
        if self._is_last:
            return self._buffers.offload_temporaries(own)
        return Storages.of(self._buffers.gradient_bytes * own) if self._buffers.sharded else NO_STORAGES

    @property
    def _oversized_stays(self) -> bool:
        """Whether an oversized gradient is still `param.grad` after its reduction."""
        owned = self._filled.largest_own > 0
        if self._buffers.sharded:
            return False
        if self._buffers.whole_gradients:  # stage 1 frees only rank 0's own gradients
            return not owned
        return owned and bool(self._buffers.offload_cast_bytes) and not self._is_last
