"""Which parameters of a model a pattern of `--freeze` matches, by their names."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Iterator

from fsdp_advisor.errors import UsageError
from fsdp_advisor.model.profile import Profile


def check_patterns(patterns: Iterable[str], parameters: Iterable[str], model: str) -> None:
    """Raises UsageError if a pattern matches no parameter. Its hint lists the model's parts."""
    names = list(parameters)
    for pattern in patterns:
        if not any(matches(name, pattern) for name in names):
            parts = ", ".join(sorted({part_of(name) for name in names}))
            raise UsageError(f"{model} has no parameter that matches {pattern!r}", hint=f"its modules are: {parts}")


def parameter_names(profile: Profile) -> Iterator[str]:
    """The name of every real parameter, as in `named_parameters`: the root's first, then the layers'."""
    yield from (parameter.name for parameter in profile.root.parameters)
    for stack in profile.stacks:
        for number, unit in enumerate(stack.layers()):
            yield from (f"{stack.path}.{number}.{parameter.name}" for parameter in unit.parameters)


def part_of(parameter: str) -> str:
    """The part of a model that a parameter belongs to: its module's name, up to the second level.

    >>> part_of("model.visual.blocks.0.norm1.weight"), part_of("lm_head.weight")
    ('model.visual', 'lm_head')
    """
    return ".".join(parameter.split(".")[:-1][:2]) or parameter


def matches(name: str, pattern: str) -> bool:
    """Whether a pattern matches the name of a parameter or of a module that contains it. The match begins at the name's start or after a
    dot, and ends at a dot or the name's end.

    >>> matches("model.embed_tokens.weight", "embed_tokens"), matches("model.layers.10.mlp.weight", "model.layers.1")
    (True, False)
    """
    return any(fnmatch.fnmatchcase(f".{name}.", f"{start}.{pattern}.{end}") for start in ("", "*") for end in ("", "*"))


def matching(parameters: Iterable[str], patterns: Iterable[str]) -> set[str]:
    """The names among `parameters` that a pattern matches."""
    patterns = tuple(patterns)
    return {name for name in parameters if any(matches(name, pattern) for pattern in patterns)}
