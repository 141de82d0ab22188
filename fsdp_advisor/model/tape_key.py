"""The key of a tape: the code path of a model's training step on which it was recorded."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, get_args

from fsdp_advisor.errors import assert_never
from fsdp_advisor.job.batch_layout import BatchLayout
from fsdp_advisor.job.checkpointing import OffloadCode
from fsdp_advisor.job.choices import Attention, ExpertsImplementation, Fp8, TrainingTask
from fsdp_advisor.job.losses import LossCode
from fsdp_advisor.job.training_task import Reference

TapeEngine = Literal["plain", "plain+cast", "fsdp2", "fsdp1", "fsdp1+autocast"]
"""The engine whose hooks and casts ran. ``plain``: DDP and DeepSpeed. ``plain+cast``: DeepSpeed, which casts every weight, with a
model whose weights have several dtypes. ``fsdp1+autocast``: FSDP1's mixed precision under accelerate
(accelerator.py, `prepare_model`), which the Trainer uses too.
"""

GatheredHead = Literal["", "bfloat16", "float32", "generation"]
TapePrecision = Literal["bf16", "bf16-mixed", "bf16-weights-mixed", "fp32"]
"""``bf16-mixed``: autocast, or FSDP's casts, of fp32 weights; ``bf16-weights-mixed``: autocast with weights in bf16."""
TapeDevice = Literal["cpu", "gpu"]
"""``cpu``: PyTorch's step under fake tensors on a CPU; ``gpu``: its step on a GPU (`recording.on_gpu`)."""

SdpaKernel = Literal["default", "cudnn"]
"""The kernels that sdpa prefers on a GPU. ``default``: flash, then memory-efficient, then none; ``cudnn``: cuDNN before these, as in
half precision on Hopper and Blackwell.
"""

TapeCheckpointing = Literal["none", "full", "full-accelerate", "reentrant", "every", "selective", "selective-trl"]
"""The code that checkpoints the layers in a recording: a plan's `CheckpointingCode`, or ``full-accelerate``.

With ``full-accelerate`` accelerate's FSDP2 wraps the layers, which are then not compiled. The model does not checkpoint them itself, so the
output of a frozen embedding requires no gradient. ``every``: some layers, of a model that was built so (`Adaptation.checkpoint_every`).
``selective``: torchtitan's policy.
"""


def repeats_each_forward(checkpointing: TapeCheckpointing) -> bool:
    """Whether the backward of every layer repeats its whole forward. Otherwise a tape lists what the backward repeats."""
    match checkpointing:
        case "full" | "full-accelerate" | "reentrant":
            return True
        case "none" | "every" | "selective" | "selective-trl":
            return False
        case _:
            assert_never(checkpointing)


TapeCompile = Literal["none", "layer", "layer-ddp", "regions", "regions-ddp", "model", "model-ddp", "model-units"]
"""``layer``: each layer is compiled; ``regions``: accelerate's regional compilation, of each layer and of the modules around them;
``model``: the model is compiled as a whole, and then has no layers (`Adaptation.in_one_graph`). With ``-ddp``: the same within DDP's
forward, which divides graphs at the boundaries of its buckets. ``model-units``: the whole model under accelerate's FSDP2, where the hooks
of the root's units break the graph, too.
"""

KeptTapes = Literal["all", "usual", "none"]
"""Which of a model's tapes the catalog has. ``usual``: of FSDP2, DDP and DeepSpeed in mixed precision, and of DDP in bf16, with sdpa."""

_USUAL = (("fsdp2", "bf16-mixed"), ("plain", "bf16-mixed"), ("plain", "bf16"))


