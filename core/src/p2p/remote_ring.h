// Messages with a rank of another host: the records of layout.h, each of which is a message of the carrier.
//
// It does for both directions what RingWriter and RingReader do for a ring in shared memory. An eager message is small
// here; data that follows a CTS goes straight from the buffer of the send into that of the receive, as one message of
// the carrier that has the number of the message in its name. Credit comes back in records of a kind of its own.
#pragma once

#include <array>
#include <deque>

#include "net/net.h"
#include "p2p/ring.h"

namespace phx {

class RemoteRing {
 public:
  static constexpr size_t kEagerBytes = size_t{8} << 10;

  // `channel`: one of those of MessageName, for this ring alone.
  RemoteRing(Net &net, int peer, uint32_t channel);
  bool sends() const { return !out_.empty(); }  // whether records are on their way out of this process
  // Lets what was sent go.
  void flush(const Deadline &deadline);

  // As of RingWriter. record.bytes is at most kEagerBytes.
  RingResult put(const Record &record, size_t *taken) {
    if (!has_room()) return RingResult::kNothing;
    write(record);
    *taken = record.bytes;
    return RingResult::kOk;
  }
  RingResult charge(uint32_t cost) {
    if (charged_ - known_returned_ + cost > credit_) return RingResult::kNothing;
    charged_ += cost;
    return RingResult::kOk;
  }
  // As of RingReader. A record with credit is not seen.
  RingResult peek(Record *out);
  void release() {
    post(taken_ + kPosted);
    ++taken_;
  }
  bool charge_peer(uint32_t cost) {
    peer_charged_ += cost;
    return peer_charged_ - returned_ <= credit_;
  }
  void give_back(uint32_t cost) {
    returned_ += cost;
    tell_credit();
  }

  // Takes in what has come. An error is the thread's: the connection is lost.
  phx_status advance(bool *moved);

  // The rest of a message that was announced, under its number.
  void send_rest(Transfers &transfers, uint32_t number, const void *data, size_t bytes) {
    transfers.send(peer_, rest_name(number), data, bytes);
  }
  void receive_rest(Transfers &transfers, uint32_t number, void *data, size_t bytes) {
    transfers.recv(peer_, rest_name(number), data, bytes);
  }

 private:
  // Receives that are posted, and records that may be under way: more than there is credit for, so that a message that
  // has credit never waits for its receive.
  static constexpr size_t kPosted = 8, kSending = 512;
  struct Buffer {
    explicit Buffer(Net &net) : memory(net, sizeof(RecordHeader) + kEagerBytes), transfers(net) {}
    Scratch memory;
    Transfers transfers;
  };
  static constexpr uint32_t kRest = 0x8000;  // in the number of a part: not a record
  MessageName record_name(uint32_t number) const { return {channel_, number, number >> 13 & (kRest - 1)}; }
  MessageName rest_name(uint32_t number) const { return {channel_, number, kRest | (number >> 13 & (kRest - 1))}; }
  bool has_room();
  void write(const Record &record);
  void tell_credit();
  void post(uint32_t number);

  Net &net_;
  const int peer_;
  const uint32_t channel_;
  const size_t credit_;  // the limit of both directions
  std::array<std::unique_ptr<Buffer>, kPosted> in_;
  std::deque<std::unique_ptr<Buffer>> out_;
  std::vector<std::unique_ptr<Buffer>> free_;
  uint32_t taken_ = 0, come_ = 0;  // records that were read, and that have come
  uint32_t written_ = 0;           // records that were begun
  // Counts of credit, which begin at Group::first_count.
  uint32_t charged_, known_returned_;        // of what this rank sends
  uint32_t peer_charged_, returned_, told_;  // of what it receives
};

}  // namespace phx
