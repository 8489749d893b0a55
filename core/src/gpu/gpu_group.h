// What one group has on the GPUs of its rank: the words that kernels read and write, the tuning, the workspaces of its
// collectives and the rings of its messages.
#pragma once

#include "gpu/gpu_symm.h"
#include "gpu/message_rings.h"
#include "gpu/workspace.h"
#include "group/group.h"

namespace phx {

class GpuGroup final : public Attachment {
 public:
  static constexpr AttachmentKind kKind = AttachmentKind::kGpu;
  explicit GpuGroup(Group &group);

  // The words of the group (Group::words) as GPUs of this process see them; the first call registers them with the
  // driver, for as long as any copy of *out lives.
  phx_status open_words(const char *operation, const AllocatorRef &allocator, const cuda::Gpu &gpu,
                        std::shared_ptr<uint32_t> *out);
  Workspaces &workspaces() { return workspaces_; }
  GpuMessageRings &rings() { return *rings_; }
  // Fails the group, for this and all later calls, if a kernel has reported a failure.
  void note_launches();

  // The same on all ranks.
  const GpuTuning &tuning() const { return tuning_.get(); }
  phx_status agree_tuning(const GpuTuning &wish, int64_t timeout_ms);  // collective
  // Called at every rendezvous of GPU memory. `place`: where this rank is. `of_first`: the table of group rank 0, which
  // is used unless other values were chosen before.
  void adopt_table(const GpuPlace &place, const GpuTuning &of_first);
  phx_status save_tuning(const char *operation, const std::string &path);

  void close() override { rings_.reset(); }

 private:
  ErrorInfo message_failure(cuda::Report what, int peer) const;

  Group &group_;
  std::mutex words_mutex_;
  std::shared_ptr<uint32_t> words_;
  Workspaces workspaces_;
  std::unique_ptr<GpuMessageRings> rings_;
  Published<GpuTuning> tuning_;
  std::mutex tuning_mutex_;
  bool chosen_ = false;  // by a caller, or by the table at the first rendezvous
  GpuPlace place_;       // group_size 0: no GPU memory has been shared yet
};

inline GpuGroup &gpu_of(const Group &group) { return group.attached<GpuGroup>(); }

// NULL: the allocation is not from the CUDA allocator of this library.
inline cuda::GpuSymm *gpu_symm_of(const Symm &symm) { return static_cast<cuda::GpuSymm *>(symm.device()); }

// Puts a kernel on a stream: see GpuSymm::launch. An error fails the group, because the kernels of the other ranks
// would wait. `record`: of a collective, to be compared with those of the others; NULL for calls that are not
// collective. An empty `kernel`: nothing is launched.
phx_status launch(Symm &symm, const char *operation, const std::string &kernel, cuda::Launch launch,
                  const CallRecord *record, int64_t timeout_ms, size_t bytes, const cuda::Lists *lists, void *stream);

}  // namespace phx
