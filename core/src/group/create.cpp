// Creates a group: the members find each other in the store, connect, and those of one host share their control
// segments.

#include <cerrno>
#include <cstdlib>
#include <map>
#include <set>
#include <string_view>

#include "base/environment.h"
#include "base/failpoint.h"
#include "base/hash.h"
#include "group/attempt.h"
#include "group/group.h"

namespace phx {
namespace {

constexpr int64_t kTidyMs = 1000;  // in case the store hangs
constexpr int kLooksInStore = 64;  // for ranks that are missing, when a line about a long wait names them

// Each rank sends this to the others with its control segment.
struct Geometry {
  uint64_t slot_bytes;
  int32_t group_rank;
  int32_t group_size;
  uint32_t channels;
  uint32_t recorder_entries;
  uint32_t allows_fences;
  uint32_t first_count;
  Tuning tuning;   // from the table of that rank
  CpuQuota quota;  // of that rank's control group
  CoreMask cores;  // that the rank may use
  int32_t reduction_order;
  uint32_t reserved;
};

// How many cores these ranks, of one host, may use together. The result is the same on all of them.
int cores_of(const std::vector<Geometry> &all) {
  CoreMask cores;
  std::map<uint64_t, std::pair<size_t, size_t>> limited;  // by control group: how many ranks it has, and how many cores
  size_t served = 0;                                      // how many ranks the quotas allow a core of their own
  for (const Geometry &rank : all) {
    cores |= rank.cores;
    if (rank.quota.cores == 0) ++served;
    if (rank.quota.cores != 0) limited[rank.quota.granted] = {limited[rank.quota.granted].first + 1, rank.quota.cores};
  }
  for (const auto &group : limited) served += std::min(group.second.first, group.second.second);
  const size_t count = cores.count();
  return static_cast<int>(std::max<size_t>(1, served < all.size() ? std::min(count, served) : count));
}

const char *name_of_order(int32_t order) {
  return order == PHX_REDUCTION_ORDER_RANKS ? "ranks" : order == PHX_REDUCTION_ORDER_HOSTS ? "hosts" : "unknown";
}

// Reads PHALANX_FIRST_COUNT: see Group::first_count.
phx_status read_first_count(uint32_t *out) {
  const char *text = read_variable<variable("PHALANX_FIRST_COUNT")>();
  if (text == nullptr || *text == '\0') return PHX_OK;
  char *end = nullptr;
  errno = 0;
  const unsigned long long value = std::strtoull(text, &end, 10);
  if (*text < '0' || *text > '9' || *end != '\0' || errno != 0 || value > UINT32_MAX)
    return fail(PHX_ERR_INVALID, kGroupCreate, "PHALANX_FIRST_COUNT is '%s'; expected a number from 0 to %u", text,
                UINT32_MAX);
  *out = static_cast<uint32_t>(value);
  return PHX_OK;
}

// `given`: of the options. What it is by default depends on PHALANX_REDUCTION_ORDER.
phx_status read_order(int32_t given, int32_t *out) {
  *out = given;
  if (given == PHX_REDUCTION_ORDER_HOSTS || given == PHX_REDUCTION_ORDER_RANKS) return PHX_OK;
  if (given != PHX_REDUCTION_ORDER_DEFAULT)
    return fail(PHX_ERR_INVALID, kGroupCreate,
                "reduction_order is %d; expected one of PHX_REDUCTION_ORDER_*, which are 0 to 2", given);
  const char *text = read_variable<variable("PHALANX_REDUCTION_ORDER")>();
  const std::string_view value = text == nullptr || *text == '\0' ? "hosts" : text;
  *out = value == "ranks" ? PHX_REDUCTION_ORDER_RANKS : PHX_REDUCTION_ORDER_HOSTS;
  if (value == name_of_order(*out)) return PHX_OK;
  return fail(PHX_ERR_INVALID, kGroupCreate, "PHALANX_REDUCTION_ORDER is '%s'; expected hosts or ranks", text);
}

}  // namespace

Group::Group(std::shared_ptr<World> world, GroupParams params)
    : world_(std::move(world)),
      params_(std::move(params)),
      lanes_(world_->channels()),
      interruptions_(params_.ranks.size() + kReportWords) {
  attachments_ = params_.attach(*this);
}

Group::~Group() {
  if (id_ != 0) world_->monitor().unwatch(id_);
  for (auto it = attachments_.rbegin(); it != attachments_.rend(); ++it) (*it)->close();
  for (auto it = attachments_.rbegin(); it != attachments_.rend(); ++it) it->reset();
}

// How a rank of a group that spans hosts is reached, as it stands in the store.
struct Reach {
  HostAddress address;  // family 0: it is not, and `why` says why
  phx_status status;
  char why[sizeof ErrorInfo::text];
};

// The steps of Group::create, in order. Each returns the status of the thread's error.
struct GroupMaker {
  Group &group;
  const Deadline deadline;
  Attempt attempt;

