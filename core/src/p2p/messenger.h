// The messages of one rank in one group: its sends, its receives, and unexpected messages.
//
// There is no progress thread. A thread that waits for a message, or for anything else while a transfer is started,
// advances all transfers of its rank. The lock is never held while waiting, so that several threads of a rank can send
// and receive at the same time.
#pragma once

#include <optional>

#include "group/group.h"
#include "p2p/matching.h"
#include "p2p/remote_ring.h"

namespace phx {

class Messenger final : public Attachment, public ProgressSource {
 public:
  static constexpr AttachmentKind kKind = AttachmentKind::kMessages;
  explicit Messenger(Group &group) : group_(&group) {}
  ~Messenger() override;

  // A ring takes memory only once something is sent through it.
  size_t area_bytes() const override { return ring_offset(group_->size(), group_->size()); }
  void begin_area_at(char *area, uint32_t first) override;
  void open(const std::vector<char *> &areas) override;
  void on_failed() override;
  void flush() override;
  void close() override;
  std::vector<ProgressSource *> progress_sources() override { return {this}; }
  bool advance_pending() override;

  // Blocks until the transfer is complete. The caller owns it.
  phx_status run(Transfer &transfer, int64_t timeout_ms);
  // Never waits.
  phx_status start(const std::shared_ptr<Transfer> &started);
  phx_status wait(Transfer &transfer, int64_t timeout_ms);
  void test(Transfer &transfer);

 private:
  struct Outbound {
    RingWriter ring;
    LinkedList<Transfer> carried;  // sends and receives of stage kCarried
    LinkedList<Transfer> clears;   // receives whose CTS is to be sent
    LinkedList<Transfer> data;     // sends with a CTS, in the order of the CTS; the first may be partly in the ring
    LinkedList<Transfer> queue;    // new sends in the order of the calls; the first may be partly in the ring
    uint32_t next_number = 0;
    uint32_t announced = 0;  // sends with an RTS and no CTS
    bool counted = false;    // whether sending_ counts this peer
  };
  struct Inbound {
    RingReader ring;
    uint32_t next_number = 0;
    uint32_t announced = 0;      // messages with an RTS that no receive has matched
    int awaited = 0;             // matched receives that are not complete, and sends that wait for a CTS
    Arrival *arrival = nullptr;  // the last message, if it is unexpected and more of its eager part is to come
  };
  // kWanted reads only the rings of peers for which a transfer waits; kAll reads all rings.
  enum class Take { kWanted, kAll };
  using Lock = std::unique_lock<std::mutex>;

  // ---- messenger.cpp: calls and waiting
  phx_status begin(Transfer &transfer);
  void await(Transfer &transfer, LazyDeadline &deadline);
  WaitResult look(Transfer &transfer, Take take);
  WaitResult look(Transfer &transfer, Take take, Lock &lock);  // releases the lock
  WaitResult sleep(Transfer &transfer, LazyDeadline &deadline);
  void give_up(Transfer &transfer, bool timed_out, int64_t timeout_ms);
  void end_interrupted(Transfer &transfer);  // the hook of the waiting thread interrupted it; fails the group
  // Fails the group with `failure_` if that is set, releases the lock, and wakes the threads of this rank whose
  // transfers are complete.
  void leave(Lock &lock);
  void wake(int group_rank);  // does nothing unless that rank sleeps

  // Peers on other hosts, all under the lock.
  bool is_remote(int peer) const { return areas_[peer] == nullptr; }
  void begin_with(int peer);  // PHX_ANY_RANK: with all
  bool advance_remote(int peer);
  void mind_leaving();  // lets the thread of the world see to what is on its way out
  void carry(Transfer &transfer);
  // What wakes this rank when ranks of other hosts do something is not what wakes it when one of this host does.
  void sleep_between_hosts(const Transfer &transfer, const SharedWord &doorbell, uint32_t rings,
                           const LazyDeadline &deadline);
  RingResult put(int peer, const Record &record, size_t *taken);
  RingResult charge(int peer, uint32_t cost);
  RingResult peek(int peer, Record *out);
  void release(int peer, const Record &record);
  bool charge_peer(int peer, uint32_t cost);
  void give_back(int peer, uint32_t cost);
  size_t eager_limit(int peer) const { return is_remote(peer) ? RemoteRing::kEagerBytes : ring_bytes_; }

