// What a rank has started moves on whatever the rank does next, in any number and on any groups, and what goes wrong
// with one operation stays with it.
#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>

#include "base/progress.h"
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

// Operations that were started on one group, oldest first.
class InFlight {
 public:
  explicit InFlight(const Member &member) : member_(member) {}
  ~InFlight() {
    for (phx_work *work : works_) phx_work_release(work);
  }
  InFlight(const InFlight &) = delete;
  InFlight &operator=(const InFlight &) = delete;

  // With `destroys`, inputs that may be changed are overwritten at once.
  void start(const Case &c, bool destroys = false) {
    parts_.push_back(std::make_unique<Part>());
    works_.push_back(nullptr);
    parts_.back()->prepare(member_, c);
    CHECK_OK(parts_.back()->issue(&works_.back()));
    if (destroys && parts_.back()->input_may_change()) parts_.back()->destroy_input();
  }
  size_t size() const { return works_.size(); }
  phx_work *work(size_t k) const { return works_[k]; }
  void finish(size_t k) {
    CHECK_OK(phx_work_wait(works_[k], 0));
    check(k);
  }
  void finish_all() {
    for (size_t k = 0; k < size(); ++k) finish(k);
  }
  void release_all() {
    for (phx_work *&work : works_) {
      phx_work_release(work);
      work = nullptr;
    }
  }
  void check(size_t k) const {
    const std::string wrong = parts_[k]->check();
    if (!wrong.empty()) check::failed(__FILE__, __LINE__, wrong);
  }

 private:
  const Member &member_;
  std::vector<std::unique_ptr<Part>> parts_;
  std::vector<phx_work *> works_;
};

Case sums(size_t count, uint64_t seed) {
  Case c;
  c.count = count;
  c.seed = seed;
  return c;
}

ranks::Options within(int64_t timeout_ms, uint64_t staging_bytes = 0) {
  ranks::Options options;
  options.timeout_ms = timeout_ms;
  options.staging_bytes = staging_bytes;
  return options;
}

// ---- many in flight

// On three groups of which every rank is in at least two, with orders of starting and waiting of each rank's own.
void hundreds_in_flight(int rank, phx_world *world, const Setup &setup) {
  const std::vector<std::vector<int>> all_lists = {{0, 1, 2}, {2, 0}, {1, 0, 2}};
  constexpr size_t kEach = 120 / kThinner;
  std::vector<Member> joined;
  std::vector<size_t> numbers;
  for (size_t g = 0; g < all_lists.size(); ++g) {
    if (std::find(all_lists[g].begin(), all_lists[g].end(), rank) == all_lists[g].end()) continue;
    joined.push_back(
        members::join(world, ("g" + std::to_string(g)).c_str(), all_lists[g], size_t{16} << 20, setup.tuning));
    numbers.push_back(g);
  }
  {
    std::vector<std::unique_ptr<InFlight>> flights;
    std::vector<Draw> draws;
    for (size_t g = 0; g < joined.size(); ++g) {
      flights.push_back(std::make_unique<InFlight>(joined[g]));
      draws.emplace_back(numbers[g] + 100);
    }
    Draw own(static_cast<uint64_t>(rank) + 7);
    std::vector<std::pair<size_t, size_t>> order;
    std::vector<size_t> room(joined.size(), 0);
    for (size_t left = kEach * joined.size(); left > 0;) {
      const size_t g = own.below(joined.size());
      if (flights[g]->size() == kEach) continue;
      Case c = draw_case(draws[g], joined[g].ranks.size(), draws[g].one_in(6) ? 9000 : 500, false);
      c.channel = static_cast<uint32_t>(draws[g].below(2));
      c.symmetric_offset = room[g];
      if (collective::in_block(c)) room[g] += Part::symmetric_bytes(c, joined[g].size()) / 64 * 64 + 64;
      order.emplace_back(g, flights[g]->size());
      flights[g]->start(c, true);
      --left;
    }
    for (size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[own.below(i)]);
    for (const auto &[g, k] : order) {
      if (own.one_in(3)) {
        const phx_status status = phx_work_test(flights[g]->work(k));
        CHECK(status == PHX_OK || status == PHX_IN_PROGRESS);
      }
      flights[g]->finish(k);
    }
  }
  for (const Member &member : joined) CHECK_OK(phx_barrier(member.group, nullptr, nullptr));
  for (const Member &member : joined) members::leave(world, member);
}

