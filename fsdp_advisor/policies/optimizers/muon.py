"""torch's Muon for the matrices of the layers, and fused AdamW for all other parameters.

Muon orthogonalizes the momentum of each matrix by five Newton-Schulz iterations. Under FSDP2 they run on DTensors, and DTensor
chooses the collectives by its own model of their cost.

Source: torch/optim/_muon.py; torch/distributed/tensor/_collective_utils.py (`redistribute_cost`), _ops/_matrix_ops.py (torch 2.13).
"""

from __future__ import annotations

from typing import ClassVar, Literal

from fsdp_advisor.model.profile import Parameter
from fsdp_advisor.policies.optimizers import adamw
from fsdp_advisor.policies.optimizers.deepspeed_muon import DEEPSPEED_MUON
from fsdp_advisor.policies.optimizers.interface import (
    WHOLE,
    Collectives,
    NotForDeepSpeed,
    Optimizer,
    Refusal,
    Shape,
    Shards,
)
from fsdp_advisor.program.storages import NO_STORAGES, Storages

# R x C = the matrix; s = the smaller of R and C; e = elements of rank 0's rows; G = bytes of a Gram matrix, s x s in bf16

ITERATIONS = 5
BF16_BYTES = 2
START_US, HOP_US, HOP_ACROSS_US = 6.6, 0.6, 2.7
GB_PER_S, SHARE_ACROSS = 87.7, 0.22
ALL_TO_ALL_PENALTY_US = 1.0
"""DTensor's latencies and bandwidth of a collective, within a host and across hosts (`MeshTopoInfo`)."""

Layout = Literal["whole", "columns", "rows", "scattered", "exchanged"]
"""How DTensor distributes a matrix that FSDP2 splits by rows. `whole`: the matrix is not split.

`columns`: the matrix has more rows than columns, so its transpose is split by columns, and each Gram matrix is all-reduced. For other
matrices: `rows` gathers the matrix and the Gram matrix; `scattered` reduces the Gram matrix and gathers the matrix; `exchanged` splits the
matrix by columns with an all-to-all.
"""


