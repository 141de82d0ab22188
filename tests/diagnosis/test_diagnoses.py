"""Diagnoses of PyTorch's own snapshots (make_snapshots.py)."""

from __future__ import annotations

import gzip
import pickle
from pathlib import Path
from typing import Any

import pytest
from matrix import in_turn

import fsdp_advisor
from fsdp_advisor.diagnosis import CATEGORIES, Diagnosis, diagnose_file, diagnose_text, job_of
from fsdp_advisor.diagnosis.facts import Moment
from fsdp_advisor.diagnosis.prediction import predicted
from fsdp_advisor.job.parsing import make_request

DATA = Path(__file__).parent / "data"
NAMES = sorted(path.name.removesuffix(".pickle.gz") for path in DATA.glob("*.pickle.gz"))
MIB = 2**20
LLAMA_PARAMETER_BYTES = 2 * (2 * 4000 * 256 + 3 * (4 * 256 * 256 + 3 * 256 * 688 + 2 * 256) + 256)
"""The small Llama's parameters in bf16: embedding and head, three layers, norms."""


def path_of(name: str) -> Path:
    return DATA / f"{name}.pickle.gz"


def diagnosed(name: str) -> Diagnosis:
    return diagnose_file(path_of(name))


def recorded(name: str) -> Any:
    return pickle.loads(gzip.decompress(path_of(name).read_bytes()))


def written(content: Any, folder: Path) -> Path:
    file = folder / "snapshot.pickle"
    file.write_bytes(pickle.dumps(content))
    return file


def events_of(content: Any) -> list[dict[str, Any]]:
    return max(content["device_traces"], key=len)


MOMENTS = {
    "steps": ("backward", None, 2),
    "gpt2": ("backward", None, 2),
    "checkpointing": ("backward", None, 2),
    "checkpointing_torch26": ("backward", None, 2),
    "loss_oom": ("loss", None, 1),
    "fsdp2_forward_oom": ("forward", 2, 1),
}


@pytest.mark.parametrize("name", NAMES)
def test_the_moment_is_the_error_or_the_peak(name: str) -> None:
    found = diagnosed(name)
    assert (found.moment.phase, found.moment.layer, found.moment.step) == MOMENTS[name]
    assert (found.out_of_memory is not None) == name.endswith("oom")


def test_the_error_equals_pytorchs_message() -> None:
    """The message was: Tried to allocate 64.00 MiB; 49.31 MiB free; 306.56 MiB allocated, 43.44 MiB unallocated.

    A trace has the bytes that were asked for, and a block may be up to 1 MiB larger.
    """
    error = diagnosed("loss_oom").out_of_memory
    assert error is not None and error.requested_bytes == 64 * MIB
    assert error.free_bytes == pytest.approx(49.31 * MIB, abs=0.01 * MIB)
    assert error.reserved_bytes == 350 * MIB
    assert error.allocated_bytes == pytest.approx(306.56 * MIB, abs=1 * MIB)


def test_the_peak_equals_pytorchs_figure() -> None:
    """`max_memory_allocated` of the run was 744,233,472 bytes; cuBLAS and small blocks included."""
    found = diagnosed("steps")
    tensors = sum(n for name, n in found.memory.items() if name != "fragmentation")
    assert tensors == pytest.approx(744_233_472, rel=0.01)


@pytest.mark.parametrize("name", NAMES)
def test_holdings_sum_to_the_categories(name: str) -> None:
    found = diagnosed(name)
    for category, n_bytes in found.memory.items():
        assert category in CATEGORIES
        if category not in ("fragmentation", "free", "outside"):
            assert sum(h.n_bytes for h in found.holdings if h.category == category) == n_bytes
    assert "unattributed" not in found.memory


@pytest.mark.parametrize("name", ["steps", "loss_oom"])
def test_parameters_and_optimizer_state_have_their_exact_size(name: str) -> None:
    memory = diagnosed(name).memory
    assert memory["parameters"] == pytest.approx(LLAMA_PARAMETER_BYTES, rel=1e-3)
    if name == "steps":
        assert memory["optimizer"] == pytest.approx(2 * LLAMA_PARAMETER_BYTES, rel=0.01)


def cut_at(name: str, event: int, folder: Path) -> Diagnosis:
    """The diagnosis if the allocation after `event` events had failed."""
    content = recorded(name)
    events = events_of(content)
    at = next(n for n in range(event, len(events)) if events[n]["action"] == "alloc")
    failed = {key: value for key, value in events[at].items() if key != "addr"}
    events.insert(at, failed | {"action": "oom", "device_free": 0})
    return diagnose_file(written(content, folder))


