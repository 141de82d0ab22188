"""Rules for every export: its header, quoting of names, unsupported plans, and a target for each plan."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml
from export_jobs import job, jobs, plan, plans
from matrix import taken

from fsdp_advisor import estimate
from fsdp_advisor.advice import recommend
from fsdp_advisor.errors import UsageError
from fsdp_advisor.export import TARGETS, Job, export, find
from fsdp_advisor.export.choice import NothingFits, report_for
from fsdp_advisor.export.constants import PACKAGES, VERSIONS
from fsdp_advisor.export.launch import consumer_of
from fsdp_advisor.job.adaptation import Adaptation
from fsdp_advisor.job.optimizers import limit_of
from fsdp_advisor.job.parsing import make_request
from fsdp_advisor.policies.optimizers import optimizer_named, optimizer_of
from fsdp_advisor.policies.optimizers.interface import Refusal
from fsdp_advisor.strategy_estimate import NotModelled
from fsdp_advisor.units import format_gib

HOSTILE = (
    'it\'s/"quoted"',
    'end """ of # a string',
    "line\nbreak: [yes]\r\nimport os; os.abort()",
    "$(touch owned) `touch owned` ${HOME} ; touch owned",
    "back\\slash\\n {{ 7 * 7 }} {% raw %}",
    "<script>alert(1)</script> & é 漢 \u2028 \x85 \x0c",
    "--flag: *anchor &other !tag %directive",
)
ZERO3 = job(plan("zero3", "fsdp2"))
DEEPSPEED = job(plan("zero3", "deepspeed"))
DDP = job(plan("ddp", "ddp"))


def example(target: str) -> Job:
    return next(j for j in (ZERO3, DEEPSPEED, DDP) if TARGETS[target].unsupported(j) is None)


def parsed(file_name: str, text: str) -> object:
    """The file, read by a parser of its format."""
    match Path(file_name).suffix:
        case ".yaml":
            return yaml.safe_load(text)
        case ".json":
            return json.loads(text)
        case ".py":
            return ast.parse(text)
    done = subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return text


@pytest.mark.parametrize("target", TARGETS)
def test_header_states_prediction_and_checked_versions(target: str) -> None:
    exported = export(target, example(target))
    assert exported.file_name == TARGETS[target].file_name and exported.usage
    if exported.file_name.endswith(".json"):
        return
    head = [line for line in exported.text.splitlines() if line.startswith("# ")]
    p = example(target).plan
    assert head[0].startswith("# meta-llama/Llama-2-7b-hf: ")
    assert head[1] == f"# Strategy: {p.strategy} by {p.backend}, offload none, framework torch."
    assert head[2] == "# Batch: micro-batch 1 x accumulation 1 x ranks 8 = 8, each of 2048 tokens."
    assert head[3] == "# Step: activation checkpointing none, sdpa attention, adamw_torch_fused."
    rest = head[5:] if p.backend == "fsdp2" else head[4:]
    assert rest[0] == "# Environment: no variables."
    assert rest[1] == "# Predicted peak per GPU: 23.24 GiB in tensors; H100-80GB has 79.19 GiB, margin 70.6 %."
    assert rest[2] == "# Predicted host memory per node: 8.00 GiB in training."
    assert all(
        f"{package} {VERSIONS[package]}" in rest[4] for package in PACKAGES[TARGETS[target].consumer or consumer_of(p)]
    )


@pytest.mark.parametrize("target", ["trl", "axolotl", "llamafactory", "trainer"])
def test_header_names_the_modules_trained_in_full_beside_adapters(target: str) -> None:
    peft = {
        "peft_type": "LORA", "r": 16, "lora_alpha": 32, "target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"],
    }  # fmt: skip
    found = replace(DDP, adaptation=Adaptation(peft=peft), host_bytes_per_node=0)
    text = export(target, found).text
    assert "# Trained: LoRA r=16, and embed_tokens, lm_head in full.\n" in text
    assert "# Predicted host memory per node: none in training.\n" in text


REHEARSED = ("trl", "liger_kernel", "torchao")