  std::string member_key(int group_rank) const { return group.params_.key + "/member/" + std::to_string(group_rank); }
  std::string reach_key(int group_rank) const { return group.params_.key + "/reach/" + std::to_string(group_rank); }

  // Records an error that begins with "group_create 'tp': ".
  __attribute__((format(printf, 3, 4))) Failed raise(phx_status status, const char *format, ...) const {
    va_list args;
    va_start(args, format);
    const std::string prefix = std::string(kGroupCreate) + " '" + group.name() + "': ";
    const Failed failed = fail_v(status, 0, kGroupCreate, prefix.c_str(), format, args);
    va_end(args);
    return failed;
  }

  phx_status bootstrap() {
    group.records_.assign(group.size(), PeerRecord{});
    group.records_[group.group_rank()] = group.world_->record();
    group.links_.resize(group.size());
    if (group.size() == 1) return PHX_OK;
    PHX_FAILPOINT(kGroupCreate, 1);
    phx_store *store = group.params_.store.get();
    PeerRecord mine = group.world_->record();
    mine.rank = group.self_rank();
    const store::CallTimeout call_timeout(deadline.left_ms());
    PHX_TRY(store->set(member_key(group.group_rank()).c_str(), &mine, sizeof mine));
    PHX_FAILPOINT(kGroupCreate, 2);
    const phx_status status = read_all([this](int i) { return member_key(i); },
                                       [this](const std::string &value, int i) { return read_record(value, i); });
    PHX_FAILPOINT(kGroupCreate, 3);
    if (status == PHX_OK && group.group_rank() == 0) forget_failures();
    return status;
  }

  // Reads one value of each other rank in the store. The error names all ranks whose values have not come in time.
  template <class Key, class Read>
  phx_status read_all(Key key, Read read) {
    std::string late;
    int first_late = -1, awaited = 0;
    const auto text = [&] {
      std::vector<int> missing;
      for (int i = awaited; i < group.size(); ++i) {
        std::string value;
        const bool looks = i < awaited + kLooksInStore && i != group.group_rank();
        if (looks && group.params_.store->get(key(i).c_str(), &value, 1) != PHX_OK) missing.push_back(i);
      }
      return missing.empty() ? "" : group.still_waiting(kGroupCreate, 0, missing);
    };
    WaitReport report(WaitText(text), deadline);  // looked at between calls of the store, for it asks the store
    for (int i = 0; i < group.size(); ++i) {
      if (i == group.group_rank()) continue;
      std::string value;
      awaited = i;
      const phx_status status = await_value(key(i), &value, &report);
      if (status == PHX_ERR_TIMEOUT && deadline.passed()) {
        if (first_late < 0) first_late = i;
        late += (late.empty() ? "" : ", ") + std::to_string(group.rank_of(i));
        continue;
      }
      PHX_TRY(status);
      PHX_TRY(read(value, i));
    }
    if (first_late < 0) return PHX_OK;
    const bool several = late.find(',') != std::string::npos;
    return raise(PHX_ERR_TIMEOUT,
                 "%s: rank %d still waits for %s, which %s not made the same call. %s running, and were enough "
                 "processes started?",
                 group.timed_out(deadline.budget_ms()).c_str(), group.self_rank(),
                 ((several ? "ranks " : "rank ") + late).c_str(), several ? "have" : "has",
                 several ? "Are they" : "Is it")
        .peer(group.rank_of(first_late));
  }

  phx_status await_value(const std::string &key, std::string *value, WaitReport *report) {
    for (;;) {
      const Deadline until = Deadline::after_ms(std::min(kLookMs, deadline.left_ms()));
      const phx_status got = group.world_->progress().keep_going(until, [&](const Deadline &end) {
        return group.params_.store->get(key.c_str(), value, std::max<int64_t>(end.left_ms(), 1));
      });
      if (got != PHX_ERR_TIMEOUT) return got;
      report->look();
      const phx_status useless = look();
      if (useless != PHX_OK || deadline.passed()) return useless != PHX_OK ? useless : got;
    }
  }

