"""Model look-up by catalog, disk, count and name; the recorder and the cache of recordings. No network is used."""

from __future__ import annotations

import json
import os
import subprocess
import threading
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import pytest
from matrix import taken
from tiny_llama import (
    CONFIG_HINT,
    LLAMA,
    NAMES_HINT,
    OTHER,
    PARAMETERS,
    SHIPPED,
    flat,
    keep,
    python,
    write,
    written,
)

from fsdp_advisor.errors import (
    AdvisorError,
    MissingExtra,
    NoSuchAttention,
    NotRecordable,
    UnknownModel,
    UnreadableConfig,
    UsageError,
    to_payload,
)
from fsdp_advisor.hardware import find_gpu
from fsdp_advisor.job.plan import Plan
from fsdp_advisor.model import cache, catalog, hub
from fsdp_advisor.model import recorders as module
from fsdp_advisor.model.profile import Profile
from fsdp_advisor.model.resolve import resolve
from fsdp_advisor.model.store import dump, load
from fsdp_advisor.model.tape_key import TapeKey
from fsdp_advisor.parallelism.mesh import Mesh
from fsdp_advisor.tapes import row_tape

pytestmark = pytest.mark.usefixtures("home")


def _without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "installed_versions", lambda: None)
    module.build_recorder.cache_clear()


# The catalog


@pytest.mark.parametrize(
    "name", ["tiny-org/Tiny-Llama", "TINY-ORG/tiny-llama", " tiny-org/Tiny-Llama ", "tiny", "Tiny"]
)
def test_catalog_model_is_found_by_id_or_alias(name: str) -> None:
    found = resolve(name)
    assert (found.name, found.source, found.notes) == ("tiny-org/Tiny-Llama", "catalog", ())
    assert (found.parameters, found.trainable_parameters) == (PARAMETERS, PARAMETERS)
    assert found.tape(SHIPPED).segments


def test_repository_with_the_same_shapes_adds_a_note() -> None:
    found = resolve("tiny-org/tiny-llama-CHAT")
    assert found.name == "tiny-org/Tiny-Llama"
    assert found.notes == ("tiny-org/tiny-llama-CHAT has the shapes of tiny-org/Tiny-Llama, whose profile is used",)


@pytest.mark.parametrize(("kind", "notes"), [("LlamaModel", 1), ("LlamaForCausalLM", 0)])
def test_configuration_without_a_head_says_which_step_is_estimated(home: Path, kind: str, notes: int) -> None:
    path = home / "config.json"
    path.write_text(json.dumps({**LLAMA, "architectures": [kind], "hidden_size": 32}))
    assert sum("head and the loss of causal-lm" in note for note in resolve(str(path)).notes) == notes


def test_catalog_model_needs_no_heavy_import() -> None:
    ran = python(
        "import sys\nfrom fsdp_advisor.model.resolve import resolve\n"
        "resolve('tiny').tape(__import__('fsdp_advisor').model.tape_key.TapeKey.from_name("
        f"{SHIPPED.name!r}))\n"
        "print([m for m in ('torch', 'transformers', 'huggingface_hub') if m in sys.modules])"
    )
    assert (ran.stdout, ran.stderr) == ("[]\n", "")


