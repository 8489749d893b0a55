// Compares what core/src/gpu/driver.h and core/torch/gpu_driver.h declare of the CUDA driver with cuda.h. Nothing of
// it is run:
//
//   nvcc -std=c++17 -Icore/include -Icore/src -c core/cuda/check_driver.cpp
#include <cuda.h>

#include <cstddef>

#include "../torch/gpu_driver.h"
#include "gpu/driver.h"

namespace phx::cuda {

static_assert(sizeof(Result) == sizeof(CUresult) && sizeof(Device) == sizeof(CUdevice));
static_assert(sizeof(Pointer) == sizeof(CUdeviceptr) && sizeof(Handle) == sizeof(CUmemGenericAllocationHandle));
static_assert(kOutOfMemory == CUDA_ERROR_OUT_OF_MEMORY);

static_assert(sizeof(Location) == sizeof(CUmemLocation) && offsetof(Location, id) == offsetof(CUmemLocation, id));
static_assert(kOnDevice == CU_MEM_LOCATION_TYPE_DEVICE);

static_assert(sizeof(AllocationProperties) == sizeof(CUmemAllocationProp));
static_assert(offsetof(AllocationProperties, type) == offsetof(CUmemAllocationProp, type));
static_assert(offsetof(AllocationProperties, handle_types) == offsetof(CUmemAllocationProp, requestedHandleTypes));
static_assert(offsetof(AllocationProperties, location) == offsetof(CUmemAllocationProp, location));
static_assert(offsetof(AllocationProperties, flags) == offsetof(CUmemAllocationProp, allocFlags));
static_assert(kPinned == CU_MEM_ALLOCATION_TYPE_PINNED);
static_assert(kFileDescriptor == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
#if CUDA_VERSION >= 12030
static_assert(kFabric == CU_MEM_HANDLE_TYPE_FABRIC && sizeof(FabricHandle) == sizeof(CUmemFabricHandle));
static_assert(kHasFabric == CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED);
#endif

static_assert(sizeof(MulticastProperties) == sizeof(CUmulticastObjectProp));
static_assert(offsetof(MulticastProperties, devices) == offsetof(CUmulticastObjectProp, numDevices));
static_assert(offsetof(MulticastProperties, size) == offsetof(CUmulticastObjectProp, size));
static_assert(offsetof(MulticastProperties, handle_types) == offsetof(CUmulticastObjectProp, handleTypes));
static_assert(offsetof(MulticastProperties, flags) == offsetof(CUmulticastObjectProp, flags));
static_assert(kSmallestGranularity == CU_MULTICAST_GRANULARITY_MINIMUM);
static_assert(kHasMulticast == CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED);

static_assert(sizeof(AccessDescription) == sizeof(CUmemAccessDesc));
static_assert(offsetof(AccessDescription, flags) == offsetof(CUmemAccessDesc, flags));
static_assert(kReadWrite == CU_MEM_ACCESS_FLAGS_PROT_READWRITE);

static_assert(kSmallestGranularity == CU_MEM_ALLOC_GRANULARITY_MINIMUM && kNonBlocking == CU_STREAM_NON_BLOCKING);
static_assert(kRelaxed == CU_STREAM_CAPTURE_MODE_RELAXED && kNotCapturing == CU_STREAM_CAPTURE_STATUS_NONE);
static_assert(kUntimed == CU_EVENT_DISABLE_TIMING && kKindOfMemory == CU_POINTER_ATTRIBUTE_MEMORY_TYPE);
static_assert(kForAllContexts == (CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP));
static_assert(kMostThreads == CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK);
static_assert(kProcessors == CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
static_assert(kHasVirtualMemory == CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED);
static_assert(kHasFileDescriptors == CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED);

// As many parameters, of the same sizes: all are integers, enums or pointers.
template <class... Theirs, class... Ours>
constexpr bool alike(CUresult(CUDAAPI *)(Theirs...), Result (*)(Ours...)) {
  if constexpr (sizeof...(Theirs) != sizeof...(Ours))
    return false;
  else
    return ((sizeof(Theirs) == sizeof(Ours)) && ...);
}

#define PHX_CUDA_COMPARE(member, symbol, parameters) \
  static_assert(alike(&symbol, static_cast<Result(*) parameters>(nullptr)), #symbol);
PHX_CUDA_FUNCTIONS(PHX_CUDA_COMPARE)
PHX_CUDA_NEWER_FUNCTIONS(PHX_CUDA_COMPARE)
#undef PHX_CUDA_COMPARE

}  // namespace phx::cuda

namespace phxt::gpu {

static_assert(sizeof(Result) == sizeof(CUresult) && sizeof(Device) == sizeof(CUdevice));
static_assert(kUntimed == CU_EVENT_DISABLE_TIMING && kCapturing == CU_STREAM_CAPTURE_STATUS_ACTIVE);
static_assert(kRelaxed == CU_STREAM_CAPTURE_MODE_RELAXED);

#define PHXT_CUDA_COMPARE(member, symbol, parameters) \
  static_assert(phx::cuda::alike(&symbol, static_cast<Result(*) parameters>(nullptr)), #symbol);
PHXT_CUDA_FUNCTIONS(PHXT_CUDA_COMPARE)
#undef PHXT_CUDA_COMPARE

}  // namespace phxt::gpu
