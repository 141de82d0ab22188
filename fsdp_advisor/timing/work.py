"""The compute of each segment of a tape: seconds on the GPU by class of operator, and on the CPU that launches them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from math import inf
from typing import NamedTuple, get_args

from fsdp_advisor.job.choices import Fp8
from fsdp_advisor.model.attention import has_window, head_dim, is_causal, wide_head_dim
from fsdp_advisor.model.fsdp_units import AT_ROOT, UnitId
from fsdp_advisor.model.multimodal import is_tower
from fsdp_advisor.model.profile import Profile, Unit
from fsdp_advisor.model.tape import (
    ROOT,
    Category,
    Chunked,
    Divided,
    Quantity,
    ScoringPhase,
    Segment,
    Staging,
    Tape,
    Tiled,
    value_at,
)
from fsdp_advisor.policies.dtypes import has_8_bit_weights
from fsdp_advisor.timing.achieved import (
    CHECKPOINT_BACKWARD_S,
    CHECKPOINT_FORWARD_S,
    DISABLED_ADAPTER_S,
    KERNEL_GAP_S,
    LAUNCH_S,
    SINKS_SLOWDOWN,
)
from fsdp_advisor.timing.operators import Device, attention_s, batched_s, matmul_s_per_flop, work_in_8_bits

COMPUTE_CLASSES = ("matmul", "attention", "pointwise", "loss", "recomputation")


class SegmentTime(NamedTuple):
    """Seconds of one segment. `recomputation` is the part that repeats a forward, `copies` the copies to and from the host, `cpu` the
    CPU's time to launch its operators.
    """

    matmul: float = 0.0
    attention: float = 0.0
    pointwise: float = 0.0
    loss: float = 0.0
    recomputation: float = 0.0
    copies: float = 0.0
    cpu: float = 0.0

    @property
    def gpu(self) -> float:
        """Seconds on the GPU: all but those of the CPU."""
        return self.matmul + self.attention + self.pointwise + self.loss + self.recomputation + self.copies


class TapeWork(NamedTuple):
    """The work of a tape. `by_segment`: the time of each segment. `trained_flops`: the FLOPs of one micro-batch without recomputation:
    those of forward, again as many for the gradients of inputs and for the gradients of trained weights. `scored_flops`: those of the
    forwards without gradients that one visit of them stands for.
    """

    by_segment: tuple[SegmentTime, ...]
    trained_flops: float
    scored_flops: float


class _Rates(NamedTuple):
    """A unit's matrix products: seconds per recorded FLOP in forward and in backward. `flops_in_8_bits`, `s_in_8_bits`: FLOPs and seconds
    of a forward's products in 8 bits, which are not recorded.
    """

    forward: float
    backward: float
    flops_in_8_bits: float = 0.0
    s_in_8_bits: float = 0.0


_UnitRates = dict[UnitId, _Rates]


@dataclass(frozen=True, slots=True)
class WorkOptions:
    """The facts about a plan that change the work of its tape."""

    checkpointing: bool = False
    """Whether layers repeat their whole forward in backward."""
    checkpoint_hooks: bool = True
    """Whether checkpoints have hooks for saved tensors. Reentrant ones have none."""
    adapter_switches: float = 0
    """How many times a visit of the reference's forward switches the adapters off. GRPO's visits share one switch."""
    sequences: int | None = None
    """Sequences of a micro-batch; None: as many as its rows."""
    masked: bool = False
    """Whether attention gets a mask for the batch. Its kernels then do not skip the causal half."""
    window_filled: bool = False
    """Whether sdpa gets a mask in layers with a sliding window, because the sequences fill it."""
    fp8: Fp8 = "none"
    """The recipe with which linear layers multiply in fp8."""
    head_in_fp8: bool = False
    """Whether the head does so too."""
    host_bytes_per_s: float = inf
    """Bytes per second of copies to and from the host."""
    overlaps_host: bool = False
    """Whether these copies run in parallel to the kernels of their layer, as on TRL's own stream, or between the kernels. Source: torch
    2.13, autograd/graph.py, save_on_cpu copies on the current stream; trl 1.16, models/activation_offloading.py: each copy has to end
    before the fifth tensor after it, or in backward before the next node.
    """
    loss_bytes: int = 0
    """Bytes that the loss moves in addition to those of the tape."""
    runs: tuple[tuple[str, float], ...] = ()
    """(phase of the tape, number of times that it runs for each visit in the program). Phases that are missing here run once."""
    gradients_in_forward: bool = False
    """Whether the loss computes the gradients of the head and of the hidden states in forward, and nothing again in backward."""


@lru_cache(maxsize=64)
def tape_work(profile: Profile, tape: Tape, b: int, t: int, device: Device, options: WorkOptions) -> TapeWork:
    """The tape's work at micro-batch `b` and `t` tokens."""
    rates = _rates(profile, tape, b, t, device, options)
    timer = _SegmentTimer(profile, tape, b, t, device, options, rates)
    return TapeWork(tuple(map(timer.time, tape.segments)), *_flops(profile, tape, b, t, options, rates))


