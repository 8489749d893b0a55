// The messages of one group, as one rank sees them: what it sends, what it waits for, and what came unasked.
//
// There is no thread: whoever waits for a message, and whoever waits for anything while something is started, moves all
// transfers of its rank on. The lock is never held while waiting, so that threads of a rank send and receive at once.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "group/group.h"
#include "p2p/matching.h"
#include "p2p/ring.h"
#include "p2p/transfer.h"

namespace phx {

class Messenger final : public Attachment, public ProgressSource {
 public:
  static constexpr AttachmentKind kKind = AttachmentKind::kMessages;
  explicit Messenger(Group &group) : group_(&group) {}
  ~Messenger() override;

  // A ring costs memory once something is sent through it.
  size_t area_bytes() const override;
  void begin_area_at(char *area, uint32_t first) override;
  void open(const std::vector<char *> &areas) override;
  void on_failed() override;
  std::vector<ProgressSource *> progress_sources() override { return {this}; }
  bool advance_pending() override;

  // Blocks until it is complete. The transfer is the caller's.
  phx_status run(Transfer &transfer, int64_t timeout_ms);
  // Never waits. transfer.work holds the transfer, and is held until it is complete.
  phx_status start(Transfer &transfer);
  phx_status wait(Transfer &transfer, int64_t timeout_ms);
  void test(Transfer &transfer);

 private:
  struct Outbound {
    RingWriter ring;
    LinkedList<Transfer> clears;  // receives whose CTS is to be sent
    LinkedList<Transfer> data;  // sends that have their CTS, in the order of these; the first may be partly in the ring
    LinkedList<Transfer> queue;  // new sends in the order of the calls; likewise
    uint32_t next_number = 0;
    uint32_t announced = 0;  // sends with an RTS and no CTS
    bool counted = false;    // in sending_
  };
  struct Inbound {
    RingReader ring;
    uint32_t next_number = 0;
    uint32_t announced = 0;      // messages with an RTS that no receive has met
    int awaited = 0;             // receives that have met a message and are not complete, and sends that wait for a CTS
    Arrival *arrival = nullptr;  // the last message, if no receive has met it and more of its eager part is to come
  };
  // kWanted takes in what a receive waits for and what lies before it; kAll the rest as well, onto the heap.
  enum class Take { kWanted, kAll };
  using Lock = std::unique_lock<std::mutex>;

  // ---- messenger.cpp: calls and waiting
  phx_status begin(Transfer &transfer);
  void await(Transfer &transfer, LazyDeadline &deadline);
  WaitResult look(Transfer &transfer, Take take);
  WaitResult look(Transfer &transfer, Take take, Lock &lock);  // gives the lock back
  WaitResult sleep(Transfer &transfer, LazyDeadline &deadline);
  void give_up(Transfer &transfer, bool timed_out, int64_t timeout_ms);
  void end_interrupted(Transfer &transfer);  // by the hook of the thread that waits; fails the group
  // Gives the lock back, tells the group what was found wrong, and wakes threads of this rank whose transfer is
  // complete.
  void leave(Lock &lock);
  void wake(int group_rank);  // if it sleeps

  // ---- traffic.cpp: what moves, all under the lock
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
  bool forget(int source, const char *what);
  bool agree(Transfer &receive, int source, const MessageHead &sent);

  // ---- ending.cpp: how transfers end, well or not, all under the lock
  void finish(Transfer &transfer, phx_status status);
  void finish_with(Transfer &transfer, const ErrorInfo &error);
  // This transfer and the group have failed; leave() tells it. NULL: no transfer of this rank is to blame.
  void fail(Transfer *transfer, const ErrorInfo &error);
  bool interrupted(const Transfer &transfer) const;
  bool group_failed() const;
  bool has_left(int peer) const;
  void withdraw(Transfer &transfer);
  Transfer *any_with(int peer) const;
  void abort(Transfer &transfer, int peer);  // PHX_ANY_RANK: not because of one
  void abort_peer(int peer);
  void abort_all();
  ErrorInfo error_of(const char *operation, phx_status status, int peer, const std::string &text) const;
  ErrorInfo ended(const Transfer &transfer, int peer) const;
  ErrorInfo mismatch(const Transfer &receive, int source, const MessageHead &sent) const;
  ErrorInfo timeout(const Transfer &transfer, int64_t timeout_ms) const;
  ErrorInfo broken(int peer, const char *what) const;

  Group *const group_;
  int self_ = 0;
  int size_ = 0;
  size_t ring_bytes_ = 0;
  size_t eager_bytes_ = 0;
  size_t credit_bytes_ = 0;
  bool fenced_ = false;  // see store_and_wake
  std::vector<MessageArea *> areas_;
  std::atomic<MessageArea *> own_{nullptr};  // written last by `open`

  std::mutex mutex_;
  std::vector<Outbound> outbound_;
  std::vector<Inbound> inbound_;
  Matcher matcher_;
  NumberedTransfers announced_;       // sends with an RTS and no CTS, but for one whose eager part is in the queue
  NumberedTransfers filling_;         // receives that have met a message and are not complete
  int sending_ = 0;                   // peers for which something is to be pushed
  bool closed_ = false;               // the group failed: nothing moves any more
  bool completed_ = false;            // a transfer, since the lock was taken
  std::optional<ErrorInfo> failure_;  // found since the lock was taken
};

inline Messenger &messenger_of(const Group &group) { return group.attached<Messenger>(); }

// A started send or receive.
class MessageWork final : public Work {
 public:
  MessageWork(Messenger *messenger) : messenger_(messenger) {}
  phx_status wait(int64_t timeout_ms) override;
  phx_status test() override;
  Transfer &transfer() { return transfer_; }

 private:
  Messenger *const messenger_;  // of the group, which the handle keeps
  Transfer transfer_;
};

}  // namespace phx
