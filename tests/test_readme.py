"""The README agrees with the program: its commands run, and its outputs are current.

`pytest tests/test_readme.py --update-golden` writes the current outputs into it.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path

import pytest
from matrix import of_today

from fsdp_advisor.cli import main
from fsdp_advisor.job.fields import fields_of
from fsdp_advisor.job.request import EstimateRequest
from fsdp_advisor.model.catalog import entries

pytestmark = pytest.mark.slow

README = Path(__file__).parents[1] / "README.md"
ARCHITECTURE = README.parent / "fsdp_advisor" / "ARCHITECTURE.md"
CONSOLE = re.compile(r"```console\n\$ (fsdp-advisor [^\n]*)\n(.*?)```", re.DOTALL)
AXOLOTL = (
    "{base_model: meta-llama/Llama-2-7b-hf, micro_batch_size: 2, fsdp_version: 2, dp_shard_size: 8, fsdp_config: {}}"
)
OUT_OF_MEMORY = (
    "CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 has a total capacity of 39.39 GiB of which 1.00 GiB is free. Of the "
    "allocated memory 34.00 GiB is allocated by PyTorch, and 3.00 GiB is reserved by PyTorch but unallocated."
)
SMALL = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """A function that runs a command in a folder with the files that the README names, and returns what it prints."""
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    for name, value in (("COLUMNS", "120"), ("NO_COLOR", "1"), ("FSDP_ADVISOR_CACHE", str(tmp_path / "cache"))):
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my-model").mkdir()
    (tmp_path / "my-model" / "config.json").write_text(json.dumps(SMALL))
    (tmp_path / "axolotl.yaml").write_text(AXOLOTL)
    (tmp_path / "train.log").write_text(OUT_OF_MEMORY)

    def ran(command: str) -> str:
        program, *words = shlex.split(command, comments=True)
        status = main(words)
        printed = capsys.readouterr()
        assert program == "fsdp-advisor" and status in (0, 1), printed.err
        return printed.out

    return ran


def test_outputs_are_current(run: Callable[[str], str], request: pytest.FixtureRequest) -> None:
    text = README.read_text()
    shown = CONSOLE.findall(text)
    assert shown
    for command, output in shown:
        printed = run(command)
        if request.config.getoption("--update-golden"):
            text = text.replace(f"$ {command}\n{output}```", f"$ {command}\n{printed}```")
        else:
            assert printed == output
    if request.config.getoption("--update-golden"):
        README.write_text(text)


COMMANDS = re.findall(r"^(fsdp-advisor (?!rehearse)[^\n]*)", README.read_text(), re.MULTILINE)
"""All commands but `rehearse`, which tests/rehearsal runs."""


@pytest.mark.parametrize("command", of_today(COMMANDS, 5))
def test_every_command_of_the_readme_prints_an_answer(command: str, run: Callable[[str], str]) -> None:
    assert run(command)


@pytest.mark.parametrize("document", [README, ARCHITECTURE], ids=lambda path: path.name)
def test_python_examples_run(document: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", document.read_text(), re.DOTALL)
    assert blocks
    for block in blocks:
        exec(compile(block, str(document), "exec"), {})


def test_readme_is_short() -> None:
    lines = README.read_text().splitlines()
    assert len(lines) <= 180
    assert max(map(len, lines)) <= 120


@pytest.mark.parametrize("name", ["README.md", "CHANGELOG.md"])
def test_counts_of_the_catalog_are_current(name: str) -> None:
    counts = re.findall(r"The catalog has (\d+) models.*?(\d+) of them", README.with_name(name).read_text())
    assert counts == [(str(len(entries())), str(sum(entry.has_tapes for entry in entries())))]


def test_options_in_readme_exist() -> None:
    table = re.findall(r"^\| (`--[^|]*) \|", README.read_text(), re.MULTILINE)
    options = {name for row in table for name in re.findall(r"`--([\w-]+)`", row)}
    assert len(options) > 10
    assert options <= {name.replace("_", "-") for name in fields_of(EstimateRequest)} | {"validate"}


def test_test_command_is_marked_for_ci() -> None:
    assert re.search(r"<!-- the test command -->\n```sh\n[^\n]*pytest[^\n]*\n```", README.read_text())


@pytest.mark.parametrize("package", ["server", "rehearsal"])
def test_the_readme_of_a_package_lists_every_module(package: str) -> None:
    folder = ARCHITECTURE.parent / package
    rows = re.findall(r"^\| (`[^|]*) \|", (folder / "README.md").read_text(), re.MULTILINE)
    patterns = [pattern for row in rows for pattern in re.findall(r"`([^`]+)`", row)]
    modules = {path.name for path in folder.glob("*.py")} - {"__init__.py"}
    assert {module for module in modules if not any(fnmatch(module, pattern) for pattern in patterns)} == set()


@pytest.mark.parametrize("document", ["CONTRIBUTING.md", "tests/README.md"])
def test_paths_in_guides_for_contributors_exist(document: str) -> None:
    text = (README.parent / document).read_text()
    paths = set(re.findall(r"\b(?:tests|fsdp_advisor)/[\w./-]*\w", text))
    assert len(paths) > 10
    missing = {path for path in paths if "NAME" not in path and not (README.parent / path).exists()}
    assert not missing


def test_paths_in_architecture_exist() -> None:
    paths = set(re.findall(r"`(\w+/[\w/]+\.py)`", ARCHITECTURE.read_text()))
    assert len(paths) > 20
    roots = (ARCHITECTURE.parent, README.parent)
    assert not {path for path in paths if not any((root / path).exists() for root in roots)}
