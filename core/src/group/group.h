// A named, ordered set of ranks: its members and their hosts, its lanes, its failure state and its exchanges. The ranks
// of one host share memory: lanes join these alone, and number them by their positions on the host.
#pragma once

#include <algorithm>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <type_traits>
#include <vector>

#include "base/error.h"
#include "base/shared_memory.h"
#include "base/tuning.h"
#include "base/wait.h"
#include "group/attachment.h"
#include "group/hosts.h"
#include "group/lane.h"
#include "group/work.h"
#include "world/world.h"

namespace phx {

struct Vote;

// One rank's contribution to an exchange: up to kMaxPayload bytes and a few descriptors.
struct Parcel {
  std::string bytes;
  std::vector<Fd> fds;
};

struct GroupParams {
  std::string name;
  std::vector<int32_t> ranks;  // how errors name the members
  int group_rank = 0;
  StoreRef store;         // by which the members find each other
  std::string key;        // the prefix of the keys in the store
  bool of_world = false;  // whether `ranks` are those of the world
  // For a group that is created through a store: the prefix without the number of the attempt, that number, and the
  // number of the first earlier attempt of this rank whose failure may still be in the store.
  std::string name_key;
  uint64_t attempt = 0;
  uint64_t first_failed = 0;
  int32_t reduction_order = PHX_REDUCTION_ORDER_DEFAULT;
  AttachTo attach = nullptr;  // creates the attachments of this group and of all that are derived from it
  std::string key_of(uint64_t of_attempt) const { return name_key + "/" + std::to_string(of_attempt); }
};

// For the monitor, and for ranks of other hosts, to say more of a failure than the rank that found it knows.
inline constexpr int64_t kVerdictMs = 250;
// The same at a timeout: the rank that knows more may have come to the call somewhat later.
inline int64_t verdict_ms(int64_t timeout_ms) { return std::clamp<int64_t>(timeout_ms / 2, kVerdictMs, 2000); }

// How errors name a call: "all_reduce #16". Sequence 0: without the number.
struct CallName {
  CallName(const char *of_operation, uint64_t number = 0) : operation(of_operation), sequence(number) {}
  const char *operation;
  uint64_t sequence;
};

class Group : public GroupListener, public std::enable_shared_from_this<Group> {
 public:
  // Collective. If it fails on one rank it fails on all: ranks that are not connected yet learn it from the store.
  static phx_status create(const std::shared_ptr<World> &world, GroupParams params, int64_t timeout_ms,
                           std::shared_ptr<Group> *out);
  // The same without a store, over the connections of `parent`, which has all members. `members`: ranks in the parent.
  // needs_parent: a failure of the parent ends this, because then not all members will take part.
  static phx_status create_from(const Group &parent, const std::vector<int> &members, GroupParams params,
                                const Deadline &deadline, bool needs_parent, std::shared_ptr<Group> *out);
  ~Group() override;

