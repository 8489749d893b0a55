// The owner of a file descriptor, and a loop of reads or writes.
#pragma once

#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <utility>

namespace phx {

class Fd {
 public:
  Fd() = default;
  explicit Fd(int fd) : fd_(fd) {}
  Fd(Fd &&other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Fd &operator=(Fd other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~Fd() { reset(); }

  int get() const { return fd_; }
  bool valid() const { return fd_ >= 0; }
  int release() { return std::exchange(fd_, -1); }
  void reset() {
    if (fd_ >= 0) close(fd_);
    fd_ = -1;
  }

 private:
  int fd_ = -1;
};

// Calls move(offset, size), a system call that reads or writes, until all is moved. Returns how much was: if it is
// less, errno says why, and 0 means that a call moved nothing.
template <class Move>
size_t move_all(size_t size, Move move) {
  size_t moved = 0;
  while (moved < size) {
    const ssize_t count = move(moved, size - moved);
    if (count < 0 && errno == EINTR) continue;
    if (count == 0) errno = 0;
    if (count <= 0) break;
    moved += static_cast<size_t>(count);
  }
  return moved;
}

}  // namespace phx
