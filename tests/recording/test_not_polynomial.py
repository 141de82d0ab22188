"""Questions that record a tape for any micro-batch and length, and questions that record a tape for one. The latter are the first question
about a model, and every question about a model whose sizes are no polynomials: linear attention pads sequences to whole chunks.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from matrix import in_turn, taken
from vision_models import config_of

pytest.importorskip("torch")

from fsdp_advisor import estimate, recommend
from fsdp_advisor.errors import NotPolynomial
from fsdp_advisor.hardware import find_gpu
from fsdp_advisor.job.images import Images
from fsdp_advisor.job.plan import Plan
from fsdp_advisor.model import cache
from fsdp_advisor.model.resolve import resolve
from fsdp_advisor.model.resolved import Resolved
from fsdp_advisor.model.tape import Chunked, Tape, value_at
from fsdp_advisor.model.tape_key import TapeKey
from fsdp_advisor.parallelism.mesh import Mesh
from fsdp_advisor.program.spans import storage_bytes
from fsdp_advisor.recording import Recorder
from fsdp_advisor.recording.transformers_models import TransformersSource
from fsdp_advisor.step_figures import peak_of_step, step_seconds, tensor_bytes
from fsdp_advisor.tapes import cpu_tape, kept_gpu_tape, row_tape, search_gpu_tape
from fsdp_advisor.validation.simulate import simulate

pytestmark = pytest.mark.slow

HYBRID = {
    "model_type": "olmo_hybrid", "num_hidden_layers": 4, "hidden_size": 128, "intermediate_size": 256, "vocab_size": 500,
    "num_attention_heads": 4, "num_key_value_heads": 4, "pad_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
PLAN = Plan(
    strategy="zero3", backend="fsdp2", mesh=Mesh(dp_shard=4), precision="bf16-mixed", micro_batch_size=2, seq_len=100
)


SPARSE = {
    "model_type": "glm_moe_dsa", "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 1, "q_lora_rank": 32, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16,
    "index_topk": 64, "index_n_heads": 4, "index_head_dim": 32, "vocab_size": 100,
}  # fmt: skip
"""Attention to min(T, 64) tokens that an index selects, as in GLM-5."""

MIXTURE = {
    "model_type": "mixtral", "hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "num_experts_per_tok": 4, "vocab_size": 101,
}  # fmt: skip

TOKENS_IN_TURN = {
    "num_hidden_layers": 4, "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "num_experts": 4, "num_experts_per_tok": 2, "vocab_size": 100,
    "max_position_embeddings": 16, "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 32, "indexer_budget": 8,
    "indexer_compress_ratio": 4,
}  # fmt: skip
"""Values of both architectures that run each token in turn on a GPU too: an index of tokens, and gated linear recurrent units."""


@pytest.fixture(scope="module")
def recorder() -> Recorder:
    return Recorder(TransformersSource(HYBRID, name="hybrid"))


@in_turn(1, of=2)
def test_no_tape_is_valid_for_every_length(recorder: Recorder) -> None:
    with pytest.raises(NotPolynomial):
        recorder.tape(TapeKey("fsdp2", "bf16-mixed", "sdpa", "none"))


@in_turn(2, of=4)
@pytest.mark.parametrize("seq_len", taken([100], [200]))
def test_the_tape_of_one_length_gives_the_peak_of_pytorchs_own_step(recorder: Recorder, seq_len: int) -> None:
    profile, plan = recorder.profile, replace(PLAN, seq_len=seq_len)
    model = Resolved("hybrid", "module", profile, profile.parameters, profile.parameters, recorder=recorder)
    key, tape = cpu_tape(model, plan)
    assert key.at == (2, seq_len)
    assert peak_of_step(profile, tape, plan).phase_peaks == simulate(recorder.source, plan).phase_peaks


@in_turn(3, of=4)
@pytest.mark.parametrize("at", taken([(3, 777)], [(2, 64), (2, 2048)]))
def test_the_tape_of_a_gpu_is_valid_for_every_length(recorder: Recorder, at: tuple[int, int]) -> None:
    key = TapeKey("fsdp2", "bf16-mixed", "sdpa", "none", device="gpu")
    for_any, own = recorder.tape(key), recorder.tape(replace(key, at=at))
    assert any(isinstance(size, Chunked) for size in for_any.sizes)
    assert storage_bytes(for_any, *at) != storage_bytes(for_any, 1, 63)
    assert _events(for_any, *at) == _events(own, *at)


def _events(tape: Tape, b: int, t: int) -> list[object]:
    """The events of all segments with sizes in bytes, and their work."""
    sizes = storage_bytes(tape, b, t, resident_threads=2048 * 132)
    return [
        (
            [(op, a if op else sizes[a], c) for op, a, c in segment.events],
            [value_at(work, b, t) for work in (segment.matmul_flops, segment.attention_flops, segment.traffic_bytes)],
        )
        for segment in tape.segments
    ]


@in_turn(1, of=4)
def test_a_row_needs_no_recording_of_its_own_length(recorder: Recorder) -> None:
    """Once the CPU's code path is known to depend on the length, the GPU's tape answers every question."""
    profile = recorder.profile
    model = Resolved("hybrid", "module", profile, profile.parameters, profile.parameters, recorder=recorder)
    with pytest.raises(NotPolynomial):
        model.tape(TapeKey("fsdp2", "bf16-mixed", "sdpa", "none"))
    for seq_len in (100, 333):
        key, _ = row_tape(model, replace(PLAN, seq_len=seq_len))
        assert (key.device, key.at) == ("gpu", None)


@in_turn(2, of=3)
@pytest.mark.parametrize("model_type", taken(["qwen4_exp_text"], ["recurrent_gemma"]))
def test_a_loop_over_tokens_on_a_gpu_is_recorded_for_the_requested_length_at_once(model_type: str, home: Path) -> None:
    path = home / "config.json"
    path.write_text(json.dumps({**TOKENS_IN_TURN, "model_type": model_type}))
    model = resolve(str(path))
    assert model.profile is not None
    key, _ = row_tape(model, replace(PLAN, seq_len=12))
    assert (key.device, key.at) == ("gpu", (2, 12)) and not model.profile.refusals
    with pytest.raises(NotPolynomial):
        model.tape(replace(key, at=None))


@in_turn(3, of=8)
def test_a_long_loop_of_a_cpu_is_not_recorded(home: Path) -> None:
    """64 chunks are the most; above, the GPU's figures are answered without the reference of a CPU."""
    path = home / "config.json"
    path.write_text(json.dumps({**HYBRID, "vocab_size": 101}))
    options = {"model": str(path), "gpus": 2, "strategy": "zero3", "micro_batch_size": 2}
    model = resolve(str(path))
    assert model.profile is not None
    (row,) = estimate(**options, seq_len=64 * 64 + 1).estimates
    assert row.needed_bytes and row.peak_tensor_bytes and row.simulated_peak_bytes is None
    (row,) = estimate(**options, seq_len=100).estimates
    assert row.simulated_peak_bytes


