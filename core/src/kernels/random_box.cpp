#include <cstring>

#include "base/error.h"
#include "kernels/random.h"

namespace phx::random {
namespace {

constexpr size_t kGathered = 512;  // elements of the buffer from which strided output is filled

template <class U>
void scatter(char *out, const void *from, size_t count, int64_t stride) {
  const U *values = static_cast<const U *>(from);
  for (size_t i = 0; i < count; ++i)
    std::memcpy(out + static_cast<int64_t>(i) * stride * static_cast<int64_t>(sizeof(U)), values + i, sizeof(U));
}
void scatter(char *out, const void *from, size_t count, int64_t stride, size_t size) {
  switch (size) {
    case 1: return scatter<uint8_t>(out, from, count, stride);
    case 2: return scatter<uint16_t>(out, from, count, stride);
    case 4: return scatter<uint32_t>(out, from, count, stride);
    default: return scatter<uint64_t>(out, from, count, stride);
  }
}

void fill_row(FillFn fill, char *out, size_t size, uint64_t key, const Settings &settings, uint64_t first,
              const Dim &dim) {
  const int64_t step = dim.out_stride * static_cast<int64_t>(size);
  if (dim.index_stride == 1 && dim.out_stride == 1) {
    fill(out, static_cast<size_t>(dim.size), first, key, settings);
  } else if (dim.index_stride == 1) {
    alignas(64) char buffer[kGathered * 8];
    for (int64_t at = 0; at < dim.size;) {
      const int64_t left = dim.size - at, taken = left < int64_t{kGathered} ? left : int64_t{kGathered};
      fill(buffer, static_cast<size_t>(taken), first + static_cast<uint64_t>(at), key, settings);
      scatter(out + at * step, buffer, static_cast<size_t>(taken), dim.out_stride, size);
      at += taken;
    }
  } else {
    for (int64_t at = 0; at < dim.size; ++at)
      fill(out + at * step, 1, first + static_cast<uint64_t>(at * dim.index_stride), key, settings);
  }
}

}  // namespace

int simplify(const Box &box, Dim *dims) {
  int count = 0, last = -1;
  for (int32_t d = 0; d < box.ndim; ++d) {
    if (box.sizes[d] == 0) return -1;
    if (box.sizes[d] == 1) continue;
    const Dim dim{box.sizes[d], box.index_strides[d], box.out_strides[d]};
    Dim *before = count > 0 ? &dims[count - 1] : nullptr;
    if (before != nullptr && before->index_stride == dim.size * dim.index_stride &&
        before->out_stride == dim.size * dim.out_stride) {
      *before = {before->size * dim.size, dim.index_stride, dim.out_stride};
    } else {
      dims[count++] = dim;
    }
  }
  for (int d = 0; d < count; ++d)
    if (dims[d].index_stride == 1) last = d;
  if (last >= 0) {
    const Dim dim = dims[last];
    std::memmove(dims + last, dims + last + 1, static_cast<size_t>(count - last - 1) * sizeof(Dim));
    dims[count - 1] = dim;
  }
  return count;
}

phx_status check_box(const Box &box, const void *out, const char *operation) {
  if (box.ndim < 0 || box.ndim > kMaxDims)
    return fail(PHX_ERR_INVALID, operation, "ndim is %d; it must be 0 to %d", box.ndim, kMaxDims);
  if (box.ndim > 0 && (box.sizes == nullptr || box.index_strides == nullptr || box.out_strides == nullptr))
    return fail(PHX_ERR_INVALID, operation, "sizes, index_strides or out_strides is NULL");
  bool empty = false;
  for (int32_t d = 0; d < box.ndim; ++d) {
    if (box.sizes[d] < 0)
      return fail(PHX_ERR_INVALID, operation, "sizes[%d] is %lld; no size may be negative", d,
                  static_cast<long long>(box.sizes[d]));
    empty = empty || box.sizes[d] == 0;
  }
  if (out == nullptr && !empty) return fail(PHX_ERR_INVALID, operation, "out is NULL");
  return PHX_OK;
}

void fill_box(FillFn fill, void *out, size_t size, uint64_t key, const Settings &settings, const Box &box) {
  Dim dims[kMaxDims];
  int64_t position[kMaxDims] = {};
  const int count = simplify(box, dims);
  if (count < 0) return;
  const int outer = count > 0 ? count - 1 : 0;
  const Dim inner = count > 0 ? dims[count - 1] : Dim{1, 1, 1};
  char *to = static_cast<char *>(out);
  uint64_t first = box.first;
  for (;;) {
    fill_row(fill, to, size, key, settings, first, inner);
    int d = outer - 1;
    for (; d >= 0; --d) {  // the next position, the last dim first
      const int64_t steps = ++position[d] < dims[d].size ? 1 : 1 - dims[d].size;
      first += static_cast<uint64_t>(steps * dims[d].index_stride);
      to += steps * dims[d].out_stride * static_cast<int64_t>(size);
      if (steps == 1) break;
      position[d] = 0;
    }
    if (d < 0) return;
  }
}

}  // namespace phx::random
