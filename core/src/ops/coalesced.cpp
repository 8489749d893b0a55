// Several calls as one operation: a sequence of steps whose rounds follow each other.
//
// all_reduces that are not large and have the same dtype and op become one all_reduce of a buffer that holds them all.
// Small calls of other kinds share one slot, and so one barrier. The rest are steps of their own. What a call becomes
// depends on nothing but the list, which is the same on all ranks.
#include "ops/coalesced.h"

#include <algorithm>

#include "base/shared_memory.h"
#include "group/lane.h"
#include "net/net.h"

namespace phx {
namespace {

constexpr size_t kFusedBytes = 16 << 10;   // copying more than this into a buffer costs more than a barrier
constexpr size_t kFusedTotal = 512 << 10;  // the limit of such a buffer, which is to stay in the cache
constexpr size_t kPackedBytes = 64 << 10;  // the limit of a call that shares a slot: the copy is needed anyway
constexpr size_t kPackedAlign = 16;

bool same_reduction(const CoalescedCall &a, const CoalescedCall &b) {
  return a.record.dtype == b.record.dtype && a.record.op == b.record.op && a.record.aux == b.record.aux;
}

// Several all_reduce calls as one, on a buffer that holds all their inputs.
class Fused final : public Operation {
 public:
  Fused(const Plan &plan, std::vector<CoalescedCall> calls) : Operation({}, 0), calls_(std::move(calls)) {
    size_t count = 0;
    for (const CoalescedCall &call : calls_) count += call.buffers.count;
    const size_t item = calls_[0].buffers.item;
    buffer_.reset(new char[count * item]);  // not zeroed
    char *to = buffer_.get();
    for (const CoalescedCall &call : calls_) {
      copy_bytes(to, call.buffers.in, call.buffers.count * item);
      to += call.buffers.count * item;
    }
    inner_ =
        make_operation(Kind::kAllReduce, plan, {buffer_.get(), buffer_.get(), count, item}, calls_[0].reduction, -1);
    rounds = inner_->rounds;
    reach = inner_->reach;
    net = inner_->net;
  }

  void put(const Lane &lane, uint32_t round, uint64_t epoch) override {
    inner_->first_epoch = first_epoch;
    inner_->first_call = first_call;
    inner_->sequence = sequence;
    inner_->record = record;
    inner_->put(lane, round, epoch);
  }
  phx_status take(const Lane &lane, uint32_t round, uint64_t epoch) override {
    const phx_status status = inner_->take(lane, round, epoch);
    if (status == PHX_OK && round + 1 == rounds && net == nullptr) deliver();
    return status;
  }
  phx_status go_on(const Lane &lane, uint32_t round) override {
    const phx_status status = inner_->go_on(lane, round);
    if (status == PHX_OK && round == rounds) deliver();
    return status;
  }
  phx_status compare() override { return inner_->compare(); }
  std::vector<int> late() const override { return inner_->late(); }
  uint64_t done_after(uint64_t epoch) const override { return inner_->done_after(epoch); }
  bool exclusive() const override { return inner_->exclusive(); }
  bool takes_input_at_once() const override { return true; }

 private:
  void deliver() const {
    const char *from = buffer_.get();
    for (const CoalescedCall &call : calls_) {
      const size_t bytes = call.buffers.count * call.buffers.item;
      copy_bytes(call.buffers.out, from, bytes);
      from += bytes;
    }
  }

  const std::vector<CoalescedCall> calls_;
  std::unique_ptr<char[]> buffer_;
  OperationPtr inner_;
};

// How many bytes of a slot a call needs on every rank.
size_t packed_bytes(const CoalescedCall &call, int n) {
  const size_t parts = parts_on(traits_of(call.kind).in, static_cast<size_t>(n), true);
  return round_up(call.buffers.count * call.buffers.item * parts, kPackedAlign);
}

// Small calls side by side in one slot.
class Packed final : public Operation {
 public:
  Packed(std::vector<CoalescedCall> calls, const Lane &lane)
      : Operation({}, 0), n_(lane.group_size()), self_(lane.group_rank()), calls_(std::move(calls)) {
    size_t at = 0;
    for (const CoalescedCall &call : calls_) {
      places_.push_back(at);
      at += packed_bytes(call, n_);
    }
    reach = at;
  }

