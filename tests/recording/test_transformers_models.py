"""Which task a configuration is trained on, and how layers of a kind are found."""

from __future__ import annotations

import warnings

import pytest
from matrix import in_turn
from vision_models import config_of

torch = pytest.importorskip("torch")

from fsdp_advisor.errors import MissingExtra, NotRecordable, UnreadableConfig  # after the check for torch
from fsdp_advisor.model import store
from fsdp_advisor.model.tape_key import TapeKey
from fsdp_advisor.recording import Recorder, TransformersSource

pytestmark = pytest.mark.slow

TASKS = [
    ({"model_type": "llama"}, "causal-lm"),
    ({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}, "causal-lm"),
    ({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}, "causal-lm"),
    ({"model_type": "bert"}, "masked-lm"),
    ({"model_type": "bert", "architectures": ["BertForMaskedLM"]}, "masked-lm"),
    ({"model_type": "bert", "architectures": ["BertLMHeadModel"], "is_decoder": True}, "causal-lm"),
    ({"model_type": "roberta", "architectures": ["RobertaForMaskedLM"]}, "masked-lm"),
    ({"model_type": "t5"}, "seq2seq-lm"),
    ({"model_type": "whisper"}, "speech-seq2seq"),
    ({"model_type": "vit"}, "image-classification"),
    ({"model_type": "llama4", "vision_config": {}}, "image-text-to-text"),
    ({"model_type": "bailing_hybrid", "architectures": ["BailingMoeV2_5ForCausalLM"]}, "causal-lm"),
    ({"model_type": "llama4", "vision_config": {}, "architectures": ["Llama4ForCausalLM"]}, "causal-lm"),
]


@pytest.mark.parametrize(("config", "task"), TASKS, ids=str)
def test_the_task_is_found(config: dict[str, object], task: str) -> None:
    assert TransformersSource(config, name="x").task == task


BAD = [
    ({}, "names no model_type"),
    ({"model_type": "no-such-model"}, "cannot build it"),
    ({"model_type": "llama", "hidden_size": "wide"}, "cannot build it"),
    ({"model_type": "llama", "hidden_size": 100, "num_attention_heads": 7}, r"hidden size \(100\) .* heads \(7\)"),
    ({"model_type": "encodec"}, "trains no encodec model"),
    ({"model_type": "git", "architectures": ["Grok1ForCausalLM"]}, "its git is another model"),
    (
        {"model_type": "llava", "architectures": ["LlavaQwenForCausalLM"], "hidden_size": 3584},
        "text_config, which is missing",
    ),
]


@pytest.mark.parametrize(("config", "message"), BAD, ids=str)
def test_an_unbuildable_configuration_is_refused_with_its_reason(config: dict[str, object], message: str) -> None:
    with pytest.raises(UnreadableConfig, match=message):
        Recorder(TransformersSource(config, name="x"))


def test_a_package_that_a_models_code_needs_is_named() -> None:
    with pytest.raises(MissingExtra, match="requires the natten library") as missing:
        Recorder(TransformersSource({"model_type": "dinat"}, name="x"))
    assert missing.value.hint == "pip install natten"


SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 99,
}


def test_layers_that_alternate_are_kinds_of_their_own() -> None:
    """Gemma 3: five sliding layers, then a full one."""
    config = {
        "model_type": "gemma3_text",
        **SMALL,
        "head_dim": 16,
        "num_hidden_layers": 62,
        "sliding_window_pattern": 6,
    }
    (stack,) = Recorder(TransformersSource(config, name="x")).profile.stacks
    assert stack.depth == 62
    assert len(stack.units) < 20
    assert sum(stack.counts) == 62
    assert max(len(run.pattern) * (run.repeats > 1) for run in stack.runs) == 6


def test_cost_does_not_grow_with_depth() -> None:
    profiles = [
        Recorder(TransformersSource({"model_type": "llama", **SMALL, "num_hidden_layers": n}, name="x")).profile
        for n in (8, 80)
    ]
    assert [len(p.stacks[0].units) for p in profiles] == [5, 5]
    assert [p.stacks[0].depth for p in profiles] == [8, 80]


