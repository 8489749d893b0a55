// A named, ordered set of ranks that share memory: its members, its failure state and its collective lane.
#pragma once

#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <type_traits>
#include <vector>

#include "base/adopted.h"
#include "base/error.h"
#include "base/page_words.h"
#include "base/shared_memory.h"
#include "base/tuning.h"
#include "group/attachment.h"
#include "group/lane.h"
#include "group/turn.h"
#include "group/work.h"
#include "store/store.h"
#include "world/monitor.h"
#include "world/world.h"

namespace phx {

struct Opinion;

// One rank's contribution to an exchange: up to kMaxPayload bytes and a few descriptors.
struct Parcel {
  std::string bytes;
  std::vector<Fd> fds;
};

struct GroupParams {
  std::string name;
  std::vector<int32_t> ranks;  // what the members are called in errors
  int group_rank = 0;
  StoreRef store;         // where the members meet
  std::string key;        // under which prefix
  bool of_world = false;  // `ranks` are those of the world
  // For a group that is made in a store: the prefix without the number of the attempt, that number, and the first one
  // of this rank's earlier attempts whose failure may still be in the store.
  std::string name_key;
  uint64_t attempt = 0;
  uint64_t first_failed = 0;
  AttachTo attach = nullptr;  // what lives on it, and on all groups that are made of it
  std::string key_of(uint64_t of_attempt) const { return name_key + "/" + std::to_string(of_attempt); }
};

class Group : public GroupListener, public std::enable_shared_from_this<Group> {
 public:
  // Collective. Where it fails on one rank it fails on all: who cannot be told by a connection reads it in the store.
  static phx_status create(const std::shared_ptr<World> &world, GroupParams params, int64_t timeout_ms,
                           std::shared_ptr<Group> *out);
  // The same over the connections of a group that has all members, without a store. `members`: ranks in that group.
  // needs_parent: a failure of the parent ends this, because then not all members will come.
  static phx_status create_from(const Group &parent, const std::vector<int> &members, GroupParams params,
                                const Deadline &deadline, bool needs_parent, std::shared_ptr<Group> *out);
  ~Group() override;

  World &world() const { return *world_; }
  // As that of the world, but with the default of the group where it has one.
  phx_status resolve_timeout(const char *operation, int64_t timeout_ms, int64_t *out) const {
    if (timeout_ms == 0) timeout_ms = timeout_ms_.load(std::memory_order_relaxed);
    return world_->resolve_timeout(operation, timeout_ms, out);
  }
  // The text for a wait of that length that is over. A call that gives the default itself is told of the default.
  std::string timed_out(int64_t timeout_ms) const {
    const int64_t own = timeout_ms_.load(std::memory_order_relaxed);
    if (own == 0) return world_->timed_out(timeout_ms);
    return phx::timed_out(timeout_ms, timeout_ms == own ? "the timeout of the group" : kLimitOfCall);
  }
  void set_timeout_ms(int64_t ms) { timeout_ms_.store(ms, std::memory_order_relaxed); }
  const std::shared_ptr<World> &world_ref() const { return world_; }
  const std::string &name() const { return params_.name; }
  int group_rank() const { return params_.group_rank; }
  int size() const { return static_cast<int>(params_.ranks.size()); }
  int32_t rank_of(int group_rank) const { return params_.ranks[group_rank]; }
  int32_t self_rank() const { return params_.ranks[params_.group_rank]; }
  const std::vector<int32_t> &ranks() const { return params_.ranks; }
  int32_t pid_of(int group_rank) const;
  uint64_t id() const { return id_; }
  // A hash of the processes of its ranks, in order (of their worlds, where two ranks are in one process).
  uint64_t members() const { return members_; }
  // Whether they cannot all have a core of their own.
  bool is_crowded() const { return size() > cores_; }
  // One for each channel, an independent sequence of collectives.
  uint32_t channels() const { return static_cast<uint32_t>(lanes_.size()); }
  Lane &lane(uint32_t channel) { return lanes_[channel]; }
  // The attachment of class T, which says its kind.
  template <class T>
  T &attached() const {
    return static_cast<T &>(*attachments_[static_cast<size_t>(T::kKind)]);
  }
  bool fenced_by_sleepers() const { return fenced_by_sleepers_; }  // see store_and_wake
  // Where the counters in shared memory begin, which go on modulo 2^32: 0, or what PHALANX_FIRST_COUNT says on all
  // ranks, so that tests reach the wrap.
  uint32_t first_count() const { return first_count_; }

