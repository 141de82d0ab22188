"""Load methods: compared with real runs of two processes, and properties of all of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from matrix import in_turn
from ranks import RANKS, llama

from fsdp_advisor.engines.loading import choose_load_method, load_methods, one_copy_bytes
from fsdp_advisor.engines.registry import states_of
from fsdp_advisor.engines.transfer import LoadedCheckpoint, LoadMethod
from fsdp_advisor.job.choices import WeightDtype
from fsdp_advisor.job.compatibility import OFFLOADS, mesh_of
from fsdp_advisor.job.plan import Plan
from fsdp_advisor.model.profile import Parameter, Profile, Run, Stack, Unit

pytestmark = pytest.mark.slow
measures = in_turn(0, of=5)  # two processes load a model in every way

GIB = 2**30
SMALL = (512, 1376, 4, 16001)
LLAMA_7B = llama(4096, 11008, 32, 32000)


def plan(backend: str, strategy: str = "zero3", ranks: int = RANKS, nnodes: int = 1, **options: Any) -> Plan:
    return Plan(strategy=strategy, backend=backend, mesh=mesh_of(strategy, ranks, nnodes), seq_len=1, **options)


def load_method(profile: Profile, job: Plan, way: str) -> LoadMethod:
    return next(m for m in load_methods(profile, job) if m.way == way)


def near(n_bytes: int) -> Any:
    return pytest.approx(n_bytes, rel=0.05)


@measures
def test_from_pretrained_holds_a_converted_copy_on_every_rank(measured: list[dict[str, Any]]) -> None:
    """accelerate's cpu_ram_efficient_loading changes nothing: transformers 5 ignores it."""
    profile = llama(*SMALL)
    for case in ("every_rank", "cpu_ram_efficient_loading"):
        predicted = load_method(profile, plan("fsdp2"), case)
        assert measured[0][case]["high_bytes"] == near(predicted.first_rank_host_bytes)
        assert measured[1][case]["high_bytes"] == near(predicted.other_ranks_host_bytes)


@measures
def test_from_pretrained_maps_the_file_if_the_dtype_is_kept(measured: list[dict[str, Any]]) -> None:
    profile = replace(llama(*SMALL), checkpoint_dtype="bfloat16")
    predicted = load_method(profile, plan("fsdp2", precision="bf16"), "every_rank")
    assert predicted.host_bytes_per_node == 0
    for rank in measured:
        assert rank["every_rank_mapped"]["high_bytes"] < 0.01 * one_copy_bytes(profile, plan("fsdp2"))
        assert rank["every_rank_mapped"]["file_bytes"] == near(predicted.mapped_bytes or 0)


@in_turn(2, of=5)
def test_experts_are_copied_while_other_weights_are_mapped(tmp_path: Path) -> None:
    """transformers stacks the experts of a layer, which the file has one by one. Two copies of a layer's gate and up projections exist."""
    environment = {**os.environ, "PYTHONPATH": f"{Path(__file__).parent}:{os.environ.get('PYTHONPATH', '')}"}
    worker = [sys.executable, str(Path(__file__).with_name("experts_worker.py")), str(tmp_path)]
    printed = subprocess.run(worker, env=environment, check=True, capture_output=True, text=True).stdout
    found = json.loads(printed.splitlines()[-1])
    gate_up = Parameter("mlp.experts.gate_up_proj", (16, 2304, 1024), role="expert")
    down = Parameter("mlp.experts.down_proj", (16, 1024, 1152), role="expert")
    layer = Unit("Qwen3MoeDecoderLayer", (Parameter("self_attn.q_proj.weight", (512, 1024)), gate_up, down))
    layers = (Stack("model.layers", (layer,), (Run((0,), 3),)),)
    root, config = Unit("Qwen3MoeForCausalLM", ()), {"model_type": "qwen3_moe"}
    profile = Profile("experts", "causal-lm", root, layers, (0,), None, {**config}, {}, checkpoint_dtype="bfloat16")
    checkpoint = LoadedCheckpoint.of(profile, plan("ddp", "ddp", precision="bf16"))
    assert found["left_bytes"] == near(checkpoint.kept_bytes)
    assert found["high_bytes"] == near(checkpoint.private_bytes)


@measures
def test_fsdp1_without_device_id_flattens_units_on_the_host(measured: list[dict[str, Any]]) -> None:
    predicted = load_method(llama(*SMALL), plan("fsdp1"), "every_rank_without_device_id")
    for rank in measured:
        assert rank["fsdp1_without_device_id"]["high_bytes"] == near(predicted.first_rank_host_bytes)


@measures
def test_fsdp1_moves_and_flattens_one_unit_at_a_time(measured: list[dict[str, Any]]) -> None:
    """Measured on rank 1, which allocates each unit when it wraps it. Differs by the model's buffers and a few small tensors."""
    predicted = load_method(llama(*SMALL), plan("fsdp1"), "rank0")
    assert measured[1]["fsdp1_rank0"]["device_bytes"] == pytest.approx(predicted.gpu_bytes, rel=1e-4)
    assert predicted.other_ranks_host_bytes == 0


