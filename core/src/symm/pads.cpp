#include "symm/pads.h"

#include <algorithm>

#include "base/error.h"

namespace phx {

Pads::Pad Pads::at(int i, const Location &place) const {
  const SharedMappingRef &segment = segments_[i][place.segment];
  return {place, segment, segment->bytes() + place.index * pad_bytes_};
}

void Pads::collect() {
  const auto freed_by_all = [](const Retired &retired) {
    return std::all_of(retired.pads.begin(), retired.pads.end(), [&](const Pad &pad) {
      // Pairs with the store in ~Symm: everything that the rank did to any pad of the allocation happened before it.
      return pad.header().freed.load(std::memory_order_acquire) >= retired.number;
    });
  };
  const auto first_free = std::stable_partition(retired_.begin(), retired_.end(),
                                                [&](const Retired &retired) { return !freed_by_all(retired); });
  for (auto retired = first_free; retired != retired_.end(); ++retired) free_.push_back(retired->pads[self_].place);
  retired_.erase(first_free, retired_.end());
}

phx_status Pads::take(const char *operation, uint64_t number, Pad *pad, Fd *fd) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (free_.empty()) collect();
  if (free_.empty()) {
    PHX_TRY(create_segment(operation, "phalanx-pads", kInSegment * pad_bytes_, fd));
    PHX_TRY(map_segment(operation, fd->get(), kInSegment * pad_bytes_, pad_bytes_, &pad->segment));
    pad->place = {static_cast<uint32_t>(segments_[self_].size()), 0, kInSegment};
    pad->begin = pad->segment->bytes();
  } else {
    const Pad reused = at(self_, free_.back());
    PHX_TRY(populate(operation, reused.begin, pad_bytes_));
    *pad = reused;
    free_.pop_back();
    pad->header().sleepers.store(0, std::memory_order_relaxed);
    auto *word = reinterpret_cast<SharedWord *>(pad->begin + sizeof(PadHeader));
    auto *const end = reinterpret_cast<SharedWord *>(pad->begin + pad_bytes_);
    for (; word != end; ++word) word->store(0, std::memory_order_relaxed);  // a message to the peers orders this
  }
  pad->header().met.store(met_ok(number) - 1, std::memory_order_relaxed);
  return PHX_OK;
}

phx_status Pads::find(const char *operation, int i, const Location &place, int fd, Pad *out) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const size_t known = segments_[i].size();
  const bool possible = place.made == 0 ? place.segment < known && place.index < kInSegment
                                        : place.segment == known && place.index == 0 && place.made == kInSegment;
  if (!possible)
    return fail(PHX_ERR_ABI, operation, "it announced pad %u of segment %u, which does not exist", place.index,
                place.segment);
  if (place.made == 0) {
    *out = at(i, place);
    return PHX_OK;
  }
  const size_t size = kInSegment * pad_bytes_;
  PHX_TRY(verify_segment(operation, fd, size));
  PHX_TRY(map_segment(operation, fd, size, 0, &out->segment));
  out->place = place;
  out->begin = out->segment->bytes();
  return PHX_OK;
}

void Pads::keep(const std::vector<Pad> &pads) {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (size_t i = 0; i < pads.size(); ++i)
    if (pads[i].place.made != 0) segments_[i].push_back(pads[i].segment);
  const Location &own = pads[self_].place;
  for (uint32_t index = own.made; index > 1; --index) free_.push_back({own.segment, index - 1, 0});
}

void Pads::give_back(const Location &place) {
  if (place.made != 0) return;  // a new segment, which is not kept
  const std::lock_guard<std::mutex> lock(mutex_);
  free_.push_back(place);
}

void Pads::retire(uint64_t number, std::vector<Pad> pads) {
  pads[self_].place.made = 0;
  const std::lock_guard<std::mutex> lock(mutex_);
  retired_.push_back({number, std::move(pads)});
}

}  // namespace phx
