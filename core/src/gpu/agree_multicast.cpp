// Makes one multicast object for the ranks of a rendezvous, if all can: see agree_on_multicast in gpu_symm.h.
#include <cstring>

#include "base/error.h"
#include "base/failpoint.h"
#include "gpu/allocator.h"
#include "gpu/gpu_symm.h"
#include "group/group.h"

namespace phx {
namespace {

// What a rank publishes after each step.
struct StepResult {
  int32_t status;
  int32_t has_kernels;  // whether its GPU has kernels for multicast
  uint64_t span;        // of the object, from the rank that made it
  char text[sizeof ErrorInfo::text];
};

// Why multicast is impossible from the start; empty: no reason is known. The same on all ranks.
std::string obstacle(const Group &group, const std::vector<cuda::Facts> &all) {
  if (all.size() < 2) return "it has one rank";
  for (size_t i = 0; i < all.size(); ++i) {
    const std::string rank = group.describe(static_cast<int>(i));
    switch (static_cast<cuda::MulticastAbility>(all[i].multicast)) {
      case cuda::MulticastAbility::kCan: break;
      case cuda::MulticastAbility::kOldDriver: return "the driver of " + rank + " is too old (CUDA 12.1 is needed)";
      case cuda::MulticastAbility::kNoUnit:
        return "the driver of " + rank + " does not tell the granularity of multicast";
      default: return "the GPU of " + rank + " cannot: it takes GPUs that NVLink switches connect, from sm_90 on";
    }
    for (size_t j = 0; j < i; ++j)
      if (std::memcmp(&all[i].uuid, &all[j].uuid, sizeof all[i].uuid) == 0)
        return group.describe(static_cast<int>(j)) + " and " + rank + " share a GPU, and each must have one of its own";
  }
  return "";
}

class Agreement {
 public:
  Agreement(const char *operation, Group &group, const Deadline &deadline)
      : operation_(operation), group_(group), deadline_(deadline) {}

  // Exchanges the results of a step with all ranks. `fd`: is sent with this rank's result; -1: none.
  phx_status exchange(phx_status status, int fd) {
    own_.status = status;
    if (status != PHX_OK) copy_text(own_.text, sizeof own_.text, last_error().text);
    std::vector<int> fds;
    if (fd >= 0) fds.push_back(fd);
    const phx_status exchanged = group_.exchange_all(operation_, own_, deadline_, &results_, fds, &parcels_);
    for (StepResult &result : results_) result.text[sizeof result.text - 1] = '\0';
    return exchanged;
  }
  // Why the step failed, if it did on any rank. The same on all ranks.
  std::string obstacle() const {
    for (size_t i = 0; i < results_.size(); ++i)
      if (results_[i].status != PHX_OK) return "on " + group_.describe(static_cast<int>(i)) + ": " + results_[i].text;
    return "";
  }
  StepResult &own() { return own_; }
  const std::vector<StepResult> &results() const { return results_; }
  // The descriptor that the rank that made the object has sent.
  int fd() const { return parcels_[0].fds.empty() ? -1 : parcels_[0].fds[0].get(); }

 private:
  const char *const operation_;
  Group &group_;
  const Deadline &deadline_;
  StepResult own_{};
  std::vector<Parcel> parcels_;
  std::vector<StepResult> results_;
};

phx_status take_steps(const char *operation, Group &group, const Block &block, cuda::GpuSymm &gpu,
                      const Deadline &deadline, std::string *why) {
  const cuda::Driver &driver = gpu.driver();
  const cuda::Memory &memory = cuda::memory_of(block);
  const bool makes = group.group_rank() == 0;
  Agreement agreement(operation, group, deadline);
  cuda::MulticastPtr object;
  Fd fd;
  phx_status step = PHX_OK;
  if (makes) {
    step = cuda::MulticastObject::make(operation, driver, memory.gpu(), group.size(), block.size, &object);
    if (step == PHX_OK) step = object->export_fd(operation, &fd);
    if (step == PHX_OK) agreement.own().span = object->span();
  }
  PHX_FAILPOINT("symm_multicast", 1);
  phx_status status = agreement.exchange(step, fd.get());
  if (status != PHX_OK || !(*why = agreement.obstacle()).empty()) return status;

  if (!makes)
    step = cuda::MulticastObject::import(operation, driver, memory.gpu(), agreement.fd(), agreement.results()[0].span,
                                         &object);
  if (step == PHX_OK) step = object->add(operation);
  PHX_FAILPOINT("symm_multicast", 2);
  status = agreement.exchange(step, -1);
  if (status != PHX_OK || !(*why = agreement.obstacle()).empty()) return status;

  step = object->bind(operation, memory);
  if (step == PHX_OK) agreement.own().has_kernels = gpu.has_kernel("phx_gpu_multimem_broadcast") ? 1 : 0;
  PHX_FAILPOINT("symm_multicast", 3);
  status = agreement.exchange(step, -1);
  if (status != PHX_OK || !(*why = agreement.obstacle()).empty()) return status;
  bool everywhere = true;
  for (const StepResult &result : agreement.results()) everywhere = everywhere && result.has_kernels != 0;
  gpu.adopt_multicast(std::move(object), everywhere);
  return PHX_OK;
}

}  // namespace

phx_status agree_on_multicast(const char *operation, Group &group, const Block &block, cuda::GpuSymm &gpu,
                              const std::vector<cuda::Facts> &all, const Deadline &deadline) {
  std::string why = obstacle(group, all);
  if (why.empty()) {
    const ErrorInfo before = last_error();  // an error of multicast must not become the call's
    PHX_TRY(take_steps(operation, group, block, gpu, deadline, &why));
    set_last_error(before);
  }
  gpu.go_without_multicast(why);
  return PHX_OK;
}

}  // namespace phx
