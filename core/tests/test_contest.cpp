// The candidate that is the fastest at the moment makes the copies.
#include "kernels/contest.h"

#include <array>

#include "check.h"

using phx::kernels::Contest;

namespace {

constexpr uint8_t kFirst = 1, kRival = 3, kThird = 4;
constexpr uint32_t kTwo = 1u << kFirst | 1u << kRival, kThree = kTwo | 1u << kThird;
constexpr int kEvery = Contest::kTriedEvery, kRarely = Contest::kTriedRarely, kRow = Contest::kInARow;
constexpr int kSoon = phx::kernels::ContestRules().soon, kEarly = phx::kernels::ContestRules().early;
constexpr int kBegin = kEarly * (kSoon + kRow);  // copies until the early tries are over

struct Copies {
  std::array<int, 5> by{};  // how many each candidate made
};

// Makes copies whose cost by each candidate are these.
Copies copy(Contest *contest, int count, uint64_t first, uint64_t rival, uint32_t candidates = kTwo,
            uint64_t third = 0) {
  Copies made;
  for (int i = 0; i < count; ++i) {
    const Contest::Turn turn = contest->next(candidates, kFirst);
    CHECK((candidates >> turn.candidate & 1) != 0);
    ++made.by[turn.candidate];
    if (turn.is_timed)
      contest->took(turn, turn.candidate == kFirst ? first : turn.candidate == kRival ? rival : third, candidates);
  }
  return made;
}

}  // namespace

TEST(the_first_makes_all_copies_but_the_tries_while_no_other_is_faster) {
  Contest contest;
  CHECK(copy(&contest, kBegin, 100, 100).by[kRival] <= kEarly * kRow);
  CHECK(copy(&contest, 10 * (kEvery + kRow), 100, 100).by[kRival] <= 11 * kRow);
  CHECK(copy(&contest, 10 * (kEvery + kRow), 100, 98).by[kRival] <= 11 * kRow);
}

TEST(a_hopeless_try_ends_with_its_first_copy_and_the_next_comes_late) {
  Contest contest;
  CHECK(copy(&contest, kBegin, 100, 800).by[kRival] <= kEarly);
  CHECK(copy(&contest, 3 * kRarely, 100, 800).by[kRival] <= 4);
}

TEST(who_is_faster_twice_makes_the_copies_from_then_on) {
  Contest contest;
  copy(&contest, kBegin, 100, 80);
  CHECK(copy(&contest, 10 * kEvery, 100, 80).by[kFirst] <= 11 * kRow);
}

TEST(the_fastest_of_several_is_found) {
  Contest contest;
  copy(&contest, 2 * kBegin, 100, 80, kThree, 50);
  const Copies after = copy(&contest, 10 * kEvery, 100, 80, kThree, 50);
  CHECK(after.by[kThird] > 9 * kEvery && after.by[kFirst] > 0 && after.by[kRival] > 0);
}

TEST(copies_of_different_cost_are_compared_as_a_whole) {
  Contest contest;
  int by_rival = 0;
  for (int i = 0; i < 4 * kEvery; ++i)
    by_rival += copy(&contest, 1, 100, 80).by[kRival] + copy(&contest, 1, 200, 160).by[kRival];
  CHECK(by_rival > 4 * kEvery);
}

TEST(when_the_usual_copies_become_slower_the_others_are_tried_soon) {
  Contest contest;
  copy(&contest, kBegin, 100, 800);
  // The processors have moved. Some copies pass before it is clear that not just one was interrupted.
  CHECK(copy(&contest, 2 * kEvery, 400, 100).by[kFirst] < kEvery);
  CHECK(copy(&contest, kEvery, 400, 100).by[kFirst] <= 2 * kRow);
  // And back.
  CHECK(copy(&contest, 2 * kEvery, 50, 400).by[kRival] < kEvery);
}

TEST(a_fast_try_between_slow_ones_is_not_enough) {
  Contest contest;
  for (int i = 0; i < 100; ++i) {
    int tries = 0;
    for (int k = 0; tries < 2 * kRow && k < 2 * kRarely; ++k) {
      const Contest::Turn turn = contest.next(kTwo, kFirst);
      if (turn.is_timed) contest.took(turn, turn.tries && tries < kRow ? 50 : 100, kTwo);
      tries += turn.tries;
    }
  }
  CHECK(copy(&contest, kEvery, 100, 100).by[kFirst] > kEvery / 2);
}

TEST(copies_that_were_interrupted_do_not_make_slower_ones_look_fast) {
  Contest contest;
  copy(&contest, kBegin, 100, 110);
  for (int i = 0; i < 50; ++i) {
    copy(&contest, kEvery, 100, 110);
    copy(&contest, 1, 1000000, 110);
  }
  CHECK(copy(&contest, kEvery, 100, 110).by[kRival] <= kRow);
}

int main(int argc, char **argv) { return check::run_all(argc, argv); }
