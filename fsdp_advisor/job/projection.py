"""The projection of GaLore and APOLLO: rank, gap and modules, as the Trainer's `optim_args` and `optim_target_modules` give them.

Source: transformers 5.23, trainer_optimizer.py, `_get_galore_optimizer`, `_get_apollo_optimizer`, `_setup_low_rank_optimizer`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from fsdp_advisor.errors import UsageError

ALL_LINEAR = "all-linear"
_NUMBERS = {"rank": 65_536, "update_proj_gap": 10**6}
"""Settings that change figures, and the largest value of each."""
_WITHOUT_EFFECT = ("scale",)
_ONLY = {"proj_type": "std", "proj": "random", "scale_type": "channel"}
"""Settings that are modelled only with the Trainer's default."""
_NAME = re.compile(r"[\w.-]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Projection:
    """The rank of a projection, the number of steps after which it is computed again, and the modules that it applies to.

    `targets`: a module is projected if its name contains one of these; empty: all linear layers.
    """

    rank: int = 128
    update_proj_gap: int = 200
    targets: tuple[str, ...] = ()

    def takes(self, module: str) -> bool:
        """Whether the linear layer of this name is projected."""
        return not self.targets or any(target in module for target in self.targets)


DEFAULT = Projection()
PROJECTING = frozenset(
    {
        "galore_adamw",
        "galore_adamw_8bit",
        "galore_adafactor",
        "galore_adamw_layerwise",
        "galore_adamw_8bit_layerwise",
        "apollo_adamw",
        "apollo_adamw_layerwise",
    }
)
"""The optimizers that project."""


def check_projection(optim: str, optim_args: str | None, target_modules: str | None) -> None:
    """Raise UsageError for settings of a projection that the optimizer does not have."""
    given = next((n for n, v in {"optim_args": optim_args, "optim_target_modules": target_modules}.items() if v), None)
    if given is not None and optim not in PROJECTING:
        raise UsageError(
            f"{given} describes GaLore's and APOLLO's projection, which {optim} does not have",
            hint=f"leave {given} out",
        )


def settings_of(text: str) -> dict[str, str] | None:
    """The settings of `optim_args`, a list such as `rank=64, update_proj_gap=100`. None if the text is not such a list.

    >>> settings_of("rank=64, update_proj_gap=100"), settings_of("rank")
    ({'rank': '64', 'update_proj_gap': '100'}, None)
    """
    pairs = [part.partition("=") for part in text.replace(" ", "").split(",") if part]
    if any(not name or not value for name, _, value in pairs):
        return None
    return {name: value for name, _, value in pairs}


def unknown_setting(settings: Mapping[str, object]) -> tuple[str, object] | None:
    """The first setting with a value that is not modelled, and that value; None if all are.

    >>> unknown_setting({"rank": "64", "proj_type": "left"}), unknown_setting({"rank": 8, "scale": 0.25})
    (('proj_type', 'left'), None)
    """
    for name, value in settings.items():
        if name in _NUMBERS:
            known = str(value).isdecimal() and 0 < int(str(value)[:9]) <= _NUMBERS[name]
        else:
            known = name in _WITHOUT_EFFECT or _ONLY.get(name) == str(value)
        if not known:
            return name, value
    return None


def read_optim_args(text: str) -> str | None:
    """The canonical spelling of `optim_args`: sorted, without blanks. None if a setting is not modelled.

    >>> read_optim_args("update_proj_gap=100, rank=64"), read_optim_args("rank=0")
    ('rank=64,update_proj_gap=100', None)
    """
    settings = settings_of(text)
    if settings is None or unknown_setting(settings) is not None:
        return None
    return ",".join(f"{name}={value}" for name, value in sorted(settings.items()))


def read_target_modules(text: str) -> str | None:
    """The canonical spelling of `optim_target_modules`: `all-linear`, or parts of names. None for other values, such as patterns.

    >>> read_target_modules("all_linear"), read_target_modules("mlp, attn"), read_target_modules(".*mlp.*")
    ('all-linear', 'attn,mlp', None)
    """
    if text.replace("_", "-") == ALL_LINEAR:
        return ALL_LINEAR
    names = sorted({name.strip() for name in text.split(",")})
    return ",".join(names) if all(_NAME.fullmatch(name) for name in names) else None


def projection_of(optim_args: str | None, target_modules: str | None) -> Projection:
    """The projection that options in their canonical spelling describe.

    >>> projection_of("rank=64", None)
    Projection(rank=64, update_proj_gap=200, targets=())
    """
    settings = settings_of(optim_args or "") or {}
    numbers = {name: int(settings[name]) for name in _NUMBERS if name in settings}
    named = () if target_modules in (None, ALL_LINEAR) else tuple(str(target_modules).split(","))
    return Projection(**numbers, targets=named)
