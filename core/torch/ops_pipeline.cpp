// Matrix products fused with the collective after or before them. They are cut into pieces of rows, and the collective
// of one piece is under way while the next product is computed: ranks that come late or early do not stop each other at
// once, and what is sent still lies in the cache. On a GPU there is one piece: all is on one stream.
#include <algorithm>
#include <array>
#include <deque>
#include <exception>

#include "library.h"
#include "multiply.h"
#include "output.h"

namespace phxt {
namespace {

// ---- operands -------------------------------------------------------------------------------------------------------

// A matrix of any strides, and the addresses that its elements span.
struct Matrix {
  const char *name = "";
  int64_t rows = 0, columns = 0;
  int32_t dtype = 0;  // torch's
  ElementType type{};
  Range range;

  size_t count(int64_t of_rows) const { return static_cast<size_t>(of_rows) * static_cast<size_t>(columns); }
  size_t bytes(int64_t of_rows) const { return count(of_rows) * type.bytes; }
  std::string shape() const { return "[" + std::to_string(rows) + ", " + std::to_string(columns) + "]"; }
  std::string text() const { return std::string(name) + " is " + shape() + " of " + type.name; }
};

// A call and its checks, on either road: nothing was sent when they raise.
struct Request {
  Call call;
  std::string group_name;

  [[noreturn]] void refuse(const std::string &text) const {
    if (call) call.refuse(text);
    raise(PHX_ERR_INVALID, std::string(call.op) + " on group '" + group_name + "': " + text);
  }

  // On our road: complete, where work of ours was still to write it.
  Matrix matrix(const char *name, const Tensor &tensor) const;
  void check_factors(const Matrix &a, const Matrix &b) const;
  void check_out(const Tensor &tensor, const Matrix &out, const Matrix &a, const Matrix &b) const;
  void check_size(int64_t group_size) const;
};

bool is_float(const ElementType &type) {
  return type.lanes == 1 && type.reduce == Reducible::always &&
         (type.code == PHX_F64 || type.code == PHX_F32 || type.code == PHX_BF16 || type.code == PHX_F16);
}

Matrix Request::matrix(const char *name, const Tensor &tensor) const {
  Matrix result;
  result.name = name;
  int64_t dims = 0, *sizes = nullptr, *strides = nullptr;
  const void *data = nullptr;
  check_torch(aoti_torch_get_dim(tensor.get(), &dims), "read a tensor's dim");
  if (dims != 2) refuse(std::string(name) + " has " + std::to_string(dims) + " dims, but must be a matrix");
  if (call && gpu_of(tensor) != call.gpu)
    refuse(std::string(name) + " is on " + device_name(gpu_of(tensor)) + ", but must be on " + device_name(call.gpu) +
           ", as the other operands are");
  check_torch(aoti_torch_get_dtype(tensor.get(), &result.dtype), "read a tensor's dtype");
  check_torch(aoti_torch_get_sizes(tensor.get(), &sizes), "read a tensor's sizes");
  check_torch(aoti_torch_get_strides(tensor.get(), &strides), "read a tensor's strides");
  check_torch(torch_get_const_data_ptr(tensor.get(), &data), "read a tensor's data pointer");
  result.type = element_type(result.dtype);
  if (!is_float(result.type))
    refuse(std::string(name) + " is " + result.type.name + ", but must be float64, float32, bfloat16 or float16");
  result.rows = sizes[0];
  result.columns = sizes[1];
  const int64_t spanned =
      sizes[0] == 0 || sizes[1] == 0 ? 0 : (sizes[0] - 1) * strides[0] + (sizes[1] - 1) * strides[1] + 1;
  const auto begin = reinterpret_cast<uintptr_t>(data);
  result.range = {begin, begin + static_cast<uintptr_t>(spanned) * result.type.bytes};
  if (call) settle(tensor, result.range);
  return result;
}

void Request::check_factors(const Matrix &a, const Matrix &b) const {
  if (a.dtype != b.dtype || a.columns != b.rows)
    refuse(a.text() + " and " + b.text() + "; they must have the same dtype, and b as many rows as " + a.name +
           " has columns");
}

void Request::check_out(const Tensor &tensor, const Matrix &out, const Matrix &a, const Matrix &b) const {
  if (out.rows != a.rows || out.columns != b.columns || out.dtype != a.dtype)
    refuse(out.text() + ", but must be [" + std::to_string(a.rows) + ", " + std::to_string(b.columns) + "] of " +
           a.type.name);
  if (!is_contiguous(tensor)) refuse("out must be contiguous");
  if (out.range.overlaps(a.range) || out.range.overlaps(b.range)) refuse("out must not share memory with a or b");
}

void Request::check_size(int64_t group_size) const {
  if (call) check_group_size(call, group_size);
  if (group_size < 1) refuse("group_size is " + std::to_string(group_size) + ", but must be at least 1");
}

// ---- products -------------------------------------------------------------------------------------------------------

Tensor rows(const Tensor &matrix, int64_t begin, int64_t count) {
  StableIValue stack[] = {matrix.share().release(), 0, release(begin), release(count)};
  check_torch(torch_call_dispatcher("aten::narrow", "", stack, kTorchVersion), "take rows of a matrix");
  return Tensor(stack[0]);
}

Tensor product(const Tensor &a, const Tensor &b) {  // on any device
  StableIValue stack[] = {a.share().release(), b.share().release()};
  check_torch(torch_call_dispatcher("aten::mm", "", stack, kTorchVersion), "multiply two matrices");
  return Tensor(stack[0]);
}

// Memory for `count` rows that are multiplied and sent, or gathered.
struct Block {
  Tensor tensor;
  char *data = nullptr;

