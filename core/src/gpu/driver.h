// The part of the CUDA driver that the core calls, loaded when it is first needed. So one library, built without CUDA,
// serves hosts with and without a GPU. core/cuda/check_driver.cpp compares the declarations with cuda.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "phalanx/phalanx.h"

namespace phx::cuda {

using Result = int;  // 0: success
using Device = int;
using Pointer = unsigned long long;
using Handle = unsigned long long;  // of physical memory
struct OpaqueContext;
using Context = OpaqueContext *;
struct OpaqueStream;
using Stream = OpaqueStream *;
struct OpaqueEvent;
using Event = OpaqueEvent *;
struct OpaqueModule;
using Module = OpaqueModule *;
struct OpaqueFunction;
using Function = OpaqueFunction *;
struct Uuid {
  char bytes[16];
};

struct FabricHandle {
  unsigned char bytes[64];
};

constexpr Result kOutOfMemory = 2;  // CUDA_ERROR_OUT_OF_MEMORY

struct Location {
  int type;  // kOnDevice
  int id;
};
constexpr int kOnDevice = 1;  // CU_MEM_LOCATION_TYPE_DEVICE

struct AllocationProperties {
  int type;          // kPinned
  int handle_types;  // kFileDescriptor, and kFabric if the GPU can
  Location location;
  void *windows;
  struct {
    unsigned char compression;
    unsigned char rdma;
    unsigned short usage;
    unsigned char reserved[4];
  } flags;
};
constexpr int kPinned = 1;          // CU_MEM_ALLOCATION_TYPE_PINNED
constexpr int kFileDescriptor = 1;  // CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
constexpr int kFabric = 8;          // CU_MEM_HANDLE_TYPE_FABRIC

// The properties of a multicast object, which stands for the memory of several GPUs at once.
struct MulticastProperties {
  unsigned devices;
  size_t size;                      // bytes of memory of each GPU
  unsigned long long handle_types;  // kFileDescriptor
  unsigned long long flags;         // 0
};

struct AccessDescription {
  Location location;
  int flags;  // kReadWrite
};
constexpr int kReadWrite = 3;            // CU_MEM_ACCESS_FLAGS_PROT_READWRITE
constexpr int kSmallestGranularity = 0;  // CU_MEM_ALLOC_GRANULARITY_MINIMUM, CU_MULTICAST_GRANULARITY_MINIMUM
constexpr unsigned kNonBlocking = 1;     // CU_STREAM_NON_BLOCKING

constexpr unsigned kUntimed = 2;         // CU_EVENT_DISABLE_TIMING
constexpr unsigned kForAllContexts = 3;  // CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP
constexpr int kNotCapturing = 0;         // CU_STREAM_CAPTURE_STATUS_NONE
constexpr int kRelaxed = 2;              // CU_STREAM_CAPTURE_MODE_RELAXED

constexpr int kKindOfMemory = 2;          // CU_POINTER_ATTRIBUTE_MEMORY_TYPE
constexpr int kMostThreads = 1;           // CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK
constexpr int kProcessors = 16;           // CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
constexpr int kHasVirtualMemory = 102;    // CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
constexpr int kHasFileDescriptors = 103;  // CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED
constexpr int kHasFabric = 128;           // CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED
constexpr int kHasMulticast = 132;        // CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED

// Every function: the member, the symbol, its parameters.
#define PHX_CUDA_FUNCTIONS(X)                                                                                        \
  X(init, cuInit, (unsigned flags))                                                                                  \
  X(get_error_name, cuGetErrorName, (Result result, const char **name))                                              \
  X(device_count, cuDeviceGetCount, (int *count))                                                                    \
  X(device_get, cuDeviceGet, (Device * device, int index))                                                           \
  X(device_attribute, cuDeviceGetAttribute, (int *value, int attribute, Device device))                              \
  X(device_uuid, cuDeviceGetUuid_v2, (Uuid * uuid, Device device))                                                   \
  X(device_name, cuDeviceGetName, (char *name, int size, Device device))                                             \
  X(context_retain, cuDevicePrimaryCtxRetain, (Context * context, Device device))                                    \
  X(context_release, cuDevicePrimaryCtxRelease_v2, (Device device))                                                  \
  X(context_push, cuCtxPushCurrent_v2, (Context context))                                                            \
  X(context_pop, cuCtxPopCurrent_v2, (Context * context))                                                            \
  X(granularity, cuMemGetAllocationGranularity, (size_t * bytes, const AllocationProperties *info, int option))      \
  X(create, cuMemCreate, (Handle * handle, size_t size, const AllocationProperties *info, unsigned long long flags)) \
  X(release, cuMemRelease, (Handle handle))                                                                          \
  X(reserve, cuMemAddressReserve,                                                                                    \
    (Pointer * pointer, size_t size, size_t alignment, Pointer wanted, unsigned long long flags))                    \
  X(unreserve, cuMemAddressFree, (Pointer pointer, size_t size))                                                     \
  X(map, cuMemMap, (Pointer pointer, size_t size, size_t offset, Handle handle, unsigned long long flags))           \
  X(unmap, cuMemUnmap, (Pointer pointer, size_t size))                                                               \
  X(set_access, cuMemSetAccess, (Pointer pointer, size_t size, const AccessDescription *info, size_t count))         \
  X(export_handle, cuMemExportToShareableHandle, (void *out, Handle handle, int type, unsigned long long flags))     \
  X(import_handle, cuMemImportFromShareableHandle, (Handle * handle, void *input, int type))                         \
  X(stream_create, cuStreamCreate, (Stream * stream, unsigned flags))                                                \
  X(stream_destroy, cuStreamDestroy_v2, (Stream stream))                                                             \
  X(stream_wait, cuStreamSynchronize, (Stream stream))                                                               \
  X(fill_bytes, cuMemsetD8Async, (Pointer pointer, unsigned char value, size_t count, Stream stream))                \
  X(copy_in, cuMemcpyHtoDAsync_v2, (Pointer to, const void *from, size_t bytes, Stream stream))                      \
  X(copy_within, cuMemcpyDtoDAsync_v2, (Pointer to, Pointer from, size_t bytes, Stream stream))                      \
  X(stream_after, cuStreamWaitEvent, (Stream stream, Event event, unsigned flags))                                   \
  X(stream_capturing, cuStreamIsCapturing, (Stream stream, int *status))                                             \
  X(capture_mode, cuThreadExchangeStreamCaptureMode, (int *mode))                                                    \
  X(event_create, cuEventCreate, (Event * event, unsigned flags))                                                    \
  X(event_destroy, cuEventDestroy_v2, (Event event))                                                                 \
  X(event_record, cuEventRecord, (Event event, Stream stream))                                                       \
  X(event_wait, cuEventSynchronize, (Event event))                                                                   \
  X(pointer_attribute, cuPointerGetAttribute, (void *value, int attribute, Pointer pointer))                         \
  X(host_register, cuMemHostRegister_v2, (void *memory, size_t bytes, unsigned flags))                               \
  X(host_unregister, cuMemHostUnregister, (void *memory))                                                            \
  X(host_pointer, cuMemHostGetDevicePointer_v2, (Pointer * pointer, void *memory, unsigned flags))                   \
  X(module_load, cuModuleLoadData, (Module * module, const void *image))                                             \
  X(module_unload, cuModuleUnload, (Module module))                                                                  \
  X(module_function, cuModuleGetFunction, (Function * function, Module module, const char *name))                    \
  X(occupancy, cuOccupancyMaxActiveBlocksPerMultiprocessor,                                                          \
    (int *blocks, Function function, int threads, size_t shared))                                                    \
  X(launch, cuLaunchKernel,                                                                                          \
    (Function function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y,       \
     unsigned block_z, unsigned shared, Stream stream, void **parameters, void **extra))

// Functions that a driver may lack: then the members are NULL.
#define PHX_CUDA_NEWER_FUNCTIONS(X)                                                                                  \
  X(multicast_granularity, cuMulticastGetGranularity, (size_t * bytes, const MulticastProperties *info, int option)) \
  X(multicast_create, cuMulticastCreate, (Handle * handle, const MulticastProperties *info))                         \
  X(multicast_add, cuMulticastAddDevice, (Handle handle, Device device))                                             \
  X(multicast_bind, cuMulticastBindMem,                                                                              \
    (Handle handle, size_t offset, Handle memory, size_t memory_offset, size_t size, unsigned long long flags))      \
  X(multicast_unbind, cuMulticastUnbind, (Handle handle, Device device, size_t offset, size_t size))                 \
  X(function_count, cuModuleGetFunctionCount, (unsigned *count, Module module))                                      \
  X(functions, cuModuleEnumerateFunctions, (Function * functions, unsigned count, Module module))                    \
  X(function_name, cuFuncGetName, (const char **name, Function function))                                            \
  X(function_load, cuFuncLoad, (Function function))

struct Driver {
// NOLINTNEXTLINE(bugprone-macro-parentheses): a list of parameters, and a name
#define PHX_CUDA_MEMBER(member, symbol, parameters) Result(*member) parameters;
  PHX_CUDA_FUNCTIONS(PHX_CUDA_MEMBER)
  PHX_CUDA_NEWER_FUNCTIONS(PHX_CUDA_MEMBER)
#undef PHX_CUDA_MEMBER
  bool knows_multicast() const {  // from CUDA 12.1 on
    return multicast_granularity && multicast_create && multicast_add && multicast_bind && multicast_unbind;
  }
  bool lists_functions() const {  // from CUDA 12.4 on
    return function_count && functions && function_name && function_load;
  }
};

// The initialised driver. NULL, and *problem says why, if there is none.
const Driver *find_driver(std::string *problem);

// The error of a driver call that failed: PHX_ERR_NO_MEMORY or PHX_ERR_DEVICE. `action` describes the call.
phx_status failed(const Driver &driver, const char *operation, Result result, const char *action);

// While it lives, the primary context of a device, which the CUDA runtime and torch use, is current in this thread. The
// thread may also wait for events and make memory while any thread captures, which would otherwise end the capture.
class Current {
 public:
  Current(const Driver &driver, Context context) : driver_(driver), result_(driver.context_push(context)) {
    if (result_ == 0) driver_.capture_mode(&mode_);
  }
  Current(const Current &) = delete;
  Current &operator=(const Current &) = delete;
  ~Current() {
    Context popped = nullptr;
    if (result_ != 0) return;
    driver_.capture_mode(&mode_);
    driver_.context_pop(&popped);
  }
  Result result() const { return result_; }

 private:
  const Driver &driver_;
  const Result result_;
  int mode_ = kRelaxed;  // after the exchange, the thread's mode from before
};

// Makes driver calls with a context current. `calls` returns their result; `action` describes them in an error.
template <class Calls>
phx_status on_gpu(const char *operation, const Driver &driver, Context context, const char *action,
                  const Calls &calls) {
  const Current current(driver, context);
  Result result = current.result();
  if (result == 0) result = calls();
  return result == 0 ? PHX_OK : failed(driver, operation, result, action);
}

inline void *pointer_of(Pointer pointer) { return reinterpret_cast<void *>(static_cast<uintptr_t>(pointer)); }

}  // namespace phx::cuda
