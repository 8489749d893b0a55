/* One rank of a group that spans hosts: they meet in a TCP store with a token, and add their vectors.
 *
 *     include=$(python -m phalanx.core --include-dir); lib=$(python -m phalanx.core --lib-dir)
 *     cc -std=c99 -I "$include" hosts.c -o hosts "$lib/libphalanx.so.0" -Wl,-rpath,"$lib"
 *     export PHALANX_EXAMPLE_TOKEN=$(openssl rand -hex 16)        # the same on both hosts
 *     ./hosts 10.0.0.1 29500 0 4 & ./hosts 10.0.0.1 29500 1 4     # on the host with that address
 *     ./hosts 10.0.0.1 29500 2 4 & ./hosts 10.0.0.1 29500 3 4     # on the other one
 *
 * Every host needs UCX (Debian: libucx0). hosts.py does all of this with two network namespaces for hosts. */
#include <phalanx/phalanx.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { COUNT = 1 << 20, TIMEOUT_MS = 30000 };

static float values[COUNT];

static void must(phx_status status) {
  if (status == PHX_OK) return;
  fprintf(stderr, "%s: %s\n", phx_status_name(status), phx_last_error());
  exit(1);
}

/* [meet] */
static phx_world *join(const char *address, uint16_t port, const char *token, int32_t rank, int32_t size) {
  phx_world_params params = PHX_WORLD_PARAMS_INIT;
  phx_world *world = NULL;
  phx_store *store = NULL;
  if (rank == 0)
    must(phx_store_tcp_serve(address, token, strlen(token), &port, &store));
  else
    must(phx_store_tcp_connect(address, port, token, strlen(token), TIMEOUT_MS, &store));
  params.rank = rank;
  params.size = size;
  params.store = store;
  params.timeout_ms = TIMEOUT_MS;
  must(phx_world_create(&params, &world));
  phx_store_release(store); /* the world keeps it */
  return world;
}
/* [meet end] */

int main(int argc, char **argv) {
  const char *const token = getenv("PHALANX_EXAMPLE_TOKEN");
  int32_t rank, size, *ranks, i;
  phx_group_info info = PHX_GROUP_INFO_INIT;
  phx_world *world;
  phx_group *group = NULL;
  if (argc != 5 || token == NULL || *token == '\0') {
    fprintf(stderr, "usage: PHALANX_EXAMPLE_TOKEN=... %s ADDRESS PORT RANK SIZE\n", argv[0]);
    return 2;
  }
  rank = (int32_t)atoi(argv[3]);
  size = (int32_t)atoi(argv[4]);
  world = join(argv[1], (uint16_t)atoi(argv[2]), token, rank, size);

  /* [group] Nothing here depends on where the ranks are. */
  ranks = malloc((size_t)size * sizeof *ranks);
  if (ranks == NULL) return 1;
  for (i = 0; i < size; ++i) ranks[i] = i;
  must(phx_group_create(world, "everyone", ranks, size, 0, &group));
  must(phx_group_get_info(group, &info));
  for (i = 0; i < COUNT; ++i) values[i] = (float)(rank + 1);
  must(phx_all_reduce(group, values, values, COUNT, PHX_DTYPE_F32, PHX_OP_SUM, NULL, NULL));
  printf("rank %d of %d on %u host(s): %.1f\n", rank, size, info.hosts, values[COUNT - 1]);
  /* [group end] */

  for (i = 0; i < COUNT; ++i) {
    if (values[i] == (float)size * (float)(size + 1) / 2.0f) continue;
    fprintf(stderr, "element %d is %f\n", i, values[i]);
    return 1;
  }
  must(phx_barrier(group, NULL, NULL)); /* rank 0 has the store, so it must not leave before the others are done */
  phx_group_release(group);
  phx_world_release(world);
  free(ranks);
  return 0;
}
