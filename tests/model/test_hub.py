"""Downloads from the hub, which is a local server here: requests, errors, and use of the cache without a network."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from matrix import in_turn
from tiny_llama import LLAMA, NETWORK_HINT, PARAMETERS, SHIPPED, keep, python, write, written

from fsdp_advisor.errors import AdvisorError, HubError, UnknownModel, UnreadableConfig
from fsdp_advisor.model.profile import Profile
from fsdp_advisor.model.resolve import resolve

pytestmark = pytest.mark.usefixtures("home")


@dataclass
class Hub:
    """A fake hub on 127.0.0.1: its files, and the requests it received."""

    server: ThreadingHTTPServer
    files: dict[str, bytes] = field(default_factory=dict)
    refusals: dict[str, tuple[int, str | None]] = field(default_factory=dict)
    asked: list[tuple[str, str, str | None]] = field(default_factory=list)
    headers: bool = True

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    def do_HEAD(self) -> None:
        hub: Hub = self.server.hub  # type: ignore[attr-defined]
        hub.asked.append((self.command, self.path, self.headers.get("Authorization")))
        name, _, file = self.path[1:].partition("/resolve/")
        if name == "slow/model":
            time.sleep(3)
            return
        status, code = hub.refusals.get(name, (200, None) if name in hub.files else (404, "RepoNotFound"))
        if status == 200 and file.rpartition("/")[2] != "config.json":
            status, code = 404, "EntryNotFound"
        self.send_response(status)
        if code:
            self.send_header("X-Error-Code", code)
        if hub.headers:
            self.send_header("X-Repo-Commit", "c" * 40)
            self.send_header("ETag", f'"{hash(hub.files.get(name)) & 0xFFFFFFFF:040x}"')
        body = hub.files[name] if status == 200 else b""
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    do_GET = do_HEAD

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def hub(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    from huggingface_hub import constants

    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    hub = server.hub = Hub(server)  # type: ignore[attr-defined]
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(home / "hf" / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_ETAG_TIMEOUT", 1)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(home / "hf" / "token"))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    yield hub
    server.shutdown()
    server.server_close()


def test_config_of_a_hub_model_is_downloaded_once(hub: Hub, capfd: pytest.CaptureFixture[str]) -> None:
    hub.files["acme/model"] = json.dumps(LLAMA).encode()
    found = resolve("acme/model")
    assert (found.name, found.source, found.parameters, found.notes) == ("acme/model", "hub", PARAMETERS, ())
    assert {path for _, path, _ in hub.asked} == {"/acme/model/resolve/main/config.json"}  # and no weights
    assert {token for _, _, token in hub.asked} == {None}
    assert capfd.readouterr() == ("", "")
    hub.asked.clear()
    assert resolve("acme/model").parameters == PARAMETERS
    assert {method for method, _, _ in hub.asked} == {"HEAD"}  # an unchanged file is not downloaded again


def test_the_token_of_the_environment_is_sent_to_the_hub(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.files["acme/model"] = json.dumps(LLAMA).encode()
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    resolve("acme/model")
    assert {token for _, _, token in hub.asked} == {"Bearer hf_secret"}


def test_failed_request_is_not_repeated(hub: Hub) -> None:
    hub.refusals["acme/broken"] = (503, None)
    with pytest.raises(HubError):
        resolve("acme/broken")
    assert len(hub.asked) == 1


@pytest.mark.parametrize(
    ("name", "refusal", "kind", "message", "hint"),
    [
        (
            "acme/none", (404, "RepoNotFound"), UnknownModel, "unknown model 'acme/none'",
            "the hub has no such repository (if it is private, set HF_TOKEN)",
        ),
        (
            "acme/none", (401, "RepoNotFound"), UnknownModel, "unknown model 'acme/none'",
            "the hub has no such repository (if it is private, set HF_TOKEN)",
        ),
        (
            "tiny-org/Tiny-Lama", (404, "RepoNotFound"), UnknownModel, "unknown model 'tiny-org/Tiny-Lama'",
            "did you mean tiny-org/Tiny-Llama? (if it is private, set HF_TOKEN)",
        ),
        (
            "acme/gated", (403, "GatedRepo"), HubError, "acme/gated is gated on the hub",
            "accept its licence at {hub}/acme/gated, then set HF_TOKEN",
        ),
        (
            "acme/gated", (401, "GatedRepo"), HubError, "acme/gated is gated on the hub",
            "accept its licence at {hub}/acme/gated, then set HF_TOKEN",
        ),
        (
            "acme/closed", (403, None), HubError, "the hub refused acme/closed (HTTP status 403)",
            "check HF_TOKEN, and that its account can read {hub}/acme/closed",
        ),
        (
            "acme/adapter", (404, "EntryNotFound"), UnreadableConfig, "acme/adapter: the hub repository has no config.json",
            "if it is an adapter or a converted model, pass its base model instead",
        ),
        (
            "acme/broken", (500, None), HubError, "the hub could not deliver acme/broken (HTTP status 500)",
            "try again later",
        ),
        (
            "acme/busy", (429, None), HubError, "the hub could not deliver acme/busy (HTTP status 429)",
            "try again later",
        ),
        (
            "slow/model", (200, None), HubError,
            "slow/model is not in the catalog, and {hub} cannot be reached: no answer in time", NETWORK_HINT,
        ),
    ],
)  # fmt: skip
def test_hub_error_has_message_and_hint(
    hub: Hub, home: Path, name: str, refusal: tuple[int, str | None], kind: type[AdvisorError], message: str, hint: str,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    hub.refusals[name] = refusal
    with pytest.raises(kind) as caught:
        resolve(name)
    assert type(caught.value) is kind
    assert (caught.value.message, caught.value.hint) == (message.format(hub=hub.url), hint.format(hub=hub.url))
    assert not (home / "hf").exists()
    assert written(home) == []
    assert capfd.readouterr() == ("", "")


def test_server_that_is_not_a_hub_raises(hub: Hub) -> None:
    hub.files["acme/model"], hub.headers = b"<html>", False
    with pytest.raises(HubError) as caught:
        resolve("acme/model")
    assert caught.value.message == f"{hub.url} does not answer like a Hugging Face hub"
    assert caught.value.hint == "check HF_ENDPOINT and the proxy of the network"


def test_large_file_is_not_downloaded(hub: Hub, home: Path) -> None:
    hub.files["acme/huge"] = b" " * (2**22 + 1)
    with pytest.raises(UnreadableConfig, match="acme/huge: larger than 4 MiB"):
        resolve("acme/huge")
    assert [method for method, _, _ in hub.asked] == ["HEAD"]
    assert not (home / "hf").exists()


def test_configuration_on_the_hub_may_have_infinity(hub: Hub) -> None:
    hub.files["acme/inf"] = json.dumps(LLAMA | {"time_step_limit": [0.0, float("inf")]}).encode()
    assert resolve("acme/inf").parameters == PARAMETERS


def test_bad_configuration_on_the_hub_raises(hub: Hub) -> None:
    hub.files["acme/bad"] = b'{"model_type": "llama", "hidden_size": "big"}'
    with pytest.raises(UnreadableConfig, match='acme/bad: hidden_size must be an integer, not "big"'):
        resolve("acme/bad")


def test_missing_network_raises_at_once(hub: Hub, home: Path) -> None:
    hub.server.shutdown()
    hub.server.server_close()
    began = time.perf_counter()
    for name, guess in (("acme/model", ""), ("tiny-org/Tiny-Lama", "did you mean tiny-org/Tiny-Llama? If not, ")):
        with pytest.raises(HubError) as caught:
            resolve(name)
        assert (
            caught.value.message == f"{name} is not in the catalog, and {hub.url} cannot be reached: Connection refused"
        )
        assert caught.value.hint == guess + NETWORK_HINT
    assert time.perf_counter() - began < 1
    assert not (home / "hf").exists()


def test_downloaded_config_is_used_without_network_and_offline(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    hub.files["acme/model"] = json.dumps(LLAMA).encode()
    resolve("acme/model")
    hub.refusals["acme/model"] = (503, None)
    assert resolve("acme/model").notes == (
        "config.json is from the local Hugging Face cache: the hub could not deliver acme/model (HTTP status 503)",
    )
    hub.asked.clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert resolve("acme/model").notes == ("config.json is from the local Hugging Face cache: HF_HUB_OFFLINE is set",)
    assert hub.asked == []


def test_unwritable_hugging_face_cache_is_bypassed(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    hub.files["acme/model"] = json.dumps(LLAMA).encode()
    real = huggingface_hub.hf_hub_download

    def download(*args: object, cache_dir: str | None = None, **rest: object) -> str:
        if cache_dir is None:
            raise PermissionError(13, "Permission denied")
        return real(*args, cache_dir=cache_dir, **rest)  # type: ignore[arg-type,call-overload,no-any-return]

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    assert resolve("acme/model").parameters == PARAMETERS


def test_hub_variables_of_the_environment_are_used(hub: Hub, home: Path, recorded: Profile) -> None:
    """Sets only environment variables, in a new process."""
    keep(recorded, SHIPPED)  # so that the new processes do not record
    hub.files["acme/model"] = json.dumps(LLAMA).encode()
    code = (
        "import sys\nfrom fsdp_advisor.model.resolve import resolve\n"
        "try: print(resolve(sys.argv[1] if sys.argv[1:] else 'acme/model').parameters, 'torch' in sys.modules)\n"
        "except Exception as error: print(type(error).__name__, error.message, '|', error.hint)"
    )
    there = {"HF_ENDPOINT": hub.url, "HF_HOME": str(home / "other"), "NO_PROXY": "127.0.0.1"}
    ran = python(code, **there, HF_TOKEN="hf_abc")
    assert (ran.stdout, ran.stderr) == (f"{PARAMETERS} False\n", "")
    assert {token for _, _, token in hub.asked} == {"Bearer hf_abc"}
    assert (home / "other" / "hub" / "models--acme--model").is_dir()
    hub.asked.clear()
    ran = python(code, **there, HF_HUB_OFFLINE="1")
    assert (ran.stdout, ran.stderr) == (f"{PARAMETERS} False\n", "")
    ran = python(code, **there | {"HF_HOME": str(home / "none")}, HF_HUB_OFFLINE="1")
    assert ran.stdout == (
        "HubError acme/model is not in the catalog, and HF_HUB_OFFLINE forbids access to the hub | "
        "unset HF_HUB_OFFLINE, or pass a directory that contains the model's config.json\n"
    )
    assert not (home / "none").exists()
    ran = python(code.replace("acme/model", "tiny-org/Tiny-Lama"), **there, HF_HUB_OFFLINE="1")
    assert ran.stdout == (
        "UnknownModel unknown model 'tiny-org/Tiny-Lama' | "
        "did you mean tiny-org/Tiny-Llama? (HF_HUB_OFFLINE is set, so the hub was not asked)\n"
    )
    ran = python(code.replace("acme/model", "acme/Kimi-K3"), **there, HF_HUB_OFFLINE="1")
    assert ran.stdout.startswith("UnknownModel unknown model 'acme/Kimi-K3' | Kimi-K3 has the model type kimi_k3")
    assert hub.asked == []


@in_turn(0, of=3)
def test_recording_does_not_disable_the_hub(hub: Hub, home: Path) -> None:
    hub.files["acme/model"] = json.dumps(LLAMA).encode()
    config = write(home / "mine.json", LLAMA | {"vocab_size": 500})
    ran = python(
        f"from fsdp_advisor.model.resolve import resolve\nresolve({str(config)!r})\nprint(resolve('acme/model').source)",
        HF_ENDPOINT=hub.url, HF_HOME=str(home / "hf"), NO_PROXY="127.0.0.1",
    )  # fmt: skip
    assert ran.stdout == "hub\n", ran.stderr
