// Compares src/net/ucx_api.h with the header of UCX, where that is installed. Compiled, never run: the core calls UCX
// through declarations of its own, and this file fails to compile if one of them does not fit.
#include <ucp/api/ucp.h>
#include <ucp/api/ucp_version.h>

#include <cstddef>
#include <type_traits>

#include "net/ucx_api.h"

namespace {

using namespace phx;

// A struct of ours holds one of UCX's, and a field lies where UCX's does.
#define PHX_HOLDS(ours, theirs) static_assert(sizeof(ucx::ours) >= sizeof(theirs), #theirs)
#define PHX_FIELD(ours, member, theirs, field)                                               \
  static_assert(offsetof(ucx::ours, member) == offsetof(theirs, field), #theirs "." #field); \
  static_assert(sizeof(ucx::ours::member) == sizeof(static_cast<theirs *>(nullptr)->field), #theirs "." #field)

PHX_HOLDS(Parameters, ucp_params_t);
PHX_FIELD(Parameters, mask, ucp_params_t, field_mask);
PHX_FIELD(Parameters, features, ucp_params_t, features);
PHX_FIELD(Parameters, request_size, ucp_params_t, request_size);
PHX_FIELD(Parameters, request_init, ucp_params_t, request_init);
PHX_FIELD(Parameters, request_cleanup, ucp_params_t, request_cleanup);
PHX_FIELD(Parameters, tag_sender_mask, ucp_params_t, tag_sender_mask);
PHX_FIELD(Parameters, shared_by_threads, ucp_params_t, mt_workers_shared);
PHX_FIELD(Parameters, estimated_endpoints, ucp_params_t, estimated_num_eps);
PHX_FIELD(Parameters, estimated_per_node, ucp_params_t, estimated_num_ppn);
PHX_FIELD(Parameters, name, ucp_params_t, name);
static_assert(ucx::Parameters::kFeatures == UCP_PARAM_FIELD_FEATURES && ucx::Parameters::kName == UCP_PARAM_FIELD_NAME);
static_assert(ucx::Parameters::kTag == UCP_FEATURE_TAG && ucx::Parameters::kWakeup == UCP_FEATURE_WAKEUP);

PHX_HOLDS(WorkerParameters, ucp_worker_params_t);
PHX_FIELD(WorkerParameters, mask, ucp_worker_params_t, field_mask);
PHX_FIELD(WorkerParameters, thread_mode, ucp_worker_params_t, thread_mode);
PHX_FIELD(WorkerParameters, cpus, ucp_worker_params_t, cpu_mask);
PHX_FIELD(WorkerParameters, events, ucp_worker_params_t, events);
PHX_FIELD(WorkerParameters, user_data, ucp_worker_params_t, user_data);
PHX_FIELD(WorkerParameters, event_fd, ucp_worker_params_t, event_fd);
PHX_FIELD(WorkerParameters, flags, ucp_worker_params_t, flags);
static_assert(ucx::WorkerParameters::kThreadMode == UCP_WORKER_PARAM_FIELD_THREAD_MODE);
static_assert(ucx::WorkerParameters::kFlags == UCP_WORKER_PARAM_FIELD_FLAGS);
static_assert(ucx::WorkerParameters::kSerialized == UCS_THREAD_MODE_SERIALIZED);
static_assert(ucx::WorkerParameters::kIgnoreRequestLeak == UCP_WORKER_FLAG_IGNORE_REQUEST_LEAK);

PHX_HOLDS(EndpointParameters, ucp_ep_params_t);
PHX_FIELD(EndpointParameters, mask, ucp_ep_params_t, field_mask);
PHX_FIELD(EndpointParameters, remote_address, ucp_ep_params_t, address);
PHX_FIELD(EndpointParameters, error_mode, ucp_ep_params_t, err_mode);
PHX_FIELD(EndpointParameters, error_handler, ucp_ep_params_t, err_handler);
PHX_FIELD(EndpointParameters, error_handler.call, ucp_ep_params_t, err_handler.cb);
PHX_FIELD(EndpointParameters, error_handler.argument, ucp_ep_params_t, err_handler.arg);
static_assert(ucx::EndpointParameters::kRemoteAddress == UCP_EP_PARAM_FIELD_REMOTE_ADDRESS);
static_assert(ucx::EndpointParameters::kErrorMode == UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE);
static_assert(ucx::EndpointParameters::kErrorHandler == UCP_EP_PARAM_FIELD_ERR_HANDLER);
static_assert(ucx::EndpointParameters::kPeerErrors == UCP_ERR_HANDLING_MODE_PEER);

static_assert(sizeof(ucx::ReceiveInfo) == sizeof(ucp_tag_recv_info_t));
PHX_FIELD(ReceiveInfo, tag, ucp_tag_recv_info_t, sender_tag);
PHX_FIELD(ReceiveInfo, bytes, ucp_tag_recv_info_t, length);

PHX_HOLDS(RequestParameters, ucp_request_param_t);
PHX_FIELD(RequestParameters, mask, ucp_request_param_t, op_attr_mask);
PHX_FIELD(RequestParameters, flags, ucp_request_param_t, flags);
PHX_FIELD(RequestParameters, request, ucp_request_param_t, request);
PHX_FIELD(RequestParameters, callback, ucp_request_param_t, cb);
PHX_FIELD(RequestParameters, datatype, ucp_request_param_t, datatype);
PHX_FIELD(RequestParameters, user_data, ucp_request_param_t, user_data);
PHX_FIELD(RequestParameters, reply, ucp_request_param_t, reply_buffer);
PHX_FIELD(RequestParameters, memory_type, ucp_request_param_t, memory_type);
static_assert(ucx::RequestParameters::kFlags == UCP_OP_ATTR_FIELD_FLAGS);
static_assert(ucx::RequestParameters::kMemoryType == UCP_OP_ATTR_FIELD_MEMORY_TYPE);
static_assert(ucx::RequestParameters::kNotAtOnce == UCP_OP_ATTR_FLAG_NO_IMM_CMPL);
static_assert(ucx::RequestParameters::kForce == UCP_EP_CLOSE_FLAG_FORCE);
static_assert(ucx::RequestParameters::kHost == UCS_MEMORY_TYPE_HOST);

static_assert(ucx::kOk == UCS_OK && ucx::kInProgress == UCS_INPROGRESS && ucx::kNoMemory == UCS_ERR_NO_MEMORY);
static_assert(ucx::kTruncated == UCS_ERR_MESSAGE_TRUNCATED && ucx::kCanceled == UCS_ERR_CANCELED);
static_assert(ucx::kFirstError == UCS_ERR_LAST && sizeof(ucs_status_t) == sizeof(ucx::Status));
static_assert(UCP_VERSION(UCP_API_MAJOR, UCP_API_MINOR) >= UCP_VERSION(1, 13));

// Two types of a parameter or a result are passed alike: the same size, and both pointers or both numbers.
template <class Ours, class Theirs>
constexpr bool passed_alike = std::is_void_v<Ours>
                                  ? std::is_void_v<Theirs>
                                  : std::is_pointer_v<Ours> == std::is_pointer_v<Theirs> &&
                                        sizeof(std::conditional_t<std::is_void_v<Ours>, char, Ours>) ==
                                            sizeof(std::conditional_t<std::is_void_v<Theirs>, char, Theirs>);
template <class Ours, class Theirs>
constexpr bool called_alike = false;
template <class OurResult, class... Ours, class TheirResult, class... Theirs>
constexpr bool called_alike<OurResult (*)(Ours...), TheirResult (*)(Theirs...)> = [] {
  if constexpr (sizeof...(Ours) != sizeof...(Theirs))
    return false;
  else
    return passed_alike<OurResult, TheirResult> && (passed_alike<Ours, Theirs> && ...);
}();
#define PHX_UCX_COMPARE(member, result, symbol, parameters) \
  static_assert(called_alike<decltype(ucx::Api::member), decltype(&symbol)>, #symbol);
PHX_UCX_FUNCTIONS(PHX_UCX_COMPARE)

}  // namespace
