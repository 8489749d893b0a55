// Messages that come before their receives: what they may cost their receiver, and that each is found all the same.
#include <sys/resource.h>

#include <algorithm>
#include <cstdio>
#include <random>
#include <thread>
#include <vector>

#include "memory_use.h"
#include "messages.h"
#include "p2p/layout.h"

namespace {

using messages::expect;
using messages::letters;
using messages::says;
using messages::send;
using messages::start_recv;
using messages::start_send;
using messages::wait;
using messages::within;

constexpr size_t kMiB = size_t{1} << 20;
const size_t kEager = phx::ring_bytes(2);

long private_kib() {
  const long kib = memory_use::kib("/proc/self/status", "RssAnon:");
  CHECK(kib >= 0);
  return kib;
}

bool grew_by_less_than(long before_kib, long kib) { return !memory_use::kCounts || private_kib() - before_kib < kib; }

// Starts `count` sends of one buffer to rank 1, with tags from `first` on.
std::vector<phx_work *> start_many(phx_group *group, uint32_t first, uint32_t count, const std::vector<char> &data) {
  std::vector<phx_work *> works;
  for (uint32_t i = 0; i < count; ++i) works.push_back(start_send(group, 1, first + i, data));
  return works;
}

// ---- bounds

TEST(messages_that_no_receive_asks_for_take_little_memory_and_are_found) {
  ranks::all_zero(ranks::as_processes(2, [](int rank, phx_world *world) {
    phx_group *group = ranks::make_group(world);
    constexpr uint32_t kMessages = 300;
    const std::vector<char> data = letters(1, kMiB), last = letters(2, 10);
    if (rank == 0) {
      const std::vector<phx_work *> works = start_many(group, 0, kMessages, data);
      send(group, 1, kMessages, last);
      for (phx_work *work : works) wait(work);
    } else {
      const long before = private_kib();
      expect(group, 0, kMessages, 2, last.size());
      CHECK(grew_by_less_than(before, 8 * 1024));
      for (uint32_t tag = kMessages; tag-- > 0;) {
        std::vector<char> out(kMiB);
        CHECK_OK(phx_recv(group, out.data(), kMiB, PHX_DTYPE_U8, 0, tag, nullptr, nullptr));
        CHECK(out == data);
      }
      CHECK(grew_by_less_than(before, 16 * 1024));
    }
    phx_group_release(group);
  }));
}

TEST(small_messages_that_no_receive_asks_for_are_bounded_as_well) {
  ranks::all_zero(ranks::as_processes(2, [](int rank, phx_world *world) {
    phx_group *group = ranks::make_group(world);
    constexpr uint32_t kMessages = 20000;
    const std::vector<char> data = letters(1, 1000);
    if (rank == 0) {
      const std::vector<phx_work *> works = start_many(group, 0, kMessages, data);
      CHECK_OK(phx_barrier(group, nullptr, nullptr));
      CHECK(phx_work_test(works.front()) == PHX_OK);          // within the credit
      CHECK(phx_work_test(works.back()) == PHX_IN_PROGRESS);  // beyond it
      CHECK_OK(phx_barrier(group, nullptr, nullptr));
      for (phx_work *work : works) wait(work);
    } else {
      const long before = private_kib();
      std::vector<char> out(1000);
      CHECK_OK(phx_barrier(group, nullptr, nullptr));
      CHECK_OK(phx_barrier(group, nullptr, nullptr));
      phx_work *receive = start_recv(group, 0, kMessages - 1, out);
      wait(receive);
      CHECK(out == data && grew_by_less_than(before, 8 * 1024));
      for (uint32_t tag = kMessages - 1; tag-- > 0;) expect(group, 0, tag, 1, 1000);
    }
    phx_group_release(group);
  }));
}

TEST(a_blocking_send_beyond_the_credit_waits_for_its_receive) {
  for (const size_t bytes : {kEager + 1, kEager / 5})
    ranks::as_threads(2, [&](int rank, phx_world *world) {
      phx_group *group = ranks::make_group(world);
      std::vector<char> data(bytes);
      const phx_options options = within(300);
      if (rank == 0) {
        const size_t free = bytes > kEager ? 0 : phx::credit_bytes(2) / phx::eager_cost(bytes);
        for (size_t i = 0; i < free; ++i) send(group, 1, 1, data);
        CHECK_FAILS(PHX_ERR_TIMEOUT, "receive its send(uint8",
                    phx_send(group, data.data(), bytes, PHX_DTYPE_U8, 1, 2, &options, nullptr));
        CHECK(says("tag 2") && says("rank 1 (pid"));
      } else {  // takes whatever comes
        CHECK_FAILS(PHX_ERR_TIMEOUT, "tag 2",
                    phx_recv(group, data.data(), bytes, PHX_DTYPE_U8, 0, 9, nullptr, nullptr));
      }
      phx_group_release(group);
    });
}

TEST(a_send_to_itself_beyond_the_credit_waits_for_its_receive) {
  ranks::as_threads(1, [](int, phx_world *world) {
    phx_group *group = ranks::make_group(world);
    const long before = private_kib();
    const std::vector<char> data = letters(3, 40 * kMiB);
    std::vector<phx_work *> works;
    for (uint32_t tag = 0; tag < 10; ++tag) works.push_back(start_send(group, 0, tag, data));
    CHECK(grew_by_less_than(before, 60 * 1024));
    for (uint32_t tag = 10; tag-- > 0;) {
      CHECK(phx_work_test(works[tag]) == PHX_IN_PROGRESS);
      expect(group, 0, tag, 3, data.size());
      wait(works[tag]);
    }
    const phx_options options = within(30);
    CHECK_FAILS(PHX_ERR_TIMEOUT, "receive its send(uint8, 41943040, tag 4)",
                phx_send(group, data.data(), data.size(), PHX_DTYPE_U8, 0, 4, &options, nullptr));
    phx_group_release(group);
  });
}

TEST(more_messages_than_may_be_announced_arrive_in_order) {
  ranks::as_threads(2, [](int rank, phx_world *world) {
    phx_group *group = ranks::make_group(world);
    constexpr uint32_t kMessages = phx::kMaxAnnounced + 20000;
    if (rank == 0) {
      std::vector<phx_work *> works;
      std::vector<uint32_t> numbers(kMessages);
      for (uint32_t i = 0; i < kMessages; ++i) {
        phx_work *work = nullptr;
        numbers[i] = i;
        CHECK_OK(phx_send(group, &numbers[i], i % 3 == 0 ? 0 : 1, PHX_DTYPE_U32, 1, 5, nullptr, &work));
        works.push_back(work);
      }
      CHECK_OK(phx_barrier(group, nullptr, nullptr));
      for (phx_work *work : works) {
        CHECK_OK(phx_work_wait(work, 0));
        phx_work_release(work);
      }
    } else {
      CHECK_OK(phx_barrier(group, nullptr, nullptr));
      for (uint32_t i = 0; i < kMessages; ++i) {
        uint32_t got = i;
        CHECK_OK(phx_recv(group, &got, i % 3 == 0 ? 0 : 1, PHX_DTYPE_U32, 0, 5, nullptr, nullptr));
        CHECK(got == i);
      }
    }
    phx_group_release(group);
  });
}

// ---- eager or announced: all arrive

// Sizes around every limit, each rank with its own order of starting and waiting.
void exchange_in_any_order(int rank, phx_world *world) {
  phx_group *group = ranks::make_group(world);
  const int n = phx_world_size(world);
  const std::vector<size_t> sizes = {0,          1,      32,         33,         phx::kPieceBytes,
                                     kEager - 1, kEager, kEager + 1, 2 * kEager, 5 * kEager + 77};
  constexpr uint32_t kEach = 40;
  const auto size = [&](int from, int to, uint32_t tag) { return sizes[(tag * 7 + from * 3 + to * 5) % sizes.size()]; };
  std::mt19937 random(static_cast<uint32_t>(rank) + 17);
  struct Started {
    bool sends;
    int peer;
    uint32_t tag;
    std::vector<char> data;
    phx_work *work;
  };
  std::vector<Started> all;
  for (int peer = 0; peer < n; ++peer)
    for (uint32_t tag = 0; tag < kEach; ++tag)
      for (bool sends : {false, true}) all.push_back({sends, peer, tag, {}, nullptr});
  std::shuffle(all.begin(), all.end(), random);
  for (Started &one : all) {
    const int from = one.sends ? rank : one.peer, to = one.sends ? one.peer : rank;
    const size_t bytes = size(from, to, one.tag);
    if (one.sends)
      one.data = letters(one.tag + static_cast<uint32_t>(from), bytes);
    else
      one.data.assign(bytes, 'z');
    one.work =
        one.sends ? start_send(group, one.peer, one.tag, one.data) : start_recv(group, one.peer, one.tag, one.data);
  }
  std::shuffle(all.begin(), all.end(), random);
  for (Started &one : all) {
    wait(one.work);
    if (!one.sends) CHECK(one.data == letters(one.tag + static_cast<uint32_t>(one.peer), one.data.size()));
  }
  CHECK_OK(phx_barrier(group, nullptr, nullptr));
  phx_group_release(group);
}

TEST(messages_around_every_limit_arrive_in_any_order_of_starting_and_waiting) {
  ranks::as_threads(3, exchange_in_any_order);
  ranks::all_zero(ranks::as_processes(2, exchange_in_any_order));
}

TEST(a_receive_from_any_rank_gets_announced_messages_and_says_where_they_came_from) {
  ranks::as_threads(3, [](int rank, phx_world *world) {
    phx_group *group = ranks::make_group(world);
    constexpr size_t kSize = 3 * kMiB;
    if (rank != 0) {
      const std::vector<char> data = letters(static_cast<uint32_t>(rank), kSize);
      phx_work *work = start_send(group, 0, 1, data);
      CHECK_OK(phx_barrier(group, nullptr, nullptr));
      wait(work);
    } else {
      CHECK_OK(phx_barrier(group, nullptr, nullptr));
      int sources = 0;
      for (int i = 0; i < 2; ++i) {
        std::vector<char> out(kSize);
        phx_work *work = start_recv(group, PHX_ANY_RANK, 1, out);
        int32_t source = -1;
        CHECK_OK(phx_work_wait(work, 0));
        CHECK_OK(phx_work_get_source(work, &source));
        phx_work_release(work);
        CHECK(out == letters(static_cast<uint32_t>(source), kSize));
        sources += source;
      }
      CHECK(sources == 3);
    }
    phx_group_release(group);
  });
}

// ---- ends

TEST(a_rank_that_dies_after_it_announced_a_message_ends_its_receive) {
  for (bool met : {false, true}) {  // whether the receive had met the message by then
    const std::vector<int> codes = ranks::as_processes(2, [&](int rank, phx_world *world) {
      phx_group *group = ranks::make_group(world);
      std::vector<char> large(64 * kMiB);
      if (rank == 1) {
        phx_work *work = start_send(group, 0, 1, large);
        char x = 1;
        CHECK_OK(phx_send(group, &x, 1, PHX_DTYPE_U8, 0, 2, nullptr, nullptr));
        if (met) CHECK_OK(phx_recv(group, &x, 1, PHX_DTYPE_U8, 0, 3, nullptr, nullptr));
        CHECK(phx_work_test(work) == PHX_IN_PROGRESS);
        _exit(9);
      }
      char x = 0;
      CHECK_OK(phx_recv(group, &x, 1, PHX_DTYPE_U8, 1, 2, nullptr, nullptr));
      phx_work *work = nullptr;
      if (met) {
        work = start_recv(group, 1, 1, large);
        CHECK_OK(phx_send(group, &x, 1, PHX_DTYPE_U8, 1, 3, nullptr, nullptr));
        CHECK_FAILS(PHX_ERR_PEER_DEAD, "rank 1", phx_work_wait(work, 0));
        phx_work_release(work);
      } else {
        const phx_status status = phx_recv(group, large.data(), large.size(), PHX_DTYPE_U8, 1, 1, nullptr, nullptr);
        CHECK((status == PHX_ERR_PEER_DEAD || status == PHX_ERR_REVOKED) && says("rank 1"));
      }
      phx_group_release(group);
    });
    CHECK(codes[0] == 0 && WEXITSTATUS(codes[1]) == 9);
  }
}

TEST(a_rank_that_dies_before_it_receives_ends_the_send_that_was_announced) {
  const std::vector<int> codes = ranks::as_processes(2, [&](int rank, phx_world *world) {
    phx_group *group = ranks::make_group(world);
    if (rank == 1) {
      char x = 1;
      CHECK_OK(phx_recv(group, &x, 1, PHX_DTYPE_U8, 0, 2, nullptr, nullptr));
      _exit(9);
    }
    const std::vector<char> large(4 * kMiB);
    phx_work *work = start_send(group, 1, 1, large);
    send(group, 1, 2, letters(1, 1));
    CHECK_FAILS(PHX_ERR_PEER_DEAD, "rank 1", phx_work_wait(work, 0));
    phx_work_release(work);
    phx_group_release(group);
  });
  CHECK(codes[0] == 0 && WEXITSTATUS(codes[1]) == 9);
}

TEST(a_timeout_holds_while_another_thread_of_the_rank_waits_for_messages) {
  ranks::as_threads(2, [](int rank, phx_world *world) {
    phx_group *group = ranks::make_group(world);
    if (rank == 0) {
      std::thread other([&] {
        char x = 0;
        CHECK(phx_recv(group, &x, 1, PHX_DTYPE_U8, 1, 1, nullptr, nullptr) == PHX_ERR_TIMEOUT);
      });
      char x = 0;
      const phx_options options = within(50);
      CHECK_FAILS(PHX_ERR_TIMEOUT, "timed out after 50 ms (the timeout_ms of this call)",
                  phx_recv(group, &x, 1, PHX_DTYPE_U8, 1, 2, &options, nullptr));
      other.join();
    } else {
      while (phx_world_check(world) == PHX_OK) std::this_thread::yield();
    }
    phx_group_release(group);
  });
}

}  // namespace

int main(int argc, char **argv) { return check::run_all(argc, argv); }
