"""Helpers of the scripts that train with a Trainer."""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Callable
from multiprocessing import get_context
from typing import Any

import torch
from datasets import Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments


class SteadyPeak(TrainerCallback):
    """The peak of the steps after the first, which makes the optimizer's state."""

    peak = 0

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step > 1:
            self.peak = max(self.peak, torch.cuda.max_memory_allocated())
        torch.cuda.reset_peak_memory_stats()


def peak_of_steps(trained: Any, precision: str, engine: str, batch: int, length: int, accumulation: int = 1) -> int:
    """The peak of the third and fourth step of a plain loop, under autocast unless FSDP2 casts. Earlier steps make states."""
    optimizer = torch.optim.AdamW((p for p in trained.parameters() if p.requires_grad), fused=True)
    tokens = torch.zeros(batch, length, dtype=torch.long, device="cuda")
    autocasts = precision == "bf16-mixed" and engine != "fsdp2"
    peak = 0
    for step in range(4):
        gc.collect()  # the compiler's cycles of references keep tensors
        torch.cuda.reset_peak_memory_stats()
        for _ in range(accumulation):
            with torch.autocast("cuda", torch.bfloat16, enabled=autocasts):
                loss = trained(input_ids=tokens, labels=tokens, use_cache=False).loss
            loss.backward()
        del loss
        optimizer.step()
        optimizer.zero_grad()
        peak = max(peak, torch.cuda.max_memory_allocated()) if step > 1 else 0
    return peak


def usual_arguments(batch: int, precision: str) -> dict[str, Any]:
    """The arguments of three steps that save and report nothing."""
    return {
        "per_device_train_batch_size": batch, "max_steps": 3, "optim": "adamw_torch_fused", "output_dir": "out", "report_to": "none",
        "save_strategy": "no", "bf16": precision == "bf16-mixed", "disable_tqdm": True,
    }  # fmt: skip


def peak_of_trainer(
    model: Any, tokens: list[int], batch: int, precision: str, found: SteadyPeak | None = None, **arguments: Any
) -> int:
    """The peak that `found` sees of the Trainer's steps on micro-batches whose sequences are all `tokens`."""
    found = found or SteadyPeak()
    rows = {"input_ids": [tokens] * (4 * batch)}
    data = Dataset.from_dict(rows | {"labels": rows["input_ids"]}).with_format("torch")
    settings = TrainingArguments(**usual_arguments(batch, precision), **arguments)
    Trainer(model, args=settings, train_dataset=data, callbacks=[found]).train()
    return found.peak


def tokenizer() -> Any:
    """A tokenizer, which SFTTrainer needs to pad."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = WordLevel({"<pad>": 0, "<unk>": 1}, unk_token="<unk>")
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(words), pad_token="<pad>", eos_token="<pad>", unk_token="<unk>"
    )


def print_peaks(measured: Callable[..., int]) -> None:
    """Print the peak of each job. Each is measured in a separate process, because another job's cache would change it.

    The script's arguments are JSON: arguments of `measured` that are the same for every job, if any, and the jobs by name.
    """
    *shared, jobs = (json.loads(word) for word in sys.argv[1:])
    print("FOUND", json.dumps({name: _in_a_fork(measured, *shared, job) for name, job in jobs.items()}))


def _in_a_fork(measured: Callable[..., int], *arguments: Any) -> int:
    context = get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=lambda: sender.send(measured(*arguments)))
    process.start()
    sender.close()
    peak: int = receiver.recv()
    process.join()
    return peak
