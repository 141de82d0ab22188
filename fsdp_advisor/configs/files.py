"""Finds, recognizes and reads configuration files: those that the user names, those in a folder, and those that a setting names."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fsdp_advisor.configs import (
    accelerate,
    adapters,
    axolotl,
    deepspeed,
    fsdp,
    llamafactory,
    python_code,
    shell,
    swift,
    torchtitan,
    torchtune,
    trainer,
)  # fmt: skip
from fsdp_advisor.configs.collect import Collector
from fsdp_advisor.configs.merge import Configuration, merge
from fsdp_advisor.configs.nameless import file_name
from fsdp_advisor.configs.shipped import shipped
from fsdp_advisor.errors import UsageError

MAX_BYTES = 1_000_000
"""The size of the largest file that is read."""
_FORMATS: tuple[tuple[Callable[[Mapping[str, Any]], bool], Callable[[str, Mapping[str, Any]], Collector]], ...] = (
    (adapters.is_adapter_config, adapters.read),
    (accelerate.is_accelerate, accelerate.read),
    (fsdp.is_section, fsdp.read_section),
    (deepspeed.is_deepspeed, deepspeed.read),
    (axolotl.is_axolotl, axolotl.read),
    (torchtune.is_torchtune, torchtune.read),
    (torchtitan.is_torchtitan, torchtitan.read),
    (swift.is_swift, swift.read),
    (llamafactory.is_llamafactory, llamafactory.read),
    (trainer.is_trainer, trainer.read),
)
"""How to recognize each format of keys and values, and its reader. The most specific format comes first."""
_READ_IN_A_FOLDER = (".yaml", ".yml", ".json", ".toml", ".sh", ".sbatch")
_SCRIPTS_OF_A_FOLDER = ("train.py", "lines_to_add.py", "training_arguments.py")
_HOST = re.compile(r"^\S+\s+slots=(\d+)", re.MULTILINE)

Find = Callable[[str], "tuple[str, str] | None"]
"""A function that returns the name and the text of a file that another file names; None if it cannot be found."""


def from_paths(paths: Sequence[Path]) -> Configuration:
    """The merged options of the files. A directory means all configurations in it, and - the text on standard input.

    Raises UsageError for a file that cannot be read or recognized.
    """
    files: list[Path] = []
    for path in paths:
        files += _in_folder(path) if path.is_dir() else [path]
    texts = dict(_standard_input() if str(path) == "-" else (str(path), _text(path)) for path in files)
    folders = [path.parent for path in files]

    def find(name: str) -> tuple[str, str] | None:
        path, _, function = name.partition(".py:")
        inner = Path(f"{path}.py" if function else name)
        places = [place for folder in folders for place in (folder, *_roots(folder))]
        for candidate in (inner, *(place / inner for place in places), *(folder / inner.name for folder in folders)):
            if candidate.is_file():
                return (f"{candidate}:{function}" if function else str(candidate)), _text(candidate)
        return None

    return _combined(texts, find)


def _standard_input() -> tuple[str, str]:
    """(a name that fits the format, the text). Raises UsageError for one that is too long."""
    text = sys.stdin.read(MAX_BYTES + 1) if sys.stdin else ""
    if len(text) > MAX_BYTES:
        raise UsageError("standard input is longer than a configuration", hint=f"at most {MAX_BYTES} characters")
    return file_name(text, "stdin") or "stdin.json", text


def from_texts(texts: Mapping[str, str]) -> Configuration:
    """`from_paths` for texts by file name, without reading a disk. A file that a setting names must be among them."""
    return _combined(texts, lambda name: None)


def _roots(folder: Path) -> tuple[Path, ...]:
    """The root of the repository that contains the folder, if there is one. Paths in scripts are often relative to it."""
    parents = (folder.resolve(), *folder.resolve().parents)
    return tuple(parent for parent in parents if (parent / ".git").exists())[:1]


def _in_folder(folder: Path) -> list[Path]:
    found = [
        path
        for path in sorted(folder.iterdir())
        if path.suffix in _READ_IN_A_FOLDER or path.name in (*_SCRIPTS_OF_A_FOLDER, "hostfile", ".deepspeed_env")
    ]
    if not found:
        raise UsageError(
            f"no configuration in {folder}", hint=f"it has no file that ends in {', '.join(_READ_IN_A_FOLDER)}"
        )
    return found


def _text(path: Path) -> str:
    name, _, function = str(path).partition(".py:")
    path = Path(f"{name}.py") if function else path
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except OSError as error:
        hint = (
            "TRL's configurations are in its installed package, such as trl/accelerate_configs/zero3.yaml; or give - and pipe the command:"
            " trl sft --accelerate_config zero3 ..."
            if "accelerate_configs" in path.parts
            else "give the path of a configuration file, or - to read a configuration, a script or a command from a pipe"
        )
        raise UsageError(f"cannot read {path}: {error.strerror}", hint=hint) from None
    if len(content) > MAX_BYTES:
        raise UsageError(f"{path} is larger than a configuration", hint=f"at most {MAX_BYTES} bytes")
    return content.decode("utf-8", "replace")


def _combined(texts: Mapping[str, str], find: Find) -> Configuration:
    parts: list[Collector] = []
    pending, seen = list(texts.items()), {_base(name) for name in texts}
    while pending:
        name, text = pending.pop(0)
        for part in read_text(name, text):
            parts.append(part)
            for reference in part.references:
                if _base(reference) in seen:
                    continue
                seen.add(_base(reference))
                other = find(reference)
                if other is not None:
                    pending.append(other)
                elif (known := shipped(reference)) is not None:
                    part.assume(f"{reference} as LLaMA-Factory ships it, because it was not given")
                    pending.append((reference, known))
                else:
                    part.missing.append(reference)
    named = {_base(reference) for part in parts for reference in part.references}
    # a file overrides the files that it names
    return merge(sorted(parts, key=lambda part: _base(part.file) not in named))


def _base(name: str) -> str:
    return re.split(r"[/\\]", name)[-1]


def read_text(name: str, text: str) -> list[Collector]:
    """The settings of one file, recognized by its name and its content. Raises UsageError."""
    try:
        return _read_text(name, text)
    except (ValueError, TypeError, ArithmeticError, AttributeError, RecursionError, MemoryError) as error:
        # a value has another type than the consumer expects for its key
        raise UsageError(
            f"{name}: a setting has an impossible value ({type(error).__name__})", hint="correct the file"
        ) from error


def _read_text(name: str, text: str) -> list[Collector]:
    base, _, function = name.partition(".py:")
    if function or name.endswith(".py"):
        return [python_code.read(f"{base}.py" if function else name, text, function or None)]
    suffix = Path(name).suffix
    if suffix in (".json", ".yaml", ".yml", ".toml") or (suffix == ".conf" and text.lstrip().startswith("{")):
        return [_structured(name, ".json" if suffix == ".conf" else suffix, text)]
    if _base(name) == ".deepspeed_env":
        return shell.read_environment(name, text)
    hosts = _HOST.findall(text)
    if hosts:
        found = Collector(name, "hostfile", {})
        found.options |= {"nnodes": len(hosts), "gpus": sum(map(int, hosts))}
        return [found]
    return shell.read(name, text)


def _structured(name: str, suffix: str, text: str) -> Collector:
    try:
        keys = _parsed(suffix, text)
    except (ValueError, RecursionError) as error:
        message = " ".join(str(error).split())[:200]
        raise UsageError(f"{name} cannot be parsed: {message}", hint="correct the file") from None
    if not isinstance(keys, Mapping):
        raise UsageError(f"{name} has no keys and values", hint="give a configuration file")
    for recognizes, read in _FORMATS:
        if recognizes(keys):
            return read(name, keys)
    known = (
        "accelerate, DeepSpeed, axolotl, LLaMA-Factory, ms-swift, TRL, Trainer arguments, torchtune, torchtitan, PEFT"
    )
    raise UsageError(f"{name} is of no known format", hint=f"known are {known}")


def _parsed(suffix: str, text: str) -> Any:
    """The value of a JSON, TOML or YAML document. Raises ValueError. The parsers are imported when they are needed."""
    if suffix == ".json":
        return json.loads(text)
    if suffix == ".toml":
        if sys.version_info >= (3, 11):
            import tomllib
        else:
            import tomli as tomllib
        return tomllib.loads(text)
    import yaml

    loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # both are safe; the first is faster
    try:
        return yaml.load(text, loader)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None
