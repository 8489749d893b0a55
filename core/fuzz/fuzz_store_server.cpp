// The TCP store's server with its epoll loop, seen by several clients at once.
//
// The clients control what they send, in which order they come, whether they show the token, read their replies or
// leave. The server must close the connection of each that has left, and serve an honest client afterwards.
#include <arpa/inet.h>

#include <memory>

#include "input.h"
#include "store/tcp_server.h"

using namespace phx::store;

namespace {

constexpr size_t kClients = 4;
constexpr int64_t kLongMs = 60000;  // more than the fuzzer waits for one input
const std::string kToken = "a secret of the fuzzer";

// Ports of ended connections stay taken for a minute, for each address apart.
std::string next_address() {
  static uint32_t count = static_cast<uint32_t>(getpid()) << 8;
  ++count;
  return "127." + std::to_string(count >> 16 & 255) + "." + std::to_string(count >> 8 & 255) + "." +
         std::to_string(1 + count % 254);
}

std::unique_ptr<TcpServer> start(const std::string &address) {
  TcpLimits limits;
  limits.connections = kClients;  // few, so that there can be too many
  limits.handshakes = kClients - 1;
  limits.handshake_ms = 20;
  limits.crowded_ms = 5;
  Endpoint endpoint;
  std::unique_ptr<TcpServer> server;
  MUST(parse_endpoint("fuzz", address.c_str(), 0, &endpoint) == PHX_OK);
  MUST(TcpServer::start("fuzz", endpoint, kToken, limits, &server) == PHX_OK);
  return server;
}

class Client {
 public:
  void connect(const std::string &address, uint16_t port) {
    sockaddr_in there{};
    there.sin_family = AF_INET;
    there.sin_port = htons(port);
    MUST(inet_pton(AF_INET, address.c_str(), &there.sin_addr) == 1);
    fd_ = phx::Fd(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    const int status = ::connect(fd_.get(), reinterpret_cast<const sockaddr *>(&there), sizeof there);
    MUST(status == 0 || errno == EINTR);  // then it goes on by itself
  }
  void show_token() {
    Greeting greeting;
    if (fuzz::receive(fd_.get(), &greeting, sizeof greeting, MSG_WAITALL) != static_cast<ssize_t>(sizeof greeting))
      return;
    MUST(greeting.magic == kProtocol);
    Answer answer{};
    answer.proof = make_proof(Side::kClient, kToken, greeting, answer.nonce);
    send(bytes_of(answer));
  }
  void send(const std::string &bytes) {
    if (fd_.valid()) (void)!::send(fd_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
  }
  void receive() {
    char buffer[4096];
    if (fd_.valid()) (void)fuzz::receive(fd_.get(), buffer, sizeof buffer, MSG_DONTWAIT);
  }
  void reset() { fd_.reset(); }
  // The server has to close its side as well.
  void leave() {
    if (!fd_.valid()) return;
    shutdown(fd_.get(), SHUT_WR);
    char buffer[4096];
    while (fuzz::receive(fd_.get(), buffer, sizeof buffer) > 0) {
    }
    fd_.reset();
  }
  bool connected() const { return fd_.valid(); }

 private:
  phx::Fd fd_;
};

void check_alive(const std::string &address, uint16_t port) {
  phx_store *store = nullptr;
  MUST(phx_store_tcp_connect(address.c_str(), port, kToken.data(), kToken.size(), kLongMs, &store) == PHX_OK);
  char value[8] = {};
  size_t size = 0;
  MUST(phx_store_set(store, "honest", "value", 5) == PHX_OK);
  MUST(phx_store_get(store, "honest", value, sizeof value, &size, kLongMs) == PHX_OK);
  MUST(size == 5 && std::memcmp(value, "value", 5) == 0);
  phx_store_release(store);
}

}  // namespace

extern "C" int LLVMFuzzerInitialize(int *, char ***) {
  fuzz::log_into_nothing();
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  fuzz::Input input(data, size);
  const std::string address = next_address();
  const int before = fuzz::open_descriptors();
  {
    const std::unique_ptr<TcpServer> server = start(address);
    Client clients[kClients];
    for (int step = 0; step < 64 && !input.empty(); ++step) {
      const uint8_t what = input.byte();
      Client &client = clients[what % kClients];
      switch (what / kClients % 8) {
        case 0: client.receive(); break;
        case 1: client.reset(); break;
        case 2: client.leave(); break;
        case 3:
          server->table().set("key", "outside", 7);
          server->wake();
          break;
        default:
          if (!client.connected()) {
            client.connect(address, server->port());
            if (what >= 128) client.show_token();
          }
          client.send(input.piece());
      }
    }
    for (Client &client : clients) client.leave();
    check_alive(address, server->port());
  }
  MUST(fuzz::open_descriptors() == before);
  return 0;
}