  // All members take part in this attempt, so none will read how an earlier one of the same name ended.
  void forget_failures() {
    const GroupParams &params = group.params_;
    for (uint64_t old = params.first_failed; old < params.attempt; ++old)
      params.store->remove(Attempt::failure_key(params.key_of(old)).c_str());
    group.world_->forget_failed_attempts(params.name_key);
  }

  phx_status look() {
    PHX_TRY(attempt.look(group.records_));
    for (int i = 0; i < group.size() && group.params_.of_world; ++i) {
      if (i == group.group_rank() || group.records_[i].uuid != Uuid{}) continue;
      if (group.world_->look_at_rank(group.rank_of(i)) == PHX_OK) continue;
      const ErrorInfo gone = last_error();
      return raise(gone.status, "%s", gone.text).peer(group.rank_of(i));
    }
    return PHX_OK;
  }

  phx_status read_record(const std::string &value, int i) {
    PeerRecord &record = group.records_[i];
    PeerRecord theirs{};
    if (!attempt.read_prefix(value, &theirs)) {
      constexpr size_t kAnyLayout = sizeof kPeerMagic - 1;  // the last character is the version of the layout
      if (value.size() > kAnyLayout && value[kAnyLayout] != kPeerMagic[kAnyLayout] &&
          value.compare(0, kAnyLayout, kPeerMagic, kAnyLayout) == 0)
        return raise(PHX_ERR_ABI,
                     "rank %d runs an older version of phalanx than rank %d, which runs %s. Install one build of "
                     "phalanx-core for all ranks.",
                     group.rank_of(i), group.self_rank(), text_of(this_build()).c_str());
      return raise(PHX_ERR_INVALID,
                   "what the store holds for rank %d, under %s, is not a record of a rank. Does another program write "
                   "to this store? Use a new store, or another phx_world_params.job",
                   group.rank_of(i), member_key(i).c_str());
    }
    if (theirs.build != this_build()) return attempt.refuse_build(theirs);
    if (value.size() != sizeof record)
      return raise(PHX_ERR_INVALID, "rank %d's record under %s in the store has %zu bytes, not %zu", group.rank_of(i),
                   member_key(i).c_str(), value.size(), sizeof record);
    std::memcpy(&record, value.data(), sizeof record);
    if (group.params_.of_world) group.world_->know_rank(group.rank_of(i), record);
    return PHX_OK;
  }

  // Uses only the records, so that the result is the same on all ranks.
  void place() {
    std::vector<int> host_of(group.size(), -1);
    int hosts = 0;
    for (int i = 0; i < group.size(); ++i) {
      for (int before = 0; before < i && host_of[i] < 0; ++before)
        if (!on_another_host(group.records_[before], group.records_[i])) host_of[i] = host_of[before];
      if (host_of[i] < 0) host_of[i] = hosts++;
    }
    group.hosts_ = Hosts(std::move(host_of), group.group_rank());
  }

  // The ranks of several hosts tell each other how they are reached. All read the same, so if one cannot serve such a
  // group, all get its error.
  phx_status reach() {
    if (!group.spans_hosts()) return PHX_OK;
    std::vector<Reach> all(group.size(), Reach{});
    Reach &mine = all[group.group_rank()];
    for (const auto &attachment : group.attachments_)
      if (mine.status == PHX_OK) mine.status = attachment->prepare();
    phx_store *store = group.params_.store.get();
    if (mine.status == PHX_OK) mine.status = group.world_->listen_for_hosts(&mine.address);
    if (mine.status != PHX_OK) copy_text(mine.why, sizeof mine.why, last_error().text);
    const store::CallTimeout call_timeout(deadline.left_ms());
    PHX_TRY(store->set(reach_key(group.group_rank()).c_str(), &mine, sizeof mine));
    PHX_TRY(read_all([this](int i) { return reach_key(i); },
                     [&](const std::string &value, int i) -> phx_status {
                       if (value.size() != sizeof all[i])
                         return raise(PHX_ERR_INVALID,
                                      "what the store holds for rank %d, under %s, is not its address. Does another "
                                      "program write to this store? Use a new store, or another "
                                      "phx_world_params.job",
                                      group.rank_of(i), reach_key(i).c_str())
                             .peer(group.rank_of(i));
                       std::memcpy(&all[i], value.data(), sizeof all[i]);
                       all[i].why[sizeof all[i].why - 1] = '\0';
                       group.records_[i].address = all[i].address;
                       return PHX_OK;
                     }));
    for (int i = 0; i < group.size(); ++i) {
      if (all[i].status >= 0) continue;
      const int other = group.hosts_.rank(1, 0);  // with rank 0, the first two that are on different hosts
      const std::string why =
          why_apart(group.records_[0], group.rank_of(0), group.records_[other], group.rank_of(other));
      return raise(std::max<phx_status>(all[i].status, PHX_ERR_INTERNAL),
                   "its ranks are on %d hosts (%s), and rank %d cannot serve that: %s", group.hosts_.count(),
                   why.c_str(), group.rank_of(i), all[i].why)
          .peer(group.rank_of(i));
    }
    return PHX_OK;
  }

