"""Runs at the start of every Python process of a rehearsal, then runs the environment's own sitecustomize."""

import importlib
import importlib.machinery
import importlib.util
import sys
from pathlib import Path

HERE = Path(__file__).parent
PACKAGE = HERE.parents[2]


def provide_package() -> None:
    """Make `fsdp_advisor` importable in an environment where it is not installed, and only that package."""
    if importlib.util.find_spec(PACKAGE.name) is None:
        spec = importlib.util.spec_from_file_location(
            PACKAGE.name, PACKAGE / "__init__.py", submodule_search_locations=[str(PACKAGE)]
        )
        assert spec is not None and spec.loader is not None
        sys.modules[PACKAGE.name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)


def run_next_sitecustomize() -> None:
    """Run the sitecustomize that this one hides, if there is one."""
    path = [folder for folder in sys.path if Path(folder).resolve() != HERE.resolve()]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", path)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


provide_package()
importlib.import_module("fsdp_advisor.rehearsal.inside").start()
run_next_sitecustomize()