def test_checked_versions_equal_installed_versions() -> None:
    """Not checked: LLaMA-Factory; axolotl, which is installed last and not everywhere; TRL, Liger and torchao, which only the tests of
    rehearsals have.
    """
    others = {package: VERSIONS[package] for package in ("axolotl", "llamafactory", *REHEARSED)}
    installed = {package: version(package).partition("+")[0] for package in VERSIONS if package not in others}
    assert {**installed, **others} == VERSIONS
    alone = (Path(__file__).parents[1] / "requirements-no-deps.txt").read_text()
    assert f"axolotl=={VERSIONS['axolotl']}" in alone
    rehearsed = (Path(__file__).parents[1] / "rehearsal/requirements.txt").read_text()
    for package in REHEARSED:
        assert f"{package}=={VERSIONS[package]}" in rehearsed


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_model_name_cannot_inject_code(target: str, name: str) -> None:
    exported = export(target, replace(example(target), model_name=name, gpu_name=name))
    plain = export(target, example(target))
    tree, usual = parsed(exported.file_name, exported.text), parsed(plain.file_name, plain.text)
    if isinstance(tree, ast.Module) and isinstance(usual, ast.Module):
        values = [ast.literal_eval(n.value) for n in tree.body if isinstance(n, ast.Assign) and _named(n, "MODEL")]
        assert values == [name]
        assert [type(node) for node in ast.walk(tree)] == [type(node) for node in ast.walk(usual)]
    elif isinstance(tree, dict) and isinstance(usual, dict):
        assert tree == usual | {key: name for key in ("base_model", "model_name_or_path") if key in tree}
    else:
        assert _code(exported.text) == _code(plain.text)


def _named(node: ast.Assign, name: str) -> bool:
    return isinstance(node.targets[0], ast.Name) and node.targets[0].id == name


def _code(text: str) -> list[str]:
    """The lines of a shell script without comments. Asserts that a Slurm job name contains only harmless characters."""
    names = re.findall(r"^#SBATCH --job-name=(.*)$", text, re.MULTILINE)
    assert all(re.fullmatch(r"[\w.-]+", n, re.ASCII) for n in names)
    return [line for line in text.splitlines() if not line.startswith("# ") and "--job-name=" not in line]


@pytest.mark.parametrize("target", TARGETS)
def test_every_supported_plan_gives_a_file_that_parses(target: str) -> None:
    able = jobs(target)
    assert able
    for each in able if not TARGETS[target].file_name.endswith((".sh", ".sbatch")) else able[:8]:
        exported = export(target, each)
        parsed(exported.file_name, exported.text)


def test_each_plan_is_supported_by_the_expected_targets() -> None:
    for each in map(job, plans()):
        p = each.plan
        able = {name for name, target in TARGETS.items() if target.unsupported(each) is None}
        optimizer = optimizer_named(p.optim)
        limited = {f for f in ("torch", "trainer") if limit_of(p.optim, p.backend, f) is not None}
        refused = "trainer" in limited
        bf16_on_the_host = p.backend == "deepspeed" and p.precision == "bf16" and p.offload != "none"
        refused = refused or (p.optim == "muon" and p.backend != "deepspeed")  # DeepSpeed makes its own
        runs = not refused and not (bf16_on_the_host and not optimizer.is_cpu_adam)
        expected = {"torchrun", "sbatch"}
        if runs:
            own = {"ddp": {"ddp"}, "fsdp2": {"fsdp2"}, "deepspeed": {"deepspeed", "deepspeed-launch"}, "fsdp1": set()}
            expected |= {"accelerate", "accelerate-launch"} | own[p.backend]
            expected |= {"trainer"} if p.backend != "fsdp1" or p.strategy == "zero3" else set()
        if runs and p.backend != "fsdp1" and (p.precision != "bf16" or p.backend == "deepspeed"):
            expected |= {"axolotl"}
        if "trainer" in expected and not (p.backend == "fsdp2" and p.strategy == "hsdp" and p.replica_degree > 1):
            expected |= {"trl"}
        if runs and (p.backend == "ddp" or (p.backend == "deepspeed" and p.precision != "bf16")):
            expected |= {"llamafactory"}
        if isinstance(optimizer_of(p).transformers, Refusal):
            expected -= {"trainer", "trl", "axolotl", "llamafactory"}
        if p.optim == "muon":
            expected -= {"axolotl"}
        if "torch" in limited:
            expected -= {"fsdp2", "accelerate", "accelerate-launch"}
        assert able == expected, p


