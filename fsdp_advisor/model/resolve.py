"""Find a model by the name that the user gives: an id of the catalog, a config.json on disk or on the hub, or a count.

Code in a hub repository is never run.
"""

from __future__ import annotations

import contextlib
import json
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING, Any, Literal, cast

from fsdp_advisor.errors import (
    AdvisorError,
    ErrorPayload,
    MissingExtra,
    NotPolynomial,
    NotRecordable,
    UnknownModel,
    UnreadableConfig,
    UsageError,
    from_payload,
    to_payload,
)
from fsdp_advisor.job.adaptation import CONFIG_KEY, UNCHANGED, Adaptation
from fsdp_advisor.model import catalog
from fsdp_advisor.model.multimodal import trained_on_text
from fsdp_advisor.model.profile import Profile, Tape
from fsdp_advisor.model.quantization import PACKED_NOTE, packed_checkpoint
from fsdp_advisor.model.tape_key import TapeKey
from fsdp_advisor.units import parse_count

if TYPE_CHECKING:
    from fsdp_advisor.model.config import Config
    from fsdp_advisor.recording import Recorder

# Models of the catalog need neither the cache, the hub nor the parser of configurations; those are imported when needed.

MIN_COUNT, MAX_COUNT = 1000, 10**15

NAMES_HINT = (
    "a model is an id listed by `fsdp-advisor models`, a hub id, a config.json or its directory, or a count such as 7B"
)
PASTING_HINT = "a model is an id listed by `fsdp-advisor models`, or a count such as 7B; for any other model, paste its config.json"
"""The hint of a server, which accepts no paths."""
_NUMBER_SHAPED = re.compile(r"[-+]?\.?\d[\d.,_]*(?:e[-+]?\d*)?\s*[kmbt]?", re.IGNORECASE | re.ASCII)
_PATH_SHAPED = re.compile(r"[./~]|.*\.json$|.*\\|.*/.*/", re.DOTALL)


