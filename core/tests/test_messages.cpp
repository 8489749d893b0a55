// Messages arrive whole, in order and where they belong, however they are mixed.
#include <algorithm>
#include <random>
#include <vector>

#include "messages.h"

namespace {

using messages::expect;
using messages::letters;
using messages::send;
using messages::start_recv;
using messages::start_send;
using messages::wait;

// ---- values

const size_t kSizes[] = {0,     1,     2,     31,     32,     33,     63,     64,     65,      95,
                         96,    97,    4095,  4096,   4097,   32735,  32736,  32767,  32768,   32769,
                         65535, 65536, 65537, 131071, 262144, 524287, 524288, 524289, 1048577, 3000001};

void exchange_all_sizes(int rank, phx_world *world) {
  phx_group *group = ranks::make_group(world);
  for (int repeat = 0; repeat < 2; ++repeat) {
    for (size_t size : kSizes) {
      const uint32_t key = static_cast<uint32_t>(size + repeat);
      if (rank == 0) {
        send(group, 1, key, letters(key, size));
        expect(group, 1, key, key + 1, size);
      } else {
        expect(group, 0, key, key, size);
        send(group, 0, key, letters(key + 1, size));
      }
    }
  }
  phx_group_release(group);
}

TEST(messages_of_every_size_arrive_among_threads) { ranks::as_threads(2, exchange_all_sizes); }

TEST(messages_of_every_size_arrive_among_processes) { ranks::all_zero(ranks::as_processes(2, exchange_all_sizes)); }

TEST(every_dtype_arrives) {
  ranks::as_threads(2, [](int rank, phx_world *world) {
    phx_group *group = ranks::make_group(world);
    for (int32_t dtype = PHX_DTYPE_F16; dtype <= PHX_DTYPE_F8E5M2; ++dtype) {
      const size_t count = 1001, bytes = count * phx_dtype_size(dtype);
      std::vector<char> data = letters(dtype, bytes);
      if (rank == 0) {
        CHECK_OK(phx_send(group, data.data(), count, dtype, 1, 5, nullptr, nullptr));
      } else {
        std::vector<char> got(bytes);
        CHECK_OK(phx_recv(group, got.data(), count, dtype, 0, 5, nullptr, nullptr));
        CHECK(got == data);
      }
    }
    phx_group_release(group);
  });
}

TEST(a_message_of_many_mib_arrives_whether_or_not_its_receive_came_first) {
  ranks::as_threads(2, [](int rank, phx_world *world) {
    phx_group *group = ranks::make_group(world);
    constexpr size_t kSize = (size_t{40} << 20) + 7;
    for (bool first : {true, false}) {
      if (rank == 0) {
        phx_work *work = start_send(group, 1, 1, letters(1, 0));
        wait(work);
        CHECK_OK(phx_barrier(group, nullptr, nullptr));
        const std::vector<char> large = letters(9, kSize);
        work = start_send(group, 1, 2, large);
        send(group, 1, 3, letters(3, 10));
        wait(work);
      } else {
        CHECK_OK(phx_barrier(group, nullptr, nullptr));
        if (!first) expect(group, 0, 3, 3, 10);  // was sent after the large one, which waits for its receive
        expect(group, 0, 2, 9, kSize);
        if (first) expect(group, 0, 3, 3, 10);
        expect(group, 0, 1, 1, 0);
      }
    }
    phx_group_release(group);
  });
}

// ---- matching

TEST(tags_may_be_received_in_another_order_than_sent) {
  ranks::as_threads(2, [](int rank, phx_world *world) {
    phx_group *group = ranks::make_group(world);
    constexpr uint32_t kMessages = 300;
    const auto size = [](uint32_t tag) { return size_t{tag} * tag * 7 % 90000; };
    std::vector<uint32_t> order(kMessages);
    for (uint32_t i = 0; i < kMessages; ++i) order[i] = i;
    std::shuffle(order.begin(), order.end(), std::mt19937(7));
    if (rank == 0) {
      std::vector<std::vector<char>> in;
      std::vector<phx_work *> works;
      for (uint32_t tag = 0; tag < kMessages; ++tag) {
        in.push_back(letters(tag, size(tag)));
        works.push_back(start_send(group, 1, tag, in.back()));
      }
      for (phx_work *work : works) wait(work);
    } else {
      for (uint32_t tag : order) expect(group, 0, tag, tag, size(tag));
    }
    phx_group_release(group);
  });
}

TEST(messages_of_one_sender_with_one_tag_arrive_in_the_order_sent) {
  ranks::as_threads(2, [](int rank, phx_world *world) {
    phx_group *group = ranks::make_group(world);
    for (uint32_t i = 0; i < 2000; ++i) {
      const size_t size = i % 50 == 49 ? 100000 : i % 70;
      if (rank == 0)
        send(group, 1, 0xffffffffu, letters(i, size));
      else
        expect(group, 0, 0xffffffffu, i, size);
    }
    phx_group_release(group);
  });
}

TEST(a_receive_from_any_rank_says_where_it_came_from) {
  ranks::as_threads(4, [](int rank, phx_world *world) {
    phx_group *group = ranks::make_group(world);
    constexpr int kEach = 50;
    if (rank != 0) {
      for (int i = 0; i < kEach; ++i) {
        const int32_t mine[2] = {rank, i};
        CHECK_OK(phx_send(group, mine, 2, PHX_DTYPE_I32, 0, 4, nullptr, nullptr));
      }
    } else {
      const int32_t own[2] = {0, 0};
      int next[4] = {0, 0, 0, 0};
      CHECK_OK(phx_send(group, own, 2, PHX_DTYPE_I32, 0, 4, nullptr, nullptr));
      for (int i = 0; i < 3 * kEach + 1; ++i) {
        int32_t got[2] = {-1, -1}, source = -2;
        phx_work *work = nullptr;
        CHECK_OK(phx_recv(group, got, 2, PHX_DTYPE_I32, PHX_ANY_RANK, 4, nullptr, &work));
        CHECK_OK(phx_work_wait(work, 0));
        CHECK_OK(phx_work_get_source(work, &source));
        phx_work_release(work);
        CHECK(source == got[0] && source >= 0 && source < 4);
        CHECK(got[1] == next[source]++);  // of each sender in order
      }
      CHECK(next[0] == 1 && next[1] == kEach && next[2] == kEach && next[3] == kEach);
    }
    phx_group_release(group);
  });
}

TEST(a_named_receive_and_one_from_any_rank_get_messages_in_the_order_they_were_posted) {
  ranks::as_threads(2, [](int rank, phx_world *world) {
    phx_group *group = ranks::make_group(world);
    if (rank == 0) {
      std::vector<char> a(3), b(3), c(3);
      phx_work *any = start_recv(group, PHX_ANY_RANK, 1, a);
      phx_work *named = start_recv(group, 1, 1, b);
      phx_work *last = start_recv(group, PHX_ANY_RANK, 1, c);
      CHECK_OK(phx_barrier(group, nullptr, nullptr));
      wait(last);
      wait(named);
      wait(any);
      CHECK(a == letters(1, 3) && b == letters(2, 3) && c == letters(3, 3));
    } else {
      CHECK_OK(phx_barrier(group, nullptr, nullptr));
      for (uint32_t i = 1; i <= 3; ++i) send(group, 0, 1, letters(i, 3));
    }
    phx_group_release(group);
  });
}

TEST(a_rank_sends_to_itself_before_or_after_it_receives) {
  for (int size : {1, 2})
    ranks::as_threads(size, [](int rank, phx_world *world) {
      phx_group *group = ranks::make_group(world);
      for (size_t bytes : {size_t{0}, size_t{1}, size_t{1000}, size_t{3} << 20}) {
        const std::vector<char> first = letters(1, bytes);
        phx_work *sent = start_send(group, rank, 7, first);
        if (bytes < 10000) wait(sent);
        expect(group, rank, 7, 1, bytes);
        if (bytes >= 10000) wait(sent);
        std::vector<char> out(bytes);
        phx_work *receive = start_recv(group, PHX_ANY_RANK, 8, out);
        CHECK(phx_work_test(receive) == PHX_IN_PROGRESS);
        phx_work *work = start_send(group, rank, 8, letters(2, bytes));
        wait(work);
        int32_t source = -1;
        CHECK_OK(phx_work_wait(receive, 0));
        CHECK_OK(phx_work_get_source(receive, &source));
        CHECK(source == rank && out == letters(2, bytes));
        phx_work_release(receive);
      }
      CHECK_OK(phx_barrier(group, nullptr, nullptr));  // a receive from any rank ends when all others have left
      phx_group_release(group);
    });
}

// ---- many at once

TEST(two_ranks_may_both_send_before_they_receive) {
  ranks::as_threads(2, [](int rank, phx_world *world) {
    phx_group *group = ranks::make_group(world);
    constexpr size_t kSmall = 400000, kLarge = size_t{8} << 20;
    send(group, 1 - rank, 1, letters(rank, kSmall));  // no receive waits, and the ring takes it
    expect(group, 1 - rank, 1, 1 - rank, kSmall);
    const std::vector<char> more = letters(rank + 5, kLarge);
    phx_work *work = start_send(group, 1 - rank, 2, more);
    std::vector<char> out(kLarge);
    phx_work *receive = start_recv(group, 1 - rank, 2, out);
    while (phx_work_test(work) == PHX_IN_PROGRESS) std::this_thread::yield();  // a test loop is enough
    wait(work);
    wait(receive);
    CHECK(out == letters(6 - rank, kLarge));
    CHECK_OK(phx_barrier(group, nullptr, nullptr));
    phx_group_release(group);
  });
}

void thousand_in_flight(int rank, phx_world *world) {
  phx_group *group = ranks::make_group(world);
  constexpr int kMessages = 1000;
  const auto size = [](int i) { return i % 100 == 99 ? size_t{70000} : static_cast<size_t>(i % 90); };
  std::mt19937 random(rank);
  std::vector<std::vector<char>> out(kMessages), in(kMessages);
  std::vector<phx_work *> works(2 * kMessages);
  std::vector<int> order(2 * kMessages);
  for (int i = 0; i < 2 * kMessages; ++i) order[i] = i;
  std::shuffle(order.begin(), order.end(), random);
  for (int i : order) {  // sends and receives start in random order
    const int k = i / 2;
    if (i % 2 == 0) {
      in[k] = letters(k * 2 + rank, size(k));
      works[i] = start_send(group, 1 - rank, k, in[k]);
    } else {
      out[k].assign(size(k), 'z');
      works[i] = start_recv(group, k % 3 == 0 ? PHX_ANY_RANK : 1 - rank, k, out[k]);
    }
  }
  std::shuffle(order.begin(), order.end(), random);
  for (int i : order) {
    const phx_status status = phx_work_test(works[i]);
    CHECK(status == PHX_OK || status == PHX_IN_PROGRESS);
    wait(works[i]);
  }
  for (int k = 0; k < kMessages; ++k) CHECK(out[k] == letters(k * 2 + 1 - rank, size(k)));
  phx_group_release(group);
}

TEST(a_thousand_started_messages_each_way_complete_in_any_order_of_waiting) {
  ranks::as_threads(2, thousand_in_flight);
  ranks::all_zero(ranks::as_processes(2, thousand_in_flight));
}

TEST(works_that_are_released_before_they_are_complete_still_complete) {
  ranks::as_threads(2, [](int rank, phx_world *world) {
    phx_group *group = ranks::make_group(world);
    constexpr size_t kSize = size_t{2} << 20;
    const std::vector<char> mine = letters(rank, kSize);
    std::vector<char> theirs(kSize);
    phx_work_release(start_recv(group, 1 - rank, 1, theirs));
    phx_work_release(start_send(group, 1 - rank, 1, mine));
    const std::vector<char> later = letters(9, kSize);  // whose data comes behind it
    phx_work *work = start_send(group, 1 - rank, 2, later);
    expect(group, 1 - rank, 2, 9, kSize);
    wait(work);
    CHECK(theirs == letters(1 - rank, kSize));
    CHECK_OK(phx_barrier(group, nullptr, nullptr));
    phx_group_release(group);
  });
}

TEST(works_that_are_never_complete_go_with_their_group) {
  ranks::as_threads(2, [](int rank, phx_world *world) {
    phx_group *group = ranks::make_group(world);
    const std::vector<char> large(size_t{2} << 20);
    std::vector<char> out(10);
    if (rank == 0) {
      phx_work_release(start_send(group, 1, 1, large));
      phx_work_release(start_send(group, 0, 3, large));
      phx_work_release(start_recv(group, 1, 1, out));
      phx_work_release(start_recv(group, PHX_ANY_RANK, 2, out));
    }
    CHECK_OK(phx_barrier(group, nullptr, nullptr));
    phx_group_release(group);
  });
}

void all_pairs(int rank, phx_world *world) {
  const int n = phx_world_size(world);
  phx_group *group = ranks::make_group(world);
  for (size_t size : {size_t{3}, size_t{100000}}) {
    std::vector<std::vector<char>> in(n), out(n);
    std::vector<phx_work *> works;
    for (int r = 0; r < n; ++r) {
      in[r] = letters(rank * n + r, size);
      out[r].assign(size, 'z');
      works.push_back(start_send(group, (rank + r) % n, rank, in[r]));
      works.push_back(start_recv(group, r, r, out[r]));
    }
    for (phx_work *work : works) wait(work);
    for (int r = 0; r < n; ++r) CHECK(out[r] == letters(r * n + (rank + n - r) % n, size));
  }
  phx_group_release(group);
}

TEST(all_pairs_of_many_ranks_exchange_messages) {
  ranks::as_threads(12, all_pairs);
  ranks::all_zero(ranks::as_processes(6, all_pairs));
}

TEST(threads_of_one_rank_send_and_receive_at_once) {
  ranks::as_threads(2, [](int rank, phx_world *world) {
    phx_group *group = ranks::make_group(world);
    const auto size = [](int i) { return i % 25 == 0 ? size_t{300000} : static_cast<size_t>(i); };
    constexpr int kMessages = 200;
    std::atomic<int> failures{0};
    const auto thread = [&](auto body) {
      return std::thread([&failures, body] {
        try {
          for (int i = 0; i < kMessages; ++i) body(i);
        } catch (const std::exception &) {
          ++failures;
        }
      });
    };
    std::vector<std::thread> threads;
    for (uint32_t tag : {1u, 2u}) {
      threads.push_back(thread([=](int i) { send(group, 1 - rank, tag, letters(tag + rank, size(i))); }));
      threads.push_back(thread([=](int i) { expect(group, 1 - rank, tag, tag + 1 - rank, size(i)); }));
    }
    threads.push_back(thread([=](int i) { send(group, rank, 3, letters(3, size(i))); }));
    threads.push_back(thread([=](int i) { expect(group, rank, 3, 3, size(i)); }));
    for (std::thread &t : threads) t.join();
    CHECK(failures == 0);
    phx_group_release(group);
  });
}

// ---- beside collectives

TEST(messages_mix_with_collectives_on_their_group) {
  ranks::as_threads(3, [](int rank, phx_world *world) {
    phx_group *group = ranks::make_group(world);
    for (int i = 0; i < 100; ++i) {
      int32_t sum = rank + i, token = -1;
      phx_work *work = nullptr;
      const int32_t mine = rank * 1000 + i;
      CHECK_OK(phx_send(group, &mine, 1, PHX_DTYPE_I32, (rank + 1) % 3, i, nullptr, &work));
      CHECK_OK(phx_all_reduce(group, &sum, &sum, 1, PHX_DTYPE_I32, PHX_OP_SUM, nullptr, nullptr));
      CHECK_OK(phx_recv(group, &token, 1, PHX_DTYPE_I32, (rank + 2) % 3, i, nullptr, nullptr));
      wait(work);
      CHECK(sum == 3 + 3 * i);
      CHECK(token == (rank + 2) % 3 * 1000 + i);
    }
    phx_group_release(group);
  });
}

TEST(started_messages_move_on_while_their_rank_waits_in_collectives) {
  ranks::as_threads(2, [](int rank, phx_world *world) {
    phx_group *group = ranks::make_group(world);
    phx_group *other = ranks::make_group(world, "other");
    constexpr size_t kSize = size_t{5} << 20;
    for (phx_group *waited : {group, other}) {
      const std::vector<char> mine = letters(4, kSize);
      std::vector<char> theirs(kSize);
      phx_work *work = nullptr;
      if (rank == 0) {
        work = start_send(group, 1, 1, mine);
        CHECK_OK(phx_barrier(waited, nullptr, nullptr));  // rank 1 comes when it has all of it
      } else {
        expect(group, 0, 1, 4, kSize);
        CHECK_OK(phx_barrier(waited, nullptr, nullptr));
      }
      if (work != nullptr) wait(work);
      if (rank == 0) {
        work = start_recv(group, 1, 2, theirs);
        CHECK_OK(phx_barrier(waited, nullptr, nullptr));
        wait(work);
        CHECK(theirs == letters(5, kSize));
      } else {
        send(group, 0, 2, letters(5, kSize));  // returns while rank 0 waits for this rank's barrier
        CHECK_OK(phx_barrier(waited, nullptr, nullptr));
      }
    }
    phx_group_release(other);
    phx_group_release(group);
  });
}

TEST(a_started_collective_moves_on_while_its_rank_waits_for_a_message) {
  ranks::Options options;
  options.staging_bytes = 1024;
  ranks::as_threads(
      2,
      [](int rank, phx_world *world) {
        phx_group *group = ranks::make_group(world);
        std::vector<float> in(20000, static_cast<float>(rank + 1)), out(20000);
        phx_work *work = nullptr;
        CHECK_OK(phx_all_reduce(group, in.data(), out.data(), in.size(), PHX_DTYPE_F32, PHX_OP_SUM, nullptr, &work));
        if (rank == 0) {
          expect(group, 1, 1, 1, 3);
          wait(work);
        } else {
          wait(work);  // needs rank 0's rounds
          send(group, 0, 1, letters(1, 3));
        }
        for (float x : out) CHECK(x == 3.0f);
        phx_group_release(group);
      },
      options);
}

}  // namespace

int main(int argc, char **argv) { return check::run_all(argc, argv); }
