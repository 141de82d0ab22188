"""The allocations of PyTorch's own CTC loss, which does not support fake tensors.

transformers' models for speech recognition switch cuDNN's loss off. Source: torch 2.13, ATen/native/cuda/LossCTC.cu (and LossCTC.cpp, which
allocates the same): `ctc_loss_gpu_template`, `ctc_loss_backward_gpu_template`; ATen/native/LossCTC.cpp, `ctc_loss_impl`.
"""

from __future__ import annotations

from typing import Any

import torch

from fsdp_advisor.recording.flash import scratch

# B = sequences, N = frames, V = vocabulary, L = labels of the longest sequence


class _Loss(torch.autograd.Function):
    """Minus the log-likelihood of each sequence, from log-probabilities (N, B, V)."""

    @staticmethod
    def forward(ctx: Any, log_probs: torch.Tensor, longest: int) -> torch.Tensor:
        frames, sequences, _ = log_probs.shape
        log_alpha = log_probs.new_empty(sequences, frames, 2 * longest + 1)
        ctx.save_for_backward(log_probs, log_alpha)
        return log_probs.new_empty(sequences)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        log_probs, log_alpha = ctx.saved_tensors
        with scratch():
            log_beta = torch.empty_like(log_alpha)
        gradient = torch.empty_like(log_probs)
        del log_beta
        return gradient, None


def ctc_loss(
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: torch.Tensor,
    target_lengths: torch.Tensor,
    blank: int = 0,
    reduction: str = "mean",
    zero_infinity: bool = False,
) -> torch.Tensor:
    """`torch.nn.functional.ctc_loss` on fake tensors whose `target_lengths` are known."""
    loss: torch.Tensor = _Loss.apply(log_probs, int(target_lengths.max()))  # type: ignore[no-untyped-call]  # torch leaves it untyped
    if zero_infinity:
        loss = torch.where(loss == float("inf"), loss.new_zeros(()), loss)
    if reduction == "mean":
        return (loss / target_lengths.to(loss).clamp_min(1)).mean()
    return loss.sum() if reduction == "sum" else loss
