"""Reads arguments of the Hugging Face Trainer and of TRL, from YAML, JSON, Python or a command line.

Source: transformers 5.23.0, training_args.py (`TrainingArguments`, `_process_fsdp_args`); TRL 1.16.0, trainer/base_config.py,
trainer/sft_config.py, trainer/{dpo,kto,reward}_config.py, trainer/model_config.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

from fsdp_advisor.configs import deepspeed
from fsdp_advisor.configs.adapters import set_lora, set_quantization
from fsdp_advisor.configs.checkpointing import set_reentrant
from fsdp_advisor.configs.collect import Collector, active, truth
from fsdp_advisor.configs.compilation import read_torch_compile
from fsdp_advisor.configs.fsdp import read_fsdp, read_replicas
from fsdp_advisor.configs.liger import set_liger
from fsdp_advisor.configs.names import set_attention, set_experts, set_optimizer
from fsdp_advisor.engines.fsdp1.sharding import sharding_options
from fsdp_advisor.job.adaptation import LORA_OPTIONS
from fsdp_advisor.job.checkpointing import MAX_NUMBER
from fsdp_advisor.job.choices import TrainingTask
from fsdp_advisor.job.evaluation import OPTIONS as EVALUATION_OPTIONS
from fsdp_advisor.job.generation import OF_COLOCATED
from fsdp_advisor.job.generation import OPTIONS as GENERATION_OPTIONS
from fsdp_advisor.job.unknown_options import DATA_PARALLEL, TASKS_OF_TRL

KEYS = {
    "per_device_train_batch_size", "gradient_accumulation_steps", "output_dir", "num_train_epochs", "learning_rate", "bf16", "fp16",
    "model_name_or_path", "fsdp", "deepspeed", "gradient_checkpointing", "optim", "per_gpu_train_batch_size",
}  # fmt: skip
"""Keys by which a file of arguments is recognized: it has at least one of them."""
_OF_TRL = {
    "use_peft", "dataset_name", "packing", "max_length", "lora_r", "lora_target_modules", "completion_only_loss", "max_prompt_length",
    "beta", "num_generations", "dataset_text_field", "assistant_only_loss", "precompute_ref_log_probs", "center_rewards_coefficient",
    "router_aux_loss_coef",
}  # fmt: skip
"""Keys that only TRL's arguments have, not the Trainer's."""
_WITHOUT_EFFECT = (
    "desirable_weight",
    "undesirable_weight",
    "beta",
    "label_smoothing",
    "loss_weights",
    "precompute_ref_batch_size",
    "disable_dropout",
    "center_rewards_coefficient",
)
"""Keys without effect on memory and time, whatever their values: they belong to losses of pairs or of log-probabilities."""
PROMPT_LENGTH = 512
"""The assumed tokens of a prompt if a configuration does not limit them, as in most data sets of TRL's examples."""
_LENGTHS = ("max_length", "max_seq_length", "max_seq_len", "model_max_length", "block_size")
_TOPICS = {
    "preference and reinforcement learning": (
        "beta", "num_generations", "sync_ref_model", "ref_model_sync_steps", "reward_model_path",
    ),
    "tensor and other parallelism": ("parallelism_config", "distributed_config", "tp_size"),
}  # fmt: skip


def is_trainer(keys: Mapping[str, Any]) -> bool:
    return bool(KEYS & set(keys))


def read(file: str, keys: Mapping[str, Any], *, trl: bool | None = None, task: str | None = None) -> Collector:
    """The settings of a file of arguments. `trl`: whether they are TRL's; None: the keys decide. `task`: TRL's task, if it is known."""
    by_trl = bool(_OF_TRL & set(keys)) if trl is None else trl
    found = Collector(file, "TRL" if by_trl else "Trainer arguments", keys)
    read_into(found, trl=by_trl, task=task)
    return found


def _task_of(keys: Collector) -> str | None:
    """The task that follows from the keys of TRL's arguments; None if the task may be sft."""
    if "num_generations" in keys:
        return "grpo"
    if "desirable_weight" in keys or "undesirable_weight" in keys:
        return "kto"
    if "center_rewards_coefficient" in keys:
        return "reward"
    return "dpo" if "beta" in keys or "precompute_ref_log_probs" in keys else None


