// phx_send and phx_recv: every argument is checked here, before anything is sent.
#include <cstdint>
#include <limits>

#include "base/error.h"
#include "base/guard.h"
#include "base/read_in.h"
#include "group/group.h"
#include "messages/messenger.h"

using phx::fail;
using phx::guarded;

namespace {

phx_status check_buffer(const char *name, const void *buffer, size_t count, int32_t dtype, phx::Transfer *out) {
  const size_t item = phx_dtype_size(dtype);
  if (item == 0) return fail(PHX_ERR_INVALID, name, "%s: %d is no dtype", name, dtype);
  if (count > static_cast<size_t>(std::numeric_limits<int64_t>::max()) / item)
    return fail(PHX_ERR_INVALID, name, "%s: %zu elements are more than memory can hold", name, count);
  if (count != 0 && buffer == nullptr) return fail(PHX_ERR_INVALID, name, "%s: the buffer is NULL", name);
  out->bytes = count * item;
  out->head.dtype = dtype;
  out->head.count = count;
  return PHX_OK;
}

phx_status check_peer(const char *name, const phx::Group &group, int32_t peer, phx::Transfer *out) {
  if (peer == PHX_ANY_RANK && !out->sends) return PHX_OK;
  if (peer >= 0 && peer < group.size()) return PHX_OK;
  if (peer == PHX_ANY_RANK)
    return fail(PHX_ERR_INVALID, name, "%s: PHX_ANY_RANK is for receives; a send names the rank it goes to", name);
  return fail(PHX_ERR_INVALID, name, "%s: the peer is group rank %d in a group of %d", name, peer, group.size());
}

phx_status check_options(const char *name, const phx::Group &group, const phx_options *options, int64_t *timeout_ms) {
  phx_options known{};
  if (options != nullptr) {
    const phx_status status = phx::read_in(options, &known, name);
    if (status != PHX_OK) return status;
  }
  if (known.flags != 0) return fail(PHX_ERR_INVALID, name, "%s: flags must be 0", name);
  if (known.stream != nullptr || (known.device.type != 0 && known.device.type != PHX_DEV_CPU))
    return fail(PHX_ERR_UNSUPPORTED, name,
                "%s: messages are between memory of hosts; on GPUs put the data into symmetric memory and a signal on "
                "the stream (phx_symm_enqueue_put_signal), or use all_to_all_v",
                name);
  return group.world().resolve_timeout(name, known.timeout_ms, timeout_ms);
}

// `transfer` has its direction and its buffer.
phx_status check(const char *name, phx_group *group, size_t count, int32_t dtype, int32_t peer, uint32_t tag,
                 const phx_options *options, phx::Transfer *transfer, int64_t *timeout_ms) {
  const phx::Group &g = *group->ptr;
  transfer->peer = peer;
  transfer->head.tag = tag;
  const void *buffer = transfer->sends ? transfer->in : transfer->out;
  phx_status status = check_buffer(name, buffer, count, dtype, transfer);
  if (status == PHX_OK) status = check_peer(name, g, peer, transfer);
  if (status == PHX_OK) status = check_options(name, g, options, timeout_ms);
  if (status != PHX_OK) phx::amend_last_error(nullptr, g.name().c_str(), g.self_rank(), -1);
  return status;
}

phx_status issue(bool sends, phx_group *group, const void *in, void *out, size_t count, int32_t dtype, int32_t peer,
                 uint32_t tag, const phx_options *options, phx_work **work) {
  const char *name = sends ? "send" : "recv";
  return guarded(name, [&]() -> phx_status {
    if (group == nullptr) return fail(PHX_ERR_INVALID, name, "%s: the group is NULL", name);
    phx::Messenger &messenger = group->ptr->messenger();
    const auto fill = [&](phx::Transfer &transfer, int64_t *timeout_ms) {
      transfer.sends = sends;
      transfer.in = static_cast<const char *>(in);
      transfer.out = static_cast<char *>(out);
      return check(name, group, count, dtype, peer, tag, options, &transfer, timeout_ms);
    };
    int64_t timeout_ms = 0;
    if (work == nullptr) {
      phx::Transfer transfer;
      const phx_status status = fill(transfer, &timeout_ms);
      return status != PHX_OK ? status : messenger.run(transfer, timeout_ms);
    }
    const auto started = std::make_shared<phx::MessageWork>(&messenger);
    phx_status status = fill(started->transfer(), &timeout_ms);
    if (status != PHX_OK) return status;
    phx_work *handle = phx::make_work_handle(group->ptr, started);
    started->transfer().work = started;
    status = messenger.start(started->transfer());
    if (status == PHX_OK)
      *work = handle;
    else
      phx_work_release(handle);
    return status;
  });
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
}
