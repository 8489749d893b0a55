// Several calls as one operation: a sequence of steps whose rounds follow each other.
//
// all_reduces that are not large and have the same dtype and op become one all_reduce of a buffer that holds them all.
// Small calls of other kinds share one slot, and so one barrier. The rest are steps of their own. What a call becomes
// depends on nothing but the list, which is the same on all ranks.
#include "base/error.h"
#include "base/shared_memory.h"
#include "ops/operation.h"

namespace phx {
namespace {

constexpr size_t kFusedBytes = 16 << 10;   // copying more than this into a buffer costs more than a barrier
constexpr size_t kFusedTotal = 512 << 10;  // the limit of such a buffer, which is to stay in the cache
constexpr size_t kPackedBytes = 64 << 10;  // the limit of a call that shares a slot: the copy is needed anyway
constexpr size_t kPackedAlign = 16;

bool same_reduction(const CoalescedCall &a, const CoalescedCall &b) {
  return a.record.dtype == b.record.dtype && a.record.op == b.record.op && a.record.aux == b.record.aux;
}

// How many bytes of a slot a call needs on every rank.
size_t packed_bytes(const CoalescedCall &call) { return round_up(call.volume.largest, kPackedAlign); }

// Small calls side by side in one slot.
class Packed final : public Operation {
 public:
  explicit Packed(std::vector<CoalescedCall> calls) : Operation({}, 0), calls_(std::move(calls)) {
    size_t at = 0;
    for (const CoalescedCall &call : calls_) {
      places_.push_back(at);
      at += packed_bytes(call);
    }
    reach = at;
  }

  void keep_input(const Keeping &keeping) override {
    keep_inputs(&calls_, {SIZE_MAX, keeping.memory}, &kept_);  // small by construction
  }

  void put(const Lane &lane, uint32_t, uint64_t epoch) override {
    for (size_t i = 0; i < calls_.size(); ++i)
      put_bytes(lane.data(lane.group_rank(), epoch) + places_[i], calls_[i].buffers.in, calls_[i].volume.in);
  }

  phx_status take(const Lane &lane, uint32_t, uint64_t epoch) override {
    for (size_t i = 0; i < calls_.size(); ++i) take_call(lane, epoch, calls_[i], places_[i]);
    return PHX_OK;
  }

 private:
  static void take_call(const Lane &lane, uint64_t epoch, const CoalescedCall &call, size_t place) {
    if (call.volume.out == 0) return;
    const CollectiveTraits &traits = traits_of(call.kind());
    const int n = lane.group_size();
    const size_t bytes = call.buffers.count * call.buffers.item;  // of a block
    char *const out = call.buffers.out;
    if (has_blocks(traits.in)) place += lane.group_rank() * bytes;  // to the block for this rank
    if (traits.root == Root::kGives) return copy_bytes(out, lane.data(call.root(), epoch) + place, bytes);
    const void *inputs[kMaxGroupSize];
    for (int i = 0; i < n; ++i) inputs[i] = lane.data(i, epoch) + place;
    if (traits.reduces) return call.reduction.fn(out, inputs, n, call.buffers.count, n, call.reduction.scale);
    for (int i = 0; i < n; ++i) copy_bytes(out + i * bytes, inputs[i], bytes);
  }

  std::vector<CoalescedCall> calls_;
  std::vector<size_t> places_;
};

// An operation of a list, and the all_reduces for which it stands if there are several: they share a buffer.
struct Step {
  explicit Step(OperationPtr of_one) : operation(std::move(of_one)) {}
  Step(const Plan &plan, std::vector<CoalescedCall> calls) : fused(std::move(calls)) {
    size_t count = 0;
    for (const CoalescedCall &call : fused) count += call.buffers.count;
    const size_t item = fused[0].buffers.item;
    buffer.reset(new char[count * item]);  // not zeroed
    char *to = buffer.get();
    for (const CoalescedCall &call : fused) {
      copy_bytes(to, call.buffers.in, call.volume.in);
      to += call.volume.in;
    }
    operation =
        make_operation(Kind::kAllReduce, plan, {buffer.get(), buffer.get(), count, item}, fused[0].reduction, -1);
  }
  // Called when the operation is complete.
  void deliver() const {
    const char *from = buffer.get();
    for (const CoalescedCall &call : fused) {
      copy_bytes(call.buffers.out, from, call.volume.out);
      from += call.volume.out;
    }
  }

  OperationPtr operation;
  std::vector<CoalescedCall> fused;
  std::unique_ptr<char[]> buffer;  // of `fused`
  uint32_t begin = 0;              // round of the sequence
};

class Sequence final : public Operation {
 public:
  explicit Sequence(std::vector<Step> steps) : Operation({}, 0), steps_(std::move(steps)) {
    rounds = 0;
    reach = 0;
    for (Step &step : steps_) {
      step.begin = rounds;
      rounds += step.operation->rounds;
      reach = std::max(reach, step.operation->reach);
      net = step.operation->net;
    }
    calls = static_cast<uint32_t>(steps_.size());
  }

