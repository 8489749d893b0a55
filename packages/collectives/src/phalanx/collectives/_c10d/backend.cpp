// The rest of the backend: its lifetime, coalescing, sparse all_reduce and barriers. collectives.cpp and messages.cpp
// have the other calls.
#include "backend.h"

#include <algorithm>
#include <thread>

#include "tensors.h"

namespace phalanx {
namespace {

using c10d::OpType;

// Number of coalesced works that are kept although they are complete.
constexpr size_t kMostPending = 64;

// How long an answer that was given in time may take to arrive.
constexpr auto kDelay = std::chrono::seconds(2);

// The work of several works, or of none: then it is complete.
class Batch final : public c10d::Work {
 public:
  explicit Batch(std::vector<C10dWork> works) : c10d::Work(-1, OpType::COALESCED), works_(std::move(works)) {}

  bool isCompleted() override {
    return std::all_of(works_.begin(), works_.end(), [](const C10dWork &work) { return work->isCompleted(); });
  }
  bool isSuccess() const override {
    return std::all_of(works_.begin(), works_.end(), [](const C10dWork &work) { return work->isSuccess(); });
  }
  std::exception_ptr exception() const override {
    for (const C10dWork &work : works_)
      if (work->exception()) return work->exception();
    return nullptr;
  }
  void synchronize() override { wait(kNoTimeout); }
  bool wait(Milliseconds timeout) override {
    for (const C10dWork &work : works_) work->wait(timeout);
    return true;
  }
  std::vector<at::Tensor> result() override {
    std::vector<at::Tensor> all;
    for (const C10dWork &work : works_)
      for (const at::Tensor &each : work->result()) all.push_back(each);
    return all;
  }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    const auto type = c10::FutureType::create(c10::ListType::create(c10::TensorType::get()));
    c10::List<c10::intrusive_ptr<c10::ivalue::Future>> futures(type);
    for (const C10dWork &work : works_) futures.push_back(work->getFuture());
    return c10::collectAll(futures);
  }

 private:
  const std::vector<C10dWork> works_;
};

}  // namespace

C10dWork work_of(std::vector<C10dWork> works) { return c10::make_intrusive<Batch>(std::move(works)); }

Backend::Backend(Roster roster, Milliseconds timeout, Membership membership)
    : c10d::Backend(roster.rank, static_cast<int>(roster.ranks.size())),
      membership_(std::move(membership)),
      timeout_ms_(timeout.count()) {
  take(std::move(roster));
}

Backend::~Backend() { engine_->close(); }

c10::intrusive_ptr<Backend::Options> Backend::getBackendOptions() {
  return c10::make_intrusive<Options>("phalanx", Milliseconds(timeout_ms_.load()));
}

void Backend::setTimeout(Milliseconds timeout) {
  const Milliseconds kept = limited(timeout);
  TORCH_CHECK_VALUE(timeout.count() >= 0 || kept == kLongest, "group '", engine_->name(), "': the timeout is ",
                    timeout.count(), " ms; it must not be negative");
  timeout_ms_ = kept.count();
  engine_->set_timeout(kept);
}

Milliseconds Backend::limit(Milliseconds wish) const {
  return wish == c10d::kUnsetTimeout ? Milliseconds(timeout_ms_.load()) : limited(wish);
}

uint64_t Backend::getSequenceNumberForGroup() { return sequence_.load(); }

c10d::ErrorType Backend::getError() {
  const auto group = engine_->group_if_met();
  phx_error_info info = PHX_ERROR_INFO_INIT;
  if (!group || core().group_get_error(group.get(), &info) != PHX_OK) return c10d::ErrorType::SUCCESS;
  if (info.status == PHX_ERR_TIMEOUT) return c10d::ErrorType::TIMEOUT;
  return info.rank == ranks_[rank_] ? c10d::ErrorType::COMM_ERROR : c10d::ErrorType::REMOTE_ERROR;
}

void Backend::abort() {
  abort_hooks_->run();
  engine_->abort("rank " + std::to_string(ranks_[rank_]) + " aborted process group '" + engine_->name() + "'");
}

