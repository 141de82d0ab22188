"""Exporting and reading back gives the same plan, field by field."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from export_jobs import HIDDEN, RANKS, job, jobs, plan
from test_bundle import CASES, JOBS, files_of

from fsdp_advisor.configs import Configuration, complete, from_paths, from_texts
from fsdp_advisor.engines.deepspeed.settings import Settings, settings_for
from fsdp_advisor.errors import UsageError
from fsdp_advisor.export import TARGETS, Job, export
from fsdp_advisor.job.adaptation import Adaptation, launched
from fsdp_advisor.job.compatibility import plans
from fsdp_advisor.job.evaluation import Evaluation
from fsdp_advisor.job.generation import Generation
from fsdp_advisor.job.parsing import make_request
from fsdp_advisor.job.plan import Plan
from fsdp_advisor.job.search_request import RecommendRequest
from fsdp_advisor.policies.optimizers import optimizer_named
from fsdp_advisor.policies.optimizers.interface import Refusal

NOT_IN_THE_FILE = {
    "accelerate": {"micro_batch_size", "seq_len", "optim", "attention", "gradient_accumulation_steps"},
    "deepspeed": {"seq_len", "attention", "activation_checkpointing", "mesh"},
    "trainer": {"seq_len", "mesh"},
    "axolotl": {"mesh"},
    "trl": {"mesh"},
    "llamafactory": {"mesh"},
    "fsdp2": {"mesh"},
    "ddp": set(),
}
"""The fields of a plan that a target's single file cannot express: its script or its launcher does."""


def plan_of(found: Configuration, **given: Any) -> Plan:
    request = make_request(complete(found, given).options)
    (found_plan,) = plans(request, seq_len=request.seq_len or 0)
    return found_plan


def different(plan: Plan, other: Plan) -> dict[str, tuple[Any, Any]]:
    values = {f.name: (getattr(plan, f.name), getattr(other, f.name)) for f in fields(Plan) if f.name != "framework"}
    return {name: pair for name, pair in values.items() if pair[0] != pair[1]}


def sizes_of(plan: Plan) -> Settings | None:
    """The sizes of DeepSpeed's buckets that the estimate of a plan has."""
    return settings_for(HIDDEN, plan) if plan.backend == "deepspeed" else None


@pytest.mark.parametrize(("target", "name"), CASES)
def test_a_bundle_reads_back_as_its_plan(target: str, name: str, tmp_path: Path) -> None:
    of = JOBS[name]
    for file, text in files_of(target, of).items():
        (tmp_path / file).write_text(text)
    found = from_paths([tmp_path])
    assert found.options["model"] == of.model_name
    assert found.options["allocator_conf"] == "expandable_segments:True"
    read = plan_of(found)
    left = different(read, of.plan)
    if target == "trl":  # it has one loss
        left.pop("loss_code")
    left.pop("zero_buckets", None)
    assert left == {} and sizes_of(read) == sizes_of(of.plan)
    expected = (
        {TARGETS[target].framework, of.plan.framework}
        if target in ("torchrun", "sbatch", "deepspeed", "deepspeed-launch")
        else {TARGETS[target].framework}
    )
    assert read.framework in expected | (
        {"deepspeed"} if "deepspeed" in target or read.backend == "deepspeed" else set()
    )
    for reading in found.readings:
        assert not [item for item in reading.not_modelled if "estimate assumes" in item], reading


@pytest.mark.parametrize("target", NOT_IN_THE_FILE)
def test_a_single_file_reads_back_as_its_plan(target: str) -> None:
    """The file alone, for each plan of today that the target supports. The command line adds what the file cannot express."""
    for of in jobs(target):
        exported = export(target, of)
        files = {exported.file_name: exported.text}
        if target == "accelerate" and "deepspeed_config_file" in exported.text:
            files["ds_config.json"] = export("deepspeed", of).text
        p = of.plan
        given = {"model": "gpt2", "gpus": RANKS, "nnodes": p.nnodes}
        given |= {name: getattr(p, name) for name in NOT_IN_THE_FILE[target] - {"mesh"}}
        if target in ("trainer", "trl", "llamafactory") and p.backend == "ddp":  # no sharding: the launcher decides
            given["strategy"] = "ddp"
        read = plan_of(from_texts(files), **given)
        assert sizes_of(read) == sizes_of(p), (p, exported.text)
        left = different(read, p)
        for name in _lost(target, of):
            left.pop(name, None)
        assert left == {}, (p, exported.text)


