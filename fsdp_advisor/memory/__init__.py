"""The memory of a job: live tensors, the caching allocator, library workspaces, CUDA and NCCL, and the host.

`live.step_peak` returns the peak of live tensors of a step program, `allocator.simulate_allocator` the bytes that PyTorch
reserves for it, `device.device_overhead` the GPU memory outside PyTorch, `libraries.cublas_workspace_bytes` a
workspace. It imports no engine.
"""