void Backend::shutdown() { engine_->close(); }

void Backend::startCoalescing() {
  coalesced_.clear();
  posted_.clear();
  coalescing_ = true;
}

C10dWork Backend::endCoalescing() {
  coalescing_ = false;
  send_posted();
  return work_of(std::exchange(coalesced_, {}));
}

// An exception may keep torch from ending the coalescing, which then goes on; so complete works are dropped.
void Backend::coalesce(const C10dWork &work) {
  if (coalesced_.size() >= kMostPending) {
    const auto complete = [](const C10dWork &each) { return each->isCompleted() && each->isSuccess(); };
    coalesced_.erase(std::remove_if(coalesced_.begin(), coalesced_.end(), complete), coalesced_.end());
  }
  coalesced_.push_back(work);
}

C10dWork Backend::issue(const Plan &plan, Buffers buffers, Issue call) {
  if (const at::Device device = device_of(buffers, plan.title + 8); !device.is_cpu())
    return put_on_stream(plan, std::move(buffers), device, call);
  core_was_called_ = true;
  const Milliseconds timeout = limit_of_work(plan.timeout);
  const auto group = engine_->group(timeout, plan.title);
  engine_->sweep();
  const uint64_t sequence = plan.message ? messages_.load() : ++sequence_;
  auto work = c10::make_intrusive<Work>(engine_, plan.type, plan.title, std::move(buffers), sequence, timeout);
  if (is_extended_) begin(work);
  phx_options options = PHX_OPTIONS_INIT;
  options.channel = kChannel;
  options.timeout_ms = timeout.count();
  options.scale = plan.scale;
  phx_work *handle = nullptr;
  const bool async = plan.async || coalescing_;
  const phx_status status = call(group.get(), &options, async ? &handle : nullptr);
  if (status < 0) fail(plan, status);
  if (async) {
    work->started(handle);
    engine_->add(work);
    if (coalescing_) coalesce(work);
  } else {
    work->completed();
    work->wait();  // raises the error of a later call
  }
  return work;
}

C10dWork Backend::put_on_stream(const Plan &plan, Buffers buffers, const at::Device &device, Issue call) {
  core_was_called_ = true;
  const Milliseconds timeout = limit_of_work(plan.timeout);
  const auto group = engine_->group(timeout, plan.title);
  const uint64_t sequence = plan.message ? messages_.load() : ++sequence_;
  auto work = c10::make_intrusive<Work>(engine_, plan.type, plan.title, std::move(buffers), sequence, timeout);
  if (is_extended_) begin(work);
  const c10::DeviceGuard guard(device);
  const c10::Stream stream = c10::impl::VirtualGuardImpl(device.type()).getStream(device);
  phx_options options = PHX_OPTIONS_INIT;
  options.channel = kChannel;
  options.timeout_ms = timeout.count();
  options.scale = plan.scale;
  phx_gpu_options gpu = PHX_GPU_OPTIONS_INIT;
  gpu.stream = stream.native_handle();
  gpu.device = {PHX_DEVICE_CUDA, stream.device_index()};
  options.gpu = &gpu;
  const phx_status status = call(group.get(), &options, nullptr);
  if (status < 0) fail(plan, status);
  work->put_on(stream);
  if (coalescing_) coalesce(work);
  return work;
}

// The core gives no number to a call that it refuses.
void Backend::fail(const Plan &plan, phx_status status) {
  const std::string text = named(plan.title, core().last_error());
  if (status != PHX_ERR_INVALID && status != PHX_ERR_UNSUPPORTED)
    abort_hooks_->run();
  else if (!plan.message)
    --sequence_;
  throw_status(status, text);
}

Members Backend::members() const {
  return {getGroupUid().empty() ? engine_->name() : getGroupUid(), getGroupDesc(), rank_, ranks_};
}

