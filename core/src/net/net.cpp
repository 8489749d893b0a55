#include "net/net.h"

#include <algorithm>
#include <cstring>

#include "base/error.h"
#include "base/failpoint.h"

namespace phx {
namespace {

constexpr const char *kCreate = "group_create";
constexpr size_t kMemoryKept = 8;  // pieces of memory that wait for their next use

constexpr uint32_t kMaxAddress = 64 << 10;  // bytes of a rank's address at the carrier

// A part of an address, which may be longer than a parcel.
struct AddressPart {
  uint32_t number;  // of the group on that rank
  uint32_t total;   // bytes of the whole
  char bytes[960];
};

}  // namespace

Net::~Net() { disconnect_all(false); }

phx_status Net::prepare() { return Endpoint::of(group_.world(), &endpoint_); }

phx_status Net::connect(const Deadline &deadline) {
  // In a derived group this rank may be the only one without.
  PHX_TRY(group_.confirm(kCreate, endpoint_ ? PHX_OK : prepare(), deadline));
  number_ = endpoint_->take_number();
  peers_.assign(group_.size(), nullptr);
  ended_.assign(group_.size(), false);
  phx_status status = exchange_addresses(deadline);
  PHX_FAILPOINT("net_connect", 1);
  if (status == PHX_OK) status = greet(deadline);
  PHX_FAILPOINT("net_connect", 2);
  return status;
}

phx_status Net::exchange_addresses(const Deadline &deadline) {
  const std::string &own = endpoint_->address();
  numbers_.assign(group_.size(), 0);
  where_.assign(group_.size(), "");
  for (size_t sent = 0, longest = 1; sent < longest; sent += sizeof AddressPart::bytes) {
    AddressPart mine{number_, static_cast<uint32_t>(own.size()), {}};
    const size_t rest = own.size() - std::min(sent, own.size());
    std::memcpy(mine.bytes, own.data() + std::min(sent, own.size()), std::min(rest, sizeof mine.bytes));
    std::vector<AddressPart> all;
    PHX_TRY(group_.exchange_all(kCreate, mine, deadline, &all));
    for (int i = 0; i < group_.size(); ++i) {
      const AddressPart &theirs = all[i];
      if (theirs.total > kMaxAddress) return group_.raise_malformed(kCreate, i);
      numbers_[i] = static_cast<uint16_t>(theirs.number);
      longest = std::max<size_t>(longest, theirs.total);
      const size_t left = theirs.total - std::min<size_t>(where_[i].size(), theirs.total);
      where_[i].append(theirs.bytes, std::min(left, sizeof theirs.bytes));
    }
  }
  return PHX_OK;
}

// Every rank exchanges a message with the ranks at its position on the other hosts, so that a network that the carrier
// cannot use fails the creation of the group and not a collective.
phx_status Net::greet(const Deadline &deadline) {
  const Hosts &hosts = group_.hosts();
  Transfers transfers(*this);
  std::vector<uint64_t> ids(hosts.count());
  const uint64_t id = group_.id();
  const MessageName name{MessageName::kMeeting, 0, 0};
  for (int host = 0; host < hosts.count(); ++host) {
    if (host == hosts.own() || hosts.local_rank() >= hosts.size(host)) continue;
    const int rank = hosts.rank(host, hosts.local_rank());
    transfers.recv(rank, name, &ids[host], sizeof ids[host]);
    transfers.send(rank, name, &id, sizeof id);
  }
  LazyDeadline until(deadline, &group_.world().progress());
  phx_status status = PHX_IN_PROGRESS;
  const WaitResult result = wait(
      kCreate, until,
      [&] {
        status = transfers.poll();
        return status == PHX_IN_PROGRESS ? WaitResult::kNothing : WaitResult::kReached;
      },
      [&] { return transfers.late(); });
  if (status == PHX_OK) return PHX_OK;
  if (status != PHX_IN_PROGRESS) return raise(kCreate, 0, transfers.failed_peer());
  return raise_wait(kCreate, 0, result, transfers.late(), deadline.budget_ms());
}

phx_status Net::reach(int rank, void **peer) {
  if (ended_[rank]) return fail_text(PHX_ERR_PEER_DEAD, "connect", "this rank has ended the connection");
  if (peers_[rank] == nullptr) PHX_TRY(endpoint_->connect(where_[rank], &peers_[rank]));
  *peer = peers_[rank];
  return PHX_OK;
}

// 16 bits name the group at the receiver, 12 the sender, 7 the channel, 13 the call and 16 the part.
uint64_t Net::tag(uint16_t number, int from, const MessageName &name) const {
  static_assert(kMaxGroupSize <= 1 << 12);
  return uint64_t{number} << 48 | static_cast<uint64_t>(from) << 36 | uint64_t{name.channel} << 29 |
         (name.call & 0x1fff) << 16 | (name.part & 0xffff);
}

phx_status Net::send(int to, const MessageName &name, const void *data, size_t bytes, std::vector<Carried> *list) {
  std::lock_guard<std::mutex> lock(mutex_);
  void *peer = nullptr;
  const phx_status status = reach(to, &peer);
  if (status == PHX_ERR_PEER_DEAD) return PHX_OK;  // see Endpoint::test
  if (status != PHX_OK) return status;
  return endpoint_->send(peer, tag(numbers_[to], group_.group_rank(), name), data, bytes, to, list);
}

phx_status Net::recv(int from, const MessageName &name, void *data, size_t bytes, bool exact,
                     std::vector<Carried> *list) {
  std::lock_guard<std::mutex> lock(mutex_);
  void *peer = nullptr;
  PHX_TRY(reach(from, &peer));
  return endpoint_->recv(peer, tag(number_, from, name), data, bytes, exact, from, list);
}

Net::Memory Net::take_memory(size_t bytes) {
  {
    std::lock_guard<std::mutex> lock(memory_mutex_);
    for (auto kept = memory_.begin(); kept != memory_.end(); ++kept) {
      if (kept->size < bytes || kept->size / 4 > bytes) continue;
      Memory found = std::move(*kept);
      memory_.erase(kept);
      return found;
    }
  }
  return {std::unique_ptr<char[]>(new char[bytes]), bytes};  // not zeroed
}

void Net::give_back_memory(Memory memory) {
  std::lock_guard<std::mutex> lock(memory_mutex_);
  if (memory_.size() >= kMemoryKept) memory_.erase(memory_.begin());
  memory_.push_back(std::move(memory));
}

void Net::give_up(std::vector<Carried> *list) {
  endpoint_->cancel(list, true);
  if (list->empty()) return;
  std::lock_guard<std::mutex> lock(mutex_);
  for (const Carried &send : *list) disconnect(send.peer, false);
  endpoint_->cancel(list, false);
}

void Net::disconnect(int rank, bool flush) {
  if (peers_[rank] != nullptr) endpoint_->disconnect(peers_[rank], flush);
  peers_[rank] = nullptr;
  ended_[rank] = true;
}

void Net::disconnect_all(bool flush) {
  std::lock_guard<std::mutex> lock(mutex_);
  for (size_t rank = 0; rank < peers_.size(); ++rank) disconnect(static_cast<int>(rank), flush);
  if (number_ != 0 && endpoint_) endpoint_->give_back_number(number_);
  number_ = 0;
}

void Net::flush() {
  if (endpoint_) endpoint_->flush(kPartingMs);
}

void Net::close() {
  if (endpoint_) disconnect_all(group_.ends_well());
}

phx_status Net::raise(const char *operation, uint64_t sequence, int peer) {
  const ErrorInfo error = last_error();
  // The monitor knows more about the end of a process than the carrier about that of its connection, and the first rank
  // of each host more about calls that differ.
  const int64_t patience_ms = error.status == PHX_ERR_MISMATCH ? kComparisonMs : kVerdictMs;
  if (!group_.fails_within(patience_ms)) return group_.raise_transfer(operation, sequence, peer, error);
  return group_.raise_cause(operation, sequence);
}

phx_status Net::raise_wait(const char *operation, uint64_t sequence, WaitResult result, const std::vector<int> &late,
                           int64_t timeout_ms) {
  if (result == WaitResult::kInterrupted && group_.failed()) return group_.raise_cause(operation, sequence);
  if (interrupt_requested()) return group_.raise_interrupted(operation, sequence);
  // A rank that is late may itself wait for one of its host, and its error names that one.
  const Hosts &hosts = group_.hosts();
  if (std::any_of(late.begin(), late.end(), [&](int rank) { return hosts.size(hosts.of(rank)) > 1; }) &&
      group_.fails_within(verdict_ms(timeout_ms)))
    return group_.raise_cause(operation, sequence);
  return group_.raise_late(operation, sequence, late, timeout_ms);
}

phx_status Transfers::poll() {
  if (error_ == nullptr) {
    if (list_.empty()) return PHX_OK;
    int peer = -1;
    const phx_status status = net_->test(&list_, &peer);
    if (status == PHX_OK) return list_.empty() ? PHX_OK : PHX_IN_PROGRESS;
    keep(peer, status);
  }
  return set_last_error(*error_);
}

void Transfers::keep(int rank, phx_status status) {
  if (status == PHX_OK) return;
  error_ = std::make_unique<ErrorInfo>(last_error());
  peer_ = rank;
}

std::vector<int> Transfers::late() const {
  std::vector<int> ranks;
  for (const bool receives : {true, false}) {
    if (!ranks.empty()) break;
    for (const Carried &carried : list_)
      if (carried.receives == receives && std::find(ranks.begin(), ranks.end(), carried.peer) == ranks.end())
        ranks.push_back(carried.peer);
  }
  return ranks;
}

}  // namespace phx
