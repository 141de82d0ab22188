"""Which code path of a model's training step a tape was recorded on."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal, cast, get_args

TapeEngine = Literal["plain", "fsdp2", "fsdp1", "fsdp1+autocast"]
"""Whose hooks and casts ran. ``plain``: DDP and DeepSpeed. ``fsdp1+autocast``: FSDP1's mixed precision as accelerate, and the
Trainer through it, runs it (accelerator.py, `prepare_model`)."""

TapePrecision = Literal["bf16", "bf16-mixed", "fp32"]
TapeDevice = Literal["cpu", "gpu"]
"""``cpu``: what PyTorch does under fake tensors on a CPU; ``gpu``: what it does on a GPU (`recording.on_gpu`)."""

TapeAttention = Literal["sdpa", "eager", "flash_attention_2"]
SdpaKernel = Literal["default", "cudnn"]
"""What sdpa prefers on a GPU. ``default``: the flash kernel, then the memory-efficient one, then none; ``cudnn``: cuDNN's before
these, as in half precision on Hopper and Blackwell."""

TapeCheckpointing = Literal["none", "full"]


@dataclass(frozen=True, order=True)
class TapeKey:
    """The code path of one tape.

    `batch_is_one`: B = 1, which some models treat in a way of its own. `window_filled`: sequences are no shorter than the model's
    sliding window, so that some layers need a mask; it matters to sdpa on a GPU alone. Raises ValueError for flash_attention_2 on
    a CPU.
    """

    engine: TapeEngine
    precision: TapePrecision
    attention: TapeAttention
    checkpointing: TapeCheckpointing
    batch_is_one: bool = False
    device: TapeDevice = "cpu"
    kernel: SdpaKernel = "default"
    window_filled: bool = False

    def __post_init__(self) -> None:
        if self.attention == "flash_attention_2" and self.device == "cpu":
            raise ValueError("flash_attention_2 runs on GPUs alone")

    @property
    def mixed(self) -> bool:
        return self.precision.endswith("-mixed")

    @property
    def autocasts(self) -> bool:
        """Whether forward runs under autocast."""
        return self.mixed and (self.engine == "plain" or self.autocasts_fsdp1)

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
        """
        window, batch = "window" if self.window_filled else "-", "1" if self.batch_is_one else "n"
        return "|".join(
            (self.engine, self.precision, self.device, self.attention, self.kernel, window, self.checkpointing, batch)
        )

    @classmethod
    def from_name(cls, name: str) -> TapeKey:
        """The key that has this name. Raises ValueError where there is none."""
        engine, precision, device, attention, kernel, window, checkpointing, batch = name.split("|")
        fields = (
            (engine, TapeEngine), (precision, TapePrecision), (device, TapeDevice), (attention, TapeAttention),
            (kernel, SdpaKernel), (checkpointing, TapeCheckpointing),
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
        )
