"""Whether colocated vLLM starts: its share of a GPU must hold its weights, and keys and values of one sequence of the longest length.

Source: trl 1.16, generation/vllm_generation.py, `_init_vllm`; vLLM 0.31, v1/worker/gpu_worker.py, `determine_available_memory`;
v1/core/kv_cache_utils.py, `_check_enough_kv_cache_memory`; config/model.py, `_get_and_verify_max_len`, `verify_with_parallel_config`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import combinations, product
from typing import Any

from fsdp_advisor.errors import UsageError
from fsdp_advisor.hardware.gpu import Gpu
from fsdp_advisor.job.fields import dashed
from fsdp_advisor.job.generation import Generation
from fsdp_advisor.job.plan import Plan
from fsdp_advisor.memory.device import vllm_bytes
from fsdp_advisor.model.profile import Parameter, Profile, Unit
from fsdp_advisor.policies.dtypes import HALF_BYTES, ITEM_BYTES
from fsdp_advisor.units import format_gib

OTHER_BYTES = 5 * 2**29
"""Bytes of the share for vLLM's activations, CUDA graphs and libraries, which only advice counts.

Published logs of vLLM for models of 1 to 8B: activations 0.2 to 1.8 GiB, other memory 0.05 to 0.3 GiB (vllm-project/vllm issue 14452), CUDA
graphs 0.4 GiB (gpustack/runner pull request 251).
"""
SETTINGS = {
    "vllm_max_model_length": "max_length",
    "vllm_tensor_parallel_size": "tensor_parallel",
    "vllm_gpu_memory_utilization": "memory_utilization",
}
"""The options that decide whether vLLM starts, the least costly first, and the fields of `Generation`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmShare:
    """vLLM's share of a GPU, and what it must hold at least. `length`: tokens of the longest sequence that vLLM takes.

    `remedies`: settings with which vLLM starts, by option.
    """

    share_bytes: int
    weight_bytes: int
    cache_bytes: int
    length: int
    remedies: tuple[dict[str, int | float], ...] = ()

    @property
    def missing_bytes(self) -> int:
        """By how much the share is too small; 0 if vLLM may start."""
        return max(0, self.weight_bytes + self.cache_bytes - self.share_bytes)

    @property
    def text(self) -> str:
        """Why vLLM does not start, and settings with which it does."""
        cache = f" and {format_gib(self.cache_bytes)} of keys and values of one sequence of {self.length:,} tokens"
        ways = map(_options, self.remedies)
        return (
            f"vLLM does not start: its share of each GPU, {format_gib(self.share_bytes)}, does not hold {format_gib(self.weight_bytes)} of "
            f"weights{cache if self.cache_bytes else ''}"
            + (
                f"; it starts with {', or '.join(ways)}"
                if self.remedies
                else "; --vllm-mode server runs it on other GPUs"
            )
        )


def _options(settings: Mapping[str, int | float]) -> str:
    """Settings of vLLM as options of the command line.

    >>> _options({"vllm_max_model_length": 2048, "vllm_gpu_memory_utilization": 0.35})
    '--vllm-max-model-length 2048 and --vllm-gpu-memory-utilization 0.35'
    """
    return " and ".join(f"{dashed(option)} {value}" for option, value in settings.items())


def with_settings(plan: Plan, settings: Mapping[str, Any]) -> Plan:
    """The plan with these settings of vLLM."""
    assert plan.generation is not None
    return replace(plan, generation=_changed(plan.generation, settings))


def vllm_refusal(profile: Profile, plan: Plan) -> UsageError | None:
    """Why vLLM does not take its settings for the model: its number of GPUs or its longest sequence; None if it takes them."""
    generation, heads, limit = plan.generation, profile.text_config.get("num_attention_heads"), _limit(profile)
    if generation is None:
        return None
    if limit is not None and (generation.max_length or 0) > limit:
        return UsageError(
            f"vLLM does not take --vllm-max-model-length {generation.max_length}: sequences of the model have at most {limit:,} tokens",
            hint=f"--vllm-max-model-length is at most {limit}",
        )
    if not isinstance(heads, int) or heads % generation.tensor_parallel == 0:
        return None
    sizes = ", ".join(map(str, _parallel_sizes(profile, plan)))
    return UsageError(
        f"vLLM does not divide {heads} attention heads among {generation.tensor_parallel} GPUs",
        hint=f"--vllm-tensor-parallel-size can be one of {sizes}",
    )


