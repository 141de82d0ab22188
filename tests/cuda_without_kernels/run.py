"""Run Python with PyTorch's CUDA build on a machine without a GPU: `run.py --gpu H100-80GB -m fsdp_advisor ...`.

See README.md in this folder for the architecture and the limits.
"""

from __future__ import annotations

import argparse
import collections
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from fsdp_advisor.hardware.lookup import lookup

HERE = Path(__file__).parent
OWNERS = {
    "cudart": "cuda", "cuda": "cu", "cublas": "cublas", "cublasLt": "cublasLt", "cudnn": "cudnn", "cufft": "cufft", "curand": "curand",
    "cusolver": "cusolver", "cusparse": "cusparse", "cusparseLt": "cusparseLt", "cufile": "cuFile", "cupti": "cupti", "nvrtc": "nvrtc",
    "nccl": "nccl", "nvshmem_host": "nvshmem",
}  # fmt: skip
"""The prefix of each library's functions."""
WRITTEN = {"libcudart": "runtime.c", "libcuda": "driver.c"}
NVML = "libnvidia-ml.so.1"
INCLUDES = "#include <stdio.h>\n#include <stdlib.h>\n"
SHARED_KIB = {7: 96, 8: 163, 9: 227, 10: 227, 12: 99}
"""Largest shared memory of a block by compute capability (major). Source: CUDA C++ Programming Guide, technical specifications."""


def torch_folder() -> Path:
    """The folder of PyTorch's libraries. Exits without a CUDA build."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not (folder := Path(str(spec.origin)).parent / "lib" / "libtorch_cuda.so").exists():
        sys.exit("this Python has no CUDA build of PyTorch: pip install --no-deps torch from the default index")
    return folder.parent


def headers() -> Path:
    """The folder of CUDA's headers: in the packages nvidia-cuda-runtime and nvidia-cuda-crt, or in a toolkit."""
    found = [*Path(sys.prefix).glob("lib/python*/site-packages/nvidia/cu*/include"), Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "include")]  # fmt: skip
    for folder in found:
        if all((folder / name).exists() for name in ("cuda_runtime_api.h", "cuda.h", "crt/host_defines.h")):
            return folder
    sys.exit("no CUDA headers: pip install --no-deps nvidia-cuda-runtime nvidia-cuda-crt, or set CUDA_HOME")


def imported_symbols(torch_lib: Path) -> tuple[dict[str, set[str]], set[str], set[str]]:
    """The functions that PyTorch's libraries import, by symbol version; those without a version; and the libraries needed."""
    versioned: dict[str, set[str]] = collections.defaultdict(set)
    plain: set[str] = set()
    libraries: set[str] = set()
    for path in [*torch_lib.glob("*.so*"), *torch_lib.parent.glob("_C*.so")]:
        dynamic = subprocess.run(["readelf", "-d", path], capture_output=True, text=True, check=True).stdout
        libraries |= set(re.findall(r"NEEDED.*\[(lib(?:cu|nv|nccl)[^\]]+)\]", dynamic))
        names = subprocess.run(
            ["nm", "-D", "--undefined-only", path], capture_output=True, text=True, check=True
        ).stdout
        for line in names.splitlines():
            name, _, version = line.split()[-1].replace("@@", "@").partition("@")
            if version:
                versioned[version].add(name)
            else:
                plain.add(name)
    return versioned, plain, libraries


def stub(name: str) -> str:
    """A C function that returns success. Functions that create something also return a handle."""
    if re.search(r"Create|_init$|Init$", name) and not name.startswith("__"):
        return f"int {name}(void **handle) {{ *handle = calloc(1, 4096); return 0; }}"
    return f"int {name}(void) {{ return 0; }}"


def build(torch_lib: Path, into: Path) -> None:
    """Build every CUDA library that PyTorch needs, with every function that PyTorch imports."""
    versioned, plain, libraries = imported_symbols(torch_lib)
    text = (HERE / "libraries.c").read_text()
    sections = dict(re.findall(r"(?ms)^// library (\w+)\n(.*?)(?=^// library |\Z)", text))
    prefixes = {f"lib{name}": prefix for name, prefix in OWNERS.items()}
    for library in sorted(libraries):
        base = library.split(".so")[0]
        tag = next((v for v in versioned if v == library or (v == "NVSHMEM" and "nvshmem" in base)), None)
        own = (HERE / WRITTEN[base]).read_text() if base in WRITTEN else INCLUDES + sections.get(base, "")
        mine = prefixes[base]
        others = [p for p in prefixes.values() if len(p) > len(mine) and p.startswith(mine)]
        wanted = versioned.get(tag or "", set()) | {
            name for name in plain if name.startswith((mine, f"__{mine}")) and not name.startswith(tuple(others))
        }
        stubs = [stub(name) for name in sorted(wanted) if not re.search(rf"\b{name}\(", own)]
        sources, versions = [into / f"{base}.c", into / f"{base}-rest.c"], into / f"{base}.map"
        sources[0].write_text(own)
        sources[1].write_text(INCLUDES + "\n".join(stubs))
        versions.write_text(f"{tag or ''} {{ global: *; }};\n")
        compile_(sources, into / library, f"-Wl,--version-script={versions}", f"-I{headers()}")
    compile_([HERE / "nvml.c"], into / NVML)


def compile_(sources: list[Path], library: Path, *options: str) -> None:
    flags = ["-shared", "-fPIC", "-O1", "-w", f"-Wl,-soname,{library.name}", *options]
    subprocess.run(["gcc", *flags, "-o", library, *sources, "-ldl", "-lpthread"], check=True)


def environment(gpu_name: str, libraries: Path) -> dict[str, str]:
    """The environment in which Python sees a GPU of this name. STUB_ variables that are already set stay."""
    gpu = lookup(gpu_name)
    if gpu is None or gpu.compute_capability is None:
        sys.exit(f"{gpu_name} is not in the table of GPUs, or has no compute capability there")
    major, minor = gpu.compute_capability
    found = {
        "STUB_NAME": f"{gpu.name} without kernels",
        "STUB_TOTAL_BYTES": str(gpu.memory_bytes),
        "STUB_MAJOR": str(major),
        "STUB_MINOR": str(minor),
        "STUB_MULTIPROCESSORS": str(gpu.multiprocessors or 100),
        "STUB_THREADS": str(gpu.threads_per_multiprocessor),
        "STUB_SHARED_BYTES": str(SHARED_KIB[major] << 10),
        "CUDA_VISIBLE_DEVICES": ",".join(map(str, range(int(os.environ.get("STUB_DEVICES", "1"))))),
        "LD_LIBRARY_PATH": str(libraries),
        "LD_PRELOAD": ":".join(str(path) for path in sorted(libraries.glob("*.so.*"))),
        "PYTHONPATH": os.pathsep.join([str(HERE / "site"), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }
    return {**os.environ, **found, **{k: v for k, v in os.environ.items() if k.startswith("STUB_")}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, usage="run.py [--gpu NAME] PYTHON-ARGUMENTS...")
    parser.add_argument("--gpu", default="H100-80GB", help="a GPU of `fsdp-advisor gpus`")
    options, arguments = parser.parse_known_args()
    torch_lib = torch_folder()
    cached = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "fsdp-advisor" / "cuda-without-kernels"
    libraries = cached / importlib.metadata.version("torch")
    if not libraries.exists():
        with tempfile.TemporaryDirectory() as made:
            build(torch_lib, Path(made))
            shutil.copytree(made, libraries)
    os.execve(sys.executable, [sys.executable, *arguments], environment(options.gpu, libraries))


if __name__ == "__main__":
    main()
