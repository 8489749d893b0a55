#include "gpu/multicast.h"

#include <fcntl.h>

#include <algorithm>
#include <cstring>
#include <new>

#include "base/failpoint.h"
#include "gpu/gpu_group.h"

namespace phx::cuda {

phx_status MulticastObject::make(const char *operation, const Driver &driver, const Gpu &gpu, size_t devices,
                                 size_t size, MulticastPtr *out) {
  const Current current(driver, gpu.context);
  MulticastProperties properties = multicast_properties(devices, gpu.unit);
  size_t unit = 0;
  Result result = current.result();
  if (result == 0) result = driver.multicast_granularity(&unit, &properties, kSmallestGranularity);
  if (result != 0 || unit == 0)
    return failed(driver, operation, result, "asking for the granularity of multicast (cuMulticastGetGranularity)");
  properties.size = span_of(size, unit);
  MulticastPtr object(new (std::nothrow) MulticastObject(driver, gpu, properties.size));
  if (!object) return fail(PHX_ERR_NO_MEMORY, operation, "out of memory");
  result = driver.multicast_create(&object->handle_, &properties);
  if (result != 0) return failed(driver, operation, result, "making a multicast object (cuMulticastCreate)");
  object->created_ = true;
  *out = std::move(object);
  return PHX_OK;
}

phx_status MulticastObject::import(const char *operation, const Driver &driver, const Gpu &gpu, int fd, size_t span,
                                   MulticastPtr *out) {
  if (fd < 0 || span == 0)
    return fail(PHX_ERR_ABI, operation, "a multicast object came without a file descriptor or a size");
  MulticastPtr object(new (std::nothrow) MulticastObject(driver, gpu, span));
  if (!object) return fail(PHX_ERR_NO_MEMORY, operation, "out of memory");
  void *const handle = reinterpret_cast<void *>(static_cast<intptr_t>(fd));
  PHX_TRY(object->import_shared(operation, handle, kFileDescriptor, "the multicast object"));
  *out = std::move(object);
  return PHX_OK;
}

phx_status MulticastObject::export_fd(const char *operation, Fd *out) const {
  int exported = -1;
  PHX_TRY(export_shared(operation, &exported, kFileDescriptor, "the multicast object"));
  *out = Fd(exported);
  fcntl(exported, F_SETFD, FD_CLOEXEC);
  return PHX_OK;
}

phx_status MulticastObject::add(const char *operation) {
  return on_gpu(operation, driver_, gpu_.context, "adding the GPU to the multicast object (cuMulticastAddDevice)",
                [&] { return driver_.multicast_add(handle_, gpu_.device); });
}

phx_status MulticastObject::bind(const char *operation, const Memory &memory) {
  if (memory.span() < span_)
    return fail(PHX_ERR_UNSUPPORTED, operation,
                "the block has %zu bytes of memory, and multicast to so many GPUs takes pieces of %zu", memory.span(),
                span_);
  PHX_TRY(on_gpu(operation, driver_, gpu_.context, "binding the memory to the multicast object (cuMulticastBindMem)",
                 [&] { return driver_.multicast_bind(handle_, 0, memory.handle(), 0, span_, 0); }));
  bound_ = true;
  return map(operation, gpu_.unit, "reserving addresses for multicast (cuMemAddressReserve)", "the multicast object");
}

// ---- the last step of a rendezvous of GPU memory
//
// It makes one multicast address for the blocks of all ranks, if the GPUs can. If one rank cannot do it, all ranks go
// without: that is not an error. It fails only if the group does.

namespace {

// What a rank publishes after each step.
struct StepResult {
  int32_t status;
  int32_t has_kernels;  // whether its GPU has kernels for multicast
  uint64_t span;        // of the object, from the rank that made it
  char text[sizeof ErrorInfo::text];
};

// Why multicast is impossible from the start; empty: no reason is known. The same on all ranks.
std::string obstacle(const Group &group, const std::vector<Facts> &all) {
  if (all.size() < 2) return "it has one rank";
  for (size_t i = 0; i < all.size(); ++i) {
    const std::string rank = group.describe(static_cast<int>(i));
    switch (static_cast<MulticastAbility>(all[i].multicast)) {
      case MulticastAbility::kCan: break;
      case MulticastAbility::kOldDriver: return "the driver of " + rank + " is too old (CUDA 12.1 is needed)";
      case MulticastAbility::kNoUnit: return "the driver of " + rank + " does not tell the granularity of multicast";
      default: return "the GPU of " + rank + " cannot: it takes GPUs that NVLink switches connect, from sm_90 on";
    }
    for (size_t j = 0; j < i; ++j)
      if (std::memcmp(&all[i].uuid, &all[j].uuid, sizeof all[i].uuid) == 0)
        return group.describe(static_cast<int>(j)) + " and " + rank + " share a GPU, and each must have one of its own";
  }
  return "";
}

}  // namespace

phx_status GpuSymm::agree(const char *operation, Group &group, const Block &block, const Deadline &deadline) {
  gpu_of(group).adopt_table(place(shares_gpus_), shares_gpus_ ? facts_[0].shared : facts_[0].apart);
  no_multicast_ = obstacle(group, facts_);
  if (!no_multicast_.empty()) return PHX_OK;
  const ErrorInfo before = last_error();  // an error of multicast must not become the call's
  PHX_TRY(make_multicast(operation, group, block, deadline));
  set_last_error(before);
  return PHX_OK;
}

phx_status GpuSymm::make_multicast(const char *operation, Group &group, const Block &block, const Deadline &deadline) {
  const Memory &memory = memory_of(block);
  const bool makes = self_ == 0;
  StepResult own{};
  std::vector<StepResult> results;
  std::vector<Parcel> parcels;
  phx_status step = PHX_OK, status = PHX_OK;
  // Exchanges the results of a step with all ranks, and sends `fds` with this rank's. False: `status` says that the
  // exchange failed, or no_multicast_, the same on all ranks, why the step failed on one.
  const auto all_did = [&](const std::vector<int> &fds) {
    own.status = step;
    if (step != PHX_OK) copy_text(own.text, sizeof own.text, last_error().text);
    status = group.exchange_all(operation, own, deadline, &results, fds, &parcels);
    for (size_t i = 0; i < results.size() && status == PHX_OK && no_multicast_.empty(); ++i) {
      results[i].text[sizeof results[i].text - 1] = '\0';
      if (results[i].status != PHX_OK)
        no_multicast_ = "on " + group.describe(static_cast<int>(i)) + ": " + results[i].text;
    }
    return status == PHX_OK && no_multicast_.empty();
  };

  MulticastPtr object;
  Fd fd;
  if (makes) {
    step = MulticastObject::make(operation, driver_, memory.gpu(), group.size(), block.size, &object);
    if (step == PHX_OK) step = object->export_fd(operation, &fd);
    if (step == PHX_OK) own.span = object->span();
  }
  PHX_FAILPOINT("symm_multicast", 1);
  if (!all_did(fd.valid() ? std::vector<int>{fd.get()} : std::vector<int>{})) return status;

  if (!makes) {
    const int sent = parcels[0].fds.empty() ? -1 : parcels[0].fds[0].get();
    step = MulticastObject::import(operation, driver_, memory.gpu(), sent, results[0].span, &object);
  }
  if (step == PHX_OK) step = object->add(operation);
  PHX_FAILPOINT("symm_multicast", 2);
  if (!all_did({})) return status;

  step = object->bind(operation, memory);
  Function kernel = nullptr;
  if (step == PHX_OK)
    own.has_kernels =
        gpus_.kernel(operation, pads_[self_]->gpu(), "phx_gpu_multimem_broadcast", threads_, &kernel) == PHX_OK;
  PHX_FAILPOINT("symm_multicast", 3);
  if (!all_did({})) return status;
  multicast_ = std::move(object);
  has_multimem_ = std::all_of(results.begin(), results.end(), [](const StepResult &r) { return r.has_kernels != 0; });
  team_.multicast = pointer_of(multicast_->pointer());
  return PHX_OK;
}

}  // namespace phx::cuda