def test_a_model_of_two_layers_is_recorded() -> None:
    recorder = Recorder(TransformersSource({"model_type": "llama", **SMALL, "num_hidden_layers": 2}, name="x"))
    assert recorder.tape(TapeKey("fsdp2", "bf16", "sdpa", "none", at=(2, 16))).segments


@in_turn(0, of=5)
def test_a_profile_survives_being_stored() -> None:
    recorder = Recorder(TransformersSource({"model_type": "qwen2", **SMALL, "num_hidden_layers": 4}, name="x"))
    variants = [TapeKey("fsdp2", "bf16-mixed", a, c, False) for a, c in (("sdpa", "none"), ("eager", "full"))]
    for variant in variants:
        recorder.profile.tapes[variant.name] = recorder.tape(variant)
    for small in (False, True):
        copy = store.load(store.dump(recorder.profile, small=small))
        assert copy.root == recorder.profile.root and copy.stacks == recorder.profile.stacks
        assert copy.parameters == recorder.profile.parameters
        for variant in variants:
            ours, theirs = recorder.profile.tapes[variant.name], copy.tapes[variant.name]
            assert [s.phase for s in ours.segments] == [s.phase for s in theirs.segments]
            for a, b in zip(ours.segments, theirs.segments, strict=True):
                assert (a.matmul_flops, a.attention_flops, a.operators) == (
                    b.matmul_flops,
                    b.attention_flops,
                    b.operators,
                )
                assert [(op, ours.sizes[x] if op == 0 else x, y) for op, x, y in a.events] == [
                    (op, theirs.sizes[x] if op == 0 else x, y) for op, x, y in b.events
                ]


@pytest.mark.parametrize(
    "data", [b"", b"garbage", b"\xfd7zXZ\0garbage", store.zlib.compress(b"{}\0"), store.zlib.compress(b"[1]\0xx")]
)
def test_what_is_no_profile_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError):
        store.load(data)


@in_turn(0, of=2)
def test_flops_are_six_per_parameter_and_token() -> None:
    """Forward and backward of a dense model: 6 per parameter and token, attention apart (arXiv:2001.08361, 2.1)."""
    config = {"model_type": "llama", **SMALL, "num_hidden_layers": 6, "tie_word_embeddings": False}
    recorder = Recorder(TransformersSource(config, name="x"))
    tape = recorder.tape(TapeKey("plain", "fp32", "sdpa", "none", False))
    counts = recorder.profile.stacks[0].counts
    per_token = sum(s.matmul_flops[3] * (counts[s.layer] if s.stack >= 0 else 1) for s in tape.segments)
    embedding = 64 * 99
    norms = 64 * (2 * 6 + 1)
    assert per_token == 6 * (recorder.profile.parameters - embedding - norms)


def test_an_unrecordable_variant_says_why() -> None:
    """A grouped product in bf16 needs rows of whole 16 bytes."""
    config = {"model_type": "mixtral", **SMALL, "intermediate_size": 100, "num_hidden_layers": 2}
    with pytest.raises(NotRecordable, match="could not be run to record it"):
        Recorder(TransformersSource(config, name="x")).tape(TapeKey("plain", "bf16", "sdpa", "none", False))


@in_turn(2, of=3)
def test_kept_layers_get_the_masks_of_their_kinds() -> None:
    """Bamba derives the kinds of layers from the numbers of those with attention, which change if few layers are kept."""
    config = {
        "model_type": "bamba", **SMALL, "num_hidden_layers": 8, "attn_layer_indices": [2, 5], "mamba_n_heads": 4,
        "mamba_d_head": 32, "mamba_n_groups": 1, "mamba_d_state": 16, "mamba_chunk_size": 32,
    }  # fmt: skip
    recorder = Recorder(TransformersSource(config, name="x"))
    (stack,) = recorder.profile.stacks
    attends = ["self_attn.q_proj.weight" in {p.name for p in unit.parameters} for unit in stack.layers()]
    assert [number for number, found in enumerate(attends) if found] == [2, 5]
    assert recorder.tape(TapeKey("plain", "bf16-mixed", "eager", "none", at=(2, 64))).segments


