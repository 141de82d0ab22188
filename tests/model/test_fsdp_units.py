"""The units that wrap policies make of catalogued models, and the warnings about them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fsdp_advisor.engines.units_summary import units_text, wrap_warnings
from fsdp_advisor.errors import InvalidOption, UsageError
from fsdp_advisor.job.compatibility import plans
from fsdp_advisor.job.parsing import make_request
from fsdp_advisor.job.plan import Plan
from fsdp_advisor.job.wrap_policy import wrap_policy
from fsdp_advisor.model.catalog import entries, profile
from fsdp_advisor.model.fsdp_units import AT_ROOT, UnitId, units_of
from fsdp_advisor.model.profile import Parameter, Profile, Unit
from fsdp_advisor.model.resolve import resolve
from fsdp_advisor.model.store import dump, load

LLAMA = "meta-llama/Llama-2-7b-hf"
ATTENTION, MLP, EMBEDDING = 4 * 4096 * 4096, 3 * 4096 * 11008, 32000 * 4096


def profile_of(model: str) -> Profile:
    found = resolve(model).profile
    assert found is not None
    return found


def plan_of(model: str, **options: Any) -> Plan:
    request = make_request({"model": model, "gpus": 4, "strategy": "zero3", **options})
    return plans(request, seq_len=256)[0]


def test_size_based_wrapping_leaves_what_is_too_small_to_a_unit_around_it() -> None:
    """min_num_params = 1e8 is PyTorch's default. Attention is smaller than that, so one unit has the attention of all layers."""
    units = units_of(profile_of(LLAMA), "size:100000000")
    elements = {unit: sum(p.elements for p in members) for unit, members in units.members.items()}
    assert units.of_root == ("model", "model.embed_tokens", "lm_head")
    assert set(units.within.values()) == {("mlp",)} and not units.layers
    assert AT_ROOT not in elements
    assert elements[units.owner_in_layer[UnitId(0, 0)][0]] == 32 * (ATTENTION + 2 * 4096) + 4096
    assert sum(elements[unit] * units.counts[unit] for unit in elements) == profile_of(LLAMA).parameters


@pytest.mark.parametrize(("size", "expected"), [("150M", "layer"), ("5B", "model"), ("7B", "none")])
def test_size_decides_which_modules_are_units(size: str, expected: str) -> None:
    units = units_of(profile_of(LLAMA), f"size:{size}")
    assert bool(units.layers) == (expected == "layer")
    assert units.of_root == (("model",) if expected == "model" else ())


def test_groups_of_layers_have_consecutive_layers() -> None:
    units = units_of(profile_of(LLAMA), "every:5")
    (groups,) = units.groups.values()
    assert len(groups) == 7
    layer = ATTENTION + MLP + 2 * 4096
    assert [sum(p.elements for p in units.members[group]) for group in groups] == [5 * layer] * 6 + [2 * layer]


def test_every_parameter_of_every_model_is_in_one_unit() -> None:
    for entry in {(e.model_type, e.task): e for e in entries()}.values():
        found = profile(entry)
        for wrap in ("none", "every:3", f"class:{found.layer_classes[0]}"):
            units = units_of(found, wrap)
            total = sum(p.elements * units.counts[unit] for unit, members in units.members.items() for p in members)
            assert total == found.parameters, (entry.id, wrap)


def test_axolotl_makes_units_of_the_matrices_of_lora_whose_modules_run() -> None:
    """PEFT's wrapper of a parameter, such as a router's weight, reads its matrices itself. Copies of modules stay in the layer."""
    llama = profile_of(LLAMA)
    layer = Unit(
        "LlamaDecoderLayer",
        (
            Parameter("q_proj.base_layer.weight", (8, 8), trainable=False),
            Parameter("q_proj.lora_A.default.weight", (2, 8), role="adapter"),
            Parameter("q_proj.lora_magnitude_vector.default.weight", (8,), role="adapter"),
            Parameter("gate.lora_A.default.weight", (2, 8), role="adapter", module_runs=False),
            Parameter("norm.modules_to_save.default.weight", (8,), role="adapter"),
            Parameter("tokens.lora_embedding_A.default", (2, 8), role="adapter"),
            Parameter("tokens.lora_embedding_B.default", (8, 2), role="adapter"),
        ),
    )
    (stack,) = llama.stacks
    adapted = replace(llama, stacks=(replace(stack, units=(layer,) * len(stack.units)),))
    expected = ("q_proj.lora_A.default", "q_proj.lora_magnitude_vector.default", "tokens")
    assert set(units_of(adapted, "lora").within.values()) == {expected}
    assert load(dump(adapted)).stacks == adapted.stacks


def test_shared_parameters_in_different_units_are_refused() -> None:
    with pytest.raises(UsageError, match="tied parameters"):
        units_of(profile_of("openai-community/gpt2"), "size:5000000")


@pytest.mark.parametrize("text", ["size", "size:x", "size:0", "every:", "class:", "class:a b,", "layers", "none:1", ""])
def test_a_policy_that_cannot_be_read_is_refused(text: str) -> None:
    assert wrap_policy(text) is None
    with pytest.raises(InvalidOption, match="wrap must be layer, none, size:100M"):
        make_request({"model": LLAMA, "wrap": text})


def test_a_policy_has_one_spelling() -> None:
    assert [make_request({"model": LLAMA, "wrap": text}).wrap for text in ("Size:1e8", "size: 100M", "NONE")] == [
        "size:100000000", "size:100000000", "none",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("wrap", "warned"),
    [("layer", ""), ("every:2", ""), ("none", "makes large units: one unit (root)"), ("size:5B", "makes large units: one unit (model)"),
     ("size:1M", "makes small units: 227 units")],
)  # fmt: skip
def test_wrapping_that_is_too_coarse_or_too_fine_is_warned_about(wrap: str, warned: str) -> None:
    found = wrap_warnings(profile_of(LLAMA), plan_of(LLAMA, wrap=wrap))
    assert len(found) == bool(warned) and all(warned in text for text in found)


def test_units_are_described_with_their_sizes() -> None:
    text = units_text(profile_of(LLAMA), plan_of(LLAMA, wrap="size:1e8"))
    assert text == "32 x LlamaDecoderLayer.mlp (135M), model (2.15B), lm_head (131M), model.embed_tokens (131M)"
    assert units_text(profile_of(LLAMA), plan_of(LLAMA, strategy="ddp")) is None
