// The registry of allocators by device type.
#include "world/allocator.h"

#include "base/error.h"

namespace phx {

AllocatorRegistry::AllocatorRegistry() { by_type_[PHX_DEVICE_CPU] = make_memfd_allocator(); }

void AllocatorRegistry::put(int32_t device_type, AllocatorRef allocator) {
  AllocatorRef previous;  // destroyed after the lock is gone: its destructor may call out
  std::lock_guard<std::mutex> lock(mutex_);
  previous = std::move(by_type_[device_type]);
  by_type_[device_type] = std::move(allocator);
  on_demand_.erase(device_type);
}

void AllocatorRegistry::make_on_demand(int32_t device_type, const char *device_name, Maker maker) {
  std::lock_guard<std::mutex> lock(mutex_);
  on_demand_[device_type] = {device_name, maker};
}

bool AllocatorRegistry::remove(int32_t device_type) {
  AllocatorRef previous;
  std::lock_guard<std::mutex> lock(mutex_);
  on_demand_.erase(device_type);
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
  if (const auto on_demand = on_demand_.find(device_type); on_demand != on_demand_.end()) {
    AllocatorRef made = on_demand->second.maker(&why);
    if (made) return by_type_[device_type] = std::move(made);
    why = std::string(" (") + on_demand->second.device_name + ") here: " + why;
  }
  fail(PHX_ERR_UNSUPPORTED, operation,
       "SymmetricMemory does not support device type %d%s; register an allocator for it (phx_allocator_register) "
       "or use CPU memory (device type 1)",
       device_type, why.c_str());
  return nullptr;
}

Block::~Block() {
  if (!allocator || base == nullptr) return;
  (imported ? allocator->ops().unmap : allocator->ops().free)(allocator->self(), base, cookie);
}

}  // namespace phx
