"""Published measurements of training runs, each as the job that it was: the keywords of `estimate`, and the code that ran.

`measurements.json` has facts: the source's statements about the job, what was measured, and where. The functions here translate them to
options, according to the source's code. A job that cannot be estimated is `Unmapped`, with the reason.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
FAMILIES = (
    "fms-acceleration", "peft-method-comparison", "ms-swift", "fsdp-qlora", "automodel", "axolotl", "torchao", "fms-fsdp", "atorch",
    "torchtune", "kempnerforge", "prime-rl", "ml-engineering", "torchtitan", "olmo-core", "easycontext", "transformers-pulls", "qwen",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Variant:
    """`shifts_logits`: the loss copies the fp32 logits without the last token, as transformers 4.45 to 4.48 does
    (loss/loss_utils.py, ForCausalLMLoss). `logits_stay_half`: the loss is computed in the dtype of the logits, as by gpt_bigcode
    in transformers 4.48 (models/gpt_bigcode/modeling_gpt_bigcode.py). `keeps_outputs`: the loop has the model's outputs in a
    variable during backward. `keeps_dtypes`: what is not quantized stays in bf16, as fms-acceleration's plugin for bitsandbytes has
    it instead of PEFT's prepare_model_for_kbit_training. `adapters_in_half`: adapters are in bf16, as PEFT made them on a base in bf16
    before 0.12 (tuners/tuners_utils.py, cast_adapter_dtype). `keeps_keys_and_values`: the outputs of `c_attn`, of which keys and values
    are views, live until the forward ends, because gpt_bigcode of transformers 4.48 fills `past_key_values` although it checkpoints
    (GPTBigCodeModel.forward; found in a rehearsal of that version). `head_upcasts`: the model itself returns fp32
    logits, as before transformers 4.45 (models/llama/modeling_llama.py). `gptq_group_size`: the base is a GPTQ
    checkpoint of 4 bits with groups of so many inputs (-1: all of them), in the layers of fms-acceleration's plugin.
    `permutations_on_host`: BOFT's permutations stay on the host, because PEFT moves adapters to the model's device but not this buffer
    (tuners/boft/layer.py, `adapter_layer_names`), and the loop moves no model. Each forward copies them.
    """

    shifts_logits: bool = False
    logits_stay_half: bool = False
    keeps_outputs: bool = False
    keeps_dtypes: bool = False
    adapters_in_half: bool = False
    keeps_keys_and_values: bool = False
    head_upcasts: bool = False
    gptq_group_size: int | None = None
    permutations_on_host: bool = False


INSTALLED = Variant()


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One row of `measurements.json`. `measured`: bytes, of which `memory_bytes` are of a kind that the source does not name,
    tokens/s, or `out_of_memory`.
    """

    id: str
    family: str
    method: str
    source: str
    job: dict[str, Any]
    measured: dict[str, Any]


OTHER_KERNELS = "other kernels, or the lengths of the sequences are not stated"


@dataclass(frozen=True, kw_only=True)
class Mapped:
    """`only_if_peak_in`: the phase in which the peak must be for the figure to be comparable, because the other phases ran other
    kernels, or the source does not state the lengths of its sequences.
    """

    options: dict[str, Any]
    variant: Variant = INSTALLED
    only_if_peak_in: str | None = None
    compares_speed: bool = True
    why_not_speed: str = OTHER_KERNELS
    compares_reserved: bool = True


@dataclass(frozen=True)
class Unmapped:
    reason: str


def measurements() -> list[Measurement]:
    return [Measurement(**row) for row in json.loads((HERE / "measurements.json").read_text())]


def mapped(row: Measurement) -> Mapped | Unmapped:
    return _MAPPERS[row.family](row)


# fms-acceleration, scripts/benchmarks: fms-hf-tuning's SFTTrainer (TRL on the Trainer), torch 2.4.1, transformers 4.48.1 (refs) or
# 4.45.2 (liger). Facts from defaults.yaml, scenarios*.yaml, accelerate.yaml and benchmark.py:
# - alpaca packed to 4096 tokens (2048 for santacoder), 100 steps, gradient_checkpointing, use_flash_attn, AdamW of torch in its
#   default (foreach) form, lora_dropout 0.1, mixed_precision no unless the scenario has `bf16: True`;
# - more than one GPU: FSDP1 FULL_SHARD with BACKWARD_PRE. transformers 4.48 checkpoints around a unit, with use_reentrant, so the unit
#   is gathered again to be recomputed; the installed version checkpoints within it. Full training has its peak in the optimizer's step,
#   LoRA in forward or backward, so there nothing but running out of memory is compared;
# - allocated = before_init + init_alloc_delta + train_alloc_delta + train_peaked_delta of the Trainer's memory metrics, which is
#   max_memory_allocated of training on rank 0;
# - device = the highest nvidia-smi reading less the first, the mean over the GPUs. Read by polling.
# - GPTQ: checkpoints of 4 bits, loaded in float16, under fp16 autocast; PEFT 0.13. fp16 has the sizes of bf16.
# Assumed: nothing but that tokens/s counts the packed tokens.

_UNPACKED = {
    "TheBloke/Mistral-7B-v0.1-GPTQ": "mistralai/Mistral-7B-v0.1",
    "TheBloke/Llama-2-70B-GPTQ": "meta-llama/Llama-2-70b-hf",
}
_GROUP_SIZES = {"TheBloke/Mistral-7B-v0.1-GPTQ": 128, "TheBloke/Llama-2-70B-GPTQ": -1}
"""The group sizes in the quantize_config.json of the checkpoints' main branch."""
_SANTACODER = str(HERE / "santacoder.json")


