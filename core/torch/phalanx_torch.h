/* phalanx_torch.h: libphalanx_torch.so, the ops torch.ops.phalanx.* over the C core, as a C program or Python sees it.
 *
 * Load the library after torch. Loading registers the ops (phxt_load_error says whether that worked). An op finds its
 * group by (context, group name), where the context is the thread's own and stands for one rank of the process:
 *
 *   phxt_group_add(0, "tp", group);
 *   torch.ops.phalanx.all_reduce(x, "sum", "tp")        from then on: the core
 *   torch.ops.phalanx.all_reduce(x, "sum", "world")     not added: torch.ops.phalanx_c10d.all_reduce, which a binding
 *                                                       implements by torch.distributed; same arguments, but each text
 *                                                       comes as a number that phxt_text turns back
 *
 * A collective may be pending when it returns, until wait_tensor. torch.ops.phalanx.blocking_all_reduce, and so on for
 * each of them, is complete when it returns: one op instead of two, for who has nothing to do meanwhile.
 *
 * torch.ops.phalanx_ordered has every collective again, for compiled graphs: complete on return unless `start` is true,
 * and with a tensor `order`, which each of them claims to write, so that a compiler keeps them in their order.
 *
 * On tensors of a GPU, of groups that serve it (phxt_group_serve), an op puts its work on torch's current stream and
 * returns: nothing waits on the host, and the op can be captured into a graph. What follows on that stream comes after
 * it. wait_tensor, and any op here that reads or writes the tensor, makes its own current stream wait for the one on
 * which it was written; torch's other ops do not. blocking_* and phalanx_ordered without `start` are for the stream
 * they are called on only. A result is allocated on the stream of the call: as any tensor of torch, one that is used
 * on another stream must be kept, or recorded there (record_stream). A peer that dies, or ranks that disagree, are an
 * error of the next call on the group.
 *
 * For compiled graphs: symm_arena(nbytes, plan, group, gpu=-1) returns a handle of an arena, symmetric memory of the
 * group that is at the same address in every call. The memory is on the host, or on a GPU, whose index may differ
 * between ranks; the handle is a tensor of the CPU in both cases. An arena belongs to a registered group of the
 * thread's context and to a plan, a text of parts between '|', the first of which is a name with a hash of the rest.
 * The first call, and one with more bytes than the arena has, is collective, and an error on every rank where plans or
 * sizes differ; other calls are local. arena_view makes a tensor in this rank's memory of the arena; its `gpu` must be
 * that of the arena, and tells compilers the device of the view. The arena goes with its group (phxt_group_remove); a
 * tensor keeps the memory that it lies in, also after that and after the arena grew. arena_release_ only tells a
 * compiler an order. mm_into_, bmm_into_ and addmm_into_ write a product into contiguous memory of the caller.
 *
 * Also on CPU: all_gather_mms(shard, bs, group_size, group) returns the products of all ranks' shards, one after
 * another, with each matrix of a list; mm_reduce_scatter(a, b, op, group_size, group, pieces) returns this rank's rows
 * of the reduced products. The ranks read each other's shards and products in place. Shards in symmetric memory that
 * has had a rendezvous with this group are not copied either; then this must hold on all ranks.
 *
 * Same rules as in phalanx.h: C99, statuses, cdef marks. An op that fails raises ValueError (an argument is wrong:
 * nothing was sent) or RuntimeError with the full text; phxt_last_status() and phxt_last_error() of the same thread say
 * which status it was, so that a binding can raise an exception class of its own.
 *
 * Parameters, where a comment does not say more:
 *
 *   - context: the number of a context.
 *   - name, group_name: the name by which ops find the group.
 *   - group_name_size: the bytes of that name.
 *   - reduce_op: the name of the reduction, such as "sum".
 *   - reduce_op_size: the bytes of that name.
 *   - numel: the number of elements.
 *   - storage: the first byte of a tensor's storage.
 *   - op: the name of an op, such as "all_reduce".
 *   - number: what the op was given.
 *   - serves: 1 or 0.
 *   - around: what is called in place of a kernel, or NULL.
 *   - end: what is called when a collective is complete.
 *   - device: the index of the GPU.
 *   - stream: the stream on which torch allocates. It is not looked at.
 *   - raise: raises an exception of Python.
 *   - *kept: three pointers, or NULL.
 *   - *type, *exception: become the type and the exception. */
#ifndef PHALANX_PHALANX_TORCH_H
#define PHALANX_PHALANX_TORCH_H

#include "phalanx/phalanx.h"

#define PHXT_ABI_VERSION 0 /* 0: still free to change; from 1 on only additions */

/* For phxt_group_add: a group that every thread finds by its name, unless its context has another of that name. */
#define PHXT_EVERY_CONTEXT UINT64_MAX

