// One send or one receive, from the call to its completion.
#pragma once

#include <atomic>
#include <memory>

#include "group/work.h"
#include "net/net.h"
#include "p2p/layout.h"
#include "phalanx/phalanx.h"

namespace phx {

struct Transfer {
  bool sends = false;
  const char *in = nullptr;  // of a send
  char *out = nullptr;       // of a receive
  size_t bytes = 0;
  MessageHead head{};
  int peer = 0;  // group rank; PHX_ANY_RANK for receives

  // Which list of the messenger it is in.
  enum class Stage : uint8_t {
    kNone,       // none
    kQueued,     // a send: some of its eager part is not in the ring yet
    kAnnounced,  // a send: the receiver has its RTS, and the sender has no CTS
    kData,       // a send: there is a CTS, and not all data is in the ring
    kPosted,     // a receive without a matching message
    kClearing,   // a receive: its CTS is not in the ring yet
    kFilling,    // a receive: more data is to come
    kCarried     // with a rank of another host: the carrier has the data that follows the CTS
  };

  // State of the messenger.
  Stage stage = Stage::kNone;
  bool planned = false;                // a send: Messenger::plan has decided how it is sent
  bool begun = false;                  // a send: its EAGER or RTS is in the ring
  bool rendezvous = false;             // it is announced by an RTS
  bool cleared = false;                // a send: its CTS has come
  bool owes_credit = false;            // a receive: the credit of its eager part has not been given back
  uint32_t number = 0;                 // of the message between its two ranks
  size_t eager = 0;                    // bytes that come without a CTS
  size_t moved = 0;                    // bytes of a send that are in the ring, or of a matched receive that have come
  int source = PHX_ANY_RANK;           // the sender of a matched receive's message
  std::unique_ptr<Transfers> carried;  // of stage kCarried
  WorkRef work;                        // of a started transfer: owns it, and keeps it alive until it is complete
  std::unique_ptr<ErrorInfo> error;
  std::atomic<phx_status> state{PHX_IN_PROGRESS};  // written last: after that no other thread touches the transfer
  Transfer *next = nullptr, *previous = nullptr;   // in one list at a time

  bool complete() const { return state.load(std::memory_order_acquire) != PHX_IN_PROGRESS; }
  // How much of a send may be in the ring.
  size_t allowed() const { return cleared ? bytes : eager; }
  // The peer; PHX_ANY_RANK if a receive has none yet.
  int other() const { return sends ? peer : source; }
  const char *operation() const { return sends ? "send" : "recv"; }
};

// A list through the members `next` and `previous` of its elements: no allocation, and removal from the middle.
template <class T>
class LinkedList {
 public:
  T *front() const { return front_; }
  bool empty() const { return front_ == nullptr; }

  void push_back(T *element) {
    element->next = nullptr;
    element->previous = back_;
    (back_ != nullptr ? back_->next : front_) = element;
    back_ = element;
  }

  void remove(T *element) {
    (element->previous != nullptr ? element->previous->next : front_) = element->next;
    (element->next != nullptr ? element->next->previous : back_) = element->previous;
    element->next = element->previous = nullptr;
  }

 private:
  T *front_ = nullptr;
  T *back_ = nullptr;
};

}  // namespace phx
