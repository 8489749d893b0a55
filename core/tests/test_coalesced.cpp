// Several calls as one give what each gives alone, whatever their kinds and sizes, and ranks that disagree learn it.
#include "members.h"

namespace {

using collective::Case;
using collective::Member;
using collective::Part;
using collective::What;
using collective::Where;
using members::Draw;
using members::draw_case;
using members::kThinner;
using members::Setup;
using members::with_processes;
using members::with_threads;

// Prepares the parts and makes one coalesced call of them; work NULL: blocks.
phx_status issue(const Member &member, std::vector<Part> &parts, const std::vector<Case> &cases, phx_work **work,
                 bool buffered = false) {
  parts.resize(std::max(parts.size(), cases.size()));
  std::vector<phx_call> calls;
  for (size_t i = 0; i < cases.size(); ++i) {
    parts[i].prepare(member, cases[i]);
    calls.push_back(parts[i].call());
  }
  phx_options options{};
  options.struct_size = sizeof options;
  options.scale = reference::kScale;
  options.flags = buffered ? PHX_OPTION_BUFFERED : 0;
  return phx_coalesced(member.group, calls.data(), calls.size(), &options, work);
}

void check_parts(const std::vector<Part> &parts, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    const std::string wrong = parts[i].check();
    if (!wrong.empty())
      check::failed(__FILE__, __LINE__, "call " + std::to_string(i) + " of " + std::to_string(count) + ": " + wrong);
  }
}

void finish(phx_work *work) {
  CHECK_OK(phx_work_wait(work, 0));
  phx_work_release(work);
}

void run(const Member &member, std::vector<Part> &parts, const std::vector<Case> &cases, bool starts) {
  phx_work *work = nullptr;
  CHECK_OK(issue(member, parts, cases, starts ? &work : nullptr));
  if (starts) finish(work);
  check_parts(parts, cases.size());
}

// Moves some of the inputs into the symmetric block, as far as there is room.
void share(const Member &member, Draw &draw, std::vector<Case> &cases) {
  size_t used = 0;
  for (Case &c : cases) {
    const size_t bytes = (Part::symmetric_bytes(c, member.size()) + 63) / 64 * 64;
    if (draw.one_in(4) || used + bytes > member.block_bytes) continue;
    c.where = Where::kRecognised;
    c.symmetric_offset = used;
    used += bytes;
  }
}

// Lists of calls of any kind, blocking, started, and started by some; of some the inputs lie in symmetric memory.
void mixed_lists(const Member &member, size_t lists, size_t most_bytes) {
  const auto n = static_cast<size_t>(member.size());
  std::vector<Part> parts;
  Draw draw(n);
  for (size_t k = 0; k < lists; ++k) {
    std::vector<Case> cases(draw.below(24));
    // Large ones are few, so that a list is mostly packed and fused, and sometimes nothing else.
    for (Case &c : cases) c = draw_case(draw, n, draw.one_in(5) ? most_bytes : 600, true);
    if (draw.one_in(2)) share(member, draw, cases);
    const size_t how = draw.below(3);
    run(member, parts, cases, how == 1 || (how == 2 && static_cast<size_t>(member.self) == draw.below(n)));
  }
  // Enough was large, also where ranks outnumber cores.
  if (n > 1 && kThinner == 1 && most_bytes >= 300000) CHECK(members::zero_copies(member.group) > 0);
}

TEST(lists_of_mixed_calls_give_the_reference_bits_of_each) {
  for (int n : {1, 2, 3, 4})
    for (const Setup &setup : {members::kTiny, members::kStreaming, members::kPlain, members::kUsual})
      with_threads(n, setup, [&](const Member &member) {
        mixed_lists(member, 60 / kThinner, setup.staging_bytes == 0 ? 300000 : 20000);
      });
}

