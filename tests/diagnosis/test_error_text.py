"""Out-of-memory errors in text: every form of PyTorch's message, and logs of several ranks."""

from __future__ import annotations

import pytest
from matrix import in_turn

from fsdp_advisor.diagnosis import Diagnosis, diagnose_text, job_of
from fsdp_advisor.diagnosis.error_text import errors_in
from fsdp_advisor.diagnosis.prediction import DiagnosedJob
from fsdp_advisor.errors import UnreadableDiagnosis
from fsdp_advisor.job.parsing import make_request
from fsdp_advisor.job.request import EstimateRequest

GIB, MIB = 2**30, 2**20
HINT = "If reserved but unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation."

FORMS: dict[str, tuple[str, dict[str, object]]] = {
    # the first words say which versions write it, the rest where such a text was seen
    "torch 2.4 to 2.13, own process (murong-xu/CADS#4)": (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 22.00 GiB. GPU 0 has a total capacity of 31.50 GiB of which "
        "12.75 GiB is free. Including non-PyTorch memory, this process has 18.75 GiB memory in use. Of the allocated memory "
        f"9.00 GiB is allocated by PyTorch, and 9.25 GiB is reserved by PyTorch but unallocated. {HINT}",
        {
            "gpu": 0, "requested_bytes": 22 * GIB, "total_bytes": int(31.5 * GIB), "free_bytes": int(12.75 * GIB),
            "process_bytes": int(18.75 * GIB), "allocated_bytes": 9 * GIB, "unallocated_bytes": int(9.25 * GIB),
        },
    ),
    "torch 2.1 and 2.2, `capacty`, a container's own process (FoundationVision/GenerateU#10)": (
        "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 496.00 MiB. GPU 0 has a total capacty of 14.75 GiB of "
        "which 256.00 MiB is free. Process 20398 has 14.50 GiB memory in use. Of the allocated memory 14.00 GiB is allocated by "
        "PyTorch, and 256.00 MiB is reserved by PyTorch but unallocated. If reserved but unallocated memory is large try setting "
        "max_split_size_mb to avoid fragmentation.",
        {"requested_bytes": 496 * MIB, "process_bytes": int(14.5 * GIB), "other_processes": {}},
    ),
    "several processes": (
        "CUDA out of memory. Tried to allocate 2.00 MiB. GPU 3 has a total capacity of 80.00 GiB of which 1.00 MiB is free. Process 7 "
        "has 30.00 GiB memory in use. Process 8 has 512.00 MiB memory in use. Including non-PyTorch memory, this process has "
        "49.00 GiB memory in use. Of the allocated memory 48.00 GiB is allocated by PyTorch, and 0 bytes is reserved by PyTorch but "
        "unallocated.",
        {"gpu": 3, "other_processes": {7: 30 * GIB, 8: 512 * MIB}, "process_bytes": 49 * GIB, "unallocated_bytes": 0},
    ),
    "no NVML (levihsu/OOTDiffusion#167)": (
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 4.00 GiB of which 2.50 GiB is free. Of the "
        "allocated memory 0 bytes is allocated by PyTorch, and 0 bytes is reserved by PyTorch but unallocated.",
        {"process_bytes": None, "allocated_bytes": 0, "total_bytes": 4 * GIB},
    ),
    "limited by set_per_process_memory_fraction": (
        "CUDA out of memory. Tried to allocate 5.50 GiB. GPU 0 has a total capacity of 39.50 GiB of which 37.75 GiB is free. 4.00 GiB "
        "allowed; Of the allocated memory 954.00 MiB is allocated by PyTorch, and 0 bytes is reserved by PyTorch but unallocated.",
        {"allowed_bytes": 4 * GIB, "allocated_bytes": 954 * MIB},
    ),
    "torch 2.4 and later, CUDA graphs (pytorch/pytorch#124673)": (
        "CUDA out of memory. Tried to allocate 1.00 GiB. GPU 0 has a total capacity of 8.00 GiB of which 512.00 MiB is free. Of the "
        "allocated memory 6.00 GiB is allocated by PyTorch, with 2.00 GiB allocated in private pools (e.g., CUDA Graphs), and "
        "256.00 MiB is reserved by PyTorch but unallocated.",
        {"allocated_bytes": 6 * GIB, "private_pool_bytes": 2 * GIB, "unallocated_bytes": 256 * MIB},
    ),
    "ROCm": (
        "torch.OutOfMemoryError: HIP out of memory. Tried to allocate 1.00 GiB. GPU 0 has a total capacity of 64.00 GiB of which "
        "0 bytes is free. Of the allocated memory 60.00 GiB is allocated by PyTorch, and 3.00 GiB is reserved by PyTorch but unallocated.",
        {"requested_bytes": GIB, "allocated_bytes": 60 * GIB},
    ),
    "before torch 2.1 (Li-Chongyi/Zero-DCE#52)": (
        "RuntimeError: CUDA out of memory. Tried to allocate 1.75 GiB (GPU 1; 6.00 GiB total capacity; 3.50 GiB already allocated; "
        "1.00 GiB free; 4.50 GiB reserved in total by PyTorch) If reserved memory is >> allocated memory",
        {"gpu": 1, "total_bytes": 6 * GIB, "allocated_bytes": int(3.5 * GIB), "free_bytes": GIB, "unallocated_bytes": GIB},
    ),
    "backend cudaMallocAsync": (
        "torch.OutOfMemoryError: Allocation on device 0 would exceed allowed memory. (out of memory)\n"
        "Currently allocated     : 1.00 GiB\nRequested               : 2.00 GiB\nDevice limit            : 8.00 GiB\n"
        "Free (according to CUDA): 512.00 MiB\nPyTorch limit (set by user-supplied memory fraction)\n"
        "                        : 17179869184.00 GiB\n",
        {"gpu": 0, "requested_bytes": 2 * GIB, "total_bytes": 8 * GIB, "free_bytes": 512 * MIB, "allocated_bytes": GIB},
    ),
    "wrapped by rich, in colour": (
        "\x1b[31m│\x1b[0m OutOfMemoryError: CUDA out of memory. Tried to    │\n│ allocate 2.00 GiB. GPU 3 has a total capacity of │\n"
        "│ 24.00 GiB of which 1.50 GiB is free. Of the       │\n│ allocated memory 12.00 GiB is allocated by         │\n"
        "│ PyTorch, and 4.00 GiB is reserved by PyTorch but  │\n│ unallocated.  │\n",
        {"gpu": 3, "requested_bytes": 2 * GIB, "allocated_bytes": 12 * GIB, "unallocated_bytes": 4 * GIB},
    ),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_the_message_is_read(form: str) -> None:
    text, expected = FORMS[form]
    (error,) = errors_in(f"step 1 loss 2.3\n{text}\nTerminating\n")
    assert {name: getattr(error, name) for name in expected} == expected


def message(gpu: int, allocated: str = "30.00 GiB") -> str:
    return (
        f"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.50 GiB. GPU {gpu} has a total capacity of 40.00 GiB of which "
        f"512.00 MiB is free. Including non-PyTorch memory, this process has 37.00 GiB memory in use. Of the allocated memory "
        f"{allocated} is allocated by PyTorch, and 6.00 GiB is reserved by PyTorch but unallocated. {HINT}"
    )


def traceback(*frames: tuple[str, int, str]) -> list[str]:
    lines = ["Traceback (most recent call last):"]
    for file, line, name in frames:
        lines += [f'  File "{file}", line {line}, in {name}', "    some(code)"]
    return lines


SITE = "/venv/lib/python3.11/site-packages"
IN_LAYER = (
    ("/job/train.py", 26, "<module>"),
    (f"{SITE}/torch/nn/modules/module.py", 1789, "_call_impl"),
    (f"{SITE}/transformers/models/llama/modeling_llama.py", 392, "forward"),
    (f"{SITE}/torch/nn/modules/module.py", 1789, "_call_impl"),
    (f"{SITE}/transformers/models/llama/modeling_llama.py", 164, "forward"),
)
MOMENTS = {
    "forward": IN_LAYER,
    "loss": (
        IN_LAYER[0],
        IN_LAYER[1],
        (f"{SITE}/transformers/loss/loss_utils.py", 42, "fixed_cross_entropy"),
        (f"{SITE}/torch/nn/functional.py", 3555, "cross_entropy"),
    ),
    "backward": (
        ("/job/train.py", 27, "<module>"),
        (f"{SITE}/torch/_tensor.py", 623, "backward"),
        (f"{SITE}/torch/autograd/graph.py", 829, "_engine_run_backward"),
    ),
    "optimizer": (
        ("/job/train.py", 28, "<module>"),
        (f"{SITE}/torch/optim/optimizer.py", 530, "wrapper"),
        (f"{SITE}/torch/optim/adam.py", 169, "_init_group"),
    ),
    "loading": (
        ("/job/train.py", 8, "<module>"),
        (f"{SITE}/torch/nn/modules/module.py", 933, "_apply"),
        (f"{SITE}/torch/nn/modules/module.py", 1369, "convert"),
    ),
}


@pytest.mark.parametrize("phase", MOMENTS)
def test_the_traceback_tells_the_moment(phase: str) -> None:
    found = diagnose_text("\n".join([*traceback(*MOMENTS[phase]), message(0)]))
    assert found.moment.phase == phase


def test_recomputation_under_checkpointing_is_backward() -> None:
    frames = (*MOMENTS["backward"], (f"{SITE}/torch/utils/checkpoint.py", 1688, "recompute_fn"), *IN_LAYER[3:])
    assert diagnose_text("\n".join([*traceback(*frames), message(0)])).moment.phase == "backward"


def mixed_log(prefix: str) -> str:
    """Eight ranks, of which two fail, with their lines mixed."""
    ranks: list[list[str]] = [[f"step {n}: loss 2.{n}" for n in range(9)] for _ in range(8)]
    ranks[5] += [*traceback(*IN_LAYER), message(5, "31.00 GiB")]
    ranks[2] += [*traceback(*MOMENTS["loss"]), message(2)]
    lines = []
    for number in range(max(map(len, ranks))):
        lines += [prefix.format(rank) + ranks[rank][number] for rank in range(8) if number < len(ranks[rank])]
    return "\n".join(["W1122 torchrun starts", *lines])


@pytest.mark.parametrize("prefix", ["[rank{}]: ", "[default{0}]:[rank{0}]: ", "{0}: [rank{0}]: ", "{}: "])
def test_a_mixed_log_of_eight_ranks_is_separated(prefix: str) -> None:
    found = diagnose_text(mixed_log(prefix))
    assert [(error.rank, error.gpu) for error in found.ranks] == [(2, 2), (5, 5)]
    assert found.out_of_memory is not None and found.out_of_memory.rank == 5, "it has most memory allocated"
    assert (found.moment.phase, found.moment.where) == ("forward", "modeling_llama.py:164 forward")


def test_an_error_that_a_log_repeats_counts_once() -> None:
    text = "\n".join([message(0), "During handling of the above exception:", *traceback(*IN_LAYER), message(0)])
    (error,) = errors_in(text)
    assert error.frames, "the one with a traceback is kept"


def whats(found: Diagnosis) -> list[str]:
    return [change.what for change in found.changes]


def test_the_categories_sum_to_the_memory_of_the_gpu() -> None:
    found = diagnose_text(FORMS["several processes"][0])
    assert sum(found.memory.values()) == 80 * GIB
    assert found.memory["other_processes"] == int(30.5 * GIB)


def test_other_processes_are_named() -> None:
    found = diagnose_text(FORMS["several processes"][0])
    assert "7 (30.00 GiB), 8 (512.00 MiB)" in whats(found)[0]


def test_fragmentation_that_would_be_enough_leads_to_expandable_segments() -> None:
    found = diagnose_text(message(0))
    assert found.changes[0].options == {"allocator_conf": "expandable_segments:True"}
    small = diagnose_text(message(0).replace("6.00 GiB is reserved", "6.00 MiB is reserved"))
    assert not any("expandable_segments" in what for what in whats(small))


def test_a_limit_of_the_process_is_named() -> None:
    found = diagnose_text(FORMS["limited by set_per_process_memory_fraction"][0])
    assert "set_per_process_memory_fraction" in whats(found)[0]


@in_turn(1, of=2)
def test_a_job_adds_its_estimate_and_changes_that_make_it_fit() -> None:
    options = {
        "model": "meta-llama/Llama-2-7b-hf",
        "gpus": 4,
        "gpu": "A100-40GB",
        "strategy": "zero3",
        "micro_batch_size": 2,
    }
    found = diagnose_text(message(0), job_of(make_request(options, EstimateRequest)))
    assert found.prediction is not None and found.prediction.fits is False
    checkpointing = next(c for c in found.changes if c.options == {"activation_checkpointing": "full"})
    assert checkpointing.saves_bytes and checkpointing.saves_bytes > 10 * GIB
    (allocated,) = (d for d in found.prediction.differences if d.category == "allocated")
    assert allocated.measured_bytes == 30 * GIB


def job(**options: object) -> DiagnosedJob:
    given = {"model": "meta-llama/Llama-3.2-1B", "gpu": "A100-40GB", "strategy": "ddp"} | options
    return job_of(make_request(given, EstimateRequest))


def test_an_error_that_the_estimate_contradicts_is_said_to_be_of_another_job() -> None:
    """A 1B model needs half of the 40 GiB that the error says are full."""
    found = diagnose_text(message(0), job(gpus=2))
    assert found.prediction is not None and found.prediction.fits
    (note,) = found.prediction.notes
    assert "although its estimate fits" in note and "number of GPUs (2)" in note


def test_a_rank_or_a_gpu_that_the_job_lacks_is_named() -> None:
    found = diagnose_text("[rank3]: " + message(3), job(gpu="H100-80GB"))
    assert found.prediction is not None
    notes = " ".join(found.prediction.notes)
    assert "the error has 40.00 GiB, and H100-80GB" in notes and "of rank 3, and the estimate is for 1 GPU" in notes


def test_if_no_single_option_is_enough_the_search_is_named() -> None:
    """The error wants 41 GiB; a 1B model with one sequence of 64 tokens has nothing left to save."""
    found = diagnose_text(message(0), job(seq_len=64, optim="sgd"))
    assert [change.what.split(" --")[0] for change in found.changes if "recommend" in change.what]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is empty"),
        ("step 1 loss 2.3", "no out-of-memory error"),
        ("RuntimeError: CUDA error: out of memory", "'CUDA error: out of memory'"),
        ("ncclUnhandledCudaError: Cuda failure 'out of memory'", "does not say how the memory is used"),
    ],
)
def test_text_without_the_message_is_refused_with_a_hint(text: str, words: str) -> None:
    with pytest.raises(UnreadableDiagnosis, match=words) as caught:
        diagnose_text(text)
    assert "_dump_snapshot" in caught.value.hint


@pytest.mark.parametrize(
    "text",
    [
        "train.sh: line 3: 12 Killed",
        "Killed",
        "slurmstepd: error: Detected 1 oom-kill event(s) in StepId=12.0. Some of the step tasks have been OOM Killed.",
        "kernel: Out of memory: Killed process 12 (python) total-vm:1kB",
        "exitcode: -9 (pid: 123)",
        "[launch.py:325:sigkill_handler] exits with return code = -9",
    ],
)
def test_a_process_that_the_system_ended_points_to_the_hosts_memory(text: str) -> None:
    with pytest.raises(UnreadableDiagnosis, match="usually because the host's memory ran out") as caught:
        diagnose_text(f"step 3 loss 2.1\n{text}\n")
    assert "host memory per node" in caught.value.hint
