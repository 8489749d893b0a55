// One send or one receive, from the call to its completion.
#pragma once

#include "group/work.h"
#include "net/net.h"
#include "p2p/layout.h"

namespace phx {

class Messenger;

// A blocking call has its transfer on its stack; one that was started is the work of the caller's handle.
struct Transfer final : Work {
  explicit Transfer(Messenger &of) : messenger(of) {}
  phx_status wait(int64_t timeout_ms) override;
  phx_status test() override;

  Messenger &messenger;  // belongs to the group, which the caller or the handle keeps alive
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
  int from = PHX_ANY_RANK;             // the sender of a matched receive's message
  std::unique_ptr<Transfers> carried;  // of stage kCarried
  std::shared_ptr<Transfer> self;      // of a started transfer: keeps it alive until it is complete
  Transfer *next = nullptr, *previous = nullptr;  // in one list at a time

  // How much of a send may be in the ring.
  size_t allowed() const { return cleared ? bytes : eager; }
  // The peer; PHX_ANY_RANK if a receive has none yet.
  int other() const { return sends ? peer : from; }
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

  // The first element for which `is` is true; NULL if there is none.
  template <class Is>
  T *find(Is is) const {
    T *element = front_;
    while (element != nullptr && !is(*element)) element = element->next;
    return element;
  }

 private:
  T *front_ = nullptr;
  T *back_ = nullptr;
};

}  // namespace phx