  Block() = default;
  Block(const Call &call, int64_t count, const Matrix &columns_of, const Matrix &like)
      : tensor(empty({count, columns_of.columns}, like.dtype, call.gpu)),
        data(static_cast<char *>(mutable_data(tensor))) {
    if (call.gpu == kHost) expect_first_touch(data, columns_of.bytes(count));
  }
};

// ---- pieces ---------------------------------------------------------------------------------------------------------

struct Pieces {  // of rows, as even as can be
  int64_t rows, count;

  Pieces(const Call &call, int64_t wished, int64_t all_rows)
      : rows(all_rows),
        count(call.group->size == 1 || call.gpu != kHost
                  ? 1
                  : std::clamp<int64_t>(wished, 1, std::max<int64_t>(all_rows, 1))) {}
  int64_t begin(int64_t piece) const { return rows / count * piece + std::min(piece, rows % count); }
  int64_t size(int64_t piece) const { return begin(piece + 1) - begin(piece); }
  bool last(int64_t piece) const { return piece + 1 == count; }
};

constexpr size_t kUnderWay = 1;  // collectives that may be while the next product is computed
constexpr size_t kBlocks = kUnderWay + 1;

// The collectives of one call. None outlives it: they read and write its memory.
class Flight {
 public:
  explicit Flight(const Call &call) : call_(call) {}
  Flight(const Flight &) = delete;
  ~Flight() {
    for (phx_work *work : works_) {
      phx_work_wait(work, 0);
      phx_work_release(work);
    }
  }

  // `issue(phx_work **)` starts one; the last one of all is complete on return, and so are the others.
  template <class Issue>
  void start(bool last, Issue issue) {
    phx_work *work = nullptr;
    check_core(issue(last ? nullptr : &work));
    sent_ = true;
    if (!last) works_.push_back(work);
    land(last ? 0 : kUnderWay);
  }

  void land(size_t leave) {  // waits for all but the youngest ones
    while (works_.size() > leave) {
      check_core(phx_work_wait(works_.front(), 0));
      phx_work_release(works_.front());
      works_.pop_front();
    }
  }

