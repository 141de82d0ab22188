"""The peaks of training steps of TRL's GRPOTrainer, and of their phases, after the first step on each rank.

Arguments: the model's configuration and the job, as JSON: precision, micro-batch, sequence length, and more settings of GRPOConfig;
`lora` for adapters of queries and values, or of the modules that it names; `compiled`: `model`, or `regions` for accelerate's. The model
generates with transformers, unless it is compiled. Kernels compute nothing, so its completions are replaced.
"""

from __future__ import annotations

import json
import os
import sys
from collections import defaultdict
from typing import Any

import torch
import trl.trainer.grpo_trainer
from datasets import Dataset
from peft import LoraConfig
from training import tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

TARGETS = ["q_proj", "v_proj"]
NO_TOKEN = 49_999


class Phases(TrainerCallback):  # type: ignore[misc]  # transformers is not installed where types are checked
    """The highest allocated bytes of each phase."""

    def __init__(self) -> None:
        self.peaks: defaultdict[str, int] = defaultdict(int)
        self.steps = 0

    def ends(self, phase: str) -> None:
        if self.steps:
            self.peaks[phase] = max(self.peaks[phase], torch.cuda.max_memory_allocated())
        torch.cuda.reset_peak_memory_stats()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.ends("train")
        self.steps = state.global_step

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.ends("evaluate")


class Trainer(GRPOTrainer):  # type: ignore[misc]  # likewise
    """A trainer whose prompts and completions have fixed lengths."""

    phases = Phases()
    prompt_length = 1

    def _tokenize_prompts(self, prompts: list[Any]) -> Any:
        return [list(range(1, self.prompt_length + 1)) for _ in prompts], None, {}

    def _generate_single_turn(self, prompt_ids: list[list[int]], *args: Any, **kwargs: Any) -> Any:
        if self.model.training:
            self.phases.ends("train")
        if not self.args.torch_compile:
            super()._generate_single_turn(prompt_ids, *args, **kwargs)
        if self.model.training:
            self.phases.ends("generate")
        return [[5] * self.max_completion_length for _ in prompt_ids], None

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        found = super()._generate_and_score_completions(inputs)
        if self.model.training:
            self.phases.ends("score")
        return found


def main() -> None:
    config, job = (json.loads(word) for word in sys.argv[1:])
    length, lora, precision = job.pop("length"), job.pop("lora", False), job.pop("precision")
    compiled = job.pop("compiled", "")
    if compiled:
        from compiled import launch_nothing
        from compiled_trainers import label_tokens

        launch_nothing()
        label_tokens(job["max_completion_length"])
        # as accelerate's launcher does
        os.environ["ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION"] = str(compiled == "regions")
    settings = AutoConfig.for_model(**config)

    def model() -> Any:
        dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        return AutoModelForCausalLM.from_config(settings, dtype=dtype)

    trl.trainer.grpo_trainer.create_model_from_path = lambda *_, **__: model().eval()  # makes the reference
    arguments = GRPOConfig(
        max_steps=3, optim="adamw_torch_fused", output_dir="out", report_to="none", save_strategy="no",
        bf16=precision == "bf16-mixed", disable_tqdm=True, generation_kwargs={"eos_token_id": NO_TOKEN},
        torch_compile=bool(compiled), **job,
    )  # fmt: skip
    Trainer.prompt_length = length - arguments.max_completion_length
    evaluated = Dataset.from_dict({"prompt": ["a"] * 24})
    trainer = Trainer(
        model(), reward_funcs=lambda completions, **_: [0.0] * len(completions), args=arguments,
        train_dataset=Dataset.from_dict({"prompt": ["a"] * 64}), eval_dataset=evaluated,
        processing_class=tokenizer(),
        peft_config=LoraConfig(r=16, target_modules=TARGETS if lora is True else lora, task_type="CAUSAL_LM") if lora else None,
        callbacks=[Trainer.phases],
    )  # fmt: skip
    trainer.train()
    print("FOUND", json.dumps({"rank": int(os.environ.get("RANK", "0")), **Trainer.phases.peaks}), flush=True)


if __name__ == "__main__":
    main()
