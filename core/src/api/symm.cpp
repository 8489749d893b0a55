// phx_symm_* but for its collectives, which are with the others.
#include "symm/symm.h"
#include "base/error.h"
#include "base/guard.h"
#include "gpu/gpu_group.h"
#include "group/group.h"
#include "ops/recognised.h"
#include "phalanx/cuda.h"
#include "phalanx/tuning.h"
#include "symm/table.h"

using phx::fail;
using phx::guarded;

namespace {

phx_status find_block(const char *operation, phx_group *group, const void *pointer, phx::BlockRef *out) {
  if (group == nullptr) return fail(PHX_ERR_INVALID, operation, "%s: group is NULL", operation);
  *out = group->ptr->world().blocks().find(pointer);
  if (!*out || !(*out)->live())
    return fail(
        PHX_ERR_NOT_FOUND, operation,
        "%s: %p is not symmetric memory of this world. Allocate it with phx_mem_alloc (phalanx.symm_mem.empty).",
        operation, pointer);
  if ((*out)->imported)
    return fail(PHX_ERR_INVALID, operation,
                "%s: %p is another rank's memory, mapped by a fabric handle; offer a block of this rank's own",
                operation, pointer);
  return PHX_OK;
}

// A rendezvous whose arguments are wrong on this rank: the thread's error says how.
phx_status refuse(phx::Group &group) {
  phx::amend_last_error(nullptr, group.name().c_str(), group.self_rank(), -1);
  return phx::symms_of(group).refuse_rendezvous();
}

bool valid_rank(const char *operation, phx_symm *symm, int32_t group_rank) {
  if (phx::is_inherited(symm)) {
    phx::refuse_fork(operation, world_of(*symm));
    return false;
  }
  if (symm != nullptr && group_rank >= 0 && group_rank < symm->symm->size()) return true;
  if (symm == nullptr)
    fail(PHX_ERR_INVALID, operation, "%s: symm is NULL", operation);
  else
    fail(PHX_ERR_INVALID, operation, "%s: group_rank is %d in a group of %d", operation, group_rank,
         symm->symm->size());
  return false;
}

enum class Kernel { put_signal, wait_signal, barrier };

phx_status enqueue(const char *operation, Kernel kernel, phx_symm *symm, int32_t group_rank, uint32_t channel,
                   int64_t timeout_ms, void *stream) {
  return guarded(operation, symm, [&]() -> phx_status {
    if (symm == nullptr) return fail(PHX_ERR_INVALID, operation, "%s: symm is NULL", operation);
    phx::Symm &s = *symm->symm;
    phx_status status = s.check(operation, group_rank, channel);
    if (status != PHX_OK) return status;
    if (phx::side_of(s) == nullptr)
      return fail(PHX_ERR_UNSUPPORTED, operation, "%s: the block is not in memory of a GPU, from phalanx's allocator",
                  operation);
    int64_t timeout = 0;
    status = s.group().resolve_timeout(operation, timeout_ms, &timeout);
    if (status != PHX_OK) return status;
    phx::cuda::Launch launch{};
    launch.root = group_rank;
    launch.channel = kernel == Kernel::barrier ? phx::side_of(s)->barrier_channel(channel) : channel;
    constexpr const char *kNames[] = {"phx_gpu_put_signal", "phx_gpu_wait_signal", "phx_gpu_barrier"};
    return phx::launch(s, operation, kNames[static_cast<int>(kernel)], launch, nullptr, timeout, 0, nullptr, stream);
  });
}

}  // namespace

