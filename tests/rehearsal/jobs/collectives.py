"""Every rank compares NCCL's collectives of a rehearsal with gloo's, and prints "equal" at the end. For four ranks."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ReduceOp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

RANK, RANKS = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
TYPES = (torch.int8, torch.uint8, torch.int32, torch.int64, *FLOATS)
SIZES = (1, 1000, 30_001)
"""Numbers of elements: less than a page, more than a page, and (for types of more than two bytes) more than a slot of shared memory."""


def check(name: str, got: torch.Tensor, want: torch.Tensor) -> None:
    assert torch.equal(got.cpu().double(), want.double()), f"{name} on rank {RANK}: {got.cpu()}, not {want}"


def data(size: int, dtype: torch.dtype) -> torch.Tensor:
    """Small numbers, different on each rank, whose sums and products every type but int8 and uint8 represents."""
    return ((torch.arange(size) * 7 + RANK * 3) % 5 + 1).to(dtype)


def wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor.long()


def reduced(tensor: torch.Tensor, op: ReduceOp.RedOpType) -> torch.Tensor:
    """The expected result: gloo's reduction, in a type without rounding or overflow."""
    exact = wide(tensor).clone()
    dist.all_reduce(exact, op=op)
    return exact.to(tensor.dtype)


def reductions(own: torch.Tensor) -> None:
    for op in (ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX):
        got = own.cuda()
        dist.all_reduce(got, op=op)
        check(f"all_reduce {op} of {own.dtype}", got, reduced(own, op))
    total = reduced(own.double(), ReduceOp.SUM)
    if own.is_floating_point():
        got = own.cuda()
        dist.all_reduce(got, op=ReduceOp.AVG)
        check(f"mean of {own.dtype}", got, (total / RANKS).to(own.dtype))
    if own.dtype in (torch.float16, torch.float32, torch.float64):  # PyTorch 2.13 passes a float for bfloat16
        got = own.cuda()
        dist.all_reduce(got, op=dist._make_nccl_premul_sum(2.0))
        check(f"multiplied sum of {own.dtype}", got, (total * 2).to(own.dtype))


def copies(own: torch.Tensor) -> None:
    parts = [torch.empty_like(own) for _ in range(RANKS)]
    dist.all_gather(parts, own)
    everything = torch.cat(parts)
    gathered = [torch.empty_like(own, device="cuda") for _ in range(RANKS)]
    dist.all_gather(gathered, own.cuda())
    check("all_gather", torch.cat([each.cpu() for each in gathered]), everything)
    flat = torch.empty_like(everything, device="cuda")
    dist.all_gather_into_tensor(flat, own.cuda())
    check("all_gather_into_tensor", flat, everything)
    mixed = torch.cat([own + j for j in range(RANKS)])
    scattered = torch.empty_like(own, device="cuda")
    dist.reduce_scatter_tensor(scattered, mixed.cuda())
    check("reduce_scatter", scattered, sum(wide(part) + RANK for part in parts).to(own.dtype))
    exchanged = torch.empty_like(everything, device="cuda")
    dist.all_to_all_single(exchanged, mixed.cuda())
    check("all_to_all", exchanged, torch.cat([part + RANK for part in parts]))
    for root in range(RANKS):
        rooted(own, parts, root)


def rooted(own: torch.Tensor, parts: list[torch.Tensor], root: int) -> None:
    got = own.cuda()
    dist.broadcast(got, root)
    check("broadcast", got, parts[root])
    got = own.cuda()
    dist.reduce(got, root)
    if root == RANK:
        check("reduce", got, sum(map(wide, parts)).to(own.dtype))
    gathered = [torch.empty_like(own, device="cuda") for _ in range(RANKS)] if root == RANK else None
    dist.gather(own.cuda(), gathered, dst=root)
    if gathered:
        check("gather", torch.cat([each.cpu() for each in gathered]), torch.cat(parts))
    got = torch.empty_like(own, device="cuda")
    dist.scatter(got, [(own + j).cuda() for j in range(RANKS)] if root == RANK else None, src=root)
    check("scatter", got, parts[root] + RANK)


def eighths() -> None:
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        own = (torch.arange(16) / 4 + RANK).to(dtype)
        got = own.cuda()
        dist.all_reduce(got)
        check(str(dtype), got.cpu().float(), reduced(own.float(), ReduceOp.SUM).to(dtype).float())


