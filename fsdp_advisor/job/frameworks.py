"""The facts in which a framework changes an engine's behaviour."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from fsdp_advisor.job.choices import Backend, Framework, Precision, TrainingTask, compute_dtype

ReduceDtype = Literal["masters", "compute", "fp32"]
"""``masters``: the dtype of the masters, which is fp32 under mixed precision; ``compute``: the compute dtype; ``fp32``: fp32 even in pure
bf16.
"""
TORCHTITAN_CHUNKS = 8
"""Chunks into which torchtitan divides each sequence for the loss. Source: torchtitan 0.3.0, components/loss.py, num_chunks."""
EXPANDABLE_SEGMENTS = "expandable_segments:True"
"""The value of PYTORCH_ALLOC_CONF with which segments of the caching allocator grow."""
FIXED_SEGMENTS = "expandable_segments:False"
"""The allocator's default, for a job whose framework would set another value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameworkFacts:
    """The differences between an engine under a framework and the engine by itself."""

    backends: tuple[Backend, ...] = ("ddp", "fsdp2", "fsdp1", "deepspeed")
    """The backends that the framework supports."""
    uses_accelerate: bool = False
    """accelerate prepares the model."""
    reduce_dtype: ReduceDtype = "masters"
    """The dtype in which FSDP1 and FSDP2 reduce gradients. Source: accelerate/utils/dataclasses.py,
    FullyShardedDataParallelPlugin.set_mixed_precision: reduce_dtype = param_dtype; torchtitan 0.3.0, config/configs.py,
    mixed_precision_reduce.
    """
    defers_reduction: bool = False
    """Gradients stay whole until the last micro-batch (`no_sync`). Source: accelerate/accelerator.py, `accumulate`."""
    splits_root_unit: bool = False
    """FSDP2's root unit is split: embedding, final norm and head are units. Source: accelerate/utils/fsdp_utils.py,
    fsdp2_prepare_model (1.14 and later).
    """
    autocasts_fsdp1: bool = False
    """FSDP1's mixed precision also runs under autocast. Source: accelerate/accelerator.py, prepare_model."""
    converts_outputs: bool = False
    """The model returns fp32 outputs under mixed precision. Source: accelerate/accelerator.py, prepare_model."""
    fills_deepspeed_buckets: bool = False
    """Bucket sizes of "auto" are filled in from the hidden size. Source: transformers/integrations/deepspeed.py,
    trainer_config_finalize; accelerate/utils/deepspeed.py.
    """
    finds_unused_parameters: bool = False
    """DDP searches for unused parameters unless the model checkpoints. Source: transformers/trainer.py,
    _build_accelerator_args.
    """
    finds_unused_with_adapters: bool = False
    """DDP searches for unused parameters of PEFT's models even if they checkpoint. Source: transformers/trainer.py,
    _build_accelerator_args.
    """
    clips_gradients: bool = False
    """Gradients are clipped by default. Source: transformers/training_args.py, max_grad_norm = 1."""
    fsdp1_shards_fully: bool = False
    """FSDP1 always runs with FULL_SHARD. Source: transformers/training_args.py (5.23), fsdp_config."""
    uses_trainer: bool = False
    """The Trainer of transformers runs the loop."""
    default_loss: Literal["full", "trl", "torchtitan"] = "full"
    """The loss if none is chosen. Source: trl 1.16, sft_trainer.py: `add_fused_lm_head`."""
    other_losses: tuple[Literal["liger"], ...] = ()
    """Losses that the framework's own options can choose instead. Source: transformers 5.23, training_args.py,
    use_liger_kernel.
    """
    takes_functions: bool = True
    """Its checkpointing accepts a function that decides which outputs are kept. The Trainer's arguments cannot be
    functions.
    """
    checkpointing: Literal["none", "full", "selective"] = "none"
    """The default activation checkpointing. Source: trl 1.16, sft_config.py, gradient_checkpointing; torchtitan 0.3.0,
    trainer.py, activation_checkpoint.
    """
    keeps_attention_alone: bool = False
    """Selective checkpointing keeps only the outputs of attention. Source: trl 1.16,
    models/selective_activation_checkpointing.py.
    """
    offloads_saved_tensors: bool = False
    """Its activation offload moves the tensors that are saved for backward. Source: trl 1.16,
    models/activation_offloading.py.
    """
    keeps_quantized_dtypes: bool = False
    """A quantized base is not prepared with `prepare_model_for_kbit_training`. Source: trl 1.16, sft_trainer.py,
    `__init__`; axolotl 0.19.0, loaders/model.py, `_configure_embedding_dtypes`.
    """
    nests_scales: bool = False
    """The scales of a base in 4 bits are quantized too. Source: axolotl 0.19.0, loaders/model.py, `_set_quantization_config`;
    LLaMA-Factory 0.9.5, hparams/model_args.py, double_quantization.
    """
    packed_storage: Literal["uint8", "bfloat16", "compute"] = "uint8"
    """The dtype that holds a base in 4 bits; ``compute``: the compute dtype. Source: as for `nests_scales`; LLaMA-Factory 0.9.5,
    model/model_utils/quantization.py, `configure_quantization`.
    """
    keeps_adapter_dtypes: bool = False
    """The adapters of a quantized base that is not prepared keep the fp32 that PEFT gives them. Source: axolotl 0.19.0,
    loaders/adapter.py, `load_lora`. TRL stores them in bf16.
    """
    trains_half: bool = False
    """Under bf16-mixed the trained parameters are loaded and kept in bf16, even without adapters. Source: axolotl
    0.19.0, utils/config/__init__.py, `resolve_dtype`; monkeypatch/accelerate/fsdp2.py, `fsdp2_prepare_model`, which
    makes no fp32 masters. For FSDP1 accelerate makes fp32 masters, and DeepSpeed makes its own.
    """
    wraps_adapters: bool = False
    """Each matrix of LoRA is an FSDP2 unit. Source: axolotl 0.19.0,
    monkeypatch/accelerate/fsdp2.py, `_process_lora_module_for_fsdp`.
    """
    shards_integers: bool = False
    """FSDP2 also shards packed weights of an integer dtype. Source: axolotl 0.19.0, monkeypatch/fsdp2_qlora.py and
    monkeypatch/accelerate/fsdp2_quantized.py, `nonfloat_param_guard`.
    """
    loads_fp32: bool = False
    """A model given by name is loaded in fp32. transformers' default is the dtype of its checkpoint. Source: trl 1.16,
    trainer/utils.py, create_model_from_path, and trainer/model_config.py; transformers 5.23, modeling_utils.py,
    `from_pretrained`.
    """
    sums_gradients: bool = False
    """FSDP does not divide gradients, because the loss is divided by the tokens of all ranks. Source: torchtitan 0.3.0,
    distributed/fsdp.py, disable_fsdp_gradient_division.
    """
    threads: int = 2
    """The number of threads that run matrix products, each with a cuBLAS workspace. It is 2, because backward has its
    own thread, or 1 if autograd's multithreading is off. Source: torchtitan 0.3.0, distributed/utils.py,
    init_distributed.
    """
    own_models: bool = False
    """It trains its own model classes, not transformers'."""
    allocator_conf: str | None = None
    """The PYTORCH_ALLOC_CONF that its launcher sets. Source: torchtitan 0.3.0, run_train.sh; axolotl 0.19.0,
    utils/__init__.py, `set_pytorch_cuda_alloc_conf`, which cli/main.py calls.
    """
    captures_graphs: bool = False
    """Forward and backward can be captured as a CUDA graph, and gradients then stay from step to step. Source:
    torchtitan 0.3.0, trainer.py, `zero_grad(set_to_none=...)`; distributed/cudagraph.py.
    """
    names_sequences: bool = False
    """A padding-free batch also contains the boundaries of its sequences. Source: trl 1.16, sft_trainer.py,
    `DataCollatorForLanguageModeling`.
    """
    tasks: tuple[TrainingTask, ...] = ("sft",)
    """The tasks that its trainers have. LLaMA-Factory's reward models, which keep all hidden states, are not modelled.
    """
    task_loss: Literal["chunked", "full"] = "chunked"
    """The loss of tasks other than sft."""
    precomputes_reference: bool = True
    """It can compute the reference's log-probabilities before training."""
    loads_reference_in_half: bool = False
    """The copy of the model that is the reference is loaded in the compute dtype. Source: LLaMA-Factory 0.9.5,
    train/trainer_utils.py, `create_ref_model`; model/adapter.py, `init_adapter`.
    """
    adds_router_loss: bool = False
    """Its trainers of language models add the loss of the routers. Source: trl 1.16, `aux_loss_enabled`."""


