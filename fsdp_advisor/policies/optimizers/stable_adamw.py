"""StableAdamW of the package optimi (torch-optimi): AdamW with a learning rate that is scaled for each tensor.

Two Triton kernels update a tensor without temporaries. A parameter in 16 bits has a third tensor of state, the error of Kahan's sum.

Source: torch-optimi 0.3.3, optimi/stableadamw.py (`_init_state`, `_triton_stableadamw`); transformers 5.23, trainer_optimizer.py,
`_get_stable_adamw`.
"""

from __future__ import annotations

from fsdp_advisor.policies.dtypes import FP32_BYTES, HALF_BYTES
from fsdp_advisor.policies.optimizers.elementwise import Elementwise
from fsdp_advisor.policies.optimizers.interface import Constructor, NamedOptimizer, Refusal, without_deepspeed
from fsdp_advisor.program.storages import NO_STORAGES, Storages

_CONSTRUCTOR = Constructor(module="optimi", name="StableAdamW")


class StableAdamW(Elementwise):
    """Two moments, the squared epsilon, a scalar for the mean, and the error of Kahan's sum (one byte if the parameter is in fp32)."""

    def flat_state_storages(self, elements: int, element_bytes: int) -> Storages:
        if not elements:
            return NO_STORAGES
        error = Storages.of(elements * element_bytes if element_bytes == HALF_BYTES else 1)
        scalars = Storages.of(element_bytes) + Storages.of(FP32_BYTES)
        return super().flat_state_storages(elements, element_bytes) + error + scalars

    def textbook_bytes(self, element_bytes: int) -> int:
        return super().textbook_bytes(element_bytes) + element_bytes * (element_bytes == HALF_BYTES)


STABLE_ADAMW = StableAdamW(
    name="stable_adamw",
    script=_CONSTRUCTOR,
    transformers=NamedOptimizer(name="stable_adamw"),
    **without_deepspeed("stable_adamw"),
    measured_on_cpu=Refusal("the kernels of StableAdamW run on a GPU; on the CPU it allocates more"),
    moments=2,
    temporaries=0,
    passes=9,  # the gradient; each moment read twice and written; the parameter read and written: 1 + 6 + 2 tensors
)
