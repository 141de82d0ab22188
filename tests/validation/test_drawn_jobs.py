"""The kept peaks of drawn jobs (drawn_jobs.csv), and today's predictions of them."""

from __future__ import annotations

from pathlib import Path

import pytest
from adapter_peaks import read
from matrix import taken

pytest.importorskip("torch")

from compared_peaks import predicted_peaks
from drawn_jobs import ALWAYS, CONFIGS, RESULTS, SOMETIMES, case_of
from small_models import options_of

from fsdp_advisor.errors import UsageError
from fsdp_advisor.job.parsing import make_request

pytestmark = pytest.mark.slow

KEPT = read(RESULTS)
"""By name of the job."""
ONCE_WRONG = [
    "mixtral gpus=2 strategy=hsdp framework=torch precision=fp16-mixed micro_batch_size=1 seq_len=128 gradient_accumulation_steps=2",
    "qwen3_moe gpus=2 strategy=hsdp framework=torch precision=bf16-mixed micro_batch_size=1 seq_len=64 gradient_accumulation_steps=3",
    "qwen3 gpus=2 strategy=zero3 framework=trainer precision=bf16-mixed micro_batch_size=2 seq_len=1000 gradient_accumulation_steps=2 "
    "activation_checkpointing=full use_liger_kernel=true attention=flash_attention_2",
]
"""Jobs whose predictions differed when they were drawn."""
SAMPLE = [*ONCE_WRONG, *list(KEPT)[:: max(1, len(KEPT) // 12)]]


def test_kept_peaks_are_of_many_models_and_frameworks_and_agree() -> None:
    cases = [case_of(name) for name in KEPT]
    assert len(cases) >= 100
    assert len({case["model"] for case in cases}) >= 15
    assert {"torch", "accelerate", "trainer", "trl", "torchtitan"} <= {case["framework"] for case in cases}
    assert sum("use_peft" in case for case in cases) >= 10
    assert all(line.agrees(case_of(name)["framework"]) for name, line in KEPT.items())


@pytest.mark.parametrize("name", taken(SAMPLE, [name for name in KEPT if name not in SAMPLE], days=7))
def test_predictions_equal_the_kept_ones(name: str, tmp_path: Path) -> None:
    assert predicted_peaks(make_request(options_of(CONFIGS, case_of(name), tmp_path))) == KEPT[name].predicted


def test_a_job_that_the_estimate_refuses_is_not_compared(tmp_path: Path) -> None:
    """The gathered halves of these packed weights would have other bytes than the estimate, which refuses the job, counts."""
    case = {
        "model": "opt", "gpus": "2", "strategy": "zero3", "use_peft": "true", "load_in_4bit": "true",
        "bnb_4bit_quant_storage": "float32",
    }  # fmt: skip
    with pytest.raises(UsageError, match="destroys their values"):
        predicted_peaks(make_request(options_of(CONFIGS, case, tmp_path)))


@pytest.mark.parametrize(
    ("option", "value"),
    [(name, each) for name, values in {**ALWAYS, **SOMETIMES}.items() for each in sorted(set(values))],
)
def test_a_drawn_value_is_one_of_its_option(option: str, value: str, tmp_path: Path) -> None:
    make_request(options_of(CONFIGS, {"model": "llama", "gpus": "2", "strategy": "hsdp", option: value}, tmp_path))
