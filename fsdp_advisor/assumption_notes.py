"""Notes of a report on what a request leaves open and what is assumed for it."""

from __future__ import annotations

from collections.abc import Iterable, Set
from math import prod

from fsdp_advisor.assumptions import sequence_length, stores_frozen_base_in_fp32
from fsdp_advisor.engines.vllm import SETTINGS
from fsdp_advisor.errors import UsageError
from fsdp_advisor.hardware import Gpu, usual_gpus_per_node
from fsdp_advisor.job.adaptation import QUANTIZATION_OPTIONS, adaptation_of
from fsdp_advisor.job.batch_layout import flattens
from fsdp_advisor.job.choices import half_dtype
from fsdp_advisor.job.fields import dashed
from fsdp_advisor.job.frameworks import FIXED_SEGMENTS, FRAMEWORK_NAMES, FRAMEWORKS
from fsdp_advisor.job.images import images_of
from fsdp_advisor.job.optimizers import limit_of
from fsdp_advisor.job.plan import Plan
from fsdp_advisor.job.request import EstimateRequest
from fsdp_advisor.model.images import layout_of
from fsdp_advisor.model.multimodal import vision_parts
from fsdp_advisor.model.profile import Profile
from fsdp_advisor.policies.dtypes import ITEM_BYTES
from fsdp_advisor.units import format_count, format_gib


def memory_notes(gpu: Gpu) -> list[str]:
    """Notes on a GPU whose memory is shared, or whose runtime is not modelled."""
    notes = []
    if gpu.unified_memory:
        notes.append(
            f"{gpu.name} shares its memory with the processor: the operating system and the job's host memory need their part "
            f"of the {format_gib(gpu.memory_bytes)}, and offloading to the host saves nothing"
        )
    if not gpu.uses_torch_cuda:
        notes.append(
            f"for {gpu.name} memory is counted as on a GPU, against the advertised {format_gib(gpu.memory_bytes)}: the memory "
            "of its own runtime, compiler and communication library is not known"
        )
    return notes


def assumption_notes(request: EstimateRequest, gpu: Gpu, *, is_packed: bool = False) -> list[str]:
    """One note for each option that `assumptions.settled` filled in. `is_packed`: adapters are trained on a GPTQ or AWQ checkpoint."""
    notes = []
    if "nnodes" in request.assumed:
        per_node = f"{request.gpus // request.nnodes} GPUs each"
        usual = usual_gpus_per_node(gpu)
        divides = "" if request.gpus % usual == 0 else f", and {request.gpus} are not a multiple of {usual}"
        notes.append(
            f"{request.nnodes} nodes of {per_node} are assumed, because {gpu.name} usually has {usual} per node{divides}; "
            "--nnodes changes it"
        )
    if "precision" in request.assumed:
        notes.append(f"precision {request.precision} is assumed, because {gpu.name} does not compute in bf16")
    if "framework" in request.assumed:
        others = [n for n, f in FRAMEWORKS.items() if request.task in f.tasks and n != request.framework]
        too = f"; {' and '.join(FRAMEWORK_NAMES[n] for n in others)} has it too" if others else ""
        notes.append(f"framework {request.framework} is assumed, which has task {request.task}{too}")
    if "steps_per_generation" in request.assumed:
        notes.append(
            f"--steps-per-generation {request.steps_per_generation} is assumed, the smallest with which {request.gpus} GPUs generate whole "
            f"groups of {request.num_generations} completions; --micro-batch-size changes it too"
        )
    if "activation_checkpointing" in request.assumed:
        notes.append(
            f"{FRAMEWORK_NAMES[request.framework]} checkpoints activations unless --activation-checkpointing is none"
        )
    if "allocator_conf" in request.assumed:
        notes.append(
            f"{FRAMEWORK_NAMES[request.framework]}'s launcher sets PYTORCH_ALLOC_CONF={request.allocator_conf}; for a run without it"
            f" add --allocator-conf {FIXED_SEGMENTS}"
        )
    if FRAMEWORKS[request.framework].captures_graphs and not request.cuda_graphs:
        notes.append(
            f"no CUDA graph is assumed, as with --training.disable_cuda_graphs. By default {FRAMEWORK_NAMES[request.framework]} 0.3"
            " captures forward and backward in one and keeps gradients from step to step; --cuda-graphs estimates this"
        )
    if packed := request.assumed & set(request.set_by_framework) & set(QUANTIZATION_OPTIONS):
        notes.append(_packed_note(request, packed))
    elif "bnb_4bit_quant_storage" in request.assumed:
        notes.append(
            f"the weights in 4 bits are stored as {request.bnb_4bit_quant_storage}, which FSDP shards; --bnb-4bit-quant-storage changes it"
        )
    if chosen := [f"{dashed(name)} {getattr(request, name)}" for name in SETTINGS if name in request.assumed]:
        notes.append(
            f"{' and '.join(chosen)} {'is' if len(chosen) == 1 else 'are'} chosen: otherwise vLLM does not start"
        )
    adaptation = adaptation_of(request)
    if FRAMEWORKS[request.framework].trains_half and request.precision == "bf16-mixed" and not adaptation.peft:
        notes.append(
            f"{FRAMEWORK_NAMES[request.framework]} loads and trains bf16 weights; only DeepSpeed and FSDP1 make fp32 masters of them"
        )
    notes += _dtype_notes(request, is_packed=is_packed or bool(adaptation.quantization))
    if adaptation.quantization and adaptation.prepared and request.precision != "fp32":
        notes.append(FP32_AROUND_PACKED)
    return notes


