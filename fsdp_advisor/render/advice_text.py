"""A recommendation as text: what to launch, how it was decided, the runners-up."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from fsdp_advisor.advice.decision_tree import NO, UNKNOWN, YES
from fsdp_advisor.advice.rules_of_thumb import RuleOfThumb
from fsdp_advisor.export.launch import torchtitan_line
from fsdp_advisor.render.advice_view import CACHE_MARK, AdviceView, CandidateView, FindView, cache_note
from fsdp_advisor.render.parts import ACTIVATIONS, STATES
from fsdp_advisor.render.terminal import Column, Screen, bar, draw, fitting, legend, paint
from fsdp_advisor.render.terminal import wrap as fill

RUNNERS_UP = 5
RULES_TITLE = "By parameter count, introductions to FSDP would choose"
BAR_WIDTHS = (10, 60)
FRONTIER_BAR_WIDTH = 24
_UNITS = ("GiB", "tokens/s", "images/s", "%")
BARE = (YES, NO, UNKNOWN)
WHY_NOT = "why not"
_STEP = 3
"""Characters by which each level of the tree is indented, if the screen is wide enough."""
_LEAST_REASON = 24
"""Characters to which the reasons in a table are narrowed before a column is left out."""
_LEAST_WIDTH = 36
"""Characters that the deepest level of the tree keeps for its text."""


def wrap(paragraph: str, screen: Screen, *, first: str = "", indent: str = "") -> str:
    """A paragraph in which a number and its unit stay together."""
    for unit in _UNITS:
        paragraph = paragraph.replace(f" {unit}", f"\0{unit}")
    return fill(paragraph, screen, first=first, indent=indent).replace("\0", " ")


def advice_text(view: AdviceView, screen: Screen) -> str:
    """The whole answer, without a final newline."""
    found = view.found
    blocks = [
        wrap(view.job, screen),
        _winner(view, screen) if view.winner else _nothing(view, screen),
        *([_methods(view, screen)] if view.methods else []),
        "How it was decided\n" + _tree(view, screen),
        *([_found(found, view, screen)] if found and found.rows else []),
        *([_runners_up(view, screen)] if view.runners_up and not found else []),
        *([_savings(view, screen)] if view.savings else []),
        *([_rules(view, screen)] if view.rules else []),
        *([_launch(view, screen)] if view.winner else []),
    ]
    return "\n\n".join(blocks)


def _winner(view: AdviceView, screen: Screen) -> str:
    assert view.winner is not None
    style = "bold green" if view.winner.peak_known else "bold yellow"
    narrow, wide = BAR_WIDTHS
    drawn = bar(view.parts, view.gpu_memory_bytes, max(narrow, min(wide, screen.width - 2)), screen)
    warnings = (f"warning: {warning}" for warning in view.warnings)
    lines = [view.why_not_simpler, view.training, *warnings, view.not_modelled]
    return "\n".join(
        [
            paint(Text(wrap(view.heading, screen), style=style), screen),
            wrap(view.figures, screen, first="  ", indent="  "),
            paint(Text("  ") + drawn, screen),
            legend([part for part, n_bytes in view.parts if n_bytes], screen),
            *(wrap(line, screen, first="  ", indent="  ") for line in lines if line),
        ]
    )


def _nothing(view: AdviceView, screen: Screen) -> str:
    lines = [paint(Text(view.heading, style="bold red"), screen)]
    remedies = (f"{r.reason}: {r.command}" if r.command else r.reason for r in view.remedies)
    lines += [wrap(remedy, screen, first="  ", indent="    ") for remedy in remedies]
    return "\n".join(lines)


def _methods(view: AdviceView, screen: Screen) -> str:
    lines = [wrap(method, screen, first="  ", indent="    ") for method in view.methods]
    return "\n".join(["Full fine-tuning, LoRA or QLoRA?", *lines])


def _tree(view: AdviceView, screen: Screen) -> str:
    """The path through the decision tree. Each question stands below the answer that leads to it, and is indented further."""
    elbow = "└─ " if screen.unicode else "`- "
    step = max(1, min(_STEP, (screen.width - _LEAST_WIDTH) // max(len(view.path), 1)))
    lines = []
    for depth, node in enumerate(view.path):
        indent = " " * step * max(depth - 1, 0)
        question = f"{node.on}: {node.question}" if depth else node.question
        lines.append(
            wrap(
                f"{question} {node.because}",
                screen,
                first=indent + (elbow if depth else ""),
                indent=indent + ("   " if depth else "  "),
            )
        )
    indent = " " * step * (len(view.path) - 1)
    lines.append(wrap(outcome(view), screen, first=indent + elbow, indent=indent + "   "))
    return "\n".join(lines)


def outcome(view: AdviceView) -> str:
    """The answer to the last question of the decision tree. If the answer is only yes or no, the consequence is added, such as the
    recommended plan.
    """
    answer = view.path[-1].answer or ""
    if answer not in BARE:
        return answer
    if view.winner is not None:
        return f"{answer}: {view.winner.label}"
    return f"{answer}: with one of the changes above" if answer == YES else "no change is known that makes it fit"


def _runners_up(view: AdviceView, screen: Screen) -> str:
    table = _table(view.runners_up[:RUNNERS_UP], view, screen, reasons=True)
    return f"Runners-up\n{table}\n" + wrap(f"{runners_up_text(view)} --json lists them.", screen)


def _savings(view: AdviceView, screen: Screen) -> str:
    lines = [wrap(saving, screen, first="  ", indent="    ") for saving in view.savings]
    return "\n".join([view.savings_title, *lines])


def runners_up_text(view: AdviceView) -> str:
    """The sentence that counts other configurations: more that fit, those that are rejected, and all that were evaluated."""
    more, rejected = len(view.runners_up[RUNNERS_UP:]), len(view.rejected)
    counts = [
        *([f"{more} more {'fit' if view.fits else 'may fit'}"] if more else []),
        *([f"{rejected} others do not fit or cannot be faster"] if rejected else []),
        f"{view.configurations:,} configurations were evaluated",
    ]
    return f"{'; '.join(counts)}."


def _found(found: FindView, view: AdviceView, screen: Screen) -> str:
    """The answer to `--find`, a row per alternative, and memory against throughput."""
    table = _table(found.listed, view, screen, what=found.what)
    blocks = [wrap(f"Found ({found.title}): {found.answer}", screen) + "\n" + table]
    if found.left_out:
        blocks.append(wrap(found.left_out, screen))
    if len(found.frontier) > 1:
        blocks.append("Memory against throughput\n" + _frontier(found.frontier, view, screen))
    return "\n\n".join(blocks)


def _table(
    rows: Sequence[CandidateView], view: AdviceView, screen: Screen, *, what: str = "", reasons: bool = False
) -> str:
    """A table of configurations. Reasons for which there is no room follow as sentences."""
    shown = fitting(columns(rows, view, what=what, reasons=reasons), screen.width)
    lines = [draw(shown, screen)]
    if reasons and not any(column.header == WHY_NOT for column in shown):
        lines += (wrap(f"{row.label}, {row.batch}: {row.why_not}", screen, indent="  ") for row in rows)
    if note := cache_note(rows):
        lines.append(wrap(note, screen))
    return "\n".join(lines)


def columns(rows: Sequence[CandidateView], view: AdviceView, *, what: str = "", reasons: bool = False) -> list[Column]:
    """The columns of a table of configurations. `what`: the quantity that a sweep varies. `reasons`: whether a column says why each
    configuration was not chosen.
    """
    found = [
        Column("strategy", [row.strategy for row in rows]),
        Column("backend", [row.plan.backend for row in rows]),
        Column("checkpointing", [row.checkpointing for row in rows], rank=4),
        Column("batch x acc.", [row.batch for row in rows], right=True, rank=5),
    ]
    needed = _aligned([row.needed_text for row in rows])
    if any(row.peak_known for row in rows):
        found.append(Column("needs GiB", needed, right=True))
        found.append(Column(view.throughput_unit, [row.throughput_text for row in rows], right=True))
    else:
        found.append(Column("states GiB", needed, right=True))
    if what == "sequence":
        found.insert(0, Column("tokens", [str(row.plan.seq_len) for row in rows], right=True))
    elif what == "gpus":
        found.insert(0, Column("GPUs", [str(row.plan.world_size) for row in rows], right=True))
    elif what == "gpu-type":
        found.insert(0, Column("GPU", [row.gpu for row in rows]))
        found.append(Column("has", [row.available_text for row in rows], right=True, rank=6))
    if what in ("gpus", "gpu-type") and view.training:
        found.append(Column("time", [row.time_text for row in rows], right=True, rank=3))
        found.append(Column("GPU hours", [row.gpu_hours_text for row in rows], right=True))
    if what and any(row.fits_text != "fits" for row in rows):
        found.append(Column("", [_fits(row) for row in rows]))
    if reasons:
        found.append(Column(WHY_NOT, [row.why_not for row in rows], rank=3, least=_LEAST_REASON))
    return found


def _aligned(needed: Sequence[str]) -> list[str]:
    """Texts of sizes whose digits stay aligned although some have a mark after them."""
    marks = any(text.endswith(CACHE_MARK) for text in needed)
    return [f"{text} " if marks and not text.endswith(CACHE_MARK) else text for text in needed]


def _fits(row: CandidateView) -> Text:
    return Text(row.fits_text, style="red" if row.fits is False else "green")


def _frontier(points: Sequence[CandidateView], view: AdviceView, screen: Screen) -> str:
    """A row per point: its memory and its throughput as bars."""
    fastest = max(point.throughput or 0.0 for point in points) or 1.0
    memory = [bar([(STATES, p.needed_bytes)], view.gpu_memory_bytes, FRONTIER_BAR_WIDTH, screen) for p in points]
    rates = [
        bar([(ACTIVATIONS, round(1000 * (p.throughput or 0.0) / fastest))], 1000, FRONTIER_BAR_WIDTH, screen)
        for p in points
    ]
    columns = [
        Column("needs GiB", _aligned([p.needed_text for p in points]), right=True),
        Column("", memory, rank=2),
        Column(view.throughput_unit, [p.throughput_text for p in points], right=True),
        Column("", rates, rank=1),
        Column("configuration", [f"{p.label}, {p.plan.micro_batch_size} x {p.plan.seq_len}" for p in points]),
    ]
    return draw(fitting(columns, screen.width), screen)


def _rules(view: AdviceView, screen: Screen) -> str:
    """The choices of the rules of thumb, and whether they would run."""
    return "\n".join([RULES_TITLE, *(wrap(rule_text(rule), screen, first="  ", indent="    ") for rule in view.rules)])


def rule_text(rule: RuleOfThumb) -> str:
    """One rule of thumb in a line."""
    runs = {True: "which runs", False: "which does not run", None: "which may run"}[rule.would_run]
    choice = f"{rule.says}, {runs}" if rule.says else "nothing"
    return f"{rule.source}: {choice}: {rule.because}"


_TILING_TARGETS = (
    ": fsdp2 and ddp write a script of plain PyTorch with Liger's tiled MLP, and axolotl (--framework axolotl) has its own; "
    "with another framework or engine, tile the networks in a script of your own"
)


def _launch(view: AdviceView, screen: Screen) -> str:
    """The commands, each on one line, so that they can be copied."""
    if not view.launch_commands and view.winner is not None and view.winner.plan.facts.own_models:
        plan = view.winner.plan
        why = (
            "No export target supports this plan: torchtitan's configuration is a function in Python. Start your own, CONFIG of MODULE, "
            f"with activation checkpointing {plan.activation_checkpointing}:"
        )
        return f"{wrap(why, screen)}\n  {torchtitan_line(plan)}"
    if not view.launch_commands:
        tiles = view.winner is not None and view.winner.plan.tiled_mlp != "none"
        return wrap(f"No export target supports this plan{_TILING_TARGETS if tiles else ''}.", screen)
    lines = [view.launch_title, *(f"  {command}" for command in view.launch_commands)]
    if view.other_targets:
        lines.append(wrap(f"Other targets: {', '.join(view.other_targets)}.", screen))
    return "\n".join(lines)