@dataclass(frozen=True, order=True)
class TapeKey:
    """All properties that decide which code a recorded step runs.

    Plans with equal keys share a tape. Raises ValueError for flash_attention_2 on a CPU.

    >>> TapeKey("fsdp2", "bf16", "sdpa", "none", True, device="gpu", window_filled=True).name
    'fsdp2|bf16|gpu|sdpa|default|window|none|1'
    >>> TapeKey("plain", "bf16", "sdpa", "none", at=(2, 4096)).name
    'plain|bf16|cpu|sdpa|default|-|none|n|at=2x4096'
    """

    engine: TapeEngine
    precision: TapePrecision
    attention: Attention
    checkpointing: TapeCheckpointing
    batch_is_one: bool = False
    """B = 1, for which some models run other code."""
    device: TapeDevice = "cpu"
    kernel: SdpaKernel = "default"
    window_filled: bool = False
    """Sequences are at least as long as the model's sliding window, so some layers need a mask. It affects only sdpa on a GPU."""
    wrap: str = ""
    """The wrap policy with whose units the tape is recorded; empty for a unit per layer, and if only the marks of layers matter."""
    loss: LossCode = "full"
    ignored_labels: float = 0.0
    """The fraction of the labels that a loss other than ``full`` leaves out."""
    task: TrainingTask = "sft"
    """The task of the trainer whose batch and loss the step has: one of TRL's, or with the loss ``full`` of LLaMA-Factory's. ``sft`` also
    stands for all other training loops.
    """
    reference: Reference = "none"
    """The model whose log-probabilities the loss also reads. Its forward runs without gradients (`ScoringPhase`)."""
    activation_offload: OffloadCode = "none"
    """The implementation that offloads activations to host memory."""
    gathered_head: GatheredHead = ""
    """The dtype in which the loss gathers the head's weight by itself, because FSDP2 does not; ``generation`` if only generation calls the
    head, whose weight then stays gathered for the loss; empty if FSDP2 gathers it in each forward.
    """
    router_loss: bool = False
    """Whether TRL adds the load-balancing loss of the routers, if the model's configuration has one."""
    completion_length: int = 0
    """The tokens of each sequence that GRPO generates and scores."""
    generated: int = 0
    """The micro-batches that GRPO generates together."""
    generates: bool = False
    """Whether the model generates completions itself."""
    scores_policy: bool = False
    """Whether the model scores completions before the step."""
    batch: BatchLayout = "full"
    padding: float = 0.0
    """The fraction of padding in a batch, which flash_attention_2 leaves out."""
    liger_kernels: bool = False
    """Whether the model has Liger's kernels, which exist only on a GPU: on a CPU the tape has transformers' own code."""
    experts: ExpertsImplementation = "grouped_mm"
    """The code for routed experts. A loop (``eager``) depends on the tokens of each expert, so it is recorded for one (B, T)."""
    imbalance: float = 1.0
    """The tokens of the busiest expert as a multiple of the mean, on which a loop depends."""
    images: tuple[int, int, int, int] | None = None
    """The images of each sample, as `job.images.Images`."""
    evaluates: bool = False
    """Whether the step is a forward without gradients of a model in evaluation mode, and nothing else."""
    computes_logits: bool = False
    """Whether a second forward computes logits after an evaluation's forward whose loss needs none, as TRL's."""
    compile: TapeCompile = "none"
    """The code that `torch.compile` compiles on a GPU. A CPU tape has the code without compilation."""
    memory_budget: float = 1.0
    """The fraction of the activations of compiled layers that the compiler may keep for backward."""
    fp8: Fp8 = "none"
    """torchao's recipe for products of linear layers in fp8."""
    tiled_mlp: str = ""
    """The implementation that runs feed-forward networks in shards of the sequence, and the number of shards: ``liger:auto``,
    ``deepspeed:8``.
    """
    flat_parameters: bool = False
    """Whether FSDP1 runs without `use_orig_params`: parameters are adjacent in the flat parameter, and between its forwards a module has
    views in the dtype of the gathered weights, which an adapter reads.
    """
    saves_linear_inputs: bool = False
    """Whether linear layers save their input although their weight is frozen, as with DeepSpeed's ZeRO-3."""
    input_gradients: bool = False
    """Whether the embedding's output requires a gradient without activation checkpointing, as axolotl makes it with adapters."""
    lora_kernels: str = ""
    """The parts of a model whose adapters run in axolotl's kernels, separated by commas: ``mlp,qkv,o``."""
    without_packages: str = ""
    """The packages, separated by commas, that are not installed, so that the model's code in PyTorch runs instead of their kernels:
    ``fla,causal-conv1d``. On a CPU this code always runs.
    """
    at: tuple[int, int] | None = None
    """The only (B, T) for which the tape is valid, if it was recorded for one; None: valid for every B and T."""

    def __post_init__(self) -> None:
        if self.attention == "flash_attention_2" and self.device == "cpu":
            raise ValueError("flash_attention_2 runs only on GPUs")

    @property
    def compiles(self) -> bool:
        """Whether compiled code is recorded."""
        return self.compile != "none" and self.device == "gpu"

    @property
    def compiles_whole(self) -> bool:
        """Whether the whole model is compiled code."""
        return self.compiles and self.compile.startswith("model")

    @property
    def compiles_regions(self) -> bool:
        """Whether accelerate's regional compilation compiles the layers and the modules around them."""
        return self.compiles and self.compile.startswith("regions")

    @property
    def marks_root_units(self) -> bool:
        """Whether embedding and head have the hooks of accelerate's FSDP2 units. In a compiled model they would break the graph."""
        return self.engine == "fsdp2" and (not self.compiles_whole or self.compile == "model-units")

    @property
    def mixed(self) -> bool:
        """Whether forward and backward compute under autocast or FSDP's mixed precision."""
        return self.precision.endswith("-mixed")

    @property
    def weights_in_half(self) -> bool:
        """Whether the model's weights are in bf16 before an engine casts them."""
        return self.precision in ("bf16", "bf16-weights-mixed")

    @property
    def autocasts(self) -> bool:
        """Whether forward runs under autocast. In GRPO it runs under accelerate's autocast with every engine except DeepSpeed.

        Source: trl 1.16, trainer/grpo_trainer.py, `_get_per_token_logps_and_entropies`.
        """
        return self.mixed and (self.engine == "plain" or self.autocasts_fsdp1 or self.task == "grpo")

    def is_in_catalog(self, kept: KeptTapes) -> bool:
        """Whether the catalog has the key's CPU tape, or its tape for flash_attention_2, of a model of which it keeps these tapes.

        Steps whose recording failed are missing nevertheless.
        """
        plain = TapeKey(self.engine, self.precision, self.attention, self.checkpointing, self.batch_is_one, self.device)
        if kept == "none" or self != plain or self.checkpointing not in ("none", "full"):
            return False
        if kept == "usual":
            return self.attention == "sdpa" and (self.engine, self.precision) in _USUAL
        if self.autocasts_fsdp1:
            return self.precision == "bf16-mixed" and self.attention != "eager"
        return self.engine != "plain+cast" and self.precision != "bf16-weights-mixed"

    @property
    def masks(self) -> bool:
        """Whether the batch (packed or padded) makes transformers pass a mask to attention other than flash_attention_2."""
        return self.batch != "full"

    @property
    def autocasts_fsdp1(self) -> bool:
        """Whether accelerate runs FSDP1 under autocast: outputs are in fp32, layers are checkpointed within their units."""
        return self.engine == "fsdp1+autocast"

    @property
    def uses_flat_parameter(self) -> bool:
        """Whether a unit's parameters are views of one flat parameter."""
        return self.engine.startswith("fsdp1")

    @cached_property
    def name(self) -> str:
        """The key as text, under which profiles keep the tape."""
        window, batch = "window" if self.window_filled else "-", "1" if self.batch_is_one else "n"
        path = (
            self.engine,
            self.precision,
            self.device,
            self.attention,
            self.kernel,
            window,
            self.checkpointing,
            batch,
        )
        options = (
            f"{word}={_text(value)}"
            for word, field in _OPTIONS.items()
            if (value := getattr(self, field)) != getattr(TapeKey, field)
        )
        return "|".join((*path, *options))

    @classmethod
    def from_name(cls, name: str) -> TapeKey:
        """The key with this name. Raises ValueError for text that is not a name of a key."""
        engine, precision, device, attention, kernel, window, checkpointing, batch, *options = name.split("|")
        texts = dict(option.split("=") for option in options)
        if unknown := texts.keys() - _OPTIONS.keys():
            raise ValueError(f"{unknown} in {name!r} are no options of a key")
        given = {_OPTIONS[word]: text for word, text in texts.items()}
        words = {
            "engine": engine, "precision": precision, "device": device, "attention": attention, "kernel": kernel,
            "checkpointing": checkpointing, **given,
        }  # fmt: skip
        for field, allowed in _ALLOWED.items():
            if words.get(field, getattr(cls, field, None)) not in get_args(allowed):
                raise ValueError(f"{words[field]!r} in {name!r} is none of {get_args(allowed)}")
        values: dict[str, Any] = words | {field: _value(text, getattr(cls, field)) for field, text in given.items()}
        return cls(**values, batch_is_one=batch == "1", window_filled=window == "window")


