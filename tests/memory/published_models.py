"""Models of published runs, with the same operators in the same order, because memory depends on these.

torchtitan's Llama is not transformers' Llama: rotary embedding in complex fp32, keys and values repeated before
attention, a norm of its own, checkpointing by operator, the loss outside the model. Source: pytorch/torchtitan,
torchtitan/models/llama/model.py and parallelisms/parallelize_llama.py at the commits that `published_memory.yaml`
names.

BERT's attention is transformers' before version 5, its softmax PyTorch's before 1.11.
"""

from __future__ import annotations

import contextlib
import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal
from unittest import mock

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from transformers.models.bert import modeling_bert

from fsdp_advisor.recording.flash import flash
from fsdp_advisor.recording.recorder import Recorder, record_module

Norm = Literal["own", "native", "fused"]


@dataclass(frozen=True, kw_only=True)
class Llama:
    """`norm`: torchtitan's own in fp32, `nn.RMSNorm` (before it was fused), or the Triton kernel (which saves its input alone).
    `checkpointing`: `operator` keeps every second matrix product and attention. `upcast`: the model returns fp32 logits.
    `folded`: batch and sequence are one dimension between the layers. `keeps_logits`: they live until backward is done.
    """

    vocabulary: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    inner: int
    norm: Norm = "own"
    checkpointing: Literal["none", "operator", "full"] = "operator"
    upcast: bool = False
    folded: bool = False
    keeps_logits: bool = False


SIZES: dict[str, dict[str, int]] = {
    "llama-7b": {"vocabulary": 32000, "hidden": 4096, "layers": 32, "heads": 32, "kv_heads": 32, "inner": 11008},
    "llama2-13b": {"vocabulary": 32000, "hidden": 5120, "layers": 40, "heads": 40, "kv_heads": 40, "inner": 13824},
    "llama2-70b": {"vocabulary": 32000, "hidden": 8192, "layers": 80, "heads": 64, "kv_heads": 8, "inner": 28672},
    "llama3-8b": {"vocabulary": 128256, "hidden": 4096, "layers": 32, "heads": 32, "kv_heads": 8, "inner": 14336},
    "llama3-70b": {"vocabulary": 128256, "hidden": 8192, "layers": 80, "heads": 64, "kv_heads": 8, "inner": 28672},
}


class OwnNorm(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).type_as(x) * self.weight


