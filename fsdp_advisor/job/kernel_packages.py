"""The packages whose kernels transformers calls, if they are installed, in layers of linear attention and state spaces."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence

KERNEL_PACKAGES = ("fla", "causal-conv1d", "mamba-ssm", "kernels")
"""The values of `--kernel-packages`. Source: transformers 5.23, integrations/hub_kernels.py, `use_kernel_func_from_hub_with_fallback`, and
models/rwkv/modeling_rwkv.py.
"""
_NAMES = {"flash-linear-attention": "fla"}
"""Other name of a package -> its value."""
_TO_INSTALL = {"fla": "flash-linear-attention", "kernels": "kernels ninja"}
"""Package -> what pip installs, where that is called differently."""


def read_kernel_packages(text: str) -> str | None:
    """The canonical text of `kernel_packages`; None if it names other packages.

    >>> read_kernel_packages("causal_conv1d, fla"), read_kernel_packages("None"), read_kernel_packages("xformers")
    ('fla,causal-conv1d', 'none', None)
    """
    words = [word.strip().replace("_", "-") for word in text.lower().split(",")]
    if words in (["all"], ["none"]):
        return words[0]
    named = {_NAMES.get(word, word) for word in words}
    if not named <= {*KERNEL_PACKAGES}:
        return None
    return "all" if len(named) == len(KERNEL_PACKAGES) else ",".join(each for each in KERNEL_PACKAGES if each in named)


def usable(packages: Sequence[str], installed: Container[str]) -> str:
    """The value of `kernel_packages` for a run of a model that calls `packages`.

    >>> usable(["fla", "causal-conv1d"], {"fla"}), usable(["kernels"], ()), usable(["fla"], {"fla"})
    ('fla', 'none', 'all')
    """
    found = [package for package in packages if package in installed]
    return "all" if len(found) == len(packages) else ",".join(found) or "none"


def pip_install(packages: Iterable[str]) -> str:
    """The command that installs the packages.

    >>> pip_install(["fla", "causal-conv1d"])
    'pip install flash-linear-attention causal-conv1d'
    """
    return " ".join(["pip install", *(_TO_INSTALL.get(each, each) for each in packages)])
