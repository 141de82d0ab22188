"""Combines the settings of several files into the options of one request."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from math import prod
from typing import Any

from fsdp_advisor.configs.adapters import has_adapters, is_quantized
from fsdp_advisor.configs.collect import Collector
from fsdp_advisor.configs.compilation import resolve_regions
from fsdp_advisor.configs.torchtitan import unmodelled
from fsdp_advisor.configs.zero_buckets import resolve_buckets
from fsdp_advisor.errors import UsageError, assert_never
from fsdp_advisor.hardware import find_gpu
from fsdp_advisor.job.choices import Framework, half_dtype
from fsdp_advisor.job.compatibility import BACKENDS, OFFLOADS, plans
from fsdp_advisor.job.config_reading import ConfigReading
from fsdp_advisor.job.fields import dashed, fields_of
from fsdp_advisor.job.frameworks import EXPANDABLE_SEGMENTS, FRAMEWORKS
from fsdp_advisor.job.parsing import make_request
from fsdp_advisor.job.request import EstimateRequest


def _specificity(framework: Framework) -> int:
    """How specific a framework is. TRL, axolotl and LLaMA-Factory run on the Trainer, the Trainer on accelerate, and accelerate may run
    DeepSpeed.
    """
    match framework:
        case "torch":
            return 0
        case "deepspeed":
            return 1
        case "accelerate":
            return 2
        case "trainer":
            return 3
        case "trl" | "axolotl" | "llamafactory" | "torchtitan":
            return 4
        case _:
            assert_never(framework)


_LAUNCHERS = ("accelerate", "accelerate command", "trl command")
"""Formats whose defaults apply only to options for which the script's arguments have no default."""
_OF_CODE = ("Trainer arguments", "loop with accelerate", "loop in PyTorch", "Lightning")
"""Formats of which the data decides the length of samples, unless the code cuts them."""
_UNSHARDED_ALONE = {"torchtune", "torchtitan"}
"""Formats whose trainers do not shard on a single GPU."""


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """The options that files state or imply, by the names of a request's fields, and the reading of each file. `assumed`: the sentence
    that a reading has about each option whose value is assumed.
    """

    options: Mapping[str, Any]
    readings: tuple[ConfigReading, ...] = field(default=())
    assumed: Mapping[str, str] = field(default_factory=dict)


def merge(parts: Sequence[Collector]) -> Configuration:
    """One request's options from all files. A later file wins over an earlier one, and the reading reports it.

    Raises UsageError for files with which the job aborts when it starts.
    """
    _check_checkpoints(parts)
    _check_sizes(parts)
    options = _options_of(parts)
    assumed = _add_defaults(options, parts) | _add_guesses(options, parts)
    if "seq_len" not in options and (code := next((part for part in parts if part.format in _OF_CODE), None)):
        assumed["seq_len"] = (
            "2,048 tokens or the model's maximum, because nothing limits the length of samples (--seq-len)"
        )
        code.assume(assumed["seq_len"])
    resolve_regions(options)
    _resolve_torchtitan(options, parts)
    _resolve_precision(options, parts)
    _resolve_engine(options)
    _note_spread_reference(options, parts)
    return Configuration(options=options, readings=_grouped(parts), assumed=assumed)


def _options_of(parts: Sequence[Collector]) -> dict[str, Any]:
    """The options that the files set. Of two values the later one wins, and its part reports that; of frameworks the most specific one."""
    by_fsdp = any("FSDP" in part.checkpoints for part in parts)
    options: dict[str, Any] = {}
    source: dict[str, Collector] = {}
    for part in parts:
        for name, value in part.options.items():
            if name == "framework":
                if _specificity(value) >= _specificity(options.get(name, "torch")):
                    options[name] = value
                continue
            if name == "activation_checkpointing" and value == "none" and by_fsdp:
                continue  # the Trainer leaves it to FSDP
            if name in options and options[name] != value and name not in ("mixed", "dtype"):
                part.assume(f"{name} {value} as here, not {options[name]} as in {source[name].file}")
            options[name], source[name] = value, part
    return options


