"""Models whose routers' loss TRL cannot compute."""

from __future__ import annotations

import pytest

from fsdp_advisor import estimate
from fsdp_advisor.engines.framework_notes import WITHOUT_NUM_EXPERTS


@pytest.mark.parametrize("framework", ["trl", "trainer"])
def test_trl_says_which_models_fail_with_their_routers_loss(framework: str) -> None:
    (row,) = estimate(
        model="ibm-granite/granite-3.1-1b-a400m-base", framework=framework, strategy="ddp", gpu="H100-80GB"
    ).estimates
    assert any("router_aux_loss_coef to 0.0" in each.reason for each in row.lacks) == (framework == "trl")


@pytest.mark.parametrize("model_type", [*WITHOUT_NUM_EXPERTS, "mixtral"])
def test_configurations_of_these_models_have_no_num_experts(model_type: str) -> None:
    auto = pytest.importorskip("transformers.models.auto.configuration_auto")
    config = auto.CONFIG_MAPPING[model_type]()
    assert hasattr(config, "output_router_logits") and config.router_aux_loss_coef
    assert hasattr(config, "num_experts") == (model_type == "mixtral")
