// What the fuzz targets share: an input is taken apart piece by piece, and what must hold is checked.
#pragma once

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <string>

#include "phalanx/cuda.h"
#include "phalanx/phalanx.h"
#include "phalanx/tuning.h"

// A finding. libFuzzer keeps the input.
#define MUST(condition)                                                                               \
  do {                                                                                                \
    if (!(condition)) {                                                                               \
      std::fprintf(stderr, "%s:%d: does not hold: %s (errno: %m)\n", __FILE__, __LINE__, #condition); \
      std::fprintf(stderr, "last error of this thread: %s\n", phx_last_error());                      \
      std::abort();                                                                                   \
    }                                                                                                 \
  } while (0)

namespace fuzz {

// Past the end there are zeros, so that every input is a whole program.
class Input {
 public:
  Input(const uint8_t *data, size_t size) : data_(data), left_(size) {}

  bool empty() const { return left_ == 0; }
  template <class T>
  T take() {
    T value{};
    const size_t size = std::min(left_, sizeof value);
    if (size > 0) std::memcpy(&value, data_, size);
    skip(size);
    return value;
  }
  uint8_t byte() { return take<uint8_t>(); }
  size_t below(size_t end) { return byte() % end; }
  std::string bytes(size_t most) {
    const size_t size = std::min(left_, most);
    std::string taken(reinterpret_cast<const char *>(data_), size);
    skip(size);
    return taken;
  }
  // Its length comes first.
  std::string piece() { return bytes(take<uint16_t>()); }

 private:
  void skip(size_t size) {
    data_ += size;
    left_ -= size;
  }
  const uint8_t *data_;
  size_t left_;
};

// Overwrites up to three places of `bytes`, and now and then changes its length.
inline void spoil(Input &input, std::string *bytes) {
  const uint8_t how = input.byte();
  for (int i = how & 3; i > 0; --i) {
    const size_t at = input.take<uint16_t>();
    const std::string value = input.bytes(1 + input.below(16));
    if (at < bytes->size())
      bytes->replace(at, std::min(value.size(), bytes->size() - at), value.substr(0, bytes->size() - at));
  }
  if ((how & 0x80) != 0) bytes->resize(input.take<uint16_t>() % 2048);
}

inline int open_descriptors() {
  pollfd all[256];
  for (int i = 0; i < 256; ++i) all[i] = {i, 0, 0};
  poll(all, 256, 0);
  return static_cast<int>(std::count_if(all, all + 256, [](const pollfd &entry) { return entry.revents != POLLNVAL; }));
}

// Waits for what comes. (The fuzzer's own alarm interrupts system calls.)
inline ssize_t receive(int socket, void *buffer, size_t size, int flags = 0) {
  ssize_t got;
  do {
    got = recv(socket, buffer, size, flags);
  } while (got < 0 && errno == EINTR);
  return got;
}

inline bool is_error(phx_status status) { return status < PHX_OK && status >= PHX_ERR_INTERNAL; }

// Texts of the log are made and thrown away.
inline void log_nothing(void *, int32_t, const char *, int32_t, const char *) {}
inline void log_into_nothing() { phx_set_log(log_nothing, nullptr, PHX_LOG_DEBUG); }

// A directory for as long as this process runs. (libFuzzer leaves by _exit after a finding: then it stays.)
class Directory {
 public:
  Directory() { MUST(mkdtemp(path_.data()) != nullptr); }
  ~Directory() { std::filesystem::remove_all(path_); }
  const std::string &path() const { return path_; }

 private:
  std::string path_ = std::filesystem::temp_directory_path().string() + "/phalanx-fuzz-XXXXXX";
};

}  // namespace fuzz
