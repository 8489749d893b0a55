#include "tensors.h"

#include <ATen/MemoryOverlap.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <numeric>
#include <optional>

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

// In the order of c10d::ReduceOp::RedOpType.
constexpr int32_t kOps[] = {PHX_OP_SUM,  PHX_OP_AVG, PHX_OP_PROD, PHX_OP_MIN,       PHX_OP_MAX,
                            PHX_OP_BAND, PHX_OP_BOR, PHX_OP_BXOR, PHX_OP_PREMUL_SUM};
static_assert(std::size(kOps) == c10d::ReduceOp::PREMUL_SUM + 1 && c10d::ReduceOp::UNUSED == std::size(kOps));

bool is_plain(const at::Tensor &tensor) { return tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg(); }

at::Tensor plain(const at::Tensor &tensor) {
  const at::NoGradGuard no_grad;
  return tensor.resolve_conj().resolve_neg().contiguous();
}

// If the tensors lie in memory one after another, without gaps: the first that has elements, or any; else null.
const at::Tensor *first_if_adjacent(const std::vector<at::Tensor> &tensors) {
  const at::Tensor *first = nullptr;
  const char *next = nullptr;
  for (const at::Tensor &tensor : tensors) {
    if (!is_plain(tensor)) return nullptr;
    if (tensor.numel() == 0) continue;
    const char *begin = static_cast<const char *>(tensor.const_data_ptr());
    if (first != nullptr && begin != next) return nullptr;
    if (first == nullptr) first = &tensor;
    next = begin + tensor.nbytes();
  }
  return first != nullptr ? first : &tensors.front();
}

// A list of tensors that lie one after another from `start` on, in memory that `keep` holds.
List in_one_buffer(const std::vector<at::Tensor> &tensors, void *start, at::TensorList keep, Buffers &buffers) {
  buffers.keep.insert(buffers.keep.end(), keep.begin(), keep.end());
  const Elements first = elements_of(tensors[0]);
  List list{{}, first.dtype, first.item, true};
  char *at = static_cast<char *>(start);
  for (const at::Tensor &tensor : tensors) {
    list.blocks.push_back({at, elements_of(tensor).count, 0, 0});
    at += tensor.nbytes();
  }
  return list;
}

// Shorter rows are copied to another tensor, which torch does faster.
constexpr size_t kShortestRow = 32;  // bytes

// Whether the elements of a tensor lie side by side, or in rows that do and begin one stride apart: then the length of
// a row and the stride, in elements, else a length of 0.
struct Rows {
  size_t row = 0, stride = 0;
};
Rows rows_of(const at::Tensor &tensor) {
  int64_t row = 1, stride = 0, count = 1, dim = tensor.dim() - 1;
  for (; dim >= 0 && (tensor.size(dim) == 1 || tensor.stride(dim) == row); --dim) row *= tensor.size(dim);
  for (; dim >= 0; --dim) {
    if (tensor.size(dim) == 1) continue;
    if (stride == 0) stride = tensor.stride(dim);
    if (stride < row || tensor.stride(dim) != stride * count) return {};
    count *= tensor.size(dim);
  }
  return {static_cast<size_t>(row), static_cast<size_t>(stride == 0 ? row : stride)};
}

// The block of a tensor that the core reads and writes where it lies; nullopt: it must be copied.
std::optional<phx_block> block_of(const at::Tensor &tensor) {
  const Elements elements = elements_of(tensor);
  phx_block block{const_cast<void *>(tensor.const_data_ptr()), elements.count, 0, 0};
  if (is_plain(tensor) || elements.count == 0) return block;
  const Rows rows = rows_of(tensor);
  if (tensor.is_conj() || tensor.is_neg() || rows.row * tensor.element_size() < kShortestRow) return std::nullopt;
  const size_t times = tensor.element_size() / elements.item;  // elements of the core in an element of the tensor
  block.row = rows.row * times;
  block.stride = rows.stride * times;
  return block;
}

// Whether two blocks of elements of that size, in bytes, overlap, or lie between each other's rows.
bool overlap(const phx_block &a, const phx_block &b, size_t item) {
  const auto begin = [](const phx_block &block) { return static_cast<const char *>(block.data); };
  const auto end = [&](const phx_block &block) {
    const size_t row = block.row == 0 ? block.count : block.row;
    return begin(block) + ((block.count / row - 1) * block.stride + row) * item;
  };
  return a.count != 0 && b.count != 0 && begin(a) < end(b) && begin(b) < end(a);
}

// The limit of the memory that a scratch keeps.
constexpr size_t kKeptBytes = size_t{32} << 20;  // bytes

