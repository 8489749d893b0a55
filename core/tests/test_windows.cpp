// Windows: ranks write into and read from the memory of others, on one host and on several. Ranks are threads, and
// between hosts the carrier is that of the tests (test_carrier_ucx has UCX).
#include <atomic>
#include <chrono>
#include <memory>
#include <thread>

#include "hub_group.h"
#include "members.h"

namespace {

const Shape kShapes[] = {{0, 0}, {0, 1}, {0, 0, 1, 1}, {0, 1, 0}, {0, 1, 2}};

void meet(phx_group *group) { CHECK_OK(phx_barrier(group, nullptr, nullptr)); }

// A block of each rank, which is its window.
struct Memory {
  Memory(phx_group *group, phx_world *of, size_t size) : world(of), bytes(size) {
    CHECK_OK(phx_mem_alloc(world, nullptr, bytes, &base));
    CHECK_OK(phx_window_create(group, nullptr, base, bytes, 0, &window));
  }
  ~Memory() {
    phx_window_release(window);
    phx_mem_free(world, base);
  }
  Memory(const Memory &) = delete;
  Memory &operator=(const Memory &) = delete;
  const unsigned char *data() const { return static_cast<unsigned char *>(base); }
  phx_world *world;
  size_t bytes;
  void *base = nullptr;
  phx_window *window = nullptr;
};

std::vector<unsigned char> filled(size_t bytes, unsigned seed) {
  std::vector<unsigned char> values(bytes);
  for (size_t i = 0; i < bytes; ++i) values[i] = static_cast<unsigned char>(seed * 131 + i * 7 + (i >> 8));
  return values;
}

// On both sides of what fits into a record.
constexpr size_t kSizes[] = {0, 1, 1000, 8191, 8192, 8193, 70000, size_t{1} << 20};

std::string text_of_last_error() { return phx_last_error(); }

}  // namespace

TEST(what_was_put_is_there_after_its_signal) {
  for (const Shape &shape : kShapes) {
    for (uint64_t seed = 0; seed < 4; ++seed) {
      HubOptions hub;
      hub.seed = seed;
      with_hosts(shape, hub, [&](int rank, phx_group *group, phx_world *world) {
        const int n = static_cast<int>(shape.size());
        const size_t part = kSizes[std::size(kSizes) - 1] + 64;
        Memory memory(group, world, static_cast<size_t>(n) * part);
        const auto check = [&](int from, size_t bytes, unsigned value) {
          const auto expected = filled(bytes, value);
          const unsigned char *const came = memory.data() + static_cast<size_t>(from) * part + 3;
          CHECK(std::equal(expected.begin(), expected.end(), came));
          CHECK(came[bytes] == 0 || bytes != kSizes[std::size(kSizes) - 1]);  // and not more
        };
        unsigned turn = 0;
        for (const size_t bytes : kSizes) {
          ++turn;
          const auto value = [&](int from) { return turn * 16 + static_cast<unsigned>(from); };
          auto mine = filled(bytes, value(rank));
          for (int to = 0; to < n; ++to)  // itself included
            CHECK_OK(phx_window_put(memory.window, to, static_cast<size_t>(rank) * part + 3, mine.data(), bytes, 1, 0));
          std::fill(mine.begin(), mine.end(), 0xee);  // it was taken
          for (int from = 0; from < n; ++from) {
            CHECK_OK(phx_window_wait_signal(memory.window, from, 0));
            check(from, bytes, value(from));
            uint32_t left = 9;
            CHECK_OK(phx_window_get_signals(memory.window, from, &left));
            CHECK(left == 0);
          }
          meet(group);
          for (int of = 0; of < n; ++of) {
            std::vector<unsigned char> got(bytes);
            const int from = (of + 1) % n;
            CHECK_OK(phx_window_get(memory.window, of, static_cast<size_t>(from) * part + 3, got.data(), bytes, 0));
            CHECK(got == filled(bytes, value(from)));
          }
          meet(group);
        }
      });
    }
  }
}

