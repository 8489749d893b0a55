// Messages between ranks of several hosts, over the carrier of the tests.
#include <atomic>
#include <thread>

#include "hub_group.h"
#include "members.h"

namespace {

std::vector<int32_t> message(int from, int to, size_t number, size_t count) {
  std::vector<int32_t> values(count);
  for (size_t i = 0; i < count; ++i) values[i] = static_cast<int32_t>(from * 1000003 + to * 10007 + number * 101 + i);
  return values;
}

// Sizes on both sides of each limit.
constexpr size_t kCounts[] = {0, 1, 15, 2000, 2048, 2049, 5000, 100000}, kMostEager = 2048;

}  // namespace

TEST(every_rank_sends_to_every_rank) {
  for (const Shape &shape : {Shape{0, 1}, Shape{0, 0, 1, 1}, Shape{0, 1, 2}}) {
    for (uint64_t seed = 0; seed < 10 / members::kThinner; ++seed) {
      HubOptions hub;
      hub.seed = seed;
      with_hosts(shape, hub, [&](int rank, phx_group *group, phx_world *) {
        const int n = static_cast<int>(shape.size());
        std::vector<std::vector<int32_t>> sent, got;
        std::vector<phx_work *> works;
        sent.reserve(n * std::size(kCounts));
        got.reserve(n * std::size(kCounts));
        for (size_t number = 0; number < std::size(kCounts); ++number)
          for (int i = 0; i < n; ++i) {
            const int peer = (rank + i) % n;
            const auto tag = static_cast<uint32_t>(number);
            sent.push_back(message(rank, peer, number, kCounts[number]));
            got.emplace_back(kCounts[number]);
            phx_work *work = nullptr;
            CHECK_OK(phx_send(group, sent.back().data(), kCounts[number], PHX_DTYPE_I32, peer, tag, nullptr, &work));
            works.push_back(work);
            CHECK_OK(phx_recv(group, got.back().data(), kCounts[number], PHX_DTYPE_I32, peer, tag, nullptr, &work));
            works.push_back(work);
          }
        for (size_t i = 0; i < works.size(); ++i) {
          phx_work *const work = works[seed % 2 == 0 ? i : works.size() - 1 - i];
          CHECK_OK(phx_work_wait(work, 0));
          phx_work_release(work);
        }
        for (size_t number = 0; number < std::size(kCounts); ++number)
          for (int i = 0; i < n; ++i)
            CHECK(got[number * n + i] == message((rank + i) % n, rank, number, kCounts[number]));
      });
    }
  }
}

// Whether the group or the world goes first.
TEST(what_was_sent_arrives_though_its_sender_leaves) {
  for (uint64_t seed = 0; seed < 40 / members::kThinner; ++seed) {
    HubOptions hub;
    hub.seed = seed;
    std::atomic<bool> leaves{false};
    with_hosts({0, 1}, hub, [&](int rank, phx_group *group, phx_world *world) {
      for (size_t number = std::size(kCounts); number-- > 0;) {
        while (rank == 1 && kCounts[number] <= kMostEager && !leaves) std::this_thread::yield();
        std::vector<int32_t> values(kCounts[number]);
        const std::vector<int32_t> expected = message(0, 1, number, kCounts[number]);
        if (rank == 0)
          CHECK_OK(phx_send(group, expected.data(), expected.size(), PHX_DTYPE_I32, 1, 7, nullptr, nullptr));
        else
          CHECK_OK(phx_recv(group, values.data(), values.size(), PHX_DTYPE_I32, 0, 7, nullptr, nullptr));
        if (rank == 1) CHECK(values == expected);
      }
      leaves = true;
      if (seed % 2 == 0) CHECK_OK(phx_world_finalize(world));
    });
  }
}

TEST(many_unexpected_messages_and_any_source) {
  with_hosts({0, 1}, {}, [&](int rank, phx_group *group, phx_world *) {
    constexpr size_t kMany = 200, kCount = 1000;
    if (rank == 0)
      for (size_t i = 0; i < kMany; ++i) {
        const auto values = message(0, 1, i, kCount);
        CHECK_OK(phx_send(group, values.data(), kCount, PHX_DTYPE_I32, 1, 7, nullptr, nullptr));
      }
    CHECK_OK(phx_barrier(group, nullptr, nullptr));
    if (rank == 1)
      for (size_t i = 0; i < kMany; ++i) {
        std::vector<int32_t> values(kCount);
        CHECK_OK(phx_recv(group, values.data(), kCount, PHX_DTYPE_I32, PHX_ANY_RANK, 7, nullptr, nullptr));
        CHECK(values == message(0, 1, i, kCount));
      }
  });
}

TEST(a_mismatch_and_a_timeout_name_the_peer) {
  std::atomic<bool> over{false};
  with_hosts({0, 1}, {}, [&](int rank, phx_group *group, phx_world *) {
    int32_t value = 0;
    const phx_status status = rank == 0 ? phx_send(group, &value, 1, PHX_DTYPE_I32, 1, 1, nullptr, nullptr)
                                        : phx_recv(group, &value, 1, PHX_DTYPE_F32, 0, 1, nullptr, nullptr);
    while (rank == 0 && !over) std::this_thread::yield();  // a rank that has left is named as such
    over = true;
    const std::string text = phx_last_error();
    if (rank == 1 && (status != PHX_ERR_MISMATCH || text.find("rank 0") == std::string::npos))
      check::failed(__FILE__, __LINE__, text);
  });
  with_hosts({0, 1}, {}, [&](int rank, phx_group *group, phx_world *) {
    int32_t value = 0;
    if (rank == 0) return;
    phx_options options = PHX_OPTIONS_INIT;
    options.timeout_ms = 100;
    const phx_status status = phx_recv(group, &value, 1, PHX_DTYPE_F32, 0, 1, &options, nullptr);
    CHECK(status == PHX_ERR_TIMEOUT || status == PHX_ERR_PEER_DEAD);
    CHECK(std::string(phx_last_error()).find("rank 0") != std::string::npos);
  });
}

int main(int argc, char **argv) { return check::run_all(argc, argv); }