def vllm_share(profile: Profile, plan: Plan, gpu: Gpu) -> VllmShare | None:
    """The share of vLLM on the training GPUs; None if it does not run there."""
    generation = plan.generation
    if generation is None or generation.generator != "colocate":
        return None
    found = _share(profile, plan, gpu, generation)
    if not found.missing_bytes:
        return found
    every = [
        {option: getattr(settings, SETTINGS[option]) for option in options}
        for options, settings in _starting(profile, plan, gpu, tuple(SETTINGS))
    ]
    fewest = min(map(len, every), default=0)
    return replace(found, remedies=tuple(remedy for remedy in every if len(remedy) == fewest))


def starting_settings(profile: Profile, plan: Plan, gpu: Gpu, options: Iterable[str]) -> dict[str, Any]:
    """Values of some of the `options` with which vLLM starts, as few and as little costly as possible; empty if it starts without, or
    with none.
    """
    share = vllm_share(profile, plan, gpu)
    if share is None or not share.missing_bytes:
        return {}
    changed, settings = next(_starting(profile, plan, gpu, tuple(o for o in SETTINGS if o in options)), ((), None))
    return {option: getattr(settings, SETTINGS[option]) for option in changed}


def _starting(
    profile: Profile, plan: Plan, gpu: Gpu, options: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], Generation]]:
    """For each set of the options, the fewest first: the settings with the lowest values with which vLLM starts, if there are any."""
    generation = plan.generation
    assert generation is not None
    values: dict[str, list[int] | list[float]] = {
        "vllm_max_model_length": [plan.seq_len] if plan.seq_len <= (_limit(profile) or plan.seq_len) else [],
        "vllm_tensor_parallel_size": [n for n in _parallel_sizes(profile, plan) if n > generation.tensor_parallel],
        "vllm_gpu_memory_utilization": [n / 20 for n in range(1, 20) if n / 20 > generation.memory_utilization],
    }
    for size in range(1, len(options) + 1):
        for changed in combinations(options, size):
            costly_first = changed[::-1]  # so that these vary last
            tried = (
                _changed(generation, dict(zip(costly_first, row, strict=True)))
                for row in product(*(values[option] for option in costly_first))
            )
            found = next((each for each in tried if _starts(_share(profile, plan, gpu, each))), None)
            if found is not None:
                yield changed, found


def _changed(generation: Generation, settings: Mapping[str, Any]) -> Generation:
    return replace(generation, **{SETTINGS[option]: value for option, value in settings.items()})


def _starts(share: VllmShare) -> bool:
    """Whether a share also has room for what is not counted exactly."""
    return share.weight_bytes + share.cache_bytes + OTHER_BYTES <= share.share_bytes


def _parallel_sizes(profile: Profile, plan: Plan) -> list[int]:
    """The numbers of a node's ranks that can share a copy of the model: divisors of all ranks and of the attention heads."""
    heads = profile.text_config.get("num_attention_heads")
    return [
        n
        for n in range(1, plan.ranks_per_node + 1)
        if plan.world_size % n == 0 and isinstance(heads, int) and heads % n == 0
    ]


