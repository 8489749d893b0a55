/* phalanx.h: the C ABI of Phalanx: symmetric memory within a host, collectives and messages within and between hosts.
 *
 * This header is what ABI version 1 will freeze. Others go with it:
 *
 *   phalanx/phalanx.hpp  the same for C++17: handles that release themselves, spans, exceptions or results
 *   phalanx/device.h     for kernels of one's own on symmetric memory
 *   phalanx/cuda.h       memory and streams of GPUs: experimental, may change in every version
 *   phalanx/tuning.h     algorithms and their limits: experimental; phalanx/random.h, random numbers: experimental
 *   phalanx/carrier.h    how bytes move between hosts: experimental
 *
 * Life of a rank. Each thing keeps what it is made from, so handles may be released in any order:
 *
 *   phx_store_*  ->  phx_world_create  ->  phx_group_create  ->  phx_symm_alloc  ->  phx_symm_release
 *                         |                     |  collectives, messages  ->  phx_work_wait, phx_work_release
 *                         |                phx_group_release
 *                    phx_world_finalize: this rank leaves; later calls on the world and its groups fail
 *                    phx_world_release: finalizes if that was not done, and gives the handle back. A world has one
 *                                       owner: it has no retain, because releasing it is leaving.
 *   When something fails:  phx_group_get_error (what, and who), phx_group_shrink (go on without the dead),
 *                          phx_group_revoke, phx_world_abort (give up on all ranks at once)
 *
 * Rules of this header, and of every later version of it:
 *
 *   - C99 and C++17; self-contained. The region between the cdef marks is also read by cffi.
 *   - Handles are opaque. Enumerations cross as int32_t, under the name of a typedef; the constants of phx_dtype begin
 *     with PHX_DTYPE_, those of phx_op with PHX_OP_, and so on.
 *   - A struct that crosses starts with struct_size, the sizeof of the struct where the CALLER was compiled. Set it by
 *     the initializer of the struct: `phx_options options = PHX_OPTIONS_INIT;`. Structs only ever grow at their end.
 *     In a struct that the library reads, fields that the caller does not know are as in the initializer; fields that
 *     the library does not know must be 0, else the call is PHX_ERR_INVALID. In a struct that the library fills, fields
 *     that the library does not know become 0.
 *   - Every call that can fail returns a phx_status: 0 is success, 1 "not yet", negative an error. On error the
 *     out-parameters are untouched and the calling thread's phx_last_error_info() says what happened.
 *   - Queries: phx_THING_get_WHAT(thing, out) returns a status. A fact that never changes is returned as it is (rank,
 *     size, address); for a wrong handle that is -1, 0 or NULL, and the calling thread's last error is set.
 *   - A function that takes phx_options has its timeout there. Other functions that wait have a parameter timeout_ms,
 *     the last one before what they return. A timeout_ms of 0 means the default of the group, or that of the world
 *     where the group has none; a negative one is an error: no wait is unbounded.
 *   - Nothing throws, exits or prints. Text goes to the log callback, if one is set.
 *   - Strings are UTF-8, borrowed in (copied when kept) and borrowed out (each says for how long).
 *   - Functions are thread-safe, but the collectives of ONE group must be issued in one order that all ranks share,
 *     so two threads must not race to issue them.
 *   - What a process has made is of no use in its forked child: there, every call on it is PHX_ERR_UNSUPPORTED, but for
 *     finalize and release, which do nothing. A child makes stores, worlds and groups of its own; it may go on with a
 *     file or TCP store. (A child that clone(2) makes without the C library is not recognised.)
 *   - Ranks must run the same build of the library; builds that differ do not meet (PHX_ERR_ABI).
 *   - A thread must not be cancelled (pthread_cancel) while it is in a call: that would end the process.
 *   - "Collective" means: every rank of the group must make the same call, in the same order. "Local" means: no other
 *     rank takes part. A function is local where its comment and the section say neither.
 *   - A collective call with a wrong argument returns its error at once, waits for nobody, and counts as a call. Ranks
 *     that all refuse the call go on. Where one rank refuses and another one does not, the call of the other fails at
 * once with PHX_ERR_MISMATCH and the text of the one that refused, and the group is revoked. Exceptions, which only the
 *     calling rank hears of: calls that cannot know their group (a handle is NULL, a list of ranks is wrong), messages,
 *     signals and barriers of symmetric memory, and calls on memory of GPUs.
 *
 * Errors that every function may return are not repeated at each: PHX_ERR_INVALID (an argument is wrong),
 * PHX_ERR_UNSUPPORTED (in a forked child), PHX_ERR_NO_MEMORY and PHX_ERR_SYSTEM. Every call on a group may return
 * PHX_ERR_REVOKED (the group has failed before), and every one that waits PHX_ERR_TIMEOUT, PHX_ERR_PEER_DEAD,
 * PHX_ERR_MISMATCH and PHX_ERR_INTERRUPTED.
 *
 * A rank number is the global one (that of the world), unless its name says group_rank.
 *
 * Parameters that mean the same in every function, where its comment does not say more:
 *
 *   - world, group, store, symm, window, work: the handle that the call is about.
 *   - *out: becomes a new handle, or the address of new memory, which the caller releases.
 *   - out: what the call fills: memory, or a struct with its struct_size set.
 *   - in: what this rank gives. It is only read.
 *   - buffer: memory that is read on the rank that gives, and written on the others.
 *   - count: the number of elements, or of entries in a list.
 *   - counts, in_counts, out_counts: numbers of elements, one for each group rank.
 *   - dtype: the type of the elements, a PHX_DTYPE_* constant.
 *   - op: the reduction, a PHX_OP_* constant.
 *   - options: how the call is made. NULL: all defaults.
 *   - *work: NULL: the call returns when it is complete. Else it becomes the handle of the call that was started.
 *   - root_group_rank: the group rank that gives, or that gets the result.
 *   - group_rank, peer_group_rank: the rank that is meant, by its number in the group.
 *   - tag: a number that the send and its receive have in common.
 *   - channel: the number of an independent sequence of calls, from 0 on.
 *   - offset: where something begins in the block of each rank, or in its window, in bytes.
 *   - timeout_ms: how long to wait, in milliseconds. 0: the default.
 *   - name: the name of the group, the same on all its ranks.
 *   - ranks: the ranks of the group, in its order.
 *   - color: the number of the new group to which this rank goes.
 *   - key: the key of an entry in the store; in phx_group_split, what orders the ranks of one color.
 *   - value: the bytes of an entry.
 *   - *size: becomes the size of the whole in bytes.
 *   - size, bytes: a size in bytes.
 *   - capacity: how many bytes there is room for.
 *   - pointer: an address in the block that is meant.
 *   - device: where the memory is. NULL: CPU.
 *   - device_type: what the memory belongs to, a PHX_DEVICE_* constant.
 *   - scope: a group name, or NULL: a part of the name of a persistent block.
 *   - alloc_id: the number of a persistent block in its scope.
 *   - ops: the functions. The table is copied.
 *   - self: what each function of `ops` gets as its first argument.
 *   - params: how the world is made.
 *   - token: a secret that the server and its clients share.
 *   - token_size: the size of the token in bytes.
 *   - bind_address, address: the address of the server.
 *   - port: the port of the server.
 *   - path: the name of the file.
 *   - prefix: what the keys begin with.
 *   - calls, messages, works, keys: the list. It is read before the call returns.
 *   - base: the store that the new one is a view of.
 *   - delta: what is added.
 *   - *result: becomes the value after that.
 *   - *index: becomes the place in the list.
 *   - *group_rank: becomes a rank of the group.
 *   - *inout_bits: what this rank gives, and then what all gave.
 *   - group_size: how many participants there are.
 *   - rank: the rank that is meant.
 *   - *blocks: becomes the number of blocks.
 *   - *bytes: becomes the number of their bytes.
 *   - json: where the text goes.
 *   - status: a status.
 *   - feature, struct_name: the name of a feature, or of a struct.
 *   - fn, check: the function, or NULL.
 *   - user, arg: what the function gets as an argument of its own.
 *   - min_level: the least level of a line that it gets, PHX_LOG_*.
 *   - reason, why: the text of the error that the other ranks get. */
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

