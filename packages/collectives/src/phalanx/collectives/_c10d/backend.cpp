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

void Backend::refuse(const c10::Error &error, const Plan &plan, bool tell) {
  const std::string text = error.what_without_backtrace();
  if (tell) engine_->refuse(text, limit(plan.timeout), plan.title);
  core_was_called_ = true;  // a collective that is made of others has told the ranks once
  require(dynamic_cast<const c10::ValueError *>(&error) == nullptr, text);
}

phx_status Backend::put_on(const c10::Stream &stream, phx_group *group, phx_options options, Issue call) {
  phx_gpu_options gpu = PHX_GPU_OPTIONS_INIT;
  gpu.stream = stream.native_handle();
  gpu.device = {PHX_DEVICE_CUDA, stream.device_index()};
  options.gpu = &gpu;
  return call(group, &options, nullptr);
}

C10dWork Backend::issue(const Plan &plan, Buffers &&buffers, Issue call, double scale) {
  const at::Device device = device_of(buffers, plan.what());
  core_was_called_ = true;
  const Milliseconds timeout = limit_of_work(plan.timeout);
  const auto group = engine_->group(timeout, plan.title);
  if (device.is_cpu()) engine_->sweep();
  const uint64_t sequence = plan.message ? messages_.load() : ++sequence_;
  auto work = c10::make_intrusive<Work>(engine_, plan.type, plan.title, std::move(buffers), sequence, timeout);
  if (is_extended_) begin(work);
  phx_options options = PHX_OPTIONS_INIT;
  options.channel = kChannel;
  options.timeout_ms = timeout.count();
  options.scale = scale;
  if (!device.is_cpu()) {
    const c10::DeviceGuard guard(device);
    const c10::Stream stream = current_stream(device);
    if (const phx_status status = put_on(stream, group.get(), options, call); status < 0) fail(plan, status);
    work->put_on(stream);
    if (coalescing_) coalesce(work);
    return work;
  }
  phx_work *handle = nullptr;
  const bool async = plan.async || coalescing_;
  if (const phx_status status = call(group.get(), &options, async ? &handle : nullptr); status < 0) fail(plan, status);
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

// The core gives no number to a call that it refuses.
void Backend::fail(const Plan &plan, phx_status status) {
  const std::string text = named(plan.title, core().last_error());
  if (status != PHX_ERR_INVALID && status != PHX_ERR_UNSUPPORTED)
    abort_hooks_->run();
  else if (!plan.message)
    --sequence_;
  throw_status(status, text);
}

Recording Backend::recording(const Plan &plan, at::TensorList inputs, at::TensorList outputs, int64_t rank,
                             at::IntArrayRef in_splits, at::IntArrayRef out_splits) const {
  Comms comms{plan.shown, inputs.vec(), outputs.vec(),   numel_of(inputs), numel_of(outputs),
              plan.async, rank,         in_splits.vec(), out_splits.vec(), plan.message};
  // Other ranks than the root have no list.
  if (plan.type == OpType::GATHER) comms.out_count = comms.in_count * size_;
  if (plan.type == OpType::SCATTER) comms.in_count = comms.out_count * size_;
  const Members members{getGroupUid().empty() ? engine_->name() : getGroupUid(), getGroupDesc(), rank_, ranks_};
  return Recording(members, std::move(comms), (plan.message ? messages_ : sequence_).load() + 1);
}

C10dWork Backend::barrier(const c10d::BarrierOptions &opts) {
  const Plan plan{OpType::BARRIER, "phalanx:barrier", "barrier", opts.timeout, opts.asyncOp};
  const Recording recording = record(plan, {}, {});
  Buffers buffers;
  if (opts.device && opts.device->is_cuda()) buffers.keep.push_back(at::empty({0}, *opts.device));  // on whose stream
  const auto call = [this](auto *group, auto *options, auto **work) { return core().barrier(group, options, work); };
  return issue(plan, std::move(buffers), call);
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