@dataclass(frozen=True)
class Resolved:
    """A model that was found. `profile` is None for a bare parameter count."""

    name: str
    source: Literal["catalog", "config", "hub", "count", "module"]
    profile: Profile | None
    parameters: int
    trainable_parameters: int
    notes: tuple[str, ...] = ()
    recording_allowed: bool = True
    recorded_locally: bool = False
    """Whether the tapes of a catalog model are recorded with the installed versions instead of taken from the catalog."""
    has_catalogued_shapes: bool = False
    """Whether it is a configuration with the shapes of a catalog model, whose profile is used."""
    recorder: Recorder | None = None
    """The recorder of a model that is no configuration and is not cached."""
    adaptation: Adaptation = UNCHANGED
    """What is changed about the model before it trains."""
    packed: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """How a GPTQ or AWQ checkpoint is packed; empty for other models."""

    @property
    def from_catalog(self) -> bool:
        """Whether the tapes come from the catalog, which also contains the GPU tapes."""
        return self.is_catalogued and not self.recorded_locally

    @property
    def is_catalogued(self) -> bool:
        """Whether the profile comes from the catalog."""
        return self.source == "catalog" or self.has_catalogued_shapes

    def tape(self, key: TapeKey) -> Tape:
        """The tape of a key: from the catalog or the cache, else recorded now (which needs torch) and cached.

        If recording fails, the error is cached too. It is raised again until other versions of torch or transformers are
        installed. Raises UsageError for a bare parameter count, NotRecordable or MissingExtra.
        """
        if self.profile is None:
            raise UsageError(f"{self.name} is a bare parameter count: it has no layers", hint="name a model")
        tapes = self.profile.tapes
        if key.name not in tapes and self._is_refused(key):
            raise _refusal(self.profile.refusals[key.name])
        if key.name not in tapes and not self.recording_allowed:
            hint = "choose another attention or precision" if tapes else "with torch and transformers it is recorded"
            raise NotRecordable(f"{self.name}: {_described(key)} is not in the catalog", hint=hint)
        if key.name not in tapes:
            with _RECORDER_LOCK:
                if key.name not in tapes and self.recorder is not None:
                    tapes[key.name] = self._record_module(self.recorder, key)
                elif key.name not in tapes:
                    tapes[key.name] = self._load_cached(key) or self._record_now(key)
        return tapes[key.name]

    def is_new(self, key: TapeKey) -> bool:
        """Whether the key's code path can be recorded, and no tape of it was (whatever its batch), nor failed to be."""
        from fsdp_advisor.model import cache

        assert self.profile is not None
        if not self.recording_allowed or cache.installed_versions() is None or self._is_refused(key):
            return False
        cached = self._cached()
        known = {*self.profile.tapes, *((*cached.tapes, *cached.refusals) if cached else ())}
        return not any(name == key.name or name.startswith(f"{key.name}|at=") for name in known)

    def adapted(self, adaptation: Adaptation) -> Resolved:
        """The model after an adaptation, from the cache or recorded now. Adapters on a GPTQ or AWQ checkpoint leave it packed.

        Raises AdvisorError if that is not possible.
        """
        adaptation = adaptation.on_checkpoint(self.packed)
        if not adaptation or adaptation == self.adaptation:
            return self
        assert not self.adaptation
        return _adapted(self, adaptation)

    def _is_refused(self, key: TapeKey) -> bool:
        """Whether an earlier attempt showed that the tape cannot be recorded with the installed versions."""
        from fsdp_advisor.model import cache

        assert self.profile is not None
        return key.name in self.profile.refusals and (
            not self.recording_allowed or cache.installed_versions() in (None, self.profile.versions)
        )

    @property
    def _task(self) -> str | None:
        """The task of a model of the catalog or with adapters; None for others, whose task is derived from the configuration."""
        adapted = bool(self.adaptation)
        return self.profile.task if self.profile and (self.is_catalogued or adapted) else None

    def _cached(self) -> Profile | None:
        """The cached profile of the same parameters; None if there is none."""
        from fsdp_advisor.model import cache

        assert self.profile is not None
        cached = cache.fetch(self.profile.config, self._task)
        return cached if cached is not None and _same_inventory(cached, self.profile) else None

    def _load_cached(self, key: TapeKey) -> Tape | None:
        """The tape in the cache; None if there is none. Raises the cached error of a failed recording."""
        cached = self._cached()
        if cached is None:
            return None
        if key.name in cached.refusals:
            raise _refusal(cached.refusals[key.name])
        return cached.tapes.get(key.name)

    def _record_module(self, recorder: Recorder, key: TapeKey) -> Tape:
        assert self.profile is not None
        try:
            return recorder.tape(key)
        except NotPolynomial as error:
            self.profile.refusals[key.name] = to_payload(error)
            raise

    def _record_now(self, key: TapeKey) -> Tape:
        """Record the tape and cache it, or cache and raise the error."""
        from fsdp_advisor.model import cache

        assert self.profile is not None
        where = "catalog" if self.is_catalogued else "cache"
        what = f"{self.name}: {_described(key)} is not in the {where}"
        recorder = _recorder_for(self.profile.config, self.name, self._task, what)
        if not _same_inventory(recorder.profile, self.profile):
            raise NotRecordable(
                f"{what}, and {_versions(recorder.profile)} build another model than {_versions(self.profile)}",
                hint=f"pip install transformers=={self.profile.versions.get('transformers')}",
            )
        try:
            tape = recorder.profile.tapes[key.name] = recorder.tape(key)
        except NotRecordable as error:
            if not isinstance(error.__cause__, (MemoryError, OSError)):  # these may not occur again
                recorder.profile.refusals[key.name] = self.profile.refusals[key.name] = to_payload(error)
                cache.keep(recorder.profile, self._task)
            raise
        cache.keep(recorder.profile, self._task)
        return tape