TEST(lists_of_mixed_calls_give_the_reference_bits_of_each_among_processes) {
  for (int n : {2, 3})
    with_processes(n, members::kUsual, [](const Member &member) { mixed_lists(member, 60 / kThinner, 300000); });
}

TEST(all_reduces_that_are_fused_are_told_apart_by_dtype_and_op) {
  for (const Setup &setup : {members::kTiny, members::kUsual})
    for (int n : {2, 3})
      with_threads(n, setup, [](const Member &member) {
        struct Kind {
          int32_t dtype, op;
        };
        constexpr Kind kKinds[] = {{PHX_DTYPE_F32, PHX_OP_SUM}, {PHX_DTYPE_F32, PHX_OP_PREMUL_SUM},
                                   {PHX_DTYPE_F32, PHX_OP_MAX}, {PHX_DTYPE_BF16, PHX_OP_SUM},
                                   {PHX_DTYPE_I64, PHX_OP_SUM}, {PHX_DTYPE_C64, PHX_OP_PROD}};
        std::vector<Part> parts;
        for (const size_t most : {size_t{10}, size_t{1000}, size_t{20000}}) {
          Draw draw(most);
          std::vector<Case> cases(40);
          for (size_t i = 0; i < cases.size(); ++i) {
            const Kind kind = kKinds[i % std::size(kKinds)];
            cases[i].dtype = kind.dtype;
            cases[i].op = kind.op;
            cases[i].count = draw.below(most);
            cases[i].seed = draw.next();
            cases[i].in_place = draw.one_in(2);
          }
          run(member, parts, cases, false);
          run(member, parts, cases, true);
        }
      });
}

TEST(two_hundred_small_calls_complete_together) {
  for (int n : {1, 2, 3, 4})
    with_threads(n, members::kUsual, [](const Member &member) {
      const auto ranks = static_cast<size_t>(member.size());
      Draw draw(ranks);
      std::vector<Part> parts;
      std::vector<Case> cases(200);
      for (Case &c : cases) c = draw_case(draw, ranks, 4000, true);
      for (int repeat = 0; repeat < 5; ++repeat) run(member, parts, cases, repeat % 2 == 1);
    });
}

// Also of a call that waits in the queue because all slots are taken.
TEST(buffered_inputs_may_change_as_soon_as_the_start_returns) {
  for (const Setup &setup : {members::kTiny, members::kUsual})
    for (int n : {1, 2, 3, 4})
      with_threads(n, setup, [](const Member &member) {
        const auto ranks = static_cast<size_t>(member.size());
        const size_t eager = members::eager_bytes(member.group);
        Draw draw(ranks);
        constexpr size_t kInFlight = 9;
        for (size_t repeat = 0; repeat < 6; ++repeat) {
          std::vector<Part> parts[kInFlight];
          size_t used[kInFlight];
          phx_work *works[kInFlight] = {};
          for (size_t k = 0; k < kInFlight; ++k) {
            std::vector<Case> cases(1 + draw.below(12));
            for (Case &c : cases) c = draw_case(draw, ranks, draw.one_in(2) ? 300 : eager, true);
            if (draw.one_in(4)) cases.push_back(draw_case(draw, ranks, 4 * eager, true));  // which not all are
            if (k == 0 && draw.one_in(2)) share(member, draw, cases);
            used[k] = cases.size();
            const bool buffered = draw.one_in(2) == (member.self % 2 == 0);  // not the same on all ranks
            CHECK_OK(issue(member, parts[k], cases, &works[k], buffered));
            for (Part &part : parts[k])
              if (buffered && part.input_bytes() <= eager) part.destroy_input();
          }
          for (size_t i = 0; i < kInFlight; ++i) {
            const size_t k = member.self % 2 == 0 ? i : kInFlight - 1 - i;
            finish(works[k]);
            check_parts(parts[k], used[k]);
          }
        }
      });
}

