#include "gpu/workspace.h"

#include <algorithm>

#include "base/hash.h"
#include "gpu/gpu_group.h"
#include "symm/table.h"

namespace phx {
namespace {

constexpr const char *kGrows = "gpu_workspace";  // the operation during the exchange: see Group::exchange

// What a rank publishes before a larger workspace is made.
struct Offer {
  CallRecord record;  // of the call that needs it
  uint64_t bytes;
  int32_t status;  // of its allocation
  int32_t reserved;
  char text[256];  // why it failed
};

size_t next_power_of_two(size_t bytes) {
  size_t power = 1;
  while (power < bytes) power *= 2;
  return power;
}

}  // namespace

phx_status Workspace::begin(const char *operation, void *stream) {
  bool capturing = false;
  PHX_TRY(is_capturing(operation, stream, &capturing));
  return order_.begin(operation, stream, capturing);
}

phx_status Workspace::end(const char *operation, void *stream) {
  bool capturing = false;
  PHX_TRY(is_capturing(operation, stream, &capturing));
  return order_.end(operation, stream, capturing);
}

phx_status Workspaces::open(const char *operation, int32_t index, Workspace **out) {
  const auto it = by_index_.find(index);
  if (it != by_index_.end()) {
    *out = it->second.get();
    return PHX_OK;
  }
  AllocatorRef allocator = group_.world().allocators().get(PHX_DEVICE_CUDA, operation);
  if (!allocator) return PHX_ERR_UNSUPPORTED;
  cuda::Gpus *const gpus = cuda::gpus_of(*allocator);
  if (gpus == nullptr)
    return fail(PHX_ERR_UNSUPPORTED, operation,
                "collectives on ordinary GPU memory need Phalanx's CUDA allocator, but another one is registered "
                "for CUDA; do not register one, or use symmetric memory");
  cuda::Gpu gpu;
  PHX_TRY(gpus->get(operation, index, &gpu));
  const int number = static_cast<int>(by_index_.size());
  auto workspace = std::make_unique<Workspace>(std::move(allocator), *gpus, gpu, number);
  PHX_TRY(workspace->order_.open(operation, gpus->driver(), gpu));
  const std::lock_guard<std::mutex> lock(known_mutex_);
  *out = (by_index_[index] = std::move(workspace)).get();
  return PHX_OK;
}

void Workspaces::know(const Symm &symm) {
  const std::lock_guard<std::mutex> lock(known_mutex_);
  for (; end_ < symm.ordinal(); ++end_) known_[end_ % cuda::kKnown] = nullptr;  // ordinals of non-GPU allocations
  known_[end_++ % cuda::kKnown] = &symm;
  all_known_.insert(&symm);
}

void Workspaces::forget(const Symm &symm) {
  const std::lock_guard<std::mutex> lock(known_mutex_);
  if (all_known_.erase(&symm) == 0) return;
  const Symm *&slot = known_[symm.ordinal() % cuda::kKnown];
  if (slot == &symm) slot = nullptr;
  for (const auto &[index, workspace] : by_index_) workspace->order_.wait();
}

bool Workspaces::knows(const Symm &symm) {
  const std::lock_guard<std::mutex> lock(known_mutex_);
  return known_[symm.ordinal() % cuda::kKnown] == &symm;
}

void Workspaces::list(cuda::Inputs *out) {
  const std::lock_guard<std::mutex> lock(known_mutex_);
  out->end = end_;
  for (int i = 0; i < cuda::kKnown; ++i)
    out->known[i] = known_[i] == nullptr ? nullptr : gpu_symm_of(*known_[i])->team().buffers;
}

phx_status Workspaces::prepare(const char *operation, Workspace &workspace, const CallRecord &record, size_t bytes,
                               int64_t timeout_ms, void *stream) {
  gpu_of(group_).note_launches();
  if (group_.failed()) return group_.raise_revoked(operation);
  const size_t needed = std::max(bytes, group_.world().slot_bytes());
  const bool grows = needed > workspace.size();
  if (grows) {
    bool capturing = false;
    PHX_TRY(workspace.is_capturing(operation, stream, &capturing));
    if (capturing)
      return group_.raise(PHX_ERR_UNSUPPORTED, operation,
                          "the call needs a workspace of %zu bytes on the GPU, which has %zu, and a larger one cannot "
                          "be made while the stream is captured: make one call of that size before the capture",
                          needed, workspace.size());
  }
  CallRecord own = record;  // calls of ranks whose GPUs do not have the same number do not match
  if (workspace.number_ != 0) {
    const uint64_t facts[2] = {record.aux, static_cast<uint64_t>(workspace.number_)};
    own.aux = hash_words(facts);
  }
  ++calls_;
  if (newest_) {
    const auto in_order = newest_->order_calls();
    PHX_TRY(newest_->compare(operation, own, calls_));
  }
  return grows ? grow(operation, workspace, own, next_power_of_two(needed), timeout_ms) : PHX_OK;
}

// Allocates a block and removes it from the table of blocks: `out` alone keeps it.
phx_status Workspaces::allocate(Workspace &workspace, size_t bytes, BlockRef *out) const {
  BlockTable &blocks = group_.world().blocks();
  void *pointer = nullptr;
  PHX_TRY(blocks.alloc(workspace.allocator_, {PHX_DEVICE_CUDA, workspace.gpu_.index}, bytes, &pointer));
  *out = blocks.find(pointer);
  BlockRef removed;
  return blocks.free(pointer, &removed);
}

phx_status Workspaces::grow(const char *operation, Workspace &workspace, const CallRecord &record, size_t bytes,
                            int64_t timeout_ms) {
  const Deadline deadline = Deadline::after_ms(timeout_ms);
  Turn turn;
  PHX_TRY(group_.take_turn(operation, symms_of(group_).mutex(), deadline, kSameRendezvous, true, &turn));
  BlockRef block;
  Offer mine{};
  mine.record = record;
  mine.bytes = bytes;
  mine.status = allocate(workspace, bytes, &block);
  if (mine.status != PHX_OK) copy_text(mine.text, sizeof mine.text, last_error().text);
  std::vector<Offer> all;
  phx_status status = group_.exchange_all(kGrows, mine, deadline, &all);
  if (status != PHX_OK) return Failed(status).operation(operation);
  for (Offer &offer : all) offer.text[sizeof offer.text - 1] = '\0';
  // All ranks see the same offers, so all return the same error.
  for (int i = 0; i < group_.size(); ++i)
    if (!(all[i].record == record) || all[i].bytes != bytes)
      return group_.raise_mismatch(operation, calls_, i, all[i].record, record);
  for (int i = 0; i < group_.size(); ++i)
    if (all[i].status != PHX_OK) {
      const bool is_status = all[i].status < 0 && all[i].status >= PHX_ERR_INTERNAL;
      return group_
          .raise(is_status ? all[i].status : PHX_ERR_INTERNAL, operation,
                 "rank %d could not make a workspace of %zu bytes on its GPU: %s", group_.rank_of(i), bytes,
                 all[i].text)
          .peer(group_.rank_of(i));
    }
  std::shared_ptr<Symm> symm;
  status = Symm::rendezvous(group_, block, deadline, &symm);
  if (status != PHX_OK) return Failed(status).operation(operation);
  workspace.allocations_.push_back(symm);
  newest_ = std::move(symm);
  return PHX_OK;
}

}  // namespace phx