  void identify() {
    group.id_ = hash_bytes(group.name().data(), group.name().size());
    for (const PeerRecord &record : group.records_) group.id_ = hash_bytes(&record.uuid, sizeof record.uuid, group.id_);
    group.id_ = hash_bytes(group.params_.key.data(), group.params_.key.size(), group.id_);
    std::set<Uuid> processes;
    for (const PeerRecord &record : group.records_) processes.insert(record.process);
    const bool apart = processes.size() == group.records_.size();
    for (const PeerRecord &record : group.records_)
      group.members_ = hash_bytes(apart ? &record.process : &record.uuid, sizeof(Uuid), group.members_);
  }

  // Takes the place of bootstrap and connect: the parent, which has these members, has done that.
  void inherit(const Group &parent, const std::vector<int> &members) {
    group.set_timeout_ms(parent.timeout_ms_.load(std::memory_order_relaxed));
    for (int member : members) {
      group.records_.push_back(parent.records_[member]);
      group.links_.push_back(parent.links_[member]);
    }
    identify();
    place();
  }

  phx_status connect() {
    identify();
    for (int i = 0; i < group.size(); ++i)
      if (i != group.group_rank()) PHX_TRY(group.world_->begin_connecting(group.records_[i]));
    int late = -1;
    const auto text = [&] { return group.still_waiting(kGroupCreate, 0, {late}); };
    const LongWait long_wait(WaitText(text), deadline);
    for (int i = 0; i < group.size(); ++i) {
      if (i == group.group_rank()) continue;
      late = i;
      PHX_TRY(group.world_->connect(
          group.records_[i], deadline, [this] { return look(); }, &group.links_[i]));
      PHX_FAILPOINT(kGroupCreate, 4);
    }
    return PHX_OK;
  }

  phx_status share() {
    group.world_->monitor().watch(group.id_, group.shared_from_this());
    group.watched_ = true;
    PHX_TRY(read_first_count(&group.first_count_));
    PHX_TRY(read_order(group.params_.reduction_order, &group.reduction_order_));
    // In a slot, the part of each rank is at least one cache line.
    const ControlHeader header{kControlMagic,
                               std::max(group.world_->slot_bytes(), kLine * group.size()),
                               group.id_,
                               group.group_rank(),
                               group.size(),
                               group.channels(),
                               group.world_->recorder_entries()};
    size_t size = header.lanes_end();
    for (const auto &attachment : group.attachments_) size += attachment->area_bytes();
    size = round_up(size, page_bytes());
    std::vector<SharedMappingRef> &segments = group.segments_;
    segments.resize(group.size());  // those of other hosts stay NULL
    Fd own;
    PHX_TRY(create_segment(kGroupCreate, "phalanx-group", size, &own));
    PHX_TRY(map_segment(kGroupCreate, own.get(), size, 0, &segments[group.group_rank()]));
    char *const base = segments[group.group_rank()]->bytes();
    // Makes resident only the slot headers where peers wait for the first call of most groups: the rank that touches a
    // page first decides on which NUMA node it lies.
    for (uint32_t slot = 0; slot < kSlots; ++slot)
      PHX_TRY(populate(kGroupCreate, base + header.lane_offset(0) + sizeof(LaneHeader) + slot * header.slot_stride(),
                       sizeof(SlotHeader)));
    PHX_FAILPOINT(kGroupCreate, 5);
    std::memcpy(base, &header, sizeof header);
    if (group.first_count_ != 0) {
      for (uint32_t i = 0; i < header.channels; ++i)
        header.begin_lane_at(base + header.lane_offset(i), group.first_count_);
      char *area = base + header.lanes_end();
      for (const auto &attachment : group.attachments_) {
        attachment->begin_area_at(area, group.first_count_);
        area += attachment->area_bytes();
      }
    }

    const Geometry mine{header.slot_bytes,  header.group_rank,         header.group_size,
                        header.channels,    header.recorder_entries,   group.world_->allows_fences(),
                        group.first_count_, load_tuning(group.size()), group.world_->cpu_quota(),
                        allowed_cores(),    group.reduction_order(),   0};
    std::vector<Geometry> all;
    std::vector<Parcel> parcels;
    phx_status status = group.exchange_all(kGroupCreate, mine, deadline, &all, {own.get()}, &parcels);
    PHX_FAILPOINT(kGroupCreate, 6);
    PHX_TRY(status);
    for (int i = 0; i < group.size() && status == PHX_OK; ++i)
      if (i != group.group_rank()) status = check_peer(i, mine, all[i], parcels[i], size, &segments[i]);
    PHX_FAILPOINT(kGroupCreate, 7);
    status = group.confirm(kGroupCreate, status, deadline);
    PHX_FAILPOINT(kGroupCreate, 8);
    PHX_TRY(status);
    adopt(all);
    open_lanes(header);
    if (!group.spans_hosts()) return PHX_OK;
    for (const auto &attachment : group.attachments_) PHX_TRY(attachment->connect(deadline));
    return PHX_OK;
  }

