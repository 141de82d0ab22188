"""Which rehearsed jobs are estimated too, by the facts that the script's own objects showed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, get_args

import pytest
import torch
from accelerate.utils.other import compile_regions, compile_regions_fsdp2
from torch import nn

from fsdp_advisor.job import generation
from fsdp_advisor.job.choices import Framework
from fsdp_advisor.job.zero_buckets import ZERO_BUCKETS, read_zero_buckets
from fsdp_advisor.recording.compiled import regions
from fsdp_advisor.rehearsal.inside import job_facts
from fsdp_advisor.rehearsal.prediction import NotRecognized, options_of
from fsdp_advisor.rehearsal.report import RankResult

JOB: dict[str, Any] = {
    "engine": {"backend": "ddp"}, "framework": "trl", "task": {"name": "dpo", "precompute_ref_log_probs": False}, "batch": [4, 128],
    "model": {"class": "LlamaForCausalLM", "config": {}, "attention": "sdpa", "checkpointing": "none", "loss": "auto", "peft": None},
    "parameters": 10, "trainable_parameters": 10, "dtypes": ["torch.float32"], "frozen_dtypes": [], "autocast": None,
    "optimizer": {"class": "AdamW", "module": "torch.optim.adamw", "fused": True},
}  # fmt: skip


def options(folder: Path, ranks: int = 1, **changed: Any) -> dict[str, str]:
    rank = RankResult(
        rank=0, world_size=ranks, pid=1, status="completed", error=None, steps=3, seconds=1.0, torch="2.13.0", gpu_memory_bytes=1,
        phases=(), out_of_memory=(), timeline=(), job={**JOB, **changed},
    )  # fmt: skip
    return options_of(rank, "H100-80GB", 1, folder)


def test_a_micro_batch_of_dpo_counts_pairs(tmp_path: Path) -> None:
    found = options(tmp_path)
    assert (found["task"], found["framework"], found["micro-batch-size"]) == ("dpo", "trl", "2")


def test_all_options_of_generation_are_read_off_a_trainer() -> None:
    assert job_facts.GENERATION == generation.OPTIONS


def test_a_job_of_an_unknown_version_is_not_recognized(tmp_path: Path) -> None:
    with pytest.raises(NotRecognized, match="could not be read off"):
        options(tmp_path, unreadable="AttributeError: no attribute 'mp_policy'")


@pytest.mark.parametrize(
    ("model_type", "loss", "framework", "expected"),
    [
        ("llama", "liger", "trainer", ("liger", "true")),
        ("llama", "auto", "trainer", ("full", "true")),
        ("llama", "auto", "trl", ("auto", "true")),
        ("gpt2", "auto", "trainer", ("auto", None)),
    ],
)
def test_ligers_kernels_are_recognized_with_the_loss(
    model_type: str, loss: str, framework: str, expected: tuple[str, str | None], tmp_path: Path
) -> None:
    model = JOB["model"] | {"config": {"model_type": model_type}, "loss": loss, "liger_kernels": True}
    found = options(tmp_path, model=model, framework=framework, task={"name": "sft"})
    assert (found["loss"], found.get("use-liger-kernel")) == expected


def test_a_base_of_bitsandbytes_is_recognized_by_its_settings(tmp_path: Path) -> None:
    settings = {
        "load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True, "bnb_4bit_quant_storage": "bfloat16",
    }  # fmt: skip
    model = JOB["model"] | {"config": {"quantization_config": settings}, "peft": {"peft_type": "LORA"}}
    found = options(tmp_path, model=model, frozen_dtypes=["torch.bfloat16", "torch.float32"], autocast="torch.bfloat16")
    assert (found["load-in-4bit"], found["bnb-4bit-quant-storage"], found["use-bnb-nested-quant"]) == (
        "true",
        "bfloat16",
        "true",
    )
    assert found["precision"] == "bf16-mixed" and "dtype" not in found
    assert "quantization_config" not in (tmp_path / "config.json").read_text()


@pytest.mark.parametrize(
    ("sharding", "ranks", "expected"),
    [
        ("SHARD_GRAD_OP", 8, ("zero2", None)),
        ("HYBRID_SHARD", 8, ("hsdp", None)),
        ("_HYBRID_SHARD_ZERO2", 8, ("hsdp", "false")),
        ("NO_SHARD", 1, ("zero3", None)),
    ],
)
def test_fsdp1_is_recognized_by_its_sharding(
    sharding: str, ranks: int, expected: tuple[str, str | None], tmp_path: Path
) -> None:
    found = options(tmp_path, ranks, engine={"backend": "fsdp1", "sharding": f"ShardingStrategy.{sharding}"})
    assert (found["strategy"], found.get("reshard-after-forward")) == expected


def test_fsdp1_without_shards_on_several_ranks_is_not_recognized(tmp_path: Path) -> None:
    with pytest.raises(NotRecognized, match="NO_SHARD"):
        options(tmp_path, 2, engine={"backend": "fsdp1", "sharding": "ShardingStrategy.NO_SHARD"})


def test_fsdp2_s_replicas_that_keep_parameters_are_recognized(tmp_path: Path) -> None:
    for reshards, expected in ((True, None), (False, "false")):
        engine = {"backend": "fsdp2", "mesh_dimensions": 2, "reshard_after_forward": reshards}
        found = options(tmp_path, 8, engine=engine)
        assert (found["strategy"], found.get("reshard-after-forward")) == ("hsdp", expected)


ZERO_SIZES = {
    "zero_reduce_bucket_size": 3 * 10**6, "zero_sub_group_size": 10**9, "zero_prefetch_bucket_size": 10**6,
    "zero_param_persistence_threshold": 0, "zero_max_live_parameters": 10**9, "zero_max_reuse_distance": 10**9,
}  # fmt: skip


def test_deepspeed_is_recognized_with_its_sizes_of_buckets(tmp_path: Path) -> None:
    found = options(tmp_path, 8, engine=deepspeed_engine())
    assert found["zero-buckets"] == (
        "reduce_bucket_size=3000000,sub_group_size=1000000000,stage3_prefetch_bucket_size=1000000,"
        "stage3_param_persistence_threshold=0,stage3_max_live_parameters=1000000000,stage3_max_reuse_distance=1000000000"
    )
    assert read_zero_buckets(found["zero-buckets"]) == found["zero-buckets"]
    assert job_facts.BUCKETS == ZERO_BUCKETS


def deepspeed_engine(masters: tuple[str, ...] = (), **offload: Any) -> dict[str, Any]:
    """The facts of a DeepSpeedEngine in bf16 at stage 3 with these half-precision masters and sections of offload."""
    own = {
        "bfloat16_enabled": True, "zero_optimization_stage": 3, **dict.fromkeys(masters, True), **ZERO_SIZES,
        **{f"zero_offload_{name}": SimpleNamespace(**offload[name]) if name in offload else None for name in ("optimizer", "param")},
    }  # fmt: skip
    methods = {name: lambda self, value=value: value for name, value in own.items()}
    return job_facts.engine_of(type("DeepSpeedEngine", (), methods)())


BF16_MASTERS = ("bf16_master_weights_and_gradients", "bf16_optimizer_states")


def test_deepspeed_is_recognized_with_its_offload_and_masters(tmp_path: Path) -> None:
    cpu, nvme = {"device": "cpu"}, {"device": "nvme"}
    for engine, expected in (
        (deepspeed_engine(), (None, None, "bf16-mixed")),
        (deepspeed_engine(optimizer={"device": "none"}), (None, None, "bf16-mixed")),
        (deepspeed_engine(optimizer=nvme), ("optimizer", "nvme", "bf16-mixed")),
        (deepspeed_engine(BF16_MASTERS, optimizer=cpu, param=cpu), ("parameters", "cpu", "bf16")),
    ):
        found = options(tmp_path, 8, engine=engine)
        assert (found.get("offload"), found.get("offload-device"), found["precision"]) == expected
        assert (found["backend"], found["strategy"]) == ("deepspeed", "zero3")


@pytest.mark.parametrize(
    "engine",
    [
        deepspeed_engine(BF16_MASTERS[:1]),
        deepspeed_engine(param={"device": "cpu"}),
        deepspeed_engine(optimizer={"device": "nvme"}, param={"device": "cpu"}),
        deepspeed_engine(optimizer={"device": "cpu", "ratio": 0.5}),
    ],
    ids=["bf16 masters alone", "parameters alone", "two devices", "in part"],
)
def test_settings_of_deepspeed_that_are_not_modelled_are_not_recognized(engine: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(NotRecognized, match="not modelled"):
        options(tmp_path, 8, engine=engine)


def test_a_base_in_fp32_is_recognized_as_such(tmp_path: Path) -> None:
    model = JOB["model"] | {"peft": {"peft_type": "LORA"}}
    found = options(tmp_path, model=model, frozen_dtypes=["torch.float32"], autocast="torch.bfloat16")
    assert (found["precision"], found["dtype"]) == ("bf16-mixed", "float32")  # without it a base is taken to be in bf16


@pytest.mark.parametrize(
    ("module", "name", "settings", "expected"),
    [
        ("torch.optim.adam", "Adam", {"fused": None}, "adamw_torch"),
        ("torch.optim.adam", "Adam", {"fused": True}, "adamw_torch_fused"),
        ("torch.optim._muon", "Muon", {}, "muon"),
        ("torch.optim.sgd", "SGD", {"momentum": 0.9}, "sgd_momentum"),
        ("torchao.optim.adam", "AdamW8bit", {}, "adamw_torch_8bit"),
        ("torchao.optim.adam", "AdamWFp8", {}, "adamw_torch_fp8"),
        ("bitsandbytes.optim.adamw", "PagedAdamW8bit", {"bits": 8, "paged": True}, "paged_adamw_8bit"),
        ("lomo_optim.adalomo", "AdaLomo", {}, "adalomo"),
        ("deepspeed.ops.adam.fused_adam", "FusedAdam", {}, "adamw_torch_fused"),
        ("deepspeed.ops.adam.cpu_adam", "DeepSpeedCPUAdam", {}, "adamw_torch"),
        ("adam_mini", "Adam_mini", {}, "adam_mini"),
    ],
)
def test_optimizers_are_recognized(
    module: str, name: str, settings: dict[str, Any], expected: str, tmp_path: Path
) -> None:
    found = options(tmp_path, optimizer={"class": name, "module": module, **settings})
    assert found["optim"] == expected


def test_optimizer_that_is_not_modelled_is_not_recognized(tmp_path: Path) -> None:
    for name, settings in (("LBFGS", {}), ("RMSprop", {"momentum": 0.9}), ("RMSprop", {"centered": True})):
        with pytest.raises(NotRecognized, match=f"the optimizer {name} is not recognized"):
            options(tmp_path, optimizer={"class": name, "module": "torch.optim", **settings})


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, "full"),
        ({"every_n_layers": 2}, "every-2"),
        ({"every_n_layers": 9}, "every-5"),  # the first of five layers
        ({"offload": True}, "full"),
        ({"activation_checkpointing_kwargs": {"use_reentrant": True}}, "reentrant"),
        ({"activation_checkpointing_kwargs": {"use_reentrant": True}, "every_n_layers": 2}, "other"),
        ({"activation_checkpointing_kwargs": {"use_reentrant": False, "context_fn": print}}, "other"),
    ],
    ids=["all", "every second", "the first", "on the host", "reentrant", "every second, reentrant", "a function"],
)
def test_checkpointed_layers_are_recognized(settings: dict[str, Any], expected: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 5, "num_attention_heads": 4}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, vocab_size=8))
    assert job_facts.model_of(model)["checkpointing"] == "none"
    model.activation_checkpointing_enable(**settings)
    found = job_facts.model_of(model)
    assert found["checkpointing"] == expected
    if expected == "other":
        with pytest.raises(NotRecognized, match="activation checkpointing of some layers"):
            options(tmp_path, model=JOB["model"] | {"checkpointing": expected})
    else:
        recognized = options(tmp_path, model=found)
        assert recognized["activation-checkpointing"] == expected
        assert recognized.get("activation-offload") == ("true" if "offload" in settings else None)


def test_layers_in_pytorchs_wrapper_are_recognized() -> None:
    pytest.importorskip("torch")
    from torch import nn
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    for wrapped, expected in (([0, 1, 2, 3], "full"), ([0, 2], "every-2"), ([1, 3], "other")):
        layers = [checkpoint_wrapper(nn.Linear(1, 1)) if n in wrapped else nn.Linear(1, 1) for n in range(4)]
        assert job_facts.checkpointing_of(nn.Sequential(nn.ModuleList(layers))) == expected


def test_what_is_compiled_is_recognized(tmp_path: Path) -> None:
    layers = JOB["model"] | {"compile": "layer"}
    assert options(tmp_path, model=layers, framework="torch")["compile"] == "layer"
    assert "compile" not in options(tmp_path, model=JOB["model"] | {"compile": "none"})
    budgeted = options(tmp_path, model=layers | {"memory_budget": 0.5}, framework="torch")
    assert budgeted["memory-budget"] == "0.5"
    assert options(tmp_path, model=JOB["model"] | {"compile": "model"})["compile"] == "model"
    regions = JOB["model"] | {"compile": "regions"}
    assert options(tmp_path, model=regions, framework="accelerate")["compile"] == "layer"
    for framework, compiled in (("accelerate", "parts"), ("accelerate", "layer"), ("torch", "regions")):
        with pytest.raises(NotRecognized, match="parts other than"):
            options(tmp_path, model=JOB["model"] | {"compile": compiled}, framework=framework)


def test_regions_are_distinguished_from_layers() -> None:
    def of(compiles: Callable[[nn.Module], object]) -> str:
        layers = nn.ModuleList(nn.Linear(1, 1) for _ in range(2))
        model = nn.ModuleDict({"embedding": nn.Linear(1, 1), "layers": layers, "head": nn.Linear(1, 1)})
        module = compiles(model)
        return job_facts.compiled_part(module if isinstance(module, nn.Module) else model, model)

    assert of(compile_regions) == of(compile_regions_fsdp2) == "regions"
    assert of(lambda model: [layer.compile() for layer in model["layers"]]) == "layer"
    assert of(lambda model: model["head"].compile()) == "parts"
    assert of(torch.compile) == "model"


def test_a_trainer_of_trl_without_an_estimate_is_not_taken_for_supervised_training(tmp_path: Path) -> None:
    with pytest.raises(NotRecognized, match="RLOOTrainer of TRL"):
        options(tmp_path, task={"name": "RLOOTrainer", "precompute_ref_log_probs": False})


@pytest.mark.parametrize("name", ["sft", "dpo"])
def test_the_weight_of_the_routers_loss_is_recognized(name: str, tmp_path: Path) -> None:
    for weight, option in ((None, None), (0.0, "0.0")):
        task = {"name": name, "precompute_ref_log_probs": False, "router_aux_loss_coef": weight}
        assert options(tmp_path, task=task).get("router-aux-loss-coef") == option


@pytest.mark.parametrize(
    ("changed", "present", "absent"),
    [
        ({}, {"num-generations": "4", "beta": "0.1", "use-vllm": None}, "vllm-mode"),
        ({"use_vllm": True}, {"use-vllm": "true", "vllm-gpu-memory-utilization": "0.3"}, "vllm-max-model-length"),
        ({"use_vllm": True, "vllm_mode": "server"}, {"use-vllm": "true", "vllm-mode": "server"}, "vllm-gpu-memory-utilization"),
    ],
    ids=["transformers", "vLLM on the same GPUs", "a server"],
)  # fmt: skip
def test_how_grpo_generates_is_recognized(
    changed: dict[str, Any], present: dict[str, str | None], absent: str, tmp_path: Path
) -> None:
    generation = {
        "num_generations": 4, "beta": 0.1, "use_vllm": False, "vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.3,
        "vllm_max_model_length": None,
    }  # fmt: skip
    task = {"name": "grpo", "precompute_ref_log_probs": False, "generation": {**generation, **changed}}
    found = options(tmp_path, task=task)
    assert found["task"] == "grpo" and found["micro-batch-size"] == "4"
    assert {name: found.get(name) for name in present} == present and absent not in found


@pytest.mark.parametrize(
    ("name", "module", "task"),
    [("SFTTrainer", "trl.trainer.sft_trainer", "sft"), ("RLOOTrainer", "trl.trainer.rloo_trainer", "RLOOTrainer")],
)
def test_a_trainer_is_known_by_its_class_of_trl(
    name: str, module: str, task: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_trl = type(name, (), {"__module__": module})
    trainer = type("OwnTrainer", (of_trl,), {})()
    monkeypatch.setattr(job_facts, "running_trainer", lambda: trainer)
    monkeypatch.delitem(sys.modules, "accelerate.state", raising=False)
    assert job_facts.task_of()["name"] == task
    assert job_facts.framework_of() == "trl"


def test_every_framework_is_recognized_in_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed's own loop is recognized by its engine and counts as PyTorch's."""

    def trainer(*modules: str) -> Any:
        kinds = tuple(type("Trainer", (), {"__module__": module}) for module in modules)
        return type("OwnTrainer", kinds, {})()

    running: dict[Framework, Any] = {
        "torch": None,
        "deepspeed": None,
        "trainer": trainer("transformers.trainer"),
        "trl": trainer("trl.trainer.sft_trainer"),
        "axolotl": trainer("axolotl.core.trainers.base"),
        "llamafactory": trainer("llamafactory.train.dpo.trainer", "trl.trainer.dpo_trainer"),
        "accelerate": None,
        "torchtitan": None,
    }
    assert set(running) == set(get_args(Framework))
    monkeypatch.delitem(sys.modules, "torchtitan.trainer", raising=False)
    for framework, of in running.items():
        monkeypatch.setattr(job_facts, "running_trainer", lambda of=of: of)
        state = SimpleNamespace(
            AcceleratorState=SimpleNamespace(_shared_state={"a": 1} if framework == "accelerate" else {})
        )
        monkeypatch.setitem(sys.modules, "accelerate.state", state)
        code = compile("def train(self, ask):\n    return ask()", "titan.py", "exec")
        module = ModuleType("torchtitan.trainer")
        module.__file__ = "titan.py"
        exec(code, vars(module))
        if framework == "torchtitan":
            monkeypatch.setitem(sys.modules, "torchtitan.trainer", module)
        found = module.train("the trainer", job_facts.framework_of)
        assert found == ("torch" if framework == "deepspeed" else framework)


