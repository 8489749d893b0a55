#include "window.h"

#ifdef C10D_BACKEND_HAS_WINDOW
#include "tensors.h"

namespace phalanx {
namespace {

constexpr int kMostDims = 16;
constexpr const char *kRegister = "window.tensor_register", *kWait = "window.wait_signal";

// What a rank tells the others of its tensor: whether it can be registered, dtype, number of dims and sizes.
constexpr int64_t kFacts = 3 + kMostDims;

}  // namespace

// A wait for a signal that the caller has not waited for yet.
class Window::Wait final : public c10d::Work {
 public:
  Wait(c10::intrusive_ptr<Window> window, int rank, Milliseconds timeout)
      : c10d::Work(rank, c10d::OpType::UNKNOWN),
        window_(std::move(window)),
        handle_(window_->window_),
        rank_(rank),
        timeout_(timeout) {}

  bool isCompleted() override {
    const std::lock_guard<std::mutex> guard(lock_);
    uint32_t come = 0;
    if (!done_) window_->check(window_->engine_->core().window_get_signals(handle_.get(), rank_, &come), kWait);
    if (come != 0) take(Milliseconds(1));
    return done_;
  }
  bool isSuccess() const override { return done_; }
  void synchronize() override { wait(kNoTimeout); }
  bool wait(Milliseconds timeout) override {
    const std::lock_guard<std::mutex> guard(lock_);
    if (!done_) take(timeout == kNoTimeout ? timeout_ : limited(timeout));
    return true;
  }

 private:
  void take(Milliseconds timeout) {
    window_->check(window_->engine_->core().window_wait_signal(handle_.get(), rank_, timeout.count()), kWait);
    done_ = true;
  }

