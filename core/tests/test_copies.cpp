// The plan of copies: measured once for a boot of the host, kept in a file, the same on all ranks.
#include <sys/stat.h>

#include <algorithm>
#include <fstream>
#include <map>
#include <sstream>
#include <vector>

#include "base/cores.h"
#include "base/tuning.h"
#include "group/measure_copies.h"
#include "kernels/copy_plan.h"
#include "ranks.h"
#include "store_fixtures.h"

namespace {

using phx::kernels::Copy;
using phx::kernels::CopyOrigin;
using phx::kernels::CopyPlan;
using phx::kernels::CopyUse;
using Words = std::map<std::string, std::string>;

// The directory of a table that ranks which are started while it lives read. There is no table in it.
class Place {
 public:
  Place() : table_(directory_.file("tuning")), file_(table_ + ".copies") { use(table_); }
  ~Place() { unsetenv("PHALANX_TUNING"); }
  static void use(const std::string &table) { setenv("PHALANX_TUNING", table.c_str(), 1); }
  const std::string &table() const { return table_; }
  const std::string &file() const { return file_; }
  bool has_file() const { return access(file_.c_str(), F_OK) == 0; }
  std::string read() const {
    std::ostringstream text;
    text << std::ifstream(file_).rdbuf();
    return text.str();
  }
  void write(const std::string &text) const { std::ofstream(file_) << text; }
  // Files in the directory.
  int files() const { return static_cast<int>(has_file()) + static_cast<int>(access(table_.c_str(), F_OK) == 0); }

