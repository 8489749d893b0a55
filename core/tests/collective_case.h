// One collective as a test makes it: which, of what, on which buffers; and one rank's part in it, from filling the
// buffers to checking every byte that it wrote or must not have written. See reference.h for the values.
#pragma once

#include <algorithm>
#include <memory>
#include <numeric>

#include "reference.h"

namespace collective {

enum class What {
  kAllReduce,
  kAllGather,
  kAllGatherV,
  kReduceScatter,
  kReduceScatterV,
  kAllToAll,
  kAllToAllV,
  kBroadcast,
  kReduce,
  kGather,
  kScatter
};
constexpr int kWhats = 11;

// kRecognised: an ordinary call whose input lies in symmetric memory, on some ranks or all, at different offsets.
// kBlocks: a call on lists of blocks, which lie in another way on each rank; the input of some is recognised as well.
enum class Where { kPlain, kUnaligned, kSymmetric, kCoalesced, kRecognised, kBlocks };
constexpr int kWheres = 6;

struct Case {
  What what = What::kAllReduce;
  Where where = Where::kPlain;
  bool in_place = false;
  int32_t dtype = PHX_DTYPE_F32;
  int32_t op = PHX_OP_SUM;
  int32_t algo = PHX_ALGO_AUTO;
  size_t count = 0;
  int root = 0;
  uint32_t channel = 0;
  uint64_t seed = 0;            // chooses the values, and the counts of the _v forms
  size_t symmetric_offset = 0;  // where the input may begin; a multiple of 64
};

inline const char *name_of(What what) {
  constexpr const char *kNames[] = {"all_reduce",       "all_gather", "all_gather_v", "reduce_scatter",
                                    "reduce_scatter_v", "all_to_all", "all_to_all_v", "broadcast",
                                    "reduce",           "gather",     "scatter"};
  return kNames[static_cast<int>(what)];
}
inline bool reduces(What what) {
  return what == What::kAllReduce || what == What::kReduceScatter || what == What::kReduceScatterV ||
         what == What::kReduce;
}
inline bool has_lists(What what) {
  return what == What::kAllGatherV || what == What::kReduceScatterV || what == What::kAllToAllV;
}
inline bool has_root(What what) {
  return what == What::kBroadcast || what == What::kReduce || what == What::kGather || what == What::kScatter;
}

// Whether it uses the member's block.
inline bool in_block(const Case &c) {
  return c.where == Where::kSymmetric || c.where == Where::kRecognised || c.where == Where::kBlocks;
}

inline std::string describe(const Case &c) {
  constexpr const char *kWhereNames[] = {"plain", "unaligned", "symmetric", "coalesced", "recognised", "blocks"};
  char text[256];
  std::snprintf(text, sizeof text, "%s(%s, %zu%s%s, root %d, algo %d, %s%s, channel %u, seed %llu)", name_of(c.what),
                phx_dtype_name(c.dtype), c.count, reduces(c.what) ? ", " : "", reduces(c.what) ? phx_op_name(c.op) : "",
                c.root, c.algo, kWhereNames[static_cast<int>(c.where)], c.in_place ? " in place" : "", c.channel,
                static_cast<unsigned long long>(c.seed));
  return text;
}

// Whether there is such a call.
inline bool possible(const Case &c) {
  if (reduces(c.what) && !reference::is_defined(c.dtype, c.op)) return false;
  if (c.where == Where::kCoalesced && has_lists(c.what)) return false;
  if (c.where == Where::kBlocks &&
      (c.what == What::kAllReduce || c.what == What::kBroadcast || c.what == What::kReduce))
    return false;
  if (c.what == What::kBroadcast) return c.in_place;  // always
  if (c.where == Where::kSymmetric) return !c.in_place || c.what == What::kAllReduce;
  return !c.in_place || (c.what != What::kAllToAll && c.what != What::kAllToAllV);
}

// One rank of a group.
struct Member {
  phx_group *group = nullptr;
  std::vector<int> ranks;  // global ones: whose values come in
  int self = 0;            // in the group
  phx_symm *symm = nullptr;
  char *block = nullptr;  // this rank's
  size_t block_bytes = 0;
  int size() const { return static_cast<int>(ranks.size()); }
};

// The blocks of one side of a call, wherever they lie, and what is copied between them and one buffer.
class Spread {
 public:
  // 0: as in the buffer; 1: apart, in reverse; 2: each the columns of a matrix of its own; 3: columns of one matrix.
  static constexpr int kLayouts = 4;
  void lay_out(int layout, const std::vector<size_t> &counts, size_t item, char *buffer) {
    const size_t n = counts.size(), most = *std::max_element(counts.begin(), counts.end());
    layout_ = layout;
    counts_ = counts;
    item_ = item;
    buffer_ = buffer;
    const size_t stride = layout == 2 ? kRow + 2 : kRow * n + 1, rows = most / kRow + 1;
    bytes_.assign(layout == 0 ? 0 : ((most + kApart) * n + rows * stride * (layout == 2 ? n : 1)) * item, kFill);
    blocks_.clear();
    size_t begin = 0;
    for (size_t j = 0; j < n; ++j) {
      switch (layout) {
        case 0: blocks_.push_back({buffer + begin * item, counts[j], 0, 0}); break;
        case 1: blocks_.push_back({bytes_.data() + ((n - 1 - j) * (most + kApart) + 1) * item, counts[j], 0, 0}); break;
        case 2: blocks_.push_back({bytes_.data() + (j * rows * stride + 1) * item, counts[j], kRow, stride}); break;
        default: blocks_.push_back({bytes_.data() + j * kRow * item, counts[j], kRow, stride}); break;
      }
      begin += counts[j];
    }
    given_ = blocks_;
  }
  const phx_block *blocks() const { return given_.data(); }
  // The list may go when the call has returned.
  void forget() { given_.assign(given_.size(), {nullptr, 77, 5, 1}); }
  void fill_from_buffer() {
    if (layout_ != 0) copy([](char *block, char *packed, size_t size) { std::memcpy(block, packed, size); });
  }
  void destroy() {
    if (layout_ != 0) copy([](char *block, char *, size_t size) { std::memset(block, 0x5a, size); });
  }
  void fetch_to_buffer() {
    if (layout_ != 0) copy([](char *block, char *packed, size_t size) { std::memcpy(packed, block, size); });
  }
  // Whether nothing but the blocks was written. Destroys them.
  bool clean() {
    if (layout_ != 0) copy([](char *block, char *, size_t size) { std::memset(block, kFill, size); });
    return std::all_of(bytes_.begin(), bytes_.end(), [](char c) { return c == kFill; });
  }

