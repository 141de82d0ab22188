"""What CUDA keeps for backward, on CPU tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # after the check for torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp_advisor.recording import cuda
from fsdp_advisor.recording.cuda import as_on_cuda
from fsdp_advisor.recording.on_gpu import autocast_inputs

pytestmark = pytest.mark.slow


def saved(run: Callable[[], torch.Tensor]) -> list[torch.dtype]:
    """Dtypes of what is saved for backward."""
    kept: list[torch.dtype] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.dtype)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run().sum().backward()
    return kept


def test_dropout_keeps_one_byte_per_element() -> None:
    x = torch.ones(4, 8, requires_grad=True)
    assert saved(lambda: F.dropout(x, 0.5)) == [torch.float32]
    with as_on_cuda():
        assert saved(lambda: F.dropout(x, 0.5)) == [torch.bool]
        assert saved(lambda: F.dropout(x, 0.0)) == saved(lambda: F.dropout(x, 0.5, training=False)) == []
        assert F.dropout(x, 0.0).data_ptr() == F.dropout(x, 0.5, training=False).data_ptr() == x.data_ptr()
        assert not F.dropout(x, 1.0).any()
    assert saved(lambda: F.dropout(x, 0.5)) == [torch.float32]


@pytest.mark.parametrize(
    "operator",
    [lambda x: x.softmax(-1), lambda x: F.log_softmax(x, -1), nn.LayerNorm(8), nn.RMSNorm(8), lambda x: x**3, lambda x: x.sum(-1)],
    ids=["softmax", "log_softmax", "layer_norm", "rms_norm", "pow", "sum"],
)  # fmt: skip
def test_autocast_runs_in_fp32_what_it_does_on_cuda(operator: Callable[[torch.Tensor], torch.Tensor]) -> None:
    x = torch.ones(4, 8, dtype=torch.bfloat16)
    with as_on_cuda(), torch.autocast("cpu", torch.bfloat16):
        assert operator(x).dtype == torch.float32
        assert F.linear(torch.ones(4, 8), torch.ones(8, 8)).dtype == torch.bfloat16
        assert x.softmax(-1, dtype=torch.bfloat16).dtype == torch.bfloat16
        assert torch.ones(3, dtype=torch.long).sum().dtype == torch.long
    with as_on_cuda():
        assert x.softmax(-1).dtype == torch.bfloat16


def test_cross_entropy_keeps_half_precision_on_cuda() -> None:
    logits = torch.ones(4, 8, dtype=torch.bfloat16, requires_grad=True)
    labels = torch.zeros(4, dtype=torch.long)

    def loss() -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return F.cross_entropy(logits, labels)

    assert torch.bfloat16 not in saved(loss)
    with as_on_cuda():
        assert torch.bfloat16 in saved(loss)
    assert torch.bfloat16 not in saved(loss)


def test_backward_through_the_casts() -> None:
    x = torch.ones(4, 8, dtype=torch.bfloat16, requires_grad=True)
    with as_on_cuda(), torch.autocast("cpu", torch.bfloat16):
        F.gelu(x.softmax(-1) ** 2).sum().backward()
    assert x.grad is not None and x.grad.dtype == torch.bfloat16


def test_operators_that_autocast_casts_are_those_that_pytorch_registers() -> None:
    """CUDA's autocast kernels are registered in every build of PyTorch."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    for name in (*cuda.IN_FP32, *cuda.IN_FP32_UNLESS_ASKED):
        operator = cuda.operator_named(name).name()  # type: ignore[attr-defined]
        assert has(operator, "AutocastCUDA") and not has(operator, "AutocastCPU"), name
    operator = cuda.operator_named(cuda.AS_IT_IS).name()  # type: ignore[attr-defined]
    assert has(operator, "AutocastCPU") and not has(operator, "AutocastCUDA")


def test_models_that_ask_for_autocast_get_the_answer_of_the_cpu() -> None:
    with as_on_cuda():
        assert not torch.is_autocast_enabled()
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.is_autocast_enabled()
            assert torch.is_autocast_enabled("cpu")
            assert not torch.is_autocast_enabled("cuda")
    with torch.autocast("cpu", torch.bfloat16):
        assert not torch.is_autocast_enabled()


class Casts(TorchDispatchMode):
    """The shapes of the tensors that are cast, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if operator is torch.ops.aten._to_copy.default:
            self.shapes.append(tuple(args[0].shape))
        return operator(*args, **(kwargs or {}))


def casts(run: Callable[[], object]) -> list[tuple[int, ...]]:
    with torch.autocast("cpu", torch.bfloat16), Casts() as found:
        run()
    return found.shapes


def test_attentions_inputs_are_cast_in_pytorchs_order() -> None:
    query, key, value, mask = torch.ones(1, 2, 3, 8), torch.ones(1, 2, 5, 8), torch.ones(1, 2, 5, 4), torch.ones(3, 5)
    by_pytorch = casts(lambda: F.scaled_dot_product_attention(query, key, value, mask))[:4]
    assert by_pytorch == casts(lambda: autocast_inputs(query, key, value, mask))


def test_inputs_of_operators_in_fp32_are_cast_in_pytorchs_order() -> None:
    x, weight = torch.ones(4, 8, dtype=torch.bfloat16), torch.ones(8, dtype=torch.bfloat16)
    other = torch.ones(5, 8, dtype=torch.bfloat16)
    assert casts(lambda: torch.cdist(x, other)) == [(5, 8), (4, 8)]  # in fp32 on a CPU, too
    with as_on_cuda():
        assert casts(lambda: F.layer_norm(x, (8,), weight, weight)) == [(8,), (8,), (4, 8)]
