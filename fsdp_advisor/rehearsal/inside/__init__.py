"""The part of a rehearsal that runs in the processes of the script. It imports only the standard library and what the script uses."""

from __future__ import annotations

from fsdp_advisor.rehearsal.inside import launchers, meter, ranks
from fsdp_advisor.rehearsal.inside.backward_threads import finish_before_exit
from fsdp_advisor.rehearsal.inside.data import use_random_data
from fsdp_advisor.rehearsal.inside.flash_attention import provide_flash_attention
from fsdp_advisor.rehearsal.inside.import_hooks import after_import
from fsdp_advisor.rehearsal.inside.refusals import refuse_other_kernels
from fsdp_advisor.rehearsal.inside.values import answer_values
from fsdp_advisor.rehearsal.inside.weights import use_empty_weights


def start() -> None:
    """Register the hooks that run when the script imports certain libraries. Called once, before the script."""
    after_import("torch", answer_values)
    after_import("torch", meter.install)
    after_import("torch.autograd.graph", finish_before_exit)
    use_empty_weights()
    use_random_data()
    provide_flash_attention()
    refuse_other_kernels()
    after_import("torch.optim.optimizer", ranks.let_nccl_settle)
    if ranks.selected_ranks() or launchers.starts_all_nodes():
        after_import("torch.distributed.launcher.api", launchers.answer_torchrun)
        after_import("deepspeed.launcher.runner", launchers.answer_deepspeed)
    if ranks.selected_ranks():
        after_import("torch.distributed.rendezvous", ranks.answer_rendezvous)
        after_import("torch.distributed.distributed_c10d", ranks.answer_process_groups)
        after_import("torch.distributed", ranks.answer_rendezvous)
        after_import("torch.multiprocessing.spawn", launchers.refuse_spawn)
        after_import("deepspeed.runtime.zero.utils", ranks.answer_deepspeed_checks)
        after_import("torch.distributed.checkpoint.default_planner", ranks.accept_partial_checkpoints)
