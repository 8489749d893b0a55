// What tests of collectives on ordinary memory of a GPU share: a rank with a group, memory and a stream, and each
// collective as the host does it and as the GPU does.
#pragma once

#include <cstring>
#include <functional>
#include <random>

#include "gpu_stream.h"
#include "kernel_reference.h"
#include "ranks.h"

namespace gpu_group {

using gpu::Gpu;
using gpu::kGpu;
using gpu::OwnStream;
using kernel_test::Bytes;
using kernel_test::kScale;

constexpr size_t kSpace = 1 << 17;

// A rank of the group "gpus" with memory that has had no rendezvous, and of "hosts", which does the same on the host.
class Rank {
 public:
  explicit Rank(phx_world *world, size_t bytes = kSpace)
      : world_(world), group_(ranks::make_group(world, "gpus")), hosts_(ranks::make_group(world, "hosts")) {
    CHECK_OK(phx_mem_alloc(world, &kGpu, bytes, &in_));
    CHECK_OK(phx_mem_alloc(world, &kGpu, bytes, &out_));
  }
  ~Rank() {
    stream_.wait();  // what a call that failed has left on it
    phx_group_release(hosts_);
    phx_group_release(group_);
    phx_mem_free(world_, out_);
    phx_mem_free(world_, in_);
  }
  Rank(const Rank &) = delete;
  Rank &operator=(const Rank &) = delete;

  phx_group *group() const { return group_; }
  phx_group *hosts() const { return hosts_; }
  int self() const { return phx_world_rank(world_); }
  int size() const { return phx_world_size(world_); }
  char *in() const { return static_cast<char *>(in_); }
  char *out() const { return static_cast<char *>(out_); }
  const OwnStream &stream() const { return stream_; }
  gpu::Options options(int64_t timeout_ms = 20000) const {
    gpu::Options options;
    options.timeout_ms = timeout_ms;
    options.scale = kScale;
    options.stream = stream_.get();
    options.device = kGpu;
    return options;
  }
  // After what is on the stream.
  Bytes read(const void *from, size_t bytes) const {
    stream_.wait();
    return bytes == 0 ? Bytes() : Gpu().read(from, bytes);
  }
  uint64_t zero_copies() const {
    phx_group_stats stats = PHX_GROUP_STATS_INIT;
    CHECK_OK(phx_group_get_stats(group_, &stats));
    return stats.zero_copies;
  }
  // Returns when the group has failed.
  phx_error_info failure() const {
    phx_error_info info{};
    info.struct_size = sizeof info;
    while (phx_group_get_error(group_, &info) == PHX_ERR_NOT_FOUND) std::this_thread::yield();
    return info;
  }

