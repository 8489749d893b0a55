// How transfers end: complete, in error, or with the group; and what the errors say.
#include <cinttypes>
#include <cstdio>

#include "p2p/messenger.h"

namespace phx {
namespace {

// "float32, 12, tag 7"
std::string describe(const MessageHead &head) {
  char text[96];
  std::snprintf(text, sizeof text, "%s, %" PRIu64 ", tag %" PRIu32, phx_dtype_name(head.dtype), head.count, head.tag);
  return text;
}

}  // namespace

void Messenger::finish(Transfer &transfer, phx_status status) {
  completed_ = true;
  const std::shared_ptr<Transfer> started = std::move(transfer.self);  // alive until the end of this function
  if (started) group_->world().progress().ended(*this);
  transfer.settle(status, transfer.sends ? -1 : transfer.from);  // after that no other thread touches the transfer
}

void Messenger::finish_with(Transfer &transfer, const ErrorInfo &error) {
  const KeptError kept;  // of this thread: the transfer may be another thread's
  set_last_error(error);
  finish(transfer, error.status);
}

void Messenger::fail(Transfer *transfer, const ErrorInfo &error) {
  closed_ = true;
  if (!failure_) failure_ = error;
  if (transfer == nullptr) return;
  withdraw(*transfer);
  finish_with(*transfer, error);
}

void Messenger::end_interrupted(Transfer &transfer) {
  group_->raise_interrupted(transfer.operation());  // takes no lock of a messenger
  withdraw(transfer);
  finish_with(transfer, last_error());
  abort_all();
}

bool Messenger::interrupted(const Transfer &transfer) const {
  if (closed_ || group_failed()) return true;
  const int peer = transfer.from != PHX_ANY_RANK ? transfer.from : transfer.peer;
  if (peer != PHX_ANY_RANK) return is_cut_off(peer);
  for (int i = 0; i < size_; ++i)
    if (i != self_ && !is_cut_off(i)) return false;
  return size_ > 1;
}

// Removes a transfer from its list. Data that comes later for a matched receive is dropped.
void Messenger::withdraw(Transfer &transfer) {
  const int other = transfer.other();
  const Transfer::Stage stage = std::exchange(transfer.stage, Transfer::Stage::kNone);
  switch (stage) {
    case Transfer::Stage::kNone: return;
    case Transfer::Stage::kQueued: outbound_[other].queue.remove(&transfer); break;
    case Transfer::Stage::kAnnounced:
      announced_.remove(&transfer);
      if (Arrival *own = matcher_.find_own(transfer)) matcher_.take(own);
      break;
    case Transfer::Stage::kData: outbound_[other].data.remove(&transfer); break;
    case Transfer::Stage::kPosted: return matcher_.withdraw(&transfer);
    case Transfer::Stage::kClearing: outbound_[other].clears.remove(&transfer); break;
    case Transfer::Stage::kFilling: filling_.remove(&transfer); break;
    case Transfer::Stage::kCarried:
      outbound_[other].carried.remove(&transfer);
      transfer.carried.reset();
      break;
  }
  count(outbound_[other]);
  const bool waits_for_cts = transfer.sends && transfer.begun && transfer.rendezvous && !transfer.cleared;
  if (waits_for_cts) --outbound_[other].announced;
  if (!transfer.sends || waits_for_cts) --inbound_[other].awaited;
}

// A transfer with that peer; NULL if there is none.
Transfer *Messenger::any_with(int peer) {
  const Outbound &outbound = outbound_[peer];
  for (Transfer *transfer : {outbound.clears.front(), outbound.data.front(), outbound.queue.front(),
                             outbound.carried.front(), announced_.any(peer), filling_.any(peer)})
    if (transfer != nullptr) return transfer;
  return matcher_.any_posted(peer);
}

void Messenger::abort(Transfer &transfer, int peer) {
  withdraw(transfer);
  finish_with(transfer, ended(transfer, peer));
}

void Messenger::abort_peer(int peer) {
  while (Transfer *transfer = any_with(peer)) abort(*transfer, peer);
  if (Arrival *unfinished = std::exchange(inbound_[peer].arrival, nullptr)) matcher_.take(unfinished);
}

void Messenger::abort_all() {
  closed_ = true;
  for (int i = 0; i < size_; ++i) abort_peer(i);
  while (Transfer *receive = matcher_.any_posted(PHX_ANY_RANK)) abort(*receive, PHX_ANY_RANK);
}

// Drops transfers whose handles are gone, without an error: the group can no longer be asked for the cause.
Messenger::~Messenger() {
  for (Remote &remote : remote_) remote.ring.reset();
  mind_leaving();
  const auto drop = [&](Transfer *transfer) {
    withdraw(*transfer);
    if (!transfer->self) return;
    group_->world().progress().ended(*this);
    const std::shared_ptr<Transfer> last = std::move(transfer->self);
  };
  for (int i = 0; i < size_; ++i)
    while (Transfer *transfer = any_with(i)) drop(transfer);
  while (Transfer *receive = matcher_.any_posted(PHX_ANY_RANK)) drop(receive);
}

// ---- texts

ErrorInfo Messenger::error_of(const char *operation, phx_status status, int peer, const std::string &text) const {
  const KeptError kept;
  group_->raise(status, operation, "%s", text.c_str()).peer(peer == PHX_ANY_RANK ? -1 : group_->rank_of(peer));
  return last_error();
}

// Why a transfer with `peer` cannot go on: the group failed or, if it did not, that rank has left.
ErrorInfo Messenger::ended(const Transfer &transfer, int peer) const {
  const KeptError kept;
  group_->raise_in_flight(transfer.operation(), 0);
  const ErrorInfo cause = last_error();
  if (group_failed() || peer == PHX_ANY_RANK || cause.peer == group_->rank_of(peer)) return cause;
  return error_of(transfer.operation(), PHX_ERR_PEER_DEAD, peer,  // `cause` names another rank that left earlier
                  "rank " + std::to_string(group_->rank_of(peer)) + " (pid " + std::to_string(group_->pid_of(peer)) +
                      ") has left: its world was finalized");
}

ErrorInfo Messenger::mismatch(const Transfer &receive, int source, const MessageHead &sent) const {
  return error_of("recv", PHX_ERR_MISMATCH, source,
                  group_->describe(source) + " called send(" + phx::describe(sent) + ") while rank " +
                      std::to_string(group_->self_rank()) + " called recv(" + phx::describe(receive.head) +
                      "). A send and the receive that matches it must have the same dtype and count.");
}

ErrorInfo Messenger::timeout(const Transfer &transfer, int64_t timeout_ms) const {
  const int peer = transfer.from != PHX_ANY_RANK ? transfer.from : transfer.peer;
  const std::string who = peer == PHX_ANY_RANK ? "any rank" : group_->describe(peer);
  const auto of = [](size_t part, size_t whole) { return std::to_string(part) + " of " + std::to_string(whole); };
  std::string text = group_->timed_out(timeout_ms) + ": rank " + std::to_string(group_->self_rank()) +
                     " still waits for " + who + " to ";
  if (transfer.sends) {
    text += "receive its send(" + phx::describe(transfer.head) + "), of which " + of(transfer.moved, transfer.bytes) +
            " bytes were sent.";
    if (transfer.rendezvous && !transfer.cleared)
      text += " A message of this size, or beyond what the receiver keeps, waits for its receive.";
  } else {
    text += "answer its recv(" + phx::describe(transfer.head) + ")";
    if (transfer.from != PHX_ANY_RANK) text += ", of which " + of(transfer.moved, transfer.bytes) + " bytes came";
    text += ".";
    if (const Arrival *other = matcher_.oldest(peer))
      text += " No receive has matched send(" + phx::describe(other->head) + ") from rank " +
              std::to_string(group_->rank_of(other->source)) + ", which has arrived.";
  }
  return error_of(
      transfer.operation(), PHX_ERR_TIMEOUT, peer,
      text + " " + (peer == PHX_ANY_RANK ? "Find out why no rank sends, or raise timeout_ms." : group_->advice(peer)));
}

bool Messenger::fail_broken(int peer, const char *problem) {
  fail(nullptr, broken(peer, problem));
  return false;
}

ErrorInfo Messenger::broken(int peer, const char *problem) const {
  if (is_remote(peer))
    return error_of("messages", PHX_ERR_INTERNAL, peer,
                    "what came from " + group_->describe(peer) + " is broken: " + problem + ".");
  return error_of("messages", PHX_ERR_INTERNAL, peer,
                  "the memory shared with " + group_->describe(peer) + " is broken: " + problem +
                      ". Something in one of the two processes wrote where it must not.");
}

}  // namespace phx