  World &world() const { return *world_; }
  // Like World::resolve_timeout, but with the default of the group if it has one.
  phx_status resolve_timeout(const char *operation, int64_t timeout_ms, int64_t *out) const {
    if (timeout_ms == 0) timeout_ms = timeout_ms_.load(std::memory_order_relaxed);
    return world_->resolve_timeout(operation, timeout_ms, out);
  }
  // The text for a wait that timed out. A timeout of the call that equals the default is attributed to the default.
  std::string timed_out(int64_t timeout_ms) const {
    const int64_t own = timeout_ms_.load(std::memory_order_relaxed);
    if (own == 0) return world_->timed_out(timeout_ms);
    return phx::timed_out(timeout_ms, timeout_ms == own ? "the timeout of the group" : kLimitOfCall);
  }
  void set_timeout_ms(int64_t ms) { timeout_ms_.store(ms, std::memory_order_relaxed); }
  const std::string &name() const { return params_.name; }
  int group_rank() const { return params_.group_rank; }
  int size() const { return static_cast<int>(params_.ranks.size()); }
  int32_t rank_of(int group_rank) const { return params_.ranks[group_rank]; }
  int32_t self_rank() const { return params_.ranks[params_.group_rank]; }
  const std::vector<int32_t> &ranks() const { return params_.ranks; }
  int32_t pid_of(int group_rank) const;
  const char *process_of(int group_rank) const;  // "running", "stopped" and so on, or "on host NAME"
  uint64_t id() const { return id_; }
  // A hash of the processes of its ranks, in order (of their worlds, if two ranks are in one process).
  uint64_t members() const { return members_; }
  const Hosts &hosts() const { return hosts_; }
  bool spans_hosts() const { return hosts_.count() > 1; }
  // PHX_REDUCTION_ORDER_HOSTS or _RANKS: the same on all ranks.
  int32_t reduction_order() const { return reduction_order_; }
  bool reduces_by_ranks() const { return reduction_order_ == PHX_REDUCTION_ORDER_RANKS; }
  // Whether the ranks of this host cannot all have a core of their own.
  bool is_crowded() const { return hosts_.local_size() > cores_; }
  // Each channel has a lane and is an independent sequence of collectives.
  uint32_t channels() const { return static_cast<uint32_t>(lanes_.size()); }
  Lane &lane(uint32_t channel) { return lanes_[channel]; }
  // The attachment of class T, whose kind is T::kKind.
  template <class T>
  T &attached() const {
    return static_cast<T &>(*attachments_[static_cast<size_t>(T::kKind)]);
  }
  bool fenced_by_sleepers() const { return fenced_by_sleepers_; }  // see store_and_wake
  // The initial value of the counters in shared memory, which wrap at 2^32: 0, or the value of PHALANX_FIRST_COUNT, the
  // same on all ranks, with which tests reach the wrap.
  uint32_t first_count() const { return first_count_; }

