// Symmetric memory: allocation rules, rendezvous, signals, barriers and the collectives on it.
#include <cstring>
#include <vector>

#include "ranks.h"

namespace {

phx_mem_info info_of(phx_world *world, const void *pointer) {
  phx_mem_info info{};
  info.struct_size = sizeof info;
  CHECK_OK(phx_mem_find(world, pointer, &info));
  return info;
}

TEST(an_alloc_id_gives_the_same_zeroed_then_kept_address_again) {  // M6 M7 M8 M9
  ranks::as_threads(1, [](int, phx_world *world) {
    void *a = nullptr, *b = nullptr, *other = nullptr;
    CHECK_OK(phx_mem_alloc_persistent(world, nullptr, 1000, "g", 7, &a));
    CHECK(*static_cast<char *>(a) == 0);
    CHECK_FAILS(PHX_ERR_IN_USE, "alloc_id == 7 because a previous allocation with the same alloc_id is still active",
                phx_mem_alloc_persistent(world, nullptr, 1000, "g", 7, &b));
    CHECK_OK(phx_mem_alloc_persistent(world, nullptr, 1000, "h", 7, &other));  // another scope
    CHECK(other != a);
    std::memset(a, 5, 1000);
    CHECK_OK(phx_mem_free(world, a));
    CHECK(info_of(world, a).live == 0);
    CHECK_FAILS(PHX_ERR_MISMATCH, "1000 bytes and is now asked for with 2000",
                phx_mem_alloc_persistent(world, nullptr, 2000, "g", 7, &b));
    CHECK(b == nullptr);
    CHECK_OK(phx_mem_alloc_persistent(world, nullptr, 1000, "g", 7, &b));
    CHECK(b == a);
    CHECK(*static_cast<char *>(b) == 5);
    CHECK_FAILS(PHX_ERR_IN_USE, "still active", phx_mem_drop(world, nullptr, "g", 7));
    CHECK_OK(phx_mem_free(world, b));
    CHECK_OK(phx_mem_drop(world, nullptr, "g", 7));
    CHECK_FAILS(PHX_ERR_NOT_FOUND, "no persistent allocation", phx_mem_drop(world, nullptr, "g", 7));
    CHECK_OK(phx_mem_free(world, other));
  });
}

TEST(blocks_are_found_by_any_interior_pointer_and_counted) {
  ranks::as_threads(1, [](int, phx_world *world) {
    void *a = nullptr, *zero = nullptr;
    CHECK_OK(phx_mem_alloc(world, nullptr, 10000, &a));
    CHECK_OK(phx_mem_alloc(world, nullptr, 0, &zero));  // M12
    CHECK(zero != nullptr && zero != a);
    CHECK(info_of(world, static_cast<char *>(a) + 9999).base == a);
    phx_mem_info info{};
    info.struct_size = sizeof info;
    CHECK_FAILS(PHX_ERR_NOT_FOUND, "not in memory that phx_mem_alloc", phx_mem_find(world, &info, &info));
    size_t blocks = 0, bytes = 0;
    CHECK_OK(phx_mem_count(world, &blocks, &bytes));
    CHECK(blocks == 2 && bytes == 10000);
    CHECK_OK(phx_mem_retain(world, a));
    CHECK_OK(phx_mem_free(world, a));
    CHECK(info_of(world, a).live == 1);
    CHECK_OK(phx_mem_free(world, a));
    CHECK_FAILS(PHX_ERR_NOT_FOUND, "was not allocated by phx_mem_alloc", phx_mem_free(world, a));
    CHECK_OK(phx_mem_free(world, zero));
    CHECK_FAILS(PHX_ERR_NO_MEMORY, "bytes were asked for", phx_mem_alloc(world, nullptr, size_t{1} << 50, &a));
    CHECK_FAILS(PHX_ERR_INVALID, "more than an allocation may have", phx_mem_alloc(world, nullptr, SIZE_MAX, &a));
  });
}

struct Counting {
  int allocs = 0, frees = 0, destroyed = 0;
};

TEST(allocators_are_looked_up_by_device_type_and_can_be_replaced) {  // M13
  static Counting counting;
  counting = Counting{};
  phx_allocator_ops ops{};
  ops.struct_size = sizeof ops;
  ops.name = "counting";
  ops.alloc = [](void *self, const phx_device *, size_t size, void **pointer, uint64_t *cookie) -> phx_status {
    ++static_cast<Counting *>(self)->allocs;
    *pointer = std::calloc(1, size + 1);
    *cookie = 0;
    return PHX_OK;
  };
  ops.free = [](void *self, void *pointer, uint64_t) -> phx_status {
    ++static_cast<Counting *>(self)->frees;
    std::free(pointer);
    return PHX_OK;
  };
  ops.export_handle = [](void *, void *, uint64_t, void *, size_t *, int32_t *) -> phx_status {
    return PHX_ERR_UNSUPPORTED;
  };
  ops.import_handle = [](void *, const phx_device *, const void *, size_t, int32_t, size_t, void **,
                         uint64_t *) -> phx_status { return PHX_ERR_UNSUPPORTED; };
  ops.unmap = [](void *, void *, uint64_t) -> phx_status { return PHX_OK; };
  ops.destroy = [](void *self) { ++static_cast<Counting *>(self)->destroyed; };
  ranks::as_threads(1, [&](int, phx_world *world) {
    const phx_device device{PHX_DEVICE_CUDA, 0};
    void *p = nullptr;
    CHECK_FAILS(PHX_ERR_UNSUPPORTED, "SymmetricMemory does not support device type 2",
                phx_mem_alloc(world, &device, 8, &p));
    CHECK_OK(phx_allocator_register(world, PHX_DEVICE_CUDA, &ops, &counting));
    CHECK_OK(phx_mem_alloc(world, &device, 8, &p));
    CHECK_OK(phx_allocator_unregister(world, PHX_DEVICE_CUDA));
    CHECK_FAILS(PHX_ERR_NOT_FOUND, "no allocator", phx_allocator_unregister(world, PHX_DEVICE_CUDA));
    CHECK(counting.destroyed == 0);  // its block lives
    CHECK_OK(phx_mem_free(world, p));
    CHECK(counting.allocs == 1 && counting.frees == 1 && counting.destroyed == 1);
  });
}

void signals_and_buffers(int rank, phx_world *world) {
  const int n = phx_world_size(world);
  phx_group *group = ranks::make_group(world);
  constexpr size_t kCount = 1 << 14;
  void *mine = nullptr;
  CHECK_OK(phx_mem_alloc(world, nullptr, kCount * sizeof(int32_t), &mine));
  phx_symm *symm = nullptr, *again = nullptr;
  CHECK_FAILS(PHX_ERR_NOT_FOUND, "has no rendezvous", phx_symm_find(group, mine, &symm));  // M17
  CHECK_OK(phx_symm_rendezvous(group, mine, 0, &symm));
  CHECK_OK(phx_symm_rendezvous(group, static_cast<char *>(mine) + 64, 0, &again));  // M16 M18
  CHECK(again == symm);
  phx_symm_release(again);
  phx_symm_info info{};
  info.struct_size = sizeof info;
  CHECK_OK(phx_symm_get_info(symm, &info));
  CHECK(info.group_rank == rank && info.group_size == n && info.size == kCount * sizeof(int32_t));
  CHECK(info.pad_stride >= info.signal_channels && info.pad_stride % 16 == 0);
  CHECK(info.signal_pad_bytes == size_t{info.pad_stride} * n * 4);
  CHECK(phx_symm_buffer(symm, rank) == mine);
  CHECK(phx_symm_buffer(symm, n) == nullptr);
  CHECK(std::strstr(phx_last_error(), "group_rank is") != nullptr);
  for (int r = 0; r < n; ++r)  // M33
    for (uint32_t w = 0; w < info.pad_stride * n; ++w) CHECK(phx_symm_signal_pad(symm, r)[w] == 0);
  CHECK_OK(phx_symm_barrier(symm, 0, 0));

  // Around the ring: fill the next rank's block, signal, wait for the previous one. M25 M27
  const int next = (rank + 1) % n, previous = (rank + n - 1) % n;
  for (int round = 1; round <= 50; ++round) {
    auto *theirs = static_cast<int32_t *>(phx_symm_buffer(symm, next));
    for (size_t i = 0; i < kCount; ++i) theirs[i] = static_cast<int32_t>(round * 1000 + rank);
    CHECK_OK(phx_symm_put_signal(symm, next, 3));
    CHECK_OK(phx_symm_wait_signal(symm, previous, 3, 0));
    for (size_t i = 0; i < kCount; ++i) CHECK(static_cast<int32_t *>(mine)[i] == round * 1000 + previous);
    CHECK_OK(phx_symm_barrier(symm, static_cast<uint32_t>(round) % 4, 0));  // M28
  }
  CHECK_FAILS(PHX_ERR_INVALID, "channel is", phx_symm_barrier(symm, info.signal_channels, 0));
  CHECK_FAILS(PHX_ERR_INVALID, "group_rank is", phx_symm_put_signal(symm, -1, 0));

  // A wait that nobody answers ends at its deadline, names the peer, and can be tried again. M30
  CHECK_OK(phx_symm_barrier(symm, 0, 0));
  if (rank == 0 && n > 1) {
    CHECK_FAILS(PHX_ERR_TIMEOUT, "rank 0 still waits for rank 1", phx_symm_wait_signal(symm, 1, 5, 30));
    CHECK_FAILS(PHX_ERR_TIMEOUT, "still waits", phx_symm_barrier(symm, 6, 30));
  }
  CHECK_OK(phx_symm_barrier(symm, 0, 0));
  if (rank == 1) CHECK_OK(phx_symm_put_signal(symm, 0, 5));
  if (rank == 0 && n > 1) CHECK_OK(phx_symm_wait_signal(symm, 1, 5, 0));
  CHECK_OK(phx_symm_barrier(symm, 6, 0));
  CHECK_OK(phx_symm_barrier(symm, 6, 0));

  // Two groups on one allocation have pads of their own. M29
  phx_group *twin = ranks::make_group(world, "twin");
  phx_symm *other = nullptr;
  CHECK_OK(phx_symm_rendezvous(twin, mine, 0, &other));
  CHECK(other != symm);
  CHECK(phx_symm_signal_pad(other, rank) != phx_symm_signal_pad(symm, rank));
  CHECK(phx_symm_signal_pad(other, rank)[0] == 0);
  CHECK_OK(phx_symm_barrier(other, 0, 0));
  phx_symm_release(other);
  phx_group_release(twin);

  // Freed on one rank first: local, and the handle keeps everybody's memory. M37
  if (rank == 0) CHECK_OK(phx_mem_free(world, mine));
  static_cast<int32_t *>(phx_symm_buffer(symm, next))[rank] = 77;
  CHECK_OK(phx_symm_barrier(symm, 1, 0));
  CHECK(static_cast<int32_t *>(phx_symm_buffer(symm, rank))[previous] == 77);
  if (rank != 0) CHECK_OK(phx_mem_free(world, mine));
  phx_symm_release(symm);
  phx_group_release(group);
}

TEST(signals_order_the_data_among_threads) {
  for (int n : {1, 2, 3}) ranks::as_threads(n, signals_and_buffers);
}

TEST(signals_order_the_data_among_processes) { ranks::all_zero(ranks::as_processes(3, signals_and_buffers)); }

TEST(a_signal_can_be_taken_after_its_sender_has_left) {
  ranks::as_threads(3, [](int rank, phx_world *world) {
    phx_group *group = ranks::make_group(world);
    void *mine = nullptr;
    CHECK_OK(phx_mem_alloc(world, nullptr, 64, &mine));
    phx_symm *symm = nullptr;
    CHECK_OK(phx_symm_rendezvous(group, mine, 0, &symm));
    if (rank == 1) {
      CHECK_OK(phx_symm_put_signal(symm, 0, 0));
      CHECK_OK(phx_world_finalize(world));
    } else {
      while (phx_world_check(world) == PHX_OK) std::this_thread::yield();
      if (rank == 0) CHECK_OK(phx_symm_wait_signal(symm, 1, 0, 0));
      // Those who stay can still signal each other, but not the one who left.
      CHECK_OK(phx_symm_put_signal(symm, 2 - rank, 1));
      CHECK_OK(phx_symm_wait_signal(symm, 2 - rank, 1, 0));
      CHECK_FAILS(PHX_ERR_PEER_DEAD, "rank 1", phx_symm_put_signal(symm, 1, 1));
      CHECK_FAILS(PHX_ERR_REVOKED, "has left", phx_symm_wait_signal(symm, 1, 0, 0));
      CHECK_OK(phx_symm_put_signal(symm, 2 - rank, 1));
      CHECK_OK(phx_symm_wait_signal(symm, 2 - rank, 1, 0));
    }
    phx_symm_release(symm);
    phx_group_release(group);
    CHECK_OK(phx_mem_free(world, mine));
  });
}

TEST(a_handle_outlives_its_group_and_block) {
  ranks::as_threads(2, [](int rank, phx_world *world) {
    phx_group *group = ranks::make_group(world);
    void *mine = nullptr;
    CHECK_OK(phx_mem_alloc(world, nullptr, 4096, &mine));
    phx_symm *symm = nullptr;
    CHECK_OK(phx_symm_rendezvous(group, mine, 0, &symm));
    phx_group_release(group);
    CHECK_OK(phx_mem_free(world, mine));
    CHECK_OK(phx_symm_barrier(symm, 0, 0));
    *static_cast<int *>(phx_symm_buffer(symm, 1 - rank)) = rank + 10;
    CHECK_OK(phx_symm_barrier(symm, 0, 0));
    CHECK(*static_cast<int *>(phx_symm_buffer(symm, rank)) == (1 - rank) + 10);
    CHECK_OK(phx_symm_barrier(symm, 0, 0));
    phx_symm_release(symm);
  });
}

TEST(ranks_that_offer_different_sizes_all_learn_who_is_odd) {  // M19
  ranks::as_threads(3, [](int rank, phx_world *world) {
    phx_group *group = ranks::make_group(world);
    void *mine = nullptr;
    phx_symm *symm = nullptr;
    CHECK_OK(phx_mem_alloc(world, nullptr, rank == 1 ? 2048 : 1024, &mine));
    CHECK_FAILS(PHX_ERR_MISMATCH, "1024 bytes on ranks 0, 2; 2048 bytes on rank 1",
                phx_symm_rendezvous(group, mine, 0, &symm));
    phx_error_info info{};
    info.struct_size = sizeof info;
    CHECK_OK(phx_last_error_info(&info));
    CHECK(info.peer == 1 && std::strcmp(info.group, "all") == 0);
    int ordinary = 0;
    CHECK_FAILS(PHX_ERR_NOT_FOUND, "is not symmetric memory", phx_symm_rendezvous(group, &ordinary, 0, &symm));  // M18
    CHECK_OK(phx_barrier(group, nullptr, nullptr));  // nothing of it hurt the group
    void *good = nullptr;
    CHECK_OK(phx_mem_alloc(world, nullptr, 512, &good));
    CHECK_OK(phx_symm_rendezvous(group, good, 0, &symm));
    phx_symm_release(symm);
    CHECK_OK(phx_mem_free(world, good));
    CHECK_OK(phx_mem_free(world, mine));
    phx_group_release(group);
  });
}

void symmetric_collectives(int rank, phx_world *world) {
  const int n = phx_world_size(world);
  phx_group *group = ranks::make_group(world);
  constexpr size_t kMost = 50000;
  void *block = nullptr;
  CHECK_OK(phx_mem_alloc(world, nullptr, 256 + kMost * n * sizeof(float), &block));
  phx_symm *symm = nullptr;
  CHECK_OK(phx_symm_rendezvous(group, block, 0, &symm));
  const size_t offset = 256;
  auto *mine = reinterpret_cast<float *>(static_cast<char *>(block) + offset);
  auto value = [](int r, size_t i) { return static_cast<float>((i * 5 + static_cast<size_t>(r) * 3) % 17); };
  for (size_t count : {size_t{0}, size_t{1}, size_t{17}, size_t{4096}, kMost}) {
    auto fill = [&](size_t elements) {
      for (size_t i = 0; i < elements; ++i) mine[i] = value(rank, i);
    };
    auto sum = [&](size_t i) {
      float s = 0;
      for (int r = 0; r < n; ++r) s += value(r, i);
      return s;
    };
    std::vector<float> out(count * n, -1);
    for (bool in_place : {false, true}) {
      fill(count);
      float *to = in_place ? mine : out.data();
      CHECK_OK(phx_symm_all_reduce(symm, offset, to, count, PHX_DTYPE_F32, PHX_OP_SUM, nullptr, nullptr));
      for (size_t i = 0; i < count; ++i) CHECK(to[i] == sum(i));
    }
    fill(count);
    CHECK_OK(phx_symm_all_gather(symm, offset, out.data(), count, PHX_DTYPE_F32, nullptr, nullptr));
    for (int r = 0; r < n; ++r)
      for (size_t i = 0; i < count; ++i) CHECK(out[r * count + i] == value(r, i));
    fill(count * n);
    CHECK_OK(phx_symm_reduce_scatter(symm, offset, out.data(), count, PHX_DTYPE_F32, PHX_OP_SUM, nullptr, nullptr));
    for (size_t i = 0; i < count; ++i) CHECK(out[i] == sum(rank * count + i));
    CHECK_OK(phx_symm_all_to_all(symm, offset, out.data(), count, PHX_DTYPE_F32, nullptr, nullptr));
    for (int r = 0; r < n; ++r)
      for (size_t i = 0; i < count; ++i) CHECK(out[r * count + i] == value(r, rank * count + i));
    fill(count);
    CHECK_OK(phx_symm_broadcast(symm, offset, count, PHX_DTYPE_F32, n - 1, nullptr, nullptr));
    for (size_t i = 0; i < count; ++i) CHECK(mine[i] == value(n - 1, i));
  }
  std::vector<float> out(10);
  CHECK_FAILS(
      PHX_ERR_INVALID, "end beyond",
      phx_symm_all_reduce(symm, offset, out.data(), kMost * n + 1, PHX_DTYPE_F32, PHX_OP_SUM, nullptr, nullptr));
  CHECK_FAILS(PHX_ERR_INVALID, "not a multiple",
              phx_symm_all_reduce(symm, 2, out.data(), 1, PHX_DTYPE_F32, PHX_OP_SUM, nullptr, nullptr));
  CHECK_OK(phx_barrier(group, nullptr, nullptr));
  CHECK_OK(phx_mem_free(world, block));
  phx_symm_release(symm);
  phx_group_release(group);
}

TEST(collectives_on_symmetric_memory_give_the_reference_values) {
  for (int n : {1, 2, 4}) ranks::as_threads(n, symmetric_collectives);
  ranks::all_zero(ranks::as_processes(2, symmetric_collectives));
}

void alloc_with_rendezvous(int rank, phx_world *world) {
  const int n = phx_world_size(world);
  phx_group *group = ranks::make_group(world);
  constexpr size_t kCount = 1 << 17;  // large enough to be read where it lies, however few cores there are
  phx_symm *symm = nullptr, *found = nullptr;
  CHECK_OK(phx_symm_alloc(group, nullptr, kCount * sizeof(float), 0, &symm));
  auto *mine = static_cast<float *>(phx_symm_buffer(symm, rank));
  for (size_t i = 0; i < kCount; ++i) mine[i] = static_cast<float>(rank);
  CHECK_OK(phx_symm_barrier(symm, 0, 0));
  CHECK(static_cast<float *>(phx_symm_buffer(symm, (rank + 1) % n))[kCount - 1] == static_cast<float>((rank + 1) % n));
  CHECK_OK(phx_symm_barrier(symm, 0, 0));
  CHECK(phx_symm_covers(group, mine, kCount * sizeof(float)) == (n > 1 ? 1 : 0));
  CHECK_OK(phx_all_reduce(group, mine, mine, kCount, PHX_DTYPE_F32, PHX_OP_SUM, nullptr, nullptr));  // where it lies
  CHECK(mine[kCount - 1] == static_cast<float>(n * (n - 1) / 2));
  phx_group_stats info = PHX_GROUP_STATS_INIT;
  CHECK_OK(phx_group_get_stats(group, &info));
  CHECK(info.zero_copies == (n > 1 ? 1 : 0));
  size_t blocks = 1, bytes = 1;
  CHECK_OK(phx_mem_count(world, &blocks, &bytes));
  CHECK(blocks == 0 && bytes == 0);
  CHECK_FAILS(PHX_ERR_NOT_FOUND, "not symmetric memory of this world", phx_symm_find(group, mine, &found));
  CHECK_FAILS(PHX_ERR_INVALID, "more than an allocation may have", phx_symm_alloc(group, nullptr, SIZE_MAX, 0, &found));
  CHECK_FAILS(PHX_ERR_INVALID, "out is NULL", phx_symm_alloc(group, nullptr, 8, 0, nullptr));
  CHECK_OK(phx_barrier(group, nullptr, nullptr));
  phx_symm_release(symm);
  phx_group_release(group);
}

TEST(memory_made_with_its_rendezvous_lives_as_long_as_the_handle) {
  for (int n : {1, 2, 3}) ranks::as_threads(n, alloc_with_rendezvous);
  ranks::all_zero(ranks::as_processes(2, alloc_with_rendezvous));
}

TEST(a_rank_without_memory_fails_the_rendezvous_of_all) {
  ranks::as_threads(2, [](int rank, phx_world *world) {
    phx_group *group = ranks::make_group(world);
    phx_symm *symm = nullptr;
    const phx_status status = phx_symm_alloc(group, nullptr, rank == 0 ? size_t{1} << 50 : 64, 0, &symm);
    CHECK(status == PHX_ERR_NO_MEMORY);
    CHECK(symm == nullptr && std::strstr(phx_last_error(), "bytes were asked for") != nullptr);
    phx_group_release(group);
  });
}

TEST(a_call_in_place_does_not_match_one_that_is_not) {
  ranks::as_threads(2, [](int rank, phx_world *world) {
    phx_group *group = ranks::make_group(world);
    void *block = nullptr;
    CHECK_OK(phx_mem_alloc(world, nullptr, 64, &block));
    phx_symm *symm = nullptr;
    CHECK_OK(phx_symm_rendezvous(group, block, 0, &symm));
    float out[16];
    CHECK_FAILS(PHX_ERR_MISMATCH, "symm_all_reduce(float32, 16, sum",
                phx_symm_all_reduce(symm, 0, rank == 0 ? block : out, 16, PHX_DTYPE_F32, PHX_OP_SUM, nullptr, nullptr));
    phx_symm_release(symm);
    phx_group_release(group);
    CHECK_OK(phx_mem_free(world, block));
  });
}

}  // namespace

int main(int argc, char **argv) { return check::run_all(argc, argv); }
