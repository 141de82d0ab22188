"""What each parameter does in a model, read from the modules that hold it."""

from __future__ import annotations

from torch import nn

from fsdp_advisor.model.profile import ParameterRole
from fsdp_advisor.recording.source import RootModules


def is_norm(module: nn.Module) -> bool:
    """Whether the module is a norm, by the rule of accelerate's `_find_final_norm`: its class says so."""
    return "Norm" in type(module).__name__


def parameter_roles(model: nn.Module, root: RootModules) -> dict[int, ParameterRole]:
    """The role of every parameter, by the parameter's `id`. One that several modules share has the role named first below."""
    roles: dict[int, ParameterRole] = {}
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
