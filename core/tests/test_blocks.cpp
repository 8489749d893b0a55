// Lists of blocks: which are refused, and what the others copy and allocate. Their values are in test_matrix.
#include "ops/blocks.h"

#include <cstdlib>
#include <cstring>
#include <functional>
#include <new>
#include <vector>

#include "base/sanitizers.h"
#include "kernels/copies.h"
#include "ranks.h"

namespace {

thread_local size_t allocated_bytes = 0;  // by this thread

}  // namespace

#ifndef PHX_SANITIZED  // a sanitizer has operators of its own
void *operator new(size_t size) {
  allocated_bytes += size;
  if (void *const made = std::malloc(size)) return made;
  throw std::bad_alloc();
}
void operator delete(void *at) noexcept { std::free(at); }
void operator delete(void *at, size_t) noexcept { std::free(at); }
#endif

namespace {

using phx::blocks_overlap;

constexpr size_t kNobody = SIZE_MAX;

void refuses(phx_status status, const char *words) {
  CHECK(status == PHX_ERR_INVALID);
  if (std::strstr(phx_last_error(), words) == nullptr) check::failed(__FILE__, __LINE__, phx_last_error());
}

}  // namespace

TEST(only_outputs_that_share_bytes_overlap) {
  float data[64];
  const auto dense = [&](size_t at, size_t count) { return phx_block{data + at, count, 0, 0}; };
  const auto rows = [&](size_t at, size_t count, size_t row, size_t stride) {
    return phx_block{data + at, count, row, stride};
  };
  const auto overlap = [&](const std::vector<phx_block> &in, const std::vector<phx_block> &out, size_t self = kNobody) {
    return blocks_overlap(in.data(), in.size(), out.data(), out.size(), sizeof(float), self);
  };
  CHECK(!overlap({dense(0, 8)}, {dense(8, 8), dense(16, 8)}));
  CHECK(overlap({dense(0, 9)}, {dense(8, 8), dense(16, 8)}));
  CHECK(overlap({dense(32, 8)}, {dense(8, 9), dense(16, 8)}));
  CHECK(!overlap({dense(0, 8), dense(4, 8)}, {dense(16, 8), dense(24, 8)}));  // inputs may
  CHECK(!overlap({dense(0, 8)}, {dense(4, 0), dense(8, 8)}));                 // nothing overlaps nothing

  // This rank's own block, and just that.
  CHECK(!overlap({dense(8, 8)}, {dense(0, 8), dense(8, 8)}, 1));
  CHECK(overlap({dense(8, 8)}, {dense(0, 8), dense(8, 8)}, 0));
  CHECK(overlap({dense(8, 8)}, {dense(0, 8), dense(8, 8)}));
  CHECK(overlap({dense(9, 7)}, {dense(0, 8), dense(8, 8)}, 1));
  CHECK(!overlap({dense(0, 8), dense(8, 8)}, {dense(0, 8)}, 0));

  // Columns of one matrix.
  CHECK(!overlap({}, {rows(0, 8, 2, 8), rows(2, 8, 2, 8), rows(4, 16, 4, 8)}));
  CHECK(overlap({}, {rows(0, 8, 2, 8), rows(1, 8, 2, 8)}));
  CHECK(overlap({}, {rows(6, 8, 2, 8), rows(7, 8, 2, 8)}));
  CHECK(overlap({}, {rows(1, 32, 8, 9), rows(9, 16, 2, 9)}));  // the end of a row reaches into the next one
  CHECK(!overlap({}, {rows(0, 8, 2, 8), dense(10, 6)}));       // between two rows
  CHECK(overlap({}, {rows(0, 8, 2, 8), dense(10, 7)}));
  CHECK(overlap({}, {rows(0, 8, 2, 8), rows(2, 8, 2, 12)}));  // other strides are not looked into
}

TEST(wrong_lists_are_refused) {
  ranks::as_threads(1, [](int, phx_world *world) {
    phx_group *group = ranks::make_group(world);
    std::vector<float> in(16), out(16);
    const auto gather = [&](phx_block block) {
      return phx_all_gather_blocks(group, in.data(), &block, PHX_DTYPE_F32, nullptr, nullptr);
    };
    refuses(phx_all_gather_blocks(group, in.data(), nullptr, PHX_DTYPE_F32, nullptr, nullptr),
            "list of blocks is NULL");
    refuses(gather({nullptr, 4, 0, 0}), "block 0 is NULL");
    refuses(gather({out.data(), 4, 0, 1}), "the stride must be at least the row");
    refuses(gather({out.data(), 4, 2, 1}), "the stride must be at least the row");
    refuses(gather({out.data(), size_t{1} << 49, 0, 0}), "more than memory can hold");
    refuses(gather({out.data(), size_t{1} << 48, 1, size_t{1} << 40}), "more than memory can hold");
    refuses(gather({in.data() + 1, 4, 0, 0}), "overlaps");
    phx_block block{out.data(), 4, 0, 0};
    refuses(phx_all_gather_blocks(nullptr, in.data(), &block, PHX_DTYPE_F32, nullptr, nullptr), "NULL");
    refuses(phx_all_gather_blocks(group, in.data(), &block, 99, nullptr, nullptr), "unknown dtype");
    refuses(phx_all_gather_blocks(group, nullptr, &block, PHX_DTYPE_F32, nullptr, nullptr), "in or out is NULL");
    refuses(phx_gather_blocks(group, in.data(), &block, 5, PHX_DTYPE_F32, 0, nullptr, nullptr), "`count`");
    refuses(phx_scatter_blocks(group, &block, in.data(), 4, PHX_DTYPE_F32, 7, nullptr, nullptr), "root is 7");
    refuses(phx_reduce_scatter_blocks(group, &block, in.data(), PHX_DTYPE_F32, 99, nullptr, nullptr),
            "unknown reduce op");
    CHECK_OK(gather({out.data(), 4, 2, 5}));  // the group is as before
    phx_group_release(group);
  });
}

