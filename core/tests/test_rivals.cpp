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

constexpr int kTry = Rivals::kTriedEvery;

}  // namespace

TEST(the_first_makes_all_copies_but_the_tries_while_it_is_not_clearly_slower) {
  Rivals rivals;
  CHECK(copies(&rivals, 10 * kTry, 100, 800) == 10);
  CHECK(copies(&rivals, 10 * kTry, 100, 100) == 10);
  CHECK(copies(&rivals, 10 * kTry, 100, 80) == 10);
}

TEST(who_is_clearly_faster_twice_makes_the_copies_from_then_on) {
  Rivals rivals;
  CHECK(copies(&rivals, 2 * kTry, 100, 50) == 2);
  CHECK(copies(&rivals, 2 * kTry, 100, 50) == 2 * kTry - 2);
  // And back, when the processors have moved.
  CHECK(copies(&rivals, kTry, 20, 400) == kTry - 1);
  CHECK(copies(&rivals, kTry, 20, 400) == kTry - 1);
  CHECK(copies(&rivals, kTry, 20, 400) == 1);
}

TEST(one_fast_try_is_not_enough) {
  Rivals rivals;
  copies(&rivals, kTry, 100, 50);
  copies(&rivals, kTry, 100, 100);
  copies(&rivals, kTry, 100, 50);
  CHECK(copies(&rivals, kTry - 1, 100, 50) == 0);
}

TEST(copies_that_were_interrupted_do_not_make_the_rival_look_fast) {
  Rivals rivals;
  copies(&rivals, kTry - 2, 100, 100);
  copies(&rivals, 1, 1000000, 100);  // just before the rival's turn
  copies(&rivals, 1, 100, 100);
  copies(&rivals, kTry - 2, 100, 100);
  copies(&rivals, 1, 1000000, 100);
  copies(&rivals, 1, 100, 100);
  CHECK(copies(&rivals, kTry - 1, 100, 100) == 0);
}

TEST(a_new_plan_begins_with_its_first) {
  Rivals rivals;
  copies(&rivals, 2 * kTry, 100, 50);
  rivals.restart();
  CHECK(copies(&rivals, kTry - 1, 100, 50) == 0);
}

int main(int argc, char **argv) { return check::run_all(argc, argv); }
