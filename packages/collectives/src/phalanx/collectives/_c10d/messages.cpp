// Messages between two ranks, of the CPU and of GPUs.
#include "backend.h"
#include "tensors.h"

namespace phalanx {
namespace {

using c10d::OpType;

constexpr int kBatchStream = -1;  // the stream key of batches
int stream_key_of(const phx_message &message) {
  return 2 * message.peer_group_rank + (message.kind == PHX_MESSAGE_SEND ? 1 : 0);
}

}  // namespace

C10dWork Backend::message(OpType type, const char *title, Tensors &tensors, int peer, int tag) {
  const bool sends = type == OpType::SEND;
  const Plan plan{type, title, sends ? "send" : "recv", c10d::kUnsetTimeout, true, true};
  return checked(plan, tensors, tensors, [&]() -> C10dWork {
    const char *const what = plan.what();
    const at::Tensor &tensor = only(tensors, what);
    TORCH_CHECK_VALUE(tag >= 0, what, ": the tag is ", tag, "; it must not be negative");
    TORCH_CHECK_VALUE(peer >= 0 || type == OpType::RECVANYSOURCE, what, ": the peer is ", peer,
                      "; a rank is not negative");
    TORCH_CHECK_VALUE(peer < size_, what, ": rank ", peer, " is not in the group, whose ranks are 0 to ", size_ - 1);
    if (!tensor.is_cpu() && type == OpType::RECVANYSOURCE)
      C10_THROW_ERROR(NotImplementedError,
                      "recv_anysource: a receive into memory of a GPU needs the rank of the sender; give it as src");
    const Recording recording = record(plan, tensors, tensors, peer);
    ++messages_;
    Buffers buffers;
    buffers.outputs = tensors;
    void *const data = sends ? const_cast<void *>(readable(tensor, buffers)) : writable(tensor, buffers);
    const Elements elements = elements_of(tensor);
    if (!tensor.is_cpu()) {
      phx_message message = PHX_MESSAGE_INIT;
      message.kind = sends ? PHX_MESSAGE_SEND : PHX_MESSAGE_RECV;
      message.buffer = data;
      message.count = elements.count;
      message.dtype = elements.dtype;
      message.peer_group_rank = peer;
      message.tag = static_cast<uint32_t>(tag);
      auto work = c10::make_intrusive<Work>(engine_, type, title, std::move(buffers), messages_.load(),
                                            limit(c10d::kUnsetTimeout));
      const Posted posted{std::move(work), message, tensor.device()};
      if (!coalescing_)
        put_on_side_stream({posted});
      else
        posted_.push_back(posted);
      return posted.work;
    }
    const auto call = [&](auto *group, auto *options, auto **work) {
      if (sends) return core().send(group, data, elements.count, elements.dtype, peer, tag, options, work);
      return core().recv(group, data, elements.count, elements.dtype, peer, tag, options, work);
    };
    return issue(plan, std::move(buffers), call);
  });
}

void Backend::put_on_side_stream(const std::vector<Posted> &posted) {
  const Posted &first = posted.front();
  const bool is_batch = posted.size() > 1;
  const char *const title = is_batch ? "phalanx:batch_isend_irecv" : first.work->title();
  std::vector<phx_message> messages;
  for (const Posted &each : posted) {
    TORCH_CHECK_VALUE(each.device == first.device, "batch_isend_irecv: tensors on ", first.device, " and ", each.device,
                      " in one batch; all must be on the same device");
    messages.push_back(each.message);
  }
  core_was_called_ = true;
  const Milliseconds timeout = limit(c10d::kUnsetTimeout);
  const auto group = engine_->group(timeout, title);
  const c10::DeviceGuard guard(first.device);
  const c10::Stream current = current_stream(first.device);
  const c10::Stream side = [&] {
    const std::lock_guard<std::mutex> lock(side_streams_mutex_);
    const auto key = std::make_pair(static_cast<int>(current.device_index()),
                                    is_batch ? kBatchStream : stream_key_of(first.message));
    const auto found = side_streams_.find(key);
    if (found != side_streams_.end()) return found->second;
    const c10::impl::VirtualGuardImpl streams(first.device.type());
    return side_streams_.emplace(key, streams.getStreamFromGlobalPool(first.device)).first->second;
  }();
  c10::Event before(first.device.type());
  before.record(current);
  before.block(side);
  phx_options options = PHX_OPTIONS_INIT;
  options.timeout_ms = timeout.count();
  const phx_status status = put_on(side, group.get(), options, [&](auto *group, auto *options, auto **) {
    return core().messages(group, messages.data(), messages.size(), options);
  });
  if (status < 0) throw_status(status, named(title, core().last_error()));
  const c10::StreamGuard on_it(side);
  for (const Posted &each : posted) {
    each.work->used_on(side);
    each.work->put_on(side);
  }
}

void Backend::send_posted() {
  const std::vector<Posted> posted = std::exchange(posted_, {});
  if (!posted.empty()) put_on_side_stream(posted);
  for (const Posted &each : posted) coalesce(each.work);
}

C10dWork Backend::send(Tensors &tensors, int peer, int tag) {
  return message(OpType::SEND, "phalanx:send", tensors, peer, tag);
}

C10dWork Backend::recv(Tensors &tensors, int peer, int tag) {
  return message(OpType::RECV, "phalanx:recv", tensors, peer, tag);
}

C10dWork Backend::recvAnysource(Tensors &tensors, int tag) {
  return message(OpType::RECVANYSOURCE, "phalanx:recvAnySource", tensors, PHX_ANY_RANK, tag);
}

}  // namespace phalanx
