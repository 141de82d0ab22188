"""A resolved model: its profile, its tapes, and its variants with adapters, frozen parameters or a quantized base."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import TYPE_CHECKING, Any, Literal

from fsdp_advisor.errors import (
    ADAPTERS_EXTRA,
    AdvisorError,
    ErrorPayload,
    NotPolynomial,
    NotRecordable,
    UsageError,
    from_payload,
    to_payload,
)
from fsdp_advisor.job.adaptation import CONFIG_KEY, UNCHANGED, Adaptation
from fsdp_advisor.model.adapter_targets import absent_targets, check_targets
from fsdp_advisor.model.freezing import check_patterns, parameter_names
from fsdp_advisor.model.profile import Profile
from fsdp_advisor.model.quantization import PACKED_NOTE
from fsdp_advisor.model.recorders import RECORDER_LOCK, recorder_for, recording
from fsdp_advisor.model.tape import Tape
from fsdp_advisor.model.tape_key import TapeKey

if TYPE_CHECKING:
    from fsdp_advisor.recording import Recorder

# Models of the catalog need neither the cache nor adapted profiles, which are imported when needed.


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
    """Whether the model is a configuration with the same shapes as a catalog model, whose profile is used."""
    recorder: Recorder | None = None
    """The recorder of a module that `record_module` describes. It has no configuration and is not cached."""
    adaptation: Adaptation = UNCHANGED
    """The changes made to the model before it trains."""
    packed: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """The settings of a GPTQ or AWQ checkpoint; empty for other models."""
    weights: str | None = None
    """The hub id or directory of the weights, if it is not `name`."""

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
            is_one_batch = key.at is not None or not tapes
            hint = (
                "with torch and transformers it is recorded"
                if is_one_batch
                else "choose another attention or precision"
            )
            raise NotRecordable(f"{self.name}: {_described(key)} is not in the catalog", hint=hint)
        if key.name not in tapes:
            with RECORDER_LOCK:
                if key.name not in tapes and self.recorder is not None:
                    tapes[key.name] = self._record_module(self.recorder, key)
                elif key.name not in tapes:
                    tapes[key.name] = self._load_cached(key) or self._record_now(key)
        return tapes[key.name]

    def is_new(self, key: TapeKey) -> bool:
        """Whether the key's code path can be recorded, and no recording of it has been tried yet, for any batch."""
        assert self.profile is not None
        if not self.can_record or self._is_refused(key):
            return False
        cached = self._cached()
        known = {*self.recorded_names, *(cached.refusals if cached else ())}
        return not any(name == key.name or name.startswith(f"{key.name}|at=") for name in known)

    @property
    def can_record(self) -> bool:
        """Whether missing tapes can be recorded."""
        from fsdp_advisor.model import cache

        return self.recording_allowed and cache.installed_versions() is not None

    @property
    def recorded_names(self) -> frozenset[str]:
        """The names of the tapes of the profile and of the cache."""
        assert self.profile is not None
        cached = self._cached()
        return frozenset((*self.profile.tapes, *(cached.tapes if cached else ())))

    def adapted(self, adaptation: Adaptation) -> Resolved:
        """The model after an adaptation, from the cache or recorded now. A GPTQ or AWQ checkpoint stays packed under adapters.

        Raises AdvisorError if that is not possible.
        """
        adaptation = adaptation.on_checkpoint(self.packed)
        if not adaptation or adaptation == self.adaptation:
            return self
        assert not self.adaptation
        return _adapted(self, adaptation)

    def task_after(self, adaptation: Adaptation) -> str | None:
        """The task of the adapted model; None for a bare parameter count. Raises UsageError if the model cannot become a reward model."""
        task = self.profile.task if self.profile else None
        if task is None or not adaptation.reward_head:
            return task
        if task not in ("causal-lm", "sequence-classification"):
            raise UsageError(
                f"{self.name} is for {task}; a reward model is made of a causal language model",
                hint="name a causal language model, or use --task sft",
            )
        return "sequence-classification"

    def _is_refused(self, key: TapeKey) -> bool:
        """Whether an earlier attempt showed that the tape cannot be recorded with the installed versions."""
        from fsdp_advisor.model import cache

        assert self.profile is not None
        return key.name in self.profile.refusals and (
            not self.recording_allowed or cache.installed_versions() in (None, self.profile.versions)
        )

    @property
    def _task(self) -> str | None:
        """The task, if the catalog or an adaptation fixes it; else None."""
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
        with recording(f"{self.name}: {_described(key)}"):
            recorder = recorder_for(self.profile.config, self.name, self._task, what)
            if not _same_inventory(recorder.profile, self.profile):
                raise NotRecordable(
                    f"{what}, and {versions_of(recorder.profile)} build another model than {versions_of(self.profile)}",
                    hint=f"pip install transformers=={self.profile.versions.get('transformers')}",
                )
            try:
                tape = recorder.profile.tapes[key.name] = recorder.tape(key)
            except NotRecordable as error:
                if not isinstance(error.__cause__, (MemoryError, OSError)):  # these errors may be temporary
                    recorder.profile.refusals[key.name] = self.profile.refusals[key.name] = to_payload(error)
                    cache.keep(recorder.profile, self._task)
                raise
        cache.keep(recorder.profile, self._task)
        return tape


