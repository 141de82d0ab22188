"""Empty checkpoints for models whose weights are not on this machine: the right tensors without data, for transformers' `from_pretrained`.

A checkpoint is a safetensors file with a header and a hole, which takes no space on the disk. transformers' own loader reads it, so
dtypes, device maps, quantization and sharded loading make the same GPU allocations as with real weights.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import json
import os
import re
import socket
import tempfile
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from fsdp_advisor.rehearsal.inside.import_hooks import after_import
from fsdp_advisor.rehearsal.inside.tokenizers import write_tokenizer

ARCHITECTURES = Path(__file__).parents[2] / "model" / "architectures.yaml"
WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
HUB_TIMEOUT_S = 2.0
CATALOG_DTYPE = "bfloat16"
"""The dtype assumed for catalogued models. The catalog does not contain their dtypes."""
SHARD_BYTES = 5_000_000_000
"""The size of one file, as in most published checkpoints. (Linux refuses to map a file that is larger than the machine's memory.)"""
CLASSES = {
    "causal-lm": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", "masked-lm": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "seq2seq-lm": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES", "speech-seq2seq": "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
    "image-classification": "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
    "image-text-to-text": "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
}  # fmt: skip
"""transformers' names of the classes for each task of the catalog."""
_DTYPES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64", "int32": "I32", "int16": "I16",
    "int8": "I8", "uint8": "U8", "bool": "BOOL", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
}  # fmt: skip
"""dtype -> its name in a safetensors header. Source: safetensors/torch.py, _TYPES."""


def use_empty_weights() -> None:
    """Make `from_pretrained` work without weights and without the hub, if the rehearsal's settings say so.

    With random data, also provide tokenizers for models that have none on this machine.
    """
    if "1" in (os.environ.get("REHEARSAL_EMPTY_WEIGHTS"), os.environ.get("REHEARSAL_RANDOM_DATA")):
        after_import("huggingface_hub.constants", _notice_offline)
        after_import("transformers.utils.hub", _answer_files)
        after_import("transformers.models.auto.tokenization_auto", _answer_tokenizers)
    if os.environ.get("REHEARSAL_EMPTY_WEIGHTS") == "1":
        after_import("transformers.modeling_utils", _answer_weights)


