"""DeepSpeed's step program: its invariants, and its peaks against real steps of DeepSpeed in two processes on the CPU.

Run as a program (``test_deepspeed_schedule.py CASES OUT``), this file is one of those processes.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from matrix import ALL, in_turn, taken
from ranks import as_ranks, run_ranks

pytest.importorskip("torch")
pytest.importorskip("transformers")

from fsdp_advisor.engines.deepspeed.buffers import PendingGradients, buffers
from fsdp_advisor.engines.deepspeed.settings import Settings
from fsdp_advisor.engines.deepspeed.step import DeepspeedStep
from fsdp_advisor.job.plan import Plan
from fsdp_advisor.memory.live import step_peak
from fsdp_advisor.model.profile import Profile
from fsdp_advisor.model.tape import Tape
from fsdp_advisor.model.tape_key import TapeCheckpointing, TapeKey
from fsdp_advisor.parallelism.mesh import Mesh
from fsdp_advisor.program.builder import build_program
from fsdp_advisor.program.instructions import Alloc, Compute, Free, StepProgram
from fsdp_advisor.program.storages import round_up
from fsdp_advisor.recording.recorder import Recorder
from fsdp_advisor.recording.storages import StorageWatch
from fsdp_advisor.recording.transformers_models import TransformersSource
from fsdp_advisor.validation.deepspeed_on_cpu import skip_shm_operator

pytestmark = pytest.mark.slow

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 12,
              "num_attention_heads": 4, "vocab_size": 1000},
    "gpt2": {"model_type": "gpt2", "n_embd": 64, "n_layer": 12, "n_head": 4, "vocab_size": 1000},  # a tied head
    "mixtral": {"model_type": "mixtral", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 12,
                "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 1000, "num_local_experts": 4},
}  # fmt: skip
REAL: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 4, "vocab_size": 1000,
}  # fmt: skip
STEPS = 5
"""Of a real run. The first two make the optimizer's states and record the trace of modules; what gloo lets go of late only adds."""


class Recorded:
    """A model's profile, and its tapes by checkpointing."""

    def __init__(self, config: dict[str, Any], attention: str, at: tuple[int, int] | None = None) -> None:
        self._recorder = Recorder(TransformersSource(config, name="small"))
        self._attention, self._at = attention, at
        self._tapes: dict[TapeCheckpointing, Tape] = {}
        self.profile: Profile = self._recorder.profile

    def program(self, plan: Plan, settings: Settings) -> StepProgram:
        hooks = DeepspeedStep(self.profile, plan, settings)
        return build_program(self.profile, self._tape(plan), hooks, plan.gradient_accumulation_steps)

    def _tape(self, plan: Plan) -> Tape:
        kind: TapeCheckpointing = "full" if plan.activation_checkpointing == "full" else "none"
        if kind not in self._tapes:
            self._tapes[kind] = self._recorder.tape(TapeKey("plain", "bf16", self._attention, kind, at=self._at))
        return self._tapes[kind]


def state_bytes(program: StepProgram) -> int:
    return sum(alloc.storages.rounded for alloc in program.states)


@pytest.fixture(scope="module", params=taken(["gpt2", "mixtral"], ["llama"], days=2))
def recorded(request: pytest.FixtureRequest) -> Recorded:
    return Recorded(CONFIGS[request.param], "sdpa", at=(2, 32))


def plan(stage: int, ranks: int, **changes: Any) -> Plan:
    values = {"strategy": f"zero{stage}", "backend": "deepspeed", "mesh": Mesh(dp_shard=ranks), "seq_len": 32}
    return Plan(**{**values, "micro_batch_size": 2, **changes})


def zero_settings(bucket: int) -> Settings:
    return Settings(
        reduce_bucket_size=bucket,
        prefetch_bucket_size=3000,
        param_persistence_threshold=100,
        max_live_parameters=50_000,
        max_reuse_distance=50_000,
    )


JOBS = [
    (plan(stage, ranks, offload=offload, gradient_accumulation_steps=accumulation, activation_checkpointing=again), bucket)
    for stage, ranks, offload, accumulation, again, bucket in itertools.product(
        (1, 2, 3), (1, 7), ("none", "optimizer", "parameters"), (1, 3), ("none", "full"), (5 * 10**8, 70_000, 9_000, 2_000)
    )
]  # fmt: skip


SOME_JOBS = JOBS if ALL else JOBS[::7]


