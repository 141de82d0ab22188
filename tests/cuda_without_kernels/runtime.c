// The CUDA runtime without a GPU. The environment describes the devices. Memory is accounted for and lies in host pages that are
// mapped when they are written. Streams and events are always complete. Kernels do nothing.
#define _GNU_SOURCE
#include <cuda_runtime_api.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

typedef unsigned long long u64;

static u64 setting(const char *name, u64 otherwise) {
  const char *text = getenv(name);
  return text && *text ? strtoull(text, 0, 10) : otherwise;
}

// ---- Memory: whole pages of 2 MiB, first fit by ascending address

#define PAGE (2ull << 20)
#define ARENA (1ull << 42)
#define COPIED (4ull << 20)  // larger copies and fills do nothing, so that host memory stays small

struct block {
  u64 at, size;
  int taken;
  struct block *next;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct block *blocks;
static u64 arena, given_out;
static int has_context;

static u64 total_bytes(void) { return setting("STUB_TOTAL_BYTES", 80ull << 30); }
static u64 context_bytes(void) { return has_context ? setting("STUB_CONTEXT_BYTES", 500ull << 20) : 0; }
u64 stub_total_bytes(void) { return total_bytes(); }
u64 stub_used_bytes(void) { return context_bytes() + given_out; }

static struct block *block_of(u64 at, u64 size, struct block *next) {
  struct block *made = malloc(sizeof *made);
  *made = (struct block){at, size, 0, next};
  return made;
}

static void *take(u64 asked) {
  has_context = 1;
  u64 size = (asked + PAGE - 1) / PAGE * PAGE;
  if (!blocks) {
    void *room = mmap(0, ARENA, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (room == MAP_FAILED) abort();
    arena = ((u64)room + PAGE - 1) / PAGE * PAGE;
    blocks = block_of(arena, ARENA - PAGE, 0);
  }
  if (context_bytes() + given_out + size > total_bytes()) return 0;
  for (struct block *b = blocks; b; b = b->next)
    if (!b->taken && b->size >= size) {
      if (b->size > size) {
        b->next = block_of(b->at + size, b->size - size, b->next);
        b->size = size;
      }
      b->taken = 1;
      given_out += size;
      return (void *)b->at;
    }
  return 0;
}

static void join_next(struct block *b) {
  struct block *next = b->next;
  if (!next || next->taken) return;
  b->size += next->size;
  b->next = next->next;
  free(next);
}

static int give_back(void *p) {
  for (struct block *b = blocks, *before = 0; b; before = b, b = b->next)
    if (b->at == (u64)p && b->taken) {
      b->taken = 0;
      given_out -= b->size;
      madvise(p, b->size, MADV_DONTNEED);
      join_next(b);
      if (before && !before->taken) join_next(before);
      return 1;
    }
  return 0;
}

static int on_device(const void *p) { return arena && (u64)p >= arena && (u64)p < arena + ARENA; }

static cudaError_t last_error = cudaSuccess;
static cudaError_t failed(cudaError_t error) { return last_error = error; }
cudaError_t cudaPeekAtLastError(void) { return last_error; }
cudaError_t cudaGetLastError(void) {
  cudaError_t error = last_error;
  last_error = cudaSuccess;
  return error;
}
const char *cudaGetErrorString(cudaError_t e) { return e == cudaErrorMemoryAllocation ? "out of memory" : e ? "an error" : "no error"; }
const char *cudaGetErrorName(cudaError_t e) { return e == cudaErrorMemoryAllocation ? "cudaErrorMemoryAllocation" : e ? "cudaErrorUnknown" : "cudaSuccess"; }

cudaError_t cudaMalloc(void **p, size_t size) {
  pthread_mutex_lock(&lock);
  *p = take(size);
  pthread_mutex_unlock(&lock);
  return *p ? cudaSuccess : failed(cudaErrorMemoryAllocation);
}
cudaError_t cudaFree(void *p) {
  if (!p) return cudaSuccess;
  pthread_mutex_lock(&lock);
  int known = give_back(p);
  pthread_mutex_unlock(&lock);
  return known ? cudaSuccess : failed(cudaErrorInvalidValue);
}
cudaError_t cudaMallocAsync(void **p, size_t size, cudaStream_t s) { return cudaMalloc(p, size); }
cudaError_t cudaFreeAsync(void *p, cudaStream_t s) { return cudaFree(p); }
cudaError_t cudaMemGetInfo(size_t *unused, size_t *total) {
  *total = total_bytes();
  *unused = total_bytes() - stub_used_bytes();
  return cudaSuccess;
}
cudaError_t cudaHostAlloc(void **p, size_t size, unsigned flags) {
  *p = mmap(0, size ? size : 1, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return *p == MAP_FAILED ? failed(cudaErrorMemoryAllocation) : cudaSuccess;
}
cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *a, const void *p) {
  int device = on_device(p);
  *a = (struct cudaPointerAttributes){.type = device ? cudaMemoryTypeDevice : cudaMemoryTypeUnregistered, .device = device ? 0 : -2};
  if (device) a->devicePointer = (void *)p;
  else a->hostPointer = (void *)p;
  return cudaSuccess;
}

static void copy(void *to, const void *from, size_t n) {
  if (n <= COPIED) memcpy(to, from, n);
  else if (!on_device(to)) memset(to, 0, n);
}
cudaError_t cudaMemcpy(void *to, const void *from, size_t n, enum cudaMemcpyKind k) { copy(to, from, n); return cudaSuccess; }
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t n, enum cudaMemcpyKind k, cudaStream_t s) { copy(to, from, n); return cudaSuccess; }
cudaError_t cudaMemcpyPeerAsync(void *to, int td, const void *from, int fd, size_t n, cudaStream_t s) { copy(to, from, n); return cudaSuccess; }
cudaError_t cudaMemcpy2DAsync(void *to, size_t tp, const void *from, size_t fp, size_t w, size_t h, enum cudaMemcpyKind k, cudaStream_t s) {
  for (size_t row = 0; row < h && tp * h <= COPIED; row++) memcpy((char *)to + row * tp, (const char *)from + row * fp, w);
  return cudaSuccess;
}
cudaError_t cudaMemset(void *p, int value, size_t n) {
  if (n <= COPIED) memset(p, value, n);
  return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void *p, int value, size_t n, cudaStream_t s) { return cudaMemset(p, value, n); }
cudaError_t cudaGetSymbolAddress(void **p, const void *symbol) {
  static char room[1 << 20];
  *p = room;
  return cudaSuccess;
}

// ---- Devices

static __thread int current;
cudaError_t cudaGetDeviceCount(int *n) { *n = (int)setting("STUB_DEVICES", 1); return cudaSuccess; }
cudaError_t cudaGetDevice(int *device) { *device = current; return cudaSuccess; }
cudaError_t cudaSetDevice(int device) { current = device; return cudaSuccess; }

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *p, int device) {
  const char *name = getenv("STUB_NAME");
  *p = (struct cudaDeviceProp){
      .totalGlobalMem = total_bytes(), .major = (int)setting("STUB_MAJOR", 9), .minor = (int)setting("STUB_MINOR", 0),
      .multiProcessorCount = (int)setting("STUB_MULTIPROCESSORS", 132),
      .sharedMemPerBlock = 48 << 10, .sharedMemPerBlockOptin = setting("STUB_SHARED_BYTES", 227 << 10),
      .sharedMemPerMultiprocessor = setting("STUB_SHARED_BYTES", 227 << 10) + 1024, .reservedSharedMemPerBlock = 1024,
      .l2CacheSize = 50 << 20, .regsPerBlock = 65536, .regsPerMultiprocessor = 65536, .totalConstMem = 65536, .warpSize = 32,
      .maxThreadsPerBlock = 1024, .maxThreadsPerMultiProcessor = (int)setting("STUB_THREADS", 2048), .maxBlocksPerMultiProcessor = 32,
      .maxThreadsDim = {1024, 1024, 64}, .maxGridSize = {2147483647, 65535, 65535}, .memPitch = 2147483647,
      .textureAlignment = 512, .texturePitchAlignment = 32, .memoryBusWidth = 5120, .asyncEngineCount = 3, .ECCEnabled = 1,
      .unifiedAddressing = 1, .concurrentKernels = 1, .streamPrioritiesSupported = 1, .globalL1CacheSupported = 1,
      .localL1CacheSupported = 1, .managedMemory = 1, .concurrentManagedAccess = 1, .computePreemptionSupported = 1,
      .cooperativeLaunch = 1, .memoryPoolsSupported = 1, .canMapHostMemory = 1};
  strncpy(p->name, name ? name : "CUDA without kernels", sizeof p->name - 1);
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device) {
  struct cudaDeviceProp p;
  cudaGetDeviceProperties(&p, device);
  switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor: *value = p.major; break;
    case cudaDevAttrComputeCapabilityMinor: *value = p.minor; break;
    case cudaDevAttrMultiProcessorCount: *value = p.multiProcessorCount; break;
    case cudaDevAttrMaxThreadsPerBlock: case cudaDevAttrMaxBlockDimX: case cudaDevAttrMaxBlockDimY: *value = 1024; break;
    case cudaDevAttrMaxBlockDimZ: *value = 64; break;
    case cudaDevAttrMaxGridDimX: *value = p.maxGridSize[0]; break;
    case cudaDevAttrMaxGridDimY: case cudaDevAttrMaxGridDimZ: *value = p.maxGridSize[1]; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = (int)p.sharedMemPerBlock; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = (int)p.sharedMemPerBlockOptin; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = (int)p.sharedMemPerMultiprocessor; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = p.maxThreadsPerMultiProcessor; break;
    case cudaDevAttrMaxBlocksPerMultiprocessor: *value = p.maxBlocksPerMultiProcessor; break;
    case cudaDevAttrMaxRegistersPerBlock: *value = p.regsPerBlock; break;
    case cudaDevAttrL2CacheSize: *value = p.l2CacheSize; break;
    case cudaDevAttrWarpSize: *value = p.warpSize; break;
    case cudaDevAttrCooperativeLaunch: case cudaDevAttrUnifiedAddressing: case cudaDevAttrStreamPrioritiesSupported: *value = 1; break;
    default: *value = 0;
  }
  return cudaSuccess;
}
cudaError_t cudaDeviceGetPCIBusId(char *text, int n, int device) { snprintf(text, n, "0000:%02x:00.0", device); return cudaSuccess; }
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { *least = 0; *greatest = -5; return cudaSuccess; }
cudaError_t cudaDeviceCanAccessPeer(int *can, int a, int b) { *can = 1; return cudaSuccess; }
cudaError_t cudaDriverGetVersion(int *version) { *version = CUDART_VERSION; return cudaSuccess; }
cudaError_t cudaRuntimeGetVersion(int *version) { *version = CUDART_VERSION; return cudaSuccess; }
extern void *stub_driver_function(const char *name);
cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **f, unsigned version, unsigned long long flags, enum cudaDriverEntryPointQueryResult *found) {
  *f = stub_driver_function(name);
  if (found) *found = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}

