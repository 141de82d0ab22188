"""The type of a GPU. The rows of the table are in `gpus`."""

from dataclasses import dataclass
from typing import Literal

from fsdp_advisor.hardware.links import Link

Architecture = Literal["turing", "volta", "ampere", "ada", "hopper", "blackwell", "cdna2", "cdna3", "cdna4"]

Runtime = Literal["cuda", "rocm", "hpu", "tpu", "neuron"]
"""What drives a device: NVIDIA's CUDA, AMD's ROCm, Intel's Gaudi software, PyTorch/XLA on a TPU, AWS Neuron."""

_H100_MULTIPROCESSORS = 132
_FP8_ARCHITECTURES = ("ada", "hopper", "blackwell", "cdna3", "cdna4")
_MAX_THREADS = 2048
_THREADS_BY_CAPABILITY = {(7, 5): 1024, (8, 6): 1536, (8, 7): 1536, (8, 9): 1536, (12, 0): 1536, (12, 1): 1536}
"""Resident threads per multiprocessor, by compute capability, where they are fewer than _MAX_THREADS.

Source: CUDA C++ Programming Guide, technical specifications.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One device as PyTorch counts devices (a MI250X board is two). None: unknown, or not supported by the hardware."""

    name: str
    full_name: str
    aliases: tuple[str, ...] = ()
    memory_bytes: int
    nominal_memory_bytes: int
    memory_source: str
    bf16_flops: float | None = None
    fp16_flops: float | None = None
    tf32_flops: float | None = None
    fp32_flops: float | None = None
    memory_bytes_per_s: float | None = None
    architecture: Architecture | None = None
    runtime: Runtime = "cuda"
    unified_memory: bool = False  # the GPU has no memory of its own: it uses the processor's
    compute_capability: tuple[int, int] | None = None
    multiprocessors: int | None = None  # streaming multiprocessors; compute units on AMD
    intra_node: Link | None = None
    inter_node: Link | None = None  # this GPU's share of the node's network adapters
    gpus_per_node: int | None = None  # in the node that node_source names
    node_source: str = ""  # begins with "assumed" if no vendor's or cloud's node is known
    host_memory_bytes: int | None = None  # of the node in node_source
    source: str

    @property
    def fp8_flops(self) -> float | None:
        """The datasheet's dense rate in fp8, which is twice that in bf16 on all GPUs that multiply in fp8; None on others.

        Sources, in TFLOP/s of bf16 and fp8 without sparsity: datasheets of NVIDIA's L4 (121, 242), L40S (362, 733), H100 SXM (989,
        1979), H200 (989, 1979) and B200 (2250, 4500), its Ada whitepaper, appendix A, with fp32 accumulation (RTX 4090: 165, 330),
        and datasheets of AMD's MI300X (1307, 2615) and MI355X (2500, 5000). Blackwell has this rate in MXFP8 too: NVIDIA/cutlass,
        media/docs/cpp/blackwell_functionality.md, mxf8f6f4.block_scale as f8f6f4, on boards of compute capability 10 and 12.
        """
        multiplies = self.architecture in _FP8_ARCHITECTURES
        return 2 * self.bf16_flops if multiplies and self.bf16_flops is not None else None

    @property
    def uses_torch_cuda(self) -> bool:
        """Whether PyTorch drives the device by `torch.cuda`, with its caching allocator. Of the others only tensors are modelled."""
        return self.runtime in ("cuda", "rocm")

    @property
    def is_memory_size(self) -> bool:
        """Whether a memory size was given instead of a name."""
        return self.gpus_per_node is None

    @property
    def lacks_bf16(self) -> bool:
        """Whether the GPU is known not to compute in bf16, as before Ampere."""
        return self.bf16_flops is None and self.architecture is not None

    @property
    def threads_per_multiprocessor(self) -> int:
        """The number of threads that one multiprocessor runs at once."""
        return _THREADS_BY_CAPABILITY.get(self.compute_capability or (0, 0), _MAX_THREADS)

    @property
    def resident_threads(self) -> int:
        """The number of threads that the GPU runs at once. If its multiprocessors are unknown, as many as an H100's are assumed."""
        return (self.multiprocessors or _H100_MULTIPROCESSORS) * self.threads_per_multiprocessor

    @property
    def node_is_assumed(self) -> bool:
        """Whether the table assumes the node, because no vendor's or cloud's node with this GPU is known."""
        return self.node_source.startswith("assumed")
