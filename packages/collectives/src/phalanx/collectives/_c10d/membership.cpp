// What a backend does when its members change, and the hooks and timeouts that torch 2.14 added.
#include <algorithm>

#include "backend.h"

namespace phalanx {

void AbortHooks::add(int64_t id, std::function<void()> hook) {
  const std::lock_guard<std::mutex> guard(lock_);
  hooks_[id] = std::move(hook);
  any_ = true;
}

void AbortHooks::remove(int64_t id) {
  decltype(hooks_)::node_type removed;  // ends after the lock: it may hold objects of Python
  const std::lock_guard<std::mutex> guard(lock_);
  removed = hooks_.extract(id);
  any_ = !hooks_.empty();
}

void AbortHooks::run() {
  std::map<int64_t, std::function<void()>> hooks;
  {
    const std::lock_guard<std::mutex> guard(lock_);
    if (has_run_) return;
    has_run_ = true;
    hooks = hooks_;
  }
  for (const auto &[id, hook] : hooks) {
    try {
      hook();
    } catch (const std::exception &error) {  // the failure of the group is what the caller must see
      TORCH_WARN("phalanx: abort hook ", id, " raised: ", error.what());
    }
  }
}

void AbortHooks::reset() {
  const std::lock_guard<std::mutex> guard(lock_);
  has_run_ = false;
}

void Backend::take(Roster roster) {
  ranks_ = std::move(roster.ranks);
  store_ = std::move(roster.store);
  engine_ = std::move(roster.engine);
  engine_->set_timeout(Milliseconds(timeout_ms_.load()));
  engine_->set_abort_hooks(abort_hooks_);
  abort_hooks_->reset();
  sequence_ = 0;
  messages_ = 0;
  monitored_ = 0;
  coalescing_ = false;
  coalesced_.clear();
  posted_.clear();
}

c10::intrusive_ptr<c10d::Backend> Backend::shrink(const std::vector<int64_t> &ranks_to_exclude, int shrink_flags,
                                                  const c10::intrusive_ptr<Options> &options) {
  std::vector<int64_t> positions;
  for (int64_t rank = 0; rank < size_; ++rank)
    if (std::find(ranks_to_exclude.begin(), ranks_to_exclude.end(), rank) == ranks_to_exclude.end())
      positions.push_back(rank);
  for (const int64_t rank : ranks_to_exclude)
    require(rank >= 0 && rank < size_, "shrink: rank ", rank, " is not in group '", engine_->name(),
            "', which has ranks 0 to ", size_ - 1);
  require(std::find(positions.begin(), positions.end(), rank_) != positions.end(), "shrink: this rank (", rank_,
          ") is among the ranks to exclude; only those that stay may call it");
  const Milliseconds timeout = options ? limited(options->timeout) : Milliseconds(timeout_ms_.load());
  if (shrink_flags != 0) abort();
  return membership_.shrink(positions, timeout);
}

#ifdef C10D_BACKEND_HAS_RECONFIGURE
C10dWork Backend::reconfigure(const c10d::ReconfigureOptions &opts) {
  std::vector<std::string> handles;
  const bool ordered = std::holds_alternative<std::vector<std::string>>(opts.handles);
  std::visit([&](const auto &given) { handles.assign(given.begin(), given.end()); }, opts.handles);
  const Milliseconds timeout = opts.timeout ? limited(*opts.timeout) : Milliseconds(timeout_ms_.load());
  Roster roster = membership_.reconfigure(opts.uuid, handles, ordered, timeout);
  const auto before = std::exchange(engine_, roster.engine);
  before->close();      // works that are under way end as they would at the end of the group
  rank_ = roster.rank;  // constants before torch 2.14
  size_ = static_cast<int>(roster.ranks.size());
  take(std::move(roster));
  engine_->group(timeout, "phalanx:reconfigure");
  return work_of({});
}
#endif

Milliseconds Backend::limit_of_work(Milliseconds wish) {
  Milliseconds timeout = limit(wish);
  if (!is_extended_) return timeout;
  const std::lock_guard<std::mutex> guard(extensions_mutex_);
  extensions_.remove_if([](const Extension &each) {
    if (!each.until) return false;
    const WorkRef work = each.until->lock();
    return !work || work->isCompleted();
  });
  is_extended_ = !extensions_.empty();
  for (const Extension &each : extensions_) timeout = limited(timeout + each.extra);
  return timeout;
}

void Backend::begin(const WorkRef &work) {
  const std::lock_guard<std::mutex> guard(extensions_mutex_);
  for (Extension &each : extensions_)
    if (!each.until) each.until.emplace(work);
}

#ifdef C10D_BACKEND_HAS_HOOKS
void Backend::registerAbortHook(int64_t hook_id, c10d::AbortHook hook) {
  abort_hooks_->add(hook_id, std::move(hook));
  engine_->watch_all();
}

void Backend::addEphemeralTimeout(const Milliseconds &timeout) {
  const std::lock_guard<std::mutex> guard(extensions_mutex_);
  extensions_.push_back({timeout, std::nullopt});
  is_extended_ = true;
}

C10dWork Backend::gather_single(at::Tensor &output, at::Tensor &input, const c10d::GatherOptions &opts) {
  const Plan plan{c10d::OpType::GATHER, "phalanx:gather", "gather", opts.timeout, opts.asyncOp};
  return checked(plan, output, input, [&] {
    Tensors inputs{input};
    TensorLists outputs;
    if (root(opts.rootRank, "gather") == rank_) {
      check_tensor(output, "gather");
      TORCH_CHECK_VALUE(output.numel() == size_ * input.numel(), "gather: the output has ", output.numel(),
                        " elements, and the inputs of ", size_, " ranks have ", size_ * input.numel());
      TORCH_CHECK_VALUE(output.is_contiguous(), "gather: the output is not contiguous");
      outputs.emplace_back();
      for (const at::Tensor &block : output.view({size_, input.numel()}).unbind())
        outputs[0].push_back(block.view(input.sizes()));
    }
    return gather(outputs, inputs, opts);
  });
}
#endif

}  // namespace phalanx
