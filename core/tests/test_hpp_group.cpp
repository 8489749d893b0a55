// phalanx.hpp: worlds, groups and their failures.
#include "hpp.h"

using phalanx::Milliseconds;

TEST(a_world_knows_its_rank_and_its_groups) {
  hpp::as_threads(3, [](phalanx::World &world) {
    CHECK(world.size() == 3 && world.host_id() != 0);
    const auto all = world.group("all");
    CHECK(all.rank() == world.rank() && all.size() == 3);
    CHECK(std::string(all.info().name) == "all" && all.info().ranks[2] == 2);
    if (world.rank() != 1) {
      const auto ends = world.group("ends", std::vector<int32_t>{0, 2});
      CHECK(ends.rank() == (world.rank() == 0 ? 0 : 1));
      ends.barrier();
    }
    all.set_timeout(Milliseconds(30000));
    world.set_timeout(Milliseconds(30000));
    world.check();
    world.check_peer((world.rank() + 1) % 3);
    CHECK(world.dump().find("\"all\"") != std::string::npos);
    CHECK(!all.error());
    all.barrier();
  });
}

TEST(a_group_splits_and_agrees) {
  hpp::as_threads(3, [](phalanx::World &world) {
    const auto all = world.group("all");
    const auto part = all.split(world.rank() == 2 ? -1 : 7, -world.rank());
    CHECK(part.has_value() == (world.rank() != 2));
    if (part) CHECK(part->size() == 2 && part->rank() == 1 - world.rank());
    const auto agreed = all.agree(world.rank() == 1 ? 5 : 7);
    CHECK(agreed.bits == 5 && agreed.alive == std::vector<bool>({true, true, true}));
    const auto shared = all.share();
    shared.barrier();
  });
}

TEST(a_group_may_be_attached_by_a_store) {
  const auto meeting = phalanx::Store::memory();
  hpp::as_threads(2, [&](phalanx::World &world) {
    const auto group = world.attach("beside", world.rank(), 2, meeting);
    group.barrier();
    CHECK(group.info().reduction_order == PHX_REDUCTION_ORDER_HOSTS);
    phalanx::GroupOptions options;
    options.reduction_order = PHX_REDUCTION_ORDER_RANKS;
    const std::vector<int32_t> both = {0, 1};
    for (const auto &ordered : {world.attach("ordered", world.rank(), 2, meeting, options), world.group("all", options),
                                world.group("both", both, options)})
      CHECK(ordered.info().reduction_order == PHX_REDUCTION_ORDER_RANKS);
  });
}

TEST(a_group_that_failed_says_why_and_its_living_go_on) {
  hpp::as_threads(2, [](phalanx::World &world) {
    auto all = world.group("all");
    all.barrier();
    if (world.rank() == 1) {
      world.finalize();  // leaves
      CHECK(hpp::thrown([&] { all.barrier(); }).status() < 0);
      return;
    }
    const phalanx::Error error = hpp::thrown([&] {
      for (;;) all.barrier();
    });
    CHECK(error.status() == PHX_ERR_PEER_DEAD || error.status() == PHX_ERR_REVOKED);
    CHECK(all.error().has_value() && all.error()->peer() == 1 && all.error()->group() == "all");
    all = all.shrink();
    CHECK(all.size() == 1);
    all.barrier();
  });
}

TEST(a_revocation_names_its_reason_on_every_rank) {
  hpp::as_threads(2, [](phalanx::World &world) {
    const auto all = world.group("all");
    all.barrier();
    if (world.rank() == 0) all.revoke("enough");
    const phalanx::Error error = hpp::thrown([&] {
      for (;;) all.barrier();
    });
    CHECK(hpp::says(error, PHX_ERR_REVOKED, "enough"));
    CHECK(std::string(error.status_name()) == "PHX_ERR_REVOKED" && error.operation() == "barrier");
    world.abort("all of it");
  });
}

TEST(a_world_of_one_needs_no_store_and_handles_may_go_in_any_order) {
  auto world = std::make_unique<phalanx::World>(phalanx::World::alone());
  auto group = world->group("me");
  auto memory = world->allocate(64);
  auto symm = group.allocate(64);
  world.reset();
  memory.as<int>(16)[3] = 1;  // memory outlives the world that left
  CHECK(hpp::thrown([&] { group.barrier(); }).status() < 0);
}

int main(int argc, char **argv) { return check::run_all(argc, argv); }
