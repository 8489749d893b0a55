#include "symm/workspace.h"

#include <algorithm>
#include <cstring>

#include "base/error.h"
#include "cuda/allocator.h"
#include "group/group.h"

namespace phx {
namespace {

constexpr const char *kGrows = "gpu_workspace";  // the operation while the ranks meet: see Group::exchange

// What a rank says before it makes a larger workspace.
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

Workspace::~Workspace() {
  if (last_ == nullptr) return;
  const cuda::Current current(gpus_.driver(), gpu_.context);
  wait();
  gpus_.driver().event_destroy(last_);
}

void Workspace::wait() const {
  const cuda::Current current(gpus_.driver(), gpu_.context);
  gpus_.driver().event_wait(last_);  // at once, where none was recorded
}

phx_status Workspace::open(const char *operation) {
  const cuda::Current current(gpus_.driver(), gpu_.context);
  cuda::Result result = current.result();
  if (result == 0) result = gpus_.driver().event_create(&last_, cuda::kUntimed);
  if (result == 0) return PHX_OK;
  last_ = nullptr;
  return failed(gpus_.driver(), operation, result, "making an event (cuEventCreate)");
}

bool Workspace::reaches(const void *pointer) const {
  const cuda::Current current(gpus_.driver(), gpu_.context);
  int kind = 0;
  return gpus_.driver().pointer_attribute(&kind, cuda::kKindOfMemory, reinterpret_cast<uintptr_t>(pointer)) == 0;
}

phx_status Workspace::is_capturing(const char *operation, void *stream, bool *capturing) const {
  const cuda::Current current(gpus_.driver(), gpu_.context);
  int state = cuda::kNotCapturing;
  const cuda::Result result = gpus_.driver().stream_capturing(static_cast<cuda::Stream>(stream), &state);
  if (result != 0) return failed(gpus_.driver(), operation, result, "asking about the stream (cuStreamIsCapturing)");
  *capturing = state != cuda::kNotCapturing;
  return PHX_OK;
}

// A captured call cannot wait for what was not captured; replays are ordered by whoever replays them.
phx_status Workspace::begin(const char *operation, void *stream) {
  bool capturing = false;
  const phx_status status = is_capturing(operation, stream, &capturing);
  if (status != PHX_OK || capturing || !recorded_) return status;
  const cuda::Current current(gpus_.driver(), gpu_.context);
  const cuda::Result result = gpus_.driver().stream_after(static_cast<cuda::Stream>(stream), last_, 0);
  return result == 0 ? PHX_OK
                     : failed(gpus_.driver(), operation, result, "waiting for another stream (cuStreamWaitEvent)");
}

phx_status Workspace::copy(const char *operation, void *to, const void *from, size_t bytes, void *stream) const {
  if (bytes == 0 || to == from) return PHX_OK;
  const cuda::Current current(gpus_.driver(), gpu_.context);
  const cuda::Result result = gpus_.driver().copy_within(
      reinterpret_cast<uintptr_t>(to), reinterpret_cast<uintptr_t>(from), bytes, static_cast<cuda::Stream>(stream));
  return result == 0 ? PHX_OK
                     : failed(gpus_.driver(), operation, result, "copying memory of the GPU (cuMemcpyDtoDAsync)");
}

phx_status Workspace::end(const char *operation, void *stream) {
  bool capturing = false;
  const phx_status status = is_capturing(operation, stream, &capturing);
  if (status != PHX_OK || capturing) return status;
  const cuda::Current current(gpus_.driver(), gpu_.context);
  const cuda::Result result = gpus_.driver().event_record(last_, static_cast<cuda::Stream>(stream));
  if (result != 0) {  // what could not be waited for later is waited for now
    gpus_.driver().stream_wait(static_cast<cuda::Stream>(stream));
    return failed(gpus_.driver(), operation, result, "recording an event (cuEventRecord)");
  }
  recorded_ = true;
  return PHX_OK;
}

phx_status Workspaces::open(const char *operation, int32_t index, Workspace **out) {
  const auto found = by_index_.find(index);
  if (found != by_index_.end()) {
    *out = found->second.get();
    return PHX_OK;
  }
  AllocatorRef allocator = group_.world().allocators().get(PHX_DEVICE_CUDA, operation);
  if (!allocator) return PHX_ERR_UNSUPPORTED;
  cuda::Gpus *const gpus = cuda::gpus_of(*allocator);
  if (gpus == nullptr)
    return fail(PHX_ERR_UNSUPPORTED, operation,
                "%s: the allocator that was registered for CUDA is not phalanx's, which collectives on ordinary memory "
                "of a GPU need; unregister it, or use symmetric memory",
                operation);
  cuda::Gpu gpu;
  phx_status status = gpus->get(operation, index, &gpu);
  if (status != PHX_OK) return status;
  const int number = static_cast<int>(by_index_.size());
  auto made = std::make_unique<Workspace>(std::move(allocator), *gpus, gpu, number);
  status = made->open(operation);
  if (status != PHX_OK) return status;
  const std::lock_guard<std::mutex> lock(known_mutex_);
  *out = (by_index_[index] = std::move(made)).get();
  return PHX_OK;
}

void Workspaces::know(const Symm &symm) {
  const std::lock_guard<std::mutex> lock(known_mutex_);
  for (; end_ < symm.ordinal(); ++end_) known_[end_ % cuda::kKnown] = nullptr;  // others that are none of these
  known_[end_++ % cuda::kKnown] = &symm;
  all_known_.insert(&symm);
}

void Workspaces::forget(const Symm &symm) {
  const std::lock_guard<std::mutex> lock(known_mutex_);
  if (all_known_.erase(&symm) == 0) return;
  const Symm *&known = known_[symm.ordinal() % cuda::kKnown];
  if (known == &symm) known = nullptr;
  for (const auto &[index, workspace] : by_index_) workspace->wait();
}

bool Workspaces::knows(const Symm &symm) {
  const std::lock_guard<std::mutex> lock(known_mutex_);
  return known_[symm.ordinal() % cuda::kKnown] == &symm;
}

void Workspaces::list(cuda::Inputs *out) {
  const std::lock_guard<std::mutex> lock(known_mutex_);
  out->end = end_;
  for (int i = 0; i < cuda::kKnown; ++i)
    out->known[i] = known_[i] == nullptr ? nullptr : known_[i]->side()->team().buffers;
}

phx_status Workspaces::prepare(const char *operation, Workspace &workspace, const CallRecord &record, size_t bytes,
                               int64_t timeout_ms, void *stream) {
  group_.note_launches();
  if (group_.failed()) return group_.raise_revoked(operation);
  const size_t needed = std::max(bytes, group_.world().slot_bytes());
  const bool grows = needed > workspace.size();
  if (grows) {
    bool capturing = false;
    const phx_status status = workspace.is_capturing(operation, stream, &capturing);
    if (status != PHX_OK) return status;
    if (capturing)
      return fail(
          PHX_ERR_UNSUPPORTED, operation,
          "%s on group '%s': the call needs a workspace of %zu bytes on the GPU, which has %zu, and a larger one "
          "cannot be made while the stream is captured: make one call of that size before the capture",
          operation, group_.name().c_str(), needed, workspace.size());
  }
  CallRecord here = record;  // whose GPU is not the same one of those they use does not match
  if (workspace.number_ != 0) {
    const uint64_t facts[2] = {record.aux, static_cast<uint64_t>(workspace.number_)};
    here.aux = hash_words(facts);
  }
  ++calls_;
  if (newest_) {
    const phx_status status = newest_->agree(operation, here, calls_);
    if (status != PHX_OK) return status;
  }
  return grows ? grow(operation, workspace, here, next_power_of_two(needed), timeout_ms) : PHX_OK;
}

// A block that is in no table.
phx_status Workspaces::allocate(Workspace &workspace, size_t bytes, BlockRef *out) const {
  BlockTable &blocks = group_.world().blocks();
  void *pointer = nullptr;
  const phx_status status =
      blocks.alloc(workspace.allocator_, {PHX_DEVICE_CUDA, workspace.gpu_.index}, bytes, &pointer);
  if (status != PHX_OK) return status;
  *out = blocks.find(pointer);
  BlockRef gone;
  return blocks.free(pointer, &gone);
}

phx_status Workspaces::grow(const char *operation, Workspace &workspace, const CallRecord &record, size_t bytes,
                            int64_t timeout_ms) {
  const Deadline deadline = Deadline::after_ms(timeout_ms);
  LazyDeadline until(deadline, &group_.world().progress());
  Turn turn(group_.symm_mutex(), std::defer_lock);
  if (!take_turn(turn, until))
    return group_.raise_turn(operation, "group with a rendezvous. Let one thread make them", timeout_ms, true);
  BlockRef block;
  Offer mine{};
  mine.record = record;
  mine.bytes = bytes;
  mine.status = allocate(workspace, bytes, &block);
  if (mine.status != PHX_OK) copy_text(mine.text, sizeof mine.text, last_error().text);
  std::vector<Parcel> parcels;
  phx_status status =
      group_.exchange(kGrows, std::string(reinterpret_cast<const char *>(&mine), sizeof mine), {}, deadline, &parcels);
  if (status != PHX_OK) {
    amend_last_error(operation, nullptr, -1, -1);
    return status;
  }
  std::vector<Offer> all(parcels.size());
  for (size_t i = 0; i < all.size(); ++i) {
    if (parcels[i].bytes.size() != sizeof(Offer))
      return fail(PHX_ERR_ABI, operation, "%s on group '%s': rank %d sent a malformed parcel", operation,
                  group_.name().c_str(), group_.rank_of(static_cast<int>(i)));
    std::memcpy(&all[i], parcels[i].bytes.data(), sizeof(Offer));
    all[i].text[sizeof all[i].text - 1] = '\0';
  }
  // Everybody sees the same offers, so everybody comes to the same verdict.
  for (int i = 0; i < group_.size(); ++i)
    if (!(all[i].record == record) || all[i].bytes != bytes)
      return group_.raise_mismatch(operation, calls_, i, all[i].record, record);
  for (int i = 0; i < group_.size(); ++i)
    if (all[i].status != PHX_OK) {
      const bool known = all[i].status < 0 && all[i].status >= PHX_ERR_INTERNAL;
      fail(known ? all[i].status : PHX_ERR_INTERNAL, operation,
           "%s on group '%s': rank %d could not make a workspace of %zu bytes on its GPU: %s", operation,
           group_.name().c_str(), group_.rank_of(i), bytes, all[i].text);
      amend_last_error(nullptr, group_.name().c_str(), group_.self_rank(), group_.rank_of(i));
      return last_error().status;
    }
  std::shared_ptr<Symm> symm;
  status = Symm::rendezvous(group_, block, deadline, &symm);
  if (status != PHX_OK) {
    amend_last_error(operation, nullptr, -1, -1);
    return status;
  }
  workspace.made_.push_back(symm);
  newest_ = std::move(symm);
  return PHX_OK;
}

}  // namespace phx
