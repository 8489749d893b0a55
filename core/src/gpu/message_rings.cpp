#include "gpu/message_rings.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "gpu/gpu_group.h"

namespace phx {
namespace {

constexpr const char *kKernel = "phx_gpu_messages";
constexpr const char *kSamePath = "group with the first message to or from the same rank";
// With this size a ring, which has kLanes * kDeep chunks, takes two units of 2 MiB, the granularity of memory.
constexpr uint32_t kMostChunk = 63 << 10;
// Not measured yet. If there are fewer blocks than lanes, a block serves several lanes in turn.
constexpr uint32_t kMostBlocks = 32;
static_assert(cuda::ring_bytes(kMostChunk) <= size_t{4} << 20);

// What is sent with the descriptor of a ring to its receiver.
struct Announcement {
  uint64_t chunk_bytes;
  uint64_t unit;  // the granularity of the sender's memory
};

}  // namespace

GpuMessageRings::GpuMessageRings(Group &group) : group_(group), to_(group.size()), from_(group.size()) {}

phx_status GpuMessageRings::put(const char *operation, int32_t index, const std::vector<GpuMessage> &messages,
                                int64_t timeout_ms, void *stream) {
  gpu_of(group_).note_launches();
  // Not failed(), which may be true because another rank has left: what that rank sent before can be received.
  if (group_.interruption(group_.group_rank()).load(std::memory_order_acquire) != 0)
    return group_.raise_revoked(operation);
  const Deadline deadline = Deadline::after_ms(timeout_ms);
  bool capturing = false;
  PHX_TRY(open(operation, index));
  PHX_TRY(check(operation, messages, stream, &capturing));
  PHX_TRY(make(operation, messages, deadline, capturing));
  return messages.empty() ? PHX_OK : launch(operation, messages, timeout_ms, stream, capturing);
}

phx_status GpuMessageRings::open(const char *operation, int32_t index) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (gpus_ != nullptr) {
    if (index == gpu_.index) return PHX_OK;
    return group_.raise(PHX_ERR_UNSUPPORTED, operation,
                        "all messages of a rank must use one GPU; this rank has used CUDA device %d for this group, "
                        "and now gives %d",
                        gpu_.index, index);
  }
  AllocatorRef allocator = group_.world().allocators().get(PHX_DEVICE_CUDA, operation);
  if (!allocator) return PHX_ERR_UNSUPPORTED;
  cuda::Gpus *const gpus = cuda::gpus_of(*allocator);
  if (gpus == nullptr)
    return fail(PHX_ERR_UNSUPPORTED, operation,
                "messages in GPU memory need Phalanx's CUDA allocator, but another one is registered for CUDA; do "
                "not register one");
  cuda::Gpu gpu;
  PHX_TRY(gpus->get(operation, index, &gpu));
  gpus->load(gpu);  // so that a later rendezvous does not wait for messages in flight
  cuda::Function function = nullptr;
  const int32_t threads = std::min(cuda::kLineThreads, gpu.most_threads);
  PHX_TRY(gpus->kernel(operation, gpu, kKernel, threads, &function));
  cuda::MemoryPtr cursors;
  const size_t bytes = 2 * static_cast<size_t>(group_.size()) * cuda::kLanes * sizeof(cuda::Cursor);
  PHX_TRY(cuda::Memory::make(operation, *gpus, index, bytes, &cursors));
  if (const uint32_t first = group_.first_count(); first != 0) {
    const std::vector<cuda::Cursor> begun(bytes / sizeof(cuda::Cursor), {first, 0, 0, 0});
    PHX_TRY(cursors->write(operation, 0, begun.data(), bytes));
  }
  PHX_TRY(gpu_of(group_).open_words(operation, allocator, gpu, &words_));
  allocator_ = std::move(allocator);
  cursors_ = std::move(cursors);
  gpus_ = gpus;
  gpu_ = gpu;
  return PHX_OK;
}

