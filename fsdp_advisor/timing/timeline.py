"""The two streams of one step as data, for a chart: what computes and what is sent, unit by unit."""

from __future__ import annotations

from fsdp_advisor.hardware import Gpu, Link
from fsdp_advisor.job.plan import Plan
from fsdp_advisor.model.profile import Profile, Tape
from fsdp_advisor.timing.operators import device_of
from fsdp_advisor.timing.step import parts, why_unknown
from fsdp_advisor.timing.streams import Interval, MicroBatch, Streams

__all__ = ["Interval", "timeline"]


def timeline(profile: Profile, tape: Tape, plan: Plan, gpu: Gpu, between: Link) -> tuple[Interval, ...]:
    """The last micro-batch and the optimizer's step, in the order in which things are issued; empty where `why_unknown`.

    Hidden collectives slow compute down a little (`contention` of the breakdown); that is not drawn.
    """
    device = device_of(gpu, plan.precision)
    if device is None or why_unknown(plan, gpu) is not None:
        return ()
    _, engine, costs, pace = parts(profile, tape, plan, gpu, between, device)
    streams = MicroBatch(profile, pace, engine, costs, reduces=True, streams=Streams(intervals=[])).walk()
    assert streams.intervals is not None
    now = streams.compute
    after = (
        ("communication", "reduce gradients", engine.reduce_late),
        ("communication", "gradients to the host", engine.host_reduce),
        ("compute", "optimizer", engine.optimizer),
        ("compute", "optimizer on the host", engine.host_optimizer),
        ("communication", "parameters from the host", engine.host_late),
        ("communication", "all-gather parameters", engine.gather_updated),
    )
    for stream, name, seconds in after:
        if seconds:
            streams.intervals.append(Interval(stream, name, now, now + seconds))
            now += seconds
    return tuple(streams.intervals)
