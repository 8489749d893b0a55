// One client as the TCP store's server sees it: bytes in, bytes out, and what it is waiting for.
//
// A connection is never read beyond the frame that comes next, and not at all while a reply is to be sent. So it holds
// at most one request and one reply, whatever its client sends; the rest stays with the kernel and then the sender.
#pragma once

#include <cstdint>
#include <string>

#include "base/deadline.h"
#include "base/fd.h"
#include "store/table.h"
#include "store/tcp_protocol.h"

namespace phx::store {

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

}  // namespace phx::store