 private:
  static constexpr size_t kRow = 5, kApart = 9;  // elements
  static constexpr char kFill = static_cast<char>(0xa5);

  template <class Each>
  void copy(const Each &each) {
    char *packed = buffer_;
    for (const phx_block &block : blocks_)
      for (size_t i = 0; i < block.count; ++i, packed += item_) {
        const size_t at = block.row == 0 ? i : i / block.row * block.stride + i % block.row;
        each(static_cast<char *>(block.data) + at * item_, packed, item_);
      }
  }

  int layout_ = 0;
  std::vector<size_t> counts_;
  size_t item_ = 1;
  char *buffer_ = nullptr;
  std::vector<char> bytes_;
  std::vector<phx_block> blocks_, given_;
};

// One rank's part in one collective after another; keeps its memory from one to the next.
class Part {
 public:
  // Lays out and fills the buffers.
  void prepare(const Member &member, const Case &c) {
    member_ = &member;
    case_ = c;
    item_ = phx_dtype_size(c.dtype);
    n_ = static_cast<size_t>(member.size());
    self_ = static_cast<size_t>(member.self);
    root_ = !has_root(c.what) || c.root == member.self;
    first_ = c.seed % reference::kPeriod;
    make_lists();
    measure();
    lay_out();
    reference::fill(in_, reference::elements(member.ranks[self_], c.dtype), item_, first_, given_);
    if (c.where == Where::kBlocks) spread();
  }

