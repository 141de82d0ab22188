"""The reference model of preference training as a trainer prepares a copy of the model: its states and the hooks of its forward.

Source: trl 1.16, trainer/dpo_trainer.py, `__init__`; models/utils.py, `prepare_deepspeed`, `prepare_fsdp`. With FSDP2 the whole copy
is one unit, because `prepare_fsdp` calls `fully_shard` only on the model. With ZeRO-1 and 2 every rank keeps a whole copy in the
compute dtype; ZeRO-3 shards it with DeepSpeed's defaults, because "auto" has no value yet when it is prepared.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from fsdp_advisor.engines.ddp.step import DdpStep
from fsdp_advisor.engines.deepspeed.coordinator import gathered
from fsdp_advisor.engines.deepspeed.gathering import Gathering
from fsdp_advisor.engines.deepspeed.partitions import persistent, shards
from fsdp_advisor.engines.deepspeed.step import DeepspeedStep
from fsdp_advisor.engines.fsdp1.step import Fsdp1Step
from fsdp_advisor.engines.fsdp2.step import Fsdp2Step
from fsdp_advisor.engines.fsdp2.units import fsdp2_units
from fsdp_advisor.engines.loading import load_methods
from fsdp_advisor.engines.units import buffers
from fsdp_advisor.errors import UsageError, assert_never
from fsdp_advisor.job.choices import Precision
from fsdp_advisor.job.frameworks import FRAMEWORK_NAMES
from fsdp_advisor.job.plan import Plan
from fsdp_advisor.model.fsdp_units import AT_ROOT, UnitId
from fsdp_advisor.model.profile import Profile, Unit
from fsdp_advisor.parallelism.mesh import ONE_RANK
from fsdp_advisor.policies.dtypes import compute_bytes
from fsdp_advisor.program.accounts import Account
from fsdp_advisor.program.builder import StepBuilder
from fsdp_advisor.program.hooks import StepHooks
from fsdp_advisor.program.storages import NO_STORAGES, States, Storages
from fsdp_advisor.units import format_bytes

EngineStep = DdpStep | Fsdp1Step | Fsdp2Step | DeepspeedStep


def precomputation_refusal(profile: Profile, plan: Plan) -> UsageError | None:
    """Why TRL cannot compute the reference's log-probabilities before training. None if it can, or need not.

    With adapters the reference is the trained model, which FSDP leaves on the CPU until training begins. Source: trl 1.16,
    trainer/dpo_trainer.py and kto_trainer.py, `_precompute_ref_logps`: it fails in rehearsals of three jobs.
    """
    precomputes = plan.task in ("dpo", "kto") and plan.reference == "none"
    if not (precomputes and profile.adapter_parameters and plan.backend in ("fsdp1", "fsdp2")):
        return None
    return UsageError(
        "TRL 1.16 cannot precompute the reference of adapters with FSDP: it runs the model before FSDP moves it to the GPU",
        hint="leave --precompute-ref-log-probs out, or use --backend ddp or deepspeed",
    )


def loads_copy(plan: Plan) -> bool:
    """Whether a copy of the model is loaded as the reference: for the steps, or by TRL under FSDP to compute its log-probabilities before
    them. It is freed then. Source: trl 1.16, trainer/dpo_trainer.py and kto_trainer.py, `__init__`.
    """
    precomputes = plan.task in ("dpo", "kto") and plan.reference == "none" and plan.backend in ("fsdp1", "fsdp2")
    return plan.reference == "copy" or precomputes


def gathered_bytes(profile: Profile, plan: Plan) -> int | None:
    """Bytes of the copy on a GPU when FSDP2 gathers it as one unit: shards, the all-gather's output, and the parameters that are copied out
    of it. None if there is no such copy.
    """
    if plan.backend != "fsdp2" or not loads_copy(plan):
        return None
    _, units, states = fsdp2_units(frozen(profile), reference_plan(plan))
    output = units[AT_ROOT].gather_output if plan.shard_degree > 1 else NO_STORAGES
    return (states.parameters + output + units[AT_ROOT].unsharded).rounded


def copy_refusal(plan: Plan) -> UsageError | None:
    """Why the step of a copy of the model that is loaded in half precision is not modelled. None if it is, or if there is no such copy.

    The trained model is in fp32 and has autocast. DeepSpeed casts both. accelerate prepares the copy for FSDP2. Source: LLaMA-Factory
    0.9.5, train/dpo/trainer.py, `__init__`.
    """
    same = plan.backend == "deepspeed" or (plan.backend == "ddp" and not plan.mixed)
    if not plan.facts.loads_reference_in_half or plan.reference != "copy" or same:
        return None
    return UsageError(
        f"{FRAMEWORK_NAMES[plan.framework]}'s copy of the model, which is loaded in half precision, is modelled with DeepSpeed, or with "
        "DDP without autocast",
        hint="--backend deepspeed, --use-peft, or --strategy ddp --precision bf16",
    )


def reference_plan(plan: Plan) -> Plan:
    """The plan by which the copy of the reference model is prepared: it trains nothing, and takes one micro-batch at a time."""
    plain = replace(plan, optim="sgd", reference="none", gradient_accumulation_steps=1)
    match plan.backend:
        case "ddp" | "fsdp1":
            return plain
        case "fsdp2":
            return replace(plain, framework="torch", wrap="none", reshard_after_forward="auto")
        case "deepspeed" if plan.strategy == "zero3":
            return replace(plain, framework="deepspeed")
        case "deepspeed":
            computes: Precision = "fp32" if plan.precision == "fp32" else "bf16"
            return replace(plain, backend="ddp", strategy="ddp", precision=computes, offload="none", mesh=ONE_RANK)
        case _:
            assert_never(plan.backend)


@lru_cache(maxsize=16)
def frozen(profile: Profile) -> Profile:
    """The profile of the model with all parameters frozen."""

    def unit(each: Unit) -> Unit:
        return replace(each, parameters=tuple(replace(p, trainable=False) for p in each.parameters))

    return profile.with_units(unit)


class Zero3Reference(DeepspeedStep):
    """ZeRO-3 without an optimizer: shards, persistent parameters, and what a forward gathers."""

    def __init__(self, profile: Profile, plan: Plan) -> None:
        super().__init__(profile, plan)
        kept = shards(frozen(profile), plan) + persistent(profile, plan, self._settings)
        self.states = States(parameters=kept, buffers=buffers(profile, plan.param_bytes))

    def first_step_transients(self) -> Storages:
        return NO_STORAGES

    def begin_step(self, step: StepBuilder) -> None:
        self._gathering = Gathering(gathered(self._profile, self._plan, self._settings, forward_only=True))
        step.alloc(Account.PARAMETERS, self.states.parameters)
        step.alloc(Account.OTHER, self.states.buffers)

    def begin_forward(self, *, with_gradients: bool, repeated: bool) -> None:
        self._gathering.begin_forward()

    def post_forward(self, step: StepBuilder, unit: UnitId) -> None:
        super().post_forward(step, unit)
        if unit == AT_ROOT:
            self._gathering.drop(step)


class ReferenceStep(StepHooks):
    """The hooks of a copy of the model: those of its engine in forward."""

    def __init__(self, engine: EngineStep, plan: Plan) -> None:
        """`engine`, `plan`: of the copy (`reference_plan`)."""
        self._engine = engine
        self.states = engine.states
        self._root_stays = plan.backend == "fsdp1" or (plan.backend == "fsdp2" and not plan.reshards)
        """Whether the root stays gathered for ever: FSDP frees a unit that it does not reshard after forward only after its
        backward, and FSDP1 never reshards the root after forward.
        """

    def begin_step(self, step: StepBuilder) -> None:
        self._engine.begin_step(step)
        if isinstance(self._engine, Fsdp1Step | Fsdp2Step) and self._root_stays:
            step.alloc(Account.UNSHARDED_PARAMETERS, self._engine.unsharded(AT_ROOT))

    def begin_micro_batch(self, *, is_first: bool, is_last: bool) -> None:
        self._engine.begin_micro_batch(is_first=is_first, is_last=is_last)

    def begin_forward(self, *, with_gradients: bool, repeated: bool) -> None:
        self._engine.begin_forward(with_gradients=with_gradients, repeated=repeated)

    def pre_forward(self, step: StepBuilder, unit: UnitId) -> None:
        if not (unit == AT_ROOT and self._root_stays):
            self._engine.pre_forward(step, unit)

    def post_forward(self, step: StepBuilder, unit: UnitId) -> None:
        if not (unit == AT_ROOT and self._root_stays):
            self._engine.post_forward(step, unit)


def loading_bytes(profile: Profile, plan: Plan) -> int:
    """Peak bytes on a GPU while the copy is prepared, which happens before the trained model is prepared; 0 if it is sharded while it is
    read.
    """
    if not loads_copy(plan) or (plan.backend == "deepspeed" and plan.strategy == "zero3"):
        return 0
    return load_methods(frozen(profile), reference_plan(plan))[0].gpu_bytes


def copy_warnings(profile: Profile, plan: Plan) -> list[str]:
    """A warning about a copy that FSDP2 gathers as a whole, in the steps or before them."""
    if plan.backend != "fsdp2" or not loads_copy(plan) or plan.shard_degree == 1:
        return []
    whole = format_bytes(profile.bytes_of(lambda p: compute_bytes(plan, p)))
    in_steps = plan.reference == "copy"
    gathers = "gathers and keeps" if in_steps and not plan.reshards else "gathers"
    when = "" if in_steps else " before training"
    precomputed = "--precompute-ref-log-probs gathers them only before training; "
    return [
        f"{FRAMEWORK_NAMES[plan.framework]} makes the whole reference model one FSDP2 unit, whose forward {gathers} all {whole} of its "
        f"weights{when}; {precomputed if in_steps and plan.task != 'grpo' else ''}--strategy zero3 with --backend fsdp1 or deepspeed "
        "gathers them by layers"
    ]


def not_modelled(plan: Plan) -> list[str]:
    """Notes on what an estimate of training on preferences leaves out or assumes."""
    if plan.task == "sft":
        return []
    notes = [
        "sequences of different lengths: the collator pads them, and sdpa then needs a mask of all pairs of tokens"
    ]
    if plan.task == "reward":
        return notes
    if loads_copy(plan):
        notes.append("host memory while the reference model is loaded")
        if plan.reference == "none":
            notes.append("activations while the reference's log-probabilities are computed before training")
    if plan.reference == "adapters-off" and plan.backend == "deepspeed" and plan.strategy == "zero3":
        notes.append(
            "parameters of the trained model that ZeRO-3 still keeps gathered when the reference's forward begins"
        )
    return notes
