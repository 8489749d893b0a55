// Messages between memory of GPUs: what arrives, in which order, what is refused, and how waits end. On the driver of
// the host, or on the one of fake_cuda/ (CTest gives that one).
#include <csignal>
#include <cstring>

#include "gpu/message_ring.h"
#include "gpu_group.h"

using namespace gpu_group;

namespace {

constexpr size_t kChunk = 64;                                            // of `small` worlds
constexpr size_t kRing = phx::cuda::kLanes * phx::cuda::kDeep * kChunk;  // as much as one has room for
constexpr size_t kSizes[] = {0,    1,         7,         16,    17,        64,          65,        kChunk * 4, 1000,
                             1024, kRing / 2, kRing - 1, kRing, kRing + 1, kRing + 100, 3 * kRing, 20000,      65536};

// Short chunks, so that short messages take many.
ranks::Options small() {
  ranks::Options options;
  options.staging_bytes = 4 * kChunk;
  return options;
}

Bytes content(int from, int to, size_t number, size_t bytes) {
  return random_input(from + 10 * to + 100 * static_cast<int>(number), PHX_DTYPE_U8, bytes);
}

phx_message message(int32_t kind, void *buffer, size_t bytes, int peer, uint32_t tag = 0) {
  return {sizeof(phx_message), kind, buffer, bytes, PHX_DTYPE_U8, peer, tag, 0};
}
phx_message sends(const void *buffer, size_t bytes, int peer, uint32_t tag = 0) {
  return message(PHX_MESSAGE_SEND, const_cast<void *>(buffer), bytes, peer, tag);
}
phx_message receives(void *buffer, size_t bytes, int peer, uint32_t tag = 0) {
  return message(PHX_MESSAGE_RECV, buffer, bytes, peer, tag);
}

phx_status send(const Rank &me, const void *from, size_t bytes, int peer, uint32_t tag = 0,
                int64_t timeout_ms = 20000) {
  const gpu::Options options = me.options(timeout_ms);
  return phx_send(me.group(), from, bytes, PHX_DTYPE_U8, peer, tag, &options, nullptr);
}
phx_status recv(const Rank &me, void *to, size_t bytes, int peer, uint32_t tag = 0, int64_t timeout_ms = 20000) {
  const gpu::Options options = me.options(timeout_ms);
  return phx_recv(me.group(), to, bytes, PHX_DTYPE_U8, peer, tag, &options, nullptr);
}
phx_status batch(const Rank &me, const std::vector<phx_message> &messages, const gpu::Options &options) {
  return phx_messages(me.group(), messages.data(), messages.size(), &options);
}
phx_status batch(const Rank &me, const std::vector<phx_message> &messages) { return batch(me, messages, me.options()); }

void write(void *to, const Bytes &bytes) {
  if (!bytes.empty()) Gpu().write(to, bytes);
}

// Rank 0 sends to rank 1, which gets it, and nothing beside it.
void expect_sizes(int rank, phx_world *world) {
  const Rank me(world);
  for (const size_t shift : {size_t{0}, size_t{5}})  // of both, so that nothing is aligned
    for (const size_t bytes : kSizes) {
      const Bytes given = content(0, 1, shift, bytes);
      if (rank == 0) {
        write(me.in() + shift, given);
        CHECK_OK(send(me, me.in() + shift, bytes, 1, 7));
        me.stream().wait();
        continue;
      }
      Bytes wanted(64 + bytes + 64, 0xa5);
      write(me.out(), wanted);
      CHECK_OK(recv(me, me.out() + 48 + shift, bytes, 0, 7));
      if (bytes != 0) std::memcpy(wanted.data() + 48 + shift, given.data(), bytes);
      if (me.read(me.out(), wanted.size()) != wanted)
        check::failed(__FILE__, __LINE__, "a message of " + std::to_string(bytes) + " bytes is not what was sent");
    }
  CHECK_OK(phx_barrier(me.hosts(), nullptr, nullptr));
}

}  // namespace

