"""GaLore over bitsandbytes' AdamW in 8 bits: the moments of the projected gradient have one byte per element.

The update replaces the gradient by the projected gradient, frees the gradient, and copies the weight, because bitsandbytes then steps a
tensor of the projected shape instead of the weight.

Source: galore-torch 1.0, adamw8bit.py, galore_projector.py; bitsandbytes 0.50.2, optim/optimizer.py (`Optimizer2State`). GaLore passes
`percentile_clipping` by position, and bitsandbytes now has `max_unorm` at that position. So each tensor keeps a norm too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import ClassVar

from fsdp_advisor.job.choices import OptimizerName
from fsdp_advisor.model.profile import Parameter
from fsdp_advisor.policies.dtypes import FP32_BYTES
from fsdp_advisor.policies.optimizers.bitsandbytes import (
    ADAMW_8BIT,
    QUANTIZATION_TABLE_BYTES,
    QUANTIZED_MIN_ELEMENTS,
)
from fsdp_advisor.policies.optimizers.interface import Shape, Stepped
from fsdp_advisor.policies.optimizers.low_rank import Galore, low_rank
from fsdp_advisor.policies.optimizers.variables import Variables
from fsdp_advisor.program.storages import NO_STORAGES, Storages


class Galore8bit(Galore):
    """Both moments with a scale per block, and the norm of the update. A tensor with few elements has moments in fp32."""

    tables: ClassVar[Storages] = NO_STORAGES
    """The tables of codes that each tensor keeps. Empty if all tensors share one optimizer and therefore its tables."""

    def state_storages(self, parameter: Parameter, shape: Shape, element_bytes: int) -> Storages:
        if not prod(shape):
            return NO_STORAGES
        elements, kept = prod(shape), Storages.of(FP32_BYTES)
        if self.projects(parameter):
            elements = self.rank_of(shape) * max(shape)
            kept += Storages.of(self.projection_bytes(shape, element_bytes))
        if elements >= QUANTIZED_MIN_ELEMENTS:
            kept += self.tables
        return kept + ADAMW_8BIT.flat_state_storages(elements, element_bytes)

    def loop(self, tensors: Sequence[Stepped]) -> Variables:
        variables = Variables()
        for position, tensor in self.in_order(tensors):
            if self.projects(tensor.parameter):
                self._step_projected(variables, position, tensor)
        variables.drop_all()
        return variables

    def _step_projected(self, variables: Variables, position: int, tensor: Stepped) -> None:
        matrix = tensor.n_bytes
        low = tensor.element_bytes * self.rank_of(tensor.shape) * max(tensor.shape)
        self.decompose(variables, tensor.shape, tensor.element_bytes)
        variables.assign(f"gradient {position}", low)  # stays until zero_grad
        variables.assign("copy", matrix)
        variables.assign("data", low)
        variables.drop("copy")  # the old weight, which its copy replaces
        variables.release_gradient(position, matrix)
        variables.assign("full_rank_grad", matrix)
        variables.assign("scaled", matrix)
        variables.drop("full_rank_grad", "data", "scaled")

    def step_bytes(self, parameter: Parameter, element_bytes: int) -> int:
        """Bytes that a step reads and writes if it reuses the projection: it projects the gradient and steps the projected tensor."""
        if not self.projects(parameter):
            return ADAMW_8BIT.step_bytes(parameter, element_bytes)
        low = Parameter(parameter.name, (self.rank_of(parameter.shape), max(parameter.shape)))
        whole = (1 + self.update_passes()) * element_bytes * parameter.elements
        return whole + ADAMW_8BIT.step_bytes(low, element_bytes) + 3 * element_bytes * low.elements

    def quantized_states(self, parameter: Parameter) -> int:
        """Only those of parameters that are not projected. The states of a projected tensor are few compared with the traffic of the
        whole weight.
        """
        return 0 if self.projects(parameter) else ADAMW_8BIT.quantized_states(parameter)

    def update_passes(self) -> int:
        """8 tensors: the weight is copied (2); the update is written (1), scaled (2) and added (3)."""
        return 8


class LayerwiseGalore8bit(Galore8bit):
    """The layerwise form: each parameter has its own optimizer, with its own tables of codes."""

    tables = Storages.of(QUANTIZATION_TABLE_BYTES, 2)


_NAME: OptimizerName = "galore_adamw_8bit"
_SHARED = ADAMW_8BIT.shared_state
GALORE_ADAMW_8BIT = replace(low_rank(Galore8bit, _NAME, "GaLore", shared_state=_SHARED), frees_gradients=True)
GALORE_ADAMW_8BIT_LAYERWISE = low_rank(LayerwiseGalore8bit, "galore_adamw_8bit_layerwise", "GaLore")
