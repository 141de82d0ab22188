"""Compile the libraries that replace CUDA's for one installed PyTorch."""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fsdp_advisor.errors import RehearsalError
from fsdp_advisor.model import cache

NATIVE = Path(__file__).parent / "native"
WRITTEN = {"libcudart": "runtime.c", "libcuda": "driver.c", "libnvidia-ml": "nvml.c", "libnccl": "nccl.c"}
"""The libraries with a C file of their own; those of `libraries.c` have a section."""
ALWAYS = ("libcuda.so.1", "libnvidia-ml.so.1")
"""Libraries that PyTorch and Triton load by name: no file lists them as needed."""
PREFIXES = {
    "libcudart": "cuda", "libcuda": "cu", "libcublas": "cublas", "libcublasLt": "cublasLt", "libcudnn": "cudnn",
    "libcufft": "cufft", "libcurand": "curand", "libcusolver": "cusolver", "libcusparse": "cusparse",
    "libcusparseLt": "cusparseLt", "libcufile": "cuFile", "libcupti": "cupti", "libnvrtc": "nvrtc",
    "libnvJitLink": "nvJitLink", "libnccl": "nccl", "libnvshmem_host": "nvshmem", "libnvidia-ml": "nvml",
}  # fmt: skip
"""The prefix of each library's functions."""
_WORKSPACE_ARGUMENTS = {
    "cusolverDngeqrf_bufferSize": (5,), "cusolverDngetrf_bufferSize": (5,), "cusolverDnpotrf_bufferSize": (5,),
    "cusolverDnsytrf_bufferSize": (4,), "cusolverDnorgqr_bufferSize": (7,), "cusolverDnungqr_bufferSize": (7,),
    "cusolverDnormqr_bufferSize": (11,), "cusolverDnunmqr_bufferSize": (11,), "cusolverDngesvd_bufferSize": (3,),
    "cusolverDngesvdj_bufferSize": (12,), "cusolverDngesvdjBatched_bufferSize": (11,),
    "cusolverDngesvdaStridedBatched_bufferSize": (16,), "cusolverDnsyevd_bufferSize": (7,),
    "cusolverDnheevd_bufferSize": (7,), "cusolverDnsyevjBatched_bufferSize": (7,),
    "cusolverDnheevjBatched_bufferSize": (7,), "cusolverDnXgeqrf_bufferSize": (10, 11),
    "cusolverDnXpotrf_bufferSize": (8, 9), "cusolverDnXsyevd_bufferSize": (11, 12),
    "cusolverDnXsyevBatched_bufferSize": (11, 12), "cusolverDnXgeev_bufferSize": (17, 18),
    "cusolverDnXsytrs_bufferSize": (11, 12), "cusparseSpMM_bufferSize": (10,), "cusparseSDDMM_bufferSize": (10,),
    "cusparseSpSM_bufferSize": (10,), "cusparseSpMV_bufferSize": (9,), "cusparseSpSV_bufferSize": (9,),
    "cufftXtMakePlanMany": (12,),
}  # fmt: skip
"""Name of a function that returns the size of a workspace (`..._bufferSize`), without the letter of the element type -> indices of the
arguments that point to sizes. Source: the manuals of cuSOLVER, cuSPARSE and cuFFT (CUDA 13).
"""
HEADERS = ("cuda_runtime_api.h", "cuda.h")
ARCHITECTURES = ("x86_64", "aarch64")
_QUERY = """
import importlib.util, json, os, sys
torch = importlib.util.find_spec("torch")
folders = [path for path in sys.path if os.path.basename(path) in ("site-packages", "dist-packages") and os.path.isdir(path)]
print(json.dumps([torch and torch.origin, folders]))
"""
"""The code that an interpreter runs to print the path of torch and the folders of installed packages."""
_INCLUDES = "#include <stdio.h>\n#include <stdlib.h>\n"


