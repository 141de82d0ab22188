"""The registry of optimizers: every name has one, and every optimizer answers every consumer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

import pytest

from fsdp_advisor.errors import UsageError
from fsdp_advisor.estimator import estimate
from fsdp_advisor.job.choices import Framework, OptimizerName
from fsdp_advisor.job.compatibility import plans
from fsdp_advisor.job.optimizers import LIMITS, limit_of
from fsdp_advisor.job.parsing import make_request
from fsdp_advisor.job.plan import Plan
from fsdp_advisor.memory.host import page_locked
from fsdp_advisor.model.profile import Parameter
from fsdp_advisor.model.resolve import resolve
from fsdp_advisor.policies.optimizers import optimizer_named, optimizer_of
from fsdp_advisor.policies.optimizers.interface import (
    Collectives,
    Constructor,
    NamedOptimizer,
    Refusal,
    Shards,
    Stepped,
)

NAMES: tuple[OptimizerName, ...] = get_args(OptimizerName)
MULTIPLYING: tuple[OptimizerName, ...] = (
    "muon", "galore_adamw", "galore_adafactor", "apollo_adamw", "galore_adamw_layerwise", "apollo_adamw_layerwise",
    "galore_adamw_8bit", "galore_adamw_8bit_layerwise",
)  # fmt: skip
"""Optimizers whose update has matrix products."""
MATRIX = Parameter(name="weight", shape=(100, 60))
VECTOR = Parameter(name="bias", shape=(1000,))


@pytest.mark.parametrize("name", NAMES)
def test_every_name_has_an_optimizer_of_that_name(name: OptimizerName) -> None:
    assert optimizer_named(name).name == name


@pytest.mark.parametrize("framework", ["torch", "accelerate", "trainer"])
@pytest.mark.parametrize("name", [name for name, limits in LIMITS.items() if "fsdp1" not in limits])
def test_auto_chooses_an_engine_that_steps_the_optimizer(name: OptimizerName, framework: Framework) -> None:
    options = {"model": "gpt2", "gpus": 8, "strategy": "zero3", "optim": name, "framework": framework}
    (plan,) = plans(make_request(options), seq_len=8)
    assert limit_of(name, plan.backend, framework) is None


def test_neither_torchs_adafactor_nor_the_trainers_runs_under_fsdp2() -> None:
    options = {"model": "gpt2", "gpus": 8, "strategy": "zero3", "optim": "adafactor"}
    backends = [plans(make_request(options | {"framework": f}), seq_len=8)[0].backend for f in ("torch", "trainer")]
    assert backends == ["fsdp1", "fsdp1"]


@pytest.mark.parametrize("name", ["adamw_bnb_8bit", "paged_lion_32bit", "adafactor"])
def test_an_engine_that_cannot_step_the_optimizer_is_refused(name: OptimizerName) -> None:
    limit = limit_of(name, "fsdp2", "torch")
    assert limit is not None
    for strategy in ("zero3", "all"):
        with pytest.raises(UsageError) as raised:
            estimate(model="gpt2", gpus=8, strategy=strategy, backend="fsdp2", optim=name)
        assert (raised.value.message, raised.value.hint) == (limit.reason, limit.hint)


def test_a_name_without_an_optimizer_is_refused() -> None:
    with pytest.raises(ValueError, match="shampoo"):
        optimizer_named("shampoo")  # type: ignore[arg-type]  # not in the Literal


@pytest.mark.parametrize("name", NAMES)
def test_every_consumer_gets_a_name_or_a_reason(name: OptimizerName) -> None:
    optimizer = optimizer_named(name)
    assert isinstance(optimizer.script, Constructor | Refusal)
    assert optimizer.measured_zero1 is None or optimizer.measured_zero1.reason
    for named in (optimizer.transformers, optimizer.deepspeed, optimizer.deepspeed_offloaded):
        assert (named.name if isinstance(named, NamedOptimizer) else named.reason) != ""
    if isinstance(optimizer.script, Constructor):
        assert optimizer.script.call().startswith(
            f"{optimizer.script.module}.{optimizer.script.name}(parameters, lr=lr"
        )


@pytest.mark.parametrize("name", NAMES)
def test_every_optimizer_has_state_and_step_figures(name: OptimizerName) -> None:
    optimizer = optimizer_named(name)
    for parameter in (MATRIX, VECTOR):
        state = optimizer.state_storages(parameter, parameter.shape, 4)
        assert state.exact == sum(state.each())
        # an update reads the parameter and its gradient, and writes the parameter
        assert optimizer.step_bytes(parameter, 4) >= 3 * 4 * parameter.elements
        assert (optimizer.step_flops(parameter) > 0) == (name in MULTIPLYING and parameter is MATRIX)
        assert optimizer.step_collectives(parameter) == Collectives()
    assert optimizer.state_storages(MATRIX, (0, 60), 4).exact == 0


@pytest.mark.parametrize(
    ("name", "matrix", "vector"),
    [
        ("adamw_torch_fused", 48004, 8004),
        ("adamw_torch", 48000, 8000),
        ("sgd", 0, 0),
        ("sgd_momentum", 24000, 4000),
        ("adafactor", 4 * 160, 4000),
        ("adamw_bnb_8bit", 2 * 6000 + 2 * 4 * 24, 8000),
        ("paged_adamw_8bit", 2 * 6000 + 2 * 4 * 24, 8000),
        ("lion_32bit", 24000, 4000),
        ("lion_8bit", 6000 + 4 * 24, 4000),
        ("adamw_torch_8bit", 48000, 8000),
        ("muon", 24000, 8004),
        ("ademamix_8bit", 3 * 6000 + 3 * 4 * 24, 12000),
        ("rmsprop", 24000, 4000),
        ("adagrad", 24000, 4000),
        ("schedule_free_adamw", 48000, 8000),
        ("schedule_free_sgd", 24000, 4000),
        ("stable_adamw", 48000 + 9, 8000 + 9),
        ("lomo", 0, 0),
        ("adamw_cpu_offload", 0, 8004),
        ("adalomo", 4 * 160, 4000),
        ("galore_adamw", 2 * 24000 + 4 * 60 * 60, 8000),
        ("galore_adamw_8bit", 4 + 2 * 6000 + 2 * 4 * 24 + 4 * 60 * 60, 4 + 8000),
        ("grokadamw", 0, 0),
        ("adam_mini", 24000 + 4, 8000),
        ("galore_adafactor", 4 * (60 * 60 + 100 + 60 + 1), 4004),
        ("apollo_adamw", 2 * 4 * 128 * 100 + 4 * 128 * 60 + 4, 8000),
    ],
)
def test_state_of_a_matrix_and_of_a_vector(name: OptimizerName, matrix: int, vector: int) -> None:
    optimizer = optimizer_named(name)
    assert optimizer.state_storages(MATRIX, MATRIX.shape, 4).exact == matrix
    assert optimizer.state_storages(VECTOR, VECTOR.shape, 4).exact == vector


@pytest.mark.parametrize(
    ("name", "small", "large"),
    [
        ("adamw_torch_fused", 8004, 40004),
        ("adamw_torch", 8000, 40000),
        ("sgd", 0, 0),
        ("sgd_momentum", 4000, 20000),
        ("adafactor", 4000, 20000),
        ("adamw_bnb_8bit", 8000, 2 * 5000 + 2 * 4 * 20),
        ("lion_32bit", 4000, 20000),
        ("rmsprop_bnb_8bit", 4000, 5000 + 4 * 20),
    ],
)
def test_state_of_a_flat_partition(name: OptimizerName, small: int, large: int) -> None:
    optimizer = optimizer_named(name)
    assert optimizer.flat_state_storages(1000, 4).exact == small
    assert optimizer.flat_state_storages(5000, 4).exact == large


@pytest.mark.parametrize(
    ("name", "kept", "paged"),
    [
        ("paged_adamw_8bit", 2 * 4 * 391, 200_000),
        ("paged_adamw_32bit", 0, 800_000),
        ("paged_lion_8bit", 4 * 391, 100_000),
        ("paged_ademamix_32bit", 0, 1_200_000),
        ("adamw_bnb_8bit", 200_000 + 2 * 4 * 391, 0),
    ],
)
def test_states_of_large_tensors_are_paged(name: OptimizerName, kept: int, paged: int) -> None:
    optimizer = optimizer_named(name)
    large = Parameter(name="large", shape=(1000, 100))
    assert optimizer.state_storages(large, large.shape, 4).exact == kept
    assert optimizer.paged_state_storages(large, large.shape).exact == paged
    assert optimizer.flat_paged_state_storages(99_999).exact == 0


@pytest.mark.parametrize(
    ("name", "state", "of_a_matrix", "of_a_vector"),
    [
        ("adamw_torch_8bit", 2 * (8192 + 4 * 32 + 1024), 2 * 4 * 32 + 8 * 8192, 0),
        ("adamw_torch_4bit", 2 * (4096 + 4 * 32 + 64), 2 * 4 * 32 + 24 * 8192, 2 * 4 * 32 + 24 * 8192),
        ("adamw_torch_fp8", 2 * (8192 + 4 * 32), 2 * 4 * 32, 2 * 4 * 32),
    ],
)
def test_torchao_quantizes_whole_blocks(name: OptimizerName, state: int, of_a_matrix: int, of_a_vector: int) -> None:
    optimizer = optimizer_named(name)
    matrix, vector = Parameter(name="m", shape=(64, 128)), Parameter(name="v", shape=(8192,))
    assert optimizer.state_storages(matrix, matrix.shape, 4).exact == state
    assert optimizer.step_temporaries(matrix, matrix.shape, 4).exact == of_a_matrix
    assert optimizer.step_temporaries(vector, vector.shape, 4).exact == of_a_vector
    assert optimizer.step_temporaries(matrix, (63, 127), 4).exact == 0


def test_muon_steps_the_matrices_of_layers_only() -> None:
    muon, fused = optimizer_named("muon"), optimizer_named("adamw_torch_fused")
    embedding = Parameter(name="embed", shape=(100, 60), role="embedding")
    expert = Parameter(name="experts", shape=(4, 100, 60), role="expert")
    assert muon.state_storages(MATRIX, MATRIX.shape, 4).exact == 4 * 6000
    for other in (embedding, VECTOR, expert):
        assert muon.state_storages(other, other.shape, 4) == fused.state_storages(other, other.shape, 4)
        assert muon.step_flops(other) == muon.step_temporaries(other, other.shape, 4).exact == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backend": "fsdp1"}, "FSDP1 flattens them"),
        ({"backend": "fsdp1", "strategy": "zero3"}, "FSDP1 flattens them"),
        ({"strategy": "zero1", "framework": "axolotl"}, "axolotl refuses Muon with DeepSpeed"),
        ({"offload": "parameters", "strategy": "zero3"}, "its states cannot be offloaded"),
    ],
)
def test_muon_is_refused_where_it_does_not_run(options: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        plans(make_request({"model": "gpt2", "gpus": 8, "optim": "muon", **options}), seq_len=8)


def test_deepspeeds_muon_multiplies_gram_matrices() -> None:
    (plan,) = plans(make_request({"model": "gpt2", "gpus": 8, "optim": "muon", "strategy": "zero1"}), seq_len=8)
    muon = optimizer_of(plan)
    square = Parameter(name="o", shape=(60, 60))
    assert muon.step_flops(MATRIX) == 4 * 2 * 60 * 60 * 100 + 14 * 2 * 60**3
    assert muon.step_flops(square) == 5 * 3 * 2 * 60**3
    assert muon.step_flops(VECTOR) == 0


@pytest.mark.parametrize("name", ["schedule_free_adamw", "schedule_free_sgd", "schedule_free_radam"])
@pytest.mark.parametrize("options", [{"strategy": "zero2", "backend": "deepspeed"}, {"offload": "optimizer"}])
def test_schedule_free_is_refused_with_deepspeed_which_steps_too_early(
    name: OptimizerName, options: dict[str, str]
) -> None:
    with pytest.raises(UsageError, match="do not step before train"):
        plans(make_request({"model": "gpt2", "gpus": 8, "optim": name, **options}), seq_len=8)


@pytest.mark.parametrize("options", [{"strategy": "zero2", "backend": "deepspeed"}, {"offload": "optimizer"}])
def test_adagrad_is_refused_with_deepspeed_because_it_keeps_the_sums_of_whole_parameters(
    options: dict[str, str],
) -> None:
    with pytest.raises(UsageError, match="sums of whole parameters"):
        plans(make_request({"model": "gpt2", "gpus": 8, "optim": "adagrad", **options}), seq_len=8)


def test_stable_adamw_keeps_the_error_of_a_sum_in_16_bits() -> None:
    """As torch-optimi 0.3.3 allocates it in a rehearsal: 224,952 bytes for these shapes in bf16, 299,940 in fp32."""
    shapes = ((96, 128), (2000,), (64, 300), (4000,))
    stable = optimizer_named("stable_adamw")
    for element_bytes, expected in ((2, 224_952), (4, 299_940)):
        state = (stable.state_storages(Parameter(name="p", shape=shape), shape, element_bytes) for shape in shapes)
        assert sum(each.exact for each in state) == expected


@pytest.mark.parametrize(
    ("backend", "message"), [("fsdp2", "do not accept DTensors"), ("deepspeed", "under DeepSpeed has not been run")]
)
def test_stable_adamw_is_refused_where_its_kernels_do_not_run(backend: str, message: str) -> None:
    options = {"strategy": "zero2", "backend": backend, "optim": "stable_adamw"}
    with pytest.raises(UsageError, match=message):
        plans(make_request({"model": "gpt2", "gpus": 8, **options}), seq_len=8)


def test_galore_keeps_all_singular_vectors_in_fp32_because_the_projection_is_a_view_of_them() -> None:
    galore, matrix = optimizer_named("galore_adamw"), Parameter(name="up_proj.weight", shape=(1000, 400))
    moments = 2 * 128 * 1000
    assert galore.state_storages(matrix, matrix.shape, 4).exact == 4 * (moments + 400 * 400)
    assert galore.state_storages(matrix, matrix.shape, 2).exact == 2 * (moments + 128 * 400)


def test_the_update_of_one_matrix_stays_while_galore_decomposes_the_next() -> None:
    galore, matrix = optimizer_named("galore_adamw"), Parameter(name="up_proj.weight", shape=(1000, 400))
    one = Stepped(matrix, matrix.shape, 4)
    # a copy, both factors and the values; cuSOLVER's success
    decomposed = 2 * 4 * 1000 * 400 + 4 * 400 * 400 + 4 * 400 + 4
    alone, twice, thrice = (galore.loop([one] * times) for times in (1, 2, 3))
    assert alone is not None and alone.peak.exact == 2 * 4 * 1000 * 400 + 3 * 4 * 1000 * 128  # projecting back
    assert twice is not None and twice.peak.exact == decomposed + 4 * 1000 * 400 + 4 * 1000 * 128
    assert thrice is not None and thrice.peak == twice.peak
    assert sorted(number for number, n_bytes in alone.events if n_bytes) == sorted(n for n, b in alone.events if not b)


@pytest.mark.parametrize("name", ["galore_adamw", "galore_adafactor", "apollo_adamw"])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"strategy": "zero3"}, "FSDP2"),
        ({"strategy": "zero3", "backend": "fsdp1"}, "projects matrices, and FSDP1 flattens them"),
        ({"strategy": "zero2", "backend": "deepspeed"}, "projects matrices, and DeepSpeed flattens them"),
        ({"strategy": "zero2", "offload": "optimizer"}, "projects matrices, and DeepSpeed flattens them"),
    ],
)
def test_low_rank_optimizers_are_refused_with_sharding(
    name: OptimizerName, options: dict[str, str], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        plans(make_request({"model": "gpt2", "gpus": 8, "optim": name, **options}), seq_len=8)


def test_low_rank_optimizers_are_refused_for_gpt2_whose_layers_are_no_linear_modules() -> None:
    with pytest.raises(UsageError, match="the layers of gpt2 are Conv1D"):
        estimate(model="gpt2", strategy="ddp", optim="galore_adamw")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"strategy": "zero3", "gpus": 8}, "updates whole parameters in backward, before FSDP2"),
        ({"strategy": "zero3", "gpus": 1, "backend": "fsdp1"}, "updates whole parameters in backward, before FSDP1"),
        ({"strategy": "zero3", "gpus": 8, "backend": "deepspeed"}, "accelerate calls DeepSpeed's backward"),
        ({"strategy": "ddp", "gpus": 8}, "before DDP reduces the gradients of 8 GPUs"),
    ],
)
@pytest.mark.parametrize("name", ["lomo", "adalomo"])
def test_lomo_runs_on_one_gpu_only(name: OptimizerName, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        estimate(model="gpt2", optim=name, **options)


@pytest.mark.parametrize("name", ["galore_adamw_layerwise", "apollo_adamw_layerwise"])
def test_layerwise_optimizers_run_on_one_gpu_without_accumulation(name: OptimizerName) -> None:
    job: dict[str, Any] = {"model": "Qwen/Qwen3-0.6B", "strategy": "ddp", "optim": name, "seq_len": 64}
    with pytest.raises(UsageError, match="before DDP reduces the gradients of 8 GPUs"):
        estimate(**job, gpus=8)
    with pytest.raises(UsageError, match="does not support gradient accumulation"):
        estimate(**job, gpus=1, gradient_accumulation_steps=2)
    [layerwise] = estimate(**job, gpus=1).estimates
    whole: dict[str, Any] = {**job, "optim": name.removesuffix("_layerwise")}
    [other] = estimate(**whole, gpus=1).estimates
    assert layerwise.states == {**other.states, "gradients": 0}
    assert layerwise.peak_allocated_bytes is not None and other.peak_allocated_bytes is not None
    assert layerwise.peak_allocated_bytes < other.peak_allocated_bytes


def test_adalomo_is_refused_for_stacked_experts_which_it_cannot_factor() -> None:
    with pytest.raises(UsageError, match="has 3 dimensions, and it factors two"):
        estimate(model="Qwen/Qwen3-30B-A3B", strategy="ddp", gpus=1, optim="adalomo")


@pytest.mark.parametrize("accumulation", [1, 4])
def test_lomo_keeps_no_gradients(accumulation: int) -> None:
    job: dict[str, Any] = {"model": "gpt2", "strategy": "ddp", "gpus": 1, "seq_len": 128}
    [lomo] = estimate(**job, optim="lomo", gradient_accumulation_steps=accumulation).estimates
    [sgd] = estimate(**job, optim="sgd").estimates
    assert lomo.states is not None and sgd.states is not None
    assert lomo.states["gradients"] == 0 < sgd.states["gradients"]
    assert lomo.peak_allocated_bytes is not None and sgd.peak_allocated_bytes is not None
    assert lomo.peak_allocated_bytes < sgd.peak_allocated_bytes


def test_muon_needs_flops_and_collectives_under_fsdp2() -> None:
    muon, tall, eight = (
        optimizer_named("muon"),
        Parameter(name="up", shape=(100, 60)),
        Shards(ranks=8, ranks_per_node=8),
    )
    iterations, gram = 5, 60 * 60
    assert muon.step_flops(tall) == iterations * (2 * 2 * 60 * 6000 + 2 * 60**3)
    assert muon.step_flops(tall, eight) == iterations * (2 * 2 * 60 * 750 + 2 * 60**3)
    assert muon.step_collectives(tall, eight) == Collectives(
        reduced_bytes=2 * iterations * 2 * gram, reduces=2 * iterations
    )
    wide = muon.step_collectives(Parameter(name="down", shape=(60, 100)), eight)
    assert wide == Collectives(gathered_bytes=iterations * 2 * (2 * 6000 + gram), gathers=3 * iterations)


def test_deepspeed_makes_torchs_adafactor_unless_the_trainer_makes_transformers() -> None:
    """transformers' keeps its state in fp32, and converts gradients and masters in bf16."""
    job = Plan(strategy="zero2", backend="deepspeed", optim="adafactor", seq_len=1)
    of_torch, of_trainer = (optimizer_of(replace(job, framework=framework)) for framework in ("deepspeed", "trainer"))
    temporaries = [each.flat_step_temporaries(1000, n).exact for each in (of_torch, of_trainer) for n in (4, 2)]
    assert temporaries == [8000, 4000, 8000, 16_000]
    saved = [each.saved_flat_bytes(1000, n) for each in (of_torch, of_trainer) for n in (4, 2)]
    assert saved == [4004, 2004, 4004, 4004]


