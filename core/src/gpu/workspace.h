// Symmetric GPU memory of this library, through which the collectives of a group on ordinary GPU memory pass.
//
// A call that needs more gets a larger allocation. The earlier ones stay as long as the group, because running kernels
// and captured graphs use them. Each is at least twice as large as the last, so all together have less than twice the
// size of the newest.
#pragma once

#include <map>
#include <set>

#include "gpu/launch.h"
#include "gpu/stream_order.h"
#include "symm/symm.h"

namespace phx {

// The workspace of one GPU.
class Workspace {
 public:
  Workspace(AllocatorRef allocator, cuda::Gpus &gpus, const cuda::Gpu &gpu, int number)
      : allocator_(std::move(allocator)), gpus_(gpus), gpu_(gpu), number_(number) {}

  Symm &symm() const { return *allocations_.back(); }  // valid after Workspaces::prepare
  char *base() const { return static_cast<char *>(symm().block().base); }
  // Whether kernels of this GPU can reach the memory at `pointer`.
  bool reaches(const void *pointer) const { return cuda::reaches(gpus_.driver(), gpu_, pointer); }
  // Makes later work on the stream wait for all work that has used this workspace, on any stream.
  phx_status begin(const char *operation, void *stream);
  phx_status copy(const char *operation, void *to, const void *from, size_t bytes, void *stream) const {
    return cuda::copy_within(operation, gpus_.driver(), gpu_, to, from, bytes, stream);
  }
  phx_status end(const char *operation, void *stream);

 private:
  friend class Workspaces;
  size_t size() const { return allocations_.empty() ? 0 : symm().block().size; }
  phx_status is_capturing(const char *operation, void *stream, bool *capturing) const {
    return cuda::is_capturing(operation, gpus_.driver(), gpu_, stream, capturing);
  }

  const AllocatorRef allocator_;
  cuda::Gpus &gpus_;
  const cuda::Gpu gpu_;
  const int number_;
  std::vector<std::shared_ptr<Symm>> allocations_;  // the last one is in use
  cuda::StreamOrder order_;
};

// All workspaces of a group. The lock is held from `open` until the call is on its stream.
class Workspaces {
 public:
  explicit Workspaces(Group &group) : group_(group) {}
  TurnMutex &mutex() { return mutex_; }
  // Opens the GPU, without communication.
  phx_status open(const char *operation, int32_t index, Workspace **out);
  // Collective. Compares the call with those of the ranks that have come before, and ensures that the workspace has
  // `bytes`, which is the same on all ranks. Waits for the other ranks only if the workspace must grow.
  phx_status prepare(const char *operation, Workspace &workspace, const CallRecord &record, size_t bytes,
                     int64_t timeout_ms, void *stream);

  // The symmetric allocations of this rank that kernels may read: the last kKnown ones, by their ordinals, which are
  // the same on all ranks.
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
  std::shared_ptr<Symm> newest_;  // of any GPU, the same on all ranks: there calls are compared
  uint64_t calls_ = 0;
  std::mutex known_mutex_;  // guards the members below, and by_index_ as a list
  std::set<const Symm *> all_known_;
  const Symm *known_[cuda::kKnown] = {};  // by ordinal
  uint64_t end_ = 0;                      // 1 + the last ordinal
};

}  // namespace phx