def _lost(target: str, of: Job) -> set[str]:
    """Differences without an effect, and what the consumer itself does not distinguish."""
    p, lost = of.plan, set()
    if p.backend == "deepspeed":
        lost |= {"wrap", "backward_prefetch", "zero_buckets"}  # files state the sizes that the plan leaves open
        optimizer = optimizer_named(p.optim)
        named = optimizer.deepspeed if p.offload == "none" else optimizer.deepspeed_offloaded
        if p.offload != "none" or target == "deepspeed":  # DeepSpeed's own AdamW and Lion stand for all others
            lost |= {"optim"} if isinstance(named, Refusal) or named.name in ("AdamW", "Lion") else set()
    if p.strategy == "hsdp" and p.replica_degree == 1:
        lost.add("strategy")  # one replica is ZeRO-3
    if p.backend != "fsdp1":
        lost.add("backward_prefetch")
    if p.offload == "none":
        lost.add("offload_device")
    if target == "trl" and p.framework != "trl":  # TRL has one loss
        lost.add("loss_code")
    if target == "accelerate":  # the script decides on the weights' dtype, and outside FSDP on checkpointing
        lost |= {"precision"} if p.precision == "bf16" and p.backend != "deepspeed" else set()
        lost |= {"activation_checkpointing"} if p.backend in ("ddp", "deepspeed") else set()
    return lost


def test_options_on_the_command_line_win_over_the_file() -> None:
    of = job(next(j.plan for j in jobs("accelerate") if j.plan.backend == "fsdp2"))
    found = from_texts({"accelerate.yaml": export("accelerate", of).text})
    options = complete(found, {"model": "gpt2", "gpus": 4, "strategy": "ddp", "precision": "fp32"}).options
    assert (options["gpus"], options["strategy"], options["precision"]) == (4, "ddp", "fp32")
    assert "backend" not in options and "nnodes" not in options


