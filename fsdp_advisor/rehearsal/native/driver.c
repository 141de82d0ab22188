// The CUDA driver: contexts, the virtual memory of expandable segments, and kernels that are compiled at run time.
#define _GNU_SOURCE
#include <cuda.h>
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "settings.h"

#define PAGE (2ull << 20)
#define CONTEXT ((CUcontext)0x10)

CUresult cuDriverGetVersion(int *version) { *version = CUDA_VERSION; return 0; }
CUresult cuDeviceGet(CUdevice *device, int index) { *device = index; return 0; }
CUresult cuCtxGetCurrent(CUcontext *context) { *context = CONTEXT; return 0; }
CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) { *context = CONTEXT; return 0; }
CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active) { *flags = 0; *active = 1; return 0; }
CUresult cuGetErrorString(CUresult error, const char **text) { *text = error == CUDA_ERROR_NOT_SUPPORTED ? "a CUDA function that a rehearsal does not support" : error == CUDA_ERROR_OUT_OF_MEMORY ? "out of memory" : error ? "an error" : "no error"; return 0; }

extern int cudaDeviceGetAttribute(int *, int, int), cudaMalloc(void **, size_t), cudaFree(void *), cudaMemGetInfo(size_t *, size_t *);
CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
  if (attribute == CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED) { *value = 1; return 0; }
  return cudaDeviceGetAttribute(value, attribute, device);
}

// Addresses and memory are separate: a handle is memory allocated with cudaMalloc, and mapping it to an address does nothing.
CUresult cuMemGetAllocationGranularity(size_t *bytes, const CUmemAllocationProp *p, CUmemAllocationGranularity_flags f) { *bytes = PAGE; return 0; }
CUresult cuMemAddressReserve(CUdeviceptr *p, size_t size, size_t alignment, CUdeviceptr wanted, unsigned long long flags) {
  void *room = mmap(0, size + PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (room == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
  *p = ((unsigned long long)room + PAGE - 1) / PAGE * PAGE;
  return 0;
}
CUresult cuMemAddressFree(CUdeviceptr p, size_t size) { munmap((void *)p, size); return 0; }
CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t size, const CUmemAllocationProp *p, unsigned long long flags) {
  void *memory;
  if (cudaMalloc(&memory, size)) return CUDA_ERROR_OUT_OF_MEMORY;
  *handle = (CUmemGenericAllocationHandle)memory;
  return 0;
}
CUresult cuMemRelease(CUmemGenericAllocationHandle handle) { return cudaFree((void *)handle); }
CUresult cuMemUnmap(CUdeviceptr p, size_t size) { madvise((void *)p, size, MADV_DONTNEED); return 0; }

CUresult cuMemMap(CUdeviceptr p, size_t size, size_t offset, CUmemGenericAllocationHandle handle, unsigned long long flags) { return 0; }
CUresult cuMemSetAccess(CUdeviceptr p, size_t size, const CUmemAccessDesc *access, size_t n) { return 0; }
CUresult cuMemGetInfo_v2(size_t *unused, size_t *total) { return cudaMemGetInfo(unused, total); }
CUresult cuMemAlloc_v2(CUdeviceptr *p, size_t size) { return cudaMalloc((void **)p, size) ? CUDA_ERROR_OUT_OF_MEMORY : 0; }
CUresult cuMemFree_v2(CUdeviceptr p) { return cudaFree((void *)p); }

// ---- Devices and contexts

CUresult cuInit(unsigned flags) { return 0; }
CUresult cuDeviceGetCount(int *n) { *n = rehearsal_devices(); return *n ? 0 : CUDA_ERROR_NO_DEVICE; }
CUresult cuDeviceGetName(char *text, int n, CUdevice device) { const char *name = getenv("REHEARSAL_NAME"); snprintf(text, n, "%s", name ? name : "CUDA without kernels"); return 0; }
CUresult cuDeviceTotalMem_v2(size_t *bytes, CUdevice device) { *bytes = rehearsal_total_bytes(); return 0; }
CUresult cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice device) { memset(uuid, 0, sizeof *uuid); uuid->bytes[15] = 16 + device; return 0; }
CUresult cuDeviceCanAccessPeer(int *can, CUdevice a, CUdevice b) { *can = 1; return 0; }
CUresult cuCtxGetDevice(CUdevice *device) { *device = rehearsal_current_device(); return 0; }
CUresult cuCtxSetCurrent(CUcontext context) { return 0; }
CUresult cuCtxPushCurrent_v2(CUcontext context) { return 0; }
CUresult cuCtxPopCurrent_v2(CUcontext *context) { if (context) *context = CONTEXT; return 0; }
CUresult cuCtxSynchronize(void) { return 0; }
CUresult cuCtxSetLimit(CUlimit limit, size_t value) { return 0; }
CUresult cuCtxGetLimit(size_t *value, CUlimit limit) { *value = 1 << 20; return 0; }
CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device) { return 0; }
CUresult cuStreamGetCtx(CUstream stream, CUcontext *context) { *context = CONTEXT; return 0; }
CUresult cuStreamSynchronize(CUstream stream) { return 0; }
CUresult cuPointerGetAttribute(void *value, CUpointer_attribute attribute, CUdeviceptr p) {
  int device = rehearsal_device_of((void *)p);
  switch (attribute) {
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: *(int *)value = device; break;
    case CU_POINTER_ATTRIBUTE_CONTEXT: *(CUcontext *)value = device < 0 ? 0 : CONTEXT; break;
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE: *(unsigned *)value = device < 0 ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE; break;
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER: case CU_POINTER_ATTRIBUTE_HOST_POINTER: *(CUdeviceptr *)value = p; break;
    default: return CUDA_ERROR_NOT_SUPPORTED;
  }
  return 0;
}
CUresult cuPointerGetAttributes(unsigned n, CUpointer_attribute *attributes, void **values, CUdeviceptr p) {
  for (unsigned i = 0; i < n; i++) cuPointerGetAttribute(values[i], attributes[i], p);
  return 0;
}

