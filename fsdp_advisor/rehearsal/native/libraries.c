// The functions of CUDA's libraries whose answers PyTorch reads. build.py generates all others: they do nothing and return success.
// The first line of a section names its library.

// library libcublas
int cublasGetVersion_v2(void *handle, int *version) { *version = 130100; return 0; }
int cublasGetProperty(int part, int *value) { *value = part == 0 ? 13 : 0; return 0; }
int cublasGetMathMode(void *handle, int *mode) { *mode = 0; return 0; }
int cublasGetPointerMode_v2(void *handle, int *mode) { *mode = 0; return 0; }

// library libcublasLt
size_t cublasLtGetVersion(void) { return 130100; }
int cublasLtMatmulAlgoGetHeuristic(void *handle, void *op, void *a, void *b, void *c, void *d, void *wanted, int asked, long *result, int *found) {
  for (int i = 0; i < 16; i++) result[i] = 0;  // one algorithm, without a workspace of its own
  *found = 1;
  return 0;
}

// library libcudnn
size_t cudnnGetVersion(void) { const char *text = getenv("REHEARSAL_CUDNN"); return text ? atol(text) : 92000; }
size_t cudnnGetCudartVersion(void) { return 13000; }
const char *cudnnGetErrorString(int status) { return "cudnn"; }
int cudnnBackendCreateDescriptor(int type, void **descriptor) { *descriptor = calloc(1, 4096); return 0; }
int cudnnBackendGetAttribute(void *descriptor, int name, int type, long asked, long *n, void *out) {
  if (n) *n = 1;
  if (out && asked) *(long *)out = 0;  // above all: an engine's workspace
  return 0;
}

// library libnvrtc
int nvrtcVersion(int *major, int *minor) { *major = 13; *minor = 0; return 0; }
