"""Parameters that get no gradient in a step have no gradients and no optimizer state where PyTorch makes none."""

from __future__ import annotations

from dataclasses import replace

import pytest
from matrix import of_today

torch = pytest.importorskip("torch")

from torch import nn

from fsdp_advisor import estimate
from fsdp_advisor.engines.learned import gradient_warnings, without_gradient
from fsdp_advisor.engines.registry import states_of
from fsdp_advisor.job.choices import OptimizerName
from fsdp_advisor.job.plan import Plan
from fsdp_advisor.model.tape import Tape
from fsdp_advisor.model.tape_key import TapeKey
from fsdp_advisor.parallelism.mesh import Mesh
from fsdp_advisor.recording import Recorder, record_module
from fsdp_advisor.step_figures import peak_of_step
from fsdp_advisor.tape_keys import tape_key_of
from fsdp_advisor.validation.simulate import simulate

PLAN = Plan(
    strategy="zero3", backend="fsdp2", mesh=Mesh(dp_shard=2), precision="bf16-mixed", micro_batch_size=2, seq_len=32
)


STEPPED = 24
"""Parameters of the model."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.idle = nn.Linear(64, 64), nn.Linear(64, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.used(x).relu()


class Tower(Block):
    """A layer that never runs."""


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.layers_of_tower = nn.ModuleList(Tower() for _ in range(2))
        self.head, self.tower = nn.Linear(64, 64), nn.Linear(64, 512)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@pytest.fixture(scope="module")
def recorder() -> Recorder:
    return record_module(
        Model,
        lambda b, t: {"x": torch.zeros(b, t, 64)},
        lambda module, batch: module(batch["x"]).float().mean(),
        wrap=[Block, Tower],
    )


@pytest.fixture(scope="module")
def tape(recorder: Recorder) -> Tape:
    return recorder.tape(TapeKey("fsdp2", "bf16-mixed", "sdpa", "none", at=PLAN.tape_shape))


def test_the_tape_shows_which_parameters_get_no_gradient(recorder: Recorder, tape: Tape) -> None:
    found = without_gradient(recorder.profile, tape)
    in_tower = {"used.weight": 2, "used.bias": 2}
    assert found == {"idle.weight": 5, "idle.bias": 5, "tower.weight": 1, "tower.bias": 1, **in_tower}


@pytest.mark.parametrize(
    "plan",
    [
        PLAN,
        replace(PLAN, backend="fsdp1"),
        replace(PLAN, backend="fsdp1", mesh=Mesh(dp_shard=3), gradient_accumulation_steps=2),
        replace(PLAN, strategy="ddp", backend="ddp", mesh=Mesh()),
        replace(PLAN, strategy="ddp", backend="ddp", mesh=Mesh(dp_replicate=2), gradient_accumulation_steps=2),
    ],
    ids=["fsdp2", "fsdp1", "fsdp1 on 3", "one GPU", "ddp"],
)
@pytest.mark.parametrize("optim", of_today(["adamw_torch_fused", "adagrad"], days=2))
def test_the_peak_equals_that_of_pytorchs_own_step(recorder: Recorder, plan: Plan, optim: OptimizerName) -> None:
    """Adagrad makes the states of all parameters when it is constructed. Its step counts are on the host, and the simulation counts
    them.
    """
    plan = replace(plan, optim=optim)
    simulated = simulate(recorder.source, plan).phase_peaks
    predicted = peak_of_step(recorder.profile, recorder.tape(tape_key_of(plan, recorder.profile)), plan).phase_peaks
    counts = 512 * STEPPED if optim == "adagrad" else 0
    assert {phase: n_bytes + counts for phase, n_bytes in predicted.items()} == simulated


def test_a_flat_partition_counts_them(recorder: Recorder, tape: Tape) -> None:
    plan = replace(PLAN, backend="deepspeed")
    assert "the estimate contains these" in gradient_warnings(recorder.profile, tape, plan)[0]
    assert states_of(recorder.profile, plan).optimizer.exact > 8 * 4 * 64 * 512 / 2


def test_ddp_names_what_stops_it(recorder: Recorder, tape: Tape) -> None:
    plan = replace(PLAN, strategy="ddp", backend="ddp", mesh=Mesh(dp_replicate=2))
    assert "find_unused_parameters, as exported files set it" in gradient_warnings(recorder.profile, tape, plan)[0]
    reentrant = replace(plan, activation_checkpointing="reentrant")
    assert "unless they are frozen" in gradient_warnings(recorder.profile, tape, reentrant)[0]
    searching = gradient_warnings(recorder.profile, tape, replace(plan, framework="trainer"))[0]
    assert "find_unused_parameters" not in searching
    assert "DDP's buckets contain them" in searching


def test_fsdp1_names_only_units_without_any_gradient(recorder: Recorder) -> None:
    """Its tapes say when a unit's flat gradient is ready, not which of its parameters have one."""
    plan = replace(PLAN, backend="fsdp1")
    tape = recorder.tape(tape_key_of(plan, recorder.profile))
    [warning] = gradient_warnings(recorder.profile, tape, plan)
    # the two layers of the tower
    assert warning.startswith("8 parameters get no gradient in this step, such as used.weight")


def test_every_parameter_of_a_text_model_gets_a_gradient() -> None:
    for backend in ("fsdp1", "fsdp2"):
        [row] = estimate(
            model="meta-llama/Llama-3.1-8B", gpus=4, gpu="H200", strategy="zero3", backend=backend
        ).estimates
        assert not [warning for warning in row.warnings if "no gradient" in warning]