def _fms(row: Measurement) -> Mapped | Unmapped:
    job = row.job
    kernels, model = job["framework_config"], job["model"]
    if "scattermoe" in kernels:
        return Unmapped("ScatterMoE kernels are not modelled")
    if row.method == "moe" or "granite-4" in model:
        return Unmapped("the source does not state the lengths of its sequences, which are padded")
    packed = "autogptq" in kernels
    if packed and kernels != "accelerated-peft-autogptq":
        return Unmapped("kernels that fuse adapters with a GPTQ base are not modelled")
    if packed and "Mixtral" in model:
        return Unmapped("transformers 5 keeps experts in one parameter, which is not packed")
    if packed and job["gpus"] > 1:
        return Unmapped("fms-acceleration makes parameters of the packed weights, which FSDP1 shards")
    if packed and "seq_len" not in job and not row.measured.get("out_of_memory"):
        return Unmapped("the source does not state the lengths of its sequences, which are padded")
    if "float16" in job["precision"].split() and "lora" in row.method and not packed:
        return Unmapped("the source does not state the lengths of its sequences, which are padded")
    quantized = row.method == "qlora"
    if "baseline" in kernels:
        return Unmapped("TRL 0.13 casts adapters and embeddings to bf16 and leaves norms in fp32, which is not mapped")
    if quantized and "foak" in kernels:
        return Unmapped("kernels that fuse adapters with a base in 4 bits are not modelled")
    if quantized and job["gpus"] > 1:
        return Unmapped("FSDP1 with a base in 4 bits and the Trainer's wrap policy for adapters is not modelled")
    padded = "seq_len" not in job and not row.measured.get("out_of_memory")
    several = job["gpus"] > 1
    # its scenarios with bitsandbytes have `bf16: True`, GPTQ `fp16`
    mixed = "autocast" in job["precision"] or quantized or packed
    options: dict[str, Any] = {
        "model": _SANTACODER
        if "santacoder" in model
        else _UNPACKED.get(model, model).replace("NousResearch", "meta-llama"),
        "gpu": "A100-80GB",
        "gpus": job["gpus"],
        "strategy": "zero3" if several else "ddp",
        "framework": "trainer",
        "precision": "bf16-mixed" if mixed else "bf16",
        "optim": "adamw_torch",
        "attention": "flash_attention_2",
        "activation_checkpointing": "full",
        "micro_batch_size": job["per_device_train_batch_size"],
        "seq_len": job.get("seq_len", 4096 if not padded else 512),
        "gradient_accumulation_steps": job.get("gradient_accumulation_steps", 1),
    }
    if several:
        options["backend"] = "fsdp1"
    if mixed:
        options["dtype"] = "bfloat16"
    if "r" in job:
        options |= {
            "use_peft": True,
            "lora_r": job["r"],
            "lora_dropout": job["lora_dropout"],
            "lora_target_modules": ",".join(job["target_modules"]),
        }
    if quantized:
        options |= {"load_in_4bit": True, "use_bnb_nested_quant": True}
    same = "foak" not in kernels and not padded and not (several and "r" in job)
    return Mapped(
        options=options,
        variant=Variant(
            shifts_logits=True,
            logits_stay_half="santacoder" in model,
            keeps_keys_and_values="santacoder" in model,
            keeps_dtypes=quantized,
            gptq_group_size=_GROUP_SIZES[model] if packed else None,
        ),
        only_if_peak_in=None if same else "optimizer",
        compares_speed=same,
        compares_reserved=same,
    )


# PEFT, method_comparison/MetaMathQA: its own loop around the installed versions' code (transformers 5.13, PEFT 0.19.2.dev0, torch 2.13)
# on one L40S. Facts from run.py and the result files: bf16 base, adapters in fp32, torch.optim.AdamW (foreach), batch 4, no
# checkpointing, sdpa; `outputs` stays in a variable during backward and the next forward; the cache is emptied every 10 steps.
# reserved = the 99th percentile over 5000 steps of memory_reserved after a step.
# Assumed: the padded length at that percentile. The source does not state it. It is inferred once, from the row of `INFERRED_FROM`,
# and used for all rows; that row counts in no summary.

INFERRED_FROM = "/lora--llama-3.2-3B-rank32.json"
INFERRED_TOKENS = 592


def _peft(row: Measurement) -> Mapped | Unmapped:
    job = row.job
    if job["optimizer_type"] != "AdamW":
        return Unmapped(f"the optimizer {job['optimizer_type']} is not modelled")
    if row.source.endswith(INFERRED_FROM):
        return Unmapped("the row from which the length of the sequences is inferred")
    options = {
        "model": job["model"],
        "gpu": "L40S",
        "gpus": 1,
        "strategy": "ddp",
        "framework": "torch",
        "precision": "bf16",
        "optim": "adamw_torch",
        "attention": "sdpa",
        "micro_batch_size": job["batch_size"],
        "seq_len": INFERRED_TOKENS,
    }
    if job["peft_config"] is not None:
        options["peft_config"] = job["peft_config"]
    is_boft = (job["peft_config"] or {}).get("peft_type") == "BOFT"
    variant = Variant(keeps_outputs=True, permutations_on_host=is_boft)
    return Mapped(options=options, variant=variant, compares_speed=False)


