// The public collectives and works: every argument is checked here, before anything is sent.
#include <cstdint>
#include <cstring>
#include <limits>

#include "base/error.h"
#include "base/guard.h"
#include "base/read_in.h"
#include "group/group.h"
#include "symm/symm.h"

using phx::fail;
using phx::guarded;
using phx::Kind;

namespace {

// One call, as checked so far. `status` keeps the first error; later checks do nothing after it.
class Call {
 public:
  Call(Kind kind, phx_group *group, const phx_options *options)
      : Call(kind, group == nullptr ? nullptr : group->ptr.get(), options) {}
  Call(Kind kind, phx_symm *symm, const phx_options *options)
      : Call(kind, symm == nullptr ? nullptr : &symm->symm->group(), options) {}

  const char *name() const { return phx::kind_name(kind_); }
  bool ok() const { return status_ == PHX_OK; }
  phx_status status() const { return status_; }
  phx::Group &group() const { return *group_; }
  int group_size() const { return group_->size(); }
  const phx_options &options() const { return options_; }
  const phx::Buffers &buffers() const { return buffers_; }
  const phx::Reduction &reduction() const { return reduction_; }

  // in_parts and out_parts: how many times `count` elements each buffer holds.
  Call &data(const void *in, size_t in_parts, void *out, size_t out_parts, size_t count, int32_t dtype) {
    if (!ok()) return *this;
    const size_t item = phx_dtype_size(dtype);
    if (item == 0) return set(fail(PHX_ERR_INVALID, name(), "%s: %d is no dtype", name(), dtype));
    const size_t parts = in_parts > out_parts ? in_parts : out_parts;
    if (count > static_cast<size_t>(std::numeric_limits<int64_t>::max()) / item / parts)
      return set(fail(PHX_ERR_INVALID, name(), "%s: %zu elements for each of %d ranks is more than memory can hold",
                      name(), count, group_size()));
    if (count != 0 && (in == nullptr || out == nullptr))
      return set(fail(PHX_ERR_INVALID, name(), "%s: a buffer is NULL", name()));
    buffers_ = {static_cast<const char *>(in), static_cast<char *>(out), count, item};
    record_.dtype = static_cast<uint8_t>(dtype);
    record_.count = count;
    return *this;
  }

  // Refuses buffers that overlap, but for the one way that is safe: in == out + out_offset elements (or the reverse).
  Call &overlap(size_t in_elements, size_t out_elements, ptrdiff_t in_offset, bool alias_allowed) {
    if (!ok() || in_elements == 0 || out_elements == 0) return *this;
    const uintptr_t in = reinterpret_cast<uintptr_t>(buffers_.in), out = reinterpret_cast<uintptr_t>(buffers_.out);
    const bool apart = in + in_elements * buffers_.item <= out || out + out_elements * buffers_.item <= in;
    const bool alias = alias_allowed && in == out + static_cast<uintptr_t>(in_offset) * buffers_.item;
    if (!apart && !alias)
      return set(fail(PHX_ERR_INVALID, name(),
                      "%s: input and output overlap; give the same buffer (in place) or separate ones", name()));
    return *this;
  }

  Call &reduce(int32_t op) {
    if (!ok()) return *this;
    if (std::strcmp(phx_reduce_op_name(op), "?") == 0)
      return set(fail(PHX_ERR_INVALID, name(), "%s: Invalid reduce operation %d", name(), op));
    reduction_.fn = phx::kernels::find_reduce(record_.dtype, op);
    if (reduction_.fn == nullptr)
      return set(fail(PHX_ERR_UNSUPPORTED, name(), "%s: %s is not defined for %s", name(), phx_reduce_op_name(op),
                      phx_dtype_name(record_.dtype)));
    record_.op = static_cast<uint8_t>(op);
    if (op == PHX_PREMUL_SUM) {
      reduction_.scale = options_.scale;
      std::memcpy(&record_.aux, &options_.scale, sizeof record_.aux);
    }
    return *this;
  }

  Call &root(int32_t group_rank) {
    if (!ok()) return *this;
    if (group_rank < 0 || group_rank >= group_size())
      return set(fail(PHX_ERR_INVALID, name(), "%s: root is group rank %d in a group of %d", name(), group_rank,
                      group_size()));
    record_.root = group_rank;
    return *this;
  }