 private:
  fixtures::TemporaryDirectory directory_;
  std::string table_, file_;
};

Words words_now() { return phx::kernels::words_of_plan(phx::kernels::current_plan()); }

void need_measuring() {
  if (!phx::kernels::kMeasuresCopies) check::skip("a build for x86-64 without sanitizers");
  if (phx::count_cores(phx::allowed_cores()) < 2) check::skip("two cores");
  if (!phx::may_keep_for_boot()) check::skip("the boot id of the kernel");
}

// Makes groups of two ranks, and returns where the plan of rank 0 came from. It is the same for all of its groups.
CopyOrigin origin_of_groups(int groups) {
  const std::vector<int> codes = ranks::as_processes(2, [=](int, phx_world *world) {
    CopyOrigin origin{};
    for (int i = 0; i < groups; ++i) {
      phx_group *group = ranks::make_group(world, ("g" + std::to_string(i)).c_str());
      if (i == 0) origin = phx::kernels::copy_origin();
      CHECK(phx::kernels::copy_origin() == origin);
      std::vector<int32_t> data(100000, 1), sum(100000);
      CHECK_OK(
          phx_all_reduce(group, data.data(), sum.data(), data.size(), PHX_DTYPE_I32, PHX_OP_SUM, nullptr, nullptr));
      CHECK(std::count(sum.begin(), sum.end(), 2) == static_cast<long>(sum.size()));
      phx_group_release(group);
    }
    std::fflush(nullptr);
    _exit(10 + static_cast<int>(origin));
  });
  CHECK(codes[0] == codes[1] && WIFEXITED(codes[0]) && WEXITSTATUS(codes[0]) >= 10);
  return static_cast<CopyOrigin>(WEXITSTATUS(codes[0]) - 10);
}

// On a busy host the ranks may not run at the same time for long enough. Then nothing is kept, and the next ones try.
void expect_origin(CopyOrigin origin, int groups = 1) {
  CopyOrigin found = CopyOrigin::kFeatures;
  for (int tries = 0; tries < 100; ++tries) {
    found = origin_of_groups(groups);
    if (origin != CopyOrigin::kMeasured || found != CopyOrigin::kFeatures) break;
  }
  CHECK(found == origin);
}

// A plan that nobody would choose, and which differs from the one by features.
Words strange_words() {
  Words words = words_now();
  words["exchange"] = words["exchange"][0] == 's' ? "pages,pages,pages" : "string,pages,string";
  return words;
}

TEST(what_the_first_group_measured_is_kept_for_the_groups_after_it) {
  const Place place;
  need_measuring();
  expect_origin(CopyOrigin::kMeasured, 3);
  CHECK(place.files() == 1);
  const std::string kept = place.read();
  struct stat before, after;
  CHECK(stat(place.file().c_str(), &before) == 0);
  expect_origin(CopyOrigin::kKept, 3);
  CHECK(stat(place.file().c_str(), &after) == 0 && before.st_ino == after.st_ino);  // a save makes another file
  CHECK(place.read() == kept);
}

TEST(all_ranks_have_the_plan_of_group_rank_0) {
  const Place place;
  need_measuring();
  const Words strange = strange_words();
  CHECK(phx::save_for_boot(strange) == PHX_OK);
  const Place other;  // rank 1 has another place, in which there is nothing
  ranks::all_zero(ranks::as_processes(2, [&](int rank, phx_world *world) {
    Place::use(rank == 0 ? place.table() : other.table());
    phx_group *group = ranks::make_group(world);
    CHECK(phx::kernels::copy_origin() == CopyOrigin::kKept && words_now() == strange);
    CHECK_OK(phx_barrier(group, nullptr, nullptr));
    phx_group_release(group);
  }));
  CHECK(!other.has_file());
}

TEST(ranks_that_measured_have_one_plan) {
  const Place place;
  need_measuring();
  fixtures::TemporaryDirectory directory;
  ranks::all_zero(ranks::as_processes(2, [&](int rank, phx_world *world) {
    phx_group *group = ranks::make_group(world);
    std::ofstream file(directory.file(std::to_string(rank).c_str()));
    for (const auto &[use, words] : words_now()) file << use << words << "\n";
    phx_group_release(group);
  }));
  std::ostringstream first, second;
  first << std::ifstream(directory.file("0")).rdbuf();
  second << std::ifstream(directory.file("1")).rdbuf();
  CHECK(!first.str().empty() && first.str() == second.str());
}

TEST(a_file_of_another_boot_or_build_or_one_that_is_damaged_is_measured_anew) {
  const Place place;
  need_measuring();
  CHECK(phx::save_for_boot(strange_words()) == PHX_OK);
  const std::string good = place.read();
  const auto changed = [&](const char *word, const char *by) {
    std::string text = good;
    const size_t at = text.find(word);
    CHECK(at != std::string::npos);
    return text.replace(at, std::string(word).size(), by);
  };
  for (const std::string &text :
       {changed("boot=", "boot=1"), changed("build=", "build=1"), changed("host=", "host=1"), std::string(),
        std::string("\0\xff = = =\n", 9), changed("exchange=", "exchange=x"), changed("exchange=", "exchange=stream,"),
        changed("any=", "all="), good.substr(0, good.size() / 2)}) {
    place.write(text);
    expect_origin(CopyOrigin::kMeasured);
    expect_origin(CopyOrigin::kKept);
  }
  place.write(good);
  expect_origin(CopyOrigin::kKept);
}

TEST(rows_of_earlier_boots_go_and_those_of_other_hosts_stay_up_to_a_limit) {
  const Place place;
  if (!phx::may_keep_for_boot()) check::skip("the boot id of the kernel");
  CHECK(phx::save_for_boot({{"any", "1"}}) == PHX_OK);
  const std::string row = place.read();
  std::string text = row.substr(0, row.find(' ')) + " boot=0 build=0 any=2\n";
  for (int i = 0; i < 200; ++i) text += "host=" + std::to_string(i) + " boot=0 build=0 any=3\n";
  place.write(text);
  CHECK(phx::save_for_boot({{"any", "4"}}) == PHX_OK);
  const std::string after = place.read();
  CHECK(after.find("any=2") == std::string::npos);
  CHECK(after.find("host=199 ") != std::string::npos);
  CHECK(std::count(after.begin(), after.end(), '\n') == 64);
  CHECK(phx::load_for_boot().at("any") == "4");
}

TEST(a_file_of_another_user_is_not_read) {
  const Place place;
  need_measuring();
  if (geteuid() != 0) check::skip("the right to give a file to another user");
  CHECK(phx::save_for_boot(strange_words()) == PHX_OK);
  CHECK(chown(place.file().c_str(), 12345, static_cast<gid_t>(-1)) == 0);
  CHECK(phx::load_for_boot().empty());
  expect_origin(CopyOrigin::kMeasured);
}

// Below a file no directory can be made, whoever the user is.
TEST(where_nothing_can_be_written_each_process_measures_for_itself) {
  const Place place;
  need_measuring();
  std::ofstream(place.table()) << "a file\n";
  Place::use(place.table() + "/below");
  expect_origin(CopyOrigin::kMeasured, 2);
  expect_origin(CopyOrigin::kMeasured);
}

TEST(without_a_table_or_with_a_device_in_its_place_the_features_decide) {
  const Place place;
  Place::use("");
  expect_origin(CopyOrigin::kFeatures);
  Place::use("/dev/null");
  expect_origin(CopyOrigin::kFeatures);
  CHECK(access("/dev/null.copies", F_OK) != 0);
  CHECK(place.files() == 0);
}

TEST(small_slots_and_ranks_that_share_cores_measure_nothing) {
  const Place place;
  ranks::Options options;
  options.staging_bytes = 64 << 10;
  ranks::all_zero(ranks::as_processes(
      2,
      [](int, phx_world *world) {
        phx_group *group = ranks::make_group(world);
        CHECK(phx::kernels::copy_origin() == CopyOrigin::kFeatures);
        phx_group_release(group);
      },
      options));
  const int crowd = static_cast<int>(phx::count_cores(phx::allowed_cores())) + 1;
  if (crowd <= 8) {
    ranks::all_zero(ranks::as_processes(crowd, [](int, phx_world *world) {
      phx_group *group = ranks::make_group(world);
      CHECK(phx::kernels::copy_origin() == CopyOrigin::kFeatures);
      phx_group_release(group);
    }));
  }
  CHECK(place.files() == 0);
}

// The clock ends it, not the other rank: one trial at most is copied after the time is over.
TEST(a_measurement_ends_although_the_other_rank_does_nothing) {
  std::vector<char> memory(4 << 20);
  char *base = memory.data() + (64 - reinterpret_cast<uintptr_t>(memory.data()) % 64) % 64;
  char *const slots[3] = {base, base + (1 << 20), base + (2 << 20)};
  CopyPlan plan = phx::kernels::plan_by_features();
  const Words before = phx::kernels::words_of_plan(plan);
  CHECK(!phx::measure_copies(slots, true, &plan));
  CHECK(phx::kernels::words_of_plan(plan) == before);
  std::fill(memory.begin(), memory.end(), 0);
  CHECK(!phx::measure_copies(slots, false, &plan));
}

TEST(a_plan_is_the_same_after_it_was_words) {
  CopyPlan plan = phx::kernels::plan_by_features(), read{};
  CHECK(phx::kernels::is_usable(plan));
  for (size_t i = 0; i < phx::kernels::kCopyCount; ++i)
    for (size_t use = 0; use < phx::kernels::kCopyUses; ++use) {
      const bool serves = phx::kernels::copy_is_for(static_cast<Copy>(i), static_cast<CopyUse>(use));
      CopyPlan changed = plan;
      changed.at(static_cast<CopyUse>(use), 1) = static_cast<Copy>(i);
      const Words words = phx::kernels::words_of_plan(changed);
      CHECK(phx::kernels::is_usable(changed) == serves && phx::kernels::plan_of_words(words, &read) == serves);
      if (serves) CHECK(phx::kernels::words_of_plan(read) == words);
    }
  plan.at(CopyUse::kAny, 0) = static_cast<Copy>(200);  // as a peer might send it
  CHECK(!phx::kernels::is_usable(plan));
}

}  // namespace

int main(int argc, char **argv) { return check::run_all(argc, argv); }
