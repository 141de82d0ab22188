"""Reads what Python code gives PyTorch's FSDP2, FSDP1 and DDP: units, sharding, mixed precision, offload, checkpoints."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from typing import Any

from fsdp_advisor.configs.checkpointing import set_reentrant
from fsdp_advisor.configs.collect import Collector
from fsdp_advisor.configs.fsdp import AS_DDP, read_replicas, wrap_of
from fsdp_advisor.configs.python_literals import is_none, keywords_of, literal_of
from fsdp_advisor.engines.fsdp1.sharding import sharding_options
from fsdp_advisor.job.unknown_options import DATA_PARALLEL

Calls = Mapping[str, Sequence[ast.Call]]

ONE_GPU = "1 GPU, because nothing says how many ranks there are (--gpus)"
"""What a reader assumes of code that a launcher starts."""
OTHER_PARALLELISM = {
    "parallelize_module": "tensor parallelism",
    "context_parallel": "context parallelism",
    "PipelineStage": "pipeline parallelism",
}
"""Function or class of torch.distributed -> the parallelism that it adds, which is not modelled."""


def read_sharding(found: Collector, tree: ast.Module, nodes: Calls, variables: Mapping[str, Any]) -> None:
    """Set strategy, backend, units, offload and precision from the calls that shard the model; DDP if there are none."""
    for name, what in OTHER_PARALLELISM.items():
        if name in nodes:
            found.refuses(f"{name} ({what})", DATA_PARALLEL)
    if "fully_shard" in nodes:
        _read_fsdp2(found, tree, nodes, variables)
    elif "FullyShardedDataParallel" in nodes:
        keywords = keywords_of(nodes["FullyShardedDataParallel"][-1], variables)
        found.reads("FullyShardedDataParallel")
        set_fsdp1(found, keywords, offloads=offloads_parameters(nodes, keywords))
        if found.options["strategy"] != "ddp":
            found.options["wrap"] = _units(found, tree, nodes, variables, "FullyShardedDataParallel")
        _read_mesh(found, nodes, variables)
    else:
        found.options |= {"strategy": "ddp", "backend": "ddp"}
        if "DistributedDataParallel" in nodes:
            found.reads("DistributedDataParallel")
        else:
            found.guess("gpus", 1, "1 GPU, because the code does not distribute the model")
    found.guess("gpus", 1, ONE_GPU)
    read_precision(found, nodes, variables)
    _read_checkpoints(found, nodes, variables)


def set_fsdp1(found: Collector, keywords: Mapping[str, Any], *, offloads: bool) -> None:
    """Set strategy, offload and prefetching from the keywords of FullyShardedDataParallel."""
    sharding = str(keywords.get("sharding_strategy", "ShardingStrategy.FULL_SHARD")).rsplit(".", 1)[-1]
    prefetch = str(keywords.get("backward_prefetch", "BackwardPrefetch.BACKWARD_PRE")).rsplit("_", 1)[-1].lower()
    options = sharding_options(sharding)
    if options is None:
        found.omits(f"sharding_strategy: {sharding} (the estimate assumes full sharding)")
        options = {"strategy": "zero3"}
    if options["strategy"] == "ddp":
        found.omits(f"sharding_strategy: {sharding} ({AS_DDP})")
        found.options |= {"strategy": "ddp", "backend": "ddp"}
        return
    found.options |= options
    found.options |= {
        "backend": "fsdp1",
        "offload": "parameters" if offloads else "none",
        "backward_prefetch": prefetch if prefetch in ("pre", "post") else "none",
        "use_orig_params": keywords.get("use_orig_params", False) is not False,  # PyTorch's default is False
    }
    if keywords.get("forward_prefetch") is True:
        found.options["forward_prefetch"] = True


def _loops(tree: ast.Module) -> list[ast.For | ast.ListComp]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.For | ast.ListComp)]


def classes_in(node: ast.expr) -> list[str]:
    """The names of the classes in a set, a list or a tuple, or of the one class.

    >>> classes_in(ast.parse("{T5Block, modeling.T5Stack}", mode="eval").body)
    ['T5Block', 'T5Stack']
    """
    return [ast.unparse(each).rsplit(".", 1)[-1] for each in _members(node)]


def _members(node: ast.expr) -> list[ast.expr]:
    if isinstance(node, ast.BinOp):  # A | B
        return [*_members(node.left), *_members(node.right)]
    return node.elts if isinstance(node, ast.Set | ast.List | ast.Tuple) else [node]


def _wrap_of_classes(found: Collector, node: ast.expr) -> str:
    """The wrap policy of the classes in the code; one unit per layer where a variable holds them."""
    names = classes_in(node)
    if all(name[:1].isupper() for name in names):
        return wrap_of(names)
    found.assume(f"one FSDP unit per layer, because the code computes the classes of the units ({', '.join(names)})")
    return "layer"


def policy_of(found: Collector, policy: ast.expr | None, nodes: Calls, variables: Mapping[str, Any]) -> str:
    """The wrap policy that an argument `auto_wrap_policy` gives; all parameters are one unit without it."""
    if policy is None or is_none(policy):
        return "none"
    if isinstance(policy, ast.Set):
        return _wrap_of_classes(found, policy)
    keywords = [k for calls in nodes.values() for call in calls for k in call.keywords]
    for keyword in keywords:
        if keyword.arg == "transformer_layer_cls":
            return _wrap_of_classes(found, keyword.value)
    if wraps := [call.args[0] for call in nodes.get("ModuleWrapPolicy", ()) if call.args]:
        return _wrap_of_classes(found, wraps[0])
    least = [literal_of(keyword.value, variables) for keyword in keywords if keyword.arg == "min_num_params"]
    if least and isinstance(least[0], int | float):
        return f"size:{int(least[0])}"
    if "size_based_auto_wrap_policy" in ast.unparse(policy):
        return f"size:{_LEAST}"
    found.assume("one FSDP unit per layer, because auto_wrap_policy is computed")
    return "layer"


_LEAST = 100_000_000
"""The default of min_num_params. Source: torch 2.13, distributed/fsdp/wrap.py, size_based_auto_wrap_policy."""


def _units(found: Collector, tree: ast.Module, nodes: Calls, variables: Mapping[str, Any], function: str) -> str:
    """The wrap policy of code that calls `function` for each unit, or gives FSDP1 a policy."""
    calls = nodes[function]
    policies = [k.value for call in calls for k in call.keywords if k.arg in ("auto_wrap_policy", "policy")]
    if policies:
        return policy_of(found, policies[0], nodes, variables)
    wrapping = [loop for loop in _loops(tree) if any(node in calls for node in ast.walk(loop))]
    for loop in wrapping:
        tests = [
            n for n in ast.walk(loop) if isinstance(n, ast.Call) and ast.unparse(n.func) == "isinstance" and n.args
        ]
        if tests:
            several = ast.Tuple([each for test in tests for each in _members(test.args[-1])])
            return _wrap_of_classes(found, several)
    if wrapping:
        return "layer"
    if len(calls) == 1:
        found.assume(f"one unit with all parameters, because the code calls {function} once and not for each layer")
        return "none"
    found.assume(f"one FSDP unit per layer, because the code calls {function} several times")
    return "layer"


def _read_fsdp2(found: Collector, tree: ast.Module, nodes: Calls, variables: Mapping[str, Any]) -> None:
    calls = nodes["fully_shard"]
    in_loops = {node for loop in _loops(tree) for node in ast.walk(loop)}
    # the root's own argument, which is the last call's, counts only if the root is the one unit
    of_units = [call for call in calls if call in in_loops] or calls[:-1] or calls
    given = [keywords_of(call, variables).get("reshard_after_forward") for call in of_units]
    reshard = next((each for each in given if each is not None), True)
    found.options |= {
        "strategy": "zero3" if reshard else "zero2",
        "backend": "fsdp2",
        "offload": "parameters" if "CPUOffloadPolicy" in nodes else "none",
        "wrap": _units(found, tree, nodes, variables, "fully_shard"),
    }
    found.reads(f"fully_shard (reshard_after_forward: {reshard})")
    if type(reshard) is int:
        found.options["reshard_after_forward"] = str(reshard)
    _read_mesh(found, nodes, variables)


def offloads_parameters(nodes: Calls, keywords: Mapping[str, Any]) -> bool:
    """Whether FSDP1 offloads parameters. `keywords`: those of its class, or of Lightning's strategy."""
    calls = nodes.get("CPUOffload", ())
    given = [literal_of(word, {}) for call in calls for word in (*call.args, *(k.value for k in call.keywords))]
    return True in given or keywords.get("cpu_offload") is True


