"""The optimizers of bitsandbytes. Their states have fp32 or 8 bits, and are allocated by PyTorch or, if paged, in CUDA's managed memory.

Source: bitsandbytes 0.50.2, optim/optimizer.py (`Optimizer8bit`, `Optimizer1State`, `Optimizer2State`), optim/ademamix.py,
functional.py (`get_paged`); for DeepSpeed's offload accelerate 1.15.0, utils/deepspeed.py, `map_pytorch_optim_to_deepspeed`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

from fsdp_advisor.job.choices import OptimizerName
from fsdp_advisor.model.profile import Parameter
from fsdp_advisor.policies.dtypes import FP32_BYTES
from fsdp_advisor.policies.optimizers.interface import (
    Constructor,
    NamedOptimizer,
    Optimizer,
    Refusal,
    Shape,
)
from fsdp_advisor.program.storages import NO_STORAGES, Storages

QUANTIZED_BLOCK_ELEMENTS = 256
"""Elements that share one fp32 scale (`absmax`)."""
QUANTIZED_MIN_ELEMENTS = 4096
"""A tensor with fewer elements keeps fp32 states (`min_8bit_size`)."""
PAGED_MIN_ELEMENTS = 100_000
"""The states of a tensor with fewer elements are not paged (`get_state_buffer`)."""
SCALE_BYTES = 4
QUANTIZATION_TABLE_BYTES = 1024
"""Bytes of a table of codes: 256 fp32 values. There is one table for signed and one for unsigned states."""


@dataclass(frozen=True, kw_only=True)
class Bitsandbytes(Optimizer):
    """States of one byte per element with a scale per block, or of fp32. The update is in place.

    `moments`: for each state tensor the number of moments in it; AdEMAMix keeps two in its first. `eight_bit`: whether
    large tensors have 8-bit states. `quantizes_embeddings`: whether embeddings have 8-bit states, too. transformers' Trainer registers
    fp32 states for the weights of every `nn.Embedding` (transformers 5.23, trainer.py, `create_optimizer`); a flat partition of DeepSpeed
    ignores this. `is_paged`: whether states are in managed memory; the scales never are.
    """

    moments: tuple[int, ...]
    eight_bit: bool
    quantizes_embeddings: bool = True

    def made_by_trainer(self) -> Optimizer:
        return replace(self, quantizes_embeddings=False)

    def state_storages(self, parameter: Parameter, shape: Shape, element_bytes: int) -> Storages:
        return self._stepping(parameter).flat_state_storages(prod(shape), element_bytes)

    def flat_state_storages(self, elements: int, element_bytes: int) -> Storages:
        kept = NO_STORAGES if self._pages(elements) else self._states(elements)
        return kept + self._scales(elements)

    def paged_state_storages(self, parameter: Parameter, shape: Shape) -> Storages:
        return self._stepping(parameter).flat_paged_state_storages(prod(shape))

    def flat_paged_state_storages(self, elements: int) -> Storages:
        return self._states(elements) if self._pages(elements) else NO_STORAGES

    def deepspeed_host_states(self, elements: int, element_bytes: int) -> tuple[int, ...]:
        """DeepSpeed replaces AdamW by DeepSpeedCPUAdam, whose moments have the masters' dtype. Other optimizers step on the CPU without
        paging.
        """
        if self.is_cpu_adam:
            return (element_bytes * elements,) * 2
        return tuple((self._states(elements) + self._scales(elements)).each())

    def textbook_bytes(self, element_bytes: int) -> int:
        return sum(self.moments) * (1 if self.eight_bit else FP32_BYTES)

    def step_temporaries(self, parameter: Parameter, shape: Shape, element_bytes: int) -> Storages:
        return NO_STORAGES

    def flat_step_temporaries(self, elements: int, element_bytes: int) -> Storages:
        return NO_STORAGES

    def step_bytes(self, parameter: Parameter, element_bytes: int) -> int:
        """Bytes to read p and g, write p, and read and write the states."""
        states = self._stepping(parameter).textbook_bytes(element_bytes)
        return (3 * element_bytes + 2 * states) * parameter.elements

    def quantized_states(self, parameter: Parameter) -> int:
        quantizes = self._stepping(parameter)._quantizes(parameter.elements)
        return sum(self.moments) * parameter.elements if quantizes else 0

    def _stepping(self, parameter: Parameter) -> Bitsandbytes:
        """This optimizer with the states that it has for the parameter: in fp32 for an embedding that is not quantized."""
        if self.quantizes_embeddings or not _is_embedding(parameter):
            return self
        return replace(self, eight_bit=False)

    def _pages(self, elements: int) -> bool:
        return self.is_paged and elements >= PAGED_MIN_ELEMENTS

    def _quantizes(self, elements: int) -> bool:
        return self.eight_bit and elements >= QUANTIZED_MIN_ELEMENTS

    def _states(self, elements: int) -> Storages:
        per_moment = elements * (1 if self._quantizes(elements) else FP32_BYTES)
        return sum((Storages.of(n * per_moment) for n in self.moments), NO_STORAGES) if elements else NO_STORAGES

    def _scales(self, elements: int) -> Storages:
        if not self._quantizes(elements):
            return NO_STORAGES
        per_moment = SCALE_BYTES * -(-elements // QUANTIZED_BLOCK_ELEMENTS)
        return sum((Storages.of(n * per_moment) for n in self.moments), NO_STORAGES)


def _is_embedding(parameter: Parameter) -> bool:
    """Whether the parameter is the weight of an `nn.Embedding`, such as of tokens or positions."""
    named = "embed" in parameter.name or "wpe." in parameter.name
    return parameter.role == "embedding" or (named and parameter.role == "other" and len(parameter.shape) == 2)


def _bitsandbytes(
    name: OptimizerName,
    cls: str,
    *,
    moments: tuple[int, ...],
    eight_bit: bool = False,
    is_paged: bool = False,
    is_adam: bool = False,
    deepspeed: str | None = None,
) -> Bitsandbytes:
    """An optimizer of bitsandbytes. `cls`: its class in bitsandbytes.optim. `deepspeed`: the name of DeepSpeed's own optimizer on the
    host.
    """
    constructor = Constructor(module="bitsandbytes.optim", name=cls)
    refusal = Refusal(f"DeepSpeed cannot make this optimizer: pass bitsandbytes.optim.{cls} to initialize()")
    return Bitsandbytes(
        name=name,
        script=constructor,
        transformers=NamedOptimizer(name=name),
        deepspeed=refusal,
        deepspeed_offloaded=NamedOptimizer(name=deepspeed) if deepspeed else refusal,
        measured_zero1=Refusal(f"ZeroRedundancyOptimizer is not measured around {name}"),
        measured_on_cpu=Refusal(f"bitsandbytes' {cls} allocates more on the CPU than on a GPU"),
        simulated=True,
        host_kernel="many_passes",
        deepspeed_host_kernel="one_pass" if deepspeed else "many_passes",
        is_cpu_adam=is_adam,
        shared_state=Storages.of(QUANTIZATION_TABLE_BYTES, len(moments)) if eight_bit else NO_STORAGES,
        deepspeed_notes=(
            "the states of bitsandbytes under DeepSpeed are counted from its source code and have not been run",
        ),
        is_paged=is_paged,
        moments=moments,
        eight_bit=eight_bit,
    )


ADAMW_8BIT = _bitsandbytes(
    "adamw_bnb_8bit", "AdamW8bit", moments=(1, 1), eight_bit=True, is_adam=True, deepspeed="AdamW"
)
PAGED_ADAMW_8BIT = _bitsandbytes(
    "paged_adamw_8bit", "PagedAdamW8bit", moments=(1, 1), eight_bit=True, is_paged=True, is_adam=True, deepspeed="AdamW"
)
PAGED_ADAMW = _bitsandbytes(
    "paged_adamw_32bit", "PagedAdamW32bit", moments=(1, 1), is_paged=True, is_adam=True, deepspeed="AdamW"
)
LION = _bitsandbytes("lion_32bit", "Lion32bit", moments=(1,), deepspeed="Lion")
LION_8BIT = _bitsandbytes("lion_8bit", "Lion8bit", moments=(1,), eight_bit=True)
PAGED_LION = _bitsandbytes("paged_lion_32bit", "PagedLion32bit", moments=(1,), is_paged=True, deepspeed="Lion")
PAGED_LION_8BIT = _bitsandbytes("paged_lion_8bit", "PagedLion8bit", moments=(1,), eight_bit=True, is_paged=True)
ADEMAMIX = _bitsandbytes("ademamix", "AdEMAMix", moments=(2, 1))
ADEMAMIX_8BIT = _bitsandbytes("ademamix_8bit", "AdEMAMix8bit", moments=(2, 1), eight_bit=True)
PAGED_ADEMAMIX = _bitsandbytes("paged_ademamix_32bit", "PagedAdEMAMix", moments=(2, 1), is_paged=True)
PAGED_ADEMAMIX_8BIT = _bitsandbytes(
    "paged_ademamix_8bit", "PagedAdEMAMix8bit", moments=(2, 1), eight_bit=True, is_paged=True
)
RMSPROP = _bitsandbytes("rmsprop_bnb_32bit", "RMSprop32bit", moments=(1,))
RMSPROP_8BIT = _bitsandbytes("rmsprop_bnb_8bit", "RMSprop8bit", moments=(1,), eight_bit=True)
