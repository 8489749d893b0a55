#include "world/world.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "base/error.h"
#include "group/group.h"
#include "memory/shared_memory.h"
#include "recorder/ticks.h"
#include "wait/wait.h"

namespace phx {

phx_status World::create(const phx_world_params &params, std::shared_ptr<World> *out) {
  PeerRecord record{};
  std::memcpy(record.magic, kPeerMagic, sizeof record.magic);
  record.version = kPeerVersion;
  record.rank = params.rank;
  record.pid = getpid();
  record.uid = geteuid();
  record.start_time = process_start_time(record.pid);
  record.host_id = params.host_id != 0 ? params.host_id : detect_host_id();
  record.uuid = random_uuid();
  record.token = random_uuid();

  std::shared_ptr<World> world(new World(record, params.size));
  world->store_ = StoreRef(params.store);
  world->job_ = params.job != nullptr ? params.job : "phalanx";
  if (params.timeout_ms != 0) world->timeout_ms_.store(params.timeout_ms);
  if (params.staging_bytes != 0) world->slot_bytes_ = round_up(params.staging_bytes, 64);
  if (params.signal_channels != 0) world->signal_channels_ = params.signal_channels;
  if (params.channels != 0) world->channels_ = params.channels;
  while (world->recorder_entries_ < params.recorder_entries) world->recorder_entries_ *= 2;
  world->allows_fences_ = allow_fences();
  begin_tick_scale();
  const phx_status status = world->monitor_.start();
  if (status != PHX_OK) return status;
  *out = std::move(world);
  return PHX_OK;
}

World::~World() { finalize(); }

phx_status World::resolve_timeout(const char *operation, int64_t timeout_ms, int64_t *out) const {
  if (timeout_ms < 0)
    return fail(PHX_ERR_INVALID, operation,
                "%s: timeout_ms is %lld; it must be positive, or 0 for the default of the world", operation,
                static_cast<long long>(timeout_ms));
  *out = timeout_ms == 0 ? default_timeout_ms() : timeout_ms;
  return PHX_OK;
}

phx_status World::connect(const PeerRecord &peer, const Deadline &deadline, LinkRef *out) {
  LinkRef link = monitor_.find_link(peer.uuid);
  // The one with the larger id dials: every pair agrees on it, whatever groups they meet in.
  while (!link && record_.uuid < peer.uuid) {
    link = monitor_.await_link(peer.uuid, Deadline::after_ms(std::min(kLookMs, deadline.left_ms())));
    if (link) break;
    if (const int error = monitor_.listen_error(); error != 0) {
      fail_errno(error, "group_create", "group_create: rank %d could not accept a connection", rank());
      amend_last_error(nullptr, nullptr, rank(), rank());
      return PHX_ERR_SYSTEM;
    }
    if (has_ended(peer)) return died(peer);
    if (deadline.passed()) {
      fail(PHX_ERR_TIMEOUT, "group_create", "group_create: rank %d (pid %d, %s) did not connect within %lld ms",
           peer.rank, peer.pid, process_state(peer.pid), static_cast<long long>(deadline.budget_ms()));
      amend_last_error(nullptr, nullptr, rank(), peer.rank);
      return PHX_ERR_TIMEOUT;
    }
  }
  if (!link) {
    std::lock_guard<std::mutex> lock(dial_mutex_);  // two groups made at once must not dial one peer twice
    link = monitor_.find_link(peer.uuid);
    if (!link) {
      const phx_status status = dial(peer, record_.uuid, record_.rank, deadline, &link);
      if (status != PHX_OK) return status;
      monitor_.adopt(link);
    }
  }
  *out = std::move(link);
  return PHX_OK;
}

uint64_t World::next_ordinal(const std::string &name) {
  std::lock_guard<std::mutex> lock(mutex_);
  return ordinals_[name]++;
}

void World::return_ordinal(const std::string &name) {
  std::lock_guard<std::mutex> lock(mutex_);
  --ordinals_[name];
}

void World::add_group(const std::shared_ptr<Group> &group) {
  std::lock_guard<std::mutex> lock(mutex_);
  size_t kept = 0;  // sweep the groups that are gone
  for (auto &entry : groups_)
    if (!entry.expired()) groups_[kept++] = entry;
  groups_.resize(kept);
  groups_.push_back(group);
}

std::vector<std::shared_ptr<Group>> World::groups() const {
  std::vector<std::shared_ptr<Group>> all;
  std::lock_guard<std::mutex> lock(mutex_);
  for (const auto &entry : groups_)
    if (auto group = entry.lock()) all.push_back(std::move(group));
  return all;
}

void World::forget_block(const BlockRef &block) {
  for (const auto &group : groups()) group->forget_block(block->serial);
}

void World::finalize() {
  if (finalized_.exchange(true)) return;
  if (forked()) return monitor_.stop();
  phx_error_info cause = make_error_info();
  cause.status = PHX_ERR_REVOKED;
  cause.rank = rank();
  copy_text(cause.operation, sizeof cause.operation, "world_finalize");
  copy_text(cause.text, sizeof cause.text, "this rank's world was finalized");
  for (const auto &group : groups()) group->fail_with(cause, false);
  monitor_.stop();
}

}  // namespace phx
