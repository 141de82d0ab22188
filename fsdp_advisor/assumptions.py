"""Chooses values for what a request leaves open: the GPU, the nodes, the precision, the framework, the sequence length."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fsdp_advisor.errors import UsageError
from fsdp_advisor.hardware import Gpu, attached_gpu, find_gpu, find_interconnect, leaves_rate_open, usual_nodes
from fsdp_advisor.job.adaptation import adaptation_of, may_store_half
from fsdp_advisor.job.choices import Precision, compute_dtype, default_seq_len, half_dtype
from fsdp_advisor.job.fields import fields_of
from fsdp_advisor.job.frameworks import FRAMEWORKS, options_of_framework
from fsdp_advisor.job.generation import least_micro_batch
from fsdp_advisor.job.request import AnyRequest, EstimateRequest
from fsdp_advisor.job.search_request import RecommendRequest
from fsdp_advisor.model.profile import Profile
from fsdp_advisor.model.tasks import task_of

DEFAULT_GPU = "H100-80GB"
_GROUPING = (
    "steps_per_generation", "num_generations", "micro_batch_size", "gradient_accumulation_steps", "global_batch_size",
)  # fmt: skip
"""The options that decide whether GRPO generates whole groups of completions."""


def settled(request: AnyRequest) -> AnyRequest:
    """The request with assumed values for options that were not given.

    The GPU decides the number of nodes, and fp16 if it lacks bf16. The task decides the framework, and GRPO's groups of completions the
    micro-batches of a generation. The framework decides checkpointing, the allocator's settings, the dtype of a frozen base and how one in
    4 bits is stored. A search chooses checkpointing and GRPO's micro-batch itself; there a frozen base is in bf16, or in 4 bits with a
    dtype of storage that FSDP can shard.

    `assumed` names these options; what was assumed before is assumed anew. A request that was constructed directly is returned unchanged.
    """
    if not isinstance(request, EstimateRequest):
        raise UsageError(
            f"a request is needed, not {request!r}", hint="keywords describe the job, as in model='gpt2', gpus=8"
        )
    if not request.given:
        return request
    known = fields_of(type(request))
    request = replace(request, **{name: known[name].default for name in request.assumed}, assumed=frozenset())
    gpu, _ = choose_gpu(request.gpu)
    found: dict[str, Any] = {}
    if "framework" not in request.given and request.task not in FRAMEWORKS[request.framework].tasks:
        found["framework"] = "trl"  # it has every task
        request = replace(request, framework="trl")
    if not isinstance(request, RecommendRequest) and request.given.isdisjoint(_GROUPING):
        steps = least_micro_batch(request, gpus=request.gpus, accumulation=1)  # as many sequences on each GPU
        found |= {"steps_per_generation": steps} if steps > 1 else {}
    finds_number = isinstance(request, RecommendRequest) and request.find == "gpus"
    if "nnodes" not in request.given and not finds_number and (nodes := usual_nodes(request.gpus, gpu)) > 1:
        found["nnodes"] = nodes
    if "precision" not in request.given and gpu.lacks_bf16:
        found["precision"] = "fp16-mixed"
    if _loads_frozen_base_in_half(request, precision := found.get("precision", request.precision)):
        found["dtype"] = half_dtype(precision)
    if isinstance(request, RecommendRequest) and _may_choose_storage(request):
        found["bnb_4bit_quant_storage"] = compute_dtype(precision)  # FSDP then shards the packed weights without a cast
    of_framework = options_of_framework(request.framework, precision, in_4bit=request.load_in_4bit)
    if isinstance(request, RecommendRequest):
        of_framework.pop("activation_checkpointing", None)  # a search chooses it
    if not gpu.uses_torch_cuda:
        of_framework.pop("allocator_conf", None)
    found |= {name: value for name, value in of_framework.items() if name not in request.given}
    return replace(request, **found, assumed=frozenset(found))


def _loads_frozen_base_in_half(request: EstimateRequest, precision: Precision) -> bool:
    """Whether the frozen base of adapters is loaded in 16 bits if no dtype is given: transformers loads a checkpoint in its own dtype.

    TRL loads fp32 unless it gets a dtype; a search gives it one. FSDP1 can flatten only parameters of one dtype, and adapters are in fp32;
    only the Trainer puts adapters in units of their own. A base in 4 or 8 bits keeps that format, and PEFT converts its other weights to
    fp32.
    """
    facts = FRAMEWORKS[request.framework]
    if (
        request.dtype != "auto"
        or precision not in ("bf16-mixed", "fp16-mixed")
        or (request.backend == "fsdp1" and not facts.uses_trainer)
    ):
        return False
    chooses = isinstance(request, RecommendRequest) and "dtype" not in request.given
    adaptation = adaptation_of(request)
    if not may_store_half(adaptation, precision):
        return False
    has_dtype = bool(adaptation.peft) and not (adaptation.quantization and adaptation.prepared)
    return has_dtype and (chooses or not facts.loads_fp32)


def _may_choose_storage(request: RecommendRequest) -> bool:
    """Whether a search chooses the dtype that stores 4-bit weights. The dtype changes no value, only whether several GPUs can shard
    them.
    """
    may_shard = request.gpus > 1 or request.find in ("gpus", "gpu-type")
    return request.load_in_4bit and "bnb_4bit_quant_storage" not in request.given and may_shard


def keeps_packed_base_whole(request: EstimateRequest) -> bool:
    """Whether FSDP2 would leave a base in 4 bits whole on every rank: it is stored in integers, and the framework does not shard those."""
    is_integer = request.load_in_4bit and request.bnb_4bit_quant_storage == "uint8"
    return is_integer and request.gpus > 1 and not FRAMEWORKS[request.framework].shards_integers


def stores_frozen_base_in_fp32(request: EstimateRequest) -> bool:
    """Whether adapters are trained on a base in fp32 that could be in 16 bits. The base is not quantized, and 16 bits are neither given nor
    assumed.
    """
    adaptation = adaptation_of(request)
    whole = bool(adaptation.peft) and not adaptation.quantization
    is_mixed = request.precision in ("bf16-mixed", "fp16-mixed") and may_store_half(adaptation, request.precision)
    return whole and is_mixed and request.dtype in ("auto", "float32")


def sequence_length(request: EstimateRequest, profile: Profile | None) -> tuple[int, list[str]]:
    """The request's sequence length, or else the model's, and notes. A model that reads images has only its own length. Raises UsageError
    if the model has no positions for the length.
    """
    if profile is not None and not (task := task_of(profile.task)).takes_any_length:
        own = profile.image_tokens or 1
        left_aside = request.seq_len not in (None, own)
        return own, [f"seq_len {request.seq_len} is ignored: the model reads {task.of_length(own)}"] * left_aside
    limit = profile.max_seq_len if profile else None
    seq_len = request.seq_len or default_seq_len(limit)
    past = limit is not None and seq_len > limit
    if profile is not None and is_past_table(profile, seq_len):
        raise UsageError(
            f"{profile.name} has a table of {limit} positions, so sequences of {seq_len} tokens end with an IndexError",
            hint=f"--seq-len {limit} or less",
        )
    return seq_len, [f"seq_len {seq_len} is past the model's maximum of {limit} tokens"] * past


def is_past_table(profile: Profile, seq_len: int) -> bool:
    """Whether the model's table of positions has fewer than `seq_len`."""
    return profile.max_seq_len is not None and seq_len > profile.max_seq_len and profile.has_position_table


def gpu_of(request: EstimateRequest) -> tuple[Gpu, list[str]]:
    """The request's GPU with the request's network between nodes, and notes on assumed values."""
    gpu, notes = choose_gpu(request.gpu)
    if request.interconnect is not None:
        link = find_interconnect(request.interconnect, gpu, request.gpus // request.nnodes)
        gpu = replace(gpu, inter_node=link)
        if leaves_rate_open(request.interconnect):
            notes = [
                *notes,
                f"interconnect {request.interconnect}: {link.name} is assumed; give its rate, such as 25GbE or 400Gb/s",
            ]
    return gpu, notes


def choose_gpu(name: str | None) -> tuple[Gpu, list[str]]:
    """The named GPU, or else the attached one, or else the default; and a note if no name was given."""
    if name is not None:
        return find_gpu(name), []
    if (gpu := attached_gpu()) is not None:
        return gpu, [f"GPU: {gpu.name} (attached to this machine)"]
    return find_gpu(DEFAULT_GPU), [f"GPU: none attached, so {DEFAULT_GPU} is assumed; --gpu names another"]
