"""Download the config.json of a hub repository, through the Hugging Face cache on disk.

huggingface_hub is imported only when a download starts.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from fsdp_advisor.errors import AdvisorError, HubError, UnknownModel, UnreadableConfig
from fsdp_advisor.model import catalog, lacking
from fsdp_advisor.model.config import CONFIG_HINT, MAX_CONFIG_BYTES, MAX_CONFIG_MIB, read_config

HUB_TIMEOUT_SECONDS = 10

_REPO_PART = r"[A-Za-z0-9_](?:[\w.-]{0,94}[A-Za-z0-9_])?"
_REPO_ID = re.compile(rf"(?:{_REPO_PART}/)?{_REPO_PART}", re.ASCII)


def can_be_repo_id(wanted: str) -> bool:
    """Whether `wanted` follows the hub's rules for repository ids. Other names are never sent."""
    return (
        bool(_REPO_ID.fullmatch(wanted)) and "--" not in wanted and ".." not in wanted and not wanted.endswith(".git")
    )


def did_you_mean(wanted: str) -> str | None:
    """A hint with the names of the catalog's one or two most similar models; None if none is similar."""
    found = {catalog.find(name): name for name in reversed(catalog.nearest(wanted) if len(wanted) <= 200 else [])}
    return f"did you mean {' or '.join([*reversed(found.values())][:2])}?" if found else None


def others_of_its_family(wanted: str) -> str | None:
    """A hint with models of the catalog that begin with the same words; None if there are none."""
    family = catalog.family(wanted) if len(wanted) <= 200 else []
    return f"models of a similar name in the catalog: {', '.join(family)}" if family else None


def why_lacking(wanted: str) -> str | None:
    """A hint on why the catalog lacks this very model, though it may have models of similar names; None if that is not known."""
    if len(wanted) > 200:
        return None
    if (model := catalog.lacking(wanted)) is not None:
        return lacking.hint(model)
    if (entry := catalog.unpacked(wanted)) is not None:
        return (
            f"how a GPTQ or AWQ checkpoint packs the weights of {entry.id} is in its config.json: give its hub id, or a directory"
            " with that file"
        )
    return None


def download(name: str, *, anonymous: bool = False) -> tuple[bytes, tuple[str, ...]]:
    """The config.json of a hub repository, and notes.

    The first request is for the headers only, because unlike hf_hub_download it neither retries nor writes when it fails.
    With `anonymous`, only public repositories are read: no token is sent, no local cache is used, and no host other than the
    hub is contacted. Raises UnknownModel, UnreadableConfig or HubError.
    """
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.errors import EntryNotFoundError, OfflineModeIsEnabled

    timeout = min(constants.HF_HUB_ETAG_TIMEOUT, HUB_TIMEOUT_SECONDS)
    try:
        with _quiet_hub():
            token = False if anonymous else None
            found = get_hf_file_metadata(hf_hub_url(name, "config.json"), timeout=timeout, token=token)
            if found.commit_hash is None or found.etag is None:
                raise HubError(
                    f"{_hub()} does not answer like a Hugging Face hub",
                    hint="check HF_ENDPOINT and the proxy of the network",
                )
            if found.size is not None and found.size > MAX_CONFIG_BYTES:
                raise UnreadableConfig(
                    f"{name}: larger than {MAX_CONFIG_MIB} MiB, so not a config.json", hint=CONFIG_HINT
                )
            if anonymous and urlsplit(found.location).netloc != urlsplit(constants.ENDPOINT).netloc:
                raise UnreadableConfig(
                    f"{name}: its config.json is stored on another host than the hub", hint=CONFIG_HINT
                )
            return _past_cache(name, timeout) if anonymous else _through_cache(name, timeout), ()
    except AdvisorError:
        raise
    except Exception as error:
        explained = _hub_error(name, error)
        skip_cache = anonymous or isinstance(error, EntryNotFoundError)
        cached = None if skip_cache else try_to_load_from_cache(name, "config.json")
        if not isinstance(cached, str):
            raise explained from error
        reason = "HF_HUB_OFFLINE is set" if isinstance(error, OfflineModeIsEnabled) else explained.message
        return read_config(Path(cached), name), (f"config.json is from the local Hugging Face cache: {reason}",)


