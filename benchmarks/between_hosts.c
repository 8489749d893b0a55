/* One rank of the measurement between hosts: all_reduce and all_gather by Phalanx, or, compiled by mpicc with
 * -DPHX_BENCH_MPI, by MPI. benchmarks/between_hosts.py builds it and starts the ranks.
 *
 *   between_hosts --rank R --size N --store ADDRESS:PORT --token T [options]
 *     --host-id H     a number that the ranks of one host share; without it network namespaces tell hosts apart
 *     --sizes LIST    in bytes (64,1k,64m); all_gather: of the result
 *     --ops LIST      all_reduce, all_gather
 *     --seconds S     for each size, at most; default 0.2
 *
 * It prints one line of JSON. Each size is checked once. A row has the median and the mean of the times of single
 * calls, in microseconds. all_reduce is in place. */
#define _POSIX_C_SOURCE 200809L
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#ifdef PHX_BENCH_MPI
#include <mpi.h>
#else
#include "phalanx/phalanx.h"
#endif

enum { kMaxSizes = 64, kWarmUps = 3, kFewestCalls = 5, kMostCalls = 3000 };

typedef struct {
  int rank, size;
  const char *store, *token, *ops;
  unsigned long long host_id;
  double seconds;
  size_t sizes[kMaxSizes];
  int size_count;
} Arguments;

static void die(const char *format, ...) {
  va_list list;
  va_start(list, format);
  (void)fprintf(stderr, "between_hosts: ");
  (void)vfprintf(stderr, format, list);
  (void)fprintf(stderr, "\n");
  va_end(list);
  exit(1);
}

static double now_us(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec * 1e6 + (double)t.tv_nsec / 1e3;
}

/* ---- the library that is measured ----------------------------------------------------------------------------- */

#ifdef PHX_BENCH_MPI

static void check(int code, const char *what) {
  if (code != MPI_SUCCESS) die("%s failed: %d", what, code);
}
static void begin(Arguments *arguments) {
  check(MPI_Init(NULL, NULL), "MPI_Init");
  MPI_Comm_rank(MPI_COMM_WORLD, &arguments->rank);
  MPI_Comm_size(MPI_COMM_WORLD, &arguments->size);
}
static void finish(void) { MPI_Finalize(); }
static void all_reduce(float *buffer, size_t count) {
  check(MPI_Allreduce(MPI_IN_PLACE, buffer, (int)count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD), "MPI_Allreduce");
}
static void all_gather(const float *in, float *out, size_t count) {
  check(MPI_Allgather(in, (int)count, MPI_FLOAT, out, (int)count, MPI_FLOAT, MPI_COMM_WORLD), "MPI_Allgather");
}
static void barrier(void) { check(MPI_Barrier(MPI_COMM_WORLD), "MPI_Barrier"); }
static double greatest(double value) {
  double result = 0;
  check(MPI_Allreduce(&value, &result, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD), "MPI_Allreduce");
  return result;
}
static int hosts(void) { return 0; }
static const char *version(void) {
  static char text[MPI_MAX_LIBRARY_VERSION_STRING];
  int length = 0;
  MPI_Get_library_version(text, &length);
  text[strcspn(text, "\n,")] = '\0';
  for (char *c = text; *c != '\0'; ++c)
    if (*c == '"' || *c == '\\' || *c == '\t') *c = ' ';
  return text;
}

#else

static phx_store *store;
static phx_world *world;
static phx_group *group;