@pytest.mark.parametrize("target", ["trainer", "fsdp2", "ddp"])
def test_exported_python_passes_ruff(target: str, tmp_path: Path) -> None:
    for number, each in enumerate(jobs(target)):
        (tmp_path / f"export_{number}.py").write_text(export(target, each).text)
    ruff = [sys.executable, "-m", "ruff"]
    for command in (["check", "--quiet"], ["format", "--check", "--quiet"]):
        done = subprocess.run(
            [*ruff, *command, "--isolated", "--line-length=120", str(tmp_path)],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize(
    ("target", "of", "message"),
    [
        ("fsdp2", plan("zero1", "deepspeed"), "fsdp2 cannot do ZeRO-1 (deepspeed): it trains only with FSDP2"),
        ("ddp", plan("zero3", "fsdp2"), "ddp cannot do ZeRO-3 (fsdp2): it trains only with DDP"),
        ("deepspeed", plan("ddp", "ddp"), "deepspeed cannot do DDP: it shards only with DeepSpeed"),
        ("trainer", plan("zero2", "fsdp1"), "trainer cannot do ZeRO-2 (fsdp1): framework trainer with backend fsdp1 has no zero2"),
        ("accelerate", plan("zero3", "fsdp2", wrap="none", activation_checkpointing="full"),
            "accelerate checkpoints the modules that it wraps"),
        ("axolotl", plan("zero3", "fsdp1"), "axolotl cannot do ZeRO-3 (fsdp1): it no longer supports FSDP1"),
        ("axolotl", plan("zero3", "fsdp2", precision="bf16"), "it always treats bf16 as mixed precision"),
        ("accelerate", plan("hsdp", "fsdp2", 8), "accelerate cannot do HSDP (fsdp2): replicas of one GPU each are DDP"),
        ("trainer", plan("zero3", "fsdp2", optim="adamw_bnb_8bit"), "bitsandbytes' kernels do not accept DTensors"),
        ("axolotl", plan("zero3", "fsdp1", optim="adamw_bnb_8bit"), "for FSDP2 use another --optim, because bitsandbytes'"),
        ("fsdp2", plan("zero3", "fsdp1", optim="adamw_bnb_8bit"), "for FSDP2 use another --optim, because bitsandbytes'"),
    ],
)  # fmt: skip
def test_unsupported_plan_names_targets_that_support_it(target: str, of: object, message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)) as refused:
        export(target, job(of))  # type: ignore[arg-type]  # a Plan
    able = refused.value.hint.removeprefix("targets that can: ").split(", ")
    assert able and target not in able
    for name in able:
        assert export(name, job(of)).text  # type: ignore[arg-type]  # likewise


def test_unknown_target_suggests_nearest_name() -> None:
    with pytest.raises(UsageError, match="unknown export target 'acelerate'") as refused:
        find("acelerate")
    assert refused.value.hint == "did you mean accelerate?"
    assert find(" Accelerate_Launch ").name == "accelerate-launch"


def test_torchtitan_is_no_target_and_the_hint_names_one_that_writes_fp8() -> None:
    with pytest.raises(UsageError, match="torchtitan has no export target: its configuration is a function") as refused:
        find("torchtitan")
    assert refused.value.hint.startswith("fsdp2 writes a script of plain PyTorch, also with --fp8")
    with pytest.raises(UsageError, match="torchtitan trains its own model") as refused:
        export("fsdp2", replace(ZERO3, plan=replace(ZERO3.plan, framework="torchtitan", fp8="rowwise")))
    assert refused.value.hint == "--framework torch, for which fsdp2 writes a script, also with --fp8"