def _add_defaults(options: dict[str, Any], parts: Sequence[Collector]) -> dict[str, str]:
    """Fill options that no file sets with the defaults of its tool; those of launchers come last. Returns the reasons by option."""
    assumed: dict[str, str] = {}
    for part in sorted(parts, key=lambda part: part.format in _LAUNCHERS):
        for name, (value, why) in part.defaults.items():
            if name not in options and not (name == "precision" and {"mixed", "dtype"} & set(options)):
                options[name] = value
                if why:
                    assumed[name] = why
                    part.assume(why)
    return assumed


def _add_guesses(options: dict[str, Any], parts: Sequence[Collector]) -> dict[str, str]:
    """Fill options that neither a file nor a default sets with what is most likely. Returns the reasons by option."""
    assumed: dict[str, str] = {}
    for part in parts:
        for name, (value, why) in part.guesses.items():
            # a backend without a strategy is of a format whose file is missing
            if name not in options and not (name == "strategy" and "backend" in options):
                options[name], assumed[name] = value, why
                part.assume(why)
    return assumed


def _check_checkpoints(parts: Sequence[Collector]) -> None:
    """Raises UsageError if both FSDP's plugin and the Trainer checkpoint. Source: transformers 5.23, trainer.py, `Trainer.__init__`."""
    by = {who: part.file for part in parts for who in part.checkpoints}
    if len(by) == 2:
        raise UsageError(
            f"FSDP's activation_checkpointing ({by['FSDP']}) and the Trainer's gradient_checkpointing ({by['Trainer']}) are both on; the"
            " Trainer then raises ValueError: they can't both be set to True",
            hint="switch one of them off; TRL switches gradient_checkpointing on if it is not given",
        )


_OF_TRAINER = ("trainer", "trl", "axolotl", "llamafactory")
_SIZES = {
    "micro_batch_size": "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
}
"""Options that both the Trainer and DeepSpeed have, and DeepSpeed's keys."""


def _check_sizes(parts: Sequence[Collector]) -> None:
    """Raises UsageError if the Trainer's batch differs from that of DeepSpeed's configuration, with which the Trainer stops.

    Source: transformers 5.23, integrations/deepspeed.py, `trainer_config_process` and `trainer_config_finalize`.
    """
    arguments = [part for part in parts if part.options.get("framework") in _OF_TRAINER]
    for part in (part for part in parts if part.format == "DeepSpeed"):
        for option, key in _SIZES.items():
            size = part.options.get(option)
            other = next((a for a in arguments if size is not None and a.options.get(option, size) != size), None)
            if other is not None:
                raise UsageError(
                    f"{part.file}: {key} is {size}, not {other.options[option]} as in {other.file}; the Trainer stops at such values",
                    hint=f'"{key}": "auto" takes the Trainer\'s',
                )


def _note_spread_reference(options: Mapping[str, Any], parts: Sequence[Collector]) -> None:
    """Note that TRL stops at the first step if it spreads a reference model over the GPUs that a rank sees.

    Under FSDP it loads the model with `device_map="auto"`. Only with `cpu_ram_efficient_loading` transformers adds no hooks that run its
    layers on several devices. Source: trl 1.16, trainer/dpo_trainer.py and kto_trainer.py, `__init__`; trainer/utils.py,
    `create_model_from_path`; transformers 5.23, integrations/accelerate.py, `accelerate_dispatch`.
    """
    part = next((part for part in parts if part.loads_on_rank_0 is False), None)
    has_reference = options.get("task") in ("dpo", "kto") and not has_adapters(options)
    if part and has_reference and options.get("backend") in ("fsdp1", "fsdp2") and options.get("gpus") != 1:
        part.omits(SPREAD_REFERENCE)


SPREAD_REFERENCE = (
    "FSDP without cpu_ram_efficient_loading: TRL spreads the reference model over the GPUs of the node and stops at the first step,"
    " because tensors are on two devices; set it to true"
)


def _resolve_torchtitan(options: dict[str, Any], parts: Sequence[Collector]) -> None:
    """Replace torchtitan by PyTorch's own loop if a setting is modelled only with that."""
    if options.get("framework") != "torchtitan" or (what := unmodelled(options)) is None:
        return
    options["framework"] = "torch"
    options.pop("cuda_graphs", None)
    options.setdefault("allocator_conf", FRAMEWORKS["torchtitan"].allocator_conf)
    part = next(part for part in parts if part.options.get("framework") == "torchtitan")
    part.assume(f"PyTorch's own loop and transformers' model, because torchtitan's {what} is modelled only there")
    if options.get("loss") != "full":
        part.omits("torchtitan's loss in chunks; the estimate assumes that all logits are in memory at once")
    if _drops_compile(options):
        part.omits(UNCOMPILED)


