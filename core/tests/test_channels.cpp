// The channels of a group are independent sequences of collectives, one for each thread that wants one.
#include "members.h"
#include "world/world.h"

namespace {

using collective::Case;
using collective::Member;
using collective::Part;
using members::Draw;
using members::kThinner;
using members::Setup;
using members::with_processes;
using members::with_threads;

constexpr uint32_t kChannels = 4;  // the default

// A sequence of its own for one channel; those of a channel take turns in its part of the symmetric block.
void sequence(const Member &member, uint32_t channel, size_t length, size_t most_bytes) {
  const auto n = static_cast<size_t>(member.size());
  Draw draw(channel * 31 + n);
  constexpr size_t kInFlight = 6;
  const size_t room = members::kBlockBytes / kChannels / kInFlight / 64 * 64;
  Part parts[kInFlight];
  phx_work *works[kInFlight] = {};
  const auto finish = [&](size_t k) {
    if (works[k] == nullptr) return;
    CHECK_OK(phx_work_wait(works[k], 0));
    phx_work_release(works[k]);
    works[k] = nullptr;
    const std::string wrong = parts[k].check();
    if (!wrong.empty()) check::failed(__FILE__, __LINE__, wrong);
  };
  for (size_t i = 0; i < length; ++i) {
    Case c = draw_case(draw, n, most_bytes, false);
    c.channel = channel;
    const size_t k = i % kInFlight;
    finish(k);
    c.symmetric_offset = (channel * kInFlight + k) * room;
    if (collective::in_block(c) && Part::symmetric_bytes(c, member.size()) > room) continue;
    parts[k].prepare(member, c);
    const bool starts = draw.one_in(2);
    CHECK_OK(parts[k].issue(starts ? &works[k] : nullptr));
    if (starts) continue;
    const std::string wrong = parts[k].check();
    if (!wrong.empty()) check::failed(__FILE__, __LINE__, wrong);
  }
  for (size_t k = 0; k < kInFlight; ++k) finish(k);
}

// One thread for each channel; a failed CHECK in any of them fails the rank.
void sequences_at_once(const Member &member, size_t length, size_t most_bytes) {
  std::vector<std::thread> threads;
  std::atomic<int> failures{0};
  for (uint32_t channel = 0; channel < kChannels; ++channel)
    threads.emplace_back([&, channel] {
      try {
        sequence(member, channel, length, most_bytes);
      } catch (const std::exception &) {
        ++failures;
      }
    });
  for (std::thread &thread : threads) thread.join();
  CHECK(failures == 0);
}

TEST(threads_with_a_channel_each_run_independent_sequences) {
  for (int n : {1, 2, 3})
    for (const Setup &setup : {members::kTiny, members::kUsual})
      with_threads(n, setup, [](const Member &member) { sequences_at_once(member, 150 / kThinner, 6000); });
}

TEST(threads_of_processes_with_a_channel_each_run_independent_sequences) {
  with_processes(2, members::kUsual, [](const Member &member) { sequences_at_once(member, 150 / kThinner, 60000); });
}

TEST(one_thread_may_use_the_channels_in_any_order) {
  with_threads(2, members::kUsual, [](const Member &member) {
    for (int repeat = 0; repeat < 50; ++repeat) {
      Part parts[kChannels];
      phx_work *works[kChannels] = {};
      for (uint32_t i = 0; i < kChannels; ++i) {
        const uint32_t channel = member.self == 0 ? i : kChannels - 1 - i;
        Case c;
        c.channel = channel;
        c.count = 10 + 20000 * (channel % 2);
        c.seed = channel + static_cast<uint64_t>(repeat);
        parts[channel].prepare(member, c);
        CHECK_OK(parts[channel].issue(&works[channel]));
      }
      for (uint32_t channel = 0; channel < kChannels; ++channel) {
        CHECK_OK(phx_work_wait(works[channel], 0));
        phx_work_release(works[channel]);
        CHECK(parts[channel].check().empty());
      }
    }
  });
}

TEST(a_channel_that_a_group_has_not_got_is_an_error) {
  with_threads(2, members::kUsual, [](const Member &member) {
    phx_group_info info{};
    info.struct_size = sizeof info;
    CHECK_OK(phx_group_get_info(member.group, &info));
    CHECK(info.channels == kChannels);
    phx_options options{};
    options.struct_size = sizeof options;
    float x = 1;
    for (const uint32_t channel : {kChannels, UINT32_MAX}) {
      options.channel = channel;
      CHECK_FAILS(PHX_ERR_INVALID, "has 4",
                  phx_all_reduce(member.group, &x, &x, 1, PHX_DTYPE_F32, PHX_OP_SUM, &options, nullptr));
      CHECK_FAILS(PHX_ERR_INVALID, "has 4", phx_broadcast(member.group, &x, 1, PHX_DTYPE_F32, 0, &options, nullptr));
      CHECK_FAILS(PHX_ERR_INVALID, "has 4", phx_coalesced(member.group, nullptr, 0, &options, nullptr));
      CHECK_FAILS(PHX_ERR_INVALID, "has 4",
                  phx_symm_all_reduce(member.symm, 0, &x, 1, PHX_DTYPE_F32, PHX_OP_SUM, &options, nullptr));
    }
    CHECK(x == 1.0f);
  });
}

// Ranks as threads whose worlds have each a number of channels of its own.
void with_channels(const std::vector<uint32_t> &channels, const std::function<void(int, phx_world *)> &body) {
  phx_store *store = nullptr;
  CHECK_OK(phx_store_memory(&store));
  std::vector<std::thread> threads;
  std::atomic<int> failures{0};
  for (size_t rank = 0; rank < channels.size(); ++rank)
    threads.emplace_back([&, rank] {
      try {
        phx_world_params params{};
        params.struct_size = sizeof params;
        params.rank = static_cast<int32_t>(rank);
        params.size = static_cast<int32_t>(channels.size());
        params.store = store;
        params.timeout_ms = 20000;
        params.channels = channels[rank];
        phx_world *world = nullptr;
        CHECK_OK(phx_world_create(&params, &world));
        body(static_cast<int>(rank), world);
        phx_world_release(world);
      } catch (const std::exception &) {
        ++failures;
      }
    });
  for (std::thread &thread : threads) thread.join();
  phx_store_release(store);
  CHECK(failures == 0);
}

TEST(ranks_with_different_numbers_of_channels_cannot_make_a_group) {
  with_channels({2, 3}, [](int, phx_world *world) {
    const int32_t both[] = {0, 1};
    phx_group *group = nullptr;
    CHECK_FAILS(PHX_ERR_MISMATCH, "channels", phx_group_create(world, "all", both, 2, 0, &group));
    CHECK(group == nullptr);
  });
}

TEST(a_group_has_as_many_channels_as_its_worlds_ask_for) {
  for (const uint32_t channels : {1u, 3u, phx::kMaxChannels})
    with_channels({channels, channels}, [channels](int rank, phx_world *world) {
      phx_group *group = ranks::make_group(world);
      phx_options options{};
      options.struct_size = sizeof options;
      for (options.channel = 0; options.channel < channels; ++options.channel) {
        int32_t x = rank + 1;
        CHECK_OK(phx_all_reduce(group, &x, &x, 1, PHX_DTYPE_I32, PHX_OP_SUM, &options, nullptr));
        CHECK(x == 3);
      }
      int32_t x = 0;
      CHECK_FAILS(PHX_ERR_INVALID, "channel is",
                  phx_all_reduce(group, &x, &x, 1, PHX_DTYPE_I32, PHX_OP_SUM, &options, nullptr));
      phx_group_release(group);
    });
  phx_world_params params{};
  params.struct_size = sizeof params;
  params.size = 1;
  params.channels = phx::kMaxChannels + 1;
  phx_world *world = nullptr;
  CHECK_FAILS(PHX_ERR_INVALID, "channels is", phx_world_create(&params, &world));
}

TEST(calls_on_different_channels_do_not_meet) {
  ranks::Options options;
  options.timeout_ms = 300;
  ranks::as_threads(
      2,
      [](int rank, phx_world *world) {
        const int32_t both[] = {0, 1};
        phx_group *group = nullptr;
        CHECK_OK(phx_group_create(world, "all", both, 2, 20000, &group));
        CHECK_OK(barrier_within(group, 20000));
        phx_options on{};
        on.struct_size = sizeof on;
        on.channel = rank == 0 ? 1 : 2;
        float x = 1;
        CHECK(phx_all_reduce(group, &x, &x, 1, PHX_DTYPE_F32, PHX_OP_SUM, &on, nullptr) == PHX_ERR_TIMEOUT);
        phx_group_release(group);
      },
      options);
}

}  // namespace

int main(int argc, char **argv) { return check::run_all(argc, argv); }
