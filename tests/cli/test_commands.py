"""What the command line accepts, refuses and returns."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, get_args

import pytest

from fsdp_advisor.cli import main
from fsdp_advisor.cli.app import COMMANDS, Command
from fsdp_advisor.errors import NotRecordable
from fsdp_advisor.job.choices import TrainingTask
from fsdp_advisor.job.fields import dashed, fields_of
from fsdp_advisor.job.frameworks import FRAMEWORK_NAMES
from fsdp_advisor.job.request import EstimateRequest
from fsdp_advisor.job.search_request import RecommendRequest
from fsdp_advisor.model.resolved import Resolved
from fsdp_advisor.model.tape import Tape
from fsdp_advisor.model.tape_key import TapeKey

MODEL = ("--model", "meta-llama/Llama-2-7b-hf", "--gpu", "H100")
CONTRACT = [
    "--model",
    "--gpus",
    "--nnodes",
    "--gpu",
    "--strategy",
    "--backend",
    "--offload",
    "--offload-device",
    "--precision",
    "--optim",
    "--micro-batch-size",
    "--per-device-train-batch-size",
    "--seq-len",
    "--gradient-accumulation-steps",
    "--activation-checkpointing",
    "--attention",
    "--backward-prefetch",
    "--format",
    "--json",
    "-o",
    "-q",
    "--explain",
    "--force",
]

SEE = "see fsdp-advisor estimate --help"
GPUS = "it is the total number of ranks, one per GPU"
MODELS = (
    "it is the name of a catalogued model, a Hugging Face hub id, a directory or config.json, or a bare parameter count "
    "(7e9, 7B)"
)
REFUSED: list[tuple[tuple[str, ...], str, str]] = [
    # arguments, message, hint
    (("estimat",), "no such command: estimat", "did you mean estimate?"),
    (("frobnicate",), "no such command: frobnicate", "see fsdp-advisor --help"),
    (("estimate",), "model is missing", MODELS),
    (
        ("--model", "gpt2"),
        "no such option: --model",
        "options come after the command, as in: fsdp-advisor estimate --model MODEL --gpus N",
    ),
    (("estimate", *MODEL, "--gpus", "0"), "gpus must be at least 1, not 0", GPUS),
    (("estimate", *MODEL, "--gpus", "-3"), "gpus must be at least 1, not -3", GPUS),
    (("estimate", *MODEL, "gpus=-3"), "gpus must be at least 1, not -3", GPUS),
    (("estimate", *MODEL, "--gpus", "abc"), "gpus must be a whole number, not abc", GPUS),
    (("estimate", *MODEL, "--gpus", "99999999"), "gpus must be at most 65536, not 99999999", GPUS),
    (
        ("estimate", *MODEL, "--gpus", "3", "--nnodes", "2"),
        "gpus 3 is not divisible by nnodes 2",
        "each node has the same number of GPUs",
    ),
    (
        ("estimate", *MODEL, "--seq-len", "-1"),
        "seq_len must be at least 1, not -1",
        "it is the number of tokens per sequence",
    ),
    (
        ("estimate", *MODEL, "--host-memory", "lots"),
        "host_memory must be a value such as 512GiB, not lots",
        "it is the host memory that the job may use on one node, with its unit, such as 512GiB",
    ),
    (
        ("estimate", *MODEL, "--strategy", "zero4"),
        "strategy must be ddp, zero1, zero2, zero3, hsdp or all, not zero4",
        "did you mean zero3?",
    ),
    (
        ("estimate", *MODEL, "--optim", "adamw_anyprecision"),
        "optim adamw_anyprecision is not modelled yet",
        "nearest is adamw_torch, because AnyPrecision is in torchdistx, which has no package for the modelled versions of torch",
    ),
    (("estimate", *MODEL, "--gpus"), "--gpus needs a value", SEE),
    (("estimate", *MODEL, "-o"), "--output needs a value", SEE),
    (("estimate", "--model", "--gpus", "4"), "--model needs a value", SEE),
    (
        ("estimate", "--model", "-7B"),
        "a model cannot have -7B parameters",
        "from 1000 to 1e15, such as 7e9, 7B or 350M",
    ),
    (("estimate", *MODEL, "--sequence", "3"), "no such option: --sequence", "did you mean --seq-len?"),
    (("estimate", *MODEL, "--lr", "3"), "no such option: --lr", "it changes neither memory nor speed: leave it out"),
    (("estimate", *MODEL, "-x"), "no such option: -x", SEE),
    (
        ("estimate", *MODEL, "--lora"),
        "no such option: --lora",
        "did you mean --use-peft?",
    ),
    (
        ("recommend", *MODEL, "--tp=2"),
        "--tp: tensor parallelism is not modelled yet",
        "possible are data parallelism and its sharding: DDP, ZeRO-1 to ZeRO-3, HSDP",
    ),
    (("estimate", *MODEL, "more"), "unexpected argument more", SEE),
    (("recommend", "Qwen/Qwen2.5-7B"), "unexpected argument Qwen/Qwen2.5-7B", "did you mean --model Qwen/Qwen2.5-7B?"),
    (("estimate", *MODEL, "--tokens", "10B"), "no such option: --tokens", "fsdp-advisor recommend has it"),
    (
        ("rehearse", "--gpus", "2", "torchrun", "train.py"),
        "unexpected argument torchrun",
        "the command to run comes after --, such as: -- torchrun train.py",
    ),
    (
        ("estimate", *MODEL, "--format", "xml"),
        "format must be text, json or markdown, not xml",
        "it is the format of the answer",
    ),
    (("estimate", *MODEL, "--json=maybe"), "json must be true or false, not maybe", "it is the same as --format json"),
    (
        ("estimate", *MODEL, "--json", "--format", "markdown"),
        "--json contradicts --format markdown",
        "give one of them",
    ),
    (
        ("estimate", *MODEL, "--explain", "zero9"),
        "--explain zero9: no such row in the answer",
        "the rows are ddp, zero1, zero2, zero3, zero2+optimizer, zero3+optimizer, zero3+parameters",
    ),
    (
        ("estimate", *MODEL, "-o", "/no/such/directory/x.json"),
        "cannot write /no/such/directory/x.json: there is no directory /no/such/directory",
        "make it first",
    ),
    (("estimate", *MODEL, "-o", "/"), "cannot write /: it is a directory", "give the name of a file"),
    (
        ("estimate", *MODEL, "--gpu", "voodoo"),
        "unknown GPU 'voodoo'",
        "`fsdp-advisor gpus` lists all GPUs; a memory size such as 24GiB also works",
    ),
    (
        ("estimate", "--model", "./no/such/config.json"),
        "unknown model './no/such/config.json'",
        "there is no such file or directory",
    ),
    (("estimate", "--model", " "), "model must be at least 1 character long, not ' '", MODELS),
    (("recommend",), "model is missing", MODELS),
]


@pytest.mark.parametrize(
    ("arguments", "message", "hint"), REFUSED, ids=lambda v: " ".join(v) if type(v) is tuple else ""
)
def test_bad_usage_is_two_lines_and_status_2(
    arguments: tuple[str, ...], message: str, hint: str, cli: Callable[..., Any]
) -> None:
    ran = cli(*arguments)
    assert (ran.status, ran.out, ran.err) == (2, "", f"fsdp-advisor: {message}\nhint: {hint}\n")


@pytest.mark.parametrize(
    "model", ["a\n\x1b[31mb", "\udcff", "9" * 5000, "x" * 5000, "[/red]", "nobody/nothing", "../../etc/passwd", "-5"]
)
def test_hostile_names_stay_on_their_line(model: str, cli: Callable[..., Any]) -> None:
    ran = cli("estimate", "--model", model)
    assert ran.status == 2
    assert ran.out == ""
    lines = ran.err.splitlines()
    assert len(lines) == 2
    assert all(line.isprintable() and len(line) < 500 for line in lines)


def test_a_bug_is_no_traceback(cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("one\ntwo")

    monkeypatch.setattr("fsdp_advisor.cli.estimate.render", broken)
    ran = cli("estimate", *MODEL)
    assert ran.status == 2
    assert ran.err.startswith("fsdp-advisor: internal error: RuntimeError: one two\nhint: ")


def test_an_interrupt_is_130(cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("fsdp_advisor.cli.estimate.render", interrupted)
    ran = cli("estimate", *MODEL)
    assert (ran.status, ran.out, ran.err) == (130, "", "fsdp-advisor: interrupted\n")


def test_exit_status_follows_what_is_shown(cli: Callable[..., Any]) -> None:
    assert cli("estimate", *MODEL, "--gpus", "4").status == 0
    assert cli("estimate", *MODEL, "--gpus", "4", "--strategy", "ddp").status == 1
    assert cli("estimate", "--model", "7e9", "--gpu", "H100", "--strategy", "zero3", "--gpus", "64").status == 1


def test_underscores_are_dashes(cli: Callable[..., Any]) -> None:
    dashes = (
        "--seq-len",
        "512",
        "--micro-batch-size=2",
        "--activation-checkpointing",
        "full",
        "--offload-device",
        "cpu",
    )
    expected = cli("estimate", *MODEL, *dashes, "--json")
    underscored = [a.replace("-", "_").replace("__", "--", 1) if a.startswith("--") else a for a in dashes]
    assert "--seq_len" in underscored
    assert "--micro_batch_size=2" in underscored
    assert cli("estimate", *MODEL, *underscored, "--json") == expected
    alias = [a.replace("--micro-batch-size", "--per_device_train_batch_size") for a in dashes]
    assert cli("estimate", *MODEL, *alias, "--json") == expected


def test_json_is_the_python_answer(cli: Callable[..., Any]) -> None:
    from fsdp_advisor import estimate

    ran = cli("estimate", *MODEL, "--gpus", "4", "--format", "json")
    answer = estimate(model="meta-llama/Llama-2-7b-hf", gpu="H100", gpus=4).as_dict()
    assert json.loads(ran.out) == json.loads(json.dumps(answer))
    assert "timeline" not in ran.out


@pytest.mark.parametrize(
    "row", ["ddp", "zero1", "zero2", "zero3", "hsdp", "ZERO3+optimizer", "zero3+parameters", "zero3+none"]
)
def test_every_row_can_be_explained(row: str, cli: Callable[..., Any]) -> None:
    ran = cli("estimate", *MODEL, "--gpus", "8", "--nnodes", "2", "--explain", row)
    assert ran.status == 0
    assert "needed at the peak" in ran.out
    assert "Loss (logits and their gradients)" in ran.out
    assert re.search(r"^optimizer +optimizer step", ran.out, re.MULTILINE)


def test_an_explanation_is_in_json_and_markdown_too(cli: Callable[..., Any]) -> None:
    job = ("estimate", *MODEL, "--gpus", "8", "--nnodes", "2", "--explain", "zero3")
    assert all(e["timeline"] for e in json.loads(cli(*job, "--json").out)["estimates"])
    assert "```text\n" in cli(*job, "--format", "markdown").out


def test_a_strategy_explains_its_only_row(cli: Callable[..., Any]) -> None:
    ran = cli("estimate", *MODEL, "--gpus", "8", "--offload", "parameters", "--explain", "zero3")
    assert "ZeRO-3 + parameter offload (fsdp2): needs" in ran.out


@pytest.mark.parametrize("refused", ["plain", "fsdp2 plain"])
def test_a_peak_that_is_unknown_is_said_to_be(
    refused: str, cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model whose code refuses a variant: its states are known, its peak is not."""
    recorded = Resolved.tape

    def tape(self: Resolved, variant: TapeKey) -> Tape:
        if variant.engine in refused.split():
            raise NotRecordable("it refuses", hint="none")
        return recorded(self, variant)

    monkeypatch.setattr(Resolved, "tape", tape)
    job = ("estimate", *MODEL, "--gpus", "2", "--explain", "ddp")
    for columns in (60, 120):
        text = cli(*job, columns=columns).out
        assert "peak unknown" in text
        assert "DDP (ddp): the peak is unknown" in text
        assert "it refuses" in " ".join(text.split())
        assert "textbook" not in text
        assert ("needs: memory of one GPU" in " ".join(text.split())) == (refused == "plain")
    markdown = cli(*job, "--format", "markdown").out
    assert "| DDP | ddp | " + ("? | " if refused == "plain" else "") in markdown
    fits = {(e["strategy"], e["offload"]): e["fits"] for e in json.loads(cli(*job, "--json").out)["estimates"]}
    assert fits["zero1", "none"] is None


