"""The options about the evaluation phase, with the names of transformers' TrainingArguments where they are arguments.

Source: transformers 5.23, training_args.py; `compute_metrics` is an argument of the Trainer itself.
"""

from __future__ import annotations

from typing import Annotated, Literal

from fsdp_advisor.job.fields import Rule

GROUP = "Evaluation"

EvalStrategy = Literal["no", "steps", "epoch"]

EvalStrategyOption = Annotated[
    EvalStrategy,
    Rule(
        about="when the Trainer evaluates: never, every eval_steps, or after each epoch",
        group=GROUP,
        synonyms={"none": "no", "false": "no"},
    ),
]
PerDeviceEvalBatchSize = Annotated[
    int, Rule(about="sequences per rank and forward pass of evaluation", group=GROUP, ge=1, le=1_048_576)
]
ComputeMetrics = Annotated[
    bool,
    Rule(
        about="keep the logits on the GPU, as the Trainer does with a function compute_metrics",
        group=GROUP,
    ),
]
PredictionLossOnly = Annotated[bool, Rule(about="keep only losses, also with compute_metrics", group=GROUP)]
EvalAccumulationSteps = Annotated[
    int | None,
    Rule(
        about="the batches after which kept logits move to the host",
        group=GROUP,
        default="never before the last one",
        ge=1,
        le=1_048_576,
    ),
]
EvalSamples = Annotated[
    int | None,
    Rule(
        about="the sequences of the evaluation set, whose logits are kept",
        group=GROUP,
        default="unknown",
        ge=1,
        le=10**12,
    ),
]
