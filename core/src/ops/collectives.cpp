#include "ops/collectives.h"

#include <cstring>
#include <utility>

#include "net/net.h"

namespace phx {
namespace {

// Published in place of a call that this rank refused, so that ranks that make the call see that theirs differs.
class Refusal final : public Operation {
 public:
  explicit Refusal(const char *why) : Operation({}, 0), why_(why) {
    record.operation = static_cast<uint8_t>(Kind::kRefused);
  }
  void put(const Lane &lane, uint32_t, uint64_t epoch) override {
    copy_text(lane.data(lane.group_rank(), epoch), lane.slot_bytes(), why_.c_str());
  }
  phx_status take(const Lane &, uint32_t, uint64_t) override { return PHX_OK; }

 private:
  const std::string why_;
};

}  // namespace

Collectives::Collectives(Group &group) : group_(group) {
  for (uint32_t i = 0; i < group.channels(); ++i) engines_.push_back(std::make_unique<Engine>(&group, &group.lane(i)));
}

void Collectives::open(const std::vector<char *> &) {
  for (const auto &engine : engines_) engine->begin_at(group_.first_count());
}

std::vector<ProgressSource *> Collectives::progress_sources() {
  std::vector<ProgressSource *> sources;
  for (const auto &engine : engines_) sources.push_back(engine.get());
  return sources;
}

// Skips channels that were never used: they have no waiters, and waking would touch their memory. A thread that uses
// one for the first time at this moment sees the interruption after a slice of its sleep.
void Collectives::on_failed() {
  for (uint32_t i = 0; i < group_.channels(); ++i)
    if (engines_[i]->sequence() != 0) group_.lane(i).wake_waiters();
}

phx_status Collectives::refuse(uint32_t channel) {
  const KeptError error;
  WorkRef work;
  OperationPtr refusal = std::make_unique<Refusal>(error.info().text);
  if (group_.spans_hosts()) {
    const Plan plan{group_.lane(channel), group_.tuning(), false, &net_of(group_), channel};
    refusal = make_between_hosts(Kind::kRefused, plan, {}, {}, -1, error.info().text);
    refusal->record.operation = static_cast<uint8_t>(Kind::kRefused);
  }
  if (group_.may_refuse()) engines_[channel]->start(std::move(refusal), group_.world().default_timeout_ms(), &work);
  return error.info().status;
}

}  // namespace phx
