"""The bytes per element of parameters, gradients and masters, by backend.

Source: torch 2.13, distributed/fsdp, `MixedPrecision` and `MixedPrecisionPolicy`; deepspeed 0.19.8, runtime/base_optimizer.py,
`ZeROOptimizer._configure_master_weights`.
"""

from __future__ import annotations

from dataclasses import dataclass

from fsdp_advisor.job.plan import Plan
from fsdp_advisor.model.profile import Parameter


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionPolicy:
    """Bytes per element of the tensors that a step stores, computes with, reduces and updates.

    `parameter_bytes`: parameters between steps (`storage_bytes` of a single parameter).
    `compute_bytes`: forward, backward and gathered parameters.
    `gradient_bytes`: gradients after their reduction. `reduce_bytes`: gradients during their reduction.
    `master_bytes`: a second copy of the parameters, which the optimizer steps. None if it steps the parameters.
    """

    parameter_bytes: int
    compute_bytes: int
    gradient_bytes: int
    reduce_bytes: int
    master_bytes: int | None

    def storage_bytes(self, parameter: Parameter) -> int:
        """Bytes per element of `parameter` between steps. All parameters have the same dtype today."""
        return self.parameter_bytes

    @property
    def stepped_bytes(self) -> int:
        """Bytes per element of the tensor that the optimizer steps."""
        return self.parameter_bytes if self.master_bytes is None else self.master_bytes


def precision_of(plan: Plan) -> PrecisionPolicy:
    """The precision of `plan`. DDP and FSDP step the parameters; DeepSpeed keeps masters, whatever the model's dtype is.

    >>> from fsdp_advisor.job.plan import Plan
    >>> from fsdp_advisor.parallelism.mesh import Mesh
    >>> precision_of(Plan(strategy="zero3", backend="deepspeed", mesh=Mesh(dp_shard=8), seq_len=1)).master_bytes
    4
    """
    if plan.backend == "deepspeed":
        return PrecisionPolicy(
            parameter_bytes=plan.compute_bytes,
            compute_bytes=plan.compute_bytes,
            gradient_bytes=plan.compute_bytes,
            reduce_bytes=plan.compute_bytes,
            master_bytes=plan.param_bytes,
        )
    return PrecisionPolicy(
        parameter_bytes=plan.param_bytes,
        compute_bytes=plan.compute_bytes,
        gradient_bytes=plan.param_bytes,
        reduce_bytes=plan.param_bytes if plan.backend == "ddp" else plan.reduce_bytes,
        master_bytes=None,
    )
