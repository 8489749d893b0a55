#include "tensors.h"

#include <ATen/MemoryOverlap.h>

#include <algorithm>
#include <numeric>

namespace phalanx {
namespace {

int32_t core_dtype(at::ScalarType type) {
  switch (type) {
    case at::kHalf: return PHX_DTYPE_F16;
    case at::kBFloat16: return PHX_DTYPE_BF16;
    case at::kFloat: return PHX_DTYPE_F32;
    case at::kDouble: return PHX_DTYPE_F64;
    case at::kChar: return PHX_DTYPE_I8;
    case at::kByte: return PHX_DTYPE_U8;
    case at::kShort: return PHX_DTYPE_I16;
    case at::kUInt16: return PHX_DTYPE_U16;
    case at::kInt: return PHX_DTYPE_I32;
    case at::kUInt32: return PHX_DTYPE_U32;
    case at::kLong: return PHX_DTYPE_I64;
    case at::kUInt64: return PHX_DTYPE_U64;
    case at::kBool: return PHX_DTYPE_BOOL;
    case at::kComplexFloat: return PHX_DTYPE_C64;
    case at::kComplexDouble: return PHX_DTYPE_C128;
    case at::kFloat8_e4m3fn: return PHX_DTYPE_F8E4M3;
    case at::kFloat8_e5m2: return PHX_DTYPE_F8E5M2;
    default: return 0;
  }
}

size_t dtype_size(int32_t dtype) {
  switch (dtype) {
    case PHX_DTYPE_F16:
    case PHX_DTYPE_BF16:
    case PHX_DTYPE_I16:
    case PHX_DTYPE_U16: return 2;
    case PHX_DTYPE_F32:
    case PHX_DTYPE_I32:
    case PHX_DTYPE_U32: return 4;
    case PHX_DTYPE_F64:
    case PHX_DTYPE_I64:
    case PHX_DTYPE_U64:
    case PHX_DTYPE_C64: return 8;
    case PHX_DTYPE_C128: return 16;
    default: return 1;
  }
}

bool is_plain(const at::Tensor &tensor) { return tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg(); }

at::Tensor plain(const at::Tensor &tensor) {
  const at::NoGradGuard no_grad;
  return tensor.resolve_conj().resolve_neg().contiguous();
}

// Whether they lie in memory one after another, without gaps.
bool adjacent(const std::vector<at::Tensor> &tensors) {
  const char *next = nullptr;
  for (const at::Tensor &tensor : tensors) {
    if (!is_plain(tensor)) return false;
    const char *begin = static_cast<const char *>(tensor.const_data_ptr());
    if (next != nullptr && begin != next && tensor.numel() > 0) return false;
    if (next == nullptr || tensor.numel() > 0) next = begin + tensor.nbytes();
  }
  return true;
}

// The first of adjacent tensors that has an address.
const at::Tensor &first_of(const std::vector<at::Tensor> &tensors) {
  for (const at::Tensor &tensor : tensors)
    if (tensor.numel() > 0) return tensor;
  return tensors.front();
}

// The memory between the first and the last element of a tensor of a list.
struct Span {
  const char *begin, *end;
  size_t position;
};

Span span_of(const at::Tensor &tensor, size_t position) {
  int64_t last = 0;
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) last += (tensor.size(dim) - 1) * tensor.stride(dim);
  const char *begin = static_cast<const char *>(tensor.const_data_ptr());
  return {begin, begin + (last + 1) * static_cast<int64_t>(tensor.element_size()), position};
}

// Whether two tensors have a byte in common. Their spans, ordered by beginning, have no gap.
bool have_common_bytes(const std::vector<at::Tensor> &tensors, const Span *first, const Span *last) {
  const char *end = first->end;
  int64_t unit = 0;
  for (const Span *span = first; span != last; ++span) {
    end = std::max(end, span->end);
    unit = std::gcd(std::gcd(unit, static_cast<int64_t>(tensors[span->position].element_size())),
                    static_cast<int64_t>(span->begin - first->begin));
  }
  const at::Tensor taken = at::zeros({(end - first->begin) / unit}, at::kByte);
  for (const Span *span = first; span != last; ++span) {
    const at::Tensor &tensor = tensors[span->position];
    const int64_t units = static_cast<int64_t>(tensor.element_size()) / unit;
    std::vector<int64_t> sizes = tensor.sizes().vec(), strides = tensor.strides().vec();
    for (int64_t &stride : strides) stride *= units;
    sizes.push_back(units);
    strides.push_back(1);
    const at::Tensor here = taken.as_strided(sizes, strides, (span->begin - first->begin) / unit);
    if (here.any().item<bool>()) return true;
    here.fill_(1);
  }
  return false;
}

}  // namespace

