"""How autograd sums gradients, which a dispatch mode changes."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402  # after the check for torch

from fsdp_advisor.tracing.storages import StorageWatch  # noqa: E402

ROWS, WIDTH, TOKENS = 1000, 32, 8
TABLE = 4 * ROWS * WIDTH


def backward(*, casts: bool, sums_in_place: bool) -> int:
    """How many whole tables are made in backward of an embedding that is the head too, whose weight is cast or not."""
    made = 0

    def resized(key: int, before: int, after: int, operator: str, args: object) -> None:
        nonlocal made
        made += after == TABLE

    with FakeTensorMode():
        embedding = torch.nn.Embedding(ROWS, WIDTH)
        hidden = torch.tanh(embedding(torch.zeros(1, TOKENS, dtype=torch.long)))
        weight = embedding.weight.bfloat16() if casts else embedding.weight
        loss = torch.nn.functional.linear(hidden.to(weight.dtype), weight).float().sum()
        watch = StorageWatch(resized)
        watch.sums_in_place = sums_in_place
        with watch:
            loss.backward()
    return made


def test_gradients_are_summed_into_the_first_where_nothing_else_holds_it() -> None:
    """The head's gradient, the embedding's, and their sum, as the allocator of a GPU counts them."""
    assert backward(casts=True, sums_in_place=True) == 2
    assert backward(casts=True, sums_in_place=False) == 3


def test_a_view_is_summed_apart() -> None:
    """Uncast, the head's gradient is a transposed view; what comes of it is copied once more, into the order of the weight."""
    assert backward(casts=False, sums_in_place=True) == backward(casts=False, sums_in_place=False) == 4


def test_what_python_adds_up_is_its_own() -> None:
    made = []
    with FakeTensorMode():
        tensor = torch.randn(ROWS, WIDTH)
        watch = StorageWatch(lambda key, before, after, operator, args: made.append(after) if after else None)
        watch.sums_in_place = True
        with watch, torch.no_grad():
            total = torch.sin(tensor) + torch.cos(tensor)
    assert made == [TABLE] * 3 and total.shape == tensor.shape
