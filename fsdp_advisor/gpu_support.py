"""Which software runs on a GPU: what a request needs, and the backends of its plans."""

from __future__ import annotations

from typing import NamedTuple

from fsdp_advisor.errors import UsageError
from fsdp_advisor.hardware import Gpu
from fsdp_advisor.hardware.gpu import Runtime
from fsdp_advisor.job.fp8 import FP8_FROM, check_capability
from fsdp_advisor.job.optimizers import uses_bitsandbytes
from fsdp_advisor.job.plan import Plan
from fsdp_advisor.job.request import EstimateRequest
from fsdp_advisor.model.gpu_tape_key import FLASH_FROM

_BACKEND_RUNTIMES: dict[str, tuple[Runtime, ...]] = {"deepspeed": ("cuda", "rocm", "hpu")}
"""The runtimes of a backend that does not run on all. Source: deepspeed 0.19.8, accelerator/real_accelerator.py,
SUPPORTED_ACCELERATOR_LIST.
"""


class _Software(NamedTuple):
    """Software that a request may need. `runtimes`: those besides CUDA and ROCm on which it runs."""

    name: str
    is_needed: bool
    hint: str
    runtimes: tuple[Runtime, ...] = ()


def check_gpu(request: EstimateRequest, gpu: Gpu) -> None:
    """Raises UsageError if the GPU lacks software that the request needs, or shares the host's memory and the request offloads to it."""
    if request.attention == "flash_attention_2" and request.precision == "fp32":
        raise UsageError(
            "flash_attention_2 computes only in bf16 and fp16, not in fp32",
            hint="use --attention sdpa, or --precision bf16-mixed",
        )
    if not gpu.uses_torch_cuda:
        _check_runtime(request, gpu)
    if gpu.compute_capability is not None:
        _check_capability(request, gpu.name, gpu.compute_capability)
    if gpu.unified_memory:
        _check_nothing_is_offloaded(request, gpu)


def backend_refusal(plan: Plan, gpu: Gpu) -> UsageError | None:
    """Why the plan's backend does not run on the GPU; None if it does."""
    if gpu.runtime in _BACKEND_RUNTIMES.get(plan.backend, (gpu.runtime,)):
        return None
    return UsageError(
        f"backend {plan.backend} does not run on {gpu.name}", hint="use --backend fsdp2, or another --gpu"
    )


def support_notes(request: EstimateRequest, gpu: Gpu) -> list[str]:
    """A note on software that needs a compute capability, which is unknown for this GPU."""
    if request.optim == "adamw_torch_fp8" and gpu.compute_capability is None:
        return ["torchao's fp8 AdamW needs a GPU of compute capability 8.9 or higher (Ada, Hopper, Blackwell)"]
    return []


def _check_capability(request: EstimateRequest, gpu: str, able: tuple[int, int]) -> None:
    """Raises UsageError if kernels that the request needs exist only from a higher compute capability on.

    Sources: flash-attn 2.8, README, and its checks in csrc/flash_attn/flash_api.cpp: Ampere or newer, in half precision. torchao 0.18,
    optim/subclass_fp8.py, `quantize_fp8`, which is compiled: Triton 3.7 has no float8_e4m3fn below 8.9 (backends/nvidia/compiler.py,
    `supported_fp8_dtypes`), and Inductor (torch 2.13) replaces it only in what a kernel reads (codegen/triton_utils.py,
    `use_uint8_triton_storage_for_cuda_float8_e4m3fn`). With an offload the optimizer steps on the CPU.
    """
    if request.attention == "flash_attention_2" and able < FLASH_FROM:
        raise UsageError(
            f"flash-attn has no kernels for {gpu}",
            hint="use --attention sdpa, or --gpu with a GPU of the Ampere generation or later",
        )
    if request.compile != "none" and able < FLASH_FROM:
        raise UsageError(
            f"compiled layers are not modelled on {gpu}",
            hint="leave --compile out, or use --gpu with a GPU of the Ampere generation or later",
        )
    if request.optim == "adamw_torch_fp8" and request.offload == "none" and able < FP8_FROM:
        raise UsageError(
            f"torchao's fp8 AdamW does not run on {gpu}: its kernels need compute capability 8.9",
            hint="use --optim adamw_torch_8bit, whose states are as small, or --gpu with a GPU of the Ada or Hopper generation or later",
        )
    check_capability(request.fp8, gpu, able)


def _check_runtime(request: EstimateRequest, gpu: Gpu) -> None:
    """Raises UsageError if the request needs software that does not run on a device that `torch.cuda` does not drive.

    Sources: transformers 5.23, utils/import_utils.py, `is_flash_attn_2_available`. bitsandbytes 0.50.2, `supported_torch_devices` and
    README, "Accelerator support": on Gaudi its 8-bit optimizers are not supported, and it dequantizes only nf4 (backends/hpu/ops.py);
    paged states are in CUDA's managed memory. liger-kernel 0.8.5, utils.py, `infer_device`; its kernels and those of Cut Cross Entropy
    are Triton's. torch 2.13, aten/src/ATen/native/cuda/ScaledBlas.cpp and c10/cuda/CUDACachingAllocator.cpp.
    """
    optim, loss = request.optim, request.loss
    in_32_bits = not (optim.endswith("8bit") or optim.startswith("paged_"))
    needed = (
        _Software("flash-attn", request.attention == "flash_attention_2", "use --attention sdpa"),
        _Software(
            f"bitsandbytes' {optim}",
            uses_bitsandbytes(optim),
            "use --optim adamw_torch or adafactor",
            ("hpu",) if in_32_bits else (),
        ),
        _Software("bitsandbytes", request.load_in_4bit or request.load_in_8bit, "leave --load-in-4bit and --load-in-8bit out", ("hpu",)),
        _Software(
            "bitsandbytes' fp4",
            request.load_in_4bit and request.bnb_4bit_quant_type == "fp4",
            "use --bnb-4bit-quant-type nf4",
        ),
        _Software("Liger", request.use_liger_kernel or loss == "liger", "leave --use-liger-kernel and --loss liger out"),
        _Software("Cut Cross Entropy", loss == "cce", "use --loss full or chunked"),
        _Software("fp8 by torchao", request.fp8 != "none", "leave --fp8 out"),
        _Software("a CUDA graph", request.cuda_graphs, "leave --cuda-graphs out"),
        _Software("CUDA's caching allocator", request.allocator_conf is not None, "leave --allocator-conf out"),
    )  # fmt: skip
    for software in needed:
        if software.is_needed and gpu.runtime not in software.runtimes:
            raise UsageError(
                f"{software.name} does not run on {gpu.name}", hint=f"{software.hint}, or use another --gpu"
            )


def _check_nothing_is_offloaded(request: EstimateRequest, gpu: Gpu) -> None:
    """Raises UsageError if the request moves anything to the host, whose memory is the GPU's own."""
    shares = f"{gpu.name} shares its memory with the processor"
    if request.offload != "none" or request.activation_offload:
        option = "--offload" if request.offload != "none" else "--activation-offload"
        raise UsageError(f"{shares}: offloading to the host saves nothing", hint=f"leave {option} out")
    if request.optim.startswith("paged_"):
        raise UsageError(
            f"{shares}: a paged optimizer saves nothing",
            hint="use one that is not paged, such as --optim adamw_bnb_8bit",
        )