// ---- Kernels that the script compiles (Triton, NVRTC, CUTLASS): they load, and a launch does nothing.

static void *handle(void) { return calloc(1, 64); }
CUresult cuModuleLoad(CUmodule *module, const char *file) { *module = handle(); return 0; }
CUresult cuModuleLoadData(CUmodule *module, const void *image) { *module = handle(); return 0; }
CUresult cuModuleLoadDataEx(CUmodule *module, const void *image, unsigned n, CUjit_option *options, void **values) { *module = handle(); return 0; }
CUresult cuModuleUnload(CUmodule module) { free(module); return 0; }
CUresult cuModuleGetFunction(CUfunction *f, CUmodule module, const char *name) { *f = (CUfunction)module; return 0; }
CUresult cuModuleGetGlobal_v2(CUdeviceptr *p, size_t *bytes, CUmodule module, const char *name) { if (p) *p = 0; if (bytes) *bytes = 0; return CUDA_ERROR_NOT_FOUND; }
CUresult cuLibraryLoadData(CUlibrary *library, const void *code, CUjit_option *jit, void **jv, unsigned nj, CUlibraryOption *o, void **ov, unsigned n) { *library = handle(); return 0; }
CUresult cuLibraryUnload(CUlibrary library) { free(library); return 0; }
CUresult cuLibraryGetKernel(CUkernel *kernel, CUlibrary library, const char *name) { *kernel = (CUkernel)library; return 0; }
CUresult cuLibraryGetModule(CUmodule *module, CUlibrary library) { *module = (CUmodule)library; return 0; }
CUresult cuKernelGetFunction(CUfunction *f, CUkernel kernel) { *f = (CUfunction)kernel; return 0; }
CUresult cuKernelSetAttribute(CUfunction_attribute attribute, int value, CUkernel kernel, CUdevice device) { return 0; }
CUresult cuFuncSetAttribute(CUfunction f, CUfunction_attribute attribute, int value) { return 0; }
CUresult cuFuncSetCacheConfig(CUfunction f, CUfunc_cache config) { return 0; }
CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction f) {
  *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : attribute == CU_FUNC_ATTRIBUTE_NUM_REGS ? 32 : 0;
  return 0;
}
CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *n, CUfunction f, int block, size_t shared) { *n = 2; return 0; }
CUresult cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *n, CUfunction f, int block, size_t shared, unsigned flags) { *n = 2; return 0; }
CUresult cuOccupancyMaxActiveClusters(int *n, CUfunction f, const CUlaunchConfig *config) {
  cuDeviceGetAttribute(n, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, 0);
  return 0;
}
CUresult cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *p, const cuuint64_t *dim, const cuuint64_t *strides,
                                const cuuint32_t *box, const cuuint32_t *element, CUtensorMapInterleave i, CUtensorMapSwizzle s, CUtensorMapL2promotion l2, CUtensorMapFloatOOBfill fill) {
  memset(map, 0, sizeof *map);
  return 0;
}
CUresult cuTensorMapEncodeIm2col(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *p, const cuuint64_t *dim, const cuuint64_t *strides,
                                 const int *lower, const int *upper, cuuint32_t channels, cuuint32_t pixels, const cuuint32_t *element,
                                 CUtensorMapInterleave i, CUtensorMapSwizzle s, CUtensorMapL2promotion l2, CUtensorMapFloatOOBfill fill) {
  memset(map, 0, sizeof *map);
  return 0;
}
CUresult cuLaunchKernel(CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared, CUstream s, void **p, void **extra) { return rehearsal_launched(); }
CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction f, void **p, void **extra) { return rehearsal_launched(); }
CUresult cuLaunchCooperativeKernel(CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared, CUstream s, void **p) { return rehearsal_launched(); }
CUresult cuMemsetD32Async(CUdeviceptr p, unsigned value, size_t n, CUstream s) { return 0; }
CUresult cuStreamWriteValue32_v2(CUstream s, CUdeviceptr p, cuuint32_t value, unsigned flags) { *(cuuint32_t *)p = value; return 0; }
#if CUDA_VERSION >= 12090
CUresult cuLogsRegisterCallback(CUlogsCallback callback, void *data, CUlogsCallbackHandle *made) { *made = handle(); return 0; }
CUresult cuLogsUnregisterCallback(CUlogsCallbackHandle callback) { free(callback); return 0; }
#endif

