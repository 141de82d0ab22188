// The memory that the ranks of one communicator share, how they find it, and how they wait for each other.
//
// Rank 0 makes an anonymous file and passes it to the others over a socket without a name in the file system: nothing is left behind
// when a process is killed. Waiting sleeps in the kernel (futex).
#pragma once
#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <poll.h>
#include <stdatomic.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>
#include "settings.h"

#define SLOT (64ull << 10)   // bytes that a rank shows the others at a time
#define QUEUE (1ull << 20)   // bytes on the way from one rank to another
#define TIMEOUT 600          // seconds; PyTorch's own limit for NCCL (torch.distributed.constants, default_pg_nccl_timeout)
#define IDENTITY 16

struct call { int kind, type, operation, root; u64 bytes, at; };     // what a rank does; equal on all ranks
struct member { atomic_int process, left; struct call calls[2]; };
struct queue { _Atomic u64 written, read; };
struct shared {
  atomic_uint changes;      // the word on which ranks wait
  atomic_uint failed;
  char failure[256];        // of the first rank that failed
  _Atomic u64 arrivals;     // of all ranks in all rounds
  struct member members[];  // then n * n queues, n * 2 slots, and the data of the queues
};

static u64 upward(u64 bytes) { return (bytes + 4095) / 4096 * 4096; }
static u64 queues_at(int n) { return upward(sizeof(struct shared) + n * sizeof(struct member)); }
static u64 slots_at(int n) { return queues_at(n) + upward((u64)n * n * sizeof(struct queue)); }
static u64 data_at(int n) { return slots_at(n) + n * 2 * SLOT; }
static u64 shared_bytes(int n) { return data_at(n) + (u64)n * n * QUEUE; }
static struct queue *queue_of(struct shared *s, int n, int from, int to) { return (struct queue *)((char *)s + queues_at(n)) + from * n + to; }
static char *slot_of(struct shared *s, int n, int rank, int which) { return (char *)s + slots_at(n) + (rank * 2 + which) * SLOT; }
static char *data_of(struct shared *s, int n, int from, int to) { return (char *)s + data_at(n) + ((u64)from * n + to) * QUEUE; }

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec + t.tv_nsec / 1e9;
}
static void doze(double seconds) { nanosleep(&(struct timespec){(time_t)seconds, (long)((seconds - (time_t)seconds) * 1e9)}, 0); }
static double time_limit(void) { return (double)setting("REHEARSAL_TIMEOUT", TIMEOUT); }

static void announce(struct shared *s) {
  atomic_fetch_add(&s->changes, 1);
  syscall(SYS_futex, &s->changes, FUTEX_WAKE, INT_MAX, 0, 0, 0);
}
static void wait_for_change(struct shared *s, unsigned seen, double seconds) {
  struct timespec limit = {(time_t)seconds, (long)((seconds - (time_t)seconds) * 1e9)};
  syscall(SYS_futex, &s->changes, FUTEX_WAIT, seen, &limit, 0, 0);
}

// Whether a process has ended. A zombie has ended too: only its exit status has not been read yet.
static int has_ended(int process) {
  char path[32], state = 'X';
  snprintf(path, sizeof path, "/proc/%d/stat", process);
  FILE *file = fopen(path, "r");
  if (file) {
    if (fscanf(file, "%*d (%*[^)]) %c", &state) != 1) state = 'R';  // a name with a parenthesis
    fclose(file);
  }
  return state == 'Z' || state == 'X';
}

// The identity of a communicator made from another one: all its ranks compute the same.
static void derive_identity(unsigned char *made, const unsigned char *parent, u64 splits, u64 what) {
  u64 words[2], mixed = 1469598103934665603ull;  // FNV-1a, with a shift for the upper bits
  memcpy(words, parent, IDENTITY);
  for (u64 i = 0; i < 2; i++) {
    u64 parts[] = {words[0], words[1], what, splits, i};
    for (int j = 0; j < 5; j++) mixed = (mixed ^ parts[j]) * 1099511628211ull, mixed ^= mixed >> 29;
    memcpy(made + 8 * i, &mixed, 8);
  }
}

