// What the tests of messages share: data that can be told apart, and calls that check themselves.
#pragma once

#include <cstring>
#include <vector>

#include "ranks.h"

namespace messages {

// Byte i of message `key`.
inline char letter(uint32_t key, size_t i) { return static_cast<char>((i * 31 + i / 251 + key * 97) % 127); }

inline std::vector<char> letters(uint32_t key, size_t size) {
  std::vector<char> all(size);
  for (size_t i = 0; i < size; ++i) all[i] = letter(key, i);
  return all;
}

inline phx_options within(int64_t timeout_ms) {
  phx_options options{};
  options.struct_size = sizeof options;
  options.timeout_ms = timeout_ms;
  return options;
}

inline void send(phx_group *group, int to, uint32_t tag, const std::vector<char> &data) {
  CHECK_OK(phx_send(group, data.data(), data.size(), PHX_DTYPE_U8, to, tag, nullptr, nullptr));
}

inline phx_work *start_send(phx_group *group, int to, uint32_t tag, const std::vector<char> &data) {
  phx_work *work = nullptr;
  CHECK_OK(phx_send(group, data.data(), data.size(), PHX_DTYPE_U8, to, tag, nullptr, &work));
  CHECK(work != nullptr);
  return work;
}

// Receives into a buffer with a guard behind it.
inline void expect(phx_group *group, int from, uint32_t tag, uint32_t key, size_t size) {
  std::vector<char> data(size + 8, 'z');
  CHECK_OK(phx_recv(group, data.data(), size, PHX_DTYPE_U8, from, tag, nullptr, nullptr));
  for (size_t i = 0; i < size; ++i) CHECK(data[i] == letter(key, i));
  for (size_t i = size; i < data.size(); ++i) CHECK(data[i] == 'z');
}

inline phx_work *start_recv(phx_group *group, int from, uint32_t tag, std::vector<char> &data) {
  phx_work *work = nullptr;
  CHECK_OK(phx_recv(group, data.data(), data.size(), PHX_DTYPE_U8, from, tag, nullptr, &work));
  CHECK(work != nullptr);
  return work;
}

inline void wait(phx_work *work) {
  CHECK_OK(phx_work_wait(work, 0));
  CHECK_OK(phx_work_wait(work, 0));  // idempotent
  CHECK_OK(phx_work_test(work));
  phx_work_release(work);
}

inline phx_error_info last_info() {
  phx_error_info info{};
  info.struct_size = sizeof info;
  CHECK_OK(phx_last_error_info(&info));
  return info;
}

inline bool says(const char *words) { return std::strstr(phx_last_error(), words) != nullptr; }

}  // namespace messages
