"""Models whose layers call kernels of packages that PyTorch and transformers do not install."""

from __future__ import annotations

from fsdp_advisor.model.liger import LIGER_VERSION
from fsdp_advisor.model.profile import Profile

TORCHAO_VERSION = "0.18"
"""The version whose float8 training is recorded."""

GATED_DELTA_RULE = frozenset({"olmo_hybrid", "qwen3_5", "qwen3_5_moe", "qwen3_next"})
"""Types of models that call flash-linear-attention and causal-conv1d, and no other such package. They are the folders of transformers'
models too.
"""


NO_SCAN_KERNELS = (
    "the figures of state-space layers are those of transformers' code in PyTorch: the kernels of mamba-ssm, flash-linear-attention and"
    " causal-conv1d, which transformers calls if they are installed, need less memory and time and are not modelled"
)


def _has_state_space(profile: Profile) -> bool:
    """Whether a layer has a decay per head or channel, which every state-space layer names so."""
    return any(p.name.endswith("A_log") for unit, _ in profile.counted_units() for p in unit.parameters)


def kernel_notes(profile: Profile | None) -> list[str]:
    """A note on the packages that the figures for a GPU assume."""
    model_type = str(profile.config.get("model_type")) if profile else ""
    if model_type.removesuffix("_text") not in GATED_DELTA_RULE:
        return [NO_SCAN_KERNELS] if profile and _has_state_space(profile) else []
    return [
        "flash-linear-attention and causal-conv1d are assumed to be installed; without them transformers runs its own code in PyTorch,"
        " which needs more memory and time"
    ]


def compile_notes(compile: str) -> list[str]:
    """Notes on figures of compiled layers."""
    if compile == "none":
        return []
    return [
        "compiled layers: simulated_peak_bytes is of the code as it is, on a CPU; all other figures are of what Inductor makes of it",
        "Inductor chooses the number of partial sums for a GPU with the 132 multiprocessors of an H100; the first step, which compiles, is"
        " not included",
    ]


def fp8_notes(fp8: str, compile: str) -> list[str]:
    """Notes on figures with linear layers in fp8."""
    if fp8 == "none":
        return []
    converted = (
        f"fp8 {fp8}: torchao {TORCHAO_VERSION} converts the linear layers in which both dimensions are multiples of 16, but the head; FSDP2"
        " gathers their weights in the compute dtype (enable_fsdp_float8_all_gather is not modelled)"
    )
    if compile != "none":
        return [converted]
    return [
        converted,
        "the casts to fp8 are several operators each, which need memory and time; torchao means them to be compiled",
    ]


def liger_notes(*, has_kernels: bool) -> list[str]:
    """A note on the figures that have Liger's kernels."""
    if not has_kernels:
        return []
    return [
        f"Liger {LIGER_VERSION}'s kernels run on GPUs alone: simulated_peak_bytes has transformers' own code for all but the"
        " loss; the other figures have the kernels"
    ]
