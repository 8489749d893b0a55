#include "p2p/remote_ring.h"

#include "kernels/copies.h"

namespace phx {

RemoteRing::RemoteRing(Net &net, int peer, uint32_t channel)
    : net_(net), peer_(peer), channel_(channel), credit_(credit_bytes(net.group().size())) {
  charged_ = known_returned_ = peer_charged_ = returned_ = told_ = net.group().first_count();
  for (auto &buffer : in_) buffer = std::make_unique<Buffer>(net);
  for (uint32_t number = 0; number < kPosted; ++number) post(number);
}

void RemoteRing::post(uint32_t number) {
  Buffer &buffer = *in_[number % kPosted];
  buffer.transfers.recv_some(peer_, record_name(number), buffer.memory.data(), sizeof(RecordHeader) + kEagerBytes);
}

void RemoteRing::flush(const Deadline &deadline) {
  Backoff(20, 1000).until(deadline, [&] {
    for (const auto &buffer : out_)
      if (buffer->transfers.poll() == PHX_IN_PROGRESS) return false;
    return true;
  });
}

bool RemoteRing::has_room() {
  while (!out_.empty() && out_.front()->transfers.poll() == PHX_OK) {
    free_.push_back(std::move(out_.front()));
    out_.pop_front();
  }
  return out_.size() < kSending;
}

void RemoteRing::write(const Record &record) {
  if (free_.empty()) free_.push_back(std::make_unique<Buffer>(net_));
  out_.push_back(std::move(free_.back()));
  free_.pop_back();
  Buffer &buffer = *out_.back();
  auto *const header = reinterpret_cast<RecordHeader *>(buffer.memory.data());
  new (header) RecordHeader{};
  write_head(record, record.bytes, header);
  copy_bytes(header + 1, record.data, record.bytes);
  buffer.transfers.send(peer_, record_name(written_), header, sizeof *header + record.bytes);
  ++written_;
  has_room();  // most have left by now
}

void RemoteRing::tell_credit() {
  if (returned_ - told_ < credit_ / 4 || !has_room()) return;
  told_ = returned_;
  write({RecordKind::kCredit, {}, told_});
}

phx_status RemoteRing::advance(bool *moved) {
  has_room();
  tell_credit();
  while (come_ - taken_ < kPosted) {
    const phx_status status = in_[come_ % kPosted]->transfers.poll();
    if (status == PHX_IN_PROGRESS) return PHX_OK;
    if (status != PHX_OK) return status;
    ++come_;
    *moved = true;
  }
  return PHX_OK;
}

RingResult RemoteRing::peek(Record *out) {
  for (; taken_ != come_; release()) {
    read_head(*reinterpret_cast<const RecordHeader *>(in_[taken_ % kPosted]->memory.data()), out);
    if (out->bytes > kEagerBytes) return RingResult::kBroken;
    if (out->kind != RecordKind::kCredit) return RingResult::kOk;
    const auto now = static_cast<uint32_t>(out->offset);
    if (charged_ - now > charged_ - known_returned_) return RingResult::kBroken;  // it went backwards or too far
    known_returned_ = now;
  }
  return RingResult::kNothing;
}

}  // namespace phx
