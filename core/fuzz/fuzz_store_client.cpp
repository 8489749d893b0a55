// The client of a TCP store, whose server is hostile or broken.
//
// The server controls what it answers to a connection and to each request, and when it hangs up. A client must not send
// a request to one that has not proved that it knows the token; each call must end with a status of the header, within
// its time, and write its result only when that is PHX_OK.
#include <arpa/inet.h>

#include <thread>

#include "base/fd.h"
#include "input.h"
#include "store/tcp_protocol.h"

using namespace phx::store;

namespace {

constexpr int64_t kTimeoutMs = 5;
constexpr int kConnections = 6;
const std::string kToken = "a secret of the fuzzer";

// Ports of ended connections stay taken for a minute, for each address apart.
sockaddr_in next_address() {
  static uint32_t count = static_cast<uint32_t>(getpid()) << 8;
  ++count;
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl((127u << 24) + (count >> 8 & 0xffff) * 256 + 1 + count % 254);
  return address;
}

class Server {
 public:
  explicit Server(fuzz::Input &input) : input_(input), listener_(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    sockaddr_in bound = next_address();
    socklen_t length = sizeof bound;
    auto *address = reinterpret_cast<sockaddr *>(&bound);
    MUST(bind(listener_.get(), address, sizeof bound) == 0 && listen(listener_.get(), 8) == 0);
    MUST(getsockname(listener_.get(), address, &length) == 0);
    port = ntohs(bound.sin_port);
    MUST(inet_ntop(AF_INET, &bound.sin_addr, text, sizeof text) != nullptr);
    thread_ = std::thread([this] {
      for (int i = 0; i < kConnections && !input_.empty(); ++i) {
        const phx::Fd fd(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
        if (fd.valid()) serve(fd.get());
      }
      refuse();  // at once, so that no call goes on trying
    });
  }
  ~Server() {
    refuse();
    thread_.join();
  }
  char text[INET_ADDRSTRLEN];
  uint16_t port = 0;

 private:
  void refuse() { shutdown(listener_.get(), SHUT_RDWR); }
  void serve(int fd) {
    const timeval patience{0, 1000};
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
    const uint8_t how = input_.byte();
    const bool knows_token = (how & 1) != 0;
    size_t received = 0;
    if (knows_token && !shake_hands(fd)) return;
    for (int replies = how >> 4; replies > 0 && !input_.empty(); --replies) {
      char buffer[4096];
      ssize_t got = 0;
      // The greeting comes unasked; everything else answers something, or goes on where the client waits for more.
      if (knows_token || replies < how >> 4) got = fuzz::receive(fd, buffer, sizeof buffer);
      received += static_cast<size_t>(std::max<ssize_t>(got, 0));
      if (!knows_token) MUST(received <= sizeof(Answer));
      const std::string bytes = input_.piece();
      if (send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL) != static_cast<ssize_t>(bytes.size())) return;
    }
  }
  static bool shake_hands(int fd) {
    const Greeting greeting{kProtocol, Nonce{3}, Nonce{4}};
    if (send(fd, &greeting, sizeof greeting, MSG_NOSIGNAL) < 0) return false;
    Answer answer;
    if (fuzz::receive(fd, &answer, sizeof answer, MSG_WAITALL) != static_cast<ssize_t>(sizeof answer)) return false;
    MUST(answer.proof == make_proof(Side::kClient, kToken, greeting, answer.nonce));
    const Verdict verdict{1, make_proof(Side::kServer, kToken, greeting, answer.nonce)};
    return send(fd, &verdict, sizeof verdict, MSG_NOSIGNAL) > 0;
  }

  fuzz::Input &input_;  // the thread's, once it runs
  phx::Fd listener_;
  std::thread thread_;
};

void use(phx_store *store, uint8_t calls) {
  char value[64];
  size_t size = 12345;
  int64_t sum = 12345;
  const char *keys[] = {"a", "b"};
  for (int i = 0; i < 5; ++i) {
    phx_status status = PHX_OK;
    switch ((calls + i) % 5) {
      case 0: status = phx_store_get(store, "key", value, sizeof value, &size, kTimeoutMs); break;
      case 1: status = phx_store_set(store, "key", "value", 5); break;
      case 2: status = phx_store_add(store, "counter", -1, &sum); break;
      case 3: status = phx_store_wait(store, keys, 2, kTimeoutMs); break;
      default: status = phx_store_remove(store, "key");
    }
    MUST(status == PHX_OK || fuzz::is_error(status));
    if ((calls + i) % 5 == 0) MUST(status == PHX_OK ? size <= kMaxReplyBytes : size == 12345);
    if ((calls + i) % 5 == 2 && status != PHX_OK) MUST(sum == 12345);
  }
}

}  // namespace

extern "C" int LLVMFuzzerInitialize(int *, char ***) {
  fuzz::log_into_nothing();
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  fuzz::Input input(data, size);
  const int before = fuzz::open_descriptors();
  const uint8_t calls = input.byte();
  {
    Server server(input);
    phx_store *store = nullptr;
    const phx_status status =
        phx_store_tcp_connect(server.text, server.port, kToken.data(), kToken.size(), kTimeoutMs, &store);
    MUST(status == PHX_OK ? store != nullptr : fuzz::is_error(status) && store == nullptr);
    if (store != nullptr) use(store, calls);
    phx_store_release(store);
  }
  MUST(fuzz::open_descriptors() == before);
  return 0;
}
