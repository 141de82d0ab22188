"""The key of a tape: the code path of a model's training step on which it was recorded."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal, cast, get_args

TapeEngine = Literal["plain", "plain+cast", "fsdp2", "fsdp1", "fsdp1+autocast"]
"""The engine whose hooks and casts ran. ``plain``: DDP and DeepSpeed. ``plain+cast``: DeepSpeed, which casts every weight, with a
model whose weights have several dtypes. ``fsdp1+autocast``: FSDP1's mixed precision under accelerate
(accelerator.py, `prepare_model`), which the Trainer uses too."""

TapePrecision = Literal["bf16", "bf16-mixed", "bf16-weights-mixed", "fp32"]
"""``bf16-mixed``: autocast, or FSDP's casts, of fp32 weights; ``bf16-weights-mixed``: autocast with weights in bf16."""
TapeDevice = Literal["cpu", "gpu"]
"""``cpu``: PyTorch's step under fake tensors on a CPU; ``gpu``: its step on a GPU (`recording.on_gpu`)."""

TapeAttention = Literal["sdpa", "eager", "flash_attention_2"]
SdpaKernel = Literal["default", "cudnn"]
"""The kernels that sdpa prefers on a GPU. ``default``: flash, then memory-efficient, then none; ``cudnn``: cuDNN before these, as in
half precision on Hopper and Blackwell."""

TapeCheckpointing = Literal["none", "full", "every", "selective", "selective-trl"]
"""``every``: some layers, of a model that was built so (`Adaptation.checkpoint_every`); ``selective``: torchtitan's policy."""

TapeLoss = Literal["full", "trl", "liger", "cce", "torchtitan"]
"""``full``: the model's own loss, of whole logits; the others are the code of a library (package `recording.losses`)."""

TapeTask = Literal["sft", "dpo", "kto", "reward", "grpo"]
"""The trainer of TRL whose batch and loss the step has; ``sft`` also stands for all other loops."""

TapeBatch = Literal["full", "padded", "flattened", "flattened-trl"]
"""How the sequences of a micro-batch lie in its tensors (`job.batch_layout.BatchLayout`)."""

TapeReference = Literal["none", "copy", "adapters-off"]
"""The model whose log-probabilities the loss also reads: ``copy``: another model's; ``adapters-off``: the trained one's without its
adapters. Their forward runs without gradients (`ScoringPhase`)."""


