"""Names that consumers give to optimizers, attention implementations and precisions, as options of a request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

from fsdp_advisor.configs.collect import Collector
from fsdp_advisor.job.choices import Attention, ExpertsImplementation, OptimizerName
from fsdp_advisor.job.projection import PROJECTING, read_optim_args, read_target_modules, unknown_setting

_OPTIMIZERS: dict[str, OptimizerName] = {
    **{name: name for name in get_args(OptimizerName)},
    "adamw": "adamw_torch",
    "adamw_hf": "adamw_torch",
    "adam": "adamw_torch",
    "torch_adam": "adamw_torch",
    "fusedadam": "adamw_torch_fused",
    "deepspeedcpuadam": "adamw_torch",
    "muonwithauxadam": "muon",
    "adamw_8bit": "adamw_bnb_8bit",
    "rmsprop_bnb": "rmsprop_bnb_32bit",
    "adamw8bit": "adamw_bnb_8bit",
    "pagedadamw8bit": "paged_adamw_8bit",
    "pagedadamw": "paged_adamw_32bit",
    "pagedadamw32bit": "paged_adamw_32bit",
    "lion": "lion_32bit",
    "lion32bit": "lion_32bit",
    "lion8bit": "lion_8bit",
    "pagedlion": "paged_lion_32bit",
    "pagedlion32bit": "paged_lion_32bit",
    "pagedlion8bit": "paged_lion_8bit",
    "ademamix8bit": "ademamix_8bit",
    "pagedademamix": "paged_ademamix_32bit",
    "pagedademamix8bit": "paged_ademamix_8bit",
    "rmsprop32bit": "rmsprop_bnb_32bit",
    "rmsprop8bit": "rmsprop_bnb_8bit",
    "ao_adamw_8bit": "adamw_torch_8bit",
    "adamwfp8": "adamw_torch_fp8",
    "ao_adamw_fp8": "adamw_torch_fp8",
    "adamwschedulefree": "schedule_free_adamw",
    "sgdschedulefree": "schedule_free_sgd",
    "radamschedulefree": "schedule_free_radam",
    "stableadamw": "stable_adamw",
}
"""The Trainer's other names, and classes of torch, bitsandbytes and DeepSpeed. `adamw_8bit` is `adamw_bnb_8bit`, `rmsprop_bnb` the
32-bit one. Source: transformers/training_args.py, OptimizerNames (5.23).
"""

_OF_TORCHAO: dict[str, OptimizerName] = {"adamw8bit": "adamw_torch_8bit", "adamw4bit": "adamw_torch_4bit"}
"""Classes of torchao. bitsandbytes has a class of the same name, whose arguments have no `block_size`."""

_OF_BITSANDBYTES = {"rmsprop": "rmsprop_bnb_32bit", "adagrad": "adagrad of bitsandbytes"}
"""Classes of bitsandbytes that have the name of torch's. Its Adagrad is not modelled."""

_ATTENTION: dict[str, Attention] = {
    **{name: name for name in get_args(Attention)},
    "fa2": "flash_attention_2",
    "flash_attention": "flash_attention_2",
    "disabled": "eager",
    "auto": "sdpa",
}


_OWNERS = {
    "llama-": "meta-llama", "meta-llama-": "meta-llama", "qwen": "Qwen", "mistral": "mistralai", "mixtral": "mistralai",
    "gemma": "google", "phi-": "microsoft", "deepseek": "deepseek-ai", "codellama": "codellama",
}  # fmt: skip
"""Beginning of a model's name in lower case -> its owner on the Hugging Face hub."""


def hub_name(folder: str) -> str:
    """The hub's name of the model whose checkpoint is in the folder `folder`; the folder's name if the owner is unknown.

    >>> hub_name("Llama-3.1-8B"), hub_name("my-model")
    ('meta-llama/Llama-3.1-8B', 'my-model')
    """
    owner = next((owner for start, owner in _OWNERS.items() if folder.lower().startswith(start)), None)
    return folder if owner is None else f"{owner}/{folder}"


def set_optimizer(found: Collector, key: str, arguments: Mapping[str, Any] | str | None = None) -> None:
    """Set `optim` (and a projection's `optim_args`) from a key of the file. `arguments` tell variants apart, such as SGD with momentum."""
    name = found.peek(key)
    if not isinstance(name, str):
        return
    optim = optimizer_called(name, arguments)
    if optim is None:
        found.omits_key(key, "the optimizer is not modelled; the estimate assumes adamw_torch_fused")
        return
    found.take(key)
    found.options["optim"] = optim
    if optim in PROJECTING:
        _set_projection(found, optim, arguments)


