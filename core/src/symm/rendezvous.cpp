// Rendezvous: every rank of a group offers a block, and every rank maps all of these.

#include "base/failpoint.h"
#include "symm/table.h"

namespace phx {

// The description of its block that a rank sends to the others. Descriptors go with it: that of a new segment of pads,
// then that of the block if its allocator has one, then that of the pad on its GPU.
struct SymmParcel {
  uint64_t ordinal;
  uint64_t size;
  uint64_t alloc_id;
  uint32_t channels;
  int32_t persistent;
  int32_t device_type;
  int32_t device_index;
  Pads::Location pad;
  uint32_t handle_size;
  char handle[PHX_ALLOCATOR_HANDLE_BYTES];
  DeviceFacts device;
};

namespace {

constexpr const char *kRendezvous = "symm_rendezvous";

// What all ranks must offer alike, and how errors show it.
struct Property {
  const char *name;
  std::string (*show)(const SymmParcel &parcel);
};
constexpr Property kMustAgree[] = {
    {"sizes", [](const SymmParcel &p) { return std::to_string(p.size) + " bytes"; }},
    {"device types", [](const SymmParcel &p) { return "device type " + std::to_string(p.device_type); }},
    {"alloc ids",
     [](const SymmParcel &p) {
       return p.persistent != 0 ? "alloc_id " + std::to_string(p.alloc_id) : std::string("no alloc_id");
     }},
    {"signal_channels", [](const SymmParcel &p) { return std::to_string(p.channels) + " channels"; }},
    {"ordinals", [](const SymmParcel &p) { return "rendezvous #" + std::to_string(p.ordinal); }},
    {"allocators",
     [](const SymmParcel &p) {
       return std::string(p.device.present != 0 ? "memory of phalanx's CUDA allocator" : "other memory");
     }},
};

}  // namespace

struct Rendezvous {
  Group &group;
  Symm &symm;
  SymmParcel mine;
  std::vector<SymmParcel> all;

  // The error lists the values: "2048 bytes on rank 1; 1024 bytes on ranks 0, 2". It names as the peer the first rank
  // with the value that the fewest ranks have.
  phx_status must_agree(const Property &property) {
    struct Offer {
      std::string value, ranks;
      int count, first;
    };
    std::vector<Offer> offers;
    for (const SymmParcel &parcel : all) {
      const std::string value = property.show(parcel);
      const int rank = group.rank_of(static_cast<int>(&parcel - all.data()));
      auto offer = std::find_if(offers.begin(), offers.end(), [&](const Offer &o) { return o.value == value; });
      if (offer == offers.end()) offer = offers.insert(offer, {value, "", 0, rank});
      offer->ranks += (offer->count++ > 0 ? ", " : "") + std::to_string(rank);
    }
    if (offers.size() == 1) return PHX_OK;
    std::string text;
    for (const Offer &offer : offers)
      text += (text.empty() ? "" : "; ") + offer.value + " on " + (offer.count > 1 ? "ranks " : "rank ") + offer.ranks;
    const auto rarest = std::min_element(offers.begin(), offers.end(),
                                         [](const Offer &a, const Offer &b) { return a.count < b.count; });
    return group
        .raise(PHX_ERR_MISMATCH, kRendezvous,
               "the ranks offer memory with different %s: %s. Every rank must offer the same.", property.name,
               text.c_str())
        .peer(rarest->first);
  }

  phx_status prepare(Fd *pad, std::vector<int> *fds) {
    Pads::Pad own;
    PHX_TRY(symm.pads_of_group().take(kRendezvous, symm.number(), &own, pad));
    mine.pad = own.place;
    symm.adopt_pad(symm.group_rank(), std::move(own));
    if (group.first_count() != 0) symm.begin_at(group.first_count());

    const Block &block = symm.block();
    mine.channels = symm.channels();
    mine.ordinal = symm.ordinal();
    mine.size = block.size;
    mine.alloc_id = block.alloc_id;
    mine.persistent = block.persistent ? 1 : 0;
    mine.device_type = block.device.type;
    mine.device_index = block.device.index;
    size_t handle_size = sizeof mine.handle;
    int32_t fd = -1;
    const auto &ops = block.allocator->ops();
    PHX_TRY(ops.export_handle(block.allocator->self(), block.base, block.cookie, mine.handle, &handle_size, &fd));
    mine.handle_size = static_cast<uint32_t>(handle_size);
    if (pad->valid()) fds->push_back(pad->get());
    if (fd >= 0) fds->push_back(fd);
    PHX_TRY(symms_of(group).make_device()(kRendezvous, block, symm.size(), symm.group_rank(), symm.channels(),
                                          group.first_count(), &symm.device_));
    if (!symm.device_) return PHX_OK;
    mine.device = symm.device_->facts();
    PHX_TRY(symm.device_->export_fd(kRendezvous, &fd));
    fds->push_back(fd);
    return PHX_OK;
  }

  phx_status exchange(const std::vector<int> &fds, const Deadline &deadline, std::vector<Parcel> *parcels) {
    PHX_TRY(group.exchange_all(kRendezvous, mine, deadline, &all, fds, parcels));
    for (int i = 0; i < group.size(); ++i) {
      if (i == symm.group_rank()) continue;
      const size_t count = (*parcels)[static_cast<size_t>(i)].fds.size();
      if (count > (symm.device_ ? 3 : 2) || (all[i].pad.made != 0 && count == 0))
        return group.raise_malformed(kRendezvous, i);
      all[i].handle_size = std::min<uint32_t>(all[i].handle_size, sizeof all[i].handle);
    }
    return PHX_OK;
  }

