#include "net/endpoint.h"

#include <poll.h>

#include <algorithm>
#include <ctime>
#include <utility>

#include "base/error.h"
#include "base/wait.h"

namespace phx {
namespace {

constexpr int kAsked = 16;
constexpr int64_t kUnarmedNs = 200 * 1000;  // a sleep without a descriptor to wait for

}  // namespace

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

}  // namespace phx
