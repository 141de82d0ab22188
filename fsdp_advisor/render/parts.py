"""The parts of a GPU's memory that every bar and table shows, with their colours and patterns."""

from __future__ import annotations

from dataclasses import dataclass

from fsdp_advisor.memory.device import NON_TENSOR_PARTS
from fsdp_advisor.program.accounts import GROUPS
from fsdp_advisor.strategy_estimate import StrategyEstimate


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPart:
    """Accounts that are shown as one part.

    `name` heads a column, `meaning` stands in legends. An SVG bar is drawn in `colour` with `weave`, a path within 8 x 8
    pixels, on top. A terminal draws it with `block` in `terminal_colour`, or with `letter` where only ASCII is possible.
    """

    key: str
    name: str
    meaning: str
    accounts: tuple[str, ...]
    colour: str
    weave: str = ""
    terminal_colour: str
    block: str
    letter: str

    def bytes_in(self, needed: dict[str, int]) -> int:
        """Bytes of this part: the sum of its accounts in `needed` (`StrategyEstimate.needed_breakdown`)."""
        return sum(needed.get(account, 0) for account in self.accounts)


STATES = MemoryPart(
    key="states",
    name="states at peak",
    meaning="states",
    accounts=GROUPS["states"],
    colour="#27507f",
    terminal_colour="blue",
    block="█",
    letter="S",
)
GATHERED = MemoryPart(
    key="gathered",
    name="gathered",
    meaning="gathered units, communication",
    accounts=GROUPS["gathered"],
    colour="#5b9bc9",
    weave="M-2 2L2 -2M0 8L8 0M6 10L10 6",
    terminal_colour="magenta",
    block="▓",
    letter="G",
)
ACTIVATIONS = MemoryPart(
    key="activations",
    name="activations",
    meaning="activations",
    accounts=GROUPS["activations"],
    colour="#e3a52f",
    weave="M2 1.2v1.6M6 5.2v1.6",
    terminal_colour="cyan",
    block="▒",
    letter="A",
)
LOSS = MemoryPart(
    key="loss",
    name="loss",
    meaning="loss",
    accounts=GROUPS["loss"],
    colour="#c4502b",
    weave="M2 0V8M6 0V8",
    terminal_colour="yellow",
    block="░",
    letter="L",
)
OTHER = MemoryPart(
    key="other",
    name="other",
    meaning="temporaries, buffers",
    accounts=GROUPS["other"],
    colour="#6d7681",
    weave="M0 2H8M0 6H8",
    terminal_colour="white",
    block="▚",
    letter="O",
)
OVERHEAD = MemoryPart(
    key="overhead",
    name="overhead",
    meaning="libraries, fragmentation, CUDA, NCCL",
    accounts=tuple(NON_TENSOR_PARTS),
    colour="#c3c9d0",
    weave="M0 0L8 8M-2 6L2 10M6 -2L10 2",
    terminal_colour="bright_black",
    block="/",
    letter="C",
)

PARTS = (STATES, GATHERED, ACTIVATIONS, LOSS, OTHER, OVERHEAD)
"""The parts in stacking order. They sum to `needed_bytes`. Their colours can be told apart in every form of colour blindness."""

PartBytes = tuple[tuple[MemoryPart, int], ...]


def bar_parts(estimate: StrategyEstimate) -> PartBytes:
    """Bytes of every part of `needed_bytes`; only the states if the peak is unknown."""
    needed = estimate.needed_breakdown
    if needed is None:
        return ((STATES, estimate.kept_bytes),)
    return tuple((part, part.bytes_in(needed)) for part in PARTS)
