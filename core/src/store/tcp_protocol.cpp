// Encoding and decoding of what TCP stores send: see the header. Decoders check everything that they read.
#include "store/tcp_protocol.h"

#include "base/entropy.h"

namespace phx::store {

phx_status make_nonce(const char *operation, Nonce *nonce) {
  return fill_random(operation, nonce->data(), nonce->size());
}

Digest make_proof(Side side, const std::string &token, const Greeting &greeting, const Nonce &client_nonce) {
  // The sides differ, so that one side's proof cannot be used as the other's. Both words have equal length.
  const std::string words = side == Side::kClient ? "phalanx store client" : "phalanx store server";
  // HMAC pads a short key with zeros and hashes a long one: the length tells tokens apart that then are the same key.
  const uint64_t token_size = token.size();
  return hmac_sha256(token, words + bytes_of(greeting.nonce) + bytes_of(client_nonce) + bytes_of(greeting.server_id) +
                                bytes_of(token_size));
}

std::string encode_head(const Request &request) {
  const RequestHead head{request.op, request.number, static_cast<uint32_t>(request.key.size())};
  const auto size = static_cast<FrameSize>(sizeof head + request.key.size() + request.value_size);
  return bytes_of(size) + bytes_of(head) + request.key;
}

std::string encode(const Reply &reply) {
  const ReplyHead head{reply.status, reply.number};
  const auto size = static_cast<FrameSize>(sizeof head + reply.payload.size());
  return bytes_of(size) + bytes_of(head) + reply.payload;
}

const char *decode(const std::string &frame, Request *request) {
  if (frame.size() < sizeof(RequestHead)) return "a request without a whole header";
  const auto head = decode<RequestHead>(frame);
  if (head.op < Op::kSet || head.op > Op::kRemove) return "an unknown operation";
  const size_t key_size = head.key_size, rest = frame.size() - sizeof head;
  if (key_size == 0 || key_size > kMaxStoreKey) return "a key of impossible length";
  if (key_size > rest) return "a key that is longer than its request";
  *request = {head.op, head.number, frame.substr(sizeof head, key_size), &frame[sizeof head + key_size],
              rest - key_size};
  if (request->key.find('\0') != std::string::npos) return "a key with a zero byte";
  if (request->value_size > kMaxStoreValue) return "a value of impossible length";
  if (request->op != Op::kSet && request->value_size != 0) return "bytes after the key";
  if ((request->op == Op::kGet || request->op == Op::kWait) && request->number < 0) return "a negative timeout";
  return nullptr;
}

const char *decode(const std::string &frame, Reply *reply) {
  if (frame.size() < sizeof(ReplyHead)) return "a reply without a whole header";
  const auto head = decode<ReplyHead>(frame);
  *reply = {head.status, head.number, frame.substr(sizeof head)};
  if (reply->status > PHX_OK || reply->status < PHX_ERR_INTERNAL) return "an unknown status";
  return nullptr;
}

}  // namespace phx::store
