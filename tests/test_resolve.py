"""Model resolution: catalog, disk, hub, count; hostile configurations; the cache of recordings. Nothing beyond 127.0.0.1."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp_advisor import resolve as module
from fsdp_advisor.errors import AdvisorError, HubError, MissingExtra, UnknownModel, UnreadableConfig, UsageError
from fsdp_advisor.models import cache, catalog
from fsdp_advisor.models.profile import Profile, Tape, Variant
from fsdp_advisor.models.store import dump, load
from fsdp_advisor.resolve import parse_config, resolve, trained_part

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 176,
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 1000,
    "max_position_embeddings": 256, "tie_word_embeddings": False,
}  # fmt: skip
LAYER = 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 176 + 2 * 64
PARAMETERS = 2 * 1000 * 64 + 64 + 4 * LAYER
SHIPPED = Variant("plain", "bf16", "sdpa", "none", False)
OTHER = Variant("plain", "bf16", "eager", "none", True)
CONFIG_HINT = "a model is described by the config.json that transformers saves with it"
NAMES_HINT = (
    "a model is an id listed by `fsdp-advisor models`, a hub id, a config.json or its directory, or a count such as 7B"
)
NETWORK_HINT = "check the network and HF_ENDPOINT, or name a directory that holds the model's config.json"


@pytest.fixture(scope="session")
def recorded() -> Profile:
    """A tiny llama with two tapes."""
    from fsdp_advisor.tracing import Recorder, TransformersSource

    recorder = Recorder(TransformersSource(LLAMA, name="tiny-org/Tiny-Llama", task="causal-lm"))
    for variant in (SHIPPED, OTHER):
        recorder.profile.tapes[variant.key] = recorder.tape(variant)
    return recorder.profile


@pytest.fixture(scope="session")
def catalog_zip(recorded: Profile, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("catalog") / "catalog.zip"
    shipped = {SHIPPED.key: recorded.tapes[SHIPPED.key]}
    row = {
        "id": recorded.name, "aliases": ["tiny", "tiny-org/Tiny-Llama-chat"], "task": recorded.task,
        "parameters": PARAMETERS, "max_seq_len": 256, "model_type": "llama", "source": "this test", "member": "tiny.profile",
    }  # fmt: skip
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("tiny.profile", dump(_with(recorded, shipped), small=True))
        archive.writestr(catalog.INDEX, json.dumps([row]))
    return path


@pytest.fixture(autouse=True)
def home(catalog_zip: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A catalog of one model, an empty cache, and nothing remembered from another test."""

    def forget() -> None:
        for memory in (catalog.entries, catalog._by_name, catalog.profile, cache.installed_versions):
            getattr(memory, "cache_clear", lambda: None)()

    monkeypatch.setattr(catalog, "PATH", catalog_zip)
    monkeypatch.setenv("FSDP_ADVISOR_CACHE", str(tmp_path / "cache"))
    forget()
    yield tmp_path
    monkeypatch.undo()
    forget()


def _with(profile: Profile, tapes: dict) -> Profile:
    from dataclasses import replace

    return replace(profile, tapes=tapes)


def _flat(tape: Tape) -> list[object]:
    """What a tape says, wherever it keeps its sizes."""
    return [
        (s.phase, s.stack, s.layer, s.matmul_flops, [(op, tape.sizes[a] if op == 0 else a, b) for op, a, b in s.events])
        for s in tape.segments
    ]


def _write(path: Path, config: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(config))
    return path


def _written(folder: Path) -> list[Path]:
    return sorted(p for p in (folder / "cache").rglob("*") if p.is_file())


def _without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "installed_versions", lambda: None)
    module._recorder.cache_clear()


