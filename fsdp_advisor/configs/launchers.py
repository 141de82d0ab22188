"""Finds the launcher in a command: its own options, the script, and the arguments of the script.

Source of the options without values: torch 2.13, distributed/run.py, get_args_parser; accelerate 1.15, commands/launch.py,
launch_command_parser; deepspeed 0.19.8, launcher/runner.py, parse_args; CPython 3.13, `python --help`.
`tests/configs/test_launch_lines.py` compares them with the parsers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from fsdp_advisor.configs.shell_words import assignment

_FLAGS = {
    "torchrun": "h help standalone m module no_python run_path virtual_local_rank use_env",
    "accelerate": (
        "h help q quiet cpu multi_gpu tpu enable_cpu_affinity dynamo_use_fullgraph dynamo_use_dynamic dynamo_use_regional_compilation "
        "use_deepspeed use_fsdp use_parallelism_config use_megatron_lm same_network m module no_python tpu_cluster no_tpu_cluster "
        "tpu_use_sudo downcast_bf16 fp8_use_autocast_during_eval debug"
    ),
    "deepspeed": "h help module no_python no_local_rank no_ssh no_ssh_check force_multi save_pid bind_cores_to_rank q quiet",
    "python": "b B d E h i I m O OO P q s S u v V x",
}
FLAGS = {program: frozenset(names.split()) for program, names in _FLAGS.items()}
"""The options of each launcher that take no value. `use_env` belongs to torch.distributed.launch."""
_VERBS = {
    "accelerate": ("launch",),
    "axolotl": ("train",),
    "llamafactory-cli": ("train",),
    "tune": ("run",),
    "lmf": ("train",),
    "swift": ("sft", "pt"),
}
_METHODS = ("sft", "dpo", "kto", "grpo", "reward", "rloo", "orpo", "cpo", "gkd", "online_dpo", "ppo")
"""The commands of `trl` that train."""
_MODULES = {
    "torch.distributed.run": "torchrun",
    "torch.distributed.launch": "torchrun",
    "accelerate.commands.launch": "accelerate",
    "deepspeed.launcher.runner": "deepspeed",
}
"""Modules that `python -m` runs as launchers."""
_NO_TRAINING = ("pip", "venv", "json.tool", "http.server", "torch.utils.collect_env", "huggingface_hub")
_KEYWORDS = ("then", "do", "else", "if", "while", "until", "{", "!", "time", "exec", "nohup", "command", "sudo", "env")
_WRAPPERS = {
    *_KEYWORDS, "srun", "mpirun", "mpiexec", "uv", "uvx", "poetry", "pdm", "pixi", "hatch", "conda", "mamba", "micromamba", "numactl",
    "nsys", "ncu", "singularity", "apptainer", "docker", "podman", "enroot", "ssh", "pdsh", "timeout", "stdbuf", "taskset", "nice",
    "bash", "sh", "zsh", "sky", "ray", "modal", "jobset", "dlprof", "kernprof", "screen", "tmux", "unbuffer", "sbatch", "bsub", "oarsub",
}  # fmt: skip
"""Programs that run another command. That command's name follows after the program's own options."""
_NAMED = ("-n", "-p", "--name", "-J", "--job-name", "--comment", "-p", "--partition", "--container-name")
"""Options of wrappers whose value may be the name of a launcher."""
_SHELL = re.compile(r"(?:ba|z|da)?sh")
_PYTHON = re.compile(r"python(?:\d(?:\.\d+)?)?")
_LISTS = {
    "lora_target_modules", "lora_target_parameters", "lora_modules_to_save", "target_modules", "target_parameters", "modules_to_save",
    "dataset", "val_dataset",
}  # fmt: skip
"""Options whose value is all the words up to the next option."""
_NUMBER = re.compile(r"-\.?\d")


@dataclass(frozen=True, kw_only=True)
class Launch:
    """One command that launches a training. `environment` are the variables that it sets or inherits."""

    program: str
    options: Mapping[str, Any]
    script: str
    arguments: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    unknown: Sequence[str] = ()

    @property
    def likelihood(self) -> int:
        """How likely the command is the training: 2 for a launcher, 1 for a plain script with arguments, 0 for any other script."""
        return 2 if self.program != "python" else 1 if self.arguments else 0

    @property
    def skipped(self) -> str | None:
        """The framework's own launcher, if the command starts the framework without it; the launcher sets PYTORCH_ALLOC_CONF."""
        if self.script.startswith("torchtitan"):
            return None if self.program == "run_train.sh" else "torchtitan's run_train.sh"
        if self.script == "llamafactory.launcher":
            return "llamafactory-cli"
        return "axolotl train" if self.script.startswith("axolotl.") else None


