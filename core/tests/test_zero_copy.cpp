// Collectives on ordinary pointers that lie in symmetric memory. Their results are in test_matrix.cpp; here is when
// nothing is copied, and when it is.
#include <cstring>

#include "members.h"

namespace {

using collective::Member;
using members::zero_copies;

constexpr size_t kCount = 65536;  // enough where ranks outnumber cores, too

void fill(float *values, float value) { std::fill_n(values, kCount, value); }

// all_reduce of ones and twos among two ranks.
void sum(const Member &member, phx_group *group, float *in, float *out, phx_work **work = nullptr) {
  fill(in, static_cast<float>(member.self + 1));
  CHECK_OK(phx_all_reduce(group, in, out, kCount, PHX_DTYPE_F32, PHX_OP_SUM, nullptr, work));
}
void is_three(const float *values) {
  for (size_t i = 0; i < kCount; ++i) CHECK(values[i] == 3.0f);
}

void with_two(const members::Body &body) {
  members::with_threads(2, members::kUsual, body);
  members::with_processes(2, members::kUsual, body);
}

TEST(an_input_in_symmetric_memory_is_read_where_it_lies_at_any_offset) {  // M35
  with_two([](const Member &member) {
    auto *block = reinterpret_cast<float *>(member.block);
    std::vector<float> out(kCount);
    sum(member, member.group, block, out.data());
    is_three(out.data());
    CHECK(zero_copies(member.group) == 1);
    sum(member, member.group, block + 64 + 32 * member.self, out.data());  // elsewhere on each rank
    is_three(out.data());
    CHECK(zero_copies(member.group) == 2);
    sum(member, member.group, block + 128, block + 128);  // in place
    is_three(block + 128);
    CHECK(zero_copies(member.group) == 3);
  });
}

TEST(inputs_that_are_not_all_in_one_allocation_are_copied) {
  with_two([](const Member &member) {
    auto *block = reinterpret_cast<float *>(member.block);
    std::vector<float> ordinary(kCount), out(kCount);
    sum(member, member.group, member.self == 0 ? block : ordinary.data(), out.data());
    is_three(out.data());
    // In place on one rank only.
    sum(member, member.group, block, member.self == 0 ? block : out.data());
    is_three(member.self == 0 ? block : out.data());
    sum(member, member.group, ordinary.data(), out.data());
    is_three(out.data());
    CHECK(zero_copies(member.group) == 0);
  });
}

TEST(started_ones_in_flight_behind_each_other_mix) {
  with_two([](const Member &member) {
    auto *block = reinterpret_cast<float *>(member.block);
    constexpr size_t kEach = 12;
    std::vector<std::vector<float>> ordinary(kEach, std::vector<float>(kCount)), out(kEach, std::vector<float>(kCount));
    phx_work *works[kEach] = {};
    uint64_t expected = 0;
    for (size_t i = 0; i < kEach; ++i) {
      const bool blocks = i % 4 == 3;
      const bool here = i % 3 != 2 || member.self == 0;  // of every third, rank 1 has none
      sum(member, member.group, here ? block + i * kCount : ordinary[i].data(), out[i].data(),
          blocks ? nullptr : &works[i]);
      if (i % 3 != 2) ++expected;
    }
    for (size_t i = 0; i < kEach; ++i) {
      if (works[i] != nullptr) CHECK_OK(phx_work_wait(works[i], 0));
      phx_work_release(works[i]);
      is_three(out[i].data());
    }
    CHECK(zero_copies(member.group) == expected);
  });
}

TEST(a_rendezvous_with_one_group_serves_every_group_of_the_same_processes) {
  members::with_processes(2, members::kUsual, [](const Member &member) {
    phx_group *other = nullptr;
    CHECK_OK(phx_group_split(member.group, 0, member.self, "other", 0, &other));
    phx_group *turned = nullptr;  // the ranks in the other order
    CHECK_OK(phx_group_split(member.group, 0, -member.self, "turned", 0, &turned));
    auto *block = reinterpret_cast<float *>(member.block);
    std::vector<float> out(kCount);
    sum(member, other, block, out.data());
    is_three(out.data());
    CHECK(zero_copies(other) == 1 && zero_copies(member.group) == 0);
    sum(member, turned, block, out.data());
    is_three(out.data());
    CHECK(zero_copies(turned) == 0);
    CHECK_OK(phx_barrier(other, nullptr, nullptr));
    phx_group_release(turned);
    phx_group_release(other);
  });
}

TEST(small_inputs_and_those_of_a_chosen_algorithm_are_copied) {
  with_two([](const Member &member) {
    auto *block = reinterpret_cast<float *>(member.block);
    std::vector<float> out(kCount);
    phx_options options{};
    options.struct_size = sizeof options;
    options.algo = PHX_ALGO_TWO_SHOT;
    fill(block, static_cast<float>(member.self + 1));
    CHECK_OK(phx_all_reduce(member.group, block, out.data(), kCount, PHX_DTYPE_F32, PHX_OP_SUM, &options, nullptr));
    is_three(out.data());
    CHECK_OK(phx_all_reduce(member.group, block, out.data(), 16, PHX_DTYPE_F32, PHX_OP_SUM, nullptr, nullptr));
    CHECK(out[0] == 3.0f);
    CHECK(zero_copies(member.group) == 0);
  });
}

// broadcast and scatter: only where the root's input lies matters.
TEST(what_a_root_gives_is_read_where_it_lies_whatever_the_others_have) {  // M35
  with_two([](const Member &member) {
    auto *block = reinterpret_cast<float *>(member.block);
    std::vector<float> ordinary(2 * kCount), out(kCount);
    const auto half = [&](const float *values) {
      for (size_t i = 0; i < kCount; ++i) CHECK(values[i] == static_cast<float>(member.self + 1));
    };
    uint64_t expected = 0;
    for (const bool shared : {true, false})
      for (const int root : {0, 1})
        for (const bool starts : {false, true}) {
          const bool here = member.self == root;
          float *given = shared && here ? block + 32 : ordinary.data();
          if (here) fill(given, 1.0f), fill(given + kCount, 2.0f);
          phx_work *work = nullptr;
          CHECK_OK(phx_scatter(member.group, here ? given : nullptr, out.data(), kCount, PHX_DTYPE_F32, root, nullptr,
                               starts ? &work : nullptr));
          if (starts) CHECK_OK(phx_work_wait(work, 0));
          phx_work_release(work);
          half(out.data());
          float *buffer = here ? given : starts ? out.data() : block + kCount;
          fill(buffer, here ? 3.0f : 0.0f);
          CHECK_OK(phx_broadcast(member.group, buffer, kCount, PHX_DTYPE_F32, root, nullptr, nullptr));
          is_three(buffer);
          expected += shared ? 2 : 0;
          CHECK(zero_copies(member.group) == expected);
        }
    float *given = member.self == 0 ? block : ordinary.data();  // a scatter in place
    fill(block, 1.0f), fill(block + kCount, 2.0f);
    CHECK_OK(phx_scatter(member.group, given, given, kCount, PHX_DTYPE_F32, 0, nullptr, nullptr));
    half(given);
    CHECK(zero_copies(member.group) == expected + 1);
  });
}

// A list of six calls on this rank, all of two ranks' ones and twos. `at[i]`: where call i has its input.
struct List {
  static constexpr size_t kCalls = 6;
  float *at[kCalls];
  std::vector<float> ordinary[kCalls], out[kCalls];

