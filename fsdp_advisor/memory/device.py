"""GPU memory outside PyTorch's segments: the CUDA context, loaded kernels and NCCL's buffers.

The limit is `Gpu.memory_bytes`, the total of `torch.cuda.mem_get_info`. It excludes the driver's own share (firmware, page
tables, ECC), and so does nvidia-smi's "used". It includes the context of the training process and everything counted here. Not
counted: other processes (a desktop, a second job).

Every part is a range. Its ends are published readings, sizes from NCCL's source, or readings of this project on an H200 (torch 2.11.0,
CUDA 13.0, NCCL 2.28.9, driver 580.159), each with its source.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from fsdp_advisor.errors import assert_never
from fsdp_advisor.hardware.gpu import Gpu
from fsdp_advisor.job.generation import Generation
from fsdp_advisor.job.plan import Plan

_MIB = 2**20

# CUDA

CONTEXT_BYTES_PER_MULTIPROCESSOR = (3 * _MIB, 14 * _MIB // 3)
"""Bytes of a context without kernels. It grows with the number of multiprocessors, because it holds local memory for each.

Source: 256 MiB on an RTX 3090 with 82 (torch 2.7, driver 610; invoke-ai/InvokeAI#9413), 320 MiB on a Titan V with 80
(pytorch/pytorch#28394); 300 to 400 MiB "if lazy module loading is enabled" (pytorch/pytorch#107667, #109888). The H200 has 132: 616 MiB
with the kernel that fills a tensor.
"""
CONTEXT_BYTES_UNKNOWN_GPU = (120 * _MIB, 720 * _MIB)
"""Bytes of a context on a GPU of which only the memory size is given: 40 (T4) to 160 multiprocessors are assumed."""
LAZY_KERNEL_BYTES = (128 * _MIB, 256 * _MIB)
"""Kernels that training loads on first use (of PyTorch, cuBLAS, cuDNN and attention).

On the H200, 46 jobs loaded 135 to 233 MiB: the first product 66 MiB, attention 16 MiB, the rest operator by operator.
Lazy loading is the default since CUDA 12.2 on Linux. NVIDIA: an application calls perhaps 5 % of the tens of thousands of
kernels in cuBLAS or cuDNN (forums.developer.nvidia.com/t/261135). The upper end is a quarter of the upper end of EAGER_KERNEL_BYTES.
"""
EAGER_KERNEL_BYTES = (640 * _MIB, 1024 * _MIB)
"""All of PyTorch's kernels, loaded at the start (CUDA before 11.7, or CUDA_MODULE_LOADING=EAGER).

Source: 1008 MiB with PyTorch, 320 MiB without, on a Titan V (pytorch/pytorch#28394); 1343 MiB in all on a V100
(transformers, docs/source/en/perf_train_gpu_one.mdx, 2022).
"""

# NCCL

BUFFER_BYTES = {"LL": 8 * 512 * 8 * 16, "LL128": 120 * 640 * 8 * 8, "Simple": 4 * _MIB}
"""Bytes of buffers per channel and connection. Source: NCCL 2.30 src/init.cc, DEFAULT_LL_BUFFSIZE, DEFAULT_LL128_BUFFSIZE,
DEFAULT_BUFFSIZE.
"""
IPC_BYTES = 2 * _MIB
"""Source: NCCL 2.30 src/include/comm.h, CUDA_IPC_MIN: each shareable buffer is rounded up to a multiple of it."""
CHANNEL_BYTES = 3 * IPC_BYTES
"""A channel's own tables: three allocations of a few bytes, each of which takes IPC_BYTES. On the H200 a communicator of one rank has 64
channels and no buffers, and takes 388 MiB. Source: NCCL 2.28 src/channel.cc, initChannel, as NCCL_DEBUG_SUBSYS=ALLOC shows.
"""
SINGLE_RANK_CHANNELS = 64
"""Channels of a communicator of one rank on Hopper; at most as many are assumed on other boards."""
CONTROL_BYTES = 4096
"""A connection's ncclSendMem or ncclRecvMem. Source: NCCL 2.30 src/include/comm.h, MEM_ALIGN."""


def connection_bytes() -> int:
    """Bytes of a channel's buffers for one neighbour in each direction: the receive buffers, and the sender's control page.

    NCCL_DEBUG_SUBSYS=ALLOC shows the two as 10485760 and 2097152 on an H100 (NVIDIA/nccl#1685). Where GPUs read from each
    other (A100) the Simple buffer moves to the sender: 6 MiB and 6 MiB, the same sum.
    Source: NCCL 2.30 src/transport/p2p.cc, p2pSendSetup, p2pRecvSetup.

    >>> connection_bytes() / 2**20
    12.0
    """
    receive = -(-(CONTROL_BYTES + sum(BUFFER_BYTES.values())) // IPC_BYTES) * IPC_BYTES
    return receive + IPC_BYTES


NETWORK_CONNECTION_BYTES = 2 * 10 * _MIB
"""Bytes of a connection across nodes: both ends keep all three buffers (on the GPU with GPUDirect RDMA).

Source: NCCL 2.30 src/transport/net.cc, sendProxyConnect, recvProxyConnect.
"""
NVLINK_CHANNELS = {"volta": (6, 12), "ampere": (8, 24), "hopper": (16, 32), "blackwell": (16, 32)}
"""Channels of a communicator over NVLink. Source: logs in NVIDIA/nccl#713 (V100: 6 rings, doubled), NVIDIA/nccl-tests#100
(A100: 24), NVIDIA/nccl#892 (H800: 16), #1685 (H100: 32).
"""
PCIE_CHANNELS = (0, 4)
"""Channels with buffers on the GPU; none if the ranks communicate through host memory. Source: NVIDIA/nccl#1358 (1 channel,
doubled).
"""
NVLS_BYTES = (0, 16 * 2 * 8 * _MIB)
"""Buffers of NVLink SHARP on Hopper and later: 16 channels, 8 heads, 8 steps of 128 KiB, both directions.
Source: NCCL 2.30 src/transport/nvls.cc, NCCL_NVLS_CHUNKSIZE, ncclNvlsBufferSetup.
"""
NCCL_KERNEL_BYTES = (112 * _MIB, 170 * _MIB)
"""NCCL's own kernels. 170 MiB on the H200. Together with the 24 channels of a group of two A100, 112 MiB explain its observed 544 MB
(NVIDIA/nccl#964, which also names 688 MB for a larger group).
"""
RCCL_FIRST_BYTES = (512 * _MIB, 1280 * _MIB)
RCCL_FURTHER_BYTES = (512 * _MIB, 768 * _MIB)
"""Bytes of each further communicator on AMD, about 0.65 GiB. Context and first communicator take about 1 GiB
(Lumi-supercomputer/LUMI-AI-Guide#111).
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One use of memory outside PyTorch, as a range of bytes."""

    name: str
    low_bytes: int
    high_bytes: int


@dataclass(frozen=True)
class DeviceOverhead:
    """The memory that nvidia-smi shows in addition to PyTorch's reserved bytes."""

    parts: tuple[Part, ...]

    @property
    def low_bytes(self) -> int:
        return sum(part.low_bytes for part in self.parts)

    @property
    def high_bytes(self) -> int:
        return sum(part.high_bytes for part in self.parts)

    @property
    def middle_bytes(self) -> int:
        return (self.low_bytes + self.high_bytes) // 2

    @property
    def vllm_bytes(self) -> int:
        """The part of vLLM that runs on the same GPU."""
        return sum(part.low_bytes for part in self.parts if part.name == "vLLM")


def communicators(plan: Plan) -> tuple[int, int]:
    """The minimum and maximum number of NCCL communicators of a rank.

    DDP and FSDP over all ranks use the default group. A device mesh of two dimensions makes a group per dimension; a script that
    reduces a metric uses the default group too. DeepSpeed clones the world's group for data parallelism, and ZeRO-3 may make a
    third. A single GPU under DDP needs no process group; FSDP and DeepSpeed make one, whose communicator of one rank took 629 MiB with
    its kernels on an H100 (`tests/records/README.md`).
    Source: torch.distributed.device_mesh (torch 2.13), DeviceMesh._init_process_groups; deepspeed/utils/groups.py,
    _clone_world_group (0.19.8).
    """
    if plan.world_size == 1:
        return (0, 0) if plan.backend == "ddp" else (1, 1)
    if plan.strategy == "hsdp":
        return 2, 3
    if plan.backend == "deepspeed":
        return 1, 3 if plan.strategy == "zero3" else 2
    return 1, 1


def device_overhead(gpu: Gpu, plan: Plan, *, lazy_loading: bool = True) -> DeviceOverhead:
    """The memory of `gpu` outside PyTorch's segments while `plan` trains."""
    parts = _runtime(gpu, plan, lazy_loading)
    if plan.generation is not None and plan.generation.generator == "colocate" and not plan.generation.sleeps:
        parts.append(_part("vLLM", (vllm_bytes(gpu, plan.generation),) * 2))
    return DeviceOverhead(tuple(parts))


def _runtime(gpu: Gpu, plan: Plan, lazy_loading: bool) -> list[Part]:
    """The context, kernels and communicators."""
    match gpu.runtime:
        case "cuda":
            return _cuda(gpu, plan, lazy_loading)
        case "rocm":
            return _amd(plan)
        case "hpu" | "tpu" | "neuron":
            return []  # unknown; a note of the report says so
        case _:
            assert_never(gpu.runtime)


def _cuda(gpu: Gpu, plan: Plan, lazy_loading: bool) -> list[Part]:
    kernels = LAZY_KERNEL_BYTES if lazy_loading else EAGER_KERNEL_BYTES
    parts = [_part("CUDA context", _context(gpu)), _part("kernels", kernels)]
    fewest, most = communicators(plan)
    if most:
        one_low, one_high = communicator_range(gpu, plan.world_size, plan.nnodes)
        parts.append(_part("NCCL kernels", NCCL_KERNEL_BYTES))
        parts.append(_part("NCCL buffers", (fewest * one_low, most * one_high)))
    return parts


def vllm_bytes(gpu: Gpu, generation: Generation) -> int:
    """GPU bytes of colocated vLLM: weights, cache of keys and values, and its peak of activations.

    vLLM takes these in addition to the memory that is already in use. Source: vLLM v1/worker/utils.py, `request_memory`; gpu_worker.py,
    `determine_available_memory`.
    """
    return ceil(gpu.memory_bytes * generation.memory_utilization)


def context_range(gpu: Gpu) -> tuple[int, int]:
    """(minimum, maximum) bytes of the CUDA context and the kernels that training loads."""
    context = _context(gpu)
    return context[0] + LAZY_KERNEL_BYTES[0], context[1] + LAZY_KERNEL_BYTES[1]


def _context(gpu: Gpu) -> tuple[int, int]:
    if gpu.multiprocessors is None:
        return CONTEXT_BYTES_UNKNOWN_GPU
    low, high = CONTEXT_BYTES_PER_MULTIPROCESSOR
    return low * gpu.multiprocessors, high * gpu.multiprocessors


def communicator_range(gpu: Gpu, ranks: int, nnodes: int = 1) -> tuple[int, int]:
    """(minimum, maximum) bytes of one communicator of `ranks` ranks on `nnodes` nodes, on each GPU. The minimum is its channels and the
    buffers of rings; the maximum also has those of trees and NVLink SHARP. A communicator of one rank has channels without buffers.
    """
    if ranks == 1:
        most = SINGLE_RANK_CHANNELS * CHANNEL_BYTES
        return most if gpu.architecture == "hopper" else 0, most
    nvlink = gpu.intra_node is not None and gpu.intra_node.kind == "nvlink"
    channels = NVLINK_CHANNELS.get(gpu.architecture or "", PCIE_CHANNELS) if nvlink else PCIE_CHANNELS
    if gpu.intra_node is None:
        channels = (0, NVLINK_CHANNELS["hopper"][1])  # a GPU of which only the memory size is given
    one = connection_bytes()
    low, high = channels[0] * one, channels[1] * one * (1 if ranks == 2 else 2)
    if nnodes > 1:
        high = 2 * channels[1] * NETWORK_CONNECTION_BYTES
    low, high = low + channels[0] * CHANNEL_BYTES, high + channels[1] * CHANNEL_BYTES
    if gpu.architecture in ("hopper", "blackwell", None) and ranks // nnodes > 2:
        low, high = low + NVLS_BYTES[0], high + NVLS_BYTES[1]
    return low, high


def _amd(plan: Plan) -> list[Part]:
    fewest, most = communicators(plan)
    further = (max(0, fewest - 1) * RCCL_FURTHER_BYTES[0], max(0, most - 1) * RCCL_FURTHER_BYTES[1])
    first = RCCL_FIRST_BYTES if most else (RCCL_FIRST_BYTES[0] // 2, RCCL_FIRST_BYTES[1] // 2)
    return [_part("HIP context and RCCL", first), _part("further RCCL communicators", further)]


def _part(name: str, ends: tuple[int, int]) -> Part:
    return Part(name=name, low_bytes=ends[0], high_bytes=ends[1])


NON_TENSOR_PARTS = {
    "libraries": "cuBLAS workspaces, kernels' workspace, rounding to blocks",
    "fragmentation": "reserved by the caching allocator, in no tensor",
    "cuda_and_nccl": "CUDA context, kernels, NCCL's buffers",
    "vllm": "vLLM on the same GPU",
    "evaluation": "what evaluation needs beyond the step",
    "loading_or_saving": "what loading or saving needs beyond the step",
}
"""The parts of `needed_bytes` that are not tensors of the step."""