  // work NULL: blocks.
  phx_status issue(phx_work **work) {
    const Case &c = case_;
    phx_options options{};
    options.struct_size = sizeof options;
    options.algo = c.algo;
    options.flags = is_buffered() ? PHX_OPTION_BUFFERED : 0;
    options.channel = c.channel;
    options.scale = c.op == PHX_OP_PREMUL_SUM ? reference::kScale : 0;
    if (c.where == Where::kCoalesced) {
      const phx_call one = call();
      return phx_coalesced(member_->group, &one, 1, &options, work);
    }
    if (c.where == Where::kBlocks) {
      const phx_status status = issue_blocks(&options, work);
      in_spread_.forget();
      out_spread_.forget();
      return status;
    }
    return c.where == Where::kSymmetric ? issue_symmetric(&options, work) : issue_plain(&options, work);
  }

  // For phx_coalesced.
  phx_call call() const {
    constexpr int32_t kKinds[kWhats] = {PHX_CALL_ALL_REDUCE,
                                        PHX_CALL_ALL_GATHER,
                                        0,
                                        PHX_CALL_REDUCE_SCATTER,
                                        0,
                                        PHX_CALL_ALL_TO_ALL,
                                        0,
                                        PHX_CALL_BROADCAST,
                                        PHX_CALL_REDUCE,
                                        PHX_CALL_GATHER,
                                        PHX_CALL_SCATTER};
    phx_call one{};
    one.struct_size = sizeof one;
    one.kind = kKinds[static_cast<int>(case_.what)];
    one.in = in_;
    one.out = out_;
    one.count = case_.count;
    one.dtype = case_.dtype;
    one.op = reduces(case_.what) ? case_.op : 0;
    one.root_group_rank = has_root(case_.what) ? case_.root : 0;
    return one;
  }

  // Gets the memory for buffers of so many bytes.
  void reserve(size_t bytes) {
    take(storage_in_, bytes, 63);
    take(storage_out_, bytes, 63);
  }

  // Bytes of input that this rank gave.
  size_t input_bytes() const { return given_ * item_; }
  // Whether the input may be changed before the wait. That other ranks choose otherwise is part of the test.
  bool input_may_change() const {
    phx_group_stats stats = PHX_GROUP_STATS_INIT;
    CHECK_OK(phx_group_get_stats(member_->group, &stats));
    return is_buffered() && input_bytes() <= stats.eager_bytes;
  }
  // Overwrites the input (not one in place), which `check` then no longer asks for.
  void destroy_input() {
    if (aliased_ || case_.what == What::kBroadcast) return;
    if (in_ != nullptr) std::memset(in_, 0x5a, in_count_ * item_);
    if (case_.where == Where::kBlocks) in_spread_.destroy();
    destroyed_ = true;
  }

  // What is wrong with the result, or nothing.
  std::string check() const {
    if (case_.where == Where::kBlocks) {
      if (!destroyed_ && !aliased_) in_spread_.fetch_to_buffer();
      out_spread_.fetch_to_buffer();
      if (!in_spread_.clean() || !out_spread_.clean()) return wrong("bytes beside the blocks were written");
    }
    size_t done = 0;  // elements of the output
    for (const Expected &block : expected_) {
      const char *at = out_ + done * item_;
      const size_t right = reference::matching_bytes(at, *block.table, item_, block.first, block.count);
      if (right != block.count * item_)
        return wrong("output element " + std::to_string(done + right / item_) + " of " + std::to_string(out_count_) +
                     " is wrong");
      done += block.count;
    }
    if (done != out_count_) return wrong("the test expects too little");
    if (!untouched(storage_out_, out_region_)) return wrong("bytes beside the output were written");
    if (!aliased_ && !untouched(storage_in_, in_region_)) return wrong("bytes beside the input were written");
    if (shared_begin_ != nullptr && !all_guard(shared_begin_ - kGuard, shared_begin_))
      return wrong("bytes before the symmetric input were written");
    if (shared_begin_ != nullptr && !all_guard(shared_end_, shared_end_ + kGuard))
      return wrong("bytes behind the symmetric input were written");
    if (!aliased_ && !destroyed_ &&
        !reference::matches(in_, reference::elements(member_->ranks[self_], case_.dtype), item_, first_, given_))
      return wrong("the input was changed");
    return {};
  }