def test_adafactor_of_transformers_updates_one_parameter_after_the_other() -> None:
    of_torch = optimizer_named("adafactor")
    of_transformers = of_torch.made_by_trainer()
    assert of_transformers.steps_one_by_one and not of_torch.steps_one_by_one
    assert of_transformers.step_temporaries(MATRIX, MATRIX.shape, 2).exact == 2 * 4 * MATRIX.elements
    assert of_torch.step_temporaries(MATRIX, MATRIX.shape, 2).exact == 2 * MATRIX.elements


def test_a_projection_has_the_rank_and_the_targets_of_the_options() -> None:
    options = {"model": "7e9", "optim": "apollo_adamw", "optim_args": "rank=64", "optim_target_modules": "mlp"}
    (plan,) = plans(make_request({**options, "gpus": 1, "strategy": "ddp", "framework": "trainer"}), seq_len=64)
    optimizer = optimizer_of(plan)
    inside, outside = Parameter("mlp.up_proj.weight", (1024, 512)), Parameter("self_attn.q_proj.weight", (1024, 512))
    moments, projection, norm = 2 * 64 * 1024 * 4, 64 * 512 * 4, 4
    assert optimizer.state_storages(inside, inside.shape, 4).exact == moments + projection + norm
    assert optimizer.state_storages(outside, outside.shape, 4).exact == 2 * 1024 * 512 * 4
    assert isinstance(optimizer.transformers, NamedOptimizer)
    assert optimizer.transformers.options == {"rank": "64"} and optimizer.transformers.targets == ["mlp"]
    assert any("with mlp in their names" in note and "rank 64" in note for note in optimizer.notes)


