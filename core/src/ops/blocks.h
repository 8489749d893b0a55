// Where the ranks' blocks of an input or an output lie, and the counts of an all_to_all_v.
#pragma once

#include "ops/operation.h"

namespace phx {

// The blocks of `n` ranks. With one count for all ranks they lie one after another in a buffer, and no list is stored.
// All values are in elements.
class Blocks {
 public:
  Blocks(const void *base, size_t count, size_t item, int n)
      : base_(address(base)), item_(item), largest_(count), step_(count), n_(n) {}
  // The same block for every rank.
  static Blocks shared(const void *base, size_t count, size_t item) {
    Blocks blocks(base, count, item, 1);
    blocks.step_ = 0;
    return blocks;
  }
  Blocks(const void *base, const size_t *counts, size_t item, int n);
  // `base`: where the first of them lies, if they lie one after another; otherwise `start` may not be called.
  Blocks(const void *base, const phx_block *blocks, size_t item, int n);

  size_t count(int rank) const { return listed_ ? list()[rank].count : largest_; }
  size_t largest() const { return largest_; }
  bool all_have(size_t count) const {
    for (int i = 0; listed_ && i < n_; ++i)
      if (list()[i].count != count) return false;
    return largest_ == count;
  }
  size_t total() const {
    if (!listed_) return largest_ * static_cast<size_t>(n_);
    size_t total = 0;
    for (int i = 0; i < n_; ++i) total += list()[i].count;
    return total;
  }
  // Where a rank's block begins, if the blocks lie one after another.
  size_t start(int rank) const {
    return listed_ ? static_cast<size_t>(static_cast<char *>(list()[rank].data) - base_) / item_ : rank * step_;
  }

  phx_block block(int rank) const {
    return listed_ ? list()[rank] : phx_block{base_ + rank * step_ * item_, largest_, 0, 0};
  }
  // `count` elements of a rank's block, from `first` on, lie side by side: where. NULL: they lie in rows.
  char *dense(int rank, size_t first) const {
    if (!listed_) return base_ + (rank * step_ + first) * item_;
    const phx_block &block = list()[rank];
    return block.row == 0 ? static_cast<char *>(block.data) + first * item_ : nullptr;
  }
  // Calls `each(at, done, bytes)` for all places of `count` elements of a rank's block, from `first` on; `done` bytes
  // come before.
  template <class Each>
  void each(int rank, size_t first, size_t count, const Each &each) const {
    if (count == 0) return;
    if (char *const at = dense(rank, first); at != nullptr) return each(at, size_t{0}, count * item_);
    each_row(list()[rank], first, count, each);
  }
  // Copies `count` elements of a rank's block, from `first` on.
  void copy_to(char *to, int rank, size_t first, size_t count, kernels::Copy around = kernels::Copy::kMemcpy) const {
    each(rank, first, count,
         [&](const char *from, size_t done, size_t bytes) { deliver_bytes(to + done, from, bytes, around); });
  }
  // The same into a slot (put_bytes, or put_to_swap).
  void put_to(char *slot, int rank, size_t first, size_t count, bool to_swap = false) const {
    each(rank, first, count, [&](const char *from, size_t done, size_t bytes) {
      to_swap ? put_to_swap(slot + done, from, bytes) : put_bytes(slot + done, from, bytes);
    });
  }
  // Copies `count` elements to a rank's block, from its element `first` on.
  void fill(int rank, size_t first, size_t count, const char *from,
            kernels::Copy around = kernels::Copy::kMemcpy) const {
    each(rank, first, count,
         [&](char *to, size_t done, size_t bytes) { deliver_bytes(to, from + done, bytes, around); });
  }
  // Copies `count` elements of a rank's block of `from` to the same place of its block here.
  void copy_from(const Blocks &from, int rank, size_t first, size_t count,
                 kernels::Copy around = kernels::Copy::kMemcpy) const {
    if (count == 0) return;
    char *const at = dense(rank, first), *const source = from.dense(rank, first);
    if (at != nullptr && source != nullptr) return deliver_bytes(at, source, count * item_, around);
    each(rank, first, count, [&](char *to, size_t done, size_t bytes) {
      from.copy_to(to, rank, first + elements_of(done, item_), elements_of(bytes, item_), around);
    });
  }
  // Copies the blocks, if they are within the limit together, into `copies`, because the caller may change them.
  void keep(const Keeping &keeping, Kept *copies);

