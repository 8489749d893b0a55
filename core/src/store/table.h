// A map from keys to values that threads can wait on. The memory store is one; the TCP server has one.
#pragma once

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <string>
#include <unordered_map>

#include "base/deadline.h"

namespace phx::store {

class Table {
 public:
  void set(const char *key, const void *value, size_t size);
  phx_status add(const char *key, int64_t delta, int64_t *result);
  phx_status remove(const char *key);
  bool find(const std::string &key, std::string *value) const;  // value may be NULL
  // Waits for the key; value may be NULL. `operation` is named in the error.
  phx_status await(const char *operation, const char *key, std::string *value, const Deadline &deadline) const;

  // Grows with every key that is set, so that a reader can tell cheaply that looking again is worth while.
  uint64_t version() const { return version_.load(std::memory_order_acquire); }

 private:
  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  std::unordered_map<std::string, std::string> values_;
  std::atomic<uint64_t> version_{0};
};

}  // namespace phx::store
