// The CUDA runtime without a GPU. The environment describes the devices. Memory is accounted for and lies in host pages that are
// mapped when they are written. Streams and events are always complete. Kernels do nothing.
#define _GNU_SOURCE
#include <cuda_runtime_api.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#include "settings.h"

// ---- Memory: whole pages of 2 MiB. Every GPU has its own range of addresses. Each allocation is below those before, as a GPU's seem
// to be, until the range is used up. Then freed addresses are used again, first fit.

#define PAGE (2ull << 20)
#define ARENA (1ull << 40)
#define MOST_DEVICES 16

struct block {
  u64 at, size;
  int taken;
  struct block *next;
};

static struct device {
  struct block *blocks;  // by address, all above the unused part of the range
  u64 unused, allocated, libraries;
  int has_context;
} devices[MOST_DEVICES];

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static u64 arena;  // the first GPU's addresses
static __thread int current;

// CUDA_VISIBLE_DEVICES chooses among the simulated GPUs, as on a real machine.
int rehearsal_devices(void) {
  int all = (int)setting("REHEARSAL_DEVICES", 1), n = 0;
  const char *visible = getenv("CUDA_VISIBLE_DEVICES");
  if (!visible) return all;
  for (const char *at = visible; *at;) {
    char *after;
    long index = strtol(at, &after, 10);
    if (after == at || index < 0 || index >= all) break;
    n++;
    at = *after == ',' ? after + 1 : after;
  }
  return n;
}

u64 rehearsal_total_bytes(void) { return setting("REHEARSAL_TOTAL_BYTES", 80ull << 30); }
int rehearsal_current_device(void) { return current; }
static u64 context_bytes(int device) { return devices[device].has_context ? setting("REHEARSAL_CONTEXT_BYTES", 500ull << 20) : 0; }
u64 rehearsal_used_bytes(int device) { return context_bytes(device) + devices[device].libraries + devices[device].allocated; }

static struct block *block_of(u64 at, u64 size, struct block *next) {
  struct block *made = malloc(sizeof *made);
  *made = (struct block){at, size, 0, next};
  return made;
}