static void check(phx_status status, const char *what) {
  if (status != PHX_OK) die("%s: %s: %s", what, phx_status_name(status), phx_last_error());
}
static void begin(Arguments *arguments) {
  if (arguments->store == NULL || arguments->token == NULL) die("--store and --token are needed");
  char address[64];
  const char *const colon = strrchr(arguments->store, ':');
  if (colon == NULL || (size_t)(colon - arguments->store) >= sizeof address)
    die("--store %s: expected ADDRESS:PORT", arguments->store);
  memcpy(address, arguments->store, (size_t)(colon - arguments->store));
  address[colon - arguments->store] = '\0';
  uint16_t port = (uint16_t)strtoul(colon + 1, NULL, 10);
  const size_t length = strlen(arguments->token);
  if (arguments->rank == 0)
    check(phx_store_tcp_serve(address, arguments->token, length, &port, &store), "phx_store_tcp_serve");
  else
    check(phx_store_tcp_connect(address, port, arguments->token, length, 20000, &store), "phx_store_tcp_connect");
  phx_world_params params = PHX_WORLD_PARAMS_INIT;
  params.rank = arguments->rank;
  params.size = arguments->size;
  params.store = store;
  params.timeout_ms = 60000;
  params.host_id = arguments->host_id;
  check(phx_world_create(&params, &world), "phx_world_create");
  int32_t *const ranks = calloc((size_t)arguments->size, sizeof *ranks);
  for (int i = 0; i < arguments->size; ++i) ranks[i] = i;
  check(phx_group_create(world, "bench", ranks, arguments->size, 60000, &group), "phx_group_create");
  free(ranks);
}
static void finish(void) {
  check(phx_barrier(group, NULL, NULL), "phx_barrier");
  phx_group_release(group);
  phx_world_release(world);
  phx_store_release(store);
}
static void all_reduce(float *buffer, size_t count) {
  check(phx_all_reduce(group, buffer, buffer, count, PHX_DTYPE_F32, PHX_OP_SUM, NULL, NULL), "phx_all_reduce");
}
static void all_gather(const float *in, float *out, size_t count) {
  check(phx_all_gather(group, in, out, count, PHX_DTYPE_F32, NULL, NULL), "phx_all_gather");
}
static void barrier(void) { check(phx_barrier(group, NULL, NULL), "phx_barrier"); }
static double greatest(double value) {
  double result = 0;
  check(phx_all_reduce(group, &value, &result, 1, PHX_DTYPE_F64, PHX_OP_MAX, NULL, NULL), "phx_all_reduce");
  return result;
}
static int hosts(void) {
  phx_group_info info = PHX_GROUP_INFO_INIT;
  check(phx_group_get_info(group, &info), "phx_group_get_info");
  return (int)info.hosts;
}
static const char *version(void) { return phx_version(); }

#endif

/* ---- measuring ------------------------------------------------------------------------------------------------ */

typedef enum { kAllReduce, kAllGather } Operation;
static const char *const kNames[] = {"all_reduce", "all_gather"};

static void call(Operation operation, const float *in, float *out, size_t count) {
  if (operation == kAllReduce)
    all_reduce(out, count);
  else
    all_gather(in, out, count);
}

static float value_of(int rank, size_t i) { return (float)(rank + 1) + (float)(i % 1021); }

static void verify(const Arguments *arguments, Operation operation, float *in, float *out, size_t count) {
  const int n = arguments->size;
  float *const own = operation == kAllReduce ? out : in;
  for (size_t i = 0; i < count; ++i) own[i] = value_of(arguments->rank, i);
  call(operation, in, out, count);
  const size_t all = operation == kAllReduce ? count : count * (size_t)n;
  for (size_t i = 0; i < all; ++i) {
    float expected = 0;
    if (operation == kAllGather)
      expected = value_of((int)(i / count), i % count);
    else
      for (int rank = 0; rank < n; ++rank) expected += value_of(rank, i);
    if (out[i] != expected)
      die("rank %d: %s of %zu elements: element %zu is %g instead of %g", arguments->rank, kNames[operation], count, i,
          (double)out[i], (double)expected);
  }
}

static int by_value(const void *a, const void *b) {
  const double x = *(const double *)a, y = *(const double *)b;
  return x < y ? -1 : x > y;
}