  void keep_input(size_t) override { keep_inputs(&calls_, n_, self_, SIZE_MAX, &kept_); }  // small by construction

  void put(const Lane &lane, uint32_t, uint64_t epoch) override {
    for (size_t i = 0; i < calls_.size(); ++i)
      put_bytes(lane.data(self_, epoch) + places_[i], calls_[i].buffers.in, input_bytes(calls_[i], n_, self_));
  }

  phx_status take(const Lane &lane, uint32_t, uint64_t epoch) override {
    for (size_t i = 0; i < calls_.size(); ++i) take_call(lane, epoch, calls_[i], places_[i]);
    return PHX_OK;
  }

 private:
  static void take_call(const Lane &lane, uint64_t epoch, const CoalescedCall &call, size_t place) {
    const int n = lane.group_size();
    const int self = lane.group_rank();
    const size_t bytes = call.buffers.count * call.buffers.item;
    const auto slot = [&](int of) { return lane.data(of, epoch) + place; };
    char *out = call.buffers.out;
    switch (call.kind) {
      case Kind::kReduceScatter: reduce(lane, call, place + self * bytes, epoch); return;
      case Kind::kReduce:
        if (self == call.root) reduce(lane, call, place, epoch);
        return;
      case Kind::kGather:
        if (self != call.root) return;
        [[fallthrough]];
      case Kind::kAllGather:
        for (int i = 0; i < n; ++i) copy_bytes(out + i * bytes, slot(i), bytes);
        return;
      case Kind::kAllToAll:
        for (int i = 0; i < n; ++i) copy_bytes(out + i * bytes, slot(i) + self * bytes, bytes);
        return;
      case Kind::kScatter: copy_bytes(out, slot(call.root) + self * bytes, bytes); return;
      case Kind::kBroadcast:
        if (self != call.root) copy_bytes(out, slot(call.root), bytes);
        return;
      default: return;
    }
  }

  static void reduce(const Lane &lane, const CoalescedCall &call, size_t place, uint64_t epoch) {
    const int n = lane.group_size();
    const void *inputs[kMaxGroupSize];
    for (int i = 0; i < n; ++i) inputs[i] = lane.data(i, epoch) + place;
    if (call.buffers.count != 0)
      call.reduction.fn(call.buffers.out, inputs, n, call.buffers.count, n, call.reduction.scale);
  }

  const int n_;
  const int self_;
  std::vector<CoalescedCall> calls_;
  std::vector<size_t> places_;
};

class Sequence final : public Operation {
 public:
  explicit Sequence(std::vector<OperationPtr> steps) : Operation({}, 0), steps_(std::move(steps)) {
    rounds = 0;
    reach = 0;
    for (const OperationPtr &step : steps_) {
      begins_.push_back(rounds);
      rounds += step->rounds;
      reach = std::max(reach, step->reach);
      net = step->net;
    }
    calls = static_cast<uint32_t>(steps_.size());
  }

  void put(const Lane &lane, uint32_t round, uint64_t epoch) override {
    const size_t i = index(round);
    if (round == begins_[i]) {
      steps_[i]->first_epoch = epoch;
      steps_[i]->first_call = first_call + i;
      steps_[i]->sequence = sequence;
      steps_[i]->record = record;
    }
    steps_[i]->put(lane, round - begins_[i], epoch);
  }
  phx_status go_on(const Lane &lane, uint32_t round) override {
    const size_t next = round == rounds ? steps_.size() : index(round);
    const bool ends = round == rounds || round == begins_[next];  // the step before
    Operation &step = *steps_[ends ? next - 1 : next];
    return step.go_on(lane, ends ? step.rounds : round - begins_[next]);
  }
  phx_status compare() override { return steps_[index(taken)]->compare(); }
  std::vector<int> late() const override {
    for (const OperationPtr &step : steps_)
      if (std::vector<int> ranks = step->late(); !ranks.empty()) return ranks;
    return {};
  }
  phx_status take(const Lane &lane, uint32_t round, uint64_t epoch) override {
    const size_t i = index(round);
    return steps_[i]->take(lane, round - begins_[i], epoch);
  }
  uint64_t done_after(uint64_t epoch) const override {
    return steps_[index(static_cast<uint32_t>(epoch - first_epoch))]->done_after(epoch);
  }
  bool exclusive() const override {
    return std::any_of(steps_.begin(), steps_.end(), [](const OperationPtr &step) { return step->exclusive(); });
  }
  bool takes_input_at_once() const override { return steps_.size() == 1 && steps_[0]->takes_input_at_once(); }
  void keep_input(size_t limit) override {
    for (const OperationPtr &step : steps_) step->keep_input(limit);
  }

