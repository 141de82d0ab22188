"""Builds flash-attn's C++ interface without its kernels: `python flash_attn_without_kernels.py SOURCE SITE_PACKAGES INCLUDE...`.

SOURCE is an unpacked source distribution of flash-attn 2, SITE_PACKAGES the environment of a rehearsal, INCLUDE the folders of CUDA's
headers (the packages nvidia-cuda-runtime, nvidia-cuda-crt and nvidia-cuda-cccl). The interface, csrc/flash_attn/flash_api.cpp, allocates
all memory; the kernels, which take hours to compile, would do nothing in a rehearsal. It takes a minute, without nvcc.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

HEAD_DIMENSIONS = (32, 64, 96, 128, 192, 256)
KERNELS = """
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <optional>
#include <vector>
#include <cuda_runtime_api.h>
#include <cutlass/numeric_types.h>
#include "namespace_config.h"
#include "flash.h"
namespace FLASH_NAMESPACE {
template <typename T, int D, bool C> void run_mha_fwd_(Flash_fwd_params &params, cudaStream_t stream) {}
template <typename T, int D, bool C> void run_mha_fwd_splitkv_dispatch(Flash_fwd_params &params, cudaStream_t stream) {}
template <typename T, int D, bool C> void run_mha_bwd_(Flash_bwd_params &params, cudaStream_t stream) {}
"""
INSTANCES = """
template void run_mha_fwd_<{kind}>(Flash_fwd_params &, cudaStream_t);
template void run_mha_fwd_splitkv_dispatch<{kind}>(Flash_fwd_params &, cudaStream_t);
template void run_mha_bwd_<{kind}>(Flash_bwd_params &, cudaStream_t);
"""


def kernels() -> str:
    """C++ that defines the functions that launch kernels. They do nothing."""
    kinds = [
        f"cutlass::{dtype}, {dimension}, {causal}"
        for dtype in ("half_t", "bfloat16_t")
        for dimension in HEAD_DIMENSIONS
        for causal in ("true", "false")
    ]
    return KERNELS + "".join(INSTANCES.format(kind=kind) for kind in kinds) + "}\n"


def main(source: Path, site_packages: Path, includes: list[str]) -> None:
    torch, csrc = site_packages / "torch", source / "csrc"
    folders = [
        csrc / "flash_attn", csrc / "flash_attn" / "src", csrc / "cutlass" / "include", torch / "include",
        torch / "include" / "torch" / "csrc" / "api" / "include", *includes, sysconfig.get_path("include"),
    ]  # fmt: skip
    shutil.copytree(source / "flash_attn", site_packages / "flash_attn", dirs_exist_ok=True)
    metadata = site_packages / f"{source.name}.dist-info" / "METADATA"
    metadata.parent.mkdir(exist_ok=True)
    shutil.copy(source / "PKG-INFO", metadata)
    with tempfile.NamedTemporaryFile("w", suffix=".cpp") as file:
        file.write(kernels())
        file.flush()
        subprocess.run(
            [
                "g++", "-shared", "-fPIC", "-O1", "-w", "-std=c++20", "-DTORCH_EXTENSION_NAME=flash_attn_2_cuda",
                *(f"-I{folder}" for folder in folders), csrc / "flash_attn" / "flash_api.cpp", file.name,
                "-o", site_packages / f"flash_attn_2_cuda{sysconfig.get_config_var('EXT_SUFFIX')}", f"-L{torch / 'lib'}",
                "-lc10", "-ltorch_cpu", "-lc10_cuda", "-ltorch_python",
            ],
            check=True,
        )  # fmt: skip


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
