"""Peaks of training steps with the checkpointing policies of torchtitan, TRL and transformers, by the libraries' own code.

Arguments: the model's configuration, and for each job its policy, precision, attention, micro-batch and length, as JSON.
"""

from __future__ import annotations

from typing import Any

import torch
from datasets import Dataset
from torch import nn
from torch._functorch.partitioners import get_default_op_list
from training import SteadyPeak, print_peaks, tokenizer, usual_arguments
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments
from trl import SFTConfig, SFTTrainer


def wrap_as_torchtitan(model: nn.Module) -> None:
    """Wrap the layers with torchtitan's policy: SelectiveAC of version 0.3, or the function of 0.2 with its operators."""
    from torchtitan.distributed import activation_checkpoint

    if hasattr(activation_checkpoint, "SelectiveAC"):
        policy = activation_checkpoint.SelectiveAC
        policy(policy.Config()).apply(model)
        return
    from torchtitan.config.job_config import ActivationCheckpoint
    from torchtitan.models.llama3.infra.parallelize import _op_sac_save_list

    intensive = {operator.default for operator in get_default_op_list().compute_intensive_ops}  # version 0.3 adds these
    kept = {*_op_sac_save_list, *intensive}
    config = ActivationCheckpoint(mode="selective", selective_ac_option="op", early_stop=False)
    activation_checkpoint.apply_ac(model, config, op_sac_save_list=kept)


def peak_of(model: Any, policy: str, precision: str, batch: int, length: int) -> int:
    rows = {"input_ids": [list(range(1, length + 1))] * (4 * batch)}
    found = SteadyPeak()
    usual = usual_arguments(batch, precision)
    by, _, option = policy.partition(":")
    if by == "trl":
        keywords = {"selective": True} if option == "selective" else {}
        arguments = SFTConfig(
            **usual,
            max_length=length,
            activation_offloading=option.startswith("offload"),
            gradient_checkpointing=bool(keywords) or option.endswith("full"),
            gradient_checkpointing_kwargs=keywords or None,
        )
        trainer: Trainer = SFTTrainer(
            model, args=arguments, train_dataset=Dataset.from_dict(rows), processing_class=tokenizer()
        )
        trainer.add_callback(found)
    else:
        if by == "torchtitan":
            wrap_as_torchtitan(model.model)
        else:
            known: dict[str, dict[str, Any]] = {"offload": {"offload": True}, "reentrant": {"use_reentrant": True}}
            keywords = known.get(option) or {"every_n_layers": int(option)}
            usual |= {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": keywords}
        data = Dataset.from_dict(rows | {"labels": rows["input_ids"]}).with_format("torch")
        trainer = Trainer(model, args=TrainingArguments(**usual), train_dataset=data, callbacks=[found])
    trainer.train()
    return found.peak


def loop_peak(model: Any, precision: str, batch: int, length: int) -> int:
    """The peak of the second step of a plain loop whose forward runs under PyTorch's save_on_cpu."""
    model.cuda().train()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    ids = torch.ones((batch, length), dtype=torch.long, device="cuda")
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        autocast = torch.autocast("cuda", torch.bfloat16, enabled=precision == "bf16-mixed")
        with torch.autograd.graph.save_on_cpu(pin_memory=True), autocast:
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return int(torch.cuda.max_memory_allocated())


def measured(config: dict[str, Any], job: tuple[str, str, str, int, int]) -> int:
    policy, precision, attention, batch, length = job
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**config),
        dtype=torch.bfloat16 if precision == "bf16" else torch.float32,
        attn_implementation=attention,
    )
    if policy == "torch:saved":
        return loop_peak(model, precision, batch, length)
    return peak_of(model, policy, precision, batch, length)


if __name__ == "__main__":
    print_peaks(measured)
