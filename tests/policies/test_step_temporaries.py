"""What torch's optimizers allocate in a step, compared with the prediction."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import get_args

import pytest

torch = pytest.importorskip("torch")

from fsdp_advisor.job.choices import OptimizerName  # after the check for torch
from fsdp_advisor.model.profile import Parameter
from fsdp_advisor.policies.optimizers import optimizer_named
from fsdp_advisor.policies.optimizers.bitsandbytes import Bitsandbytes
from fsdp_advisor.program.storages import NO_STORAGES
from fsdp_advisor.validation.engines import optimizer_class
from fsdp_advisor.validation.meter import StorageMeter

NAMES: tuple[OptimizerName, ...] = (
    "adamw_torch", "adamw_torch_fused", "adafactor", "sgd", "sgd_momentum", "adagrad", "rmsprop",
    "schedule_free_adamw", "schedule_free_sgd", "schedule_free_radam",
)  # fmt: skip
OF_BITSANDBYTES = [one for one in map(optimizer_named, get_args(OptimizerName)) if isinstance(one, Bitsandbytes)]
SHAPES = [(96, 128), (2000,), (64, 300), (4000,)]
STEPS = {"schedule_free_radam": 6}
"""Steps before the temporaries are those of all later steps: RAdam's first five have no square roots."""
SCALARS = 4
"""Storages of 512 bytes each: norms, and the step that is added to the counts."""


@pytest.mark.parametrize("name", NAMES)
def test_step_allocates_the_predicted_temporaries(name: OptimizerName) -> None:
    parameters, optimizer = stepped(name)
    predicted = (optimizer_named(name).step_temporaries(Parameter(name="p", shape=shape), shape, 4) for shape in SHAPES)
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    with StorageMeter() as meter:
        meter.begin("optimizer")
        optimizer.step()
        high = meter.end().peaks["tensor_bytes"]
    assert 0 <= high - sum(predicted, NO_STORAGES).rounded <= SCALARS * 512


@pytest.mark.parametrize("name", NAMES)
def test_saved_state_has_the_predicted_bytes(name: OptimizerName) -> None:
    parameters, optimizer = stepped(name)
    for parameter, shape in zip(parameters, SHAPES, strict=True):
        state = optimizer.state[parameter].values()
        found = sum(t.numel() * t.element_size() for t in state if isinstance(t, torch.Tensor))
        policy = optimizer_named(name)
        state_bytes = policy.state_storages(Parameter(name="p", shape=shape), shape, 4).exact + policy.host_state_bytes
        assert found == state_bytes
        assert prod(shape) == parameter.numel()


@pytest.mark.parametrize("name", [one.name for one in OF_BITSANDBYTES if not one.is_paged])
def test_state_of_bitsandbytes_has_the_predicted_bytes(name: OptimizerName) -> None:
    pytest.importorskip("bitsandbytes")
    parameters, optimizer = stepped(name, [*SHAPES, (400, 300)])
    policy = optimizer_named(name)
    for parameter in parameters:
        state = optimizer.state[parameter].items()
        found = sum(t.nbytes for key, t in state if isinstance(t, torch.Tensor) and "qmap" not in key)
        shape = tuple(parameter.shape)
        assert found == policy.state_storages(Parameter(name="p", shape=shape), shape, 4).exact


def stepped(
    name: OptimizerName, shapes: Sequence[tuple[int, ...]] = SHAPES
) -> tuple[list[torch.nn.Parameter], torch.optim.Optimizer]:
    """Parameters of these shapes, and the optimizer `name` after its first steps over them."""
    constructor = optimizer_named(name).script
    if constructor.module not in ("torch.optim", "bitsandbytes.optim"):
        pytest.importorskip(constructor.module)
    parameters = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]
    optimizer = optimizer_class(constructor)(parameters, lr=1e-3, **constructor.options)
    if constructor.has_modes:
        optimizer.train()
    for _ in range(STEPS.get(name, 1)):
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
    return parameters, optimizer
