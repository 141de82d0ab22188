"""`fsdp-advisor check`: one line and an exit status, for launch scripts and CI jobs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fsdp_advisor.cli.options import ConfigFileOptions
from fsdp_advisor.cli.output import FITS, NONE_FITS, Destination, as_json, note
from fsdp_advisor.job.fields import Rule
from fsdp_advisor.job.request import EstimateRequest


@dataclass(frozen=True, kw_only=True)
class CheckOptions(ConfigFileOptions):
    """Options of `check` apart from those of the job."""

    json: Annotated[bool, Rule(about="write JSON")] = False


def check(request: EstimateRequest, options: CheckOptions) -> int:
    """Whether a job fits, in one line. Notes on what is assumed and left out are on standard error.

    The job is the one of the files and options; if they leave the strategy open, its best row is checked. Exit status: 0 if it
    fits; 1 if it does not or that is unknown; 2 for bad usage, an unknown model, or a file that cannot be read.
    """
    from fsdp_advisor.estimator import estimate
    from fsdp_advisor.render.check_line import check_result

    found = check_result(estimate(request))
    for remark in (*found["notes"], *(f"assumed: {item}" for item in found["assumed"])):
        note(remark)
    Destination().write(as_json(found) if options.json else found["line"])
    return FITS if found["fits"] else NONE_FITS
