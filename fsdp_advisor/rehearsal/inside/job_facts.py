"""Facts about the script's job, read from its own objects. The job's estimate is made from them."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

TASKS = {
    "SFTTrainer": "sft",
    "DPOTrainer": "dpo",
    "KTOTrainer": "kto",
    "RewardTrainer": "reward",
    "GRPOTrainer": "grpo",
}
"""The tasks of TRL's trainers that `estimate` describes."""
BUCKETS = (
    "reduce_bucket_size", "sub_group_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold",
    "stage3_max_live_parameters", "stage3_max_reuse_distance",
)  # fmt: skip
"""DeepSpeed's sizes that are options of `estimate`; before stage 3 only the first counts."""
GENERATION = (
    "num_generations", "max_completion_length", "beta", "num_iterations", "steps_per_generation", "use_vllm", "vllm_mode",
    "vllm_gpu_memory_utilization", "vllm_enable_sleep_mode", "vllm_tensor_parallel_size", "vllm_max_model_length",
)  # fmt: skip
"""The settings of TRL's GRPOConfig that are options of `estimate` with the same names."""


def collect(facts: dict[str, Any], module: Any, torch: ModuleType) -> bool:
    """Add the facts that can be read in this call of a module. Returns whether all facts are known. They are once the first layer is
    called.

    The outermost module shows the engine and the model, the first module without children the batch and the precision.
    """
    if "engine" not in facts:
        facts |= {
            "engine": engine_of(module),
            "model": model_of(module),
            "framework": framework_of(),
            "task": task_of(),
            "padding_free": is_padding_free(),
            **parameters_of(module),
        }
    if "batch" not in facts:
        shape = next((list(v.shape) for v in _inputs(3) if isinstance(v, torch.Tensor) and v.dim() >= 2), None)
        if shape is not None:
            facts["batch"] = shape
    if next(module.children(), None) is not None:
        return False
    if "autocast" not in facts:
        on = torch.is_autocast_enabled("cuda")
        facts["autocast"] = str(torch.get_autocast_dtype("cuda")) if on else None
    return True


def _inputs(depth: int) -> Iterator[Any]:
    """The inputs of the module call in progress. They are read from its frame, because global module hooks get no keyword arguments."""
    frame = sys._getframe(depth)
    while frame is not None and "kwargs" not in frame.f_locals:
        if frame.f_back is None:
            return
        frame = frame.f_back
    named: dict[str, Any] = frame.f_locals.get("kwargs") or {}
    for name in ("input_ids", "inputs_embeds", "pixel_values"):
        if name in named:
            yield named[name]
    yield from named.values()
    yield from frame.f_locals.get("args") or ()


def engine_of(module: Any) -> dict[str, Any]:
    """The engine around the model, by the classes of its wrappers."""
    for each in _unwrapped(module):
        names = {kind.__name__ for kind in type(each).__mro__}
        if "DeepSpeedEngine" in names:
            return _deepspeed(each)
        if "DistributedDataParallel" in names:
            return {"backend": "ddp"}
        if "FullyShardedDataParallel" in names:
            return {
                "backend": "fsdp1",
                "sharding": str(each.sharding_strategy),
                "use_orig_params": each._use_orig_params,
                "backward_prefetch": getattr(each.backward_prefetch, "name", "NONE"),
                "forward_prefetch": each.forward_prefetch,
                "precision": str(each.mixed_precision),
                "offloads_parameters": bool(each.cpu_offload is not None and each.cpu_offload.offload_params),
            }
        if "FSDPModule" in names:
            state = next((m._get_fsdp_state() for m in each.modules() if _has_group(m)), None)
            if state is None:
                continue
            group = state._fsdp_param_group
            return {
                "backend": "fsdp2",
                "precision": str(state._mp_policy),
                "mesh_dimensions": group.mesh_info.mesh.ndim,
                "reshard_after_forward": group._reshard_after_forward,
                "offloads_parameters": type(group.offload_policy).__name__ == "CPUOffloadPolicy",
            }
    return {"backend": "none"}


