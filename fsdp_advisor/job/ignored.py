"""Options that were given and have no effect on the answer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from fsdp_advisor.job.plan import Plan
from fsdp_advisor.job.request import EstimateRequest
from fsdp_advisor.job.search_request import RecommendRequest


def ignored_in_estimate(request: EstimateRequest, plans: Iterable[Plan]) -> Iterator[str]:
    """A note per option that no figure of an estimate with these plans depends on."""
    given = request.given
    if "interconnect" in given and request.interconnect is not None and request.nnodes == 1:
        yield "interconnect is ignored: all GPUs are in one node"
    for name in ("image_size", "image_max_pixels"):
        if getattr(request, name) is not None and not request.images_per_sample:
            yield f"{name} is ignored without images_per_sample"
    one_row = request.strategy != "all"  # all strategies include those with offload
    if one_row and "offload_device" in given and request.offload_device != "cpu" and request.offload == "none":
        yield "offload_device is ignored without offload"
    if "backward_prefetch" in given and request.backward_prefetch != "pre" and request.backend != "fsdp1":
        yield "backward_prefetch is ignored: only backend fsdp1 has it"
    if request.reshard_after_forward.isdecimal() and request.strategy in ("ddp", "zero1", "zero2"):
        yield f"reshard_after_forward is ignored: {request.strategy} keeps parameters after forward"
    if not request.use_orig_params and request.backend != "fsdp1":
        yield "use_orig_params is ignored: only backend fsdp1 has it"
    if request.zero_buckets is not None and all(plan.backend != "deepspeed" for plan in plans):
        yield "zero_buckets is ignored: only backend deepspeed has it"
    if request.state_dict_type != "auto":
        backend = {"ddp": "ddp", "zero1": "deepspeed"}.get(request.strategy, request.backend)
        if backend in ("ddp", "deepspeed"):
            yield f"state_dict_type is ignored: backend {backend} saves in its own way"


def ignored_in_search(request: RecommendRequest) -> Iterator[str]:
    """A note per option of a search that the recommendation does not depend on."""
    given = request.given
    if "price" in given and request.price is not None and request.tokens is None:
        yield "price is ignored without tokens"
    if "seq_len" in given and request.seq_len is not None and request.find == "sequence":
        yield "seq_len is ignored: find sequence varies it"
    if "micro_batch_size" in given and request.micro_batch_size is not None and request.find == "batch":
        yield "micro_batch_size is ignored: find batch varies it"
    if "gpu" in given and request.gpu is not None and request.find == "gpu-type":
        yield "gpu is ignored: find gpu-type varies it"
