"""The allocations of mamba-ssm 2.3's fused Mamba-2 layer, for recording on a machine without a GPU.

The layer runs in chunks of C tokens. B = micro-batch, T = tokens, N = ceil(T / C) chunks, H = heads of width P, G = groups of heads that
share the two projections B and C of width S (the state's). Names are those of the package's code, ops/triton/ssd_combined.py: z is the
gate, x the values, B and C the projections, dt the time steps. Triton's search for launch parameters, which allocates in the first
step only, is left out.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from fsdp_advisor.model.tape import MULTIPROCESSORS, Parts
from fsdp_advisor.recording.causal_conv1d import empty, gradients_of_causal_conv1d, kernel
from fsdp_advisor.recording.tiles import in_parts

USUAL_CHUNKS = (128, 256)
"""Tokens of a chunk if a configuration does not say how many."""
LEAST_ROWS = 32
"""Rows of the smallest block into which a chunk may be divided; partial sums of gradients have one place per such block."""
USUAL_ROWS = 128
"""Rows of the blocks of a chunk that Triton's search for launch parameters is assumed to choose. Affects only the rows of small sums."""
STATE_BLOCK = 64
"""Elements of the smallest block of a head's state."""
NORM_WARPS, NORM_WIDTH = 8, 256
"""The largest number of warps in a program of the norm's backward, and the elements of each warp."""


def split_conv1d_scan(
    zxbcdt: torch.Tensor,
    conv1d_weight: torch.Tensor,
    conv1d_bias: torch.Tensor | None,
    dt_bias: torch.Tensor,
    A: torch.Tensor,
    D: torch.Tensor,
    chunk_size: int,
    *,
    rmsnorm_weight: torch.Tensor | None,
    outproj_weight: torch.Tensor,
    outproj_bias: torch.Tensor | None,
    headdim: int,
    ngroups: int,
    **_: Any,
) -> torch.Tensor:
    """The layer's output (B, T, hidden size) from its projected input (B, T, 2 H P + 2 G S + H): gate, values, B, C and time steps.

    It has the convolution, the scan, the gated norm if there is one, and the output projection.
    """
    out: torch.Tensor = _SplitConv1dScan.apply(  # type: ignore[no-untyped-call]  # torch's
        zxbcdt, conv1d_weight, conv1d_bias, dt_bias, A, D, rmsnorm_weight, outproj_weight, outproj_bias,
        (chunk_size, headdim, ngroups),
    )  # fmt: skip
    return out


class _SplitConv1dScan(torch.autograd.Function):
    """The allocations of `MambaSplitConv1dScanCombinedFn` and of the functions that it calls."""

    @staticmethod
    def forward(
        ctx: Any,
        zxbcdt: torch.Tensor,
        conv_weight: torch.Tensor,
        conv_bias: torch.Tensor | None,
        dt_bias: torch.Tensor,
        A: torch.Tensor,
        D: torch.Tensor,
        norm_weight: torch.Tensor | None,
        out_weight: torch.Tensor,
        out_bias: torch.Tensor | None,
        shape: tuple[int, int, int],
    ) -> torch.Tensor:
        size = _Size(zxbcdt, conv_weight, D, *shape)
        z, xbc, _dt = size.split(zxbcdt)
        xbc_conv = _convolved(xbc)
        # time steps and their sums, the states and the last one live until the end of forward
        _alive = _cumulative(size)
        states, _last = _states(xbc_conv, size, out_dtype=xbc_conv.dtype)
        scores = torch.empty(size.scores)
        kernel([xbc_conv], size.score_flops)
        rstd = None
        if norm_weight is None:
            out, out_x = empty(size.values, xbc_conv), empty(size.values, xbc_conv)
        else:
            out_x = empty(size.values, xbc_conv)
        kernel([scores, xbc_conv, *_alive, states], size.flops(state=1, chunk=1))
        del scores
        if norm_weight is not None:
            out = empty(size.values, out_x)
            rstd = torch.empty(size.g * size.b * size.t)
            kernel([out_x, z], 0)
        if torch.is_autocast_enabled("cpu"):
            half = torch.get_autocast_dtype("cpu")
            out, out_weight = out.to(half), out_weight.to(half)
            out_bias = out_bias.to(half) if out_bias is not None else None
        ctx.save_for_backward(
            zxbcdt, conv_weight, conv_bias, out_x, A, D, dt_bias, norm_weight, rstd, out_weight, out_bias
        )
        ctx.size, ctx.autocasts = size, torch.is_autocast_enabled("cpu")
        return F.linear(out.flatten(2), out_weight, out_bias)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        with torch.autocast("cpu", enabled=ctx.autocasts):
            return _gradients(ctx, grads[0])


