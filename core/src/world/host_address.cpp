#include "world/host_address.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <memory>

#include "base/environment.h"
#include "base/error.h"

namespace phx {
namespace {

// Named as torch's own backends name theirs; the first that is set counts.
constexpr const char *kInterfaceVariables[] = {kVariables[variable("PHALANX_SOCKET_IFNAME")].name,
                                               "GLOO_SOCKET_IFNAME"};
constexpr const char *kAnywhere = "192.0.2.1";  // for documentation (RFC 5737): nothing is sent there

HostAddress address_of(const sockaddr *socket_address) {
  HostAddress address{};
  if (socket_address->sa_family == AF_INET) {
    address.family = AF_INET;
    const auto *const ipv4 = reinterpret_cast<const sockaddr_in *>(socket_address);
    address.port = ntohs(ipv4->sin_port);
    std::memcpy(address.ip, &ipv4->sin_addr, sizeof ipv4->sin_addr);
  } else if (socket_address->sa_family == AF_INET6) {
    address.family = AF_INET6;
    const auto *const ipv6 = reinterpret_cast<const sockaddr_in6 *>(socket_address);
    address.port = ntohs(ipv6->sin6_port);
    std::memcpy(address.ip, &ipv6->sin6_addr, sizeof ipv6->sin6_addr);
  }
  return address;
}

// An IPv6 address of one link alone is of no use without the name of the link, which differs between hosts.
bool is_of_one_link(const HostAddress &address) {
  return address.family == AF_INET6 && address.ip[0] == 0xfe && (address.ip[1] & 0xc0) == 0x80;
}

HostAddress address_of_interface(const ifaddrs *list, const std::string &name) {
  for (const int family : {AF_INET, AF_INET6}) {
    for (const ifaddrs *entry = list; entry != nullptr; entry = entry->ifa_next) {
      if (name != entry->ifa_name || entry->ifa_addr == nullptr || entry->ifa_addr->sa_family != family) continue;
      const HostAddress address = address_of(entry->ifa_addr);
      if (!is_of_one_link(address)) return address;
    }
  }
  return {};
}

phx_status choose_interface(const char *operation, const char *variable, const std::string &names, HostAddress *out) {
  ifaddrs *list = nullptr;
  if (getifaddrs(&list) != 0) return fail_errno(errno, operation, "could not list the interfaces");
  const std::unique_ptr<ifaddrs, void (*)(ifaddrs *)> owner(list, &freeifaddrs);
  for (size_t begin = 0; begin <= names.size();) {
    const size_t end = std::min(names.find(',', begin), names.size());
    std::string name = names.substr(begin, end - begin);
    begin = end + 1;
    while (!name.empty() && name.front() == ' ') name.erase(0, 1);
    while (!name.empty() && name.back() == ' ') name.pop_back();
    *out = address_of_interface(list, name);
    if (out->family != 0) return PHX_OK;
  }
  std::string existing;
  if (struct if_nameindex *const all = if_nameindex()) {
    for (const struct if_nameindex *entry = all; entry->if_index != 0; ++entry)
      existing += (existing.empty() ? "" : ", ") + std::string(entry->if_name);
    if_freenameindex(all);
  }
  return fail(PHX_ERR_INVALID, operation, "%s is '%s', but there is no such interface with an address; there are: %s",
              variable, names.c_str(), existing.c_str());
}

// This host's own address on the way to another one. Family 0 if there is no way, or it is not known.
HostAddress address_on_the_way_to(const std::string &host) {
  addrinfo wanted{};
  wanted.ai_socktype = SOCK_DGRAM;
  addrinfo *found = nullptr;
  if (host.empty() || getaddrinfo(host.c_str(), "9", &wanted, &found) != 0) return {};
  HostAddress own{};
  for (const int family : {AF_INET, AF_INET6}) {
    for (const addrinfo *entry = found; entry != nullptr && own.family == 0; entry = entry->ai_next) {
      if (entry->ai_family != family) continue;
      const Fd probe(socket(family, SOCK_DGRAM | SOCK_CLOEXEC, 0));
      // To connect a datagram socket sends no packet.
      if (!probe.valid() || connect(probe.get(), entry->ai_addr, entry->ai_addrlen) != 0) continue;
      own = socket_address(probe.get(), getsockname);
      own.port = 0;
      if (is_of_one_link(own)) own = {};
    }
  }
  freeaddrinfo(found);
  return own;
}

}  // namespace

phx_status choose_address(const char *operation, const std::string &hint, HostAddress *out) {
  for (const char *const variable : kInterfaceVariables) {
    const char *const names = std::getenv(variable);
    if (names != nullptr && *names != '\0') return choose_interface(operation, variable, names, out);
  }
  char hostname[64];
  read_hostname(&hostname);
  HostAddress loopback{};
  for (const std::string &host : {hint, std::string(hostname), std::string(kAnywhere)}) {
    *out = address_on_the_way_to(host);
    if (out->family != 0 && !is_loopback(*out)) return PHX_OK;
    if (loopback.family == 0) loopback = *out;
  }
  if (loopback.family == 0) loopback = {AF_INET, 0, {127, 0, 0, 1}};
  *out = loopback;
  return PHX_OK;
}

phx_status listen_at(const char *operation, HostAddress *address, Fd *out) {
  store::Endpoint endpoint = endpoint_of(*address);
  PHX_TRY(store::listen_on(operation, &endpoint, out));
  address->port = endpoint.port();
  return PHX_OK;
}

store::Endpoint endpoint_of(const HostAddress &address) {
  char literal[INET6_ADDRSTRLEN] = "";
  inet_ntop(address.family, address.ip, literal, sizeof literal);
  store::Endpoint endpoint;
  (void)store::parse_endpoint("group_create", literal, address.port, &endpoint);
  return endpoint;
}

std::string text_of(const HostAddress &address) { return endpoint_of(address).text(); }

HostAddress socket_address(int socket, int (*end)(int, sockaddr *, socklen_t *)) {
  sockaddr_storage name{};
  socklen_t length = sizeof name;
  if (end(socket, reinterpret_cast<sockaddr *>(&name), &length) != 0) return {};
  return address_of(reinterpret_cast<sockaddr *>(&name));
}

bool is_loopback(const HostAddress &address) {
  if (address.family == AF_INET) return address.ip[0] == 127;
  in6_addr ipv6;
  std::memcpy(&ipv6, address.ip, sizeof ipv6);
  return IN6_IS_ADDR_LOOPBACK(&ipv6);
}

std::string address_of_peer(int socket) {
  const HostAddress address = socket_address(socket, getpeername);
  return address.family != 0 ? text_of(address) : "an unknown address";
}

void tune_host_connection(int socket) {
  store::tune_connection(socket);
  const int idle_s = 5, interval_s = 2, probes = 3, timeout_ms = kHostTimeoutMs;
  setsockopt(socket, IPPROTO_TCP, TCP_KEEPIDLE, &idle_s, sizeof idle_s);
  setsockopt(socket, IPPROTO_TCP, TCP_KEEPINTVL, &interval_s, sizeof interval_s);
  setsockopt(socket, IPPROTO_TCP, TCP_KEEPCNT, &probes, sizeof probes);
  // For data that is not acknowledged, to which keep-alive does not apply.
  setsockopt(socket, IPPROTO_TCP, TCP_USER_TIMEOUT, &timeout_ms, sizeof timeout_ms);
}

}  // namespace phx
