"""A bundle: every file that a launch needs, each stating or implementing the plan."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from accelerate.commands.launch import launch_command_parser
from deepspeed.launcher.runner import fetch_hostfile
from deepspeed.launcher.runner import parse_args as deepspeed_args
from export_jobs import job, plan
from torch.distributed.run import get_args_parser

from fsdp_advisor.errors import UsageError
from fsdp_advisor.export import TARGETS, Job, export, find
from fsdp_advisor.export.bundle import bundle, script_limit
from fsdp_advisor.export.choice import report_for
from fsdp_advisor.job.adaptation import Adaptation
from fsdp_advisor.job.choices import TrainingTask
from fsdp_advisor.job.parsing import make_request

ENVIRONMENT = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
FULL = {"activation_checkpointing": "full", "gradient_accumulation_steps": 4, "micro_batch_size": 2, "seq_len": 1024}
PLANS = {
    "fsdp2": plan("zero3", "fsdp2", **FULL),
    "fsdp2 through accelerate": plan("zero2", "fsdp2", framework="accelerate", **FULL),
    "fsdp2 on two nodes": plan("hsdp", "fsdp2", 2, framework="trainer", **FULL),
    "fsdp1": plan("zero2", "fsdp1", 2, precision="fp16-mixed", backward_prefetch="post"),
    "fsdp1 with replicas that keep parameters": plan(
        "hsdp", "fsdp1", 2, reshard_after_forward="false", forward_prefetch=True, backward_prefetch="none"
    ),
    "fsdp1 with one replica": plan("hsdp", "fsdp1"),
    "fsdp1 by size": plan("zero3", "fsdp1", wrap="size:1000000"),
    "fsdp1 with flat parameters": plan("zero3", "fsdp1", use_orig_params=False),
    "fsdp2 in groups": plan("zero3", "fsdp2", wrap="every:2"),
    "ddp": plan("ddp", "ddp", precision="fp32", optim="sgd_momentum"),
    "deepspeed": plan("zero2", "deepspeed", offload="optimizer", **FULL),
    "deepspeed on two nodes": plan("zero3", "deepspeed", 2, precision="bf16", optim="adamw_bnb_8bit"),
    "deepspeed through accelerate": plan("zero3", "deepspeed", offload="parameters", framework="accelerate", **FULL),
    "deepspeed through the Trainer": plan("zero1", "deepspeed", framework="trainer"),
}
JOBS = {name: job(p, environment=ENVIRONMENT, options=("--gpus", "8")) for name, p in PLANS.items()}
JOBS["ddp"] = replace(JOBS["ddp"], searches_unused=True)
CASES = [(t, name) for t in TARGETS for name, of in JOBS.items() if TARGETS[t].unsupported(of) is None]
PROGRAMS = {"trl": "trl.scripts.sft", "llamafactory": "llamafactory.launcher"}
every_bundle = pytest.mark.parametrize(("target", "name"), CASES)


def files_of(target: str, of: Job) -> dict[str, str]:
    return {file.name: file.text for file in bundle(find(target), of).files}


def starter(files: dict[str, str]) -> str:
    """The name of the launch script, of which each bundle has one."""
    (name,) = (name for name in files if name.endswith(".sh"))
    return name


def words(script: str) -> list[str]:
    """The arguments of the command that a launch script ends with."""
    import shlex

    line = script.partition("\nexec ")[2].replace("\\\n", " ")
    return [re.sub(r"^\$\{(\w+):\?.*\}", r"\1", word) for word in shlex.split(line.replace('"$@"', ""))]


@every_bundle
def test_launch_script_starts_every_rank_of_every_node(target: str, name: str) -> None:
    of, files = JOBS[name], files_of(target, JOBS[name])
    p = of.plan
    program, *arguments = words(files[starter(files)])
    match program:
        case "torchrun":
            found: Any = get_args_parser().parse_args(arguments)
            nodes, ranks = (1 if found.standalone else int(found.nnodes)), int(found.nproc_per_node)
            assert found.training_script == PROGRAMS.get(target, "train.py")
        case "deepspeed":
            found = deepspeed_args(arguments)
            nodes, ranks = max(found.num_nodes, 1), found.num_gpus
            assert found.user_script == "train.py" and found.user_args[:2] == ["--deepspeed", "ds_config.json"]
        case "accelerate":
            found = launch_command_parser().parse_args([a.replace("NODE_RANK", "1") for a in arguments[1:]])
            read = yaml.safe_load(files[found.config_file])
            nodes, ranks = read["num_machines"], read["num_processes"] // read["num_machines"]
            assert found.training_script == "train.py"
        case "axolotl":
            assert arguments[:4] == ["train", "axolotl.yaml", "--launcher", "torchrun"]
            found = get_args_parser().parse_args([*arguments[arguments.index("--") + 1 :], "train.py"])
            nodes, ranks = (1 if found.standalone else int(found.nnodes)), int(found.nproc_per_node)
        case _:
            raise AssertionError(program)
    assert (nodes, ranks) == (p.nnodes, p.ranks_per_node)


@every_bundle
def test_every_file_that_another_file_names_is_in_the_bundle(target: str, name: str) -> None:
    files = files_of(target, JOBS[name])
    named = {
        "train.py",
        "accelerate.yaml",
        "ds_config.json",
        "axolotl.yaml",
        "trl.yaml",
        "llamafactory.yaml",
        "hostfile",
        "training_arguments",
    }
    lines = (line for text in files.values() for line in text.splitlines() if not line.startswith("#"))
    used = {word for line in lines for word in named if word in line.replace("|", " ").split()}
    used |= {"ds_config.json"} if "deepspeed_config_file" in str(files) else set()
    present = {file.removesuffix(".py") if file == "training_arguments.py" else file for file in files}
    assert used <= present | ({"train.py"} if "lines_to_add.py" in files else set())
    readme = files["README.md"]
    assert all(f"| `{file}` |" in readme for file in files if file != "README.md")


@every_bundle
def test_every_text_states_the_plan_or_has_the_readme_next_to_it(target: str, name: str) -> None:
    of, files = JOBS[name], files_of(target, JOBS[name])
    p = of.plan
    stated = (
        f"{p.strategy} by {p.backend}",
        f"offload {p.offload if p.offload == 'none' else p.offload + ' to cpu'}",
        f"micro-batch {p.micro_batch_size} x accumulation {p.gradient_accumulation_steps} x ranks 8",
        f"activation checkpointing {p.activation_checkpointing}",
        p.optim,
        "PYTORCH_ALLOC_CONF=expandable_segments:True",
        "8.00 GiB in training",
    )
    for file, text in files.items():
        if file not in ("ds_config.json", "hostfile", ".deepspeed_env"):
            assert all(words in text for words in stated), file


SCRIPTS = [(t, name) for t, name in CASES if {"train.py", "lines_to_add.py"} & set(files_of(t, JOBS[name]))]


@pytest.mark.parametrize(("target", "name"), SCRIPTS)
def test_script_has_the_batch_and_the_optimizer_of_the_plan(target: str, name: str) -> None:
    of, files = JOBS[name], files_of(target, JOBS[name])
    script = files.get("train.py") or files["lines_to_add.py"]
    values = {n.targets[0].id: n.value for n in ast.parse(script).body if isinstance(n, ast.Assign)}  # type: ignore[attr-defined]  # plain names
    numbers = {
        n: ast.literal_eval(v)
        for n, v in values.items()
        if n in ("MICRO_BATCH_SIZE", "SEQ_LEN", "ACCUMULATION", "WORLD_SIZE")
    }
    p = of.plan
    assert numbers == {
        "MICRO_BATCH_SIZE": p.micro_batch_size, "SEQ_LEN": p.seq_len, "ACCUMULATION": p.gradient_accumulation_steps, "WORLD_SIZE": 8,
    }  # fmt: skip
    if "sync_each_batch" in script:
        keeps_sharded = p.backend in ("fsdp1", "fsdp2") and not p.defers_reduction
        assert f"sync_each_batch={keeps_sharded and p.gradient_accumulation_steps > 1}" in script


def test_configuration_of_a_bundle_equals_the_single_file() -> None:
    for target, file in (
        ("accelerate", "accelerate.yaml"),
        ("trainer", "training_arguments.py"),
        ("axolotl", "axolotl.yaml"),
        ("trl", "trl.yaml"),
    ):
        of = JOBS["fsdp2 on two nodes" if target != "trl" else "fsdp2"]
        assert files_of(target, of)[file] == export(target, of).text
    of = JOBS["deepspeed through accelerate"]
    assert files_of("accelerate", of)["ds_config.json"] == export("deepspeed", of).text


def test_deepspeed_reads_the_hostfile(tmp_path: Path) -> None:
    files = files_of("deepspeed", JOBS["deepspeed on two nodes"])
    (tmp_path / "hostfile").write_text(files["hostfile"])
    assert dict(fetch_hostfile(str(tmp_path / "hostfile"))) == {"node-1": 4, "node-2": 4}
    assert files[".deepspeed_env"] == "PYTORCH_ALLOC_CONF=expandable_segments:True\n"


@pytest.mark.parametrize(
    ("target", "name", "command"),
    [
        ("sbatch", "fsdp2", "srun torchrun"),
        ("sbatch", "deepspeed on two nodes", "srun torchrun"),
        ("sbatch", "deepspeed through accelerate", "srun bash -c 'exec accelerate launch"),
        ("axolotl", "fsdp2 on two nodes", "srun torchrun"),
    ],
)
def test_slurm_script_starts_the_program_of_the_consumer(target: str, name: str, command: str) -> None:
    files = files_of(target, JOBS[name])
    text = files["train.sbatch"]
    assert command in text
    assert ("--deepspeed ds_config.json" in text) == (name == "deepspeed on two nodes")
    assert ("-m axolotl.cli.train axolotl.yaml" in text) == (target == "axolotl")
    assert f"#SBATCH --nodes={JOBS[name].plan.nnodes}" in text


def test_slurm_runs_accelerate_with_rank_and_head_node(tmp_path: Path) -> None:
    """srun is a stub that runs its command as the second node; accelerate's own parser reads the result."""
    of = job(plan("zero3", "fsdp2", 2, framework="accelerate"))
    (tmp_path / "train.sbatch").write_text(files_of("accelerate", of)["train.sbatch"])
    for stub, text in {
        "srun": '#!/bin/sh\nSLURM_NODEID=1 exec "$@"\n',
        "scontrol": "#!/bin/sh\nprintf 'node-1\\nnode-2\\n'\n",
        "accelerate": f"#!{sys.executable}\nimport json, sys\nprint(json.dumps(sys.argv[1:]))\n",
    }.items():
        (tmp_path / stub).write_text(text)
        (tmp_path / stub).chmod(0o755)
    done = subprocess.run(
        ["bash", "train.sbatch", "--steps", "two words"],
        env={"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_NODELIST": "node-[1-2]"},
        cwd=tmp_path, capture_output=True, text=True, check=True,
    )  # fmt: skip
    command, *arguments = json.loads(done.stdout)
    found: Any = launch_command_parser().parse_args(arguments)
    assert (command, found.config_file, found.training_script) == ("launch", "accelerate.yaml", "train.py")
    assert (found.machine_rank, found.main_process_ip, found.main_process_port) == (1, "node-1", 29500)
    assert found.training_script_args == ["--steps", "two words"]


