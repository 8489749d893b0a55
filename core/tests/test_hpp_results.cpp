// phalanx.hpp where nothing throws: every function that can fail returns a Result.
#define PHALANX_RESULTS
#include "hpp.h"

TEST(what_succeeds_has_a_value) {
  auto world = phalanx::World::alone();
  CHECK(world.has_value());
  auto group = world->group("me");
  CHECK(group && group->size() == 1);
  std::vector<float> values = {1, 2, 3};
  const auto reduced = group->all_reduce(values, values);
  CHECK(reduced.has_value());
  auto work = group->start().all_reduce(values, values);
  CHECK(work && work->wait());
  auto symm = *group->allocate(64);
  CHECK(symm.own<int>().value().size() == 16);
}

TEST(what_fails_has_an_error) {
  auto world = phalanx::World::create(3, 2, *phalanx::Store::memory());
  CHECK(!world && hpp::says(world.error(), PHX_ERR_INVALID, "rank is 3"));
  auto alone = phalanx::World::alone();
  auto group = alone->group("me");
  std::vector<float> three(3), four(4);
  const auto refused = group->all_reduce(three, four);
  CHECK(!refused && refused.error().status() == PHX_ERR_INVALID);
  const auto started = group->start().all_reduce(three, four);
  CHECK(!started && started.error().operation() == "all_reduce");
  const auto absent = phalanx::Store::memory()->get("none", phalanx::Milliseconds(1));
  CHECK(!absent && absent.error().status() == PHX_ERR_TIMEOUT);
}

int main(int argc, char **argv) { return check::run_all(argc, argv); }
