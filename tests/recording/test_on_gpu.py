"""What is recorded of sdpa on a GPU, against PyTorch's own kernels and transformers' own choices."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # after the check for torch
from matrix import in_turn, taken
from tiny_llama import LLAMA, write
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from fsdp_advisor import estimate
from fsdp_advisor.job.losses import LossCode
from fsdp_advisor.model import cache
from fsdp_advisor.model.tape import Category, Op, Polynomial, Segment, Staging, Tape, value_at
from fsdp_advisor.model.tape_key import TapeKey, TapePrecision
from fsdp_advisor.recording import Recorder, TransformersSource, flash, on_gpu
from fsdp_advisor.rows import NO_SCRATCH

pytestmark = pytest.mark.slow

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "vocab_size": 99,
}
NOISE_BYTES = 64
"""Scalars, which live on the CPU there and in registers on a GPU."""


CPU = TapeKey("plain", "fp32", "sdpa", "none")
EAGER = replace(CPU, attention="eager")
GPU = replace(CPU, device="gpu")
FILLED = replace(GPU, window_filled=True)
CUDNN_FILLED = replace(FILLED, precision="bf16", kernel="cudnn")
FLASH = replace(GPU, precision="bf16", attention="flash_attention_2")


def recorder_of(**config: Any) -> Recorder:
    return Recorder(TransformersSource({"model_type": "llama", **SMALL, **config}, name="x"))


@lru_cache
def tape_of(key: TapeKey, **config: Any) -> Tape:
    return recorder_of(**config).tape(key)


def scratch_of(tape: Tape, segment: Segment) -> list[Polynomial]:
    """The workspaces of kernels, without those of sums."""
    taken = [tape.sizes[a] for op, a, c in segment.events if op == Op.ALLOC and c == Category.SCRATCH]
    return [size for size in taken if not isinstance(size, Staging)]


def requests(run: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> tuple[list[list[int]], list[torch.Tensor]]:
    """Bytes taken and given back by forward and backward, those given back together in order of size; and the results."""
    for _ in range(2):  # the first sets things up
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
            out = run(*inputs)
            grads = torch.autograd.grad(out, [x for x in inputs if x.requires_grad], torch.ones_like(out))
    assert seen.profiler is not None
    events = [e for e in seen.profiler.kineto_results.events() if e.name() == "[memory]"]
    sizes = [e.nbytes() for e in sorted(events, key=lambda e: e.start_ns()) if abs(e.nbytes()) > NOISE_BYTES]
    return [list(g) if taken else sorted(g) for taken, g in groupby(sizes, lambda n: n > 0)], [out, *grads]


def rows(b: int, t: int, heads: int, d: int) -> torch.Tensor:
    """Queries, keys or values in the layout of a model: of shape (B, H, T, D), stored as (B, T, H, D)."""
    return torch.randn(b, t, heads, d).transpose(1, 2).requires_grad_()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("b", "kv_heads", "mask"),
    [(2, 2, "causal"), (1, 2, "causal"), (2, 8, "none"), (2, 1, "bool"), (2, 8, "float")],
)
def test_the_composite_is_pytorchs_own(b: int, kv_heads: int, mask: str, dtype: torch.dtype) -> None:
    t, heads, d = 64, 8, 16
    torch.manual_seed(0)
    inputs = [rows(b, t, n, d).detach().to(dtype).requires_grad_() for n in (heads, kv_heads, kv_heads)]
    if mask == "bool":
        inputs.append(torch.ones(b, 1, t, t, dtype=torch.bool).tril())
    elif mask == "float":
        inputs.append(torch.randn(1, heads, t, t, dtype=dtype).requires_grad_())
    options = {"is_causal": mask == "causal", "enable_gqa": kv_heads != heads}

    def theirs(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *masks: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return F.scaled_dot_product_attention(q, k, v, *masks, **options)

    def ours(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *masks: torch.Tensor) -> torch.Tensor:
        nothing = mock.patch.multiple(on_gpu, flash_takes=lambda *_: False, efficient_takes=lambda *_: False)
        with nothing:
            return on_gpu.attention(q, k, v, *masks, **options)

    (their_bytes, their_results), (our_bytes, our_results) = requests(theirs, *inputs), requests(ours, *inputs)
    assert our_bytes == their_bytes
    tolerance = 0.02 if dtype == torch.bfloat16 else 1e-5
    for one, other in zip(our_results, their_results, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("biased", [False, True])
def test_the_fused_kernels_tensors_are_those_pytorch_registers(biased: bool) -> None:
    """torch/_meta_registrations.py, at a length that needs no padding."""
    with torch.device("meta"):
        q, k, v = rows(2, 64, 4, 16), rows(2, 96, 4, 16), rows(2, 96, 4, 32)
        bias = torch.empty(2, 4, 64, 96) if biased else None
        theirs = torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, bias, True)
        ours = on_gpu.efficient_forward(q, k, v, bias)
        assert [(x.shape, x.stride()) for x in ours] == [(x.shape, x.stride()) for x in theirs[:2]]
        out, lse, seed, offset = theirs
        asked = [True, True, True, biased]
        back = torch.ops.aten._scaled_dot_product_efficient_attention_backward
        their_grads = back(torch.empty_like(out), q, k, v, bias, out, lse, seed, offset, 0.0, asked)
        our_grads = on_gpu.efficient_backward(torch.empty_like(out), q, k, v, bias, out, lse)
    assert [(x.shape, x.stride()) for x in our_grads] == [(x.shape, x.stride()) for x in their_grads if x is not None]


@pytest.mark.parametrize("width", [16, 8], ids=["values as wide", "values narrower"])
@pytest.mark.parametrize("by_heads", [False, True])
def test_flash_lies_as_pytorch_registers(by_heads: bool, width: int) -> None:
    """The output lies as the queries do. torch/_meta_registrations.py has cuDNN's kernel, and the flash one for equal widths."""
    with torch.device("meta"):
        q, k, v = (rows(2, 64, 4, d).detach() for d in (16, 16, width))
        if by_heads:
            q = q.contiguous()
        causal = (0.0, True, False)
        theirs = [torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, *causal)[:2]]
        if width == 16:
            theirs.append(torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, *causal)[:2])
        out, lse = flash.flash_forward(*(x.transpose(1, 2) for x in (q, k, v)))
    for their_out, their_lse in theirs:
        assert out.transpose(1, 2).shape == their_out.shape and out.transpose(1, 2).stride() == their_out.stride()
        assert lse.numel() == their_lse.numel() and lse.dtype == their_lse.dtype


