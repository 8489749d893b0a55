// Collectives of groups that span hosts: ranks are threads, some of which count as on another host, and a carrier of
// the tests' own delays and reorders what they send by a seed.
#include <atomic>
#include <chrono>
#include <thread>

#include "hub_carrier.h"
#include "members.h"

using collective::Case;
using collective::Member;
using collective::Part;
using collective::What;
using collective::Where;
using members::Draw;

namespace {

// The host of each rank.
using Shape = std::vector<int>;
const Shape kShapes[] = {{0, 1}, {0, 0, 1, 1}, {0, 1, 0}, {0, 1, 2}, {1, 0, 1, 0}, {0, 0, 1, 1, 2}, {0, 1, 2, 3}};

ranks::Options options_of(const Shape &shape, const members::Setup &setup, Hub &hub) {
  ranks::Options options = members::options_of(setup);
  for (const int host : shape) options.host_ids.push_back(1000 + static_cast<uint64_t>(host));
  options.prepare = [&hub](phx_world *world) { CHECK_OK(phx_world_set_carrier(world, hub_carrier_ops(), &hub)); };
  return options;
}

// Runs `body` as every rank of a group with that shape.
void with_hosts(const Shape &shape, const members::Setup &setup, const HubOptions &hub_options,
                const std::function<void(const Member &, phx_world *)> &body,
                int32_t order = PHX_REDUCTION_ORDER_HOSTS) {
  Hub hub(hub_options);
  reference::host_of = order == PHX_REDUCTION_ORDER_HOSTS ? shape : Shape();
  ranks::as_threads(
      static_cast<int>(shape.size()),
      [&](int, phx_world *world) {
        Member member;
        member.ranks = members::all_of(world);
        member.group = ranks::make_group(world, "all", order);
        member.self = phx_group_rank(member.group);
        if (setup.tuning.chunk_bytes != 0) CHECK_OK(phx_group_set_tuning(member.group, &setup.tuning, 0));
        std::vector<char> block(size_t{1} << 20);
        member.block = block.data();
        member.block_bytes = block.size();
        body(member, world);
        phx_group_release(member.group);
      },
      options_of(shape, setup, hub));
  hub.check();
}

void run(const Member &member, const Case &c, Part &part) {
  part.prepare(member, c);
  CHECK_OK(part.issue(nullptr));
  const std::string wrong = part.check();
  if (!wrong.empty()) check::failed(__FILE__, __LINE__, wrong);
}

void run_every_collective(const Shape &shape, const members::Setup &setup, int32_t order = PHX_REDUCTION_ORDER_HOSTS) {
  const auto body = [&](const Member &member, phx_world *) {
    Part part;
    Draw draw(7);
    for (int what = 0; what < collective::kWhats; ++what)
      for (int where = 0; where < collective::kWheres; ++where)
        for (const size_t count : {size_t{0}, size_t{1}, size_t{100}, size_t{700}, size_t{5000}}) {
          Case c;
          c.what = static_cast<What>(what);
          c.where = static_cast<Where>(where);
          if (c.where == Where::kSymmetric) continue;
          for (const bool in_place : {false, true}) {
            c.in_place = in_place;
            c.dtype = static_cast<int32_t>(PHX_DTYPE_F16 + draw.below(reference::kLastDtype));
            c.op = static_cast<int32_t>(PHX_OP_SUM + draw.below(reference::kLastOp));
            c.count = count;
            c.root = static_cast<int>(draw.below(member.ranks.size()));
            c.seed = draw.next();
            if (order == PHX_REDUCTION_ORDER_RANKS && !reduces(c.what)) continue;
            if (possible(c)) run(member, c, part);
          }
        }
  };
  with_hosts(shape, setup, {}, body, order);
}

// Waits for other ranks by other means than ours.
void meet(std::atomic<size_t> *met, size_t all) {
  ++*met;
  const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(90);
  while (*met < all) {
    CHECK(std::chrono::steady_clock::now() < limit);
    std::this_thread::yield();
  }
}

TEST(every_collective_and_dtype) {
  for (const Shape &shape : kShapes) run_every_collective(shape, members::kTiny);
  // With slots of the usual size much of it travels with the heads.
  for (const Shape &shape : {kShapes[0], kShapes[1], kShapes[3]}) run_every_collective(shape, members::kUsual);
}

// In the order of the ranks every spread of them over hosts gives the bits of one host.
TEST(reductions_in_the_order_of_the_ranks) {
  const Shape shapes[] = {{0, 0, 1, 1}, {0, 1, 1, 1}, {0, 0, 0, 1}, {0, 1, 0, 1}, {0, 1, 1, 0, 2}, {0, 1}};
  for (const Shape &shape : shapes) {
    run_every_collective(shape, members::kTiny, PHX_REDUCTION_ORDER_RANKS);
    if (shape.size() == 4) run_every_collective(shape, members::kUsual, PHX_REDUCTION_ORDER_RANKS);
    const auto large = [](const Member &member, phx_world *) {  // parts that are shared by the hosts, in many chunks
      Part part;
      Draw draw(3);
      for (const What what : {What::kAllReduce, What::kReduce, What::kReduceScatter, What::kReduceScatterV})
        for (const int32_t dtype : {PHX_DTYPE_F32, PHX_DTYPE_BF16}) {
          Case c;
          c.what = what;
          c.dtype = dtype;
          c.op = draw.one_in(2) ? PHX_OP_SUM : PHX_OP_PREMUL_SUM;
          c.count = 260001 / (what == What::kReduceScatter || what == What::kReduceScatterV ? member.size() : 1);
          c.root = static_cast<int>(draw.below(member.ranks.size()));
          c.seed = draw.next();
          run(member, c, part);
        }
    };
    with_hosts(shape, members::kUsual, {}, large, PHX_REDUCTION_ORDER_RANKS);
    // The test can fail: by hosts the bits are others, but where each host has one rank.
    reference::host_of = shape;
    const std::vector<int> all = [&] {
      std::vector<int> ranks(shape.size());
      for (size_t i = 0; i < ranks.size(); ++i) ranks[i] = static_cast<int>(i);
      return ranks;
    }();
    const auto by_hosts = reference::reduced(all, PHX_DTYPE_BF16, PHX_OP_SUM);
    reference::host_of.clear();
    if ((by_hosts == reference::reduced(all, PHX_DTYPE_BF16, PHX_OP_SUM)) != (shape.size() == 2))
      check::failed(__FILE__, __LINE__, "shape " + std::to_string(&shape - shapes));
  }
}

TEST(an_order_of_reduction_that_ranks_do_not_share_is_refused_on_every_rank) {
  for (const Shape &shape : {Shape{0, 0, 0}, Shape{0, 1, 1}}) {
    Hub hub;
    ranks::as_threads(
        3,
        [&](int rank, phx_world *world) {
          const int32_t all[] = {0, 1, 2};
          phx_group_options options = PHX_GROUP_OPTIONS_INIT;
          phx_group *group = nullptr;
          const auto create = [&] { return phx_group_create_with_options(world, "all", all, 3, &options, 0, &group); };
          options.reduction_order = rank == 2 ? PHX_REDUCTION_ORDER_RANKS : PHX_REDUCTION_ORDER_HOSTS;
          CHECK_FAILS(PHX_ERR_MISMATCH, "asks for the reduction order", create());
          options.reduction_order = rank == 2 ? 3 : 2;
          CHECK_FAILS(PHX_ERR_INVALID, "reduction_order is 3; expected one of PHX_REDUCTION_ORDER_*", create());
          options.reduction_order = PHX_REDUCTION_ORDER_RANKS;
          CHECK_OK(create());
          phx_group *half = nullptr, *again = nullptr;
          CHECK_OK(phx_group_split(group, 0, -rank, "half", 0, &half));
          CHECK_OK(phx_group_shrink(half, nullptr, 0, &again));
          for (phx_group *each : {group, half, again}) {
            phx_group_info info = PHX_GROUP_INFO_INIT;
            CHECK_OK(phx_group_get_info(each, &info));
            CHECK(info.reduction_order == PHX_REDUCTION_ORDER_RANKS);
            phx_group_release(each);
          }
        },
        options_of(shape, members::kUsual, hub));
    hub.check();
  }
}

// Many calls in flight, waited for in another order on some ranks; the inputs are destroyed when they may be.
TEST(split_phase) {
  constexpr size_t kCalls = 12;
  for (const Shape &shape : {kShapes[0], kShapes[1], kShapes[2]}) {
    with_hosts(shape, members::kTiny, {}, [&](const Member &member, phx_world *) {
      for (uint64_t seed = 0; seed < 30 / members::kThinner; ++seed) {
        Draw draw(seed);
        std::vector<std::unique_ptr<Part>> parts;
        std::vector<phx_work *> works(kCalls, nullptr);
        for (size_t i = 0; i < kCalls; ++i) {
          Case c = members::draw_case(draw, member.ranks.size(), 6000, false);
          while (collective::in_block(c)) c = members::draw_case(draw, member.ranks.size(), 6000, false);
          c.channel = static_cast<uint32_t>(draw.below(2));
          parts.push_back(std::make_unique<Part>());
          parts.back()->prepare(member, c);
          CHECK_OK(parts.back()->issue(&works[i]));
          if (parts.back()->input_may_change()) parts.back()->destroy_input();
        }
        for (size_t i = 0; i < kCalls; ++i) {
          const size_t at = member.self % 2 == 0 ? i : kCalls - 1 - i;
          CHECK_OK(phx_work_wait(works[at], 0));
          phx_work_release(works[at]);
          const std::string wrong = parts[at]->check();
          if (!wrong.empty()) check::failed(__FILE__, __LINE__, wrong);
        }
      }
    });
  }
}

TEST(coalesced_lists) {
  for (const Shape &shape : {kShapes[0], kShapes[1], kShapes[3]}) {
    with_hosts(shape, members::kTiny, {}, [&](const Member &member, phx_world *) {
      for (uint64_t seed = 0; seed < 20 / members::kThinner; ++seed) {
        Draw draw(seed);
        std::vector<std::unique_ptr<Part>> parts;
        std::vector<phx_call> calls;
        for (size_t i = 0, count = 1 + draw.below(6); i < count; ++i) {
          Case c = members::draw_case(draw, member.ranks.size(), 6000, true);
          c.op = PHX_OP_MAX;
          c.dtype = PHX_DTYPE_I32;
          parts.push_back(std::make_unique<Part>());
          parts.back()->prepare(member, c);
          calls.push_back(parts.back()->call());
        }
        phx_work *work = nullptr;
        CHECK_OK(phx_coalesced(member.group, calls.data(), calls.size(), nullptr, seed % 2 == 0 ? &work : nullptr));
        if (work != nullptr) CHECK_OK(phx_work_wait(work, 0));
        phx_work_release(work);
        for (const auto &part : parts) {
          const std::string wrong = part->check();
          if (!wrong.empty()) check::failed(__FILE__, __LINE__, wrong);
        }
      }
    });
  }
}

TEST(mismatches_are_named_on_every_rank) {
  for (const Shape &shape : {kShapes[0], kShapes[1], kShapes[2]}) {
    for (const int variant : {0, 1, 2, 3}) {
      std::atomic<size_t> over{0};
      with_hosts(shape, members::kUsual, {}, [&](const Member &member, phx_world *) {
        std::vector<float> in(100000, 1.0F), out(100000);
        const bool other = reference::host_of[member.self] == 1;
        phx_status status = PHX_OK;
        if (variant == 0)
          status = phx_all_reduce(member.group, in.data(), out.data(), other ? 100 : 101, PHX_DTYPE_F32, PHX_OP_SUM,
                                  nullptr, nullptr);
        if (variant == 1)
          status = other ? phx_broadcast(member.group, in.data(), 50000, PHX_DTYPE_F32, 0, nullptr, nullptr)
                         : phx_all_reduce(member.group, in.data(), out.data(), 50000, PHX_DTYPE_F32, PHX_OP_SUM,
                                          nullptr, nullptr);
        if (variant == 2)
          status = phx_all_reduce(member.group, in.data(), out.data(), other ? 60000 : 90000, PHX_DTYPE_F32, PHX_OP_SUM,
                                  nullptr, nullptr);
        if (variant == 3 && other) {
          CHECK(phx_all_reduce(member.group, in.data(), out.data(), 10, 99, PHX_OP_SUM, nullptr, nullptr) ==
                PHX_ERR_INVALID);
          status = phx_barrier(member.group, nullptr, nullptr);
        } else if (variant == 3) {
          status = phx_all_reduce(member.group, in.data(), out.data(), 10, PHX_DTYPE_F32, PHX_OP_SUM, nullptr, nullptr);
        }
        const std::string text = phx_last_error();
        meet(&over, shape.size());  // the others may hear that a rank has left before they hear why
        CHECK(status != PHX_OK);
        const bool told = variant == 3
                              ? text.find("refused") != std::string::npos || text.find("barrier") != std::string::npos
                              : text.find("called") != std::string::npos;
        if (!told) check::failed(__FILE__, __LINE__, text);
      });
    }
  }
}

TEST(a_rank_that_does_not_come_is_named_on_every_rank) {
  for (const Shape &shape : {Shape{0, 0, 1, 1}, Shape{0, 1, 1}, Shape{0, 1}, Shape{0, 1, 0}}) {
    for (const int32_t count : {1, 50000}) {
      const int last = static_cast<int>(shape.size()) - 1;
      std::atomic<int> here{0}, over{0};
      with_hosts(shape, members::kUsual, {}, [&](const Member &member, phx_world *) {
        if (member.self != last) {
          std::vector<float> in(count, 1.0F), out(count);
          phx_options options = PHX_OPTIONS_INIT;
          options.timeout_ms = 1000;
          ++here;
          while (here < last) usleep(100);
          CHECK_FAILS(PHX_ERR_TIMEOUT, ("rank " + std::to_string(last) + " (pid ").c_str(),
                      phx_all_reduce(member.group, in.data(), out.data(), in.size(), PHX_DTYPE_F32, PHX_OP_SUM,
                                     &options, nullptr));
          ++over;
        }
        while (over < last) usleep(1000);
      });
    }
  }
}

// Whatever connections are lost, every rank gets an error, or right results.
TEST(lost_connections) {
  const uint64_t seeds = reference::asked("PHALANX_TEST_FULL") ? 1000 : 100 / members::kThinner;
  for (uint64_t seed = 0; seed < seeds; ++seed) {
    HubOptions hub;
    hub.seed = seed;
    hub.losses_per_mille = 300;
    Hub carrier(hub);
    const Shape &shape = kShapes[seed % 4];
    reference::host_of = shape;
    ranks::as_threads(
        static_cast<int>(shape.size()),
        [&](int, phx_world *world) {
          std::vector<int32_t> all;
          for (int32_t i = 0; i < phx_world_size(world); ++i) all.push_back(i);
          Member member;
          member.ranks = members::all_of(world);
          const phx_status made =
              phx_group_create(world, "all", all.data(), static_cast<int32_t>(all.size()), 0, &member.group);
          if (made != PHX_OK) return;
          member.self = phx_group_rank(member.group);
          Part part;
          Draw draw(seed);
          for (int i = 0; i < 20; ++i) {
            Case c = members::draw_case(draw, member.ranks.size(), 20000, false);
            while (collective::in_block(c)) c = members::draw_case(draw, member.ranks.size(), 20000, false);
            part.prepare(member, c);
            if (part.issue(nullptr) != PHX_OK) break;
            const std::string wrong = part.check();
            if (!wrong.empty()) check::failed(__FILE__, __LINE__, wrong);
          }
          phx_group_release(member.group);
        },
        options_of(shape, members::kTiny, carrier));
    carrier.check();
  }
}

// A rank that has left a call may wait for the others by other means, such as a barrier of another library.
TEST(what_was_sent_arrives_though_the_sender_calls_nothing_more) {
  for (const Shape &shape : kShapes) {
    std::atomic<size_t> met{0};
    with_hosts(shape, members::kTiny, {}, [&](const Member &member, phx_world *) {
      size_t meetings = 0;
      for (const size_t count : {size_t{1}, size_t{700}, size_t{5000}})
        for (int root = 0; root < static_cast<int>(shape.size()); ++root) {
          std::vector<int32_t> value(count, member.self), sum(count);
          CHECK_OK(phx_all_reduce(member.group, value.data(), sum.data(), count, PHX_DTYPE_I32, PHX_OP_MAX, nullptr,
                                  nullptr));
          meet(&met, ++meetings * shape.size());
          CHECK_OK(phx_broadcast(member.group, value.data(), count, PHX_DTYPE_I32, root, nullptr, nullptr));
          meet(&met, ++meetings * shape.size());
          CHECK(sum.back() == static_cast<int>(shape.size()) - 1 && value.back() == root);
        }
    });
  }
}

// Whether the group or the world goes first.
TEST(what_was_sent_arrives_though_its_sender_leaves) {
  for (const Shape &shape : kShapes)
    for (uint64_t seed = 0; seed < 16 / members::kThinner; ++seed) {
      HubOptions hub_options;
      hub_options.seed = seed;
      Hub hub(hub_options);
      ranks::as_threads(
          static_cast<int>(shape.size()),
          [&](int rank, phx_world *world) {
            phx_group *group = ranks::make_group(world);
            std::vector<int32_t> data(seed % 4 == 0 ? 9000 : 50, rank);
            CHECK_OK(phx_broadcast(group, data.data(), data.size(), PHX_DTYPE_I32, 0, nullptr, nullptr));
            CHECK(data.back() == 0);
            if (seed % 2 == 0) CHECK_OK(phx_world_finalize(world));
            phx_group_release(group);
          },
          options_of(shape, members::kTiny, hub));
      hub.check();
    }
}

TEST(a_world_with_progress_moves_what_a_rank_has_started_while_it_computes) {
  for (const Shape &shape : kShapes) {
    std::atomic<size_t> done{0};
    Hub hub;
    ranks::Options options = options_of(shape, members::kTiny, hub);
    options.flags = PHX_WORLD_PROGRESS;
    ranks::as_threads(
        static_cast<int>(shape.size()),
        [&](int rank, phx_world *world) {
          phx_group *group = ranks::make_group(world);
          std::vector<int32_t> data(20000, rank);
          phx_work *work = nullptr;
          CHECK_OK(phx_all_reduce(group, data.data(), data.data(), data.size(), PHX_DTYPE_I32, PHX_OP_MAX, nullptr,
                                  rank == 0 ? &work : nullptr));
          meet(&done, shape.size());
          if (rank == 0) CHECK_OK(phx_work_wait(work, 0));
          CHECK(data.back() == static_cast<int>(shape.size()) - 1);
          phx_work_release(work);
          phx_group_release(group);
        },
        options);
    hub.check();
  }
}

// Other groups of the same ranks, of one host and of one rank of each, from the store and from the group.
TEST(split_shrink_and_agree) {
  const Shape shape = {0, 0, 1, 1};
  with_hosts(shape, members::kUsual, {}, [&](const Member &member, phx_world *) {
    const auto sums_to = [&](phx_group *group, int64_t expected) {
      int64_t value = member.self + 1, sum = 0;
      CHECK_OK(phx_all_reduce(group, &value, &sum, 1, PHX_DTYPE_I64, PHX_OP_SUM, nullptr, nullptr));
      CHECK(sum == expected);
    };
    sums_to(member.group, 10);
    phx_group *host = nullptr, *across = nullptr, *shrunk = nullptr;
    CHECK_OK(phx_group_split(member.group, member.self / 2, 0, "host", 0, &host));
    sums_to(host, member.self < 2 ? 3 : 7);
    CHECK_OK(phx_group_split(member.group, member.self % 2, 0, "across", 0, &across));
    sums_to(across, member.self % 2 == 0 ? 4 : 6);
    uint64_t bits = ~(uint64_t{1} << member.self);
    CHECK_OK(phx_group_agree(member.group, &bits, nullptr, 0));
    CHECK(bits == ~uint64_t{15});
    CHECK_OK(phx_group_revoke(member.group, "the test says so"));
    int64_t value = 0;
    CHECK(phx_all_reduce(member.group, &value, &value, 1, PHX_DTYPE_I64, PHX_OP_SUM, nullptr, nullptr) != PHX_OK);
    CHECK_OK(phx_group_shrink(member.group, "rest", 0, &shrunk));
    sums_to(shrunk, 10);
    for (phx_group *group : {host, across, shrunk}) phx_group_release(group);
  });
}

}  // namespace

int main(int argc, char **argv) { return check::run_all(argc, argv); }
