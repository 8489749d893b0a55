// phx_send, phx_recv and phx_messages: every argument is checked here, before anything is sent.
#include <algorithm>
#include <cstring>
#include <limits>
#include <vector>

#include "api/entry.h"
#include "gpu/gpu_group.h"
#include "p2p/messenger.h"

using namespace phx;

namespace {

phx_status check_buffer(const char *name, const void *buffer, size_t count, int32_t dtype, Transfer *out) {
  const size_t item = phx_dtype_size(dtype);
  if (item == 0) return fail(PHX_ERR_INVALID, name, "unknown dtype %d; use a PHX_DTYPE_* constant", dtype);
  if (count > static_cast<size_t>(std::numeric_limits<int64_t>::max()) / item)
    return fail(PHX_ERR_INVALID, name, "count is %zu, which is more than memory can hold", count);
  if (count != 0 && buffer == nullptr) return fail(PHX_ERR_INVALID, name, "buffer is NULL, but count is not 0");
  out->bytes = count * item;
  out->head.dtype = dtype;
  out->head.count = count;
  return PHX_OK;
}

phx_status check_peer(const char *name, const Group &group, int32_t peer, Transfer *out) {
  if (peer == PHX_ANY_RANK && !out->sends) return PHX_OK;
  if (peer >= 0 && peer < group.size()) return PHX_OK;
  if (peer == PHX_ANY_RANK)
    return fail(PHX_ERR_INVALID, name,
                "PHX_ANY_RANK is allowed for receives only; give the group rank that the message goes to");
  return fail(PHX_ERR_INVALID, name, "peer is %d, which is not a group rank: the group has %d ranks, numbered from 0",
              peer, group.size());
}

// The checked options of a call, and the resolved timeout.
struct Options {
  phx_options common = PHX_OPTIONS_INIT;
  phx_gpu_options gpu = PHX_GPU_OPTIONS_INIT;
  int64_t timeout_ms = 0;
  bool on_gpu() const { return gpu.device.type == PHX_DEVICE_CUDA; }
};

phx_status check_options(const char *name, const Group &group, const phx_options *options, Options *out) {
  if (options != nullptr) PHX_TRY(read_in(options, &out->common, name));
  if (out->common.gpu != nullptr) PHX_TRY(read_in(out->common.gpu, &out->gpu, name));
  const phx_device &device = out->gpu.device;
  if (out->common.flags != 0 || out->gpu.flags != 0) return fail(PHX_ERR_INVALID, name, "flags must be 0");
  if (device.type != 0 && device.type != PHX_DEVICE_CPU && device.type != PHX_DEVICE_CUDA)
    return fail(PHX_ERR_INVALID, name, "unknown device type %d; use PHX_DEVICE_CPU or PHX_DEVICE_CUDA", device.type);
  if (out->gpu.stream != nullptr && !out->on_gpu())
    return fail(PHX_ERR_INVALID, name,
                "a stream is given, but the memory is not on a GPU; set phx_gpu_options.device, or set stream to NULL");
  return group.resolve_timeout(name, out->common.timeout_ms, &out->timeout_ms);
}

// `transfer` has its direction and its buffer already.
phx_status check_transfer(const char *name, const Group &group, size_t count, int32_t dtype, int32_t peer, uint32_t tag,
                          Transfer *transfer) {
  transfer->peer = peer;
  transfer->head.tag = tag;
  const void *buffer = transfer->sends ? transfer->in : transfer->out;
  PHX_TRY(check_buffer(name, buffer, count, dtype, transfer));
  return check_peer(name, group, peer, transfer);
}

// Adds a checked message to those that are to be enqueued on a stream.
phx_status add(const char *name, const Transfer &transfer, std::vector<GpuMessage> *messages) {
  if (transfer.peer == PHX_ANY_RANK)
    return fail(PHX_ERR_UNSUPPORTED, name,
                "PHX_ANY_RANK is not allowed for GPU memory; give the group rank that sends");
  char *const data = transfer.sends ? const_cast<char *>(transfer.in) : transfer.out;
  messages->push_back({transfer.sends,
                       transfer.peer,
                       data,
                       {transfer.bytes, transfer.head.tag, static_cast<uint32_t>(transfer.head.dtype)}});
  return PHX_OK;
}

phx_status put(const char *name, Group &group, const std::vector<GpuMessage> &messages, const Options &options) {
  return gpu_of(group).rings().put(name, options.gpu.device.index, messages, options.timeout_ms, options.gpu.stream);
}

phx_status issue(bool sends, phx_group *group, const void *in, void *out, size_t count, int32_t dtype, int32_t peer,
                 uint32_t tag, const phx_options *options, phx_work **work) {
  const char *name = sends ? "send" : "recv";
  return with_handle(name, group, [&](Group &g) -> phx_status {
    Options read;
    Messenger &messenger = messenger_of(g);
    const auto fill = [&](Transfer &transfer) -> phx_status {
      transfer.sends = sends;
      transfer.in = static_cast<const char *>(in);
      transfer.out = static_cast<char *>(out);
      PHX_TRY(check_transfer(name, g, count, dtype, peer, tag, &transfer));
      PHX_TRY(check_options(name, g, options, &read));
      if (!read.on_gpu() || work == nullptr) return PHX_OK;
      return fail(PHX_ERR_UNSUPPORTED, name, "work must be NULL for GPU memory; wait for the stream instead");
    };
    if (work == nullptr) {
      Transfer transfer(messenger);
      PHX_TRY(fill(transfer));
      if (!read.on_gpu()) return messenger.run(transfer, read.timeout_ms);
      std::vector<GpuMessage> messages;
      PHX_TRY(add(name, transfer, &messages));
      return put(name, g, messages, read);
    }
    const auto started = std::make_shared<Transfer>(messenger);
    PHX_TRY(fill(*started));
    phx_work *handle = new phx_work{{1}, group->ptr, started};
    const phx_status status = messenger.start(started);
    if (status == PHX_OK)
      *work = handle;
    else
      phx_work_release(handle);
    return status;
  });
}

constexpr const char *kBatch = "messages";
constexpr size_t kMostOnHost = size_t{1} << 20;

phx_status read_message(const Group &group, const phx_message &message, size_t index, Transfer *out) {
  if ((message.kind != PHX_MESSAGE_SEND && message.kind != PHX_MESSAGE_RECV) || message.flags != 0)
    return fail(PHX_ERR_INVALID, kBatch,
                "message %zu has kind %d and flags %u; expected a PHX_MESSAGE_* constant and flags 0", index,
                message.kind, message.flags);
  out->sends = message.kind == PHX_MESSAGE_SEND;
  if (out->sends)
    out->in = static_cast<const char *>(message.buffer);
  else
    out->out = static_cast<char *>(message.buffer);
  return check_transfer(kBatch, group, message.count, message.dtype, message.peer_group_rank, message.tag, out);
}

// Checks that the kernel of one launch can transfer them all.
phx_status check_number(const std::vector<GpuMessage> &messages) {
  std::vector<std::pair<bool, int>> rings;
  for (const GpuMessage &message : messages) {
    const std::pair<bool, int> ring(message.sends, message.peer);
    if (std::find(rings.begin(), rings.end(), ring) == rings.end()) rings.push_back(ring);
  }
  if (messages.size() <= cuda::kMostMessages && rings.size() <= cuda::kMostRings) return PHX_OK;
  return fail(PHX_ERR_UNSUPPORTED, kBatch,
              "%zu messages with %zu ranks in one call; in GPU memory at most %u messages with %u ranks are "
              "allowed: make several calls",
              messages.size(), rings.size(), cuda::kMostMessages, cuda::kMostRings);
}

// Waits for all messages that have started, even after an error: the buffers are the caller's again when this returns.
phx_status run_all(Messenger &messenger, const std::vector<std::shared_ptr<Transfer>> &works, int64_t timeout_ms) {
  const Deadline deadline = Deadline::after_ms(timeout_ms);
  phx_status status = PHX_OK;
  size_t started = 0;
  while (started < works.size() && status == PHX_OK) {
    status = messenger.start(works[started]);
    if (status == PHX_OK) ++started;
  }
  ErrorInfo first = status == PHX_OK ? ErrorInfo() : last_error();
  for (size_t i = 0; i < started; ++i) {
    const phx_status waited = works[i]->wait(std::max<int64_t>(deadline.left_ms(), 1));
    if (waited == PHX_OK || status != PHX_OK) continue;
    status = waited;
    first = last_error();
  }
  return status == PHX_OK ? PHX_OK : set_last_error(first);
}

}  // namespace

