"""The estimate of a rehearsed job: options derived from the script's own objects, and the figures of `estimate` for them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

from fsdp_advisor.configs.names import optimizer_called
from fsdp_advisor.engines.fsdp1.sharding import sharding_options
from fsdp_advisor.job.adapter_fields import LORA_KERNELS
from fsdp_advisor.job.choices import Framework, TrainingTask
from fsdp_advisor.job.frameworks import FIXED_SEGMENTS, FRAMEWORKS
from fsdp_advisor.job.kernel_packages import usable
from fsdp_advisor.job.projection import DEFAULT
from fsdp_advisor.job.training_task import sequences_per_example
from fsdp_advisor.job.zero_buckets import written_buckets
from fsdp_advisor.memory.allocator.conf import conf_in
from fsdp_advisor.model.kernels import packages_of
from fsdp_advisor.model.liger import LIGER_KERNELS
from fsdp_advisor.rehearsal.report import PEAKS, Prediction, RankResult

TIMEOUT_S = 300
_OF_BITSANDBYTES = {
    ("AdamW", 8, False): "adamw_bnb_8bit", ("AdamW", 8, True): "paged_adamw_8bit", ("AdamW", 32, True): "paged_adamw_32bit",
    ("Lion", 32, False): "lion_32bit", ("Lion", 8, False): "lion_8bit", ("Lion", 32, True): "paged_lion_32bit",
    ("Lion", 8, True): "paged_lion_8bit", ("AdEMAMix", 32, False): "ademamix", ("AdEMAMix", 8, False): "ademamix_8bit",
    ("AdEMAMix", 32, True): "paged_ademamix_32bit", ("AdEMAMix", 8, True): "paged_ademamix_8bit",
    ("RMSprop", 32, False): "rmsprop_bnb_32bit", ("RMSprop", 8, False): "rmsprop_bnb_8bit",
}  # fmt: skip
"""(class without `Paged` and bits, bits of the states, whether they are paged) -> optimizer."""


_LOW_RANK = {
    ("galore_torch", "AdamW"): "galore_adamw",
    ("galore_torch", "AdamW8bit"): "galore_adamw_8bit",
    ("galore_torch", "Adafactor"): "galore_adafactor",
    ("apollo_torch", "AdamW"): "apollo_adamw",
}
"""(package, class) -> optimizer."""


class NotRecognized(Exception):
    """`estimate` has no options for this job. The message is the reason."""


def options_of(rank: RankResult, gpu: str, nnodes: int, folder: Path) -> dict[str, str]:
    """The options of `estimate` for this job. Writes the model's config.json into `folder`. Raises NotRecognized."""
    job = rank.job
    model, batch = job.get("model"), job.get("batch")
    task = job.get("task", {"name": "sft"})
    if "unreadable" in job:
        raise NotRecognized(f"the job could not be read off the script's objects ({job['unreadable']})")
    if not batch:
        raise NotRecognized("no forward was seen")
    if not model:
        raise NotRecognized("the model is not one of transformers")
    if not model["peft"] and job["parameters"] != job["trainable_parameters"]:
        raise NotRecognized("some parameters are frozen, without adapters")
    if task["name"] not in get_args(TrainingTask):
        raise NotRecognized(f"{task['name']} of TRL is not recognized; estimate --task describes its job")
    if model.get("compile", "none") in _parts_not_compiled(job["framework"]):
        raise NotRecognized("torch.compile of parts other than each layer or the model is not modelled")
    if model["checkpointing"] == "other":
        raise NotRecognized(
            "activation checkpointing of some layers, or with a policy of the script's own, is not modelled"
        )
    path = folder / "config.json"
    quantization = _quantization(model["config"])
    config = {name: v for name, v in model["config"].items() if not (quantization and name == "quantization_config")}
    path.write_text(json.dumps(config | {"architectures": [model["class"]]}))
    return {
        "model": str(path),
        "gpu": gpu,
        "gpus": str(rank.world_size),
        "nnodes": str(nnodes),
        "micro-batch-size": str(batch[0] // sequences_per_example(task["name"])),
        "seq-len": str(batch[1]),
        "gradient-accumulation-steps": str(job.get("forwards_per_step", 1)),
        "activation-checkpointing": model["checkpointing"],
        **({"activation-offload": "true"} if model.get("offloads_checkpoints") else {}),
        "attention": model["attention"] or "sdpa",
        "framework": job["framework"],
        **_allocator(job["framework"]),
        **_compile(model),
        **({"experts-implementation": model["experts"]} if model.get("experts") else {}),
        **_kernel_packages(model),
        **_loss(model, job["framework"], task["name"]),
        **_task(task),
        **({"padding-free": "true"} if job.get("padding_free") else {}),
        **_precision(job),
        **_adapter(model["peft"], folder),
        **_lora_kernels(model, job["framework"]),
        **quantization,
        "optim": _optimizer(job),
        **_rank(job),
        **_engine(job["engine"], rank.world_size),
    }


def _allocator(framework: Framework) -> dict[str, str]:
    """The allocator's settings, if the framework's launcher would set them: a rehearsed command runs in the user's own environment."""
    if FRAMEWORKS[framework].allocator_conf is None:
        return {}
    return {"allocator-conf": conf_in(os.environ) or FIXED_SEGMENTS}


def _parts_not_compiled(framework: Framework) -> tuple[str, ...]:
    """The compiled parts that `--compile` does not have with a framework: with accelerate, its layers are accelerate's regions."""
    return ("parts", "layer" if FRAMEWORKS[framework].uses_accelerate else "regions")


def _compile(model: Mapping[str, Any]) -> dict[str, str]:
    """The options of compiled code. Scripts may set the compiler's memory budget without compiling."""
    if model.get("compile", "none") == "none":
        return {}
    budget = model.get("memory_budget", 1.0)
    compiled = "layer" if model["compile"] == "regions" else model["compile"]
    return {"compile": compiled, **({"memory-budget": str(budget)} if budget != 1 else {})}


def _loss(model: Mapping[str, Any], framework: str, task: str) -> dict[str, str]:
    """The options for the loss and Liger's other kernels. A Trainer that uses only the other kernels has the model's own loss."""
    loss = model["loss"]
    kernels = LIGER_KERNELS.get(model["config"].get("model_type", "")) if model.get("liger_kernels") else None
    if kernels is None or task != "sft":
        return {"loss": loss}
    return {"loss": "full" if loss == "auto" and framework != "trl" else loss, "use-liger-kernel": "true"}


def _kernel_packages(model: Mapping[str, Any]) -> dict[str, str]:
    """The option of the installed kernels that the model calls, if it calls others too."""
    called = packages_of(str(model["config"].get("model_type")))
    installed = usable(called, model.get("kernel_packages", called))
    return {} if installed == "all" else {"kernel-packages": installed}


def _lora_kernels(model: Mapping[str, Any], framework: Framework) -> dict[str, str]:
    """The option of axolotl's kernels for adapters."""
    if framework != "axolotl" or not model["peft"] or model["peft"]["peft_type"] != "LORA":
        return {}
    return {"lora-kernels": ",".join(part for part in LORA_KERNELS if part in model.get("lora_kernels", ())) or "none"}


def predict(options: Mapping[str, str], variables: Mapping[str, str]) -> Prediction:
    """Run `estimate` with these options. It runs in `variables`, because recording an unknown model imports torch."""
    words = [f"--{name}={value}" for name, value in options.items()]
    command = [sys.executable, "-m", "fsdp_advisor", "estimate", *words, "--json"]
    try:
        done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=TIMEOUT_S)
        rows = json.loads(done.stdout)["estimates"]
    except (OSError, subprocess.TimeoutExpired) as error:
        return Prediction(options=options, figures={}, reason=f"estimate did not answer: {error}")
    except (ValueError, KeyError):
        said = [line for line in done.stderr.splitlines() if not line.startswith("note:")]
        return Prediction(options=options, figures={}, reason=" ".join(said[-2:]) or "estimate gave no answer")
    figures = {name: rows[0][name] for name in PEAKS if rows[0].get(name) is not None}
    return Prediction(options=options, figures=figures, reason=None if figures else "the peak is unknown")


