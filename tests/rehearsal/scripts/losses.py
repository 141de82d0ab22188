"""Peaks of training steps with the losses of TRL, Liger and cut cross entropy, as the libraries' own trainers run them.

Arguments: the model's configuration, and for each job its values, as `measured` takes them, as JSON.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from cut_cross_entropy import linear_cross_entropy
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from training import SteadyPeak, print_peaks, tokenizer, usual_arguments
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, Trainer, TrainingArguments
from transformers.modeling_outputs import CausalLMOutput
from trl import SFTConfig, SFTTrainer

LIGER_LOSS_ALONE = {
    "fused_linear_cross_entropy": True, "rope": False, "rms_norm": False, "layer_norm": False, "swiglu": False, "geglu": False,
}  # fmt: skip


def cut_forward(self: Any, labels: torch.Tensor, **inputs: Any) -> CausalLMOutput:
    inputs.pop("num_items_in_batch", None)
    # its kernels need half precision
    hidden = self.base_model(**inputs, use_cache=False).last_hidden_state.to(torch.bfloat16)
    return CausalLMOutput(loss=linear_cross_entropy(hidden, self.get_output_embeddings().weight, labels, shift=True))


def peak_of(model: Any, loss: str, precision: str, batch: int, length: int, ignored: float) -> int:
    rows = {"input_ids": [list(range(1, length + 1))] * (4 * batch)}
    if ignored:
        prompt = round(length * ignored)
        rows["completion_mask"] = [[0] * prompt + [1] * (length - prompt)] * (4 * batch)
    found = SteadyPeak()
    usual = usual_arguments(batch, precision)
    trainer: Trainer
    if loss == "trl":
        arguments = SFTConfig(**usual, max_length=length, gradient_checkpointing=False)
        trainer = SFTTrainer(model, args=arguments, train_dataset=Dataset.from_dict(rows), processing_class=tokenizer())
        trainer.add_callback(found)
    else:
        if loss == "liger":
            usual |= {"use_liger_kernel": True, "liger_kernel_config": LIGER_LOSS_ALONE}
        else:
            model.forward = MethodType(cut_forward, model)
            usual["remove_unused_columns"] = False
        data = Dataset.from_dict(rows | {"labels": rows["input_ids"]}).with_format("torch")
        trainer = Trainer(model, args=TrainingArguments(**usual), train_dataset=data, callbacks=[found])
    trainer.train()
    return found.peak


def measured(config: dict[str, Any], job: tuple[str, str, bool, int, int, bool, float]) -> int:
    loss, precision, tied, batch, length, adapts, ignored = job
    settings = AutoConfig.for_model(**{**config, "tie_word_embeddings": tied})
    kind = AutoModelForImageTextToText if "vision_config" in config else AutoModelForCausalLM
    model = kind.from_config(settings, dtype=torch.bfloat16 if precision == "bf16" else torch.float32)
    if adapts:  # which trains a copy of the head, too
        model = get_peft_model(
            model, LoraConfig(r=16, target_modules=["q_proj", "v_proj"], modules_to_save=["lm_head"])
        )
    return peak_of(model, loss, precision, batch, length, ignored)


if __name__ == "__main__":
    print_peaks(measured)