  // The same on all ranks of the group.
  const Tuning &tuning() const { return tuning_.get(); }
  // An operation with at most this many bytes of input has copied them all when its start returns.
  size_t eager_bytes() const {
    const size_t unit = kLine * size();  // the size that always fits into one round: whole cache lines for each rank
    return std::min<size_t>(lanes_[0].slot_bytes(), tuning().chunk_bytes) / unit * unit;
  }
  phx_status agree_tuning(const Tuning &wish, int64_t timeout_ms);  // collective
  // Collective: *out becomes the `wish` of group rank 0, with the values of `builtin` in place of zeros.
  template <class Values>
  phx_status agree_values(const char *operation, const Values &wish, const Values &builtin, int64_t timeout_ms,
                          Values *out);
  // ---- failure (failure.cpp): the first cause is kept, and revokes the group
  bool failed() const { return failed_.load(std::memory_order_acquire) != 0; }
  // Waits for what others say of a failure that this rank has found.
  bool fails_within(int64_t ms) const;
  // For kernels: size() words, each of them not 0 once it is useless to wait for that rank.
  const int32_t *failed_words() const { return reinterpret_cast<const int32_t *>(interruptions_.data()); }
  // The same pages, for a device to read. kReportWords words that a device writes follow those of the ranks.
  const PageWords &words() const { return interruptions_; }
  static constexpr size_t kReportWords = 9;
  const std::atomic<int32_t> &report_word(size_t index) const { return interruptions_[ranks().size() + index]; }
  // Set when a wait for that rank cannot succeed: the group failed, or only that rank has left. (A rank that leaves in
  // good order must not disturb others that are still completing calls that it has completed.)
  const std::atomic<int32_t> &interruption(int group_rank) const { return interruptions_[group_rank]; }
  // Whether nothing but the end of its own world has ended it for this rank.
  bool ends_well() const { return ends_well_ || interruption(group_rank()).load(std::memory_order_acquire) == 0; }
  ErrorInfo cause() const;
  // Makes `cause` the thread's error and returns its status. `tell`: sends it to the peers, which revokes the group
  // there too. `only`: the one rank for which to interrupt waits; -1 = all.
  phx_status fail_with(const ErrorInfo &cause, bool tell, int only = -1);
  void revoke(const char *operation, const char *reason);  // on this rank and all others
  // Records an error of this thread: "<operation> on group '<name>': ...", on this rank.
  __attribute__((format(printf, 4, 5))) Failed raise(phx_status status, const CallName &call, const char *format,
                                                     ...) const;
  // To be called when the group has failed and this rank will take part in no more collective calls. Sends the cause to
  // the ranks that may wait for this one, even if the cause is only that a rank left in good order. Peers still
  // complete the calls for which this rank has done its part: a word that has been reached wins over an interruption.
  void withdraw();
  // For a call on a group that had failed before: PHX_ERR_REVOKED, naming the first cause. If no call has reported the
  // cause yet (a peer may die between two collectives), the error is the cause itself.
  phx_status raise_revoked(const char *operation, uint64_t sequence = 0) const;
  // For a call that was under way when the group failed: the cause itself.
  phx_status raise_in_flight(const char *operation, uint64_t sequence = 0) const;
  // The same for a collective call that this rank gives up: others may wait for it, so it withdraws.
  phx_status raise_cause(const char *operation, uint64_t sequence = 0) {
    withdraw();
    return raise_in_flight(operation, sequence);
  }
  // For a call whose wait the thread's hook has ended (base/deadline.h): revokes the group, so that all ranks stop.
  phx_status raise_interrupted(const char *operation, uint64_t sequence = 0);
  // Turns a failed wait of the lane into an error that names the rank at fault, and revokes the group.
  phx_status raise_await(const Lane &lane, const AwaitResult &result, const char *operation, uint64_t sequence,
                         uint64_t epoch, int32_t round, const CallRecord &record, int64_t timeout_ms);
  // For a transfer with a rank of another host that has failed: `why` is the carrier's error. Fails the group.
  phx_status raise_transfer(const char *operation, uint64_t sequence, int group_rank, const ErrorInfo &why);
  // For a wait for ranks of other hosts that timed out, or for ranks that have left. Fails the group.
  phx_status raise_late(const char *operation, uint64_t sequence, const std::vector<int> &late, int64_t timeout_ms);
  // For a difference between calls: names both calls, and revokes the group. `step`: the round in a lane.
  phx_status raise_mismatch(const char *operation, uint64_t sequence, int group_rank, const CallRecord &theirs,
                            const CallRecord &mine, int32_t step = 0);
  // For a rank that refused its own call, while `other` made this one. `why`: the error of the rank that refused.
  phx_status raise_refusal(const char *operation, uint64_t sequence, int group_rank, int other,
                           const CallRecord &called, const std::string &why);
  // For a call that got no turn in time, because another thread of this rank held it. `scope`: "channel with ...".
  phx_status raise_turn(const char *operation, const char *scope, int64_t timeout_ms, bool revokes);
  // Locks the mutex, and advances pending operations of this rank while it waits; raise_turn at the deadline.
  phx_status take_turn(const char *operation, TurnMutex &mutex, const Deadline &deadline, const char *scope,
                       bool revokes, Turn *out);

  // ---- refusals (docs/adr/0039): this rank refuses a collective call because of a wrong argument; the thread's error
  // says which. A refusal counts as a call, so ranks that all refuse it stay in step. If only some refuse it, the
  // others fail at once. Each function returns the thread's error, and none waits for a peer.
  phx_status refuse_exchange();
  phx_status refuse_agreement();
  bool may_refuse() const;  // whether a refusal is sent to the others

  // For the log, where a wait is long: "rank 0: still waiting for ranks 1 and 2 on group 'tp': all_reduce #17". `late`:
  // group ranks; empty: any of the others.
  std::string still_waiting(const char *operation, uint64_t sequence, const std::vector<int> &late) const;
  // "Find out what rank 2 is doing (for example `py-spy dump --pid 4123`, ...": for the error of a wait that timed out.
  std::string advice(int group_rank) const;
  // "rank 2 (pid 4123, stopped)"
  std::string describe(int group_rank) const;
  // "rank 2 (pid 4123, stopped; its last call was all_reduce(float32, 512, sum) #16)", of that channel
  std::string describe(int group_rank, const Lane &lane) const;

