"""The table of GPUs: the memory that the driver offers, the rates of the datasheets, and the source of each figure.

`memory_bytes` is the value of `torch.cuda.mem_get_info()[1]`, because a job runs out of that memory. It is less than the
advertised size (`nominal_memory_bytes`): the driver reserves 0.3 to 2 GiB, and ECC on GDDR memory takes another sixteenth.
Drivers differ by about 0.2 GiB. A row contains the reading of a recent driver and names its source.

Rates are for dense matrices, without the doubling of "with sparsity", and for matrix multiplications that accumulate in
fp32, as training does. GeForce cards run those at half of their advertised rate. `fp32_flops` excludes tensor cores on
NVIDIA (`allow_tf32=False`) and is the fp32 matrix rate on AMD. None: the hardware does not support the dtype, or no rate
is published.

`host_memory_bytes` is the specification of the machine that `node_source` names. A DGX is sold with 2 TB (1 TB with the A100
40GB) and can be extended. None: the machine is assumed, or the buyer chooses its memory.

The memory of a row with `unified_memory` is the processor's too: the operating system and the job's host memory take their part
of it. Accelerators with a runtime of their own (`runtime` "other") are only memory sizes, as they are advertised.
"""

from fsdp_advisor.hardware import links as via
from fsdp_advisor.hardware.gpu import Gpu
from fsdp_advisor.units import GIB

_MIB = 2**20


def _gib(reading: float) -> int:
    """Bytes of a reading with two decimals, rounded to MiB. Out-of-memory messages are no more precise."""
    return round(reading * 1024) * _MIB


_PRINTED = "torch.cuda.get_device_properties in a public log: total_memory="
_OOM = "out-of-memory message, github.com/"
_OOM_LOG = "out-of-memory message in a public log: total capacity of "
_LLAMA = "llama.cpp's list of devices in a public log: "
_NOMINAL = "as advertised; no reading of what PyTorch may use was found"
_LOG = "total memory printed in a public log: "
_SERVER = "assumed: 8 cards in a server with one 100 Gb/s port (no maker's reference node)"
_WORKSTATION = "assumed: 4 cards in a workstation with one 10 Gb/s port (no maker's reference node)"
_DGX = "one adapter per GPU, as in NVIDIA "