 private:
  phx_world *const world_;
  phx_group *const group_, *const hosts_;
  void *in_ = nullptr, *out_ = nullptr;
  OwnStream stream_;
};

// One collective: how much this rank gives and gets, and where an input in place begins, from the output.
struct Collective {
  const char *name;
  size_t in, out;       // elements
  bool in_place;        // whether there is such a form
  ptrdiff_t in_offset;  // elements
  std::function<phx_status(phx_group *group, const void *in, void *out, const phx_options *options)> call;
};

// Lists of counts that differ from rank to rank, some of them 0.
inline size_t count_between(int from, int to, size_t count) {
  const size_t sizes[] = {count, 0, count / 2 + 1, count / 3};
  return sizes[(2 * from + to) % 4];
}

inline std::vector<Collective> collectives(int n, int self, size_t count, int32_t dtype, int32_t op, int root) {
  const size_t all = static_cast<size_t>(n) * count;
  const ptrdiff_t before = static_cast<ptrdiff_t>(static_cast<size_t>(self) * count);
  const bool is_root = self == root;
  std::vector<size_t> counts, sent, received;
  size_t total = 0, ins = 0, outs = 0, start = 0;
  for (int k = 0; k < n; ++k) {
    counts.push_back(count_between(k, 1, count));
    sent.push_back(count_between(self, k, count));
    received.push_back(count_between(k, self, count));
    if (k < self) start += counts.back();
    total += counts.back();
    ins += sent.back();
    outs += received.back();
  }
  const size_t mine = counts[static_cast<size_t>(self)];
  return {
      {"all_reduce", count, count, true, 0,
       [=](phx_group *g, const void *in, void *out, const phx_options *o) {
         return phx_all_reduce(g, in, out, count, dtype, op, o, nullptr);
       }},
      {"all_gather", count, all, true, before,
       [=](phx_group *g, const void *in, void *out, const phx_options *o) {
         return phx_all_gather(g, in, out, count, dtype, o, nullptr);
       }},
      {"all_gather_v", mine, total, true, static_cast<ptrdiff_t>(start),
       [=](phx_group *g, const void *in, void *out, const phx_options *o) {
         return phx_all_gather_v(g, in, out, counts.data(), dtype, o, nullptr);
       }},
      {"reduce_scatter", all, count, true, -before,
       [=](phx_group *g, const void *in, void *out, const phx_options *o) {
         return phx_reduce_scatter(g, in, out, count, dtype, op, o, nullptr);
       }},
      {"reduce_scatter_v", total, mine, true, -static_cast<ptrdiff_t>(start),
       [=](phx_group *g, const void *in, void *out, const phx_options *o) {
         return phx_reduce_scatter_v(g, in, out, counts.data(), dtype, op, o, nullptr);
       }},
      {"all_to_all", all, all, false, 0,
       [=](phx_group *g, const void *in, void *out, const phx_options *o) {
         return phx_all_to_all(g, in, out, count, dtype, o, nullptr);
       }},
      {"all_to_all_v", ins, outs, false, 0,
       [=](phx_group *g, const void *in, void *out, const phx_options *o) {
         return phx_all_to_all_v(g, in, sent.data(), out, received.data(), dtype, o, nullptr);
       }},
      {"reduce", count, is_root ? count : 0, is_root, 0,
       [=](phx_group *g, const void *in, void *out, const phx_options *o) {
         return phx_reduce(g, in, is_root ? out : nullptr, count, dtype, op, root, o, nullptr);
       }},
      {"gather", count, is_root ? all : 0, is_root, before,
       [=](phx_group *g, const void *in, void *out, const phx_options *o) {
         return phx_gather(g, in, is_root ? out : nullptr, count, dtype, root, o, nullptr);
       }},
      {"scatter", is_root ? all : 0, count, is_root, -before,
       [=](phx_group *g, const void *in, void *out, const phx_options *o) {
         return phx_scatter(g, is_root ? in : nullptr, out, count, dtype, root, o, nullptr);
       }},
      {"broadcast", count, count, true, 0,
       [=](phx_group *g, const void *, void *out, const phx_options *o) {
         return phx_broadcast(g, out, count, dtype, root, o, nullptr);
       }},
  };
}

inline Bytes random_input(int seed, int32_t dtype, size_t elements) {
  std::mt19937_64 random(static_cast<uint64_t>(seed));
  return kernel_test::random_elements(random, dtype, elements);
}

// On the GPU with buffers that begin `shift` elements into its memory, and on the host: the same bytes come out, and
// nothing beside them is written.
inline void expect_as_on_host(const Rank &me, const Collective &one, int32_t dtype, size_t shift, bool in_place,
                              int seed) {
  constexpr size_t kGuard = 64;
  const size_t item = phx_dtype_size(dtype), begin = (shift + kGuard) * item;
  const bool aliased = std::strcmp(one.name, "broadcast") == 0 || (in_place && one.in_place);
  const Bytes given = random_input(seed + 1000 * me.self(), dtype, one.in);
  const size_t span = aliased ? std::max(one.in, one.out) : one.out;
  const size_t in_at = aliased && one.in_offset > 0 ? static_cast<size_t>(one.in_offset) : 0;
  const size_t out_at = aliased && one.in_offset < 0 ? static_cast<size_t>(-one.in_offset) : 0;
  Bytes host_out(begin + (span + kGuard) * item, 0xa5), host_in = given;
  if (aliased && !given.empty()) std::memcpy(host_out.data() + begin + in_at * item, given.data(), given.size());
  Gpu().write(me.out(), host_out);
  if (!given.empty()) Gpu().write(me.in() + shift * item, given);
  char *const there = me.out() + begin;
  const void *const source = aliased ? there + in_at * item : me.in() + shift * item;
  const gpu::Options options = me.options();
  CHECK_OK(one.call(me.group(), source, there + out_at * item, &options));
  const Bytes seen = me.read(me.out(), host_out.size());
  gpu::Options plain = options;
  plain.stream = nullptr;
  plain.device = {};
  char *const here = reinterpret_cast<char *>(host_out.data()) + begin;
  const void *const from = aliased ? here + in_at * item : reinterpret_cast<const char *>(host_in.data());
  CHECK_OK(one.call(me.hosts(), from, here + out_at * item, &plain));
  if (seen != host_out)
    check::failed(__FILE__, __LINE__,
                  std::string(one.name) + " of " + phx_dtype_name(dtype) + ": not what the host gives");
  if (!aliased && !given.empty()) CHECK(me.read(me.in() + shift * item, given.size()) == given);
}

}  // namespace gpu_group
