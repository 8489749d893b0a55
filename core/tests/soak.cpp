// The soak: random collectives and messages for as long as one likes, every result checked to the bit.
//
//   soak [--ranks N] [--seconds S] [--count C] [--seed X] [--threads]
//
// All ranks draw the same sequence from the seed; what does not change the values (blocking or started, when to wait,
// short sleeps, which cores) each draws for itself. Prints one line of counts, mismatches, memory and descriptors; the
// exit status is 1 on a mismatch, an error, or growth. --threads: ranks are threads of one process, for sanitizers.
#include <dirent.h>
#include <sched.h>
#include <sys/mman.h>

#include <chrono>
#include <cinttypes>

#include "members.h"

namespace {

using collective::Case;
using collective::Member;
using collective::Part;
using collective::What;
using collective::Where;
using members::Draw;

struct Arguments {
  int ranks = 3;
  double seconds = 60;
  uint64_t count = UINT64_MAX;
  uint64_t seed = 1;
  bool threads = false;
};

constexpr int kKinds = collective::kWhats + 4;
enum { kSymmetricKind = collective::kWhats, kCoalescedKind, kMessageKind, kBarrierKind };

// What a rank reports, in memory that all share.
struct Report {
  uint64_t counts[kKinds] = {};  // of what this rank led
  uint64_t steps = 0;
  uint64_t mismatches = 0;
  uint64_t groups_made = 0;
  size_t rss_begin = 0, rss_end = 0;  // bytes
  size_t fds_begin = 0, fds_end = 0;
  int finished = 0;
};

size_t resident_bytes() {
  size_t pages = 0;
  if (FILE *file = std::fopen("/proc/self/statm", "r")) {
    if (std::fscanf(file, "%*u %zu", &pages) != 1) pages = 0;
    std::fclose(file);
  }
  return pages * static_cast<size_t>(sysconf(_SC_PAGESIZE));
}

size_t open_descriptors() {
  size_t count = 0;
  if (DIR *directory = opendir("/proc/self/fd")) {
    while (readdir(directory) != nullptr) ++count;
    closedir(directory);
  }
  return count - 3;  // ".", ".." and the directory itself
}

// One rank.
class Soak {
 public:
  Soak(int rank, phx_world *world, const Arguments &arguments, Report *report)
      : rank_(rank),
        world_(world),
        arguments_(arguments),
        report_(report),
        own_(arguments.seed * 1000 + static_cast<uint64_t>(rank)),
        slots_(kSlots) {
    CHECK(sched_getaffinity(0, sizeof all_cores_, &all_cores_) == 0);
    for (Slot &slot : slots_) {  // all that they will ever need
      for (Part &part : slot.parts) part.reserve(kSmallBytes + kMargin);
      slot.parts[0].reserve((&slot == &slots_[0] ? kLargeBytes : kMiddleBytes) + kMargin);
      slot.message.resize(&slot == &slots_[0] ? kLargeBytes : kMiddleBytes);
    }
  }

  void run() {
    const auto begin = std::chrono::steady_clock::now();
    join_groups();
    uint64_t step = 0;
    int regroups = 0;
    for (bool more = true; more; ++step) {
      one_step(step);
      if (step % kRegroup == kRegroup - 1) {
        regroup();
        if (++regroups == kWarmUp) measure(&report_->rss_begin, &report_->fds_begin);
      }
      if (step % 512 == 511) {
        const std::chrono::duration<double> lasted = std::chrono::steady_clock::now() - begin;
        more = go_on(lasted.count() < arguments_.seconds) || regroups < kWarmUp;
      }
    }
    report_->steps = step;
    regroup();
    measure(&report_->rss_end, &report_->fds_end);
    leave_groups();
    sched_setaffinity(0, sizeof all_cores_, &all_cores_);
    report_->finished = 1;
  }

 private:
  static constexpr size_t kSlots = 24;  // in flight; the first is for large ones
  static constexpr size_t kMostCalls = 8;
  static constexpr size_t kSmallBytes = size_t{64} << 10;
  static constexpr size_t kMiddleBytes = size_t{256} << 10;
  static constexpr size_t kMargin = 4096;  // of the _v forms
  static constexpr size_t kLargeBytes = size_t{4} << 20;
  static constexpr uint64_t kRegroup = 20000 / members::kThinner / members::kThinner;
  static constexpr int kWarmUp = 2;  // regroupings; what is measured is what is there after one

  struct Slot {
    std::vector<Part> parts = std::vector<Part>(kMostCalls);
    size_t used = 0;  // parts
    phx_work *work = nullptr;
    std::vector<char> message;
    bool receives = false;
    int from = 0;
    int32_t dtype = 0;
    size_t first = 0, count = 0;
  };

