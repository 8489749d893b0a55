// The carrier for tests inside one process (hub_carrier.h): it delivers what it is given, whatever it delays, loses
// connections at both ends, and notices what its caller does wrong.
#include "hub_carrier.h"

#include <poll.h>

#include <algorithm>
#include <memory>
#include <numeric>
#include <random>
#include <thread>

namespace {

const phx_carrier_ops &ops = *hub_carrier_ops();

// An endpoint and its connections.
struct End {
  explicit End(Hub *hub) {
    CHECK_OK(ops.open(hub, &self));
    address.resize(256);
    size_t bytes = address.size();
    CHECK_OK(ops.address(self, address.data(), &bytes));
    address.resize(bytes);
  }
  void *connect(const End &other) const {
    void *peer = nullptr;
    CHECK_OK(ops.connect(self, other.address.data(), other.address.size(), &peer));
    return peer;
  }
  void *self = nullptr;
  std::vector<char> address;
};

struct Receive {
  std::vector<char> data;
  void *transfer = nullptr;
  size_t size = 0;
  phx_status status = PHX_IN_PROGRESS;
};

// Tests a transfer until it has ended, or its connection is lost.
phx_status finish(void *self, void *transfer, size_t *bytes) {
  int32_t done = transfer == nullptr;
  while (done == 0) {
    ops.progress(self);
    const phx_status status = ops.test(self, transfer, &done, bytes);
    if (status != PHX_OK) return status;
  }
  return PHX_OK;
}

std::vector<char> message(uint64_t tag) {
  std::vector<char> data(tag % 7 == 0 ? 0 : 1 + tag * 37 % 3000);
  for (size_t i = 0; i < data.size(); ++i) data[i] = static_cast<char>(i * 31 + tag);
  return data;
}

// Two threads send each other messages with tags in different orders.
void exchange(uint64_t seed, uint32_t losses) {
  HubOptions options;
  options.seed = seed;
  options.losses_per_mille = losses;
  Hub hub(options);
  constexpr int kMessages = 40;
  std::atomic<int> failures{0}, lost{0};
  {
    End ends[2] = {End(&hub), End(&hub)};
    std::atomic<int> finished{0};
    const auto run = [&](int rank) {
      try {
        const End &end = ends[rank];
        void *const peer = end.connect(ends[1 - rank]);
        std::mt19937 random(static_cast<unsigned>(seed * 2) + static_cast<unsigned>(rank));
        std::vector<int> order(kMessages);
        std::iota(order.begin(), order.end(), 0);
        std::shuffle(order.begin(), order.end(), random);
        std::vector<std::unique_ptr<Receive>> receives;
        std::vector<std::vector<char>> sent;
        std::vector<void *> sends;
        bool dead = false;
        for (const int i : order) {
          receives.push_back(std::make_unique<Receive>());
          Receive &receive = *receives.back();
          receive.data.resize(4000);
          const uint64_t tag = static_cast<uint64_t>(i) + static_cast<uint64_t>(1 - rank) * 1000;
          receive.size = message(tag).size();
          CHECK_OK(ops.recv(end.self, peer, tag, receive.data.data(), receive.size, &receive.transfer));
          const uint64_t own = static_cast<uint64_t>(kMessages - 1 - i) + static_cast<uint64_t>(rank) * 1000;
          sent.push_back(message(own));
          void *transfer = nullptr;
          const phx_status status = ops.send(end.self, peer, own, sent.back().data(), sent.back().size(), &transfer);
          CHECK(status == PHX_OK || status == PHX_ERR_PEER_DEAD);
          if (transfer != nullptr) sends.push_back(transfer);
          dead = dead || status != PHX_OK;
          if (random() % 2 == 0) ops.progress(end.self);
        }
        for (size_t k = 0; k < receives.size(); ++k) {
          Receive &receive = *receives[k];
          size_t bytes = receive.size;
          receive.status = finish(end.self, receive.transfer, &bytes);
          CHECK(receive.status == PHX_OK || receive.status == PHX_ERR_PEER_DEAD);
          dead = dead || receive.status != PHX_OK;
          if (receive.status != PHX_OK) continue;
          const uint64_t tag = static_cast<uint64_t>(order[k]) + static_cast<uint64_t>(1 - rank) * 1000;
          CHECK(bytes == receive.size);
          receive.data.resize(bytes);
          CHECK(receive.data == message(tag));
        }
        for (void *transfer : sends) {
          const phx_status status = finish(end.self, transfer, nullptr);
          CHECK(status == PHX_OK || status == PHX_ERR_PEER_DEAD);
          dead = dead || status != PHX_OK;
        }
        if (dead) ++lost;
        CHECK(losses != 0 || !dead);
        ++finished;
        while (finished != 2) ops.progress(end.self);
        ops.disconnect(end.self, peer, seed % 2 == 0 ? 1 : 0);
        ops.close(end.self);
      } catch (const check::Failure &) {
        ++failures;
        ++finished;
      }
    };
    std::thread other(run, 1);
    run(0);
    other.join();
  }
  CHECK(failures == 0);
  if (losses == 0) CHECK(hub.messages == 2 * kMessages);
  if (losses == 0) CHECK(hub.connections_lost == 0);
  if (losses == 1000) CHECK(hub.connections_lost > 0 && lost > 0);
  hub.check();
}

// What a test reports of a transfer, from one thread.
struct Pair {
  explicit Pair(const HubOptions &options = {})
      : hub(options), a(&hub), b(&hub), to_b(a.connect(b)), to_a(b.connect(a)) {}
  void progress(int rounds = 30) const {
    for (int i = 0; i < rounds; ++i) {
      ops.progress(a.self);
      ops.progress(b.self);
    }
  }
  void end(int32_t flush = 0) {
    if (to_b != nullptr) ops.disconnect(a.self, to_b, flush);
    if (to_a != nullptr) ops.disconnect(b.self, to_a, flush);
    ops.close(a.self);
    ops.close(b.self);
  }
  Hub hub;
  End a, b;
  void *to_b, *to_a;
};

TEST(messages_reach_the_receives_of_their_tags) {
  for (uint64_t seed = 1; seed <= 200; ++seed) exchange(seed, 0);
}

TEST(lost_connections_end_everything_at_both_ends) {
  for (uint64_t seed = 1; seed <= 100; ++seed) exchange(seed, 1000);
}

TEST(some_connections_are_lost) {
  for (uint64_t seed = 1; seed <= 100; ++seed) exchange(seed, 300);
}

TEST(what_is_sent_before_a_flush_arrives) {
  int seen = 0, unseen = 0;  // whether the other end learns of the disconnection
  for (uint64_t seed = 1; seed <= 200; ++seed) {
    HubOptions options;
    options.seed = seed;
    Pair pair(options);
    char received[5] = {};
    void *send = nullptr, *receive = nullptr;
    CHECK_OK(ops.send(pair.a.self, pair.to_b, 7, "word", 5, &send));
    ops.disconnect(pair.a.self, pair.to_b, 1);
    if (send != nullptr) ops.cancel(pair.a.self, send);
    if (seed % 2 == 0) pair.progress();
    CHECK_OK(ops.recv(pair.b.self, pair.to_a, 7, received, sizeof received, &receive));
    size_t bytes = sizeof received;
    CHECK_OK(finish(pair.b.self, receive, &bytes));
    CHECK(bytes == 5 && std::string(received) == "word");
    CHECK_OK(ops.recv(pair.b.self, pair.to_a, 8, received, sizeof received, &receive));
    pair.progress();
    int32_t done = 0;
    const phx_status status = ops.test(pair.b.self, receive, &done, &bytes);
    CHECK(done == 0);
    ++(status == PHX_OK ? unseen : seen);
    if (status == PHX_OK) ops.cancel(pair.b.self, receive);
    pair.to_b = nullptr;
    pair.end();
    pair.hub.check();
  }
  CHECK(seen > 0 && unseen > 0);
}

TEST(a_message_that_is_too_long_is_refused) {
  Pair pair;
  char small[2];
  void *send = nullptr, *receive = nullptr;
  CHECK_OK(ops.recv(pair.b.self, pair.to_a, 7, small, sizeof small, &receive));
  CHECK_OK(ops.send(pair.a.self, pair.to_b, 7, "word", 5, &send));
  CHECK_OK(finish(pair.a.self, nullptr, nullptr));
  pair.progress();
  size_t bytes = 0;
  CHECK_FAILS(PHX_ERR_MISMATCH, "5 bytes came for a receive of 2", finish(pair.b.self, receive, &bytes));
  CHECK(bytes == 5);
  if (send != nullptr) CHECK_OK(finish(pair.a.self, send, nullptr));
  pair.end();
  pair.hub.check();
}

TEST(the_descriptor_becomes_readable) {
  Pair pair;
  int32_t fd = -1;
  while (ops.arm(pair.b.self, &fd) == 0) ops.progress(pair.b.self);
  pollfd ready{fd, POLLIN, 0};
  uint64_t left = 0;
  while (poll(&ready, 1, 0) == 1) CHECK(read(fd, &left, sizeof left) == sizeof left);
  void *send = nullptr;
  CHECK_OK(ops.send(pair.a.self, pair.to_b, 7, "word", 5, &send));
  CHECK(poll(&ready, 1, 0) == 1);
  CHECK(ops.arm(pair.b.self, &fd) == 0);
  if (send != nullptr) ops.disconnect(pair.a.self, pair.to_b, 0);
  if (send != nullptr) ops.cancel(pair.a.self, send);
  if (send != nullptr) pair.to_b = nullptr;
  pair.end();
  pair.hub.check();
}

// For misuses on purpose.
HubOptions quiet() {
  HubOptions options;
  options.prints = false;
  return options;
}

// Each of these is a misuse; the hub must count it. check() would fail, so the counter is reset by hand.
void expect_misuse(Hub *hub) {
  CHECK(hub->violations > 0);
  hub->violations = 0;
}

TEST(misuses_are_counted) {
  Pair pair(quiet());
  char data[8] = {};
  void *send = nullptr, *receive = nullptr, *second = nullptr;
  int32_t done = 0;

  CHECK_OK(ops.recv(pair.b.self, pair.to_a, 1, data, sizeof data, &receive));
  CHECK_OK(ops.recv(pair.b.self, pair.to_a, 1, data, sizeof data, &second));
  expect_misuse(&pair.hub);  // two receives with one tag
  ops.cancel(pair.b.self, receive);
  CHECK(ops.test(pair.b.self, receive, &done, nullptr) != PHX_OK);
  expect_misuse(&pair.hub);  // a test after a cancel
  ops.disconnect(pair.b.self, pair.to_a, 1);
  expect_misuse(&pair.hub);  // a flush with a receive under way
  ops.cancel(pair.b.self, second);

  for (uint64_t tag = 10; send == nullptr; ++tag) CHECK_OK(ops.send(pair.a.self, pair.to_b, tag, data, 8, &send));
  ops.cancel(pair.a.self, send);
  expect_misuse(&pair.hub);  // a send is cancelled while its peer is connected
  CHECK_OK(ops.recv(pair.a.self, pair.to_b, 1, data, sizeof data, &receive));
  ops.close(pair.a.self);
  expect_misuse(&pair.hub);  // transfers and peers are left
  ops.close(pair.b.self);
  pair.hub.check();
}

TEST(data_that_changes_under_way_is_noticed) {
  uint64_t noticed_sends = 0, noticed_receives = 0;
  for (uint64_t seed = 1; seed <= 40; ++seed) {
    HubOptions options = quiet();
    options.seed = seed;
    Pair pair(options);
    char source[8] = "source", target[8] = {};
    void *send = nullptr, *receive = nullptr;
    CHECK_OK(ops.send(pair.a.self, pair.to_b, 1, source, sizeof source, &send));
    source[0] = 'S';
    CHECK_OK(ops.recv(pair.b.self, pair.to_a, 1, target, sizeof target, &receive));
    pair.progress();
    noticed_sends += pair.hub.violations.exchange(0);
    if (send != nullptr) CHECK_OK(finish(pair.a.self, send, nullptr));
    if (receive != nullptr) CHECK_OK(finish(pair.b.self, receive, nullptr));
    CHECK_OK(ops.recv(pair.b.self, pair.to_a, 2, target, sizeof target, &receive));
    target[3] = static_cast<char>(target[3] + 1);
    CHECK_OK(ops.send(pair.a.self, pair.to_b, 2, source, sizeof source, &send));
    pair.progress();
    noticed_receives += pair.hub.violations.exchange(0);
    if (send != nullptr) CHECK_OK(finish(pair.a.self, send, nullptr));
    CHECK_OK(finish(pair.b.self, receive, nullptr));
    pair.end();
    pair.hub.check();
  }
  CHECK(noticed_sends > 0 && noticed_receives > 0);
}

TEST(two_functions_at_a_time_are_noticed) {
  Pair pair(quiet());
  std::atomic<bool> stop{false};
  std::thread other([&] {
    while (!stop) ops.progress(pair.a.self);
  });
  while (pair.hub.violations == 0) ops.progress(pair.a.self);
  stop = true;
  other.join();
  pair.hub.violations = 0;
  pair.end();
  pair.hub.check();
}

}  // namespace

int main(int argc, char **argv) { return check::run_all(argc, argv); }
