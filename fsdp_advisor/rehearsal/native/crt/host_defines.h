// The macros that CUDA's host headers use. NVIDIA ships this file in a package that PyTorch does not depend on.
#pragma once
#define __host__
#define __device__
#define __global__
#define __shared__
#define __constant__
#define __device_builtin__
#define __cudart_builtin__
#define __align__(n) __attribute__((aligned(n)))
#define __builtin_align__(n) __align__(n)
#define __inline__ __inline
#define __forceinline__ __inline__
#define __location__(a)
#define CUDARTAPI
#define CUDARTAPI_CDECL
#define CUDA_CB