static socklen_t address_of(struct sockaddr_un *address, const unsigned char *identity) {
  memset(address, 0, sizeof *address);
  address->sun_family = AF_UNIX;
  char *at = address->sun_path + 1;  // a first byte of zero: not in the file system
  at += sprintf(at, "fsdp-advisor-rehearsal-");
  for (int i = 0; i < IDENTITY; i++) at += sprintf(at, "%02x", identity[i]);
  return (socklen_t)(at - (char *)address);
}

static int send_file(int to, int file) {
  char byte = 0, room[CMSG_SPACE(sizeof(int))] = {0};
  struct iovec data = {&byte, 1};
  struct msghdr message = {.msg_iov = &data, .msg_iovlen = 1, .msg_control = room, .msg_controllen = sizeof room};
  struct cmsghdr *header = CMSG_FIRSTHDR(&message);
  header->cmsg_level = SOL_SOCKET, header->cmsg_type = SCM_RIGHTS, header->cmsg_len = CMSG_LEN(sizeof(int));
  memcpy(CMSG_DATA(header), &file, sizeof(int));
  return sendmsg(to, &message, MSG_NOSIGNAL) == 1;
}

static int receive_file(int from) {
  char byte, room[CMSG_SPACE(sizeof(int))];
  struct iovec data = {&byte, 1};
  struct msghdr message = {.msg_iov = &data, .msg_iovlen = 1, .msg_control = room, .msg_controllen = sizeof room};
  int file = -1;
  if (recvmsg(from, &message, MSG_CMSG_CLOEXEC) == 1 && CMSG_FIRSTHDR(&message)) memcpy(&file, CMSG_DATA(CMSG_FIRSTHDR(&message)), sizeof(int));
  return file;
}

// Rank 0: the file for all ranks; -1 if some rank does not request it in time.
static int hand_out(int n, const unsigned char *identity) {
  struct sockaddr_un address;
  socklen_t length = address_of(&address, identity);
  int file = (int)syscall(SYS_memfd_create, "rehearsal-nccl", 1u), server = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0), served = 1;
  int ready = file >= 0 && server >= 0 && !ftruncate(file, (off_t)shared_bytes(n)) && !bind(server, (void *)&address, length) && !listen(server, n);
  for (double end = now() + time_limit(); ready && served < n && now() < end;) {
    struct pollfd asked = {server, POLLIN, 0};
    int other = poll(&asked, 1, 500) > 0 ? accept(server, 0, 0) : -1;
    if (other < 0) continue;
    served += send_file(other, file);
    close(other);
  }
  if (server >= 0) close(server);
  if (served == n) return file;
  if (file >= 0) close(file);
  return -1;
}

// The other ranks: the file from rank 0, whose process id is `process`; -1 if it does not arrive in time.
static int ask_for(const unsigned char *identity, int process) {
  struct sockaddr_un address;
  socklen_t length = address_of(&address, identity);
  for (double start = now(); now() < start + time_limit() && !(process && has_ended(process)); doze(now() - start < 1 ? 0.002 : 0.05)) {
    int server = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (!connect(server, (void *)&address, length)) {
      int file = receive_file(server);
      close(server);
      if (file >= 0) return file;
      continue;
    }
    close(server);
  }
  return -1;
}

static struct shared *share(int rank, int n, const unsigned char *identity, int process) {
  int file = rank ? ask_for(identity, process) : hand_out(n, identity);
  if (file < 0) return 0;
  void *room = mmap(0, shared_bytes(n), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, 0);
  close(file);
  if (room == MAP_FAILED) return 0;
  atomic_store(&((struct shared *)room)->members[rank].process, (int)getpid());
  return room;
}
