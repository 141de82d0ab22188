"""Jobs that cover every export. Independent options vary together instead of in all combinations."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import cycle, product
from typing import Any, get_args

from matrix import of_today

from fsdp_advisor.export import TARGETS, Job
from fsdp_advisor.job.choices import OptimizerName, Precision
from fsdp_advisor.job.compatibility import OFFLOADS, label, mesh_of
from fsdp_advisor.job.frameworks import FRAMEWORKS
from fsdp_advisor.job.optimizers import optimizer_refusal
from fsdp_advisor.job.plan import Plan

RANKS = 8
VOCABULARY, HIDDEN = 32_000, 4096


def plan(strategy: str, backend: str, nnodes: int = 1, *, gpus: int = RANKS, **changes: Any) -> Plan:
    values = {"mesh": mesh_of(strategy, gpus, nnodes), "seq_len": 2048, **changes}
    return Plan(strategy=strategy, backend=backend, **values)


def job(of: Plan, **changes: Any) -> Job:
    values = {
        "label": label(of.strategy, of.offload),
        "model_name": "meta-llama/Llama-2-7b-hf",
        "task": "causal-lm",
        "layer_classes": ("LlamaDecoderLayer",),
        "largest_parameter_elements": VOCABULARY * HIDDEN,
        "gpu_name": "H100-80GB",
        "gpu_memory_bytes": 85_029_158_912,
        "hidden_size": HIDDEN,
        "peaks": {"peak_tensor_bytes": 24_957_548_032},
        "host_bytes_per_node": 2**33,
    }
    return Job(plan=of, **(values | changes))


def plans() -> Iterator[Plan]:
    """Plans with all combinations of strategy, backend, offload, device, precision, checkpointing and nodes; the other options take
    turns.
    """
    optimizers, steps, prefetches = cycle(get_args(OptimizerName)), cycle((1, 4)), cycle(("pre", "post", "none"))
    attentions = cycle(("sdpa", "eager", "flash_attention_2"))
    for offload, able in OFFLOADS.items():
        for strategy, backends in able.items():
            for backend, precision, checkpointing, nodes in product(
                backends, get_args(Precision), ("none", "full"), (1, 2)
            ):
                for device in ("cpu", "nvme") if backend == "deepspeed" and offload != "none" else ("cpu",):
                    base = plan(strategy, backend, nodes, offload=offload, offload_device=device, precision=precision)
                    yield replace(
                        base,
                        activation_checkpointing=checkpointing,
                        gradient_accumulation_steps=next(steps),
                        micro_batch_size=2,
                        optim="adamw_torch_fused",
                        attention=next(attentions),
                        backward_prefetch=next(prefetches),
                    )
                    yield replace(
                        base,
                        optim=next(o for o in optimizers if optimizer_refusal(o, backend, offload, "torch") is None),
                    )


def jobs(target: str) -> list[Job]:
    """A fifth of the jobs that the target supports, all with `CASES=all`. Every second one is estimated for the target's framework."""
    found = [j for p in plans() if TARGETS[target].unsupported(j := job(p)) is None]
    own = TARGETS[target].framework
    values = {"framework": own, "loss_code": FRAMEWORKS[own].default_loss}
    jobs = [replace(j, plan=replace(j.plan, **values)) if i % 2 else j for i, j in enumerate(found)]
    return list(of_today(jobs, 5))  # five, because no option of `plans` repeats with that period