  bool has_peer(const Uuid &uuid) const override;
  void on_peer_gone(const Link &link, LinkState state, bool ended) override;
  void on_revoked(const ErrorInfo &cause) override;
  void after_interruption() override;
  void on_finalized(const ErrorInfo &cause) override;

  // ---- exchange (exchange.cpp). Collective: every rank gets the parcels of all ranks (its own without descriptors).
  // `fds` are borrowed. A failure revokes the group.
  phx_status exchange(const char *operation, const std::string &bytes, const std::vector<int> &fds,
                      const Deadline &deadline, std::vector<Parcel> *out);
  // The same for one struct of each rank. `fds` are sent with it, and parcels[i].fds are those of group rank i.
  template <class T>
  phx_status exchange_all(const char *operation, const T &mine, const Deadline &deadline, std::vector<T> *all,
                          const std::vector<int> &fds = {}, std::vector<Parcel> *parcels = nullptr);
  phx_status raise_malformed(const char *operation, int group_rank);  // that rank sent other bytes
  // Collective: succeeds if `status` is PHX_OK on all ranks. Otherwise a rank that failed returns its own error, and
  // each other rank returns that of the first rank that failed.
  phx_status confirm(const char *operation, phx_status status, const Deadline &deadline);

  // ---- the ring of messages between GPUs: show_ring sends it to one peer, once; await_ring receives that of a peer.
  phx_status show_ring(const char *operation, int group_rank, const std::string &bytes, int fd,
                       const Deadline &deadline);
  phx_status await_ring(const char *operation, int group_rank, const Deadline &deadline, Parcel *out);

  // ---- groups derived from this one (derive.cpp). Collective; agree and shrink work even if this group has failed.
  // *bits becomes the AND of the ranks' values; alive[i]: whether rank i took part (NULL is allowed).
  phx_status agree(uint64_t *bits, uint8_t *alive, int64_t timeout_ms);
  phx_status shrink(const std::string &name, int64_t timeout_ms, std::shared_ptr<Group> *out);
  // A rank with a negative color takes part, but gets no group.
  phx_status split(int32_t color, int32_t key, const std::string &name, int64_t timeout_ms,
                   std::shared_ptr<Group> *out);

 private:
  friend struct GroupMaker;
  Group(std::shared_ptr<World> world, GroupParams params);
  static phx_status finish(phx_status status, std::shared_ptr<Group> group, std::shared_ptr<Group> *out);
  std::string prefix(const CallName &call) const;  // of error texts: "all_reduce #16 on group 'tp': "
  // Makes the thread's last error the cause of a failure of the group, which the current call reports.
  phx_status fail_all(const Failed &error);

  // Handles the end of rank i, whose link has ended, unless the monitor has done so already.
  void note_end(int i);
  phx_status await_message(int i, uint64_t ordinal, const Deadline &deadline, Message *out, bool *useless);
  // Sends to rank i. Waits for room until the deadline, and advances pending operations of this rank meanwhile.
  // PHX_ERR_REVOKED, without an error text, once `interrupted` is set.
  phx_status send(int i, const Envelope &envelope, const void *payload, const int *fds, const Deadline &deadline,
                  const std::atomic<int32_t> &interrupted);
  // Tells the monitor the number of the exchange that this rank is in. Needs exchange_mutex_.
  struct ExchangeTurn {
    explicit ExchangeTurn(Group &of) : group(of), ordinal(++of.exchange_ordinal_) {
      group.world_->monitor().begin_exchange(group.id_, ordinal);
    }
    ~ExchangeTurn() { group.world_->monitor().end_exchange(group.id_, ordinal); }
    Group &group;
    const uint64_t ordinal;
  };
  struct Late {  // the ranks that were not in time
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
  // Stores the cause if it is the first one, and returns whether it is.
  bool keep_cause(const ErrorInfo &cause, bool dumps);
  // The caller of these holds derive_mutex_.
  phx_status agree(const char *operation, const Deadline &whole, Vote *vote);
  void send_vote(const Vote &vote, uint64_t ordinal, const Deadline &deadline);
  bool receive_vote(int i, uint64_t ordinal, const Deadline &deadline, Vote *out);
  // `number` distinguishes the groups that are derived from this one. It is the same on all members.
  GroupParams derived(const std::string &name, const std::vector<int> &members, const std::string &number) const;