TEST(hundreds_of_operations_on_several_groups_complete_in_any_order_of_waiting) {
  for (const Setup &setup : {members::kTiny, members::kUsual})
    ranks::as_threads(
        3, [&](int rank, phx_world *world) { hundreds_in_flight(rank, world, setup); }, members::options_of(setup));
}

TEST(hundreds_of_operations_complete_among_processes) {
  ranks::all_zero(ranks::as_processes(
      3, [](int rank, phx_world *world) { hundreds_in_flight(rank, world, members::kTiny); },
      members::options_of(members::kTiny)));
}

TEST(test_loops_alone_complete_what_is_in_flight_on_several_groups) {
  ranks::as_threads(
      2,
      [](int, phx_world *world) {
        const Member a = members::join(world, "a", {0, 1}, 64, members::kTiny.tuning);
        const Member b = members::join(world, "b", {1, 0}, 64, members::kTiny.tuning);
        {
          InFlight on_a(a), on_b(b);
          for (size_t k = 0; k < 20; ++k) {
            on_a.start(sums(k * 100, k));
            on_b.start(sums(k * 90, k));
          }
          // One work is asked: the others move as well.
          phx_status status;
          while ((status = phx_work_test(on_b.work(19))) == PHX_IN_PROGRESS) std::this_thread::yield();
          CHECK(status == PHX_OK);
          while ((status = phx_work_test(on_a.work(19))) == PHX_IN_PROGRESS) std::this_thread::yield();
          CHECK(status == PHX_OK);
          for (size_t k = 0; k < 20; ++k) {
            CHECK(phx_work_test(on_a.work(k)) == PHX_OK && phx_work_test(on_b.work(k)) == PHX_OK);
            on_a.check(k);
            on_b.check(k);
          }
        }
        CHECK_OK(phx_barrier(a.group, nullptr, nullptr));
        members::leave(world, a);
        members::leave(world, b);
      },
      within(20000, 1024));
}

TEST(buffered_inputs_may_change_at_once_also_when_all_slots_are_taken) {
  for (int n : {1, 2, 4})
    for (const Setup &setup : {members::kTiny, members::kUsual})
      members::with_threads(n, setup, [](const Member &member) {
        const auto size = static_cast<size_t>(member.size());
        const size_t eager = members::eager_bytes(member.group);
        for (int what = 0; what < collective::kWhats; ++what) {
          InFlight flight(member);
          for (size_t k = 0; k < 12; ++k) {
            Case c = sums(k % 3 == 0 ? eager / 4 / size : k, k);  // the first has all that is promised
            c.what = static_cast<What>(what);
            c.in_place = c.what == What::kBroadcast;
            if (c.what == What::kAllReduce && k % 2 == 0) c.count = eager / 4;
            flight.start(c, true);
          }
          if (member.self % 2 == 0) flight.finish(11);
          flight.finish_all();
        }
      });
}

// ---- waiting for something else

// How rank 0 waits for something that rank 1 does only after it has waited for everything on the first group.
struct Elsewhere {
  const char *what;
  void (*call)(int rank, phx_world *world, const Member &second);
};

