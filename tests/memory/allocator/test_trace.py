"""The walk over every storage and the ledger's sums are told by the same schedules, and must agree to the byte."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from fsdp_advisor.engines.ddp.schedule import BUCKET_BYTES, FIRST_BUCKET_BYTES, rebuilt_buckets
from fsdp_advisor.estimator import make_request, replayed
from fsdp_advisor.job.plan import Plan, plans
from fsdp_advisor.memory.allocator import AllocatorConf, CachingAllocator, reserve, traced
from fsdp_advisor.memory.allocator.caching import FREE, FREE_LATER, MALLOC
from fsdp_advisor.memory.allocator.trace import Steps
from fsdp_advisor.memory.ledger import ALL_GATHER, GRADIENTS
from fsdp_advisor.memory.libraries import allocated
from fsdp_advisor.model.profile import Profile, Tape
from fsdp_advisor.model.resolve import resolve
from fsdp_advisor.tapes import tape_key_of

MODELS = (
    "meta-llama/Llama-2-7b-hf", "openai-community/gpt2", "google/gemma-3-1b-pt", "google-t5/t5-small", "openai/whisper-tiny",
    "mistralai/Mixtral-8x7B-v0.1", "google-bert/bert-base-uncased",
)  # fmt: skip
JOBS = (
    ("ddp", "ddp", "none"), ("zero2", "fsdp2", "none"), ("zero3", "fsdp2", "none"), ("hsdp", "fsdp2", "none"),
    ("zero3", "fsdp2", "parameters"), ("zero2", "fsdp1", "none"), ("zero3", "fsdp1", "none"), ("zero3", "fsdp1", "parameters"),
    ("zero1", "deepspeed", "none"), ("zero2", "deepspeed", "none"), ("zero3", "deepspeed", "none"),
    ("zero1", "deepspeed", "optimizer"), ("zero2", "deepspeed", "optimizer"), ("zero3", "deepspeed", "parameters"),
)  # fmt: skip


def job(
    model: str, strategy: str, backend: str, offload: str = "none", **options: object
) -> tuple[Profile, Tape, Plan]:
    profile = resolve(model).profile
    assert profile is not None
    nodes = 2 if strategy == "hsdp" else 1
    chosen = {"model": model, "gpus": 4, "nnodes": nodes, "strategy": strategy, "backend": backend, "offload": offload}
    request = make_request({**chosen, **options})
    plan = plans(request, seq_len=min(256, profile.max_seq_len or 256))[0]
    variant = tape_key_of(plan)
    known = [v.name for v in (variant, replace(variant, attention="eager")) if v.name in profile.tapes]
    if not known:
        raise KeyError(variant.name)
    return profile, profile.tapes[known[0]], plan


def walked(steps: Steps, conf: AllocatorConf | None = None) -> tuple[CachingAllocator, list[int]]:
    """Three steps, with nothing held back for other streams; what is requested after each."""
    allocator = CachingAllocator(steps.requests, conf, gpu_keeps_up=True)
    allocator.run(steps.setup)
    after = []
    for operations in (steps.first, steps.following, steps.following):
        allocator.requested_peak = 0
        allocator.run(operations)
        allocator.begin_step()
        for born, known in steps.handed_on:
            allocator.address[known] = allocator.address[born]
        after.append(allocator.requested)
    return allocator, after


def without_scratch(profile: Profile, tape: Tape, plan: Plan) -> int:
    return allocated(profile, tape, plan, workspace_bytes=0).scratch_bytes


@settings(max_examples=60, deadline=None)
@given(
    model=st.sampled_from(MODELS),
    strategy=st.sampled_from(JOBS),
    gpus=st.sampled_from([2, 4, 6]),
    precision=st.sampled_from(["bf16-mixed", "bf16", "fp32"]),
    batch=st.sampled_from([1, 3]),
    accumulation=st.sampled_from([1, 2, 4]),
    checkpointing=st.sampled_from(["none", "full"]),
    optim=st.sampled_from(["adamw_torch_fused", "adamw_torch", "adafactor", "sgd"]),
)
def test_the_walk_meets_the_ledger(
    model: str, strategy: tuple[str, str, str], gpus: int, precision: str, batch: int, accumulation: int,
    checkpointing: str, optim: str,
) -> None:  # fmt: skip
    try:
        profile, tape, plan = job(
            model, *strategy, gpus=gpus, precision=precision, micro_batch_size=batch, optim=optim,
            gradient_accumulation_steps=accumulation, activation_checkpointing=checkpointing,
        )  # fmt: skip
    except KeyError:
        reject()  # not every model is catalogued in every variant
    ledger = replayed(profile, tape, plan)
    allocator, after = walked(traced(profile, tape, plan))
    assert allocator.requested_peak == ledger.peak + without_scratch(profile, tape, plan)
    assert after == [sum(ledger.resident)] * 3


@pytest.mark.parametrize("strategy", JOBS, ids="-".join)
def test_every_storage_is_freed_once(strategy: tuple[str, str, str]) -> None:
    """Within a step: what lives on was there before, or is handed on."""
    steps = traced(*job(MODELS[0], *strategy))
    made = Counter(operation >> 2 for operation in steps.following if operation & 3 == MALLOC)
    freed = Counter(operation >> 2 for operation in steps.following if operation & 3 in (FREE, FREE_LATER))
    assert set(made.values()) == {1} and set(freed.values()) == {1}
    handed_on = dict(steps.handed_on)
    assert made.keys() - freed.keys() == handed_on.keys()
    assert freed.keys() - made.keys() == set(handed_on.values())
    assert {operation >> 2 for operation in steps.setup}.isdisjoint(made)


def test_first_step_makes_what_torch_optimizers_keep() -> None:
    profile, tape, plan = job(MODELS[0], "zero3", "fsdp2")
    steps = traced(profile, tape, plan)
    early = CachingAllocator(steps.requests)
    early.run(steps.setup)
    kept = early.requested
    early.run(steps.first)
    assert early.requested - kept == replayed(profile, tape, plan).resident[2]


def test_deepspeed_makes_its_optimizer_with_the_engine() -> None:
    profile, tape, plan = job(MODELS[0], "zero2", "deepspeed")
    steps = traced(profile, tape, plan)
    engine = CachingAllocator(steps.requests)
    engine.run(steps.setup)
    assert engine.requested == sum(replayed(profile, tape, plan).resident)
    assert steps.first == steps.following


def test_fsdp1_holds_back_what_fsdp2_does_not() -> None:
    """`record_stream`: storages that are freed while another stream may still use them."""
    later = {}
    for backend in ("fsdp1", "fsdp2"):
        steps = traced(*job(MODELS[0], "zero3", backend))
        later[backend] = sum(1 for operation in steps.following if operation & 3 == FREE_LATER)
    assert later["fsdp1"] > 64 and later["fsdp2"] == 0


def test_fsdp1_keeps_offloaded_gradients_until_backward_ends() -> None:
    """The shard's gradient goes to the host, but its tensor stays for the next one to be added."""
    profile, tape, plan = job(MODELS[0], "zero3", "fsdp1", "parameters")
    ledger, shards = replayed(profile, tape, plan), profile.parameters * plan.param_bytes // plan.shard_degree
    assert ledger.peak_phase == "backward" and ledger.at_peak[GRADIENTS] > 0.9 * shards
    assert sum(ledger.resident) < shards / 100