UNCOMPILED = "compile.enable: torch.compile with selective checkpointing; the estimate assumes uncompiled layers"


def _drops_compile(options: dict[str, Any]) -> bool:
    """Drop compilation if it is modelled only with torchtitan. Returns whether it was dropped."""
    drops = "compile" in options and options.get("activation_checkpointing") == "selective"
    if drops:
        del options["compile"]
    return drops


def _resolve_precision(options: dict[str, Any], parts: Sequence[Collector]) -> None:
    """Set a request's precision from accelerate's `mixed_precision` (`mixed`) and the dtype of the weights.

    DeepSpeed's own section decides if there is one. FSDP2 through accelerate keeps fp32 masters under mixed precision,
    whatever the dtype (accelerate/utils/fsdp_utils.py, fsdp2_prepare_model).
    """
    mixed, dtype = options.pop("mixed", None), options.pop("dtype", None)
    adapters = has_adapters(options)
    if dtype == "auto":  # the checkpoint's dtype, which is assumed to be half precision for a frozen base
        dtype = half_dtype("fp16-mixed" if mixed == "fp16" else "bf16-mixed") if adapters else None
        if not adapters and mixed in ("bf16", "fp16") and _trains_stored(options):
            parts[0].assume(
                "weights in fp32; from_pretrained without dtype loads the dtype of the checkpoint, in transformers 5 (if bf16: --precision"
                f" bf16{'' if options.get('backend') in (None, 'ddp') else '-mixed --dtype bfloat16'})"
            )
    sharded = options.get("backend") in ("fsdp1", "fsdp2")
    if adapters and mixed == "fp16" and dtype in ("float16", "fp16"):
        if not is_quantized(options):
            options["dtype"] = "float16"
        dtype = None
    elif (adapters or sharded) and mixed in ("bf16", "fp16") and dtype in ("bfloat16", "bf16"):
        if not is_quantized(options):  # otherwise the dtypes of unpacked weights are fixed
            options["dtype"] = "bfloat16"
        dtype = None
    elif adapters and mixed in ("bf16", "fp16") and dtype == "float32":
        options["dtype"] = "float32"
    if "precision" in options:
        if not options["precision"].endswith("-mixed"):
            options.pop("dtype", None)
        return
    if mixed in ("bf16", "fp16"):
        options["precision"] = f"{mixed}-mixed"
        if dtype in ("bfloat16", "float16") and options.get("backend") in (None, "ddp"):
            options["precision"] = "bf16"
            parts[0].assume("weights in bf16, so that autocast changes nothing")
    elif mixed is not None or dtype is not None:
        options["precision"] = "bf16" if dtype in ("bfloat16", "bf16") else "fp32"
        if dtype is None:
            parts[0].assume("weights in fp32, because no file says their dtype")
        elif dtype == "float16":
            parts[0].omits("dtype: float16; the estimate assumes fp32 weights")


def _trains_stored(options: Mapping[str, Any]) -> bool:
    """Whether the optimizer steps weights in the dtype in which they are loaded: accelerate with FSDP and DeepSpeed make fp32 masters."""
    facts = FRAMEWORKS[options.get("framework", "torch")]
    backend = options.get("backend", "ddp")
    return backend == "ddp" or (backend != "deepspeed" and not facts.uses_accelerate)


def _resolve_engine(options: dict[str, Any]) -> None:
    """Drop options that contradict the backend that the files selected."""
    if options.get("strategy") == "ddp" and options.get("backend") not in ("ddp", None):
        options["backend"] = "ddp"
    resolve_buckets(options)
    if options.get("backend") == "deepspeed":
        options.pop("wrap", None)
        options.pop("backward_prefetch", None)
    if options.get("offload", "none") == "none":
        options.pop("offload_device", None)


