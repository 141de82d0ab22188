"""The wheel, the sdist, the declared dependencies and the Dockerfile."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from importlib.metadata import Distribution, distribution, packages_distributions
from pathlib import Path
from typing import Any

import pytest
from matrix import in_turn
from packaging.requirements import Requirement

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
HEAVY = ("recording", "validation", "rehearsal")
"""Packages that may import what the extras install."""


def build(kind: str, source: Path, to: Path) -> Path:
    command = [sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", str(to)]
    subprocess.run(command, cwd=source, check=True, capture_output=True)
    return next(to.iterdir())


def names(wheel: Path) -> set[str]:
    """The files of a wheel without its metadata."""
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("wheel", ROOT, tmp_path_factory.mktemp("wheel"))


def test_wheel_contains_the_package_and_its_data(wheel: Path) -> None:
    files = names(wheel)
    pages = [path for kind in ("templates", "static") for path in (ROOT / "web" / kind).iterdir()]
    assert files >= {f"fsdp_advisor/{path.relative_to(ROOT).as_posix()}" for path in pages}
    assert files >= {path.relative_to(ROOT).as_posix() for path in (ROOT / "fsdp_advisor").rglob("*.py")}
    data = (
        "model/adapted.zip",
        "model/catalog.zip",
        "model/architectures.yaml",
        "validation/published.csv",
        "records/README.md",
        "py.typed",
    )
    assert files >= {f"fsdp_advisor/{name}" for name in data}
    assert any(name.startswith("fsdp_advisor/export/templates/") for name in files)


def test_wheel_contains_nothing_else(wheel: Path) -> None:
    files = names(wheel)
    assert {name.partition("/")[0] for name in files} == {"fsdp_advisor"}
    assert not [name for name in files if "screenshots" in name or name.endswith(".pyc")]


def test_wheel_contains_licence_and_command(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        metadata = {name.partition(".dist-info/")[2]: name for name in archive.namelist() if ".dist-info/" in name}
        assert "licenses/LICENSE" in metadata
        assert b"fsdp-advisor = fsdp_advisor.cli:main" in archive.read(metadata["entry_points.txt"])


@in_turn(0, of=3)
def test_sdist_gives_the_same_wheel_as_a_checkout(wheel: Path, tmp_path: Path) -> None:
    with tarfile.open(build("sdist", ROOT, tmp_path / "sdist")) as archive:
        archive.extractall(tmp_path / "source", filter="data")
    (source,) = (tmp_path / "source").iterdir()
    assert {path.name for path in source.iterdir()} >= {
        "LICENSE",
        "README.md",
        "CHANGELOG.md",
        "CONTRIBUTING.md",
        "tests",
    }
    assert names(build("wheel", source, tmp_path / "again")) == names(wheel)


def _imported(path: Path) -> Iterator[str]:
    """The top-level packages that a file imports, also inside functions."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module.partition(".")[0]


def _normalized(distribution: str) -> str:
    return distribution.lower().replace("_", "-")


def test_base_install_has_every_package_that_is_imported() -> None:
    """`recording` and `validation` need the extra [torch], `rehearsal` its own; everything else works with the base dependencies."""
    declared = {_normalized(re.split(r"[^\w-]", line)[0]) for line in PROJECT["project"]["dependencies"]}
    # what fastapi, jinja2 and pydantic need
    declared |= {
        "starlette",
        "markupsafe",
        "pydantic-core",
        "typing-extensions",
    }
    distributions = packages_distributions()
    for path in (ROOT / "fsdp_advisor").rglob("*.py"):
        if path.relative_to(ROOT / "fsdp_advisor").parts[0] in HEAVY:
            continue
        for name in set(_imported(path)) - set(sys.stdlib_module_names) - {"fsdp_advisor"}:
            sources = {_normalized(distribution) for distribution in distributions.get(name, [name])}
            assert sources & declared, f"{path.relative_to(ROOT)} imports {name}"


def _required() -> dict[str, Distribution]:
    """The distributions that a base install brings, by name."""
    found: dict[str, Distribution] = {}
    pending = list(PROJECT["project"]["dependencies"])
    while pending:
        requirement = Requirement(pending.pop())
        name = _normalized(requirement.name)
        if name not in found and (requirement.marker is None or requirement.marker.evaluate({"extra": ""})):
            found[name] = distribution(name)
            pending += found[name].requires or ()
    return found


def test_base_install_estimates_without_torch(wheel: Path, tmp_path: Path) -> None:
    """The environment has the wheel and links to the installed packages that it requires, so that nothing is downloaded."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv")], check=True)
    (packages,) = tmp_path.glob("venv/lib/python*/site-packages")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(packages)
    required = _required()
    assert not required.keys() & {"torch", "transformers", "accelerate", "deepspeed"}
    for each in required.values():
        for name in {path.parts[0] for path in each.files or ()} - {"..", "__pycache__"}:
            (packages / name).symlink_to(Path(str(each.locate_file(name))))
    job = ["--model", "openai-community/gpt2", "--gpu", "H100", "--strategy", "ddp", "--json"]
    command = [tmp_path / "venv/bin/python", "-m", "fsdp_advisor", "estimate", *job]
    ran = subprocess.run(command, check=True, capture_output=True, text=True, cwd=tmp_path)
    assert '"schema_version"' in ran.stdout


def test_docker_context_contains_what_the_build_reads() -> None:
    allowed = {
        line[1:].rstrip("/") for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")
    }
    wheel = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]
    needed = {"pyproject.toml", PROJECT["project"]["readme"], *PROJECT["project"]["license-files"]}
    needed |= {*wheel["packages"], *wheel["force-include"]}
    assert needed <= allowed
    assert all((ROOT / name).exists() for name in allowed)


def test_docker_image_serves_as_an_unprivileged_user() -> None:
    text = (ROOT / "Dockerfile").read_text()
    last = text[text.rindex("\nFROM ") :]
    assert re.search(r"^USER [1-9]\d*$", last, re.MULTILINE)
    assert re.search(r'^CMD \["fsdp-advisor", "serve"\]$', last, re.MULTILINE)
    assert "/healthz" in last
    assert re.search(r'^ARG EXTRAS=""$', text, re.MULTILINE)  # no PyTorch unless requested