_ACCELERATE = FrameworkFacts(
    uses_accelerate=True,
    reduce_dtype="compute",
    defers_reduction=True,
    splits_root_unit=True,
    autocasts_fsdp1=True,
    converts_outputs=True,
    fills_deepspeed_buckets=True,
)

_TRAINER = replace(  # uses accelerate to prepare the model
    _ACCELERATE,
    uses_trainer=True,
    finds_unused_parameters=True,
    finds_unused_with_adapters=True,
    clips_gradients=True,
    fsdp1_shards_fully=True,
    other_losses=("liger",),
    takes_functions=False,
)

FRAMEWORKS: dict[Framework, FrameworkFacts] = {
    "torch": FrameworkFacts(),
    "accelerate": _ACCELERATE,
    "trainer": _TRAINER,
    "trl": replace(
        _TRAINER,
        default_loss="trl",
        other_losses=(),
        takes_functions=True,
        offloads_saved_tensors=True,
        checkpointing="full",
        keeps_quantized_dtypes=True,
        loads_fp32=True,
        keeps_attention_alone=True,
        names_sequences=True,
        tasks=get_args(TrainingTask),
        adds_router_loss=True,
    ),
    "axolotl": replace(
        _TRAINER,
        splits_root_unit=False,
        finds_unused_parameters=False,
        finds_unused_with_adapters=False,
        keeps_quantized_dtypes=True,
        nests_scales=True,
        packed_storage="bfloat16",
        keeps_adapter_dtypes=True,
        trains_half=True,
        wraps_adapters=True,
        allocator_conf=EXPANDABLE_SEGMENTS,
        shards_integers=True,
    ),
    "llamafactory": replace(
        _TRAINER,
        finds_unused_with_adapters=False,
        nests_scales=True,
        packed_storage="compute",
        tasks=("sft", "dpo", "kto"),
        task_loss="full",
        precomputes_reference=False,
        loads_reference_in_half=True,
    ),
    "deepspeed": FrameworkFacts(backends=("deepspeed",)),
    "torchtitan": FrameworkFacts(  # torchtitan 0.3.0, distributed/fsdp.py, apply_fsdp_to_decoder; config/configs.py, max_norm
        backends=("fsdp2",),
        splits_root_unit=True,
        clips_gradients=True,
        reduce_dtype="fp32",
        sums_gradients=True,
        threads=1,
        default_loss="torchtitan",
        checkpointing="selective",
        own_models=True,
        allocator_conf=EXPANDABLE_SEGMENTS,
        captures_graphs=True,
    ),
}
"""The facts of each framework. `torch` stands for each engine by itself, including DeepSpeed's own loop."""

