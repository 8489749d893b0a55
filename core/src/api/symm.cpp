// Implements phx_symm_* without the collectives, which are in symm_collectives.cpp.
#include <string_view>

#include "api/entry.h"
#include "gpu/gpu_group.h"
#include "ops/call.h"
#include "symm/table.h"

using namespace phx;

namespace {

phx_status find_block(const char *operation, const Group &group, const void *pointer, BlockRef *out) {
  *out = group.world().blocks().find(pointer);
  if (!*out || !(*out)->live())
    return fail(PHX_ERR_NOT_FOUND, operation,
                "%p is not symmetric memory of this world. Allocate it with phx_mem_alloc (phalanx.symm_mem.empty).",
                pointer);
  if ((*out)->imported)
    return fail(PHX_ERR_INVALID, operation,
                "%p is another rank's memory, mapped by a fabric handle; offer a block of this rank's own", pointer);
  return PHX_OK;
}

bool has_rank(const char *operation, const phx_symm *symm, int32_t group_rank) {
  return check_handle(operation, symm) == PHX_OK && symm->symm->check(operation, group_rank, 0) == PHX_OK;
}

phx_status enqueue(const char *operation, std::string_view kernel, phx_symm *symm, int32_t group_rank, uint32_t channel,
                   int64_t timeout_ms, void *stream) {
  return with_timeout(operation, symm, timeout_ms, [&](Symm &s, int64_t timeout) -> phx_status {
    PHX_TRY(s.check(operation, group_rank, channel));
    if (gpu_symm_of(s) == nullptr)
      return fail(PHX_ERR_UNSUPPORTED, operation,
                  "the memory is not on a GPU, or not from Phalanx's allocator; allocate it with phx_mem_alloc on "
                  "a CUDA device");
    cuda::Launch launch{};
    launch.root = group_rank;
    launch.channel = kernel == "phx_gpu_barrier" ? gpu_symm_of(s)->barrier_channel(channel) : channel;
    return phx::launch(s, operation, kernel.data(), launch, nullptr, timeout, 0, nullptr, stream);
  });
}

}  // namespace

