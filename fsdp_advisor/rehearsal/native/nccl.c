// NCCL between processes of one machine, without GPUs. Small collectives and messages move their data, because scripts read them on
// the host: counts, norms, seeds, pickled objects. Large ones return at once and do not change their buffers. A communicator of
// several ranks takes REHEARSAL_COMMUNICATOR_BYTES of the GPU's memory, and the first one REHEARSAL_NCCL_BYTES for NCCL's kernels.
//
// With REHEARSAL_RANKS a rank runs alone. Collectives return as if each other rank had this rank's data: an all-gather copies it, a sum
// multiplies it, a broadcast from another rank does not change the buffer, a message from another rank contains zeros.
//
// Functions that only return success are generated.
#define _GNU_SOURCE
#include <stdarg.h>
#include <sys/random.h>

#include "nccl_numbers.h"
#include "nccl_shared.h"

#define MOVED_FLOATS (1ull << 20)  // the larger buffer of a collective of floating-point numbers; integers: COPIED for each rank
#define PROBE 1.0                  // seconds between two looks at the other processes

enum { OK, CUDA_ERROR, SYSTEM_ERROR, INTERNAL_ERROR, INVALID_ARGUMENT, INVALID_USAGE, REMOTE_ERROR };
enum { ALL_REDUCE, REDUCE, REDUCE_SCATTER, ALL_GATHER, GATHER, BROADCAST, SCATTER, ALL_TO_ALL, SEND, RECEIVE };
static const char *NAMES[] = {"all-reduce", "reduce", "reduce-scatter", "all-gather", "gather", "broadcast", "scatter", "all-to-all", "send", "receive"};

typedef struct { unsigned char bytes[128]; } identity;  // ncclUniqueId: IDENTITY random bytes, then the process that made it

struct communicator {
  int rank, n, device, alone, splits, error, calls;
  volatile int aborted;
  long long bytes;                                 // of GPU memory
  struct shared *shared;
  u64 round;                                       // collectives' rounds so far, equal on all ranks
  unsigned char identity[IDENTITY];
  struct { int type; number factor; } factors[64];  // of ncclRedOpCreatePreMulSum
};

struct operation {
  struct communicator *c;
  int kind, type, reduction, root, posted, done;   // root: the other rank of a message
  const char *send;
  char *receive;
  u64 unit, total, at;                             // bytes for each rank; bytes that a rank contributes; bytes done
  const number *factor;
  struct operation *next;
};

static __thread int depth;                         // of ncclGroupStart
static __thread struct operation *first, *last;      // operations of the group
static __thread char message[512];

static int failed(int error, const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(message, sizeof message, format, arguments);
  va_end(arguments);
  return error;
}

const char *ncclGetErrorString(int error) {
  static const char *texts[] = {"no error", "unhandled cuda error", "unhandled system error", "internal error", "invalid argument",
                                "invalid usage", "remote process exited or there was a network error", "operation in progress"};
  return texts[error >= 0 && error < 8 ? error : 3];
}
const char *ncclGetLastError(void *c) { return message; }
int ncclGetVersion(int *version) { *version = 22907; return OK; }

// ---- Communicators

int ncclGetUniqueId(identity *made) {
  memset(made, 0, sizeof *made);
  if (getrandom(made->bytes, IDENTITY, 0) != IDENTITY) return failed(SYSTEM_ERROR, "getrandom failed");
  *(int *)(made->bytes + IDENTITY) = (int)getpid();
  return OK;
}

static int take_memory(struct communicator *c) {
  static char loaded[16];  // NCCL's kernels stay on a GPU
  if (c->n == 1) return OK;
  u64 kernels = loaded[c->device] ? 0 : setting("REHEARSAL_NCCL_BYTES", 0), buffers = setting("REHEARSAL_COMMUNICATOR_BYTES", 0);
  if (!rehearsal_take_library_bytes(c->device, (long long)(kernels + buffers)))
    return failed(CUDA_ERROR, "Cuda failure 2 'out of memory': a communicator of %d ranks needs %llu MiB of GPU memory", c->n, (kernels + buffers) >> 20);
  c->bytes = (long long)buffers, loaded[c->device] = 1;
  return OK;
}