phx_status GpuMessageRings::check(const char *operation, const std::vector<GpuMessage> &messages, void *stream,
                                  bool *capturing) const {
  for (const GpuMessage &message : messages) {
    if (message.sends && group_.interruption(message.peer).load(std::memory_order_acquire) != 0)
      return group_
          .raise(PHX_ERR_PEER_DEAD, operation, "%s has left: its world was finalized",
                 group_.describe(message.peer).c_str())
          .peer(group_.rank_of(message.peer));
    if (message.label.bytes != 0 && !cuda::reaches(gpus_->driver(), gpu_, message.data))
      return fail(PHX_ERR_INVALID, operation,
                  "buffer is not memory that the GPU of phx_gpu_options.device can reach; allocate it on that GPU, "
                  "or name the GPU on which it is");
  }
  return cuda::is_capturing(operation, gpus_->driver(), gpu_, stream, capturing);
}

phx_status GpuMessageRings::make(const char *operation, const std::vector<GpuMessage> &messages,
                                 const Deadline &deadline, bool capturing) {
  bool built = false;
  for (const GpuMessage &message : messages) {
    if (path_of(message).ready.load(std::memory_order_acquire)) continue;
    if (capturing)
      return group_.raise(PHX_ERR_UNSUPPORTED, operation,
                          "the first message %s rank %d needs memory, and cannot be captured: %s one before the "
                          "capture",
                          message.sends ? "to" : "from", group_.rank_of(message.peer),
                          message.sends ? "send" : "receive");
    // The first path of a call builds the rings to all ranks before this one waits for any rank, because others may
    // wait for this one, in whatever order they call. A rank that has left gets no ring, unless something is sent to
    // it.
    for (int i = 0; i < group_.size() && !built; ++i)
      if (i != group_.group_rank() && group_.interruption(i).load(std::memory_order_acquire) == 0)
        PHX_TRY(build(operation, i, deadline));
    built = true;
    if (message.sends || message.peer == group_.group_rank()) PHX_TRY(build(operation, message.peer, deadline));
    if (!message.sends) PHX_TRY(map(operation, message.peer, deadline));
  }
  return PHX_OK;
}

phx_status GpuMessageRings::build(const char *operation, int to, const Deadline &deadline) {
  Path &path = to_[to];
  Turn turn;
  PHX_TRY(group_.take_turn(operation, path.mutex, deadline, kSamePath, true, &turn));
  if (path.ready.load(std::memory_order_relaxed)) return PHX_OK;
  const size_t quarter = std::max<size_t>(group_.world().slot_bytes() / 4, 1);  // smaller in tests
  const auto chunk = static_cast<uint32_t>(round_up(std::min<size_t>(quarter, kMostChunk), 16));
  cuda::MemoryPtr memory;
  PHX_TRY(cuda::Memory::make(operation, *gpus_, gpu_.index, cuda::ring_bytes(chunk), &memory));
  if (const uint32_t first = group_.first_count(); first != 0) {
    const std::vector<cuda::RingWord> begun(2 * cuda::kLanes, {first});  // `put` and `taken`
    PHX_TRY(memory->write(operation, 0, begun.data(), begun.size() * sizeof begun[0]));
  }
  PHX_TRY(path.order.open(operation, gpus_->driver(), gpu_));
  int fd = -1;
  PHX_TRY(memory->export_fd(operation, &fd));
  const Announcement ring{chunk, gpu_.unit};
  if (to != group_.group_rank())
    PHX_TRY(group_.show_ring(operation, to, {reinterpret_cast<const char *>(&ring), sizeof ring}, fd, deadline));
  path.memory = std::move(memory);
  path.chunk_bytes = chunk;
  path.ready.store(true, std::memory_order_release);
  return PHX_OK;
}

phx_status GpuMessageRings::map(const char *operation, int from, const Deadline &deadline) {
  Path &path = from_[from];
  Turn turn;
  PHX_TRY(group_.take_turn(operation, path.mutex, deadline, kSamePath, true, &turn));
  if (path.ready.load(std::memory_order_relaxed)) return PHX_OK;
  PHX_TRY(path.order.open(operation, gpus_->driver(), gpu_));
  if (from == group_.group_rank()) {
    path.chunk_bytes = to_[from].chunk_bytes;
  } else {
    Parcel parcel;
    PHX_TRY(group_.await_ring(operation, from, deadline, &parcel));
    Announcement ring{};
    if (parcel.bytes.size() == sizeof ring) std::memcpy(&ring, parcel.bytes.data(), sizeof ring);
    if (ring.chunk_bytes == 0 || ring.chunk_bytes % 16 != 0 || ring.chunk_bytes > kMostChunk || ring.unit == 0 ||
        parcel.fds.size() != 1)
      return group_.raise_malformed(operation, from);
    const size_t span = cuda::span_of(cuda::ring_bytes(ring.chunk_bytes), ring.unit);
    // A ring is announced only once, so a rank that cannot map it now can never use it.
    if (cuda::Memory::import(operation, *gpus_, gpu_.index, parcel.fds[0].get(), span, &path.memory) != PHX_OK)
      return group_.fail_with(last_error(), true);
    path.chunk_bytes = static_cast<uint32_t>(ring.chunk_bytes);
  }
  path.ready.store(true, std::memory_order_release);
  return PHX_OK;
}

