"""The routers' loss that TRL adds, and notes on jobs whose estimates do not have it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from matrix import in_turn

from fsdp_advisor import estimate
from fsdp_advisor.engines.framework_notes import WITHOUT_NUM_EXPERTS
from fsdp_advisor.errors import UsageError

MOE = {
    "model_type": "qwen3_moe", "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "num_experts": 64, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "vocab_size": 100,
    "architectures": ["Qwen3MoeForCausalLM"],
}  # fmt: skip


def notes(folder: Path, config: dict[str, Any], **options: Any) -> str:
    """The notes on what the estimate of a small model lacks."""
    path = folder / "config.json"
    path.write_text(json.dumps({**MOE, **config}))
    (row,) = estimate(model=str(path), strategy="ddp", gpu="H100-80GB", seq_len=64, **options).estimates
    return " ".join(each.reason for each in row.omissions)


@in_turn(0, of=2)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "options", "said"),
    [
        ({"output_router_logits": True}, {"framework": "trainer"}, "output_router_logits"),
        ({"output_router_logits": True}, {"framework": "trl"}, ""),
        ({"router_aux_loss_coef": 0.0}, {"framework": "trl", "router_aux_loss_coef": 0.1}, "whose weight"),
    ],
)
def test_a_routers_loss_that_is_not_estimated_is_reported(
    config: dict[str, Any], options: dict[str, Any], said: str, tmp_path: Path
) -> None:
    found = notes(tmp_path, config, **options)
    assert said in found and ("routers' loss" in found) == bool(said)


@pytest.mark.parametrize(("framework", "task"), [("trainer", "sft"), ("trl", "reward")])
def test_only_trls_language_models_have_a_weight_of_the_routers_loss(framework: str, task: str) -> None:
    with pytest.raises(UsageError, match="only TRL's trainers"):
        estimate(model="gpt2", framework=framework, task=task, router_aux_loss_coef=0)


@in_turn(2, of=3)
@pytest.mark.parametrize("framework", ["trl", "trainer"])
def test_trl_says_which_models_fail_with_their_routers_loss(framework: str) -> None:
    (row,) = estimate(
        model="ibm-granite/granite-3.1-1b-a400m-base", framework=framework, strategy="ddp", gpu="H100-80GB"
    ).estimates
    assert any("router_aux_loss_coef to 0.0" in each.reason for each in row.omissions) == (framework == "trl")


@in_turn(1, of=2)
def test_a_routers_loss_that_is_switched_off_does_not_fail() -> None:
    (row,) = estimate(
        model="ibm-granite/granite-3.1-1b-a400m-base",
        framework="trl",
        strategy="ddp",
        gpu="H100-80GB",
        router_aux_loss_coef=0.0,
    ).estimates
    assert "router" not in " ".join(each.reason for each in row.omissions)


@pytest.mark.parametrize("model_type", [*WITHOUT_NUM_EXPERTS, "mixtral"])
def test_configurations_of_these_models_have_no_num_experts(model_type: str) -> None:
    auto = pytest.importorskip("transformers.models.auto.configuration_auto")
    config = auto.CONFIG_MAPPING[model_type]()
    assert hasattr(config, "output_router_logits") and config.router_aux_loss_coef
    assert hasattr(config, "num_experts") == (model_type == "mixtral")