def _grouped(parts: Iterable[Collector]) -> tuple[ConfigReading, ...]:
    """One reading per file, in their order."""
    found: dict[str, ConfigReading] = {}
    for part in parts:
        reading = part.reading()
        before = found.get(reading.file)
        if before is not None:
            lists = [f.name for f in fields(ConfigReading) if f.name not in ("file", "format")]
            joined = {name: getattr(before, name) + getattr(reading, name) for name in lists}
            formats = before.format if reading.format == "environment" else f"{before.format}, {reading.format}"
            reading = ConfigReading(file=reading.file, format=formats, **joined)
        found[reading.file] = reading
    return tuple(found.values())


def _check_modelled(readings: Sequence[ConfigReading]) -> None:
    """Raises UsageError for a file with a setting whose option is refused, too: its figures would be those of another job."""
    for reading in readings:
        for what, hint in reading.refused:
            raise UsageError(f"{reading.file}: {what} is not modelled yet", hint=hint)


def _check_compiled(found: Configuration, options: Mapping[str, Any]) -> None:
    """Raises UsageError if every nth of torchtitan's compiled layers is checkpointed, because that is not modelled."""
    every = str(options.get("activation_checkpointing")).startswith("every")
    titan = next((reading.file for reading in found.readings if "torchtitan" in reading.format), None)
    if titan is not None and every and options.get("compile", "none") != "none":
        raise UsageError(
            f"{titan}: compile.enable is not modelled with activation_checkpoint.mode selective of every nth layer "
            "(selective_ac_option, which is 2 if it is not set)",
            hint='set selective_ac_option = "op", or give --activation-checkpointing full or none, or --compile none',
        )


def complete(found: Configuration, given: Mapping[str, Any], searched: Sequence[str] = ()) -> Configuration:
    """Merge the given options with those of the files. Given options win.

    A given strategy or backend replaces both the strategy and the backend of the files; the files' backend is kept if it supports the
    given strategy. Options in `searched` are not taken from the files, because a search finds them; the files' global batch size is kept
    instead.
    """
    _check_modelled(found.readings)
    options = _without_replaced(found.options, given)
    if "gpus" in found.assumed and "gpus" in given:
        options["gpus"] = given["gpus"]  # the files' batch is one of these GPUs
    _check_compiled(found, {**options, **given})
    replaced = {why for name, why in found.assumed.items() if name in given}
    readings = tuple(replace(r, assumed=tuple(why for why in r.assumed if why not in replaced)) for r in found.readings)
    if not searched:
        _check_batch(options, given)
    dropped = [name for name in searched if name in options and name not in given]
    if dropped:
        values = [f"{name} {options[name]}" for name in dropped]
        why = (
            f"searched, not kept: {', '.join(values)} (an option keeps one: {dashed(dropped[0])} {options[dropped[0]]})"
        )
        options, batch = _without(options, dropped, given)
        readings = _noted(readings, assumed=[f"{why}; {batch}" if batch else why])
    if {**options, **given}.get("gpus", 1) == 1 and any(reading.format in _UNSHARDED_ALONE for reading in readings):
        options |= {"strategy": "ddp", "backend": "ddp"} if "strategy" in options else {}
    if given.get("backend", options.get("backend", "auto")) not in ("auto", *_backends(options)):
        options.pop("framework")
        options.pop("cuda_graphs", None)
        if _drops_compile(options):
            readings = _noted(readings, not_modelled=[UNCOMPILED])
    if _uses_llamafactory_cli(readings, {**options, **given}):
        options["allocator_conf"] = EXPANDABLE_SEGMENTS
        said = f"PYTORCH_ALLOC_CONF={EXPANDABLE_SEGMENTS}, which llamafactory-cli sets for several GPUs"
        readings = _noted(readings, assumed=[said])
    if "compile" in options and "compile" not in given:
        reason = "a search does not compile" if searched else _why_uncompiled({**options, **given})
        if reason is not None:
            options = {name: value for name, value in options.items() if name not in ("compile", "memory_budget")}
            said = f"torch.compile: {reason}; the estimate is of steps that are not compiled"
            readings = _noted(readings, not_modelled=[said])
    return Configuration(options={**options, **given}, readings=readings)


