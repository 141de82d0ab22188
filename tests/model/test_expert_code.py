"""Which code computes the experts of a model, and what is said about it."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from math import prod
from pathlib import Path

import pytest

from fsdp_advisor.assumption_notes import adapted_expert_notes, unquantized_notes
from fsdp_advisor.job.compatibility import plans
from fsdp_advisor.job.parsing import make_request
from fsdp_advisor.model import catalog
from fsdp_advisor.model.experts import COPIED, LOOPS, expert_notes
from fsdp_advisor.model.profile import Parameter, Profile
from fsdp_advisor.tape_keys import tape_key_of

MIXTURE, DENSE = "Qwen/Qwen3-30B-A3B", "Qwen/Qwen3-8B"


def profile(name: str) -> Profile:
    entry = catalog.find(name)
    assert entry is not None
    return catalog.profile(entry)


@pytest.mark.parametrize(
    ("model", "options", "ending"),
    [
        (MIXTURE, {}, "|1"),
        (MIXTURE, {"expert_imbalance": "2"}, "|1"),
        (MIXTURE, {"experts_implementation": "batched_mm"}, "|experts=batched_mm"),
        (MIXTURE, {"experts_implementation": "eager"}, "|experts=eager|at=1x2048"),
        (MIXTURE, {"experts_implementation": "eager", "expert_imbalance": "2"}, "|experts=eager|imbalance=2.0|at=1x2048"),
        (DENSE, {"experts_implementation": "eager"}, "|1"),
    ],
)  # fmt: skip
def test_only_a_loop_over_experts_depends_on_their_tokens(model: str, options: dict[str, str], ending: str) -> None:
    (plan,) = plans(make_request({"model": model, "strategy": "zero3", **options}), seq_len=2048)
    assert tape_key_of(plan, profile(model)).name.endswith(ending)


@pytest.mark.parametrize(
    ("model", "options", "words"),
    [
        (MIXTURE, {}, []),
        (MIXTURE, {"expert_imbalance": "2"}, ["changes no figure"]),
        (MIXTURE, {"experts_implementation": "eager"}, ["equally often"]),
        (MIXTURE, {"experts_implementation": "eager", "expert_imbalance": "2"}, []),
        (DENSE, {}, []),
        (DENSE, {"expert_imbalance": "2"}, ["is ignored"]),
    ],
)
def test_notes_say_what_the_options_change(model: str, options: dict[str, str], words: list[str]) -> None:
    notes = expert_notes(make_request({"model": model, **options}), profile(model))
    assert len(notes) == len(words) and all(word in note for word, note in zip(words, notes, strict=True))


def with_adapters(name: str, *modules: str, packed: bool) -> Profile:
    """A frozen profile in fp32 with an adapter on each module; the attention of its layers is packed in 4 bits if `packed`."""
    frozen = profile(name)
    adapters = tuple(Parameter(f"{module}.lora_A", (16, 64), role="adapter") for module in modules)
    matrix = (4096, 4096)
    attention = Parameter("q_proj", (prod(matrix) // 2, 1), trainable=False, role="quantized", matrix=matrix)

    def changed(p: Parameter) -> Parameter:
        module, _, weight = p.name.rpartition(".")
        inner = f"{module}.base_layer.{weight}" if module in modules else p.name
        return replace(p, name=inner, trainable=False, dtype="float32")

    stacks = tuple(
        replace(
            stack,
            units=tuple(
                replace(unit, parameters=(*map(changed, unit.parameters), *adapters, *(attention,) * packed))
                for unit in stack.units
            ),
        )
        for stack in frozen.stacks
    )
    return replace(frozen, stacks=stacks)


@pytest.mark.parametrize(
    ("model", "modules", "packed", "words"),
    [
        (MIXTURE, ("self_attn.q_proj",), True, ["they take 108.00 GiB in float32", "have no adapters"]),
        (
            MIXTURE, ("self_attn.q_proj", "mlp.experts"), True,
            [
                "of the base is not quantized",
                "own: 49.2K of the 98.3K parameters of adapters; --lora-target-modules q_proj adapts attention alone",
            ],
        ),
        (MIXTURE, ("mlp.shared_experts.up_proj",), False, ["have no adapters"]),
        (MIXTURE, ("self_attn.q_proj",), False, ["have no adapters"]),
        (DENSE, ("self_attn.q_proj",), True, []),
        (MIXTURE, (), False, []),
    ],
)  # fmt: skip
def test_notes_name_experts_without_quantization_or_adapters(
    model: str, modules: tuple[str, ...], packed: bool, words: list[str]
) -> None:
    notes = adapted_expert_notes(with_adapters(model, *modules, packed=packed))
    assert len(notes) == len(words) and all(word in note for word, note in zip(words, notes, strict=True))


@pytest.mark.parametrize(
    ("options", "packed", "said"),
    [({"load_in_8bit": "true"}, False, True), ({"load_in_4bit": "true"}, True, False), ({}, False, False)],
)
def test_a_note_says_that_no_layer_of_the_base_is_quantized(options: dict[str, str], packed: bool, said: bool) -> None:
    """As in Falcon, whose linear layers are a subclass of nn.Linear."""
    request = make_request({"model": DENSE, "use_peft": "true", **options})
    notes = unquantized_notes(request, with_adapters(DENSE, "self_attn.q_proj", packed=packed))
    assert any("no layer of the base is quantized" in note for note in notes) == said


@pytest.mark.parametrize("model_type", sorted(LOOPS))
def test_models_with_a_loop_alone_do_not_use_transformers_other_code(model_type: str) -> None:
    found = importlib.util.find_spec("transformers")
    if found is None or found.origin is None:
        pytest.skip("transformers is not installed")
    code = (Path(found.origin).parent / "models" / model_type / f"modeling_{model_type}.py").read_text()
    assert "topk" in code and "use_experts_implementation" not in code


def test_experts_are_copied_where_transformers_converts_them_when_it_loads_them() -> None:
    """Compared for all model types of the catalog, with transformers' own table."""
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping
    from transformers.core_model_loading import WeightConverter

    def copies(model_type: str) -> bool:
        entries = get_checkpoint_conversion_mapping(model_type) or ()
        return any(isinstance(e, WeightConverter) and "experts" in "".join(e.target_patterns) for e in entries)

    types = {entry.model_type for entry in catalog.entries()}
    assert {t for t in types if copies(t) or copies(f"{t}_text")} == COPIED & types
