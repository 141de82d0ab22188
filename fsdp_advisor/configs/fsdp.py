"""The FSDP section, which accelerate, the Trainer and axolotl spell almost the same way."""

from __future__ import annotations

from typing import Any

from fsdp_advisor.configs.collect import Collector, truth

SHARDING = {
    "shard_grad_op": "zero2",
    "full_shard": "zero3",
    "hybrid_shard": "hsdp",
    "hybrid_shard_zero2": "hsdp",
    "1": "zero3",
    "2": "zero2",
    "4": "hsdp",
    "5": "hsdp",
}
"""FSDP1's sharding strategies by name, and by the number that accelerate also accepts. Source: accelerate/utils/constants.py,
FSDP_SHARDING_STRATEGY."""
HYBRID_ZERO2 = ("hybrid_shard_zero2", "5")
"""Those that keep gathered parameters after forward."""
PREFETCH = {"backward_pre": "pre", "backward_post": "post", "no_prefetch": "none"}
NO_SHARD = ("no_shard", "3")
WRAP = ("transformer_based_wrap", "no_wrap")


def read_fsdp(found: Collector, prefix: str, version: int) -> None:
    """Set strategy, backend, offload, checkpointing, wrapping and prefetching from the keys that begin with `prefix`.

    An unknown key is reported as ignored, which is also what accelerate does with it.
    """
    options = found.options
    options["backend"] = "fsdp2" if version == 2 else "fsdp1"
    options["strategy"] = _strategy(found, prefix, version)
    offload = found.flag(f"{prefix}offload_params") or found.flag(f"{prefix}cpu_offload")
    options["offload"] = "parameters" if offload else "none"
    if found.flag(f"{prefix}activation_checkpointing"):
        options["activation_checkpointing"] = "full"
    _wrap(found, prefix)
    prefetch = found.peek(f"{prefix}backward_prefetch")
    if version == 1 and isinstance(prefetch, str) and prefetch.lower() in PREFETCH:
        found.take(f"{prefix}backward_prefetch")
        options["backward_prefetch"] = PREFETCH[prefetch.lower()]
    if version == 1 and found.flag(f"{prefix}forward_prefetch"):
        options["forward_prefetch"] = True
    if options["strategy"] == "ddp":
        options["backend"] = "ddp"
        for name in ("wrap", "backward_prefetch", "forward_prefetch"):
            options.pop(name, None)
    _original_parameters(found, f"{prefix}use_orig_params", version)


def _original_parameters(found: Collector, key: str, version: int) -> None:
    """Report FSDP1 without `use_orig_params`, which the estimate assumes. FSDP2 ignores it.

    Source: torch/distributed/fsdp/_flat_param.py, `_validate_tensors_to_flatten`; accelerate's default is true.
    """
    if version == 1 and key in found and not truth(found.peek(key)):
        found.lacks(key, "the estimate assumes true; with false, FSDP1 refuses a unit of which only a part is trained")
    else:
        found.take(key)


def _strategy(found: Collector, prefix: str, version: int) -> str:
    reshard = found.peek(f"{prefix}reshard_after_forward")
    name = found.peek(f"{prefix}sharding_strategy")
    if version == 1:
        given = name if name is not None else reshard
        words = str(given).lower()
        if words in SHARDING:
            found.take(f"{prefix}sharding_strategy")
            found.take(f"{prefix}reshard_after_forward")
            if words in HYBRID_ZERO2:
                found.options["reshard_after_forward"] = "false"
            return SHARDING[words]
        if words in NO_SHARD:
            found.lacks(f"{prefix}sharding_strategy", "the estimate is of DDP, which keeps everything on each rank too")
            return "ddp"
        if given is not None and not isinstance(given, bool):
            found.lacks(f"{prefix}sharding_strategy", "the estimate assumes full sharding")
            return "zero3"
    if isinstance(reshard, int) and not isinstance(reshard, bool):
        found.options["reshard_after_forward"] = str(found.take(f"{prefix}reshard_after_forward"))
        return "zero3"
    found.take(f"{prefix}reshard_after_forward")
    return "zero3" if reshard is None or truth(reshard) else "zero2"


def _wrap(found: Collector, prefix: str) -> None:
    key = f"{prefix}auto_wrap_policy"
    policy = str(found.peek(key) or "").lower()
    if policy in WRAP:
        found.take(key)
        classes = found.take(f"{prefix}transformer_layer_cls_to_wrap")
        found.options["wrap"] = wrap_of(classes) if policy == "transformer_based_wrap" else "none"
    elif policy == "size_based_wrap":
        found.take(key)
        least = found.number(f"{prefix}min_num_params") or 0
        found.options["wrap"] = (
            f"size:{least}" if least > 0 else "none"
        )  # accelerate ignores the policy without a number
    elif policy:
        found.lacks(key, "the estimate assumes one unit per layer")
    found.take(f"{prefix}transformer_layer_cls_to_wrap")


def wrap_of(classes: Any) -> str:
    """The wrap policy for classes, as a list or as text with commas: `layer` if they look like a model's layers."""
    names = classes if isinstance(classes, list) else str(classes or "").split(",")
    names = [str(name).strip() for name in names if str(name).strip()]
    return "layer" if all(name.endswith(("Layer", "Block")) for name in names) else f"class:{','.join(names)}"


def read_replicas(found: Collector, replicas: Any, shards: Any) -> None:
    """Turn the degrees of a device mesh into HSDP or DDP. An estimate has one replica per node."""
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
