"""How GRPO generates the completions on which it trains, and which models score them.

Source: trl 1.16, trainer/grpo_config.py, `__post_init__`; trainer/grpo_trainer.py, `_prepare_inputs`, `_generate_and_score_completions`;
generation/vllm_generation.py, `_init_vllm`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import gcd
from typing import Literal

from fsdp_advisor.errors import UsageError
from fsdp_advisor.job.fields import dashed
from fsdp_advisor.job.request import EstimateRequest

Generator = Literal["transformers", "colocate", "server"]
"""The generator: transformers' `generate` with the trained model; vLLM on the same GPUs; vLLM on other GPUs."""

OPTIONS = (
    "num_generations", "max_completion_length", "beta", "num_iterations", "steps_per_generation", "use_vllm", "vllm_mode",
    "vllm_gpu_memory_utilization", "vllm_enable_sleep_mode", "vllm_tensor_parallel_size", "vllm_max_model_length",
)  # fmt: skip
"""The options that only GRPO has."""
OF_COLOCATED = (
    "vllm_gpu_memory_utilization", "vllm_enable_sleep_mode", "vllm_tensor_parallel_size", "vllm_max_model_length",
)  # fmt: skip
"""The options that only vLLM on the training GPUs (``colocate``) has."""


@dataclass(frozen=True, kw_only=True)
class Generation:
    """The completions of a plan.

    `completion_length`: tokens of a sequence that are generated and scored. `completions_per_prompt`: the size of a group whose rewards
    are compared. `steps`: micro-batches whose completions are generated together; None: those of one optimizer step. `iterations`: the
    number of updates that use each completion. `beta`: if it is above 0, a reference model scores completions too. `memory_utilization`,
    `sleeps`, `tensor_parallel` and `max_length` (None: the model's) are settings of colocated vLLM.
    """

    completion_length: int
    completions_per_prompt: int = 8
    steps: int | None = None
    iterations: int = 1
    beta: float = 0.0
    generator: Generator = "transformers"
    memory_utilization: float = 0.3
    sleeps: bool = False
    tensor_parallel: int = 1
    max_length: int | None = None

    @property
    def text(self) -> str:
        """The completions in words.

        >>> Generation(completion_length=512, generator="colocate", beta=0.1).text
        '8 completions of 512 tokens per prompt from vLLM on 30 % of the same GPUs, with a reference model'
        """
        part = f"{100 * self.memory_utilization:.3g} % of the same GPUs"
        by = {
            "transformers": "transformers",
            "colocate": f"vLLM on {part}{' that sleeps in training' if self.sleeps else ''}",
            "server": "vLLM on other GPUs",
        }[self.generator]
        reference = ", with a reference model" if self.beta else ""
        return f"{self.completions_per_prompt} completions of {self.completion_length} tokens per prompt from {by}{reference}"

    def micro_batches(self, accumulation: int) -> int:
        """The number of micro-batches whose completions one generation makes: `steps`, or else all `accumulation` of an optimizer step."""
        return self.steps or accumulation

    def scores_policy(self, accumulation: int) -> bool:
        """Whether the trained model scores completions before it trains on them.

        It does not if one update uses all of them, because the log-probabilities of the training step then suffice. With vLLM it always
        does, because vLLM's log-probabilities differ from the model's.
        """
        return (
            self.generator != "transformers" or accumulation % (self.micro_batches(accumulation) * self.iterations) != 0
        )

    def prompts(self, sequences: int) -> int:
        """The number of prompts of `sequences` sequences, which all ranks train on together; at least one."""
        return max(1, sequences // self.completions_per_prompt)

    def of_evaluation(self, accumulation: int) -> Generation:
        """The settings for the completions of an evaluation, which are generated for one batch at a time. The policy scores them if it
        scores the completions of training.

        `accumulation`: micro-batches of a training step. Source: trl 1.16, trainer/grpo_trainer.py, `_prepare_inputs`.
        """
        return replace(self, steps=1, iterations=2 if self.scores_policy(accumulation) else 1)


def generation_of(request: EstimateRequest) -> Generation | None:
    """The completions of a request; None for other tasks than GRPO. Raises UsageError for options that contradict each other."""
    if request.task != "grpo":
        if given := request.changed_among(OPTIONS):
            raise UsageError(
                f"{dashed(given[0])} is an option of --task grpo",
                hint=f"add --task grpo, or leave {dashed(given[0])} out",
            )
        return None
    if not request.use_vllm and (given := request.changed_among(("vllm_mode", *OF_COLOCATED))):
        raise UsageError(f"{dashed(given[0])} configures vLLM", hint="add --use-vllm")
    if request.vllm_mode == "server" and (given := request.changed_among(OF_COLOCATED)):
        raise UsageError(
            f"{dashed(given[0])} configures vLLM on the training GPUs",
            hint="use --vllm-mode colocate; a server has options of its own",
        )
    check_ranks(request, request.gpus)
    if request.use_vllm and request.vllm_mode == "colocate" and request.load_in_8bit:
        raise UsageError("vLLM does not load a model in 8 bits", hint="use --load-in-4bit, or --vllm-mode server")
    return Generation(
        completion_length=request.max_completion_length,
        completions_per_prompt=request.num_generations,
        steps=request.steps_per_generation,
        iterations=request.num_iterations,
        beta=request.beta,
        generator=request.vllm_mode if request.use_vllm else "transformers",
        memory_utilization=request.vllm_gpu_memory_utilization,
        sleeps=request.vllm_enable_sleep_mode,
        tensor_parallel=request.vllm_tensor_parallel_size,
        max_length=request.vllm_max_model_length,
    )


def check_generation(request: EstimateRequest, seq_len: int) -> None:
    """Raises UsageError unless a sequence has tokens left for a prompt, and vLLM accepts its length."""
    if request.task != "grpo":
        return
    if request.max_completion_length >= seq_len:
        raise UsageError(
            f"a completion of {request.max_completion_length} tokens leaves no room for a prompt in {seq_len} tokens",
            hint="--seq-len is the length of prompt and completion together",
        )
    if request.use_vllm and (request.vllm_max_model_length or seq_len) < seq_len:
        raise UsageError(
            f"sequences of {seq_len} tokens are longer than --vllm-max-model-length {request.vllm_max_model_length}",
            hint=f"use --vllm-max-model-length {seq_len}, or a smaller --seq-len",
        )


def check_ranks(request: EstimateRequest, gpus: int) -> None:
    """Raises UsageError unless vLLM can divide this number of ranks, and their batches of evaluation have whole groups of completions."""
    if request.task != "grpo":
        return
    if gpus % request.vllm_tensor_parallel_size:
        raise UsageError(
            f"{gpus} ranks are not divisible by --vllm-tensor-parallel-size {request.vllm_tensor_parallel_size}",
            hint="give a divisor of --gpus",
        )
    completions = request.per_device_eval_batch_size * gpus
    if request.eval_strategy != "no" and completions % request.num_generations:
        raise UsageError(
            f"micro-batch of evaluation {request.per_device_eval_batch_size} x ranks {gpus} = {completions}, "
            f"not a multiple of --num-generations {request.num_generations}",
            hint=f"use --per-device-eval-batch-size {request.num_generations}",
        )


def least_micro_batch(request: EstimateRequest, *, gpus: int, accumulation: int) -> int:
    """The smallest micro-batch with which GRPO generates whole groups of completions; 1 for other tasks. All possible micro-batches are
    multiples of it.
    """
    if request.task != "grpo":
        return 1
    return request.num_generations // gcd(
        request.num_generations, gpus * (request.steps_per_generation or accumulation)
    )


def check_groups(request: EstimateRequest, *, gpus: int, micro_batch_size: int, accumulation: int) -> None:
    """Raises UsageError unless GRPO generates whole groups of completions with these batches."""
    if micro_batch_size % least_micro_batch(request, gpus=gpus, accumulation=accumulation):
        steps = request.steps_per_generation or accumulation
        raise UsageError(
            f"micro-batch {micro_batch_size} x ranks {gpus} x micro-batches per generation {steps} = "
            f"{micro_batch_size * gpus * steps}, not a multiple of --num-generations {request.num_generations}",
            hint=f"use --steps-per-generation {request.num_generations}",
        )