# One row per GPU, formatted by hand to keep each row compact.
# fmt: off
GPUS: tuple[Gpu, ...] = (
    # Volta and Turing: no bf16, no TF32.
    Gpu(
        name="V100-16GB", full_name="NVIDIA Tesla V100 16GB SXM2",
        aliases=("Tesla V100-SXM2-16GB", "V100-SXM2-16GB", "V100-SXM-16GB"),
        memory_bytes=16151 * _MIB, nominal_memory_bytes=16 * GIB, memory_source=_PRINTED + "16151MB",
        fp16_flops=125e12, fp32_flops=15.7e12, memory_bytes_per_s=900e9,
        architecture="volta", compute_capability=(7, 0), multiprocessors=80, gpus_per_node=8,
        intra_node=via.NVLINK_2, inter_node=via.ETHERNET_25G.shared_by(8), node_source="AWS p3.16xlarge",
        host_memory_bytes=488 * GIB, source="NVIDIA V100 datasheet (1165301-r5)",
    ),
    Gpu(
        name="V100-32GB", full_name="NVIDIA Tesla V100 32GB SXM2",
        aliases=("V100", "V100-SXM", "V100-SXM2", "Tesla V100-SXM2-32GB", "V100-SXM-32GB", "Tesla V100-SXM3-32GB"),
        memory_bytes=_gib(31.74), nominal_memory_bytes=32 * GIB,
        memory_source=_OOM + "liucongg/ChatGLM-Finetuning/issues/73",
        fp16_flops=125e12, fp32_flops=15.7e12, memory_bytes_per_s=900e9,
        architecture="volta", compute_capability=(7, 0), multiprocessors=80, gpus_per_node=8,
        intra_node=via.NVLINK_2, inter_node=via.EFA_100G.shared_by(8), node_source="AWS p3dn.24xlarge",
        host_memory_bytes=768 * GIB, source="NVIDIA V100 datasheet (1165301-r5)",
    ),
    Gpu(
        name="T4", full_name="NVIDIA Tesla T4", aliases=("T4-16GB",),
        memory_bytes=_gib(14.56), nominal_memory_bytes=16 * GIB,
        memory_source=_LOG + "Colab, torch 2.11, 14.56 GiB (14.75 GiB before 2025, hpcaitech/Open-Sora/issues/697)",
        fp16_flops=65e12, fp32_flops=8.1e12, memory_bytes_per_s=320e9,
        architecture="turing", compute_capability=(7, 5), multiprocessors=40, gpus_per_node=8,
        intra_node=via.PCIE_3_X16, inter_node=via.ETHERNET_100G.shared_by(8), node_source="AWS g4dn.metal",
        host_memory_bytes=384 * GIB,
        source="NVIDIA T4 datasheet; bandwidth: Turing architecture whitepaper, T4 appendix (the datasheet rounds)",
    ),
    Gpu(
        name="RTX-2080-Ti", full_name="NVIDIA GeForce RTX 2080 Ti", aliases=("2080 Ti",),
        memory_bytes=11019 * _MIB, nominal_memory_bytes=11 * GIB, memory_source=_PRINTED + "11019MB",
        fp16_flops=53.8e12, fp32_flops=13.4e12, memory_bytes_per_s=616e9,
        architecture="turing", compute_capability=(7, 5), multiprocessors=68, gpus_per_node=4,
        intra_node=via.PCIE_3_X16, inter_node=via.ETHERNET_10G.shared_by(4), node_source=_WORKSTATION,
        source="NVIDIA Turing architecture whitepaper, reference card (fp16 with fp32 accumulation)",
    ),
    Gpu(
        name="Titan-RTX", full_name="NVIDIA TITAN RTX", aliases=("TITAN RTX 24GB",),
        memory_bytes=24190 * _MIB, nominal_memory_bytes=24 * GIB, memory_source=_PRINTED + "24190MB",
        fp16_flops=130.5e12, fp32_flops=16.3e12, memory_bytes_per_s=672e9,
        architecture="turing", compute_capability=(7, 5), multiprocessors=72, gpus_per_node=4,
        intra_node=via.PCIE_3_X16, inter_node=via.ETHERNET_10G.shared_by(4), node_source=_WORKSTATION,
        source="NVIDIA Titan RTX datasheet: 130 tensor TFLOPS; Turing architecture whitepaper, full TU102",
    ),
    # Ampere
    Gpu(
        name="RTX-3090", full_name="NVIDIA GeForce RTX 3090", aliases=("3090", "RTX 3090 24GB"),
        memory_bytes=_gib(23.68), nominal_memory_bytes=24 * GIB,
        memory_source=_OOM + "LambdaLabsML/examples/issues/48",
        bf16_flops=71e12, fp16_flops=71e12, tf32_flops=35.6e12, fp32_flops=35.6e12, memory_bytes_per_s=936e9,
        architecture="ampere", compute_capability=(8, 6), multiprocessors=82, gpus_per_node=4,
        intra_node=via.PCIE_4_X16, inter_node=via.ETHERNET_10G.shared_by(4), node_source=_WORKSTATION,
        source="NVIDIA GA102 architecture whitepaper, appendix A (fp32 accumulation)",
    ),
    Gpu(
        name="RTX-3090-Ti", full_name="NVIDIA GeForce RTX 3090 Ti", aliases=("3090 Ti", "RTX 3090 Ti 24GB"),
        memory_bytes=24114 * _MIB, nominal_memory_bytes=24 * GIB, memory_source=_PRINTED + "24114MB",
        bf16_flops=80e12, fp16_flops=80e12, tf32_flops=40e12, fp32_flops=40e12, memory_bytes_per_s=1008e9,
        architecture="ampere", compute_capability=(8, 6), multiprocessors=84, gpus_per_node=4,
        intra_node=via.PCIE_4_X16, inter_node=via.ETHERNET_10G.shared_by(4), node_source=_WORKSTATION,
        source="NVIDIA product page: 10752 cores at 1860 MHz, 21 Gb/s; tensor: 2 and 1 x fp32, as the RTX 3090",
    ),
    Gpu(
        name="RTX-3060", full_name="NVIDIA GeForce RTX 3060", aliases=("3060", "RTX 3060 12GB"),
        memory_bytes=11931 * _MIB, nominal_memory_bytes=12 * GIB,
        memory_source=_PRINTED + "11931MB, torch 2.4 (others: 11938 to 12044)",
        bf16_flops=25.4e12, fp16_flops=25.4e12, tf32_flops=12.7e12, fp32_flops=12.7e12, memory_bytes_per_s=360e9,
        architecture="ampere", compute_capability=(8, 6), multiprocessors=28, gpus_per_node=4,
        intra_node=via.PCIE_4_X16, inter_node=via.ETHERNET_10G.shared_by(4), node_source=_WORKSTATION,
        source="NVIDIA product page: 3584 cores at 1777 MHz, 15 Gb/s; tensor: 2 and 1 x fp32, as the RTX 3090",
    ),
    Gpu(
        name="A10", full_name="NVIDIA A10", aliases=("A10-24GB", "A10 PCIe"),
        memory_bytes=_gib(21.99), nominal_memory_bytes=24 * GIB, memory_source=_OOM + "zai-org/CogVLM/issues/236",
        bf16_flops=125e12, fp16_flops=125e12, tf32_flops=62.5e12, fp32_flops=31.2e12, memory_bytes_per_s=600e9,
        architecture="ampere", compute_capability=(8, 6), multiprocessors=72, gpus_per_node=4,
        intra_node=via.PCIE_4_X16, inter_node=via.ETHERNET_100G.shared_by(4), node_source="OCI BM.GPU.A10.4",
        host_memory_bytes=1024 * GIB, source="NVIDIA A10 datasheet",
    ),
    Gpu(
        name="A10G", full_name="NVIDIA A10G", aliases=("A10G-24GB",),
        memory_bytes=22587 * _MIB, nominal_memory_bytes=24 * GIB, memory_source=_PRINTED + "22587MB",
        bf16_flops=70e12, fp16_flops=70e12, tf32_flops=35e12, fp32_flops=31.5e12, memory_bytes_per_s=600e9,
        architecture="ampere", compute_capability=(8, 6), multiprocessors=80, gpus_per_node=8,
        intra_node=via.PCIE_4_X16, inter_node=via.ETHERNET_100G.shared_by(8), node_source="AWS g5.48xlarge",
        host_memory_bytes=768 * GIB,
        source="NVIDIA A10G datasheet: 70 tensor TFLOPS, little more than half of an A10; baseten.co, A10 vs A10G",
    ),
    Gpu(
        name="A30", full_name="NVIDIA A30", aliases=("A30-24GB", "A30 PCIe"),
        memory_bytes=_gib(23.50), nominal_memory_bytes=24 * GIB, memory_source=_OOM + "LHRLAB/ChatKBQA/issues/2",
        bf16_flops=165e12, fp16_flops=165e12, tf32_flops=82e12, fp32_flops=10.3e12, memory_bytes_per_s=933e9,
        architecture="ampere", compute_capability=(8, 0), multiprocessors=56, gpus_per_node=8,
        intra_node=via.PCIE_4_X16, inter_node=via.ETHERNET_100G.shared_by(8), node_source=_SERVER,
        source="NVIDIA A30 datasheet",
    ),
    Gpu(
        name="A40", full_name="NVIDIA A40", aliases=("A40-48GB", "A40 PCIe"),
        memory_bytes=45416 * _MIB, nominal_memory_bytes=48 * GIB, memory_source=_PRINTED + "45416MB",
        bf16_flops=149.7e12, fp16_flops=149.7e12, tf32_flops=74.8e12, fp32_flops=37.4e12, memory_bytes_per_s=696e9,
        architecture="ampere", compute_capability=(8, 6), multiprocessors=84, gpus_per_node=8,
        intra_node=via.PCIE_4_X16, inter_node=via.ETHERNET_100G.shared_by(8), node_source=_SERVER,
        source="NVIDIA A40 datasheet",
    ),
    Gpu(
        name="RTX-A6000", full_name="NVIDIA RTX A6000", aliases=("A6000", "RTX A6000 48GB", "A6000-48GB"),
        memory_bytes=_gib(47.53), nominal_memory_bytes=48 * GIB,
        memory_source=_LOG + "47.53 GiB (ECC off, as delivered)",
        bf16_flops=154.8e12, fp16_flops=154.8e12, tf32_flops=77.4e12, fp32_flops=38.7e12, memory_bytes_per_s=768e9,
        architecture="ampere", compute_capability=(8, 6), multiprocessors=84, gpus_per_node=4,
        intra_node=via.PCIE_4_X16, inter_node=via.ETHERNET_10G.shared_by(4), node_source=_WORKSTATION,
        source="NVIDIA RTX A6000 datasheet; GA102 architecture whitepaper, appendix",
    ),
    Gpu(
        name="A100-40GB", full_name="NVIDIA A100 40GB SXM4",
        aliases=("A100-SXM4-40GB", "A100-SXM-40GB", "A100-40GB-SXM", "A100-40GB-SXM4"),
        memory_bytes=42298834944, nominal_memory_bytes=40 * GIB,
        memory_source="deviceQuery, github.com/bottlerocket-os/bottlerocket/pull/3873: 42298834944 bytes",
        bf16_flops=312e12, fp16_flops=312e12, tf32_flops=156e12, fp32_flops=19.5e12, memory_bytes_per_s=1555e9,
        architecture="ampere", compute_capability=(8, 0), multiprocessors=108, gpus_per_node=8,
        intra_node=via.NVLINK_3, inter_node=via.INFINIBAND_HDR, node_source=_DGX + "DGX A100",
        host_memory_bytes=1024 * GIB, source="NVIDIA A100 datasheet",
    ),
    Gpu(
        name="A100-40GB-PCIe", full_name="NVIDIA A100 40GB PCIe", aliases=("A100-PCIE-40GB",),
        memory_bytes=40326 * _MIB, nominal_memory_bytes=40 * GIB, memory_source=_PRINTED + "40326MB",
        bf16_flops=312e12, fp16_flops=312e12, tf32_flops=156e12, fp32_flops=19.5e12, memory_bytes_per_s=1555e9,
        architecture="ampere", compute_capability=(8, 0), multiprocessors=108, gpus_per_node=8,
        intra_node=via.PCIE_4_X16, inter_node=via.ETHERNET_100G.shared_by(8), node_source=_SERVER,
        source="NVIDIA A100 datasheet (a bridge joins pairs by NVLink; the table counts on PCIe)",
    ),
    Gpu(
        name="A100-80GB", full_name="NVIDIA A100 80GB SXM4",
        aliases=("A100", "A100-SXM", "A100-SXM4", "A100-SXM4-80GB", "A100-SXM-80GB", "A100-80GB-SXM", "A100-80GB-SXM4"),
        memory_bytes=_gib(79.15), nominal_memory_bytes=80 * GIB,
        memory_source=_LOG + "A100-SXM4-80GB, 79.15 GiB (others: 79.14 to 79.33)",
        bf16_flops=312e12, fp16_flops=312e12, tf32_flops=156e12, fp32_flops=19.5e12, memory_bytes_per_s=2039e9,
        architecture="ampere", compute_capability=(8, 0), multiprocessors=108, gpus_per_node=8,
        intra_node=via.NVLINK_3, inter_node=via.INFINIBAND_HDR, node_source=_DGX + "DGX A100",
        host_memory_bytes=2048 * GIB, source="NVIDIA A100 datasheet",
    ),
    Gpu(
        name="A100-80GB-PCIe", full_name="NVIDIA A100 80GB PCIe", aliases=("A100-PCIe", "A100-PCIE-80GB"),
        memory_bytes=_gib(79.17), nominal_memory_bytes=80 * GIB,
        memory_source=_LOG + "A100 80GB PCIe, 79.17 GiB (others: 79.1 to 79.3)",
        bf16_flops=312e12, fp16_flops=312e12, tf32_flops=156e12, fp32_flops=19.5e12, memory_bytes_per_s=1935e9,
        architecture="ampere", compute_capability=(8, 0), multiprocessors=108, gpus_per_node=8,
        intra_node=via.PCIE_4_X16, inter_node=via.ETHERNET_100G.shared_by(8), node_source=_SERVER,
        source="NVIDIA A100 datasheet (a bridge joins pairs by NVLink; the table counts on PCIe)",
    ),
    Gpu(
        name="A800-80GB", full_name="NVIDIA A800 80GB SXM4", aliases=("A800", "A800-SXM4-80GB", "A800-SXM"),
        memory_bytes=_gib(79.33), nominal_memory_bytes=80 * GIB, memory_source=_OOM + "hahnyuan/PB-LLM/issues/3",
        bf16_flops=312e12, fp16_flops=312e12, tf32_flops=156e12, fp32_flops=19.5e12, memory_bytes_per_s=2039e9,
        architecture="ampere", compute_capability=(8, 0), multiprocessors=108, gpus_per_node=8,
        intra_node=via.NVLINK_3_A800, inter_node=via.INFINIBAND_HDR, node_source=_DGX + "DGX A100",
        host_memory_bytes=2048 * GIB, source="NVIDIA A800 datasheet: an A100 but for NVLink",
    ),
    # Ada
    Gpu(
        name="RTX-4090", full_name="NVIDIA GeForce RTX 4090", aliases=("4090", "RTX 4090 24GB"),
        memory_bytes=_gib(23.52), nominal_memory_bytes=24 * GIB,
        memory_source=_LOG + "driver 580, 23.52 GiB (23.64 before, 3DTopia/Phidias-Diffusion/issues/8)",
        bf16_flops=165.2e12, fp16_flops=165.2e12, tf32_flops=82.6e12, fp32_flops=82.6e12, memory_bytes_per_s=1008e9,
        architecture="ada", compute_capability=(8, 9), multiprocessors=128, gpus_per_node=4,
        intra_node=via.PCIE_4_X16, inter_node=via.ETHERNET_10G.shared_by(4), node_source=_WORKSTATION,
        source="NVIDIA Ada architecture whitepaper, appendix A (fp32 accumulation)",
    ),
    Gpu(
        name="RTX-4080", full_name="NVIDIA GeForce RTX 4080", aliases=("4080", "RTX 4080 16GB"),
        memory_bytes=16049 * _MIB, nominal_memory_bytes=16 * GIB, memory_source=_PRINTED + "16049MB",
        bf16_flops=97.5e12, fp16_flops=97.5e12, tf32_flops=48.7e12, fp32_flops=48.7e12, memory_bytes_per_s=716.8e9,
        architecture="ada", compute_capability=(8, 9), multiprocessors=76, gpus_per_node=4,
        intra_node=via.PCIE_4_X16, inter_node=via.ETHERNET_10G.shared_by(4), node_source=_WORKSTATION,
        source="NVIDIA Ada architecture whitepaper, appendix A (fp32 accumulation)",
    ),
    Gpu(
        name="RTX-4080-SUPER", full_name="NVIDIA GeForce RTX 4080 SUPER", aliases=("4080 SUPER", "RTX 4080 SUPER 16GB"),
        memory_bytes=15937 * _MIB, nominal_memory_bytes=16 * GIB,
        memory_source=_LLAMA + "15937 MiB (16071 in a log of PyTorch 2.4)",
        bf16_flops=104.4e12, fp16_flops=104.4e12, tf32_flops=52.2e12, fp32_flops=52.2e12, memory_bytes_per_s=736e9,
        architecture="ada", compute_capability=(8, 9), multiprocessors=80, gpus_per_node=4,
        intra_node=via.PCIE_4_X16, inter_node=via.ETHERNET_10G.shared_by(4), node_source=_WORKSTATION,
        source="NVIDIA product page: 10240 cores at 2550 MHz, 23 Gb/s; tensor: 2 and 1 x fp32, as the RTX 4080",
    ),
    Gpu(
        name="RTX-4070-Ti", full_name="NVIDIA GeForce RTX 4070 Ti", aliases=("4070 Ti", "RTX 4070 Ti 12GB"),
        memory_bytes=11933 * _MIB, nominal_memory_bytes=12 * GIB,
        memory_source=_LLAMA + "11933 MiB (11.6 GiB printed by PyTorch)",
        bf16_flops=80.2e12, fp16_flops=80.2e12, tf32_flops=40.1e12, fp32_flops=40.1e12, memory_bytes_per_s=504e9,
        architecture="ada", compute_capability=(8, 9), multiprocessors=60, gpus_per_node=4,
        intra_node=via.PCIE_4_X16, inter_node=via.ETHERNET_10G.shared_by(4), node_source=_WORKSTATION,
        source="NVIDIA product page: 7680 cores at 2610 MHz, 21 Gb/s; tensor: 2 and 1 x fp32, as the RTX 4080",
    ),
    Gpu(
        name="L4", full_name="NVIDIA L4", aliases=("L4-24GB",),
        memory_bytes=_gib(22.03), nominal_memory_bytes=24 * GIB, memory_source=_LOG + "NVIDIA L4, 22.03 GiB",
        bf16_flops=121e12, fp16_flops=121e12, tf32_flops=60e12, fp32_flops=30.3e12, memory_bytes_per_s=300e9,
        architecture="ada", compute_capability=(8, 9), multiprocessors=58, gpus_per_node=8,
        intra_node=via.PCIE_4_X16, inter_node=via.ETHERNET_100G.shared_by(8), node_source="AWS g6.48xlarge",
        host_memory_bytes=768 * GIB, source="NVIDIA L4 datasheet (242 TFLOPS with sparsity)",
    ),
    Gpu(
        name="L40", full_name="NVIDIA L40", aliases=("L40-48GB",),
        memory_bytes=_gib(44.40), nominal_memory_bytes=48 * GIB, memory_source=_OOM + "NVlabs/Eagle/issues/68",
        bf16_flops=181.05e12, fp16_flops=181.05e12, tf32_flops=90.5e12, fp32_flops=90.5e12, memory_bytes_per_s=864e9,
        architecture="ada", compute_capability=(8, 9), multiprocessors=142, gpus_per_node=8,
        intra_node=via.PCIE_4_X16, inter_node=via.ETHERNET_100G.shared_by(8), node_source=_SERVER,
        source="NVIDIA L40 datasheet",
    ),
    Gpu(
        name="L40S", full_name="NVIDIA L40S", aliases=("L40S-48GB",),
        memory_bytes=_gib(44.42), nominal_memory_bytes=48 * GIB,
        memory_source=_OOM + "stepfun-ai/Step-Video-T2V/issues/8",
        bf16_flops=362e12, fp16_flops=362e12, tf32_flops=183e12, fp32_flops=91.6e12, memory_bytes_per_s=864e9,
        architecture="ada", compute_capability=(8, 9), multiprocessors=142, gpus_per_node=8,
        intra_node=via.PCIE_4_X16, inter_node=via.EFA_400G.shared_by(8), node_source="AWS g6e.48xlarge",
        host_memory_bytes=1536 * GIB, source="NVIDIA L40S datasheet",
    ),
    Gpu(
        name="RTX-6000-Ada", full_name="NVIDIA RTX 6000 Ada Generation", aliases=("RTX 6000 Ada 48GB", "6000 Ada"),
        memory_bytes=_gib(47.50), nominal_memory_bytes=48 * GIB,
        memory_source=_LOG + "47.5 GiB (44.43 with ECC on, DINGYANB/MTVCrafter/issues/21)",
        bf16_flops=364.2e12, fp16_flops=364.2e12, tf32_flops=182.1e12, fp32_flops=91.1e12, memory_bytes_per_s=960e9,
        architecture="ada", compute_capability=(8, 9), multiprocessors=142, gpus_per_node=4,
        intra_node=via.PCIE_4_X16, inter_node=via.ETHERNET_10G.shared_by(4), node_source=_WORKSTATION,
        source="NVIDIA Ada architecture whitepaper, appendix",
    ),
    # Hopper
    Gpu(
        name="H20", full_name="NVIDIA H20 96GB SXM5", aliases=("H20-96GB",),
        memory_bytes=97285 * _MIB, nominal_memory_bytes=96 * GIB, memory_source=_PRINTED + "97285MB",
        bf16_flops=148e12, fp16_flops=148e12, tf32_flops=74e12, fp32_flops=44e12, memory_bytes_per_s=4.0e12,
        architecture="hopper", compute_capability=(9, 0), multiprocessors=78, gpus_per_node=8,
        intra_node=via.NVLINK_4, inter_node=via.INFINIBAND_NDR, node_source=_DGX + "HGX H20",
        source="press reports of NVIDIA's H20 specification (no public datasheet)",
    ),
    Gpu(
        name="H100-80GB", full_name="NVIDIA H100 80GB SXM5",
        aliases=("H100", "H100-SXM", "H100-SXM5", "H100 80GB HBM3", "H100-SXM-80GB", "H100-SXM5-80GB", "H100-HBM3"),
        memory_bytes=81089 * _MIB, nominal_memory_bytes=80 * GIB,
        memory_source=_PRINTED + "81089MB, torch 2.7 (others: 79.11 to 79.65 GiB)",
        bf16_flops=989.4e12, fp16_flops=989.4e12, tf32_flops=494.7e12, fp32_flops=66.9e12, memory_bytes_per_s=3.35e12,
        architecture="hopper", compute_capability=(9, 0), multiprocessors=132, gpus_per_node=8,
        intra_node=via.NVLINK_4, inter_node=via.INFINIBAND_NDR, node_source=_DGX + "DGX H100",
        host_memory_bytes=2048 * GIB,
        source="NVIDIA H100 datasheet (halved: it prints sparse rates) and Hopper architecture whitepaper",
    ),
    Gpu(
        name="H100-96GB", full_name="NVIDIA H100 96GB HBM2e SXM5", aliases=("H100-SXM5-96GB", "H100 96GB HBM2e"),
        memory_bytes=_gib(95.00), nominal_memory_bytes=96 * GIB,
        memory_source="torchtitan's training logs, benchmarks of Llama 3 on H100: 95.00 GiB",
        bf16_flops=989.4e12, fp16_flops=989.4e12, tf32_flops=494.7e12, fp32_flops=66.9e12, memory_bytes_per_s=2.4e12,
        architecture="hopper", compute_capability=(9, 0), multiprocessors=132, gpus_per_node=8,
        intra_node=via.NVLINK_4, inter_node=via.INFINIBAND_NDR, node_source="Meta Grand Teton: one adapter per GPU",
        source="torchtitan, benchmarks: 96 GB of HBM2e at 2.4 TB/s; an H100's die, limited to 500 W by default",
    ),
    Gpu(
        name="H100-PCIe", full_name="NVIDIA H100 80GB PCIe", aliases=("H100-80GB-PCIe", "H100-PCIe-80GB"),
        memory_bytes=81008 * _MIB, nominal_memory_bytes=80 * GIB, memory_source=_PRINTED + "81008MB",
        bf16_flops=756e12, fp16_flops=756e12, tf32_flops=378e12, fp32_flops=51e12, memory_bytes_per_s=2.0e12,
        architecture="hopper", compute_capability=(9, 0), multiprocessors=114, gpus_per_node=8,
        intra_node=via.PCIE_5_X16, inter_node=via.ETHERNET_100G.shared_by(8), node_source=_SERVER,
        source="NVIDIA H100 datasheet (a bridge joins pairs by NVLink; the table counts on PCIe)",
    ),
    Gpu(
        name="H100-NVL", full_name="NVIDIA H100 NVL 94GB", aliases=("H100-NVL-94GB", "H100-94GB"),
        memory_bytes=_gib(93.10), nominal_memory_bytes=94 * GIB,
        memory_source=_LOG + "H100 NVL, 93.1 GiB (93.00 in ali-vilab/VACE/issues/56)",
        bf16_flops=835.5e12, fp16_flops=835.5e12, tf32_flops=417.5e12, fp32_flops=60e12, memory_bytes_per_s=3.9e12,
        architecture="hopper", compute_capability=(9, 0), multiprocessors=132, gpus_per_node=8,
        intra_node=via.PCIE_5_X16, inter_node=via.ETHERNET_100G.shared_by(8), node_source=_SERVER,
        source="NVIDIA H100 datasheet (a bridge joins pairs by NVLink; the table counts on PCIe)",
    ),
    Gpu(
        name="H800", full_name="NVIDIA H800 80GB SXM5", aliases=("H800-80GB", "H800-SXM", "H800-SXM5"),
        memory_bytes=81089 * _MIB, nominal_memory_bytes=80 * GIB,
        memory_source="as H100-80GB: nvidia-smi gives both 81559 MiB; no reading of what PyTorch sees was found",
        bf16_flops=989.4e12, fp16_flops=989.4e12, tf32_flops=494.7e12, fp32_flops=66.9e12, memory_bytes_per_s=3.35e12,
        architecture="hopper", compute_capability=(9, 0), multiprocessors=132, gpus_per_node=8,
        intra_node=via.NVLINK_4_H800, inter_node=via.INFINIBAND_NDR,
        node_source="one adapter per GPU, as in DeepSeek-V3's cluster",
        source="ISCA 2025, Insights into DeepSeek-V3: an H100 but for NVLink and fp64",
    ),
    Gpu(
        name="H200", full_name="NVIDIA H200 141GB SXM5",
        aliases=("H200-141GB", "H200-SXM", "H200-SXM5", "H200-SXM-141GB"),
        memory_bytes=143156 * _MIB, nominal_memory_bytes=141 * GIB, memory_source=_PRINTED + "143156MB",
        bf16_flops=989.4e12, fp16_flops=989.4e12, tf32_flops=494.7e12, fp32_flops=66.9e12, memory_bytes_per_s=4.8e12,
        architecture="hopper", compute_capability=(9, 0), multiprocessors=132, gpus_per_node=8,
        intra_node=via.NVLINK_4, inter_node=via.INFINIBAND_NDR, node_source=_DGX + "DGX H200",
        host_memory_bytes=2048 * GIB, source="NVIDIA H200 datasheet (halved: it prints sparse rates); an H100's die",
    ),
    Gpu(
        name="GH200", full_name="NVIDIA GH200 96GB", aliases=("GH200-96GB", "GH200 480GB"),
        memory_bytes=_gib(94.50), nominal_memory_bytes=96 * GIB,
        memory_source=_LOG + "NVIDIA GH200 480GB, torch 2.7, 94.5 GiB",
        bf16_flops=989.4e12, fp16_flops=989.4e12, tf32_flops=494.7e12, fp32_flops=66.9e12, memory_bytes_per_s=4.0e12,
        architecture="hopper", compute_capability=(9, 0), multiprocessors=132, gpus_per_node=1,
        intra_node=via.NVLINK_4, inter_node=via.INFINIBAND_NDR, node_source=_DGX + "MGX GH200",
        source="NVIDIA GH200 datasheet, the HBM3 variant (halved: it prints sparse rates)",
    ),
    # Blackwell
    Gpu(
        name="B200", full_name="NVIDIA B200 180GB SXM", aliases=("B200-180GB", "B200-192GB", "B200-SXM", "HGX B200"),
        memory_bytes=182631 * _MIB, nominal_memory_bytes=180 * GIB, memory_source=_PRINTED + "182631MB",
        bf16_flops=2250e12, fp16_flops=2250e12, tf32_flops=1125e12, fp32_flops=75e12, memory_bytes_per_s=8.0e12,
        architecture="blackwell", compute_capability=(10, 0), multiprocessors=148, gpus_per_node=8,
        intra_node=via.NVLINK_5, inter_node=via.INFINIBAND_NDR, node_source=_DGX + "DGX B200",
        host_memory_bytes=2048 * GIB,
        source="NVIDIA DGX B200 and HGX datasheets, 8 GPUs (halved: they print sparse rates)",
    ),
    Gpu(
        name="B300", full_name="NVIDIA B300 SXM6", aliases=("B300-288GB", "B300-270GB", "B300 SXM6 AC", "B300-SXM"),
        memory_bytes=_gib(267.69), nominal_memory_bytes=270 * GIB, memory_source=_OOM_LOG + "267.69 GiB",
        bf16_flops=2250e12, fp16_flops=2250e12, tf32_flops=1125e12, fp32_flops=75e12, memory_bytes_per_s=8.0e12,
        architecture="blackwell", compute_capability=(10, 3), multiprocessors=148, gpus_per_node=8,
        intra_node=via.NVLINK_5, inter_node=via.INFINIBAND_XDR, node_source=_DGX + "DGX B300",
        source="NVIDIA DGX B300 and HGX datasheets, 8 GPUs (halved: they print sparse rates)",
    ),
    Gpu(
        name="GB200", full_name="NVIDIA GB200 186GB", aliases=("GB200-186GB", "GB200 NVL72"),
        memory_bytes=_gib(184.31), nominal_memory_bytes=186 * GIB,
        memory_source=_OOM_LOG + "184.31 GiB on a GB200",
        bf16_flops=2500e12, fp16_flops=2500e12, tf32_flops=1250e12, fp32_flops=80e12, memory_bytes_per_s=8.0e12,
        architecture="blackwell", compute_capability=(10, 0), multiprocessors=152, gpus_per_node=4,
        intra_node=via.NVLINK_5, inter_node=via.INFINIBAND_NDR,
        node_source=_DGX + "GB200 NVL72 (4 GPUs per tray; NVLink reaches all 72, which the table does not count on)",
        source="NVIDIA GB200 NVL72 datasheet, 72 GPUs (halved: it prints sparse rates)",
    ),
    Gpu(
        name="GB300", full_name="NVIDIA GB300 279GB", aliases=("GB300-279GB", "GB300-288GB", "GB300 NVL72"),
        memory_bytes=_gib(276.50), nominal_memory_bytes=279 * GIB,
        memory_source=_OOM + "NVIDIA-NeMo/Megatron-Bridge/issues/2221",
        bf16_flops=2500e12, fp16_flops=2500e12, tf32_flops=1250e12, fp32_flops=80e12, memory_bytes_per_s=8.0e12,
        architecture="blackwell", compute_capability=(10, 3), multiprocessors=152, gpus_per_node=4,
        intra_node=via.NVLINK_5, inter_node=via.INFINIBAND_XDR,
        node_source=_DGX + "GB300 NVL72 (4 GPUs per tray; NVLink reaches all 72, which the table does not count on)",
        source="NVIDIA GB300 NVL72 datasheet, 72 GPUs (halved: it prints sparse rates)",
    ),
    Gpu(
        name="RTX-5090", full_name="NVIDIA GeForce RTX 5090", aliases=("5090", "RTX 5090 32GB"),
        memory_bytes=_gib(31.37), nominal_memory_bytes=32 * GIB,
        memory_source=_OOM + "Wan-Video/Wan2.1/issues/465 (others: 31.34 to 31.39 GiB)",
        bf16_flops=209.5e12, fp16_flops=209.5e12, tf32_flops=104.8e12, fp32_flops=104.8e12, memory_bytes_per_s=1792e9,
        architecture="blackwell", compute_capability=(12, 0), multiprocessors=170, gpus_per_node=4,
        intra_node=via.PCIE_5_X16, inter_node=via.ETHERNET_10G.shared_by(4), node_source=_WORKSTATION,
        source="NVIDIA RTX Blackwell architecture whitepaper, appendix (fp32 accumulation)",
    ),
    Gpu(
        name="RTX-5080", full_name="NVIDIA GeForce RTX 5080", aliases=("5080", "RTX 5080 16GB"),
        memory_bytes=16609378304, nominal_memory_bytes=16 * GIB,
        memory_source=_PRINTED + "16609378304 bytes (16302MB before driver 580 and under Windows)",
        bf16_flops=112.6e12, fp16_flops=112.6e12, tf32_flops=56.3e12, fp32_flops=56.3e12, memory_bytes_per_s=960e9,
        architecture="blackwell", compute_capability=(12, 0), multiprocessors=84, gpus_per_node=4,
        intra_node=via.PCIE_5_X16, inter_node=via.ETHERNET_10G.shared_by(4), node_source=_WORKSTATION,
        source="NVIDIA RTX Blackwell architecture whitepaper, appendix: 10752 cores at 2617 MHz (fp32 accumulation)",
    ),
    Gpu(
        name="RTX-5070-Ti", full_name="NVIDIA GeForce RTX 5070 Ti", aliases=("5070 Ti", "RTX 5070 Ti 16GB"),
        memory_bytes=15842 * _MIB, nominal_memory_bytes=16 * GIB,
        memory_source=_LLAMA + "15842 MiB (16302 under Windows)",
        bf16_flops=87.8e12, fp16_flops=87.8e12, tf32_flops=43.9e12, fp32_flops=43.9e12, memory_bytes_per_s=896e9,
        architecture="blackwell", compute_capability=(12, 0), multiprocessors=70, gpus_per_node=4,
        intra_node=via.PCIE_5_X16, inter_node=via.ETHERNET_10G.shared_by(4), node_source=_WORKSTATION,
        source="NVIDIA product page: 8960 cores at 2452 MHz, 28 Gb/s; tensor: 2 and 1 x fp32, as the RTX 5080",
    ),
    Gpu(
        name="RTX-5070", full_name="NVIDIA GeForce RTX 5070", aliases=("5070", "RTX 5070 12GB"),
        memory_bytes=_gib(11.50), nominal_memory_bytes=12 * GIB,
        memory_source=_LOG + "Linux, torch 2.12, 11.5 GiB (12226 MiB under Windows)",
        bf16_flops=61.8e12, fp16_flops=61.8e12, tf32_flops=30.9e12, fp32_flops=30.9e12, memory_bytes_per_s=672e9,
        architecture="blackwell", compute_capability=(12, 0), multiprocessors=48, gpus_per_node=4,
        intra_node=via.PCIE_5_X16, inter_node=via.ETHERNET_10G.shared_by(4), node_source=_WORKSTATION,
        source="NVIDIA product page: 6144 cores at 2512 MHz, 28 Gb/s; tensor: 2 and 1 x fp32, as the RTX 5080",
    ),
    Gpu(
        name="RTX-5060-Ti-16GB", full_name="NVIDIA GeForce RTX 5060 Ti", aliases=("5060 Ti", "5060 Ti 16GB"),
        memory_bytes=15850 * _MIB, nominal_memory_bytes=16 * GIB,
        memory_source=_LLAMA + "15850 MiB (others: 15825 to 15850)",
        bf16_flops=47.4e12, fp16_flops=47.4e12, tf32_flops=23.7e12, fp32_flops=23.7e12, memory_bytes_per_s=448e9,
        architecture="blackwell", compute_capability=(12, 0), multiprocessors=36, gpus_per_node=4,
        intra_node=via.PCIE_5_X8, inter_node=via.ETHERNET_10G.shared_by(4), node_source=_WORKSTATION,
        source="NVIDIA product page: 4608 cores at 2572 MHz, 28 Gb/s; tensor: 2 and 1 x fp32, as the RTX 5080",
    ),
    Gpu(
        name="RTX-5060-Ti-8GB", full_name="NVIDIA GeForce RTX 5060 Ti 8GB", aliases=("5060 Ti 8GB",),
        memory_bytes=_gib(7.50), nominal_memory_bytes=8 * GIB,
        memory_source=_LOG + "Linux, 7.5 GiB (nvidia-smi: 8151 MiB)",
        bf16_flops=47.4e12, fp16_flops=47.4e12, tf32_flops=23.7e12, fp32_flops=23.7e12, memory_bytes_per_s=448e9,
        architecture="blackwell", compute_capability=(12, 0), multiprocessors=36, gpus_per_node=4,
        intra_node=via.PCIE_5_X8, inter_node=via.ETHERNET_10G.shared_by(4), node_source=_WORKSTATION,
        source="NVIDIA product page: 4608 cores at 2572 MHz, 28 Gb/s; tensor: 2 and 1 x fp32, as the RTX 5080",
    ),
    Gpu(
        name="RTX-5060", full_name="NVIDIA GeForce RTX 5060", aliases=("5060", "RTX 5060 8GB"),
        memory_bytes=_gib(7.50), nominal_memory_bytes=8 * GIB,
        memory_source=_LOG + "Linux, 7.5 GiB (8150 MiB under Windows)",
        bf16_flops=38.4e12, fp16_flops=38.4e12, tf32_flops=19.2e12, fp32_flops=19.2e12, memory_bytes_per_s=448e9,
        architecture="blackwell", compute_capability=(12, 0), multiprocessors=30, gpus_per_node=4,
        intra_node=via.PCIE_5_X8, inter_node=via.ETHERNET_10G.shared_by(4), node_source=_WORKSTATION,
        source="NVIDIA product page: 3840 cores at 2497 MHz, 28 Gb/s; tensor: 2 and 1 x fp32, as the RTX 5080",
    ),
    Gpu(
        name="RTX-PRO-6000", full_name="NVIDIA RTX PRO 6000 Blackwell Workstation Edition",
        aliases=("RTX PRO 6000 Blackwell", "PRO 6000", "RTX PRO 6000 96GB", "RTX 6000 Blackwell"),
        memory_bytes=_gib(94.97), nominal_memory_bytes=96 * GIB, memory_source=_OOM + "antirez/ds4/issues/431",
        bf16_flops=503.8e12, fp16_flops=503.8e12, tf32_flops=251.9e12, fp32_flops=126.0e12, memory_bytes_per_s=1792e9,
        architecture="blackwell", compute_capability=(12, 0), multiprocessors=188, gpus_per_node=4,
        intra_node=via.PCIE_5_X16, inter_node=via.ETHERNET_10G.shared_by(4), node_source=_WORKSTATION,
        source="NVIDIA RTX PRO Blackwell architecture whitepaper: 24064 cores at 2617 MHz",
    ),
    Gpu(
        name="RTX-PRO-6000-Server", full_name="NVIDIA RTX PRO 6000 Blackwell Server Edition",
        aliases=("RTX PRO 6000 SE",),
        memory_bytes=_gib(94.97), nominal_memory_bytes=96 * GIB,
        memory_source=_LOG + "RTX PRO 6000 Blackwell Server Edition, 94.97 GiB",
        bf16_flops=480e12, fp16_flops=480e12, tf32_flops=240e12, fp32_flops=120e12, memory_bytes_per_s=1597e9,
        architecture="blackwell", compute_capability=(12, 0), multiprocessors=188, gpus_per_node=8,
        intra_node=via.PCIE_5_X16, inter_node=via.ETHERNET_100G.shared_by(8), node_source=_SERVER,
        source="NVIDIA RTX PRO 6000 Blackwell Server Edition page; tensor: 4 and 2 x fp32, as the Workstation",
    ),
    # Memory that the processor shares. No rate of GB10 for fp32 accumulation is published.
    Gpu(
        name="DGX-Spark", full_name="NVIDIA GB10", aliases=("NVIDIA DGX Spark", "GB10 Grace Blackwell"),
        memory_bytes=_gib(121.69), nominal_memory_bytes=128 * GIB,
        memory_source="PyTorch's total, github.com/unslothai/unsloth/pull/10283 (119.6 to 121.7 GiB by firmware)",
        fp32_flops=29.7e12, memory_bytes_per_s=273e9, compute_capability=(12, 1), multiprocessors=48, unified_memory=True,
        gpus_per_node=1, inter_node=via.ROCE_200G, node_source="NVIDIA DGX Spark: one ConnectX-7 adapter",
        source="NVIDIA DGX Spark user guide: 6144 cores (here at 2418 MHz), 273 GB/s",
    ),
    # AMD. MI200: PyTorch sees each of the two dies of a MI250X as a GPU, and so does this table.
    Gpu(
        name="MI210", full_name="AMD Instinct MI210", aliases=("MI210-64GB",),
        memory_bytes=65520 * _MIB, nominal_memory_bytes=64 * GIB,
        memory_source="llama.cpp --list-devices in a public log: 65520 MiB",
        bf16_flops=181e12, fp16_flops=181e12, fp32_flops=45.3e12, memory_bytes_per_s=1638.4e9,
        architecture="cdna2", runtime="rocm", compute_capability=(9, 0), multiprocessors=104, gpus_per_node=4,
        intra_node=via.XGMI_MI210, inter_node=via.ETHERNET_100G.shared_by(4),
        node_source="assumed: one 4-card hive in a server with one 100 Gb/s port (no maker's reference node)",
        source="AMD Instinct MI210 brochure (matrix rates)",
    ),
    Gpu(
        name="MI250X", full_name="AMD Instinct MI250X (one of two dies)",
        aliases=("AMD Instinct MI250X", "AMD Instinct MI250X/MI250", "MI250X-GCD", "MI250X-64GB"),
        memory_bytes=65520 * _MIB, nominal_memory_bytes=64 * GIB, memory_source=_PRINTED + "65520MB",
        bf16_flops=191.5e12, fp16_flops=191.5e12, fp32_flops=47.9e12, memory_bytes_per_s=1638.4e9,
        architecture="cdna2", runtime="rocm", compute_capability=(9, 0), multiprocessors=110, gpus_per_node=8,
        intra_node=via.XGMI_MI250X, inter_node=via.SLINGSHOT_200G.shared_by(2),
        node_source="OLCF Frontier: 4 boards, 8 dies, 4 adapters",
        host_memory_bytes=512 * GIB,
        source="AMD Instinct MI250X specifications (matrix rates), halved: they are of both dies",
    ),
    Gpu(
        name="MI300A", full_name="AMD Instinct MI300A", aliases=("MI300A-128GB", "AMD Instinct MI300A Accelerator"),
        memory_bytes=96 * GIB, nominal_memory_bytes=128 * GIB,
        memory_source="ROCm documentation, MI300A system optimization: device allocations reach 96 of 128 GiB by default",
        bf16_flops=980.6e12, fp16_flops=980.6e12, tf32_flops=490.3e12, fp32_flops=122.6e12, memory_bytes_per_s=5.3e12,
        architecture="cdna3", runtime="rocm", compute_capability=(9, 4), multiprocessors=228, unified_memory=True, gpus_per_node=4,
        intra_node=via.XGMI_MI300A, inter_node=via.SLINGSHOT_200G,
        node_source="LLNL El Capitan: 4 accelerators and 4 adapters per node", source="AMD Instinct MI300A data sheet",
    ),
    Gpu(
        name="MI300X", full_name="AMD Instinct MI300X", aliases=("MI300", "MI300X-192GB", "AMD Instinct MI300X OAM"),
        memory_bytes=196592 * _MIB, nominal_memory_bytes=192 * GIB, memory_source=_PRINTED + "196592MB",
        bf16_flops=1307.4e12, fp16_flops=1307.4e12, tf32_flops=653.7e12, fp32_flops=163.4e12, memory_bytes_per_s=5.3e12,
        architecture="cdna3", runtime="rocm", compute_capability=(9, 4), multiprocessors=304, gpus_per_node=8,
        intra_node=via.XGMI_MI300X, inter_node=via.INFINIBAND_NDR,
        node_source="Azure ND MI300X v5: one adapter per GPU",
        host_memory_bytes=1850 * GIB, source="AMD Instinct MI300X data sheet",
    ),
    Gpu(
        name="MI325X", full_name="AMD Instinct MI325X", aliases=("MI325", "MI325X-256GB"),
        memory_bytes=_gib(255.98), nominal_memory_bytes=256 * GIB, memory_source=_OOM_LOG + "255.98 GiB",
        bf16_flops=1307.4e12, fp16_flops=1307.4e12, tf32_flops=653.7e12, fp32_flops=163.4e12, memory_bytes_per_s=6.0e12,
        architecture="cdna3", runtime="rocm", compute_capability=(9, 4), multiprocessors=304, gpus_per_node=8,
        intra_node=via.XGMI_MI300X, inter_node=via.ROCE_400G, node_source="assumed: one 400 Gb/s adapter per GPU",
        source="AMD Instinct MI325X data sheet",
    ),
    Gpu(
        name="MI355X", full_name="AMD Instinct MI355X", aliases=("MI355", "MI355X-288GB"),
        memory_bytes=_gib(287.98), nominal_memory_bytes=288 * GIB, memory_source=_OOM_LOG + "287.98 GiB",
        bf16_flops=2516.6e12, fp16_flops=2516.6e12, fp32_flops=157.3e12, memory_bytes_per_s=8.0e12,
        architecture="cdna4", runtime="rocm", compute_capability=(9, 5), multiprocessors=256, gpus_per_node=8,
        intra_node=via.XGMI_MI355X, inter_node=via.ROCE_400G, node_source="assumed: one 400 Gb/s adapter per GPU",
        source="AMD Instinct MI355X specifications: 2.5 PF, of which the digits are 1024 cores x 512 FMA x 2400 MHz",
    ),
    Gpu(
        name="Strix-Halo", full_name="AMD Radeon 8060S (Ryzen AI Max+ 395, 128 GB)",
        aliases=("Radeon 8060S Graphics", "AMD Radeon 8060S Graphics", "Ryzen AI Max+ 395", "AI Max+ 395", "8060S"),
        memory_bytes=64038 * _MIB, nominal_memory_bytes=128 * GIB,
        memory_source=_PRINTED + "64038MB, half of the memory; the kernel parameter ttm.pages_limit raises it",
        memory_bytes_per_s=256e9, multiprocessors=20, runtime="rocm", unified_memory=True, gpus_per_node=1,
        source="AMD Ryzen AI Max+ 395 specifications: 256-bit LPDDR5X-8000; 20 work-group processors, as PyTorch prints",
    ),
    # Accelerators with a runtime of their own. Only their memory is known here.
    Gpu(
        name="Gaudi-3", full_name="Intel Gaudi 3", aliases=("Gaudi3", "HL-325L", "Gaudi 3 128GB"),
        memory_bytes=128 * GIB, nominal_memory_bytes=128 * GIB, memory_source=_NOMINAL,
        runtime="other", gpus_per_node=8, source="Intel Gaudi 3 AI accelerator white paper: 128 GB of HBM2e",
    ),
    Gpu(
        name="Trainium-2", full_name="AWS Trainium 2", aliases=("Trainium2", "Trn2", "Trn2 96GB"),
        memory_bytes=96 * GIB, nominal_memory_bytes=96 * GIB, memory_source=_NOMINAL,
        runtime="other", gpus_per_node=16, source="AWS Neuron documentation, Trainium2 architecture: 96 GiB, trn2.48xlarge",
    ),
    Gpu(
        name="TPU-v6e", full_name="Google TPU v6e", aliases=("TPU v6e", "Trillium", "v6e"),
        memory_bytes=32 * GIB, nominal_memory_bytes=32 * GIB, memory_source=_NOMINAL,
        runtime="other", gpus_per_node=8, source="Google Cloud TPU documentation, v6e: 32 GB of HBM per chip",
    ),
)
# fmt: on
