"""Run one rank of a large job alone: all communication returns as if each other rank had this rank's data.

native/nccl.c does so for collectives on GPUs. This file does it for all other code that waits for other ranks: the rendezvous, PyTorch's
stores, gloo, and pickled objects.
"""

from __future__ import annotations

import functools
import os
import time
from typing import Any

RANKS = "REHEARSAL_RANKS"
"""The environment variable with the ranks that run, such as `0` or `0,7`. Each of them runs alone. Unset: all ranks run together."""
_GLOO = "gloo"
_ANSWERED = "rehearsal"
"""The name of the backend that replaces gloo: PyTorch's fake process group."""
_COMMUNICATORS = 8
"""Communicators that one process group may make for a device: PyTorch makes one, and another after it aborts one."""
_SETTLED_STEPS = 2
_SETTLING_SECONDS = 0.25


def selected_ranks() -> tuple[int, ...]:
    """The ranks that run alone; empty if all ranks run together."""
    return tuple(int(word) for word in os.environ.get(RANKS, "").split(",") if word.strip())


def let_nccl_settle(optimizer: Any) -> None:
    """Pause after the first optimizer steps. `optimizer` is torch.optim.optimizer.

    Every 100 ms a thread of PyTorch frees the tensors of completed collectives. DDP drops its first buckets before the second step. On a
    GPU the first step takes longer than 100 ms, so these buckets are freed in time; in a rehearsal it may be shorter.
    Source: ProcessGroupNCCL.cpp (torch 2.13), kWatchdogThreadSleepMillis; Reducer::rebuild_buckets.
    """
    steps = 0

    def pause(*_: Any) -> None:
        nonlocal steps
        from torch import distributed

        steps += 1
        if steps <= _SETTLED_STEPS and distributed.is_available() and distributed.is_initialized():
            time.sleep(_SETTLING_SECONDS)

    optimizer.register_optimizer_step_post_hook(pause)


def answer_deepspeed_checks(utils: Any) -> None:
    """Skip DeepSpeed's check that parameters equal those of rank 0. `utils` is deepspeed.runtime.zero.utils."""
    utils.assert_lst_len_same_as_other_ranks = _nothing
    utils.assert_ints_same_as_other_ranks = _nothing


def accept_partial_checkpoints(planner: Any) -> None:
    """Skip the check that the ranks' shards make up the whole checkpoint: a single rank writes its own shards in place of everyone's.

    `planner` is torch.distributed.checkpoint.default_planner. Its check returns a list of errors (torch 2.13) or whether the plan is
    valid (earlier).
    """
    original: Any = planner._validate_global_plan

    def validate(*arguments: Any) -> Any:
        return [] if isinstance(original(*arguments), list) else True

    planner._validate_global_plan = validate


def answer_rendezvous(module: Any) -> None:
    """Make every TCPStore a server that waits for no other rank. `module` is torch.distributed or its rendezvous."""
    original: Any = module.TCPStore

    class Store(original):  # type: ignore[misc]  # torch is not installed where types are checked
        def __init__(self, *arguments: Any, **named: Any) -> None:
            kept = {"timeout": named["timeout"]} if "timeout" in named else {}
            super().__init__("localhost", 0, 1, True, **kept)

    module.TCPStore = Store


def answer_process_groups(c10d: Any) -> None:
    """Replace the functions of torch.distributed.distributed_c10d that wait for other ranks or receive objects from them.

    Subgroups get new communicators, because a split needs a call of every rank.
    """
    # one unique id for all communicators of a group; with several, rank 128 would wait for another rank's id
    os.environ["TORCH_NCCL_RANKS_PER_ROOT"] = str(2**30)
    c10d._store_based_barrier = _nothing
    c10d.monitored_barrier = _nothing
    c10d._get_split_source = _nothing
    c10d.split_group = functools.partial(_new_group_of_part, c10d)
    c10d._new_process_group_helper = _without_gloo(c10d, c10d._new_process_group_helper)
    for name in ("broadcast_object_list", "scatter_object_list", "recv_object_list"):
        setattr(c10d, name, _own_objects(c10d, getattr(c10d, name)))
    for name in ("all_reduce", "reduce"):
        setattr(c10d, name, _sum_of_equal(c10d, getattr(c10d, name)))


def _nothing(*arguments: Any, **named: Any) -> None:
    return None


