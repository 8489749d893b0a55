// The collectives of one group: an engine for each of its channels. It runs the operations of the channel one after
// another through its lane, blocking or split into start and wait.
#pragma once

#include <deque>

#include "group/group.h"
#include "ops/operation.h"

namespace phx {

class Engine;

// A started operation.
class CollectiveWork final : public Work {
 public:
  CollectiveWork(Engine *engine, OperationPtr operation) : engine_(engine), operation_(std::move(operation)) {}
  phx_status wait(int64_t timeout_ms) override;
  phx_status test() override;
  Operation &operation() const { return *operation_; }

 private:
  Engine *const engine_;  // belongs to the group, which the handle keeps alive
  const OperationPtr operation_;
};
using CollectiveWorkRef = std::shared_ptr<CollectiveWork>;

class Engine final : public ProgressSource {
 public:
  Engine(Group *group, Lane *lane) : group_(group), lane_(lane) {}
  ~Engine() override;

  phx_status run(Operation &operation, int64_t timeout_ms);
  // Never waits for peers: an operation for which there is no room is published by later calls. `timeout_ms` bounds the
  // wait for its turn while another thread is inside this channel. `keeps_input`: the caller may change the input.
  phx_status start(OperationPtr operation, int64_t timeout_ms, bool keeps_input, WorkRef *out);
  phx_status wait(const CollectiveWork &work, int64_t timeout_ms);
  phx_status test(const CollectiveWork &work);
  // To be called before the first collective; sequence numbers continue from `sequence`.
  void begin_at(uint64_t sequence) { sequence_.store(sequence, std::memory_order_relaxed); }
  bool advance_pending() override;
  uint64_t sequence() const { return sequence_.load(std::memory_order_relaxed); }
  void count_zero_copies(size_t calls) { zero_copies_.fetch_add(calls, std::memory_order_relaxed); }
  uint64_t zero_copies() const { return zero_copies_.load(std::memory_order_relaxed); }

 private:
  phx_status begin(Operation &operation);
  void number(Operation &operation);
  phx_status make_room(LazyDeadline &until);
  phx_status complete_pending(LazyDeadline &until);
  bool has_room() const;
  bool has_free_slot() const;
  phx_status publish(Operation &operation, LazyDeadline &deadline);
  phx_status hold(const Operation &operation);
  phx_status publish_queued(LazyDeadline &deadline);
  phx_status advance(Operation &operation, LazyDeadline &deadline, bool may_block);
  phx_status use_places(Operation &operation, uint64_t epoch, LazyDeadline &deadline, bool may_block);
  phx_status complete_front(LazyDeadline &deadline, bool may_block);
  phx_status await_transfers(Operation &operation, LazyDeadline &deadline, bool may_block);
  phx_status compare_before(uint64_t epoch, Operation &operation, LazyDeadline &deadline, bool may_block);
  phx_status raise(const AwaitResult &result, const Operation &operation, uint32_t round, const LazyDeadline &deadline);
  LazyDeadline deadline(int64_t timeout_ms);
  phx_status raise_turn(const char *operation, const LazyDeadline &deadline, bool revokes);

  struct LateText {
    const Engine *engine;
    std::string operator()() const;
  };

  Group *const group_;
  Lane *const lane_;
  const LateText late_text_{this};
  TurnMutex mutex_;  // held by one collective at a time, which may wait for its peers
  std::atomic<uint64_t> sequence_{0};
  uint64_t calls_ = 0;  // the numbers that messages to other hosts have taken
  const std::shared_ptr<KeptMemory> kept_memory_ = std::make_shared<KeptMemory>();
  std::deque<CollectiveWorkRef> pending_;  // started, not complete, in order; those at the end may not be published yet
  std::atomic<uint64_t> zero_copies_{0};   // calls whose inputs were read where they lie
};

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
