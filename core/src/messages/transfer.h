// One send or one receive, from the call to its completion.
#pragma once

#include <atomic>
#include <memory>

#include "messages/layout.h"
#include "phalanx/phalanx.h"
#include "work/work.h"

namespace phx {

struct Transfer {
  bool sends = false;
  const char *in = nullptr;  // of a send
  char *out = nullptr;       // of a receive
  size_t bytes = 0;
  MessageHead head{};
  int peer = 0;  // group rank; PHX_ANY_RANK for receives

  // Of the messenger.
  size_t moved = 0;           // bytes of a send that are in the ring
  int source = PHX_ANY_RANK;  // where a matched receive comes from
  WorkRef work;               // of a started one: keeps it, and with it this, until it is complete
  std::unique_ptr<phx_error_info> error;
  std::atomic<phx_status> state{PHX_IN_PROGRESS};  // written last: then nobody else touches a transfer any more
  Transfer *next = nullptr, *previous = nullptr;   // in one list at a time

  bool complete() const { return state.load(std::memory_order_acquire) != PHX_IN_PROGRESS; }
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
