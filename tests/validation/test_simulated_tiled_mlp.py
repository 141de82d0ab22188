"""Predicted peaks with a tiled MLP against PyTorch's engines around the same model, whose networks DeepSpeed's own class runs in shards.

Each is one steady step on rank 0 under fake tensors, equal to the byte in each phase. `tests/rehearsal/test_tiled_mlp_steps.py` compares
allocated memory with Liger's and axolotl's code on a simulated GPU.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from math import ceil
from pathlib import Path
from typing import Any

import pytest
from matrix import taken
from small_models import Case, name_of, options_of, small_models

pytest.importorskip("torch")

from compared_peaks import predicted_and_simulated

from fsdp_advisor.job.parsing import make_request  # after the check
from fsdp_advisor.job.request import EstimateRequest
from fsdp_advisor.recording.source import LayerStack
from fsdp_advisor.validation import simulate

pytestmark = pytest.mark.slow

CONFIGS = small_models(vocabulary=1024, layers=3)
ENGINES: tuple[dict[str, str], ...] = (
    {"strategy": "ddp", "gpus": "1"},
    {"strategy": "zero3", "backend": "fsdp2", "gpus": "4"},
    {"strategy": "zero2", "backend": "fsdp2", "gpus": "3"},
)
LONG = {"seq_len": "500"}
FEW: list[Case] = [
    {"model": "llama", **ENGINES[1], "tiled_mlp": "3", **LONG},
    {"model": "qwen3", **ENGINES[0], "tiled_mlp": "auto", "activation_checkpointing": "full", **LONG},
    {"model": "llama", **ENGINES[0], "tiled_mlp": "4", "gradient_accumulation_steps": "2"},
]
MORE: list[Case] = [
    {"model": model, **engine, "tiled_mlp": shards, **LONG, **({"attention": "eager"} if model == "gemma2" else {}), **more}
    for model, engine, shards, more in product(
        ("llama", "qwen3", "phi3", "gemma2", "olmo2", "mistral"),
        ENGINES,
        ("auto", "1", "7"),
        ({}, {"activation_checkpointing": "full"}, {"precision": "bf16"}, {"gradient_accumulation_steps": "2"}, {"precision": "fp32"}),
    )
]  # fmt: skip


def by_deepspeed(stacks: Iterable[LayerStack], tiling: str, name: str) -> None:
    """Tile each network as DeepSpeed's documentation does. The weights are not ZeRO's."""
    from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledMLP  # takes seconds to import

    _, shards = tiling.split(":")

    def forward(mlp: Any, whole: Any, x: Any) -> Any:
        count = ceil(x.shape[1] / x.shape[2]) if shards == "auto" else int(shards)
        return TiledMLP.apply(lambda _, part: whole(part), mlp, x, count, [])

    for stack in stacks:
        for layer in stack.layers:
            mlp: Any = layer.mlp
            mlp.forward = lambda x, mlp=mlp, whole=mlp.forward: forward(mlp, whole, x)


@pytest.mark.parametrize("case", taken(FEW, MORE, days=6), ids=name_of)
def test_predicted_peaks_equal_pytorch_with_deepspeeds_tiled_mlp(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(simulate, "tile_mlps", by_deepspeed)
    request = make_request(options_of(CONFIGS, case, tmp_path), EstimateRequest)
    predicted, simulated = predicted_and_simulated(request)
    assert predicted == simulated
