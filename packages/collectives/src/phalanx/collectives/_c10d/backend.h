// The c10d backend "phalanx": torch's collectives on tensors of the CPU and of GPUs as calls of the core.
#pragma once

#include <c10/util/FunctionRef.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <algorithm>
#include <atomic>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
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

inline bool on_gpu(const at::Tensor &tensor) { return tensor.defined() && tensor.is_cuda(); }
template <class List>
bool on_gpu(const List &list) {
  return std::any_of(list.begin(), list.end(), [](const auto &item) { return on_gpu(item); });
}

// The work of several works, or of none: then it is complete.
C10dWork work_of(std::vector<C10dWork> works);

// The ranks of a backend, and what connects them.
struct Roster {
  int rank;                    // position of this rank
  std::vector<int64_t> ranks;  // global ranks, in order
  c10::intrusive_ptr<c10d::Store> store;
  std::shared_ptr<Engine> engine;
};

// The functions of Python that give a backend other ranks. Each is collective among these.
struct Membership {
  std::function<std::string()> handle;  // what other processes need in order to reach this one
  // The ranks whose handles these are. `ordered`: in this order.
  std::function<Roster(int64_t uuid, const std::vector<std::string> &handles, bool ordered, Milliseconds timeout)>
      reconfigure;
  // A further backend of the ranks at these positions of the group.
  std::function<c10::intrusive_ptr<c10d::Backend>(const std::vector<int64_t> &positions, Milliseconds timeout)> shrink;
};

// Collectives are issued in the order of the calls, which must be the same on all ranks. Those of several threads are
// put into one order by the core.
class Backend final : public c10d::Backend {
 public:
  Backend(Roster roster, Milliseconds timeout, Membership membership);
  ~Backend() override { engine_->close(); }

  const std::string getBackendName() const override { return "phalanx"; }
  c10::intrusive_ptr<Options> getBackendOptions() override;
  void setTimeout(Milliseconds timeout) override;
  void setSequenceNumberForGroup() override {}  // all ranks count from 0
  uint64_t getSequenceNumberForGroup() override { return sequence_.load(); }
  c10d::ErrorType getError() override;
  void abort() override;
  void shutdown() override { engine_->close(); }

  // Members come and go: no other call may be under way on this rank meanwhile.
  bool supportsShrinking() const override { return true; }
  c10::intrusive_ptr<c10d::Backend> shrink(const std::vector<int64_t> &ranks_to_exclude, int shrink_flags,
                                           const c10::intrusive_ptr<Options> &options) override;
#ifdef C10D_BACKEND_HAS_RECONFIGURE
  bool supportsReconfigure() const override { return true; }
  c10d::ReconfigureHandle get_reconfigure_handle() const override { return membership_.handle(); }
  C10dWork reconfigure(const c10d::ReconfigureOptions &opts) override;
#endif
#ifdef C10D_BACKEND_HAS_WINDOW
  bool supportsWindow() const override { return true; }
  c10::intrusive_ptr<c10d::Window> new_window(const std::optional<at::Tensor> &tensor) override;
#endif
#ifdef C10D_BACKEND_HAS_HOOKS
  void registerAbortHook(int64_t hook_id, c10d::AbortHook hook) override;
  void unregisterAbortHook(int64_t hook_id) override { abort_hooks_->remove(hook_id); }
  void addEphemeralTimeout(const Milliseconds &timeout) override;
  C10dWork gather_single(at::Tensor &output, at::Tensor &input, const c10d::GatherOptions &opts) override;
#endif

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

