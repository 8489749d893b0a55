// The handles over a Table in this process: the memory store, and a TCP store at the side that serves it.
#include "base/error.h"
#include "store/semantics.h"
#include "store/store.h"
#include "store/tcp_server.h"

namespace phx::store {
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
  phx_status get(const char *key, std::string *value, int64_t timeout_ms) override {
    const phx_status status = check_process("store_get");
    return status != PHX_OK ? status : table().get("store_get", key, value, Deadline::after_ms(timeout_ms));
  }
  phx_status wait(const char *const *keys, size_t count, int64_t timeout_ms) override {
    const phx_status status = check_process("store_wait");
    return status != PHX_OK ? status : table().wait(keys, count, Deadline::after_ms(timeout_ms));
  }
  phx_status add(const char *key, int64_t delta, int64_t *result) override {
    return changed("store_add", [&](Table &table) { return table.add(key, delta, result); });
  }
  phx_status remove(const char *key) override {
    const phx_status status = check_process("store_remove");
    return status != PHX_OK ? status : table().remove(key);
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
    phx_status status = check_process(operation);
    if (status == PHX_OK) status = change(table());
    if (status == PHX_OK && server_) server_->wake();
    return status;
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
  const phx_status status = check_out(operation, out);
  if (status == PHX_OK) *out = new TableStore;
  return status;
}

phx_status make_tcp_server(const char *operation, const char *bind_address, const void *token, size_t token_size,
                           uint16_t *port, phx_store **out) {
  phx_status status = check_out(operation, out);
  if (status == PHX_OK) status = check_out(operation, port);
  if (status == PHX_OK) status = check_token(operation, token, token_size);
  Endpoint endpoint;
  if (status == PHX_OK) status = parse_endpoint(operation, bind_address, *port, &endpoint);
  std::unique_ptr<TcpServer> server;
  if (status == PHX_OK)
    status = TcpServer::start(operation, endpoint, std::string(static_cast<const char *>(token), token_size),
                              TcpLimits(), &server);
  if (status != PHX_OK) return status;
  const uint16_t bound = server->port();
  *out = new TableStore(std::move(server));
  *port = bound;
  return PHX_OK;
}

}  // namespace phx::store