class _SegmentTimer:
    """Times the segments of a tape, in their order, at micro-batch `b` and `t` tokens."""

    def __init__(
        self, profile: Profile, tape: Tape, b: int, t: int, device: Device, options: WorkOptions, rates: _UnitRates
    ) -> None:
        self._profile, self._b, self._t, self._device, self._options = profile, b, t, device, options
        self._rates, self._runs = rates, dict(options.runs)
        self._head = head_dim(profile)  # the width of a head of attention
        self._wide_head = wide_head_dim(profile)  # that of layers without a sliding window
        self._last_root = max((s.layer for s in _root_forwards(tape)), default=0)
        self._sliding = _sliding_layers(profile) if profile.window else frozenset()
        self._forwards: dict[UnitId, SegmentTime] = {}  # of the layers whose forward has run
        self._operators: dict[UnitId, int] = {}  # of these forwards

    def time(self, segment: Segment) -> SegmentTime:
        """The time of a segment, with all its repetitions."""
        options, unit = self._options, _unit_of(segment)
        backward, is_layer = segment.phase == "backward", segment.stack != ROOT
        repeats = options.checkpointing if segment.recomputed is None else bool(segment.recomputed.operators)
        multiplies = repeats if backward else segment.phase != "routers"
        s_in_8_bits = self._rates[unit].s_in_8_bits if multiplies else 0.0
        found = self._recorded(segment, s_in_8_bits, backward=backward)
        if is_layer and segment.phase == "forward":
            self._forwards[unit], self._operators[unit] = found, segment.operators
        elif segment.recomputed is not None:
            again = replace(segment, **segment.recomputed._asdict())
            found = _split(found, self._recorded(again, s_in_8_bits, backward=False))
        elif is_layer and backward and options.checkpointing:
            found = _split(found, self._forwards[unit])
        found = found._replace(cpu=found.cpu + self._checkpoint_cpu_s(segment))
        if segment.host_copies:
            found = found._replace(copies=self._copies(segment, found))
        if self._is_loss(segment) and not backward:
            found = found._replace(loss=found.loss + options.loss_bytes / self._device.eager_bytes_per_s)
        if segment.phase in self._runs:
            found = SegmentTime(*(self._runs[segment.phase] * seconds for seconds in found))
        if segment.phase == "reference" and segment.stack == ROOT and segment.layer == 0:
            found = found._replace(
                cpu=found.cpu + options.adapter_switches * DISABLED_ADAPTER_S * self._profile.lora_layers
            )
        return found

    def _recorded(self, segment: Segment, s_in_8_bits: float, *, backward: bool) -> SegmentTime:
        """The time of a segment's recorded operators, and of its products in 8 bits. `backward`: whether its products are those of
        backward.
        """
        b, t, device, rates = self._b, self._t, self._device, self._rates[_unit_of(segment)]
        own = value_at(segment.matmul_flops, b, t)
        batched = min(own, _batched_flops(segment.matmul_flops, b, t))
        moved = value_at(segment.traffic_bytes, b, t) / device.eager_bytes_per_s + segment.operators * KERNEL_GAP_S
        flash_flops, masked = value_at(segment.attention_flops, b, t), self._is_masked(segment)
        if not flash_flops and self._has_sinks_and_biases(segment):
            moved *= SINKS_SLOWDOWN
        flash = attention_s(
            flash_flops, device, self._head_of(segment), t, masked=masked,
            causal=self._is_causal(segment) and not masked, backward=segment.phase == "backward",
        )  # fmt: skip
        is_loss = self._is_loss(segment)
        return SegmentTime(
            matmul=(own - batched) * (rates.backward if backward else rates.forward) + s_in_8_bits,
            attention=batched_s(batched, device, self._head) + flash,
            pointwise=0.0 if is_loss else moved,
            loss=moved if is_loss else 0.0,
            cpu=segment.operators * LAUNCH_S,
        )

    def _is_loss(self, segment: Segment) -> bool:
        """Whether the segment contains the loss: the last of the root in forward, the first in backward."""
        return segment.stack == ROOT and segment.layer == (0 if segment.phase == "backward" else self._last_root)

    def _is_causal(self, segment: Segment) -> bool:
        """Whether tokens attend to those before them only. Without a mask the kernel of attention then skips half of its work."""
        return is_causal(self._profile) and not _is_tower(self._profile, segment)

    def _is_masked(self, segment: Segment) -> bool:
        """Whether attention gets a mask."""
        slides = self._options.window_filled and (segment.stack, segment.layer) in self._sliding
        return slides or (self._options.masked and not _is_tower(self._profile, segment))

    def _head_of(self, segment: Segment) -> int:
        """The width of a head of the segment's attention."""
        slides = (segment.stack, segment.layer) in self._sliding
        return self._head if slides or _is_tower(self._profile, segment) else self._wide_head

    def _has_sinks_and_biases(self, segment: Segment) -> bool:
        """Whether the layer's attention has learned sinks, each of which adds a column to a head's scores, and its experts have biases."""
        if segment.stack == ROOT:
            return False
        names = [p.name for p in self._profile.stacks[segment.stack].units[segment.layer].parameters]
        return all(any(name.endswith(end) for name in names) for end in (".sinks", "up_proj_bias"))

    def _checkpoint_cpu_s(self, segment: Segment) -> float:
        """Seconds that the CPU spends on the hooks of checkpoints."""
        if segment.stack == ROOT or not self._options.checkpoint_hooks:
            return 0.0
        if segment.phase == "forward" and self._options.checkpointing:
            return segment.operators * CHECKPOINT_FORWARD_S
        if segment.phase != "backward":
            return 0.0
        again = segment.recomputed.operators if segment.recomputed is not None else 0
        if self._options.checkpointing:
            again = again or self._operators.get(_unit_of(segment), 0)
        return again * CHECKPOINT_BACKWARD_S

    def _copies(self, segment: Segment, time: SegmentTime) -> float:
        """Seconds of the segment's copies to and from the host that its kernels do not hide."""
        copied = sum(value_at(n_bytes, self._b, self._t) for n_bytes in segment.host_copies)
        hidden = time.gpu if self._options.overlaps_host else 0.0
        return max(copied / self._options.host_bytes_per_s - hidden, 0.0)


