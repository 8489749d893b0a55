/* A layer whose weights are split over two processes, as an inference engine in C has it: each rank multiplies its part
 * of the input by its part of the weights, and the partial results are added up in place. */
#include <phalanx/phalanx.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#define RANKS 2
#define TOKENS 3
#define INPUTS 64 /* of one rank */
#define OUTPUTS 1000

static void must(phx_status status) {
  if (status == PHX_OK) return;
  fprintf(stderr, "%s: %s\n", phx_status_name(status), phx_last_error());
  exit(1);
}

/* [hook] What an engine has of Phalanx: a group, and one allocation from which it takes its activations. */
typedef struct {
  phx_group *group;
  phx_symm *symm;
} comm;

static comm comm_init(phx_world *world, const int32_t *ranks, int32_t size, size_t bytes) {
  comm made;
  must(phx_group_create(world, "tensor parallel", ranks, size, 0, &made.group));
  must(phx_symm_alloc(made.group, NULL, bytes, 0, &made.symm));
  return made;
}

/* Where the engine's allocator begins. Sums of what lies there are read where it lies by the other ranks; elsewhere,
 * the same call copies it first, and gives the same result. */
static void *comm_memory(const comm *c) { return phx_symm_buffer(c->symm, phx_group_rank(c->group)); }

/* Adds up a tensor of all ranks, in place. The engine falls back, or ends, where it returns 0. */
static int comm_allreduce(const comm *c, float *data, size_t count) {
  return phx_all_reduce(c->group, data, data, count, PHX_DTYPE_F32, PHX_OP_SUM, NULL, NULL) == PHX_OK;
}

static void comm_free(comm *c) {
  phx_symm_release(c->symm);
  phx_group_release(c->group);
}
/* [hook end] */

static float weight(int input, int output) { return (float)((input * 7 + output) % 5 - 2); }

static void layer(const float *x, int first, float *y) {
  int t, i, o;
  for (t = 0; t < TOKENS; ++t)
    for (o = 0; o < OUTPUTS; ++o) {
      float sum = 0;
      for (i = 0; i < INPUTS; ++i) sum += x[t * INPUTS + i] * weight(first + i, o);
      y[t * OUTPUTS + o] = sum;
    }
}

static void require_whole(const float *y) {
  int t, i, o;
  for (t = 0; t < TOKENS; ++t)
    for (o = 0; o < OUTPUTS; ++o) {
      float sum = 0;
      for (i = 0; i < RANKS * INPUTS; ++i) sum += (float)(t + i % 3) * weight(i, o);
      if (y[t * OUTPUTS + o] == sum) continue;
      fprintf(stderr, "wrong: token %d, output %d is %g and not %g\n", t, o, (double)y[t * OUTPUTS + o], (double)sum);
      exit(1);
    }
}

static void run(int32_t rank, const char *path) {
  const int32_t ranks[RANKS] = {0, 1};
  static float x[TOKENS * INPUTS], elsewhere[TOKENS * OUTPUTS];
  float *y;
  int t, i, step;
  phx_store *store = NULL;
  phx_world *world = NULL;
  phx_world_params params = PHX_WORLD_PARAMS_INIT;
  comm c;
  must(phx_store_file(path, &store));
  params.rank = rank;
  params.size = RANKS;
  params.store = store;
  must(phx_world_create(&params, &world));
  c = comm_init(world, ranks, RANKS, sizeof elsewhere);
  for (t = 0; t < TOKENS; ++t)
    for (i = 0; i < INPUTS; ++i) x[t * INPUTS + i] = (float)(t + (rank * INPUTS + i) % 3);
  for (step = 0; step < 100; ++step) {
    y = step % 2 ? elsewhere : comm_memory(&c);
    layer(x, rank * INPUTS, y);
    if (!comm_allreduce(&c, y, (size_t)TOKENS * OUTPUTS)) {
      fprintf(stderr, "%s\n", phx_last_error()); /* names the rank that died or is late */
      exit(1);
    }
    require_whole(y);
  }
  comm_free(&c);
  phx_world_release(world);
  phx_store_release(store);
}

int main(void) {
  char directory[] = "/tmp/phalanx-tp-XXXXXX";
  char path[64];
  int status = 0;
  pid_t child;
  if (mkdtemp(directory) == NULL) return 1;
  snprintf(path, sizeof path, "%s/store", directory);
  child = fork(); /* before any call of phalanx: a world does not survive a fork */
  if (child < 0) return 1;
  run(child == 0, path);
  if (child == 0) return 0;
  if (waitpid(child, &status, 0) != child || status != 0) return 1;
  unlink(path);
  rmdir(directory);
  puts("a layer over two processes: all is right");
  return 0;
}