def test_the_regions_of_a_recording_are_recognized() -> None:
    """`job_facts` runs in the script's process and has the rule again, because it imports nothing of the package."""
    layers = nn.ModuleList(nn.Sequential(nn.Linear(1, 1)) for _ in range(2))
    mixed = nn.ModuleList([nn.Linear(1, 1), nn.Embedding(1, 1)])
    experts = type("Experts", (nn.ModuleList,), {})(nn.Linear(1, 1) for _ in range(2))
    parts = {"layers": layers, "mixed": mixed, "experts": experts}
    inner = nn.ModuleDict({"embedding": nn.Embedding(1, 1), **parts, "norm": nn.LayerNorm(1)})
    model = nn.ModuleDict({"model": inner, "head": nn.Linear(1, 1)})
    for region in regions(model, ()):
        region.compile()
    assert job_facts.compiled_part(model, model) == "regions"


def test_axolotls_kernels_of_adapters_are_recognized() -> None:
    def apply_lora_mlp_swiglu(x: torch.Tensor) -> torch.Tensor:
        return x

    def apply_lora_o(x: torch.Tensor) -> torch.Tensor:
        return x

    apply_lora_mlp_swiglu.__module__ = apply_lora_o.__module__ = "axolotl.kernels.lora"
    model: Any = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    assert job_facts.lora_kernels_of(model) == []
    model[0].forward, model[1].apply_o = apply_lora_mlp_swiglu, apply_lora_o
    assert sorted(job_facts.lora_kernels_of(model)) == ["mlp", "o"]