def _engine(engine: Mapping[str, Any], ranks: int) -> dict[str, str]:
    match engine["backend"]:
        case "none":
            return {"strategy": "ddp"}
        case "ddp":
            return {"strategy": "ddp", "backend": "ddp"}
        case "deepspeed":
            return {
                "strategy": f"zero{engine['zero_stage']}",
                "backend": "deepspeed",
                "zero-buckets": written_buckets(engine["buckets"]),
                **_deepspeed_offload(engine),
            }
        case "fsdp1":
            return {
                **_sharding(engine["sharding"].rpartition(".")[2], ranks),
                "backend": "fsdp1",
                "use-orig-params": _word(engine.get("use_orig_params", True)),
                "backward-prefetch": engine.get("backward_prefetch", "BACKWARD_PRE").rpartition("_")[2].lower(),
                "forward-prefetch": _word(engine.get("forward_prefetch", False)),
                **_offload(engine),
            }
        case "fsdp2":
            resharded = engine["reshard_after_forward"]
            strategy = "hsdp" if engine["mesh_dimensions"] == 2 else "zero3" if resharded else "zero2"
            keeps = {"reshard-after-forward": "false"} if strategy == "hsdp" and not resharded else {}
            return {"strategy": strategy, "backend": "fsdp2", **keeps, **_offload(engine)}
        case other:
            raise NotRecognized(f"{other} is not recognized")


