// Two ranks in C++: a sum over both, memory that both see, a message, and the death of one of them. As two_ranks.c.
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <filesystem>
#include <phalanx/phalanx.hpp>
#include <stdexcept>
#include <string>
#include <vector>

static void require(bool condition, const char *what) {
  if (!condition) throw std::runtime_error(std::string("wrong: ") + what);
}

// What fails throws phalanx::Error, whose text says what to do about it.
static void run(int rank, const std::string &path) {
  phalanx::WorldOptions options;
  options.timeout = std::chrono::seconds(30);  // no wait is unbounded
  const auto world = phalanx::World::create(rank, 2, phalanx::Store::file(path), options);
  auto group = world.group("both");
  const int peer = 1 - rank;

  std::vector<float> values(1000, static_cast<float>(rank + 1));
  group.all_reduce(values, values);
  require(values[999] == 3.0f, "the sum");
  double value[] = {rank + 1.0};
  auto work = group.start().all_reduce(value, value, phalanx::Op::max);  // while this rank does something else
  work.wait();
  require(value[0] == 2.0, "the maximum");

  // [symm]
  const auto symm = group.allocate(1000 * sizeof(int));
  symm.own<int>()[10] = 40 + rank;
  symm.put_signal(peer);  // mine is filled
  symm.wait_signal(peer);
  require(symm.block_as<int>(peer)[10] == 40 + peer, "the peer's block");
  // [symm end]

  // [message]
  std::string text = rank == 0 ? "good morning" : "............";
  rank == 0 ? group.send(text, peer, 7) : group.recv(text, peer, 7);
  require(text == "good morning", "the message");
  // [message end]

  group.barrier();
  if (rank == 1) _exit(0);  // dies, without a word
  try {
    group.barrier();
    require(false, "that the peer is dead");
  } catch (const phalanx::Error &) {
    std::printf("rank 0: %s\n", group.error()->what());
    require(group.error()->peer() == 1, "which one");
  }
  group = group.shrink();
  group.barrier();
}

int main() try {
  std::string directory = "/tmp/phalanx-two-XXXXXX";
  if (mkdtemp(directory.data()) == nullptr) return 1;
  const pid_t child = fork();  // before any call of phalanx: a world does not survive a fork
  run(child == 0 ? 1 : 0, directory + "/store");
  int status = 0;
  if (waitpid(child, &status, 0) != child || status != 0) return 1;
  std::filesystem::remove_all(directory);
  std::puts("two ranks in C++: all is right");
} catch (const std::exception &error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
