"""The options about the machines: GPUs, nodes, the network, and the memory of GPU and host."""

from __future__ import annotations

from functools import partial
from typing import Annotated

from fsdp_advisor.job.choices import MAX_GPUS
from fsdp_advisor.job.fields import Rule
from fsdp_advisor.units import parse_bytes

rule = partial(Rule, group="Hardware")

Gpus = Annotated[int, rule("the total number of ranks, one per GPU", ge=1, le=MAX_GPUS)]
Nnodes = Annotated[
    int, rule("the number of nodes", default="as many as the GPUs need at the usual number per node", ge=1, le=MAX_GPUS)
]
Gpu = Annotated[
    str | None,
    rule(
        "the name of a GPU (case and punctuation are ignored: H100, rtx4090), or a memory size such as 24GiB",
        metavar="GPU",
        default="the attached GPU, else H100-80GB",
        max_length=128,
    ),
]
Interconnect = Annotated[
    str | None,
    rule(
        "the network between nodes: a name (InfiniBand NDR, RoCE, EFA, 100GbE), or the rate of each GPU "
        "(400Gb/s, 50GB/s)",
        metavar="NAME",
        default="usual for the GPU",
        max_length=128,
    ),
]
AllocatorConf = Annotated[
    str | None,
    rule(
        "the settings of PyTorch's caching allocator, as in PYTORCH_ALLOC_CONF: expandable_segments:True",
        default="PyTorch's own; expandable segments with axolotl and torchtitan",
        metavar="CONF",
        max_length=1024,
    ),
]
HostMemory = Annotated[
    int | None,
    rule(
        "the host memory that the job may use on one node, with its unit, such as 512GiB",
        metavar="SIZE",
        default="unlimited",
        ge=2**30,
        le=2**60,
        parse=parse_bytes,
        example="512GiB",
    ),
]
