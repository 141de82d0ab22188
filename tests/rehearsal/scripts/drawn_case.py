"""Takes the steps of one drawn job on a simulated GPU: python drawn_case.py JOB.json. Prints the allocator's figures by phase.

The job is a plan, a model's configuration and its task, because this environment need not be able to predict.
"""

import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

from fsdp_advisor.job.plan import Plan
from fsdp_advisor.job.projection import projection_of
from fsdp_advisor.parallelism.mesh import Mesh
from fsdp_advisor.policies.optimizers import optimizer_of
from fsdp_advisor.policies.optimizers.interface import Constructor
from fsdp_advisor.recording.adapted import source_of
from fsdp_advisor.validation import deepspeed_engine, real
from fsdp_advisor.validation.engines import optimizer_class
from fsdp_advisor.validation.gpu_memory import measure_baseline
from fsdp_advisor.validation.stand_in import stand_in

LOW_RANK = {
    "galore_adamw": ("galore_torch", "GaLoreAdamW"), "galore_adamw_8bit": ("galore_torch", "GaLoreAdamW8bit"),
    "galore_adafactor": ("galore_torch", "GaLoreAdafactor"), "apollo_adamw": ("apollo_torch", "APOLLOAdamW"),
}  # fmt: skip


class Both:
    """Muon for the matrices of the layers and AdamW for the rest, as one optimizer."""

    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        self.optimizers = optimizers

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()


def ends(model: nn.Module) -> set[int]:
    """The weights of embeddings and head."""
    return {
        id(weight)
        for module in model.modules()
        if hasattr(module, "get_input_embeddings")
        for part in (module.get_input_embeddings(), module.get_output_embeddings())
        if part is not None
        for weight in part.parameters()
    }


def optimizer_for(model: nn.Module, plan: Plan) -> Any:
    """The optimizers that `validate` does not make, as their packages' documentation and transformers make them."""
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    if plan.optim == "muon":
        apart = ends(model)
        matrices = [p for _, p in named if p.ndim == 2 and id(p) not in apart]
        chosen = {id(p) for p in matrices}
        rest = [p for _, p in named if id(p) not in chosen]
        made = [torch.optim.Muon(matrices, lr=1e-3)] if matrices else []
        return Both(*made, *([torch.optim.AdamW(rest, lr=1e-3, fused=True)] if rest else []))
    if plan.optim == "adam_mini":
        from adam_mini import Adam_mini

        return Adam_mini(named, lr=1e-3, dim=HIDDEN, n_heads=HEADS, verbose=False)
    if plan.optim in LOW_RANK:
        module, name = LOW_RANK[plan.optim]
        projection = projection_of(plan.optim_args, plan.optim_target_modules)
        linear = [
            p for n, m in model.named_modules() if isinstance(m, nn.Linear) and projection.takes(n)
            for p in (m.weight,) if p.requires_grad
        ]  # fmt: skip
        chosen = {id(p) for p in linear}
        settings: dict[str, Any] = {
            "rank": projection.rank,
            "update_proj_gap": projection.update_proj_gap,
            "scale": 0.25,
        }
        settings |= {"proj_type": "std"}
        if name.startswith("APOLLO"):
            settings |= {"proj": "random", "scale_type": "channel", "scale": 1.0}
        groups = [{"params": [p for _, p in named if id(p) not in chosen]}, {"params": linear, **settings}]
        options = {"scale_parameter": False, "relative_step": False} if name == "GaLoreAdafactor" else {}
        return getattr(__import__(module), name)(groups, lr=1e-3, **options)
    constructor = optimizer_of(plan).script
    # the model is on the host until DeepSpeed moves it
    if plan.backend == "deepspeed" and isinstance(constructor, Constructor):
        return optimizer_class(constructor)([p for _, p in named], lr=1e-3, **constructor.options)
    return USUAL(model, plan)


USUAL = real.optimizer_for
job = json.loads(Path(sys.argv[1]).read_text())
HIDDEN = next(job["config"][k] for k in ("hidden_size", "n_embd", "d_model") if k in job["config"])
HEADS = next(job["config"][k] for k in ("num_attention_heads", "n_head", "num_heads") if k in job["config"])
plan = Plan(**{**job["plan"], "mesh": Mesh(**job["plan"]["mesh"])})
source = source_of(job["config"], name=job["name"], task=job["task"])
with (
    mock.patch.object(real, "optimizer_for", optimizer_for),
    mock.patch.object(deepspeed_engine, "optimizer_for", optimizer_for),
):
    if plan.backend == "deepspeed":
        figures = real.run_steady_step(
            real.RealRun(source=source, plan=plan, mode="measure", device="cuda", baseline=measure_baseline(0))
        )
    else:
        figures = stand_in(source, plan, baseline=measure_baseline(0))
print("FOUND " + json.dumps(figures["phases"]), flush=True)