def read_task(found: Collector, task: str | None) -> None:
    """Set the task of TRL's trainer, None if it is not known, and the options that only this task has."""
    if task in (None, "sft"):
        return
    if task not in get_args(TrainingTask):
        found.refuses(f"trl {task} (preference and reinforcement learning)", TASKS_OF_TRL)
        return
    found.options["task"] = task
    if task == "grpo":
        _generation(found)
    if (precomputes := found.flag("precompute_ref_log_probs")) is not None:
        found.options["precompute_ref_log_probs"] = precomputes
    for key in ("loss_type", *_WITHOUT_EFFECT):
        found.take(key)


def _generation(found: Collector) -> None:
    """Set the options of GRPO. Options of vLLM are set only if TRL uses vLLM."""
    uses_vllm, server = truth(found.peek("use_vllm")), found.peek("vllm_mode") == "server"
    completion = found.number("max_completion_length", "max_completion_length") or 512
    for name in GENERATION_OPTIONS:
        unused = not uses_vllm or (server and name in OF_COLOCATED)
        value = found.take(name)
        if value is not None and not (name.startswith("vllm_") and unused):
            found.options[name] = value
    found.omits_key("generation_batch_size", "batches of completions other than --steps-per-generation")
    prompt = found.number("max_prompt_length")
    if prompt is None:
        found.default(
            "seq_len", PROMPT_LENGTH + completion, f"prompts of {PROMPT_LENGTH} tokens, which TRL does not limit"
        )
    else:
        found.options["seq_len"] = prompt + completion


def read_into(found: Collector, *, trl: bool = False, task: str | None = None) -> None:
    """Set the options from a Trainer's arguments, which are the keys of `found`. `task`: TRL's task, if it is known."""
    options = found.options
    if trl:
        read_task(found, task or _task_of(found))
        if (weight := found.take("router_aux_loss_coef")) is not None:
            options["router_aux_loss_coef"] = weight
    options["framework"] = "trl" if trl else "trainer"
    for key in ("model_name_or_path", "model_name", "model"):
        if isinstance(found.peek(key), str):
            options["model"] = found.take(key)
    if found.number("per_device_train_batch_size", "micro_batch_size") is None:
        found.default("micro_batch_size", 8, "micro-batch 8, the default of per_device_train_batch_size")
    found.number("gradient_accumulation_steps", "gradient_accumulation_steps")
    for key in _LENGTHS:
        found.number(key, "seq_len")
    if trl:
        found.default("seq_len", 1024, "1024 tokens, TRL's default of max_length")
    _batches(found)
    _evaluation(found)
    _precision(found, trl)
    read_torch_compile(found)
    _loss(found, trl)
    _adapters(found)
    set_attention(found, "attn_implementation")
    if found.flag("use_flash_attn") or found.flag("use_flash_attention_2"):
        options["attention"] = "flash_attention_2"
    set_experts(found)
    arguments = found.peek("optim_args")
    set_optimizer(found, "optim", arguments)
    found.take("optim_args")
    _checkpointing(found, trl)
    read_clipping(found)
    _sharding(found)
    for topic, names in _TOPICS.items():
        found.omits_active(topic, *(name for name in names if found.peek(name) not in ("no", "1")))


def _evaluation(found: Collector) -> None:
    """Set when and with which batches the Trainer evaluates. A function in the script decides whether it keeps logits.

    `bf16_full_eval` and `do_eval` change nothing while the Trainer trains. Source: transformers 5.23, trainer.py, `evaluation_loop`.
    """
    old = found.take("evaluation_strategy")
    strategy = found.take("eval_strategy") or old or "no"
    for key in ("do_eval", "bf16_full_eval", "fp16_full_eval", "eval_steps", "eval_delay"):
        found.take(key)
    values = {name: found.take(name) for name in EVALUATION_OPTIONS if name in found}
    if strategy not in ("steps", "epoch"):
        return
    if found.options.get("task", "sft") != "sft":
        found.omits(f"eval_strategy: {strategy} (evaluation)")
        return
    found.options["eval_strategy"] = strategy
    found.options |= {name: value for name, value in values.items() if value is not None}