def test_auto_backend_becomes_the_backend_of_the_target() -> None:
    def backend(target: str, **options: object) -> str:
        request = make_request({"model": "7B", "gpus": 4, "gpu": "H100-80GB", **options})
        (chosen,) = report_for(target, request).estimates
        return chosen.plan.backend

    assert backend("deepspeed", strategy="zero3") == "deepspeed"
    assert backend("accelerate", strategy="zero3") == "fsdp2"
    for options, named in (({"strategy": "zero3", "backend": "fsdp1"}, "ZeRO-3 (fsdp1)"), ({"strategy": "ddp"}, "DDP")):
        with pytest.raises(UsageError, match=re.escape(f"deepspeed cannot do {named}: it shards only with DeepSpeed")):
            backend("deepspeed", **options)


@pytest.mark.parametrize(
    ("target", "framework"),
    [
        ("accelerate", "accelerate"), ("accelerate-launch", "accelerate"), ("trainer", "trainer"), ("axolotl", "axolotl"),
        ("trl", "trl"), ("llamafactory", "llamafactory"),
        ("deepspeed", "deepspeed"), ("deepspeed-launch", "deepspeed"), ("fsdp2", "torch"), ("ddp", "torch"),
        ("torchrun", "torch"), ("sbatch", "torch"),
    ],
)  # fmt: skip
def test_estimate_assumes_the_framework_of_the_target(target: str, framework: str) -> None:
    options = {
        "model": "openai-community/gpt2",
        "gpus": 4,
        "gpu": "24GiB",
        "strategy": "ddp" if target in ("ddp", "llamafactory") else "zero3",
    }
    (row,) = report_for(target, make_request(options)).estimates
    assert row.plan.framework == framework
    assert row.peak_device_bytes is not None
    (given,) = report_for(target, make_request(options | {"framework": "torch"})).estimates
    assert given.plan.framework == "torch"


def test_header_names_framework_and_notes_list_what_is_not_modelled() -> None:
    options = {"model": "openai-community/gpt2", "gpus": 4, "gpu": "24GiB", "strategy": "zero3"}
    report = report_for("accelerate", make_request(options))
    exported = export("accelerate", Job.of(report, report.estimates[0]))
    device = report.estimates[0].peak_device_bytes
    assert device is not None
    assert f"Predicted peak per GPU under accelerate: {format_gib(device)} of the device's memory; " in exported.text
    assert any(note.startswith("not in the prediction: ") and "model's outputs" in note for note in exported.notes)
    assert not any("estimate is for plain PyTorch" in note for note in exported.notes)
    trainer = export("trainer", Job.of(report, report.estimates[0]))
    assert "the prediction is for accelerate, which trainer does not use" in trainer.notes


def test_a_note_on_what_the_prediction_lacks_is_whole() -> None:
    report = report_for("accelerate", make_request({"model": "openai-community/gpt2", "gpus": 4, "strategy": "zero3"}))
    omissions = (NotModelled("the casts of autocast: no recording", figures="peak_allocated_bytes"),)
    exported = export("accelerate", Job.of(report, replace(report.estimates[0], omissions=omissions)))
    assert "not in the prediction: the casts of autocast: no recording" in exported.notes


@pytest.mark.parametrize("target", TARGETS)
def test_launch_sets_the_allocator_configuration(target: str) -> None:
    of = replace(example(target), environment={"PYTORCH_ALLOC_CONF": "expandable_segments:True"})
    exported = export(target, of)
    variable = "PYTORCH_ALLOC_CONF=expandable_segments:True"
    if exported.file_name.endswith((".sh", ".sbatch")):
        assert f"\nexport {variable}\n" in exported.text
    if target == "trainer":
        assert f"launch it with {variable}" in exported.notes
    else:
        assert exported.usage.startswith(variable + " ")
    if not exported.file_name.endswith(".json"):
        assert f"# Environment: {variable}." in exported.text
    assert "PYTORCH_ALLOC_CONF" not in export(target, example(target)).text