def _packed_note(request: EstimateRequest, assumed: Set[str]) -> str:
    """A note on how the framework stores a base in 4 bits, as far as this is assumed."""
    ways = {
        "bnb_4bit_quant_storage": (
            f"stores weights in 4 bits as {request.bnb_4bit_quant_storage}",
            "--bnb-4bit-quant-storage",
        ),
        "use_bnb_nested_quant": ("quantizes their scales too", "--no-use-bnb-nested-quant"),
    }
    texts, options = zip(*(way for name, way in ways.items() if name in assumed), strict=True)
    said = f"{FRAMEWORK_NAMES[request.framework]} {' and '.join(texts)}"
    if FRAMEWORKS[request.framework].packed_storage == "compute":  # it has no setting for the dtype
        return (
            f"{said}; --no-use-bnb-nested-quant keeps the scales in fp32" if "use_bnb_nested_quant" in assumed else said
        )
    return f"{said}; {' and '.join(options)} {'change' if len(options) > 1 else 'changes'} it"


def backend_notes(request: EstimateRequest, plans: Iterable[Plan]) -> list[str]:
    """A note if the optimizer or the type of state dicts is the reason why rows have FSDP1."""
    if request.backend != "auto" or all(plan.backend != "fsdp1" for plan in plans):
        return []
    limit = limit_of(request.optim, "fsdp2", request.framework)
    if limit is None:
        is_local = request.state_dict_type == "local"
        return ["FSDP1 is assumed, because FSDP2 has no local state dicts"] if is_local else []
    return [
        f"FSDP1 is assumed, because {limit.reason}; another optimizer, such as --optim adamw_torch_8bit, runs with FSDP2"
    ]


FP32_AROUND_PACKED = (
    "PEFT prepares a quantized model with its other weights (norms, embeddings, head) in fp32; so hidden states between layers are in "
    "fp32, and activations can need more than a base in 4 or 8 bits saves"
)
"""Source: peft 0.21, utils/other.py, prepare_model_for_kbit_training."""


def _dtype_notes(request: EstimateRequest, *, is_packed: bool) -> list[str]:
    """A note on the dtype in which the frozen base of adapters is stored, if the request does not give it."""
    if "dtype" in request.assumed:
        if is_packed:
            return []
        stored = f"the frozen base is stored in {request.dtype}"
        if FRAMEWORKS[request.framework].loads_fp32:
            name = FRAMEWORK_NAMES[request.framework]
            return [f"{stored}, for which {name} needs --dtype {request.dtype}; without it {name} loads fp32"]
        if request.dtype == "float16":
            return [f"{stored}, which must be asked for when it is loaded; --dtype float32 doubles it"]
        return [f"{stored}, as transformers loads most checkpoints; --dtype float32 doubles it"]
    if request.dtype != "auto" or is_packed or not adaptation_of(request).peft:
        return []
    if not stores_frozen_base_in_fp32(request):
        return []
    if FRAMEWORKS[request.framework].loads_fp32:
        why = f"as {FRAMEWORK_NAMES[request.framework]} loads it"
    elif request.backend == "fsdp1":
        why = "because FSDP1 flattens one dtype, which is that of adapters"
    else:
        why = f"as {request.precision} has it"
    return [f"the frozen base is stored in fp32, {why}; --dtype {half_dtype(request.precision)} halves it"]


