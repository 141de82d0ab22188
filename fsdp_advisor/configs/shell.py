"""Reads shell scripts: the launcher's command line with its ranks and nodes, and the script's arguments.

Variables are replaced by the values that the script assigns to them; others stay unknown.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from typing import Any

from fsdp_advisor.configs import accelerate, torchtitan, trainer
from fsdp_advisor.configs.collect import Collector
from fsdp_advisor.errors import UsageError

LAUNCHERS = ("accelerate", "torchrun", "deepspeed", "trl", "axolotl", "llamafactory-cli", "tune", "python", "python3")
_ASSIGNMENT = re.compile(r"^\s*(?:export\s+)?([A-Za-z_]\w*)=(.*)$")
_VARIABLE = re.compile(r"\$\{(\w+)(?::?-([^}]*))?\}|\$(\w+)")
_SLURM = re.compile(r"^#SBATCH\s+--([\w-]+)[=\s]\s*(\S+)", re.MULTILINE)
_VALUELESS = {
    "standalone",
    "no-python",
    "no_python",
    "module",
    "use_fsdp",
    "use_deepspeed",
    "multi_gpu",
    "use_cpu",
    "m",
}
_LISTS = {"lora_target_modules", "lora_target_parameters", "lora_modules_to_save"}
"""Options that take several words."""
_SCRIPT = re.compile(r"\btrl[./]scripts[./](\w+)")
"""A script of TRL, which is named after its task."""
_CONFIGURATION = re.compile(r".+\.(ya?ml|json|toml)$")


def read(file: str, text: str) -> list[Collector]:
    """The settings of a script, one part for the launcher and one for the arguments.

    Raises UsageError if no command launches a training.
    """
    lines, variables = _lines(text), _variables(text)
    parts = [Collector(file, "Slurm", {})] if _SLURM.search(text) else []
    if parts:
        _slurm(parts[0], text)
    for line in lines:
        words = _words(line, variables)
        start = next((i for i, word in enumerate(words) if word.rsplit("/", 1)[-1] in LAUNCHERS), None)
        if start is not None and _is_training(words[start:]):
            parts += _command(file, [words[start].rsplit("/", 1)[-1], *words[start + 1 :]])
            break
    else:
        if not parts:
            raise UsageError(
                f"{file}: no command that launches a training", hint="torchrun, accelerate launch, deepspeed, trl, ..."
            )
    conf = variables.get("PYTORCH_ALLOC_CONF") or variables.get("PYTORCH_CUDA_ALLOC_CONF")
    if conf:
        found = Collector(file, "environment", {"PYTORCH_ALLOC_CONF": conf})
        found.options["allocator_conf"] = found.take("PYTORCH_ALLOC_CONF")
        parts.append(found)
    return parts


def _lines(text: str) -> list[str]:
    """The commands, with continued lines joined and comments left out."""
    joined = re.sub(r"\\\n", " ", text)
    return [line.strip() for line in joined.splitlines() if line.strip() and not line.lstrip().startswith("#")]


def _variables(text: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for line in _lines(text):
        match = _ASSIGNMENT.match(line)
        if match is not None and "$(" not in match[2] and "`" not in match[2]:
            value = next(iter(_words(match[2], found)), "")
            if "$" not in value:
                found[match[1]] = value
    return found


def _words(line: str, variables: dict[str, str]) -> list[str]:
    """The words of a command with known variables replaced. Unknown ones stay as they are written."""

    def value(match: re.Match[str]) -> str:
        name, default, plain = match.groups()
        return variables.get(name or plain, default if default else match[0])

    line = _VARIABLE.sub(value, line)
    try:
        return shlex.split(line, comments=True)
    except ValueError:
        return line.split()


def _is_training(words: list[str]) -> bool:
    match words[0]:
        case "accelerate":
            return words[1:2] == ["launch"]
        case "python" | "python3":
            return any(word.endswith(".py") for word in words) or "-m" in words
        case "axolotl" | "llamafactory-cli":
            return words[1:2] == ["train"]
        case "tune":
            return words[1:2] == ["run"]
    return len(words) > 1


def _options(words: list[str]) -> Iterator[tuple[str, Any]]:
    """`--name value`, `--name=value` and `--flag` as pairs; other words as pairs with an empty name."""
    position = 0
    while position < len(words):
        word = words[position]
        position += 1
        if not word.startswith("-") or word == "-":
            yield "", word
            continue
        name, equals, value = word.lstrip("-").partition("=")
        if equals:
            yield name, value
        elif position < len(words) and not words[position].startswith("--") and name not in _VALUELESS:
            values = [words[position]]
            position += 1
            while name.replace("-", "_") in _LISTS and position < len(words) and not words[position].startswith("-"):
                values.append(words[position])
                position += 1
            yield name, ",".join(values)
        else:
            yield name, True


def _command(file: str, words: list[str]) -> list[Collector]:
    """The parts of one command: what the launcher takes up to the script, and what the script takes."""
    program = words[0]
    rest = words[2:] if program in ("accelerate", "axolotl", "llamafactory-cli", "tune") else words[1:]
    method = None
    if program == "trl":
        method, rest = words[1], words[2:]
        launcher, arguments = [], rest
    elif program in ("axolotl", "llamafactory-cli"):
        split = rest.index("--") if "--" in rest else len(rest)
        launcher, arguments = rest[split + 1 :], rest[:split]
    else:
        launcher, arguments = _split(rest)
        script = _SCRIPT.search(" ".join(rest))
        method = script[1] if script else None
    parts = [_launcher(file, program, launcher)]
    keys: dict[str, Any] = {}
    for name, value in _options(arguments):
        if name == "" or name in ("config", "config_file", "job.config_file"):
            if isinstance(value, str) and _CONFIGURATION.match(value):
                parts[0].references.append(value)
        else:
            keys[name] = value
    keys.pop("launcher", None)
    for name in ("deepspeed", "deepspeed_config"):  # a script's own option, or the Trainer's
        if set(keys) <= {name} and isinstance(value := keys.pop(name, None), str):
            parts[0].references.append(value)
    titan = {
        name: value for name, value in keys.items() if name.partition(".")[0] in torchtitan.SECTIONS and "." in name
    }
    if titan:
        parts.append(torchtitan.read(file, _nested(titan)))
    elif trainer.is_trainer(keys):
        keys = {name.replace("-", "_"): value for name, value in keys.items()}
        parts.append(trainer.read(file, keys, trl=True if method else None, task=method))
    elif keys and not parts[0].references:
        parts[0].omits("arguments of the script that are not read: " + ", ".join(sorted(keys)[:12]))
    if method and not trainer.is_trainer(keys):
        trainer.read_task(parts[0], method)
    return parts


def _split(words: list[str]) -> tuple[list[str], list[str]]:
    """The launcher's words, and those of the script. `-m MODULE` is a script, too."""
    position = 0
    while position < len(words):
        word = words[position]
        if word in ("-m", "--module"):
            return words[:position], words[position + 2 :]
        if not word.startswith("-"):
            return words[:position], words[position + 1 :]
        takes = "=" not in word and word.lstrip("-") not in _VALUELESS
        position += 2 if takes else 1
    return words, []


