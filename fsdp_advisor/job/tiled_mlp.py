"""Feed-forward networks that run in shards of the sequence (`--tiled-mlp`): the implementation, and the jobs that are modelled with it."""

from __future__ import annotations

from typing import Literal

from fsdp_advisor.errors import UsageError
from fsdp_advisor.job.choices import Backend, Framework
from fsdp_advisor.job.conflicts import check_conflicts
from fsdp_advisor.job.frameworks import FRAMEWORK_NAMES
from fsdp_advisor.job.plan import Plan
from fsdp_advisor.job.request import EstimateRequest

TiledMlpCode = Literal["liger", "deepspeed", "axolotl"]
"""``liger``: Liger's `apply_tiled_mlp`; ``deepspeed``: DeepSpeed's `TiledMLP`, whose engine waits for the last shard before it reduces
a gradient; ``axolotl``: axolotl's own, which sums the gradients of the shards in buffers.
"""

_WITHOUT: tuple[Framework, ...] = ("trainer", "trl", "llamafactory", "torchtitan")
"""Frameworks that have no tiled MLP. Of the Trainer's consumers, only axolotl has one."""

AXOLOTL_WITH_FSDP2 = (
    "axolotl 0.19's tiled MLP fails with FSDP2: it frees a layer's weights before the backward of the layer's attention"
)


def tiled_mlp_code(plan: Plan) -> TiledMlpCode:
    """The implementation that a plan with a tiled MLP runs.

    Source: axolotl 0.19.0, monkeypatch/tiled_mlp/patch.py, `_build_tiled_forward`.
    """
    if plan.backend == "deepspeed":
        return "deepspeed"
    return "axolotl" if plan.framework == "axolotl" else "liger"


def check_tiled_mlp(request: EstimateRequest) -> None:
    """Raises UsageError for a job that is not modelled with a tiled MLP under any strategy."""
    if request.tiled_mlp == "none":
        return
    if request.framework in _WITHOUT:
        raise UsageError(
            f"{FRAMEWORK_NAMES[request.framework]} has no tiled MLP",
            hint="--framework torch has Liger's and DeepSpeed's, --framework axolotl its own",
        )
    others = {
        f"--compile {request.compile}": request.compile != "none",
        f"--fp8 {request.fp8}": request.fp8 != "none",
        f"--wrap {request.wrap}": request.wrap != "layer",
        "--activation-offload": request.activation_offload,
    }  # fmt: skip
    check_conflicts("a tiled MLP", others)


def tiling_backends(framework: Framework, gpus: int) -> tuple[Backend, ...]:
    """The backends with which a tiled MLP can be trained; `tiled_mlp_refusal` says why the others cannot."""
    if gpus == 1:
        return ("ddp", "fsdp2", "deepspeed")
    return ("deepspeed",) if framework == "axolotl" else ("fsdp2", "deepspeed")


def tiled_mlp_refusal(plan: Plan) -> UsageError | None:
    """Why the plan's engine cannot train a tiled MLP, or is not modelled with one; None if it is modelled.

    Backward runs a nested backward for each shard, and each of them adds to the gradients of the same weights.
    """
    if plan.tiled_mlp == "none":
        return None
    if plan.backend == "ddp" and plan.world_size > 1:
        return UsageError(
            "DDP fails with a tiled MLP: each shard marks the same gradients as ready to be reduced",
            hint="use --backend deepspeed or fsdp2",
        )
    if plan.backend == "fsdp1":
        return UsageError(
            "FSDP1 fails with a tiled MLP: it reduces the gradients of a layer after the first shard",
            hint="use --backend deepspeed or fsdp2",
        )
    code = tiled_mlp_code(plan)
    if code == "axolotl" and plan.backend == "fsdp2" and plan.world_size > 1:
        return UsageError(
            AXOLOTL_WITH_FSDP2,
            hint="use --backend deepspeed, or Liger's in a script of your own: --framework torch",
        )
    if code == "axolotl" and plan.gradient_accumulation_steps > 1:
        return UsageError(
            "axolotl's tiled MLP is not modelled with gradient accumulation", hint="--gradient-accumulation-steps 1"
        )
    return None
