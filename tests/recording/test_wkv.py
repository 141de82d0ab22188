"""RWKV is recorded with its kernel: gradients have the shapes of the inputs, and no loop over tokens is recorded."""

from __future__ import annotations

import json
from typing import Any

import pytest
from matrix import in_turn

torch = pytest.importorskip("torch")

from torch._subclasses.fake_tensor import FakeTensorMode

from fsdp_advisor import estimate
from fsdp_advisor.errors import NotRecordable
from fsdp_advisor.job.compatibility import plans
from fsdp_advisor.job.parsing import make_request
from fsdp_advisor.model.resolve import resolve
from fsdp_advisor.recording.wkv import wkv
from fsdp_advisor.tapes import row_tape

B, T, D = 2, 5, 8
RWKV = {"model_type": "rwkv", "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 100, "context_length": 4096}


def inputs(dtype: Any, decay: Any) -> list[Any]:
    shapes = [(D,), (D,), (B, T, D), (B, T, D)]
    dtypes = [decay, decay, dtype, dtype]
    return [torch.zeros(s, dtype=t, requires_grad=True) for s, t in zip(shapes, dtypes, strict=True)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_kernel_returns_an_output_and_gradients_of_the_shapes_of_the_inputs(dtype: Any) -> None:
    with FakeTensorMode():
        tensors = inputs(dtype, dtype)
        out, state = wkv(*tensors)
        assert out.shape == (B, T, D) and out.dtype == dtype and state is None
        out.sum().backward()
        for tensor in tensors:
            assert tensor.grad is not None and tensor.grad.shape == tensor.shape and tensor.grad.dtype == dtype


def test_kernel_refuses_keys_and_time_first_of_different_dtypes() -> None:
    with FakeTensorMode(), pytest.raises(NotRecordable, match="one dtype"):
        wkv(*inputs(torch.bfloat16, torch.float32))


@pytest.fixture
def config(home: Any) -> str:
    path = home / "config.json"
    path.write_text(json.dumps(RWKV))
    return str(path)


@in_turn(1, of=2)
def test_one_tape_is_valid_for_any_number_of_tokens(config: str) -> None:
    request = make_request({"model": config, "gpus": 2, "strategy": "zero3", "micro_batch_size": 2})
    keys = [row_tape(resolve(config), *plans(request, seq_len=tokens))[0] for tokens in (100, 4000)]
    assert keys[0] == keys[1] and keys[0].at is None


@in_turn(1, of=2)
def test_estimate_says_that_the_kernel_is_assumed(config: str) -> None:
    report = estimate(model=config, gpus=2, strategy="zero3")
    assert report.estimates[0].fits
    assert any("RWKV's kernel" in note for note in report.notes)