bool same_view(const at::Tensor &a, const at::Tensor &b) {
  return a.const_data_ptr() == b.const_data_ptr() && a.sizes() == b.sizes() && a.strides() == b.strides() &&
         a.scalar_type() == b.scalar_type() && a.is_conj() == b.is_conj() && a.is_neg() == b.is_neg();
}

bool share_memory(const std::vector<at::Tensor> &written, const MayShare &may_share) {
  std::vector<Span> spans;
  for (size_t i = 0; i < written.size(); ++i)
    if (written[i].numel() > 0) spans.push_back(span_of(written[i], i));
  std::sort(spans.begin(), spans.end(), [](const Span &a, const Span &b) { return a.begin < b.begin; });
  const at::NoGradGuard no_grad;
  bool share = false;
  for (auto first = spans.begin(); first != spans.end();) {
    auto last = first + 1;
    for (const char *end = first->end; last != spans.end() && last->begin < end; ++last) end = std::max(end, last->end);
    const bool allowed =
        std::all_of(first, last, [&](auto &span) { return may_share(first->position, span.position); });
    if (last - first > 1 && have_common_bytes(written, &*first, &*first + (last - first))) {
      TORCH_CHECK(allowed,
                  "unsupported operation: more than one element of the written-to tensors refers to a single memory "
                  "location. Please clone() the tensors before performing the operation.");
      share = true;
    }
    first = last;
  }
  return share;
}

Elements elements_of(const at::Tensor &tensor, int64_t numel) {
  const int32_t dtype = core_dtype(tensor.scalar_type());
  if (dtype != 0) return {dtype, static_cast<size_t>(numel)};
  return {PHX_DTYPE_U8, static_cast<size_t>(numel) * tensor.element_size()};
}

Elements elements_of(const at::Tensor &tensor) { return elements_of(tensor, tensor.numel()); }

size_t bytes_of(const Elements &elements) { return elements.count * dtype_size(elements.dtype); }

int64_t numel_of(const std::vector<at::Tensor> &tensors) {
  int64_t numel = 0;
  for (const at::Tensor &tensor : tensors) numel += tensor.numel();
  return numel;
}

int32_t reduced_dtype(const at::Tensor &tensor) {
  const int32_t dtype = core_dtype(tensor.scalar_type());
  TORCH_CHECK_NOT_IMPLEMENTED(dtype != 0, "phalanx does not reduce tensors of dtype ", tensor.scalar_type(),
                              "; convert them to another dtype");
  return dtype;
}

Reduction reduction_of(const c10d::ReduceOp &op) {
  switch (static_cast<c10d::ReduceOp::RedOpType>(op)) {
    case c10d::ReduceOp::SUM: return {PHX_OP_SUM, 1};
    case c10d::ReduceOp::AVG: return {PHX_OP_AVG, 1};
    case c10d::ReduceOp::PRODUCT: return {PHX_OP_PROD, 1};
    case c10d::ReduceOp::MIN: return {PHX_OP_MIN, 1};
    case c10d::ReduceOp::MAX: return {PHX_OP_MAX, 1};
    case c10d::ReduceOp::BAND: return {PHX_OP_BAND, 1};
    case c10d::ReduceOp::BOR: return {PHX_OP_BOR, 1};
    case c10d::ReduceOp::BXOR: return {PHX_OP_BXOR, 1};
    case c10d::ReduceOp::PREMUL_SUM: {
      // Its name in 2.11; later it is one of two.
      const auto *given = dynamic_cast<const c10d::NCCLPreMulSumSupplement *>(op.supplement_.get());
      TORCH_CHECK_VALUE(given != nullptr, "ReduceOp.PREMUL_SUM without its factor; make it with _make_nccl_premul_sum");
      return {PHX_OP_PREMUL_SUM,
              given->tensor_factor.defined() ? given->tensor_factor.item<double>() : given->double_factor};
    }
    default: C10_THROW_ERROR(ValueError, "this ReduceOp is none of phalanx");
  }
}

void check_tensor(const at::Tensor &tensor, const char *what) {
  TORCH_CHECK_VALUE(tensor.defined(), what, ": a tensor is missing");
  TORCH_CHECK_VALUE(tensor.layout() == at::kStrided, what, ": phalanx takes dense tensors, not ", tensor.layout());
  TORCH_CHECK_VALUE(tensor.is_cpu() || tensor.is_cuda(), what, ": phalanx takes tensors on the CPU or on GPUs, not on ",
                    tensor.device());
}