_ON_ONE_A100 = {
    "gpu": "A100-80GB",
    "gpus": 1,
    "strategy": "ddp",
    "framework": "trainer",
    "precision": "bf16-mixed",
    "dtype": "bfloat16",
    "optim": "adamw_torch",
    "attention": "flash_attention_2",
    "activation_checkpointing": "full",
    "micro_batch_size": 1,
}
"""LoRA by the Trainer on one GPU, with checkpoints and flash-attn."""

# ms-swift's benchmark of 2024: torch 2.1, LoRA of rank 8 on q, k and v, bf16 autocast over a bf16 base, gradient checkpointing,
# flash attention; batch 1. Its trainer logs max_memory_reserved as "memory(GiB)".
# Assumed: sequences reach the maximum length (the data's mean is 3234 tokens); adapters in bf16 or fp32 makes 0.1 % here.


def _swift(row: Measurement) -> Mapped | Unmapped:
    job = row.job
    if row.method == "full":
        return _swift_with_deepspeed(job)
    options = _ON_ONE_A100 | {
        "model": job["model"],
        "seq_len": job["seq_len"],
        "gradient_accumulation_steps": 16,
        "use_peft": True,
        "lora_r": 8,
        "lora_dropout": 0.05,
        "lora_target_modules": "q_proj,k_proj,v_proj",
    }
    return Mapped(options=options, variant=Variant(shifts_logits=True), compares_speed=False)


# ms-swift, examples/megatron/benchmark/deepspeed.sh of 2026: the Trainer with DeepSpeed, bf16, `--packing true`, flash attention;
# gradient checkpointing and fused AdamW by ms-swift's defaults. The page gives nvidia-smi in whole "GB" and seconds per step.
# Assumed: GB means GiB, because the script has "8 * 80GiB" for ZeRO-2; packed rows are full. The lengths of what is packed, on which
# the time of attention depends, are not stated.


def _swift_with_deepspeed(job: dict[str, Any]) -> Mapped:
    return Mapped(
        options={
            "model": job["model"],
            "gpu": job["gpu"],
            "gpus": job["gpus"],
            "strategy": f"zero{job['zero_stage']}",
            "backend": "deepspeed",
            "framework": "trainer",
            "precision": "bf16-mixed",
            "optim": "adamw_torch_fused",
            "attention": "flash_attention_2",
            "activation_checkpointing": "full",
            "micro_batch_size": job["per_device_train_batch_size"],
            "seq_len": job["seq_len"],
            "gradient_accumulation_steps": job["gradient_accumulation_steps"],
            "packing": "bfd",
            "allocator_conf": "expandable_segments:True",
        },
        compares_speed=False,
    )


# fsdp_qlora, train.py: its own loop around FSDP1 and transformers and PEFT of March 2024. Facts from benchmarks_03_2024.md and the
# defaults of train.py: everything in bf16 (`--precision bf16`), rank 64 with dropout 0.1 on all projections but o_proj, checkpointed layers
# inside their units, units of layers and adapters, torch.optim.AdamW (foreach), nf4 with nested scales stored as bf16, head and
# embedding not quantized; `output` stays in a variable during backward. 1,024 samples of the full length take the stated time.
# reserved = max_memory_reserved. The 3090s are limited to 280 W on slow PCIe lanes, so their speed is not compared.
# Assumed: sdpa, which transformers takes if PyTorch has it; clipping as the Trainer has it, and `use_orig_params` (it uses False).


def _fsdp_qlora(row: Measurement) -> Mapped | Unmapped:
    job = row.job
    if job["sharding_strategy"] != "full_shard":
        return Unmapped("FSDP1 without sharding on several ranks (NO_SHARD) is not modelled")
    if job.get("use_activation_cpu_offload"):
        return Unmapped("the script's own offload of activations is not modelled")
    quantized = job["train_type"] == "qlora"
    options = {
        "model": job["model"].replace("Mistral-7B-v0.2", "Mistral-7B-Instruct-v0.2"),
        "gpu": job["gpu"],
        "gpus": job["gpus"],
        "strategy": "zero3",
        "backend": "fsdp1",
        "framework": "trainer",
        "precision": "bf16",
        "optim": "adamw_torch",
        "attention": "sdpa",
        "activation_checkpointing": "full",
        "offload": "parameters" if job["use_cpu_offload"] else "none",
        "micro_batch_size": job["batch_size"],
        "seq_len": job["context_length"],
        "use_peft": True,
        "lora_r": 64,
        "lora_dropout": 0.1,
        "lora_target_modules": "k_proj,q_proj,v_proj,up_proj,down_proj,gate_proj",
    }
    if quantized:
        options |= {"load_in_4bit": True, "use_bnb_nested_quant": True, "bnb_4bit_quant_storage": "bfloat16"}
    return Mapped(
        options=options,
        variant=Variant(
            shifts_logits=True, keeps_outputs=True, keeps_dtypes=quantized, adapters_in_half=True, head_upcasts=True
        ),
        compares_speed=job["gpu"] != "RTX-3090",
    )