def _new_group_of_part(
    c10d: Any, parent_pg: Any = None, split_ranks: Any = None, timeout: Any = None, pg_options: Any = None,
    group_desc: str | None = None, **others: Any,
) -> Any:  # fmt: skip
    """A new group for the part of `split_ranks` that contains this rank; None if no part does."""
    parent = parent_pg or c10d._get_default_group()
    ranks = c10d.get_process_group_ranks(parent)
    for part in split_ranks:
        if c10d.get_rank(parent) in part:
            members = sorted(ranks[rank] for rank in part)
            return c10d.new_group(members, timeout=timeout, pg_options=pg_options, group_desc=group_desc, **others)
    return None


def _without_gloo(c10d: Any, original: Any) -> Any:
    """A function that makes process groups as `original` does, but uses PyTorch's fake process group, under gloo's name, instead of
    gloo.
    """

    def create(options: Any, _: Any) -> Any:
        from torch._C._distributed_c10d import FakeProcessGroup

        return FakeProcessGroup._create_internal(options.group_rank, options.group_size)

    @functools.wraps(original)
    def make(size: int, rank: int, ranks: Any, backend: Any, store: Any, name: str, *rest: Any, **named: Any) -> Any:
        if _ANSWERED.upper() not in c10d.Backend._plugins:
            c10d.Backend.register_backend(_ANSWERED, create, extended_api=True, devices=["cpu", "cuda"])
        asked = "cpu:gloo,cuda:nccl" if str(backend) == c10d.Backend.UNDEFINED else str(backend)
        _give_unique_ids(c10d.PrefixStore("cuda/", c10d.PrefixStore(f"{name}/", store)), size)
        used = c10d.Backend(asked.replace(_GLOO, _ANSWERED))
        group, kept = original(size, rank, ranks, used, store, name, *rest, **named)
        if group in c10d._world.pg_map:
            c10d._world.pg_map[group] = (backend, c10d._world.pg_map[group][1])
        return group, kept

    return make


def _give_unique_ids(store: Any, size: int) -> None:
    """Store the unique ids for which a rank waits before it makes an NCCL communicator whose first rank is another one.

    Their keys are the number of the communicator, or both ranks of a message. native/nccl.c does not read an id when a rank runs alone.
    Source: ProcessGroupNCCL::broadcastUniqueNCCLID and getKeySendRecv (torch 2.13).
    """
    me = int(os.environ.get("RANK", "0"))
    pairs = [f"{min(me, other)}:{max(me, other)}" for other in range(size) if me < size]
    for key in [*map(str, range(_COMMUNICATORS)), *pairs]:
        store.set(key, "i" * 128)


def _own_objects(c10d: Any, original: Any) -> Any:
    """A replacement for a function that receives pickled objects from another rank. It leaves this rank's own list unchanged."""

    @functools.wraps(original)
    def take(*arguments: Any, src: Any = None, group: Any = None, group_src: Any = None, **named: Any) -> Any:
        position = 2 if original.__name__ == "scatter_object_list" else 1
        source = src if len(arguments) <= position else arguments[position]
        where = group if len(arguments) <= position + 1 else arguments[position + 1]
        mine = c10d.get_rank(where) if group_src is not None else c10d.get_rank()
        wanted = group_src if group_src is not None else 0 if source is None else source
        if mine != wanted:
            return wanted if original.__name__ == "recv_object_list" else None
        return original(*arguments, **_given(src=src, group=group, group_src=group_src), **named)

    return take


def _given(**named: Any) -> dict[str, Any]:
    return {name: value for name, value in named.items() if value is not None}


def _sum_of_equal(c10d: Any, original: Any) -> Any:
    """A replacement for all_reduce or reduce that multiplies a summed CPU tensor by the number of ranks. The fake process group leaves
    it unchanged.
    """

    @functools.wraps(original)
    def reduce(tensor: Any, *arguments: Any, **named: Any) -> Any:
        work = original(tensor, *arguments, **named)
        ops = [
            each for each in (*arguments, *named.values()) if isinstance(each, c10d.ReduceOp | c10d.ReduceOp.RedOpType)
        ]
        groups = [each for each in (*arguments, *named.values()) if isinstance(each, c10d.ProcessGroup)]
        if tensor.device.type == "cpu" and (not ops or ops[0] == c10d.ReduceOp.SUM):
            tensor.mul_(c10d.get_world_size(groups[0] if groups else None))
        return work

    return reduce
