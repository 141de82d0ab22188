"""The plan: one strategy with every option decided. All estimates are computed from it."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

from fsdp_advisor.errors import assert_never
from fsdp_advisor.job.adapter_fields import StoredDtype
from fsdp_advisor.job.batch_layout import BatchLayout, flattens
from fsdp_advisor.job.checkpointing import CheckpointingCode, OffloadCode, checkpointing_policy, every_nth_layer
from fsdp_advisor.job.choices import (
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
    StateDictType,
    Strategy,
    TrainingTask,
    WeightDtype,
    Wrap,
    half_dtype,
)
from fsdp_advisor.job.evaluation import Evaluation
from fsdp_advisor.job.frameworks import FRAMEWORKS, FrameworkFacts
from fsdp_advisor.job.generation import Generation
from fsdp_advisor.job.images import Images
from fsdp_advisor.job.losses import LossCode, loss_option, usual_loss
from fsdp_advisor.job.training_task import Reference, sequences_per_example
from fsdp_advisor.job.wrap_policy import WrapPolicy, wrap_policy
from fsdp_advisor.parallelism.mesh import ONE_RANK, Mesh


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One strategy of a request, as rank 0 runs it. A search varies it by `dataclasses.replace`.

    `*_bytes` are bytes per element of a parameter that has no storage dtype of its own.
    """

    strategy: Strategy
    backend: Backend
    offload: Offload = "none"
    offload_device: OffloadDevice = "cpu"
    mesh: Mesh = ONE_RANK
    precision: Precision = "bf16-mixed"
    optim: OptimizerName = "adamw_torch_fused"
    optim_args: str | None = None
    optim_target_modules: str | None = None
    micro_batch_size: int = 1
    seq_len: int
    gradient_accumulation_steps: int = 1
    activation_checkpointing: Checkpointing = "none"
    attention: Attention = "sdpa"
    backward_prefetch: BackwardPrefetch = "pre"
    framework: Framework = "torch"
    wrap: Wrap = "layer"
    forward_prefetch: bool = False
    use_orig_params: bool = True
    reshard_after_forward: str = "auto"
    save_only_model: bool = False
    state_dict_type: StateDictType = "auto"
    dtype: StoredDtype = "auto"
    zero_buckets: str | None = None
    loss_code: LossCode = "full"
    ignored_labels: float = 0.0
    packing: Packing = "none"
    padding_free: bool = False
    padding_fraction: float = 0.0
    task: TrainingTask = "sft"
    reference: Reference = "none"
    generation: Generation | None = None
    evaluation: Evaluation | None = None
    evaluates: bool = False
    """Whether this is the plan of an evaluation's forward (`evaluation_plan`) instead of a training step's."""
    computes_logits: bool = False
    """Whether a second forward of the evaluation computes logits."""
    activation_offload: bool = False
    use_liger_kernel: bool = False
    experts_implementation: ExpertsImplementation = "grouped_mm"
    expert_imbalance: float = 1.0
    kernel_packages: str = "all"
    """The installed packages of kernels for linear attention and state-space layers."""
    images: Images | None = None
    compile: Compile = "none"
    memory_budget: float = 1.0
    """The fraction of the activations of compiled layers that the compiler may keep for backward."""
    cuda_graphs: bool = False
    fp8: Fp8 = "none"
    tiled_mlp: str = "none"
    """The shards of a sequence in which feed-forward networks run: a number, auto or none."""
    lora_kernels: str = "auto"
    """The parts of the model whose adapters run in axolotl's kernels, as asked for (`job.lora_kernels`)."""
    router_aux_loss_coef: float | None = None
    """The weight of the routers' loss that TRL adds; None: the model's own."""

    @property
    def without_batch(self) -> Plan:
        """The plan with a micro-batch and sequence length of 1. Plans that differ only in these share cached results."""
        return replace(self, micro_batch_size=1, seq_len=1)

    @property
    def without_step(self) -> Plan:
        """The plan with defaults in every field that affects only the step. States, loading and saving depend only on the other fields."""
        generation = None if self.generation is None else replace(self.generation, completion_length=1)
        return replace(self, seq_len=1, generation=generation, **_STEP_DEFAULTS)

    @property
    def evaluation_plan(self) -> Plan | None:
        """The plan of the evaluation's forward: without gradients, so nothing is checkpointed. None if the job has no evaluation.

        Liger's loss runs only if no logits are kept. TRL's always runs; logits are then computed by a second forward. Source: transformers
        5.23, trainer.py, `prediction_step`, skip_logits; trl 1.16, trainer/sft_trainer.py, `compute_loss`.
        """
        if self.evaluation is None:
            return None
        generation = self.generation
        return replace(
            self,
            micro_batch_size=self.evaluation.batch_size,
            gradient_accumulation_steps=1,
            activation_checkpointing="none",
            activation_offload=False,
            loss_code="full" if self.loss_code == "liger" and self.evaluation.kept_batches else self.loss_code,
            generation=None if generation is None else generation.of_evaluation(self.gradient_accumulation_steps),
            evaluation=None,
            evaluates=True,
            computes_logits=self.loss_code == "trl" and self.evaluation.kept_batches > 0,
        )

    @property
    def generates_once(self) -> bool:
        """Whether an optimizer step generates completions at most once, before its first micro-batch."""
        accumulation = self.gradient_accumulation_steps
        return self.generation is not None and self.generation.micro_batches(accumulation) >= accumulation

    @property
    def generates_each_micro_batch(self) -> bool:
        """Whether the trained model generates completions before each micro-batch, and all batches of an evaluation do."""
        found = self.generation
        if found is None or found.generator != "transformers":
            return False
        return self.evaluates or found.micro_batches(self.gradient_accumulation_steps) * found.iterations == 1

    @property
    def sequences(self) -> int:
        """Sequences per forward pass of a rank."""
        return self.micro_batch_size * sequences_per_example(self.task)

    @property
    def global_batch_size(self) -> int:
        """Examples per optimizer step, over all ranks. An example of DPO and of a reward model is a pair of sequences."""
        return self.micro_batch_size * self.gradient_accumulation_steps * self.world_size

    @property
    def tokens_per_step(self) -> float:
        """Tokens of a rank in an optimizer step, without padding."""
        return self.sequences * self.tokens_per_sequence * self.gradient_accumulation_steps

    @property
    def batch_layout(self) -> BatchLayout:
        """How the sequences of a micro-batch lie in its tensors. A row with one sequence is as any other, unless it is compiled or its
        sequences are processed separately. Source: transformers 5.23, masking_utils.py, `find_packed_sequence_indices`.
        """
        is_alone = self.packing == "none" and self.micro_batch_size == 1
        if self.padding_free and is_alone and self.attention != "flash_attention_2" and self.compile == "none":
            return "full"
        if flattens(self.packing, self.padding_free):
            return "flattened-trl" if self.facts.names_sequences else "flattened"
        return "padded" if self.padding_fraction else "full"

    @property
    def tape_shape(self) -> tuple[int, int]:
        """The (B, T) at which the tape is evaluated.

        A flattened batch is one row of B x T tokens. With flash_attention_2, which processes its sequences separately, this is still (B,
        T); for other kernels it is (1, B x T).
        """
        if self.batch_layout in ("flattened", "flattened-trl") and self.attention != "flash_attention_2":
            return 1, self.micro_batch_size * self.seq_len
        return self.micro_batch_size, self.seq_len

    @property
    def unscored_labels(self) -> float:
        """The fraction of all labels that are -100, because of padding or because the data excludes them from the loss."""
        return self.padding_fraction + (1 - self.padding_fraction) * self.ignored_labels

    @property
    def tokens_per_sequence(self) -> float:
        """The mean number of tokens of a sequence that are not padding."""
        return self.seq_len * (1 - self.padding_fraction)

    @property
    def shard_degree(self) -> int:
        """Ranks that share one copy of the states."""
        return self.mesh.dp_shard

    @property
    def replica_degree(self) -> int:
        """The number of copies of the states."""
        return self.mesh.dp_replicate

    @property
    def has_replica_mesh(self) -> bool:
        """Whether FSDP2 gets a mesh with a dimension of replicas. A script of PyTorch's own makes one for HSDP on one node, too, and FSDP2
        then all-reduces over one rank; accelerate and torchtitan leave out a dimension of one rank.
        """
        return self.replica_degree > 1 or (self.strategy == "hsdp" and self.framework == "torch")

    @property
    def nnodes(self) -> int:
        return self.mesh.nnodes

    @property
    def world_size(self) -> int:
        return self.mesh.world_size

    @property
    def offloads_to_nvme(self) -> bool:
        """Whether optimizer state or parameters are kept on NVMe."""
        return self.offload != "none" and self.offload_device == "nvme"

    @property
    def ranks_per_node(self) -> int:
        return self.mesh.ranks_per_node

    @property
    def wrap_policy(self) -> WrapPolicy:
        """The policy by which FSDP divides the model into units."""
        policy = wrap_policy(self.wrap)
        assert policy is not None, self.wrap
        return policy

    @property
    def loss(self) -> Loss:
        """The value of `--loss` that gives this loss; `auto` if it is the framework's own."""
        usual = usual_loss(self.framework, self.task, use_liger_kernel=self.use_liger_kernel)
        return "auto" if self.loss_code == usual else loss_option(self.loss_code)

    @property
    def checkpointing(self) -> CheckpointingCode:
        """The code that recomputes activations."""
        policy = checkpointing_policy(self.activation_checkpointing)
        assert policy is not None, self.activation_checkpointing
        return "selective-trl" if policy.kind == "selective" and self.facts.keeps_attention_alone else policy.kind

    def plugin_checkpoints(self, *, adapters: bool, partly_frozen: bool) -> bool:
        """Whether files for accelerate and its Trainers let accelerate's FSDP plugin checkpoint the layers. Otherwise transformers
        checkpoints them. The plugin can only checkpoint every layer as a whole. `partly_frozen`: whether any parameter is frozen, as the
        base of adapters is.

        With adapters under FSDP1 the plugin would also checkpoint each unit of adapters, which fails: "Recomputed values for the following
        tensors have different metadata". Under FSDP2 with frozen parameters or compiled code, only the estimate for accelerate assumes the
        plugin (`tape_key_of`); those for its Trainers assume transformers' checkpoints.
        """
        if self.checkpointing != "full" or self.offload_code == "inputs":
            return False
        match self.backend:
            case "fsdp1":
                return not adapters
            case "fsdp2":
                return self.framework == "accelerate" or not (partly_frozen or self.compile != "none")
            case "ddp" | "deepspeed":
                return False
            case _:
                assert_never(self.backend)

    @property
    def offload_code(self) -> OffloadCode:
        """The code that keeps activations in host memory."""
        if not self.activation_offload:
            return "none"
        if self.facts.offloads_saved_tensors:
            return "trl"
        return "inputs" if self.checkpointing != "none" else "saved"

    def checkpoints(self, layer: int) -> bool:
        """Whether a layer is recomputed in backward. `layer`: its number among all layers of the model, from 0.

        Source: transformers 5.23, modeling_utils.py, `_set_gradient_checkpointing`.
        """
        if self.checkpointing == "every":
            return layer % every_nth_layer(self.activation_checkpointing) == 0
        return self.checkpointing != "none"

    @property
    def reshards(self) -> bool:
        """Whether FSDP reshards parameters after forward, over all ranks or some (`post_forward_ranks`)."""
        return self.strategy in ("zero3", "hsdp") and self.reshard_after_forward != "false"

    @property
    def post_forward_ranks(self) -> int | None:
        """The number of ranks over which FSDP2 keeps parameters sharded after forward (`reshard_after_forward` as an integer). None if the
        option is true, false or auto, or if the strategy keeps parameters after forward.
        """
        return int(self.reshard_after_forward) if self.reshards and self.reshard_after_forward.isdecimal() else None

    @property
    def saves_as(self) -> StateDictType:
        """The type of FSDP's state dicts in a checkpoint: the plan's, or the usual one of its backend."""
        if self.state_dict_type != "auto":
            return self.state_dict_type
        return "full" if self.backend == "fsdp1" else "sharded"

    @property
    def mixed(self) -> bool:
        """Whether the dtype in which forward and backward compute differs from that of the parameters that the optimizer steps."""
        return self.precision.endswith("-mixed")

    @property
    def param_bytes(self) -> int:
        """Bytes per element of the parameters that the optimizer steps."""
        return 4 if self.stored_dtype == "float32" else 2

    @property
    def stored_dtype(self) -> WeightDtype:
        """The dtype of the parameters that the optimizer steps. DeepSpeed makes fp32 masters of weights in any dtype."""
        if not self.mixed:
            return self.loaded_dtype
        if self.backend == "deepspeed":
            return "float32"
        if self.dtype != "auto":
            return self.dtype
        return "bfloat16" if self.facts.trains_half and self.precision == "bf16-mixed" else "float32"

    @property
    def loaded_dtype(self) -> WeightDtype:
        """The dtype in which the job's script loads the weights. DeepSpeed casts them to the compute dtype, so they are loaded in it.

        Source: deepspeed/runtime/engine.py (0.19.8), _configure_distributed_model.
        """
        if self.mixed and self.backend != "deepspeed":
            return self.stored_dtype
        return "float32" if self.precision == "fp32" else half_dtype(self.precision)

    @property
    def stores_half(self) -> bool:
        """Whether mixed precision keeps weights in 16 bits."""
        return self.mixed and self.stored_dtype != "float32"

    @property
    def compute_bytes(self) -> int:
        """Bytes per element in which forward and backward compute."""
        return 4 if self.precision == "fp32" else 2

    @property
    def facts(self) -> FrameworkFacts:
        """The facts in which the framework changes the engine's behaviour."""
        return FRAMEWORKS[self.framework]

    @property
    def captures_graph(self) -> bool:
        """Whether forward and backward are captured as a CUDA graph. Gradients then stay from step to step. Offload waits for the host,
        which cannot be captured.
        """
        return self.cuda_graphs and self.offload == "none"

    @property
    def uses_accelerate(self) -> bool:
        """Whether accelerate wraps the model, for its own loop or for the Trainer's."""
        return self.facts.uses_accelerate

    @property
    def reduce_bytes(self) -> int | None:
        """Bytes per element in which FSDP reduces gradients; None if each has the dtype in which its parameter is gathered."""
        match self.facts.reduce_dtype:
            case "masters":
                return 4 if self.mixed else None
            case "compute":
                return self.compute_bytes if self.mixed else None
            case "fp32":
                return 4
            case _:
                assert_never(self.facts.reduce_dtype)

    @property
    def steps_flat_parameters(self) -> bool:
        """Whether the optimizer steps FSDP1's flat parameters instead of the original ones."""
        return self.backend == "fsdp1" and not self.use_orig_params

    @property
    def adds_router_loss(self) -> bool:
        """Whether the framework adds the loss of a model's routers, if the model has a weight for it."""
        return self.facts.adds_router_loss and self.task != "reward" and self.router_aux_loss_coef != 0

    @property
    def defers_reduction(self) -> bool:
        """Whether gradients stay whole until the last micro-batch. On one rank accelerate does so only with FSDP2
        (accelerator.py, `no_sync`).
        """
        if self.world_size == 1 and self.backend != "fsdp2":
            return False
        return self.facts.defers_reduction and self.gradient_accumulation_steps > 1


_STEP_FIELDS = {
    "micro_batch_size", "gradient_accumulation_steps", "activation_checkpointing", "attention", "loss_code", "ignored_labels",
    "packing", "padding_free", "padding_fraction", "task", "reference", "activation_offload", "use_liger_kernel",
    "experts_implementation", "expert_imbalance", "images", "evaluation", "compile", "memory_budget", "tiled_mlp",
    "router_aux_loss_coef", "lora_kernels", "kernel_packages",
}  # fmt: skip
"""The fields of a plan that affect only the step, other than the sequence length and the generation."""

_STEP_DEFAULTS: dict[str, Any] = {field.name: field.default for field in fields(Plan) if field.name in _STEP_FIELDS}
