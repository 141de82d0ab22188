"""Workspace of CUDA's two-pass column reductions: the gradient of a bias or of a norm's weight sums one row per token.

If the columns alone do not keep the GPU busy, the rows are divided among blocks of threads; each block writes its partial sum
to this workspace, and the last block adds them up. The number of blocks depends on the GPU, with minima and divisions, so the
size is not a polynomial in B and T.
"""

from __future__ import annotations

MAX_THREADS = 512
"""Threads of a block if each handles one column. Vector loads divide the number by the vector's width."""
VECTOR = 4
WARP = 32
MIN_ROWS, MAX_ROWS = 16, 256
"""Rows of one thread. A sum is divided only if a thread would have at least MAX_ROWS, and into parts of at least MIN_ROWS."""
ACCUMULATOR_BYTES = 4
"""Partial sums are always fp32."""


def reduction_workspace_bytes(rows: int, columns: int, resident_threads: int) -> int:
    """Bytes to sum a contiguous (rows, columns) tensor into (columns,) on a GPU that runs `resident_threads` threads at once.

    Not modelled: the blocks' counters (512 bytes); PyTorch divides tensors above 2 GiB into parts. Source: aten/src/ATen/native/cuda/
    Reduce.cuh (torch 2.13), setReduceConfig, get_output_vec_size and ReduceConfig::global_memory_size.

    >>> h100 = 132 * 2048
    >>> [reduction_workspace_bytes(rows, 4096, h100) for rows in (8192, 1024, 512)]
    [138412032, 33554432, 0]
    """
    vector = next(v for v in (VECTOR, 2, 1) if columns % v == 0)
    threads = MAX_THREADS // vector
    across, down = _power_of_two(columns // vector, threads), _power_of_two(rows, threads)
    height = min(down, threads // min(across, WARP))
    width = min(across, threads // height)
    rows_per_thread = -(-rows // height)
    blocks = -(-columns // vector // width)
    blocks_at_once = resident_threads // (width * height)
    if rows < min(MIN_ROWS * height, MAX_ROWS) or rows_per_thread < MAX_ROWS or blocks > blocks_at_once:
        return 0
    parts = max(
        min(-(-blocks_at_once // blocks), -(-rows_per_thread // MIN_ROWS)),
        -(-rows_per_thread // MAX_ROWS),
    )
    return ACCUMULATOR_BYTES * columns * parts * width * vector if parts > 1 else 0


def _power_of_two(n: int, most: int) -> int:
    """The largest power of two that is at most `n`, but not more than `most`."""
    return min(1 << n.bit_length() - 1, most)