const Elsewhere kElsewhere[] = {
    {"a barrier",
     [](int, phx_world *, const Member &second) { CHECK_OK(phx_barrier(second.group, nullptr, nullptr)); }},
    {"a collective of many rounds",
     [](int, phx_world *, const Member &second) {
       Part part;
       part.prepare(second, sums(50000, 3));
       CHECK_OK(part.issue(nullptr));
       CHECK(part.check().empty());
     }},
    {"a collective on another channel",
     [](int, phx_world *, const Member &second) {
       Part part;
       Case c = sums(10, 3);
       c.channel = 2;
       part.prepare(second, c);
       CHECK_OK(part.issue(nullptr));
       CHECK(part.check().empty());
     }},
    {"work_wait",
     [](int, phx_world *, const Member &second) {
       InFlight flight(second);
       for (size_t k = 0; k < 7; ++k) flight.start(sums(300 * k, k));
       flight.finish(6);
       flight.finish_all();
     }},
    {"a symmetric collective",
     [](int, phx_world *, const Member &second) {
       Part part;
       Case c = sums(100, 3);
       c.where = Where::kSymmetric;
       part.prepare(second, c);
       CHECK_OK(part.issue(nullptr));
       CHECK(part.check().empty());
     }},
    {"symm_barrier", [](int, phx_world *, const Member &second) { CHECK_OK(phx_symm_barrier(second.symm, 1, 0)); }},
    {"symm_wait_signal",
     [](int rank, phx_world *, const Member &second) {
       CHECK_OK(rank == 0 ? phx_symm_wait_signal(second.symm, 1, 5, 0) : phx_symm_put_signal(second.symm, 0, 5));
     }},
    {"recv",
     [](int rank, phx_world *, const Member &second) {
       int32_t x = rank;
       CHECK_OK(rank == 0 ? phx_recv(second.group, &x, 1, PHX_DTYPE_I32, 1, 9, nullptr, nullptr)
                          : phx_send(second.group, &x, 1, PHX_DTYPE_I32, 0, 9, nullptr, nullptr));
       CHECK(x == 1);
     }},
    {"a large send",
     [](int rank, phx_world *, const Member &second) {
       std::vector<char> data(size_t{3} << 20, static_cast<char>(rank));
       CHECK_OK(rank == 0 ? phx_send(second.group, data.data(), data.size(), PHX_DTYPE_U8, 1, 9, nullptr, nullptr)
                          : phx_recv(second.group, data.data(), data.size(), PHX_DTYPE_U8, 0, 9, nullptr, nullptr));
       CHECK(data.front() == 0 && data.back() == 0);
     }},
    {"group_create",
     [](int, phx_world *world, const Member &) {
       phx_group *third = ranks::make_group(world, "third");
       CHECK_OK(phx_barrier(third, nullptr, nullptr));
       phx_group_release(third);
     }},
    {"symm_rendezvous",
     [](int, phx_world *world, const Member &second) {
       void *block = nullptr;
       phx_symm *symm = nullptr;
       CHECK_OK(phx_mem_alloc(world, nullptr, 4096, &block));
       CHECK_OK(phx_symm_rendezvous(second.group, block, 0, &symm));
       phx_symm_release(symm);
       CHECK_OK(phx_mem_free(world, block));
     }},
    {"set_tuning", [](int, phx_world *, const Member &second) {
       CHECK_OK(phx_group_set_tuning(second.group, &members::kTiny.tuning, 0));
     }}};

void block_elsewhere(int rank, phx_world *world, const Elsewhere &elsewhere, const std::vector<Case> &cases) {
  const Member first = members::join(world, "first", {0, 1}, members::kBlockBytes, members::kTiny.tuning);
  const Member second = members::join(world, "second", {0, 1}, members::kBlockBytes, members::kTiny.tuning);
  {
    InFlight flight(first);
    for (const Case &c : cases) flight.start(c);
    if (rank == 1) flight.finish_all();  // needs rank 0's part in all of them
    elsewhere.call(rank, world, second);
    flight.finish_all();
  }
  CHECK_OK(phx_barrier(first.group, nullptr, nullptr));
  members::leave(world, first);
  members::leave(world, second);
}