extern "C" {

phx_status phx_symm_rendezvous(phx_group *group, void *pointer, int64_t timeout_ms, phx_symm **out) {
  const char *operation = "symm_rendezvous";
  return guarded(operation, group, [&]() -> phx_status {
    if (group == nullptr) return fail(PHX_ERR_INVALID, operation, "%s: group is NULL", operation);
    phx::Group &g = *group->ptr;
    phx::BlockRef block;
    int64_t timeout = 0;
    phx_status status = PHX_OK;
    if (out == nullptr) status = fail(PHX_ERR_INVALID, operation, "%s: out is NULL", operation);
    if (status == PHX_OK) status = find_block(operation, group, pointer, &block);
    if (status == PHX_OK) status = g.resolve_timeout(operation, timeout_ms, &timeout);
    if (status != PHX_OK) return refuse(g);
    if (g.failed()) return g.raise_revoked(operation);
    const phx::Deadline deadline = phx::Deadline::after_ms(timeout);
    phx::LazyDeadline until(deadline, &g.world().progress());
    phx::Turn turn(phx::symms_of(g).mutex(), std::defer_lock);
    if (!phx::take_turn(turn, until))
      return g.raise_turn(operation, "group with a rendezvous. Let one thread make them", timeout, true);
    std::shared_ptr<phx::Symm> symm = phx::symms_of(g).find(block->serial);
    if (!symm) {
      status = phx::Symm::rendezvous(g, block, deadline, &symm);
      if (status != PHX_OK) return status;
      phx::symms_of(g).keep(block->serial, symm);
    }
    *out = symm->handle();
    return PHX_OK;
  });
}

phx_status phx_symm_alloc(phx_group *group, const phx_device *device, size_t size, int64_t timeout_ms, phx_symm **out) {
  const char *operation = "symm_alloc";
  return guarded(operation, group, [&]() -> phx_status {
    if (group == nullptr) return fail(PHX_ERR_INVALID, operation, "%s: group is NULL", operation);
    phx_world world{group->ptr->world_ref()};
    phx_status status = phx::check_world(operation, &world);
    if (status != PHX_OK) return status;
    if (out == nullptr) {
      fail(PHX_ERR_INVALID, operation, "%s: out is NULL", operation);
      return refuse(*group->ptr);
    }
    void *pointer = nullptr;
    status = phx_mem_alloc(&world, device, size, &pointer);
    if (status == PHX_ERR_INVALID || status == PHX_ERR_UNSUPPORTED) return refuse(*group->ptr);
    if (status != PHX_OK) return group->ptr->fail_with(phx::last_error(), true);  // the others are on their way here
    status = phx_symm_rendezvous(group, pointer, timeout_ms, out);
    // With the table's reference gone, only the handle keeps the block.
    const phx_status freed = phx_mem_free(&world, pointer);
    return status != PHX_OK ? status : freed;
  });
}

phx_status phx_symm_find(phx_group *group, const void *pointer, phx_symm **out) {
  const char *operation = "symm_find";
  return guarded(operation, group, [&]() -> phx_status {
    if (out == nullptr) return fail(PHX_ERR_INVALID, operation, "%s: out is NULL", operation);
    phx::BlockRef block;
    const phx_status status = find_block(operation, group, pointer, &block);
    if (status != PHX_OK) return status;
    const std::shared_ptr<phx::Symm> symm = phx::symms_of(*group->ptr).find(block->serial);
    if (!symm)
      return fail(PHX_ERR_NOT_FOUND, operation, "%s: this memory has had no rendezvous on group '%s'", operation,
                  group->ptr->name().c_str());
    *out = symm->handle();
    return PHX_OK;
  });
}

int32_t phx_symm_covers(phx_group *group, const void *pointer, size_t size) {
  if (group == nullptr || phx::is_inherited(group)) return 0;
  const phx::Group &g = *group->ptr;
  return (pointer == nullptr ? phx::may_find_input(g, size) : phx::find_input(g, pointer, size) != nullptr) ? 1 : 0;
}

phx_status phx_symm_map_gathered(phx_symm *symm, size_t offset, size_t bytes, void **out) {
  const char *operation = "symm_map_gathered";
  return guarded(operation, symm, [&]() -> phx_status {
    if (symm == nullptr || out == nullptr)
      return fail(PHX_ERR_INVALID, operation, "%s: symm or out is NULL", operation);
    phx::Symm &s = *symm->symm;
    const size_t page = phx::page_bytes(), mapped = phx::round_up(s.block().size, page);
    if (s.block().on_device())
      return fail(PHX_ERR_UNSUPPORTED, operation, "%s: the blocks are not in memory of the host", operation);
    if (bytes == 0 || offset % page != 0 || bytes % page != 0)
      return fail(PHX_ERR_INVALID, operation,
                  "%s: %zu bytes at offset %zu are no whole pages; both must be multiples of %zu, and not 0 bytes",
                  operation, bytes, offset, page);
    if (bytes > mapped || offset > mapped - bytes)
      return fail(PHX_ERR_INVALID, operation, "%s: %zu bytes at offset %zu end outside of the block, which has %zu",
                  operation, bytes, offset, s.block().size);
    return s.gathered().map(operation, s.buffers(), static_cast<size_t>(s.size()), offset, bytes, out);
  });
}

phx_status phx_symm_unmap_gathered(phx_symm *symm, void *pointer) {
  const char *operation = "symm_unmap_gathered";
  return guarded(operation, symm, [&]() -> phx_status {
    if (symm == nullptr) return fail(PHX_ERR_INVALID, operation, "%s: symm is NULL", operation);
    return symm->symm->gathered().unmap(operation, pointer);
  });
}

phx_status phx_symm_get_info(phx_symm *symm, phx_symm_info *out) {
  const char *operation = "symm_get_info";
  if (symm == nullptr) return fail(PHX_ERR_INVALID, operation, "%s: symm is NULL", operation);
  if (phx::is_inherited(symm)) return phx::refuse_fork(operation, world_of(*symm));
  const phx::Symm &s = *symm->symm;
  phx_symm_info info = PHX_SYMM_INFO_INIT;
  info.group_rank = s.group_rank();
  info.group_size = s.size();
  info.signal_channels = s.channels();
  info.base = s.block().base;
  info.size = s.block().size;
  info.pad_stride = phx::side_of(s) != nullptr ? phx::side_of(s)->team().pad_stride : s.pad_stride();
  info.signal_pad_bytes = size_t{info.pad_stride} * s.size() * sizeof(uint32_t);
  info.device = s.block().device;
  info.group = s.group().name().c_str();
  return phx::copy_out(info, out, operation);
}

void *phx_symm_buffer(phx_symm *symm, int32_t group_rank) {
  return valid_rank("symm_buffer", symm, group_rank) ? symm->symm->buffer(group_rank) : nullptr;
}

uint32_t *phx_symm_signal_pad(phx_symm *symm, int32_t group_rank) {
  if (!valid_rank("symm_signal_pad", symm, group_rank)) return nullptr;
  const phx::Symm &s = *symm->symm;
  return phx::side_of(s) != nullptr ? phx::side_of(s)->pad(group_rank) : s.pad(group_rank);
}

phx_status phx_symm_put_signal(phx_symm *symm, int32_t group_rank, uint32_t channel) {
  return guarded("symm_put_signal", symm, [&]() -> phx_status {
    if (symm == nullptr) return fail(PHX_ERR_INVALID, "symm_put_signal", "symm_put_signal: symm is NULL");
    return symm->symm->put_signal(group_rank, channel);
  });
}

phx_status phx_symm_wait_signal(phx_symm *symm, int32_t group_rank, uint32_t channel, int64_t timeout_ms) {
  const char *operation = "symm_wait_signal";
  return guarded(operation, symm, [&]() -> phx_status {
    if (symm == nullptr) return fail(PHX_ERR_INVALID, operation, "%s: symm is NULL", operation);
    int64_t timeout = 0;
    const phx_status status = symm->symm->group().resolve_timeout(operation, timeout_ms, &timeout);
    return status != PHX_OK ? status : symm->symm->wait_signal(group_rank, channel, timeout);
  });
}

phx_status phx_symm_barrier(phx_symm *symm, uint32_t channel, int64_t timeout_ms) {
  const char *operation = "symm_barrier";
  return guarded(operation, symm, [&]() -> phx_status {
    if (symm == nullptr) return fail(PHX_ERR_INVALID, operation, "%s: symm is NULL", operation);
    int64_t timeout = 0;
    const phx_status status = symm->symm->group().resolve_timeout(operation, timeout_ms, &timeout);
    return status != PHX_OK ? status : symm->symm->barrier(channel, timeout);
  });
}

phx_status phx_symm_enqueue_put_signal(phx_symm *symm, int32_t group_rank, uint32_t channel, void *stream) {
  return enqueue("symm_enqueue_put_signal", Kernel::put_signal, symm, group_rank, channel, 0, stream);
}

phx_status phx_symm_enqueue_wait_signal(phx_symm *symm, int32_t group_rank, uint32_t channel, int64_t timeout_ms,
                                        void *stream) {
  return enqueue("symm_enqueue_wait_signal", Kernel::wait_signal, symm, group_rank, channel, timeout_ms, stream);
}

phx_status phx_symm_enqueue_barrier(phx_symm *symm, uint32_t channel, int64_t timeout_ms, void *stream) {
  return enqueue("symm_enqueue_barrier", Kernel::barrier, symm, 0, channel, timeout_ms, stream);
}

phx_status phx_symm_get_team(phx_symm *symm, phx_team *out) {
  const char *operation = "symm_get_team";
  if (symm == nullptr) return fail(PHX_ERR_INVALID, operation, "%s: symm is NULL", operation);
  if (phx::is_inherited(symm)) return phx::refuse_fork(operation, world_of(*symm));
  const phx::Symm &s = *symm->symm;
  if (phx::side_of(s) != nullptr) return phx::copy_out(phx::side_of(s)->team(), out, operation);
  phx_team team = PHX_TEAM_INIT;
  team.group_rank = s.group_rank();
  team.group_size = s.size();
  team.channels = s.channels();
  team.pad_stride = s.pad_stride();
  team.buffers = s.buffers();
  team.pads = reinterpret_cast<uint32_t *const *>(s.pads());
  team.bytes = s.block().size;
  team.failed = s.group().failed_words();
  return phx::copy_out(team, out, operation);
}

phx_symm *phx_symm_retain(phx_symm *symm) {
  return symm == nullptr || phx::is_inherited(symm) ? symm : symm->symm->handle();
}

void phx_symm_release(phx_symm *symm) {
  if (symm != nullptr && !phx::is_inherited(symm)) symm->symm->drop_handle();
}
}
