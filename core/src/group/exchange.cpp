// Small all-to-all messages among the members, with file descriptors: what rendezvous is made of.
#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>

#include "base/failpoint.h"
#include "group/group.h"

namespace phx {
namespace {

// The calls that exchange parcels. Their numbers cross the wire: new ones go to the end.
constexpr const char *kCalls[] = {"group_create",     "group_split",   "symm_rendezvous",
                                  "group_set_tuning", "gpu_workspace", "group_set_gpu_tuning"};
constexpr uint32_t kCallCount = sizeof kCalls / sizeof kCalls[0];

// The number of the message that carries a road: exchanges count up from 1, and agreements begin at 2^63.
constexpr uint64_t kRoad = uint64_t{1} << 62;

uint32_t number_of(const char *call) {
  uint32_t i = 0;
  while (i < kCallCount && std::strcmp(kCalls[i], call) != 0) ++i;
  return i + 1;
}
const char *name_of(uint32_t number) {
  return number >= 1 && number <= kCallCount ? kCalls[number - 1] : "something else";
}

}  // namespace

phx_status Group::exchange(const char *operation, const std::string &bytes, const std::vector<int> &fds,
                           const Deadline &deadline, std::vector<Parcel> *out) {
  if (bytes.size() > kMaxPayload || fds.size() > kMaxFds)
    return fail(PHX_ERR_INTERNAL, operation, "%s: parcel too large", operation);
  std::lock_guard<std::mutex> lock(exchange_mutex_);
  if (failed()) return raise_revoked(operation);
  const uint64_t ordinal = ++exchange_ordinal_;
  const Envelope envelope{kWireMagic,
                          MessageKind::kExchange,
                          static_cast<uint16_t>(fds.size()),
                          id_,
                          ordinal,
                          static_cast<uint32_t>(bytes.size()),
                          number_of(operation)};
  for (const LinkRef &link : links_) {
    if (!link) continue;
    PHX_FAILPOINT("exchange", 1);
    const phx_status status = send_message(*link, envelope, bytes.data(), fds.data(), deadline);
    if (status == PHX_OK) continue;
    if (failed()) return raise_in_flight(operation, 0);
    if (interrupt_requested()) return raise_interrupted(operation);
    amend_last_error(operation, name().c_str(), self_rank(), -1);
    reported_.store(true);
    return fail_with(last_error(), true);
  }

  PHX_FAILPOINT("exchange", 2);
  std::vector<Parcel> parcels(size());
  parcels[group_rank()].bytes = bytes;
  std::string late;
  int first_late = -1;
  for (int i = 0; i < size(); ++i) {
    if (i == group_rank()) continue;
    Message message;
    bool useless = false;
    const phx_status status = await_message(i, ordinal, deadline, &message, &useless);
    if (useless) {
      reported_.store(true);
      return fail_with(last_error(), true);
    }
    PHX_FAILPOINT("exchange", 3);
    if (status == PHX_OK && message.envelope.call != envelope.call) {
      fail(PHX_ERR_MISMATCH, operation,
           "%s on group '%s': rank %d (pid %d) called %s while rank %d called %s. Every rank of a group must make the "
           "same calls in the same order.",
           operation, name().c_str(), rank_of(i), pid_of(i), name_of(message.envelope.call), self_rank(), operation);
      amend_last_error(nullptr, name().c_str(), self_rank(), rank_of(i));
      reported_.store(true);
      return fail_with(last_error(), true);
    }
    if (status == PHX_OK && message.fds.size() < message.envelope.fd_count) {
      fail_errno(EMFILE, operation, "%s on group '%s': rank %d has no file descriptor left for what %s sent", operation,
                 name().c_str(), self_rank(), describe(i).c_str());
      amend_last_error(nullptr, name().c_str(), self_rank(), self_rank());
      reported_.store(true);
      return fail_with(last_error(), true);
    }
    if (status == PHX_OK) {
      parcels[i].bytes = std::move(message.payload);
      parcels[i].fds = std::move(message.fds);
      continue;
    }
    if (status != PHX_ERR_TIMEOUT) {
      if (!failed()) on_peer_gone(*links_[i], links_[i]->state.load());
      return raise_in_flight(operation, 0);
    }
    if (interrupt_requested()) return raise_interrupted(operation);
    if (first_late < 0) first_late = i;
    if (!late.empty()) late += ", ";
    late += describe(i);
  }
  if (first_late >= 0) {
    fail(PHX_ERR_TIMEOUT, operation,
         "%s on group '%s': after %lld ms rank %d still waits for %s to make the same call.", operation, name().c_str(),
         static_cast<long long>(deadline.budget_ms()), self_rank(), late.c_str());
    amend_last_error(nullptr, name().c_str(), self_rank(), rank_of(first_late));
    reported_.store(true);
    return fail_with(last_error(), true);
  }
  *out = std::move(parcels);
  return PHX_OK;
}

phx_status Group::show_road(const char *operation, int i, const std::string &bytes, int fd, const Deadline &deadline) {
  const Envelope envelope{kWireMagic, MessageKind::kExchange, 1, id_, kRoad, static_cast<uint32_t>(bytes.size()), 0};
  const phx_status status = send_message(*links_[i], envelope, bytes.data(), &fd, deadline);
  if (status == PHX_OK) return PHX_OK;
  if (failed()) return raise_in_flight(operation, 0);
  if (interrupt_requested()) return raise_interrupted(operation);
  amend_last_error(operation, name().c_str(), self_rank(), rank_of(i));
  reported_.store(true);
  return fail_with(last_error(), true);
}

phx_status Group::await_road(const char *operation, int i, const Deadline &deadline, Parcel *out) {
  Message message;
  bool useless = false;
  const phx_status status = await_message(i, kRoad, deadline, &message, &useless);
  if (status == PHX_OK) {
    out->bytes = std::move(message.payload);
    out->fds = std::move(message.fds);
    return PHX_OK;
  }
  if (status != PHX_ERR_TIMEOUT) {
    if (!failed()) on_peer_gone(*links_[i], links_[i]->state.load());
    return raise_in_flight(operation, 0);
  }
  if (interrupt_requested()) return raise_interrupted(operation);
  fail(PHX_ERR_TIMEOUT, operation,
       "%s on group '%s': after %lld ms rank %d still waits for %s to send or receive its first message. Look at why "
       "it is late, or raise timeout_ms.",
       operation, name().c_str(), static_cast<long long>(deadline.budget_ms()), self_rank(), describe(i).c_str());
  amend_last_error(nullptr, name().c_str(), self_rank(), rank_of(i));
  reported_.store(true);
  return fail_with(last_error(), true);
}

// That message of rank i. *useless: instead, while the group is made, why it will not come; that is the thread's error.
phx_status Group::await_message(int i, uint64_t ordinal, const Deadline &deadline, Message *out, bool *useless) {
  for (;;) {
    const Deadline look_at = look_ ? Deadline::after_ms(std::min(kLookMs, deadline.left_ms())) : deadline;
    phx_status status = world_->progress().keep_going(look_at, [&](const Deadline &until) {
      return world_->monitor().take(records_[i].uuid, id_, ordinal, until, interruptions_[i], out);
    });
    if (status == PHX_ERR_REVOKED || status == PHX_ERR_PEER_DEAD) {
      // What was sent before that failure may be here, unread: what all others have completed is complete here too.
      world_->monitor().catch_up();
      status = world_->monitor().take(records_[i].uuid, id_, ordinal, deadline, interruptions_[i], out);
    }
    if (status != PHX_ERR_TIMEOUT || !look_ || deadline.passed()) return status;
    status = look_();
    *useless = status != PHX_OK;
    if (*useless) return status;
  }
}

phx_status Group::confirm(const char *operation, phx_status status, const Deadline &deadline) {
  phx_error_info mine = make_error_info();
  if (status != PHX_OK) mine = last_error();
  std::vector<Parcel> all;
  const phx_status exchanged =
      exchange(operation, std::string(reinterpret_cast<const char *>(&mine), sizeof mine), {}, deadline, &all);
  if (exchanged != PHX_OK) return status != PHX_OK ? set_last_error(mine) : exchanged;
  if (status != PHX_OK) return set_last_error(mine);
  for (int i = 0; i < size(); ++i) {
    phx_error_info theirs;
    if (all[i].bytes.size() != sizeof theirs)
      return fail(PHX_ERR_INTERNAL, operation, "%s: malformed confirmation", operation);
    std::memcpy(&theirs, all[i].bytes.data(), sizeof theirs);
    theirs.text[sizeof theirs.text - 1] = '\0';
    if (theirs.status == PHX_OK) continue;
    if (theirs.status > 0 || theirs.status < PHX_ERR_INTERNAL)
      theirs.status = PHX_ERR_INTERNAL;  // no error, and yet no success
    fail(theirs.status, operation, "%s on group '%s': it failed on rank %d: %s", operation, name().c_str(), rank_of(i),
         theirs.text);
    amend_last_error(nullptr, name().c_str(), self_rank(), rank_of(i));
    return theirs.status;
  }
  return PHX_OK;
}

}  // namespace phx
