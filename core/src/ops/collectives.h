// The collectives of one group: an engine for each of its channels.
#pragma once

#include <memory>
#include <vector>

#include "group/group.h"
#include "ops/engine.h"

namespace phx {

class Collectives final : public Attachment {
 public:
  static constexpr AttachmentKind kKind = AttachmentKind::kCollectives;
  explicit Collectives(Group &group);

  Engine &engine(uint32_t channel) { return *engines_[channel]; }
  // Publishes this thread's last error in place of a collective of that channel, and returns its status.
  phx_status refuse(uint32_t channel);

  void open(const std::vector<char *> &areas) override;
  std::vector<ProgressSource *> progress_sources() override;
  void on_failed() override;

 private:
  Group &group_;
  std::vector<std::unique_ptr<Engine>> engines_;
};

inline Collectives &collectives_of(const Group &group) { return group.attached<Collectives>(); }

}  // namespace phx
