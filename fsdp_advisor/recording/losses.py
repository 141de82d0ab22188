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
from fsdp_advisor.model.tape_key import TapeCheckpointing, TapeLoss
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

    def __init__(
        self,
        head: nn.Module,
        compute: Callable[..., Any],
        ignored_labels: float,
        gathered_head: str = "",
        completion_length: int = 0,
    ) -> None:
        """`gathered_head`: the dtype in which the loss gathers the weight; empty if FSDP does. `completion_length`: the tokens of each
        sequence that have labels; 0 for all but the ignored ones. `examples`: how many sequences the labels have and how long they are,
        also if they are in one row; None if the labels' shape says so.
        """
        super().__init__()
        self.__dict__["head"] = head  # not a child: the head belongs to the model
        self._compute = compute
        self._ignored_labels = ignored_labels
        self.gathered_head = gathered_head
        self._completion_length = completion_length
        self.examples: tuple[int, int] | None = None

    @property
    def weight(self) -> nn.Parameter:
        """The head's weight, by which tied embeddings are recognized."""
        weight: nn.Parameter = self.__dict__["head"].weight
        return weight

    def forward(self, hidden: torch.Tensor, labels: torch.Tensor) -> Any:
        """What `compute` returns: the loss, or log-probabilities and more by name."""
        head = self.__dict__["head"]
        sequences, length = self.examples or tuple(labels.shape)
        tokens = sequences * (length - 1)
        scored = self._completion_length * sequences or max(1, tokens - int(tokens * self._ignored_labels))
        weight = head.weight
        if self.gathered_head:  # `DTensor.full_tensor`
            weight = weight.to(getattr(torch, self.gathered_head), copy=True)
        return self._compute(hidden, weight, head.bias, labels, scored, (sequences, length))


class LossSource(WrappedSource):
    """A causal language model whose forward computes one of these losses."""

    def __init__(self, base: Source, loss: TapeLoss, ignored_labels: float = 0.0, gathered_head: str = "") -> None:
        super().__init__(base)
        self._loss = loss
        self._ignored_labels = ignored_labels
        self._gathered_head = gathered_head

    def configure(
        self, module: nn.Module, *, attention: str, checkpointing: TapeCheckpointing, window_filled: bool | None = None
    ) -> None:
        self._base.configure(module, attention=attention, checkpointing=checkpointing, window_filled=window_filled)
        if self.task != "causal-lm":
            raise NotRecordable(
                f"{self.name}: losses in tiles are for causal language models, not for {self.task}",
                hint="use --loss full",
            )
        model = causal_model(module, self.name)
        if self._loss == "liger" and model.config.model_type not in LIGER_MODELS:
            raise NotRecordable(
                f"{self.name}: Liger 0.8.5 has no loss for models of type {model.config.model_type}",
                hint="--loss cce works for every causal model",
            )
        head = model.get_output_embeddings()
        compute = _LOSSES[self._loss]
        model.__dict__["fused_loss"] = FusedLoss(head, compute, self._ignored_labels, self._gathered_head)
        model.forward = MethodType(_forward, model)

        self._fused = model.__dict__["fused_loss"]

    def batch(self, micro_batch_size: int, seq_len: int) -> dict[str, torch.Tensor]:
        self._fused.examples = micro_batch_size, seq_len
        return self._base.batch(micro_batch_size, seq_len)

    def root_modules(self, module: nn.Module) -> RootModules:
        found = self._base.root_modules(module)
        fused = causal_model(module, self.name).__dict__.get("fused_loss")
        return found if fused is None else RootModules(found.embedding, found.final_norm, fused)


def with_loss(source: Source, loss: TapeLoss, ignored_labels: float = 0.0, gathered_head: str = "") -> Source:
    """The source with this loss. Raises NotRecordable, when it is configured, for a model that is no causal language model."""
    if loss == "torchtitan":
        from fsdp_advisor.recording.torchtitan_models import ChunkedLossSource

        return ChunkedLossSource(source)
    return source if loss == "full" else LossSource(source, loss, ignored_labels, gathered_head)


