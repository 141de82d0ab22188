"""What holds for every export: the header, quoting, refusals, and that each plan has a way out."""

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

from fsdp_advisor import estimate
from fsdp_advisor.advice import recommend
from fsdp_advisor.errors import UsageError
from fsdp_advisor.estimator import make_request
from fsdp_advisor.export import TARGETS, Job, export, find
from fsdp_advisor.export.choice import NothingFits, report_for
from fsdp_advisor.export.job import VERSIONS, global_batch_size
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
    return next(j for j in (ZERO3, DEEPSPEED, DDP) if TARGETS[target].cannot(j) is None)


def parsed(file_name: str, text: str) -> object:
    """The file as its format's own parser reads it."""
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
def test_the_header_says_what_was_predicted_and_checked(target: str) -> None:
    exported = export(target, example(target))
    assert exported.file_name == TARGETS[target].file_name and exported.usage
    if exported.file_name.endswith(".json"):
        return
    head = [line for line in exported.text.splitlines() if line.startswith("# ")]
    assert head[0].startswith("# meta-llama/Llama-2-7b-hf: ")
    assert head[1] == "# Batch: micro-batch 1 x accumulation 1 x ranks 8 = 8, each of 2048 tokens."
    assert head[2] == "# Predicted peak per GPU: 23.24 GiB in tensors; H100-80GB has 79.19 GiB, margin 70.6 %."
    assert all(f"{package} {VERSIONS[package]}" in head[3] for package in TARGETS[target].checked)


def test_the_versions_are_those_that_these_tests_run() -> None:
    installed = {package: version(package).partition("+")[0] for package in VERSIONS if package != "axolotl"}
    assert {**installed, "axolotl": VERSIONS["axolotl"]} == VERSIONS


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", HOSTILE)
def test_a_name_from_the_network_stays_a_name(target: str, name: str) -> None:
    exported = export(target, replace(example(target), model_name=name, gpu_name=name))
    plain = export(target, example(target))
    tree, usual = parsed(exported.file_name, exported.text), parsed(plain.file_name, plain.text)
    if isinstance(tree, ast.Module) and isinstance(usual, ast.Module):
        values = [ast.literal_eval(n.value) for n in tree.body if isinstance(n, ast.Assign) and _named(n, "MODEL")]
        assert values == [name]
        assert [type(node) for node in ast.walk(tree)] == [type(node) for node in ast.walk(usual)]
    elif isinstance(tree, dict) and isinstance(usual, dict):
        assert tree == usual | ({"base_model": name} if "base_model" in tree else {})
    else:
        assert _code(exported.text) == _code(plain.text)


def _named(node: ast.Assign, name: str) -> bool:
    return isinstance(node.targets[0], ast.Name) and node.targets[0].id == name


def _code(text: str) -> list[str]:
    """A shell script without comments; a Slurm job's name is made of harmless characters."""
    names = re.findall(r"^#SBATCH --job-name=(.*)$", text, re.MULTILINE)
    assert all(re.fullmatch(r"[\w.-]+", n, re.ASCII) for n in names)
    return [line for line in text.splitlines() if not line.startswith("# ") and "--job-name=" not in line]


@pytest.mark.parametrize("target", TARGETS)
def test_every_plan_parses(target: str) -> None:
    able = jobs(target)
    assert able
    for each in able if not TARGETS[target].file_name.endswith((".sh", ".sbatch")) else able[:8]:
        exported = export(target, each)
        parsed(exported.file_name, exported.text)


def test_every_plan_can_be_exported_but_for_two_that_nobody_runs() -> None:
    for each in map(job, plans()):
        p = each.plan
        able = {name for name, target in TARGETS.items() if target.cannot(each) is None}
        sharded_8bit = p.backend == "fsdp2" and p.optim == "adamw_bnb_8bit"
        bf16_on_the_host = p.backend == "deepspeed" and p.precision == "bf16" and p.offload != "none"
        runs = not sharded_8bit and not (bf16_on_the_host and not p.optim.startswith("adamw"))
        expected = {"torchrun", "sbatch"}
        if runs:
            own = {"ddp": {"ddp"}, "fsdp2": {"fsdp2"}, "deepspeed": {"deepspeed", "deepspeed-launch"}, "fsdp1": set()}
            expected |= {"accelerate", "accelerate-launch"} | own[p.backend]
            expected |= {"trainer"} if p.backend != "fsdp1" or p.strategy == "zero3" else set()
        if runs and p.backend != "fsdp1" and (p.precision != "bf16" or p.backend == "deepspeed"):
            expected |= {"axolotl"}
        assert able == expected, p


