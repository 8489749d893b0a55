/* phalanx.h: the C ABI of Phalanx, symmetric memory and collectives among the ranks of one host.
 *
 * Rules of this header, and of every later version of it:
 *
 *   - C99 and C++17; self-contained. The region between the cdef marks is also read by cffi.
 *   - Handles are opaque. Enumerations cross as int32_t.
 *   - A struct that crosses starts with struct_size, which the CALLER sets to sizeof(the struct) before the call.
 *     Structs only ever grow at their end; fields that the caller's struct does not have are neither read nor written.
 *   - Every call that can fail returns a phx_status: 0 is success, 1 "not yet", negative an error. On error the
 *     out-parameters are untouched and the calling thread's phx_last_error_info() says what happened.
 *   - Nothing throws, exits or prints. Text goes to the log callback, if one is set.
 *   - Strings are UTF-8, borrowed in (copied when kept) and borrowed out (each says for how long).
 *   - A timeout_ms of 0 means the default of the group, or that of the world where the group has none; a negative one
 *     is an error: no wait is unbounded.
 *   - Functions are thread-safe, but the collectives of ONE group must be issued in one order that all ranks share,
 *     so two threads must not race to issue them.
 *   - What a process has made is of no use in its forked child: there, every call on it is PHX_ERR_UNSUPPORTED, but for
 *     finalize and release, which do nothing. A child makes stores, worlds and groups of its own; it may go on with a
 *     file or TCP store. (A child that clone(2) makes without the C library is not recognised.)
 *   - Ranks must run the same build of the library; builds that differ do not meet (PHX_ERR_ABI).
 *   - A thread must not be cancelled (pthread_cancel) while it is in a call: that would end the process.
 *   - "Collective" means: every rank of the group must make the same call, in the same order.
 *   - A collective call with a wrong argument returns its error at once, waits for nobody, and counts as a call. Ranks
 *     that refuse alike go on. Where one rank refuses and another one does not, the call of the other fails at once
 *     with PHX_ERR_MISMATCH and the text of the one that refused, and the group is revoked. Exceptions, which only the
 *     calling rank hears of: calls that cannot know their group (a handle is NULL, a list of ranks is wrong), messages,
 *     signals and barriers of symmetric memory, and calls on memory of GPUs.
 *
 * A rank number is the global one (that of the world), unless its name says group_rank. */
#ifndef PHALANX_PHALANX_H
#define PHALANX_PHALANX_H

#include <stddef.h>
#include <stdint.h>

#ifndef PHX_API
#if defined(__GNUC__)
#define PHX_API __attribute__((visibility("default")))
#else
#define PHX_API
#endif
#endif

#define PHX_ABI_VERSION 0 /* 0: still free to change; from 1 on only additions */

