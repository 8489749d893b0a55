// The c10d backend "phalanx": torch's collectives on tensors of the CPU and of GPUs as calls of the core.
#pragma once

#include <c10/util/FunctionRef.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "engine.h"
#include "record.h"
#include "tensors.h"

namespace phalanx {

using Tensors = std::vector<at::Tensor>;
using TensorLists = std::vector<Tensors>;
using C10dWork = c10::intrusive_ptr<c10d::Work>;

// Collectives are issued in the order of the calls, which must be the same on all ranks. Those of several threads are
// put into one order by the core.
class Backend : public c10d::Backend {
 public:
  // `ranks`: the global ranks of the group, in order.
  Backend(int rank, std::vector<int64_t> ranks, c10::intrusive_ptr<c10d::Store> store, Milliseconds timeout,
          std::shared_ptr<Engine> engine);
  ~Backend() override;

  const std::string getBackendName() const override { return "phalanx"; }
  c10::intrusive_ptr<Options> getBackendOptions() override;
  void setTimeout(Milliseconds timeout) override;
  void setSequenceNumberForGroup() override {}  // all ranks count from 0
  uint64_t getSequenceNumberForGroup() override;
  c10d::ErrorType getError() override;
  void abort() override;
  void shutdown() override;

  bool supportsCoalescing() const override { return true; }
  void startCoalescing() override;
  C10dWork endCoalescing() override;

  C10dWork allreduce(Tensors &tensors, const c10d::AllreduceOptions &opts) override;
  C10dWork allreduce_coalesced(Tensors &tensors, const c10d::AllreduceCoalescedOptions &opts) override;
  C10dWork allreduce_sparse(Tensors &tensors, const c10d::AllreduceOptions &opts) override;
  C10dWork broadcast(Tensors &tensors, const c10d::BroadcastOptions &opts) override;
  C10dWork reduce(Tensors &tensors, const c10d::ReduceOptions &opts) override;
  C10dWork allgather(TensorLists &outputs, Tensors &inputs, const c10d::AllgatherOptions &opts) override;
  C10dWork _allgather_base(at::Tensor &output, at::Tensor &input, const c10d::AllgatherOptions &opts) override;
  C10dWork allgather_coalesced(TensorLists &outputs, Tensors &inputs, const c10d::AllgatherOptions &opts) override;
  C10dWork allgather_into_tensor_coalesced(Tensors &outputs, Tensors &inputs,
                                           const c10d::AllgatherOptions &opts) override;
  C10dWork gather(TensorLists &outputs, Tensors &inputs, const c10d::GatherOptions &opts) override;
  C10dWork scatter(Tensors &outputs, TensorLists &inputs, const c10d::ScatterOptions &opts) override;
  C10dWork reduce_scatter(Tensors &outputs, TensorLists &inputs, const c10d::ReduceScatterOptions &opts) override;
  C10dWork _reduce_scatter_base(at::Tensor &output, at::Tensor &input, const c10d::ReduceScatterOptions &opts) override;
  C10dWork reduce_scatter_tensor_coalesced(Tensors &outputs, Tensors &inputs,
                                           const c10d::ReduceScatterOptions &opts) override;
  C10dWork alltoall_base(at::Tensor &output, at::Tensor &input, std::vector<int64_t> &output_splits,
                         std::vector<int64_t> &input_splits, const c10d::AllToAllOptions &opts) override;
  C10dWork alltoall(Tensors &outputs, Tensors &inputs, const c10d::AllToAllOptions &opts) override;
  C10dWork barrier(const c10d::BarrierOptions &opts) override;
  void monitoredBarrier(const c10d::BarrierOptions &opts, bool wait_all_ranks) override;

  C10dWork send(Tensors &tensors, int peer, int tag) override;
  C10dWork recv(Tensors &tensors, int peer, int tag) override;
  C10dWork recvAnysource(Tensors &tensors, int tag) override;

 protected:
  // Whether the last call of this thread passed the checks of its arguments. After that the core tells the other ranks.
  static inline thread_local bool core_was_called_ = false;
  Engine &engine() { return *engine_; }
  Milliseconds limit(Milliseconds wish) const;

 private:
  struct Plan {
    c10d::OpType type;
    const char *title;  // "phalanx:" and torch's name; static
    Milliseconds timeout;
    bool async;
    double scale = 1;
    bool message = false;
  };
  using Issue = c10::function_ref<phx_status(phx_group *, const phx_options *, phx_work **)>;
  // Starts the call, or runs it to its end if torch waits for it anyway.
  C10dWork issue(const Plan &plan, Buffers buffers, Issue call);
  // Puts the call on the current stream of that GPU, and returns at once.
  C10dWork put_on_stream(const Plan &plan, Buffers buffers, const at::Device &device, Issue call);
  [[noreturn]] void fail(const Plan &plan, phx_status status);  // throws the error of the core
  void coalesce(const C10dWork &work);
  C10dWork issue_coalesced(const Plan &plan, Buffers buffers, std::vector<phx_call> calls);
  C10dWork message(c10d::OpType type, const char *title, Tensors &tensors, int peer, int tag);
  // Messages between GPUs go on side streams, so that kernels on the current stream do not wait for another rank: one
  // stream for each peer and direction, and one for batches.
  C10dWork put_message(const WorkRef &work, const phx_message &message, const at::Device &device);
  void send_posted();  // sends the messages that were collected while coalescing, as one call
  void put_on_side_stream(const std::vector<WorkRef> &works, const at::Device &device, int stream_key, Issue call);
  // Shows the following call to profilers, until the returned object ends. `describe` makes its Comms, if one runs.
  template <class Describe>
  Recording record(Describe describe) const {
    if (!is_recorded()) return {};
    Comms comms = describe();
    const uint64_t sequence = (comms.message ? messages_ : sequence_).load() + 1;
    return Recording(members(), std::move(comms), sequence);
  }
  Members members() const;
  int root(int64_t rank, const char *what) const;
  void check_list(size_t count, const char *what) const;

  const Core &core() const { return engine_->core(); }

  const std::vector<int64_t> ranks_;
  const c10::intrusive_ptr<c10d::Store> store_;
  const std::shared_ptr<Engine> engine_;
  std::atomic<int64_t> timeout_ms_;
  std::atomic<uint64_t> sequence_{0};  // the number that the core gave the last collective on this channel
  std::atomic<uint64_t> messages_{0};  // number of messages so far
  std::atomic<uint64_t> monitored_{0};
  std::atomic<bool> coalescing_{false};
  std::vector<C10dWork> coalesced_;
  struct Posted {
    WorkRef work;
    phx_message message;
    at::Device device;
  };
  std::vector<Posted> posted_;
  Scratch read_, written_;
  std::mutex side_streams_mutex_;
  std::map<std::pair<int, int>, c10::Stream> side_streams_;  // by GPU and stream key
};

}  // namespace phalanx