# NeMo AutoModel, docs/performance-summary.mdx, LoRA on one H100, with the files of examples/llm_benchmark: transformers' model
# (`force_hf`) with Liger's norms, positions and feed-forward networks, which `from_pretrained` applies (_transformers/auto_model.py,
# `use_liger_kernel`), all logits in fp32 for the loss (components/loss/masked_ce.py), weights and adapters in bf16, torch.optim.AdamW,
# no activation checkpointing, sequences without padding.
# Not as there: adapters run as a Triton kernel, and dropout is behind them instead of in front of them; it is left out.


def _automodel(row: Measurement) -> Mapped:
    job = row.job
    return Mapped(
        options={
            "model": job["model"],
            "gpu": job["gpu"],
            "gpus": job["gpus"],
            "strategy": "ddp",
            "framework": "torch",
            "precision": "bf16",
            "optim": "adamw_torch",
            "attention": "sdpa",
            "use_liger_kernel": True,
            "loss": "full",
            "micro_batch_size": job["local_batch_size"],
            "seq_len": job["seq_len"],
            "gradient_accumulation_steps": job["global_batch_size"] // (job["local_batch_size"] * job["gpus"]),
            "use_peft": True,
            "lora_r": job["dim"],
            "lora_target_modules": "all-linear",
        },
        variant=Variant(adapters_in_half=True),
    )


# axolotl, the YAML files of its examples: the Trainer, QLoRA with nested scales stored as bf16, bf16 autocast, checkpoints, flash
# attention, cut cross entropy, rows packed to the micro-batch's tokens. Norms, embeddings and head go to fp32 and back to bf16
# (loaders/model.py, `_configure_embedding_dtypes`). In 2025, when these files were added, a dropout kept axolotl's kernels of adapters
# off (utils/schemas/config.py, `check_auto_enable_lora_kernels`).
# Assumed: an A100 of 80 GB, because the source names no GPU. It does not say which memory "VRAM" is, so these rows are apart.


_SAME_SHAPES = {"katanemo/Plano-Orchestrator-4B": "Qwen/Qwen3-4B"}
"""The model that a fine-tuned one was made from."""


def _axolotl(row: Measurement) -> Mapped:
    job = row.job
    return Mapped(
        options={
            "model": _SAME_SHAPES.get(job["model"], job["model"]),
            "gpu": "A100-80GB",
            "gpus": 1,
            "strategy": "ddp",
            "framework": "axolotl",
            "precision": "bf16-mixed",
            "optim": "adamw_torch_8bit" if job["optimizer"] == "adamw_torch_8bit" else "adamw_bnb_8bit",
            "attention": "flash_attention_2",
            "activation_checkpointing": "full",
            "loss": "cce",
            "packing": "bfd",
            "micro_batch_size": job["micro_batch_size"],
            "seq_len": job["sequence_len"],
            "gradient_accumulation_steps": job["gradient_accumulation_steps"],
            "use_peft": True,
            "lora_r": job["lora_r"],
            "lora_dropout": job["lora_dropout"],
            "lora_target_modules": "all-linear"
            if job.get("lora_target_linear")
            else ",".join(job["lora_target_modules"]),
            "lora_kernels": "none",
            "quantize_moe_experts": job.get("quantize_moe_experts", False),
            "load_in_4bit": True,
            "use_bnb_nested_quant": True,
            "bnb_4bit_quant_storage": "bfloat16",
        },
    )


# torchao, docs/source/workflows/training.md: torchtitan's Llama 3 8B on eight GPUs, each layer compiled, with its policy of selective
# checkpointing; `max_reserved` of torchtitan's log. These commits of torchtitan compute the loss from all logits and capture no CUDA
# graphs; only 0.0.2 does not compile the loss. run_train.sh sets expandable segments, which ROCm 6.4 does not have. The H100s are the ones
# with 96 GB, at 2.4 TB/s (torchao/testing/training/roofline_utils.py, "custom to Meta's H100 variant"); the B200s' power was limited.
# Assumed: nothing.

_TORCHAO_GPUS = {"H100": "H100-96GB", "MI300X": "MI300X", "B200": "B200"}


def _torchao(row: Measurement) -> Mapped | Unmapped:
    gpu, scaling = row.job["gpu"], row.job["scaling"]
    if scaling.startswith("mxfp8"):
        return Unmapped("the run leaves the head in bf16, which torchtitan 0.3 converts to MXFP8 too")
    if scaling not in ("none", "rowwise"):
        return Unmapped(f"torchtitan 0.3 has no recipe {scaling}")
    return Mapped(
        options={
            "model": "meta-llama/Meta-Llama-3-8B",
            "gpu": _TORCHAO_GPUS[gpu],
            "gpus": row.job["gpus"],
            "strategy": "zero3",
            "framework": "torchtitan",
            "loss": "full",
            "compile": "layer",
            "activation_checkpointing": "selective",
            "fp8": scaling,
            "micro_batch_size": row.job["batch_size"],
            "seq_len": row.job["seq_len"],
            "allocator_conf": f"expandable_segments:{gpu != 'MI300X'}",
        },
        compares_speed=gpu == "H100",
        why_not_speed="the boards' power was limited" if gpu == "B200" else "CDNA 3's rates are chosen on this run",
    )