def _batches(found: Collector) -> None:
    """Set TRL's packing and padding-free batches. Source: trl 1.16, trainer/sft_config.py: the default strategy is bfd."""
    if found.options.get("task", "sft") != "sft":
        found.omits_active("packed sequences", "padding_free")
        return
    strategy = found.take("packing_strategy")
    if found.flag("packing"):
        found.options["packing"] = "wrapped" if strategy == "wrapped" else "bfd"
    if found.flag("padding_free"):
        found.options["padding_free"] = True


def _precision(found: Collector, trl: bool) -> None:
    """Set the precision. `bf16` and `fp16` switch autocast on, which the launcher's configuration may also do; `dtype` is that of the
    weights.

    Source: transformers 5.23, training_args.py, ACCELERATE_MIXED_PRECISION; TRL 1.16, trainer/base_config.py, __post_init__.
    """
    bf16, fp16 = found.flag("bf16"), found.flag("fp16")
    if bf16 is None and trl and not fp16:
        found.default("mixed", "bf16", "bf16, TRL's default")
    elif fp16 or bf16:
        found.options["mixed"] = "fp16" if fp16 else "bf16"
    else:
        found.default("mixed", "no")
    for key in ("dtype", "torch_dtype"):
        if found.peek(key) is not None:
            found.options["dtype"] = str(found.take(key)).removeprefix("torch.")


def _loss(found: Collector, trl: bool) -> None:
    """Set Liger's loss and its other kernels. TRL has its own loss, which uses whole logits if `loss_type` is dft."""
    if trl and found.peek("loss_type") not in (None, "nll", "chunked_nll"):
        found.omits_key("loss_type", "other losses of TRL; the estimate assumes its default loss")
    found.take("loss_type")
    names = [name for name in ("use_liger_kernel", "use_liger") if active(found.peek(name))]
    kernels = found.take("liger_kernel_config") or {}
    for name in names:
        found.take(name)
    if names and isinstance(kernels, dict):
        set_liger(found, kernels, trl=trl)


def read_clipping(found: Collector) -> None:
    """Take the norm to which gradients are clipped, whatever it is. Report 0, with which the Trainer does not clip.

    Source: transformers 5.23, trainer.py, `max_grad_norm`.
    """
    norm = found.peek("max_grad_norm")
    if norm in (0, "0", "0.0"):
        found.omits_key(
            "max_grad_norm", "no gradient clipping; the estimate clips, which takes some time and little memory"
        )
    found.take("max_grad_norm")


def _checkpointing(found: Collector, trl: bool) -> None:
    """Set checkpointing from the switch and the keywords of transformers' `activation_checkpointing_enable`; only TRL has `selective`."""
    asked = [found.flag(key) for key in ("gradient_checkpointing", "activation_checkpointing")]
    given = [found.take(f"{name}_checkpointing_kwargs") for name in ("gradient", "activation")]
    keywords = {name: value for each in given if isinstance(each, Mapping) for name, value in each.items()}
    if trl and found.flag("activation_offloading"):
        found.options["activation_offload"] = True
    if any(asked):
        found.checkpoints.add("Trainer")
        every = keywords.get("every_n_layers")
        found.options["activation_checkpointing"] = (
            f"every-{every}" if type(every) is int and 1 < every <= MAX_NUMBER else "full"
        )
        if trl and keywords.get("selective") is True:
            found.options["activation_checkpointing"] = "selective"
        if keywords.get("offload") is True and not trl:
            found.options["activation_offload"] = True
        elif keywords.get("offload") is True:
            found.omits("gradient_checkpointing_kwargs.offload: transformers' offload under TRL, which has its own")
        if keywords.get("use_reentrant") is True:
            set_reentrant(found)
    elif False in asked:
        found.options["activation_checkpointing"] = "none"
    elif trl:
        found.checkpoints.add("Trainer")
        found.default("activation_checkpointing", "full", "gradient checkpointing, TRL's default")


def _sharding(found: Collector) -> None:
    """Set the sharding from FSDP's or DeepSpeed's section. Without either, the launcher's configuration decides."""
    sharding = found.peek("fsdp")
    if sharding not in (None, False, "", "false", "False", []):
        read_trainers_fsdp(found)
    place = found.peek("deepspeed")
    if isinstance(place, str) and place:
        found.refer("deepspeed")
        found.default("backend", "deepspeed")
    elif isinstance(place, Mapping):
        deepspeed.read_embedded(found, place)


