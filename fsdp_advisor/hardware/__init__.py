"""GPUs and the links between them: typed tables with a source for every row, and look-ups by name.

`find_gpu` returns a GPU by name, `list_gpus` all of them, `attached_gpu` the one of this machine, `find_interconnect` a network.
"""

from fsdp_advisor.hardware.attached import attached_gpu
from fsdp_advisor.hardware.gpu import Gpu
from fsdp_advisor.hardware.gpus import GPUS
from fsdp_advisor.hardware.interconnects import find_interconnect, leaves_rate_open
from fsdp_advisor.hardware.links import LINKS, Link
from fsdp_advisor.hardware.lookup import find_gpu, list_gpus
from fsdp_advisor.hardware.nodes import usual_gpus_per_node, usual_host_bytes, usual_nodes

__all__ = [
    "GPUS",
    "LINKS",
    "Gpu",
    "Link",
    "attached_gpu",
    "find_gpu",
    "find_interconnect",
    "leaves_rate_open",
    "list_gpus",
    "usual_gpus_per_node",
    "usual_host_bytes",
    "usual_nodes",
]