def batch_notes(request: EstimateRequest) -> list[str]:
    """Notes on a batch that is packed, padding-free or padded."""
    notes = []
    if request.padding_fraction:
        notes.append(f"speeds count the {1 - request.padding_fraction:.0%} of the tokens that are not padding")
    if flattens(request.packing, request.padding_free):
        notes.append(
            "each sequence of a row is assumed to have seq_len tokens; shorter sequences need less time in attention"
        )
        if request.attention != "flash_attention_2":
            notes.append(
                f"{request.attention} attention makes a mask of all pairs of tokens in the row; flash_attention_2 needs none"
            )
    return notes


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


def unquantized_notes(request: EstimateRequest, profile: Profile | None) -> list[str]:
    """A note if bitsandbytes is to quantize the base and quantizes none of its layers.

    Source: transformers 5.23, integrations/bitsandbytes.py, `replace_with_bnb_linear`: it compares types, so subclasses of nn.Linear, such
    as Falcon's, stay as they are.
    """
    if profile is None or not (request.load_in_4bit or request.load_in_8bit):
        return []
    if any(p.role == "quantized" for p, _ in profile.counted_parameters()):
        return []
    return [
        "no layer of the base is quantized: transformers quantizes modules of the type nn.Linear alone, and this model has linear layers of"
        " a type of its own; LoRA without --load-in-4bit and --load-in-8bit needs less memory"
    ]


def adapted_expert_notes(profile: Profile | None) -> list[str]:
    """Notes on experts that are 3-D parameters and not linear layers: they are not quantized, and often have no adapters.

    Source: bitsandbytes replaces modules `nn.Linear`; peft 0.21 adapts modules, and wraps those whose parameters have adapters: those that
    `target_parameters` names, and experts of types that had linear layers in transformers 4 (utils/transformers_weight_conversion.py).
    """
    if profile is None or not profile.config:
        return []
    parameters = list(profile.counted_parameters())
    frozen = [(p, n) for p, n in parameters if p.role == "expert" and len(p.shape) == 3 and not p.trainable]
    packed = sum(prod(p.matrix) * count for p, count in parameters if p.role == "quantized" and p.matrix is not None)
    adapters = [(p, count) for p, count in parameters if p.role == "adapter"]
    if not frozen or not adapters:
        return []
    experts = sum(p.elements * count for p, count in frozen)
    base = packed + sum(p.elements * count for p, count in parameters if p.role not in ("adapter", "quantized"))
    notes = []
    if packed:
        n_bytes = sum(p.elements * ITEM_BYTES[str(p.dtype)] * count for p, count in frozen)
        dtypes = " and ".join(sorted({str(p.dtype) for p, _ in frozen}))
        notes.append(
            f"{experts / base:.0%} of the base is not quantized: its experts are 3-D parameters, and bitsandbytes quantizes linear layers;"
            f" before an engine shards or casts them, they take {format_gib(n_bytes)} in {dtypes}; axolotl can pack them too "
            "(--framework axolotl --quantize-moe-experts)"
        )
    wrapped = tuple(p.name.partition(_WRAPPED)[0] + "." for p, _ in frozen if _WRAPPED in p.name)
    if wrapped:
        total = sum(p.elements * count for p, count in adapters)
        of_experts = sum(p.elements * count for p, count in adapters if p.name.startswith(wrapped))
        in_attention = (p.name.partition(".lora_")[0].rpartition(".")[2] for p, _ in adapters if "attn." in p.name)
        attention = ",".join(dict.fromkeys(in_attention))
        notes.append(
            f"the experts have adapters of their own: {format_count(of_experts)} of the {format_count(total)} parameters of adapters"
            + (f"; --lora-target-modules {attention} adapts attention alone" if attention else "")
        )
    else:
        notes.append(
            f"the experts, {experts / base:.0%} of the base, have no adapters, because they are 3-D parameters and not linear layers; "
            "--lora-target-parameters adds them by name"
        )
    return notes


_WRAPPED = ".base_layer."
"""The part that PEFT adds to the name of a parameter that it adapts."""
