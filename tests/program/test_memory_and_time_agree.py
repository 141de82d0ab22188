"""Memory and time read one program: what the timeline sends is what memory has buffers for.

Expected bytes follow from a model's parameters, the ranks, and the bytes per element of the dtypes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from math import ceil, prod
from typing import Any, TypeVar

import pytest
from jobs import Job, job, program_of
from random_jobs import random_jobs

from fsdp_advisor.hardware import find_gpu
from fsdp_advisor.hardware.links import ETHERNET_100G
from fsdp_advisor.job.plan import Plan
from fsdp_advisor.model.profile import Profile
from fsdp_advisor.program.accounts import Account, Stream
from fsdp_advisor.program.instructions import (
    AllGather,
    Alloc,
    AllReduce,
    Instruction,
    MicroBatch,
    ReduceScatter,
    StepProgram,
    Visit,
)
from fsdp_advisor.timing import step_time, timeline
from fsdp_advisor.timing.collectives import Group, all_gather_s, all_reduce_s

Collective = TypeVar("Collective", AllGather, ReduceScatter, AllReduce)

A100 = find_gpu("A100")
FSDP = [
    options
    for backend, seed in (("fsdp2", 3), ("fsdp1", 4))
    for options in random_jobs(80, seed=seed, backend=backend)
    if options["strategy"] in ("zero2", "zero3", "hsdp") and options["gpus"] > options["nnodes"]
]
FSDP2 = [options for options in FSDP if options["backend"] == "fsdp2"][:20]
FSDP1 = [options for options in FSDP if options["backend"] == "fsdp1"][:12]
DDP = list(random_jobs(6, seed=5, strategy="ddp", backend="ddp", offload="none", gpus=4, nnodes=1))
DEEPSPEED = list(random_jobs(8, seed=6, strategy="zero2", backend="deepspeed", gpus=4, nnodes=1))


def name_of(options: dict[str, Any]) -> str:
    return "-".join(str(options[key]) for key in ("model", "strategy", "backend", "framework", "precision"))


def collectives(micro_batch: MicroBatch, kind: type[Collective], phase: str | None = None) -> list[Collective]:
    """The collectives of one kind in a micro-batch, or in one phase of it."""
    visits = [visit for visit in micro_batch.visits if phase in (None, visit.phase)]
    return [i for visit in visits for i in visit.instructions if isinstance(i, kind)]


def instructions(visits: tuple[Visit, ...]) -> Iterator[Instruction]:
    for visit in visits:
        yield from visit.instructions


def latest_buffers(micro_batch: MicroBatch, kind: type[Instruction], account: Account, stream: Stream) -> list[Alloc]:
    """For each instruction of a kind, the last buffer of an account and a stream that was allocated before it."""
    found, latest = [], None
    for instruction in instructions(micro_batch.visits):
        if isinstance(instruction, Alloc) and instruction.account is account and instruction.stream is stream:
            latest = instruction
        elif isinstance(instruction, kind):
            assert latest is not None
            found.append(latest)
    return found


def padded_elements(profile: Profile, ranks: int, *, trainable: bool) -> int:
    """Elements of all parameters with dim 0 padded to a multiple of the ranks, as FSDP2 shards them."""
    shapes = [p.shape or (1,) for p in profile.in_order() if p.trainable or not trainable]
    return sum(ceil(shape[0] / ranks) * ranks * prod(shape[1:]) for shape in shapes)


def sent_elements(profile: Profile, plan: Plan, *, trainable: bool) -> int:
    """Elements that a collective over the whole model sends: FSDP2 sends its padding too."""
    if plan.backend == "fsdp2":
        return padded_elements(profile, plan.shard_degree, trainable=trainable)
    return profile.trainable_parameters if trainable else profile.parameters


def bytes_of(buffers: list[Alloc]) -> int:
    return sum(buffer.storages.exact for buffer in buffers)


def reduce_bytes(plan: Plan) -> int:
    """Under mixed precision, plain PyTorch reduces in fp32, the masters' dtype; accelerate in the dtype that computes."""
    sizes = {"fp32": 4, "bf16": 2, "bf16-mixed": 4, "fp16-mixed": 4}
    return 2 if plan.framework != "torch" and plan.precision != "fp32" else sizes[plan.precision]


def compute_bytes(plan: Plan) -> int:
    return 4 if plan.precision == "fp32" else 2


