// Windows: memory of each rank of a group in which the others write and read without a call on its side.
//
// Ranks of one host map each other's memory, and signal each other through the pads of a rendezvous that is the
// window's own. Between hosts a rank sends requests, which the other side serves: whichever of its threads waits for
// something, or else the thread of the world. They go through a RemoteRing for each pair of ranks, as records:
//
//   PUT    (window, offset, bytes, signal)  its data follows in the record, or, if it is large, as a message of its own
//   GET    (window, offset, bytes)          0 bytes: asks only whether what was put before is there
//   REPLY  (status)                         to the GET of the same number; large data is a message of its own
//
// A rank serves the requests of another one in their order, each to its end before the next. So a signal counts when
// everything that its sender has put before is in place. Credit bounds the requests that are under way. A REPLY needs
// none, because the rank that asked waits for it: else two ranks could each wait for the credit of the other one.
#pragma once

#include <deque>
#include <map>

#include "p2p/remote_ring.h"
#include "symm/symm.h"

namespace phx {
class Window;
}

struct phx_window {
  std::shared_ptr<phx::Group> group;  // outlives the window
  std::unique_ptr<phx::Window> window;
};

namespace phx {

// The windows of one group, and what serves the ranks of other hosts.
class Windows final : public Attachment, public ProgressSource {
 public:
  static constexpr AttachmentKind kKind = AttachmentKind::kWindows;
  explicit Windows(Group &group) : group_(group) {}
  ~Windows() override { attend(false); }

  // Collective. The window is a part of the block.
  phx_status create(const BlockRef &block, size_t offset, size_t bytes, int64_t timeout_ms,
                    std::unique_ptr<Window> *out);
  // For a peer on another host.
  phx_status put(const Window &window, int peer, size_t offset, const void *data, size_t bytes, bool signal,
                 int64_t timeout_ms);
  phx_status get(const Window &window, int peer, size_t offset, void *data, size_t bytes, int64_t timeout_ms);
  phx_status flush(int64_t timeout_ms);
  phx_status wait_signal(Window &window, int peer, int64_t timeout_ms);
  // What is coming into its memory now goes on, and keeps the block.
  void remove(uint32_t number) {
    const Lock lock(mutex_);
    windows_.erase(number);
  }

  std::vector<ProgressSource *> progress_sources() override { return {this}; }
  bool advance_pending() override;
  int arm() override { return waiting_ != 0 ? -1 : net_of(group_).arm(); }
  void on_failed() override;
  void flush() override;
  void close() override;

 private:
  // A GET that waits for its REPLY, on the stack of the thread that waits. All of it is guarded by the mutex.
  struct Get {
    Get(Windows &of, int rank, void *data, size_t size)
        : windows(of), peer(rank), out(static_cast<char *>(data)), bytes(size), rest(net_of(of.group_)) {}
    ~Get();
    Windows &windows;
    const int peer;
    char *const out;
    const size_t bytes;
    bool charged = false, asked = false, answered = false;
    bool gone = false;  // the other side has released its window
    Transfers rest;     // a large REPLY's data
  };
  struct Outgoing {
    Transfers data;
    BlockRef block;  // which it reads
  };
  struct Remote {
    std::unique_ptr<RemoteRing> ring;  // NULL: a rank of this host
    std::unique_ptr<ErrorInfo> lost;   // why nothing comes from there any more
    // How many requests have been made: by this rank and by the peer. They name messages. Small puts do not count.
    uint32_t puts = 0, gets = 0, their_puts = 0, their_gets = 0;
    bool unflushed = false;     // something was put and not asked for
    std::deque<Get *> waiting;  // for a REPLY; NULL: nobody waits any more
    // A large PUT whose data is coming.
    std::unique_ptr<Transfers> incoming;
    Scratch dropped;  // where it goes if its window is gone
    BlockRef block;   // where it goes else
    uint32_t window = 0;
    bool signal = false;
    std::deque<Outgoing> replies;
  };
  using Lock = std::unique_lock<std::mutex>;