# Training loops of their own around FSDP, or on one GPU, whose facts are options of `estimate` (`job`), with those of each loop here:
# - fms-fsdp: FSDP1, which reduces gradients in bf16 (policies/mixed_precision.py, bfSixteen), as accelerate does; sdpa; 4,096 tokens. The
#   networks' rates are those of a node: 400 Gb/s for eight A100, 800 for eight H100.
# - atorch (dlrover, atorch/examples/llama2): FSDP1 under bf16 autocast, Llama's attention replaced by flash-attn. tokens/s = TFLOPs
#   / 61.19 GFLOP per token (example_utils.py, compute_llama2_training_flops). Its checkpoints do not compute attention again: they keep
#   its inputs and output, 16.06 GiB, and the loop keeps the logits, 1.95. All eight rows have 18.0 GiB more than predicted.
# - torchtune: its full_finetune_single_device recipe, bf16 throughout, fused AdamW; packed. Its chunked loss keeps all logits.
# - KempnerForge: FSDP2, bf16 parameters and states, the whole model compiled, which FSDP2's hooks divide into layers. It keeps whole
#   gradients in fp32 until the last micro-batch, and computes the loss in bf16.
# - prime-rl: FSDP2 with fp32 parameters, transformers' layers compiled with their checkpoints (trainer/model.py, apply_ac, apply_compile),
#   which FlashAttention-2's code then leaves uncompiled; all logits in fp32, which stay in a variable during backward;
#   max_memory_reserved of steps 2 to 4; expandable segments (.github/workflows/benchmarks.yaml). The name of a file has its attention.
#   Those with FlashAttention-3 are predicted with PyTorch's own, which is cuDNN's there.
# - torchtitan: pull requests 996 and 1690, in the messages of their commits. The loss has all logits, which no commit compiles unless the
#   layers are compiled; no CUDA graphs; expandable segments (run_train.sh). The H100s are those of torchao's runs.
# - OLMo-core: FSDP2 with fp32 parameters, compiled layers, no checkpoints, z-loss, which is left out (src/scripts/train/OLMo2-7B.py).
# - EasyContext: DeepSpeed with parameters and optimizer on the host, checkpoints, flash-attn and its loss, in place of which all logits are
#   predicted in fp32; data-parallel (train.py, accelerate_configs/zero3_offload.json).
# - transformers-pulls: pull request 48692, run_clm.py of September 2026 with the Trainer and FSDP2, flash-linear-attention and
#   causal-conv1d, no checkpoints.
# Assumed: that torchtitan's runs of Qwen3-32B whose checkpoints are not stated have full ones, as the first of them; without checkpoints
# they do not fit.

_LOOPS: dict[str, dict[str, Any]] = {
    "fms-fsdp": {
        "backend": "fsdp1", "framework": "accelerate", "precision": "bf16-mixed", "optim": "adamw_torch", "seq_len": 4096,
    },
    "atorch": {
        "backend": "fsdp1", "forward_prefetch": True, "precision": "bf16-mixed", "optim": "adamw_torch", "seq_len": 4096,
        "attention": "flash_attention_2", "activation_checkpointing": "full",
    },
    "torchtune": {"strategy": "ddp", "precision": "bf16", "seq_len": 4096},
    "kempnerforge": {"backend": "fsdp2", "precision": "bf16", "seq_len": 4096, "activation_checkpointing": "full"},
    "prime-rl": {
        "strategy": "zero3", "backend": "fsdp2", "precision": "bf16-mixed", "optim": "adamw_torch",
        "activation_checkpointing": "full", "compile": "layer", "gradient_accumulation_steps": 2,
        "allocator_conf": "expandable_segments:True",
    },
    "torchtitan": {
        "strategy": "zero3", "framework": "torchtitan", "loss": "full", "allocator_conf": "expandable_segments:True",
    },
    "olmo-core": {
        "strategy": "zero3", "backend": "fsdp2", "precision": "bf16-mixed", "optim": "adamw_torch", "loss": "full", "compile": "layer",
    },
    "easycontext": {
        "strategy": "zero3", "backend": "deepspeed", "offload": "parameters", "framework": "accelerate", "precision": "bf16-mixed",
        "attention": "flash_attention_2", "activation_checkpointing": "full",
    },
    "transformers-pulls": {"strategy": "zero3", "backend": "fsdp2", "framework": "trainer", "precision": "bf16-mixed"},
}  # fmt: skip
_CONFIGURATIONS = {"kempnerforge13b.json": str(HERE / "kempnerforge13b.json")}
"""Models of a loop's own, by the names of their configurations here."""


OTHER_ATTENTION = "predicted with PyTorch's own attention instead of its FlashAttention-3"
OLDER_ON_HOPPER = (
    "PyTorch 2.2 of early 2024 on H100s, which is slower than the versions with which their rates were measured"
)


def _own_loop(row: Measurement) -> Mapped | Unmapped:
    job = dict(row.job)
    if job.pop("use_lora", False):
        return Unmapped(
            "atorch puts adapters into an FSDP1 unit of their own (wrap_trainable_outmost), which is not modelled"
        )
    by_prime, flash_2 = row.family == "prime-rl", "-flash_attention_2-" in row.source
    if flash_2:
        job["attention"] = "flash_attention_2"
    is_early = row.family == "fms-fsdp" and job["gpu"].startswith("H100")
    job["model"] = _CONFIGURATIONS.get(job["model"], job["model"])
    return Mapped(
        options=_LOOPS[row.family] | job,
        variant=Variant(head_upcasts=True, keeps_outputs=True) if by_prime else INSTALLED,
        only_if_peak_in=None if by_prime else "optimizer",
        compares_speed=flash_2 if by_prime else not is_early,
        why_not_speed=OTHER_ATTENTION if by_prime else OLDER_ON_HOPPER,
    )


