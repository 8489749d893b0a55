// Encoding and decoding of what TCP stores send: see the header. Decoders check everything that they read.
#include "store/tcp_protocol.h"

#include <algorithm>
#include <cstring>

#include "base/entropy.h"

namespace phx::store {
namespace {

constexpr char kProtocol[kMagicBytes + 1] = "PHXTCPS2";

template <class T>
void put(std::string *bytes, T value) {
  const auto bits = static_cast<uint64_t>(value);
  for (size_t i = 0; i < sizeof(T); ++i) bytes->push_back(static_cast<char>(bits >> (8 * i)));
}

template <class T>
T get(const char *bytes) {
  uint64_t bits = 0;
  for (size_t i = 0; i < sizeof(T); ++i) bits |= uint64_t{static_cast<uint8_t>(bytes[i])} << (8 * i);
  return static_cast<T>(bits);
}

void put_bytes(std::string *bytes, const std::array<uint8_t, 32> &value) {
  bytes->append(reinterpret_cast<const char *>(value.data()), value.size());
}

std::array<uint8_t, 32> get_bytes(const std::string &bytes, size_t at) {
  std::array<uint8_t, 32> value;
  std::memcpy(value.data(), bytes.data() + at, value.size());
  return value;
}

}  // namespace

phx_status make_nonce(const char *operation, Nonce *nonce) {
  return fill_random(operation, nonce->data(), nonce->size());
}

Digest make_proof(Side side, const std::string &token, const Greeting &greeting, const Nonce &client_nonce) {
  HmacSha256 hmac(token.data(), token.size());
  // The sides differ, so that one side's proof cannot be used as the other's. Both words have equal length.
  hmac.update(side == Side::kClient ? "phalanx store client" : "phalanx store server", 20);
  hmac.update(greeting.nonce.data(), greeting.nonce.size());
  hmac.update(client_nonce.data(), client_nonce.size());
  hmac.update(greeting.server_id.data(), greeting.server_id.size());
  // HMAC pads a short key with zeros and hashes a long one: the length tells tokens apart that then are the same key.
  std::string size;
  put(&size, static_cast<uint64_t>(token.size()));
  hmac.update(size.data(), size.size());
  return hmac.finish();
}

std::string encode(const Greeting &greeting) {
  std::string bytes(kProtocol, kMagicBytes);
  put_bytes(&bytes, greeting.nonce);
  put_bytes(&bytes, greeting.server_id);
  return bytes;
}

std::string encode(const Answer &answer) {
  std::string bytes;
  put_bytes(&bytes, answer.nonce);
  put_bytes(&bytes, answer.proof);
  return bytes;
}

std::string encode(const Verdict &verdict) {
  std::string bytes(1, verdict.accepted ? 1 : 0);
  put_bytes(&bytes, verdict.proof);
  return bytes;
}

bool decode(const std::string &bytes, Greeting *greeting) {
  if (bytes.size() != kGreetingBytes || bytes.compare(0, kMagicBytes, kProtocol) != 0) return false;
  greeting->nonce = get_bytes(bytes, kMagicBytes);
  greeting->server_id = get_bytes(bytes, kMagicBytes + 32);
  return true;
}

Answer decode_answer(const std::string &bytes) { return {get_bytes(bytes, 0), get_bytes(bytes, 32)}; }

Verdict decode_verdict(const std::string &bytes) { return {bytes[0] == 1, get_bytes(bytes, 1)}; }

uint32_t decode_size(const char *bytes) { return get<uint32_t>(bytes); }

std::string encode_head(const Request &request) {
  std::string bytes;
  put(&bytes, static_cast<uint32_t>(kRequestHeaderBytes + request.key.size() + request.value_size));
  put(&bytes, static_cast<uint8_t>(request.op));
  put(&bytes, request.number);
  put(&bytes, static_cast<uint32_t>(request.key.size()));
  bytes += request.key;
  return bytes;
}

std::string encode(const Reply &reply) {
  std::string bytes;
  bytes.reserve(kFrameSizeBytes + kReplyHeaderBytes + reply.payload.size());
  put(&bytes, static_cast<uint32_t>(kReplyHeaderBytes + reply.payload.size()));
  put(&bytes, reply.status);
  put(&bytes, reply.number);
  bytes += reply.payload;
  return bytes;
}

const char *decode(const std::string &frame, Request *request) {
  if (frame.size() < kRequestHeaderBytes) return "a request without a whole header";
  const auto op = get<uint8_t>(&frame[0]);
  if (op < static_cast<uint8_t>(Op::kSet) || op > static_cast<uint8_t>(Op::kRemove)) return "an unknown operation";
  request->op = static_cast<Op>(op);
  request->number = get<int64_t>(&frame[1]);
  const auto key_size = get<uint32_t>(&frame[9]);
  if (key_size == 0 || key_size > kMaxStoreKey) return "a key of impossible length";
  if (key_size > frame.size() - kRequestHeaderBytes) return "a key that is longer than its request";
  request->key = frame.substr(kRequestHeaderBytes, key_size);
  if (request->key.find('\0') != std::string::npos) return "a key with a zero byte";
  request->value = frame.data() + kRequestHeaderBytes + key_size;
  request->value_size = frame.size() - kRequestHeaderBytes - key_size;
  if (request->value_size > kMaxStoreValue) return "a value of impossible length";
  if (request->op != Op::kSet && request->value_size != 0) return "bytes after the key";
  if ((request->op == Op::kGet || request->op == Op::kWait) && request->number < 0) return "a negative timeout";
  return nullptr;
}

const char *decode(const std::string &frame, Reply *reply) {
  if (frame.size() < kReplyHeaderBytes) return "a reply without a whole header";
  reply->status = get<int32_t>(&frame[0]);
  reply->number = get<int64_t>(&frame[4]);
  reply->payload = frame.substr(kReplyHeaderBytes);
  if (reply->status > PHX_OK || reply->status < PHX_ERR_INTERNAL) return "an unknown status";
  return nullptr;
}

}  // namespace phx::store
