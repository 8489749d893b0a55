// A rank's monitor, spoken to by strangers that know the name of its socket, and by ranks that have its token.
//
// They control every datagram and the descriptors that come with it, and when they come and leave. A stranger must not
// become a peer; what is taken must be a message of the form that it says, with its descriptors; none may stay open;
// and a rank that spoils its connection must not disturb another.
#include <atomic>
#include <memory>

#include "peer.h"
#include "world/monitor.h"

using namespace phx;

namespace {

constexpr size_t kPeers = 4;
constexpr uint64_t kGroups = 3, kOrdinals = 8;
constexpr int64_t kLongMs = 60000;  // more than the fuzzer waits for one input

Uuid uuid_of(size_t peer) { return {0, peer + 1}; }
constexpr size_t kHonest = kPeers;

PeerRecord make_self() {
  PeerRecord record{};
  std::memcpy(record.magic, kPeerMagic, sizeof record.magic);
  record.build = this_build();
  record.pid = getpid();
  record.uid = geteuid();
  record.uuid = random_uuid();
  record.token = {1, 2};
  return record;
}

class Group final : public GroupListener {
 public:
  bool has_peer(const Uuid &uuid) const override { return uuid.low <= kHonest; }
  void on_peer_gone(const Link &link, LinkState state, bool) override {
    MUST(has_peer(link.uuid) && state != LinkState::kAlive);
  }
  void on_revoked(const phx::ErrorInfo &cause) override {
    MUST(cause.struct_size == sizeof cause && strnlen(cause.text, sizeof cause.text) < sizeof cause.text);
  }
};

class Session {
 public:
  Session() : self_(make_self()), monitor_(self_), event_(eventfd(0, EFD_CLOEXEC)) {
    MUST(monitor_.start() == PHX_OK);
    honest_ = connect_to(self_.uuid);
    LinkRef link;
    MUST(greet(honest_.get(), hello_of(kHonest), &link));
  }

  void step(fuzz::Input &input) {
    const size_t peer = input.below(kPeers);
    Fd &socket = sockets_[peer];
    const uint64_t group_id = input.below(kGroups);
    switch (input.below(8)) {
      case 0:
      case 1: {
        std::string hello = hello_of(peer);
        if (input.below(2) == 0) spoil(input, &hello);
        leave(peer);
        socket = connect_to(self_.uuid);
        if (!greet(socket.get(), hello, &links_[peer])) socket.reset();
        break;
      }
      case 2:
        if (socket.valid())
          (void)fuzz::send_raw(socket.get(), input.piece(), descriptors(input.below(fuzz::kMostFds + 1)));
        break;
      case 3: send(input, socket.get(), group_id); break;
      case 4: leave(peer); break;
      case 5:
        groups_[group_id] = std::make_shared<Group>();
        monitor_.watch(group_id, groups_[group_id]);
        break;
      case 6:
        monitor_.unwatch(group_id);
        groups_[group_id].reset();
        break;
      default: take(uuid_of(peer), group_id, input.below(kOrdinals));
    }
  }

  // Whatever the others did, this one is heard.
  void check_honest() {
    const Envelope envelope{kWireMagic, MessageKind::kExchange, 1, kGroups, 1, 5, 0};
    MUST(fuzz::send_raw(honest_.get(), fuzz::as_bytes(envelope) + "hello", descriptors(1)));
    Message message;
    MUST(monitor_.take(uuid_of(kHonest), kGroups, 1, Deadline::after_ms(kLongMs), never_, &message) == PHX_OK);
    MUST(message.payload == "hello" && message.fds.size() == 1 && message.fds[0].valid());
  }

 private:
  using Input = fuzz::Input;
  static void spoil(Input &input, std::string *bytes) { fuzz::spoil(input, bytes); }
  static Fd connect_to(const Uuid &uuid) {
    Fd fd = fuzz::connect_to(uuid);
    MUST(fd.valid());
    return fd;
  }

