"""How long a training step takes: operators on a roofline, collectives over their links, and what of one hides the other."""

from fsdp_advisor.timing.step import StepTime, step_time, why_unknown
from fsdp_advisor.timing.timeline import Interval, timeline

__all__ = ["Interval", "StepTime", "step_time", "timeline", "why_unknown"]