  void open_lanes(const ControlHeader &header) {
    const Hosts &hosts = group.hosts_;
    for (uint32_t i = 0; i < group.channels(); ++i) {
      std::vector<Lane::Member> members;
      for (const int member : hosts.local_ranks())
        members.push_back({group.segments_[member]->bytes() + header.lane_offset(i), &group.interruptions_[member]});
      group.lanes_[i].open(members, hosts.local_rank(), header, group.fenced_by_sleepers_, group.is_crowded(),
                           group.first_count_);
    }
    size_t at = header.lanes_end();
    for (const auto &attachment : group.attachments_) {
      std::vector<char *> areas;
      for (const SharedMappingRef &segment : group.segments_)
        areas.push_back(segment ? segment->bytes() + at : nullptr);
      attachment->open(areas);
      at += attachment->area_bytes();
    }
  }

  // Sets the values that depend on several ranks: on those of this host, and the tuning on those of the first one.
  void adopt(const std::vector<Geometry> &ranks) {
    const auto on_host = [&](int host) {
      std::vector<Geometry> all;
      for (size_t i = 0; i < ranks.size(); ++i)
        if (group.hosts_.of(static_cast<int>(i)) == host) all.push_back(ranks[i]);
      return all;
    };
    const std::vector<Geometry> local = on_host(group.hosts_.own());
    group.fenced_by_sleepers_ =
        std::all_of(local.begin(), local.end(), [](const Geometry &rank) { return rank.allows_fences != 0; });
    group.cores_ = cores_of(local);
    const Tuning builtin = builtin_tuning(group.size(), cores_of(on_host(0)));
    const Tuning merged = merge_tuning(ranks[0].tuning, builtin);
    if (check_tuning(kGroupCreate, merged) == PHX_OK) return group.tuning_.publish(merged);
    PHX_LOG(PHX_LOG_WARNING, "group '%s': the tuning table of rank %d is not valid: %s Built-in values are used.",
            group.name().c_str(), group.rank_of(0), last_error().text);
    group.tuning_.publish(builtin);
  }

