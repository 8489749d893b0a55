// mm_reduce_scatter: the product is computed where the other ranks read it. If that would take too much memory, it is
// cut into pieces of rows, and the collective of one piece is in flight while the next product is computed: ranks that
// come late or early do not block each other at once, and the data that is sent is still in the cache. On a GPU there
// is one piece, as everything is on one stream.
#include <algorithm>
#include <array>
#include <deque>
#include <exception>

#include "library.h"
#include "products.h"
#include "staging.h"

namespace phxt {
namespace {

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

// `in` stays until the wait.
phx_status reduce_scatter(const Call &call, const void *in, void *out, size_t count, const Matrix &like,
                          int32_t reduction, phx_work **work) {
  return phx_reduce_scatter(call.handle(), in, out, count, like.type.code, reduction, call.options(nullptr), work);
}

// ---- what the op chooses, by the shapes, which are the same on all ranks --------------------------------------------

// Measured with benchmarks/pipelined_products.py, two ranks that keep step: each further product packs b once more, and
// one of few rows is slow for itself.
constexpr int64_t kRows = 256;       // of one product, at least
constexpr int64_t kPackingCost = 4;  // in elements moved, for each of b

// For a product that is too large for staging. Only two pieces have memory at a time, which stays in the cache.
int64_t pieces_of_reduce_scatter(int64_t own_rows, const Matrix &a, const Matrix &b) {
  constexpr int64_t kMost = 16;
  if (b.bytes(a.rows) <= kMostStaged) return 1;
  return std::min({kMost, own_rows / kRows, own_rows / (kPackingCost * std::max<int64_t>(a.columns, 1))});
}

}  // namespace

void mm_reduce_scatter(StableIValue *stack, uint64_t, uint64_t) {
  const Tensor left(stack[0]), right(stack[1]);
  const String reduce_op(stack[2]), group_name(stack[4]);
  const auto group_size = static_cast<int64_t>(stack[3]), wished = static_cast<int64_t>(stack[5]);
  const int32_t reduction = parse_reduction("mm_reduce_scatter", reduce_op.view());
  const Request request{route("mm_reduce_scatter", left, group_name), std::string(group_name.view())};
  const Call &call = request.call;
  const Matrix a = request.matrix("a", left), b = request.matrix("b", right);
  request.check_factors(a, b);
  request.check_size(group_size);
  if (a.rows % group_size != 0)
    request.refuse(a.text() + ", whose number of rows is not divisible by the group size " +
                   std::to_string(group_size));
  if (!call) {
    Tensor whole = product(left, right);
    return fallback(Call{"reduce_scatter_tensor", {}}, group_name, stack, whole, reduce_op, group_size, group_name);
  }
  check_reduction(call, reduction, a.type);
  const int64_t own_rows = a.rows / group_size;
  Block result(call, own_rows, b, a);
  const size_t bytes = b.bytes(a.rows);
  if (wished <= 0 && call.gpu == kHost && call.group->size > 1 && bytes != 0 && bytes <= kMostStaged) {
    const Staging::Turn turn = call.group->staging.next(call, bytes);
    multiply(left, right, as_matrix(turn.own, a.rows, b.columns, a.dtype));
    check_core(phx_symm_reduce_scatter(turn.symm, turn.offset, result.data, b.count(own_rows), a.type.code, reduction,
                                       nullptr, nullptr));
    stack[0] = result.tensor.release();
    return;
  }
  const Pieces pieces(call, wished > 0 ? wished : pieces_of_reduce_scatter(own_rows, a, b), own_rows);
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

}  // namespace phxt
