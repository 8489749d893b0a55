// Messages arrive whole, in order and where they belong, however they are mixed; and what goes wrong is named.
#include <signal.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <vector>

#include "group/control.h"
#include "messages/ring.h"
#include "ranks.h"

namespace {

// Byte i of message `key`.
char letter(uint32_t key, size_t i) { return static_cast<char>((i * 31 + i / 251 + key * 97) % 127); }

std::vector<char> letters(uint32_t key, size_t size) {
  std::vector<char> all(size);
  for (size_t i = 0; i < size; ++i) all[i] = letter(key, i);
  return all;
}

phx_options within(int64_t timeout_ms) {
  phx_options options{};
  options.struct_size = sizeof options;
  options.timeout_ms = timeout_ms;
  return options;
}

void send(phx_group *group, int to, uint32_t tag, const std::vector<char> &data) {
  CHECK_OK(phx_send(group, data.data(), data.size(), PHX_U8, to, tag, nullptr, nullptr));
}

phx_work *start_send(phx_group *group, int to, uint32_t tag, const std::vector<char> &data) {
  phx_work *work = nullptr;
  CHECK_OK(phx_send(group, data.data(), data.size(), PHX_U8, to, tag, nullptr, &work));
  CHECK(work != nullptr);
  return work;
}

// Receives into a buffer with a guard behind it.
void expect(phx_group *group, int from, uint32_t tag, uint32_t key, size_t size) {
  std::vector<char> data(size + 8, 'z');
  CHECK_OK(phx_recv(group, data.data(), size, PHX_U8, from, tag, nullptr, nullptr));
  for (size_t i = 0; i < size; ++i) CHECK(data[i] == letter(key, i));
  for (size_t i = size; i < data.size(); ++i) CHECK(data[i] == 'z');
}

phx_work *start_recv(phx_group *group, int from, uint32_t tag, std::vector<char> &data) {
  phx_work *work = nullptr;
  CHECK_OK(phx_recv(group, data.data(), data.size(), PHX_U8, from, tag, nullptr, &work));
  CHECK(work != nullptr);
  return work;
}

void wait(phx_work *work) {
  CHECK_OK(phx_work_wait(work, 0));
  CHECK_OK(phx_work_wait(work, 0));  // idempotent
  CHECK_OK(phx_work_test(work));
  phx_work_release(work);
}

phx_error_info last_info() {
  phx_error_info info{};
  info.struct_size = sizeof info;
  CHECK_OK(phx_last_error_info(&info));
  return info;
}

bool says(const char *words) { return std::strstr(phx_last_error(), words) != nullptr; }

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
    for (int32_t dtype = PHX_F16; dtype <= PHX_F8E5M2; ++dtype) {
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
        CHECK_OK(phx_group_barrier(group, 0));
        send(group, 1, 2, letters(9, kSize));
        send(group, 1, 3, letters(3, 10));
      } else {
        CHECK_OK(phx_group_barrier(group, 0));
        if (!first) expect(group, 0, 3, 3, 10);  // lies behind the large one, which is kept
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
    if (rank == 0)
      for (uint32_t tag = 0; tag < kMessages; ++tag) send(group, 1, tag, letters(tag, size(tag)));
    else
      for (uint32_t tag : order) expect(group, 0, tag, tag, size(tag));
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
        CHECK_OK(phx_send(group, mine, 2, PHX_I32, 0, 4, nullptr, nullptr));
      }
    } else {
      const int32_t own[2] = {0, 0};
      int next[4] = {0, 0, 0, 0};
      CHECK_OK(phx_send(group, own, 2, PHX_I32, 0, 4, nullptr, nullptr));
      for (int i = 0; i < 3 * kEach + 1; ++i) {
        int32_t got[2] = {-1, -1}, source = -2;
        phx_work *work = nullptr;
        CHECK_OK(phx_recv(group, got, 2, PHX_I32, PHX_ANY_RANK, 4, nullptr, &work));
        CHECK_OK(phx_work_wait(work, 0));
        CHECK_OK(phx_work_source(work, &source));
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
      CHECK_OK(phx_group_barrier(group, 0));
      wait(last);
      wait(named);
      wait(any);
      CHECK(a == letters(1, 3) && b == letters(2, 3) && c == letters(3, 3));
    } else {
      CHECK_OK(phx_group_barrier(group, 0));
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
        send(group, rank, 7, letters(1, bytes));
        expect(group, rank, 7, 1, bytes);
        std::vector<char> out(bytes);
        phx_work *receive = start_recv(group, PHX_ANY_RANK, 8, out);
        CHECK(phx_work_test(receive) == PHX_IN_PROGRESS);
        phx_work *work = start_send(group, rank, 8, letters(2, bytes));
        wait(work);
        int32_t source = -1;
        CHECK_OK(phx_work_wait(receive, 0));
        CHECK_OK(phx_work_source(receive, &source));
        CHECK(source == rank && out == letters(2, bytes));
        phx_work_release(receive);
      }
      CHECK_OK(phx_group_barrier(group, 0));  // a receive from any rank ends when all others have left
      phx_group_release(group);
    });
}