# Bekman, Machine Learning Engineering, when to upgrade GPUs: Llama 3.1 8B with DeepSpeed 0.19.2, torch 2.13 and transformers 5.14 on eight
# GPUs, one sequence without padding. Tokens/s follow from its TFLOP/s by the formula of its scripts: 6 per parameter without the embedding,
# and attention's causal half. Memory is max_memory_reserved of the worst rank, the same on both boards, and is compared from 65,536 tokens
# on: each rank loads the whole model before DeepSpeed divides it, and with fewer tokens what that leaves in the allocator's cache decides.
# Not as there: attention is FlashAttention-3 on H200, which is about as fast as cuDNN's kernels, and FlashAttention-4 on B200.


def _ml_engineering(row: Measurement) -> Mapped:
    job = row.job
    return Mapped(
        options={
            "model": "meta-llama/Llama-3.1-8B",
            "gpu": job["gpu"],
            "gpus": job["gpus"],
            "strategy": f"zero{job['zero_stage']}",
            "backend": "deepspeed",
            "framework": "deepspeed",
            "precision": "bf16-mixed",
            "attention": "sdpa",
            "offload": "optimizer" if job["offload_optimizer"] else "none",
            "activation_checkpointing": "full" if job["gradient_checkpointing"] else "none",
            "use_liger_kernel": job["liger"],
            "seq_len": job["seq_len"],
        },
    )


# Qwen, README, profiling of memory and speed: finetune_lora_single_gpu.sh on one A100-80GB with torch 2.0: the Trainer, LoRA of rank 64
# with dropout 0.05 on all projections, everything padded to the length, checkpoints, flash-attn, accumulation over 8 sequences.
# Qwen1.5 has the shapes. Not as there: one adapter serves q, k and v there, and flash-attn has kernels for norms and positions. Memory is
# not compared, because the code is another one and the page does not say what its "G" is.


def _qwen(row: Measurement) -> Mapped:
    job = {name: value for name, value in row.job.items() if name != "seconds_per_step"}
    return Mapped(
        options=_ON_ONE_A100
        | {
            "gradient_accumulation_steps": 8,
            "use_peft": True,
            "lora_r": 64,
            "lora_dropout": 0.05,
            "lora_target_modules": "all-linear",
        }
        | job,
        variant=Variant(adapters_in_half=True, shifts_logits=True),
    )


_MAPPERS: dict[str, Callable[[Measurement], Mapped | Unmapped]] = {
    "fms-acceleration": _fms,
    "peft-method-comparison": _peft,
    "ms-swift": _swift,
    "fsdp-qlora": _fsdp_qlora,
    "automodel": _automodel,
    "axolotl": _axolotl,
    "torchao": _torchao,
    **dict.fromkeys(_LOOPS, _own_loop),
    "ml-engineering": _ml_engineering,
    "qwen": _qwen,
}


