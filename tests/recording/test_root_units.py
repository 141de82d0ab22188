"""Marks of the root's units and of the model's outputs: where on a tape they stand, and roles of parameters."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from matrix import in_turn, taken

torch = pytest.importorskip("torch")


from fsdp_advisor.model import catalog
from fsdp_advisor.model.tape import ROOT, Category, MarkedUnit, Op, Segment, Staging, Tape, value_at
from fsdp_advisor.model.tape_key import TapeKey
from fsdp_advisor.program.spans import span_bytes, storage_bytes, tape_layout
from fsdp_advisor.recording import Recorder, TransformersSource

pytestmark = pytest.mark.slow

TEXT = {
    "vocab_size": 199, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 5, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip
UNTIED = {"model_type": "llama", "tie_word_embeddings": False, **TEXT}
TIED = {"model_type": "qwen2", "tie_word_embeddings": True, **TEXT}
WHISPER = {
    "model_type": "whisper", "d_model": 64, "encoder_layers": 4, "decoder_layers": 4, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96, "vocab_size": 199,
    "max_source_positions": 50, "max_target_positions": 120, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "decoder_start_token_id": 1,
}  # fmt: skip
VIT = {
    "model_type": "vit", "hidden_size": 64, "num_hidden_layers": 5, "num_attention_heads": 4, "intermediate_size": 96,
    "image_size": 32, "patch_size": 8,
}  # fmt: skip
T5 = {
    "model_type": "t5", "d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 4, "num_heads": 4, "vocab_size": 199,
    "decoder_start_token_id": 0,
}  # fmt: skip
BERT = {"model_type": "bert", **{k: v for k, v in TEXT.items() if k != "num_key_value_heads"}}

EMBEDDING_AND_HEAD = [
    (Op.PRE_FORWARD, MarkedUnit.EMBEDDING),
    (Op.POST_FORWARD, MarkedUnit.EMBEDDING),
    (Op.PRE_FORWARD, MarkedUnit.HEAD),
    (Op.PRE_BACKWARD, MarkedUnit.HEAD),
    (Op.POST_BACKWARD, MarkedUnit.HEAD),
    (Op.PRE_BACKWARD, MarkedUnit.EMBEDDING),
]
HEAD_ALONE = [(Op.PRE_FORWARD, MarkedUnit.HEAD), (Op.PRE_BACKWARD, MarkedUnit.HEAD)]
AT = (2, 64)
STEPS = [("bf16-mixed", "none"), ("bf16", "full"), ("bf16", "none"), ("bf16-mixed", "full")]

Mark = tuple[int, int]


def recorder_of(config: dict[str, Any]) -> Recorder:
    return Recorder(TransformersSource(config, name="tiny"))


def tape_of(config: dict[str, Any], precision: str, checkpointing: str, engine: str = "fsdp2") -> Tape:
    """The tape of one micro-batch and length: marks are where they are in any other."""
    return recorder_of(config).tape(TapeKey(engine, precision, "sdpa", checkpointing, at=AT))


@cache
def untied(precision: str, checkpointing: str) -> tuple[Recorder, Tape]:
    recorder = recorder_of(UNTIED)
    return recorder, recorder.tape(TapeKey("fsdp2", precision, "sdpa", checkpointing, False))


def is_mark(event: tuple[int, int, int]) -> bool:
    return Op.PRE_FORWARD <= event[0] <= Op.POST_BACKWARD and event[1] > MarkedUnit.ROOT


def marks_of(tape: Tape) -> dict[Mark, tuple[int, int]]:
    """Segment and position of each mark other than those of layers and root, in the order of the tape."""
    return {
        (op, unit): (number, at)
        for number, segment in enumerate(tape.segments)
        for at, (op, unit, extra) in enumerate(segment.events)
        if is_mark((op, unit, extra))
    }


def births_before_marks(tape: Tape) -> dict[Mark, tuple[int, int]]:
    """The segment of each mark, and the number of storages that are allocated in it before the mark, without the
    workspaces of kernels.
    """
    counts = {}
    for (op, unit), (number, at) in marks_of(tape).items():
        before = tape.segments[number].events[:at]
        born = sum(e[0] == Op.ALLOC and not isinstance(tape.sizes[e[1]], Staging) for e in before)
        counts[op, unit] = (number, born)
    return counts


def born(tape: Tape, segment: Segment, category: int) -> int:
    """The position at which the first storage of a category is born."""
    return next(at for at, (op, _, c) in enumerate(segment.events) if op == Op.ALLOC and c == category)


def root_gradient(recorder: Recorder, role: str) -> int:
    """The category of the gradient of the root's first parameter that has this role."""
    index = next(i for i, p in enumerate(recorder.profile.root.parameters) if p.role == role)
    return Category.GRADIENT + 2 * index + 1