def read_trainers_fsdp(found: Collector) -> None:
    """Read the Trainer's `fsdp` (true, or the words of older versions) and `fsdp_config`, whose keys may begin with fsdp_."""
    words = found.take("fsdp")
    if isinstance(found.peek("fsdp_config"), str):
        found.refer("fsdp_config")  # the version in it decides
        found.default(
            "strategy",
            "zero2" if "shard_grad_op" in str(words) else "zero3",
            "fsdp; the file in fsdp_config decides the rest",
        )
        found.default("backend", "fsdp2")
        if "offload" in str(words):
            found.options["offload"] = "parameters"
        return
    found.section("fsdp_config", optional_prefix="fsdp_")
    version = found.number("fsdp_config.version") or 2
    read_words(found, words, version)
    if version == 2 and "use_peft" in found.options and found.peek("fsdp_config.activation_checkpointing") is True:
        found.omits(
            "fsdp_config.activation_checkpointing with adapters; the estimate has the checkpoints of gradient_checkpointing, which also"
            " keep the gradient of the embedding's output until the next step"
        )
    read_fsdp(found, "fsdp_config.", version)


def read_words(found: Collector, words: Any, version: int) -> None:
    """Read the words of `fsdp`, such as "full_shard auto_wrap", as keys of `fsdp_config`. Keys that the file itself has win.

    Source: transformers 5.23, training_args.py, _apply_legacy_fsdp_to_config. FSDP1 shards fully whatever the word, because accelerate
    uses its own default of sharding_strategy instead.
    """
    names = words if isinstance(words, list) else str(words).replace(",", " ").split()
    for name in map(str, names):
        word = name.lower()
        if word == "offload" and "fsdp_config.cpu_offload" not in found and "fsdp_config.offload_params" not in found:
            found.replace("fsdp_config.cpu_offload", True)
        elif version == 2 and word in ("full_shard", "shard_grad_op"):
            if "fsdp_config.reshard_after_forward" not in found:
                found.replace("fsdp_config.reshard_after_forward", word == "full_shard")
        elif version == 2 and sharding_options(word) is not None:
            found.omits(f"fsdp: {word}, which the Trainer refuses with FSDP2; the estimate shards fully")
        elif word != "full_shard" and sharding_options(word) is not None:
            found.omits(f"fsdp: {word}; with FSDP1 the Trainer shards fully, as estimated")


def mesh(found: Collector, keys: Mapping[str, Any]) -> None:
    """Set replicas and shards from the degrees of a ParallelismConfig."""
    read_replicas(found, keys.get("dp_replicate_size"), keys.get("dp_shard_size"))
    for key in ("tp_size", "cp_size", "sp_size"):
        if int(keys.get(key) or 1) > 1:
            found.refuses(f"{key}: {keys[key]} (tensor and other parallelism)", DATA_PARALLEL)


def _adapters(found: Collector) -> None:
    """Set the options of TRL's ModelConfig, which equal those of a request except for some defaults."""
    if found.flag("use_peft"):
        config = {
            name: found.take(key)
            for name, key in LORA_OPTIONS.items()
            if found.peek(key) not in (None, "None") or key == "lora_dropout"
        }
        if config["lora_dropout"] is None:
            config["lora_dropout"] = 0.05
            found.assume("dropout 0.05 in front of adapters, TRL's default of lora_dropout")
        set_lora(found, config)
    for key, keyword in (("load_in_4bit", "load_in_4bit"), ("load_in_8bit", "load_in_8bit")):
        if not found.flag(key):
            continue
        found.assume("adapters on the quantized base in bf16, and its other weights not converted to fp32, as TRL does")
        config = {keyword: True, "bnb_4bit_quant_type": found.take("bnb_4bit_quant_type") or "nf4"}
        config["bnb_4bit_use_double_quant"] = found.flag("use_bnb_nested_quant")
        config["bnb_4bit_quant_storage"] = found.take("bnb_4bit_quant_storage")
        set_quantization(found, config)
