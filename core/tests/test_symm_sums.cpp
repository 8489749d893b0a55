// Sums over symmetric memory whose result lies elsewhere: the bits of the reference for any number of ranks, and no
// rank reads more of the others' inputs than it sums. Who reads what is seen by what it may not read.
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>

#include "members.h"

namespace {

using collective::Case;
using collective::Member;
using collective::Part;
using collective::What;
using collective::Where;

void expect_bits(Part &part, const Member &member, const Case &c, bool starts) {
  part.prepare(member, c);
  phx_work *work = nullptr;
  CHECK_OK(part.issue(starts ? &work : nullptr));
  if (starts) CHECK_OK(phx_work_wait(work, 0));
  phx_work_release(work);
  const std::string wrong = part.check();
  if (!wrong.empty()) check::failed(__FILE__, __LINE__, wrong);
}

// Up to two ranks sum all inputs at once, more by parts.
TEST(sums_of_two_to_eight_ranks_have_the_bits_of_the_reference) {
  const members::Setup setup = {4096, members::tuning_of(256, 4096, uint64_t{1} << 18, 64)};
  for (const int n : {2, 3, 4, 5, 8})
    members::with_threads(n, setup, [&](const Member &member) {
      Part part;
      uint64_t seed = 1;
      for (const size_t bytes : {size_t{0}, size_t{8}, size_t{64} * n, size_t{4000}, size_t{4096} * n, size_t{4100} * n,
                                 size_t{99996}, size_t{270000}})
        for (const What what : {What::kAllReduce, What::kReduce})
          for (const Where where : {Where::kSymmetric, Where::kRecognised})
            for (const int32_t algo :
                 std::initializer_list<phx_algo>{PHX_ALGO_AUTO, PHX_ALGO_ONE_SHOT, PHX_ALGO_TWO_SHOT}) {
              if (where == Where::kRecognised && algo != PHX_ALGO_AUTO) continue;
              Case c;
              c.what = what;
              c.where = where;
              c.algo = algo;
              c.dtype = seed % 3 == 0 ? PHX_DTYPE_BF16 : PHX_DTYPE_F32;
              c.op = seed % 4 == 0 ? PHX_OP_AVG : PHX_OP_SUM;
              c.count = bytes / phx_dtype_size(c.dtype);
              c.root = static_cast<int>(seed) % n;
              c.seed = 4 * ++seed;  // of recognised ones: all have it there
              expect_bits(part, member, c, seed % 2 == 0);
            }
    });
}

// Hides all of the others' blocks but the part that this rank sums.
class Hidden {
 public:
  Hidden(const Member &member, size_t part_bytes) : member_(member) {
    for (int i = 0; i < member.size(); ++i) {
      if (i == member.self) continue;
      char *const block = static_cast<char *>(phx_symm_buffer(member.symm, i));
      CHECK(mprotect(block, member.block_bytes, PROT_NONE) == 0);
      CHECK(mprotect(block + part_bytes * static_cast<size_t>(member.self), part_bytes, PROT_READ) == 0);
    }
  }
  ~Hidden() {
    for (int i = 0; i < member_.size(); ++i)
      if (i != member_.self) mprotect(phx_symm_buffer(member_.symm, i), member_.block_bytes, PROT_READ | PROT_WRITE);
  }

 private:
  const Member &member_;
};

TEST(a_rank_reads_only_what_it_sums_of_the_inputs_of_others) {
  const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  for (const int n : {3, 4, 8})
    members::with_processes(n, members::kUsual, [&](const Member &member) {
      for (const size_t part_bytes : {32 * page, 128 * page}) {  // in one chunk, and in several
        const size_t count = part_bytes * static_cast<size_t>(n) / sizeof(int32_t);
        auto *in = reinterpret_cast<int32_t *>(member.block);
        std::vector<int32_t> out(count);
        for (size_t i = 0; i < count; ++i) in[i] = member.self + static_cast<int32_t>(i % 1000);
        const auto expect = [&](bool here) {
          for (size_t i = 0; i < count && here; ++i)
            CHECK(out[i] == n * (n - 1) / 2 + n * static_cast<int32_t>(i % 1000));
          std::fill(out.begin(), out.end(), -1);
        };
        const Hidden hidden(member, part_bytes);
        CHECK_OK(phx_all_reduce(member.group, in, out.data(), count, PHX_DTYPE_I32, PHX_OP_SUM, nullptr, nullptr));
        expect(true);
        CHECK_OK(phx_symm_all_reduce(member.symm, 0, out.data(), count, PHX_DTYPE_I32, PHX_OP_SUM, nullptr, nullptr));
        expect(true);
        CHECK_OK(phx_reduce(member.group, in, out.data(), count, PHX_DTYPE_I32, PHX_OP_SUM, 1, nullptr, nullptr));
        expect(member.self == 1);
        CHECK_OK(phx_symm_reduce(member.symm, 0, out.data(), count, PHX_DTYPE_I32, PHX_OP_SUM, 1, nullptr, nullptr));
        expect(member.self == 1);
        // The same for a list, by whichever path.
        phx_call calls[2] = {};
        for (phx_call &call : calls) {
          call.struct_size = sizeof call;
          call.kind = PHX_CALL_ALL_REDUCE;
          call.count = count / 2;
          call.dtype = PHX_DTYPE_I32;
          call.op = PHX_OP_SUM;
        }
        calls[0].in = in, calls[0].out = out.data();
        calls[1].in = in + count / 2, calls[1].out = out.data() + count / 2;
        CHECK_OK(phx_coalesced(member.group, calls, 2, nullptr, nullptr));
        expect(true);
      }
      CHECK(members::zero_copies(member.group) == 4);
    });
}

}  // namespace

int main(int argc, char **argv) { return check::run_all(argc, argv); }