@in_turn(1, of=3)
@pytest.mark.parametrize(("precision", "checkpointing"), taken(STEPS[:2], STEPS[2:], days=2))
def test_units_of_an_untied_model(precision: str, checkpointing: str) -> None:
    recorder, tape = untied(precision, checkpointing)
    marks = marks_of(tape)
    assert list(marks) == EMBEDDING_AND_HEAD
    hidden = (0, 0, 0, 2 * TEXT["hidden_size"], 0, 0)

    begin, end = marks[Op.PRE_FORWARD, MarkedUnit.EMBEDDING], marks[Op.POST_FORWARD, MarkedUnit.EMBEDDING]
    assert begin[0] == end[0] == 0
    first = tape.segments[0].events
    assert first[begin[1] - 1][:2] == (Op.PRE_FORWARD, MarkedUnit.ROOT)
    made = [tape.sizes[a] for op, a, _ in first[begin[1] : end[1]] if op == Op.ALLOC]
    assert made == [hidden], "the embedding's output and nothing else"

    forward = [number for number, s in enumerate(tape.segments) if s.phase == "forward"]
    number, at = marks[Op.PRE_FORWARD, MarkedUnit.HEAD]
    assert number == forward[-1]
    assert not any(op == Op.ALLOC for op, _, _ in tape.segments[number].events[:at]), "the final norm runs first"

    number, at = marks[Op.PRE_BACKWARD, MarkedUnit.HEAD]
    backward = tape.segments[number]
    assert backward.stack == ROOT and number == forward[-1] + 1
    assert at < born(tape, backward, root_gradient(recorder, "head"))
    number, at = marks[Op.POST_BACKWARD, MarkedUnit.HEAD]
    assert tape.segments[number] is backward and at > born(tape, backward, root_gradient(recorder, "final_norm"))

    number, at = marks[Op.PRE_BACKWARD, MarkedUnit.EMBEDDING]
    last = tape.segments[-1]
    assert number == len(tape.segments) - 1
    assert at < born(tape, last, root_gradient(recorder, "embedding"))
    assert at > last.events.index((Op.POST_BACKWARD, MarkedUnit.LAYER, 0)), "the first layer is done"


@in_turn(0, of=2)
@pytest.mark.parametrize(("precision", "checkpointing"), taken(STEPS[:1], STEPS[1:]))
def test_a_tied_embedding_begins_the_unit_of_the_head(precision: str, checkpointing: str) -> None:
    tape = tape_of(TIED, precision, checkpointing)
    marks = marks_of(tape)
    assert list(marks) == HEAD_ALONE
    number, at = marks[Op.PRE_FORWARD, MarkedUnit.HEAD]
    assert number == 0 and tape.segments[0].events[at - 1][:2] == (Op.PRE_FORWARD, MarkedUnit.ROOT)


@in_turn(0, of=3)
@pytest.mark.parametrize(("precision", "checkpointing"), taken(STEPS[:1], STEPS[1:]))
def test_the_unit_of_whisper_begins_in_the_decoder(precision: str, checkpointing: str) -> None:
    """Its embedding, tied to the head, is the decoder's, which runs when the encoder is done."""
    tape = tape_of(WHISPER, precision, checkpointing)
    marks = marks_of(tape)
    assert list(marks) == HEAD_ALONE
    encoder = [number for number, s in enumerate(tape.segments) if (s.phase, s.stack) == ("forward", 0)]
    assert marks[Op.PRE_FORWARD, MarkedUnit.HEAD][0] == encoder[-1] + 1


