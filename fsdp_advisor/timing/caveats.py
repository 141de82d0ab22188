"""Caveats: reasons why the step time of a job is less reliable. Each has the text of a warning; some widen the time's range.

They follow from the errors on the published runs (`fsdp_advisor/validation/published.csv`): every run with an error above 30 %
has a caveat, and so has every job larger than the largest published run.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from fsdp_advisor.hardware import Gpu
from fsdp_advisor.job.choices import Attention
from fsdp_advisor.job.plan import Plan
from fsdp_advisor.model.profile import Profile
from fsdp_advisor.timing.achieved import achieved_by, prefers_cudnn
from fsdp_advisor.units import format_count

MAX_GPUS, MAX_TOKENS, MAX_PARAMETERS = 128, 262_144, 98_029_093_888
"""The largest values among the published runs: number of GPUs, tokens per sequence (`tests/published`), parameters."""
LARGEST_NODE = 16
"""GPUs in the largest node of any published run (a DGX-2)."""
UNSEEN = 0.15
"""Additional uncertainty, as a share of the step, for jobs that differ from every published run."""
ATTENTION_WARN_ABOVE_SHARE = 0.25
WARN_ABOVE_SHARE = 0.30


class Caveat(NamedTuple):
    """One reason to trust a step's time less: `about` names it in a few words, `text` is the warning.

    `extra_uncertainty` widens the range: the share by which the step may be faster is larger by this.
    """

    about: str
    text: str
    extra_uncertainty: float = 0.0


def unlike_published(profile: Profile, plan: Plan, gpu: Gpu) -> list[str]:
    """The properties of the job that no published run has."""
    achieved = achieved_by(gpu)
    found = []
    if achieved is None or not achieved.seen:
        found.append(f"on boards like {gpu.name}")
    if plan.strategy == "hsdp":
        found.append("under HSDP")
    if plan.world_size > MAX_GPUS:
        found.append(f"on more than {MAX_GPUS} GPUs")
    if plan.seq_len > MAX_TOKENS:
        found.append(f"of more than {MAX_TOKENS:,} tokens a sequence")
    if profile.parameters > MAX_PARAMETERS:
        found.append(f"of more than {format_count(MAX_PARAMETERS)} parameters")
    return found


def caveats_of(profile: Profile, plan: Plan, gpu: Gpu, breakdown: Mapping[str, float], seconds: float) -> tuple[Caveat, ...]:  # fmt: skip
    """The caveats of a job. They depend on its plan, on the GPU, and on the causes' seconds (`breakdown`) in the step's `seconds`."""
    found = []
    if unlike := unlike_published(profile, plan, gpu):
        words = f"it was not compared with a measurement: no published training run {' or '.join(unlike)} is known"
        found.append(Caveat("no published run", words, UNSEEN))
    if gpu.bf16_flops is None and plan.precision.startswith("bf16"):
        words = f"{gpu.name} has no tensor cores for bf16; fp16-mixed would be faster"
        found.append(Caveat("bf16 without tensor cores", words))
    if plan.ranks_per_node > LARGEST_NODE:
        words = f"{plan.ranks_per_node} GPUs are assumed to be in one node and to share its links; --nnodes gives the number of nodes"
        found.append(Caveat("very large nodes", words))
    causes = (("attention", "attention kernels", ATTENTION_WARN_ABOVE_SHARE, _attention(plan, gpu)), *_CAUSES)
    for name, about, least, what in causes:
        if breakdown[name] > least * seconds:
            found.append(Caveat(about, f"{breakdown[name] / seconds:.0%} of it is {what}"))
    return tuple(found)


def _attention(plan: Plan, gpu: Gpu) -> str:
    """The rate that is assumed for attention with this implementation on this GPU, in words."""
    if plan.attention == "eager":
        return "attention in single operators (eager); fused kernels (sdpa) are faster"
    if plan.attention == "flash_attention_2":
        return "attention at FlashAttention-2's rate; older kernels take 1.5 to 2 times as long"
    if gpu.architecture is not None and gpu.architecture.startswith("cdna"):
        return "attention at an assumed rate: no measurement of ROCm's kernels is used"
    if plan.precision == "fp32" or gpu.architecture in ("volta", "turing"):
        return "attention at an assumed rate of PyTorch's memory-efficient kernel, which sdpa runs here"
    if prefers_cudnn(gpu):
        slower = _forward_share(gpu, "sdpa") / _forward_share(gpu, "flash_attention_2")
        return (
            "attention at the rate of cuDNN's kernels, which sdpa runs here with cuDNN 9.15.1 or later; with an older one it runs "
            f"FlashAttention-2, which takes up to {slower:.1f} times as long"
        )
    return "attention at FlashAttention-2's rate, which sdpa runs here; older kernels take 1.5 to 2 times as long"


def _forward_share(gpu: Gpu, attention: Attention) -> float:
    achieved = achieved_by(gpu, attention)
    assert achieved is not None
    return achieved.attention_forward


_CAUSES = (
    ("launch", "the CPU's speed", WARN_ABOVE_SHARE, "waiting for the CPU, whose speed is not known"),
    (
        "host", "host memory and PCIe", WARN_ABOVE_SHARE,
        "the host's memory and PCIe, which differ from server to server",
    ),
    (
        "communication", "exposed communication", WARN_ABOVE_SHARE,
        "communication at the links' usual rates; a busy network is slower",
    ),
)  # fmt: skip
"""Parts of a step, besides attention, whose time differs from server to server: name, subject, the share above which there is a
warning, its text.
"""
