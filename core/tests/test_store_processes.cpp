// Stores among real processes: ranks that count, publish and wait, and servers that die.
#include <csignal>

#include "pipe.h"
#include "store_fixtures.h"

namespace {

using namespace fixtures;

constexpr int kRanks = 4;

// What ranks do to find each other: publish, read everybody, count, and leave when all have counted.
void meet(phx_store *store, int rank) {
  set(store, "rank" + std::to_string(rank), "address of " + std::to_string(rank));
  for (int i = 0; i < kRanks; ++i) CHECK(get(store, "rank" + std::to_string(i)) == "address of " + std::to_string(i));
  for (int i = 0; i < 50; ++i) add(store, "counter", 1);
  if (add(store, "done", 1) == kRanks) set(store, "all done", "");
  get(store, "all done");
  CHECK(get(store, "counter") == std::to_string(kRanks * 50));
}

void check_all(const std::vector<pid_t> &children) {
  int passed = 0;
  for (const pid_t pid : children) passed += child_passed(pid) ? 1 : 0;
  CHECK(passed == static_cast<int>(children.size()));
}

TEST(processes_meet_through_a_file) {
  TemporaryDirectory directory;
  std::vector<pid_t> children;
  for (int rank = 0; rank < kRanks; ++rank)
    children.push_back(start_child([&] { meet(file_store(directory.file("store")), rank); }));
  check_all(children);
}

TEST(a_handle_of_a_file_works_on_both_sides_of_a_fork) {
  TemporaryDirectory directory;
  Store store = file_store(directory.file("store"));
  set(store, "before", "fork");
  std::vector<pid_t> children;
  for (int rank = 1; rank < kRanks; ++rank)
    children.push_back(start_child([&] {
      CHECK(get(store, "before") == "fork");
      meet(store, rank);
    }));
  meet(store, 0);
  check_all(children);
}

TEST(a_process_that_is_killed_while_it_writes_does_not_harm_the_file) {
  TemporaryDirectory directory;
  const std::string path = directory.file("store");
  Store store = file_store(path);
  for (int round = 0; round < 20; ++round) {
    Pipe started;
    const pid_t writer = start_child([&] {
      Store own = file_store(path);
      started.send('x');
      for (;;) {
        add(own, "counter", 1);
        set(own, "blob", std::string(50000, 'b'));
      }
    });
    started.receive<char>();
    for (int i = 0; i < 10; ++i) add(store, "mine", 1);
    kill(writer, SIGKILL);
    waitpid(writer, nullptr, 0);
  }
  CHECK(add(store, "mine", 0) == 200);
  Store again = file_store(path);
  CHECK(add(again, "counter", 0) >= 0);
}

TEST(processes_meet_through_a_server) {
  // The children are forked first, so that the server's thread is in one process only.
  Pipe port_pipe;
  std::vector<pid_t> children;
  for (int rank = 1; rank < kRanks; ++rank)
    children.push_back(start_child([&] { meet(connect_to(port_pipe.receive<uint16_t>()), rank); }));
  uint16_t port = 0;
  Store server = serve(&port);
  for (int rank = 1; rank < kRanks; ++rank) port_pipe.send(port);
  meet(server, 0);
  check_all(children);
}

TEST(a_client_that_was_forked_makes_connections_of_its_own) {
  Pipe port_pipe, done;
  const pid_t server = start_child([&] {
    uint16_t port = 0;
    Store store = serve(&port);
    port_pipe.send(port);
    done.receive<char>();
  });
  Store client = connect_to(port_pipe.receive<uint16_t>());
  std::vector<pid_t> children;
  for (int rank = 1; rank < kRanks; ++rank) children.push_back(start_child([&] { meet(client, rank); }));
  meet(client, 0);
  check_all(children);
  set(client, "after", "fork");
  CHECK(get(client, "after") == "fork");
  done.send('x');
  CHECK(child_passed(server));
}

TEST(a_server_that_is_killed_is_reported_as_a_dead_peer) {
  Pipe port_pipe;
  const pid_t server = start_child([&] {
    uint16_t port = 0;
    Store store = serve(&port);
    port_pipe.send(port);
    for (;;) pause();
  });
  const uint16_t port = port_pipe.receive<uint16_t>();
  Store client = connect_to(port);
  set(client, "key", "value");
  kill(server, SIGKILL);
  waitpid(server, nullptr, 0);
  size_t size = 0;
  for (int i = 0; i < 3; ++i)  // now, and whenever it is asked again
    CHECK_FAILS(PHX_ERR_PEER_DEAD, "went away", phx_store_get(client, "key", nullptr, 0, &size, kLongMs));
  CHECK_FAILS(PHX_ERR_PEER_DEAD, std::to_string(port).c_str(), phx_store_set(client, "key", "v", 1));
}

TEST(a_client_connects_to_a_server_that_starts_later) {
  uint16_t port = 0;
  { Store probe = serve(&port); }  // a port that is free now
  Pipe trying;
  const pid_t client = start_child([&] {
    Store store;
    trying.send('x');
    CHECK_OK(phx_store_tcp_connect("127.0.0.1", port, kToken.data(), kToken.size(), kLongMs, store.out()));
    CHECK(get(store, "key") == "value");
    set(store, "seen", "");
  });
  trying.receive<char>();
  Store server = serve(&port);
  set(server, "key", "value");
  get(server, "seen");
  CHECK(child_passed(client));
}

TEST(a_served_store_that_was_forked_says_that_it_cannot_work_there) {
  Pipe forked;
  const pid_t middle = start_child([&] {  // a process of its own: it forks with a server's thread running
    uint16_t port = 0;
    Store server = serve(&port);
    const pid_t child = fork();
    if (child == 0) {
      const phx_status status = phx_store_set(server, "key", "value", 5);
      server.reset();  // must neither hang nor end the parent's server
      _exit(status == PHX_ERR_UNSUPPORTED ? 0 : 1);
    }
    CHECK(child_passed(child));
    Store client = connect_to(port);
    set(client, "key", "value");
    CHECK(get(server, "key") == "value");
  });
  CHECK(child_passed(middle));
}

}  // namespace

int main(int argc, char **argv) { return check::run_all(argc, argv); }
