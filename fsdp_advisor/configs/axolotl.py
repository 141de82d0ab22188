"""Reads axolotl's YAML.

Source: axolotl 0.19.0, utils/schemas/{config,fsdp,model,training,peft,validation}.py, utils/config/__init__.py,
loaders/{adapter,model}.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from fsdp_advisor.configs.adapters import set_lora, set_quantization
from fsdp_advisor.configs.checkpointing import set_reentrant
from fsdp_advisor.configs.collect import Collector, active, truth
from fsdp_advisor.configs.compilation import read_torch_compile
from fsdp_advisor.configs.deepspeed import read_embedded
from fsdp_advisor.configs.fsdp import read_fsdp, read_replicas
from fsdp_advisor.configs.names import set_attention, set_experts, set_optimizer
from fsdp_advisor.configs.trainer import read_clipping, read_words
from fsdp_advisor.job.adapter_fields import LORA_KERNELS
from fsdp_advisor.job.frameworks import FRAMEWORKS
from fsdp_advisor.job.tiled_mlp import AXOLOTL_WITH_FSDP2
from fsdp_advisor.job.unknown_options import TASKS_OF_TRL
from fsdp_advisor.model import catalog
from fsdp_advisor.model.freezing import parameter_names

LORA_KERNEL_KEYS = {f"lora_{part}_kernel": part for part in LORA_KERNELS}
"""axolotl's key -> the part of the model for whose adapters it switches axolotl's kernels on."""
_TOPICS = {
    "LoRA restarts": ("relora",),
    "quantized weights": ("gptq", "qat", "quantization"),
    "norms in fp32, which are FSDP2 units of their own": ("fp32_norms", "fp32_norm_classes"),
    "kernels for experts; the estimate assumes transformers' grouped_mm": ("use_scattermoe", "use_sonicmoe"),
    "other losses": ("chunked_cross_entropy", "flash_attn_cross_entropy"),
    "some of Liger's kernels without the others": (
        "liger_rope", "liger_rms_norm", "liger_glu_activation", "liger_layer_norm", "liger_cross_entropy",
    ),
    "plugins": ("plugins",),
    "tensor and context parallelism": ("tensor_parallel_size", "context_parallel_size", "sequence_parallel_degree"),
    "preference and reinforcement learning": ("rl_beta",),
    "activation offload": ("activation_offloading", "layer_offloading"),
    "patterns of the parameters that are trained; name the others with freeze": ("unfrozen_parameters",),
    "settings of the model's configuration, such as output_router_logits": ("overrides_of_model_config", "model_config"),
    "fp8 by accelerate's recipe for torchao, in the Trainer": ("fp8",),
}  # fmt: skip
_SWITCHES = {"flash_attention": "flash_attention_2", "sdp_attention": "sdpa", "eager_attention": "eager"}
LORA_KEYS = {
    "r": "lora_r",
    "lora_alpha": "lora_alpha",
    "lora_dropout": "lora_dropout",
    "target_modules": "lora_target_modules",
    "target_parameters": "lora_target_parameters",
    "modules_to_save": "lora_modules_to_save",
    "use_dora": "peft_use_dora",
    "use_rslora": "peft_use_rslora",
    "layers_to_transform": "peft_layers_to_transform",
    "layers_pattern": "peft_layers_pattern",
    "exclude_modules": "lora_exclude_modules",
    "trainable_token_indices": "peft_trainable_token_indices",
    "rank_pattern": "lora_rank_pattern",
    "alpha_pattern": "lora_alpha_pattern",
    "layer_replication": "peft_layer_replication",
    "ensure_weight_tying": "peft_ensure_weight_tying",
    "fan_in_fan_out": "lora_fan_in_fan_out",
    "init_lora_weights": "peft_init_lora_weights",
}
"""Keyword of PEFT's LoraConfig -> axolotl's key."""
_LORA_OPTIONAL = ("target_parameters", "modules_to_save", "ensure_weight_tying", "fan_in_fan_out")
"""Keywords whose empty values mean that the key is not set."""


def is_axolotl(keys: Mapping[str, Any]) -> bool:
    return "base_model" in keys


def read(file: str, keys: Mapping[str, Any]) -> Collector:
    """The settings of a configuration of axolotl."""
    found = Collector(file, "axolotl", keys)
    options = found.options
    options["framework"] = "axolotl"
    options["model"] = found.text("base_model")
    found.number("sequence_len", "seq_len")
    found.number("micro_batch_size", "micro_batch_size")
    found.number("gradient_accumulation_steps", "gradient_accumulation_steps")
    found.default("seq_len", 512, "512 tokens, axolotl's default of sequence_len")
    _precision(found)
    _adapters(found)
    read_clipping(found)
    set_attention(found, "attn_implementation")
    set_experts(found)
    for key, attention in _SWITCHES.items():
        if found.flag(key):
            options["attention"] = attention
    set_optimizer(found, "optimizer", found.peek("optim_args"))
    found.take("optim_args")
    if found.peek("gradient_checkpointing") == "offload":
        found.omits_key("gradient_checkpointing", "activation offload; the estimate keeps checkpoints on the GPU")
        options["activation_checkpointing"] = "full"
    elif found.flag("gradient_checkpointing"):
        options["activation_checkpointing"] = "full"
        found.checkpoints.add("Trainer")
    keywords = found.take("gradient_checkpointing_kwargs")
    if (
        isinstance(keywords, Mapping)
        and keywords.get("use_reentrant") is True
        and "activation_checkpointing" in options
    ):
        set_reentrant(found)
    _batches(found)
    _evaluation(found)
    _images(found)
    _sharding(found)
    _loss(found)
    _tiled_mlp(found)
    read_torch_compile(found)
    for topic, names in _TOPICS.items():
        found.omits_active(topic, *names)
    for key in ("rl", "reward_model", "process_reward_model"):
        if active(found.peek(key)):
            found.refuses(f"{key}: {found.take(key)} (preference and reinforcement learning)", TASKS_OF_TRL)
    return found


def read_overrides(file: str, keys: Mapping[str, Any]) -> Collector:
    """The options of `axolotl train`, which replace keys of its file."""
    found = Collector(file, "axolotl command", keys)
    for key, option in (("micro_batch_size", "micro_batch_size"), ("sequence_len", "seq_len")):
        found.number(key, option)
    found.number("gradient_accumulation_steps", "gradient_accumulation_steps")
    if isinstance(found.peek("base_model"), str):
        found.options["model"] = found.take("base_model")
    if (checkpoints := found.flag("gradient_checkpointing")) is not None:
        found.options["activation_checkpointing"] = "full" if checkpoints else "none"
    for key in keys:
        if key not in _WITHOUT_EFFECT:
            found.omits_key(key, "write it into the file")
    return found


_WITHOUT_EFFECT = (
    "launcher",
    "learning_rate",
    "num_epochs",
    "max_steps",
    "output_dir",
    "seed",
    "debug",
    "wandb_project",
    "wandb_name",
)
"""Options of the command that change neither memory nor time."""


def _batches(found: Collector) -> None:
    """Set packing and flattening. Source: core/builders/causal.py: without flash attention each row of the batch is packed separately."""
    flash = found.options.get("attention") == "flash_attention_2"
    if found.flag("sample_packing"):
        found.options["packing"] = "bfd"
        if not flash and found.options.get("micro_batch_size", 1) > 1:
            found.omits(
                "sample_packing without flash attention packs each row separately; the estimate assumes all tokens in one row"
            )
    flattens = found.take("batch_flattening")
    if flattens and (flash or flattens != "auto") and "packing" not in found.options:
        found.options["padding_free"] = True


def _evaluation(found: Collector) -> None:
    """Set when and with which batches axolotl evaluates. Without `compute_metrics`, which axolotl does not pass, only losses are kept.

    Source: core/builders/base.py, `_configure_save_and_eval_strategy`; utils/config/__init__.py, `normalize_config`.
    """
    sets = [found.take(key) for key in ("val_set_size", "test_datasets")]
    strategies = [found.take(key) for key in ("eval_strategy", "evaluation_strategy")]
    times = [found.take(key) for key in ("eval_steps", "evals_per_epoch")]
    strategy = next(filter(None, strategies), "steps" if any(times) else "no")
    batch_size = found.number("eval_batch_size") or found.options.get("micro_batch_size", 1)
    if any(sets) and strategy in ("steps", "epoch"):
        found.options |= {"eval_strategy": strategy, "per_device_eval_batch_size": batch_size}


def _images(found: Collector) -> None:
    """Set the size of images. A single number is the side of a square. Source: utils/schemas/multimodal.py."""
    size = found.take("image_size")
    if size is not None:
        sides = size if isinstance(size, (list, tuple)) else (size, size)
        found.options["image_size"] = "x".join(map(str, sides))
        found.assume("images of image_size; images_per_sample says how many a sample has")
    if truth(found.peek("freeze_mm_modules") or False):
        _frozen_towers(found)


_TOWERS = (
    "vision_tower", "vision_model", "vision_encoder", "embed_vision", "multi_modal_projector", "visual", "audio_tower", "audio_model",
    "embed_audio",
)  # fmt: skip
"""The modules that `freeze_mm_modules` freezes. Source: utils/freeze.py, `freeze_mm_modules`."""


def frozen_modules(parameters: Iterable[str]) -> tuple[str, ...]:
    """The modules around these parameters that `freeze_mm_modules` freezes.

    >>> frozen_modules(["model.visual.merger.mlp.0.weight", "lm_head.weight"])
    ('visual',)
    """
    return tuple(dict.fromkeys(part for name in parameters for part in name.split(".") if part in _TOWERS))


def _frozen_towers(found: Collector) -> None:
    """Freeze the towers of a catalogued model."""
    model = found.options.get("model")
    entry = catalog.find(model) if isinstance(model, str) else None
    parts = frozen_modules(parameter_names(catalog.profile(entry))) if entry is not None else ()
    if parts:
        found.take("freeze_mm_modules")
        found.options["freeze"] = parts
    else:
        found.omits_key("freeze_mm_modules", "name the vision tower and the projector with freeze")


LIGER_KERNELS = ("liger_rope", "liger_rms_norm", "liger_glu_activation")
"""axolotl's keys for the kernels of `use_liger_kernel`."""
_LOSS_PLUGINS = ("LigerPlugin", "CutCrossEntropyPlugin")


