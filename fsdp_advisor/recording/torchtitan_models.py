"""torchtitan's own model of a configuration, with its own losses and activation checkpointing.

torchtitan trains its own classes (torchtitan/models) instead of transformers'. They have other parameters and allocate other tensors: one
product makes queries, keys and values; rotary embeddings are complex numbers in fp32 (Llama), and every layer keeps a table of them; the
norm is PyTorch's fused one. Its language models use FlexAttention by default.
Source: torchtitan 0.3.0, models/llama3, models/qwen3, models/common, trainer.py. With torch 2.13 its FSDP2 runs with
`--parallelism.spmd_backend partial_dtensor`; the default spmd_types needs a later torch and allocates the same.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Mapping
from importlib import metadata
from typing import Any
from unittest.mock import MagicMock

import torch
from torch import nn
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from fsdp_advisor.errors import MissingExtra, NoSuchAttention, NotRecordable, assert_never
from fsdp_advisor.job.adaptation import CONFIG_KEY
from fsdp_advisor.job.frameworks import TORCHTITAN_CHUNKS
from fsdp_advisor.model.tape_key import TapeCheckpointing
from fsdp_advisor.recording.flash import flex
from fsdp_advisor.recording.source import LayerStack, RootModules, WrappedSource
from fsdp_advisor.recording.transformers_models import TransformersSource

VERSION = "0.3"
INSTALL = "with Python 3.11 or newer: pip install tyro spmd_types==0.2.3 && pip install --no-deps torchtitan==0.3.0"
"""torchtitan's requirements contain a data set library that current transformers refuses."""
FAMILIES = ("llama", "qwen3")
"""The model types of transformers whose torchtitan class is modelled."""


