"""How torchtitan's loss in chunks changes the reductions of FSDP2's units.

The loss runs after the model's forward and computes the head's gradient. The last chunk reduces this gradient, and then frees the
parameters of the head's unit. Backward gathers the unit again for the final norm, and reduces the other gradients of the unit.
Source: torchtitan 0.3.0, components/loss.py, `ChunkedLossWrapper.__call__`; torch.distributed.fsdp._fully_shard._fsdp_state
(torch 2.13), `_force_complete_incomplete_states`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from fsdp_advisor.engines.fsdp2.units import UnitBytes, unit_bytes
from fsdp_advisor.engines.wrapping import HEAD, Wrapping
from fsdp_advisor.job.plan import Plan
from fsdp_advisor.model.profile import Profile


class LossInChunks(NamedTuple):
    """The two reductions of the head's unit. `parameter`: the index of the head's weight among the root's parameters.

    `head`: bytes of the reduction of the head's weight. `rest`: bytes of the reduction of the unit's other parameters, and of the head's
    weight again if it is tied to the embedding, because it then has a second gradient.
    """

    parameter: int
    head: UnitBytes
    rest: UnitBytes


def loss_in_chunks(profile: Profile, plan: Plan, wrapping: Wrapping) -> LossInChunks | None:
    """The reductions of torchtitan's loss in chunks; None for other losses."""
    if plan.loss_code != "torchtitan":
        return None
    part = wrapping.parts[HEAD]
    parameters = profile.root.parameters
    (head,) = (i for i in part.indices if parameters[i].role == "head" or parameters[i].tied)
    rest = tuple(parameters[i] for i in part.indices if i != head or parameters[i].tied)
    return LossInChunks(
        parameter=head,
        head=unit_bytes(replace(part.unit, parameters=(parameters[head],)), plan),
        rest=unit_bytes(replace(part.unit, parameters=rest), plan),
    )
