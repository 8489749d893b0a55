/* Two builds of the library in the same ranks: every collective on ordinary and on symmetric memory, in turns.
 * benchmarks/two_builds.py builds and calls it.
 *
 *   two_builds FIRST.so SECOND.so RANKS ROUNDS MICROSECONDS STORE BYTES...
 *
 * A line for each cell: collective, memory, bytes, the medians of both in microseconds, and the median of the ratios of
 * rounds that follow each other. BYTES are those of the larger of input and output. A round makes so many calls as take
 * about MICROSECONDS, and the two builds begin it in turns. Before the first, each build makes kWarmCalls calls, in
 * which it finds out which copies are the fastest. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "phalanx/phalanx.h"

enum { kF32 = 3, kSum = 1, kMostRounds = 1000, kMostCalls = 2000, kWarmCalls = 40, kAlignment = 2 << 20 };

static const char *const kNames[] = {"all_reduce", "all_gather", "reduce_scatter", "all_to_all",
                                     "broadcast",  "reduce",     "gather",         "scatter"};
enum { kCollectives = sizeof kNames / sizeof kNames[0] };

/* clang-format off */
#define FUNCTIONS(X) \
  X(phx_last_error) X(phx_store_file) X(phx_world_create) X(phx_world_finalize) X(phx_group_create) \
  X(phx_symm_alloc) X(phx_symm_buffer) \
  X(phx_all_reduce) X(phx_all_gather) X(phx_reduce_scatter) X(phx_all_to_all) X(phx_broadcast) X(phx_reduce) \
  X(phx_gather) X(phx_scatter) \
  X(phx_symm_all_reduce) X(phx_symm_all_gather) X(phx_symm_reduce_scatter) X(phx_symm_all_to_all) \
  X(phx_symm_broadcast) X(phx_symm_reduce) \
  X(phx_symm_gather) X(phx_symm_scatter)
/* clang-format on */

typedef struct {
#define MEMBER(name) __typeof__(&name) name;
  FUNCTIONS(MEMBER)
  int ranks;
  phx_world *world;
  phx_group *group;
  phx_symm *symm;
  char *in, *out, *symmetric;
} Build;

static void check(const Build *build, int code, const char *what) {
  if (code == 0) return;
  (void)fprintf(stderr, "two_builds: %s: %d: %s\n", what, code, build->phx_last_error());
  exit(1);
}

static double now_us(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec * 1e6 + (double)t.tv_nsec / 1e3;
}

static void begin(Build *build, const char *path, int rank, int ranks, const char *file, size_t most) {
  void *const library = dlopen(path, RTLD_NOW | RTLD_LOCAL | RTLD_DEEPBIND);
  if (library == NULL) {
    (void)fprintf(stderr, "two_builds: %s\n", dlerror());
    exit(1);
  }
#define FIND(name) build->name = (__typeof__(&name))dlsym(library, #name);
  FUNCTIONS(FIND)
  build->ranks = ranks;
  phx_world_params params;
  memset(&params, 0, sizeof params);
  params.struct_size = sizeof params;
  params.rank = rank;
  params.size = ranks;
  check(build, build->phx_store_file(file, &params.store), "store");
  check(build, build->phx_world_create(&params, &build->world), "world");
  int32_t members[64];
  for (int i = 0; i < ranks; ++i) members[i] = i;
  check(build, build->phx_group_create(build->world, "g", members, ranks, 60000, &build->group), "group");
  const phx_device host = {PHX_DEVICE_CPU, 0};
  check(build, build->phx_symm_alloc(build->group, &host, most, 60000, &build->symm), "symmetric memory");
  build->symmetric = build->phx_symm_buffer(build->symm, rank);
  build->in = aligned_alloc(kAlignment, most);
  build->out = aligned_alloc(kAlignment, most);
  memset(build->symmetric, 0, most);
  memset(build->in, 0, most);
  memset(build->out, 0, most);
}

static int call(const Build *b, int collective, int symmetric, size_t all, size_t part) {
  phx_symm *const s = b->symm;
  phx_group *const g = b->group;
  if (symmetric) switch (collective) {
      case 0: return b->phx_symm_all_reduce(s, 0, b->out, all, kF32, kSum, NULL, NULL);
      case 1: return b->phx_symm_all_gather(s, 0, b->out, part, kF32, NULL, NULL);
      case 2: return b->phx_symm_reduce_scatter(s, 0, b->out, part, kF32, kSum, NULL, NULL);
      case 3: return b->phx_symm_all_to_all(s, 0, b->out, part, kF32, NULL, NULL);
      case 4: return b->phx_symm_broadcast(s, 0, all, kF32, 0, NULL, NULL);
      case 5: return b->phx_symm_reduce(s, 0, b->out, all, kF32, kSum, 0, NULL, NULL);
      case 6: return b->phx_symm_gather(s, 0, b->out, part, kF32, 0, NULL, NULL);
      default: return b->phx_symm_scatter(s, 0, b->out, part, kF32, 0, NULL, NULL);
    }
  switch (collective) {
    case 0: return b->phx_all_reduce(g, b->in, b->out, all, kF32, kSum, NULL, NULL);
    case 1: return b->phx_all_gather(g, b->in, b->out, part, kF32, NULL, NULL);
    case 2: return b->phx_reduce_scatter(g, b->in, b->out, part, kF32, kSum, NULL, NULL);
    case 3: return b->phx_all_to_all(g, b->in, b->out, part, kF32, NULL, NULL);
    case 4: return b->phx_broadcast(g, b->in, all, kF32, 0, NULL, NULL);
    case 5: return b->phx_reduce(g, b->in, b->out, all, kF32, kSum, 0, NULL, NULL);
    case 6: return b->phx_gather(g, b->in, b->out, part, kF32, 0, NULL, NULL);
    default: return b->phx_scatter(g, b->in, b->out, part, kF32, 0, NULL, NULL);
  }
}

