"""The choice of the mode and the device in which a job is validated."""

from __future__ import annotations

from dataclasses import dataclass

from fsdp_advisor.errors import UsageError
from fsdp_advisor.job.compatibility import plans
from fsdp_advisor.job.plan import Plan
from fsdp_advisor.job.request import EstimateRequest
from fsdp_advisor.validation import machine
from fsdp_advisor.validation.choices import Device, Mode


@dataclass(frozen=True, slots=True)
class ModeChoice:
    """A mode, its device, and the reason as a sentence for the user."""

    mode: Mode
    device: Device
    reason: str


def best_mode(gpus: int, backend: str, *, gpus_here: int) -> ModeChoice:
    """The most realistic mode for a job of `gpus` ranks on a machine with `gpus_here` GPUs.

    >>> [best_mode(8, "fsdp2", gpus_here=n).mode for n in (0, 1, 8)]
    ['simulate', 'stand-in', 'measure']
    """
    if gpus_here == 0:
        return ModeChoice(
            "simulate", "cpu", "simulate: this machine has no GPU; PyTorch's own code runs on fake tensors"
        )
    available = f"{gpus_here} GPU{'s' if gpus_here > 1 else ''}"
    if gpus_here >= gpus:
        return ModeChoice("measure", "cuda", f"measure: this machine has {available}, enough for {gpus} real ranks")
    if backend == "deepspeed":
        return ModeChoice(
            "measure", "cuda", f"measure: DeepSpeed needs {gpus} real ranks, but this machine has {available}"
        )
    return ModeChoice("stand-in", "cuda", f"stand-in: this machine has {available}; one of them plays rank 0 of {gpus}")


def choose_mode(
    plan: Plan, mode: Mode | None = None, device: Device | None = None, *, several_processes: bool = False
) -> ModeChoice:
    """The requested mode and device, or else the best mode and the mode's own device.

    `several_processes`: the user has started the ranks, or starts this command on several nodes. Only `measure` can use them;
    raises UsageError for another requested mode.
    """
    if mode is not None:
        if several_processes and mode != "measure":
            raise UsageError(
                f"--mode {mode} runs in one process",
                hint="start it without torchrun, srun and --rdzv-endpoint, or use --mode measure",
            )
        return ModeChoice(mode, device or ("cpu" if mode == "simulate" else "cuda"), f"{mode}, as requested")
    if several_processes and device != "cpu":
        return ModeChoice("measure", "cuda", "measure: real ranks, as started by the user or on several nodes")
    if not several_processes and plan.uses_accelerate and plan.backend != "deepspeed":
        return ModeChoice("simulate", "cpu", f"simulate: {plan.framework}'s own code runs on fake tensors")
    if device == "cpu":
        return ModeChoice("measure", "cpu", "measure: real ranks over gloo on the CPU, counting live bytes")
    return best_mode(plan.world_size, plan.backend, gpus_here=machine.gpu_count())


def one_request_per_strategy(request: EstimateRequest, seq_len: int) -> list[EstimateRequest]:
    """A request with a single strategy, backend and offload for each plan of `request`."""
    return [
        request.but(strategy=p.strategy, backend=p.backend, offload=p.offload) for p in plans(request, seq_len=seq_len)
    ]
