"""Select the engine of a plan: its hooks, the program of its step, its states, and notes on what it does not model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache

from fsdp_advisor.engines import adalora, evaluation, framework_notes, reference, rollouts
from fsdp_advisor.engines.ddp.step import DdpStep
from fsdp_advisor.engines.deepspeed import host as deepspeed_host
from fsdp_advisor.engines.deepspeed.partitions import deepspeed_refusal
from fsdp_advisor.engines.deepspeed.step import DeepspeedStep
from fsdp_advisor.engines.fixed_matrices import fixed_matrices_refusal
from fsdp_advisor.engines.fsdp1.step import Fsdp1Step
from fsdp_advisor.engines.fsdp1.units import fsdp1_refusal
from fsdp_advisor.engines.fsdp2.step import Fsdp2Step
from fsdp_advisor.engines.fsdp2.units import fsdp2_refusal
from fsdp_advisor.engines.learned import learned
from fsdp_advisor.engines.optimizer_work import stepping_refusal
from fsdp_advisor.engines.reference import EngineStep, ReferenceStep, Zero3Reference, frozen, reference_plan
from fsdp_advisor.engines.vllm import vllm_refusal
from fsdp_advisor.errors import UsageError, assert_never
from fsdp_advisor.job.adaptation import CONFIG_KEY
from fsdp_advisor.job.compilation import compiles_embedding
from fsdp_advisor.job.frameworks import FRAMEWORK_NAMES
from fsdp_advisor.job.plan import Plan
from fsdp_advisor.model.attention import heads_refusal
from fsdp_advisor.model.kernels import fp16_notes, kernels_refusal
from fsdp_advisor.model.lora_kernels import lora_kernels_failure
from fsdp_advisor.model.profile import Profile
from fsdp_advisor.model.tape import ROLLOUT_PHASES, Tape
from fsdp_advisor.policies.dtypes import packed_experts_refusal, packing_refusal, with_cast_biases
from fsdp_advisor.policies.optimizers import optimizer_of
from fsdp_advisor.program.builder import build_program
from fsdp_advisor.program.instructions import StepProgram
from fsdp_advisor.program.storages import States

PAGED = (
    "paged optimizer state is in CUDA's managed memory, outside needed_bytes: it uses free memory of the GPU, and moves to the host "
    "when the GPU is full; host memory counts all of it"
)

OUTLIERS = (
    "outlier columns of a base in 8 bits: a column of a layer's input with a value of 6 or more (llm_int8_threshold) is multiplied in half "
    "precision, and kept a second time for backward, also with checkpointing. Trained models have few; randomly initialized ones have"
    " them in most inputs of gated MLPs' down projections"
)
"""Source: bitsandbytes 0.50.2, autograd/_functions.py, `MatMul8bitLt`."""


def _reference_of(profile: Profile, plan: Plan) -> ReferenceStep | None:
    """The step of a copy of the model that is the reference; None if the reference is not a copy."""
    if plan.reference != "copy":
        return None
    copied = reference_plan(plan)
    if copied.backend == "deepspeed":
        return ReferenceStep(Zero3Reference(profile, copied), copied)
    return ReferenceStep(_step_of_backend(frozen(profile), copied), copied)


def _step_of_backend(profile: Profile, plan: Plan, tape: Tape | None = None) -> EngineStep:
    """The hooks of the plan's backend. `tape`: of the step; None if only states are read, or for a copy that is the reference."""
    match plan.backend:
        case "ddp":
            return DdpStep(with_cast_biases(profile) if plan.mixed else profile, plan, tape)
        case "fsdp1":
            return Fsdp1Step(profile, plan)
        case "fsdp2":
            return Fsdp2Step(profile, plan)
        case "deepspeed":
            ran = range(len(profile.stacks)) if tape is None else {segment.stack for segment in tape.segments}
            return DeepspeedStep(profile, plan, idle_stacks=frozenset(range(len(profile.stacks))).difference(ran))
        case _:
            assert_never(plan.backend)