def _check_batch(options: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Raises UsageError if the files' micro-batch, accumulation and ranks do not give their global batch, as DeepSpeed asserts.

    Source: deepspeed 0.19.8, runtime/config.py, `_batch_assertion`.
    """
    whole = options.get("global_batch_size")
    names = ("micro_batch_size", "gradient_accumulation_steps", "gpus")
    sizes: list[int] = [value for name in names if (value := {**options, **given}.get(name)) is not None]
    if whole is None or "global_batch_size" in given or len(sizes) < len(names) or prod(sizes) == whole:
        return
    micro, steps, world = sizes
    raise UsageError(
        f"micro-batch {micro} x accumulation {steps} x {world} GPUs = {prod(sizes)}, not train_batch_size {whole}: DeepSpeed stops",
        hint=f"correct train_batch_size or the number of GPUs; --global-batch-size {prod(sizes)} replaces it here",
    )


def _without_replaced(options: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The files' options without those that given ones replace."""
    kept = dict(options)
    if {"strategy", "backend"} & set(given):
        kept.pop("strategy", None)
        backend = kept.pop("backend", None)
        if "backend" not in given and backend in BACKENDS.get(given["strategy"], ()):
            kept["backend"] = backend
        if given.get("strategy", "all") not in ("all", *OFFLOADS[kept.get("offload", "none")]):
            kept.pop("offload")
    if "gpus" in given:
        kept.pop("nnodes", None)
    if "global_batch_size" in given and "gradient_accumulation_steps" not in given:
        kept.pop("gradient_accumulation_steps", None)
    if {"micro_batch_size", "gradient_accumulation_steps", "find"} & set(given):
        kept.pop("global_batch_size", None)
    return kept


def _noted(
    readings: Sequence[ConfigReading], *, assumed: Sequence[str] = (), not_modelled: Sequence[str] = ()
) -> tuple[ConfigReading, ...]:
    """The readings with notes added to the first one."""
    first, *others = readings
    added = replace(first, assumed=(*first.assumed, *assumed), not_modelled=(*first.not_modelled, *not_modelled))
    return (added, *others)


def _uses_llamafactory_cli(readings: Sequence[ConfigReading], options: Mapping[str, Any]) -> bool:
    """Whether LLaMA-Factory's command is assumed to start several ranks. It then sets PYTORCH_ALLOC_CONF.

    Source: LLaMA-Factory 0.9.5, launcher.py, OPTIM_TORCH.
    """
    of_llamafactory = any("LLaMA-Factory" in reading.format for reading in readings)
    gpu = options.get("gpu")
    has_setting = gpu is None or find_gpu(gpu).uses_torch_cuda
    return of_llamafactory and options.get("gpus", 1) > 1 and "allocator_conf" not in options and has_setting


def _why_uncompiled(options: Mapping[str, Any]) -> str | None:
    """Why the job is modelled only if it is not compiled; None if it is modelled as the options say, or not at all."""

    def refusal(**changes: Any) -> str | None:
        known = fields_of(EstimateRequest)
        values = {"model": "7B", **options, **changes}
        try:
            request = make_request({name: value for name, value in values.items() if name in known})
            plans(request, seq_len=request.seq_len or 1)
        except UsageError as error:
            return error.message
        return None

    return None if refusal(compile="none", memory_budget=1.0) else refusal()


def _backends(options: Mapping[str, Any]) -> tuple[str, ...]:
    """The backends that the framework of the files supports."""
    return FRAMEWORKS[options.get("framework", "torch")].backends


def _without(options: dict[str, Any], dropped: Sequence[str], given: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """(the options without `dropped`, a sentence). The options keep the global batch size that the dropped ones gave, as the sentence
    says.
    """
    kept = {name: value for name, value in options.items() if name not in dropped}
    decides = {"micro_batch_size", "gradient_accumulation_steps", "global_batch_size", "find"}
    if decides & set(given) or "micro_batch_size" not in options:
        return kept, ""
    gpus = options.get("gpus", given.get("gpus", 1))
    product = options["micro_batch_size"] * options.get("gradient_accumulation_steps", 1) * gpus
    batch = options.get("global_batch_size", product)
    return {**kept, "global_batch_size": batch}, f"the files' global batch size {batch} is kept"
