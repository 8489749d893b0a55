// The carrier that ships, through its table: two endpoints of one process, and two processes. Skipped where no UCX is
// found. The tests that fork come first, because UCX does not survive a fork.
#include <dirent.h>
#include <poll.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <memory>
#include <numeric>
#include <random>
#include <thread>

#include "base/error.h"
#include "base/sanitizers.h"
#include "check.h"
#include "net/ucx.h"
#include "phalanx/carrier.h"
#include "pipe.h"

namespace {

using Clock = std::chrono::steady_clock;

const phx_carrier_ops &ops() {
  const phx_carrier_ops *const found = phx::ucx_carrier();
  if (found == nullptr) check::skip(phx::last_error().text);
  return *found;
}

struct End {
  End() {
    CHECK_OK(ops().open(nullptr, &self));
    address.resize(4096);
    size_t bytes = address.size();
    CHECK_OK(ops().address(self, address.data(), &bytes));
    address.resize(bytes);
  }
  ~End() {
    if (self != nullptr) close();
  }
  End(const End &) = delete;
  End &operator=(const End &) = delete;
  void close() {
    ops().close(self);
    self = nullptr;
  }
  void *connect(const std::vector<char> &to) const {
    void *peer = nullptr;
    CHECK_OK(ops().connect(self, to.data(), to.size(), &peer));
    return peer;
  }
  void *self = nullptr;
  std::vector<char> address;
};

// Makes all endpoints progress until a transfer of the first has ended. Fails after 20 s.
phx_status finish(const std::vector<const End *> &ends, void *transfer, size_t *bytes = nullptr) {
  const auto limit = Clock::now() + std::chrono::seconds(20);
  int32_t done = transfer == nullptr;
  while (done == 0) {
    for (const End *end : ends) ops().progress(end->self);
    const phx_status status = ops().test(ends[0]->self, transfer, &done, bytes);
    if (status != PHX_OK) return status;
    CHECK(Clock::now() < limit);
  }
  return PHX_OK;
}
void progress(const std::vector<const End *> &ends, int ms) {
  const auto limit = Clock::now() + std::chrono::milliseconds(ms);
  while (Clock::now() < limit)
    for (const End *end : ends) ops().progress(end->self);
}

std::vector<char> pattern(size_t bytes, uint64_t seed) {
  std::vector<char> data(bytes);
  for (size_t i = 0; i < bytes; ++i) data[i] = static_cast<char>((i * 131 + seed * 7) >> (i % 3));
  return data;
}
const std::vector<size_t> kSizes = {0, 1, 100, 8191, 8192, 8300, 65536, 300000, 1 << 20, 16 << 20};

// Two endpoints of this process that are connected.
struct Pair {
  Pair() : to_b(a.connect(b.address)), to_a(b.connect(a.address)) {}
  void *send(uint64_t tag, const std::vector<char> &data) {
    void *transfer = nullptr;
    CHECK_OK(ops().send(a.self, to_b, tag, data.data(), data.size(), &transfer));
    return transfer;
  }
  void *receive(uint64_t tag, std::vector<char> *data) {
    void *transfer = nullptr;
    CHECK_OK(ops().recv(b.self, to_a, tag, data->data(), data->size(), &transfer));
    CHECK(transfer != nullptr);
    return transfer;
  }
  void disconnect() {
    ops().disconnect(a.self, to_b, 0);
    ops().disconnect(b.self, to_a, 0);
  }
  End a, b;
  std::vector<const End *> from_a{&a, &b}, from_b{&b, &a};
  void *to_b, *to_a;
};

// Runs both bodies in processes of their own. They give each other their addresses.
struct Child {
  End end;
  void *peer;
};
void with_children(const std::function<void(const Child &)> &first, const std::function<void(const Child &)> &second,
                   int second_ends_by = 0) {
  struct Address {
    size_t bytes;
    char data[4096];
  };
  const Pipe addresses[2];
  pid_t children[2];
  for (int rank = 0; rank < 2; ++rank) {
    children[rank] = fork();
    CHECK(children[rank] >= 0);
    if (children[rank] != 0) continue;
    int code = 1;
    try {
      const auto child = std::make_unique<Child>();
      Address address{};
      address.bytes = child->end.address.size();
      std::copy(child->end.address.begin(), child->end.address.end(), address.data);
      addresses[rank].send(address);
      const auto other = addresses[1 - rank].receive<Address>();
      child->peer = child->end.connect(std::vector<char>(other.data, other.data + other.bytes));
      (rank == 0 ? first : second)(*child);
      ops().disconnect(child->end.self, child->peer, 1);
      code = 0;
    } catch (const check::Skipped &) {
      code = 77;
    } catch (const std::exception &) {
    }
    std::_Exit(code);
  }
  int status[2];
  for (int rank = 0; rank < 2; ++rank) CHECK(waitpid(children[rank], &status[rank], 0) == children[rank]);
  if (WIFEXITED(status[0]) && WEXITSTATUS(status[0]) == 77) check::skip("there is no usable UCX");
  CHECK(WIFEXITED(status[0]) && WEXITSTATUS(status[0]) == 0);
  if (second_ends_by == 0)
    CHECK(WIFEXITED(status[1]) && WEXITSTATUS(status[1]) == 0);
  else
    CHECK(WIFSIGNALED(status[1]) && WTERMSIG(status[1]) == second_ends_by);
}
void in_child(const std::function<void()> &body) {
  const pid_t child = fork();
  CHECK(child >= 0);
  if (child == 0) {
    int code = 1;
    try {
      body();
      code = 0;
    } catch (const check::Skipped &) {
      code = 77;
    } catch (const std::exception &) {
    }
    std::_Exit(code);
  }
  int status = 0;
  CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status));
  if (WEXITSTATUS(status) == 77) check::skip("there is no usable UCX");
  CHECK(WEXITSTATUS(status) == 0);
}

