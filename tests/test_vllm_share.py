"""Whether colocated vLLM starts in its share of the training GPUs, and with which settings it does."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fsdp_advisor.engines.registry import model_refusal
from fsdp_advisor.engines.vllm import VllmShare, starting_settings, vllm_share, with_settings
from fsdp_advisor.hardware import find_gpu
from fsdp_advisor.job.compatibility import plans
from fsdp_advisor.job.parsing import make_request
from fsdp_advisor.job.plan import Plan
from fsdp_advisor.model.profile import Profile
from fsdp_advisor.model.resolve import resolve
from fsdp_advisor.units import GIB

GRPO = {"framework": "trl", "task": "grpo", "use_vllm": "true", "max_completion_length": "1024", "strategy": "zero3"}


def plan_of(model: str, **options: Any) -> tuple[Profile, Plan]:
    profile = resolve(model).profile
    assert profile is not None
    job = {"model": model, "gpus": 8, "num_generations": 8, **GRPO, **options}
    (plan,) = plans(make_request({name: str(value) for name, value in job.items()}), seq_len=2048)
    return profile, plan


def share_of(model: str, gpu: str = "H100", **options: Any) -> VllmShare:
    found = vllm_share(*plan_of(model, **options), find_gpu(gpu))
    assert found is not None
    return found


def test_weights_and_cache_are_those_of_a_published_log() -> None:
    """Llama-3.1-8B on an A10G of 22.07 GiB with 90 % of it (vLLM 0.7): "model weights take 14.99GiB", "the rest of the memory reserved for
    KV Cache is 4.60GiB", "# CUDA blocks: 2356" of 16 tokens, "The model's max seq len (131072) is larger than the maximum number of tokens
    that can be stored in KV cache (37696)".
    """
    found = share_of("meta-llama/Llama-3.1-8B", "22.07GiB", vllm_gpu_memory_utilization=0.9)
    assert (round(found.share_bytes / GIB, 2), found.length) == (19.86, 131072)
    assert found.weight_bytes / GIB == pytest.approx(14.99, rel=0.003)
    assert found.missing_bytes > 0
    held = share_of("meta-llama/Llama-3.1-8B", vllm_max_model_length=37696)
    assert held.cache_bytes / GIB == pytest.approx(4.60, abs=0.005)


@pytest.mark.parametrize(
    ("model", "options", "cache_gib"),
    [
        ("meta-llama/Llama-3.1-8B", {}, 16.0),  # 32 layers of 8 heads of 128 elements, keys and values, 131,072 tokens
        ("meta-llama/Llama-3.1-8B", {"vllm_tensor_parallel_size": 4}, 4.0),
        ("Qwen/Qwen2.5-7B", {"vllm_tensor_parallel_size": 4}, 1.75),  # one head per GPU
        ("Qwen/Qwen2.5-7B", {"vllm_tensor_parallel_size": 8}, 1.75),  # heads are not divided
        ("deepseek-ai/DeepSeek-V3", {"vllm_tensor_parallel_size": 8}, 163840 * 61 * 576 * 2 / GIB),  # nor is MLA's latent vector
        ("Qwen/Qwen3-Next-80B-A3B-Instruct", {}, 6.0),  # 12 of 48 layers have keys and values
        ("mistralai/Mistral-7B-v0.1", {}, 0.5),  # 4,096 of 32,768 tokens
        ("openai/gpt-oss-20b", {}, (12 * 131072 + 12 * 128) * 2048 / GIB),  # every second layer has a window
        ("microsoft/Phi-3.5-mini-instruct", {}, 0.0),  # one projection for queries, keys and values: not counted
    ],
)  # fmt: skip
def test_the_cache_holds_one_sequence_of_the_longest_length(
    model: str, options: dict[str, Any], cache_gib: float
) -> None:
    assert share_of(model, **options).cache_bytes / GIB == pytest.approx(cache_gib)


def test_longrope_s_longest_sequence_is_that_of_the_pretraining() -> None:
    assert share_of("microsoft/Phi-3.5-mini-instruct").length == 4096


def with_text_config(model: str, **values: Any) -> Profile:
    """The profile of a model, with other values in the configuration of its text."""
    profile, _ = plan_of(model)
    return replace(profile, config={**profile.config, **values})


@pytest.mark.parametrize(
    ("rope", "length"),
    [
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, 65536),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}, 131072),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e6}}, 65536),
        ({"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 2.0}}}, 65536),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, 32768),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, 32768),
        ({"rope_parameters": {"rope_type": "longrope"}, "original_max_position_embeddings": 4096}, 4096),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "model_type": "gemma3_text"}, 32768),
    ],
)
def test_ropes_scaling_sets_the_longest_sequence(rope: dict[str, Any], length: int) -> None:
    """vLLM's `_get_and_verify_max_len`: a model of 32,768 positions."""
    profile = with_text_config("mistralai/Mistral-7B-v0.1", **rope)
    found = vllm_share(profile, plan_of("mistralai/Mistral-7B-v0.1")[1], find_gpu("H100"))
    assert found is not None and found.length == length


