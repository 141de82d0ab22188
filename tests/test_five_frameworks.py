"""One job as plain PyTorch, the Trainer, the Trainer with Liger's kernels, TRL and torchtitan: which tensors differ, and why."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
from matrix import in_turn

pytest.importorskip("torch")
pytest.importorskip("torchtitan")

from fsdp_advisor.hardware.lookup import find_gpu  # after the checks
from fsdp_advisor.job.adaptation import adaptation_of
from fsdp_advisor.job.compatibility import plans
from fsdp_advisor.job.parsing import make_request
from fsdp_advisor.job.plan import Plan
from fsdp_advisor.model.resolve import resolve
from fsdp_advisor.model.tape import ROOT, Category, Divided, Op, Staging, Tape, Tiled, value_at
from fsdp_advisor.model.tape_key import TapeKey
from fsdp_advisor.step_figures import peak_of_step
from fsdp_advisor.tape_keys import gpu_tape_key_of, tape_key_of

pytestmark = pytest.mark.slow

B, T, D, F, V = 3, 2048, 128, 320, 48_000
TOKENS, BF16, FP32 = B * T, 2, 4
CONFIG = {
    "model_type": "llama", "hidden_size": D, "intermediate_size": F, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": V, "max_position_embeddings": 8192, "tie_word_embeddings": False,
}  # fmt: skip
JOB: dict[str, Any] = {
    "strategy": "zero3", "backend": "fsdp2", "gpus": 4, "micro_batch_size": B, "seq_len": T, "activation_checkpointing": "none",
}  # fmt: skip
ASKED: dict[str, dict[str, Any]] = {
    "torch": {},
    "trainer": {"framework": "trainer"},
    "liger": {"framework": "trainer", "use_liger_kernel": True},
    "trl": {"framework": "trl"},
    "torchtitan": {"framework": "torchtitan"},
}


class Answer(NamedTuple):
    plan: Plan
    key: TapeKey
    tape: Tape
    at_peak: dict[str, int]


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Answer]:
    path = tmp_path_factory.mktemp("model") / "config.json"
    path.write_text(json.dumps(CONFIG))
    found = {}
    for name, options in ASKED.items():
        request = make_request({"model": str(path), **JOB, **options})
        (plan,) = plans(request, seq_len=T)
        model = resolve(request.model).adapted(adaptation_of(request))
        assert model.profile is not None
        key = replace(tape_key_of(plan, model.profile), at=plan.tape_shape)
        model.tape(key)
        if name != "torchtitan":  # its FlexAttention is on the CPU's tape
            key = replace(gpu_tape_key_of(model.profile, key, plan, find_gpu("H100-80GB")), at=plan.tape_shape)
            key = replace(key, attention="sdpa", device="gpu", kernel="default")
        tape = model.tape(key)
        found[name] = Answer(plan, key, tape, peak_of_step(model.profile, tape, plan).at_peak)
    return found


def _allocated(tape: Tape, phase: str, category: Category, *, in_layer: bool) -> Counter[int]:
    """Bytes of the storages of a category that a phase of the first layer, or all of the root, allocates, with their number."""
    found: Counter[int] = Counter()
    for segment in tape.segments:
        if segment.phase == phase and (segment.stack != ROOT) is in_layer and (not in_layer or segment.layer == 0):
            for op, size, kind in segment.events:
                of = tape.sizes[size] if op == Op.ALLOC and kind == category else None
                if of is not None and not isinstance(of, Staging):
                    found[of.bytes_at(B, T) if isinstance(of, Tiled | Divided) else value_at(of, B, T)] += 1
    return found


@in_turn(0, of=2)
def test_the_trainer_runs_the_same_code_and_reduces_in_another_dtype(answers: dict[str, Answer]) -> None:
    """accelerate's mixed precision reduces gradients in bf16, and makes units of embedding, norm and head."""
    torch, trainer = answers["torch"], answers["trainer"]
    assert torch.key == trainer.key
    assert (torch.plan.reduce_bytes, trainer.plan.reduce_bytes) == (FP32, BF16)
    assert (
        torch.at_peak["loss"] == trainer.at_peak["loss"]
        and torch.at_peak["activations"] == trainer.at_peak["activations"]
    )
    embedding = V * D * BF16
    assert torch.at_peak["unsharded_parameters"] - trainer.at_peak["unsharded_parameters"] == embedding


def test_plain_pytorch_computes_the_loss_from_all_logits(answers: dict[str, Answer]) -> None:
    """The logits, their copy in fp32, and the log-softmax."""
    loss = _allocated(answers["torch"].tape, "forward", Category.LOSS, in_layer=False)
    assert (loss[TOKENS * V * BF16], loss[TOKENS * V * FP32]) == (1, 2)


def test_ligers_kernels_keep_less_of_a_layer_and_a_chunk_of_the_logits(answers: dict[str, Answer]) -> None:
    """Not the output of SiLU, and not the fp32 copies of the norms' inputs. A chunk has 32 of 6,144 tokens: a 375th, rounded up to a
    power of two.
    """
    plain = _allocated(answers["trainer"].tape, "forward", Category.ACTIVATION, in_layer=True)
    liger = _allocated(answers["liger"].tape, "forward", Category.ACTIVATION, in_layer=True)
    assert (plain[TOKENS * F * BF16], liger[TOKENS * F * BF16]) == (4, 3)
    assert (plain[TOKENS * D * FP32], liger[TOKENS * D * FP32]) == (2, 0)
    loss = _allocated(answers["liger"].tape, "forward", Category.LOSS, in_layer=False)
    assert loss[32 * V * BF16] == 1 and max(loss) < TOKENS * V


def test_trl_computes_the_loss_in_tiles_and_the_layers_as_the_trainer(answers: dict[str, Answer]) -> None:
    trl, trainer = answers["trl"], answers["trainer"]
    layers = [_allocated(each.tape, "forward", Category.ACTIVATION, in_layer=True) for each in (trl, trainer)]
    assert layers[0] == layers[1]
    assert max(_allocated(trl.tape, "forward", Category.LOSS, in_layer=False)) == 4096 * 32_768 * BF16
    assert trl.plan.facts.checkpointing == "full" and trainer.plan.facts.checkpointing == "none"


def test_torchtitan_computes_the_loss_in_chunks_and_queries_keys_and_values_at_once(answers: dict[str, Answer]) -> None:
    titan = answers["torchtitan"]
    loss = _allocated(titan.tape, "forward", Category.LOSS, in_layer=False)
    assert max(loss) == TOKENS * V * FP32 // 8
    layer = _allocated(titan.tape, "forward", Category.ACTIVATION, in_layer=True)
    plain = _allocated(answers["torch"].tape, "forward", Category.ACTIVATION, in_layer=True)
    assert titan.plan.reduce_bytes == FP32 and titan.plan.facts.clips_gradients
    assert layer != plain