@measures
def test_fsdp2_broadcasts_whole_tensors_from_rank0(measured: list[dict[str, Any]]) -> None:
    """On the CPU device and host memory are the same, so rank 0 holds both. Its own copy is the tensor it broadcasts."""
    predicted = load_method(llama(*SMALL), plan("fsdp2"), "rank0")
    shards = load_method(llama(*SMALL), plan("fsdp2"), "sharded").gpu_bytes
    assert measured[1]["fsdp2_rank0"]["high_bytes"] == near(predicted.gpu_bytes)
    assert measured[0]["fsdp2_rank0"]["high_bytes"] == near(predicted.first_rank_host_bytes + shards)


@measures
def test_fsdp2_sharded_loading_reads_only_the_own_rows(measured: list[dict[str, Any]]) -> None:
    """Each rank reads its rows from the mapped file and allocates only its shards."""
    predicted = load_method(llama(*SMALL), plan("fsdp2"), "sharded")
    for rank in measured:
        assert rank["fsdp2_sharded"]["high_bytes"] == near(predicted.gpu_bytes)


@measures
def test_fsdp2_moves_one_unit_at_a_time(measured: list[dict[str, Any]]) -> None:
    predicted = load_method(llama(*SMALL), plan("fsdp2"), "every_rank")
    for rank in measured:
        assert rank["fsdp2_every_rank"]["device_bytes"] == pytest.approx(predicted.gpu_bytes, rel=1e-4)


@measures
def test_accelerate_scatters_one_tensor_at_a_time(measured: list[dict[str, Any]]) -> None:
    """Measured on rank 0, without buffers. 16001 rows on two ranks, so the last chunk is padded."""
    predicted = load_method(llama(*SMALL), plan("fsdp2", framework="accelerate"), "cpu_ram_efficient_loading")
    assert measured[0]["fsdp2_scattered"]["device_bytes"] == pytest.approx(predicted.gpu_bytes, rel=1e-4)


def test_accelerate_scatters_a_tied_tensor_once_per_name() -> None:
    job = plan("fsdp2", ranks=8, framework="accelerate")
    tied = load_method(llama(4096, 11008, 32, 32000, tied=True), job, "cpu_ram_efficient_loading")
    whole = 4 * 4096 * 32000
    shards = sum(transfer.kept.rounded for transfer in tied.transfers)
    assert tied.gpu_bytes == shards + whole + whole // 8


@pytest.mark.parametrize("framework", ["accelerate", "trainer"])
def test_accelerate_excludes_load_methods(framework: str) -> None:
    ways = {b: [m.way for m in load_methods(LLAMA_7B, plan(b, framework=framework))] for b in ("fsdp1", "fsdp2")}
    assert ways["fsdp1"] == ["every_rank", "rank0", "cpu_ram_efficient_loading"]
    assert ways["fsdp2"] == ["every_rank", "cpu_ram_efficient_loading"]


def test_wrap_none_moves_the_whole_model_at_once() -> None:
    copy = one_copy_bytes(LLAMA_7B, plan("fsdp2", ranks=8))
    assert load_method(LLAMA_7B, plan("fsdp2", ranks=8, wrap="none"), "every_rank").gpu_bytes > copy
    assert load_method(LLAMA_7B, plan("fsdp2", ranks=8), "every_rank").gpu_bytes < copy / 4


def every_plan(ranks: int) -> list[Plan]:
    return [
        plan(backend, strategy, ranks, offload=offload)
        for offload, strategies in OFFLOADS.items()
        for strategy, backends in strategies.items()
        for backend in backends
    ]


@pytest.mark.parametrize("job", every_plan(8), ids=lambda p: f"{p.strategy}-{p.backend}-{p.offload}")
def test_every_plan_can_be_loaded(job: Plan) -> None:
    """At the end of loading the GPU holds the parameters that a rank keeps, so no peak is lower."""
    methods = load_methods(LLAMA_7B, job)
    assert len({m.way for m in methods}) == len(methods) > 0
    for method in methods:
        assert method.gpu_bytes >= states_of(LLAMA_7B, job).parameters.rounded


def test_host_bytes_per_node_counts_rank0_and_the_other_ranks() -> None:
    method = load_method(LLAMA_7B, plan("fsdp1", ranks=8, nnodes=2, offload="parameters"), "rank0")
    assert method.first_rank_host_bytes > method.other_ranks_host_bytes > 0
    assert method.host_bytes_per_node == method.first_rank_host_bytes + 3 * method.other_ranks_host_bytes


def test_fsdp1_loads_7b_on_24_gib_gpus_only_if_layers_are_wrapped() -> None:
    """A user's 7B job ran out of memory inside `FSDP(model)`: without wrapped layers the whole model is one unit."""
    copy = one_copy_bytes(LLAMA_7B, plan("fsdp1"))
    wrapped = load_method(LLAMA_7B, plan("fsdp1", ranks=8), "every_rank")
    assert wrapped.host_bytes_per_node == 8 * copy
    assert copy / 8 < wrapped.gpu_bytes < 24 * GIB
    layers = tuple(p for layer in LLAMA_7B.layers() for p in layer.parameters)
    root = replace(LLAMA_7B.root, parameters=(*layers, *LLAMA_7B.root.parameters))
    one_unit = replace(LLAMA_7B, root=root, stacks=(), order=())
    assert load_method(one_unit, plan("fsdp1", ranks=8), "every_rank").gpu_bytes > 48 * GIB


