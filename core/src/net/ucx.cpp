#include "net/ucx.h"

#include <cstdlib>
#include <cstring>
#include <deque>
#include <memory>
#include <sstream>
#include <unordered_set>
#include <utility>
#include <vector>

#include "base/deadline.h"
#include "base/error.h"
#include "base/thread.h"
#include "net/tcp_sockets.h"
#include "net/ucx_api.h"

namespace phx {
namespace net {
namespace {

constexpr const char *kName = "ucx";
constexpr int64_t kPatienceNs = 1000000000;  // how long a connection may take to end

constexpr int64_t kLookNs = 1000000000;  // between two looks for hosts that are gone

// What the core sets; a variable UCX_<name> in the environment wins.
struct Setting {
  std::string name, value;
};
std::vector<Setting> settings(unsigned minor) {
  return {
      // Ranks of one host have the core's own shared memory, and the carrier is given host memory alone. Before 1.18,
      // UCX prints a warning about a transport that is excluded and not there.
      {"TLS", minor < 18 ? "^sm" : "^sm,cuda"},
      // A host that is gone is noticed in about 10 s: see tcp_sockets.h for TCP; elsewhere UCX's messages tell. UCX
      // cuts the times to whole seconds, with an error that may cost one more, so there are 500 ms to cut.
      {"TCP_KEEPIDLE", std::to_string(kKeepIdleSeconds) + "500ms"},
      {"TCP_KEEPINTVL", std::to_string(kKeepIntervalSeconds) + "500ms"},
      {"TCP_KEEPCNT", std::to_string(kKeepCount)},
      {"KEEPALIVE_INTERVAL", "3s"},
      // Messages up to the size of a segment go in one piece. Measured between two network namespaces, 64 KiB there and
      // back take 46 us of a core with segments of 256 KiB instead of 239 with UCX 1.13 and 45 instead of 57 with 1.22;
      // below 8 KiB there is no difference. With 512 KiB an all_gather of 4 MiB and more takes a tenth less than with
      // 256 KiB. Both ends must have the same.
      {"TCP_TX_SEG_SIZE", "512K"},
      {"TCP_RX_SEG_SIZE", "512K"},
      // See `unsent`: a worker's flush does not ask the peers whether everything has come.
      {"FLUSH_WORKER_EPS", "n"},
  };
}
// The name by which ucp_config_modify knows a setting: before 1.17, those of transports lack the transport's name.
const char *name_in(const std::string &name, unsigned minor) {
  return name.c_str() + (minor < 17 && name.rfind("TCP_", 0) == 0 ? 4 : 0);
}

// A connection. It outlives its end for as long as transfers name it.
struct Peer {
  ucx::Endpoint to = nullptr;  // NULL: closed
  std::vector<char> address;
  ucx::Status lost = ucx::kOk;
  bool broken = false;    // UCX says so: nothing comes from there any more
  bool connected = true;  // not yet disconnected by the core
  bool stuck = false;     // UCX did not end its requests in time
  size_t transfers = 0;
};

struct Transfer {
  Peer *peer;  // NULL: not in use
  void *request;
  bool receives;
  size_t capacity;
};

struct Endpoint {
  explicit Endpoint(const ucx::Api &functions) : api(functions) {}
  ~Endpoint() {
    if (worker != nullptr) api.worker_destroy(worker);
    if (context != nullptr) api.cleanup(context);
  }
  Endpoint(const Endpoint &) = delete;
  Endpoint &operator=(const Endpoint &) = delete;

  const ucx::Api &api;
  ucx::Context context = nullptr;
  ucx::Worker worker = nullptr;
  std::string own;  // the worker's address
  int fd = -1;
  TcpSockets sockets;
  int64_t look_at_ns = 0;  // when `arm` looks next for hosts that are gone
  bool over_tcp = false;   // a connection is
  void *flush = nullptr;   // of the worker, under way
  std::unordered_set<Peer *> peers;
  std::deque<Transfer> transfers;
  std::vector<Transfer *> unused;  // of these
  std::vector<void *> orphans;     // requests that UCX has not ended; nothing can touch their data any more

