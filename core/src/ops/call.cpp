#include "ops/call.h"

#include <limits>

#include "base/abi.h"
#include "base/hash.h"

namespace phx {

// Elements of one rank in a list. Sums of such counts, and their bytes on all ranks, are far from overflow.
constexpr size_t kMost = size_t{1} << 48;

Call::Call(Kind kind, phx_group *group, const phx_options *options, bool is_part)
    : Call(kind, group == nullptr ? nullptr : group->ptr.get(), options, is_part, false, false) {}
Call::Call(Kind kind, phx_symm *symm, const phx_options *options)
    : Call(kind, symm == nullptr ? nullptr : &symm->symm->group(), options, false, true,
           symm != nullptr && symm->symm->device() != nullptr) {}

Call::Call(Kind kind, Group *group, const phx_options *options, bool is_part, bool symmetric, bool for_kernels)
    : kind_(kind), named_(kind), group_(group), is_part_(is_part), symmetric_(symmetric), for_kernels_(for_kernels) {
  record_.operation = static_cast<uint8_t>(static_cast<uint8_t>(kind) | (symmetric ? kSymmetric : 0));
  if (group == nullptr) {
    set(fail(PHX_ERR_INVALID, name(), "the group (or symm) is NULL"));
    return;
  }
  if (__builtin_expect(group->world().forked(), 0)) {
    set(refuse_fork(name(), group->world()));
    return;
  }
  if (options != nullptr && !set(read_in(options, &options_, name())).ok()) return;
  if (__builtin_expect(options_.gpu != nullptr, 0) && !read_gpu()) return;
  if (__builtin_expect(options_.flags != 0, 0)) {
    const uint32_t known =
        (symmetric || on_gpu() ? 0 : PHX_OPTION_BUFFERED) | (kind == Kind::kAllGather ? PHX_OPTION_COMPARES_GRAPHS : 0);
    if ((options_.flags & ~known) != 0) {
      set(fail(PHX_ERR_INVALID, name(), "options.flags is %#x, and this call does not know %#x; set it to 0",
               options_.flags, options_.flags & ~known));
      return;
    }
    if ((options_.flags & PHX_OPTION_COMPARES_GRAPHS) != 0) record_.op = kComparesGraphs;
  }
  if (options_.algo < PHX_ALGO_AUTO || options_.algo > PHX_ALGO_MULTIMEM)
    set(fail(PHX_ERR_INVALID, name(), "options.algo is %d, which is not a PHX_ALGO_* constant; use PHX_ALGO_AUTO",
             options_.algo));
  else if (options_.channel >= group->channels())
    set(fail(PHX_ERR_INVALID, name(),
             "channel is %u, but group '%s' has %u channels, numbered from 0; use one of them, or raise "
             "phx_world_params.channels",
             options_.channel, group->name().c_str(), group->channels()));
  else
    set(group->resolve_timeout(name(), options_.timeout_ms, &timeout_ms_));
  record_.algo = static_cast<uint8_t>(options_.algo);
}

bool Call::read_gpu() {
  if (!set(read_in(options_.gpu, &gpu_, name())).ok()) return false;
  const int32_t type = gpu_.device.type;
  if (gpu_.flags != 0)
    set(fail(PHX_ERR_INVALID, name(), "phx_gpu_options.flags is not 0; set it to 0"));
  else if (type != 0 && type != PHX_DEVICE_CPU && type != PHX_DEVICE_CUDA)
    set(fail(PHX_ERR_INVALID, name(), "unknown device type %d; use PHX_DEVICE_CPU or PHX_DEVICE_CUDA", type));
  else if (type == PHX_DEVICE_CUDA && group_->spans_hosts())
    set(fail(PHX_ERR_UNSUPPORTED, name(), "GPU memory cannot be moved between hosts; copy it to host memory first"));
  return ok();
}

Call &Call::set(phx_status status) {
  status_ = status;
  if (status == PHX_OK || group_ == nullptr) return *this;
  (void)Failed(status).in(group_->name().c_str(), group_->self_rank());
  // Kernels compare their calls themselves, and a part of a list is refused with the whole list.
  if (!for_kernels_ && !on_gpu() && !is_part_)
    collectives_of(*group_).refuse(options_.channel < group_->channels() ? options_.channel : 0);
  return *this;
}

Call &Call::data(const void *in, size_t in_parts, void *out, size_t out_parts, size_t count, int32_t dtype) {
  if (!ok()) return *this;
  const size_t item = phx_dtype_size(dtype);
  if (item == 0) return set(fail(PHX_ERR_INVALID, name(), "unknown dtype %d; use a PHX_DTYPE_* constant", dtype));
  // Limited by the group size and not by this rank's parts, so that all ranks refuse the same calls.
  if (count > kMost && count > static_cast<size_t>(std::numeric_limits<int64_t>::max()) / item / group_size())
    return set(fail(PHX_ERR_INVALID, name(), "count is %zu for each of %d ranks, which is more than memory can hold",
                    count, group_size()));
  if (count != 0 && ((in == nullptr && in_parts != 0) || (out == nullptr && out_parts != 0)))
    return set(fail(PHX_ERR_INVALID, name(), "in or out is NULL, but count is not 0"));
  buffers_ = {static_cast<const char *>(in), static_cast<char *>(out), count, item};
  record_.dtype = static_cast<uint8_t>(dtype);
  record_.count = count;
  return *this;
}

Call &Call::overlap(size_t in_elements, size_t out_elements, size_t in_offset, bool alias_allowed) {
  if (!ok() || in_elements == 0 || out_elements == 0) return *this;
  const uintptr_t in = reinterpret_cast<uintptr_t>(buffers_.in), out = reinterpret_cast<uintptr_t>(buffers_.out);
  const bool apart = in + in_elements * buffers_.item <= out || out + out_elements * buffers_.item <= in;
  const bool alias = alias_allowed && in == out + in_offset * buffers_.item;
  if (!apart && !alias)
    return set(
        fail(PHX_ERR_INVALID, name(), "input and output overlap; give the same buffer (in place) or separate ones"));
  return *this;
}

Call &Call::reduce(int32_t op) {
  if (!ok()) return *this;
  if (std::strcmp(phx_op_name(op), "?") == 0)
    return set(fail(PHX_ERR_INVALID, name(),
                    "unknown reduce op %d; expected PHX_OP_SUM, PHX_OP_AVG, PHX_OP_PROD, PHX_OP_MIN, PHX_OP_MAX, "
                    "PHX_OP_BAND, PHX_OP_BOR, PHX_OP_BXOR or PHX_OP_PREMUL_SUM",
                    op));
  reduction_.fn = kernels::find_reduce(record_.dtype, op);
  reduction_.streaming = kernels::find_reduce(record_.dtype, op, kernels::Results::kStreamed);
  if (reduction_.fn == nullptr)
    return set(fail(PHX_ERR_UNSUPPORTED, name(),
                    "reduce op %s is not defined for dtype %s; convert the data, or use another op", phx_op_name(op),
                    phx_dtype_name(record_.dtype)));
  reduction_.dtype = record_.dtype;
  reduction_.op = op;
  record_.op = static_cast<uint8_t>(op);
  if (op == PHX_OP_PREMUL_SUM) {
    reduction_.scale = options_.scale;
    std::memcpy(&record_.aux, &options_.scale, sizeof record_.aux);
  }
  return *this;
}

Call &Call::root(int32_t group_rank) {
  if (!ok()) return *this;
  if (group_rank < 0 || group_rank >= group_size())
    return set(fail(PHX_ERR_INVALID, name(),
                    "root is %d, which is not a group rank: the group has %d ranks, numbered from 0", group_rank,
                    group_size()));
  record_.root = group_rank;
  return *this;
}

Volume Call::volume(const Extent &extent) const {
  const size_t bytes = buffers_.count * buffers_.item;
  Volume volume{extent.in_parts * bytes, extent.out_parts * bytes,
                parts_on(traits_of(kind_).in, group_size(), true) * bytes};
  if (kind_ == Kind::kBroadcast) (group_->group_rank() == root() ? volume.out : volume.in) = 0;  // one buffer is both
  return volume;
}

Call &Call::own_counts(const size_t *counts, size_t *total) {
  if (!ok()) return *this;
  if (counts == nullptr)
    return set(fail(PHX_ERR_INVALID, name(), "a list of counts is NULL; give one count for each rank of the group"));
  *total = 0;
  for (int i = 0; i < group_size(); ++i)
    if (!add(counts[i], total)) break;
  return *this;
}

bool Call::add(size_t count, size_t *total) {
  if (count > kMost) return set(fail(PHX_ERR_INVALID, name(), "a count is more than memory can hold")).ok();
  *total += count;
  return true;
}

Call &Call::counts(const size_t *counts, size_t *total) {
  if (!own_counts(counts, total).ok()) return *this;
  record_.count = *total;
  record_.aux = hash_bytes(counts, group_size() * sizeof *counts, hash_bytes(&record_.aux, sizeof record_.aux));
  return *this;
}

Call &Call::apart(const phx_block *in, size_t ins, const phx_block *out, size_t outs, bool own_alias) {
  if (!ok()) return *this;
  const size_t self = own_alias ? static_cast<size_t>(group_->group_rank()) : SIZE_MAX;
  if (blocks_overlap(in, ins, out, outs, buffers_.item, self))
    return set(fail(PHX_ERR_INVALID, name(),
                    "a block of the output overlaps another one or an input; give separate memory, or, where the "
                    "function allows it, this rank's own block"));
  return *this;
}

Call &Call::blocks(const phx_block *blocks, size_t item, BlocksFound *found) {
  if (!ok()) return *this;
  if (blocks == nullptr)
    return set(fail(PHX_ERR_INVALID, name(), "a list of blocks is NULL; give one block for each rank of the group"));
  const char *next = nullptr;  // where the next block lies, if they all lie one after another
  bool adjacent = true;
  for (int i = 0; i < group_size(); ++i) {
    const phx_block &block = blocks[i];
    if (!add(block.count, &found->total)) return *this;
    if (block.data == nullptr && block.count != 0)
      return set(fail(PHX_ERR_INVALID, name(), "the data of block %d is NULL, but its count is not 0", i));
    if (block.row == 0 ? block.stride != 0 : block.stride < block.row)
      return set(fail(PHX_ERR_INVALID, name(),
                      "block %d has row %zu and stride %zu; the stride must be at least the row, or both 0 for "
                      "contiguous elements",
                      i, block.row, block.stride));
    size_t reach = 0;  // elements from the first row to the last
    if (block.row != 0 && (__builtin_mul_overflow(block.count / block.row, block.stride, &reach) || reach > kMost))
      return set(fail(PHX_ERR_INVALID, name(), "block %d is more than memory can hold", i));
    found->even = found->even && block.count == blocks[0].count;
    if (block.count == 0) continue;
    if (next == nullptr) found->at = block.data;
    adjacent =
        adjacent && (next == nullptr || block.data == next) && (block.count <= block.row || block.row == block.stride);
    next = static_cast<const char *>(block.data) + block.count * item;
  }
  if (!adjacent) found->at = nullptr;
  return *this;
}

Call &Call::inside(const Symm &symm, size_t offset, size_t bytes) {
  if (!ok()) return *this;
  if (symm.block().on_device() && !for_kernels_)
    return set(fail(PHX_ERR_UNSUPPORTED, name(),
                    "the memory is on a device (type %d), which collectives of the host cannot read; use CPU "
                    "memory (device type 1)",
                    symm.block().device.type));
  if (offset > symm.block().size || bytes > symm.block().size - offset)
    return set(fail(PHX_ERR_INVALID, name(),
                    "%zu bytes at offset %zu end beyond the symmetric memory, which has %zu bytes", bytes, offset,
                    symm.block().size));
  if (offset % buffers_.item != 0)
    return set(fail(PHX_ERR_INVALID, name(), "offset %zu is not a multiple of the element size, %zu bytes", offset,
                    buffers_.item));
  const uint64_t facts[4] = {record_.aux, symm.ordinal(), offset, buffers_.in == buffers_.out};
  record_.aux = hash_words(facts);
  return *this;
}

Call &Call::gives_at(uint64_t place) {
  if (ok()) record_.aux = hash_bytes(&place, sizeof place, record_.aux);
  return *this;
}

Call Call::on(const char *in, char *out) const {
  Call other = *this;
  other.buffers_.in = in;
  other.buffers_.out = out;
  other.compared_ = true;
  return other;
}

Call Call::one_of(const CoalescedCall &part) const {
  Call other = on(part.buffers.in, part.buffers.out);
  other.kind_ = part.kind();
  other.buffers_ = part.buffers;
  other.reduction_ = part.reduction;
  other.record_ = part.record;
  return other;
}

Call &Call::coalesces(const std::vector<CoalescedCall> &calls) {
  if (!ok()) return *this;
  record_.count = calls.size();
  for (const CoalescedCall &call : calls) record_.aux = hash_bytes(&call.record, sizeof call.record, record_.aux);
  return *this;
}

phx_status Call::issue(OperationPtr operation, phx_work **work) {
  if (gpu_.stream != nullptr)
    return refuse(fail(PHX_ERR_INVALID, name(),
                       "a stream is given, but the memory is not on a GPU; set phx_gpu_options.device, or set stream "
                       "to NULL"));
  if (options_.algo == PHX_ALGO_MULTIMEM)
    return refuse(
        fail(PHX_ERR_UNSUPPORTED, name(), "PHX_ALGO_MULTIMEM needs symmetric memory on GPUs; use PHX_ALGO_AUTO"));
  operation->record = record_;
  if (work == nullptr) return engine().run(*operation, timeout_ms_);
  WorkRef started;
  PHX_TRY(engine().start(std::move(operation), timeout_ms_, is_buffered(), &started));
  *work = new phx_work{{1}, group_->shared_from_this(), std::move(started)};
  return PHX_OK;
}

}  // namespace phx