FRAMEWORK_NAMES: dict[Framework, str] = {
    "torch": "PyTorch", "accelerate": "accelerate", "trainer": "the Trainer", "deepspeed": "DeepSpeed", "trl": "TRL",
    "axolotl": "axolotl", "llamafactory": "LLaMA-Factory", "torchtitan": "torchtitan",
}  # fmt: skip
"""The name of each framework in messages."""
BACKEND_NAMES: dict[Backend, str] = {"ddp": "DDP", "fsdp1": "FSDP1", "fsdp2": "FSDP2", "deepspeed": "DeepSpeed"}
"""The name of each backend in messages."""


def options_of_framework(framework: Framework, precision: Precision, *, in_4bit: bool) -> dict[str, Any]:
    """The options that the framework sets if a job leaves them open, without those of which its value is the default. `in_4bit`: the base
    is quantized to 4 bits when it is loaded.
    """
    facts, found = FRAMEWORKS[framework], dict[str, Any]()
    if facts.checkpointing != "none":
        found["activation_checkpointing"] = facts.checkpointing
    if facts.allocator_conf is not None:
        found["allocator_conf"] = facts.allocator_conf
    if in_4bit and facts.nests_scales:
        found["use_bnb_nested_quant"] = True
    if in_4bit and facts.packed_storage != "uint8":
        is_compute = facts.packed_storage == "compute"
        found["bnb_4bit_quant_storage"] = compute_dtype(precision) if is_compute else facts.packed_storage
    return found
