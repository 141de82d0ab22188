"""The node in which a GPU is usually found: how many GPUs and how much host memory it has."""

from fsdp_advisor.hardware.gpu import Gpu
from fsdp_advisor.hardware.gpus import GPUS

USUAL_GPUS_PER_NODE = 8


def usual_gpus_per_node(gpu: Gpu) -> int:
    """GPUs of the GPU's typical node, and USUAL_GPUS_PER_NODE if that is unknown.

    If the table only assumes a GPU's node, as for an RTX 4090, the number is USUAL_GPUS_PER_NODE too: such cards are sold in servers of
    eight.

    >>> from fsdp_advisor.hardware import find_gpu
    >>> [usual_gpus_per_node(find_gpu(name)) for name in ("H100", "GB200", "RTX 4090", "24GiB")]
    [8, 4, 8, 8]
    """
    if gpu.gpus_per_node is None or gpu.node_is_assumed:
        return max(gpu.gpus_per_node or 0, USUAL_GPUS_PER_NODE)
    return gpu.gpus_per_node


def usual_nodes(gpus: int, gpu: Gpu) -> int:
    """The assumed number of nodes of `gpus` GPUs: the fewest equal nodes with at most the usual number of GPUs each.

    >>> from fsdp_advisor.hardware import find_gpu
    >>> [usual_nodes(n, find_gpu("H100")) for n in (1, 8, 9, 12, 16, 64)]
    [1, 1, 3, 2, 2, 8]
    """
    at_most = usual_gpus_per_node(gpu)
    return next(nodes for nodes in range(-(-gpus // at_most), gpus + 1) if gpus % nodes == 0)


def usual_host_bytes(gpu: Gpu) -> int:
    """Bytes of host memory of the GPU's typical node; the largest value of the table if that is unknown.

    >>> from fsdp_advisor.hardware import find_gpu
    >>> from fsdp_advisor.units import GIB
    >>> [usual_host_bytes(find_gpu(name)) // GIB for name in ("A10G", "H100", "24GiB")]
    [768, 2048, 2048]
    """
    return gpu.host_memory_bytes or max(known.host_memory_bytes or 0 for known in GPUS)
