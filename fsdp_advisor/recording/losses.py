"""Losses that are computed without the whole logits, as training libraries compute them on a GPU.

Each class below allocates what the library's own code allocates; its kernels and matrix products, which write to storages that
exist, are left out, but for their work. A loss that runs in tiles of tokens is recorded with one tile, because the next ones use the
same storages again. All get hidden states (B, T, H), labels (B, T) and the head, and shift by one token as causal models do.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from fsdp_advisor.errors import NotRecordable
from fsdp_advisor.model.tape_key import TapeLoss
from fsdp_advisor.recording.source import RootModules, Source, WrappedSource
from fsdp_advisor.recording.tiles import Tile, sized_by

LIGER_MODELS = frozenset({
    "deepseek_v2", "deepseek_v3", "deepseek_v4", "gemma", "gemma2", "gemma3_text", "gemma3", "gemma4_text", "gemma4",
    "glm4", "glm4v", "glm4v_moe", "gpt_oss", "internvl", "llama", "llama4_text", "llama4", "llava", "granite",
    "mllama", "mllama_text_model", "ministral", "mistral", "mixtral", "muse_glimmer", "nemotron", "olmo2", "pixtral",
    "olmo3", "qwen2", "qwen3", "qwen3_moe", "qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text",
    "qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_vl", "qwen3_vl_text",
    "qwen3_vl_moe", "qwen3_vl_moe_text", "smollm3", "phi3", "paligemma", "falcon_h1", "smolvlm", "hunyuan_v1_dense",
    "hunyuan_v1_moe", "exaone4",
})  # fmt: skip
"""The types of models whose loss Liger replaces; it leaves others as they are. Source: liger-kernel 0.8.5,
transformers/monkey_patch.py, MODEL_TYPE_TO_APPLY_LIGER_FN."""

TILE_TOKENS, TILE_VOCABULARY = 4096, 32768
"""Tokens and vocabulary entries of a tile. Source: trl 1.16, kernels/chunked_logprob.py and trainer/utils.py."""


class FusedLoss(nn.Module):
    """Head and loss in one, called with hidden states and labels. It stands for the head: its call begins the loss."""

    def __init__(self, head: nn.Module, compute: Callable[..., torch.Tensor], ignored_labels: float) -> None:
        super().__init__()
        self.__dict__["head"] = head  # not a child: the head belongs to the model
        self._compute = compute
        self._ignored_labels = ignored_labels

    @property
    def weight(self) -> nn.Parameter:
        """The head's weight, by which tied embeddings are recognized."""
        weight: nn.Parameter = self.__dict__["head"].weight
        return weight

    def forward(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        head = self.__dict__["head"]
        tokens = labels.shape[0] * (labels.shape[1] - 1)
        scored = max(1, tokens - int(tokens * self._ignored_labels))
        return self._compute(hidden, head.weight, head.bias, labels, scored)


class LossSource(WrappedSource):
    """A causal language model whose forward computes one of these losses."""

    def __init__(self, base: Source, loss: TapeLoss, ignored_labels: float = 0.0) -> None:
        super().__init__(base)
        self._loss = loss
        self._ignored_labels = ignored_labels

    def configure(
        self, module: nn.Module, *, attention: str, checkpointing: bool, window_filled: bool | None = None
    ) -> None:
        self._base.configure(module, attention=attention, checkpointing=checkpointing, window_filled=window_filled)
        if self.task != "causal-lm":
            raise NotRecordable(
                f"{self.name}: losses in tiles are for causal language models, not for {self.task}",
                hint="use --loss full",
            )
        model = _causal_model(module, self.name)
        if self._loss == "liger" and model.config.model_type not in LIGER_MODELS:
            raise NotRecordable(
                f"{self.name}: Liger 0.8.5 has no loss for models of type {model.config.model_type}",
                hint="--loss cce works for every causal model",
            )
        head = model.get_output_embeddings()
        model.__dict__["fused_loss"] = FusedLoss(head, _LOSSES[self._loss], self._ignored_labels)
        model.forward = MethodType(_forward, model)

    def root_modules(self, module: nn.Module) -> RootModules:
        found = self._base.root_modules(module)
        fused = _causal_model(module, self.name).__dict__.get("fused_loss")
        return found if fused is None else RootModules(found.embedding, found.final_norm, fused)


def with_loss(source: Source, loss: TapeLoss, ignored_labels: float = 0.0) -> Source:
    """The source with this loss. Raises NotRecordable, when it is configured, for a model that is no causal language model."""
    return source if loss == "full" else LossSource(source, loss, ignored_labels)


def _causal_model(module: nn.Module, name: str) -> PreTrainedModel:
    for inner in module.modules():
        if isinstance(inner, PreTrainedModel) and isinstance(inner.get_output_embeddings(), nn.Linear):
            return inner
    raise NotRecordable(
        f"{name}: a fused loss needs a linear head over a vocabulary, which the model does not have",
        hint="--loss full works for every model",
    )


def _forward(self: PreTrainedModel, labels: torch.Tensor, **inputs: Any) -> CausalLMOutput:
    hidden = self.base_model(**inputs, use_cache=False).last_hidden_state
    return CausalLMOutput(loss=self.__dict__["fused_loss"](hidden, labels))


# The work of kernels that write to storages which exist


@torch.library.custom_op("fsdp_advisor::loss_product", mutates_args=())
def _product(hidden: torch.Tensor, weight: torch.Tensor, bytes_per_logit: int) -> None:
    """A matrix product of hidden states (N, H) and a weight (V, H), or of the same size, and a kernel over the logits.

    `bytes_per_logit`: what the product and the kernel write and read of each logit.
    """
    raise NotImplementedError("only its work is known")


@_product.register_fake
def _(hidden: torch.Tensor, weight: torch.Tensor, bytes_per_logit: int) -> None:
    return None


def _computes_in(hidden: torch.Tensor) -> torch.dtype:
    return torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else hidden.dtype


# TRL


def _of_trl(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, labels: torch.Tensor, scored: int
) -> torch.Tensor:
    """Log-probabilities in tiles. Source: trl 1.16, trainer/utils.py, `add_fused_lm_head`; sft_trainer.py, `compute_loss`."""
    tile = Tile.of(tuple(labels.shape), unscored=1, most=TILE_TOKENS)
    hidden, labels = hidden[:, :-1], labels[:, 1:]
    mask = labels != -100
    rows, columns = _indices(mask, scored)
    log_probs, entropy, is_top1 = _TiledLogProbs.apply(hidden[rows, columns], weight, bias, labels[rows, columns], tile)  # type: ignore[no-untyped-call]
    log_probs, entropy, is_top1 = (
        x.new_zeros(mask.shape).masked_scatter(mask, x) for x in (log_probs, entropy, is_top1)
    )
    loss: torch.Tensor = (-log_probs).sum()
    return loss / mask.sum().clamp(min=1)


def _indices(mask: torch.Tensor, count: int) -> tuple[torch.Tensor, ...]:
    """The rows and columns of the true elements, which are `count`; fake tensors have no values."""
    found = mask.new_empty((count, 2), dtype=torch.long)
    return found.unbind(1)


class _TiledLogProbs(torch.autograd.Function):
    """`ChunkedLogProbFunction` of trl 1.16 (kernels/chunked_logprob.py) with the outputs of its SFTTrainer.

    hidden (N, H), weight (V, H), targets (N). A tile of the logits is folded into statistics per token; backward computes it again
    and adds its products to gradients in fp32.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        tile: Tile,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        ctx.set_materialize_grads(False)
        ctx.dtype, ctx.tile = _computes_in(hidden), tile
        largest, total, weighted, _, _, before_target, target = (
            torch.zeros((hidden.shape[0],), dtype=torch.float32) for _ in range(7)
        )
        buffers = _tile_of(hidden, tile, ctx.dtype)
        for first in range(0, weight.shape[0], TILE_VOCABULARY):
            part = weight[first : first + TILE_VOCABULARY].to(ctx.dtype)
            _product(hidden, part, 3 * ctx.dtype.itemsize)
            del part
        log_z = largest + torch.log(total)
        log_probs = target - log_z
        entropy = log_z - weighted / total
        is_top1 = (target >= largest) & (target > before_target)
        ctx.save_for_backward(hidden, weight, bias, targets, log_z, entropy)
        ctx.mark_non_differentiable(is_top1)
        del buffers
        return log_probs, entropy, is_top1

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, bias, *_ = ctx.saved_tensors
        for_hidden, for_weight, for_bias = (
            torch.zeros(x.shape, dtype=torch.float32) if needed else None
            for x, needed in zip((hidden, weight, bias), ctx.needs_input_grad[:3], strict=True)
        )
        buffers = _tile_of(hidden, ctx.tile, ctx.dtype)
        for first in range(0, weight.shape[0], TILE_VOCABULARY):
            part = weight[first : first + TILE_VOCABULARY].to(ctx.dtype)  # the part before is still alive
            _product(hidden, part, 4 * ctx.dtype.itemsize)
            for gradient in (for_hidden, for_weight):
                if gradient is not None:
                    _product(hidden, part, ctx.dtype.itemsize)
        results = [
            gradient.to(x.dtype) if gradient is not None else None
            for gradient, x in zip((for_hidden, for_weight, for_bias), (hidden, weight, bias), strict=True)
        ]
        del buffers
        return (*results, None, None)


def _tile_of(hidden: torch.Tensor, tile: Tile, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The logits of a tile, and its hidden states, if they are cast."""
    with sized_by(tile):
        logits = torch.empty((tile.tokens, TILE_VOCABULARY), dtype=dtype)
        return logits, torch.empty((tile.tokens, hidden.shape[1]), dtype=dtype) if hidden.dtype != dtype else None


# Liger


def _of_liger(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, labels: torch.Tensor, scored: int
) -> torch.Tensor:
    """Source: liger-kernel 0.8.5, transformers/model/loss_utils.py, `LigerForCausalLMLoss` with `num_items_in_batch`."""
    vocabulary, width = weight.shape
    tile = Tile.of(tuple(labels.shape), parts=-(-vocabulary // width))
    shifted = nn.functional.pad(labels, (0, 1), value=-100)[..., 1:].contiguous()
    loss: torch.Tensor = _LigerLoss.apply(hidden.view(-1, width), weight, bias, shifted.view(-1), tile)  # type: ignore[no-untyped-call]
    return loss / torch.empty((), dtype=torch.long)


class _LigerLoss(torch.autograd.Function):
    """`LigerFusedLinearCrossEntropyFunction` of liger-kernel 0.8.5 (ops/fused_linear_cross_entropy.py): forward computes the
    gradients too, tile by tile, in the parameter's dtype.

    hidden (N, H), weight (V, H), targets (N). A tile has as many tokens as make its logits about as large as the hidden states.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        tile: Tile,
    ) -> torch.Tensor:
        for_hidden = torch.zeros_like(hidden)
        trains = hidden.requires_grad
        for_weight = torch.zeros_like(weight) if trains and weight.requires_grad else None
        for_bias = torch.zeros_like(bias) if trains and bias is not None else None
        losses = torch.zeros(hidden.shape[0], dtype=torch.float32)
        mask = targets != -100
        dtype = _computes_in(hidden)
        in_place = hidden.dtype == weight.dtype == dtype and (bias is None or bias.dtype == dtype)
        for _ in range(1 if in_place else 2):  # autocast's cache makes the second tile differ from the first
            logits = _logits(hidden, weight, bias, tile, dtype, in_place)
            if trains and not in_place:
                _product_of_casts(hidden, weight, tile, dtype)
            if for_weight is not None and dtype == torch.float32:  # no kernel adds to it
                for_weight += torch.empty_like(weight).float()
            elif for_weight is not None and hidden.dtype != dtype:
                with sized_by(tile):
                    factor = torch.empty((tile.tokens, hidden.shape[1]), dtype=dtype)
                del factor
            if not in_place:
                del logits
        for trained in (True, trains, for_weight is not None):
            if trained:
                _product(hidden, weight, 2 * dtype.itemsize)
        del mask
        loss = torch.sum(losses)
        ctx.save_for_backward(for_hidden, for_weight, for_bias)
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """The gradients of forward; a kernel scales them in place."""
        return (*ctx.saved_tensors, None, None)


def _logits(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    tile: Tile,
    dtype: torch.dtype,
    in_place: bool,
) -> torch.Tensor:
    """A tile's logits. Unless they are computed in place, autocast casts hidden states and weight in each tile."""
    vocabulary, width = weight.shape
    with sized_by(tile):
        part = torch.empty((tile.tokens, width), dtype=dtype) if hidden.dtype != dtype else None
    cast = weight.to(dtype) if not in_place else None
    with sized_by(tile):
        logits = torch.empty((tile.tokens, vocabulary), dtype=dtype)
        del part, cast
        return logits if in_place or bias is None else torch.empty_like(logits)


def _product_of_casts(hidden: torch.Tensor, weight: torch.Tensor, tile: Tile, dtype: torch.dtype) -> None:
    """The product of a tile's logits and the weight before it is copied to the gradient. Autocast keeps the weight's cast."""
    torch.mm(weight.new_empty((1, weight.shape[0]), dtype=dtype), weight)
    with sized_by(tile):
        product = torch.empty((tile.tokens, hidden.shape[1]), dtype=dtype)
    del product


# Cut cross entropy


def _of_cce(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, labels: torch.Tensor, scored: int
) -> torch.Tensor:
    """Source: cut-cross-entropy 25.1.1, cce.py, `cce_linear_cross_entropy(shift=True)`, with the mean over tokens."""
    if bias is not None:
        raise NotRecordable(
            "cut cross entropy has no head with a bias",
            hint="--loss liger or chunked has one; --loss full works always",
        )
    half = hidden.dtype if hidden.dtype != torch.float32 else torch.bfloat16  # its kernels accept only half precision
    valid = _valid_tokens(labels, scored)
    loss: torch.Tensor = _CutCrossEntropy.apply(hidden.to(half).contiguous().flatten(0, -2), weight, labels, valid)  # type: ignore[no-untyped-call]
    return loss


def _valid_tokens(labels: torch.Tensor, scored: int) -> torch.Tensor:
    """The numbers of the tokens with a label, in int32. Source: utils.py, `_build_flat_valids`."""
    mask = labels[..., 1:] != -100
    valid = mask.new_empty((scored, 2), dtype=torch.long).to(torch.int32)
    del mask
    return valid.sum(1)


class _CutCrossEntropy(torch.autograd.Function):
    """`LinearCrossEntropyFunction`: the logits exist only in registers. hidden (N, H), weight (V, H), `valid`: labelled tokens."""

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, valid: torch.Tensor
    ) -> torch.Tensor:
        tokens, vocabulary = valid.shape[0], weight.shape[0]
        lse = hidden.new_zeros((tokens,), dtype=torch.float32)
        locks = hidden.new_zeros((-(-tokens // 128),), dtype=torch.int32)
        averages = hidden.new_zeros((vocabulary,), dtype=torch.float32)
        _product(hidden, weight, 0)  # the logits stay in registers
        del locks
        losses = hidden.new_zeros((tokens,), dtype=torch.float32)
        losses.add_(lse)
        ctx.save_for_backward(hidden, weight, lse, targets, valid, averages)
        return losses.mean()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, _, _, valid, averages = ctx.saved_tensors
        order = torch.argsort(averages).to(torch.int32)
        for_hidden = torch.zeros_like(hidden)
        for_weight = torch.zeros_like(weight, dtype=hidden.dtype) if ctx.needs_input_grad[1] else None
        parts = -(-weight.shape[1] // 64)
        locks = [
            hidden.new_zeros((-(-rows // parts), parts), dtype=torch.int32)
            for rows in (valid.shape[0], weight.shape[0])
        ]
        for _ in range(3 if for_weight is not None else 2):  # the logits again, and each gradient
            _product(hidden, weight, 0)
        del order, locks
        return for_hidden, for_weight.to(weight.dtype) if for_weight is not None else None, None, None


_LOSSES: dict[TapeLoss, Callable[..., torch.Tensor]] = {"trl": _of_trl, "liger": _of_liger, "cce": _of_cce}
