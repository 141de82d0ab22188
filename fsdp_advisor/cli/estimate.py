"""`estimate`: what the job takes under every strategy. Only what is needed is imported: JSON needs no rich."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from fsdp_advisor.cli.output import FITS, NONE_FITS, Destination, Format, as_json, form_of, note
from fsdp_advisor.job.request import EstimateRequest

if TYPE_CHECKING:
    from fsdp_advisor.report import Report
    from fsdp_advisor.validation.records import Record


def estimate(
    request: EstimateRequest,
    *,
    format: Format = Format.text,
    json: bool = False,
    explain: str | None = None,
    validate: bool = False,
    output: Path | None = None,
    force: bool = False,
    quiet: bool = False,
) -> int:
    """Answer, and write the answer; the exit status."""
    from fsdp_advisor.estimator import estimate as answer

    destination = Destination(path=output, force=force)
    form = form_of(format, json)
    destination.check()

    def asked() -> Report:
        return answer(request, explain=explain is not None)

    records = None
    if validate:
        from fsdp_advisor.cli.beside import apart, run_beside

        report = apart(asked)
    else:
        report = asked()
    for remark in report.notes:
        note(remark, quiet=quiet)
    if validate:
        records = run_beside(report, quiet=quiet)
    destination.write(_render(report, form, explain, destination, records))
    return FITS if report.any_fits else NONE_FITS


def _render(
    report: Report, form: Format, explain: str | None, destination: Destination, records: list[Record] | None
) -> str:
    from fsdp_advisor.cli.selection import select

    chosen = select(report, explain) if explain is not None else None
    if form is Format.json:
        document = report.as_dict(timeline=chosen is not None)
        if records is not None:
            from fsdp_advisor.cli.beside import into_json

            into_json(document, records)
        return as_json(document)
    beside = ""
    if records is not None:
        from fsdp_advisor.cli.beside import as_lines

        beside = "\n".join(["", *as_lines(report, records)])
    from fsdp_advisor.render.explanation import explanation_view
    from fsdp_advisor.render.view import report_view

    view = report_view(report)
    explained = None
    if chosen is not None:
        explained = explanation_view(view, view.rows[report.estimates.index(chosen)], chosen)
    if form is Format.markdown:
        from fsdp_advisor.render.markdown import markdown

        return markdown(view, explained) + (f"\n\n```{beside}\n```" if beside else "")
    from fsdp_advisor.render.text import text

    return text(view, destination.screen(), explained) + (f"\n{beside}" if beside else "")