def test_exported_scripts_pass_ruff(tmp_path: Path) -> None:
    number = 0
    for target, name in CASES:
        for task in ("causal-lm", "image-classification"):
            of = replace(JOBS[name], task=task)
            if TARGETS[target].unsupported(of) is not None:
                continue
            for file, text in files_of(target, of).items():
                if file.endswith(".py") and file != "training_arguments.py":
                    (tmp_path / f"export_{number}.py").write_text(text)
                    number += 1
    for command in (["check", "--quiet"], ["format", "--check", "--quiet"]):
        ran = [sys.executable, "-m", "ruff", *command, "--isolated", "--line-length=120", str(tmp_path)]
        done = subprocess.run(ran, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout) == (0, "")


def test_a_parameter_count_has_no_bundle() -> None:
    with pytest.raises(UsageError, match="a bare parameter count is not a model to launch"):
        bundle(find("accelerate"), replace(JOBS["fsdp2"], task=None))


def test_a_bundle_is_refused_exactly_where_no_script_can_train() -> None:
    quantized = {"adaptation": Adaptation(peft={"peft_type": "LORA"}, quantization={"load_in_4bit": True})}
    sharded = replace(JOBS["fsdp2"], **quantized)
    for target in (find("torchrun"), find("accelerate"), find("trl")):
        limit = script_limit(target, sharded)
        assert (limit is not None) == (target.name == "torchrun")
        if limit is not None:
            with pytest.raises(UsageError, match=re.escape(limit)):
                bundle(target, sharded)