def _adapted(model: Resolved, adaptation: Adaptation) -> Resolved:
    """The model after an adaptation. Adapters count as parameters, and packed weights as the weights that they contain."""
    from fsdp_advisor.model import cache

    if model.profile is None:
        raise UsageError(f"{model.name} is a bare parameter count: it has no modules to adapt", hint="name a model")
    if model.source == "module":
        raise UsageError(
            "a recorded module is trained as it was built", hint="add adapters in the function that builds the module"
        )
    config = {**model.profile.config, CONFIG_KEY: adaptation.as_dict() | {"versions": _adapter_versions(adaptation)}}
    task = model.profile.task
    if adaptation.reward_head:
        if task != "causal-lm":
            raise UsageError(
                f"{model.name} is a {task} model; a reward model is made of a causal language model",
                hint="name a causal language model, or use --task sft",
            )
        task = "sequence-classification"
    what = "with adapters" if adaptation.peft else "changed so"
    profile = cache.fetch(config, task)
    if profile is None:
        if not model.recording_allowed:
            raise NotRecordable(
                f"{model.name} {what} is not recorded yet", hint="the command line records it, with torch"
            )
        with _RECORDER_LOCK:
            profile = _recorder_for(config, model.name, task, f"{model.name} {what} is not recorded yet").profile
    return replace(
        model,
        profile=_renamed(profile, model.name),
        parameters=sum(
            prod(shape) * count
            for unit, count in profile.counted_units()
            for shape in (
                *(p.matrix or p.shape for p in unit.parameters),
                *(b.matrix for b in unit.buffers if b.matrix),
            )
        ),
        trainable_parameters=profile.trainable_parameters,
        recorded_locally=True,
        adaptation=adaptation,
        notes=tuple(note for note in model.notes if not (adaptation.packed_by and note == PACKED_NOTE)),
    )


def _adapter_versions(adaptation: Adaptation) -> dict[str, str | None]:
    """The versions of the packages that adapt a model; None for one that is not installed."""
    from importlib import metadata

    packages = ["peft"] * bool(adaptation.peft) + ["bitsandbytes"] * (
        bool(adaptation.quantization) and not adaptation.packed_by
    )
    packages += [adaptation.own_model] * bool(adaptation.own_model)
    found: dict[str, str | None] = dict.fromkeys(packages)
    for package in packages:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


def split_recorder(options: Mapping[str, Any]) -> tuple[dict[str, Any], Resolved | None]:
    """Options of a request, with the model's name in place of a recorder that `record_module` returned, and its model.

    The model is None if `model` is a name. Tapes are kept in the recorder's profile.
    """
    recorder = options.get("model")
    profile = getattr(recorder, "profile", None)
    if not isinstance(profile, Profile):
        return dict(options), None
    found = Resolved(
        profile.name,
        "module",
        profile,
        profile.parameters,
        profile.trainable_parameters,
        recorder=cast("Recorder", recorder),
    )
    return {**options, "model": profile.name}, found


def resolve(name: str, *, allow_hub: bool = True, allow_paths: bool = True, allow_recording: bool = True) -> Resolved:
    """The model that `name` means.

    Tries, in this order: an id or alias of the catalog; a file or directory on disk (if `allow_paths`); a bare parameter count;
    an id of the catalog without its owner, or some of its words, if only one model is named so; the hub (if `allow_hub`). Without `allow_recording`, `Resolved.tape` of a catalog model never imports torch.
    Raises UnknownModel, UsageError, UnreadableConfig, HubError or MissingExtra.
    """
    wanted = name.strip()
    names_hint = NAMES_HINT if allow_paths else PASTING_HINT
    if not wanted or len(wanted) > 1000 or not wanted.isprintable():
        raise UnknownModel(wanted[:80], hint=names_hint)
    if (entry := catalog.find(wanted)) is not None:
        return _catalogued(entry, wanted, allow_recording)
    from fsdp_advisor.model import hub
    from fsdp_advisor.model.config import config_path, read_config

    if allow_paths and (path := config_path(wanted)) is not None:
        return configured(read_config(path, wanted), wanted, "config")
    if _count_shaped(wanted):
        return _counted(wanted)
    if short := catalog.by_short_name(wanted):
        if len(short) > 1:
            raise UnknownModel(wanted, hint=f"several models are named so: {', '.join(entry.id for entry in short)}")
        return _catalogued(short[0], wanted, allow_recording)
    if not (allow_paths and _PATH_SHAPED.match(wanted)) and (entry := catalog.by_words(wanted)) is not None:
        return _catalogued(entry, wanted, allow_recording)
    if allow_paths and _PATH_SHAPED.match(wanted):
        raise UnknownModel(wanted[:200], hint="there is no such file or directory")
    if not allow_hub or not hub.can_be_repo_id(wanted):
        raise UnknownModel(wanted[:200], hint=hub.did_you_mean(wanted) or names_hint)
    data, notes = hub.download(wanted)
    return configured(data, wanted, "hub", notes)