def causal_model(module: nn.Module, name: str) -> PreTrainedModel:
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
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    scored: int,
    examples: tuple[int, int],
) -> torch.Tensor:
    """Log-probabilities in tiles. Source: trl 1.16, trainer/utils.py, `add_fused_lm_head`; sft_trainer.py, `compute_loss`."""
    outputs = ("log_probs", "entropy", "is_top1")
    return log_probs_of_trl(hidden, weight, bias, labels, scored, examples, outputs=outputs)["loss"]


def log_probs_of_trl(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    scored: int,
    examples: tuple[int, int],
    *,
    outputs: tuple[str, ...],
    sequences: int = 1,
    unscored: int = 1,
) -> dict[str, torch.Tensor]:
    """The outputs of a model with TRL's head, by name. Source: trl 1.16, trainer/utils.py, `add_fused_lm_head`.

    `examples`: how many sequences the labels have and how long they are. `sequences`: how many the batch has for each of its B examples.
    `unscored`: the tokens of a sequence without scores.
    """
    tile = Tile.of(examples, unscored=unscored, most=TILE_TOKENS, sequences=sequences)
    hidden, labels = hidden[:, :-1], labels[:, 1:]
    mask = labels != -100
    rows, columns = _indices(mask, scored)
    computed = _TiledLogProbs.apply(hidden[rows, columns], weight, bias, labels[rows, columns], tile, outputs)  # type: ignore[no-untyped-call]
    found = {
        name: x.new_zeros(mask.shape).masked_scatter(mask, x)
        for name, x in zip(OUTPUTS, computed, strict=True)
        if x is not None
    }
    del computed
    return {"loss": (-found["log_probs"]).sum() / mask.sum().clamp(min=1), **found}


def _indices(mask: torch.Tensor, count: int) -> tuple[torch.Tensor, ...]:
    """The rows and columns of the true elements, which are `count`; fake tensors have no values."""
    found = mask.new_empty((count, 2), dtype=torch.long)
    return found.unbind(1)


OUTPUTS = ("log_probs", "entropy", "mean_logits", "is_top1")
"""What TRL's head computes of each token; a trainer asks for some of it."""


class _TiledLogProbs(torch.autograd.Function):
    """`ChunkedLogProbFunction` of trl 1.16 (kernels/chunked_logprob.py).

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
        outputs: tuple[str, ...],
    ) -> tuple[torch.Tensor | None, ...]:
        ctx.set_materialize_grads(False)
        ctx.dtype, ctx.tile = _computes_in(hidden), tile
        largest, total, weighted, _, summed, before_target, target = (
            torch.zeros((hidden.shape[0],), dtype=torch.float32) for _ in range(7)
        )
        buffers = _tile_of(hidden, tile, ctx.dtype)
        for first in range(0, weight.shape[0], TILE_VOCABULARY):
            part = weight[first : first + TILE_VOCABULARY].to(ctx.dtype)
            _product(hidden, part, 3 * ctx.dtype.itemsize)
            del part
        log_z = largest + torch.log(total)
        log_probs = target - log_z
        entropy = log_z - weighted / total if "entropy" in outputs else None
        mean_logits = summed / weight.shape[0] if "mean_logits" in outputs else None
        is_top1 = (target >= largest) & (target > before_target) if "is_top1" in outputs else None
        ctx.save_for_backward(hidden, weight, bias, targets, log_z, log_z if entropy is None else entropy)
        ctx.mark_non_differentiable(*(x for x in (mean_logits, is_top1) if x is not None))
        del buffers
        return log_probs, entropy, mean_logits, is_top1

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
        return (*results, None, None, None)


def _tile_of(hidden: torch.Tensor, tile: Tile, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The logits of a tile, and its hidden states, if they are cast."""
    with sized_by(tile):
        logits = torch.empty((tile.tokens, TILE_VOCABULARY), dtype=dtype)
        return logits, torch.empty((tile.tokens, hidden.shape[1]), dtype=dtype) if hidden.dtype != dtype else None


# Liger


def _of_liger(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    scored: int,
    examples: tuple[int, int],
) -> torch.Tensor:
    """Source: liger-kernel 0.8.5, transformers/model/loss_utils.py, `LigerForCausalLMLoss` with `num_items_in_batch`."""
    vocabulary, width = weight.shape
    tile = Tile.of(examples, parts=-(-vocabulary // width))
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
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    scored: int,
    examples: tuple[int, int],
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
