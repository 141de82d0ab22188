"""The options about the evaluation phase, with the names of transformers' TrainingArguments where they are arguments.

Source: transformers 5.23, training_args.py; `compute_metrics` is an argument of the Trainer itself.
"""

from __future__ import annotations

from functools import partial
from typing import Annotated, Literal

from fsdp_advisor.job.fields import Rule

rule = partial(Rule, group="Evaluation")

EvalStrategy = Literal["no", "steps", "epoch"]

EvalStrategyOption = Annotated[
    EvalStrategy,
    rule(
        "when the Trainer evaluates: never, every eval_steps, or after each epoch",
        synonyms={"none": "no", "false": "no"},
    ),
]
PerDeviceEvalBatchSize = Annotated[int, rule("sequences per rank and forward pass of evaluation", ge=1, le=1_048_576)]
ComputeMetrics = Annotated[
    bool, rule("keep the logits on the GPU, as the Trainer does with a function compute_metrics")
]
PredictionLossOnly = Annotated[bool, rule("keep only losses, also with compute_metrics")]
EvalAccumulationSteps = Annotated[
    int | None,
    rule(
        "the batches after which kept logits move to the host", default="never before the last one", ge=1, le=1_048_576
    ),
]
EvalSamples = Annotated[
    int | None, rule("the sequences of the evaluation set, whose logits are kept", default="unknown", ge=1, le=10**12)
]
