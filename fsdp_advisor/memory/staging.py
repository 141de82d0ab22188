"""What sums over rows stage in the GPU's memory: a bias's gradient, or a norm's weight's, is the sum of a row per token.

Where the columns alone do not keep the GPU busy, the rows are divided among blocks of threads, and each block leaves what it has
summed for the last one to add up. How many blocks that are hangs on the GPU, with minima and divisions: no polynomial in B and T.
"""

from __future__ import annotations

THREADS = 512
"""At most in a block, each with up to VECTOR columns: then as many fewer."""
VECTOR = 4
WARP = 32
LEAST_ROWS, MOST_ROWS = 16, 256
"""Of each thread. No sum is divided before a thread would have the most, and then in no parts of fewer than the least."""
ACCUMULATOR_BYTES = 4
"""fp32, whatever is summed."""


def staging_bytes(rows: int, columns: int, resident_threads: int) -> int:
    """What it takes to sum (rows, columns), contiguous, into (columns): bytes, on a GPU that runs so many threads at once.

    Left out are the blocks' counters, 512 bytes beside it, and that PyTorch sums 2 GiB at a time. Source: aten/src/ATen/native/cuda/
    Reduce.cuh (torch 2.13), setReduceConfig, get_output_vec_size and ReduceConfig::global_memory_size.

    >>> h100 = 132 * 2048
    >>> staging_bytes(8192, 4096, h100), staging_bytes(1024, 4096, h100), staging_bytes(512, 4096, h100)
    (138412032, 33554432, 0)
    """
    vector = next(v for v in (VECTOR, 2, 1) if columns % v == 0)
    most = THREADS // vector
    across, down = _power_of_two(columns // vector, most), _power_of_two(rows, most)
    height = min(down, most // min(across, WARP))
    width = min(across, most // height)
    each = -(-rows // height)
    blocks = -(-columns // vector // width)
    at_once = resident_threads // (width * height)
    if rows < min(LEAST_ROWS * height, MOST_ROWS) or each < MOST_ROWS or blocks > at_once:
        return 0
    parts = max(min(-(-at_once // blocks), -(-each // LEAST_ROWS)), -(-each // MOST_ROWS))
    return ACCUMULATOR_BYTES * columns * parts * width * vector if parts > 1 else 0


def _power_of_two(n: int, most: int) -> int:
    """The largest up to `n` and `most`."""
    return min(1 << n.bit_length() - 1, most)