def test_catalog_takes_precedence_over_a_folder(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(home / "tiny" / "config.json", LLAMA)
    monkeypatch.chdir(home)
    assert resolve("tiny").source == "catalog"


def test_variant_missing_in_the_catalog_is_recorded_and_cached(home: Path, recorded: Profile) -> None:
    tape = resolve("tiny").tape(OTHER)
    assert flat(tape) == flat(recorded.tapes[OTHER.name])
    assert len(written(home)) == 1


def test_cached_variant_needs_no_torch(recorded: Profile, monkeypatch: pytest.MonkeyPatch) -> None:
    keep(recorded, OTHER, task="causal-lm")
    _without_torch(monkeypatch)
    assert flat(resolve("tiny").tape(OTHER)) == flat(recorded.tapes[OTHER.name])


def test_missing_variant_without_torch_says_what_to_install(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _without_torch(monkeypatch)
    with pytest.raises(MissingExtra) as caught:
        resolve("tiny").tape(OTHER)
    assert caught.value.message == (
        "tiny-org/Tiny-Llama: a step of plain, bf16, eager, activation checkpointing none, micro-batch 1 is not in the "
        "catalog, and recording it needs torch and transformers"
    )
    assert caught.value.hint == "in a checkout of fsdp-advisor, run: pip install '.[torch]'"
    assert written(home) == []


# Counts


@pytest.mark.parametrize(
    ("name", "count"), [("7e9", 7 * 10**9), ("7B", 7 * 10**9), ("350M", 350 * 10**6), ("1000", 1000), ("1e15", 10**15)]
)
def test_parameter_count_has_no_profile(name: str, count: int) -> None:
    found = resolve(name, allow_hub=False)
    assert (found.name, found.source, found.profile) == (name, "count", None)
    assert (found.parameters, found.trainable_parameters, found.notes) == (count, count, ())
    with pytest.raises(UsageError, match="is a bare parameter count"):
        found.tape(SHIPPED)


@pytest.mark.parametrize("name", ["0", "7", "999", "1.1e15", "1e18", "7e400", "-7B", "1e-3", "1,000", "1_000_000"])
def test_impossible_parameter_count_raises(name: str) -> None:
    with pytest.raises(UsageError) as caught:
        resolve(name)
    assert caught.value.message == f"a model cannot have {name} parameters"
    assert caught.value.hint == "from 1000 to 1e15, such as 7e9, 7B or 350M"


def test_folder_takes_precedence_over_a_count(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(home / "7B" / "config.json", LLAMA)
    monkeypatch.chdir(home)
    assert resolve("7B").parameters == PARAMETERS
    assert resolve("7B", allow_paths=False).source == "count"


# Disk


@pytest.mark.parametrize("what", ["folder", "folder/config.json", "other.json"])
def test_configuration_on_disk_is_found_by_file_or_folder(home: Path, what: str) -> None:
    write(home / "folder" / "config.json", LLAMA)
    write(home / "other.json", LLAMA)
    found = resolve(str(home / what))
    assert (found.name, found.source, found.notes) == (str(home / what), "config", ())
    assert (found.parameters, found.profile.max_seq_len) == (PARAMETERS, 256)
    assert written(home) == []  # nothing is cached before a tape is recorded


def test_recorded_tapes_are_cached_and_used_without_torch(
    home: Path, recorded: Profile, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(write(home / "mine.json", LLAMA))
    for variant in (SHIPPED, OTHER):
        resolve(path).tape(variant)
    (cached,) = written(home)
    assert set(load(cached.read_bytes()).tapes) == {SHIPPED.name, OTHER.name}
    _without_torch(monkeypatch)
    again = resolve(path)
    versions = " and ".join(f"{k} {v}" for k, v in recorded.versions.items())
    assert (again.name, again.parameters, again.notes) == (path, PARAMETERS, (f"recorded earlier, with {versions}",))
    assert flat(again.tape(OTHER)) == flat(recorded.tapes[OTHER.name])
    with pytest.raises(MissingExtra, match="eager, activation checkpointing full, micro-batch 1 is not in the cache"):
        again.tape(TapeKey("plain", "bf16", "eager", "full", True))


def test_a_repeated_question_records_nothing_and_another_length_records_for_all(home: Path) -> None:
    plan = Plan(
        strategy="ddp", backend="ddp", mesh=Mesh(), precision="bf16", attention="eager", seq_len=16, micro_batch_size=1
    )

    def cached_after(plan: Plan) -> set[str]:
        catalog.profile.cache_clear()  # as in a new process
        row_tape(resolve("tiny"), plan, find_gpu("H100"))
        (cached,) = written(home)
        return set(load(cached.read_bytes()).tapes)

    first = cached_after(plan)
    assert f"{OTHER.name}|at=1x16" in first
    assert cached_after(plan) == first
    assert OTHER.name in cached_after(replace(plan, seq_len=24))


def test_new_process_without_torch_uses_the_cache(home: Path, recorded: Profile) -> None:
    known, unknown = write(home / "known.json", LLAMA), write(home / "unknown.json", LLAMA | {"hidden_size": 128})
    keep(recorded, SHIPPED)
    ran = python(
        "import sys; sys.modules['torch'] = sys.modules['transformers'] = None\n"
        "from fsdp_advisor.model.resolve import resolve\n"
        f"print(resolve({str(known)!r}).parameters)\n"
        f"try: resolve({str(unknown)!r})\n"
        "except Exception as error: print(type(error).__name__, error.message, error.hint)"
    )
    assert ran.stdout.splitlines() == [
        str(PARAMETERS),
        f"MissingExtra {unknown} is not in the catalog, and recording it needs torch and transformers "
        "in a checkout of fsdp-advisor, run: pip install '.[torch]'",
    ]


def test_cached_configuration_does_not_import_installed_torch(home: Path, recorded: Profile) -> None:
    path = str(write(home / "mine.json", LLAMA))
    keep(recorded, SHIPPED)
    ran = python(
        f"import sys\nfrom fsdp_advisor.model.resolve import resolve\nprint(resolve({path!r}).notes, 'torch' in sys.modules)"
    )
    assert (ran.stdout, ran.stderr) == ("() False\n", "")


@pytest.mark.parametrize("what", ["~", "~/config.json", "~/sub", "~/sub/../other.json"])
def test_path_may_begin_with_tilde(home: Path, recorded: Profile, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    keep(recorded, SHIPPED)
    for name in ("config.json", "sub/config.json", "other.json"):
        write(home / name, LLAMA)
    monkeypatch.setenv("HOME", str(home))
    found = resolve(what)
    assert (found.name, found.source, found.parameters) == (what, "config", PARAMETERS)


@pytest.mark.parametrize("name", ["~/absent", "~/absent.json", "~nobody-of-this-name/model", "./~/model"])
def test_missing_path_below_home_raises(home: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(home))
    with pytest.raises(UnknownModel) as caught:
        resolve(name)
    assert (caught.value.message, caught.value.hint) == (
        f"unknown model {name!r}",
        "there is no such file or directory",
    )


def test_allow_paths_false_never_reads_the_disk(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(home / "folder" / "config.json", LLAMA)
    monkeypatch.chdir(home)
    monkeypatch.setattr(Path, "stat", lambda *_, **__: pytest.fail("the disk was read"))
    for name in ("folder", "./folder", str(home / "folder"), "folder/config.json", "../x/y", "~/folder"):
        with pytest.raises(UnknownModel):
            resolve(name, allow_paths=False, allow_hub=False)


def _bad_paths(home: Path) -> dict[str, tuple[str, str]]:
    """Bad paths below `home`, with the message and hint of each."""
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
        "empty": ("{path}: a directory without a config.json", "save the config.json of the model there"),
        "folder.json": ("{path}: a directory without a config.json", "save the config.json of the model there"),
        "lora": (
            "{path}: a directory without a config.json",
            "the directory contains an adapter: pass its base model instead",
        ),
        "weights.bin": ("{path}: neither a directory nor a .json file", CONFIG_HINT),
        "nested": ("{path}: not a regular file", CONFIG_HINT),
        "pipe.json": ("{path}: not a regular file", CONFIG_HINT),
    }


def test_path_without_configuration_raises(home: Path) -> None:
    for name, (message, hint) in _bad_paths(home).items():
        path = f"{home}/{name}"
        with pytest.raises(AdvisorError) as caught:
            resolve(path)
        assert (caught.value.message, caught.value.hint) == (message.format(path=path), hint)
    assert written(home) == []


@pytest.mark.parametrize("where", ["open", "stat"])
def test_unreadable_file_raises(home: Path, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(home / "secret.json", LLAMA)

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
def test_invalid_repository_name_is_never_sent(name: str, hint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "download", lambda *_: pytest.fail("it was sent"))
    with pytest.raises(UnknownModel) as caught:
        resolve(name)
    assert caught.value.message == f"unknown model {name.strip()[:200]!r}"
    assert caught.value.hint == hint


def test_unknown_name_without_hub_suggests_the_nearest() -> None:
    with pytest.raises(UnknownModel) as caught:
        resolve("tiny-orgg/Tiny-Llama", allow_hub=False)
    assert (caught.value.message, caught.value.hint) == (
        "unknown model 'tiny-orgg/Tiny-Llama'",
        "did you mean tiny-org/Tiny-Llama?",
    )


# Recording


def test_types_that_came_with_a_version_of_transformers_are_in_it_and_not_in_earlier_ones() -> None:
    auto = pytest.importorskip("transformers.models.auto.configuration_auto")
    from fsdp_advisor.recording.nearest import FIRST_VERSIONS, advice

    installed = tuple(map(int, VERSION.split(".")[:2]))
    for model_type, first in FIRST_VERSIONS.items():
        is_new = tuple(map(int, first.split("."))) > installed
        assert (model_type in auto.CONFIG_MAPPING_NAMES) != is_new
        named = f"transformers>={first}" in advice(model_type, [], "4.43.0", own_code=True)
        assert named == is_new


VERSION = metadata.version("transformers")


@pytest.mark.parametrize(
    ("config", "message", "hint"),
    [
        (
            {"model_type": "nonesuch"},
            "the installed transformers has no model of type 'nonesuch'",
            f"a newer transformers may have it: pip install -U transformers; no model of transformers {VERSION} has a similar name",
        ),
        (
            {"model_type": "nonesuch", "transformers_version": "99.1.0"},
            "the installed transformers has no model of type 'nonesuch'",
            f"pip install 'transformers>=99.1.0', which wrote the configuration; {VERSION} is installed",
        ),
        (
            {"model_type": "nonesuch", "auto_map": {"AutoConfig": "evil.Config"}},
            "the installed transformers has no model of type 'nonesuch'",
            f"code in the repository (auto_map) is never run; no model of transformers {VERSION} has a similar name",
        ),
        (
            {
                "model_type": "mimo_v2",
                "auto_map": {"AutoConfig": "evil.Config"},
                "architectures": ["MiMoV2ForCausalLM"],
            },
            "the installed transformers has no model of type 'mimo_v2'",
            f"code in the repository (auto_map) is never run; the nearest model of transformers {VERSION} is MiMoV2FlashForCausalLM: set"
            " model_type to 'mimo_v2_flash' if the layers are the same",
        ),
        (
            {"model_type": "chatglm", "auto_map": {"AutoConfig": "evil.Config"}},
            "the installed transformers has no model of type 'chatglm'",
            f"code in the repository (auto_map) is never run; the nearest model of transformers {VERSION} is GlmForCausalLM: "
            "set model_type to 'glm' if the layers are the same",
        ),
        (
            {"model_type": "ours", "architectures": ["LlamaForCausalLM"], "auto_map": {"AutoConfig": "evil.Config"}},
            "the installed transformers has no model of type 'ours'",
            f"code in the repository (auto_map) is never run; the nearest model of transformers {VERSION} is LlamaForCausalLM: "
            "set model_type to 'llama' if the layers are the same",
        ),
    ],
)
def test_model_type_unknown_to_transformers_raises(home: Path, config: object, message: str, hint: str) -> None:
    path = write(home / "config.json", config)
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
def test_error_of_transformers_becomes_one_line(home: Path, change: dict[str, object]) -> None:
    path = write(home / "config.json", LLAMA | change)
    with pytest.raises(AdvisorError) as caught:
        resolve(str(path)).tape(SHIPPED)
    assert "\n" not in caught.value.message
    assert len(caught.value.message) < 400
    assert caught.value.hint
    assert written(home) == []


def test_code_of_the_repository_is_never_run(home: Path) -> None:
    (home / "model").mkdir()
    (home / "model" / "evil.py").write_text("raise SystemExit('ran')")
    auto_map = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    write(home / "model" / "config.json", LLAMA | {"auto_map": auto_map})
    assert resolve(str(home / "model")).parameters == PARAMETERS


# The cache


def test_installed_versions_equal_the_versions_of_the_recorder() -> None:
    from fsdp_advisor.recording.inventory import versions

    assert cache.installed_versions() == versions()


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"FSDP_ADVISOR_CACHE": "/a", "XDG_CACHE_HOME": "/b"}, "/a/profiles"),
        ({"XDG_CACHE_HOME": "/b"}, "/b/fsdp-advisor/profiles"),
        ({"HOME": "/h"}, "/h/.cache/fsdp-advisor/profiles"),
    ],
)
def test_cache_folder_follows_the_environment(
    environment: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("FSDP_ADVISOR_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert cache.profile_folder() == Path(expected)


@pytest.mark.parametrize("damage", taken(["flipped", "text"], ["cut", "empty", "other"]))
def test_damaged_file_is_deleted_and_recorded_again(home: Path, recorded: Profile, damage: str) -> None:
    path = str(write(home / "mine.json", LLAMA))
    keep(recorded, SHIPPED)
    (cached,) = written(home)
    data = cached.read_bytes()
    other = dump(load(data).__class__(**{**vars(load(data)), "config": {"model_type": "gpt2"}}))
    middle = len(data) // 2
    cached.write_bytes(
        {
            "cut": data[:middle],
            "flipped": data[:middle] + bytes([data[middle] ^ 0xFF]) + data[middle + 1 :],
            "empty": b"",
            "other": other,
            "text": b"hello",
        }[damage]
    )
    assert cache.fetch(load(data).config, None) is None
    assert written(home) == []
    assert flat(resolve(path).tape(SHIPPED)) == flat(recorded.tapes[SHIPPED.name])
    resolve(path).tape(OTHER)
    assert len(written(home)) == 1


@pytest.mark.parametrize("how", ["file in the way", "read-only"])
def test_unwritable_cache_adds_a_note(home: Path, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(write(home / "mine.json", LLAMA))
    if how == "read-only":
        monkeypatch.setattr(os, "access", lambda *_: False)  # chmod would not stop root
    else:
        (home / "cache").write_text("")
    found = resolve(path)
    assert found.notes == (
        f"the cache folder {home / 'cache' / 'profiles'} cannot be written: the model will be recorded again each time",
    )
    assert found.tape(SHIPPED).segments


def test_other_versions_do_not_use_the_cache(home: Path, recorded: Profile, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(write(home / "mine.json", LLAMA))
    keep(recorded, SHIPPED)
    config = resolve(path).profile.config
    assert cache.fetch(config, None) is not None
    monkeypatch.setattr(cache, "installed_versions", lambda: recorded.versions | {"torch": "99"})
    assert cache.fetch(config, None) is None


BLOOM = {"model_type": "bloom", "hidden_size": 64, "n_layer": 1, "n_head": 4, "vocab_size": 1000}
NO_FLASH = TapeKey("plain", "bf16", "flash_attention_2", "none", device="gpu")


def test_failed_recording_is_not_repeated(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = resolve(str(write(home / "mine.json", BLOOM)))
    with pytest.raises(NoSuchAttention) as recorded:
        first.tape(NO_FLASH)
    module.build_recorder.cache_clear()
    monkeypatch.setattr(module, "build_recorder", lambda *_: pytest.fail("it is tried again"))
    for model in (first, resolve(str(write(home / "again.json", BLOOM)))):
        with pytest.raises(NoSuchAttention) as kept:
            model.tape(NO_FLASH)
        assert (kept.value.message, kept.value.hint) == (recorded.value.message, recorded.value.hint)


def test_failed_recording_is_repeated_with_other_versions(
    home: Path, recorded: Profile, monkeypatch: pytest.MonkeyPatch
) -> None:
    why = to_payload(NotRecordable("old.json could not be run", hint="wait"))
    assert cache.keep(replace(recorded, name="old.json", refusals={SHIPPED.name: why}, tapes={}), None)
    model = resolve(str(write(home / "mine.json", LLAMA)))
    with pytest.raises(NotRecordable, match=r"mine\.json could not be run"):
        model.tape(SHIPPED)
    monkeypatch.setattr(cache, "installed_versions", lambda: recorded.versions | {"torch": "99"})
    assert flat(model.tape(SHIPPED)) == flat(recorded.tapes[SHIPPED.name])


@pytest.mark.parametrize("passes", [MemoryError(), OSError("disk full")])
def test_recording_that_ran_out_of_memory_is_repeated(home: Path, passes: Exception, monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    from fsdp_advisor.recording.step import Step

    model = resolve(str(write(home / "mine.json", BLOOM)))
    variant = TapeKey("plain", "bf16", "eager", "none", False)

    def fails(*_: object) -> None:
        raise passes

    with monkeypatch.context() as patched:
        patched.setattr(Step, "run", fails)
        with pytest.raises(NotRecordable):
            model.tape(variant)
    assert model.tape(variant).segments


def test_two_processes_can_write_at_once(home: Path, recorded: Profile) -> None:
    (home / "whole").write_bytes(dump(recorded))
    code = (
        "import sys\nfrom dataclasses import replace\nfrom fsdp_advisor.model import cache\n"
        "from fsdp_advisor.model.store import load\n"
        f"whole = load(Path({str(home / 'whole')!r}).read_bytes())\n"
        "for _ in range(60):\n"
        "    assert cache.keep(replace(whole, tapes={KEY: whole.tapes[KEY]}), None)\n"
        "    assert cache.fetch(whole.config, None) is not None\n"
    )
    ran: list[subprocess.CompletedProcess[str]] = []
    threads = [
        threading.Thread(target=lambda key=v.name: ran.append(python(f"KEY = {key!r}\n" + code)))
        for v in (SHIPPED, OTHER)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [(r.returncode, r.stderr) for r in ran] == [(0, ""), (0, "")]
    (cached,) = written(home)  # and no partial file
    found = load(cached.read_bytes()).tapes
    assert found
    assert all(flat(found[key]) == flat(recorded.tapes[key]) for key in found)