void block_everywhere(const std::function<void(const ranks::Body &)> &with_ranks) {
  std::vector<Case> many, deep = {sums(100000, 1)}, lists, mixed;
  for (size_t k = 0; k < 9; ++k) many.push_back(sums(10 + k, k));
  for (size_t k = 0; k < 3; ++k) {
    lists.push_back(sums(500, k));
    lists.back().what = What::kAllToAllV;
  }
  for (size_t k = 0; k < 6; ++k) {
    mixed.push_back(sums(1000 * k, k));
    mixed.back().what = k % 2 == 0 ? What::kAllGather : What::kAllToAll;
    mixed.back().channel = static_cast<uint32_t>(k % 3);
  }
  std::string stuck;
  for (const Elsewhere &elsewhere : kElsewhere)
    for (const std::vector<Case> &cases : {many, deep, lists, mixed}) try {
        with_ranks([&](int rank, phx_world *world) { block_elsewhere(rank, world, elsewhere, cases); });
      } catch (const check::Failure &) {
        stuck += std::string(stuck.empty() ? "" : ", ") + elsewhere.what + " over " + std::to_string(cases.size()) +
                 " x " + describe(cases.back());
        break;
      }
  if (!stuck.empty()) check::failed(__FILE__, __LINE__, "nothing moved on during: " + stuck);
}

TEST(a_rank_that_blocks_elsewhere_moves_what_it_has_started) {
  block_everywhere([](const ranks::Body &body) { ranks::as_threads(2, body, within(10000, 1024)); });
}

TEST(a_process_that_blocks_elsewhere_moves_what_it_has_started) {
  block_everywhere([](const ranks::Body &body) { ranks::all_zero(ranks::as_processes(2, body, within(10000, 1024))); });
}

// Both ways at once: each rank waits first for the group that the other one leaves for last.
// Rank 0 starts what takes many rounds, and computes until the others have it.
TEST(a_world_with_progress_moves_what_a_rank_has_started_while_it_computes) {
  std::atomic<int> done{0};
  ranks::Options options = within(30000);
  options.flags = PHX_WORLD_PROGRESS;
  ranks::as_threads(
      3,
      [&](int rank, phx_world *world) {
        phx_group *group = ranks::make_group(world);
        std::vector<int32_t> data(3 << 20, rank + 1), sent(1 << 20, rank);
        phx_work *work = nullptr;
        const auto meet = [&](int all) {
          ++done;
          const int64_t limit = phx::now_ns() + 60000000000;
          while (done < all) CHECK(phx::now_ns() < limit);
        };
        for (int turn = 0; turn < 3; ++turn) {  // with pauses in which nothing is under way
          CHECK_OK(phx_all_reduce(group, data.data(), data.data(), data.size(), PHX_DTYPE_I32, PHX_OP_MAX, nullptr,
                                  rank == 0 ? &work : nullptr));
          meet(6 * turn + 3);
          if (rank == 0) {
            CHECK_OK(phx_work_wait(work, 0));
            phx_work_release(std::exchange(work, nullptr));
            CHECK_OK(phx_send(group, sent.data(), sent.size(), PHX_DTYPE_I32, 1, 7, nullptr, &work));
          } else if (rank == 1) {
            CHECK_OK(phx_recv(group, sent.data(), sent.size(), PHX_DTYPE_I32, 0, 7, nullptr, nullptr));
          }
          meet(6 * turn + 6);
          CHECK(data.front() == 3 && data.back() == 3 && sent.back() == (rank == 1 ? 0 : rank));
          phx_work_release(std::exchange(work, nullptr));
        }
        phx_group_release(group);
      },
      options);
}

TEST(ranks_may_wait_for_two_groups_in_opposite_orders) {
  ranks::as_threads(
      2,
      [](int rank, phx_world *world) {
        const Member a = members::join(world, "a", {0, 1}, 64, members::kTiny.tuning);
        const Member b = members::join(world, "b", {0, 1}, 64, members::kTiny.tuning);
        for (uint64_t repeat = 0; repeat < 100 / kThinner; ++repeat) {
          InFlight on_a(a), on_b(b);
          for (size_t k = 0; k < 10; ++k) {
            on_a.start(sums(repeat * k * 8, repeat + k));
            on_b.start(sums(repeat * k * 8, repeat + k));
          }
          (rank == 0 ? on_a : on_b).finish(9);
          (rank == 0 ? on_b : on_a).finish(9);
          on_a.finish_all();
          on_b.finish_all();
        }
        CHECK_OK(phx_barrier(a.group, nullptr, nullptr));
        members::leave(world, a);
        members::leave(world, b);
      },
      within(20000, 1024));
}

// ---- handles, errors and deaths

