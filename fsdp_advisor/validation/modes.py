"""Which rung this machine can climb for a job, and the runs that stand beside an estimate."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from fsdp_advisor.errors import AdvisorError, UsageError
from fsdp_advisor.job.plan import Plan, plans
from fsdp_advisor.job.request import EstimateRequest
from fsdp_advisor.report import Report
from fsdp_advisor.validation import machine
from fsdp_advisor.validation.campaign import case_of
from fsdp_advisor.validation.case import Device
from fsdp_advisor.validation.child_process import Ended
from fsdp_advisor.validation.external_launcher import started_rank
from fsdp_advisor.validation.records import Record, Rung


@dataclass(frozen=True, slots=True)
class Choice:
    """A rung, where it runs, and the sentence that says why."""

    rung: Rung
    device: Device
    why: str


def best_rung(gpus: int, backend: str, *, gpus_here: int) -> Choice:
    """The highest rung for a job of so many ranks on a machine with so many GPUs.

    >>> best_rung(8, "fsdp2", gpus_here=1).rung, best_rung(8, "fsdp2", gpus_here=8).rung, best_rung(8, "ddp", gpus_here=0).rung
    ('stand-in', 'measure', 'simulate')
    """
    if gpus_here == 0:
        return Choice(
            "simulate", "cpu", "simulate: this machine has no GPU, so PyTorch's own code runs on fake tensors"
        )
    many = f"{gpus_here} GPU{'s' if gpus_here > 1 else ''}"
    if gpus_here >= gpus:
        return Choice("measure", "cuda", f"measure: this machine has {many}, enough for {gpus} real ranks")
    if backend == "deepspeed":
        return Choice(
            "measure", "cuda", f"measure: nothing can stand in for DeepSpeed's ranks, though there are but {many}"
        )
    return Choice("stand-in", "cuda", f"stand-in: this machine has {many}; one plays rank 0 of {gpus}")


def choose(plan: Plan, rung: Rung | None = None, device: Device | None = None, *, ranks: bool = False) -> Choice:
    """The rung asked for, else the best; on the device asked for, else the rung's own.

    `ranks`: the user has started the ranks, or nodes are to meet, neither of which anything but a measurement has a use for.
    """
    if ranks and device != "cpu" and rung is None:
        return Choice("measure", "cuda", "measure: real ranks, started by hand or on several nodes")
    if ranks and rung not in (None, "measure"):
        raise UsageError(
            f"{rung} runs in one process", hint="without torchrun, srun and --rdzv-endpoint, or --rung measure"
        )
    if rung is None and not ranks and plan.prepared and plan.backend != "deepspeed":
        return Choice("simulate", "cpu", f"simulate: {plan.framework}'s own code runs on fake tensors")
    if rung is None and device == "cpu":
        return Choice("measure", "cpu", "measure: real ranks over gloo on the CPU, counting live bytes")
    if rung is None:
        return best_rung(plan.world_size, plan.backend, gpus_here=machine.gpu_count())
    own: Device = "cpu" if rung == "simulate" else "cuda"
    return Choice(rung, device or own, f"{rung}, as asked for")


def single(request: EstimateRequest, seq_len: int) -> list[EstimateRequest]:
    """One request per strategy that the request means."""
    return [
        request.but(strategy=p.strategy, backend=p.backend, offload=p.offload) for p in plans(request, seq_len=seq_len)
    ]


def beside(
    report: Report, *, rung: Rung | None = None, device: Device | None = None, timeout_seconds: float | None = None,
    began: Callable[[int, int, Choice], None] | None = None,
) -> Iterator[tuple[Record, Ended]]:  # fmt: skip
    """For each estimate of a report, in its order, the best rung's record; what could not be run says why in its message.

    `began(index, total, choice)` is called before each. Raises MissingExtra without torch. A record's `measured` and `errors`
    are what `estimate --validate` shows beside the estimate.
    """
    from fsdp_advisor.validation import child_process, worker

    machine.require_torch()
    if started_rank() is not None:
        raise UsageError(
            "torchrun or srun has started several processes, and each would run every strategy",
            hint="fsdp-advisor validate --strategy S runs one on these ranks",
        )
    requests = single(report.request, report.seq_len)
    for index, (request, one) in enumerate(zip(requests, report.estimates, strict=True)):
        choice = choose(one.plan, rung, device)
        if began is not None:
            began(index, len(requests), choice)
        case = case_of(request, choice.rung, choice.device, timeout_seconds)
        try:
            found = worker.run(case)
        except AdvisorError as error:
            ended = Ended(**child_process.failure_of(error))
            found = worker.record_of(case, ended), ended
        yield found
        if found[0].outcome == "interrupted":
            raise KeyboardInterrupt
