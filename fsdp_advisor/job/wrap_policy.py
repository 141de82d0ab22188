"""The policy by which FSDP divides a model into units. Its text is `layer`, `none`, `size:N`, `class:A,B` or `every:N`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from fsdp_advisor.units import parse_count

WRAP_EXAMPLE = "layer, none, size:100M, class:LlamaDecoderLayer or every:2"
MAX_NUMBER = 10**15
_CLASSES = re.compile(r"[A-Za-z_]\w*(,[A-Za-z_]\w*)*", re.ASCII)


@dataclass(frozen=True, slots=True)
class WrapPolicy:
    """A wrap policy.

    `layer`: a unit per layer. `none`: one unit. `size`: `size_based_auto_wrap_policy` with `min_num_params=number`. `class`: a unit
    per layer of one of `classes` (`transformer_auto_wrap_policy`). `every`: a unit per `number` consecutive layers. `peft`: a unit per
    layer and per module without children whose weight is trained (PEFT's `fsdp_auto_wrap_policy`), which the Trainer sets. `lora`: a unit
    per layer, per matrix and magnitude of LoRA, and per embedding that has LoRA, which axolotl makes. Users cannot choose these two. The
    root is always a unit too.
    """

    kind: Literal["layer", "none", "size", "class", "every", "peft", "lora"]
    number: int = 0
    classes: tuple[str, ...] = ()

    def __str__(self) -> str:
        if self.kind == "class":
            return f"class:{','.join(self.classes)}"
        return f"{self.kind}:{self.number}" if self.number else self.kind


def wrap_policy(text: str) -> WrapPolicy | None:
    """Parse a wrap policy; None if the text is not one. Blanks and the case of the kind do not matter.

    >>> str(wrap_policy("size:1e8")), str(wrap_policy("every: 4")), wrap_policy("size:none")
    ('size:100000000', 'every:4', None)
    """
    kind, colon, value = text.replace(" ", "").partition(":")
    match kind.lower():
        case "layer" | "none" | "peft" | "lora" as named if not colon:
            return WrapPolicy(named)
        case "size" | "every" if (count := parse_count(value)) is not None and 1 <= count <= MAX_NUMBER:
            return WrapPolicy("size" if kind.lower() == "size" else "every", number=count)
        case "class" if _CLASSES.fullmatch(value):
            return WrapPolicy("class", classes=tuple(dict.fromkeys(value.split(","))))
        case _:
            return None


def read_wrap(text: str) -> str | None:
    """The canonical spelling of a policy's text; None if it is not a policy that users can choose."""
    policy = wrap_policy(text)
    return None if policy is None or policy.kind in ("peft", "lora") else str(policy)
