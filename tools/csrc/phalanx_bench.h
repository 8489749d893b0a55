/* phalanx_bench.h: the timing loop of `phalanx bench`, as a library of its own (libphalanx_bench.so) that links to
 * nothing. It is no part of the C ABI of Phalanx: the Python package beside it is its only user.
 *
 * The same loop measures every library: a call is a function pointer and up to ten word-sized arguments. C99. */
#ifndef PHALANX_BENCH_H
#define PHALANX_BENCH_H

#include <stddef.h>
#include <stdint.h>

#define PHXB_API __attribute__((visibility("default")))

#ifdef __cplusplus
extern "C" {
#endif

enum { PHXB_MAX_ARGUMENTS = 10, PHXB_MAX_RANKS = 64 };

/* `function` must follow the C calling convention and take only integers and pointers; it may take fewer than ten.
 * Its result is an int: 0 is success. NULL: there is nothing to call. */
typedef struct phxb_call {
  void *function;
  uint64_t arguments[PHXB_MAX_ARGUMENTS];
} phxb_call;

enum {
  PHXB_ALL_REDUCE = 1,     /* in: count              out: count, sums */
  PHXB_ALL_GATHER = 2,     /* in: count              out: ranks * count */
  PHXB_REDUCE_SCATTER = 3, /* in: ranks * count      out: count, sums */
  PHXB_ALL_TO_ALL = 4,     /* in: ranks * count      out: ranks * count */
  PHXB_BROADCAST = 5,      /* in: count, at the root out: count; in == out on all ranks */
  PHXB_BARRIER = 6
};

enum { PHXB_BF16 = 2, PHXB_F32 = 3 }; /* the numbers of PHX_DTYPE_BF16 and PHX_DTYPE_F32 */

enum { PHXB_CORRUPT = 1 }; /* flips a bit of the last result of a round, so that a test sees that checking works */

/* One way to do one collective. Inputs are small integers made from (rank, element, iteration), so every sum is exact
 * in every dtype, and the result of one iteration is wrong for the next. */
typedef struct phxb_plan {
  uint32_t struct_size;
  int32_t collective;
  int32_t dtype;
  int32_t rank;
  int32_t ranks;
  int32_t root;
  uint32_t warm_up; /* calls before those that count */
  uint32_t calls;   /* that count */
  uint32_t flags;
  uint32_t gap;   /* elements between two blocks of `count` elements of an input or an output: those of a list */
  uint64_t count; /* elements, see the collective */
  void *in;
  void *out;
  phxb_call barrier; /* before and after each timed call, untimed */
  phxb_call timed;
} phxb_plan;

enum {
  PHXB_OK = 0,
  PHXB_BAD_PLAN = -1,
  PHXB_CALL_FAILED = -2,  /* `result` is what the call returned */
  PHXB_WRONG_RESULT = -3, /* `index`, `expected`, `seen` */
};

typedef struct phxb_failure {
  int32_t result;
  uint32_t call;
  uint64_t index;
  double expected;
  double seen;
} phxb_failure;

/* One round: warm_up + calls times { write the input anew; barrier; start the clock; call; stop the clock; barrier },
 * then the last result is compared with what it must be, element by element. `iteration` numbers the first call; all
 * ranks give the same, and never the same again. times_ns gets `calls` times. */
PHXB_API int32_t phxb_round(const phxb_plan *plan, uint64_t iteration, uint64_t *times_ns, phxb_failure *failure);

/* The parts of a round, for ways that C cannot call. phxb_fill writes nothing where this rank gives no input. */
PHXB_API int32_t phxb_fill(const phxb_plan *plan, uint64_t iteration);
PHXB_API int32_t phxb_check(const phxb_plan *plan, uint64_t iteration, phxb_failure *failure);

/* Anonymous memory whose pages are all there. NULL when there is none. */
PHXB_API void *phxb_alloc(size_t bytes);
PHXB_API void phxb_free(void *pointer, size_t bytes);

/* What two readings of the clock cost, in nanoseconds: part of every time. */
PHXB_API double phxb_clock_ns(void);

/* ---- what the machine can do: see probe.cpp ----
 *
 * `shared` is a zeroed mapping of phxb_probe_bytes() that all probing ranks have. The functions are collective among
 * ranks 0 .. ranks-1. cores: how many they share, rank i on the core i % cores, so that a rank that waits must give its
 * own away; 0: each has one of its own. */
typedef struct phxb_probe {
  uint32_t struct_size;
  int32_t rank;
  int32_t ranks;
  int32_t cores;
  void *shared;
} phxb_probe;

enum { PHXB_PROBE_CHUNK = 256 << 10, PHXB_PROBE_MAX = 64 << 20 };

PHXB_API size_t phxb_probe_bytes(int32_t ranks);
/* Nanoseconds from a store on rank 0 until rank 0 has seen rank 1's answer to it; ranks 0 and 1 only. */
PHXB_API double phxb_probe_round_trip(const phxb_probe *probe, uint32_t repeats);
/* Nanoseconds of a barrier of nothing but one flag for each rank, of many in a row. */
PHXB_API double phxb_probe_barrier(const phxb_probe *probe, uint32_t repeats);
/* Nanoseconds of one such barrier as a call is timed: alone, and on the slowest rank. Of ranks that arrive together:
 * the fastest tenth takes no longer. */
PHXB_API double phxb_probe_barrier_once(const phxb_probe *probe, uint32_t repeats);

enum {
  PHXB_STAGE = 0,         /* copy own private memory, just written, into the own staging chunk */
  PHXB_PULL_STAGED = 1,   /* copy the neighbour's staging chunk, just written, into private memory */
  PHXB_REDUCE_STAGED = 2, /* add the neighbour's staging chunk to private memory, into private memory */
  PHXB_PULL = 3,          /* copy from the neighbour's memory, all of it just written, into private memory */
  PHXB_REDUCE = 4,        /* add the neighbour's memory to the own shared memory, into private memory */
  PHXB_EXCHANGE = 5,      /* add the neighbour's memory to the own shared memory, the sum into both */
  PHXB_COPY = 6,          /* copy own private memory, just written, into private memory */
  PHXB_PROBE_KINDS = 7
};

/* Nanoseconds that this rank needs for moving `bytes` in each way, all ranks at the same time, waiting not counted:
 * the median of several turns, for the fastest of several loops. */
PHXB_API int32_t phxb_probe_move(const phxb_probe *probe, size_t bytes, double ns[PHXB_PROBE_KINDS]);

#ifdef __cplusplus
}
#endif
#endif
