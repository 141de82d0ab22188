"""The logits of all ranks that the Trainer keeps on a GPU while it evaluates.

Source: transformers 5.23, trainer.py, `evaluation_loop`; trainer_pt_utils.py, `EvalLoopContainer`, `torch_pad_and_concatenate`;
accelerate 1.15, utils/operations.py, `_gpu_gather`.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from fsdp_advisor.engines.model_outputs import logits_per_batch, output_bytes
from fsdp_advisor.job.plan import Plan
from fsdp_advisor.model.profile import Profile
from fsdp_advisor.model.tape import value_at
from fsdp_advisor.policies.dtypes import FP32_BYTES
from fsdp_advisor.program.storages import round_up


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptLogits:
    """The kept logits when the evaluation's last batch runs. Each number is the bytes of one storage.

    `before`: the storages that are alive during the last batch's forward. `after`: what happens after that forward, in order: a storage
    is allocated (positive) or freed (negative).
    """

    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()

    def peak(self, forward: int, left: int) -> int:
        """Peak bytes of the evaluation. `forward`: the peak of a forward without kept logits; `left`: the bytes alive at its end."""
        return max(forward + sum(self.before), *accumulate(self.after, initial=left + sum(self.before)))


def kept_logits(profile: Profile, plan: Plan) -> KeptLogits:
    """The logits that the evaluation keeps. Each rank gathers and keeps the logits of all ranks. Appending a batch's logits to the earlier
    ones copies all of them. The loop's variable refers to the previous batch's logits until it gets the next ones.
    """
    assert plan.evaluation is not None
    count = plan.evaluation.kept_batches
    if not count:
        return KeptLogits()
    ranks = plan.world_size
    own, one = logits_bytes(profile, plan, 1), logits_bytes(profile, plan, ranks)
    kept = () if count == 1 else (logits_bytes(profile, plan, ranks * (count - 1)),)
    of_loop = (one,) if count > 2 else ()  # the container itself has the first batch's logits
    gathered = (one, -own) if ranks > 1 else ()
    appended = (logits_bytes(profile, plan, ranks * count),) if count > 1 else ()
    return KeptLogits(before=(*kept, *of_loop), after=(*(-each for each in of_loop), own, *gathered, *appended))


def logits_bytes(profile: Profile, plan: Plan, batches: int) -> int:
    """Bytes of the logits of `batches` batches of one rank. Under mixed precision accelerate returns them in fp32, except with FSDP2 and
    DeepSpeed, whose models it does not wrap.

    Source: accelerate 1.15, accelerator.py, `prepare_model`, convert_outputs_to_fp32; `_prepare_fsdp2`, `_prepare_deepspeed`.
    """
    assert plan.evaluation is not None
    is_converted = plan.mixed and plan.backend not in ("fsdp2", "deepspeed")
    computed = plan.compute_bytes if plan.mixed else output_bytes(profile, plan)
    logits = logits_per_batch(profile, FP32_BYTES if is_converted else computed)
    return round_up(value_at(logits, plan.evaluation.batch_size * batches, plan.seq_len))


def not_modelled(profile: Profile, plan: Plan) -> list[str]:
    """Notes on what the peak of evaluation leaves out or assumes."""
    if plan.evaluation is None:
        return []
    notes = ["evaluation: sequences of other lengths than those of training, and the time that it takes"]
    if plan.evaluation.kept_batches:
        if not any(logits_per_batch(profile, 1)):
            notes.append(
                "evaluation: memory of outputs that are not logits over a vocabulary; the Trainer keeps these too"
            )
        notes.append("evaluation: host memory of the logits, and the effect of preprocess_logits_for_metrics on them")
    return notes