def _through_cache(name: str, timeout: float) -> bytes:
    """Download into the Hugging Face cache, or to a temporary folder if that cache cannot be written."""
    from huggingface_hub import hf_hub_download

    try:
        return read_config(Path(hf_hub_download(name, "config.json", etag_timeout=timeout)), name)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC):
            raise
    return _past_cache(name, timeout, token=None)


def _past_cache(name: str, timeout: float, token: bool | None = False) -> bytes:
    """Download to a temporary folder, without the Hugging Face cache."""
    from huggingface_hub import hf_hub_download

    with tempfile.TemporaryDirectory() as folder:
        path = hf_hub_download(name, "config.json", etag_timeout=timeout, cache_dir=folder, token=token)
        return read_config(Path(path), name)


def _hub_error(name: str, error: Exception) -> AdvisorError:
    """The error that explains a failed download. It never contains the library's own text, which may quote the token."""
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        HfHubHTTPError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
    )

    known = why_lacking(name)
    guess = None if known else did_you_mean(name)
    near = known or guess or others_of_its_family(name)
    if isinstance(error, OfflineModeIsEnabled):
        if near:
            return UnknownModel(name, hint=f"{near} (HF_HUB_OFFLINE is set, so the hub was not asked)")
        return HubError(
            f"{name} is not in the catalog, and HF_HUB_OFFLINE forbids access to the hub",
            hint="unset HF_HUB_OFFLINE, or pass a directory that contains the model's config.json",
        )
    if isinstance(error, EntryNotFoundError):
        return UnreadableConfig(
            f"{name}: the hub repository has no config.json",
            hint="if it is an adapter or a converted model, pass its base model instead",
        )
    if isinstance(error, GatedRepoError):
        return HubError(f"{name} is gated on the hub", hint=f"accept its licence at {_hub()}/{name}, then set HF_TOKEN")
    if isinstance(error, RepositoryNotFoundError):
        return UnknownModel(name, hint=f"{near or 'the hub has no such repository'} (if it is private, set HF_TOKEN)")
    if isinstance(error, HfHubHTTPError) and error.response is not None:
        status = error.response.status_code
        if status in (401, 403):
            hint = f"check HF_TOKEN, and that its account can read {_hub()}/{name}"
            return HubError(f"the hub refused {name} (HTTP status {status})", hint=hint)
        return HubError(f"the hub could not deliver {name} (HTTP status {status})", hint="try again later")
    hint = "check the network and HF_ENDPOINT, or pass a directory that contains the model's config.json"
    if known:
        hint = f"{known}; {hint}"
    elif near:
        hint = f"{guess} If not, {hint}" if guess else f"{near}; for another one {hint}"
    return HubError(f"{name} is not in the catalog, and {_hub()} cannot be reached: {_reason(error)}", hint=hint)


def _reason(error: BaseException | None) -> str:
    """Why a connection failed, from the first system error in the chain of causes."""
    names = []
    while error is not None:
        if isinstance(error, OSError) and error.strerror:
            return error.strerror
        names.append(type(error).__name__)
        error = error.__cause__ or error.__context__
    return "no answer in time" if any("Timeout" in n for n in names) else names[0]


def _hub() -> str:
    """The address of the hub, without credentials."""
    from huggingface_hub import constants

    parts = urlsplit(constants.ENDPOINT)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"


@contextlib.contextmanager
def _quiet_hub() -> Iterator[None]:
    """Disable huggingface_hub's progress bars, log messages and telemetry."""
    from huggingface_hub import constants
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    logger, bars = logging.getLogger("huggingface_hub"), "huggingface_hub.http_get"
    level, telemetry = logger.level, constants.HF_HUB_DISABLE_TELEMETRY
    silence = not are_progress_bars_disabled(bars) and "HF_HUB_DISABLE_PROGRESS_BARS" not in os.environ
    logger.setLevel(logging.CRITICAL)
    constants.HF_HUB_DISABLE_TELEMETRY = True
    if silence:
        disable_progress_bars(bars)
    try:
        yield
    finally:
        logger.setLevel(level)
        constants.HF_HUB_DISABLE_TELEMETRY = telemetry
        if silence:
            enable_progress_bars(bars)
