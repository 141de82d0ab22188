"""The links of a GPU: inside a node, to the host, and between nodes.

Every rate is the raw rate of one direction. Vendors often quote the sum of both directions (NVLink 4: "900 GB/s" is
450 GB/s each way); this table contains half of that. Collectives reach 70 to 90 % of a rate; `timing` models that.
"""

from dataclasses import dataclass, replace
from typing import Literal

LinkKind = Literal["nvlink", "pcie", "xgmi", "ethernet", "slingshot", "infiniband", "roce", "efa"]

# NCCL's own cost model (hwLatencies in src/graph/tuning.cc), ring, Simple protocol, seconds per hop.
_NCCL_NVLINK_S = 3.4e-6
_NCCL_PCIE_S = 5.7e-6
_NCCL_NETWORK_S = 14.0e-6
_NCCL = "; latency: NCCL's cost model, ring and Simple protocol, per hop"


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One GPU's connection to other GPUs.

    `bytes_per_s` is per direction and per GPU, over all lanes. LINKS contains the full rate of a network adapter that a node's
    GPUs share; `shared_by` returns one GPU's share, which is the value of `Gpu.inter_node`.
    """

    name: str
    kind: LinkKind
    bytes_per_s: float
    latency_s: float | None = None  # one hop; None if no figure is published
    peer_bytes_per_s: float | None = None  # to a single other GPU, if that is less than the total; None: the same
    source: str

    def shared_by(self, gpus: int) -> "Link":
        """The share of this adapter that each of `gpus` GPUs has if all send at once. Raises ValueError if `gpus` < 1.

        >>> ETHERNET_100G.shared_by(8).bytes_per_s
        1562500000.0
        """
        if gpus < 1:
            raise ValueError(f"{self.name} cannot be shared by {gpus} GPUs")
        if gpus == 1:
            return self
        return replace(self, name=f"{self.name} / {gpus} GPUs", bytes_per_s=self.bytes_per_s / gpus)


# fmt: off
# NVLink: links per GPU x bytes per second of one link, one way.
NVLINK_2 = Link(
    name="NVLink 2", kind="nvlink", bytes_per_s=6 * 25e9, latency_s=_NCCL_NVLINK_S,
    source="NVIDIA V100 datasheet: 300 GB/s both ways over 6 links" + _NCCL,
)
NVLINK_3 = Link(
    name="NVLink 3", kind="nvlink", bytes_per_s=12 * 25e9, latency_s=_NCCL_NVLINK_S,
    source="NVIDIA A100 datasheet: 600 GB/s both ways over 12 links" + _NCCL,
)
NVLINK_3_A800 = Link(
    name="NVLink 3 (A800)", kind="nvlink", bytes_per_s=8 * 25e9, latency_s=_NCCL_NVLINK_S,
    source="Reuters, November 2022: A800 at 400 GB/s both ways where A100 has 600" + _NCCL,
)
NVLINK_4 = Link(
    name="NVLink 4", kind="nvlink", bytes_per_s=18 * 25e9, latency_s=_NCCL_NVLINK_S,
    source="NVIDIA H100 datasheet: 900 GB/s both ways over 18 links" + _NCCL,
)
NVLINK_4_H800 = Link(
    name="NVLink 4 (H800)", kind="nvlink", bytes_per_s=8 * 25e9, latency_s=_NCCL_NVLINK_S,
    source="ISCA 2025, Insights into DeepSeek-V3: H800 at 400 GB/s both ways where H100 has 900" + _NCCL,
)
NVLINK_5 = Link(
    name="NVLink 5", kind="nvlink", bytes_per_s=18 * 50e9, latency_s=_NCCL_NVLINK_S,
    source="NVIDIA DGX B200 datasheet: 1.8 TB/s both ways over 18 links" + _NCCL,
)

# PCIe x16: transfers per second x 16 lanes x 128/130 coding / 8 bits.
PCIE_3_X16 = Link(
    name="PCIe 3 x16", kind="pcie", bytes_per_s=8e9 * 16 * 128 / 130 / 8, latency_s=_NCCL_PCIE_S,
    source="PCI-SIG: 8 GT/s per lane, 128b/130b" + _NCCL,
)
PCIE_4_X16 = Link(
    name="PCIe 4 x16", kind="pcie", bytes_per_s=16e9 * 16 * 128 / 130 / 8, latency_s=_NCCL_PCIE_S,
    source="PCI-SIG: 16 GT/s per lane, 128b/130b" + _NCCL,
)
PCIE_4_X8 = Link(
    name="PCIe 4 x8", kind="pcie", bytes_per_s=16e9 * 8 * 128 / 130 / 8, latency_s=_NCCL_PCIE_S,
    source="PCI-SIG: 16 GT/s per lane, 128b/130b, 8 lanes" + _NCCL,
)
PCIE_5_X16 = Link(
    name="PCIe 5 x16", kind="pcie", bytes_per_s=32e9 * 16 * 128 / 130 / 8, latency_s=_NCCL_PCIE_S,
    source="PCI-SIG: 32 GT/s per lane, 128b/130b" + _NCCL,
)
PCIE_5_X8 = Link(
    name="PCIe 5 x8", kind="pcie", bytes_per_s=32e9 * 8 * 128 / 130 / 8, latency_s=_NCCL_PCIE_S,
    source="PCI-SIG: 32 GT/s per lane, 128b/130b, 8 lanes" + _NCCL,
)

# xGMI (AMD Infinity Fabric) is a mesh: a pair of GPUs has one link, not the total.
XGMI_MI210 = Link(
    name="xGMI (MI210)", kind="xgmi", bytes_per_s=3 * 50e9, peer_bytes_per_s=50e9,
    source="AMD Instinct MI210 brochure: 3 links, 300 GB/s both ways, with the bridge of a 4-card hive",
)
XGMI_MI250X = Link(
    name="xGMI (MI250X)", kind="xgmi", bytes_per_s=7 * 50e9, peer_bytes_per_s=50e9,
    source="ROCm documentation, MI250 microarchitecture: 50 GB/s per link and way; 7 of a die's 8 go to other dies",
)
XGMI_MI300X = Link(
    name="xGMI (MI300X)", kind="xgmi", bytes_per_s=7 * 64e9, peer_bytes_per_s=64e9,
    source="AMD Instinct MI300X data sheet: 7 links of 128 GB/s both ways, one to each other GPU",
)
XGMI_MI300A = Link(
    name="xGMI (MI300A)", kind="xgmi", bytes_per_s=3 * 128e9, peer_bytes_per_s=128e9,
    source="AMD CDNA 3 white paper: two links of 128 GB/s both ways to each of the other 3 accelerators of a node",
)
XGMI_MI355X = Link(
    name="xGMI (MI355X)", kind="xgmi", bytes_per_s=7 * 76.8e9, peer_bytes_per_s=76.8e9,
    source="AMD Instinct MI355X data sheet: 7 links of 153.6 GB/s both ways, one to each other GPU",
)

# Between nodes: one adapter, bits per second / 8.
ETHERNET_10G = Link(name="Ethernet 10 Gb/s", kind="ethernet", bytes_per_s=10e9 / 8, source="IEEE 802.3ae")
ETHERNET_25G = Link(name="Ethernet 25 Gb/s", kind="ethernet", bytes_per_s=25e9 / 8, source="IEEE 802.3by")
ETHERNET_100G = Link(name="Ethernet 100 Gb/s", kind="ethernet", bytes_per_s=100e9 / 8, source="IEEE 802.3ba")
SLINGSHOT_200G = Link(
    name="Slingshot 11 200 Gb/s", kind="slingshot", bytes_per_s=200e9 / 8,
    source="OLCF, Frontier user guide: HPE Slingshot, 200 Gb/s per adapter",
)
INFINIBAND_HDR = Link(
    name="InfiniBand HDR 200 Gb/s", kind="infiniband", bytes_per_s=200e9 / 8, latency_s=_NCCL_NETWORK_S,
    source="NVIDIA ConnectX-6 datasheet" + _NCCL,
)
INFINIBAND_NDR = Link(
    name="InfiniBand NDR 400 Gb/s", kind="infiniband", bytes_per_s=400e9 / 8, latency_s=_NCCL_NETWORK_S,
    source="NVIDIA ConnectX-7 datasheet" + _NCCL,
)
INFINIBAND_XDR = Link(
    name="InfiniBand XDR 800 Gb/s", kind="infiniband", bytes_per_s=800e9 / 8, latency_s=_NCCL_NETWORK_S,
    source="NVIDIA ConnectX-8 datasheet" + _NCCL,
)
ROCE_200G = Link(
    name="RoCE 200 Gb/s", kind="roce", bytes_per_s=200e9 / 8, latency_s=_NCCL_NETWORK_S,
    source="NVIDIA ConnectX-6 datasheet" + _NCCL,
)
ROCE_400G = Link(
    name="RoCE 400 Gb/s", kind="roce", bytes_per_s=400e9 / 8, latency_s=_NCCL_NETWORK_S,
    source="NVIDIA ConnectX-7 and AMD Pollara 400 datasheets" + _NCCL,
)
EFA_100G = Link(name="EFA 100 Gb/s", kind="efa", bytes_per_s=100e9 / 8, source="AWS, p3dn.24xlarge: per node")
EFA_400G = Link(name="EFA 400 Gb/s", kind="efa", bytes_per_s=400e9 / 8, source="AWS, p4d and g6e.48xlarge: per node")
EFA_3200G = Link(name="EFA 3200 Gb/s", kind="efa", bytes_per_s=3200e9 / 8, source="AWS, p5.48xlarge: per node")

LINKS: tuple[Link, ...] = (
    NVLINK_2, NVLINK_3, NVLINK_3_A800, NVLINK_4, NVLINK_4_H800, NVLINK_5,
    PCIE_3_X16, PCIE_4_X16, PCIE_4_X8, PCIE_5_X16, PCIE_5_X8,
    XGMI_MI210, XGMI_MI250X, XGMI_MI300X, XGMI_MI300A, XGMI_MI355X,
    ETHERNET_10G, ETHERNET_25G, ETHERNET_100G, SLINGSHOT_200G,
    INFINIBAND_HDR, INFINIBAND_NDR, INFINIBAND_XDR, ROCE_200G, ROCE_400G,
    EFA_100G, EFA_400G, EFA_3200G,
)
# fmt: on
