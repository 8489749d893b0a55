// Counts the forks of the process, and lets objects run code before and after each fork.
//
// A forked child has one thread, a copy of the memory, and every descriptor of its parent. The parent's objects remain
// the parent's, so each object stores the generation of the process that created it, and every entry point compares it
// with the current one. Header only: libphalanx and libphalanx_torch each have their own count and list.
#pragma once

#include <pthread.h>

#include <atomic>
#include <cstdint>
#include <mutex>
#include <new>
#include <type_traits>

namespace phx {

// Base of objects that must act at a fork. Each is in a list of the process from its construction to its destruction.
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
  pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;  // guards the list; held while the process forks
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

// A mutex that a fork locks first, so that in the child it is free and the data that it guards is consistent. Only for
// data that the child uses as well as the parent. A thread that holds it must not wait for anything that the forking
// thread may hold (such as Python's lock), fork, lock a second mutex of this class, or create or destroy a ForkHook.
//
// A std::shared_mutex can only be unlocked by the thread that locked it, which has another id in the child, so the
// child constructs a new one in its place. No other thread held it, because the forking thread did. A std::mutex has no
// such check: the child unlocks it, which ThreadSanitizer understands.
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
