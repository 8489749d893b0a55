#include "engine.h"

#include <pthread.h>
#include <signal.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <ATen/ATen.h>
#include <c10/util/Exception.h>
#include <c10/util/ScopeExit.h>
#include <c10/util/thread_name.h>

#include <algorithm>
#include <atomic>
#include <ctime>
#include <utility>

namespace phalanx {
namespace {

constexpr auto kRefusalWait = Milliseconds(10000);  // how long a refused call waits for ranks that have not met
constexpr auto kDrain = std::chrono::seconds(5);    // how long `close` waits for peers
// Between polls of the works under way. Long enough to leave the CPU core to the ranks that are waited for.
constexpr auto kShortestPause = std::chrono::microseconds(20);
constexpr auto kLongestPause = std::chrono::microseconds(200);
constexpr int kYields = 500;                             // before the first pause
constexpr auto kWanted = std::chrono::milliseconds(20);  // for so long there are pauses only (see Yields)
constexpr auto kMoved = std::chrono::microseconds(4);    // a poll that took longer has moved data
constexpr size_t kSwept = 8;                             // works that a call polls, in turn
constexpr int kIdleThreads = 2;                          // further idle threads end

std::chrono::nanoseconds read_clock(clockid_t clock) {
  timespec time{};
  clock_gettime(clock, &time);
  return std::chrono::seconds(time.tv_sec) + std::chrono::nanoseconds(time.tv_nsec);
}

// The yields of one thread. A long one has run a thread that computes, for as long as the system let it. One of this
// process is welcome to it. From another program a thread that wakes from a pause takes the core back at once.
class Yields {
 public:
  // Yields. Returns whether that was the second long one soon after another, and this process computed little between.
  bool runs_another_program(Clock::time_point begin) {
    std::this_thread::yield();
    const Clock::time_point end = Clock::now();
    if (end - begin < std::chrono::microseconds(500)) return false;
    const auto others = read_clock(CLOCK_PROCESS_CPUTIME_ID) - read_clock(CLOCK_THREAD_CPUTIME_ID);
    const bool soon = begin - last_ < std::chrono::milliseconds(10);
    const bool foreign = soon && others - others_ < (end - last_) / 2;
    last_ = end, others_ = others;
    return foreign;
  }