def inner_script(words: list[str]) -> str | None:
    """The script that the command passes to a shell with -c, or to `eval`; None if there is none."""
    if words[:1] == ["eval"]:
        return " ".join(words[1:])
    for shell, option, script in zip(words, words[1:], words[2:], strict=False):
        if _SHELL.fullmatch(_base(shell)) and re.fullmatch(r"-\w*c", option):
            return script
    return None


def other_script(words: Sequence[str]) -> str | None:
    """The shell script that the command runs; None if it runs none."""
    wraps = bool(words) and _base(words[0]) in (*_WRAPPERS, "source", ".")
    return next((word for word in words[: None if wraps else 1] if word.endswith((".sh", ".sbatch", ".slurm"))), None)


def launch_of(words: Sequence[str], variables: Mapping[str, str]) -> Launch | None:
    """The training that a command launches; None for other commands."""
    environment = dict(variables)
    wraps = True
    for position, word in enumerate(words):
        given = assignment(word, {}) if re.match(r"[A-Za-z_]\w*=", word) else None
        if given is not None:
            environment |= given
            continue
        program = _program(word)
        named = position > 0 and words[position - 1] in _NAMED
        if program and wraps and not named and (launch := _launch(program, words[position:], environment)) is not None:
            return launch
        if word in _KEYWORDS:
            continue
        if not word.startswith("-") and all(_is_prefix(before) for before in words[:position]):
            wraps = _base(word) in _WRAPPERS
    return None


def _is_prefix(word: str) -> bool:
    return word in _KEYWORDS or "=" in word


def _base(word: str) -> str:
    return word.rsplit("/", 1)[-1]


def _program(word: str) -> str | None:
    """The launcher that a word names."""
    base = _base(word)
    if _PYTHON.fullmatch(base) or word.endswith(".py"):
        return "python"
    if base in (*FLAGS, *_VERBS, "trl", "llamafactory", "run_train.sh"):
        return "llamafactory-cli" if base in ("lmf", "llamafactory") else base
    return None


def _launch(program: str, words: Sequence[str], environment: Mapping[str, str]) -> Launch | None:
    rest = list(words if words[0].endswith(".py") else words[1:])
    launch = partial(Launch, program=program, environment=environment)
    if program in _VERBS:
        if rest[:1] and rest[0] in _VERBS[program]:
            rest = rest[1:]
        else:
            return None
    match program:
        case "trl":
            if not rest or rest[0] not in _METHODS:
                return None
            options, arguments = _of_accelerate(rest[1:])
            return launch(options=options, script=f"trl.scripts.{rest[0]}", arguments=arguments)
        case "swift":
            return launch(options={}, script=program, arguments=rest)
        case "axolotl" | "llamafactory-cli":
            split = rest.index("--") if "--" in rest else len(rest)
            options = dict(named_values(rest[split + 1 :], FLAGS["torchrun"]))
            return launch(options=options, script=program, arguments=rest[:split])
        case "run_train.sh":
            return launch(options={}, script="torchtitan.train", arguments=rest)
        case "python":
            return _python(rest, environment)
    return _launched(program, rest, environment)