@pytest.mark.parametrize("target", ["trainer", "fsdp2", "ddp"])
def test_python_files_are_formatted_and_without_findings(target: str, tmp_path: Path) -> None:
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
        ("fsdp2", plan("zero1", "deepspeed"), "fsdp2 cannot do ZeRO-1 (deepspeed): it trains with FSDP2"),
        ("ddp", plan("zero3", "fsdp2"), "ddp cannot do ZeRO-3 (fsdp2): it trains with DDP"),
        ("deepspeed", plan("ddp", "ddp"), "deepspeed cannot do DDP: it shards with DeepSpeed"),
        ("trainer", plan("zero2", "fsdp1"), "trainer cannot do ZeRO-2 (fsdp1): framework trainer with backend fsdp1 has no zero2"),
        ("accelerate", plan("zero3", "fsdp2", wrap="none", activation_checkpointing="full"), "accelerate checkpoints the layers that it wraps"),
        ("axolotl", plan("zero3", "fsdp1"), "axolotl cannot do ZeRO-3 (fsdp1): it has given up FSDP1"),
        ("axolotl", plan("zero3", "fsdp2", precision="bf16"), "it takes any bf16 for mixed precision"),
        ("accelerate", plan("hsdp", "fsdp2", 8), "accelerate cannot do HSDP (fsdp2): replicas of one GPU each are DDP"),
        ("trainer", plan("zero3", "fsdp2", optim="adamw_bnb_8bit"), "bitsandbytes' 8-bit AdamW cannot step FSDP2's"),
    ],
)  # fmt: skip
def test_a_refusal_says_who_can(target: str, of: object, message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)) as refused:
        export(target, job(of))  # type: ignore[arg-type]  # a Plan
    able = refused.value.hint.removeprefix("those that can: ").split(", ")
    assert able and target not in able
    for name in able:
        assert export(name, job(of)).text  # type: ignore[arg-type]  # likewise


def test_an_unknown_target_is_guessed() -> None:
    with pytest.raises(UsageError, match="no export is called 'acelerate'") as refused:
        find("acelerate")
    assert refused.value.hint == "did you mean accelerate?"
    assert find(" Accelerate_Launch ").name == "accelerate-launch"


def test_the_backend_is_the_target_s_where_it_is_left_open() -> None:
    def backend(target: str, **options: object) -> str:
        request = make_request({"model": "7B", "gpus": 4, "gpu": "H100-80GB", **options})
        (chosen,) = report_for(target, request).estimates
        return chosen.plan.backend

    assert backend("deepspeed", strategy="zero3") == "deepspeed"
    assert backend("accelerate", strategy="zero3") == "fsdp2"
    assert backend("deepspeed", strategy="zero3", backend="fsdp1") == "fsdp1"
    assert backend("deepspeed", strategy="ddp") == "ddp"


@pytest.mark.parametrize(
    ("target", "framework"),
    [
        ("accelerate", "accelerate"), ("accelerate-launch", "accelerate"), ("trainer", "trainer"), ("axolotl", "trainer"),
        ("deepspeed", "deepspeed"), ("deepspeed-launch", "deepspeed"), ("fsdp2", "torch"), ("ddp", "torch"),
        ("torchrun", "torch"), ("sbatch", "torch"),
    ],
)  # fmt: skip
def test_what_is_estimated_is_what_the_target_trains(target: str, framework: str) -> None:
    options = {
        "model": "openai-community/gpt2",
        "gpus": 4,
        "gpu": "24GiB",
        "strategy": "ddp" if target == "ddp" else "zero3",
    }
    (row,) = report_for(target, make_request(options)).estimates
    assert row.plan.framework == framework
    assert row.peak_device_bytes is not None  # the allocator is walked
    (given,) = report_for(target, make_request(options | {"framework": "torch"})).estimates
    assert given.plan.framework == "torch"


