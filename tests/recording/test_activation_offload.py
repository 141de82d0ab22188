"""TRL's offload of activations, as a recording runs it."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from fsdp_advisor.recording.host import offloading, watched_copies


def test_tensors_are_copied_to_the_host_also_if_they_have_the_address_of_a_freed_one() -> None:
    """A transposed weight is copied before it is offloaded, so its storage may be freed, and the next one's is at the same address."""
    copied: list[int] = []
    x = torch.ones(64, 16, requires_grad=True)
    products = []
    with offloading("trl", ()), watched_copies(copied.append):
        for _ in range(20):
            weight = torch.ones(16, 64).t()
            products.append(x * weight)
            del weight
    assert copied == [64 * 16 * 4] * 20
