// The state that a backend and its works share: the core's group, the works under way, the threads that complete
// futures.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <condition_variable>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "work.h"

namespace phalanx {

// The channel of the back end in every group. Functional collectives of phalanx.collectives have channel 0, so that the
// two need no common order.
constexpr uint32_t kChannel = 1;

// The functions of Python that an engine calls.
struct Hooks {
  struct Connection {
    phx_group *group;   // retained
    std::string token;  // random, the same on all ranks, new for each bootstrap
  };
  std::function<Connection(Milliseconds)> connect;  // collective: the bootstrap of the ranks
  std::function<void()> disconnect;                 // releases the group; may be called several times
  struct Block {
    char *base;        // null: none
    phx_world *world;  // in which it was allocated
  };
  std::function<Block(const at::Tensor &)> block;  // of symmetric memory that a tensor lies in
  // Calls a function without the interpreter's lock, whether or not this thread has it.
  std::function<void(const std::function<void()> &)> unlocked;
};

// What a caller wants to run when its group fails or is aborted, by a number that the caller chose.
class AbortHooks {
 public:
  void add(int64_t id, std::function<void()> hook);
  void remove(int64_t id);
  void run();    // once until `reset`
  void reset();  // the group has new members
  bool any() const { return any_.load(std::memory_order_relaxed); }

 private:
  std::mutex lock_;
  std::map<int64_t, std::function<void()>> hooks_;
  bool has_run_ = false;
  std::atomic<bool> any_{false};
};

// The ranks meet at the first collective or message. After `close` the engine holds nothing of the core, even if the
// backend or works are still referred to.
class Engine final : public std::enable_shared_from_this<Engine> {
 public:
  using GroupRef = std::shared_ptr<phx_group>;

  Engine(const Core &core, std::string name, Hooks hooks);

  // Once, before anything else: what is run when a work fails.
  void set_abort_hooks(std::shared_ptr<AbortHooks> hooks) { abort_hooks_ = std::move(hooks); }
  void run_abort_hooks() const {
    if (abort_hooks_) abort_hooks_->run();
  }

  const Core &core() const { return core_; }
  const std::string &name() const { return name_; }
  // The group; the first call meets the other ranks. Throws if they do not come, or if the engine was closed. `title`:
  // the name of the call, see `named`.
  GroupRef group(Milliseconds timeout, const char *title);
  // The group if the ranks have met and the engine was not closed; else null.
  GroupRef group_if_met() const;
  std::string token(Milliseconds timeout, const char *title);
  const Hooks &hooks() const { return hooks_; }

  // Stands for a collective whose arguments were wrong on this rank. The other ranks, which would wait for it, fail at
  // once with the reason. If the ranks have not met, this waits a short time for them; a refusal that they have not got
  // by then, they get when they meet.
  void refuse(const std::string &why, Milliseconds timeout, const char *title);

  // Throws the failure of the group, if it has failed, except for the death of a peer: the peer may have died after the
  // work in question, and the next call reports it.
  void check(const char *title) const;

  void add(const WorkRef &work);           // started
  void remove(const Work *work);           // complete
  void sweep();                            // drops works that only the engine holds, if they are complete
  void watch(const WorkRef &work);         // the work has a future, and perhaps no thread that drives the core
  void watch_all();                        // abort hooks are to be run although nobody waits for the works under way
  void set_timeout(Milliseconds timeout);  // for calls on the core's group without a timeout of their own

  // Whether this process was forked from the one that made the engine. Then it must not be used: its threads are those
  // of the parent, and a lock may have been held at the fork.
  bool is_inherited() const;
  void refuse_fork(const char *title) const;  // throws if it is inherited

  // Ends every waiting call, in any thread and on any rank, with this reason; then closes the engine.
  void abort(const std::string &reason);
  // Completes the works under way, or fails them if peers take longer than a few seconds. A forked child does nothing.
  void close();
  // At the end of the process: waits for the collectives under way, at most for the timeout of the group.
  void complete();

 private:
  void refuse_ended(phx_group *met) const;
  std::string destroyed() const;  // the reason for which the other ranks fail
  void run_thread();
  WorkRef look_for_complete(std::unique_lock<std::mutex> &guard);
  void ensure_looked_at();
  void stop_threads();

  const Core core_;
  const std::string name_;
  const Hooks hooks_;
  const uint32_t made_in_;  // the number of forks at construction
  std::shared_ptr<AbortHooks> abort_hooks_;

  std::mutex bootstrap_mutex_;  // held by the thread that meets the other ranks
  mutable std::mutex lock_;
  GroupRef group_;
  std::string token_;
  bool closed_ = false;
  std::vector<std::string> pending_refusals_;  // refusals before the ranks met
  std::string aborted_;                        // the reason, if it was aborted
  Milliseconds timeout_{0};                    // timeout of the core's group; 0: that of its world
  std::list<WorkRef> under_way_;
  std::unordered_map<const Work *, std::list<WorkRef>::iterator> places_;

  // Threads that complete the futures of watched works. One thread at a time polls the works; the others run callbacks
  // or are idle. So a callback may wait for another future, or take long, without delaying others.
  std::condition_variable changed_;
  std::vector<WorkRef> watched_;
  bool looking_ = false;                                        // a thread polls the watched works
  std::chrono::steady_clock::time_point core_is_wanted_until_;  // by threads that compute; of the thread that polls
  bool called_ = false;                                         // a thread was woken or started that will poll them
  int idle_ = 0;
  std::map<std::thread::id, std::thread> threads_;
  std::vector<std::thread> ended_;  // to be joined
  bool stop_ = false;
};

}  // namespace phalanx