// Every put overwrites the one before it, so a signal that comes before its data, or before that of an earlier put,
// shows.
TEST(a_signal_never_comes_before_what_was_put_before_it) {
  for (const Shape &shape : {Shape{0, 1}, Shape{0, 0, 1}}) {
    HubOptions hub;
    hub.seed = 5;
    with_hosts(shape, hub, [&](int rank, phx_group *group, phx_world *world) {
      const int n = static_cast<int>(shape.size()), target = n - 1;
      const size_t part = 40000;
      Memory memory(group, world, static_cast<size_t>(n) * part);
      const int rounds = 200 / members::kThinner;
      for (int round = 0; round < rounds; ++round) {
        if (rank != target) {
          // Large, small, then a signal alone: it counts for both.
          const std::vector<unsigned char> large(30000, static_cast<unsigned char>(round + rank)), small(100, 77);
          const size_t at = static_cast<size_t>(rank) * part;
          CHECK_OK(phx_window_put(memory.window, target, at, large.data(), large.size(), 0, 0));
          CHECK_OK(phx_window_put(memory.window, target, at + 500, small.data(), small.size(), 0, 0));
          CHECK_OK(phx_window_put(memory.window, target, 0, nullptr, 0, 1, 0));
        } else {
          for (int from = 0; from < target; ++from) {
            CHECK_OK(phx_window_wait_signal(memory.window, from, 0));
            const unsigned char *const came = memory.data() + static_cast<size_t>(from) * part;
            for (size_t i = 0; i < 30000; ++i)
              if (came[i] != (i >= 500 && i < 600 ? 77 : static_cast<unsigned char>(round + from)))
                check::failed(__FILE__, __LINE__, "byte " + std::to_string(i) + " in round " + std::to_string(round));
          }
        }
        meet(group);
      }
    });
  }
}

TEST(many_puts_without_a_wait_are_all_counted) {
  with_hosts({0, 1}, {}, [&](int rank, phx_group *group, phx_world *world) {
    Memory memory(group, world, 16384);
    const uint32_t count = 3000;  // more than there is credit for
    const auto values = filled(4000, 3);
    if (rank == 0) {
      for (uint32_t i = 0; i < count; ++i)
        CHECK_OK(phx_window_put(memory.window, 1, i % 100, values.data(), values.size(), 1, 0));
      CHECK_OK(phx_window_flush(memory.window, 0));
      int32_t done = 1;
      CHECK_OK(phx_send(group, &done, 1, PHX_DTYPE_I32, 1, 0, nullptr, nullptr));
    } else {
      int32_t done = 0;
      CHECK_OK(phx_recv(group, &done, 1, PHX_DTYPE_I32, 0, 0, nullptr, nullptr));
      uint32_t come = 0;
      CHECK_OK(phx_window_get_signals(memory.window, 0, &come));
      CHECK(come == count);  // rank 0 has flushed
      for (uint32_t i = 0; i < count; ++i) CHECK_OK(phx_window_wait_signal(memory.window, 0, 0));
      CHECK(phx_window_wait_signal(memory.window, 0, 10) == PHX_ERR_TIMEOUT);
      CHECK(text_of_last_error().find("rank 1 still waits for a signal of rank 0") != std::string::npos);
      CHECK(std::equal(values.begin(), values.end(), memory.data() + (count - 1) % 100));
    }
    meet(group);  // the timeout has not revoked the group
  });
}

