"""Peaks of single operators as Liger's benchmarks measure them: forward and backward, several times, in steady state.

Argument: a list of (id, kernel, provider, settings) as JSON. Prints the peak bytes by id, as JSON.
Source: Liger-Kernel, benchmark/scripts.
"""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledMLP
from liger_kernel.transformers.geglu import LigerGEGLUMLP
from liger_kernel.transformers.rope import liger_rotary_pos_emb
from liger_kernel.transformers.swiglu import LigerSwiGLUMLP
from liger_kernel.transformers.tiled_mlp import LigerTiledSwiGLUMLP
from torch import nn
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

Run = Callable[[], None]
CALLS = 3
"""Calls of an operator. Gradients exist after the first one."""


def _random(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=dtype, requires_grad=True)


def _called(module: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> Run:
    def run() -> None:
        y = module(x)
        y.backward(torch.randn_like(y), retain_graph=True)

    return run


def cross_entropy(provider: str, settings: dict[str, Any], dtype: torch.dtype) -> Run:
    tokens, vocabulary = settings["B"] * settings["T"], settings["V"]
    logits = _random(tokens, vocabulary, dtype=torch.float32)
    labels = torch.randint(vocabulary, (tokens,), device="cuda")

    def run() -> None:
        nn.CrossEntropyLoss()(logits, labels).backward()

    return run


class _DeepSpeedMlp(LlamaMLP):  # type: ignore[misc]  # transformers is not installed where types are checked
    """An MLP that DeepSpeed runs in shards of the sequence."""

    shards = 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def mlp(inner: Any, part: torch.Tensor) -> torch.Tensor:
            return LlamaMLP.forward(inner, part)

        return TiledMLP.apply(mlp, self, x, self.shards, list(self.parameters()))


def mlp(provider: str, settings: dict[str, Any], dtype: torch.dtype) -> Run:
    config = LlamaConfig(**{name: settings[name] for name in ("hidden_size", "intermediate_size", "hidden_act")})
    shards = settings.get("num_shards")
    match provider:
        case "deepspeed_tiled":
            module = _DeepSpeedMlp(config)
            module.shards = shards
        case "liger_tiled":
            module = LigerTiledSwiGLUMLP(config, num_shards=shards)
        case _:
            module = (LigerSwiGLUMLP if settings["hidden_act"] == "silu" else LigerGEGLUMLP)(config)
    batch = settings["bsz"] if "bsz" in settings else settings["B"]
    return _called(module.to("cuda").to(dtype), _random(batch, settings["T"], settings["hidden_size"], dtype=dtype))


def rms_norm(provider: str, settings: dict[str, Any], dtype: torch.dtype) -> Run:
    module = LlamaRMSNorm(settings["H"], eps=settings["eps"]).to("cuda")  # its weight stays in fp32
    x = _random(settings["M"], settings["H"], dtype=dtype)
    gradient = torch.randn_like(x)

    def run() -> None:
        y = module(x)
        y.backward(gradient, retain_graph=True)

    return run


def rope(provider: str, settings: dict[str, Any], dtype: torch.dtype) -> Run:
    heads, shared = settings["num_q_heads"], settings["num_kv_heads"]
    length, size = settings.get("seq_len", settings.get("T")), settings.get("hidden_size", settings.get("H"))
    width = size // heads
    q, k = (_random(1, length, number, width, dtype=dtype).transpose(1, 2) for number in (heads, shared))
    gradients = torch.randn_like(q), torch.randn_like(k)
    positions = torch.arange(length, device="cuda").unsqueeze(0)
    frequencies = 10_000.0 ** -(torch.arange(0, width, 2, device="cuda") / width)
    # the product in transformers' code of 2024
    angles = (frequencies[None, :, None] @ positions[:, None, :].float()).transpose(1, 2)
    cos, sin = (function(torch.cat((angles, angles), dim=-1)).to(dtype) for function in (torch.cos, torch.sin))

    def run() -> None:
        rotated = liger_rotary_pos_emb(q, k, cos, sin, positions)
        torch.autograd.grad(rotated, (q, k), gradients, allow_unused=True, retain_graph=True)

    return run


KERNELS: dict[str, Callable[[str, dict[str, Any], torch.dtype], Run]] = {
    "cross_entropy": cross_entropy, "geglu": mlp, "swiglu": mlp, "tiled_geglu": mlp, "tiled_swiglu": mlp,
    "rms_norm": rms_norm, "rope": rope,
}  # fmt: skip


def peaks(rows: list[list[Any]]) -> Iterator[tuple[str, int]]:
    """The id of each row, and the peak of its last call."""
    for number, kernel, provider, settings in rows:
        gc.collect()
        torch.cuda.empty_cache()
        torch._C._cuda_clearCublasWorkspaces()  # each benchmark runs in its own process
        dtype = getattr(torch, settings.get("dtype", "torch.float32").removeprefix("torch."))
        run = KERNELS[kernel](provider, settings, dtype)
        for _ in range(CALLS):
            torch.cuda.reset_peak_memory_stats()
            run()
        yield number, torch.cuda.max_memory_allocated()
        del run


if __name__ == "__main__":
    print("FOUND", json.dumps(dict(peaks(json.loads(sys.argv[1])))))