// First: a forked child must find a driver that was not started.
TEST(a_message_arrives_in_another_process) {
  if (gpu::symbol<int()>("cuInit") == nullptr) check::skip("libcuda.so.1");
  ranks::all_zero(ranks::as_processes(2, expect_sizes, small()));
}

TEST(kernels_end_when_the_other_rank_dies) {
  if (gpu::symbol<int()>("cuInit") == nullptr) check::skip("libcuda.so.1");
  for (const int what : {0, 1, 2}) {
    const std::vector<int> codes = ranks::as_processes(
        2,
        [&](int rank, phx_world *world) {
          const Rank me(world);
          const std::vector<phx_message> both = {receives(me.out(), 10, 1 - rank), sends(me.in(), 10, 1 - rank)};
          if (what != 2) CHECK_OK(batch(me, both));
          me.stream().wait();
          CHECK_OK(phx_barrier(me.hosts(), nullptr, nullptr));
          if (rank == 1) raise(SIGKILL);
          const phx_status status =
              what == 1 ? send(me, me.in(), 2 * kRing, 1, 0, 60000) : recv(me, me.out(), 10, 1, 0, 60000);
          CHECK(status == PHX_OK || status == PHX_ERR_PEER_DEAD);
          me.stream().wait();  // the test's own limit is less than the timeout
          const phx_error_info info = me.failure();
          CHECK(info.status == PHX_ERR_PEER_DEAD && info.peer == 1);
          Gpu().write(me.in(), Bytes(100, 3));  // the GPU can be used
          CHECK(Gpu().read(me.in(), 100) == Bytes(100, 3));
        },
        small());
    CHECK(codes[0] == 0 && WIFSIGNALED(codes[1]));
  }
}

// M8
TEST(a_message_of_any_size_arrives) {
  gpu::needs_driver();
  ranks::as_threads(2, expect_sizes, small());
}

TEST(a_large_message_arrives_through_chunks_as_large_as_they_get) {
  gpu::needs_driver();
  constexpr size_t kBytes = (size_t{5} << 20) + 3;
  ranks::as_threads(2, [](int rank, phx_world *world) {
    const Rank me(world, kBytes);
    const Bytes given = content(0, 1, 0, kBytes);
    if (rank == 0) {
      write(me.in(), given);
      CHECK_OK(send(me, me.in(), kBytes, 1));
      me.stream().wait();
    } else {
      CHECK_OK(recv(me, me.out(), kBytes, 0));
      CHECK(me.read(me.out(), kBytes) == given);
    }
    CHECK_OK(phx_barrier(me.hosts(), nullptr, nullptr));
  });
}

// Both put a send before a receive on one stream: what fits into a ring is on its way at once.
TEST(what_fits_is_sent_before_it_is_received) {
  gpu::needs_driver();
  ranks::as_threads(
      2,
      [](int rank, phx_world *world) {
        const Rank me(world);
        const int peer = 1 - rank;
        for (size_t turn = 0; turn < 5; ++turn) {
          write(me.in(), content(rank, peer, turn, kRing));
          CHECK_OK(send(me, me.in(), kRing, peer));
          CHECK_OK(recv(me, me.out(), kRing, peer));
          CHECK(me.read(me.out(), kRing) == content(peer, rank, turn, kRing));
        }
        // The first four in a row, however short they are.
        for (size_t i = 0; i < phx::cuda::kDeep; ++i) {
          write(me.in() + i, content(rank, peer, i, 1));
          CHECK_OK(send(me, me.in() + i, 1, peer));
        }
        me.stream().wait();  // they are through
        for (size_t i = 0; i < phx::cuda::kDeep; ++i) CHECK_OK(recv(me, me.out() + i, 1, peer));
        for (size_t i = 0; i < phx::cuda::kDeep; ++i) CHECK(me.read(me.out() + i, 1) == content(peer, rank, i, 1));
        CHECK_OK(phx_barrier(me.hosts(), nullptr, nullptr));
      },
      small());
}

