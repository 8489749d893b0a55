#include "engine.h"

#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <ATen/ATen.h>
#include <c10/util/Exception.h>
#include <c10/util/thread_name.h>

#include <algorithm>
#include <atomic>

namespace phalanx {
namespace {

constexpr auto kDrain = std::chrono::seconds(5);  // what close waits for peers
// Between looks at what is under way. Long enough to leave the core to the ranks that are waited for.
constexpr auto kShortestPause = std::chrono::microseconds(20);
constexpr auto kLongestPause = std::chrono::microseconds(200);
constexpr int kYields = 500;                           // before the first pause
constexpr auto kMoved = std::chrono::microseconds(4);  // a look that took longer has moved data
constexpr size_t kSwept = 8;                           // works that a call looks at, in turn

// How many forks lie between this process and the one that loaded this module.
std::atomic<uint32_t> forks{0};
const int forks_are_counted = pthread_atfork(nullptr, nullptr, [] { forks.fetch_add(1, std::memory_order_relaxed); });

// Signals are for the threads of the application: a thread that is started meanwhile takes none.
class SignalsBlocked {
 public:
  SignalsBlocked() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }

 private:
  sigset_t before_;
};

}  // namespace

Core load_core(const std::unordered_map<std::string, uintptr_t> &addresses) {
  Core core;
  const auto address = [&](const char *name) {
    const auto found = addresses.find(name);
    TORCH_CHECK(found != addresses.end(), "phalanx: the address of ", name, " was not given");
    return found->second;
  };
#define X(name) core.name = reinterpret_cast<decltype(core.name)>(address("phx_" #name));
  PHALANX_CORE_FUNCTIONS(X)
#undef X
  const bool fits = core.abi_version() == PHX_ABI_VERSION && core.struct_size("phx_options") == sizeof(phx_options) &&
                    core.struct_size("phx_call") == sizeof(phx_call) &&
                    core.struct_size("phx_message") == sizeof(phx_message);
  TORCH_CHECK(fits, "phalanx: the library was built from another phalanx.h than this module; reinstall phalanx-core");
  return core;
}

Engine::Engine(const Core &core, std::string name, Hooks hooks)
    : core_(core), name_(std::move(name)), hooks_(std::move(hooks)), made_in_(forks.load(std::memory_order_relaxed)) {
  static_cast<void>(forks_are_counted);
}

bool Engine::is_inherited() const { return made_in_ != forks.load(std::memory_order_relaxed); }

void Engine::refuse_fork(const char *title) const {
  if (!is_inherited()) return;
  throw_status(
      PHX_ERR_UNSUPPORTED,
      named(title, "group '" + name_ + "' belongs to the process from which this one (" + std::to_string(getpid()) +
                       ") was forked: threads and connections do not survive a fork. Call init_process_group "
                       "after the fork, or start processes with the 'spawn' method."));
}

Engine::~Engine() {
  if (thread_.joinable()) thread_.detach();  // it is the thread that runs this
}

Engine::GroupRef Engine::met() const {
  if (is_inherited()) return nullptr;
  const std::lock_guard<std::mutex> guard(lock_);
  return group_;
}

Hooks::Connection Engine::connect(Milliseconds timeout, const char *title) const {
  try {
    return hooks_.connect(timeout);
  } catch (const c10::DistBackendError &error) {
    C10_THROW_ERROR(DistBackendError, named(title, error.what_without_backtrace()));
  }
}

Engine::GroupRef Engine::group(Milliseconds timeout, const char *title) {
  refuse_fork(title);
  if (GroupRef found = met()) return found;
  const std::lock_guard<std::mutex> turn(meeting_);
  {
    const std::lock_guard<std::mutex> guard(lock_);
    if (group_) return group_;
    if (!aborted_.empty())
      C10_THROW_ERROR(DistBackendError, "group '" + name_ + "' was aborted: " + aborted_ + ". Make a new group.");
    if (closed_) C10_THROW_ERROR(DistBackendError, "group '" + name_ + "' was destroyed. Make a new group.");
  }
  const Hooks::Connection made = connect(timeout, title);
  {
    const std::lock_guard<std::mutex> guard(lock_);
    if (!closed_) {
      group_ = GroupRef(core_.group_retain(made.group), core_.group_release);
      token_ = made.token;
      return group_;
    }
  }
  hooks_.disconnect();
  C10_THROW_ERROR(DistBackendError, "group '" + name_ + "' was destroyed while its ranks met");
}

std::string Engine::token(Milliseconds timeout, const char *title) {
  group(timeout, title);
  const std::lock_guard<std::mutex> guard(lock_);
  return token_;
}

void Engine::add(const WorkRef &work) {
  const std::lock_guard<std::mutex> guard(lock_);
  places_[work.get()] = under_way_.insert(under_way_.end(), work);
}