static void reserve_addresses(void) {
  void *room = mmap(0, (MOST_DEVICES + 1) * ARENA, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (room == MAP_FAILED) {
    fprintf(stderr, "rehearsal: %d TiB of addresses are not available; ulimit -v, vm.overcommit_memory=2 or a kernel with 39 bits of "
                    "addresses prevents it\n", MOST_DEVICES + 1);
    abort();
  }
  arena = ((u64)room + PAGE - 1) / PAGE * PAGE;
  for (int i = 0; i < MOST_DEVICES; i++) devices[i].unused = ARENA;
}

static void *take(int index, u64 asked) {
  struct device *device = &devices[index];
  u64 size = (asked + PAGE - 1) / PAGE * PAGE;
  device->has_context = 1;
  if (!arena) reserve_addresses();
  if (rehearsal_used_bytes(index) + size > rehearsal_total_bytes()) return 0;
  struct block *b = device->blocks;
  if (device->unused >= size) {
    device->unused -= size;
    b = device->blocks = block_of(arena + index * ARENA + device->unused, size, b);
  } else {
    while (b && (b->taken || b->size < size)) b = b->next;
    if (!b) return 0;
    if (b->size > size) {
      b->next = block_of(b->at + size, b->size - size, b->next);
      b->size = size;
    }
  }
  b->taken = 1;
  device->allocated += size;
  return (void *)b->at;
}

static void join_next(struct block *b) {
  struct block *next = b->next;
  if (!next || next->taken) return;
  b->size += next->size;
  b->next = next->next;
  free(next);
}

int rehearsal_device_of(const void *p) {
  if (!arena || (u64)p < arena || (u64)p >= arena + MOST_DEVICES * ARENA) return -1;
  return (int)(((u64)p - arena) / ARENA);
}

static int give_back(void *p) {
  int index = rehearsal_device_of(p);
  if (index < 0) return 0;
  for (struct block *b = devices[index].blocks, *before = 0; b; before = b, b = b->next)
    if (b->at == (u64)p && b->taken) {
      b->taken = 0;
      devices[index].allocated -= b->size;
      madvise(p, b->size, MADV_DONTNEED);
      join_next(b);
      if (before && !before->taken) join_next(before);
      return 1;
    }
  return 0;
}

int rehearsal_take_library_bytes(int device, long long bytes) {
  pthread_mutex_lock(&lock);
  devices[device].has_context = 1;
  int enough = bytes <= 0 || rehearsal_used_bytes(device) + bytes <= rehearsal_total_bytes();
  if (enough) devices[device].libraries += bytes;
  pthread_mutex_unlock(&lock);
  return enough;
}

static int on_device(const void *p) { return rehearsal_device_of(p) >= 0; }

// Beginning of the name of a function that is not simulated -> the feature that needs it.
static const char *const features[][2] = {
    {"cuMulticast", "symmetric memory (torch.distributed._symmetric_memory, asynchronous tensor parallelism)"},
    {"cuMemExport", "symmetric memory, or sharing of CUDA tensors between processes"},
    {"cuMemImport", "symmetric memory, or sharing of CUDA tensors between processes"},
    {"cudaIpc", "sharing of CUDA tensors between processes (queues of torch.multiprocessing, workers that return CUDA tensors)"},
    {"cuIpc", "sharing of CUDA tensors between processes"},
    {"cuMemPool", "memory pools of the driver"},
    {"cuGreenCtx", "green contexts (torch.cuda.green_contexts)"},
    {"cuDevResource", "green contexts (torch.cuda.green_contexts)"},
    {"cuTex", "textures"},
    {"cuSurf", "textures"},
};

// The message goes to the rank's log. Such a function is called only if a feature needs it, so disabling the feature helps.
int rehearsal_refuse(const char *function) {
  static char said[4096];
  char name[130];
  const char *feature = "the feature that needs it";
  for (int i = 0; i < sizeof features / sizeof *features; i++)
    if (!strncmp(function, features[i][0], strlen(features[i][0]))) feature = features[i][1];
  snprintf(name, sizeof name, " %s ", function);
  pthread_mutex_lock(&lock);
  if (!strstr(said, name) && strlen(said) + sizeof name < sizeof said) {
    strcat(said, name);
    fprintf(stderr, "rehearsal: the script calls %s, which a rehearsal does not support; disable %s\n", function, feature);
  }
  pthread_mutex_unlock(&lock);
  return cudaErrorNotSupported;
}

static cudaError_t last_error = cudaSuccess;
static cudaError_t failed(cudaError_t error) { return last_error = error; }
cudaError_t cudaPeekAtLastError(void) { return last_error; }
cudaError_t cudaGetLastError(void) {
  cudaError_t error = last_error;
  last_error = cudaSuccess;
  return error;
}
const char *cudaGetErrorString(cudaError_t e) {
  return e == cudaErrorMemoryAllocation ? "out of memory" : e == cudaErrorInvalidDevice ? "invalid device ordinal"
       : e == cudaErrorNoDevice ? "no CUDA-capable device is detected" : e == cudaErrorNotSupported ? "operation not supported in a rehearsal" : e ? "an error" : "no error";
}
const char *cudaGetErrorName(cudaError_t e) { return e == cudaErrorMemoryAllocation ? "cudaErrorMemoryAllocation" : e ? "cudaErrorUnknown" : "cudaSuccess"; }

cudaError_t cudaMalloc(void **p, size_t size) {
  pthread_mutex_lock(&lock);
  *p = take(current, size);
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
  *total = rehearsal_total_bytes();
  *unused = *total - rehearsal_used_bytes(current);
  return cudaSuccess;
}
// Pinned host memory. It is recorded, because DDP checks that its bitmap of unused parameters is pinned.
static struct range {
  u64 at, size;
  struct range *next;
} *pinned;

static void pin(const void *p, size_t size) {
  struct range *made = malloc(sizeof *made);
  pthread_mutex_lock(&lock);
  *made = (struct range){(u64)p, size, pinned};
  pinned = made;
  pthread_mutex_unlock(&lock);
}

// The size of the range that began at p; 0 if none did.
static size_t unpin(const void *p) {
  size_t size = 0;
  pthread_mutex_lock(&lock);
  for (struct range **at = &pinned; *at; at = &(*at)->next)
    if ((*at)->at == (u64)p) {
      struct range *found = *at;
      size = found->size;
      *at = found->next;
      free(found);
      break;
    }
  pthread_mutex_unlock(&lock);
  return size;
}

static int is_pinned(const void *p) {
  int found = 0;
  pthread_mutex_lock(&lock);
  for (struct range *r = pinned; r && !found; r = r->next) found = (u64)p >= r->at && (u64)p < r->at + r->size;
  pthread_mutex_unlock(&lock);
  return found;
}

cudaError_t cudaHostAlloc(void **p, size_t size, unsigned flags) {
  size_t mapped = size ? size : 1;
  *p = mmap(0, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (*p == MAP_FAILED) return failed(cudaErrorMemoryAllocation);
  pin(*p, mapped);
  return cudaSuccess;
}
cudaError_t cudaFreeHost(void *p) {
  size_t size = unpin(p);
  if (size) munmap(p, size);
  return cudaSuccess;
}
cudaError_t cudaHostRegister(void *p, size_t size, unsigned flags) { pin(p, size); return cudaSuccess; }
cudaError_t cudaHostUnregister(void *p) { unpin(p); return cudaSuccess; }
cudaError_t cudaMallocHost(void **p, size_t size) { return cudaHostAlloc(p, size, 0); }
// Managed memory is on the host. Pages that a kernel would move to the GPU are not counted as GPU memory.
cudaError_t cudaMallocManaged(void **p, size_t size, unsigned flags) { return cudaHostAlloc(p, size, 0); }
cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *a, const void *p) {
  int device = rehearsal_device_of(p);
  enum cudaMemoryType on_host = is_pinned(p) ? cudaMemoryTypeHost : cudaMemoryTypeUnregistered;
  *a = (struct cudaPointerAttributes){.type = device >= 0 ? cudaMemoryTypeDevice : on_host, .device = device >= 0 ? device : -2};
  if (device >= 0) a->devicePointer = (void *)p;
  else a->hostPointer = (void *)p;
  return cudaSuccess;
}

cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t *handle, void *p) { return failed(rehearsal_refuse("cudaIpcGetMemHandle")); }
cudaError_t cudaIpcOpenMemHandle(void **p, cudaIpcMemHandle_t handle, unsigned flags) { return failed(rehearsal_refuse("cudaIpcOpenMemHandle")); }
cudaError_t cudaIpcGetEventHandle(cudaIpcEventHandle_t *handle, cudaEvent_t e) { return failed(rehearsal_refuse("cudaIpcGetEventHandle")); }
cudaError_t cudaIpcOpenEventHandle(cudaEvent_t *e, cudaIpcEventHandle_t handle) { return failed(rehearsal_refuse("cudaIpcOpenEventHandle")); }

