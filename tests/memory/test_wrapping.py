"""How frameworks wrap the root, on catalogued models; and the peaks of their programs, storage by storage."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from matrix import is_installed

from fsdp_advisor import estimate
from fsdp_advisor.engines.deepspeed.settings import settings_of
from fsdp_advisor.engines.fsdp2.units import unit_warnings
from fsdp_advisor.engines.registry import step_program
from fsdp_advisor.engines.wrapping import EMBEDDING, HEAD, marked_units, wrapping_of
from fsdp_advisor.errors import UsageError
from fsdp_advisor.estimator import estimate_resolved
from fsdp_advisor.job.adaptation import adaptation_of
from fsdp_advisor.job.compatibility import plans
from fsdp_advisor.job.parsing import make_request
from fsdp_advisor.job.plan import Plan
from fsdp_advisor.memory.allocator import step_operations
from fsdp_advisor.memory.allocator.caching import FREE, FREE_LATER, MALLOC, STREAM_MASK, kind_of, storage_of
from fsdp_advisor.model import catalog
from fsdp_advisor.model.fsdp_units import AT_ROOT
from fsdp_advisor.model.resolve import resolve
from fsdp_advisor.model.tape import MarkedUnit, Op
from fsdp_advisor.model.tape_key import TapeKey
from fsdp_advisor.step_figures import peak_of_step
from fsdp_advisor.tape_keys import tape_key_of

UNTIED, TIED, GPT2, OPT = (
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0",
    "meta-llama/Llama-3.2-1B",
    "openai-community/gpt2",
    "facebook/opt-125m",
)
MARKS = (Op.PRE_FORWARD, Op.POST_FORWARD, Op.PRE_BACKWARD, Op.POST_BACKWARD)
JOB = {"gpus": 8, "micro_batch_size": 2, "seq_len": 256}


def profile_of(model: str) -> Any:
    return resolve(model).profile


def plan_of(**options: Any) -> Plan:
    (plan,) = plans(make_request({**JOB, **options}), seq_len=JOB["seq_len"])
    return plan


def names(model: str) -> dict[str, list[str]]:
    wrapping = wrapping_of(profile_of(model), divides_root=True)
    words = {AT_ROOT: "root", EMBEDDING: "embedding", HEAD: "head"}
    return {words[place]: [p.name for p in part.unit.parameters] for place, part in wrapping.parts.items()}


def test_an_untied_embedding_is_a_unit_of_its_own() -> None:
    assert names(UNTIED) == {
        "root": [],
        "embedding": ["model.embed_tokens.weight"],
        "head": ["model.norm.weight", "lm_head.weight"],
    }


def test_a_tied_embedding_is_with_norm_and_head() -> None:
    """It follows the norm, so that its gradient, the unit's last, stays until its reduction ends."""
    assert names(TIED) == {"root": [], "head": ["model.norm.weight", "model.embed_tokens.weight"]}


def test_what_is_neither_stays_with_the_root() -> None:
    assert names(GPT2) == {
        "root": ["transformer.wpe.weight"],
        "head": ["transformer.ln_f.weight", "transformer.ln_f.bias", "transformer.wte.weight"],
    }


def test_a_norm_that_is_no_child_of_the_base_model_is_not_found() -> None:
    parts = names(OPT)
    assert parts["head"] == ["model.decoder.embed_tokens.weight"]
    assert "model.decoder.final_layer_norm.weight" in parts["root"]


def test_torch_leaves_the_root_whole() -> None:
    profile = profile_of(UNTIED)
    (part,) = wrapping_of(profile, divides_root=False).parts.values()
    assert part.unit is profile.root


@pytest.mark.parametrize("apart", [False, True])
def test_one_unit_has_every_parameter_that_is_in_no_other(apart: bool) -> None:
    profile = profile_of(UNTIED)
    parts = wrapping_of(profile, divides_root=apart, layers_in_root=True).parts
    assert sum(part.unit.elements for part in parts.values()) == profile.parameters