TEST(operations_whose_works_are_released_complete_all_the_same) {
  for (int n : {1, 2, 3})
    members::with_threads(n, members::kTiny, [](const Member &member) {
      for (uint64_t repeat = 0; repeat < 20; ++repeat) {
        InFlight flight(member);
        for (size_t k = 0; k < 15; ++k) flight.start(sums(k * k * 20, repeat + k));
        flight.release_all();
        CHECK_OK(phx_barrier(member.group, nullptr, nullptr));  // behind them, on the same channel
        for (size_t k = 0; k < flight.size(); ++k) flight.check(k);
      }
    });
}

TEST(counts_that_do_not_fit_fail_their_all_to_all_v_and_nothing_else) {
  for (int n : {2, 3})
    for (const bool first : {false, true})
      members::with_threads(n, members::kTiny, [first](const Member &member) {
        const auto size = static_cast<size_t>(member.size());
        InFlight flight(member);
        std::vector<phx_work *> bad;
        std::vector<std::unique_ptr<std::vector<float>>> buffers;
        const auto start_bad = [&] {
          // Rank 0 sends one element more to the last rank than that expects.
          std::vector<size_t> ins(size, 5), outs(size, 5);
          if (member.self == 0) ins[size - 1] = 6;
          buffers.push_back(std::make_unique<std::vector<float>>(5 * size + 1));
          buffers.push_back(std::make_unique<std::vector<float>>(5 * size + 1));
          bad.push_back(nullptr);
          CHECK_OK(phx_all_to_all_v(member.group, buffers.end()[-2]->data(), ins.data(), buffers.back()->data(),
                                    outs.data(), PHX_DTYPE_F32, nullptr, &bad.back()));
        };
        for (size_t k = 0; k < 30; ++k) {
          if (k % 7 == (first ? 0 : 3)) start_bad();
          Case c = sums(k * 40, k);
          if (k % 4 == 1) c.what = What::kAllToAllV;
          flight.start(c);
        }
        if (member.self == 1)
          for (size_t k = flight.size(); k > 0; --k) flight.finish(k - 1);
        for (phx_work *work : bad) {
          CHECK_FAILS(PHX_ERR_MISMATCH, "sends 6 elements", phx_work_wait(work, 0));
          CHECK_FAILS(PHX_ERR_MISMATCH, "sends 6 elements", phx_work_wait(work, 0));  // it stays so
          phx_error_info info{};
          info.struct_size = sizeof info;
          CHECK_OK(phx_work_get_error(work, &info));
          CHECK(info.status == PHX_ERR_MISMATCH);
          phx_work_release(work);
        }
        flight.finish_all();
        start_bad();  // also when a blocking call has to complete it
        CHECK_OK(phx_barrier(member.group, nullptr, nullptr));
        CHECK(phx_work_test(bad.back()) == PHX_ERR_MISMATCH);
        phx_work_release(bad.back());
      });
}