def _loss(found: Collector) -> None:
    """Set the loss from axolotl's plugins. Source: integrations/{liger,cut_cross_entropy}/args.py; cut_cross_entropy's default is true."""
    plugins = [name.rpartition(".")[2] for name in found.peek_names("plugins")]
    has_kernels = all(truth(found.peek(name)) for name in LIGER_KERNELS)
    if has_kernels:
        for name in (*LIGER_KERNELS, "liger_layer_norm"):
            found.flag(name)
        found.options["use_liger_kernel"] = True
    has_loss = found.flag("liger_fused_linear_cross_entropy")
    if has_kernels != bool(has_loss):
        found.options["loss"] = "liger" if has_loss else "full"
    cuts = found.flag("cut_cross_entropy")
    if "CutCrossEntropyPlugin" in plugins and cuts is not False:
        found.options["loss"] = "cce"
    if plugins and set(plugins) <= set(_LOSS_PLUGINS):
        found.take("plugins")


def _tiled_mlp(found: Collector) -> None:
    """Set the shards of feed-forward networks. Source: utils/schemas/config.py; monkeypatch/tiled_mlp/{patch,base}.py."""
    if not active(found.peek("tiled_mlp")):
        return
    if found.options.get("backend") == "fsdp2":
        found.omits_key("tiled_mlp", AXOLOTL_WITH_FSDP2)
        return
    found.take("tiled_mlp")
    shards = found.number("tiled_mlp_num_shards")
    found.options["tiled_mlp"] = "auto" if shards is None else str(shards)
    if found.flag("tiled_mlp_use_original_mlp") is False:
        found.omits(
            "tiled_mlp_use_original_mlp: false, which compiles the shards; the estimate assumes the model's own code"
        )


