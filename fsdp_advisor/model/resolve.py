"""Find a model by the name that the user gives: an id of the catalog, a config.json on disk or on the hub, or a count.

Code in a hub repository is never run.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Literal

from fsdp_advisor.errors import UnknownModel, UsageError
from fsdp_advisor.model import catalog
from fsdp_advisor.model.lacking import hint
from fsdp_advisor.model.multimodal import trained_on_text, without_tower
from fsdp_advisor.model.quantization import IGNORED_NOTE, packed_checkpoint
from fsdp_advisor.model.recorders import recorder_for, recording
from fsdp_advisor.model.resolved import Resolved, renamed, versions_of
from fsdp_advisor.units import parse_count

# Models of the catalog need neither the cache, the hub nor the parser of configurations; those are imported when needed.

MIN_COUNT, MAX_COUNT = 1000, 10**15

NAMES_HINT = (
    "a model is an id listed by `fsdp-advisor models`, a hub id, a config.json or its directory, or a count such as 7B"
)
PASTING_HINT = "a model is an id listed by `fsdp-advisor models`, or a count such as 7B; for any other model, paste its config.json"
"""The hint of a server, which accepts no paths."""
_NUMBER_SHAPED = re.compile(r"[-+]?\.?\d[\d.,_]*(?:e[-+]?\d*)?\s*[kmbt]?", re.IGNORECASE | re.ASCII)
_PATH_SHAPED = re.compile(r"[./~]|.*\.json$|.*\\|.*/.*/", re.DOTALL)
_ON_THE_HUB = re.compile(r"(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/([\w.-]+/[\w.:-]+)(?:[/?#].*)?", re.ASCII)
"""The address of a model's page, with its id."""


def resolve(name: str, *, allow_hub: bool = True, allow_paths: bool = True, allow_recording: bool = True) -> Resolved:
    """The model that `name` means.

    Tries these meanings in order: an id or alias of the catalog; a file or directory (if `allow_paths`); a bare parameter count; an id of
    the catalog without its owner; words of an id that fit only one model; the hub (if `allow_hub`). The address of a model's page on the
    hub means its id. Without `allow_recording`, `Resolved.tape` of a catalog model never imports torch. Raises UnknownModel, UsageError,
    UnreadableConfig, HubError or MissingExtra.
    """
    wanted = name.strip()
    if (page := _ON_THE_HUB.fullmatch(wanted)) is not None:
        wanted = page[1]
    names_hint = NAMES_HINT if allow_paths else PASTING_HINT
    if not wanted or len(wanted) > 1000 or not wanted.isprintable():
        raise UnknownModel(wanted[:80], hint=names_hint)
    if (entry := catalog.find(wanted)) is not None:
        return _catalogued(entry, wanted, allow_recording)
    from fsdp_advisor.model import hub
    from fsdp_advisor.model.config import config_path, read_config

    if allow_paths and (path := config_path(wanted)) is not None:
        found = resolve_config(read_config(path, wanted), wanted, "config")
        return replace(found, weights=str(path.parent.resolve()))
    if _count_shaped(wanted):
        return _counted(wanted)
    is_path = allow_paths and _PATH_SHAPED.match(wanted) is not None
    if (entry := _by_part_of_name(wanted, is_path)) is not None:
        return _catalogued(entry, wanted, allow_recording)
    if is_path:
        raise UnknownModel(wanted[:200], hint="there is no such file or directory")
    if not allow_hub or not hub.can_be_repo_id(wanted):
        family = hub.others_of_its_family(wanted)
        others = f"{family}; for another one give its hub id or config.json" if family else names_hint
        raise UnknownModel(wanted[:200], hint=hub.why_lacking(wanted) or hub.did_you_mean(wanted) or others)
    data, notes = hub.download(wanted)
    return resolve_config(data, wanted, "hub", notes)