def test_the_header_names_the_framework_and_the_notes_what_it_leaves_out() -> None:
    options = {"model": "openai-community/gpt2", "gpus": 4, "gpu": "24GiB", "strategy": "zero3"}
    report = report_for("accelerate", make_request(options))
    exported = export("accelerate", Job.of(report, report.estimates[0]))
    device = report.estimates[0].peak_device_bytes
    assert device is not None
    assert f"Predicted peak per GPU under accelerate: {format_gib(device)} of the device's memory; " in exported.text
    assert any(note.startswith("not in the prediction: ") and "model's outputs" in note for note in exported.notes)
    assert not any("estimate is of plain PyTorch" in note for note in exported.notes)
    trainer = export("trainer", Job.of(report, report.estimates[0]))
    assert "the prediction is of accelerate, which trainer does not run" in trainer.notes


@pytest.mark.parametrize("target", TARGETS)
def test_the_allocator_is_set_where_it_is_launched(target: str) -> None:
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
        assert f"# Predicted with {variable} in the environment." in exported.text
    assert "PYTORCH_ALLOC_CONF" not in export(target, example(target)).text


def test_a_job_is_made_from_a_report() -> None:
    report = estimate(model="meta-llama/Llama-2-7b-hf", gpus=4, gpu="A100-40GB", strategy="zero3")
    made = Job.of(report, report.estimates[0])
    assert made.layer_classes == ("LlamaDecoderLayer",) and made.task == "causal-lm"
    assert made.largest_parameter_elements == 32_000 * 4096
    assert made.peaks["peak_tensor_bytes"] == report.estimates[0].peak_tensor_bytes
    assert made.margin == pytest.approx(1 - made.peaks[made.peak or ""] / report.gpu_memory_bytes)
    assert global_batch_size(made.plan) == 4


@pytest.mark.parametrize("target", ["accelerate", "deepspeed", "fsdp2", "sbatch"])
def test_without_a_strategy_it_is_the_best_that_fits_and_that_the_target_can_do(target: str) -> None:
    request = make_request({"model": "meta-llama/Llama-2-7b-hf", "gpus": 4, "gpu": "A100-40GB"})
    report = report_for(target, request)
    (chosen,) = report.estimates
    assert chosen.fits and export(target, Job.of(report, chosen)).text
    assert chosen.reserved is not None and chosen.reserved.verdict == "fits"
    framework = TARGETS[target].framework
    best = recommend(model=request.model, gpus=4, gpu="A100-40GB", framework=framework).recommendation
    assert best.winner is not None
    if TARGETS[target].cannot(job(best.winner.plan)) is None:
        assert chosen.plan == best.winner.plan


def test_what_is_given_is_held() -> None:
    request = make_request(
        {"model": "openai-community/gpt2", "gpus": 4, "gpu": "A100-40GB", "micro_batch_size": 3, "seq_len": 512}
    )
    (chosen,) = report_for("fsdp2", request).estimates
    assert (chosen.plan.micro_batch_size, chosen.plan.seq_len) == (3, 512)


def test_where_nothing_fits_it_says_what_would() -> None:
    request = make_request({"model": "meta-llama/Llama-2-7b-hf", "gpus": 4, "gpu": "A100-40GB"})
    with pytest.raises(NothingFits, match="nothing that ddp can do fits A100-40GB with 8 % left free") as refused:
        report_for("ddp", request)
    assert refused.value.exit_status == 1 and refused.value.hint
    named = make_request({**request.as_dict(), "strategy": "ddp"})
    report = report_for("ddp", named)
    assert "A100-40GB has 39.39 GiB, it does not fit." in export("ddp", Job.of(report, report.estimates[0])).text


def test_of_a_bare_count_only_what_needs_no_model_is_exported() -> None:
    report = estimate(model="7B", gpus=4, gpu="A100-40GB", strategy="zero3")
    made = Job.of(report, report.estimates[0])
    able = [name for name, target in TARGETS.items() if target.cannot(made) is None]
    assert able == ["accelerate", "torchrun", "accelerate-launch", "sbatch"]
    text = export("accelerate", made).text
    assert "Predicted peak: unknown" in text
    assert "fsdp_transformer_layer_cls_to_wrap" not in yaml.safe_load(text)["fsdp_config"]
