"""The options about completions that a model generates before it trains on them, with the names of TRL's GRPOConfig.

Source: trl 1.16, trainer/grpo_config.py.
"""

from __future__ import annotations

from typing import Annotated, Literal

from fsdp_advisor.job.fields import Rule

GROUP = "GRPO"

VllmMode = Literal["colocate", "server"]

NumGenerations = Annotated[int, Rule(about="the completions of each prompt", group=GROUP, ge=2, le=65_536)]
MaxCompletionLength = Annotated[
    int, Rule(about="the tokens of a completion; the rest of --seq-len is the prompt", group=GROUP, ge=1, le=16_777_216)
]
Beta = Annotated[
    float,
    Rule(
        about="the weight of the divergence from a reference model; with 0 no reference model is loaded",
        group=GROUP,
        ge=0,
        le=1e6,
    ),
]
NumIterations = Annotated[
    int, Rule(about="the updates made with each batch of completions", group=GROUP, ge=1, le=1024)
]
StepsPerGeneration = Annotated[
    int | None,
    Rule(
        about="the micro-batches whose completions are generated at once",
        group=GROUP,
        default="the micro-batches of one update",
        ge=1,
        le=65_536,
    ),
]
UseVllm = Annotated[bool, Rule(about="generate with vLLM instead of transformers", group=GROUP)]
VllmModeOption = Annotated[
    VllmMode,
    Rule(about="the GPUs that run vLLM: colocate, those that train; server, others", group=GROUP),
]
VllmGpuMemoryUtilization = Annotated[
    float, Rule(about="the fraction of each GPU's memory that colocated vLLM takes", group=GROUP, ge=0.01, le=1)
]
VllmEnableSleepMode = Annotated[bool, Rule(about="colocated vLLM frees its memory while the model trains", group=GROUP)]
VllmTensorParallelSize = Annotated[
    int, Rule(about="the GPUs that share one colocated copy of the model", group=GROUP, ge=1, le=65_536)
]