  // Compares the geometry of a rank with this rank's, and maps its segment if it is on this host.
  phx_status check_peer(int i, const Geometry &mine, const Geometry &theirs, const Parcel &parcel, size_t size,
                        SharedMappingRef *out) {
    const bool is_here = group.hosts_.is_here(i);
    if (parcel.fds.size() != (is_here ? 1 : 0)) return group.raise_malformed(kGroupCreate, i);
    const auto differs = [&](const std::string &their_part, const std::string &own_part, const char *advice) {
      return raise(PHX_ERR_MISMATCH, "rank %d %s, rank %d %s; %s", group.rank_of(i), their_part.c_str(),
                   group.self_rank(), own_part.c_str(), advice);
    };
    if (theirs.channels != mine.channels)
      return differs("made its world with " + std::to_string(theirs.channels) + " channels",
                     "with " + std::to_string(mine.channels), "give the same number on all ranks");
    if (theirs.recorder_entries != mine.recorder_entries)
      return differs("made its world with " + std::to_string(theirs.recorder_entries) + " recorder entries",
                     "with " + std::to_string(mine.recorder_entries), "give the same number on all ranks");
    if (theirs.reduction_order != mine.reduction_order)
      return differs(std::string("asks for the reduction order '") + name_of_order(theirs.reduction_order) + "'",
                     std::string("for '") + name_of_order(mine.reduction_order) + "'",
                     "give the same phx_group_options.reduction_order, or the same PHALANX_REDUCTION_ORDER, on all "
                     "ranks");
    if (theirs.first_count != mine.first_count)
      return differs("has PHALANX_FIRST_COUNT=" + std::to_string(theirs.first_count),
                     "has " + std::to_string(mine.first_count), "set the same everywhere, or none");
    const auto member = [](int32_t rank, const Geometry &of) {
      return "member " + std::to_string(rank) + " of " + std::to_string(of.group_size) + " with ";
    };
    if (theirs.slot_bytes != mine.slot_bytes || theirs.group_rank != i || theirs.group_size != mine.group_size)
      return differs(
          "came as " + member(theirs.group_rank, theirs) + "staging_bytes " + std::to_string(theirs.slot_bytes),
          "expects " + member(i, mine) + std::to_string(mine.slot_bytes),
          "give the same list of ranks and the same staging_bytes on all ranks");
    if (!is_here) return PHX_OK;
    PHX_TRY(verify_segment(kGroupCreate, parcel.fds[0].get(), size));
    return map_segment(kGroupCreate, parcel.fds[0].get(), size, 0, out);
  }
};

phx_status Group::create(const std::shared_ptr<World> &world, GroupParams params, int64_t timeout_ms,
                         std::shared_ptr<Group> *out) {
  std::shared_ptr<Group> group(new Group(world, std::move(params)));
  GroupMaker maker{*group, Deadline::after_ms(timeout_ms), {*world, group->params_.store.get(), group->params_.key}};
  if (group->size() > 1) group->look_ = [&maker] { return maker.look(); };
  phx_status status = maker.bootstrap();
  if (status == PHX_OK) maker.place();
  if (status == PHX_OK) status = maker.reach();
  if (status == PHX_OK) status = maker.connect();
  if (status == PHX_OK) status = maker.share();
  group->look_ = nullptr;
  if (status == PHX_ERR_TIMEOUT && interrupt_requested()) status = group->raise_interrupted(kGroupCreate);
  const bool store_failed = status != PHX_OK && std::strncmp(last_error().operation, "store_", 6) == 0;
  if (group->size() > 1 && !store_failed) {
    if (status != PHX_OK) maker.attempt.give_up(group->records_);
    // All ranks have confirmed, so they have read the record; or no rank needs it. (Best effort: not every store can
    // remove.)
    const KeptError kept;
    const store::CallTimeout call_timeout(kTidyMs);
    group->params_.store->remove(maker.member_key(group->group_rank()).c_str());
    if (group->spans_hosts()) group->params_.store->remove(maker.reach_key(group->group_rank()).c_str());
  }
  return finish(status, std::move(group), out);
}

phx_status Group::create_from(const Group &parent, const std::vector<int> &members, GroupParams params,
                              const Deadline &deadline, bool needs_parent, std::shared_ptr<Group> *out) {
  std::shared_ptr<Group> group(new Group(parent.world_, std::move(params)));
  GroupMaker maker{*group, deadline, {*parent.world_, nullptr, ""}};
  maker.inherit(parent, members);
  if (needs_parent)
    group->look_ = [&parent] { return parent.failed() ? parent.raise_in_flight("group_split") : PHX_OK; };
  const phx_status status = maker.share();
  group->look_ = nullptr;
  return finish(status, std::move(group), out);
}

phx_status Group::finish(phx_status status, std::shared_ptr<Group> group, std::shared_ptr<Group> *out) {
  if (status != PHX_OK) {
    (void)Failed(status).in(group->name().c_str(), group->self_rank());
    return group->fail_with(last_error(), group->watched_);
  }
  World &world = *group->world_;
  world.add_group(group);
  for (const auto &attachment : group->attachments_)
    for (ProgressSource *source : attachment->progress_sources())
      world.progress().add(std::shared_ptr<ProgressSource>(group, source));
  *out = std::move(group);
  return PHX_OK;
}

std::vector<std::shared_ptr<Group>> groups_of(const World &world) {
  std::vector<std::shared_ptr<Group>> groups;
  for (const auto &listener : world.groups()) groups.push_back(std::static_pointer_cast<Group>(listener));
  return groups;
}

}  // namespace phx
