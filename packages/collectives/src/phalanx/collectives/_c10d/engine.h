// What a backend and its works share: the core's group, the works under way, and the threads that complete futures.
#pragma once

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

// What the Python side does for an engine.
struct Hooks {
  struct Connection {
    phx_group *group;   // borrowed
    std::string token;  // drawn for this meeting of the ranks, the same on all
  };
  std::function<Connection(Milliseconds)> connect;  // collective; where the ranks meet
  std::function<void()> disconnect;                 // lets go of the group; any number of times
  // Calls a function without the interpreter's lock, whether or not this thread has it.
  std::function<void(const std::function<void()> &)> unlocked;
};

// The ranks meet at the first collective or message. After close nothing of the core is held, whoever still refers to
// the backend or to works.
class Engine final : public std::enable_shared_from_this<Engine> {
 public:
  using GroupRef = std::shared_ptr<phx_group>;

  Engine(const Core &core, std::string name, Hooks hooks);
  ~Engine();

  const Core &core() const { return core_; }
  const std::string &name() const { return name_; }
  // The group; meets the others at the first call. Throws when they do not come, or this was closed. `title`: of what
  // is called, see named.
  GroupRef group(Milliseconds timeout, const char *title);
  // The group if the ranks have met and this was not closed; else null.
  GroupRef met() const;
  std::string token(Milliseconds timeout, const char *title);

  // Stands for a collective whose arguments were wrong on this rank. The other ranks, which would wait for it, fail at
  // once with the reason. Where the ranks have not met, this waits for them, but not for long: what they were not told
  // by then, they are told when they meet.
  void refuse(const std::string &why, Milliseconds timeout, const char *title);

  // Raises what has ended the group, if anything has, but for a peer that is gone: it may have gone after what is asked
  // about, and the next call says so.
  void check(const char *title) const;

  void add(const WorkRef &work);           // started
  void remove(const Work *work);           // complete
  void sweep();                            // lets go of works that nobody else has, if they are complete by now
  void watch(const WorkRef &work);         // has a future, which nobody may wait for in a way that moves the core on
  void set_timeout(Milliseconds timeout);  // of what is called on the core's group without a timeout of its own

  // Whether this process is a forked child of the one that made this. There it is only looked at: its threads are the
  // parent's, and a lock may have been held at the fork.
  bool is_inherited() const;
  void refuse_fork(const char *title) const;  // throws, if it is

  // Every call that waits, in any thread and on any rank, ends with this reason. Then as close.
  void abort(const std::string &reason);
  // Completes what is under way, or fails it if peers take longer than a few seconds. Nothing in a forked child.
  void close();
  // At the end of the process: waits, for the timeout of the group at most, for collectives that are under way.
  void complete();

 private:
  Hooks::Connection connect(Milliseconds timeout, const char *title) const;
  void run_thread();
  WorkRef look_for_complete(std::unique_lock<std::mutex> &guard);
  void ensure_looked_at();
  void stop_threads();

  const Core core_;
  const std::string name_;
  const Hooks hooks_;
  const uint32_t made_in_;  // the count of forks

  std::mutex meeting_;  // of one thread at a time
  mutable std::mutex lock_;
  GroupRef group_;
  std::string token_;
  bool closed_ = false;
  std::vector<std::string> untold_;  // refusals before the ranks met
  std::string aborted_;              // why, if it was
  Milliseconds timeout_{0};          // of the core's group; 0: that of its world
  std::list<WorkRef> under_way_;
  std::unordered_map<const Work *, std::list<WorkRef>::iterator> places_;

  // Threads that complete the futures of watched works. One of them at a time looks at the works; the others run
  // callbacks or are idle. So a callback may wait for another future, or take long, and holds up nobody.
  std::condition_variable changed_;
  std::vector<WorkRef> watched_;
  bool looking_ = false;  // one of the threads looks at what is watched
  bool called_ = false;   // one will: it was woken, or begun
  int idle_ = 0;
  std::map<std::thread::id, std::thread> threads_;
  std::vector<std::thread> ended_;  // to be joined
  bool stop_ = false;
};

}  // namespace phalanx
