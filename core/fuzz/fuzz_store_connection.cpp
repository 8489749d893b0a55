// The TCP store's server, seen by one client, from the greeting to the end of the connection.
//
// The client controls every byte that it sends, and where the stream is cut into pieces. Without the token it must get
// nothing but a refusal, and change nothing. With it, every reply must be one that a client can read, and a connection
// whose client has gone must end, whatever it was in the middle of.
#include <sys/epoll.h>
#include <sys/ioctl.h>

#include <memory>

#include "input.h"
#include "store/tcp_server.h"

using namespace phx::store;

namespace {

const std::string kToken = "a secret of the fuzzer";

class Client {
 public:
  Client() {
    int pair[2];
    MUST(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, pair) == 0);
    mine_ = phx::Fd(pair[0]);
    connection_ = std::make_unique<TcpConnection>(phx::Fd(pair[1]), Nonce{1}, Nonce{2});
    table_.set("key", "value", 5);
    table_.set("counter", "41", 2);
    serve();
    greeting_ = decode<Greeting>(take(sizeof greeting_));
    MUST(greeting_.magic == kProtocol && received_.empty());
  }

  void send(const std::string &bytes) {
    if (!open_ || bytes.empty()) return;
    (void)!write(mine_.get(), bytes.data(), bytes.size());  // full while a request waits for its key
    serve();
  }
  void show_token() {
    Answer answer{};
    answer.proof = make_proof(Side::kClient, kToken, greeting_, answer.nonce);
    send(bytes_of(answer));
    const Verdict verdict = decode<Verdict>(take(sizeof(Verdict)));
    MUST(verdict.accepted == 1 && verdict.proof == make_proof(Side::kServer, kToken, greeting_, answer.nonce));
  }
  void set_from_outside(const std::string &key) {
    table_.set(key.c_str(), "outside", 7);
    serve();
  }
  void leave() {
    shutdown(mine_.get(), SHUT_WR);
    if (open_ && !connection_->is_parked()) MUST(connection_->on_readable(kToken, table_) != nullptr);
  }

  uint64_t version() const { return table_.version(); }
  bool open() const { return open_; }
  size_t waiting() const { return received_.size(); }
  std::string take(size_t size) {
    MUST(received_.size() >= size);
    const std::string bytes = received_.substr(0, size);
    received_.erase(0, size);
    return bytes;
  }

 private:
  // What the epoll loop does, as long as there is anything to do.
  void serve() {
    bool more = true;
    while (open_ && more) {
      const uint32_t wanted = connection_->wanted_events();
      int unread = 0;
      MUST(ioctl(connection_->fd(), FIONREAD, &unread) == 0);
      more = (wanted & EPOLLOUT) != 0 || connection_->is_parked() || unread > 0;
      if ((wanted & EPOLLOUT) != 0) {
        open_ = connection_->on_writable() == nullptr;
      } else if (connection_->is_parked()) {
        open_ = connection_->try_parked(table_) == nullptr;
        more = !connection_->is_parked();
      } else if (unread > 0) {
        open_ = connection_->on_readable(kToken, table_) == nullptr;
      }
      receive();
    }
  }
  void receive() {
    char buffer[4096];
    for (ssize_t got; (got = read(mine_.get(), buffer, sizeof buffer)) > 0;)
      received_.append(buffer, static_cast<size_t>(got));
  }

  phx::Fd mine_;
  std::unique_ptr<TcpConnection> connection_;
  Table table_;
  Greeting greeting_{};
  std::string received_;
  bool open_ = true;
};

void check_replies(Client &client) {
  while (client.waiting() > 0) {
    const size_t size = decode<FrameSize>(client.take(sizeof(FrameSize)));
    MUST(size <= kMaxReplyBytes);
    Reply reply;
    MUST(decode(client.take(size), &reply) == nullptr);
  }
}

}  // namespace

extern "C" int LLVMFuzzerInitialize(int *, char ***) {
  fuzz::log_into_nothing();
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  fuzz::Input input(data, size);
  Client client;
  const uint64_t untouched = client.version();
  const bool knows_token = (input.byte() & 1) != 0;
  if (knows_token) client.show_token();
  while (!input.empty()) {
    if (knows_token && input.below(8) == 7)
      client.set_from_outside(input.below(2) == 0 ? "key" : "late");
    else
      client.send(input.piece());
  }
  client.leave();
  if (knows_token) {
    check_replies(client);
  } else {
    MUST(client.version() == untouched);
    if (client.waiting() > 0) MUST(decode<Verdict>(client.take(sizeof(Verdict))).accepted == 0 && !client.open());
    MUST(client.waiting() == 0);
  }
  return 0;
}
