#include "work.h"

#include <c10/core/GradMode.h>
#include <c10/core/StreamGuard.h>
#include <c10/util/Exception.h>

#include "engine.h"

namespace phalanx {

c10::Stream current_stream(const at::Device &device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

void (*throw_interruption)(const std::string &text) = [](const std::string &) {};

void throw_status(phx_status status, const std::string &text) {
  throw_interruption(text);
  switch (status) {
    case PHX_ERR_INVALID: throw InvalidArgument(text);
    case PHX_ERR_UNSUPPORTED: C10_THROW_ERROR(NotImplementedError, text);
    default: C10_THROW_ERROR(DistBackendError, text);
  }
}

std::string named(const char *title, const std::string &text) {
  std::string name = title;
  name.erase(0, name.find(':') + 1);
  return text.rfind(name, 0) == 0 ? text : name + ": " + text;
}

Work::Work(std::shared_ptr<Engine> engine, c10d::OpType type, const char *title, Buffers &&buffers, uint64_t sequence,
           Milliseconds timeout, bool recorded)
    : c10d::Work(-1, type, recorded ? title : nullptr, recorded ? Recording::inputs() : std::nullopt),
      engine_(std::move(engine)),
      title_(title),
      buffers_(std::move(buffers)),
      sequence_(sequence),
      timeout_(timeout) {}

Work::~Work() {
  if (handle_ != nullptr) engine_->core().work_release(handle_);
}

void Work::started(phx_work *handle) {
  handle_ = handle;
  deadline_ = Clock::now() + timeout_;
}

void Work::put_on(const c10::Stream &stream) {
  settle(PHX_OK, handle());  // the copies are on the stream as well
  stream_ = stream;
  event_.emplace(stream.device_type());
  event_->record(stream);
}

// Keeps the allocator from reusing the memory of the tensors before the stream has passed this operation.
void Work::used_on(const c10::Stream &stream) const {
  const c10::AutoGradMode no_grad(false);
  for (const at::Tensor &each : buffers_.keep) each.record_stream(stream);
  for (const auto &[to, from] : buffers_.copies) to.record_stream(stream);
}

Work::Handle Work::handle() const {
  const std::lock_guard<std::mutex> guard(lock_);
  return Handle(engine_->core().work_retain(handle_), engine_->core().work_release);
}

// Sets the result that the core gave. The caller holds the lock if other threads can have the work.
void Work::end(phx_status status, const std::string &text) {
  try {
    if (status < 0) throw_status(status, named(title_, text));
    if (!buffers_.copies.empty()) {
      const c10::AutoGradMode no_grad(false);
      for (const auto &[to, from] : buffers_.copies) to.copy_(from);
    }
    if (handle_ != nullptr) engine_->core().work_get_source(handle_, &source_);
  } catch (...) {
    error_ = std::current_exception();
  }
  buffers_.keep.clear();
  buffers_.copies.clear();
  // Before a waiting thread may see that it is done, and stop the profiler: an event that has not ended is lost.
  if (recordFunctionEndCallback_) recordFunctionEndCallback_();
  recordFunctionEndCallback_ = nullptr;
  done_.store(true, std::memory_order_release);
}

// Does the same from any thread, with what the core has just said of the handle. Only the first call has an effect.
void Work::settle(phx_status status, Handle handle) {
  const std::string text = status < 0 ? engine_->core().last_error() : "";
  handle.reset();  // callbacks may take long
  c10::intrusive_ptr<c10::ivalue::Future> future;
  phx_work *released = nullptr;
  {
    const std::lock_guard<std::mutex> guard(lock_);
    if (done_.load(std::memory_order_relaxed)) return;
    end(status, text);
    std::swap(released, handle_);
    future = future_;
  }
  engine_->core().work_release(released);
  const WorkRef self = WorkRef::unsafe_reclaim_from_nonowning(this);
  if (status < 0) engine_->run_abort_hooks();
  engine_->remove(this);  // first: a callback may end the group, which waits for what is not complete
  if (future) mark(future);
}

void Work::mark(const c10::intrusive_ptr<c10::ivalue::Future> &future) {
  if (error_)
    future->setErrorIfNeeded(error_);
  else
    future->markCompleted(c10::IValue(buffers_.outputs));
}

bool Work::is_over() const {
  const Handle handle = this->handle();
  if (!handle) return is_done();
  return engine_->core().work_test(handle.get()) != PHX_IN_PROGRESS || Clock::now() >= deadline_;
}

bool Work::poll(bool enforce) {
  Handle handle = this->handle();
  if (!handle) return is_done();
  phx_status status = engine_->core().work_test(handle.get());
  if (status == PHX_IN_PROGRESS && enforce && Clock::now() >= deadline_)
    status = engine_->core().work_expire(handle.get(), timeout_.count());
  if (status == PHX_IN_PROGRESS) return false;
  settle(status, std::move(handle));
  return true;
}

void Work::drain(Clock::time_point until, bool failed) {
  Handle handle = this->handle();
  if (!handle) return;
  const Core &core = engine_->core();
  const auto now = Clock::now();
  const int64_t left = std::chrono::ceil<Milliseconds>((failed ? now + std::chrono::seconds(1) : until) - now).count();
  const bool waits = failed || (left > 0 && !receives());
  const phx_status status = waits ? core.work_wait(handle.get(), left) : core.work_test(handle.get());
  if (status != PHX_IN_PROGRESS) settle(status, std::move(handle));
}

bool Work::isCompleted() {
  if (is_done()) return has_passed();
  engine_->refuse_fork(title_);
  {
    const std::lock_guard<std::mutex> guard(lock_);
    if (future_) return false;  // a thread of the engine completes it, and runs the callbacks: they may take long
  }
  return poll(true) && has_passed();
}

bool Work::wait(Milliseconds timeout) {
  if (!is_done()) {
    engine_->refuse_fork(title_);
    if (Handle handle = this->handle()) {
      const auto limit = timeout == kNoTimeout ? timeout_ : limited(timeout);
      const phx_status status = engine_->core().work_wait(handle.get(), limit.count());
      settle(status, std::move(handle));
    }
  }
  if (error_) std::rethrow_exception(error_);
  if (!event_) return true;
  event_->block(current_stream(stream_->device()));
  if (opType_ == c10d::OpType::BARRIER) {
    event_->synchronize();
    engine_->check(title_);
  }
  return true;
}

void Work::abort() { engine_->abort("a work was aborted"); }

c10::intrusive_ptr<c10::ivalue::Future> Work::getFuture() {
  c10::intrusive_ptr<c10::ivalue::Future> future;
  bool done = false;
  engine_->refuse_fork(title_);
  {
    const std::lock_guard<std::mutex> guard(lock_);
    if (future_) return future_;
    const auto devices = stream_ ? std::vector<c10::Device>{stream_->device()} : std::vector<c10::Device>();
    future = future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()), devices);
    done = done_.load(std::memory_order_relaxed);
  }
  if (done) {
    const c10::OptionalStreamGuard guard(stream_);  // users of the value wait for this stream
    mark(future);
  } else {
    engine_->watch(WorkRef::unsafe_reclaim_from_nonowning(this));
  }
  return future;
}

// The future of a c10d::WorkResult, as torch's own backends have it.
c10::intrusive_ptr<c10::ivalue::Future> Work::getFutureResult() {
  return getFuture()->then(
      [](const c10::ivalue::Future &future) {
        const auto result = future.hasError() ? c10d::WorkResult::COMM_ERROR : c10d::WorkResult::SUCCESS;
        return c10::IValue(static_cast<int64_t>(result));
      },
      c10::IntType::get());
}

}  // namespace phalanx