#ifdef __cplusplus
extern "C" {
#endif

/* cdef: begin */

/* ---- vocabulary --------------------------------------------------------------------------------------------- */

typedef int32_t phx_status;
enum {
  PHX_OK = 0,
  PHX_IN_PROGRESS = 1,      /* not an error: not complete yet */
  PHX_ERR_INVALID = -1,     /* an argument is wrong; nothing was sent */
  PHX_ERR_UNSUPPORTED = -2, /* right, but not something this build, host, group or forked child can do */
  PHX_ERR_NO_MEMORY = -3,
  PHX_ERR_TIMEOUT = -4,   /* peers did not come in time; the text names them */
  PHX_ERR_PEER_DEAD = -5, /* a peer died or left; `peer` says which */
  PHX_ERR_REVOKED = -6,   /* an earlier failure put the ranks out of step; the text gives the first cause */
  PHX_ERR_MISMATCH = -7,  /* ranks disagree about a call; the text gives both sides */
  PHX_ERR_EXISTS = -8,
  PHX_ERR_NOT_FOUND = -9,
  PHX_ERR_IN_USE = -10,
  PHX_ERR_SYSTEM = -11, /* an operating system call failed; sys_errno says how */
  PHX_ERR_DEVICE = -12,
  PHX_ERR_ABI = -13,        /* the two sides are of builds that do not fit; the text names both */
  PHX_ERR_PERMISSION = -14, /* another user, a wrong token */
  PHX_ERR_INTERNAL = -15,   /* a defect of this library */
  PHX_ERR_INTERRUPTED = -16 /* the hook of phx_set_interrupt ended the wait */
};

enum {
  PHX_F16 = 1,
  PHX_BF16 = 2,
  PHX_F32 = 3,
  PHX_F64 = 4,
  PHX_I8 = 5,
  PHX_U8 = 6,
  PHX_I16 = 7,
  PHX_U16 = 8,
  PHX_I32 = 9,
  PHX_U32 = 10,
  PHX_I64 = 11,
  PHX_U64 = 12,
  PHX_BOOL = 13,
  PHX_C64 = 14,    /* complex of two f32 */
  PHX_C128 = 15,   /* complex of two f64 */
  PHX_F8E4M3 = 16, /* torch.float8_e4m3fn: no infinities; what is too large becomes 448; NaN is 0x7f and 0xff */
  PHX_F8E5M2 = 17  /* torch.float8_e5m2 */
};

/* Reductions run in group rank order; floats of 16 and 8 bits accumulate in f32 and round once, to nearest even, so
 * every rank gets the same bits whatever the algorithm. min and max propagate NaN. avg divides the sum by the group
 * size (integers: towards zero). Not defined: bitwise ops on floats and complex, min and max on complex, avg on bool,
 * premultiplied sums on integers and bool. */
enum {
  PHX_SUM = 1,
  PHX_AVG = 2,
  PHX_PROD = 3,
  PHX_MIN = 4,
  PHX_MAX = 5,
  PHX_BAND = 6,
  PHX_BOR = 7,
  PHX_BXOR = 8,
  PHX_PREMUL_SUM = 9 /* the sum of scale * input; scale is phx_options.scale, the same on all ranks */
};

enum { PHX_DEV_CPU = 1, PHX_DEV_CUDA = 2 }; /* DLPack's numbers */

/* MULTIMEM: by NVLink switches, on symmetric memory of GPUs; see there. */
enum { PHX_ALGO_AUTO = 0, PHX_ALGO_ONE_SHOT = 1, PHX_ALGO_TWO_SHOT = 2, PHX_ALGO_MULTIMEM = 3 };

enum { PHX_LOG_DEBUG = 0, PHX_LOG_INFO = 1, PHX_LOG_WARNING = 2, PHX_LOG_ERROR = 3 };

typedef struct phx_store phx_store; /* a key-value store through which ranks find each other */
typedef struct phx_world phx_world; /* one rank's context; several may live in one process */
typedef struct phx_group phx_group; /* a named, ordered set of ranks that share memory */
typedef struct phx_symm phx_symm;   /* one allocation as seen by every rank of one group */
typedef struct phx_work phx_work;   /* a collective that was started and not yet waited for */

typedef struct phx_device {
  int32_t type;  /* PHX_DEV_* */
  int32_t index; /* 0 on CPU */
} phx_device;    /* frozen for ever (the layout of DLDevice), so it is embedded by value */

typedef struct phx_error_info {
  uint32_t struct_size;
  int32_t status;
  int32_t rank;      /* the rank that reports */
  int32_t peer;      /* the rank at fault, -1 when unknown or none */
  uint64_t sequence; /* of the collective in its group, 0 when none */
  int32_t step;      /* the round inside the collective */
  int32_t sys_errno; /* 0 when no system call failed */
  char operation[32];
  char group[64];
  char text[640];
} phx_error_info;

/* ---- library ------------------------------------------------------------------------------------------------ */

PHX_API uint32_t phx_abi_version(void);
PHX_API const char *phx_version(void);                   /* static */
PHX_API const char *phx_build_info(void);                /* static, one JSON object: version, build, compiler, ... */
PHX_API int32_t phx_has(const char *feature);            /* 1 or 0; features: see phx_build_info */
PHX_API size_t phx_struct_size(const char *struct_name); /* sizeof of a public struct, 0 if unknown: bindings check */
PHX_API const char *phx_status_name(phx_status status);  /* static */
PHX_API const char *phx_dtype_name(int32_t dtype);       /* static, "float32"; "?" if unknown */
PHX_API const char *phx_reduce_op_name(int32_t op);      /* static, "sum"; "?" if unknown */
PHX_API size_t phx_dtype_size(int32_t dtype);            /* bytes, 0 if unknown */
PHX_API const char *phx_last_error(void);                /* text of this thread's last error, until its next one */
PHX_API phx_status phx_last_error_info(phx_error_info *out);

/* Called from any thread, also while calls are in progress; must not call back into phalanx. NULL turns logging off. */
typedef void (*phx_log_fn)(void *user, int32_t level, const char *file, int32_t line, const char *message);
PHX_API phx_status phx_set_log(phx_log_fn fn, void *user, int32_t min_level);

/* Lets the calling thread interrupt its own waits, for example at Ctrl-C. While this thread waits inside a call, and
 * only then, it calls check(arg) about every 100 ms. When check returns non-zero the wait ends and the call returns
 * PHX_ERR_INTERRUPTED; from then on check must return non-zero until that call has returned. A wait on a group that
 * ends in this way revokes the group: the calls of its other ranks fail at once with PHX_ERR_REVOKED and a text that
 * names the interrupted rank. check runs on the waiting thread, may run for long, and may call functions that do not
 * wait, such as phx_group_revoke; those that wait on a group return PHX_ERR_UNSUPPORTED inside it. Waits for a GPU's
 * stream and waits inside a store of the caller's own (phx_store_wrap) are not interrupted. check NULL removes the
 * hook. Every thread has a hook of its own, and none in the beginning; a forked child has none. Not collective. */
typedef int (*phx_interrupt_fn)(void *arg);
PHX_API phx_status phx_set_interrupt(phx_interrupt_fn check, void *arg);

/* ---- store -------------------------------------------------------------------------------------------------- */

/* A store of the caller's own. Calls may come from any thread that calls phalanx, block at most timeout_ms, and must
 * not call back into phalanx. set, get and add are required; the others may be NULL. */
typedef struct phx_store_ops {
  uint32_t struct_size;
  uint32_t flags; /* 0 */
  phx_status (*set)(void *self, const char *key, const void *value, size_t size);
  /* Waits for the key; copies min(capacity, length) bytes; *size = length of the value. PHX_ERR_TIMEOUT if it never
   * came. */
  phx_status (*get)(void *self, const char *key, void *value, size_t capacity, size_t *size, int64_t timeout_ms);
  /* Adds to a decimal counter that starts at 0; *result is the new value. */
  phx_status (*add)(void *self, const char *key, int64_t delta, int64_t *result);
  phx_status (*wait)(void *self, const char *const *keys, size_t count, int64_t timeout_ms);
  phx_status (*remove)(void *self, const char *key); /* PHX_ERR_NOT_FOUND when there is none */
  void (*destroy)(void *self);                       /* once, when the last reference is gone */
} phx_store_ops;

PHX_API phx_status phx_store_wrap(const phx_store_ops *ops, void *self, phx_store **out);
PHX_API phx_status phx_store_memory(phx_store **out); /* among the threads of one process */
PHX_API phx_status phx_store_file(const char *path,
                                  phx_store **out); /* a file all ranks see; made 0600, removed by its user */
/* Binds to bind_address only ("127.0.0.1", "::1", ...). *port: in, the wish (0 = any); out, the port bound. */
PHX_API phx_status phx_store_tcp_serve(const char *bind_address, const void *token, size_t token_size, uint16_t *port,
                                       phx_store **out);
PHX_API phx_status phx_store_tcp_connect(const char *address, uint16_t port, const void *token, size_t token_size,
                                         int64_t timeout_ms, phx_store **out);
PHX_API phx_status phx_store_prefix(phx_store *base, const char *prefix, phx_store **out); /* a view; retains base */
PHX_API phx_status phx_store_set(phx_store *store, const char *key, const void *value, size_t size);
PHX_API phx_status phx_store_get(phx_store *store, const char *key, void *value, size_t capacity, size_t *size,
                                 int64_t timeout_ms);
PHX_API phx_status phx_store_wait(phx_store *store, const char *const *keys, size_t count, int64_t timeout_ms);
PHX_API phx_status phx_store_add(phx_store *store, const char *key, int64_t delta, int64_t *result);
PHX_API phx_status phx_store_remove(phx_store *store, const char *key);
PHX_API phx_store *phx_store_retain(phx_store *store);
PHX_API void phx_store_release(phx_store *store); /* NULL is allowed, here and in every release */

/* ---- world -------------------------------------------------------------------------------------------------- */

typedef struct phx_world_params {
  uint32_t struct_size;
  uint32_t flags; /* 0 */
  int32_t rank;
  int32_t size;
  phx_store *store;         /* retained; may be NULL when size is 1 */
  int64_t timeout_ms;       /* the default of every wait; 0 = 300000 */
  uint64_t host_id;         /* ranks of equal host_id share memory; 0 = detect: boot id and network namespace */
  uint64_t staging_bytes;   /* of one slot of the area through which collectives on ordinary memory move; 0 = default */
  uint32_t signal_channels; /* of each symmetric allocation; 0 = 64 */
  uint32_t channels;        /* of every group: independent sequences of collectives; 0 = 4; the same on all ranks */
  uint32_t recorder_entries; /* of the flight recorder: how many collectives of each channel it keeps, rounded up to
                                256, 512, 1024, ...; at most 2^20; the same on all ranks */
  uint32_t reserved;         /* 0 */
  const char *job;           /* prefix of all keys in the store; NULL = "phalanx" */
} phx_world_params;

/* Not collective. Publishes this rank in the store; peers are met when the first group is made. */
PHX_API phx_status phx_world_create(const phx_world_params *params, phx_world **out);
/* Leaves: tells the peers, closes every connection, ends the monitor thread. Groups of this world are unusable after
 * it; memory stays valid until it is freed. Not collective; a second call does nothing. */
PHX_API phx_status phx_world_finalize(phx_world *world);
/* Revokes every group of the world, on all their ranks; calls that wait in any thread return at once with
 * PHX_ERR_REVOKED and this reason (NULL is allowed). The world itself stays: survivors may shrink. Not collective. */
PHX_API phx_status phx_world_abort(phx_world *world, const char *reason);
/* Finalizes; the handle is invalid after it. Free memory before: blocks still in the table are freed now, except those
 * that a phx_symm holds. Groups, symms and works may be released later. */
PHX_API void phx_world_release(phx_world *world);
PHX_API phx_status phx_world_check(phx_world *world); /* never blocks: OK, or the first dead peer or revoked group */
/* Whether a rank that this one has met, in any group of the world, is known to have died or left: PHX_ERR_PEER_DEAD,
 * with a text that names it and its process; else PHX_OK. For who waits for that rank by other means. Never blocks. */
PHX_API phx_status phx_world_check_peer(phx_world *world, int32_t rank);
/* The flight recorder as JSON: the last collectives of every rank of every group of this world, dead ranks included,
 * with times. Writes at most capacity bytes, the closing 0 included; *size = length of the whole, without it. Not
 * collective; also while calls are in progress. With the environment variable PHALANX_DUMP, each failure of a group
 * writes one into that folder. `phalanx trace` reads it. */
PHX_API phx_status phx_world_dump(phx_world *world, char *json, size_t capacity, size_t *size);
PHX_API int32_t phx_world_rank(const phx_world *world);
PHX_API int32_t phx_world_size(const phx_world *world);
PHX_API uint64_t phx_world_host_id(const phx_world *world);
PHX_API phx_status phx_world_set_timeout(phx_world *world, int64_t timeout_ms);

/* ---- groups ------------------------------------------------------------------------------------------------- */

enum { PHX_GROUP_ACTIVE = 0, PHX_GROUP_FAILED = 1 };

typedef struct phx_group_info {
  uint32_t struct_size;
  int32_t group_rank;
  int32_t group_size;
  int32_t state;        /* PHX_GROUP_* */
  uint64_t id;          /* the same number on all ranks of the group */
  uint64_t sequence;    /* collectives issued by this rank on channel 0 */
  const char *name;     /* lives as long as the group */
  const int32_t *ranks; /* group_size global ranks; lives as long as the group */
  uint64_t eager_bytes; /* a collective with at most so many bytes of input has taken them all when its start returns */
  uint32_t channels;    /* how many independent sequences of collectives the group has */
  uint32_t reserved;
  uint64_t zero_copies; /* collectives on ordinary pointers that read all inputs where they lie, in symmetric memory */
} phx_group_info;

/* Collective among `ranks` (which must hold this rank; no duplicates). PHX_ERR_UNSUPPORTED, on every rank alike, when
 * the ranks are not on one host. A name may be used again; then it is a new group. The n-th call of each rank for a
 * name and ranks belongs with the n-th of the others, so one that fails on a rank fails on all, at once and with that
 * cause; it also fails for a rank that comes when the others have given up. The next call of all makes the group. */
PHX_API phx_status phx_group_create(phx_world *world, const char *name, const int32_t *ranks, int32_t count,
                                    int64_t timeout_ms, phx_group **out);
/* A logical group that need not be part of the world: `group_size` participants meet through `store` under `name`. */
PHX_API phx_status phx_group_attach(phx_world *world, const char *name, int32_t group_rank, int32_t group_size,
                                    phx_store *store, int64_t timeout_ms, phx_group **out);
/* Collective. Makes one group of the ranks that gave the same color, ordered by key and then by rank. A rank with a
 * negative color takes part, and gets NULL. name NULL: that of the group. Needs no store. */
PHX_API phx_status phx_group_split(phx_group *group, int32_t color, int32_t key, const char *name, int64_t timeout_ms,
                                   phx_group **out);
/* Collective among the ranks that are alive, also on a group that has failed: makes a group of them, in the old order.
 * A rank that does not call it within half of timeout_ms is left out as if it were dead; when it comes after all, it
 * gets PHX_ERR_REVOKED. name NULL: that of the group. Needs no store. */
PHX_API phx_status phx_group_shrink(phx_group *group, const char *name, int64_t timeout_ms, phx_group **out);
/* Likewise: *inout_bits becomes the bitwise AND of what the ranks that took part gave, alike on all of them. alive:
 * NULL, or group_size bytes: 1 for each rank that took part, 0 for the others. */
PHX_API phx_status phx_group_agree(phx_group *group, uint64_t *inout_bits, uint8_t *alive, int64_t timeout_ms);
PHX_API phx_status phx_group_get_info(phx_group *group, phx_group_info *out);
/* Every later call on the group, on every rank, fails with PHX_ERR_REVOKED and this reason. Not collective. */
PHX_API phx_status phx_group_revoke(phx_group *group, const char *reason);
PHX_API phx_status phx_group_error(phx_group *group,
                                   phx_error_info *out); /* first cause; PHX_ERR_NOT_FOUND when healthy */
/* For bindings that check arguments themselves: stands for a collective of that channel whose arguments were wrong on
 * this rank, with the reason for the other ranks, as if the core had refused it. Waits for no peer. */
PHX_API phx_status phx_group_refuse(phx_group *group, uint32_t channel, const char *why);
/* The default of every later wait of this rank on the group and on what is made on it: symmetric memory, works. 0: the
 * default of the world, as at first. Groups that are made from it (split, shrink) take it over. Not collective. */
PHX_API phx_status phx_group_set_timeout(phx_group *group, int64_t timeout_ms);
PHX_API phx_status phx_group_barrier(phx_group *group, int64_t timeout_ms); /* collective */
/* Collective: a barrier of streams, put on one of a GPU; returns at once. What precedes it on any rank's stream is done
 * when what follows it on another's begins. See the collectives on memory of a GPU. */
PHX_API phx_status phx_group_enqueue_barrier(phx_group *group, const phx_device *device, int64_t timeout_ms,
                                             void *stream);
PHX_API phx_group *phx_group_retain(phx_group *group);
PHX_API void phx_group_release(phx_group *group);

/* ---- allocators and memory ---------------------------------------------------------------------------------- */

enum { PHX_HANDLE_BYTES = 64 };
enum { PHX_ALLOCATOR_DEVICE_MEMORY = 1 }; /* the processors of the host cannot read it */

/* Where the memory of one device type comes from. All functions are required. */
typedef struct phx_allocator_ops {
  uint32_t struct_size;
  uint32_t flags;   /* PHX_ALLOCATOR_* */
  const char *name; /* static */
  /* Zeroed memory of at least `size` bytes that export_handle can share. *cookie identifies it to the other calls. */
  phx_status (*alloc)(void *self, const phx_device *device, size_t size, void **pointer, uint64_t *cookie);
  phx_status (*free)(void *self, void *pointer, uint64_t cookie);
  /* What a peer needs to map the block: up to PHX_HANDLE_BYTES of data and one file descriptor (borrowed; -1 = none).
   */
  phx_status (*export_handle)(void *self, void *pointer, uint64_t cookie, void *handle, size_t *handle_size,
                              int32_t *fd);
  /* Takes no ownership of fd. Must verify that the object really spans `size` bytes. `device` is the one that will use
   * the memory: that of this rank's own block. */
  phx_status (*import_handle)(void *self, const phx_device *device, const void *handle, size_t handle_size, int32_t fd,
                              size_t size, void **pointer, uint64_t *cookie);
  phx_status (*unmap)(void *self, void *pointer, uint64_t cookie); /* an imported block */
  void (*destroy)(void *self);                                     /* after the last block is gone */
} phx_allocator_ops;

/* CPU (memfd) and, where there is a driver, CUDA are registered in every new world. Registering again replaces; blocks
 * made before stay valid. */
PHX_API phx_status phx_allocator_register(phx_world *world, int32_t device_type, const phx_allocator_ops *ops,
                                          void *self);
PHX_API phx_status phx_allocator_unregister(phx_world *world, int32_t device_type);
PHX_API phx_status phx_allocator_name(phx_world *world, int32_t device_type, const char **out); /* static string */

typedef struct phx_mem_info {
  uint32_t struct_size;
  int32_t live;       /* 0: persistent and idle */
  void *base;         /* of the block */
  size_t size;        /* bytes asked for */
  uint64_t alloc_id;  /* meaningful if persistent */
  int32_t persistent; /* 1 or 0 */
  int32_t reserved;
  phx_device device;
} phx_mem_info;

/* Not collective. size 0 is allowed and gives a distinct block. device NULL = CPU. All pages are made resident now
 * (about a second per GiB), so that no collective pays for a first touch. */
PHX_API phx_status phx_mem_alloc(phx_world *world, const phx_device *device, size_t size, void **out);
/* One block per (scope, device, alloc_id), kept when freed: the next call with the same id returns the same address.
 * PHX_ERR_IN_USE while it is live, PHX_ERR_MISMATCH when it has another size. scope: a group name, or NULL. */
PHX_API phx_status phx_mem_alloc_persistent(phx_world *world, const phx_device *device, size_t size, const char *scope,
                                            uint64_t alloc_id, void **out);
PHX_API phx_status phx_mem_retain(phx_world *world, void *pointer); /* one more phx_mem_free is needed */
PHX_API phx_status phx_mem_free(phx_world *world, void *pointer);   /* local, never collective */
/* Really frees an idle persistent block. PHX_ERR_IN_USE while live. */
PHX_API phx_status phx_mem_drop(phx_world *world, const phx_device *device, const char *scope, uint64_t alloc_id);
PHX_API phx_status phx_mem_find(phx_world *world, const void *pointer, phx_mem_info *out); /* any interior pointer */
PHX_API phx_status phx_mem_count(phx_world *world, size_t *blocks, size_t *bytes);         /* idle ones included */

enum { PHX_FABRIC_HANDLE_BYTES = 96 };

/* Not collective. Memory of GPUs beyond the host: a block of phalanx's CUDA allocator as bytes that may be sent by any
 * means to a process, on this host or another, whose GPU is in the same NVLink domain (and IMEX channel). `pointer`:
 * any in the block; `handle`: PHX_FABRIC_HANDLE_BYTES of room. Whoever has these bytes can map the block; they are of
 * use until it is freed. PHX_ERR_UNSUPPORTED, with the reason, where the GPU or its driver has no fabric handles. */
PHX_API phx_status phx_mem_export_fabric(phx_world *world, const void *pointer, void *handle);
/* Not collective. Maps the block that a handle stands for on a GPU of this rank (device; its type must be
 * PHX_DEV_CUDA). It is a block of this world then: phx_mem_find says its size, phx_mem_free unmaps it; the memory lives
 * as long as the last mapping. It has no signals and cannot be offered to a rendezvous, as it is another rank's. */
PHX_API phx_status phx_mem_import_fabric(phx_world *world, const phx_device *device, const void *handle,
                                         size_t handle_size, void **out);

/* ---- symmetric memory --------------------------------------------------------------------------------------- */

typedef struct phx_symm_info {
  uint32_t struct_size;
  int32_t group_rank;
  int32_t group_size;
  uint32_t signal_channels;
  void *base;              /* this rank's block */
  size_t size;             /* bytes, the same on all ranks */
  size_t signal_pad_bytes; /* of one rank's pad: signal_channels * group_size 32-bit words */
  phx_device device;
  const char *group; /* its name; lives as long as the handle */
} phx_symm_info;

/* Collective: every rank of the group gives a block of its own (any pointer into it) of the same size.
 * Cached per (group, block): the same handle again, without communication. */
PHX_API phx_status phx_symm_rendezvous(phx_group *group, void *pointer, int64_t timeout_ms, phx_symm **out);
/* Collective: a new block of `size` bytes, the same on all ranks, and its rendezvous in one. The block is in no table
 * of the world (phx_mem_find and phx_symm_find do not know it): it lives as long as the handle. device NULL = CPU. */
PHX_API phx_status phx_symm_alloc(phx_group *group, const phx_device *device, size_t size, int64_t timeout_ms,
                                  phx_symm **out);
PHX_API phx_status phx_symm_find(phx_group *group, const void *pointer, phx_symm **out); /* never communicates */
/* 1 if a blocking collective of `group` with these bytes as its input would read them where they lie, as far as this
 * rank is concerned; else 0. NULL: whether it might read as many bytes of another rank there. Never communicates. */
PHX_API int32_t phx_symm_covers(phx_group *group, const void *pointer, size_t size);
PHX_API phx_status phx_symm_get_info(phx_symm *symm, phx_symm_info *out);
/* Base of a rank's block as mapped here. NULL, with the error set, when group_rank is out of range. Lives as long as
 * the handle. */
PHX_API void *phx_symm_buffer(phx_symm *symm, int32_t group_rank);
/* The same part of every rank's block once more, one after another by group rank: *out is the start of one range of
 * group_size * bytes. No copy: what a rank writes to its block is there, so who reads the range after a barrier has
 * gathered without moving anything. phx_symm_all_gather into the range is such a barrier, and compares the calls.
 * Local. offset and bytes must be multiples of the page size (4096 on x86-64); a part may end behind the block with the
 * block's last page. Host memory of shared pages only, such as phalanx's own. A part that is mapped already gives the
 * same range. It lives until phx_symm_unmap_gathered was called as often, or as long as the handle; the last few stay
 * mapped for the next use. */
PHX_API phx_status phx_symm_map_gathered(phx_symm *symm, size_t offset, size_t bytes, void **out);
PHX_API phx_status phx_symm_unmap_gathered(phx_symm *symm, void *pointer); /* PHX_ERR_NOT_FOUND: no such range */
/* A rank's signal pad as mapped here: word [channel * group_size + r] is written only by group rank r, holds a count
 * that only grows (modulo 2^32), and is zero when the handle appears. put_signal and wait_signal use the same words:
 * use a channel either through them or by hand, not both. Of memory of a GPU the pad lies on the GPU, for kernels, and
 * put_signal, wait_signal and barrier, which are the host's, use words of their own. */
PHX_API uint32_t *phx_symm_signal_pad(phx_symm *symm, int32_t group_rank);
PHX_API void *const *phx_symm_buffers_device(phx_symm *symm);     /* group_size pointers that the device can read */
PHX_API void *const *phx_symm_signal_pads_device(phx_symm *symm); /* likewise */
/* One signal from this rank to a peer. Writes made before put_signal are visible after the matching wait_signal.
 * put never blocks. A wait that failed took no signal and may be tried again. */
PHX_API phx_status phx_symm_put_signal(phx_symm *symm, int32_t group_rank, uint32_t channel);
PHX_API phx_status phx_symm_wait_signal(phx_symm *symm, int32_t group_rank, uint32_t channel, int64_t timeout_ms);
/* Collective; channels are independent of each other and of the signals. One that timed out may be tried again: it goes
 * on waiting for the same barrier. */
PHX_API phx_status phx_symm_barrier(phx_symm *symm, uint32_t channel, int64_t timeout_ms);
/* The same for memory of a GPU, put on a stream (CUstream, cudaStream_t) of its primary context: they return at once.
 * What precedes a put on its stream is visible to what follows the matching wait on the other rank's. The words are
 * those of the pad on the GPU, so a put of the host is not one of these. A wait or barrier that lasts longer than
 * timeout_ms, or whose peer dies, ends; then the next call on the group, or phx_group_error, tells why. */
PHX_API phx_status phx_symm_enqueue_put_signal(phx_symm *symm, int32_t group_rank, uint32_t channel, void *stream);
PHX_API phx_status phx_symm_enqueue_wait_signal(phx_symm *symm, int32_t group_rank, uint32_t channel,
                                                int64_t timeout_ms, void *stream);
PHX_API phx_status phx_symm_enqueue_barrier(phx_symm *symm, uint32_t channel, int64_t timeout_ms, void *stream);
/* What a kernel needs to use the memory of all ranks by itself: see phalanx/device.h. Lives as long as the handle. */
typedef struct phx_team {
  uint32_t struct_size;
  int32_t group_rank;
  int32_t group_size;
  uint32_t channels;     /* of each pad */
  void *const *buffers;  /* group_size pointers: each rank's block */
  uint32_t *const *pads; /* likewise: each rank's signal pad */
  void *multicast;       /* all blocks at once; NULL where the device has no such thing */
  size_t bytes;          /* of each block */
  const int32_t *failed; /* group_size words: not 0 once it is of no use to wait for that rank */
} phx_team;
PHX_API phx_status phx_symm_team(phx_symm *symm, phx_team *out);
PHX_API phx_symm *phx_symm_retain(phx_symm *symm);
PHX_API void phx_symm_release(phx_symm *symm);

/* ---- collectives -------------------------------------------------------------------------------------------- */

typedef struct phx_options {
  uint32_t struct_size;
  uint32_t flags;     /* 0 */
  int32_t algo;       /* PHX_ALGO_*, the same on all ranks */
  uint32_t channel;   /* below phx_group_info.channels. Collectives of one channel are issued in one order on all ranks;
                       * those of different channels are independent, so that threads can have one each. */
  int64_t timeout_ms; /* of the whole operation, start and wait each */
  double scale;       /* of PHX_PREMUL_SUM */
  void *stream;       /* CUstream (cudaStream_t) of a collective on memory of a GPU; else NULL */
  phx_device device;  /* where `in` and `out` of a collective of a group lie; type 0: the host. Of one on symmetric
                       * memory its block says that. */
} phx_options;        /* NULL wherever it is asked for means all defaults */

/* All of these are collective. `count` is in elements. With work == NULL the call returns when it is complete.
 * Otherwise it returns a handle, at once: any number may be in flight, on any number of groups. Then `out` must stay
 * valid and unread until phx_work_wait, and so must `in`, and unchanged, unless it has at most
 * phx_group_info.eager_bytes bytes: then it was copied before the call returned. What was started moves on inside every
 * call of this rank that waits, and in phx_work_test. in == out is allowed where the two have the same size; other
 * overlaps are errors. After PHX_ERR_TIMEOUT, PEER_DEAD or MISMATCH the contents of `out` are unspecified and the group
 * is revoked. (Only all_to_all_v, whose counts every rank can compare before data moves, fails alike everywhere and
 * leaves it usable.) Lists of counts are read before the call returns.
 *
 * Inputs of 4 KiB and more (256 KiB where the ranks outnumber their cores) that lie in symmetric memory on every rank,
 * in one allocation that has had a rendezvous with any group of the same processes in the same order, are read there by
 * the peers and not copied, at whatever offsets; of all_reduce if it is in place on all ranks or on none. Of broadcast
 * and scatter only the root's input matters; of coalesced calls each is looked at by itself. Started ones only above
 * eager_bytes. phx_group_info.zero_copies counts them.
 *
 * On memory of a GPU (options.device is {PHX_DEV_CUDA, index}, the GPU of this rank, which `in` and `out` are ordinary
 * pointers of; work == NULL): the call puts copies and kernels on options.stream, of the GPU's primary context, and
 * returns. All of these on one group run in one order on all ranks, whatever their channel; on one rank, those on other
 * streams wait for those before them, but for what is captured.
 *
 * Inputs there that lie in memory which has had a rendezvous with this group, one of the last 64, are read where they
 * are by the peers, on whichever ranks that is so, at whatever offsets; zero_copies counts those of this rank. Free
 * such memory on all ranks or on none. Not so of all_to_all_v, of an all_reduce in place that is not large, and with
 * another algo than PHX_ALGO_AUTO. All other inputs, but for small ones of all_reduce, are copied into a workspace of
 * the group on that GPU. The first call makes it, and one that needs more than any before makes a larger one: then the
 * call waits for the other ranks' hosts, and is PHX_ERR_UNSUPPORTED while the stream is captured (make one call of that
 * size before the capture). Workspaces last as long as the group, so captured calls may be replayed as long as that, as
 * often as on the other ranks. What is said below of symmetric memory of a GPU holds here as well: timeouts, dead
 * peers, calls that differ, bits. */
PHX_API phx_status phx_all_reduce(phx_group *group, const void *in, void *out, size_t count, int32_t dtype, int32_t op,
                                  const phx_options *options, phx_work **work);
PHX_API phx_status phx_all_gather(phx_group *group, const void *in, void *out, size_t count, int32_t dtype,
                                  const phx_options *options, phx_work **work); /* out: group_size * count */
/* counts[j] elements come from group rank j; the same list on all ranks. The blocks lie one after another in `out`. */
PHX_API phx_status phx_all_gather_v(phx_group *group, const void *in, void *out, const size_t *counts, int32_t dtype,
                                    const phx_options *options, phx_work **work);
PHX_API phx_status phx_reduce_scatter(phx_group *group, const void *in, void *out, size_t count, int32_t dtype,
                                      int32_t op, const phx_options *options,
                                      phx_work **work); /* in: group_size * count */
/* counts[j] elements go to group rank j; the same list on all ranks. The blocks lie one after another in `in`. */
PHX_API phx_status phx_reduce_scatter_v(phx_group *group, const void *in, void *out, const size_t *counts,
                                        int32_t dtype, int32_t op, const phx_options *options, phx_work **work);
PHX_API phx_status phx_all_to_all(phx_group *group, const void *in, void *out, size_t count, int32_t dtype,
                                  const phx_options *options, phx_work **work); /* both: group_size * count */
/* Element counts per group rank; in_counts[j] here must equal out_counts[this rank] on rank j. Blocks lie one after
 * another. */
PHX_API phx_status phx_all_to_all_v(phx_group *group, const void *in, const size_t *in_counts, void *out,
                                    const size_t *out_counts, int32_t dtype, const phx_options *options,
                                    phx_work **work);
PHX_API phx_status phx_broadcast(phx_group *group, void *buffer, size_t count, int32_t dtype, int32_t root_group_rank,
                                 const phx_options *options, phx_work **work);
/* `out` is written on the root only, and may be NULL elsewhere. */
PHX_API phx_status phx_reduce(phx_group *group, const void *in, void *out, size_t count, int32_t dtype, int32_t op,
                              int32_t root_group_rank, const phx_options *options, phx_work **work);
/* out: group_size * count, on the root only; NULL is allowed elsewhere. */
PHX_API phx_status phx_gather(phx_group *group, const void *in, void *out, size_t count, int32_t dtype,
                              int32_t root_group_rank, const phx_options *options, phx_work **work);
/* in: group_size * count, on the root only; NULL is allowed elsewhere. */
PHX_API phx_status phx_scatter(phx_group *group, const void *in, void *out, size_t count, int32_t dtype,
                               int32_t root_group_rank, const phx_options *options, phx_work **work);

/* One call of a coalesced group: the arguments of the function of that name. */
enum {
  PHX_CALL_ALL_REDUCE = 1,
  PHX_CALL_ALL_GATHER = 2,
  PHX_CALL_REDUCE_SCATTER = 3,
  PHX_CALL_ALL_TO_ALL = 4,
  PHX_CALL_BROADCAST = 5, /* in == out: the buffer */
  PHX_CALL_REDUCE = 6,
  PHX_CALL_GATHER = 7,
  PHX_CALL_SCATTER = 8
};
typedef struct phx_call {
  uint32_t struct_size; /* of the first one is the distance from one to the next */
  int32_t kind;         /* PHX_CALL_* */
  const void *in;
  void *out;
  size_t count;
  int32_t dtype;
  int32_t op;              /* 0 where there is none */
  int32_t root_group_rank; /* likewise */
  uint32_t flags;          /* 0 */
} phx_call;
/* Collective: several calls as one, in one order on all ranks; small ones share rounds, so that many cost little more
 * than one. All complete together. No output may overlap another output or input. */
PHX_API phx_status phx_coalesced(phx_group *group, const phx_call *calls, size_t count, const phx_options *options,
                                 phx_work **work);

/* ---- messages between two ranks ------------------------------------------------------------------------------ */

enum { PHX_ANY_RANK = -1 };

/* Not collective: a send meets the oldest unmet receive of its receiver that names its sender (or PHX_ANY_RANK) and its
 * tag. Messages of one sender with one tag arrive in the order sent. dtype and count must agree, else both sides fail
 * with PHX_ERR_MISMATCH. A rank may send to itself. options.channel and algo are not used. The buffer `in` of a started
 * send must stay unchanged until phx_work_wait. Whatever waits for a message keeps the sends of this rank going.
 *
 * A blocking send (work == NULL) returns when `in` may be changed. As in MPI it may wait for its receive: a small
 * message usually does not, a large one does. A receiver keeps at most 1 MiB of data of each sender for receives to
 * come (less in groups of more than 64 ranks); a message of more than half of that, or beyond it, stays with its sender
 * until it has met its receive. Ranks that send such messages to each other start their sends, or use phx_messages. At
 * most 65536 messages from one rank to another may stay with the sender in that way; receives find later ones only
 * after some of these have been received.
 *
 * On memory of a GPU (options.device is {PHX_DEV_CUDA, index}, the same one in all calls on the group; work == NULL)
 * the call puts a kernel on options.stream, of the GPU's primary context, and returns. The n-th send of a rank to
 * another meets the n-th receive of that one from it, whatever the tags: those that differ, in dtype, count or tag, end
 * the kernels; the next call on the group raises PHX_ERR_MISMATCH, and other failures: see collectives on symmetric
 * memory of a GPU. No PHX_ANY_RANK. A send of up to 3.9 MiB (less with small staging_bytes) is through before it is
 * received, if those before it to that rank have been; so are the first four in a row of at most 7.8 KiB. Calls between
 * two ranks in one direction keep their order on any streams, but for what is captured; others do not wait for each
 * other. A rank's first message makes memory, 4 MiB for each rank of the group. The first one to a rank, and from it,
 * cannot be captured; the first receive from a rank waits, on the host, for that one's first message on the group, to
 * or from anyone. */
PHX_API phx_status phx_send(phx_group *group, const void *in, size_t count, int32_t dtype, int32_t peer_group_rank,
                            uint32_t tag, const phx_options *options, phx_work **work);
PHX_API phx_status phx_recv(phx_group *group, void *out, size_t count, int32_t dtype, int32_t peer_group_rank,
                            uint32_t tag, const phx_options *options, phx_work **work);
/* One message of several: the arguments of phx_send or phx_recv. */
enum { PHX_MESSAGE_SEND = 1, PHX_MESSAGE_RECV = 2 };
typedef struct phx_message {
  uint32_t struct_size; /* of the first one is the distance from one to the next */
  int32_t kind;         /* PHX_MESSAGE_* */
  void *buffer;         /* of a send it is only read */
  size_t count;
  int32_t dtype;
  int32_t peer_group_rank;
  uint32_t tag;
  uint32_t flags; /* 0 */
} phx_message;
/* Several messages at once, so that the order of sends and receives does not matter; what two ranks send each other in
 * one direction keeps its order. Returns when all are complete; on a GPU, when one kernel for all of them is on the
 * stream: at most 96 messages, on 32 roads (to one rank, or from one). No buffer that is received into may overlap
 * another. */
PHX_API phx_status phx_messages(phx_group *group, const phx_message *messages, size_t count,
                                const phx_options *options);
/* The group rank from which a completed receive came. */
PHX_API phx_status phx_work_source(phx_work *work, int32_t *group_rank);

/* ---- collectives on symmetric memory ------------------------------------------------------------------------- */

/* As above with the input at `offset` bytes into the symmetric block of every rank (the same offset on all): no copy
 * into a staging area, unless that is the faster way: of small inputs (2 KiB, or phx_tuning.one_shot_bytes if that is
 * more), and where ranks share cores of somewhat larger broadcasts and of all_gathers that fit no cache;
 * PHX_ALGO_ONE_SHOT and PHX_ALGO_TWO_SHOT rule that out, and say for reduce and for an all_reduce that is not in place
 * whether a rank that wants the sum reads all inputs, or each rank sums a part of them and passes it on (the default
 * from three ranks on). `out` is ordinary memory, or, for all_reduce, this rank's own block at the same offset: in
 * place; or, for all_gather, on all ranks the range that phx_symm_map_gathered made of just these bytes: then nothing
 * moves, and the ranks only meet.
 *
 * On memory of a GPU (work == NULL): the call puts a kernel on phx_options.stream, of the GPU's primary context, and
 * returns. Collectives of one block run in one order on all ranks; of all blocks whose kernels may wait at the same
 * time, one stream keeps them so. A kernel that waits longer than timeout_ms, or whose peer dies, ends; the next call
 * on the group, or phx_group_error, tells why, and `out` is then unspecified. Of ranks whose calls differ the one that
 * comes later gets PHX_ERR_MISMATCH, which names both calls, and the kernels of the others end; where the counts of
 * all_to_all_v differ, the rank that expected others is told so as after a timeout. A stream that is being captured
 * gets the kernel into its graph, which may be replayed as often as on the other ranks. The bits are those of the host.
 * PHX_ALGO_ONE_SHOT and PHX_ALGO_TWO_SHOT keep an all_reduce from sending what is small beside flags.
 *
 * Where each rank has a GPU of its own and NVLink switches connect them (phx_team.multicast is not NULL), broadcasts
 * store everything once, to all ranks, and so do all_gathers of 64 KiB and more whose `out` lies in symmetric memory of
 * the group, at one place on all ranks. PHX_ALGO_MULTIMEM wants the switches, and is PHX_ERR_UNSUPPORTED where they
 * cannot: for those two, and to sum float16, bfloat16 (in float32), float32, float64, complex numbers and integers of
 * 32 and 64 bits, to take the minimum or maximum of float16, bfloat16 and integers of 32 and 64 bits, and for bitwise
 * ops on all integers, in all_reduce, reduce_scatter and reduce. Switches add in an order of their own: the bits are
 * the same on all ranks, but not always those of the host, nor those of the call before. Therefore an all_reduce of
 * floats is in place, or `out` lies in symmetric memory as above; but for sums of two ranks. NaNs may become others,
 * and minima and maxima may pass over them. */
PHX_API phx_status phx_symm_all_reduce(phx_symm *symm, size_t offset, void *out, size_t count, int32_t dtype,
                                       int32_t op, const phx_options *options, phx_work **work);
PHX_API phx_status phx_symm_all_gather(phx_symm *symm, size_t offset, void *out, size_t count, int32_t dtype,
                                       const phx_options *options, phx_work **work);
PHX_API phx_status phx_symm_all_gather_v(phx_symm *symm, size_t offset, void *out, const size_t *counts, int32_t dtype,
                                         const phx_options *options, phx_work **work);
PHX_API phx_status phx_symm_reduce_scatter(phx_symm *symm, size_t offset, void *out, size_t count, int32_t dtype,
                                           int32_t op, const phx_options *options, phx_work **work);
PHX_API phx_status phx_symm_reduce_scatter_v(phx_symm *symm, size_t offset, void *out, const size_t *counts,
                                             int32_t dtype, int32_t op, const phx_options *options, phx_work **work);
PHX_API phx_status phx_symm_all_to_all(phx_symm *symm, size_t offset, void *out, size_t count, int32_t dtype,
                                       const phx_options *options, phx_work **work);
PHX_API phx_status phx_symm_all_to_all_v(phx_symm *symm, size_t offset, const size_t *in_counts, void *out,
                                         const size_t *out_counts, int32_t dtype, const phx_options *options,
                                         phx_work **work);
PHX_API phx_status phx_symm_broadcast(phx_symm *symm, size_t offset, size_t count, int32_t dtype,
                                      int32_t root_group_rank, const phx_options *options,
                                      phx_work **work); /* in place on every rank */
PHX_API phx_status phx_symm_reduce(phx_symm *symm, size_t offset, void *out, size_t count, int32_t dtype, int32_t op,
                                   int32_t root_group_rank, const phx_options *options, phx_work **work);
PHX_API phx_status phx_symm_gather(phx_symm *symm, size_t offset, void *out, size_t count, int32_t dtype,
                                   int32_t root_group_rank, const phx_options *options, phx_work **work);
PHX_API phx_status phx_symm_scatter(phx_symm *symm, size_t offset, void *out, size_t count, int32_t dtype,
                                    int32_t root_group_rank, const phx_options *options, phx_work **work);

/* ---- work: what was started ---------------------------------------------------------------------------------- */

PHX_API phx_status phx_work_test(phx_work *work); /* PHX_OK: complete; PHX_IN_PROGRESS; or the error. Never blocks. */
PHX_API phx_status phx_work_wait(phx_work *work, int64_t timeout_ms); /* idempotent */
/* For a caller that looks with phx_work_test and keeps the time itself: what phx_work_wait does when its time is over.
 * Work that is not complete fails at once with PHX_ERR_TIMEOUT; the error names timeout_ms. */
PHX_API phx_status phx_work_expire(phx_work *work, int64_t timeout_ms);
PHX_API phx_status phx_work_error(phx_work *work, phx_error_info *out); /* PHX_ERR_NOT_FOUND when it has none */
PHX_API phx_work *phx_work_retain(phx_work *work);
PHX_API void phx_work_release(phx_work *work); /* the operation still completes: later calls on the group see to it */

/* ---- tuning -------------------------------------------------------------------------------------------------- */

/* Where one algorithm takes over from another, for groups of one size on this host. All ranks of a group use those of
 * its group rank 0. `phalanx tune` measures them and writes the file; the built-in ones are good without it. */
typedef struct phx_tuning {
  uint32_t struct_size;
  uint32_t flags;           /* 0 */
  uint64_t one_shot_bytes;  /* all_reduce: the largest input for which every rank reduces everything */
  uint64_t chunk_bytes;     /* of the larger ones: what moves between two barriers; at most slot_bytes */
  uint64_t streaming_bytes; /* results from this size on are written around the cache */
  uint64_t push_bytes;      /* symmetric all_reduce in place, more than 4 ranks: the piece that is pushed to the peers
                             * while it is in the cache. Fewer ranks write sums everywhere at once. */
} phx_tuning;
PHX_API phx_status phx_group_get_tuning(phx_group *group, phx_tuning *out);
/* Collective; group rank 0's values hold. Zero means the built-in value. */
PHX_API phx_status phx_group_set_tuning(phx_group *group, const phx_tuning *tuning, int64_t timeout_ms);
/* Not collective. Writes the group's values to the row for this host and this group size of the table that new groups
 * read. path NULL: $PHALANX_TUNING, else phalanx/tuning in the user's cache directory. */
PHX_API phx_status phx_group_save_tuning(phx_group *group, const char *path);

/* The same for collectives on GPUs. A group takes them from the table at its first rendezvous of memory of GPUs (that
 * of the workspace of the first collective on ordinary memory is one): from group rank 0's row for the name of its GPU,
 * the size of the group, and whether ranks have a GPU in common or each has one of its own. Before that, and without
 * such a row, it has the built-in ones, which have not been measured. `phalanx tune --device cuda` measures them.
 * Sizes are at most 1 << 62, which no input has: from there on means never. */
typedef struct phx_gpu_tuning {
  uint32_t struct_size;
  uint32_t flags;           /* 0 */
  uint64_t line_bytes;      /* all_reduce: the largest input that is sent beside flags; no more than the pads have room
                             * for, which is 32 KiB */
  uint64_t two_shot_bytes;  /* all_reduce of ordinary memory: from this input on each rank reduces a part */
  uint64_t multicast_bytes; /* all_gather into symmetric memory: results from this size on go by NVLink switches, where
                             * there are some */
  uint64_t copy_bytes;      /* all_gather of symmetric memory: other results from this size on are copied by the GPU's
                             * copy engines, between two barriers, and not by a kernel */
  uint64_t thread_bytes;    /* work for which a launch has one more thread, as long as there is room: a multiple of 16,
                             * up to 4096 */
} phx_gpu_tuning;
PHX_API phx_status phx_group_get_gpu_tuning(phx_group *group, phx_gpu_tuning *out);
/* Collective; group rank 0's values hold, for all calls of the group after it. Zero means the built-in value. */
PHX_API phx_status phx_group_set_gpu_tuning(phx_group *group, const phx_gpu_tuning *tuning, int64_t timeout_ms);
/* Not collective. Writes them to the row of the table that is for this rank's GPU and such groups; after the first
 * rendezvous of memory of GPUs. path: as above. */
PHX_API phx_status phx_group_save_gpu_tuning(phx_group *group, const char *path);

/* ---- random numbers ----------------------------------------------------------------------------------------- */

/* Element i of a tensor is a function of a key and of i alone, so that it is the same however the tensor is cut into
 * pieces, on every processor, bit for bit. The function is Philox4x32-10 (Salmon et al., SC 2011), with the key, of
 * block i / 4 or, where an element takes 64 bits, i / 2. Draw another key for each tensor. Not for cryptography. */
enum {
  PHX_RANDOM_BITS = 1,        /* integers of 32 and 64 bits: the words themselves; a and b are not used */
  PHX_RANDOM_UNIFORM = 2,     /* floats in [a, b), b - a finite; as many bits as the type has; a when they are equal */
  PHX_RANDOM_NORMAL = 3,      /* floats: mean a, standard deviation b >= 0 */
  PHX_RANDOM_EXPONENTIAL = 4, /* floats above 0: rate a > 0 */
  PHX_RANDOM_BERNOULLI = 5,   /* any real type: 1 with probability a, to 2^-32, else 0 */
  PHX_RANDOM_CAUCHY = 6,      /* floats: median a, scale b > 0 */
  PHX_RANDOM_LOG_NORMAL = 7   /* floats: exp of normal ones with mean a and standard deviation b >= 0 */
};

/* Fills a box of a tensor. The element at position p of the box is element first + sum(p[d] * index_strides[d]) of the
 * tensor and goes to out + sum(p[d] * out_strides[d]) elements. For rows 2 to 4 of a [8, 10] tensor, without gaps:
 * first 20, sizes {3, 10}, index_strides {10, 1}, out_strides {10, 1}. ndim is at most 64; an empty box is left alone.
 */
PHX_API phx_status phx_random_fill(void *out, int32_t dtype, int32_t kind, double a, double b, uint64_t key,
                                   uint64_t first, int32_t ndim, const int64_t *sizes, const int64_t *index_strides,
                                   const int64_t *out_strides);
/* The same for integers from `low` on, of which there are `range` (0: 2^64), in any real type; floats are rounded. */
PHX_API phx_status phx_random_integers(void *out, int32_t dtype, int64_t low, uint64_t range, uint64_t key,
                                       uint64_t first, int32_t ndim, const int64_t *sizes, const int64_t *index_strides,
                                       const int64_t *out_strides);
/* The same elements, bit for bit, in memory of a device. On a GPU the call puts a kernel on `stream` (CUstream,
 * cudaStream_t), of the GPU's primary context, and returns. device NULL = CPU, where stream is NULL. */
PHX_API phx_status phx_random_fill_on(const phx_device *device, void *stream, void *out, int32_t dtype, int32_t kind,
                                      double a, double b, uint64_t key, uint64_t first, int32_t ndim,
                                      const int64_t *sizes, const int64_t *index_strides, const int64_t *out_strides);
PHX_API phx_status phx_random_integers_on(const phx_device *device, void *stream, void *out, int32_t dtype, int64_t low,
                                          uint64_t range, uint64_t key, uint64_t first, int32_t ndim,
                                          const int64_t *sizes, const int64_t *index_strides,
                                          const int64_t *out_strides);

/* cdef: end */

#ifdef __cplusplus
}
#endif
#endif
