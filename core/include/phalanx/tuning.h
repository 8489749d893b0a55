/* phalanx/tuning.h: EXPERIMENTAL, not part of ABI version 1; it may change in every version.
 * Algorithms, where one takes over from another, and environment variables.
 *
 * Parameters, where a comment does not say more:
 *
 *   - tuning: the values to set.
 *   - path: the table to write, or NULL. */
#ifndef PHALANX_TUNING_H
#define PHALANX_TUNING_H

#include "phalanx/phalanx.h"

#ifdef __cplusplus
extern "C" {
#endif

/* cdef: begin */

/* For phx_options.algo, the same on all ranks. all_reduce: ONE_SHOT, every rank reads all inputs; TWO_SHOT, each rank
 * sums a part and passes it on. On symmetric memory both also keep inputs from being copied, and say for reduce, and
 * for an all_reduce that is not in place, which of the two it is; phalanx/cuda.h says what they mean on GPUs. */
enum { PHX_ALGO_ONE_SHOT = 1, PHX_ALGO_TWO_SHOT = 2 };

/* For phx_options.flags.
 *
 *   - PHX_OPTION_COMPARES_GRAPHS: of an all_gather by which the ranks compare graphs that they have newly compiled. The
 *     error of a rank that makes another call meanwhile says so.
 *   - PHX_OPTION_BUFFERED: of a start. What the call has not taken of its input when it returns it copies, if the input
 *     has at most phx_group_stats.eager_bytes: the caller may then change it at once. Each rank may decide for itself.
 *     Not for phx_symm_*, whose inputs peers read where they lie, and not on GPUs: PHX_ERR_INVALID.
 */
enum { PHX_OPTION_COMPARES_GRAPHS = 1, PHX_OPTION_BUFFERED = 2 };

/* What a group has done, and the limits that it has. */
typedef struct phx_group_stats {
  uint32_t struct_size;
  uint32_t reserved;    /* 0 */
  uint64_t eager_bytes; /* PHX_OPTION_BUFFERED copies inputs of at most so many bytes */
  uint64_t zero_copies; /* collectives on ordinary pointers that read all inputs where they lie, in symmetric memory:
                         * see docs/explanation/algorithms.md */
} phx_group_stats;
PHX_API phx_status phx_group_get_stats(phx_group *group, phx_group_stats *out); /* local */
/* 1 if a blocking collective of `group` with these bytes as its input would read them where they lie, as far as this
 * rank is concerned; else 0. NULL: whether it might read as many bytes of another rank there. Never communicates. */
PHX_API int32_t phx_symm_covers(phx_group *group, const void *pointer, size_t size);

/* Where one algorithm takes over from another, for groups of one size on this host. All ranks of a group use those of
 * its group rank 0. `phalanx tune` measures them and writes the file; the built-in ones are good without it. */
typedef struct phx_tuning {
  uint32_t struct_size;
  uint32_t flags;           /* 0 */
  uint64_t one_shot_bytes;  /* all_reduce: the largest input for which every rank reduces everything */
  uint64_t chunk_bytes;     /* of the larger ones: what moves between two barriers; at most slot_bytes */
  uint64_t streaming_bytes; /* results from this size on are written around the cache; from a quarter of it to below
                             * its double, each rank finds by its calls what is faster */
  uint64_t push_bytes;      /* symmetric all_reduce in place, more than 4 ranks: the piece that is pushed to the peers
                             * while it is in the cache. Fewer ranks write sums everywhere at once. */
} phx_tuning;
PHX_API phx_status phx_group_get_tuning(phx_group *group, phx_tuning *out);
/* Collective; group rank 0's values hold. Zero means the built-in value. */
PHX_API phx_status phx_group_set_tuning(phx_group *group, const phx_tuning *tuning, int64_t timeout_ms);
/* Not collective. Writes the group's values to the row for this host and this group size of the table that new groups
 * read. path NULL: $PHALANX_TUNING, else phalanx/tuning in the user's cache directory. */
PHX_API phx_status phx_group_save_tuning(phx_group *group, const char *path);
PHX_API const char *phx_tuning_host(void); /* static: what rows for this host have after "host=" */

/* The same for collectives on GPUs. A group takes them from the table at its first rendezvous of memory of GPUs (that
 * of the workspace of the first collective on ordinary memory is one): from group rank 0's row for the name of its GPU,
 * the size of the group, and whether ranks have a GPU in common or each has one of its own. Before that, and without
 * such a row, it has the built-in ones, which have not been measured. `phalanx tune --device cuda` measures them.
 * Sizes are at most 1 << 62, which no input has: from there on means never. */
typedef struct phx_gpu_tuning {
  uint32_t struct_size;
  uint32_t flags;           /* 0 */
  uint64_t line_bytes;      /* all_reduce: the largest input that is sent with flags; no more than the pads have room
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

/* Static: the environment variables that the library and the Python packages read. A line for each: its name, which
 * distribution reads it ("internal": only tests do), values, default and meaning, separated by tabs. */
PHX_API const char *phx_environment(void);

/* cdef: end */

#define PHX_GROUP_STATS_INIT \
  { sizeof(phx_group_stats), 0, 0, 0 }
#define PHX_TUNING_INIT \
  { sizeof(phx_tuning), 0, 0, 0, 0, 0 }
#define PHX_GPU_TUNING_INIT \
  { sizeof(phx_gpu_tuning), 0, 0, 0, 0, 0, 0 }

#ifdef __cplusplus
}
#endif
#endif
