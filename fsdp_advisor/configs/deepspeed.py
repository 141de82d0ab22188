"""Reads DeepSpeed's JSON.

Source: deepspeed 0.19.8, runtime/config.py, runtime/zero/config.py, runtime/zero/offload_config.py, runtime/precision_config.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fsdp_advisor.configs.accelerate import set_offload, set_stage
from fsdp_advisor.configs.collect import Collector, active, brief, truth
from fsdp_advisor.configs.names import set_optimizer
from fsdp_advisor.configs.zero_buckets import DEFAULT_SIZES, set_buckets
from fsdp_advisor.errors import UsageError

_KEYS = {"zero_optimization", "train_micro_batch_size_per_gpu", "train_batch_size", "zero_allow_untested_optimizer"}
_HIERARCHIES = ("zero_hpz_partition_size", "mics_shard_size", "zero_quantized_weights", "zero_quantized_gradients")
_TOPICS = {
    "zero_optimization.ratio": "partial offload",
    "tensor_parallel": "tensor parallelism",
    "pipeline": "pipeline parallelism",
    "sequence_parallel_size": "context and sequence parallelism",
    "compression_training": "compression",
}


def is_deepspeed(keys: Mapping[str, Any]) -> bool:
    return bool(_KEYS & set(keys))


def read(file: str, keys: Mapping[str, Any]) -> Collector:
    """The settings of a configuration of DeepSpeed."""
    found = Collector(file, "DeepSpeed", keys)
    read_into(found)
    found.default(
        "framework", "deepspeed", "DeepSpeed's own training loop, because no file configures accelerate or the Trainer"
    )
    return found


def read_embedded(found: Collector, section: Mapping[str, Any]) -> None:
    """Read a section of another consumer's settings. Its "auto" values are replaced by those of the consumer."""
    found.take("deepspeed", shown="deepspeed")
    inner = Collector(found.file, "DeepSpeed", section)
    read_into(inner)
    found.options |= inner.options
    for option, (value, why) in inner.defaults.items():
        if option != "precision" or found.options.get("mixed") in (None, "no"):
            found.default(option, value, why)
    found.options.pop("mixed" if "precision" in inner.options else "", None)
    reading = inner.reading()
    refused = dict(reading.refused)
    for sentence in reading.not_modelled:
        if sentence in refused:
            found.refuses(f"deepspeed.{sentence}", refused[sentence])
        else:
            found.omits(f"deepspeed.{sentence}")


def read_into(found: Collector) -> None:
    """Set the options of DeepSpeed's settings, which are the keys of `found`."""
    _batch(found)
    _zero(found)
    _precision(found)
    section = found.section("optimizer")
    if section:
        arguments = section.get("optimizer.params")
        set_optimizer(found, "optimizer.type", arguments if isinstance(arguments, Mapping) else None)
        found.take("optimizer.params")
        _fused(found, arguments)
    _reduce_scatter(found)
    _checkpoints(found)
    for key, topic in _TOPICS.items():
        found.omits_active(topic, key)


def _reduce_scatter(found: Collector) -> None:
    """Take the switch if it has the value that the estimate assumes: under ZeRO-3 false for DeepSpeed's Muon, which needs it, else true.

    Source: runtime/zero/stage3.py, DeepSpeedZeroOptimizer_Stage3.__init__.
    """
    key = "zero_optimization.reduce_scatter"
    under_zero3 = found.options.get("strategy") == "zero3"
    needs_it_off = under_zero3 and found.options.get("optim") == "muon"
    value = truth(found.peek(key)) if found.peek(key) is not None else True
    if value != needs_it_off:
        found.take(key)
    elif needs_it_off:
        found.omits("DeepSpeed's Muon under ZeRO-3 fails without reduce_scatter: false, which the estimate assumes")
    elif under_zero3:
        found.omits_key(key, "the estimate assumes that gradients are reduce-scattered")


def _checkpoints(found: Collector) -> None:
    """Report the section on DeepSpeed's own `deepspeed.checkpointing.checkpoint`.

    The section has an effect only if the code calls `deepspeed.checkpointing.configure`. The engine does not call it, and transformers'
    layers use `torch.utils.checkpoint`.

    Source: runtime/activation_checkpointing/checkpointing.py, `_configure_using_config_file`; transformers 5.23, modeling_layers.py.
    """
    section = found.section("activation_checkpointing")
    asked = [key.partition(".")[2] for key, value in section.items() if active(value)]
    for key in section:
        found.take(key)
    if asked:
        found.assume(
            f"no effect of activation_checkpointing ({', '.join(asked)}): it changes only DeepSpeed's own checkpoints, and models of"
            " transformers have PyTorch's"
        )


def _fused(found: Collector, arguments: Any) -> None:
    """The optimizer for DeepSpeed's AdamW on the GPU: a fused kernel, or with `torch_adam` torch's AdamW, which takes torch's arguments.

    Source: deepspeed/runtime/engine.py, _configure_basic_optimizer.
    """
    if found.options.get("optim") == "adamw_torch":
        foreach = isinstance(arguments, Mapping) and arguments.get("torch_adam") and not arguments.get("fused")
        found.options["optim"] = "adamw_torch" if foreach else "adamw_torch_fused"