def test_notes_go_to_stderr_unless_quiet(cli: Callable[..., Any]) -> None:
    long = ("estimate", *MODEL, "--gpus", "8", "--seq-len", "8192")
    loud, quiet = cli(*long), cli(*long, "-q")
    assert loud.err == "note: seq_len 8192 is past the model's maximum of 4096 tokens\n"
    assert quiet.err == ""
    assert loud.out == quiet.out


def test_an_output_file_is_overwritten_only_with_force(cli: Callable[..., Any], tmp_path: Path) -> None:
    path = tmp_path / "answer.json"
    job = ("estimate", *MODEL, "--json", "-o", str(path))
    ran = cli(*job)
    assert ran.out == ""
    first = path.read_text()
    assert json.loads(first)["schema_version"] == 1
    refused = cli(*job, "--gpus", "8")
    assert (refused.status, refused.err) == (2, f"fsdp-advisor: {path} exists\nhint: --force overwrites it\n")
    assert path.read_text() == first
    assert cli(*job, "--gpus", "8", "--force").status == 0
    assert json.loads(path.read_text())["request"]["gpus"] == 8


@pytest.mark.parametrize("command", [("estimate",), ("export", "ddp")], ids=" ".join)
def test_a_dash_is_standard_output(
    cli: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    job = (*command, "--model", "gpt2", "--gpu", "H100", "--strategy", "ddp", "-q")
    assert cli(*job, "-o", "-").out == cli(*job).out
    assert not list(tmp_path.iterdir())


def test_nothing_is_written_for_a_bad_job(cli: Callable[..., Any], tmp_path: Path) -> None:
    path = tmp_path / "answer.json"
    assert cli("estimate", *MODEL, "--gpus", "0", "-o", str(path)).status == 2
    assert cli("estimate", *MODEL, "--explain", "nothing", "-o", str(path)).status == 2
    assert not path.exists()


def test_images_are_counted_as_images(cli: Callable[..., Any]) -> None:
    job = (
        "estimate",
        "--model",
        "google/vit-base-patch16-224",
        "--gpus",
        "2",
        "--gpu",
        "H100",
        "--micro-batch-size",
        "8",
    )
    (ddp, *_) = json.loads(cli(*job, "--json").out)["estimates"]
    rate = float(f"{8 / ddp['step_seconds']:.3g}")
    images = f"{rate:,.0f}" if rate >= 100 else f"{rate:g}"
    shown = cli(*job, "--explain", "ddp", columns=120).out
    assert "micro-batch 8, images of 197 tokens," in shown and "tokens/s" not in shown
    assert re.search(rf"^DDP .* {images} ", shown, re.MULTILINE) and f"{images} images/s per GPU" in shown
    assert "images/s: per GPU." in shown and f"; {images} images/s per GPU" in " ".join(
        cli(*job, columns=50).out.split()
    )
    assert "| images/s per GPU |" in cli(*job, "--format", "markdown").out


def test_models_are_listed_and_found_by_name_and_kind(cli: Callable[..., Any]) -> None:
    everything = json.loads(cli("models", "--json").out)
    (found,) = json.loads(cli("models", "llama-2-7b-HF", "--json").out)
    assert found in everything
    assert {"id", "aliases", "task", "parameters", "max_seq_len", "model_type", "source", "experts"} == set(found)
    assert (found["id"], found["parameters"]) == ("meta-llama/Llama-2-7b-hf", 6_738_415_616)
    types = {row["model_type"] for row in json.loads(cli("models", "moe", "--json").out)}
    assert not types & {"llama", "qwen3", "gemma4_text", "bert"}
    assert types >= {"qwen3_moe", "mixtral", "deepseek_v2", "deepseek_v3", "gpt_oss", "glm4_moe"}, (
        "found by what they are"
    )
    for columns in (40, 60, 120):
        text = cli("models", columns=columns).out.replace("\n", "")
        assert all(row["id"] in text for row in everything) or columns == 40
    nothing = cli("models", "no such model")
    assert (nothing.status, nothing.out, nothing.err) == (0, "", "note: nothing matches 'no such model'\n")
    assert json.loads(cli("models", "no such model", "--json").out) == []


def test_gpus_are_listed_and_found_by_name(cli: Callable[..., Any]) -> None:
    rows = json.loads(cli("gpus", "--json").out)
    assert len(rows) > 20
    assert all(row["memory_bytes"] > 0 and row["source"] for row in rows)
    (row,) = json.loads(cli("gpus", "4090", "--json").out)
    assert row["name"] == "RTX-4090"


def test_version_is_printed(cli: Callable[..., Any]) -> None:
    ran = cli("--version")
    assert ran.status == 0
    assert re.fullmatch(r"fsdp-advisor \S.*\n", ran.out)


def test_help_without_a_command_names_every_command(cli: Callable[..., Any]) -> None:
    ran = cli()
    assert ran.status == 0 and ran.err == ""
    assert cli("--help") == cli("-h") == ran
    for command in COMMANDS:
        assert re.search(rf"^  {command}  +\S", ran.out, re.MULTILINE)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_every_command_fits_80_columns(command: str, cli: Callable[..., Any]) -> None:
    for columns in (60, 80):
        ran = cli(*command.split(), "--help", columns=columns)
        assert (ran.status, ran.err) == (0, "")
        assert ran.out.startswith(f"usage: fsdp-advisor {command} ")
        assert max(map(len, ran.out.splitlines())) <= columns or columns < 80
    assert cli(*command.split(), "-h", columns=80) == ran


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_help_texts_begin_with_a_word_and_have_no_word_longer_than_a_line(command: Command) -> None:
    kinds = [getattr(import_module(f"fsdp_advisor.cli.{command.module}"), command.options), command.request]
    names = {*get_args(TrainingTask), *(name for name in FRAMEWORK_NAMES.values() if name.islower())}
    for field in (field for kind in kinds if kind is not None for field in fields_of(kind).values()):
        first, *rest = field.rule.about.removeprefix("the ").split()
        assert re.fullmatch(r"[A-Za-z]+(?:[-'][a-z]+)*[,:]?", first) and first.rstrip(",:") not in names, (
            field.rule.about
        )
        assert max(map(len, rest), default=0) <= 50, field.rule.about  # the width of the texts on 80 columns


def test_help_says_how_to_switch_off_a_flag(cli: Callable[..., Any]) -> None:
    assert "[default: yes; --no-use-orig-params switches it off]" in " ".join(cli("estimate", "--help").out.split())
    assert "[default: yes; --no-predict switches it off]" in " ".join(cli("rehearse", "--help").out.split())


def test_help_lists_every_option_of_the_contract(cli: Callable[..., Any]) -> None:
    ran = cli("estimate", "--help", columns=100)
    listed = set(re.findall(r"(?<![\w-])--?[a-z][a-z0-9-]*", ran.out))
    assert set(CONTRACT) <= listed
    assert {dashed(name) for name, field in fields_of(EstimateRequest).items() if not field.rule.hidden} <= listed
    assert "--reserved" not in listed


@pytest.mark.parametrize(("command", "kind"), [("estimate", EstimateRequest), ("recommend", RecommendRequest)])
def test_help_names_choices_and_defaults(command: str, kind: type[EstimateRequest], cli: Callable[..., Any]) -> None:
    text = " ".join(cli(command, "--help").out.split())
    for name, field in fields_of(kind).items():
        if field.rule.hidden:
            continue
        assert ", ".join(field.choices) in text, name
        has_default = field.default not in (None, ()) and field.kind is not bool  # a flag is off by default
        if has_default and field.rule.default is None and name not in getattr(kind, "SEARCHED", ()):
            assert f"[default: {field.default}]" in text, name


def test_reserved_is_accepted_without_effect(cli: Callable[..., Any]) -> None:
    plain, reserved = cli("estimate", *MODEL, "--gpus", "8"), cli("estimate", *MODEL, "--gpus", "8", "--reserved")
    assert plain == reserved


def test_main_returns_the_status_in_process() -> None:
    assert main(["--version"]) == 0


def test_the_module_runs_as_the_command() -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "fsdp_advisor", "--version"], capture_output=True, text=True, check=True
    )
    assert ran.stdout.startswith("fsdp-advisor ")
