/* phalanx/cuda.h: EXPERIMENTAL, no part of ABI version 1; it may change in every version.
 * Memory and streams of NVIDIA GPUs. */
#ifndef PHALANX_CUDA_H
#define PHALANX_CUDA_H

#include "phalanx/phalanx.h"

#ifdef __cplusplus
extern "C" {
#endif

/* cdef: begin */

/* ---- calls on memory of a GPU ------------------------------------------------------------------------------- */

/* phx_options.gpu of a call whose data lie on a GPU. For a collective on symmetric memory the block says where that
 * is; then only `stream` is looked at. */
struct phx_gpu_options {
  uint32_t struct_size;
  uint32_t flags;    /* 0 */
  phx_device device; /* where `in` and `out` lie: {PHX_DEVICE_CUDA, index}, the GPU of this rank; type 0: the host */
  void *stream;      /* CUstream (cudaStream_t) on which the call puts its work; NULL: the default stream */
};

/* For phx_options.algo: by NVLink switches, on symmetric memory of GPUs; see there. */
enum { PHX_ALGO_MULTIMEM = 3 };

/* Collectives on ordinary memory of a GPU (work == NULL): the call puts copies and kernels on the stream, of the GPU's
 * primary context, and returns. All of these on one group run in one order on all ranks, whatever their channel; on one
 * rank, calls on other streams wait for those before them, except calls that are captured. phx_barrier is a barrier of
 * streams: what precedes it on any rank's stream is done when what follows it on another's begins.
 *
 * An input that lies in memory which has had a rendezvous with this group, one of the last 64, is read where it is by
 * the peers, on the ranks where that holds, at whatever offsets; phx_group_stats.zero_copies counts those of this rank.
 * Free such memory on all ranks or on none. This does not apply to all_to_all_v, to an all_reduce in place that is not
 * large, and to calls with another algo than PHX_ALGO_AUTO. All other inputs, except small ones of all_reduce, are
 * copied into a workspace of the group on that GPU. The first call makes it, and one that needs more than any before
 * makes a larger one: then the call waits for the other ranks' hosts, and is PHX_ERR_UNSUPPORTED while the stream is
 * captured (make one call of that size before the capture). Workspaces last as long as the group, so captured calls may
 * be replayed as long as that, as often as on the other ranks. What is said below of symmetric memory of a GPU holds
 * here as well: timeouts, dead peers, calls that differ, bits.
 *
 * Collectives on symmetric memory of a GPU (work == NULL): the call puts a kernel on the stream, of the GPU's primary
 * context, and returns. Collectives of one block run in one order on all ranks; of all blocks whose kernels may wait at
 * the same time, one stream keeps them so. A kernel that waits longer than timeout_ms, or whose peer dies, ends; the
 * next call on the group, or phx_group_get_error, tells why, and `out` is then unspecified. Where calls differ, the
 * rank that comes later gets PHX_ERR_MISMATCH, which names both calls, and the kernels of the others end; where the
 * counts of all_to_all_v differ, the rank that expected others is told so as after a timeout. A stream that is being
 * captured gets the kernel into its graph, which may be replayed as often as on the other ranks. The bits are those of
 * the host. PHX_ALGO_ONE_SHOT and PHX_ALGO_TWO_SHOT keep a small all_reduce from being sent together with flags.
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

/* Messages on memory of a GPU (the same GPU in all calls on the group; work == NULL): the call puts a kernel on the
 * stream, of the GPU's primary context, and returns. The n-th send of a rank to another meets the n-th receive of that
 * one from it, whatever the tags: those that differ, in dtype, count or tag, end the kernels; the next call on the
 * group raises PHX_ERR_MISMATCH, and other failures: see collectives on symmetric memory of a GPU. No PHX_ANY_RANK. A
 * send of up to 3.9 MiB (less with small staging_bytes) is through before it is received, if those before it to that
 * rank have been; so are the first four in a row of at most 7.8 KiB. Calls between two ranks in one direction keep
 * their order on any streams, but for what is captured; others do not wait for each other. A rank's first message makes
 * memory, 4 MiB for each rank of the group. The first one to a rank, and from it, cannot be captured; the first receive
 * from a rank waits, on the host, for that one's first message on the group, to or from anyone. phx_messages puts one
 * kernel for all of its messages on the stream: at most 96 messages, to or from at most 32 ranks in one direction. */

/* ---- memory beyond the host ---------------------------------------------------------------------------------- */

enum { PHX_FABRIC_HANDLE_BYTES = 96 };

/* Not collective. Memory of GPUs beyond the host: a block of phalanx's CUDA allocator as bytes that may be sent by any
 * means to a process, on this host or another, whose GPU is in the same NVLink domain (and IMEX channel). `pointer`:
 * any in the block; `handle`: PHX_FABRIC_HANDLE_BYTES of room. Whoever has these bytes can map the block; they are of
 * use until it is freed. PHX_ERR_UNSUPPORTED, with the reason, where the GPU or its driver has no fabric handles. */
PHX_API phx_status phx_mem_export_fabric(phx_world *world, const void *pointer, void *handle);
/* Not collective. Maps the block that a handle stands for on a GPU of this rank (device; its type must be
 * PHX_DEVICE_CUDA). It is a block of this world then: phx_mem_find says its size, phx_mem_free unmaps it; the memory
 * lives as long as the last mapping. It has no signals and cannot be offered to a rendezvous, as it is another rank's.
 */
PHX_API phx_status phx_mem_import_fabric(phx_world *world, const phx_device *device, const void *handle,
                                         size_t handle_size, void **out);

/* ---- signals on streams -------------------------------------------------------------------------------------- */

/* phx_symm_put_signal, wait_signal and barrier for memory of a GPU, put on a stream (CUstream, cudaStream_t) of its
 * primary context: they return at once. The signal pad of such memory lies on the GPU, for kernels.
 * What precedes a put on its stream is visible to what follows the matching wait on the other rank's. The words are
 * those of that pad, so a put of the host is not one of these: the host's put_signal, wait_signal and barrier use words
 * of their own. A wait or barrier that lasts longer than
 * timeout_ms, or whose peer dies, ends; then the next call on the group, or phx_group_get_error, tells why. */
PHX_API phx_status phx_symm_enqueue_put_signal(phx_symm *symm, int32_t group_rank, uint32_t channel, void *stream);
PHX_API phx_status phx_symm_enqueue_wait_signal(phx_symm *symm, int32_t group_rank, uint32_t channel,
                                                int64_t timeout_ms, void *stream);
PHX_API phx_status phx_symm_enqueue_barrier(phx_symm *symm, uint32_t channel, int64_t timeout_ms, void *stream);

/* cdef: end */

#define PHX_GPU_OPTIONS_INIT \
  { sizeof(phx_gpu_options), 0, {0, 0}, NULL }

#ifdef __cplusplus
}
#endif
#endif
