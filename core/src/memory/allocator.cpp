// The registry of allocators by device type.
#include "memory/allocator.h"

#include "base/error.h"
#include "cuda/allocator.h"

namespace phx {

AllocatorRegistry::AllocatorRegistry() { by_type_[PHX_DEVICE_CPU] = make_memfd_allocator(); }

void AllocatorRegistry::put(int32_t device_type, AllocatorRef allocator) {
  AllocatorRef previous;  // destroyed after the lock is gone: its destructor may call out
  std::lock_guard<std::mutex> lock(mutex_);
  previous = std::move(by_type_[device_type]);
  by_type_[device_type] = std::move(allocator);
  if (device_type == PHX_DEVICE_CUDA) own_cuda_ = true;
}

bool AllocatorRegistry::remove(int32_t device_type) {
  AllocatorRef previous;
  std::lock_guard<std::mutex> lock(mutex_);
  if (device_type == PHX_DEVICE_CUDA) own_cuda_ = true;
  auto found = by_type_.find(device_type);
  if (found == by_type_.end()) return false;
  previous = std::move(found->second);
  by_type_.erase(found);
  return true;
}

AllocatorRef AllocatorRegistry::get(int32_t device_type, const char *operation) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto found = by_type_.find(device_type);
  if (found != by_type_.end()) return found->second;
  std::string why;
  if (device_type == PHX_DEVICE_CUDA && !own_cuda_) {
    AllocatorRef cuda = cuda::make_allocator(&why);
    if (cuda) return by_type_[device_type] = std::move(cuda);
    why = " (cuda) here: " + why;
  }
  fail(PHX_ERR_UNSUPPORTED, operation,
       "%s: SymmetricMemory does not support device type %d%s; register an allocator for it (phx_allocator_register) "
       "or use CPU memory (device type 1)",
       operation, device_type, why.c_str());
  return nullptr;
}

Block::~Block() {
  if (!allocator || base == nullptr) return;
  (imported ? allocator->ops().unmap : allocator->ops().free)(allocator->self(), base, cookie);
}

}  // namespace phx