  // The same on all ranks of the group.
  const Tuning &tuning() const { return tuning_.get(); }
  // An operation with at most so many bytes of input has taken them all when its start returns.
  size_t eager_bytes() const;
  phx_status agree_tuning(const Tuning &wish, int64_t timeout_ms);  // collective
  // Collective: *out becomes what group rank 0 wishes, with `builtin` for its zeros.
  template <class Values>
  phx_status agree_values(const char *operation, const Values &wish, const Values &builtin, int64_t timeout_ms,
                          Values *out);
  // ---- failure (failure.cpp): the first cause sticks, and revokes the group
  bool failed() const { return failed_.load(std::memory_order_acquire) != 0; }
  // For kernels: size() words, not 0 once it is of no use to wait for that rank.
  const int32_t *failed_words() const { return reinterpret_cast<const int32_t *>(interruptions_.data()); }
  // The same pages, for a device to read. After the words of the ranks come kReportWords that a device writes.
  const PageWords &words() const { return interruptions_; }
  static constexpr size_t kReportWords = 9;
  const std::atomic<int32_t> &report_word(size_t index) const { return interruptions_[ranks().size() + index]; }
  // Set when a wait for that rank cannot end well: the group failed, or just that rank has left. (A rank that leaves in
  // good order must not disturb others that are still completing what it has completed.)
  const std::atomic<int32_t> &interruption(int group_rank) const { return interruptions_[group_rank]; }
  ErrorInfo cause() const;
  // Returns the thread's error. `tell` sends the cause to the peers, which revokes the group there as well. `only`: the
  // one rank for which to interrupt waits; -1 = all.
  phx_status fail_with(const ErrorInfo &cause, bool tell, int only = -1);
  void revoke(const char *operation, const char *reason);  // here and on all ranks
  // Records an error of this thread: "<operation> on group '<name>': ...", on this rank.
  __attribute__((format(printf, 4, 5))) Failed raise(phx_status status, const char *operation, const char *format,
                                                     ...) const;
  // The group has failed, and this rank takes part in no collective call any more: ranks that wait for it hear why,
  // also where one has left in good order, of which nobody is told. What they have reached before is completed all the
  // same: a word that has been reached wins over an interruption.
  void withdraw();
  // PHX_OK while nothing is known against that rank; else the thread's error says that it died or left.
  // For a call on a group that had failed before: PHX_ERR_REVOKED, naming the first cause. Only when no call has
  // reported the cause yet (a peer may die between two collectives) it is the cause itself.
  phx_status raise_revoked(const char *operation, uint64_t sequence = 0) const;
  // For a call that was under way when the group failed: the cause itself.
  phx_status raise_in_flight(const char *operation, uint64_t sequence) const;
  // For a call whose wait the thread's hook has ended (base/interrupt.h): revokes the group, so that no rank waits on.
  phx_status raise_interrupted(const char *operation, uint64_t sequence = 0);
  // Turns a failed wait of the lane into an error that names who is at fault, and revokes the group.
  phx_status raise_await(const Lane &lane, const AwaitResult &result, const char *operation, uint64_t sequence,
                         uint64_t epoch, int32_t round, const CallRecord &record, int64_t timeout_ms);
  // For calls that differ, found outside of a lane: names both, and revokes the group.
  phx_status raise_mismatch(const char *operation, uint64_t sequence, int group_rank, const CallRecord &theirs,
                            const CallRecord &mine);
  // Another thread of this rank has kept this one from its turn for the whole timeout. `what`: "channel with ...".
  phx_status raise_turn(const char *operation, const char *what, int64_t timeout_ms, bool revokes);

  // ---- refusals (docs/adr/0039): the thread's error is that an argument of a collective call of this rank is wrong.
  // It counts as a call, so ranks that refuse alike stay in step; where one refuses alone the others hear of it at
  // once. Each returns the thread's error, and none waits for a peer.
  phx_status refuse_exchange();
  phx_status refuse_agreement();
  bool may_refuse() const;  // whether the others are to hear of it

  // "rank 2 (pid 4123, stopped)"
  std::string describe(int group_rank) const;
  // "rank 2 (pid 4123, stopped; its last call was all_reduce(float32, 512, sum) #16)", of that channel
  std::string describe(int group_rank, const Lane &lane) const;

