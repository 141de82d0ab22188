"""What is shipped: the wheel, also by way of the sdist; and the container's image, whose commands are run here without an engine.

The image's build and start commands are read from the Dockerfile and run in a virtual environment of their own: /app, /source
and /tmp become folders of this test, and `COPY . .` brings what .dockerignore lets through.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from http.client import HTTPConnection
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = {f"fsdp_advisor/{p.relative_to(ROOT).as_posix()}" for kind in ("templates", "static") for p in (ROOT / "web" / kind).iterdir()}  # fmt: skip
LONGEST = 10
"""Seconds that a server has to answer for the first time."""


# The wheel


def built(kind: str, source: Path, to: Path) -> Path:
    command = [sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", str(to)]
    subprocess.run(command, cwd=source, check=True, capture_output=True)
    return next(to.iterdir())


def names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}


def test_the_sdist_makes_the_same_wheel_as_a_checkout(tmp_path: Path) -> None:
    wheel = names(built("wheel", ROOT, tmp_path / "wheel"))
    data = {"records/README.md", "model/catalog.zip", "validation/published.csv"}
    assert PAGES and wheel >= PAGES | {f"fsdp_advisor/{name}" for name in data}
    assert {name.partition("/")[0] for name in wheel} == {"fsdp_advisor"}
    assert not [name for name in wheel if "screenshots" in name or name.endswith(".pyc")]
    with tarfile.open(built("sdist", ROOT, tmp_path / "sdist")) as archive:
        archive.extractall(tmp_path / "source", filter="data")
    source = next((tmp_path / "source").iterdir())
    assert names(built("wheel", source, tmp_path / "again")) == wheel


# The image


@dataclass(frozen=True)
class Instruction:
    word: str
    text: str


def dockerfile() -> list[list[Instruction]]:
    """The instructions, stage by stage; those before the first FROM come first. Whatever is not understood is an error."""
    text = re.sub(r"^\s*#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE)
    stages: list[list[Instruction]] = [[]]
    for line in filter(str.strip, re.sub(r"\\\n\s*", "", text).splitlines()):
        match = re.fullmatch(r"(ARG|FROM|ENV|WORKDIR|RUN|COPY|USER|EXPOSE|HEALTHCHECK|CMD) +(\S.*)", line)
        assert match, f"not a Dockerfile instruction: {line}"
        if match[1] == "FROM":
            stages.append([])
        stages[-1].append(Instruction(match[1], match[2]))
    return stages


def only(stage: list[Instruction], word: str) -> str:
    (found,) = [i.text for i in stage if i.word == word]
    return found


def variables(stage: list[Instruction]) -> dict[str, str]:
    """ENV's, with ARG's defaults."""
    pairs = [p for i in stage if i.word in ("ENV", "ARG") for p in i.text.split(" ")]
    return {name: value.strip('"') for name, _, value in (p.partition("=") for p in pairs)}


def test_the_image_is_small_and_safe() -> None:
    arguments, build, last = dockerfile()
    assert only(arguments, "ARG").startswith("PYTHON=3.")
    assert only(build, "FROM") == "python:${PYTHON}-slim AS build"
    assert only(last, "FROM") == "python:${PYTHON}-slim"
    assert variables(build)["EXTRAS"] == ""  # no PyTorch unless asked for
    assert int(only(last, "USER")) > 0
    assert only(last, "COPY") == "--from=build /app /app"
    words = [i.word for i in last]
    assert words.index("USER") < words.index("CMD")
    check = only(last, "HEALTHCHECK")
    assert json.loads(check[check.index("[") :])[0] == "python" and "/healthz" in check  # slim images have no curl
    made = variables(last)
    assert (made["FSDP_ADVISOR_HOST"], made["PORT"]) == ("0.0.0.0", only(last, "EXPOSE"))
    assert made["FSDP_ADVISOR_CACHE"].startswith("/tmp/")


def let_through(path: str) -> bool:
    """Whether .dockerignore lets a file into the build: the last pattern that matches it, or a folder of it, decides."""
    ignored = False
    places = [path, *(p.as_posix() for p in Path(path).parents)]
    for pattern in (ROOT / ".dockerignore").read_text().splitlines():
        if not pattern or pattern.startswith("#"):
            continue
        glob = pattern.lstrip("!").rstrip("/").removeprefix("**/")
        if any(fnmatch(place if "**/" not in pattern else Path(place).name, glob) for place in places):
            ignored = not pattern.startswith("!")
    return not ignored


def copied(to: Path) -> None:
    for path in ROOT.rglob("*"):
        name = path.relative_to(ROOT)
        if name.parts[0] not in (".git", ".venv") and path.is_file() and let_through(name.as_posix()):
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, to / name)


@dataclass(frozen=True)
class Container:
    root: Path
    port: int
    process: subprocess.Popen[str]

    def get(self, path: str) -> tuple[int, bytes]:
        connection = HTTPConnection("127.0.0.1", self.port, timeout=20)
        connection.request("GET", path)
        response = connection.getresponse()
        body = response.read()
        connection.close()
        return response.status, body


def outside(root: Path, text: str) -> str:
    """A path or command of the image, as it is here."""
    return re.sub(r"(?<![\w./])/(app|source|tmp)\b", lambda m: f"{root}/{m[1]}", text)


def interpreter() -> str:
    """The image's Python where this machine has it, else the one that runs the tests."""
    version = only(dockerfile()[0], "ARG").partition("=")[2]
    found = shutil.which(f"python{version}")
    usable = found and subprocess.run([found, "-c", "import ensurepip"], capture_output=True).returncode == 0
    return found if found and usable else sys.executable