def test_job_copies_figures_from_report() -> None:
    report = estimate(model="meta-llama/Llama-2-7b-hf", gpus=4, gpu="A100-40GB", strategy="zero3")
    made = Job.of(report, report.estimates[0])
    assert made.layer_classes == ("LlamaDecoderLayer",) and made.task == "causal-lm"
    assert made.largest_parameter_elements == 32_000 * 4096
    assert made.peaks["peak_tensor_bytes"] == report.estimates[0].peak_tensor_bytes
    assert made.margin == pytest.approx(1 - made.peaks[made.peak or ""] / report.gpu_memory_bytes)
    assert made.plan.global_batch_size == 4


@pytest.mark.parametrize("target", taken(["deepspeed"], ["accelerate", "fsdp2", "sbatch"]))
def test_without_strategy_the_best_supported_plan_that_fits_is_exported(target: str) -> None:
    request = make_request({"model": "meta-llama/Llama-2-7b-hf", "gpus": 4, "gpu": "A100-40GB"})
    report = report_for(target, request)
    (chosen,) = report.estimates
    assert chosen.fits and export(target, Job.of(report, chosen)).text
    assert chosen.needed_bytes is not None and chosen.needed_bytes <= report.gpu_memory_bytes
    assert (
        chosen.peak_allocated_bytes or 0
    ) <= 0.92 * report.gpu_memory_bytes  # the rest of it may be the allocator's cache
    framework = TARGETS[target].framework
    best = recommend(model=request.model, gpus=4, gpu="A100-40GB", framework=framework).recommendation
    assert best.winner is not None
    if TARGETS[target].unsupported(job(best.winner.plan)) is None:
        assert chosen.plan == best.winner.plan


def test_given_options_are_kept() -> None:
    request = make_request(
        {"model": "openai-community/gpt2", "gpus": 4, "gpu": "A100-40GB", "micro_batch_size": 3, "seq_len": 512}
    )
    (chosen,) = report_for("fsdp2", request).estimates
    assert (chosen.plan.micro_batch_size, chosen.plan.seq_len) == (3, 512)


def test_error_names_a_remedy_if_nothing_fits() -> None:
    request = make_request({"model": "meta-llama/Llama-2-7b-hf", "gpus": 4, "gpu": "A100-40GB"})
    with pytest.raises(NothingFits, match="no plan that ddp supports fits A100-40GB with 8 % left free") as refused:
        report_for("ddp", request)
    assert refused.value.exit_status == 1 and refused.value.hint
    named = make_request({**request.as_dict(), "strategy": "ddp"})
    report = report_for("ddp", named)
    assert "A100-40GB has 39.39 GiB, it does not fit." in export("ddp", Job.of(report, report.estimates[0])).text


def test_bare_parameter_count_is_supported_only_by_targets_without_a_model() -> None:
    report = estimate(model="7B", gpus=4, gpu="A100-40GB", strategy="zero3")
    made = Job.of(report, report.estimates[0])
    able = [name for name, target in TARGETS.items() if target.unsupported(made) is None]
    assert able == ["accelerate", "torchrun", "accelerate-launch", "sbatch"]
    text = export("accelerate", made).text
    assert "Predicted peak per GPU: unknown." in text and "Predicted speed: unknown." in text
    assert "fsdp_transformer_layer_cls_to_wrap" not in yaml.safe_load(text)["fsdp_config"]


@pytest.mark.parametrize(("target", "of"), [("fsdp2", ZERO3), ("ddp", DDP)])
def test_scripts_compile_each_layer_before_it_is_wrapped(target: str, of: Job) -> None:
    compiled = replace(of, plan=replace(of.plan, compile="layer"))
    text = export(target, compiled).text
    built = text[text.index("def build(") :]
    assert built.index("layer.compile()") < min(
        built.index(word) for word in ("shard(model, device)", "return DistributedDataParallel") if word in built
    )
    assert 'if type(layer).__name__ in ["LlamaDecoderLayer"]:' in built
    assert "layers compiled" in text
    assert ".compile()" not in export(target, of).text
    ast.parse(text)
    frugal = export(target, replace(of, plan=replace(of.plan, compile="layer", memory_budget=0.5))).text
    built = frugal[frugal.index("def build(") :]
    assert built.index("activation_memory_budget = 0.5") < built.index("layer.compile()")
    assert "layers compiled with memory budget 0.5" in frugal and "activation_memory_budget" not in text
    ast.parse(frugal)