def _precision(found: Collector) -> None:
    bf16, fp16 = found.peek("bf16"), found.peek("fp16")
    if bf16 == "full":
        found.take("bf16")
        found.options["precision"] = "bf16"
        return
    on = [found.flag(key) for key in ("bf16", "fp16", "bfloat16", "float16")]
    if bf16 == "auto":
        on[0] = True
    if bf16 is None and fp16 is None:
        found.default("mixed", "bf16", "bf16, axolotl's choice on GPUs that have it")
    else:
        mixed = "bf16" if on[0] or on[2] else "fp16" if on[1] or on[3] else "no"
        if mixed == "no":
            found.default("mixed", mixed)
        else:
            found.options["mixed"] = mixed


def _sharding(found: Collector) -> None:
    replicas, shards = found.number("dp_replicate_size"), found.number("dp_shard_size")
    place = found.peek("deepspeed")
    if "fsdp_config" in found or active(found.peek("fsdp")):
        found.section("fsdp_config", optional_prefix="fsdp_")
        version = found.number("fsdp_version") or found.number("fsdp_config.version") or 1
        if (words := found.take("fsdp")) is not True:
            read_words(found, words or [], version)
        read_fsdp(found, "fsdp_config.", version)
        read_replicas(found, replicas, shards)
    elif isinstance(place, str) and place:
        found.refer("deepspeed")
        found.default("backend", "deepspeed")
    elif isinstance(place, Mapping):
        read_embedded(found, place)
    else:
        found.guess("strategy", "ddp", "DDP, because neither fsdp_config nor deepspeed is set")


