"""States of a bare parameter count: by the textbook, and as a backend keeps them.

Source of the textbook: Rajbhandari et al., ZeRO (arXiv:1910.02054), section 3. With parameters P, gradients G and optimizer states O on N
GPUs, a GPU keeps P + G + O (DDP), P + G + O/N (ZeRO-1), P + (G + O)/N (ZeRO-2) or (P + G + O)/N (ZeRO-3). In mixed precision P and G have 2
bytes per parameter each, and O has masters of 4 bytes. DDP and FSDP keep P and G in 4 bytes each, without masters. The sums are equal if P,
G and O are divided by the same number.

Backends differ. FSDP's ZeRO-2 keeps P/N and gathers whole parameters in the dtype of the computation from forward to the end of backward.
DeepSpeed's O has masters in every precision (`master_bytes`). Neither the textbook's states nor the backends' contain DDP's buckets. Both
contain the gradients, although DeepSpeed frees them between steps.
"""

from __future__ import annotations

from dataclasses import dataclass

from fsdp_advisor.engines.deepspeed.settings import master_bytes
from fsdp_advisor.job.plan import Plan
from fsdp_advisor.policies.optimizers import optimizer_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """Bytes of states on one GPU, and in the host memory of one node."""

    parameters: int
    gradients: int
    optimizer: int
    host_per_node: int

    @property
    def on_gpu(self) -> int:
        return self.parameters + self.gradients + self.optimizer


def textbook_states(parameters: int, plan: Plan) -> Kept:
    """The textbook's states of `parameters` trainable parameters.

    >>> from fsdp_advisor.parallelism.mesh import Mesh
    >>> plan = Plan(strategy="zero2", backend="fsdp2", mesh=Mesh(dp_shard=4), seq_len=1, precision="fp32")
    >>> textbook_states(7_000_000_000, plan).on_gpu
    49000000000
    """
    has_masters = plan.mixed and (plan.backend == "deepspeed" or plan.strategy == "zero2")
    weight, master = (plan.compute_bytes, plan.param_bytes) if has_masters else (plan.param_bytes, 0)
    return _kept(parameters, plan, weight, master, _divided(plan))


def backend_states(parameters: int, plan: Plan) -> Kept:
    """What the plan's backend keeps of `parameters` trainable parameters.

    >>> from fsdp_advisor.parallelism.mesh import Mesh
    >>> plan = Plan(strategy="zero2", backend="fsdp2", mesh=Mesh(dp_shard=4), seq_len=1, precision="fp32")
    >>> backend_states(7_000_000_000, plan).on_gpu
    28000000000
    """
    if plan.backend == "deepspeed":
        return _kept(parameters, plan, plan.compute_bytes, master_bytes(plan), _divided(plan))
    ranks = plan.shard_degree
    return _kept(parameters, plan, plan.param_bytes, 0, (ranks, ranks, ranks))


def whole_parameter_bytes(parameters: int, plan: Plan) -> int:
    """Bytes of the whole parameters that FSDP's ZeRO-2 gathers in each step; 0 for other strategies."""
    gathers = plan.strategy == "zero2" and plan.backend != "deepspeed"
    return plan.compute_bytes * parameters if gathers else 0


def _divided(plan: Plan) -> tuple[int, int, int]:
    """Over how many ranks the paper divides parameters, gradients and optimizer states. DDP has one shard."""
    ranks = plan.shard_degree
    return {"zero1": (1, 1, ranks), "zero2": (1, ranks, ranks)}.get(plan.strategy, (ranks, ranks, ranks))


def _kept(parameters: int, plan: Plan, weight: int, master: int, divided: tuple[int, int, int]) -> Kept:
    """States of `weight` bytes per parameter, as many per gradient, and `master` bytes plus the optimizer's; `divided` says over how many
    ranks.
    """
    stepping = optimizer_of(plan)
    moments = stepping.textbook_bytes(plan.param_bytes) * parameters
    paged = moments if stepping.is_paged and plan.offload == "none" else 0
    p, g, o = divided
    states = (
        -(-weight * parameters // p),
        -(-weight * parameters // g),
        -(-(master * parameters + moments - paged) // o),
    )
    host = -(-paged // o) * plan.ranks_per_node
    if plan.offload != "none":
        host += states[2] * plan.ranks_per_node
        states = (states[0], states[1], 0)
    if plan.offload == "parameters":
        host += (states[0] + states[1]) * plan.ranks_per_node
        states = (0, 0, 0)
    return Kept(parameters=states[0], gradients=states[1], optimizer=states[2], host_per_node=host)