def _set_projection(found: Collector, optim: OptimizerName, arguments: Mapping[str, Any] | str | None) -> None:
    """Set the options about the projection of GaLore and APOLLO, and report settings that are not modelled."""
    settings = {name: str(value) for name, value in _read(arguments).items()}
    while (unknown := unknown_setting(settings)) is not None:
        name, value = unknown
        del settings[name]
        found.omits(f"{optim} with {name} {value}; the estimate assumes the Trainer's default")
    if settings and (text := read_optim_args(",".join(f"{name}={value}" for name, value in settings.items()))):
        found.options["optim_args"] = text
    targets = found.peek("optim_target_modules")
    listed = ",".join(map(str, targets)) if isinstance(targets, list | tuple) else targets
    if isinstance(listed, str) and (known := read_target_modules(listed)) is not None:
        found.take("optim_target_modules")
        found.options["optim_target_modules"] = known
    found.omits_key("optim_target_modules", "the estimate projects all linear layers")


def optimizer_called(name: str, arguments: Mapping[str, Any] | str | None = None) -> OptimizerName | None:
    """The optimizer that a consumer or a class of Python calls `name`; None if it is not modelled.

    >>> optimizer_called("bitsandbytes.optim.PagedAdamW8bit"), optimizer_called("SGD", {"momentum": 0.9}), optimizer_called("LBFGS")
    ('paged_adamw_8bit', 'sgd_momentum', None)
    >>> optimizer_called("torch.optim.RMSprop"), optimizer_called("bitsandbytes.optim.RMSprop")
    ('rmsprop', 'rmsprop_bnb_32bit')
    >>> optimizer_called("RMSprop", {"centered": True}) is None
    True
    >>> optimizer_called("CPUOffloadOptimizer"), optimizer_called("CPUOffloadOptimizer", {"optimizer_class": "torch.optim.SGD"})
    ('adamw_cpu_offload', None)
    """
    plain = name.rsplit(".", 1)[-1].lower()
    if plain in _OF_TORCHAO and ("torchao" in name or (isinstance(arguments, Mapping) and "block_size" in arguments)):
        return _OF_TORCHAO[plain]
    if plain == "cpuoffloadoptimizer":
        return "adamw_cpu_offload" if _offloads_adamw(arguments) else None
    if "bitsandbytes" in name:
        plain = _OF_BITSANDBYTES.get(plain, plain)
    optim = _OPTIMIZERS.get(plain)
    if optim == "rmsprop" and (_has_momentum(arguments) or _is_centered(arguments)):
        return None
    if optim == "sgd" and _has_momentum(arguments):
        return "sgd_momentum"
    if plain in ("adam", "adamw") and isinstance(arguments, Mapping) and arguments.get("fused") in (True, "True"):
        return "adamw_torch_fused"
    return optim


def _offloads_adamw(arguments: Mapping[str, Any] | str | None) -> bool:
    """Whether torchao's CPUOffloadOptimizer has AdamW inside, and leaves gradients on the GPU."""
    given = _read(arguments)
    return str(given.get("optimizer_class", "AdamW")).endswith("AdamW") and not given.get("offload_gradients")


def _has_momentum(arguments: Mapping[str, Any] | str | None) -> bool:
    return float(_read(arguments).get("momentum") or 0) > 0


def _is_centered(arguments: Mapping[str, Any] | str | None) -> bool:
    return str(_read(arguments).get("centered")).lower() in ("true", "1", "yes")


def _read(arguments: Mapping[str, Any] | str | None) -> Mapping[str, Any]:
    if isinstance(arguments, str):
        return dict(part.strip().partition("=")[::2] for part in arguments.split(",")) if arguments else {}
    return arguments or {}


def set_experts(found: Collector) -> None:
    """Set `experts_implementation` from transformers' argument of this name."""
    name = found.peek("experts_implementation")
    if name in get_args(ExpertsImplementation):
        found.options["experts_implementation"] = found.take("experts_implementation")
    elif isinstance(name, str):
        found.omits_key(
            "experts_implementation", "the code for experts is not modelled; the estimate assumes grouped_mm"
        )


def set_attention(found: Collector, key: str) -> None:
    """Set `attention` from a key of the file."""
    name = found.peek(key)
    if not isinstance(name, str):
        return
    known = _ATTENTION.get(name.lower())
    if known is None:
        found.omits_key(key, "the attention implementation is not modelled; the estimate assumes sdpa")
        return
    found.take(key)
    found.options["attention"] = known
