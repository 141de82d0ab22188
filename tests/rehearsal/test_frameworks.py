"""Small jobs of the usual frameworks on several ranks, and the predictions of those that `estimate` describes.

The README's line, FSDP2, DeepSpeed and torchtitan take turns.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from framework_jobs import DDP, DEEPSPEED, FSDP2, MUON
from matrix import in_turn, taken

from fsdp_advisor.rehearsal.rehearse import Settings, rehearse

pytestmark = pytest.mark.slow

README = Path(__file__).parents[2] / "README.md"
TITAN = """
[job]
dump_folder = "outputs"
[model]
name = "llama3"
flavor = "debugmodel"
hf_assets_path = "tokenizer"
[training]
local_batch_size = 2
seq_len = 512
steps = 4
dataset = "c4_test"
[parallelism]
data_parallel_shard_degree = 2
tensor_parallel_degree = 2
[activation_checkpoint]
mode = "selective"
"""


def rehearsed(
    python: Path, folder: Path, *command: str, gpus: int, ranks: Sequence[int] = (), options: Sequence[str] = ()
) -> dict[str, Any]:
    """The JSON of a rehearsal of three steps, which must complete on every rank, or on these if they are named."""
    words = ["rehearse", "--gpu", "A100-80GB", "--gpus", str(gpus), "--timeout", "500", "--json", *options]
    if ranks:
        words += ["--ranks", ",".join(map(str, ranks))]
    program, *rest = command
    done = subprocess.run(
        [sys.executable, "-m", "fsdp_advisor", *words, "--", str(python.parent / program), *rest],
        capture_output=True, text=True, cwd=folder, timeout=900, env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert [rank["rank"] for rank in found["ranks"]] == list(ranks or range(gpus))
    assert all(rank["steps"] == 3 for rank in found["ranks"])
    return found


ONE_OR_ALL = pytest.mark.parametrize("ranks", taken([(0,)], [()]), ids=taken(["one rank"], ["all ranks"]))


@ONE_OR_ALL
@pytest.mark.usefixtures("predicts_here")
@pytest.mark.parametrize(
    ("text", "options", "tolerance"),
    taken(
        [
            pytest.param(
                FSDP2,
                {"strategy": "zero3", "backend": "fsdp2", "precision": "bf16-mixed"},
                0.005,
                marks=in_turn(0, of=4),
            ),
            pytest.param(
                DEEPSPEED,
                {"strategy": "zero3", "backend": "deepspeed", "precision": "bf16-mixed"},
                0.02,
                marks=in_turn(1, of=4),
            ),
        ],
        [(DDP, {"strategy": "ddp", "precision": "fp32"}, 0.005)],  # the README's line also runs DDP
    ),
    ids=taken(["fsdp2", "deepspeed"], ["ddp"]),
)
def test_the_job_is_recognized_and_its_allocated_peak_is_predicted(
    rehearsal_python: Path, tmp_path: Path, text: str, options: dict[str, str], tolerance: float, ranks: tuple[int, ...]
) -> None:
    (tmp_path / "train.py").write_text(text)
    command = [str(rehearsal_python.parent / "torchrun"), "--nproc-per-node", "2", str(tmp_path / "train.py")]
    found = rehearse(command, Settings(gpu="A100-80GB", gpus=2, ranks=ranks, timeout_s=500, quiet=True))
    assert found.outcome == "completed" and found.prediction is not None and found.prediction.reason is None
    assert [(rank.rank, rank.steps) for rank in found.ranks] == [(rank, 3) for rank in ranks or (0, 1)]
    assert options.items() <= found.prediction.options.items()
    batch = found.prediction.options["micro-batch-size"], found.prediction.options["seq-len"]
    assert batch == ("2", "512")
    (measured,) = {rank.peak("peak_allocated_bytes") for rank in found.ranks}  # all ranks do the same
    assert found.prediction.figures["peak_allocated_bytes"] == pytest.approx(measured, rel=tolerance)
    assert found.ranks[0].phases[-1].peak_allocated_bytes <= measured


@in_turn(5, of=8)
@pytest.mark.usefixtures("predicts_here")
@pytest.mark.parametrize(
    ("stage", "offload"), taken([(1, "none"), (2, "none"), (3, "none"), (2, "cpu"), (3, "cpu")], [], days=5)
)
def test_the_peak_of_deepspeeds_muon_is_predicted(
    rehearsal_python: Path, tmp_path: Path, stage: int, offload: str
) -> None:
    (tmp_path / "train.py").write_text(MUON.replace("STAGE", str(stage)).replace("DEVICE", offload))
    command = [str(rehearsal_python.parent / "torchrun"), "--nproc-per-node", "2", str(tmp_path / "train.py")]
    found = rehearse(command, Settings(gpu="A100-80GB", gpus=2, timeout_s=500, quiet=True))
    assert found.outcome == "completed" and found.prediction is not None and found.prediction.reason is None
    options = found.prediction.options
    assert (options["optim"], options["strategy"]) == ("muon", f"zero{stage}")
    assert options["offload"] == ("none" if offload == "none" else "optimizer")
    last = max(phase.peak_allocated_bytes for phase in found.ranks[0].phases[-3:])  # the first step runs benchmarks
    assert found.prediction.figures["peak_allocated_bytes"] == pytest.approx(last, rel=1e-3)


@in_turn(3, of=4)
@ONE_OR_ALL
def test_the_line_of_the_readme_is_rehearsed_as_predicted(rehearsal_python: Path, ranks: tuple[int, ...]) -> None:
    line = re.search(r"^fsdp-advisor rehearse .* --gpus 4 (.*)-- (.*)$", README.read_text(), re.MULTILINE)
    assert line is not None
    found = rehearsed(rehearsal_python, README.parent, *line[2].split(), gpus=4, ranks=ranks, options=line[1].split())
    job = found["ranks"][0]["job"]
    adapters, base = job["trainable_parameters"], job["parameters"] - job["trainable_parameters"]
    assert job["framework"] == "accelerate" and job["engine"]["backend"] == "ddp"
    kept = found["ranks"][0]["phases"][-1]["allocated_bytes_at_end"]
    assert kept > 2 * base + (4 + 8) * adapters, "the weights in bf16, the adapters and AdamW's state in fp32"
    predicted = found["prediction"]
    assert predicted["options"]["dtype"] == "bfloat16" and "peft-config" in predicted["options"]
    assert predicted["figures"]["peak_allocated_bytes"] == pytest.approx(found["peak_allocated_bytes"], rel=1e-3)


@in_turn(2, of=4)
@ONE_OR_ALL
def test_torchtitan_runs_with_tensor_parallelism_and_fsdp2(
    rehearsal_python: Path, tmp_path: Path, ranks: tuple[int, ...]
) -> None:
    make_titan_assets(tmp_path)
    command = ("torchrun", "--nproc-per-node", "4", "-m", "torchtitan.train", "--job.config_file", "job.toml")
    found = rehearsed(rehearsal_python, tmp_path, *command, gpus=4, ranks=ranks)
    first, last = (found["ranks"][0]["phases"][i] for i in (1, -1))
    assert first["phase"] == "forward" and last["phase"] == "optimizer"
    parameters = found["ranks"][0]["job"]["parameters"]  # DTensors count all of their elements
    shards = parameters * 4 // 4
    assert last["allocated_bytes_at_end"] >= 3 * shards * 0.9, "fp32 weights and AdamW's state, over four ranks"


def make_titan_assets(folder: Path) -> None:
    """What torchtitan's debug model reads: a tokenizer, and its test data set in tests/assets/c4_test."""
    vocabulary = {"<|begin_of_text|>": 0, "<|end_of_text|>": 1, "<unk>": 2} | {f"w{i}": 3 + i for i in range(100)}
    tokenizer = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
        "pre_tokenizer": {"type": "Whitespace"}, "post_processor": None, "decoder": None,
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<unk>"},
    }  # fmt: skip
    words = {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>", "add_bos_token": True}
    for path in ("tokenizer", "tests/assets/c4_test"):
        (folder / path).mkdir(parents=True)
    (folder / "tokenizer" / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(words))
    lines = [json.dumps({"text": " ".join(f"w{(i * j) % 100}" for j in range(2000))}) for i in range(1, 60)]
    (folder / "tests" / "assets" / "c4_test" / "data.json").write_text("\n".join(lines))
    (folder / "job.toml").write_text(TITAN)