  // Bytes of the symmetric block that a case needs from its offset on.
  static size_t symmetric_bytes(const Case &c, int n) {
    return (c.count + 2) * 2 * phx_dtype_size(c.dtype) * static_cast<size_t>(n) + (3 + n) * kGuard + 64;
  }

 private:
  static constexpr size_t kGuard = 64;
  static constexpr unsigned char kFill = 0xa5;

  struct Expected {
    const reference::Bytes *table;
    size_t first, count;
  };
  struct Region {  // bytes of a storage that may be written
    size_t begin = 0, end = 0;
  };
  struct Storage {
    std::vector<char> bytes;
    size_t used = 0;
  };

  std::string wrong(const std::string &what) const {
    return "group rank " + std::to_string(self_) + " of " + std::to_string(n_) + ": " + describe(case_) + ": " + what;
  }

  void make_lists() {
    const size_t sizes[] = {case_.count, 0, case_.count / 2 + 1, case_.count / 3};
    counts_.assign(n_, 0);
    out_counts_.assign(n_, 0);
    const auto between = [&](size_t from, size_t to) { return sizes[(2 * from + to + case_.seed) % 4]; };
    for (size_t j = 0; j < n_; ++j) {
      counts_[j] = case_.what == What::kAllToAllV ? between(self_, j) : sizes[(j + case_.seed) % 4];
      out_counts_[j] = between(j, self_);
    }
    before_ = std::accumulate(counts_.begin(), counts_.begin() + static_cast<ptrdiff_t>(self_), size_t{0});
  }

  // How many elements go in and out here, which ones come out, and where an input in place begins.
  void measure() {
    const size_t count = case_.count, total = std::accumulate(counts_.begin(), counts_.end(), size_t{0});
    expected_.clear();
    offset_ = 0;
    switch (case_.what) {
      case What::kAllReduce: sizes(count, count, 0); break;
      case What::kAllGather: sizes(count, n_ * count, static_cast<ptrdiff_t>(self_ * count)); break;
      case What::kAllGatherV: sizes(counts_[self_], total, static_cast<ptrdiff_t>(before_)); break;
      case What::kReduceScatter: sizes(n_ * count, count, -static_cast<ptrdiff_t>(self_ * count)); break;
      case What::kReduceScatterV: sizes(total, counts_[self_], -static_cast<ptrdiff_t>(before_)); break;
      case What::kAllToAll: sizes(n_ * count, n_ * count, 0); break;
      case What::kAllToAllV: sizes(total, std::accumulate(out_counts_.begin(), out_counts_.end(), size_t{0}), 0); break;
      case What::kBroadcast: sizes(count, count, 0); break;
      case What::kReduce: sizes(count, root_ ? count : 0, 0); break;
      case What::kGather: sizes(count, root_ ? n_ * count : 0, static_cast<ptrdiff_t>(self_ * count)); break;
      case What::kScatter: sizes(root_ ? n_ * count : 0, count, -static_cast<ptrdiff_t>(self_ * count)); break;
    }
    given_ = case_.what == What::kBroadcast && !root_ ? 0 : in_count_;
    for (size_t from = 0; from < n_; ++from) expect_from(from, count);
  }