// All ranks send to all, themselves included, several messages each, receives first; more than rings have room for.
TEST(a_batch_goes_both_ways_at_once) {
  gpu::needs_driver();
  for (const int n : {1, 2, 3})
    ranks::as_threads(
        n,
        [&](int rank, phx_world *world) {
          constexpr size_t kSpan = 3 * kRing;
          const Rank me(world);
          CHECK_OK(batch(me, {}));
          const size_t sizes[] = {kSpan, 0, 100};
          for (int turn = 0; turn < 2; ++turn) {
            std::vector<phx_message> messages;
            const auto place = [&](int peer, size_t i) { return (static_cast<size_t>(peer) * 3 + i) * kSpan; };
            for (int peer = 0; peer < n; ++peer)
              for (size_t i = 0; i < 3; ++i)
                messages.push_back(receives(me.out() + place(peer, i), sizes[i], peer, static_cast<uint32_t>(i)));
            for (int peer = 0; peer < n; ++peer)
              for (size_t i = 0; i < 3; ++i) {
                write(me.in() + place(peer, i), content(rank, peer, i, sizes[i]));
                messages.push_back(sends(me.in() + place(peer, i), sizes[i], peer, static_cast<uint32_t>(i)));
              }
            CHECK_OK(batch(me, messages));
            for (int peer = 0; peer < n; ++peer)
              for (size_t i = 0; i < 3; ++i)
                CHECK(me.read(me.out() + place(peer, i), sizes[i]) == content(peer, rank, i, sizes[i]));
            CHECK_OK(phx_barrier(me.hosts(), nullptr, nullptr));
          }
        },
        small());
}

// A batch on one side meets single calls on the other, as long as the order is the same.
TEST(a_batch_meets_single_calls) {
  gpu::needs_driver();
  ranks::as_threads(
      2,
      [](int rank, phx_world *world) {
        const Rank me(world);
        for (size_t i = 0; i < 3; ++i) write(me.in() + 1000 * i, content(0, 1, i, 1000));
        if (rank == 0) {
          CHECK_OK(batch(
              me, {sends(me.in(), 1000, 1, 5), sends(me.in() + 1000, 1000, 1, 5), sends(me.in() + 2000, 1000, 1, 6)}));
          me.stream().wait();
        } else {
          CHECK_OK(recv(me, me.out(), 1000, 0, 5));
          CHECK_OK(batch(me, {receives(me.out() + 1000, 1000, 0, 5), receives(me.out() + 2000, 1000, 0, 6)}));
          for (size_t i = 0; i < 3; ++i) CHECK(me.read(me.out() + 1000 * i, 1000) == content(0, 1, i, 1000));
        }
        CHECK_OK(phx_barrier(me.hosts(), nullptr, nullptr));
      },
      small());
}

// Around a ring, in either order, if receives have a stream of their own: no host waits for one that waits for it.
TEST(the_first_calls_of_a_ring_need_no_batch) {
  gpu::needs_driver();
  for (const bool receives_first : {false, true})
    ranks::as_threads(
        3,
        [&](int rank, phx_world *world) {
          const Rank me(world);
          const OwnStream other;
          gpu::Options beside = me.options();
          beside.stream = other.get();
          const int next = (rank + 1) % 3, before = (rank + 2) % 3;
          write(me.in(), content(rank, next, 0, 500));
          if (!receives_first) CHECK_OK(send(me, me.in(), 500, next));
          CHECK_OK(phx_recv(me.group(), me.out(), 500, PHX_DTYPE_U8, before, 0, &beside, nullptr));
          if (receives_first) CHECK_OK(send(me, me.in(), 500, next));
          other.wait();
          CHECK(me.read(me.out(), 500) == content(before, rank, 0, 500));
          CHECK_OK(phx_barrier(me.hosts(), nullptr, nullptr));
        },
        small());
}

