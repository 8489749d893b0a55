#include "wait/progress.h"

#include <algorithm>

namespace phx {

void Progress::add(std::weak_ptr<ProgressSource> source) {
  std::lock_guard<std::mutex> lock(mutex_);
  sources_.erase(std::remove_if(sources_.begin(), sources_.end(), [](const auto &known) { return known.expired(); }),
                 sources_.end());
  sources_.push_back(std::move(source));
}

void Progress::poll(const ProgressSource *caller) {
  std::vector<std::shared_ptr<ProgressSource>> sources;
  {
    std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
    if (!lock.owns_lock()) return;  // another thread of this rank is at it
    for (const auto &known : sources_)
      if (auto source = known.lock()) sources.push_back(std::move(source));
  }
  // Not under the lock: what completes may drop the last reference to a group.
  for (const auto &source : sources)
    if (source.get() != caller) source->advance_pending();
}

}  // namespace phx
