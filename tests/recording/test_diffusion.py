"""Diffusion transformers through `record_module`: a small DiT, and the example with diffusers' MMDiT where diffusers is installed."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from matrix import taken, with_all_cases

torch = pytest.importorskip("torch")

from torch import nn
from torch.nn import functional as F

from fsdp_advisor.job.plan import Plan
from fsdp_advisor.parallelism.mesh import Mesh
from fsdp_advisor.recording import Recorder, record_module
from fsdp_advisor.step_figures import peak_of_step
from fsdp_advisor.tape_keys import tape_key_of
from fsdp_advisor.validation.simulate import simulate

pytestmark = pytest.mark.slow

FSDP2 = Plan(
    strategy="zero3", backend="fsdp2", mesh=Mesh(dp_shard=4), precision="bf16-mixed", micro_batch_size=2, seq_len=64
)
DDP = replace(FSDP2, strategy="ddp", backend="ddp", mesh=Mesh(dp_replicate=4))
WIDTH, PATCHES = 64, 64


class Block(nn.Module):
    """A block with adaLN-Zero. Source: Peebles and Xie, Scalable Diffusion Models with Transformers (arXiv 2212.09748)."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = (nn.LayerNorm(WIDTH, elementwise_affine=False) for _ in range(2))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        self.modulation = nn.Linear(WIDTH, 6 * WIDTH)

    def forward(self, x: torch.Tensor, condition: torch.Tensor) -> torch.Tensor:
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(F.silu(condition))[:, None].chunk(6, dim=-1)
        q, k, v = (
            t.unflatten(-1, (4, -1)).transpose(1, 2)
            for t in self.qkv(self.norm1(x) * (1 + scale1) + shift1).chunk(3, -1)
        )
        x = x + gate1 * self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + gate2 * self.mlp(self.norm2(x) * (1 + scale2) + shift2)


class Dit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches, self.time = nn.Conv2d(4, WIDTH, 2, stride=2), nn.Linear(1, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(6))
        self.head = nn.Linear(WIDTH, 16)

    def forward(self, latents: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        x, condition = self.patches(latents).flatten(2).transpose(1, 2), self.time(time)
        for block in self.blocks:
            x = block(x, condition)
        return self.head(x)


def _dit() -> Recorder:
    def batch(b: int, _: int) -> dict[str, torch.Tensor]:
        return {"latents": torch.zeros(b, 4, 16, 16), "time": torch.zeros(b, 1), "target": torch.zeros(b, PATCHES, 16)}

    def loss(model: nn.Module, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        return F.mse_loss(model(inputs["latents"], inputs["time"]).float(), inputs["target"].float())

    return record_module(Dit, batch, loss, wrap=[Block])


def _assert_equal(recorder: Recorder, plan: Plan) -> None:
    tape = recorder.tape(replace(tape_key_of(plan, recorder.profile), at=plan.tape_shape))
    assert peak_of_step(recorder.profile, tape, plan).phase_peaks == simulate(recorder.source, plan).phase_peaks


@pytest.mark.parametrize("plan", taken([FSDP2], [DDP]), ids=lambda plan: plan.backend)
def test_small_dit_has_the_peaks_of_pytorch(plan: Plan) -> None:
    _assert_equal(_dit(), plan)


def _example() -> ModuleType:
    path = Path(__file__).parents[2] / "examples" / "diffusion_transformer.py"
    spec = importlib.util.spec_from_file_location("diffusion_transformer", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@with_all_cases
@pytest.mark.parametrize("plan", [FSDP2, DDP], ids=["fsdp2", "ddp"])
def test_example_with_diffusers_has_the_peaks_of_pytorch(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two layers of each kind of Stable Diffusion 3.5's: with and without an attention of their own, and the last one."""
    pytest.importorskip("diffusers")
    example: Any = _example()
    small = {
        "num_layers": 5,
        "num_attention_heads": 2,
        "caption_projection_dim": 128,
        "sample_size": 16,
        "dual_attention_layers": (0, 1),
    }
    monkeypatch.setattr(example, "CONFIG", {**example.CONFIG, **small})
    blocks = [example.JointTransformerBlock]
    _assert_equal(record_module(example.transformer, example.batch, example.loss, blocks), plan)