static struct communicator *communicator_of(int rank, int n, const void *id) {
  const char *alone = getenv("REHEARSAL_RANKS");
  struct communicator *c = calloc(1, sizeof *c);
  c->rank = rank, c->n = n, c->device = rehearsal_current_device(), c->alone = n == 1 || (alone && *alone);
  memcpy(c->identity, id, IDENTITY);
  return c;
}

static int connect_ranks(struct communicator **made, int n, const identity *id, int rank) {
  if (rank < 0 || rank >= n) return failed(INVALID_ARGUMENT, "rank %d of %d", rank, n);
  struct communicator *c = communicator_of(rank, n, id);
  int error = take_memory(c);
  *made = 0;
  if (error) { free(c); return error; }
  if (!c->alone && !(c->shared = share(rank, n, c->identity, *(int *)(id->bytes + IDENTITY)))) {
    rehearsal_take_library_bytes(c->device, -c->bytes);
    free(c);
    return failed(REMOTE_ERROR, "rank %d waited for the other %d ranks of a communicator in vain", rank, n - 1);
  }
  *made = c;
  return OK;
}

int ncclCommInitRank(struct communicator **c, int n, identity id, int rank) { return connect_ranks(c, n, &id, rank); }
int ncclCommInitRankConfig(struct communicator **c, int n, identity id, int rank, void *config) { return connect_ranks(c, n, &id, rank); }
int ncclCommInitRankScalable(struct communicator **c, int n, int rank, int ids, identity *id, void *config) { return connect_ranks(c, n, id, rank); }

// One process with all ranks: the shared memory is its own.
int ncclCommInitAll(struct communicator **made, int n, const int *devices) {
  identity id = {{0}};
  struct shared *s = n > 1 ? mmap(0, shared_bytes(n), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0) : 0;
  for (int rank = 0; rank < n; rank++) {
    made[rank] = communicator_of(rank, n, &id);
    made[rank]->device = devices ? devices[rank] : rank;
    made[rank]->alone = n == 1;
    made[rank]->shared = s;
    if (s) s->members[rank].process = (int)getpid();
    int error = take_memory(made[rank]);
    if (error) return error;
  }
  return OK;
}

// Other ranks need not wait for this one any more. The structure is not freed, because the watchdog's thread may still read it.
static int leave(struct communicator *c) {
  if (!c) return OK;
  if (c->shared && !atomic_exchange(&c->shared->members[c->rank].left, 1)) announce(c->shared);
  rehearsal_take_library_bytes(c->device, -c->bytes);
  c->bytes = 0;
  return OK;
}
int ncclCommDestroy(struct communicator *c) { return leave(c); }
int ncclCommAbort(struct communicator *c) { if (c) c->aborted = 1; return leave(c); }
int ncclCommRevoke(struct communicator *c, int flags) { if (c) c->aborted = 1; return OK; }
int ncclCommCount(const struct communicator *c, int *n) { *n = c->n; return OK; }
int ncclCommUserRank(const struct communicator *c, int *rank) { *rank = c->rank; return OK; }
int ncclCommCuDevice(const struct communicator *c, int *device) { *device = c->device; return OK; }
int ncclCommGetAsyncError(struct communicator *c, int *error) { *error = c->error; return OK; }

// ---- Collectives: in every round each rank publishes the next SLOT bytes of its contribution and reads those of the others

static int shows(const struct operation *o) { return (o->kind != BROADCAST && o->kind != SCATTER) || o->root == o->c->rank; }
static int reads(const struct operation *o) { return (o->kind != REDUCE && o->kind != GATHER) || o->root == o->c->rank; }
static int reads_from(const struct operation *o, int rank) { return (o->kind != BROADCAST && o->kind != SCATTER) || o->root == rank; }
static int reduces(int kind) { return kind <= REDUCE_SCATTER; }
static int sends_parts(int kind) { return kind == REDUCE_SCATTER || kind == SCATTER || kind == ALL_TO_ALL; }
static int receives_parts(int kind) { return kind == ALL_GATHER || kind == GATHER || kind == ALL_TO_ALL; }