  const c10::intrusive_ptr<Window> window_;
  const Handle handle_;
  const int rank_;
  const Milliseconds timeout_;
  std::mutex lock_;
  std::atomic<bool> done_{false};
};

Window::Window(c10::intrusive_ptr<Backend> backend)
    : backend_(std::move(backend)), engine_(backend_->engine_), size_(backend_->getSize()) {}

void Window::tensor_register(const at::Tensor &tensor, bool owning) {
  require(parts_.empty(), kRegister, ": double registration: deregister the tensor of this window first");
  std::string refusal;
  Hooks::Block block{};
  if (!tensor.defined() || !tensor.is_cpu() || !tensor.is_contiguous() || tensor.dim() > kMostDims) {
    refusal = "the tensor must be contiguous, on the CPU and of at most " + std::to_string(kMostDims) + " dims";
  } else if (block = engine_->hooks().block(tensor); block.base == nullptr) {
    refusal =
        "the tensor is not in memory that the ranks share (what a MemPool is for GPUs); allocate it by "
        "phalanx.symm_mem.empty";
  }

  // The ranks tell each other before they make the core's window, so that all of them raise if one must.
  at::Tensor facts = at::zeros({kFacts}, at::kLong);
  auto *const mine = facts.mutable_data_ptr<int64_t>();
  mine[0] = refusal.empty() ? 1 : 0;
  if (refusal.empty()) {
    mine[1] = static_cast<int64_t>(tensor.scalar_type());
    mine[2] = tensor.dim();
    for (int64_t dim = 0; dim < tensor.dim(); ++dim) mine[3 + dim] = tensor.size(dim);
  }
  at::Tensor all = at::empty({size_, kFacts}, at::kLong);
  c10d::AllgatherOptions opts;
  opts.asyncOp = false;
  backend_->_allgather_base(all, facts, opts);
  const auto facts_of = [&](int rank) { return all.const_data_ptr<int64_t>() + rank * kFacts; };
  require(refusal.empty(), kRegister, ": ", refusal);
  for (int rank = 0; rank < size_; ++rank)
    require(facts_of(rank)[0] != 0, kRegister, ": rank ", rank,
            " of the group gave a tensor that cannot be registered; its own error says why");

  const Core &core = engine_->core();
  const Milliseconds timeout = backend_->limit(c10d::kUnsetTimeout);
  phx_window *window = nullptr;
  void *const base = tensor.nbytes() == 0 ? block.base : tensor.mutable_data_ptr();
  check(core.window_create(engine_->group(timeout, kRegister).get(), block.world, base, tensor.nbytes(),
                           timeout.count(), &window),
        kRegister);
  window_ = Handle(window, core.window_release);
  for (int rank = 0; rank < size_; ++rank) {
    const int64_t *const facts_of_rank = facts_of(rank);
    Part part;
    part.dtype = static_cast<at::ScalarType>(facts_of_rank[1]);
    part.sizes.assign(facts_of_rank + 3, facts_of_rank + 3 + facts_of_rank[2]);
    part.count = c10::multiply_integers(part.sizes);
    if (void *const place = core.window_memory(window, rank))
      part.mapped = at::from_blob(
          place, part.sizes, [held = window_](void *) {}, at::TensorOptions().dtype(part.dtype).device(at::kCPU));
    parts_.push_back(std::move(part));
  }
  if (owning) kept_ = tensor;
}

void Window::tensor_deregister() {
  const char *const what = "window.tensor_deregister";
  require(!parts_.empty(), what, ": no tensor is registered; call tensor_register first");
  check(engine_->core().window_flush(window_.get(), backend_->limit(c10d::kUnsetTimeout).count()), what);
  c10d::BarrierOptions opts;
  opts.asyncOp = false;
  backend_->barrier(opts);  // what the others put has arrived
  parts_.clear();
  window_.reset();
  kept_.reset();
}

const Window::Part &Window::part(int64_t rank, const char *what) const {
  require(!parts_.empty(), what, ": the window is not registered with a tensor; call tensor_register first");
  check_rank(rank, what);
  return parts_[rank];
}

void Window::check_rank(int64_t rank, const char *what) const {
  require(rank >= 0 && rank < size_, what, ": rank ", rank, " is not in the group, which has ranks 0 to ", size_ - 1);
}

void Window::check_fits(const at::Tensor &tensor, int64_t rank, int64_t offset, const char *what) const {
  const Part &target = parts_[rank];
  require(offset >= 0, what, ": the offset must be nonnegative, and is ", offset);
  require(tensor.scalar_type() == target.dtype, what, ": the dtype ", tensor.scalar_type(),
          " does not match that of the window of rank ", rank, ", ", target.dtype);
  require(offset <= target.count && tensor.numel() <= target.count - offset, what, ": ", tensor.numel(),
          " elements at offset ", offset, " exceeds the window size of rank ", rank, ", ", target.count, " elements");
}

void Window::check(phx_status status, const char *what) const {
  if (status != PHX_OK) throw_status(status, named(what, engine_->core().last_error()));
}

C10dWork Window::put(const at::Tensor &tensor, int64_t rank, int64_t offset, bool, const c10d::PutOptions &opts) {
  const char *const what = "window.put";
  part(rank, what);
  require(tensor.defined() && tensor.is_cpu(), what, ": the tensor must be on the CPU");
  check_fits(tensor, rank, offset, what);
  const at::Tensor source = tensor.resolve_conj().resolve_neg().contiguous();
  check(engine_->core().window_put(window_.get(), static_cast<int32_t>(rank),
                                   static_cast<size_t>(offset) * source.element_size(), source.const_data_ptr(),
                                   source.nbytes(), 1, backend_->limit(opts.timeout).count()),
        what);
  return work_of({});
}

at::Tensor Window::map_remote_tensor(int64_t rank) {
  const char *const what = "window.map_remote_tensor";
  const Part &theirs = part(rank, what);
  if (!theirs.mapped.defined())
    throw_status(PHX_ERR_UNSUPPORTED, c10::str(what, ": rank ", rank,
                                               " is on another host, whose memory this process cannot map. Copy it by ",
                                               "phalanx.collectives.c10d.window_get, or write it by window.put"));
  return theirs.mapped.alias();
}

C10dWork Window::signal(int64_t rank, bool, const c10d::SignalOptions &opts) {
  const char *const what = "window.signal";
  part(rank, what);
  check(engine_->core().window_put(window_.get(), static_cast<int32_t>(rank), 0, nullptr, 0, 1,
                                   backend_->limit(opts.timeout).count()),
        what);
  return work_of({});
}

void Window::get(const at::Tensor &out, int64_t rank, int64_t offset) {
  const char *const what = "window_get";
  part(rank, what);
  require(out.defined() && out.is_cpu() && out.is_contiguous(), what, ": `out` must be contiguous and on the CPU");
  check_fits(out, rank, offset, what);
  check(engine_->core().window_get(window_.get(), static_cast<int32_t>(rank),
                                   static_cast<size_t>(offset) * out.element_size(), out.mutable_data_ptr(),
                                   out.nbytes(), backend_->limit(c10d::kUnsetTimeout).count()),
        what);
}

C10dWork Window::wait_signal(int64_t rank, bool async, const c10d::WaitSignalOptions &opts) {
  part(rank, kWait);
  const Milliseconds timeout = backend_->limit(opts.timeout);
  auto self = c10::intrusive_ptr<Window>::unsafe_reclaim_from_nonowning(this);
  auto work = c10::make_intrusive<Wait>(std::move(self), static_cast<int>(rank), timeout);
  if (!async) work->wait(kNoTimeout);
  return work;
}

c10d::WindowAttr Window::get_attr(int64_t rank) {
  check_rank(rank, "window.get_attr");
  return {c10d::WindowAccessType::UNIFIED};
}

c10::intrusive_ptr<c10d::Window> Backend::new_window(const std::optional<at::Tensor> &tensor) {
  auto window = c10::make_intrusive<Window>(c10::intrusive_ptr<Backend>::unsafe_reclaim_from_nonowning(this));
  if (tensor) window->tensor_register(*tensor, true);
  return window;
}

}  // namespace phalanx
#endif
