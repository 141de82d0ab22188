"""What an export is made from, what it becomes, and what every consumer has to say about itself."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from fsdp_advisor.job.plan import Plan, refusal
from fsdp_advisor.policies.optimizers import optimizer_named
from fsdp_advisor.policies.optimizers.interface import NamedOptimizer, Refusal
from fsdp_advisor.report import Report, StrategyEstimate
from fsdp_advisor.units import format_gib, format_tokens

VERSIONS = {
    "torch": "2.13.0",
    "transformers": "5.23.0",
    "accelerate": "1.15.0",
    "deepspeed": "0.19.8",
    "axolotl": "0.18.0",
}
"""What the exports were read in, loaded by and (axolotl apart, whose published schema was read) run with."""

ALLOCATOR_VARIABLE = "PYTORCH_ALLOC_CONF"

WEIGHTS = {"fp32": "float32", "bf16": "bfloat16", "bf16-mixed": "float32", "fp16-mixed": "float32"}
"""The dtype in which the model is handed to PyTorch's engines."""

PEAKS = {
    "peak_device_bytes": "of the device's memory",
    "peak_reserved_bytes": "reserved by the allocator",
    "peak_allocated_bytes": "allocated",
    "peak_tensor_bytes": "in tensors",
}
"""A report's figures of the peak, the most complete first, and how the header calls them."""