def step_program(profile: Profile, tape: Tape, plan: Plan) -> StepProgram:
    """The program of the plan's step over a tape. It depends on neither micro-batch nor sequence length."""
    return _step_program(learned(profile, tape, plan), tape, plan.without_batch)


@lru_cache(maxsize=64)
def _step_program(profile: Profile, tape: Tape, plan: Plan) -> StepProgram:
    hooks = _step_of_backend(profile, plan, tape)
    hooks.reference = _reference_of(profile, plan)
    once = frozenset(ROLLOUT_PHASES if plan.generates_once else ())
    return build_program(
        profile,
        tape,
        hooks,
        plan.gradient_accumulation_steps,
        only_first=once,
        trains=not plan.evaluates,
        keeps_graph=not plan.facts.uses_trainer,  # Trainer.training_step (transformers 5.23) returns the loss without its graph
        compiled_embedding=compiles_embedding(plan),
    )


def states_of(profile: Profile, plan: Plan) -> States:
    """The states that the plan's backend keeps on rank 0 from step to step. Those of a reference model count too."""
    states = _step_of_backend(profile, plan.without_batch).states
    copied = _reference_of(profile, plan.without_batch)
    if copied is None:
        return states
    more = copied.states
    return replace(states, parameters=states.parameters + more.parameters, buffers=states.buffers + more.buffers)


def model_refusal(profile: Profile, plan: Plan) -> UsageError | None:
    """Why the plan's trainer or engine cannot train the model; None if it can."""
    if plan.task in ("dpo", "kto", "grpo") and profile.task not in ("causal-lm", "image-text-to-text"):
        return UsageError(
            f"{FRAMEWORK_NAMES[plan.framework]} compares log-probabilities of causal language models, not of {profile.task} models",
            hint="use --task sft",
        )
    if profile.shares_between_layers and (plan.backend in ("fsdp1", "fsdp2") or plan.strategy == "zero3"):
        return UsageError(
            f"layers of the model share trained matrices, and {plan.backend} with a unit per layer is not modelled with them",
            hint="--strategy ddp, zero1 or zero2 --backend deepspeed, or another PEFT method",
        )
    refused = (
        heads_refusal(profile, plan.attention)
        or packed_experts_refusal(profile, plan)
        or lora_kernels_failure(profile.config, plan)
        or kernels_refusal(profile, plan)
        or adalora.adalora_refusal(profile, plan)
        or fixed_matrices_refusal(profile, plan)
        or reference.precomputation_refusal(profile, plan)
        or reference.copy_refusal(plan)
        or vllm_refusal(profile, plan)
    )
    if refused is not None:
        return refused
    match plan.backend:
        case "fsdp1":
            return fsdp1_refusal(profile, plan) or packing_refusal(profile, plan)
        case "deepspeed":
            return deepspeed_refusal(profile, plan)
        case "fsdp2":
            return fsdp2_refusal(profile, plan) or packing_refusal(profile, plan) or stepping_refusal(profile, plan)
        case "ddp":
            return stepping_refusal(profile, plan)
        case _:
            assert_never(plan.backend)


def not_modelled(profile: Profile, plan: Plan) -> list[str]:
    """Notes on what the models of the plan's engine and framework leave out or assume."""
    notes = deepspeed_host.not_modelled(profile, plan) if plan.backend == "deepspeed" else []
    optimizer = optimizer_of(plan)
    notes += optimizer.notes
    if plan.precision == "fp16-mixed" and (
        plan.stores_half or plan.backend != "ddp"
    ):  # autocast alone leaves hidden states in fp32
        notes += fp16_notes(profile)
    if optimizer.is_paged and plan.offload == "none":
        notes.append(PAGED)
    adaptation = profile.config.get(CONFIG_KEY)
    if isinstance(adaptation, Mapping) and "load_in_8bit" in adaptation["quantization"]:
        notes.append(OUTLIERS)
    return (
        notes
        + framework_notes.not_modelled(profile, plan)
        + reference.not_modelled(plan)
        + rollouts.not_modelled(profile, plan)
        + evaluation.not_modelled(profile, plan)
    )
