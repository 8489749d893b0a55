// Whether and how the ranks of a rendezvous make one multicast object: see gpu_symm.h.
#include <cstring>

#include "base/error.h"
#include "base/failpoint.h"
#include "gpu/allocator.h"
#include "gpu/gpu_symm.h"
#include "group/group.h"

namespace phx {
namespace {

// What a rank says after each step.
struct Word {
  int32_t status;
  int32_t has_kernels;  // for it, on its GPU
  uint64_t span;        // of the object: from the rank that made it
  char text[sizeof ErrorInfo::text];
};

// Why not to begin at all; empty: nothing is known to stand in the way. The same on all ranks.
std::string obstacle(const Group &group, const std::vector<cuda::Facts> &all) {
  if (all.size() < 2) return "it has one rank";
  for (size_t i = 0; i < all.size(); ++i) {
    const std::string rank = group.describe(static_cast<int>(i));
    switch (static_cast<cuda::MulticastAbility>(all[i].multicast)) {
      case cuda::MulticastAbility::kCan: break;
      case cuda::MulticastAbility::kOldDriver: return "the driver of " + rank + " is too old (CUDA 12.1 is needed)";
      case cuda::MulticastAbility::kNoUnit: return "the driver of " + rank + " does not say what multicast comes in";
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

  // Tells the others how a step went here, and hears of theirs. `fd`: goes with it; -1: none.
  phx_status tell(phx_status status, int fd) {
    mine_.status = status;
    if (status != PHX_OK) copy_text(mine_.text, sizeof mine_.text, last_error().text);
    std::vector<int> fds;
    if (fd >= 0) fds.push_back(fd);
    const phx_status exchanged = group_.exchange_all(operation_, mine_, deadline_, &words_, fds, &parcels_);
    for (Word &word : words_) word.text[sizeof word.text - 1] = '\0';
    return exchanged;
  }
  // Why the step failed, if it did on any rank: the same on all of them.
  std::string obstacle() const {
    for (size_t i = 0; i < words_.size(); ++i)
      if (words_[i].status != PHX_OK) return "on " + group_.describe(static_cast<int>(i)) + ": " + words_[i].text;
    return "";
  }
  Word &mine() { return mine_; }
  const std::vector<Word> &words() const { return words_; }
  // What the rank that made the object has sent.
  int fd() const { return parcels_[0].fds.empty() ? -1 : parcels_[0].fds[0].get(); }

 private:
  const char *const operation_;
  Group &group_;
  const Deadline &deadline_;
  Word mine_{};
  std::vector<Parcel> parcels_;
  std::vector<Word> words_;
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
    if (step == PHX_OK) agreement.mine().span = object->span();
  }
  PHX_FAILPOINT("symm_multicast", 1);
  phx_status status = agreement.tell(step, fd.get());
  if (status != PHX_OK || !(*why = agreement.obstacle()).empty()) return status;

  if (!makes)
    step = cuda::MulticastObject::import(operation, driver, memory.gpu(), agreement.fd(), agreement.words()[0].span,
                                         &object);
  if (step == PHX_OK) step = object->add(operation);
  PHX_FAILPOINT("symm_multicast", 2);
  status = agreement.tell(step, -1);
  if (status != PHX_OK || !(*why = agreement.obstacle()).empty()) return status;

  step = object->bind(operation, memory);
  if (step == PHX_OK) agreement.mine().has_kernels = gpu.has_kernel("phx_gpu_multimem_broadcast") ? 1 : 0;
  PHX_FAILPOINT("symm_multicast", 3);
  status = agreement.tell(step, -1);
  if (status != PHX_OK || !(*why = agreement.obstacle()).empty()) return status;
  bool everywhere = true;
  for (const Word &word : agreement.words()) everywhere = everywhere && word.has_kernels != 0;
  gpu.adopt_multicast(std::move(object), everywhere);
  return PHX_OK;
}

}  // namespace

phx_status agree_on_multicast(const char *operation, Group &group, const Block &block, cuda::GpuSymm &gpu,
                              const std::vector<cuda::Facts> &all, const Deadline &deadline) {
  std::string why = obstacle(group, all);
  if (why.empty()) {
    const ErrorInfo before = last_error();  // what fails here fails no call
    const phx_status status = take_steps(operation, group, block, gpu, deadline, &why);
    if (status != PHX_OK) return status;
    set_last_error(before);
  }
  gpu.go_without_multicast(why);
  return PHX_OK;
}

}  // namespace phx
