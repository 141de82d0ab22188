"""How long each unit's compute takes on its engine: as long as the GPU computes and copies, or as the CPU launches, if that is longer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from fsdp_advisor.model.profile import ROOT, Run
from fsdp_advisor.timing.engines import Engine, UnitCosts
from fsdp_advisor.timing.work import Compute, Stretch

Place = tuple[int, int]


class Paced(NamedTuple):
    """A `Stretch` of the compute, with the seconds of its layers."""

    stack: int
    seconds: dict[int, float]
    runs: tuple[Run, ...]


@dataclass(frozen=True, slots=True)
class Pace:
    """The compute stream of one micro-batch, in the order in which it runs. Over all real layers `launch` is what the GPU waits for
    the CPU, and `sharding` what copies around collectives take.
    """

    forward: tuple[Paced, ...]
    backward: tuple[Paced, ...]
    launch: float
    sharding: float


def pace_of(compute: Compute, engine: Engine, costs: dict[Place, UnitCosts]) -> Pace:
    """`costs` are by place. The root's copies are its first stretch's."""
    forward, waits, copies = _paced(compute.forward, engine, costs, backward=False)
    backward, more_waits, more_copies = _paced(compute.backward, engine, costs, backward=True)
    return Pace(forward, backward, waits + more_waits, copies + more_copies)


def _paced(
    stretches: tuple[Stretch, ...], engine: Engine, costs: dict[Place, UnitCosts], *, backward: bool
) -> tuple[tuple[Paced, ...], float, float]:
    """One direction; with what the GPU waits for the CPU and what copies take, over all real layers."""
    launch = sharding = 0.0
    first_root = True
    paced = []
    for stretch in stretches:
        seconds = {}
        for layer, work in stretch.work.items():
            unit, times = costs[stretch.stack, layer], stretch.counts[layer]
            copies = unit.copies_backward if backward else unit.copies_forward
            if stretch.stack == ROOT:
                copies, first_root = copies if first_root else 0.0, False
            on_gpu, on_cpu = work.gpu, work.cpu + engine.hooks_s
            seconds[layer] = max(on_gpu + copies, on_cpu)
            sharding += times * copies
            launch += times * max(on_cpu - on_gpu - copies, 0.0)
        paced.append(Paced(stretch.stack, seconds, stretch.runs))
    return tuple(paced), launch, sharding