def _adapters(found: Collector) -> None:
    """Set the adapter from `adapter` and the keys that begin with lora_ and peft_. In 4 bits axolotl uses nested quantization and
    stores bf16.
    """
    adapter = found.peek("adapter")
    if adapter in (None, "", False):
        return
    if adapter not in ("lora", "qlora"):
        found.omits_key("adapter", "an adapter that is not modelled; the estimate trains every parameter")
        return
    found.take("adapter")
    config = {name: found.take(key) for name, key in LORA_KEYS.items()}
    config["lora_dropout"] = config["lora_dropout"] or 0.0
    config |= {name: config[name] or None for name in _LORA_OPTIONAL}
    if active(found.peek("peft_autocast_adapter_dtype")):
        found.take("peft_autocast_adapter_dtype")  # PEFT's default
    else:
        found.omits_key("peft_autocast_adapter_dtype", "adapters in the base's dtype; the estimate has them in fp32")
    if found.flag("lora_target_linear"):
        config["target_modules"] = "all-linear"
    set_lora(found, config)
    if "bf16" in (found.options.get("mixed"), *found.defaults.get("mixed", ())):
        found.options["dtype"] = "bfloat16"
    elif "fp16" in (found.options.get("mixed"), *found.defaults.get("mixed", ())):
        found.options["dtype"] = "float16"
    _adapter_kernels(found)
    given = found.take("bnb_config_kwargs")
    loads = {"load_in_4bit": found.flag("load_in_4bit"), "load_in_8bit": found.flag("load_in_8bit")}
    facts = FRAMEWORKS["axolotl"]
    usual = {
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": facts.nests_scales,
        "bnb_4bit_quant_storage": facts.packed_storage,
    }
    set_quantization(found, {**loads, **usual, **(given if isinstance(given, Mapping) else {})})
    if active(found.peek("quantize_moe_experts")):
        if loads["load_in_4bit"] and not config["target_parameters"]:
            found.options["quantize_moe_experts"] = found.flag("quantize_moe_experts")
        else:
            topic = "experts in 8 bits, or packed experts with adapters; the estimate assumes 16 bits"
            found.omits_key("quantize_moe_experts", topic)


def _adapter_kernels(found: Collector) -> None:
    """Set the parts of the model with axolotl's kernels for adapters. If the file has none of their switches, axolotl chooses.

    Source: axolotl 0.19, utils/schemas/config.py, `check_auto_enable_lora_kernels`.
    """
    given = {name: found.take(name) for name in LORA_KERNEL_KEYS}
    if any(value is not None for value in given.values()):
        on = [part for name, part in LORA_KERNEL_KEYS.items() if active(given[name])]
        found.options["lora_kernels"] = ",".join(on) or "none"
    elif active(found.peek("trust_remote_code")):
        found.options["lora_kernels"] = "none"