@dataclass(frozen=True, order=True)
class TapeKey:
    """The code path of one tape.

    `batch_is_one`: B = 1, for which some models run other code. `window_filled`: sequences are at least as long as the model's
    sliding window, so some layers need a mask; this affects only sdpa on a GPU. `wrap`: the wrap policy with whose units the tape is
    recorded; empty for a unit per layer, also where only the marks of layers matter. `at`: the (B, T) for which alone the tape is
    valid, of a model whose sizes are no polynomials; None for a tape of every B and T. `ignored_labels`: the part of the labels that
    a loss other than ``full`` leaves out. `activation_offload`: checkpointed layers save their inputs in host memory. `gathered_head`:
    the dtype in which the loss gathers the head's weight by itself, because FSDP2 does not; empty if it does. `completion_length`: the
    tokens of each sequence that GRPO generates and scores. `generated`: the micro-batches that it generates at once. `generates`:
    whether the model generates them itself. `scores_policy`: whether it scores them before the step. `padding`: the part of a
    padded batch that flash_attention_2 leaves out. `liger_kernels`: whether the model has Liger's kernels, which exist only on a
    GPU: on a CPU the tape has transformers' own code. Raises ValueError for flash_attention_2 on a CPU.
    """

    engine: TapeEngine
    precision: TapePrecision
    attention: TapeAttention
    checkpointing: TapeCheckpointing
    batch_is_one: bool = False
    device: TapeDevice = "cpu"
    kernel: SdpaKernel = "default"
    window_filled: bool = False
    wrap: str = ""
    loss: TapeLoss = "full"
    ignored_labels: float = 0.0
    task: TapeTask = "sft"
    reference: TapeReference = "none"
    activation_offload: bool = False
    gathered_head: str = ""
    completion_length: int = 0
    generated: int = 0
    generates: bool = False
    scores_policy: bool = False
    batch: TapeBatch = "full"
    padding: float = 0.0
    liger_kernels: bool = False
    at: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if self.attention == "flash_attention_2" and self.device == "cpu":
            raise ValueError("flash_attention_2 runs only on GPUs")

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
        """Whether forward runs under autocast. GRPO's runs under accelerate's with every engine but DeepSpeed.

        Source: trl 1.16, trainer/grpo_trainer.py, `_get_per_token_logps_and_entropies`.
        """
        return self.mixed and (self.engine == "plain" or self.autocasts_fsdp1 or self.task == "grpo")

    @property
    def masks(self) -> bool:
        """Whether attention other than flash_attention_2 gets a mask because of the batch."""
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
        """The key as text, under which profiles keep the tape.

        >>> TapeKey("fsdp2", "bf16", "sdpa", "none", True, device="gpu", window_filled=True).name
        'fsdp2|bf16|gpu|sdpa|default|window|none|1'
        >>> TapeKey("plain", "bf16", "sdpa", "none", at=(2, 4096)).name
        'plain|bf16|cpu|sdpa|default|-|none|n|at=2x4096'
        """
        window, batch = "window" if self.window_filled else "-", "1" if self.batch_is_one else "n"
        parts = (
            self.engine,
            self.precision,
            self.device,
            self.attention,
            self.kernel,
            window,
            self.checkpointing,
            batch,
        )
        options = {
            "wrap": self.wrap,
            "loss": self.loss if self.loss != "full" else "",
            "ignored": str(self.ignored_labels) if self.ignored_labels else "",
            "task": self.task if self.task != "sft" else "",
            "reference": self.reference if self.reference != "none" else "",
            "offload": "1" if self.activation_offload else "",
            "head": self.gathered_head,
            "completion": str(self.completion_length or ""),
            "generated": str(self.generated or ""),
            "generates": "1" if self.generates else "",
            "policy": "1" if self.scores_policy else "",
            "batch": self.batch if self.batch != "full" else "",
            "padding": str(self.padding) if self.padding else "",
            "kernels": "liger" if self.liger_kernels else "",
            "at": "x".join(map(str, self.at or ())),
        }
        return "|".join((*parts, *(f"{name}={value}" for name, value in options.items() if value)))

    @classmethod
    def from_name(cls, name: str) -> TapeKey:
        """The key with this name. Raises ValueError if there is none."""
        engine, precision, device, attention, kernel, window, checkpointing, batch, *options = name.split("|")
        given = dict(option.split("=") for option in options)
        at = [int(number) for number in given.get("at", "").split("x") if number]
        fields = (
            (engine, TapeEngine), (precision, TapePrecision), (device, TapeDevice), (attention, TapeAttention),
            (kernel, SdpaKernel), (checkpointing, TapeCheckpointing), (given.get("loss", "full"), TapeLoss),
            (given.get("task", "sft"), TapeTask), (given.get("reference", "none"), TapeReference),
            (given.get("batch", "full"), TapeBatch),
        )  # fmt: skip
        for value, allowed in fields:
            if value not in get_args(allowed):
                raise ValueError(f"{value!r} in {name!r} is none of {get_args(allowed)}")
        return cls(
            engine=cast("TapeEngine", engine),
            precision=cast("TapePrecision", precision),
            attention=cast("TapeAttention", attention),
            checkpointing=cast("TapeCheckpointing", checkpointing),
            batch_is_one=batch == "1",
            device=cast("TapeDevice", device),
            kernel=cast("SdpaKernel", kernel),
            window_filled=window == "window",
            wrap=given.get("wrap", ""),
            loss=cast("TapeLoss", given.get("loss", "full")),
            ignored_labels=float(given.get("ignored", 0)),
            task=cast("TapeTask", given.get("task", "sft")),
            reference=cast("TapeReference", given.get("reference", "none")),
            activation_offload="offload" in given,
            gathered_head=given.get("head", ""),
            completion_length=int(given.get("completion", 0)),
            generated=int(given.get("generated", 0)),
            generates="generates" in given,
            scores_policy="policy" in given,
            batch=cast("TapeBatch", given.get("batch", "full")),
            padding=float(given.get("padding", 0)),
            liger_kernels="kernels" in given,
            at=(at[0], at[1]) if at else None,
        )