def is_count(name: str) -> bool:
    """Whether `resolve` takes `name` for a bare parameter count."""
    from fsdp_advisor.model.config import config_path

    wanted = name.strip()
    return _count_shaped(wanted) and catalog.find(wanted) is None and config_path(wanted) is None


def _count_shaped(wanted: str) -> bool:
    return _NUMBER_SHAPED.fullmatch(wanted) is not None or parse_count(wanted) is not None


def _catalogued(entry: catalog.Entry, wanted: str, recording_allowed: bool) -> Resolved:
    profile = catalog.profile(entry)
    notes: tuple[str, ...] = ()
    if "/" in wanted and wanted.lower() != entry.id.lower():
        notes = (f"{wanted} has the shapes of {entry.id}, whose profile is used",)
    if entry.task == "image-text-to-text":
        notes += (trained_on_text(entry.model_type),)
    if not entry.has_tapes:
        notes += _about_recording(entry)
    return Resolved(
        entry.id,
        "catalog",
        profile,
        profile.parameters,
        profile.trainable_parameters,
        notes,
        recording_allowed,
        recorded_locally=not entry.has_tapes,
    )


def _about_recording(entry: catalog.Entry) -> tuple[str, ...]:
    """A note on a model without tapes if they cannot be recorded here."""
    from fsdp_advisor.model import cache

    if cache.installed_versions() is not None:
        return ()
    return (
        f"the catalog has the parameters of {entry.id} but no recording of its steps, so peaks and times are unknown:"
        " install torch and transformers, with which they are recorded once",
    )


def lacks_tapes(name: str) -> bool:
    """Whether this is a model of the catalog without tapes, whose steps have to be recorded."""
    entry = catalog.find(name) or next(iter(catalog.by_short_name(name)), None) or catalog.by_words(name)
    return entry is not None and not entry.has_tapes


def _counted(wanted: str) -> Resolved:
    count = parse_count(wanted)
    if count is None or not MIN_COUNT <= count <= MAX_COUNT:
        raise UsageError(
            f"a model cannot have {wanted[:80]} parameters",
            hint="from 1000 to 1e15, such as 7e9, 7B or 350M",
        )
    return Resolved(wanted, "count", None, count, count)


def configured(data: bytes, name: str, source: Literal["config", "hub"], notes: tuple[str, ...] = ()) -> Resolved:
    """The model that a config.json describes, with its profile from the cache or recorded now without tapes.

    Raises UnreadableConfig, NotRecordable or MissingExtra.
    """
    from fsdp_advisor.model import cache
    from fsdp_advisor.model.config import parse_config, trained_part
    from fsdp_advisor.model.same_shapes import entry_of

    whole = parse_config(data, name)
    config, more = trained_part(whole, name)
    notes += more
    packed = packed_checkpoint(whole.get("quantization_config")) or {}
    cached = cache.fetch(config, None)
    if cached is None and (entry := entry_of(config)) is not None:
        notes += (f"{name} has the shapes of {entry.id}, whose profile is used",)
        found = _catalogued(entry, name, recording_allowed=True)
        return replace(found, name=name, source=source, has_catalogued_shapes=True, notes=notes, packed=packed)
    if cached is not None:
        profile = _renamed(cached, name)
        if cache.installed_versions() is None:
            notes += (f"recorded earlier, with {_versions(profile)}",)
    else:
        with _RECORDER_LOCK:
            profile = _recorder_for(config, name, None, f"{name} is not in the catalog", whole=whole).profile
        if not cache.writable():
            notes += (
                f"the cache folder {cache.folder() or ''} cannot be written: the model will be recorded again each time",
            )
    return Resolved(name, source, profile, profile.parameters, profile.trainable_parameters, notes, packed=packed)


# Recording

_RECORDER_LOCK = threading.RLock()
"""Only one thread records: the recorder disables the garbage collector, installs a global dispatch mode, and keeps what its hooks
read (the current tile, phase and rows) in class attributes of `recording`."""