NEARLY_FULL = "found: the prediction exceeds what the GPU has left, where the allocator gives its cache back"
OUTSIDE = (
    "no tensor: nvidia-smi has 1.0 to 1.9 GB more than predicted in all 13 runs on one GPU that leave room, most 1.2 GB, whatever model, "
    "method and batch, and allocated bytes agree. Kernels that are all loaded at the start would be 0.6 to 1.0 GB; the source lacks "
    "reserved bytes, the driver and CUDA_MODULE_LOADING"
)
OUTSIDE_OF_TWO = f"{OUTSIDE}. Of two GPUs 1.4 GB with this model, 0.4 GB with Mistral-7B (p0535, p0537)"
LEFT_BY_LOADING = (
    "not found: not a tensor of the step, because runs with 512 and 2,048 tokens keep nearly the same (LoRA 10.995 and 10.974 GB). The "
    "source lacks reserved bytes after loading, so what loading leaves in the allocator's cache is not known"
)
FULL_GPU = (
    "not found: the GPU is nearly full ({} of 25.4 GB, of which CUDA and NCCL take the rest), where reserved bytes depend on when the "
    "allocator gives its cache back; the source lacks allocated bytes"
)
OFFLOADED = (
    "not found: 1.4 GB, of which the whole embedding and head in bf16 would be 1.05 GB; the source lacks allocated bytes and those after "
    "loading"
)
REMOTE_CODE = (
    "not found: the model's code of January 2024 is in its own repository, of which only the loss is known; the source lacks allocated "
    "bytes"
)
NO_SPEED = "not found; the source lacks the times of forward, backward and kernels"
EARLY_HOPPER = (
    "not found: with libraries of 2023 and early 2024, runs on many H100s take 15 to 28 % longer than predicted "
    "(tests/timing/published_split.py), this one 37 %; the source lacks the times of kernels"
)
FLASH_4 = "found: attention ran FlashAttention-4, which is 1.3 times as fast as cuDNN's kernels, which are predicted"
HOST = "not found: two thirds of the step are the optimizer and transfers on the host, whose processors are not stated"
FOLLOWS_NO_BATCH = (
    "not found: {} of each step, and {} with twice the batch ({}), so not of kernels of layers. The figure is the Trainer's, of all 100 "
    "steps with the first one, so {} once in the run would explain both; the source lacks the times of single steps"
)
ADA = (
    "not found: the FSDP1 runs on 4090s are 5 to 14 % faster; products and attention are at the rates of benchmarks; the source lacks "
    "clocks"
)
A6000 = (
    "not found: the source names the board A6000 Ada, which does not exist. 170 and 174 tokens/s are predicted for an RTX A6000 (p1532, "
    "p1533)"
)
TRITON = (
    "not found: the page names a Triton kernel of adapters and Transformer Engine, which are not modelled, and has no speed "
    "without them"
)
ALL_LOGITS = (
    "not found: with all logits, in bf16 and fp32, {} GiB are allocated and {} reserved, but the configuration has cut cross entropy, "
    "without which axolotl 0.19 does not start (integrations/cut_cross_entropy/__init__.py, `_check_requirements`). The source names "
    "neither the kind of memory nor the version"
)
EAGER_LOSS = (
    "found: torchtitan 0.0.2 does not compile the loss (train.py), whose logits and gradients in fp32 then need 11.7 GiB instead of 3.9; "
    "the rest of 3.6 GiB is fragmentation"
)
CUDNN_IS_RECOMPUTED = (
    "found: on Blackwell this commit computes attention with cuDNN (models/attention.py), whose outputs are not among those that selective "
    "checkpointing keeps (_save_list): 2.0 GiB"
)
WHOLE_GRADIENTS = "found in part: the run adds whole gradients in fp32 until the last micro-batch, {} ms of a step; kernels are not known"
POWER = (
    "not found: products are predicted for H100s of 500 W, as torchtitan's of 2024 were; at 700 W the predictions of the four runs are 15 "
    "to 32 % too high. The source lacks the limit and the clocks"
)
MORE_RESERVED = (
    "not found: {} GiB, while {} GiB of tensors are predicted and {} reserved; the source lacks allocated bytes"
)
FUSED_QWEN = (
    "found in part: there one adapter serves q, k and v, and norms and positions are kernels of flash-attn; short steps wait for the CPU, "
    "which launches less"
)
EXPLAINED: dict[tuple[str, str], str] = {
    ("ff02", "tokens/s"): NO_SPEED,
    ("ff03", "tokens/s"): NO_SPEED,
    ("ff04", "tokens/s"): NO_SPEED,
    ("ff06", "tokens/s"): NO_SPEED,
    ("at01", "tokens/s"): "found in part: the run does not compute attention again in backward, 0.10 s of 5.06",
    ("tt01", "tokens/s"): NO_SPEED,
    ("tt02", "tokens/s"): NO_SPEED,
    ("tt03", "tokens/s"): (
        "found in part: tiles of TRL's loss multiply by the head again in backward, 30 ms of a step; torchtune keeps the logits. The rest "
        "as of tt02"
    ),
    ("tt04", "tokens/s"): "found in part: as of tt03",
    ("kf02", "tokens/s"): WHOLE_GRADIENTS.format(91),
    ("kf03", "tokens/s"): WHOLE_GRADIENTS.format(40),
    ("kf04", "tokens/s"): WHOLE_GRADIENTS.format(168),
    ("kf05", "tokens/s"): WHOLE_GRADIENTS.format(91),
    ("kf06", "tokens/s"): WHOLE_GRADIENTS.format(91),
    (
        "ti01",
        "tokens/s",
    ): "found: PyTorch ran FlashAttention-2 instead of cuDNN's kernels, which is 4 % of a step in p1109",
    **dict.fromkeys([(f"ti0{number}", "tokens/s") for number in (2, 3, 4, 5)], POWER),
    ("ti02", "reserved"): MORE_RESERVED.format("5.6", "68.1", "76.2"),
    ("ti03", "reserved"): MORE_RESERVED.format("4.4", "66.7", "77.1"),
    (
        "om01",
        "tokens/s",
    ): "found in part: PyTorch's attention was no faster there than FlashAttention-2 (om02), and cuDNN's kernels are predicted",
    ("om02", "tokens/s"): NO_SPEED,
    ("ec01", "tokens/s"): NO_SPEED,
    ("qw02", "tokens/s"): NO_SPEED,
    **dict.fromkeys(
        [(f"qw{number}", "tokens/s") for number in ("01", "04", "05", "07", "08", "09", "10", "11", "12", "13")],
        FUSED_QWEN,
    ),
    ("pr01", "tokens/s"): NO_SPEED,
    ("pr04", "tokens/s"): NO_SPEED,
    ("pr05", "tokens/s"): NO_SPEED,
    ("pr06", "tokens/s"): NO_SPEED,
    ("p1109", "reserved"): EAGER_LOSS,
    (
        "p1109",
        "tokens/s",
    ): "found: PyTorch 2.7 runs FlashAttention-2 instead of cuDNN's kernels; with its rates the error is 4.9 %, within the model's own",
    ("p1111", "reserved"): EAGER_LOSS,
    (
        "p1111",
        "tokens/s",
    ): "found in part: 9 % of it are there without fp8 (p1109); for the rest the source lacks the times of kernels",
    ("p1116", "reserved"): CUDNN_IS_RECOMPUTED,
    ("p1120", "reserved"): CUDNN_IS_RECOMPUTED + "; the rest of 1.0 GiB is fragmentation",
    ("p0023", "reserved"): (
        "not found: 1.65 GB. With sequences of one length the allocator's cache keeps 0.25 GB more than the tensors here and 1.34 GB in "
        "the same method on q_proj and v_proj (p0024), which is within 1.2 %. The lengths of the run's sequences decide it, and the source "
        "lacks them and allocated bytes"
    ),
    ("p0049", "reserved"): (
        "found: PSOFT's A is a slice of the right singular vectors of each weight, which stay whole: 1.23 GB; the run keeps 1.24 GB more "
        "than with svd_lowrank (p0050). On a GPU linalg_svd returns rows, so contiguous() copies nothing (PEFT, tuners/psoft/layer.py)"
    ),
    ("p0526", "device"): OUTSIDE,
    ("p0527", "device"): OUTSIDE_OF_TWO,
    ("p0527", "tokens/s"): FOLLOWS_NO_BATCH.format("67 ms", "59 ms", "p0529", "6 to 7 s"),
    ("p0528", "device"): OUTSIDE,
    ("p0529", "device"): OUTSIDE_OF_TWO,
    ("p0529", "tokens/s"): "not found: as of p0527",
    ("p0526", "tokens/s"): NO_SPEED,
    ("p0536", "device"): "the GPU is nearly full: nvidia-smi is lower than in the run with half the batch",
    ("p0535", "tokens/s"): FOLLOWS_NO_BATCH.format("179 ms", "141 ms", "p0537", "14 to 18 s"),
    ("p0558", "device"): OUTSIDE,
    ("p0558", "tokens/s"): (
        "not found: 7 % at both batches, so of kernels; full training of the model is within 1 % (p0534); the source lacks a profile"
    ),
    ("p0560", "tokens/s"): "not found: as of p0558",
    ("p0594", "device"): OUTSIDE,
    ("p0594", "tokens/s"): NO_SPEED,
    ("p0596", "device"): OUTSIDE,
    ("p0596", "tokens/s"): NO_SPEED,
    ("p0602", "device"): OUTSIDE,
    ("p0602", "tokens/s"): NO_SPEED,
    ("p0604", "device"): OUTSIDE,
    ("p0604", "tokens/s"): NO_SPEED,
    ("p0626", "device"): OUTSIDE,
    ("p0628", "device"): OUTSIDE,
    ("p0642", "tokens/s"): NO_SPEED,
    ("fq01", "reserved"): LEFT_BY_LOADING,
    ("fq03", "reserved"): f"{LEFT_BY_LOADING}; allocated bytes agree",
    ("fq06", "reserved"): NEARLY_FULL,
    ("fq11", "reserved"): NEARLY_FULL,
    ("fq12", "reserved"): NEARLY_FULL,
    ("p1517", "reserved"): OFFLOADED,
    ("p1526", "reserved"): OFFLOADED,
    ("p1527", "reserved"): f"{FULL_GPU.format('24.2')}; p1528, which needs more, has the same",
    ("p1528", "reserved"): NEARLY_FULL,
    ("fq09", "tokens/s"): ADA,
    ("fq10", "tokens/s"): ADA,
    ("fq11", "tokens/s"): ADA,
    ("fq12", "tokens/s"): ADA,
    ("p1524", "tokens/s"): ADA,
    ("p1525", "tokens/s"): ADA,
    ("p1526", "tokens/s"): ADA,
    ("p1527", "tokens/s"): ADA,
    ("p1528", "tokens/s"): ADA,
    ("p1530", "tokens/s"): NO_SPEED,
    ("p1531", "tokens/s"): NO_SPEED,
    ("p1532", "tokens/s"): A6000,
    ("p1533", "tokens/s"): A6000,
    ("p1534", "tokens/s"): NO_SPEED,
    ("p1535", "tokens/s"): NO_SPEED,
    ("p1537", "tokens/s"): EARLY_HOPPER,
    ("p1500", "device"): "the GPU is full: 80 GiB is all that nvidia-smi counts",
    (
        "p1501",
        "device",
    ): "not found: the source does not say what its GB are; with GB of 10^9 bytes the prediction is 1.2 % lower",
    ("p3001", "tokens/s"): NO_SPEED,
    ("p3003", "tokens/s"): HOST,
    ("p3004", "tokens/s"): HOST,
    **dict.fromkeys([(f"p{number}", "tokens/s") for number in (3006, 3008, 3010, 3012, 3014)], FLASH_4),
    ("p3013", "tokens/s"): "attention ran FlashAttention-3 instead of cuDNN's kernels, which are predicted",
    ("p0424", "tokens/s"): TRITON,
    ("p1067", "memory"): (
        "found: temporaries of xIELU in backward, which its CUDA kernel avoids; the source recommends it and does not say if it ran"
    ),
    ("p1085", "memory"): (
        "not found: 1.4 GiB are predicted with cut cross entropy, without which axolotl 0.19 does not start, and 7.5 GiB with all "
        "logits; the source names neither the kind of memory nor the version"
    ),
    ("p1074", "memory"): ALL_LOGITS.format("61.7", "63.2"),
    ("p1075", "memory"): ALL_LOGITS.format("23.3", "25.7"),
    ("p1088", "memory"): ALL_LOGITS.format("22.6", "24.6"),
    ("p1097", "memory"): ALL_LOGITS.format("11.1", "12.5"),
    ("p0473", "reserved"): REMOTE_CODE,
    ("p0474", "reserved"): REMOTE_CODE,
    (
        "p0475",
        "reserved",
    ): "found: the run has 78.72 GiB of the GPU's 79.15, where the allocator keeps what it has until its cache is empty",
}
"""(row, figure) -> explanation of an error above 3 %: the tensor that causes it, or the facts that the source lacks."""
