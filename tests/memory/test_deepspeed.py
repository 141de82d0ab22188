"""DeepSpeed's arithmetic, alone and against DeepSpeed itself in several processes on the CPU."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from matrix import taken, with_all_cases

from fsdp_advisor.engines.deepspeed.buffers import PendingGradients, buffers
from fsdp_advisor.engines.deepspeed.coordinator import GatherVisit, gathered
from fsdp_advisor.engines.deepspeed.groups import groups
from fsdp_advisor.engines.deepspeed.host import gather_warnings, host_memory, host_tensors, not_modelled
from fsdp_advisor.engines.deepspeed.partitions import (
    deepspeed_refusal,
    flat_elements,
    muon_chunks,
    offloaded_updates,
    owned_by_rank0,
    shard_elements,
    states,
    sub_groups,
)
from fsdp_advisor.engines.deepspeed.settings import DEFAULTS, Settings
from fsdp_advisor.job.plan import Plan
from fsdp_advisor.memory.host import HostMemory, page_locked
from fsdp_advisor.model.profile import Parameter, Profile, Run, Stack, Unit
from fsdp_advisor.parallelism.mesh import Mesh
from fsdp_advisor.program.storages import States, Storages

pytestmark = pytest.mark.slow

HIDDEN, WIDTH, VOCABULARY, LAYERS = 13, 29, 37, 3
SMALL = Settings(
    reduce_bucket_size=1000, prefetch_bucket_size=300, param_persistence_threshold=30, sub_group_size=10**9
)


def odd(*, tied: bool = True, frozen: bool = False, trains_embedding: bool = True) -> Profile:
    """A model whose sizes are odd numbers, so that shards are padded: the one of deepspeed_worker.py."""
    layer = Unit(
        "Block",
        (
            Parameter("norm.weight", (HIDDEN,)),
            Parameter("norm.bias", (HIDDEN,)),
            Parameter("up.weight", (WIDTH, HIDDEN), not frozen),
            Parameter("up.bias", (WIDTH,), not frozen),
            Parameter("down.weight", (HIDDEN, WIDTH)),
        ),
    )
    embedding = Parameter("embed.weight", (VOCABULARY, HIDDEN), trains_embedding, ("head.weight",) if tied else ())
    head = () if tied else (Parameter("head.weight", (VOCABULARY, HIDDEN)),)
    stack = Stack("layers", (layer,), (Run((0,), LAYERS),))
    return Profile("odd", "causal", Unit("Odd", (embedding, *head)), (stack,), (1,), None, {}, {})


def llama(hidden: int, width: int, layers: int, vocabulary: int) -> Profile:
    square = (hidden, hidden)
    layer = Unit(
        "LlamaDecoderLayer",
        (
            *(Parameter(f"self_attn.{x}_proj.weight", square) for x in "qkvo"),
            *(Parameter(f"mlp.{x}_proj.weight", (width, hidden)) for x in ("gate", "up")),
            Parameter("mlp.down_proj.weight", (hidden, width)),
            Parameter("input_layernorm.weight", (hidden,)),
            Parameter("post_attention_layernorm.weight", (hidden,)),
        ),
    )
    root = Unit(
        "LlamaForCausalLM",
        (
            Parameter("model.embed_tokens.weight", (vocabulary, hidden)),
            Parameter("model.norm.weight", (hidden,)),
            Parameter("lm_head.weight", (vocabulary, hidden), role="head"),
        ),
    )
    stack = Stack("model.layers", (layer,), (Run((0,), layers),))
    return Profile("llama", "causal", root, (stack,), (1,), None, {}, {})


LLAMA_7B = llama(4096, 11008, 32, 32000)


def plan(stage: int = 2, ranks: int = 2, **changes: Any) -> Plan:
    return Plan(
        **{"strategy": f"zero{stage}", "backend": "deepspeed", "mesh": Mesh(dp_shard=ranks), "seq_len": 16, **changes}
    )


def total(kept: States) -> Storages:
    return kept.parameters + kept.gradients + kept.optimizer + kept.communication + kept.buffers


def test_flat_buffers_and_shards_are_padded_to_the_ranks() -> None:
    assert flat_elements(1322, 2) == 1324
    assert flat_elements(1324, 2) == 1324
    assert [shard_elements(29, n) for n in (1, 2, 3, 29, 30)] == [29, 15, 10, 1, 1]


def test_parameters_come_in_the_module_s_order() -> None:
    names = [p.name for p in odd(tied=False).in_order()]
    layer = ["norm.weight", "norm.bias", "up.weight", "up.bias", "down.weight"]
    assert names == ["embed.weight", *(layer * LAYERS), "head.weight"]


def test_rank0_keeps_the_parameter_that_crosses_its_end_whole() -> None:
    profile = odd()
    assert owned_by_rank0(profile.in_order(), 481) == (481, 481, 1)
    assert owned_by_rank0(profile.in_order(), 500) == (507, 481, 3)
    assert owned_by_rank0(profile.in_order(), 100) == (481, 100, 1)
    everything = profile.parameters
    assert owned_by_rank0(profile.in_order(), everything + 1) == (everything, 481, 1 + 5 * LAYERS + 1)


def test_sub_groups_close_with_the_parameter_that_fills_them() -> None:
    settings = Settings(sub_group_size=400)
    groups = [(g.elements, len(g.parameters)) for g in sub_groups(odd(), plan(3, 2), settings)]
    assert sum(n for n, _ in groups) == sum(shard_elements(p.elements, 2) for p in odd().in_order())
    assert sum(n for _, n in groups) == 1 + 5 * LAYERS
    assert all(n >= 400 for n, _ in groups[:-1])
    (whole,) = sub_groups(odd(), plan(3, 2))
    assert (whole.elements, len(whole.parameters)) == (sum(n for n, _ in groups), 1 + 5 * LAYERS)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_states_are_those_of_the_textbook_and_the_masters(stage: int) -> None:
    """7B in fp32 on 4 ranks: the master is a second copy of the weights, which the textbook does not know."""
    kept = states(LLAMA_7B, plan(stage, 4, precision="fp32"))
    n = LLAMA_7B.parameters
    whole, part = 4 * n, n
    expected = {1: whole + 3 * part * 4 / 4, 2: whole + 3 * part * 4 / 4, 3: 4 * (2 + 3) * n / 4 + 2e9}[stage]
    assert total(kept).exact == pytest.approx(expected, rel=2e-3)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16-mixed", "fp16-mixed"])
@pytest.mark.parametrize("offload", ["none", "optimizer", "parameters"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_more_ranks_never_keep_more(stage: int, offload: str, precision: str) -> None:
    before = None
    for ranks in (2, 4, 8, 64):
        now = total(states(LLAMA_7B, plan(stage, ranks, offload=offload, precision=precision)))
        assert now.rounded >= now.exact
        assert before is None or now.exact <= before
        before = now.exact * 1.0001  # padding


def test_fp16_is_as_bf16_mixed_but_for_the_search_for_overflow() -> None:
    for stage in (1, 2, 3):
        half, brain = (plan(stage, 4, precision=p) for p in ("fp16-mixed", "bf16-mixed"))
        assert states(LLAMA_7B, half) == states(LLAMA_7B, brain)
        assert buffers(LLAMA_7B, half).moments[1:] == buffers(LLAMA_7B, brain).moments[1:]


def filled_with(gradients: Iterable[tuple[int, int]], ranks: int, owned: int = 0) -> PendingGradients:
    """A bucket with these gradients: (first element, elements) in the flat buffer, of which each rank owns `owned` elements."""
    filled = PendingGradients()
    for start, n in gradients:
        filled.put(start, n, ranks * shard_elements(n, ranks), 0, owned)
    return filled


def test_a_gradient_that_crosses_partitions_is_copied() -> None:
    two = buffers(LLAMA_7B, plan(2, 2))
    (owned,) = two.partition_elements
    assert two.copy_bytes(filled_with([(0, 10), (10, 20)], 2, owned), 2) == 0
    assert two.copy_bytes(filled_with([(owned - 10, 30)], 2, owned), 2) == 60
    assert two.copy_bytes(filled_with([(owned - 10, 10), (owned, 20)], 2, owned), 2) == 60
    three = buffers(LLAMA_7B, plan(3, 2))
    assert three.copy_bytes(filled_with([(0, 10)], 2), 2) == 0
    assert three.copy_bytes(filled_with([(0, 11)], 2), 2) == 24
    assert three.copy_bytes(filled_with([(0, 11), (11, 10)], 2), 2) == 44


def test_buffers_of_each_stage_are_those_that_it_allocates() -> None:
    assert buffers(LLAMA_7B, plan(1)).whole_gradients
    assert not buffers(LLAMA_7B, plan(2)).whole_gradients
    assert buffers(LLAMA_7B, plan(1)).bucket == Storages.of(2 * DEFAULTS.reduce_bucket_size)
    assert buffers(LLAMA_7B, plan(3)).bucket == Storages()
    offloaded = buffers(LLAMA_7B, plan(2, offload="optimizer"))
    assert offloaded.averaged == Storages() and offloaded.moments[-1].total == Storages()
    assert offloaded.offload_temporaries(1000) == Storages.of(8000)
    assert buffers(LLAMA_7B, plan(3, offload="optimizer")).offload_temporaries(1000) == Storages.of(8000) + Storages.of(
        2000
    )
    assert buffers(LLAMA_7B, plan(2)).offload_temporaries(1000) == Storages()


def test_a_partition_of_a_single_gradient_is_not_flattened() -> None:
    """64 ranks own less than the embedding each: the gradient is a view, which lives on where it needs no cast."""
    mixed = {m.name: m for m in buffers(LLAMA_7B, plan(2, 64)).moments}
    owned = flat_elements(LLAMA_7B.parameters, 64) // 64
    assert mixed["cast"].temporaries == Storages.of(4 * owned)
    assert mixed["update"].gradients == Storages()
    same = {m.name: m for m in buffers(LLAMA_7B, plan(2, 64, precision="bf16")).moments}
    assert same["cast"].temporaries == Storages()
    assert same["update"].gradients == Storages.of(2 * 4096 * 32000)


def gathered_bytes(visits: Iterable[GatherVisit]) -> list[int]:
    """Bytes of gathered parameters after each allocation and free of these visits, from nothing."""
    sizes: dict[int, int] = {}
    found = [0]
    for visit in visits:
        for storage, n_bytes in (*visit.rising, *visit.falling):
            sizes[storage] = n_bytes
            found.append(sum(sizes.values()))
    return found


def test_zero3_gathers_up_to_its_limit() -> None:
    result = gathered(LLAMA_7B, plan(3, 8))
    assert len(result.forward) == len(result.backward) == 32 + 2
    assert 2e9 < max(gathered_bytes((*result.forward, *result.backward))) < 2.4e9
    assert 0.9e9 < gathered_bytes(result.forward)[-1] < 2.2e9
    assert gathered_bytes(gathered(LLAMA_7B, plan(3, 1)).forward) == [0]
    fewer = gathered(LLAMA_7B, plan(3, 8), Settings(max_live_parameters=3 * 10**8, max_reuse_distance=0))
    assert max(gathered_bytes((*fewer.forward, *fewer.backward))) < 1e9
    again = gathered(LLAMA_7B, plan(3, 8, activation_checkpointing="full"))
    assert len(again.backward) == 34


def test_zero3_keeps_only_the_head_where_adapters_are_switched_off_in_each_step() -> None:
    """DeepSpeed's trace of the modules is never valid then."""
    result = gathered(LLAMA_7B, plan(3, 8, task="dpo", reference="adapters-off", loss_code="trl"))
    head, mlp = 2 * 32000 * 4096, 2 * 11008 * 4096
    assert gathered_bytes(result.forward)[-1] == head
    assert max(gathered_bytes((*result.forward, *result.backward))) <= head + max(head, mlp)


