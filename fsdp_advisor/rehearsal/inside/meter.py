"""Counts steps, notes the peaks of each phase, and writes the memory use of one process to a file."""

from __future__ import annotations

import atexit
import gc
import json
import os
import sys
import time
import traceback
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, Literal

from fsdp_advisor.rehearsal.inside import job_facts
from fsdp_advisor.rehearsal.inside.decisions import decisions
from fsdp_advisor.rehearsal.inside.refusals import hint_of
from fsdp_advisor.rehearsal.inside.timeline import timeline

Phase = Literal["setup", "forward", "backward", "optimizer", "no-grad forward"]
Figures = dict[str, int]

PEAKS = {"peak_allocated_bytes": "allocated_bytes.all.peak", "peak_reserved_bytes": "reserved_bytes.all.peak"}
HISTORY_ENTRIES = 1_000_000
"""The number of allocations and frees that PyTorch records, for the timeline and for the tensors that are alive when memory runs out."""


class Meter:
    """Measures one process of the script. It changes neither allocations nor the results of `torch.cuda.max_memory_allocated`.

    A phase ends where the next one begins: at the first forward with gradients of a step, at the outermost `backward`, after it
    (the optimizer phase: clipping, the optimizer's step, zero_grad, until the next forward), and at a forward without gradients.
    A step ends with the first `Optimizer.step` after a backward. PyTorch's peak counters are reset at each phase; the script still reads
    the maximum since its own last reset.
    """

    def __init__(self, torch: ModuleType, folder: Path, steps: int, snapshot: bool) -> None:
        self.torch, self.folder, self.steps, self.snapshot = torch, folder, steps, snapshot
        self.phase: Phase = "setup"
        self.step = 0
        self.completed = 0
        self.backward_depth = 0
        self.gradients_pending = False
        self.stepped_in_backward = False
        self.phases: dict[tuple[int, Phase, int], Figures] = {}
        self.since_reset: dict[int, dict[tuple[str, ...], int]] = {}
        self.out_of_memory: list[dict[str, Any]] = []
        self.error: str | None = None
        self.facts: dict[str, Any] = {}
        self.forwards = 0
        self.started = time.monotonic()
        self.history_runs = False
        self.alive_before_history: dict[int, int] = {}
        self.native_stats = torch.cuda.memory.memory_stats_as_nested_dict
        self.native_reset = torch._C._cuda_resetPeakMemoryStats

    # Installation

    def install(self) -> None:
        """Patch the few functions of PyTorch at which phases begin."""
        torch = self.torch
        for module in (torch.cuda.memory, torch.cuda):
            module.memory_stats_as_nested_dict = self.stats
            module.reset_peak_memory_stats = self.reset_peaks
        backward = torch.autograd.backward

        def counted_backward(*args: Any, **kwargs: Any) -> Any:
            self.before_backward()
            try:
                return backward(*args, **kwargs)
            finally:
                self.after_backward()

        torch.autograd.backward = counted_backward
        import_module("torch.optim.optimizer").register_optimizer_step_post_hook(self.after_optimizer)
        self._watch_forward()
        torch.cuda._lazy_call(self._start_history)
        excepthook = sys.excepthook

        def note_error(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            self.error = "".join(traceback.format_exception(kind, error, trace)[-1:]).strip()
            excepthook(kind, error, trace)
            if (hint := hint_of(error)) is not None:
                self.error += f" ({hint})"
                print(f"note: {hint}", file=sys.stderr)

        sys.excepthook = note_error
        atexit.register(self.write_at_exit)

    def _watch_forward(self) -> None:
        self.forward_hook = self.torch.nn.modules.module.register_module_forward_pre_hook(self.before_module)

    def _start_history(self) -> None:
        """Record allocations from the start of CUDA, and note every failed one."""
        self.history_runs = True
        self.alive_before_history = {
            device: _leaf(stats, "requested_bytes.all.current") for device, stats in self._all_stats()
        }
        self.torch.cuda.memory._record_memory_history(
            enabled="all", context="all" if self.snapshot else "alloc", stacks="python", max_entries=HISTORY_ENTRIES
        )
        self.torch._C._cuda_attach_out_of_memory_observer(self.after_out_of_memory)

    # Phases

    def before_module(self, module: Any, inputs: Any) -> None:
        """Called before each module's forward: the outermost call begins a forward. Calls within it are watched only until they have
        shown the facts of the job (`job_facts.collect`).
        """
        if not self.torch.cuda.is_initialized():
            return
        if not self.torch.is_grad_enabled():
            self.enter("no-grad forward")
            return
        if self.phase != "forward":
            if self.steps and self.completed >= self.steps:
                self.finish()
            self.enter("forward", self.completed + 1)
            self.forwards += 1
        if self._knows_job(module):
            self.forward_hook.remove()

    def _knows_job(self, module: Any) -> bool:
        """Whether all facts about the job are known or reading them failed. The script continues in both cases."""
        try:
            return job_facts.collect(self.facts, module, self.torch)
        except Exception as error:  # an unknown wrapper, model or version
            self.facts["unreadable"] = f"{type(error).__name__}: {error}"
            return True

    def before_backward(self) -> None:
        self.backward_depth += 1
        if self.backward_depth == 1 and self.torch.cuda.is_initialized():
            self.enter("backward", self.completed + 1)

    def after_backward(self) -> None:
        self.backward_depth -= 1
        if self.backward_depth == 0 and self.torch.cuda.is_initialized():
            self.gradients_pending = True
            self.enter("optimizer", self.completed + 1)
            if self.stepped_in_backward:
                self._complete_step()
            self._watch_forward()

    def after_optimizer(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """A step ends with the first optimizer's step after a backward; further optimizers belong to the same step.

        An optimizer without parameters is left out: DeepSpeed's Muon also steps its Adam when only matrices are updated.
        Source: DeepSpeed 0.19.8, runtime/zero/muon/muon_optimizer.py, MuonWithAuxAdam.step.
        """
        if self.backward_depth:
            self.stepped_in_backward = True
        elif self.gradients_pending and any(group["params"] for group in optimizer.param_groups):
            self.facts.setdefault("optimizer", job_facts.optimizer_facts(optimizer))
            self._complete_step()

    def _complete_step(self) -> None:
        self.gradients_pending = self.stepped_in_backward = False
        self.completed += 1
        self.facts.setdefault("forwards_per_step", self.forwards)
        self.write("running")

    def enter(self, phase: Phase, step: int | None = None) -> None:
        """Close the current phase and begin another."""
        self._close_phase()
        self.phase, self.step = phase, self.step if step is None else step

    def _close_phase(self) -> None:
        for device, stats in self._all_stats():
            figures = self.phases.setdefault((self.step, self.phase, device), {})
            free, total = self.torch.cuda.mem_get_info(device)
            outside = total - free - _leaf(stats, "reserved_bytes.all.current")
            now = {name: _leaf(stats, path) for name, path in PEAKS.items()}
            now["peak_device_bytes"] = now["peak_reserved_bytes"] + outside
            now["allocated_bytes_at_end"] = _leaf(stats, "allocated_bytes.all.current")
            now["allocator_retries"] = stats.get("num_alloc_retries", 0)
            for name, value in now.items():
                keeps_last = name == "allocated_bytes_at_end"
                figures[name] = value if keeps_last else max(value, figures.get(name, 0))
            self._remember_peaks(device, stats)
            self.native_reset(device)

    def _all_stats(self) -> list[tuple[int, Mapping[str, Any]]]:
        """The native counters of the devices in use."""
        found = [(i, self.torch._C._cuda_memoryStats(i)) for i in range(self.torch.cuda.device_count())]
        return [(i, stats) for i, stats in found if _leaf(stats, "reserved_bytes.all.peak")]

    # Answers to the script

    def stats(self, device: Any = None) -> dict[str, Any]:
        """The answer to the script's `torch.cuda.memory_stats_as_nested_dict`: with the peaks since its own last reset."""
        found: dict[str, Any] = self.native_stats(device=device)
        kept = self.since_reset.get(self._index(device), {})
        for path, counter in _counters(found):
            counter["peak"] = max(counter["peak"], kept.get(path, 0))
        return found

    def reset_peaks(self, device: Any = None) -> None:
        """Answer the script's `torch.cuda.reset_peak_memory_stats`; the peak of the running phase is kept."""
        if self.torch.cuda.is_initialized():
            self._close_phase()
        self.since_reset.pop(self._index(device), None)
        self.native_reset(self._index(device))

    def _index(self, device: Any) -> int:
        return int(self.torch.cuda._utils._get_device_index(device, optional=True))

    def _remember_peaks(self, device: int, stats: Mapping[str, Any]) -> None:
        kept = self.since_reset.setdefault(device, {})
        for path, counter in _counters(stats):
            kept[path] = max(kept.get(path, 0), counter["peak"])

    # Results

    def after_out_of_memory(self, device: int, requested: int, capacity: int, free: int) -> None:
        """Called when an allocation fails: note the request and its place in the script, and write a snapshot of the first failure."""
        stats = self.torch._C._cuda_memoryStats(device)
        found: dict[str, Any] = {
            "device": device, "requested_bytes": requested, "free_bytes": free, "gpu_memory_bytes": capacity,
            "allocated_bytes": _leaf(stats, "allocated_bytes.all.current"),
            "reserved_bytes": _leaf(stats, "reserved_bytes.all.current"),
            "step": self.step, "phase": self.phase, "frames": _user_frames(),
        }  # fmt: skip
        if "optimizer" not in self.facts:
            made = [each for each in gc.get_objects() if isinstance(each, self.torch.optim.Optimizer)]
            self.facts |= {"optimizer": job_facts.optimizer_facts(made[0])} if made else {}
        if not self.out_of_memory:
            path = self.folder / f"out-of-memory-{os.getpid()}.pickle"
            self.torch.cuda.memory._dump_snapshot(str(path))
            found["snapshot"] = str(path)
        self.out_of_memory.append(found)
        self.write("running")

    def finish(self) -> None:
        """Write the results and exit the process with status 0. Every rank does so after the same step."""
        self._end("completed")
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)

    def write_at_exit(self) -> None:
        if self.torch.cuda.is_initialized() and not _is_forked_worker(self.torch):
            self._end("failed" if self.error else "completed")

    def _end(self, status: str) -> None:
        self._close_phase()
        if self.snapshot:
            self.torch.cuda.memory._dump_snapshot(str(self.folder / f"snapshot-{self.rank()}.pickle"))
        self.write(status, timeline(self.torch, self.alive_before_history) if self.history_runs else [])

    def rank(self) -> int:
        distributed = self.torch.distributed
        if distributed.is_available() and distributed.is_initialized():
            return int(distributed.get_rank())
        return int(os.environ.get("RANK", "0"))

    def write(self, status: str, points: list[list[int]] | None = None) -> None:
        """Write the file of this process. It is replaced as a whole, so that a killed process leaves a complete one."""
        torch = self.torch
        found = {
            "rank": self.rank(),
            "world_size": int(os.environ.get("WORLD_SIZE", "1")),
            "pid": os.getpid(),
            "status": status,
            "error": self.error,
            "steps": self.completed,
            "seconds": time.monotonic() - self.started,
            "torch": torch.__version__,
            "gpu_memory_bytes": torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory,
            "phases": [
                {"step": step, "phase": phase, "device": device, **figures}
                for (step, phase, device), figures in self.phases.items()
            ],
            "out_of_memory": self.out_of_memory,
            "timeline": points or [],
            "decisions": decisions(),
            "job": self.facts,
        }
        path = self.folder / f"process-{os.getpid()}.json"
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps(found))
        temporary.replace(path)