// Write one piece of the result: `source(j)` is rank j's part of it. If a rank runs alone, all parts are its own.
static void reduce_stretch(const struct operation *o, const char *(*source)(const struct operation *, int, u64), u64 from, u64 bytes, char *to) {
  int operation = o->reduction == AVERAGE ? SUM : o->reduction, alone = o->c->alone;
  u64 size = size_of(o->type);
  char result[4096];
  for (u64 at = 0, n; at < bytes; at += n) {
    n = bytes - at < sizeof result ? bytes - at : sizeof result;
    for (u64 i = 0; i < n / size; i++) {
      number all = load(o->type, source(o, 0, from + at), i);
      if (alone && o->factor) all = combine(o->type, PRODUCT, all, *o->factor);
      if (alone) all = repeat(o->type, operation, all, o->c->n);
      for (int j = 1; !alone && j < o->c->n; j++) all = combine(o->type, operation, all, load(o->type, source(o, j, from + at), i));
      store(o->type, result, i, o->reduction == AVERAGE ? divide(o->type, all, o->c->n) : all);
    }
    put(to + at, result, n);
  }
}

// Add the part of the contribution [from, to) that this rank needs to its result.
static void take_stretch(const struct operation *o, const char *(*source)(const struct operation *, int, u64), u64 from, u64 to) {
  u64 start = sends_parts(o->kind) ? o->c->rank * o->unit : 0;
  if (from < start) from = start;
  if (to > start + o->unit) to = start + o->unit;
  if (from >= to || !reads(o)) return;
  if (reduces(o->kind)) {
    reduce_stretch(o, source, from, to - from, o->receive + from - start);
    return;
  }
  for (int j = 0; j < o->c->n; j++)
    if (reads_from(o, j)) put(o->receive + (receives_parts(o->kind) ? j * o->unit : 0) + from - start, source(o, j, from), to - from);
}

static const char *own(const struct operation *o, int rank, u64 at) { return o->send + at; }
static const char *shown(const struct operation *o, int rank, u64 at) {
  return slot_of(o->c->shared, o->c->n, rank, o->c->round & 1) + at - o->at;
}

static void collect_alone(struct operation *o) {
  if (shows(o)) take_stretch(o, own, 0, o->total);
  o->done = 1;
}

static struct call call_of(const struct operation *o) { return (struct call){o->kind, o->type, o->reduction, o->root, o->unit, o->at}; }

static void show(struct operation *o) {
  struct communicator *c = o->c;
  u64 bytes = o->total - o->at < SLOT ? o->total - o->at : SLOT, size = size_of(o->type);
  char *slot = slot_of(c->shared, c->n, c->rank, c->round & 1);
  if (shows(o)) memcpy(slot, o->send + o->at, bytes);
  for (u64 i = 0; o->factor && i < bytes / size; i++) store(o->type, slot, i, combine(o->type, PRODUCT, load(o->type, slot, i), *o->factor));
  c->shared->members[c->rank].calls[c->round & 1] = call_of(o);
  o->posted = 1;
  if (atomic_fetch_add(&c->shared->arrivals, 1) + 1 == c->n * (c->round + 1)) announce(c->shared);
}

static int differs(const struct operation *o) {
  struct call mine = call_of(o);
  for (int j = 0; j < o->c->n; j++) {
    struct call *other = &o->c->shared->members[j].calls[o->c->round & 1];
    if (memcmp(&mine, other, sizeof mine))
      return failed(INVALID_USAGE, "rank %d calls %s of %llu bytes (type %d), but rank %d calls %s of %llu bytes (type %d)", o->c->rank, NAMES[mine.kind],
                    mine.bytes, mine.type, j, NAMES[other->kind], other->bytes, other->type);
  }
  return OK;
}

// A slot can be reused two rounds later: by then every rank has reached the round in between.
static int collect(struct operation *o, int *moved) {
  struct communicator *c = o->c;
  if (!o->posted) show(o);
  if (atomic_load(&c->shared->arrivals) < c->n * (c->round + 1)) return OK;
  int error = differs(o);
  if (error) return error;
  take_stretch(o, shown, o->at, o->at + SLOT < o->total ? o->at + SLOT : o->total);
  c->round++, o->at += SLOT, o->posted = 0, *moved = 1;
  o->done = o->at >= o->total;
  return OK;
}

// ---- Messages: a queue of bytes for each pair of ranks, with the length before each message

static u64 transfer(char *data, u64 position, char *bytes, u64 n, int writes) {
  u64 at = position % QUEUE;
  if (n > QUEUE - at) n = QUEUE - at;
  if (writes) memcpy(data + at, bytes, n);
  else put(bytes, data + at, n);
  return n;
}

