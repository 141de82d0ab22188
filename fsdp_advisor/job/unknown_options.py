"""Hints for options that do not exist: the option that was probably meant, or that the subject is not modelled yet."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from difflib import get_close_matches

from fsdp_advisor.errors import InvalidOption
from fsdp_advisor.job.frameworks import FRAMEWORKS
from fsdp_advisor.units import list_words

DATA_PARALLEL = "possible are data parallelism and its sharding: DDP, ZeRO-1 to ZeRO-3, HSDP"
TASKS_OF_TRL = "--task has dpo, kto, reward and grpo, with --framework trl"
_CLIPPING = tuple(framework for framework, facts in FRAMEWORKS.items() if facts.clips_gradients)

_TOPICS: dict[str, tuple[str, str]] = {
    "tensor parallelism is": (
        "tp tp_size tensor_parallel tensor_parallel_size tensor_parallel_degree tensor_model_parallel_size",
        DATA_PARALLEL,
    ),
    "context and sequence parallelism are": (
        "cp cp_size context_parallel context_parallel_size context_parallel_degree sequence_parallel "
        "sequence_parallel_size ulysses ring_attention",
        DATA_PARALLEL,
    ),
    "pipeline parallelism is": (
        "pp pp_size pipeline_parallel pipeline_parallel_size pipeline_parallel_degree pipeline_model_parallel_size",
        DATA_PARALLEL,
    ),
    "expert parallelism is": (
        "ep ep_size expert_parallel expert_parallel_size expert_parallel_degree expert_model_parallel_size",
        DATA_PARALLEL,
    ),
    "precisions below FP8 are": (
        "fp4 nvfp4 mxfp4",
        "possible are fp32, bf16, bf16-mixed and fp16-mixed, and fp8 products of linear layers by torchao",
    ),
    "ORPO and PPO are": ("orpo ppo rlhf", TASKS_OF_TRL),
    "inference is": ("inference generate kv_cache", "the figures are only of training"),
    "gradient clipping apart from the framework's is": (
        "clip_grad gradient_clipping max_grad_norm clip_grad_norm",
        f"--framework {list_words(_CLIPPING)} clips gradients, the others do not",
    ),
}
"""Subjects that are not modelled, with the options that name them and what is possible instead."""
_TOPIC_OF = {name: (subject, hint) for subject, (names, hint) in _TOPICS.items() for name in names.split()}

_WITHOUT_EFFECT = (
    "lr learning_rate warmup warmup_steps warmup_ratio weight_decay lr_scheduler_type scheduler adam_beta1 adam_beta2 "
    "adam_epsilon epochs num_epochs num_train_epochs max_steps seed dataset dataset_name data train_file save_steps "
    "save_strategy logging_steps report_to run_name output_dir"
)
"""Options of training scripts that change neither memory nor the speed of a step."""

_VALUES: dict[str, tuple[str, str]] = {
    "ddp": ("strategy", "ddp"),
    "fsdp": ("strategy", "zero3"),
    "fsdp2": ("strategy", "zero3"),
    "zero": ("strategy", "zero3"),
    "zero1": ("strategy", "zero1"),
    "zero2": ("strategy", "zero2"),
    "zero3": ("strategy", "zero3"),
    "hsdp": ("strategy", "hsdp"),
    "fsdp1": ("backend", "fsdp1"),
    "deepspeed": ("backend", "deepspeed"),
    "bf16": ("precision", "bf16-mixed"),
    "fp16": ("precision", "fp16-mixed"),
    "fp32": ("precision", "fp32"),
    "gradient_checkpointing": ("activation_checkpointing", "full"),
    "flash_attn": ("attention", "flash_attention_2"),
    "flash_attention": ("attention", "flash_attention_2"),
    "flash_attention_2": ("attention", "flash_attention_2"),
    "qlora": ("load_in_4bit", "--use-peft"),
    "int8": ("load_in_8bit", "--use-peft"),
    "int4": ("load_in_4bit", "--use-peft"),
    "nf4": ("load_in_4bit", "--use-peft"),
    **dict.fromkeys(("cce", "cut_cross_entropy"), ("loss", "cce")),
    **dict.fromkeys(("sample_packing", "neat_packing", "pack"), ("packing", "bfd")),
    **{task: ("task", task) for task in ("dpo", "kto", "grpo")},
    **dict.fromkeys(("ref_model", "reference_model"), ("task", "dpo")),
    "reward_model": ("task", "reward"),
    **dict.fromkeys(("chunked_loss", "fused_loss"), ("loss", "chunked")),
}  # fmt: skip
"""Options of other tools that are values of an option here."""

_MEANT: dict[str, str] = {
    name: option
    for option, names in {
        "compile": "torch_compile regional_compilation use_regional_compilation",
        "fp8": "float8 fp8_recipe float8_recipe recipe_name mxfp8",
        "experts_implementation": "experts moe_implementation expert_implementation",
        "expert_imbalance": "imbalance load_imbalance moe_imbalance router_imbalance",
        "tiled_mlp": "tiled_mlp_num_shards mlp_shards num_shards sequence_tiling alst",
        "kernel_packages": "use_mamba_kernels mamba_kernels linear_attention_kernels fla mamba_ssm causal_conv1d",
        "use_vllm": "vllm colocate colocate_vllm",
        "use_liger_kernel": "liger use_liger enable_liger_kernel liger_kernel liger_kernels",
        "model": "model_name model_id model_name_or_path model_path pretrained",
        "gpus": "num_gpus n_gpus ngpus gpu_count world_size nproc num_processes ranks",
        "nnodes": "nodes num_nodes num_machines n_nodes",
        "gpu": "gpu_type gpu_name device card",
        "strategy": "zero_stage stage sharding_strategy parallelism",
        "backend": "engine fsdp_version",
        "offload": "cpu_offload offload_optimizer offload_params",
        "precision": "mixed_precision amp",
        "optim": "optimizer optimiser",
        "micro_batch_size": "batch_size batch mbs bs train_micro_batch_size_per_gpu",
        "seq_len": "sequence sequence_length seq_length max_seq_length max_seq_len context_length length",
        "gradient_accumulation_steps": "accumulation grad_accum gradient_accumulation accumulation_steps ga gas",
        "activation_checkpointing": "recompute checkpointing ac",
        "attention": "attn sdpa",
        "allocator_conf": "pytorch_alloc_conf pytorch_cuda_alloc_conf alloc_conf",
        "host_memory": "cpu_memory ram host_ram",
        "global_batch_size": "train_batch_size gbs",
        "interconnect": "network bandwidth fabric",
        "output": "out outfile output_file",
        "quiet": "silent",
        "use_peft": "lora use_lora peft adapter",
        "use_dora": "dora",
        "lora_r": "lora_rank",
        "lora_kernels": "lora_mlp_kernel lora_qkv_kernel lora_o_kernel lora_embedding_kernel axolotl_kernels",
        "lora_target_modules": "target_modules lora_target",
        "lora_modules_to_save": "modules_to_save",
        "freeze": "frozen freeze_layers trainable unfrozen_parameters",
        "load_in_4bit": "quantize quantization bits bnb",
        "dtype": "torch_dtype",
        "packing": "packing_strategy",
        "activation_offload": "offload_activations",
        "padding_free": "flatten flattening batch_flattening",
        "padding_fraction": "padding pad",
        "images_per_sample": "images num_images n_images image_count",
        "image_size": "image_resolution resolution image_shape",
        "image_max_pixels": "max_pixels image_pixels",
    }.items()
    for name in names.split()
}  # fmt: skip

_MEANT_JOINED = {name.replace("_", ""): option for name, option in _MEANT.items()}
"""The same names without underscores, as some tools and users write them: batchsize."""


def unknown_option(
    name: str, known: Iterable[str], spell: Callable[[str], str] = str, *, see: str = "see fsdp-advisor estimate --help"
) -> InvalidOption:
    """The error for an option that does not exist. `known` are field names; `spell` turns a name into the user's spelling.

    >>> unknown_option("seqlen", ["seq_len", "optim"]).hint
    'did you mean seq_len?'
    >>> unknown_option("tp_size", ["seq_len"]).message
    'tp_size: tensor parallelism is not modelled yet'
    """
    plain = name[:80].strip("-").replace("-", "_").lower()
    written = spell(name)
    if plain in _TOPIC_OF:
        subject, hint = _TOPIC_OF[plain]
        return InvalidOption(name, f"{written}: {subject} not modelled yet", hint=hint)
    if plain in _WITHOUT_EFFECT.split():
        return InvalidOption(
            name, f"no such option: {written}", hint="it changes neither memory nor speed: leave it out"
        )
    fields = list(known)
    if plain in _VALUES and _VALUES[plain][0] in fields:
        field, value = _VALUES[plain]
        return InvalidOption(name, f"no such option: {written}", hint=f"did you mean {spell(field)} {value}?")
    near = _close(plain, fields)
    hint = f"did you mean {' or '.join(map(spell, near))}?" if near else see
    return InvalidOption(name, f"no such option: {written}", hint=hint)


def topic_of(name: str) -> str | None:
    """The subject of an option or of a configuration's key that is not modelled yet; None for any other name.

    >>> topic_of("tp_size")
    'tensor parallelism'
    """
    subject, _ = _TOPIC_OF.get(name.lower(), ("", ""))
    return subject.rpartition(" ")[0] or None


def _close(name: str, known: list[str]) -> list[str]:
    """The options that `name` may stand for: it is a synonym of theirs, their beginning or a misspelling."""
    meant = _MEANT.get(name) or _MEANT_JOINED.get(name)
    if meant in known:
        return [meant]
    if len(name) < 3:
        return []
    return [option for option in known if option.startswith(name)][:2] or get_close_matches(
        name, known, n=2, cutoff=0.75
    )
