"""Reads LLaMA-Factory's YAML: the Trainer's arguments, and its own.

Source: LLaMA-Factory 0.9.5, hparams/{model,data,finetuning}_args.py, hparams/parser.py, model/{adapter,patcher}.py,
model/model_utils/quantization.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from fsdp_advisor.configs.adapters import has_adapters, set_lora, set_quantization
from fsdp_advisor.configs.collect import Collector, truth
from fsdp_advisor.configs.llamafactory_towers import KEYS, USUAL, Frozen, excluded, frozen_parts
from fsdp_advisor.configs.names import set_attention
from fsdp_advisor.configs.trainer import read_into
from fsdp_advisor.job.frameworks import FRAMEWORKS
from fsdp_advisor.job.images import square_of
from fsdp_advisor.job.unknown_options import TASKS_OF_TRL
from fsdp_advisor.model import catalog
from fsdp_advisor.model.freezing import parameter_names
from fsdp_advisor.model.multimodal import ImageModel, vision_parts

_OWN = {
    "finetuning_type",
    "cutoff_len",
    "template",
    "dataset_dir",
    "flash_attn",
    "quantization_bit",
    "enable_liger_kernel",
}
_TOPICS = {
    "an existing adapter": ("adapter_name_or_path",),
    "quantized weights": ("quantization_bit", "quantization_method"),
    "frozen parameters": ("freeze_trainable_layers", "freeze_trainable_modules", "freeze_extra_modules", "use_llama_pro"),
    "the optimizer": ("use_galore", "use_apollo", "use_badam", "use_muon"),
    "kernels of unsloth": ("use_unsloth", "use_unsloth_gc"),
    "mixture of depths": ("mixture_of_depths",),
    "the routers' loss": ("moe_aux_loss_coef",),
}  # fmt: skip


def is_llamafactory(keys: Mapping[str, Any]) -> bool:
    return bool(_OWN & set(keys))


def read(file: str, keys: Mapping[str, Any], *, replaces: bool = False) -> Collector:
    """The settings of a configuration of LLaMA-Factory, which trains through the Trainer.

    `replaces`: whether the keys only override some keys of a file.
    """
    found = Collector(file, "LLaMA-Factory", keys)
    given = any(key in found for key in KEYS)
    frozen = _frozen(found)
    if not replaces or "finetuning_type" in found:
        _adapters(found, frozen)
    _stage(found)
    found.number("cutoff_len", "seq_len")
    found.default("seq_len", 2048, "2048 tokens, LLaMA-Factory's default of cutoff_len")
    set_attention(found, "flash_attn")
    if not replaces or "use_reentrant_gc" in found or "disable_gradient_checkpointing" in found:
        checkpointing = "full" if found.flag("use_reentrant_gc") is False else "reentrant"  # reentrant by default
        why = "gradient checkpointing, which LLaMA-Factory switches on"
        if found.flag("disable_gradient_checkpointing"):
            checkpointing, why = "none", ""
        found.default("activation_checkpointing", checkpointing, why)
    if truth(found.peek("pure_bf16") or False):
        found.take("pure_bf16")
        found.options["precision"] = "bf16"
    for topic, names in _TOPICS.items():
        found.omits_active(topic, *names)
    neat = found.flag("neat_packing")
    if neat or found.flag("packing"):
        found.options["packing"] = "bfd" if neat else "wrapped"
    found.take("packing")
    if neat and found.options.get("attention") != "flash_attention_2":
        found.omits(
            "neat_packing without flash attention passes a mask of numbers; the estimate has transformers' own mask"
        )
    if "task" in found.options:
        found.omits_active("Liger's kernels with preferences", "enable_liger_kernel")
    elif found.flag("enable_liger_kernel"):
        found.options["use_liger_kernel"] = True
    has_images = _images(found)
    _towers(found, frozen, given=given or has_images)
    has_engine = found.peek("fsdp") or found.peek("deepspeed")
    read_into(found)
    found.options["framework"] = "llamafactory"
    if found.flag("use_adam_mini"):  # replaces `optim`
        found.options["optim"] = "adam_mini"
    if not has_engine:
        found.guess("strategy", "ddp", "DDP, because neither fsdp nor deepspeed is set")
    return found


_OF_PREFERENCES = (
    "pref_beta", "pref_ftx", "pref_bco_weight", "dpo_label_smoothing", "kto_chosen_weight", "kto_rejected_weight",
)  # fmt: skip
"""Keys of losses that have no effect on memory and time."""
_WITHOUT_REFERENCE = ("orpo", "simpo")


def _stage(found: Collector) -> None:
    """Set the task. Source: train/tuner.py; hparams/finetuning_args.py, `use_ref_model`."""
    stage, loss = found.take("stage") or "sft", found.take("pref_loss")
    if stage not in ("sft", "pt", "dpo", "kto"):
        found.refuses(f"stage: {stage} (preference and reinforcement learning)", TASKS_OF_TRL)
    elif stage == "dpo" and loss in _WITHOUT_REFERENCE:
        found.refuses(f"pref_loss: {loss} (a loss of preferences without a reference model)", TASKS_OF_TRL)
    elif stage in ("dpo", "kto"):
        found.options["task"] = stage
        for key in _OF_PREFERENCES:
            found.take(key)
        found.omits_active(
            "a reference model other than the trained model before training", "ref_model", "ref_model_adapters"
        )
        found.omits_active("weights of log-probabilities, small tensors", "ld_alpha")


def _images(found: Collector) -> bool:
    """Set the size of images; whether the file has one. It does not contain their number per sample. Source: hparams/model_args.py."""
    pixels = found.number("image_max_pixels")
    found.take("image_min_pixels")
    if pixels is not None:
        found.options["image_size"] = size = square_of(pixels)
        found.assume(
            f"images of {size} pixels, the largest square of image_max_pixels; images_per_sample says how many"
        )
    return pixels is not None


def _frozen(found: Collector) -> Frozen:
    """The parts of a multimodal model that are not trained. Source: hparams/finetuning_args.py."""
    tower, projector, language = (found.flag(key) for key in KEYS)
    return tower is not False, projector is not False, bool(language)


def _towers(found: Collector, frozen: Frozen, *, given: bool) -> None:
    """Freeze the vision tower and the projector of a catalogued model in full fine-tuning, as LLaMA-Factory does by default.

    `given`: whether the file says that the model is multimodal. Source: model/adapter.py, `_setup_full_tuning`.
    """
    entry = catalogued(found)
    parts = tuple(vision_parts(catalog.profile(entry))) if entry else ()
    if not any(frozen):
        return
    if has_adapters(found.options):
        if given and entry is None:
            found.omits(
                "LLaMA-Factory makes no adapters in the vision tower and the projector of a multimodal model unless freeze_vision_tower and"
                " freeze_multi_modal_projector are false; those that lora_target names there are counted"
            )
    elif frozen == USUAL and parts:
        found.options["freeze"] = parts
        found.assume(f"{' and '.join(parts)} frozen: the vision tower and the projector, which LLaMA-Factory freezes")
    elif entry is not None and (
        others := frozen_parts(entry.model_type, parameter_names(catalog.profile(entry)), frozen)
    ):
        found.options["freeze"] = others
        found.assume(f"{' and '.join(others)} frozen, as the file's freeze_ keys say")
    elif given:
        found.omits(
            "LLaMA-Factory trains neither the vision tower nor the projector of a multimodal model unless freeze_vision_tower and"
            " freeze_multi_modal_projector are false: name them with freeze"
        )


def catalogued(found: Collector) -> catalog.Entry | None:
    """The model, if the catalog has it."""
    model = found.peek("model_name_or_path")
    return catalog.find(model) if isinstance(model, str) else None


def without_adapters(found: Collector, frozen: Frozen, targets: object, *, everywhere: bool) -> str | None:
    """A pattern of the modules of a catalogued multimodal model that get no adapters although `targets` may name them; None if there are
    none. `everywhere`: `lora_target` is all.
    """
    entry = catalogued(found)
    if entry is None or not vision_parts(profile := catalog.profile(entry)):
        return None
    pattern = excluded(entry.model_type, frozen, everywhere=everywhere)
    if pattern is None or not isinstance(targets, list):
        return pattern
    return pattern if any(re.fullmatch(pattern, m) for m in ImageModel.of(profile).named(targets)) else None


def _adapters(found: Collector, frozen: Frozen) -> None:
    """Read LLaMA-Factory's `finetuning_type`, and its keys of LoRA and quantization."""
    kind = found.peek("finetuning_type")
    if kind not in (None, "lora", "full"):
        found.omits_key(
            "finetuning_type", "the trained layers depend on the number of layers: name the frozen ones with freeze"
        )
    elif kind == "full":
        found.take("finetuning_type")
    if kind not in (None, "lora"):
        return
    found.take("finetuning_type") if kind else found.assume("LoRA, LLaMA-Factory's default of finetuning_type")
    rank = found.number("lora_rank") or 8
    config = {
        "r": rank,
        "lora_alpha": found.take("lora_alpha") or 2 * rank,
        "lora_dropout": found.take("lora_dropout") or 0.0,
        "target_modules": found.take("lora_target") or "all",
        "modules_to_save": found.take("additional_target"),
        "use_dora": found.take("use_dora"),
        "use_rslora": found.take("use_rslora"),
    }
    targets = config["target_modules"]
    everywhere = targets in ("all", ["all"])
    if everywhere:
        config["target_modules"] = "all-linear"
    elif isinstance(targets, str):
        config["target_modules"] = [name.strip() for name in targets.split(",")]
    config["exclude_modules"] = without_adapters(found, frozen, config["target_modules"], everywhere=everywhere)
    set_lora(found, config)
    if truth(found.peek("bf16") or False):
        found.options["dtype"] = "bfloat16"
    elif truth(found.peek("fp16") or False):
        found.options["dtype"] = "float16"
    method = str(found.peek("quantization_method") or "bnb").lower()
    bits = found.peek("quantization_bit")
    if bits is None or method not in ("bnb", "bitsandbytes"):
        return
    found.take("quantization_method")
    found.number("quantization_bit")
    nested = found.peek("double_quantization")
    found.take("double_quantization")
    config = {
        f"load_in_{bits}bit": True,
        "bnb_4bit_quant_type": found.take("quantization_type") or "nf4",
        "bnb_4bit_use_double_quant": FRAMEWORKS["llamafactory"].nests_scales if nested is None else truth(nested),
        "bnb_4bit_quant_storage": found.options.get("dtype", "float32"),
    }
    set_quantization(found, config)