def _share(profile: Profile, plan: Plan, gpu: Gpu, generation: Generation) -> VllmShare:
    """The share without remedies. Only matrices are divided among GPUs. The rest is small and is counted as divided, too."""
    length = generation.max_length or _longest(profile) or plan.seq_len
    return VllmShare(
        share_bytes=vllm_bytes(gpu, generation),
        weight_bytes=-(-_weight_bytes(profile) // generation.tensor_parallel),
        cache_bytes=_cache_bytes(profile, length, generation.tensor_parallel),
        length=length,
    )


@lru_cache(maxsize=16)
def _weight_bytes(profile: Profile) -> int:
    """Bytes of vLLM's copy of the model. A base in 4 bits is packed there too; TRL does not start vLLM with one in 8 bits.

    vLLM computes in the checkpoint's dtype, or in 16 bits if that is fp32 (config/model.py, `_resolve_auto_dtype`).
    """

    def element_bytes(parameter: Parameter) -> int:
        return ITEM_BYTES[str(parameter.dtype)] if parameter.role == "quantized" else HALF_BYTES

    return profile.base.bytes_of(element_bytes)


_UNSCALED = ("su", "longrope", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling")
"""Kinds of RoPE whose factor does not multiply the longest sequence, because the configuration's length has it already."""


def _ropes(profile: Profile) -> list[Mapping[str, Any]]:
    """The settings of RoPE, of each kind of layers if they differ. transformers 5 writes `rope_parameters`, older versions
    `rope_scaling`.
    """
    given = profile.text_config.get("rope_parameters") or profile.text_config.get("rope_scaling")
    if not isinstance(given, dict):
        return []
    return [rope for rope in given.values() if isinstance(rope, dict)] or [given]


def _kind(rope: Mapping[str, Any]) -> str:
    return str(rope.get("rope_type") or rope.get("type") or "default")


def _limit(profile: Profile) -> int | None:
    """Tokens of the longest sequence that vLLM takes; None if it is not known. Gemma 3's configuration has RoPE's factor in it."""
    longest = profile.max_seq_len
    if longest is None or "gemma3" in str(profile.text_config.get("model_type")):
        return longest
    factors = [rope["factor"] for rope in _ropes(profile) if rope.get("factor") and _kind(rope) not in _UNSCALED]
    return int(longest * factors[-1]) if factors else longest


def _longest(profile: Profile) -> int | None:
    """The model's longest sequence, which vLLM takes unless another is given; with LongRoPE the longest of its pretraining."""
    original = profile.text_config.get("original_max_position_embeddings")
    is_long = any(_kind(rope) in ("longrope", "su") for rope in _ropes(profile))
    return original if is_long and isinstance(original, int) else _limit(profile)


@lru_cache(maxsize=256)
def _cache_bytes(profile: Profile, length: int, tensor_parallel: int) -> int:
    """The least bytes of keys and values of one sequence on a GPU. Layers of kinds that are not known below count as 0. If the
    configuration does not say which layers have a sliding window, all are assumed to have it.
    """
    config = profile.text_config
    stack = next((s for s in profile.stacks if s.depth == config.get("num_hidden_layers")), None)
    if stack is None:
        return 0
    kinds = config.get("layer_types")
    windows = [profile.window] * stack.depth
    if isinstance(kinds, list) and len(kinds) == stack.depth:
        windows = [None if kind == "full_attention" else profile.window for kind in kinds]
    shared = config.get("num_kv_shared_layers") or 0
    return sum(
        min(length, window or length) * _layer_bytes(unit, config, tensor_parallel)
        for unit, window in list(zip(stack.layers(), windows, strict=True))[: stack.depth - shared]
    )


def _layer_bytes(unit: Unit, config: Mapping[str, Any], tensor_parallel: int) -> int:
    """Bytes of a token's keys and values in a layer. Heads are divided among GPUs; the latent vector of MLA is not."""
    heads = config.get("num_attention_heads")
    kv_heads = config.get("num_key_value_heads") or heads
    if not isinstance(heads, int) or not isinstance(kv_heads, int):
        return 0
    rows = {
        p.name.split(".")[1]: (p.matrix or p.shape)[0]
        for p in unit.parameters
        if p.role != "adapter" and p.name.startswith("self_attn.") and len(p.matrix or p.shape) == 2
    }
    if "kv_a_proj_with_mqa" in rows:
        return rows["kv_a_proj_with_mqa"] * HALF_BYTES
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    if rows.get("k_proj") != kv_heads * head_dim:
        return 0
    return (rows["k_proj"] + rows.get("v_proj", 0)) * HALF_BYTES // min(tensor_parallel, kv_heads)