@dataclass(frozen=True)
class Installation:
    """The Python environment in which the script runs: its interpreter, the folder of its torch package, and the folders in which the
    interpreter searches for installed packages (several with --system-site-packages).
    """

    python: Path
    torch: Path
    folders: tuple[Path, ...] = ()

    def __post_init__(self) -> None:
        if self.torch.parent not in self.folders:
            object.__setattr__(self, "folders", (self.torch.parent, *self.folders))

    @property
    def torch_version(self) -> str:
        """The version in torch/version.py, such as 2.13.0+cu130."""
        found = re.search(r"__version__ = '([^']+)'", (self.torch / "version.py").read_text())
        return found[1] if found else "unknown"


@dataclass
class Imports:
    """The functions that the shared objects of an environment import from CUDA's libraries."""

    versioned: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    plain: set[str] = field(default_factory=set)
    libraries: set[str] = field(default_factory=lambda: set(ALWAYS))


def find_installation(python: Path) -> Installation:
    """The environment of an interpreter. Raises RehearsalError if it cannot rehearse: another system, or no CUDA build."""
    if sys.platform != "linux" or platform.machine() not in ARCHITECTURES:
        raise RehearsalError(
            f"rehearsals run on Linux on x86-64 or aarch64, not on {sys.platform} on {platform.machine()}",
            hint="use a Linux machine, a container or WSL; `estimate` works everywhere",
        )
    try:
        found = subprocess.run([python, "-c", _QUERY], capture_output=True, text=True, check=True, timeout=60).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise RehearsalError(f"{python} does not start: {error}", hint="activate the script's environment") from None
    origin, folders = json.loads(found.splitlines()[-1])
    torch = Path(origin).parent if origin else None
    if torch is None or not (torch / "lib" / "libtorch_cuda.so").exists():
        what = "no torch" if torch is None else "a build of torch without CUDA"
        raise RehearsalError(
            f"{python} has {what}; a rehearsal runs PyTorch's CUDA build",
            hint="install the CUDA build, which is pip's default on Linux (CUDA's own libraries are not needed): "
            "pip install --no-deps 'torch>=2.10' triton nvidia-cuda-runtime",
        )
    return Installation(Path(python), torch, tuple(map(Path, folders)))


def libraries_for(installation: Installation) -> Path:
    """The folder of the compiled libraries. They are built on first use and kept in the cache folder.

    They are built again when a package of the environment or the C code changes. That takes a few seconds.
    Raises RehearsalError without a C compiler, CUDA's headers or a cache folder.
    """
    cached = cache.folder()
    if cached is None:
        raise RehearsalError(
            "there is no home directory to cache libraries in", hint="set FSDP_ADVISOR_CACHE to a folder"
        )
    folder = cached / "rehearsal" / _key(installation)
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(dir=folder.parent))
        try:
            _build(installation, made)
            with suppress(OSError):  # another process was faster
                made.rename(folder)
        finally:
            shutil.rmtree(made, ignore_errors=True)
    return folder


def _key(installation: Installation) -> str:
    """A hash of everything that the compiled libraries depend on."""
    packages = sorted(path.name for folder in installation.folders for path in folder.glob("*.dist-info"))
    sources = [path.read_bytes() for path in sorted(NATIVE.rglob("*.[ch]"))]
    digest = hashlib.sha256(b"\0".join([*sources, *map(str.encode, packages), Path(__file__).read_bytes()]))
    return f"{installation.torch_version}-{platform.machine()}-{digest.hexdigest()[:12]}"


