"""What a request leaves open: the GPU, the number of nodes, the precision, the sequence length, and notes on what is assumed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fsdp_advisor.errors import UsageError
from fsdp_advisor.hardware import (
    Gpu,
    attached_gpu,
    find_gpu,
    find_interconnect,
    usual_gpus_per_node,
    usual_nodes,
)
from fsdp_advisor.job.adaptation import adaptation_of
from fsdp_advisor.job.adapter_fields import QuantStorage
from fsdp_advisor.job.batch_layout import flattens
from fsdp_advisor.job.choices import Precision, default_seq_len
from fsdp_advisor.job.fp8 import FP8_FROM
from fsdp_advisor.job.frameworks import FRAMEWORK_NAMES, FRAMEWORKS
from fsdp_advisor.job.images import images_of
from fsdp_advisor.job.request import AnyRequest, EstimateRequest
from fsdp_advisor.job.search_request import RecommendRequest
from fsdp_advisor.model.gpu_tape_key import FLASH_FROM
from fsdp_advisor.model.images import layout_of
from fsdp_advisor.model.multimodal import vision_parts
from fsdp_advisor.model.profile import Profile
from fsdp_advisor.model.tasks import task_of
from fsdp_advisor.units import format_gib

DEFAULT_GPU = "H100-80GB"


def settled(request: AnyRequest) -> AnyRequest:
    """The request with what is implied for options that were not given: the number of nodes and fp16 without bf16 by its GPU,
    checkpointing by its framework, a frozen base in the dtype in which its framework loads it, and in a search a frozen base in
    bf16, or in 4 bits that several GPUs can share.

    `assumed` names them. A request that was constructed directly is taken as it is.
    """
    if not request.given:
        return request
    gpu, _ = choose_gpu(request.gpu)
    found: dict[str, Any] = {}
    varies_gpus = isinstance(request, RecommendRequest) and request.find == "gpus"
    if "nnodes" not in request.given and not varies_gpus and (nodes := usual_nodes(request.gpus, gpu)) > 1:
        found["nnodes"] = nodes
    if "precision" not in request.given and gpu.lacks_bf16:
        found["precision"] = "fp16-mixed"
    elif _stores_half(request):
        found["dtype"] = "bfloat16"
    if isinstance(request, RecommendRequest) and _may_choose_storage(request):
        found["bnb_4bit_quant_storage"] = SHARDED_STORAGE[found.get("precision", request.precision)]
    is_open = "activation_checkpointing" not in request.given and not isinstance(request, RecommendRequest)
    usual = FRAMEWORKS[request.framework].checkpointing
    if is_open and usual != "none":
        found["activation_checkpointing"] = usual
    return replace(request, **found, assumed=frozenset(found))


def _stores_half(request: EstimateRequest) -> bool:
    """Whether the frozen base of adapters is stored in bf16: transformers loads a checkpoint in its own dtype.

    TRL loads fp32 unless it gets a dtype; a search gives it one. FSDP1 flattens one dtype, and adapters are in fp32; the Trainer
    makes units of adapters. A base in 4 or 8 bits is stored in that, and PEFT prepares its other weights in fp32.
    """
    facts = FRAMEWORKS[request.framework]
    if (
        request.dtype != "auto"
        or request.precision != "bf16-mixed"
        or (request.backend == "fsdp1" and not facts.uses_trainer)
    ):
        return False
    chooses = isinstance(request, RecommendRequest) and "dtype" not in request.given
    adaptation = adaptation_of(request)
    has_dtype = bool(adaptation.peft) and not (adaptation.quantization and adaptation.prepared)
    return has_dtype and (chooses or not facts.loads_fp32)


SHARDED_STORAGE: dict[Precision, QuantStorage] = {
    "fp32": "float32",
    "bf16": "bfloat16",
    "bf16-mixed": "bfloat16",
    "fp16-mixed": "float16",
}
"""The dtype of packed weights that FSDP shards and does not cast: that in which it computes."""


def _may_choose_storage(request: RecommendRequest) -> bool:
    """Whether a search may choose the dtype that holds packed weights. It changes no value, and a single GPU has nothing to shard."""
    varies_gpus = request.find in ("gpus", "gpu-type")
    return request.load_in_4bit and "bnb_4bit_quant_storage" not in request.given and (request.gpus > 1 or varies_gpus)


def memory_notes(gpu: Gpu) -> list[str]:
    """Notes on a GPU whose memory is shared, or whose runtime is not modelled."""
    notes = []
    if gpu.unified_memory:
        notes.append(
            f"{gpu.name} shares its memory with the processor: the operating system and the job's host memory need their part "
            f"of the {format_gib(gpu.memory_bytes)}, and offloading to the host saves nothing"
        )
    if gpu.runtime == "other":
        notes.append(
            f"for {gpu.name} memory is counted as on a GPU, against the advertised {format_gib(gpu.memory_bytes)}: what its own "
            "runtime, compiler and communication need is not known"
        )
    return notes


def assumption_notes(request: EstimateRequest, gpu: Gpu, *, is_packed: bool = False) -> list[str]:
    """A note per option that `settled` filled in. `is_packed`: adapters are trained on a GPTQ or AWQ checkpoint."""
    notes = []
    if "nnodes" in request.assumed:
        per_node = f"{request.gpus // request.nnodes} GPUs each"
        notes.append(
            f"{request.nnodes} nodes of {per_node} are assumed, because {gpu.name} usually has "
            f"{usual_gpus_per_node(gpu)} per node; nnodes changes it"
        )
    if "precision" in request.assumed:
        notes.append(f"precision {request.precision} is assumed, because {gpu.name} does not compute in bf16")
    if "activation_checkpointing" in request.assumed:
        notes.append(
            f"{FRAMEWORK_NAMES[request.framework]} checkpoints activations unless activation_checkpointing is none"
        )
    if "bnb_4bit_quant_storage" in request.assumed:
        notes.append(
            f"the weights in 4 bits are stored as {request.bnb_4bit_quant_storage}, which FSDP shards; bnb_4bit_quant_storage changes it"
        )
    adaptation = adaptation_of(request)
    notes += _dtype_notes(request, is_packed=is_packed or bool(adaptation.quantization))
    if adaptation.quantization and adaptation.prepared and request.precision != "fp32":
        notes.append(FP32_AROUND_PACKED)
    return notes


FP32_AROUND_PACKED = (
    "PEFT prepares a quantized model with norms, embeddings and head in fp32, so hidden states between layers are in fp32, and "
    "activations can need more than a base in 4 or 8 bits saves"
)
"""Source: peft 0.21, utils/other.py, prepare_model_for_kbit_training."""


def _dtype_notes(request: EstimateRequest, *, is_packed: bool) -> list[str]:
    """A note on the dtype in which the frozen base of adapters is stored, unless the job says it."""
    if "dtype" in request.assumed:
        if is_packed:
            return []
        if FRAMEWORKS[request.framework].loads_fp32:
            name = FRAMEWORK_NAMES[request.framework]
            return [
                f"the frozen base is stored in bfloat16, for which {name} needs dtype bfloat16; without it {name} loads fp32"
            ]
        return [
            "the frozen base is stored in bfloat16, as transformers loads most checkpoints; dtype float32 doubles it"
        ]
    if request.dtype != "auto" or is_packed or not adaptation_of(request).peft:
        return []
    if request.precision == "fp16-mixed":
        return ["the frozen base is stored in fp32; one that is loaded in float16 is not modelled"]
    if not stores_frozen_base_in_fp32(request):
        return []
    if FRAMEWORKS[request.framework].loads_fp32:
        why = f"as {FRAMEWORK_NAMES[request.framework]} loads it"
    elif request.backend == "fsdp1":
        why = "because FSDP1 flattens one dtype, which is that of adapters"
    else:
        why = "as bf16-mixed has it"
    return [f"the frozen base is stored in fp32, {why}; dtype bfloat16 halves it"]


def batch_notes(request: EstimateRequest) -> list[str]:
    """Notes on a batch that is packed, padding-free or padded."""
    notes = []
    if request.padding_fraction:
        notes.append(f"speeds count the {1 - request.padding_fraction:.0%} of the tokens that are not padding")
    if flattens(request.packing, request.padding_free):
        notes.append(
            "sequences in one row are taken to be as long as seq_len; more and shorter ones take less time in attention"
        )
        if request.attention != "flash_attention_2":
            notes.append(
                f"{request.attention} attention makes a mask of all pairs of tokens in the row; flash_attention_2 needs none"
            )
    return notes


def stores_frozen_base_in_fp32(request: EstimateRequest) -> bool:
    """Whether adapters are trained on a base in fp32: it is not quantized, and its dtype is neither given nor assumed to be bf16."""
    adaptation = adaptation_of(request)
    whole = bool(adaptation.peft) and not adaptation.quantization
    return whole and request.precision == "bf16-mixed" and request.dtype != "bfloat16"


def image_notes(request: EstimateRequest, profile: Profile | None) -> list[str]:
    """Notes on the images of a sample. Raises UsageError if the model reads none, or their tokens leave no room for text."""
    images = images_of(request)
    if images is None:
        return []
    if profile is None:
        raise UsageError(f"{request.model} is a bare parameter count: it reads no images", hint="name a model")
    layout = layout_of(profile.config, images)
    seq_len, _ = sequence_length(request, profile)
    tokens, least = images.per_sample * layout.tokens, layout.least_seq_len(images)
    if seq_len < least:
        raise UsageError(
            f"the images of a sample are {images.per_sample} x {layout.tokens:,} = {tokens:,} tokens, which leaves no text of seq_len "
            f"{seq_len}",
            hint=f"use --seq-len {least} or more, or smaller images",
        )
    tiles = f" in {layout.tiles} tiles" if layout.tiles > 1 else ""
    notes = [
        f"each image is {layout.tokens:,} tokens{tiles}: {tokens:,} of the {seq_len:,} tokens of a sample are images"
        + (f"; {layout.assumed}" if layout.assumed else "")
    ]
    if not request.freeze and not request.use_peft:
        parts = " or ".join(f"--freeze {name}" for name in vision_parts(profile))
        notes.append(f"the vision tower and the projector are trained; to leave them untrained: {parts}")
    return notes


def sequence_length(request: EstimateRequest, profile: Profile | None) -> tuple[int, list[str]]:
    """The request's sequence length, or else the model's, and notes. A model that reads images has only its own length."""
    if profile is not None and not (task := task_of(profile.task)).takes_any_length:
        own = profile.image_tokens or 1
        left_aside = request.seq_len not in (None, own)
        return own, [f"seq_len {request.seq_len} is ignored: the model reads {task.of_length(own)}"] * left_aside
    limit = profile.max_seq_len if profile else None
    seq_len = request.seq_len or default_seq_len(limit)
    past = limit is not None and seq_len > limit
    return seq_len, [f"seq_len {seq_len} is past the model's maximum of {limit} tokens"] * past


def gpu_of(request: EstimateRequest) -> tuple[Gpu, list[str]]:
    """The request's GPU with the request's network between nodes, and notes on assumed values."""
    gpu, notes = choose_gpu(request.gpu)
    if request.interconnect is not None:
        gpu = replace(gpu, inter_node=find_interconnect(request.interconnect, gpu, request.gpus // request.nnodes))
    return gpu, notes


def check_kernels(request: EstimateRequest, gpu: Gpu) -> None:
    """Raises UsageError if the GPU lacks kernels that the request needs.

    Source for flash attention: flash-attn 2.8, README, and its checks in csrc/flash_attn/flash_api.cpp: Ampere or newer, in half precision.
    """
    able = gpu.compute_capability
    before_ampere = able is not None and able < FLASH_FROM
    if request.attention == "flash_attention_2" and request.precision == "fp32":
        raise UsageError(
            "flash_attention_2 computes in bf16 and fp16 alone, not in fp32",
            hint="use --attention sdpa, or --precision bf16-mixed",
        )
    if request.attention == "flash_attention_2" and before_ampere:
        raise UsageError(
            f"flash-attn has no kernels for {gpu.name}", hint="use --attention sdpa, or name a GPU from Ampere on"
        )
    if request.compile != "none" and before_ampere:
        raise UsageError(
            f"compiled layers are not modelled on {gpu.name}", hint="leave --compile out, or name a GPU from Ampere on"
        )
    if request.fp8 != "none" and able is not None and able < FP8_FROM:
        raise UsageError(
            f"{gpu.name} does not multiply in fp8", hint="leave --fp8 out, or name a GPU from Ada or Hopper on"
        )


def choose_gpu(name: str | None) -> tuple[Gpu, list[str]]:
    """The named GPU, or else the attached one, or else the default; and a note if no name was given."""
    if name is not None:
        return find_gpu(name), []
    if (gpu := attached_gpu()) is not None:
        return gpu, [f"GPU: {gpu.name}, the one attached"]
    return find_gpu(DEFAULT_GPU), [f"GPU: none attached, so {DEFAULT_GPU} is assumed; say --gpu for another"]