TEST(a_missing_library_is_an_error_that_says_what_to_do) {
  in_child([] {
    setenv("PHALANX_UCX", "/nowhere/libucp.so.0", 1);
    CHECK(phx::ucx_carrier() == nullptr);
    CHECK(phx::last_error().status == PHX_ERR_UNSUPPORTED);
    CHECK(std::string(phx::last_error().operation) == "group_create");
    const std::string text = phx::last_error().text;
    CHECK(text.find("/nowhere/libucp.so.0") != std::string::npos && text.find("PHALANX_UCX") != std::string::npos);
    const phx::UcxFacts facts = phx::ucx_facts();
    CHECK(facts.path.empty() && facts.problem == text);
  });
  in_child([] {
    setenv("PHALANX_UCX", "libm.so.6", 1);  // a library, but another one
    CHECK(phx::ucx_carrier() == nullptr);
    CHECK(std::strstr(phx::last_error().text, "libm.so.6 has no ucp_get_version") != nullptr);
  });
}

TEST(signal_handlers_are_left_alone) {
  in_child([] {
    struct sigaction before[32]{};
    for (int number = 1; number < 32; ++number) sigaction(number, nullptr, &before[number]);
    const End end;
    for (int number = 1; number < 32; ++number) {
      struct sigaction after {};
      sigaction(number, nullptr, &after);
      CHECK(after.sa_handler == before[number].sa_handler);
    }
  });
}

TEST(two_processes_exchange_messages) {
  const auto body = [](uint64_t own, const Child &child) {
    for (size_t i = 0; i < kSizes.size(); ++i) {
      const std::vector<char> data = pattern(kSizes[i], own + i), expected = pattern(kSizes[i], 1000 - own + i);
      std::vector<char> received(kSizes[i]);
      void *send = nullptr, *receive = nullptr;
      const auto post = [&] {
        CHECK_OK(ops().recv(child.end.self, child.peer, 1000 - own + i, received.data(), received.size(), &receive));
      };
      if (i % 2 == 0) post();
      CHECK_OK(ops().send(child.end.self, child.peer, own + i, data.data(), data.size(), &send));
      if (i % 2 != 0) post();
      size_t bytes = 0;
      CHECK_OK(finish({&child.end}, receive, &bytes));
      CHECK(bytes == kSizes[i] && received == expected);
      CHECK_OK(finish({&child.end}, send));
    }
  };
  with_children([&](const Child &child) { body(0, child); }, [&](const Child &child) { body(1000, child); });
}