def test_zero3_keeps_only_the_head_for_the_backward_of_kto() -> None:
    """DeepSpeed's trace has only a forward, in which it prefetches parameters."""
    result = gathered(LLAMA_7B, plan(3, 8, task="kto", reference="copy", loss_code="trl"))
    alone = gathered(LLAMA_7B, plan(3, 8, task="kto", reference="copy", loss_code="trl"), forward_only=True)
    head, mlp = 2 * 32000 * 4096, 2 * 11008 * 4096
    assert gathered_bytes(result.forward)[-1] == head
    assert max(gathered_bytes(result.backward)) <= head + mlp
    assert max(gathered_bytes(result.forward)) > max(gathered_bytes(alone.forward))


def test_zero3_keeps_the_head_alone_for_backward_if_only_the_head_learns() -> None:
    root = tuple(replace(p, trainable=p.role == "head") for p in LLAMA_7B.root.parameters)
    unit = LLAMA_7B.stacks[0].units[0]
    frozen = replace(unit, parameters=tuple(replace(p, trainable=False) for p in unit.parameters))
    stack = replace(LLAMA_7B.stacks[0], units=(frozen,))
    result = gathered(replace(LLAMA_7B, root=replace(LLAMA_7B.root, parameters=root), stacks=(stack,)), plan(3, 8))
    assert gathered_bytes(result.forward)[-1] == 2 * 32000 * 4096