// Sets the value that the script reads back after a kernel that did not run, such as the number of nonzero elements.
static __thread struct { char value[16]; size_t bytes; } answer;
void rehearsal_answer_next(const void *value, size_t bytes) {
  answer.bytes = bytes <= sizeof answer.value ? bytes : 0;
  if (answer.bytes) memcpy(answer.value, value, bytes);
}

static void copy(void *to, const void *from, size_t n) {
  if (n && n == answer.bytes && on_device(from) && !on_device(to)) {
    memcpy(to, answer.value, n);
    answer.bytes = 0;
  } else if (n <= COPIED) memcpy(to, from, n);
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

cudaError_t cudaGetDeviceCount(int *n) {
  *n = rehearsal_devices();
  return *n ? cudaSuccess : failed(cudaErrorNoDevice);
}
cudaError_t cudaGetDevice(int *device) { *device = current; return cudaSuccess; }
cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= rehearsal_devices()) return failed(cudaErrorInvalidDevice);
  current = device;
  return cudaSuccess;
}

// CUDA 12's header gives this function another name: cudaGetDeviceProperties_v2(p, device).
cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *p, int device) {
  const char *name = getenv("REHEARSAL_NAME");
  *p = (struct cudaDeviceProp){
      .totalGlobalMem = rehearsal_total_bytes(), .major = (int)setting("REHEARSAL_MAJOR", 9), .minor = (int)setting("REHEARSAL_MINOR", 0),
      .multiProcessorCount = (int)setting("REHEARSAL_MULTIPROCESSORS", 132),
      .sharedMemPerBlock = 48 << 10, .sharedMemPerBlockOptin = setting("REHEARSAL_SHARED_BYTES", 227 << 10),
      .sharedMemPerMultiprocessor = setting("REHEARSAL_SHARED_BYTES", 227 << 10) + 1024, .reservedSharedMemPerBlock = 1024,
      .l2CacheSize = 50 << 20, .regsPerBlock = 65536, .regsPerMultiprocessor = 65536, .totalConstMem = 65536, .warpSize = 32,
      .maxThreadsPerBlock = 1024, .maxThreadsPerMultiProcessor = (int)setting("REHEARSAL_THREADS", 2048), .maxBlocksPerMultiProcessor = 32,
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
extern void *rehearsal_driver_function(const char *name);
cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **f, unsigned version, unsigned long long flags, enum cudaDriverEntryPointQueryResult *found) {
  *f = rehearsal_driver_function(name);
  if (found) *found = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}

#if CUDART_VERSION < 13000
cudaError_t cudaGetDriverEntryPoint(const char *name, void **f, unsigned long long flags, enum cudaDriverEntryPointQueryResult *found) {
  return cudaGetDriverEntryPointByVersion(name, f, 0, flags, found);
}
#endif

// ---- Streams and events

static void *handle(void) { return calloc(1, 64); }
cudaError_t cudaStreamCreate(cudaStream_t *s) { *s = handle(); return cudaSuccess; }
cudaError_t cudaStreamCreateWithPriority(cudaStream_t *s, unsigned flags, int priority) { *s = handle(); return cudaSuccess; }
cudaError_t cudaStreamGetPriority(cudaStream_t s, int *priority) { *priority = 0; return cudaSuccess; }
// Graphs: one capture at a time. A stream belongs to it from cudaStreamBeginCapture, or from waiting for an event of a stream that
// does. The first field of a stream and the second one of an event is the number of that capture.
struct event { u64 at, capture; };
static u64 captures;  // odd while one is running
static u64 *capture_of(cudaStream_t s) {
  static __thread u64 never;  // the default streams, whose handles are 0 to 2, are not captured
  never = 0;
  return (u64)s > 2 ? (u64 *)s : &never;
}
static int capturing(cudaStream_t s) { return captures & 1 && *capture_of(s) == captures; }
cudaError_t cudaStreamBeginCapture(cudaStream_t s, enum cudaStreamCaptureMode mode) {
  *capture_of(s) = captures |= 1;
  return cudaSuccess;
}
cudaError_t cudaStreamBeginCaptureToGraph(cudaStream_t s, cudaGraph_t graph, const cudaGraphNode_t *nodes, const cudaGraphEdgeData *edges, size_t n,
                                          enum cudaStreamCaptureMode mode) { return cudaStreamBeginCapture(s, mode); }
cudaError_t cudaStreamEndCapture(cudaStream_t s, cudaGraph_t *graph) { captures = (captures | 1) + 1; *graph = handle(); return cudaSuccess; }
cudaError_t cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned flags) {
  if (captures & 1 && ((struct event *)e)->capture == captures) *capture_of(s) = captures;
  return cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t s, enum cudaStreamCaptureStatus *status) {
  *status = capturing(s) ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
#if CUDART_VERSION < 13000
cudaError_t cudaStreamGetCaptureInfo_v2(cudaStream_t s, enum cudaStreamCaptureStatus *status, unsigned long long *id, cudaGraph_t *graph,
                                        const cudaGraphNode_t **nodes, size_t *n) {
#else
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t s, enum cudaStreamCaptureStatus *status, unsigned long long *id, cudaGraph_t *graph,
                                     const cudaGraphNode_t **nodes, const cudaGraphEdgeData **edges, size_t *n) {
#endif
  if (id) *id = captures;
  if (graph) *graph = 0;
  if (n) *n = 0;
  return cudaStreamIsCapturing(s, status);
}
cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *n) { *n = 1; return cudaSuccess; }
cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *made, cudaGraph_t graph, unsigned long long flags) { *made = handle(); return cudaSuccess; }
cudaError_t cudaGraphInstantiate(cudaGraphExec_t *made, cudaGraph_t graph, unsigned long long flags) { *made = handle(); return cudaSuccess; }
cudaError_t cudaDeviceGetGraphMemAttribute(int device, enum cudaGraphMemAttributeType which, void *value) { *(u64 *)value = 0; return cudaSuccess; }
cudaError_t cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t s) { return rehearsal_launched(); }

