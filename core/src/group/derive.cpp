// Groups derived from a group: over its connections, without a store.
#include <algorithm>
#include <cstring>

#include "group/agree.h"
#include "group/group.h"

namespace phx {
namespace {

struct SplitChoice {  // sent by each rank in a split
  int32_t color;
  int32_t key;
};

constexpr const char *kSameDerivation =
    "group with a call that makes a group or agrees. Make such calls from one thread";

int64_t left_ms(const Deadline &deadline) { return std::max<int64_t>(deadline.left_ms(), 1); }
// The rest of the deadline, at least 1 ms.
Deadline left(const Deadline &deadline) { return deadline.part(left_ms(deadline)); }

}  // namespace

GroupParams Group::derived(const std::string &name, const std::vector<int> &members, const std::string &number) const {
  GroupParams params;
  params.name = name;
  for (int member : members) {
    if (member == group_rank()) params.group_rank = static_cast<int>(params.ranks.size());
    params.ranks.push_back(rank_of(member));
  }
  params.attach = params_.attach;
  params.reduction_order = reduction_order_;
  params.key = params_.key + "/" + number;
  return params;
}

phx_status Group::split(int32_t color, int32_t key, const std::string &name, int64_t timeout_ms,
                        std::shared_ptr<Group> *out) {
  const char *operation = "group_split";
  const Deadline deadline = Deadline::after_ms(timeout_ms);
  Turn turn(derive_mutex_, std::defer_lock);
  if (LazyDeadline until(timeout_ms, &world_->progress()); !take_turn(turn, until))
    return raise_turn(operation, kSameDerivation, timeout_ms, true);
  const SplitChoice mine{color, key};
  std::vector<SplitChoice> all;
  PHX_TRY(exchange_all(operation, mine, deadline, &all));
  // Counted only after the exchange. If that fails on any rank, the group is revoked and there are no more splits.
  const std::string number = "split" + std::to_string(++splits_);
  std::vector<std::pair<int32_t, int>> order;  // key, rank
  for (int i = 0; i < size(); ++i)
    if (all[i].color == color) order.emplace_back(all[i].key, i);
  if (color < 0) return PHX_OK;
  std::sort(order.begin(), order.end());
  std::vector<int> members;
  for (const auto &member : order) members.push_back(member.second);
  return create_from(*this, members, derived(name, members, number), left(deadline), true, out);
}

phx_status Group::agree(uint64_t *bits, uint8_t *alive, int64_t timeout_ms) {
  const Deadline deadline = Deadline::after_ms(timeout_ms);
  Turn turn(derive_mutex_, std::defer_lock);
  if (LazyDeadline until(timeout_ms, &world_->progress()); !take_turn(turn, until))
    return raise_turn("group_agree", kSameDerivation, timeout_ms, false);
  Vote vote{*bits, 0, {}};
  PHX_TRY(agree("group_agree", left(deadline), &vote));
  *bits = vote.bits;
  for (int i = 0; alive != nullptr && i < size(); ++i) alive[i] = vote.absent[i] ? 0 : 1;
  return PHX_OK;
}

phx_status Group::shrink(const std::string &name, int64_t timeout_ms, std::shared_ptr<Group> *out) {
  const char *operation = "group_shrink";
  const Deadline deadline = Deadline::after_ms(timeout_ms);
  Turn turn(derive_mutex_, std::defer_lock);
  if (LazyDeadline until(timeout_ms, &world_->progress()); !take_turn(turn, until))
    return raise_turn(operation, kSameDerivation, timeout_ms, false);
  for (;;) {
    Vote survivors{~uint64_t{0}, 0, {}};
    phx_status status = agree(operation, left(deadline), &survivors);
    if (status != PHX_OK) return status;
    const std::string number = "shrink" + std::to_string(agreements_);  // the same on all ranks that have agreed
    std::vector<int> members;
    for (int i = 0; i < size(); ++i)
      if (!survivors.absent[i]) members.push_back(i);
    std::shared_ptr<Group> group;
    // Half of the time remains to agree on whether all survivors have the group, and for another attempt.
    status = create_from(*this, members, derived(name, members, number), deadline.part((left_ms(deadline) + 1) / 2),
                         false, &group);
    const ErrorInfo error = last_error();
    Vote outcome{status == PHX_OK ? uint64_t{1} : uint64_t{0}, 0, survivors.absent};
    PHX_TRY(agree(operation, left(deadline), &outcome));
    if (outcome.bits == 1) {
      *out = std::move(group);
      return PHX_OK;
    }
    if (!deadline.passed() && outcome.absent != survivors.absent) continue;  // another rank died meanwhile
    if (status != PHX_OK) return set_last_error(error);
    return raise(PHX_ERR_TIMEOUT, operation,
                 "%s: not all surviving ranks could make the new group; raise timeout_ms, or shrink again",
                 timed_out(timeout_ms).c_str());
  }
}

}  // namespace phx
