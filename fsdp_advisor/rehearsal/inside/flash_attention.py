"""Provides flash-attn if it is not installed, and its CUDA extension if that cannot be loaded.

The extension needs CUDA's compiler or a wheel for the same PyTorch. `stand_ins/flash_attn_2_cuda.py` makes the same allocations;
`stand_ins/flash_attn` has the functions of attention. An installed package is used unchanged.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

STAND_INS = Path(__file__).with_name("stand_ins")
PACKAGE, EXTENSION = "flash_attn", "flash_attn_2_cuda"
VERSION = "2.8.3"
"""The release of flash-attn whose allocations are reproduced."""


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the two modules and the package's metadata if no other finder does."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name == EXTENSION:
            return importlib.util.spec_from_file_location(name, STAND_INS / f"{EXTENSION}.py")
        if name == PACKAGE:
            folder = STAND_INS / PACKAGE
            return importlib.util.spec_from_file_location(
                name, folder / "__init__.py", submodule_search_locations=[str(folder)]
            )
        return None

    def find_distributions(self, context: Any = None) -> Iterator[Any]:
        """The metadata of the package, unless it is installed. `context`: of importlib.metadata."""
        wanted = getattr(context, "name", None)
        if wanted not in (None, PACKAGE, "flash-attn") or importlib.machinery.PathFinder.find_spec(PACKAGE):
            return
        from importlib.metadata import Distribution

        class Provided(Distribution):
            def read_text(self, filename: str) -> str | None:
                files = {
                    "METADATA": f"Metadata-Version: 2.1\nName: flash_attn\nVersion: {VERSION}\n",
                    "top_level.txt": f"{PACKAGE}\n{EXTENSION}\n",
                }
                return files.get(filename)

            def locate_file(self, path: Any) -> Any:
                return STAND_INS / path

        yield Provided()


class _ExtensionFinder(importlib.abc.MetaPathFinder):
    """Finds the installed extension if it can be loaded; else finds nothing, so that `_Finder` provides it."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != EXTENSION:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        try:
            if spec is not None:
                importlib.util.module_from_spec(spec)
        except ImportError as error:
            print(
                f"note: flash-attn's extension cannot be loaded ({error}); its allocations are simulated",
                file=sys.stderr,
            )
            return importlib.util.spec_from_file_location(name, STAND_INS / f"{EXTENSION}.py")
        return spec


def provide_flash_attention() -> None:
    """Make flash_attn importable. `REHEARSAL_FLASH_ATTENTION=0` leaves the environment as it is."""
    if os.environ.get("REHEARSAL_FLASH_ATTENTION") != "0":
        sys.meta_path.insert(0, _ExtensionFinder())
        sys.meta_path.append(_Finder())
