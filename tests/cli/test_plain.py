"""A command line that is read without typer means what typer reads in it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdp_advisor.cli import app
from fsdp_advisor.cli.estimate import estimate
from fsdp_advisor.cli.output import Format
from fsdp_advisor.cli.plain import FLAGS, VALUES, estimate_asked
from fsdp_advisor.job.request import EstimateRequest, dashed, fields_of

OPTIONS = [dashed(name) for name in fields_of(EstimateRequest)] + ["--per-device-train-batch-size", *VALUES]
TEXTS = [
    "4",
    "0",
    "-1",
    "",
    "zero3",
    "ZERO3",
    "gpt2",
    "bf16-mixed",
    "json",
    "JSON",
    "80GiB",
    "a=b",
    "--json",
    "out.json",
]

values = st.sampled_from(TEXTS)
names = st.sampled_from(OPTIONS).flatmap(
    lambda name: st.sampled_from([name, name.replace("-", "_").replace("__", "--")])
)
words = st.one_of(
    st.tuples(names, values).map(list),
    st.tuples(names, values).map(lambda pair: [f"{pair[0]}={pair[1]}"]),
    st.sampled_from([*FLAGS, "--reserved", "--help", "--unknown", "stray", "-x", "--json=1", "--"]).map(lambda w: [w]),
)


def read_by_typer(arguments: list[str]) -> tuple[EstimateRequest, dict[str, Any]] | None:
    """What the command would be called with; None where typer refuses."""
    called: list[tuple[EstimateRequest, dict[str, Any]]] = []

    def note_it(request: EstimateRequest, **own: Any) -> int:
        called.append((request, own))
        return 0

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(app, "answer", note_it)
        try:
            app.run(arguments)
        except Exception:
            return None
    return called[0] if called else None


@given(st.lists(words, max_size=4).map(lambda parts: [word for part in parts for word in part]))
def test_what_is_read_plainly_is_what_typer_reads(options: list[str]) -> None:
    arguments = ["estimate", "--model", "gpt2", *options]
    plain = estimate_asked(arguments)
    if plain is None:
        return
    typers = read_by_typer(arguments)
    assert typers is not None
    request, own = plain
    assert request == typers[0] and request.given == typers[0].given
    assert {**(estimate.__kwdefaults__ or {}), **own} == typers[1]


@pytest.mark.parametrize(
    "arguments",
    [[], ["models"], ["estimate"], ["estimate", "--help"], ["estimate", "--model", "gpt2", "--validate"],
     ["estimate", "--model", "gpt2", "--gpus", "0"], ["estimate", "--model", "gpt2", "--gpsu", "4"],
     ["estimate", "--model", "gpt2", "--format", "xml"], ["estimate", "--model", "gpt2", "--gpus"]],
)  # fmt: skip
def test_everything_else_is_typers(arguments: list[str]) -> None:
    assert estimate_asked(arguments) is None


def test_the_usual_command_is_read_plainly() -> None:
    plain = estimate_asked(["estimate", "--model=gpt2", "--micro_batch_size", "4", "--reserved", "--format", "json"])
    assert plain is not None
    assert plain[0] == EstimateRequest(model="gpt2", micro_batch_size=4, reserved=True)
    assert plain[1] == {"format": Format.json}
