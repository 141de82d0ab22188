// The CUDA driver: the context, and the virtual memory of expandable segments.
#define _GNU_SOURCE
#include <cuda.h>
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

#define PAGE (2ull << 20)
#define CONTEXT ((CUcontext)0x10)

CUresult cuDriverGetVersion(int *version) { *version = CUDA_VERSION; return 0; }
CUresult cuDeviceGet(CUdevice *device, int index) { *device = index; return 0; }
CUresult cuCtxGetCurrent(CUcontext *context) { *context = CONTEXT; return 0; }
CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) { *context = CONTEXT; return 0; }
CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active) { *flags = 0; *active = 1; return 0; }
CUresult cuGetErrorString(CUresult error, const char **text) { *text = error ? "an error" : "no error"; return 0; }

extern int cudaDeviceGetAttribute(int *, int, int), cudaMalloc(void **, size_t), cudaFree(void *);
CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
  if (attribute == CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED) { *value = 1; return 0; }
  return cudaDeviceGetAttribute(value, attribute, device);
}

// Addresses and memory are separate: a handle is memory taken with cudaMalloc, and mapping it to an address does nothing.
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

static int nothing(void) { return 0; }
void *rehearsal_driver_function(const char *name) {
  char second[128];
  void *f = dlsym(RTLD_DEFAULT, name);
  snprintf(second, sizeof second, "%s_v2", name);
  if (!f) f = dlsym(RTLD_DEFAULT, second);
  return f ? f : (void *)nothing;
}
