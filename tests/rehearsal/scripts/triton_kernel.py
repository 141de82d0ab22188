"""A Triton kernel with three configurations to choose from."""

import triton
import triton.language as tl


@triton.autotune([triton.Config({"BLOCK": block}) for block in (128, 256, 512)], key=["n"])
@triton.jit
def add_one(x, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + i, tl.load(x + i, mask=i < n) + 1, mask=i < n)
