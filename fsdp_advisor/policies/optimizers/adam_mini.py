"""Adam-mini: a first moment for each element. There is one second moment for each head of queries and keys, each row of the other
matrices, and each remaining tensor, such as a norm's weight. Biases have AdamW's state.

It updates one parameter after the other with torch's operators.

Source: adam-mini 1.1.1, adam_mini.py. LLaMA-Factory calls it `use_adam_mini`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal

from fsdp_advisor.model.profile import Parameter
from fsdp_advisor.policies.optimizers.interface import (
    PlainLoop,
    Refusal,
    Shape,
    Shards,
    Stepped,
    without_deepspeed,
)
from fsdp_advisor.policies.optimizers.variables import Variables
from fsdp_advisor.program.storages import NO_STORAGES, Storages

Block = Literal["element", "head", "row", "tensor"]
_HEADS = ("k_proj", "q_proj", "wq", "wk", "query", "key")
_ROWS = (
    "embed", "embd", "wte", "lm_head", "output", "final_layer", "v_proj", "wv", "value", "feed_forward", "linear", "mlp",
    "o_proj", "wo", "attn.proj",
)  # fmt: skip
"""Parts of the (lower-case) names of matrices that have one second moment per row."""


def block_of(name: str) -> Block:
    """The block of elements that share one second moment in a parameter of this name.

    >>> block_of("self_attn.q_proj.weight"), block_of("mlp.up_proj.weight"), block_of("self_attn.q_proj.bias"), block_of("norm.weight")
    ('head', 'row', 'element', 'tensor')
    """
    name = name.lower()
    if "bias" in name:
        return "element"
    if any(part in name for part in _HEADS):
        return "head"
    return "row" if any(part in name for part in _ROWS) else "tensor"


@dataclass(frozen=True, kw_only=True)
class AdamMini(PlainLoop):
    """Adam-mini. `heads`: the number of heads in a matrix of queries or keys.

    Only the number of allocator blocks matters. Up to 128 fp32 moments take one block, so a fixed number of heads serves all models.
    """

    heads: int = 32

    def shard_failure(self, parameter: Parameter, shards: Shards) -> str | None:
        if parameter.role == "adapter" and block_of(parameter.name) == "head":
            return f"Adam-mini fails: it divides {parameter.name}, a part of an adapter, into the heads of the model"
        return None

    def state_storages(self, parameter: Parameter, shape: Shape, element_bytes: int) -> Storages:
        if not prod(shape):
            return NO_STORAGES
        moment = Storages.of(element_bytes * prod(shape))
        return moment + Storages.of(element_bytes * self._second_moments(parameter, shape))

    def textbook_bytes(self, element_bytes: int) -> int:
        """Bytes of the first moment per element. The second moments of blocks are negligible."""
        return element_bytes

    def loop(self, tensors: Sequence[Stepped]) -> Variables:
        variables = Variables()
        for tensor in tensors:
            if block_of(tensor.parameter.name) == "element":
                self._step_elements(variables, tensor)
            else:
                self._step_blocks(variables, tensor)
        variables.drop_all()
        return variables

    def step_bytes(self, parameter: Parameter, element_bytes: int) -> int:
        """15 tensors read or written: the square (2) and its mean (1), the first moment (3), the update (2 + 2), its negative (2), the sum
        (3). With a second moment for each element 18, because that moment is as large as the gradient.
        """
        passes = 18 if block_of(parameter.name) == "element" else 15
        return passes * element_bytes * parameter.elements

    def _second_moments(self, parameter: Parameter, shape: Shape) -> int:
        match block_of(parameter.name):
            case "element":
                return prod(shape)
            case "head":
                return self.heads
            case "row":
                return shape[0]
            case "tensor":
                return 1

    def _step_elements(self, variables: Variables, tensor: Stepped) -> None:
        variables.assign("root", tensor.n_bytes)
        variables.assign("h", tensor.n_bytes)
        variables.drop("root")

    def _step_blocks(self, variables: Variables, tensor: Stepped) -> None:
        matrix, blocks = tensor.n_bytes, tensor.element_bytes * self._second_moments(tensor.parameter, tensor.shape)
        variables.assign("square", matrix)
        variables.assign("tmp_lr", blocks)
        variables.drop("square")
        variables.assign("root", blocks)
        variables.assign("h", blocks)
        variables.drop("root")
        variables.assign("stepsize", blocks)
        variables.assign("update", matrix)
        variables.use(matrix)


_NO_SCRIPT = "Adam-mini takes named parameters and the model's dimensions, which exported scripts do not pass"

ADAM_MINI = AdamMini(
    name="adam_mini",
    transformers=Refusal("transformers 5.23 has no name for Adam-mini: pass adam_mini.Adam_mini to the Trainer"),
    **without_deepspeed("adam_mini"),
    script=Refusal(_NO_SCRIPT),
)
