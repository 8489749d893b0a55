// The map behind the memory store and the TCP server, and the handles over it in this process: the memory store, and a
// TCP store at the side that serves it.
#include "base/error.h"
#include "store/tcp_server.h"

namespace phx::store {

// ---- the map

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

phx_status Table::await(const char *operation, const char *key, std::string *value, const Deadline &deadline) const {
  const std::string name(key);
  std::unique_lock<std::mutex> lock(mutex_);
  auto found = values_.end();
  const auto is_set = [&] { return (found = values_.find(name)) != values_.end(); };
  if (!wait_until(changed_, lock, deadline, is_set)) return fail_key_timeout(operation, key, deadline);
  if (value != nullptr) *value = found->second;
  return PHX_OK;
}

// ---- its handles

namespace {

class TableStore final : public phx_store {
 public:
  TableStore() = default;
  explicit TableStore(std::unique_ptr<TcpServer> server) : server_(std::move(server)) {}

  phx_status set(const char *key, const void *value, size_t size) override {
    return changed("store_set", [&](Table &table) {
      table.set(key, value, size);
      return PHX_OK;
    });
  }
  phx_status await(const char *operation, const char *key, std::string *value, const Deadline &deadline) override {
    PHX_TRY(check_process(operation));
    return table().await(operation, key, value, deadline);
  }
  phx_status add(const char *key, int64_t delta, int64_t *result) override {
    return changed("store_add", [&](Table &table) { return table.add(key, delta, result); });
  }
  phx_status remove(const char *key) override {
    PHX_TRY(check_process("store_remove"));
    return table().remove(key);
  }
  std::string server() const override {
    const std::string host = server_ ? server_->host() : "";
    return host == "0.0.0.0" || host == "::" ? "" : host;  // it is served on all addresses, so none is known
  }

 private:
  Table &table() { return server_ ? server_->table() : own_; }

  // A client of the server may be waiting for the key that `change` sets.
  template <class Change>
  phx_status changed(const char *operation, Change &&change) {
    PHX_TRY(check_process(operation));
    PHX_TRY(change(table()));
    if (server_) server_->wake();
    return PHX_OK;
  }

  phx_status check_process(const char *operation) const {
    if (!is_inherited()) return PHX_OK;
    return fail(PHX_ERR_UNSUPPORTED, operation,
                server_ ? "this TCP store is served by the process from which this one was forked; connect to it "
                          "with phx_store_tcp_connect"
                        : "this memory store belongs to the process from which this one was forked, and joins the "
                          "threads of that process only; use a file or TCP store among processes");
  }

  Table own_;
  std::unique_ptr<TcpServer> server_;  // NULL: a memory store
};

}  // namespace

phx_status make_memory_store(const char *operation, phx_store **out) {
  PHX_TRY(check_out(operation, out));
  *out = new TableStore;
  return PHX_OK;
}

phx_status make_tcp_server(const char *operation, const char *bind_address, const void *token, size_t token_size,
                           uint16_t *port, phx_store **out) {
  PHX_TRY(check_out(operation, out));
  PHX_TRY(check_out(operation, port));
  PHX_TRY(check_token(operation, token, token_size));
  Endpoint endpoint;
  PHX_TRY(parse_endpoint(operation, bind_address, *port, &endpoint));
  std::unique_ptr<TcpServer> server;
  PHX_TRY(TcpServer::start(operation, endpoint, std::string(static_cast<const char *>(token), token_size), TcpLimits(),
                           &server));
  const uint16_t bound = server->port();
  *out = new TableStore(std::move(server));
  *port = bound;
  return PHX_OK;
}

}  // namespace phx::store