  void expect_from(size_t from, size_t count) {
    switch (case_.what) {
      case What::kAllReduce:
      case What::kReduce:
        if (from == 0 && root_) expect_reduced(0, count);
        return;
      case What::kReduceScatter:
        if (from == 0) expect_reduced(self_ * count, count);
        return;
      case What::kReduceScatterV:
        if (from == 0) expect_reduced(before_, counts_[self_]);
        return;
      case What::kAllGather: expect(from, 0, count); return;
      case What::kAllGatherV: expect(from, 0, counts_[from]); return;
      case What::kGather:
        if (root_) expect(from, 0, count);
        return;
      case What::kAllToAll: expect(from, self_ * count, count); return;
      case What::kAllToAllV: {
        const size_t list[] = {case_.count, 0, case_.count / 2 + 1, case_.count / 3};
        size_t begin = 0;
        for (size_t to = 0; to < self_; ++to) begin += list[(2 * from + to + case_.seed) % 4];
        expect(from, begin, out_counts_[from]);
        return;
      }
      case What::kBroadcast:
        if (from == static_cast<size_t>(case_.root)) expect(from, 0, count);
        return;
      case What::kScatter:
        if (from == static_cast<size_t>(case_.root)) expect(from, self_ * count, count);
        return;
    }
  }

  void sizes(size_t in, size_t out, ptrdiff_t offset) {
    in_count_ = in;
    out_count_ = out;
    offset_ = offset;
  }
  void expect(size_t from, size_t begin, size_t count) {
    expected_.push_back({&reference::elements(member_->ranks[from], case_.dtype), first_ + begin, count});
  }
  void expect_reduced(size_t begin, size_t count) {
    expected_.push_back({&reference::reduced(member_->ranks, case_.dtype, case_.op), first_ + begin, count});
  }

  void lay_out() {
    const size_t shift = case_.where == Where::kUnaligned ? 1 + case_.seed % 62 : 0;
    const size_t in_bytes = in_count_ * item_, out_bytes = out_count_ * item_;
    const bool nothing_in = case_.what == What::kScatter && !root_, nothing_out = out_bytes == 0;
    aliased_ = case_.what == What::kBroadcast || (case_.in_place && !nothing_in && !(has_root(case_.what) && !root_));
    destroyed_ = false;
    shared_begin_ = shared_end_ = nullptr;
    if (case_.where == Where::kSymmetric || is_recognised()) {
      const size_t own = is_recognised() ? kGuard * (case_.seed % 2) * self_ : 0;
      shared_begin_ = member_->block + case_.symmetric_offset + kGuard + item_ * (case_.seed % 3) + own;
      shared_end_ = shared_begin_ + (aliased_ ? std::max(in_bytes, out_bytes) : in_bytes);
      CHECK(shared_end_ + kGuard <= member_->block + member_->block_bytes);
      std::memset(shared_begin_ - kGuard, kFill, static_cast<size_t>(shared_end_ - shared_begin_) + 2 * kGuard);
      in_region_ = take(storage_in_, 0, 0);
      out_region_ = take(storage_out_, aliased_ ? 0 : out_bytes, 0);
      in_ = shared_begin_ + (aliased_ && offset_ > 0 ? offset_ * static_cast<ptrdiff_t>(item_) : 0);
      out_ = aliased_ ? shared_begin_ - (offset_ < 0 ? offset_ * static_cast<ptrdiff_t>(item_) : 0)
                      : storage_out_.bytes.data() + out_region_.begin;
    } else if (aliased_) {
      in_region_ = {};
      out_region_ = take(storage_out_, std::max(in_bytes, out_bytes), shift);
      char *base = storage_out_.bytes.data() + out_region_.begin;
      in_ = offset_ > 0 ? base + offset_ * static_cast<ptrdiff_t>(item_) : base;
      out_ = offset_ < 0 ? base - offset_ * static_cast<ptrdiff_t>(item_) : base;
    } else {
      in_region_ = take(storage_in_, in_bytes, shift);
      out_region_ = take(storage_out_, out_bytes, shift == 0 ? 0 : 1 + (shift * 5) % 63);
      in_ = storage_in_.bytes.data() + in_region_.begin;
      out_ = storage_out_.bytes.data() + out_region_.begin;
    }
    // What a rank does not have may be NULL or anything.
    if (nothing_out && !aliased_ && case_.seed % 2 == 0) out_ = nullptr;
    if (case_.where != Where::kSymmetric && in_bytes == 0 && !aliased_ && case_.seed % 3 == 0) in_ = nullptr;
  }