  const std::shared_ptr<World> world_;
  std::atomic<int64_t> timeout_ms_{0};  // the default of waits; 0: that of the world
  const GroupParams params_;
  std::vector<PeerRecord> records_;
  std::vector<LinkRef> links_;  // NULL for this rank
  uint64_t id_ = 0;
  uint64_t members_ = 0;
  bool watched_ = false;
  Hosts hosts_;
  std::vector<SharedMappingRef> segments_;  // by group rank; NULL for ranks of other hosts
  // What every call uses lies side by side.
  std::vector<Lane> lanes_;  // one for each channel
  Attachments attachments_;
  std::atomic<int32_t> failed_{0};
  bool fenced_by_sleepers_ = false;
  uint32_t first_count_ = 0;
  int32_t reduction_order_ = PHX_REDUCTION_ORDER_HOSTS;
  int cores_ = 1;  // how many its ranks on this host may use together
  Published<Tuning> tuning_;

  PageWords interruptions_;                    // by group rank; then kReportWords
  mutable std::atomic<bool> told_{false};      // the peers know the cause, or find out themselves
  mutable std::atomic<bool> reported_{false};  // a call of this rank has returned the cause
  std::atomic<bool> dump_is_due_{false};
  std::atomic<bool> ends_well_{false};
  mutable std::mutex cause_mutex_;
  ErrorInfo cause_;

  TurnMutex exchange_mutex_;
  uint64_t exchange_ordinal_ = 0;
  std::function<phx_status()> look_;  // while the group is created: fails once further waiting is useless

  TurnMutex derive_mutex_;
  uint64_t agreements_ = 0;  // counts agreements, and the next splits: the same on all ranks that take part
  uint64_t splits_ = 0;
};

template <class T>
phx_status Group::exchange_all(const char *operation, const T &mine, const Deadline &deadline, std::vector<T> *all,
                               const std::vector<int> &fds, std::vector<Parcel> *parcels) {
  static_assert(std::is_trivially_copyable_v<T> && sizeof(T) <= kMaxPayload);
  std::vector<Parcel> got;
  const std::string bytes(reinterpret_cast<const char *>(&mine), sizeof mine);
  PHX_TRY(exchange(operation, bytes, fds, deadline, &got));
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
  PHX_TRY(exchange_all(operation, wish, Deadline::after_ms(timeout_ms), &all));
  *out = merge_tuning(all[0], builtin);
  return check_tuning(operation, *out);  // the same on all ranks
}

std::vector<std::shared_ptr<Group>> groups_of(const World &world);

// ---- the flight recorder (dump.cpp)
std::string dump_world(const World &world);  // as JSON: the last calls of this rank and its peers
// If PHALANX_DUMP names a folder, writes the dump of the group's world there, for a group that has just failed. Logs
// the cause and the file, or that the file could not be written.
void dump_failure(const Group &group, const ErrorInfo &cause);
std::string dump_problem();  // why PHALANX_DUMP names no such folder, for a warning; empty: it does, or is not set

}  // namespace phx

struct phx_group {
  std::atomic<int64_t> references;
  std::shared_ptr<phx::Group> ptr;
};

// Keeps its group alive.
struct phx_work {
  std::atomic<int64_t> references;
  std::shared_ptr<phx::Group> group;
  phx::WorkRef ptr;
};