@pytest.mark.parametrize("options", FSDP2 + FSDP1, ids=name_of)
def test_fsdp_gathers_every_parameter_once_per_forward(options: dict[str, Any]) -> None:
    profile, tape, plan = job(**options)
    for number, micro_batch in enumerate(program_of(profile, tape, plan).micro_batches):
        sent = sum(gather.n_bytes for gather in collectives(micro_batch, AllGather, "forward"))
        # FSDP1 keeps parameters gathered while it defers reduction, unless it reshards after forward
        kept = plan.backend == "fsdp1" and plan.defers_reduction and plan.strategy == "zero2" and number > 0
        assert sent == (0 if kept else sent_elements(profile, plan, trainable=False) * compute_bytes(plan))


@pytest.mark.parametrize("options", FSDP2 + FSDP1, ids=name_of)
def test_fsdp_reduces_every_gradient_once_per_reduction_in_the_reduce_dtype(options: dict[str, Any]) -> None:
    profile, tape, plan = job(**options)
    program = program_of(profile, tape, plan)
    defers = plan.framework != "torch" and plan.gradient_accumulation_steps > 1
    for micro_batch in program.micro_batches:
        reduces = not defers or micro_batch is program.micro_batches[-1]
        sent = sum(reduction.n_bytes for reduction in collectives(micro_batch, ReduceScatter))
        assert sent == (sent_elements(profile, plan, trainable=True) * reduce_bytes(plan) if reduces else 0)


@pytest.mark.parametrize("options", FSDP2, ids=name_of)
def test_fsdp2_buffers_hold_what_is_sent(options: dict[str, Any]) -> None:
    profile, tape, plan = job(**options)
    last, ranks = program_of(profile, tape, plan).micro_batches[-1], plan.shard_degree
    gathers, reductions = collectives(last, AllGather), collectives(last, ReduceScatter)
    outputs = latest_buffers(last, AllGather, Account.COMMUNICATION, Stream.COPY_IN)
    inputs = latest_buffers(last, ReduceScatter, Account.COMMUNICATION, Stream.COMPUTE)
    forward = outputs[: len(collectives(last, AllGather, "forward"))]
    assert bytes_of(forward) == padded_elements(profile, ranks, trainable=False) * compute_bytes(plan)
    assert bytes_of(inputs) == padded_elements(profile, ranks, trainable=True) * reduce_bytes(plan)
    sent = [gather.n_bytes for gather in gathers] + [reduction.n_bytes for reduction in reductions]
    for n_bytes, buffer in zip(sent, [*outputs, *inputs], strict=True):
        assert n_bytes <= buffer.storages.exact  # the difference is padding


@pytest.mark.parametrize("options", FSDP1, ids=name_of)
def test_fsdp1_buffers_hold_what_is_sent(options: dict[str, Any]) -> None:
    """Each parameter begins on 16 bytes in the flat parameter, whose end is padded to the ranks."""
    profile, tape, plan = job(**options)
    first = program_of(profile, tape, plan).micro_batches[0]
    gathers = collectives(first, AllGather)
    outputs = latest_buffers(first, AllGather, Account.UNSHARDED_PARAMETERS, Stream.ALL_GATHER)
    most = max(len(unit.parameters) for unit, _ in profile.counted_units())
    for gather, buffer in zip(gathers, outputs, strict=True):
        assert 0 <= buffer.storages.exact - gather.n_bytes < 16 * most + plan.shard_degree * 16


@pytest.mark.parametrize("options", DDP, ids=name_of)
def test_ddp_all_reduces_what_its_buckets_hold(options: dict[str, Any]) -> None:
    profile, tape, plan = job(**options)
    program = program_of(profile, tape, plan)
    expected = profile.trainable_parameters * (2 if plan.precision == "bf16" else 4)
    buckets = [alloc for alloc in program.states if alloc.account is Account.COMMUNICATION]
    *others, last = program.micro_batches
    assert bytes_of(buckets) == expected
    assert sum(reduction.n_bytes for reduction in collectives(last, AllReduce)) == pytest.approx(expected)
    assert not any(collectives(other, AllReduce) for other in others)  # `no_sync`


@pytest.mark.parametrize("options", DEEPSPEED, ids=name_of)
def test_deepspeed_zero2_reduces_in_the_dtype_that_computes(options: dict[str, Any]) -> None:
    profile, tape, plan = job(**options)
    program = program_of(profile, tape, plan)
    expected = profile.trainable_parameters * compute_bytes(plan)
    for micro_batch in program.micro_batches:
        (reduction,) = collectives(micro_batch, AllReduce)
        assert reduction.n_bytes == expected
    (gather,) = [i for i in program.optimizer.instructions if isinstance(i, AllGather)]
    assert gather.n_bytes == expected