def test_a_configuration_is_not_changed_by_building_it() -> None:
    """transformers writes into the dictionaries it is given; what identifies a model must stay as it was."""
    config = {
        "model_type": "llama",
        **SMALL,
        "num_hidden_layers": 2,
        "rope_scaling": {"rope_type": "linear", "factor": 2.0},
    }
    source = TransformersSource(config, name="x")
    source.build(torch.float32)
    assert source.config() == config
    assert config["rope_scaling"] == {"rope_type": "linear", "factor": 2.0}


@in_turn(1, of=2)
def test_no_layer_is_dropped() -> None:
    """OPT draws a number per layer where layers are to be dropped, and transformers 5.17 draws it always."""
    sizes = {"hidden_size": 64, "ffn_dim": 96, "num_attention_heads": 4, "num_hidden_layers": 3, "vocab_size": 99}
    whole, dropping = (
        Recorder(TransformersSource({"model_type": "opt", **sizes, "layerdrop": p}, name="x")).tape(
            TapeKey("fsdp2", "bf16", "eager", "none", at=(2, 16))
        )
        for p in (0.0, 0.5)
    )
    assert [(s.stack, s.layer, s.events) for s in dropping.segments] == [
        (s.stack, s.layer, s.events) for s in whole.segments
    ]


def test_a_mask_without_padding_is_none_to_flash_attention() -> None:
    """transformers looks into it, which fake tensors do not let it; OPT makes one by itself in 5.17."""

    class Masked(TransformersSource):
        def batch(self, micro_batch_size: int, seq_len: int) -> dict[str, torch.Tensor]:
            mask = torch.ones(micro_batch_size, seq_len, dtype=torch.long)
            return {**super().batch(micro_batch_size, seq_len), "attention_mask": mask}

    recorder = Recorder(Masked({"model_type": "llama", **SMALL, "num_hidden_layers": 2}, name="x"))
    assert recorder.tape(TapeKey("fsdp2", "bf16-mixed", "flash_attention_2", "none", device="gpu", at=(2, 16))).segments


def test_a_part_without_sdpa_keeps_eager_attention() -> None:
    text = {"num_hidden_layers": 2, "num_kv_shared_layers": 0, "layer_types": ["sliding_attention", "full_attention"]}
    config = {"model_type": "gemma4", "text_config": text, "audio_config": {"num_hidden_layers": 1}}
    source = TransformersSource(config, name="Gemma 4 with an audio encoder", task="image-text-to-text")
    model = source.build(torch.bfloat16)
    source.configure(model, attention="sdpa", checkpointing="none")
    parts = model.config.text_config, model.config.audio_config
    assert [part._attn_implementation for part in parts] == ["sdpa", "eager"]


def test_layers_that_a_configuration_lists_for_deepstack_keep_their_places() -> None:
    """GraniteDocling's tower reads the positions from its configuration, and the first text layers add the features."""
    config = {
        "model_type": "granite_docling",
        "vision_config": {"num_hidden_layers": 24, "deepstack_visual_indexes": [3, 12]},
        "text_config": {"num_hidden_layers": 24},
    }
    source = TransformersSource(config, name="granite", task="image-text-to-text")
    model = source.build(torch.float32)
    recorder = Recorder(source)
    tower = next(stack for stack in recorder.profile.stacks if "vision" in stack.path)
    places = [place for run in tower.runs for _ in range(run.repeats) for place in run.pattern]
    assert len(model.get_submodule(tower.path)) == len(places) == 24
    assert places.count(places[3]) == places.count(places[12]) == 1


@in_turn(1, of=3)
def test_a_recording_prints_no_warnings_of_code_under_fake_tensors() -> None:
    """The Trainer switches the cache off for the whole model alone, so a language model in it makes one, and slices it."""
    config = config_of("gemma3")
    config["text_config"] = {**config["text_config"], "sliding_window": 32}
    recorder = Recorder(TransformersSource(config, name="window", task="image-text-to-text"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        recorder.tape(TapeKey("fsdp2", "bf16-mixed", "sdpa", "none", device="gpu", at=(2, 64)))
