// Counters in shared memory go on past 2^31 and 2^32: each collective, barrier, signal and message does what it does at
// the beginning. PHALANX_FIRST_COUNT says where they begin. What GPUs count is in test_cuda_counters.cpp.
#include <cstring>

#include "members.h"
#include "messages.h"

namespace {

using collective::Case;
using collective::Member;
using collective::Part;
using collective::What;
using collective::Where;

constexpr uint64_t kHalf = uint64_t{1} << 31, kWhole = uint64_t{1} << 32;

// Groups that are made while it lives begin to count at `first`.
class Beginning {
 public:
  explicit Beginning(uint64_t first) { setenv("PHALANX_FIRST_COUNT", std::to_string(first).c_str(), 1); }
  ~Beginning() { unsetenv("PHALANX_FIRST_COUNT"); }
};

void expect_right(const Part &part) {
  const std::string wrong = part.check();
  if (!wrong.empty()) check::failed(__FILE__, __LINE__, wrong);
}

// The same call blocking, then twice at once, then blocking: at least four epochs.
void call_four_times(const Member &member, Case c) {
  Part first, second;
  const auto block = [&] {
    first.prepare(member, c);
    CHECK_OK(first.issue(nullptr));
    expect_right(first);
  };
  block();
  Case other = c;
  other.symmetric_offset = member.block_bytes / 2;
  phx_work *works[2] = {};
  first.prepare(member, c);
  second.prepare(member, other);
  CHECK_OK(first.issue(&works[0]));
  CHECK_OK(second.issue(&works[1]));
  for (phx_work *work : works) {
    CHECK_OK(phx_work_wait(work, 0));
    phx_work_release(work);
  }
  expect_right(first);
  expect_right(second);
  c.seed += 4;
  block();
}

// Each collective in a group of its own, so that it is the one that passes the end.
void call_everything(phx_world *world, const members::Setup &setup) {
  const int n = phx_world_size(world);
  uint64_t seed = 0;
  for (int what = 0; what < collective::kWhats; ++what)
    for (const Where where : {Where::kPlain, Where::kSymmetric, Where::kCoalesced, Where::kRecognised}) {
      Case c;
      c.what = static_cast<What>(what);
      c.where = where;
      c.in_place = c.what == What::kBroadcast;
      if (!possible(c)) continue;
      // Several chunks; and large enough to be looked for in symmetric memory, also where ranks share cores.
      const size_t bytes = where == Where::kRecognised ? (n == 2 ? 8 << 10 : 260 << 10) : 5 * setup.chunk() / 2;
      c.count = bytes / sizeof(float) / (c.what == What::kReduceScatter || c.what == What::kAllToAll ? n : 1) + 3;
      c.root = what % n;
      c.channel = static_cast<uint32_t>(what % 2);
      c.seed = ++seed;
      const size_t block = 2 * Part::symmetric_bytes(c, n) + 4096;
      const Member member = members::join(world, "each", members::all_of(world), block, setup.tuning);
      call_four_times(member, c);
      CHECK_OK(phx_barrier(member.group, nullptr, nullptr));
      members::leave(world, member);
    }
}

TEST(every_collective_passes_the_end_of_the_counters) {
  for (const uint64_t end : {kHalf, kWhole})
    for (const int n : {2, 3}) {
      const Beginning beginning(end - 2);
      ranks::all_zero(ranks::as_processes(
          n, [](int, phx_world *world) { call_everything(world, members::kTiny); },
          members::options_of(members::kTiny)));
    }
}

// Calls whose inputs are read where they lie leave slots empty. After 2^31 of them the word of an empty slot must not
// say that it is full.
TEST(a_slot_that_was_left_empty_for_long_is_not_taken_for_full) {
  constexpr size_t kCount = 65536;  // enough where ranks outnumber cores, too
  for (const uint64_t age : {kHalf - 4, kHalf + 8, kWhole - 3})
    for (const int n : {2, 3}) {
      const Beginning beginning(age);
      members::with_processes(n, members::kUsual, [n](const Member &member) {
        auto *block = reinterpret_cast<float *>(member.block);
        std::vector<float> ordinary(kCount), out(kCount);
        for (int round = 0; round < 12; ++round) {
          // Rank 0's, all ranks', none; then those of all but rank 0.
          const bool here =
              round % 4 == 1 || (round % 4 == 0 && member.self == 0) || (round % 4 == 3 && member.self != 0);
          float *in = here ? block : ordinary.data();
          std::fill_n(in, kCount, static_cast<float>((member.self + 1) * (round + 1)));
          std::fill_n(out.data(), kCount, 0.0f);
          CHECK_OK(phx_all_reduce(member.group, in, out.data(), kCount, PHX_DTYPE_F32, PHX_OP_SUM, nullptr, nullptr));
          const float sum = static_cast<float>(n * (n + 1) / 2 * (round + 1));
          for (const float value : out) CHECK(value == sum);
        }
        CHECK(members::zero_copies(member.group) == 3);
      });
    }
}

TEST(lists_of_calls_read_where_inputs_lie_and_where_they_do_not) {
  constexpr size_t kCount = 65536;
  const Beginning beginning(kHalf + 8);
  members::with_processes(2, members::kUsual, [](const Member &member) {
    auto *block = reinterpret_cast<float *>(member.block);
    std::vector<float> ordinary(2 * kCount), out(2 * kCount);
    for (int round = 0; round < 8; ++round) {
      phx_call calls[2] = {};
      for (int i = 0; i < 2; ++i) {
        float *in = (round + i) % 2 == 0 || member.self == 0 ? block + i * kCount : ordinary.data() + i * kCount;
        std::fill_n(in, kCount, static_cast<float>(member.self + round + i));
        calls[i].struct_size = sizeof calls[i];
        calls[i].kind = PHX_CALL_ALL_REDUCE;
        calls[i].in = in;
        calls[i].out = out.data() + i * kCount;
        calls[i].count = kCount;
        calls[i].dtype = PHX_DTYPE_F32;
        calls[i].op = PHX_OP_SUM;
      }
      CHECK_OK(phx_coalesced(member.group, calls, 2, nullptr, nullptr));
      for (int i = 0; i < 2; ++i)
        for (size_t k = 0; k < kCount; ++k) CHECK(out[i * kCount + k] == static_cast<float>(1 + 2 * (round + i)));
    }
  });
}

TEST(barriers_and_signals_pass_the_end_of_the_counters) {
  for (const uint64_t end : {kHalf, kWhole})
    for (const int n : {2, 3}) {
      const Beginning beginning(end - 3);
      ranks::all_zero(ranks::as_processes(n, [n](int rank, phx_world *world) {
        phx_group *group = ranks::make_group(world);
        phx_symm *symm = nullptr;
        CHECK_OK(phx_symm_alloc(group, nullptr, 4096, 0, &symm));
        const int next = (rank + 1) % n, previous = (rank + n - 1) % n;
        auto *mine = static_cast<int32_t *>(phx_symm_buffer(symm, rank));
        auto *theirs = static_cast<int32_t *>(phx_symm_buffer(symm, next));
        for (int32_t round = 1; round <= 8; ++round) {
          *theirs = round * 10 + rank;
          CHECK_OK(phx_symm_put_signal(symm, next, 2));
          CHECK_OK(phx_symm_wait_signal(symm, previous, 2, 0));
          CHECK(*mine == round * 10 + previous);
          CHECK_OK(phx_symm_barrier(symm, 1, 0));
          CHECK_OK(phx_barrier(group, nullptr, nullptr));
        }
        // None is left, and a wait that has timed out has taken none.
        CHECK(phx_symm_wait_signal(symm, previous, 2, 1) == PHX_ERR_TIMEOUT);
        CHECK_OK(phx_barrier(group, nullptr, nullptr));
        CHECK_OK(phx_symm_put_signal(symm, next, 2));
        CHECK_OK(phx_symm_wait_signal(symm, previous, 2, 0));
        CHECK_OK(phx_barrier(group, nullptr, nullptr));
        phx_symm_release(symm);
        phx_group_release(group);
      }));
    }
}

// Messages of any size, in both directions, before and after their receives are posted.
void send_and_receive(int rank, phx_world *world) {
  constexpr size_t kSizes[] = {0, 1, 100, 40000, 700000, 64, 3};
  phx_group *group = ranks::make_group(world);
  uint32_t key = 0;
  for (int round = 0; round < 4; ++round)
    for (const size_t size : kSizes) {
      const int from = static_cast<int>(++key % 2);
      if (rank == from) {
        const std::vector<char> data = messages::letters(key, size), small = messages::letters(key + 1000, 30);
        phx_work *work = messages::start_send(group, 1 - rank, 1, data);
        messages::send(group, 1 - rank, 2, small);
        messages::wait(work);
      } else {
        if (round % 2 == 0) messages::expect(group, from, 2, key + 1000, 30);
        messages::expect(group, from, 1, key, size);
        if (round % 2 == 1) messages::expect(group, from, 2, key + 1000, 30);
      }
    }
  CHECK_OK(phx_barrier(group, nullptr, nullptr));
  phx_group_release(group);
}

TEST(messages_pass_the_end_of_the_counters) {
  for (const uint64_t end : {kHalf, kWhole})
    for (const uint64_t before : {1, 7, 3000}) {  // in front of the end, and in a message that goes round the ring
      const Beginning beginning(end - before);
      ranks::all_zero(ranks::as_processes(2, send_and_receive));
    }
}

TEST(the_recorder_counts_on) {
  const Beginning beginning(kWhole - 3);
  ranks::all_zero(ranks::as_processes(2, [](int, phx_world *world) {
    phx_group *group = ranks::make_group(world);
    float x[4] = {};
    for (int i = 0; i < 6; ++i) CHECK_OK(phx_all_reduce(group, x, x, 4, PHX_DTYPE_F32, PHX_OP_MAX, nullptr, nullptr));
    CHECK_OK(phx_barrier(group, nullptr, nullptr));
    std::vector<char> text(1 << 20);
    size_t size = 0;
    CHECK_OK(phx_world_dump(world, text.data(), text.size(), &size));
    CHECK(std::strstr(text.data(), "\"started\": 4294967300, \"completed\": 4294967300") != nullptr);
    for (const char *number : {"4294967294", "4294967295", "4294967296", "4294967297"})
      CHECK(std::strstr(text.data(), (std::string("\"sequence\": ") + number + ", \"call\": \"all_reduce\"").c_str()));
    CHECK_OK(phx_barrier(group, nullptr, nullptr));
    phx_group_release(group);
  }));
}

TEST(groups_made_of_others_begin_there_too) {
  const Beginning beginning(kWhole - 2);
  ranks::all_zero(ranks::as_processes(3, [](int rank, phx_world *world) {
    phx_group *group = ranks::make_group(world), *part = nullptr;
    CHECK_OK(phx_group_split(group, rank == 2 ? 1 : 0, rank, "part", 0, &part));
    const int n = rank == 2 ? 1 : 2;
    for (int32_t i = 0; i < 6; ++i) {
      int32_t x = i;
      CHECK_OK(phx_all_reduce(part, &x, &x, 1, PHX_DTYPE_I32, PHX_OP_SUM, nullptr, nullptr));
      CHECK(x == n * i);
    }
    CHECK_OK(phx_barrier(group, nullptr, nullptr));
    phx_group_release(part);
    phx_group_release(group);
  }));
}

TEST(ranks_that_begin_at_different_numbers_do_not_meet) {
  ranks::all_zero(ranks::as_processes(2, [](int rank, phx_world *world) {
    const std::vector<int32_t> all = {0, 1};
    phx_group *group = nullptr;
    {
      const Beginning beginning(rank == 0 ? 5 : 6);
      CHECK_FAILS(PHX_ERR_MISMATCH, "PHALANX_FIRST_COUNT", phx_group_create(world, "differ", all.data(), 2, 0, &group));
    }
    setenv("PHALANX_FIRST_COUNT", "4294967296", 1);
    CHECK_FAILS(PHX_ERR_INVALID, "expected a number from 0 to 4294967295",
                phx_group_create(world, "too large", all.data(), 2, 0, &group));
    unsetenv("PHALANX_FIRST_COUNT");
    CHECK_OK(phx_group_create(world, "usual", all.data(), 2, 0, &group));
    CHECK_OK(phx_barrier(group, nullptr, nullptr));
    phx_group_release(group);
  }));
}

}  // namespace

int main(int argc, char **argv) { return check::run_all(argc, argv); }
