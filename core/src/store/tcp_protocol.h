// What goes over the wire between a TCP store's server and its clients. All numbers are little-endian.
//
//   server -> client   greeting: magic, the server's nonce
//   client -> server   answer:   the client's nonce, HMAC(token, "client", both nonces, server id, token length)
//   server -> client   verdict:  1 and HMAC(token, "server", the same) if the answer is right, 0 and zeros if not
//   client -> server   a request, and no other before its reply
//   server -> client   its reply
//
// The token itself is never sent, and each side proves that it knows it. What follows the handshake is neither
// encrypted nor signed: the store is for one host or a network whose machines are trusted.
#pragma once

#include <array>
#include <cstdint>
#include <string>

#include "phalanx/phalanx.h"
#include "store/sha256.h"
#include "store/store.h"

namespace phx::store {

using Nonce = std::array<uint8_t, 32>;

// ---- handshake

struct Greeting {
  Nonce nonce;
  Nonce server_id;  // of this server's life: a client sees by it that the server was replaced
};
struct Answer {
  Nonce nonce;
  Digest proof;
};
struct Verdict {
  bool accepted;
  Digest proof;
};
enum class Side { kClient, kServer };

inline constexpr size_t kMagicBytes = 8;
inline constexpr size_t kGreetingBytes = kMagicBytes + 32 + 32;
inline constexpr size_t kAnswerBytes = 32 + 32;
inline constexpr size_t kVerdictBytes = 1 + 32;

phx_status make_nonce(const char *operation, Nonce *nonce);
Digest make_proof(Side side, const std::string &token, const Greeting &greeting, const Nonce &client_nonce);

std::string encode(const Greeting &greeting);
std::string encode(const Answer &answer);
std::string encode(const Verdict &verdict);
// `bytes` has exactly as many as the name says. False when they are something else.
bool decode(const std::string &bytes, Greeting *greeting);
Answer decode_answer(const std::string &bytes);
Verdict decode_verdict(const std::string &bytes);

// ---- requests and replies

enum class Op : uint8_t { kSet = 1, kGet = 2, kWait = 3, kAdd = 4, kRemove = 5 };

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

inline constexpr size_t kFrameSizeBytes = 4;  // in front of each frame: how many bytes follow
inline constexpr size_t kRequestHeaderBytes = 1 + 8 + 4;
inline constexpr size_t kReplyHeaderBytes = 4 + 8;
inline constexpr size_t kMaxRequestBytes = kRequestHeaderBytes + kMaxStoreKey + kMaxStoreValue;
inline constexpr size_t kMaxReplyBytes = kReplyHeaderBytes + kMaxStoreValue;

uint32_t decode_size(const char *bytes);  // of kFrameSizeBytes

// With the size in front; the value of a request is not copied: it is to be sent after these bytes.
std::string encode_head(const Request &request);
std::string encode(const Reply &reply);
// From the bytes after the size. NULL when right, else what is wrong with them. A value is borrowed from `frame`.
const char *decode(const std::string &frame, Request *request);
const char *decode(const std::string &frame, Reply *reply);

}  // namespace phx::store
