// The thread that serves a TCP store: one event loop for all clients over one table.
#pragma once

#include <memory>
#include <string>
#include <unordered_map>

#include "base/event_loop.h"
#include "store/table.h"
#include "store/tcp_connection.h"
#include "store/tcp_socket.h"

namespace phx::store {

struct TcpLimits {
  size_t connections = 4096;
  size_t handshakes = 128;      // connections that have not shown the token yet
  int64_t handshake_ms = 5000;  // for each of them
  int64_t crowded_ms = 250;     // the same while `handshakes` of them wait, so that newcomers get their turn
};

class TcpServer final : private EventLoop {
 public:
  static phx_status start(const char *operation, const Endpoint &endpoint, std::string token, const TcpLimits &limits,
                          std::unique_ptr<TcpServer> *out);
  ~TcpServer();  // ends the thread; its clients see their connections close
  TcpServer(const TcpServer &) = delete;
  TcpServer &operator=(const TcpServer &) = delete;

  const std::string &host() const { return endpoint_.host; }
  uint16_t port() const { return endpoint_.port(); }
  Table &table() { return table_; }
  using EventLoop::wake;  // after a change of the table by another thread: a client may wait for the key

 private:
  TcpServer(const Endpoint &endpoint, std::string token, const TcpLimits &limits);

  void on_accept(Fd fd, size_t listener) override;
  void on_late(int fd) override { close_connection(fd, "it did not show the token in time"); }
  void on_event(int fd, uint32_t events) override;
  void after_events(bool) override { answer_parked(); }
  bool has_room() const override { return connections_.size() < limits_.connections; }
  int64_t next_look_ns() const override;
  bool goes_on_after(const std::exception &error) override;
  template <class Step>
  void advance(int fd, Step &&step);
  void answer_parked();
  void close_connection(int fd, const char *why);

  Endpoint endpoint_;
  const std::string token_;
  const TcpLimits limits_;
  Nonce server_id_{};
  Table table_;

  // The thread's own.
  std::unordered_map<int, std::unique_ptr<TcpConnection>> connections_;  // by descriptor
  uint64_t answered_version_ = 0;  // of the table, when the parked requests were last tried
};

}  // namespace phx::store
