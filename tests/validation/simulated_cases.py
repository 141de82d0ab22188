"""Jobs that are both simulated and predicted, one line each."""

from __future__ import annotations

from dataclasses import dataclass

from fsdp_advisor.estimator import make_request
from fsdp_advisor.job.compatibility import plans
from fsdp_advisor.job.plan import Plan


@dataclass(frozen=True)
class Case:
    model: str
    backend: str
    strategy: str
    gpus: int
    micro_batch_size: int
    seq_len: int
    precision: str = "bf16-mixed"
    activation_checkpointing: str = "none"
    attention: str = "sdpa"
    optim: str = "adamw_torch_fused"
    gradient_accumulation_steps: int = 1
    backward_prefetch: str = "pre"
    nnodes: int = 1
    framework: str = "torch"
    wrap: str = "layer"
    forward_prefetch: bool = False
    reshard_after_forward: str = "auto"

    def __str__(self) -> str:
        return "-".join(str(v) for v in vars(self).values()).replace("/", "_")


def plan_of(case: Case) -> Plan:
    request = make_request(vars(case))
    (plan,) = plans(request, seq_len=case.seq_len)
    return plan
