"""Trainers whose configurations no reader knows, so that a plain job in their place would be another one."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence

from fsdp_advisor.errors import UsageError

_PACKAGES = {
    "verl": "verl",
    "nemo": "NeMo",
    "nemo_rl": "NeMo RL",
    "nemo_automodel": "NeMo AutoModel",
    "nemo_run": "NeMo",
    "megatron": "Megatron-LM",
    "openrlhf": "OpenRLHF",
}
"""Package -> name of the trainer."""
_SCRIPTS = {
    re.compile(r"(.*[/\\])?pretrain_(gpt|bert|t5|mamba|vlm)\.py"): "Megatron-LM",
    re.compile(r"(.*[/\\])?megatron_\w+\.py"): "NeMo",
}
"""Scripts that a trainer's repository has -> name of the trainer."""
_OF_TRANSFORMERS = re.compile(r"--(model_name_or_path|per_device_train_batch_size|output_dir)(=.*)?", re.DOTALL)
"""Arguments of transformers' Trainer, which a script with one of these names may have, too."""
_KEY_OF_VERL = re.compile(r"\+*actor_rollout_ref\.\S+=.*", re.DOTALL)


def of_launch(script: str, arguments: Sequence[str]) -> str | None:
    """The trainer that a launched module or script belongs to; None if it is none of those that are not read.

    >>> of_launch("verl.trainer.main_ppo", ()), of_launch("train.py", ["actor_rollout_ref.model.path=gpt2"]), of_launch("train.py", ())
    ('verl', 'verl', None)
    """
    if any(_KEY_OF_VERL.fullmatch(word) for word in arguments):
        return "verl"
    if not script.endswith(".py"):
        return _PACKAGES.get(script.partition(".")[0])
    if any(_OF_TRANSFORMERS.fullmatch(word) for word in arguments):
        return None
    return next((name for pattern, name in _SCRIPTS.items() if pattern.fullmatch(script)), None)


def of_code(tree: ast.Module) -> str | None:
    """The trainer whose package Python code imports."""
    for node in ast.walk(tree):
        modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        modules += [node.module] if isinstance(node, ast.ImportFrom) and node.module and not node.level else []
        for module in modules:
            if (name := _PACKAGES.get(module.partition(".")[0])) is not None:
                return name
    return None


def not_read(file: str, trainer: str) -> UsageError:
    """The error about a file of a trainer that is not read."""
    return UsageError(
        f"{file} is for {trainer}, whose settings are not read",
        hint="leave the file out and describe the job by options, such as --model, --gpus, --strategy, --micro-batch-size and --seq-len"
        " (for GRPO also --framework trl --task grpo): the memory of the same step in PyTorch's or TRL's own loop",
    )