def uneven() -> None:
    """Compare an exchange of different numbers of tokens (some none) between ranks, as in a mixture of experts."""
    sent, received = [(RANK + j) % 3 for j in range(RANKS)], [(j + RANK) % 3 for j in range(RANKS)]
    tokens = torch.arange(sum(sent)) + 100 * RANK
    got, want = torch.zeros(sum(received), dtype=torch.int64).cuda(), torch.zeros(sum(received), dtype=torch.int64)
    dist.all_to_all_single(got, tokens.cuda(), received, sent)
    dist.all_to_all_single(want, tokens, received, sent)
    check("uneven all_to_all", got, want)


def messages() -> None:
    """Compare messages: a ring in one batch with more bytes than a queue can store, and messages one by one."""
    own, got = torch.full((200_000,), RANK).cuda(), torch.zeros(200_000, dtype=torch.int64).cuda()
    ring = [dist.P2POp(dist.isend, own, (RANK + 1) % RANKS), dist.P2POp(dist.irecv, got, (RANK - 1) % RANKS)]
    for work in dist.batch_isend_irecv(ring):
        work.wait()
    check("ring", got, torch.full((200_000,), (RANK - 1) % RANKS))
    if RANK % 2 == 0:
        dist.send(own[:100], RANK + 1)
        dist.recv(got, RANK + 1)
    else:
        dist.recv(got[:100], RANK - 1)
        dist.send(own, RANK - 1)
    check("pair", got[:100], torch.full((100,), RANK ^ 1))


def objects() -> None:
    found: list[object] = [None] * RANKS
    dist.all_gather_object(found, "x" * 300_000 * RANK)
    assert [len(str(each)) for each in found] == [300_000 * j for j in range(RANKS)]
    sent = [{"rank": RANK}]
    dist.broadcast_object_list(sent, src=2)
    assert sent == [{"rank": 2}]
    mine: list[object] = [None]
    dist.scatter_object_list(mine, [f"for {j}" for j in range(RANKS)] if RANK == 1 else None, src=1)
    assert mine == [f"for {RANK}"]


def groups() -> None:
    """Compare collectives in groups of a mesh and split groups, which share a communicator, and in a group without some of the ranks."""

    def total(group: dist.ProcessGroup) -> float:
        one = torch.tensor([float(RANK)]).cuda()
        dist.all_reduce(one, group=group)
        return float(one.cpu())

    mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=("rows", "columns"))
    pipelines(mesh)
    assert total(mesh["columns"].get_group()) == (1.0, 5.0)[RANK // 2]
    assert total(mesh["rows"].get_group()) == (2.0, 4.0)[RANK % 2]
    before = torch.cuda.mem_get_info()[0]
    split = dist.split_group(None, [[1, 3], [0, 2]])
    assert total(split) == (2.0, 4.0)[RANK % 2]
    taken = before - torch.cuda.mem_get_info()[0]
    assert taken == int(os.environ["REHEARSAL_COMMUNICATOR_BYTES"]), "a communicator takes memory"
    dist.destroy_process_group(split)
    assert torch.cuda.mem_get_info()[0] == before, "and returns it"
    some = dist.new_group([0, 3])
    if RANK in (0, 3):
        assert total(some) == 3.0


def pipelines(mesh: DeviceMesh) -> None:
    """Run a pipeline of two stages, with messages whose data move and with larger ones that are only counted. Shapes are sent as
    objects.
    """
    device = torch.device("cuda", RANK)
    for rows in (64, 65_536):
        part = nn.Linear(64, 64).to(device)
        stage = PipelineStage(part, RANK % 2, 2, device, group=mesh["columns"].get_group())
        schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=nn.functional.mse_loss)
        batch = torch.randn(rows, 64).to(device)
        for _ in range(2):
            if RANK % 2:
                schedule.step(target=batch, losses=[])
            else:
                schedule.step(batch)
        assert all(parameter.grad is not None for parameter in part.parameters())


def main() -> None:
    torch.cuda.set_device(RANK)
    dist.init_process_group("cpu:gloo,cuda:nccl", device_id=torch.device("cuda", RANK))
    for size in SIZES:
        for dtype in TYPES:
            reductions(data(size, dtype))
            copies(data(size, dtype))
    for part in (eighths, uneven, messages, objects, groups):
        part()
    large = torch.full((1 << 20,), RANK + 1.0).cuda()
    dist.all_reduce(large)
    check("large tensors are left as they are", large[:3], torch.full((3,), RANK + 1.0))
    dist.barrier()
    dist.destroy_process_group()
    print("equal", flush=True)


main()
