#include "base/progress.h"

#include <algorithm>

namespace phx {

ProgressSource::~ProgressSource() {
  if (progress_ != nullptr) progress_->forget(*this);
}

void Progress::add(const std::shared_ptr<ProgressSource> &source) {
  source->progress_ = this;
  source->self_ = source;
}

void Progress::list(ProgressSource &source) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (source.listed_.load(std::memory_order_relaxed)) return;
  sources_.push_back(&source);
  source.listed_.store(true, std::memory_order_seq_cst);
  if (always_) call_attendant_locked();
}

// It stays for a while, because calling it takes longer than a step that finds nothing.
void Progress::call_attendant_locked() {
  constexpr int kSteps = 20;
  if (steps_left_ == 0 && attend_) attend_();
  steps_left_ = kSteps;
}

void Progress::call_attendant() {
  const std::lock_guard<std::mutex> lock(mutex_);
  call_attendant_locked();
}

void Progress::watch(ProgressSource &source) {
  began(source);
  const std::lock_guard<std::mutex> lock(mutex_);
  watched_.push_back(&source);
  call_attendant_locked();
}

void Progress::unwatch(ProgressSource &source) {
  ended(source);
  const std::lock_guard<std::mutex> lock(mutex_);
  watched_.erase(std::find(watched_.begin(), watched_.end(), &source));
}

Progress::Next Progress::step() {
  constexpr int kMostAtOnce = 100;  // the thread has other work
  attends_ = true;
  bool moves = true;
  for (int i = 0; i < kMostAtOnce && moves; ++i) moves = poll(nullptr);
  attends_ = false;
  std::shared_ptr<ProgressSource> watched;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    drop_idle();
    if (moves || insisted_ > 0 || (always_ && !sources_.empty())) return {true, -1};
    if (watched_.empty()) return {--steps_left_ > 0, -1};
    watched = watched_.front()->self_.lock();
    steps_left_ = 0;  // so that the attendant is called although it comes again by itself
  }
  return {true, watched ? watched->arm() : -1};
}

void Progress::forget(ProgressSource &source) {
  std::lock_guard<std::mutex> lock(mutex_);
  sources_.erase(std::remove(sources_.begin(), sources_.end(), &source), sources_.end());
  watched_.erase(std::remove(watched_.begin(), watched_.end(), &source), watched_.end());
}

void Progress::drop_idle() {
  const auto idle = [](ProgressSource *source) {
    if (source->pending_.load(std::memory_order_relaxed) > 0) return false;
    source->listed_.store(false, std::memory_order_seq_cst);
    if (source->pending_.load(std::memory_order_seq_cst) == 0) return true;
    source->listed_.store(true, std::memory_order_relaxed);  // an operation has begun meanwhile
    return false;
  };
  sources_.erase(std::remove_if(sources_.begin(), sources_.end(), idle), sources_.end());
}

bool Progress::poll(const ProgressSource *caller) {
  std::vector<std::shared_ptr<ProgressSource>> sources;
  {
    std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
    if (!lock.owns_lock()) return false;  // another thread of this rank is polling
    drop_idle();
    for (ProgressSource *source : sources_)
      if (source != caller)
        if (auto owner = source->self_.lock()) sources.push_back(std::move(owner));
  }
  // The lock is released: an operation that completes may drop the last reference to a group.
  bool moved = false;
  for (const auto &source : sources) moved |= source->advance_pending();
  return moved;
}

}  // namespace phx
