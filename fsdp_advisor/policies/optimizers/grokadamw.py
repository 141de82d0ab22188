"""GrokAdamW. It keeps its state on the host, and copies the state of one tensor after the other to the GPU and back.

Source: grokadamw 0.1.2, grokadamw.py (`_update_group`), which updates with torch's operators; transformers 5.23, trainer_optimizer.py,
`_get_grokadamw`. Its checkpoint has the parameters too, because they are the keys of the state.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from fsdp_advisor.model.profile import Parameter
from fsdp_advisor.policies.optimizers.interface import (
    Constructor,
    NamedOptimizer,
    PlainLoop,
    Refusal,
    Shape,
    Stepped,
    without_deepspeed,
)
from fsdp_advisor.policies.optimizers.variables import Variables
from fsdp_advisor.program.storages import NO_STORAGES, Storages

MOMENTS = 3
"""The two moments of AdamW and the moving average of the gradient, in the parameter's dtype."""
NORMS = 4
"""Scalars of one tensor's clipping that are alive together: its norm, the stacked norms, the norm of the stack, and the factor."""


class GrokAdamW(PlainLoop):
    """Three tensors of state on the host. They are on the GPU while it updates their tensor."""

    def host_state(self, elements: int, element_bytes: int) -> int:
        return MOMENTS * elements * element_bytes

    def state_storages(self, parameter: Parameter, shape: Shape, element_bytes: int) -> Storages:
        return NO_STORAGES

    def all_state_storages(self, parameter: Parameter, shape: Shape, element_bytes: int) -> Storages:
        """The state, and the parameter, which a checkpoint contains as the state's key."""
        return Storages.of(prod(shape) * element_bytes, MOMENTS + 1) if prod(shape) else NO_STORAGES

    def textbook_bytes(self, element_bytes: int) -> int:
        """0, because the state is on the host."""
        return 0

    def loop(self, tensors: Sequence[Stepped]) -> Variables:
        variables = Variables()
        for tensor in tensors:
            n_bytes = tensor.n_bytes
            variables.assign("moments", n_bytes, n_bytes)
            variables.assign("grok_ema", n_bytes)
            variables.use(*(tensor.element_bytes,) * NORMS)
            variables.assign("scaled", n_bytes)
            variables.assign("grok_grad", n_bytes)
            variables.drop("scaled")
            variables.use(n_bytes)
        variables.drop_all()
        return variables

    def step_bytes(self, parameter: Parameter, element_bytes: int) -> int:
        """39 tensors read or written: the copies (6); the norm (1) and the clipping (2); the average (2 + 3), its multiple (2), the sum
        (3); the moments (2 + 3 and 2 + 3); the root (2) and epsilon (2); the decay (2) and the update (4).
        """
        return 39 * element_bytes * parameter.elements


_CONSTRUCTOR = Constructor(module="grokadamw", name="GrokAdamW")

GROKADAMW = GrokAdamW(
    name="grokadamw",
    script=_CONSTRUCTOR,
    transformers=NamedOptimizer(name="grokadamw"),
    **without_deepspeed("grokadamw"),
    measured_zero1=Refusal("ZeroRedundancyOptimizer does not know GrokAdamW's state, which is in its groups"),
    measured_on_cpu=Refusal("GrokAdamW's state is on the host, so a run on the CPU has no copies of it"),
    follows_groups=True,
    notes=(
        "GrokAdamW's state is in pageable host memory, whose copies can be slower than the link's rate for pinned memory",
    ),
)
