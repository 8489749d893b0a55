// The thread that serves a TCP store: one event loop for all clients over one table.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>

#include "base/event_loop.h"
#include "store/table.h"
#include "store/tcp_protocol.h"
#include "store/tcp_socket.h"

namespace phx::store {

// One client: bytes in, bytes out, and what it is waiting for.
//
// A connection is never read beyond the frame that comes next, and not at all while a reply is to be sent. So it holds
// at most one request and one reply, whatever its client sends; the rest stays with the kernel and then the sender.
class TcpConnection {
 public:
  TcpConnection(Fd fd, const Nonce &nonce, const Nonce &server_id);

  int fd() const { return fd_.get(); }
  bool in_handshake() const { return state_ == State::kHandshake; }
  bool is_parked() const { return state_ == State::kParked; }
  const Deadline &parked_until() const { return parked_until_; }

  // These return NULL while the connection stays open, else why it is to be closed; "": it has plainly ended.
  const char *on_readable(const std::string &token, Table &table);
  const char *on_writable() { return flush(); }
  // Answers a parked request whose key has come or whose time is over.
  const char *try_parked(Table &table);

  uint32_t wanted_events() const;  // of epoll
  uint32_t watched_events = 0;     // those that epoll looks for, once it does; the server keeps it

 private:
  enum class State { kHandshake, kReady, kParked };

  const char *read_some(size_t wanted);  // towards in_.size() == wanted
  const char *on_answer(const std::string &token);
  const char *on_request(Table &table);
  Reply execute(const Request &request, Table &table);
  const char *send_out(std::string bytes);
  const char *flush();

  Fd fd_;
  State state_ = State::kHandshake;
  Greeting greeting_;
  std::string in_;   // of the frame that is being received
  std::string out_;  // of what is being sent
  size_t sent_ = 0;
  Request parked_;
  Deadline parked_until_;
};

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

  const std::string &host() const { return endpoint_.host; }
  uint16_t port() const { return endpoint_.port(); }
  Table &table() { return table_; }
  using EventLoop::wake;  // after a change of the table by another thread: a client may wait for the key

 private:
  TcpServer(const Endpoint &endpoint, std::string token, const TcpLimits &limits)
      : endpoint_(endpoint), token_(std::move(token)), limits_(limits) {}

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
