"""What torch's optimizers allocate in a step, against what is predicted."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from fsdp_advisor.memory.optimizers import step_temporaries  # noqa: E402  # after the check for torch
from fsdp_advisor.validation.meter import StorageMeter  # noqa: E402

SHAPES = [(96, 128), (2000,), (64, 300), (4000,)]
SCALARS = 4
"""Of 512 bytes each: norms, and the step that is added to the counts."""


@pytest.mark.parametrize(
    ("optim", "optimizer"),
    [
        ("adamw_torch", torch.optim.AdamW),
        ("adafactor", torch.optim.Adafactor),
        ("sgd", torch.optim.SGD),
    ],
)
def test_a_step_over_all_parameters_at_once(optim: str, optimizer: type[torch.optim.Optimizer]) -> None:
    parameters = [torch.nn.Parameter(torch.randn(shape)) for shape in SHAPES]
    taking = optimizer(parameters, foreach=True)  # type: ignore[call-arg]  # each of these has it
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    taking.step()
    with StorageMeter() as meter:
        meter.begin("optimizer")
        taking.step()
        more = meter.end().peaks["tensor_bytes"]
    assert 0 <= more - step_temporaries(optim, SHAPES, 4).rounded <= SCALARS * 512
