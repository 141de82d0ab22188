"""The instructions of a step program.

Instructions on memory (`Alloc`, `Free`, `Reclassify`, `DropBatch`, `DropGraph`, `DropLoss`, `HostWait`, `CreateStates`) are read by live
memory and by the caching allocator; instructions on time (`AllGather`, `ReduceScatter`, `AllReduce`, `HostTransfer`,
`Copy`, `PythonHooks`, `OptimizerStep`) by the timeline; `Compute` by all three.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from fsdp_advisor.model.fsdp_units import UnitId
from fsdp_advisor.model.tape import Polynomial
from fsdp_advisor.program.accounts import Account, Phase, Stream
from fsdp_advisor.program.spans import Span, TapeLayout
from fsdp_advisor.program.storages import NO_STORAGES, Storages

BufferId = int
"""The id of the storages of one `Alloc`, or of one gradient of the tape. Unique within a program."""

NO_BUFFER: BufferId = -1
"""The result of an empty allocation. Freeing it has no effect."""

Start = Literal["with previous compute", "with next compute", "after compute"]
"""The time at which the host issues a collective: at the start of the previous compute (the host runs ahead of the GPU), at the start of
the next compute (explicit prefetch), or at the end of all previous compute.
"""

HostKernel = Literal["one_pass", "many_passes"]

RankGroup = Literal["shard", "replica", "post_forward"]
"""The ranks of a collective: those that share one copy of the states, those that hold the same shard, or those that share the
parameters kept after forward (`Plan.post_forward_ranks`).
"""


class Alloc(NamedTuple):
    """Allocate storages on a stream: `storages`, or one storage of `per_batch` bytes, a polynomial in B and T."""

    buffer: BufferId
    account: Account
    stream: Stream
    storages: Storages
    per_batch: Polynomial | None = None


class Free(NamedTuple):
    """Free a buffer. `used_on` is another stream that may still use it (`Tensor.record_stream`), which delays its reuse."""

    buffer: BufferId
    account: Account
    n_bytes: int
    per_batch: Polynomial | None = None
    used_on: Stream | None = None


class Reclassify(NamedTuple):
    """Count a buffer in another account from now on."""

    buffer: BufferId
    n_bytes: int
    before: Account
    after: Account


class Compute(NamedTuple):
    """Run a span of the tape for a real layer (`layer` counts the stack's layers in forward order; 0 for the root).

    `gradients` names the parameter gradients that the span allocates: (birth within its segment, buffer).
    """

    span: Span
    layer: int
    gradients: tuple[tuple[int, BufferId], ...] = ()


class DropBatch(NamedTuple):
    """Free the inputs of the previous micro-batch."""


class DropGraph(NamedTuple):
    """Free what the graph of the previous micro-batch keeps alive after its backward: leaves that are not parameters, as an embedding's
    output that requires a gradient, and their gradients.
    """


class DropLoss(NamedTuple):
    """Free the previous micro-batch's loss; `with_graph`: and its graph, as `DropGraph` does."""

    with_graph: bool


class HostWait(NamedTuple):
    """The host waits until the first `late_frees` frees with `used_on` are over."""

    late_frees: int


class PythonHooks(NamedTuple):
    """The engine runs Python code around a unit, in one direction."""


class CreateStates(NamedTuple):
    """The first step allocates the states of a buffer here. Without this instruction it allocates them when the optimizer step begins."""

    buffer: BufferId


class AllGather(NamedTuple):
    """All-gather a unit's parameters: `n_bytes` in total."""

    unit: UnitId
    n_bytes: int
    start: Start = "with previous compute"
    group: RankGroup = "shard"


class WaitFor(NamedTuple):
    """Compute waits for the unit's all-gather."""

    unit: UnitId


class ReduceScatter(NamedTuple):
    """Reduce-scatter a unit's gradients: `n_bytes` in total."""

    unit: UnitId
    n_bytes: int


class AllReduce(NamedTuple):
    """All-reduce `n_bytes` per rank in `messages` messages. `exposed`: nothing runs at the same time."""

    unit: UnitId
    n_bytes: float
    group: RankGroup
    messages: float = 1
    exposed: bool = False


class HostTransfer(NamedTuple):
    """Copy `n_bytes` between the GPU and pinned host memory. `exposed`: nothing runs at the same time."""

    unit: UnitId
    n_bytes: float
    what: Literal["parameters", "gradients", "states"]
    start: Start = "after compute"
    exposed: bool = False

    @property
    def text(self) -> str:
        """What is copied, and from where: `parameters from the host`."""
        direction = {"parameters": "from", "gradients": "to", "states": "from and to"}[self.what]
        return f"{self.what} {direction} the host"


ADDED_TENSORS = 3
"""Tensors that are read and written when a gradient is added to that of an earlier micro-batch."""


class Copy(NamedTuple):
    """Copies into or out of communication buffers, and sums of gradients, on the compute stream. `n_bytes`: bytes read and written in
    total.
    """

    unit: UnitId
    n_bytes: float


class OptimizerStep(NamedTuple):
    """Step the optimizer: `n_bytes` read and written on the GPU, or `host_elements` elements updated by a node's host.

    `quantized_states`: the values of 8-bit states that it quantizes while it reads and writes `quantizing_bytes`, which `n_bytes` does
    not contain. `flops`: of its matrix products. Over the ranks of the shards it sends `gathered_bytes` in `gathers` all-gathers and
    reduce-scatters, and `reduced_bytes` in `reduces` all-reduces. Nothing else runs at the same time.

    `host_kernel`: whether the update on the CPU passes over host memory once or once per operation.
    """

    n_bytes: float
    host_elements: float = 0.0
    host_kernel: HostKernel = "one_pass"
    quantized_states: float = 0.0
    quantizing_bytes: float = 0.0
    flops: float = 0.0
    gathered_bytes: float = 0.0
    gathers: float = 0.0
    reduced_bytes: float = 0.0
    reduces: float = 0.0


Instruction = (
    Alloc
    | Free
    | Reclassify
    | Compute
    | DropBatch
    | DropGraph
    | DropLoss
    | HostWait
    | PythonHooks
    | CreateStates
    | AllGather
    | WaitFor
    | ReduceScatter
    | AllReduce
    | HostTransfer
    | Copy
    | OptimizerStep
)


class Visit(NamedTuple):
    """The step's work at one unit: the unit's name, and the instructions in the order in which the host issues them.

    `segment` is the tape's segment that runs, None if none does. `repetition` is (run, repetition) of a layer within its
    stack, both counted from 0; None for the root.
    """

    phase: Phase
    unit: UnitId
    name: str
    instructions: tuple[Instruction, ...]
    segment: int | None = None
    repetition: tuple[int, int] | None = None


class MicroBatch(NamedTuple):
    """A micro-batch that runs `times` times in a row."""

    times: int
    visits: tuple[Visit, ...]


@dataclass(frozen=True, eq=False, kw_only=True)
class StepProgram:
    """One steady-state step on rank 0.

    `states` are allocated before the step and live through it, unless an instruction frees them. `lazily_created` are those
    that the first step creates. `first_step_transients` are allocated and freed one by one before the first
    forward. `rebuilt_buckets` replace DDP's communication buffers after the first step. Gradients are allocated on
    `gradient_stream`.
    """

    layout: TapeLayout
    states: tuple[Alloc, ...]
    micro_batches: tuple[MicroBatch, ...]
    optimizer: Visit
    lazily_created: frozenset[BufferId] = frozenset()
    first_step_transients: Storages = NO_STORAGES
    rebuilt_buckets: Storages = NO_STORAGES
    gradient_stream: Stream = Stream.COMPUTE

    def __str__(self) -> str:
        from fsdp_advisor.program.text import program_text

        return program_text(self)