def test_the_first_load_method_that_fits_is_chosen() -> None:
    methods = load_methods(LLAMA_7B, plan("fsdp1", ranks=8))
    assert choose_load_method(methods, host_memory_bytes=1024 * GIB).way == "every_rank"
    assert choose_load_method(methods, host_memory_bytes=64 * GIB).way == "rank0"
    assert choose_load_method(methods, gpu_memory_bytes=4 * GIB).way == "every_rank_without_device_id"


def test_the_load_method_with_least_host_memory_is_chosen_if_the_hosts_is_unknown() -> None:
    assert choose_load_method(load_methods(LLAMA_7B, plan("fsdp1", ranks=8))).way == "rank0"


def test_a_checkpoint_of_unknown_dtype_counts_as_converted() -> None:
    unknown = load_method(llama(*SMALL), plan("fsdp2"), "every_rank")
    assert unknown.mapped_bytes is None
    assert unknown.first_rank_host_bytes == one_copy_bytes(llama(*SMALL), plan("fsdp2"))


@pytest.mark.parametrize(
    ("backend", "precision", "stored", "copies"),
    [
        ("deepspeed", "bf16-mixed", "bfloat16", 0),  # loaded in the compute dtype, of which DeepSpeed makes masters
        ("deepspeed", "fp16-mixed", "bfloat16", 2),
        ("fsdp2", "bf16-mixed", "bfloat16", 4),
        ("ddp", "bf16", "bfloat16", 0),
        ("ddp", "bf16", "float16", 2),
        ("fsdp1", "fp32", "float32", 0),
    ],
)
def test_only_weights_in_the_checkpoints_dtype_are_mapped(
    backend: str, precision: str, stored: WeightDtype, copies: int
) -> None:
    """`copies`: bytes per element of private memory."""
    profile = replace(llama(*SMALL), checkpoint_dtype=stored)
    strategy = {"ddp": "ddp", "deepspeed": "zero2"}.get(backend, "zero3")
    method = load_methods(profile, plan(backend, strategy, precision=precision))[0]
    assert method.first_rank_host_bytes == copies * profile.parameters


def test_adapters_are_in_private_memory_of_every_rank() -> None:
    base = replace(llama(*SMALL), checkpoint_dtype="bfloat16")
    copy = Parameter("lm_head.modules_to_save.default.weight", (16001, 512), role="adapter", dtype="float32")
    adapted = replace(base, root=replace(base.root, parameters=(*base.root.parameters, copy)))
    method = load_method(adapted, plan("ddp", "ddp", dtype="bfloat16"), "every_rank")
    assert method.host_bytes_per_node == RANKS * 4 * 16001 * 512


def test_fsdp2_reads_rows_only_of_files_with_the_names_of_the_model() -> None:
    """Else DCP fails: "Missing key in checkpoint state_dict", as for the stacked experts of Mixtral."""
    dense, adapter = llama(*SMALL), Parameter("q_proj.lora_A.default.weight", (16, 512), role="adapter")
    experts = Parameter("mlp.experts.down_proj", (16, 512, 1376), role="expert")
    mixture = replace(dense, config={"model_type": "mixtral"})
    for profile, added, is_offered in ((dense, (), True), (dense, (adapter,), False), (mixture, (experts,), False)):
        whole = replace(profile, root=replace(profile.root, parameters=(*profile.root.parameters, *added)))
        assert ("sharded" in {method.way for method in load_methods(whole, plan("fsdp2"))}) == is_offered


def test_zero3_without_zero_init_moves_the_whole_model() -> None:
    big = llama(8192, 28672, 80, 32000)
    job = plan("deepspeed", ranks=64)
    assert load_method(big, job, "every_rank").gpu_bytes > 120 * GIB
    assert load_method(big, job, "zero_init").gpu_bytes < 24 * GIB


def test_zero2_flattens_on_the_host_of_a_small_gpu() -> None:
    job = plan("deepspeed", "zero2", 64)
    ((large,), (small,)) = (load_methods(LLAMA_7B, job, gpu_memory_bytes=n * GIB) for n in (80, 16))
    copy = one_copy_bytes(LLAMA_7B, job)
    assert large.gpu_bytes >= 2 * copy > small.gpu_bytes
    assert small.first_rank_host_bytes > large.first_rank_host_bytes
    assert large.transfers and not small.transfers


@pytest.mark.parametrize(("ranks", "copies"), [(1, 1), (4, 2)])
def test_ddp_allocates_its_buckets_on_several_ranks(ranks: int, copies: int) -> None:
    job = plan("ddp", "ddp", ranks)
    expected = copies * one_copy_bytes(LLAMA_7B, job)
    assert load_method(LLAMA_7B, job, "every_rank").gpu_bytes == pytest.approx(expected, rel=1e-3)
