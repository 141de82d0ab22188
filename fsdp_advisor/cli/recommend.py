"""`recommend`: which strategy to launch, and why."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from fsdp_advisor.cli.options import (
    ForceOption,
    FormatOption,
    JsonOption,
    OutputOption,
    QuietOption,
    takes_request,
)
from fsdp_advisor.cli.output import FITS, NONE_FITS, Destination, Format, as_json, form_of, note
from fsdp_advisor.job.request import RecommendRequest

if TYPE_CHECKING:
    from fsdp_advisor.advice import Advice


def register(app: typer.Typer) -> None:
    """Add `recommend` to the program."""
    app.command()(recommend)


@takes_request
def recommend(
    request: RecommendRequest,
    *,
    format: FormatOption = Format.text,
    json: JsonOption = False,
    plot: Annotated[
        Optional[Path],  # noqa: UP045  # typer reads this while the module runs
        typer.Option(metavar="FILE", help="Also draw memory against speed, as SVG."),
    ] = None,
    output: OutputOption = None,
    force: ForceOption = False,
    quiet: QuietOption = False,
) -> int:
    """The fastest configuration that fits with the margin, how it was decided, and what to type to launch it.

    Options that are given are fixed, the others are searched. Exit status: 0 if something fits; 1 if nothing does (what would
    fit is shown) or if it is unknown (a bare parameter count); 2 for bad usage, an unknown model, an unreadable config or no
    network.
    """
    from fsdp_advisor.advice import recommend as answer

    form = form_of(format, json)
    destination, drawing = Destination(path=output, force=force), Destination(path=plot, force=force)
    destination.check()
    drawing.check()
    advice = answer(request)
    shown = () if form is Format.json else advice.recommendation.warnings
    for remark in (*advice.report.notes, *advice.recommendation.notes):
        note(remark, quiet=quiet or remark in shown)
    destination.write(_render(advice, form, destination))
    if plot is not None:
        drawing.write(_plot(advice))
    return FITS if advice.recommendation.fits else NONE_FITS


def _render(advice: Advice, form: Format, destination: Destination) -> str:
    if form is Format.json:
        return as_json(advice.as_dict())
    from fsdp_advisor.render.advice_text import advice_text
    from fsdp_advisor.render.advice_view import advice_view
    from fsdp_advisor.render.terminal import Screen

    view = advice_view(advice)
    if form is Format.markdown:
        return f"```text\n{advice_text(view, Screen())}\n```"
    return advice_text(view, destination.screen())


def _plot(advice: Advice) -> str:
    """Memory against throughput of the winner, the runners-up and the frontier, as SVG."""
    from fsdp_advisor.render.advice_view import advice_view
    from fsdp_advisor.render.charts import frontier_points
    from fsdp_advisor.render.svg import frontier

    view = advice_view(advice)
    frontier_rows = view.found.frontier if view.found else ()
    rows = [*([view.winner] if view.winner else []), *frontier_rows, *view.runners_up]
    return frontier(frontier_points(rows), capacity_bytes=view.gpu_memory_bytes)