  bool has_peer(const Uuid &uuid) const override;
  void on_peer_gone(const Link &link, LinkState state, bool ended) override;
  void on_revoked(const ErrorInfo &cause) override;
  void after_interruption() override;
  void on_block_freed(uint64_t block_serial) override;
  void on_finalized(const ErrorInfo &cause) override { fail_with(cause, false); }

  // ---- exchange (exchange.cpp). Collective: everybody gets everybody's parcel (its own included, without
  // descriptors). `fds` are borrowed. A failure revokes the group.
  phx_status exchange(const char *operation, const std::string &bytes, const std::vector<int> &fds,
                      const Deadline &deadline, std::vector<Parcel> *out);
  // The same of one struct of each rank. `fds` go with it, and parcels[i].fds are those of group rank i.
  template <class T>
  phx_status exchange_all(const char *operation, const T &mine, const Deadline &deadline, std::vector<T> *all,
                          const std::vector<int> &fds = {}, std::vector<Parcel> *parcels = nullptr);
  phx_status raise_malformed(const char *operation, int group_rank);  // what that rank sent is no such struct
  // Collective: all succeed, or all fail with the text of the first that failed.
  phx_status confirm(const char *operation, phx_status status, const Deadline &deadline);

  // ---- what one rank passes to one other, once: the ring of its messages between GPUs. `await_ring` waits for it.
  phx_status show_ring(const char *operation, int group_rank, const std::string &bytes, int fd,
                       const Deadline &deadline);
  phx_status await_ring(const char *operation, int group_rank, const Deadline &deadline, Parcel *out);

  // ---- groups made of this one (derive.cpp); agree and shrink also where it has failed. Collective.
  // *bits becomes the AND of what the ranks gave; alive[i] whether rank i took part (NULL is allowed).
  phx_status agree(uint64_t *bits, uint8_t *alive, int64_t timeout_ms);
  phx_status shrink(const std::string &name, int64_t timeout_ms, std::shared_ptr<Group> *out);
  // A negative color takes part, but gets no group.
  phx_status split(int32_t color, int32_t key, const std::string &name, int64_t timeout_ms,
                   std::shared_ptr<Group> *out);

 private:
  friend struct GroupMaker;
  Group(std::shared_ptr<World> world, GroupParams params);
  static phx_status finish(phx_status status, std::shared_ptr<Group> group, std::shared_ptr<Group> *out);
  // "all_reduce #16 on group 'tp': ", with which the texts of its errors begin. 0: without the number.
  std::string prefix(const char *operation, uint64_t sequence) const;
  // As raise, for the call of that number.
  __attribute__((format(printf, 5, 6))) Failed raise_call(phx_status status, const char *operation, uint64_t sequence,
                                                          const char *format, ...) const;
  Failed tell_mismatch(const char *operation, uint64_t sequence, int group_rank, const CallRecord &theirs,
                       const CallRecord &mine) const;
  // The thread's last error is the cause of a failure of the group, and the call under way reports it.
  phx_status fail_all(const Failed &error);

  phx_status await_message(int i, uint64_t ordinal, const Deadline &deadline, Message *out, bool *useless);
  // Waits for room within the deadline, and moves on what this rank has under way. PHX_ERR_REVOKED, without a text,
  // once `interrupted` is set.
  phx_status send(int i, const Envelope &envelope, const void *payload, const int *fds, const Deadline &deadline,
                  const std::atomic<int32_t> &interrupted);
  // While this rank is in an exchange the monitor knows its number. With exchange_mutex_ held.
  struct ExchangeTurn {
    explicit ExchangeTurn(Group &group);
    ~ExchangeTurn();
    Group &group;
    const uint64_t ordinal;
  };
  struct Late {  // the ranks that did not come in time
    int first = -1;
    std::string ranks;
  };
  phx_status take_parcel(const char *operation, int i, uint64_t ordinal, const Deadline &deadline, Message *out,
                         Late *late);
  phx_status raise_send(const char *operation, int i, phx_status status);
  bool may_tell() const;
  phx_status raise_refused(const char *operation, int i, const std::string &payload);
  void tell_cause() const;   // to the peers, once
  void interrupt(int only);  // waits of this process: for that rank, or all (-1)
  // Keeps the cause if it is the first, and returns whether it is.
  bool keep_cause(const ErrorInfo &cause, bool dumps);
  // With derive_mutex_ held. agree.cpp
  phx_status agree(const char *operation, const Deadline &whole, Opinion *opinion);
  void tell_opinion(const Opinion &opinion, uint64_t ordinal, const Deadline &deadline);
  bool hear_opinion(int i, uint64_t ordinal, const Deadline &deadline, Opinion *out);
  // `number` tells apart the groups that are made of this one; the same on all members.
  GroupParams derived(const std::string &name, const std::vector<int> &members, const std::string &number) const;

