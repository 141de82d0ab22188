"""Hints for options that do not exist: the option that was meant, or that its subject is not modelled yet."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from difflib import get_close_matches

from fsdp_advisor.errors import InvalidOption

_TOPICS: dict[str, str] = {
    "LoRA and other adapters": "lora qlora dora peft adapter use_peft use_lora use_dora peft_config lora_r lora_rank lora_alpha "
    "lora_dropout lora_target_modules lora_modules_to_save target_modules",
    "frozen parameters": "freeze frozen trainable",
    "quantized weights": "load_in_4bit load_in_8bit quantize quantization bits int8 int4",
    "fused and chunked losses": "loss liger use_liger use_liger_kernel liger_kernel cce chunked_loss fused_loss",
    "tensor parallelism": "tp tp_size tensor_parallel tensor_parallel_size tensor_parallel_degree "
    "tensor_model_parallel_size",
    "context and sequence parallelism": "cp cp_size context_parallel context_parallel_size context_parallel_degree "
    "sequence_parallel sequence_parallel_size ulysses ring_attention",
    "pipeline parallelism": "pp pp_size pipeline_parallel pipeline_parallel_size pipeline_parallel_degree "
    "pipeline_model_parallel_size",
    "expert parallelism": "ep ep_size expert_parallel expert_parallel_size expert_parallel_degree "
    "expert_model_parallel_size",
    "torch.compile": "compile torch_compile",
    "FP8 and lower precisions": "fp8 fp4 mxfp8 nvfp4",
    "packed sequences": "packing pack sample_packing padding_free",
    "preference and reinforcement learning": "dpo grpo ppo rlhf kto ref_model reward_model beta",
    "inference": "inference generate kv_cache",
    "evaluation": "eval evaluation do_eval eval_batch_size per_device_eval_batch_size",
    "activation offload": "activation_offload activation_offloading",
    "a storage type apart from the precision": "dtype torch_dtype",
}
_TOPIC_OF = {name: topic for topic, names in _TOPICS.items() for name in names.split()}

_MEANT: dict[str, str] = {
    name: option
    for option, names in {
        "model": "model_name model_id model_name_or_path model_path pretrained",
        "gpus": "num_gpus n_gpus ngpus gpu_count world_size nproc num_processes ranks",
        "nnodes": "nodes num_nodes num_machines n_nodes",
        "gpu": "gpu_type gpu_name device card",
        "strategy": "zero_stage stage sharding_strategy parallelism",
        "backend": "engine fsdp_version",
        "offload": "cpu_offload offload_optimizer offload_params",
        "precision": "mixed_precision bf16 fp16 fp32 amp",
        "optim": "optimizer optimiser",
        "micro_batch_size": "batch_size batch mbs bs train_micro_batch_size_per_gpu",
        "seq_len": "sequence sequence_length seq_length max_length max_seq_length max_seq_len context_length length",
        "gradient_accumulation_steps": "accumulation grad_accum gradient_accumulation accumulation_steps ga gas",
        "activation_checkpointing": "gradient_checkpointing recompute checkpointing ac",
        "attention": "attn attn_implementation flash_attention sdpa",
        "allocator_conf": "pytorch_alloc_conf pytorch_cuda_alloc_conf alloc_conf",
        "host_memory": "cpu_memory ram host_ram",
        "global_batch_size": "train_batch_size gbs",
        "interconnect": "network bandwidth fabric",
        "output": "out outfile output_file",
        "quiet": "silent",
    }.items()
    for name in names.split()
}  # fmt: skip


def unknown_option(
    name: str, known: Iterable[str], spell: Callable[[str], str] = str, *, see: str = "see fsdp-advisor estimate --help"
) -> InvalidOption:
    """The error for an option that does not exist. `known` are field names; `spell` turns a name into the user's spelling.

    >>> unknown_option("seqlen", ["seq_len", "optim"]).hint
    'did you mean seq_len?'
    >>> unknown_option("lora", ["seq_len"]).message
    'lora is not modelled yet'
    """
    plain = name[:80].strip("-").replace("-", "_").lower()
    written = spell(name)
    if plain in _TOPIC_OF:
        return InvalidOption(name, f"{written} is not modelled yet", hint=f"estimates do not cover {_TOPIC_OF[plain]}")
    near = _close(plain, list(known))
    hint = f"did you mean {' or '.join(map(spell, near))}?" if near else see
    return InvalidOption(name, f"no such option: {written}", hint=hint)


def topic_of(name: str) -> str | None:
    """The subject of an option or of a configuration's key that is not modelled yet; None for any other name.

    >>> topic_of("lora_r")
    'LoRA and other adapters'
    """
    return _TOPIC_OF.get(name.lower())


def _close(name: str, known: list[str]) -> list[str]:
    """The options that the name may stand for: a synonym, a beginning, or a misspelling."""
    if _MEANT.get(name) in known:
        return [_MEANT[name]]
    if len(name) < 3:
        return []
    return [option for option in known if option.startswith(name)][:2] or get_close_matches(
        name, known, n=2, cutoff=0.75
    )