 private:
  Clock::time_point last_;              // the end of the last long yield
  std::chrono::nanoseconds others_{0};  // how long other threads of this process had computed then
};

// Completes the future of a work that is over.
void run_callbacks(Work &work) {
  try {
    work.poll(true);
  } catch (const std::exception &error) {  // a callback in C++ has thrown, and no caller can catch it
    TORCH_WARN("phalanx: a callback of a future raised: ", error.what());
  }
}

// Number of forks between the process that loaded this module and this one.
std::atomic<uint32_t> forks{0};
const int forks_are_counted = pthread_atfork(nullptr, nullptr, [] { forks.fetch_add(1, std::memory_order_relaxed); });

}  // namespace

Core load_core(const std::unordered_map<std::string, uintptr_t> &addresses) {
  Core core;
  const auto address = [&](const char *name) {
    const auto found = addresses.find(name);
    TORCH_CHECK(found != addresses.end(), "phalanx: the address of ", name,
                " is missing; reinstall phalanx-core and phalanx-collectives");
    return found->second;
  };
#define X(name) core.name = reinterpret_cast<decltype(core.name)>(address("phx_" #name));
  PHALANX_CORE_FUNCTIONS(X)
#undef X
  const bool fits = core.abi_version() == PHX_ABI_VERSION && core.struct_size("phx_options") == sizeof(phx_options) &&
                    core.struct_size("phx_gpu_options") == sizeof(phx_gpu_options) &&
                    core.struct_size("phx_block") == sizeof(phx_block) &&
                    core.struct_size("phx_call") == sizeof(phx_call) &&
                    core.struct_size("phx_message") == sizeof(phx_message);
  TORCH_CHECK(
      fits,
      "phalanx: the library and this module were built from different versions of phalanx.h; reinstall phalanx-core");
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

Engine::GroupRef Engine::group_if_met() const {
  if (is_inherited()) return nullptr;
  const std::lock_guard<std::mutex> guard(lock_);
  return group_;
}

Engine::GroupRef Engine::group(Milliseconds timeout, const char *title) {
  refuse_fork(title);
  if (GroupRef found = group_if_met()) return found;
  const std::lock_guard<std::mutex> turn(bootstrap_mutex_);
  {
    const std::lock_guard<std::mutex> guard(lock_);
    if (group_) return group_;
    refuse_ended(nullptr);
  }
  Hooks::Connection connection;
  try {
    connection = hooks_.connect(timeout);
  } catch (const c10::DistBackendError &error) {
    const std::lock_guard<std::mutex> guard(lock_);
    refuse_ended(nullptr);
    C10_THROW_ERROR(DistBackendError, named(title, error.what_without_backtrace()));
  }
  GroupRef met(connection.group, core_.group_release);
  auto unmade = c10::make_scope_exit([&] { hooks_.disconnect(); });
  const std::lock_guard<std::mutex> guard(lock_);
  refuse_ended(met.get());
  unmade.release();
  group_ = std::move(met);
  if (timeout_.count() > 0) core_.group_set_timeout(group_.get(), timeout_.count());
  token_ = std::move(connection.token);
  for (const std::string &why : std::exchange(pending_refusals_, {}))
    core_.group_refuse(group_.get(), kChannel, why.c_str());
  return group_;
}

// Throws if the engine was aborted or closed. If its ranks have met meanwhile, the others may wait for this one, and
// learn it too. The caller holds the lock.
void Engine::refuse_ended(phx_group *met) const {
  if (!closed_ && aborted_.empty()) return;
  const std::string reason = aborted_.empty() ? destroyed() : aborted_;
  if (met) core_.group_revoke(met, reason.c_str());
  C10_THROW_ERROR(
      DistBackendError,
      "group '" + name_ + "' was " + (aborted_.empty() ? "destroyed" : "aborted: " + aborted_) + ". Make a new group.");
}

std::string Engine::destroyed() const { return "a rank destroyed group '" + name_ + "' while it had works under way"; }

void Engine::refuse(const std::string &why, Milliseconds timeout, const char *title) {
  if (is_inherited()) return;
  GroupRef group;
  {
    const std::lock_guard<std::mutex> guard(lock_);
    if (closed_) return;
    group = group_;
    if (!group) pending_refusals_.push_back(why);
  }
  if (group) {
    core_.group_refuse(group.get(), kChannel, why.c_str());
    return;
  }
  try {
    this->group(std::min(timeout, kRefusalWait), title);
  } catch (const c10::Error &) {  // the caller raises the error of the call
  }
}

void Engine::set_timeout(Milliseconds timeout) {
  GroupRef group;
  {
    const std::lock_guard<std::mutex> guard(lock_);
    timeout_ = timeout;
    group = group_;
  }
  if (group) core_.group_set_timeout(group.get(), timeout.count());
}

std::string Engine::token(Milliseconds timeout, const char *title) {
  group(timeout, title);
  const std::lock_guard<std::mutex> guard(lock_);
  return token_;
}

void Engine::add(const WorkRef &work) {
  const std::lock_guard<std::mutex> guard(lock_);
  places_[work.get()] = under_way_.insert(under_way_.end(), work);
  if (!abort_hooks_ || !abort_hooks_->any() || stop_) return;
  watched_.push_back(work);
  ensure_looked_at();
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
  ensure_looked_at();
}

void Engine::watch_all() {
  if (is_inherited()) return;
  const std::lock_guard<std::mutex> guard(lock_);
  if (stop_) return;
  watched_.insert(watched_.end(), under_way_.begin(), under_way_.end());  // one that is there twice does no harm
  ensure_looked_at();
}

// The caller holds the lock. If no thread polls the watched works, an idle or a new thread does so from now on.
void Engine::ensure_looked_at() {
  if (looking_ || called_ || stop_ || watched_.empty()) return;
  called_ = true;
  if (idle_ > 0) return changed_.notify_one();
  sigset_t all, before;  // signals are for the threads of the application, and this one handles none
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  const auto restored = c10::make_scope_exit([&] { pthread_sigmask(SIG_SETMASK, &before, nullptr); });
  std::thread begun([self = shared_from_this()] { self->run_thread(); });
  const std::thread::id id = begun.get_id();
  threads_.emplace(id, std::move(begun));
  for (std::thread &thread : std::exchange(ended_, {})) thread.join();  // they hold no lock any longer
}

// The thread that finds a complete work lets another thread poll the rest before it completes the future, because that
// runs the callbacks of the user.
void Engine::run_thread() {
  c10::setThreadName("phalanx_futures");
  prctl(PR_SET_TIMERSLACK, 1000);  // ns: pauses are as short as they say
  std::unique_lock<std::mutex> guard(lock_);
  while (!stop_) {
    called_ = false;
    if (looking_ || watched_.empty()) {
      if (idle_ >= kIdleThreads) break;
      ++idle_;
      changed_.wait(guard);
      --idle_;
      continue;
    }
    looking_ = true;
    WorkRef complete = look_for_complete(guard);
    looking_ = false;
    ensure_looked_at();
    guard.unlock();
    if (complete) run_callbacks(*complete);
    complete.reset();  // may be the last reference, whose end must not happen under the lock
    guard.lock();
  }
  const auto self = threads_.find(std::this_thread::get_id());
  if (self == threads_.end()) return;  // stop_threads has taken it
  ended_.push_back(std::move(self->second));
  threads_.erase(self);
}

// Polls the works with futures, which also advances them, until one of them is complete. It waits for none of them: a
// wait would keep other threads from starting collectives, and a message may depend on another one. Returns null if the
// engine was stopped, or if no work is watched. `guard` holds the lock, which is released during a poll.
WorkRef Engine::look_for_complete(std::unique_lock<std::mutex> &guard) {
  std::vector<WorkRef> looked_at;
  Yields yielding;
  int looks = 0;
  while (!stop_ && !watched_.empty()) {
    looked_at = watched_;
    guard.unlock();
    const Clock::time_point began = Clock::now();
    const auto over = std::find_if(looked_at.begin(), looked_at.end(), [](auto &work) { return work->is_over(); });
    const WorkRef complete = over == looked_at.end() ? WorkRef() : *over;
    // A large operation takes many polls, and the peers wait for each: there is no pause while data moves.
    const Clock::time_point looked = Clock::now();
    const bool moved = looked - began > kMoved;
    looked_at.clear();  // may be the last references, whose end must not happen under the lock
    looks = moved ? 0 : looks + 1;
    const int yields = looked < core_is_wanted_until_ ? 0 : kYields;
    if (!complete && !moved && looks <= yields && yielding.runs_another_program(looked))
      core_is_wanted_until_ = Clock::now() + kWanted;
    guard.lock();
    if (complete) {
      const auto place = std::find(watched_.begin(), watched_.end(), complete);
      if (place != watched_.end()) watched_.erase(place);
      return complete;
    }
    if (looks > yields && !stop_)
      changed_.wait_for(guard, std::min(kShortestPause * (looks - yields), std::chrono::microseconds(kLongestPause)));
  }
  return {};
}

// Ends the threads, and waits for running callbacks except one that runs in the calling thread.
void Engine::stop_threads() {
  std::vector<std::thread> threads;
  std::vector<WorkRef> watched;  // close has completed them; released after the lock
  {
    const std::lock_guard<std::mutex> guard(lock_);
    stop_ = true;
    changed_.notify_all();
    threads = std::move(ended_);
    for (auto &[id, thread] : std::exchange(threads_, {})) {
      if (id == std::this_thread::get_id())
        thread.detach();
      else
        threads.push_back(std::move(thread));
    }
    watched = std::exchange(watched_, {});
  }
  hooks_.unlocked([&] {
    for (std::thread &thread : threads) thread.join();
  });
}

void Engine::check(const char *title) const {
  phx_error_info info = PHX_ERROR_INFO_INIT;
  const GroupRef group = group_if_met();
  if (group && core_.group_get_error(group.get(), &info) == PHX_OK && info.status != PHX_ERR_PEER_DEAD)
    throw_status(info.status, named(title, info.text));
}

void Engine::abort(const std::string &reason) {
  if (is_inherited()) return;
  {
    const std::lock_guard<std::mutex> guard(lock_);
    if (aborted_.empty()) aborted_ = reason;
  }
  if (const GroupRef group = group_if_met()) core_.group_revoke(group.get(), reason.c_str());
  close();
}

void Engine::complete() {
  if (is_inherited()) return;
  std::vector<WorkRef> works;
  Milliseconds timeout;
  {
    const std::lock_guard<std::mutex> guard(lock_);
    works.assign(under_way_.begin(), under_way_.end());
    timeout = timeout_;
  }
  hooks_.unlocked([&] {
    const auto until = Clock::now() + timeout;
    for (const WorkRef &work : works)
      if (!work->is_message()) work->drain(until, false);
  });
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
      core_.group_revoke(group.get(), destroyed().c_str());
      for (const WorkRef &work : left) work->drain(until, true);
    }
  });
  stop_threads();
  group.reset();
  hooks_.disconnect();
}

}  // namespace phalanx