phx_call call_of(int32_t kind, const void *in, void *out, size_t count) {
  phx_call call{};
  call.struct_size = sizeof call;
  call.kind = kind;
  call.in = in;
  call.out = out;
  call.count = count;
  call.dtype = PHX_DTYPE_F32;
  call.op = kind == PHX_CALL_ALL_REDUCE || kind == PHX_CALL_REDUCE_SCATTER || kind == PHX_CALL_REDUCE ? PHX_OP_SUM : 0;
  return call;
}

TEST(calls_that_write_what_others_use_are_refused_and_hurt_nobody) {
  with_threads(2, members::kUsual, [](const Member &member) {
    std::vector<float> a(64, 1.0f), b(64), c(64);
    const auto refused = [&](const char *words, const phx_call &first, const phx_call &second) {
      const phx_call calls[] = {first, second};
      phx_work *work = nullptr;
      CHECK_FAILS(PHX_ERR_INVALID, words, phx_coalesced(member.group, calls, 2, nullptr, nullptr));
      CHECK_FAILS(PHX_ERR_INVALID, words, phx_coalesced(member.group, calls, 2, nullptr, &work));
      CHECK(work == nullptr);
    };
    const phx_call first = call_of(PHX_CALL_ALL_REDUCE, a.data(), b.data(), 32);
    const char *words = "calls 0 and 1 use the same memory";
    refused(words, first, call_of(PHX_CALL_ALL_REDUCE, c.data(), b.data() + 31, 8));     // both write
    refused(words, first, call_of(PHX_CALL_ALL_REDUCE, b.data(), c.data(), 1));          // it reads what is written
    refused(words, first, call_of(PHX_CALL_BROADCAST, a.data() + 8, a.data() + 8, 8));   // it writes what is read
    refused(words, first, call_of(PHX_CALL_ALL_GATHER, c.data(), b.data() + 16, 8));     // in the middle
    refused(words, first, call_of(PHX_CALL_ALL_REDUCE, b.data() + 8, b.data() + 8, 8));  // in place

    refused("input and output overlap", first, call_of(PHX_CALL_ALL_REDUCE, c.data(), c.data() + 1, 8));
    refused("input and output overlap", first, call_of(PHX_CALL_ALL_TO_ALL, c.data(), c.data(), 8));
    refused("same buffer", first, call_of(PHX_CALL_BROADCAST, a.data() + 32, c.data(), 8));
    refused("expected a PHX_CALL_* constant", first, call_of(99, c.data(), c.data(), 1));
    refused("is NULL", first, call_of(PHX_CALL_ALL_REDUCE, nullptr, c.data(), 1));
    phx_call odd = call_of(PHX_CALL_BROADCAST, c.data(), c.data(), 1);
    odd.root_group_rank = 2;
    refused("root is 2", first, odd);
    odd.root_group_rank = 0;
    odd.flags = 1;
    refused("flags", first, odd);
    phx_call sizes[] = {first, call_of(PHX_CALL_ALL_REDUCE, c.data(), c.data(), 1)};
    sizes[1].struct_size -= 8;
    CHECK_FAILS(PHX_ERR_ABI, "call 1 has a different struct_size",
                phx_coalesced(member.group, sizes, 2, nullptr, nullptr));
    CHECK_FAILS(PHX_ERR_INVALID, "calls is NULL", phx_coalesced(member.group, nullptr, 2, nullptr, nullptr));

    // Neighbours, and inputs that several read, are fine.
    const phx_call fine[] = {call_of(PHX_CALL_ALL_REDUCE, a.data(), b.data(), 32),
                             call_of(PHX_CALL_ALL_REDUCE, a.data(), b.data() + 32, 32),
                             call_of(PHX_CALL_ALL_GATHER, a.data() + 1, c.data(), 32)};
    CHECK_OK(phx_coalesced(member.group, fine, 3, nullptr, nullptr));
    for (size_t i = 0; i < 64; ++i) CHECK(b[i] == 2.0f && c[i] == 1.0f);
  });
}

