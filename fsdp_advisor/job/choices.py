"""The values of a job's options: their types, limits, and other names for them."""

from __future__ import annotations

from typing import Literal

Strategy = Literal["ddp", "zero1", "zero2", "zero3", "hsdp"]
Backend = Literal["ddp", "fsdp2", "fsdp1", "deepspeed"]
Offload = Literal["none", "optimizer", "parameters"]
Precision = Literal["fp32", "bf16", "bf16-mixed", "fp16-mixed"]
HalfDtype = Literal["bfloat16", "float16"]
WeightDtype = Literal["float32", "bfloat16", "float16"]
OptimizerName = Literal[
    "adamw_torch_fused", "adamw_torch", "sgd", "sgd_momentum", "adafactor", "adamw_bnb_8bit",
    "paged_adamw_8bit", "paged_adamw_32bit", "lion_32bit", "lion_8bit", "paged_lion_32bit", "paged_lion_8bit",
    "ademamix", "ademamix_8bit", "paged_ademamix_32bit", "paged_ademamix_8bit", "rmsprop_bnb_32bit", "rmsprop_bnb_8bit",
    "adamw_torch_8bit", "adamw_torch_4bit", "muon", "adagrad", "rmsprop", "schedule_free_adamw", "schedule_free_sgd",
    "schedule_free_radam", "adamw_torch_fp8", "stable_adamw", "galore_adamw", "apollo_adamw", "lomo", "adalomo", "galore_adafactor",
    "galore_adamw_layerwise", "apollo_adamw_layerwise", "adamw_cpu_offload", "galore_adamw_8bit", "galore_adamw_8bit_layerwise",
    "grokadamw", "adam_mini",
]  # fmt: skip
Attention = Literal["sdpa", "eager", "flash_attention_2"]
ExpertsImplementation = Literal["grouped_mm", "batched_mm", "eager"]
Checkpointing = str
"""The text of a `CheckpointingPolicy`; in a search also `auto`."""
Framework = Literal["torch", "accelerate", "trainer", "deepspeed", "trl", "axolotl", "llamafactory", "torchtitan"]
Loss = Literal["auto", "full", "chunked", "liger", "cce"]
TrainingTask = Literal["sft", "dpo", "kto", "reward", "grpo"]
Packing = Literal["none", "bfd", "wrapped"]
Compile = Literal["none", "layer", "model"]
Fp8 = Literal["none", "tensorwise", "rowwise", "mxfp8"]
"""The name of a float8 recipe in torchao, or MXFP8, whose layer is in torchao's prototype."""
OffloadDevice = Literal["cpu", "nvme"]
StateDictType = Literal["auto", "full", "sharded", "local"]
BackwardPrefetch = Literal["pre", "post", "none"]
Wrap = str
"""The text of a `WrapPolicy`."""
TrainingMethod = Literal["fixed", "any"]
Find = Literal["gpus", "batch", "sequence", "gpu-type"]

GPU_DEPENDENT = frozenset({"nnodes", "precision"})
"""Fields whose default depends on the GPU."""

MAX_GPUS = 65_536
MAX_BATCH = 1_048_576
MAX_SEQ_LEN = 16_777_216
MAX_SHARDS = 1024
"""The largest accepted number of shards of the sequence in a tiled MLP."""
DEFAULT_SEQ_LEN = 2048


def default_seq_len(maximum: int | None) -> int:
    """The sequence length assumed for a job that gives none. `maximum`: the model's own maximum, None if unknown.

    >>> default_seq_len(None), default_seq_len(512)
    (2048, 512)
    """
    return min(DEFAULT_SEQ_LEN, maximum or DEFAULT_SEQ_LEN)


def read_word_or_number(text: str, *, words: tuple[str, ...], low: int, high: int) -> str | None:
    """The canonical spelling of one of `words` or of an integer from `low` to `high`; None for any other text.

    >>> [read_word_or_number(text, words=("auto", "false"), low=2, high=64) for text in ("False", "08", "1", "-4", "on")]
    ['false', '8', None, None, None]
    """
    word = text.strip().lower()
    digits = word.lstrip("0")  # int() refuses thousands of digits
    if digits.isdecimal() and len(digits) <= len(str(high)) and low <= int(digits) <= high:
        return str(int(digits))
    return word if word in words else None


STRATEGY_SYNONYMS = {
    word: strategy
    for strategy, words in {
        "ddp": "no_shard 0 stage0 zero0",
        "zero1": "1 stage1 zero_stage_1 zero_redundancy_optimizer",
        "zero2": "2 stage2 zero_stage_2 shard_grad_op",
        "zero3": "3 stage3 zero_stage_3 full_shard fsdp fsdp2 fully_shard",
        "hsdp": "hybrid_shard",
    }.items()
    for word in words.split()
}
"""Name of a strategy in FSDP, DeepSpeed or accelerate -> name here."""
OPTIMIZER_SYNONYMS = {
    "adamw": "adamw_torch_fused",
    "adam": "adamw_torch_fused",
    "adamw_8bit": "adamw_bnb_8bit",
    "paged_adamw": "paged_adamw_32bit",
    "lion": "lion_32bit",
    "paged_lion": "paged_lion_32bit",
    "paged_ademamix": "paged_ademamix_32bit",
    "rmsprop_bnb": "rmsprop_bnb_32bit",
}
"""Other names of optimizers, as users type them: AdamW then is the default, the fused one. (In a file it is the class that the file names,
`configs.names`.)"""
OPTIMIZERS_NOT_MODELLED = (
    "adamw_apex_fused",
    "adamw_anyprecision",
    "adamw_torch_xla",
    "adamw_torch_npu_fused",
    "galore_adafactor_layerwise",
    "shampoo",
    "soap",
)
NEAREST_OPTIMIZERS = {
    "galore_adafactor_layerwise": "galore_adamw_layerwise, because transformers 5.23 fails to make the layerwise Adafactor",
    "adamw_anyprecision": "adamw_torch, because AnyPrecision is in torchdistx, which has no package for the modelled versions of torch",
    "adamw_torch_xla": "adamw_torch, because this one is for TPUs, which are not modelled",
    "adamw_torch_npu_fused": "adamw_torch_fused, because this one is for Ascend NPUs, which are not modelled",
    "adamw_apex_fused": "adamw_torch_fused, because transformers 5 no longer has Apex' AdamW",
}
"""Optimizer that is not modelled -> sentence about the most similar one that is."""


def half_dtype(precision: Precision) -> HalfDtype:
    """The dtype of 16 bits in which a precision computes, or would."""
    return "float16" if precision == "fp16-mixed" else "bfloat16"


def compute_dtype(precision: Precision) -> Literal["float32", "bfloat16", "float16"]:
    """The dtype in which a precision computes."""
    return "float32" if precision == "fp32" else half_dtype(precision)