// Rank 1 waits for a message on one stream, and sends on another what the first rank needs before it can send it.
TEST(calls_on_several_streams_do_not_wait_for_each_other_but_in_one_direction) {
  gpu::needs_driver();
  ranks::as_threads(
      2,
      [](int rank, phx_world *world) {
        const Rank me(world);
        const OwnStream other;
        gpu::Options second = me.options();
        second.stream = other.get();
        constexpr size_t kBytes = 2 * kRing;
        if (rank == 0) {
          CHECK_OK(send(me, me.in(), 1, 1));  // so that rank 1 need not wait for this host
          CHECK_OK(recv(me, me.in(), kBytes, 1));
          CHECK_OK(send(me, me.in(), kBytes, 1));
          me.stream().wait();
        } else {
          write(me.in(), content(1, 0, 0, kBytes));
          CHECK_OK(recv(me, me.out(), 1, 0));
          CHECK_OK(recv(me, me.out(), kBytes, 0));  // comes when what follows has arrived
          CHECK_OK(phx_send(me.group(), me.in(), kBytes, PHX_DTYPE_U8, 0, 0, &second, nullptr));
          CHECK(me.read(me.out(), kBytes) == content(1, 0, 0, kBytes));
        }
        // In one direction they keep their order, on whatever streams.
        for (size_t i = 0; i < 8; ++i) {
          const gpu::Options options = i % 2 == 0 ? me.options() : second;
          char *const at = me.out() + i * kBytes;
          if (rank == 0) {
            Gpu().write(at, content(0, 1, i, kBytes));
            CHECK_OK(phx_send(me.group(), at, kBytes, PHX_DTYPE_U8, 1, 0, &options, nullptr));
          } else {
            CHECK_OK(phx_recv(me.group(), at, kBytes, PHX_DTYPE_U8, 0, 0, &options, nullptr));
          }
        }
        other.wait();
        if (rank == 1)
          for (size_t i = 0; i < 8; ++i) CHECK(me.read(me.out() + i * kBytes, kBytes) == content(0, 1, i, kBytes));
        me.stream().wait();
        CHECK_OK(phx_barrier(me.hosts(), nullptr, nullptr));
      },
      small());
}

TEST(captured_messages_are_replayed) {
  gpu::needs_driver();
  ranks::as_threads(
      2,
      [](int rank, phx_world *world) {
        const Rank me(world);
        const OwnStream stream;
        gpu::Options captured = me.options();
        captured.stream = stream.get();
        const int peer = 1 - rank;
        const std::vector<phx_message> both = {receives(me.out(), 3000, peer), sends(me.in(), 3000, peer)};
        const gpu::Graph none(stream, [&] {
          CHECK_FAILS(PHX_ERR_UNSUPPORTED, "receive one before the capture", batch(me, both, captured));
        });
        CHECK_OK(batch(me, both));
        me.stream().wait();
        const gpu::Graph graph(stream, [&] {
          CHECK_OK(batch(me, both, captured));
          CHECK_OK(batch(me, {rank == 0 ? sends(me.in(), 10, 1) : receives(me.out() + 5000, 10, 0)}, captured));
        });
        for (size_t turn = 0; turn < 5; ++turn) {
          write(me.in(), content(rank, peer, turn, 3000));
          graph.replay();
          stream.wait();
          CHECK(me.read(me.out(), 3000) == content(peer, rank, turn, 3000));
          const Bytes first = content(0, 1, turn, 3000);
          if (rank == 1) CHECK(me.read(me.out() + 5000, 10) == Bytes(first.begin(), first.begin() + 10));
          CHECK_OK(phx_barrier(me.hosts(), nullptr, nullptr));
        }
      },
      small());
}