extern "C" {

phx_status phx_send(phx_group *group, const void *in, size_t count, int32_t dtype, int32_t peer_group_rank,
                    uint32_t tag, const phx_options *options, phx_work **work) {
  return issue(true, group, in, nullptr, count, dtype, peer_group_rank, tag, options, work);
}

phx_status phx_recv(phx_group *group, void *out, size_t count, int32_t dtype, int32_t peer_group_rank, uint32_t tag,
                    const phx_options *options, phx_work **work) {
  return issue(false, group, nullptr, out, count, dtype, peer_group_rank, tag, options, work);
}

phx_status phx_messages(phx_group *group, const phx_message *messages, size_t count, const phx_options *options) {
  return with_handle(kBatch, group, [&](Group &g) -> phx_status {
    if ((messages == nullptr && count != 0) || count > kMostOnHost)
      return fail(PHX_ERR_INVALID, kBatch, "messages is NULL or count is too large; at most %zu messages are allowed",
                  kMostOnHost);
    Options read;
    PHX_TRY(check_options(kBatch, g, options, &read));
    Messenger &messenger = messenger_of(g);
    std::vector<GpuMessage> on_gpu;
    std::vector<std::shared_ptr<Transfer>> on_host;
    const char *at = reinterpret_cast<const char *>(messages);
    uint32_t stride = 0;
    if (count != 0) std::memcpy(&stride, at, sizeof stride);
    for (size_t i = 0; i < count; ++i, at += stride) {
      phx_message message = PHX_MESSAGE_INIT;
      PHX_TRY(read_in(reinterpret_cast<const phx_message *>(at), &message, kBatch));
      if (message.struct_size != stride)
        return fail(PHX_ERR_ABI, kBatch,
                    "message %zu has a different struct_size than message 0; initialize every message with "
                    "PHX_MESSAGE_INIT",
                    i);
      if (read.on_gpu()) {
        Transfer transfer(messenger);
        PHX_TRY(read_message(g, message, i, &transfer));
        PHX_TRY(add(kBatch, transfer, &on_gpu));
      } else {
        on_host.push_back(std::make_shared<Transfer>(messenger));
        PHX_TRY(read_message(g, message, i, on_host.back().get()));
      }
    }
    if (!read.on_gpu()) return run_all(messenger, on_host, read.timeout_ms);
    PHX_TRY(check_number(on_gpu));
    return put(kBatch, g, on_gpu, read);
  });
}
}