FRAMEWORKS = {"accelerate": "accelerate", "trainer": "the Trainer"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One plan for one model on one kind of GPU, and what was predicted of it.

    `task` is the profile's; a bare parameter count has none and no layers. `peaks` holds the figures of PEAKS that are known.
    `environment` are the variables to launch it with, `not_modelled` what the figures leave out.
    """

    plan: Plan
    label: str
    model_name: str
    task: str | None
    layer_classes: tuple[str, ...]
    largest_parameter_elements: int | None
    gpu_name: str
    gpu_memory_bytes: int
    peaks: dict[str, int]
    host_bytes_per_node: int
    hidden_size: int | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    not_modelled: tuple[str, ...] = ()

    @classmethod
    def of(cls, report: Report, estimate: StrategyEstimate, environment: Mapping[str, str] | None = None) -> Job:
        """The job of one of a report's rows; `environment` as the request's `allocator_conf` says, unless given."""
        figures = estimate.as_dict()
        conf = report.request.allocator_conf
        asked = {ALLOCATOR_VARIABLE: conf} if conf else {}
        return cls(
            plan=estimate.plan,
            label=estimate.label,
            model_name=report.model_name,
            task=report.task,
            layer_classes=report.layer_classes,
            largest_parameter_elements=report.largest_parameter_elements,
            gpu_name=report.gpu_name,
            gpu_memory_bytes=report.gpu_memory_bytes,
            peaks={name: figures[name] for name in PEAKS if figures.get(name) is not None},
            host_bytes_per_node=estimate.host_bytes_per_node,
            hidden_size=report.hidden_size,
            environment=asked if environment is None else environment,
            not_modelled=tuple(item.partition(": ")[2] or item for item in estimate.not_modelled),
        )

    @property
    def peak(self) -> str | None:
        """The name of the most complete figure that is known; None where no peak is."""
        return next((name for name in PEAKS if name in self.peaks), None)

    @property
    def allocated(self) -> str | None:
        """The name of the figure to hold against `torch.cuda.max_memory_allocated`."""
        return next((name for name in ("peak_allocated_bytes", "peak_tensor_bytes") if name in self.peaks), None)

    @property
    def margin(self) -> float | None:
        """The part of the GPU's memory that the predicted peak leaves; negative where it does not fit."""
        return None if self.peak is None else 1 - self.peaks[self.peak] / self.gpu_memory_bytes

    @property
    def title(self) -> str:
        plan = self.plan
        nodes = f" on {plan.nnodes} nodes" if plan.nnodes > 1 else ""
        gpus = f"{plan.world_size} GPUs" if plan.world_size > 1 else "1 GPU"
        return f"{self.model_name}: {self.what}, {gpus}{nodes}, {plan.precision}"

    @property
    def what(self) -> str:
        """The strategy, and the backend where it does not go without saying."""
        return self.label if self.plan.backend == "ddp" else f"{self.label} ({self.plan.backend})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """A file for a consumer. `usage` is the line that uses it, `notes` say what the file cannot say by itself."""

    target: str
    file_name: str
    media_type: str
    text: str
    usage: str
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A consumer: what it is called, what it reads, what it cannot do and how its file is written.

    `cannot(job)` is the reason, as the end of the sentence "NAME cannot do this: ...", or None. `write(job)` gives the text and
    the notes, `usage(job, file)` the line that uses the file, which is a `command` of the shell or not. `backend` is the only one
    it has, where `--backend auto` would choose others; `framework` whose behaviour is estimated for it.
    """

    name: str
    description: str
    file_name: str
    media_type: str
    checked: tuple[str, ...]
    cannot: Callable[[Job], str | None]
    write: Callable[[Job], tuple[str, tuple[str, ...]]]
    usage: Callable[[Job, str], str]
    backend: str | None = None
    framework: str = "torch"
    command: bool = True

    def line(self, job: Job, file: str) -> str:
        """The line that uses the file, with the variables that it needs."""
        usage = self.usage(job, file)
        return with_environment(job, usage) if self.command else usage

    def behaves_as(self, plan: Plan) -> str:
        """The framework that trains the plan: by itself DeepSpeed does as it is estimated in plain PyTorch."""
        return plan.framework if {self.framework, plan.framework} == {"deepspeed", "torch"} else self.framework


def header(job: Job, *packages: str) -> list[str]:
    """The lines that open an export: the job, its batch, the predicted peak with the margin, and the versions checked against."""
    plan = job.plan
    steps, ranks = plan.gradient_accumulation_steps, plan.world_size
    batch = f"micro-batch {plan.micro_batch_size} x accumulation {steps} x ranks {ranks}"
    lines = [job.title, f"Batch: {batch} = {global_batch_size(plan)}, each of {format_tokens(plan.seq_len)}."]
    lines.append(_prediction(job))
    if job.environment:
        lines.append(
            "Predicted with " + ", ".join(f"{k}={v}" for k, v in job.environment.items()) + " in the environment."
        )
    if plan.offload != "none":
        lines.append(f"Predicted host memory per node: {format_gib(job.host_bytes_per_node)}.")
    lines.append("Checked against " + ", ".join(f"{p} {VERSIONS[p]}" for p in packages) + ". Written by fsdp-advisor.")
    return [one_line(line) for line in lines]


def _prediction(job: Job) -> str:
    if job.peak is None or job.margin is None:
        return "Predicted peak: unknown."
    verdict = f"margin {100 * job.margin:.1f} %" if job.margin >= 0 else "it does not fit"
    peak, memory = format_gib(job.peaks[job.peak]), format_gib(job.gpu_memory_bytes)
    by = f" under {FRAMEWORKS[job.plan.framework]}" if job.plan.prepared else ""
    return f"Predicted peak per GPU{by}: {peak} {PEAKS[job.peak]}; {job.gpu_name} has {memory}, {verdict}."


def with_environment(job: Job, command: str) -> str:
    """A command of the shell with the variables before it."""
    return " ".join([*(f"{name}={shlex.quote(value)}" for name, value in job.environment.items()), command])


def comments(lines: list[str]) -> str:
    """The lines as comments of Python, YAML and shell."""
    return "".join(f"# {line}".rstrip() + "\n" for line in map(one_line, lines))


def one_line(text: str) -> str:
    """`text` without line breaks or anything else that does not print: a name from the network cannot leave its comment."""
    return "".join(c if c.isprintable() else "?" for c in " ".join(text.split()))


def global_batch_size(plan: Plan) -> int:
    return plan.micro_batch_size * plan.gradient_accumulation_steps * plan.world_size


def left_out(job: Job) -> list[str]:
    """What the predicted peak of a framework does not hold, as a note."""
    return ["not in the prediction: " + "; ".join(job.not_modelled)] if job.plan.prepared and job.not_modelled else []


# What several consumers cannot do, for the same reason


def refused(job: Job, framework: str) -> str | None:
    """What the framework itself fails at, whichever was estimated."""
    plan = job.plan
    named = optimizer_named(plan.optim).transformers
    if framework == "trainer" and isinstance(named, Refusal):
        return named.reason
    error = refusal(
        plan.strategy,
        plan.backend,
        framework=framework,
        wrap=plan.wrap,
        activation_checkpointing=plan.activation_checkpointing,
    )
    return str(error) if error is not None else None


def no_8bit_on_fsdp2(plan: Plan) -> str | None:
    """Why the optimizer cannot step FSDP2's parameters, None if it can."""
    refusal_of_optimizer = optimizer_named(plan.optim).fsdp2
    return refusal_of_optimizer.reason if refusal_of_optimizer and plan.backend == "fsdp2" else None


def transformers_optimizer(plan: Plan) -> NamedOptimizer:
    """The optimizer under transformers' name. ValueError where `refused` gives a reason."""
    named = optimizer_named(plan.optim).transformers
    if isinstance(named, Refusal):
        raise ValueError(named.reason)
    return named


def no_bf16_masters_on_the_host(plan: Plan) -> str | None:
    """Source: deepspeed/runtime/base_optimizer.py (0.19.8), ZeROOptimizer._configure_master_weights."""
    on_the_host = plan.backend == "deepspeed" and plan.offload != "none"
    if on_the_host and plan.precision == "bf16" and not optimizer_named(plan.optim).is_cpu_adam:
        return "DeepSpeed offloads bf16 master weights with AdamW alone"
    return None


def no_single_shard(plan: Plan) -> str | None:
    """Source: accelerate.parallelism_config.ParallelismConfig: replicas of a model that is not sharded are DDP's."""
    if plan.backend == "fsdp2" and plan.strategy == "hsdp" and plan.shard_degree == 1 < plan.replica_degree:
        return "replicas of one GPU each are DDP, not HSDP"
    return None
