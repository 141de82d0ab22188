"""Three ranks: rank 2 calls another collective than the others, then it ends. The others print the errors."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

RANK = int(os.environ["RANK"])


def error_of(count: int, group: dist.ProcessGroup) -> str:
    try:
        dist.all_reduce(torch.ones(count).cuda(), group=group)
    except dist.DistBackendError as error:
        return str(error).splitlines()[-1]
    return "none"


torch.cuda.set_device(RANK)
dist.init_process_group("nccl")
other = dist.new_group([0, 1, 2])
world = dist.distributed_c10d._get_default_group()
assert error_of(4, world) == error_of(4, other) == "none"
errors = [error_of(2 if RANK == 2 else 4, other)]
if RANK != 2:  # it ends with status 0, so that the launcher does not end the others
    errors.append(error_of(4, world))
print("errors:", errors, flush=True)
os._exit(0)