// ---- Streams and events

static void *handle(void) { return malloc(16); }
cudaError_t cudaStreamCreate(cudaStream_t *s) { *s = handle(); return cudaSuccess; }
cudaError_t cudaStreamCreateWithPriority(cudaStream_t *s, unsigned flags, int priority) { *s = handle(); return cudaSuccess; }
cudaError_t cudaStreamGetPriority(cudaStream_t s, int *priority) { *priority = 0; return cudaSuccess; }
cudaError_t cudaStreamIsCapturing(cudaStream_t s, enum cudaStreamCaptureStatus *status) { *status = cudaStreamCaptureStatusNone; return cudaSuccess; }
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t s, enum cudaStreamCaptureStatus *status, unsigned long long *id, cudaGraph_t *graph,
                                     const cudaGraphNode_t **nodes, const cudaGraphEdgeData **edges, size_t *n) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t *e) { *e = handle(); return cudaSuccess; }
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *e, unsigned flags) { *e = handle(); return cudaSuccess; }
cudaError_t cudaEventDestroy(cudaEvent_t e) { free(e); return cudaSuccess; }
cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t a, cudaEvent_t b) { *ms = 0.01f; return cudaSuccess; }
cudaError_t cudaLaunchHostFunc(cudaStream_t s, cudaHostFn_t f, void *data) { f(data); return cudaSuccess; }
cudaError_t cudaStreamAddCallback(cudaStream_t s, cudaStreamCallback_t f, void *data, unsigned flags) { f(s, cudaSuccess, data); return cudaSuccess; }