def _flops(
    profile: Profile, tape: Tape, b: int, t: int, options: WorkOptions, rates: _UnitRates
) -> tuple[float, float]:
    """(`TapeWork.trained_flops`, `TapeWork.scored_flops`)."""
    layers = list(profile.layers()) or [profile.root]
    trained = sum(u.trainable_elements for u in layers) / max(1, sum(u.elements for u in layers))

    def flops(segments: Iterable[Segment]) -> float:
        return sum(
            (value_at(s.matmul_flops, b, t) + value_at(s.attention_flops, b, t) + rates[_unit_of(s)].flops_in_8_bits)
            * (1 if s.stack == ROOT else profile.stacks[s.stack].counts[s.layer])
            for s in segments
        )

    forwards = [s for s in tape.segments if s.phase == "forward"]
    whole = []
    if options.gradients_in_forward:
        forwards = [s for s in forwards if s.stack != ROOT]
        whole = [s for s in tape.segments if s.stack == ROOT and s.phase in ("forward", "backward")]
    times = dict(options.runs)
    scored = sum(times.get(s.phase, 1) * flops([s]) for s in tape.segments if s.phase in get_args(ScoringPhase))
    return (2 + trained) * flops(forwards) + flops(whole), scored


def _unit_of(segment: Segment) -> UnitId:
    return AT_ROOT if segment.stack == ROOT else UnitId(segment.stack, segment.layer)