def _sharding(name: str, ranks: int) -> dict[str, str]:
    """The options of FSDP1's sharding. On one rank FSDP1 replaces every sharding by NO_SHARD (torch 2.13, distributed/fsdp/_init_utils.py,
    _init_core_state).
    """
    options = sharding_options("FULL_SHARD" if name == "NO_SHARD" and ranks == 1 else name)
    if options is None or options["strategy"] == "ddp":
        raise NotRecognized(f"{name} of FSDP1 is not recognized")
    return {option.replace("_", "-"): value for option, value in options.items()}


def _deepspeed_precision(engine: Mapping[str, Any]) -> str:
    """The precision under DeepSpeed, which keeps fp32 copies of the weights unless masters and states are set to bf16."""
    match engine["half_masters"]:
        case []:
            return str(engine["mixed_precision"])
        case ["bf16_master_weights_and_gradients", "bf16_optimizer_states"]:
            return "bf16"
        case others:
            raise NotRecognized(f"{' and '.join(others)} of DeepSpeed alone is not modelled")


def _deepspeed_offload(engine: Mapping[str, Any]) -> dict[str, str]:
    """The options for DeepSpeed's offload."""
    devices = {name: device for name, device in engine["offload"].items() if device != "none"}
    if not devices:
        return {}
    if set(devices) == {"parameters"} or len(set(devices.values())) > 1 or engine["offload_ratio"] < 1:
        raise NotRecognized("DeepSpeed's offload of parameters alone, to two devices or in part is not modelled")
    offload = "parameters" if "parameters" in devices else "optimizer"
    return {"offload": offload, "offload-device": devices[offload]}


def _offload(engine: Mapping[str, Any]) -> dict[str, str]:
    """The option for FSDP's parameters in host memory."""
    return {"offload": "parameters"} if engine.get("offloads_parameters") else {}


def _adapter(adapter: Mapping[str, Any] | None, folder: Path) -> dict[str, str]:
    """The option for the adapter; empty without one. Writes its configuration into `folder`."""
    if adapter is None:
        return {}
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(adapter))
    return {"peft-config": str(path)}


def _quantization(config: Mapping[str, Any]) -> dict[str, str]:
    """The options for a base that bitsandbytes quantizes, from the model's configuration; empty for another base."""
    settings = config.get("quantization_config") or {}
    if settings.get("load_in_8bit"):
        return {"load-in-8bit": "true"}
    if not settings.get("load_in_4bit"):
        return {}
    return {
        "load-in-4bit": "true",
        "bnb-4bit-quant-type": str(settings["bnb_4bit_quant_type"]),
        "use-bnb-nested-quant": _word(settings["bnb_4bit_use_double_quant"]),
        "bnb-4bit-quant-storage": str(settings["bnb_4bit_quant_storage"]),
    }


