#include "ops/blocks.h"

#include "group/group.h"

namespace phx {
namespace {

// The memory from the first to the last byte of a block, and its rows.
struct Range {
  Range() = default;
  Range(const phx_block &block, size_t item, bool written_to, bool may_alias)
      : begin(reinterpret_cast<uintptr_t>(block.data)),
        end(begin + block.count * item),
        row(block.count * item),
        written(written_to),
        own(may_alias) {
    if (block.row == 0 || block.count <= block.row) return;
    const size_t last = (block.count - 1) / block.row;  // row
    end = begin + (last * block.stride + block.count - last * block.row) * item;
    row = block.row * item;
    stride = block.stride * item;
  }

  uintptr_t begin = 0, end = 0;
  size_t row = 0, stride = 0;  // bytes; 0: one row
  bool written = false, own = false;
};

// Whether two ranges that overlap have no byte in common, because the rows of one lie between those of the other.
bool interleave(const Range &a, const Range &b) {
  const size_t stride = std::max(a.stride, b.stride);
  if ((a.stride != stride && a.stride != 0) || (b.stride != stride && b.stride != 0) || stride == 0) return false;
  if (a.row > stride || b.row > stride) return false;
  const size_t between = (b.begin - a.begin) % stride;  // from a row of a to the next one of b; a begins first
  return between >= a.row && stride - between >= b.row;
}

constexpr size_t kFewBlocks = 8;

// Whether no block has rows, and none of `out` touches another one: the usual case, without sorting.
bool clearly_apart(const phx_block *in, size_t ins, const phx_block *out, size_t outs, size_t item) {
  const auto meets = [&](const phx_block &a, const phx_block &b) {
    const uintptr_t first = reinterpret_cast<uintptr_t>(a.data), second = reinterpret_cast<uintptr_t>(b.data);
    return a.row != 0 || b.row != 0 || (first < second + b.count * item && second < first + a.count * item);
  };
  for (size_t i = 0; i < outs; ++i) {
    for (size_t k = 0; k < i; ++k)
      if (meets(out[i], out[k])) return false;
    for (size_t k = 0; k < ins; ++k)
      if (meets(out[i], in[k])) return false;
  }
  return true;
}

}  // namespace

bool blocks_overlap(const phx_block *in, size_t ins, const phx_block *out, size_t outs, size_t item, size_t self) {
  if (ins + outs <= kFewBlocks && clearly_apart(in, ins, out, outs, item)) return false;
  Range few[kFewBlocks];
  std::vector<Range> many(ins + outs <= std::size(few) ? 0 : ins + outs);
  Range *const ranges = many.empty() ? few : many.data(), *end = ranges;
  for (size_t i = 0; i < ins; ++i)
    if (in[i].count != 0) *end++ = Range(in[i], item, false, ins == 1 || i == self);
  for (size_t i = 0; i < outs; ++i)
    if (out[i].count != 0) *end++ = Range(out[i], item, true, outs == 1 || i == self);
  std::sort(ranges, end, [](const Range &a, const Range &b) { return a.begin < b.begin; });
  for (const Range *a = ranges; a != end; ++a)
    for (const Range *b = a + 1; b != end && b->begin < a->end; ++b) {
      if (!a->written && !b->written) continue;
      const bool alias = self != SIZE_MAX && a->own && b->own && a->written != b->written && a->begin == b->begin &&
                         a->end == b->end && a->stride == 0 && b->stride == 0;
      if (!alias && !interleave(*a, *b)) return true;
    }
  return false;
}

Blocks::Blocks(const void *base, const size_t *counts, size_t item, int n)
    : base_(address(base)), item_(item), n_(n), listed_(true), many_(n <= kFew ? nullptr : new phx_block[n]) {
  char *at = base_;
  for (int i = 0; i < n; ++i) {
    list()[i] = {at, counts[i], 0, 0};
    at += counts[i] * item;
    largest_ = std::max(largest_, counts[i]);
  }
}

Blocks::Blocks(const void *base, const phx_block *blocks, size_t item, int n)
    : base_(address(base)), item_(item), n_(n), listed_(true), many_(n <= kFew ? nullptr : new phx_block[n]) {
  for (int i = 0; i < n; ++i) {
    phx_block &block = list()[i] = blocks[i];
    if (block.count <= block.row || block.stride == block.row) block.row = block.stride = 0;
    if (block.count == 0) block.data = base_;
    largest_ = std::max(largest_, block.count);
  }
}

void Blocks::keep(const Keeping &keeping, Kept *copies) {
  const size_t bytes = total() * item_;
  if (bytes == 0 || bytes > keeping.limit) return;
  *copies = keeping.memory.take(bytes);
  char *to = copies->get();
  if (!listed_) std::memcpy(to, base_, bytes);
  for (int i = 0; listed_ && i < n_; ++i) {
    phx_block &block = list()[i];
    each(i, 0, block.count, [&](const char *at, size_t done, size_t size) { std::memcpy(to + done, at, size); });
    block = {to, block.count, 0, 0};
    to += block.count * item_;
  }
  base_ = copies->get();
}

CountMatrix::CountMatrix(Group &group, const char *name, const Blocks &in, const Blocks &out)
    : group_(group),
      name_(name),
      n_(group.hosts().local_size()),
      self_(group.hosts().local_rank()),
      in_(in),
      out_(out) {}

void CountMatrix::put(const Lane &lane, uint64_t epoch) const {
  char *const slot = lane.data(self_, epoch);
  for (int i = 0; i < n_; ++i) {
    const size_t pair[2] = {in_.count(i), out_.count(i)};
    std::memcpy(slot + i * sizeof pair, pair, sizeof pair);
  }
  kernels::demote(slot, n_ * 2 * sizeof(size_t));
}

phx_status CountMatrix::read(const Lane &lane, uint64_t epoch, const std::vector<size_t> *room, const uint64_t *evens) {
  const size_t row = static_cast<size_t>(n_) * 2;
  // Copied once, so that a peer that writes later cannot change the counts between the check and their use.
  matrix_.resize(n_ * row);
  for (int rank = 0; rank < n_; ++rank)
    if (evens != nullptr && evens[rank] != 0)
      std::fill_n(&matrix_[rank * row], row, static_cast<size_t>(evens[rank] - 1));
    else
      std::memcpy(&matrix_[rank * row], lane.data(rank, epoch), row * sizeof(size_t));
  bool spoiled = false;  // a peer wrote into this rank's slot
  for (int peer = 0; peer < n_; ++peer) {
    size_t *const pair = &matrix_[self_ * row + peer * 2];
    spoiled = spoiled || pair[0] != in_.count(peer) || pair[1] != out_.count(peer);
    pair[0] = in_.count(peer);
    pair[1] = out_.count(peer);
  }
  const phx_status status = check(room);
  // All ranks get the same error, unless a peer has changed counts that are not its own: then the group fails.
  return status != PHX_OK && spoiled ? group_.fail_with(last_error(), true) : status;
}

phx_status CountMatrix::check(const std::vector<size_t> *room) {
  for (int from = 0; from < n_; ++from) {
    size_t left = room == nullptr ? SIZE_MAX : (*room)[from];
    for (int to = 0; to < n_; ++to) {
      if (sent(from, to) != expected(to, from))
        return fail(PHX_ERR_MISMATCH, name_,
                    "group rank %d sends %zu elements to group rank %d, which expects %zu. in_counts[j] on rank i "
                    "must equal out_counts[i] on rank j.",
                    group_.hosts().local(from), sent(from, to), group_.hosts().local(to), expected(to, from));
      if (sent(from, to) > left)
        return fail(PHX_ERR_MISMATCH, name_,
                    "the counts of group rank %d add up to more than its memory holds; give it more memory, or "
                    "smaller counts",
                    group_.hosts().local(from));
      left -= sent(from, to);
      most_sent_ = std::max(most_sent_, sent(from, to));
    }
  }
  return PHX_OK;
}

}  // namespace phx
