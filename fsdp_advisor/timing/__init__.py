"""The time of a training step: operators on a roofline, collectives over their links, and the overlap of both.

`step_time` returns a step's seconds with a breakdown and a range, `timeline` the intervals of both streams, `why_unknown`
the reason if there is no time. The package reads a step program; it imports no engine.
"""

from fsdp_advisor.timing.step import StepTime, step_time, timeline, why_unknown
from fsdp_advisor.timing.timeline import Interval

__all__ = ["Interval", "StepTime", "step_time", "timeline", "why_unknown"]
