"""The types of an export target and of its output."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from fsdp_advisor.export.constants import Consumer
from fsdp_advisor.export.job import Job
from fsdp_advisor.job.choices import Framework
from fsdp_advisor.job.plan import Plan
from fsdp_advisor.job.request import EstimateRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """A file for a consumer. `usage` is the line that uses it; `notes` say what the file cannot express."""

    target: str
    file_name: str
    media_type: str
    text: str
    usage: str
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A consumer: its name, its file, which jobs it supports, and the function that writes the file.

    - `unsupported(job)`: why the consumer cannot train the job with an unpacked base, as the end of the sentence "NAME
      cannot do this: ..."; None if it can.
    - `write(job)`: the text of the file, and notes.
    - `usage(job, file)`: the line that uses the file. It is a shell command if `command` is true.
    - `consumer`: the library whose training loop a bundle runs; None if it is that of the estimate.
    - `backend`: the only backend the consumer has, where `--backend auto` would choose another; else None.
    - `compiles`: what the file lets torch.compile compile: nothing; the whole model or accelerate's regions; the whole model or layers.
    - `converts`: whether the file converts linear layers to fp8.
    - `tiles`: whether the file can set feed-forward networks in shards.
    - `framework`: the framework whose behaviour is estimated for this consumer.
    - `fixes(request)`: options that the consumer sets to these values itself. They are estimated if the request does not give them.
    """

    name: str
    description: str
    file_name: str
    media_type: str
    unsupported: Callable[[Job], str | None]
    write: Callable[[Job], tuple[str, tuple[str, ...]]]
    usage: Callable[[Job, str], str]
    consumer: Consumer | None
    backend: str | None = None
    framework: Framework = "torch"
    fixes: Callable[[EstimateRequest], Mapping[str, Any]] = lambda request: {}
    compiles: Literal["none", "regions", "any"] = "none"
    converts: bool = False
    tiles: bool = False
    command: bool = True

    def limit(self, job: Job) -> str | None:
        """Why the consumer cannot train the job; None if it can."""
        if job.adaptation.packed_by:
            return (
                f"no exported file loads a {job.adaptation.packed_by} checkpoint with gptqmodel's kernels for training"
            )
        if limit := self._compile_limit(job.plan):
            return limit
        if job.plan.fp8 != "none" and not self.converts:
            return "its file does not convert linear layers to fp8 by torchao; use the target fsdp2 or ddp"
        if job.plan.tiled_mlp != "none" and not self.tiles:
            return "its file does not tile feed-forward networks; use the target fsdp2, ddp or axolotl"
        return self.unsupported(job)

    def _compile_limit(self, plan: Plan) -> str | None:
        if self.compiles == "any" or plan.compile == "none":
            return None
        if self.compiles == "none" or (plan.compile == "layer" and not plan.uses_accelerate):
            what = "layers" if plan.compile == "layer" else "model"
            return f"its file does not compile the {what}; use the target fsdp2 or ddp"
        if plan.memory_budget != 1:
            return "its file does not set the compiler's memory budget; use the target fsdp2 or ddp"
        return None

    def line(self, job: Job, file: str) -> str:
        """The line that uses the file; a shell command is preceded by the job's environment variables."""
        usage = self.usage(job, file)
        return with_environment(job, usage) if self.command else usage

    def behaves_as(self, plan: Plan) -> Framework:
        """The framework whose behaviour the consumer has for this plan.

        Plain PyTorch and DeepSpeed's own training loop count as equal, because `torch` stands for both in estimates.
        """
        return plan.framework if {self.framework, plan.framework} == {"deepspeed", "torch"} else self.framework


def with_environment(job: Job, command: str) -> str:
    """A shell command preceded by the assignments of the job's environment variables."""
    return " ".join([*(f"{name}={shlex.quote(value)}" for name, value in job.environment.items()), command])
