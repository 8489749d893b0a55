// The C ABI, called by a program that gets everything wrong that a caller can get wrong and a library can check.
//
// The program controls which functions are called, in any order, with handles or NULL, names, versions of structs,
// impossible sizes and times; on a world of one rank, or of two whose calls need not match. No call may crash, hang,
// leak, write outside the buffers given, return what the header does not name, or call a mistake of the caller a defect
// of the library; handles are given out exactly when a call succeeds. (Collectives have a target of their own.)
#include "rank.h"

namespace {

const std::string &file_path() {
  static const fuzz::Directory directory;
  static const std::string path = directory.path() + "/file";
  return path;
}

class Caller final : public fuzz::Rank {
 public:
  using Rank::Rank;
  ~Caller() override {
    for (phx_window *window : windows_) phx_window_release(window);
  }

 private:
  void call() override {
    switch (args_.below(5)) {
      case 0: return call_library();
      case 1: return call_store();
      case 2: return call_group();
      case 3: return call_memory();
      default: return call_symm();
    }
  }
  void make_group(const char *name, int64_t timeout_ms) {
    const int32_t lists[][2] = {{0, 1}, {0, 1}, {1, 0}, {rank_, rank_}, {-1, 7}};
    const int32_t count = args_.one_in(8) ? static_cast<int32_t>(args_.below(300)) - 100 : size_;
    const int32_t *list = lists[args_.below(5)];
    phx_group **out = groups_.out(args_);
    if (count <= 2)
      groups_.keep(phx_group_create_with_options(world(), name, args_.one_in(16) ? nullptr : list, count,
                                                 args_.structure(phx_group_options{}), timeout_ms, out),
                   args_);
  }

  void call_library();
  void call_store();
  void call_group();
  void call_memory();
  void call_symm();
  void call_window();

