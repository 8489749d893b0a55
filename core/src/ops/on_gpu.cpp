#include "ops/on_gpu.h"

#include <algorithm>

#include "base/error.h"
#include "gpu/gpu_group.h"
#include "gpu/workspace.h"
#include "ops/collectives.h"
#include "ops/enqueue.h"
#include "phalanx/cuda.h"
#include "phalanx/tuning.h"
#include "symm/table.h"

namespace phx {
namespace {

// What all_to_all_v, whose sizes no rank knows all, moves between two barriers, in slots.
constexpr size_t kRaggedSlots = 64;
constexpr size_t kRaggedRankBytes = 4096;  // at least, of each rank: 16 bytes for each block of a grid, twice

// A call on its way to a stream. Until `meet` nothing has been sent; what fails later leaves ranks out of step.
class OnGpu {
 public:
  OnGpu(Call &call, phx_work **work)
      : call_(call), group_(call.group()), turn_(gpu_of(group_).workspaces().mutex(), std::defer_lock) {
    LazyDeadline until(call.timeout_ms(), &group_.world().progress());
    if (!take_turn(turn_, until))
      status_ = group_.raise_turn(call.name(), "group with a call on memory of a GPU. Make them from one thread",
                                  call.timeout_ms(), true);
    else if (work != nullptr)
      status_ = fail(PHX_ERR_UNSUPPORTED, call.name(),
                     "%s: on memory of a GPU the stream is what is waited for; set work to NULL", call.name());
    else
      status_ = gpu_of(group_).workspaces().open(call.name(), call.gpu().device.index, &workspace_);
  }
  OnGpu(const OnGpu &) = delete;
  OnGpu &operator=(const OnGpu &) = delete;

  void reach(const Buffers &buffers, const Volume &volume) {
    if (ok() && volume.in != 0 && !workspace_->reaches(buffers.in)) status_ = unreachable("in");
    if (ok() && volume.out != 0 && !workspace_->reaches(buffers.out)) status_ = unreachable("out");
  }
  void meet(size_t bytes) {
    if (!ok()) return;
    status_ = gpu_of(group_).workspaces().prepare(call_.name(), *workspace_, call_.record(), bytes, call_.timeout_ms(),
                                                  stream());
    begun_ = ok();
    if (ok()) keep(workspace_->begin(call_.name(), stream()));
  }
  // `one`: what is called, or one of several calls.
  void put(const Call &one, const Volume &volume, int root) {
    if (!ok()) return;
    const Buffers &buffers = one.buffers();
    char *const space = workspace_->base();
    const size_t bytes = volume.in;
    const bool reduces_all = one.kind() == Kind::kAllReduce;
    if (reduces_all && fits_lines(one, workspace_->symm())) {
      Call call = one.on(buffers.in, buffers.out);
      keep(enqueue(call, workspace_->symm(), 0, root, nullptr));
      return;
    }
    const int32_t algo = one.options().algo;
    // Each rank sums its part, which it writes to all, in place in the workspace; the copy out of it costs less than to
    // read the inputs of all.
    const bool large = bytes >= gpu_of(group_).tuning().two_shot_bytes && algo != PHX_ALGO_ONE_SHOT;
    const bool two_steps = reduces_all && (large || algo == PHX_ALGO_MULTIMEM);
    // One that is overwritten while others read it has to be copied.
    const bool stays = !reduces_all || two_steps || buffers.in != buffers.out;
    cuda::Inputs inputs{};
    bring(one, bytes, stays, &inputs);
    if (!ok()) return;
    Call call = one.on(space, two_steps ? space : buffers.out);
    call.finds(&inputs);
    keep(enqueue(call, workspace_->symm(), 0, root, nullptr));
    if (two_steps && ok()) keep(workspace_->copy(one.name(), buffers.out, space, bytes, stream()));
  }
  void put_v(const Volume &volume, const size_t *in_counts, const size_t *out_counts) {
    if (!ok()) return;
    const Buffers &buffers = call_.buffers();
    char *const space = workspace_->base();
    const bool copies = call_.kind() != Kind::kAllToAllV;  // whose kernel does it
    cuda::Inputs inputs{};
    if (copies) bring(call_, volume.in, true, &inputs);
    if (!ok()) return;
    Call call = call_.on(copies ? space : buffers.in, buffers.out);
    call.finds(&inputs);
    keep(enqueue_v(call, workspace_->symm(), 0, in_counts, out_counts, nullptr));
  }
  void put_barrier() {
    if (!ok()) return;
    keep(launch(workspace_->symm(), call_.name(), "phx_gpu_barrier", {}, nullptr, call_.timeout_ms(), 0, nullptr,
                stream()));
  }
  phx_status end() {
    if (ok()) {
      keep(workspace_->end(call_.name(), stream()));
    } else if (begun_) {  // what was put on the stream before the failure is waited for as well
      const KeptError first;
      workspace_->end(call_.name(), stream());
    }
    if (!ok()) call_.refuse(status_);
    return status_;
  }