  // One rank in some of the cases has its input elsewhere.
  bool is_recognised() const {
    if (case_.where == Where::kBlocks) return case_.seed % 5 < 2;
    return case_.where == Where::kRecognised && (case_.seed % 4 != 3 || self_ != case_.seed / 4 % n_);
  }

  // `bytes` in the storage behind a guard and `shift` more, and a guard behind them.
  Region take(Storage &storage, size_t bytes, size_t shift) {
    storage.used = 2 * kGuard + 63 + shift + bytes;
    if (storage.bytes.size() < storage.used) storage.bytes.resize(storage.used);
    std::memset(storage.bytes.data(), kFill, storage.used);
    const size_t misaligned = reinterpret_cast<uintptr_t>(storage.bytes.data()) % 64;
    const size_t begin = kGuard + (64 - misaligned) % 64 + shift;
    return {begin, begin + bytes};
  }
  static bool all_guard(const char *begin, const char *end) {
    return std::all_of(begin, end, [](char c) { return static_cast<unsigned char>(c) == kFill; });
  }
  static bool untouched(const Storage &storage, Region region) {
    const char *bytes = storage.bytes.data();
    return all_guard(bytes, bytes + region.begin) && all_guard(bytes + region.end, bytes + storage.used);
  }

  bool is_buffered() const {
    return case_.where != Where::kSymmetric && (case_.seed + static_cast<uint64_t>(self_)) % 2 == 0;
  }

  phx_status issue_plain(const phx_options *options, phx_work **work) const {
    const Case &c = case_;
    phx_group *group = member_->group;
    switch (c.what) {
      case What::kAllReduce: return phx_all_reduce(group, in_, out_, c.count, c.dtype, c.op, options, work);
      case What::kAllGather: return phx_all_gather(group, in_, out_, c.count, c.dtype, options, work);
      case What::kAllGatherV: return phx_all_gather_v(group, in_, out_, counts_.data(), c.dtype, options, work);
      case What::kReduceScatter: return phx_reduce_scatter(group, in_, out_, c.count, c.dtype, c.op, options, work);
      case What::kReduceScatterV:
        return phx_reduce_scatter_v(group, in_, out_, counts_.data(), c.dtype, c.op, options, work);
      case What::kAllToAll: return phx_all_to_all(group, in_, out_, c.count, c.dtype, options, work);
      case What::kAllToAllV:
        return phx_all_to_all_v(group, in_, counts_.data(), out_, out_counts_.data(), c.dtype, options, work);
      case What::kBroadcast: return phx_broadcast(group, out_, c.count, c.dtype, c.root, options, work);
      case What::kReduce: return phx_reduce(group, in_, out_, c.count, c.dtype, c.op, c.root, options, work);
      case What::kGather: return phx_gather(group, in_, out_, c.count, c.dtype, c.root, options, work);
      case What::kScatter: return phx_scatter(group, in_, out_, c.count, c.dtype, c.root, options, work);
    }
    return PHX_ERR_INTERNAL;
  }

  // What this collective has a list of, on this rank, becomes a list.
  void spread() {
    const bool all = case_.what == What::kAllToAll || case_.what == What::kAllToAllV;
    const bool gathers =
        case_.what == What::kAllGather || case_.what == What::kAllGatherV || case_.what == What::kGather;
    const std::vector<size_t> even(n_, case_.count), none(n_, 0);
    const std::vector<size_t> &in = has_lists(case_.what) ? counts_ : even;
    const std::vector<size_t> &out = case_.what == What::kAllToAllV ? out_counts_ : in;
    const auto layout = [&](uint64_t turn) {
      return aliased_ ? 0 : static_cast<int>(reference::mix(case_.seed * 8 + turn + self_) % Spread::kLayouts);
    };
    in_spread_.lay_out(layout(0), (all || !gathers) && root_ ? in : none, item_, in_);
    out_spread_.lay_out(layout(1), (all || gathers) && root_ ? out : none, item_, out_);
    in_spread_.fill_from_buffer();
  }