def _notice_offline(constants: Any) -> None:
    """Turn the hub's offline mode on if the hub cannot be reached, so that no download has to time out."""
    if any(os.environ.get(name) for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")):
        return
    address = urlsplit(constants.ENDPOINT)
    try:
        socket.create_connection((address.hostname or "", address.port or 443), timeout=HUB_TIMEOUT_S).close()
    except OSError:
        constants.HF_HUB_OFFLINE = True


def _answer_files(hub: Any) -> None:
    """Redirect reads of configurations and tokenizers that are not on this machine to a generated folder."""
    original = hub.cached_files

    def cached_files(path_or_repo_id: Any, filenames: Any, *args: Any, **kwargs: Any) -> Any:
        name = str(path_or_repo_id)
        find = _tokenizer_folder if all(map(_is_tokenizer_file, filenames)) else _config_folder
        return original(find(name, original) or path_or_repo_id, filenames, *args, **kwargs)

    cached_files.original = original  # type: ignore[attr-defined]  # mypy knows no attributes of functions
    hub.cached_files = cached_files


def _answer_tokenizers(auto: Any) -> None:
    """Make AutoTokenizer load a generated tokenizer unchanged; the tokenizer classes of some models would rebuild it."""
    original = auto.AutoTokenizer.from_pretrained.__func__

    def from_pretrained(cls: Any, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        hub = import_module("transformers.utils.hub")
        folder = _tokenizer_folder(str(pretrained_model_name_or_path), hub.cached_files.original)
        if folder is None:
            return original(cls, pretrained_model_name_or_path, *args, **kwargs)
        fast = import_module("transformers").PreTrainedTokenizerFast.from_pretrained(str(folder))
        fast.name_or_path = str(pretrained_model_name_or_path)
        for name in ("padding_side", "truncation_side", "model_max_length"):
            if name in kwargs:
                setattr(fast, name, kwargs[name])
        return fast

    auto.AutoTokenizer.from_pretrained = classmethod(from_pretrained)


def _is_tokenizer_file(name: str) -> bool:
    return "token" in name or name in ("vocab.json", "merges.txt", "chat_template.jinja", "vocab.txt")


def _config_folder(name: str, cached_files: Any) -> Path | None:
    """The folder of a catalogued model whose config.json is not on this machine."""
    if not name or _local(name, "config.json", cached_files):
        return None
    folder = folder_of(name)
    return folder if (folder / "config.json").exists() else None


@cache
def _tokenizer_folder(name: str, cached_files: Any) -> Path | None:
    """A folder with a generated tokenizer. None if the model's own tokenizer is on this machine or on a hub that can be reached."""
    if not name or any(_local(name, file, cached_files) for file in TOKENIZERS):
        return None
    with contextlib.suppress(Exception):
        if not Path(name).is_dir() and cached_files(name, TOKENIZERS[:1]):
            return None
    folder = folder_of(name)
    config = Path(_local(name, "config.json", cached_files) or folder / "config.json")
    if not config.exists():
        return None
    write_tokenizer(folder, json.loads(config.read_text()))
    return folder


def _local(name: str, file: str, cached_files: Any) -> str | None:
    """The path of a file of a model on this machine: in its folder, or in the hub's cache."""
    found = None
    with contextlib.suppress(Exception):
        found = cached_files(
            name, [file], local_files_only=True, _raise_exceptions_for_gated_repo=False,
            _raise_exceptions_for_missing_entries=False, _raise_exceptions_for_connection_errors=False,
        )  # fmt: skip
    return found[0] if found else None


@cache
def folder_of(name: str) -> Path:
    """The folder for the files of a model that are not on this machine, such as checkpoint and tokenizer. If the catalog has the model, it
    starts with its config.json.
    """
    key = hashlib.sha256(str(Path(name).resolve() if Path(name).is_dir() else name).encode()).hexdigest()[:12]
    folder = Path(os.environ.get("REHEARSAL_FOLDER") or tempfile.gettempdir()) / f"empty-{os.getpid()}-{key}"
    folder.mkdir(parents=True, exist_ok=True)
    config = _catalogued(name)
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def _catalogued(name: str) -> dict[str, Any] | None:
    import yaml

    rows = re.split(r"^(?=- )", ARCHITECTURES.read_text(), flags=re.MULTILINE)[1:]
    named = "".join(row for row in rows if name.lower() in row.lower())  # to parse all rows takes seconds
    for row in yaml.safe_load(named) or ():
        if name.lower() in (each.lower() for each in (row["id"], *row.get("aliases", ()))):
            classes = getattr(import_module("transformers.models.auto.modeling_auto"), CLASSES[row["task"]])
            return {"dtype": CATALOG_DTYPE, "architectures": [classes[row["config"]["model_type"]]], **row["config"]}
    return None


def _answer_weights(modeling_utils: Any) -> None:
    """Patch `from_pretrained`: if the weights are not on this machine, it loads an empty checkpoint."""
    model = modeling_utils.PreTrainedModel
    original = model.from_pretrained.__func__

    def from_pretrained(cls: Any, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        name = str(pretrained_model_name_or_path)
        hub = import_module("transformers.utils.hub")
        if kwargs.get("state_dict") is not None or any(
            _local(name, file, hub.cached_files.original) for file in WEIGHTS
        ):
            return original(cls, pretrained_model_name_or_path, *args, **kwargs)
        config = kwargs.get("config") or cls.config_class.from_pretrained(name)
        if isinstance(config, (str, os.PathLike)):
            config = cls.config_class.from_pretrained(config)
        folder = folder_of(name)
        write_checkpoint(cls, config, folder)
        found = original(cls, str(folder), *args, **{**kwargs, "config": config})
        loaded = found[0] if isinstance(found, tuple) else found
        loaded.name_or_path = loaded.config._name_or_path = name
        return found

    from_pretrained.__signature__ = inspect.signature(original)  # type: ignore[attr-defined]  # `inspect` reads it
    model.from_pretrained = classmethod(from_pretrained)


def write_checkpoint(cls: Any, config: Any, folder: Path) -> None:
    """Write config.json and the checkpoint of a class of transformers: names, shapes and dtypes as published, without data."""
    import torch
    from transformers import initialization
    from transformers.core_model_loading import revert_weight_conversion

    plain = type(config).from_dict({k: v for k, v in config.to_dict().items() if k != "quantization_config"})
    dtype = getattr(plain, "dtype", None) or torch.float32
    with torch.device("meta"), initialization.no_init_weights():
        model = cls(plain)
    seen: set[int] = set()
    states = {}
    tied = getattr(model, "all_tied_weights_keys", {})  # transformers 5 ties them after loading
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen and name not in tied:  # tied parameters are stored once
            seen.add(id(tensor))
            states[name] = tensor.detach().to(dtype) if tensor.is_floating_point() else tensor.detach()
    states = revert_weight_conversion(model, states)
    files: list[dict[str, Any]] = []
    room = 0
    for name, tensor in states.items():
        size = tensor.numel() * tensor.element_size()
        if size > room:
            files.append({})
            room = max(size, SHARD_BYTES)
        files[-1][name] = tensor
        room -= size
    index: dict[str, str] = {}
    for number, tensors in enumerate(files, 1):
        file = f"model-{number:05}-of-{len(files):05}.safetensors"
        _write_shard(folder / file, tensors)
        index |= dict.fromkeys(tensors, file)
    total = sum(tensor.numel() * tensor.element_size() for tensor in states.values())
    (folder / WEIGHTS[1]).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": index}))
    (folder / "config.json").write_text(json.dumps(plain.to_dict(), default=str))


def _write_shard(path: Path, tensors: dict[str, Any]) -> None:
    """A safetensors file with a header, and a hole instead of data. Source of the format: safetensors' README."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size()
        kind = _DTYPES[str(tensor.dtype).removeprefix("torch.")]
        header[name] = {"dtype": kind, "shape": list(tensor.shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + at)