class TorchtitanSource:
    """The model that torchtitan builds with the sizes of a transformers configuration."""

    inventory_dtype = torch.float32
    alike_up_to: int | None = None
    min_seq_len: int = 1
    needs_values: bool = False
    expert_imbalance: float | None = None
    task = "causal-lm"

    def __init__(self, base: TransformersSource, adaptation: Mapping[str, Any]) -> None:
        """Raises MissingExtra without torchtitan, NotRecordable for a model that torchtitan has no class for."""
        self.name = base.name
        self.max_seq_len = base.max_seq_len
        self._hf = base._config
        self._recorded_as = {**base.config(), CONFIG_KEY: dict(adaptation)}
        if self._hf.model_type not in FAMILIES:
            raise NotRecordable(
                f"{self.name}: torchtitan's models of type {self._hf.model_type} are not modelled",
                hint=f"modelled are {' and '.join(FAMILIES)}; --framework torch estimates transformers' class",
            )
        if getattr(self._hf, "attention_bias", False) or getattr(self._hf, "mlp_bias", False):
            raise NotRecordable(
                f"{self.name}: torchtitan's {self._hf.model_type} has no biases", hint="--framework torch has them"
            )
        _check_installed(self.name)

    def config(self) -> dict[str, object]:
        return self._recorded_as

    def is_added(self, parameter: str) -> bool:
        return False

    def build(self, dtype: torch.dtype) -> nn.Module:
        from torchtitan.models.common import RoPE

        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            with torch.device("meta"):
                model: nn.Module = self._model_config().build()
                for module in model.modules():
                    if isinstance(module, RoPE):
                        _detach_table(module)
        finally:
            torch.set_default_dtype(before)
        return model.train()

    def _model_config(self) -> Any:
        """The configuration of torchtitan's model. Source: models/llama3/__init__.py and models/qwen3/__init__.py, e.g. `_8b`."""
        from torchtitan.models.common import ComplexRoPE, CosSinRoPE, Embedding, Linear
        from torchtitan.models.common.config_utils import get_attention_config, make_ffn_config, make_gqa_config
        from torchtitan.models.common.nn_modules import RMSNorm

        hf = self._hf
        dim, heads, vocabulary = hf.hidden_size, hf.num_attention_heads, hf.vocab_size
        head_dim = getattr(hf, "head_dim", None) or dim // heads
        length = self.max_seq_len or 2048
        if hf.model_type == "llama":
            from torchtitan.models.llama3.model import Llama3Model as Model
            from torchtitan.models.llama3.model import Llama3TransformerBlock as Block

            rope = ComplexRoPE.Config(dim=head_dim, max_seq_len=length)
            norm_of_heads = None
        else:
            from torchtitan.models.qwen3.model import Qwen3Model as Model
            from torchtitan.models.qwen3.model import Qwen3TransformerBlock as Block

            rope = CosSinRoPE.Config(dim=head_dim, max_seq_len=length)
            norm_of_heads = RMSNorm.Config(normalized_shape=head_dim)

        def layer() -> Any:
            return Block.Config(
                attention_norm=RMSNorm.Config(normalized_shape=dim),
                ffn_norm=RMSNorm.Config(normalized_shape=dim),
                attention=make_gqa_config(
                    dim=dim, n_heads=heads, n_kv_heads=hf.num_key_value_heads, head_dim=getattr(hf, "head_dim", None),
                    wqkv_param_init={}, wo_param_init={}, inner_attention=get_attention_config("flex"), fuse_qkv=True,
                    qk_norm=norm_of_heads, rope=rope,
                ),
                feed_forward=make_ffn_config(dim=dim, hidden_dim=hf.intermediate_size, w1_param_init={}, w2w3_param_init={}),
            )  # fmt: skip

        return Model.Config(
            dim=dim,
            vocab_size=vocabulary,
            enable_weight_tying=hf.tie_word_embeddings,
            tok_embeddings=Embedding.Config(num_embeddings=vocabulary, embedding_dim=dim),
            norm=RMSNorm.Config(normalized_shape=dim),
            lm_head=Linear.Config(in_features=dim, out_features=vocabulary),
            layers=[layer() for _ in range(hf.num_hidden_layers)],
        )

    def stacks(self, module: nn.Module) -> list[LayerStack]:
        return [LayerStack("layers", tuple(module.get_submodule("layers").children()))]

    def keep_layers(self, module: nn.Module, kept: Mapping[str, list[int]]) -> None:
        layers = module.get_submodule("layers")
        for name in [name for name, _ in layers.named_children() if int(name) not in kept["layers"]]:
            del layers._modules[name]

    def configure(
        self, module: nn.Module, *, attention: str, checkpointing: TapeCheckpointing, window_filled: bool | None = None
    ) -> None:
        from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
        from torchtitan.models.common.attention import FlexAttention

        if attention != "sdpa":
            raise NoSuchAttention(type(module).__name__, attention)
        for inner in module.modules():
            if isinstance(inner, FlexAttention):
                inner.forward = _flex_attention
        match checkpointing:
            case "none":
                pass
            case "full":
                FullAC.Config().build().apply(module)
            case "selective":
                policy = SelectiveAC.Config().build()
                # FlexAttention is a compiled graph, which returns its output and the tensors saved for backward, among them its inputs
                flex_attention = {torch.ops.fsdp_advisor.flash_attention.default, torch.ops.aten.alias.default}
                kept = {*policy.get_save_ops(), *flex_attention}
                policy.get_save_ops = lambda: kept
                policy.apply(module)
            case "full-accelerate" | "reentrant" | "every" | "selective-trl":
                raise AssertionError(f"torchtitan has no checkpointing {checkpointing}")
            case _:
                assert_never(checkpointing)

    def loss(self, module: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """The loss of whole logits. Source: torchtitan 0.3.0, trainer.py, `_forward_backward_body`; components/loss.py."""
        from torchtitan.components.loss import CrossEntropyLoss

        loss: torch.Tensor
        criterion = CrossEntropyLoss.Config().build()
        _compile_loss(criterion, batch)
        loss, _ = criterion(_output(module, batch), batch["labels"], batch["valid_tokens"])
        return loss

    def batch(self, micro_batch_size: int, seq_len: int) -> dict[str, torch.Tensor]:
        """Tokens, the positions in their documents, labels, and the number of tokens with a label on all ranks.

        Also every layer's table of rotary embeddings: it is a buffer with one row for each token of the job's sequences
        (models/common/decoder.py, `update_from_config`), in complex64, or in fp32 a cosine and a sine per element.
        """
        names = ("input_ids", "positions", "labels")
        rows = {name: torch.zeros(micro_batch_size, seq_len, dtype=torch.long) for name in names}
        hf = self._hf
        head_dim = getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads
        words = head_dim if hf.model_type == "llama" else 2 * head_dim
        # integers, which no engine casts
        tables = {f"table {n}": torch.empty(seq_len, words, dtype=torch.int32) for n in range(hf.num_hidden_layers)}
        return rows | {"valid_tokens": torch.zeros((), dtype=torch.long)} | tables

    def root_modules(self, module: nn.Module) -> RootModules:
        embedding, norm, head = (module.get_submodule(name) for name in ("tok_embeddings", "norm", "lm_head"))
        return RootModules(embedding, norm, head)


class ChunkedLossSource(WrappedSource):
    """A model of torchtitan with the loss in chunks of a sequence. Its forward also computes the gradients of the head and of the hidden
    states; backward continues from these.

    Source: torchtitan 0.3.0, components/loss.py, `ChunkedLossWrapper`, the default of its language models.
    """

    def loss(self, module: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        from torchtitan.components.loss import ChunkedLossWrapper

        compute = ChunkedLossWrapper.Config(num_chunks=TORCHTITAN_CHUNKS).build()
        _compile_loss(compute.loss_fn, batch)
        compute.set_lm_head(module.get_submodule("lm_head"))
        module._skip_lm_head = True  # type: ignore[assignment]  # of torchtitan's Decoder
        hidden = _output(module, batch)
        loss: torch.Tensor
        loss, _ = compute(hidden, batch["labels"], batch["valid_tokens"], positions=batch["positions"])
        return loss


class CompiledSource(WrappedSource):
    """A model of torchtitan whose layers and loss are compiled. FlexAttention is then a part of each layer's graph. Inputs of the graph
    are the block masks: four tables of the pairs of blocks of 128 tokens, the number of blocks in each row, and the last token of each
    token's document.

    Source: torchtitan 0.3.0, distributed/compile.py; config/configs.py, CompileConfig.components; models/common/decoder.py,
    `_create_flex_attention_mask_for_document`.
    """

    def batch(self, micro_batch_size: int, seq_len: int) -> dict[str, torch.Tensor]:
        blocks = -(-seq_len // BLOCK)
        shapes = {"num_blocks": (micro_batch_size, 1, blocks), "indices": (micro_batch_size, 1, blocks, blocks)}
        masks = {
            f"{kind}_{name}": torch.zeros(shape, dtype=torch.int32)
            for kind in _KINDS_OF_BLOCKS
            for name, shape in shapes.items()
        }
        ends = torch.zeros(micro_batch_size, seq_len, dtype=torch.int32)
        return super().batch(micro_batch_size, seq_len) | masks | {"document_ends": ends}


BLOCK = 128
"""Tokens in a block of FlexAttention's masks. Source: torch 2.13, nn/attention/flex_attention.py, _DEFAULT_SPARSE_BLOCK_SIZE."""
_KINDS_OF_BLOCKS = ("kv", "full_kv", "q", "full_q")


def _output(module: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The output of the model. It gets block masks if the batch has their tables."""
    masks = None
    if (ends := batch.get("document_ends")) is not None:

        def causal_in_documents(b: Any, h: Any, query: Any, key: Any) -> Any:
            return (key <= query) & (query <= ends[b, key])

        tables: Any = {
            name: batch[name] for kind in _KINDS_OF_BLOCKS for name in (f"{kind}_num_blocks", f"{kind}_indices")
        }
        length = batch["input_ids"].shape[1]
        masks = BlockMask((length, length), mask_mod=causal_in_documents, **tables)
    output: torch.Tensor = module(batch["input_ids"], positions=batch["positions"], attention_masks=masks)
    return output


def _compile_loss(criterion: Any, batch: dict[str, torch.Tensor]) -> None:
    """Compile a loss of torchtitan if a key of the batch says that the layers are compiled."""
    if "document_ends" in batch:
        from fsdp_advisor.recording.compiled import compile_function

        criterion.fn = compile_function(criterion.fn)


def _detach_table(rope: Any) -> None:
    """Replace the buffer of a table of rotary embeddings by an empty tensor, because `batch` already counts the tables."""
    table = rope._buffers.pop("cache")
    rope.cache = table[:0]


def _flex_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **inputs: Any) -> torch.Tensor:
    """`FlexAttention.forward` with the compiled kernel's allocations, or in compiled layers the operator of their graph.

    q, k, v have shape (B, T, H, D). A policy of selective checkpointing that keeps the outputs of the compiled graph also keeps q, k and
    v, because the graph's forward returns them for its backward. Source: torch 2.13, _higher_order_ops/wrap.py, `InductorCompiledCode`;
    torchtitan 0.3.0, models/common/attention.py, `inductor_configs`.
    """
    if (mask := inputs.get("attention_masks")) is None:
        return flex(*(torch.ops.aten.alias.default(x) for x in (q, k, v)))
    queries, keys, values = (x.transpose(1, 2) for x in (q, k, v))
    out, _ = flex_attention(
        queries,
        keys,
        values,
        block_mask=mask,
        enable_gqa=q.shape[2] != k.shape[2],
        return_aux=AuxRequest(lse=True),
    )
    return out.transpose(1, 2)


def _check_installed(name: str) -> None:
    """Import torchtitan. Raises MissingExtra if that is not possible.

    torchtitan imports triton for kernels that a recording does not run. If triton is not installed, a mock replaces it.
    """
    importlib.import_module("torch._inductor.compile_fx")  # imported first, because it tests for triton itself
    stand_ins = [] if importlib.util.find_spec("triton") else ["triton", "triton.language"]
    sys.modules.update((module, MagicMock()) for module in stand_ins)
    try:
        version = metadata.version("torchtitan")
        for module in ("models.common", "components.loss", "distributed.activation_checkpoint", "distributed.fsdp"):
            importlib.import_module(f"torchtitan.{module}")
    except ImportError as error:
        raise MissingExtra(f"{name}: recording torchtitan's model needs torchtitan {VERSION}", hint=INSTALL) from error
    finally:
        for module in stand_ins:
            del sys.modules[module]
    if not version.startswith(f"{VERSION}."):
        raise MissingExtra(
            f"{name}: recording torchtitan's model needs torchtitan {VERSION}, not {version}", hint=INSTALL
        )
