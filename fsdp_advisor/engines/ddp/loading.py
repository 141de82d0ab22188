"""Loading a model under DDP. Read in torch 2.13 and transformers 5.23."""

from __future__ import annotations

from fsdp_advisor.engines.quantized_loading import is_quantized_on_load, on_gpu
from fsdp_advisor.engines.transfer import LoadedCheckpoint, LoadMethod
from fsdp_advisor.engines.units import buffers
from fsdp_advisor.job.plan import Plan
from fsdp_advisor.model.profile import Profile
from fsdp_advisor.policies.dtypes import stored_bytes
from fsdp_advisor.program.storages import NO_STORAGES, Storages

LOADER_THREADS = 4
"""Threads that read and convert tensors. Source: transformers/core_model_loading.py, GLOBAL_WORKERS."""
BROADCAST_BUCKET_BYTES = 250 * 2**20
"""Size of one broadcast from rank 0. At most two broadcasts are in flight. Source: torch/nn/parallel/distributed.py,
broadcast_bucket_size."""


def load_methods(profile: Profile, plan: Plan) -> tuple[LoadMethod, ...]:
    """The methods of loading under DDP, the simplest to set up first.

    The GPU holds the model and, one after the other, the buckets of DDP's broadcast from rank 0 and DDP's gradient buckets.
    Source: torch/nn/parallel/distributed.py, _sync_module_states, _ddp_init_helper; reducer.cpp, initialize_buckets.
    """
    checkpoint = LoadedCheckpoint.of(profile, plan)
    weights, largest, gradient_buckets = NO_STORAGES, 0, 0
    for p, count in profile.counted_parameters():
        n_bytes = p.elements * stored_bytes(plan, p)
        weights += Storages.of(n_bytes, count)
        largest = max(largest, n_bytes)
        gradient_buckets += n_bytes * count if p.requires_grad else 0
    broadcast_buckets = min(weights.exact, 2 * (BROADCAST_BUCKET_BYTES + largest))
    buckets = max(gradient_buckets, broadcast_buckets) if plan.world_size > 1 else 0
    whole = weights.rounded + buffers(profile, plan.param_bytes).rounded
    gpu = whole + buckets
    if is_quantized_on_load(profile):
        return (on_gpu(profile, plan, whole_bytes=whole, gpu_bytes=gpu),)
    in_conversion = min(LOADER_THREADS * largest, checkpoint.private_bytes)
    return (
        LoadMethod(
            way="every_rank",
            how="from_pretrained on every rank, then .to(device)",
            gpu_bytes=gpu,
            first_rank_host_bytes=checkpoint.private_bytes,
            other_ranks_host_bytes=checkpoint.private_bytes,
            ranks_per_node=plan.ranks_per_node,
            mapped_bytes=checkpoint.mapped_bytes,
        ),
        LoadMethod(
            way="device_map",
            how='from_pretrained(device_map={"": local_rank}): each tensor goes straight to the GPU',
            gpu_bytes=gpu,
            first_rank_host_bytes=in_conversion,
            other_ranks_host_bytes=in_conversion,
            ranks_per_node=plan.ranks_per_node,
            mapped_bytes=checkpoint.mapped_bytes,
        ),
    )
