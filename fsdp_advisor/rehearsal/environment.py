"""The environment variables in which a command sees simulated GPUs. `native/*.c` and `inside` read them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fsdp_advisor.errors import RehearsalError
from fsdp_advisor.hardware.gpu import Gpu
from fsdp_advisor.memory.device import NCCL_KERNEL_BYTES, communicator_range, context_range
from fsdp_advisor.rehearsal.build import find_installation, libraries_for

SITE = Path(__file__).parent / "inside" / "site"
"""The first folder of a rehearsed process's module path. Its sitecustomize.py runs before the script."""
MOST_GPUS = 16
"""GPUs of a node. Source: MOST_DEVICES in native/runtime.c."""
_SHARED_KIB = {7: 96, 8: 163, 9: 227, 10: 227, 12: 99}
"""Largest shared memory of a block by compute capability (major). Source: CUDA C++ Programming Guide, technical specifications."""
_UNKNOWN_MULTIPROCESSORS = 100


def machine_of(gpu: Gpu, gpus_per_node: int, nnodes: int = 1) -> Machine:
    """The simulated machine with the memory that `memory.device` expects CUDA and NCCL to take: the middle of its ranges."""
    return Machine(
        gpu=gpu,
        gpus_per_node=gpus_per_node,
        context_bytes=sum(context_range(gpu)) // 2,
        nccl_bytes=sum(NCCL_KERNEL_BYTES) // 2,
        communicator_bytes=sum(communicator_range(gpu, gpus_per_node * nnodes, nnodes)) // 2,
    )


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The simulated machine: its GPUs, and the memory of each that CUDA and its libraries take."""

    gpu: Gpu
    gpus_per_node: int
    context_bytes: int
    nccl_bytes: int = 0
    """Memory of NCCL's kernels, which the first communicator of more than one rank loads."""
    communicator_bytes: int = 0
    """Memory of each NCCL communicator of more than one rank."""

    def __post_init__(self) -> None:
        if self.gpu.compute_capability is None or self.gpu.runtime != "cuda":
            raise RehearsalError(
                f"{self.gpu.name} is not an NVIDIA GPU of the table", hint="`fsdp-advisor gpus` lists the GPUs"
            )
        if not 1 <= self.gpus_per_node <= MOST_GPUS:
            raise RehearsalError(
                f"a node has 1 to {MOST_GPUS} GPUs, not {self.gpus_per_node}", hint="--nnodes gives the number of nodes"
            )

    def variables(self) -> dict[str, str]:
        """The environment variables that describe this machine to the compiled libraries."""
        assert self.gpu.compute_capability is not None
        major, minor = self.gpu.compute_capability
        return {
            "REHEARSAL_NAME": self.gpu.full_name,
            "REHEARSAL_DEVICES": str(self.gpus_per_node),
            "REHEARSAL_TOTAL_BYTES": str(self.gpu.memory_bytes),
            "REHEARSAL_CONTEXT_BYTES": str(self.context_bytes),
            "REHEARSAL_NCCL_BYTES": str(self.nccl_bytes),
            "REHEARSAL_COMMUNICATOR_BYTES": str(self.communicator_bytes),
            "REHEARSAL_MAJOR": str(major),
            "REHEARSAL_MINOR": str(minor),
            "REHEARSAL_MULTIPROCESSORS": str(self.gpu.multiprocessors or _UNKNOWN_MULTIPROCESSORS),
            "REHEARSAL_THREADS": str(self.gpu.threads_per_multiprocessor),
            "REHEARSAL_SHARED_BYTES": str(_SHARED_KIB[major] << 10),
        }


def environment(
    python: Path, gpu: Gpu, gpus_per_node: int, nnodes: int = 1, outside: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """The environment in which a command that runs on this interpreter sees simulated GPUs.

    `outside` is the environment of the caller. A REHEARSAL_ variable that is already set there stays. Compiles the libraries on
    first use. torch.compile uses no cache: what it chose on a simulated GPU is not for a real one. Also, after a step whose code comes
    from the cache, inputs of the first step may stay in reference cycles until Python's next full garbage collection.

    Raises RehearsalError if the interpreter or the GPU cannot be simulated.
    """
    installation = find_installation(python)
    machine = machine_of(gpu, gpus_per_node, nnodes)
    libraries = libraries_for(installation)
    preload = sorted(str(path) for path in libraries.glob("*.so.*"))
    found = {
        **machine.variables(),
        "LD_LIBRARY_PATH": _path_list(str(libraries), outside.get("LD_LIBRARY_PATH")),
        "LD_PRELOAD": ":".join([*preload, *filter(None, [outside.get("LD_PRELOAD")])]),
        "PYTHONPATH": _path_list(str(SITE), outside.get("PYTHONPATH")),
        "TRITON_LIBCUDA_PATH": str(libraries),
        "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1",
    }
    kept = {name: value for name, value in outside.items() if name.startswith("REHEARSAL_")}
    hidden = {"CUDA_VISIBLE_DEVICES", "DS_ACCELERATOR"}  # variables about the real machine
    return {name: value for name, value in outside.items() if name not in hidden} | found | kept


def _path_list(first: str, rest: str | None) -> str:
    return os.pathsep.join([first, *filter(None, [rest])])
