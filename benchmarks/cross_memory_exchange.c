/* An all_to_all by cross-memory attach beside phx_all_to_all, in turns in the same ranks, which write their inputs anew
 * before each call. The reason why there is no such path: see docs/adr/0013-measured-and-left-out.md.
 *
 *   cc -O2 -o exchange benchmarks/cross_memory_exchange.c -Icore/include -Lbuild -lphalanx -Wl,-rpath,build
 *   ./exchange 2 1048576 store     ranks, which share two cores; bytes of a rank's input; a file for them to meet
 */
#define _GNU_SOURCE
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "phalanx/phalanx.h"

enum { MOST_RANKS = 8, ROUNDS = 400, LINE = 16 };

struct shared {
  _Atomic unsigned arrived[MOST_RANKS][LINE], ready[MOST_RANKS][LINE];
  pid_t pid[MOST_RANKS];
  char *in[MOST_RANKS];
  double us[2][ROUNDS][MOST_RANKS]; /* by cross-memory attach, and by Phalanx */
};

static double now_us(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec * 1e6 + (double)t.tv_nsec / 1e3;
}

static void await(_Atomic unsigned *word, unsigned value, int ranks) {
  while ((int)(atomic_load(word) - value) < 0)
    if (ranks > 2) sched_yield();
}

static void barrier(struct shared *all, int rank, int ranks, unsigned number) {
  atomic_store(&all->arrived[rank][0], number);
  for (int i = 0; i < ranks; ++i) await(&all->arrived[i][0], number, ranks);
}

/* As fast as a copy within a rank is on processors with FSRM. */
static void copy(char *to, const char *from, size_t size) {
#if defined(__x86_64__)
  __asm__ volatile("rep movsb" : "+D"(to), "+S"(from), "+c"(size) : : "memory");
#else
  memcpy(to, from, size);
#endif
}

static void attach(struct shared *all, int rank, int ranks, char *out, size_t block, unsigned number) {
  const size_t own = (size_t)rank * block;
  atomic_store(&all->ready[rank][0], number);
  copy(out + own, all->in[rank] + own, block);
  for (int i = 1; i < ranks; ++i) {
    const int peer = (rank + i) % ranks;
    struct iovec to = {out + (size_t)peer * block, block}, from = {all->in[peer] + own, block};
    await(&all->ready[peer][0], number, ranks);
    if (process_vm_readv(all->pid[peer], &to, 1, &from, 1, 0) != (ssize_t)block) {
      perror("process_vm_readv");
      exit(1);
    }
  }
}

static void must(phx_status status) {
  if (status == PHX_OK) return;
  fprintf(stderr, "%s\n", phx_last_error());
  exit(1);
}

static void run(struct shared *all, int rank, int ranks, size_t bytes, const char *store) {
  const size_t block = bytes / (size_t)ranks;
  int32_t members[MOST_RANKS];
  cpu_set_t core;
  phx_world_params params = PHX_WORLD_PARAMS_INIT;
  phx_world *world = NULL;
  phx_group *group = NULL;
  char *in = malloc(bytes), *out = malloc(bytes);
  unsigned barriers = 0;
  if (in == NULL || out == NULL) exit(1);
  memset(out, 0, bytes);
  CPU_ZERO(&core);
  CPU_SET(rank % 2, &core);
  sched_setaffinity(0, sizeof core, &core);
  params.rank = rank;
  params.size = ranks;
  must(phx_store_file(store, &params.store));
  must(phx_world_create(&params, &world));
  for (int i = 0; i < ranks; ++i) members[i] = i;
  must(phx_group_create(world, "exchange", members, ranks, 60000, &group));
  all->pid[rank] = getpid();
  all->in[rank] = in;
  for (int i = 0; i < 2 * ROUNDS; ++i) {
    memset(in, i, bytes);
    barrier(all, rank, ranks, ++barriers);
    const double begin = now_us();
    if (i % 2 == 0) {
      attach(all, rank, ranks, out, block, (unsigned)i + 1);
      barrier(all, rank, ranks, ++barriers); /* nobody reads the input any more */
    } else {
      must(phx_all_to_all(group, in, out, block, PHX_DTYPE_U8, NULL, NULL));
    }
    all->us[i % 2][i / 2][rank] = now_us() - begin;
  }
  barrier(all, rank, ranks, ++barriers);
  must(phx_world_finalize(world));
}

static int compare(const void *a, const void *b) {
  const double x = *(const double *)a, y = *(const double *)b;
  return (x > y) - (x < y);
}

/* The median of the later calls, each as long as on its slowest rank. */
static double median(double us[ROUNDS][MOST_RANKS], int ranks) {
  double calls[ROUNDS];
  for (int i = 0; i < ROUNDS; ++i) {
    calls[i] = 0;
    for (int rank = 0; rank < ranks; ++rank) calls[i] = us[i][rank] > calls[i] ? us[i][rank] : calls[i];
  }
  qsort(calls + ROUNDS / 4, ROUNDS - ROUNDS / 4, sizeof *calls, compare);
  return calls[ROUNDS / 4 + (ROUNDS - ROUNDS / 4) / 2];
}

int main(int argc, char **argv) {
  const int ranks = argc == 4 ? atoi(argv[1]) : 0;
  const size_t bytes = argc == 4 ? strtoull(argv[2], NULL, 10) : 0;
  int failed = 0, status = 0;
  if (ranks < 2 || ranks > MOST_RANKS || bytes < (size_t)ranks) {
    fprintf(stderr, "usage: exchange RANKS BYTES STORE\n");
    return 2;
  }
  struct shared *all = mmap(NULL, sizeof *all, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (all == MAP_FAILED) return 1;
  for (int rank = 0; rank < ranks; ++rank)
    if (fork() == 0) {
      run(all, rank, ranks, bytes, argv[3]);
      exit(0);
    }
  while (wait(&status) > 0) failed |= status;
  unlink(argv[3]);
  if (failed == 0)
    printf("%d ranks, %zu bytes: cross-memory attach %.1f us, Phalanx %.1f us\n", ranks, bytes,
           median(all->us[0], ranks), median(all->us[1], ranks));
  return failed != 0;
}
