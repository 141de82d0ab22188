"""Parse the name or rate of the network between nodes into the link of one GPU."""

from __future__ import annotations

import difflib
import re
from dataclasses import replace

from fsdp_advisor.errors import UsageError
from fsdp_advisor.hardware import links as via
from fsdp_advisor.hardware.gpu import Gpu
from fsdp_advisor.hardware.links import LINKS, Link

BETWEEN_NODES: tuple[Link, ...] = tuple(link for link in LINKS if link.kind not in ("nvlink", "pcie", "xgmi"))
"""The links that a network name can select."""

_ONE_PER_NODE = ("ethernet", "efa")
"""Kinds of networks with one adapter per node, which its GPUs share. Networks of other kinds have one adapter per GPU."""

_GENERATIONS = {"hdr": via.INFINIBAND_HDR, "ndr": via.INFINIBAND_NDR, "xdr": via.INFINIBAND_XDR}
_ALIASES: dict[str, Link] = {
    "infiniband": via.INFINIBAND_NDR, "ib": via.INFINIBAND_NDR,
    "ib200": via.INFINIBAND_HDR, "ib400": via.INFINIBAND_NDR, "ib800": via.INFINIBAND_XDR,
    "infiniband200": via.INFINIBAND_HDR, "infiniband400": via.INFINIBAND_NDR, "infiniband800": via.INFINIBAND_XDR,
    "roce": via.ROCE_400G, "ethernet": via.ETHERNET_100G, "tcp": via.ETHERNET_100G,
    "slingshot": via.SLINGSHOT_200G, "slingshot11": via.SLINGSHOT_200G,
}  # fmt: skip
_GENERATION = re.compile(r"(?:infiniband|ib)?(hdr|ndr|xdr)(?:200|400|800)?")
_RATE = re.compile(r"(?:(\d+)\s*[x*]\s*)?(\d+(?:\.\d+)?)\s*([GTM])(i?)([bB])(?:ps|it/s|/s|it)?", re.IGNORECASE)
_WORDS = re.compile(r"(?<=\d)(?:gbps|gbits?|gbe|gb|g)(?:s|ps)?$")
_WITHOUT_RATE = ("infiniband", "ib", "roce", "ethernet", "tcp", "slingshot", "efa")
"""Names of networks that exist with several rates."""


def leaves_rate_open(name: str) -> bool:
    """Whether a network's name says no rate, so that a usual one is assumed.

    >>> leaves_rate_open("Ethernet"), leaves_rate_open("100GbE"), leaves_rate_open("NDR")
    (True, False, False)
    """
    return _key(name) in _WITHOUT_RATE


def find_interconnect(name: str, gpu: Gpu, gpus_per_node: int) -> Link:
    """One GPU's share of the network between nodes.

    `name` is a network (`InfiniBand NDR`, `ndr`, `RoCE 200 Gb/s`, `EFA`, `100GbE`) or a rate in one direction (`400Gb/s` or
    `50GB/s` per GPU, `8x200Gb/s` per node). Lower-case b means bits, upper-case B bytes. InfiniBand, RoCE and Slingshot have
    one adapter per GPU; Ethernet and EFA have one per node, which its GPUs share. Raises UsageError with the nearest names.

    >>> from fsdp_advisor.hardware import find_gpu
    >>> find_interconnect("ndr", find_gpu("H100"), 8).bytes_per_s, find_interconnect("100GbE", find_gpu("H100"), 8).bytes_per_s
    (50000000000.0, 1562500000.0)
    >>> find_interconnect("400Gb/s", find_gpu("H100"), 8).bytes_per_s, find_interconnect("4x50GB/s", find_gpu("H100"), 8).bytes_per_s
    (50000000000.0, 25000000000.0)
    """
    text = name.strip()
    link = _named(text, gpu)
    if link is not None:
        return link.shared_by(gpus_per_node) if link.kind in _ONE_PER_NODE else link
    match = _RATE.fullmatch(text)
    if match is None:
        raise UsageError(f"unknown interconnect {name!r}", hint=_nearest(text))
    adapters, number, scale, _, letter = match.groups()
    rate = float(number) * {"m": 1e6, "g": 1e9, "t": 1e12}[scale.lower()] / (8 if letter == "b" else 1)
    if adapters is not None:
        rate *= int(adapters) / gpus_per_node
    if not 1e6 <= rate <= 1e13:
        raise UsageError(f"interconnect {name!r} is {rate:g} bytes/s per GPU", hint="from 10Mb/s to 10TB/s")
    kind = "ethernet" if gpu.inter_node is None else gpu.inter_node.kind
    return Link(name=text, kind=kind, bytes_per_s=rate, source="as requested; latency of the GPU's default network")


def _key(name: str) -> str:
    key = re.sub(r"[^a-z0-9]", "", name.casefold())
    return _WORDS.sub("", key)


def _named(name: str, gpu: Gpu) -> Link | None:
    key = _key(name)
    if key == "efa":
        return {"hopper": via.EFA_3200G, "blackwell": via.EFA_3200G, "volta": via.EFA_100G}.get(
            gpu.architecture or "", via.EFA_400G
        )
    if (generation := _GENERATION.fullmatch(key)) is not None:
        return _GENERATIONS[generation[1]]
    known = _ALIASES | {_key(link.name): link for link in BETWEEN_NODES}
    if (link := known.get(key)) is not None:
        return link
    if re.fullmatch(r"\d+(?:\.\d+)?\s*gbe", name.casefold()) or key.startswith("ethernet"):
        bits = re.findall(r"\d+(?:\.\d+)?", name)
        if bits:
            return replace(via.ETHERNET_100G, name=f"Ethernet {bits[0]} Gb/s", bytes_per_s=float(bits[0]) * 1e9 / 8)
    return None


def _nearest(name: str) -> str:
    if name.replace(".", "", 1).isdecimal():
        return f"a rate needs its unit: {name}Gb/s or {name}GB/s per GPU"
    by_key = {_key(link.name): link.name for link in BETWEEN_NODES} | {
        k: link.name for k, link in (_ALIASES | _GENERATIONS).items()
    }
    near = difflib.get_close_matches(_key(name)[:64], by_key, n=4, cutoff=0.6)
    names = list(dict.fromkeys(by_key[key] for key in near))[:3]
    other = "a rate per GPU such as 400Gb/s or 50GB/s also works"
    return f"did you mean {' or '.join(names)}? {other}" if names else f"InfiniBand NDR, RoCE, EFA, 100GbE ...; {other}"
