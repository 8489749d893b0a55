// Starts the threads of the library.
#pragma once

#include <pthread.h>
#include <signal.h>

#include <thread>
#include <utility>

namespace phx {

// Blocks all signals of this thread while it lives. Threads that are started meanwhile inherit that.
class SignalsBlocked {
 public:
  SignalsBlocked() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  SignalsBlocked(const SignalsBlocked &) = delete;
  SignalsBlocked &operator=(const SignalsBlocked &) = delete;

 private:
  sigset_t before_;
};

// `name` has at most 15 characters; debuggers and `top -H` show it. All signals are blocked in the thread, so that the
// application's threads receive them. Throws std::system_error, as std::thread does.
template <class Body>
std::thread start_thread(const char *name, Body body) {
  const SignalsBlocked blocked;
  return std::thread([name, body = std::move(body)]() mutable {
    pthread_setname_np(pthread_self(), name);
    body();
  });
}

}  // namespace phx
