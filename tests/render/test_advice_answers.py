"""A recommendation on a screen and in Markdown."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from fsdp_advisor import recommend
from fsdp_advisor.render.answers import as_markdown, as_text
from fsdp_advisor.render.terminal import Column, Screen, draw, fitting


@pytest.mark.parametrize("shown", [as_text, as_markdown])
def test_a_recommendation_says_what_its_figures_lack(shown: Callable[..., str]) -> None:
    advice = recommend(model="openai-community/gpt2", gpus=2, gpu="24GiB", framework="trainer", seq_len=512)
    assert "Not modelled: tensors that a data collator adds" in " ".join(shown(advice).split())


def test_reasons_are_wrapped_before_a_column_is_left_out() -> None:
    reason = "it is 2% faster, which is within the model's error, and less simple"
    columns = [Column("batch", ["2 x 1"], rank=5), Column("why not", [reason], rank=3, least=24)]
    shown = draw(fitting(columns, 40), Screen(width=40)).splitlines()
    assert shown[0].split() == ["batch", "why", "not"]
    assert len(shown) > 2 and all(len(line) <= 40 for line in shown)
