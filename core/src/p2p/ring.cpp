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

void RingWriter::open(char *ring, size_t bytes, bool fenced_by_sleepers, uint32_t first) {
  fenced_ = fenced_by_sleepers;
  header_ = reinterpret_cast<RingHeader *>(ring);
  data_ = ring + sizeof(RingHeader);
  lines_ = static_cast<uint32_t>(bytes / kLine);
  written_ = known_taken_ = charged_ = known_returned_ = first;
}

RingResult RingWriter::put(const Record &record, size_t *taken) {
  const size_t to_end = (lines_ - (written_ & (lines_ - 1))) * kLine - sizeof(RecordHeader);
  const size_t bytes = std::min({record.bytes, kPieceBytes, to_end});
  const uint32_t lines = lines_of(bytes);
  // One line more than the record needs: the flag of the next record is cleared before this one becomes visible.
  if (written_ + lines + 1 - known_taken_ > lines_) {
    // Pairs with the store in RingReader::release: the receiver has finished reading these lines. seq_cst, because a
    // sender that has announced its sleep must not miss that store.
    const uint32_t now = header_->taken.load(std::memory_order_seq_cst);
    if (written_ - now > written_ - known_taken_) return RingResult::kBroken;  // it went backwards or too far
    known_taken_ = now;
    if (written_ + lines + 1 - known_taken_ > lines_) return RingResult::kNothing;
  }
  auto *header = reinterpret_cast<RecordHeader *>(at(written_));
  char *payload = reinterpret_cast<char *>(header + 1);
  // The first line is written last: the receiver polls its flag, and would take the line away in between.
  const size_t first = std::min(bytes, kLine - sizeof(RecordHeader));
  copy_bytes(payload + first, record.data + first, bytes - first);
  flag(written_ + lines).store(0, std::memory_order_relaxed);  // ordered by the store of the flag below
  header->bytes = static_cast<uint32_t>(bytes);
  header->tag = record.head.tag;
  header->dtype = static_cast<int16_t>(record.head.dtype);
  header->kind = record.kind;
  header->count = record.head.count;
  header->offset = record.offset;
  copy_bytes(payload, record.data, first);
  // Pairs with the load in RingReader::peek: a receiver that sees the flag sees the record and the cleared flag behind.
  show(header->flag, flag_of(written_), fenced_);
  written_ += lines;
  *taken = bytes;
  return RingResult::kOk;
}

RingResult RingWriter::charge(uint32_t cost, size_t credit) {
  if (charged_ - known_returned_ + cost > credit) {
    // Relaxed, because no data that this rank reads depends on this number.
    const uint32_t now = header_->returned.load(std::memory_order_relaxed);
    if (charged_ - now > charged_ - known_returned_) return RingResult::kBroken;  // it went backwards or too far
    known_returned_ = now;
    if (charged_ - known_returned_ + cost > credit) return RingResult::kNothing;
  }
  charged_ += cost;
  return RingResult::kOk;
}

void RingReader::open(char *ring, size_t bytes, bool fenced_by_sleepers, uint32_t first) {
  fenced_ = fenced_by_sleepers;
  header_ = reinterpret_cast<RingHeader *>(ring);
  data_ = ring + sizeof(RingHeader);
  lines_ = static_cast<uint32_t>(bytes / kLine);
  taken_ = charged_ = returned_ = first;
}

RingResult RingReader::peek(Record *out) const {
  const auto *record = reinterpret_cast<const RecordHeader *>(at(taken_));
  // Pairs with the store in RingWriter::put. seq_cst, because a receiver that has announced its sleep must not miss it.
  const uint32_t flag = record->flag.load(std::memory_order_seq_cst);
  if (flag == 0) return RingResult::kNothing;
  if (flag != flag_of(taken_)) return RingResult::kBroken;
  // Each field is read once, so that what is used is what was checked, even if a broken peer goes on writing.
  out->bytes = *const_cast<const volatile uint32_t *>(&record->bytes);
  out->kind = *const_cast<const volatile RecordKind *>(&record->kind);
  out->head.tag = *const_cast<const volatile uint32_t *>(&record->tag);
  out->head.dtype = *const_cast<const volatile int16_t *>(&record->dtype);
  out->head.count = *const_cast<const volatile uint64_t *>(&record->count);
  out->offset = *const_cast<const volatile uint64_t *>(&record->offset);
  out->data = reinterpret_cast<const char *>(record + 1);
  const size_t to_end = (lines_ - (taken_ & (lines_ - 1))) * kLine - sizeof(RecordHeader);
  if (out->bytes > to_end || out->bytes > kPieceBytes) return RingResult::kBroken;
  return RingResult::kOk;
}

void RingReader::release(const Record &record) {
  taken_ += lines_of(record.bytes);
  // Pairs with the load in RingWriter::put: the sender may write there from now on.
  show(header_->taken, taken_, fenced_);
}

bool RingReader::charge(uint32_t cost, size_t credit) {
  charged_ += cost;
  return charged_ - returned_ <= credit;
}

void RingReader::give_back(uint32_t cost) {
  returned_ += cost;
  header_->returned.store(returned_, std::memory_order_relaxed);  // pairs with the load in RingWriter::charge
}

}  // namespace phx