def test_every_parameter_of_a_root_is_in_one_unit() -> None:
    apart = 0
    for entry in {(e.model_type, e.task): e for e in catalog.entries()}.values():
        profile = catalog.profile(entry)
        wrapping = wrapping_of(profile, divides_root=True)
        indices = sorted(i for part in wrapping.parts.values() for i in part.indices)
        assert indices == list(range(len(profile.root.parameters))), entry.id
        apart += HEAD in wrapping.parts
    assert apart >= 23


@pytest.mark.parametrize("model", [UNTIED, GPT2])
def test_a_plan_needs_the_marks_of_its_own_units(model: str) -> None:
    resolved = resolve(model)
    plan = plan_of(model=model, strategy="zero3", framework="accelerate")
    on_tape = {u for s in resolved.tape(tape_key_of(plan)).segments for op, u, _ in s.events if op in MARKS}
    units = marked_units(profile_of(model), plan)
    assert units and units | {MarkedUnit.LAYER, MarkedUnit.ROOT} == on_tape
    assert not marked_units(profile_of(model), plan_of(model=model, strategy="zero3"))


def played(requests: tuple[int, ...], operations: tuple[int, ...], alive: dict[int, int]) -> int:
    """The highest sum of bytes on the way. A KeyError is a storage that ends twice."""
    total = highest = sum(alive.values())
    for op in operations:
        storage, kind = storage_of(op), kind_of(op)
        if kind == MALLOC:
            alive[storage] = requests[storage] & ~STREAM_MASK
            total += alive[storage]
        elif kind in (FREE, FREE_LATER):
            total -= alive.pop(storage)
        highest = max(highest, total)
    return highest


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("framework", ["torch", "accelerate", "trainer"])
@pytest.mark.parametrize(
    ("backend", "strategy", "wrap"),
    [
        ("fsdp2", "zero3", "layer"),
        ("fsdp2", "zero2", "layer"),
        ("fsdp2", "hsdp", "layer"),
        ("fsdp2", "zero3", "none"),
        ("fsdp2", "hsdp", "none"),
        ("fsdp1", "zero3", "layer"),
        ("ddp", "ddp", "layer"),
    ],
)
@pytest.mark.parametrize("model", [UNTIED, GPT2])
def test_allocator_operations_reach_the_live_peak(
    model: str, backend: str, strategy: str, framework: str, accumulation: int, wrap: str
) -> None:
    plan = plan_of(
        model=model, backend=backend, strategy=strategy, framework=framework, gradient_accumulation_steps=accumulation,
        nnodes=2, wrap=wrap,
    )  # fmt: skip
    profile, tape = profile_of(model), resolve(model).tape(tape_key_of(plan))
    steps = step_operations(step_program(profile, tape, plan), plan.micro_batch_size, plan.seq_len)
    alive: dict[int, int] = {}
    highest = 0
    for operations in (steps.setup, steps.first):
        highest = played(steps.requests, operations, alive)
    for ours, next_ones in steps.carried_over:
        alive[next_ones] = alive.pop(ours)
    highest = played(steps.requests, steps.following, alive)
    assert highest == peak_of_step(profile, tape, plan).peak


@pytest.mark.parametrize("stage", [2, 3])
def test_auto_in_a_deepspeed_configuration_is_what_transformers_fills_in(stage: int) -> None:
    pytest.importorskip("deepspeed")
    transformers = pytest.importorskip("transformers")
    from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

    auto = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")
    arguments = SimpleNamespace(get_warmup_steps=lambda _: 0)
    for entry in {(e.model_type, e.task): e for e in catalog.entries()}.values():
        profile = catalog.profile(entry)
        if not is_installed(profile.config["model_type"]):
            continue
        values = {k: v for k, v in profile.config.items() if k != "model_type"}
        config = transformers.AutoConfig.for_model(profile.config["model_type"], **values)
        filled = HfTrainerDeepSpeedConfig({"zero_optimization": {"stage": stage, **dict.fromkeys(auto, "auto")}})
        filled.trainer_config_finalize(arguments, SimpleNamespace(config=config), 10)
        ours = settings_of(
            profile, plan_of(model=entry.id, strategy=f"zero{stage}", backend="deepspeed", framework="trainer")
        )
        theirs = filled.config["zero_optimization"]
        assert ours.reduce_bucket_size == theirs["reduce_bucket_size"], entry.id
        if stage == 3:
            assert ours.prefetch_bucket_size == theirs["stage3_prefetch_bucket_size"]
            assert ours.param_persistence_threshold == theirs["stage3_param_persistence_threshold"]