def _deepspeed(engine: Any) -> dict[str, Any]:
    """The settings of a DeepSpeedEngine. Older versions lack methods for half-precision masters."""
    places = {"optimizer": engine.zero_offload_optimizer(), "parameters": engine.zero_offload_param()}
    masters = ("fp16_master_weights_and_gradients", "bf16_master_weights_and_gradients", "bf16_optimizer_states")
    return {
        "backend": "deepspeed",
        "zero_stage": engine.zero_optimization_stage(),
        "mixed_precision": "bf16-mixed"
        if engine.bfloat16_enabled()
        else "fp16-mixed"
        if engine.fp16_enabled()
        else "fp32",
        "half_masters": [name for name in masters if getattr(engine, name, bool)()],
        "offload": {name: _device(place) for name, place in places.items() if place is not None},
        "offload_ratio": float(getattr(places["optimizer"], "ratio", 1)),
        "buckets": {
            name: int(getattr(engine, f"zero_{name.removeprefix('stage3_')}")())
            for name in BUCKETS[: None if engine.zero_optimization_stage() == 3 else 1]
        },
    }


def _device(place: Any) -> str:
    """The device of a section of DeepSpeed's offload: none, cpu or nvme."""
    return str(getattr(place.device, "value", place.device))


def _has_group(module: Any) -> bool:
    return hasattr(module, "_get_fsdp_state") and module._get_fsdp_state()._fsdp_param_group is not None


def framework_of() -> str:
    """The library that runs the training loop, by its state in this process. DeepSpeed's own loop counts as PyTorch's."""
    trainer, state = running_trainer(), sys.modules.get("accelerate.state")
    if trainer is not None:
        packages = {each.__module__.partition(".")[0] for each in type(trainer).__mro__}
        for name in ("axolotl", "llamafactory"):
            if name in packages:
                return name
        return "trl" if _task_of(trainer) is not None else "trainer"
    if _caller_in("torchtitan.trainer") is not None:
        return "torchtitan"
    return "accelerate" if state is not None and state.AcceleratorState._shared_state else "torch"


def task_of() -> dict[str, Any]:
    """Facts about TRL's running trainer: its task (`sft` if there is none), whether its batches have the reference's log-probabilities,
    the weight of the routers' loss, and its settings of generation.
    """
    trainer = running_trainer()
    name = _task_of(trainer) or "sft"
    found = {"name": name, "precompute_ref_log_probs": bool(getattr(trainer, "precompute_ref_logps", False))}
    if hasattr(trainer, "router_aux_loss_coef"):
        found["router_aux_loss_coef"] = trainer.args.router_aux_loss_coef
    if name == "grpo":
        found["generation"] = {each: getattr(trainer.args, each) for each in GENERATION if hasattr(trainer.args, each)}
    return found


def is_padding_free() -> bool:
    """Whether the Trainer's data collator puts all sequences into one row."""
    trainer = running_trainer()
    collator = getattr(trainer, "data_collator", None)
    names = {each.__name__ for each in type(collator).__mro__}
    return bool(getattr(trainer, "padding_free", False)) or "DataCollatorWithFlattening" in names


def running_trainer() -> Any:
    """The Trainer of transformers whose method is being called; None without one."""
    return _caller_in("transformers.trainer")


def _caller_in(name: str) -> Any:
    """The object whose method in the module of that name is being called; None without one."""
    module = sys.modules.get(name)
    frame: Any = sys._getframe()
    while module is not None and frame is not None:
        if frame.f_code.co_filename == module.__file__:
            return frame.f_locals.get("self")
        frame = frame.f_back
    return None


def _task_of(trainer: Any) -> str | None:
    """The task of a trainer of TRL, or its class's name if the task is not in TASKS; None for other trainers."""
    names = [each.__name__ for each in type(trainer).__mro__ if each.__module__.startswith("trl.")]
    return next((TASKS.get(name, name) for name in names), None)


def optimizer_facts(optimizer: Any) -> dict[str, Any]:
    """The class of an optimizer, and its settings that affect memory."""
    settings = optimizer.param_groups[0]
    kept = {name: settings[name] for name in ("fused", "foreach", "momentum", "centered") if name in settings}
    if type(optimizer).__module__.startswith("bitsandbytes"):
        kept |= {"bits": optimizer.args.optim_bits, "paged": optimizer.is_paged}
    ranks = [group["rank"] for group in optimizer.param_groups if "rank" in group]
    if ranks:
        kept |= {"package": type(optimizer).__module__.split(".")[0], "rank": ranks[0]}
    return {"class": type(optimizer).__name__, "module": type(optimizer).__module__, **kept}


