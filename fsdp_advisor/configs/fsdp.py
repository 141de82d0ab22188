"""The FSDP section, which accelerate, the Trainer and axolotl spell almost the same way."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from fsdp_advisor.configs.collect import Collector, truth
from fsdp_advisor.engines.fsdp1.sharding import NAMES, PREFETCH_NAMES, sharding_options

AS_DDP = "the estimate is of DDP, which keeps everything on each rank too"
"""What a reader says of NO_SHARD."""
OF_ACCELERATE = "fsdp_"
"""The prefix of the FSDP keys in accelerate's own configuration."""
STATE_DICTS = {"full": "full", "1": "full", "local": "local", "2": "local", "sharded": "sharded", "3": "sharded"}
"""The types of state dicts by name and by the number that accelerate takes, too."""
WRAP = ("transformer_based_wrap", "no_wrap")


def is_section(keys: Mapping[str, Any]) -> bool:
    """Whether the keys are those of a file for the Trainer's `--fsdp_config`."""
    plain = {str(key).removeprefix("fsdp_") for key in keys}
    return bool(plain & _OF_A_SECTION) and not any(isinstance(value, Mapping) for value in keys.values())


_OF_A_SECTION = {
    "transformer_layer_cls_to_wrap", "auto_wrap_policy", "backward_prefetch", "forward_prefetch", "cpu_ram_efficient_loading",
    "sync_module_states", "reshard_after_forward", "state_dict_type", "limit_all_gathers", "min_num_params",
}  # fmt: skip


def read_section(file: str, keys: Mapping[str, Any]) -> Collector:
    """The settings of a file for the Trainer's `fsdp_config`."""
    found = Collector(file, "the Trainer's fsdp_config", keys, optional_prefix="fsdp_")
    read_fsdp(found, "", found.number("version") or 2)
    return found


def read_fsdp(found: Collector, prefix: str, version: int, units: str = "layer") -> None:
    """Set strategy, backend, offload, checkpointing, wrapping and prefetching from the keys that begin with `prefix`.

    `units`: the consumer's wrap policy if the file names none. An unknown key is reported as ignored, because accelerate ignores it too.
    Source of the defaults: accelerate 1.15, commands/launch.py and utils/dataclasses.py, FullyShardedDataParallelPlugin; transformers
    5.23, training_args.py, _process_fsdp_args.
    """
    options = found.options
    options["backend"] = "fsdp2" if version == 2 else "fsdp1"
    strategy = _strategy(found, prefix, version)
    if strategy is None:
        found.default("strategy", "zero3", "full sharding, the default")
    else:
        options["strategy"] = strategy
    offload = [found.flag(f"{prefix}{name}") for name in ("offload_params", "cpu_offload")]
    if any(offload):
        options["offload"] = "parameters"
    else:
        found.default("offload", "none")
    _checkpoints(found, prefix, version)
    loads_on_rank_0 = found.peek(f"{prefix}cpu_ram_efficient_loading")
    found.loads_on_rank_0 = prefix == OF_ACCELERATE if loads_on_rank_0 is None else truth(loads_on_rank_0)
    if strategy == "ddp":
        options["backend"] = "ddp"
    else:
        _wrap(found, prefix, units)
        _prefetch(found, prefix, version)
        _state_dicts(found, prefix, usual="full" if version == 1 else "sharded")
    _original_parameters(found, f"{prefix}use_orig_params", version)


def _checkpoints(found: Collector, prefix: str, version: int) -> None:
    """Set checkpointing of the units, and offload of their inputs to host memory, which accelerate has with FSDP2. The Trainer passes only
    checkpointing to accelerate.

    Source: accelerate 1.15, utils/fsdp_utils.py, `fsdp2_apply_ac`; utils/dataclasses.py, FullyShardedDataParallelPlugin; transformers
    5.23, training_args.py, _process_fsdp_args.
    """
    checkpoints, offload = found.flag(f"{prefix}activation_checkpointing"), f"{prefix}activation_checkpointing_offload"
    if checkpoints:
        found.options["activation_checkpointing"] = "full"
        found.checkpoints.add("FSDP")
    if prefix == OF_ACCELERATE and checkpoints and version == 2:
        if found.flag(offload):
            found.options["activation_offload"] = True
    elif prefix == OF_ACCELERATE:
        found.omits_active(
            "accelerate refuses it without FSDP2 and activation checkpointing; the estimate leaves it out", offload
        )
    else:
        found.omits_active("the Trainer does not pass it on; the estimate keeps checkpoints on the GPU", offload)


def _state_dicts(found: Collector, prefix: str, usual: str) -> None:
    """Set the type of the state dicts in checkpoints if it is not the backend's usual one, which is accelerate's default. The Trainer saves
    full ones by default.

    Source: transformers 5.23, training_args.py, _process_fsdp_args; accelerate 1.15, utils/dataclasses.py, `set_state_dict_type`.
    """
    key = f"{prefix}state_dict_type"
    name = str(found.peek(key) or "").lower().removesuffix("_state_dict")
    if name in STATE_DICTS:
        found.take(key)
        if STATE_DICTS[name] != usual:
            found.options["state_dict_type"] = STATE_DICTS[name]
    elif prefix != OF_ACCELERATE and usual != "full":
        found.default("state_dict_type", "full", "full state dicts, the Trainer's default")


