#include "gpu/gpu_group.h"
#include "ops/enqueue.h"
#include "symm/table.h"

namespace phx {
namespace {

// How much all_to_all_v moves between two barriers, in times of slot_bytes: no rank knows all of its sizes.
constexpr size_t kRaggedSlots = 64;
constexpr size_t kRaggedRankBytes = 4096;  // the least for each rank: twice 16 bytes for each block of a grid

// Puts a call on a stream. Nothing is sent before `prepare`; an error after it leaves the ranks out of step.
class OnGpu {
 public:
  OnGpu(Call &call, phx_work **work)
      : call_(call), group_(call.group()), turn_(gpu_of(group_).workspaces().mutex(), std::defer_lock) {
    LazyDeadline until(call.timeout_ms(), &group_.world().progress());
    if (!take_turn(turn_, until))
      status_ = group_.raise_turn(call.name(), "group with a call on memory of a GPU. Make them from one thread",
                                  call.timeout_ms(), true);
    else if (work != nullptr)
      status_ = fail(PHX_ERR_UNSUPPORTED, call.name(), "work must be NULL for GPU memory; wait for the stream instead");
    else
      status_ = gpu_of(group_).workspaces().open(call.name(), call.gpu().device.index, &workspace_);
  }

  void reach(const Buffers &buffers, const Volume &volume) {
    if (ok() && volume.in != 0 && !workspace_->reaches(buffers.in)) status_ = unreachable("in");
    if (ok() && volume.out != 0 && !workspace_->reaches(buffers.out)) status_ = unreachable("out");
  }
  void prepare(size_t bytes) {
    if (!ok()) return;
    status_ = gpu_of(group_).workspaces().prepare(call_.name(), *workspace_, call_.record(), bytes, call_.timeout_ms(),
                                                  stream());
    begun_ = ok();
    if (ok()) keep(workspace_->begin(call_.name(), stream()));
  }
  // `part`: the call itself, or one call of its list.
  void put(const Call &part, const Volume &volume) {
    if (!ok()) return;
    const Buffers &buffers = part.buffers();
    char *const space = workspace_->base();
    const size_t bytes = volume.in;
    const Kind kind = part.kind();
    const bool reduces_all = kind == Kind::kAllReduce, by_lines = reduces_all && fits_lines(part, workspace_->symm());
    const int32_t algo = part.options().algo;
    // In two steps, each rank reduces its part in place in the workspace and writes it to all ranks. The copy from the
    // workspace costs less than reading the inputs of all ranks.
    const bool large = bytes >= gpu_of(group_).tuning().two_shot_bytes && algo != PHX_ALGO_ONE_SHOT;
    const bool two_steps = reduces_all && !by_lines && (large || algo == PHX_ALGO_MULTIMEM);
    // An input that is overwritten while others read it must be copied.
    const bool stays = !reduces_all || two_steps || buffers.in != buffers.out;
    // The kernels of the LL protocol and of all_to_all_v copy the input themselves, and a barrier has none.
    const bool copies = !by_lines && kind != Kind::kAllToAllV && kind != Kind::kBarrier;
    cuda::Inputs inputs{};
    if (copies) make_readable(part, bytes, stays, &inputs);
    if (!ok()) return;
    Call call = part.on(copies ? space : buffers.in, two_steps ? space : buffers.out);
    keep(enqueue(call, workspace_->symm(), 0, &inputs, nullptr));
    if (two_steps && ok()) keep(workspace_->copy(part.name(), buffers.out, space, bytes, stream()));
  }
  phx_status end() {
    if (ok()) {
      keep(workspace_->end(call_.name(), stream()));
    } else if (begun_) {  // later calls must also wait for what was put on the stream before the failure
      const KeptError first;
      workspace_->end(call_.name(), stream());
    }
    if (!ok()) call_.refuse(status_);
    return status_;
  }