def _build(installation: Installation, into: Path) -> None:
    imports = _imports(installation.folders)
    headers = _headers(installation.folders)
    compiled = "".join(f"{number}," for number in _architectures(installation.torch))
    include = [f"-I{NATIVE}", f"-I{headers}", f"-DREHEARSAL_COMPILED={compiled}"]
    sections = dict(
        re.findall(r"(?ms)^// library (\w+)\n(.*?)(?=^// library |\Z)", (NATIVE / "libraries.c").read_text())
    )
    for library in sorted(imports.libraries):
        base = library.partition(".so")[0]
        if base not in PREFIXES:
            continue
        own = (NATIVE / WRITTEN[base]).read_text() if base in WRITTEN else _INCLUDES + sections.get(base, "")
        version = _symbol_version(library, imports)
        defined = set(re.findall(r"\b(\w+)\(", own))
        wanted = _wanted(base, version, imports)
        generated = [_stub(name) for name in sorted(wanted - defined)]
        if base == "libcudart":
            generated += [_refusal(name) for name in sorted(_runtime_functions(headers) - wanted - defined)]
        sources, script = [into / f"{base}.c", into / f"{base}-generated.c"], into / f"{base}.map"
        sources[0].write_text(own)
        sources[1].write_text(_INCLUDES + "\n".join(generated))
        script.write_text(f"{version} {{ global: *; }};\n")
        _compile(sources, into / library, f"-Wl,--version-script={script}", *include)
    (into / "libcuda.so").symlink_to("libcuda.so.1")  # Triton links its launchers with -lcuda


def _architectures(torch: Path) -> list[int]:
    """The architectures for which PyTorch's kernels are compiled, such as 86 for sm_86; empty if they are unknown.

    `torch.cuda.get_arch_list` returns the same text: "sm_75 sm_80 sm_86".
    """
    library = torch / "lib" / "libtorch_python.so"
    if not library.exists():
        return []
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        found = re.search(rb"\0(sm_\d+\w*(?: (?:sm|compute)_\d+\w*)*)\0", content)
        return [int(number) for number in re.findall(rb"sm_(\d+)", found[1])] if found else []


def _imports(folders: Sequence[Path]) -> Imports:
    """The imports of PyTorch and of every other package with libraries for the same CUDA version.

    A file for another version (bitsandbytes has one per version) is left out: two runtimes would count memory separately.
    """
    found = Imports()
    for path in _shared_objects(folders):
        needed, names = _dynamic_symbols(path)
        libraries = {name for name in needed if name.partition(".so")[0] in PREFIXES}
        known = {name.partition(".so")[0]: name for name in found.libraries}
        other_version = any(known.get(name.partition(".so")[0], name) != name for name in libraries)
        if other_version or (not libraries and path.parent.parent.name != "torch"):
            continue
        found.libraries |= libraries
        for name, version in names:
            if version:
                found.versioned[version].add(name)
            else:
                found.plain.add(name)
    return found


def _shared_objects(folders: Sequence[Path]) -> Iterator[Path]:
    """The shared objects of all packages except NVIDIA's, PyTorch's first. A package hides packages of the same name in later folders."""
    packages = {
        path.name: path for folder in reversed(folders) for path in folder.iterdir() if "nvidia" not in path.name
    }
    for _, package in sorted(packages.items(), key=lambda item: (item[0] != "torch", item[0])):
        files = package.rglob("*.so*") if package.is_dir() else [package] if ".so" in package.name else []
        yield from sorted(path for path in files if not path.is_symlink())


def _dynamic_symbols(path: Path) -> tuple[list[str], Iterator[tuple[str, str]]]:
    """The libraries that an ELF file needs, and its undefined symbols with their versions."""
    from elftools.common.exceptions import ELFError
    from elftools.elf.dynamic import DynamicSection
    from elftools.elf.elffile import ELFFile

    try:
        elf = ELFFile.load_from_path(str(path))
        dynamic = elf.get_section_by_name(".dynamic")
        tags = dynamic.iter_tags("DT_NEEDED") if isinstance(dynamic, DynamicSection) else ()
        needed = [str(tag.needed) for tag in tags]  # type: ignore[attr-defined]  # every DT_NEEDED tag has it
    except (ELFError, OSError):
        return [], iter(())
    return needed, _undefined(elf)


def _undefined(elf: Any) -> Iterator[tuple[str, str]]:
    symbols, numbers, names = (elf.get_section_by_name(name) for name in (".dynsym", ".gnu.version", ".gnu.version_r"))
    versions = {
        each["vna_other"]: each.name for _, each_of in (names.iter_versions() if names else ()) for each in each_of
    }
    for index, symbol in enumerate(symbols.iter_symbols()):
        if symbol["st_shndx"] == "SHN_UNDEF" and symbol.name:
            number = numbers.get_symbol(index)["ndx"] if numbers else 0
            yield symbol.name, versions.get(number, "")