def test_every_buffer_is_freed_once_and_after_it_was_allocated(recorded: Recorded) -> None:
    """What replaces a state that was freed during the step has its size."""
    for job, bucket in SOME_JOBS:
        program = recorded.program(job, zero_settings(bucket))
        alive = {alloc.buffer: alloc.storages.rounded for alloc in program.states}
        before = sum(alive.values())
        visits = [visit for micro_batch in program.micro_batches for visit in micro_batch.visits]
        for visit in (*visits, program.optimizer):
            for instruction in visit.instructions:
                if isinstance(instruction, Alloc):
                    alive[instruction.buffer] = instruction.storages.rounded
                elif isinstance(instruction, Compute):
                    sizes = {gradient.birth: gradient.storages.rounded for gradient in instruction.span.gradients}
                    alive |= {buffer: sizes[birth] for birth, buffer in instruction.gradients}
                elif isinstance(instruction, Free):
                    assert alive.pop(instruction.buffer) == instruction.n_bytes, (job, bucket)
        assert sum(alive.values()) == before, (job, bucket)


def test_accounts_sum_to_the_peak(recorded: Recorded) -> None:
    for job, bucket in SOME_JOBS:
        peak = step_peak(recorded.program(job, zero_settings(bucket)), job.micro_batch_size, job.seq_len)
        assert sum(peak.at_peak.values()) == peak.peak == max(peak.phase_peaks.values())
        assert min(peak.at_peak.values()) >= 0