TEST(a_killed_peer_is_reported) {
  for (const size_t bytes : {size_t{100}, size_t{16} << 20}) {
    const auto first = [&](const Child &child) {
      std::vector<char> received(bytes), data(bytes);
      void *receive = nullptr, *send = nullptr, *other = nullptr;
      CHECK_OK(ops().recv(child.end.self, child.peer, 1, received.data(), 1, &other));
      CHECK_OK(finish({&child.end}, other));
      CHECK_OK(ops().recv(child.end.self, child.peer, 2, received.data(), received.size(), &receive));
      const phx_status status = ops().send(child.end.self, child.peer, 3, data.data(), data.size(), &send);
      CHECK(status == PHX_OK || status == PHX_ERR_PEER_DEAD);
      CHECK_FAILS(PHX_ERR_PEER_DEAD, "UCX: ", finish({&child.end}, receive));
      if (send != nullptr && finish({&child.end}, send) != PHX_OK) CHECK(phx::last_error().status == PHX_ERR_PEER_DEAD);
      CHECK_FAILS(PHX_ERR_PEER_DEAD, "UCX: ", ops().send(child.end.self, child.peer, 4, data.data(), 1, &send));
    };
    const auto second = [&](const Child &child) {
      std::vector<char> data(bytes);
      void *send = nullptr;
      CHECK_OK(ops().send(child.end.self, child.peer, 1, data.data(), 1, &send));
      CHECK_OK(finish({&child.end}, send));
      CHECK_OK(ops().send(child.end.self, child.peer, 5, data.data(), data.size(), &send));
      progress({&child.end}, 100);
      raise(SIGKILL);
    };
    with_children(first, second, SIGKILL);
  }
}

TEST(messages_of_every_size_before_and_after_the_receive) {
  Pair pair;
  uint64_t tag = 0;
  for (const size_t bytes : kSizes) {
    for (const bool posted_first : {true, false}) {
      ++tag;
      const std::vector<char> data = pattern(bytes, tag);
      std::vector<char> received(bytes + 1);
      void *receive = posted_first ? pair.receive(tag, &received) : nullptr;
      void *const send = pair.send(tag, data);
      if (!posted_first) {
        progress(pair.from_a, 5);
        receive = pair.receive(tag, &received);
      }
      size_t came = 99;
      CHECK_OK(finish(pair.from_b, receive, &came));
      CHECK_OK(finish(pair.from_a, send));
      CHECK(came == bytes);
      received.resize(came);
      CHECK(received == data);
    }
  }
  pair.disconnect();
}

TEST(many_tags_are_under_way) {
  constexpr int kCount = 400;
  Pair pair;
  std::mt19937 random(5);
  std::vector<int> order(kCount);
  std::iota(order.begin(), order.end(), 0);
  std::vector<std::vector<char>> data(kCount), received(kCount);
  std::vector<void *> sends, receives(kCount);
  const auto tag = [](int i) { return ~uint64_t{0} - static_cast<uint64_t>(i) * 0x100000001ull; };  // all bits count
  for (int i = 0; i < kCount; ++i) {
    data[i] = pattern(i % 50 == 0 ? 200000 : i * 37 % 5000, i);
    received[i].resize(data[i].size());
  }
  std::shuffle(order.begin(), order.end(), random);
  for (int k = 0; k < kCount / 2; ++k) receives[order[k]] = pair.receive(tag(order[k]), &received[order[k]]);
  for (int i = 0; i < kCount; ++i) sends.push_back(pair.send(tag(i), data[i]));
  progress(pair.from_a, 5);
  for (int k = kCount / 2; k < kCount; ++k) receives[order[k]] = pair.receive(tag(order[k]), &received[order[k]]);
  std::shuffle(order.begin(), order.end(), random);
  for (const int i : order) {
    CHECK_OK(finish(pair.from_b, receives[i]));
    CHECK(received[i] == data[i]);
  }
  for (void *send : sends) CHECK_OK(finish(pair.from_a, send));
  pair.disconnect();
}

TEST(a_message_that_is_too_long_is_refused_with_both_sizes) {
  Pair pair;
  uint64_t tag = 0;
  for (const size_t bytes : {size_t{101}, size_t{20000}, size_t{1} << 20}) {
    for (const bool posted_first : {true, false}) {
      ++tag;
      const std::vector<char> data = pattern(bytes, tag);
      std::vector<char> received(100);
      void *receive = posted_first ? pair.receive(tag, &received) : nullptr;
      void *const send = pair.send(tag, data);
      if (!posted_first) progress(pair.from_a, 20);
      if (!posted_first) receive = pair.receive(tag, &received);
      const std::string text = "a message of " + std::to_string(bytes) + " bytes came for a receive of 100 bytes";
      CHECK_FAILS(PHX_ERR_MISMATCH, text.c_str(), finish(pair.from_b, receive));
      CHECK_OK(finish(pair.from_a, send));
    }
  }
  pair.disconnect();
}

