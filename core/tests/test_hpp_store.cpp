// phalanx.hpp: stores.
#include <map>
#include <mutex>

#include "hpp.h"
#include "ranks.h"

using phalanx::Milliseconds;
using phalanx::Store;

namespace {

void exercise(const Store &store) {
  store.set("a", "1");
  CHECK(store.get("a") == "1");
  const std::string large(1000, 'x');
  store.set("large", large);
  CHECK(store.get("large") == large);
  CHECK(store.add("n", 5) == 5 && store.add("n", -2) == 3);
  store.wait({"a", "n"}, Milliseconds(1000));
  CHECK(hpp::says(hpp::thrown([&] { store.get("none", Milliseconds(20)); }), PHX_ERR_TIMEOUT, "none"));
  store.remove("a");
  CHECK(hpp::thrown([&] { store.remove("a"); }).status() == PHX_ERR_NOT_FOUND);
  const Store view = store.prefix("under/");
  view.set("b", "2");
  CHECK(store.get("under/b") == "2");
  const Store shared = store.share();
  CHECK(shared.get("under/b") == "2");
}

struct Map final : phalanx::StoreBackend {
  explicit Map(int *ended) : ended_(ended) {}
  ~Map() override { ++*ended_; }
  phx_status set(std::string_view key, std::string_view value) override {
    values_[std::string(key)] = value;
    return PHX_OK;
  }
  phx_status get(std::string_view key, Milliseconds, std::string *value) override {
    const auto found = values_.find(std::string(key));
    if (found == values_.end()) return PHX_ERR_TIMEOUT;
    *value = found->second;
    return PHX_OK;
  }
  phx_status add(std::string_view key, int64_t delta, int64_t *result) override {
    std::string &value = values_[std::string(key)];
    *result = (value.empty() ? 0 : std::stoll(value)) + delta;
    value = std::to_string(*result);
    return PHX_OK;
  }
  phx_status remove(std::string_view key) override {
    return values_.erase(std::string(key)) == 1 ? PHX_OK : PHX_ERR_NOT_FOUND;
  }

  int *ended_;
  std::map<std::string, std::string> values_;
};

struct Broken final : phalanx::StoreBackend {
  phx_status set(std::string_view, std::string_view) override { throw std::runtime_error("no"); }
  phx_status get(std::string_view, Milliseconds, std::string *) override { return PHX_ERR_TIMEOUT; }
  phx_status add(std::string_view, int64_t, int64_t *) override { return PHX_ERR_INTERNAL; }
};

}  // namespace

TEST(every_kind_of_store_keeps_waits_counts_and_removes) {
  exercise(Store::memory());
  const ranks::FileStore place;
  exercise(Store::file(place.path()));
  const auto served = Store::tcp_serve("127.0.0.1", "token");
  CHECK(served.port != 0);
  exercise(Store::tcp_connect("127.0.0.1", served.port, "token", Milliseconds(5000)));
}

TEST(a_store_of_ones_own_is_an_object_which_the_store_owns) {
  int ended = 0;
  {
    const Store store = Store::wrap(std::make_unique<Map>(&ended));
    exercise(store);
    CHECK(ended == 0);
  }
  CHECK(ended == 1);
}

TEST(what_a_store_of_ones_own_throws_fails_the_call) {
  const Store store = Store::wrap(std::make_unique<Broken>());
  CHECK(hpp::thrown([&] { store.set("a", "1"); }).status() == PHX_ERR_INTERNAL);
}

TEST(a_store_can_be_moved) {
  Store store = Store::memory();
  store.set("a", "1");
  Store other = std::move(store);
  CHECK(store.get() == nullptr && other.get("a") == "1");
  other = Store::memory();
  CHECK(hpp::thrown([&] { other.get("a", Milliseconds(1)); }).status() == PHX_ERR_TIMEOUT);
}

int main(int argc, char **argv) { return check::run_all(argc, argv); }