void check_same_dtype(const at::Tensor &a, const at::Tensor &b) {
  TORCH_CHECK_VALUE(a.scalar_type() == b.scalar_type(), "tensors of dtypes ", a.scalar_type(), " and ", b.scalar_type(),
                    " in one collective; all must have the same");
}

at::Tensor &only(std::vector<at::Tensor> &tensors, const char *what) {
  TORCH_CHECK_VALUE(tensors.size() == 1, what, ": one tensor is needed, not ", tensors.size());
  check_tensor(tensors[0], what);
  return tensors[0];
}

const void *readable(const at::Tensor &tensor, Buffers &buffers) {
  buffers.keep.push_back(is_plain(tensor) ? tensor : plain(tensor));
  return buffers.keep.back().const_data_ptr();
}

void *writable(const at::Tensor &tensor, Buffers &buffers) {
  at::assert_no_internal_overlap(tensor);
  if (is_plain(tensor) && !buffers.staged) {
    buffers.keep.push_back(tensor);
  } else {
    buffers.keep.push_back(at::empty(tensor.sizes(), tensor.options().memory_format(at::MemoryFormat::Contiguous)));
    buffers.copies.emplace_back(tensor, buffers.keep.back());
  }
  return buffers.keep.back().data_ptr();
}

void *readable_and_writable(const at::Tensor &tensor, Buffers &buffers) {
  at::assert_no_internal_overlap(tensor);
  const bool direct = is_plain(tensor) && !buffers.staged;
  buffers.keep.push_back(direct ? tensor : is_plain(tensor) ? tensor.detach().clone() : plain(tensor));
  if (!direct) buffers.copies.emplace_back(tensor, buffers.keep.back());
  return buffers.keep.back().data_ptr();
}

const void *readable(const std::vector<at::Tensor> &tensors, Buffers &buffers) {
  if (adjacent(tensors)) {
    buffers.keep.insert(buffers.keep.end(), tensors.begin(), tensors.end());
    return first_of(tensors).const_data_ptr();
  }
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> flat;
  for (const at::Tensor &tensor : tensors) flat.push_back(plain(tensor).view({-1}));
  buffers.keep.push_back(at::cat(flat));
  return buffers.keep.back().const_data_ptr();
}

void *writable(const std::vector<at::Tensor> &tensors, Buffers &buffers) {
  for (const at::Tensor &tensor : tensors) at::assert_no_internal_overlap(tensor);
  if (!buffers.staged && adjacent(tensors)) {
    buffers.keep.insert(buffers.keep.end(), tensors.begin(), tensors.end());
    return first_of(tensors).data_ptr();
  }
  if (!buffers.staged) share_memory(tensors, [](size_t a, size_t b) { return a == b; });
  const at::NoGradGuard no_grad;
  const auto options = at::TensorOptions().dtype(tensors[0].scalar_type()).device(tensors[0].device());
  const at::Tensor flat = at::empty({numel_of(tensors)}, options);
  int64_t begin = 0;
  for (const at::Tensor &tensor : tensors) {
    buffers.copies.emplace_back(tensor, flat.narrow(0, begin, tensor.numel()).view(tensor.sizes()));
    begin += tensor.numel();
  }
  buffers.keep.push_back(flat);
  return flat.data_ptr();
}

const void *apart(const void *in, size_t in_bytes, const void *out, size_t out_bytes, Buffers &buffers) {
  const auto *a = static_cast<const char *>(in);
  const auto *b = static_cast<const char *>(out);
  if (in_bytes == 0 || out_bytes == 0 || a + in_bytes <= b || b + out_bytes <= a) return in;
  const auto options = at::TensorOptions().dtype(at::kByte).device(buffers.keep.front().device());
  const at::Tensor given = at::for_blob(const_cast<void *>(in), {static_cast<int64_t>(in_bytes)})
                               .target_device(options.device())
                               .options(options)
                               .make_tensor();
  const at::NoGradGuard no_grad;
  buffers.keep.push_back(given.clone());
  return buffers.keep.back().const_data_ptr();
}

at::Device device_of(const Buffers &buffers, const char *what) {
  if (buffers.keep.empty()) return at::kCPU;
  const at::Device device = buffers.keep.front().device();
  for (const at::Tensor &each : buffers.keep)
    TORCH_CHECK_VALUE(each.device() == device, what, ": tensors on ", device, " and ", each.device(),
                      " in one collective; all must be on the same");
  return device;
}

}  // namespace phalanx
