"""The options about completions that a model generates before it trains on them, with the names of TRL's GRPOConfig.

Source: trl 1.16, trainer/grpo_config.py.
"""

from __future__ import annotations

from functools import partial
from typing import Annotated, Literal

from fsdp_advisor.job.fields import Rule

rule = partial(Rule, group="GRPO")

VllmMode = Literal["colocate", "server"]

NumGenerations = Annotated[int, rule("the completions of each prompt", ge=2, le=65_536)]
MaxCompletionLength = Annotated[
    int, rule("the tokens of a completion; the rest of --seq-len is the prompt", ge=1, le=16_777_216)
]
Beta = Annotated[
    float,
    rule("the weight of the divergence from a reference model; with 0 no reference model is loaded", ge=0, le=1e6),
]
NumIterations = Annotated[int, rule("the updates made with each batch of completions", ge=1, le=1024)]
StepsPerGeneration = Annotated[
    int | None,
    rule(
        "the micro-batches whose completions are generated at once",
        default="the micro-batches of one update",
        ge=1,
        le=65_536,
    ),
]
UseVllm = Annotated[bool, rule("generate with vLLM instead of transformers")]
VllmModeOption = Annotated[VllmMode, rule("the GPUs that run vLLM: colocate, those that train; server, others")]
VllmGpuMemoryUtilization = Annotated[
    float, rule("the fraction of each GPU's memory that colocated vLLM takes", ge=0.01, le=1)
]
VllmEnableSleepMode = Annotated[bool, rule("colocated vLLM frees its memory while the model trains")]
VllmTensorParallelSize = Annotated[int, rule("the GPUs that share one colocated copy of the model", ge=1, le=65_536)]
VllmMaxModelLength = Annotated[
    int | None,
    rule(
        "the tokens of the longest sequence for which colocated vLLM has memory",
        default="the model's maximum",
        ge=1,
        le=16_777_216,
    ),
]