@pytest.mark.parametrize("options", [{"optim_args": "rank=64"}, {"optim_target_modules": "mlp"}], ids=str)
def test_settings_of_a_projection_are_refused_for_other_optimizers(options: dict[str, str]) -> None:
    request = make_request({"model": "7e9", "gpus": 1, "strategy": "ddp", **options})
    with pytest.raises(UsageError, match="projection, which adamw_torch_fused does not have"):
        plans(request, seq_len=64)


def test_cpu_offload_keeps_parameters_gradients_and_moments_on_the_host() -> None:
    """GPT-2's 39 matrices of 4,096 elements and more: pinned tensors are rounded to powers of two, states are not."""
    options = {"model": "gpt2", "gpus": 1, "strategy": "ddp", "precision": "fp32", "gpu": "A100"}
    (offloaded,) = estimate(**options, optim="adamw_cpu_offload").estimates
    (plain,) = estimate(**options, optim="adamw_torch_fused").estimates
    model = resolve("gpt2").profile
    assert model is not None
    large = [
        p.elements for unit, n in model.counted_units() for p in unit.parameters if p.elements >= 4096 for _ in range(n)
    ]
    pinned = sum(2 * page_locked(4 * elements) for elements in large)
    assert offloaded.host_bytes_per_node == pinned + sum(8 * elements + 4 for elements in large)
    assert plain.states["optimizer"] - offloaded.states["optimizer"] == sum(8 * elements + 4 for elements in large)
    assert offloaded.step is not None and plain.step is not None
    assert offloaded.step.breakdown["host"] > sum(large) / 4e9
    assert any("before it can be clipped" in note for note in offloaded.not_modelled)


def test_cpu_offload_is_for_one_gpu() -> None:
    with pytest.raises(UsageError, match="before DDP reduces"):
        estimate(model="gpt2", gpus=2, strategy="ddp", optim="adamw_cpu_offload")
    with pytest.raises(UsageError, match="FSDP2 sets the gradients"):
        estimate(model="gpt2", gpus=2, strategy="zero3", backend="fsdp2", optim="adamw_cpu_offload")