  void join_groups() {
    const int n = phx_world_size(world_);
    std::vector<std::vector<int>> lists;
    lists.push_back(members::all_of(world_));
    lists.push_back(lists[0]);
    std::reverse(lists[1].begin(), lists[1].end());
    if (n > 2) {
      lists.push_back({n - 1, 0});
      lists.emplace_back(lists[0].begin() + 1, lists[0].end());
    }
    groups_.assign(lists.size(), {});
    for (size_t g = 0; g < lists.size(); ++g) {
      const std::vector<int> &list = lists[g];
      groups_[g].ranks = list;
      if (std::find(list.begin(), list.end(), rank_) == list.end()) continue;
      const phx_tuning tuning = g % 2 == 0 ? members::kUsual.tuning : members::kTiny.tuning;
      groups_[g] = members::join(world_, ("group" + std::to_string(g)).c_str(), list,
                                 kSlots * kSmallBytes + kLargeBytes, tuning);
      if (rank_ == list[0]) ++report_->groups_made;
    }
  }
  void leave_groups() {
    for (const Member &member : groups_)
      if (member.group != nullptr) CHECK_OK(phx_barrier(member.group, nullptr, nullptr));
    for (const Member &member : groups_)
      if (member.group != nullptr) members::leave(world_, member);
    groups_.clear();
  }
  // While no rank is at anything else.
  void measure(size_t *rss, size_t *fds) {
    CHECK_OK(phx_barrier(groups_[0].group, nullptr, nullptr));
    *rss = resident_bytes();
    *fds = open_descriptors();
    CHECK_OK(phx_barrier(groups_[0].group, nullptr, nullptr));
  }
  void regroup() {
    finish_all();
    leave_groups();
    join_groups();
  }

  // Whether everybody wants to.
  bool go_on(bool wish) {
    uint64_t values[2] = {wish ? uint64_t{0} : 1, 0};
    for (const uint64_t count : report_->counts) values[1] += count;
    CHECK_OK(phx_all_reduce(groups_[0].group, values, values, 2, PHX_DTYPE_U64, PHX_OP_SUM, nullptr, nullptr));
    return values[0] == 0 && values[1] < arguments_.count;
  }

  // All of a step is drawn before anybody skips it, and from a seed of its own.
  void one_step(uint64_t step) {
    Draw draw(arguments_.seed ^ reference::mix(step));
    const Member &member = groups_[draw.below(groups_.size())];
    const auto n = member.ranks.size();
    const size_t what = draw.below(100);
    const bool large = draw.one_in(1500);
    const size_t most = large ? kLargeBytes : draw_most(draw);
    const size_t k = large ? 0 : 1 + step % (kSlots - 1);
    disturb();
    if (what < 1) {
      if (member.group == nullptr) return;
      CHECK_OK(phx_barrier(member.group, nullptr, nullptr));
      count(member, kBarrierKind, 1);
    } else if (what < 11) {
      coalesced(member, draw, k, std::min(most, kSmallBytes));
    } else if (what < 25) {
      message(member, draw, k, most);
    } else {
      Case c = members::draw_case(draw, n, most, false);
      limit(c, n, most);
      c.channel = static_cast<uint32_t>(draw.below(4));
      if (collective::in_block(c)) {
        c.symmetric_offset = large ? kSlots * kSmallBytes : k * kSmallBytes;
        if (Part::symmetric_bytes(c, static_cast<int>(n)) > (large ? kLargeBytes : kSmallBytes))
          c.where = Where::kPlain;
        if (!possible(c)) c.in_place = !c.in_place;
      }
      collective(member, c, k);
    }
  }

  // Mostly small.
  static size_t draw_most(Draw &draw) {
    const size_t kind = draw.below(1000);
    return kind < 600 ? 256 : kind < 900 ? 4096 : kind < 995 ? size_t{32} << 10 : kMiddleBytes;
  }
  // No buffer has more than `most` bytes.
  static void limit(Case &c, size_t n, size_t most) {
    c.count = std::min(c.count, most / (n * phx_dtype_size(c.dtype)));
  }

  void collective(const Member &member, const Case &c, size_t k) {
    if (member.group == nullptr) return;
    Slot &slot = slots_[k];
    finish(slot);
    slot.used = 1;
    slot.parts[0].prepare(member, c);
    const bool starts = own_.one_in(2);
    CHECK_OK(slot.parts[0].issue(starts ? &slot.work : nullptr));
    count(member, c.where == Where::kSymmetric ? kSymmetricKind : static_cast<int>(c.what), 1);
    if (!starts) finish(slot);
  }