// Messages and collectives of one group, and those of the host, have nothing to do with each other.
TEST(messages_go_on_beside_collectives) {
  gpu::needs_driver();
  ranks::as_threads(
      2,
      [](int rank, phx_world *world) {
        const Rank me(world);
        const gpu::Options options = me.options();
        const int peer = 1 - rank;
        for (size_t turn = 0; turn < 3; ++turn) {
          const Bytes mine = content(rank, peer, turn, 800);
          write(me.in(), mine);
          CHECK_OK(batch(me, {sends(me.in(), 800, peer), receives(me.out(), 800, peer)}));
          CHECK_OK(phx_all_gather(me.group(), me.out(), me.out() + 1000, 800, PHX_DTYPE_U8, &options, nullptr));
          Bytes there(800);
          std::vector<phx_message> on_host = {sends(mine.data(), 800, peer, 3), receives(there.data(), 800, peer, 3)};
          CHECK_OK(phx_messages(me.group(), on_host.data(), on_host.size(), nullptr));
          CHECK(there == content(peer, rank, turn, 800));
          for (int from = 0; from < 2; ++from)
            CHECK(me.read(me.out() + 1000 + 800 * from, 800) == content(1 - from, from, turn, 800));
        }
        CHECK_OK(phx_barrier(me.hosts(), nullptr, nullptr));
      },
      small());
}

// A rendezvous loads kernels, for which a driver may wait until nothing runs.
TEST(a_first_collective_does_not_wait_for_a_message_on_its_way) {
  gpu::needs_driver();
  ranks::as_threads(
      2,
      [](int rank, phx_world *world) {
        const Rank me(world);
        const int peer = 1 - rank;
        CHECK_OK(batch(me, {sends(me.in(), 10, peer), receives(me.out(), 10, peer)}));
        me.stream().wait();
        const Bytes given = content(0, 1, 0, 3 * kRing);
        write(me.in(), given);
        CHECK_OK(phx_barrier(me.hosts(), nullptr, nullptr));
        if (rank == 0) CHECK_OK(send(me, me.in(), given.size(), 1));  // more than there is room for
        CHECK_OK(phx_barrier(me.hosts(), nullptr, nullptr));
        const OwnStream other;
        gpu::Options options = me.options(5000);
        options.stream = other.get();
        CHECK_OK(phx_all_gather(me.group(), me.in(), me.out(), 10, PHX_DTYPE_U8, &options, nullptr));
        other.wait();
        if (rank == 1) {
          CHECK_OK(recv(me, me.out(), given.size(), 0));
          CHECK(me.read(me.out(), given.size()) == given);
        }
        me.stream().wait();
        CHECK_OK(phx_barrier(me.hosts(), nullptr, nullptr));
      },
      small());
}

// ---- what goes wrong

namespace {

// Rank 0 sends `sent`, rank 1 receives `expected`; each is told both.
void expect_mismatch(const phx_message &sent, const phx_message &expected) {
  ranks::as_threads(
      2,
      [&](int rank, phx_world *world) {
        const Rank me(world);
        phx_message mine = rank == 0 ? sent : expected;
        mine.buffer = rank == 0 ? me.in() : me.out();
        const gpu::Options options = me.options(60000);
        CHECK_OK(phx_messages(me.group(), &mine, 1, &options));
        me.stream().wait();  // long before the timeout
        const phx_error_info info = me.failure();
        CHECK(info.status == PHX_ERR_MISMATCH);
        const auto tell = [](const phx_message &one) {
          return std::to_string(one.count * phx_dtype_size(one.dtype)) + " bytes of " + phx_dtype_name(one.dtype) +
                 " with tag " + std::to_string(one.tag);
        };
        CHECK(std::strstr(info.text, ("sends " + tell(sent)).c_str()) != nullptr);
        CHECK(std::strstr(info.text, ("receives " + tell(expected)).c_str()) != nullptr);
        CHECK(std::strstr(info.text, "rank 0") != nullptr && std::strstr(info.text, "rank 1") != nullptr);
        CHECK(send(me, me.in(), 1, 1 - rank) != PHX_OK);
        Gpu().write(me.in(), Bytes(100, 3));  // the GPU can be used
        CHECK(Gpu().read(me.in(), 100) == Bytes(100, 3));
      },
      small());
}

}  // namespace

