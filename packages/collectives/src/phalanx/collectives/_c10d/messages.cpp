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
  const at::Tensor &tensor = only(tensors, title + 8);
  TORCH_CHECK_VALUE(tag >= 0, title + 8, ": the tag is ", tag, "; it must not be negative");
  TORCH_CHECK_VALUE(peer >= 0 || type == OpType::RECVANYSOURCE, title + 8, ": the peer is ", peer,
                    "; a rank is not negative");
  TORCH_CHECK_VALUE(peer < size_, title + 8, ": rank ", peer, " is not in the group, whose ranks are 0 to ", size_ - 1);
  if (!tensor.is_cpu() && type == OpType::RECVANYSOURCE)
    C10_THROW_ERROR(NotImplementedError,
                    "recv_anysource: a receive into memory of a GPU needs the rank of the sender; give it as src");
  const bool sends = type == OpType::SEND;
  const Recording recording = record([&] {
    return Comms{sends ? "send" : "recv", tensors, tensors, tensor.numel(), tensor.numel(), true, peer, {}, {}, true};
  });
  ++messages_;
  Buffers buffers;
  buffers.outputs = tensors;
  const void *in = sends ? readable(tensor, buffers) : nullptr;
  void *out = sends ? nullptr : writable(tensor, buffers);
  const Elements elements = elements_of(tensor);
  if (!tensor.is_cpu()) {
    const phx_message message{sizeof(phx_message),
                              sends ? PHX_MESSAGE_SEND : PHX_MESSAGE_RECV,
                              sends ? const_cast<void *>(in) : out,
                              elements.count,
                              elements.dtype,
                              peer,
                              static_cast<uint32_t>(tag),
                              0};
    auto work = c10::make_intrusive<Work>(engine_, type, title, std::move(buffers), messages_.load(),
                                          limit(c10d::kUnsetTimeout));
    return put_message(work, message, tensor.device());
  }
  const auto call = [&](auto *group, auto *options, auto **work) {
    if (sends) return core().send(group, in, elements.count, elements.dtype, peer, tag, options, work);
    return core().recv(group, out, elements.count, elements.dtype, peer, tag, options, work);
  };
  Plan plan{type, title, c10d::kUnsetTimeout, true};
  plan.message = true;
  return issue(plan, std::move(buffers), call);
}

C10dWork Backend::put_message(const WorkRef &work, const phx_message &message, const at::Device &device) {
  if (coalescing_) {
    posted_.push_back({work, message, device});
    return work;
  }
  put_on_side_stream({work}, device, stream_key_of(message),
                     [&](auto *group, auto *options, auto **) { return core().messages(group, &message, 1, options); });
  return work;
}

void Backend::send_posted() {
  const std::vector<Posted> posted = std::exchange(posted_, {});
  if (posted.empty()) return;
  std::vector<phx_message> messages;
  std::vector<WorkRef> works;
  const at::Device device = posted.front().device;
  for (const Posted &each : posted) {
    TORCH_CHECK_VALUE(each.device == device, "batch_isend_irecv: tensors on ", device, " and ", each.device,
                      " in one batch; all must be on the same device");
    messages.push_back(each.message);
    works.push_back(each.work);
  }
  put_on_side_stream(works, device, kBatchStream, [&](auto *group, auto *options, auto **) {
    return core().messages(group, messages.data(), messages.size(), options);
  });
  for (const WorkRef &work : works) coalesce(work);
}

void Backend::put_on_side_stream(const std::vector<WorkRef> &works, const at::Device &device, int stream_key,
                                 Issue call) {
  core_was_called_ = true;
  const Milliseconds timeout = limit(c10d::kUnsetTimeout);
  const char *const title = works.size() == 1 ? works[0]->title() : "phalanx:batch_isend_irecv";
  const auto group = engine_->group(timeout, title);
  const c10::DeviceGuard guard(device);
  const c10::impl::VirtualGuardImpl streams(device.type());
  const c10::Stream current = streams.getStream(device);
  const c10::Stream side = [&] {
    const std::lock_guard<std::mutex> lock(side_streams_mutex_);
    const auto key = std::make_pair(static_cast<int>(current.device_index()), stream_key);
    const auto found = side_streams_.find(key);
    return found != side_streams_.end()
               ? found->second
               : side_streams_.emplace(key, streams.getStreamFromGlobalPool(device)).first->second;
  }();
  c10::Event before(device.type());
  before.record(current);
  before.block(side);
  phx_options options = PHX_OPTIONS_INIT;
  phx_gpu_options gpu = PHX_GPU_OPTIONS_INIT;
  options.timeout_ms = timeout.count();
  gpu.stream = side.native_handle();
  gpu.device = {PHX_DEVICE_CUDA, side.device_index()};
  options.gpu = &gpu;
  const phx_status status = call(group.get(), &options, nullptr);
  if (status < 0) throw_status(status, named(title, core().last_error()));
  const c10::StreamGuard on_it(side);
  for (const WorkRef &work : works) {
    work->used_on(side);
    work->put_on(side);
  }
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
