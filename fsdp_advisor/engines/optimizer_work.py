"""Temporaries and memory traffic of the optimizer's step, for engines that step each parameter's local tensor."""

from __future__ import annotations

from collections.abc import Callable

from fsdp_advisor.engines.units import recorded_units, total
from fsdp_advisor.errors import UsageError
from fsdp_advisor.job.plan import Plan
from fsdp_advisor.model.profile import Parameter, Profile
from fsdp_advisor.policies.clipping import CLIP_NORM_BYTES
from fsdp_advisor.policies.dtypes import stored_bytes
from fsdp_advisor.policies.optimizers import optimizer_of
from fsdp_advisor.policies.optimizers.interface import WHOLE, Collectives, Shards, Stepped
from fsdp_advisor.program.instructions import OptimizerStep
from fsdp_advisor.program.storages import NO_STORAGES, Storages

MASTER_BYTES = 16
"""DeepSpeed's traffic per element in addition to the update: the norm, the cast of the gradient into the masters' dtype, and the
cast of the updated weights back.
"""


def clips_gradients(plan: Plan) -> bool:
    """Whether the job clips the gradients before the optimizer's step. An optimizer that updates in backward has no gradients left to
    clip.
    """
    return plan.facts.clips_gradients and not optimizer_of(plan).backward_update


def shards_of(plan: Plan) -> Shards:
    """The ranks over which FSDP2 splits a parameter. DTensor treats the GPUs of a node as one host."""
    return Shards(ranks=plan.shard_degree, ranks_per_node=plan.ranks_per_node)


def stepping_refusal(profile: Profile, plan: Plan) -> UsageError | None:
    """Why the optimizer cannot step one of the model's parameters under DDP or FSDP2; None if it steps all."""
    optimizer, shards = optimizer_of(plan), shards_of(plan)
    if (failure := optimizer.model_failure(profile.config.get("model_type"))) is not None:
        return UsageError(failure, hint="another --optim")
    if optimizer.backward_update and plan.world_size > 1:
        return UsageError(
            f"{plan.optim} updates the parameters in backward, before DDP reduces the gradients of {plan.world_size} GPUs",
            hint="--gpus 1, or another --optim",
        )
    if optimizer.backward_update == "own gradient" and plan.gradient_accumulation_steps > 1:
        return UsageError(
            f"{plan.optim} does not support gradient accumulation: it steps in every backward",
            hint="--gradient-accumulation-steps 1, or another --optim",
        )
    if plan.world_size > 1 and host_elements(profile, plan):
        return UsageError(
            f"{plan.optim} copies gradients to the host in backward, before DDP reduces those of {plan.world_size} GPUs",
            hint="--gpus 1, or --offload optimizer",
        )
    for parameter, _ in profile.counted_parameters():
        if parameter.trainable and (failure := optimizer.shard_failure(parameter, shards)) is not None:
            return UsageError(failure, hint="fewer ranks per shard (hsdp), or another --optim")
    return None


def host_elements(profile: Profile, plan: Plan) -> int:
    """Elements of the GPU's parameters that the optimizer updates on the host."""
    optimizer = optimizer_of(plan)
    return sum(
        p.elements * count for p, count in profile.counted_parameters() if p.trainable and optimizer.on_host(p.elements)
    )


def host_state_bytes(profile: Profile, plan: Plan) -> int:
    """Bytes of optimizer state that stays on the host and is copied to the GPU for the update of parameters there."""
    optimizer = optimizer_of(plan)
    return sum(
        optimizer.host_state(p.elements, stored_bytes(plan, p)) * count
        for p, count in profile.counted_parameters()
        if p.trainable
    )


