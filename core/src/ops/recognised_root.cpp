// broadcast and scatter of a root whose input lies in symmetric memory. What the others give or get may lie anywhere.
//
// The root leaves its slot empty and says where its input lies (Place); the others say whether they know symmetric
// memory at all (kReads). If all do, each looks up the root's. One that finds it, reads there. One that does not, as it
// has freed its part of that allocation, says so in the second arrival, which everybody waits for anyway, as then the
// root may change its input. If anybody did, the staged collective follows.
#include "group/lane.h"
#include "ops/recognised.h"
#include "symm/directory.h"

namespace phx {
namespace {

class Rooted final : public Operation {
 public:
  // `held`: of the root.
  Rooted(const Call &call, Kind kind, int root, const Place &where, std::shared_ptr<Symm> held, OperationPtr staged)
      : Operation(call.buffers(), 0),
        group_(call.group()),
        engine_(call.engine()),
        kind_(kind),
        root_(root),
        staged_(std::move(staged)) {
    symm = std::move(held);
    place = where;
    reach = 0;   // its slot is left empty
    rounds = 2;  // at least: nothing younger may pass before it is known what is done
  }

  bool takes_from_places(const Lane &lane, uint64_t epoch) override {
    if (state_ == State::kUndecided) {
      state_ = State::kDirect;
      if (!lane.place(root_, epoch).leaves_slot_empty() || !all_read(lane, epoch))
        turn_to_staged(0);
      else
        prepare(lane, lane.place(root_, epoch));
    }
    return state_ == State::kDirect;
  }

  void put(const Lane &lane, uint32_t round, uint64_t epoch) override {
    if (state_ == State::kStaged) staged_->put(lane, round - base_, epoch);
  }

  phx_status take(const Lane &lane, uint32_t round, uint64_t epoch) override {
    if (state_ == State::kStaged) {
      const phx_status status = staged_->take(lane, round - base_, epoch);
      rounds = base_ + staged_->rounds;
      return status;
    }
    if (round == 0) {
      if (direct_ != nullptr) return direct_->take(lane, 0, epoch);
      place.key = kReads;  // in the next arrival: that it could not
      return PHX_OK;
    }
    place = {};
    for (int i = 0; i < lane.group_size(); ++i)
      if (lane.place(i, epoch).key != 0) {
        turn_to_staged(2);
        return PHX_OK;
      }
    engine_.count_zero_copies(1);
    return PHX_OK;
  }

  uint64_t done_after(uint64_t epoch) const override {
    return state_ == State::kStaged && epoch >= staged_->first_epoch ? staged_->done_after(epoch) : epoch;
  }
  bool exclusive() const override { return state_ == State::kStaged && staged_->exclusive(); }
  bool takes_input_at_once() const override { return false; }
  void end() override {
    direct_.reset();
    symm.reset();
  }

 private:
  enum class State : uint8_t { kUndecided, kDirect, kStaged };

  bool all_read(const Lane &lane, uint64_t epoch) const {
    for (int i = 0; i < lane.group_size(); ++i)
      if (lane.place(i, epoch).key == 0) return false;
    return true;
  }

  void prepare(const Lane &lane, const Place &at) {
    if (!symm) symm = SymmDirectory::of_process().find_key(group_.members(), group_.group_rank(), at.key);
    if (!symm) return;
    direct_ = make_symm(kind_, symm, 0, b_, {}, root_, {lane, group_.tuning(), true});
    if (!direct_->move_input(root_, at.offset)) direct_.reset();
  }

  void turn_to_staged(uint32_t base) {
    state_ = State::kStaged;
    base_ = base;
    staged_->first_epoch = first_epoch + base;
    rounds = base + staged_->rounds;
    reach = staged_->reach;
  }

  Group &group_;
  Engine &engine_;
  const Kind kind_;
  const int root_;
  const OperationPtr staged_;
  SymmOperationPtr direct_;  // NULL: this rank cannot
  State state_ = State::kUndecided;
  uint32_t base_ = 0;  // the round in which the staged one begins
};

}  // namespace

OperationPtr recognise_root(const Call &call, size_t in_bytes, OperationPtr staged, bool blocking, int root) {
  const Group &group = call.group();
  if (call.options().algo != PHX_ALGO_AUTO || (!blocking && in_bytes <= group.eager_bytes())) return staged;
  Place where{kReads, 0};
  std::shared_ptr<Symm> held;
  if (group.group_rank() == root) {
    held = find_input(group, call.buffers().in, in_bytes);
    if (!held) return staged;
    where = {held->key(), static_cast<size_t>(call.buffers().in - static_cast<const char *>(held->block().base))};
  } else if (!may_find_input(group, in_bytes)) {
    return staged;
  }
  return std::make_unique<Rooted>(call, call.kind(), root, where, std::move(held), std::move(staged));
}

}  // namespace phx