@pytest.mark.parametrize(("strategy", "backend"), [("zero2", "fsdp1"), ("zero1", None), ("all", None)])
def test_a_given_strategy_keeps_the_backend_of_the_file_if_it_has_it(strategy: str, backend: str | None) -> None:
    text = yaml.safe_dump({"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 1}})
    options = complete(from_texts({"accelerate.yaml": text}), {"strategy": strategy}).options
    assert (options["strategy"], options.get("backend")) == (strategy, backend)


def test_a_search_keeps_the_global_batch_size_of_the_files() -> None:
    text = yaml.safe_dump(
        {
            "base_model": "gpt2",
            "micro_batch_size": 2,
            "gradient_accumulation_steps": 4,
            "fsdp_version": 2,
            "dp_shard_size": 8,
            "fsdp_config": {"reshard_after_forward": True},
        }
    )
    found = complete(
        from_texts({"a.yaml": text}), {}, ("strategy", "backend", "micro_batch_size", "gradient_accumulation_steps")
    )
    assert found.options["global_batch_size"] == 64
    assert not {"strategy", "micro_batch_size", "gradient_accumulation_steps"} & set(found.options)
    [said] = (sentence for sentence in found.readings[0].assumed if sentence.startswith("searched"))
    assert said == (
        "searched, not kept: strategy zero3, backend fsdp2, micro_batch_size 2, gradient_accumulation_steps 4 (an option keeps one:"
        " --strategy zero3); the files' global batch size 64 is kept"
    )


@pytest.mark.parametrize(("given", "batch"), [({"gpus": 4}, 32), ({}, 8), ({"gpus": 4, "micro_batch_size": 1}, None)])
def test_the_global_batch_size_of_a_file_without_gpus_is_that_of_the_given_ones(
    given: dict[str, int], batch: int | None
) -> None:
    text = yaml.safe_dump({"base_model": "gpt2", "micro_batch_size": 2, "gradient_accumulation_steps": 4})
    found = complete(from_texts({"a.yaml": text}), given, RecommendRequest.SEARCHED)
    assert found.options.get("global_batch_size") == batch


LORA = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "lora_dropout": 0.0, "target_modules": ["q_proj", "v_proj"]}
NF4 = {
    "load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": "bfloat16", "bnb_4bit_use_double_quant": True,
    "bnb_4bit_quant_storage": "bfloat16",
}  # fmt: skip
ADAPTATIONS = {
    "lora": Adaptation(peft=LORA),
    "dora": Adaptation(peft={**LORA, "use_dora": True, "modules_to_save": ["lm_head"]}),
    "qlora": Adaptation(peft={**LORA, "target_modules": "all-linear"}, quantization=NF4),
    "int8": Adaptation(peft=LORA, quantization={"load_in_8bit": True}),
    "ia3": Adaptation(peft={"peft_type": "IA3", "target_modules": ["v_proj"], "feedforward_modules": []}),
    "layers": Adaptation(peft={**LORA, "layers_to_transform": [0, 1]}),
    "frozen": Adaptation(freeze=("embed_tokens", "layers.0")),
}
TRAINED_BY = {
    "fsdp2": ("fsdp2", "torch"), "ddp": ("ddp", "torch"), "accelerate": ("fsdp2", "accelerate"), "trainer": ("fsdp2", "trainer"),
    "deepspeed": ("deepspeed", "deepspeed"), "axolotl": ("fsdp2", "trainer"), "trl": ("fsdp2", "trl"),
    "llamafactory": ("ddp", "llamafactory"),
    "torchrun": ("fsdp1", "torch"),
}  # fmt: skip
"""Backend and framework of a job for a target."""


def adapted(target: str, name: str, **fields: Any) -> Job:
    """A job for the target with an adaptation."""
    backend, framework = TRAINED_BY[target]
    return job(
        plan("ddp" if backend == "ddp" else "zero3", backend, framework=framework, **fields),
        adaptation=ADAPTATIONS[name],
    )


ADAPTED = [(t, n) for t in TRAINED_BY for n in ADAPTATIONS if TARGETS[t].unsupported(adapted(t, n)) is None]
"""Targets, and the adaptations that they can express."""


def test_each_target_expresses_lora() -> None:
    assert {target for target, name in ADAPTED if name == "lora"} == set(TRAINED_BY)


@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
@pytest.mark.parametrize(("target", "name"), ADAPTED)
def test_a_bundle_reads_back_what_is_adapted(target: str, name: str, dtype: str, tmp_path: Path) -> None:
    of = adapted(target, name, dtype=dtype)
    for file, text in files_of(target, of).items():
        (tmp_path / file).write_text(text)
    request = make_request(complete(from_paths([tmp_path]), {}).options)
    read = launched(request)
    assert (dict(read.quantization), read.freeze) == (dict(of.adaptation.quantization), of.adaptation.freeze)
    expected = {**of.adaptation.peft}
    if "target_modules" in expected and expected["target_modules"] != "all-linear":
        expected["target_modules"] = sorted(expected["target_modules"])
    assert {k: v for k, v in read.peft.items() if v} == {k: v for k, v in expected.items() if v}
    if dtype != "auto" and target not in ("deepspeed",) and of.adaptation.peft and not of.adaptation.quantization:
        assert request.dtype == dtype


@pytest.mark.parametrize(
    ("target", "loss"),
    [("trainer", "liger"), ("axolotl", "liger"), ("axolotl", "cce"), ("llamafactory", "liger"), ("trl", "trl")],
)
def test_an_exported_loss_reads_back(target: str, loss: str) -> None:
    of = job(plan("ddp", "ddp", framework=TARGETS[target].framework, loss_code=loss))
    exported = export(target, of)
    read = plan_of(from_texts({exported.file_name: exported.text}), gpus=RANKS, strategy="ddp", seq_len=2048)
    assert read.loss_code == loss


@pytest.mark.parametrize(
    ("target", "loss"),
    [
        ("trainer", "liger"), ("trainer", "full"), ("axolotl", "liger"), ("axolotl", "full"), ("axolotl", "cce"),
        ("llamafactory", "liger"), ("trl", "trl"),
    ],
)  # fmt: skip
def test_exported_kernels_of_liger_read_back_with_the_loss(target: str, loss: str) -> None:
    of = job(plan("ddp", "ddp", framework=TARGETS[target].framework, loss_code=loss, use_liger_kernel=True))
    exported = export(target, of)
    read = plan_of(from_texts({exported.file_name: exported.text}), gpus=RANKS, strategy="ddp", seq_len=2048)
    assert (read.use_liger_kernel, read.loss_code) == (True, loss)


@pytest.mark.parametrize(
    ("target", "changes"),
    [
        *(
            (target, changes)
            for target in ("fsdp2", "ddp")
            for changes in (
                {"loss_code": "liger"},
                {"use_liger_kernel": True},
                {"use_liger_kernel": True, "loss_code": "liger"},
                {"compile": "layer"},
                {"compile": "model", "memory_budget": 0.25},
                {"fp8": "tensorwise"},
                {"fp8": "rowwise", "compile": "layer"},
                {"fp8": "mxfp8", "precision": "bf16"},
            )
        ),
        ("torchrun", {"use_liger_kernel": True}),
        ("accelerate", {"use_liger_kernel": True, "loss_code": "liger"}),
        ("accelerate", {"loss_code": "liger", "compile": "layer"}),
        ("deepspeed", {"loss_code": "liger"}),
    ],
)
def test_a_script_reads_back_with_what_replaces_its_code(target: str, changes: dict[str, Any], tmp_path: Path) -> None:
    backend = target if target in ("ddp", "deepspeed") else "fsdp2"
    framework = TARGETS[target].framework
    of = job(plan("ddp" if target == "ddp" else "zero3", backend, framework=framework, **changes))
    for file, text in files_of(target, of).items():
        (tmp_path / file).write_text(text)
    left = different(plan_of(from_paths([tmp_path])), of.plan)
    assert left == {}


def test_an_exported_loss_of_liger_leaves_the_other_kernels_out() -> None:
    exported = export("trainer", job(plan("ddp", "ddp", framework="trainer", loss_code="liger")))
    read = plan_of(from_texts({exported.file_name: exported.text}), gpus=RANKS, strategy="ddp", seq_len=2048)
    assert not read.use_liger_kernel


@pytest.mark.parametrize(("target", "loss"), [("trainer", "full"), ("trl", "trl")])
def test_an_exported_evaluation_reads_back(target: str, loss: str) -> None:
    evaluation = Evaluation(batch_size=4, strategy="epoch", accumulation_steps=2)
    of = job(plan("ddp", "ddp", framework=target, loss_code=loss, evaluation=evaluation))
    exported = export(target, of)
    read = plan_of(from_texts({exported.file_name: exported.text}), gpus=RANKS, strategy="ddp", seq_len=2048)
    assert read.evaluation == evaluation


@pytest.mark.parametrize("target", ["axolotl", "llamafactory"])
def test_an_evaluation_that_a_consumer_s_file_does_not_set_is_refused(target: str) -> None:
    of = job(plan("ddp", "ddp", framework="trainer", evaluation=Evaluation(batch_size=4)))
    assert "evaluation is not written" in (TARGETS[target].unsupported(of) or "")


@pytest.mark.parametrize(
    ("target", "framework", "checkpointing"),
    [
        ("trl", "trl", "none"), ("trl", "trl", "full"), ("trainer", "trainer", "full"), ("fsdp2", "torch", "none"),
        ("fsdp2", "torch", "full"),
        ("accelerate", "accelerate", "none"), ("deepspeed", "deepspeed", "none"),
    ],
)  # fmt: skip
def test_exported_activation_offload_reads_back(
    target: str, framework: str, checkpointing: str, tmp_path: Path
) -> None:
    backend = "deepspeed" if target == "deepspeed" else "fsdp2"
    shape = plan("zero3", backend, framework=framework, loss_code="trl" if framework == "trl" else "full")
    of = job(replace(shape, activation_checkpointing=checkpointing, activation_offload=True))
    for file, text in files_of(target, of).items():
        (tmp_path / file).write_text(text)
    read = plan_of(from_paths([tmp_path]), seq_len=2048)
    assert read.offload_code == of.plan.offload_code


@pytest.mark.parametrize("weight", [None, 0.0, 0.5])
def test_an_exported_weight_of_the_routers_loss_reads_back(weight: float | None) -> None:
    shape = plan("ddp", "ddp", framework="trl", loss_code="trl")
    exported = export("trl", job(replace(shape, router_aux_loss_coef=weight)))
    read = plan_of(from_texts({exported.file_name: exported.text}), gpus=RANKS, strategy="ddp")
    assert read.router_aux_loss_coef == weight


@pytest.mark.parametrize("task", ["dpo", "kto"])
def test_an_exported_stage_of_llamafactory_reads_back(task: str) -> None:
    of = job(
        plan("ddp", "ddp", framework="llamafactory", task=task, reference="adapters-off"),
        adaptation=ADAPTATIONS["lora"],
    )
    exported = export("llamafactory", of)
    read = plan_of(from_texts({exported.file_name: exported.text}), gpus=RANKS, strategy="ddp")
    assert (read.framework, read.task, read.reference, read.loss_code) == ("llamafactory", task, "adapters-off", "full")


@pytest.mark.parametrize(
    ("framework", "task", "reason"),
    [("trl", "dpo", "all logits at once"), ("trl", "grpo", "its grpo without"), ("llamafactory", "dpo", None)],
)
def test_llamafactory_is_exported_with_its_own_loss(framework: str, task: str, reason: str | None) -> None:
    loss = "trl" if framework == "trl" else "full"
    of = job(plan("ddp", "ddp", framework=framework, loss_code=loss, task=task, reference="copy"))
    found = TARGETS["llamafactory"].unsupported(of)
    assert found is None if reason is None else reason in (found or "")


@pytest.mark.parametrize("task", ["dpo", "kto"])
@pytest.mark.parametrize("reference", ["none", "copy"])
def test_an_exported_task_reads_back(reference: str, task: str) -> None:
    of = job(plan("ddp", "ddp", framework="trl", loss_code="trl", task=task, reference=reference))
    exported = export("trl", of)
    assert f"-m trl.scripts.{task}" in exported.usage
    read = plan_of(from_texts({exported.file_name: exported.text}), gpus=RANKS, strategy="ddp")
    assert (read.task, read.reference, read.micro_batch_size) == (task, reference, of.plan.micro_batch_size)


@pytest.mark.parametrize(
    "generation",
    [
        Generation(completion_length=256),
        Generation(
            completion_length=64, completions_per_prompt=4, steps=8, iterations=2, beta=0.04, generator="server"
        ),
        Generation(completion_length=64, generator="colocate", memory_utilization=0.4, sleeps=True, tensor_parallel=2),
    ],
    ids=lambda generation: generation.generator,
)
def test_exported_completions_read_back(generation: Generation) -> None:
    reference = "copy" if generation.beta else "none"
    shape = plan("zero3", "fsdp2", framework="trl", loss_code="trl", task="grpo", reference=reference)
    of = job(replace(shape, generation=generation))
    exported = export("trl", of)
    assert "-m trl.scripts.grpo" in exported.usage and "max_length" not in exported.text
    read = plan_of(from_texts({exported.file_name: exported.text}), gpus=RANKS, strategy="zero3", seq_len=2048)
    assert (read.generation, read.reference) == (generation, reference)


def test_an_exported_reward_model_reads_back() -> None:
    adapted = Adaptation(peft={"peft_type": "LORA", "r": 8, "target_modules": ["q_proj"]}, reward_head=True)
    of = job(plan("ddp", "ddp", framework="trl", task="reward"), task="sequence-classification", adaptation=adapted)
    exported = export("trl", of)
    assert "-m trl.scripts.reward" in exported.usage
    request = make_request(complete(from_texts({exported.file_name: exported.text}), {}).options)
    assert (request.task, request.micro_batch_size) == ("reward", of.plan.micro_batch_size)
    assert launched(request).reward_head and launched(request).peft["r"] == 8


@pytest.mark.parametrize("target", ["trainer", "axolotl", "llamafactory", "ddp", "fsdp2", "accelerate", "torchrun"])
def test_only_trl_has_dpo_without_a_reference(target: str) -> None:
    backend = "ddp" if target in ("ddp", "llamafactory") else "fsdp2"
    shape = plan("ddp" if backend == "ddp" else "zero3", backend, framework="trl", loss_code="trl", task="dpo")
    assert "dpo" in (TARGETS[target].unsupported(job(shape)) or "")


@pytest.mark.parametrize(
    ("target", "batch"),
    [
        ("trl", {"packing": "bfd"}),
        ("trl", {"packing": "wrapped", "padding_free": True}),
        ("trl", {"padding_free": True}),
        ("axolotl", {"packing": "bfd"}),
        ("axolotl", {"padding_free": True}),
        ("llamafactory", {"packing": "bfd", "micro_batch_size": 1}),
        ("llamafactory", {"packing": "wrapped"}),
    ],
)
def test_an_exported_batch_reads_back(target: str, batch: dict[str, Any]) -> None:
    loss = "trl" if target == "trl" else "full"
    shape = plan("ddp", "ddp", framework=TARGETS[target].framework, loss_code=loss, attention="flash_attention_2")
    of = job(replace(shape, **batch))
    exported = export(target, of)
    read = plan_of(from_texts({exported.file_name: exported.text}), gpus=RANKS, strategy="ddp")
    assert (read.packing, read.padding_free) == (of.plan.packing, of.plan.padding_free)


@pytest.mark.parametrize(
    ("target", "batch", "reason"),
    [
        ("trainer", {"packing": "bfd"}, "does not pack"),
        ("ddp", {"padding_free": True}, "padding-free"),
        ("accelerate", {"packing": "bfd"}, "does not pack"),
        ("axolotl", {"packing": "wrapped"}, "whole sequences"),
        ("axolotl", {"packing": "bfd", "micro_batch_size": 2}, "flash_attention_2"),
        ("axolotl", {"padding_free": True}, "flash_attention_2"),
        ("llamafactory", {"packing": "bfd"}, "neat_packing"),
        ("llamafactory", {"padding_free": True}, "padding-free"),
    ],
)
def test_a_batch_that_a_consumer_lacks_is_refused(target: str, batch: dict[str, Any], reason: str) -> None:
    of = job(replace(plan("ddp", "ddp", framework="trainer"), **batch))
    assert reason in (TARGETS[target].unsupported(of) or "")


def test_the_trainer_gets_its_collator_from_the_script() -> None:
    of = job(replace(plan("ddp", "ddp", framework="trainer"), padding_free=True))
    assert any("DataCollatorWithFlattening" in note for note in export("trainer", of).notes)


@pytest.mark.parametrize(("target", "loss"), [("trl", "liger"), ("trainer", "cce"), ("trainer", "trl"), ("ddp", "cce")])
def test_a_loss_that_a_consumer_lacks_is_refused(target: str, loss: str) -> None:
    of = job(plan("ddp", "ddp", framework="trainer", loss_code=loss))
    assert "loss" in (TARGETS[target].unsupported(of) or "") or "cross entropy" in (
        TARGETS[target].unsupported(of) or ""
    )


@pytest.mark.parametrize(
    ("target", "name"),
    [
        (t, n)
        for t, n in ADAPTED
        if n in ("lora", "qlora", "frozen") and t in ("ddp", "fsdp2", "accelerate", "deepspeed")
    ],
)
def test_a_script_replaces_the_loss_before_it_adapts_the_model(target: str, name: str) -> None:
    script = files_of(target, adapted(target, name, loss_code="liger"))["train.py"]
    compile(script, "train.py", "exec")
    calls = script[script.index("def build" if "def build" in script else "def train(") :]
    assert calls.index("_apply_liger_kernel_to_instance(model") < calls.index("adapted(model)")


@pytest.mark.parametrize(
    ("target", "backend", "checkpointing", "offload"),
    [
        ("ddp", "ddp", "selective", False), ("ddp", "ddp", "every-3", True),
        ("fsdp2", "fsdp2", "selective", True), ("fsdp2", "fsdp2", "full", True),
        *(
            (target, backend, checkpointing, offload)
            for backend in ("ddp", "fsdp2")
            for target, checkpointing, offload in [
                ("trainer", "every-2", True), ("trainer", "full", True), ("trl", "selective", False), ("trl", "every-4", False),
            ]
        ),
    ],
)  # fmt: skip
def test_exported_checkpointing_reads_back(target: str, backend: str, checkpointing: str, offload: bool) -> None:
    strategy = "ddp" if backend == "ddp" else "zero3"
    of = job(
        plan(
            strategy, backend, framework=TARGETS[target].framework, loss_code="trl" if target == "trl" else "full",
            activation_checkpointing=checkpointing, activation_offload=offload,
        )
    )  # fmt: skip
    assert TARGETS[target].unsupported(of) is None
    exported = export(target, of)
    read = plan_of(from_texts({exported.file_name: exported.text}), gpus=RANKS, strategy=strategy, seq_len=2048)
    assert (read.activation_checkpointing, read.activation_offload) == (checkpointing, offload), exported.text


@pytest.mark.parametrize("compiles", ["layer", "model"])
def test_accelerate_s_checkpoints_of_compiled_models_read_back(compiles: str, tmp_path: Path) -> None:
    of = job(plan("zero3", "fsdp2", framework="accelerate", compile=compiles, activation_checkpointing="full"))
    for file, text in files_of("accelerate", of).items():
        (tmp_path / file).write_text(text)
    assert "fsdp_activation_checkpointing: true" in (tmp_path / "accelerate.yaml").read_text()
    assert "activation_checkpointing_enable" not in (tmp_path / "train.py").read_text()
    read = plan_of(from_paths([tmp_path]))
    assert (different(read, of.plan), read.framework) == ({}, "accelerate")


@pytest.mark.parametrize(
    ("target", "checkpointing", "offload"),
    [("trainer", "selective", False), ("axolotl", "every-2", False), ("llamafactory", "full", True)],
)
def test_checkpointing_that_a_consumer_lacks_is_refused(target: str, checkpointing: str, offload: bool) -> None:
    of = job(
        plan(
            "ddp",
            "ddp",
            framework="trainer",
            activation_checkpointing=checkpointing,
            activation_offload=offload,
        )
    )
    reason = TARGETS[target].unsupported(of) or ""
    assert "checkpointing" in reason or "offload" in reason


@pytest.mark.parametrize("target", ["fsdp2", "trainer", "torchrun", "accelerate-launch"])
def test_the_code_for_experts_is_in_scripts(target: str, tmp_path: Path) -> None:
    of = job(plan("zero3", "fsdp2", framework=TARGETS[target].framework, experts_implementation="eager"))
    for file, text in files_of(target, of).items():
        (tmp_path / file).write_text(text)
    assert plan_of(from_paths([tmp_path])).experts_implementation == "eager"


@pytest.mark.parametrize("target", ["axolotl", "trl", "llamafactory"])
def test_configurations_without_a_choice_of_the_code_for_experts_are_refused(target: str) -> None:
    backend = "deepspeed" if target == "llamafactory" else "fsdp2"
    of = job(plan("zero3", backend, framework=TARGETS[target].framework, experts_implementation="eager"))
    with pytest.raises(UsageError, match="code for experts"):
        export(target, of)


@pytest.mark.parametrize("shards", ["auto", "6"])
@pytest.mark.parametrize(("target", "backend"), [("fsdp2", "fsdp2"), ("ddp", "ddp"), ("axolotl", "deepspeed")])
def test_a_tiled_mlp_is_read_back(target: str, backend: str, shards: str) -> None:
    strategy = "ddp" if backend == "ddp" else "zero3"
    of = job(
        plan(
            strategy,
            backend,
            gpus=1 if backend == "ddp" else RANKS,
            framework=TARGETS[target].framework,
            tiled_mlp=shards,
        )
    )
    exported = export(target, of)
    assert plan_of(from_texts({exported.file_name: exported.text}), gpus=of.plan.world_size).tiled_mlp == shards


@pytest.mark.parametrize("target", ["trainer", "axolotl", "llamafactory", "fsdp2", "trl"])
def test_reentrant_checkpoints_are_read_back(target: str) -> None:
    backend = "fsdp2" if target == "fsdp2" else "deepspeed"
    more = {"loss_code": "trl"} if target == "trl" else {}
    framework = TARGETS[target].framework
    of = job(plan("zero3", backend, framework=framework, activation_checkpointing="reentrant", **more))
    exported = export(target, of)
    read = from_texts({exported.file_name: exported.text})
    assert read.options["activation_checkpointing"] == "reentrant"
