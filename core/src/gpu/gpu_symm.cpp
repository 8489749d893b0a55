#include "gpu/gpu_symm.h"

#include <algorithm>
#include <cstring>

#include "gpu/gpu_group.h"

namespace phx::cuda {
namespace {

constexpr int32_t kThreads = kLineThreads;  // of a block; with 128 registers each, a processor has room for one block
constexpr uint32_t kMostBlocks = 128;       // of a launch; each pad has as many channels for launches

static_assert(sizeof(Launch) + sizeof(Lists) <= 4096, "more than a launch may pass");

}  // namespace

// The words of each writer in a pad: for signals, launches and barriers, rounded up to whole lines.
static uint32_t stride_of(uint32_t channels) { return (channels + kMostBlocks + channels + 31) / 32 * 32; }

GpuSymm::GpuSymm(Gpus &gpus, int size, int self, uint32_t channels)
    : gpus_(gpus),
      driver_(gpus.driver()),
      self_(self),
      channels_(channels),
      layout_(layout_of(size, channels)),
      facts_(size),
      pads_(size) {}

GpuSymm::Layout GpuSymm::layout_of(size_t size, uint32_t channels) {
  Layout layout{};
  size_t at = 0;
  const auto take = [&at](size_t bytes) {
    const size_t begin = at;
    at = round_up(begin + bytes, sizeof(Line));
    return begin;
  };
  take(stride_of(channels) * size * sizeof(uint32_t));
  layout.parts = take(kMostBlocks * size * sizeof(Part));
  layout.shown = take(kMostBlocks * sizeof(Where));
  layout.found = take(kMostBlocks * size * sizeof(char *));
  layout.lines = take(size > kLineRanks ? 0 : 2 * kLineBlocks * kLineThreads * size * sizeof(Line));
  layout.epochs = take(kLineBlocks * sizeof(uint32_t));
  layout.taken = take(channels * size * sizeof(uint32_t));
  layout.addresses = take(2 * size * sizeof(void *));
  layout.bytes = at;
  return layout;
}

phx_status GpuSymm::begin_at(const char *operation, uint32_t first) const {
  const size_t signals = layout_.parts / sizeof(uint32_t);  // the words of all channels
  const std::vector<uint32_t> words(signals, first);
  const auto write = [&](size_t at, size_t count) {
    return pads_[self_]->write(operation, at, words.data(), count * sizeof(uint32_t));
  };
  PHX_TRY(write(0, signals));
  PHX_TRY(write(layout_.epochs, kLineBlocks));
  return write(layout_.taken, channels_ * pads_.size());
}

uint32_t GpuSymm::barrier_channel(uint32_t channel) const { return channels_ + kMostBlocks + channel; }

size_t GpuSymm::line_bytes() const {
  if (pads_.size() > kLineRanks) return 0;
  return std::min<size_t>(kLineBlocks, most_blocks_) * static_cast<size_t>(threads_) * sizeof(uint64_t);
}

phx_status GpuSymm::make(const char *operation, const Block &block, int size, int self, uint32_t channels,
                         uint32_t first, std::unique_ptr<SymmDevice> *out) {
  Gpus *const gpus = block.device.type == PHX_DEVICE_CUDA ? gpus_of(*block.allocator) : nullptr;
  if (gpus == nullptr) return PHX_OK;
  std::unique_ptr<GpuSymm> gpu(new GpuSymm(*gpus, size, self, channels));
  gpu->index_ = block.device.index;
  PHX_TRY(Memory::make(operation, *gpus, gpu->index_, gpu->layout_.bytes, &gpu->pads_[self]));
  if (first != 0) PHX_TRY(gpu->begin_at(operation, first));
  gpu->threads_ = std::min(kThreads, gpu->pads_[self]->gpu().most_threads);
  if (gpu->threads_ < size)  // each thread waits for one rank
    return fail(PHX_ERR_UNSUPPORTED, operation, "at most %d ranks of a group may use GPU memory, and this group has %d",
                gpu->threads_, size);
  gpus->load(gpu->pads_[self]->gpu());
  *out = std::move(gpu);
  return PHX_OK;
}

DeviceFacts GpuSymm::facts() {
  const Gpu &gpu = pads_[self_]->gpu();
  const Facts mine{gpu.uuid,
                   gpu.processors,
                   static_cast<int32_t>(gpu.multicast),
                   gpu.unit,
                   load_gpu_tuning(place(false)),
                   load_gpu_tuning(place(true))};
  facts_[self_] = mine;
  DeviceFacts out{1, 0, {}};
  std::memcpy(out.bytes, &mine, sizeof mine);
  return out;
}

phx_status GpuSymm::adopt(const char *operation, int rank, const DeviceFacts &packed, int fd) {
  Facts &facts = facts_[rank];
  std::memcpy(&facts, packed.bytes, sizeof facts);
  if (facts.unit == 0)
    return fail(PHX_ERR_ABI, operation,
                "a rank did not report the granularity of its GPU's memory; do all ranks run the same build of "
                "phalanx-core?");
  return Memory::import(operation, gpus_, index_, fd, span_of(layout_.bytes, facts.unit), &pads_[rank]);
}

void GpuSymm::on_kept(const Symm &symm) {
  kept_by_ = &gpu_of(symm.group()).workspaces();
  kept_by_->know(symm);
}

void GpuSymm::on_gone(const Symm &symm) {
  if (kept_by_ != nullptr) kept_by_->forget(symm);
}

// All blocks of all launches that wait for each other must be resident at once, and a processor has room for one.
phx_status GpuSymm::count_blocks(const char *operation) {
  most_blocks_ = kMostBlocks;
  for (const Facts &rank : facts_) {
    const auto is_same = [&](const Facts &other) {
      return std::memcmp(&rank.uuid, &other.uuid, sizeof rank.uuid) == 0;
    };
    const auto sharing = static_cast<int32_t>(std::count_if(facts_.begin(), facts_.end(), is_same));
    if (rank.processors < sharing)
      return fail(PHX_ERR_UNSUPPORTED, operation,
                  "%d ranks share a GPU of %d processors, so not all of their kernels could run at once; use fewer "
                  "ranks per GPU",
                  sharing, rank.processors);
    shares_gpus_ = shares_gpus_ || sharing > 1;
    most_blocks_ = std::min(most_blocks_, static_cast<uint32_t>(rank.processors / sharing));
  }
  return PHX_OK;
}

phx_status GpuSymm::finish(const char *operation, Group &group, const BlockRef &block, void *const *buffers) {
  PHX_TRY(count_blocks(operation));
  const Memory &own = *pads_[self_];
  PHX_TRY(gpu_of(group).open_words(operation, block->allocator, own.gpu(), &words_));
  std::vector<void *> addresses(buffers, buffers + pads_.size());
  for (const MemoryPtr &pad : pads_) addresses.push_back(pointer_of(pad->pointer()));
  PHX_TRY(own.write(operation, layout_.addresses, addresses.data(), addresses.size() * sizeof(void *)));
  PHX_TRY(order_.open(operation, driver_, own.gpu()));
  const Pointer at = own.pointer() + layout_.addresses;
  team_.struct_size = sizeof team_;
  team_.group_rank = self_;
  team_.group_size = static_cast<int32_t>(pads_.size());
  team_.channels = channels_;
  team_.pad_stride = stride_of(channels_);
  team_.buffers = static_cast<void *const *>(pointer_of(at));
  team_.pads = static_cast<uint32_t *const *>(pointer_of(at + pads_.size() * sizeof(void *)));
  team_.bytes = block->size;
  team_.failed = reinterpret_cast<const int32_t *>(words_.get());
  return PHX_OK;
}

phx_status GpuSymm::launch(const char *operation, const std::string &kernel, Launch launch, size_t bytes,
                           const Lists *lists, void *stream) {
  const Gpu &gpu = pads_[self_]->gpu();
  Function function = nullptr;
  PHX_TRY(gpus_.kernel(operation, gpu, kernel, threads_, &function));
  launch.team = team_;
  launch.taken = static_cast<uint32_t *>(pointer_of(pads_[self_]->pointer() + layout_.taken));
  launch.epochs = static_cast<uint32_t *>(pointer_of(pads_[self_]->pointer() + layout_.epochs));
  launch.parts = layout_.parts;
  launch.lines = layout_.lines;
  launch.inputs.shown = layout_.shown;
  launch.inputs.found = static_cast<char **>(pointer_of(pads_[self_]->pointer() + layout_.found));
  launch.failed = words_.get() + pads_.size();
  const size_t worth = bytes == 0 ? 1 : (bytes - 1) / (static_cast<size_t>(threads_) * 16) + 1;
  const uint32_t blocks = static_cast<uint32_t>(std::min<size_t>(worth, most_blocks_));
  void *parameters[] = {&launch, const_cast<Lists *>(lists)};
  const std::lock_guard<std::mutex> lock(mutex_);
  PHX_TRY(launch_kernel(operation, driver_, gpu, function, blocks, threads_, stream, parameters));
  // A captured launch runs later, and the caller that replays it must keep the memory.
  bool capturing = false;
  if (is_capturing(operation, driver_, gpu, stream, &capturing) != PHX_OK || capturing) return PHX_OK;
  order_.end(operation, stream, false);  // if it fails, it has waited for the stream
  return PHX_OK;
}

}  // namespace phx::cuda