@in_turn(2, of=3)
@pytest.mark.parametrize(("precision", "checkpointing"), taken(STEPS[:1], STEPS[1:]))
def test_the_embedding_of_vit_is_that_of_its_patches(precision: str, checkpointing: str) -> None:
    tape = tape_of(VIT, precision, checkpointing)
    marks = marks_of(tape)
    assert list(marks) == EMBEDDING_AND_HEAD
    begin, end = marks[Op.PRE_FORWARD, MarkedUnit.EMBEDDING][1], marks[Op.POST_FORWARD, MarkedUnit.EMBEDDING][1]
    made = [tape.sizes[a] for op, a, _ in tape.segments[0].events[begin:end] if op == Op.ALLOC]
    patches = (32 // 8) ** 2
    assert [value_at(size, *AT) for size in made] == [AT[0] * 2 * 64 * patches]


@in_turn(0, of=3)
@pytest.mark.parametrize("config", taken([BERT], [T5]), ids=lambda c: str(c["model_type"]))
def test_models_that_accelerate_cannot_take_apart_have_no_marks(config: dict[str, Any]) -> None:
    assert not marks_of(tape_of(config, "bf16", "none"))


@in_turn(1, of=2)
@pytest.mark.parametrize("checkpointing", taken(["none"], ["full"]))
def test_forward_of_a_plain_tape_ends_with_the_mark_of_the_outputs(checkpointing: str) -> None:
    tape = tape_of(UNTIED, "bf16-mixed", checkpointing, engine="plain")
    ((mark, (number, at)),) = marks_of(tape).items()
    assert mark == (Op.POST_FORWARD, MarkedUnit.OUTPUTS)
    assert tape.segments[number].phase == "forward" and tape.segments[number + 1].phase == "backward"
    assert at == len(tape.segments[number].events) - 1


def test_marks_of_units_that_a_plan_does_not_have_change_nothing() -> None:
    recorder, tape = untied(*STEPS[0])
    segments = tuple(
        Segment(s.phase, s.stack, s.layer, tuple(e for e in s.events if not is_mark(e))) for s in tape.segments
    )
    figures = []
    for each in (tape, Tape(tape.sizes, segments)):
        layout = tape_layout(recorder.profile, each, gradient_hooks=False)
        figures.append(span_bytes(layout, storage_bytes(each, *AT)))
    assert figures[0] == figures[1]


@in_turn(2, of=3)
@pytest.mark.parametrize("model", ["TinyLlama/TinyLlama-1.1B-Chat-v1.0", "google/vit-base-patch16-224"])
def test_shipped_marks_are_where_a_recording_puts_them(model: str) -> None:
    entry = catalog.find(model)
    assert entry is not None
    shipped = catalog.profile(entry)
    variant = TapeKey("fsdp2", "bf16", "sdpa", "none", True)
    at = (1, shipped.max_seq_len or AT[1])
    recorder = Recorder(TransformersSource(shipped.config, name=model, task=entry.task))
    assert recorder.profile.root == shipped.root and recorder.profile.stacks == shipped.stacks
    assert births_before_marks(recorder.tape(replace(variant, at=at))) == births_before_marks(
        shipped.tapes[variant.name].read()
    )


@pytest.mark.parametrize(
    ("config", "roles"),
    [
        (UNTIED, {"model.embed_tokens.weight": "embedding", "model.norm.weight": "final_norm", "lm_head.weight": "head"}),
        (TIED, {"model.embed_tokens.weight": "embedding", "model.norm.weight": "final_norm"}),
    ],
    ids=["untied", "tied"],
)  # fmt: skip
def test_parameters_of_the_root_have_their_roles(config: dict[str, Any], roles: dict[str, str]) -> None:
    assert {p.name: p.role for p in recorder_of(config).profile.root.parameters} == roles


def test_roles_within_layers() -> None:
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    profile = recorder_of({"model_type": "mixtral", **TEXT, **experts}).profile
    roles = {p.name: p.role for p in profile.stacks[0].units[0].parameters}
    assert roles["input_layernorm.weight"] == "norm"
    assert roles["self_attn.q_proj.weight"] == "other"
    assert {role for name, role in roles.items() if "experts" in name} == {"expert"}
    assert profile.experts == 4