  Transfer *begin(Peer *peer, void *request, bool receives, size_t capacity) {
    if (unused.empty()) unused.push_back(&transfers.emplace_back());
    Transfer *const transfer = unused.back();
    unused.pop_back();
    *transfer = {peer, request, receives, capacity};
    ++peer->transfers;
    return transfer;
  }
  void end(Transfer *transfer) {
    Peer *const peer = std::exchange(transfer->peer, nullptr);
    --peer->transfers;
    forget(peer);
    unused.push_back(transfer);
  }
  void forget(Peer *peer) {
    if (peer->connected || peer->transfers != 0 || peer->stuck) return;
    peers.erase(peer);
    delete peer;
  }
  // Makes progress until `done`, within the patience. Returns whether it is.
  template <class Done>
  bool progress_until(Done done, int64_t patience_ns = kPatienceNs) {
    const int64_t end_ns = now_ns() + patience_ns;
    while (!done()) {
      if (api.progress(worker) == 0 && now_ns() >= end_ns) return done();
    }
    return true;
  }
  bool under_way(void *request) const { return api.request_status(request) == ucx::kInProgress; }
  // Waits for the end of a request, which is then freed. Returns whether it has ended.
  bool settle(void *request, int64_t patience_ns = kPatienceNs) {
    if (!progress_until([&] { return !under_way(request); }, patience_ns)) return false;
    api.request_free(request);
    return true;
  }
};

phx_status failed(const ucx::Api &api, const char *what, ucx::Status status) {
  return fail_text(status == ucx::kNoMemory ? PHX_ERR_NO_MEMORY : PHX_ERR_SYSTEM, kName, "UCX: %s failed: %s", what,
                   api.status_text(status));
}
phx_status lost(const ucx::Api &api, const Peer &peer) {
  return fail_text(PHX_ERR_PEER_DEAD, kName, "the connection is lost (UCX: %s)", api.status_text(peer.lost));
}

phx_status make_context(const ucx::Library &library, ucx::Context *out) {
  const ucx::Api &api = library.api;
  ucx::Config config = nullptr;
  ucx::Status status = api.config_read(nullptr, nullptr, &config);
  if (status != ucx::kOk) return failed(api, "reading its configuration", status);
  for (const Setting &setting : settings(library.minor)) {
    const std::string variable = "UCX_" + setting.name;
    if (std::getenv(variable.c_str()) != nullptr) continue;
    status = api.config_modify(config, name_in(setting.name, library.minor), setting.value.c_str());
    if (status != ucx::kOk)
      PHX_LOG(PHX_LOG_WARNING, "UCX refuses %s=%s: %s", variable.c_str(), setting.value.c_str(),
              api.status_text(status));
  }
  ucx::Parameters parameters{};
  parameters.mask = ucx::Parameters::kFeatures | ucx::Parameters::kName;
  parameters.features = ucx::Parameters::kTag | ucx::Parameters::kWakeup;
  parameters.name = "phalanx";
  status = api.init(ucx::kMajor, ucx::kMinor, &parameters, config, out);
  api.config_release(config);
  return status == ucx::kOk ? PHX_OK : failed(api, "making a context", status);
}

phx_status open(void *, void **out) {
  std::string problem;
  const ucx::Library *const library = ucx::find_library(&problem);
  if (library == nullptr) return fail_text(PHX_ERR_UNSUPPORTED, kName, "%s", problem.c_str());
  const ucx::Api &api = library->api;
  const SignalsBlocked blocked;  // for threads that UCX starts meanwhile
  auto self = std::make_unique<Endpoint>(api);
  PHX_TRY(make_context(*library, &self->context));
  ucx::WorkerParameters worker{};
  worker.mask = ucx::WorkerParameters::kThreadMode | ucx::WorkerParameters::kFlags;
  worker.thread_mode = ucx::WorkerParameters::kSerialized;
  worker.flags = ucx::WorkerParameters::kIgnoreRequestLeak;
  self->sockets.before_worker();
  ucx::Status status = api.worker_create(self->context, &worker, &self->worker);
  if (status != ucx::kOk) return failed(api, "making a worker", status);
  status = api.worker_fd(self->worker, &self->fd);
  if (status != ucx::kOk) return failed(api, "getting a worker's descriptor", status);
  ucx::Address own = nullptr;
  size_t size = 0;
  status = api.worker_address(self->worker, &own, &size);
  if (status != ucx::kOk) return failed(api, "getting a worker's address", status);
  self->own.assign(reinterpret_cast<const char *>(own), size);
  api.release_address(self->worker, own);
  self->sockets.after_worker(self->own.data(), size);
  *out = self.release();
  return PHX_OK;
}

phx_status address(void *endpoint, void *out, size_t *bytes) {
  const Endpoint &self = *static_cast<Endpoint *>(endpoint);
  const size_t size = self.own.size(), room = std::exchange(*bytes, size);
  if (size > room)
    return fail_text(PHX_ERR_INVALID, kName, "the address takes %zu bytes; there is room for %zu", size, room);
  std::memcpy(out, self.own.data(), size);
  return PHX_OK;
}

void lose(Peer *peer, ucx::Status status) {
  if (peer->lost == ucx::kOk) peer->lost = status;
}
void on_error(void *argument, ucx::Endpoint, ucx::Status status) {
  Peer *const peer = static_cast<Peer *>(argument);
  lose(peer, status);
  peer->broken = true;
}

template <class Print>
std::string printed(Print print) {
  char *text = nullptr;
  size_t size = 0;
  FILE *const stream = open_memstream(&text, &size);
  if (stream == nullptr) return {};
  print(stream);
  (void)std::fclose(stream);
  const std::unique_ptr<char, void (*)(void *)> owner(text, &std::free);
  return text;
}

phx_status connect(void *endpoint, const void *where, size_t bytes, void **out) {
  Endpoint &self = *static_cast<Endpoint *>(endpoint);
  const SignalsBlocked blocked;
  auto peer = std::make_unique<Peer>();
  peer->address.assign(static_cast<const char *>(where), static_cast<const char *>(where) + bytes);
  ucx::EndpointParameters parameters{};
  parameters.mask = ucx::EndpointParameters::kRemoteAddress | ucx::EndpointParameters::kErrorMode |
                    ucx::EndpointParameters::kErrorHandler;
  parameters.remote_address = peer->address.data();
  parameters.error_mode = ucx::EndpointParameters::kPeerErrors;
  parameters.error_handler = {&on_error, peer.get()};
  const ucx::Status status = self.api.endpoint_create(self.worker, &parameters, &peer->to);
  if (status != ucx::kOk) return failed(self.api, "connecting", status);
  if (!self.over_tcp) {
    const std::string about = printed([&](FILE *stream) { self.api.endpoint_print(peer->to, stream); });
    self.over_tcp = about.find("tcp/") != std::string::npos;
  }
  self.peers.insert(peer.get());
  *out = peer.release();
  return PHX_OK;
}

phx_status send(void *endpoint, void *to, uint64_t tag, const void *data, size_t bytes, void **transfer) {
  Endpoint &self = *static_cast<Endpoint *>(endpoint);
  Peer *const peer = static_cast<Peer *>(to);
  *transfer = nullptr;
  if (peer->lost != ucx::kOk) return lost(self.api, *peer);
  ucx::RequestParameters parameters{};
  parameters.mask = ucx::RequestParameters::kMemoryType;  // else UCX looks each address up
  parameters.memory_type = ucx::RequestParameters::kHost;
  void *const request = self.api.send(peer->to, data, bytes, tag, &parameters);
  if (request == nullptr) return PHX_OK;
  if (ucx::is_error(request)) {
    lose(peer, ucx::error_of(request));
    return lost(self.api, *peer);
  }
  *transfer = self.begin(peer, request, false, bytes);
  return PHX_OK;
}

// Also of a lost peer, whose message may have come before.
phx_status recv(void *endpoint, void *from, uint64_t tag, void *data, size_t capacity, void **transfer) {
  Endpoint &self = *static_cast<Endpoint *>(endpoint);
  *transfer = nullptr;
  ucx::RequestParameters parameters{};
  // Without a request there would be no place to read the size of the message from.
  parameters.mask = ucx::RequestParameters::kMemoryType | ucx::RequestParameters::kNotAtOnce;
  parameters.memory_type = ucx::RequestParameters::kHost;
  void *const request = self.api.receive(self.worker, data, capacity, tag, UINT64_MAX, &parameters);
  if (ucx::is_error(request)) return failed(self.api, "posting a receive", ucx::error_of(request));
  *transfer = self.begin(static_cast<Peer *>(from), request, true, capacity);
  return PHX_OK;
}

// Closes a connection at once; UCX ends its requests with an error.
void close_connection(Endpoint &self, Peer *peer) {
  if (peer->to == nullptr) return;
  lose(peer, ucx::kCanceled);
  ucx::RequestParameters parameters{};
  parameters.mask = ucx::RequestParameters::kFlags;
  parameters.flags = ucx::RequestParameters::kForce;
  void *const request = self.api.endpoint_close(std::exchange(peer->to, nullptr), &parameters);
  if (request == nullptr || ucx::is_error(request) || self.settle(request)) return;
  PHX_LOG(PHX_LOG_WARNING, "UCX has not closed a connection within a second; its memory is kept");
  peer->stuck = true;
  self.orphans.push_back(request);
}

// Makes sure that nothing more comes from a peer which has stopped in the middle of a message.
void cut(Endpoint &self, Peer *peer) {
  if (self.sockets.shut_to(peer->address.data(), peer->address.size()) == 0)
    PHX_LOG(PHX_LOG_ERROR, "a receive is given up in the middle of its message, and its connection cannot be found");
  // UCX reads to the end what the kernel had already received.
  int idle = 0;
  self.progress_until([&] {
    idle = self.api.progress(self.worker) == 0 ? idle + 1 : 0;
    return peer->broken || idle == 100;
  });
}

// Ends a transfer whatever its state: afterwards, nothing touches its data. Returns how it ended.
ucx::Status abandon(Endpoint &self, Transfer *transfer) {
  const auto ended = [&] { return !self.under_way(transfer->request); };
  Peer *const peer = transfer->peer;
  self.api.request_cancel(self.worker, transfer->request);
  if (!ended()) {
    // A receive whose message is arriving, or a send: it can only be completed, or else cut off.
    if (!peer->broken && !peer->stuck && !self.progress_until(ended) && transfer->receives) cut(self, peer);
    if (!ended()) close_connection(self, peer);
    if (!peer->stuck) peer->stuck = !self.progress_until(ended, kPatienceNs / 20);
  }
  const ucx::Status status = self.api.request_status(transfer->request);
  if (status != ucx::kInProgress) {
    self.api.request_free(transfer->request);
  } else {
    PHX_LOG(PHX_LOG_WARNING, "UCX has not ended a %s of a closed connection; its request is kept",
            transfer->receives ? "receive" : "send");
    self.orphans.push_back(transfer->request);
  }
  return status;
}

void cancel(void *endpoint, void *which) {
  Endpoint &self = *static_cast<Endpoint *>(endpoint);
  Transfer *const transfer = static_cast<Transfer *>(which);
  (void)abandon(self, transfer);
  self.end(transfer);
}

phx_status test(void *endpoint, void *which, int32_t *done, size_t *bytes) {
  Endpoint &self = *static_cast<Endpoint *>(endpoint);
  Transfer *const transfer = static_cast<Transfer *>(which);
  Peer *const peer = transfer->peer;
  *done = 0;
  ucx::ReceiveInfo info{};
  ucx::Status status =
      transfer->receives ? self.api.received(transfer->request, &info) : self.api.request_status(transfer->request);
  if (status != ucx::kInProgress) {
    self.api.request_free(transfer->request);
  } else {
    if (peer->lost == ucx::kOk) return PHX_OK;
    status = abandon(self, transfer);
    if (status == ucx::kOk) status = ucx::kCanceled;  // the size of what came is not known any more
  }
  phx_status result = PHX_OK;
  if (status == ucx::kOk) {
    *done = 1;
    if (bytes != nullptr) *bytes = transfer->receives ? info.bytes : transfer->capacity;
  } else if (status == ucx::kTruncated) {
    if (bytes != nullptr) *bytes = info.bytes;
    result = fail_text(PHX_ERR_MISMATCH, kName, "a message of %zu bytes came for a receive of %zu bytes", info.bytes,
                       transfer->capacity);
  } else {
    lose(peer, status);
    result = lost(self.api, *peer);
  }
  self.end(transfer);
  return result;
}

int32_t progress(void *endpoint) {
  Endpoint &self = *static_cast<Endpoint *>(endpoint);
  return self.api.progress(self.worker) != 0;
}

// UCX ends a send when it has the data, but over TCP it keeps what the socket does not take at once.
int32_t unsent(void *endpoint) {
  constexpr ucx::RequestParameters kNone{};
  Endpoint &self = *static_cast<Endpoint *>(endpoint);
  if (!self.over_tcp) return 0;
  if (self.flush != nullptr) {
    if (self.under_way(self.flush)) return 1;
    self.api.request_free(std::exchange(self.flush, nullptr));
  }
  void *const request = self.api.flush(self.worker, &kNone);
  if (!ucx::is_error(request)) self.flush = request;
  return self.flush != nullptr;
}

int32_t arm(void *endpoint, int32_t *fd) {
  Endpoint &self = *static_cast<Endpoint *>(endpoint);
  *fd = self.fd;
  if (const int64_t now = now_ns(); now >= self.look_at_ns && !self.peers.empty()) {
    self.sockets.shut_dead();
    self.look_at_ns = now + kLookNs;
  }
  return self.api.worker_arm(self.worker) == ucx::kOk;
}

// Lets what was sent go. A flush does not wait for sends that the receiver has yet to ask for, so those come first.
void flush_connection(Endpoint &self, Peer *peer) {
  const int64_t end_ns = now_ns() + kPatienceNs;
  const auto sent = [&] {
    for (const Transfer &transfer : self.transfers)
      if (transfer.peer == peer && !transfer.receives && self.under_way(transfer.request)) return false;
    return true;
  };
  if (!self.progress_until([&] { return peer->lost != ucx::kOk || sent(); }) || peer->lost != ucx::kOk) return;
  ucx::RequestParameters parameters{};
  void *const request = self.api.endpoint_flush(peer->to, &parameters);
  if (request == nullptr || ucx::is_error(request) || self.settle(request, end_ns - now_ns())) return;
  close_connection(self, peer);  // which ends the flush
  if (!self.settle(request, 0)) self.orphans.push_back(request);
}

void disconnect(void *endpoint, void *which, int32_t flush) {
  Endpoint &self = *static_cast<Endpoint *>(endpoint);
  Peer *const peer = static_cast<Peer *>(which);
  if (flush != 0 && peer->to != nullptr && peer->lost == ucx::kOk) flush_connection(self, peer);
  close_connection(self, peer);
  peer->connected = false;
  self.forget(peer);
}

// Receives what came without a receive into nothing. Else UCX prints a warning about each message.
void drop_unexpected(Endpoint &self) {
  ucx::RequestParameters parameters{};
  parameters.mask = ucx::RequestParameters::kNotAtOnce;
  while (true) {
    ucx::ReceiveInfo info{};
    void *const message = self.api.probe(self.worker, 0, 0, 1, &info);
    if (message == nullptr) return;
    void *const request = self.api.receive_probed(self.worker, nullptr, 0, message, &parameters);
    if (request == nullptr || ucx::is_error(request)) continue;
    if (self.settle(request, kPatienceNs / 20)) continue;
    self.orphans.push_back(request);
    return;  // a part of the message is missing
  }
}

void close(void *endpoint) {
  const std::unique_ptr<Endpoint> self(static_cast<Endpoint *>(endpoint));
  const std::vector<Peer *> all(self->peers.begin(), self->peers.end());  // a disconnect takes its peer from the set
  for (Peer *peer : all)
    if (peer->connected) disconnect(self.get(), peer, 0);
  drop_unexpected(*self);
  if (self->flush != nullptr && !self->settle(self->flush, kPatienceNs / 20)) self->orphans.push_back(self->flush);
  for (void *request : self->orphans)
    if (!self->under_way(request)) self->api.request_free(request);
  self->orphans.clear();
  const std::unordered_set<Peer *> stuck = std::move(self->peers);
  if (self->worker != nullptr) self->api.worker_destroy(std::exchange(self->worker, nullptr));
  for (Peer *peer : stuck) delete peer;
}

constexpr phx_carrier_ops kUcx = {sizeof(phx_carrier_ops),
                                  0,
                                  kName,
                                  &open,
                                  &address,
                                  &connect,
                                  &send,
                                  &recv,
                                  &test,
                                  &cancel,
                                  &progress,
                                  &unsent,
                                  &arm,
                                  &disconnect,
                                  &close,
                                  nullptr};

// The transports and devices of a context, out of its description: "# resource 1 : md 1 dev 1 flags -- tcp/eth0".
std::string transports_of(const ucx::Api &api, ucx::Context context) {
  std::istringstream lines(printed([&](FILE *stream) { api.context_print(context, stream); }));
  std::string line, all;
  while (std::getline(lines, line)) {
    if (line.find("resource") == std::string::npos) continue;
    const std::string name = line.substr(line.rfind(' ') + 1);
    if (name.find('/') == std::string::npos || name.rfind("self/", 0) == 0) continue;
    all += (all.empty() ? "" : " ") + name;
  }
  return all;
}

}  // namespace
}  // namespace net

const phx_carrier_ops *ucx_carrier() {
  std::string problem;
  if (ucx::find_library(&problem) != nullptr) return &net::kUcx;
  (void)fail_text(PHX_ERR_UNSUPPORTED, "group_create", "%s", problem.c_str());
  return nullptr;
}

UcxFacts ucx_facts() {
  UcxFacts facts;
  const ucx::Library *const library = ucx::find_library(&facts.problem);
  if (library == nullptr) return facts;
  facts.path = library->path;
  facts.version =
      std::to_string(library->major) + "." + std::to_string(library->minor) + "." + std::to_string(library->release);
  const SignalsBlocked blocked;
  const KeptError kept;
  ucx::Context context = nullptr;
  if (net::make_context(*library, &context) != PHX_OK) {
    facts.problem = last_error().text;
    return facts;
  }
  facts.transports = net::transports_of(library->api, context);
  library->api.cleanup(context);
  return facts;
}

}  // namespace phx