def model_of(module: Any) -> dict[str, Any] | None:
    """The transformers configuration of the model, with its class, attention and checkpointing; None without one."""
    for each in _unwrapped(module):
        config: Any = vars(each).get("config")
        if hasattr(config, "to_diff_dict") and config.model_type:
            return {
                "class": _class_of(each),
                "config": config.to_dict(),
                "attention": getattr(config, "_attn_implementation", None),
                "experts": _experts_of(each, config),
                "checkpointing": checkpointing_of(each),
                "offloads_checkpoints": any(_offloads(m) for m in each.modules()),
                "compile": compiled_part(module, each),
                "memory_budget": _memory_budget(),
                "loss": "liger" if each.forward.__module__.startswith("liger_kernel") else "auto",
                "liger_kernels": any(_by_liger(m) for m in each.modules() if m is not each),
                "lora_kernels": lora_kernels_of(each),
                "kernel_packages": kernel_packages(),
                "peft": next((adapter for m in _unwrapped(module) if (adapter := _adapter_of(m))), None),
            }
    return None


def kernel_packages() -> list[str]:
    """The packages of kernels that transformers has imported, by their names in `--kernel-packages`. A model's module imports those that
    its layers call, and does without one whose import fails. Source: transformers 5.23, integrations/hub_kernels.py,
    `use_kernel_func_from_hub_with_fallback`; models/rwkv/modeling_rwkv.py.
    """
    modules = {"fla": "fla", "causal-conv1d": "causal_conv1d", "mamba-ssm": "mamba_ssm"}
    rwkv = sys.modules.get("transformers.models.rwkv.modeling_rwkv")
    of_hub = ["kernels"] if getattr(rwkv, "rwkv_cuda_kernel", None) is not None else []
    return [package for package, module in modules.items() if sys.modules.get(module) is not None] + of_hub


def _class_of(model: Any) -> str:
    """The name of the model's class. FSDP2 replaces it by one of its own, such as FSDPLlamaForCausalLM, that derives from it."""
    return next(kind.__name__ for kind in type(model).__mro__ if not kind.__name__.startswith("FSDP"))


def checkpointing_of(model: Any) -> str:
    """The policy of activation checkpointing as a value of `--activation-checkpointing`; `other` if it has no such value."""
    layers = _checkpointed_layers(model)
    keywords = [_checkpointing_keywords(module) for module in model.modules()]
    contexts = [each["context_fn"] for each in keywords if "context_fn" in each]
    period = next((n for n, flag in enumerate(layers) if n and flag), len(layers))
    if not any(layers):
        return "none"
    if layers != [n % period == 0 for n in range(len(layers))]:
        return "other"
    if any(each.get("use_reentrant") is True for each in keywords):
        return "reentrant" if period == 1 else "other"
    if contexts:
        return "selective" if period == 1 and all(_is_of_trl(context) for context in contexts) else "other"
    return f"every-{period}" if period > 1 else "full"


def _checkpointed_layers(model: Any) -> list[bool]:
    """For each layer, whether its activations are checkpointed. PyTorch's wrapper (used by accelerate's FSDP) checkpoints them, or
    transformers, which checkpoints the first of each `every_n_layers`. A model with its own checkpointing code has one flag for all
    layers.
    """
    # FSDP2 replaces the class of each module by a derived one
    named = [(each, {kind.__name__ for kind in type(each).__mro__}) for each in model.modules()]
    wrapped = {each for each, names in named if "CheckpointWrapper" in names}
    lists = [list(each) for each, names in named if "ModuleList" in names]
    if wrapped:
        return [layer in wrapped for layers in lists if wrapped & set(layers) for layer in layers] or [True]
    flags = [each.gradient_checkpointing for each, names in named if "GradientCheckpointingLayer" in names]
    return flags or [any(getattr(each, "gradient_checkpointing", False) for each, _ in named)]


def _checkpointing_keywords(module: Any) -> dict[str, Any]:
    """The keywords with which transformers or PyTorch's wrapper calls `checkpoint` for a module."""
    functions: list[Any] = [getattr(module, name, None) for name in ("_gradient_checkpointing_func", "checkpoint_fn")]
    return next((function.keywords for function in functions if hasattr(function, "keywords")), {})


def _is_of_trl(context: Any) -> bool:
    """Whether a `context_fn` selects outputs by TRL's policy. Source: trl 1.16, models/selective_activation_checkpointing.py."""
    return any(getattr(each, "__module__", "").startswith("trl.") for each in getattr(context, "args", ()))


def _offloads(module: Any) -> bool:
    """Whether transformers keeps the inputs of the checkpointed module in host memory. Source: transformers 5.23, modeling_utils.py,
    `_activation_checkpointing_enable`: a function of its own around PyTorch's `checkpoint`.
    """
    function = getattr(getattr(module, "_gradient_checkpointing_func", None), "func", None)
    return getattr(module, "gradient_checkpointing", False) and getattr(function, "__name__", "") == "checkpoint_func"