// Rank 1 calls nothing until rank 0 has put, flushed and read.
TEST(a_target_need_not_call_anything) {
  std::atomic<bool> done{false};
  HubOptions hub;
  with_hosts({0, 1}, hub, [&](int rank, phx_group *group, phx_world *world) {
    Memory memory(group, world, size_t{4} << 20);
    if (rank == 1) {
      while (!done) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    } else {
      const auto values = filled(memory.bytes, 9);
      std::vector<unsigned char> back(memory.bytes);
      CHECK_OK(phx_window_put(memory.window, 1, 0, values.data(), values.size(), 1, 0));
      CHECK_OK(phx_window_flush(memory.window, 0));
      CHECK_OK(phx_window_get(memory.window, 1, 0, back.data(), back.size(), 0));
      CHECK(back == values);
      CHECK_OK(phx_window_get(memory.window, 1, 5, back.data(), 10, 0));
      CHECK(std::equal(back.begin(), back.begin() + 10, values.begin() + 5));
      done = true;
    }
    meet(group);
    if (rank == 1) CHECK_OK(phx_window_wait_signal(memory.window, 0, 0));
    if (rank == 1) CHECK(std::equal(memory.data(), memory.data() + memory.bytes, filled(memory.bytes, 9).begin()));
  });
}

TEST(ranks_and_threads_put_at_the_same_time) {
  for (const Shape &shape : {Shape{0, 1, 2}, Shape{0, 0, 1, 1}}) {
    with_hosts(shape, {}, [&](int rank, phx_group *group, phx_world *world) {
      const int n = static_cast<int>(shape.size()), threads = 3, puts = 40;
      const size_t part = 20000;
      Memory memory(group, world, part * static_cast<size_t>(n * threads));
      std::vector<std::thread> started;
      std::atomic<int> failures{0};
      for (int thread = 0; thread < threads; ++thread)
        started.emplace_back([&, thread] {
          for (int turn = 0; turn < puts; ++turn)
            for (int to = 0; to < n; ++to) {
              const size_t bytes = (turn % 2) != 0 ? part : 300;
              const auto values = filled(bytes, static_cast<unsigned>(rank * 50 + thread * 7 + turn));
              const size_t at = part * static_cast<size_t>(rank * threads + thread);
              if (phx_window_put(memory.window, to, at, values.data(), bytes, 1, 0) != PHX_OK) ++failures;
            }
        });
      for (int from = 0; from < n; ++from)
        for (int turn = 0; turn < threads * puts; ++turn) CHECK_OK(phx_window_wait_signal(memory.window, from, 0));
      for (auto &thread : started) thread.join();
      CHECK(failures == 0);
      for (int from = 0; from < n; ++from)
        for (int thread = 0; thread < threads; ++thread) {
          const auto last = filled(part, static_cast<unsigned>(from * 50 + thread * 7 + puts - 1));
          CHECK(std::equal(last.begin(), last.end(),
                           memory.data() + part * static_cast<size_t>(from * threads + thread)));
        }
      meet(group);
    });
  }
}

TEST(windows_of_ranks_may_differ_and_each_has_its_own_signals) {
  with_hosts({0, 1}, {}, [&](int rank, phx_group *group, phx_world *world) {
    Memory memory(group, world, 1000);
    phx_window *small = nullptr;
    CHECK_OK(phx_window_create(group, nullptr, static_cast<char *>(memory.base) + 100 * (rank + 1),
                               static_cast<size_t>(10 + rank), 0, &small));
    const int peer = 1 - rank;
    CHECK_OK(phx_window_put(small, peer, static_cast<size_t>(9 + peer), "x", 1, 1, 0));
    CHECK_OK(phx_window_wait_signal(small, peer, 0));
    CHECK(memory.data()[100 * (rank + 1) + 9 + rank] == 'x');
    uint32_t come = 9;
    CHECK_OK(phx_window_get_signals(memory.window, peer, &come));
    CHECK(come == 0);
    CHECK(phx_window_put(small, peer, static_cast<size_t>(10 + peer), "x", 1, 1, 0) == PHX_ERR_INVALID);
    meet(group);
    phx_window_release(small);
  });
}

