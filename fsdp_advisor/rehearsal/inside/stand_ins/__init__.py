"""Modules that replace packages which can only be built with CUDA's compiler. They make the same allocations and compute nothing."""
