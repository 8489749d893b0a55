// phalanx.hpp: memory and symmetric memory.
#include <unistd.h>

#include "hpp.h"

using phalanx::region;

TEST(memory_is_freed_with_its_last_owner) {
  auto world = phalanx::World::alone();
  {
    auto memory = world.allocate(1000);
    CHECK(memory.info().size == 1000 && world.find(memory.data()).live == 1);
    const auto shared = memory.share();
    memory = world.allocate(10);
    CHECK(world.usage().blocks == 2);
    CHECK(shared.as<float>(250).size() == 250);
  }
  CHECK(world.usage().blocks == 0);
}

TEST(persistent_memory_comes_back_at_its_address) {
  auto world = phalanx::World::alone();
  void *first = nullptr;
  {
    const auto memory = world.allocate_persistent(64, 9);
    first = memory.data();
  }
  {
    const auto memory = world.allocate_persistent(64, 9);
    CHECK(memory.data() == first && memory.info().persistent == 1);
  }
  world.drop_persistent(9);
  CHECK(hpp::thrown([&] { world.drop_persistent(9); }).status() == PHX_ERR_NOT_FOUND);
}

TEST(ranks_read_and_signal_each_other) {
  hpp::as_threads(2, [](phalanx::World &world) {
    const auto group = world.group("all");
    const auto symm = group.allocate(4096);
    const int peer = 1 - world.rank();
    symm.own<int>()[5] = 40 + world.rank();
    symm.put_signal(peer);
    symm.wait_signal(peer);
    CHECK(symm.block_as<int>(peer)[5] == 40 + peer);
    CHECK(symm.block(peer).size() == 4096 && symm.info().group_size == 2);
    CHECK(symm.team().group_rank == world.rank());
    CHECK(symm.signal_pad(world.rank())[static_cast<size_t>(peer) * symm.info().pad_stride] == 1);
    CHECK(hpp::thrown([&] { symm.block(2); }).status() == PHX_ERR_INVALID);
    symm.barrier(3);
  });
}

TEST(ranks_write_into_windows_and_signal) {
  hpp::as_threads(2, [](phalanx::World &world) {
    const auto group = world.group("all");
    const auto memory = world.allocate(256);
    const auto window = group.window(memory, 64, 128);
    const int self = world.rank(), peer = 1 - self;
    const std::vector<int> mine(4, 10 + self);
    window.put(peer, 16, mine, true);
    window.put_signal(peer);
    window.wait_signal(peer);
    CHECK(memory.as<int>(64)[16 + 4] == 10 + peer && memory.as<int>(64)[16 + 8] == 0);
    window.wait_signal(peer);
    CHECK(window.signals(peer) == 0);
    std::vector<int> back(4);
    window.read(peer, 16, back);
    window.flush();
    CHECK(back == mine);
    CHECK(reinterpret_cast<int *>(window.memory(peer))[4] == 10 + self);
    CHECK(hpp::thrown([&] { window.put(peer, 120, mine); }).status() == PHX_ERR_INVALID);
    CHECK(hpp::thrown([&] { window.memory(2); }).status() == PHX_ERR_INVALID);
    group.barrier();
  });
}

TEST(a_rendezvous_makes_allocated_memory_symmetric) {
  hpp::as_threads(2, [](phalanx::World &world) {
    const auto group = world.group("all");
    const auto memory = world.allocate(256);
    const auto symm = group.rendezvous(memory);
    CHECK(symm.own<std::byte>().data() == memory.data());
    CHECK(group.find(memory.data()).get() == symm.get());
    symm.barrier();
  });
}

TEST(every_collective_of_symmetric_memory_gives_its_numbers) {
  hpp::as_threads(2, [](phalanx::World &world) {
    const auto group = world.group("all");
    const auto symm = group.allocate(4096);
    const int self = world.rank();
    const auto own = symm.own<int>();
    const auto fill = [&] {
      symm.barrier();
      for (int i = 0; i < 8; ++i) own[static_cast<size_t>(i)] = 10 * self + i;
    };
    const size_t counts[2] = {4, 4};
    std::vector<int> eight(8), four(4), sixteen(16);
    fill();
    symm.all_reduce(region<int>(8), eight);
    CHECK(eight[7] == 24);
    symm.all_gather(region<int>(8), sixteen);
    CHECK(sixteen[8] == 10);
    symm.all_gather_v(region<int>(4), eight, counts);
    CHECK(eight[4] == 10);
    symm.reduce_scatter(region<int>(8), four);
    CHECK(four[0] == 10 + 8 * self);
    symm.reduce_scatter_v(region<int>(8), four, counts);
    CHECK(four[1] == 12 + 8 * self);
    symm.all_to_all(region<int>(4), eight);
    CHECK(eight[4] == 10 + 4 * self);
    symm.all_to_all_v(region<int>(8), counts, eight, counts);
    CHECK(eight[0] == 4 * self);
    symm.reduce(region<int>(4), four, 0);
    if (self == 0) CHECK(four[3] == 16);
    symm.gather(region<int>(8), sixteen, 1);
    if (self == 1) CHECK(sixteen[15] == 17);
    symm.scatter(region<int>(4), four, 1);
    CHECK(four[0] == 10 + 4 * self);
    symm.start().broadcast(region<int>(4), 1).wait();
    CHECK(own[3] == 13);
    fill();
    symm.start().all_reduce(region<int>(8)).wait();  // in place
    CHECK(own[7] == 24);
  });
}

TEST(a_gathered_range_shows_every_block) {
  hpp::as_threads(2, [](phalanx::World &world) {
    const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    const auto group = world.group("all");
    const auto symm = group.allocate(page);
    symm.own<int>()[0] = 7 + world.rank();
    auto gathered = symm.map_gathered(0, page);
    symm.barrier();
    CHECK(gathered.as<int>()[page / sizeof(int)] == 8 && gathered.bytes().size() == 2 * page);
    const auto moved = std::move(gathered);
    CHECK(moved.as<int>()[0] == 7);
    symm.barrier();
  });
}

int main(int argc, char **argv) { return check::run_all(argc, argv); }
