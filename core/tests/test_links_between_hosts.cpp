// Connections between ranks of different hosts. Worlds with different host ids count as ranks of different hosts.
#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include <cstdlib>
#include <cstring>
#include <numeric>

#include "base/wait.h"
#include "pipe.h"
#include "ranks.h"
#include "world/host_address.h"
#include "world/host_handshake.h"
#include "world/link.h"
#include "world/world.h"

namespace {

using phx::Deadline;
using phx::Envelope;
using phx::Fd;
using phx::HostAddress;
using phx::LinkRef;
using phx::LinkState;
using phx::Message;
using phx::MessageKind;
using phx::PeerRecord;
using phx::Uuid;
using phx::World;

constexpr int64_t kLongMs = 60000;
constexpr uint64_t kGroup = 7;
const std::atomic<int32_t> kNever{0};

phx_status nothing() { return PHX_OK; }

void set_interface(const char *name) { CHECK(setenv("PHALANX_SOCKET_IFNAME", name, 1) == 0); }

// A rank of a host of its own, which listens on the loopback device.
class Rank {
 public:
  explicit Rank(int rank) {
    set_interface("lo");
    ranks::Options options;
    options.host_id = static_cast<uint64_t>(rank) + 1;
    CHECK_OK(phx_store_memory(&store_));
    handle_ = ranks::make_world(rank, 2, store_, options);
    HostAddress address{};
    CHECK_OK(world().listen_for_hosts(&address));
    CHECK(address.family == AF_INET && address.port != 0);
  }
  ~Rank() {
    phx_world_release(handle_);
    phx_store_release(store_);
  }
  World &world() const { return *handle_->ptr; }
  // What this rank would publish in the store.
  PeerRecord record() const {
    PeerRecord record = world().record();
    record.address = world().address();
    return record;
  }
  phx_status connect(const PeerRecord &peer, int64_t timeout_ms, LinkRef *out) const {
    const Deadline deadline = Deadline::after_ms(timeout_ms);
    const phx_status status = world().begin_connecting(peer);
    return status != PHX_OK ? status : world().connect(peer, deadline, nothing, out);
  }
  void finalize() const { world().finalize(); }