TEST(wrong_arguments_are_refused_and_send_nothing) {
  for (const Shape &shape : {Shape{0, 0}, Shape{0, 1}}) {
    with_hosts(shape, {}, [&](int rank, phx_group *group, phx_world *world) {
      Memory memory(group, world, 100);
      const int peer = 1 - rank;
      char data[200] = {};
      phx_window *const w = memory.window;
      CHECK(phx_window_put(w, 2, 0, data, 1, 1, 0) == PHX_ERR_INVALID);
      CHECK(phx_window_put(w, -1, 0, data, 1, 1, 0) == PHX_ERR_INVALID);
      CHECK(phx_window_put(w, peer, 0, data, 101, 1, 0) == PHX_ERR_INVALID);
      CHECK(text_of_last_error().find("101 bytes at offset 0 end beyond the window of rank") != std::string::npos);
      CHECK(phx_window_put(w, peer, 100, data, 1, 1, 0) == PHX_ERR_INVALID);
      CHECK(phx_window_put(w, peer, SIZE_MAX, data, 2, 1, 0) == PHX_ERR_INVALID);
      CHECK(phx_window_put(w, peer, 0, nullptr, 1, 1, 0) == PHX_ERR_INVALID);
      CHECK(phx_window_put(w, peer, 0, data, 1, 1, -1) == PHX_ERR_INVALID);
      CHECK(phx_window_put(nullptr, peer, 0, data, 1, 1, 0) == PHX_ERR_INVALID);
      CHECK(phx_window_get(w, peer, 1, data, 100, 0) == PHX_ERR_INVALID);
      CHECK(phx_window_get(w, peer, 0, nullptr, 1, 0) == PHX_ERR_INVALID);
      CHECK(phx_window_wait_signal(w, 2, 0) == PHX_ERR_INVALID);
      CHECK(phx_window_get_signals(w, 2, nullptr) == PHX_ERR_INVALID);
      CHECK(phx_window_memory(w, 2) == nullptr);
      CHECK((phx_window_memory(w, peer) != nullptr) == (shape[0] == shape[1]));
      if (shape[0] != shape[1]) {
        phx_error_info info = PHX_ERROR_INFO_INIT;
        CHECK_OK(phx_last_error_info(&info));
        CHECK(info.status == PHX_ERR_UNSUPPORTED);
        CHECK(text_of_last_error().find("use phx_window_get and phx_window_put") != std::string::npos);
      }
      CHECK(phx_window_memory(w, rank) == memory.base);
      meet(group);
      for (const int from : {0, 1}) {
        uint32_t come = 9;
        CHECK_OK(phx_window_get_signals(w, from, &come));
        CHECK(come == 0);
      }
      meet(group);
      phx_window_release(nullptr);
    });
  }
}

TEST(a_window_that_one_rank_refuses_fails_on_all) {
  for (const Shape &shape : {Shape{0, 0}, Shape{0, 1}}) {
    std::atomic<int> told{0};
    with_hosts(shape, {}, [&](int rank, phx_group *group, phx_world *world) {
      void *base = nullptr;
      CHECK_OK(phx_mem_alloc(world, nullptr, 100, &base));
      phx_window *window = nullptr;
      char ordinary[100];
      const phx_status status = phx_window_create(group, nullptr, rank == 0 ? ordinary : base, 100, 0, &window);
      CHECK(status == (rank == 0 ? PHX_ERR_NOT_FOUND : PHX_ERR_MISMATCH));
      CHECK(text_of_last_error().find("is not memory that this rank can share") != std::string::npos);
      CHECK(window == nullptr);
      ++told;
      while (told != 2) std::this_thread::yield();  // who leaves at once is told of as one that left
      CHECK_OK(phx_mem_free(world, base));
    });
  }
}