// ---- Other driver functions: each prints its name and that it is not supported.

static char *refused[32];
#define REFUSAL(i) static int refusal##i(void) { return rehearsal_refuse(refused[i]); }
#define EACH(F) F(0) F(1) F(2) F(3) F(4) F(5) F(6) F(7) F(8) F(9) F(10) F(11) F(12) F(13) F(14) F(15) F(16) F(17) F(18) F(19) F(20) F(21) F(22) F(23) F(24) F(25) F(26) F(27) F(28) F(29) F(30) F(31)
EACH(REFUSAL)
#define ADDRESS(i) refusal##i,
static int (*const refusals[])(void) = {EACH(ADDRESS)};

void *rehearsal_driver_function(const char *name) {
  char versioned[128];
  void *f = 0;
  for (const char *const *suffix = (const char *const[]){"_v3", "_v2", "", 0}; *suffix && !f; suffix++) {
    snprintf(versioned, sizeof versioned, "%s%s", name, *suffix);
    f = dlsym(RTLD_DEFAULT, versioned);
  }
  for (int i = 0; !f && i < sizeof refusals / sizeof *refusals; i++) {
    if (!refused[i]) refused[i] = strdup(name);
    if (!strcmp(refused[i], name)) f = refusals[i];
  }
  return f ? f : refusals[0];
}
CUresult cuGetProcAddress_v2(const char *name, void **f, int version, cuuint64_t flags, CUdriverProcAddressQueryResult *found) {
  *f = rehearsal_driver_function(name);
  if (found) *found = CU_GET_PROC_ADDRESS_SUCCESS;
  return 0;
}
