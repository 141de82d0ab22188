"""What a bar is made of: the accounts of the live set, grouped as people think of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fsdp_advisor.memory.device import BESIDE
from fsdp_advisor.memory.ledger import GROUPS


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Accounts that are drawn as one. `weave` is a path within 8 x 8, drawn over the colour; `shade` names the colour."""

    key: str
    name: str
    accounts: tuple[str, ...]
    colour: str
    weave: str = ""
    shade: str = ""


PARTS = (
    Part(key="states", name="states", accounts=GROUPS["states"], colour="#27507f"),
    Part(
        key="gathered",
        name="gathered units, communication",
        accounts=GROUPS["gathered"],
        colour="#5b9bc9",
        weave="M-2 2L2 -2M0 8L8 0M6 10L10 6",
    ),
    Part(
        key="activations",
        name="activations",
        accounts=GROUPS["activations"],
        colour="#e3a52f",
        weave="M2 1.2v1.6M6 5.2v1.6",
    ),
    Part(key="loss", name="loss", accounts=GROUPS["loss"], colour="#c4502b", weave="M2 0V8M6 0V8"),
    Part(key="other", name="other", accounts=GROUPS["other"], colour="#6d7681", weave="M0 2H8M0 6H8"),
    Part(
        key="beside",
        name="fragmentation, libraries, CUDA, NCCL",
        accounts=tuple(BESIDE),
        colour="#c3c9d0",
        weave="M0 0L8 8M-2 6L2 10M6 -2L10 2",
    ),
)
"""They sum to what a GPU needs. The colours stay apart in every form of colour blindness."""


def part_bytes(needed: Mapping[str, int]) -> tuple[tuple[Part, int], ...]:
    """What a GPU needs by part, in the order they are stacked."""
    return tuple((part, sum(needed.get(account, 0) for account in part.accounts)) for part in PARTS)