/* Microseconds of a call, until all ranks have made them all. */
static double run(const Build *build, int collective, int symmetric, size_t bytes, int calls) {
  const size_t all = bytes / sizeof(float), part = all / (size_t)build->ranks;
  int code = 0;
  const double from = now_us();
  for (int i = 0; i < calls && code == 0; ++i) code = call(build, collective, symmetric, all, part == 0 ? 1 : part);
  check(build, code, kNames[collective]);
  check(build, build->phx_all_reduce(build->group, build->in, build->in, 1, kF32, kSum, NULL, NULL), "all_reduce");
  return (now_us() - from) / calls;
}

static int compare(const void *a, const void *b) {
  const double x = *(const double *)a, y = *(const double *)b;
  return (x > y) - (x < y);
}
static double median(double *values, int count) {
  qsort(values, (size_t)count, sizeof *values, compare);
  return values[count / 2];
}

int main(int argc, char **argv) {
  if (argc < 8 || atoi(argv[4]) < 1 || atoi(argv[4]) > kMostRounds) return 2;
  const int ranks = atoi(argv[3]), rounds = atoi(argv[4]), cores = (int)sysconf(_SC_NPROCESSORS_ONLN);
  const double microseconds = atof(argv[5]);
  size_t most = kAlignment;
  for (int i = 7; i < argc; ++i)
    if (strtoull(argv[i], NULL, 10) > most) most = strtoull(argv[i], NULL, 10);
  atomic_int *const calls = mmap(NULL, kCollectives * 2 * (size_t)argc * sizeof(int), PROT_READ | PROT_WRITE,
                                 MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  for (int rank = 0; rank < ranks; ++rank) {
    if (fork() != 0) continue;
    cpu_set_t core;
    CPU_ZERO(&core);
    CPU_SET((size_t)(rank % cores), &core);
    sched_setaffinity(0, sizeof core, &core);
    Build builds[2];
    for (int i = 0; i < 2; ++i) {
      char file[4096];
      (void)snprintf(file, sizeof file, "%s.%d", argv[6], i);
      begin(&builds[i], argv[1 + i], rank, ranks, file, most);
    }
    static double times[2][kMostRounds], ratios[kMostRounds];
    atomic_int *count = calls;
    for (int collective = 0; collective < kCollectives; ++collective)
      for (int symmetric = 0; symmetric < 2; ++symmetric)
        for (int k = 7; k < argc; ++k, ++count) {
          const size_t bytes = strtoull(argv[k], NULL, 10);
          double one = 0;
          for (int i = 0; i < 2; ++i) {
            run(&builds[i], collective, symmetric, bytes, kWarmCalls);
            const double us = run(&builds[i], collective, symmetric, bytes, 5);
            if (us > one) one = us;
          }
          const double wanted = microseconds / one;
          if (rank == 0) *count = wanted < 1 ? 1 : wanted > kMostCalls ? kMostCalls : (int)wanted;
          run(&builds[0], 0, 0, sizeof(float), 1); /* the others see it */
          for (int round = 0; round < rounds; ++round)
            for (int turn = 0; turn < 2; ++turn) {
              const int i = (turn + round) % 2;
              times[i][round] = run(&builds[i], collective, symmetric, bytes, *count);
            }
          if (rank != 0) continue;
          for (int round = 0; round < rounds; ++round) ratios[round] = times[1][round] / times[0][round];
          const double first = median(times[0], rounds), second = median(times[1], rounds);
          (void)printf("%s %s %zu %.4f %.4f %.4f\n", kNames[collective], symmetric ? "symmetric" : "user", bytes, first,
                       second, median(ratios, rounds));
          (void)fflush(stdout);
        }
    run(&builds[0], 0, 0, sizeof(float), 1);
    for (int i = 0; i < 2; ++i) builds[i].phx_world_finalize(builds[i].world);
    _exit(0);
  }
  int status = 0, failed = 0;
  while (wait(&status) > 0) failed |= status;
  return failed != 0;
}