def test_a_length_above_the_models_is_refused() -> None:
    profile, plan = plan_of("mistralai/Mistral-7B-v0.1", vllm_max_model_length=65536)
    assert "sequences of the model have at most 32,768 tokens" in str(model_refusal(profile, plan))
    scaled = with_text_config("mistralai/Mistral-7B-v0.1", rope_scaling={"type": "linear", "factor": 2.0})
    assert model_refusal(scaled, plan) is None


def test_tensor_parallelism_divides_the_weights() -> None:
    one, eight = (share_of("meta-llama/Llama-3.1-70B", vllm_tensor_parallel_size=n) for n in (1, 8))
    assert one.weight_bytes == pytest.approx(2 * 70.55e9, rel=1e-3)
    assert eight.weight_bytes == pytest.approx(one.weight_bytes / 8)


@pytest.mark.parametrize(
    ("model", "options", "remedies"),
    [
        (
            "Qwen/Qwen3-8B",
            {"vllm_gpu_memory_utilization": 0.1},
            [{"vllm_tensor_parallel_size": 4}, {"vllm_gpu_memory_utilization": 0.3}],
        ),
        (
            "meta-llama/Llama-3.1-8B",
            {},
            [
                {"vllm_max_model_length": 2048},
                {"vllm_tensor_parallel_size": 2},
                {"vllm_gpu_memory_utilization": 0.45},
            ],
        ),
        (
            "meta-llama/Llama-3.1-70B",
            {"gpus": 32, "nnodes": 4},
            [
                {"vllm_max_model_length": 2048, "vllm_tensor_parallel_size": 8},
                {"vllm_tensor_parallel_size": 8, "vllm_gpu_memory_utilization": 0.35},
            ],
        ),
        ("meta-llama/Llama-3.1-405B", {}, []),
    ],
)
def test_the_remedies_are_the_fewest_settings_with_which_vllm_starts(
    model: str, options: dict[str, Any], remedies: list[dict[str, int | float]]
) -> None:
    profile, plan = plan_of(model, **options)
    found = vllm_share(profile, plan, find_gpu("H100"))
    assert found is not None and found.missing_bytes > 0
    assert list(found.remedies) == remedies
    for remedy in remedies:
        with_it = vllm_share(profile, with_settings(plan, remedy), find_gpu("H100"))
        assert with_it is not None and with_it.missing_bytes == 0 and not with_it.remedies
    assert ("--vllm-mode server" if not remedies else "it starts with --vllm-") in found.text


def test_only_open_settings_are_chosen() -> None:
    job = (*plan_of("meta-llama/Llama-3.1-8B"), find_gpu("H100"))
    assert starting_settings(*job, ["vllm_tensor_parallel_size"]) == {"vllm_tensor_parallel_size": 2}
    assert starting_settings(*job, []) == {}
    profile, plan = plan_of("Qwen/Qwen3-8B")
    assert starting_settings(profile, plan, find_gpu("H100"), ["vllm_max_model_length"]) == {}  # it starts


def test_vllm_divides_only_whole_heads() -> None:
    """Qwen2.5-7B has 28 attention heads."""
    assert model_refusal(*plan_of("Qwen/Qwen2.5-7B", vllm_tensor_parallel_size=4)) is None
    refused = model_refusal(*plan_of("Qwen/Qwen2.5-7B", vllm_tensor_parallel_size=8))
    assert refused is not None and "28 attention heads among 8 GPUs" in refused.message
    assert refused.hint.endswith("one of 1, 2, 4")


def test_a_share_is_only_of_colocated_vllm() -> None:
    for options in ({"use_vllm": "false"}, {"vllm_mode": "server"}):
        assert vllm_share(*plan_of("Qwen/Qwen3-8B", **options), find_gpu("H100")) is None
    profile, plan = plan_of("Qwen/Qwen3-8B")
    assert vllm_share(profile, replace(plan, generation=None), find_gpu("H100")) is None
