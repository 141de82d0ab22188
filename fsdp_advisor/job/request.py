"""The job to estimate: its fields are the options of the command line, of the REST API, of the page and of `estimate()`."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, TypeVar

from fsdp_advisor.job import adapter_fields as adapters
from fsdp_advisor.job import batch_fields as batch
from fsdp_advisor.job import cluster_fields as cluster
from fsdp_advisor.job import evaluation_fields as evaluation
from fsdp_advisor.job import generation_fields as generation
from fsdp_advisor.job import sharding_fields as sharding
from fsdp_advisor.job import step_fields as step
from fsdp_advisor.job.choices import GPU_DEPENDENT
from fsdp_advisor.job.config_reading import ConfigReading
from fsdp_advisor.job.fields import Rule, fields_of
from fsdp_advisor.job.frameworks import options_of_framework


def uneven_nodes(gpus: int, nnodes: int) -> str | None:
    """An error text if the nodes do not have the same number of GPUs each, else None."""
    return f"gpus {gpus} is not divisible by nnodes {nnodes}" if gpus % nnodes else None


_HUB_ADDRESS = re.compile(
    r"(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/([\w.-]+(?:/[\w.-]+)?)/?(?:/(?:tree|blob|resolve|raw)/.*)?(?:[?#].*)?"
)


def hub_id(name: str) -> str:
    """The repository that an address of the Hugging Face hub shows; any other name unchanged.

    >>> hub_id("https://huggingface.co/Qwen/Qwen3-8B/tree/main"), hub_id("hf.co/gpt2"), hub_id("./models/gpt2")
    ('Qwen/Qwen3-8B', 'gpt2', './models/gpt2')
    """
    found = _HUB_ADDRESS.fullmatch(name)
    return found[1] if found else name


@dataclass(frozen=True, kw_only=True)
class EstimateRequest:
    """One job under one strategy, or under all of them.

    The class takes values of the right type and raises ValueError for others; `make_request` also reads text. `given` are
    the names of the fields that the user gave, even with the default's value; it is empty if the class was called directly.
    `assumed` are the names of those that were filled in because of the GPU (`assumptions.settled`). `configs` says which fields
    came from configuration files.
    """

    model: Annotated[
        str,
        Rule(
            about="the name of a catalogued model, a Hugging Face hub id, a directory or config.json, or a bare parameter "
            "count (7e9, 7B)",
            group="Model",
            metavar="MODEL",
            word=hub_id,
            example="a hub id without the address of the hub",
            min_length=1,
            max_length=4096,
        ),
    ]
    gpus: cluster.Gpus = 1
    nnodes: cluster.Nnodes = 1
    gpu: cluster.Gpu = None
    interconnect: cluster.Interconnect = None
    strategy: sharding.StrategyOption = "all"
    backend: sharding.BackendOption = "auto"
    offload: sharding.OffloadOption = "none"
    offload_device: sharding.OffloadDeviceOption = "cpu"
    precision: step.PrecisionOption = "bf16-mixed"
    optim: step.Optim = "adamw_torch_fused"
    optim_args: step.OptimArgs = None
    optim_target_modules: step.OptimTargetModules = None
    micro_batch_size: batch.MicroBatchSize = 1
    seq_len: batch.SeqLen = None
    gradient_accumulation_steps: batch.GradientAccumulationSteps = 1
    activation_checkpointing: step.ActivationCheckpointing = "none"
    attention: step.AttentionOption = "sdpa"
    backward_prefetch: sharding.BackwardPrefetchOption = "pre"
    reserved: Annotated[bool, Rule(about="without effect: the allocator is always simulated", hidden=True)] = False
    allocator_conf: cluster.AllocatorConf = None
    host_memory: cluster.HostMemory = None
    framework: sharding.FrameworkOption = "torch"
    wrap: sharding.WrapOption = "layer"

    loss: step.LossOption = "auto"
    use_liger_kernel: step.UseLigerKernel = False
    compile: step.CompileOption = "none"
    memory_budget: step.MemoryBudget = 1.0
    cuda_graphs: step.CudaGraphs = False
    fp8: step.Fp8Option = "none"
    tiled_mlp: step.TiledMlp = "none"
    experts_implementation: step.ExpertsImplementationOption = "grouped_mm"
    expert_imbalance: step.ExpertImbalance = 1.0
    kernel_packages: step.KernelPackages = "all"
    ignored_labels: batch.IgnoredLabels = 0.0
    packing: batch.PackingOption = "none"
    padding_free: batch.PaddingFree = False
    padding_fraction: batch.PaddingFraction = 0.0
    images_per_sample: batch.ImagesPerSample = 0
    image_size: batch.ImageSize = None
    image_max_pixels: batch.ImageMaxPixels = None
    task: step.Task = "sft"
    precompute_ref_log_probs: step.PrecomputeRefLogProbs = False
    router_aux_loss_coef: step.RouterAuxLossCoef = None
    num_generations: generation.NumGenerations = 8
    max_completion_length: generation.MaxCompletionLength = 512
    beta: generation.Beta = 0.0
    num_iterations: generation.NumIterations = 1
    steps_per_generation: generation.StepsPerGeneration = None
    use_vllm: generation.UseVllm = False
    vllm_mode: generation.VllmModeOption = "colocate"
    vllm_gpu_memory_utilization: generation.VllmGpuMemoryUtilization = 0.3
    vllm_enable_sleep_mode: generation.VllmEnableSleepMode = False
    vllm_tensor_parallel_size: generation.VllmTensorParallelSize = 1
    vllm_max_model_length: generation.VllmMaxModelLength = None
    eval_strategy: evaluation.EvalStrategyOption = "no"
    per_device_eval_batch_size: evaluation.PerDeviceEvalBatchSize = 8
    compute_metrics: evaluation.ComputeMetrics = False
    prediction_loss_only: evaluation.PredictionLossOnly = False
    eval_accumulation_steps: evaluation.EvalAccumulationSteps = None
    eval_samples: evaluation.EvalSamples = None
    activation_offload: step.ActivationOffload = False
    global_batch_size: batch.GlobalBatchSize = None
    forward_prefetch: sharding.ForwardPrefetch = False
    use_orig_params: sharding.UseOrigParams = True
    reshard_after_forward: sharding.ReshardAfterForward = "auto"
    save_only_model: step.SaveOnlyModel = False
    state_dict_type: sharding.StateDictTypeOption = "auto"
    dtype: adapters.Dtype = "auto"
    zero_buckets: sharding.ZeroBuckets = None

    use_peft: adapters.UsePeft = False
    lora_r: adapters.LoraR = 16
    lora_alpha: adapters.LoraAlpha = 32
    lora_dropout: adapters.LoraDropout = 0.0
    lora_target_modules: adapters.LoraTargetModules = None
    lora_target_parameters: adapters.LoraTargetParameters = None
    lora_modules_to_save: adapters.LoraModulesToSave = None
    use_dora: adapters.UseDora = False
    use_rslora: adapters.UseRslora = False
    lora_kernels: adapters.LoraKernels = "auto"
    peft_config: adapters.PeftConfig = None
    freeze: adapters.Freeze = ()
    load_in_4bit: adapters.LoadIn4bit = False
    load_in_8bit: adapters.LoadIn8bit = False
    bnb_4bit_quant_type: adapters.Bnb4bitQuantType = "nf4"
    use_bnb_nested_quant: adapters.UseBnbNestedQuant = False
    bnb_4bit_quant_storage: adapters.Bnb4bitQuantStorage = "uint8"
    quantize_moe_experts: adapters.QuantizeMoeExperts = False

    given: frozenset[str] = field(default=frozenset(), compare=False, repr=False)
    assumed: frozenset[str] = field(default=frozenset(), compare=False, repr=False)
    configs: tuple[ConfigReading, ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        for name, option in fields_of(type(self)).items():
            value = getattr(self, name)
            if option.many and isinstance(value, list):  # JSON has no tuples
                value = tuple(value)
                object.__setattr__(self, name, value)
            for each in value if option.many else (value,):
                expected = option.expected(each)
                if expected is not None:
                    raise ValueError(f"{name} must be {expected}, not {each!r}")
        uneven = uneven_nodes(self.gpus, self.nnodes)
        if uneven is not None:
            raise ValueError(uneven)

    def as_dict(self) -> dict[str, Any]:
        """The values of all fields by name, as a JSON object."""
        return {name: list(v) if isinstance(v, tuple) else v for name, v in self.values.items()}

    @property
    def values(self) -> dict[str, Any]:
        """The values of all fields by name."""
        return {name: getattr(self, name) for name in fields_of(type(self))}

    @property
    def changed(self) -> dict[str, Any]:
        """The values, by name, that differ from the defaults or were given although the GPU or the framework decides their default. They
        make the same request again.
        """
        fixed = self.given & {*GPU_DEPENDENT, *self.set_by_framework}
        known = fields_of(type(self))
        return {name: v for name, v in self.values.items() if v != known[name].default or name in fixed}

    @property
    def set_by_framework(self) -> dict[str, Any]:
        """The options that the framework sets if they are left open (`frameworks.options_of_framework`)."""
        return options_of_framework(self.framework, self.precision, in_4bit=self.load_in_4bit)

    def changed_among(self, names: Iterable[str]) -> list[str]:
        """Those of the fields `names` whose values differ from the defaults, in the order of `names`."""
        known = fields_of(type(self))
        return [name for name in names if getattr(self, name) != known[name].default]

    def but(self: AnyRequest, **changes: Any) -> AnyRequest:
        """A copy with other values for some fields, which then count as given."""
        return replace(self, **changes, given=self.given | set(changes), assumed=self.assumed - set(changes))


AnyRequest = TypeVar("AnyRequest", bound=EstimateRequest)
