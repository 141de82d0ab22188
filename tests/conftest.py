"""Fixtures of all tests. With CI=true a skipped test is a failure, because every tool that a test needs must be installed, except for
one that CI_WITHOUT names.
"""

from __future__ import annotations

import gc
import importlib.util
import json
import os
import sys
import zipfile
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings
from matrix import ALL, examples
from tiny_llama import LLAMA, OTHER, PARAMETERS, SHIPPED, with_tapes

from fsdp_advisor.model import cache, catalog
from fsdp_advisor.model.profile import Profile
from fsdp_advisor.model.store import RECORDING, dump

if TYPE_CHECKING:
    from fastapi.testclient import TestClient

settings.register_profile("any speed", settings(), deadline=None, max_examples=examples(100))  # a busy machine is slow
settings.load_profile("any speed")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite the golden files and the README's outputs")


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """With `-n`, neighbouring tests run on the same worker and share its fixtures and caches."""
    if config.getoption("numprocesses", None) and config.option.dist == "no":
        config.option.dist = "worksteal"


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Turn the garbage collector off while modules are imported, and make it run rarely afterwards. It takes a fifth of the time to
    collect tests.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.set_threshold(50_000, 20, 20)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not ALL and (left := [item for item in items if item.get_closest_marker("with_all_cases")]):
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if item not in left]


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if os.environ.get("CI") != "true" or reporter is None or exitstatus != pytest.ExitCode.OK:
        return
    without = os.environ.get("CI_WITHOUT")  # the package that .ci/run could not install, as it says
    skipped = [
        report
        for report in reporter.stats.get("skipped", ())
        if without is None or f"{without} is not installed" not in str(report.longrepr)
    ]
    if skipped:
        for report in skipped:
            reporter.write_line(f"skipped, which CI does not allow: {report.nodeid}", red=True)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.fixture(autouse=True)
def objects_of_other_tests() -> None:
    """Freeze the objects of imported modules, collected tests and fixtures (a million), so that the garbage collections before each
    recorded or simulated step skip them.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def recorded() -> Profile:
    """A tiny llama with two tapes."""
    from fsdp_advisor.recording import Recorder, TransformersSource

    recorder = Recorder(TransformersSource(LLAMA, name="tiny-org/Tiny-Llama", task="causal-lm"))
    for variant in (SHIPPED, OTHER):
        recorder.profile.tapes[variant.name] = recorder.tape(variant)
    return recorder.profile


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The config.json of a tiny llama."""
    path = tmp_path_factory.mktemp("model") / "config.json"
    path.write_text(json.dumps(LLAMA))
    return str(path)


@pytest.fixture(scope="session")
def client() -> Iterator[TestClient]:
    """The application in this process, without a network and with one worker, because tests send one request after the other."""
    from fastapi.testclient import TestClient

    from fsdp_advisor.server import Settings, create_app

    with TestClient(create_app(Settings(workers=1, log_level="error"))) as running:
        yield running


@pytest.fixture(scope="session")
def torchao(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Make torchao importable from the environment of rehearsals. If it were installed here, transformers would import it for each
    model, and print that it has no CPU kernels.
    """
    pytest.importorskip("torch")
    if importlib.util.find_spec("torchao") is not None:
        return
    python = os.environ.get("REHEARSAL_PYTHON")
    if python is None:
        assert "CI" not in os.environ, "CI makes the environment and sets REHEARSAL_PYTHON"
        pytest.skip("neither this environment nor one that REHEARSAL_PYTHON names has torchao")
    from transformers.utils import is_torchao_available

    is_torchao_available()  # transformers remembers the answer
    (site,) = Path(python).parents[1].glob("lib/python*/site-packages")
    folder = tmp_path_factory.mktemp("torchao")
    for path in site.glob("torchao*"):
        (folder / path.name).symlink_to(path)
    sys.path.append(str(folder))


@pytest.fixture(scope="session")
def catalog_zip(recorded: Profile, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("catalog") / "catalog.zip"
    shipped = {SHIPPED.name: recorded.tapes[SHIPPED.name]}
    row = {
        "id": recorded.name, "aliases": ["tiny", "tiny-org/Tiny-Llama-chat"], "task": recorded.task,
        "parameters": PARAMETERS, "max_seq_len": 256, "model_type": "llama", "source": "this test", "member": "tiny.profile",
        "experts": None, "tapes": "all", "recording": RECORDING,
    }  # fmt: skip
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("tiny.profile", dump(with_tapes(recorded, shipped), small=True))
        archive.writestr(catalog.INDEX, json.dumps([row]))
        archive.writestr(catalog.CONFIGS, json.dumps({"configs": {}, "defaults": {}}))  # tests record its configuration
    return path


@pytest.fixture
def home(catalog_zip: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A home folder with a catalog of one model and an empty cache. In-memory caches are cleared."""

    def forget() -> None:
        for memory in (
            catalog.entries,
            catalog.entries_by_name,
            catalog.entries_by_short_name,
            catalog.profile,
            cache.installed_versions,
        ):
            getattr(memory, "cache_clear", lambda: None)()

    monkeypatch.setattr(catalog, "PATH", catalog_zip)
    monkeypatch.setenv("FSDP_ADVISOR_CACHE", str(tmp_path / "cache"))
    forget()
    yield tmp_path
    monkeypatch.undo()
    forget()


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Compare a text with a file of `golden/` next to the test's file; `--update-golden` rewrites that file."""

    def compare(name: str, text: str) -> None:
        path = request.path.with_name("golden") / name
        if request.config.getoption("--update-golden"):
            path.write_text(text, encoding="utf-8")
        assert text == path.read_text(encoding="utf-8")

    return compare
