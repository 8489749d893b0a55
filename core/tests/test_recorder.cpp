// The flight recorder: what it keeps, also of ranks that died, and while it is written.
#include <dirent.h>
#include <signal.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <sstream>

#include "group/history.h"
#include "ranks.h"

namespace {

std::string dump(phx_world *world) {
  size_t size = 0;
  CHECK_OK(phx_world_dump(world, nullptr, 0, &size));
  std::vector<char> text(1);
  while (size >= text.size()) {  // it may have grown since
    text.resize(size + 1);
    CHECK_OK(phx_world_dump(world, text.data(), text.size(), &size));
  }
  CHECK(std::strlen(text.data()) == size);
  return text.data();
}

size_t count_of(const std::string &text, const std::string &part) {
  size_t count = 0;
  for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++count;
  return count;
}

TEST(every_rank_sees_what_all_ranks_called) {
  ranks::as_threads(3, [](int rank, phx_world *world) {
    phx_group *group = ranks::make_group(world, "with \"quotes\"");
    float x[12] = {};
    for (int i = 0; i < 5; ++i) CHECK_OK(phx_all_reduce(group, x, x, 12, PHX_DTYPE_F32, PHX_OP_MAX, nullptr, nullptr));
    CHECK_OK(phx_broadcast(group, x, 3, PHX_DTYPE_F32, 1, nullptr, nullptr));
    phx_options options{};
    options.struct_size = sizeof options;
    options.channel = 2;
    phx_work *work = nullptr;
    CHECK_OK(phx_all_reduce(group, x, x, 1, PHX_DTYPE_I32, PHX_OP_BOR, &options, &work));
    CHECK_OK(phx_work_wait(work, 0));
    phx_work_release(work);
    CHECK_OK(phx_barrier(group, nullptr, nullptr));
    const std::string text = dump(world);
    CHECK(text.find("\"format\": \"phalanx-flight-recorder\", \"version\": 1") != std::string::npos);
    CHECK(text.find("\"name\": \"with \\\"quotes\\\"\"") != std::string::npos);
    CHECK(text.find("\"rank\": " + std::to_string(rank) + ", \"world_size\": 3") != std::string::npos);
    CHECK(count_of(text,
                   "\"call\": \"all_reduce\", \"dtype\": \"float32\", \"count\": 12, \"op\": \"max\", \"root\": null, "
                   "\"bytes\": 48") == 15);
    CHECK(count_of(text, "\"call\": \"broadcast\", \"dtype\": \"float32\", \"count\": 3, \"op\": null, \"root\": 1") ==
          3);
    CHECK(count_of(text, "\"channel\": 2, \"started\": 1, \"completed\": 1") >= 1);
    CHECK(count_of(text, "\"sequence\": 7, \"call\": \"barrier\", \"dtype\": null") == 3);
    CHECK_OK(phx_barrier(group, nullptr, nullptr));  // nobody goes before the others have looked
    phx_group_release(group);
  });
}

TEST(it_keeps_the_last_ones) {
  ranks::as_threads(1, [](int, phx_world *world) {
    phx_group *group = ranks::make_group(world);
    for (int i = 0; i < 1000; ++i) CHECK_OK(phx_barrier(group, nullptr, nullptr));
    const std::string text = dump(world);
    CHECK(count_of(text, "\"sequence\": ") == 256);
    CHECK(text.find("\"sequence\": 744,") == std::string::npos && text.find("\"sequence\": 745,") != std::string::npos);
    CHECK(text.find("\"started\": 1000, \"completed\": 1000") != std::string::npos);
    phx_group_release(group);
  });
}

TEST(a_dump_may_be_taken_while_the_others_go_on) {
  ranks::as_threads(2, [](int rank, phx_world *world) {
    phx_group *group = ranks::make_group(world);
    std::atomic<bool> over{false};
    std::thread reader([&] {
      while (rank == 0 && !over) CHECK(!dump(world).empty());
    });
    float x = 1;
    for (int i = 0; i < 3000; ++i)
      CHECK_OK(phx_all_reduce(group, &x, &x, 1, PHX_DTYPE_F32, PHX_OP_MAX, nullptr, nullptr));
    over = true;
    reader.join();
    phx_group_release(group);
  });
}

TEST(an_entry_that_is_being_written_is_passed_over) {
  alignas(64) static char memory[4 * 64];
  phx::History history(memory, 4);
  phx::Recorded entry;
  CHECK(!history.read(0, &entry));
  phx::CallRecord call;
  call.count = 7;
  history.begin(6, call);
  CHECK(history.read(2, &entry) && entry.sequence == 6 && entry.call.count == 7 && entry.end_ticks == 0);
  CHECK(entry.status == PHX_IN_PROGRESS);
  history.end(6, PHX_ERR_TIMEOUT);
  CHECK(history.read(2, &entry) && entry.status == PHX_ERR_TIMEOUT && entry.end_ticks >= entry.start_ticks);
  history.begin(10, call);  // in its place
  history.end(6, PHX_OK);   // comes too late
  CHECK(history.read(2, &entry) && entry.sequence == 10 && entry.end_ticks == 0);
  std::memset(memory + 2 * 64, 0, 8);
  CHECK(!history.read(2, &entry));
  CHECK(history.newest().sequence == 0);
}

TEST(the_late_rank_is_named_with_its_last_call) {
  ranks::Options options;
  options.timeout_ms = 300;
  ranks::as_threads(
      2,
      [](int rank, phx_world *world) {
        phx_group *group = nullptr;
        const int32_t both[] = {0, 1};
        CHECK_OK(phx_group_create(world, "g", both, 2, 20000, &group));
        float x = 1;
        CHECK_OK(barrier_within(group, 20000));
        if (rank == 0) {
          CHECK_FAILS(PHX_ERR_TIMEOUT, "; its last call was barrier() #1)",
                      phx_all_reduce(group, &x, &x, 1, PHX_DTYPE_F32, PHX_OP_SUM, nullptr, nullptr));
          const std::string text = dump(world);
          CHECK(text.find("\"status\": \"PHX_ERR_TIMEOUT\"") != std::string::npos);
          CHECK(text.find("\"state\": \"failed\"") != std::string::npos);
        } else {
          std::this_thread::sleep_for(std::chrono::milliseconds(700));
        }
        phx_group_release(group);
      },
      options);
}

TEST(survivors_read_what_the_dead_one_did_and_leave_it_in_a_file) {
  ranks::FileStore folder;  // only for its folder
  const std::string place = folder.path().substr(0, folder.path().rfind('/'));
  setenv("PHALANX_DUMP", place.c_str(), 1);
  int over[2];
  CHECK(pipe(over) == 0);
  const auto codes = ranks::as_processes(2, [&over](int rank, phx_world *world) {
    phx_group *group = ranks::make_group(world);
    float x[4] = {};
    CHECK_OK(phx_all_reduce(group, x, x, 4, PHX_DTYPE_F32, PHX_OP_SUM, nullptr, nullptr));
    if (rank == 1) {
      phx_work *work = nullptr;
      CHECK_OK(phx_all_reduce(group, x, x, 2, PHX_DTYPE_F32, PHX_OP_MIN, nullptr, &work));
      char done;
      CHECK(read(over[0], &done, 1) == 1);
      kill(getpid(), SIGKILL);
    }
    CHECK_OK(
        phx_all_reduce(group, x, x, 2, PHX_DTYPE_F32, PHX_OP_MIN, nullptr, nullptr));  // its part has come, or comes
    CHECK(write(over[1], "", 1) == 1);
    CHECK_FAILS(PHX_ERR_PEER_DEAD, "rank 1 (pid", phx_barrier(group, nullptr, nullptr));
    phx_group_release(group);
  });
  unsetenv("PHALANX_DUMP");
  close(over[0]), close(over[1]);
  CHECK(codes[0] == 0 && WIFSIGNALED(codes[1]));
  std::vector<std::string> files;
  DIR *listing = opendir(place.c_str());
  CHECK(listing != nullptr);
  while (const dirent *each = readdir(listing))
    if (std::strstr(each->d_name, ".json") != nullptr) files.push_back(place + "/" + each->d_name);
  closedir(listing);
  CHECK(files.size() == 1);  // the rank that ended in good order is no failure
  std::stringstream text;
  text << std::ifstream(files[0]).rdbuf();
  size_t dead = 0;
  for (const char *state : {"exiting", "zombie", "gone"})
    dead += count_of(text.str(), "\"process\": \"" + std::string(state) + "\"");
  CHECK(dead == 1);
  CHECK(count_of(text.str(), "\"op\": \"min\", \"root\": null, \"bytes\": 8, \"algorithm\"") == 2);
  CHECK(count_of(text.str(), "\"end_ns\": null, \"status\": \"pending\"") >= 1);
}

TEST(wrong_arguments_of_it) {
  ranks::as_threads(1, [](int, phx_world *world) {
    size_t size = 0;
    char small[16];
    CHECK_FAILS(PHX_ERR_INVALID, "size or json is NULL", phx_world_dump(world, small, sizeof small, nullptr));
    CHECK_FAILS(PHX_ERR_INVALID, "size or json is NULL", phx_world_dump(world, nullptr, 5, &size));
    CHECK_OK(phx_world_dump(world, small, sizeof small, &size));
    CHECK(std::strlen(small) == sizeof small - 1 && size > sizeof small);
    phx_world_params params{};
    params.struct_size = sizeof params;
    params.size = 1;
    params.recorder_entries = (1 << 20) + 1;
    phx_world *none = nullptr;
    CHECK_FAILS(PHX_ERR_INVALID, "recorder_entries is 1048577", phx_world_create(&params, &none));
  });
}

}  // namespace

int main(int argc, char **argv) { return check::run_all(argc, argv); }
