"""Modules that a rehearsal provides in the place of packages that need CUDA's compiler to be built: they allocate, and compute nothing."""
