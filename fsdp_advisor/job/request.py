"""The job to estimate: its fields are the options of the command line, of the REST API, of the page and of `estimate()`."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal, TypeVar

from fsdp_advisor.job import adapter_fields as adapters
from fsdp_advisor.job import evaluation_fields as evaluation
from fsdp_advisor.job import generation_fields as generation
from fsdp_advisor.job.checkpointing import CHECKPOINTING_EXAMPLE, SYNONYMS, read_checkpointing
from fsdp_advisor.job.choices import (
    DEFAULT_SEQ_LEN,
    GPU_DEPENDENT,
    MAX_BATCH,
    MAX_GPUS,
    MAX_SEQ_LEN,
    NEAREST_OPTIMIZERS,
    OPTIMIZER_SYNONYMS,
    OPTIMIZERS_NOT_MODELLED,
    STRATEGY_SYNONYMS,
    Attention,
    Backend,
    BackwardPrefetch,
    Checkpointing,
    Compile,
    ExpertsImplementation,
    Fp8,
    Framework,
    Loss,
    Offload,
    OffloadDevice,
    OptimizerName,
    Packing,
    Precision,
    Strategy,
    TrainingTask,
    Wrap,
    read_reshard,
    read_tiled_mlp,
)
from fsdp_advisor.job.config_reading import ConfigReading
from fsdp_advisor.job.fields import Rule, fields_of
from fsdp_advisor.job.images import read_image_size
from fsdp_advisor.job.projection import read_optim_args, read_target_modules
from fsdp_advisor.job.wrap_policy import WRAP_EXAMPLE, read_wrap
from fsdp_advisor.units import parse_bytes

OFFLOAD = Rule(
    about="the states that are kept in host memory; parameters means parameters, gradients and optimizer state",
    group="Strategy",
    synonyms={"full": "parameters", "all": "parameters", "params": "parameters", "false": "none", "no": "none"},
    elsewhere={"cpu": "it is what is offloaded: parameters or optimizer", "nvme": "offload_device nvme, with offload"},
)
OFFLOAD_DEVICE = Rule(about="the target of offload", group="Strategy")
MICRO_BATCH_SIZE = Rule(
    about="the number of sequences per rank and forward pass",
    group="Training",
    ge=1,
    le=MAX_BATCH,
    aliases=("per_device_train_batch_size",),
)
ACCUMULATION = Rule(
    about="the number of micro-batches per optimizer step",
    group="Training",
    ge=1,
    le=MAX_BATCH,
)
CHECKPOINTING = Rule(
    about="the layers that backward recomputes: none, full (all), reentrant (all, with use_reentrant), every-N (one of N), or "
    "selective (all, but the outputs of matrix products and attention are kept, as torchtitan's SelectiveAC keeps them)",
    group="Training",
    metavar="POLICY",
    max_length=32,
    synonyms=SYNONYMS,
    word=read_checkpointing,
    example=CHECKPOINTING_EXAMPLE,
)


def uneven_nodes(gpus: int, nnodes: int) -> str | None:
    """What is wrong if the nodes do not have the same number of GPUs each."""
    return f"gpus {gpus} is not divisible by nnodes {nnodes}" if gpus % nnodes else None


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
            min_length=1,
            max_length=4096,
        ),
    ]
    gpus: Annotated[int, Rule(about="the total number of ranks, one per GPU", group="Hardware", ge=1, le=MAX_GPUS)] = 1
    nnodes: Annotated[
        int,
        Rule(
            about="the number of nodes",
            group="Hardware",
            default="as many as the GPUs need at the usual number per node",
            ge=1,
            le=MAX_GPUS,
        ),
    ] = 1
    gpu: Annotated[
        str | None,
        Rule(
            about="the name of a GPU (case and punctuation are ignored: H100, rtx4090), or a memory size such as 24GiB",
            group="Hardware",
            metavar="GPU",
            default="the attached GPU, else H100-80GB",
            max_length=128,
        ),
    ] = None
    interconnect: Annotated[
        str | None,
        Rule(
            about="the network between nodes: a name (InfiniBand NDR, RoCE, EFA, 100GbE), or the rate of each GPU "
            "(400Gb/s, 50GB/s)",
            group="Hardware",
            metavar="NAME",
            default="usual for the GPU",
            max_length=128,
        ),
    ] = None
    strategy: Annotated[
        Literal[Strategy, "all"],
        Rule(
            about="the sharding strategy; FSDP's names work too: full_shard, shard_grad_op, hybrid_shard, no_shard",
            group="Strategy",
            synonyms=STRATEGY_SYNONYMS,
            elsewhere={
                "fsdp1": "strategy zero3 with backend fsdp1",
                "deepspeed": "strategy zero3 with backend deepspeed",
                "hybrid_shard_zero2": "strategy hsdp with reshard_after_forward false",
            },
            not_modelled=("tp", "pp", "cp", "ep", "megatron", "zero++"),
            nearest={"zero++": "zero3"},
        ),
    ] = "all"
    backend: Annotated[
        Literal[Backend, "auto"],
        Rule(
            about="the library that shards; auto is ddp for ddp, deepspeed for zero1 and for --offload optimizer, else fsdp2",
            group="Strategy",
            synonyms={"fsdp": "fsdp2", "ds": "deepspeed", "zero": "deepspeed"},
            not_modelled=("megatron", "xla", "colossalai"),
        ),
    ] = "auto"
    offload: Annotated[Offload, OFFLOAD] = "none"
    offload_device: Annotated[OffloadDevice, OFFLOAD_DEVICE] = "cpu"
    precision: Annotated[
        Precision,
        Rule(
            about="the precision of weights and computation",
            group="Training",
            default="bf16-mixed; fp16-mixed on a GPU without bf16",
            synonyms={
                "float32": "fp32",
                "tf32": "fp32",
                "bfloat16": "bf16",
                "bf16-true": "bf16",
                "32-true": "fp32",
                "fp16": "fp16-mixed",
                "float16": "fp16-mixed",
                "16-mixed": "fp16-mixed",
            },
            elsewhere=dict.fromkeys(
                ("fp8", "fp8-mixed"), "fp8 is an option by itself: fp8 tensorwise or rowwise, with precision bf16-mixed"
            ),
            not_modelled=("int8", "fp4"),
        ),
    ] = "bf16-mixed"
    optim: Annotated[
        OptimizerName,
        Rule(
            about="the optimizer, by its Hugging Face name",
            group="Training",
            synonyms=OPTIMIZER_SYNONYMS,
            elsewhere={"cpu_offload_optimizer": "offload optimizer, which is DeepSpeed's, with adamw_torch_fused"},
            nearest=NEAREST_OPTIMIZERS,
            not_modelled=OPTIMIZERS_NOT_MODELLED,
        ),
    ] = "adamw_torch_fused"
    optim_args: Annotated[
        str | None,
        Rule(
            about="the settings of GaLore and APOLLO: rank=128,update_proj_gap=200",
            group="Training",
            metavar="ARGS",
            max_length=256,
            word=read_optim_args,
            example="rank=64,update_proj_gap=100 (proj_type std, proj random, scale_type channel and any scale are modelled)",
        ),
    ] = None
    optim_target_modules: Annotated[
        str | None,
        Rule(
            about="the linear layers that GaLore and APOLLO project: parts of names separated by commas, or all-linear",
            group="Training",
            metavar="NAMES",
            default="all-linear",
            max_length=1024,
            word=read_target_modules,
            example="attn,mlp or all-linear",
        ),
    ] = None
    micro_batch_size: Annotated[int, MICRO_BATCH_SIZE] = 1
    seq_len: Annotated[
        int | None,
        Rule(
            about="the number of tokens per sequence",
            group="Training",
            ge=1,
            le=MAX_SEQ_LEN,
            default=f"{DEFAULT_SEQ_LEN}, or the model's maximum if smaller",
        ),
    ] = None
    gradient_accumulation_steps: Annotated[int, ACCUMULATION] = 1
    activation_checkpointing: Annotated[Checkpointing, CHECKPOINTING] = "none"
    attention: Annotated[
        Attention,
        Rule(
            about="the attention implementation",
            group="Training",
            synonyms={"flash": "flash_attention_2", "flash_attention": "flash_attention_2", "fa2": "flash_attention_2"},
            not_modelled=("flash_attention_3", "flex_attention"),
        ),
    ] = "sdpa"
    backward_prefetch: Annotated[
        BackwardPrefetch,
        Rule(
            about="the BackwardPrefetch of FSDP1",
            group="Strategy",
        ),
    ] = "pre"
    reserved: Annotated[bool, Rule(about="without effect: the allocator is always simulated", hidden=True)] = False
    allocator_conf: Annotated[
        str | None,
        Rule(
            about="the settings of PyTorch's caching allocator, as in PYTORCH_ALLOC_CONF: expandable_segments:True",
            group="Hardware",
            metavar="CONF",
            max_length=1024,
        ),
    ] = None
    host_memory: Annotated[
        int | None,
        Rule(
            about="the host memory of one node with its unit, such as 512GiB",
            group="Hardware",
            metavar="SIZE",
            default="unlimited",
            ge=2**30,
            le=2**60,
            parse=parse_bytes,
            example="512GiB",
        ),
    ] = None
    framework: Annotated[
        Framework,
        Rule(
            about="the library that prepares the model and runs the training loop",
            group="Strategy",
            synonyms={"pytorch": "torch", "transformers": "trainer", "hf_trainer": "trainer"},
            not_modelled=("lightning", "megatron", "nemo"),
        ),
    ] = "torch"
    wrap: Annotated[
        Wrap,
        Rule(
            about="what FSDP gathers together: layer, each layer; none, the whole model; size:N, modules of at least N parameters; "
            "class:A,B, layers of these classes; every:N, groups of N layers",
            group="Strategy",
            metavar="POLICY",
            max_length=256,
            word=read_wrap,
            example=WRAP_EXAMPLE,
        ),
    ] = "layer"

    loss: Annotated[
        Loss,
        Rule(
            about="the loss: auto, as the framework computes it; full, from all logits at once; chunked, in TRL's "
            "tiles or torchtitan's chunks; liger, by Liger's fused linear cross entropy; cce, by cut cross entropy",
            group="Training",
            synonyms={
                "chunked_nll": "chunked",
                "flce": "liger",
                "fused_linear_cross_entropy": "liger",
                "cut_cross_entropy": "cce",
            },
        ),
    ] = "auto"
    use_liger_kernel: Annotated[
        bool,
        Rule(
            about="Liger's kernels for norms, positions and feed-forward networks; with --loss auto also its loss, except with TRL, "
            "which keeps its own",
            group="Training",
        ),
    ] = False
    compile: Annotated[
        Compile,
        Rule(
            about="part of the model that torch.compile compiles: layer is each layer by itself, as in torchtitan",
            group="Training",
            synonyms={"layers": "layer", "block": "layer", "blocks": "layer", "regional": "layer", "regions": "layer"},
            not_modelled=("model", "whole", "true", "reduce-overhead", "max-autotune"),
        ),
    ] = "none"
    fp8: Annotated[
        Fp8,
        Rule(
            about="the recipe of torchao's float8 training, in which linear layers but the head multiply in fp8 if both dimensions are "
            "multiples of 16",
            group="Training",
            synonyms={"tensor": "tensorwise", "axiswise": "rowwise", "row": "rowwise"},
            not_modelled=("rowwise_with_gw_hp", "mxfp8", "blockwise", "delayed", "nvfp4"),
        ),
    ] = "none"
    tiled_mlp: Annotated[
        str,
        Rule(
            about="the shards of the sequence in which feed-forward networks run, one after the other, and again in backward: a number, or "
            "auto, a shard per as many tokens as the hidden size (axolotl: per 32,768 tokens)",
            group="Training",
            metavar="SHARDS",
            max_length=8,
            synonyms={"true": "auto", "yes": "auto", "false": "none", "no": "none"},
            word=read_tiled_mlp,
            example="auto, none or a number such as 8",
        ),
    ] = "none"
    experts_implementation: Annotated[
        ExpertsImplementation,
        Rule(
            about="the code for a mixture of experts: grouped_mm, one kernel for all experts; batched_mm, a copy of the weights for each "
            "token and expert; eager, a loop over the experts",
            group="Training",
        ),
    ] = "grouped_mm"
    expert_imbalance: Annotated[
        float,
        Rule(
            about="the tokens of the busiest expert as a multiple of the mean; the memory of eager alone depends on it",
            group="Training",
            ge=1,
            le=1000,
        ),
    ] = 1.0
    ignored_labels: Annotated[
        float,
        Rule(
            about="the fraction of the labels that is -100, such as those of prompts: 0.3; a chunked loss leaves them out",
            group="Training",
            ge=0,
            le=0.999,
        ),
    ] = 0.0
    packing: Annotated[
        Packing,
        Rule(
            about="rows without padding: bfd packs whole sequences, wrapped cuts sequences at the end of a row",
            group="Training",
            synonyms={"bfd_split": "bfd", "bfd_requeue": "bfd", "true": "bfd", "false": "none", "no": "none"},
        ),
    ] = "none"
    padding_free: Annotated[
        bool,
        Rule(
            about="make each micro-batch one row of tokens, without padding and mask",
            group="Training",
        ),
    ] = False
    padding_fraction: Annotated[
        float,
        Rule(
            about="the fraction of the tokens that is padding; speeds count only the others",
            group="Training",
            ge=0,
            le=0.99,
        ),
    ] = 0.0
    images_per_sample: Annotated[
        int,
        Rule(
            about="the number of images in each sample; their tokens are part of the sequence length",
            group="Training",
            ge=0,
            le=1024,
        ),
    ] = 0
    image_size: Annotated[
        str | None,
        Rule(
            about="the size of the images in pixels, as WIDTHxHEIGHT, before the processor resizes or tiles them",
            group="Training",
            metavar="SIZE",
            max_length=16,
            default="the model's own, if it has one",
            word=read_image_size,
            example="1024x768, or 448 for a square",
        ),
    ] = None
    image_max_pixels: Annotated[
        int | None,
        Rule(
            about="the number of pixels to which the processor resizes larger images (Qwen-VL, GLM-V)",
            group="Training",
            ge=1,
            le=2**28,
            default="as in the checkpoints of the type",
        ),
    ] = None
    task: Annotated[
        TrainingTask,
        Rule(
            about="the trainer of TRL: sft; dpo or reward, whose micro-batch counts pairs of sequences; kto; or grpo",
            group="Training",
        ),
    ] = "sft"
    precompute_ref_log_probs: Annotated[
        bool,
        Rule(
            about="dpo and kto: compute the reference's log-probabilities before training, so that no step needs it",
            group="Training",
        ),
    ] = False
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
    eval_strategy: evaluation.EvalStrategyOption = "no"
    per_device_eval_batch_size: evaluation.PerDeviceEvalBatchSize = 8
    compute_metrics: evaluation.ComputeMetrics = False
    prediction_loss_only: evaluation.PredictionLossOnly = False
    eval_accumulation_steps: evaluation.EvalAccumulationSteps = None
    eval_samples: evaluation.EvalSamples = None
    activation_offload: Annotated[
        bool,
        Rule(
            about="keep activations in pinned host memory until backward: the inputs of checkpointed layers; with trl what its "
            "activation_offloading takes; without checkpointing all saved tensors",
            group="Training",
        ),
    ] = False
    global_batch_size: Annotated[
        int | None,
        Rule(
            about="the number of sequences per optimizer step over all ranks; accumulation follows from it, and in a search the "
            "micro-batch too",
            group="Training",
            ge=1,
            le=MAX_BATCH * MAX_GPUS,
        ),
    ] = None
    forward_prefetch: Annotated[
        bool,
        Rule(
            about="all-gather the next layer before a layer's forward: FSDP1's forward_prefetch, FSDP2's "
            "set_modules_to_forward_prefetch",
            group="Strategy",
        ),
    ] = False
    reshard_after_forward: Annotated[
        str,
        Rule(
            about="whether FSDP frees gathered parameters after forward: auto follows the strategy, false keeps them (with hsdp this "
            "is HYBRID_SHARD_ZERO2), a number shards them over this many ranks (FSDP2)",
            group="Strategy",
            metavar="RESHARD",
            max_length=16,
            word=read_reshard,
            example="auto, false or a number such as 8",
        ),
    ] = "auto"
    save_only_model: Annotated[
        bool,
        Rule(
            about="save the weights alone, without the optimizer state that a restart needs",
            group="Training",
        ),
    ] = False
    dtype: adapters.Dtype = "auto"

    use_peft: adapters.UsePeft = False
    lora_r: adapters.LoraR = 16
    lora_alpha: adapters.LoraAlpha = 32
    lora_dropout: adapters.LoraDropout = 0.0
    lora_target_modules: adapters.LoraTargetModules = None
    lora_target_parameters: adapters.LoraTargetParameters = None
    lora_modules_to_save: adapters.LoraModulesToSave = None
    use_dora: adapters.UseDora = False
    use_rslora: adapters.UseRslora = False
    peft_config: adapters.PeftConfig = None
    freeze: adapters.Freeze = ()
    load_in_4bit: adapters.LoadIn4bit = False
    load_in_8bit: adapters.LoadIn8bit = False
    bnb_4bit_quant_type: adapters.Bnb4bitQuantType = "nf4"
    use_bnb_nested_quant: adapters.UseBnbNestedQuant = False
    bnb_4bit_quant_storage: adapters.Bnb4bitQuantStorage = "uint8"

    given: frozenset[str] = field(default=frozenset(), compare=False, repr=False)
    assumed: frozenset[str] = field(default=frozenset(), compare=False, repr=False)
    configs: tuple[ConfigReading, ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        for name, option in fields_of(type(self)).items():
            value = getattr(self, name)
            if option.many and isinstance(value, list):  # as JSON has it
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
        """The values of all fields by name, as JSON has them."""
        return {name: list(v) if isinstance(v, tuple) else v for name, v in self.values.items()}

    @property
    def values(self) -> dict[str, Any]:
        """The values of all fields by name."""
        return {name: getattr(self, name) for name in fields_of(type(self))}

    @property
    def changed(self) -> dict[str, Any]:
        """The values that make the same request again, by name: those that are not what is taken if nothing is given."""
        fixed = self.given & GPU_DEPENDENT
        known = fields_of(type(self))
        return {name: v for name, v in self.values.items() if v != known[name].default or name in fixed}

    def but(self: AnyRequest, **changes: Any) -> AnyRequest:
        """A copy with other values for some fields, which then count as given."""
        return replace(self, **changes, given=self.given | set(changes), assumed=self.assumed - set(changes))


AnyRequest = TypeVar("AnyRequest", bound=EstimateRequest)