TEST(lists_copy_what_the_plain_form_copies_which_allocates_nothing_and_they_no_data) {
  constexpr int kRanks = 2;
  constexpr size_t kCount = size_t{128} << 10;  // elements of a block
  ranks::as_threads(kRanks, [](int rank, phx_world *world) {
    phx_group *group = ranks::make_group(world);
    std::vector<float> from(kRanks * 2 * kCount), to(from);
    phx_block in[kRanks], out[kRanks];
    for (int i = 0; i < kRanks; ++i) {
      in[i] = {&from[(2 * i + 1) * kCount], kCount, 0, 0};
      out[i] = {&to[(2 * i + 1) * kCount], kCount, 0, 0};
    }
    struct Spent {
      size_t copied, allocated;
    };
    const auto spent = [&](const std::function<phx_status()> &call) {
      CHECK_OK(call());  // the first one may map what later ones use again
      const size_t copied = phx::kernels::copied_bytes, allocated = allocated_bytes;
      CHECK_OK(call());
      return Spent{phx::kernels::copied_bytes - copied, allocated_bytes - allocated};
    };
    const auto compare = [&](const char *name, const std::function<phx_status()> &plain,
                             const std::function<phx_status()> &list) {
      const Spent expected = spent(plain), found = spent(list);
      if (expected.copied != 0 && found.copied == expected.copied && expected.allocated == 0 && found.allocated < 1024)
        return;
      std::fprintf(stderr, "%s, rank %d: %zu bytes copied instead of %zu, %zu and %zu allocated\n", name, rank,
                   found.copied, expected.copied, expected.allocated, found.allocated);
      check::failed(__FILE__, __LINE__, name);
    };
    const void *x = from.data();
    void *y = to.data();
    const auto type = PHX_DTYPE_F32;
    compare(
        "all_gather", [&] { return phx_all_gather(group, x, y, kCount, type, nullptr, nullptr); },
        [&] { return phx_all_gather_blocks(group, x, out, type, nullptr, nullptr); });
    compare(
        "all_to_all", [&] { return phx_all_to_all(group, x, y, kCount, type, nullptr, nullptr); },
        [&] { return phx_all_to_all_blocks(group, in, out, type, nullptr, nullptr); });
    compare(
        "reduce_scatter", [&] { return phx_reduce_scatter(group, x, y, kCount, type, PHX_OP_SUM, nullptr, nullptr); },
        [&] { return phx_reduce_scatter_blocks(group, in, y, type, PHX_OP_SUM, nullptr, nullptr); });
    compare(
        "gather", [&] { return phx_gather(group, x, y, kCount, type, 0, nullptr, nullptr); },
        [&] { return phx_gather_blocks(group, x, out, kCount, type, 0, nullptr, nullptr); });
    compare(
        "scatter", [&] { return phx_scatter(group, x, y, kCount, type, 0, nullptr, nullptr); },
        [&] { return phx_scatter_blocks(group, in, y, kCount, type, 0, nullptr, nullptr); });
    phx_group_release(group);
  });
}

TEST(calls_in_flight_keep_what_is_buffered_in_memory_of_earlier_ones) {
  constexpr size_t kInFlight = 20, kCount = size_t{16} << 10;  // more than there are slots for; elements
  ranks::as_threads(2, [](int rank, phx_world *world) {
    phx_group *group = ranks::make_group(world);
    const std::vector<float> in(kCount, static_cast<float>(rank));
    std::vector<float> out(2 * kCount * kInFlight);
    const auto allocated = [&](uint32_t flags) {
      phx_options options = PHX_OPTIONS_INIT;
      options.flags = flags;
      const size_t before = allocated_bytes;
      phx_work *works[kInFlight];
      for (size_t i = 0; i < kInFlight; ++i)
        CHECK_OK(phx_all_gather(group, in.data(), &out[2 * kCount * i], kCount, PHX_DTYPE_F32, &options, &works[i]));
      for (phx_work *work : works) {
        CHECK_OK(phx_work_wait(work, 10000));
        phx_work_release(work);
      }
      return allocated_bytes - before;
    };
    CHECK(allocated(0) < kInFlight * 4096);
    const size_t first = allocated(PHX_OPTION_BUFFERED);
    for (size_t i = 0; i < out.size(); ++i) CHECK(out[i] == static_cast<float>(i / kCount % 2));
#ifndef PHX_SANITIZED
    CHECK(first > kCount * sizeof(float));
#endif
    CHECK(allocated(PHX_OPTION_BUFFERED) < kInFlight * 4096 && first < kInFlight * 4 * kCount * sizeof(float));
    phx_group_release(group);
  });
}

int main(int argc, char **argv) { return check::run_all(argc, argv); }
