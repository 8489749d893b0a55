#include "world/world.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>

#include "base/entropy.h"
#include "base/hash.h"
#include "base/shared_memory.h"
#include "base/ticks.h"
#include "base/wait.h"

namespace phx {
namespace {

// How often a rank asks another host whether the peer that is to dial it has ended, which it sees in no other way.
constexpr int64_t kAskNs = 500 * 1000000LL;

phx_status raise_finalized() {
  return fail(PHX_ERR_REVOKED, "group_create", "the world was finalized while the group was being created");
}

}  // namespace

phx_status World::create(const phx_world_params &params, std::shared_ptr<World> *out) {
  PeerRecord record{};
  Uuid names[2];
  PHX_TRY(fill_random("world_create", names, sizeof names));
  std::memcpy(record.magic, kPeerMagic, sizeof record.magic);
  record.build = this_build();
  record.rank = params.rank;
  record.pid = getpid();
  record.uid = geteuid();
  record.start_time = process_start_time(record.pid);
  record.host = read_host_facts();
  record.host_given = params.host_id != 0 ? 1 : 0;
  record.host_id = params.host_id != 0 ? params.host_id : host_id_of(record.host);
  record.uuid = names[0];
  record.token = names[1];
  record.process = process_uuid();
  read_hostname(&record.hostname);

  std::shared_ptr<World> world(new World(record, params.size));
  world->store_ = store_ref(params.store);
  world->job_ = params.job != nullptr ? params.job : "phalanx";
  if (params.timeout_ms != 0) world->timeout_ms_.store(params.timeout_ms);
  if (params.staging_bytes != 0) world->slot_bytes_ = round_up(params.staging_bytes, 64);
  if (params.signal_channels != 0) world->signal_channels_ = params.signal_channels;
  if (params.channels != 0) world->channels_ = params.channels;
  while (world->recorder_entries_ < params.recorder_entries) world->recorder_entries_ *= 2;
  world->allows_fences_ = allow_fences();
  world->cpu_quota_ = phx::cpu_quota();
  begin_tick_scale();
  World *const self = world.get();  // which outlives its monitor's thread
  self->monitor_.set_chore([self] { return self->progress_.step(); });
  self->progress_.set_attendant([self] { self->monitor_.begin_chore(); }, (params.flags & PHX_WORLD_PROGRESS) != 0);
  PHX_TRY(world->monitor_.start());
  *out = std::move(world);
  return PHX_OK;
}

World::~World() { finalize(); }

phx_status World::refuse_to_wait(const char *operation, int64_t timeout_ms) const {
  if (timeout_ms < 0)
    return fail(PHX_ERR_INVALID, operation,
                "timeout_ms is %lld; it must be positive, or 0 for the default of the world",
                static_cast<long long>(timeout_ms));
  return fail(PHX_ERR_UNSUPPORTED, operation,
              "called while this thread waits in another call, by the hook of phx_set_interrupt or by a signal "
              "handler of Python; call it after that wait has ended");
}

phx_status World::listen_for_hosts(HostAddress *out) {
  const std::lock_guard<std::mutex> lock(listen_mutex_);
  if (!listens_.load(std::memory_order_relaxed)) {
    std::string hint = store_ ? store_->server() : "";
    const char *const master = std::getenv("MASTER_ADDR");
    if (hint.empty() && master != nullptr) hint = master;
    Fd listener;
    PHX_TRY(choose_address("group_create", hint, &address_));
    PHX_TRY(listen_at("group_create", &address_, &listener));
    if (finalized()) return raise_finalized();
    if (!monitor_.listen_for_hosts(std::move(listener)))
      return fail_errno(errno, "group_create", "could not watch a listening socket");
    listens_.store(true, std::memory_order_release);
  }
  *out = address_;
  return PHX_OK;
}

// The one with the larger id dials: every pair agrees on it, whatever groups they meet in.
phx_status World::begin_connecting(const PeerRecord &peer) {
  const bool dials = peer.uuid < record_.uuid, remote = on_another_host(record_, peer);
  if (remote && dials && peer.address.family == 0)
    return fail(PHX_ERR_UNSUPPORTED, "group_create",
                "rank %d (pid %d, %s) does not accept connections from other hosts", peer.rank, peer.pid,
                process_text(record_, peer).c_str())
        .peer(peer.rank);
  if (remote && !dials && address().family == 0)
    return fail(PHX_ERR_UNSUPPORTED, "group_create",
                "rank %d does not accept connections from other hosts, and rank %d (pid %d, %s) has to "
                "connect to it",
                rank(), peer.rank, peer.pid, process_text(record_, peer).c_str())
        .peer(peer.rank);
  const phx_status status = dials ? monitor_.dial(peer) : PHX_OK;
  return status == PHX_ERR_REVOKED ? raise_finalized() : status;
}

// The error of a peer that was not connected by the deadline.
phx_status World::raise_late(const PeerRecord &peer, const Deadline &deadline) const {
  std::string what = "did not connect";
  if (peer.uuid < record_.uuid)
    what = monitor_.dial_lacks(peer.uuid);
  else if (on_another_host(record_, peer))
    what += ": this rank listens at " + text_of(address()) +
            ". See whether that rank is stopped or a firewall drops the packets, or name another interface in "
            "PHALANX_SOCKET_IFNAME here";
  return fail(PHX_ERR_TIMEOUT, "group_create", "%s: rank %d (pid %d, %s) %s", timed_out(deadline.budget_ms()).c_str(),
              peer.rank, peer.pid, process_text(record_, peer).c_str(), what.c_str())
      .peer(peer.rank);
}

void World::know_rank(int32_t rank, const PeerRecord &record) {
  std::lock_guard<std::mutex> lock(mutex_);
  ranks_[rank] = record;
}

phx_status World::look_at_rank(int32_t rank) {
  PeerRecord record;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto known = ranks_.find(rank);
    if (known == ranks_.end()) return PHX_OK;
    record = known->second;
  }
  const LinkRef link = monitor_.find_link(record.uuid);
  if (!link || !link->gone()) return PHX_OK;
  return fail_text(PHX_ERR_PEER_DEAD, "world_check_peer", "rank %d (pid %d) %s", rank, record.pid, link->fate())
      .rank(record_.rank)
      .peer(rank);
}