  bool is_remote(int peer) const { return !group_.hosts().is_here(peer); }
  phx_status meet(const Deadline &deadline);
  void add(Window *window);
  bool advance();  // these with the mutex held; whether anything moved
  bool serve(int peer);
  bool serve_requests(int peer);
  // One record of a peer. kBroken: no correct peer sends it. kNothing: it must wait.
  RingResult serve_record(int peer, const Record &record);
  RingResult serve_put(int peer, const Record &record);
  RingResult serve_get(int peer, const Record &record);
  RingResult take_reply(int peer, const Record &record);
  void count(int peer, uint32_t number);
  Window *find(uint32_t number) const {  // NULL: it is gone
    const auto found = windows_.find(number);
    return found == windows_.end() ? nullptr : found->second;
  }
  void attend(bool want);  // whether the thread of the world serves, too
  // Writes a request, if there is credit and room for it. *charged: whether it has its credit already.
  bool ask(int peer, const Record &record, bool *charged);
  bool ask(Get &get, uint32_t window, size_t offset);
  // Serves until `done`, which is called with the mutex held.
  template <class Done>
  WaitResult wait(const char *operation, int peer, int64_t timeout_ms, Done done);
  // The error of a wait that ended without success, if the connection to that rank is lost; else PHX_OK.
  phx_status raise_lost(const char *operation, int peer);
  phx_status raise(const char *operation, int peer, WaitResult result, int64_t timeout_ms);
  // Ends a request after its wait. `status`: how `rest`, its large data, has ended.
  phx_status finish(const char *operation, int peer, WaitResult result, int64_t timeout_ms, Transfers &rest,
                    phx_status status);

  Group &group_;
  TurnMutex turn_;     // of `create`
  uint32_t next_ = 0;  // the number of the next window
  std::mutex local_mutex_;
  std::shared_ptr<Group> local_;  // the ranks of this host, where the group is on several; written with the turn
  std::mutex mutex_;
  std::vector<Remote> remote_;
  std::map<uint32_t, Window *> windows_;
  size_t largest_ = 0;           // of all windows of this rank, those that are gone included, in bytes
  std::atomic<int> waiting_{0};  // threads that serve while they wait
  bool attends_ = false;
};

inline Windows &windows_of(const Group &group) { return group.attached<Windows>(); }

class Window {
 public:
  ~Window() { windows_.remove(number_); }
  phx_status check(const char *operation, int group_rank, size_t offset, size_t bytes) const;
  // The memory of a rank of this host, as it is mapped here; NULL for a rank of another host.
  char *memory(int group_rank) const {
    return is_here(group_rank) ? symm_->buffer(position(group_rank)) + parts_[group_rank].offset : nullptr;
  }
  phx_status put(int group_rank, size_t offset, const void *data, size_t bytes, bool signal, int64_t timeout_ms);
  phx_status get(int group_rank, size_t offset, void *data, size_t bytes, int64_t timeout_ms);
  phx_status wait_signal(int group_rank, int64_t timeout_ms);
  uint32_t signals(int group_rank);  // that have come and were not taken

 private:
  friend class Windows;
  struct Part {  // what a rank tells the others of its memory
    uint64_t number;
    uint64_t offset;  // of the window in its block
    uint64_t bytes;
  };
  Window(Windows &windows, Group &group, uint32_t number)
      : windows_(windows), group_(group), number_(number), come_(group.size()), taken_(group.size()) {}
  bool is_here(int group_rank) const { return group_.hosts().is_here(group_rank); }
  int position(int group_rank) const { return group_.hosts().position(group_rank); }
  bool take(int peer);  // a signal of a rank on another host
  char *own() const { return static_cast<char *>(block_->base) + parts_[group_.group_rank()].offset; }
  bool holds(size_t offset, size_t bytes) const {  // this rank's part
    const uint64_t size = parts_[group_.group_rank()].bytes;
    return bytes <= size && offset <= size - bytes;
  }

  Windows &windows_;
  Group &group_;
  const uint32_t number_;
  std::vector<Part> parts_;     // by group rank
  BlockRef block_;              // of this rank; guarded by the mutex of the windows
  std::shared_ptr<Symm> symm_;  // of the ranks of this host
  // By group rank, for those of other hosts. The release of `come` is after the data; pairs with the acquire in `take`.
  std::deque<SharedWord> come_, taken_;
};

}  // namespace phx
