// Symmetric memory of the library's own on GPUs, through which the collectives of a group on ordinary memory go.
//
// What outgrows it gets a larger one. Those before stay as long as the group: kernels that run and graphs that were
// captured use them. As each is at least twice as large as the last, all together are less than two of the newest.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <vector>

#include "gpu/gpu.h"
#include "gpu/launch.h"
#include "gpu/stream_order.h"
#include "group/turn.h"
#include "symm/symm.h"

namespace phx {

// The workspace of one GPU.
class Workspace {
 public:
  Workspace(AllocatorRef allocator, cuda::Gpus &gpus, const cuda::Gpu &gpu, int number)
      : allocator_(std::move(allocator)), gpus_(gpus), gpu_(gpu), number_(number) {}
  Workspace(const Workspace &) = delete;
  Workspace &operator=(const Workspace &) = delete;

  Symm &symm() const { return *made_.back(); }  // once it is prepared
  char *base() const { return static_cast<char *>(symm().block().base); }
  // Whether kernels of this GPU can reach that memory.
  bool reaches(const void *pointer) const { return cuda::reaches(gpus_.driver(), gpu_, pointer); }
  // What follows on the stream comes after all that went through this workspace, on whatever stream.
  phx_status begin(const char *operation, void *stream);
  phx_status copy(const char *operation, void *to, const void *from, size_t bytes, void *stream) const {
    return cuda::copy_within(operation, gpus_.driver(), gpu_, to, from, bytes, stream);
  }
  phx_status end(const char *operation, void *stream);

 private:
  friend class Workspaces;
  size_t size() const { return made_.empty() ? 0 : symm().block().size; }
  phx_status is_capturing(const char *operation, void *stream, bool *capturing) const {
    return cuda::is_capturing(operation, gpus_.driver(), gpu_, stream, capturing);
  }

  const AllocatorRef allocator_;
  cuda::Gpus &gpus_;
  const cuda::Gpu gpu_;
  const int number_;
  std::vector<std::shared_ptr<Symm>> made_;  // the last one is in use
  cuda::StreamOrder order_;
};

// All of a group. The lock is held from `open` until the call is on its stream.
class Workspaces {
 public:
  explicit Workspaces(Group &group) : group_(group) {}
  TurnMutex &mutex() { return mutex_; }
  // Opens the GPU; asks nobody.
  phx_status open(const char *operation, int32_t index, Workspace **out);
  // Collective. Compares the call with those of the ranks that have come before, and sees to it that the workspace has
  // so many bytes, the same number on all ranks: only where it has not, this waits for the others.
  phx_status prepare(const char *operation, Workspace &workspace, const CallRecord &record, size_t bytes,
                     int64_t timeout_ms, void *stream);

  // The symmetric memory of this rank that kernels may read: the kKnown last ones, which ordinals tell alike on all
  // ranks.
  void know(const Symm &symm);
  void forget(const Symm &symm);  // waits for kernels that may read it
  bool knows(const Symm &symm);
  void list(cuda::Inputs *out);

 private:
  phx_status grow(const char *operation, Workspace &workspace, const CallRecord &record, size_t bytes,
                  int64_t timeout_ms);
  phx_status allocate(Workspace &workspace, size_t bytes, BlockRef *out) const;

  Group &group_;
  TurnMutex mutex_;
  std::map<int32_t, std::unique_ptr<Workspace>> by_index_;
  std::shared_ptr<Symm> newest_;  // of any GPU: the one of the same number on all ranks, where calls are compared
  uint64_t calls_ = 0;
  std::mutex known_mutex_;  // of what is below, and of by_index_ as a list
  std::set<const Symm *> all_known_;
  const Symm *known_[cuda::kKnown] = {};  // by ordinal
  uint64_t end_ = 0;                      // 1 + the last ordinal
};

}  // namespace phx