// ---- Kernels: `f<<<...>>>()` pushes its configuration and pops it in the stub that nvcc wrote

static __thread struct { dim3 grid, block; size_t shared; void *stream; } launch;
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, struct CUstream_st *stream) {
  launch.grid = grid, launch.block = block, launch.shared = shared, launch.stream = stream;
  return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) {
  *grid = launch.grid, *block = launch.block, *shared = launch.shared, *(void **)stream = launch.stream;
  return cudaSuccess;
}
void **__cudaRegisterFatBinary(void *binary) { static void *one[4]; return one; }
char __cudaInitModule(void **module) { return 0; }
cudaError_t __cudaGetKernel(cudaKernel_t *kernel, const void *f) { *kernel = (cudaKernel_t)f; return cudaSuccess; }
cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *a, const void *f) {
  int capability = (int)(setting("STUB_MAJOR", 9) * 10 + setting("STUB_MINOR", 0));
  *a = (struct cudaFuncAttributes){.maxThreadsPerBlock = 1024, .numRegs = 32, .ptxVersion = capability, .binaryVersion = capability,
                                   .maxDynamicSharedSizeBytes = (int)setting("STUB_SHARED_BYTES", 227 << 10)};
  return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *n, const void *f, int block, size_t shared) { *n = 2; return cudaSuccess; }
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *n, const void *f, int block, size_t shared, unsigned flags) { *n = 2; return cudaSuccess; }
