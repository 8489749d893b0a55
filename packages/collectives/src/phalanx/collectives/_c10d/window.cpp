#include "window.h"

#ifdef C10D_BACKEND_HAS_WINDOW
#include <cstring>

#include "tensors.h"

namespace phalanx {
namespace {

constexpr uint32_t kSignals = 0;  // the channel of the pads
constexpr int kMostDims = 16;
constexpr size_t kPadsBytes = 64;  // the block that the pads belong to; nothing is in it
constexpr const char *kRegister = "window.tensor_register";

// What a rank tells the others of its tensor: its place in the block, dtype, number of dims and sizes.
constexpr int64_t kFacts = 3 + kMostDims;

std::shared_ptr<phx_symm> own(const Core &core, phx_symm *symm) { return {symm, core.symm_release}; }

phx_symm_info info_of(const Core &core, phx_symm *symm, const char *what) {
  phx_symm_info info = PHX_SYMM_INFO_INIT;
  if (const phx_status status = core.symm_get_info(symm, &info); status != PHX_OK)
    throw_status(status, named(what, core.last_error()));
  return info;
}

}  // namespace

// A wait for a signal that the caller has not waited for yet.
class Window::Wait final : public c10d::Work {
 public:
  Wait(c10::intrusive_ptr<Window> window, int rank, Milliseconds timeout)
      : c10d::Work(rank, c10d::OpType::UNKNOWN), window_(std::move(window)), rank_(rank), timeout_(timeout) {}

  bool isCompleted() override {
    const std::lock_guard<std::mutex> guard(lock_);
    if (!done_ && window_->has_signal(rank_)) take(Milliseconds(1));
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
    window_->take(rank_, timeout);
    done_ = true;
  }

