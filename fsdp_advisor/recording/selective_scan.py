"""The allocations of mamba-ssm 2.3's Mamba-1 layer, for recording on a machine without a GPU.

B = micro-batch, T = tokens, D = inner width, S = width of a state, R = rank of the time steps. Names are those of the package's code,
ops/selective_scan_interface.py: u is the input of the scan, delta the time steps, A, B and C the state's matrices, z the gate.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from fsdp_advisor.recording.causal_conv1d import empty, gradients_of_causal_conv1d, kernel

CHUNK = 2048
"""Tokens after which the kernel stores the state. Source: csrc/selective_scan/selective_scan.cpp, `n_chunks`."""
FLOPS = 9
"""Floating-point operations of the forward per token and element of the state. Source: the count of mamba's authors,
github.com/state-spaces/mamba/issues/110. The backward is assumed to have twice as many.
"""


def selective_scan(
    u: torch.Tensor,
    delta: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    delta_bias: torch.Tensor | None = None,
    *,
    return_last_state: bool = False,
    **_: Any,
) -> Any:
    """The gated output (B, D, T) of the scan; with `return_last_state` also the last state (B, D, S).

    u, delta, z: (B, D, T). A: (D, S). B, C: (B, S, T). D, delta_bias: (D).
    """
    out, last = _SelectiveScan.apply(u, delta, A, B, C, D, z, delta_bias)  # type: ignore[no-untyped-call]  # torch's
    return (out, last) if return_last_state else out


A_INDEX = 2
"""The position of A, which is taken as it is, among the arguments of the scan."""


class _SelectiveScan(torch.autograd.Function):
    """Source: `SelectiveScanFn`."""

    @staticmethod
    def forward(ctx: Any, *tensors: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        rows = [_in_rows(t) if t is not None and i != A_INDEX else t for i, t in enumerate(tensors)]
        u, delta, A, B, C, D, z, delta_bias = rows
        assert u is not None and delta is not None and A is not None and B is not None and C is not None
        out, x, out_z = _scan(u, delta, A, B, C, z)
        ctx.save_for_backward(u, delta, A, B, C, D, z, delta_bias, x, None if z is None else out)
        last = x[:, :, -1, 1::2]
        ctx.mark_non_differentiable(last)
        return (out if out_z is None else out_z), last

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        u, delta, A, B, C, D, z, delta_bias, x, out = ctx.saved_tensors
        dout = _in_rows(grads[0])
        dz = torch.empty_like(z) if z is not None else None
        return (*_gradients_of_scan(u, delta, A, B, C, D, [dout, x, z, out]), dz, _zeros(delta_bias))


def _in_rows(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with adjacent tokens."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _zeros(like: torch.Tensor | None) -> torch.Tensor | None:
    return torch.zeros_like(like) if like is not None else None


def _scan(
    u: torch.Tensor, delta: torch.Tensor, A: torch.Tensor, B: torch.Tensor, C: torch.Tensor, z: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """The output, the states between chunks (B, D, chunks, 2 S), and the gated output if there is a gate.

    Source: csrc/selective_scan/selective_scan.cpp, `selective_scan_fwd`.
    """
    batch, width, tokens = u.shape
    out_z = torch.empty_like(z) if z is not None else None
    out = torch.empty_like(delta)
    x = empty((batch, width, -(-tokens // CHUNK), 2 * A.shape[1]), A)
    kernel([t for t in (u, delta, B, C, z) if t is not None], FLOPS * u.numel() * A.shape[1])
    return out, x, out_z


def _gradients_of_scan(
    u: torch.Tensor,
    delta: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None,
    reads: list[torch.Tensor | None],
) -> tuple[torch.Tensor | None, ...]:
    """The gradients of u, delta, A, B, C and D. Those of B and C are summed in fp32.

    Source: csrc/selective_scan/selective_scan.cpp, `selective_scan_bwd`.
    """
    du, ddelta, dA = torch.empty_like(u), torch.empty_like(delta), torch.zeros_like(A)
    dB, dC = torch.zeros_like(B, dtype=torch.float32), torch.zeros_like(C, dtype=torch.float32)
    dD = _zeros(D)
    kernel([t for t in (u, delta, B, C, *reads) if t is not None], 2 * FLOPS * u.numel() * A.shape[1])
    return du, ddelta, dA, dB.to(B.dtype), dC.to(C.dtype), dD


def mamba_inner(
    xz: torch.Tensor,
    conv1d_weight: torch.Tensor,
    conv1d_bias: torch.Tensor | None,
    x_proj_weight: torch.Tensor,
    delta_proj_weight: torch.Tensor,
    out_proj_weight: torch.Tensor,
    out_proj_bias: torch.Tensor | None,
    A: torch.Tensor,
    _B: None,
    _C: None,
    D: torch.Tensor | None = None,
    *,
    delta_bias: torch.Tensor | None = None,
    b_rms_weight: torch.Tensor | None = None,
    c_rms_weight: torch.Tensor | None = None,
    dt_rms_weight: torch.Tensor | None = None,
    **_: Any,
) -> torch.Tensor:
    """The output (B, T, hidden size) of a Mamba-1 layer without its first projection, whose output `xz` is (B, 2 D, T)."""
    out: torch.Tensor = _MambaInner.apply(  # type: ignore[no-untyped-call]  # torch's
        xz, conv1d_weight, conv1d_bias, x_proj_weight, delta_proj_weight, out_proj_weight, out_proj_bias, A, D, delta_bias,
        b_rms_weight, c_rms_weight, dt_rms_weight,
    )  # fmt: skip
    return out


class _MambaInner(torch.autograd.Function):
    """Source: `MambaInnerFn` with `checkpoint_lvl` 1: the convolution's output and the time steps are made again in backward."""

    @staticmethod
    def forward(ctx: Any, *tensors: torch.Tensor | None) -> torch.Tensor:
        xz, conv_weight, conv_bias, x_weight, delta_weight, out_weight, out_bias, A, D, delta_bias, *norms = tensors
        assert xz is not None and conv_weight is not None and x_weight is not None and delta_weight is not None
        assert out_weight is not None and A is not None
        if torch.is_autocast_enabled("cpu"):
            half = torch.get_autocast_dtype("cpu")
            x_weight, delta_weight, out_weight = x_weight.to(half), delta_weight.to(half), out_weight.to(half)
            out_bias = out_bias.to(half) if out_bias is not None else None
        xz = _in_rows(xz)
        x, z = xz.chunk(2, dim=1)
        conv_weight = conv_weight.squeeze(1)
        conv_out = torch.empty_like(x)
        kernel([x], 0)
        x_dbl = F.linear(_rows(conv_out), x_weight)
        tokens, rank, state = xz.shape[-1], delta_weight.shape[1], A.shape[-1]
        delta = _time_steps(delta_weight, x_dbl, tokens)
        B, C = (_by_token(part, tokens).contiguous() for part in (x_dbl[:, rank : rank + state], x_dbl[:, -state:]))
        B, C, delta = _normed(B, norms[0]), _normed(C, norms[1]), _normed(delta, norms[2])
        out, states, out_z = _scan(conv_out, delta, A, B, C, z)
        assert out_z is not None
        del conv_out, delta
        ctx.save_for_backward(
            xz,
            conv_weight,
            conv_bias,
            x_dbl,
            x_weight,
            delta_weight,
            out_weight,
            A,
            B,
            C,
            D,
            delta_bias,
            states,
            out,
            *norms,
        )
        ctx.has_out_bias, ctx.autocasts = out_bias is not None, torch.is_autocast_enabled("cpu")
        return F.linear(out_z.transpose(1, 2), out_weight, out_bias)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        with torch.autocast("cpu", enabled=ctx.autocasts):
            return _gradients_of_layer(ctx, grads[0])