def _recorder_for(config: Config, name: str, task: str | None, what: str, *, whole: Config | None = None) -> Recorder:
    """A recorder for the configuration. `what` is the beginning of the error message if torch is missing.

    `whole`: the configuration before the part that is trained was selected, for the error message about an unknown model type.
    """
    from fsdp_advisor.model import cache

    if cache.installed_versions() is None:
        raise MissingExtra(f"{what}, and recording it needs torch and transformers")
    try:
        return build_recorder(json.dumps(config, sort_keys=True), name, task)
    except ImportError as error:
        raise MissingExtra(f"{what}, and torch or transformers cannot be imported: {_line(error)}") from error
    except UnreadableConfig as error:
        if "Unrecognized model identifier" not in error.message:
            raise
        raise UnreadableConfig(
            f"{name}: the installed transformers has no model of type {config['model_type']!r}",
            hint=_about_unknown_type(config, whole or {}),
        ) from error
    except AdvisorError:
        raise
    except Exception as error:
        raise NotRecordable(
            f"{name} could not be built to record it: {type(error).__name__}: {_line(error)}",
            hint="check model_type and the sizes in the configuration",
        ) from error


def _about_unknown_type(config: Config, whole: Config) -> str:
    """What to do about a model type that transformers does not have."""
    from fsdp_advisor.recording.nearest import advice

    names = [*(config.get("architectures") or ()), *(whole.get("architectures") or ())]
    architectures = [name for name in names if isinstance(name, str)]
    return advice(config["model_type"], architectures, whole.get("transformers_version"), own_code="auto_map" in whole)


@lru_cache(maxsize=4)
def build_recorder(config: str, name: str, task: str | None) -> Recorder:
    """The recorder of a configuration, given as JSON. Imports torch and transformers."""
    import huggingface_hub.constants  # noqa: F401  # reads HF_HUB_OFFLINE before the recorder sets it for transformers

    from fsdp_advisor.recording import Recorder, source_of

    return Recorder(source_of(json.loads(config), name=name, task=task))


def _same_inventory(one: Profile, other: Profile) -> bool:
    """Whether both profiles have the same parameters, so that tapes of one are valid for the other."""
    return (one.root, one.stacks) == (other.root, other.stacks)


def _renamed(cached: Profile, name: str) -> Profile:
    """A cached profile with the current name of its configuration, also in its error messages."""
    refusals = {
        key: {**payload, "message": payload["message"].replace(cached.name, name)}
        for key, payload in cached.refusals.items()
    }
    return replace(cached, name=name, refusals=refusals)


_RUN_FAILED = re.compile(r"(.+) could not be run to record it: \w+: (.+?)\.*", re.DOTALL)


def _refusal(payload: ErrorPayload) -> AdvisorError:
    """The error of an earlier attempt to record. If the model's own code failed, training it fails in the same way."""
    error = from_payload(payload)
    if (failed := _RUN_FAILED.fullmatch(error.message)) is not None:
        error.message = f"{failed[1]} fails in this step, in training as here: {failed[2]}"
    return error


def _described(key: TapeKey) -> str:
    """The key as messages name it."""
    batch = "micro-batch 1" if key.batch_is_one else "micro-batch 2 and more"
    device = " on a GPU" if key.device == "gpu" and key.attention != "flash_attention_2" else ""
    checkpointing = f"activation checkpointing {key.checkpointing}"
    wrap = f", wrap {key.wrap}" if key.wrap else ""
    if key.at is not None:
        batch = f"micro-batch {key.at[0]} of {key.at[1]} tokens"
    loss = f", loss {key.loss}" if key.loss != "full" else ""
    checkpointing += " with activation offload" if key.activation_offload else ""
    batch += f", {key.batch} batch" if key.batch != "full" else ""
    kernels = ", Liger's kernels" if key.liger_kernels else ""
    return f"a step of {key.engine}, {key.precision}, {key.attention}{device}, {checkpointing}{wrap}{loss}{kernels}, {batch}"


def _versions(profile: Profile) -> str:
    return " and ".join(f"{k} {v}" for k, v in profile.versions.items())


def _line(error: BaseException) -> str:
    """The first line of an error's text, at most 200 characters."""
    return (str(error).strip().splitlines() or [""])[0][:200]