// ---- many at once

TEST(two_ranks_may_both_send_much_before_they_receive) {
  ranks::as_threads(2, [](int rank, phx_world *world) {
    phx_group *group = ranks::make_group(world);
    constexpr size_t kSize = size_t{8} << 20;
    send(group, 1 - rank, 1, letters(rank, kSize));
    expect(group, 1 - rank, 1, 1 - rank, kSize);
    const std::vector<char> more = letters(rank + 5, kSize);
    phx_work *work = start_send(group, 1 - rank, 2, more);
    while (phx_work_test(work) == PHX_IN_PROGRESS) std::this_thread::yield();  // a test loop is enough
    wait(work);
    expect(group, 1 - rank, 2, 6 - rank, kSize);
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
    send(group, 1 - rank, 2, letters(9, 1));  // lies behind it
    expect(group, 1 - rank, 2, 9, 1);
    CHECK(theirs == letters(1 - rank, kSize));
    CHECK_OK(phx_group_barrier(group, 0));
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
      phx_work_release(start_recv(group, 1, 1, out));
      phx_work_release(start_recv(group, PHX_ANY_RANK, 2, out));
    }
    CHECK_OK(phx_group_barrier(group, 0));
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
      CHECK_OK(phx_send(group, &mine, 1, PHX_I32, (rank + 1) % 3, i, nullptr, &work));
      CHECK_OK(phx_all_reduce(group, &sum, &sum, 1, PHX_I32, PHX_SUM, nullptr, nullptr));
      CHECK_OK(phx_recv(group, &token, 1, PHX_I32, (rank + 2) % 3, i, nullptr, nullptr));
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
        CHECK_OK(phx_group_barrier(waited, 0));  // rank 1 comes when it has all of it
      } else {
        expect(group, 0, 1, 4, kSize);
        CHECK_OK(phx_group_barrier(waited, 0));
      }
      if (work != nullptr) wait(work);
      if (rank == 0) {
        work = start_recv(group, 1, 2, theirs);
        CHECK_OK(phx_group_barrier(waited, 0));
        wait(work);
        CHECK(theirs == letters(5, kSize));
      } else {
        send(group, 0, 2, letters(5, kSize));  // returns while rank 0 waits for this rank's barrier
        CHECK_OK(phx_group_barrier(waited, 0));
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
        CHECK_OK(phx_all_reduce(group, in.data(), out.data(), in.size(), PHX_F32, PHX_SUM, nullptr, &work));
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

// ---- what goes wrong

TEST(wrong_arguments_of_messages_fail_before_anything_is_sent) {
  ranks::as_threads(2, [](int rank, phx_world *world) {
    phx_group *group = ranks::make_group(world);
    float a[8] = {};
    phx_work *work = nullptr;
    CHECK_FAILS(PHX_ERR_INVALID, "the group is NULL", phx_send(nullptr, a, 8, PHX_F32, 0, 1, nullptr, nullptr));
    CHECK_FAILS(PHX_ERR_INVALID, "the group is NULL", phx_recv(nullptr, a, 8, PHX_F32, 0, 1, nullptr, &work));
    CHECK_FAILS(PHX_ERR_INVALID, "group rank 2 in a group of 2",
                phx_send(group, a, 8, PHX_F32, 2, 1, nullptr, nullptr));
    CHECK_FAILS(PHX_ERR_INVALID, "group rank -2 in a group of 2",
                phx_recv(group, a, 8, PHX_F32, -2, 1, nullptr, nullptr));
    CHECK_FAILS(PHX_ERR_INVALID, "is for receives", phx_send(group, a, 8, PHX_F32, PHX_ANY_RANK, 1, nullptr, nullptr));
    CHECK_FAILS(PHX_ERR_INVALID, "the buffer is NULL",
                phx_send(group, nullptr, 8, PHX_F32, 1 - rank, 1, nullptr, nullptr));
    CHECK_FAILS(PHX_ERR_INVALID, "the buffer is NULL",
                phx_recv(group, nullptr, 8, PHX_F32, 1 - rank, 1, nullptr, &work));
    CHECK_FAILS(PHX_ERR_INVALID, "99 is no dtype", phx_send(group, a, 8, 99, 1 - rank, 1, nullptr, nullptr));
    CHECK_FAILS(PHX_ERR_INVALID, "more than memory",
                phx_recv(group, a, SIZE_MAX / 2, PHX_F32, 1 - rank, 1, nullptr, nullptr));
    phx_options options = within(-5);
    CHECK_FAILS(PHX_ERR_INVALID, "timeout_ms is -5", phx_send(group, a, 8, PHX_F32, 1 - rank, 1, &options, nullptr));
    options = within(0);
    options.flags = 1;
    CHECK_FAILS(PHX_ERR_INVALID, "flags must be 0", phx_recv(group, a, 8, PHX_F32, 1 - rank, 1, &options, &work));
    options.struct_size = 3;
    CHECK_FAILS(PHX_ERR_ABI, "struct_size", phx_send(group, a, 8, PHX_F32, 1 - rank, 1, &options, nullptr));
    CHECK(last_info().rank == rank);
    CHECK(work == nullptr);
    a[0] = 3;  // the group has not noticed any of it
    CHECK_OK(phx_send(group, a, 8, PHX_F32, 1 - rank, 1, nullptr, nullptr));
    a[0] = 0;
    CHECK_OK(phx_recv(group, a, 8, PHX_F32, 1 - rank, 1, nullptr, nullptr));
    CHECK(a[0] == 3);
    phx_group_release(group);
  });
}

TEST(a_send_and_its_receive_that_disagree_are_told_both_calls) {
  ranks::as_threads(2, [](int rank, phx_world *world) {
    for (bool kept : {false, true}) {  // whether the message came before its receive
      phx_group *group = ranks::make_group(world);
      std::vector<double> large(1 << 20);
      float a[16] = {};
      const char *sent = kept ? "send(float32, 3, tag 6)" : "send(float64, 1048576, tag 5)";
      if (rank == 0) {
        if (kept) {
          CHECK_OK(phx_send(group, a, 3, PHX_F32, 1, 6, nullptr, nullptr));
          CHECK_OK(phx_send(group, a, 4, PHX_F32, 1, 7, nullptr, nullptr));
        }
        CHECK_FAILS(PHX_ERR_MISMATCH, sent,
                    phx_send(group, large.data(), large.size(), PHX_F64, 1, 5, nullptr, nullptr));
        CHECK_FAILS(PHX_ERR_REVOKED, "same dtype and count", phx_send(group, a, 1, PHX_F32, 1, 5, nullptr, nullptr));
      } else {
        if (kept) CHECK_OK(phx_recv(group, a, 4, PHX_F32, 0, 7, nullptr, nullptr));
        const uint32_t tag = kept ? 6 : 5;
        phx_work *work = nullptr;
        CHECK_OK(phx_recv(group, a, 16, PHX_F32, 0, tag, nullptr, &work));
        CHECK_FAILS(PHX_ERR_MISMATCH, sent, phx_work_wait(work, 0));
        CHECK(says(kept ? "recv(float32, 16, tag 6)" : "recv(float32, 16, tag 5)") && says("rank 0 (pid"));
        phx_error_info error{};
        error.struct_size = sizeof error;
        CHECK_OK(phx_work_error(work, &error));
        CHECK(error.status == PHX_ERR_MISMATCH && error.rank == 1 && error.peer == 0);
        CHECK(std::strcmp(error.operation, "recv") == 0 && std::strcmp(error.group, "all") == 0);
        phx_work_release(work);
      }
      CHECK_FAILS(PHX_ERR_REVOKED, "revoked by an earlier failure", phx_group_barrier(group, 0));
      phx_group_release(group);
    }
  });
}

TEST(a_message_to_itself_must_agree_as_well) {
  ranks::as_threads(1, [](int, phx_world *world) {
    phx_group *group = ranks::make_group(world);
    int32_t x = 1;
    CHECK_OK(phx_send(group, &x, 1, PHX_I32, 0, 1, nullptr, nullptr));
    CHECK_FAILS(PHX_ERR_MISMATCH, "recv(float32, 1, tag 1)", phx_recv(group, &x, 1, PHX_F32, 0, 1, nullptr, nullptr));
    phx_group_release(group);
    group = ranks::make_group(world);
    phx_work *work = nullptr;
    CHECK_OK(phx_recv(group, &x, 1, PHX_F32, 0, 1, nullptr, &work));
    CHECK_FAILS(PHX_ERR_MISMATCH, "recv(float32, 1, tag 1)", phx_send(group, &x, 1, PHX_I32, 0, 1, nullptr, nullptr));
    CHECK_FAILS(PHX_ERR_MISMATCH, "send(int32, 1, tag 1)", phx_work_wait(work, 0));
    phx_work_release(work);
    phx_group_release(group);
  });
}

TEST(a_message_that_never_comes_is_named_at_the_deadline) {
  ranks::as_threads(2, [](int rank, phx_world *world) {
    for (int32_t from : {1, -1 /* PHX_ANY_RANK */}) {
      phx_group *group = ranks::make_group(world);
      int16_t x[5] = {}, y = 0;
      const phx_options options = within(50);
      if (rank == 1) CHECK_OK(phx_send(group, &y, 1, PHX_I16, 0, 8, nullptr, nullptr));
      CHECK_OK(phx_group_barrier(group, 0));
      if (rank == 0) {
        CHECK_FAILS(PHX_ERR_TIMEOUT, "after 50 ms rank 0 still waits for",
                    phx_recv(group, x, 5, PHX_I16, from, 9, &options, nullptr));
        CHECK(says("recv(int16, 5, tag 9)") && says("send(int16, 1, tag 8) from rank 1"));
        CHECK(says(from == 1 ? "rank 1 (pid" : "any rank"));
        CHECK(last_info().peer == from && std::strcmp(last_info().operation, "recv") == 0);
        CHECK_FAILS(PHX_ERR_REVOKED, "tag 9", phx_recv(group, x, 5, PHX_I16, from, 9, nullptr, nullptr));
      } else {
        CHECK_FAILS(PHX_ERR_TIMEOUT, "recv(int16, 5, tag 9)",  // told by rank 0
                    phx_recv(group, x, 5, PHX_I16, 0, 7, nullptr, nullptr));
      }
      phx_group_release(group);
    }
  });
}

TEST(a_message_that_is_never_received_is_named_at_the_deadline) {
  ranks::as_threads(2, [](int rank, phx_world *world) {
    phx_group *group = ranks::make_group(world);
    std::vector<char> large(size_t{4} << 20);
    if (rank == 0) {
      phx_work *work = start_send(group, 1, 3, large);
      CHECK_FAILS(PHX_ERR_TIMEOUT, "send(uint8, 4194304, tag 3)", phx_work_wait(work, 50));
      CHECK(says("rank 1 (pid") && says("of 4194304 bytes"));
      CHECK_FAILS(PHX_ERR_TIMEOUT, "tag 3", phx_work_wait(work, 50));  // final
      phx_work_release(work);
    } else {
      while (phx_world_check(world) == PHX_OK) std::this_thread::yield();
      CHECK_FAILS(PHX_ERR_TIMEOUT, "send(uint8, 4194304, tag 3)",
                  phx_recv(group, large.data(), large.size(), PHX_U8, 0, 3, nullptr, nullptr));
    }
    phx_group_release(group);
  });
}

TEST(a_peer_that_is_killed_ends_every_send_and_receive) {
  const std::vector<int> codes = ranks::as_processes(3, [](int rank, phx_world *world) {
    phx_group *group = ranks::make_group(world);
    int32_t pid = getpid(), pids[3] = {};
    CHECK_OK(phx_all_gather(group, &pid, pids, 1, PHX_I32, nullptr, nullptr));
    std::vector<char> large(size_t{4} << 20), out(100);
    const std::string expected = "rank 2 (pid " + std::to_string(pids[2]) + ") died";
    if (rank == 2) {
      CHECK_OK(phx_group_barrier(group, 0));
      raise(SIGKILL);
    }
    phx_work *works[] = {start_send(group, 2, 2, large), start_recv(group, 2, 3, out),
                         start_recv(group, PHX_ANY_RANK, 4, out), start_recv(group, 1 - rank, 5, out)};
    CHECK_OK(phx_group_barrier(group, 0));
    for (phx_work *work : works) {
      CHECK_FAILS(PHX_ERR_PEER_DEAD, expected.c_str(), phx_work_wait(work, 0));
      CHECK(last_info().peer == 2);
      phx_work_release(work);
    }
    CHECK_FAILS(PHX_ERR_REVOKED, "died", phx_recv(group, out.data(), 1, PHX_U8, 2, 1, nullptr, nullptr));
    phx_group_release(group);
  });
  CHECK(codes[0] == 0 && codes[1] == 0);
  CHECK(WIFSIGNALED(codes[2]) && WTERMSIG(codes[2]) == SIGKILL);
}

TEST(what_a_rank_sent_before_it_left_can_be_received_and_no_more) {
  ranks::as_threads(3, [](int rank, phx_world *world) {
    phx_group *group = ranks::make_group(world);
    const std::vector<char> unfinished(size_t{4} << 20);
    std::vector<char> out(10);
    if (rank == 1) {
      send(group, 0, 1, letters(1, 100));
      send(group, 0, 2, letters(2, 1000));
      phx_work_release(start_send(group, 0, 3, unfinished));
      CHECK_OK(phx_world_finalize(world));
    } else {
      while (phx_world_check(world) == PHX_OK) std::this_thread::yield();
      CHECK(says("has left"));
      if (rank == 0) {
        expect(group, 1, 2, 2, 1000);
        expect(group, PHX_ANY_RANK, 1, 1, 100);
        std::vector<char> large(unfinished.size());
        CHECK_FAILS(PHX_ERR_PEER_DEAD, "rank 1",
                    phx_recv(group, large.data(), large.size(), PHX_U8, 1, 3, nullptr, nullptr));
        CHECK(says("has left"));
        CHECK_FAILS(PHX_ERR_PEER_DEAD, "has left", phx_send(group, out.data(), 10, PHX_U8, 1, 9, nullptr, nullptr));
      }
      // The two that are left still talk to each other.
      send(group, 2 - rank, 4, letters(4, 100000));
      expect(group, PHX_ANY_RANK, 4, 4, 100000);
    }
    phx_group_release(group);
  });
}

TEST(a_receive_from_any_rank_ends_when_everybody_has_left_and_each_is_named) {
  ranks::as_threads(3, [](int rank, phx_world *world) {
    phx_group *group = ranks::make_group(world);
    char x = 0;
    if (rank == 0) {
      CHECK_FAILS(PHX_ERR_PEER_DEAD, "has left", phx_recv(group, &x, 1, PHX_U8, PHX_ANY_RANK, 1, nullptr, nullptr));
      for (int peer : {1, 2}) {
        const std::string name = "rank " + std::to_string(peer) + " (pid";
        CHECK_FAILS(PHX_ERR_PEER_DEAD, name.c_str(), phx_recv(group, &x, 1, PHX_U8, peer, 1, nullptr, nullptr));
        CHECK(last_info().peer == peer && says("has left"));
        CHECK_FAILS(PHX_ERR_PEER_DEAD, name.c_str(), phx_send(group, &x, 1, PHX_U8, peer, 1, nullptr, nullptr));
        CHECK(last_info().peer == peer && says("has left"));
      }
    } else {
      CHECK_OK(phx_world_finalize(world));
    }
    phx_group_release(group);
  });
}

TEST(revoke_ends_messages_that_wait_and_those_that_were_started) {
  ranks::as_threads(2, [](int rank, phx_world *world) {
    phx_group *group = ranks::make_group(world);
    std::vector<char> out(10), large(size_t{4} << 20);
    if (rank == 0) {
      phx_work *receive = start_recv(group, 1, 2, out), *work = start_send(group, 1, 2, large);
      CHECK_OK(phx_group_barrier(group, 0));
      CHECK_FAILS(PHX_ERR_REVOKED, "rank 1 revoked it: enough",
                  phx_recv(group, out.data(), 10, PHX_U8, 1, 1, nullptr, nullptr));
      CHECK_FAILS(PHX_ERR_REVOKED, "enough", phx_work_wait(receive, 0));
      CHECK_FAILS(PHX_ERR_REVOKED, "enough", phx_work_wait(work, 0));
      CHECK_FAILS(PHX_ERR_REVOKED, "enough", phx_work_test(work));
      phx_work_release(receive);
      phx_work_release(work);
    } else {
      CHECK_OK(phx_group_barrier(group, 0));
      CHECK_OK(phx_group_revoke(group, "enough"));
      CHECK_FAILS(PHX_ERR_REVOKED, "enough", phx_send(group, out.data(), 10, PHX_U8, 0, 1, nullptr, nullptr));
    }
    phx_group_release(group);
  });
}

// ---- hostile memory

struct Ring {
  std::vector<char> memory = std::vector<char>(sizeof(phx::RingHeader) + phx::kMinRingBytes + 64);
  char *base() { return memory.data() + (64 - reinterpret_cast<uintptr_t>(memory.data()) % 64) % 64; }
  phx::RecordHeader *record() { return reinterpret_cast<phx::RecordHeader *>(base() + sizeof(phx::RingHeader)); }
  phx::RingHeader *header() { return reinterpret_cast<phx::RingHeader *>(base()); }
};

TEST(a_ring_takes_records_until_it_is_full_and_gives_them_back_in_order) {
  Ring ring;
  phx::RingWriter writer;
  phx::RingReader reader;
  writer.open(ring.base(), phx::kMinRingBytes, false);
  reader.open(ring.base(), phx::kMinRingBytes, false);
  std::mt19937 random(1);
  const std::vector<char> data = letters(0, phx::kPieceBytes + 1000);
  uint64_t put = 0, got = 0;  // messages, each in pieces
  size_t written = 0, read = 0;
  const auto size = [&](uint64_t i) { return static_cast<size_t>(i * i * 37 % data.size()); };
  phx::Record record;
  CHECK(reader.peek(&record) == phx::RingResult::kNothing);
  for (int i = 0; i < 20000; ++i) {
    if (random() % 2 == 0) {
      size_t taken = 0;
      const phx::MessageHead head{static_cast<uint32_t>(put), PHX_U8, size(put)};
      const phx::RingResult result = writer.put(head, data.data(), written, size(put), &taken);
      CHECK(result != phx::RingResult::kBroken);
      CHECK(result == phx::RingResult::kOk || put > got);  // an empty ring has room
      if (result == phx::RingResult::kOk && (written += taken) == size(put)) ++put, written = 0;
    } else {
      const phx::RingResult result = reader.peek(&record);
      CHECK(result != phx::RingResult::kBroken);
      if (result != phx::RingResult::kOk) continue;
      CHECK(record.head.tag == static_cast<uint32_t>(got) && record.offset == read);
      CHECK(std::memcmp(record.data, data.data() + read, record.bytes) == 0);
      reader.release(record);
      if ((read += record.bytes) == size(got)) ++got, read = 0;
    }
  }
  CHECK(got > 1000);
}

TEST(a_ring_refuses_what_no_writer_and_no_reader_can_have_written) {
  const char byte = 1;
  size_t taken = 0;
  const phx::MessageHead head{1, PHX_U8, 1};
  phx::Record record;
  const auto broken = [&](auto spoil) {
    Ring ring;
    phx::RingWriter writer;
    phx::RingReader reader;
    writer.open(ring.base(), phx::kMinRingBytes, true);
    reader.open(ring.base(), phx::kMinRingBytes, true);
    CHECK(writer.put(head, &byte, 0, 1, &taken) == phx::RingResult::kOk);
    spoil(ring);
    return reader.peek(&record) == phx::RingResult::kBroken;
  };
  CHECK(!broken([](Ring &) {}));
  CHECK(broken([](Ring &ring) { ring.record()->flag = 77; }));
  CHECK(broken([](Ring &ring) { ring.record()->bytes = phx::kMinRingBytes; }));
  CHECK(broken([](Ring &ring) { ring.record()->bytes = 0xffffffffu; }));
  for (uint32_t lie : {5000u, 0x80000000u, 0xffffffffu}) {
    Ring ring;
    phx::RingWriter writer;
    writer.open(ring.base(), phx::kMinRingBytes, true);
    CHECK(writer.put(head, &byte, 0, 1, &taken) == phx::RingResult::kOk);
    ring.header()->taken = lie;
    const std::vector<char> large(phx::kPieceBytes);
    phx::RingResult result = phx::RingResult::kOk;
    for (int i = 0; i < 100 && result == phx::RingResult::kOk; ++i)
      result = writer.put({1, PHX_U8, large.size()}, large.data(), 0, large.size(), &taken);
    CHECK(result == phx::RingResult::kBroken);
  }
}

// The ring from rank 0 to rank 1 of the only group of this process, found in its mappings.
phx::RecordHeader *first_record_for_rank_1() {
  FILE *file = fopen("/proc/self/maps", "r");
  CHECK(file != nullptr);
  char line[512];
  phx::RecordHeader *found = nullptr;
  while (found == nullptr && fgets(line, sizeof line, file) != nullptr) {
    unsigned long base = 0;
    if (std::strstr(line, "phalanx-group") == nullptr || std::sscanf(line, "%lx-", &base) != 1) continue;
    const auto *header = reinterpret_cast<const phx::ControlHeader *>(base);
    if (header->magic != phx::kControlMagic || header->group_rank != 1) continue;
    const size_t area = phx::lane_offset(header->channels, header->slot_bytes);
    found = reinterpret_cast<phx::RecordHeader *>(base + area + sizeof(phx::MessageArea) + sizeof(phx::RingHeader));
  }
  fclose(file);
  CHECK(found != nullptr);
  return found;
}

TEST(broken_shared_memory_fails_the_group_and_nothing_else) {
  const auto spoil = [](auto write) {
    ranks::as_threads(2, [&](int rank, phx_world *world) {
      phx_group *group = ranks::make_group(world);
      char x = 0;
      if (rank == 0) {
        phx::RecordHeader *record = first_record_for_rank_1();
        record->bytes = 1;
        record->head = {5, PHX_U8, 1};
        record->offset = 0;
        write(record);
        uint32_t flag = 1;
        if (record->flag.load() != 0) flag = record->flag.load();
        record->flag.store(flag, std::memory_order_release);
        auto *area =
            reinterpret_cast<phx::MessageArea *>(reinterpret_cast<char *>(record) - sizeof(phx::RingHeader)) - 1;
        area->doorbell.fetch_add(1);  // rank 1 may sleep by now
        phx::wake_all(area->doorbell);
      }
      const phx_status status = phx_recv(group, &x, 1, PHX_U8, 1 - rank, 5, nullptr, nullptr);
      CHECK(status == PHX_ERR_INTERNAL && says("the memory shared with rank 0 (pid") && says("is broken"));
      CHECK_FAILS(PHX_ERR_REVOKED, "rank 0", phx_group_barrier(group, 0));
      phx_group_release(group);
    });
  };
  spoil([](phx::RecordHeader *record) { record->flag = 12345; });
  spoil([](phx::RecordHeader *record) { record->bytes = 1u << 20; });
  spoil([](phx::RecordHeader *record) { record->bytes = 2; });
  spoil([](phx::RecordHeader *record) { record->bytes = 0; });
  spoil([](phx::RecordHeader *record) { record->offset = 1; });
  spoil([](phx::RecordHeader *record) { record->head.dtype = 99; });
  spoil([](phx::RecordHeader *record) { record->head.count = UINT64_MAX; });
}

}  // namespace

int main(int argc, char **argv) { return check::run_all(argc, argv); }