 private:
  friend class Window;
  // A call of torch.
  struct Plan {
    c10d::OpType type;
    const char *title;  // "phalanx:" and torch's name; static
    const char *shown;  // its name in traces: that of torch's NCCL back end; static
    Milliseconds timeout;
    bool async;
    bool message = false;
    const char *what() const { return title + 8; }
    // Whether one tensor is gathered or reduced into another one, and not several in one call.
    bool is_single() const {
      return type == c10d::OpType::_ALLGATHER_BASE || type == c10d::OpType::_REDUCE_SCATTER_BASE;
    }
  };
  // Runs the body of a call with these tensors. Raises InvalidArgument where it raises ValueError before anything is
  // sent. Arguments may be wrong on one rank and right on another, which would wait for this one; so the other ranks
  // are told, as the core does when it refuses a call itself. They are not told of messages, which belong to no call of
  // another rank by their order, nor of calls with tensors of GPUs, whose kernels compare the calls themselves.
  template <class First, class Second, class Body>
  C10dWork checked(const Plan &plan, const First &first, const Second &second, Body body) {
    const bool tell = !plan.message && !on_gpu(first) && !on_gpu(second);
    core_was_called_ = false;
    try {
      return body();
    } catch (const c10::Error &error) {
      if (!core_was_called_) refuse(error, plan, tell);
      throw;
    }
  }
  void refuse(const c10::Error &error, const Plan &plan, bool tell);
  using Issue = c10::function_ref<phx_status(phx_group *, const phx_options *, phx_work **)>;
  // Starts the call, or runs it to its end if torch waits for it anyway. On a GPU it puts the call on the current
  // stream, and returns at once. `scale`: of a PREMUL_SUM.
  C10dWork issue(const Plan &plan, Buffers &&buffers, Issue call, double scale = 1);
  static phx_status put_on(const c10::Stream &stream, phx_group *group, phx_options options, Issue call);
  using Calls = c10::SmallVector<phx_call, 1>;
  C10dWork issue_calls(const Plan &plan, Buffers &&buffers, Calls &calls, double scale = 1);
  // Reduces and scatters each input into its output or, without `reduce_op`, gathers it.
  C10dWork between_tensors(const Plan &plan, Tensors outputs, at::TensorList inputs, const c10d::ReduceOp *reduce_op);
  [[noreturn]] void fail(const Plan &plan, phx_status status);  // throws the error of the core
  void coalesce(const C10dWork &work);
  C10dWork message(c10d::OpType type, const char *title, Tensors &tensors, int peer, int tag);
  struct Posted {
    WorkRef work;
    phx_message message;
    at::Device device;
  };
  // Messages between GPUs go on side streams, so that kernels on the current stream do not wait for another rank: one
  // stream for each peer and direction, and one for batches, each of which is one call.
  void put_on_side_stream(const std::vector<Posted> &posted);
  void send_posted();  // sends the messages that were collected while coalescing
  // Shows the following call to profilers, if one runs, until the returned object ends. `rank`: the root or the peer.
  Recording record(const Plan &plan, at::TensorList inputs, at::TensorList outputs, int64_t rank = -1,
                   at::IntArrayRef in_splits = {}, at::IntArrayRef out_splits = {}) const {
    return is_recorded() ? recording(plan, inputs, outputs, rank, in_splits, out_splits) : Recording();
  }
  Recording recording(const Plan &plan, at::TensorList inputs, at::TensorList outputs, int64_t rank,
                      at::IntArrayRef in_splits, at::IntArrayRef out_splits) const;
  int root(int64_t rank, const char *what) const;
  // Raises ValueError unless a list has a tensor for each rank, of the dtype of like[0].
  void check_list(const Tensors &list, at::TensorList like, const char *what) const;
  // What a call has on each side, in its errors: "input" and "output".
  struct Sides {
    const char *list, *own;  // the list of tensors, one for each rank; the tensor of this rank
  };
  // The only list of a call, checked; null except on the root, where only that gives one.
  Tensors &list_of_all(TensorLists &lists, const at::Tensor &own, const Sides &sides, const char *what) const;
  Tensors *list_of_root(TensorLists &lists, const at::Tensor &own, const Sides &sides, int root,
                        const char *what) const;
  Milliseconds limit(Milliseconds wish) const;

  const Core &core() const { return engine_->core(); }
  void take(Roster roster);  // what the backend has of its ranks, but for their number and its own
  // The timeout of a new work, with the extensions for a while that hold for it.
  Milliseconds limit_of_work(Milliseconds wish);
  void begin(const WorkRef &work);  // extensions that have no work yet end with this one

  // Whether the last call of this thread passed the checks of its arguments. After that the core tells the other ranks.
  static inline thread_local bool core_was_called_ = false;
  std::vector<int64_t> ranks_;
  c10::intrusive_ptr<c10d::Store> store_;
  std::shared_ptr<Engine> engine_;
  const Membership membership_;
  const std::shared_ptr<AbortHooks> abort_hooks_ = std::make_shared<AbortHooks>();
  struct Extension {
    Milliseconds extra;
    std::optional<c10::weak_intrusive_ptr<Work>> until;  // the first work after it
  };
  std::mutex extensions_mutex_;
  std::list<Extension> extensions_;
  std::atomic<bool> is_extended_{false};
  std::atomic<int64_t> timeout_ms_;
  std::atomic<uint64_t> sequence_{0};  // the number that the core gave the last collective on this channel
  std::atomic<uint64_t> messages_{0};  // number of messages so far
  std::atomic<uint64_t> monitored_{0};
  std::atomic<bool> coalescing_{false};
  std::vector<C10dWork> coalesced_;
  std::vector<Posted> posted_;
  Scratch read_, written_;
  std::mutex side_streams_mutex_;
  std::map<std::pair<int, int>, c10::Stream> side_streams_;  // by GPU and stream key
};

}  // namespace phalanx