C10dWork Backend::issue_coalesced(const Plan &plan, Buffers buffers, std::vector<phx_call> calls) {
  TORCH_CHECK_VALUE(!calls.empty(), plan.title + 8, ": the list of tensors is empty; give at least one");
  const auto block_bytes = [](const phx_call &call) { return bytes_of({call.dtype, call.count}); };
  const size_t size = size_;
  for (phx_call &reader : calls) {
    if (reader.kind == PHX_CALL_ALL_REDUCE) continue;  // it is in place, and the tensors written share no memory
    const size_t in_bytes = block_bytes(reader) * (reader.kind == PHX_CALL_REDUCE_SCATTER ? size : 1);
    for (const phx_call &writer : calls) {
      const size_t out_bytes = block_bytes(writer) * (writer.kind == PHX_CALL_ALL_GATHER ? size : 1);
      reader.in = copy_if_overlapping(reader.in, in_bytes, writer.out, out_bytes, buffers);
    }
  }
  return issue(plan, std::move(buffers), [&](auto *group, auto *options, auto **work) {
    return core().coalesced(group, calls.data(), calls.size(), options, work);
  });
}

C10dWork Backend::alltoall_base(at::Tensor &output, at::Tensor &input, std::vector<int64_t> &output_splits,
                                std::vector<int64_t> &input_splits, const c10d::AllToAllOptions &opts) {
  const char *const what = "all_to_all_single";
  check_tensor(output, what);
  check_tensor(input, what);
  check_same_dtype(output, input, what);
  const auto counts = [&](const at::Tensor &tensor, const std::vector<int64_t> &splits, const char *side) {
    const int64_t rows = tensor.dim() == 0 ? tensor.numel() : tensor.size(0);
    std::vector<int64_t> given = splits;
    if (given.empty()) {
      TORCH_CHECK_VALUE(rows % size_ == 0, what, ": dim 0 of the ", side, " has size ", rows,
                        ", which is not divisible by the group size ", size_, "; give split sizes");
      given.assign(size_, rows / size_);
    }
    TORCH_CHECK_VALUE(given.size() == static_cast<size_t>(size_), what, ": the split sizes of the ", side, " have ",
                      given.size(), " entries; give ", size_, ", one for each rank");
    int64_t sum = 0;
    std::vector<size_t> made;
    for (const int64_t split : given) {
      TORCH_CHECK_VALUE(split >= 0, what, ": the ", side, " has a split of size ", split, "; sizes are 0 or more");
      sum += split;
      made.push_back(elements_of(tensor, rows == 0 ? 0 : split * (tensor.numel() / rows)).count);
    }
    TORCH_CHECK_VALUE(sum == rows, what, ": the split sizes of the ", side, " add up to ", sum,
                      ", and its dim 0 has size ", rows, "; the two must be equal");
    return made;
  };
  const std::vector<size_t> out_counts = counts(output, output_splits, "output");
  const std::vector<size_t> in_counts = counts(input, input_splits, "input");
  const Recording recording = record([&] {
    const bool even = input_splits.empty() && output_splits.empty();
    return Comms{even ? "all_to_all" : "all_to_allv",
                 {input},
                 {output},
                 input.numel(),
                 output.numel(),
                 opts.asyncOp,
                 -1,
                 input_splits,
                 output_splits};
  });
  Buffers buffers;
  buffers.outputs = {output};
  void *out = writable(output, buffers);
  const void *in = copy_if_overlapping(readable(input, buffers), input.nbytes(), out, output.nbytes(), buffers);
  const Plan plan{OpType::ALLTOALL_BASE, "phalanx:all_to_all_single", opts.timeout, opts.asyncOp};
  return issue(plan, std::move(buffers),
               [&, dtype = elements_of(input).dtype](auto *group, auto *options, auto **work) {
                 return core().all_to_all_v(group, in, in_counts.data(), out, out_counts.data(), dtype, options, work);
               });
}