  void coalesced(const Member &member, Draw &draw, size_t k, size_t most) {
    std::vector<Case> cases(2 + draw.below(kMostCalls - 1));
    for (Case &c : cases) {
      c = members::draw_case(draw, member.ranks.size(), most, true);
      limit(c, member.ranks.size(), most);
    }
    if (member.group == nullptr) return;
    Slot &slot = slots_[k];
    finish(slot);
    std::vector<phx_call> calls;
    slot.used = cases.size();
    for (size_t i = 0; i < cases.size(); ++i) {
      slot.parts[i].prepare(member, cases[i]);
      calls.push_back(slot.parts[i].call());
    }
    phx_options options{};
    options.struct_size = sizeof options;
    options.scale = reference::kScale;
    const bool starts = own_.one_in(2);
    CHECK_OK(phx_coalesced(member.group, calls.data(), calls.size(), &options, starts ? &slot.work : nullptr));
    count(member, kCoalescedKind, cases.size());
    if (!starts) finish(slot);
  }

  void message(const Member &member, Draw &draw, size_t k, size_t most) {
    const size_t n = member.ranks.size();
    const size_t from = draw.below(n), to = draw.below(n);
    const auto tag = static_cast<uint32_t>(draw.below(5));
    const auto dtype = static_cast<int32_t>(PHX_DTYPE_F16 + draw.below(reference::kLastDtype));
    const size_t first = draw.below(reference::kPeriod), elements = draw.below(most + 1) / phx_dtype_size(dtype);
    const auto self = static_cast<size_t>(member.self);
    if (member.group == nullptr || (self != from && self != to) || from == to) return;
    Slot &slot = slots_[k];
    finish(slot);
    slot.used = 0;
    slot.receives = self == to;
    slot.from = member.ranks[from];
    slot.dtype = dtype;
    slot.first = first;
    slot.count = elements;
    const size_t bytes = elements * phx_dtype_size(dtype);
    const bool starts = own_.one_in(2);
    phx_work **work = starts ? &slot.work : nullptr;
    if (slot.receives) {
      std::memset(slot.message.data(), 0xa5, bytes);
      CHECK_OK(
          phx_recv(member.group, slot.message.data(), elements, dtype, static_cast<int32_t>(from), tag, nullptr, work));
      ++report_->counts[kMessageKind];
    } else {
      reference::fill(slot.message.data(), reference::elements(slot.from, dtype), phx_dtype_size(dtype), first,
                      elements);
      CHECK_OK(
          phx_send(member.group, slot.message.data(), elements, dtype, static_cast<int32_t>(to), tag, nullptr, work));
    }
    if (!starts) check_message(slot);
  }

  void finish(Slot &slot) {
    if (slot.work != nullptr) {
      CHECK_OK(phx_work_wait(slot.work, 0));
      phx_work_release(slot.work);
      slot.work = nullptr;
      check_message(slot);
    }
    for (size_t i = 0; i < slot.used; ++i) {
      const std::string wrong = slot.parts[i].check();
      if (!wrong.empty()) mismatch(wrong);
    }
    slot.used = 0;
  }
  void check_message(Slot &slot) {
    if (slot.used == 0 && slot.receives &&
        !reference::matches(slot.message.data(), reference::elements(slot.from, slot.dtype), phx_dtype_size(slot.dtype),
                            slot.first, slot.count))
      mismatch("a message from rank " + std::to_string(slot.from) + " is wrong");
    slot.receives = false;
  }
  void finish_all() {
    for (Slot &slot : slots_) finish(slot);
  }
  void mismatch(const std::string &what) {
    if (++report_->mismatches <= 10) std::fprintf(stderr, "mismatch: rank %d: %s\n", rank_, what.c_str());
  }
  // Each is counted once, by the first rank of its group.
  void count(const Member &member, int kind, uint64_t more) {
    if (member.self == 0) report_->counts[kind] += more;
  }

  // Something that must not matter.
  void disturb() {
    if (own_.one_in(12)) {
      Slot &slot = slots_[own_.below(kSlots)];
      if (slot.work != nullptr && own_.one_in(2))
        finish(slot);
      else if (slot.work != nullptr)
        CHECK(phx_work_test(slot.work) >= 0);
    }
    if (own_.one_in(3000)) usleep(static_cast<useconds_t>(own_.below(300)));
    if (own_.one_in(200000)) usleep(static_cast<useconds_t>(own_.below(20000)));
    if (own_.one_in(20000)) change_cores();
  }
  void change_cores() {
    cpu_set_t cores = all_cores_;
    if (own_.one_in(2)) {
      size_t nth = own_.below(static_cast<size_t>(CPU_COUNT(&all_cores_)));
      CPU_ZERO(&cores);
      for (size_t core = 0; core < CPU_SETSIZE; ++core)
        if (CPU_ISSET(core, &all_cores_) && nth-- == 0) CPU_SET(core, &cores);
    }
    sched_setaffinity(0, sizeof cores, &cores);
  }

