"""How a campaign's progress is shown."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from fsdp_advisor.cli.output import note

if TYPE_CHECKING:
    from fsdp_advisor.validation.campaign import Event


class Progress:
    """A bar with the time left on a terminal, a line per case elsewhere; standard error in both."""

    def __init__(self, quiet: bool) -> None:
        self._quiet = quiet
        self._bar: Any = None

    def __enter__(self) -> Progress:
        if not self._quiet and sys.stderr is not None and sys.stderr.isatty():
            from rich import progress
            from rich.console import Console

            columns = (
                progress.MofNCompleteColumn(),
                progress.BarColumn(),
                progress.TimeRemainingColumn(),
                progress.TextColumn("{task.description}"),
            )
            self._bar = progress.Progress(*columns, console=Console(stderr=True), transient=True)
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def show(self, event: Event) -> None:
        from fsdp_advisor.validation.report import main_figure, signed_percent

        said = "starting" if event.done < event.total else "nothing left to do"
        if (record := event.record) is not None:
            figure = main_figure(record)
            error = record.errors.get(figure) if figure else None
            said = f"{record.label}: {record.outcome}" + (f", {signed_percent(error)}" if error is not None else "")
            said += f" ({record.message})" if record.message and record.outcome not in ("ok", "oom") else ""
        if self._bar is None:
            note(f"{event.done}/{event.total} {said}", quiet=self._quiet)
        elif not self._bar.tasks:
            self._bar.add_task(said, total=event.total, completed=event.done)
        else:
            self._bar.update(self._bar.tasks[0].id, completed=event.done, description=said)