@pytest.mark.parametrize("name", ["fsdp2", "fsdp1", "fsdp2 on two nodes", "deepspeed"])
def test_no_script_with_random_data_is_written_for_padded_sequences(name: str) -> None:
    padded = replace(JOBS[name], plan=replace(JOBS[name].plan, padding_fraction=0.3))
    for target in TARGETS.values():
        if target.limit(JOBS[name]) is not None:
            continue
        if target.name in ("fsdp2", "ddp"):
            assert target.limit(padded) == "its random data have no padding"
        elif target.name in ("axolotl", "trl", "llamafactory"):
            assert script_limit(target, padded) is None
        else:
            assert (target.limit(padded), script_limit(target, padded)) == (None, "its random data have no padding")


def test_hostile_names_cannot_inject_code() -> None:
    name = "a\nimport os; os.abort()\n\"'$(touch owned)`"
    for target, case in CASES:
        for file, text in files_of(target, replace(JOBS[case], model_name=name)).items():
            if file.endswith(".py"):
                kinds = [type(node) for node in ast.walk(ast.parse(text))]
                assert kinds == [type(node) for node in ast.walk(ast.parse(files_of(target, JOBS[case])[file]))]
            elif file.endswith((".sh", ".sbatch")):
                assert "touch owned" not in "".join(line for line in text.splitlines() if not line.startswith("#"))


