"""Sets of transformers' model code in an order that is the same in every process.

The order of a set of strings depends on a random number of the process (PYTHONHASHSEED). Gemma 3 and a dozen other architectures make
the rotations of each kind of layers in such an order: `for layer_type in set(self.config.layer_types)`, transformers 5.23,
models/gemma3/modeling_gemma3.py. `create_masks_for_generate` in masking_utils.py makes their masks so, for Gemma 4 with images among
others. Without a fixed order two recordings of a step could differ in the order of storages.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock


class SortedSet(set[Any]):
    """A set that iterates in the order of its elements as text."""

    def __iter__(self) -> Iterator[Any]:
        return iter(sorted(super().__iter__(), key=str))


@contextlib.contextmanager
def sorted_sets() -> Iterator[None]:
    """Context in which the imported modules of transformers' models, and that of their masks, make sorted sets."""
    code = [
        module
        for name, module in list(sys.modules.items())
        if (name.startswith("transformers.models.") and ".modeling_" in name) or name == "transformers.masking_utils"
    ]
    with contextlib.ExitStack() as patches:
        for module in code:
            patches.enter_context(mock.patch.object(module, "set", SortedSet, create=True))
        yield