TEST(a_cancelled_receive_leaves_its_message_to_the_next) {
  Pair pair;
  const std::vector<char> data = pattern(5000, 1);
  std::vector<char> first(5000, 'x'), second(5000);
  void *const receive = pair.receive(7, &first);
  progress(pair.from_a, 5);
  ops().cancel(pair.b.self, receive);
  void *const send = pair.send(7, data);
  progress(pair.from_a, 20);
  CHECK(first == std::vector<char>(5000, 'x'));
  CHECK_OK(finish(pair.from_b, pair.receive(7, &second)));
  CHECK(second == data);
  CHECK_OK(finish(pair.from_a, send));
  pair.disconnect();
}

TEST(a_receive_is_cancelled_in_the_middle_of_its_message) {
  for (const size_t bytes : {size_t{60000}, size_t{1} << 20, size_t{16} << 20}) {
    for (const int steps : {1, 4, 40}) {
      Pair pair;
      const std::vector<char> data(bytes);
      std::vector<char> received(bytes);
      void *const receive = pair.receive(7, &received);
      progress(pair.from_a, 20);
      void *const send = pair.send(7, data);
      for (int i = 0; i < steps; ++i)
        for (const End *end : pair.from_a) ops().progress(end->self);
      const auto begin = Clock::now();
      ops().cancel(pair.b.self, receive);  // the sender does nothing meanwhile
      CHECK(Clock::now() - begin < std::chrono::seconds(8));
      std::fill(received.begin(), received.end(), 'x');
      progress(pair.from_a, 50);  // now it would go on
      CHECK(std::all_of(received.begin(), received.end(), [](char c) { return c == 'x'; }));
      pair.disconnect();
      if (send != nullptr) ops().cancel(pair.a.self, send);
      progress(pair.from_b, 20);
      CHECK(std::all_of(received.begin(), received.end(), [](char c) { return c == 'x'; }));
    }
  }
}

TEST(a_flush_sends_what_was_sent) {
  for (const size_t bytes : {size_t{100}, size_t{60000}, size_t{4} << 20}) {
    Pair pair;
    constexpr uint64_t kCount = 8;
    std::vector<std::vector<char>> data(kCount), received(kCount, std::vector<char>(bytes));
    std::vector<void *> receives, sends;
    for (uint64_t i = 0; i < kCount; ++i) receives.push_back(pair.receive(i, &received[i]));
    progress(pair.from_a, 20);
    std::thread sender([&] {
      for (uint64_t i = 0; i < kCount; ++i) {
        data[i] = pattern(bytes, i);
        sends.push_back(pair.send(i, data[i]));
      }
      ops().disconnect(pair.a.self, pair.to_b, 1);
      for (void *send : sends)
        if (send != nullptr) ops().cancel(pair.a.self, send);
    });
    int failures = 0;
    for (uint64_t i = 0; i < kCount; ++i)
      if (finish({&pair.b}, receives[i]) != PHX_OK) ++failures;
    sender.join();
    CHECK(failures == 0);
    for (uint64_t i = 0; i < kCount; ++i) CHECK(received[i] == data[i]);
    ops().disconnect(pair.b.self, pair.to_a, 1);
  }
}

// UCX has ended the send, and keeps what the socket did not take.
TEST(what_a_small_socket_does_not_take_is_not_sent_yet) {
  const std::pair<const char *, const char *> settings[] = {
      {"UCX_TCP_SNDBUF", "32K"}, {"UCX_TCP_RCVBUF", "32K"}, {"UCX_RNDV_THRESH", "inf"}, {"UCX_ZCOPY_THRESH", "inf"}};
  for (const auto &setting : settings) CHECK(setenv(setting.first, setting.second, 1) == 0);
  Pair pair;
  for (const auto &setting : settings) CHECK(unsetenv(setting.first) == 0);
  const std::vector<char> hello = pattern(8, 1), data = pattern(400000, 2);
  std::vector<char> got(8), all(data.size());
  CHECK_OK(finish(pair.from_a, pair.send(1, hello)));
  CHECK_OK(finish(pair.from_b, pair.receive(1, &got)));
  CHECK(ops().unsent(pair.a.self) == 0);
  CHECK_OK(finish({&pair.a}, pair.send(2, data)));
  CHECK(ops().unsent(pair.a.self) == 1);
  CHECK_OK(finish(pair.from_b, pair.receive(2, &all)));
  CHECK(all == data);
  CHECK(ops().unsent(pair.a.self) == 0);
  pair.disconnect();
}

