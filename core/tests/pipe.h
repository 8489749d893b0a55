// How processes of a test tell each other values, both ways round a fork.
#pragma once

#include <poll.h>
#include <unistd.h>

#include "check.h"

class Pipe {
 public:
  Pipe() { CHECK(pipe(ends_) == 0); }
  ~Pipe() {
    close(ends_[0]);
    close(ends_[1]);
  }
  Pipe(const Pipe &) = delete;
  Pipe &operator=(const Pipe &) = delete;
  template <class T>
  void send(const T &value) const {
    CHECK(write(ends_[1], &value, sizeof value) == static_cast<ssize_t>(sizeof value));
  }
  template <class T>
  T receive() const {
    T value{};
    pollfd ready{ends_[0], POLLIN, 0};
    CHECK(poll(&ready, 1, 20000) == 1);  // else the other one has failed
    CHECK(read(ends_[0], &value, sizeof value) == static_cast<ssize_t>(sizeof value));
    return value;
  }

 private:
  int ends_[2];
};