C10dWork Backend::alltoall(Tensors &outputs, Tensors &inputs, const c10d::AllToAllOptions &opts) {
  check_list(outputs.size(), "all_to_all");
  check_list(inputs.size(), "all_to_all");
  Buffers buffers;
  buffers.outputs = outputs;
  for (const Tensors *list : {&outputs, &inputs})
    for (const at::Tensor &each : *list) {
      check_tensor(each, "all_to_all");
      check_same_dtype(each, outputs[0], "all_to_all");
    }
  const Recording recording =
      record([&] { return Comms{"all_to_all", inputs, outputs, numel_of(inputs), numel_of(outputs), opts.asyncOp}; });
  const List out = writable(outputs, written_, buffers);
  List in = readable(inputs, read_, buffers);
  copy_overlapping(in, out, -1, buffers);
  const Plan plan{OpType::ALLTOALL, "phalanx:all_to_all", opts.timeout, opts.asyncOp};
  return issue(plan, std::move(buffers), [&](auto *group, auto *options, auto **work) {
    if (!in.flat) return core().all_to_all_blocks(group, in.blocks.data(), out.blocks.data(), out.dtype, options, work);
    return core().all_to_all_v(group, in.start(), in.counts().data(), out.start(), out.counts().data(), out.dtype,
                               options, work);
  });
}

// Gathers the indices and values of each rank and adds them up. It is complete on return.
C10dWork Backend::allreduce_sparse(Tensors &tensors, const c10d::AllreduceOptions &opts) {
  TORCH_CHECK_VALUE(tensors.size() == 1 && tensors[0].is_sparse() && tensors[0].is_cpu(),
                    "all_reduce: a sparse tensor must be the only one of the call, in COO layout and on the CPU");
  TORCH_CHECK_VALUE(static_cast<c10d::ReduceOp::RedOpType>(opts.reduceOp) == c10d::ReduceOp::SUM,
                    "all_reduce: the only ReduceOp for sparse tensors is SUM");
  const at::NoGradGuard no_grad;
  const at::Tensor mine = tensors[0].coalesce();
  c10d::AllgatherOptions gather;
  gather.timeout = opts.timeout;
  gather.asyncOp = false;
  at::Tensor count = at::tensor({mine._nnz()}, at::kLong);
  at::Tensor counts = at::empty({size_}, at::kLong);
  _allgather_base(counts, count, gather);
  const auto gathered = [&](const at::Tensor &block, const at::Tensor &like) {  // blocks: nnz first
    TensorLists outputs(1);
    for (int rank = 0; rank < size_; ++rank) {
      std::vector<int64_t> sizes = like.sizes().vec();
      sizes[0] = counts[rank].item<int64_t>();
      outputs[0].push_back(at::empty(sizes, like.options()));
    }
    Tensors inputs{block};
    allgather(outputs, inputs, gather);
    return at::cat(outputs[0]);
  };
  const at::Tensor rows = mine.indices().t().contiguous();
  const at::Tensor indices = gathered(rows, rows).t();
  const at::Tensor values = gathered(mine.values(), mine.values());
  const at::Tensor sum = at::sparse_coo_tensor(indices, values, mine.sizes()).coalesce();
  tensors[0].copy_(sum);
  Buffers buffers;
  buffers.outputs = tensors;
  auto work = c10::make_intrusive<Work>(engine_, OpType::_ALLREDUCE_SPARSE, "phalanx:all_reduce", std::move(buffers),
                                        sequence_.load(), limit(opts.timeout));
  work->completed();
  return work;
}

C10dWork Backend::barrier(const c10d::BarrierOptions &opts) {
  const Recording recording = record([&] { return Comms{"barrier", {}, {}, 0, 0, opts.asyncOp}; });
  if (opts.device && opts.device->is_cuda()) {
    const at::Device device(opts.device->type(), opts.device->has_index()
                                                     ? opts.device->index()
                                                     : c10::impl::VirtualGuardImpl(at::kCUDA).getDevice().index());
    const auto call = [this](auto *group, auto *options, auto **) { return core().barrier(group, options, nullptr); };
    return put_on_stream({OpType::BARRIER, "phalanx:barrier", opts.timeout, opts.asyncOp}, {}, device, call);
  }
  Buffers buffers;
  const at::Tensor one = at::zeros({1}, at::kByte);
  void *data = readable_and_writable(one, buffers);
  const auto call = [&](auto *group, auto *options, auto **work) {
    return core().all_reduce(group, data, data, 1, PHX_DTYPE_U8, PHX_OP_SUM, options, work);
  };
  return issue({OpType::BARRIER, "phalanx:barrier", opts.timeout, opts.asyncOp}, std::move(buffers), call);
}

