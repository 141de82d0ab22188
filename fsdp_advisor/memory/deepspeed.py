"""DeepSpeed ZeRO-1, 2 and 3: what rank 0 keeps, what a step adds to it, and what offloading costs the host.

Read in DeepSpeed 0.19.8, under ``deepspeed/runtime/``. Stages 1 and 2 are ``zero/stage_1_and_2.py``, stage 3
``zero/stage3.py``; what stage 3 gathers, and when, is in `deepspeed_zero3`. DeepSpeed's defaults apply except where
`Settings` says otherwise. N = ranks; P = trainable elements; c = bytes per element in which the model computes; m =
bytes per element of the masters.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fsdp_advisor.memory.held import NOTHING, Held, States
from fsdp_advisor.models.profile import Parameter, Profile
from fsdp_advisor.plan import Plan

NORM_BYTES = 8
"""Gradient norms are taken in fp64, of a copy. Source: zero/utils.py, get_norm_dtype."""
NORM_ELEMENTS = 250_000_000
"""Stage 3 with offload copies at most this many at a time. Source: zero/stage3.py, _constant_buffered_norm2."""
BNB_BLOCK = 256
BNB_MIN_ELEMENTS = 4096
"""bitsandbytes (optim/optimizer.py): one fp32 absmax per 256 elements; tensors under 4096 elements keep fp32 states."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The keys of ``zero_optimization`` that decide memory, in elements. Source: zero/config.py,
    DeepSpeedZeroConfig.
    """

    reduce_bucket_size: int = 500_000_000
    sub_group_size: int = 1_000_000_000
    prefetch_bucket_size: int = 50_000_000
    param_persistence_threshold: int = 100_000
    max_live_parameters: int = 1_000_000_000
    max_reuse_distance: int = 1_000_000_000


DEFAULTS = Settings()


def settings_of(profile: Profile, plan: Plan) -> Settings:
    """DeepSpeed's defaults; under accelerate and the Trainer, what they fill in for "auto", by the model's hidden size.

    Source: accelerate/accelerator.py, _prepare_deepspeed; transformers/integrations/deepspeed.py, trainer_config_finalize.
    """
    return settings_for(hidden_size(profile), plan)


def settings_for(hidden: int | None, plan: Plan) -> Settings:
    """As `settings_of`, of a model's hidden size."""
    if hidden is None or not plan.prepared:
        return DEFAULTS
    if stage(plan) < 3:
        return Settings(reduce_bucket_size=hidden * hidden)
    return Settings(
        reduce_bucket_size=hidden * hidden,
        prefetch_bucket_size=int(0.9 * hidden * hidden),
        param_persistence_threshold=10 * hidden,
    )


def hidden_size(profile: Profile) -> int | None:
    """`config.hidden_size`, by whatever name the model's family writes it."""
    text = profile.config.get("text_config")
    for config in (profile.config, text if isinstance(text, dict) else {}):
        for key in ("hidden_size", "n_embd", "d_model", "n_embed"):
            if isinstance(value := config.get(key), int):
                return value
    return None


def stage(plan: Plan) -> int:
    return {"zero1": 1, "zero2": 2, "zero3": 3}[plan.strategy]


def offloads_optimizer(plan: Plan) -> bool:
    """Whoever offloads parameters offloads the optimizer too."""
    return plan.offload != "none"


def offloads_parameters(plan: Plan) -> bool:
    """Stages 1 and 2 ignore ``offload_param``."""
    return plan.offload == "parameters" and stage(plan) == 3


def master_bytes(plan: Plan) -> int:
    """Bytes per element of what the optimizer steps: fp32 masters, but bf16 ones under ``bf16``, whose configuration is
    ``bf16_master_weights_and_grads`` with ``bf16_optimizer_states``. There is a second copy even where it has the
    model's dtype.

    Source: base_optimizer.py, ZeROOptimizer._configure_master_weights.
    """
    return 2 if plan.precision == "bf16" else 4


def _all(profile: Profile) -> Iterator[tuple[Parameter, int]]:
    for unit, count in profile.counted_units():
        for parameter in unit.parameters:
            yield parameter, count


