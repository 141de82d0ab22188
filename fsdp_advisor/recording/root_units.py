"""Mark on a tape where accelerate's FSDP2 units of the root begin and end: EMBEDDING and HEAD (`MarkedUnit`).

accelerate wraps an input embedding that is not tied to the head as one unit, and final norm and head (with the embedding if it is
tied) as another (accelerate/utils/fsdp_utils.py, fsdp2_prepare_model). A unit of several modules begins when the first module runs
and ends when all have run, or when the model's forward ends without one of them: TRL's loss computes the logits without calling the head.
Its backward begins when the gradients of the last module's outputs are ready and ends when the gradients of the first module's inputs
are ready (torch.distributed.fsdp._fully_shard._fsdp_state, _register_group_forward_hooks, _post_forward; torch 2.13). The end of the
head's forward has no mark, because the head's parameters stay gathered.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_iter

from fsdp_advisor.model.tape import MarkedUnit, Op
from fsdp_advisor.recording.source import RootModules

Mark = Callable[[Op, MarkedUnit], None]


def mark_root_units(
    modules: RootModules, mark: Mark, *, loss_takes_head: bool = False, in_compiled_code: bool = False
) -> None:
    """Hook the modules of each unit, so that they call `mark`. `mark` ignores repeated marks in the same step.

    `loss_takes_head`: the loss runs the head's forward and backward after the model's forward, and the unit's forward ends with the
    model's.
    """
    hook = partial(_hook, mark=mark, in_compiled_code=in_compiled_code)
    head = [m for m in (modules.final_norm, None if loss_takes_head else modules.head) if m is not None]
    if modules.embedding is not None and is_tied(modules):
        hook(MarkedUnit.HEAD, [modules.embedding, *head])
        return
    if modules.embedding is not None:
        hook(MarkedUnit.EMBEDDING, [modules.embedding])
    if head:
        hook(MarkedUnit.HEAD, head)


def is_tied(modules: RootModules) -> bool:
    """Whether input embedding and head share one weight."""
    weight = getattr(modules.embedding, "weight", None)
    return weight is not None and weight is getattr(modules.head, "weight", None)


def _hook(unit: MarkedUnit, modules: list[nn.Module], *, mark: Mark, in_compiled_code: bool) -> None:
    to_run: set[nn.Module] = set()

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if to_run and module is not modules[0]:
            return
        to_run.update(modules)  # if the forward before left some out, they no longer count
        mark(Op.PRE_FORWARD, unit)
        for leaf in _watched((args, kwargs)):
            _register_first(leaf, lambda _: mark(Op.POST_BACKWARD, unit))

    def after(module: nn.Module, args: Any, output: Any) -> None:
        to_run.discard(module)
        if to_run:
            return
        if unit != MarkedUnit.HEAD:
            mark(Op.POST_FORWARD, unit)
        for leaf in _watched(output):
            leaf.register_hook(lambda _: mark(Op.PRE_BACKWARD, unit))

    hooks: tuple[Any, Any] = (before, after)
    if in_compiled_code:  # a hook breaks the graph, as FSDP2's hooks do
        from torch.distributed.fsdp._fully_shard._fsdp_common import _dynamo_disable

        hooks = (_dynamo_disable(before), _dynamo_disable(after))
    for module in modules:
        module.register_forward_pre_hook(hooks[0], prepend=True, with_kwargs=True)
        module.register_forward_hook(hooks[1])


def _register_first(tensor: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> None:
    """Register a hook on a tensor's gradient that runs before existing hooks.

    FSDP2 puts an autograd node on each input; that node runs before the hooks of others on the tensor.
    """
    hooks = tensor._backward_hooks
    before = dict(hooks or {})
    if hooks:
        hooks.clear()
    tensor.register_hook(hook)
    if hooks is not None:
        hooks.update(before)


def _watched(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_iter(tree) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