// It goes through the store, so that the group stays usable when a rank does not come. The errors contain the phrases
// of gloo's errors, which programs look for.
void Backend::monitoredBarrier(const c10d::BarrierOptions &opts, bool wait_all_ranks) {
  const Milliseconds timeout = limit(opts.timeout);
  const auto name = [&](int rank) { return std::to_string(ranks_[rank]); };
  const auto failed = [&](const std::string &missing) {
    return (wait_all_ranks ? "Ranks " : "Rank ") + missing + " failed to pass monitoredBarrier";
  };
  const std::string reached = "Rank " + name(rank_) + " successfully reached monitoredBarrier, but received errors " +
                              "while waiting for send/recv from rank " + name(0) + ": ";
  std::string all;
  try {
    all = "monitored_barrier/" + engine_->token(timeout, "phalanx:monitored_barrier") + "/";
  } catch (const c10::DistBackendError &error) {  // the ranks have not met
    const std::string text = error.what_without_backtrace(), late = " still waits for rank(s) ";  // see _bootstrap.py
    const size_t from = text.find(late);
    if (from == std::string::npos) throw;
    if (rank_ != 0) C10_THROW_ERROR(DistBackendError, reached + text);
    const std::string missing = text.substr(from + late.size());
    const size_t end = wait_all_ranks ? missing.find(" to ") : missing.find_first_of(", ");
    C10_THROW_ERROR(DistBackendError, "Rank " + name(0) + " timed out in monitoredBarrier: " +
                                          failed(missing.substr(0, end)) + ": " + text);
  }
  const uint64_t number = monitored_++;
  const std::string base = all + std::to_string(number) + "/";
  const auto deadline = Clock::now() + timeout;
  const auto wait_for = [&](const std::string &key, Clock::time_point until) {
    for (auto pause = std::chrono::microseconds(200);; pause = std::min(2 * pause, std::chrono::microseconds(20000))) {
      if (store_->check({base + key})) return true;
      if (Clock::now() >= until) return false;
      std::this_thread::sleep_for(pause);
    }
  };
  const std::string about = "monitored_barrier on group '" + engine_->name() + "': timed out after " +
                            std::to_string(timeout.count()) + " ms (the timeout of " +
                            (timeout.count() == timeout_ms_.load() ? "the group" : "this call") + "): ";
  store_->set(base + std::to_string(rank_), std::string("here"));
  if (rank_ != 0) {
    // Rank 0 answers when its timeout is over.
    std::string answer = about + "rank " + name(0) + " did not reach or end it";
    if (wait_for("0", deadline) && wait_for("answer", Clock::now() + timeout + kDelay))
      answer = store_->get_to_str(base + "answer");
    if (answer == "all") return;
    C10_THROW_ERROR(DistBackendError, reached + answer);
  }
  std::string missing;
  for (int rank = 1; rank < size_; ++rank) {
    if (wait_for(std::to_string(rank), deadline)) continue;
    missing += (missing.empty() ? "" : ", ") + name(rank);
    if (!wait_all_ranks) break;
  }
  std::string answer = "all";
  if (!missing.empty()) answer = about + failed(missing);
  store_->set(base + "answer", answer);
  if (!missing.empty()) C10_THROW_ERROR(DistBackendError, answer);
  for (int rank = 1; rank < size_; ++rank) store_->deleteKey(base + std::to_string(rank));
  if (number == 0) return;
  for (const char *key : {"/0", "/answer"}) store_->deleteKey(all + std::to_string(number - 1) + key);  // all read them
}

}  // namespace phalanx