def _prefetch(found: Collector, prefix: str, version: int) -> None:
    """Set FSDP1's prefetching, which is off by default in accelerate and the Trainer. FSDP2 always prefetches."""
    if version != 1:
        return
    name = str(found.peek(f"{prefix}backward_prefetch") or "").lower()
    known = {of_accelerate.lower(): own for own, of_accelerate in PREFETCH_NAMES.items()}
    if name in known:
        found.take(f"{prefix}backward_prefetch")
        found.options["backward_prefetch"] = known[name]
    else:
        found.omits_active("the estimate has no prefetching", f"{prefix}backward_prefetch")
        found.default("backward_prefetch", "none", "no backward prefetching, the default of accelerate and the Trainer")
    if found.flag(f"{prefix}forward_prefetch"):
        found.options["forward_prefetch"] = True


def _original_parameters(found: Collector, key: str, version: int) -> None:
    """Set FSDP1's `use_orig_params`, which is true by default. FSDP2 ignores it.

    Source: accelerate 1.15, commands/launch.py; transformers 5.23, training_args.py, _process_fsdp_args.
    """
    given = found.flag(key)
    if version == 1 and given is False:
        found.options["use_orig_params"] = False


def _strategy(found: Collector, prefix: str, version: int) -> str | None:
    """The strategy in the file; None if there is none. FSDP1 uses only `sharding_strategy`."""
    reshard_key, name_key = f"{prefix}reshard_after_forward", f"{prefix}sharding_strategy"
    return _strategy_1(found, name_key, reshard_key) if version == 1 else _strategy_2(found, name_key, reshard_key)


def _strategy_1(found: Collector, name_key: str, reshard_key: str) -> str | None:
    name = str(found.peek(name_key) if name_key in found else "full_shard").lower()
    if str(found.peek(reshard_key)).lower() in ("none", "true", "1", name):
        found.take(reshard_key)
    found.omits_key(reshard_key, f"with FSDP1 it has no effect: {name} decides")
    sharding = sharding_options(name)
    if sharding is None:
        near = difflib.get_close_matches(name.upper(), NAMES, n=1)
        meant = f"did you mean {near[0]}? " if near else ""
        found.omits_key(name_key, f"{meant}the estimate assumes full sharding")
        return None
    found.options |= sharding
    if sharding["strategy"] == "ddp":
        found.omits_key(name_key, AS_DDP)
    found.take(name_key)
    return sharding["strategy"]


def _strategy_2(found: Collector, name_key: str, reshard_key: str) -> str | None:
    """The strategy of FSDP2, from `reshard_after_forward`; None if the file does not have it. FSDP2 ignores accelerate's
    `sharding_strategy`.
    """
    reshard = found.peek(reshard_key)
    if str(found.peek(name_key)).lower() in ("none", "full_shard", "1"):
        found.take(name_key)
    found.omits_key(name_key, "FSDP2 follows reshard_after_forward instead")
    if type(reshard) is int and reshard > 1:  # a number of ranks
        found.options["reshard_after_forward"] = str(found.take(reshard_key))
        return "zero3"
    if reshard is None:
        return None
    if str(reshard).lower() not in ("true", "false", "yes", "no", "1", "0", "on", "off"):
        found.omits_key(reshard_key, "with FSDP2 it must be true or false; the estimate assumes true")
        return None
    return "zero3" if truth(found.take(reshard_key)) else "zero2"


def _wrap(found: Collector, prefix: str, units: str) -> None:
    key = f"{prefix}auto_wrap_policy"
    policy = str(found.peek(key) or "").lower()
    if not policy and units == "none":
        found.default("wrap", "none", f"one unit with all parameters, because {key} is not given")
    if policy in WRAP or (not policy and units == "layer" and f"{prefix}transformer_layer_cls_to_wrap" in found):
        found.take(key)
        classes = found.take(f"{prefix}transformer_layer_cls_to_wrap")
        found.options["wrap"] = wrap = "none" if policy == "no_wrap" else wrap_of(classes)
        found.layer_classes += _names(classes) if wrap == "layer" else []
    elif policy == "size_based_wrap":
        found.take(key)
        least = found.number(f"{prefix}min_num_params") or 0
        # accelerate ignores the policy without a number
        found.options["wrap"] = f"size:{least}" if least > 0 else "none"
    elif policy:
        found.omits_key(key, "the estimate assumes one unit per layer")
    found.take(f"{prefix}transformer_layer_cls_to_wrap")


def wrap_of(classes: Any) -> str:
    """The wrap policy for classes, as a list or as text with commas: `layer` if they look like a model's layers."""
    names = _names(classes)
    return "layer" if all(name.endswith(("Layer", "Block")) for name in names) else f"class:{','.join(names)}"


def _names(classes: Any) -> list[str]:
    names = classes if isinstance(classes, list) else str(classes or "").split(",")
    return [str(name).strip() for name in names if str(name).strip()]


def read_replicas(found: Collector, replicas: Any, shards: Any) -> None:
    """Set HSDP or DDP from the degrees of a device mesh. An estimate of HSDP has one replica per node."""
    replicas, shards = int(replicas or 1), int(shards or 1)
    if replicas > 1:
        if shards > 1 and found.options.get("strategy") == "zero2":
            found.options["reshard_after_forward"] = "false"
        found.options["strategy"] = "hsdp" if shards > 1 else "ddp"
        if shards > 1:
            found.default("nnodes", replicas, f"{replicas} nodes, one for each replica")
        else:
            found.options["backend"] = "ddp"
    if replicas * shards > 1:
        found.default(
            "gpus", replicas * shards, f"{replicas * shards} GPUs, the size of the mesh of replicas and shards"
        )