def _read_mesh(found: Collector, nodes: Calls, variables: Mapping[str, Any]) -> None:
    """Set the replicas and shards of a device mesh of two dimensions: replicas first, then shards."""
    for call in nodes.get("init_device_mesh", ()):
        words = {"mesh_shape": call.args[1]} if len(call.args) > 1 else {}
        words |= {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}
        names = literal_of(words["mesh_dim_names"], variables) if "mesh_dim_names" in words else None
        shape = words.get("mesh_shape")
        if not isinstance(shape, ast.Tuple) or len(shape.elts) != 2 or _is_other(names):
            continue
        sizes = [literal_of(size, variables) for size in shape.elts]
        if all(type(size) is int for size in sizes):
            read_replicas(found, *sizes)
        elif found.options.get("strategy") in ("zero2", "zero3"):
            keeps = found.options["strategy"] == "zero2"
            found.options |= {"strategy": "hsdp", **({"reshard_after_forward": "false"} if keeps else {})}
            found.assume("one replica per node, because the code computes the shape of its device mesh")


def _is_other(names: Any) -> bool:
    """Whether the names of a mesh's dimensions are not those of replicas and shards."""
    return isinstance(names, tuple | list) and any(str(name) in ("tp", "cp", "sp", "pp", "ep") for name in names)


