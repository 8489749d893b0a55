// A rank that calls public functions: its world, its handles, and what must hold after every call.
#pragma once

#include <thread>
#include <utility>

#include "arguments.h"

namespace fuzz {

inline constexpr int64_t kTimeoutMs = 3, kLongMs = 1000;
inline constexpr int kMostCalls = 48;

inline phx_status must_end_well(phx_status status) {
  MUST(status == PHX_OK || is_error(status));
  MUST(status != PHX_ERR_INTERNAL);
  phx_error_info info{};
  info.struct_size = sizeof info;
  if (status == PHX_OK) return status;
  MUST(phx_last_error_info(&info) == PHX_OK && info.status == status && info.text[0] != '\0');
  return status;
}

// Handles of one kind, and the functions that share one and give it back.
template <class T>
class Handles {
 public:
  Handles(T *(*retain)(T *), void (*release)(T *)) : retain_(retain), release_(release) {}
  ~Handles() { clear(); }
  // NULL, too.
  T *pick(Arguments &args) const {
    const size_t i = args.below(kMost + 1);
    return i == kMost ? nullptr : all_[i];
  }
  // For the out-parameter of a call; NULL now and then.
  T **out(Arguments &args) {
    made_ = nullptr;
    return args.one_in(32) ? nullptr : &made_;
  }
  void keep(phx_status status, Arguments &args, bool may_be_null = false) {
    must_end_well(status);
    MUST((status == PHX_OK) == (made_ != nullptr) || may_be_null);
    if (made_ != nullptr) put(args, made_);
  }
  void drop(Arguments &args) { put(args, nullptr); }
  void share(Arguments &args) {
    T *handle = pick(args);
    MUST(retain_(handle) == handle);
    put(args, handle);
  }
  void clear() {
    for (T *&each : all_) release_(std::exchange(each, nullptr));
  }

 private:
  static constexpr size_t kMost = 3;
  void put(Arguments &args, T *handle) { release_(std::exchange(all_[args.below(kMost)], handle)); }
  T *(*retain_)(T *);
  void (*release_)(T *);
  T *all_[kMost] = {};
  T *made_ = nullptr;
};

class Rank {
 public:
  Rank(const uint8_t *data, size_t size, int rank, int world_size, phx_store *store)
      : args_(data, size), rank_(rank), size_(world_size) {
    phx_world_params params{};
    params.struct_size = sizeof params;
    params.rank = rank;
    params.size = world_size;
    params.store = store;
    params.timeout_ms = kTimeoutMs;
    params.staging_bytes = 256;
    params.signal_channels = 3;
    params.channels = 2;
    MUST(phx_world_create(&params, &world_) == PHX_OK);
    const int32_t all[] = {0, 1};
    phx_group **first = groups_.out(args_);
    groups_.keep(phx_group_create(world_, "first", all, size_, kLongMs, first), args_);
  }
  virtual ~Rank() {
    works_.clear();
    symms_.clear();
    groups_.clear();
    for (void *&block : blocks_)
      if (block != nullptr) MUST(phx_mem_free(world_, std::exchange(block, nullptr)) == PHX_OK);
    phx_world_release(world_);
    stores_.clear();
  }
  Rank(const Rank &) = delete;

  // Both ranks make most calls, and one of them some.
  void run() {
    for (int i = 0; i < kMostCalls && !args_.input().empty(); ++i) {
      const size_t whose = args_.below(16);
      if (whose < 14 || static_cast<int>(whose) - 14 == rank_)
        call();
      else
        (void)args_.input().take<uint64_t>();
    }
  }

 protected:
  virtual void call() = 0;

  phx_world *world() { return args_.one_in(16) ? nullptr : world_; }
  phx_work **work() { return args_.below(2) == 0 ? nullptr : works_.out(args_); }
  // A started call gives a handle, and one that is complete gives none.
  void keep_work(phx_status status, phx_work **out) {
    if (out == nullptr)
      must_end_well(status);
    else
      works_.keep(status, args_);
  }
  void rendezvous() {
    phx_group *group = groups_.pick(args_);
    void *block = blocks_[args_.below(3)];
    const int64_t timeout_ms = args_.timeout_ms();
    phx_symm **out = symms_.out(args_);
    symms_.keep(phx_symm_rendezvous(group, block, timeout_ms, out), args_);
  }
  size_t size_of(phx_group *group) const {
    phx_group_info info{};
    info.struct_size = sizeof info;
    if (group != nullptr) MUST(phx_group_get_info(group, &info) == PHX_OK);
    return group == nullptr ? 2 : static_cast<size_t>(info.group_size);
  }

  Arguments args_;
  const int rank_;
  const int size_;
  phx_world *world_ = nullptr;
  Handles<phx_store> stores_{phx_store_retain, phx_store_release};
  Handles<phx_group> groups_{phx_group_retain, phx_group_release};
  Handles<phx_symm> symms_{phx_symm_retain, phx_symm_release};
  Handles<phx_work> works_{phx_work_retain, phx_work_release};
  void *blocks_[3] = {};
};

// Every fourth input is for two ranks, which are threads.
template <class Caller>
void run_ranks(const uint8_t *data, size_t size) {
  if (size == 0) return;
  const int before = open_descriptors();
  phx_store *store = nullptr;
  MUST(phx_store_memory(&store) == PHX_OK);
  const auto run = [&](int rank, int world_size) { Caller(data + 1, size - 1, rank, world_size, store).run(); };
  if ((data[0] & 3) != 0) {
    run(0, 1);
  } else {
    std::thread other([&] { run(1, 2); });
    run(0, 2);
    other.join();
  }
  phx_store_release(store);
  MUST(open_descriptors() == before);
}

}  // namespace fuzz
