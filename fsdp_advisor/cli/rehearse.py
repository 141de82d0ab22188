"""`fsdp-advisor rehearse`: run a training command unchanged on simulated GPUs and report the memory that it uses."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

from fsdp_advisor.cli.options import FileOptions
from fsdp_advisor.cli.output import as_json
from fsdp_advisor.job.choices import MAX_GPUS
from fsdp_advisor.job.fields import Rule

_rule = partial(Rule, group="Rehearsal")


@dataclass(frozen=True, kw_only=True)
class RehearseOptions(FileOptions):
    """Options of `rehearse`."""

    gpu: Annotated[
        str, Rule(about="the GPU to simulate: a name of `fsdp-advisor gpus`", group="Hardware", metavar="NAME")
    ] = "H100-80GB"
    gpus: Annotated[int, Rule(about="the total number of GPUs", group="Hardware", ge=1, le=MAX_GPUS)] = 1
    nnodes: Annotated[int, Rule(about="the number of nodes", group="Hardware", ge=1, le=MAX_GPUS)] = 1
    steps: Annotated[
        int,
        _rule(about="the optimizer steps after which the script is ended; 0 runs it to its end", ge=0),
    ] = 3
    ranks: Annotated[
        tuple[int, ...],
        _rule(
            about="the ranks to run, each alone, with the others answered in their place; rank 0 of 1024 is one process",
            default="all",
            metavar="N",
            ge=0,
        ),
    ] = ()
    empty_weights: Annotated[
        bool,
        _rule(about="build models from their configurations instead of loading weights"),
    ] = False
    random_data: Annotated[bool, _rule(about="random tokens instead of data sets")] = False
    timeout: Annotated[float, _rule(about="end the command after this time", metavar="SECONDS", ge=1)] = 1800.0
    snapshot: Annotated[
        Path | None,
        _rule(
            about="a folder for an allocator snapshot per rank, for `diagnose` and pytorch.org/memory_viz",
            metavar="DIR",
        ),
    ] = None
    predict: Annotated[bool, _rule(about="show the estimate of the job too")] = True
    json: Annotated[bool, Rule(about="write JSON")] = False
    quiet: Annotated[bool, Rule(about="do not show the output of the command")] = False


def rehearse(options: RehearseOptions, command: tuple[str, ...]) -> int:
    """Run a command such as `torchrun train.py` unchanged on simulated GPUs, and report the peaks of its ranks.

    The command runs on PyTorch's CUDA build. CUDA's libraries are replaced: memory is counted, kernels do nothing. The command's
    output goes to standard error. Exit status: 0 the steps completed, 1 out of memory, 2 a failure of the rehearsal, otherwise
    the command's own.
    """
    from fsdp_advisor.rehearsal.rehearse import Settings
    from fsdp_advisor.rehearsal.rehearse import rehearse as run
    from fsdp_advisor.rehearsal.text import rehearsal_json, rehearsal_text

    destination = options.destination
    destination.check()
    found = run(
        command,
        Settings(
            gpu=options.gpu, gpus=options.gpus, nnodes=options.nnodes, steps=options.steps, timeout_s=options.timeout,
            snapshot=options.snapshot, ranks=options.ranks, empty_weights=options.empty_weights,
            random_data=options.random_data, predict=options.predict, quiet=options.quiet,
        ),
    )  # fmt: skip
    destination.write(as_json(rehearsal_json(found)) if options.json else rehearsal_text(found, destination.screen()))
    return found.exit_status
