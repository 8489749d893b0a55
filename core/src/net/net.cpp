#include "net/net.h"

#include <poll.h>

#include <algorithm>
#include <cstring>
#include <ctime>

#include "base/error.h"
#include "base/failpoint.h"

namespace phx {
namespace {

constexpr const char *kCreate = "group_create";
constexpr size_t kMemoryKept = 8;  // pieces of memory that wait for their next use
constexpr int kAsked = 16;
constexpr int64_t kUnarmedNs = 200 * 1000;  // a sleep without a descriptor to wait for

constexpr uint32_t kMaxAddress = 64 << 10;  // bytes of a rank's address at the carrier

// A part of an address, which may be longer than a parcel.
struct AddressPart {
  uint32_t number;  // of the group on that rank
  uint32_t total;   // bytes of the whole
  char bytes[960];
};

}  // namespace

// ---- the endpoint

phx_status Endpoint::of(World &world, std::shared_ptr<Endpoint> *out) {
  std::shared_ptr<ProgressSource> source;
  const auto open = [&](const CarrierRef &carrier, std::shared_ptr<ProgressSource> *made) -> phx_status {
    std::shared_ptr<Endpoint> endpoint(new Endpoint(world, carrier->ops(), carrier));
    PHX_TRY(endpoint->open(carrier->self()));
    world.progress().add(endpoint);
    *made = std::move(endpoint);
    return PHX_OK;
  };
  PHX_TRY(world.carrier().endpoint(open, &source));
  *out = std::static_pointer_cast<Endpoint>(source);
  return PHX_OK;
}

phx_status Endpoint::open(void *self) {
  PHX_TRY(ops_.open(self, &endpoint_));
  size_t bytes = 0;
  char nothing = 0;
  (void)ops_.address(endpoint_, &nothing, &bytes);  // says how much room it takes
  address_.resize(bytes);
  return ops_.address(endpoint_, &address_[0], &bytes);
}

Endpoint::~Endpoint() {
  if (rest_) progress_.relent(*this);
  if (endpoint_ != nullptr) ops_.close(endpoint_);
}

uint16_t Endpoint::take_number() {
  std::lock_guard<std::mutex> lock(mutex_);
  while (!numbers_.insert(++last_number_).second) {
  }
  return last_number_;
}

void Endpoint::give_back_number(uint16_t number) {
  std::lock_guard<std::mutex> lock(mutex_);
  numbers_.erase(number);
}

phx_status Endpoint::connect(const std::string &address, void **peer) {
  std::lock_guard<std::mutex> lock(mutex_);
  return ops_.connect(endpoint_, address.data(), address.size(), peer);
}

void Endpoint::disconnect(void *peer, bool flush) {
  std::lock_guard<std::mutex> lock(mutex_);
  ops_.disconnect(endpoint_, peer, flush ? 1 : 0);
}

phx_status Endpoint::send(void *peer, uint64_t tag, const void *data, size_t bytes, int rank,
                          std::vector<Carried> *list) {
  void *transfer = nullptr;
  std::lock_guard<std::mutex> lock(mutex_);
  const phx_status status = ops_.send(endpoint_, peer, tag, data, bytes, &transfer);
  if (status == PHX_ERR_PEER_DEAD) return PHX_OK;  // see `test`
  if (status != PHX_OK) return status;
  if (transfer == nullptr) return look_behind(), PHX_OK;
  list->push_back({transfer, rank, false, 0});
  progress_.began(*this);
  return PHX_OK;
}

phx_status Endpoint::recv(void *peer, uint64_t tag, void *data, size_t bytes, bool exact, int rank,
                          std::vector<Carried> *list) {
  void *transfer = nullptr;
  std::lock_guard<std::mutex> lock(mutex_);
  const phx_status status = ops_.recv(endpoint_, peer, tag, data, bytes, &transfer);
  if (status != PHX_OK || transfer == nullptr) return status;
  list->push_back({transfer, rank, true, exact ? bytes : Carried::kAny});
  progress_.began(*this);
  return PHX_OK;
}

phx_status Endpoint::test(std::vector<Carried> *list, int *peer) {
  phx_status status = PHX_OK;
  std::lock_guard<std::mutex> lock(mutex_);
  progress();
  int waiting = 0;  // of a long list only the first ones that are not complete are asked
  bool sent = false;
  const auto is_gone = [&](const Carried &carried) {
    if (status != PHX_OK || waiting == kAsked) return false;
    int32_t done = 0;
    size_t bytes = carried.expected;
    status = ops_.test(endpoint_, carried.transfer, &done, &bytes);
    if (status == PHX_OK && done == 0) return ++waiting, false;
    progress_.ended(*this);
    sent = sent || !carried.receives;
    // A peer that has left in good order had what it needed. One that has not misses this message, and says so, or the
    // monitor says that it has died.
    if (status == PHX_ERR_PEER_DEAD && !carried.receives) status = PHX_OK;
    if (status == PHX_OK && carried.receives && carried.expected != Carried::kAny && bytes != carried.expected)
      status = fail_text(PHX_ERR_MISMATCH, ops_.name, "a message has %zu bytes, and %zu are expected", bytes,
                         carried.expected);
    if (status != PHX_OK) *peer = carried.peer;
    return true;
  };
  list->erase(std::remove_if(list->begin(), list->end(), is_gone), list->end());
  if (sent) look_behind();
  return status;
}

// A rank may leave its call and wait for something else, with no progress here. What its peers need must go all the
// same.
void Endpoint::look_behind() {
  if (rest_ || ops_.unsent == nullptr || ops_.unsent(endpoint_) == 0) return;
  rest_ = true;
  progress_.insist(*this);
}

void Endpoint::cancel(std::vector<Carried> *list, bool receives) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto is_gone = [&](const Carried &carried) {
    if (carried.receives != receives) return false;
    ops_.cancel(endpoint_, carried.transfer);
    progress_.ended(*this);
    return true;
  };
  list->erase(std::remove_if(list->begin(), list->end(), is_gone), list->end());
}