 private:
  size_t index(uint32_t round) const {
    return static_cast<size_t>(std::upper_bound(begins_.begin(), begins_.end(), round) - begins_.begin()) - 1;
  }

  const std::vector<OperationPtr> steps_;
  std::vector<uint32_t> begins_;
};

}  // namespace

size_t input_bytes(const CoalescedCall &call, int n, int self) {
  const bool is_root = self == call.root;
  if (call.kind == Kind::kBroadcast && !is_root) return 0;  // on the other ranks the buffer is the output
  return call.buffers.count * call.buffers.item * parts_on(traits_of(call.kind).in, static_cast<size_t>(n), is_root);
}

void keep_inputs(std::vector<CoalescedCall> *calls, int n, int self, size_t limit, std::vector<char> *copies) {
  const auto kept_bytes = [&](const CoalescedCall &call) {
    const size_t bytes = input_bytes(call, n, self);
    return bytes <= limit ? bytes : 0;
  };
  size_t total = 0;
  for (const CoalescedCall &call : *calls) total += kept_bytes(call);
  copies->resize(total);
  char *to = copies->data();
  for (CoalescedCall &call : *calls) {
    const size_t bytes = kept_bytes(call);
    if (bytes == 0) continue;
    std::memcpy(to, call.buffers.in, bytes);
    call.buffers.in = to;
    to += bytes;
  }
}

OperationPtr make_coalesced(const Plan &plan, const std::vector<CoalescedCall> &calls) {
  const int n = plan.net == nullptr ? plan.lane.group_size() : plan.net->group().size();
  struct Set {
    std::vector<CoalescedCall> calls;
    size_t bytes = 0;
  };
  std::vector<OperationPtr> steps;
  std::vector<Set> fused;
  std::vector<CoalescedCall> packed;
  size_t filled = 0;
  const auto flush = [&] {
    if (!packed.empty()) steps.push_back(std::make_unique<Packed>(std::move(packed), plan.lane));
    packed.clear();
    filled = 0;
  };
  for (const CoalescedCall &call : calls) {
    const size_t bytes = packed_bytes(call, n);
    if (call.kind == Kind::kAllReduce && bytes <= kFusedBytes) {
      const auto fits = [&](const Set &set) {
        return set.bytes + bytes <= kFusedTotal && same_reduction(set.calls[0], call);
      };
      auto set = std::find_if(fused.begin(), fused.end(), fits);
      if (set == fused.end()) set = fused.emplace(fused.end());
      set->calls.push_back(call);
      set->bytes += bytes;
    } else if (plan.net == nullptr && call.kind != Kind::kAllReduce &&
               bytes <= std::min<size_t>(plan.chunk_bytes(), kPackedBytes)) {
      if (filled + bytes > plan.chunk_bytes()) flush();
      packed.push_back(call);
      filled += bytes;
    } else {
      steps.push_back(make_operation(call.kind, plan, call.buffers, call.reduction, call.root));
    }
  }
  flush();
  for (Set &set : fused)
    steps.push_back(set.calls.size() == 1
                        ? make_operation(Kind::kAllReduce, plan, set.calls[0].buffers, set.calls[0].reduction, -1)
                        : std::make_unique<Fused>(plan, std::move(set.calls)));
  if (steps.empty()) steps.push_back(make_operation(Kind::kBarrier, plan, {}, {}, -1));
  return std::make_unique<Sequence>(std::move(steps));
}

}  // namespace phx