def test_no_sync_keeps_whole_gradients() -> None:
    options = {**JOB, "model": UNTIED, "strategy": "zero3", "backend": "fsdp2", "gpu": "H100"}
    peaks = {
        framework: [
            estimate(**options, framework=framework, gradient_accumulation_steps=n).estimates[0].peak_tensor_bytes or 0
            for n in (1, 2, 3, 9)
        ]
        for framework in ("torch", "accelerate")
    }
    once, twice, thrice, often = peaks["accelerate"]
    whole = 2 * profile_of(UNTIED).parameters
    assert 0.99 * whole < twice - once < 1.01 * whole
    assert twice <= thrice == often
    assert peaks["torch"][1] - peaks["torch"][0] < whole / 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"framework": "deepspeed", "strategy": "ddp"}, "framework deepspeed has no strategy ddp"),
        ({"framework": "deepspeed", "strategy": "zero3", "backend": "fsdp2"}, "framework deepspeed has no backend fsdp2"),
        ({"framework": "deepspeed", "backend": "ddp"}, "framework deepspeed has no backend ddp"),
        ({"forward_prefetch": True, "strategy": "zero3", "wrap": "none"}, "only with one unit per layer"),
        ({"forward_prefetch": True, "strategy": "zero3", "framework": "accelerate"}, "does not prefetch in forward"),
        ({"gpus": 2, "nnodes": 2, "strategy": "hsdp", "framework": "trl"}, "no rank has a shard"),
        ({"reshard_after_forward": "false", "strategy": "zero3"}, "is ZeRO-2"),
        ({"reshard_after_forward": "3", "strategy": "zero3"}, "not a proper factor of the 8 ranks"),
        ({"reshard_after_forward": "2", "strategy": "zero3", "backend": "fsdp1"}, "only FSDP2 in plain PyTorch"),
        ({"wrap": "every:2", "strategy": "zero3", "backend": "fsdp1"}, "a group of layers is not a module"),
        ({"wrap": "every:2", "strategy": "zero3", "framework": "accelerate"}, "no wrap policy for groups"),
        ({"wrap": "size:1M", "strategy": "zero3", "framework": "accelerate"}, "SIZE_BASED_WRAP fails with FSDP2"),
        ({"wrap": "size:5M", "strategy": "zero3"}, "lm_head.weight into different units"),
        ({"wrap": "class:GPT2MLP", "strategy": "zero3"}, "GPT2MLP is not a layer class"),
        ({"wrap": "none", "strategy": "zero3", "framework": "trainer", "activation_checkpointing": "full"}, "not the layers"),
        ({"framework": "trainer", "strategy": "zero2", "backend": "fsdp1"}, "framework trainer with backend fsdp1 has no zero2"),
        ({"framework": "axolotl", "strategy": "zero2", "backend": "fsdp1"}, "framework axolotl with backend fsdp1 has no zero2"),
    ],
)  # fmt: skip
def test_what_a_framework_cannot_do_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message) as refused:
        estimate(model=GPT2, gpu="H100", **{**JOB, **options})
    assert refused.value.hint


def test_all_strategies_of_a_framework() -> None:
    rows = estimate(model=GPT2, gpu="H100", framework="deepspeed", **JOB).estimates
    assert {r.plan.backend for r in rows} == {"deepspeed"}
    rows = estimate(model=GPT2, gpu="H100", framework="trainer", backend="fsdp1", **JOB).estimates
    assert {r.plan.strategy for r in rows} == {"zero3"}


