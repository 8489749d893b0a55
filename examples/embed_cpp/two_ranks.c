/* Two ranks in C: a sum over both, memory that both see, a message, and the death of one of them. two_ranks.cpp does
 * the same in C++. */
#include <phalanx/phalanx.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define COUNT 1000

/* Every call that can fail returns a status; the text of the last error says what to do about it. */
static void must(phx_status status) {
  if (status == PHX_OK) return;
  fprintf(stderr, "%s: %s\n", phx_status_name(status), phx_last_error());
  exit(1);
}

static void require(int condition, const char *what) {
  if (condition) return;
  fprintf(stderr, "wrong: %s\n", what);
  exit(1);
}

/* [sum] */
static void sum(phx_group *group, int32_t rank) {
  float values[COUNT];
  size_t i;
  for (i = 0; i < COUNT; ++i) values[i] = (float)(rank + 1) * (float)i;
  must(phx_all_reduce(group, values, values, COUNT, PHX_DTYPE_F32, PHX_OP_SUM, NULL, NULL));
  for (i = 0; i < COUNT; ++i) require(values[i] == 3.0f * (float)i, "the sum");
}

/* The same, while this rank does something else. */
static void sum_meanwhile(phx_group *group, int32_t rank) {
  double value = rank + 1.0;
  phx_work *work = NULL;
  phx_options options = PHX_OPTIONS_INIT;
  options.timeout_ms = 20000;
  must(phx_all_reduce(group, &value, &value, 1, PHX_DTYPE_F64, PHX_OP_MAX, &options, &work));
  /* ... */
  must(phx_work_wait(work, 0));
  phx_work_release(work);
  require(value == 2.0, "the maximum");
}
/* [sum end] */

/* [symm] Each rank writes into its own block, and reads the other's where it is. */
static void share(phx_group *group, int32_t rank) {
  const int32_t peer = 1 - rank;
  phx_symm *symm = NULL;
  int *mine, *theirs;
  must(phx_symm_alloc(group, NULL, COUNT * sizeof(int), 0, &symm));
  mine = phx_symm_buffer(symm, rank);
  theirs = phx_symm_buffer(symm, peer);
  mine[10] = 40 + rank;
  must(phx_symm_put_signal(symm, peer, 0)); /* mine is filled */
  must(phx_symm_wait_signal(symm, peer, 0, 0));
  require(theirs[10] == 40 + peer, "the peer's block");
  must(phx_symm_barrier(symm, 0, 0));
  phx_symm_release(symm);
}
/* [symm end] */

/* [message] */
static void talk(phx_group *group, int32_t rank) {
  char text[32] = "";
  if (rank == 0) {
    strcpy(text, "good morning");
    must(phx_send(group, text, sizeof text, PHX_DTYPE_U8, 1, 7, NULL, NULL));
  } else {
    must(phx_recv(group, text, sizeof text, PHX_DTYPE_U8, 0, 7, NULL, NULL));
    require(strcmp(text, "good morning") == 0, "the message");
  }
}
/* [message end] */

/* [failure] Rank 1 has died. Rank 0 is told so by its next call, and goes on alone. */
static void survive(phx_group *group) {
  phx_error_info why = PHX_ERROR_INFO_INIT;
  phx_group *rest = NULL;
  const phx_status status = phx_barrier(group, NULL, NULL);
  require(status == PHX_ERR_PEER_DEAD || status == PHX_ERR_REVOKED, "that the peer is dead");
  must(phx_group_get_error(group, &why));
  printf("rank 0: %s\n", why.text);
  require(why.peer == 1, "which one");
  must(phx_group_shrink(group, NULL, 0, &rest));
  require(phx_group_size(rest) == 1, "the size of what is left");
  must(phx_barrier(rest, NULL, NULL));
  phx_group_release(rest);
}
/* [failure end] */

/* [rank] The life of a rank: a store, a world, groups, and their end. */
static void run(int32_t rank, const char *path) {
  const int32_t ranks[2] = {0, 1};
  phx_store *store = NULL;
  phx_world *world = NULL;
  phx_group *group = NULL;
  phx_world_params params = PHX_WORLD_PARAMS_INIT;
  must(phx_store_file(path, &store));
  params.rank = rank;
  params.size = 2;
  params.store = store;
  params.timeout_ms = 30000; /* no wait is unbounded */
  must(phx_world_create(&params, &world));
  must(phx_group_create(world, "both", ranks, 2, 0, &group));
  sum(group, rank);
  sum_meanwhile(group, rank);
  share(group, rank);
  talk(group, rank);
  must(phx_barrier(group, NULL, NULL));
  if (rank == 1) _exit(0); /* dies, without a word */
  survive(group);
  phx_group_release(group);
  phx_world_release(world);
  phx_store_release(store);
}
/* [rank end] */

int main(void) {
  char directory[] = "/tmp/phalanx-two-XXXXXX";
  char path[64];
  int status = 0;
  pid_t child;
  if (mkdtemp(directory) == NULL) return 1;
  snprintf(path, sizeof path, "%s/store", directory);
  child = fork(); /* before any call of phalanx: a world does not survive a fork */
  if (child < 0) return 1;
  if (child == 0) run(1, path);
  run(0, path);
  if (waitpid(child, &status, 0) != child || status != 0) return 1;
  unlink(path);
  rmdir(directory);
  puts("two ranks in C: all is right");
  return 0;
}