// Puts the tensors at `positions` of a list into `scratch`. Their contents are copied there now or, if they are
// `written`, copied back when the operation is complete.
void put_in_scratch(const std::vector<at::Tensor> &tensors, const c10::SmallVectorImpl<size_t> &positions, bool written,
                    Scratch &scratch, List &list, Buffers &buffers) {
  if (positions.empty()) return;
  size_t bytes = 0;
  for (const size_t i : positions) bytes += tensors[i].nbytes();
  const at::NoGradGuard no_grad;
  const at::Tensor memory = scratch.take(bytes);
  int64_t begin = 0;
  for (const size_t i : positions) {
    const at::Tensor &tensor = tensors[i];
    const auto size = static_cast<int64_t>(tensor.nbytes());
    const at::Tensor place = memory.narrow(0, begin, size).view(tensor.scalar_type()).view(tensor.sizes());
    begin += size;
    list.blocks[i] = {place.data_ptr(), elements_of(tensor).count, 0, 0};
    if (written)
      buffers.copies.emplace_back(tensor, place);
    else
      place.copy_(tensor);
  }
  buffers.keep.push_back(memory);
}

// The tensors of a list, which are read or written: where they lie, as far as the core can, the others in `scratch`.
List blocks_of(const std::vector<at::Tensor> &tensors, bool written, Scratch &scratch, Buffers &buffers) {
  const Elements first = elements_of(tensors[0]);
  List list{std::vector<phx_block>(tensors.size()), first.dtype, first.item};
  buffers.keep.reserve(buffers.keep.size() + tensors.size() + 1);
  c10::SmallVector<size_t, 8> others;
  for (size_t i = 0; i < tensors.size(); ++i) {
    std::optional<phx_block> block = block_of(tensors[i]);
    if (block && written) {
      block->data = tensors[i].data_ptr();  // gives a lazy clone memory of its own
      // Rows with one stride may lie between each other; the core does not look whether those with several strides do.
      const auto crosses = [&](const phx_block &other) {
        return other.row != 0 && block->stride != other.stride && overlap(*block, other, list.item);
      };
      if (block->row != 0 && std::any_of(list.blocks.begin(), list.blocks.begin() + i, crosses)) block.reset();
    }
    if (block) {
      list.blocks[i] = *block;
      buffers.keep.push_back(tensors[i]);
    } else {
      others.push_back(i);
    }
  }
  put_in_scratch(tensors, others, written, scratch, list, buffers);
  return list;
}

// The address of a tensor that is written, and read before if `reads`, or of memory that is copied to it afterwards.
void *written(const at::Tensor &tensor, bool reads, Buffers &buffers) {
  at::assert_no_internal_overlap(tensor);
  if (is_plain(tensor) && !buffers.staged) {
    buffers.keep.push_back(tensor);
  } else {
    const auto options = tensor.options().memory_format(at::MemoryFormat::Contiguous);
    buffers.keep.push_back(!reads             ? at::empty(tensor.sizes(), options)
                           : is_plain(tensor) ? tensor.detach().clone()
                                              : plain(tensor));
    buffers.copies.emplace_back(tensor, buffers.keep.back());
  }
  return buffers.keep.back().data_ptr();
}