def _python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A fresh interpreter with the test's catalog, cache and whatever else."""
    first = f"from pathlib import Path; from fsdp_advisor.models import catalog; catalog.PATH = Path({str(catalog.PATH)!r})\n"
    dropped = {"HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_TOKEN", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"}
    kept = {k: v for k, v in os.environ.items() if k.upper() not in dropped}
    return subprocess.run(
        [sys.executable, "-c", first + code],
        env=kept | environment,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )


# The catalog


@pytest.mark.parametrize(
    "name", ["tiny-org/Tiny-Llama", "TINY-ORG/tiny-llama", " tiny-org/Tiny-Llama ", "tiny", "Tiny"]
)
def test_a_catalogued_model_by_id_or_alias(name: str) -> None:
    found = resolve(name)
    assert (found.name, found.source, found.notes) == ("tiny-org/Tiny-Llama", "catalog", ())
    assert (found.parameters, found.trainable_parameters) == (PARAMETERS, PARAMETERS)
    assert found.tape(SHIPPED).segments


def test_another_repository_of_the_same_shapes_is_said_to_be_one() -> None:
    found = resolve("tiny-org/tiny-llama-CHAT")
    assert found.name == "tiny-org/Tiny-Llama"
    assert found.notes == ("tiny-org/tiny-llama-CHAT has the shapes of tiny-org/Tiny-Llama, whose profile is used",)


def test_a_catalogued_model_needs_no_heavy_import() -> None:
    ran = _python(
        "import sys\nfrom fsdp_advisor.resolve import resolve\n"
        "resolve('tiny').tape(__import__('fsdp_advisor').models.profile.Variant.from_key("
        f"{SHIPPED.key!r}))\n"
        "print([m for m in ('torch', 'transformers', 'huggingface_hub') if m in sys.modules])"
    )
    assert (ran.stdout, ran.stderr) == ("[]\n", "")


def test_the_catalog_wins_over_a_folder_of_the_same_name(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _write(home / "tiny" / "config.json", LLAMA)
    monkeypatch.chdir(home)
    assert resolve("tiny").source == "catalog"


def test_a_variant_that_is_not_shipped_is_recorded_and_kept(home: Path, recorded: Profile) -> None:
    tape = resolve("tiny").tape(OTHER)
    assert _flat(tape) == _flat(recorded.tapes[OTHER.key])
    assert len(_written(home)) == 1


def test_a_variant_kept_before_needs_no_torch(recorded: Profile, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache.keep(_with(recorded, {OTHER.key: recorded.tapes[OTHER.key]}), "causal-lm")
    _without_torch(monkeypatch)
    assert _flat(resolve("tiny").tape(OTHER)) == _flat(recorded.tapes[OTHER.key])


def test_a_variant_that_is_nowhere_says_what_to_install(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _without_torch(monkeypatch)
    with pytest.raises(MissingExtra) as caught:
        resolve("tiny").tape(OTHER)
    assert caught.value.message == (
        "tiny-org/Tiny-Llama: the variant plain, bf16, eager, activation checkpointing none, micro-batch 1 is not in the "
        "catalog, and recording it needs torch and transformers"
    )
    assert caught.value.hint == "pip install 'fsdp-advisor[torch]'"
    assert _written(home) == []


# Counts


@pytest.mark.parametrize(
    ("name", "count"), [("7e9", 7 * 10**9), ("7B", 7 * 10**9), ("350M", 350 * 10**6), ("1000", 1000), ("1e15", 10**15)]
)
def test_a_bare_count(name: str, count: int) -> None:
    found = resolve(name, allow_hub=False)
    assert (found.name, found.source, found.profile) == (name, "count", None)
    assert (found.parameters, found.trainable_parameters, found.notes) == (count, count, ())
    with pytest.raises(UsageError, match="is a bare parameter count"):
        found.tape(SHIPPED)


@pytest.mark.parametrize("name", ["0", "7", "999", "1.1e15", "1e18", "7e400", "-7B", "1e-3", "1,000", "1_000_000"])
def test_a_count_that_no_model_has(name: str) -> None:
    with pytest.raises(UsageError) as caught:
        resolve(name)
    assert caught.value.message == f"a model cannot have {name} parameters"
    assert caught.value.hint == "from 1000 to 1e15, such as 7e9, 7B or 350M"


def test_a_folder_wins_over_a_count(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _write(home / "7B" / "config.json", LLAMA)
    monkeypatch.chdir(home)
    assert resolve("7B").parameters == PARAMETERS
    assert resolve("7B", allow_paths=False).source == "count"


# Disk


@pytest.mark.parametrize("what", ["folder", "folder/config.json", "other.json"])
def test_a_configuration_on_disk(home: Path, what: str) -> None:
    _write(home / "folder" / "config.json", LLAMA)
    _write(home / "other.json", LLAMA)
    found = resolve(str(home / what))
    assert (found.name, found.source, found.notes) == (str(home / what), "config", ())
    assert (found.parameters, found.profile.max_seq_len) == (PARAMETERS, 256)
    assert _written(home) == []  # nothing is kept before something is recorded


def test_what_was_recorded_is_kept_and_serves_without_torch(
    home: Path, recorded: Profile, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(_write(home / "mine.json", LLAMA))
    for variant in (SHIPPED, OTHER):
        resolve(path).tape(variant)
    (kept,) = _written(home)
    assert set(load(kept.read_bytes()).tapes) == {SHIPPED.key, OTHER.key}
    _without_torch(monkeypatch)
    again = resolve(path)
    versions = " and ".join(f"{k} {v}" for k, v in recorded.versions.items())
    assert (again.name, again.parameters, again.notes) == (path, PARAMETERS, (f"recorded earlier, with {versions}",))
    assert _flat(again.tape(OTHER)) == _flat(recorded.tapes[OTHER.key])
    with pytest.raises(MissingExtra, match="eager, activation checkpointing full, micro-batch 1 is not in the cache"):
        again.tape(Variant("plain", "bf16", "eager", "full", True))


def test_a_fresh_process_without_torch(home: Path) -> None:
    known, unknown = _write(home / "known.json", LLAMA), _write(home / "unknown.json", LLAMA | {"hidden_size": 128})
    resolve(str(known)).tape(SHIPPED)
    ran = _python(
        "import sys; sys.modules['torch'] = sys.modules['transformers'] = None\n"
        "from fsdp_advisor.resolve import resolve\n"
        f"print(resolve({str(known)!r}).parameters)\n"
        f"try: resolve({str(unknown)!r})\n"
        "except Exception as error: print(type(error).__name__, error, error.hint)"
    )
    assert ran.stdout.splitlines() == [
        str(PARAMETERS),
        f"MissingExtra {unknown} is not in the catalog, and recording it needs torch and transformers "
        "pip install 'fsdp-advisor[torch]'",
    ]


def test_a_kept_configuration_does_not_import_torch_though_it_is_there(home: Path) -> None:
    path = str(_write(home / "mine.json", LLAMA))
    resolve(path).tape(SHIPPED)
    ran = _python(
        f"import sys\nfrom fsdp_advisor.resolve import resolve\nprint(resolve({path!r}).notes, 'torch' in sys.modules)"
    )
    assert (ran.stdout, ran.stderr) == ("() False\n", "")


def test_paths_can_be_forbidden(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _write(home / "folder" / "config.json", LLAMA)
    monkeypatch.chdir(home)
    monkeypatch.setattr(Path, "stat", lambda *_, **__: pytest.fail("the disk was looked at"))
    for name in ("folder", "./folder", str(home / "folder"), "folder/config.json", "../x/y"):
        with pytest.raises(UnknownModel):
            resolve(name, allow_paths=False, allow_hub=False)


def _bad_paths(home: Path) -> dict[str, tuple[str, str]]:
    """What can be wrong with a path: its name below the home, and the error it gives."""
    (home / "empty").mkdir()
    (home / "lora").mkdir()
    (home / "lora" / "adapter_config.json").write_text("{}")
    (home / "weights.bin").write_text("{}")
    (home / "folder.json").mkdir()
    (home / "nested" / "config.json").mkdir(parents=True)
    os.mkfifo(home / "pipe.json")
    (home / "dangling.json").symlink_to("nowhere")
    whole = "unknown model {path!r}"
    return {
        "absent.json": (whole, "there is no such file or directory"),
        "absent/": (whole, "there is no such file or directory"),
        "weights.bin/x": (whole, "there is no such file or directory"),
        "dangling.json": (whole, "there is no such file or directory"),
        "empty": ("{path}: a directory without a config.json", "save the model's config.json there"),
        "folder.json": ("{path}: a directory without a config.json", "save the model's config.json there"),
        "lora": ("{path}: a directory without a config.json", "it holds an adapter: name its base model"),
        "weights.bin": ("{path}: neither a directory nor a .json file", CONFIG_HINT),
        "nested": ("{path}: not a regular file", CONFIG_HINT),
        "pipe.json": ("{path}: not a regular file", CONFIG_HINT),
    }


def test_paths_that_hold_no_configuration(home: Path) -> None:
    for name, (message, hint) in _bad_paths(home).items():
        path = f"{home}/{name}"
        with pytest.raises(AdvisorError) as caught:
            resolve(path)
        assert (caught.value.message, caught.value.hint) == (message.format(path=path), hint)
    assert _written(home) == []


@pytest.mark.parametrize("where", ["open", "stat"])
def test_a_file_that_may_not_be_read(home: Path, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = _write(home / "secret.json", LLAMA)

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, where, refuse)  # chmod would not stop root
    with pytest.raises(UnreadableConfig) as caught:
        resolve(str(path))
    monkeypatch.undo()
    assert caught.value.message == f"{path}: cannot be read: Permission denied"
    assert caught.value.hint == "check the file and its permissions"


# Names


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("", NAMES_HINT),
        ("  ", NAMES_HINT),
        ("a b", NAMES_HINT),
        ("owner/na me", NAMES_HINT),
        ("owner/name.git", NAMES_HINT),
        ("owner--name/x", NAMES_HINT),
        ("-x", NAMES_HINT),
        ("owner/é", NAMES_HINT),
        ("x" * 300, NAMES_HINT),
        ("line\nbreak", NAMES_HINT),
        ("nul\0byte", NAMES_HINT),
        ("https://example.org/config", "there is no such file or directory"),
        ("tiny-org/Tiny-Lama!", "did you mean tiny-org/Tiny-Llama?"),
    ],
)
def test_names_that_are_never_sent(name: str, hint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_download", lambda *_: pytest.fail("it was sent"))
    with pytest.raises(UnknownModel) as caught:
        resolve(name)
    assert caught.value.message == f"unknown model {name.strip()[:200]!r}"
    assert caught.value.hint == hint


def test_an_unknown_name_without_the_hub_suggests_the_nearest() -> None:
    with pytest.raises(UnknownModel) as caught:
        resolve("tiny-orgg/Tiny-Llama", allow_hub=False)
    assert (caught.value.message, caught.value.hint) == (
        "unknown model 'tiny-orgg/Tiny-Llama'",
        "did you mean tiny-org/Tiny-Llama?",
    )


# Configurations


def _deep(levels: int) -> str:
    return '{"a": ' + "[" * (levels - 1) + "]" * (levels - 1) + "}"


BAD_CONFIGS = [
    (b"", "not valid JSON (line 1, column 1)", "is the file whole? " + CONFIG_HINT),
    (b'{"model_type": "llama", "hidden', "not valid JSON (line 1, column 25)", "is the file whole? " + CONFIG_HINT),
    (b'{"a": "' + b'\\"' * 100_000, "not valid JSON (line 1, column 7)", "is the file whole? " + CONFIG_HINT),
    (b"\xff\xfe{}", "not UTF-8 text (byte 0)", CONFIG_HINT),
    (b"{" + b" " * 2**20 + b"}", "larger than 1 MiB, so no config.json", CONFIG_HINT),
    (_deep(33).encode(), "nested deeper than 32 levels", CONFIG_HINT),
    (b"[" * 500_000, "nested deeper than 32 levels", CONFIG_HINT),
    (b'{"a":' * 200_000, "nested deeper than 32 levels", CONFIG_HINT),
    (b"[]", "a list, not an object", CONFIG_HINT),
    (b"null", "null, not an object", CONFIG_HINT),
    (b"7", "a number, not an object", CONFIG_HINT),
    (b"{}", "the configuration has no model_type", CONFIG_HINT),
    ({"model_type": 7}, "the configuration has a model_type that is no name", CONFIG_HINT),
    ({"model_type": "../x"}, "the configuration has a model_type that is no name", CONFIG_HINT),
    ({"model_type": None}, "the configuration has no model_type", CONFIG_HINT),
    ({"text_config": {"vocab_size": 9}}, "the configuration has no model_type", CONFIG_HINT),
    (LLAMA | {"architectures": [7]}, "architectures must be a list of names", CONFIG_HINT),
    (LLAMA | {"architectures": "Llama"}, "architectures must be a list of names", CONFIG_HINT),
    (LLAMA | {"hidden_size": "64"}, 'hidden_size must be an integer, not "64"', CONFIG_HINT),
    (LLAMA | {"hidden_size": "6" * 99}, "hidden_size must be an integer, not a string", CONFIG_HINT),
    (LLAMA | {"hidden_size": [64]}, "hidden_size must be an integer, not a list", CONFIG_HINT),
    (LLAMA | {"hidden_size": {"a": 1}}, "hidden_size must be an integer, not an object", CONFIG_HINT),
    (LLAMA | {"hidden_size": 64.5}, "hidden_size must be an integer, not 64.5", CONFIG_HINT),
    (LLAMA | {"hidden_size": True}, "hidden_size must be an integer, not true", CONFIG_HINT),
    (LLAMA | {"hidden_size": 0}, "hidden_size is 0, not between 1 and 1000000", CONFIG_HINT),
    (LLAMA | {"num_hidden_layers": -1}, "num_hidden_layers is -1, not between 1 and 1024", CONFIG_HINT),
    (LLAMA | {"num_hidden_layers": 1025}, "num_hidden_layers is 1025, not between 1 and 1024", CONFIG_HINT),
    (LLAMA | {"vocab_size": 10**9}, "vocab_size is 1000000000, not between 1 and 100000000", CONFIG_HINT),
    (LLAMA | {"num_attention_heads": [4, -4]}, "num_attention_heads is -4, not between 1 and 100000", CONFIG_HINT),
    (LLAMA | {"num_local_experts": 5000}, "num_local_experts is 5000, not between 0 and 4096", CONFIG_HINT),
    (LLAMA | {"num_labels": 10**9}, "num_labels is 1000000000, more than 1000000", CONFIG_HINT),
    (LLAMA | {"rope_theta": 10**13}, "rope_theta is beyond 1e+12", CONFIG_HINT),
    (LLAMA | {"rope_theta": -(10**5000)}, "rope_theta is not a finite number", CONFIG_HINT),
    (LLAMA | {"rope_theta": float("nan")}, "rope_theta is not a finite number", CONFIG_HINT),
    (LLAMA | {"rope_scaling": {"factor": float("inf")}}, "rope_scaling.factor is not a finite number", CONFIG_HINT),
    (b'{"model_type": "llama", "eps": 1e999}', "eps is not a finite number", CONFIG_HINT),
    (LLAMA | {"a\n" + "b" * 99: [[1e400]]}, "'a\\n" + "b" * 38 + "' is not a finite number", CONFIG_HINT),
    ({"text_config": LLAMA | {"n_layer": 0}}, "text_config.n_layer is 0, not between 1 and 1024", CONFIG_HINT),
    (
        LLAMA | {"num_hidden_layers": 1024, "num_local_experts": 4096},
        "1024 layers x 4096 experts = 4194304, more than 200000",
        CONFIG_HINT,
    ),
]


def _bytes(config: object) -> bytes:
    if isinstance(config, bytes):
        return config
    limit = sys.get_int_max_str_digits() if hasattr(sys, "get_int_max_str_digits") else None
    if limit is not None:
        sys.set_int_max_str_digits(0)
    try:
        return json.dumps(config).encode()
    finally:
        if limit is not None:
            sys.set_int_max_str_digits(limit)


@pytest.mark.parametrize(("config", "message", "hint"), BAD_CONFIGS, ids=[m[:40] for _, m, _ in BAD_CONFIGS])
def test_bad_configurations(
    home: Path, config: object, message: str, hint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = home / "config.json"
    path.write_bytes(_bytes(config))
    monkeypatch.setattr(module, "_recorder", lambda *_: pytest.fail("torch was asked"))
    began = time.perf_counter()
    with pytest.raises(UnreadableConfig) as caught:
        resolve(str(path))
    assert time.perf_counter() - began < 1
    assert (caught.value.message, caught.value.hint) == (f"{path}: {message}", hint)
    assert _written(home) == []


@pytest.mark.parametrize(
    ("config", "message", "hint"),
    [
        (
            {"model_type": "nonesuch"},
            "the installed transformers has no model of type 'nonesuch'",
            "a newer transformers may have it",
        ),
        (
            {"model_type": "nonesuch", "auto_map": {"AutoConfig": "evil.Config"}},
            "the installed transformers has no model of type 'nonesuch'",
            "code that a repository brings along (auto_map) is never run",
        ),
    ],
)
def test_models_that_transformers_lacks(home: Path, config: object, message: str, hint: str) -> None:
    path = _write(home / "config.json", config)
    with pytest.raises(UnreadableConfig) as caught:
        resolve(str(path))
    assert (caught.value.message, caught.value.hint) == (f"{path}: {message}", hint)


@pytest.mark.parametrize(
    "change",
    [
        {"num_attention_heads": 7},
        {"hidden_act": "nonesuch"},
        {"hidden_act": 7},
        {"vocab_size": None},
        {"pad_token_id": 5000},
    ],
)
def test_what_transformers_refuses_is_one_line(home: Path, change: dict[str, object]) -> None:
    path = _write(home / "config.json", LLAMA | change)
    with pytest.raises(AdvisorError) as caught:
        resolve(str(path)).tape(SHIPPED)
    assert "\n" not in caught.value.message
    assert len(caught.value.message) < 400
    assert caught.value.hint
    assert _written(home) == []


def test_own_code_is_not_run_where_transformers_has_the_class(home: Path) -> None:
    (home / "model").mkdir()
    (home / "model" / "evil.py").write_text("raise SystemExit('ran')")
    auto_map = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    _write(home / "model" / "config.json", LLAMA | {"auto_map": auto_map})
    assert resolve(str(home / "model")).parameters == PARAMETERS


def test_the_text_part_of_a_multimodal_model(home: Path) -> None:
    text = {k: v for k, v in LLAMA.items() if k != "architectures"}
    outer = {
        "model_type": "llava",
        "architectures": ["LlavaForConditionalGeneration"],
        "vision_config": {},
        "text_config": text,
    }
    found = resolve(str(_write(home / "llava.json", outer)))
    assert found.parameters == PARAMETERS
    assert found.notes == ("only the text part (llama) of a multimodal model is estimated",)


def test_the_text_part_takes_its_type_and_its_tie_from_outside() -> None:
    outer = {"model_type": "gemma3", "tie_word_embeddings": True, "text_config": {"hidden_size": 64}}
    config, _ = trained_part(outer, "x")
    assert config == {"model_type": "gemma3_text", "tie_word_embeddings": True, "hidden_size": 64}


def test_quantization_is_left_out(home: Path) -> None:
    found = resolve(str(_write(home / "q.json", LLAMA | {"quantization_config": {"quant_method": "fp8"}})))
    assert found.parameters == PARAMETERS
    assert found.notes == ("the configuration's quantization is left out: training keeps whole weights",)


def test_real_configurations_pass_the_bounds() -> None:
    import yaml

    for row in yaml.safe_load((Path(catalog.__file__).parent / "architectures.yaml").read_text(encoding="utf-8")):
        trained_part(parse_config(json.dumps(row["config"]).encode(), row["id"]), row["id"])


KEYS = st.sampled_from([*LLAMA, "text_config", "quantization_config", "num_experts", "auto_map", "n_layer"]) | st.text(
    max_size=8
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**20), 10**20) | st.floats() | st.text(max_size=8) | st.just("llama"),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=30,
)


@settings(max_examples=400, deadline=None)
@given(st.dictionaries(KEYS, JSON, max_size=8) | JSON)
def test_any_json_is_a_configuration_or_refused(value: object) -> None:
    try:
        config, _ = trained_part(parse_config(json.dumps(value).encode(), "x"), "x")
    except UnreadableConfig as error:
        assert error.hint
        assert "\n" not in error.message
    else:
        assert isinstance(config["model_type"], str)


@settings(max_examples=400, deadline=None)
@given(st.binary(max_size=64) | st.text(alphabet='{}[]":,\\0e-ntf \n', max_size=64).map(str.encode))
def test_any_bytes_are_a_configuration_or_refused(data: bytes) -> None:
    try:
        assert isinstance(parse_config(data, "x"), dict)
    except UnreadableConfig as error:
        assert "\n" not in error.message


# The hub


@dataclass
class Hub:
    """A stand-in for the hub on 127.0.0.1: what it holds and what it was asked."""

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


def test_a_model_on_the_hub(hub: Hub, home: Path, capfd: pytest.CaptureFixture[str]) -> None:
    hub.files["acme/model"] = json.dumps(LLAMA).encode()
    found = resolve("acme/model")
    assert (found.name, found.source, found.parameters, found.notes) == ("acme/model", "hub", PARAMETERS, ())
    assert {path for _, path, _ in hub.asked} == {"/acme/model/resolve/main/config.json"}  # and no weights
    assert {token for _, _, token in hub.asked} == {None}
    assert capfd.readouterr() == ("", "")
    hub.asked.clear()
    assert resolve("acme/model").parameters == PARAMETERS
    assert {method for method, _, _ in hub.asked} == {"HEAD"}  # what has not changed is not fetched again


def test_the_token_is_sent(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.files["acme/model"] = json.dumps(LLAMA).encode()
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    resolve("acme/model")
    assert {token for _, _, token in hub.asked} == {"Bearer hf_secret"}


def test_the_hub_is_asked_once_when_it_fails(hub: Hub) -> None:
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
            "check HF_TOKEN, and that its account may read {hub}/acme/closed",
        ),
        (
            "acme/adapter", (404, "EntryNotFound"), UnreadableConfig, "acme/adapter: the hub repository has no config.json",
            "is it an adapter or a conversion? name its base model",
        ),
        (
            "acme/broken", (500, None), HubError, "the hub failed to give acme/broken (HTTP status 500)",
            "try again in a while",
        ),
        (
            "acme/busy", (429, None), HubError, "the hub failed to give acme/busy (HTTP status 429)",
            "try again in a while",
        ),
        (
            "slow/model", (200, None), HubError,
            "slow/model is not in the catalog, and {hub} cannot be reached: no answer in time", NETWORK_HINT,
        ),
    ],
)  # fmt: skip
def test_what_the_hub_refuses(
    hub: Hub, home: Path, name: str, refusal: tuple[int, str | None], kind: type[AdvisorError], message: str, hint: str,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    hub.refusals[name] = refusal
    with pytest.raises(kind) as caught:
        resolve(name)
    assert type(caught.value) is kind
    assert (caught.value.message, caught.value.hint) == (message.format(hub=hub.url), hint.format(hub=hub.url))
    assert not (home / "hf").exists()
    assert _written(home) == []
    assert capfd.readouterr() == ("", "")


def test_a_server_that_is_no_hub(hub: Hub) -> None:
    hub.files["acme/model"], hub.headers = b"<html>", False
    with pytest.raises(HubError) as caught:
        resolve("acme/model")
    assert caught.value.message == f"{hub.url} does not answer as a hub does"
    assert caught.value.hint == "check HF_ENDPOINT and the network's proxy"


def test_a_huge_file_on_the_hub_is_not_fetched(hub: Hub, home: Path) -> None:
    hub.files["acme/huge"] = b" " * (2**20 + 1)
    with pytest.raises(UnreadableConfig, match="acme/huge: larger than 1 MiB"):
        resolve("acme/huge")
    assert [method for method, _, _ in hub.asked] == ["HEAD"]
    assert not (home / "hf").exists()


def test_a_bad_configuration_on_the_hub(hub: Hub) -> None:
    hub.files["acme/bad"] = b'{"model_type": "llama", "hidden_size": "big"}'
    with pytest.raises(UnreadableConfig, match='acme/bad: hidden_size must be an integer, not "big"'):
        resolve("acme/bad")


def test_no_network_is_said_at_once(hub: Hub, home: Path) -> None:
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


def test_what_was_fetched_serves_without_network_and_offline(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    hub.files["acme/model"] = json.dumps(LLAMA).encode()
    resolve("acme/model")
    hub.refusals["acme/model"] = (503, None)
    assert resolve("acme/model").notes == (
        "config.json is from the local Hugging Face cache: the hub failed to give acme/model (HTTP status 503)",
    )
    hub.asked.clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert resolve("acme/model").notes == ("config.json is from the local Hugging Face cache: HF_HUB_OFFLINE is set",)
    assert hub.asked == []


def test_a_hugging_face_cache_that_cannot_be_written(hub: Hub, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    hub.files["acme/model"] = json.dumps(LLAMA).encode()
    real = huggingface_hub.hf_hub_download

    def download(*args: object, cache_dir: str | None = None, **rest: object) -> str:
        if cache_dir is None:
            raise PermissionError(13, "Permission denied")
        return real(*args, cache_dir=cache_dir, **rest)  # type: ignore[arg-type,call-overload,no-any-return]

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    assert resolve("acme/model").parameters == PARAMETERS


def test_the_environment_is_honoured(hub: Hub, home: Path) -> None:
    """Everything through variables, in a fresh process: what a user does."""
    config = home / "mine.json"
    resolve(str(_write(config, LLAMA))).tape(SHIPPED)  # so that the processes need not record
    hub.files["acme/model"] = json.dumps(LLAMA).encode()
    code = (
        "import sys\nfrom fsdp_advisor.resolve import resolve\n"
        "try: print(resolve(sys.argv[1] if sys.argv[1:] else 'acme/model').parameters, 'torch' in sys.modules)\n"
        "except Exception as error: print(type(error).__name__, error, '|', error.hint)"
    )
    there = {"HF_ENDPOINT": hub.url, "HF_HOME": str(home / "other"), "NO_PROXY": "127.0.0.1"}
    ran = _python(code, **there, HF_TOKEN="hf_abc")
    assert (ran.stdout, ran.stderr) == (f"{PARAMETERS} False\n", "")
    assert {token for _, _, token in hub.asked} == {"Bearer hf_abc"}
    assert (home / "other" / "hub" / "models--acme--model").is_dir()
    hub.asked.clear()
    ran = _python(code, **there, HF_HUB_OFFLINE="1")
    assert (ran.stdout, ran.stderr) == (f"{PARAMETERS} False\n", "")
    ran = _python(code, **there | {"HF_HOME": str(home / "none")}, HF_HUB_OFFLINE="1")
    assert ran.stdout == (
        "HubError acme/model is not in the catalog, and HF_HUB_OFFLINE forbids to ask the hub | "
        "unset HF_HUB_OFFLINE, or name a directory that holds the model's config.json\n"
    )
    assert not (home / "none").exists()
    ran = _python(code.replace("acme/model", "tiny-org/Tiny-Lama"), **there, HF_HUB_OFFLINE="1")
    assert ran.stdout == (
        "UnknownModel unknown model 'tiny-org/Tiny-Lama' | "
        "did you mean tiny-org/Tiny-Llama? (the hub was not asked: HF_HUB_OFFLINE is set)\n"
    )
    assert hub.asked == []


def test_recording_does_not_switch_the_hub_off(hub: Hub, home: Path) -> None:
    hub.files["acme/model"] = json.dumps(LLAMA).encode()
    config = _write(home / "mine.json", LLAMA | {"vocab_size": 500})
    ran = _python(
        f"from fsdp_advisor.resolve import resolve\nresolve({str(config)!r})\nprint(resolve('acme/model').source)",
        HF_ENDPOINT=hub.url, HF_HOME=str(home / "hf"), NO_PROXY="127.0.0.1",
    )  # fmt: skip
    assert ran.stdout == "hub\n", ran.stderr


# The cache


def test_the_installed_versions_are_the_recorders() -> None:
    from fsdp_advisor.tracing import recorder

    assert cache.installed_versions() == recorder.versions()


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"FSDP_ADVISOR_CACHE": "/a", "XDG_CACHE_HOME": "/b"}, "/a/profiles"),
        ({"XDG_CACHE_HOME": "/b"}, "/b/fsdp-advisor/profiles"),
        ({"XDG_CACHE_HOME": "relative", "HOME": "/h"}, "/h/.cache/fsdp-advisor/profiles"),
        ({"HOME": "/h"}, "/h/.cache/fsdp-advisor/profiles"),
    ],
)
def test_where_the_cache_is(environment: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    for name in ("FSDP_ADVISOR_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert cache.folder() == Path(expected)


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "other", "text"])
def test_a_damaged_file_is_discarded_and_recorded_again(home: Path, recorded: Profile, damage: str) -> None:
    path = str(_write(home / "mine.json", LLAMA))
    resolve(path).tape(SHIPPED)
    (kept,) = _written(home)
    data = kept.read_bytes()
    other = dump(load(data).__class__(**{**vars(load(data)), "config": {"model_type": "gpt2"}}))
    middle = len(data) // 2
    kept.write_bytes(
        {
            "cut": data[:middle],
            "flipped": data[:middle] + bytes([data[middle] ^ 0xFF]) + data[middle + 1 :],
            "empty": b"",
            "other": other,
            "text": b"hello",
        }[damage]
    )
    assert cache.fetch(load(data).config, None) is None
    assert _written(home) == []
    assert _flat(resolve(path).tape(SHIPPED)) == _flat(recorded.tapes[SHIPPED.key])
    resolve(path).tape(OTHER)
    assert len(_written(home)) == 1


@pytest.mark.parametrize("how", ["file in the way", "read-only"])
def test_a_cache_that_cannot_be_written_is_a_note(home: Path, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(_write(home / "mine.json", LLAMA))
    if how == "read-only":
        monkeypatch.setattr(os, "access", lambda *_: False)  # chmod would not stop root
    else:
        (home / "cache").write_text("")
    found = resolve(path)
    assert found.notes == (
        f"the cache folder {home / 'cache' / 'profiles'} cannot be written: the model will be recorded again each time",
    )
    assert found.tape(SHIPPED).segments


def test_another_version_records_anew(home: Path, recorded: Profile, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(_write(home / "mine.json", LLAMA))
    resolve(path).tape(SHIPPED)
    config = resolve(path).profile.config
    assert cache.fetch(config, None) is not None
    monkeypatch.setattr(cache, "installed_versions", lambda: recorded.versions | {"torch": "99"})
    assert cache.fetch(config, None) is None


def test_two_processes_write_at_once(home: Path, recorded: Profile) -> None:
    (home / "whole").write_bytes(dump(recorded))
    code = (
        "import sys\nfrom dataclasses import replace\nfrom fsdp_advisor.models import cache\n"
        "from fsdp_advisor.models.store import load\n"
        f"whole = load(Path({str(home / 'whole')!r}).read_bytes())\n"
        "for _ in range(60):\n"
        "    assert cache.keep(replace(whole, tapes={KEY: whole.tapes[KEY]}), None)\n"
        "    assert cache.fetch(whole.config, None) is not None\n"
    )
    ran: list[subprocess.CompletedProcess[str]] = []
    threads = [
        threading.Thread(target=lambda key=v.key: ran.append(_python(f"KEY = {key!r}\n" + code)))
        for v in (SHIPPED, OTHER)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [(r.returncode, r.stderr) for r in ran] == [(0, ""), (0, "")]
    (kept,) = _written(home)  # and no partial file is left
    found = load(kept.read_bytes()).tapes
    assert found
    assert all(_flat(found[key]) == _flat(recorded.tapes[key]) for key in found)