static int exchange(struct operation *o, int *moved) {
  struct communicator *c = o->c;
  int sends = o->kind == SEND, from = sends ? c->rank : o->root, to = sends ? o->root : c->rank;
  struct queue *q = queue_of(c->shared, c->n, from, to);
  char *data = data_of(c->shared, c->n, from, to);
  u64 length = o->unit, before = o->at, all = sizeof length + o->unit;
  while (o->at < all) {
    u64 written = atomic_load(&q->written), read = atomic_load(&q->read), n = sends ? QUEUE - (written - read) : written - read;
    if (!n || (o->at < sizeof length && n < sizeof length)) break;
    char *bytes = o->at < sizeof length ? (char *)&length : (sends ? (char *)o->send : o->receive) + o->at - sizeof length;
    u64 wanted = o->at < sizeof length ? sizeof length : all - o->at;
    n = transfer(data, sends ? written : read, bytes, n < wanted ? n : wanted, sends);
    atomic_fetch_add(sends ? &q->written : &q->read, n);
    if (length != o->unit) return failed(INVALID_USAGE, "rank %d sends %llu bytes, but rank %d receives %llu", from, length, to, o->unit);
    o->at += n;
  }
  if (o->at > before) *moved = 1, announce(c->shared);
  o->done = o->at == all;
  return OK;
}

// ---- Execution at the end of the outermost group

// Operations that must wait for an earlier one: collectives of one communicator, and messages of one direction between two ranks.
static int follows(const struct operation *o) {
  for (struct operation *e = first; e != o; e = e->next)
    if (!e->done && e->c == o->c && (o->kind < SEND ? e->kind < SEND : e->kind == o->kind && e->root == o->root)) return 1;
  return 0;
}

static int lost(const struct operation *o) {
  struct communicator *c = o->c;
  for (int j = 0; j < c->n; j++) {
    struct member *m = &c->shared->members[j];
    if (j == c->rank || (o->kind >= SEND && j != o->root)) continue;
    if (atomic_load(&m->left) || (atomic_load(&m->process) && has_ended(atomic_load(&m->process))))
      return failed(REMOTE_ERROR, "rank %d has ended, while rank %d waits for it in %s", j, c->rank, NAMES[o->kind]);
  }
  return OK;
}

// Try to advance every operation once. `waiting` becomes the first operation that is not done.
static int attempt(struct operation **waiting, int *moved) {
  *waiting = 0, *moved = 0;
  for (struct operation *o = first; o; o = o->next) {
    if (o->done) continue;
    if (o->c->aborted) return failed(REMOTE_ERROR, "the communicator of rank %d was aborted", o->c->rank);
    if (atomic_load(&o->c->shared->failed)) return failed(REMOTE_ERROR, "%s", o->c->shared->failure);
    int error = follows(o) ? OK : o->kind < SEND ? collect(o, moved) : exchange(o, moved);
    if (error) return error;
    if (!o->done && !*waiting) *waiting = o;
  }
  return OK;
}

static int execute(void) {
  struct operation *waiting;
  double since = now(), probed = since;
  for (int moved, probing = 0;;) {
    struct operation *at = first;
    while (at && at->done) at = at->next;
    if (!at) return OK;
    unsigned seen = atomic_load(&at->c->shared->changes);
    int error = attempt(&waiting, &moved);
    if (!error && !waiting) return OK;
    if (!error && moved) { since = now(), probing = 0; continue; }
    if (!error && probing) error = lost(waiting);
    if (!error && now() - since > time_limit())
      error = failed(SYSTEM_ERROR, "rank %d waited %.0f seconds in %s; ranks may call collectives in different orders", waiting->c->rank, now() - since, NAMES[waiting->kind]);
    if (error) {
      at->c->error = error;
      if (!atomic_load(&at->c->shared->failed)) snprintf(at->c->shared->failure, sizeof at->c->shared->failure, "%s", message);
      atomic_store(&at->c->shared->failed, 1);
      announce(at->c->shared);
      return error;
    }
    probing = 0;
    wait_for_change(at->c->shared, seen, waiting->c == at->c ? 0.1 : 0.002);
    if (now() - probed > PROBE) probed = now(), probing = 1;  // look after one more attempt
  }
}

static void forget(void) {
  for (struct operation *next; first; first = next) next = first->next, free(first);
  last = 0;
}

