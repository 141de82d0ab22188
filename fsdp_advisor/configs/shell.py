"""Reads shell scripts: the launcher's command line with its ranks and nodes, and the script's arguments."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from fsdp_advisor.configs import (
    accelerate,
    axolotl,
    llamafactory,
    other_trainers,
    slurm,
    swift,
    torchtitan,
    torchtune,
    trainer,
)
from fsdp_advisor.configs.collect import UNRESOLVED, Collector
from fsdp_advisor.configs.launchers import Launch, inner_script, launch_of, named_values, other_script
from fsdp_advisor.configs.ranks import set_ranks
from fsdp_advisor.configs.shell_words import assignment, commands, words
from fsdp_advisor.errors import UsageError
from fsdp_advisor.job.frameworks import FIXED_SEGMENTS
from fsdp_advisor.memory.allocator.conf import conf_in

_SCRIPT = re.compile(r"\btrl[./]scripts[./](\w+?)(?:\.py)?$")
"""A script of TRL, which is named after its task."""
_CONFIGURATION = re.compile(r".+\.(ya?ml|json|toml|conf)$")
_LOOPS_OF_ACCELERATE = re.compile(r"no_trainer|open_instruct[/.](finetune|dpo)")
"""Scripts that take the Trainer's arguments and have their own loop on accelerate."""
UNREAD = "arguments of the script that are not read: "
"""The beginning of what is reported about a script whose arguments are not known."""
_DEPTH = 3
"""The depth to which scripts within scripts (`bash -c`, `eval`) are read."""


def read(file: str, text: str) -> list[Collector]:
    """The settings of a script, one part for the launcher, one for the arguments, one for the environment and one for Slurm.

    Raises UsageError if no command launches a training.
    """
    allocation = slurm.read(file, text)
    variables = dict(allocation.variables) if allocation else {}
    launches, others = _launches(text, variables)
    parts: list[Collector] = []
    skipped = None
    if launches:
        launch = max(launches, key=lambda launch: launch.likelihood)
        parts += _parts(file, launch, allocation)
        variables |= launch.environment
        skipped = launch.skipped
        more = [other for other in launches if other.likelihood == launch.likelihood and other != launch]
        if more:
            parts[0].assume(f"the first command that launches a training; the script has {len(more)} more")
    elif others:
        found = Collector(file, "shell script", {})
        found.references += others
        parts.append(found)
    elif allocation is None:
        raise UsageError(
            f"{file}: no command that launches a training", hint="torchrun, accelerate launch, deepspeed, trl, ..."
        )
    conf = conf_in(variables)
    if conf:
        found = Collector(file, "environment", {"PYTORCH_ALLOC_CONF": conf})
        found.options["allocator_conf"] = found.take("PYTORCH_ALLOC_CONF")
        parts.append(found)
    elif skipped is not None:
        parts[0].default("allocator_conf", FIXED_SEGMENTS, f"the allocator's defaults: {skipped} would set others")
    if allocation is not None:
        parts.append(allocation.found)
    return parts


def read_environment(file: str, text: str) -> list[Collector]:
    """The settings of a file that only sets variables, such as `.deepspeed_env`."""
    return read(file, f"{text}\npython train.py\n")[1:]


def _launches(text: str, variables: dict[str, str], depth: int = 0) -> tuple[list[Launch], list[str]]:
    """The trainings that a script launches, and the other scripts that it runs. Adds the script's variables to `variables`."""
    launches: list[Launch] = []
    others: list[str] = []
    for command in commands(text):
        given = assignment(command, variables)
        if given is not None:
            variables |= given
            for name, value in given.items():
                if value.startswith("$unknown"):
                    del variables[name]
            continue
        found = words(command, variables)
        inner = inner_script(found) if depth < _DEPTH else None
        if inner is not None:
            more, scripts = _launches(inner, variables, depth + 1)
            launches += more
            others += scripts
        elif (launch := launch_of(found, variables)) is not None:
            launches.append(launch)
        elif (script := other_script(found)) is not None:
            others.append(script)
    return launches, others


