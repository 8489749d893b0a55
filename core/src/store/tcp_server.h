// The thread that serves a TCP store: one epoll loop for all clients over one table.
#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <unordered_map>

#include "base/fd.h"
#include "store/table.h"
#include "store/tcp_connection.h"
#include "store/tcp_socket.h"

namespace phx::store {

struct TcpLimits {
  size_t connections = 4096;
  size_t handshakes = 128;      // connections that have not shown the token yet
  int64_t handshake_ms = 5000;  // for each of them
  int64_t crowded_ms = 250;     // the same while there are as many as may be, so that newcomers get their turn
};

class TcpServer {
 public:
  static phx_status start(const char *operation, const Endpoint &endpoint, std::string token, const TcpLimits &limits,
                          std::unique_ptr<TcpServer> *out);
  ~TcpServer();  // ends the thread; its clients see their connections close
  TcpServer(const TcpServer &) = delete;
  TcpServer &operator=(const TcpServer &) = delete;

  uint16_t port() const { return endpoint_.port(); }
  Table &table() { return table_; }
  void wake();  // after a change of the table from outside: somebody may be waiting for it

 private:
  TcpServer(const Endpoint &endpoint, std::string token, const TcpLimits &limits);
  phx_status prepare(const char *operation);
  phx_status launch(const char *operation);

  void run();
  void serve_events();
  int poll_timeout_ms() const;
  void on_event(uint64_t id, uint32_t events);
  template <class Step>
  void advance(uint64_t id, Step &&step);
  void accept_clients();
  bool may_accept() const;
  void answer_parked();
  void expire_handshakes();
  int64_t handshake_ns() const;
  void watch(uint64_t id, TcpConnection &connection);
  void watch_listener();
  void close_connection(uint64_t id, const char *why);

  Endpoint endpoint_;
  const std::string token_;
  const TcpLimits limits_;
  Nonce server_id_{};
  Table table_;
  Fd listener_, epoll_, wake_;
  std::atomic<bool> stopping_{false};
  std::thread thread_;

  // The thread's own.
  std::unordered_map<uint64_t, std::unique_ptr<TcpConnection>> connections_;
  uint64_t next_id_;
  size_t handshakes_ = 0;
  bool listening_ = true;          // whether epoll looks at the listener
  int64_t accept_again_ns_ = 0;    // after the process ran out of descriptors
  uint64_t answered_version_ = 0;  // of the table, when the parked requests were last tried
};

}  // namespace phx::store