  void abandon(const char *why) {  // the peers would wait for pieces that do not come
    if (sent_) phx_group_revoke(call_.handle(), (std::string(call_.op) + " failed in the middle: " + why).c_str());
  }

 private:
  const Call &call_;
  std::deque<phx_work *> works_;
  bool sent_ = false;
};

template <class Body>
void fly(const Call &call, Body body) {
  Flight flight(call);
  try {
    body(flight);
  } catch (const std::exception &error) {
    flight.abandon(error.what());
    throw;
  }
}

phx_status reduce_scatter(const Call &call, const void *in, void *out, size_t count, const Matrix &like,
                          int32_t reduction, phx_work **work) {
  return phx_reduce_scatter(call.handle(), in, out, count, like.type.code, reduction, call.options(), work);
}

// ---- what the op chooses, by the shapes, which are alike on all ranks -----------------------------------------------

// Measured with benchmarks/pipelined_products.py, two ranks that keep step: each further product packs b once more, and
// one of few rows is slow for itself.
constexpr int64_t kRows = 256;       // of one product, at least
constexpr int64_t kPackingCost = 4;  // in elements moved, for each of b

// No size was found at which an all_reduce in pieces is faster where ranks keep step.
constexpr int64_t kPiecesOfAllReduce = 1;

// Of a large product only two pieces have memory at a time, which stays in the cache.
int64_t pieces_of_reduce_scatter(int64_t own_rows, const Matrix &a, const Matrix &b) {
  constexpr size_t kLarge = size_t{16} << 20;
  constexpr int64_t kMost = 16;
  if (b.bytes(a.rows) < kLarge) return 1;
  return std::min({kMost, own_rows / kRows, own_rows / (kPackingCost * std::max<int64_t>(a.columns, 1))});
}

// Whether to gather while the own rows are multiplied: that makes a product for each rank out of one.
bool gathers_meanwhile(int64_t size, int64_t shard_rows, const Matrix &b) {
  return size > 1 && shard_rows >= kRows && size * shard_rows >= (size - 1) * kPackingCost * b.columns;
}

}  // namespace

void mm_all_reduce_(StableIValue *stack, uint64_t, uint64_t) {
  const Tensor target(stack[0]), left(stack[1]), right(stack[2]);
  const String reduce_op(stack[3]), group_name(stack[4]);
  const auto wished = static_cast<int64_t>(stack[5]);
  const int32_t reduction = parse_reduction(reduce_op.view());
  const Request request{route("mm_all_reduce_", left, group_name), std::string(group_name.view())};
  const Call &call = request.call;
  const Matrix a = request.matrix("a", left), b = request.matrix("b", right), out = request.matrix("out", target);
  request.check_factors(a, b);
  request.check_out(target, out, a, b);
  if (!call) {
    Tensor whole = product(left, right);
    fallback(Call{"all_reduce", {}}, group_name, stack, whole, reduce_op, group_name);
    return copy_into(target, Tensor(stack[0]));
  }
  check_reduction(call, reduction, out.type);
  const Pieces pieces(call, wished > 0 ? wished : kPiecesOfAllReduce, a.rows);
  auto *data = static_cast<char *>(mutable_data(target));
  fly(call, [&](Flight &flight) {
    for (int64_t piece = 0; piece < pieces.count; ++piece) {
      const int64_t begin = pieces.begin(piece), size = pieces.size(piece);
      multiply(rows(left, begin, size), right, rows(target, begin, size));
      char *sent = data + out.bytes(begin);
      flight.start(pieces.last(piece), [&](phx_work **work) {
        return phx_all_reduce(call.handle(), sent, sent, out.count(size), out.type.code, reduction, call.options(),
                              work);
      });
    }
  });
}

void mm_reduce_scatter(StableIValue *stack, uint64_t, uint64_t) {
  const Tensor left(stack[0]), right(stack[1]);
  const String reduce_op(stack[2]), group_name(stack[4]);
  const auto group_size = static_cast<int64_t>(stack[3]), wished = static_cast<int64_t>(stack[5]);
  const int32_t reduction = parse_reduction(reduce_op.view());
  const Request request{route("mm_reduce_scatter", left, group_name), std::string(group_name.view())};
  const Call &call = request.call;
  const Matrix a = request.matrix("a", left), b = request.matrix("b", right);
  request.check_factors(a, b);
  request.check_size(group_size);
  if (a.rows % group_size != 0)
    request.refuse(a.text() + ", but the number of its rows must be a multiple of group_size " +
                   std::to_string(group_size));
  if (!call) {
    Tensor whole = product(left, right);
    return fallback(Call{"reduce_scatter_tensor", {}}, group_name, stack, whole, reduce_op, group_size, group_name);
  }
  check_reduction(call, reduction, a.type);
  const int64_t own_rows = a.rows / group_size;
  const Pieces pieces(call, wished > 0 ? wished : pieces_of_reduce_scatter(own_rows, a, b), own_rows);
  Block result(call, own_rows, b, a);
  std::array<Block, kBlocks> blocks;
  for (int64_t i = 0; i < std::min<int64_t>(kBlocks, pieces.count); ++i)
    blocks[static_cast<size_t>(i)] = Block(call, group_size * pieces.size(0), b, a);
  fly(call, [&](Flight &flight) {
    for (int64_t piece = 0; piece < pieces.count; ++piece) {
      const Block &block = blocks[static_cast<size_t>(piece) % kBlocks];
      const int64_t begin = pieces.begin(piece), size = pieces.size(piece);
      if (pieces.count == 1)
        multiply(left, right, block.tensor);
      else
        for (int64_t rank = 0; rank < group_size; ++rank)
          multiply(rows(left, rank * own_rows + begin, size), right, rows(block.tensor, rank * size, size));
      flight.start(pieces.last(piece), [&](phx_work **work) {
        return reduce_scatter(call, block.data, result.data + b.bytes(begin), b.count(size), a, reduction, work);
      });
    }
  });
  stack[0] = result.tensor.release();
}

void all_gather_mm(StableIValue *stack, uint64_t, uint64_t) {
  Tensor own(stack[0]);
  const Tensor right(stack[1]);
  const String group_name(stack[3]);
  const auto group_size = static_cast<int64_t>(stack[2]);
  const Request request{route("all_gather_mm", own, group_name), std::string(group_name.view())};
  const Call &call = request.call;
  const Matrix shard = request.matrix("shard", own), b = request.matrix("b", right);
  request.check_factors(shard, b);
  request.check_size(group_size);
  if (!call) {
    fallback(Call{"all_gather_into_tensor", {}}, group_name, stack, own, group_size, group_name);
    stack[0] = product(Tensor(stack[0]), right).release();
    return;
  }
  const Operand in = read_operand(own, call.gpu);
  const Block whole(call, group_size * shard.rows, shard, shard);
  Block result(call, group_size * shard.rows, b, shard);
  const auto gather = [&](phx_work **work) {
    return phx_all_gather(call.handle(), in.data, whole.data, in.count(), in.type.code, call.options(), work);
  };
  if (call.gpu != kHost || !gathers_meanwhile(group_size, shard.rows, b)) {
    check_core(gather(nullptr));
    multiply(whole.tensor, right, result.tensor);
  } else {
    fly(call, [&](Flight &flight) {
      flight.start(false, gather);
      for (int64_t step = 0; step < group_size; ++step) {
        // One product for each rank, also of neighbours: the same products on all ranks give the same bits.
        const int64_t rank = (call.group->rank + step) % group_size;
        if (step == 1) flight.land(0);
        multiply(step == 0 ? own.share() : rows(whole.tensor, rank * shard.rows, shard.rows), right,
                 rows(result.tensor, rank * shard.rows, shard.rows));
      }
    });
  }
  stack[0] = result.tensor.release();
}

}  // namespace phxt