  std::string hello_of(size_t peer) const {
    return fuzz::as_bytes(Hello{kWireMagic, static_cast<int32_t>(peer), uuid_of(peer), self_.uuid, self_.token});
  }
  // Whether the monitor took it for a peer, which it says with a Welcome. It takes nobody twice.
  bool greet(int socket, const std::string &bytes, LinkRef *made) {
    if (bytes.empty()) return false;
    Hello hello{};
    std::memcpy(static_cast<void *>(&hello), bytes.data(), std::min(bytes.size(), sizeof hello));
    const bool entitled = bytes.size() == sizeof hello && hello.magic == kWireMagic && hello.to == self_.uuid &&
                          hello.token == self_.token && hello.from != self_.uuid;
    const bool is_there = is_alive(hello.from);
    MUST(fuzz::send_raw(socket, bytes, {}));
    Welcome welcome{};
    const bool welcomed = fuzz::receive(socket, &welcome, sizeof welcome) == static_cast<ssize_t>(sizeof welcome);
    MUST(entitled || !welcomed);
    MUST(welcomed || !entitled || is_there);
    if (!welcomed) return false;
    while (!is_alive(hello.from)) sched_yield();  // the monitor answers first, and keeps the link then
    *made = monitor_.find_link(hello.from);
    return true;
  }
  bool is_alive(const Uuid &uuid) const {
    const LinkRef link = monitor_.find_link(uuid);
    return link && link->state.load() == LinkState::kAlive;
  }
  void leave(size_t peer) {
    if (!sockets_[peer].valid()) return;
    sockets_[peer].reset();
    while (links_[peer]->state.load() == LinkState::kAlive) sched_yield();
  }
  std::vector<int> descriptors(size_t count) const { return std::vector<int>(count, event_.get()); }

  void send(Input &input, int socket, uint64_t group_id) {
    if (socket < 0) return;
    const uint8_t how = input.byte();
    const std::string payload = input.bytes(input.take<uint16_t>() % (kMaxPayload + 76));
    const size_t fd_count = how / 4 % 5;
    const Envelope envelope{kWireMagic,
                            static_cast<MessageKind>(1 + how % 4),
                            static_cast<uint16_t>(fd_count),
                            group_id,
                            input.below(kOrdinals),
                            static_cast<uint32_t>(payload.size()),
                            0};
    std::string bytes = fuzz::as_bytes(envelope);
    if (how >= 128) spoil(input, &bytes);
    (void)fuzz::send_raw(socket, bytes + payload, descriptors(fd_count));
  }
  void take(const Uuid &from, uint64_t group_id, uint64_t ordinal) {
    Message message;
    if (monitor_.take(from, group_id, ordinal, Deadline::after_ms(0), never_, &message) != PHX_OK) return;
    MUST(message.envelope.group_id == group_id && message.envelope.ordinal == ordinal);
    MUST(message.fds.size() == message.envelope.fd_count && message.fds.size() <= kMaxFds);
    MUST(message.payload.size() == message.envelope.payload_bytes && message.payload.size() <= kMaxPayload);
    for (const Fd &fd : message.fds) MUST(fcntl(fd.get(), F_GETFD) == FD_CLOEXEC);
  }

  const PeerRecord self_;
  std::shared_ptr<Group> groups_[kGroups];
  const std::atomic<int32_t> never_{0};
  Monitor monitor_;
  Fd event_, honest_, sockets_[kPeers];
  LinkRef links_[kPeers];  // what the monitor made of the sockets
};

}  // namespace

extern "C" int LLVMFuzzerInitialize(int *, char ***) {
  fuzz::log_into_nothing();
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  fuzz::Input input(data, size);
  const int before = fuzz::open_descriptors();
  {
    Session session;
    for (int step = 0; step < 64 && !input.empty(); ++step) session.step(input);
    session.check_honest();
  }
  MUST(fuzz::open_descriptors() == before);
  return 0;
}
