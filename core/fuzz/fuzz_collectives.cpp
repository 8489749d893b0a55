// The collectives of the C ABI, called by a program that gets everything wrong that a library can check.
//
// The program controls counts, dtypes, ops, roots, offsets into symmetric memory, channels, versions of structs, which
// buffers are NULL, the same or overlapping, what is started and when it is waited for; on one rank, or on two whose
// calls need not match. Nothing may be written outside the buffers, nor after the handles are released; what must hold
// of every call is the same as in fuzz_c_api.cpp.
#include "rank.h"

namespace {

class Caller final : public fuzz::Rank {
 public:
  // One block that all have met over, so that calls reach their work at once.
  Caller(const uint8_t *data, size_t size, int rank, int world_size, phx_store *store)
      : Rank(data, size, rank, world_size, store) {
    for (void *&block : blocks_) MUST(phx_mem_alloc(world_, nullptr, kBlockBytes, &block) == PHX_OK);
    rendezvous();
  }

 private:
  static constexpr size_t kBlockBytes = 8192;

  void call() override {
    switch (args_.below(6)) {
      case 0: return call_message();
      case 1: return call_work();
      case 2: return call_symm_collective();
      case 3: return call_coalesced();
      case 4: return change();
      default: return call_collective();
    }
  }
  static size_t bytes_of(size_t count, size_t item_bytes, size_t parts) {
    return count > 4096 ? 16 : count * item_bytes * parts;  // what no memory could hold must not be touched
  }
  static size_t total_of(const std::vector<size_t> &counts) {
    size_t total = 0;
    for (const size_t count : counts) total = count > 4096 ? count : std::max(total, total + count);
    return total;
  }
  void call_message();
  void call_work();
  void change();
  void call_symm_collective();
  void call_collective();
  void call_coalesced();
};

void Caller::call_message() {
  phx_group *group = groups_.pick(args_);
  const size_t count = args_.count();
  const int32_t dtype = args_.dtype(), peer = args_.rank();
  const auto tag = static_cast<uint32_t>(args_.below(2));
  char *buffer = args_.one_in(16) ? nullptr : args_.make(bytes_of(count, phx_dtype_size(dtype), 1));
  const phx_options *options = args_.options();
  const bool sends = args_.below(2) == 0;
  phx_work **out = work();
  keep_work(sends ? phx_send(group, buffer, count, dtype, peer, tag, options, out)
                  : phx_recv(group, buffer, count, dtype, peer, tag, options, out),
            out);
}

void Caller::call_work() {
  phx_work *work_to_use = works_.pick(args_);
  int32_t source = 0;
  phx_status status = PHX_OK;
  switch (args_.below(5)) {
    case 0:
      status = phx_work_test(work_to_use);
      if (status != PHX_IN_PROGRESS) fuzz::must_end_well(status);
      break;
    case 1: fuzz::must_end_well(phx_work_wait(work_to_use, args_.timeout_ms())); break;
    case 2:
      (void)phx_work_get_error(work_to_use, args_.structure(phx_error_info{}));
      (void)phx_work_get_source(work_to_use, args_.one_in(8) ? nullptr : &source);
      break;
    case 3: works_.share(args_); break;
    default: works_.drop(args_);
  }
}

// What the calls after it find: another tuning, another group, another symmetric block.
void Caller::change() {
  const int32_t all[] = {0, 1};
  phx_group *group = groups_.pick(args_);
  phx_tuning tuning{};
  switch (args_.below(5)) {
    case 0:
      tuning.one_shot_bytes = args_.below(4) * 64;
      tuning.chunk_bytes = 4096;
      tuning.streaming_bytes = args_.below(256);
      tuning.push_bytes = 64;
      fuzz::must_end_well(phx_group_set_tuning(group, args_.structure(tuning), args_.timeout_ms()));
      break;
    case 1: {
      phx_group **out = groups_.out(args_);
      groups_.keep(phx_group_create(world_, "another", all, size_, fuzz::kTimeoutMs, out), args_);
      break;
    }
    case 2: groups_.drop(args_); break;
    case 3: symms_.drop(args_); break;
    default: rendezvous();
  }
}

void Caller::call_collective() {
  phx_group *group = groups_.pick(args_);
  const size_t n = size_of(group);
  const size_t count = args_.count();
  const int32_t dtype = args_.dtype(), op = args_.op(), root = args_.rank();
  const size_t item = phx_dtype_size(dtype), one = bytes_of(count, item, 1), all = bytes_of(count, item, n);
  const std::vector<size_t> ins = args_.counts(static_cast<int>(n)), outs = args_.counts(static_cast<int>(n));
  const size_t *list = args_.one_in(16) ? nullptr : ins.data();
  const size_t listed = bytes_of(total_of(ins), item, 1);
  const phx_options *options = args_.options();
  const size_t what = args_.below(11);
  phx_work **w = work();
  switch (what) {
    case 0: {
      const auto b = args_.buffers(one, one);
      return keep_work(phx_all_reduce(group, b.in, b.out, count, dtype, op, options, w), w);
    }
    case 1: {
      const auto b = args_.buffers(one, all);
      return keep_work(phx_all_gather(group, b.in, b.out, count, dtype, options, w), w);
    }
    case 2: {
      const auto b = args_.buffers(listed, listed);
      return keep_work(phx_all_gather_v(group, b.in, b.out, list, dtype, options, w), w);
    }
    case 3: {
      const auto b = args_.buffers(all, one);
      return keep_work(phx_reduce_scatter(group, b.in, b.out, count, dtype, op, options, w), w);
    }
    case 4: {
      const auto b = args_.buffers(listed, listed);
      return keep_work(phx_reduce_scatter_v(group, b.in, b.out, list, dtype, op, options, w), w);
    }
    case 5: {
      const auto b = args_.buffers(all, all);
      return keep_work(phx_all_to_all(group, b.in, b.out, count, dtype, options, w), w);
    }
    case 6: {
      const auto b = args_.buffers(listed, bytes_of(total_of(outs), item, 1));
      return keep_work(phx_all_to_all_v(group, b.in, list, b.out, outs.data(), dtype, options, w), w);
    }
    case 7: {
      const auto b = args_.buffers(one, one);
      return keep_work(phx_broadcast(group, b.in, count, dtype, root, options, w), w);
    }
    case 8: {
      const auto b = args_.buffers(one, one);
      return keep_work(phx_reduce(group, b.in, b.out, count, dtype, op, root, options, w), w);
    }
    case 9: {
      const auto b = args_.buffers(one, all);
      return keep_work(phx_gather(group, b.in, b.out, count, dtype, root, options, w), w);
    }
    default: {
      const auto b = args_.buffers(all, one);
      return keep_work(phx_scatter(group, b.in, b.out, count, dtype, root, options, w), w);
    }
  }
}

// The struct_size of the first call is the distance from one to the next.
void Caller::call_coalesced() {
  phx_group *group = groups_.pick(args_);
  const size_t n = size_of(group), calls = args_.below(5);
  constexpr uint32_t kStrides[] = {0, 3, 4, sizeof(phx_call) - 1, sizeof(phx_call) + 8, UINT32_MAX};
  const uint32_t stride = args_.one_in(8) ? kStrides[args_.below(6)] : static_cast<uint32_t>(sizeof(phx_call));
  const size_t room = stride > 4096 ? sizeof(phx_call) : std::max<size_t>(stride, sizeof stride);
  char *bytes = args_.make(room * calls);
  for (size_t i = 0; i < calls; ++i) {
    phx_call call{};
    call.struct_size = stride;
    call.kind = static_cast<int32_t>(args_.below(10));
    call.count = args_.count();
    call.dtype = args_.dtype();
    call.op = args_.op();
    call.root_group_rank = args_.rank();
    call.flags = args_.one_in(16) ? 1 : 0;
    const size_t size = bytes_of(call.count, phx_dtype_size(call.dtype), n);
    const auto b = args_.buffers(size, size);
    call.in = call.kind == PHX_CALL_BROADCAST ? b.out : b.in;
    call.out = b.out;
    std::memcpy(bytes + i * room, &call, std::min(room, sizeof call));
  }
  const phx_options *options = args_.options();
  const auto *list = args_.one_in(16) ? nullptr : reinterpret_cast<const phx_call *>(bytes);
  phx_work **w = work();
  keep_work(phx_coalesced(group, list, calls, options, w), w);
}

void Caller::call_symm_collective() {
  phx_symm *symm = symms_.pick(args_);
  const size_t n = static_cast<size_t>(size_);
  const size_t offset = args_.offset(), count = args_.count();
  const int32_t dtype = args_.dtype(), op = args_.op(), root = args_.rank();
  const size_t item = phx_dtype_size(dtype), all = bytes_of(count, item, n);
  const std::vector<size_t> ins = args_.counts(size_), outs = args_.counts(size_);
  const size_t *list = args_.one_in(16) ? nullptr : ins.data();
  const size_t most = std::max(bytes_of(total_of(ins), item, 1), bytes_of(total_of(outs), item, 1));
  char *out = args_.buffers(0, std::max(all, most)).out;
  phx_symm_info info{};
  info.struct_size = sizeof info;
  // In place, if the block is as large as what is to be written.
  if (symm != nullptr && phx_symm_get_info(symm, &info) == PHX_OK && info.size >= std::max(all, most) &&
      args_.one_in(4))
    out = static_cast<char *>(info.base);
  const phx_options *options = args_.options();
  const size_t what = args_.below(11);
  phx_work **w = work();
  phx_status status = PHX_OK;
  switch (what) {
    case 0: status = phx_symm_all_reduce(symm, offset, out, count, dtype, op, options, w); break;
    case 1: status = phx_symm_all_gather(symm, offset, out, count, dtype, options, w); break;
    case 2: status = phx_symm_all_gather_v(symm, offset, out, list, dtype, options, w); break;
    case 3: status = phx_symm_reduce_scatter(symm, offset, out, count, dtype, op, options, w); break;
    case 4: status = phx_symm_reduce_scatter_v(symm, offset, out, list, dtype, op, options, w); break;
    case 5: status = phx_symm_all_to_all(symm, offset, out, count, dtype, options, w); break;
    case 6: status = phx_symm_all_to_all_v(symm, offset, list, out, outs.data(), dtype, options, w); break;
    case 7: status = phx_symm_broadcast(symm, offset, count, dtype, root, options, w); break;
    case 8: status = phx_symm_reduce(symm, offset, out, count, dtype, op, root, options, w); break;
    case 9: status = phx_symm_gather(symm, offset, out, count, dtype, root, options, w); break;
    default: status = phx_symm_scatter(symm, offset, out, count, dtype, root, options, w);
  }
  keep_work(status, w);
}

}  // namespace

extern "C" int LLVMFuzzerInitialize(int *, char ***) {
  fuzz::log_into_nothing();
  setenv("PHALANX_TUNING", "/dev/null", 1);
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  fuzz::run_ranks<Caller>(data, size);
  return 0;
}
