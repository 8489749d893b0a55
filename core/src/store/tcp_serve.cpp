// The handle of a served TCP store. The server lives as long as it does; its own operations work on the table directly.
#include "base/error.h"
#include "store/semantics.h"
#include "store/store.h"
#include "store/tcp_server.h"

namespace phx::store {
namespace {

class TcpServerStore final : public phx_store {
 public:
  explicit TcpServerStore(std::unique_ptr<TcpServer> server) : server_(std::move(server)) {}

  phx_status set(const char *key, const void *value, size_t size) override {
    const phx_status status = check_process("store_set");
    if (status != PHX_OK) return status;
    server_->table().set(key, value, size);
    server_->wake();
    return PHX_OK;
  }
  phx_status get(const char *key, std::string *value, int64_t timeout_ms) override {
    const phx_status status = check_process("store_get");
    if (status != PHX_OK) return status;
    return server_->table().get("store_get", key, value, Deadline::after_ms(timeout_ms));
  }
  phx_status wait(const char *const *keys, size_t count, int64_t timeout_ms) override {
    const phx_status status = check_process("store_wait");
    return status != PHX_OK ? status : server_->table().wait(keys, count, Deadline::after_ms(timeout_ms));
  }
  phx_status add(const char *key, int64_t delta, int64_t *result) override {
    phx_status status = check_process("store_add");
    if (status == PHX_OK) status = server_->table().add(key, delta, result);
    if (status == PHX_OK) server_->wake();
    return status;
  }
  phx_status remove(const char *key) override {
    const phx_status status = check_process("store_remove");
    return status != PHX_OK ? status : server_->table().remove(key);
  }

 private:
  phx_status check_process(const char *operation) const {
    if (!is_inherited()) return PHX_OK;
    return fail(PHX_ERR_UNSUPPORTED, operation,
                "%s: this TCP store is served by the process from which this one was forked; connect to it with "
                "phx_store_tcp_connect",
                operation);
  }

  std::unique_ptr<TcpServer> server_;
};

}  // namespace

phx_status make_tcp_server(const char *operation, const char *bind_address, const void *token, size_t token_size,
                           uint16_t *port, phx_store **out) {
  phx_status status = check_out(operation, out);
  if (status == PHX_OK) status = check_out(operation, port);
  if (status == PHX_OK) status = check_token(operation, token, token_size);
  Endpoint endpoint;
  if (status == PHX_OK) status = parse_endpoint(operation, bind_address, *port, &endpoint);
  if (status != PHX_OK) return status;
  std::unique_ptr<TcpServer> server;
  const std::string secret(static_cast<const char *>(token), token_size);
  status = TcpServer::start(operation, endpoint, secret, TcpLimits(), &server);
  if (status != PHX_OK) return status;
  const uint16_t bound = server->port();
  *out = new TcpServerStore(std::move(server));
  *port = bound;
  return PHX_OK;
}

}  // namespace phx::store