_HALF = {"torch.bfloat16": "bf16", "torch.float16": "fp16", "torch.half": "fp16"}


def read_precision(found: Collector, nodes: Calls, variables: Mapping[str, Any]) -> None:
    """Set the dtype in which FSDP's mixed precision or autocast computes, and report that in which gradients are reduced."""
    policies = [*nodes.get("MixedPrecisionPolicy", ()), *nodes.get("MixedPrecision", ())]
    sharded = found.options.get("backend") in ("fsdp1", "fsdp2")
    if policies and sharded:
        keywords = keywords_of(policies[0], variables)
        given = {keyword.arg for keyword in policies[0].keywords}
        computed = "torch.bfloat16" if "param_dtype" in given else None
        param = keywords.get("param_dtype", computed)
        reduce = keywords.get("reduce_dtype", param)
        found.options["mixed"] = _HALF.get(str(param), "no")
        found.reads(f"param_dtype: {str(param).removeprefix('torch.')}")
        if found.options["mixed"] != "no" and reduce != "torch.float32":
            dtype = str(reduce).removeprefix("torch.")
            reserves = "more" if found.options["backend"] == "fsdp1" else "a little less"
            found.omits(f"reduce_dtype {dtype}; the estimate reduces gradients in float32, which reserves {reserves}")
        return
    casts = [call for call in nodes.get("autocast", ()) if keywords_of(call, variables).get("enabled") is not False]
    if not casts:
        found.default("mixed", "no")
        return
    words = [literal_of(word, variables) for word in (*casts[0].args, *(k.value for k in casts[0].keywords))]
    found.options["mixed"] = next((_HALF[str(word)] for word in words if str(word) in _HALF), None) or (
        "bf16" if any(k.arg == "dtype" for k in casts[0].keywords) and "GradScaler" not in nodes else "fp16"
    )
    if sharded:
        found.omits(
            "autocast instead of FSDP's mixed precision; the estimate gathers parameters in 16 bits, not in fp32"
        )


_WRAPPERS = ("checkpoint_wrapper", "apply_activation_checkpointing")


def _read_checkpoints(found: Collector, nodes: Calls, variables: Mapping[str, Any]) -> None:
    """Set the checkpoints that PyTorch's wrapper makes of layers. Source: torch 2.13, algorithms/_checkpoint/checkpoint_wrapper.py."""
    name = next((name for name in _WRAPPERS if name in nodes), None)
    code = [ast.unparse(call) for wrapper in _WRAPPERS for call in nodes.get(wrapper, ())]
    if name is None and any("checkpoint_wrapper" in ast.unparse(call) for call in nodes.get("partial", ())):
        name = "checkpoint_wrapper"
    if name is None:
        return
    code += [ast.unparse(call) for call in nodes.get("partial", ())]
    found.options["activation_checkpointing"] = "full"
    if any("CheckpointImpl.REENTRANT" in text for text in code):
        set_reentrant(found)
    if any("context_fn" in text for text in code):
        found.omits("context_fn of checkpoint_wrapper (selective checkpointing); the estimate recomputes whole layers")
    found.assume(f"activation checkpointing of each layer, because the code calls {name}")
