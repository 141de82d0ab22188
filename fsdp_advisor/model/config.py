"""Find, read and check a config.json, and select the part of it that is trained.

A configuration may be hostile. Its size, nesting and numbers are checked here, before torch builds the model.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn, cast, get_args

from fsdp_advisor.errors import UnreadableConfig
from fsdp_advisor.job.choices import WeightDtype
from fsdp_advisor.model.multimodal import TRAINED_WHOLE, TRAINED_WITH_IMAGES, trained_on_images, trained_on_text
from fsdp_advisor.model.quantization import IGNORED_NOTE, PACKED_NOTE, packed_checkpoint

Config = dict[str, Any]

MAX_CONFIG_MIB = 4
"""The largest accepted config.json. (One with the class names of ImageNet-22k, which it lists twice, has 2 MiB.)"""
MAX_CONFIG_BYTES = MAX_CONFIG_MIB * 2**20
MAX_DEPTH = 32
MAX_INTEGER = 10**12
"""The largest value of integers that a model may loop over or allocate."""
MAX_DIGITS = 64
"""The largest number of digits of any integer. Tokenizers write int(1e30) for "no limit"."""
MAX_MODULES = 500_000

CONFIG_HINT = "use the config.json that transformers saves with a model"
_DIFFUSERS_HINT = "it is of a model of diffusers: record that in Python with fsdp_advisor.record_module (examples/diffusion_transformer.py)"
"""The hint about a configuration in which diffusers names a class.