@pytest.mark.parametrize("framework", ["accelerate", "trainer"])
def test_notes_say_what_accelerate_cannot_do(framework: str) -> None:
    options = {"gpu": "H100", "framework": framework, **JOB}
    (t5,) = estimate(model="google-t5/t5-small", strategy="zero3", **options).estimates
    assert any("accelerate 1.15 fails to wrap" in note for note in t5.not_modelled)
    (bert,) = estimate(model="google-bert/bert-base-uncased", strategy="zero3", **options).estimates
    assert any("accelerate 1.15 fails to wrap" in note for note in bert.not_modelled)
    assert any("names their class" in note for note in bert.not_modelled)
    (zero1,) = estimate(model=GPT2, strategy="zero1", **options).estimates
    assert any('"auto"' in note for note in zero1.not_modelled)


def test_casts_that_are_not_recorded_and_cannot_be_are_left_out_and_said() -> None:
    options = {"model": GPT2, "gpu": "H100", "strategy": "zero3", "backend": "fsdp1", "framework": "accelerate", **JOB}
    model = resolve(GPT2, allow_recording=False)
    profile = model.profile
    assert profile is not None
    tapes = {key: tape for key, tape in profile.tapes.items() if not TapeKey.from_name(key).autocasts_fsdp1}
    model = replace(model, profile=replace(profile, tapes=tapes))
    (row,) = estimate_resolved(make_request(options), model).estimates
    assert row.peak_tensor_bytes and any("which accelerate uses with FSDP1" in note for note in row.not_modelled)
    (bf16,) = estimate_resolved(make_request({**options, "precision": "bf16"}), model).estimates
    assert bf16.peak_tensor_bytes and not any("autocast" in note for note in bf16.not_modelled)


def test_accelerate_trains_weights_loaded_in_bf16_as_fp32_under_fsdp1() -> None:
    """accelerate/accelerator.py, prepare_model: `param.data.to(torch.float32)` of every flat parameter that trains."""

    def states(framework: str, dtype: str) -> int:
        [found] = estimate(
            model=UNTIED,
            strategy="zero3",
            backend="fsdp1",
            framework=framework,
            precision="bf16-mixed",
            dtype=dtype,
            **JOB,
        ).estimates
        assert found.states is not None
        return sum(found.states.values())

    assert states("trainer", "bfloat16") == states("trainer", "float32") == states("torch", "float32")
    assert 1.9 < states("torch", "float32") / states("torch", "bfloat16") < 2.1


@pytest.mark.parametrize(
    ("framework", "loss", "fails"),
    [("accelerate", "cce", True), ("trainer", "liger", True), ("torch", "cce", False), ("trl", "auto", False)],
)
def test_a_loss_that_finds_the_head_of_a_peft_model_sharded_is_warned_of(
    framework: str, loss: str, *, fails: bool
) -> None:
    job = {"model": "meta-llama/Llama-3.1-8B", "gpus": 4, "strategy": "zero3", "backend": "fsdp2", "use_peft": True}
    request = make_request({**job, "framework": framework, "loss": loss})
    (plan,) = plans(request, seq_len=1024)
    profile = resolve(request.model).adapted(adaptation_of(request)).profile
    assert profile is not None
    assert any("fails in this job" in warning for warning in unit_warnings(profile, plan)) == fails


@pytest.mark.parametrize(("saved", "warns"), [("lm_head", True), ("embed_tokens", False)])
def test_a_trained_head_whose_gradient_nothing_averages_is_warned_of(saved: str, *, warns: bool) -> None:
    job = {"model": "meta-llama/Llama-3.1-8B", "gpus": 4, "strategy": "zero3", "use_peft": True, "framework": "trl"}
    request = make_request({**job, "lora_modules_to_save": saved})
    (plan,) = plans(request, seq_len=1024)
    profile = resolve(request.model).adapted(adaptation_of(request)).profile
    assert profile is not None
    assert any("not averaged over the ranks" in warning for warning in unit_warnings(profile, plan)) == warns