def _parts(file: str, launch: Launch, allocation: slurm.Allocation | None) -> list[Collector]:
    """The settings of one command: of the launcher's options, and of the script's arguments.

    Raises UsageError for a trainer whose arguments are not read.
    """
    if (name := other_trainers.of_launch(launch.script, launch.arguments)) is not None:
        raise other_trainers.not_read(file, name)
    found = _launcher(file, launch)
    set_ranks(found, launch, allocation)
    for word in launch.unknown:
        found.omits(f"{word}: options of the launcher that the script does not set")
    keys: dict[str, Any] = {}
    overrides: dict[str, Any] = {}
    for name, value in named_values(launch.arguments):
        if name in ("", "config", "config_file", "job.config_file") and isinstance(value, str):
            given, equals, setting = value.partition("=")
            if equals and not name:
                overrides[given] = setting
            elif _CONFIGURATION.match(value):
                found.references.append(value)
            elif name == "config":
                keys[name] = value
            elif UNRESOLVED.search(value):
                found.omits(f"{value}: arguments that the script does not set")
        else:
            keys[name] = value
    part = _arguments(file, launch, found, keys, overrides)
    if launch.program not in ("accelerate", "trl"):
        found.guess("strategy", "ddp", "DDP, because no file configures sharding")
    return [found] if part is None else [found, part]


def _launcher(file: str, launch: Launch) -> Collector:
    """The settings of the launcher's own options."""
    keys = dict(launch.options)
    if launch.program in ("accelerate", "trl"):
        for key in ("machine_rank", "main_process_ip", "main_process_port"):
            keys.pop(key, None)
        reference = keys.pop("config_file", None) or keys.pop("accelerate_config", None)
        if reference in accelerate.OF_TRL:
            found = accelerate.read(file, {**accelerate.OF_TRL[reference], **keys})
        else:
            found = accelerate.read(file, keys)
            if isinstance(reference, str):
                found.references.append(reference)
                found.defaults.pop("mixed", None)  # the named file decides
            else:
                found.guess("strategy", "ddp", "DDP, because no file configures sharding")
        found.format = f"{launch.program} command"
        return found
    return Collector(file, f"{launch.program} command", keys)


def _arguments(
    file: str, launch: Launch, launcher: Collector, keys: dict[str, Any], overrides: Mapping[str, Any]
) -> Collector | None:
    """The settings of the script's arguments. If the script is unknown, reports that and returns None. `overrides`: arguments
    `name=value`.
    """
    keys.pop("launcher", None)
    paths = [keys.pop("deepspeed_config", None)]  # a script's own option
    if set(keys) <= {"deepspeed"}:
        paths.append(keys.pop("deepspeed", None))
    for path in paths:
        if isinstance(path, str):
            launcher.references.append(path)
            launcher.default("backend", "deepspeed")
    if launch.script.startswith("torchtitan") or any(torchtitan.is_option(name) for name in keys):
        return torchtitan.read_command(file, launch.environment, keys)
    if launch.program == "tune":
        return torchtune.read_command(file, launch.script, {**keys, **overrides})
    if launch.program == "axolotl" or launch.script.startswith("axolotl."):
        return axolotl.read_overrides(file, {**keys, **overrides}) if keys or overrides else None
    if launch.program == "llamafactory-cli" or llamafactory.is_llamafactory(keys):
        keys |= overrides
        return llamafactory.read(file, keys, replaces=bool(launcher.references)) if keys else None
    if launch.program == "swift":
        return swift.read(file, keys, gpus=launcher.options.get("gpus", 1)) if keys else None
    script = _SCRIPT.search(launch.script)
    method = script[1] if script else None
    if trainer.is_trainer(keys) or (keys and launcher.references):
        found = trainer.read(file, keys, trl=True if method else None, task=method)
        if _LOOPS_OF_ACCELERATE.search(launch.script):
            found.options["framework"] = "accelerate"
        return found
    if unread := sorted({*keys, *overrides}):
        launcher.omits(f"{UNREAD}{', '.join(unread[:12])}")
    if method:
        trainer.read_task(launcher, method)
    return None
