"""How long a training step takes: operators on a roofline, collectives over their links, and how much of them overlaps."""

from fsdp_advisor.timing.step import StepTime, step_time, timeline, why_unknown
from fsdp_advisor.timing.timeline import Interval

__all__ = ["Interval", "StepTime", "step_time", "timeline", "why_unknown"]
