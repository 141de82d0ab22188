"""Where the time model stops being trustworthy: what an estimate says there, and how much extra_uncertainty its range is.

The errors against the published runs (`fsdp_advisor/validation/published.csv`) show where: each of them that is off by more
than 30 % has a doubt of this file, and beyond the largest of them there is one as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fsdp_advisor.hardware import Gpu
from fsdp_advisor.job.plan import Plan
from fsdp_advisor.model.profile import Profile
from fsdp_advisor.timing.achieved import achieved_by
from fsdp_advisor.units import format_count

MAX_GPUS, MAX_TOKENS, MAX_PARAMETERS = 128, 65_536, 98_029_093_888
"""The largest of the published runs in each direction: GPUs in all, tokens per sequence, parameters."""
LARGEST_NODE = 16
"""GPUs in the largest node of any published run; DGX-2."""
UNSEEN = 0.15
"""More uncertainty, as a share of the step, where no published run was at hand."""
ATTENTION_WARN_ABOVE_SHARE = 0.25
WARN_ABOVE_SHARE = 0.30
WITHOUT_TOKENS = frozenset({"image-classification"})


@dataclass(frozen=True, slots=True)
class Caveat:
    """One reason to trust a step's time less: where it holds, in a few words, and what the estimate says.

    `extra_uncertainty` is how much faster the step may be besides, as a share of it.
    """

    about: str
    text: str
    extra_uncertainty: float = 0.0


def unlike_published(profile: Profile, plan: Plan, gpu: Gpu) -> list[str]:
    """In which respects no published run is like this one."""
    achieved = achieved_by(gpu)
    found = []
    if achieved is None or not achieved.seen:
        found.append(f"on {gpu.name}'s generation")
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
    """Every reason, from what is known of the job and of where its step's `seconds` go."""
    found = []
    if unlike := unlike_published(profile, plan, gpu):
        words = f"no published training run {' or '.join(unlike)} was at hand to check it against"
        found.append(Caveat("no published run", words, UNSEEN))
    if gpu.bf16_flops is None and plan.precision.startswith("bf16"):
        words = f"{gpu.name} has no tensor cores for bf16; fp16-mixed would be faster"
        found.append(Caveat("bf16 without tensor cores", words))
    if plan.ranks_per_node > LARGEST_NODE:
        words = f"{plan.ranks_per_node} GPUs on one node are taken to share its links; say --nnodes"
        found.append(Caveat("very large nodes", words))
    if profile.task in WITHOUT_TOKENS:
        words = f"its tokens per second count an image as {plan.seq_len}"
        found.append(Caveat("models without tokens", words))
    if plan.backend == "deepspeed" and plan.nnodes > 1:
        words = "published DeepSpeed runs over several nodes took 1.3 to 2.6 times as long"
        found.append(Caveat("DeepSpeed over several nodes", words))
    for name, about, least, what in _CAUSES:
        if breakdown[name] > least * seconds:
            found.append(Caveat(about, f"{breakdown[name] / seconds:.0%} of it is {what}"))
    return tuple(found)


_CAUSES = (
    (
        "attention", "attention kernels", ATTENTION_WARN_ABOVE_SHARE,
        "attention at FlashAttention-2's rate; kernels before it took 1.5 to 2 times as long",
    ),
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
"""Parts of a step that differ from place to place: their name, the share from which they are worth a word, the words."""