static void measure(const Arguments *arguments, Operation operation, size_t bytes, int first) {
  const size_t parts = operation == kAllGather ? (size_t)arguments->size : 1;
  const size_t count = bytes / sizeof(float) / parts;
  float *in = NULL, *out = NULL;
  if (posix_memalign((void **)&in, 4096, count * sizeof(float)) != 0 ||
      posix_memalign((void **)&out, 4096, count * parts * sizeof(float)) != 0)
    die("out of memory");
  verify(arguments, operation, in, out, count);
  memset(in, 0, count * sizeof(float));
  memset(out, 0, count * parts * sizeof(float)); /* sums of zeros stay small */
  double slowest = 0;
  for (int i = 0; i < kWarmUps; ++i) {
    barrier();
    const double began = now_us();
    call(operation, in, out, count);
    slowest = now_us() - began;
  }
  double calls_wanted = arguments->seconds * 1e6 / greatest(slowest);
  if (calls_wanted < kFewestCalls) calls_wanted = kFewestCalls;
  if (calls_wanted > kMostCalls) calls_wanted = kMostCalls;
  const int calls = (int)calls_wanted;
  static double times[kMostCalls];
  for (int i = 0; i < calls / 10; ++i) call(operation, in, out, count);
  barrier();
  double before = now_us();
  const double began = before;
  for (int i = 0; i < calls; ++i) {
    call(operation, in, out, count);
    const double now = now_us();
    times[i] = now - before;
    before = now;
  }
  const double mean = (before - began) / calls;
  qsort(times, (size_t)calls, sizeof *times, by_value);
  printf("%s{\"op\": \"%s\", \"bytes\": %zu, \"calls\": %d, \"us\": %.3f, \"mean_us\": %.3f}", first ? "" : ", ",
         kNames[operation], bytes, calls, times[calls / 2], mean);
  free(in);
  free(out);
}

/* ---- arguments ------------------------------------------------------------------------------------------------ */

static void parse_sizes(Arguments *arguments, const char *text) {
  arguments->size_count = 0;
  for (const char *at = text; *at != '\0' && arguments->size_count < kMaxSizes;) {
    char *end = NULL;
    size_t bytes = strtoul(at, &end, 10);
    if (end == at) die("--sizes %s: expected numbers such as 64, 8k or 1m", text);
    if (*end == 'k' || *end == 'm') bytes <<= *end++ == 'k' ? 10 : 20;
    arguments->sizes[arguments->size_count++] = bytes;
    at = *end == ',' ? end + 1 : end;
  }
}

int main(int count, char **values) {
  Arguments arguments = {0, 1, NULL, NULL, "all_reduce,all_gather", 0, 0.2, {0}, 0};
  parse_sizes(&arguments, "64,1k,8k,64k,1m,16m,64m");
  for (int i = 1; i < count; ++i) {
    const char *const name = values[i];
    if (++i == count) die("%s: a value is missing", name);
    if (strcmp(name, "--rank") == 0)
      arguments.rank = (int)strtol(values[i], NULL, 10);
    else if (strcmp(name, "--size") == 0)
      arguments.size = (int)strtol(values[i], NULL, 10);
    else if (strcmp(name, "--store") == 0)
      arguments.store = values[i];
    else if (strcmp(name, "--token") == 0)
      arguments.token = values[i];
    else if (strcmp(name, "--host-id") == 0)
      arguments.host_id = strtoull(values[i], NULL, 0);
    else if (strcmp(name, "--sizes") == 0)
      parse_sizes(&arguments, values[i]);
    else if (strcmp(name, "--ops") == 0)
      arguments.ops = values[i];
    else if (strcmp(name, "--seconds") == 0)
      arguments.seconds = strtod(values[i], NULL);
    else
      die("unknown argument %s", name);
  }
  begin(&arguments);
  static char line[1 << 16]; /* one write, so that the lines of ranks that share a pipe do not mix */
  setvbuf(stdout, line, _IOFBF, sizeof line);
  printf("{\"rank\": %d, \"hosts\": %d, \"version\": \"%s\", \"rows\": [", arguments.rank, hosts(), version());
  int first = 1;
  for (int operation = kAllReduce; operation <= kAllGather; ++operation)
    for (int i = 0; i < arguments.size_count && strstr(arguments.ops, kNames[operation]) != NULL; ++i) {
      measure(&arguments, (Operation)operation, arguments.sizes[i], first);
      first = 0;
    }
  printf("]}\n");
  (void)fflush(stdout);
  finish();
  return 0;
}