  // `bytes` at `offset` must lie inside the block. Calls on other blocks or offsets do not match, nor does one in place
  // with one that is not.
  Call &inside(const phx::Symm &symm, size_t offset, size_t bytes) {
    if (!ok()) return *this;
    if (offset > symm.block().size || bytes > symm.block().size - offset)
      return set(fail(PHX_ERR_INVALID, name(), "%s: %zu bytes at offset %zu do not fit a block of %zu", name(), bytes,
                      offset, symm.block().size));
    if (offset % buffers_.item != 0)
      return set(fail(PHX_ERR_INVALID, name(), "%s: offset %zu is no multiple of the element's %zu bytes", name(),
                      offset, buffers_.item));
    const uint64_t facts[4] = {record_.aux, symm.ordinal(), offset, buffers_.in == buffers_.out};
    record_.aux = phx::hash_bytes(facts, sizeof facts);
    return *this;
  }

  phx_status issue(std::unique_ptr<phx::Operation> operation, phx_work **work) {
    operation->record = record_;
    phx::Engine &engine = group_->engine();
    if (work == nullptr) return engine.run(*operation, timeout_ms_);
    auto handle = std::make_unique<phx_work>();
    const phx_status status = engine.start(std::move(operation), timeout_ms_, &handle->ptr);
    if (status != PHX_OK) return status;
    handle->group = group_->shared_from_this();
    *work = handle.release();
    return PHX_OK;
  }

 private:
  Call(Kind kind, phx::Group *group, const phx_options *options) : kind_(kind), group_(group) {
    record_.operation = static_cast<uint8_t>(kind);
    options_.struct_size = sizeof options_;
    options_.scale = 1.0;
    if (group == nullptr) {
      set(fail(PHX_ERR_INVALID, name(), "%s: the group (or symm) is NULL", name()));
      return;
    }
    if (options != nullptr && !set(phx::read_in(options, &options_, name())).ok()) return;
    if (options_.flags != 0 || options_.reserved != 0 || options_.algo < PHX_ALGO_AUTO ||
        options_.algo > PHX_ALGO_TWO_SHOT)
      set(fail(PHX_ERR_INVALID, name(), "%s: flags and reserved must be 0, and algo one of PHX_ALGO_*", name()));
    else
      set(group->world().resolve_timeout(name(), options_.timeout_ms, &timeout_ms_));
    record_.algo = static_cast<uint8_t>(options_.algo);
  }

  Call &set(phx_status status) {
    status_ = status;
    if (status != PHX_OK && group_ != nullptr)
      phx::amend_last_error(nullptr, group_->name().c_str(), group_->self_rank(), -1);
    return *this;
  }

  const Kind kind_;
  phx::Group *const group_;
  phx_options options_{};
  int64_t timeout_ms_ = 0;
  phx::Buffers buffers_;
  phx::Reduction reduction_;
  phx::CallRecord record_;
  phx_status status_ = PHX_OK;
};

size_t sum(const size_t *counts, int n) {
  size_t total = 0;
  for (int i = 0; i < n; ++i) total += counts[i];
  return total;
}

}  // namespace