@pytest.mark.parametrize(
    ("model_type", "installed", "expected"),
    [
        ("qwen3_5", [], "none"),
        ("qwen3_5_text", ["fla", "mamba-ssm"], "fla"),
        ("qwen3_next", ["fla", "causal-conv1d"], None),
        ("rwkv", ["fla"], "none"),
        ("llama", [], None),
    ],
)
def test_the_estimate_has_the_kernels_that_the_process_has(
    model_type: str, installed: list[str], expected: str | None, tmp_path: Path
) -> None:
    model = JOB["model"] | {"config": {"model_type": model_type}, "kernel_packages": installed}
    assert options(tmp_path, model=model).get("kernel-packages") == expected


def test_kernels_whose_modules_are_imported_are_recognized(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("fla", "causal_conv1d", "mamba_ssm", "transformers.models.rwkv.modeling_rwkv"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "fla", None)  # its import is blocked
    assert job_facts.kernel_packages() == []
    monkeypatch.setitem(sys.modules, "mamba_ssm", ModuleType("mamba_ssm"))
    loaded: Any = SimpleNamespace(rwkv_cuda_kernel=object())
    monkeypatch.setitem(sys.modules, "transformers.models.rwkv.modeling_rwkv", loaded)
    assert job_facts.kernel_packages() == ["mamba-ssm", "kernels"]