 private:
  // Kept out of the way of dense blocks, which are common and may be small.
  template <class Each>
  [[gnu::noinline]] void each_row(const phx_block &block, size_t first, size_t count, const Each &each) const {
    for (size_t done = 0; done < count;) {
      const size_t row = (first + done) / block.row, column = (first + done) % block.row;
      const size_t some = std::min(block.row - column, count - done);
      each(static_cast<char *>(block.data) + (row * block.stride + column) * item_, done * item_, some * item_);
      done += some;
    }
  }
  static constexpr int kFew = 4;  // blocks that take no memory of their own: allocating costs as much as a small copy
  const phx_block *list() const { return n_ <= kFew ? few_ : many_.get(); }
  phx_block *list() { return n_ <= kFew ? few_ : many_.get(); }
  static char *address(const void *base) { return const_cast<char *>(static_cast<const char *>(base)); }

  char *base_;
  size_t item_;  // bytes of an element
  size_t largest_ = 0;
  size_t step_ = 0;  // from one block to the next, if there is no list
  int n_;            // blocks
  bool listed_ = false;
  phx_block few_[kFew];
  std::unique_ptr<phx_block[]> many_;
};

// What a call must know of a list of blocks beyond each of them.
struct BlocksFound {
  size_t total = 0;    // elements
  bool even = true;    // all have as many elements as the first one
  void *at = nullptr;  // where they lie one after another; NULL: they do not, or are empty
};
// Whether a block of `out` overlaps another one of `out` or one of `in`. The block `self` of the longer list may have
// the address of the only one of the other list. Rows of equal strides may lie between each other.
bool blocks_overlap(const phx_block *in, size_t ins, const phx_block *out, size_t outs, size_t item, size_t self);

// The blocks of an input or output that has one for each rank.
inline Blocks input_blocks(const Buffers &buffers, int n) {
  const Lists *const lists = buffers.lists;
  if (lists != nullptr && lists->in != nullptr) return Blocks(buffers.in, lists->in, buffers.item, n);
  if (lists != nullptr && lists->in_counts != nullptr) return Blocks(buffers.in, lists->in_counts, buffers.item, n);
  return Blocks(buffers.in, buffers.count, buffers.item, n);
}
inline Blocks output_blocks(const Buffers &buffers, int n) {
  const Lists *const lists = buffers.lists;
  if (lists != nullptr && lists->out != nullptr) return Blocks(buffers.out, lists->out, buffers.item, n);
  if (lists != nullptr && lists->out_counts != nullptr) return Blocks(buffers.out, lists->out_counts, buffers.item, n);
  return Blocks(buffers.out, buffers.count, buffers.item, n);
}

// How many elements every rank of an all_to_all_v sends to every other rank. A rank knows only its own counts, so the
// ranks exchange them through the slots.
class CountMatrix {
 public:
  // `name`: the name of the call, for errors. `in` and `out`: the blocks of this rank, which the operation keeps alive.
  CountMatrix(Group &group, const char *name, const Blocks &in, const Blocks &out);

  // How many bytes of a slot `put` fills.
  size_t bytes() const { return (static_cast<size_t>(n_) * 2 * sizeof(size_t) + kLine - 1) / kLine * kLine; }
  void put(const Lane &lane, uint64_t epoch) const;
  // Precondition: all ranks have called `put`. Returns an error, the same on all ranks, if a sender's count differs
  // from its receiver's. `room`: if not NULL, how many elements the input of each rank may have. `evens`: if not NULL,
  // Operation::even of each rank; those for which it is not 0 need not have called `put`.
  phx_status read(const Lane &lane, uint64_t epoch, const std::vector<size_t> *room, const uint64_t *evens);
  // In elements; valid after `read`.
  size_t sent(int from, int to) const { return matrix_[(from * n_ + to) * 2]; }
  size_t most_sent() const { return most_sent_; }

 private:
  size_t expected(int by, int from) const { return matrix_[(by * n_ + from) * 2 + 1]; }
  phx_status check(const std::vector<size_t> *room);

  Group &group_;
  const char *const name_;
  const int n_, self_;
  const Blocks &in_, &out_;
  std::vector<size_t> matrix_;  // [rank][peer][2]: what `rank` sends to `peer`, and what it expects from it
  size_t most_sent_ = 0;
};

}  // namespace phx