TEST(disconnecting_ends_sends_within_bounds) {
  for (const int32_t flush : {0, 1}) {
    Pair pair;
    const std::vector<char> data(16 << 20);
    progress(pair.from_a, 20);
    void *const send = pair.send(7, data);  // nobody receives it
    progress(pair.from_a, 5);
    CHECK(send != nullptr);
    const auto begin = Clock::now();
    ops().disconnect(pair.a.self, pair.to_b, flush);
    CHECK(Clock::now() - begin < std::chrono::seconds(5));
    CHECK_FAILS(PHX_ERR_PEER_DEAD, "UCX: ", finish({&pair.a}, send));
    ops().disconnect(pair.b.self, pair.to_a, 0);
  }
}

int entries(const char *path) {
  DIR *const directory = opendir(path);
  CHECK(directory != nullptr);
  int count = 0;
  while (readdir(directory) != nullptr) ++count;
  closedir(directory);
  return count;
}

TEST(the_same_endpoints_connect_again) {
  End a, b;
  int descriptors = 0;
  for (uint64_t round = 0; round < 8; ++round) {
    if (round == 2) descriptors = entries("/proc/self/fd");
    void *const to_b = a.connect(b.address);
    void *const to_a = b.connect(a.address);
    const std::vector<char> data = pattern(70000, round);
    std::vector<char> received(70000);
    void *send = nullptr, *receive = nullptr;
    CHECK_OK(ops().send(b.self, to_a, round, data.data(), data.size(), &send));
    CHECK_OK(ops().recv(a.self, to_b, round, received.data(), received.size(), &receive));
    CHECK_OK(finish({&a, &b}, receive));
    CHECK_OK(finish({&b, &a}, send));
    CHECK(received == data);
    const int32_t flush = round % 2 == 0;
    ops().disconnect(a.self, to_b, flush);
    if (round == 3) progress({&b, &a}, 50);
    ops().disconnect(b.self, to_a, flush);
    progress({&a, &b}, 20);
  }
  CHECK(entries("/proc/self/fd") <= descriptors);
}

TEST(the_descriptor_becomes_readable) {
  Pair pair;
  std::vector<char> data(100), received(100);
  void *const first = pair.receive(1, &received);
  void *const before = pair.send(1, data);
  CHECK_OK(finish(pair.from_b, first));
  CHECK_OK(finish(pair.from_a, before));
  void *const receive = pair.receive(2, &received);
  int32_t fd = -1, done = 0;
  while (ops().arm(pair.b.self, &fd) == 0) ops().progress(pair.b.self);
  void *const send = pair.send(2, data);
  CHECK_OK(finish({&pair.a}, send));
  pollfd ready{fd, POLLIN, 0};
  const auto limit = Clock::now() + std::chrono::seconds(20);
  while (done == 0) {
    CHECK(poll(&ready, 1, 20000) == 1);
    ops().progress(pair.b.self);
    CHECK_OK(ops().test(pair.b.self, receive, &done, nullptr));
    while (done == 0 && ops().arm(pair.b.self, &fd) == 0) ops().progress(pair.b.self);
    CHECK(Clock::now() < limit);
  }
  pair.disconnect();
}

TEST(rounds_leave_no_descriptors_and_no_threads) {
  const auto round = [](uint64_t number) {
    Pair pair;
    const std::vector<char> data = pattern(number % 2 == 0 ? 100 : 1000000, number);
    std::vector<char> received(data.size());
    void *const receive = pair.receive(1, &received);
    void *const send = pair.send(1, data);
    CHECK_OK(finish(pair.from_b, receive));
    CHECK_OK(finish(pair.from_a, send));
    if (number % 3 != 0) pair.disconnect();  // else close() ends the connections
  };
  round(0);
  const int descriptors = entries("/proc/self/fd"), threads = entries("/proc/self/task");
  for (uint64_t number = 1; number <= 20; ++number) round(number);
  CHECK(entries("/proc/self/fd") == descriptors);
  CHECK(entries("/proc/self/task") == threads);
}

TEST(facts_name_the_library_and_its_transports) {
  (void)ops();
  const phx::UcxFacts facts = phx::ucx_facts();
  CHECK(facts.problem.empty());
  CHECK(facts.path.find("libucp") != std::string::npos);
  CHECK(facts.version.rfind("1.", 0) == 0);
  if (getenv("UCX_TLS") == nullptr) {
    CHECK(facts.transports.find("tcp/") != std::string::npos);
    for (const char *name : {"posix", "sysv", "cma", "knem", "xpmem"})
      CHECK(facts.transports.find(name) == std::string::npos);
  }
  std::fprintf(stderr, "    UCX %s, %s: %s\n", facts.version.c_str(), facts.path.c_str(), facts.transports.c_str());
}

}  // namespace

int main(int argc, char **argv) { return check::run_all(argc, argv); }