def _by_part_of_name(wanted: str, is_path: bool) -> catalog.Entry | None:
    """The one model of the catalog with this name after its owner, or with these words in its name; None if there is none.

    Raises UnknownModel if there are several, or if it is known why the catalog lacks the model.
    """
    named = catalog.by_short_name(wanted)
    if not named and not is_path:
        if "/" not in wanted and (lacking := catalog.lacking(wanted)) is not None:
            raise UnknownModel(wanted[:200], hint=hint(lacking))
        named = catalog.by_words(wanted)
    if len(named) > 1:
        most = 6
        names = ", ".join(catalog.name_with_words(entry, wanted) for entry in named[:most])
        more = f" and {len(named) - most} more, which `fsdp-advisor models` lists" if len(named) > most else ""
        raise UnknownModel(wanted[:200], hint=f"several models have this name: {names}{more}")
    return named[0] if named else None


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
    unquantized = catalog.without_format(wanted)
    meant = wanted if "/" in wanted else catalog.name_with_words(entry, unquantized)
    if meant.lower() != entry.id.lower():
        notes = (f"{meant} has the shapes of {entry.id}, whose profile is used",)
    if len(unquantized) < len(wanted) and catalog.find(wanted) is None:
        notes += (IGNORED_NOTE,)
    if entry.task == "image-text-to-text":
        notes += (trained_on_text(entry.model_type),)
    if (alone := without_tower(entry.id, meant)) is not None:
        notes += (alone,)
    if re.search(r"embedding|/bge-", entry.id.lower()) and "rerank" not in meant.lower():
        notes += (_embeds(entry.id, entry.task),)
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
        weights=catalog.spelled(entry, catalog.without_format(meant)),
    )


def _embeds(name: str, task: str) -> str:
    """A note that a text-embedding model is usually trained by another step than the estimated one.

    Source: sentence-transformers 5, losses/MultipleNegativesRankingLoss.py, which runs the model on each text of a pair.
    """
    return (
        f"{name} is estimated with the head and the loss of {task}; contrastive training of embeddings,"
        " which has neither, is not modelled"
    )


def _about_recording(entry: catalog.Entry) -> tuple[str, ...]:
    """A note on a catalog model without tapes, if they cannot be recorded because torch or transformers is missing."""
    from fsdp_advisor.model import cache

    if cache.installed_versions() is not None:
        return ()
    return (
        f"the catalog has the parameters of {entry.id} but no recording of its steps, so peaks and times are unknown:"
        " install torch and transformers, with which they are recorded once",
    )


def catalogued(name: str) -> catalog.Entry | None:
    """The model of the catalog that this name means; None if there is none."""
    entry = catalog.find(name)
    named = [entry] if entry else catalog.by_short_name(name) or catalog.by_words(name)
    return named[0] if len(named) == 1 else None


def _counted(wanted: str) -> Resolved:
    count = parse_count(wanted)
    if count is None or not MIN_COUNT <= count <= MAX_COUNT:
        raise UsageError(
            f"a model cannot have {wanted[:80]} parameters",
            hint="from 1000 to 1e15, such as 7e9, 7B or 350M",
        )
    return Resolved(wanted, "count", None, count, count)


def resolve_config(data: bytes, name: str, source: Literal["config", "hub"], notes: tuple[str, ...] = ()) -> Resolved:
    """Resolve a model from its config.json. The profile is from the cache, a catalog model of equal shapes, or a new recording; tapes are
    recorded when asked for.

    Raises UnreadableConfig, NotRecordable or MissingExtra.
    """
    from fsdp_advisor.model import cache
    from fsdp_advisor.model.config import checkpoint_dtype, parse_config, trained_part
    from fsdp_advisor.model.same_shapes import entry_of

    whole = parse_config(data, name)
    config, more = trained_part(whole, name)
    notes += more
    packed = packed_checkpoint(whole.get("quantization_config")) or {}
    cached = cache.fetch(config, None)
    if cached is None and (entry := entry_of(config)) is not None:
        notes += (f"{name} has the shapes of {entry.id}, whose profile is used",)
        found = _catalogued(entry, name, recording_allowed=True)
        assert found.profile is not None
        profile = replace(found.profile, checkpoint_dtype=checkpoint_dtype(whole))
        return replace(
            found, profile=profile, name=name, source=source, has_catalogued_shapes=True, notes=notes, packed=packed
        )
    if cached is not None:
        profile = renamed(cached, name)
        if cache.installed_versions() is None:
            notes += (f"recorded earlier, with {versions_of(profile)}",)
    else:
        with recording(name):
            profile = recorder_for(config, name, None, f"{name} is not in the catalog", whole=whole).profile
        if not cache.writable():
            notes += (
                f"the cache folder {cache.profile_folder() or ''} cannot be written: the model will be recorded again each time",
            )
    profile = replace(profile, checkpoint_dtype=checkpoint_dtype(whole))
    named = [str(kind) for kind in config.get("architectures") or ()]
    if profile.task in ("causal-lm", "masked-lm") and any(re.fullmatch(r"(?!.*Head).*Model", kind) for kind in named):
        notes += (_embeds(name, profile.task),)
    return Resolved(name, source, profile, profile.parameters, profile.trainable_parameters, notes, packed=packed)
