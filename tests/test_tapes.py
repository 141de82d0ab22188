"""Which tape a plan replays on which GPU, and the names of tapes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fsdp_advisor.errors import NoSuchAttention
from fsdp_advisor.hardware import find_gpu
from fsdp_advisor.job.choices import Attention
from fsdp_advisor.job.compatibility import plans
from fsdp_advisor.job.parsing import make_request
from fsdp_advisor.job.plan import Plan
from fsdp_advisor.job.search_request import RecommendRequest
from fsdp_advisor.model import catalog
from fsdp_advisor.model.attention import mixes_head_widths
from fsdp_advisor.model.gpu_tape_key import gpu_tape_key, gpu_tape_keys
from fsdp_advisor.model.resolve import resolve
from fsdp_advisor.model.tape_key import TapeKey, TapePrecision
from fsdp_advisor.parallelism.mesh import Mesh
from fsdp_advisor.tape_keys import needs_recording, searched_gpu_tape_key, tape_key_of
from fsdp_advisor.tapes import row_tape

SDPA = TapeKey("fsdp2", "bf16", "sdpa", "none", True)
GPU = replace(SDPA, device="gpu")
CUDNN = replace(GPU, kernel="cudnn")
FLASH = replace(GPU, attention="flash_attention_2", batch_is_one=False)


@pytest.mark.parametrize(
    ("attention", "precision", "capability", "filled", "expected"),
    [
        ("sdpa", "bf16-mixed", (8, 0), False, FLASH),
        ("sdpa", "bf16", None, False, FLASH),
        ("sdpa", "bf16-mixed", (7, 5), False, SDPA),
        ("sdpa", "fp32", (9, 0), False, GPU),
        ("sdpa", "fp32", (7, 5), True, replace(GPU, window_filled=True)),
        ("eager", "bf16-mixed", (9, 0), False, replace(GPU, attention="eager")),
        ("eager", "fp32", (9, 0), True, replace(GPU, attention="eager")),
    ],
)
def test_sdpa_runs_as_flash_in_half_precision(
    attention: Attention,
    precision: TapePrecision,
    capability: tuple[int, int] | None,
    filled: bool,
    expected: TapeKey,
) -> None:
    key = replace(SDPA, attention=attention, precision=precision)
    assert gpu_tape_key(key, capability, window_filled=filled) == replace(expected, precision=precision)


@pytest.mark.parametrize(
    ("capability", "recorded", "expected"),
    [
        ((9, 0), (GPU, CUDNN), CUDNN),
        (None, (GPU, CUDNN), CUDNN),
        ((8, 0), (GPU, CUDNN), GPU),
        ((12, 0), (GPU, CUDNN), GPU),
        ((9, 0), (GPU,), GPU),
        ((8, 0), (CUDNN,), FLASH),
    ],
)
def test_a_tape_recorded_for_the_gpu_goes_before_that_of_flash(
    capability: tuple[int, int] | None, recorded: tuple[TapeKey, ...], expected: TapeKey
) -> None:
    assert gpu_tape_key(SDPA, capability, recorded=[key.name for key in recorded]) == expected


def test_a_filled_window_in_half_precision_needs_a_tape_for_cudnn() -> None:
    filled = {key.kernel for key in gpu_tape_keys(SDPA, window_filled=True, mixes_head_widths=False)}
    assert filled == {"default", "cudnn"}
    assert gpu_tape_keys(SDPA, window_filled=False, mixes_head_widths=False) == (GPU,)


def test_a_search_does_not_try_an_attention_that_the_model_lacks() -> None:
    profile = resolve("openai/gpt-oss-20b").profile
    assert profile is not None
    plan = Plan(strategy="zero3", backend="fsdp2", mesh=Mesh(dp_shard=8), seq_len=2048, micro_batch_size=1)
    assert searched_gpu_tape_key(profile, plan, find_gpu("H100")).attention == "eager"


def test_values_of_another_width_than_queries_need_a_tape_for_cudnn() -> None:
    assert gpu_tape_keys(SDPA, window_filled=False, mixes_head_widths=True) == (GPU, CUDNN)


def test_the_catalog_has_cudnns_tapes_of_all_models_that_mix_head_widths() -> None:
    """sdpa's flash kernel does not run them, and cuDNN's allocates otherwise than the memory-efficient one."""
    profiles = [catalog.profile(entry) for entry in catalog.entries() if entry.has_tapes]
    lacking = [
        profile.name
        for profile in profiles
        if mixes_head_widths(profile) and not any("cudnn" in name for name in profile.tapes)
    ]
    assert lacking == []


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"backend": "fsdp2", "precision": "fp16-mixed"}, TapeKey("fsdp2", "bf16-mixed", "sdpa", "none", True)),
        ({"backend": "deepspeed", "precision": "bf16-mixed"}, TapeKey("plain", "bf16", "sdpa", "none", True)),
        (
            {"backend": "fsdp1", "precision": "bf16-mixed", "framework": "accelerate"},
            TapeKey("fsdp1+autocast", "bf16-mixed", "sdpa", "none", True),
        ),
        (
            {"backend": "fsdp1", "precision": "bf16", "attention": "flash_attention_2"},
            TapeKey("fsdp1", "bf16", "flash_attention_2", "none", device="gpu"),
        ),
    ],
)
def test_a_plan_replays_the_tape_of_its_code_path(options: dict[str, str], expected: TapeKey) -> None:
    plan = Plan(**{"strategy": "zero3", "mesh": Mesh(dp_shard=4), "seq_len": 128, "micro_batch_size": 1, **options})  # type: ignore[arg-type]
    assert tape_key_of(plan) == expected


def test_names_of_shipped_tapes_are_those_of_their_keys() -> None:
    for entry in catalog.entries()[::10]:
        for name in catalog.profile(entry).tapes:
            assert TapeKey.from_name(name).name == name


@pytest.mark.parametrize(
    "changes", [{"loss": "trl", "ignored_labels": 0.4}, {"task": "grpo", "generates": True, "generated": 2},
        {"at": (3, 128), "wrap": "every:2"}]
)  # fmt: skip
def test_a_key_is_made_from_its_name(changes: dict[str, Any]) -> None:
    key = replace(SDPA, **changes)
    assert TapeKey.from_name(key.name) == key


def test_the_name_says_that_a_tape_has_ligers_kernels() -> None:
    name = replace(FLASH, liger_kernels=True).name
    assert name == f"{FLASH.name}|liger=1"
    assert TapeKey.from_name(name).liger_kernels


@pytest.mark.parametrize(
    "name",
    [
        "fsdp2|bf16|tpu|sdpa|default|-|none|1",
        "fsdp2|bf16|sdpa|none|1",
        f"{SDPA.name}|loss=mean",
        f"{SDPA.name}|colour=red",
    ],
)
def test_a_name_of_no_key_is_refused(name: str) -> None:
    with pytest.raises(ValueError):
        TapeKey.from_name(name)


def test_flash_attention_on_a_cpu_is_refused() -> None:
    with pytest.raises(ValueError, match="only on GPUs"):
        TapeKey("fsdp2", "bf16", "flash_attention_2", "none")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, False),
        ({"model": "smollm3 3b"}, False),
        ({"model": "databricks/dbrx-base"}, True),
        ({"model": "state-spaces/mamba-130m-hf"}, False),
        ({"model": "7e9", "backend": "fsdp1"}, False),
        ({"backend": "fsdp1"}, False),
        ({"backend": "fsdp1", "model": "smollm3 3b"}, True),
        ({"precision": "fp32"}, False),
        ({"precision": "fp32", "model": "smollm3 3b"}, True),
        ({"attention": "flash_attention_2"}, False),
        ({"backend": "fsdp1", "wrap": "size:10000000"}, True),
        ({"framework": "trainer", "activation_checkpointing": "reentrant"}, True),
        ({"strategy": "ddp", "dtype": "bfloat16"}, True),
        ({"framework": "trl"}, True),
        ({"strategy": "ddp", "offload": "optimizer"}, False),
    ],
    ids=str,
)
def test_needs_recording_says_whether_the_catalog_lacks_a_step(options: dict[str, Any], expected: bool) -> None:
    """gpt2 has all tapes, SmolLM3 and Mamba the usual ones, DBRX none. The last job is refused, which no recording changes."""
    job = {"model": "gpt2", "gpus": 4, "strategy": "zero3", **options}
    assert needs_recording(make_request(job)) is expected
    assert needs_recording(make_request(job, RecommendRequest)) is expected


@pytest.mark.parametrize(
    ("options", "estimate", "recommend"),
    [({}, False, True), ({"micro_batch_size": 8}, True, True), ({"seq_len": 512}, True, True)],
    ids=str,
)
@pytest.mark.parametrize("model", ["answerdotai/ModernBERT-large", "deepseek-ai/DeepSeek-V4-Flash"])
def test_a_model_whose_batches_are_recorded_one_by_one_needs_recordings_of_all_but_the_first(
    model: str, options: dict[str, Any], estimate: bool, recommend: bool
) -> None:
    """The catalog has their steps for one micro-batch and length, DeepSeek's with eager attention; a search asks for others."""
    job = {"model": model, "gpus": 4, **options}
    assert needs_recording(make_request(job)) is estimate
    assert needs_recording(make_request(job, RecommendRequest)) is recommend


