// The TCP store between a server and clients that mean well: tokens, addresses, waiting threads, and servers that end.
#include <thread>

#include "store_fixtures.h"

namespace {

using namespace fixtures;

TEST(a_wrong_token_is_refused_and_harms_nobody) {
  uint16_t port = 0;
  Store server = serve(&port);
  Store good = connect_to(port);
  phx_store *out = nullptr;
  const std::string long_token(1000, 't');
  for (const std::string &wrong : {std::string("wrong"), kToken + "x", kToken.substr(1), kToken + '\0', long_token})
    CHECK_FAILS(PHX_ERR_PERMISSION, "refused this token",
                phx_store_tcp_connect("127.0.0.1", port, wrong.data(), wrong.size(), kLongMs, &out));
  CHECK(out == nullptr);
  set(good, "key", "value");
  CHECK(get(server, "key") == "value");
}

TEST(wrong_arguments_are_refused_before_anything_is_bound_or_sent) {
  uint16_t port = 0;
  phx_store *out = nullptr;
  CHECK_FAILS(PHX_ERR_INVALID, "token is empty", phx_store_tcp_serve("127.0.0.1", "", 0, &port, &out));
  CHECK_FAILS(PHX_ERR_INVALID, "token is empty", phx_store_tcp_serve("127.0.0.1", nullptr, 3, &port, &out));
  CHECK_FAILS(PHX_ERR_INVALID, "out-parameter", phx_store_tcp_serve("127.0.0.1", "t", 1, nullptr, &out));
  CHECK_FAILS(PHX_ERR_INVALID, "out-parameter", phx_store_tcp_serve("127.0.0.1", "t", 1, &port, nullptr));
  CHECK_FAILS(PHX_ERR_INVALID, "address is NULL", phx_store_tcp_serve(nullptr, "t", 1, &port, &out));
  for (const char *name : {"localhost", "", "127.0.0.1.5", "127.1", "::1%nosuchinterface", "[::1]"})
    CHECK_FAILS(PHX_ERR_INVALID, "neither an IPv4 nor an IPv6", phx_store_tcp_serve(name, "t", 1, &port, &out));
  CHECK_FAILS(PHX_ERR_INVALID, "token is empty", phx_store_tcp_connect("127.0.0.1", 1, "", 0, 1, &out));
  CHECK_FAILS(PHX_ERR_INVALID, "the port is 0", phx_store_tcp_connect("127.0.0.1", 0, "t", 1, 1, &out));
  CHECK_FAILS(PHX_ERR_INVALID, "timeout_ms is -1", phx_store_tcp_connect("127.0.0.1", 1, "t", 1, -1, &out));
  CHECK_FAILS(PHX_ERR_INVALID, "neither an IPv4", phx_store_tcp_connect("example.org", 1, "t", 1, 1, &out));
  CHECK_FAILS(PHX_ERR_INVALID, "out-parameter", phx_store_tcp_connect("127.0.0.1", 1, "t", 1, 1, nullptr));
  CHECK(out == nullptr && port == 0);
}

TEST(a_port_that_is_taken_is_an_error_and_a_given_one_is_used) {
  uint16_t port = 0;
  Store first = serve(&port);
  CHECK(port != 0);
  phx_store *out = nullptr;
  uint16_t same = port;
  CHECK_FAILS(PHX_ERR_SYSTEM, std::to_string(port).c_str(), phx_store_tcp_serve("127.0.0.1", "t", 1, &same, &out));
  first.reset();
  Store second = serve(&same);
  CHECK(same == port);
}

TEST(an_ipv6_server_is_reached_by_its_address) {
  uint16_t port = 0;
  phx_store *served = nullptr;
  const phx_status status = phx_store_tcp_serve("::1", kToken.data(), kToken.size(), &port, &served);
  if (status == PHX_ERR_SYSTEM) {
    std::fprintf(stderr, "    skipped: no IPv6 on this host (%s)\n", phx_last_error());
    return;
  }
  CHECK_OK(status);
  Store server(served);
  Store client = connect_to(port, "::1");
  set(client, "key", "value");
  CHECK(get(server, "key") == "value");
}

TEST(connecting_to_nobody_times_out_with_the_address) {
  uint16_t port = 0;
  { Store probe = serve(&port); }
  phx_store *out = nullptr;
  CHECK_FAILS(PHX_ERR_TIMEOUT, "127.0.0.1", phx_store_tcp_connect("127.0.0.1", port, "t", 1, kShortMs, &out));
  CHECK(std::strstr(phx_last_error(), "refused") != nullptr);
}

TEST(threads_that_wait_on_one_handle_do_not_hold_up_each_other) {
  uint16_t port = 0;
  Store server = serve(&port);
  Store client = connect_to(port);
  std::vector<std::thread> waiters;
  std::vector<std::string> values(12);
  for (size_t i = 0; i < values.size(); ++i)
    waiters.emplace_back([&, i] {
      add(client, "waiting", 1);
      values[i] = get(client, "key" + std::to_string(i));
      add(client, "served", 1);
    });
  // All of them are served in the reverse order, by the handle on which they wait.
  for (size_t i = values.size(); i-- > 0;) set(client, "key" + std::to_string(i), std::to_string(i));
  for (std::thread &waiter : waiters) waiter.join();
  for (size_t i = 0; i < values.size(); ++i) CHECK(values[i] == std::to_string(i));
  CHECK(get(server, "served") == std::to_string(values.size()));
}

TEST(a_key_that_the_server_sets_reaches_waiting_clients) {
  uint16_t port = 0;
  Store server = serve(&port);
  std::vector<std::thread> waiters;
  std::vector<std::string> values(6);
  for (std::string &value : values)
    waiters.emplace_back([&] {
      Store client = connect_to(port);
      set(client, "here", "");
      value = get(client, "key");
    });
  get(server, "here");
  CHECK_OK(phx_store_set(server, "key", "value", 5));
  for (std::thread &waiter : waiters) waiter.join();
  for (const std::string &value : values) CHECK(value == "value");
}

TEST(waiting_clients_learn_that_the_server_has_ended) {
  uint16_t port = 0;
  Store server = serve(&port);
  Store client = connect_to(port);
  phx_status status = PHX_OK;
  std::string text;
  std::thread waiter([&] {
    size_t size = 0;
    add(client, "waiting", 1);
    status = phx_store_get(client, "never", nullptr, 0, &size, kLongMs);
    text = phx_last_error();
  });
  get(server, "waiting");
  server.reset();
  waiter.join();
  CHECK(status == PHX_ERR_PEER_DEAD && text.find("went away") != std::string::npos);
}

TEST(a_server_that_took_the_place_of_another_is_not_taken_for_it) {
  uint16_t port = 0;
  Store server = serve(&port);
  Store client = connect_to(port);
  set(client, "key", "value");
  server.reset();
  server = serve(&port);
  size_t size = 0;
  for (int i = 0; i < 3; ++i)
    CHECK_FAILS(PHX_ERR_PEER_DEAD, "went away", phx_store_get(client, "key", nullptr, 0, &size, kShortMs));
  CHECK(std::strstr(phx_last_error(), "another one") != nullptr);
  Store anew = connect_to(port);
  set(anew, "key", "new");
  CHECK(get(server, "key") == "new");
}

TEST(many_timeouts_leave_the_connection_usable) {
  uint16_t port = 0;
  Store server = serve(&port);
  Store client = connect_to(port);
  size_t size = 0;
  for (int i = 0; i < 50; ++i)
    CHECK_FAILS(PHX_ERR_TIMEOUT, "never", phx_store_get(client, "never", nullptr, 0, &size, 1));
  set(client, "key", "value");
  CHECK(get(client, "key") == "value");
}

}  // namespace

int main(int argc, char **argv) { return check::run_all(argc, argv); }
