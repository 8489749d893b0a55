// Small all-to-all messages among the members, with file descriptors. Rendezvous are built on them.
#include <cerrno>

#include "base/failpoint.h"
#include "group/group.h"

namespace phx {
namespace {

// The calls that exchange parcels. Their numbers cross the wire: new ones go to the end.
constexpr const char *kCalls[] = {"group_create",  "group_split",          "symm_rendezvous", "group_set_tuning",
                                  "gpu_workspace", "group_set_gpu_tuning", "window_create"};
constexpr uint32_t kRefused = 0x7fffffff;  // instead of the number of a call: the payload has the error
constexpr const char *kSameGroup = "group with a call that is collective. Make such calls from one thread";
constexpr uint32_t kCallCount = sizeof kCalls / sizeof kCalls[0];

constexpr int64_t kSendSliceMs = 5;                       // of a wait for room, after which the state is checked
constexpr uint32_t kWithDescriptors = uint32_t{1} << 31;  // in the number of a call: descriptors follow the parcel

uint32_t number_of(const char *call) {
  uint32_t i = 0;
  while (i < kCallCount && std::strcmp(kCalls[i], call) != 0) ++i;
  return i + 1;
}
const char *name_of(uint32_t number) {
  number &= ~kWithDescriptors;
  return number >= 1 && number <= kCallCount ? kCalls[number - 1] : "something else";
}

}  // namespace

phx_status Group::send(int i, const Envelope &envelope, const void *payload, const int *fds, const Deadline &deadline,
                       const std::atomic<int32_t> &interrupted) {
  Link &link = *links_[i];
  for (;;) {
    int error = 0;
    const Sent sent = try_send(link, envelope, payload, fds, &error);
    if (sent == Sent::kDone) return PHX_OK;
    if (sent == Sent::kFailed) return send_failed(link, error);
    if (interrupted.load() != 0) return PHX_ERR_REVOKED;
    if (deadline.passed())
      return fail_text(PHX_ERR_TIMEOUT, "send", "%s: %s does not read its messages",
                       timed_out(deadline.budget_ms()).c_str(), describe(i).c_str())
          .peer(link.rank);
    if (look_ && look_() != PHX_OK) return last_error().status;
    (void)world_->progress().keep_going(Deadline::after_ms(std::min(kSendSliceMs, deadline.left_ms())),
                                        [&](const Deadline &until) {
                                          await_room(link, sent, until);
                                          return PHX_ERR_TIMEOUT;
                                        });
  }
}

void Group::note_end(int i) {
  const LinkState state = links_[i]->state.load();
  // A process that has ended after its rank left in good order has not died.
  on_peer_gone(*links_[i], state, state == LinkState::kDead && links_[i]->process_has_ended());
}

// Returns the error of a message that could not be sent.
phx_status Group::raise_send(const char *operation, int i, phx_status status) {
  if (failed()) return raise_cause(operation);
  if (status == PHX_ERR_REVOKED || status == PHX_ERR_PEER_DEAD) {  // it left, or ended without being noticed yet
    world_->monitor().catch_up();
    if (links_[i]->state.load() != LinkState::kAlive) {
      note_end(i);
      return raise_cause(operation);
    }
  }
  if (interrupt_requested()) return raise_interrupted(operation);
  return fail_all(Failed(status).operation(operation).in(name().c_str(), self_rank()).peer(rank_of(i)));
}

phx_status Group::exchange(const char *operation, const std::string &bytes, const std::vector<int> &fds,
                           const Deadline &deadline, std::vector<Parcel> *out) {
  if (bytes.size() > kMaxPayload || fds.size() > kMaxFds) return fail(PHX_ERR_INTERNAL, operation, "parcel too large");
  Turn mutex;
  PHX_TRY(take_turn(operation, exchange_mutex_, deadline, kSameGroup, true, &mutex));
  if (failed()) {
    withdraw();
    return raise_revoked(operation);
  }
  const ExchangeTurn turn(*this);
  const uint64_t ordinal = turn.ordinal;
  const uint32_t number = number_of(operation), length = static_cast<uint32_t>(bytes.size());
  Envelope envelope{
      kWireMagic, MessageKind::kExchange, 0, id_, ordinal, length, number | (fds.empty() ? 0 : kWithDescriptors)};
  std::vector<bool> came(size(), false);
  const auto text = [&] {
    std::vector<int> late;
    for (int i = 0; i < size(); ++i)
      if (i != group_rank() && !came[i] && !world_->monitor().has_message(records_[i].uuid, id_, ordinal))
        late.push_back(i);
    return still_waiting(operation, 0, late);
  };
  const LongWait long_wait(WaitText(text), deadline);
  for (int i = 0; i < size(); ++i) {
    if (!links_[i]) continue;
    PHX_FAILPOINT("exchange", 1);
    const phx_status status = send(i, envelope, bytes.data(), nullptr, deadline, interruptions_[i]);
    if (status != PHX_OK) return raise_send(operation, i, status);
  }

  PHX_FAILPOINT("exchange", 2);
  std::vector<Parcel> parcels(size());
  parcels[group_rank()].bytes = bytes;
  std::vector<bool> descriptors_follow(size(), false);  // not every rank sends some: see symm/pads.h
  Late late;
  for (int i = 0; i < size(); ++i) {
    if (i == group_rank()) continue;
    Message message;
    phx_status status = take_parcel(operation, i, ordinal, deadline, &message, &late);
    if (status == PHX_IN_PROGRESS) continue;
    if (status != PHX_OK) return status;
    came[i] = true;
    PHX_FAILPOINT("exchange", 3);
    if (message.envelope.call == kRefused) return raise_refused(operation, i, message.payload);
    if ((message.envelope.call & ~kWithDescriptors) != number)
      return fail_all(raise(PHX_ERR_MISMATCH, operation,
                            "rank %d (pid %d) called %s while rank %d called %s. Every rank of a group must make the "
                            "same calls in the same order.",
                            rank_of(i), pid_of(i), name_of(message.envelope.call), self_rank(), operation)
                          .peer(rank_of(i)));
    parcels[i].bytes = std::move(message.payload);
    if (!hosts_.is_here(i)) continue;  // descriptors stay on their host
    descriptors_follow[i] = (message.envelope.call & kWithDescriptors) != 0;
    if (fds.empty()) continue;
    // Rank i is in the same call, so it will receive the descriptors: none stays unread in a socket or a queue.
    envelope.ordinal = ordinal | kDescriptors;
    envelope.payload_bytes = 0;
    envelope.fd_count = static_cast<uint16_t>(fds.size());
    status = send(i, envelope, nullptr, fds.data(), deadline, interruptions_[i]);
    if (status != PHX_OK) return raise_send(operation, i, status);
  }
  for (int i = 0; i < size() && late.first < 0; ++i) {
    if (!descriptors_follow[i]) continue;
    Message message;
    const phx_status status = take_parcel(operation, i, ordinal | kDescriptors, deadline, &message, &late);
    if (status == PHX_IN_PROGRESS) continue;
    if (status != PHX_OK) return status;
    if (message.fds.size() < message.envelope.fd_count)
      return fail_all(
          fail_errno(EMFILE, operation,
                     "rank %d of group '%s' has no free file descriptor for the memory that %s sent; raise `ulimit -n`",
                     self_rank(), name().c_str(), describe(i).c_str())
              .in(name().c_str(), self_rank())
              .peer(self_rank()));
    parcels[i].fds = std::move(message.fds);
  }
  if (late.first >= 0)
    return fail_all(raise(PHX_ERR_TIMEOUT, operation, "%s: rank %d still waits for %s to make the same call. %s",
                          timed_out(deadline.budget_ms()).c_str(), self_rank(), late.ranks.c_str(),
                          advice(late.first).c_str())
                        .peer(rank_of(late.first)));
  *out = std::move(parcels);
  return PHX_OK;
}

phx_status Group::raise_malformed(const char *operation, int i) {
  return fail_all(raise(PHX_ERR_ABI, operation,
                        "rank %d sent malformed data; do all ranks run the same build of phalanx-core?", rank_of(i))
                      .peer(rank_of(i)));
}

phx_status Group::raise_refused(const char *operation, int i, const std::string &payload) {
  ErrorInfo theirs;
  if (payload.size() == sizeof theirs) std::memcpy(&theirs, payload.data(), sizeof theirs);
  theirs.text[sizeof theirs.text - 1] = '\0';
  return fail_all(raise(PHX_ERR_MISMATCH, operation,
                        "rank %d (pid %d) refused its own call, and rank %d did not. Its error: %s", rank_of(i),
                        pid_of(i), self_rank(), theirs.text)
                      .peer(rank_of(i)));
}

phx_status Group::refuse_exchange() {
  const KeptError error;
  LazyDeadline until(world_->default_timeout_ms(), &world_->progress());
  Turn mutex(exchange_mutex_, std::defer_lock);
  if (!may_refuse() || !phx::take_turn(mutex, until)) return error.info().status;
  const ExchangeTurn turn(*this);
  const Envelope envelope{kWireMagic, MessageKind::kExchange, 0, id_, turn.ordinal, sizeof error.info(), kRefused};
  for (const LinkRef &link : links_)
    if (link) world_->monitor().post(link, envelope, &error.info());
  return error.info().status;
}

// Receives one message of an exchange. PHX_IN_PROGRESS: rank i is late, see *late. Other errors end the call.
phx_status Group::take_parcel(const char *operation, int i, uint64_t ordinal, const Deadline &deadline, Message *out,
                              Late *late) {
  bool useless = false;
  const phx_status status = await_message(i, ordinal, deadline, out, &useless);
  if (status == PHX_OK) return PHX_OK;
  if (useless) return fail_all(Failed(status));
  if (status != PHX_ERR_TIMEOUT) {
    if (!failed()) note_end(i);
    return raise_cause(operation);
  }
  if (interrupt_requested()) return raise_interrupted(operation);
  if (late->first < 0) late->first = i;
  if (!late->ranks.empty()) late->ranks += ", ";
  late->ranks += describe(i);
  return PHX_IN_PROGRESS;
}

phx_status Group::show_ring(const char *operation, int i, const std::string &bytes, int fd, const Deadline &deadline) {
  const Envelope envelope{kWireMagic, MessageKind::kExchange, 1, id_, kRing, static_cast<uint32_t>(bytes.size()), 0};
  const phx_status status = send(i, envelope, bytes.data(), &fd, deadline, interruptions_[i]);
  return status == PHX_OK ? PHX_OK : raise_send(operation, i, status);
}

phx_status Group::await_ring(const char *operation, int i, const Deadline &deadline, Parcel *out) {
  Message message;
  bool useless = false;
  const auto text = [&] { return still_waiting(operation, 0, {i}); };
  const LongWait long_wait(WaitText(text), deadline);
  const phx_status status = await_message(i, kRing, deadline, &message, &useless);
  if (status == PHX_OK) {
    out->bytes = std::move(message.payload);
    out->fds = std::move(message.fds);
    return PHX_OK;
  }
  if (status != PHX_ERR_TIMEOUT) {
    if (!failed()) note_end(i);
    return raise_in_flight(operation);
  }
  if (interrupt_requested()) return raise_interrupted(operation);
  return fail_all(raise(PHX_ERR_TIMEOUT, operation,
                        "%s: rank %d still waits for %s to send or receive its first message. %s",
                        timed_out(deadline.budget_ms()).c_str(), self_rank(), describe(i).c_str(), advice(i).c_str())
                      .peer(rank_of(i)));
}

// Receives the message of rank i with that ordinal. *useless: it will not come, because the creation of the group
// failed.
phx_status Group::await_message(int i, uint64_t ordinal, const Deadline &deadline, Message *out, bool *useless) {
  for (;;) {
    const Deadline look_at = look_ ? Deadline::after_ms(std::min(kLookMs, deadline.left_ms())) : deadline;
    phx_status status = world_->progress().keep_going(look_at, [&](const Deadline &until) {
      return world_->monitor().take(records_[i].uuid, id_, ordinal, until, interruptions_[i], out);
    });
    if (status == PHX_ERR_REVOKED || status == PHX_ERR_PEER_DEAD) {
      // A message that was sent before that failure may be unread. All other ranks may have completed the call with it.
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
  ErrorInfo mine;
  if (status != PHX_OK) mine = last_error();
  std::vector<ErrorInfo> all;
  const phx_status exchanged = exchange_all(operation, mine, deadline, &all);
  if (status != PHX_OK) return set_last_error(mine);
  if (exchanged != PHX_OK) return exchanged;
  for (int i = 0; i < size(); ++i) {
    ErrorInfo &theirs = all[i];
    theirs.text[sizeof theirs.text - 1] = '\0';
    if (theirs.status == PHX_OK) continue;
    if (theirs.status > 0 || theirs.status < PHX_ERR_INTERNAL)
      theirs.status = PHX_ERR_INTERNAL;  // neither an error nor PHX_OK
    return raise(theirs.status, operation, "it failed on rank %d: %s", rank_of(i), theirs.text).peer(rank_of(i));
  }
  return PHX_OK;
}

phx_status Group::agree_tuning(const Tuning &wish, int64_t timeout_ms) {
  Tuning agreed{};
  PHX_TRY(agree_values("group_set_tuning", wish, builtin_tuning(size(), cores_), timeout_ms, &agreed));
  tuning_.publish(agreed);
  return PHX_OK;
}

}  // namespace phx