/* The result of a call. */
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

/* The type of an element. */
typedef int32_t phx_dtype;
enum {
  PHX_DTYPE_F16 = 1,
  PHX_DTYPE_BF16 = 2,
  PHX_DTYPE_F32 = 3,
  PHX_DTYPE_F64 = 4,
  PHX_DTYPE_I8 = 5,
  PHX_DTYPE_U8 = 6,
  PHX_DTYPE_I16 = 7,
  PHX_DTYPE_U16 = 8,
  PHX_DTYPE_I32 = 9,
  PHX_DTYPE_U32 = 10,
  PHX_DTYPE_I64 = 11,
  PHX_DTYPE_U64 = 12,
  PHX_DTYPE_BOOL = 13,
  PHX_DTYPE_C64 = 14,    /* complex of two f32 */
  PHX_DTYPE_C128 = 15,   /* complex of two f64 */
  PHX_DTYPE_F8E4M3 = 16, /* torch.float8_e4m3fn: no infinities; what is too large becomes 448; NaN is 0x7f and 0xff */
  PHX_DTYPE_F8E5M2 = 17  /* torch.float8_e5m2 */
};

/* Reductions run in group rank order; floats of 16 and 8 bits accumulate in f32 and round once, to nearest even, so
 * every rank gets the same bits whatever the algorithm. In a group on several hosts the ranks of each host are reduced
 * in this way, and then their results in the order of the hosts, with a rounding of its own. min and max propagate NaN.
 * avg divides the sum by the group size (integers: towards zero). Not defined: bitwise ops on floats and complex, min
 * and max on complex, avg on bool, premultiplied sums on integers and bool. */
typedef int32_t phx_op;
enum {
  PHX_OP_SUM = 1,
  PHX_OP_AVG = 2,
  PHX_OP_PROD = 3,
  PHX_OP_MIN = 4,
  PHX_OP_MAX = 5,
  PHX_OP_BAND = 6,
  PHX_OP_BOR = 7,
  PHX_OP_BXOR = 8,
  PHX_OP_PREMUL_SUM = 9 /* the sum of scale * input; scale is phx_options.scale, the same on all ranks */
};

/* What memory belongs to: the numbers of DLPack. */
typedef int32_t phx_device_type;
enum { PHX_DEVICE_CPU = 1, PHX_DEVICE_CUDA = 2 };

/* How a collective runs. AUTO: the library chooses, the same on all ranks. phalanx/tuning.h has the others. */
typedef int32_t phx_algo;
enum { PHX_ALGO_AUTO = 0 };

/* How important a line of the log is. */
typedef int32_t phx_log_level;
enum { PHX_LOG_DEBUG = 0, PHX_LOG_INFO = 1, PHX_LOG_WARNING = 2, PHX_LOG_ERROR = 3 };

typedef struct phx_store phx_store;   /* a key-value store through which ranks find each other */
typedef struct phx_world phx_world;   /* one rank's context; several may live in one process */
typedef struct phx_group phx_group;   /* a named, ordered set of ranks; those of one host share memory */
typedef struct phx_symm phx_symm;     /* one allocation as seen by every rank of one group */
typedef struct phx_window phx_window; /* memory of each rank in which the others of a group write */
typedef struct phx_work phx_work;     /* a collective that was started and not yet waited for */

/* Frozen for ever (the layout of DLDevice), so it is embedded by value and has no struct_size. */
typedef struct phx_device {
  phx_device_type type; /* PHX_DEVICE_* */
  int32_t index;        /* 0 on CPU */
} phx_device;

/* The strings are never NULL. They belong to the calling thread and live until it next asks for an error. */
typedef struct phx_error_info {
  uint32_t struct_size;
  phx_status status;
  int32_t rank;          /* the rank that reports; -1: none */
  int32_t peer;          /* the rank at fault, -1 when unknown or none */
  uint64_t sequence;     /* of the collective in its group, 0 when none */
  int32_t step;          /* the round inside the collective */
  int32_t sys_errno;     /* 0 when no system call failed */
  const char *operation; /* of what call, such as "all_reduce" */
  const char *group;     /* its name, "" when none */
  const char *text;      /* what failed, what was given, what is allowed */
} phx_error_info;

/* ---- library ------------------------------------------------------------------------------------------------ */

/* All of these are local, never wait and cannot fail, but for phx_last_error_info. */

