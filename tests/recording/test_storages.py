"""Storages as they are watched, against what PyTorch does unwatched."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from matrix import in_turn

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # after the check for torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.profiler import profile

from fsdp_advisor.model.tape_key import TapeKey
from fsdp_advisor.recording.recorder import Recorder, record_module, repeats_are_alike
from fsdp_advisor.recording.storages import StorageWatch
from fsdp_advisor.recording.transformers_models import TransformersSource


def used_twice() -> Any:
    x = torch.ones(4, 8, requires_grad=True) * 2
    return (x.sin() + x.cos()).sum()


def used_three_times() -> Any:
    x = torch.ones(4, 8, requires_grad=True) * 2
    return (x.sin() + x.cos() * x.exp()).sum()


def residual() -> Any:
    """The gradient of a sum goes to both of its parts. It stays until the backward of both has run."""
    x = torch.ones(4, 8, requires_grad=True) * 2
    return (x + x.sin()).sum()


def through_views() -> Any:
    """Products of matrices give their inputs' gradients as views."""
    x = torch.ones(2, 4, 8, requires_grad=True) * 2
    w = torch.ones(8, 8)
    return (F.linear(x, w) + F.linear(x, w)).sin().sum()


def tied() -> Any:
    w = torch.ones(16, 8, requires_grad=True)
    x = F.embedding(torch.arange(4), w)
    return F.linear(x, w).sin().sum()


def tied_under_autocast() -> Any:
    w = torch.ones(16, 8, requires_grad=True)
    x = F.embedding(torch.arange(4), w)
    with torch.autocast("cpu", torch.bfloat16):
        return F.linear(x, w).float().sin().sum()


@pytest.mark.parametrize("fake", [False, True])
@pytest.mark.parametrize("loss", [used_twice, used_three_times, residual, through_views, tied, tied_under_autocast])
def test_gradients_are_added_as_autograd_does_unwatched(loss: Callable[[], Any], fake: bool) -> None:
    """In place where nothing else holds the first one: then no storage is born, but there is an operator all the same."""
    real = loss()
    with profile() as profiled:
        real.backward()
    did = Counter(event.name for event in profiled.events() or ())
    born: list[str] = []
    ran: list[str] = []

    def resized(key: int, before: int, after: int, operator: str, args: tuple[Any, ...]) -> None:
        if after and not before:
            born.append(operator)

    def operated(func: Any, *_: Any) -> None:
        ran.append(func._schema.name)

    def watched() -> None:
        watch = StorageWatch(resized, sums_in_place=True)
        watch.on_operator = operated
        with watch:
            value = loss()
            born.clear()
            ran.clear()
            value.backward()

    if fake:
        with FakeTensorMode(allow_non_fake_inputs=True):
            watched()
    else:
        watched()
    assert did["aten::add"] + did["aten::add_"] > 0
    assert born.count("aten::add") == did["aten::add"]
    assert [ran.count(name) for name in ("aten::add", "aten::add_")] == [did["aten::add"], did["aten::add_"]]


def test_a_gradient_that_all_layers_add_to_keeps_them_alike() -> None:
    """A decoder's layers add to the gradient of what the encoder made, the last two otherwise than those before."""

    def build() -> Any:
        return torch.nn.Transformer(16, 2, 6, 6, 32, dropout=0.0, batch_first=True)

    def batch(b: int, t: int) -> dict[str, Any]:
        return {"src": torch.zeros(b, t, 16), "tgt": torch.zeros(b, t, 16)}

    def loss(model: Any, inputs: dict[str, Any]) -> Any:
        return model(**inputs).sum()

    layers = (torch.nn.TransformerEncoderLayer, torch.nn.TransformerDecoderLayer)
    recorder = record_module(build, batch, loss, wrap=layers)
    variant = TapeKey("plain", "fp32", "sdpa", "none", at=(2, 8))
    assert repeats_are_alike(recorder.profile, recorder.tape(variant), recorder.recorded_kinds)


@in_turn(2, of=3)
def test_layers_of_an_irregular_pattern_add_gradients_in_place() -> None:
    """As in a regular one: its recorded layers, too, are compared with the nearest ones of their kind."""

    def storages(kinds: list[str]) -> int:
        """How many storages the backward of the second layer, a convolution, allocates on a GPU."""
        config = {
            "model_type": "lfm2", "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2,
            "vocab_size": 100, "num_hidden_layers": len(kinds), "layer_types": kinds,
        }  # fmt: skip
        recorder = Recorder(TransformersSource(config, name="short-convolutions"))
        tape = recorder.tape(TapeKey("plain", "fp32", "eager", "none", device="gpu", at=(2, 8)))
        segments = zip(tape.segments, tape.births, strict=True)
        (count,) = (len(made) for s, made in segments if (s.phase, s.stack, s.layer) == ("backward", 0, 1))
        return count

    assert storages(3 * [*5 * ["conv"], "full_attention"]) == storages(6 * ["conv"])