def _task(task: Mapping[str, Any]) -> dict[str, str]:
    weight = task.get("router_aux_loss_coef")
    given = {} if weight is None else {"router-aux-loss-coef": str(weight)}
    match task["name"]:
        case "sft":
            return given
        case "grpo":
            return {"task": "grpo", **given, **_generation(task["generation"])}
        case name:
            return {"task": name, **given, "precompute-ref-log-probs": _word(task["precompute_ref_log_probs"])}


def _generation(given: Mapping[str, Any]) -> dict[str, str]:
    """The options of GRPO's generation. vLLM's are left out if transformers generates; those of colocated vLLM are left out if a server
    does.
    """
    if not given["use_vllm"]:
        kept = {name: value for name, value in given.items() if "vllm" not in name}
    elif given["vllm_mode"] == "server":
        kept = {name: value for name, value in given.items() if not name.startswith("vllm_") or name == "vllm_mode"}
    else:
        kept = dict(given)
    return {name.replace("_", "-"): _word(value) for name, value in kept.items() if value is not None}


def _word(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _precision(job: Mapping[str, Any]) -> dict[str, str]:
    """The options for the precision and the dtype of the weights; with adapters, of the base's."""
    if "mixed_precision" in job["engine"]:
        return {"precision": _deepspeed_precision(job["engine"])}
    dtypes = job["frozen_dtypes"] if job["model"]["peft"] else job["dtypes"]
    computes = f"{job.get('autocast')} {job['engine'].get('precision')}"
    half = "bfloat16" if "bfloat16" in computes else "float16" if "float16" in computes else None
    if _quantization(job["model"]["config"]):  # PEFT may store the other weights in fp32
        return {"precision": {"bfloat16": "bf16-mixed", "float16": "fp16-mixed", None: "bf16"}[half]}
    match dtypes, half:
        case ["torch.bfloat16"], None:
            return {"precision": "bf16"}
        case ["torch.bfloat16"], "bfloat16":
            return {"precision": "bf16-mixed", "dtype": "bfloat16"}
        case ["torch.float32"], None:
            return {"precision": "fp32"}
        case ["torch.float32"], "bfloat16":
            return {"precision": "bf16-mixed", **({"dtype": "float32"} if job["model"]["peft"] else {})}
        case ["torch.float32"], "float16":
            return {"precision": "fp16-mixed", **({"dtype": "float32"} if job["model"]["peft"] else {})}
        case ["torch.float16"], "float16" if job["model"]["peft"]:
            return {"precision": "fp16-mixed", "dtype": "float16"}
    raise NotRecognized(f"parameters are {' and '.join(dtypes)}" + (f" and computation is {half}" if half else ""))


def _rank(job: Mapping[str, Any]) -> dict[str, str]:
    """The option for the rank of a projection."""
    rank = job.get("optimizer", {}).get("rank", DEFAULT.rank)
    return {} if rank == DEFAULT.rank else {"optim-args": f"rank={rank}"}


def _optimizer(job: Mapping[str, Any]) -> str:
    name = job.get("optimizer", {}).get("class")
    if "rank" in job.get("optimizer", {}):
        found = _LOW_RANK.get((job["optimizer"]["package"], str(name)))
        if found is None:
            raise NotRecognized(f"the optimizer {name} with a projection is not recognized")
        return found
    if "bits" in job.get("optimizer", {}):
        bits, paged = job["optimizer"]["bits"], job["optimizer"]["paged"]
        kind = str(name).removeprefix("Paged").removesuffix("8bit").removesuffix("32bit")
        if (kind, bits, paged) not in _OF_BITSANDBYTES:
            raise NotRecognized(f"the optimizer {name} is not recognized")
        return _OF_BITSANDBYTES[kind, bits, paged]
    settings = job.get("optimizer", {})
    found = optimizer_called(f"{settings.get('module', '')}.{name}", settings)
    if found is None:
        raise NotRecognized(f"the optimizer {name} is not recognized")
    return found