  // Makes the last error one about the memory of rank i.
  phx_status blame(int i) const {
    ErrorInfo info = last_error();
    const std::string text = std::string(kRendezvous) + " on group '" + group.name() + "': the memory of " +
                             group.describe(i) + " cannot be used: " + info.text;
    copy_text(info.text, sizeof info.text, text.c_str());
    copy_text(info.group, sizeof info.group, group.name().c_str());
    info.rank = group.self_rank();
    info.peer = group.rank_of(i);
    return set_last_error(info);
  }

  phx_status map(int i, const Parcel &parcel) {
    size_t next = 0;
    const auto fd_of = [&] { return next < parcel.fds.size() ? parcel.fds[next++].get() : -1; };
    Pads::Pad pad;
    PHX_TRY(symm.pads_of_group().find(kRendezvous, i, all[i].pad, all[i].pad.made != 0 ? fd_of() : -1, &pad));
    symm.adopt_pad(i, std::move(pad));

    const Block &block = symm.block();
    void *base = nullptr;
    uint64_t cookie = 0;
    const auto &ops = block.allocator->ops();
    PHX_TRY(ops.import_handle(block.allocator->self(), &block.device, all[i].handle, all[i].handle_size, fd_of(),
                              block.size, &base, &cookie));
    symm.imported_[i] = std::shared_ptr<void>(base, [allocator = block.allocator, cookie](void *mapped) {
      allocator->ops().unmap(allocator->self(), mapped, cookie);
    });
    symm.buffers_[i] = base;
    if (!symm.device_) return PHX_OK;
    return symm.device_->adopt(kRendezvous, i, all[i].device, fd_of());
  }

  // Makes the rendezvous succeed on all ranks, or fail on all. Each rank writes its result into its pad, so that
  // another exchange is needed only if a rank failed: see Group::confirm.
  phx_status confirm(phx_status status, const Deadline &deadline) {
    const uint32_t ok = met_ok(symm.number());
    PadHeader &own = symm.pad_segments_[symm.group_rank()].header();
    store_and_wake(own.met, status == PHX_OK ? ok : ok + 1, own.sleepers, group.fenced_by_sleepers());
    bool all_met = status == PHX_OK;
    LazyDeadline until(std::max<int64_t>(deadline.left_ms(), 1), &group.world().progress());
    int late = -1;
    const auto text = [&] { return group.still_waiting(kRendezvous, 0, {late}); };
    until.set_text(WaitText(text));
    for (int i = 0; i < group.size() && status == PHX_OK; ++i) {
      if (i == group.group_rank()) continue;
      late = i;
      PadHeader &theirs = symm.pad_segments_[i].header();
      const WaitResult result = wait_reached(theirs.met, ok, theirs.sleepers, group.interruption(i), until);
      if (result == WaitResult::kInterrupted) return group.raise_cause(kRendezvous);
      if (result == WaitResult::kTimeout) {
        group
            .raise(PHX_ERR_TIMEOUT, kRendezvous, "%s: rank %d still waits for %s to map the memory of all ranks. %s",
                   group.timed_out(deadline.budget_ms()).c_str(), group.self_rank(), group.describe(i).c_str(),
                   group.advice(i).c_str())
            .peer(group.rank_of(i));
        group.fail_with(last_error(), true);
        return group.raise_in_flight(kRendezvous);
      }
      all_met = all_met && theirs.met.load(std::memory_order_relaxed) == ok;
    }
    return all_met ? PHX_OK : group.confirm(kRendezvous, status, deadline);
  }
};

phx_status Symm::rendezvous(Group &group, const BlockRef &block, const Deadline &deadline, std::shared_ptr<Symm> *out) {
  std::shared_ptr<Symm> symm(new Symm(group, block, symms_of(group).next_ordinal()));
  Rendezvous steps{group, *symm, {}, {}};
  Fd pad;
  std::vector<int> fds;
  PHX_FAILPOINT(kRendezvous, 1);
  phx_status status = steps.prepare(&pad, &fds);
  PHX_FAILPOINT(kRendezvous, 2);
  if (status != PHX_OK) return group.fail_with(last_error(), true);  // the others wait for this rank, or will
  std::vector<Parcel> parcels;
  status = steps.exchange(fds, deadline, &parcels);
  PHX_FAILPOINT(kRendezvous, 3);
  PHX_TRY(status);
  // All ranks compare the same parcels, so all come to the same result, and there is nothing to confirm.
  for (const Property &property : kMustAgree) PHX_TRY(steps.must_agree(property));
  for (int i = 0; i < group.size() && status == PHX_OK; ++i)
    if (i != group.group_rank() && steps.map(i, parcels[i]) != PHX_OK) status = steps.blame(i);
  SymmDevice *const device = symm->device();
  if (status == PHX_OK && device != nullptr) status = device->finish(kRendezvous, group, block, symm->buffers());
  PHX_FAILPOINT(kRendezvous, 4);
  status = steps.confirm(status, deadline);
  PHX_FAILPOINT(kRendezvous, 5);
  PHX_TRY(status);
  symm->pads_of_group().keep(symm->pad_segments_);
  symm->complete_ = true;
  if (device != nullptr) PHX_TRY(device->agree(kRendezvous, group, *block, deadline));
  *out = std::move(symm);
  return PHX_OK;
}

}  // namespace phx