  const c10::intrusive_ptr<Window> window_;
  const int rank_;
  const Milliseconds timeout_;
  std::mutex lock_;
  std::atomic<bool> done_{false};
};

Window::Window(c10::intrusive_ptr<Backend> backend)
    : backend_(std::move(backend)),
      engine_(backend_->engine_),
      rank_(backend_->getRank()),
      size_(backend_->getSize()),
      taken_(size_) {
  const char *const what = "phalanx:new_window";
  const Core &core = engine_->core();
  const Milliseconds timeout = backend_->limit(c10d::kUnsetTimeout);
  phx_symm *symm = nullptr;
  const phx_status status =
      core.symm_alloc(engine_->group(timeout, what).get(), nullptr, kPadsBytes, timeout.count(), &symm);
  if (status != PHX_OK) throw_status(status, named(what, core.last_error()));
  pads_ = own(core, symm);
  pad_stride_ = info_of(core, symm, what).pad_stride;
}

void Window::tensor_register(const at::Tensor &tensor, bool owning) {
  require(parts_.empty(), kRegister, ": double registration: deregister the tensor of this window first");
  std::string refusal;
  const char *block = nullptr;
  if (!tensor.defined() || !tensor.is_cpu() || !tensor.is_contiguous() || tensor.dim() > kMostDims)
    refusal = "the tensor must be contiguous, on the CPU and of at most " + std::to_string(kMostDims) + " dims";
  else if ((block = engine_->hooks().block(tensor)) == nullptr)
    refusal =
        "the tensor is not in memory that the ranks share (what a MemPool is for GPUs); allocate it by "
        "phalanx.symm_mem.empty";

  // The ranks tell each other before they meet in `rendezvous`, so that all of them raise if one must.
  at::Tensor facts = at::zeros({kFacts}, at::kLong);
  auto *const mine = facts.mutable_data_ptr<int64_t>();
  mine[0] = refusal.empty() ? static_cast<const char *>(tensor.const_data_ptr()) - block : -1;
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
    require(facts_of(rank)[0] >= 0, kRegister, ": rank ", rank,
            " of the group gave a tensor that cannot be registered; its own error says why");

  const Core &core = engine_->core();
  phx_symm *const found = engine_->hooks().rendezvous(tensor, backend_->limit(c10d::kUnsetTimeout));
  const auto symm = own(core, core.symm_retain(found));
  for (int rank = 0; rank < size_; ++rank) {
    const int64_t *const facts_of_rank = facts_of(rank);
    const at::IntArrayRef sizes(facts_of_rank + 3, static_cast<size_t>(facts_of_rank[2]));
    void *const place = static_cast<char *>(core.symm_buffer(found, rank)) + facts_of_rank[0];
    const auto options = at::TensorOptions().dtype(static_cast<at::ScalarType>(facts_of_rank[1])).device(at::kCPU);
    parts_.push_back(at::from_blob(
        place, sizes, [symm](void *) {}, options));
  }
  if (owning) kept_ = tensor;
}

void Window::tensor_deregister() {
  const char *const what = "window.tensor_deregister";
  require(!parts_.empty(), what, ": no tensor is registered; call tensor_register first");
  c10d::BarrierOptions opts;
  opts.asyncOp = false;
  backend_->barrier(opts);  // what the others put has arrived
  parts_.clear();
  kept_.reset();
}

const at::Tensor &Window::part(int64_t rank, const char *what) const {
  require(!parts_.empty(), what, ": the window is not registered with a tensor; call tensor_register first");
  check_rank(rank, what);
  return parts_[rank];
}

void Window::check_rank(int64_t rank, const char *what) const {
  require(rank >= 0 && rank < size_, what, ": rank ", rank, " is not in the group, which has ranks 0 to ", size_ - 1);
}

C10dWork Window::put(const at::Tensor &tensor, int64_t rank, int64_t offset, bool, const c10d::PutOptions &) {
  const char *const what = "window.put";
  const at::Tensor &target = part(rank, what);
  require(tensor.defined() && tensor.is_cpu(), what, ": the tensor must be on the CPU");
  require(offset >= 0, what, ": the offset must be nonnegative, and is ", offset);
  require(tensor.scalar_type() == target.scalar_type(), what, ": the dtype ", tensor.scalar_type(),
          " does not match that of the window of rank ", rank, ", ", target.scalar_type());
  require(offset <= target.numel() && tensor.numel() <= target.numel() - offset, what, ": ", tensor.numel(),
          " elements at offset ", offset, " exceeds the window size of rank ", rank, ", ", target.numel(), " elements");
  const at::Tensor source = tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg()
                                ? tensor
                                : tensor.resolve_conj().resolve_neg().contiguous();
  char *const place = static_cast<char *>(target.mutable_data_ptr()) + offset * target.element_size();
  std::memmove(place, source.const_data_ptr(), source.nbytes());
  count(rank, what);
  return work_of({});
}

at::Tensor Window::map_remote_tensor(int64_t rank) { return part(rank, "window.map_remote_tensor").alias(); }

C10dWork Window::signal(int64_t rank, bool, const c10d::SignalOptions &) {
  part(rank, "window.signal");
  count(rank, "window.signal");
  return work_of({});
}

C10dWork Window::wait_signal(int64_t rank, bool async, const c10d::WaitSignalOptions &opts) {
  part(rank, "window.wait_signal");
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

void Window::count(int64_t rank, const char *what) const {
  const Core &core = engine_->core();
  const phx_status status = core.symm_put_signal(pads_.get(), static_cast<int32_t>(rank), kSignals);
  if (status != PHX_OK) throw_status(status, named(what, core.last_error()));
}

bool Window::has_signal(int rank) const {
  const uint32_t *const pad = engine_->core().symm_signal_pad(pads_.get(), rank_);
  return __atomic_load_n(pad + static_cast<size_t>(rank) * pad_stride_ + kSignals, __ATOMIC_ACQUIRE) != taken_[rank];
}

void Window::take(int rank, Milliseconds timeout) {
  const Core &core = engine_->core();
  const phx_status status = core.symm_wait_signal(pads_.get(), rank, kSignals, timeout.count());
  if (status != PHX_OK) throw_status(status, named("window.wait_signal", core.last_error()));
  ++taken_[rank];
}

c10::intrusive_ptr<c10d::Window> Backend::new_window(const std::optional<at::Tensor> &tensor) {
  auto window = c10::make_intrusive<Window>(c10::intrusive_ptr<Backend>::unsafe_reclaim_from_nonowning(this));
  if (tensor) window->tensor_register(*tensor, true);
  return window;
}

}  // namespace phalanx
#endif