def _sliding_layers(profile: Profile) -> frozenset[tuple[int, int]]:
    """(stack, recorded layer) of the language model's layers with a sliding window."""
    return frozenset(
        (place, recorded)
        for place, stack in enumerate(profile.stacks)
        if not is_tower(stack.path)
        for number, recorded in enumerate(stack.recorded_order)
        if has_window(profile.text_config, number)
    )


def _is_tower(profile: Profile, segment: Segment) -> bool:
    """Whether the layer belongs to a vision or audio tower, whose attention is not causal."""
    return segment.stack != ROOT and is_tower(profile.stacks[segment.stack].path)


def _root_forwards(tape: Tape) -> list[Segment]:
    return [s for s in tape.segments if s.phase == "forward" and s.stack == ROOT]


def _rates(profile: Profile, tape: Tape, b: int, t: int, device: Device, options: WorkOptions) -> _UnitRates:
    """The rates of each unit's matrix products."""
    tokens, unpacked = (options.sequences or b) * t, _unpacked_in_backward(profile, tape)

    def rate(unit: Unit, at_root: bool, *flops: Quantity, copies: tuple[int, ...] = ()) -> _Rates:
        recorded = sum(value_at(own, b, t) for own in flops)
        fp8 = "none" if at_root and not options.head_in_fp8 else options.fp8
        per_flop = matmul_s_per_flop(unit, at_root, tokens, device, recorded, fp8=fp8, unpacked=copies)
        return _Rates(*per_flop, *(() if at_root else work_in_8_bits(unit, tokens, device, recorded)))

    result = {AT_ROOT: rate(profile.root, True, *(s.matmul_flops for s in _root_forwards(tape)))}
    for segment in tape.segments:
        if segment.stack != ROOT and _unit_of(segment) not in result:
            unit = profile.stacks[segment.stack].units[segment.layer]
            copies = unpacked.get(_unit_of(segment), ())
            result[_unit_of(segment)] = rate(unit, False, segment.matmul_flops, copies=copies)
    return result


def _unpacked_in_backward(profile: Profile, tape: Tape) -> dict[UnitId, tuple[int, ...]]:
    """The bytes of each copy of a packed weight that the backward of a layer makes; none if no base is in 8 bits."""
    if not has_8_bit_weights(profile):
        return {}
    return {
        _unit_of(segment): tuple(
            value_at(copy, 1, 1)
            for size, category in births
            if category == Category.DEQUANTIZED and not isinstance(copy := tape.sizes[size], Staging | Tiled | Divided)
        )
        for segment, births in zip(tape.segments, tape.births, strict=True)
        if segment.phase == "backward" and segment.stack != ROOT
    }


def _batched_flops(flops: Quantity, b: int, t: int) -> int:
    """FLOPs of products of two activations. Such products in attention grow with B T^2, and those within chunks grow with the number of
    chunks; products with weights grow with B T and are not counted.
    """
    if isinstance(flops, Chunked):
        return value_at(flops._replace(of_tokens=(0, 0, 0, 0, *flops.of_tokens[4:])), b, t)
    return value_at((0, 0, 0, 0, *flops[4:]), b, t)


def _split(backward: SegmentTime, forward: SegmentTime) -> SegmentTime:
    """The time of a checkpointed layer's backward, divided into the repeated part of its forward (`recomputation`) and the rest."""
    matmul = min(backward.matmul, forward.matmul)
    attention = min(backward.attention, forward.attention)
    pointwise = min(backward.pointwise, forward.pointwise)
    return SegmentTime(
        matmul=backward.matmul - matmul,
        attention=backward.attention - attention,
        pointwise=backward.pointwise - pointwise,
        recomputation=matmul + attention + pointwise,
        cpu=backward.cpu,
    )