def _gradients_of_layer(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """`MambaInnerFn.backward`."""
    (
        xz, conv_weight, conv_bias, x_dbl, x_weight, delta_weight, out_weight, A, B, C, D, delta_bias, states, out, *norms,
    ) = ctx.saved_tensors  # fmt: skip
    tokens, rank, state = xz.shape[-1], delta_weight.shape[1], A.shape[-1]
    x, z = xz.chunk(2, dim=1)
    dout = _in_rows(dout)
    conv_out = torch.empty_like(x)
    kernel([x], 0)
    delta = _normed(_time_steps(delta_weight, x_dbl, tokens), norms[2])
    B, C = _normed(B, norms[0]), _normed(C, norms[1])
    dxz = torch.empty_like(xz)
    dx, _dz = dxz.chunk(2, dim=1)
    dout = dout.permute(2, 0, 1).reshape(dout.shape[2], -1)
    dout_y = _by_token((out_weight.t() @ dout).t(), tokens)
    out_z = torch.empty_like(out)
    dconv_out, ddelta, dA, dB, dC, dD = _gradients_of_scan(conv_out, delta, A, B, C, D, [dout_y, states, z, out])
    ddelta_bias = _zeros(delta_bias)
    assert dconv_out is not None and ddelta is not None and dB is not None and dC is not None
    dout_weight = torch.einsum("eB,dB->ed", dout, out_z.transpose(0, 1).reshape(out_z.shape[1], -1))
    dout_bias = dout.sum(dim=(0, 1)) if ctx.has_out_bias else None
    dx_dbl = torch.empty_like(x_dbl)
    dB = _rows(dB).contiguous()
    dx_dbl[:, rank : rank + state] = dB
    del dB
    dC = _rows(dC).contiguous()
    dx_dbl[:, -state:] = dC
    del dC
    ddelta = ddelta.transpose(0, 1).reshape(ddelta.shape[1], -1)
    ddelta_weight = torch.einsum("dB,Br->dr", ddelta, x_dbl[:, :rank])
    dx_dbl[:, :rank] = torch.einsum("dB,dr->Br", ddelta, delta_weight)
    dconv_out = dconv_out.transpose(0, 1).reshape(dconv_out.shape[1], -1)
    dx_weight = torch.einsum("Br,Bd->rd", dx_dbl, _rows(conv_out))
    dconv_out = torch.addmm(dconv_out, x_weight.t(), dx_dbl.t(), out=dconv_out)
    _, dweight, dbias = gradients_of_causal_conv1d(
        dconv_out.view(-1, *x.shape[::2]).transpose(0, 1), x, conv_weight, conv_bias, dx
    )
    return (
        dxz, dweight.unsqueeze(1), dbias, dx_weight, ddelta_weight, dout_weight, dout_bias, dA, dD, ddelta_bias, None, None, None,
    )  # fmt: skip


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """(B, channels, T) as (B T, channels), a copy unless B is 1."""
    return tensor.transpose(1, 2).reshape(-1, tensor.shape[1])


def _by_token(rows: torch.Tensor, tokens: int) -> torch.Tensor:
    """(B T, channels) as a view (B, channels, T)."""
    return rows.view(-1, tokens, rows.shape[1]).transpose(1, 2)


def _time_steps(weight: torch.Tensor, x_dbl: torch.Tensor, tokens: int) -> torch.Tensor:
    """The time steps (B, D, T), with D as the slowest dimension in memory."""
    return (weight @ x_dbl[:, : weight.shape[1]].t()).view(len(weight), -1, tokens).transpose(0, 1)


def _normed(tensor: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
    """The tensor (B, channels, T) after a norm of its channels, or as it is without one.

    Source: `rms_norm_forward`, which calls `_layer_norm_fwd` of ops/triton/layer_norm.py: an output, and a factor in fp32 for each row.
    """
    if weight is None:
        return tensor
    rows = _rows(tensor).contiguous()
    out = torch.empty_like(rows)
    factors = torch.empty(len(rows), dtype=torch.float32)
    kernel([rows], 0)
    del factors, rows
    return _by_token(out, tensor.shape[-1]).contiguous()
