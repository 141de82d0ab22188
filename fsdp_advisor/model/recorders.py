"""Make the recorder of a configuration. Only here does `model` import torch and transformers."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import lru_cache
from typing import TYPE_CHECKING

from fsdp_advisor.errors import AdvisorError, MissingExtra, NotRecordable, UnreadableConfig

if TYPE_CHECKING:
    from fsdp_advisor.model.config import Config
    from fsdp_advisor.recording import Recorder

RECORDER_LOCK = threading.RLock()
"""Only one thread records: the recorder disables the garbage collector, installs a global dispatch mode, and keeps what its hooks
read (the current tile, phase and rows) in class attributes of `recording`.
"""

Watch = Callable[[str], AbstractContextManager[object]]
"""The function that an interface calls to show that something is being recorded. The context that it returns ends with the recording."""


@contextlib.contextmanager
def watching(watch: Watch) -> Iterator[None]:
    """Context that calls `watch` with the description of each recording of this process."""
    _watches.append(watch)
    try:
        yield
    finally:
        _watches.remove(watch)


@contextlib.contextmanager
def recording(what: str) -> Iterator[None]:
    """Context in which one thread at a time records `what`."""
    with RECORDER_LOCK, contextlib.ExitStack() as contexts:
        for watch in _watches:
            contexts.enter_context(watch(what))
        yield


_watches: list[Watch] = []


def recorder_for(
    config: Config, name: str, task: str | None, what: str, *, whole: Config | None = None, extra: str = "torch"
) -> Recorder:
    """A recorder for the configuration. `what` is the beginning of the error message if torch is missing, `extra` the optional dependency
    that the message names.

    `whole`: the configuration before the part that is trained was selected, for the error message about an unknown model type.
    """
    from fsdp_advisor.model import cache

    if cache.installed_versions() is None:
        raise MissingExtra(f"{what}, and recording it needs torch and transformers", extra=extra)
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
    """The hint about a model type that transformers does not have."""
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


def _line(error: BaseException) -> str:
    """The first line of an error's text, at most 200 characters."""
    return (str(error).strip().splitlines() or [""])[0][:200]
