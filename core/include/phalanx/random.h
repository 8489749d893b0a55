/* phalanx/random.h: EXPERIMENTAL, no part of ABI version 1; it may change in every version.
 * Random numbers that do not depend on how a tensor is cut.
 *
 * Parameters of all functions:
 *
 *   - out: where the element at position 0 of the box goes.
 *   - kind: the distribution, a PHX_RANDOM_* constant.
 *   - a, b: the numbers of the distribution.
 *   - low: the smallest integer.
 *   - range: how many integers there are, from `low` on.
 *   - key: what the elements are a function of, together with their numbers. Another key gives other elements.
 *   - first: the number of the element at position 0 of the box.
 *   - ndim: the number of dims of the box.
 *   - sizes: the size of the box in each dim.
 *   - index_strides: by how much the number of an element grows from one position to the next, in each dim.
 *   - out_strides: how many elements further the next one goes in memory, in each dim.
 *   - stream: the CUstream (cudaStream_t) of a GPU on which the kernel is put. */
#ifndef PHALANX_RANDOM_H
#define PHALANX_RANDOM_H

#include "phalanx/phalanx.h"

#ifdef __cplusplus
extern "C" {
#endif

/* cdef: begin */

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
PHX_API phx_status phx_random_fill(void *out, phx_dtype dtype, int32_t kind, double a, double b, uint64_t key,
                                   uint64_t first, int32_t ndim, const int64_t *sizes, const int64_t *index_strides,
                                   const int64_t *out_strides);
/* The same for integers from `low` on, of which there are `range` (0: 2^64), in any real type; floats are rounded. */
PHX_API phx_status phx_random_integers(void *out, phx_dtype dtype, int64_t low, uint64_t range, uint64_t key,
                                       uint64_t first, int32_t ndim, const int64_t *sizes, const int64_t *index_strides,
                                       const int64_t *out_strides);
/* The same elements, bit for bit, in memory of a device. On a GPU the call puts a kernel on `stream` (CUstream,
 * cudaStream_t), of the GPU's primary context, and returns. device NULL = CPU, where stream is NULL. */
PHX_API phx_status phx_random_fill_on(const phx_device *device, void *stream, void *out, phx_dtype dtype, int32_t kind,
                                      double a, double b, uint64_t key, uint64_t first, int32_t ndim,
                                      const int64_t *sizes, const int64_t *index_strides, const int64_t *out_strides);
PHX_API phx_status phx_random_integers_on(const phx_device *device, void *stream, void *out, phx_dtype dtype,
                                          int64_t low, uint64_t range, uint64_t key, uint64_t first, int32_t ndim,
                                          const int64_t *sizes, const int64_t *index_strides,
                                          const int64_t *out_strides);

/* cdef: end */

#ifdef __cplusplus
}
#endif
#endif
