// all_gather_mms: the products of all ranks' shards with several matrices.
//
// A product that is cut into one for each rank packs its second factor again for each, and on the CPU nothing moves
// data while the core computes. There is therefore one product, without a copy of the shards: the shards of all
// ranks are mapped one after another, and the product reads them in place. Shards that are not in symmetric memory are
// copied into staging before; shards that are not made of whole pages, or on a GPU, are gathered.
#include "products.h"
#include "staging.h"

namespace phxt {
namespace {

// A shard in symmetric memory that has had a rendezvous with the group, in whole pages.
class SymmetricShard {
 public:
  SymmetricShard(const Call &call, const Operand &shard) {
    if (phx_symm_find(call.handle(), shard.data, &symm_) != PHX_OK) return;
    phx_symm_info info{};
    info.struct_size = sizeof info;
    check_core(phx_symm_get_info(symm_, &info));
    offset_ = static_cast<size_t>(static_cast<char *>(shard.data) - static_cast<char *>(info.base));
    lies_in_pages_ = offset_ % page_bytes() == 0;
  }
  SymmetricShard(const SymmetricShard &) = delete;
  SymmetricShard &operator=(const SymmetricShard &) = delete;
  ~SymmetricShard() { phx_symm_release(symm_); }
  explicit operator bool() const { return lies_in_pages_; }
  phx_symm *symm() const { return symm_; }
  size_t offset() const { return offset_; }

 private:
  phx_symm *symm_ = nullptr;
  size_t offset_ = 0;
  bool lies_in_pages_ = false;
};

// Calls `use` with the shards of all ranks as one matrix, which is valid until `use` returns.
template <class Use>
void use_shards(const Call &call, const Tensor &own, const Matrix &shard, Use use) {
  const int64_t size = call.group->size;
  if (size == 1) return use(own);
  const Operand in = read_operand(own, call.gpu);
  const auto meet = [&](phx_symm *symm, size_t offset, char *gathered) {
    check_core(phx_symm_all_gather(symm, offset, gathered, in.count(), in.type.code, nullptr, nullptr));
  };
  const auto all = [&](const Gathered &gathered) {
    return as_matrix(gathered.data(), size * shard.rows, shard.columns, shard.dtype);
  };
  if (call.gpu == kHost && in.numel != 0 && in.bytes() % page_bytes() == 0) {
    if (const SymmetricShard found(call, in); found) {
      const Gathered gathered(found.symm(), found.offset(), in.bytes());
      meet(found.symm(), found.offset(), gathered.data());
      use(all(gathered));
      return check_core(
          phx_barrier(call.handle(), nullptr, nullptr));  // all ranks have read the shard, which the caller may change
    }
    if (in.bytes() <= kMostStaged) {
      const Staging::Turn turn = call.group->staging.next(call, in.bytes());
      const Gathered gathered(turn.symm, turn.offset, in.bytes());
      __builtin_memcpy(gathered.data() + static_cast<size_t>(call.group->rank) * in.bytes(), in.data, in.bytes());
      meet(turn.symm, turn.offset, gathered.data());
      return use(all(gathered));
    }
  }
  const Block whole(call, size * shard.rows, shard, shard);
  check_core(
      phx_all_gather(call.handle(), in.data, whole.data, in.count(), in.type.code, call.options(nullptr), nullptr));
  use(whole.tensor);
}

}  // namespace

void all_gather_mms(StableIValue *stack, uint64_t, uint64_t) {
  const Tensor own(stack[0]);
  const TensorList bs(stack[1]);
  const auto group_size = static_cast<int64_t>(stack[2]);
  const String group_name(stack[3]);
  const Request request{route("all_gather_mms", own, group_name), std::string(group_name.view())};
  const Call &call = request.call;
  const Matrix shard = request.matrix("shard", own);
  std::vector<Matrix> factors;
  for (size_t i = 0; i < bs.size(); ++i) {
    factors.push_back(request.matrix("b", bs[i]));
    request.check_factors(shard, factors.back());
  }
  request.check_size(group_size);
  std::vector<Tensor> results;
  if (!call) {
    Tensor shared = own.share();
    fallback(Call{"all_gather_into_tensor", {}}, group_name, stack, shared, group_size, group_name);
    const Tensor whole(stack[0]);
    for (size_t i = 0; i < bs.size(); ++i) results.push_back(product(whole, bs[i]));
    stack[0] = TensorList(std::move(results)).release();
    return;
  }
  use_shards(call, own, shard, [&](const Tensor &whole) {
    for (size_t i = 0; i < bs.size(); ++i) {
      Block result(call, group_size * shard.rows, factors[i], shard);
      multiply(whole, bs[i], result.tensor);
      results.push_back(std::move(result.tensor));
    }
  });
  stack[0] = TensorList(std::move(results)).release();
}

}  // namespace phxt
