// What lives on a group and is not part of it: the engines of its collectives, its messages, its symmetric memory, and
// what it has on GPUs. The rooms above this one derive from Attachment. A group makes them with itself (GroupParams),
// tells them when it opens, fails and ends, and knows nothing else of them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "base/progress.h"

namespace phx {

// Each is at most once on a group, and may use those before it.
enum class AttachmentKind : uint8_t { kSymm, kGpu, kMessages, kCollectives };
inline constexpr size_t kAttachmentKinds = 4;

class Attachment {
 public:
  virtual ~Attachment() = default;

  // How much of each rank's control segment it takes: a multiple of a line, zeroed. The same on all ranks.
  virtual size_t area_bytes() const { return 0; }
  // The counters in this rank's area begin at `first` (Group::first_count). Before any peer maps it.
  virtual void begin_area_at(char *, uint32_t) {}
  // All ranks' segments are mapped. areas[i]: that of group rank i as mapped here, valid as long as the group.
  virtual void open(const std::vector<char *> &) {}
  // What this rank moves on while it waits for something else. They are parts of this object.
  virtual std::vector<ProgressSource *> progress_sources() { return {}; }

  // The group failed or a peer left: those who wait look again. From any thread, also before `open`.
  virtual void on_failed() {}
  // The world has freed the block of that serial number.
  virtual void on_block_freed(uint64_t) {}
  // The group ends; the other attachments are still there. Called for the last kind first.
  virtual void close() {}
};

class Group;

// Makes the attachments of a group, by kind.
using AttachTo = std::vector<std::unique_ptr<Attachment>> (*)(Group &group);

}  // namespace phx
