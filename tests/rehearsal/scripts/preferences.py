"""The peak of training steps of TRL's trainers on preferences after the first, before training, and of their evaluations, on each rank.

Arguments: the model's configuration and the job, as JSON: task, precision, micro-batch, sequence length, and more settings of the
task's configuration; `lora` for adapters of queries and values, or of the modules that it names.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch
from accelerate import PartialState
from datasets import Dataset, load_from_disk
from evaluation import EvaluationPeak
from peft import LoraConfig
from training import tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer, RewardConfig, RewardTrainer

TARGETS = ["q_proj", "v_proj"]


def of_tokens(trainer: Any) -> Any:
    """A subclass of the trainer that accepts tokenized data."""
    return type(f"{trainer.__name__}OfTokens", (trainer,), {"_prepare_dataset": lambda self, dataset, *_: dataset})


TRAINERS = {
    "dpo": (DPOConfig, of_tokens(DPOTrainer)),
    "kto": (KTOConfig, of_tokens(KTOTrainer)),
    "reward": (RewardConfig, of_tokens(RewardTrainer)),
}


def examples(task: str, rows: int, length: int) -> dict[str, Any]:
    completions = [list(range(1, length))] * rows
    if task == "reward":
        sequences = [list(range(length))] * rows
        return {"chosen_ids": sequences, "rejected_ids": sequences}
    if task == "dpo":
        return {"prompt_ids": [[1]] * rows, "chosen_ids": completions, "rejected_ids": completions}
    labels = [bool(row % 2) for row in range(rows)]
    return {
        "prompt_ids": [[1]] * rows,
        "completion_ids": completions,
        "KL_completion_ids": completions,
        "label": labels,
    }


def main() -> None:
    config, job = (json.loads(word) for word in sys.argv[1:])
    length, lora = job.pop("length"), job.pop("lora", False)
    precision, task = job.pop("precision"), job.pop("task")
    rows = max(8 * job["per_device_train_batch_size"], 4 * job.get("per_device_eval_batch_size", 0))
    configuration, trainer_class = TRAINERS[task]
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    settings = AutoConfig.for_model(**config)
    scores = task == "reward"
    if scores:
        settings.num_labels = 1
    auto = AutoModelForSequenceClassification if scores else AutoModelForCausalLM
    model = auto.from_config(settings, dtype=dtype)
    precomputes = job.get("precompute_ref_log_probs", False)
    copies = not (scores or lora or precomputes)
    models = [model, auto.from_config(settings, dtype=dtype).eval() if copies else None][: 1 if scores else 2]
    arguments = configuration(
        max_steps=3, optim="adamw_torch_fused", output_dir="out", report_to="none", save_strategy="no",
        bf16=precision == "bf16-mixed", max_length=length, disable_tqdm=True, **job,
    )  # fmt: skip
    data = Dataset.from_dict(examples(task, rows, length))
    if precomputes and job.get("fsdp"):  # the trainer loads the copy itself, and all ranks read what rank 0 computed
        with PartialState().main_process_first():
            if PartialState().is_main_process:
                model.save_pretrained("model")
                data.save_to_disk("data")
        model.config._name_or_path, data = "model", load_from_disk("data")
    trainer = trainer_class(
        *models, args=arguments, train_dataset=data, eval_dataset=data, processing_class=tokenizer(),
        peft_config=LoraConfig(
            r=16, target_modules=TARGETS if lora is True else lora, task_type="SEQ_CLS" if scores else "CAUSAL_LM"
        ) if lora else None,
    )  # fmt: skip
    before = torch.cuda.max_memory_allocated()
    found = EvaluationPeak()
    trainer.add_callback(found)
    trainer.train()
    values = {
        "rank": int(os.environ.get("RANK", "0")),
        "before": before,
        "allocated": found.peak,
        "evaluated": found.evaluated,
    }
    print("FOUND", json.dumps(values), flush=True)


if __name__ == "__main__":
    main()
