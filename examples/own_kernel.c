/* A collective of one's own: the sum of a matrix over all ranks, each row divided by its root mean square and
 * multiplied by a weight, in one kernel. The sum never goes through memory on its own.
 *
 * One source for two compilers:
 *
 *     cc -O3 -march=native -fPIC -shared -I "$(python -m phalanx.core --include-dir)" own_kernel.c -o own_kernel.so -lm
 *     nvcc -O3 -x cu -Xcompiler -fPIC -shared -I "$(python -m phalanx.core --include-dir)" own_kernel.c -o
 * own_kernel.so
 *
 * own_kernel.py compiles it for the CPU and calls it. */
#include <phalanx/device.h>

#ifdef __CUDACC__
#define KERNEL static __global__ void
/* A block of threads works on a row. */
#define FOR_EACH(i, count) for (size_t i = threadIdx.x; i < (count); i += blockDim.x)
PHX_FN float sum_of_block(float mine) {
  __shared__ float parts[1024];
  parts[threadIdx.x] = mine;
  __syncthreads();
  for (unsigned half = blockDim.x / 2; half > 0; half /= 2) { /* blockDim.x is a power of two */
    if (threadIdx.x < half) parts[threadIdx.x] += parts[threadIdx.x + half];
    __syncthreads();
  }
  const float sum = parts[0];
  __syncthreads();
  return sum;
}
#else
#include <math.h>
#define FOR_EACH(i, count) for (size_t i = 0; i < (count); ++i)
PHX_FN float sum_of_block(float mine) { return mine; }
#endif

typedef struct {
  size_t rows, columns;
  size_t in, out; /* where in the block of each rank: two matrices of float32 */
  const float *weight;
  float epsilon;
  uint64_t timeout_ns;
} arguments;

/* One row: this rank adds up those of all ranks, in the order of the ranks, and gives the result to everybody. */
PHX_FN void reduce_row(const phx_team *team, const arguments *a, size_t row) {
  const size_t at = row * a->columns * sizeof(float);
  float *mine = (float *)phx_team_at(team, team->group_rank, a->out + at);
  const float *first = (const float *)phx_team_at(team, 0, a->in + at);
  float squares = 0;
  float scale;
  int32_t rank;
  FOR_EACH(i, a->columns) mine[i] = first[i];
  for (rank = 1; rank < team->group_size; ++rank) {
    const float *theirs = (const float *)phx_team_at(team, rank, a->in + at);
    FOR_EACH(i, a->columns) mine[i] += theirs[i];
  }
  FOR_EACH(i, a->columns) squares += mine[i] * mine[i];
  scale = 1 / sqrtf(sum_of_block(squares) / (float)a->columns + a->epsilon);
  FOR_EACH(i, a->columns) mine[i] *= scale * a->weight[i];
  for (rank = 0; rank < team->group_size; ++rank) {
    float *theirs = (float *)phx_team_at(team, rank, a->out + at);
    if (rank != team->group_rank) FOR_EACH(i, a->columns) theirs[i] = mine[i];
  }
}

#ifdef __CUDACC__

KERNEL run(phx_team team, arguments a, int32_t *status) {
  int32_t failed = phx_team_block_barrier(&team, blockIdx.x, a.timeout_ns);
  if (failed == 0) {
    for (size_t row = (size_t)team.group_rank + (size_t)team.group_size * blockIdx.x; row < a.rows;
         row += (size_t)team.group_size * gridDim.x)
      reduce_row(&team, &a, row);
    failed = phx_team_block_barrier(&team, blockIdx.x, a.timeout_ns);
  }
  if (failed != 0 && threadIdx.x == 0) *status = failed;
}

/* `status`: a word that the device can write, 0 at first. At most team->channels blocks. */
extern "C" PHX_API int all_reduce_rms_norm(const phx_team *team, const arguments *a, int32_t *status, void *stream) {
  const unsigned blocks = a->rows < team->channels ? (unsigned)a->rows : team->channels;
  run<<<blocks == 0 ? 1 : blocks, 256, 0, (cudaStream_t)stream>>>(*team, *a, status);
  return (int)cudaGetLastError();
}

#else

/* Collective. 0, or as phx_team_barrier. */
PHX_API int32_t all_reduce_rms_norm(const phx_team *team, const arguments *a);
int32_t all_reduce_rms_norm(const phx_team *team, const arguments *a) {
  size_t row;
  const int32_t status = phx_team_barrier(team, 0, a->timeout_ns); /* everybody's input is there */
  if (status != 0) return status;
  for (row = (size_t)team->group_rank; row < a->rows; row += (size_t)team->group_size) reduce_row(team, a, row);
  return phx_team_barrier(team, 0, a->timeout_ns); /* everybody's rows are done, and the input may change */
}

#endif