// Half of this rank's share of the GPU, so that the kernels of two streams can run at the same time. Only ranks of one
// process run at the same time on a GPU, or, with MPS, as many ranks as kMostBlocks leaves room for.
uint32_t GpuMessageRings::most_blocks() const {
  int32_t sharing = 0;
  for (int i = 0; i < group_.size(); ++i) sharing += group_.pid_of(i) == getpid() ? 1 : 0;
  const int32_t share = gpu_.processors / std::max(sharing, 1) / 2;
  return std::min(kMostBlocks, static_cast<uint32_t>(std::max(share, 1)));
}

// Lists the messages in `out`, ring after ring. Returns how many blocks to launch.
uint32_t GpuMessageRings::list(const std::vector<GpuMessage> &messages, cuda::Exchange *out,
                               std::vector<Path *> *paths) {
  uint16_t listed = 0;
  for (const GpuMessage &opens : messages) {
    Path *const path = &path_of(opens);
    if (std::find(paths->begin(), paths->end(), path) != paths->end()) continue;
    cuda::GpuMessageRing &ring = out->ring[paths->size()];
    paths->push_back(path);
    const size_t place = (opens.sends ? 0 : group_.size()) + static_cast<size_t>(opens.peer);
    const bool own = opens.sends || opens.peer == group_.group_rank();
    const cuda::Memory &memory = *(own ? to_ : from_)[opens.peer].memory;
    ring.memory = static_cast<char *>(cuda::pointer_of(memory.pointer()));
    ring.cursors = static_cast<cuda::Cursor *>(cuda::pointer_of(cursors_->pointer())) + place * cuda::kLanes;
    ring.chunk_bytes = path->chunk_bytes;
    ring.rank = opens.peer;
    ring.sends = opens.sends ? 1 : 0;
    ring.first = listed;
    for (const GpuMessage &message : messages) {
      if (&path_of(message) != path) continue;
      out->message[listed++] = {message.data, message.label};
      out->lanes = std::max(out->lanes, cuda::lanes_of(message.label.bytes, path->chunk_bytes));
    }
    ring.end = listed;
  }
  out->rings = static_cast<uint32_t>(paths->size());
  return std::min(out->rings * out->lanes, most_blocks());
}

phx_status GpuMessageRings::launch(const char *operation, const std::vector<GpuMessage> &messages, int64_t timeout_ms,
                                   void *stream, bool capturing) {
  const std::lock_guard<std::mutex> lock(mutex_);
  cuda::Exchange exchange{};
  std::vector<Path *> paths;
  const uint32_t blocks = list(messages, &exchange, &paths);
  exchange.timeout_ns = static_cast<uint64_t>(std::min(timeout_ms, Deadline::kMaxMs)) * 1000 * 1000;
  exchange.group_size = group_.size();
  exchange.gone = reinterpret_cast<const int32_t *>(words_.get());
  exchange.failed = words_.get() + group_.size();
  const int32_t threads = std::min(cuda::kLineThreads, gpu_.most_threads);
  cuda::Function function = nullptr;
  phx_status status = gpus_->kernel(operation, gpu_, kKernel, threads, &function);
  if (status != PHX_OK) return group_.fail_with(last_error(), true);
  for (const Path *path : paths)
    if (status == PHX_OK) status = path->order.begin(operation, stream, capturing);
  void *parameters[] = {&exchange, nullptr};
  if (status == PHX_OK)
    status = cuda::launch_kernel(operation, gpus_->driver(), gpu_, function, blocks, threads, stream, parameters);
  for (Path *path : paths)
    if (status == PHX_OK) status = path->order.end(operation, stream, capturing);
  if (status == PHX_OK) return PHX_OK;
  return group_.failed() ? status : group_.fail_with(last_error(), true);  // the other ranks would wait
}

}  // namespace phx