#ifdef __cplusplus
extern "C" {
#endif

/* cdef: begin */

PHX_API uint32_t phxt_abi_version(void);
PHX_API const char *phxt_version(void);    /* static */
PHX_API const char *phxt_load_error(void); /* NULL when the ops were registered; else why not. Static. */

/* The context of the calling thread, 0 at first. Ranks that are threads of one process take a context each. */
PHX_API void phxt_set_context(uint64_t context);
PHX_API uint64_t phxt_context(void);

/* Retains the group until it is removed. PHX_ERR_EXISTS when the context has the name already. */
PHX_API phx_status phxt_group_add(uint64_t context, const char *name, phx_group *group);
/* Work of the group that is still pending stays so, and can be waited for. PHX_ERR_NOT_FOUND when there is none. */
PHX_API phx_status phxt_group_remove(uint64_t context, const char *name);
/* Whether ops on tensors of a device (PHX_DEVICE_*) come to this group, or go to torch.distributed, as in a torch group
 * "cpu:gloo,cuda:phalanx". A group that was added serves the CPU alone. For PHX_DEVICE_CUDA the core must be able to
 * serve the ranks' GPUs, and every rank must say the same. PHX_ERR_NOT_FOUND when the group is unknown;
 * PHX_ERR_UNSUPPORTED when this torch does not tell its current stream. */
PHX_API phx_status phxt_group_serve(uint64_t context, const char *name, int32_t device_type, int32_t serves);
PHX_API int32_t phxt_group_has(uint64_t context, const char *name); /* 1 or 0 */

/* Collectives that were started and neither waited for nor found complete since. */
/* (Not those on GPUs: their streams are waited for.) */
PHX_API uint64_t phxt_pending_count(void);
/* 1 when something is pending on the storage at this address (its first byte: untyped_storage().data_ptr()), else 0. On
 * a GPU: when a stream has still to write it. */
PHX_API int32_t phxt_pending_has(const void *storage);
/* Waits for all that is pending on a storage: what wait_tensor does, but only for work of ours. On a GPU the current
 * stream waits, and the call returns at once. OK when there is nothing. The first error is returned, and the work is
 * gone from the table. timeout_ms 0 = the world's default. */
PHX_API phx_status phxt_wait_storage(const void *storage, int64_t timeout_ms);
/* Likewise for all pending work of a group: before the group is removed. */
PHX_API phx_status phxt_wait_group(uint64_t context, const char *name, int64_t timeout_ms);
/* Forgets completed work, which the table otherwise does by itself now and then; returns how much stays pending. */
PHX_API uint64_t phxt_sweep(void);

PHX_API uint64_t phxt_fallback_count(void); /* calls that went to phalanx_c10d */

/* The kernel of an op, with the arguments of torch's stable ABI: `stack` has the arguments, which it takes over, and
 * then the results. What the op would raise is its status, and phxt_last_error() the text; nothing is thrown. For code
 * made for the torch that runs, on tensors for which torch's dispatcher would call nothing else. NULL when there is no
 * such op; "all_reduce" names torch.ops.phalanx.all_reduce. */
typedef phx_status (*phxt_kernel)(uint64_t *stack, uint64_t inputs, uint64_t outputs);
PHX_API phxt_kernel phxt_kernel_of(const char *op);

/* For a binding that shows collectives to torch's profilers: from then on, `around` is called in place of the kernel of
 * each op on a group, in its threads, and must call the kernel with the same arguments and return its status; it must
 * not throw. NULL: not any more. Where the op leaves its collective pending, `end` is called with what `around` has put
 * into *span, once the collective is known to be complete, in any thread; else *span is left to `around`. */
typedef phx_status (*phxt_around)(const char *op, phxt_kernel kernel, uint64_t *stack, uint64_t inputs,
                                  uint64_t outputs, void **span);
PHX_API void phxt_set_around(phxt_around around, void (*end)(void *span));
/* The group of that name which ops of this thread use, retained (phx_group_release); NULL when there is none. */
PHX_API phx_group *phxt_group_find(const char *name);

/* What torch.ops.phalanx.blocking_all_reduce does with a contiguous CPU tensor of `numel` elements, without tensors and
 * without torch: `out` is `in`, or as much other memory. torch_dtype: torch's number. 1 when it is done; 0 where
 * the op must be called instead: the core does not serve the group, or something is pending; or the status of what the
 * op would raise. */
PHX_API int32_t phxt_all_reduce(const void *in, void *out, int64_t numel, int32_t torch_dtype, const char *reduce_op,
                                size_t reduce_op_size, const char *group_name, size_t group_name_size);

/* The reduction or group name that a phalanx_c10d op was given as this number. Lives for ever; NULL for others. */
PHX_API const char *phxt_text(int64_t number);

/* Memory pools of torch on GPUs: torch.cuda.memory.CUDAPluggableAllocator(library, "phxt_pool_alloc", "phxt_pool_free")
 * makes segments of memory of the world that the calling thread has entered, which its groups can map. The world must
 * live until its last segment is given back. */
PHX_API phx_world *phxt_pool_enter(phx_world *world);                      /* NULL: none. Returns the one before. */
PHX_API void *phxt_pool_alloc(int64_t size, int32_t device, void *stream); /* NULL: no world, or no memory */
PHX_API void phxt_pool_free(void *pointer, int64_t size, int32_t device, void *stream);
/* The number, from 1 on, of the segment that begins there; 0 where none does. */
PHX_API uint64_t phxt_pool_segment(const void *pointer);
PHX_API uint64_t phxt_pool_count(const phx_world *world); /* of its segments */

/* For a binding to Python whose hook (phx_set_interrupt) keeps what a signal handler raises. kept[0] is the type and
 * kept[1] the exception, or NULL while there is none; kept[2] is the thread that has the hook (a pthread_t). An op that
 * fails on that thread while an exception is kept throws an exception that pybind11 turns into raise(type, exception),
 * which is PyErr_SetObject, and sets kept[1] to NULL. `kept` must live for ever. NULL: not any more. */
typedef void (*phxt_raise)(void *type, void *exception);
PHX_API void phxt_set_interrupted(phxt_raise raise, void **kept);
/* For callers of a phxt_kernel, after it has failed: 1 and kept[0] and kept[1], which then becomes NULL, where an op
 * that raises would have thrown that exception; else 0. */
PHX_API int32_t phxt_take_interrupted(void **type, void **exception);

/* Of the last error that an op or a phxt call raised in this thread: PHX_OK and "" before the first. */
PHX_API phx_status phxt_last_status(void);
PHX_API const char *phxt_last_error(void); /* until the thread's next error */

/* cdef: end */

#ifdef __cplusplus
}
#endif
#endif
