// The faster one of two candidates makes the copies, also when that changes.
#include "kernels/rivals.h"

#include "check.h"

using phx::kernels::Rivals;

namespace {

// Makes copies whose costs are these, and returns how many of them the second candidate made.
int copies(Rivals *rivals, int count, uint64_t first, uint64_t second) {
  int made = 0;
  for (int i = 0; i < count; ++i) {
    const Rivals::Turn turn = rivals->next();
    made += turn.second;
    rivals->took(turn, turn.second ? second : first);
  }
  return made;
}

constexpr int kTry = Rivals::kTriedEvery, kSoon = Rivals::kSoon, kRow = Rivals::kInARow;
constexpr int kFirst = kSoon + kRow - 1;           // copies until the end of the first try,
constexpr int kSecond = kFirst + kSoon + kRow - 1;  // and of the second one, if the rival has won the first

}  // namespace

TEST(the_first_makes_all_copies_but_the_tries_while_it_is_not_slower) {
  Rivals rivals;
  CHECK(copies(&rivals, kFirst, 100, 100) == kRow);
  CHECK(copies(&rivals, 10 * (kTry + kRow), 100, 100) == 10 * kRow);
  CHECK(copies(&rivals, 10 * (kTry + kRow), 100, 90) == 10 * kRow);
}

TEST(a_hopeless_try_ends_with_its_first_copy_and_the_next_comes_late) {
  Rivals rivals;
  CHECK(copies(&rivals, kSoon, 100, 800) == 1);
  CHECK(copies(&rivals, 3 * Rivals::kTriedRarely, 100, 800) == 3);
}

TEST(who_is_faster_twice_makes_the_copies_from_then_on) {
  Rivals rivals;
  CHECK(copies(&rivals, kSecond, 100, 80) == 2 * kRow);
  CHECK(copies(&rivals, kTry - 1, 100, 80) == kTry - 1);
}

TEST(copies_of_different_cost_are_compared_as_a_whole) {
  Rivals rivals;
  const auto both = [&](int count) {
    int made = 0;
    for (int i = 0; i < count; ++i) made += copies(&rivals, 1, 100, 80) + copies(&rivals, 1, 200, 160);
    return made;
  };
  both(2 * kTry);
  CHECK(both(100) >= 200 - kRow);
}

TEST(when_the_usual_copies_become_slower_the_other_one_is_tried_soon) {
  Rivals rivals;
  copies(&rivals, kFirst, 100, 800);
  // The processors have moved. Some copies pass before it is clear that not just one was interrupted.
  CHECK(copies(&rivals, 2 * kTry, 400, 100) > 2 * kTry - 60);
  // And back.
  CHECK(copies(&rivals, 2 * kTry, 50, 400) < 60);
}

TEST(one_fast_try_is_not_enough) {
  Rivals rivals;
  copies(&rivals, kFirst, 100, 50);
  copies(&rivals, kSoon + kRow - 1, 100, 100);
  copies(&rivals, kTry + kRow - 1, 100, 50);
  CHECK(copies(&rivals, kSoon - 1, 100, 50) == 0);
}

TEST(copies_that_were_interrupted_do_not_make_the_rival_look_fast) {
  Rivals rivals;
  copies(&rivals, kFirst, 100, 100);
  for (int i = 0; i < 2; ++i) {
    copies(&rivals, kTry - 2, 100, 100);
    copies(&rivals, 1, 1000000, 100);  // just before the rival's turn
    copies(&rivals, kRow, 100, 100);
  }
  CHECK(copies(&rivals, kSoon - 1, 100, 100) == 0);
}

TEST(a_new_plan_begins_with_its_first) {
  Rivals rivals;
  copies(&rivals, kSecond, 100, 50);
  rivals.restart();
  CHECK(copies(&rivals, kSoon - 1, 100, 50) == 0);
}

int main(int argc, char **argv) { return check::run_all(argc, argv); }
