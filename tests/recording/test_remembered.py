"""Operators that are remembered return what PyTorch's fake tensors return."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp_advisor.recording.remembered import Operators
from fsdp_advisor.recording.storages import StorageWatch


def facts(tensor: Any) -> tuple[object, ...]:
    storage = tensor.untyped_storage()
    return tuple(tensor.shape), tensor.stride(), tensor.storage_offset(), tensor.dtype, tensor.device, storage.nbytes()


def some_operators() -> list[Any]:
    """Results of operators of every kind: new storages, views, in place, several results, and none of these."""
    x, y = torch.empty(4, 6), torch.empty(6, 3, dtype=torch.bfloat16)
    view = x.t()[1:3]
    sums = torch.empty(4, 6)
    sums += x
    values, indices = x.max(dim=1)
    rows = x[torch.zeros(2, dtype=torch.long)]
    return [
        x @ y.float(),
        view,
        view.contiguous(),
        sums,
        values,
        indices,
        rows,
        x.to(torch.bfloat16),
        *x.split(2),
        x * 2,
        x[1].t(),
        x[-2].t(),
        x.select(1, 5),
        x[2:].as_strided((2,), (6,)),
        x[3:].as_strided((2,), (6,)),
        torch.ops.aten.select_backward(x[0], (4, 6), 0, 3),
    ]


def test_a_remembered_operator_returns_the_same_shapes_and_storages() -> None:
    operators = Operators()

    def call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return operators.call(func, args, kwargs)[0]

    with FakeTensorMode():
        plain = some_operators()
        with StorageWatch(lambda *_: None, call=call):
            first, again = some_operators(), some_operators()
    expected = [facts(tensor) for tensor in plain]
    assert [facts(tensor) for tensor in first] == expected
    assert [facts(tensor) for tensor in again] == expected
    for made in (plain, first, again):  # the parts of a split are views of one storage
        assert len({part.untyped_storage()._cdata for part in made[8:10]}) == 1


def test_work_depends_on_which_arguments_are_one_tensor() -> None:
    operators = Operators()
    with FakeTensorMode():
        x, y = torch.empty(8, 8), torch.empty(8, 8)
        add = torch.ops.aten.add.Tensor
        for _ in range(2):
            assert operators.call(add, (x, y), {})[1].traffic_bytes == 3 * 256
            assert operators.call(add, (x, x), {})[1].traffic_bytes == 2 * 256


def test_the_dtype_of_a_number_is_part_of_a_call() -> None:
    operators = Operators()
    with FakeTensorMode():
        x = torch.empty(2, dtype=torch.long)
        multiply = torch.ops.aten.mul.Tensor
        assert operators.call(multiply, (x, 2), {})[0].dtype == torch.long
        assert operators.call(multiply, (x, 2.0), {})[0].dtype == torch.float32


def test_views_at_other_places_of_a_storage_are_remembered_as_one_call() -> None:
    operators = Operators()
    asked: list[Any] = []

    class Asked(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            asked.append(func)
            return func(*args, **(kwargs or {}))

    with FakeTensorMode():
        weights, x = torch.empty(8, 4, 4), torch.empty(2, 4)
        with Asked():
            for expert in range(8):
                weight = operators.call(torch.ops.aten.select.int, (weights, 0, expert), {})[0]
                assert weight.storage_offset() == expert * 16
                transposed = operators.call(torch.ops.aten.t.default, (weight,), {})[0]
                assert (transposed.storage_offset(), transposed.stride()) == (expert * 16, (1, 4))
                operators.call(torch.ops.aten.mm.default, (x, transposed), {})
    assert asked.count(torch.ops.aten.mm.default) == 1 and torch.ops.aten.select.int not in asked


def test_results_that_depend_on_values_are_not_remembered() -> None:
    operators = Operators()
    with FakeTensorMode():
        x, mask = torch.empty(4, 4), torch.empty(4, dtype=torch.bool)
        with pytest.raises(DynamicOutputShapeException):
            operators.call(torch.ops.aten.index.Tensor, (x, [mask]), {})
        assert operators.call(torch.ops.aten.index.Tensor, (x, [torch.empty(3, dtype=torch.long)]), {})[0].shape == (
            3,
            4,
        )
