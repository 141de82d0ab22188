"""The caching allocator's operations and live memory are read from one program, and must agree to the byte."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st
from jobs import ENGINES, MODELS, NotCatalogued, job, operations_of, peak_of, program_of
from matrix import examples, in_turn

from fsdp_advisor.engines.ddp.step import BUCKET_BYTES, FIRST_BUCKET_BYTES
from fsdp_advisor.engines.deepspeed.partitions import optimizer_states
from fsdp_advisor.engines.registry import states_of
from fsdp_advisor.errors import UsageError
from fsdp_advisor.job.adaptation import adaptation_of
from fsdp_advisor.job.compatibility import plans
from fsdp_advisor.job.parsing import make_request
from fsdp_advisor.job.plan import Plan
from fsdp_advisor.memory.allocator import (
    DEFAULT_CONF,
    AllocatorConf,
    CachingAllocator,
    StepOperations,
    simulate_allocator,
)
from fsdp_advisor.memory.allocator.caching import FREE, FREE_LATER, MALLOC, kind_of, operation, storage_of
from fsdp_advisor.model.adapted_catalog import adapted_profile
from fsdp_advisor.model.profile import Profile
from fsdp_advisor.model.tape import Category, Tape
from fsdp_advisor.program.accounts import Stream
from fsdp_advisor.tape_keys import tape_key_of


def without_workspace(tape: Tape) -> bool:
    """Whether no kernel on the tape allocates memory for itself, so that what is requested is the tensors alone."""
    return not any(category == Category.SCRATCH for born in tape.read().births for _, category in born)


def resident_bytes(profile: Profile, plan: Plan) -> int:
    """What is alive whenever a step begins."""
    states = states_of(profile, plan)
    kept = (states.parameters, states.optimizer, states.communication, states.buffers)
    gradients = states.gradients.rounded if plan.backend in ("fsdp1", "deepspeed") else 0
    return sum(storages.rounded for storages in kept) + gradients


def simulated(steps: StepOperations, conf: AllocatorConf = DEFAULT_CONF) -> tuple[CachingAllocator, list[int]]:
    """Three steps, without blocks that other streams still use; what is requested after each."""
    allocator = CachingAllocator(steps.requests, conf, gpu_keeps_up=True)
    allocator.run(steps.setup)
    after = []
    for operations in (steps.first, steps.following, steps.following):
        allocator.requested_peak = 0
        allocator.run(operations)
        allocator.begin_step(steps.carried_over)
        after.append(allocator.requested)
    return allocator, after


@in_turn(1, of=2)
@settings(max_examples=examples(60), deadline=None)
@given(
    model=st.sampled_from(MODELS),
    strategy=st.sampled_from(ENGINES),
    gpus=st.sampled_from([2, 4, 6]),
    precision=st.sampled_from(["bf16-mixed", "bf16", "fp32"]),
    batch=st.sampled_from([1, 3]),
    accumulation=st.sampled_from([1, 2, 4]),
    checkpointing=st.sampled_from(["none", "full"]),
    optim=st.sampled_from(["adamw_torch_fused", "adamw_torch", "adafactor", "sgd"]),
)
def test_requested_peak_equals_live_peak(
    model: str, strategy: tuple[str, str, str], gpus: int, precision: str, batch: int, accumulation: int,
    checkpointing: str, optim: str,
) -> None:  # fmt: skip
    try:
        profile, tape, plan = job(
            model, *strategy, gpus=gpus, precision=precision, micro_batch_size=batch, optim=optim,
            gradient_accumulation_steps=accumulation, activation_checkpointing=checkpointing,
        )  # fmt: skip
    except (NotCatalogued, UsageError):
        reject()  # not every model is catalogued in every variant, and FSDP2 does not step Adafactor
    allocator, after = simulated(operations_of(profile, tape, plan))
    if without_workspace(tape):
        assert allocator.requested_peak == peak_of(profile, tape, plan).peak
    assert after == [resident_bytes(profile, plan)] * 3


@pytest.mark.parametrize("strategy", ENGINES, ids="-".join)
def test_every_storage_is_allocated_and_freed_once(strategy: tuple[str, str, str]) -> None:
    """Within a step; what lives on was there before, or is carried over to the next step."""
    steps = operations_of(*job(MODELS[0], *strategy))
    made = Counter(storage_of(op) for op in steps.following if kind_of(op) == MALLOC)
    freed = Counter(storage_of(op) for op in steps.following if kind_of(op) in (FREE, FREE_LATER))
    assert set(made.values()) == {1} and set(freed.values()) == {1}
    carried_over = dict(steps.carried_over)
    assert made.keys() - freed.keys() == carried_over.keys()
    assert freed.keys() - made.keys() == set(carried_over.values())
    assert {storage_of(op) for op in steps.setup}.isdisjoint(made)


def test_first_step_creates_optimizer_state() -> None:
    profile, tape, plan = job(MODELS[0], "zero3", "fsdp2")
    steps = operations_of(profile, tape, plan)
    early = CachingAllocator(steps.requests)
    early.run(steps.setup)
    kept = early.requested
    early.run(steps.first)
    assert early.requested - kept == states_of(profile, plan).optimizer.rounded


@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_deepspeed_creates_masters_with_the_engine_and_moments_in_the_first_step(strategy: str) -> None:
    profile, tape, plan = job(MODELS[0], strategy, "deepspeed")
    steps = operations_of(profile, tape, plan)
    moments = optimizer_states(profile, plan).moments.rounded
    assert 0 < moments < states_of(profile, plan).optimizer.rounded
    engine = CachingAllocator(steps.requests)
    engine.run(steps.setup)
    assert engine.requested == resident_bytes(profile, plan) - moments
    engine.run(steps.first)
    assert engine.requested == resident_bytes(profile, plan)


def test_only_fsdp1_delays_reuse_with_record_stream() -> None:
    """`record_stream`: storages that are freed while another stream may still use them."""
    later = {}
    for backend in ("fsdp1", "fsdp2"):
        steps = operations_of(*job(MODELS[0], "zero3", backend))
        later[backend] = sum(1 for op in steps.following if kind_of(op) == FREE_LATER)
    assert later["fsdp1"] > 64 and later["fsdp2"] == 0


def test_fsdp1_keeps_offloaded_gradients_until_backward_ends() -> None:
    """The shard's gradient goes to the host, but its tensor stays for the next one to be added."""
    profile, tape, plan = job(MODELS[0], "zero3", "fsdp1", "parameters")
    peak, shards = peak_of(profile, tape, plan), profile.parameters * plan.param_bytes // plan.shard_degree
    assert peak.phase == "backward" and peak.at_peak["gradients"] > 0.9 * shards
    assert resident_bytes(profile, plan) < shards / 100