def files(folder: Path) -> dict[Path, int]:
    return {path: path.lstat().st_mtime_ns for path in folder.rglob("*")}


@pytest.fixture(scope="module")
def container(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Container]:
    """The image, built and started; nothing but /tmp can be written."""
    root = tmp_path_factory.mktemp("image")
    _, build, last = dockerfile()
    (root / "tmp").mkdir()
    clean = {
        k: v for k, v in os.environ.items() if not k.startswith(("FSDP_ADVISOR_", "PYTHON", "VIRTUAL_ENV", "PORT"))
    }
    for step in build:
        if step.word == "WORKDIR":
            (root / "source").mkdir()
        elif step.word == "COPY":
            assert step.text == ". ."
            copied(root / "source")
        elif step.word == "RUN":
            given = variables(build) | {"PIP_NO_CACHE_DIR": "0"}  # this machine's wheels do
            subprocess.run(outside(root, step.text).replace("python -m venv", f"{interpreter()} -m venv"), shell=True, check=True, cwd=root / "source", env=clean | given, capture_output=True)  # fmt: skip
    shutil.rmtree(root / "source")  # the second stage has /app alone
    subprocess.run(["chmod", "-R", "a-w", str(root / "app")], check=True)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    environment = {k: outside(root, v).replace("$PATH", clean["PATH"]) for k, v in variables(last).items()}
    environment |= {"PORT": str(port), "FSDP_ADVISOR_HOST": "127.0.0.1"}
    before = files(root / "app")
    process = subprocess.Popen(
        [shutil.which("fsdp-advisor", path=environment["PATH"]) or "", *start(last)[1:]],
        env=environment,
        cwd=root / "tmp",
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline().startswith("fsdp-advisor answers on"), process.communicate()[1]
    yield Container(root, port, process)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=LONGEST)
    assert process.returncode == 0
    assert files(root / "app") == before, "something was written outside /tmp"
    subprocess.run(["chmod", "-R", "u+w", str(root / "app")], check=True)


def start(stage: list[Instruction]) -> list[str]:
    parts: list[str] = json.loads(only(stage, "CMD"))
    assert parts[0] == "fsdp-advisor"
    return parts


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("/", b"meta-llama/Llama-3.1-8B"),
        ("/static/page.css", b"{"),
        ("/static/page.js", b"addEventListener"),
        ("/how", b"tape"),
        ("/accuracy", b"66 training runs"),
        ("/models", b"meta-llama"),
        ("/gpus", b"H100"),
        ("/api/v1/estimate?model=meta-llama/Llama-2-7b-hf&gpus=4", b'"schema_version":1'),
        ("/openapi.json", b'"openapi"'),
        ("/healthz", b"up"),
        ("/readyz", b"ready"),
        ("/metrics", b"fsdp_advisor_requests_total"),
    ],
)
def test_the_base_install_answers(container: Container, path: str, says: bytes) -> None:
    status, body = container.get(path)
    assert status == 200, body[:500]
    assert says in body


def test_the_base_install_has_no_pytorch(container: Container) -> None:
    installed = {
        p.name.partition("-")[0] for p in (container.root / "app/lib").glob("python3*/site-packages/*.dist-info")
    }
    assert "fsdp_advisor" in installed
    assert not installed & {"torch", "transformers", "pytest", "deepspeed", "accelerate"}


def test_the_health_check(container: Container) -> None:
    check = only(dockerfile()[-1], "HEALTHCHECK")
    command = json.loads(check[check.index("[") :])
    environment = {"PATH": f"{container.root}/app/bin", "PORT": str(container.port)}
    assert subprocess.run([f"{container.root}/app/bin/{command[0]}", *command[1:]], env=environment).returncode == 0
    wrong = environment | {"PORT": "9"}
    ran = subprocess.run([f"{container.root}/app/bin/{command[0]}", *command[1:]], env=wrong, capture_output=True)
    assert ran.returncode != 0