  phx_window *windows_[2] = {};
};

void Caller::call_library() {
  const int32_t number = static_cast<int32_t>(args_.below(64)) - 32;
  size_t size = 0;
  switch (args_.below(8)) {
    case 0: MUST(phx_status_name(number) != nullptr && phx_dtype_name(number) != nullptr); break;
    case 1: MUST(phx_op_name(number) != nullptr && phx_dtype_size(number) <= 16); break;
    case 2: MUST(phx_has(args_.name()) <= 1 && phx_struct_size(args_.name()) < 4096); break;
    case 3: (void)phx_last_error_info(args_.structure(phx_error_info{})); break;
    case 4: fuzz::must_end_well(phx_world_check(world())); break;
    case 5:
      fuzz::must_end_well(phx_world_set_timeout(world(), std::min(args_.timeout_ms(), fuzz::kTimeoutMs) | 1));
      break;
    case 6: {
      const size_t capacity = args_.below(256);
      char *json = args_.one_in(8) ? nullptr : args_.make(capacity);
      fuzz::must_end_well(phx_world_dump(world(), json, capacity, args_.one_in(16) ? nullptr : &size));
      break;
    }
    default:
      if (args_.one_in(8)) fuzz::must_end_well(phx_world_abort(world(), args_.name()));
      if (args_.one_in(16)) fuzz::must_end_well(phx_world_finalize(world()));
  }
}

void Caller::call_store() {
  phx_store *store = stores_.pick(args_);
  phx_store **out = stores_.out(args_);
  const char *key = args_.name();
  const size_t size = args_.below(64);
  const void *value = args_.one_in(16) ? nullptr : args_.make(size);
  const char *const addresses[] = {"127.0.0.1", "::1", "", nullptr, "no address", "127.0.0.1%lo"};
  const char *const paths[] = {file_path().c_str(), "", nullptr, "/", "/dev/null"};
  size_t found = 0;
  int64_t sum = 0;
  auto port = static_cast<uint16_t>(args_.below(2));
  switch (args_.below(13)) {
    case 0: stores_.keep(phx_store_memory(out), args_); break;
    case 1: stores_.keep(phx_store_file(paths[args_.below(5)], out), args_); break;
    case 2:
      stores_.keep(phx_store_tcp_serve(addresses[args_.below(6)], value, size, args_.one_in(8) ? nullptr : &port, out),
                   args_);
      break;
    case 3: stores_.keep(phx_store_tcp_connect(addresses[args_.below(6)], port, value, size, 1, out), args_); break;
    case 4: stores_.keep(phx_store_prefix(store, key, out), args_); break;
    case 5: fuzz::must_end_well(phx_store_set(store, key, value, args_.one_in(16) ? SIZE_MAX : size)); break;
    case 6: {
      char *room = args_.one_in(8) ? nullptr : args_.make(size);
      fuzz::must_end_well(phx_store_get(store, key, room, size, args_.one_in(16) ? nullptr : &found, 1));
      break;
    }
    case 7: {
      const char *keys[] = {key, args_.name()};
      fuzz::must_end_well(phx_store_wait(store, args_.one_in(8) ? nullptr : keys, args_.below(3), 1));
      break;
    }
    case 8:
      fuzz::must_end_well(phx_store_add(store, key, args_.input().take<int64_t>(), args_.one_in(8) ? nullptr : &sum));
      break;
    case 9: fuzz::must_end_well(phx_store_remove(store, key)); break;
    case 10: stores_.keep(phx_store_wrap(args_.structure(phx_store_ops{}), nullptr, out), args_); break;
    case 11: stores_.share(args_); break;
    default: stores_.drop(args_);
  }
}

void Caller::call_group() {
  phx_group *group = groups_.pick(args_);
  const char *name = args_.name();
  const int64_t timeout_ms = args_.timeout_ms();
  switch (args_.below(17)) {
    case 0: make_group(name, timeout_ms); break;
    case 1: {
      phx_store *store = stores_.pick(args_);
      const int32_t size = args_.rank() + 1, rank = args_.rank() + 1;
      phx_group **out = groups_.out(args_);
      groups_.keep(phx_group_attach(world(), name, rank, size, store, 1, out), args_);
      break;
    }
    case 2: fuzz::must_end_well(phx_group_get_info(group, args_.structure(phx_group_info{}))); break;
    case 3: fuzz::must_end_well(phx_group_get_error(group, args_.structure(phx_error_info{}))); break;
    case 4: fuzz::must_end_well(phx_barrier(group, args_.options(), nullptr)); break;
    case 5:
      if (args_.one_in(8)) fuzz::must_end_well(phx_group_revoke(group, name));
      break;
    case 6: fuzz::must_end_well(phx_group_get_tuning(group, args_.structure(phx_tuning{}))); break;
    case 7: {
      phx_tuning tuning{};
      tuning.one_shot_bytes = args_.below(4) * 64;
      tuning.chunk_bytes = args_.one_in(8) ? args_.input().take<uint64_t>() : 4096;
      tuning.streaming_bytes = args_.one_in(8) ? args_.input().take<uint64_t>() : args_.below(256);
      tuning.push_bytes = args_.one_in(8) ? args_.input().take<uint64_t>() : 64;
      fuzz::must_end_well(phx_group_set_tuning(group, args_.structure(tuning), timeout_ms));
      break;
    }
    case 8: fuzz::must_end_well(phx_group_save_tuning(group, args_.one_in(4) ? "/dev/null/x" : nullptr)); break;
    case 9: {
      const int32_t color = args_.rank();
      phx_group **out = groups_.out(args_);
      groups_.keep(phx_group_split(group, color, args_.rank(), name, timeout_ms, out), args_, color < 0);
      break;
    }
    case 10: {
      phx_group **out = groups_.out(args_);
      groups_.keep(phx_group_shrink(group, name, timeout_ms, out), args_);
      break;
    }
    case 11: {
      uint64_t bits = 1;
      auto *alive = reinterpret_cast<uint8_t *>(args_.make(size_of(group)));
      fuzz::must_end_well(phx_group_agree(group, args_.one_in(16) ? nullptr : &bits,
                                          args_.below(2) == 0 ? nullptr : alive, timeout_ms));
      break;
    }
    case 12: groups_.share(args_); break;
    case 13: fuzz::must_end_well(phx_group_get_gpu_tuning(group, args_.structure(phx_gpu_tuning{}))); break;
    case 14: {
      phx_gpu_tuning tuning{};
      tuning.line_bytes = args_.one_in(8) ? args_.input().take<uint64_t>() : args_.below(256);
      tuning.thread_bytes = args_.one_in(8) ? args_.input().take<uint64_t>() : 16 * args_.below(4);
      fuzz::must_end_well(phx_group_set_gpu_tuning(group, args_.structure(tuning), timeout_ms));
      break;
    }
    case 15: fuzz::must_end_well(phx_group_save_gpu_tuning(group, nullptr)); break;
    default: groups_.drop(args_);
  }
}

void Caller::call_memory() {
  void *&block = blocks_[args_.below(3)];
  const phx_device devices[] = {{PHX_DEVICE_CPU, 0}, {PHX_DEVICE_CPU, 1}, {PHX_DEVICE_CUDA, 0}, {-1, -1}};
  const phx_device *device = args_.below(2) == 0 ? nullptr : &devices[args_.below(4)];
  const size_t size = args_.count();
  const char *scope = args_.name();
  const uint64_t id = args_.below(3);
  void *made = nullptr;
  size_t bytes = 0;
  const auto keep = [&](phx_status status) {
    MUST((fuzz::must_end_well(status) == PHX_OK) == (made != nullptr));
    if (made != nullptr && size > 0) std::memset(made, 1, size);
    if (made != nullptr && block != nullptr) MUST(phx_mem_free(world_, block) == PHX_OK);
    if (made != nullptr) block = made;
  };
  switch (args_.below(10)) {
    case 0:
    case 1: keep(phx_mem_alloc(world(), device, size, args_.one_in(16) ? nullptr : &made)); break;
    case 2: keep(phx_mem_alloc_persistent(world(), device, size, scope, id, args_.one_in(16) ? nullptr : &made)); break;
    case 3:
      if (fuzz::must_end_well(phx_mem_retain(world(), block)) == PHX_OK) MUST(phx_mem_free(world_, block) == PHX_OK);
      break;
    case 4:
      if (fuzz::must_end_well(phx_mem_free(world(), block)) == PHX_OK) block = nullptr;
      break;
    case 5: fuzz::must_end_well(phx_mem_drop(world(), device, scope, id)); break;
    case 6:
      fuzz::must_end_well(phx_mem_find(world(), static_cast<char *>(block) + (block != nullptr ? 5 : 0),
                                       args_.structure(phx_mem_info{})));
      break;
    case 7: fuzz::must_end_well(phx_mem_count(world(), args_.one_in(8) ? nullptr : &bytes, &bytes)); break;
    default:
      fuzz::must_end_well(
          phx_allocator_register(world(), PHX_DEVICE_CUDA, args_.structure(phx_allocator_ops{}), nullptr));
      fuzz::must_end_well(phx_allocator_unregister(world(), args_.rank() + 2));
  }
}

void Caller::call_symm() {
  phx_symm *symm = symms_.pick(args_);
  const int32_t rank = args_.rank();
  const uint32_t channel = args_.channel();
  const int64_t timeout_ms = args_.timeout_ms();
  phx_group *group = groups_.pick(args_);
  void *block = blocks_[args_.below(3)];
  phx_symm **out = symms_.out(args_);
  switch (args_.below(17)) {
    case 0:
    case 1:
    case 2: rendezvous(); break;
    case 3: symms_.keep(phx_symm_find(group, block, out), args_); break;
    case 4: fuzz::must_end_well(phx_symm_get_info(symm, args_.structure(phx_symm_info{}))); break;
    case 5: (void)phx_symm_buffer(symm, rank); break;
    case 6: (void)phx_symm_signal_pad(symm, rank); break;
    case 7: fuzz::must_end_well(phx_symm_put_signal(symm, rank, channel)); break;
    case 8: fuzz::must_end_well(phx_symm_wait_signal(symm, rank, channel, timeout_ms)); break;
    case 9: fuzz::must_end_well(phx_symm_barrier(symm, channel, timeout_ms)); break;
    case 10: symms_.share(args_); break;
    case 11: symms_.keep(phx_symm_alloc(group, nullptr, args_.below(3) * 4000, timeout_ms, out), args_); break;
    case 12: {
      void *range = nullptr;
      fuzz::must_end_well(phx_symm_map_gathered(symm, args_.below(3) * 2048, args_.below(4) * 4096, &range));
      fuzz::must_end_well(phx_symm_unmap_gathered(symm, range));
      break;
    }
    case 13:
    case 14: return call_window();
    default: symms_.drop(args_);
  }
}

void Caller::call_window() {
  phx_window *&window = windows_[args_.below(2)];
  const int32_t rank = args_.rank();
  const size_t offset = args_.offset(), bytes = args_.below(64);
  const int64_t timeout_ms = args_.timeout_ms();
  char *data = args_.one_in(8) ? nullptr : args_.make(bytes);
  uint32_t signals = 0;
  switch (args_.below(10)) {
    case 0:
    case 1:
    case 2: {
      phx_window *made = nullptr;
      char *base = static_cast<char *>(blocks_[args_.below(3)]);
      if (base != nullptr) base += args_.below(3) * 64;
      const size_t size = args_.one_in(16) ? SIZE_MAX : args_.below(3) * 100;
      phx_window **out = args_.one_in(32) ? nullptr : &made;
      phx_group *group = groups_.pick(args_);
      const phx_status status = fuzz::must_end_well(phx_window_create(group, world(), base, size, timeout_ms, out));
      MUST((status == PHX_OK) == (made != nullptr));
      if (made != nullptr) phx_window_release(std::exchange(window, made));
      break;
    }
    case 3:
    case 4: fuzz::must_end_well(phx_window_put(window, rank, offset, data, bytes, args_.one_in(2), timeout_ms)); break;
    case 5: fuzz::must_end_well(phx_window_get(window, rank, offset, data, bytes, timeout_ms)); break;
    case 6: fuzz::must_end_well(phx_window_wait_signal(window, rank, timeout_ms)); break;
    case 7: fuzz::must_end_well(phx_window_get_signals(window, rank, args_.one_in(8) ? nullptr : &signals)); break;
    case 8:
      fuzz::must_end_well(phx_window_flush(window, timeout_ms));
      (void)phx_window_memory(window, rank);
      break;
    default: phx_window_release(std::exchange(window, nullptr));
  }
}

}  // namespace

extern "C" int LLVMFuzzerInitialize(int *, char ***) {
  fuzz::log_into_nothing();
  setenv("PHALANX_TUNING", (file_path() + ".tuning").c_str(), 1);
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  unlink(file_path().c_str());
  fuzz::run_ranks<Caller>(data, size);
  return 0;
}
