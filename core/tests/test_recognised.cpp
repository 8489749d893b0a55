// Collectives on ordinary pointers that lie in symmetric memory. Their results are in test_matrix.cpp; here is when
// nothing is copied, and when it is.
#include <cstring>

#include "members.h"

namespace {

using collective::Member;

constexpr size_t kCount = 65536;  // enough where ranks outnumber cores, too

uint64_t zero_copies(phx_group *group) {
  phx_group_info info{};
  info.struct_size = sizeof info;
  CHECK_OK(phx_group_get_info(group, &info));
  return info.zero_copies;
}

void fill(float *values, float value) { std::fill_n(values, kCount, value); }

// all_reduce of ones and twos among two ranks.
void sum(const Member &member, phx_group *group, float *in, float *out, phx_work **work = nullptr) {
  fill(in, static_cast<float>(member.self + 1));
  CHECK_OK(phx_all_reduce(group, in, out, kCount, PHX_F32, PHX_SUM, nullptr, work));
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
    phx_group_info info{};
    info.struct_size = sizeof info;
    CHECK_OK(phx_group_get_info(member.group, &info));
    const bool started_too = kCount * sizeof(float) > info.eager_bytes;
    phx_work *works[kEach] = {};
    uint64_t expected = 0;
    for (size_t i = 0; i < kEach; ++i) {
      const bool blocks = i % 4 == 3;
      const bool here = i % 3 != 2 || member.self == 0;  // of every third, rank 1 has none
      sum(member, member.group, here ? block + i * kCount : ordinary[i].data(), out[i].data(),
          blocks ? nullptr : &works[i]);
      if (i % 3 != 2 && (blocks || started_too)) ++expected;
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
    CHECK_OK(phx_group_barrier(other, 0));
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
    CHECK_OK(phx_all_reduce(member.group, block, out.data(), kCount, PHX_F32, PHX_SUM, &options, nullptr));
    is_three(out.data());
    CHECK_OK(phx_all_reduce(member.group, block, out.data(), 16, PHX_F32, PHX_SUM, nullptr, nullptr));
    CHECK(out[0] == 3.0f);
    CHECK(zero_copies(member.group) == 0);
  });
}

}  // namespace

int main(int argc, char **argv) { return check::run_all(argc, argv); }