 private:
  phx_store *store_;
  phx_world *handle_;
};

// The links of two ranks to each other.
struct Pair {
  Rank a{0}, b{1};
  LinkRef to_b, to_a;
  Pair() {
    const Deadline deadline = Deadline::after_ms(kLongMs);
    CHECK_OK(a.world().begin_connecting(b.record()));
    CHECK_OK(b.world().begin_connecting(a.record()));
    CHECK_OK(a.world().connect(b.record(), deadline, nothing, &to_b));
    CHECK_OK(b.world().connect(a.record(), deadline, nothing, &to_a));
  }
};

Envelope envelope_of(uint64_t ordinal, size_t payload_bytes) {
  return {phx::kWireMagic, MessageKind::kExchange, 0, kGroup, ordinal, static_cast<uint32_t>(payload_bytes), 0};
}
std::string payload_of(uint64_t ordinal, size_t size) {
  std::string payload(size, '\0');
  for (size_t i = 0; i < size; ++i) payload[i] = static_cast<char>(ordinal * 31 + i * 7 + i / 256);
  return payload;
}
void send(const LinkRef &link, uint64_t ordinal, size_t size) {
  const std::string payload = payload_of(ordinal, size);
  for (;;) {
    int error = 0;
    const phx::Sent sent = phx::try_send(*link, envelope_of(ordinal, size), payload.data(), nullptr, &error);
    if (sent == phx::Sent::kDone) return;
    CHECK(sent == phx::Sent::kFull);
    phx::await_room(*link, sent, Deadline::after_ms(kLongMs));
  }
}
void receive(const Rank &rank, const LinkRef &link, uint64_t ordinal, size_t size) {
  Message message;
  CHECK_OK(rank.world().monitor().take(link->uuid, kGroup, ordinal, Deadline::after_ms(kLongMs), kNever, &message));
  CHECK(message.payload == payload_of(ordinal, size));
}

void await_state(const LinkRef &link, LinkState state) {
  CHECK(phx::Backoff(100, 1000).until(Deadline::after_ms(kLongMs), [&] { return link->state.load() == state; }));
}

// A listening TCP socket on the loopback device.
Fd listen_somewhere(HostAddress *address) {
  *address = {AF_INET, 0, {127, 0, 0, 1}};
  Fd listener;
  CHECK_OK(phx::listen_at("test", address, &listener));
  return listener;
}
Fd connect_to(const HostAddress &address) {
  const phx::store::Endpoint endpoint = phx::endpoint_of(address);
  Fd fd(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  CHECK(connect(fd.get(), reinterpret_cast<const sockaddr *>(&endpoint.address), endpoint.length) == 0);
  return fd;
}
Fd accept_from(const Fd &listener) {
  pollfd entry{listener.get(), POLLIN, 0};
  CHECK(poll(&entry, 1, static_cast<int>(kLongMs)) == 1);
  Fd fd(accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
  CHECK(fd.valid());
  return fd;
}
// A record of a rank of another host than `self`, at that address. Its uuid makes `self` the dialer.
PeerRecord stranger_at(const HostAddress &address) {
  PeerRecord record{};
  std::memcpy(record.magic, phx::kPeerMagic, sizeof record.magic);
  record.rank = 5;
  record.pid = 4123;
  record.host_id = 99;
  record.host_given = 1;
  record.uuid = {0, 1};
  record.token = {3, 4};
  std::strcpy(record.hostname, "nodeb");
  record.address = address;
  return record;
}

}  // namespace

TEST(two_ranks_of_different_hosts_connect_over_tcp) {
  const Pair pair;
  CHECK(phx::on_another_host(pair.a.record(), pair.b.record()));
  char name[64];
  phx::read_hostname(&name);
  for (const LinkRef &link : {pair.to_a, pair.to_b}) {
    CHECK(link->remote && link->hostname == name && link->pid == getpid());
    CHECK(link->process_state_text() == "on host " + std::string(name));
    CHECK(!link->pidfd.valid() && !link->process_has_ended());
  }
  CHECK(pair.to_b->rank == 1 && pair.to_a->rank == 0);
  CHECK(pair.to_b->uuid == pair.b.record().uuid);
}

TEST(messages_of_all_sizes_arrive_in_order) {
  const Pair pair;
  const size_t sizes[] = {0, 1, 7, 8, 100, 1023, 1024, 1025, 4095, phx::kMaxPayload};
  uint64_t ordinal = 0;
  for (int round = 0; round < 20; ++round)
    for (const size_t size : sizes) send(pair.to_b, ++ordinal, size);
  const uint64_t last = ordinal;
  send(pair.to_a, 1, 33);
  ordinal = 0;
  for (int round = 0; round < 20; ++round)
    for (const size_t size : sizes) receive(pair.b, pair.to_a, ++ordinal, size);
  CHECK(ordinal == last);
  receive(pair.a, pair.to_b, 1, 33);
}

TEST(a_message_that_the_connection_takes_in_parts_arrives_whole_and_later_ones_wait_behind_it) {
  const Rank rank(0);
  phx::Monitor &monitor = rank.world().monitor();
  HostAddress address;
  const Fd listener = listen_somewhere(&address);
  Fd socket = connect_to(address);
  const Fd other = accept_from(listener);
  const int small = 1;  // the kernel makes it the least that it allows
  CHECK(setsockopt(socket.get(), SOL_SOCKET, SO_SNDBUF, &small, sizeof small) == 0);
  const auto link = std::make_shared<phx::Link>(Uuid{0, 77}, 5, 4123, std::move(socket), "nodeb");
  monitor.adopt(link);

  size_t sizes[3000], count = 0, partial = 0;
  const auto next = [&](size_t size) {
    CHECK(count < 3000);
    sizes[count++] = size;
    return envelope_of(count, size);
  };
  for (size_t size = 1; partial == 0; size = size * 5 % phx::kMaxPayload + 1) {
    const Envelope envelope = next(size);
    const std::string payload = payload_of(count, size);
    int error = 0;
    const phx::Sent sent = phx::try_send(*link, envelope, payload.data(), nullptr, &error);
    if (sent != phx::Sent::kDone) {
      CHECK(sent == phx::Sent::kFull);
      --count;
    }
    const std::lock_guard<std::mutex> lock(link->send_mutex);
    partial = link->outbox.size();
  }
  CHECK(partial == 1);
  int error = 0;
  CHECK(phx::try_send(*link, envelope_of(count + 1, 0), nullptr, nullptr, &error) == phx::Sent::kFull);
  for (int i = 0; i < 100; ++i) {
    const Envelope envelope = next(static_cast<size_t>(i));
    monitor.post(link, envelope, payload_of(count, static_cast<size_t>(i)).data());
  }

  for (size_t i = 1; i <= count; ++i) {
    Envelope envelope;
    CHECK(recv(other.get(), &envelope, sizeof envelope, MSG_WAITALL) == static_cast<ssize_t>(sizeof envelope));
    CHECK(envelope.magic == phx::kWireMagic && envelope.ordinal == i && envelope.payload_bytes == sizes[i - 1]);
    std::string payload(sizes[i - 1], '\0');
    if (!payload.empty())
      CHECK(recv(other.get(), &payload[0], payload.size(), MSG_WAITALL) == static_cast<ssize_t>(payload.size()));
    CHECK(payload == payload_of(i, payload.size()));
  }
}

TEST(a_message_that_arrives_byte_by_byte_is_read_and_a_malformed_one_ends_the_connection) {
  for (const int wrong : {0, 1, 2, 3}) {
    const Rank rank(0);
    HostAddress address;
    const Fd listener = listen_somewhere(&address);
    Fd socket = connect_to(address);
    const Fd other = accept_from(listener);
    const auto link = std::make_shared<phx::Link>(Uuid{0, 77}, 5, 4123, std::move(socket), "nodeb");
    CHECK(fcntl(link->socket.get(), F_SETFL, O_NONBLOCK) == 0);
    rank.world().monitor().adopt(link);
    const Envelope envelope = envelope_of(1, 9);
    const std::string bytes =
        std::string(reinterpret_cast<const char *>(&envelope), sizeof envelope) + payload_of(1, 9);
    phx::tune_host_connection(other.get());
    for (const char byte : bytes) CHECK(::send(other.get(), &byte, 1, MSG_NOSIGNAL) == 1);
    receive(rank, link, 1, 9);
    Envelope bad = envelope_of(2, 9);
    if (wrong == 0) bad.magic += 1;
    if (wrong == 1) bad.payload_bytes = phx::kMaxPayload + 1;
    if (wrong == 2) bad.payload_bytes = UINT32_MAX;
    if (wrong == 3) bad.fd_count = 1;
    CHECK(::send(other.get(), &bad, sizeof bad, MSG_NOSIGNAL) == sizeof bad);
    await_state(link, LinkState::kDead);
    CHECK(link->ending == "sent a malformed message, so this rank closed its connection");
  }
}

TEST(a_rank_that_finalizes_says_goodbye) {
  const Pair pair;
  send(pair.to_b, 1, 100);
  pair.a.finalize();
  await_state(pair.to_a, LinkState::kLeft);
  receive(pair.b, pair.to_a, 1, 100);
}

TEST(a_process_that_is_killed_is_seen_though_its_forked_child_lives_on) {
  Pipe theirs, ours, connected;
  const pid_t pid = fork();
  CHECK(pid >= 0);
  if (pid == 0) {
    try {
      const Rank rank(1);
      theirs.send(rank.record());
      LinkRef link;
      CHECK_OK(rank.connect(ours.receive<PeerRecord>(), kLongMs, &link));
      const pid_t child = fork();
      if (child != 0) connected.send(child);
      for (;;) pause();
    } catch (const std::exception &) {
    }
    _exit(1);
  }
  const Rank rank(0);
  ours.send(rank.record());
  LinkRef link;
  CHECK_OK(rank.connect(theirs.receive<PeerRecord>(), kLongMs, &link));
  CHECK(link->pid == pid);
  const pid_t grandchild = connected.receive<pid_t>();
  kill(pid, SIGKILL);
  CHECK(waitpid(pid, nullptr, 0) == pid);
  await_state(link, LinkState::kDead);
  kill(grandchild, SIGKILL);
  CHECK(link->ending.find("is gone: the connection to host " + link->hostname + " was lost (") == 0);
  CHECK(!link->process_has_ended());
  int error = 0;
  const phx::Sent sent = phx::try_send(*link, envelope_of(1, 0), nullptr, nullptr, &error);
  CHECK(sent == phx::Sent::kFailed);
  CHECK_FAILS(PHX_ERR_PEER_DEAD, "was lost", phx::send_failed(*link, error));
}

// ---- connections that do not come about

TEST(a_peer_that_does_not_answer_is_named_at_the_deadline) {
  const Rank rank(0);
  HostAddress address;
  const Fd listener = listen_somewhere(&address);  // the kernel accepts; the process does not
  LinkRef link;
  const std::string text = "rank 5 (pid 4123, on host nodeb) did not connect: " + phx::text_of(address) +
                           " accepts connections, but its process does not answer";
  CHECK_FAILS(PHX_ERR_TIMEOUT, text.c_str(), rank.connect(stranger_at(address), 300, &link));
  CHECK_FAILS(PHX_ERR_TIMEOUT, text.c_str(), rank.connect(stranger_at(address), 300, &link));  // it goes on
}

TEST(a_host_that_drops_what_is_sent_is_told_apart) {
  const Rank rank(0);
  HostAddress address;
  const Fd listener = listen_somewhere(&address);
  CHECK(listen(listener.get(), 0) == 0);
  const Fd first = connect_to(address);  // fills the queue, so the kernel drops each SYN after it
  LinkRef link;
  const std::string text = "rank 5 (pid 4123, on host nodeb) did not connect: " + phx::text_of(address) +
                           " does not answer. See whether that host runs";
  CHECK_FAILS(PHX_ERR_TIMEOUT, text.c_str(), rank.connect(stranger_at(address), 300, &link));
}

TEST(where_nothing_listens_any_more_the_peer_counts_as_dead) {
  const Rank rank(0);
  HostAddress address;
  listen_somewhere(&address);
  LinkRef link;
  CHECK_FAILS(PHX_ERR_PEER_DEAD, "rank 5 (pid 4123, on host nodeb) died, or its world was finalized",
              rank.connect(stranger_at(address), kLongMs, &link));
}

TEST(a_peer_that_does_not_dial_is_named_at_the_deadline) {
  const Rank rank(0);
  PeerRecord peer = stranger_at({AF_INET, 1, {127, 0, 0, 1}});
  peer.uuid = {UINT64_MAX, UINT64_MAX};
  LinkRef link;
  const std::string text =
      "rank 5 (pid 4123, on host nodeb) did not connect: this rank listens at " + phx::text_of(rank.world().address());
  CHECK_FAILS(PHX_ERR_TIMEOUT, text.c_str(), rank.connect(peer, 100, &link));
}

TEST(a_peer_that_ended_before_it_dialed_counts_as_dead) {
  const Rank rank(0);
  HostAddress address;
  Fd listener = listen_somewhere(&address);
  PeerRecord peer = stranger_at(address);
  peer.uuid = {UINT64_MAX, UINT64_MAX};
  LinkRef link;
  // While it listens, it may still come.
  CHECK_FAILS(PHX_ERR_TIMEOUT, "did not connect", rank.connect(peer, 2000, &link));
  listener.reset();
  CHECK_FAILS(PHX_ERR_PEER_DEAD, "rank 5 (pid 4123, on host nodeb) died, or its world was finalized",
              rank.connect(peer, kLongMs, &link));
}

TEST(a_peer_without_an_address_is_refused) {
  const Rank rank(0);
  LinkRef link;
  CHECK_FAILS(PHX_ERR_UNSUPPORTED, "rank 5 (pid 4123, on host nodeb) does not accept connections from other hosts",
              rank.connect(stranger_at({}), kLongMs, &link));
}

TEST(a_listener_that_closes_each_connection_is_given_up_after_some) {
  const Rank rank(0);
  HostAddress address;
  Fd listener = listen_somewhere(&address);
  std::atomic<bool> over{false};
  std::thread closes([&] {
    while (!over.load()) {
      pollfd entry{listener.get(), POLLIN, 0};
      if (poll(&entry, 1, 10) == 1) Fd(accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC)).reset();
    }
  });
  LinkRef link;
  const phx_status status = rank.connect(stranger_at(address), kLongMs, &link);
  over.store(true);
  closes.join();
  CHECK_FAILS(PHX_ERR_PERMISSION, "rank 5 (pid 4123, on host nodeb) refused the handshake", status);
}

// ---- strangers

TEST(a_listener_that_does_not_know_the_token_of_the_record_is_refused) {
  const Rank a(0), b(1);
  const bool a_dials = b.record().uuid < a.record().uuid;
  const Rank &dialer = a_dials ? a : b, &listener = a_dials ? b : a;
  PeerRecord wrong = listener.record();
  wrong.token.low ^= 1;
  LinkRef link;
  CHECK_FAILS(PHX_ERR_PERMISSION, "does not prove that it is rank", dialer.connect(wrong, kLongMs, &link));
  CHECK(listener.world().monitor().find_link(dialer.record().uuid) == nullptr);
  CHECK_OK(dialer.connect(listener.record(), kLongMs, &link));  // the failure was reported, so this begins anew
}

TEST(a_dialer_that_does_not_know_the_token_is_refused) {
  const Rank rank(0);
  const PeerRecord record = rank.record();
  for (const bool knows : {false, true}) {
    const Fd socket = connect_to(record.address);
    phx::HostHello hello{};
    hello.magic = phx::kWireMagic;
    hello.from = {0, 5};
    hello.to = record.uuid;
    hello.pid = 4123;
    std::memset(hello.hostname, 'n', sizeof hello.hostname);  // without an end
    CHECK(::send(socket.get(), &hello, sizeof hello, MSG_NOSIGNAL) == sizeof hello);
    hello.hostname[sizeof hello.hostname - 1] = '\0';
    phx::HostChallenge challenge;
    CHECK(recv(socket.get(), &challenge, sizeof challenge, MSG_WAITALL) == sizeof challenge);
    // The listener proves itself, but its proof is none of the dialer.
    CHECK(challenge.proof == make_host_proof(phx::HostSide::kListener, record.token, hello, challenge.nonce));
    phx::HostProof proof{challenge.proof};
    if (knows) proof.proof = make_host_proof(phx::HostSide::kDialer, record.token, hello, challenge.nonce);
    CHECK(::send(socket.get(), &proof, sizeof proof, MSG_NOSIGNAL) == sizeof proof);
    phx::Welcome welcome{};
    const ssize_t got = recv(socket.get(), &welcome, sizeof welcome, MSG_WAITALL);
    CHECK(knows ? got == sizeof welcome && welcome.from == record.uuid : got <= 0);
    if (!knows) CHECK(rank.world().monitor().find_link(hello.from) == nullptr);
  }
}

TEST(strangers_hold_up_nobody) {
  const Rank a(0), b(1);
  std::vector<Fd> strangers;
  for (const Rank *rank : {&a, &b}) {
    const PeerRecord record = rank->record();
    phx::HostHello hello{};
    hello.magic = phx::kWireMagic;
    hello.from = {0, 5};
    hello.to = record.uuid;
    for (int i = 0; i < 300; ++i) {
      strangers.push_back(connect_to(record.address));
      const int fd = strangers.back().get();
      const std::string garbage(static_cast<size_t>(i) * 10, 'g');
      if (i % 4 == 1) (void)!::send(fd, garbage.data(), garbage.size(), MSG_NOSIGNAL);
      if (i % 4 == 2) (void)!::send(fd, &hello, sizeof hello / 2, MSG_NOSIGNAL);
      if (i % 4 == 3) (void)!::send(fd, &hello, sizeof hello, MSG_NOSIGNAL);  // and no proof
    }
  }
  // A rank of the host of `a` finds it over the other listener.
  ranks::Options same_host;
  same_host.host_id = 1;
  phx_world *const near_a = ranks::make_world(0, 1, nullptr, same_host);
  for (const bool near : {true, false}) {
    World &other = near ? *near_a->ptr : b.world();
    PeerRecord record = other.record();
    record.address = other.address();
    LinkRef to_other, to_a;
    const Deadline deadline = Deadline::after_ms(kLongMs);
    CHECK_OK(a.world().begin_connecting(record));
    CHECK_OK(other.begin_connecting(a.record()));
    CHECK_OK(a.world().connect(record, deadline, nothing, &to_other));
    CHECK_OK(other.connect(a.record(), deadline, nothing, &to_a));
    CHECK(to_other->remote == !near && to_a->remote == !near);
  }
  phx_world_release(near_a);
}

// ---- where a rank listens

TEST(a_rank_listens_at_one_address_whichever_thread_asks_first) {
  set_interface("lo");
  phx_world *const world = ranks::make_world(0, 1, nullptr);
  CHECK(world->ptr->address().family == 0);
  std::vector<HostAddress> addresses(8);
  std::vector<std::thread> threads;
  for (HostAddress &address : addresses)
    threads.emplace_back([&] {
      if (world->ptr->listen_for_hosts(&address) != PHX_OK) address = {};
    });
  for (std::thread &thread : threads) thread.join();
  const HostAddress own = world->ptr->address();
  CHECK(own.family == AF_INET && own.port != 0 && own.ip[0] == 127);
  for (const HostAddress &address : addresses) CHECK(std::memcmp(&address, &own, sizeof own) == 0);
  phx_world_release(world);
}

TEST(a_variable_that_names_no_interface_is_an_error_that_lists_those_that_exist) {
  set_interface("phxnone0, phxnone1");
  HostAddress address{};
  CHECK_FAILS(PHX_ERR_INVALID, "PHALANX_SOCKET_IFNAME is 'phxnone0, phxnone1'",
              phx::choose_address("group_create", "", &address));
  CHECK(std::strstr(phx_last_error(), "there are: ") != nullptr && std::strstr(phx_last_error(), "lo") != nullptr);
  set_interface("phxnone0, lo");
  CHECK_OK(phx::choose_address("group_create", "", &address));
  CHECK(address.ip[0] == 127);
  set_interface("");
  CHECK(setenv("GLOO_SOCKET_IFNAME", "phxnone2", 1) == 0);
  CHECK_FAILS(PHX_ERR_INVALID, "GLOO_SOCKET_IFNAME is 'phxnone2'", phx::choose_address("group_create", "", &address));
  CHECK(unsetenv("GLOO_SOCKET_IFNAME") == 0);
}

TEST(without_a_variable_some_address_is_found_whatever_the_hint) {
  set_interface("");
  HostAddress without{}, address{};
  CHECK_OK(phx::choose_address("group_create", "", &without));
  for (const char *hint : {"127.0.0.1", "::1", "localhost", "no-such-host.invalid"}) {
    CHECK_OK(phx::choose_address("group_create", hint, &address));
    CHECK(address.family != 0);
    // An address of the loopback device counts only if there is no other.
    CHECK(without.ip[0] == 127 || std::memcmp(&address, &without, sizeof address) == 0);
  }
}

TEST(a_client_of_a_tcp_store_knows_its_server_also_through_a_prefix) {
  uint16_t port = 0;
  phx_store *server = nullptr, *client = nullptr, *view = nullptr, *memory = nullptr;
  CHECK_OK(phx_store_tcp_serve("127.0.0.1", "token", 5, &port, &server));
  CHECK_OK(phx_store_tcp_connect("127.0.0.1", port, "token", 5, kLongMs, &client));
  CHECK_OK(phx_store_prefix(client, "p/", &view));
  CHECK_OK(phx_store_memory(&memory));
  CHECK(server->server() == "127.0.0.1" && client->server() == "127.0.0.1" && view->server() == "127.0.0.1");
  CHECK(memory->server().empty());
  for (phx_store *store : {view, client, server, memory}) phx_store_release(store);
}

int main(int argc, char **argv) { return check::run_all(argc, argv); }