  List(const Member &member) {
    for (size_t i = 0; i < kCalls; ++i) {
      ordinary[i].resize(2 * kCount);
      out[i].resize(2 * kCount);
      at[i] = reinterpret_cast<float *>(member.block) + 64 + i * 2 * kCount;
    }
  }
  void issue(const Member &member, bool starts) {
    constexpr int32_t kKinds[kCalls] = {PHX_CALL_ALL_REDUCE, PHX_CALL_ALL_GATHER, PHX_CALL_REDUCE_SCATTER,
                                        PHX_CALL_BROADCAST,  PHX_CALL_SCATTER,    PHX_CALL_ALL_REDUCE};
    phx_call calls[kCalls + 1] = {};
    float few[8];
    std::fill_n(few, 8, 1.0f);
    for (size_t i = 0; i <= kCalls; ++i) {
      phx_call &call = calls[i];
      call.struct_size = sizeof call;
      call.dtype = PHX_DTYPE_F32;
      call.kind = i < kCalls ? kKinds[i] : PHX_CALL_ALL_REDUCE;  // the last one is too small to be looked for
      const bool sums = call.kind == PHX_CALL_ALL_REDUCE || call.kind == PHX_CALL_REDUCE_SCATTER;
      call.op = sums ? PHX_OP_SUM : 0;
      call.root_group_rank = i == 4 ? 1 : 0;
      call.count = i < kCalls ? kCount : 8;
      call.in = i < kCalls ? at[i] : few;
      call.out = i == kCalls ? few : i == 3 || i == 5 ? at[i] : out[i].data();
      if (i < kCalls) std::fill_n(at[i], 2 * kCount, static_cast<float>(member.self + 1));
    }
    phx_work *work = nullptr;
    CHECK_OK(phx_coalesced(member.group, calls, kCalls + 1, nullptr, starts ? &work : nullptr));
    if (starts) CHECK_OK(phx_work_wait(work, 0));
    phx_work_release(work);
    CHECK(few[0] == 2.0f && few[7] == 2.0f);
    is_three(out[0].data());
    for (size_t i = 0; i < 2 * kCount; ++i) CHECK(out[1][i] == (i < kCount ? 1.0f : 2.0f));
    is_three(out[2].data());
    for (size_t i = 0; i < kCount; ++i) CHECK(at[3][i] == 1.0f && out[4][i] == 2.0f);
    is_three(at[5]);
  }
};

TEST(each_call_of_a_list_is_found_by_itself) {  // M35
  with_two([](const Member &member) {
    uint64_t before = 0;
    const auto found = [&](uint64_t calls) {
      CHECK(zero_copies(member.group) == before + calls);
      before += calls;
    };
    for (const bool starts : {false, true}) {
      List all(member);
      all.issue(member, starts);
      found(6);
      List some(member);  // one of the second call, and one of what only the other rank gives
      if (member.self == 0) some.at[1] = some.ordinary[1].data(), some.at[4] = some.ordinary[4].data();
      some.issue(member, starts);
      found(5);
      List one(member);  // this one has only what it gives alone
      if (member.self == 1)
        for (const size_t i : {0, 1, 2, 3, 5}) one.at[i] = one.ordinary[i].data();
      one.issue(member, starts);
      found(2);
      List none(member);
      if (member.self == 1)
        for (size_t i = 0; i < List::kCalls; ++i) none.at[i] = none.ordinary[i].data();
      none.issue(member, starts);
      found(1);  // the broadcast of rank 0
      List elsewhere(member);
      if (member.self == 1) std::swap(elsewhere.at[0], elsewhere.at[1]);  // other offsets are as good
      elsewhere.issue(member, starts);
      found(6);
    }
  });
}

// Rank 1 no longer has its part of what rank 0 goes on to use.
TEST(what_a_rank_has_freed_is_copied_for_it) {
  const auto body = [](int self, phx_world *world) {
    const Member member = members::join(world, "all", {0, 1}, members::kBlockBytes, members::kUsual.tuning);
    void *more = nullptr;
    CHECK_OK(phx_mem_alloc(world, nullptr, members::kBlockBytes, &more));
    phx_symm *symm = nullptr;
    CHECK_OK(phx_symm_rendezvous(member.group, more, 0, &symm));
    phx_symm_release(symm);
    if (self == 1) CHECK_OK(phx_mem_free(world, more));
    auto *block = static_cast<float *>(more);
    std::vector<float> ordinary(2 * kCount), out(kCount);
    float *given = self == 0 ? block : ordinary.data();
    fill(given, 3.0f), fill(given + kCount, 3.0f);
    CHECK_OK(phx_scatter(member.group, given, out.data(), kCount, PHX_DTYPE_F32, 0, nullptr, nullptr));
    is_three(out.data());
    fill(given, self == 0 ? 3.0f : 0.0f);
    CHECK_OK(phx_broadcast(member.group, given, kCount, PHX_DTYPE_F32, 0, nullptr, nullptr));
    is_three(given);
    CHECK(zero_copies(member.group) == 0);
    for (const bool starts : {false, true}) {
      List list(member);  // the broadcast's input is there, all others where both have it
      if (self == 0) list.at[3] = block;
      list.issue(member, starts);
      CHECK(zero_copies(member.group) == (starts ? 10 : 5));
    }
    CHECK_OK(phx_barrier(member.group, nullptr, nullptr));
    if (self == 0) CHECK_OK(phx_mem_free(world, more));
    members::leave(world, member);
  };
  ranks::as_threads(2, body, members::options_of(members::kUsual));
  ranks::all_zero(ranks::as_processes(2, body, members::options_of(members::kUsual)));
}

}  // namespace

int main(int argc, char **argv) { return check::run_all(argc, argv); }
