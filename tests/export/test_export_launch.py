"""Launch scripts: stub programs record their arguments, which the real programs' parsers then read."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from accelerate.commands.launch import launch_command_parser
from deepspeed.launcher.runner import parse_args as deepspeed_args
from export_jobs import job, plan
from torch.distributed.run import get_args_parser

from fsdp_advisor.export import TARGETS, Job, export

STUB = '#!{python}\nimport json, sys\nopen({calls!r}, "a").write(json.dumps(sys.argv) + chr(10))\n'
EXTRA_ARGUMENTS = ["--steps", "2", "two words"]


def calls(target: str, of: Job, folder: Path, **environment: str) -> list[list[str]]:
    """The commands that the script runs, as program names and arguments."""
    exported = export(target, of)
    script, record = folder / exported.file_name, folder / "calls"
    script.write_text(exported.text)
    for name in ("torchrun", "accelerate", "deepspeed", "srun"):
        stub = folder / name
        stub.write_text(STUB.format(python=sys.executable, calls=str(record)))
        stub.chmod(0o755)
    scontrol = folder / "scontrol"
    scontrol.write_text("#!/bin/sh\nprintf 'node-1\\nnode-2\\n'\n")
    scontrol.chmod(0o755)
    done = subprocess.run(
        ["bash", str(script), *EXTRA_ARGUMENTS],
        env={"PATH": f"{folder}:{os.environ['PATH']}", **environment},
        cwd=folder, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    found = [json.loads(line) for line in record.read_text().splitlines()]
    return [[Path(call[0]).name, *call[1:]] for call in found]


@pytest.mark.parametrize("nodes", [1, 2])
def test_torchrun_script_starts_every_rank(nodes: int, tmp_path: Path) -> None:
    ((name, *arguments),) = calls("torchrun", job(plan("zero3", "fsdp2", nodes)), tmp_path, HEAD_NODE="node-1")
    found = get_args_parser().parse_args(arguments)
    assert name == "torchrun"
    assert (found.standalone, found.nnodes) == ((True, "1:1") if nodes == 1 else (False, "2"))
    assert found.nproc_per_node == str(8 // nodes)
    assert (found.training_script, found.training_script_args) == ("train.py", EXTRA_ARGUMENTS)
    if nodes > 1:
        assert (found.rdzv_backend, found.rdzv_endpoint) == ("c10d", "node-1:29400")


@pytest.mark.parametrize("nodes", [1, 2])
def test_accelerate_script_uses_the_exported_configuration(nodes: int, tmp_path: Path) -> None:
    of = job(plan("zero3", "fsdp2", nodes))
    ((name, command, *arguments),) = calls("accelerate-launch", of, tmp_path, HEAD_NODE="node-1", NODE_RANK="1")
    found: Any = launch_command_parser().parse_args(arguments)
    assert (name, command) == ("accelerate", "launch")
    assert found.config_file == TARGETS["accelerate"].file_name
    assert (found.training_script, found.training_script_args) == ("train.py", EXTRA_ARGUMENTS)
    if nodes > 1:
        assert (found.machine_rank, found.main_process_ip, found.main_process_port) == (1, "node-1", 29500)


@pytest.mark.parametrize("nodes", [1, 2])
def test_deepspeed_script_uses_the_exported_configuration(nodes: int, tmp_path: Path) -> None:
    ((name, *arguments),) = calls("deepspeed-launch", job(plan("zero3", "deepspeed", nodes)), tmp_path)
    found: Namespace = deepspeed_args(arguments)
    assert name == "deepspeed"
    assert (found.num_gpus, found.user_script) == (8 // nodes, "train.py")
    assert found.user_args == ["--deepspeed", TARGETS["deepspeed"].file_name, *EXTRA_ARGUMENTS]
    if nodes > 1:
        assert (found.num_nodes, found.hostfile) == (2, "hostfile")


@pytest.mark.parametrize("nodes", [1, 2])
def test_slurm_script_requests_nodes_and_gpus(nodes: int, tmp_path: Path) -> None:
    of = job(plan("zero3", "fsdp2", nodes))
    ((name, command, *arguments),) = calls("sbatch", of, tmp_path, SLURM_JOB_NODELIST="node-[1-2]", SLURM_JOB_ID="7")
    found = get_args_parser().parse_args(arguments)
    assert (name, command) == ("srun", "torchrun")
    assert (found.nnodes, found.nproc_per_node, found.rdzv_id) == (str(nodes), str(8 // nodes), "7")
    assert found.rdzv_endpoint == "node-1:29400"
    assert (found.training_script, found.training_script_args) == ("train.py", EXTRA_ARGUMENTS)
    directives = [line for line in export("sbatch", of).text.splitlines() if line.startswith("#SBATCH ")]
    assert directives[1:6] == [
        f"#SBATCH --nodes={nodes}", "#SBATCH --ntasks-per-node=1", f"#SBATCH --gpus-per-node={8 // nodes}", "#SBATCH --exclusive",
        "#SBATCH --mem=0",
    ]  # fmt: skip
    lines = export("sbatch", of).text.splitlines()
    assert lines[1:8] == [line for line in lines if line.startswith("#SBATCH")]  # Slurm stops reading at a command


def test_script_for_several_nodes_requires_head_node(tmp_path: Path) -> None:
    (tmp_path / "torchrun.sh").write_text(export("torchrun", job(plan("zero3", "fsdp2", 2))).text)
    done = subprocess.run(["bash", "torchrun.sh"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode != 0 and "HEAD_NODE: set it to the host name of one of the nodes" in done.stderr


def test_launch_scripts_say_in_which_folder_they_start_the_script(tmp_path: Path) -> None:
    """Slurm copies a batch script elsewhere and starts it in the folder where it is submitted."""
    for target in ("torchrun", "sbatch"):
        folder = tmp_path / f"of {target}"
        folder.mkdir()
        exported = export(target, job(plan("zero3", "fsdp2")))
        script = folder / exported.file_name
        script.write_text(exported.text)
        for program in ("torchrun", "srun"):
            (tmp_path / program).write_text('#!/bin/sh\npwd >"$0.log"\n')
            (tmp_path / program).chmod(0o755)
        (tmp_path / "scontrol").write_text("#!/bin/sh\necho node-1\n")
        (tmp_path / "scontrol").chmod(0o755)
        variables = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_NODELIST": "node-1", "SLURM_JOB_ID": "7"}
        subprocess.run(["bash", str(script)], env=variables, cwd=tmp_path, check=True)
        started = (tmp_path / ("srun.log" if target == "sbatch" else "torchrun.log")).read_text().strip()
        place, words = (
            (tmp_path, "the folder where it is submitted") if target == "sbatch" else (script.parent, "its own folder")
        )
        assert started == str(place) and any(f"in {words} and" in note for note in exported.notes)


def test_torchtitans_line_has_its_options_and_reads_back_as_the_plan() -> None:
    configs = pytest.importorskip("torchtitan.config.configs")
    from fsdp_advisor.configs import from_texts
    from fsdp_advisor.export.launch import torchtitan_line

    of = plan("zero2", "fsdp2", framework="torchtitan", micro_batch_size=2, gradient_accumulation_steps=3)
    line = torchtitan_line(of)
    sections = {"training": configs.TrainingConfig, "parallelism": configs.ParallelismConfig}
    words = [word[2:].split(".") for word in line.split() if word.startswith("--") and "." in word]
    assert len(words) == 7 and all(hasattr(sections[section](), name) for section, name in words)
    assert "disable_cuda_graphs" in line and "disable_cuda_graphs" not in torchtitan_line(replace(of, cuda_graphs=True))
    assert "--training.global_batch_size 48" in line
    found = from_texts({"titan.sh": line}).options
    assert (found["strategy"], found["gpus"], found["micro_batch_size"], found["seq_len"]) == ("zero2", 8, 2, 2048)