// Time on the simulated GPU passes with each launch, so that measured times are positive, the same in every run, and an autotuner
// that repeats a kernel until some time has passed (triton.testing.do_bench) soon has enough. An event holds that time.
#define LAUNCH_NS 1000000ull
static u64 gpu_ns = 1;
int rehearsal_launched(void) { __sync_fetch_and_add(&gpu_ns, LAUNCH_NS); return 0; }
cudaError_t cudaEventCreate(cudaEvent_t *e) { *e = calloc(1, sizeof(struct event)); return cudaSuccess; }
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *e, unsigned flags) { return cudaEventCreate(e); }
cudaError_t cudaEventRecordWithFlags(cudaEvent_t e, cudaStream_t s, unsigned flags) {
  *(struct event *)e = (struct event){__sync_add_and_fetch(&gpu_ns, 1000), *capture_of(s)};
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s) { return cudaEventRecordWithFlags(e, s, 0); }
cudaError_t cudaEventDestroy(cudaEvent_t e) { free(e); return cudaSuccess; }
cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t a, cudaEvent_t b) {
  *ms = (float)((long long)(*(u64 *)b - *(u64 *)a) / 1e6);
  return cudaSuccess;
}
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
// The architecture of the code that a GPU runs: the newest of its generation for which PyTorch was compiled. CUB knows no others.
static int code_of(int major, int minor) {
  static const int compiled[] = {REHEARSAL_COMPILED 0};
  int found = 0;
  for (int i = 0; compiled[i]; i++)
    if (compiled[i] / 10 == major && compiled[i] % 10 <= minor && compiled[i] > found) found = compiled[i];
  return found ? found : major * 10 + minor;
}
cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *a, const void *f) {
  int code = code_of((int)setting("REHEARSAL_MAJOR", 9), (int)setting("REHEARSAL_MINOR", 0));
  *a = (struct cudaFuncAttributes){.maxThreadsPerBlock = 1024, .numRegs = 32, .ptxVersion = code, .binaryVersion = code,
                                   .maxDynamicSharedSizeBytes = (int)setting("REHEARSAL_SHARED_BYTES", 227 << 10)};
  return cudaSuccess;
}
#if CUDART_VERSION >= 12080
cudaError_t cudaLibraryLoadData(cudaLibrary_t *library, const void *code, enum cudaJitOption *jit, void **jv, unsigned nj, enum cudaLibraryOption *o, void **ov,
                                unsigned n) { *library = (cudaLibrary_t)handle(); return cudaSuccess; }
