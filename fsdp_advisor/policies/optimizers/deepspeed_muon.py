"""DeepSpeed's own Muon, which its configuration names: Muon for matrices, Adam for the rest.

Under ZeRO-1 and 2 a rank orthogonalizes each matrix of which it owns a part, when the last backward of a step ends. The momentum is of
whole matrices, in the dtype of their gradients, and is kept twice: a step that overflows discards the second copy. `torch.compile`
compiles the update of a matrix. Under ZeRO-3 the momentum is sharded: `engines.deepspeed.muon_updates`.

Source: DeepSpeed 0.19.8, runtime/zero/stage_1_and_2.py (get_flat_partition, _muon_momentum_buffer, _muon_staging_momentum),
runtime/zero/muon/original_muon.py (muon_update, zeropower_via_gram_newtonschulz), muon_optimizer.py (MuonWithAuxAdam.step).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import ClassVar

from fsdp_advisor.model.profile import Parameter
from fsdp_advisor.policies.dtypes import HALF_BYTES
from fsdp_advisor.policies.optimizers import adamw
from fsdp_advisor.policies.optimizers.interface import (
    WHOLE,
    NamedOptimizer,
    Optimizer,
    Refusal,
    Shape,
    Shards,
)
from fsdp_advisor.program.storages import NO_STORAGES, Storages

# s = the smaller, l = the larger of the last two dimensions of a matrix; further dimensions count matrices, such as experts

ITERATIONS = 5
"""The iterations of Newton-Schulz. They run in fp16 (`ns_compute_dtype`)."""
FINITE_BYTES = 1
"""The flag whether a gradient is finite."""


@dataclass(frozen=True, kw_only=True)
class DeepspeedMuon(Optimizer):
    """Muon and, for vectors, embeddings and head, DeepSpeed's FusedAdam. The states of Muon's partition are in `muon_storages`."""

    is_deepspeeds: ClassVar[bool] = True

    def state_storages(self, parameter: Parameter, shape: Shape, element_bytes: int) -> Storages:
        return adamw.FUSED.state_storages(parameter, shape, element_bytes)

    def flat_state_storages(self, elements: int, element_bytes: int) -> Storages:
        return adamw.FUSED.flat_state_storages(elements, element_bytes)

    def deepspeed_host_states(self, elements: int, element_bytes: int) -> tuple[int, ...]:
        return adamw.FUSED.deepspeed_host_states(elements, element_bytes)

    def textbook_bytes(self, element_bytes: int) -> int:
        """Bytes of state per parameter of a matrix: the momentum and its copy."""
        return 2 * element_bytes

    def step_temporaries(self, parameter: Parameter, shape: Shape, element_bytes: int) -> Storages:
        return NO_STORAGES

    def flat_step_temporaries(self, elements: int, element_bytes: int) -> Storages:
        return NO_STORAGES

    def step_bytes(self, parameter: Parameter, element_bytes: int) -> int:
        """Bytes of the update without Muon's matrix products. The momentum is copied before and after it. Then the master is read and
        written twice.
        """
        if not _is_matrix(parameter):
            return adamw.FUSED.step_bytes(parameter, element_bytes)
        return update_bytes(parameter, element_bytes) + 8 * element_bytes * parameter.elements

    def step_flops(self, parameter: Parameter, shards: Shards = WHOLE) -> int:
        return update_flops(parameter.shape) if _is_matrix(parameter) else 0


def muon_storages(elements: int, gradient_bytes: int) -> Storages:
    """Muon's state of the matrices that a rank owns a part of: the momentum, and the copy that a step writes first."""
    return Storages.of(gradient_bytes * elements, 2)


def update_bytes(matrix: Parameter, element_bytes: int) -> int:
    """Bytes of a matrix's update without the matrix products.

    The gradient and the momentum are read for the check, the norm and the cast, and written with the update.
    """
    return (9 * element_bytes + 3 * HALF_BYTES) * matrix.elements


def update_flops(shape: Shape) -> int:
    """FLOPs of the iterations on the Gram matrix (s x s), with a restart from the matrix at the third; for a square on itself."""
    matrices, smaller, larger = _sizes(shape)
    square, product = 2 * smaller**3, 2 * smaller**2 * larger
    return matrices * (3 * ITERATIONS * square if smaller == larger else 4 * product + 14 * square)


def update_temporaries(shape: Shape, gradient_bytes: int) -> Storages:
    """The temporaries of a matrix's update at their peak, with the update itself.

    X = the matrix and G = its Gram matrix in fp16. torch.compile makes a graph for the first shape, and one for all further tall ones, wide
    ones and squares each. Graphs of some shapes free X earlier, or order the products otherwise, and need up to 2 G less. Some of experts
    in fp32 need 2 G more.
    Source: the code that Inductor of torch 2.13 generates for CUDA.
    >>> update_temporaries((1536, 512), 2).exact == 2 * (2 * 1536 * 512) + 6 * (2 * 512 * 512) + 1
    True
    """
    matrices, smaller, larger = _sizes(shape)
    x, gram = HALF_BYTES * prod(shape), HALF_BYTES * matrices * smaller**2
    update = gradient_bytes * prod(shape)
    if smaller < larger:
        # the third iteration has X, its restart, and six matrices like G; one of experts has eight before the restart
        high = max(2 * x + 6 * gram, x + (8 * gram if len(shape) > 2 else 0), x + update)
    else:
        high = max(8 * x if len(shape) > 2 else 6 * x, 2 * x + update)
    return Storages.of(high) + Storages.of(FINITE_BYTES)


def _is_matrix(parameter: Parameter) -> bool:
    """Whether the cost of the update counts as Muon's. (DeepSpeed decides by the name: `engines.deepspeed.groups`.)"""
    return len(parameter.shape) >= 2 and parameter.role not in ("embedding", "head")


def _sizes(shape: Shape) -> tuple[int, int, int]:
    """(number of matrices, their smaller dimension, their larger one)."""
    *many, rows, columns = shape
    return prod(many), min(rows, columns), max(rows, columns)


_MADE_BY_DEEPSPEED = Refusal(
    "DeepSpeed makes its Muon from the section optimizer of its configuration, not from a script"
)

DEEPSPEED_MUON = DeepspeedMuon(
    name="muon",
    script=_MADE_BY_DEEPSPEED,
    # the Trainer leaves the optimizer to DeepSpeed if the configuration names one (integrations/deepspeed.py, deepspeed_optim_sched)
    transformers=NamedOptimizer(name="adamw_torch_fused"),
    deepspeed=NamedOptimizer(name="Muon"),
    deepspeed_offloaded=NamedOptimizer(name="Muon"),
    host_kernel="many_passes",
    deepspeed_host_kernel="many_passes",
    is_cpu_adam=False,
    notes=(
        "muon is DeepSpeed's: Muon for all matrices without embed or lm_head in their name, and Adam for the rest; its matrix products "
        "are timed at the GPU's rate in the training precision, and the benchmarks of torch.compile in the first step are left out",
    ),
    deepspeed_notes=(
        "rank 0 has the largest matrices; another rank may have a part of one more, and keeps the momentum of the whole matrix",
    ),
)