@pytest.mark.parametrize(
    ("query", "key", "value", "fused"),
    [
        ((2, 4, 8, 16), (2, 4, 8, 16), (2, 4, 8, 32), True),
        ((2, 4, 8, 16), (2, 2, 8, 16), (2, 2, 8, 16), False),  # grouped
        ((2, 4, 8, 18), (2, 4, 8, 18), (2, 4, 8, 18), False),  # no multiple of 16 bytes
        ((4, 8, 16), (4, 8, 16), (4, 8, 16), False),
    ],
)
def test_which_calls_a_fused_kernel_takes(query: Any, key: Any, value: Any, fused: bool) -> None:
    assert on_gpu.efficient_takes(*(torch.empty(s, device="meta") for s in (query, key, value)), None) is fused


MODELS = {
    "plain": (LlamaForCausalLM, LlamaConfig, {}, GPU),
    "grouped": (LlamaForCausalLM, LlamaConfig, {"num_key_value_heads": 2}, GPU),
    "window unfilled": (
        MistralForCausalLM,
        MistralConfig,
        {"num_key_value_heads": 2, "sliding_window": 4096},
        GPU,
    ),
    "window filled": (
        MistralForCausalLM,
        MistralConfig,
        {"num_key_value_heads": 2, "sliding_window": 32},
        FILLED,
    ),
}


