"""Linear layers in fp8: which layers torchao converts, and which jobs are refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from matrix import in_turn

from fsdp_advisor import estimate, recommend
from fsdp_advisor.errors import UsageError
from fsdp_advisor.strategy_estimate import StrategyEstimate

CONFIG: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 3, "num_attention_heads": 8,
    "num_key_value_heads": 8, "vocab_size": 96,
}  # fmt: skip


def _row(folder: Path, config: dict[str, Any] = CONFIG, **options: Any) -> StrategyEstimate:
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    usual = {"gpu": "H100-80GB", "strategy": "ddp", "micro_batch_size": 4, "seq_len": 1000, "precision": "bf16"}
    (row,) = estimate(model=str(path), **(usual | options)).estimates  # type: ignore[arg-type]  # several types
    return row


@in_turn(0, of=2)
@pytest.mark.slow
@pytest.mark.usefixtures("torchao")
def test_casts_that_are_not_compiled_need_memory_and_time(tmp_path: Path) -> None:
    plain, fp8 = _row(tmp_path), _row(tmp_path, fp8="tensorwise")
    assert plain.peak_tensor_bytes is not None and fp8.peak_tensor_bytes is not None
    assert fp8.peak_tensor_bytes > plain.peak_tensor_bytes
    assert plain.step is not None and fp8.step is not None
    assert fp8.step.seconds > plain.step.seconds


@pytest.mark.slow
@pytest.mark.usefixtures("torchao")
def test_layers_of_other_dimensions_and_the_head_stay_as_they_are() -> None:
    import torch

    from fsdp_advisor.recording.adapted import source_of
    from fsdp_advisor.recording.fp8 import convert_linears

    source = source_of(CONFIG | {"intermediate_size": 1528}, name="llama")
    model = source.build(torch.bfloat16)
    convert_linears(model, source, "rowwise")
    converted = {name for name, module in model.named_modules() if type(module).__name__ == "Float8Linear"}
    layers = range(CONFIG["num_hidden_layers"])
    assert converted == {f"model.layers.{n}.self_attn.{name}_proj" for n in layers for name in "qkvo"}


@pytest.mark.slow
@pytest.mark.usefixtures("torchao")
def test_layers_in_mxfp8_have_whole_blocks_of_32_elements() -> None:
    import torch

    from fsdp_advisor.recording.adapted import source_of
    from fsdp_advisor.recording.fp8 import convert_linears

    source = source_of(CONFIG | {"intermediate_size": 1552}, name="llama")
    model = source.build(torch.bfloat16)
    parameters = [id(parameter) for parameter in model.parameters()]
    convert_linears(model, source, "mxfp8")
    converted = {
        name.split(".")[-1] for name, module in model.named_modules() if type(module).__name__ == "MXFP8Linear"
    }
    assert converted == {f"{name}_proj" for name in "qkvo"}
    assert [id(parameter) for parameter in model.parameters()] == parameters


@in_turn(5, of=6)
@pytest.mark.slow
@pytest.mark.usefixtures("torchao")
def test_products_in_mxfp8_take_less_time_and_their_casts_more(tmp_path: Path) -> None:
    options: dict[str, Any] = {"gpu": "B200", "seq_len": 8192, "compile": "layer"}
    wide = CONFIG | {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32}
    plain, mxfp8 = (_row(tmp_path, wide, fp8=fp8, **options) for fp8 in ("none", "mxfp8"))
    assert plain.step is not None and mxfp8.step is not None
    assert mxfp8.step.breakdown["matmul"] < 0.6 * plain.step.breakdown["matmul"]
    assert mxfp8.step.breakdown["pointwise"] > plain.step.breakdown["pointwise"]
    assert mxfp8.step.seconds < plain.step.seconds


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"framework": "trainer"}, "--framework trainer"),
        ({"framework": "torchtitan", "strategy": "zero3"}, "torchtitan has no recipe tensorwise"),
        ({"precision": "fp32"}, "--precision fp32"),
        ({"precision": "fp16-mixed"}, "--precision fp16-mixed"),
        ({"activation_checkpointing": "selective"}, "--activation-checkpointing selective"),
        ({"model": "meta-llama/Llama-3.2-1B", "use_liger_kernel": True}, "--use-liger-kernel"),
        ({"use_peft": True}, "adapters"),
        ({"backend": "deepspeed", "strategy": "zero3"}, "backend deepspeed"),
        ({"gpu": "A100-80GB"}, "A100-80GB does not multiply in fp8"),
        ({"fp8": "mxfp8"}, "H100-80GB has no kernels for MXFP8"),
        ({"fp8": "mxfp8", "gpu": "MI300X"}, "MI300X has no kernels for MXFP8"),
        ({"fp8": "mxfp8", "gpu": "B200", "framework": "trainer"}, "trainer cannot switch on torchao's MXFP8"),
        ({"fp8": "mxfp8", "gpu": "B200"}, "under DDP's autocast linear layers have weights in fp32"),
        (
            {"fp8": "mxfp8", "gpu": "B200", "precision": "bf16", "seq_len": 1000},
            "a multiple of 32 tokens, not micro-batch 1 x 1000",
        ),
        (
            {"fp8": "mxfp8", "gpu": "B200", "framework": "torchtitan", "strategy": "zero3", "seq_len": 128},
            "256 tokens (32 in each of the loss's 8 chunks), not micro-batch 1 x 128",
        ),
    ],
)
def test_jobs_that_are_not_modelled_in_fp8_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=re.escape(said)):
        estimate(**({"model": "gpt2", "gpu": "H100-80GB", "strategy": "ddp", "fp8": "tensorwise"} | options))


def test_fp8_is_not_searched() -> None:
    with pytest.raises(UsageError, match="search over steps in fp8"):
        recommend(model="gpt2", gpu="H100-80GB", fp8="rowwise")