extern "C" {

phx_status phx_group_barrier(phx_group *group, int64_t timeout_ms) {
  return guarded("barrier", [&]() -> phx_status {
    phx_options options{};
    options.struct_size = sizeof options;
    options.timeout_ms = timeout_ms;
    Call call(Kind::kBarrier, group, &options);
    return call.ok() ? call.issue(phx::make_barrier(), nullptr) : call.status();
  });
}

phx_status phx_all_reduce(phx_group *group, const void *in, void *out, size_t count, int32_t dtype, int32_t op,
                          const phx_options *options, phx_work **work) {
  return guarded("all_reduce", [&]() -> phx_status {
    Call call(Kind::kAllReduce, group, options);
    call.data(in, 1, out, 1, count, dtype).overlap(count, count, 0, true).reduce(op);
    if (!call.ok()) return call.status();
    return call.issue(phx::make_all_reduce(call.group().lane(), call.buffers(), call.reduction(), call.options().algo),
                      work);
  });
}

phx_status phx_all_gather(phx_group *group, const void *in, void *out, size_t count, int32_t dtype,
                          const phx_options *options, phx_work **work) {
  return guarded("all_gather", [&]() -> phx_status {
    Call call(Kind::kAllGather, group, options);
    if (!call.ok()) return call.status();
    const size_t n = call.group_size();
    call.data(in, 1, out, n, count, dtype)
        .overlap(count, n * count, static_cast<ptrdiff_t>(call.group().group_rank() * count), true);
    return call.ok() ? call.issue(phx::make_all_gather(call.group().lane(), call.buffers()), work) : call.status();
  });
}

phx_status phx_reduce_scatter(phx_group *group, const void *in, void *out, size_t count, int32_t dtype, int32_t op,
                              const phx_options *options, phx_work **work) {
  return guarded("reduce_scatter", [&]() -> phx_status {
    Call call(Kind::kReduceScatter, group, options);
    if (!call.ok()) return call.status();
    const size_t n = call.group_size();
    call.data(in, n, out, 1, count, dtype)
        .overlap(n * count, count, -static_cast<ptrdiff_t>(call.group().group_rank() * count), true)
        .reduce(op);
    return call.ok() ? call.issue(phx::make_reduce_scatter(call.group().lane(), call.buffers(), call.reduction()), work)
                     : call.status();
  });
}

phx_status phx_all_to_all(phx_group *group, const void *in, void *out, size_t count, int32_t dtype,
                          const phx_options *options, phx_work **work) {
  return guarded("all_to_all", [&]() -> phx_status {
    Call call(Kind::kAllToAll, group, options);
    if (!call.ok()) return call.status();
    const size_t n = call.group_size();
    call.data(in, n, out, n, count, dtype).overlap(n * count, n * count, 0, false);
    return call.ok() ? call.issue(phx::make_all_to_all(call.group().lane(), call.buffers()), work) : call.status();
  });
}

phx_status phx_all_to_all_v(phx_group *group, const void *in, const size_t *in_counts, void *out,
                            const size_t *out_counts, int32_t dtype, const phx_options *options, phx_work **work) {
  return guarded("all_to_all_v", [&]() -> phx_status {
    Call call(Kind::kAllToAllV, group, options);
    if (!call.ok()) return call.status();
    if (in_counts == nullptr || out_counts == nullptr)
      return fail(PHX_ERR_INVALID, "all_to_all_v", "all_to_all_v: a list of counts is NULL");
    constexpr size_t kMost = size_t{1} << 48;  // keeps sums far from overflow
    for (int i = 0; i < call.group_size(); ++i)
      if (in_counts[i] > kMost || out_counts[i] > kMost)
        return fail(PHX_ERR_INVALID, "all_to_all_v", "all_to_all_v: a count is more than memory can hold");
    const size_t ins = sum(in_counts, call.group_size()), outs = sum(out_counts, call.group_size());
    if ((ins != 0 && in == nullptr) || (outs != 0 && out == nullptr))
      return fail(PHX_ERR_INVALID, "all_to_all_v", "all_to_all_v: a buffer is NULL");
    // The counts differ from rank to rank, so they are compared in the first round and not in the record.
    char none = 0;
    call.data(in != nullptr ? in : &none, 1, out != nullptr ? out : &none, 1, 0, dtype).overlap(ins, outs, 0, false);
    if (!call.ok()) return call.status();
    return call.issue(
        phx::make_all_to_all_v(call.group().lane(), call.buffers(), in_counts, out_counts, work != nullptr), work);
  });
}

phx_status phx_broadcast(phx_group *group, void *buffer, size_t count, int32_t dtype, int32_t root_group_rank,
                         const phx_options *options, phx_work **work) {
  return guarded("broadcast", [&]() -> phx_status {
    Call call(Kind::kBroadcast, group, options);
    if (!call.ok()) return call.status();
    call.data(buffer, 1, buffer, 1, count, dtype).root(root_group_rank);
    return call.ok() ? call.issue(phx::make_broadcast(call.group().lane(), call.buffers(), root_group_rank), work)
                     : call.status();
  });
}

// ---- on symmetric memory

static phx_status symm_call(Kind kind, phx_symm *symm, size_t offset, void *out, size_t in_parts, size_t out_parts,
                            size_t count, int32_t dtype, int32_t op, int32_t root, const phx_options *options,
                            phx_work **work) {
  return guarded(phx::kind_name(kind), [&]() -> phx_status {
    Call call(kind, symm, options);
    if (!call.ok()) return call.status();
    phx::Symm &s = *symm->symm;
    char *in = s.buffer(s.group_rank()) + offset;
    call.data(in, in_parts, kind == Kind::kSymmBroadcast ? in : out, out_parts, count, dtype);
    if (op != 0) call.reduce(op);
    if (root >= 0 || kind == Kind::kSymmBroadcast) call.root(root);
    if (call.ok()) call.inside(s, offset, in_parts * count * call.buffers().item);
    const bool in_place = kind == Kind::kSymmAllReduce || kind == Kind::kSymmBroadcast;
    call.overlap(in_parts * count, out_parts * count, 0, in_place);
    if (!call.ok()) return call.status();
    return call.issue(phx::make_symm(kind, s.shared_from_this(), offset, call.buffers(), call.reduction(), root), work);
  });
}

phx_status phx_symm_all_reduce(phx_symm *symm, size_t offset, void *out, size_t count, int32_t dtype, int32_t op,
                               const phx_options *options, phx_work **work) {
  if (op == 0) return fail(PHX_ERR_INVALID, "symm_all_reduce", "symm_all_reduce: Invalid reduce operation 0");
  return symm_call(Kind::kSymmAllReduce, symm, offset, out, 1, 1, count, dtype, op, -1, options, work);
}

phx_status phx_symm_all_gather(phx_symm *symm, size_t offset, void *out, size_t count, int32_t dtype,
                               const phx_options *options, phx_work **work) {
  const size_t n = symm == nullptr ? 1 : symm->symm->size();
  return symm_call(Kind::kSymmAllGather, symm, offset, out, 1, n, count, dtype, 0, -1, options, work);
}

phx_status phx_symm_reduce_scatter(phx_symm *symm, size_t offset, void *out, size_t count, int32_t dtype, int32_t op,
                                   const phx_options *options, phx_work **work) {
  if (op == 0) return fail(PHX_ERR_INVALID, "symm_reduce_scatter", "symm_reduce_scatter: Invalid reduce operation 0");
  const size_t n = symm == nullptr ? 1 : symm->symm->size();
  return symm_call(Kind::kSymmReduceScatter, symm, offset, out, n, 1, count, dtype, op, -1, options, work);
}

phx_status phx_symm_all_to_all(phx_symm *symm, size_t offset, void *out, size_t count, int32_t dtype,
                               const phx_options *options, phx_work **work) {
  const size_t n = symm == nullptr ? 1 : symm->symm->size();
  return symm_call(Kind::kSymmAllToAll, symm, offset, out, n, n, count, dtype, 0, -1, options, work);
}

phx_status phx_symm_broadcast(phx_symm *symm, size_t offset, size_t count, int32_t dtype, int32_t root_group_rank,
                              const phx_options *options, phx_work **work) {
  return symm_call(Kind::kSymmBroadcast, symm, offset, nullptr, 1, 1, count, dtype, 0, root_group_rank, options, work);
}

// ---- works

phx_status phx_work_test(phx_work *work) {
  return guarded("work_test", [&]() -> phx_status {
    if (work == nullptr) return fail(PHX_ERR_INVALID, "work_test", "work_test: work is NULL");
    return work->group->engine().test(work->ptr);
  });
}

phx_status phx_work_wait(phx_work *work, int64_t timeout_ms) {
  return guarded("work_wait", [&]() -> phx_status {
    if (work == nullptr) return fail(PHX_ERR_INVALID, "work_wait", "work_wait: work is NULL");
    int64_t timeout = 0;
    const phx_status status = work->group->world().resolve_timeout("work_wait", timeout_ms, &timeout);
    return status != PHX_OK ? status : work->group->engine().wait(work->ptr, timeout);
  });
}

phx_status phx_work_error(phx_work *work, phx_error_info *out) {
  if (work == nullptr) return fail(PHX_ERR_INVALID, "work_error", "work_error: work is NULL");
  if (work->ptr->state.load(std::memory_order_acquire) >= 0)
    return fail(PHX_ERR_NOT_FOUND, "work_error", "work_error: this work has no error");
  return phx::copy_out(work->ptr->error, out, "work_error");
}

phx_work *phx_work_retain(phx_work *work) {
  if (work != nullptr) work->references.fetch_add(1, std::memory_order_relaxed);
  return work;
}

void phx_work_release(phx_work *work) {
  if (work != nullptr && work->references.fetch_sub(1, std::memory_order_acq_rel) == 1) delete work;
}
}
