// What goes over the wire between a TCP store's server and its clients. All numbers are little-endian.
//
//   server -> client   Greeting
//   client -> server   Answer:   the client's nonce, HMAC(token, "client", both nonces, server id, token length)
//   server -> client   Verdict:  1 and HMAC(token, "server", the same) if the answer is right, 0 and zeros if not
//   client -> server   a request, and no other before its reply
//   server -> client   its reply
//
// The token itself is never sent, and each side proves that it knows it. What follows the handshake is neither
// encrypted nor signed: the store is for one host or a network whose machines are trusted.
#pragma once

#include <array>
#include <cstdint>
#include <cstring>
#include <string>

#include "store/sha256.h"
#include "store/store.h"

namespace phx::store {

// The records are sent as they lie in memory.
static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__);

// The record at the beginning of `bytes`, which are enough.
template <class Record>
Record decode(const std::string &bytes) {
  Record record;
  std::memcpy(&record, bytes.data(), sizeof record);
  return record;
}

using Nonce = std::array<uint8_t, 32>;

// ---- handshake

inline constexpr std::array<char, 8> kProtocol{'P', 'H', 'X', 'T', 'C', 'P', 'S', '2'};

struct Greeting {
  std::array<char, 8> magic = kProtocol;
  Nonce nonce;
  Nonce server_id;  // of this server's life: a client sees by it that the server was replaced
};
struct Answer {
  Nonce nonce;
  Digest proof;
};
struct Verdict {
  uint8_t accepted;  // 1: yes
  Digest proof;
};
static_assert(sizeof(Greeting) == 72 && sizeof(Answer) == 64 && sizeof(Verdict) == 33);
enum class Side { kClient, kServer };

phx_status make_nonce(const char *operation, Nonce *nonce);
Digest make_proof(Side side, const std::string &token, const Greeting &greeting, const Nonce &client_nonce);

// ---- requests and replies: frames, each a FrameSize, a head, and what follows it

enum class Op : uint8_t { kSet = 1, kGet = 2, kWait = 3, kAdd = 4, kRemove = 5 };

using FrameSize = uint32_t;           // how many bytes follow it
struct [[gnu::packed]] RequestHead {  // the key and the value follow
  Op op;
  int64_t number;
  uint32_t key_size;
};
struct [[gnu::packed]] ReplyHead {  // the payload follows
  int32_t status;
  int64_t number;
};
static_assert(sizeof(RequestHead) == 13 && sizeof(ReplyHead) == 12);

struct Request {
  Op op = Op::kGet;
  int64_t number = 0;  // kGet, kWait: milliseconds; kAdd: what to add
  std::string key;
  const void *value = nullptr;  // of kSet; borrowed
  size_t value_size = 0;
};
struct Reply {
  phx_status status = PHX_OK;
  int64_t number = 0;   // kAdd: the new value
  std::string payload;  // kGet: the value; on error its text
};

inline constexpr size_t kMaxRequestBytes = sizeof(RequestHead) + kMaxStoreKey + kMaxStoreValue;
inline constexpr size_t kMaxReplyBytes = sizeof(ReplyHead) + kMaxStoreValue;

// With the size in front; the value of a request is not copied: it is to be sent after these bytes.
std::string encode_head(const Request &request);
std::string encode(const Reply &reply);
// From the bytes after the size. NULL when right, else what is wrong with them. A value is borrowed from `frame`.
const char *decode(const std::string &frame, Request *request);
const char *decode(const std::string &frame, Reply *reply);

}  // namespace phx::store
