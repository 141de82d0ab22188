"""Textbook states of a bare parameter count: parameters P, gradients G and optimizer states O, divided as the backend divides them.

Source: Rajbhandari et al., ZeRO (arXiv:1910.02054), section 3: per GPU P + G + O, P + G + O/N, P + (G + O)/N, (P + G + O)/N. FSDP's ZeRO-2
differs: it keeps P/N and gathers whole parameters in the dtype of the computation from forward to the end of backward. DeepSpeed's O has
masters in every precision (`master_bytes`). DDP's buckets, and that DeepSpeed frees gradients between steps, are left out, as in the paper.
"""

from __future__ import annotations

from dataclasses import dataclass

from fsdp_advisor.engines.deepspeed.settings import master_bytes
from fsdp_advisor.job.plan import Plan
from fsdp_advisor.policies.optimizers import optimizer_of


@dataclass(frozen=True, slots=True, kw_only=True)
class TextbookStates:
    """Bytes of states on one GPU, and in the host memory of one node. `gathered`: bytes of the whole parameters that each step gathers."""

    parameters: int
    gradients: int
    optimizer: int
    host_per_node: int
    gathered: int = 0

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer


def textbook_states(parameters: int, plan: Plan) -> TextbookStates:
    """The textbook states of `parameters` trainable parameters.

    >>> from fsdp_advisor.job.plan import Plan
    >>> from fsdp_advisor.parallelism.mesh import Mesh
    >>> plan = Plan(strategy="zero2", backend="fsdp2", mesh=Mesh(dp_shard=4), seq_len=1, precision="fp32")
    >>> states = textbook_states(7_000_000_000, plan)
    >>> states.total, states.gathered
    (28000000000, 28000000000)
    """
    shards = plan.shard_degree
    by_deepspeed = plan.backend == "deepspeed"
    master = master_bytes(plan) if by_deepspeed else 0
    weight = plan.compute_bytes if by_deepspeed else plan.param_bytes
    stepping = optimizer_of(plan)
    moments = stepping.textbook_bytes(plan.param_bytes) * parameters
    optimizer = master * parameters
    paged = 0
    if stepping.is_paged and plan.offload == "none":
        paged = moments
    else:
        optimizer += moments
    sharded = {"ddp": (1, 1, 1), "zero1": (1, 1, shards)}
    if by_deepspeed:
        sharded["zero2"] = (1, shards, shards)
    p, g, o = sharded.get(plan.strategy, (shards, shards, shards))
    gathered = plan.compute_bytes * parameters if plan.strategy == "zero2" and not by_deepspeed else 0
    gpu = (-(-weight * parameters // p), -(-weight * parameters // g), -(-optimizer // o))
    host = -(-paged // o) * plan.ranks_per_node
    if plan.offload != "none":
        host += gpu[2] * plan.ranks_per_node
        gpu = (gpu[0], gpu[1], 0)
    if plan.offload == "parameters":
        host += (gpu[0] + gpu[1]) * plan.ranks_per_node
        gpu = (0, 0, 0)
    return TextbookStates(parameters=gpu[0], gradients=gpu[1], optimizer=gpu[2], host_per_node=host, gathered=gathered)