Source: huggingface/diffusers, src/diffusers/configuration_utils.py, ConfigMixin.to_json_string.
"""

_LAYERS = re.compile(r"n_layers?|num_(hidden_|encoder_|decoder_)?layers|(encoder|decoder)_layers")
_EXPERTS = re.compile(r"num_experts|num_local_experts|n_routed_experts|moe_num_experts")
_STRICT = (  # (key, minimum, maximum, whether a list is allowed) of values that must be null or an integer in this range
    (_LAYERS, 1, 10**4, False),
    (re.compile(r"hidden_size|n_embd|d_model"), 1, 10**6, False),
    (re.compile(r"hidden_dim|embed_dim|dim"), 1, 10**6, True),
    (re.compile(r"vocab_size"), 1, 10**8, False),
    (re.compile(r"(num|n|encoder|decoder)_(attention_|key_value_|kv_)?heads?"), 1, 10**5, True),
    (_EXPERTS, 0, 10**5, False),
)
_LOOSE = (  # (key, maximum) of values that may have any type; building a model loops over some of these integers
    (re.compile(r".*(param|token|step|position|ctx).*"), MAX_INTEGER),
    (re.compile(r".*layers"), 10**4),
    (re.compile(r".*experts"), 10**5),
    (re.compile(r"(num|n)_.*"), 10**6),
)
_TOKEN = re.compile(rb'"(?:[^"\\]+|\\.)*"?|[\[\]{}]', re.DOTALL)  # a string, or a bracket outside of strings
_SHOWN_KEY = re.compile(r"[\w.-]{1,64}", re.ASCII)
_LANGUAGE_PARTS = ("text_config", "llm_config", "language_config", "thinker_config")
"""Keys of a multimodal configuration with its language model: transformers' own, InternVL's, DeepSeek-VL's, Qwen-Omni's."""
_NOT_SHAPES = (
    "_name_or_path", "auto_map", "quantization_config", "transformers_version", "torch_dtype", "dtype", "use_cache",
)  # fmt: skip


def parse_config(data: bytes, name: str) -> Config:
    """The JSON object in `data`, after checking its size, nesting and numbers.

    `Infinity` and `NaN` are values, as in every configuration of Mamba-2. transformers writes them so, and, from version 5, as
    `{"__float__": "Infinity"}`.
    Raises UnreadableConfig, which names the file and the key that is wrong.
    """

    def refuse(what: str, hint: str = CONFIG_HINT) -> NoReturn:
        raise UnreadableConfig(f"{name}: {what}", hint=hint)

    if len(data) > MAX_CONFIG_BYTES:
        refuse(f"larger than {MAX_CONFIG_MIB} MiB, so not a config.json")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        refuse(f"not UTF-8 text (byte {error.start})")
    if json_depth_exceeds(data, MAX_DEPTH):
        refuse(f"nested deeper than {MAX_DEPTH} levels")
    try:
        config = json.loads(text, parse_int=_integer, object_hook=_special_float)
    except (ValueError, RecursionError) as error:
        where = f" (line {error.lineno}, column {error.colno})" if isinstance(error, json.JSONDecodeError) else ""
        refuse(f"not valid JSON{where}", "check that the file is complete; " + CONFIG_HINT)
    if not isinstance(config, dict):
        refuse(f"{_json_type(config)}, not an object")
    for keys, problem in _problems(config, ()):
        refuse(f"{'.'.join(map(_shown, keys))} {problem}")
    return config


def _integer(digits: str) -> int:
    """The integer; 10**MAX_DIGITS if it has more digits, because Python takes long to convert it."""
    return int(digits) if len(digits.lstrip("-")) <= MAX_DIGITS else 10**MAX_DIGITS


def _special_float(value: Config) -> Config | float:
    """The float that transformers 5 writes as `{"__float__": "Infinity"}` because it is not finite; any other object unchanged.

    Source: transformers/configuration_utils.py, PreTrainedConfig._decode_special_floats.
    """
    if value.keys() == {"__float__"} and value["__float__"] in ("Infinity", "-Infinity", "NaN"):
        return float(value["__float__"])
    return value


def json_depth_exceeds(data: bytes, limit: int) -> bool:
    """Whether JSON text nests deeper than `limit` levels. The text is not parsed and need not be valid.

    >>> json_depth_exceeds(b'[[1], "[[["]', 2), json_depth_exceeds(b"[[[", 2)
    (False, True)
    """
    if data.count(b"[") + data.count(b"{") <= limit:
        return False
    depth = 0
    for token in _TOKEN.finditer(data):
        if token[0] in (b"[", b"{"):
            depth += 1
            if depth > limit:
                return True
        elif token[0] in (b"]", b"}"):
            depth -= 1
    return False


def checkpoint_dtype(config: Config) -> WeightDtype | None:
    """The dtype in which the model was saved. None if the configuration does not say, or if other code packs the weights.

    Source: transformers 5.23, modeling_utils.py, `save_pretrained`; older versions write `torch_dtype`.
    """
    parts = (config, _language_part(config) or {})
    if any(part.get("quantization_config") for part in parts):
        return None
    for part in parts:
        stated = str(part.get("dtype") or part.get("torch_dtype")).removeprefix("torch.")
        if stated in get_args(WeightDtype):
            return cast("WeightDtype", stated)
    return None


def trained_part(config: Config, name: str) -> tuple[Config, tuple[str, ...]]:
    """The part of a checked configuration that is built and trained, and notes on what is not estimated.

    For a multimodal model, this is the whole configuration if the model can train on text only, else its text part. Raises
    UnreadableConfig if no model can be built from the configuration.
    """
    _check_architectures(config, name)
    config, notes = _text_part(config)
    config = _shapes(config)
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or not _SHOWN_KEY.fullmatch(model_type):
        problem = "no model_type" if model_type is None else "an invalid model_type"
        raise UnreadableConfig(
            f"{name}: the configuration has {problem}", hint=_DIFFUSERS_HINT if "_class_name" in config else CONFIG_HINT
        )
    _check_architectures(config, name)
    layers, experts = _largest(config, _LAYERS), _largest(config, _EXPERTS)
    if layers * experts > MAX_MODULES:
        raise UnreadableConfig(
            f"{name}: {layers} layers x {experts} experts = {layers * experts}, more than {MAX_MODULES}",
            hint=CONFIG_HINT,
        )
    return config, notes


def _check_architectures(config: Config, name: str) -> None:
    found = config.get("architectures")
    if found is not None and not (isinstance(found, list) and all(isinstance(kind, str) for kind in found)):
        raise UnreadableConfig(f"{name}: architectures must be a list of names", hint=CONFIG_HINT)


def _text_part(config: Config) -> tuple[Config, tuple[str, ...]]:
    """The text part of a multimodal configuration, and notes on what is not estimated. Other configurations are returned whole."""
    notes: tuple[str, ...] = ()
    quantized = config.get("quantization_config")
    thinker = config.get("thinker_config")
    if isinstance(thinker, dict) and f"{config.get('model_type')}_thinker" in TRAINED_WHOLE:
        config = {"model_type": f"{config['model_type']}_thinker", **thinker}
        notes += (
            "only the thinker is estimated, the part of the model that transformers trains: not the talker, which makes speech",
        )
    inner = _language_part(config)
    named = config.get("model_type")
    outer_type = named if isinstance(named, str) else None
    if inner and outer_type and (outer_type in TRAINED_WHOLE or outer_type in TRAINED_WITH_IMAGES):
        quantized = quantized or inner.get("quantization_config")
        notes += ((trained_on_text if outer_type in TRAINED_WHOLE else trained_on_images)(outer_type),)
    elif inner:
        guessed = outer_type and f"{outer_type}_text"
        tied = {k: config[k] for k in ("tie_word_embeddings",) if k in config}
        config = {**tied, "model_type": guessed, **inner}
        quantized = quantized or config.get("quantization_config")
        notes += (f"only the text part ({_shown(str(config['model_type']))}) of a multimodal model is estimated",)
    if quantized:
        notes += (PACKED_NOTE if packed_checkpoint(quantized) else IGNORED_NOTE,)
    return config, notes


def _language_part(config: Config) -> Config | None:
    """The configuration of a multimodal model's language model; None if the model is not multimodal."""
    kinds = config.get("architectures")
    if isinstance(kinds, list) and any(str(kind).endswith("ForImageClassification") for kind in kinds):
        return None  # CLIP, which has no language model
    for key in _LANGUAGE_PARTS:
        if isinstance(inner := config.get(key), dict) and inner:
            return _language_part(inner) or inner
    return None