PHX_API uint32_t phx_abi_version(void);       /* PHX_ABI_VERSION of the library that is loaded */
PHX_API const char *phx_version(void);        /* static */
PHX_API const char *phx_build_info(void);     /* static, one JSON object: version, build, compiler, ... */
PHX_API int32_t phx_has(const char *feature); /* 1 or 0; phx_build_info lists the features */
/* sizeof of a public struct in the library, by its name, such as "phx_options"; 0 if unknown. For bindings. */
PHX_API size_t phx_struct_size(const char *struct_name);
PHX_API const char *phx_status_name(phx_status status); /* static, such as "PHX_ERR_TIMEOUT"; "unknown status" */
PHX_API const char *phx_dtype_name(phx_dtype dtype);    /* static, such as "float32"; "?" if unknown */
PHX_API const char *phx_op_name(phx_op op);             /* static, such as "sum"; "?" if unknown */
PHX_API size_t phx_dtype_size(phx_dtype dtype);         /* bytes of an element, 0 if unknown */
/* The text of the calling thread's last error, "" before the first; valid until its next error. */
PHX_API const char *phx_last_error(void);
/* All that is known of it. status is PHX_OK before the first error. */
PHX_API phx_status phx_last_error_info(phx_error_info *out);

/* Local, of the process. `fn` gets every line of at least min_level, from any thread, also from several at once and
 * while calls are in progress; it must not call back into phalanx. NULL turns logging off, as it is at first. Once the
 * call has returned, the function that was set before is not called any more. */
typedef void (*phx_log_fn)(void *user, phx_log_level level, const char *file, int32_t line, const char *message);
PHX_API phx_status phx_set_log(phx_log_fn fn, void *user, phx_log_level min_level);

/* Lets the calling thread interrupt its own waits, for example at Ctrl-C. While this thread waits inside a call, and
 * only then, it calls check(arg) about every 100 ms. When check returns non-zero the wait ends and the call returns
 * PHX_ERR_INTERRUPTED; from then on check must return non-zero until that call has returned. A wait on a group that
 * ends in this way revokes the group: the calls of its other ranks fail at once with PHX_ERR_REVOKED and a text that
 * names the interrupted rank.
 *
 * check runs on the waiting thread, may run for long, and may call functions that do not
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

/* Functions of stores are local. Those that wait return PHX_ERR_TIMEOUT; a server that has gone is PHX_ERR_PEER_DEAD.
 */

/* A store made of the caller's functions, each of which gets `self`. `ops` is copied. */
PHX_API phx_status phx_store_wrap(const phx_store_ops *ops, void *self, phx_store **out);
/* A store among the threads of one process. */
PHX_API phx_status phx_store_memory(phx_store **out);
/* A store in a file that all ranks see. It is made with mode 0600 if it is not there, and its user removes it. */
PHX_API phx_status phx_store_file(const char *path, phx_store **out);
/* A store that others reach by TCP. Binds to bind_address only ("127.0.0.1", "::1", ...). *port: in, the wish (0 =
 * any); out, the port bound. Only clients with the same token are served. */
PHX_API phx_status phx_store_tcp_serve(const char *bind_address, const void *token, size_t token_size, uint16_t *port,
                                       phx_store **out);
/* Waits for the server. PHX_ERR_PERMISSION: it has another token. */
PHX_API phx_status phx_store_tcp_connect(const char *address, uint16_t port, const void *token, size_t token_size,
                                         int64_t timeout_ms, phx_store **out);
/* A view of a store whose keys all begin with `prefix`; it retains base. */
PHX_API phx_status phx_store_prefix(phx_store *base, const char *prefix, phx_store **out);
/* Sets the value of a key, in place of one that is there. */
PHX_API phx_status phx_store_set(phx_store *store, const char *key, const void *value, size_t size);
/* Waits until the key is there. Copies min(capacity, length) bytes; *size is the length of the value. */
PHX_API phx_status phx_store_get(phx_store *store, const char *key, void *value, size_t capacity, size_t *size,
                                 int64_t timeout_ms);
/* Waits until all of `count` keys are there. */
PHX_API phx_status phx_store_wait(phx_store *store, const char *const *keys, size_t count, int64_t timeout_ms);
/* Adds to a decimal counter that starts at 0; *result is the new value. */
PHX_API phx_status phx_store_add(phx_store *store, const char *key, int64_t delta, int64_t *result);
/* PHX_ERR_NOT_FOUND when the store does not have the key. */
PHX_API phx_status phx_store_remove(phx_store *store, const char *key);
PHX_API phx_store *phx_store_retain(phx_store *store); /* one more release is needed; returns store */
PHX_API void phx_store_release(phx_store *store);      /* NULL is allowed, here and in every release */

/* ---- world -------------------------------------------------------------------------------------------------- */

/* A flag of a world: what was started moves on also while this rank computes, in the world's thread, which then looks
 * after it every millisecond. Without it only calls that wait, and phx_work_test, do that. */
enum { PHX_WORLD_PROGRESS = 1 };

