"""Kernels of other libraries, and values read from the GPU. Prints one JSON object with a result per check."""

import json

import torch

found = {}


def check(function):
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    value = function()
    found[function.__name__] = {"value": value, "peak": torch.cuda.max_memory_allocated() - before}
    torch.cuda.empty_cache()


@check
def compiled_layer():
    layer = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64)).cuda()
    out = torch.compile(layer)(torch.randn(32, 64, device="cuda", requires_grad=True))
    out.sum().backward()
    return list(out.shape)


@check
def triton_autotuning():
    from triton_kernel import add_one

    x = torch.zeros(10_000, device="cuda")
    add_one[lambda options: (10_000 // options["BLOCK"] + 1,)](x, 10_000)
    return add_one.best_config.kwargs["BLOCK"]


@check
def liger_loss():
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    x = torch.randn(64, 32, device="cuda", requires_grad=True)
    head = torch.randn(1000, 32, device="cuda", requires_grad=True)
    loss = LigerFusedLinearCrossEntropyLoss()(head, x, torch.randint(0, 1000, (64,), device="cuda"))
    loss.backward()
    return [loss.item(), list(head.grad.shape)]


@check
def bitsandbytes_4bit():
    import bitsandbytes

    layer = bitsandbytes.nn.Linear4bit(1024, 1024, bias=False, compute_dtype=torch.bfloat16).cuda()
    layer(torch.randn(8, 1024, device="cuda", dtype=torch.bfloat16, requires_grad=True)).sum().backward()
    parameter = torch.nn.Parameter(torch.zeros(64, 1024, device="cuda"))
    parameter.grad = torch.zeros_like(parameter)
    bitsandbytes.optim.PagedAdamW8bit([parameter]).step()
    return layer.weight.nbytes


@check
def cuda_graph():
    graph = torch.cuda.CUDAGraph()
    x = torch.zeros(1000, device="cuda")
    with torch.cuda.graph(graph):
        x * 2
    graph.replay()
    return True


@check
def event_timing():
    first, second = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    first.record()
    torch.randn(4096, 4096, device="cuda").add_(1)
    second.record()
    torch.cuda.synchronize()
    return [first.elapsed_time(second) > 0, torch.cuda.mem_get_info()[1]]


@check
def equal_blocks():
    """Whether addresses descend, and the order in which freed blocks are used. Then more than 1 TiB of addresses is used."""

    def addresses():
        blocks = [torch.empty(30 << 20, dtype=torch.uint8, device="cuda") for _ in range(3)]
        return [block.data_ptr() for block in blocks]

    begins, again = addresses(), addresses()
    for _ in range(20):
        torch.cuda.empty_cache()
        torch.empty(60 << 30, dtype=torch.uint8, device="cuda")
    return [sorted(begins, reverse=True) == begins, [begins.index(begin) for begin in again]]


@check
def gradient_scaler():
    model = torch.nn.Linear(512, 512, device="cuda")
    optimizer, scaler = torch.optim.AdamW(model.parameters()), torch.amp.GradScaler()
    for _ in range(2):
        with torch.autocast("cuda", torch.float16):
            loss = torch.nn.functional.cross_entropy(
                model(torch.randn(8, 512, device="cuda")), torch.arange(8, device="cuda")
            )
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    return [loss.item(), norm.item(), scaler.get_scale(), len(optimizer.state)]


@check
def masks_and_counts():
    mask = torch.ones(4, 128, dtype=torch.long, device="cuda")
    mask[:, :28] = 0
    lengths = mask.sum(-1)
    ends = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    return [
        mask.all().item(),
        ends.tolist(),
        len(mask.flatten().nonzero()),
        list(torch.randn(4, 128, device="cuda")[mask.bool()].shape),
    ]


@check
def unknown_floats():
    x = torch.randn(4096, 4096, device="cuda")
    return [
        torch.isnan(x).any().item(),
        torch.isfinite(x).all().item(),
        x.norm().item(),
        torch.full((), 0.5, device="cuda").item(),
    ]


@check
def router_choices():
    experts = torch.randn(512, 16, device="cuda").softmax(-1).topk(4, -1).indices
    return experts.flatten().bincount(minlength=16).tolist()


from fsdp_advisor.rehearsal.inside.decisions import decisions

print("FOUND " + json.dumps({"checks": found, "decisions": decisions()}))
