/* phalanx/carrier.h: EXPERIMENTAL, no part of ABI version 1; it may change in every version.
 * How bytes move between hosts. The core brings a carrier that loads UCX; another one can be set for a world.
 *
 * Parameters, where a comment does not say more:
 *
 *   - directory: the directory, or NULL.
 *   - status: the status of the error.
 *   - text: the text of the error, or room for what is found.
 *   - capacity: how many bytes `text` has room for. */
#ifndef PHALANX_CARRIER_H
#define PHALANX_CARRIER_H

#include "phalanx/phalanx.h"

#ifdef __cplusplus
extern "C" {
#endif

/* cdef: begin */

/* A carrier. At most one function of an endpoint runs at a time, in any thread. None of them waits, but for
 * `disconnect`, `close` and a `cancel` in the middle of a message, which may take a second: deadlines are the core's. A
 * function that fails sets the error text by phx_set_error. An error of a peer stays with that peer: PHX_ERR_PEER_DEAD
 * from every `send` to it and from the `test` of every transfer with it that is not complete. */
typedef struct phx_carrier_ops {
  uint32_t struct_size;
  uint32_t flags;   /* 0 */
  const char *name; /* static; errors name it */
  /* The endpoint of this process, for one world. */
  phx_status (*open)(void *self, void **endpoint);
  /* What a peer needs to reach it. *bytes: the room at `address`, and then how many it takes. */
  phx_status (*address)(void *endpoint, void *address, size_t *bytes);
  /* Begins to connect. The same process may be connected several times: transfers name the one that they belong to. */
  phx_status (*connect)(void *endpoint, const void *address, size_t bytes, void **peer);
  /* A message goes into the receive of its tag. Tags are unique among what is under way to one endpoint. *transfer:
   * NULL if it is complete, which for a receive means that `capacity` bytes came. The data must stay until it is. A
   * receive may be posted before or after its message has come, also when its peer is lost by then: `recv` names a peer
   * so that `test` can report that it is. */
  phx_status (*send)(void *endpoint, void *peer, uint64_t tag, const void *data, size_t bytes, void **transfer);
  phx_status (*recv)(void *endpoint, void *peer, uint64_t tag, void *data, size_t capacity, void **transfer);
  /* *done: whether it is complete. If so, or after an error, the transfer is gone. *bytes: of a receive, how many came;
   * more than its capacity is PHX_ERR_MISMATCH. */
  phx_status (*test)(void *endpoint, void *transfer, int32_t *done, size_t *bytes);
  /* Gives a transfer up: when this returns, it is gone, and its data is not touched any more. A receive may be given up
   * at any time, a send only once its peer is disconnected. In the middle of a message from a peer that does not go on,
   * connections to that host may be lost by it. */
  void (*cancel)(void *endpoint, void *transfer);
  /* Moves what can be moved. Returns whether anything was. */
  int32_t (*progress)(void *endpoint);
  /* Whether a part of a send that is complete still needs `progress` to leave, because the network had no room for it.
   * The core asks after a send is complete, and then moves it from a thread of its own. NULL: this does not happen. */
  int32_t (*unsent)(void *endpoint);
  /* *fd: becomes readable when there is something for `progress` to do. Returns 1 if it is worth waiting for that, 0 if
   * there is something to do already. While the core waits it calls this at least once a second, because a carrier may
   * look here for hosts that are gone. NULL: the carrier has no descriptor, and the core looks now and then. */
  int32_t (*arm)(void *endpoint, int32_t *fd);
  /* Ends the connection. `flush`: what was sent still goes, for a second at most; receives must be cancelled before.
   * The peer may learn of the end only when this endpoint is closed. */
  void (*disconnect)(void *endpoint, void *peer, int32_t flush);
  void (*close)(void *endpoint);
  void (*release)(void *self); /* may be NULL */
} phx_carrier_ops;

/* The carrier of groups of this world that span hosts, before the first of them is made. `ops` is copied. Local. */
PHX_API phx_status phx_world_set_carrier(phx_world *world, const phx_carrier_ops *ops, void *self);
/* Where UCX is looked for after PHALANX_UCX and the system's libraries: a directory with libucp.so.0, such as that of
 * the wheel libucx-cu12. Without effect once it is loaded. NULL: nowhere else. */
PHX_API phx_status phx_ucx_set_directory(const char *directory);
/* What is found of UCX, and where ranks of other hosts would reach this process: lines "name: value" with path,
 * version, transports, problem, address and address problem. *size: what the text takes without its final zero; at most
 * `capacity` bytes of it are written, with a zero at the end. Opens a context of UCX. */
PHX_API phx_status phx_ucx_describe(char *text, size_t capacity, size_t *size);
/* Sets the error text of the calling thread, for functions of a carrier, and returns `status`. */
PHX_API phx_status phx_set_error(phx_status status, const char *text);

/* cdef: end */

#ifdef __cplusplus
}
#endif
#endif