  const std::shared_ptr<World> world_;
  std::atomic<int64_t> timeout_ms_{0};  // the default of waits; 0: that of the world
  const GroupParams params_;
  std::vector<PeerRecord> records_;
  std::vector<LinkRef> links_;  // NULL for this rank
  uint64_t id_ = 0;
  uint64_t members_ = 0;
  bool watched_ = false;
  std::vector<SharedMappingRef> segments_;  // by group rank
  std::deque<Lane> lanes_;
  bool fenced_by_sleepers_ = false;
  uint32_t first_count_ = 0;
  int cores_ = 1;  // that its ranks may use together
  Adopted<Tuning> tuning_;

  std::atomic<int32_t> failed_{0};
  PageWords interruptions_;                    // by group rank; then kReportWords
  mutable std::atomic<bool> told_{false};      // the peers know the cause, or see it for themselves
  mutable std::atomic<bool> reported_{false};  // a call of this rank has raised the cause
  std::atomic<bool> dump_is_due_{false};
  mutable std::mutex cause_mutex_;
  ErrorInfo cause_ = make_error_info();

  TurnMutex exchange_mutex_;
  uint64_t exchange_ordinal_ = 0;
  std::function<phx_status()> look_;  // while the group is made: whether it is of no use to go on waiting

  TurnMutex derive_mutex_;
  uint64_t agreements_ = 0;  // and splits: made so far, with the same number on all ranks that take part
  uint64_t splits_ = 0;

  std::vector<std::unique_ptr<Attachment>> attachments_;  // by kind
};

template <class T>
phx_status Group::exchange_all(const char *operation, const T &mine, const Deadline &deadline, std::vector<T> *all,
                               const std::vector<int> &fds, std::vector<Parcel> *parcels) {
  static_assert(std::is_trivially_copyable_v<T> && sizeof(T) <= kMaxPayload);
  std::vector<Parcel> got;
  const std::string bytes(reinterpret_cast<const char *>(&mine), sizeof mine);
  const phx_status status = exchange(operation, bytes, fds, deadline, &got);
  if (status != PHX_OK) return status;
  all->resize(got.size());
  for (size_t i = 0; i < got.size(); ++i) {
    if (got[i].bytes.size() != sizeof(T)) return raise_malformed(operation, static_cast<int>(i));
    std::memcpy(&(*all)[i], got[i].bytes.data(), sizeof(T));
  }
  if (parcels != nullptr) *parcels = std::move(got);
  return PHX_OK;
}

template <class Values>
phx_status Group::agree_values(const char *operation, const Values &wish, const Values &builtin, int64_t timeout_ms,
                               Values *out) {
  std::vector<Values> all;
  const phx_status status = exchange_all(operation, wish, Deadline::after_ms(timeout_ms), &all);
  if (status != PHX_OK) return status;
  *out = merge_tuning(all[0], builtin);
  return check_tuning(operation, *out);  // the same on all ranks
}

std::vector<std::shared_ptr<Group>> groups_of(const World &world);

}  // namespace phx

struct phx_group {
  std::atomic<int64_t> references{1};
  std::shared_ptr<phx::Group> ptr;
};

// Keeps the group while it lives.
struct phx_work {
  std::atomic<int64_t> references{1};
  std::shared_ptr<phx::Group> group;
  phx::WorkRef ptr;
};

inline const phx::World &world_of(const phx_group &handle) { return handle.ptr->world(); }
inline const phx::World &world_of(const phx_work &handle) { return handle.group->world(); }

namespace phx {

inline phx_work *make_work_handle(std::shared_ptr<Group> group, WorkRef work) {
  auto *handle = new phx_work;
  handle->group = std::move(group);
  handle->ptr = std::move(work);
  return handle;
}

}  // namespace phx
