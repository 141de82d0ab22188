"""Two steps with the Trainer and the exported arguments in the working directory. Arguments: MODEL OUT."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
from torch.distributed.fsdp import FSDPModule
from transformers import AutoModelForCausalLM, Trainer

sys.path.insert(0, str(Path.cwd()))
from training_arguments import MODEL_ARGUMENTS, training_arguments

on_cpu = os.environ.get("ACCELERATE_USE_CPU") == "true"  # the documented switch; it disables sharding
if not on_cpu:
    import cpu_as_gpu  # noqa: F401

arguments = training_arguments(
    output_dir="out",
    use_cpu=on_cpu,
    max_steps=2,
    logging_steps=1,
    save_strategy="no",
    report_to="none",
    disable_tqdm=True,
)
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], **MODEL_ARGUMENTS)
examples = [{"input_ids": t, "labels": t} for t in torch.randint(0, 1000, (32, 16))]
if os.environ.get("UNUSED_PARAMETER"):  # it gets no gradient, as those of a vision tower in a step on text
    model.unused = torch.nn.Linear(8, 8)
trainer = Trainer(model=model, args=arguments, train_dataset=examples)
trainer.train()
if trainer.is_world_process_zero():
    wrapped = trainer.model_wrapped
    layers = [m for m in wrapped.modules() if type(m).__name__.endswith("LlamaDecoderLayer")]
    found = {
        "losses": [row["loss"] for row in trainer.state.log_history if "loss" in row],
        "steps": trainer.state.global_step,
        "distributed_type": trainer.accelerator.distributed_type.value,
        "world": arguments.world_size,
        "wrapped": type(wrapped).__name__,
        "wrapped_layers": sum(isinstance(m, FSDPModule) for m in layers),
    }
    Path(sys.argv[2]).write_text(json.dumps(found))
trainer.accelerator.wait_for_everyone()
os._exit(0)  # DeepSpeed over gloo sometimes aborts during a normal exit