// F2
TEST(messages_that_differ_are_told_on_both_sides) {
  gpu::needs_driver();
  expect_mismatch(sends(nullptr, 100, 1, 4), receives(nullptr, 100, 0, 5));
  expect_mismatch(sends(nullptr, 100, 1), receives(nullptr, 101, 0));
  expect_mismatch(sends(nullptr, 0, 1), receives(nullptr, 5000, 0));
  expect_mismatch(sends(nullptr, 5000, 1), receives(nullptr, 0, 0));
  expect_mismatch(sends(nullptr, 3 * kRing, 1), receives(nullptr, 2 * kRing, 0));
  phx_message floats = receives(nullptr, 25, 0);
  floats.dtype = PHX_DTYPE_F32;
  expect_mismatch(sends(nullptr, 100, 1), floats);
}

// F3
TEST(a_message_that_does_not_come_is_named_after_the_timeout) {
  gpu::needs_driver();
  for (const bool sends : {false, true})
    ranks::as_threads(
        2,
        [&](int rank, phx_world *world) {
          const Rank me(world);
          CHECK_OK(rank == 0 ? send(me, me.in(), 1, 1) : recv(me, me.out(), 1, 0));
          CHECK_OK(rank == 1 ? send(me, me.in(), 1, 0) : recv(me, me.out(), 1, 1));
          me.stream().wait();
          CHECK_OK(phx_barrier(me.hosts(), nullptr, nullptr));
          if (rank == 0) {
            CHECK_OK(sends ? send(me, me.in(), 2 * kRing, 1, 0, 50) : recv(me, me.out(), 1, 1, 0, 50));
            me.stream().wait();
          }
          const phx_error_info info = me.failure();
          CHECK(info.status == PHX_ERR_TIMEOUT && info.peer == 1);
          CHECK(std::strstr(info.text, "timed out (the timeout of its launch) waiting for rank 1") != nullptr);
          CHECK(recv(me, me.out(), 1, 1 - rank) != PHX_OK);
        },
        small());
}

TEST(a_first_message_that_does_not_come_is_named_by_the_host) {
  gpu::needs_driver();
  ranks::as_threads(2, [](int rank, phx_world *world) {
    const Rank me(world);
    if (rank == 0) CHECK_FAILS(PHX_ERR_TIMEOUT, "still waits for rank 1 ", recv(me, me.out(), 1, 1, 0, 50));
    const phx_error_info info = me.failure();
    CHECK(info.status == PHX_ERR_TIMEOUT && info.peer == 1);
  });
}

// Rank 0 sends and leaves. What has been sent can be received; what has not ends the kernel.
TEST(what_a_rank_sent_before_it_left_is_received) {
  gpu::needs_driver();
  ranks::as_threads(
      2,
      [](int rank, phx_world *world) {
        const Rank me(world);
        if (rank == 0) {
          write(me.in(), content(0, 1, 0, 1000));
          CHECK_OK(send(me, me.in(), 1000, 1));
          me.stream().wait();
          return;
        }
        while (phx_world_check(world) == PHX_OK) std::this_thread::yield();
        CHECK_OK(recv(me, me.out(), 1000, 0));
        CHECK(me.read(me.out(), 1000) == content(0, 1, 0, 1000));
        CHECK_FAILS(PHX_ERR_PEER_DEAD, "has left", send(me, me.in(), 1, 0));
        CHECK_OK(recv(me, me.out(), 1, 0, 0, 60000));
        me.stream().wait();
        CHECK_FAILS(PHX_ERR_PEER_DEAD, "has left", recv(me, me.out(), 1, 0));
      },
      small());
}

