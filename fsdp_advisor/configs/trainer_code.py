"""Reads Python code that trains with the Trainer or with TRL: their arguments, and what the code does to the model."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence

from fsdp_advisor.configs import trainer
from fsdp_advisor.configs.adapters import set_adapted_constants
from fsdp_advisor.configs.collect import Collector
from fsdp_advisor.configs.model_code import LOADING, model_keys, read_model, report_computed
from fsdp_advisor.configs.python_literals import calls_of, constants_of, is_none, keywords_of, variables_of

_ARGUMENTS = ("TrainingArguments", "Seq2SeqTrainingArguments")
_OF_TRL = {
    "SFTConfig": "sft", "DPOConfig": "dpo", "KTOConfig": "kto", "GRPOConfig": "grpo", "RewardConfig": "reward",
    "ORPOConfig": "orpo", "CPOConfig": "cpo", "RLOOConfig": "rloo",
}  # fmt: skip
"""Class of a TRL configuration -> task of its trainer."""
_TRAINERS = {name.replace("Config", "Trainer"): task for name, task in _OF_TRL.items()}
"""Class of a TRL trainer -> its task. It also takes the Trainer's arguments. Source: trl 1.16, trainer/sft_trainer.py, `__init__`."""
_OF_A_TRAINER = ("max_seq_length", "max_length", "max_prompt_length", "max_completion_length", "packing", "beta")
"""Settings that trainers of TRL took as arguments until their configurations had them, in 0.12 and before."""


def read(file: str, tree: ast.Module) -> Collector | None:
    """The arguments of a Trainer, given to its class or collected in a dictionary that is passed on to it."""
    nodes = calls_of(tree)
    name = next((n for n in (*_OF_TRL, *_ARGUMENTS) if n in nodes), None)
    if name is None:
        return None
    variables = variables_of(tree)
    calls = {n: keywords_of(found[0], variables) for n, found in nodes.items()}
    keys = dict(calls[name])
    constants = constants_of(tree)
    keys |= model_keys(nodes, variables)
    if isinstance(constants.get("MODEL"), str):
        keys["model_name_or_path"] = constants["MODEL"]
    if isinstance(constants.get("MODEL_ARGUMENTS"), Mapping):
        keys = {key: value for key, value in keys.items() if key not in LOADING}
    for given in (constants.get("MODEL_ARGUMENTS"), keys.get("model_init_kwargs")):
        if isinstance(given, Mapping):
            keys |= {key: value for key, value in given.items() if key in LOADING}
    used = next((trainer_class for trainer_class in _TRAINERS if trainer_class in nodes), None)
    if used is not None:
        keys |= {key: value for key, value in calls[used].items() if key in _OF_A_TRAINER}
        if name in _ARGUMENTS:  # TRL copies all their values, also defaults, into its configuration
            keys = {"bf16": False, "gradient_checkpointing": False, **keys}
    task = _OF_TRL.get(name, _TRAINERS.get(used or ""))
    found = trainer.read(file, keys, trl=task is not None, task=task)
    set_adapted_constants(found, constants)
    read_model(found, tree, nodes, variables)
    _evaluated(found, nodes)
    report_computed(found, "", nodes[name][0], variables)
    if "ParallelismConfig" in calls:
        trainer.mesh(found, calls["ParallelismConfig"])
    return found


def _evaluated(found: Collector, nodes: Mapping[str, Sequence[ast.Call]]) -> None:
    """Report that the Trainer keeps logits for a function that computes metrics. How many is not known from the code."""
    trainers = [call for name, calls in nodes.items() if name.endswith("Trainer") for call in calls]
    given = [
        key for call in trainers for key in call.keywords if key.arg == "compute_metrics" and not is_none(key.value)
    ]
    if given and "eval_strategy" in found.options:
        found.omits(
            "compute_metrics: the logits that it keeps on the GPU (compute_metrics with eval_samples counts them)"
        )
