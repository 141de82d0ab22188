"""A stand-in for mamba-ssm's CUDA extension, which cannot be built without CUDA: it allocates what the C++ code does.

Source: csrc/selective_scan/selective_scan.cpp of mamba-ssm 2.3.
"""

from __future__ import annotations

import torch

Optional = torch.Tensor | None


def fwd(
    u: torch.Tensor,
    delta: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: Optional,
    z: Optional,
    delta_bias: Optional,
    delta_softplus: bool,
) -> list[torch.Tensor]:
    """The output, the states after each 2,048 tokens, and the gated output if there is a gate."""
    assert (
        u.stride(-1) == delta.stride(-1) == 1
        and A.dtype == torch.float32
        and u.dtype == delta.dtype == B.dtype == C.dtype
    )
    gated = [torch.empty_like(z)] if z is not None else []
    out = torch.empty_like(delta)
    batch, width, tokens = u.shape
    x = torch.empty(batch, width, (tokens + 2047) // 2048, A.shape[1] * 2, dtype=A.dtype, device=u.device)
    return [out, x, *gated]


def bwd(
    u: torch.Tensor,
    delta: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: Optional,
    z: Optional,
    delta_bias: Optional,
    dout: torch.Tensor,
    x: torch.Tensor,
    out: Optional,
    dz: Optional,
    delta_softplus: bool,
    recompute_out_z: bool,
) -> list[Optional]:
    """The gradients of u, delta, A, B, C, D, the bias and the gate, and the gated output if that is asked for."""
    more: list[Optional] = []
    if z is not None:
        assert out is not None
        more = [torch.empty_like(z) if dz is None else dz] + ([torch.empty_like(out)] if recompute_out_z else [])
    du, ddelta, dA = torch.empty_like(u), torch.empty_like(delta), torch.zeros_like(A)
    dB, dC = torch.zeros_like(B, dtype=torch.float32), torch.zeros_like(C, dtype=torch.float32)
    dD = torch.zeros_like(D) if D is not None else None
    dbias = torch.zeros_like(delta_bias) if delta_bias is not None else None
    return [du, ddelta, dA, dB.to(B.dtype), dC.to(C.dtype), dD, dbias, *more]
