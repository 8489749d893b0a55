// A view of a store whose waits end when a rank that is needed has gone: phx_store_guard.
#include <algorithm>
#include <vector>

#include "base/guard.h"
#include "group/group.h"
#include "store/store.h"

namespace phx {
namespace {

class GuardedStore final : public phx_store {
 public:
  GuardedStore(phx_store *base, std::shared_ptr<Group> group, std::vector<int32_t> ranks)
      : base_(base), group_(std::move(group)), ranks_(std::move(ranks)) {}

  phx_status set(const char *key, const void *value, size_t size) override { return base_->set(key, value, size); }
  phx_status get(const char *key, std::string *value, int64_t timeout_ms) override {
    return wait_for("store_get", timeout_ms, [&](int64_t ms) { return base_->get(key, value, ms); });
  }
  phx_status wait(const char *const *keys, size_t count, int64_t timeout_ms) override {
    return wait_for("store_wait", timeout_ms, [&](int64_t ms) { return base_->wait(keys, count, ms); });
  }
  phx_status add(const char *key, int64_t delta, int64_t *result) override { return base_->add(key, delta, result); }
  phx_status remove(const char *key) override { return base_->remove(key); }

 private:
  template <class Try>
  phx_status wait_for(const char *operation, int64_t timeout_ms, Try attempt) {
    const Deadline deadline = Deadline::after_ms(timeout_ms);
    for (;;) {
      const phx_status status = attempt(std::max<int64_t>(std::min(kLookMs, deadline.left_ms()), 1));
      if (status != PHX_ERR_TIMEOUT) return status;
      const phx_error_info late = last_error();
      for (const int32_t rank : ranks_)
        if (group_->look_at_peer(operation, rank) != PHX_OK) return last_error().status;
      if (deadline.passed()) return set_last_error(late);
    }
  }

  const StoreRef base_;
  const std::shared_ptr<Group> group_;
  const std::vector<int32_t> ranks_;
};

}  // namespace
}  // namespace phx

extern "C" phx_status phx_store_guard(phx_store *base, phx_group *group, const int32_t *group_ranks, int32_t count,
                                      phx_store **out) {
  const char *operation = "store_guard";
  return phx::guarded(operation, [&]() -> phx_status {
    if (base == nullptr || group == nullptr || out == nullptr || (group_ranks == nullptr && count != 0) || count < 0)
      return phx::fail(PHX_ERR_INVALID, operation, "%s: base, group, group_ranks or out is NULL, or count is negative",
                       operation);
    for (int32_t i = 0; i < count; ++i)
      if (group_ranks[i] < 0 || group_ranks[i] >= group->ptr->size())
        return phx::fail(PHX_ERR_INVALID, operation, "%s: group_ranks[%d] is %d in a group of %d", operation, i,
                         group_ranks[i], group->ptr->size());
    *out = new phx::GuardedStore(base, group->ptr, std::vector<int32_t>(group_ranks, group_ranks + count));
    return PHX_OK;
  });
}