TEST(wrong_requests_say_so_before_anything_is_sent) {
  gpu::needs_driver();
  ranks::as_threads(1, [](int, phx_world *world) {
    const Rank me(world);
    const gpu::Options good = me.options();
    float host[64] = {};
    const auto put = [&](const void *in, int peer, const gpu::Options &options, phx_work **work) {
      return phx_send(me.group(), in, 4, PHX_DTYPE_F32, peer, 0, &options, work);
    };
    gpu::Options options = good;
    options.device = {PHX_DEVICE_CUDA, 99};
    CHECK_FAILS(PHX_ERR_INVALID, "there is no CUDA device 99", put(me.in(), 0, options, nullptr));
    phx_work *work = nullptr;
    CHECK_FAILS(PHX_ERR_UNSUPPORTED, "work must be NULL", put(me.in(), 0, good, &work));
    CHECK_FAILS(PHX_ERR_INVALID, "buffer is not memory that the GPU", put(host, 0, good, nullptr));
    CHECK_FAILS(PHX_ERR_INVALID, "peer is 1, which is not a group rank: the group has 1 ranks",
                put(me.in(), 1, good, nullptr));
    CHECK_FAILS(PHX_ERR_UNSUPPORTED, "PHX_ANY_RANK is not allowed",
                phx_recv(me.group(), me.out(), 4, PHX_DTYPE_F32, PHX_ANY_RANK, 0, &good, nullptr));
    options.device = {};
    CHECK_FAILS(PHX_ERR_INVALID, "set phx_gpu_options.device", put(host, 0, options, nullptr));
    options.device = {7, 0};
    CHECK_FAILS(PHX_ERR_INVALID, "unknown device type 7", put(me.in(), 0, options, nullptr));
    std::vector<phx_message> many(97, sends(me.in(), 1, 0));
    CHECK_FAILS(PHX_ERR_UNSUPPORTED, "97 messages with 1 ranks in one call", batch(me, many));
    many.resize(2);
    many[1].kind = 3;
    CHECK_FAILS(PHX_ERR_INVALID, "message 1 has kind 3", batch(me, many));
    many[1] = many[0];
    many[1].struct_size -= 4;
    CHECK_FAILS(PHX_ERR_ABI, "message 1 has a different struct_size than message 0", batch(me, many));
    CHECK_FAILS(PHX_ERR_INVALID, "messages is NULL", phx_messages(me.group(), nullptr, 1, &good));
    // Nothing of these was sent.
    write(me.in(), content(0, 0, 0, 50));
    CHECK_OK(batch(me, {sends(me.in(), 50, 0), receives(me.out(), 50, 0)}));
    CHECK(me.read(me.out(), 50) == content(0, 0, 0, 50));
    if (gpu::count() < 2) return;
    options.device = {PHX_DEVICE_CUDA, 1};
    CHECK_FAILS(PHX_ERR_UNSUPPORTED, "has used CUDA device 0 for this group, and now gives 1",
                put(me.in(), 0, options, nullptr));
  });
}

TEST(a_call_of_the_driver_that_fails_is_named_and_leaves_nothing) {
  gpu::needs_driver();
  if (gpu::alive() < 0) check::skip("the fake driver, which fails on demand");
  for (const char *function : {"cuEventCreate", "cuMemCreate", "cuMemHostRegister_v2", "cuMemExportToShareableHandle",
                               "cuEventRecord", "cuLaunchKernel", "cuModuleLoadData"}) {
    ranks::as_threads(1, [&](int, phx_world *world) {
      const Rank me(world);
      setenv("FAKE_CUDA_FAIL", function, 1);
      const phx_status status = batch(me, {sends(me.in(), 4, 0), receives(me.out(), 4, 0)});
      unsetenv("FAKE_CUDA_FAIL");
      CHECK(status == PHX_ERR_DEVICE && std::strstr(phx_last_error(), "CUDA_ERROR_UNKNOWN") != nullptr);
    });
    CHECK(gpu::alive() == 0);
  }
}

TEST(nothing_is_left_behind) {
  gpu::needs_driver();
  if (gpu::alive() < 0) check::skip("the fake driver, which counts");
  const size_t before = gpu::open_files();
  for (int i = 0; i < 3; ++i)
    ranks::as_threads(
        2,
        [](int rank, phx_world *world) {
          const Rank me(world);
          // The second one is never received.
          CHECK_OK(rank == 0 ? send(me, me.in(), 100, 1) : recv(me, me.out(), 100, 0));
          CHECK_OK(send(me, me.in(), 100, 1 - rank));
          me.stream().wait();
          CHECK_OK(phx_barrier(me.hosts(), nullptr, nullptr));
        },
        small());
  CHECK(gpu::alive() == 0);
  CHECK(gpu::open_files() == before);
}

int main(int argc, char **argv) { return check::run_all(argc, argv); }
