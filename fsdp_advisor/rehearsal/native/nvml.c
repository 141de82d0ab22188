// NVML: the number of devices, and the memory in use on each.
#include <stdio.h>
#include "settings.h"

int nvmlInit(void) { return 0; }
int nvmlInit_v2(void) { return 0; }
int nvmlInitWithFlags(unsigned flags) { return 0; }
int nvmlShutdown(void) { return 0; }
const char *nvmlErrorString(int error) { return "an error"; }
int nvmlDeviceGetCount_v2(int *n) { *n = (int)setting("REHEARSAL_DEVICES", 1); return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) { *device = (void *)(u64)(16 + index); return 0; }
int nvmlDeviceGetHandleByPciBusId_v2(const char *id, void **device) { *device = (void *)16; return 0; }
int nvmlDeviceGetUUID(void *device, char *text, unsigned n) { snprintf(text, n, "GPU-00000000-0000-0000-0000-%012llu", (u64)device); return 0; }
int nvmlDeviceGetName(void *device, char *text, unsigned n) { const char *name = getenv("REHEARSAL_NAME"); snprintf(text, n, "%s", name ? name : "CUDA without kernels"); return 0; }
int nvmlSystemGetDriverVersion(char *text, unsigned n) { snprintf(text, n, "0.0"); return 0; }
int nvmlSystemGetCudaDriverVersion_v2(int *version) { *version = 13000; return 0; }
int nvmlDeviceGetComputeRunningProcesses(void *device, unsigned *n, void *processes) { *n = 0; return 0; }
int nvmlDeviceGetNvLinkRemoteDeviceType(void *device, unsigned link, int *type) { return 3; }  // NVML_ERROR_NOT_SUPPORTED
int nvmlDeviceGetNvLinkRemotePciInfo_v2(void *device, unsigned link, void *info) { return 3; }
int nvmlDeviceGetGpuFabricInfoV(void *device, void *info) { return 0; }  // expandable segments ask for it
// nvmlMemory_t: total, free, used; nvmlMemory_v2_t: version, total, reserved, free, used
int nvmlDeviceGetMemoryInfo(void *device, u64 *m) { m[0] = rehearsal_total_bytes(); m[2] = rehearsal_used_bytes((int)((u64)device - 16)); m[1] = m[0] - m[2]; return 0; }
int nvmlDeviceGetMemoryInfo_v2(void *device, u64 *m) { m[1] = rehearsal_total_bytes(); m[4] = rehearsal_used_bytes((int)((u64)device - 16)); m[2] = 0; m[3] = m[1] - m[4]; return 0; }