def moments_through(name: str, folder: Path, step: int = 25) -> list[tuple[str, int | None]]:
    total = len(events_of(recorded(name)))
    found = (cut_at(name, event, folder).moment for event in range(0, total - total // 10, total // step))
    return [(moment.phase, moment.layer) for moment in found]


@in_turn(1, of=2)
@pytest.mark.parametrize("name", ["steps", "checkpointing"])
def test_moments_follow_the_step(name: str, tmp_path: Path) -> None:
    """Cut at regular intervals: layers rise in forward, fall in backward, and the phases come in order."""
    moments = moments_through(name, tmp_path)
    phases = [phase for phase, _ in moments]
    assert {"loading", "forward", "backward", "optimizer"} <= set(phases)
    first_backward = phases.index("backward")
    forward = [layer for phase, layer in moments[:first_backward] if phase == "forward" and layer]
    backward = [layer for phase, layer in moments[first_backward : phases.index("optimizer")] if layer]
    assert forward == sorted(forward) and max(forward) == 3
    assert backward == sorted(backward, reverse=True) and min(backward) == 1


def test_gradients_are_found_in_backward_by_their_size(tmp_path: Path) -> None:
    content = recorded("steps")
    events = events_of(content)
    optimizer = next(n for n, e in enumerate(events) if any("torch/optim" in f["filename"] for f in e["frames"]))
    memory = cut_at("steps", optimizer - 30, tmp_path).memory
    assert memory["gradients"] == pytest.approx(LLAMA_PARAMETER_BYTES, rel=0.1)


def test_checkpointed_activations_are_small_and_named() -> None:
    memory, full = diagnosed("checkpointing").memory, diagnosed("steps").memory
    assert memory["activations"] < full["activations"] / 5


def test_snapshots_of_an_older_pytorch_are_attributed_in_the_same_way() -> None:
    """The same training with torch 2.6 and transformers 4.57 as with torch 2.13 and transformers 5.23."""
    old, new = diagnosed("checkpointing_torch26").memory, diagnosed("checkpointing").memory
    assert old.keys() == new.keys()
    for category, n_bytes in new.items():
        assert old[category] == pytest.approx(n_bytes, rel=0.01), category


def test_sharded_memory_is_attributed_to_fsdp() -> None:
    memory = diagnosed("fsdp2_forward_oom").memory
    assert memory["parameters"] == pytest.approx(2 * LLAMA_PARAMETER_BYTES / 4, rel=0.01), "fp32, over 4 ranks"
    assert memory["unsharded_parameters"] and memory["communication"]


GPT2 = {"model": "openai-community/gpt2", "gpus": 4, "gpu": "A100-40GB", "strategy": "zero3", "seq_len": 1024}


def test_every_category_equals_the_estimate_of_the_same_job() -> None:
    """PyTorch's snapshot of GPT-2 under FSDP2, attributed by stacks, and the estimate at the same moment."""
    found = fsdp_advisor.diagnose(path_of("gpt2"), **GPT2)  # type: ignore[arg-type]  # options by name
    assert found.prediction is not None and found.prediction.differences == ()
    for category in ("parameters", "optimizer", "unsharded_parameters", "communication", "activations", "loss"):
        assert found.memory[category] == pytest.approx(found.prediction.at_moment[category], rel=0.02), category


def test_a_larger_micro_batch_than_configured_is_noticed() -> None:
    found = fsdp_advisor.diagnose(path_of("gpt2"), **(GPT2 | {"seq_len": 512}))  # type: ignore[arg-type]  # options by name
    assert found.prediction is not None
    assert [d.category for d in found.prediction.differences[:2]] == ["loss", "activations"]
    assert found.prediction.differences[1].holdings[0].where.startswith("modeling_gpt2.py")
    assert any("1 x 512 = 512" in note for note in found.prediction.notes)


def test_another_model_is_noticed() -> None:
    found = fsdp_advisor.diagnose(path_of("steps"), **(GPT2 | {"gpus": 1, "strategy": "ddp"}))  # type: ignore[arg-type]  # options
    assert found.prediction is not None


def test_history_that_was_not_recorded_is_said_to_be_missing(tmp_path: Path) -> None:
    content = recorded("steps")
    content["device_traces"] = [[] for _ in content["device_traces"]]
    for segment in content["segments"]:
        for block in segment["blocks"]:
            block["frames"] = []
    found = diagnose_file(written(content, tmp_path))
    assert found.moment.phase == "unknown"
    assert set(found.memory) == {"unattributed", "fragmentation"}
    assert any("history was not recorded" in text for text in found.unknown)


def test_stacks_that_were_not_recorded_are_said_to_be_missing(tmp_path: Path) -> None:
    content = recorded("steps")
    for event in events_of(content):
        event["frames"] = []
    for segment in content["segments"]:
        for block in segment["blocks"]:
            block["frames"] = []
    found = diagnose_file(written(content, tmp_path))
    assert any("stacks were not recorded" in text for text in found.unknown)
    assert "gradients" not in found.memory


def test_a_full_history_is_said_to_lack_its_beginning(tmp_path: Path) -> None:
    """Blocks that live keep their stack, so the states are still attributed."""
    content = recorded("steps")
    device = content["device_traces"].index(events_of(content))
    content["device_traces"][device] = events_of(content)[-600:]
    found = diagnose_file(written(content, tmp_path))
    assert any("max_entries" in text for text in found.unknown)
    assert found.memory["optimizer"] == pytest.approx(2 * LLAMA_PARAMETER_BYTES, rel=0.01)
    assert found.memory["parameters"] == pytest.approx(LLAMA_PARAMETER_BYTES, rel=1e-3)


def test_lasting_blocks_older_than_the_recording_count_as_parameters_if_the_optimizer_was_recorded(
    tmp_path: Path,
) -> None:
    content = recorded("steps")
    events = events_of(content)
    first = next(n for n, e in enumerate(events) if any(f["name"] == "_call_impl" for f in e["frames"]))
    content["device_traces"][content["device_traces"].index(events)] = events[first:]
    earlier = {event["addr"] for event in events[:first] if event["action"] == "alloc"}
    for segment in content["segments"]:
        for block in segment["blocks"]:
            if block["address"] in earlier:
                block["frames"] = []
    found = diagnose_file(written(content, tmp_path))
    assert found.memory["parameters"] == pytest.approx(LLAMA_PARAMETER_BYTES, rel=1e-3)


def test_activations_of_the_size_of_a_workspace_remain_activations(tmp_path: Path) -> None:
    content = recorded("loss_oom")
    for event in events_of(content):
        if event["action"] == "alloc" and any(f["filename"].endswith("modeling_llama.py") for f in event["frames"]):
            event["size"] = 32 * MIB  # cuBLAS's workspace on an H100
    memory = diagnose_file(written(content, tmp_path)).memory
    assert memory["activations"] > 20 * 32 * MIB
    assert "libraries" not in memory


def test_the_gpu_with_the_error_is_chosen_and_another_can_be(tmp_path: Path) -> None:
    content, other = recorded("loss_oom"), recorded("steps")
    for segment in other["segments"]:
        segment["device"] = 1
    content["segments"] += other["segments"]
    content["device_traces"] = [events_of(content), events_of(other)]
    file = written(content, tmp_path)
    assert diagnose_file(file).device == 0
    assert diagnose_file(file, device=1).out_of_memory is None
    with pytest.raises(fsdp_advisor.AdvisorError, match="GPU 7"):
        diagnose_file(file, device=7)


def test_a_diagnosis_prints_itself() -> None:
    found = diagnosed("loss_oom")
    assert "Moment: loss" in str(found)
    assert found.to_markdown().startswith("```text")


@pytest.mark.parametrize(("total", "gpu"), [("39.39", "A100-40GB"), ("37.41", "37.41GiB")])
def test_a_job_without_a_gpu_is_estimated_on_one_with_the_memory_in_the_error(total: str, gpu: str) -> None:
    text = f"CUDA out of memory. Tried to allocate 1.00 GiB. GPU 0 has a total capacity of {total} GiB of which 0.50 GiB is free."
    options: dict[str, Any] = {"model": "meta-llama/Llama-3.1-8B", "gpus": 8, "strategy": "zero3"}
    found = diagnose_text(text, job_of(make_request(options)))
    assert found.prediction is not None and f"8 x {gpu}," in found.prediction.job
    assert not any("the GPU of the error has" in note for note in found.prediction.notes)
    asked = diagnose_text(text, job_of(make_request(options | {"gpu": "H100"}))).prediction
    assert asked is not None and "8 x H100-80GB," in asked.job
    assert any("the GPU of the error has" in note for note in asked.notes)


@pytest.mark.parametrize("moment", [Moment(phase="backward"), Moment(phase="backward", layer=3, layers=16)])
def test_a_moment_of_a_job_with_adapters_has_the_states_of_adapters(moment: Moment) -> None:
    words = {
        "model": "meta-llama/Llama-3.2-1B",
        "gpu": "H100-80GB",
        "strategy": "ddp",
        "seq_len": 2048,
        "use_peft": True,
    }
    job = job_of(make_request(words))
    at_moment, at_peak = predicted(job, moment, {}, ()).at_moment, job.row.at_peak
    assert at_peak is not None
    assert all(at_moment[states] == at_peak[states] for states in ("parameters", "optimizer"))


LOGITS = (
    '  File "train.py", line 9, in step\n    loss.backward()\n  File "torch/_tensor.py", line 626, in backward\n'
    "    torch.autograd.backward(\n"
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {} GiB. GPU 0 has a total capacity of 23.52 GiB of which 2.10 GiB is"
    " free. Of the allocated memory 20.62 GiB is allocated by PyTorch, and 300.00 MiB is reserved by PyTorch but unallocated.\n"
)


@in_turn(0, of=2)
@pytest.mark.parametrize(("requested", "is_loss"), [("4.64", True), ("2.32", True), ("1.50", False)])
def test_a_loss_without_all_logits_comes_first_if_the_request_was_for_them(requested: str, is_loss: bool) -> None:
    job = {"model": "Qwen/Qwen2.5-0.5B", "micro_batch_size": 8, "seq_len": 1024, "strategy": "ddp", "gpu": "4090"}
    first = diagnose_text(
        f"Traceback (most recent call last):\n{LOGITS.format(requested)}", job_of(make_request(job))
    ).changes[0]
    assert first.what.startswith("--loss liger") == is_loss


def test_an_error_in_the_loss_of_a_known_job_advises_another_loss_first() -> None:
    text = (
        LOGITS.format("1.50")
        .replace("train.py", "transformers/loss/loss_utils.py")
        .replace("loss.backward()", "logits.float()")
    )
    text = "Traceback (most recent call last):\n" + text.replace("torch/_tensor.py", "torch/a.py").replace(
        "backward", "forward"
    )
    options: dict[str, Any] = {"model": "gpt2", "micro_batch_size": 64, "strategy": "ddp", "gpu": "4090"}
    changes = {
        loss: diagnose_text(text, job_of(make_request(options | {"loss": loss}))).changes for loss in ("auto", "liger")
    }
    assert changes["auto"][0].options == {"loss": "liger"}
    assert not any("loss" in change.options for change in changes["liger"])


def test_a_large_request_of_backward_may_be_for_the_gradient_of_the_logits() -> None:
    first, second, *_ = diagnose_text(f"Traceback (most recent call last):\n{LOGITS.format('4.64')}").changes
    assert first.what.startswith("if the request is sequences x tokens x vocabulary") and "checkpointing" in second.what
    small = diagnose_text(f"Traceback (most recent call last):\n{LOGITS.format('0.40')}").changes
    assert not any("loss" in change.what for change in small)


def test_memory_at_a_failed_request_is_no_difference_from_the_peak() -> None:
    text = (
        'Traceback (most recent call last):\n  File "train.py", line 9, in step\n    trainer.train()\n'
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.96 GiB. GPU 0 has a total capacity of 79.15 GiB of which 1.10 GiB"
        " is free. Of the allocated memory 77.36 GiB is allocated by PyTorch, and 200.00 MiB is reserved by PyTorch but unallocated.\n"
    )
    found = diagnose_text(
        text, job_of(make_request({"model": "meta-llama/Llama-3.1-8B", "strategy": "ddp", "gpu": "A100"}))
    )
    lines = str(found).splitlines()
    assert (
        "Memory at the failed request, and the estimate for the peak of the step on a GPU that is large enough:"
        in lines
    )
    (heading,) = [line for line in lines if line.startswith("memory") and "estimate" in line]
    assert heading.split() == ["memory", "at", "the", "error", "estimate"]
    assert "the job ended at the failed request; the estimate is its peak on a GPU that is large enough" in str(found)


def test_more_memory_at_an_error_than_estimated_is_a_difference() -> None:
    job = {"model": "Qwen/Qwen2.5-0.5B", "seq_len": 128, "strategy": "ddp", "gpu": "4090"}
    found = diagnose_text(f"Traceback (most recent call last):\n{LOGITS.format('1.50')}", job_of(make_request(job)))
    assert any("difference" in line for line in str(found).splitlines()) and "+" in str(found)