extern "C" {

phx_status phx_symm_rendezvous(phx_group *group, void *pointer, int64_t timeout_ms, phx_symm **out) {
  return with_handle("symm_rendezvous", group, [&](Group &g, const char *operation) -> phx_status {
    if (g.spans_hosts())  // the same on every rank
      return g.raise(PHX_ERR_UNSUPPORTED, operation,
                     "its ranks are on %d hosts, and only ranks of one host share memory. Make a group of the ranks of "
                     "one host, such as by phx_group_split.",
                     g.hosts().count());
    BlockRef block;
    int64_t timeout = 0;
    phx_status status = PHX_OK;
    if (out == nullptr) status = fail(PHX_ERR_INVALID, operation, "out is NULL");
    if (status == PHX_OK) status = find_block(operation, g, pointer, &block);
    if (status == PHX_OK) status = g.resolve_timeout(operation, timeout_ms, &timeout);
    if (status != PHX_OK) return symms_of(g).refuse_rendezvous();
    if (g.failed()) return g.raise_revoked(operation);
    const Deadline deadline = Deadline::after_ms(timeout);
    Turn turn;
    PHX_TRY(g.take_turn(operation, symms_of(g).mutex(), deadline, kSameRendezvous, true, &turn));
    std::shared_ptr<Symm> symm = symms_of(g).find(block->serial);
    if (!symm) {
      PHX_TRY(Symm::rendezvous(g, block, deadline, &symm));
      symms_of(g).keep(block->serial, symm);
    }
    *out = symm->handle();
    return PHX_OK;
  });
}

phx_status phx_symm_alloc(phx_group *group, const phx_device *device, size_t size, int64_t timeout_ms, phx_symm **out) {
  return with_live_handle("symm_alloc", group, [&](Group &g, const char *operation) -> phx_status {
    phx_status status = PHX_OK;
    phx_world world{g.world().shared_from_this()};
    void *pointer = nullptr;
    if (out == nullptr) status = fail(PHX_ERR_INVALID, operation, "out is NULL");
    if (status == PHX_OK) status = phx_mem_alloc(&world, device, size, &pointer);
    if (status == PHX_ERR_INVALID || status == PHX_ERR_UNSUPPORTED) return symms_of(g).refuse_rendezvous();
    if (status != PHX_OK) return g.fail_with(last_error(), true);  // the others wait for this rank, or will
    status = phx_symm_rendezvous(group, pointer, timeout_ms, out);
    // Drops the reference of the world's table, so that only the handle keeps the block.
    const phx_status freed = phx_mem_free(&world, pointer);
    return status != PHX_OK ? status : freed;
  });
}

phx_status phx_symm_find(phx_group *group, const void *pointer, phx_symm **out) {
  return with_handle("symm_find", group, [&](Group &g, const char *operation) -> phx_status {
    if (out == nullptr) return fail(PHX_ERR_INVALID, operation, "out is NULL");
    BlockRef block;
    PHX_TRY(find_block(operation, g, pointer, &block));
    const std::shared_ptr<Symm> symm = symms_of(g).find(block->serial);
    if (!symm)
      return fail(PHX_ERR_NOT_FOUND, operation,
                  "this memory has no rendezvous on group '%s'; call phx_symm_rendezvous on all its ranks first",
                  g.name().c_str());
    *out = symm->handle();
    return PHX_OK;
  });
}

int32_t phx_symm_covers(phx_group *group, const void *pointer, size_t size) {
  if (check_handle("symm_covers", group) != PHX_OK) return 0;
  const Group &g = *group->ptr;
  return (pointer == nullptr ? may_find_input(g, size) : find_input(g, pointer, size) != nullptr) ? 1 : 0;
}

phx_status phx_symm_map_gathered(phx_symm *symm, size_t offset, size_t bytes, void **out) {
  return with_handle("symm_map_gathered", symm, [&](Symm &s, const char *operation) -> phx_status {
    if (out == nullptr) return fail(PHX_ERR_INVALID, operation, "out is NULL");
    const size_t page = page_bytes(), mapped = round_up(s.block().size, page);
    if (s.block().on_device())
      return fail(PHX_ERR_UNSUPPORTED, operation,
                  "the memory is on a device; only host memory can be mapped in this way");
    if (bytes == 0 || offset % page != 0 || bytes % page != 0)
      return fail(PHX_ERR_INVALID, operation,
                  "size %zu and offset %zu must be multiples of the page size, %zu, and size must not be 0", bytes,
                  offset, page);
    if (bytes > mapped || offset > mapped - bytes)
      return fail(PHX_ERR_INVALID, operation, "%zu bytes at offset %zu end beyond the allocation, which has %zu bytes",
                  bytes, offset, s.block().size);
    return s.gathered().map(operation, s.buffers(), static_cast<size_t>(s.size()), offset, bytes, out);
  });
}

phx_status phx_symm_unmap_gathered(phx_symm *symm, void *pointer) {
  return with_handle("symm_unmap_gathered", symm,
                     [&](Symm &s, const char *operation) { return s.gathered().unmap(operation, pointer); });
}

phx_status phx_symm_get_info(phx_symm *symm, phx_symm_info *out) {
  return with_handle("symm_get_info", symm, [&](Symm &s, const char *operation) {
    phx_symm_info info = PHX_SYMM_INFO_INIT;
    info.group_rank = s.group_rank();
    info.group_size = s.size();
    info.signal_channels = s.channels();
    info.base = s.block().base;
    info.size = s.block().size;
    info.pad_stride = gpu_symm_of(s) != nullptr ? gpu_symm_of(s)->team().pad_stride : s.pad_stride();
    info.signal_pad_bytes = size_t{info.pad_stride} * s.size() * sizeof(uint32_t);
    info.device = s.block().device;
    info.group = s.group().name().c_str();
    return copy_out(info, out, operation);
  });
}

void *phx_symm_buffer(phx_symm *symm, int32_t group_rank) {
  return has_rank("symm_buffer", symm, group_rank) ? symm->symm->buffer(group_rank) : nullptr;
}

uint32_t *phx_symm_signal_pad(phx_symm *symm, int32_t group_rank) {
  if (!has_rank("symm_signal_pad", symm, group_rank)) return nullptr;
  const Symm &s = *symm->symm;
  return gpu_symm_of(s) != nullptr ? gpu_symm_of(s)->pad(group_rank) : s.pad(group_rank);
}

phx_status phx_symm_put_signal(phx_symm *symm, int32_t group_rank, uint32_t channel) {
  return with_handle("symm_put_signal", symm, [&](Symm &s) { return s.put_signal(group_rank, channel); });
}

phx_status phx_symm_wait_signal(phx_symm *symm, int32_t group_rank, uint32_t channel, int64_t timeout_ms) {
  return with_timeout("symm_wait_signal", symm, timeout_ms,
                      [&](Symm &s, int64_t timeout) { return s.wait_signal(group_rank, channel, timeout); });
}

phx_status phx_symm_barrier(phx_symm *symm, uint32_t channel, int64_t timeout_ms) {
  return with_timeout("symm_barrier", symm, timeout_ms,
                      [&](Symm &s, int64_t timeout) { return s.barrier(channel, timeout); });
}

phx_status phx_symm_enqueue_put_signal(phx_symm *symm, int32_t group_rank, uint32_t channel, void *stream) {
  return enqueue("symm_enqueue_put_signal", "phx_gpu_put_signal", symm, group_rank, channel, 0, stream);
}

phx_status phx_symm_enqueue_wait_signal(phx_symm *symm, int32_t group_rank, uint32_t channel, int64_t timeout_ms,
                                        void *stream) {
  return enqueue("symm_enqueue_wait_signal", "phx_gpu_wait_signal", symm, group_rank, channel, timeout_ms, stream);
}

phx_status phx_symm_enqueue_barrier(phx_symm *symm, uint32_t channel, int64_t timeout_ms, void *stream) {
  return enqueue("symm_enqueue_barrier", "phx_gpu_barrier", symm, 0, channel, timeout_ms, stream);
}

phx_status phx_symm_get_team(phx_symm *symm, phx_team *out) {
  return with_handle("symm_get_team", symm, [&](Symm &s, const char *operation) -> phx_status {
    if (gpu_symm_of(s) != nullptr) return copy_out(gpu_symm_of(s)->team(), out, operation);
    phx_team team = PHX_TEAM_INIT;
    team.group_rank = s.group_rank();
    team.group_size = s.size();
    team.channels = s.channels();
    team.pad_stride = s.pad_stride();
    team.buffers = s.buffers();
    team.pads = reinterpret_cast<uint32_t *const *>(s.pads());
    team.bytes = s.block().size;
    team.failed = s.group().failed_words();
    return copy_out(team, out, operation);
  });
}

phx_symm *phx_symm_retain(phx_symm *symm) {
  return symm == nullptr || is_inherited(symm) ? symm : symm->symm->handle();
}

void phx_symm_release(phx_symm *symm) {
  if (symm != nullptr && !is_inherited(symm)) symm->symm->drop_handle();
}
}