// If a rank runs alone, a message from another rank contains what this rank sends to itself in the same group, or zeros.
static void receive_alone(struct operation *o) {
  static const char zeros[4096];
  struct operation *sent = first;
  while (sent && (sent->kind != SEND || sent->c != o->c || sent->root != o->c->rank || sent->unit != o->unit)) sent = sent->next;
  if (sent) put(o->receive, sent->send, o->unit);
  for (u64 at = 0; !sent && at < o->unit; at += sizeof zeros) put(o->receive + at, zeros, o->unit - at < sizeof zeros ? o->unit - at : sizeof zeros);
}

// If a rank runs alone, a broadcast from another rank contains what this rank broadcasts in the same group: the group is an all-gather.
static void hear_alone(struct operation *o) {
  struct operation *own = first;
  while (own && (own->kind != BROADCAST || own->c != o->c || own->root != o->c->rank || own->unit != o->unit)) own = own->next;
  if (own) put(o->receive, own->send, o->unit);
}

static int finish(void) {
  for (struct operation *o = first; o; o = o->next) {
    if (!o->c->alone) continue;
    if (o->kind == BROADCAST && o->root != o->c->rank) hear_alone(o);
    else if (o->kind < SEND) collect_alone(o);
    else if (o->kind == RECEIVE) receive_alone(o);
    o->done = 1;
  }
  int error = execute();
  forget();
  return error;
}

int ncclGroupStart(void) { depth++; return OK; }
int ncclGroupEnd(void) {
  if (depth == 0) return failed(INVALID_USAGE, "ncclGroupEnd without ncclGroupStart");
  return --depth ? OK : finish();
}
int ncclGroupSimulateEnd(void *info) { return ncclGroupEnd(); }

static int is_small(const struct operation *o) {
  u64 ranks = o->c->n, received = o->unit * (receives_parts(o->kind) ? ranks : 1), larger = o->total > received ? o->total : received;
  return is_float(o->type) ? larger <= MOVED_FLOATS : o->unit <= COPIED;
}

static int call(int kind, const void *send, void *receive, u64 count, int type, int reduction, int root, struct communicator *c) {
  if (!c || type < 0 || type >= TYPES) return failed(INVALID_ARGUMENT, "no communicator, or element type %d", type);
  if (root < 0 || root >= c->n) return failed(INVALID_ARGUMENT, "rank %d of a communicator of %d ranks", root, c->n);
  struct operation o = {.c = c, .kind = kind, .type = type, .reduction = reduction, .root = root, .send = send, .receive = receive};
  o.unit = count * size_of(type);
  o.total = o.unit * (sends_parts(kind) ? c->n : 1);
  if (reduces(kind) && reduction >= OPERATIONS) {
    o.factor = &c->factors[(reduction - OPERATIONS) % 64].factor;
    o.reduction = SUM;
  }
  if (!o.unit || !is_small(&o)) return OK;
  struct operation *made = malloc(sizeof o);
  *made = o;
  last = *(last ? &last->next : &first) = made;
  return depth ? OK : finish();
}

typedef struct communicator *comm;
int ncclAllReduce(const void *s, void *r, size_t n, int type, int op, comm c, void *stream) { return call(ALL_REDUCE, s, r, n, type, op, 0, c); }
int ncclReduce(const void *s, void *r, size_t n, int type, int op, int root, comm c, void *stream) { return call(REDUCE, s, r, n, type, op, root, c); }
int ncclReduceScatter(const void *s, void *r, size_t n, int type, int op, comm c, void *stream) { return call(REDUCE_SCATTER, s, r, n, type, op, 0, c); }
int ncclAllGather(const void *s, void *r, size_t n, int type, comm c, void *stream) { return call(ALL_GATHER, s, r, n, type, 0, 0, c); }
int ncclBroadcast(const void *s, void *r, size_t n, int type, int root, comm c, void *stream) { return call(BROADCAST, s, r, n, type, 0, root, c); }
int ncclBcast(void *b, size_t n, int type, int root, comm c, void *stream) { return call(BROADCAST, b, b, n, type, 0, root, c); }
int ncclGather(const void *s, void *r, size_t n, int type, int root, comm c, void *stream) { return call(GATHER, s, r, n, type, 0, root, c); }
int ncclScatter(const void *s, void *r, size_t n, int type, int root, comm c, void *stream) { return call(SCATTER, s, r, n, type, 0, root, c); }
int ncclAlltoAll(const void *s, void *r, size_t n, int type, comm c, void *stream) { return call(ALL_TO_ALL, s, r, n, type, 0, 0, c); }
int ncclSend(const void *s, size_t n, int type, int peer, comm c, void *stream) { return call(SEND, s, 0, n, type, 0, peer, c); }
int ncclRecv(void *r, size_t n, int type, int peer, comm c, void *stream) { return call(RECEIVE, 0, r, n, type, 0, peer, c); }

