"""Libraries of CUDA kernels that a rehearsal does not simulate. A script that uses one gets an error that says what to disable."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType

USE_INSTEAD = {
    "xformers": 'use scaled_dot_product_attention (attn_implementation="sdpa", or disable memory_efficient_attention)',
    "transformer_engine": 'use torch.nn\'s modules (mixed_precision="bf16" instead of fp8)',
    "apex": "use torch.optim.AdamW(fused=True), torch.nn's norms and torch.autocast",
}
"""Package -> what to use instead."""
_KERNELS = {"xformers": ("ops", "_C"), "transformer_engine": ("pytorch", "jax")}
"""Package -> its modules that need kernels. All modules of packages that are not listed do."""


def message_of(package: str) -> str:
    return f"a rehearsal does not simulate the kernels of {package}: {USE_INSTEAD[package]}"


def hint_of(error: BaseException) -> str | None:
    """The hint about what to disable, if the error says that one of these packages is not installed; else None."""
    if not isinstance(error, ModuleNotFoundError) or error.name is None:
        return None
    package = error.name.partition(".")[0]
    return message_of(package) if package in USE_INSTEAD else None


class _Finder(importlib.abc.MetaPathFinder):
    """Refuses the modules of these packages, but not the packages themselves: libraries import them to read their versions."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        package, _, rest = name.partition(".")
        if package in USE_INSTEAD and rest and rest in _KERNELS.get(package, (rest,)):
            raise ImportError(message_of(package), name=name)
        return None


def refuse_other_kernels() -> None:
    """Make imports of these libraries' kernels fail if the libraries are installed."""
    sys.meta_path.insert(0, _Finder())
