"""The input of every export: one plan, its model and GPU, and what was predicted for it."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from fsdp_advisor.engines.quantized_loading import scripts_load_on_host
from fsdp_advisor.errors import assert_never
from fsdp_advisor.export.constants import ALLOCATOR_VARIABLE, REGIONS_VARIABLE
from fsdp_advisor.job.adaptation import UNCHANGED, Adaptation, launched
from fsdp_advisor.job.command_line import options_of
from fsdp_advisor.job.plan import Plan
from fsdp_advisor.model.multimodal import ImageModel
from fsdp_advisor.report import Report
from fsdp_advisor.strategy_estimate import StrategyEstimate
from fsdp_advisor.units import format_gpus

PEAKS = {
    "peak_device_bytes": "of the device's memory",
    "peak_reserved_bytes": "reserved by the allocator",
    "peak_allocated_bytes": "allocated",
    "peak_tensor_bytes": "in tensors",
}
"""The peak figures of a report, most complete first, and how the header of an export describes them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One plan for one model on one type of GPU, with its predicted memory.

    A bare parameter count has no `task` and no `layer_classes`. `peaks` contains the known figures of PEAKS, in bytes.
    `host_bytes_per_node` is the host memory of training, `loading` the name and the host bytes of the method with which the exports load
    the model. `environment` has the variables to launch the job with. `options` are the words of a command line that makes exactly this
    plan. `not_modelled` lists what the figures leave out. `adaptation`: the changes made to the model before it trains, with the names of
    the modules that get adapters, which PEFT's default for the architecture gives if none were named. `searches_unused`: whether DDP has
    to search for parameters that get no gradient. `lora_kernels`: the parts of the model whose adapters run in axolotl's kernels.
    `image_model`: the model's type and parameters, if its samples have images.
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
    host_bytes_per_node: int | None
    hidden_size: int | None = None
    tokens_per_second_per_gpu: float | None = None
    step_seconds: float | None = None
    loading: tuple[str, int] | None = None
    options: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    not_modelled: tuple[str, ...] = ()
    adaptation: Adaptation = UNCHANGED
    searches_unused: bool = False
    lora_kernels: tuple[str, ...] = ()
    image_model: ImageModel | None = None

    @classmethod
    def of(cls, report: Report, estimate: StrategyEstimate, environment: Mapping[str, str] | None = None) -> Job:
        """The job of one row of a report. Without `environment`, it follows the request's `allocator_conf`."""
        figures = estimate.as_dict()
        if environment is None:
            conf = report.request.allocator_conf
            environment = {ALLOCATOR_VARIABLE: conf} if conf else {}
        conf = environment.get(ALLOCATOR_VARIABLE)
        if estimate.plan.framework in ("trainer", "trl", "llamafactory") and estimate.plan.compile == "layer":
            environment = {**environment, REGIONS_VARIABLE: "true"}
        return cls(
            plan=estimate.plan,
            label=estimate.label,
            model_name=report.weights,
            task=report.task,
            layer_classes=report.layer_classes,
            image_model=report.image_model,
            largest_parameter_elements=report.largest_parameter_elements,
            gpu_name=report.gpu_name,
            gpu_memory_bytes=report.gpu_memory_bytes,
            peaks={name: figures[name] for name in PEAKS if figures.get(name) is not None},
            host_bytes_per_node=estimate.host_bytes_per_node,
            loading=_loading(estimate, quantized=bool(_adaptation(report).quantization)),
            hidden_size=report.hidden_size,
            tokens_per_second_per_gpu=figures["tokens_per_second_per_gpu"],
            step_seconds=figures["step_seconds"],
            options=options_of(estimate.plan, report.request, gpu=report.gpu_name, allocator_conf=conf),
            environment=environment,
            adaptation=_adaptation(report),
            searches_unused=estimate.searches_unused,
            lora_kernels=estimate.lora_kernels,
            not_modelled=tuple(item.reason for item in estimate.omissions),
        )

    @property
    def peak(self) -> str | None:
        """The name of the most complete known peak figure; None if no peak is known."""
        return next((name for name in PEAKS if name in self.peaks), None)

    @property
    def allocated(self) -> str | None:
        """The name of the figure that corresponds to `torch.cuda.max_memory_allocated`; None if no peak is known."""
        return next((name for name in ("peak_allocated_bytes", "peak_tensor_bytes") if name in self.peaks), None)

    @property
    def wrapped_classes(self) -> tuple[str, ...]:
        """The layer classes that are FSDP units; empty if the wrap policy does not name classes."""
        policy = self.plan.wrap_policy
        return (
            policy.classes
            if policy.kind == "class"
            else self.layer_classes
            if policy.kind in ("layer", "every")
            else ()
        )

    @property
    def learning_rate(self) -> float:
        """A usual learning rate of supervised fine-tuning: of adapters, or of whole models.

        Source: LLaMA-Factory, examples/train_lora and examples/train_full.
        """
        return 1e-4 if self.adaptation.method else 1e-5

    @property
    def margin(self) -> float | None:
        """The fraction of the GPU's memory that stays free at the predicted peak; negative if the job does not fit."""
        return None if self.peak is None else 1 - self.peaks[self.peak] / self.gpu_memory_bytes

    @property
    def title(self) -> str:
        """One line that names the model, the strategy, the GPUs and the precision."""
        plan = self.plan
        nodes = f" on {plan.nnodes} nodes" if plan.nnodes > 1 else ""
        gpus = format_gpus(plan.world_size)
        return f"{self.model_name}: {self.strategy}, {gpus}{nodes}, {plan.precision}"

    @property
    def strategy(self) -> str:
        """The strategy's label, followed by the backend unless the backend is DDP."""
        return self.label if self.plan.backend == "ddp" else f"{self.label} ({self.plan.backend})"

    def command(self, target: str, output: str) -> str:
        """The `export` command that writes this plan for another target."""
        return shlex.join(("fsdp-advisor", "export", target, *self.options, "-o", output))

    @property
    def offloads_to_nvme(self) -> bool:
        """Whether the plan keeps optimizer state or parameters on NVMe."""
        return self.plan.offloads_to_nvme


