"""A job with open options, and what to search for: the options of `recommend`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from math import gcd
from typing import Annotated, ClassVar, Literal

from fsdp_advisor.errors import UsageError
from fsdp_advisor.job.batch_fields import ACCUMULATION, MICRO_BATCH_SIZE
from fsdp_advisor.job.checkpointing import CHECKPOINTING_EXAMPLE, read_searched_checkpointing
from fsdp_advisor.job.choices import Checkpointing, Find, Offload, OffloadDevice, TrainingMethod
from fsdp_advisor.job.fields import Rule, fields_of
from fsdp_advisor.job.generation import least_micro_batch
from fsdp_advisor.job.request import EstimateRequest
from fsdp_advisor.job.sharding_fields import OFFLOAD, OFFLOAD_DEVICE
from fsdp_advisor.job.step_fields import CHECKPOINTING
from fsdp_advisor.units import parse_count, parse_fraction

_rule = partial(Rule, group="Search")

SEARCHED_CHECKPOINTING = replace(
    CHECKPOINTING, default=None, word=read_searched_checkpointing, example=f"auto, {CHECKPOINTING_EXAMPLE}"
)


@dataclass(frozen=True, kw_only=True)
class RecommendRequest(EstimateRequest):
    """A job with open fields for a search: those in SEARCHED that are None, `auto` or `all`.

    `loss` and `activation_offload` are open too unless they are given or `offload` is none: a search then also tries the framework's
    other losses and its activation offload (`advice.open_choices`).
    """

    SEARCHED: ClassVar[tuple[str, ...]] = (
        "strategy", "backend", "offload", "offload_device",
        "micro_batch_size", "gradient_accumulation_steps", "activation_checkpointing",
    )  # fmt: skip

    # mypy: these fields accept more values than those of an estimate, which searches nothing
    offload: Annotated[Literal[Offload, "auto"], OFFLOAD] = "auto"  # type: ignore[assignment]
    offload_device: Annotated[Literal[OffloadDevice, "auto"], OFFLOAD_DEVICE] = "auto"  # type: ignore[assignment]
    micro_batch_size: Annotated[int | None, MICRO_BATCH_SIZE] = None  # type: ignore[assignment]
    gradient_accumulation_steps: Annotated[int | None, ACCUMULATION] = None  # type: ignore[assignment]
    activation_checkpointing: Annotated[Checkpointing, SEARCHED_CHECKPOINTING] = "auto"

    find: Annotated[
        Find | None,
        _rule(
            about="the quantity to optimize: the largest micro-batch (batch) or sequence that fits, the fewest GPUs (at most "
            "--gpus if that is above 1), or the smallest GPU (gpu-type)",
        ),
    ] = None
    method: Annotated[
        TrainingMethod,
        _rule(
            about="the training method: fixed is what the other options say; any compares full fine-tuning, LoRA and QLoRA, whatever"
            " use_peft and load_in_4bit say, and recommends the first that fits; of those that"
            " offload to a host of unknown memory, the one that needs least of it",
            elsewhere={
                "full": "without method and use_peft, all weights are trained",
                "lora": "use_peft, without method",
                "qlora": "use_peft with load_in_4bit, without method",
            },
        ),
    ] = "fixed"
    thorough: Annotated[
        bool,
        _rule(
            about="also search other losses, selective checkpointing and activation offload: their steps are recorded, which takes seconds "
            "to minutes the first time and needs torch",
        ),
    ] = False
    margin: Annotated[
        float,
        _rule(
            about="the fraction of the GPU's memory to leave free for all but the allocator's cache, as 0.08 or 8%",
            metavar="PART",
            ge=0,
            lt=1,
            parse=parse_fraction,
            example="0.08 or 8%",
        ),
    ] = 0.08
    tokens: Annotated[
        int | None,
        _rule(
            about="the number of tokens to train on, such as 10e9 or 10B; the answer then has days and GPU hours",
            ge=1,
            le=10**18,
            parse=parse_count,
            example="10e9 or 10B",
        ),
    ] = None
    price: Annotated[
        float | None,
        _rule(
            about="the price of one GPU for one hour in any currency; with --tokens, the answer then has the cost",
            metavar="PRICE",
            ge=0,
            le=1e6,
        ),
    ] = None

    @property
    def as_estimate(self) -> EstimateRequest:
        """The job as a request of `estimate`: open fields get their defaults, or batches that GRPO accepts. `global_batch_size` is left
        out, because only a search divides it. Raises UsageError for compiled steps, because a search would compile each micro-batch and
        length, and for fp8, because it is meant to be compiled.
        """
        if self.fp8 != "none":
            raise UsageError(
                "a search over steps in fp8 is not modelled: fp8 is meant to be compiled, and a search does not compile",
                hint="leave --fp8 out, then run estimate with it and --compile layer for the plan that is recommended",
            )
        if self.compile != "none":
            raise UsageError(
                "a search over compiled steps is not modelled: each micro-batch and length would have to be compiled separately",
                hint="leave --compile out, then run estimate with it for the plan that is recommended",
            )
        values = {name: getattr(self, name) for name in fields_of(EstimateRequest) if name != "global_batch_size"}
        closed = {name: v for name, v in values.items() if name not in self.SEARCHED or v not in (None, "auto")}
        given = self.given.intersection(closed)
        job = EstimateRequest(**closed, given=given, assumed=self.assumed, configs=self.configs)
        return self._with_whole_groups(job)

    def _with_whole_groups(self, job: EstimateRequest) -> EstimateRequest:
        """The job with the smallest micro-batch, or else accumulation, that makes whole groups of completions, if this request leaves it
        open.
        """
        least = least_micro_batch(job, gpus=job.gpus, accumulation=job.gradient_accumulation_steps)
        missing = least // gcd(least, job.micro_batch_size)
        if missing == 1:
            return job
        if self.micro_batch_size is None:
            return replace(job, micro_batch_size=least)
        if self.gradient_accumulation_steps is None and self.steps_per_generation is None:
            return replace(job, gradient_accumulation_steps=missing)
        return job