phx_status World::connect(const PeerRecord &peer, const Deadline &deadline, const std::function<phx_status()> &look,
                          LinkRef *out) {
  const bool dials = peer.uuid < record_.uuid;
  const bool asks = !dials && peer.address.family != 0 && on_another_host(record_, peer);
  for (int64_t ask_at_ns = now_ns() + kAskNs;;) {
    const Deadline until = Deadline::after_ms(std::min(kLookMs, deadline.left_ms()));
    const phx_status status = monitor_.await_link(peer.uuid, until, out);
    if (status == PHX_ERR_REVOKED) return raise_finalized();
    if (status != PHX_ERR_TIMEOUT) return status;
    if (const int error = monitor_.accept_error(); error != 0 && !dials) {
      fail_errno(error, "group_create", "rank %d could not accept a connection", rank()).peer(rank());
      return PHX_ERR_SYSTEM;
    }
    PHX_TRY(look());
    if (deadline.passed()) return raise_late(peer, deadline);
    if (!asks || now_ns() < ask_at_ns) continue;
    monitor_.dial(peer, true);
    ask_at_ns = now_ns() + kAskNs;
  }
}

uint64_t World::next_attempt(const std::string &key, uint64_t *first_failed) {
  std::lock_guard<std::mutex> lock(mutex_);
  Attempts &attempts = attempts_[hash_bytes(key.data(), key.size())];
  *first_failed = attempts.failed != 0 ? attempts.failed - 1 : attempts.made;
  return attempts.made++;
}

void World::note_failed_attempt(const std::string &key, uint64_t attempt) {
  std::lock_guard<std::mutex> lock(mutex_);
  uint32_t &failed = attempts_[hash_bytes(key.data(), key.size())].failed;
  if (failed == 0) failed = static_cast<uint32_t>(attempt) + 1;
}

void World::forget_failed_attempts(const std::string &key) {
  std::lock_guard<std::mutex> lock(mutex_);
  attempts_[hash_bytes(key.data(), key.size())].failed = 0;
}

void World::add_group(const std::shared_ptr<GroupListener> &group) {
  std::lock_guard<std::mutex> lock(mutex_);
  size_t kept = 0;  // sweep the groups that are gone
  for (auto &entry : groups_)
    if (!entry.expired()) groups_[kept++] = entry;
  groups_.resize(kept);
  groups_.push_back(group);
}

std::vector<std::shared_ptr<GroupListener>> World::groups() const {
  std::vector<std::shared_ptr<GroupListener>> all;
  std::lock_guard<std::mutex> lock(mutex_);
  for (const auto &entry : groups_)
    if (auto group = entry.lock()) all.push_back(std::move(group));
  return all;
}

void World::finalize() {
  if (finalized_.exchange(true)) return;
  const ErrorInfo cause = make_error(PHX_ERR_REVOKED, "world_finalize", rank(), -1, "this rank's world was finalized");
  for (const auto &group : groups()) group->on_finalized(cause);
  monitor_.stop();
}

phx_status refuse_fork(const char *operation, const World &world) {
  return fail(PHX_ERR_UNSUPPORTED, operation,
              "the world of rank %d, and all that was made with it, belongs to process %d, and this process (%d) "
              "is a fork of it: threads and connections do not survive a fork. Make a world and groups after the "
              "fork, or start processes with the 'spawn' method.",
              world.rank(), world.record().pid, getpid())
      .rank(world.rank());
}

}  // namespace phx