  phx_status issue_blocks(const phx_options *options, phx_work **work) const {
    const Case &c = case_;
    phx_group *group = member_->group;
    const phx_block *const in = in_spread_.blocks(), *const out = out_spread_.blocks();
    switch (c.what) {
      case What::kAllGather: return phx_all_gather_blocks(group, in_, out, c.dtype, options, work);
      case What::kAllGatherV: return phx_all_gather_blocks(group, in_, out, c.dtype, options, work);
      case What::kReduceScatter:
      case What::kReduceScatterV: return phx_reduce_scatter_blocks(group, in, out_, c.dtype, c.op, options, work);
      case What::kAllToAll:
      case What::kAllToAllV: return phx_all_to_all_blocks(group, in, out, c.dtype, options, work);
      case What::kGather: return phx_gather_blocks(group, in_, out, c.count, c.dtype, c.root, options, work);
      case What::kScatter: return phx_scatter_blocks(group, in, out_, c.count, c.dtype, c.root, options, work);
      default: return PHX_ERR_INTERNAL;
    }
  }

  phx_status issue_symmetric(const phx_options *options, phx_work **work) const {
    const Case &c = case_;
    phx_symm *symm = member_->symm;
    const size_t offset = static_cast<size_t>(in_ - member_->block);
    switch (c.what) {
      case What::kAllReduce: return phx_symm_all_reduce(symm, offset, out_, c.count, c.dtype, c.op, options, work);
      case What::kAllGather: return phx_symm_all_gather(symm, offset, out_, c.count, c.dtype, options, work);
      case What::kAllGatherV: return phx_symm_all_gather_v(symm, offset, out_, counts_.data(), c.dtype, options, work);
      case What::kReduceScatter:
        return phx_symm_reduce_scatter(symm, offset, out_, c.count, c.dtype, c.op, options, work);
      case What::kReduceScatterV:
        return phx_symm_reduce_scatter_v(symm, offset, out_, counts_.data(), c.dtype, c.op, options, work);
      case What::kAllToAll: return phx_symm_all_to_all(symm, offset, out_, c.count, c.dtype, options, work);
      case What::kAllToAllV:
        return phx_symm_all_to_all_v(symm, offset, counts_.data(), out_, out_counts_.data(), c.dtype, options, work);
      case What::kBroadcast: return phx_symm_broadcast(symm, offset, c.count, c.dtype, c.root, options, work);
      case What::kReduce: return phx_symm_reduce(symm, offset, out_, c.count, c.dtype, c.op, c.root, options, work);
      case What::kGather: return phx_symm_gather(symm, offset, out_, c.count, c.dtype, c.root, options, work);
      case What::kScatter: return phx_symm_scatter(symm, offset, out_, c.count, c.dtype, c.root, options, work);
    }
    return PHX_ERR_INTERNAL;
  }

  const Member *member_ = nullptr;
  Case case_;
  size_t item_ = 0, n_ = 0, self_ = 0;
  bool root_ = false;
  size_t first_ = 0;                         // of the tables
  std::vector<size_t> counts_, out_counts_;  // of the _v forms
  size_t before_ = 0;                        // elements of the ranks before this one
  size_t in_count_ = 0, out_count_ = 0, given_ = 0;
  ptrdiff_t offset_ = 0;  // of an input in place from the output
  bool aliased_ = false, destroyed_ = false;
  std::vector<Expected> expected_;
  Storage storage_in_, storage_out_;
  Region in_region_, out_region_;
  char *in_ = nullptr, *out_ = nullptr;
  mutable Spread in_spread_, out_spread_;                 // `check` collects what lies in them
  char *shared_begin_ = nullptr, *shared_end_ = nullptr;  // what the case uses of the symmetric block
};

}  // namespace collective