@in_turn(1, of=2)
def test_a_loop_over_many_experts_on_a_cpu_is_not_recorded(home: Path) -> None:
    """128 experts are the most; above, too, the GPU's figures are answered without the reference of a CPU."""
    path = home / "config.json"
    path.write_text(json.dumps({**MIXTURE, "num_local_experts": 129}))
    options = {"model": str(path), "gpus": 2, "strategy": "zero3", "seq_len": 64, "experts_implementation": "eager"}
    (row,) = estimate(**options).estimates
    assert row.needed_bytes and row.peak_tensor_bytes and row.simulated_peak_bytes is None


@in_turn(3, of=4)
@pytest.mark.usefixtures("home")
def test_the_second_batch_records_a_tape_for_any() -> None:
    """Each question resolves the model anew, as commands do: what earlier ones recorded is in the cache."""

    def asked(seq_len: int) -> tuple[tuple[int, int] | None, int]:
        model = resolve("tiny")
        assert model.profile is not None
        plan = replace(PLAN, strategy="ddp", backend="ddp", precision="fp32", attention="eager", seq_len=seq_len)
        key, tape = cpu_tape(model, plan)
        return key.at, peak_of_step(model.profile, tape, plan).peak

    own, peak = asked(100)
    assert own == (2, 100)
    assert asked(100) == (own, peak)
    assert asked(101)[0] is None
    assert asked(100) == (None, peak)


