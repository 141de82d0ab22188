"""What autocast casts on a GPU, against PyTorch's own kernels for it: they run on fake tensors that say they are on one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

torch = pytest.importorskip("torch")

from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402  # after the check for torch
from torch.nn import functional as F  # noqa: E402, N812  # the name that everyone gives it

from fsdp_advisor.tracing import autocast  # noqa: E402

Tensor = torch.Tensor

OPERATIONS: dict[str, Callable[[Tensor, Tensor], object]] = {
    "layer_norm": lambda x, w: F.layer_norm(x, (16,), w, w),
    "rms_norm": lambda x, w: F.rms_norm(x, (16,), w),
    "group_norm": lambda x, w: F.group_norm(x, 4, w, w),
    "softmax": lambda x, _: F.softmax(x, -1),
    "softmax in a dtype": lambda x, _: F.softmax(x, -1, dtype=x.dtype),
    "log_softmax": lambda x, _: F.log_softmax(x, -1),
    "cross_entropy": lambda x, _: F.cross_entropy(x, torch.zeros(8, dtype=torch.long, device=x.device)),
    "nll_loss": lambda x, _: F.nll_loss(x, torch.zeros(8, dtype=torch.long, device=x.device)),
    "mse_loss": lambda x, w: F.mse_loss(x, x * w),
    "binary_cross_entropy_with_logits": lambda x, w: F.binary_cross_entropy_with_logits(x, x * w),
    "pow by a number": lambda x, _: x.pow(3),
    "pow by a tensor": lambda x, w: x.pow(w),
    "a number to a power": lambda x, _: torch.pow(2.0, x),
    "rsqrt": lambda x, _: x.rsqrt(),
    "exp": lambda x, _: x.exp(),
    "log": lambda x, _: x.log(),
    "softplus": lambda x, _: F.softplus(x),
    "sum": lambda x, _: x.sum(),
    "sum over a dimension": lambda x, _: x.sum(-1),
    "cumsum": lambda x, _: x.cumsum(0),
    "cumsum of integers": lambda x, _: torch.ones(8, dtype=torch.long, device=x.device).cumsum(0),
    "norm": lambda x, _: x.norm(),
    "norm over a dimension": lambda x, _: x.norm(dim=-1),
    "vector norm": lambda x, _: torch.linalg.vector_norm(x),
    "mean": lambda x, _: x.mean(),
    "gelu": lambda x, _: F.gelu(x),
    "silu": lambda x, _: F.silu(x),
    "tanh": lambda x, _: x.tanh(),
    "linear": lambda x, w: F.linear(x, torch.outer(w, w)),
    "matmul": lambda x, _: x @ x.T,
    "einsum": lambda x, _: torch.einsum("ab,cb->ac", x, x),
    "cat": lambda x, _: torch.cat([x, x.float()]),
    "stack": lambda x, _: torch.stack([x, x]),
    "scatter_add": lambda x, _: torch.scatter_add(x.float(), 0, torch.zeros(8, 16, dtype=torch.long, device=x.device), x),
    "addcmul": lambda x, w: torch.addcmul(x, x, w.float()),
}  # fmt: skip


@contextmanager
def enabled(device: str) -> Iterator[None]:
    """`torch.autocast` itself turns away where there is no GPU."""
    torch.set_autocast_enabled(device, True)
    torch.set_autocast_dtype(device, torch.bfloat16)
    torch.autocast_increment_nesting()
    try:
        yield
    finally:
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()
        torch.set_autocast_enabled(device, False)


def outcome(operation: Callable[[Tensor, Tensor], object], device: str, dtype: torch.dtype) -> object:
    with FakeTensorMode(), enabled(device):
        found = operation(torch.empty(8, 16, dtype=dtype, device=device), torch.empty(16, dtype=dtype, device=device))
        assert isinstance(found, torch.Tensor)
        return found.dtype, found.shape


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", OPERATIONS)
def test_operations_give_the_dtype_that_a_gpu_gives(name: str, dtype: torch.dtype) -> None:
    theirs = outcome(OPERATIONS[name], "cuda", dtype)
    with autocast.as_on_gpu():
        assert outcome(OPERATIONS[name], "cpu", dtype) == theirs


def test_no_operation_that_a_gpu_casts_is_forgotten() -> None:
    """All but products that no transformer has, whose cast weights autocast's own cache would have to keep."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    names = [n for n in torch._C._dispatch_get_all_op_names() if n.startswith("aten::")]
    gpu = {n.removeprefix("aten::") for n in names if has(n, "AutocastCUDA")}
    cpu = {n.removeprefix("aten::") for n in names if has(n, "AutocastCPU")}
    ours = {*autocast.FP32, *autocast.FP32_OUTPUT, *autocast.NORM, *autocast.WIDEST}
    assert ours <= gpu and not ours & set(autocast.AS_IT_IS)
    assert set(autocast.AS_IT_IS) <= cpu - gpu
    assert gpu - cpu - ours == {
        "_convolution", "convolution", "cudnn_convolution", "cudnn_convolution_transpose", "_scaled_dot_product_flash_attention",
        "einsum", "addmv", "mv", "addr", "chain_matmul", "linalg_multi_dot",
        "_thnn_fused_lstm_cell", "_thnn_fused_gru_cell", "lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell",
    }  # fmt: skip


def test_gradients_pass_through_the_casts() -> None:
    x = torch.ones(8, 16, dtype=torch.bfloat16, requires_grad=True)
    with autocast.as_on_gpu(), torch.autocast("cpu", torch.bfloat16):
        y = F.layer_norm(x, (16,))
    assert y.dtype == torch.float32
    y.sum().backward()
    assert x.grad is not None and x.grad.dtype == torch.bfloat16


def test_the_cpu_is_itself_again_afterwards() -> None:
    with autocast.as_on_gpu():
        pass
    with torch.autocast("cpu", torch.bfloat16):
        assert F.layer_norm(torch.ones(8, 16, dtype=torch.bfloat16), (16,)).dtype == torch.bfloat16
        assert F.cross_entropy(torch.ones(8, 16, dtype=torch.bfloat16), torch.zeros(8, dtype=torch.long)).dtype == torch.float32