@pytest.mark.parametrize("task", ["sft", "dpo", "kto"])
def test_the_launch_script_starts_the_script_of_the_task(task: TrainingTask) -> None:
    files = files_of("trl", job(plan("zero3", "fsdp2", framework="trl", loss_code="trl", task=task)))
    assert words(files["torchrun.sh"])[-4:] == ["-m", f"trl.scripts.{task}", "--config", "trl.yaml"]
    assert f"the configuration of TRL's {task}" in files["README.md"]


@pytest.mark.parametrize("target", ["ddp", "accelerate", "axolotl"])
def test_ddp_searches_for_parameters_that_get_no_gradient(target: str) -> None:
    of = job(plan("ddp", "ddp", framework=TARGETS[target].framework))
    for searches in (True, False):
        files = files_of(target, replace(of, searches_unused=searches))
        assert any("find_unused_parameters" in text for text in files.values()) == searches


@pytest.mark.parametrize(
    ("target", "options", "way", "call"),
    [
        ("accelerate", {}, "device map", 'device = {"": accelerator.device}'),
        ("trainer", {}, "device map", 'device = {"": arguments.device}'),
        ("trl", {}, "every rank", None),
        ("ddp", {}, "rank0", None),
        ("accelerate", {"strategy": "zero3"}, "cpu ram efficient loading", "from_pretrained(args.model, **MODEL_ARGUMENTS)"),
    ],
)  # fmt: skip
def test_host_memory_while_loading_is_that_of_the_written_script(
    target: str, options: dict[str, str], way: str, call: str | None
) -> None:
    """Under DDP, a script that names no device converts the model on the host of every rank."""
    job = {"model": "openai-community/gpt2", "gpus": "2", "gpu": "H100-80GB", "strategy": "ddp", **options}
    (row,) = (report := report_for(target, make_request(job))).estimates
    texts = files_of(target, Job.of(report, row))
    assert f"while it loads the model ({way})" in texts["README.md"]
    if call is not None:
        assert call in texts["train.py"]


RATES = {
    **{(target, "sft"): (1e-5, 1e-4) for target in ("accelerate", "trainer", "axolotl", "llamafactory", "ddp")},
    ("llamafactory", "dpo"): (1e-6, 5e-6),
    ("llamafactory", "kto"): (1e-6, 5e-6),
    ("trl", "sft"): (2e-5, 2e-4),
    ("trl", "dpo"): (1e-6, 1e-5),
    ("trl", "kto"): (1e-6, 1e-5),
    ("trl", "reward"): (1e-4, 1e-3),
}


@pytest.mark.parametrize(("target", "task"), RATES)
def test_the_learning_rate_is_a_usual_one_of_the_task_and_of_adapters_or_whole_models(target: str, task: str) -> None:
    framework = find(target).framework or "torch"
    reference, loss = ("copy" if task in ("dpo", "kto") else "none"), ("trl" if target == "trl" else "full")
    of = job(
        plan("ddp", "ddp", framework=framework, task=task, reference=reference, loss_code=loss),
        task="sequence-classification" if task == "reward" else "causal-lm",
    )
    adapters = Adaptation(peft={"peft_type": "LORA", "r": 8, "target_modules": ["c_attn"]})
    for rate, changed in zip(RATES[target, task], (of, replace(of, adaptation=adapters)), strict=True):
        texts = " ".join(files_of(target, changed).values())
        written = re.findall(r"(?:learning_rate\W+|--lr\W.*default=)([\d.e-]+)", texts)
        assert set(map(float, written)) == {rate}