@pytest.mark.parametrize(("target", "of"), [("fsdp2", ZERO3), ("ddp", DDP)])
def test_scripts_convert_layers_to_fp8_before_they_are_compiled_and_wrapped(target: str, of: Job) -> None:
    text = export(target, replace(of, plan=replace(of.plan, compile="layer", fp8="rowwise"))).text
    built = text[text.index("def build(") :]
    assert built.index("convert_to_float8_training(") < built.index("layer.compile()")
    assert 'Float8LinearConfig.from_recipe_name("rowwise")' in built
    assert "fp8 rowwise" in text and "torchao 0.18.0" in text
    assert "float8" not in export(target, of).text
    ast.parse(text)


def test_a_script_converts_layers_to_mxfp8_before_they_are_compiled_and_wrapped() -> None:
    text = export("fsdp2", replace(ZERO3, plan=replace(ZERO3.plan, compile="layer", fp8="mxfp8"))).text
    built = text[text.index("def build(") :]
    assert built.index("convert_to_mxfp8(model, ") < built.index("layer.compile()")
    assert "fp8 mxfp8" in text and "torchao 0.18.0" in text and "float8" not in text
    ast.parse(text)


@pytest.mark.parametrize(("shards", "constant"), [("auto", "None"), ("6", "6")])
def test_scripts_tile_the_networks_before_they_are_wrapped(shards: str, constant: str) -> None:
    text = export("fsdp2", replace(ZERO3, plan=replace(ZERO3.plan, tiled_mlp=shards))).text
    built = text[text.index("def build(") :]
    assert built.index("tile_mlps(model)") < built.index("shard(model, device)")
    assert f"MLP_SHARDS = {constant}  # of the sequence" in text and "liger_kernel 0.8.5" in text
    assert "tile_mlps" not in export("fsdp2", ZERO3).text
    ast.parse(text)


def test_other_targets_do_not_tile_networks() -> None:
    for name, target in TARGETS.items():
        tiled = replace(example(name), plan=replace(example(name).plan, tiled_mlp="4"))
        assert (target.limit(tiled) is None) == (name in ("fsdp2", "ddp", "axolotl"))


def test_other_targets_do_not_take_layers_in_fp8() -> None:
    for name, target in TARGETS.items():
        converted = replace(example(name), plan=replace(example(name).plan, fp8="tensorwise"))
        assert (target.limit(converted) is None) == (name in ("fsdp2", "ddp"))


@pytest.mark.parametrize(
    ("target", "of", "wraps"),
    [("fsdp2", ZERO3, "shard(model, device)"), ("ddp", DDP, "return DistributedDataParallel")],
)
def test_scripts_compile_a_whole_model_before_it_is_wrapped(target: str, of: Job, wraps: str) -> None:
    text = export(target, replace(of, plan=replace(of.plan, compile="model"))).text
    built = text[text.index("def build(") :]
    assert built.index("model.compile()") < built.index(wraps)
    assert "model compiled" in text and "layer.compile()" not in text
    ast.parse(text)


def test_other_targets_do_not_take_compiled_layers() -> None:
    for name, target in TARGETS.items():
        regions = replace(example(name).plan, compile="layer", framework="accelerate")
        accelerates = target.limit(replace(example(name), plan=regions)) is None
        assert accelerates == (name in ("fsdp2", "ddp", "trainer", "accelerate", "trl"))
        for compiles, able in (
            ("layer", ("fsdp2", "ddp")),
            ("model", ("fsdp2", "ddp", "trainer", "accelerate", "trl")),
        ):
            compiled = replace(example(name), plan=replace(example(name).plan, compile=compiles))
            assert (target.limit(compiled) is None) == (name in able)


def test_a_script_of_zero2_keeps_parameters_whatever_number_of_ranks_is_given() -> None:
    text = export("fsdp2", job(plan("zero2", "fsdp2", reshard_after_forward="2"))).text
    assert '"reshard_after_forward": False' in text
    text = export("fsdp2", job(plan("zero3", "fsdp2", reshard_after_forward="2"))).text
    assert '"reshard_after_forward": 2' in text