def _shapes(config: Config) -> Config:
    """The configuration (and nested ones) without the values that affect no shape."""
    return {k: _shapes(v) if isinstance(v, dict) else v for k, v in config.items() if k not in _NOT_SHAPES}


def _largest(config: Config, key: re.Pattern[str]) -> int:
    """The largest integer whose key matches, in the configuration and nested ones; at least 1."""
    nested = [_largest(value, key) for value in config.values() if isinstance(value, dict)]
    return max([1, *nested, *(v for k, v in config.items() if type(v) is int and key.fullmatch(k))])


def _problems(value: Config | list[Any], keys: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield every impossible value: the keys that lead to it, and what is wrong with it."""
    for key, item in value.items() if isinstance(value, dict) else ((None, item) for item in value):
        here = keys if key is None else (*keys, key)
        if isinstance(item, (dict, list)):
            bounds = _bounds(key or "")
            if bounds is not None and not (bounds[2] and isinstance(item, list)):
                yield here, f"must be an integer, not {_json_type(item)}"
            yield from _problems(item, here)
        elif problem := _problem(here[-1] if here else "", item):
            yield here, problem


def _problem(key: str, item: object) -> str | None:
    """The problem with one value, as text; None if the value is possible."""
    if isinstance(item, int) and abs(item) >= 10**MAX_DIGITS:
        return f"has more than {MAX_DIGITS} digits"
    if len(key) > 64:
        return None
    if (bounds := _bounds(key)) is not None and item is not None:
        low, high, _ = bounds
        if type(item) is not int:
            shown = json.dumps(item)
            return f"must be an integer, not {shown if len(shown) < 40 else _json_type(item)}"
        if not low <= item <= high:
            return f"is {item}, not between {low} and {high}"
    elif type(item) is int and (limit := _limit(key)) is not None and item > limit:
        return f"is {item}, more than {limit}"
    return None


def _bounds(key: str) -> tuple[int, int, bool] | None:
    return next(((low, high, many) for pattern, low, high, many in _STRICT if pattern.fullmatch(key)), None)


def _limit(key: str) -> int | None:
    return next((high for pattern, high in _LOOSE if pattern.fullmatch(key)), None)


def _shown(key: str) -> str:
    return key if _SHOWN_KEY.fullmatch(key) else ascii(key[:40])


def _json_type(value: object) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")


# Files


def config_path(wanted: str) -> Path | None:
    """The configuration file that `wanted` names, as a file or as its directory; None if no such path exists.

    A leading `~` or `~user` means a home directory. Raises UnreadableConfig if the path exists but contains no config.json.
    """
    path = Path(os.path.expanduser(wanted))  # noqa: PTH111  # Path.expanduser raises if there is no such user
    mode = _mode(path, wanted)
    if mode is None:
        return None
    if stat.S_ISDIR(mode):
        inside = path / "config.json"
        if _mode(inside, wanted) is None:
            hint = "save the config.json of the model there"
            if (path / "adapter_config.json").is_file():
                hint = "the directory contains an adapter: pass its base model instead"
            raise UnreadableConfig(f"{wanted}: a directory without a config.json", hint=hint)
        return inside
    if path.suffix.lower() != ".json":
        raise UnreadableConfig(f"{wanted}: neither a directory nor a .json file", hint=CONFIG_HINT)
    return path


def _mode(path: Path, wanted: str) -> int | None:
    try:
        return path.stat().st_mode
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EPERM):
            raise _unreadable(wanted, error) from error
        return None
    except ValueError:  # a path that no file can have, such as one with a null character
        return None


def read_config(path: Path, wanted: str) -> bytes:
    """The content of a regular file, cut off one byte after MAX_CONFIG_BYTES. Raises UnreadableConfig."""
    try:
        if not path.is_file():
            raise UnreadableConfig(f"{wanted}: not a regular file", hint=CONFIG_HINT)
        with path.open("rb") as file:
            return file.read(MAX_CONFIG_BYTES + 1)
    except OSError as error:
        raise _unreadable(wanted, error) from error


def _unreadable(wanted: str, error: OSError) -> UnreadableConfig:
    return UnreadableConfig(f"{wanted}: cannot be read: {error.strerror}", hint="check the file and its permissions")