@pytest.mark.parametrize(("task", "layers"), [("dpo", 32), ("grpo", 1)])
def test_frozen_weights_of_checkpointed_layers_stay_if_the_reference_runs_before_backward(
    task: str, layers: int
) -> None:
    unit = LLAMA_7B.stacks[0].units[0]
    frozen = replace(unit, parameters=tuple(replace(p, trainable=False) for p in unit.parameters))
    profile = replace(LLAMA_7B, stacks=(replace(LLAMA_7B.stacks[0], units=(frozen,)),))
    job = plan(
        3, 8, task=task, reference="adapters-off", loss_code="trl", activation_checkpointing="full", precision="bf16"
    )
    result = gathered(profile, job)
    matrices = sum(2 * p.elements for p in unit.parameters if len(p.shape) == 2)
    head, up = 2 * 32000 * 4096, 2 * 11008 * 4096
    peak = max(gathered_bytes((*result.forward, *result.backward)))
    assert head + layers * matrices <= peak <= head + max(head, up) + layers * matrices


def test_offload_needs_the_host_memory_of_every_rank_of_a_node() -> None:
    assert host_memory(LLAMA_7B, plan(2, 8)) == HostMemory()
    job = plan(2, 8, mesh=Mesh(dp_shard=8, nnodes=2), offload="optimizer")
    n = flat_elements(LLAMA_7B.parameters, 8) // 8
    tensors = host_tensors(LLAMA_7B, job, DEFAULTS)
    assert tensors.pinned == (4 * n, 4 * n, 2 * n, 2 * 32000 * 4096)
    assert tensors.pageable == (4 * n, 4 * n)
    node = host_memory(LLAMA_7B, job)
    assert node.pinned == 4 * sum(page_locked(n_bytes) for n_bytes in tensors.pinned)
    assert node.pageable == 4 * 8 * n
    assert page_locked(3 * 2**30) == 4 * 2**30
    job = plan(2, offload="parameters", offload_device="nvme", precision="bf16", optim="sgd")
    assert len(not_modelled(LLAMA_7B, job)) == 4


