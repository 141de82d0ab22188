"""A recommendation as a document: the plan, the path to it, the alternatives, and the commands that launch it."""

from __future__ import annotations

from collections.abc import Sequence

from fsdp_advisor.render.advice_text import RULES_TITLE, RUNNERS_UP, columns, outcome, rule_text, runners_up_text
from fsdp_advisor.render.advice_view import AdviceView, cache_note
from fsdp_advisor.render.document import Block, Code, Heading, Items, Paragraph, Table
from fsdp_advisor.render.terminal import Column


def advice_blocks(view: AdviceView) -> list[Block]:
    """The whole answer."""
    found = view.found
    blocks: list[Block] = [Paragraph(view.job), Heading(view.heading)]
    blocks += [Paragraph(line) for line in (view.figures, view.why_not_simpler, view.training) if line]
    blocks += [Paragraph(f"Warning: {warning}") for warning in view.warnings]
    blocks += [Paragraph(view.not_modelled)] if view.not_modelled else []
    if view.remedies:
        blocks.append(Items(tuple(f"{remedy.reason}: {remedy.command}" for remedy in view.remedies)))
    if view.methods:
        blocks += [Heading("Full fine-tuning, LoRA or QLoRA?"), Items(view.methods)]
    blocks += [Heading("How it was decided"), Items(_path(view), nested=True)]
    if found is not None and found.rows:
        blocks += [
            Heading(f"Found ({found.title}): {found.answer}"),
            _table(columns(found.listed, view, what=found.what)),
        ]
        blocks += [Paragraph(line) for line in (cache_note(found.listed), found.left_out) if line]
    elif view.runners_up:
        shown = view.runners_up[:RUNNERS_UP]
        blocks += [Heading("Runners-up"), _table(columns(shown, view, reasons=True))]
        blocks += [Paragraph(line) for line in (cache_note(shown), runners_up_text(view)) if line]
    if view.savings:
        blocks += [Heading(view.savings_title), Items(view.savings)]
    if view.rules:
        blocks += [Heading(RULES_TITLE), Items(tuple(map(rule_text, view.rules)))]
    if view.launch_commands:
        blocks += [Heading(view.launch_title), Code("\n".join(view.launch_commands), "sh")]
    return blocks


def _path(view: AdviceView) -> tuple[str, ...]:
    """The questions on the path, each with the answer that leads to the next, and the outcome."""
    questions = [f"{node.question} {node.because}" for node in view.path]
    return (questions[0], *(f"{n.on}: {q}" for n, q in zip(view.path[1:], questions[1:], strict=True)), outcome(view))


def _table(shown: Sequence[Column]) -> Table:
    rows = [[str(cell) for cell in row] for row in zip(*(c.cells for c in shown), strict=True)]
    return Table([c.header for c in shown], rows, [c.right for c in shown])
