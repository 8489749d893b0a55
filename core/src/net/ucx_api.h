// The part of UCX that the core calls (ucp/api/ucp.h), and how it is found. The library is loaded when it is first
// needed, so that one build, made without UCX, serves hosts with and without it. The structs are those of UCX 1.13.
// Later versions append fields, and a mask says which fields are set; `later` is room for what they append, and for
// fields of 1.13 that are not used. tests/check_ucx.cpp compares the declarations with the real header.
#pragma once

#include <sched.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <string>

namespace phx::ucx {

using Status = int8_t;  // 0: success; 1: in progress; negative: an error
constexpr Status kOk = 0, kInProgress = 1, kNoMemory = -4, kTruncated = -9, kCanceled = -16, kFirstError = -100;

using Context = struct UcpContext *;
using Config = struct UcpConfig *;
using Worker = struct UcpWorker *;
using Endpoint = struct UcpEndpoint *;
using Address = struct UcpAddress *;

struct Parameters {
  static constexpr uint64_t kFeatures = 1 << 0, kName = 1 << 8;  // of `mask`
  static constexpr uint64_t kTag = 1 << 0, kWakeup = 1 << 4;     // of `features`
  uint64_t mask;
  uint64_t features;
  size_t request_size;
  void (*request_init)(void *request);
  void (*request_cleanup)(void *request);
  uint64_t tag_sender_mask;
  int shared_by_threads;
  size_t estimated_endpoints;
  size_t estimated_per_node;
  const char *name;
  char later[64];
};

struct WorkerParameters {
  static constexpr uint64_t kThreadMode = 1 << 0, kFlags = 1 << 5;  // of `mask`
  static constexpr int kSerialized = 1;                             // of `thread_mode`
  static constexpr uint64_t kIgnoreRequestLeak = 1 << 0;            // of `flags`
  uint64_t mask;
  int thread_mode;
  cpu_set_t cpus;
  unsigned events;
  void *user_data;
  int event_fd;
  uint64_t flags;
  char later[88];
};

struct EndpointParameters {
  static constexpr uint64_t kRemoteAddress = 1 << 0, kErrorMode = 1 << 1, kErrorHandler = 1 << 2;  // of `mask`
  static constexpr int kPeerErrors = 1;                                                            // of `error_mode`
  uint64_t mask;
  const void *remote_address;
  int error_mode;
  struct {
    void (*call)(void *argument, Endpoint endpoint, Status status);
    void *argument;
  } error_handler;
  char later[192];
};

struct ReceiveInfo {
  uint64_t tag;
  size_t bytes;
};

struct RequestParameters {
  static constexpr uint32_t kFlags = 1 << 4, kMemoryType = 1 << 6;  // of `mask`: fields that are set
  static constexpr uint32_t kNotAtOnce = 1 << 16;  // of `mask`: there is a request even if it completes at once
  static constexpr uint32_t kForce = 1 << 0;       // of `flags`, to close an endpoint
  static constexpr int kHost = 0;                  // of `memory_type`
  uint32_t mask;
  uint32_t flags;
  void *request;
  void *callback;
  uint64_t datatype;
  void *user_data;
  void *reply;
  int memory_type;
  char later[80];
};

// What a function that starts an operation returns: NULL if it is complete, an error as a small negative number, or
// else a request.
inline bool is_error(const void *result) {
  return reinterpret_cast<uintptr_t>(result) >= static_cast<uintptr_t>(kFirstError);
}
inline Status error_of(const void *result) { return static_cast<Status>(reinterpret_cast<intptr_t>(result)); }

#define PHX_UCX_FUNCTIONS(X)                                                                                          \
  X(get_version, void, ucp_get_version, (unsigned *major, unsigned *minor, unsigned *release))                        \
  X(status_text, const char *, ucs_status_string, (Status status))                                                    \
  X(config_read, Status, ucp_config_read, (const char *prefix, const char *file, Config *out))                        \
  X(config_modify, Status, ucp_config_modify, (Config config, const char *name, const char *value))                   \
  X(config_release, void, ucp_config_release, (Config config))                                                        \
  X(init, Status, ucp_init_version,                                                                                   \
    (unsigned major, unsigned minor, const Parameters *parameters, Config config, Context *out))                      \
  X(cleanup, void, ucp_cleanup, (Context context))                                                                    \
  X(context_print, void, ucp_context_print_info, (Context context, FILE * stream))                                    \
  X(worker_create, Status, ucp_worker_create, (Context context, const WorkerParameters *parameters, Worker *out))     \
  X(worker_destroy, void, ucp_worker_destroy, (Worker worker))                                                        \
  X(worker_address, Status, ucp_worker_get_address, (Worker worker, Address * out, size_t * bytes))                   \
  X(release_address, void, ucp_worker_release_address, (Worker worker, Address address))                              \
  X(worker_fd, Status, ucp_worker_get_efd, (Worker worker, int *fd))                                                  \
  X(worker_arm, Status, ucp_worker_arm, (Worker worker))                                                              \
  X(progress, unsigned, ucp_worker_progress, (Worker worker))                                                         \
  X(endpoint_create, Status, ucp_ep_create, (Worker worker, const EndpointParameters *parameters, Endpoint *out))     \
  X(endpoint_flush, void *, ucp_ep_flush_nbx, (Endpoint endpoint, const RequestParameters *parameters))               \
  X(endpoint_print, void, ucp_ep_print_info, (Endpoint endpoint, FILE * stream))                                      \
  X(flush, void *, ucp_worker_flush_nbx, (Worker worker, const RequestParameters *parameters))                        \
  X(endpoint_close, void *, ucp_ep_close_nbx, (Endpoint endpoint, const RequestParameters *parameters))               \
  X(send, void *, ucp_tag_send_nbx,                                                                                   \
    (Endpoint endpoint, const void *data, size_t bytes, uint64_t tag, const RequestParameters *parameters))           \
  X(receive, void *, ucp_tag_recv_nbx,                                                                                \
    (Worker worker, void *data, size_t bytes, uint64_t tag, uint64_t tag_mask, const RequestParameters *parameters))  \
  X(probe, void *, ucp_tag_probe_nb, (Worker worker, uint64_t tag, uint64_t tag_mask, int remove, ReceiveInfo *info)) \
  X(receive_probed, void *, ucp_tag_msg_recv_nbx,                                                                     \
    (Worker worker, void *data, size_t bytes, void *message, const RequestParameters *parameters))                    \
  X(request_status, Status, ucp_request_check_status, (void *request))                                                \
  X(received, Status, ucp_tag_recv_request_test, (void *request, ReceiveInfo *info))                                  \
  X(request_cancel, void, ucp_request_cancel, (Worker worker, void *request))                                         \
  X(request_free, void, ucp_request_free, (void *request))

struct Api {
// NOLINTNEXTLINE(bugprone-macro-parentheses): the arguments are a type and a list of parameters
#define PHX_UCX_MEMBER(name, result, symbol, arguments) result(*name) arguments = nullptr;
  PHX_UCX_FUNCTIONS(PHX_UCX_MEMBER)
#undef PHX_UCX_MEMBER
};

struct Library {
  Api api;
  std::string path;
  unsigned major = 0, minor = 0, release = 0;
};

// The library of the process, which stays loaded. NULL: `problem` says what was tried, why it failed and what to do.
const Library *find_library(std::string *problem);

// The UCX version whose interface the core uses, and the least that it needs.
constexpr unsigned kMajor = 1, kMinor = 13;

}  // namespace phx::ucx
