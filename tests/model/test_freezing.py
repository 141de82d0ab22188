"""Patterns of `--freeze` against the names of a model's parameters."""

from __future__ import annotations

import pytest

from fsdp_advisor.errors import UsageError
from fsdp_advisor.job.adaptation import Adaptation
from fsdp_advisor.model import resolved
from fsdp_advisor.model.freezing import parameter_names
from fsdp_advisor.model.resolve import resolve


def test_a_pattern_without_parameters_is_refused_before_anything_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(resolved, "recorder_for")
    with pytest.raises(UsageError, match=r"no parameter that matches 'transformer.h.12'") as error:
        resolve("gpt2").adapted(Adaptation(freeze=("transformer.h.11", "transformer.h.12")))
    assert "transformer.h, transformer.ln_f, transformer.wpe, transformer.wte" in str(error.value.hint)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["gpt2", "google-t5/t5-small"])
def test_names_are_those_of_transformers(model: str) -> None:
    torch = pytest.importorskip("torch")
    from fsdp_advisor.recording.transformers_models import TransformersSource

    profile = resolve(model).profile
    assert profile is not None
    built = TransformersSource(profile.config, name=model, task=profile.task).build(torch.float32)
    assert sorted(parameter_names(profile)) == sorted(name for name, _ in built.named_parameters())
