"""A step program as readable text, for diffs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import cast

from fsdp_advisor.errors import assert_never
from fsdp_advisor.model.tape import MONOMIALS, Polynomial, Size
from fsdp_advisor.program.accounts import ACCOUNTS, STREAM_NAMES, Account, Stream
from fsdp_advisor.program.instructions import (
    AllGather,
    Alloc,
    AllReduce,
    Compute,
    Copy,
    CreateStates,
    DropBatch,
    DropGraph,
    DropLoss,
    Free,
    HostTransfer,
    HostWait,
    Instruction,
    OptimizerStep,
    PythonHooks,
    Reclassify,
    ReduceScatter,
    StepProgram,
    Visit,
    WaitFor,
)
from fsdp_advisor.program.spans import Span
from fsdp_advisor.units import format_bytes

MAX_PERIOD = 8
"""The maximum length of a repeated pattern of visits that is folded."""

Block = tuple[str, ...]
"""The lines of one visit."""


def program_text(program: StepProgram) -> str:
    """The program, visit by visit. A repeated pattern of visits is written once, with the number of repeats."""
    sizes = program.layout.tape.sizes
    lines = ["states"]
    lines += [f"  {_instruction(alloc, sizes)}" for alloc in program.states]
    if program.lazily_created:
        created = [alloc for alloc in program.states if alloc.buffer in program.lazily_created]
        created_text = ", ".join(f"{_account(a.account)} {format_bytes(a.storages.rounded)}" for a in created)
        lines.append(f"  created by the first step: {created_text}")
    if program.first_step_transients.rounded:
        lines.append(f"  before the first forward, one by one: {format_bytes(program.first_step_transients.rounded)}")
    if program.rebuilt_buckets.rounded:
        lines.append(f"  after the first step, buckets of: {format_bytes(program.rebuilt_buckets.rounded)}")
    for number, micro_batch in enumerate(program.micro_batches, start=1):
        times = "" if micro_batch.times == 1 else f", {micro_batch.times} times"
        lines += ["", f"micro-batch {number}{times}"]
        lines += _folded([_block(visit, sizes) for visit in micro_batch.visits])
    lines += ["", *_folded([_block(program.optimizer, sizes)])]
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _block(visit: Visit, sizes: Sequence[Size]) -> Block:
    head = visit.name if visit.phase == "optimizer" else f"{visit.phase} {visit.name}"
    return head, *(f"  {line}" for line in _merged([_instruction(i, sizes) for i in visit.instructions]))


def _merged(lines: Sequence[str]) -> Iterator[str]:
    """Lines, with consecutive equal lines written once and counted."""
    at = 0
    while at < len(lines):
        end = at
        while end < len(lines) and lines[end] == lines[at]:
            end += 1
        yield lines[at] if end - at == 1 else f"{lines[at]}  ({end - at} times)"
        at = end


def _folded(blocks: Sequence[Block]) -> Iterator[str]:
    at = 0
    while at < len(blocks):
        period, repeats = _longest_repetition(blocks, at)
        indent = "  "
        if repeats > 1:
            yield f"  {repeats} times:"
            indent = "    "
        for block in blocks[at : at + period]:
            yield from (indent + line for line in block)
        at += period * repeats


def _longest_repetition(blocks: Sequence[Block], at: int) -> tuple[int, int]:
    """(period, repeats) of the pattern that starts at `at` and covers the most blocks; the shortest of several."""
    best = 1, 1
    for period in range(1, MAX_PERIOD + 1):
        repeats = 1
        while blocks[at : at + period] == blocks[at + repeats * period : at + (repeats + 1) * period]:
            repeats += 1
            if at + repeats * period >= len(blocks):
                break
        if repeats > 1 and period * repeats > best[0] * best[1]:
            best = period, repeats
    return best


def _instruction(instruction: Instruction, sizes: Sequence[Size]) -> str:
    match instruction:
        case Alloc(account=account, stream=stream, storages=storages, per_batch=per_batch):
            size = format_bytes(storages.rounded) if per_batch is None else _polynomial(per_batch)
            on = "" if stream is Stream.COMPUTE else f" on {STREAM_NAMES[stream]}"
            return f"alloc {_account(account)}, {size}{on}"
        case Free(account=account, n_bytes=n_bytes, per_batch=per_batch, used_on=used_on):
            size = format_bytes(n_bytes) if per_batch is None else _polynomial(per_batch)
            when = "" if used_on is None else f" once {STREAM_NAMES[used_on]} is done with it"
            return f"free {_account(account)}, {size}{when}"
        case Reclassify(n_bytes=n_bytes, before=before, after=after):
            return f"count {format_bytes(n_bytes)} of {_account(before)} as {_account(after)}"
        case Compute(span=span, gradients=gradients):
            many = "" if len(gradients) == 1 else "s"
            written = f", {len(gradients)} gradient{many}" if gradients else ""
            return "; ".join([f"compute{written}", *_kept(span, sizes)])
        case DropBatch():
            return "free the inputs of the micro-batch before"
        case DropGraph():
            return "free what the graph of the micro-batch before keeps"
        case DropLoss():
            return "free the loss of the micro-batch before"
        case HostWait():
            return "the host waits for earlier frees"
        case AllGather(n_bytes=n_bytes, start=start):
            return f"all-gather {format_bytes(round(n_bytes))}, {start}"
        case WaitFor():
            return "wait for the all-gather"
        case ReduceScatter(n_bytes=n_bytes):
            return f"reduce-scatter {format_bytes(round(n_bytes))}"
        case AllReduce(n_bytes=n_bytes, group=group, exposed=exposed):
            return (
                f"all-reduce {format_bytes(round(n_bytes))} over {group} ranks{', after backward' if exposed else ''}"
            )
        case HostTransfer(n_bytes=n_bytes):
            return f"copy {instruction.text}, {format_bytes(round(n_bytes))}"
        case Copy(n_bytes=n_bytes):
            return f"copy or add, {format_bytes(round(n_bytes))} read and written"
        case CreateStates(buffer=_):
            return "the first step creates states here"
        case PythonHooks():
            return "Python hooks"
        case OptimizerStep(n_bytes=n_bytes, quantizing_bytes=quantizing, host_elements=host_elements, flops=flops):
            if host_elements:
                return f"optimizer step on the host, {round(host_elements):,} elements per node"
            products = f", {flops:.3g} FLOPs" if flops else ""
            return f"optimizer step, {format_bytes(round(n_bytes + quantizing))} read and written{products}"
        case _:
            assert_never(instruction)


def _kept(span: Span, sizes: Sequence[Size]) -> Iterator[str]:
    """The bytes by which a span changes each account, such as `activations +512 BT bytes`. Sizes that are not polynomials are left out."""
    net: defaultdict[int, list[int]] = defaultdict(lambda: [0] * len(MONOMIALS))
    for account, index, times in span.changes:
        size = sizes[index]
        if type(size) is tuple:
            for at, coefficient in enumerate(cast(Polynomial, size)):
                net[account][at] += coefficient * times
    for account, change in sorted(net.items()):
        if any(change):
            yield f"{_account(Account(account))} {_polynomial(change, signed=True)}"


def _account(account: Account) -> str:
    return (*ACCOUNTS, "workspace")[account]


def _polynomial(polynomial: Sequence[int], *, signed: bool = False) -> str:
    """A polynomial in B and T as text, such as `131072 BT + 512 bytes`. `signed`: with a sign before each term."""
    terms = [(c, "" if m == "1" else f" {m}") for c, m in zip(polynomial, MONOMIALS, strict=True) if c]
    if signed:
        return " ".join(f"{c:+}{m}" for c, m in terms) + " bytes"
    return " + ".join(f"{c}{m}" for c, m in terms) + " bytes"
