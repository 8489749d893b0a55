// Forks of the process: how often it happened, and what a fork must find, or leave, in order.
//
// A forked child has one thread, a copy of the memory, and every descriptor of its parent. What the parent made belongs
// to the parent, so each object remembers the generation of the process that made it, and every entry point compares
// it. Header only: libphalanx and libphalanx_torch each have their own count and list.
#pragma once

#include <pthread.h>

#include <atomic>
#include <cstdint>
#include <mutex>
#include <new>
#include <type_traits>

namespace phx {

// Something that a fork concerns. It is in a list of the process from its construction to its destruction.
class ForkHook {
 public:
  ForkHook(const ForkHook &) = delete;
  ForkHook &operator=(const ForkHook &) = delete;

 protected:
  ForkHook();
  ~ForkHook();
  virtual void before_fork() {}
  virtual void after_fork_in_parent() {}
  virtual void after_fork_in_child() {}

 private:
  friend struct Forks;
  ForkHook *next_ = nullptr;
  ForkHook *before_ = nullptr;
};

// The handlers of pthread_atfork. Constant-initialised and never destroyed: hooks come and go while the process exits.
struct Forks {
  pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;  // of the list; held while the process forks
  ForkHook *first = nullptr;
  std::atomic<uint32_t> generation{1};

  static void prepare();
  static void parent();
  static void child();
};
inline Forks forks;
inline const int forks_are_counted = pthread_atfork(Forks::prepare, Forks::parent, Forks::child);

// Differs between a process and its forked child. One relaxed load.
inline uint32_t process_generation() { return forks.generation.load(std::memory_order_relaxed); }

inline void Forks::prepare() {
  pthread_mutex_lock(&forks.mutex);
  for (ForkHook *hook = forks.first; hook != nullptr; hook = hook->next_) hook->before_fork();
}

inline void Forks::parent() {
  for (ForkHook *hook = forks.first; hook != nullptr; hook = hook->next_) hook->after_fork_in_parent();
  pthread_mutex_unlock(&forks.mutex);
}

inline void Forks::child() {
  forks.generation.fetch_add(1, std::memory_order_relaxed);
  for (ForkHook *hook = forks.first; hook != nullptr; hook = hook->next_) hook->after_fork_in_child();
  pthread_mutex_unlock(&forks.mutex);
}

inline ForkHook::ForkHook() {
  pthread_mutex_lock(&forks.mutex);
  next_ = forks.first;
  if (next_ != nullptr) next_->before_ = this;
  forks.first = this;
  pthread_mutex_unlock(&forks.mutex);
}

inline ForkHook::~ForkHook() {
  pthread_mutex_lock(&forks.mutex);
  (before_ != nullptr ? before_->next_ : forks.first) = next_;
  if (next_ != nullptr) next_->before_ = before_;
  pthread_mutex_unlock(&forks.mutex);
}

// A mutex that a fork takes first, so that the child finds it free and what it guards whole. Only for data that is the
// child's as well as the parent's. Whoever holds it must wait for nothing that the forking thread may hold (such as
// Python's lock), must not fork, must take no second one, and must make or destroy no ForkHook.
//
// A std::shared_mutex can only be unlocked by the thread that locked it, which has another number in the child, so the
// child makes a new one in its place. Nobody else was inside, as the fork had it alone. A std::mutex has no such check:
// the child unlocks it, which the thread sanitizer sees as well.
template <class Mutex>
class AcrossForks final : public Mutex, private ForkHook {
 private:
  void before_fork() override { this->lock(); }
  void after_fork_in_parent() override { this->unlock(); }
  void after_fork_in_child() override {
    if constexpr (std::is_same_v<Mutex, std::mutex>)
      this->unlock();
    else
      new (static_cast<Mutex *>(this)) Mutex;
  }
};

}  // namespace phx
