// Parts of a group that the layers above it implement: the engines of its collectives, its messages, its windows, its
// symmetric memory, and its state on GPUs. These layers derive from Attachment. A group creates its attachments in its
// constructor (GroupParams::attach), calls them when it opens, fails and ends, and knows nothing else about them.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "base/deadline.h"
#include "base/progress.h"
#include "phalanx/phalanx.h"

namespace phx {

// A group has one attachment of each kind, which may use those of the kinds before it.
enum class AttachmentKind : uint8_t { kSymm, kGpu, kNet, kMessages, kWindows, kCollectives };
inline constexpr size_t kAttachmentKinds = 6;

class Attachment {
 public:
  virtual ~Attachment() = default;

  // The size of its area in each rank's control segment, which is zeroed: a multiple of kLine, the same on all ranks.
  virtual size_t area_bytes() const { return 0; }
  // Sets the counters in this rank's area to `first` (Group::first_count), before any peer maps it.
  virtual void begin_area_at(char *, uint32_t) {}
  // Called once the segments of all ranks are mapped. areas[i]: that of group rank i, valid as long as the group; NULL
  // for a rank of another host.
  virtual void open(const std::vector<char *> &) {}
  // For groups that span hosts. `prepare` is called before anything is sent: an error says why this rank cannot serve
  // such a group. `connect` is called last, by all ranks together.
  virtual phx_status prepare() { return PHX_OK; }
  virtual phx_status connect(const Deadline &) { return PHX_OK; }
  // The sources that this rank advances while it waits for something else. They are members of this object.
  virtual std::vector<ProgressSource *> progress_sources() { return {}; }

  // The group failed or a peer left: waiting threads must check again. Called by any thread, also before `open`.
  virtual void on_failed() {}
  // The world of this rank is about to be finalized, and the group has not failed: what others were sent must go.
  virtual void flush() {}
  // The group ends; the other attachments still exist. Called for the last kind first.
  virtual void close() {}
};

class Group;

using Attachments = std::array<std::unique_ptr<Attachment>, kAttachmentKinds>;  // by kind
// Creates the attachments of a group.
using AttachTo = Attachments (*)(Group &group);

}  // namespace phx
