"""Calls flash-attn's functions. Prints the peak and the end of forward and backward of each call, in bytes of allocated memory."""

import json

import flash_attn
import flash_attn.bert_padding
import torch

BATCH, TOKENS, HEADS, GROUPS = 2, 700, 16, 4
DEVICE = torch.device("cuda")


def heads(number, size, *shape):
    return torch.randn(
        *(shape or (BATCH, TOKENS)), number, size, dtype=torch.bfloat16, device=DEVICE, requires_grad=True
    )


def lengths():
    return torch.tensor([0, 300, 1000, 1400], dtype=torch.int32, device=DEVICE)


def packed(parts, head, *shape):
    return heads(head, 64, *shape, parts) if shape else heads(head, 64, BATCH, TOKENS, parts)


def measured(function, *given, **options):
    """Bytes above those at the start: the peak and the end of forward, and of backward."""
    start = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out = function(*given, **options)
    out = out[0] if isinstance(out, tuple) else out
    found = [torch.cuda.max_memory_allocated() - start, torch.cuda.memory_allocated() - start]
    if out.requires_grad:
        gradient = torch.randn_like(out)
        torch.cuda.reset_peak_memory_stats()
        out.backward(gradient)
        found += [torch.cuda.max_memory_allocated() - start, torch.cuda.memory_allocated() - start]
    return [list(out.shape), *found]


def main():
    queries, keys = lambda size=64: heads(HEADS, size), lambda size=64: heads(GROUPS, size)
    total = (BATCH * TOKENS,)
    of_total = lambda number: heads(number, 64, *total)  # noqa: E731
    call = {
        "dense": (flash_attn.flash_attn_func, [queries(), queries(), queries()], {"causal": True}),
        "groups": (flash_attn.flash_attn_func, [queries(128), keys(128), keys(128)], {"causal": True}),
        "padded heads": (flash_attn.flash_attn_func, [queries(60), keys(60), keys(60)], {}),
        "deterministic": (flash_attn.flash_attn_func, [queries(), keys(), keys()], {"deterministic": True}),
        "dropout": (flash_attn.flash_attn_func, [queries(), keys(), keys()], {"dropout_p": 0.1}),
        "one sequence": (flash_attn.flash_attn_func, [heads(2, 64, 1, 1000) for _ in range(3)], {"causal": True}),
        "one query": (
            flash_attn.flash_attn_func,
            [heads(HEADS, 64, 1, 1).detach(), *(heads(GROUPS, 64, 1, 4000).detach() for _ in range(2))],
            {"causal": True},
        ),
        "packed keys": (flash_attn.flash_attn_kvpacked_func, [queries(), packed(2, GROUPS)], {}),
        "packed": (flash_attn.flash_attn_qkvpacked_func, [packed(3, HEADS)], {"return_attn_probs": True}),
        "lengths": (
            flash_attn.flash_attn_varlen_func,
            [of_total(HEADS), of_total(GROUPS), of_total(GROUPS), lengths(), lengths(), 700, 700],
            {"causal": True},
        ),
        "packed lengths": (
            flash_attn.flash_attn_varlen_qkvpacked_func,
            [packed(3, HEADS, *total), lengths(), 700],
            {"window_size": (100, 0)},
        ),
        "packed keys and lengths": (
            flash_attn.flash_attn_varlen_kvpacked_func,
            [of_total(HEADS), packed(2, GROUPS, *total), lengths(), lengths(), 700, 700],
            {},
        ),
        "cache": (
            flash_attn.flash_attn_with_kvcache,
            [heads(HEADS, 64, 2, 1).detach(), *(heads(GROUPS, 64, 2, 4000).detach() for _ in range(2))],
            {"cache_seqlens": 3000},
        ),
    }
    found = {name: measured(function, *given, **options) for name, (function, given, options) in call.items()}
    mask = torch.ones(BATCH, TOKENS, dtype=torch.int64, device=DEVICE)
    mask[1, 600:] = 0
    rows = heads(HEADS, 64)
    taken, places, *_ = flash_attn.bert_padding.unpad_input(rows, mask)
    found["tokens"] = [list(taken.shape), *measured(flash_attn.bert_padding.pad_input, taken, places, BATCH, TOKENS)]
    compiled = torch.compile(flash_attn.flash_attn_func, backend="aot_eager")
    found["compiled"] = measured(compiled, queries(128), keys(128), keys(128))
    print("FOUND " + json.dumps(found))


main()