@pytest.fixture
def calls() -> Iterator[list[Any]]:
    """What sdpa is called with: heads of keys, whether masked, causal, grouped."""
    found: list[Any] = []
    real, recorded = F.scaled_dot_product_attention, on_gpu.attention

    def seen(kernel: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
            flags = {n: bool(options.get(n)) for n in ("is_causal", "enable_gqa")}
            found.append((k.shape[1], options.get("attn_mask") is not None, flags))
            return kernel(q, k, v, **options)

        return call

    with (
        mock.patch.object(F, "scaled_dot_product_attention", seen(real)),
        mock.patch.object(on_gpu, "attention", seen(recorded)),
    ):
        yield found


@pytest.mark.parametrize("name", taken(["grouped", "window filled"], ["plain", "window unfilled"]))
def test_sdpa_is_called_as_in_a_real_run(name: str, calls: list[Any]) -> None:
    model, config, more, key = MODELS[name]
    built = config(**SMALL, **more, use_cache=False)
    tokens = torch.zeros(2, 48, dtype=torch.long)
    model._from_config(built, attn_implementation="sdpa")(input_ids=tokens, labels=tokens)
    real = [*calls]
    calls.clear()
    recorder_of(**{"model_type": built.model_type, **more}).tape(replace(key, at=tokens.shape))
    assert len(real) == 2 and real == calls[:2]


@in_turn(0, of=2)
def test_no_size_grows_with_the_square_of_the_length() -> None:
    def grow(key: TapeKey) -> bool:
        return any(p[4] or p[5] for p in tape_of(key).sizes if not isinstance(p, Staging))

    assert grow(CPU) and not grow(GPU)


@in_turn(0, of=2)
def test_grouped_heads_keep_a_layers_scores() -> None:
    """(B, H, T, T) in fp32: the product, its softmax and the mask of -inf in forward; in backward the gradients of both."""
    tape = tape_of(GPU, num_key_value_heads=2)
    layer = next(s for s in tape.segments if s.stack == 0 and s.phase == "forward")
    sizes = [tape.sizes[a][4] for op, a, _ in layer.events if op == Op.ALLOC and tape.sizes[a][4]]
    assert sizes == [16, 16, 4]
    kept = [category for op, a, category in layer.events if op == Op.ALLOC and tape.sizes[a][4] == 16]
    assert kept == [Category.TEMPORARY, Category.ACTIVATION]


@in_turn(1, of=2)
@pytest.mark.parametrize("precision", taken(["bf16"], ["bf16-mixed"]))
def test_sdpa_in_half_precision_takes_the_flash_kernel(precision: TapePrecision) -> None:
    def made(key: TapeKey) -> list[list[tuple[Any, int]]]:
        tape = tape_of(replace(key, precision=precision, at=(3, 56)), num_key_value_heads=2)
        return [[(tape.sizes[a], c) for op, a, c in s.events if op == Op.ALLOC] for s in tape.segments if s.stack == 0]

    assert made(GPU) == made(FLASH)


@in_turn(0, of=2)
@pytest.mark.parametrize("key", [FILLED, CUDNN_FILLED], ids=lambda key: key.kernel)
def test_a_filled_window_keeps_a_layers_mask(key: TapeKey) -> None:
    tape = tape_of(key, model_type="mistral", num_key_value_heads=2, sliding_window=32)
    mask = (0, 0, 0, 0, 4 if key.precision == "fp32" else 2, 0)
    kept = [(tape.sizes[a], c) for s in tape.segments for op, a, c in s.events if op == Op.ALLOC and s.stack == 0]
    assert kept.count((mask, Category.ACTIVATION)) == 2


ONE_MASK, MASK_OF_EACH = (0, 0, 0, 0, 0, 1), (0, 0, 0, 0, 1, 0)


@in_turn(0, of=2)
@pytest.mark.parametrize(("loss", "mask"), [("full", ONE_MASK), ("trl", MASK_OF_EACH)])
def test_the_mask_of_a_filled_window_is_copied_for_each_sequence_by_trl(loss: LossCode, mask: Polynomial) -> None:
    """TRL passes a mask of ones, and transformers combines the window's mask with it. Checkpoints keep the mask."""
    tape = tape_of(
        replace(FILLED, loss=loss, checkpointing="full"), model_type="mistral", num_key_value_heads=2, sliding_window=32
    )
    forward = [(n, segment) for n, segment in enumerate(tape.segments) if segment.phase == "forward"]
    freed = {(a, b) for _, segment in forward for op, a, b in segment.events if op == Op.FREE}
    births = [(n, [a for op, a, _ in segment.events if op == Op.ALLOC]) for n, segment in forward]
    kept = [tape.sizes[size] for n, sizes in births for at, size in enumerate(sizes) if (n, at) not in freed]
    assert {size for size in kept if size in (ONE_MASK, MASK_OF_EACH)} == {mask}


@in_turn(1, of=2)
def test_cudnn_puts_the_output_where_queries_lie() -> None:
    """Half the heads turn, so queries are put together head by head; what cuDNN makes of them has to be copied back."""
    model = {
        "model_type": "phi3", "pad_token_id": 0, "sliding_window": 32,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    }  # fmt: skip
    kept, at = [], (3, 56)
    for key in (replace(CUDNN_FILLED, kernel="default"), CUDNN_FILLED):
        tape = recorder_of(**model).tape(replace(key, at=at))
        layer = next(s for s in tape.segments if s.stack == 0 and s.phase == "forward")
        born = (tape.sizes[a] for op, a, c in layer.events if op == Op.ALLOC and c == Category.ACTIVATION)
        kept.append(sum(value_at(size, *at) for size in born))
    assert kept[1] - kept[0] == 2 * SMALL["hidden_size"] * 3 * 56


@in_turn(1, of=2)
def test_the_softmaxs_scratch_is_no_tensor_of_the_step() -> None:
    tape = tape_of(EAGER)
    for segment in tape.segments:
        scratch = scratch_of(tape, segment)
        layers = segment.stack == 0 and segment.phase == "backward"
        assert scratch == ([(0, 0, 0, 0, 4 * SMALL["num_attention_heads"], 0)] if layers else [])


def test_the_fused_kernels_backward_allocates_its_scratch() -> None:
    """delta and the product it is made of, and tiles of 64 columns of dq for heads of 16."""
    tape = tape_of(GPU)
    layer = next(s for s in tape.segments if s.stack == 0 and s.phase == "backward")
    scratch = scratch_of(tape, layer)
    assert [p[3] for p in scratch] == [4 * 64, 4 * 4, 4 * 4, 4 * 4 * 64]


@in_turn(0, of=2)
def test_a_configuration_of_ones_own_has_it_too(home: Path) -> None:
    config = write(home / "own" / "config.json", LLAMA)
    (row,) = estimate(model=str(config), gpus=1, strategy="ddp", precision="fp32", seq_len=128, gpu="H100").estimates
    assert NO_SCRATCH not in row.omissions
    kept = cache.fetch(LLAMA, None)
    assert kept is not None and replace(GPU, batch_is_one=True, at=(1, 128)).name in kept.tapes


@in_turn(1, of=2)
def test_a_filled_window_is_recorded_for_the_kernel_of_each_gpu_that_is_asked_about(home: Path) -> None:
    """A Hopper runs cuDNN's kernel under the window's mask, an Ampere another one."""
    own = {**LLAMA, "model_type": "mistral", "sliding_window": 64}
    config = write(home / "own" / "config.json", own)

    def recorded_for(gpu: str) -> set[tuple[str, str, bool]]:
        estimate(model=str(config), gpus=1, strategy="ddp", precision="bf16", seq_len=128, gpu=gpu)
        kept = cache.fetch(own, None)
        assert kept is not None
        keys = [TapeKey.from_name(name) for name in kept.tapes]
        return {(key.device, key.kernel, key.window_filled) for key in keys}

    on_hopper = {("cpu", "default", False), ("gpu", "cudnn", True)}
    assert recorded_for("H100") == on_hopper
    assert recorded_for("A100") == on_hopper | {("gpu", "default", True)}


@in_turn(1, of=2)
@pytest.mark.parametrize("key", [CPU, GPU], ids=lambda key: key.device)
def test_column_sums_allocate_a_workspace(key: TapeKey) -> None:
    """For the gradients of two norms and four biases, and freed again at once."""
    tape = tape_of(key, attention_bias=True, num_key_value_heads=2)
    layer = next(s for s in tape.segments if s.stack == 0 and s.phase == "backward")
    staged = [
        (at, tape.sizes[a]) for at, (op, a, _) in enumerate(layer.events) if op == Op.ALLOC and isinstance(tape.sizes[a], Staging)
    ]  # fmt: skip
    tokens = (0, 0, 0, 1, 0, 0)
    columns = sorted(size.columns[0] for _, size in staged)
    assert columns == [32, 32, 64, 64, 64, 64] and {size.rows for _, size in staged} == {tokens}
    assert all(layer.events[at + 1][0] == Op.FREE for at, _ in staged)
