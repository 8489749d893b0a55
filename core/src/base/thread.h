// Starts the threads of the library.
#pragma once

#include <pthread.h>
#include <signal.h>

#include <thread>
#include <utility>

namespace phx {

// `name` has at most 15 characters; debuggers and `top -H` show it. All signals are blocked in the thread, so that the
// application's threads receive them. Throws std::system_error, as std::thread does.
template <class Body>
std::thread start_thread(const char *name, Body body) {
  struct SignalsBlocked {
    sigset_t before;
    SignalsBlocked() {
      sigset_t all;
      sigfillset(&all);
      pthread_sigmask(SIG_SETMASK, &all, &before);
    }
    ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before, nullptr); }
  } const blocked;  // the new thread inherits the mask
  return std::thread([name, body = std::move(body)]() mutable {
    pthread_setname_np(pthread_self(), name);
    body();
  });
}

}  // namespace phx
