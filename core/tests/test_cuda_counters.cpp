// Counters in memory of GPUs go on past 2^31 and 2^32: collectives, small all_reduces, signals, barriers and messages
// do what they do at the beginning. On the driver of the host, or on the one of fake_cuda/ (CTest gives that one).
#include <chrono>
#include <cstring>
#include <thread>

#include "gpu_group.h"

using namespace gpu_group;

namespace {

constexpr uint64_t kHalf = uint64_t{1} << 31, kWhole = uint64_t{1} << 32;

// Groups that are made while it lives begin to count at `first`.
class Beginning {
 public:
  explicit Beginning(uint64_t first) { setenv("PHALANX_FIRST_COUNT", std::to_string(first).c_str(), 1); }
  ~Beginning() { unsetenv("PHALANX_FIRST_COUNT"); }
};

}  // namespace

TEST(every_collective_passes_the_end_of_the_counters) {
  gpu::needs_driver();
  for (const uint64_t end : {kHalf, kWhole})
    for (const int n : {2, 3}) {
      const Beginning beginning(end - 3);
      ranks::as_threads(n, [](int, phx_world *world) {
        const size_t kinds = collectives(1, 0, 1, PHX_DTYPE_F32, PHX_OP_SUM, 0).size();
        for (size_t kind = 0; kind < kinds; ++kind) {
          const Rank me(world);  // groups of its own, so that it is the one that passes the end
          for (int turn = 0; turn < 6; ++turn) {
            const size_t count = turn % 2 == 0 ? 300 : 40;
            const Collective one = collectives(me.size(), me.self(), count, PHX_DTYPE_I32, PHX_OP_SUM, 1)[kind];
            expect_as_on_host(me, one, PHX_DTYPE_I32, 0, turn % 3 == 1, 7 * turn + static_cast<int>(kind));
          }
        }
      });
    }
}

// They are sent beside a number of the launch, which says to a rank that is early whether they are there.
TEST(small_all_reduces_wait_for_a_late_rank_past_the_end_of_the_counters) {
  gpu::needs_driver();
  for (const uint64_t end : {kHalf, kWhole}) {
    const Beginning beginning(end - 3);
    ranks::as_threads(2, [](int rank, phx_world *world) {
      const Rank me(world);
      phx_symm *symm = nullptr;
      CHECK_OK(phx_symm_alloc(me.group(), &kGpu, 4096, 0, &symm));
      const gpu::Options options = me.options();
      for (unsigned char turn = 1; turn <= 8; ++turn) {
        Gpu().write(phx_symm_buffer(symm, rank), Bytes(64, static_cast<unsigned char>(turn + rank)));
        CHECK_OK(phx_barrier(me.hosts(), nullptr, nullptr));
        if (turn % 2 == rank) std::this_thread::sleep_for(std::chrono::milliseconds(10));
        CHECK_OK(phx_symm_all_reduce(symm, 0, me.out(), 64, PHX_DTYPE_U8, PHX_OP_SUM, &options, nullptr));
        CHECK(me.read(me.out(), 64) == Bytes(64, static_cast<unsigned char>(2 * turn + 1)));
      }
      CHECK_OK(phx_barrier(me.hosts(), nullptr, nullptr));
      phx_symm_release(symm);
    });
  }
}

TEST(signals_and_barriers_on_streams_pass_the_end_of_the_counters) {
  gpu::needs_driver();
  for (const uint64_t end : {kHalf, kWhole}) {
    const Beginning beginning(end - 3);
    ranks::as_threads(2, [](int rank, phx_world *world) {
      const OwnStream stream;
      phx_group *group = ranks::make_group(world);
      phx_symm *symm = nullptr;
      CHECK_OK(phx_symm_alloc(group, &kGpu, 4096, 0, &symm));
      char *const theirs = static_cast<char *>(phx_symm_buffer(symm, 1 - rank));
      for (unsigned char round = 1; round <= 8; ++round) {
        Gpu().write(theirs, Bytes(16, static_cast<unsigned char>(round * 10 + rank)));
        CHECK_OK(phx_symm_enqueue_put_signal(symm, 1 - rank, 3, stream.get()));
        CHECK_OK(phx_symm_enqueue_wait_signal(symm, 1 - rank, 3, 20000, stream.get()));
        stream.wait();
        CHECK(Gpu().read(phx_symm_buffer(symm, rank), 16) ==
              Bytes(16, static_cast<unsigned char>(round * 10 + 1 - rank)));
        CHECK_OK(phx_symm_enqueue_barrier(symm, 1, 20000, stream.get()));
        stream.wait();
      }
      CHECK_OK(phx_barrier(group, nullptr, nullptr));
      phx_symm_release(symm);
      phx_group_release(group);
    });
  }
}

TEST(messages_pass_the_end_of_the_counters) {
  gpu::needs_driver();
  ranks::Options options;
  options.staging_bytes = 256;  // chunks of 64 bytes
  for (const uint64_t end : {kHalf, kWhole}) {
    const Beginning beginning(end - 5);
    ranks::as_threads(
        2,
        [](int rank, phx_world *world) {
          const Rank me(world);
          const gpu::Options on_stream = me.options();
          for (int turn = 0; turn < 8; ++turn)
            for (const size_t bytes : {size_t{30}, size_t{1000}, size_t{20000}}) {
              const Bytes given = random_input(turn + static_cast<int>(bytes), PHX_DTYPE_U8, bytes);
              if (turn % 2 == rank) {
                Gpu().write(me.in(), given);
                CHECK_OK(phx_send(me.group(), me.in(), bytes, PHX_DTYPE_U8, 1 - rank, 4, &on_stream, nullptr));
                me.stream().wait();
              } else {
                CHECK_OK(phx_recv(me.group(), me.out(), bytes, PHX_DTYPE_U8, 1 - rank, 4, &on_stream, nullptr));
                CHECK(me.read(me.out(), bytes) == given);
              }
            }
          CHECK_OK(phx_barrier(me.hosts(), nullptr, nullptr));
        },
        options);
  }
}

int main(int argc, char **argv) { return check::run_all(argc, argv); }