 private:
  bool ok() const { return status_ == PHX_OK; }
  // Makes an input readable by all ranks: where it lies, if that is symmetric memory and the input stays unchanged, and
  // else by a copy in the workspace. Ranks may decide differently.
  void make_readable(const Call &part, size_t bytes, bool stays, cuda::Inputs *inputs) {
    const char *const in = part.buffers().in;
    if (part.options().algo == PHX_ALGO_AUTO) {  // the same on all ranks
      inputs->apart = 1;
      gpu_of(group_).workspaces().list(inputs);
      const std::shared_ptr<Symm> symm = bytes != 0 && stays ? find(in, bytes) : nullptr;
      if (symm) {
        const auto offset = static_cast<uint64_t>(in - static_cast<const char *>(symm->block().base));
        inputs->own = {1 + symm->ordinal(), offset};
        collectives_of(group_).engine(0).count_zero_copies(1);
        return;
      }
    }
    keep(workspace_->copy(part.name(), workspace_->base(), in, bytes, stream()));
  }
  // The symmetric memory of this group in which an input lies; NULL if there is none that all ranks' kernels can read.
  std::shared_ptr<Symm> find(const char *in, size_t bytes) const {
    const BlockRef block = group_.world().blocks().find(in);
    std::shared_ptr<Symm> symm = block ? symms_of(group_).find(block->serial) : nullptr;
    if (!symm || gpu_symm_of(*symm) == nullptr || !symm->is_everywhere() || !gpu_of(group_).workspaces().knows(*symm))
      return nullptr;
    return bytes <= block->size - static_cast<size_t>(in - static_cast<const char *>(block->base)) ? symm : nullptr;
  }
  void *stream() const { return call_.gpu().stream; }
  phx_status unreachable(const char *which) const {
    return fail(PHX_ERR_INVALID, call_.name(),
                "%s is not memory that the GPU of phx_gpu_options.device can reach; allocate it on that GPU, or "
                "name the GPU on which it is",
                which);
  }
  // Keeps the status. An error that only this rank has fails the group, because the others' kernels would wait for it.
  void keep(phx_status status) {
    const bool same_on_all = status == PHX_OK || status == PHX_ERR_UNSUPPORTED;
    status_ = same_on_all || group_.failed() ? status : group_.fail_with(last_error(), true);
  }

  Call &call_;
  Group &group_;
  Turn turn_;
  Workspace *workspace_ = nullptr;
  bool begun_ = false;
  phx_status status_ = PHX_OK;
};

// How many bytes of the workspace a call uses, the same on all ranks.
size_t space_for(const Call &call, const Volume &volume) {
  const int n = call.group_size();
  if (call.kind() == Kind::kAllGatherV) return output_blocks(call.buffers(), n).largest() * call.buffers().item;
  if (call.kind() != Kind::kAllToAllV) return volume.largest;
  return std::max(kRaggedSlots * call.group().world().slot_bytes(), kRaggedRankBytes * n);
}

}  // namespace

phx_status put_on_gpu(Call &call, const Volume &volume, phx_work **work) {
  OnGpu on_gpu(call, work);
  on_gpu.reach(call.buffers(), volume);
  on_gpu.prepare(space_for(call, volume));
  on_gpu.put(call, volume);
  return on_gpu.end();
}

phx_status put_on_gpu(Call &all, const std::vector<CoalescedCall> &calls, phx_work **work) {
  OnGpu on_gpu(all, work);
  size_t largest = 0;
  for (const CoalescedCall &call : calls) {
    on_gpu.reach(call.buffers, call.volume);
    largest = std::max(largest, call.volume.largest);
  }
  on_gpu.prepare(largest);
  // A kernel ends after its second barrier with all ranks, so the workspace is free for the next call.
  for (const CoalescedCall &call : calls) on_gpu.put(all.one_of(call), call.volume);
  return on_gpu.end();
}

}  // namespace phx