def gpu_step(
    profile: Profile, plan: Plan, elements: float, shards: Shards = WHOLE, *, masters: bool = False
) -> OptimizerStep:
    """The update of `elements` elements on the GPU: memory traffic, quantized states, matrix products and collectives.

    Bytes and states are means over all trainable parameters. Clipping reads the gradients for their norms, then reads and writes them.
    With DeepSpeed's `masters`, MASTER_BYTES contains clipping.
    """
    optimizer, flops, collectives = optimizer_of(plan), 0, Collectives()
    clips = clips_gradients(plan) and not masters
    share = elements / max(1, profile.trainable_parameters)
    n_bytes, quantized, quantizing = MASTER_BYTES * elements if masters else 0.0, 0.0, 0.0
    for parameter, count in profile.counted_parameters():
        if parameter.trainable:
            stored = stored_bytes(plan, parameter)
            n_bytes += 3 * stored * parameter.elements * share * count if clips else 0
            update = optimizer.step_bytes(parameter, stored) * share * count
            if states := optimizer.quantized_states(parameter):
                quantized += states * share * count
                quantizing += update
            else:
                n_bytes += update
            flops += optimizer.step_flops(parameter, shards) * count
            collectives += optimizer.step_collectives(parameter, shards) * count
    return OptimizerStep(
        n_bytes,
        quantized_states=quantized,
        quantizing_bytes=quantizing,
        host_elements=host_elements(profile, plan) * plan.ranks_per_node,
        host_kernel=optimizer.host_kernel,
        flops=flops,
        gathered_bytes=collectives.gathered_bytes,
        gathers=collectives.gathers,
        reduced_bytes=collectives.reduced_bytes,
        reduces=collectives.reduces,
    )


def host_step(plan: Plan, elements: float) -> OptimizerStep:
    """The update of `elements` elements by each rank on the host. All ranks of a node share the host."""
    optimizer = optimizer_of(plan)
    kernel = optimizer.deepspeed_host_kernel if plan.backend == "deepspeed" else optimizer.host_kernel
    return OptimizerStep(0.0, host_elements=elements * plan.ranks_per_node, host_kernel=kernel)


def optimizer_loop(profile: Profile, plan: Plan) -> tuple[tuple[int, int], ...]:
    """The events of an optimizer's loop over whole parameters (`Variables.events`); empty if it has no loop of its own."""
    optimizer, trained = optimizer_of(plan), [p for p in profile.in_order() if p.trainable]
    if optimizer.follows_groups and plan.facts.uses_trainer:
        trained.sort(key=lambda p: len(p.shape) < 2)
    variables = optimizer.loop([Stepped(p, p.shape, stored_bytes(plan, p)) for p in trained])
    return () if variables is None else tuple(variables.events)


def optimizer_temporaries(
    profile: Profile, plan: Plan, shape_of: Callable[[Parameter], tuple[int, ...]], shards: Shards = WHOLE
) -> Storages:
    """The optimizer's temporaries at the peak of its step. `shape_of` returns each parameter's shape on this rank."""
    optimizer = optimizer_of(plan)

    def of_one(parameter: Parameter) -> Storages:
        return optimizer.shard_temporaries(parameter, shape_of(parameter), stored_bytes(plan, parameter), shards)

    if optimizer.steps_one_by_one:
        each = (of_one(p) for _, unit, _ in recorded_units(profile) for p in unit.parameters if p.trainable)
        return max(each, key=lambda storages: storages.exact, default=NO_STORAGES)
    return total(profile, lambda unit: sum((of_one(p) for p in unit.parameters if p.trainable), NO_STORAGES))


def gradient_norms(profile: Profile, plan: Plan) -> Storages:
    """The storages of clipping: one scalar for each trainable parameter; empty if the job does not clip."""
    if not clips_gradients(plan):
        return NO_STORAGES
    norms = total(profile, lambda unit: Storages.of(CLIP_NORM_BYTES, sum(p.trainable for p in unit.parameters)))
    if not plan.facts.own_models:
        return norms
    # they are stacked, and the root of the sum of their squares is reduced over the ranks
    stacked = Storages.of(CLIP_NORM_BYTES * sum(1 for _ in norms.each()))
    return norms + stacked + Storages.of(CLIP_NORM_BYTES, 3 if plan.world_size > 1 else 1)