typedef struct phx_world_params {
  uint32_t struct_size;
  uint32_t flags; /* 0, or PHX_WORLD_PROGRESS */
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
/* Local, never blocks: PHX_OK, or the first dead peer (PHX_ERR_PEER_DEAD) or revoked group (PHX_ERR_REVOKED). */
PHX_API phx_status phx_world_check(phx_world *world);
/* Whether a rank that this one has met, in any group of the world, is known to have died or left: PHX_ERR_PEER_DEAD,
 * with a text that names it and its process; else PHX_OK. For who waits for that rank by other means. Never blocks. */
PHX_API phx_status phx_world_check_peer(phx_world *world, int32_t rank);
/* The flight recorder as JSON: the last collectives of every rank of every group of this world, dead ranks included,
 * with times. Writes at most capacity bytes, the closing 0 included; *size = length of the whole, without it. Not
 * collective; also while calls are in progress. With the environment variable PHALANX_DUMP, each failure of a group
 * writes one into that folder. `phalanx trace` reads it. */
PHX_API phx_status phx_world_dump(phx_world *world, char *json, size_t capacity, size_t *size);
/* Facts that never change. Local. -1 (host: 0) for NULL, and in a forked child of the process that made the world. */
PHX_API int32_t phx_world_rank(const phx_world *world);
PHX_API int32_t phx_world_size(const phx_world *world);
PHX_API uint64_t phx_world_host_id(const phx_world *world);
/* The default of every later wait of this rank. Local. */
PHX_API phx_status phx_world_set_timeout(phx_world *world, int64_t timeout_ms);

/* ---- groups ------------------------------------------------------------------------------------------------- */

enum { PHX_GROUP_ACTIVE = 0, PHX_GROUP_FAILED = 1 };

typedef struct phx_group_info {
  uint32_t struct_size;
  int32_t group_rank;
  int32_t group_size;
  int32_t state;           /* PHX_GROUP_* */
  uint64_t id;             /* the same number on all ranks of the group */
  uint64_t sequence;       /* collectives issued by this rank on channel 0 */
  const char *name;        /* lives as long as the group */
  const int32_t *ranks;    /* group_size global ranks; lives as long as the group */
  uint32_t channels;       /* how many independent sequences of collectives the group has */
  uint32_t hosts;          /* on how many hosts its ranks are; with 1, they share memory */
  int32_t reduction_order; /* PHX_REDUCTION_ORDER_HOSTS or PHX_REDUCTION_ORDER_RANKS */
  uint32_t reserved;
} phx_group_info;

/* In which order a group on several hosts reduces each element. On one host it is always the order of the ranks. */
enum {
  PHX_REDUCTION_ORDER_DEFAULT = 0, /* what the environment variable PHALANX_REDUCTION_ORDER says, or else HOSTS */
  PHX_REDUCTION_ORDER_HOSTS = 1,   /* the ranks of each host, rounded, and then these results */
  PHX_REDUCTION_ORDER_RANKS = 2    /* all ranks, rounded once: the bits of one host, for more bytes between hosts */
};

/* How a group is made; the same on all its ranks. */
typedef struct phx_group_options {
  uint32_t struct_size;
  int32_t reduction_order; /* PHX_REDUCTION_ORDER_* */
} phx_group_options;

/* Collective among `ranks` (which must hold this rank; no duplicates), which may be on several hosts. Where they are
 * and a rank has no carrier for that (phalanx/carrier.h; UCX unless another one is set), every rank gets
 * PHX_ERR_UNSUPPORTED and a text that says what to install. A name may be used again; then it is a new group. The n-th
 * call of each rank for a name and ranks belongs with the n-th of the others, so one that fails on a rank fails on all,
 * at once and with that cause; it also fails for a rank that comes when the others have given up. The next call of all
 * makes the group. */
PHX_API phx_status phx_group_create(phx_world *world, const char *name, const int32_t *ranks, int32_t count,
                                    int64_t timeout_ms, phx_group **out);
/* The same with options. NULL: all defaults. Groups that are made from it (split, shrink) take them over. Options that
 * differ between ranks: PHX_ERR_MISMATCH on every rank. */
PHX_API phx_status phx_group_create_with_options(phx_world *world, const char *name, const int32_t *ranks,
                                                 int32_t count, const phx_group_options *options, int64_t timeout_ms,
                                                 phx_group **out);
/* Collective among the participants. A logical group that need not be part of the world: `group_size` participants meet
 * through `store` under `name`. group_rank: which of them this rank is. */
PHX_API phx_status phx_group_attach(phx_world *world, const char *name, int32_t group_rank, int32_t group_size,
                                    phx_store *store, int64_t timeout_ms, phx_group **out);
/* The same with options, as phx_group_create_with_options. */
PHX_API phx_status phx_group_attach_with_options(phx_world *world, const char *name, int32_t group_rank,
                                                 int32_t group_size, phx_store *store, const phx_group_options *options,
                                                 int64_t timeout_ms, phx_group **out);
/* Collective. Makes one group of the ranks that gave the same color, ordered by key and then by rank. A rank with a
 * negative color takes part, and gets NULL. name NULL: that of the group. Needs no store. */
PHX_API phx_status phx_group_split(phx_group *group, int32_t color, int32_t key, const char *name, int64_t timeout_ms,
                                   phx_group **out);
/* Collective among the ranks that are alive, also on a group that has failed: makes a group of them, in the old order.
 * A rank that does not call it within half of timeout_ms is left out as if it were dead; when it comes after all, it
 * gets PHX_ERR_REVOKED. name NULL: that of the group. Needs no store. */
PHX_API phx_status phx_group_shrink(phx_group *group, const char *name, int64_t timeout_ms, phx_group **out);
/* Collective on the living ranks, as shrink: *inout_bits becomes the bitwise AND of what the ranks that took part gave,
 * the same on all of them. alive: NULL, or group_size bytes: 1 for each rank that took part, 0 for the others. */
PHX_API phx_status phx_group_agree(phx_group *group, uint64_t *inout_bits, uint8_t *alive, int64_t timeout_ms);
/* This rank's number in the group, and how many ranks it has. Local. */
PHX_API int32_t phx_group_rank(const phx_group *group);
PHX_API int32_t phx_group_size(const phx_group *group);
/* What is known of the group on this rank. Local. */
PHX_API phx_status phx_group_get_info(phx_group *group, phx_group_info *out);
/* Every later call on the group, on every rank, fails with PHX_ERR_REVOKED and this reason. Not collective. */
PHX_API phx_status phx_group_revoke(phx_group *group, const char *reason);
/* Why the group has failed: the first cause. PHX_ERR_NOT_FOUND when it has not. Local. */
PHX_API phx_status phx_group_get_error(phx_group *group, phx_error_info *out);
/* For bindings that check arguments themselves: stands for a collective of that channel whose arguments were wrong on
 * this rank, with the reason for the other ranks, as if the core had refused it. Waits for no peer. */
PHX_API phx_status phx_group_refuse(phx_group *group, uint32_t channel, const char *why);
/* The default of every later wait of this rank on the group and on what is made on it: symmetric memory, works. 0: the
 * default of the world, as at first. Groups that are made from it (split, shrink) take it over. Not collective. */
PHX_API phx_status phx_group_set_timeout(phx_group *group, int64_t timeout_ms);
PHX_API phx_group *phx_group_retain(phx_group *group); /* one more release is needed; returns group */
PHX_API void phx_group_release(phx_group *group);      /* the last one frees it on this rank */

/* ---- allocators and memory ---------------------------------------------------------------------------------- */

enum { PHX_ALLOCATOR_HANDLE_BYTES = 64 };
enum { PHX_ALLOCATOR_DEVICE_MEMORY = 1 }; /* the processors of the host cannot read it */

/* Where the memory of one device type comes from. All functions are required. */
typedef struct phx_allocator_ops {
  uint32_t struct_size;
  uint32_t flags;   /* PHX_ALLOCATOR_* */
  const char *name; /* static */
  /* Zeroed memory of at least `size` bytes that export_handle can share. *cookie identifies it to the other calls. */
  phx_status (*alloc)(void *self, const phx_device *device, size_t size, void **pointer, uint64_t *cookie);
  phx_status (*free)(void *self, void *pointer, uint64_t cookie);
  /* What a peer needs to map the block: up to PHX_ALLOCATOR_HANDLE_BYTES of data and one file descriptor (borrowed; -1
   * = none).
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

/* Says where memory of a device type comes from, and takes that back. CPU (memfd) and, where there is a driver, CUDA
 * are registered in every new world. Registering again replaces; blocks made before stay valid. */
PHX_API phx_status phx_allocator_register(phx_world *world, phx_device_type device_type, const phx_allocator_ops *ops,
                                          void *self);
PHX_API phx_status phx_allocator_unregister(phx_world *world, phx_device_type device_type);

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

/* ---- symmetric memory --------------------------------------------------------------------------------------- */

typedef struct phx_symm_info {
  uint32_t struct_size;
  int32_t group_rank;
  int32_t group_size;
  uint32_t signal_channels;
  void *base;              /* this rank's block */
  size_t size;             /* bytes, the same on all ranks */
  size_t signal_pad_bytes; /* of one rank's pad: group_size * pad_stride 32-bit words */
  phx_device device;
  const char *group;   /* its name; lives as long as the handle */
  uint32_t pad_stride; /* words of a pad from those of one writer to those of the next: see phx_symm_signal_pad */
  uint32_t reserved;   /* 0 */
} phx_symm_info;

/* Collective: every rank of the group gives a block of its own (any pointer into it) of the same size.
 * Cached per (group, block): the same handle again, without communication. PHX_ERR_UNSUPPORTED where the ranks are on
 * several hosts, here and in phx_symm_alloc. */
PHX_API phx_status phx_symm_rendezvous(phx_group *group, void *pointer, int64_t timeout_ms, phx_symm **out);
/* Collective: a new block of `size` bytes, the same on all ranks, and its rendezvous in one. The block is in no table
 * of the world (phx_mem_find and phx_symm_find do not know it): it lives as long as the handle. device NULL = CPU. */
PHX_API phx_status phx_symm_alloc(phx_group *group, const phx_device *device, size_t size, int64_t timeout_ms,
                                  phx_symm **out);
PHX_API phx_status phx_symm_find(phx_group *group, const void *pointer, phx_symm **out); /* never communicates */
PHX_API phx_status phx_symm_get_info(phx_symm *symm, phx_symm_info *out);                /* what never changes */
/* Base of a rank's block as mapped here. NULL, with the error set, when group_rank is out of range. Lives as long as
 * the handle. */
PHX_API void *phx_symm_buffer(phx_symm *symm, int32_t group_rank);
/* The same part of every rank's block once more, one after another by group rank: *out is the start of one range of
 * group_size * bytes. No copy: what a rank writes to its block is there, so who reads the range after a barrier has
 * gathered without moving anything. phx_symm_all_gather into the range is such a barrier, and compares the calls.
 *
 * Local. offset and bytes must be multiples of the page size (4096 on x86-64); a part may end behind the block with the
 * block's last page. Host memory of shared pages only, such as phalanx's own. A part that is mapped already gives the
 * same range. It lives until phx_symm_unmap_gathered was called as often, or as long as the handle; the last few stay
 * mapped for the next use. */
PHX_API phx_status phx_symm_map_gathered(phx_symm *symm, size_t offset, size_t bytes, void **out);
PHX_API phx_status phx_symm_unmap_gathered(phx_symm *symm, void *pointer); /* PHX_ERR_NOT_FOUND: no such range */
/* A rank's signal pad as mapped here: word [r * pad_stride + channel] is written only by group rank r, holds a count
 * that only grows (modulo 2^32), and is zero when the handle appears. No two writers share a cache line. put_signal and
 * wait_signal use the same words: use a channel either through them or by hand, not both. NULL, with the error set,
 * when group_rank is out of range. Lives as long as the handle. Local. */
PHX_API uint32_t *phx_symm_signal_pad(phx_symm *symm, int32_t group_rank);
/* One signal from this rank to a peer. Writes made before put_signal are visible after the matching wait_signal.
 * put never blocks. A wait that failed took no signal and may be tried again. */
PHX_API phx_status phx_symm_put_signal(phx_symm *symm, int32_t group_rank, uint32_t channel);
PHX_API phx_status phx_symm_wait_signal(phx_symm *symm, int32_t group_rank, uint32_t channel, int64_t timeout_ms);
/* Collective; channels are independent of each other and of the signals. One that timed out may be tried again: it goes
 * on waiting for the same barrier. */
PHX_API phx_status phx_symm_barrier(phx_symm *symm, uint32_t channel, int64_t timeout_ms);
/* What a kernel needs to use the memory of all ranks by itself: see phalanx/device.h. Lives as long as the handle. */
typedef struct phx_team {
  uint32_t struct_size;
  int32_t group_rank;
  int32_t group_size;
  uint32_t channels;     /* of each pad */
  uint32_t pad_stride;   /* words of a pad from those of one writer to those of the next; at least `channels` */
  uint32_t reserved;     /* 0 */
  void *const *buffers;  /* group_size pointers: each rank's block */
  uint32_t *const *pads; /* likewise: each rank's signal pad */
  void *multicast;       /* all blocks at once; NULL where the device has no such thing */
  size_t bytes;          /* of each block */
  const int32_t *failed; /* group_size words: not 0 once it is of no use to wait for that rank */
} phx_team;
PHX_API phx_status phx_symm_get_team(phx_symm *symm, phx_team *out); /* local */
PHX_API phx_symm *phx_symm_retain(phx_symm *symm);                   /* one more release is needed; returns symm */
PHX_API void phx_symm_release(phx_symm *symm); /* the last one unmaps the blocks of the other ranks */

/* ---- windows ------------------------------------------------------------------------------------------------ */

/* Collective: every rank offers memory, in which the others then write and read without a call on its side. The ranks
 * may be on several hosts. The memory is from phx_mem_alloc: of the host, and in blocks of one size on all ranks of a
 * host; `bytes` may differ. base: where the window of this rank begins. memory: the world in which it was allocated.
 * NULL: that of the group.
 *
 * Within a host the memory is mapped. Between hosts the carrier moves the data, and a thread of the target serves what
 * comes: any that waits for something, or else that of its world. The window keeps the block. */
PHX_API phx_status phx_window_create(phx_group *group, phx_world *memory, void *base, size_t bytes, int64_t timeout_ms,
                                     phx_window **out);
/* Writes into the window of a rank. data: what is written. It may be changed when this returns; the other side may have
 * it later, see phx_window_flush. signal: if it is not 0, one signal is counted there after the data. What one rank
 * puts takes effect in the order of its calls. bytes 0: the signal alone. A put or get between hosts that fails in the
 * middle, such as by its timeout, revokes the group; arguments out of range do not. */
PHX_API phx_status phx_window_put(phx_window *window, int32_t group_rank, size_t offset, const void *data, size_t bytes,
                                  int32_t signal, int64_t timeout_ms);
/* Reads from the window of a rank, after what this rank has put there. data: where it goes. PHX_ERR_NOT_FOUND: that
 * rank, on another host, has released it. */
PHX_API phx_status phx_window_get(phx_window *window, int32_t group_rank, size_t offset, void *data, size_t bytes,
                                  int64_t timeout_ms);
/* Takes one signal of a rank, and waits for it. What that rank has put before it counted the signal is visible then. A
 * wait that failed took no signal and may be tried again. */
PHX_API phx_status phx_window_wait_signal(phx_window *window, int32_t group_rank, int64_t timeout_ms);
/* *out: how many signals of a rank have come and were not taken. Never waits. */
PHX_API phx_status phx_window_get_signals(phx_window *window, int32_t group_rank, uint32_t *out);
/* Waits until everything that this rank has put, into any window of the group, is in place. */
PHX_API phx_status phx_window_flush(phx_window *window, int64_t timeout_ms);
/* The window of a rank as mapped here. NULL, with the error set, for a rank of another host (PHX_ERR_UNSUPPORTED) and
 * when group_rank is out of range. Lives as long as the handle. */
PHX_API void *phx_window_memory(phx_window *window, int32_t group_rank);
/* Not collective: what others put from then on is dropped. To have all of it, flush on all ranks and meet in a barrier
 * before. */
PHX_API void phx_window_release(phx_window *window);

/* ---- collectives -------------------------------------------------------------------------------------------- */

/* Where the data of a call lie on a GPU, and on which stream it goes: phalanx/cuda.h. */
typedef struct phx_gpu_options phx_gpu_options;

/* How a call is made. NULL wherever it is asked for means PHX_OPTIONS_INIT: all defaults. */
typedef struct phx_options {
  uint32_t struct_size;
  uint32_t flags;     /* 0; phalanx/tuning.h has some */
  phx_algo algo;      /* the same on all ranks */
  uint32_t channel;   /* below phx_group_info.channels. Collectives of one channel are issued in one order on all
                       * ranks; those of different channels are independent: threads can have one each. */
  int64_t timeout_ms; /* of the whole operation, start and wait each */
  double scale;       /* of PHX_OP_PREMUL_SUM, the same on all ranks; 1.0 in PHX_OPTIONS_INIT */
  const phx_gpu_options *gpu; /* NULL: data in memory of the host. Read before the call returns. */
} phx_options;

/* All of these are collective. `count` is in elements.
 *
 *   - With work == NULL the call returns when it is complete. Otherwise it returns a handle, at once: any number may be
 *     in flight, on any number of groups. Then `out` must stay valid and unread, and `in` valid and unchanged, until
 *     phx_work_wait. What was started moves on inside every call of this rank that waits, and in phx_work_test.
 *   - in == out is allowed where the two have the same size; other overlaps are errors.
 *   - After PHX_ERR_TIMEOUT, PHX_ERR_PEER_DEAD or PHX_ERR_MISMATCH the contents of `out` are unspecified and the group
 *     is revoked. (Only all_to_all_v, whose counts every rank can compare before data moves, fails on all ranks and
 *     leaves the group usable.)
 *   - Lists of counts are read before the call returns.
 *
 * Inputs that lie in symmetric memory may be read there by the peers instead of being copied; the results are the same.
 * docs/explanation/algorithms.md says when, and docs/howto/gpu.md what differs on memory of GPUs. */

/* Waits until every rank has come here. Moves nothing. */
PHX_API phx_status phx_barrier(phx_group *group, const phx_options *options, phx_work **work);
/* out[i] becomes the reduction of all ranks' in[i]. in and out: count elements; in == out is allowed. */
PHX_API phx_status phx_all_reduce(phx_group *group, const void *in, void *out, size_t count, phx_dtype dtype, phx_op op,
                                  const phx_options *options, phx_work **work);
/* `out` becomes all ranks' inputs, by group rank. in: count elements; out: group_size * count. */
PHX_API phx_status phx_all_gather(phx_group *group, const void *in, void *out, size_t count, phx_dtype dtype,
                                  const phx_options *options, phx_work **work);
/* The same with inputs of different sizes: counts[j] elements come from group rank j; the same list on all ranks. The
 * blocks lie one after another in `out`. */
PHX_API phx_status phx_all_gather_v(phx_group *group, const void *in, void *out, const size_t *counts, phx_dtype dtype,
                                    const phx_options *options, phx_work **work);
/* Reduces all ranks' inputs; group rank r gets part r of the result. in: group_size * count elements; out: count. */
PHX_API phx_status phx_reduce_scatter(phx_group *group, const void *in, void *out, size_t count, phx_dtype dtype,
                                      phx_op op, const phx_options *options, phx_work **work);
/* The same with parts of different sizes: counts[j] elements go to group rank j; the same list on all ranks. The blocks
 * lie one after another in `in`. */
PHX_API phx_status phx_reduce_scatter_v(phx_group *group, const void *in, void *out, const size_t *counts,
                                        phx_dtype dtype, phx_op op, const phx_options *options, phx_work **work);
/* Block j of `in` goes to group rank j; block j of `out` comes from there. in and out: group_size * count elements. */
PHX_API phx_status phx_all_to_all(phx_group *group, const void *in, void *out, size_t count, phx_dtype dtype,
                                  const phx_options *options, phx_work **work);
/* The same with blocks of different sizes: in_counts[j] here must equal out_counts[this rank] on rank j. Blocks lie one
 * after another. PHX_ERR_MISMATCH on every rank, and the group stays usable, when counts do not agree; those of two
 * ranks on different hosts revoke it. */
PHX_API phx_status phx_all_to_all_v(phx_group *group, const void *in, const size_t *in_counts, void *out,
                                    const size_t *out_counts, phx_dtype dtype, const phx_options *options,
                                    phx_work **work);
/* `buffer` becomes what it is on the root. count elements. */
PHX_API phx_status phx_broadcast(phx_group *group, void *buffer, size_t count, phx_dtype dtype, int32_t root_group_rank,
                                 const phx_options *options, phx_work **work);
/* As all_reduce, but `out` is written on the root only, and may be NULL elsewhere. */
PHX_API phx_status phx_reduce(phx_group *group, const void *in, void *out, size_t count, phx_dtype dtype, phx_op op,
                              int32_t root_group_rank, const phx_options *options, phx_work **work);
/* As all_gather, but out: group_size * count elements on the root; elsewhere NULL is allowed. */
PHX_API phx_status phx_gather(phx_group *group, const void *in, void *out, size_t count, phx_dtype dtype,
                              int32_t root_group_rank, const phx_options *options, phx_work **work);
/* Block r of the root's `in` goes to group rank r. in: group_size * count elements on the root, NULL is allowed
 * elsewhere; out: count. */
PHX_API phx_status phx_scatter(phx_group *group, const void *in, void *out, size_t count, phx_dtype dtype,
                               int32_t root_group_rank, const phx_options *options, phx_work **work);

/* One rank's block of a list: `count` elements at `data`. With row != 0 they lie in rows of `row` elements, which begin
 * `stride` >= `row` elements apart; the last row may be shorter. */
typedef struct phx_block {
  void *data;
  size_t count;
  size_t row;    /* 0: all elements lie side by side */
  size_t stride; /* 0 with row == 0 */
} phx_block;

/* The collectives above with a block for each group rank, group_size of them, that lies where the caller has it:
 * nothing is copied on the way that the plain form would not copy. Blocks of an input are not written, and may be the
 * same memory; no block of an output may overlap another one or an input, but for the input of all_gather and gather at
 * this rank's block, and the output of reduce_scatter and scatter at this rank's. The list is read before the call
 * returns. Ranks may differ in which form of a collective they call, and in rows and strides. In memory of the host
 * only. */

/* out[j] becomes the input of group rank j, which has out[j].count elements: the same counts on all ranks, equal (as
 * all_gather) or not (as all_gather_v). in: out[this rank].count elements. */
PHX_API phx_status phx_all_gather_blocks(phx_group *group, const void *in, const phx_block *out, phx_dtype dtype,
                                         const phx_options *options, phx_work **work);
/* Group rank r gets the reduction of all ranks' in[r]; the same counts on all ranks, equal (as reduce_scatter) or not
 * (as reduce_scatter_v). out: in[this rank].count elements. */
PHX_API phx_status phx_reduce_scatter_blocks(phx_group *group, const phx_block *in, void *out, phx_dtype dtype,
                                             phx_op op, const phx_options *options, phx_work **work);
/* in[j] goes to group rank j, and out[j] comes from there, as in all_to_all_v. */
PHX_API phx_status phx_all_to_all_blocks(phx_group *group, const phx_block *in, const phx_block *out, phx_dtype dtype,
                                         const phx_options *options, phx_work **work);
/* As gather and scatter, with `count` elements in every block; the list is the root's, and may be NULL elsewhere. */
PHX_API phx_status phx_gather_blocks(phx_group *group, const void *in, const phx_block *out, size_t count,
                                     phx_dtype dtype, int32_t root_group_rank, const phx_options *options,
                                     phx_work **work);
PHX_API phx_status phx_scatter_blocks(phx_group *group, const phx_block *in, void *out, size_t count, phx_dtype dtype,
                                      int32_t root_group_rank, const phx_options *options, phx_work **work);

/* One call of several: the arguments of the function of that name. Later versions may add kinds and fields. */
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
  phx_dtype dtype;
  phx_op op;               /* 0 where there is none */
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
 * after some of these have been received. */
PHX_API phx_status phx_send(phx_group *group, const void *in, size_t count, phx_dtype dtype, int32_t peer_group_rank,
                            uint32_t tag, const phx_options *options, phx_work **work);
PHX_API phx_status phx_recv(phx_group *group, void *out, size_t count, phx_dtype dtype, int32_t peer_group_rank,
                            uint32_t tag, const phx_options *options, phx_work **work);
/* One message of several: the arguments of phx_send or phx_recv. */
enum { PHX_MESSAGE_SEND = 1, PHX_MESSAGE_RECV = 2 };
typedef struct phx_message {
  uint32_t struct_size; /* of the first one is the distance from one to the next */
  int32_t kind;         /* PHX_MESSAGE_* */
  void *buffer;         /* of a send it is only read */
  size_t count;
  phx_dtype dtype;
  int32_t peer_group_rank;
  uint32_t tag;
  uint32_t flags; /* 0 */
} phx_message;
/* Several messages at once, so that the order of sends and receives does not matter; what two ranks send each other in
 * one direction keeps its order. Returns when all are complete. No buffer that is received into may overlap another. */
PHX_API phx_status phx_messages(phx_group *group, const phx_message *messages, size_t count,
                                const phx_options *options);

/* ---- collectives on symmetric memory ------------------------------------------------------------------------- */

/* The collectives above with the input at `offset` bytes into the symmetric block of every rank, the same offset on
 * all: peers read it there, with no copy into a staging area where that is faster. `offset` is a multiple of the size
 * of an element. `out` is ordinary memory, or, for all_reduce, this rank's own block at the same offset: in place; or,
 * for all_gather, on all ranks the range that phx_symm_map_gathered made of just these bytes: then nothing moves, and
 * the ranks only meet. Sizes, counts and errors are as above. */
PHX_API phx_status phx_symm_all_reduce(phx_symm *symm, size_t offset, void *out, size_t count, phx_dtype dtype,
                                       phx_op op, const phx_options *options, phx_work **work);
PHX_API phx_status phx_symm_all_gather(phx_symm *symm, size_t offset, void *out, size_t count, phx_dtype dtype,
                                       const phx_options *options, phx_work **work);
PHX_API phx_status phx_symm_all_gather_v(phx_symm *symm, size_t offset, void *out, const size_t *counts,
                                         phx_dtype dtype, const phx_options *options, phx_work **work);
PHX_API phx_status phx_symm_reduce_scatter(phx_symm *symm, size_t offset, void *out, size_t count, phx_dtype dtype,
                                           phx_op op, const phx_options *options, phx_work **work);
PHX_API phx_status phx_symm_reduce_scatter_v(phx_symm *symm, size_t offset, void *out, const size_t *counts,
                                             phx_dtype dtype, phx_op op, const phx_options *options, phx_work **work);
PHX_API phx_status phx_symm_all_to_all(phx_symm *symm, size_t offset, void *out, size_t count, phx_dtype dtype,
                                       const phx_options *options, phx_work **work);
PHX_API phx_status phx_symm_all_to_all_v(phx_symm *symm, size_t offset, const size_t *in_counts, void *out,
                                         const size_t *out_counts, phx_dtype dtype, const phx_options *options,
                                         phx_work **work);
/* In place on every rank. */
PHX_API phx_status phx_symm_broadcast(phx_symm *symm, size_t offset, size_t count, phx_dtype dtype,
                                      int32_t root_group_rank, const phx_options *options, phx_work **work);
PHX_API phx_status phx_symm_reduce(phx_symm *symm, size_t offset, void *out, size_t count, phx_dtype dtype, phx_op op,
                                   int32_t root_group_rank, const phx_options *options, phx_work **work);
PHX_API phx_status phx_symm_gather(phx_symm *symm, size_t offset, void *out, size_t count, phx_dtype dtype,
                                   int32_t root_group_rank, const phx_options *options, phx_work **work);
PHX_API phx_status phx_symm_scatter(phx_symm *symm, size_t offset, void *out, size_t count, phx_dtype dtype,
                                    int32_t root_group_rank, const phx_options *options, phx_work **work);

/* ---- work: what was started ---------------------------------------------------------------------------------- */

/* All of these are local. A collective or message that was started without error stays one: its failure is the result
 * of wait and test, again and again, until the handle is released. */

/* PHX_OK: complete; PHX_IN_PROGRESS; or the error of the operation. Never blocks. */
PHX_API phx_status phx_work_test(phx_work *work);
/* Waits until it is complete, or has failed. After PHX_ERR_TIMEOUT the work and its group have failed. */
PHX_API phx_status phx_work_wait(phx_work *work, int64_t timeout_ms);
/* Waits until one of `count` works, of any groups, is complete or has failed; *index says which, and the result is what
 * phx_work_test gives for it. NULL entries are passed over. PHX_ERR_TIMEOUT, with *index untouched, revokes nothing. */
PHX_API phx_status phx_work_wait_any(phx_work *const *works, size_t count, int64_t timeout_ms, size_t *index);
/* For a caller that looks with phx_work_test and keeps the time itself: what phx_work_wait does when its time is over.
 * Work that is not complete fails at once with PHX_ERR_TIMEOUT; the error names timeout_ms. */
PHX_API phx_status phx_work_expire(phx_work *work, int64_t timeout_ms);
/* Why it has failed; PHX_ERR_NOT_FOUND when it has not. */
PHX_API phx_status phx_work_get_error(phx_work *work, phx_error_info *out);
/* The group rank from which a completed receive came; PHX_ERR_NOT_FOUND for other work. */
PHX_API phx_status phx_work_get_source(phx_work *work, int32_t *group_rank);
PHX_API phx_work *phx_work_retain(phx_work *work); /* one more release is needed; returns work */
/* An operation that is not complete goes on in later calls on the group, and needs its buffers until then. */
PHX_API void phx_work_release(phx_work *work);

/* cdef: end */

/* ---- initializers -------------------------------------------------------------------------------------------- */

/* Each gives a struct its struct_size and its defaults: `phx_options options = PHX_OPTIONS_INIT;`. */
#define PHX_ERROR_INFO_INIT \
  { sizeof(phx_error_info), 0, -1, -1, 0, 0, 0, NULL, NULL, NULL }
#define PHX_STORE_OPS_INIT \
  { sizeof(phx_store_ops), 0, NULL, NULL, NULL, NULL, NULL, NULL }
#define PHX_WORLD_PARAMS_INIT \
  { sizeof(phx_world_params), 0, 0, 1, NULL, 0, 0, 0, 0, 0, 0, 0, NULL }
#define PHX_GROUP_INFO_INIT \
  { sizeof(phx_group_info), 0, 0, 0, 0, 0, NULL, NULL, 0, 0, 0, 0 }
#define PHX_GROUP_OPTIONS_INIT \
  { sizeof(phx_group_options), PHX_REDUCTION_ORDER_DEFAULT }
#define PHX_ALLOCATOR_OPS_INIT \
  { sizeof(phx_allocator_ops), 0, NULL, NULL, NULL, NULL, NULL, NULL, NULL }
#define PHX_MEM_INFO_INIT                               \
  {                                                     \
    sizeof(phx_mem_info), 0, NULL, 0, 0, 0, 0, { 0, 0 } \
  }
#define PHX_SYMM_INFO_INIT \
  { sizeof(phx_symm_info), 0, 0, 0, NULL, 0, 0, {0, 0}, NULL, 0, 0 }
#define PHX_TEAM_INIT \
  { sizeof(phx_team), 0, 0, 0, 0, 0, NULL, NULL, NULL, 0, NULL }
#define PHX_OPTIONS_INIT \
  { sizeof(phx_options), 0, PHX_ALGO_AUTO, 0, 0, 1.0, NULL }
#define PHX_BLOCK_INIT \
  { NULL, 0, 0, 0 }
#define PHX_CALL_INIT \
  { sizeof(phx_call), 0, NULL, NULL, 0, 0, 0, 0, 0 }
#define PHX_MESSAGE_INIT \
  { sizeof(phx_message), 0, NULL, 0, 0, 0, 0, 0 }

#ifdef __cplusplus
}
#endif
#endif
