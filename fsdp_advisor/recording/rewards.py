"""TRL's training of a reward model: one score for each sequence of a pair, and a loss of the scores' differences.

Source: trl 1.16, trainer/reward_trainer.py, `DataCollatorForPreference`, `RewardTrainer.compute_loss`.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from fsdp_advisor.job.training_task import sequences_per_example
from fsdp_advisor.recording.preferences import WithoutDropout


class RewardSource(WithoutDropout):
    """A model for the classification of sequences with one label, trained on pairs of a chosen and a rejected sequence."""

    def batch(self, micro_batch_size: int, seq_len: int) -> dict[str, torch.Tensor]:
        ids = self._base.batch(sequences_per_example("reward") * micro_batch_size, seq_len)["input_ids"]
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    def loss(self, module: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        rewards = module(input_ids=batch["input_ids"], use_cache=False).logits
        torch.clear_autocast_cache()  # accelerate's autocast ends with the forward
        chosen, rejected = torch.chunk(rewards.squeeze(-1), chunks=2)
        return -F.logsigmoid(chosen - rejected).mean()
