// A caller's own store and a view with a prefix: what reaches the one below, and what comes back.
#include <cstddef>

#include "store_fixtures.h"

namespace {

using namespace fixtures;

phx_status failing_remove(void *, const char *) { return PHX_ERR_DEVICE; }

TEST(a_callback_that_fails_is_reported_with_operation_key_and_status) {
  OwnStore own;
  phx_store_ops ops = OwnStore::ops();
  ops.set = [](void *, const char *, const void *, size_t) -> phx_status { return PHX_ERR_PERMISSION; };
  ops.get = [](void *, const char *, void *, size_t, size_t *, int64_t) -> phx_status { return PHX_ERR_PEER_DEAD; };
  ops.add = [](void *, const char *, int64_t, int64_t *) -> phx_status { return PHX_IN_PROGRESS; };
  ops.wait = [](void *, const char *const *, size_t, int64_t) -> phx_status { return PHX_ERR_TIMEOUT; };
  ops.remove = failing_remove;
  Store store;
  CHECK_OK(phx_store_wrap(&ops, &own, store.out()));
  size_t size = 0;
  int64_t result = 9;
  const char *keys[] = {"w1", "w2"};
  CHECK_FAILS(PHX_ERR_PERMISSION, "store_set of key 'k1': the caller's store failed with PHX_ERR_PERMISSION",
              phx_store_set(store, "k1", "v", 1));
  CHECK_FAILS(PHX_ERR_PEER_DEAD, "store_get of key 'k2': the caller's store failed with PHX_ERR_PEER_DEAD",
              phx_store_get(store, "k2", nullptr, 0, &size, kLongMs));
  CHECK_FAILS(PHX_ERR_INVALID, "store_add of key 'k3': the caller's store returned 1",
              phx_store_add(store, "k3", 1, &result));
  CHECK(result == 9);
  CHECK_FAILS(PHX_ERR_TIMEOUT, "'w1' is the first", phx_store_wait(store, keys, 2, kShortMs));
  CHECK_FAILS(PHX_ERR_DEVICE, "store_remove of key 'k4'", phx_store_remove(store, "k4"));
  phx_error_info info{};
  info.struct_size = sizeof info;
  CHECK_OK(phx_last_error_info(&info));
  CHECK(std::string(info.operation) == "store_remove");
}

TEST(destroy_is_called_once_with_the_last_reference) {
  OwnStore own;
  const phx_store_ops ops = OwnStore::ops();
  Store store, prefix;
  CHECK_OK(phx_store_wrap(&ops, &own, store.out()));
  CHECK_OK(phx_store_prefix(store, "p/", prefix.out()));
  phx_store_retain(store);
  phx_store_release(store);
  CHECK(own.destroyed == 0);
  store.reset();
  set(prefix, "key", "value");  // the view keeps its base
  CHECK(own.destroyed == 0);
  prefix.reset();
  CHECK(own.destroyed == 1);
}

TEST(a_table_without_the_optional_functions_works_without_them) {
  OwnStore own;
  phx_store_ops ops = OwnStore::ops();
  ops.remove = nullptr;
  ops.destroy = nullptr;
  Store store;
  CHECK_OK(phx_store_wrap(&ops, &own, store.out()));
  set(store, "key", "value");
  const char *keys[] = {"key", "key"};
  CHECK_OK(phx_store_wait(store, keys, 2, kLongMs));  // by get
  CHECK_FAILS(PHX_ERR_UNSUPPORTED, "store_remove: the caller's store has no remove", phx_store_remove(store, "key"));
}

TEST(the_wait_of_the_caller_is_used_when_there_is_one) {
  OwnStore own;
  phx_store_ops ops = OwnStore::ops();
  ops.wait = [](void *, const char *const *keys, size_t count, int64_t timeout_ms) -> phx_status {
    return count == 2 && std::string(keys[1]) == "b" && timeout_ms == 1234 ? PHX_OK : PHX_ERR_INTERNAL;
  };
  Store store;
  CHECK_OK(phx_store_wrap(&ops, &own, store.out()));
  const char *keys[] = {"a", "b"};
  CHECK_OK(phx_store_wait(store, keys, 2, 1234));
  CHECK(own.gets == 0);
}

TEST(a_long_value_costs_one_more_get) {
  OwnStore own;
  const phx_store_ops ops = OwnStore::ops();
  Store store;
  CHECK_OK(phx_store_wrap(&ops, &own, store.out()));
  const std::string value(100000, 'y');
  set(store, "key", value);
  std::string read(value.size(), '\0');
  size_t size = 0;
  CHECK_OK(phx_store_get(store, "key", &read[0], read.size(), &size, kLongMs));
  CHECK(size == value.size() && read == value && own.gets == 2);
}

TEST(a_value_of_absurd_length_is_refused) {
  OwnStore own;
  phx_store_ops ops = OwnStore::ops();
  ops.get = [](void *, const char *, void *, size_t, size_t *size, int64_t) -> phx_status {
    *size = SIZE_MAX;
    return PHX_OK;
  };
  Store store;
  CHECK_OK(phx_store_wrap(&ops, &own, store.out()));
  size_t size = 0;
  CHECK_FAILS(PHX_ERR_INVALID, "at most", phx_store_get(store, "key", nullptr, 0, &size, kLongMs));
}

TEST(a_table_is_judged_by_its_struct_size_and_functions) {
  OwnStore own;
  phx_store *out = nullptr;
  phx_store_ops ops = OwnStore::ops();
  CHECK_FAILS(PHX_ERR_INVALID, "out-parameter", phx_store_wrap(&ops, &own, nullptr));
  CHECK_FAILS(PHX_ERR_INVALID, "table of functions is NULL", phx_store_wrap(nullptr, &own, &out));
  ops.struct_size = 0;
  CHECK_FAILS(PHX_ERR_ABI, "struct_size is 0", phx_store_wrap(&ops, &own, &out));
  ops = OwnStore::ops();
  ops.flags = 4;
  CHECK_FAILS(PHX_ERR_INVALID, "flags is 4", phx_store_wrap(&ops, &own, &out));
  ops = OwnStore::ops();
  ops.add = nullptr;
  CHECK_FAILS(PHX_ERR_INVALID, "'add' is NULL", phx_store_wrap(&ops, &own, &out));
  CHECK(out == nullptr && own.destroyed == 0);
  // A shorter table of an older caller: what lies beyond it is not read.
  ops = OwnStore::ops();
  ops.struct_size = offsetof(phx_store_ops, remove);
  ops.remove = failing_remove;
  Store store;
  CHECK_OK(phx_store_wrap(&ops, &own, store.out()));
  CHECK_FAILS(PHX_ERR_UNSUPPORTED, "no remove function", phx_store_remove(store, "key"));
}

TEST(a_prefix_store_is_a_view_of_the_keys_that_start_so) {
  Store base = memory_store(), view, inner;
  CHECK_OK(phx_store_prefix(base, "a/", view.out()));
  CHECK_OK(phx_store_prefix(view, "b/", inner.out()));
  set(inner, "key", "value");
  CHECK(get(base, "a/b/key") == "value" && get(view, "b/key") == "value");
  set(base, "key", "other");
  CHECK_FAILS(PHX_ERR_NOT_FOUND, "a/key", phx_store_remove(view, "key"));
  CHECK(add(view, "n", 3) == 3);
  CHECK(get(base, "a/n") == "3");
  const char *keys[] = {"n", "b/key"};
  CHECK_OK(phx_store_wait(view, keys, 2, kLongMs));
}

TEST(a_prefix_that_makes_keys_too_long_is_reported) {
  Store base = memory_store(), view;
  phx_store *out = nullptr;
  CHECK_FAILS(PHX_ERR_INVALID, "store_prefix: the store is NULL", phx_store_prefix(nullptr, "p", &out));
  CHECK_FAILS(PHX_ERR_INVALID, "store_prefix: the prefix is NULL", phx_store_prefix(base, nullptr, &out));
  CHECK_FAILS(PHX_ERR_INVALID, "store_prefix: the out-parameter", phx_store_prefix(base, "p", nullptr));
  CHECK_OK(phx_store_prefix(base, std::string(1000, 'p').c_str(), view.out()));
  CHECK_OK(phx_store_set(view, std::string(24, 'k').c_str(), "", 0));
  CHECK_FAILS(PHX_ERR_INVALID, "store_set: the key", phx_store_set(view, std::string(25, 'k').c_str(), "", 0));
  const std::string long_key(25, 'k');
  const char *keys[] = {long_key.c_str()};
  CHECK_FAILS(PHX_ERR_INVALID, "store_wait: the key", phx_store_wait(view, keys, 1, kShortMs));
}

}  // namespace

int main(int argc, char **argv) { return check::run_all(argc, argv); }
