"""Tables that a model's code casts when it runs: the prediction has what is alive from the second step on."""

from __future__ import annotations

from dataclasses import replace

import pytest
from matrix import of_today

pytest.importorskip("torch")

from fsdp_advisor.job.plan import Plan
from fsdp_advisor.parallelism.mesh import Mesh
from fsdp_advisor.recording import Recorder, TransformersSource
from fsdp_advisor.step_figures import peak_of_step
from fsdp_advisor.tape_keys import tape_key_of
from fsdp_advisor.validation.simulate import simulate

CTRL = {
    "model_type": "ctrl",
    "n_layer": 2,
    "n_embd": 64,
    "n_head": 2,
    "dff": 128,
    "vocab_size": 2048,
    "n_positions": 1024,
}
TABLE = "transformer.pos_encoding"


@pytest.fixture(scope="module")
def recorder() -> Recorder:
    return Recorder(TransformersSource(CTRL, name="ctrl", task="causal-lm"))


@pytest.mark.parametrize(
    ("backend", "precision"),
    of_today([("fsdp2", "bf16-mixed"), ("fsdp2", "fp32"), ("fsdp1", "bf16-mixed"), ("ddp", "bf16")], days=2),
)
def test_table_of_positions_has_the_dtype_that_the_code_gives_it(
    recorder: Recorder, backend: str, precision: str
) -> None:
    mesh = Mesh(dp_replicate=2) if backend == "ddp" else Mesh(dp_shard=2)
    strategy = "ddp" if backend == "ddp" else "zero3"
    plan = Plan(strategy=strategy, backend=backend, mesh=mesh, precision=precision, micro_batch_size=2, seq_len=48)
    tape = recorder.tape(replace(tape_key_of(plan, recorder.profile), at=(2, 48)))
    assert peak_of_step(recorder.profile, tape, plan).phase_peaks == simulate(recorder.source, plan).phase_peaks


def test_table_is_part_of_the_tape_alone(recorder: Recorder) -> None:
    assert TABLE not in {buffer.name for buffer in recorder.profile.root.buffers}