@in_turn(0, of=2)
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.usefixtures("home")
def test_a_search_records_only_the_tape_of_the_gpu(batch: int) -> None:
    """It answers for any micro-batch above 1, with the bytes of the tape that an estimate records for one."""
    model, gpu = replace(resolve("tiny"), recorded_locally=True), find_gpu("A100-80GB")
    assert model.profile is not None
    plan = replace(PLAN, strategy="ddp", backend="ddp", precision="bf16", attention="eager", micro_batch_size=batch)
    before = set(model.profile.tapes)
    tape = search_gpu_tape(model, plan, gpu)
    [name] = set(model.profile.tapes) - before
    assert TapeKey.from_name(name).device == "gpu"
    assert TapeKey.from_name(name).at == ((1, 100) if batch == 1 else None)
    own = kept_gpu_tape(model.profile, cpu_tape(model, plan), plan, gpu)
    assert peak_of_step(model.profile, tape, plan) == peak_of_step(model.profile, own, plan)


@pytest.mark.usefixtures("home")
def test_a_search_records_only_the_tape_of_the_gpu_that_the_catalog_lacks() -> None:
    model, gpu = resolve("tiny"), find_gpu("A100-80GB")
    assert model.from_catalog and model.profile is not None
    before = set(model.profile.tapes)
    search_gpu_tape(model, replace(PLAN, activation_checkpointing="every-2"), gpu)
    [name] = set(model.profile.tapes) - before
    assert TapeKey.from_name(name).device == "gpu"


@in_turn(2, of=4)
def test_a_recommendation_records_no_step_on_a_cpu(home: Path) -> None:
    """Except for a plan of the report, whose row it has: here with a micro-batch of one."""
    path = home / "config.json"
    path.write_text(json.dumps({**MIXTURE, "num_local_experts": 4, "vocab_size": 102}))
    winner = recommend(model=str(path), gpus=2, gpu="A100-40GB", seq_len=64, strategy="zero3").recommendation.winner
    assert winner is not None and winner.estimate.peak_tensor_bytes and winner.estimate.simulated_peak_bytes is None
    cached = cache.fetch(json.loads(path.read_text()), None)
    assert cached is not None
    keys = list(map(TapeKey.from_name, cached.tapes))
    assert {key.at for key in keys if key.device == "cpu"} <= {(1, 64)}
    assert sum(key.device == "gpu" for key in keys) > 4


@in_turn(3, of=4)
def test_a_search_records_few_micro_batches_with_images(home: Path) -> None:
    """A vision tower loops over the images of a batch: no tape is valid for every micro-batch, with checkpoints either. Two small ones
    bound the peak of a larger one, and have its time.
    """
    path = home / "config.json"
    path.write_text(json.dumps(config_of("qwen3_vl")))
    model, gpu = resolve(str(path)), find_gpu("A100-80GB")
    assert model.profile is not None
    plan = replace(PLAN, seq_len=600, images=Images(1, 64, 64, 0))
    for each in (plan, replace(plan, activation_checkpointing="full"), replace(plan, micro_batch_size=3)):
        search_gpu_tape(model, each, gpu)
        assert len(model.profile.refusals) == 1
    larger = replace(plan, micro_batch_size=5)
    bound, seconds = tensor_bytes(model, larger, gpu), step_seconds(model, larger, gpu)
    assert {TapeKey.from_name(name).at for name in model.profile.tapes} == {(2, 600), (3, 600)}
    peak = peak_of_step(model.profile, search_gpu_tape(model, larger, gpu), larger).peak
    assert bound == pytest.approx(peak, rel=1e-5)  # the rounding of storages to 512 bytes
    assert seconds == pytest.approx(step_seconds(model, larger, gpu), rel=0.01)  # now of its own recording


@in_turn(1, of=2)
@pytest.mark.parametrize(
    ("model_type", "seq_len"),
    taken(
        [("glm_moe_dsa", 96)], [("glm_moe_dsa", 32), ("deepseek_v32", 32), ("deepseek_v32", 64), ("deepseek_v32", 96)]
    ),
)
def test_sparse_attention_has_pytorchs_peaks_below_and_above_its_number_of_tokens(
    model_type: str, seq_len: int
) -> None:
    recorder = Recorder(TransformersSource({**SPARSE, "model_type": model_type}, name="sparse"))
    plan = replace(PLAN, seq_len=seq_len)
    tape = recorder.tape(TapeKey("fsdp2", "bf16-mixed", "sdpa", "none", at=plan.tape_shape))
    assert peak_of_step(recorder.profile, tape, plan).phase_peaks == simulate(recorder.source, plan).phase_peaks
