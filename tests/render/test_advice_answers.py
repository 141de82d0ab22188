"""A recommendation on a screen and in Markdown."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from fsdp_advisor import recommend
from fsdp_advisor.render.answers import as_markdown, as_text


@pytest.mark.parametrize("shown", [as_text, as_markdown])
def test_a_recommendation_says_what_its_figures_lack(shown: Callable[..., str]) -> None:
    advice = recommend(model="openai-community/gpt2", gpus=2, gpu="24GiB", framework="trainer", seq_len=512)
    assert "Not modelled: tensors that a data collator adds" in " ".join(shown(advice).split())
