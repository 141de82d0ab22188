"""Memory of GRPO's generation and scoring: the peaks of their phases on a GPU, and the transfer of weights to vLLM.

Source: trl 1.16, trainer/grpo_trainer.py; generation/vllm_generation.py, `sync_weights`, `_iter_named_params`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from fsdp_advisor.hardware.gpu import Gpu
from fsdp_advisor.job.plan import Plan
from fsdp_advisor.memory.device import vllm_bytes
from fsdp_advisor.model.profile import Parameter, Profile
from fsdp_advisor.model.tape import GENERATION_PHASES, ROLLOUT_PHASES
from fsdp_advisor.policies.dtypes import cast_bytes, stored_bytes
from fsdp_advisor.program.accounts import JobPhase


def phase_bytes(
    profile: Profile, plan: Plan, gpu: Gpu, kept: int, peaks: Mapping[str, int] | None
) -> dict[JobPhase, int | None]:
    """Peak bytes on a GPU of the phases of GRPO's step, by name; empty for other tasks.

    `kept`: bytes between two steps. `peaks`: tensor bytes by phase of the tape, None if they are unknown.
    """
    generation = plan.generation
    if generation is None:
        return {}
    if generation.generator == "transformers":
        generates = None if peaks is None else max(peaks[name] for name in GENERATION_PHASES)
    else:
        asleep = generation.generator == "colocate" and generation.sleeps
        generates = kept + handover_bytes(profile, plan) + (vllm_bytes(gpu, generation) if asleep else 0)
    if peaks is None:
        return {"generate": generates, "train": None}
    scores = [peaks[name] for name in ("policy", "reference") if name in peaks]
    trains = max(n_bytes for name, n_bytes in peaks.items() if name not in ROLLOUT_PHASES)
    return {"generate": generates, **({"score": max(scores)} if scores else {}), "train": trains}


def handover_bytes(profile: Profile, plan: Plan) -> int:
    """Bytes that are gathered at once to copy the weights to vLLM: one parameter, under FSDP1 one unit, and with adapters under
    ZeRO-3 the whole model.
    """

    def stored(parameter: Parameter) -> int:
        return parameter.elements * stored_bytes(plan, parameter)

    units = [unit for unit, _ in profile.counted_units()]
    if plan.shard_degree == 1 or plan.strategy == "ddp":
        return 0
    match plan.backend:
        case "fsdp1":
            return max(sum(map(stored, unit.parameters)) for unit in units)
        case "fsdp2":
            return max(stored(p) for unit in units for p in unit.parameters)
        case "deepspeed" if plan.strategy == "zero3":
            if profile.adapter_parameters:
                return profile.bytes_of(partial(cast_bytes, plan))
            return max(p.elements * cast_bytes(plan, p) for unit in units for p in unit.parameters)
        case _:
            return 0


def batch_warnings(plan: Plan) -> tuple[str, ...]:
    """A warning if an optimizer step learns from only one prompt. With TRL's own defaults it has as many as ranks."""
    generation = plan.generation
    if generation is None or generation.prompts(plan.global_batch_size) > 1:
        return ()
    return (
        f"an optimizer step trains on completions of one prompt, whose {generation.completions_per_prompt} rewards are compared "
        "with each other; --gradient-accumulation-steps N takes N prompts",
    )


def not_modelled(profile: Profile, plan: Plan) -> list[str]:
    """Notes on what an estimate of GRPO leaves out or assumes."""
    generation = plan.generation
    if generation is None:
        return []
    notes = [
        "the time of generation and of the rewards: tokens_per_second_per_gpu and step_seconds count only scoring and training",
        "models that compute rewards",
    ]
    match generation.generator:
        case "transformers" if plan.backend == "fsdp1":
            notes.append(
                "the root, which FSDP1 also gathers in the dtype that it is stored in while transformers generates"
            )
        case "colocate":
            notes.append("vLLM's CUDA graphs, which some of its versions capture outside its share of the GPU")
            notes.append("what vLLM's share must hold besides its weights and one sequence: activations, CUDA graphs")
        case "server":
            notes.append("the GPUs of vLLM's server, which are not among --gpus")
    if generation.generator != "transformers" and profile.adapter_parameters:
        notes.append("the products of adapters while they are merged for vLLM")
    return notes