// Rank 0 goes on while rank 1 releases: what comes afterwards is dropped, and a get says so.
TEST(a_window_may_be_released_while_others_put) {
  for (uint64_t seed = 0; seed < 8; ++seed) {
    HubOptions hub;
    hub.seed = seed;
    with_hosts({0, 1}, hub, [&](int rank, phx_group *group, phx_world *world) {
      auto memory = std::make_unique<Memory>(group, world, 100000);
      auto other = std::make_unique<Memory>(group, world, 100);
      const auto values = filled(memory->bytes, 1);
      if (rank == 0) {
        for (int turn = 0; turn < 30; ++turn) {
          CHECK_OK(phx_window_put(memory->window, 1, 0, values.data(), turn % 2 == 0 ? values.size() : 100, 1, 0));
          if (turn == 5) CHECK_OK(phx_send(group, &turn, 1, PHX_DTYPE_I32, 1, 0, nullptr, nullptr));
        }
        CHECK_OK(phx_window_flush(memory->window, 0));
        meet(group);
        char back[50000];
        CHECK(phx_window_get(memory->window, 1, 0, back, 10, 0) == PHX_ERR_NOT_FOUND);
        CHECK(phx_window_get(memory->window, 1, 0, back, sizeof back, 0) == PHX_ERR_NOT_FOUND);
        CHECK(text_of_last_error().find("has released the window") != std::string::npos);
      } else {
        int turn = 0;
        CHECK_OK(phx_recv(group, &turn, 1, PHX_DTYPE_I32, 0, 0, nullptr, nullptr));
        memory.reset();
        meet(group);
      }
      CHECK_OK(phx_window_put(other->window, 1 - rank, 0, "abc", 3, 1, 0));  // another window goes on
      CHECK_OK(phx_window_wait_signal(other->window, 1 - rank, 0));
      CHECK(other->data()[2] == 'c');
      meet(group);
    });
  }
}

TEST(calls_on_a_group_that_was_revoked_end) {
  for (const Shape &shape : {Shape{0, 1}, Shape{0, 0, 1}}) {
    std::atomic<int> met{0};
    with_hosts(shape, {}, [&](int rank, phx_group *group, phx_world *world) {
      const int last = static_cast<int>(shape.size()) - 1;
      Memory memory(group, world, 100000);
      meet(group);
      ++met;
      while (met <= last) std::this_thread::yield();  // or the barrier of another rank could still be under way
      if (rank == last) CHECK_OK(phx_group_revoke(group, "enough"));
      for (int from = 0; from <= last; ++from) {  // of ranks of this host, too
        CHECK(phx_window_wait_signal(memory.window, from, 0) == PHX_ERR_REVOKED);
        CHECK(text_of_last_error().find("enough") != std::string::npos);
      }
      const std::vector<char> values(memory.bytes);
      if (rank != last) {
        CHECK(phx_window_put(memory.window, last, 0, values.data(), values.size(), 1, 0) == PHX_ERR_REVOKED);
        CHECK(phx_window_get(memory.window, last, 0, std::vector<char>(10).data(), 10, 0) == PHX_ERR_REVOKED);
      }
    });
  }
}

TEST(a_lost_connection_is_named) {
  for (uint64_t seed = 0; seed < 20; ++seed) {
    Hub hub({seed});
    std::atomic<int> met{0};
    ranks::Options options;
    options.host_ids = {1, 2};
    options.timeout_ms = 10000;
    options.prepare = [&hub](phx_world *world) { CHECK_OK(phx_world_set_carrier(world, hub_carrier_ops(), &hub)); };
    ranks::as_threads(
        2,
        [&](int rank, phx_world *world) {
          phx_group *group = ranks::make_group(world);
          {
            Memory memory(group, world, 100000);
            meet(group);
            ++met;
            while (met != 2) std::this_thread::yield();
            const std::vector<char> values(memory.bytes);
            phx_status status = PHX_OK;
            if (rank == 0) hub.lose_all();
            for (int turn = 0; turn < 50 && status == PHX_OK; ++turn) {
              status = phx_window_put(memory.window, 1 - rank, 0, values.data(), values.size(), 1, 0);
              if (status == PHX_OK) status = phx_window_flush(memory.window, 0);
            }
            CHECK(status == PHX_ERR_PEER_DEAD || status == PHX_ERR_REVOKED);
          }
          phx_group_release(group);
        },
        options);
    hub.check();
  }
}

int main(int argc, char **argv) { return check::run_all(argc, argv); }
