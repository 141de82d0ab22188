"""Schedule-free AdamW, SGD and RAdam of the package schedulefree.

They keep a second copy of the weights, `z`, instead of the first moment, and normalize the gradient in place. Evaluation and saving
turn the weights into their average and back, in place as well.

Source: schedulefree 1.4.1, adamw_schedulefree.py, sgd_schedulefree.py, radam_schedulefree.py (`step`, `train`, `eval`); transformers
5.23, trainer_optimizer.py, `_get_schedule_free_optimizer`.
"""

from __future__ import annotations

from fsdp_advisor.job.choices import OptimizerName
from fsdp_advisor.policies.optimizers.elementwise import Elementwise
from fsdp_advisor.policies.optimizers.interface import Constructor, NamedOptimizer, Refusal, without_deepspeed


def _schedule_free(name: OptimizerName, cls: str, *, moments: int, temporaries: int, passes: int) -> Elementwise:
    constructor = Constructor(module="schedulefree", name=cls, has_modes=True)
    return Elementwise(
        name=name,
        script=constructor,
        transformers=NamedOptimizer(name=name),
        **without_deepspeed(name),
        measured_zero1=Refusal(f"ZeroRedundancyOptimizer has no train(), without which {name} does not step"),
        moments=moments,
        temporaries=temporaries,
        passes=passes,
    )


_SGD_PASSES = 9  # three updates (w towards z, then w, then z); each reads or writes 3 tensors
_ADAM_PASSES = _SGD_PASSES + 14  # v (2 + 3), its root (2 + 2 + 2), the gradient (3)

ADAMW = _schedule_free("schedule_free_adamw", "AdamWScheduleFree", moments=2, temporaries=1, passes=_ADAM_PASSES)
SGD = _schedule_free("schedule_free_sgd", "SGDScheduleFree", moments=1, temporaries=0, passes=_SGD_PASSES)
RADAM = _schedule_free("schedule_free_radam", "RAdamScheduleFree", moments=2, temporaries=1, passes=_ADAM_PASSES)
