"""DeepSpeed as a trainer, with the defaults that the estimate assumes."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
import os
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import save_on_cpu

from fsdp_advisor.export.deepspeed import precision_section
from fsdp_advisor.job.plan import Plan
from fsdp_advisor.job.zero_buckets import zero_buckets
from fsdp_advisor.recording.engines import cast_floating
from fsdp_advisor.recording.host import save_inputs_on_host
from fsdp_advisor.recording.source import Source
from fsdp_advisor.validation import weights
from fsdp_advisor.validation.choices import Mode
from fsdp_advisor.validation.deepspeed_on_cpu import skip_shm_operator
from fsdp_advisor.validation.engines import optimizer_for, weight_dtype
from fsdp_advisor.validation.failures import ModeUnavailable
from fsdp_advisor.validation.steps import batch_of


@dataclass
class DeepspeedTrainer:
    """A DeepSpeed engine. It clears gradients in `step`, so `zero_grad` does nothing."""

    source: Source
    engine: Any
    batch: dict[str, torch.Tensor]
    accumulation: int

    def forward(self) -> torch.Tensor:
        return self.source.loss(self.engine, self.batch)

    def backward(self, loss: torch.Tensor) -> None:
        self.engine.backward(loss)
        if self.engine.is_gradient_accumulation_boundary():
            return
        self.engine.step()  # between micro-batches, `step` only counts

    def step(self) -> None:
        self.engine.step()

    def zero_grad(self) -> None:
        pass


def _config(plan: Plan) -> dict[str, Any]:
    """The DeepSpeed configuration of a plan. Everything else keeps DeepSpeed's default."""
    zero: dict[str, Any] = {"stage": int(plan.strategy[-1]), **zero_buckets(plan.zero_buckets)}
    if plan.offload != "none":
        zero["offload_optimizer"] = {"device": plan.offload_device}
    if plan.offload == "parameters":
        zero["offload_param"] = {"device": plan.offload_device}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": plan.micro_batch_size,
        "gradient_accumulation_steps": plan.gradient_accumulation_steps,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
    }
    return config | precision_section(plan.precision)


def deepspeed_trainer(source: Source, plan: Plan, device: str, mode: Mode) -> DeepspeedTrainer:
    """The model under DeepSpeed on this rank. Weights are made on the host; stage 3 copies only shards to the device.

    Raises ModeUnavailable without real ranks, and if DeepSpeed is not installed.
    """
    if mode != "measure":
        raise ModeUnavailable(
            f"DeepSpeed reads the data of other ranks, so --mode {mode} cannot run it",
            hint="--mode measure with as many GPUs as --gpus",
        )
    if importlib.util.find_spec("deepspeed") is None:
        raise ModeUnavailable(
            "DeepSpeed is not installed",
            hint="pip install deepspeed; --zero1 torch measures torch's ZeroRedundancyOptimizer instead",
        )
    os.environ.setdefault("DS_ACCELERATOR", device)
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    deepspeed: Any = importlib.import_module("deepspeed")
    if device == "cpu":
        skip_shm_operator()
    deepspeed.init_distributed(dist_backend="gloo" if device == "cpu" else "nccl", verbose=False)
    dtype = weight_dtype(plan)
    model = source.build(dtype)
    source.configure(model, attention=plan.attention, checkpointing=plan.checkpointing)
    if plan.offload_code == "inputs":
        save_inputs_on_host(model, functools.partial(save_on_cpu, pin_memory=device == "cuda"))
    weights.Materialiser("cpu").model(model)
    optimizer = optimizer_for(model, plan)
    engine, *_ = deepspeed.initialize(model=model, config=_config(plan), optimizer=optimizer)
    with torch.device(device):
        batch = batch_of(source, plan, model, real=True)
    batch = {name: cast_floating(tensor, dtype) for name, tensor in batch.items()}
    return DeepspeedTrainer(source, engine, batch, plan.gradient_accumulation_steps)
