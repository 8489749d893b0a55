// The part of the CUDA driver that orders streams, found when it is first needed. core/cuda/check_driver.cpp compares
// what is declared here with cuda.h.
#pragma once

#include <cstddef>
#include <cstdint>

namespace phxt::gpu {

using Result = int;  // 0: success
using Device = int;
using Context = void *;
using Stream = void *;
using Event = void *;

constexpr unsigned kUntimed = 2;  // CU_EVENT_DISABLE_TIMING
constexpr int kCapturing = 1;     // CU_STREAM_CAPTURE_STATUS_ACTIVE
constexpr int kRelaxed = 2;       // CU_STREAM_CAPTURE_MODE_RELAXED

// Every function: the member, the symbol, its parameters.
#define PHXT_CUDA_FUNCTIONS(X)                                                     \
  X(device_get, cuDeviceGet, (Device * device, int index))                         \
  X(context_retain, cuDevicePrimaryCtxRetain, (Context * context, Device device))  \
  X(context_push, cuCtxPushCurrent_v2, (Context context))                          \
  X(context_pop, cuCtxPopCurrent_v2, (Context * context))                          \
  X(event_create, cuEventCreate, (Event * event, unsigned flags))                  \
  X(event_destroy, cuEventDestroy_v2, (Event event))                               \
  X(event_record, cuEventRecord, (Event event, Stream stream))                     \
  X(event_query, cuEventQuery, (Event event))                                      \
  X(stream_after, cuStreamWaitEvent, (Stream stream, Event event, unsigned flags)) \
  X(capture_mode, cuThreadExchangeStreamCaptureMode, (int *mode))

struct Driver {
// NOLINTNEXTLINE(bugprone-macro-parentheses): a list of parameters, and a name
#define PHXT_CUDA_MEMBER(member, symbol, parameters) Result(*member) parameters;
  PHXT_CUDA_FUNCTIONS(PHXT_CUDA_MEMBER)
#undef PHXT_CUDA_MEMBER
  // A function of CUDA 11.3, by the name that drivers keep for it; cuda.h has later forms. What is NULL is not told.
  Result (*capture_info)(Stream stream, int *status, uint64_t *id, void **graph, const void **nodes, size_t *count);
};

// Raises where there is none: tensors of a GPU have one.
const Driver &driver();

// Makes the primary context of a GPU, the one that torch uses, the current one of this thread; and lets this thread ask
// about events while any thread captures, which would else end the capture.
class InContext {
 public:
  explicit InContext(int32_t gpu);
  InContext(const InContext &) = delete;
  InContext &operator=(const InContext &) = delete;
  ~InContext();

 private:
  int mode_ = kRelaxed;  // what it was before
};

// Raises when a call of the driver failed. `doing` completes "could not ...".
void check(Result result, const char *doing);

}  // namespace phxt::gpu
