// Parts of all ranks' blocks as one range: what it shows, who may have it, and when it goes.
#include <cstring>
#include <vector>

#include "ranks.h"

namespace {

constexpr size_t kPage = 4096;
constexpr size_t kWords = kPage / sizeof(uint32_t);

struct Shared {
  phx_group *group = nullptr;
  void *mine = nullptr;
  phx_symm *symm = nullptr;

  Shared(phx_world *world, size_t bytes) : group(ranks::make_group(world)) {
    CHECK_OK(phx_mem_alloc(world, nullptr, bytes, &mine));
    CHECK_OK(phx_symm_rendezvous(group, mine, 0, &symm));
  }
  Shared(const Shared &) = delete;
  Shared &operator=(const Shared &) = delete;
  ~Shared() {
    phx_symm_release(symm);
    phx_group_release(group);
  }
};

void reads_what_the_ranks_write(int rank, phx_world *world) {
  const int n = phx_world_size(world);
  Shared shared(world, 5 * kPage);
  void *range = nullptr;
  CHECK_OK(phx_symm_map_gathered(shared.symm, kPage, 2 * kPage, &range));
  auto *const all = static_cast<uint32_t *>(range);
  for (uint32_t round = 1; round <= 20; ++round) {
    auto *const own = static_cast<uint32_t *>(shared.mine) + kWords;
    for (uint32_t i = 0; i < 2 * kWords; ++i) own[i] = round * 100000 + static_cast<uint32_t>(rank) * 10000 + i;
    // Into the range: nothing moves, and all are there.
    CHECK_OK(phx_symm_all_gather(shared.symm, kPage, range, 2 * kWords, PHX_DTYPE_U32, nullptr, nullptr));
    for (int from = 0; from < n; ++from)
      for (uint32_t i = 0; i < 2 * kWords; ++i)
        CHECK(all[static_cast<size_t>(from) * 2 * kWords + i] ==
              round * 100000 + static_cast<uint32_t>(from) * 10000 + i);
    CHECK_OK(phx_barrier(shared.group, nullptr, nullptr));
  }
  // What is written through it is in the blocks.
  if (rank == 0) all[static_cast<size_t>(n - 1) * 2 * kWords] = 7;
  CHECK_OK(phx_barrier(shared.group, nullptr, nullptr));
  CHECK(static_cast<uint32_t *>(phx_symm_buffer(shared.symm, n - 1))[kWords] == 7);
  CHECK_OK(phx_symm_unmap_gathered(shared.symm, range));
  CHECK_OK(phx_mem_free(world, shared.mine));
}

TEST(a_range_shows_threads_what_all_ranks_write) { ranks::as_threads(3, reads_what_the_ranks_write); }
TEST(a_range_shows_processes_what_all_ranks_write) {
  ranks::all_zero(ranks::as_processes(3, reads_what_the_ranks_write));
}

TEST(a_part_must_be_whole_pages_inside_the_block) {
  ranks::as_threads(2, [](int, phx_world *world) {
    Shared shared(world, 3 * kPage - 100);
    void *range = nullptr;
    CHECK_FAILS(PHX_ERR_INVALID, "multiples of the page size", phx_symm_map_gathered(shared.symm, 0, 0, &range));
    CHECK_FAILS(PHX_ERR_INVALID, "multiples of the page size", phx_symm_map_gathered(shared.symm, 8, kPage, &range));
    CHECK_FAILS(PHX_ERR_INVALID, "multiples of the page size", phx_symm_map_gathered(shared.symm, 0, 100, &range));
    CHECK_FAILS(PHX_ERR_INVALID, "end beyond the allocation", phx_symm_map_gathered(shared.symm, 0, 4 * kPage, &range));
    CHECK_FAILS(PHX_ERR_INVALID, "end beyond the allocation",
                phx_symm_map_gathered(shared.symm, 2 * kPage, SIZE_MAX / kPage * kPage, &range));
    CHECK_FAILS(PHX_ERR_INVALID, "out is NULL", phx_symm_map_gathered(shared.symm, 0, kPage, nullptr));
    CHECK(range == nullptr);
    CHECK_FAILS(PHX_ERR_NOT_FOUND, "was not returned by", phx_symm_unmap_gathered(shared.symm, shared.mine));
    CHECK_OK(phx_symm_map_gathered(shared.symm, 0, 3 * kPage, &range));  // with the block's last page
    CHECK_OK(phx_barrier(shared.group, nullptr, nullptr));
    CHECK_OK(phx_mem_free(world, shared.mine));  // the range goes with the handle
  });
}

TEST(a_part_that_is_mapped_gives_the_same_range_and_the_last_few_stay) {
  ranks::as_threads(2, [](int, phx_world *world) {
    Shared shared(world, 32 * kPage);
    void *first = nullptr, *again = nullptr, *other = nullptr;
    CHECK_OK(phx_symm_map_gathered(shared.symm, 0, kPage, &first));
    CHECK_OK(phx_symm_map_gathered(shared.symm, 0, kPage, &again));
    CHECK_OK(phx_symm_map_gathered(shared.symm, 0, 2 * kPage, &other));
    CHECK(again == first && other != first);
    CHECK_OK(phx_symm_unmap_gathered(shared.symm, first));
    static_cast<volatile char *>(first)[2 * kPage - 1] = 1;  // still mapped: the second user has it
    CHECK_OK(phx_symm_unmap_gathered(shared.symm, first));
    CHECK_FAILS(PHX_ERR_NOT_FOUND, "was not returned by", phx_symm_unmap_gathered(shared.symm, first));
    for (size_t i = 0; i < 30; ++i) {  // many parts, none of which stays in use
      void *range = nullptr;
      CHECK_OK(phx_symm_map_gathered(shared.symm, i * kPage, kPage, &range));
      CHECK_OK(phx_symm_unmap_gathered(shared.symm, range));
    }
    static_cast<volatile char *>(other)[4 * kPage - 1] = 1;  // in use all the time
    CHECK_OK(phx_symm_unmap_gathered(shared.symm, other));
    CHECK_OK(phx_barrier(shared.group, nullptr, nullptr));
    CHECK_OK(phx_mem_free(world, shared.mine));
  });
}

TEST(a_gather_into_the_range_does_not_match_one_into_other_memory) {
  ranks::as_threads(2, [](int rank, phx_world *world) {
    Shared shared(world, kPage);
    void *range = nullptr;
    CHECK_OK(phx_symm_map_gathered(shared.symm, 0, kPage, &range));
    std::vector<uint32_t> out(2 * kWords);
    void *const target = rank == 0 ? range : out.data();
    CHECK_FAILS(PHX_ERR_MISMATCH, "called",
                phx_symm_all_gather(shared.symm, 0, target, kWords, PHX_DTYPE_U32, nullptr, nullptr));
    CHECK_OK(phx_mem_free(world, shared.mine));
  });
}

TEST(memory_that_is_not_shared_cannot_be_gathered) {
  ranks::as_threads(1, [](int, phx_world *world) {
    phx_allocator_ops ops{};
    ops.struct_size = sizeof ops;
    ops.name = "private";
    ops.alloc = [](void *, const phx_device *, size_t size, void **pointer, uint64_t *cookie) -> phx_status {
      *pointer = std::aligned_alloc(kPage, (size + kPage - 1) / kPage * kPage);
      *cookie = 0;
      return PHX_OK;
    };
    ops.free = [](void *, void *pointer, uint64_t) -> phx_status {
      std::free(pointer);
      return PHX_OK;
    };
    ops.export_handle = [](void *, void *, uint64_t, void *, size_t *, int32_t *) -> phx_status { return PHX_OK; };
    ops.import_handle = [](void *, const phx_device *, const void *, size_t, int32_t, size_t, void **,
                           uint64_t *) -> phx_status { return PHX_ERR_UNSUPPORTED; };
    ops.unmap = [](void *, void *, uint64_t) -> phx_status { return PHX_OK; };
    ops.destroy = [](void *) {};
    CHECK_OK(phx_allocator_register(world, PHX_DEVICE_CPU, &ops, nullptr));
    Shared shared(world, kPage);
    void *range = nullptr;
    CHECK_FAILS(PHX_ERR_UNSUPPORTED, "cannot map it a second time",
                phx_symm_map_gathered(shared.symm, 0, kPage, &range));
    CHECK_OK(phx_mem_free(world, shared.mine));
  });
}

}  // namespace

int main(int argc, char **argv) { return check::run_all(argc, argv); }
