"""The options about how a step computes: precision, optimizer, checkpointing, kernels, loss, and the trainer's task."""

from __future__ import annotations

from functools import partial
from typing import Annotated

from fsdp_advisor.job.checkpointing import CHECKPOINTING_EXAMPLE, SYNONYMS, read_checkpointing
from fsdp_advisor.job.choices import (
    MAX_SHARDS,
    NEAREST_OPTIMIZERS,
    OPTIMIZER_SYNONYMS,
    OPTIMIZERS_NOT_MODELLED,
    Attention,
    Checkpointing,
    Compile,
    ExpertsImplementation,
    Fp8,
    Loss,
    OptimizerName,
    Precision,
    TrainingTask,
    read_word_or_number,
)
from fsdp_advisor.job.fields import Rule
from fsdp_advisor.job.kernel_packages import read_kernel_packages
from fsdp_advisor.job.projection import read_optim_args, read_target_modules

rule = partial(Rule, group="Training")

CHECKPOINTING = rule(
    "the layers that backward recomputes: none, full (all), reentrant (all, with use_reentrant), every-N (one of N, without it), or "
    "selective (all, but the outputs of matrix products and attention are kept, as torchtitan's SelectiveAC keeps them)",
    default="none; full with TRL, selective with torchtitan",
    metavar="POLICY",
    max_length=32,
    synonyms=SYNONYMS,
    word=read_checkpointing,
    example=CHECKPOINTING_EXAMPLE,
)
PrecisionOption = Annotated[
    Precision,
    rule(
        "the precision of weights and computation",
        default="bf16-mixed; fp16-mixed on a GPU without bf16",
        synonyms={
            "float32": "fp32",
            "tf32": "fp32",
            "bfloat16": "bf16",
            "bf16-true": "bf16",
            "32-true": "fp32",
            "fp16": "fp16-mixed",
            "float16": "fp16-mixed",
            "16-mixed": "fp16-mixed",
        },
        elsewhere=dict.fromkeys(
            ("fp8", "fp8-mixed"),
            "fp8 is a separate option: --fp8 tensorwise, rowwise or mxfp8, with --precision bf16-mixed",
        ),
        not_modelled=("int8", "fp4"),
    ),
]
Optim = Annotated[
    OptimizerName,
    rule(
        "the optimizer, by its Hugging Face name",
        synonyms=OPTIMIZER_SYNONYMS,
        elsewhere={"cpu_offload_optimizer": "offload optimizer, which is DeepSpeed's, with adamw_torch_fused"},
        nearest=NEAREST_OPTIMIZERS,
        not_modelled=OPTIMIZERS_NOT_MODELLED,
    ),
]
OptimArgs = Annotated[
    str | None,
    rule(
        "the settings of GaLore and APOLLO: rank=128,update_proj_gap=200",
        metavar="ARGS",
        max_length=256,
        word=read_optim_args,
        example="rank=64,update_proj_gap=100 (proj_type std, proj random, scale_type channel and any scale are modelled)",
    ),
]
OptimTargetModules = Annotated[
    str | None,
    rule(
        "the linear layers that GaLore and APOLLO project: parts of names separated by commas, or all-linear",
        metavar="NAMES",
        default="all-linear",
        max_length=1024,
        word=read_target_modules,
        example="attn,mlp or all-linear",
    ),
]
ActivationCheckpointing = Annotated[Checkpointing, CHECKPOINTING]
AttentionOption = Annotated[
    Attention,
    rule(
        "the attention implementation",
        aliases=("attn_implementation",),
        synonyms={"flash": "flash_attention_2", "flash_attention": "flash_attention_2", "fa2": "flash_attention_2"},
        not_modelled=("flash_attention_3", "flex_attention"),
    ),
]
LossOption = Annotated[
    Loss,
    rule(
        "the loss: auto, as the framework computes it; full, from all logits at once; chunked, in TRL's "
        "tiles or torchtitan's chunks; liger, by Liger's fused linear cross entropy; cce, by cut cross entropy",
        synonyms={
            "chunked_nll": "chunked",
            "flce": "liger",
            "fused_linear_cross_entropy": "liger",
            "cut_cross_entropy": "cce",
        },
    ),
]
UseLigerKernel = Annotated[
    bool,
    rule(
        "Liger's kernels for norms, positions and feed-forward networks; with --loss auto also its loss, except with TRL, "
        "which keeps its own"
    ),
]
CompileOption = Annotated[
    Compile,
    rule(
        "part of the model that torch.compile compiles: layer is each layer separately, with torchtitan also the loss, with "
        "accelerate and the Trainer also embedding, final norm and head (use_regional_compilation); model is the "
        "whole model with its loss, which FSDP2's hooks divide into its units",
        synonyms={
            "layers": "layer",
            "block": "layer",
            "blocks": "layer",
            "regional": "layer",
            "regions": "layer",
            "whole": "model",
            "true": "model",
        },
        not_modelled=("reduce-overhead", "max-autotune"),
    ),
]
MemoryBudget = Annotated[
    float,
    rule(
        "part of the activations of compiled layers that the compiler may keep for backward "
        "(activation_memory_budget in torch._functorch.config): 1 keeps what saves most time, 0 only the layers' inputs",
        ge=0,
        le=1,
    ),
]
CudaGraphs = Annotated[
    bool,
    rule(
        "capture forward and backward as a CUDA graph, as torchtitan 0.3 does unless --training.disable_cuda_graphs is given; "
        "gradients then stay from step to step"
    ),
]
Fp8Option = Annotated[
    Fp8,
    rule(
        "the recipe of torchao's float8 training, in which linear layers but the head multiply in fp8 if both dimensions are "
        "multiples of 16; or mxfp8, the MXFP8Linear of its prototype, for dimensions that are multiples of 32 (torchtitan: also the head), "
        "on GPUs of capability 10.0 and higher",
        synonyms={
            "tensor": "tensorwise",
            "axiswise": "rowwise",
            "row": "rowwise",
            "mx": "mxfp8",
            "mxfp8_rceil": "mxfp8",
        },
        not_modelled=("rowwise_with_gw_hp", "blockwise", "delayed", "nvfp4", "mxfp4"),
    ),
]
TiledMlp = Annotated[
    str,
    rule(
        "the shards of the sequence in which feed-forward networks run, one after the other, and again in backward: a number, or "
        "auto, a shard per as many tokens as the hidden size (axolotl: per 32,768 tokens)",
        metavar="SHARDS",
        max_length=8,
        synonyms={"true": "auto", "yes": "auto", "false": "none", "no": "none"},
        word=partial(read_word_or_number, words=("auto", "none"), low=1, high=MAX_SHARDS),
        example=f"auto, none or a number from 1 to {MAX_SHARDS}",
    ),
]
ExpertsImplementationOption = Annotated[
    ExpertsImplementation,
    rule(
        "the code for a mixture of experts: grouped_mm, one kernel for all experts; batched_mm, a copy of the weights for each "
        "token and expert; eager, a loop over the experts",
        not_modelled=("scattermoe", "sonicmoe", "megablocks"),
        nearest={"scattermoe": "grouped_mm", "sonicmoe": "grouped_mm", "megablocks": "grouped_mm"},
    ),
]
ExpertImbalance = Annotated[
    float,
    rule(
        "the tokens of the busiest expert as a multiple of the mean; only the memory of eager depends on it",
        ge=1,
        le=1000,
    ),
]
KernelPackages = Annotated[
    str,
    rule(
        "the installed packages of kernels for linear attention and state-space layers: all, none, or some of fla "
        "(flash-linear-attention), causal-conv1d, mamba-ssm and, for RWKV, kernels, separated by commas; without them transformers runs "
        "its own code in PyTorch",
        metavar="NAMES",
        max_length=64,
        word=read_kernel_packages,
        example="all, none, or packages such as fla,causal-conv1d",
    ),
]
Task = Annotated[
    TrainingTask,
    rule(
        "the trainer of TRL: sft; dpo or reward, whose micro-batch counts pairs of sequences; kto; or grpo. LLaMA-Factory has sft, dpo and "
        "kto"
    ),
]
PrecomputeRefLogProbs = Annotated[
    bool, rule("compute the reference's log-probabilities before training (dpo, kto), so that no step needs it")
]
RouterAuxLossCoef = Annotated[
    float | None,
    rule(
        "the weight of the routers' loss, which TRL adds in models with experts: 0 leaves the loss out",
        default="the model's",
        ge=0,
        le=1e6,
    ),
]
ActivationOffload = Annotated[
    bool,
    rule(
        "keep activations in pinned host memory until backward: the inputs of checkpointed layers; with trl the "
        "tensors that its activation_offloading selects; without checkpointing all saved tensors",
        aliases=("activation_offloading",),
    ),
]
SaveOnlyModel = Annotated[bool, rule("save only the weights, without the optimizer state that a restart needs")]