def flat_elements(trainable: int, ranks: int) -> int:
    """Elements of the flat buffer of stages 1 and 2: `trainable` rounded up to 2 `ranks`; each rank owns 1/`ranks` of
    it.

    Source: zero/stage_1_and_2.py, DeepSpeedZeroOptimizer.__init__ (nccl_start_alignment_factor = 2), one parameter
    group.
    >>> flat_elements(1322, 2), flat_elements(1322, 3)
    (1324, 1326)
    """
    return -(-trainable // (2 * ranks)) * 2 * ranks


def shard_elements(elements: int, ranks: int) -> int:
    """Elements each rank keeps of a parameter under stage 3; every parameter is padded by itself.

    Source: zero/partition_parameters.py, Init._partition_param.
    >>> shard_elements(29, 2)
    15
    """
    return -(-elements // ranks)


def _shard_total(profile: Profile, ranks: int) -> int:
    return sum(shard_elements(p.elements, ranks) * n for p, n in _all(profile) if p.trainable)


def sub_groups(profile: Profile, ranks: int, settings: Settings = DEFAULTS) -> list[tuple[int, int]]:
    """(elements, parameters) of each part that stage 3 steps by itself. A part is closed by the parameter that fills
    it.

    Only a rank with more than ``sub_group_size`` elements walks the parameters one by one.
    Source: zero/stage3.py, _create_fp16_sub_groups.
    """
    total = _shard_total(profile, ranks)
    if total <= settings.sub_group_size:
        return [(total, sum(n for p, n in _all(profile) if p.trainable))]
    groups, elements, count = [], 0, 0
    for parameter in profile.in_order():
        if parameter.trainable:
            elements, count = elements + shard_elements(parameter.elements, ranks), count + 1
            if elements >= settings.sub_group_size:
                groups.append((elements, count))
                elements, count = 0, 0
    return [*groups, (elements, count)] if count else groups


def optimizer_states(optim: str, elements: int, bytes_per_element: int) -> Held:
    """What the optimizer keeps on the GPU for one flat partition, the masters not included.

    torch's fused AdamW keeps its step count beside the moments, the others on the host or as a number. Adafactor (of
    transformers) does not factor a 1-D tensor: its second moment is fp32 and whole, with the RMS as a scalar.

    >>> optimizer_states("adamw_torch_fused", 662, 4).exact
    5300
    """
    match optim:
        case "adamw_torch_fused":
            return Held.of(bytes_per_element * elements, 2) + Held.of(4)
        case "adamw_torch":
            return Held.of(bytes_per_element * elements, 2)
        case "sgd":
            return NOTHING
        case "sgd_momentum":
            return Held.of(bytes_per_element * elements)
        case "adafactor":
            return Held.of(4 * elements) + Held.of(4)
        case "adamw_bnb_8bit":
            if elements < BNB_MIN_ELEMENTS:
                return Held.of(4 * elements, 2)
            return Held.of(elements, 2) + Held.of(4 * -(-elements // BNB_BLOCK), 2)
    raise ValueError(f"no DeepSpeed state count for optimizer {optim!r}")


def update_temporaries(optim: str, elements: int, bytes_per_element: int) -> Held:
    """What the optimizer's own step allocates at its highest, beside the gradient. fp32 copies of bf16 tensors
    included.

    foreach AdamW: the root of the second moment (torch/optim/adam.py, _multi_tensor_adam). Adafactor: ``grad**2`` and
    the update made of it (transformers/optimization.py, Adafactor.step). Fused, SGD and 8-bit kernels: nothing.
    """
    match optim:
        case "adamw_torch":
            return Held.of(bytes_per_element * elements)
        case "adafactor":
            return Held.of(4 * elements, 2 if bytes_per_element == 4 else 4)
    return NOTHING


def shards(profile: Profile, plan: Plan) -> Held:
    """What rank 0 of stage 3 keeps of the parameters, persistent ones included."""
    if offloads_parameters(plan):
        return NOTHING
    ranks, c = plan.shard_degree, plan.compute_bytes
    frozen = (Held.of(c * shard_elements(p.elements, ranks), n) for p, n in _all(profile) if not p.trainable)
    return sum(frozen, Held.of(c * _shard_total(profile, ranks)))


def persistent(profile: Profile, plan: Plan, settings: Settings) -> Held:
    """Small parameters that stage 3 holds whole, padded to the ranks, beside their shards: regathered after every step.

    One rank alone uses its shard itself, unless that is on the host.
    Source: zero/parameter_offload.py, mark_persistent_parameters; zero/partition_parameters.py,
    _allgather_params_coalesced.
    """
    ranks, held = plan.shard_degree, NOTHING
    if ranks == 1 and not offloads_parameters(plan):
        return held
    for p, n in _all(profile):
        if p.elements <= settings.param_persistence_threshold:
            held += Held.of(plan.compute_bytes * ranks * shard_elements(p.elements, ranks), n)
    return held


def states(profile: Profile, plan: Plan, settings: Settings = DEFAULTS) -> States:
    """What rank 0 keeps on the GPU from step to step.

    Stages 1, 2: the whole model in one flat buffer, masters and moments of 1/N of it, no gradients.
    Stage 3: 1/N of every parameter in one flat buffer, the same of the gradients in the model's dtype, masters and
    moments per sub-group, and the reduce bucket, which is never given back. Frozen parameters are sharded each by
    itself. The gradient norm (fp32; fp64 under stage 3) and stage 3's overflow flag are counted with the optimizer.

    Source: zero/stage_1_and_2.py, __init__; zero/stage3.py, _create_fp16_partitions_with_defragmentation,
    _create_fp32_partitions, _setup_for_real_optimizer.
    """
    ranks, c, m = plan.shard_degree, plan.compute_bytes, master_bytes(plan)
    offloaded = offloads_optimizer(plan)
    buffers = sum((Held.of(b.n_bytes, n) for unit, n in profile.counted_units() for b in unit.buffers), NOTHING)
    tables = Held.of(1024, 2) if plan.optim == "adamw_bnb_8bit" and not offloaded else NOTHING
    if stage(plan) < 3:
        flat = flat_elements(profile.trainable_parameters, ranks)
        owned = flat // ranks
        whole = (Held.of(c * p.elements, n) for p, n in _all(profile) if not p.trainable)
        kept = Held.of(m * owned) + optimizer_states(plan.optim, owned, m) + Held.of(4) + tables
        return States(
            parameters=sum(whole, Held.of(c * flat)),
            optimizer=NOTHING if offloaded else kept,
            communication=Held.of(c * _largest(profile)) if offloaded else NOTHING,
            buffers=buffers,
        )
    kept = Held.of(NORM_BYTES) + Held.of(1) + tables
    for elements, _ in sub_groups(profile, ranks, settings):
        kept += Held.of(m * elements) + optimizer_states(plan.optim, elements, m)
    return States(
        parameters=shards(profile, plan) + persistent(profile, plan, settings),
        gradients=NOTHING if offloaded else Held.of(c * _shard_total(profile, ranks)),
        optimizer=NOTHING if offloaded else kept,
        communication=Held.of(c * settings.reduce_bucket_size),
        buffers=buffers,
    )


def _largest(profile: Profile) -> int:
    return max(p.elements for p, _ in _all(profile) if p.trainable)


def owned_by_rank0(profile: Profile, partition_elements: int) -> tuple[int, int, int]:
    """Of the gradients of which rank 0 of stages 1, 2 owns any part: (elements kept, largest owned piece, pieces).

    The partition is the first 1/N of the model; the parameter that crosses its end is kept whole.
    Source: zero/stage_1_and_2.py, get_partition_info, copy_grads_in_partition.
    """
    start = largest = pieces = 0
    for parameter in profile.in_order():
        if start >= partition_elements:
            break
        if parameter.trainable:
            largest = max(largest, min(parameter.elements, partition_elements - start))
            start, pieces = start + parameter.elements, pieces + 1
    return start, largest, pieces + (start < partition_elements)


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """An instant of the optimizer step: what lives on the GPU on top of the states."""

    name: str
    gradients: Held = NOTHING
    temporaries: Held = NOTHING

    @property
    def total(self) -> Held:
        return self.gradients + self.temporaries


@dataclass(slots=True)
class Filled:
    """The gradients that wait for one reduction, as far as bytes go. `first` and `end` are places in the flat buffer.

    `largest_own` is the largest piece of one gradient that rank 0 keeps, `padded` the elements with each gradient padded
    to the ranks.
    """

    elements: int = 0
    count: int = 0
    padded: int = 0
    first: int = 0
    end: int = 0
    largest_own: int = 0

    def put(self, start: int, elements: int, padded: int, own: int) -> None:
        if not self.count or start < self.first:
            self.first = start
        if start + elements > self.end:
            self.end = start + elements
        if own > self.largest_own:
            self.largest_own = own
        self.elements += elements
        self.padded += padded
        self.count += 1

    def clear(self) -> None:
        self.elements = self.count = self.padded = self.first = self.end = self.largest_own = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Buffers:
    """What a step adds to the states on rank 0, and how long it lives.

    `bucket`: what gradients are moved into to be reduced; from the first gradient of a backward pass to its end (stage
    1: of the first micro-batch, to the end of the last). Empty for stage 3, whose bucket is among the states.
    `bucket_elements`: a gradient that does not fit makes the bucket reduced first; one that is larger is reduced where
    it is.
    `gradient_bytes`: bytes per element of gradients, of the bucket and of everything reduced.
    `partition_elements`: stages 1, 2: what each rank owns of the flat buffer; rank r from r times this.
    `averaged`: stages 1, 2: rank 0's own gradients; from the first reduction that holds one of them to the optimizer
    step.
    `accumulators`: how many of `averaged` live while a micro-batch after the first is reduced.
    `whole_gradients`: gradients stay whole, where autograd put them, until the last micro-batch's backward has ended.
    `released_at_step`: of the states, what is given back while the optimizer steps.
    `moments`: the optimizer step. `offload_cast_bytes`: bytes per element of the copy of a gradient that goes to the
    host, else 0.
    """

    bucket: Held
    bucket_elements: int
    gradient_bytes: int
    partition_elements: int
    averaged: Held
    accumulators: int
    whole_gradients: bool
    released_at_step: Held
    moments: tuple[Moment, ...]
    offload_cast_bytes: int = 0
    sharded: bool = False

    def reduce_copy(self, gradients: tuple[tuple[int, int], ...], ranks: int) -> Held:
        """The flat copy that a reduction makes of gradients of the given (first element, elements), in the flat
        buffer's order.
        """
        filled = Filled()
        for start, n in gradients:
            filled.put(start, n, ranks * shard_elements(n, ranks), 0)
        return Held.of(self.copy_bytes(filled, ranks)) if self.copy_bytes(filled, ranks) else NOTHING

    def copy_bytes(self, filled: Filled, ranks: int) -> int:
        """The flat copy that a reduction makes of what has been filled in. Stage 3 copies unless a single gradient
        divides evenly; padding counts. Stages 1, 2 copy if the gradients belong to several ranks; one that is larger
        than the bucket is cut where the ranks meet and reduced in parts, each closed by the slice that fills it.

        Source: zero/stage_1_and_2.py, average_tensor, allreduce_and_scatter, allreduce_bucket;
        comm/coalesced_collectives.py, reduce_scatter_coalesced.
        """
        if self.sharded:
            whole = filled.count == 1 and filled.elements % ranks == 0
            return 0 if whole else self.gradient_bytes * filled.padded
        owned = self.partition_elements
        if not filled.count or filled.first // owned == (filled.end - 1) // owned:
            return 0
        if filled.elements <= self.bucket_elements:
            return self.gradient_bytes * filled.elements
        largest = part = slices = 0
        at = filled.first
        while at < filled.end:
            end = min((at // owned + 1) * owned, filled.end)
            part, slices, at = part + end - at, slices + 1, end
            if slices > 1:  # a single slice is not copied
                largest = max(largest, part)
            if part > self.bucket_elements:
                part = slices = 0
        return self.gradient_bytes * largest

    def offload_temporaries(self, elements: int) -> Held:
        """What moving `elements` of one reduced gradient, rank 0's part, to the host takes on the GPU at its highest.

        The norm's fp64 copy, then one in the masters' dtype; stage 3 first brings back what it has put on the host.
        Source: zero/stage_1_and_2.py, copy_grads_in_partition; zero/stage3.py, partition_grads.
        """
        if not self.offload_cast_bytes:
            return NOTHING
        counted = min(elements, NORM_ELEMENTS) if self.sharded else elements
        cast = 0 if self.offload_cast_bytes == self.gradient_bytes else self.offload_cast_bytes * elements
        held = Held.of(max(NORM_BYTES * counted, cast))
        return held + Held.of(self.gradient_bytes * elements) if self.sharded else held


def _moments(
    plan: Plan, gradients: Held, elements: int, pieces: int, largest: int, overflow: Held = NOTHING
) -> tuple[Moment, ...]:
    """norm: an fp64 copy of one gradient at a time. cast: the gradients flattened, then that in the masters' dtype, all
    alive at once. update: only the last is left, with what the optimizer allocates. A single piece is flattened without
    a copy.

    Source: zero/stage_1_and_2.py, step; zero/stage3.py, step, _prepare_fp32_grad_for_sub_group.
    """
    c, m = plan.compute_bytes, master_bytes(plan)
    flattened = Held.of(c * elements) if pieces > 1 else NOTHING
    cast = Held.of(m * elements) if m != c else NOTHING
    stepped = cast if m != c else flattened
    kept = gradients if not stepped.exact else NOTHING
    return (
        Moment(name="overflow", gradients=gradients, temporaries=overflow),
        Moment(name="norm", gradients=gradients, temporaries=Held.of(NORM_BYTES * largest)),
        Moment(name="cast", gradients=gradients, temporaries=flattened + cast),
        Moment(name="update", gradients=kept, temporaries=stepped + update_temporaries(plan.optim, elements, m)),
    )


def buffers(profile: Profile, plan: Plan, settings: Settings = DEFAULTS) -> Buffers:
    """What a step adds to `states` on rank 0."""
    ranks, c = plan.shard_degree, plan.compute_bytes
    offloaded, sharded = offloads_optimizer(plan), stage(plan) == 3
    averaged, owned = NOTHING, 0
    moments: tuple[Moment, ...] = (Moment(name="update"),)
    if sharded:
        if not offloaded:
            group, pieces = max(sub_groups(profile, ranks, settings))
            # fp16 looks for overflow in all gradients at once: |g| and the comparison (stage3.py, has_overflow)
            total = _shard_total(profile, ranks)
            overflow = Held.of(c * total) + Held.of(total) if plan.precision == "fp16-mixed" else NOTHING
            moments = _moments(plan, NOTHING, group, pieces, shard_elements(_largest(profile), ranks), overflow)
    else:
        owned = flat_elements(profile.trainable_parameters, ranks) // ranks
        kept, largest, pieces = owned_by_rank0(profile, owned)
        if not offloaded:
            averaged = Held.of(c * kept)
            moments = _moments(plan, averaged, owned, pieces, largest)
    return Buffers(
        bucket=NOTHING if sharded else Held.of(c * settings.reduce_bucket_size),
        bucket_elements=settings.reduce_bucket_size,
        gradient_bytes=c,
        partition_elements=owned,
        averaged=averaged,
        accumulators=2 if stage(plan) == 2 and plan.gradient_accumulation_steps > 1 else 1,
        whole_gradients=stage(plan) == 1,
        released_at_step=persistent(profile, plan, settings) if sharded else NOTHING,
        moments=moments,
        offload_cast_bytes=master_bytes(plan) if offloaded else 0,
        sharded=sharded,
    )