bool Endpoint::advance_pending() {
  if (watches_.load(std::memory_order_relaxed) != 0) return false;
  std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
  if (!lock.owns_lock()) return false;  // another thread of this rank does that
  const bool moved = progress();
  if (rest_ && ops_.unsent(endpoint_) == 0) {
    rest_ = false;
    progress_.relent(*this);
  }
  return moved;
}

void Endpoint::flush(int64_t ms) {
  Backoff(20, 1000).until(Deadline::after_ms(ms), [&] {
    std::lock_guard<std::mutex> lock(mutex_);
    if (ops_.unsent == nullptr || ops_.unsent(endpoint_) == 0) return true;
    progress();
    return false;
  });
}

bool Endpoint::progress() {
  const bool moved = ops_.progress(endpoint_) != 0;
  if (!moved || Progress::is_attendant()) return moved;
  moved_ = true;
  if (std::exchange(attendant_sleeps_, false)) progress_.call_attendant();
  return true;
}

int Endpoint::arm_for_attendant() {
  std::lock_guard<std::mutex> lock(mutex_);
  attendant_sleeps_ = false;
  int32_t fd = -1;
  if (std::exchange(moved_, false) || watches_ != 0 || ops_.arm == nullptr || ops_.arm(endpoint_, &fd) == 0) return -1;
  attendant_sleeps_ = true;
  return fd;
}

void Endpoint::sleep(int64_t ns) {
  pollfd entry{-1, POLLIN, 0};
  if (ops_.arm != nullptr) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (ops_.arm(endpoint_, &entry.fd) == 0) return;
  } else {
    ns = std::min(ns, kUnarmedNs);
  }
  const timespec timeout{static_cast<time_t>(ns / 1000000000), static_cast<long>(ns % 1000000000)};
  ppoll(&entry, 1, &timeout, nullptr);
}

// ---- the group

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