def _adaptation(report: Report) -> Adaptation:
    found = launched(report.request).on_checkpoint(report.packed)
    modules = {"target_modules": list(report.adapted_modules)} if report.adapted_modules else {}
    return replace(found, peft={**found.peft, **modules}) if found.method == "LORA" else found


def _loading(estimate: StrategyEstimate, *, quantized: bool) -> tuple[str, int] | None:
    """(name of the method with which the exported files load the model, its host bytes per node); None if it is not known."""
    if estimate.job_peaks is None:
        return None
    methods = {method.way: method for method in estimate.job_peaks.load_methods}
    way = _load_way(estimate.plan, quantized=quantized)
    if way == "rank0" and estimate.plan.backend == "ddp":
        return way, methods["every_rank"].first_rank_host_bytes
    method = methods.get(way, estimate.job_peaks.load_method)
    return method.way, method.host_bytes_per_node


def _load_way(plan: Plan, *, quantized: bool) -> str:
    """The load method of the exported files.

    PyTorch's script reads the weights on rank 0, except for FSDP1, whose lines shard a loaded model. Files for accelerate, the Trainer,
    TRL and axolotl switch on `cpu_ram_efficient_loading` under FSDP. Under DDP, the scripts for accelerate and the Trainer name each
    rank's device, as axolotl does; TRL sets none. Source: trl 1.16, trainer/sft_trainer.py; axolotl 0.19, utils/config/__init__.py.
    """
    match plan.backend:
        case "ddp" if plan.framework == "torch":
            return "device_map" if quantized else "rank0"
        case "ddp":
            return "every_rank" if plan.framework == "trl" and plan.world_size > 1 and not quantized else "device_map"
        case "fsdp1" | "fsdp2" if quantized:
            return "every_rank" if scripts_load_on_host(plan) else "device_map"
        case "fsdp1" | "fsdp2":
            by_script = "rank0" if plan.backend == "fsdp2" else "every_rank"
            return "cpu_ram_efficient_loading" if plan.uses_accelerate else by_script
        case "deepspeed":
            return "zero_init" if plan.strategy == "zero3" else "every_rank"
        case _:
            return assert_never(plan.backend)