def split_recorder(options: Mapping[str, Any]) -> tuple[dict[str, Any], Resolved | None]:
    """(options whose `model` is a name, the recorder's model). `model` may be a recorder, which `record_module` returned.

    The second is None if `model` is a name already. Tapes are kept in the recorder's profile.
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
        recorder=recorder,
    )
    return {**options, "model": profile.name}, found


def _adapted(model: Resolved, adaptation: Adaptation) -> Resolved:
    """The model after an adaptation. Its parameter count includes adapters, and counts the unpacked elements of packed weights."""
    from fsdp_advisor.model import cache
    from fsdp_advisor.model.adapted_catalog import adapted_profile

    if model.profile is None:
        raise UsageError(f"{model.name} is a bare parameter count: it has no modules to adapt", hint="name a model")
    if model.source == "module":
        raise UsageError(
            "a recorded module is trained as it was built", hint="add adapters in the function that builds the module"
        )
    versions = _adapter_versions(adaptation)
    config = {**model.profile.config, CONFIG_KEY: adaptation.as_dict() | {"versions": versions}}
    task = model.task_after(adaptation)
    what = "with adapters" if adaptation.peft else "with these changes"
    profile = adapted_profile(model.name, adaptation) if model.source == "catalog" else None
    profile = profile or cache.fetch(config, task)
    if profile is None:
        # otherwise the recorder would find these out seconds later
        check_patterns(adaptation.freeze, parameter_names(model.profile), model.name)
        check_targets(adaptation, model.profile, versions.get("peft"))
        if not model.recording_allowed:
            raise NotRecordable(
                f"{model.name} {what} is not recorded yet", hint="the command line records it, with torch"
            )
        with recording(f"{model.name} {what}"):
            profile = recorder_for(
                config, model.name, task, f"{model.name} {what} is not recorded yet", extra=ADAPTERS_EXTRA
            ).profile
    profile = replace(renamed(profile, model.name), checkpoint_dtype=model.profile.checkpoint_dtype)
    return replace(
        model,
        profile=profile,
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
        notes=(
            *(note for note in model.notes if not (adaptation.packed_by and note == PACKED_NOTE)),
            *absent_targets(adaptation, profile),
        ),
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


def _same_inventory(one: Profile, other: Profile) -> bool:
    """Whether both profiles have the same parameters, so that tapes of one are valid for the other."""
    return (one.root, one.stacks) == (other.root, other.stacks)


def renamed(cached: Profile, name: str) -> Profile:
    """A cached profile with the current name of its configuration, also in its error messages."""
    refusals = {
        key: {**payload, "message": payload["message"].replace(cached.name, name)}
        for key, payload in cached.refusals.items()
    }
    return replace(cached, name=name, refusals=refusals)


_RUN_FAILED = re.compile(
    r"(.+) could not be run to record it: (?!Unsupported|DataDependent|DynamicOutput)\w+: (.+?)\.*", re.DOTALL
)
"""Matches refusals without those that only concern fake tensors."""


def _refusal(payload: ErrorPayload) -> AdvisorError:
    """The error of an earlier attempt to record. If the model's own code failed, training fails in the same way."""
    error = from_payload(payload)
    if (failed := _RUN_FAILED.fullmatch(error.message)) is not None:
        error.message = f"{failed[1]} fails in this step, and would fail in training too: {failed[2]}"
    return error


def _described(key: TapeKey) -> str:
    """The key as words for a message."""
    batch = "micro-batch 1" if key.batch_is_one else "micro-batch 2 and more"
    device = " on a GPU" if key.device == "gpu" and key.attention != "flash_attention_2" else ""
    checkpointing = f"activation checkpointing {key.checkpointing}"
    wrap = f", wrap {key.wrap}" if key.wrap else ""
    if key.at is not None:
        batch = f"micro-batch {key.at[0]} of {key.at[1]} tokens"
    loss = f", loss {key.loss}" if key.loss != "full" else ""
    checkpointing += " with activation offload" if key.activation_offload != "none" else ""
    batch += f", {key.batch} batch" if key.batch != "full" else ""
    kernels = ", Liger's kernels" if key.liger_kernels else ""
    kernels += f", --compile {key.compile.partition('-')[0]}" if key.compile != "none" else ""
    kernels += f", MLP in shards ({key.tiled_mlp})" if key.tiled_mlp else ""
    kernels += f", axolotl's kernels for adapters ({key.lora_kernels})" if key.lora_kernels else ""
    kernels += ", gradients of the embedding's output" if key.input_gradients else ""
    what = "a forward without gradients" if key.evaluates else "a step"
    return f"{what} of {key.engine}, {key.precision}, {key.attention}{device}, {checkpointing}{wrap}{loss}{kernels}, {batch}"


def versions_of(profile: Profile) -> str:
    """The libraries that the profile was recorded with, as a phrase such as "torch 2.9.0 and transformers 4.57.1"."""
    return " and ".join(f"{k} {v}" for k, v in profile.versions.items())
