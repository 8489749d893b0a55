// What is known of the process of another rank.
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <string>
#include <thread>

#include "check.h"
#include "world/identity.h"

namespace {

// A process that holds one end of `link` and, closed after it, files enough to be a while about it.
pid_t start_process(const int (&link)[2]) {
  const pid_t pid = fork();
  if (pid != 0) return pid;
  close(link[0]);
  for (int i = 0; i < 4000 && open("/proc/self/stat", O_RDONLY) >= 0; ++i) {
  }
  if (write(link[1], "+", 1) != 1) _exit(1);
  for (;;) pause();
}

TEST(a_killed_process_has_ended_as_soon_as_its_sockets_are_closed) {
  for (int i = 0; i < 20; ++i) {
    int link[2];
    CHECK(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, link) == 0);
    const pid_t pid = start_process(link);
    CHECK(pid > 0);
    close(link[1]);
    char byte = 0;
    CHECK(read(link[0], &byte, 1) == 1);
    CHECK(!phx::process_has_ended(pid));
    kill(pid, SIGKILL);
    CHECK(read(link[0], &byte, 1) == 0);
    CHECK(phx::process_has_ended(pid));
    CHECK(waitpid(pid, nullptr, 0) == pid);
    CHECK(phx::process_has_ended(pid));
    CHECK(std::string(phx::process_state(pid)) == "gone");
    close(link[0]);
  }
}

TEST(a_process_that_is_reaped_while_it_is_looked_at_is_gone) {
  for (int i = 0; i < 400; ++i) {
    const pid_t pid = fork();
    CHECK(pid >= 0);
    if (pid == 0) _exit(0);
    std::thread reaper([&] { CHECK(waitpid(pid, nullptr, 0) == pid); });
    std::string state;
    while (state != "gone" && state != "unknown") state = phx::process_state(pid);
    reaper.join();
    CHECK(state == "gone");
  }
}

TEST(a_process_that_closes_its_sockets_has_not_ended) {
  int link[2];
  CHECK(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, link) == 0);
  const pid_t pid = fork();
  if (pid == 0) {
    close(link[0]);
    close(link[1]);
    for (;;) pause();
  }
  close(link[1]);
  char byte = 0;
  CHECK(read(link[0], &byte, 1) == 0);
  CHECK(!phx::process_has_ended(pid));
  kill(pid, SIGKILL);
  CHECK(waitpid(pid, nullptr, 0) == pid);
}

TEST(the_start_time_tells_processes_apart) {
  CHECK(phx::process_start_time(getpid()) > phx::process_start_time(1));
  CHECK(phx::process_start_time(getpid()) >= phx::process_start_time(getppid()));
  CHECK(phx::process_start_time(-1) == 0);
}

}  // namespace

int main(int argc, char **argv) { return check::run_all(argc, argv); }