def compiled_part(module: Any, model: Any) -> str:
    """The compiled part of the model: each layer separately, accelerate's regions, the whole model, other parts, or nothing. Layers
    are the modules in ModuleLists.
    """
    found = {each for each in module.modules() if "_orig_mod" in each._modules or each._compiled_call_impl is not None}
    layers = {layer for each in model.modules() if type(each).__name__ == "ModuleList" for layer in each}
    if not found:
        return "none"
    if found <= layers:
        return "layer"
    if len(found) > 1 and found == set(_regions(module)):
        return "regions"
    return "model" if found <= set(_unwrapped(module)) else "parts"


def _regions(module: Any) -> list[Any]:
    """The modules that accelerate's regional compilation compiles: `recording.compiled.regions` has its source."""
    if _repeats(module):
        return list(module.children())
    if any(_repeats(each) for each in module.modules()):
        return [region for child in module.children() for region in _regions(child)]
    return [module]


def _repeats(module: Any) -> bool:
    """Whether a module is a ModuleList of the class of its first module."""
    return (
        any(each.__name__ == "ModuleList" for each in type(module).__mro__)
        and len(module) > 0
        and all(isinstance(m, type(module[0])) for m in module)
    )


def _memory_budget() -> float:
    """The memory budget of AOTAutograd's partitioner; 1 if it was not imported."""
    config = sys.modules.get("torch._functorch.config")
    return float(config.activation_memory_budget) if config is not None else 1.0


def _experts_of(model: Any, config: Any) -> str | None:
    """The implementation of routed experts; None if transformers does not choose it for this model."""
    can_set = getattr(model, "_can_set_experts_implementation", None)
    return getattr(config, "_experts_implementation", None) if can_set is not None and can_set() else None


def _by_liger(module: Any) -> bool:
    """Whether Liger replaced the module's forward."""
    return getattr(module.forward, "__module__", "").startswith("liger_kernel")


def lora_kernels_of(model: Any) -> list[str]:
    """The parts of the model whose adapters axolotl runs in its kernels. Source: axolotl 0.19.0, monkeypatch/lora_kernels.py."""
    places = {"forward": ("mlp", "embedding"), "apply_qkv": ("qkv",), "apply_o": ("o",)}
    found: list[tuple[str, Any]] = [
        (name, getattr(module, name, None)) for module in model.modules() for name in places
    ]
    of_axolotl = [(name, each) for name, each in found if getattr(each, "__module__", "") == "axolotl.kernels.lora"]
    functions = {(name, each.__name__) for name, each in of_axolotl}
    return [
        part
        for name, parts in places.items()
        for part in parts
        if any(n == name and f"lora_{part}" in f for n, f in functions)
    ]


def _adapter_of(module: Any) -> dict[str, Any] | None:
    """The adapter_config.json of the active adapter around a model; None if the module is not a PeftModel."""
    configurations = vars(module).get("peft_config")
    if not isinstance(configurations, dict) or not configurations:
        return None
    values = next(iter(configurations.values())).to_dict()
    as_json: dict[str, Any] = json.loads(
        json.dumps(values, default=lambda value: sorted(value) if isinstance(value, set) else str(value))
    )
    return as_json


def parameters_of(module: Any) -> dict[str, Any]:
    """Numbers of elements of all parameters and of the trainable ones on this rank, and the dtypes of all parameters and of the frozen
    ones.
    """
    parameters = list(module.parameters())
    return {
        "parameters": sum(p.numel() for p in parameters),
        "trainable_parameters": sum(p.numel() for p in parameters if p.requires_grad),
        "dtypes": sorted({str(p.dtype) for p in parameters}),
        "frozen_dtypes": sorted({str(p.dtype) for p in parameters if not p.requires_grad}),
    }


def _unwrapped(module: Any) -> Iterator[Any]:
    """Yield the module, then the module that it wraps (by DDP, FSDP1, torch.compile or PEFT), and so on."""
    seen: set[int] = set()
    while module is not None and id(module) not in seen:
        seen.add(id(module))
        yield module
        inner = (getattr(module, name, None) for name in ("module", "_fsdp_wrapped_module", "_orig_mod", "base_model"))
        module = next(
            (each for each in inner if each is not None and each is not module and hasattr(each, "parameters")), None
        )