class FusedNorm(OwnNorm):
    """Its backward has one row of fp32 partial sums per multiprocessor."""

    class Kernel(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x, x.new_empty(x.shape[:-1], dtype=torch.float32), weight)
            return torch.empty_like(x)

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, ...]:
            x, _, weight = ctx.saved_tensors
            sums = x.new_empty((108, x.shape[-1]), dtype=torch.float32)
            return torch.empty_like(x), sums.sum(0).to(weight.dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.Kernel.apply(x, self.weight)
        return out


NORMS: dict[Norm, Callable[[int], nn.Module]] = {"own": OwnNorm, "native": nn.RMSNorm, "fused": FusedNorm}


def by_operator() -> Any:
    """A checkpointing policy that keeps attention and every second matrix product, and recomputes the rest."""
    products: defaultdict[bool, int] = defaultdict(int)
    attention, product = torch.ops.fsdp_advisor.flash_attention.default, torch.ops.aten.mm.default

    def policy(ctx: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        products[ctx.is_recompute] += operator == product
        kept = operator == attention or (operator == product and products[ctx.is_recompute] % 2 == 1)
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


class Block(nn.Module):
    def __init__(self, config: Llama) -> None:
        super().__init__()
        self.config, norm = config, NORMS[config.norm]
        hidden, kv_hidden = config.hidden, config.hidden // config.heads * config.kv_heads
        self.wq, self.wo = (nn.Linear(hidden, hidden, bias=False) for _ in range(2))
        self.wk, self.wv = (nn.Linear(hidden, kv_hidden, bias=False) for _ in range(2))
        self.w1, self.w3 = (nn.Linear(hidden, config.inner, bias=False) for _ in range(2))
        self.w2 = nn.Linear(config.inner, hidden, bias=False)
        self.attention_norm, self.ffn_norm = norm(hidden), norm(hidden)

    def forward(self, x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
        if self.config.checkpointing == "none":
            return self.run(x, rotation)
        more = {"context_fn": by_operator} if self.config.checkpointing == "operator" else {}
        out: torch.Tensor = checkpoint(self.run, x, rotation, use_reentrant=False, preserve_rng_state=False, **more)
        return out

    def run(self, x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
        b_and_t = (x.shape[0] * x.shape[1] if x.dim() == 3 else x.shape[0]) // rotation.shape[1], rotation.shape[1]
        y = self.attention_norm(x)
        q, k, v = (z.view(*b_and_t, -1, self.head_dim) for z in (self.wq(y), self.wk(y), self.wv(y)))
        q, k = self.rotated(q, rotation), self.rotated(k, rotation)
        out = flash(q, self.repeated(k), self.repeated(v)).contiguous()
        h = x + self.wo(out.view(x.shape))
        z = self.ffn_norm(h)
        return h + self.w2(F.silu(self.w1(z)) * self.w3(z))

    @property
    def head_dim(self) -> int:
        return self.config.hidden // self.config.heads

    def rotated(self, x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
        pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * rotation).flatten(3).type_as(x)

    def repeated(self, x: torch.Tensor) -> torch.Tensor:
        b, t, heads, dim = x.shape
        times = self.config.heads // heads
        if times == 1:
            return x
        return x[:, :, :, None, :].expand(b, t, heads, times, dim).reshape(b, t, heads * times, dim)


class Transformer(nn.Module):
    def __init__(self, config: Llama) -> None:
        super().__init__()
        self.config = config
        self.tok_embeddings = nn.Embedding(config.vocabulary, config.hidden)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = NORMS[config.norm](config.hidden)
        self.output = nn.Linear(config.hidden, config.vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        b, t = tokens.shape
        h = self.tok_embeddings(tokens)
        if self.config.folded:
            h = h.view(b * t, -1)
        rotation = torch.ones(1, t, 1, self.config.hidden // self.config.heads // 2, dtype=torch.complex64)
        for layer in self.layers:
            h = layer(h, rotation)
        logits: torch.Tensor = self.output(self.norm(h).view(b, t, -1))
        return logits.float() if self.config.upcast else logits


def recorder(config: Llama) -> Recorder:
    def batch(b: int, t: int) -> dict[str, torch.Tensor]:
        return {"tokens": torch.zeros(b, t, dtype=torch.long), "labels": torch.zeros(b, t, dtype=torch.long)}

    def loss(model: nn.Module, data: dict[str, torch.Tensor]) -> torch.Tensor:
        logits = model(data["tokens"])
        flat = logits.flatten(0, 1)
        found = F.cross_entropy(flat if config.upcast else flat.float(), data["labels"].flatten(0, 1))
        if config.keeps_logits:
            found.logits = logits  # type: ignore[attr-defined]  # they live as long as the loss
        return found

    return record_module(lambda: Transformer(config), batch, loss, (Block,), name="torchtitan's Llama")


class Softmax(torch.autograd.Function):
    """Softmax that saves its input in addition to its output, as PyTorch's did up to 1.10.

    Source: derivatives.yaml of that time, `self: _softmax_backward_data(grad, result, dim, self)`; pytorch/pytorch#64000, ended by
    pull 65242.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        out = F.softmax(x, dim=-1)
        ctx.save_for_backward(x, out)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        x, out = ctx.saved_tensors
        found: torch.Tensor = torch.ops.aten._softmax_backward_data(grads[0], out, -1, x.dtype)
        return found


def _attention(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, dropout: float, **__: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """BERT's attention. The mask has the dtype of the parameters, so after it scores are in fp32 even under autocast.

    Source: transformers 4.16, models/bert/modeling_bert.py, BertSelfAttention.forward.
    """
    scores = torch.matmul(query, key.transpose(-1, -2)) / math.sqrt(query.shape[-1])
    scores = scores + torch.zeros(query.shape[0], 1, 1, key.shape[-2])
    weights = F.dropout(Softmax.apply(scores), p=dropout, training=module.training)
    return torch.matmul(weights, value).transpose(1, 2).contiguous(), weights


@contextlib.contextmanager
def bert_of_2022() -> Iterator[None]:
    with mock.patch.object(modeling_bert, "eager_attention_forward", _attention):
        yield