  // ---- traffic.cpp: moves records and data, all under the lock
  bool advance(Take take);  // true when anything moved
  void send(Transfer &send);
  void send_to_self(Transfer &send);
  void move_within(Transfer &send, Transfer &receive);
  void count(Outbound &outbound);
  bool push(int peer);
  RingResult push_cts(Outbound &outbound, Transfer &receive);
  RingResult push_first(Outbound &outbound, Transfer &send, size_t *taken);
  RingResult push_data(Outbound &outbound, Transfer &send, size_t *taken);
  RingResult plan(Outbound &outbound, Transfer &send);
  void note_sent(Outbound &outbound, Transfer &send, size_t bytes);
  bool clear(int peer, uint32_t number);
  void post(Transfer &receive);
  void fill(Transfer &receive, uint32_t number, bool rendezvous, size_t eager);
  void note_received(Transfer &receive);
  bool pull(int source, Take take);
  bool wanted(int source) const { return inbound_[source].awaited > 0 || matcher_.wanted(source); }
  bool accept(int source, const Record &record);
  bool open_message(int source, const Record &record);
  bool append(int source, const Record &record);
  Arrival *keep_arrival(int source, const MessageHead &head, bool rendezvous, size_t eager);
  void deliver(Transfer &receive, const Record &record);
  bool drop_unknown(int source, const char *problem);
  bool check_head(Transfer &receive, int source, const MessageHead &sent);

  // ---- ending.cpp: completes transfers, with or without an error, all under the lock
  void finish(Transfer &transfer, phx_status status);
  void finish_with(Transfer &transfer, const ErrorInfo &error);
  // Fails the transfer, and the group, which leave() does. NULL: no transfer of this rank is at fault.
  void fail(Transfer *transfer, const ErrorInfo &error);
  bool interrupted(const Transfer &transfer) const;
  // The word of this rank is set, with those of all ranks, when the group fails. It is not set when a peer leaves.
  bool group_failed() const { return has_left(self_); }
  bool has_left(int peer) const { return group_->interruption(peer).load(std::memory_order_acquire) != 0; }
  bool is_cut_off(int peer) const {  // it has left, and nothing of it is on its way
    return has_left(peer) && (!is_remote(peer) || remote_[peer].parting.is_over());
  }
  void withdraw(Transfer &transfer);
  Transfer *any_with(int peer);
  void abort(Transfer &transfer, int peer);  // PHX_ANY_RANK: no single peer is the cause
  void abort_peer(int peer);
  void abort_all();
  ErrorInfo error_of(const char *operation, phx_status status, int peer, const std::string &text) const;
  ErrorInfo ended(const Transfer &transfer, int peer) const;
  ErrorInfo mismatch(const Transfer &receive, int source, const MessageHead &sent) const;
  ErrorInfo timeout(const Transfer &transfer, int64_t timeout_ms) const;
  ErrorInfo broken(int peer, const char *problem) const;
  // Fails the group, because what that peer wrote or sent is impossible. Returns false.
  bool fail_broken(int peer, const char *problem);

  Group *const group_;
  int self_ = 0;
  int size_ = 0;
  size_t ring_bytes_ = 0;
  size_t credit_bytes_ = 0;
  bool fenced_ = false;                      // see store_and_wake
  std::vector<MessageArea *> areas_;         // NULL: of a rank of another host
  std::atomic<MessageArea *> own_{nullptr};  // written last by `open`

  std::mutex mutex_;
  struct Remote {
    std::unique_ptr<RemoteRing> ring;  // made when it is first used
    int64_t lost_ns = 0;               // since when its connection is lost
    Parting parting;                   // once it has left
  };
  std::vector<Outbound> outbound_;
  std::vector<Inbound> inbound_;
  mutable std::vector<Remote> remote_;
  Matcher matcher_;
  NumberedTransfers announced_;  // sends with an RTS and no CTS, except one whose eager part is still in the queue
  NumberedTransfers filling_;    // matched receives that are not complete and have no CTS left to send
  int sending_ = 0;              // peers for which something is to be pushed
  bool minds_leaving_ = false;
  bool closed_ = false;               // the group failed: nothing moves any more
  bool completed_ = false;            // whether a transfer was completed since the lock was taken
  std::optional<ErrorInfo> failure_;  // detected since the lock was taken
};

inline Messenger &messenger_of(const Group &group) { return group.attached<Messenger>(); }

}  // namespace phx
