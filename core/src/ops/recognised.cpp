#include "ops/recognised.h"

#include "base/hash.h"
#include "group/lane.h"
#include "symm/directory.h"

namespace phx {
namespace {

// Below kSmallestInput, a copy costs less than a second barrier; which takes long if ranks wait for each other's turn
// on a core.
constexpr size_t kSmallestCrowded = size_t{256} << 10;

class Recognised final : public Operation {
 public:
  Recognised(Engine &engine, OperationPtr staged, SymmOperationPtr direct, const Place &where)
      : Operation({}, 0), engine_(engine), staged_(std::move(staged)), direct_(std::move(direct)) {
    place = where;
    reach = 0;                 // its slot is left empty
    rounds = direct_->rounds;  // nothing younger may pass before it is known what is done
  }

  bool takes_from_places(const Lane &lane, uint64_t epoch) override {
    if (chosen_ == nullptr) {
      chosen_ = all_direct(lane, epoch) ? static_cast<Operation *>(direct_.get()) : staged_.get();
      chosen_->first_epoch = first_epoch;
      rounds = chosen_->rounds;
      reach = chosen_->reach;
      if (chosen_ == direct_.get()) engine_.count_zero_copies(1);
    }
    return chosen_ == direct_.get();
  }

  void put(const Lane &lane, uint32_t round, uint64_t epoch) override {
    if (chosen_ != nullptr) chosen_->put(lane, round, epoch);
  }
  phx_status take(const Lane &lane, uint32_t round, uint64_t epoch) override {
    const phx_status status = chosen_->take(lane, round, epoch);
    rounds = chosen_->rounds;
    return status;
  }
  uint64_t done_after(uint64_t epoch) const override { return chosen_->done_after(epoch); }
  bool exclusive() const override { return chosen_ != nullptr && chosen_->exclusive(); }
  bool takes_input_at_once() const override { return false; }
  void end() override { direct_->end(); }

 private:
  bool all_direct(const Lane &lane, uint64_t epoch) {
    const uint64_t key = lane.place(lane.group_rank(), epoch).key;
    for (int i = 0; i < lane.group_size(); ++i) {
      const Place at = lane.place(i, epoch);
      if (at.key != key || !direct_->move_input(i, at.offset)) return false;
    }
    return true;
  }

  Engine &engine_;
  const OperationPtr staged_;
  const SymmOperationPtr direct_;
  Operation *chosen_ = nullptr;
};

// Where this rank's input lies, if that is of use.
std::shared_ptr<Symm> find(const Call &call, size_t in_bytes, bool blocking) {
  if (call.options().algo != PHX_ALGO_AUTO) return nullptr;
  // An input that is taken before the start returns may be changed after it.
  if (!blocking && in_bytes <= call.group().eager_bytes()) return nullptr;
  return find_input(call.group(), call.buffers().in, in_bytes);
}

size_t offset_in(const Symm &symm, const Call &call) {
  return static_cast<size_t>(call.buffers().in - static_cast<const char *>(symm.block().base));
}

OperationPtr combine(const Call &call, const Symm &symm, OperationPtr staged, SymmOperationPtr direct) {
  // What all ranks must have alike beside the call: the allocation, and whether it is done in place.
  const bool in_place = call.kind() == Kind::kAllReduce && call.buffers().in == call.buffers().out;
  const uint64_t facts[2] = {symm.key(), in_place};
  return std::make_unique<Recognised>(call.engine(), std::move(staged), std::move(direct),
                                      Place{hash_words(facts) | 1, offset_in(symm, call)});
}

}  // namespace

bool pays_to_look(const Group &group, size_t in_bytes) {
  return in_bytes >= kSmallestInput && group.size() != 1 && (in_bytes >= kSmallestCrowded || !group.is_crowded());
}

std::shared_ptr<Symm> find_input(const Group &group, const void *in, size_t in_bytes) {
  const SymmDirectory &directory = SymmDirectory::of_process();
  if (!pays_to_look(group, in_bytes) || directory.empty()) return nullptr;
  return directory.find(group.members(), group.group_rank(), static_cast<const char *>(in), in_bytes);
}

bool may_find_input(const Group &group, size_t in_bytes) {
  const SymmDirectory &directory = SymmDirectory::of_process();
  return pays_to_look(group, in_bytes) && !directory.empty() && directory.has_any(group.members(), group.group_rank());
}

OperationPtr recognise(const Call &call, size_t in_bytes, OperationPtr staged, bool blocking, int root) {
  const std::shared_ptr<Symm> symm = find(call, in_bytes, blocking);
  if (!symm) return staged;
  return combine(
      call, *symm, std::move(staged),
      make_symm(call.kind(), symm, offset_in(*symm, call), call.buffers(), call.reduction(), root, call.plan(nullptr)));
}

OperationPtr recognise_all_to_all_v(const Call &call, size_t in_bytes, OperationPtr staged, bool blocking,
                                    const size_t *in_counts, const size_t *out_counts) {
  const std::shared_ptr<Symm> symm = find(call, in_bytes, blocking);
  if (!symm) return staged;
  return combine(call, *symm, std::move(staged),
                 make_symm_all_to_all_v(call.group(), call.name(), symm, offset_in(*symm, call), call.buffers(),
                                        in_counts, out_counts, 1));
}

}  // namespace phx