  const int rank_;
  phx_world *const world_;
  const Arguments &arguments_;
  Report *const report_;
  Draw own_;
  cpu_set_t all_cores_;
  std::vector<Slot> slots_;
  std::vector<Member> groups_;  // those of which this rank is no member have no group
};

bool parse(int argc, char **argv, Arguments *out) {
  for (int i = 1; i < argc; ++i) {
    const std::string name = argv[i];
    if (name == "--threads") {
      out->threads = true;
      continue;
    }
    if (++i == argc) return false;
    if (name == "--ranks")
      out->ranks = std::atoi(argv[i]);
    else if (name == "--seconds")
      out->seconds = std::atof(argv[i]);
    else if (name == "--count")
      out->count = std::strtoull(argv[i], nullptr, 10);
    else if (name == "--seed")
      out->seed = std::strtoull(argv[i], nullptr, 10);
    else
      return false;
  }
  return out->ranks >= 2 && out->ranks <= 64;
}

// Whether all is well.
bool print(const Arguments &arguments, const Report *reports, double lasted) {
  constexpr const char *kNames[] = {"symmetric", "coalesced", "messages", "barriers"};
  Report sum;
  bool well = true;
  std::string memory, descriptors;
  for (int rank = 0; rank < arguments.ranks; ++rank) {
    const Report &report = reports[rank];
    for (int kind = 0; kind < kKinds; ++kind) sum.counts[kind] += report.counts[kind];
    sum.mismatches += report.mismatches;
    sum.groups_made += report.groups_made;
    constexpr double kMiB = 1 << 20;
    // Sanitizers keep what was freed.
    const bool grown =
        (members::kThinner == 1 && report.rss_end > report.rss_begin + report.rss_begin / 20 + (size_t{4} << 20)) ||
        report.fds_end > report.fds_begin;
    well = well && report.finished == 1 && report.mismatches == 0 && !grown;
    char text[128];
    std::snprintf(text, sizeof text, " %.1f->%.1f", static_cast<double>(report.rss_begin) / kMiB,
                  static_cast<double>(report.rss_end) / kMiB);
    memory += text;
    std::snprintf(text, sizeof text, " %zu->%zu", report.fds_begin, report.fds_end);
    descriptors += text;
    if (report.finished == 0) descriptors += " (rank " + std::to_string(rank) + " failed)";
  }
  uint64_t collectives = 0;
  for (int kind = 0; kind < kKinds; ++kind)
    if (kind != kMessageKind) collectives += sum.counts[kind];
  std::printf("soak: %" PRIu64 " collectives in %.0f s by %d %s, seed %" PRIu64 ", %" PRIu64 " mismatches;",
              collectives, lasted, arguments.ranks, arguments.threads ? "threads" : "processes", arguments.seed,
              sum.mismatches);
  for (int kind = 0; kind < kKinds; ++kind)
    std::printf(
        " %s %" PRIu64 ",",
        kind < collective::kWhats ? collective::name_of(static_cast<What>(kind)) : kNames[kind - collective::kWhats],
        sum.counts[kind]);
  std::printf(" groups made %" PRIu64 "; RSS MiB%s; descriptors%s: %s\n", sum.groups_made, memory.c_str(),
              descriptors.c_str(), well ? "well" : "NOT WELL");
  return well;
}

}  // namespace

int main(int argc, char **argv) {
  Arguments arguments;
  if (!parse(argc, argv, &arguments)) {
    std::fprintf(stderr, "soak [--ranks N] [--seconds S] [--count C] [--seed X] [--threads]\n");
    return 2;
  }
  const size_t bytes = sizeof(Report) * static_cast<size_t>(arguments.ranks);
  void *shared = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (shared == MAP_FAILED) return 2;
  auto *reports = static_cast<Report *>(shared);
  ranks::Options options;
  options.timeout_ms = 120000;
  const auto begin = std::chrono::steady_clock::now();
  const auto body = [&](int rank, phx_world *world) {
    reports[rank] = Report{};
    Soak(rank, world, arguments, &reports[rank]).run();
  };
  try {
    if (arguments.threads)
      ranks::as_threads(arguments.ranks, body, options);
    else
      ranks::as_processes(arguments.ranks, body, options);
  } catch (const std::exception &) {  // printed where it was found
  }
  const std::chrono::duration<double> lasted = std::chrono::steady_clock::now() - begin;
  return print(arguments, reports, lasted.count()) ? 0 : 1;
}