def test_workspaces_are_two_and_stay() -> None:
    profile, tape, plan = job(MODELS[1], "ddp", "ddp")
    bare, with_workspaces = (reserve(profile, tape, plan, workspace_bytes=n) for n in (0, 32 * 2**20))
    assert with_workspaces.requested_peak_bytes - bare.requested_peak_bytes == 64 * 2**20
    assert sum(segment.blocks.count((32 * 2**20, True)) for segment in with_workspaces.segments) == 2


def test_the_backward_passs_workspace_follows_the_first_weights_gradient() -> None:
    """It lies behind the output of the head's first product, once the loss has let go of its logits."""
    profile, tape, plan = job(MODELS[1], "zero3", "fsdp2")
    steps = traced(profile, tape, plan, workspace_bytes=32 * 2**20)
    forward, backward = (n * 4 + MALLOC for n, size in enumerate(steps.requests) if size == 32 * 2**20)
    head = 50257 * 768 * 2
    after = steps.first[steps.first.index(backward) - 1]
    assert after & 3 == MALLOC and steps.requests[after >> 2] == -(-head // 512) * 512
    assert steps.first.index(forward) < steps.first.index(backward) and forward not in steps.following


@pytest.mark.parametrize("model", ["meta-llama/Llama-3.2-1B", "openai-community/gpt2"])
def test_ddp_rebuilds_its_one_bucket_after_the_first_step(model: str) -> None:
    profile, tape, plan = job(model, "ddp", "ddp", precision="bf16-mixed")
    steps = traced(profile, tape, plan)
    rebuilt = rebuilt_buckets(profile, tape, plan)
    sizes = list(rebuilt.each())
    gradients = sum(p.elements for p in profile.in_order()) * 4
    assert sum(sizes) == gradients
    assert all(n >= BUCKET_BYTES for n in sizes[1:-1]) and sizes[0] >= FIRST_BUCKET_BYTES
    at = [steps.requests[o >> 2] for o in steps.setup].index(-(-gradients // 512) * 512)
    end = steps.first[-len(sizes) - 1 :]
    assert end[0] == (steps.setup[at] >> 2) * 4 + FREE
    assert [steps.requests[o >> 2] for o in end[1:]] == [-(-n // 512) * 512 for n in sizes]


def test_a_run_stands_on_one_batch_and_rebuilds_at_its_second_forward() -> None:
    """What a run on a GPU does: the same batch again and again, and gradients that are reduced after each micro-batch."""
    profile, tape, plan = job(MODELS[1], "ddp", "ddp", precision="bf16-mixed", gradient_accumulation_steps=2)
    fresh, stands = traced(profile, tape, plan), traced(profile, tape, plan, batch_stands=True)
    tokens = plan.micro_batch_size * plan.seq_len * 8
    assert [stands.requests[o >> 2] for o in stands.setup][-2:] == [tokens, tokens]
    gone = {operation >> 2 for operation in (*fresh.following, *fresh.setup)} - {
        o >> 2 for o in stands.following + stands.setup
    }
    assert sum(stands.requests[number] for number in gone) == 2 * tokens  # the second micro-batch's
    assert len(fresh.following) - len(stands.following) == 8  # two tensors of each, made and dropped
    assert [phase for _, phase, _ in stands.places] == [phase for _, phase, _ in fresh.places]
    buckets = list(rebuilt_buckets(profile, tape, plan).each())
    makes = [n * 4 + MALLOC for n in range(len(stands.requests) - len(buckets), len(stands.requests))]
    at = stands.first.index(makes[0])
    assert list(stands.first[at : at + len(makes)]) == makes and 0.4 < at / len(stands.first) < 0.6
    assert list(fresh.first[-len(makes) :]) == makes


def test_a_bucket_is_of_gradients_as_they_are_ready() -> None:
    """Llama: the last norm with the last layer's down projection; then up, gate; then the norm before them with attention."""
    profile, tape, plan = job("meta-llama/Llama-3.2-1B", "ddp", "ddp", precision="bf16-mixed")
    norm, wide, square, narrow = 2048 * 4, 8192 * 2048 * 4, 2048 * 2048 * 4, 512 * 2048 * 4
    layer = [norm + wide, wide, wide, norm + 2 * square + 2 * narrow]
    assert list(rebuilt_buckets(profile, tape, plan).each()) == layer * 16 + [norm + 128256 * 2048 * 4]


@pytest.mark.parametrize("options", [{"gpus": 1}, {"framework": "trainer"}], ids=str)
def test_buckets_that_are_not_rebuilt(options: dict[str, Any]) -> None:
    """On one GPU there are none; where DDP searches for unused parameters, the first ones stay."""
    profile, tape, plan = job("openai-community/gpt2", "ddp", "ddp", **options)
    assert rebuilt_buckets(profile, tape, plan).exact == 0


@pytest.mark.parametrize(("precision", "each"), [("bf16-mixed", 3), ("bf16", 1), ("fp32", 1)])
def test_fsdp1_tries_its_flat_parameters_first(precision: str, each: int) -> None:
    """`init_flat_param_attributes`: per unit a low-precision shard, the gathered parameters and, mixed, these in full precision."""
    profile, tape, plan = job(MODELS[0], "zero3", "fsdp1", precision=precision)
    steps = traced(profile, tape, plan)
    begin = steps.first[: 2 * each * 33]
    assert [o & 3 for o in begin] == [MALLOC, FREE] * each * 33
    sizes = [steps.requests[o >> 2] for o in begin[::2]]
    root = 2 * 32000 * 4096 + 4096
    assert sizes[each - 1] == root * (2 if precision == "bf16" else 4)
    assert set(begin).isdisjoint(steps.following)


def test_fsdp1_puts_gradients_together_on_the_all_gathers_stream() -> None:
    """Where the flat parameter was taken apart; with them the sum of a tied weight's two."""
    profile, tape, plan = job("meta-llama/Llama-3.2-1B", "zero3", "fsdp1")
    steps = traced(profile, tape, plan)
    root, tied = (128256 + 1) * 2048 * 2, 128256 * 2048 * 2
    born = Counter(steps.requests[o >> 2] for o in steps.following if o & 3 == MALLOC)
    assert born[root | ALL_GATHER] == 2 and root not in born  # the parameters, then their gradients
    assert born[tied | ALL_GATHER] == 1 and born[tied] == 2


@pytest.mark.parametrize("model", ["google/gemma-3-4b-pt", "google/gemma-3-12b-pt"])
@pytest.mark.parametrize(("strategy", "backend"), [("ddp", "ddp"), ("zero3", "fsdp2"), ("zero3", "deepspeed")])
def test_what_layers_share_dies_once(model: str, strategy: str, backend: str) -> None:
    """Every sixth layer sees all tokens, and one recorded layer stands for many of these: their mask is the root's."""
    shared = job(model, strategy, backend, activation_checkpointing="full", gradient_accumulation_steps=2)
    steps = traced(*shared)
    for operations in (steps.first, steps.following):
        died = Counter(operation >> 2 for operation in operations if operation & 3 in (FREE, FREE_LATER))
        assert set(died.values()) == {1}
    ledger = replayed(*shared)
    allocator, after = walked(steps)
    assert allocator.requested_peak == ledger.peak + without_scratch(*shared)
    assert after == [sum(ledger.resident)] * 3
