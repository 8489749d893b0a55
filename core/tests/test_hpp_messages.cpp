// phalanx.hpp: messages between two ranks.
#include "hpp.h"

TEST(a_message_goes_to_the_receive_with_its_tag) {
  hpp::as_threads(2, [](phalanx::World &world) {
    const auto group = world.group("all");
    std::vector<float> values(4, 1.5f);
    if (world.rank() == 0) {
      group.send(values, 1, 7);
    } else {
      std::vector<float> got(4);
      auto work = group.start().recv(got, phalanx::kAnyRank, 7);
      work.wait(phalanx::Milliseconds(20000));
      CHECK(got == values && work.source() == 0);
    }
  });
}

TEST(messages_of_one_list_do_not_wait_for_each_other) {
  hpp::as_threads(2, [](phalanx::World &world) {
    const auto group = world.group("all");
    const int peer = 1 - world.rank();
    const std::vector<int> mine(1 << 20, world.rank());
    std::vector<int> theirs(1 << 20);
    group.messages(phalanx::Messages().send(mine, peer).recv(theirs, peer));
    CHECK(theirs.back() == peer);
  });
}

TEST(sides_that_do_not_agree_are_told_both) {
  hpp::as_threads(2, [](phalanx::World &world) {
    const auto group = world.group("all");
    std::vector<int> four(4), five(5);
    if (world.rank() == 1) {
      CHECK(hpp::says(hpp::thrown([&] { group.recv(five, 0); }), PHX_ERR_MISMATCH, "5"));
    } else {
      group.start().send(four, 1).detach();  // small, so it may be complete before it has met a receive
      while (!group.error()) std::this_thread::yield();
      CHECK(group.error()->status() == PHX_ERR_MISMATCH);
    }
  });
}

int main(int argc, char **argv) { return check::run_all(argc, argv); }
