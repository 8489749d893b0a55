#include "p2p/ring.h"

#include <algorithm>

#include "kernels/copies.h"

namespace phx {
namespace {

// Never 0, and different from the flag of the record that lay at the same place before.
uint32_t flag_of(uint32_t line) { return line << 1 | 1; }

uint32_t lines_of(size_t bytes) { return static_cast<uint32_t>((sizeof(RecordHeader) + bytes + kLine - 1) / kLine); }

// The caller then reads the peer's `sleepers`, and that load must not pass this store. As in store_and_wake, either
// this is a full fence, or a thread that goes to sleep fences all others (Messenger::sleep).
void show(SharedWord &word, uint32_t value, bool fenced_by_sleepers) {
  if (fenced_by_sleepers)
    word.store(value, std::memory_order_release);
  else
    word.exchange(value, std::memory_order_seq_cst);
}

}  // namespace

RingResult RingWriter::put(const Record &record, size_t *taken) {
  const size_t bytes = std::min(record.bytes, most_bytes(next_));
  const uint32_t lines = lines_of(bytes);
  // One line more than the record needs: the flag of the next record is cleared before this one becomes visible.
  if (next_ + lines + 1 - known_taken_ > lines_) {
    // Pairs with the store in RingReader::release: the receiver has finished reading these lines. seq_cst, because a
    // sender that has announced its sleep must not miss that store.
    const uint32_t now = header_->taken.load(std::memory_order_seq_cst);
    if (next_ - now > next_ - known_taken_) return RingResult::kBroken;  // it went backwards or too far
    known_taken_ = now;
    if (next_ + lines + 1 - known_taken_ > lines_) return RingResult::kNothing;
  }
  RecordHeader *const header = at(next_);
  char *payload = reinterpret_cast<char *>(header + 1);
  // The first line is written last: the receiver polls its flag, and would take the line away in between.
  const size_t first = std::min(bytes, kLine - sizeof(RecordHeader));
  copy_bytes(payload + first, record.data + first, bytes - first);
  at(next_ + lines)->flag.store(0, std::memory_order_relaxed);  // ordered by the store of the flag below
  write_head(record, bytes, header);
  copy_bytes(payload, record.data, first);
  // Pairs with the load in RingReader::peek: a receiver that sees the flag sees the record and the cleared flag behind.
  show(header->flag, flag_of(next_), fenced_);
  next_ += lines;
  *taken = bytes;
  return RingResult::kOk;
}

RingResult RingWriter::charge(uint32_t cost, size_t credit) {
  if (charged_ - returned_ + cost > credit) {
    // Relaxed, because no data that this rank reads depends on this number.
    const uint32_t now = header_->returned.load(std::memory_order_relaxed);
    if (charged_ - now > charged_ - returned_) return RingResult::kBroken;  // it went backwards or too far
    returned_ = now;
    if (charged_ - returned_ + cost > credit) return RingResult::kNothing;
  }
  charged_ += cost;
  return RingResult::kOk;
}

RingResult RingReader::peek(Record *out) const {
  const RecordHeader *const header = at(next_);
  // Pairs with the store in RingWriter::put. seq_cst, because a receiver that has announced its sleep must not miss it.
  const uint32_t flag = header->flag.load(std::memory_order_seq_cst);
  if (flag == 0) return RingResult::kNothing;
  if (flag != flag_of(next_)) return RingResult::kBroken;
  read_head(*header, out);
  return out->bytes <= most_bytes(next_) ? RingResult::kOk : RingResult::kBroken;
}

void RingReader::release(const Record &record) {
  next_ += lines_of(record.bytes);
  // Pairs with the load in RingWriter::put: the sender may write there from now on.
  show(header_->taken, next_, fenced_);
}

}  // namespace phx