  void put(const Lane &lane, uint32_t round, uint64_t epoch) override {
    const size_t i = index(round);
    Operation &operation = *steps_[i].operation;
    if (round == steps_[i].begin) {
      operation.first_epoch = epoch;
      operation.first_call = first_call + i;
      operation.sequence = sequence;
      operation.record = record;
    }
    operation.put(lane, round - steps_[i].begin, epoch);
  }
  void keep_own(const Lane &lane, uint32_t round) override {
    const Step &step = steps_[index(round)];
    step.operation->keep_own(lane, round - step.begin);
  }
  phx_status go_on(const Lane &lane, uint32_t round) override {
    const size_t next = round == rounds ? steps_.size() : index(round);
    const bool ends = round == rounds || round == steps_[next].begin;  // the step before
    const Step &step = steps_[ends ? next - 1 : next];
    PHX_TRY(step.operation->go_on(lane, round - step.begin));
    if (ends) step.deliver();
    return PHX_OK;
  }
  phx_status compare() override { return steps_[index(taken)].operation->compare(); }
  std::vector<int> late() const override {
    for (const Step &step : steps_)
      if (std::vector<int> ranks = step.operation->late(); !ranks.empty()) return ranks;
    return {};
  }
  phx_status take(const Lane &lane, uint32_t round, uint64_t epoch) override {
    const Step &step = steps_[index(round)];
    PHX_TRY(step.operation->take(lane, round - step.begin, epoch));
    if (round + 1 == step.begin + step.operation->rounds && net == nullptr)
      step.deliver();  // between hosts go_on completes it
    return PHX_OK;
  }
  bool exclusive() const override {
    return std::any_of(steps_.begin(), steps_.end(), [](const Step &step) { return step.operation->exclusive(); });
  }
  bool takes_input_at_once() const override {
    return steps_.size() == 1 && (!steps_[0].fused.empty() || steps_[0].operation->takes_input_at_once());
  }
  void keep_input(const Keeping &keeping) override {
    for (const Step &step : steps_)
      if (step.fused.empty()) step.operation->keep_input(keeping);
  }

 private:
  size_t index(uint32_t round) const {
    const auto after = std::upper_bound(steps_.begin(), steps_.end(), round,
                                        [](uint32_t at, const Step &step) { return at < step.begin; });
    return static_cast<size_t>(after - steps_.begin()) - 1;
  }

  std::vector<Step> steps_;
};

}  // namespace

void keep_inputs(std::vector<CoalescedCall> *calls, const Keeping &keeping, Kept *copies) {
  const auto kept_bytes = [&](const CoalescedCall &call) {
    return call.volume.in <= keeping.limit ? call.volume.in : 0;
  };
  size_t total = 0;
  for (const CoalescedCall &call : *calls) total += kept_bytes(call);
  *copies = keeping.memory.take(total);
  char *to = copies->get();
  for (CoalescedCall &call : *calls) {
    const size_t bytes = kept_bytes(call);
    if (bytes == 0) continue;
    std::memcpy(to, call.buffers.in, bytes);
    call.buffers.in = to;
    to += bytes;
  }
}

OperationPtr make_coalesced(const Plan &plan, const std::vector<CoalescedCall> &calls) {
  struct Set {
    std::vector<CoalescedCall> calls;
    size_t bytes = 0;
  };
  std::vector<Step> steps;
  std::vector<Set> fused;
  std::vector<CoalescedCall> packed;
  size_t filled = 0;
  const auto flush = [&] {
    if (!packed.empty()) steps.emplace_back(plan.make<Packed>(std::move(packed)));
    packed.clear();
    filled = 0;
  };
  for (const CoalescedCall &call : calls) {
    const size_t bytes = packed_bytes(call);
    if (call.kind() == Kind::kAllReduce && bytes <= kFusedBytes) {
      const auto fits = [&](const Set &set) {
        return set.bytes + bytes <= kFusedTotal && same_reduction(set.calls[0], call);
      };
      auto set = std::find_if(fused.begin(), fused.end(), fits);
      if (set == fused.end()) set = fused.emplace(fused.end());
      set->calls.push_back(call);
      set->bytes += bytes;
    } else if (plan.net == nullptr && call.kind() != Kind::kAllReduce &&
               bytes <= std::min<size_t>(plan.chunk_bytes(), kPackedBytes)) {
      if (filled + bytes > plan.chunk_bytes()) flush();
      packed.push_back(call);
      filled += bytes;
    } else {
      steps.emplace_back(make_operation(call.kind(), plan, call.buffers, call.reduction, call.root()));
    }
  }
  flush();
  for (Set &set : fused)
    if (set.calls.size() == 1)
      steps.emplace_back(make_operation(Kind::kAllReduce, plan, set.calls[0].buffers, set.calls[0].reduction, -1));
    else
      steps.emplace_back(plan, std::move(set.calls));
  if (steps.empty()) steps.emplace_back(make_operation(Kind::kBarrier, plan, {}, {}, -1));
  return plan.make<Sequence>(std::move(steps));
}

}  // namespace phx