TEST(no_calls_at_all_are_a_barrier) {
  static std::atomic<int> arrived{0};
  for (int n : {1, 3}) {
    arrived = 0;
    with_threads(n, members::kUsual, [n](const Member &member) {
      ++arrived;
      CHECK_OK(phx_coalesced(member.group, nullptr, 0, nullptr, nullptr));
      CHECK(arrived == n);
      phx_work *work = nullptr;
      CHECK_OK(phx_coalesced(member.group, nullptr, 0, nullptr, &work));
      finish(work);
    });
  }
}

// Makes a group for this, as a mismatch revokes it: maybe before another rank, which all others have heard of, has
// returned from making it.
void expect_mismatch(phx_world *world, const std::function<void(int rank, std::vector<phx_call> &calls)> &differ) {
  const int rank = phx_world_rank(world);
  phx_group *group = ranks::make_group(world, "odd");
  std::vector<float> a(64, 1.0f), b(256), c(64);
  for (bool starts : {false, true}) {
    std::vector<phx_call> calls = {call_of(PHX_CALL_ALL_REDUCE, a.data(), b.data(), 32),
                                   call_of(PHX_CALL_ALL_GATHER, a.data(), b.data() + 64, 16),
                                   call_of(PHX_CALL_BROADCAST, c.data(), c.data(), 16)};
    differ(rank, calls);
    phx_work *work = nullptr;
    phx_status status = phx_coalesced(group, calls.data(), calls.size(), nullptr, starts ? &work : nullptr);
    if (starts && status == PHX_OK) {
      status = phx_work_wait(work, 0);
      phx_work_release(work);
    }
    CHECK(status == PHX_ERR_MISMATCH);
    CHECK(std::strstr(phx_last_error(), "coalesced(") != nullptr);
    CHECK_FAILS(PHX_ERR_REVOKED, "", phx_barrier(group, nullptr, nullptr));
    phx_group_release(group);
    group = ranks::make_group(world, "odd");
  }
  CHECK_OK(phx_barrier(group, nullptr, nullptr));
  phx_group_release(group);
}

TEST(lists_that_differ_between_ranks_fail_on_every_rank) {
  ranks::as_threads(3, [](int, phx_world *world) {
    expect_mismatch(world, [](int rank, auto &calls) { calls[0].count += rank == 1 ? 1 : 0; });
    expect_mismatch(world, [](int rank, auto &calls) { calls[0].op = rank == 2 ? PHX_OP_MAX : PHX_OP_SUM; });
    expect_mismatch(world, [](int rank, auto &calls) { calls[2].dtype = rank == 0 ? PHX_DTYPE_I32 : PHX_DTYPE_F32; });
    expect_mismatch(world, [](int rank, auto &calls) { calls[2].root_group_rank = rank == 1 ? 1 : 0; });
    expect_mismatch(world, [](int rank, auto &calls) {
      if (rank == 1) calls.pop_back();
    });
    expect_mismatch(world, [](int rank, auto &calls) {
      if (rank == 2) std::swap(calls[0], calls[1]);
    });
  });
}

TEST(a_list_does_not_match_its_only_call) {
  ranks::as_threads(2, [](int rank, phx_world *world) {
    phx_group *group = ranks::make_group(world);
    float a[8] = {}, b[8] = {};
    const phx_call call = call_of(PHX_CALL_ALL_REDUCE, a, b, 8);
    CHECK(PHX_ERR_MISMATCH == (rank == 0
                                   ? phx_coalesced(group, &call, 1, nullptr, nullptr)
                                   : phx_all_reduce(group, a, b, 8, PHX_DTYPE_F32, PHX_OP_SUM, nullptr, nullptr)));
    CHECK(std::strstr(phx_last_error(), "all_reduce(float32, 8, sum)") != nullptr);
    phx_group_release(group);
  });
}

}  // namespace

int main(int argc, char **argv) { return check::run_all(argc, argv); }