void Engine::remove(const Work *work) {
  WorkRef last;  // released after the lock
  const std::lock_guard<std::mutex> guard(lock_);
  const auto place = places_.find(work);
  if (place == places_.end()) return;
  last = std::move(*place->second);
  under_way_.erase(place->second);
  places_.erase(place);
}

void Engine::sweep() {
  std::vector<WorkRef> dropped;
  {
    const std::lock_guard<std::mutex> guard(lock_);
    for (size_t left = std::min(kSwept, under_way_.size()); left > 0; --left) {
      under_way_.splice(under_way_.end(), under_way_, under_way_.begin());
      if (under_way_.back().use_count() == 1) dropped.push_back(under_way_.back());
    }
  }
  for (const WorkRef &work : dropped) work->poll(false);
}

void Engine::watch(const WorkRef &work) {
  const std::lock_guard<std::mutex> guard(lock_);
  if (stop_) return;  // close has completed it
  watched_.push_back(work);
  if (!thread_.joinable()) {
    const SignalsBlocked blocked;
    thread_ = std::thread([self = shared_from_this()] { self->run_thread(); });
  }
  changed_.notify_one();
}

// Looks at the works with futures, and moves them on, while there are any. It waits for none of them: a wait would
// keep other threads from starting collectives, and a message may need another one first.
void Engine::run_thread() {
  c10::setThreadName("phalanx_futures");
  std::vector<WorkRef> looked_at;  // before the lock, so that it goes after it: works may end with it
  int looks = 0;
  std::unique_lock<std::mutex> guard(lock_);
  while (!stop_) {
    if (watched_.empty()) {
      looks = 0;
      changed_.wait(guard);
      continue;
    }
    looked_at = watched_;
    guard.unlock();
    const Clock::time_point began = Clock::now();
    const auto complete = std::remove_if(looked_at.begin(), looked_at.end(), [](const WorkRef &work) {
      return !work->poll(true);  // runs what hangs on its future
    });
    looked_at.erase(complete, looked_at.end());
    // A large operation takes many looks, and the peers wait for each: no pause while it moves.
    const bool moved = !looked_at.empty() || Clock::now() - began > kMoved;
    guard.lock();
    for (const WorkRef &work : looked_at) watched_.erase(std::find(watched_.begin(), watched_.end(), work));
    guard.unlock();
    looked_at.clear();  // may be the last references, whose end must not happen under the lock
    looks = moved ? 0 : looks + 1;
    if (!moved && looks <= kYields) std::this_thread::yield();
    guard.lock();
    if (looks > kYields && !stop_)
      changed_.wait_for(guard, std::min(kShortestPause * (looks - kYields), std::chrono::microseconds(kLongestPause)));
  }
  looked_at = std::exchange(watched_, {});  // close has completed them
}

void Engine::stop_thread() {
  std::thread thread;
  {
    const std::lock_guard<std::mutex> guard(lock_);
    stop_ = true;
    changed_.notify_one();
    if (thread_.joinable() && thread_.get_id() != std::this_thread::get_id()) thread = std::move(thread_);
  }
  if (thread.joinable()) hooks_.unlocked([&] { thread.join(); });
}

void Engine::check(const char *title) const {
  phx_error_info info{};
  info.struct_size = sizeof info;
  const GroupRef group = met();
  if (group && core_.group_error(group.get(), &info) == PHX_OK && info.status != PHX_ERR_PEER_DEAD)
    throw_status(info.status, named(title, info.text));
}

void Engine::abort(const std::string &reason) {
  if (is_inherited()) return;
  {
    const std::lock_guard<std::mutex> guard(lock_);
    if (aborted_.empty()) aborted_ = reason;
  }
  if (const GroupRef group = met()) core_.group_revoke(group.get(), reason.c_str());
  close();
}

void Engine::close() {
  if (is_inherited()) {
    new std::shared_ptr<Engine>(shared_from_this());  // never destroyed: its locks and its thread are the parent's
    return;
  }
  GroupRef group;
  {
    const std::lock_guard<std::mutex> guard(lock_);
    if (closed_) return;
    closed_ = true;  // no later call gets the group
    group = std::move(group_);
  }
  const auto works = [this] {
    const std::lock_guard<std::mutex> guard(lock_);
    return std::vector<WorkRef>(under_way_.begin(), under_way_.end());
  };
  hooks_.unlocked([&] {
    const auto until = Clock::now() + kDrain;
    for (const WorkRef &work : works()) work->drain(until, false);
    if (const auto left = works(); !left.empty()) {
      // The core must not write their buffers any more when they are gone.
      const std::string reason = "a rank destroyed group '" + name_ + "' while it had works under way";
      core_.group_revoke(group.get(), reason.c_str());
      for (const WorkRef &work : left) work->drain(until, true);
    }
  });
  stop_thread();
  group.reset();
  hooks_.disconnect();
}

}  // namespace phalanx