def _batch(found: Collector) -> None:
    """Set the batch sizes. A missing one follows from the number of ranks. If nothing else sets the number of ranks, it follows from the
    batch sizes.

    Source: runtime/config.py, `_set_batch_related_parameters`.
    """
    micro = found.number("train_micro_batch_size_per_gpu", "micro_batch_size")
    steps = found.number("gradient_accumulation_steps", "gradient_accumulation_steps")
    total = found.number("train_batch_size", "global_batch_size")
    if total and not micro and not steps:
        found.default("gradient_accumulation_steps", 1)
    per_rank = (micro or 1) * (steps or 1)
    if total and micro and total % per_rank == 0:
        found.guess(
            "gpus", total // per_rank, f"{total // per_rank} GPUs: train_batch_size / (micro-batch x accumulation)"
        )


def _precision(found: Collector) -> None:
    bf16, fp16 = found.section("bf16") or found.section("bfloat16"), found.section("fp16")
    halves = {"bf16": bf16, "fp16": fp16}
    enabled = {}
    for name, section in halves.items():
        key = next((key for key in section if key.endswith(".enabled")), "")
        enabled[name] = section.get(key)
        found.take(key)
    masters = sorted(
        key.partition(".")[2]
        for name, section in halves.items()
        if enabled[name] == "auto" or truth(enabled[name])
        for key in section
        if key.endswith(_MASTERS) and truth(found.take(key))
    )
    if "auto" not in enabled.values():
        if truth(enabled["bf16"]):
            found.options["precision"] = "bf16-mixed"
        elif truth(enabled["fp16"]):
            found.options["precision"] = "fp16-mixed"
        else:
            found.default("precision", "fp32", "fp32, because neither bf16 nor fp16 is enabled")
    if masters:
        _masters(found, masters)


_MASTERS = ("bf16_master_weights_and_grads", "bf16_optimizer_states", "fp16_master_weights_and_grads")


def _masters(found: Collector, masters: list[str]) -> None:
    """Set the precision for masters and optimizer states in 16 bits. `masters`: the keys among `_MASTERS` that are true.

    Source: runtime/config.py, `_do_error_check`; runtime/base_optimizer.py, `_configure_master_weights`, and its validators in
    runtime/zero/stage_1_and_2.py and stage3.py.
    """
    words = ", ".join(f"{key}: true" for key in masters)
    if found.options.get("strategy") == "ddp":
        found.refuses(f"{words} (DeepSpeed has 16-bit masters with ZeRO stages 1 to 3 only)", "set a ZeRO stage")
    elif masters == ["bf16_master_weights_and_grads", "bf16_optimizer_states"]:
        found.options["precision"] = "bf16"
    elif masters == ["bf16_optimizer_states"]:
        found.refuses(f"{words} (DeepSpeed requires bf16_master_weights_and_grads with it)", "set both, or neither")
    elif found.options.get("offload") == "none":
        or_both = ", or set bf16_optimizer_states too" if masters == ["bf16_master_weights_and_grads"] else ""
        found.refuses(
            f"{words} (DeepSpeed requires an offloaded optimizer, DeepSpeedCPUAdam, with it)",
            f"leave it out, or offload the optimizer{or_both}",
        )
    else:
        found.omits(f"{words} (masters in 16 bits with states in fp32; the estimate has masters in fp32)")


def _zero(found: Collector) -> None:
    options = found.options
    options["backend"] = "deepspeed"
    section = found.section("zero_optimization")
    set_stage(found, found.number("zero_optimization.stage"), 0)
    devices = []
    for name in ("offload_optimizer", "offload_param"):
        place = section.get(f"zero_optimization.{name}")
        found.take(f"zero_optimization.{name}")
        devices.append(str(place.get("device", "none")) if isinstance(place, Mapping) else "none")
        if isinstance(place, Mapping) and _ratio(found, name, place) < 1:
            found.omits(f"{name}.ratio: {place['ratio']} (partial offload)")
    set_offload(found, devices[0], devices[1])
    _buckets(found, section)
    found.omits_active("hierarchical or quantized ZeRO", *(f"zero_optimization.{key}" for key in _HIERARCHIES))


def _ratio(found: Collector, name: str, place: Mapping[str, Any]) -> float:
    """The part that is offloaded. Raises UsageError for a value that is no number."""
    ratio = place.get("ratio", 1)
    try:
        return float(ratio)
    except (TypeError, ValueError):
        raise UsageError(
            f"{found.file}: {name}.ratio is {brief(ratio)}, not a number", hint="correct the file"
        ) from None


def _buckets(found: Collector, section: Mapping[str, Any]) -> None:
    """Set the sizes of buckets. Those that the file leaves out are DeepSpeed's defaults: frameworks fill in "auto" only.

    Source: transformers 5.23, integrations/deepspeed.py, `fill_only`; accelerate 1.15, utils/dataclasses.py, `fill_match`.
    """
    sizes = {}
    for name, default in DEFAULT_SIZES.items():
        key = f"zero_optimization.{name}"
        if section.get(key) != "auto":
            given = found.peek_number(key)
            sizes[name] = default if given is None else given
        found.take(key)
    set_buckets(found.options, sizes)
    buffer = section.get("zero_optimization.allgather_bucket_size")
    if buffer is not None and active(buffer):
        found.take("zero_optimization.allgather_bucket_size")
