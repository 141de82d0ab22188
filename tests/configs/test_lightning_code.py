"""Scripts that train with Lightning."""

from __future__ import annotations

from typing import Any

import pytest

from fsdp_advisor.configs import Configuration, complete, from_texts
from fsdp_advisor.errors import UsageError
from fsdp_advisor.job.parsing import make_request

MODULE = """
import lightning as L

class Module(L.LightningModule):
    def __init__(self, name="gpt2"):
        self.model = AutoModelForCausalLM.from_pretrained(name)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-5)

loader = DataLoader(data, batch_size=8)
"""
FSDP2 = "for layer in self.model.h:\n    fully_shard(layer)\nL.Trainer(strategy=ModelParallelStrategy())"
STAGE_3 = "strategy='deepspeed_stage_3_offload', precision='bf16-mixed'"
FSDP = """
strategy = FSDPStrategy(auto_wrap_policy={{GPT2Block}}, activation_checkpointing_policy={{GPT2Block}}{})
L.Trainer(strategy=strategy, precision="bf16-mixed")
"""


def read(code: str) -> Configuration:
    return from_texts({"train.py": f"{MODULE}\n{code}"})


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("L.Trainer()", {"strategy": "ddp", "gpus": 1, "precision": "fp32"}),
        ("L.Trainer(devices=4, num_nodes=2, strategy='ddp', precision='bf16-mixed')", {"gpus": 8, "nnodes": 2, "strategy": "ddp"}),
        ("L.Trainer(devices=[0, 2], precision='bf16-true')", {"gpus": 2, "precision": "bf16"}),
        ("L.Trainer(devices='0,1', num_nodes=2)", {"gpus": 4}),
        ("L.Trainer(devices='0,')", {"gpus": 1}),
        ("L.Trainer(accumulate_grad_batches=4, precision=16)", {"gradient_accumulation_steps": 4, "precision": "fp16-mixed"}),
        ("L.Trainer(strategy='fsdp')", {"strategy": "zero3", "backend": "fsdp1", "wrap": "none", "use_orig_params": True}),
        ("L.Trainer(strategy='fsdp_cpu_offload')", {"backend": "fsdp1", "offload": "parameters"}),
        (FSDP.format(""), {"strategy": "zero3", "wrap": "layer", "activation_checkpointing": "full", "precision": "bf16-mixed"}),
        (FSDP.format(", sharding_strategy='SHARD_GRAD_OP'"), {"strategy": "zero2"}),
        (FSDP.format(", cpu_offload=True"), {"offload": "parameters"}),
        (FSDP.format(", cpu_offload=CPUOffload(True)"), {"offload": "parameters"}),
        (FSDP.format(", cpu_offload=CPUOffload()"), {"offload": "none"}),
        (FSDP.format(", sharding_strategy='HYBRID_SHARD', device_mesh=(2, 8)"), {"strategy": "hsdp", "nnodes": 2, "gpus": 16}),
        (f"L.Trainer({STAGE_3})", {"strategy": "zero3", "backend": "deepspeed", "offload": "parameters", "precision": "bf16-mixed"}),
        ("L.Trainer(strategy=DeepSpeedStrategy(stage=1))", {"strategy": "zero1", "backend": "deepspeed", "offload": "none"}),
        ("fabric = Fabric(devices=2, strategy='ddp', precision='bf16-mixed')", {"gpus": 2, "strategy": "ddp"}),
        (FSDP2, {"strategy": "zero3", "backend": "fsdp2", "wrap": "layer"}),
        (FSDP2.replace("layer)", "layer, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))"), {"precision": "bf16-mixed"}),
        ("L.Trainer(strategy=FSDPStrategy(mixed_precision=MixedPrecision(param_dtype=torch.bfloat16)))", {"precision": "bf16-mixed"}),
    ],
)  # fmt: skip
def test_a_trainer_of_lightning_is_read(code: str, expected: dict[str, Any]) -> None:
    options = read(code).options
    usual = {"model": "gpt2", "micro_batch_size": 8, "optim": "adamw_torch", "framework": "torch"}
    assert options.items() >= (usual | expected).items()
    assert make_request(options).strategy == options["strategy"]


def test_what_lightning_does_otherwise_is_reported() -> None:
    (reading,) = read("L.Trainer(strategy='fsdp', precision='bf16-mixed', gradient_clip_val=1.0)").readings
    for part in ("reduces gradients in 16 bits", "gradient_clip_val", "clears gradients between forward and backward"):
        assert any(part in text for text in reading.not_modelled)
    (of_deepspeed,) = read(f"L.Trainer({STAGE_3})").readings
    assert not any("reduce_bucket_size" in text for text in of_deepspeed.not_modelled)
    assert read(f"L.Trainer({STAGE_3})").options["zero_buckets"].startswith("reduce_bucket_size=200000000")


def test_mixed_precision_that_the_code_gives_fsdp_replaces_lightnings() -> None:
    given = "mixed_precision=MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)"
    found = read(f"L.Trainer(strategy=FSDPStrategy({given}), precision='16-mixed')")
    assert found.options["precision"] == "bf16-mixed"
    assert not any("reduces gradients" in text for text in found.readings[0].not_modelled)


@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
def test_one_dtype_is_reduced_in_itself(precision: str) -> None:
    (reading,) = read(f"fabric = Fabric(strategy='fsdp', precision='{precision}')").readings
    assert not any("reduces gradients" in text for text in reading.not_modelled)


def test_tensor_parallelism_of_lightning_is_refused() -> None:
    found = read("L.Trainer(strategy=ModelParallelStrategy(tensor_parallel_size=2))\nfully_shard(model)")
    with pytest.raises(UsageError, match="tensor_parallel_size: 2"):
        complete(found, {})
