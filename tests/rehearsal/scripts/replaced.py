"""Models and data sets that are not on this machine: their columns and tensors, and QLoRA with TRL. Prints one JSON object."""

import json
import sys

import torch
from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig
from trl import SFTConfig, SFTTrainer

data = load_dataset("somebody/private-data")
mapped = data["train"].map(lambda row: {"joined": row["question"] + row["reply"]}, remove_columns=["question"])
batched = data["train"].map(lambda rows: {"n": [len(x) for x in rows["input_ids"]]}, batched=True)
tokenizer = AutoTokenizer.from_pretrained("Qwen/Qwen2.5-0.5B")
model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-0.5B", device_map="cuda")
parameters = sum(p.nbytes for p in model.parameters())
elsewhere = {
    "splits": sorted(data), "mapped": sorted(mapped.column_names), "batched": sorted(batched.column_names),
    "vocabulary": [len(tokenizer), model.config.vocab_size], "words": len(tokenizer("some words here")["input_ids"]),
    "name": model.name_or_path, "bytes": [parameters, torch.cuda.memory_allocated()],
}  # fmt: skip
del model


quantization = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)
model = AutoModelForCausalLM.from_pretrained(
    "HuggingFaceTB/SmolLM2-135M", dtype=torch.bfloat16, quantization_config=quantization
)
loaded = torch.cuda.memory_allocated()
torch.cuda.reset_peak_memory_stats()
trainer = SFTTrainer(
    model=model,
    args=SFTConfig(
        output_dir=sys.argv[1], max_length=512, per_device_train_batch_size=4, max_steps=2, bf16=True, report_to="none",
        optim="paged_adamw_8bit", save_strategy="no", logging_steps=1,
    ),
    train_dataset=load_dataset("trl-lib/Capybara", split="train"),
    peft_config=LoraConfig(r=8, target_modules="all-linear"),
)  # fmt: skip
trainer.train()
log = [each for each in trainer.state.log_history if "grad_norm" in each]
rows = next(iter(trainer.get_train_dataloader()))["input_ids"].shape
print(
    "FOUND "
    + json.dumps(
        {
            "loaded": loaded,
            "peak": torch.cuda.max_memory_allocated(),
            "steps": len(log),
            "rows": list(rows),
            "elsewhere": elsewhere,
        }
    )
)