cudaError_t cudaLibraryLoadFromFile(cudaLibrary_t *library, const char *file, enum cudaJitOption *jit, void **jv, unsigned nj, enum cudaLibraryOption *o, void **ov,
                                    unsigned n) { *library = (cudaLibrary_t)handle(); return cudaSuccess; }
cudaError_t cudaLibraryUnload(cudaLibrary_t library) { free(library); return cudaSuccess; }
cudaError_t cudaLibraryGetKernel(cudaKernel_t *kernel, cudaLibrary_t library, const char *name) { *kernel = (cudaKernel_t)library; return cudaSuccess; }
cudaError_t cudaLibraryGetKernelCount(unsigned *n, cudaLibrary_t library) { *n = 0; return cudaSuccess; }
cudaError_t cudaLibraryGetGlobal(void **p, size_t *bytes, cudaLibrary_t library, const char *name) {
  if (bytes) *bytes = 1 << 20;
  return cudaGetSymbolAddress(p, 0);
}
cudaError_t cudaLibraryGetManaged(void **p, size_t *bytes, cudaLibrary_t library, const char *name) { return cudaLibraryGetGlobal(p, bytes, library, name); }
cudaError_t cudaLibraryGetUnifiedFunction(void **f, cudaLibrary_t library, const char *name) { return failed(rehearsal_refuse("cudaLibraryGetUnifiedFunction")); }
#endif
cudaError_t cudaLaunchKernel(const void *f, dim3 grid, dim3 block, void **p, size_t shared, cudaStream_t s) { return rehearsal_launched(); }
cudaError_t __cudaLaunchKernel(cudaKernel_t f, dim3 grid, dim3 block, void **p, size_t shared, cudaStream_t s) { return rehearsal_launched(); }
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *f, void **p) { return rehearsal_launched(); }
cudaError_t cudaLaunchCooperativeKernel(const void *f, dim3 grid, dim3 block, void **p, size_t shared, cudaStream_t s) { return rehearsal_launched(); }
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *n, const void *f, int block, size_t shared) { *n = 2; return cudaSuccess; }
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *n, const void *f, int block, size_t shared, unsigned flags) { *n = 2; return cudaSuccess; }