def _gradients(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """The gradients of the inputs, as in `MambaSplitConv1dScanCombinedFn.backward`."""
    zxbcdt, conv_weight, conv_bias, out_x, A, D, dt_bias, norm_weight, rstd, out_weight, out_bias = ctx.saved_tensors
    size: _Size = ctx.size
    out = empty((size.b, size.t, size.h * size.p), out_x)
    z, xbc, dt = size.split(zxbcdt)
    xbc_conv = _convolved(xbc)
    dzxbcdt = torch.empty_like(zxbcdt)
    _dz, dxbc_given, _ddt = size.split(dzxbcdt)
    dxbc = torch.empty_like(xbc)
    dout = F.linear(grad, out_weight.t())
    dnorm = None
    if norm_weight is not None:
        of_norm = dout  # noqa: F841  # lives until the end
        dout, dnorm = _gradients_of_norm(dout, out_x, norm_weight, rstd, z, size)
    dout = dout.view(size.values)
    if norm_weight is None:
        dA, dD, ddt_bias, out = _gradients_of_scan(dout, xbc_conv, dt, A, D, dt_bias, size, gate=(z, out_x))
    else:
        dA, dD, ddt_bias, _ = _gradients_of_scan(dout, xbc_conv, dt, A, D, dt_bias, size, gate=None)
    dout_weight = torch.einsum("bso,bsd->od", grad, out.flatten(2))
    dout_bias = grad.sum(dim=(0, 1)) if out_bias is not None else None
    dx, dweight, dbias = gradients_of_causal_conv1d(
        _aligned(dxbc).transpose(1, 2),
        _aligned(xbc).transpose(1, 2),
        conv_weight,
        conv_bias,
        _aligned(dxbc_given).transpose(1, 2),
    )
    if dx.transpose(1, 2).stride() != dxbc_given.stride():
        dxbc_given.copy_(dx.transpose(1, 2))
    return dzxbcdt, dweight, dbias, ddt_bias, dA, dD, dnorm, dout_weight, dout_bias, None


def _gradients_of_norm(
    dout: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, rstd: torch.Tensor, z: torch.Tensor, size: _Size
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of the gated norm's input and weight. Source: ops/triton/layernorm_gated.py, `_layer_norm_bwd`."""
    dx = torch.empty_like(x)
    width = size.h * size.p // size.g
    warps = min(max((1 << (width - 1).bit_length()) // NORM_WIDTH, 1), NORM_WARPS)
    programs = -(-MULTIPROCESSORS * -(-4 // warps) // size.g)
    partial = torch.empty((programs, size.h * size.p))
    kernel([x, z, dout, rstd], 0)
    return dx, partial.sum(0).to(weight.dtype)


def _gradients_of_scan(
    dout: torch.Tensor,
    xbc: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    D: torch.Tensor,
    dt_bias: torch.Tensor,
    size: _Size,
    *,
    gate: tuple[torch.Tensor, torch.Tensor] | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """`_mamba_chunk_scan_combined_bwd`: the gradients of A, D and the bias of time steps, and with a gate the gated output again.

    The gradients of z, x, B, C and dt are written to existing storages.
    """
    dt_in = dt.clone()  # lives until the end
    sums = _cumulative(size)
    scores = torch.empty(size.scores)
    kernel([xbc], size.score_flops)
    states, _last = _states(xbc, size, out_dtype=torch.float32)
    gated = dout
    if gate is not None:
        dD = torch.empty((-(-size.chunk // LEAST_ROWS), size.b, size.chunks, size.h, 1))
        gated, dout = empty(size.values, xbc), empty(size.values, dout)
        kernel([*gate, xbc, dout], 0)
        dD = dD[: size.usual_blocks].sum(dim=(0, 1, 2)).to(D.dtype).flatten()
    dstates = torch.empty(size.states)
    kernel([dout, xbc, *sums], size.flops(state=1))
    dstates, of_chunks, states = _gradients_of_state_passing(states, dstates, xbc.dtype, size)
    dD_of_x = torch.zeros((-(-size.chunk // LEAST_ROWS), size.b, size.chunks, size.h, 1))
    ddt = torch.empty(size.steps)
    kernel([xbc, scores, dout, *sums, dstates], size.flops(state=1, chunk=1))
    dD_of_x = dD_of_x[: size.usual_blocks].sum(dim=(0, 1, 2)).sum(-1).to(D.dtype)
    dB, following = _gradient_by_groups(size, [xbc, dstates, *sums], (size.b, size.t, 1, size.g, size.s))
    kernel([following, following], 0)  # a cumulative sum in place
    dC, previous = _gradient_by_groups(size, [xbc, states, dout, *sums], (size.b, size.t, 1, size.g, size.s))
    with in_parts(size.parts):
        dscores = torch.empty((size.b, size.chunks, 1, size.g, size.chunk, size.chunk))
    kernel([xbc, dout, *sums], size.flops(chunk=1))
    dscores = dscores.sum(2)
    for projection in (dB, dC):
        kernel([xbc, dscores, projection], size.score_flops)
    previous[..., -1] += of_chunks
    before = previous.flip([-1]).cumsum(dim=-1).flip([-1])
    sums_of_dt = torch.empty((*size.steps[:3], -(-size.chunk // LEAST_ROWS), size.chunk))
    kernel([xbc, dout, *sums, scores], size.flops(chunk=1))
    sums_of_dt = sums_of_dt[:, :, :, : size.usual_blocks].sum(dim=3)
    sums_of_dt += following + before
    ddt_bias = torch.empty_like(dt_bias, dtype=torch.float32)
    dA = torch.empty_like(A, dtype=torch.float32)
    kernel([sums_of_dt, ddt, dt_in], 0)
    return dA, dD_of_x if gate is None else dD, ddt_bias, gated


def _gradients_of_state_passing(
    states: torch.Tensor, dstates: torch.Tensor, dtype: torch.dtype, size: _Size
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`_state_passing_bwd`: gradients of the states, of the sums of time steps in each chunk, and the states in another dtype."""
    found = torch.empty_like(dstates, dtype=dtype)
    converted = torch.empty_like(states, dtype=dtype) if states.dtype != dtype else states
    partial = torch.empty((*size.steps[:3], -(-size.p * size.s // STATE_BLOCK)))
    kernel([dstates, states], 0)
    return found, partial.sum(dim=-1), converted


def _gradient_by_groups(
    size: _Size, reads: list[torch.Tensor], shape: tuple[int, ...]
) -> tuple[torch.Tensor, torch.Tensor]:
    """(gradient of a projection of shape `shape` after its parts are added, gradient of the sums of time steps). Source:
    `_chunk_state_bwd_db` and `_chunk_scan_bwd_dC`.
    """
    of_sums = torch.empty(size.steps)
    with in_parts(size.parts):
        found = torch.empty(shape)
    kernel(reads, size.flops(state=1))
    return found.sum(2), of_sums


def _convolved(xbc: torch.Tensor) -> torch.Tensor:
    """The result of causal_conv1d_fwd_function for an input (B, T, channels)."""
    aligned = _aligned(xbc).transpose(1, 2)
    found = torch.empty_like(aligned)
    kernel([aligned], 0)
    return found.transpose(1, 2)


def _aligned(x: torch.Tensor) -> torch.Tensor:
    """`ensure_stride`: a copy if the convolution does not support the stride between tokens, else `x`."""
    return x if x.stride(1) % 8 == 0 else x.contiguous()


def _cumulative(size: _Size) -> tuple[torch.Tensor, torch.Tensor]:
    """`_chunk_cumsum_fwd`: the time steps after softplus, and the sums of their products with A."""
    found = torch.empty(size.steps), torch.empty(size.steps)
    kernel([], 0)
    return found


def _states(xbc: torch.Tensor, size: _Size, *, out_dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """`_chunk_state_fwd` and `_state_passing_fwd`: the state before each chunk, and the last one."""
    of_chunks = torch.empty(size.states)
    kernel([xbc], size.flops(state=1))
    found = torch.empty(size.states, dtype=out_dtype), torch.empty((size.b, size.h, size.p * size.s))
    kernel([of_chunks], 0)
    return found


class _Size:
    """The dimensions of a layer, from its projected input and parameters."""

    def __init__(
        self, zxbcdt: torch.Tensor, conv_weight: torch.Tensor, D: torch.Tensor, chunk: int, width: int, groups: int
    ) -> None:
        self.b, self.t, projected = zxbcdt.shape
        self.h, self.p, self.g, self.chunk = D.shape[0], width, groups, chunk
        self.s = (conv_weight.shape[0] - self.h * width) // groups // 2
        self.chunks = -(-self.t // chunk)
        assert projected == 2 * self.h * width + 2 * groups * self.s + self.h, "without a gated linear unit"
        self.values = (self.b, self.t, self.h, self.p)
        self.steps = (self.b, self.h, self.chunks, chunk)
        self.states = (self.b, self.chunks, self.h, self.p, self.s)
        self.scores = (self.b, self.chunks, groups, chunk, chunk)
        self.parts = Parts(chunk, self.h, groups)
        self.usual_blocks = -(-chunk // USUAL_ROWS)
        self.score_flops = 2 * self.b * self.g * self.chunks * chunk * chunk * self.s

    def split(self, projected: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Views of the gate, of the convolution's input, and of the time steps."""
        inner = self.h * self.p
        z, xbc, dt = projected.split([inner, inner + 2 * self.g * self.s, self.h], dim=-1)
        return z, xbc, dt

    def flops(self, *, state: int = 0, chunk: int = 0) -> int:
        """FLOPs of `state` products (2 P S per token and head) and `chunk` products (2 C P), over all tokens and heads.

        The products are the calls of `tl.dot` in the kernels; masked halves of a chunk's matrix count too.
        """
        per_token = self.p * (state * self.s + chunk * self.chunk)
        return 2 * self.b * self.h * self.chunks * self.chunk * per_token
