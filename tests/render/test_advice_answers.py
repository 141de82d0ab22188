"""A recommendation on a screen and in Markdown."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from fsdp_advisor import recommend
from fsdp_advisor.render.advice_text import advice_text
from fsdp_advisor.render.advice_view import advice_view
from fsdp_advisor.render.answers import as_markdown, as_text
from fsdp_advisor.render.terminal import Column, Screen, draw, fitting
from fsdp_advisor.units import format_gib


@pytest.mark.parametrize("shown", [as_text, as_markdown])
def test_a_recommendation_says_what_its_figures_lack(shown: Callable[..., str]) -> None:
    advice = recommend(model="openai-community/gpt2", gpus=2, gpu="24GiB", framework="trainer", seq_len=512)
    assert "Not modelled: tensors that a data collator adds" in " ".join(shown(advice).split())


@pytest.mark.parametrize("shown", [as_text, as_markdown])
def test_plans_that_need_more_than_is_available_say_that_it_is_cache(shown: Callable[..., str]) -> None:
    advice = recommend(model="Qwen/Qwen3-8B", gpus=4, gpu="H100")
    first = advice.recommendation.runners_up[0].candidate
    assert first.runs_in_available and first.needed_bytes is not None and first.needed_bytes > first.available_bytes
    text = " ".join(shown(advice).split())
    needed, available = (format_gib(size) for size in (first.needed_bytes, first.available_bytes))
    assert f" {needed.removesuffix(' GiB')}* " in text
    assert f"* with the allocator's cache; {available} are enough with less cache." in text
    assert f"A plan fits if it runs in {available} of 79.19 GiB; the allocator's cache may use the other 8 %." in text
    rule = next(rule for rule in advice.recommendation.rules if rule.strategy == "zero2")
    assert rule.would_run and "GiB, the allocator's cache included" in rule.because


def test_tables_without_such_plans_mention_no_cache() -> None:
    advice = recommend(model="openai-community/gpt2", gpus=2, gpu="H100", micro_batch_size=1, seq_len=512)
    assert not any(other.candidate.runs_in_available for other in advice.recommendation.runners_up)
    assert "enough with less cache" not in as_text(advice)


def test_without_a_training_script_the_commands_export_one_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """As for batches with images. An export into a folder, which needs a training script, is refused for them."""
    advice = recommend(model="openai-community/gpt2", gpus=2, gpu="H100", strategy="zero3")
    exported, _ = advice_view(advice).launch_commands
    assert exported.endswith("-o run/")
    monkeypatch.setattr("fsdp_advisor.render.advice_view.script_limit", lambda target, job: "without images")
    exported, start = advice_view(advice).launch_commands
    assert exported.endswith("-o train.py") and "train.py" in start


@pytest.mark.parametrize("columns", [50, 120])
def test_a_narrow_screen_has_the_reasons_too(columns: int) -> None:
    advice = recommend(model="openai-community/gpt2", gpus=2, gpu="H100")
    shown = advice_text(advice_view(advice), Screen(width=columns))
    reasons = [other.why_not for other in advice.recommendation.runners_up]
    assert any("compared without autocast" in reason for reason in reasons)
    table = shown.partition("Runners-up")[2].partition("\n\n")[0]
    assert max(map(len, table.splitlines())) <= columns
    if columns == 50:
        assert all(reason in " ".join(shown.split()) for reason in reasons)
        names = [
            f"{other.candidate.label}, {other.candidate.plan.micro_batch_size} x"
            for other in advice.recommendation.runners_up
        ]
        assert all(name in " ".join(shown.split()) for name in names) and len({*names}) == len(names)


def test_reasons_are_wrapped_before_a_column_is_left_out() -> None:
    reason = "it is 2% faster, which is within the model's error, and less simple"
    columns = [Column("batch", ["2 x 1"], rank=5), Column("why not", [reason], rank=3, least=24)]
    shown = draw(fitting(columns, 40), Screen(width=40)).splitlines()
    assert shown[0].split() == ["batch", "why", "not"]
    assert len(shown) > 2 and all(len(line) <= 40 for line in shown)


@pytest.mark.parametrize(("checkpointing", "said"), [("none", 1), ("full", 0)])
def test_qlora_that_needs_more_than_lora_says_which_tensors_grow(checkpointing: str, said: int) -> None:
    advice = recommend(
        model="meta-llama/Llama-3.2-1B", gpus=1, gpu="H100", method="any", strategy="ddp", micro_batch_size=2,
        activation_checkpointing=checkpointing,
    )  # fmt: skip
    _, _, _, chosen, *why, other = advice_view(advice).methods
    assert chosen == advice.recommendation.why_method is not None
    assert chosen.startswith("full fine-tuning is recommended: LoRA ")
    assert "give --use-peft, or the same with --load-in-4bit, instead of --method any" in other
    assert len(why) == said
    assert all("activations" in line and "hidden states between layers are in fp32" in line for line in why)
