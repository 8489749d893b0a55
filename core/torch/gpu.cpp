#include "gpu.h"

#include <algorithm>
#include <mutex>
#include <string>

#include "errors.h"
#include "gpu_driver.h"
#include "optional_shim.h"

namespace phxt::gpu {
namespace {

uint64_t capture_of(Stream stream) {  // 0: it is not captured
  int status = 0;
  uint64_t id = 0;
  const Result result = driver().capture_info(stream, &status, &id, nullptr, nullptr, nullptr);
  return result == 0 && status == kCapturing ? id : 0;
}

// A point of a stream. Used in the context of its GPU, by whoever holds the table.
class Mark {
 public:
  Mark(int32_t gpu, Stream stream) : gpu_(gpu), stream_(stream), capture_(capture_of(stream)) {
    check(driver().event_create(&event_, kUntimed), "make an event (cuEventCreate)");
    const Result result = driver().event_record(event_, stream);
    if (result != 0) driver().event_destroy(event_);
    check(result, "record an event (cuEventRecord)");
  }
  Mark(const Mark &) = delete;
  Mark &operator=(const Mark &) = delete;
  ~Mark() { driver().event_destroy(event_); }  // which the driver delays until nobody needs it

  int32_t gpu() const { return gpu_; }
  // Whether all that will be put on any stream comes after it. What a graph has captured is ordered by who replays it.
  bool passed() const { return capture_ != 0 ? capture_of(stream_) != capture_ : driver().event_query(event_) == 0; }

  phx_status come_before(Stream stream) const {
    if (stream == stream_) return PHX_OK;
    const uint64_t capture = capture_of(stream);
    if (capture != capture_) {
      if (passed()) return PHX_OK;
      if (capture_ == 0)
        return set_error(PHX_ERR_UNSUPPORTED,
                         "a tensor was written on another stream before this stream's capture began, which cannot wait "
                         "for that: wait for the tensor before the capture");
      if (capture != 0)
        return set_error(
            PHX_ERR_UNSUPPORTED,
            "a tensor is written in another capture than the one of this stream; use it in the capture that writes it");
    }
    const Result result = driver().stream_after(stream, event_, 0);
    return result == 0 ? PHX_OK
                       : set_error(PHX_ERR_DEVICE,
                                   "phalanx could not make a stream wait for another one "
                                   "(cuStreamWaitEvent): the CUDA driver returned error " +
                                       std::to_string(result));
  }

 private:
  const int32_t gpu_;
  const Stream stream_;
  const uint64_t capture_;  // of the stream, when the mark was made
  Event event_ = nullptr;
};

struct Entry {
  Output output;
  const Group *group;
  std::shared_ptr<const Mark> mark;
};

constexpr size_t kSweepAt = 64;

struct Table {  // never destroyed: an op may run while the process exits
  std::mutex mutex;
  std::vector<Entry> entries;
  size_t sweep_at = kSweepAt;

  void count_them() { marks.store(entries.size(), std::memory_order_relaxed); }
  void sweep() {
    const auto over = [](const Entry &entry) {
      const InContext context(entry.mark->gpu());
      return entry.mark->passed();
    };
    entries.erase(std::remove_if(entries.begin(), entries.end(), over), entries.end());
    sweep_at = std::max(kSweepAt, 2 * entries.size());
    count_them();
  }
};
Table &table() {
  static Table *const made = new Table;
  return *made;
}

template <class Matches>
phx_status follow(Matches matches, bool *found) {
  Table &all = table();
  phx_status first = PHX_OK;
  const std::lock_guard lock(all.mutex);
  for (const Entry &entry : all.entries) {
    if (!matches(entry)) continue;
    if (found) *found = true;
    const int32_t gpu = entry.mark->gpu();
    const InContext context(gpu);
    const phx_status status = entry.mark->come_before(current_stream(gpu));
    if (first == PHX_OK) first = status;
  }
  return first;
}

}  // namespace

bool knows_streams() {
  const OptionalShim &shim = optional_shim();
  return shim.aoti_get_current_cuda_stream || (shim.aoti_get_current_stream && shim.stream_native_handle);
}

void *current_stream(int32_t gpu) {
  const OptionalShim &shim = optional_shim();
  void *result = nullptr;
  if (shim.aoti_get_current_cuda_stream) {
    check_torch(shim.aoti_get_current_cuda_stream(gpu, &result), "ask for the current stream");
    return result;
  }
  StreamHandle stream = nullptr;
  check_torch(shim.aoti_get_current_stream(gpu, &stream), "ask for the current stream");
  const AOTITorchError error = shim.stream_native_handle(stream, &result);
  shim.aoti_delete_stream(stream);
  check_torch(error, "ask for the handle of a stream");
  return result;
}

phx_gpu_options options(int32_t gpu) {
  phx_gpu_options result = PHX_GPU_OPTIONS_INIT;
  result.stream = current_stream(gpu);
  result.device = {PHX_DEVICE_CUDA, gpu};
  return result;
}

void leave_mark(const Group *group, const phx_gpu_options &put, const std::vector<Output> &outputs) {
  const InContext context(put.device.index);
  const auto mark = std::make_shared<const Mark>(put.device.index, put.stream);
  Table &all = table();
  const std::lock_guard lock(all.mutex);
  if (all.entries.size() >= all.sweep_at) all.sweep();
  for (const Output &output : outputs)
    if (output.range.begin != output.range.end) all.entries.push_back({output, group, mark});
  all.count_them();
}

bool has_mark(uintptr_t storage) {
  if (!has_marks()) return false;
  Table &all = table();
  const std::lock_guard lock(all.mutex);
  all.sweep();
  return std::any_of(all.entries.begin(), all.entries.end(),
                     [=](const Entry &entry) { return entry.output.storage == storage; });
}

void sweep_marks() {
  Table &all = table();
  const std::lock_guard lock(all.mutex);
  all.sweep();
}

phx_status follow_storage(uintptr_t storage, bool *found) {
  if (storage == 0) return PHX_OK;
  return follow([=](const Entry &entry) { return entry.output.storage == storage; }, found);
}

phx_status follow_overlapping(uintptr_t storage, const Range &range) {
  return follow(
      [&](const Entry &entry) { return entry.output.storage == storage && entry.output.range.overlaps(range); },
      nullptr);
}

phx_status follow_group(const Group *group) {
  return follow([=](const Entry &entry) { return entry.group == group; }, nullptr);
}

}  // namespace phxt::gpu