// A copy of memory, side by side, of rows that begin one stride apart; sizes in bytes.
void *copied(const void *data, size_t rows, size_t row, size_t stride, Buffers &buffers) {
  const at::NoGradGuard no_grad;
  const auto options = at::TensorOptions().dtype(at::kByte).device(buffers.keep.front().device());
  const at::Tensor given =
      at::for_blob(const_cast<void *>(data), {static_cast<int64_t>(rows), static_cast<int64_t>(row)})
          .strides({static_cast<int64_t>(stride), 1})
          .target_device(options.device())
          .options(options)
          .make_tensor();
  buffers.keep.push_back(given.clone(at::MemoryFormat::Contiguous));
  return buffers.keep.back().data_ptr();
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

// Whether the tensors are columns of one matrix, side by side.
bool are_columns(const std::vector<at::Tensor> &tensors, const Span *first, const Span *last) {
  size_t stride = 0;
  std::vector<std::pair<size_t, size_t>> columns;  // first and last byte in a row of the matrix
  for (const Span *span = first; span != last; ++span) {
    const at::Tensor &tensor = tensors[span->position];
    const Rows rows = rows_of(tensor);
    const size_t item = tensor.element_size();
    if (span == first) stride = rows.stride * item;
    if (rows.row == 0 || rows.stride * item != stride) return false;
    const size_t begin = static_cast<size_t>(span->begin - first->begin) % stride;
    columns.emplace_back(begin, begin + rows.row * item);
  }
  std::sort(columns.begin(), columns.end());
  for (size_t i = 1; i < columns.size(); ++i)
    if (columns[i].first < columns[i - 1].second) return false;
  return columns.back().second <= stride;
}

// Whether two tensors have a byte in common. Their spans, ordered by beginning, have no gap.
bool have_common_bytes(const std::vector<at::Tensor> &tensors, const Span *first, const Span *last) {
  if (are_columns(tensors, first, last)) return false;
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

bool share_memory(const std::vector<at::Tensor> &written, MayShare may_share) {
  if (written.size() < 2) return false;
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
  const size_t count = static_cast<size_t>(numel), item = tensor.element_size();
  return dtype != 0 ? Elements{dtype, count, item} : Elements{PHX_DTYPE_U8, count * item, 1};
}

Elements elements_of(const at::Tensor &tensor) { return elements_of(tensor, tensor.numel()); }

int64_t numel_of(at::TensorList tensors) {
  int64_t numel = 0;
  for (const at::Tensor &tensor : tensors) numel += tensor.numel();
  return numel;
}

Elements reduced_elements(const at::Tensor &tensor, const char *what) {
  TORCH_CHECK_NOT_IMPLEMENTED(core_dtype(tensor.scalar_type()) != 0, what,
                              ": phalanx does not reduce tensors of dtype ", tensor.scalar_type(),
                              "; convert them to another dtype, such as float32");
  return elements_of(tensor);
}

Reduction reduction_of(const c10d::ReduceOp &op, const char *what) {
  const auto type = static_cast<c10d::ReduceOp::RedOpType>(op);
  TORCH_CHECK_VALUE(type < std::size(kOps), what, ": the backend phalanx does not support this ReduceOp; expected ",
                    "SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR, BXOR or PREMUL_SUM");
  if (type != c10d::ReduceOp::PREMUL_SUM) return {kOps[type], 1};
  // Its name in 2.11; later it is one of two.
  const auto *given = dynamic_cast<const c10d::NCCLPreMulSumSupplement *>(op.supplement_.get());
  TORCH_CHECK_VALUE(given != nullptr, what, ": ReduceOp.PREMUL_SUM has no factor; make it with ",
                    "torch.distributed._make_nccl_premul_sum(factor)");
  return {kOps[type], given->tensor_factor.defined() ? given->tensor_factor.item<double>() : given->double_factor};
}

void check_tensor(const at::Tensor &tensor, const char *what) {
  TORCH_CHECK_VALUE(tensor.defined(), what, ": an undefined tensor was given; give a tensor with data");
  TORCH_CHECK_VALUE(tensor.layout() == at::kStrided, what, ": the backend phalanx takes dense tensors, not ",
                    tensor.layout(), "; call to_dense() first");
  TORCH_CHECK_VALUE(tensor.is_cpu() || tensor.is_cuda(), what,
                    ": the backend phalanx takes tensors on the CPU or on NVIDIA GPUs, not on ", tensor.device());
}

void check_same_dtype(const at::Tensor &a, const at::Tensor &b, const char *what) {
  TORCH_CHECK_VALUE(a.scalar_type() == b.scalar_type(), what, ": tensors of dtypes ", a.scalar_type(), " and ",
                    b.scalar_type(), " in one collective; all must have the same");
}

at::Tensor &only(std::vector<at::Tensor> &tensors, const char *what) {
  TORCH_CHECK_VALUE(tensors.size() == 1, what, ": expected a list of one tensor, got ", tensors.size());
  check_tensor(tensors[0], what);
  return tensors[0];
}

const void *readable(const at::Tensor &tensor, Buffers &buffers) {
  buffers.keep.push_back(is_plain(tensor) ? tensor : plain(tensor));
  return buffers.keep.back().const_data_ptr();
}

void *writable(const at::Tensor &tensor, Buffers &buffers) { return written(tensor, false, buffers); }
void *readable_and_writable(const at::Tensor &tensor, Buffers &buffers) { return written(tensor, true, buffers); }

at::Tensor Scratch::take(size_t bytes) {
  const auto size = static_cast<int64_t>(bytes);
  const std::lock_guard<std::mutex> guard(mutex_);
  const bool is_free = !kept_.defined() || kept_.storage().use_count() == 1;
  std::atomic_thread_fence(std::memory_order_acquire);  // after the last work's accesses, in any thread
  if (!is_free || !kept_.defined() || kept_.numel() < size) {
    at::Tensor made = at::empty({size}, at::kByte);
    if (!is_free || bytes > kKeptBytes) return made;
    kept_ = std::move(made);
  }
  return kept_.narrow(0, 0, size);
}

bool List::even() const {
  return std::all_of(blocks.begin(), blocks.end(), [&](auto &block) { return block.count == blocks[0].count; });
}

std::vector<size_t> List::counts() const {
  std::vector<size_t> counts;
  for (const phx_block &block : blocks) counts.push_back(block.count);
  return counts;
}

List alone(const at::Tensor &tensor, const void *data) {
  const auto [dtype, count, item] = elements_of(tensor);
  return {{{const_cast<void *>(data), count, 0, 0}}, dtype, item};
}

List readable(const std::vector<at::Tensor> &tensors, Scratch &scratch, Buffers &buffers) {
  if (!tensors[0].is_cuda()) return blocks_of(tensors, false, scratch, buffers);
  if (const at::Tensor *first = first_if_adjacent(tensors))
    return in_one_buffer(tensors, first->data_ptr(), tensors, buffers);
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> flat;
  for (const at::Tensor &tensor : tensors) flat.push_back(plain(tensor).view({-1}));
  const at::Tensor all = at::cat(flat);
  return in_one_buffer(tensors, all.data_ptr(), all, buffers);
}

List in_one_buffer(const std::vector<at::Tensor> &tensors, Buffers &buffers) {
  for (const at::Tensor &tensor : tensors) at::assert_no_internal_overlap(tensor);
  if (!buffers.staged) {
    if (const at::Tensor *first = first_if_adjacent(tensors))
      return in_one_buffer(tensors, first->data_ptr(), tensors, buffers);
    share_memory(tensors, std::equal_to<size_t>());
  }
  const at::NoGradGuard no_grad;
  const auto options = at::TensorOptions().dtype(tensors[0].scalar_type()).device(tensors[0].device());
  const at::Tensor flat = at::empty({numel_of(tensors)}, options);
  int64_t begin = 0;
  for (const at::Tensor &tensor : tensors) {
    buffers.copies.emplace_back(tensor, flat.narrow(0, begin, tensor.numel()).view(tensor.sizes()));
    begin += tensor.numel();
  }
  return in_one_buffer(tensors, flat.data_ptr(), flat, buffers);
}

List writable(const std::vector<at::Tensor> &tensors, Scratch &scratch, Buffers &buffers) {
  if (tensors[0].is_cuda()) return in_one_buffer(tensors, buffers);
  for (const at::Tensor &tensor : tensors) at::assert_no_internal_overlap(tensor);
  if (!buffers.staged && !first_if_adjacent(tensors)) share_memory(tensors, std::equal_to<size_t>());
  return blocks_of(tensors, true, scratch, buffers);
}

void copy_overlapping(List &inputs, const List &outputs, int own, Buffers &buffers) {
  const size_t item = inputs.item;
  const auto is_own = [&](const List &list, size_t i) {
    return list.blocks.size() == 1 || i == static_cast<size_t>(own);
  };
  for (size_t i = 0; i < inputs.blocks.size(); ++i) {
    phx_block &in = inputs.blocks[i];
    bool overlaps = false;
    for (size_t j = 0; j < outputs.blocks.size() && !overlaps; ++j) {
      const phx_block &out = outputs.blocks[j];
      const bool same = in.data == out.data && in.count == out.count && in.row == 0 && out.row == 0;
      overlaps = overlap(in, out, item) && !(same && own >= 0 && is_own(inputs, i) && is_own(outputs, j));
    }
    if (!overlaps) continue;
    const size_t row = in.row == 0 ? in.count : in.row;
    in = {copied(in.data, in.count / row, row * item, in.stride * item, buffers), in.count, 0, 0};
  }
}

const void *copy_if_overlapping(const void *in, size_t in_bytes, const void *out, size_t out_bytes, Buffers &buffers) {
  const phx_block read{const_cast<void *>(in), in_bytes, 0, 0}, written{const_cast<void *>(out), out_bytes, 0, 0};
  return overlap(read, written, 1) ? copied(in, 1, in_bytes, 0, buffers) : in;
}

at::Device device_of(const Buffers &buffers, const char *what) {
  if (buffers.keep.empty()) return at::kCPU;
  const at::Device device = buffers.keep.front().device();
  for (const at::Tensor &each : buffers.keep)
    TORCH_CHECK_VALUE(each.device() == device, what, ": tensors on ", device, " and ", each.device(),
                      " in one collective; all must be on the same device");
  return device;
}

}  // namespace phalanx
