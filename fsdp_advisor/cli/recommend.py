"""`recommend`: which strategy to launch, and why."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from fsdp_advisor.cli.options import ConfigFileOptions, ReportOptions
from fsdp_advisor.cli.output import FITS, NONE_FITS, Destination, Format, as_json, note
from fsdp_advisor.cli.progress import search_shown
from fsdp_advisor.job.config_reading import check_nothing_missing
from fsdp_advisor.job.fields import Rule
from fsdp_advisor.job.search_request import RecommendRequest

if TYPE_CHECKING:
    from fsdp_advisor.advice import Advice


@dataclass(frozen=True, kw_only=True)
class RecommendOptions(ConfigFileOptions, ReportOptions):
    """Options of `recommend` apart from those of the job."""

    plot: Annotated[Path | None, Rule(about="also draw memory against speed as SVG", metavar="FILE")] = None


def recommend(request: RecommendRequest, options: RecommendOptions) -> int:
    """The fastest configuration that fits with the margin, how it was decided, and what to type to launch it.

    Options that are given are fixed, the others are searched. Exit status: 0 if something fits; 1 if nothing does (what would
    fit is shown) or if it is unknown (a bare parameter count); 2 for bad usage, an unknown model, an unreadable config or no
    network.
    """
    from fsdp_advisor.advice import recommend as answer

    form, destination = options.form, options.destination
    destination.check()
    drawing = Destination(path=options.plot, force=options.force)
    drawing.check()
    check_nothing_missing(request.configs)
    with search_shown(options.quiet):
        advice = answer(request)
    shown = () if form == "json" else advice.recommendation.warnings
    for remark in (*advice.report.notes, *advice.recommendation.notes):
        note(remark, quiet=options.quiet or remark in shown)
    destination.write(_render(advice, form, destination))
    if options.plot is not None:
        drawing.write(_plot(advice))
    return FITS if advice.recommendation.fits else NONE_FITS


def _render(advice: Advice, form: Format, destination: Destination) -> str:
    if form == "json":
        return as_json(advice.as_dict())
    from fsdp_advisor.cli.config_files import with_readings

    configs = advice.report.request.configs
    if form == "markdown":
        return with_readings(advice.to_markdown(), configs, markdown=True)
    from fsdp_advisor.render.advice_text import advice_text
    from fsdp_advisor.render.advice_view import advice_view

    screen = destination.screen()
    return with_readings(advice_text(advice_view(advice), screen), configs, screen.width)


def _plot(advice: Advice) -> str:
    """Memory against throughput of the winner, the runners-up and the frontier, as SVG."""
    from fsdp_advisor.render.advice_view import advice_view
    from fsdp_advisor.render.charts import frontier_points
    from fsdp_advisor.render.svg import frontier

    view = advice_view(advice)
    frontier_rows = view.found.frontier if view.found else ()
    rows = [*([view.winner] if view.winner else []), *frontier_rows, *view.runners_up]
    return frontier(frontier_points(rows), capacity_bytes=view.gpu_memory_bytes, unit=view.throughput_unit)
