// symm_arena, and the ops on an arena: views of its memory, and the order of its reuse.
#include "arenas.h"

namespace phxt {
namespace {

// The arena of a handle. It is found by its number, as a compiler may copy the tensor.
ArenaRef arena_of(const char *op, const Tensor &tensor) {
  const void *data = nullptr;
  int32_t dtype = 0;
  int64_t numel = 0, number = 0;
  check_torch(torch_get_const_data_ptr(tensor.get(), &data), "read a tensor's data pointer");
  check_torch(aoti_torch_get_dtype(tensor.get(), &dtype), "read a tensor's dtype");
  check_torch(aoti_torch_get_numel(tensor.get(), &numel), "read a tensor's numel");
  if (dtype != aoti_torch_dtype_int64() || numel != 1 || !on_cpu(tensor))
    raise(PHX_ERR_INVALID,
          std::string(op) + ": arena must be the int64 tensor of one number, on the CPU, that symm_arena gave");
  __builtin_memcpy(&number, data, sizeof number);
  ArenaRef arena = find_arena(number);
  if (!arena)
    raise(PHX_ERR_INVALID, std::string(op) + ": no arena has the number " + std::to_string(number) +
                               "; symm_arena did not make it, or its group was removed since");
  return arena;
}

struct Place {
  int64_t offset;
  std::vector<int64_t> sizes;
  int32_t dtype;  // torch's
};

std::vector<int64_t> contiguous_strides(const std::vector<int64_t> &sizes) {
  std::vector<int64_t> strides(sizes.size());
  int64_t stride = 1;
  for (size_t dim = sizes.size(); dim-- > 0; stride *= sizes[dim] > 1 ? sizes[dim] : 1) strides[dim] = stride;
  return strides;
}

void check_place(const Call &call, const Arena &arena, const Place &place) {
  const auto element_bytes = static_cast<int64_t>(element_type(place.dtype).bytes);
  int64_t end = element_bytes;
  bool too_large = false;
  for (const int64_t size : place.sizes) {
    if (size < 0) call.refuse("size has the negative entry " + std::to_string(size));
    too_large = too_large || __builtin_mul_overflow(end, size, &end);
  }
  if (place.offset < 0 || place.offset % element_bytes != 0)
    call.refuse("offset is " + std::to_string(place.offset) + ", but must be a multiple of the dtype's " +
                std::to_string(element_bytes) + " bytes, from 0 on");
  too_large = too_large || __builtin_add_overflow(end, place.offset, &end);
  if (too_large || static_cast<uint64_t>(end) > arena.bytes || arena.bytes == 0)
    call.refuse("the view ends " + (too_large ? "beyond all memory" : "at byte " + std::to_string(end)) +
                ", but the arena of plan '" + arena.plan + "' has " + std::to_string(arena.bytes) + " bytes");
}

void release_memory(void *, void *symm) { phx_symm_release(static_cast<phx_symm *>(symm)); }

// A tensor in this rank's block, which it keeps mapped. Its storage begins at the tensor, not at the block, as a
// compiler assumes a storage offset of 0.
Tensor make_view(const Call &call, const Arena &arena, const Place &place) {
  check_place(call, arena, place);
  char *const data = static_cast<char *>(phx_symm_buffer(arena.symm, arena.group->rank)) + place.offset;
  const std::vector<int64_t> strides = contiguous_strides(place.sizes);
  phx_symm *const held = phx_symm_retain(arena.symm);
  AtenTensorHandle made = nullptr;
  const bool on_host = arena.gpu == kHost;
  const int32_t device = on_host ? aoti_torch_device_type_cpu() : aoti_torch_device_type_cuda();
  const AOTITorchError error = torch_from_blob(data, static_cast<int64_t>(place.sizes.size()), place.sizes.data(),
                                               strides.data(), 0, place.dtype, device, on_host ? -1 : arena.gpu, &made,
                                               aoti_torch_layout_strided(), nullptr, 0, release_memory, held);
  if (error != 0) phx_symm_release(held);
  check_torch(error, "make a tensor of symmetric memory");
  return Tensor(made);
}

// Each call makes a new tensor: a compiler may reuse its memory after the last use.
Tensor make_handle(const Call &call, std::string_view plan, int64_t nbytes) {
  if (nbytes < 0) call.refuse("nbytes is " + std::to_string(nbytes) + ", but must not be negative");
  const int64_t number = arena_number(call, plan, static_cast<size_t>(nbytes));
  const int64_t one = 1;
  Tensor result = empty(&one, 1, aoti_torch_dtype_int64(), kHost);
  __builtin_memcpy(mutable_data(result), &number, sizeof number);
  return result;
}

}  // namespace

void symm_arena(StableIValue *stack, uint64_t, uint64_t) {
  const auto nbytes = static_cast<int64_t>(stack[0]), gpu = static_cast<int64_t>(stack[3]);
  const String plan(stack[1]), group_name(stack[2]);
  Call call{"symm_arena", find_group(group_name.view())};
  if (call && (gpu < kHost || gpu > INT32_MAX))
    call.refuse("gpu is " + std::to_string(gpu) + ", but must be the index of a GPU, or -1 for the host");
  if (call && gpu != kHost) place(call, static_cast<int32_t>(gpu));
  if (!call) return fallback(call, group_name, stack, nbytes, plan, group_name, gpu);  // where its ranks meet
  stack[0] = make_handle(call, plan.view(), nbytes).release();
}

void arena_view(StableIValue *stack, uint64_t, uint64_t) {
  const Tensor tensor(stack[0]);
  const IntList sizes(stack[2]);
  const Place place{static_cast<int64_t>(stack[1]), sizes.values(), static_cast<int32_t>(stack[3])};
  const auto gpu = static_cast<int64_t>(stack[4]);
  const ArenaRef arena = arena_of("arena_view", tensor);
  const Call call{"arena_view", arena->group};
  if (gpu != arena->gpu)  // the compiler took the device of the view from this argument
    call.refuse("gpu is " + std::to_string(gpu) + ", but the arena of plan '" + arena->plan + "' is on " +
                device_name(arena->gpu));
  stack[0] = make_view(call, *arena, place).release();
}

// Orders calls for compilers: readers of the arena come before it, and the next writes after it.
void arena_release_(StableIValue *stack, uint64_t, uint64_t) {
  const Tensor arena(stack[0]);
  const TensorList readers(stack[1]);
}

}  // namespace phxt