def test_muons_group_has_the_matrices_without_embed_in_their_name_the_largest_first() -> None:
    by_muon, by_adam = groups(odd(tied=False), plan(2, optim="muon"))
    names = [placed.parameter.name for placed in by_muon.placed]
    assert names == ["head.weight", *["up.weight"] * LAYERS, *["down.weight"] * LAYERS] and by_muon.by_muon
    assert [placed.parameter.name for placed in by_adam.placed][:2] == ["embed.weight", "norm.weight"]
    (one,) = groups(odd(tied=False), plan(2))
    assert list(one.parameters) == list(odd(tied=False).in_order()) and not one.by_muon


def test_muon_keeps_the_momentum_of_whole_matrices_twice_and_adam_its_moments() -> None:
    profile, job = odd(tied=False), plan(2, 2, optim="muon")
    matrices, rest = VOCABULARY * HIDDEN + 6 * HIDDEN * WIDTH, VOCABULARY * HIDDEN + LAYERS * (2 * HIDDEN + WIDTH)
    owned = [flat_elements(n, 2) // 2 for n in (matrices, rest)]
    whole = VOCABULARY * HIDDEN + 3 * HIDDEN * WIDTH  # the third of the equal matrices crosses the end of rank 0's part
    kept = states(profile, job).optimizer.exact
    assert VOCABULARY * HIDDEN + 2 * HIDDEN * WIDTH < owned[0] < whole
    assert kept == 4 * sum(owned) + 2 * 2 * whole + 2 * 4 * owned[1] + 4 + 4


def test_muon_under_zero3_keeps_the_module_s_order_and_the_buffers_of_its_last_gathers() -> None:
    profile, job = odd(tied=False), plan(3, 2, optim="muon")
    by_muon, _ = sub_groups(profile, job, SMALL)
    assert [p.name for p in by_muon.parameters] == [*["up.weight", "down.weight"] * LAYERS, "head.weight"]
    head, matrix = shard_elements(VOCABULARY * HIDDEN, 2), shard_elements(WIDTH * HIDDEN, 2)
    assert [chunk.shards for chunk in muon_chunks(profile, job, SMALL)] == [
        (matrix, matrix), (matrix, matrix), (matrix, matrix), (head,)
    ]  # fmt: skip
    kept = SMALL.reduce_bucket_size + (2 + 1) * (2 * matrix + head)
    assert states(profile, job, SMALL).communication.exact == 2 * kept


def test_one_rank_gathers_nothing_for_muon() -> None:
    assert states(odd(), plan(3, 1, optim="muon"), SMALL).communication.exact == 2 * SMALL.reduce_bucket_size


def test_muon_with_offload_keeps_its_momentum_on_the_host_in_parts() -> None:
    profile, job = odd(tied=False), plan(2, 2, optim="muon", offload="optimizer")
    owned = [flat_elements(group.elements, 2) // 2 for group in groups(profile, job)]
    assert host_tensors(profile, job, SMALL).pageable == (4 * owned[0], 4 * owned[1], 4 * owned[1])
    assert states(profile, job).optimizer.exact == 0


def test_offloaded_muon_under_zero2_gathers_64_mib_at_a_time_and_under_zero3_whole_sub_groups() -> None:
    most = 64 * 2**20
    divided = states(LLAMA_7B, plan(2, 8, optim="muon", offload="optimizer")).communication.exact
    largest = 2 * 4096 * 32000
    assert largest + most < divided <= largest + 256 * 2**20
    sharded = plan(3, 8, optim="muon", offload="optimizer")
    matrices = 32 * (4 * 4096**2 + 3 * 4096 * 11008)
    updates = offloaded_updates(LLAMA_7B, sharded)
    assert updates is not None and [sum(m.elements for m in batch.matrices) for batch in updates.batches] == [matrices]
    assert updates.kept == ()  # its buffers are too large
    (warning,) = gather_warnings(LLAMA_7B, sharded)
    assert "24.12 GiB" in warning and gather_warnings(LLAMA_7B, plan(3, 8, optim="muon")) == []


def test_deepspeeds_muon_fails_on_filters_of_four_dimensions() -> None:
    filters = Unit("Filters", (Parameter("conv.weight", (8, 3, 5, 5)),))
    refused = deepspeed_refusal(Profile("filters", "vision", filters, (), (), None, {}, {}), plan(2, optim="muon"))
    assert refused is not None and refused.message == (
        "DeepSpeed's Muon fails on weights with four dimensions, such as conv.weight"
    )


CASES: list[dict[str, Any]] = [
    {"stage": 1},
    {"stage": 2, "optim": "adamw_torch", "accumulation": 2},
    {"stage": 2, "precision": "fp32", "frozen": True},
    {"stage": 2, "precision": "bf16", "optim": "sgd_momentum"},
    {"stage": 2, "optim": "adafactor"},
    {"stage": 2, "optim": "adafactor", "framework": "trainer"},
    {"stage": 3, "optim": "adafactor", "framework": "trainer", "precision": "bf16"},
    {"stage": 1, "offload": "optimizer", "accumulation": 2},
    {"stage": 2, "offload": "optimizer", "accumulation": 2, "frozen": True},
    {"stage": 3},
    {"stage": 3, "tied": False, "zero": {"sub_group_size": 400}},
    {"stage": 3, "tied": False, "trains_embedding": False},
    {"stage": 3, "precision": "fp32", "optim": "sgd"},
    {"stage": 3, "precision": "bf16", "optim": "adamw_torch", "frozen": True},
    {"stage": 3, "tied": False, "zero": {"stage3_max_live_parameters": 1500, "stage3_max_reuse_distance": 1500}},
    {"stage": 3, "zero": {"stage3_max_live_parameters": 1500, "stage3_max_reuse_distance": 500}},
    {"stage": 3, "offload": "optimizer", "accumulation": 2},
    {"stage": 3, "offload": "parameters", "frozen": True},
    {"stage": 2, "optim": "rmsprop"},
    {"stage": 3, "optim": "rmsprop", "frozen": True},
    {"stage": 1, "optim": "muon"},
    {"stage": 2, "optim": "muon", "accumulation": 2, "frozen": True},
    {"stage": 2, "optim": "muon", "precision": "fp32", "tied": False},
    {"stage": 3, "optim": "muon", "tied": False},
    {"stage": 3, "optim": "muon", "frozen": True, "accumulation": 2, "zero": {"sub_group_size": 400}},
    {"stage": 3, "optim": "muon", "precision": "fp32"},
    {"stage": 1, "optim": "muon", "offload": "optimizer", "tied": False},
    {"stage": 2, "optim": "muon", "offload": "optimizer", "accumulation": 2, "frozen": True},
    {"stage": 2, "optim": "muon", "offload": "optimizer", "precision": "fp32"},
    {"stage": 3, "optim": "muon", "offload": "optimizer", "accumulation": 2, "zero": {"sub_group_size": 400}},
    {"stage": 3, "optim": "muon", "offload": "parameters", "tied": False},
]  # fmt: skip
DEFAULT_CASE: dict[str, Any] = {
    "precision": "bf16-mixed", "offload": "none", "optim": "adamw_torch_fused", "accumulation": 1, "tied": True,
    "frozen": False, "trains_embedding": True, "zero": {}, "framework": "deepspeed",
}  # fmt: skip


def settings_of(case: dict[str, Any]) -> Settings:
    small = {name: getattr(SMALL, name) for name in Settings.__slots__}
    return Settings(**small | {key.removeprefix("stage3_"): value for key, value in case["zero"].items()})


def measure(ranks: int, cases: list[dict[str, Any]], folder: Path) -> list[dict[str, Any]]:
    knobs = {
        "reduce_bucket_size": SMALL.reduce_bucket_size,
        "stage3_prefetch_bucket_size": SMALL.prefetch_bucket_size,
        "stage3_param_persistence_threshold": SMALL.param_persistence_threshold,
    }
    questions, answers = folder / "cases.json", folder / "results.json"
    questions.write_text(json.dumps([case | {"zero": knobs | case["zero"]} for case in cases]))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(Path(__file__).with_name("deepspeed_worker.py")), str(questions), str(answers)]
    workers = [
        subprocess.Popen(
            command,
            env=os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    errors = [worker.communicate(timeout=1200)[1] for worker in workers]
    assert all(worker.returncode == 0 for worker in workers), errors[0][-3000:]
    results: list[dict[str, Any]] = json.loads(answers.read_text())
    return results


@with_all_cases
@pytest.mark.parametrize("ranks", taken([3], [2]))
def test_states_peaks_and_gathered_parameters_equal_those_of_deepspeed(ranks: int, tmp_path: Path) -> None:
    """Every byte that a real run keeps, the highest moment of its step, and what stage 3 gathers in forward."""
    if not os.environ.get("CI"):
        pytest.importorskip("deepspeed")
    cases = [DEFAULT_CASE | case for case in (CASES if ranks == 2 else CASES[::3])]
    for case, found in zip(cases, measure(ranks, cases, tmp_path), strict=True):
        profile = odd(**{name: case[name] for name in ("tied", "frozen", "trains_embedding")})
        settings = settings_of(case)
        job = plan(
            case["stage"], ranks, precision=case["precision"], offload=case["offload"], optim=case["optim"],
            gradient_accumulation_steps=case["accumulation"], framework=case["framework"],
        )  # fmt: skip
        expected = states(profile, job, settings)
        # torch's foreach optimizers keep their step counts on the host, which here is the device as well
        sub_group_count = len(sub_groups(profile, job, settings)) if case["stage"] == 3 else 1
        is_of_torch = case["framework"] != "trainer" and case["optim"] in ("adamw_torch", "rmsprop", "adafactor")
        steps = 4 * sub_group_count if is_of_torch else 0
        assert found["unknown"] == [], case
        for name in ("parameters", "gradients", "communication"):
            assert sum(found[name]) == getattr(expected, name).exact, (case, name, found[name])
        assert sum(found["optimizer"]) - steps == expected.optimizer.exact, (case, found["optimizer"])
        if case["offload"] != "none":
            memory = host_tensors(profile, job, settings)
            assert found["pinned"] == sorted(memory.pinned), case
            assert found["pageable"] == sorted(memory.pageable), case
        step = buffers(profile, job, settings)
        scalars = found["step_high"] - (max(m.total.exact for m in step.moments) - step.released_at_step.exact)
        updates_in_step = case["optim"] == "muon" and case["stage"] == 3  # which is not compiled here
        if case["offload"] == "none" and not updates_in_step:
            assert 0 <= scalars <= 16 * len(list(profile.in_order())) + 64, (case, scalars)
        if case["stage"] == 3:
            levels = gathered_bytes(gathered(profile, job, settings).forward)
            assert found["gathered"][1] == levels[-1], case
            if case["offload"] != "parameters":
                assert found["gathered"][0] == max(levels), case