def _symbol_version(library: str, imports: Imports) -> str:
    """The version of a library's symbols; empty if they have none. NVSHMEM's differs from the name of its file."""
    return next((v for v in imports.versioned if v == library or (v == "NVSHMEM" and "nvshmem" in library)), "")


def _wanted(base: str, version: str, imports: Imports) -> set[str]:
    """The functions of a library that at least one shared object imports."""
    prefix = PREFIXES[base]
    longer = tuple(other for other in PREFIXES.values() if other != prefix and other.startswith(prefix))
    plain = {name for name in imports.plain if name.startswith((prefix, f"__{prefix}"))}
    return imports.versioned.get(version, set()) | {name for name in plain if not (longer and name.startswith(longer))}


def _stub(name: str) -> str:
    """The C source of a function that returns success. Functions that create something also return a handle, and functions that return
    the size of a workspace return 0.
    """
    sizes = _WORKSPACE_ARGUMENTS.get(re.sub(r"(?<=cusolverDn)[SDCZ](?=[a-z])", "", name))
    if sizes is not None:
        kind = "int" if re.match(r"cusolverDn[SDCZ]", name) else "size_t"
        arguments = [f"{kind} *a{i}" if i in sizes else f"long a{i}" for i in range(max(sizes) + 1)]
        zeros = " ".join(f"*a{i} = 0;" for i in sizes)
        return f"int {name}({', '.join(arguments)}) {{ {zeros} return 0; }}"
    if re.search(r"Create|_init$|Init$", name) and not name.startswith("__"):
        return f"int {name}(void **handle) {{ *handle = calloc(1, 4096); return 0; }}"
    return f"int {name}(void) {{ return 0; }}"


def _runtime_functions(headers: Path) -> set[str]:
    """The functions of CUDA's runtime. All are needed, because libraries from outside the environment, such as kernels of the hub, can
    call any of them.
    """
    return set(re.findall(r"\bCUDARTAPI +(cuda\w+)\(", (headers / HEADERS[0]).read_text()))


def _refusal(name: str) -> str:
    return f'int {name}(void) {{ int rehearsal_refuse(const char *); return rehearsal_refuse("{name}"); }}'


def _headers(folders: Sequence[Path]) -> Path:
    """The folder of CUDA's headers: of the package nvidia-cuda-runtime, or of a toolkit."""
    packages = [
        path
        for folder in folders
        for path in (*folder.glob("nvidia/cu*/include"), folder / "nvidia/cuda_runtime/include")
    ]
    for folder in (*packages, Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "include")):
        if all((folder / name).exists() for name in HEADERS):
            return folder
    raise RehearsalError(
        f"CUDA's headers {' and '.join(HEADERS)} are missing",
        hint="pip install --no-deps nvidia-cuda-runtime (nvidia-cuda-runtime-cu12 for a torch built with CUDA 12)",
    )


def _compiler() -> list[str]:
    for name in (os.environ.get("CC", ""), "cc", "gcc", "clang"):
        if name and shutil.which(name):
            return [name]
    raise RehearsalError("no C compiler was found", hint="install gcc or clang, or set CC")


def _compile(sources: list[Path], library: Path, *options: str) -> None:
    command = [*_compiler(), "-shared", "-fPIC", "-O1", "-w", f"-Wl,-soname,{library.name}", *options]
    try:
        subprocess.run(
            [*command, "-o", library, *sources, "-ldl", "-lpthread", "-lrt", "-lm"],
            check=True, capture_output=True, text=True,
        )  # fmt: skip
    except subprocess.CalledProcessError as error:
        raise RehearsalError(
            f"{library.name} cannot be compiled: {error.stderr.strip()[-500:]}", hint="try another compiler with CC"
        ) from None
