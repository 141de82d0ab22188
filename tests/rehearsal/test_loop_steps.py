"""The predicted peak of a step with an optimizer that loops over the parameters in Python, compared with a simulated GPU."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from matrix import in_turn, taken
from test_lomo import BATCH, TOKENS
from test_lomo import CONFIG as SMALL

from fsdp_advisor.estimator import estimate
from fsdp_advisor.job.choices import OptimizerName

pytestmark = in_turn(1, of=5)

CONFIG = SMALL | {"hidden_size": 2048, "intermediate_size": 6144, "num_attention_heads": 32, "num_key_value_heads": 8}
"""Large enough that the remainders of the allocator's blocks, of up to 1 MiB each, do not matter."""
LOW_RANK = {"rank": 128, "update_proj_gap": 1, "scale": 0.25, "proj_type": "std"}
OPTIMIZERS: dict[OptimizerName, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "galore_adamw_8bit": ("galore_torch", "GaLoreAdamW8bit", {}, LOW_RANK),
    "galore_adamw": ("galore_torch", "GaLoreAdamW", {}, LOW_RANK),
    "grokadamw": ("grokadamw", "GrokAdamW", {}, {}),
    "adam_mini": ("adam_mini", "Adam_mini", {"dim": 2048, "n_heads": 32, "verbose": False}, {}),
}
"""Module, class, options, and options of the group of linear layers, whose projection each step renews."""


@pytest.mark.parametrize("name", taken(["galore_adamw_8bit"], ["galore_adamw", "grokadamw", "adam_mini"]))
def test_peaks_of_optimizers_that_loop_over_parameters_are_predicted(
    name: OptimizerName, run: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    module, cls, options, group = OPTIMIZERS[name]
    words = [module, cls, json.dumps(options), json.dumps(group), str(path), str(BATCH), str(TOKENS)]
    found = run("loop_steps.py", *words)
    [row] = estimate(
        model=str(path), optim=name, strategy="ddp", gpus=1, gpu="H100-80GB", precision="bf16",
        micro_batch_size=BATCH, seq_len=TOKENS,
    ).estimates  # fmt: skip
    assert row.peak_allocated_bytes == pytest.approx(found["allocated"], rel=0.001)
