// Long inputs, which the reduction kernels walk through in another way, and the ends of mapped memory.
#include <sys/mman.h>
#include <unistd.h>

#include "kernel_reference.h"

using namespace kernel_test;

namespace {

// `bytes` that end where a page begins that must not be touched; one such page lies before the first, too.
class Fenced {
 public:
  explicit Fenced(size_t bytes) : bytes_(bytes) {
    const size_t page = static_cast<size_t>(::sysconf(_SC_PAGESIZE));
    size_ = (bytes + page - 1) / page * page + 2 * page;
    base_ = static_cast<unsigned char *>(
        ::mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    if (base_ == MAP_FAILED) check::failed(__FILE__, __LINE__, "mmap");
    ::mprotect(base_, page, PROT_NONE);
    ::mprotect(base_ + size_ - page, page, PROT_NONE);
    start_ = base_ + size_ - page - bytes;
  }
  ~Fenced() { ::munmap(base_, size_); }
  Fenced(const Fenced &) = delete;
  Fenced &operator=(const Fenced &) = delete;
  unsigned char *data() const { return start_; }
  size_t size() const { return bytes_; }

 private:
  size_t bytes_ = 0, size_ = 0;
  unsigned char *base_ = nullptr, *start_ = nullptr;
};

std::vector<Bytes> random_inputs(std::mt19937_64 &random, int32_t dtype, size_t n, size_t count) {
  std::vector<Bytes> in;
  for (size_t k = 0; k < n; ++k) in.push_back(random_elements(random, dtype, count));
  return in;
}

constexpr int32_t kDtypes[] = {PHX_DTYPE_F16, PHX_DTYPE_BF16, PHX_DTYPE_F32,  PHX_DTYPE_F64,    PHX_DTYPE_U8,
                               PHX_DTYPE_I32, PHX_DTYPE_C64,  PHX_DTYPE_C128, PHX_DTYPE_F8E4M3, PHX_DTYPE_F8E5M2};
constexpr size_t kLong = size_t{16} << 10;  // bytes; what the kernels call wide

}  // namespace

TEST(long_inputs_of_every_pair_equal_the_reference) {
  std::mt19937_64 random(11);
  for_each_pair([&](int32_t dtype, int32_t op) {
    const size_t count = (kLong + 1500) / phx_dtype_size(dtype);
    expect_all(random_inputs(random, dtype, 2, count), count, dtype, op, 2, kScale);
  });
}

TEST(lengths_around_the_change_to_the_long_way_are_alike) {
  std::mt19937_64 random(12);
  for (int32_t dtype : kDtypes) {
    const size_t size = phx_dtype_size(dtype);
    for (size_t bytes :
         {kLong - size, kLong, kLong + size, kLong + 1024, kLong + 1024 + 256 + size, kLong + 4096 - size})
      for (size_t n : {1, 3}) {
        const std::vector<Bytes> in = random_inputs(random, dtype, n, bytes / size);
        expect_all(in, bytes / size, dtype, PHX_OP_SUM, static_cast<int64_t>(n), kScale);
      }
  }
}

TEST(long_inputs_may_have_any_alignment_and_the_output_may_be_one_of_them) {
  std::mt19937_64 random(13);
  for (int32_t dtype : kDtypes) {
    const size_t count = (kLong + 2100) / phx_dtype_size(dtype);
    for (size_t n : {2, 3}) {
      const std::vector<Bytes> in = random_inputs(random, dtype, n, count);
      const int32_t op = is_complex(dtype) ? PHX_OP_PROD : PHX_OP_AVG;
      for (size_t shift : {1, 8, 16, 20, 60})
        for (int alias : {-1, 0, static_cast<int>(n) - 1})
          expect_all(in, count, dtype, op, static_cast<int64_t>(n), kScale, shift, alias);
    }
  }
}

TEST(nothing_is_read_or_written_beyond_the_ends) {
  std::mt19937_64 random(14);
  for (int32_t dtype : kDtypes) {
    const size_t size = phx_dtype_size(dtype);
    for (size_t count : {size_t{1}, size_t{3}, 64 / size, 64 / size + 1, 256 / size + 3, 4096 / size, 4096 / size + 1,
                         kLong / size + 5}) {
      const std::vector<Bytes> in = random_inputs(random, dtype, 2, count);
      const Bytes wanted = reference(in, count, dtype, PHX_OP_SUM, 2, 1);
      Fenced a(count * size), b(count * size), out(count * size);
      std::memcpy(a.data(), in[0].data(), a.size());
      std::memcpy(b.data(), in[1].data(), b.size());
      const void *places[] = {a.data(), b.data()};
      for (const char *isa : kIsas) {
        if (!available(isa)) continue;
        for (const ReduceFn fn :
             {find_reduce_isa(isa, dtype, PHX_OP_SUM), find_reduce_isa(isa, dtype, PHX_OP_SUM, Results::kStreamed)}) {
          std::memset(out.data(), 0xa5, out.size());
          fn(out.data(), places, 2, count, 2, 1);
          CHECK(std::memcmp(out.data(), wanted.data(), wanted.size()) == 0);
        }
        Fenced one(count * size), other(count * size);
        std::memcpy(one.data(), in[0].data(), one.size());
        std::memcpy(other.data(), in[1].data(), other.size());
        const void *blocks[] = {one.data(), other.data()};
        find_reduce_isa(isa, dtype, PHX_OP_SUM, Results::kIntoAll)(nullptr, blocks, 2, count, 2, 1);
        CHECK(std::memcmp(one.data(), wanted.data(), wanted.size()) == 0);
        CHECK(std::memcmp(other.data(), wanted.data(), wanted.size()) == 0);
      }
    }
  }
}

TEST(the_other_kernels_are_there_for_the_same_pairs) {
  for (int32_t dtype = -1; dtype <= PHX_DTYPE_F8E5M2 + 1; ++dtype)
    for (int32_t op = -1; op <= PHX_OP_PREMUL_SUM + 1; ++op) {
      for (const Results results : {Results::kStreamed, Results::kIntoAll}) {
        CHECK((phx::kernels::find_reduce(dtype, op, results) != nullptr) ==
              (phx::kernels::find_reduce(dtype, op) != nullptr));
        for (const char *isa : kIsas)
          CHECK((find_reduce_isa(isa, dtype, op, results) != nullptr) == (find_reduce_isa(isa, dtype, op) != nullptr));
      }
    }
}

int main(int argc, char **argv) { return check::run_all(argc, argv); }
