"""The peak of steps of LLaMA-Factory's trainers of preferences after the first, whose code this is without metrics, on each rank.

Arguments: the model's configuration and the job, as JSON: task, precision, length, whether adapters of queries and values are trained,
and arguments of the Trainer. Source: LLaMA-Factory 0.9.5, train/{dpo,kto}/trainer.py, train/trainer_utils.py, data/collator.py.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from training import SteadyPeak
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments

BETA = 0.1


def get_batch_logps(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    labels = labels[:, 1:].clone()
    logits = logits[:, :-1, :]
    loss_mask = labels != -100
    labels[labels == -100] = 0
    per_token_logps = torch.gather(logits.log_softmax(-1), dim=2, index=labels.unsqueeze(2)).squeeze(2)
    return (per_token_logps * loss_mask).sum(-1), loss_mask.sum(-1)


class Preferences(Trainer):
    ref_model: Any = None

    def score(self, model: Any, batch: dict[str, torch.Tensor], prefix: str = "") -> tuple[torch.Tensor, ...]:
        batch = {name: value.detach().clone() for name, value in batch.items()}
        inputs = {name: batch[f"{prefix}{name}"] for name in ("input_ids", "attention_mask")}
        logits = model(**inputs, return_dict=True, use_cache=False).logits.to(torch.float32)
        logps, length = get_batch_logps(logits, batch[f"{prefix}labels"])
        return logits, logps, logps / length

    def reference(self, model: Any) -> tuple[Any, Any]:
        if self.ref_model is not None:
            return self.ref_model, nullcontext()
        return model, self.accelerator.unwrap_model(model).disable_adapter()


class Dpo(Preferences):
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> torch.Tensor:
        logits, logps, _ = self.score(model, inputs)
        chosen_logits, rejected_logits = logits.chunk(2)
        reference, context = self.reference(model)
        with torch.no_grad(), context:
            _, ref_logps, _ = self.score(reference, inputs)
        chosen, rejected = (logps - ref_logps).chunk(2)
        loss = -F.logsigmoid(BETA * (chosen - rejected))
        chosen_logits.mean().item(), rejected_logits.mean().item()
        return loss.mean()


class Kto(Preferences):
    def both(self, model: Any, inputs: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        logits, logps, _ = self.score(model, inputs)
        with torch.no_grad():
            _, kl_logps, _ = self.score(model, inputs, "kl_")
        tags = inputs["kto_tags"]
        return logps[tags], logps[~tags], logits[tags], logits[~tags], kl_logps

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> torch.Tensor:
        chosen, rejected, chosen_logits, rejected_logits, kl_logps = self.both(model, inputs)
        reference, context = self.reference(model)
        with torch.no_grad(), context:
            ref_chosen, ref_rejected, _, _, ref_kl_logps = self.both(reference, inputs)
        kl = (kl_logps - ref_kl_logps).mean().detach().clamp(min=0)
        losses = torch.cat(
            (1 - F.sigmoid(BETA * (chosen - ref_chosen - kl)), 1 - F.sigmoid(BETA * (kl - (rejected - ref_rejected))))
        )
        chosen_logits.nansum().item(), rejected_logits.nansum().item()
        return losses.nanmean()


TRAINERS = {"dpo": Dpo, "kto": Kto}


def main() -> None:
    config, job = (json.loads(word) for word in sys.argv[1:])
    length, lora, task, precision = (job.pop(name) for name in ("length", "lora", "task", "precision"))
    batch, is_kto = job["per_device_train_batch_size"], task == "kto"

    def collated(features: list[Any]) -> dict[str, torch.Tensor]:
        tokens = torch.ones(len(features) * (1 if is_kto else 2), length, dtype=torch.long)
        prefixes = ("", "kl_") if is_kto else ("",)
        found = {
            f"{prefix}{name}": tokens.clone()
            for prefix in prefixes
            for name in ("input_ids", "attention_mask", "labels")
        }
        return found | ({"kto_tags": torch.ones(len(features), dtype=torch.bool)} if is_kto else {})

    half = torch.bfloat16 if precision != "fp32" else torch.float32
    dtype = half if precision == "bf16" or lora else torch.float32
    settings = AutoConfig.for_model(**config)
    model = AutoModelForCausalLM.from_config(settings, dtype=dtype)
    if lora:
        model = get_peft_model(model, LoraConfig(r=16, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
    arguments = TrainingArguments(
        max_steps=3, optim="adamw_torch_fused", output_dir="out", report_to="none", save_strategy="no", disable_tqdm=True,
        bf16=precision == "bf16-mixed", remove_unused_columns=False, **job,
    )  # fmt: skip
    data = [{"row": row} for row in range(8 * batch)]
    trainer = TRAINERS[task](model=model, args=arguments, data_collator=collated, train_dataset=data)
    trainer.model_accepts_loss_kwargs = False
    if not lora:
        copy = AutoModelForCausalLM.from_config(settings, dtype=half).requires_grad_(False)
        trainer.ref_model = trainer.accelerator.prepare_model(copy, evaluation_mode=True).eval()
    found = SteadyPeak()
    trainer.add_callback(found)
    trainer.train()
    print("FOUND", json.dumps({"rank": int(os.environ.get("RANK", "0")), "allocated": found.peak}), flush=True)


if __name__ == "__main__":
    main()