def test_both_cublas_workspaces_stay() -> None:
    profile, tape, plan = job(MODELS[1], "ddp", "ddp")
    bare, with_workspaces = (
        simulate_allocator(operations_of(profile, tape, plan, workspace_bytes=sizes))
        for sizes in ((), (32 * 2**20,) * 2)
    )
    assert with_workspaces.requested_peak_bytes - bare.requested_peak_bytes == 64 * 2**20


def test_backward_workspace_follows_the_first_weight_gradient() -> None:
    """It lies behind the output of the head's first product, once the loss has freed its logits."""
    profile, tape, plan = job(MODELS[1], "zero3", "fsdp2")
    steps = operations_of(profile, tape, plan, workspace_bytes=(32 * 2**20,) * 2)
    forward, backward = (operation(MALLOC, n) for n, size in enumerate(steps.requests) if size == 32 * 2**20)
    head = 50257 * 768 * 2
    after = steps.first[steps.first.index(backward) - 1]
    assert kind_of(after) == MALLOC and steps.requests[storage_of(after)] == -(-head // 512) * 512
    assert steps.first.index(forward) < steps.first.index(backward) and forward not in steps.following


@pytest.mark.parametrize(
    ("framework", "output"),
    [("torch", 256 * 4096 * 2), ("trl", 255 * 32_768 * 2)],
    ids=["the gradient of the head's input", "the first tile of logits"],
)
def test_backward_workspace_follows_the_product_of_a_frozen_head(framework: str, output: int) -> None:
    model, workspace = "meta-llama/Llama-3.1-8B", 12_345 * 512
    options = {"strategy": "ddp", "framework": framework, "dtype": "bfloat16", "activation_checkpointing": "full"}
    request = make_request({"model": model, "use_peft": True, **options})
    profile = adapted_profile(model, adaptation_of(request))
    (plan,) = plans(request, seq_len=256)
    assert profile is not None
    tape = profile.tapes[tape_key_of(plan).name]
    steps = operations_of(profile, tape, plan, workspace_bytes=(workspace, workspace))
    _, backward = (operation(MALLOC, n) for n, size in enumerate(steps.requests) if size == workspace)
    after = steps.first[steps.first.index(backward) - 1]
    assert kind_of(after) == MALLOC and steps.requests[storage_of(after)] == output


@pytest.mark.parametrize("model", ["meta-llama/Llama-3.2-1B", "openai-community/gpt2"])
def test_ddp_rebuilds_its_one_bucket_after_the_first_step(model: str) -> None:
    profile, tape, plan = job(model, "ddp", "ddp", precision="bf16-mixed")
    steps = operations_of(profile, tape, plan)
    rebuilt = program_of(profile, tape, plan).rebuilt_buckets
    sizes = list(rebuilt.each())
    gradients = sum(p.elements for p in profile.in_order()) * 4
    assert sum(sizes) == gradients
    assert all(n >= BUCKET_BYTES for n in sizes[1:-1]) and sizes[0] >= FIRST_BUCKET_BYTES
    at = [steps.requests[storage_of(o)] for o in steps.setup].index(-(-gradients // 512) * 512)
    end = steps.first[-len(sizes) - 1 :]
    assert end[0] == operation(FREE, storage_of(steps.setup[at]))
    assert [steps.requests[storage_of(o)] for o in end[1:]] == [-(-n // 512) * 512 for n in sizes]


def test_one_batch_is_allocated_before_the_steps_and_rebuilds_at_the_second_forward() -> None:
    """As a validation run does: the same batch in every micro-batch, and gradients that are reduced in each."""
    profile, tape, plan = job(MODELS[1], "ddp", "ddp", precision="bf16-mixed", gradient_accumulation_steps=2)
    fresh, stands = operations_of(profile, tape, plan), operations_of(profile, tape, plan, one_batch=True)
    tokens = plan.micro_batch_size * plan.seq_len * 8
    assert [stands.requests[storage_of(o)] for o in stands.setup][-2:] == [tokens, tokens]
    gone = {storage_of(op) for op in (*fresh.following, *fresh.setup)} - {
        storage_of(o) for o in stands.following + stands.setup
    }
    assert sum(stands.requests[number] for number in gone) == 2 * tokens  # the second micro-batch's
    assert len(fresh.following) - len(stands.following) == 8  # two tensors of each, made and dropped
    assert [phase for _, phase, _ in stands.visits] == [phase for _, phase, _ in fresh.visits]
    buckets = list(program_of(profile, tape, plan).rebuilt_buckets.each())
    makes = [operation(MALLOC, n) for n in range(len(stands.requests) - len(buckets), len(stands.requests))]
    at = stands.first.index(makes[0])
    assert list(stands.first[at : at + len(makes)]) == makes and 0.4 < at / len(stands.first) < 0.6
    assert list(fresh.first[-len(makes) :]) == makes


def test_buckets_follow_the_order_in_which_gradients_are_ready() -> None:
    """Llama: the last norm with the last layer's down projection; then up, gate; then the norm before them with attention."""
    profile, tape, plan = job("meta-llama/Llama-3.2-1B", "ddp", "ddp", precision="bf16-mixed")
    norm, wide, square, narrow = 2048 * 4, 8192 * 2048 * 4, 2048 * 2048 * 4, 512 * 2048 * 4
    layer = [norm + wide, wide, wide, norm + 2 * square + 2 * narrow]
    assert list(program_of(profile, tape, plan).rebuilt_buckets.each()) == layer * 16 + [norm + 128256 * 2048 * 4]


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
@pytest.mark.parametrize(
    "model", ["google/gemma-4-E2B", "google/gemma-4-E4B", "google/gemma-2-2b", "google-t5/t5-small"]
)
def test_a_storage_is_allocated_before_it_is_freed(model: str, strategy: str) -> None:
    """Also where many layers use the keys and values, or the output, of one."""
    steps = operations_of(*job(model, strategy, "ddp" if strategy == "ddp" else "fsdp2"))
    live: set[int] = set()
    for op in (*steps.setup, *steps.first):
        if kind_of(op) == MALLOC:
            assert storage_of(op) not in live
            live.add(storage_of(op))
        elif kind_of(op) in (FREE, FREE_LATER):
            live.remove(storage_of(op))


def test_buckets_of_parameters_without_gradient_stay() -> None:
    """A vision tower in a step on text: DDP runs only if it searches for unused parameters."""
    profile, tape, plan = job("HuggingFaceTB/SmolVLM2-2.2B-Instruct", "ddp", "ddp")
    assert program_of(profile, tape, plan).rebuilt_buckets.exact == 0


@pytest.mark.parametrize("options", [{"gpus": 1}, {"framework": "trainer"}], ids=str)
def test_buckets_are_not_rebuilt_on_one_gpu_or_with_unused_parameters(options: dict[str, Any]) -> None:
    """On one GPU there are none; where DDP searches for unused parameters, the first ones stay."""
    profile, tape, plan = job("openai-community/gpt2", "ddp", "ddp", **options)
    assert program_of(profile, tape, plan).rebuilt_buckets.exact == 0


@pytest.mark.parametrize(("precision", "each"), [("bf16-mixed", 3), ("bf16", 1), ("fp32", 1)])
def test_fsdp1_allocates_its_flat_parameters_once_before_the_first_step(precision: str, each: int) -> None:
    """`init_flat_param_attributes`: per unit a low-precision shard, the gathered parameters and, mixed, these in full precision."""
    profile, tape, plan = job(MODELS[0], "zero3", "fsdp1", precision=precision)
    steps = operations_of(profile, tape, plan)
    begin = steps.first[: 2 * each * 33]
    assert [kind_of(o) for o in begin] == [MALLOC, FREE] * each * 33
    sizes = [steps.requests[storage_of(o)] for o in begin[::2]]
    root = 2 * 32000 * 4096 + 4096
    assert sizes[each - 1] == root * (2 if precision == "bf16" else 4)
    assert set(begin).isdisjoint(steps.following)


def test_fsdp1_allocates_gradients_on_the_all_gather_stream() -> None:
    """Where the flat parameter was taken apart; with them the sum of a tied weight's two."""
    profile, tape, plan = job("meta-llama/Llama-3.2-1B", "zero3", "fsdp1")
    steps = operations_of(profile, tape, plan)
    root, tied = (128256 + 1) * 2048 * 2, 128256 * 2048 * 2
    born = Counter(steps.requests[storage_of(o)] for o in steps.following if kind_of(o) == MALLOC)
    assert born[root | Stream.ALL_GATHER] == 2 and root not in born  # the parameters, then their gradients
    assert born[tied | Stream.ALL_GATHER] == 1 and born[tied] == 2


@in_turn(0, of=2)
@pytest.mark.parametrize("model", ["google/gemma-3-4b-pt", "google/gemma-3-12b-pt"])
@pytest.mark.parametrize(("strategy", "backend"), [("ddp", "ddp"), ("zero3", "fsdp2"), ("zero3", "deepspeed")])
def test_storages_shared_by_layers_are_freed_once(model: str, strategy: str, backend: str) -> None:
    """Layers with full attention share one mask, which the root allocates. One recorded layer stands for many of them,
    but the mask is freed once.
    """
    profile, tape, plan = job(model, strategy, backend, activation_checkpointing="full", gradient_accumulation_steps=2)
    steps = operations_of(profile, tape, plan)
    for operations in (steps.first, steps.following):
        freed = Counter(storage_of(op) for op in operations if kind_of(op) in (FREE, FREE_LATER))
        assert set(freed.values()) == {1}
    allocator, after = simulated(steps)
    assert allocator.requested_peak >= peak_of(profile, tape, plan).peak
    assert after == [resident_bytes(profile, plan)] * 3
