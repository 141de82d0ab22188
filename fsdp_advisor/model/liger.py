"""The kernels that Liger uses by default in a language model, with or without images, by model type.

Source: liger-kernel 0.8.5, transformers/monkey_patch.py, MODEL_TYPE_TO_APPLY_LIGER_FN and its functions, applied to an existing model.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

LIGER_VERSION = "0.8.5"

LIGER_LOSSES = frozenset({
    "deepseek_v2", "deepseek_v3", "deepseek_v4", "gemma", "gemma2", "gemma3_text", "gemma3", "gemma4_text", "gemma4",
    "glm4", "glm4v", "glm4v_moe", "gpt_oss", "internvl", "llama", "llama4_text", "llama4", "llava",
    "mllama", "mllama_text_model", "ministral", "mistral", "mixtral", "muse_glimmer", "nemotron", "olmo2", "pixtral",
    "olmo3", "qwen2", "qwen3", "qwen3_moe", "qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text",
    "qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_vl", "qwen3_vl_text",
    "qwen3_vl_moe", "qwen3_vl_moe_text", "smollm3", "phi3", "paligemma", "falcon_h1", "smolvlm", "hunyuan_v1_dense",
    "hunyuan_v1_moe", "exaone4",
})  # fmt: skip
"""The model types whose loss Liger replaces. Source: liger-kernel 0.8.5,
transformers/monkey_patch.py, MODEL_TYPE_TO_APPLY_LIGER_FN, without granite, for which it replaces only cross entropy.
"""
LIGER_MODEL_TYPES = LIGER_LOSSES | {"granite"}
"""The model types that Liger knows. In a model of another type it replaces nothing, and says so only at the log's level INFO."""

LigerMlp = Literal["none", "gate and up", "gate_up", "relu squared"]
"""The projections before the kernel. ``gate and up``: two layers; ``gate_up``: one layer, whose output is divided; ``relu squared``:
only the activation is a kernel.
"""


class LigerKernels(NamedTuple):
    """The modules of a model that Liger's kernels replace.

    `norms`: names of norms in a layer, in its attention or in the model, whose backward writes the input's gradient in place of the
    output's; `copying_norms`: norms whose backward allocates the input's gradient. `mlp`: the feed-forward network of a layer, and a
    shared expert. `experts`: whether the routed experts of a layer are one kernel. `rope`: whether the rotary embedding is one kernel.
    """

    norms: tuple[str, ...] = ()
    copying_norms: tuple[str, ...] = ()
    mlp: LigerMlp = "gate and up"
    experts: bool = False
    rope: bool = True


_TWO = ("norm", "input_layernorm", "post_attention_layernorm")
_FOUR = (*_TWO, "pre_feedforward_layernorm", "post_feedforward_layernorm")
_OF_HEADS = ("q_norm", "k_norm")
_OF_LATENTS = ("q_a_layernorm", "kv_a_layernorm")

_LLAMA = LigerKernels(norms=_TWO)
_OLMO = LigerKernels(norms=("norm",), copying_norms=("post_attention_layernorm", "post_feedforward_layernorm"))
_DEEPSEEK = LigerKernels(norms=(*_TWO, *_OF_LATENTS), experts=True, rope=False)
_QWEN_LINEAR = LigerKernels(copying_norms=(*_TWO, *_OF_HEADS), experts=True, rope=False)

LIGER_KERNELS: dict[str, LigerKernels] = {
    **dict.fromkeys(("llama", "mistral", "ministral", "qwen2", "smollm3", "gemma", "hunyuan_v1_dense"), _LLAMA),
    "qwen3": LigerKernels(norms=(*_TWO, *_OF_HEADS)),
    "phi3": LigerKernels(norms=_TWO, mlp="gate_up"),
    "gemma2": LigerKernels(copying_norms=_FOUR),
    "gemma3_text": LigerKernels(copying_norms=(*_FOUR, *_OF_HEADS)),
    **dict.fromkeys(("olmo2", "olmo3"), _OLMO),
    "glm4": LigerKernels(
        copying_norms=(*_TWO, "post_self_attn_layernorm", "post_mlp_layernorm"), mlp="gate_up", rope=False
    ),
    "exaone4": LigerKernels(
        copying_norms=("norm", "post_attention_layernorm", "post_feedforward_layernorm", *_OF_HEADS)
    ),
    "nemotron": LigerKernels(mlp="relu squared", rope=False),
    "gpt_oss": LigerKernels(norms=_TWO, mlp="none"),
    **dict.fromkeys(("mixtral", "hunyuan_v1_moe"), LigerKernels(norms=_TWO, mlp="none", experts=True)),
    "qwen3_moe": LigerKernels(norms=(*_TWO, *_OF_HEADS), mlp="none", experts=True),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3"), _DEEPSEEK),
    "deepseek_v4": LigerKernels(norms=_TWO, mlp="none", rope=False),
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), _QWEN_LINEAR),
}
"""The replaced modules by model type. Kernels for gemma's activation allocate the same as those for SwiGLU."""


class LigerVision(NamedTuple):
    """What Liger replaces in a vision-language model.

    `text`: the kernels of its language model; None: those of the language model's type. The others are names in the vision encoder and the
    projector: of layer norms, of RMSNorms as in `LigerKernels`, and of feed-forward networks with gate and up.
    """

    text: LigerKernels | None = None
    layer_norms: tuple[str, ...] = ()
    norms: tuple[str, ...] = ()
    copying_norms: tuple[str, ...] = ()
    mlps: tuple[str, ...] = ()


_OF_SIGLIP = ("layer_norm1", "layer_norm2", "post_layernorm")

LIGER_VISION: dict[str, LigerVision] = {
    "gemma3": LigerVision(
        text=LIGER_KERNELS["gemma3_text"], layer_norms=_OF_SIGLIP, copying_norms=("mm_soft_emb_norm",)
    ),
    "glm4v": LigerVision(
        text=LigerKernels(norms=(*_TWO, "post_self_attn_layernorm", "post_mlp_layernorm"), mlp="gate_up", rope=False),
        norms=("norm1", "norm2"),
        mlps=("mlp",),
    ),
    "internvl": LigerVision(
        layer_norms=("layernorm_before", "layernorm_after", "layernorm"), norms=("q_norm", "k_norm")
    ),
    "llava": LigerVision(),
    "smolvlm": LigerVision(layer_norms=_OF_SIGLIP),
}
"""The vision-language models whose kernels are modelled, by model type."""

_CANNOT_IMPORT = "cannot import its own code for it"
LIGER_FAILURES: dict[str, str] = {
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"), _CANNOT_IMPORT),
    "llama4": "fails in its forward, which needs outputs of the routers",
    "paligemma": "fails in its forward, which takes the image features for a tensor",
    "qwen3_5": "fails in its forward, which needs outputs with rope_deltas",
}
"""What Liger 0.8.5 does with vision-language models of these types under transformers 5.23.

Source: Trainers' steps that ended so; transformers/model/{qwen2_vl,qwen2_5_vl,qwen3_vl,qwen3_vl_moe}.py, whose output classes
output_classes.py lacks; paligemma.py and qwen3_5.py, `lce_forward`; transformers 5.23, models/llama4/modeling_llama4.py.
"""
