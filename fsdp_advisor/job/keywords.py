"""The fields of a request as typed keyword arguments: for type checkers, `help()` and completion.

Type checkers read the TypedDicts. Python and notebooks read the signature, which is made from the fields themselves.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, Literal, Protocol, TypedDict, TypeVar, get_type_hints

from fsdp_advisor.job.adapter_fields import QuantStorage, QuantType, StoredDtype
from fsdp_advisor.job.choices import (
    Attention,
    Backend,
    BackwardPrefetch,
    Checkpointing,
    Compile,
    ExpertsImplementation,
    Find,
    Fp8,
    Framework,
    Loss,
    Offload,
    OffloadDevice,
    OptimizerName,
    Packing,
    Precision,
    StateDictType,
    Strategy,
    TrainingMethod,
    TrainingTask,
    Wrap,
)
from fsdp_advisor.job.evaluation_fields import EvalStrategy
from fsdp_advisor.job.fields import fields_of
from fsdp_advisor.job.generation_fields import VllmMode
from fsdp_advisor.job.request import EstimateRequest

F = TypeVar("F", bound=Callable[..., object])


class RecordedModule(Protocol):
    """The type of `record_module`'s result."""

    def tape(self, key: Any) -> Any: ...


class _Options(TypedDict, total=False):
    """The fields that an estimate and a search read in the same way. `Field.read` also takes text for numbers."""

    model: str | float | RecordedModule
    gpus: int
    nnodes: int
    gpu: str | None
    interconnect: str | None
    strategy: Literal[Strategy, "all"]
    backend: Literal[Backend, "auto"]
    precision: Precision
    optim: OptimizerName
    optim_args: str | None
    optim_target_modules: str | None
    seq_len: int | None
    attention: Attention
    backward_prefetch: BackwardPrefetch
    reserved: bool
    allocator_conf: str | None
    host_memory: int | str | None
    framework: Framework
    wrap: Wrap
    forward_prefetch: bool
    use_orig_params: bool
    reshard_after_forward: str
    save_only_model: bool
    state_dict_type: StateDictType
    loss: Loss
    use_liger_kernel: bool
    compile: Compile
    memory_budget: float
    cuda_graphs: bool
    fp8: Fp8
    tiled_mlp: str
    experts_implementation: ExpertsImplementation
    expert_imbalance: float
    kernel_packages: str
    ignored_labels: float
    packing: Packing
    padding_free: bool
    padding_fraction: float
    images_per_sample: int
    image_size: str | None
    image_max_pixels: int | None
    task: TrainingTask
    precompute_ref_log_probs: bool
    router_aux_loss_coef: float | None
    num_generations: int
    max_completion_length: int
    beta: float
    num_iterations: int
    steps_per_generation: int | None
    use_vllm: bool
    vllm_mode: VllmMode
    vllm_gpu_memory_utilization: float
    vllm_enable_sleep_mode: bool
    vllm_tensor_parallel_size: int
    vllm_max_model_length: int | None
    eval_strategy: EvalStrategy
    per_device_eval_batch_size: int
    compute_metrics: bool
    prediction_loss_only: bool
    eval_accumulation_steps: int | None
    eval_samples: int | None
    activation_offload: bool
    global_batch_size: int | None
    dtype: StoredDtype
    zero_buckets: str | None
    use_peft: bool
    lora_r: int
    lora_alpha: int
    lora_dropout: float
    lora_target_modules: str | None
    lora_target_parameters: str | None
    lora_modules_to_save: str | None
    use_dora: bool
    use_rslora: bool
    lora_kernels: str
    peft_config: str | Path | Mapping[str, Any] | None
    freeze: str | Sequence[str]
    load_in_4bit: bool
    load_in_8bit: bool
    bnb_4bit_quant_type: QuantType
    use_bnb_nested_quant: bool
    bnb_4bit_quant_storage: QuantStorage
    quantize_moe_experts: bool


class EstimateOptions(_Options, total=False):
    """The keyword arguments of `estimate` and `export`: the fields of `EstimateRequest`."""

    offload: Offload
    offload_device: OffloadDevice
    micro_batch_size: int
    gradient_accumulation_steps: int
    activation_checkpointing: Checkpointing


class RecommendOptions(_Options, total=False):
    """The keyword arguments of `recommend`: the fields of `RecommendRequest`."""

    offload: Literal[Offload, "auto"]
    offload_device: Literal[OffloadDevice, "auto"]
    micro_batch_size: int | None
    gradient_accumulation_steps: int | None
    activation_checkpointing: Checkpointing
    find: Find | None
    method: TrainingMethod
    thorough: bool
    margin: float | str
    tokens: float | str | None
    price: float | None


def with_signature_of(kind: type[EstimateRequest]) -> Callable[[F], F]:
    """A decorator that shows the fields of `kind` in place of `**options` in a function's signature."""
    hints = get_type_hints(kind)
    defaults = {field.name: field.default for field in fields(kind) if field.default is not MISSING}
    shown = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=defaults.get(name, inspect.Parameter.empty),
            annotation=hints[name],
        )
        for name, field in fields_of(kind).items()
        if not field.rule.hidden
    ]

    def decorate(function: F) -> F:
        whole = inspect.signature(function)
        *own, _ = whole.parameters.values()  # drop **options, the last one
        positional = [p for p in own if p.kind is not inspect.Parameter.KEYWORD_ONLY]
        keywords = [p for p in own if p.kind is inspect.Parameter.KEYWORD_ONLY]
        signature = whole.replace(parameters=[*positional, *shown, *keywords])
        setattr(function, "__signature__", signature)  # noqa: B010  # mypy: functions declare no such attribute
        return function

    return decorate
