#include "gpu/gpu_group.h"

#include <algorithm>
#include <cstring>

namespace phx {

static_assert(Group::kReportWords == 1 + cuda::kDifferenceWords);

GpuGroup::GpuGroup(Group &group) : group_(group), workspaces_(group), rings_(std::make_unique<GpuMessageRings>(group)) {
  tuning_.publish(builtin_gpu_tuning(group.size()));
}

phx_status GpuGroup::open_words(const char *operation, const AllocatorRef &allocator, const cuda::Gpu &gpu,
                                std::shared_ptr<uint32_t> *out) {
  const std::lock_guard<std::mutex> lock(words_mutex_);
  if (!words_) {
    const cuda::Driver &driver = cuda::gpus_of(*allocator)->driver();
    void *const words = group_.words().data();
    cuda::Pointer pointer = 0;
    PHX_TRY(cuda::on_gpu(operation, driver, gpu.context, "showing the GPU memory of the host (cuMemHostRegister)", [&] {
      cuda::Result result = driver.host_register(words, group_.words().bytes(), cuda::kForAllContexts);
      if (result != 0) return result;
      result = driver.host_pointer(&pointer, words, 0);
      if (result != 0) driver.host_unregister(words);
      return result;
    }));
    const auto close = [allocator, &driver, context = gpu.context, words](uint32_t *) {
      const cuda::Current current(driver, context);
      driver.host_unregister(words);
    };
    words_.reset(static_cast<uint32_t *>(cuda::pointer_of(pointer)), close);
  }
  *out = words_;
  return PHX_OK;
}

// ---- tuning

phx_status GpuGroup::agree_tuning(const GpuTuning &wish, int64_t timeout_ms) {
  GpuTuning agreed{};
  PHX_TRY(group_.agree_values("group_set_gpu_tuning", wish, builtin_gpu_tuning(group_.size()), timeout_ms, &agreed));
  const std::lock_guard<std::mutex> lock(tuning_mutex_);
  chosen_ = true;
  tuning_.publish(agreed);
  return PHX_OK;
}

void GpuGroup::adopt_table(const GpuPlace &place, const GpuTuning &of_first) {
  const std::lock_guard<std::mutex> lock(tuning_mutex_);
  place_ = place;
  if (chosen_) return;
  chosen_ = true;
  const KeptError kept;
  const GpuTuning merged = merge_tuning(of_first, builtin_gpu_tuning(group_.size()));
  if (check_tuning("symm_rendezvous", merged) == PHX_OK) {
    tuning_.publish(merged);
    return;
  }
  PHX_LOG(PHX_LOG_WARNING,
          "group '%s': the tuning table of rank %d has invalid values for GPUs: %s Built-in values are used.",
          group_.name().c_str(), group_.rank_of(0), last_error().text);
}

phx_status GpuGroup::save_tuning(const char *operation, const std::string &path) {
  const std::lock_guard<std::mutex> lock(tuning_mutex_);
  if (place_.group_size == 0)
    return group_.raise(PHX_ERR_INVALID, operation,
                        "its ranks have not shared GPU memory yet, so it is not known for which GPU the values are. "
                        "Make a rendezvous of GPU memory first");
  return phx::save_gpu_tuning(path, place_, tuning());
}

// ---- failures that kernels report

// The error that a kernel has reported about a message, by the two labels after its word of failures.
ErrorInfo GpuGroup::message_failure(cuda::Report what, int peer) const {
  const bool gone = what >= cuda::Report::kGone, receives = what == cuda::Report::kSendsOther;  // this rank
  if (gone)
    return make_error(PHX_ERR_PEER_DEAD, "messages", group_.self_rank(), group_.rank_of(peer),
                      (group_.describe(peer) + " has left before a message was complete.").c_str());
  cuda::Label labels[2];  // sent, expected
  uint32_t words[cuda::kDifferenceWords];
  for (size_t i = 0; i < cuda::kDifferenceWords; ++i)  // after the word of failures
    words[i] = static_cast<uint32_t>(group_.report_word(1 + i).load(std::memory_order_relaxed));
  std::memcpy(labels, words, sizeof labels);
  const auto describe = [](const cuda::Label &label) {
    return std::to_string(label.bytes) + " bytes of " + phx_dtype_name(static_cast<int32_t>(label.dtype)) +
           " with tag " + std::to_string(label.tag);
  };
  const std::string self = "rank " + std::to_string(group_.self_rank());
  const std::string text = (receives ? group_.describe(peer) : self) + " sends " + describe(labels[0]) + ", and " +
                           (receives ? self : group_.describe(peer)) + " receives " + describe(labels[1]) +
                           ". In GPU memory the messages of two ranks are matched in the order of the calls, whatever "
                           "their tags: make the calls of both ranks agree.";
  return make_error(PHX_ERR_MISMATCH, receives ? "recv" : "send", group_.self_rank(), group_.rank_of(peer),
                    text.c_str());
}

void GpuGroup::note_launches() {
  const int32_t seen = group_.report_word(0).load(std::memory_order_acquire);
  // A negative word: the group had failed, and the kernel saw that. The second condition is not failed(), which is also
  // true when a rank has merely left.
  if (seen <= 0 || group_.interruption(group_.group_rank()).load(std::memory_order_acquire) != 0) return;
  const auto what = static_cast<cuda::Report>((seen - 1) / group_.size());
  const int peer = (seen - 1) % group_.size();
  if (what >= cuda::Report::kSendsOther) {
    group_.fail_with(message_failure(what, peer), true);
    return;
  }
  const bool freed = what == cuda::Report::kFreed, differs = what == cuda::Report::kDisagrees;
  const std::string self = "rank " + std::to_string(group_.self_rank());
  const std::string text = freed ? "the input of " + group_.describe(peer) + " lies in symmetric memory that " + self +
                                       " has freed. Free it on all ranks before the call, or on none."
                           : differs ? group_.describe(peer) + " sends a different number of elements than " + self +
                                           " expects. in_counts[j] on rank i must equal out_counts[i] on rank j."
                                     : "a kernel of " + self + " timed out (the timeout of its launch) waiting for " +
                                           group_.describe(peer) + ". " + group_.advice(peer);
  group_.fail_with(
      make_error(freed || differs ? PHX_ERR_MISMATCH : PHX_ERR_TIMEOUT, differs ? "all_to_all_v" : "launch",
                 group_.self_rank(), group_.rank_of(peer), text.c_str()),
      true);
}

// ---- launches on symmetric memory

phx_status launch(Symm &symm, const char *operation, const std::string &kernel, cuda::Launch launch,
                  const CallRecord *record, int64_t timeout_ms, size_t bytes, const cuda::Lists *lists, void *stream) {
  Group &group = symm.group();
  gpu_of(group).note_launches();
  if (group.failed()) return group.raise_revoked(operation);
  const auto in_order = symm.order_calls();
  if (record != nullptr) PHX_TRY(symm.compare(operation, *record));
  if (kernel.empty()) return PHX_OK;
  launch.timeout_ns = static_cast<uint64_t>(std::min(timeout_ms, Deadline::kMaxMs)) * 1000 * 1000;
  const phx_status status = gpu_symm_of(symm)->launch(operation, kernel, launch, bytes, lists, stream);
  if (status == PHX_OK || status == PHX_ERR_UNSUPPORTED) return status;
  return group.fail_with(last_error(), true);
}

}  // namespace phx