_OPTIONS = {
    "wrap": "wrap", "loss": "loss", "ignored": "ignored_labels", "task": "task", "reference": "reference",
    "offload": "activation_offload", "head": "gathered_head",
    "routers": "router_loss", "completion": "completion_length", "generated": "generated",
    "generates": "generates", "policy": "scores_policy", "batch": "batch", "padding": "padding", "liger": "liger_kernels",
    "experts": "experts", "imbalance": "imbalance", "images": "images", "evaluates": "evaluates", "compile": "compile",
    "logits": "computes_logits",
    "budget": "memory_budget", "fp8": "fp8",
    "tiled": "tiled_mlp", "flat": "flat_parameters", "inputs": "saves_linear_inputs",
    "embedded": "input_gradients", "lora": "lora_kernels", "without": "without_packages", "at": "at",
}  # fmt: skip
"""Word in a name -> field that it sets. A name has these words only if the field is not the default."""
_ALLOWED = {
    "engine": TapeEngine, "precision": TapePrecision, "device": TapeDevice, "attention": Attention, "kernel": SdpaKernel,
    "checkpointing": TapeCheckpointing, "loss": LossCode, "task": TrainingTask, "reference": Reference, "batch": BatchLayout,
    "activation_offload": OffloadCode, "experts": ExpertsImplementation, "compile": TapeCompile, "fp8": Fp8,
}  # fmt: skip


def _text(value: object) -> str:
    """A field's value in a name.

    >>> _text(True), _text((2, 4096)), _text(0.5), _text("dpo")
    ('1', '2x4096', '0.5', 'dpo')
    """
    if isinstance(value, bool):
        return "1"
    return "x".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _value(text: str, default: Any) -> object:
    """The value of a field with this default, from its text in a name."""
    if default is None:
        return tuple(map(int, text.split("x")))
    return True if isinstance(default, bool) else type(default)(text)
