"""Mamba-1 layers are recorded as mamba-ssm runs them: gradients have the shapes of the inputs, and no loop over tokens is recorded."""

from __future__ import annotations

import json
from itertools import product
from typing import Any

import pytest
from matrix import of_today

torch = pytest.importorskip("torch")

from torch._subclasses.fake_tensor import FakeTensorMode

from fsdp_advisor.job.compatibility import plans
from fsdp_advisor.job.parsing import make_request
from fsdp_advisor.model.resolve import resolve
from fsdp_advisor.recording.selective_scan import mamba_inner, selective_scan
from fsdp_advisor.tapes import row_tape

B, D, T, S, R = 2, 8, 5, 4, 3


def leaf(*shape: int, dtype: Any = torch.bfloat16) -> Any:
    return torch.zeros(shape, dtype=dtype, requires_grad=True)


@pytest.mark.parametrize(("gated", "with_state"), product((False, True), repeat=2))
def test_scan_returns_outputs_and_gradients_of_the_shapes_of_the_inputs(gated: bool, with_state: bool) -> None:
    with FakeTensorMode():
        check_scan(gated=gated, with_state=with_state)


def check_scan(*, gated: bool, with_state: bool) -> None:
    fp32 = {"dtype": torch.float32}
    inputs = [leaf(B, D, T), leaf(B, D, T), leaf(D, S, **fp32), leaf(B, S, T), leaf(B, S, T), leaf(D, **fp32)]
    z, bias = (leaf(B, D, T) if gated else None), leaf(D, **fp32)
    found = selective_scan(*inputs, z=z, delta_bias=bias, return_last_state=with_state)
    out, state = found if with_state else (found, None)
    assert out.shape == (B, D, T) and (state is None or state.shape == (B, D, S))
    out.sum().backward()
    for tensor in [*inputs, bias, *([z] if gated else [])]:
        assert tensor.grad is not None and tensor.grad.shape == tensor.shape


@pytest.mark.parametrize("normed", [False, True])
def test_layer_returns_an_output_and_gradients_of_the_shapes_of_the_inputs(normed: bool) -> None:
    with FakeTensorMode():
        check_layer(normed=normed)


def check_layer(*, normed: bool) -> None:
    fp32 = {"dtype": torch.float32}
    inputs = [leaf(B, 2 * D, T), leaf(D, 1, 4), leaf(D), leaf(R + 2 * S, D), leaf(D, R), leaf(6, D)]
    last = {"D": leaf(D, **fp32), "delta_bias": leaf(D, **fp32)}
    norms = {"b_rms_weight": leaf(S), "c_rms_weight": leaf(S), "dt_rms_weight": leaf(D)} if normed else {}
    A = leaf(D, S, **fp32)
    out = mamba_inner(*inputs, None, A, None, None, **last, **norms)
    assert out.shape == (B, T, 6)
    out.sum().backward()
    for tensor in [*inputs, A, *last.values()]:
        assert tensor.grad is not None and tensor.grad.shape == tensor.shape


@pytest.mark.parametrize("model_type", of_today(["mamba", "falcon_mamba"], days=2))
def test_one_tape_is_valid_for_any_number_of_tokens(model_type: str, home: Any) -> None:
    config = {"model_type": model_type, "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 100, "state_size": 4}
    path = home / "config.json"
    path.write_text(json.dumps(config))
    model = resolve(str(path))
    request = make_request({"model": str(path), "gpus": 2, "strategy": "zero3", "micro_batch_size": 2})
    keys = [row_tape(model, *plans(request, seq_len=tokens))[0] for tokens in (100, 100_000)]
    assert keys[0] == keys[1] and keys[0].at is None