// A sum in which each rank's elements are first multiplied by a number. The number is on the host or on the GPU; both are host memory here.
int ncclRedOpCreatePreMulSum(int *operation, const void *factor, int type, int where, comm c) {
  int at = c->calls++ % 64;
  c->factors[at].factor = load(type, factor, 0);
  *operation = OPERATIONS + at;
  return OK;
}

// ---- Communicators from communicators

static int derive(comm *made, comm parent, int rank, int n, unsigned what) {
  identity id = {{0}};
  derive_identity(id.bytes, parent->identity, (u64)parent->splits, what);
  return connect_ranks(made, n, &id, rank);
}

// Ranks of one color make a communicator, in the order of their keys. If a rank runs alone, all ranks of the parent belong to it.
int ncclCommSplit(comm c, int color, int key, comm *made, void *config) {
  struct { int color, key; } mine = {color, key}, *all = calloc(c->n, sizeof mine);
  int error = call(ALL_GATHER, &mine, all, sizeof mine, INT8, 0, 0, c), n = 0, rank = 0;
  *made = 0;
  c->splits++;
  for (int j = 0; !error && j < c->n; j++) {
    if (all[j].color != color) continue;
    n++;
    rank += all[j].key < key || (all[j].key == key && j < c->rank);
  }
  free(all);
  if (error || color < 0) return error;  // NCCL_SPLIT_NOCOLOR
  return derive(made, c, c->alone && c->n > 1 ? c->rank : rank, n, (unsigned)color);
}

int ncclCommShrink(comm c, int *excluded, int count, comm *made, void *config, int flags) {
  int rank = c->rank;
  unsigned what = 0x80000000u;
  c->splits++;
  for (int i = 0; i < count; i++) rank -= excluded[i] < c->rank, what = what * 31 + (unsigned)excluded[i] + 1;
  return derive(made, c, rank, c->n - count, what);
}

// ---- Memory

extern int cudaMalloc(void **, size_t), cudaFree(void *);
int ncclMemAlloc(void **p, size_t bytes) { return cudaMalloc(p, bytes) ? failed(CUDA_ERROR, "out of memory") : OK; }
int ncclMemFree(void *p) { return cudaFree(p) ? failed(CUDA_ERROR, "not memory of ncclMemAlloc") : OK; }
int ncclCommRegister(comm c, void *buffer, size_t bytes, void **handle) { *handle = buffer; return OK; }
int ncclCommWindowRegister(comm c, void *buffer, size_t bytes, void **window, int flags) { *window = buffer; return OK; }
int ncclWinGetUserPtr(comm c, void *window, void **p) { *p = window; return OK; }
int ncclCommMemStats(comm c, int which, unsigned long long *value) { *value = which == 0 ? (u64)c->bytes : 0; return OK; }

// Kernels that write into the memory of other GPUs cannot run.
static int unsupported(void) {
  return failed(INVALID_USAGE, "symmetric memory needs a GPU: disable async tensor parallelism and torch.distributed._symmetric_memory");
}
int ncclDevCommCreate(comm c, const void *wanted, void *made) { return unsupported(); }
int ncclGetLsaMultimemDevicePointer(void *window, size_t at, void **p) { return unsupported(); }
int ncclGetPeerDevicePointer(void *window, size_t at, int peer, void **p) { return unsupported(); }
int ncclCommGrow(void) { return failed(INVALID_USAGE, "a communicator cannot grow in a rehearsal: start all ranks at once"); }
int ncclCommGetUniqueId(void) { return ncclCommGrow(); }
int ncclPutSignal(void) { return unsupported(); }
int ncclSignal(void) { return unsupported(); }
int ncclWaitSignal(void) { return unsupported(); }