class Muon(NotForDeepSpeed):
    """Muon: one momentum in the parameter's dtype for a matrix, AdamW's state for other parameters."""

    steps_one_by_one: ClassVar[bool] = True

    def made_by_deepspeed(self) -> Optimizer:
        return DEEPSPEED_MUON

    def shard_failure(self, parameter: Parameter, shards: Shards) -> str | None:
        """Refuses a matrix with fewer rows than ranks, for which DTensor returns the update in another layout than the parameter's."""
        if (
            not steps_by_muon(parameter)
            or not parameter.shape[0] < shards.ranks
            or layout_of(parameter, shards) == "columns"
        ):
            return None
        return f"torch.optim.Muon fails: {parameter.name} has {parameter.shape[0]} rows for {shards.ranks} ranks"

    def state_storages(self, parameter: Parameter, shape: Shape, element_bytes: int) -> Storages:
        if not steps_by_muon(parameter):
            return adamw.FUSED.state_storages(parameter, shape, element_bytes)
        elements = shape[0] * shape[1]
        return Storages.of(elements * element_bytes) if elements else NO_STORAGES

    def textbook_bytes(self, element_bytes: int) -> int:
        """Bytes of state per parameter of a matrix. Matrices are most of a model; other parameters have AdamW's state."""
        return element_bytes

    def step_temporaries(self, parameter: Parameter, shape: Shape, element_bytes: int) -> Storages:
        return self.shard_temporaries(parameter, shape, element_bytes, WHOLE)

    def shard_temporaries(self, parameter: Parameter, shape: Shape, element_bytes: int, shards: Shards) -> Storages:
        """The update, the matrix before and after an iteration in bf16, Gram matrices, and the tensors that DTensor gathers."""
        if not steps_by_muon(parameter) or not shape[0]:
            return NO_STORAGES
        rows, columns = parameter.shape
        local, smaller = BF16_BYTES * shape[0] * columns, min(rows, columns)
        update, gram = element_bytes * shape[0] * columns, BF16_BYTES * smaller**2
        gathered, gram_rows = shards.ranks * local, BF16_BYTES * shape[0] * rows
        reduced = (
            Storages.of(update) + Storages.of(local) + Storages.of(gram, 4),
            Storages.of(update) + Storages.of(local, 2) + Storages.of(gram, 3),
        )
        moments: tuple[Storages, ...]
        match layout_of(parameter, shards):
            case "whole":
                moments = (Storages.of(update) + Storages.of(local, 2) + Storages.of(gram, 2),)
            case "columns":
                moments = reduced
            case "rows":
                both = Storages.of(gathered, 2) + Storages.of(gram_rows, 2)
                copies = 1 if shape[0] == 1 else 2  # the transpose of a single row needs no contiguous copy
                moments = (Storages.of(update) + Storages.of(local, copies) + both,)
            case "scattered":
                kept = Storages.of(gram, 2) + Storages.of(gathered) + Storages.of(gram_rows)
                moments = (*reduced, Storages.of(update) + Storages.of(local, 2) + kept)
            case "exchanged":
                # in the first iteration: the matrix, its copies by columns, the cast, and a copy without padding
                copies = 3 + (element_bytes != BF16_BYTES) + (columns % shards.ranks > 0)
                moments = (*reduced, Storages.of(update) + Storages.of(local, copies) + Storages.of(gram, 3))
        return max(moments, key=lambda storages: storages.exact)

    def step_bytes(self, parameter: Parameter, element_bytes: int) -> int:
        """Bytes of the update without Muon's matrix products: momentum, update, its cast and norm, weight decay and the step."""
        if not steps_by_muon(parameter):
            return adamw.FUSED.step_bytes(parameter, element_bytes)
        return (11 * element_bytes + 5 * BF16_BYTES) * parameter.elements

    def step_flops(self, parameter: Parameter, shards: Shards = WHOLE) -> int:
        """FLOPs of three matrix products per iteration. Each rank squares the whole Gram matrix, unless that matrix is split by rows."""
        if not steps_by_muon(parameter):
            return 0
        rows, columns = parameter.shape
        smaller, local = min(rows, columns), -(-parameter.elements // shards.ranks)
        squared = 2 * smaller**3
        if layout_of(parameter, shards) == "rows":
            squared = -(-squared // shards.ranks)
        return ITERATIONS * (4 * smaller * local + squared)

    def step_collectives(self, parameter: Parameter, shards: Shards = WHOLE) -> Collectives:
        """The collectives of the Newton-Schulz iterations. Not counted: those of the norm, and the first iteration's all-to-alls."""
        if not steps_by_muon(parameter):
            return Collectives()
        matrix, gram = BF16_BYTES * parameter.elements, BF16_BYTES * min(parameter.shape) ** 2
        n = ITERATIONS
        match layout_of(parameter, shards):
            case "whole":
                return Collectives()
            case "columns" | "exchanged":
                return Collectives(reduced_bytes=2 * n * gram, reduces=2 * n)
            case "rows":
                return Collectives(gathered_bytes=n * (2 * matrix + gram), gathers=3 * n)
            case "scattered":
                return Collectives(gathered_bytes=n * (matrix + gram), gathers=2 * n, reduced_bytes=n * gram, reduces=n)


def steps_by_muon(parameter: Parameter) -> bool:
    """Whether Muon steps the parameter: a matrix that is neither embedding nor head."""
    return len(parameter.shape) == 2 and parameter.role not in ("embedding", "head")


def layout_of(parameter: Parameter, shards: Shards) -> Layout:
    """How DTensor distributes the matrix in Muon's iterations (`Layout`), by DTensor's own cost model.

    >>> [layout_of(Parameter(name="p", shape=s), Shards(ranks=8, ranks_per_node=8)) for s in ((64, 32), (32, 64), (4096, 4096))]
    ['columns', 'rows', 'scattered']
    """
    if shards.ranks == 1:
        return "whole"
    rows, columns = parameter.shape
    if rows > columns:
        return "columns"
    matrix, gram = BF16_BYTES * rows * columns, BF16_BYTES * rows**2
    exchange = _gather_us(matrix / shards.ranks, shards) + ALL_TO_ALL_PENALTY_US
    if _gather_us(matrix, shards) <= 2 * exchange:
        return "rows"
    scattered = _gather_us(gram, shards) + _gather_us(matrix, shards)
    return "scattered" if scattered <= 2 * _gather_us(gram, shards) - START_US + 2 * exchange else "exchanged"


def _gather_us(n_bytes: float, shards: Shards) -> float:
    """DTensor's cost of an all-gather or reduce-scatter in microseconds. (Its cost of an all-reduce has one start latency and twice the
    hops.)
    """
    across = shards.ranks > shards.ranks_per_node
    hops, rate = shards.ranks - 1, GB_PER_S * (SHARE_ACROSS if across else 1.0)
    moved = n_bytes / 2**30 * hops / shards.ranks
    return START_US + hops * (HOP_ACROSS_US if across else HOP_US) + moved / rate * 1e6


_SCRIPT = Refusal("Muon needs a second optimizer for embeddings, norms and head, which exported scripts do not have")

MUON = Muon(
    name="muon",
    script=_SCRIPT,
    transformers=Refusal("transformers 5.23 has no Muon: pass both optimizers to the Trainer"),
    deepspeed=DEEPSPEED_MUON.deepspeed,
    deepspeed_offloaded=DEEPSPEED_MUON.deepspeed_offloaded,
    host_kernel="many_passes",
    deepspeed_host_kernel="many_passes",
    is_cpu_adam=False,
    notes=(
        "muon is torch.optim.Muon for the matrices of the layers, and fused AdamW for embeddings, head, norms and biases; its matrix "
        "products are timed at the GPU's rate in the training precision, and under HSDP as with one replica",
    ),
)
