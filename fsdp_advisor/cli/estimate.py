"""`fsdp-advisor estimate`. It imports only what the chosen format needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from fsdp_advisor.cli.options import ConfigFileOptions, ReportOptions
from fsdp_advisor.cli.output import FITS, NONE_FITS, Destination, Format, as_json, note
from fsdp_advisor.job.config_reading import check_nothing_missing
from fsdp_advisor.job.fields import Rule
from fsdp_advisor.job.request import EstimateRequest

if TYPE_CHECKING:
    from fsdp_advisor.report import Report
    from fsdp_advisor.validation.records import Record


@dataclass(frozen=True, kw_only=True)
class EstimateOptions(ConfigFileOptions, ReportOptions):
    """Options of `estimate` apart from those of the job."""

    explain: Annotated[
        str | None,
        Rule(
            about="show what is alive at the peak of this row, and its timeline: zero3, zero3+optimizer, zero3+parameters",
            metavar="ROW",
        ),
    ] = None
    validate: Annotated[
        bool, Rule(about="also run each strategy with the most realistic check that this machine supports")
    ] = False


def estimate(request: EstimateRequest, options: EstimateOptions) -> int:
    """Peak memory per GPU, host memory, speed and fit of a job under one strategy or under all of them.

    Exit status: 0 if at least one strategy that is shown fits; 1 if none fits, or if that is unknown (a bare parameter
    count); 2 for bad usage, an unknown model, an unreadable config or no network.
    """
    from fsdp_advisor.estimator import estimate as answer

    explain, quiet = options.explain, options.quiet
    form, destination = options.form, options.destination
    destination.check()
    check_nothing_missing(request.configs)

    def asked() -> Report:
        return answer(request, explain=explain is not None)

    records = None
    if options.validate:
        from fsdp_advisor.cli.measured import estimate_in_subprocess, run_validation

        report = estimate_in_subprocess(asked)
    else:
        report = asked()
    for remark in report.notes:
        note(remark, quiet=quiet)
    if options.validate:
        records = run_validation(report, quiet=quiet)
    destination.write(render(report, form, explain, destination, records))
    return FITS if report.any_fits else NONE_FITS


def render(
    report: Report, form: Format, explain: str | None, destination: Destination, records: list[Record] | None
) -> str:
    """The answer in this form, with the explanation of one row and the measured records if they are asked for."""
    from fsdp_advisor.cli.selection import select

    chosen = select(report, explain) if explain is not None else None
    if form == "json":
        document = report.as_dict(timeline=chosen is not None)
        if records is not None:
            from fsdp_advisor.cli.measured import add_to_json

            add_to_json(document, records)
        return as_json(document)
    comparison = ""
    if records is not None:
        from fsdp_advisor.cli.measured import comparison_lines

        comparison = "\n".join(["", *comparison_lines(report, records)])
    from fsdp_advisor.cli.config_files import with_readings
    from fsdp_advisor.render.view import report_view

    view = report_view(report)
    explained = None
    if chosen is not None:
        from fsdp_advisor.render.explanation import explanation_view

        explained = explanation_view(view, view.rows[report.estimates.index(chosen)], chosen)
    if form == "markdown":
        from fsdp_advisor.render.markdown import markdown

        answer = markdown(view, explained) + (f"\n\n```{comparison}\n```" if comparison else "")
        return with_readings(answer, report.request.configs, markdown=True)
    from fsdp_advisor.render.text import text

    answer = text(view, destination.screen(), explained) + (f"\n{comparison}" if comparison else "")
    return with_readings(answer, report.request.configs, destination.screen().width)
