"""The rates that hardware achieves, as shares of its datasheet's rates. This file contains every constant of the time model.

A constant is published (with its source), measured (`tests/records`), assumed, or chosen on the fitted part of the published training
runs (`tests/timing/published_split.py`). Each says which. A chosen constant has a physical meaning and can be measured separately.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from fsdp_advisor.hardware import Gpu
from fsdp_advisor.hardware.links import PCIE_3_X16, PCIE_4_X16, PCIE_5_X16, Link, LinkKind
from fsdp_advisor.job.choices import Attention
from fsdp_advisor.program.instructions import HostKernel

SMALL_HEAD = 0.88
"""Flash attention's rate with heads of 64 against 128. Source: FlashAttention-3, figure 5: 324 of 370 forward on H100; forward
and backward together 296 of 338 there and 176 of 203 on A100 (FlashAttention-2's benchmark figures, no mask, 16384 tokens).
"""

HALF_RATE_TOKENS = 256
"""The length at which flash attention reaches half of its rate: T / (T + 256). It models the blocks on the diagonal, which are
computed whole, and the start of the kernel. Source: FlashAttention-3, figure 5: FlashAttention-2, causal, head 128 on H100: 191,
260, 298, 319, 333, 335 TFLOP/s at 512 ... 16384 tokens. The model is within 18 % at 512 and within 4 % from 1024 on.
"""

PLAIN_MATMUL = 0.90
"""fp32 products without tensor cores, on NVIDIA. cuBLAS nearly reaches the peak of the boards that train in fp32. Source: V100
13.9 of 15.7 TFLOP/s at 4096 and 14.5 at 10240 (zzc0721/torch-performance-test-data issue 140), A100 18.9 of 19.5
(Yinghan-Li/YHs_Sample issue 4). Power limits later boards: 0.78 on H200 NVL (xzwgit/gpu-flops-bench), 45 to 50 of 91.1 at 2048 to 3444
on RTX 6000 Ada (chsasank/device-benchmarks issue 16).
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Achieved:
    """Shares of the datasheet's rates that a generation of GPUs sustains while it trains.

    `matmul`: large matrix products in a training loop, at the clocks under the power limit, not the best product of a
    benchmark. `plain_matmul`: the same in fp32 without tensor cores. `misaligned_matmul`: products in 16 bits with an odd dimension.
    `fp8_matmul`: products in fp8, relative to the share of those in 16 bits; `grouped_matmul`: the products of all experts together.
    `attention_forward`, `attention_backward`: flash attention with heads of 128 and long sequences; `small_head`: its rate with heads
    of 64, relative to these; `half_rate_forward`, `half_rate_backward`: the tokens at which it reaches half of its rate;
    `masked_forward`, `masked_backward`: its rate if sdpa gets a mask, relative to these.
    `memory`: a streaming kernel; `eager`: PyTorch's kernels of single operators; `update_16_bit`, `update_32_bit`: an optimizer's
    update of weights and states in 16 or 32 bits. A share that is None equals `memory`, or `matmul` for products.
    `seen`: whether there is a measured training run on such boards (`fsdp_advisor/validation/published.csv`, `tests/published`,
    `tests/records`).
    """

    matmul: float
    attention_forward: float
    attention_backward: float
    memory: float
    plain_matmul: float = PLAIN_MATMUL
    misaligned_matmul: float | None = None
    fp8_matmul: float = 1.0
    grouped_matmul: float = 1.0
    small_head: float = SMALL_HEAD
    half_rate_forward: int = HALF_RATE_TOKENS
    half_rate_backward: int = HALF_RATE_TOKENS
    masked_forward: float = 1.0
    masked_backward: float = 1.0
    eager: float | None = None
    update_16_bit: float | None = None
    update_32_bit: float | None = None
    seen: bool = False


# Matrix products: chosen on the fitted rows for Volta (bert-large in fp16) and Ampere (torchtitan on A100). Turing as Volta and Ada as
# Ampere: assumed. All are lower than the best result of a benchmark (A100 0.87, H100 0.80, B200 0.78: Bekman, Machine Learning
# Engineering, maximum achievable matmul FLOPS). Blackwell's data-centre boards: lower than theirs by as much as Hopper's, assumed; two
# published steps of eight B200s are then within 4 % (tests/published, p3002 and pt01). CDNA 3 and 4: the same table's benchmark results
# (MI300X 0.51, MI355X 0.68) times 0.54, which is chosen on torchtitan's run of Llama 3 8B in bf16 on eight MI300X with ROCm 6.4
# (tests/published, p1112). CDNA 2: assumed.
# Products in fp8: the same table's best results, relative to bf16: H100 0.709 to 0.803, H200 0.734 to 0.803; B200 0.763 to 0.776,
# B300 0.745 to 0.786, GB200 0.723 to 0.729. In MXFP8: as in fp8. CDNA 3: chosen on the same run with scales by row (p1115). The others:
# assumed to lose nothing. Casts to MXFP8 reach `memory`: 0.85 or more (pytorch/ao issue 3379).
# Attention: FlashAttention-2, which is PyTorch's flash kernel. Ampere: forward and backward together, causal, head 128 on
# A100: 99, 133, 155, 173, 182, 189 TFLOP/s at 512 ... 16384 tokens (flash2_a100_fwd_bwd_benchmark.png in Dao-AILab/flash-attention;
# arXiv:2307.08691, figure 4); the division between the two is assumed. With HALF_RATE_TOKENS the rates meet these within 10 % from 1024
# tokens on and are 23 % too fast at 512. Volta and Turing run xFormers' kernel, at the share
# of the peak that it has on A100 (0.24 to 0.31 for both together, first of the two figures): assumed. Ada as Ampere and CDNA: assumed.
# Blackwell's data-centre boards: sdpa runs cuDNN's kernels. Forward: FlashAttention-4's 1605 TFLOP/s on a B200 are 1.3 times cuDNN 9.13's
# (together.ai/blog/flashattention-4). With heads of 64, causal, cuDNN reaches 627, 826, 977, 1071 and 1115 of 2500 TFLOP/s at 1024 ...
# 16384 tokens (Dao-AILab/flash-attention pull 2605): 0.47 T / (T + 900). The backward's ratio to the forward is Hopper's: assumed.
# Memory: A100 1355 of 1555 GB/s (copy, PTsolvers/gpu-workshop-JuliaCon23 issue 7), H100 2903 of 3350 (nvbandwidth's copy,
# aigatech/vpbenchmarking), and 0.90 for both in Calculon's systems/*.json; B200 0.91 (BabelStream's mul in CUB, NVIDIA/cccl pull
# 9210); MI300X 0.81 of 5.3 TB/s (as aiweekly.co quotes a study). The other generations are assumed equal to the nearest one.
# Hopper: measured by this project on an H100 and an H200 (SXM, 700 W) with torch 2.11.0, CUDA 13.0, cuBLAS 13.1, cuDNN 9.19,
# from torch.profiler over one step of 20 jobs (`tests/records/h200_kernels.csv`, `h100_kernels.csv`), as shares of 989 TFLOP/s, 3.35 and
# 4.8 TB/s. Products: 0.70 to 0.91, median 0.82, but in long steps the power limit holds them lower, and single products of 2048 to
# 16384 rows, one after the other, reach 0.64 to 0.75: 0.76 is chosen on the step times of `tests/records/h200.jsonl`, and the step times of
# the H100, measured later, confirm it. In fp32 49 of 67 TFLOP/s. An odd vocabulary leaves only kernels that load single elements: the heads
# of GPT-2 (50257) and Whisper (51865) reach 0.125, that of BERT (30522, divisible by 2) 0.25. Attention is cuDNN's, causal, head 128:
# forward 199, 356, 485, 539 and 612 TFLOP/s at 512, 1024, 2048, 4096 and 8192 tokens, backward 118, 257, 384, 453 and 529. With a mask the
# kernels skip nothing, and on the H200 their forward had 0.64 (Olmo 3, 4096 tokens, head 128), 0.61 (a compiled Llama 3.2 1B, 2048, 64) and
# 0.60 (Gemma 3 1B, 2048, 256) of the rate without one, their backward 0.65, 0.86 and 0.62. Experts' products
# (`grouped_mm`, 256 to 1024 rows for each, unevenly routed) had 0.73 (Qwen3-30B-A3B), 0.78 (OLMoE), 0.86 (DeepSeek-V2-Lite), 0.91
# (GLM-4.7-Flash) and 0.94 (Mixtral) of the rate of other products of their shapes. Both on Blackwell as on Hopper: assumed. `memory`: a
# copy in bf16. `eager`: all other operators, whose recorded bytes take 1.2 to 1.8 times as long as at `memory` on the H200 (casts to fp32
# reach 0.44, factors that are broadcast over a row 0.34) and 1.1 to 1.2 times on the H100, which waits for its memory more. Fused AdamW
# over 2**29 elements: on the H100 3.31 ms in bf16 (14 bytes an element) and 5.75 ms in fp32 (28 bytes), on the H200 2.74 and 4.33 ms.
# `eager` on B200: the element-wise kernels of Qwen3.5-9B's step take 296 ms (huggingface/transformers pull 48692). The recorded operators
# move 1.03 TB in it, with FSDP's copies 1.16 TB: 0.43 to 0.49 of 8 TB/s, little more than the H200's 3.2 TB/s.
# Libraries of 2023 were slower: runs of llm-foundry on H100s with torch 2.1 imply products at 0.56. On several GPUs with libraries of 2026
# the rates are the same within a few percent (tests/published/README.md).
_ACHIEVED: dict[str, Achieved] = {
    "volta": Achieved(matmul=0.35, attention_forward=0.35, attention_backward=0.25, memory=0.88, seen=True),
    "turing": Achieved(matmul=0.35, attention_forward=0.35, attention_backward=0.25, memory=0.85),
    "ampere": Achieved(matmul=0.72, attention_forward=0.65, attention_backward=0.56, memory=0.88, seen=True),
    "ada": Achieved(matmul=0.72, plain_matmul=0.55, attention_forward=0.65, attention_backward=0.56, memory=0.88),
    "hopper": Achieved(
        matmul=0.76, plain_matmul=0.74, misaligned_matmul=0.125, fp8_matmul=0.90, grouped_matmul=0.84, attention_forward=0.69,
        attention_backward=0.63, small_head=0.80, half_rate_forward=942, half_rate_backward=1459, masked_forward=0.62,
        masked_backward=0.70, memory=0.89, eager=0.76, update_16_bit=0.68, update_32_bit=0.78, seen=True,
    ),
    "blackwell": Achieved(
        matmul=0.74, fp8_matmul=0.97, grouped_matmul=0.84, attention_forward=0.55, attention_backward=0.50, small_head=0.85,
        half_rate_forward=900, half_rate_backward=1459, masked_forward=0.62, masked_backward=0.70, memory=0.90, eager=0.45, seen=True,
    ),
    "cdna2": Achieved(matmul=0.54, attention_forward=0.30, attention_backward=0.22, memory=0.80),
    "cdna3": Achieved(matmul=0.28, fp8_matmul=0.62, attention_forward=0.30, attention_backward=0.22, memory=0.80),
    "cdna4": Achieved(matmul=0.37, attention_forward=0.30, attention_backward=0.22, memory=0.80),
}  # fmt: skip

_RTX_BLACKWELL = Achieved(matmul=0.69, plain_matmul=0.60, attention_forward=0.65, attention_backward=0.56, memory=0.90)
"""The shares of Blackwell's workstation boards (compute capability 12), which have the instructions of Ada and none of the data-centre
boards' own. Those whose tensor cores accumulate in fp32 at half rate have the shares of `_not_limited_by_power`. Products: RTX PRO 6000
Workstation Edition in bf16 at 4096, 8192 and 10240, 368, 350 and 334 of 503.8 TFLOP/s (zzc0721/torch-performance-test-data issue 160);
the Server Edition reaches 387 to 417 of 480 (issue 161). In fp32 68 to 74 of 126 and 75 to 79 of 120. Attention as Ada: assumed.
"""

_FASTER_MEMORY: dict[str, Achieved] = {
    "H200": replace(_ACHIEVED["hopper"], memory=0.88, eager=0.66, update_16_bit=0.57, update_32_bit=0.72),
}
"""The shares of boards with much faster memory than other boards with the same chip. Operators reach less of this memory's rate."""

SPLIT_K = 256
"""The shortest piece of the inner dimension that a multiprocessor computes if a product has fewer tiles than multiprocessors.
Assumed: a piece is worthwhile from about eight steps of 32 of the main loop.
"""

TILES: tuple[tuple[int, int, float], ...] = ((256, 128, 1.0), (128, 128, 0.95), (64, 64, 0.60))
"""Output tiles of a matrix product's kernels (rows, columns) and their rate relative to the largest. A smaller tile reads more
operands per product. Source of the sizes: NVIDIA, Matrix Multiplication Background User's Guide, section 2.3, Typical Tile
Dimensions in cuBLAS and Performance. The rates are assumed.
"""

KERNEL_GAP_S = 3e-6
"""Seconds between two kernels of one stream: drain, launch, fill. Measured on an H200 (`tests/records/h200_models.csv`): the step less its
kernels, divided by their number, over the 18 runs whose kernels fill at least 93 % of the step. The median is 3.3 us, and the three runs
with the most kernels have 2.4, 3.2 and 3.5 us. The same on other boards: assumed.
"""

LAUNCH_S = 25e-6
"""CPU seconds of one operator of eager PyTorch: Python, dispatcher, autograd, launch. Chosen on the five fitted rows that wait
for the CPU. Each of them implies 20 to 30 us, on servers of 2021 to 2023. A faster CPU needs less.
"""

WIDE_FORWARD_FLOPS = 0.68e12
WIDE_BACKWARD_FLOPS = 0.106e12
"""FLOP/s and multiprocessor of the memory-efficient kernel with heads of 512, causal. Measured on an H200
(`tests/records/h200_models.csv`): the seven global layers of Gemma 4 E2B take 2.7 ms forward and 42.9 ms backward at 2048 tokens. As fast
per multiprocessor on other boards: assumed.
"""

SINKS_SLOWDOWN = 1.7
"""How many times as long the operators take in layers whose eager attention has sinks. A sink makes rows of T + 1 scores, which kernels
cannot read in vectors, and the gradients of the experts' biases are added row by row. Measured on an H200 (`tests/records`): gpt-oss-20b
of 4 layers with all weights 1.8, with 24 layers and LoRA 1.7."""

CHECKPOINT_FORWARD_S = 3.3e-6
CHECKPOINT_BACKWARD_S = 6.7e-6
"""CPU seconds of activation checkpointing for each operator of a checkpointed forward, in forward and in backward: Python hooks pack and
unpack every saved tensor (torch 2.13, utils/checkpoint.py, `_checkpoint_hook`, `_recomputation_hook`). Chosen on the steps in
`tests/records` that wait for the CPU: together 10 us, where SmolLM2 135M implies 0, Gemma 3 1B 6 and DPO of Llama 3.1 8B with LoRA 25. One
third is in forward, as measured on layers of Llama, Qwen3 and Gemma 3 without a GPU.
"""

DISABLED_ADAPTER_S = 0.19e-3
"""CPU seconds to switch one LoRA layer off for a reference model and on again: PEFT walks over all modules several times (peft 0.21,
`PeftModel.disable_adapter`). Measured on the same CPU: 95 ms for the 224 layers of Llama 3.1 8B, divided by 2.2.
"""

QUANTIZED_STATES_PER_S = 0.53e9
"""Values of state per second and multiprocessor that a kernel of bitsandbytes' 8-bit optimizers updates: for each it searches a table of
256 values, so memory does not limit it. Source: measured on an H100 (`tests/records/h100_trainers.csv`). AdamW, which has two per
element: 15.3 ms for 537 million elements; Lion, which has one, takes half as long. The H200, whose memory is faster, takes the same time
(`h200_libraries.csv`). As fast per multiprocessor on other boards: assumed."""

BUS_SHARE: dict[LinkKind, float] = {
    "nvlink": 0.78, "xgmi": 0.70, "pcie": 0.60,
    "infiniband": 0.85, "roce": 0.85, "efa": 0.70, "slingshot": 0.75, "ethernet": 0.70,
}  # fmt: skip
"""The share of a link's rate that NCCL's rings achieve: bus bandwidth of large messages.

nvlink: A100 231 of 300 GB/s (NVIDIA/nccl issue 527), H100 370 of 450 (NVIDIA/nccl-tests issue 212), B200 682 of 900 (Bekman,
Machine Learning Engineering, SHARP, ring). xgmi: MI300X 313 of 448 (same source, all-to-all bandwidth). infiniband: all-reduce over
32 H100 nodes 340 of 400 (NVIDIA/nccl issue 1218, where an all-gather of 2 GB reached 200); over a few nodes NVIDIA names 46 to
48 of 50 per adapter (NVIDIA/nccl-tests issue 290). roce: as infiniband, assumed; 75 of 100 in NVIDIA/nccl issue 495. efa: assumed,
between 0.60 on p3dn (NVIDIA/nccl-tests issue 22) and 0.91 on p5en (Bekman, inter-node networking). pcie: assumed, below the 12 of
15.8 that NCCL itself plans with (src/graph/topo.h, PCI_BW), since GPUs share switches. slingshot, ethernet: assumed.
"""

LATENCY_S: dict[LinkKind, float] = {
    "nvlink": 3.4e-6, "xgmi": 3.6e-6, "pcie": 5.7e-6,
    "infiniband": 14e-6, "roce": 14e-6, "efa": 14e-6, "slingshot": 14e-6, "ethernet": 28e-6,
}  # fmt: skip
"""Seconds per hop of links without a published latency. Source: NCCL's cost model (src/graph/tuning.cc, hwLatencies, ring, Simple); xgmi:
RCCL's (its src/graph/tuning.cc, tuning_model_0). EFA and Slingshot as other networks, and TCP at twice that: assumed.
"""

COLLECTIVE_START_S = 20e-6
"""One collective's own overhead: NCCL's launch and its first handshake. Assumed, above the 8.4 us of NCCL's cost model
(src/graph/tuning.cc, baseLatencies, ring, Simple), which leaves out the launch; nccl-tests at 8 bytes, hops included, takes 10 us
between A100 (NVIDIA/nccl-tests issue 331) and 40 us on eight boards on PCIe (NVIDIA/nccl issue 1530).
"""

STOLEN_BY_NCCL = 0.15
"""The share of compute that NCCL's kernels take while a collective runs in parallel. Source: Isaev et al., Calculon (SC 2023),
`processor_usage` of NVLink in systems/a100_80g.json and h100_80g_nvl8.json. NCCL's 24 channels on A100 and 32 on H100 occupy
more while they run: 0.22 and 0.24 of the multiprocessors.
"""

RETRY_S = 0.07
"""Seconds of one retry of the caching allocator: it waits for the GPU, frees its cached segments and allocates again. Source: a
step of Llama-2-13B on 8 H100 takes 867.6 ms with cudaMalloc and cudaFree, 729.4 ms without (Lightning-AI/lightning-thunder issue
420). The number of retries is not stated; two are assumed. On a B200, the step of torchtitan after a step with retries was 0.18 s
faster than that step (pytorch/torchtitan pull 2389: 16,384 tokens at 10,917 and at 12,401 tokens per second).
"""

HOOKS_S: dict[str, float] = {"ddp": 0.0, "fsdp1": 0.8e-3, "fsdp2": 0.8e-3, "deepspeed": 3.5e-3}
"""CPU seconds of the Python hooks around one unit in one direction (unshard, reshard, reduce). Chosen on the fitted rows: FSDP1
from Lightning's rows, in comparison with DDP's; DeepSpeed from Qwen's rows at 256 to 1024 tokens (its hooks run per submodule).
FSDP2: assumed equal to FSDP1.
"""

HOST_SHARE: dict[Link, float] = {PCIE_3_X16: 0.80, PCIE_4_X16: 0.80, PCIE_5_X16: 0.88}
"""The achieved share of PCIe's raw rate with pinned memory, in one direction. Source: P100 12.2 and 12.9 of 15.8 GB/s (bandwidthTest in
mpicbg-scicomp/gearshifft pull 82), A100 25.1 of 31.5 (NVIDIA/nvbandwidth issue 42), H200 55.4 of 63.0 (nvbandwidth in Bekman,
Machine Learning Engineering, PCIe).
"""

HOST_ADAM_PER_S = 3.9e9
"""Elements per second and node of an Adam on the host that passes over memory once (DeepSpeedCPUAdam, fused CPU AdamW).
Source: ZeRO-Offload (arXiv:2101.06840), table 4: CPU-Adam takes 2.57 s for 10 billion parameters, on a DGX-2.
"""

HOST_PLAIN_ADAM_PER_S = 0.68e9
"""Elements per second and node of PyTorch's unfused Adam on the CPU: 14.76 s for 10 billion parameters (PT-CPU). Source: the same table."""

HOST_UPDATES_PER_S: dict[HostKernel, float] = {"one_pass": HOST_ADAM_PER_S, "many_passes": HOST_PLAIN_ADAM_PER_S}
"""Elements per second and node that an optimizer updates on the host."""

HOST_LINK: dict[str, Link] = {
    "volta": PCIE_3_X16, "turing": PCIE_3_X16, "ampere": PCIE_4_X16, "ada": PCIE_4_X16, "hopper": PCIE_5_X16,
    "blackwell": PCIE_5_X16, "cdna2": PCIE_4_X16, "cdna3": PCIE_5_X16, "cdna4": PCIE_5_X16,
}  # fmt: skip
"""The link between a generation's boards and the host. Source: the makers' datasheets."""


def achieved_by(gpu: Gpu, attention: Attention = "sdpa") -> Achieved | None:
    """The shares that this GPU achieves with this implementation of attention; None if its generation is unknown."""
    if gpu.architecture is None:
        return None
    found = _RTX_BLACKWELL if _is_rtx_blackwell(gpu) else _FASTER_MEMORY.get(gpu.name, _ACHIEVED[gpu.architecture])
    if gpu.name in _LIMITED_BY_POWER:
        found = _limited_by_power(found, _LIMITED_BY_POWER[gpu.name])
    elif _accumulates_at_half_rate(gpu):
        found = _not_limited_by_power(found, seen=gpu.architecture in ("ampere", "ada"))
    if attention == "flash_attention_2" and prefers_cudnn(gpu):
        return _with_flash_2(found, gpu)
    return found


def prefers_cudnn(gpu: Gpu) -> bool:
    """Whether sdpa runs cuDNN's kernels on this GPU, whose rates are then those of `sdpa`."""
    return (
        gpu.compute_capability is not None
        and gpu.architecture in ("hopper", "blackwell")
        and not _is_rtx_blackwell(gpu)
    )


def _is_rtx_blackwell(gpu: Gpu) -> bool:
    return gpu.architecture == "blackwell" and gpu.compute_capability is not None and gpu.compute_capability[0] == 12


def _with_flash_2(found: Achieved, gpu: Gpu) -> Achieved:
    """The shares with FlashAttention-2 on Hopper and Blackwell, where `sdpa` runs cuDNN's faster kernels.

    Source: on H100 forward 335 TFLOP/s (FlashAttention-3, arXiv:2407.08608, figure 5), both together 163, 221, 265, 294, 308, 328 at 512
    ... 16384 tokens (flash2_h100_fwd_bwd_benchmark.png in Dao-AILab/flash-attention). Blackwell runs the same kernel, which does not use
    the instructions of its tensor cores. With the rate of Hopper's multiprocessors, 148 instead of 132, a B200 has 377 and 322 TFLOP/s.
    With 2 x 65,536 tokens of Qwen3-4B and checkpoints, eight B200 took 39.6 s (PrimeIntellect-ai/prime-rl 559b4477, benchmarks/baselines),
    of which about 34 are attention: 335 TFLOP/s, and 344 at these rates.
    """
    forward, backward = (0.34, 0.29) if gpu.architecture == "hopper" else (0.17, 0.14)
    return replace(
        found, attention_forward=forward, attention_backward=backward, small_head=SMALL_HEAD,
        half_rate_forward=HALF_RATE_TOKENS, half_rate_backward=HALF_RATE_TOKENS, masked_forward=1.0, masked_backward=1.0,
    )  # fmt: skip


_LIMITED_BY_POWER: dict[str, float] = {"L4": 0.47, "H100-96GB": 0.52, "H100-PCIe": 0.56, "H100-NVL": 0.56}
"""Products' share of the peak on boards that their power limit slows more than others of their generation. Source: L4 (72 W) in bf16 at
4096, 8192 and 10240, 54.9, 59.4 and 56.9 of 121 TFLOP/s, after 70.9 at 2048, which ends too soon to be limited
(zzc0721/torch-performance-test-data issue 120). H100-96GB (500 W): chosen on torchtitan's two fitted rows, which ran on it. H100-PCIe
(350 W) and H100-NVL (400 W): assumed, of peaks that are lower.
"""


def _limited_by_power(found: Achieved, matmul: float) -> Achieved:
    """`found` for a board whose power limit reduces matrix products to the share `matmul` of the peak. Assumed: training is limited as the
    benchmark is, and attention slows down in proportion.
    """
    slower = matmul / found.matmul
    return replace(
        found,
        matmul=matmul,
        attention_forward=found.attention_forward * slower,
        attention_backward=found.attention_backward * slower,
    )


def _not_limited_by_power(found: Achieved, *, seen: bool) -> Achieved:
    """The shares of boards whose tensor cores accumulate in fp32 at half rate. `seen`: whether a published run used such boards.

    Products: the share of the peak that a benchmark reaches. Source: zzc0721/torch-performance-test-data, bf16 at 2048 to 10240 on
    Ampere and Ada: RTX 4090 151 to 165 of 165.2 TFLOP/s (issue 78), RTX 3060 24 to 25 of 25.4 (131), RTX 3080 61.5 to 64.7 (114),
    RTX 4060 Ti 45 to 48 (145), A10G 61 to 69 of 70 (126). Blackwell at 4096 to 10240: RTX 5090 182 to 240 of 209.5 (96, 124; another
    one 134 to 179, 200), RTX 5080 91 to 103 of 112.6 (104), RTX 5070 Ti 78 to 85 and 91 to 99 of 87.8 (172, 86), RTX 5070 60 to 67 of
    61.8 (101, 149, 159, 178, 179, 194), RTX 5060 Ti 46 to 47 of 47.4 (135), RTX 5060 40 to 42 of 38.4 (128): from 0.81 to 1.13 but for
    one, median 1.0, where the clock exceeds the datasheet's. The generations' shares in training are lower than in a benchmark because of
    the clocks under the power limit. These boards stay below it: the RTX 4090s of published training runs took at most 400 of 450 W
    (AnswerDotAI/fsdp_qlora, benchmarks_03_2024.md). Boards at full rate reach less: A40 95 to 122 of 149.7 (issue 185).
    In fp32 the same issues have at 4096 to 10240 51 to 53 of 82.6 on RTX 4090, 20 to 21 of 29.8 on RTX 3080, 65 to 67 of 104.8 on
    RTX 5090, 32 to 33 of 56.3 on RTX 5080, 28 of 43.9 on RTX 5070 Ti and 14 to 16 of 23.7 on RTX 5060 Ti: 0.58 to 0.70.
    Attention: FlashAttention-2 with heads of 128 on RTX 4090 at 2048 tokens, 151 TFLOP/s forward and 99 backward, causal, and 169 and
    125 without a mask (apache/tvm, tl_doc/flash_perf.md). With HALF_RATE_TOKENS the causal ones are 1.03, as its clock exceeds the
    datasheet's, and 0.68. Blackwell as Ada: assumed. Forward, PyTorch's flash kernel on an RTX 5090 whose limit was lowered from 575 to
    400 W has 187 of 209.5 at 8192 keys, which is 0.92 with HALF_RATE_TOKENS (gau-nernst/learn-cuda, 07_attention).
    """
    return replace(found, matmul=0.96, plain_matmul=0.63, attention_forward=1.0, attention_backward=0.68, seen=seen)


def _accumulates_at_half_rate(gpu: Gpu) -> bool:
    """Whether tensor cores accumulate in fp32 at half rate, as on GeForce boards since Ampere.

    These boards are recognized by their rate in bf16: twice, not four times, the fp32 rate without tensor cores.
    """
    if gpu.architecture not in ("ampere", "ada", "blackwell") or gpu.bf16_flops is None or gpu.fp32_flops is None:
        return False
    return gpu.bf16_flops < 3 * gpu.fp32_flops


def host_bytes_per_s(gpu: Gpu) -> float:
    """Bytes per second between this GPU and pinned host memory, in one direction."""
    assert gpu.architecture is not None
    link = HOST_LINK[gpu.architecture]
    return link.bytes_per_s * HOST_SHARE[link]


def latency_s(link: Link) -> float:
    """Seconds per hop of the link: its published latency, else that of its kind."""
    return LATENCY_S[link.kind] if link.latency_s is None else link.latency_s


def bus_bytes_per_s(link: Link) -> float:
    """The bytes per second that collectives reach on the link: a share of the link's rate."""
    return link.bytes_per_s * BUS_SHARE[link.kind]
