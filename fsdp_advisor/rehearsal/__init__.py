"""Rehearse a training script: run it unchanged on a machine without GPUs, and report the GPU memory that it would use.

The script runs on PyTorch's CUDA build. `native` replaces CUDA's libraries: memory is accounted for, kernels do nothing.
Everything above is PyTorch's own code, so `torch.cuda.max_memory_allocated` and the allocator's statistics are real.

- `build` compiles the replaced libraries for an installed PyTorch.
- `environment` describes the simulated GPUs in environment variables.
- `inside` runs in every Python process of the script: it counts steps, reads peaks and writes them to a file per rank.
- `launch` starts the command, waits, and ends all of its processes.
- `report` reads the files of the ranks.
"""