def _nested(dotted: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in dotted.items():
        section, _, key = name.partition(".")
        found.setdefault(section, {})[key] = value
    return found


def _launcher(file: str, program: str, words: list[str]) -> Collector:
    """Ranks and nodes of a launcher."""
    keys = {name.replace("-", "_"): value for name, value in _options(words) if name}
    if program == "accelerate":
        return _accelerate(file, keys)
    found = Collector(file, f"{program} command", keys)
    per_node = next((found.number(key) for key in ("nproc_per_node", "num_gpus") if key in found), None)
    nodes = next((found.number(key) for key in ("nnodes", "num_nodes") if key in found), None)
    if nodes is not None:
        found.options["nnodes"] = nodes
    if per_node is not None:
        found.options["gpus"] = per_node * (nodes or 1)
    if program in ("torchrun", "python", "python3"):
        found.default("strategy", "ddp", "DDP, because no file configures sharding")
    for key in ("standalone", "hostfile", "master_port", "rdzv_backend", "rdzv_endpoint", "rdzv_id"):
        found.take(key)
    return found


def _accelerate(file: str, keys: dict[str, Any]) -> Collector:
    reference = keys.pop("config_file", None)
    for key in ("machine_rank", "main_process_ip", "main_process_port"):
        keys.pop(key, None)
    found = accelerate.read(file, keys)
    found.format = "accelerate command"
    if isinstance(reference, str):
        found.references.append(reference)
    return found


def _slurm(found: Collector, text: str) -> None:
    """Nodes and GPUs of the batch script's directives."""
    directives = dict(_SLURM.findall(text))
    nodes = directives.get("nodes", "1")
    per_node = directives.get("gpus-per-node") or directives.get("gres", "").removeprefix("gpu:")
    per_node = per_node.rsplit(":", 1)[-1]
    if nodes.isdigit():
        found.options["nnodes"] = int(nodes)
        if per_node.isdigit():
            gpus = int(nodes) * int(per_node)
            found.default("gpus", gpus, f"{gpus} GPUs, from the directives of Slurm")