 private:
  bool ok() const { return status_ == PHX_OK; }
  // Makes an input readable for all: where it lies, if that is in symmetric memory and it stays as it is, else in the
  // workspace. Ranks need not come to the same.
  void bring(const Call &one, size_t bytes, bool stays, cuda::Inputs *inputs) {
    const char *const in = one.buffers().in;
    if (one.options().algo == PHX_ALGO_AUTO) {  // alike on all ranks
      inputs->apart = 1;
      gpu_of(group_).workspaces().list(inputs);
      const std::shared_ptr<Symm> there = bytes != 0 && stays ? find(in, bytes) : nullptr;
      if (there) {
        const auto offset = static_cast<uint64_t>(in - static_cast<const char *>(there->block().base));
        inputs->own = {1 + there->ordinal(), offset};
        collectives_of(group_).engine(0).count_zero_copies(1);
        return;
      }
    }
    keep(workspace_->copy(one.name(), workspace_->base(), in, bytes, stream()));
  }
  // Symmetric memory of this group in which an input lies.
  std::shared_ptr<Symm> find(const char *in, size_t bytes) const {
    const BlockRef block = group_.world().blocks().find(in);
    std::shared_ptr<Symm> symm = block ? symms_of(group_).find(block->serial) : nullptr;
    if (!symm || gpu_symm_of(*symm) == nullptr || !symm->is_everywhere() || !gpu_of(group_).workspaces().knows(*symm))
      return nullptr;
    return bytes <= block->size - static_cast<size_t>(in - static_cast<const char *>(block->base)) ? symm : nullptr;
  }
  void *stream() const { return call_.gpu().stream; }
  phx_status unreachable(const char *which) const {
    return fail(PHX_ERR_INVALID, call_.name(), "%s: %s is no memory that the GPU can reach (phx_gpu_options.device)",
                call_.name(), which);
  }
  // The others' kernels are going to wait for what failed here.
  void keep(phx_status status) {
    const bool alike = status == PHX_OK || status == PHX_ERR_UNSUPPORTED;  // on all ranks
    status_ = alike || group_.failed() ? status : group_.fail_with(last_error(), true);
  }

  Call &call_;
  Group &group_;
  Turn turn_;
  Workspace *workspace_ = nullptr;
  bool begun_ = false;
  phx_status status_ = PHX_OK;
};

}  // namespace

Volume volume_of(Kind kind, const Extent &extent, size_t group_size, bool is_root, size_t bytes) {
  Volume volume{extent.in_parts * bytes, extent.out_parts * bytes,
                parts_on(traits_of(kind).in, group_size, true) * bytes};
  if (kind == Kind::kBroadcast) (is_root ? volume.out : volume.in) = 0;  // one buffer is both
  return volume;
}

phx_status put_on_gpu(Call &call, const Volume &volume, int root, phx_work **work) {
  OnGpu way(call, work);
  way.reach(call.buffers(), volume);
  way.meet(volume.largest);
  way.put(call, volume, root);
  return way.end();
}

phx_status put_on_gpu_v(Call &call, const Volume &volume, const size_t *in_counts, const size_t *out_counts,
                        phx_work **work) {
  OnGpu way(call, work);
  way.reach(call.buffers(), volume);
  const size_t slots = std::max(kRaggedSlots * call.group().world().slot_bytes(), kRaggedRankBytes * call.group_size());
  way.meet(call.kind() == Kind::kAllToAllV ? slots : volume.largest);
  way.put_v(volume, in_counts, out_counts);
  return way.end();
}

phx_status put_on_gpu(Call &all, const std::vector<CoalescedCall> &calls, const std::vector<Volume> &volumes,
                      phx_work **work) {
  OnGpu way(all, work);
  size_t largest = 0;
  for (size_t i = 0; i < calls.size(); ++i) {
    way.reach(calls[i].buffers, volumes[i]);
    largest = std::max(largest, volumes[i].largest);
  }
  way.meet(largest);
  // The workspace is free again when a kernel ends: all ranks have met in it for the second time.
  for (size_t i = 0; i < calls.size(); ++i) way.put(all.one_of(calls[i]), volumes[i], calls[i].root);
  return way.end();
}

phx_status put_barrier_on_gpu(Call &call, phx_work **work) {
  OnGpu way(call, work);
  way.meet(0);
  way.put_barrier();
  return way.end();
}

}  // namespace phx