def expected_seconds(program: StepProgram, plan: Plan) -> float:
    """The seconds of a program's collectives, one after the other on an idle link within a node."""
    group = Group(plan.world_size, 1, A100.intra_node, ETHERNET_100G)
    seconds = 0.0
    for times, visit in [
        *((micro_batch.times, visit) for micro_batch in program.micro_batches for visit in micro_batch.visits),
        (1, program.optimizer),
    ]:
        for instruction in visit.instructions:
            if isinstance(instruction, AllGather | ReduceScatter):
                seconds += times * all_gather_s(instruction.n_bytes, group)
            elif isinstance(instruction, AllReduce):
                seconds += times * all_reduce_s(instruction.n_bytes, group, messages=instruction.messages)
    return seconds


def one_node_jobs() -> Iterator[dict[str, Any]]:
    for options in FSDP2 + FSDP1 + DDP + DEEPSPEED:
        if options["nnodes"] == 1 and options["offload"] == "none" and options["strategy"] != "hsdp":
            yield options


@pytest.mark.parametrize("options", one_node_jobs(), ids=name_of)
def test_the_timeline_shows_every_collective_of_the_program(options: dict[str, Any]) -> None:
    profile, tape, plan = job(**options)
    program = program_of(profile, tape, plan)
    shown = Counter(
        interval.name
        for interval in timeline(profile, program, plan, A100, ETHERNET_100G)
        if interval.stream == "communication"
    )
    words = {AllGather: "all-gather", ReduceScatter: "reduce-scatter", AllReduce: "all-reduce"}
    issued = Counter[str]()
    for visit in program.micro_batches[-1].visits:
        for instruction in visit.instructions:
            if isinstance(instruction, AllReduce) and instruction.exposed:
                issued["reduce gradients"] += 1
            elif isinstance(instruction, AllGather | ReduceScatter | AllReduce) and instruction.n_bytes:
                issued[f"{words[type(instruction)]} {visit.name}"] += 1
    issued["all-gather parameters"] += sum(isinstance(i, AllGather) for i in program.optimizer.instructions)
    assert issued.total() > 0
    assert shown == +issued


@pytest.mark.parametrize("options", one_node_jobs(), ids=name_of)
def test_communication_takes_the_time_of_every_collective_of_the_program(options: dict[str, Any]) -> None:
    profile, tape, plan = job(**options)
    program = program_of(profile, tape, plan)
    found = step_time(profile, program, plan, A100, ETHERNET_100G)
    assert found is not None
    assert sum(micro_batch.times for micro_batch in program.micro_batches) == plan.gradient_accumulation_steps
    assert found.communication_seconds == pytest.approx(expected_seconds(program, plan))


def gathered_in_backward(few: Job) -> tuple[int, int]:
    """Bytes that the timeline gathers in backward, and bytes of parameters that memory allocates in it."""
    (only,) = program_of(*few).micro_batches
    allocated = [
        i
        for visit in only.visits
        if visit.phase == "backward"
        for i in visit.instructions
        if isinstance(i, Alloc) and i.account is Account.UNSHARDED_PARAMETERS
    ]
    return sum(gather.n_bytes for gather in collectives(only, AllGather, "backward")), bytes_of(allocated)


def test_fsdp2_gathers_for_backward_what_it_has_freed_after_forward() -> None:
    profile, tape, plan = job("openai-community/gpt2", "zero3", "fsdp2")
    assert gathered_in_backward((profile, tape, plan))[0] == padded_elements(profile, 4, trainable=False) * 2
    assert gathered_in_backward(job("openai-community/gpt2", "zero2", "fsdp2")) == (0, 0)


def test_deepspeed_zero3_gathers_nothing_for_backward_that_it_has_kept() -> None:
    """GPT-2 is smaller than `stage3_max_reuse_distance`: no parameter is freed between forward and backward."""
    sent, allocated = gathered_in_backward(job("openai-community/gpt2", "zero3", "deepspeed"))
    assert allocated == 0
    assert sent == 0


def test_fsdp2_sends_the_padding_that_it_gathers() -> None:
    """Mixtral's 8 experts are dim 0 of one parameter: over 16 ranks that is padded to twice its size."""
    profile, tape, plan = job("mistralai/Mixtral-8x7B-v0.1", "zero3", "fsdp2", gpus=16, nnodes=2)
    (only,) = program_of(profile, tape, plan).micro_batches
    buffers = latest_buffers(only, AllGather, Account.COMMUNICATION, Stream.COPY_IN)
    assert bytes_of(buffers) > 1.5 * 2 * profile.parameters
    assert sum(gather.n_bytes for gather in collectives(only, AllGather)) == bytes_of(buffers)
