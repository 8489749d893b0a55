// The TCP server and client against peers that send garbage, lie about sizes, are slow, or are no stores at all.
#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>

#include <random>
#include <thread>

#include "base/fd.h"
#include "store/tcp_protocol.h"
#include "store/tcp_server.h"
#include "store_fixtures.h"

namespace {

using namespace fixtures;
using namespace phx::store;
using phx::Fd;

sockaddr_in loopback(uint16_t port) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(port);
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  return address;
}

Fd raw_connect(uint16_t port) {
  Fd fd(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const sockaddr_in address = loopback(port);
  CHECK(connect(fd.get(), reinterpret_cast<const sockaddr *>(&address), sizeof address) == 0);
  return fd;
}

// As much as goes: the server may close while we send.
void raw_send(const Fd &fd, const std::string &bytes) {
  size_t sent = 0;
  while (sent < bytes.size()) {
    const ssize_t n = send(fd.get(), bytes.data() + sent, bytes.size() - sent, MSG_NOSIGNAL);
    if (n <= 0) return;
    sent += static_cast<size_t>(n);
  }
}

std::string raw_receive(const Fd &fd, size_t size) {
  std::string bytes(size, '\0');
  size_t got = 0;
  while (got < size) {
    const ssize_t n = recv(fd.get(), &bytes[got], size - got, 0);
    if (n <= 0) break;
    got += static_cast<size_t>(n);
  }
  bytes.resize(got);
  return bytes;
}

bool closed_by_peer(const Fd &fd) {
  pollfd entry{fd.get(), POLLIN, 0};
  char byte;
  for (;;) {
    if (poll(&entry, 1, static_cast<int>(kLongMs)) != 1) return false;
    if (recv(fd.get(), &byte, 1, 0) <= 0) return true;
  }
}

Fd authenticated(uint16_t port) {
  Fd fd = raw_connect(port);
  const std::string bytes = raw_receive(fd, sizeof(Greeting));
  CHECK(bytes.size() == sizeof(Greeting));
  const auto greeting = decode<Greeting>(bytes);
  CHECK(greeting.magic == kProtocol);
  Answer answer{};
  answer.proof = make_proof(Side::kClient, kToken, greeting, answer.nonce);
  raw_send(fd, bytes_of(answer));
  const std::string verdict = raw_receive(fd, sizeof(Verdict));
  CHECK(verdict.size() == sizeof(Verdict) && decode<Verdict>(verdict).accepted == 1);
  return fd;
}

std::string little_endian(uint32_t value) {
  return {static_cast<char>(value), static_cast<char>(value >> 8), static_cast<char>(value >> 16),
          static_cast<char>(value >> 24)};
}

std::string framed(const std::string &body) { return little_endian(static_cast<uint32_t>(body.size())) + body; }

std::string request_bytes(Op op, int64_t number, const std::string &key) {
  Request request;
  request.op = op;
  request.number = number;
  request.key = key;
  return encode_head(request);
}

class Served {
 public:
  Served() : server_(serve(&port)), client_(connect_to(port)) { set(client_, "key", "value"); }
  void check_alive() {
    CHECK(get(client_, "key") == "value");
    Store newcomer = connect_to(port);
    CHECK(get(newcomer, "key") == "value");
  }
  uint16_t port = 0;

 private:
  Store server_, client_;
};

TEST(random_bytes_before_the_handshake_close_only_their_connection) {
  Served served;
  std::mt19937 random(7);
  for (int round = 0; round < 60; ++round) {
    Fd fd = raw_connect(served.port);
    std::string garbage(1 + random() % 300, '\0');
    for (char &c : garbage) c = static_cast<char>(random());
    raw_send(fd, garbage);
    if (garbage.size() >= sizeof(Answer)) CHECK(closed_by_peer(fd));
  }
  served.check_alive();
}

TEST(random_frames_after_the_handshake_close_only_their_connection) {
  Served served;
  std::mt19937 random(8);
  for (int round = 0; round < 200; ++round) {
    Fd fd = authenticated(served.port);
    std::string garbage(1 + random() % 200, '\0');
    for (char &c : garbage) c = static_cast<char>(random());
    raw_send(fd, round % 2 == 0 ? garbage : framed(garbage));
    shutdown(fd.get(), SHUT_WR);
    CHECK(closed_by_peer(fd));
  }
  served.check_alive();
}

TEST(malformed_requests_are_refused_one_by_one) {
  Served served;
  const std::string good = request_bytes(Op::kGet, 1, "key");
  std::vector<std::string> bad;
  bad.push_back(little_endian(0));
  bad.push_back(little_endian(12) + std::string(12, '\1'));
  bad.push_back(little_endian(UINT32_MAX));
  bad.push_back(little_endian(static_cast<uint32_t>(kMaxRequestBytes + 1)));
  for (const char op : {'\0', '\6', '\xff'}) {
    bad.push_back(good);
    bad.back()[4] = op;
  }
  bad.push_back(request_bytes(Op::kGet, -1, "key"));
  bad.push_back(request_bytes(Op::kGet, 1, ""));
  bad.push_back(request_bytes(Op::kAdd, 1, std::string(1025, 'k')));
  bad.push_back(request_bytes(Op::kSet, 1, std::string("k\0y", 3)));
  bad.push_back(framed(good.substr(4) + "trailing"));
  std::string long_key = good;
  long_key[13] = '\x7f';  // the length of the key, beyond the frame
  bad.push_back(long_key);
  bad.push_back(
      framed('\1' + std::string(8, '\0') + little_endian(1) + "k" + std::string(phx::kMaxStoreValue + 1, 'v')));
  for (const std::string &bytes : bad) {
    Fd fd = authenticated(served.port);
    raw_send(fd, bytes);
    CHECK(closed_by_peer(fd));
    served.check_alive();
  }
}

TEST(a_request_that_comes_byte_by_byte_is_answered) {
  Served served;
  Fd fd = authenticated(served.port);
  for (const char c : request_bytes(Op::kGet, 1000, "key")) {
    raw_send(fd, std::string(1, c));
    served.check_alive();  // meanwhile the others go on
  }
  const std::string reply = raw_receive(fd, sizeof(FrameSize) + sizeof(ReplyHead) + 5);
  CHECK(reply.substr(sizeof(FrameSize) + sizeof(ReplyHead)) == "value");
}

TEST(requests_sent_at_once_are_answered_in_their_order) {
  Served served;
  Fd fd = authenticated(served.port);
  std::string requests;
  for (int i = 0; i < 100; ++i) requests += request_bytes(Op::kAdd, 1, "counter");
  raw_send(fd, requests);
  for (int i = 1; i <= 100; ++i) {
    const std::string head = raw_receive(fd, sizeof(FrameSize));
    Reply reply;
    CHECK(head.size() == sizeof(FrameSize) && decode(raw_receive(fd, decode<FrameSize>(head)), &reply) == nullptr);
    CHECK(reply.status == PHX_OK && reply.number == i);
  }
}

TEST(a_client_that_announces_much_and_sends_little_holds_up_nobody) {
  Served served;
  std::vector<Fd> slow;
  for (int i = 0; i < 50; ++i) {
    slow.push_back(authenticated(served.port));
    raw_send(slow.back(), little_endian(static_cast<uint32_t>(kMaxRequestBytes)) + "\1");
  }
  served.check_alive();
}

TEST(a_client_that_never_reads_holds_up_nobody) {
  Served served;
  Store writer = connect_to(served.port);
  set(writer, "large", std::string(8 << 20, 'l'));
  Fd fd = authenticated(served.port);
  for (int i = 0; i < 20; ++i) raw_send(fd, request_bytes(Op::kGet, 1000, "large"));
  served.check_alive();
}

TEST(a_parked_client_that_goes_away_is_forgotten) {
  Served served;
  const int before = open_descriptors();
  for (int i = 0; i < 50; ++i) {
    Fd fd = authenticated(served.port);
    raw_send(fd, request_bytes(Op::kGet, 1000000, "never"));
  }
  // The server closes its side of each soon; nothing but its counting tells, so it is asked until it has.
  while (open_descriptors() > before + 1) served.check_alive();
}

TEST(strangers_without_the_token_are_limited_in_number_and_time) {
  TcpLimits limits;
  limits.handshakes = 4;
  limits.handshake_ms = 50;
  limits.crowded_ms = 10;
  Endpoint endpoint;
  CHECK_OK(parse_endpoint("test", "127.0.0.1", 0, &endpoint));
  std::unique_ptr<TcpServer> server;
  CHECK_OK(TcpServer::start("test", endpoint, kToken, limits, &server));
  std::vector<Fd> strangers;
  for (int i = 0; i < 20; ++i) strangers.push_back(raw_connect(server->port()));
  Store client = connect_to(server->port());  // its turn comes, although the strangers were first
  set(client, "key", "value");
  for (const Fd &fd : strangers) CHECK(closed_by_peer(fd));
  CHECK(get(client, "key") == "value");
}

// A peer that listens, sends `greeting`, and then whatever it likes.
class FakeServer {
 public:
  explicit FakeServer(std::string greeting) : listener_(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    sockaddr_in address = loopback(0);
    socklen_t length = sizeof address;
    CHECK(bind(listener_.get(), reinterpret_cast<sockaddr *>(&address), length) == 0 &&
          listen(listener_.get(), 8) == 0);
    CHECK(getsockname(listener_.get(), reinterpret_cast<sockaddr *>(&address), &length) == 0);
    port = ntohs(address.sin_port);
    thread_ = std::thread([this, greeting] {
      Fd fd(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
      raw_send(fd, greeting);
      raw_receive(fd, sizeof(Answer));
      raw_send(fd, bytes_of(Verdict{1, Digest{}}));
      raw_receive(fd, 1);  // until the client has gone
    });
  }
  ~FakeServer() {
    shutdown(listener_.get(), SHUT_RDWR);
    thread_.join();
  }
  uint16_t port = 0;

 private:
  Fd listener_;
  std::thread thread_;
};

TEST(what_answers_but_is_no_store_is_reported_as_such) {
  FakeServer fake("HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\nServer: something else altogether\r\n\r\n");
  phx_store *out = nullptr;
  CHECK_FAILS(PHX_ERR_INVALID, "not a store of this version",
              phx_store_tcp_connect("127.0.0.1", fake.port, kToken.data(), kToken.size(), kLongMs, &out));
}

TEST(a_server_that_does_not_know_the_token_is_not_trusted) {
  FakeServer fake(bytes_of(Greeting{}));
  phx_store *out = nullptr;
  CHECK_FAILS(PHX_ERR_PERMISSION, "does not know this token",
              phx_store_tcp_connect("127.0.0.1", fake.port, kToken.data(), kToken.size(), kLongMs, &out));
}

TEST(a_server_that_stays_silent_ends_a_connect_with_a_timeout) {
  FakeServer fake("");
  phx_store *out = nullptr;
  CHECK_FAILS(PHX_ERR_TIMEOUT, "no answer in time",
              phx_store_tcp_connect("127.0.0.1", fake.port, kToken.data(), kToken.size(), kShortMs, &out));
}

}  // namespace

int main(int argc, char **argv) { return check::run_all(argc, argv); }