def _counters(stats: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], dict[str, int]]]:
    """The counters of PyTorch's nested statistics that have a peak, with their paths."""
    for name, value in stats.items():
        if isinstance(value, dict):
            if "peak" in value:
                yield (*path, name), value
            else:
                yield from _counters(value, (*path, name))


def _leaf(stats: Mapping[str, Any], path: str) -> int:
    name, pool, key = path.split(".")
    return int(stats.get(name, {}).get(pool, {}).get(key, 0))


def _is_forked_worker(torch: ModuleType) -> bool:
    """Whether this is a child of the process that initialized CUDA, such as a worker of a DataLoader."""
    return bool(torch.cuda._is_in_bad_fork())


def _user_frames() -> list[str]:
    """The 12 innermost frames of the current call, innermost first, without those of this package and of module calls."""
    left_out = ("/rehearsal/inside/", "/torch/nn/modules/module.py")
    frames = [f for f in reversed(traceback.extract_stack()) if not any(part in f.filename for part in left_out)]
    return [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in frames[:12]]


def install(torch: ModuleType) -> Meter | None:
    """Meter this process if a rehearsal asked for it, and return the meter. Called after `import torch`."""
    folder = os.environ.get("REHEARSAL_FOLDER")
    if folder is None:
        return None
    meter = Meter(
        torch,
        Path(folder),
        steps=int(os.environ.get("REHEARSAL_STEPS", "0")),
        snapshot=os.environ.get("REHEARSAL_SNAPSHOT") == "1",
    )
    meter.install()
    return meter