// Counts ranks that have started all that they will, also those of other processes.
class Started {
 public:
  Started() {
    void *page = mmap(nullptr, sizeof *count_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(page != MAP_FAILED);
    count_ = new (page) std::atomic<int>(0);
  }
  ~Started() { munmap(count_, sizeof *count_); }
  Started(const Started &) = delete;
  Started &operator=(const Started &) = delete;
  void add() { ++*count_; }
  void await(int ranks) const {
    while (*count_ < ranks) std::this_thread::yield();
  }

 private:
  std::atomic<int> *count_;
};

// The survivors' works all end, those that could not complete with an error that names the dead rank.
void survive(const std::vector<Member> &groups, int dead, Started &started) {
  std::vector<std::unique_ptr<InFlight>> flights;
  for (const Member &member : groups) {
    flights.push_back(std::make_unique<InFlight>(member));
    for (size_t k = 0; k < 60; ++k) flights.back()->start(sums(k * 50, k));
  }
  started.add();
  const std::string name = "rank " + std::to_string(dead);
  for (const auto &flight : flights) {
    size_t failed = 0;
    for (size_t k = flight->size(); k > 0; --k) {
      const phx_status status = phx_work_wait(flight->work(k - 1), 0);
      if (status == PHX_OK) {
        flight->check(k - 1);
        continue;
      }
      CHECK(status == PHX_ERR_PEER_DEAD || status == PHX_ERR_REVOKED);
      CHECK(std::strstr(phx_last_error(), name.c_str()) != nullptr);
      CHECK(phx_work_test(flight->work(k - 1)) == status);
      ++failed;
    }
    CHECK(failed > 0);
  }
  phx_work *none = nullptr;
  float x = 0;
  CHECK(phx_all_reduce(groups[0].group, &x, &x, 1, PHX_DTYPE_F32, PHX_OP_SUM, nullptr, &none) == PHX_ERR_REVOKED);
  CHECK(none == nullptr);
}

TEST(a_process_that_dies_with_many_in_flight_ends_them_on_every_survivor) {
  for (const bool starts : {false, true}) {
    Started started;
    const std::vector<int> codes = ranks::as_processes(
        3,
        [&](int rank, phx_world *world) {
          std::vector<Member> groups;
          for (const char *name : {"a", "b"})
            groups.push_back(members::join(world, name, {0, 1, 2}, 64, members::kTiny.tuning));
          if (rank == 1) {
            InFlight flight(groups[0]);
            if (starts)
              for (size_t k = 0; k < 60; ++k) flight.start(sums(k * 50, k));
            if (starts) flight.finish(10);
            started.await(2);
            kill(getpid(), SIGKILL);
          }
          survive(groups, 1, started);
          phx_group *pair = nullptr;  // the others go on
          const int32_t rest[] = {0, 2};
          CHECK_OK(phx_group_create(world, "rest", rest, 2, 0, &pair));
          CHECK_OK(phx_barrier(pair, nullptr, nullptr));
          phx_group_release(pair);
          for (const Member &member : groups) members::leave(world, member);
        },
        within(20000, 1024));
    CHECK(WIFSIGNALED(codes[1]) && codes[0] == 0 && codes[2] == 0);
  }
}

TEST(a_rank_that_leaves_with_operations_in_flight_ends_them_on_the_others) {
  Started started;
  ranks::as_threads(
      2,
      [&](int rank, phx_world *world) {
        const std::vector<Member> groups = {members::join(world, "a", {0, 1}, 64, members::kTiny.tuning)};
        if (rank == 0) {
          InFlight flight(groups[0]);
          for (size_t k = 0; k < 60; ++k) flight.start(sums(k * 50, k));
          started.await(1);
          CHECK_OK(phx_world_finalize(world));
        } else {
          survive(groups, 0, started);
        }
        members::leave(world, groups[0]);
      },
      within(20000, 1024));
}

// ---- what pending operations cost

// Counts how often it is looked at.
class CountedSource final : public phx::ProgressSource {
 public:
  bool advance_pending() override {
    looks.fetch_add(1);
    return false;
  }
  std::atomic<int> looks{0};
};

TEST(only_what_has_something_under_way_is_looked_at) {
  phx::Progress progress;
  std::vector<std::shared_ptr<CountedSource>> sources;
  for (int i = 0; i < 400; ++i) {
    sources.push_back(std::make_shared<CountedSource>());
    progress.add(sources.back());
  }
  const auto looks = [&] {
    int all = 0;
    for (const auto &source : sources) all += source->looks.exchange(0);
    return all;
  };
  CHECK(!progress.pending());
  progress.began(*sources[7]);
  progress.began(*sources[7]);
  progress.began(*sources[300]);
  CHECK(progress.pending());
  progress.poll(nullptr);
  CHECK(sources[7]->looks == 1 && sources[300]->looks == 1 && looks() == 2);
  progress.poll(sources[7].get());
  CHECK(sources[300]->looks == 1 && looks() == 1);
  progress.ended(*sources[7]);
  progress.ended(*sources[300]);
  progress.poll(nullptr);
  CHECK(sources[7]->looks == 1 && looks() == 1);
  progress.began(*sources[300]);
  progress.poll(nullptr);
  CHECK(sources[300]->looks == 1 && looks() == 2);
  progress.ended(*sources[300]);
  sources[300].reset();  // while it is in the list
  sources.erase(sources.begin() + 300);
  progress.ended(*sources[7]);
  CHECK(!progress.pending());
  progress.poll(nullptr);
  CHECK(looks() == 0);
}

TEST(what_begins_while_others_look_is_never_forgotten) {
  phx::Progress progress;
  const auto source = std::make_shared<CountedSource>();
  progress.add(source);
  std::atomic<bool> over{false};
  std::thread looking([&] {
    while (!over) progress.poll(nullptr);
  });
  for (int i = 0; i < static_cast<int>(20000 / kThinner); ++i) {
    progress.began(*source);
    if (i % 100 == 0) {
      const int before = source->looks;
      while (source->looks == before) std::this_thread::yield();  // the deadline of the test ends this
    }
    progress.ended(*source);
  }
  over = true;
  looking.join();
}

// Waits that last long cost next to nothing, whatever is pending.
TEST(a_rank_that_waits_long_with_operations_pending_uses_no_core) {
  ranks::all_zero(ranks::as_processes(2, [](int rank, phx_world *world) {
    phx_group *group = ranks::make_group(world), *other = ranks::make_group(world, "other");
    const std::vector<char> large(size_t{4} << 20);
    std::vector<char> out(large.size());
    float x = 1, y = 0, sum = 0;
    const auto measured = [&](auto wait) {
      rusage before{}, after{};
      getrusage(RUSAGE_SELF, &before);
      wait();
      getrusage(RUSAGE_SELF, &after);
      const auto us = [](const timeval &time) { return time.tv_sec * 1000000 + time.tv_usec; };
      const auto used = us(after.ru_utime) + us(after.ru_stime) - us(before.ru_utime) - us(before.ru_stime);
      CHECK(used < 100000);
      CHECK(after.ru_nvcsw - before.ru_nvcsw < 1500);
    };
    CHECK_OK(phx_barrier(group, nullptr, nullptr));
    if (rank == 0) {
      phx_work *works[4] = {};
      CHECK_OK(phx_recv(group, &y, 1, PHX_DTYPE_F32, 1, 3, nullptr, &works[0]));
      CHECK_OK(phx_recv(other, out.data(), out.size(), PHX_DTYPE_U8, 1, 4, nullptr, &works[1]));
      CHECK_OK(phx_send(group, large.data(), large.size(), PHX_DTYPE_U8, 1, 5, nullptr, &works[2]));
      CHECK_OK(phx_all_reduce(other, &x, &sum, 1, PHX_DTYPE_F32, PHX_OP_SUM, nullptr, &works[3]));
      measured([&] { CHECK_OK(phx_barrier(group, nullptr, nullptr)); });
      measured([&] { CHECK_OK(phx_work_wait(works[0], 0)); });
      for (phx_work *work : works) {
        CHECK_OK(phx_work_wait(work, 0));
        phx_work_release(work);
      }
      CHECK(y == 1 && sum == 2 && out == large);
    } else {
      sleep(1);  // what rank 0 waits for
      CHECK_OK(phx_barrier(group, nullptr, nullptr));
      sleep(1);
      CHECK_OK(phx_send(group, &x, 1, PHX_DTYPE_F32, 0, 3, nullptr, nullptr));
      phx_work *work = nullptr;
      CHECK_OK(phx_send(other, large.data(), large.size(), PHX_DTYPE_U8, 0, 4, nullptr, &work));
      CHECK_OK(phx_recv(group, out.data(), out.size(), PHX_DTYPE_U8, 0, 5, nullptr, nullptr));
      CHECK_OK(phx_all_reduce(other, &x, &sum, 1, PHX_DTYPE_F32, PHX_OP_SUM, nullptr, nullptr));
      CHECK_OK(phx_work_wait(work, 0));
      phx_work_release(work);
      CHECK(out == large && sum == 2);
    }
    CHECK_OK(phx_barrier(group, nullptr, nullptr));
    phx_group_release(other);
    phx_group_release(group);
  }));
}

}  // namespace

int main(int argc, char **argv) { return check::run_all(argc, argv); }
