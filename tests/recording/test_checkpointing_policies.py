"""The policy of selective checkpointing, as different versions of PyTorch ask it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from fsdp_advisor.recording import checkpointing


def test_recomputation_that_asks_again_gets_the_same_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch 2.11 asks in forward and in the recomputation, whose products must not continue forward's turns: seven is odd."""
    policies: list[Any] = []

    def contexts(policy: Any) -> tuple[None, None]:
        policies.append(policy)
        return None, None

    monkeypatch.setattr(checkpointing, "create_selective_checkpoint_contexts", contexts)
    checkpointing.arguments("selective", "sdpa")["context_fn"]()
    (policy,) = policies
    product = torch.ops.aten.mm.default
    forward, again = ([policy(SimpleNamespace(is_recompute=r), product) for _ in range(7)] for r in (False, True))
    assert forward == again
    assert forward[0] != forward[1] == forward[3]