@pytest.mark.parametrize("model", ["meta-models/Muse-Glimmer-30B", "CohereLabs/command-a-plus-05-2026"])
def test_a_recording_for_every_batch_is_used_where_another_step_has_none(model: str) -> None:
    """The catalog has the checkpointed steps of these models for every batch, and those without checkpoints on a CPU for one."""
    request = make_request({"model": model, "gpus": 8, "strategy": "zero3", "activation_checkpointing": "full"})
    (plan,) = plans(request, seq_len=2048)
    assert row_tape(resolve(model, allow_recording=False), plan).key.at is None


def test_a_model_without_sdpa_is_answered_from_its_recordings_with_eager_attention() -> None:
    model = "XiaomiMiMo/MiMo-V2-Flash"
    (plan,) = plans(make_request({"model": model, "gpus": 8, "strategy": "zero3"}), seq_len=2048)
    key = row_tape(resolve(model, allow_recording=False), plan).key
    assert (key.attention, key.at) == ("eager", None)


def test_flash_attention_2_of_a_model_without_it_is_refused_where_a_gpus_tape_stands_for_the_cpus() -> None:
    """transformers gives a model eager attention instead of sdpa, but refuses flash_attention_2."""
    model = resolve("state-spaces/mamba-130m-hf")
    (plan,) = plans(make_request({"model": model.name, "gpus": 1, "strategy": "ddp"}), seq_len=2048)
    assert row_tape(model, plan).key.attention == "eager"
    with pytest.raises(NoSuchAttention, match="has no flash_attention_2 attention"):
        row_tape(model, replace(plan, attention="flash_attention_2"))


@pytest.mark.parametrize(("gpu", "kernel"), [("H100", "cudnn"), ("A100-80GB", "default")])
def test_a_gpus_tape_that_stands_for_the_cpus_has_the_kernels_of_this_gpu(gpu: str, kernel: str) -> None:
    """Those of other GPUs need not be recorded."""
    model = "meta-models/Muse-Glimmer-30B"
    request = make_request({"model": model, "gpus": 8, "strategy": "zero3", "seq_len": 32768})
    (plan,) = plans(request, seq_len=32768)
    assert row_tape(resolve(model, allow_recording=False), plan, find_gpu(gpu)).key.kernel == kernel
