// Owners of file descriptors and mappings, and a loop of reads or writes.
#pragma once

#include <sys/mman.h>
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
  Fd &operator=(Fd &&other) noexcept {
    if (this != &other) {
      reset();
      fd_ = std::exchange(other.fd_, -1);
    }
    return *this;
  }
  Fd(const Fd &) = delete;
  Fd &operator=(const Fd &) = delete;
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

// Owns a mapping, which it removes with munmap.
class Mapping {
 public:
  Mapping() = default;
  Mapping(void *base, size_t size) : base_(base), size_(size) {}
  Mapping(Mapping &&other) noexcept
      : base_(std::exchange(other.base_, nullptr)), size_(std::exchange(other.size_, 0)) {}
  Mapping &operator=(Mapping &&other) noexcept {
    if (this != &other) {
      reset();
      base_ = std::exchange(other.base_, nullptr);
      size_ = std::exchange(other.size_, 0);
    }
    return *this;
  }
  Mapping(const Mapping &) = delete;
  Mapping &operator=(const Mapping &) = delete;
  ~Mapping() { reset(); }

  void *get() const { return base_; }
  char *bytes() const { return static_cast<char *>(base_); }
  size_t size() const { return size_; }
  bool valid() const { return base_ != nullptr; }
  void reset() {
    if (base_ != nullptr) munmap(base_, size_);
    base_ = nullptr;
    size_ = 0;
  }

 private:
  void *base_ = nullptr;
  size_t size_ = 0;
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
