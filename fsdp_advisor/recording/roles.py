"""The role of each parameter in a model, derived from the modules that contain it."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from fsdp_advisor.model.profile import ParameterRole
from fsdp_advisor.recording.quantized import is_packed
from fsdp_advisor.recording.source import RootModules


def is_norm(module: nn.Module) -> bool:
    """Whether the module is a norm, judged by its class name as in accelerate's `_find_final_norm`."""
    return "Norm" in type(module).__name__


def parameter_roles(model: nn.Module, root: RootModules, is_added: Callable[[str], bool]) -> dict[int, ParameterRole]:
    """The role of every parameter, by the parameter's `id`. A shared parameter has the role that is assigned first below."""
    roles: dict[int, ParameterRole] = {}
    for name, parameter in model.named_parameters():
        if is_packed(parameter):
            roles[id(parameter)] = "quantized"
        elif is_added(name):
            roles[id(parameter)] = "adapter"
    named: list[tuple[ParameterRole, nn.Module | None]] = [
        ("embedding", root.embedding),
        ("head", root.head),
        ("final_norm", root.final_norm),
    ]
    for role, module in named:
        for parameter in module.parameters() if module is not None else ():
            roles.setdefault(id(parameter), role)
    for module in model.modules():
        if is_norm(module):
            for parameter in module.parameters(recurse=False):
                roles.setdefault(id(parameter), "norm")
    for name, parameter in model.named_parameters():
        roles.setdefault(id(parameter), "expert" if "experts" in name.split(".") else "other")
    return roles
