// What a rank does whose own arguments of a collective call are wrong: see docs/adr/0039.
#include <algorithm>
#include <cstring>

#include "base/interrupt.h"
#include "group/agree.h"
#include "group/group.h"

namespace phx {
// Nobody is to be told by a world that is over, by a child of its process, or by a hook that runs inside another call.
bool Group::may_tell() const { return size() > 1 && !world_->finalized() && !world_->forked() && !in_interrupt_hook(); }
bool Group::may_refuse() const { return may_tell() && !failed(); }

// A rank that refuses an agreement is absent from it, and says so: the others do not wait for it.
phx_status Group::refuse_agreement() {
  const KeptError error;
  LazyDeadline until(world_->default_timeout_ms(), &world_->progress());
  Turn turn(derive_mutex_, std::defer_lock);
  // Also where the group has failed: it may be agreed on all the same.
  if (may_tell() && take_turn(turn, until)) {
    Opinion mine{~uint64_t{0}, 0, {}};
    mine.absent.set(static_cast<size_t>(group_rank()));
    const Envelope envelope{
        kWireMagic, MessageKind::kExchange, 0, id_, agreement_ordinal(++agreements_, 0), sizeof mine, 0};
    for (const LinkRef &link : links_)
      if (link) world_->monitor().post(link, envelope, &mine);
  }
  return error.info().status;
}

}  // namespace phx
