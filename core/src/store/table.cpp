// The map behind the memory store and the TCP server: see the header.
#include "store/table.h"

#include "store/semantics.h"

namespace phx::store {

void Table::set(const char *key, const void *value, size_t size) {
  std::string name(key);
  std::string copy(static_cast<const char *>(value), size);  // before the lock: it may be long
  std::lock_guard<std::mutex> lock(mutex_);
  values_[std::move(name)] = std::move(copy);
  version_.fetch_add(1, std::memory_order_release);
  changed_.notify_all();
}

phx_status Table::add(const char *key, int64_t delta, int64_t *result) {
  std::string name(key);
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = values_.find(name);
  int64_t sum = 0;
  PHX_TRY(add_to_counter(key, found == values_.end() ? nullptr : &found->second, delta, &sum));
  values_[std::move(name)] = std::to_string(sum);
  version_.fetch_add(1, std::memory_order_release);
  changed_.notify_all();
  *result = sum;
  return PHX_OK;
}

phx_status Table::remove(const char *key) {
  std::lock_guard<std::mutex> lock(mutex_);
  return values_.erase(key) == 1 ? PHX_OK : fail_key_missing("store_remove", key);
}

bool Table::find(const std::string &key, std::string *value) const {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = values_.find(key);
  if (found == values_.end()) return false;
  if (value != nullptr) *value = found->second;
  return true;
}

phx_status Table::get(const char *operation, const char *key, std::string *value, const Deadline &deadline) const {
  const std::string name(key);
  std::unique_lock<std::mutex> lock(mutex_);
  auto found = values_.end();
  const auto is_set = [&] { return (found = values_.find(name)) != values_.end(); };
  if (!wait_until(changed_, lock, deadline, is_set)) return fail_key_timeout(operation, key, deadline);
  if (value != nullptr) *value = found->second;
  return PHX_OK;
}

phx_status Table::wait(const char *const *keys, size_t count, const Deadline &deadline) const {
  return wait_for_each(keys, count, [&](const char *key) { return get("store_wait", key, nullptr, deadline); });
}

}  // namespace phx::store
