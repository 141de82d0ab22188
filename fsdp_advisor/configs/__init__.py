"""Readers of users' configuration files: accelerate, DeepSpeed, Trainer, TRL, axolotl, LLaMA-Factory, torchtune, torchtitan.

One module per consumer; `fsdp_advisor.export` has the writers. A reader turns a file into options of a request and says which
keys it read, which it ignored, which describe something that is not modelled, and what it assumed.

>>> found = from_texts({"ds.json": '{"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 3}}'})
>>> found.options["strategy"], found.options["micro_batch_size"]
('zero3', 2)
"""

from __future__ import annotations

from fsdp_advisor.configs.files import from_paths, from_texts
from fsdp_advisor.configs.merge import Configuration, complete

__all__ = ["Configuration", "complete", "from_paths", "from_texts"]
