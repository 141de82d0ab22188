// The simulated machine, as fsdp_advisor/rehearsal/environment.py describes it in environment variables, and the state that
// the libraries share. libcudart (runtime.c) defines the functions.
#pragma once
#include <stddef.h>
#include <stdlib.h>

typedef unsigned long long u64;

static inline u64 setting(const char *name, u64 otherwise) {
  const char *text = getenv(name);
  return text && *text ? strtoull(text, 0, 10) : otherwise;
}

// Copies, fills and collectives of more bytes move no data, so that host memory stays small.
#define COPIED (4ull << 20)

int rehearsal_devices(void);                           // the number of visible GPUs
u64 rehearsal_total_bytes(void);                       // memory of one GPU, as cudaMemGetInfo reports it
u64 rehearsal_used_bytes(int device);                  // CUDA context, libraries and allocations of this process
int rehearsal_take_library_bytes(int device, long long bytes);  // memory of a library (NCCL); 0 if there is too little; negative: give back
int rehearsal_device_of(const void *pointer);          // the GPU whose memory this is, or -1
int rehearsal_current_device(void);
int rehearsal_launched(void);                          // a kernel was launched: it takes time on the simulated GPU and does nothing
int rehearsal_refuse(const char *function);            // says once that a function is not supported; returns the error to return
void rehearsal_answer_next(const void *value, size_t bytes);  // the next copy of so many bytes to the host reads this value
