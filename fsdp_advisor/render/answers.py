"""A report, a recommendation or a diagnosis as text, Markdown or HTML: what `print(answer)` and a notebook show."""

from __future__ import annotations

from html import escape

from fsdp_advisor.advice import Advice
from fsdp_advisor.diagnosis.facts import Diagnosis
from fsdp_advisor.render.document import Block, to_html, to_markdown
from fsdp_advisor.render.markdown import report_blocks
from fsdp_advisor.render.view import report_view
from fsdp_advisor.report import Printable, Report


def as_text(answer: Printable) -> str:
    """The command line's text."""
    from fsdp_advisor.render.terminal import Screen

    if isinstance(answer, Advice):
        from fsdp_advisor.render.advice_text import advice_text
        from fsdp_advisor.render.advice_view import advice_view

        return advice_text(advice_view(answer), Screen())
    if isinstance(answer, Diagnosis):
        from fsdp_advisor.render.diagnosis_text import diagnosis_text

        return diagnosis_text(answer, Screen())
    from fsdp_advisor.render.text import text

    return text(report_view(_report(answer)), Screen())


def as_markdown(answer: Printable) -> str:
    """The text of `--format markdown`."""
    if isinstance(answer, Diagnosis):
        return f"```text\n{as_text(answer)}\n```"
    return to_markdown(_blocks(answer))


def as_html(answer: Printable) -> str:
    """An HTML fragment with the same tables."""
    if isinstance(answer, Diagnosis):
        return f"<pre>{escape(as_text(answer))}</pre>"
    return to_html(_blocks(answer))


def _blocks(answer: Printable) -> list[Block]:
    if isinstance(answer, Advice):
        from fsdp_advisor.render.advice_document import advice_blocks
        from fsdp_advisor.render.advice_view import advice_view

        return advice_blocks(advice_view(answer))
    return report_blocks(report_view(_report(answer)))


def _report(answer: Printable) -> Report:
    assert isinstance(answer, Report)
    return answer