def _python(words: Sequence[str], environment: Mapping[str, str]) -> Launch | None:
    launch = _launched("python", words, environment)
    if launch is None or launch.script.split(".")[0] in _NO_TRAINING or launch.script in _NO_TRAINING:
        return None
    program = _MODULES.get(launch.script)
    if program is not None:
        return _launched(program, launch.arguments, environment)
    if launch.script in ("axolotl.cli.train", "llamafactory.cli"):
        return launch
    return launch if launch.script.endswith(".py") or "m" in launch.options else None


def _launched(program: str, words: Sequence[str], environment: Mapping[str, str]) -> Launch | None:
    """A launch by a program that takes its own options, the script and the script's arguments."""
    flags = FLAGS["torchrun" if program == "tune" else program]
    launch = partial(Launch, program=program, environment=environment)
    options: dict[str, Any] = {}
    unknown: list[str] = []
    position = 0
    while position < len(words):
        word = words[position]
        position += 1
        if word.startswith("$") and any(_is_script(later) for later in words[position:]):
            unknown.append(word)
            continue
        if program == "python" and word.startswith("-m") and len(word) > 2:  # -mtrl.scripts.sft
            return launch(options={"m": True}, script=word[2:], arguments=words[position:])
        if not word.startswith("-"):
            return launch(options=options, script=word, arguments=words[position:], unknown=unknown)
        name, equals, value = _name(word)
        following = words[position] if position < len(words) else "-"
        if program == "python" and name == "c":
            return None
        if equals:
            options[name] = value
        elif name in flags or _is_option(following) or following.endswith(".py"):
            options[name] = True
        else:
            options[name] = following
            position += 1
    if not options or program == "python":
        return None
    return launch(options=options, script="", arguments=(), unknown=unknown)


def _is_script(word: str) -> bool:
    return word.endswith(".py") or word in ("-m", "--module")


def _is_option(word: str) -> bool:
    return word.startswith("-") and word != "-" and not _NUMBER.match(word)


def _name(word: str) -> tuple[str, bool, str]:
    """The name of an option with underscores, whether a value follows in the same word, and that value."""
    name, equals, value = word.lstrip("-").partition("=")
    return name.replace("-", "_"), bool(equals), value


_OF_ACCELERATE = ("num_processes", "num_machines", "mixed_precision", "accelerate_config")


def _of_accelerate(words: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """(the options for `accelerate launch`, the remaining words) of TRL's command, which passes these options on to accelerate."""
    options: dict[str, Any] = {}
    rest: list[str] = []
    position = 0
    while position < len(words):
        name, equals, value = _name(words[position])
        if words[position].startswith("-") and name in _OF_ACCELERATE:
            options[name] = value if equals else words[position + 1] if position + 1 < len(words) else True
            position += 1 if equals else 2
        else:
            rest.append(words[position])
            position += 1
    return options, rest


def named_values(words: Sequence[str], flags: frozenset[str] = frozenset()) -> Iterator[tuple[str, Any]]:
    """Pairs of a name and a value for `--name value`, `--name=value` and `--flag`. Words before the first option, and `name=value`, have
    an empty name.

    >>> list(named_values("a.yaml x=1 --lr -1 --bf16 --no_packing --b=2 3".split()))
    [('', 'a.yaml'), ('', 'x=1'), ('lr', '-1'), ('bf16', True), ('packing', False), ('b', '2')]
    """
    position = 0
    begun = False
    while position < len(words):
        word = words[position]
        position += 1
        if not _is_option(word):
            if not begun or "=" in word:
                yield "", word
            continue
        begun = True
        name, equals, value = _name(word)
        if equals:
            yield name, _structured(value)
        elif name in flags or position == len(words) or _is_option(words[position]):
            yield (name[3:], False) if name.startswith("no_") and name not in flags else (name, True)
        else:
            values = [words[position]]
            position += 1
            while name in _LISTS and position < len(words) and not _is_option(words[position]):
                values.append(words[position])
                position += 1
            yield name, ",".join(values) if len(values) > 1 else _structured(values[0])


def _structured(text: str) -> Any:
    """The dictionary in a text that is a JSON object; any other text unchanged."""
    if not text.startswith("{"):
        return text
    try:
        return json.loads(text)
    except ValueError:
        return text