def test_an_oversized_gradient_is_cut_where_ranks_meet() -> None:
    profile = Recorder(TransformersSource(CONFIGS["llama"], name="small")).profile
    step = buffers(profile, plan(2, 64), Settings(reduce_bucket_size=20_000))
    (owned,) = step.partition_elements
    filled = PendingGradients()
    filled.put(0, 64_000, 64_000, 0, owned)
    assert owned < 20_000
    slices = -(-20_001 // owned)
    assert step.copy_bytes(filled, 64) == 2 * slices * owned
    alone = buffers(profile, plan(2, 8), Settings(reduce_bucket_size=20_000))
    (all_owned,) = alone.partition_elements
    filled = PendingGradients()
    filled.put(0, 64_000, 64_000, 0, all_owned)
    assert all_owned > 64_000
    assert alone.copy_bytes(filled, 8) == 0


# Against DeepSpeed

BUCKETS = {
    "reduce_bucket_size": "reduce_bucket_size",
    "stage3_prefetch_bucket_size": "prefetch_bucket_size",
    "stage3_param_persistence_threshold": "param_persistence_threshold",
    "stage3_max_live_parameters": "max_live_parameters",
    "stage3_max_reuse_distance": "max_reuse_distance",
}
REAL_SETTINGS = Settings(
    reduce_bucket_size=400_000,
    prefetch_bucket_size=100_000,
    param_persistence_threshold=300,
    max_live_parameters=1_500_000,
    max_reuse_distance=1_500_000,
)
CASES: list[dict[str, Any]] = taken(
    [
        {"stage": 1, "t": 4},
        {"stage": 2, "t": 4, "accumulation": 2},
        {"stage": 2, "t": 4, "offload": "optimizer"},
        {"stage": 3, "t": 64},
    ],
    [
        {"stage": 2, "t": 4, "bucket": 150_000},
        {"stage": 2, "t": 64, "again": True},
        {"stage": 3, "t": 4, "within": 0.06},
        {"stage": 3, "t": 64, "again": True, "within": 0.05},
    ],
    days=2,
)
DEFAULT_CASE: dict[str, Any] = {
    "accumulation": 1, "offload": "none", "again": False, "bucket": 400_000, "within": 0.0,
}  # fmt: skip
SCALARS = 16 * 1024
"""Scaled losses and the single numbers that norms are made of: not on the ledger."""


def case_settings(case: dict[str, Any]) -> Settings:
    known = {name: getattr(REAL_SETTINGS, name) for name in Settings.__slots__}
    return Settings(**known | {"reduce_bucket_size": case["bucket"]})


@in_turn(3, of=5)
def test_peaks_of_backward_and_optimizer_equal_those_of_deepspeed(tmp_path: Path) -> None:
    """The highest moment of backward and of the optimizer step, in bytes above the states.

    Stages 1 and 2 to the byte, except for scalars; stage 3 only while the peak is in the loss. Elsewhere stage 3's gathered parameters are
    taken at the highest within a layer, wherever in it the tape is at its highest (``within``: relative to the step).
    """
    if not os.environ.get("CI"):
        pytest.importorskip("deepspeed")
    cases = [DEFAULT_CASE | case for case in CASES]
    recorded = Recorded(REAL, "eager")
    for case, found in zip(cases, measure(2, cases, tmp_path), strict=True):
        job = plan(
            case["stage"], 2, seq_len=case["t"], offload=case["offload"],
            gradient_accumulation_steps=case["accumulation"],
            activation_checkpointing="full" if case["again"] else "none",
        )  # fmt: skip
        program = recorded.program(job, case_settings(case))
        peaks = step_peak(program, job.micro_batch_size, job.seq_len).phase_peaks
        expected = {phase: high - state_bytes(program) for phase, high in peaks.items()}
        assert found["left"] == 0, case
        phases = ("backward", "optimizer") if case["offload"] == "none" else ("backward",)  # it steps on the host
        for phase in phases:
            error = found[phase] - expected[phase]
            if case["within"] and phase == "backward":
                assert -case["within"] * found[phase] - SCALARS <= error <= 0.005 * found[phase], (case, phase, error)
            else:
                assert 0 <= error <= SCALARS, (case, phase, error)


def measure(ranks: int, cases: list[dict[str, Any]], folder: Path) -> list[dict[str, Any]]:
    questions, answers = folder / "cases.json", folder / "results.json"
    questions.write_text(json.dumps(cases))
    run_ranks(Path(__file__), str(questions), str(answers), ranks=ranks)
    results: list[dict[str, Any]] = json.loads(answers.read_text())
    return results


class Meter:
    """Bytes of live storages, each rounded up to 512, from the moment the model is made."""

    def __init__(self) -> None:
        self.live = self.high = 0
        self._foreign: set[int] = set()
        self.watch = StorageWatch(self._changed)

    def _changed(self, key: int, before: int, after: int, operator: str, args: tuple[Any, ...]) -> None:
        if not before and operator == "aten::split":  # gloo's own copy of what it reduces, first seen through a view
            self._foreign.add(key)
        elif key in self._foreign:
            self._foreign.discard(key)
        else:
            self.live += round_up(after) - round_up(before)
            self.high = max(self.high, self.live)

    def lap(self) -> int:
        high, self.high = self.high, self.live
        return high


def run(case: dict[str, Any]) -> dict[str, int]:
    import deepspeed
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    zero: dict[str, Any] = {key: getattr(case_settings(case), name) for key, name in BUCKETS.items()}
    zero["stage"] = case["stage"]
    if case["offload"] != "none":
        zero["offload_optimizer"] = {"device": "cpu"}
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": case["accumulation"],
        "zero_optimization": zero,
        "bf16": {"enabled": True},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
    }
    shape = LlamaConfig(**{k: v for k, v in REAL.items() if k != "model_type"}, use_cache=False)
    shape._attn_implementation = "eager"
    meter = Meter()
    gc.collect()
    gc.freeze()  # collections skip what is left of imports and of earlier cases
    found: list[dict[str, int]] = []
    with meter.watch:
        model = LlamaForCausalLM(shape).bfloat16().train()
        if case["again"]:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        engine, *_ = deepspeed.initialize(model=model, config=config, optimizer=optimizer)
        for _ in range(STEPS):
            gc.collect()
            time.sleep(0.05)  # gloo's threads hold on to the tensors of a collective for a moment
            base = meter.live
            highs = {"backward": 0, "optimizer": 0}
            for _ in range(case["accumulation"]):
                ids = torch.randint(0, shape.vocab_size, (2, case["t"]))
                batch = {"input_ids": ids, "labels": ids.clone()}
                loss = engine(**batch).loss
                meter.lap()
                engine.backward(loss)
                highs["backward"] = max(highs["backward"], meter.lap() - base)
                del loss
                time.sleep(0.02)
                meter.lap()
                engine.step()
                highs["optimizer"] = max(highs["optimizer"], meter.lap() - base)
                del ids, batch
            found.append({**highs, "left": meter.live - base})
    engine.destroy()
    return {name: min(step[name] for step in found[2:]) for name in found[0]}


def main() -> None:
    import deepspeed
    import torch

    cases = json.loads(Path(sys.argv[1]).read_text())
    skip_shm_operator()
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    results = [run(case) for case in cases]
    if torch.distributed.get_rank() == 0:
        Path(sys.argv[2]).write_text(json.dumps(results))
    torch.distributed.barrier()
    sys.stderr.flush()
    os._exit(0)  # gloo now and then aborts a process that has long answered, while its threads are taken down


if __name__ == "__main__":
    import logging

    import deepspeed  # noqa: F401  # so that the ranks share what it imports
    import torch

    logging.disable(logging.WARNING)
    torch.compile(len)  # imports the compiler, as DeepSpeed's first engine would
    as_ranks(main)
