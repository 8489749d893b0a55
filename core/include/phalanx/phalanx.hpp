// phalanx/phalanx.hpp: phalanx.h for C++17 and later, in this header alone.
//
// Handles release themselves and can be moved, not copied. Buffers are anything with data() and size(), whose element
// type says the dtype; timeouts are std::chrono durations, and zero is the default of the group or world.
//
//     auto store = phalanx::Store::file(path);
//     auto world = phalanx::World::create(rank, size, store);
//     auto group = world.group("everyone");
//     group.all_reduce(values, values);                     // complete when it returns
//     auto work = group.start().all_reduce(values, sums);   // runs on; `work.wait()`, or its destructor, waits
//
// What fails throws phalanx::Error. With PHALANX_RESULTS defined before the first #include, and where the compiler has
// no exceptions, nothing throws: each function that can fail returns a Result instead, with a value or an Error, and
// compilers warn where one is not looked at. The two forms live in namespaces of their own and may meet in one program.
//
// What is collective, sizes, lifetimes and errors are as in phalanx.h; this says what differs. Buffers whose sizes or
// dtypes do not fit are refused here, with the reason also for the other ranks.
#ifndef PHALANX_PHALANX_HPP
#define PHALANX_PHALANX_HPP

#include <chrono>
#include <complex>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <initializer_list>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "phalanx/phalanx.h"

#if defined(PHALANX_RESULTS) || !(defined(__cpp_exceptions) || defined(__EXCEPTIONS))
#define PHALANX_PRIVATE_RESULTS 1
#else
#define PHALANX_PRIVATE_RESULTS 0
#endif

namespace phalanx {
#if PHALANX_PRIVATE_RESULTS
inline namespace results {
#else
inline namespace throwing {
#endif

// ---- words -------------------------------------------------------------------------------------------------------

using Milliseconds = std::chrono::milliseconds;

enum class Dtype : phx_dtype {
  f16 = PHX_DTYPE_F16,
  bf16 = PHX_DTYPE_BF16,
  f32 = PHX_DTYPE_F32,
  f64 = PHX_DTYPE_F64,
  i8 = PHX_DTYPE_I8,
  u8 = PHX_DTYPE_U8,
  i16 = PHX_DTYPE_I16,
  u16 = PHX_DTYPE_U16,
  i32 = PHX_DTYPE_I32,
  u32 = PHX_DTYPE_U32,
  i64 = PHX_DTYPE_I64,
  u64 = PHX_DTYPE_U64,
  boolean = PHX_DTYPE_BOOL,
  c64 = PHX_DTYPE_C64,
  c128 = PHX_DTYPE_C128,
  f8e4m3 = PHX_DTYPE_F8E4M3,
  f8e5m2 = PHX_DTYPE_F8E5M2
};
enum class Op : phx_op {
  sum = PHX_OP_SUM,
  avg = PHX_OP_AVG,
  prod = PHX_OP_PROD,
  min = PHX_OP_MIN,
  max = PHX_OP_MAX,
  band = PHX_OP_BAND,
  bor = PHX_OP_BOR,
  bxor = PHX_OP_BXOR,
  premul_sum = PHX_OP_PREMUL_SUM
};
enum class LogLevel : phx_log_level {
  debug = PHX_LOG_DEBUG,
  info = PHX_LOG_INFO,
  warning = PHX_LOG_WARNING,
  error = PHX_LOG_ERROR
};
inline constexpr int32_t kAnyRank = PHX_ANY_RANK;
inline constexpr phx_device kCpu = {PHX_DEVICE_CPU, 0};

inline const char *name_of(Dtype dtype) { return phx_dtype_name(static_cast<phx_dtype>(dtype)); }
inline const char *name_of(Op op) { return phx_op_name(static_cast<phx_op>(op)); }
inline size_t size_of(Dtype dtype) { return phx_dtype_size(static_cast<phx_dtype>(dtype)); }

// The dtype of a type of C++. Specialize it for a 16-bit or 8-bit float of your own:
//     template <> struct phalanx::DtypeOf<my::half> { static constexpr auto value = phalanx::Dtype::f16; };
template <class T, class = void>
struct DtypeOf;
template <class T>
struct DtypeOf<T, std::enable_if_t<std::is_integral_v<T> && !std::is_same_v<T, bool>>> {
  static_assert(sizeof(T) <= 8, "integers have at most 64 bits");
  static constexpr Dtype value = sizeof(T) == 1   ? (std::is_signed_v<T> ? Dtype::i8 : Dtype::u8)
                                 : sizeof(T) == 2 ? (std::is_signed_v<T> ? Dtype::i16 : Dtype::u16)
                                 : sizeof(T) == 4 ? (std::is_signed_v<T> ? Dtype::i32 : Dtype::u32)
                                                  : (std::is_signed_v<T> ? Dtype::i64 : Dtype::u64);
};
template <>
struct DtypeOf<bool> {
  static constexpr Dtype value = Dtype::boolean;
};
template <>
struct DtypeOf<std::byte> {
  static constexpr Dtype value = Dtype::u8;
};
template <>
struct DtypeOf<float> {
  static constexpr Dtype value = Dtype::f32;
};
template <>
struct DtypeOf<double> {
  static constexpr Dtype value = Dtype::f64;
};
template <>
struct DtypeOf<std::complex<float>> {
  static constexpr Dtype value = Dtype::c64;
};
template <>
struct DtypeOf<std::complex<double>> {
  static constexpr Dtype value = Dtype::c128;
};

// ---- errors ------------------------------------------------------------------------------------------------------

// What failed, where, and why: a copy of phx_error_info.
class Error : public std::exception {
 public:
  Error(phx_status status, std::string operation, std::string text)
      : status_(status), operation_(std::move(operation)), text_(std::move(text)) {}
  explicit Error(const phx_error_info &info)
      : status_(info.status),
        rank_(info.rank),
        peer_(info.peer),
        sequence_(info.sequence),
        sys_errno_(info.sys_errno),
        operation_(info.operation),
        group_(info.group),
        text_(info.text) {}
  // The last error of the calling thread.
  static Error last(phx_status status) {
    phx_error_info info = PHX_ERROR_INFO_INIT;
    if (phx_last_error_info(&info) == PHX_OK && info.status == status) return Error(info);
    return Error(status, "", phx_status_name(status));
  }

  const char *what() const noexcept override { return text_.c_str(); }
  phx_status status() const noexcept { return status_; }  // PHX_ERR_*
  const char *status_name() const noexcept { return phx_status_name(status_); }
  int32_t rank() const noexcept { return rank_; }  // the rank that reports; -1: none
  int32_t peer() const noexcept { return peer_; }  // the rank at fault; -1: unknown or none
  uint64_t sequence() const noexcept { return sequence_; }
  int32_t sys_errno() const noexcept { return sys_errno_; }
  const std::string &operation() const noexcept { return operation_; }
  const std::string &group() const noexcept { return group_; }

 private:
  phx_status status_;
  int32_t rank_ = -1;
  int32_t peer_ = -1;
  uint64_t sequence_ = 0;
  int32_t sys_errno_ = 0;
  std::string operation_;
  std::string group_;
  std::string text_;
};

// A value, or why there is none.
template <class T>
class [[nodiscard]] Result {
 public:
  Result(T value) : content_(std::in_place_index<0>, std::move(value)) {}
  Result(Error error) : content_(std::in_place_index<1>, std::move(error)) {}
  explicit operator bool() const noexcept { return content_.index() == 0; }
  bool has_value() const noexcept { return content_.index() == 0; }
  // Ends the process where there is none.
  T &value() & { return *checked(); }
  T &&value() && { return std::move(*checked()); }
  T &operator*() & { return *checked(); }
  T &&operator*() && { return std::move(*checked()); }
  T *operator->() { return checked(); }
  const Error &error() const {
    const Error *const found = std::get_if<1>(&content_);
    if (found == nullptr) std::terminate();
    return *found;
  }

 private:
  T *checked() {
    T *const found = std::get_if<0>(&content_);
    if (found == nullptr) std::terminate();
    return found;
  }
  std::variant<T, Error> content_;
};
template <>
class [[nodiscard]] Result<void> {
 public:
  Result() = default;
  Result(Error error) : error_(std::move(error)) {}
  explicit operator bool() const noexcept { return !error_.has_value(); }
  bool has_value() const noexcept { return !error_.has_value(); }
  void value() const {
    if (error_) std::terminate();
  }
  const Error &error() const {
    if (!error_) std::terminate();
    return *error_;
  }

 private:
  std::optional<Error> error_;
};

#if PHALANX_PRIVATE_RESULTS
template <class T>
using Outcome = Result<T>;
namespace detail {
template <class T>
Outcome<T> failed(Error error) {
  return error;
}
inline Outcome<void> done(phx_status status) {
  if (status < 0) return Error::last(status);
  return {};
}
template <class Make>
Outcome<std::invoke_result_t<Make>> made(phx_status status, Make make) {
  if (status < 0) return Error::last(status);
  return make();
}
}  // namespace detail
#else
// What a function returns that can fail: T, as it throws.
template <class T>
using Outcome = T;
namespace detail {
template <class T>
[[noreturn]] Outcome<T> failed(Error error) {
  throw error;
}
inline void done(phx_status status) {
  if (status < 0) throw Error::last(status);
}
template <class Make>
std::invoke_result_t<Make> made(phx_status status, Make make) {
  if (status < 0) throw Error::last(status);
  return make();
}
}  // namespace detail
#endif

// ---- buffers -----------------------------------------------------------------------------------------------------

// std::span of C++20, as far as it is needed here; that one converts to it.
template <class T>
class span {
 public:
  using element_type = T;
  using value_type = std::remove_cv_t<T>;

  constexpr span() noexcept = default;
  constexpr span(T *data, size_t size) noexcept : data_(data), size_(size) {}
  template <size_t N>
  constexpr span(T (&array)[N]) noexcept : data_(array), size_(N) {}
  template <class C,
            class = std::enable_if_t<
                std::is_convertible_v<std::remove_pointer_t<decltype(std::declval<C &>().data())> (*)[], T (*)[]> &&
                std::is_convertible_v<decltype(std::declval<C &>().size()), size_t> &&
                !std::is_same_v<std::decay_t<C>, span>>>
  constexpr span(C &&container) noexcept : data_(container.data()), size_(container.size()) {}

  constexpr T *data() const noexcept { return data_; }
  constexpr size_t size() const noexcept { return size_; }
  constexpr bool empty() const noexcept { return size_ == 0; }
  constexpr T *begin() const noexcept { return data_; }
  constexpr T *end() const noexcept { return data_ + size_; }
  constexpr T &operator[](size_t i) const { return data_[i]; }
  constexpr span subspan(size_t offset, size_t count) const { return {data_ + offset, count}; }

 private:
  T *data_ = nullptr;
  size_t size_ = 0;
};

namespace detail {
template <class C>
using element_of = std::remove_pointer_t<decltype(std::declval<C &>().data())>;
}  // namespace detail

// What a call reads: elements of a dtype, one after another. Made of any container; or of nothing, where this rank
// gives nothing.
class ConstBuffer {
 public:
  ConstBuffer() = default;
  ConstBuffer(const void *data, size_t count, Dtype dtype) : data_(data), count_(count), dtype_(dtype) {}
  template <class C, class E = std::remove_cv_t<detail::element_of<const C>>, Dtype D = DtypeOf<E>::value>
  ConstBuffer(const C &container) : data_(container.data()), count_(container.size()), dtype_(D) {}
  template <class T, size_t N, Dtype D = DtypeOf<std::remove_cv_t<T>>::value>
  ConstBuffer(const T (&array)[N]) : data_(array), count_(N), dtype_(D) {}

  const void *data() const { return data_; }
  size_t count() const { return count_; }
  Dtype dtype() const { return dtype_; }
  phx_dtype code() const { return static_cast<phx_dtype>(dtype_); }

 private:
  const void *data_ = nullptr;
  size_t count_ = 0;
  Dtype dtype_ = Dtype::u8;
};

// What a call writes.
class Buffer {
 public:
  Buffer() = default;
  Buffer(void *data, size_t count, Dtype dtype) : data_(data), count_(count), dtype_(dtype) {}
  template <class C, class E = detail::element_of<std::remove_reference_t<C>>,
            class = std::enable_if_t<!std::is_const_v<E>>, Dtype D = DtypeOf<E>::value>
  Buffer(C &&container) : data_(container.data()), count_(container.size()), dtype_(D) {}
  template <class T, size_t N, class = std::enable_if_t<!std::is_const_v<T>>, Dtype D = DtypeOf<T>::value>
  Buffer(T (&array)[N]) : data_(array), count_(N), dtype_(D) {}

  void *data() const { return data_; }
  size_t count() const { return count_; }
  Dtype dtype() const { return dtype_; }
  phx_dtype code() const { return static_cast<phx_dtype>(dtype_); }

 private:
  void *data_ = nullptr;
  size_t count_ = 0;
  Dtype dtype_ = Dtype::u8;
};

// Buffers, one for each rank, for the collectives on blocks: of type Buffer where a call writes, else ConstBuffer.
template <class B>
class BlockList {
 public:
  BlockList() = default;
  BlockList(std::initializer_list<B> blocks) {
    for (const B &block : blocks) add(block);
  }
  BlockList &add(const B &block) { return add(block, 0, 0); }
  // The elements of `block` lie in rows of `row` elements, which begin `stride` elements apart: see phx_block.
  BlockList &add(const B &block, size_t row, size_t stride) {
    if (list_.empty()) dtype_ = block.dtype();
    if (dtype_ != block.dtype()) uniform_ = false;
    list_.push_back({const_cast<void *>(static_cast<const void *>(block.data())), block.count(), row, stride});
    return *this;
  }

  const phx_block *data() const { return list_.data(); }
  size_t size() const { return list_.size(); }
  Dtype dtype() const { return dtype_; }
  phx_dtype code() const { return static_cast<phx_dtype>(dtype_); }
  bool is_uniform() const { return uniform_; }  // all blocks have that dtype

 private:
  std::vector<phx_block> list_;
  Dtype dtype_ = Dtype::u8;
  bool uniform_ = true;
};
using Blocks = BlockList<Buffer>;
using ConstBlocks = BlockList<ConstBuffer>;

// How a call is made: phx_options.
struct Options {
  Milliseconds timeout{0};
  uint32_t channel = 0;
  double scale = 1.0;  // of Op::premul_sum
  phx_algo algo = PHX_ALGO_AUTO;
  const phx_gpu_options *gpu = nullptr;  // phalanx/cuda.h

  phx_options raw() const {
    phx_options options = PHX_OPTIONS_INIT;
    options.timeout_ms = timeout.count();
    options.channel = channel;
    options.scale = scale;
    options.algo = algo;
    options.gpu = gpu;
    return options;
  }
};

// ---- library -----------------------------------------------------------------------------------------------------

inline std::string_view version() { return phx_version(); }
inline std::string_view build_info() { return phx_build_info(); }  // JSON
inline bool has(const char *feature) { return phx_has(feature) != 0; }

namespace detail {
using LogFunction = std::function<void(LogLevel, std::string_view file, int32_t line, std::string_view message)>;
// Never freed: other threads may be in the one before.
inline Outcome<void> set_log_function(LogFunction function, LogLevel least) {
  static auto &mutex = *new std::mutex;  // never destroyed: a thread may still log when the process ends
  static auto &current = *new std::unique_ptr<LogFunction>;
  const std::lock_guard<std::mutex> lock(mutex);
  auto next = function ? std::make_unique<LogFunction>(std::move(function)) : nullptr;
  const auto call = [](void *user, phx_log_level level, const char *file, int32_t line, const char *message) {
    (*static_cast<LogFunction *>(user))(static_cast<LogLevel>(level), file, line, message);
  };
  const phx_status status = phx_set_log(next ? +call : nullptr, next.get(), static_cast<phx_log_level>(least));
  if (status == PHX_OK) current.swap(next);  // the one before is not called any more
  return done(status);
}
}  // namespace detail
// `function` gets the lines of the log; it must not throw. An empty one turns logging off. For the whole process.
inline Outcome<void> set_log(detail::LogFunction function, LogLevel least = LogLevel::warning) {
  return detail::set_log_function(std::move(function), least);
}

// While it lives, waits of the thread that made it end once `requested` returns true: see phx_set_interrupt. One at a
// time for each thread; to be destroyed by that thread. `requested` must not throw.
class InterruptHook {
 public:
  explicit InterruptHook(std::function<bool()> requested)
      : requested_(std::make_unique<std::function<bool()>>(std::move(requested))) {
    (void)phx_set_interrupt([](void *arg) -> int { return (*static_cast<std::function<bool()> *>(arg))() ? 1 : 0; },
                            requested_.get());
  }
  InterruptHook(const InterruptHook &) = delete;
  InterruptHook &operator=(const InterruptHook &) = delete;
  ~InterruptHook() { (void)phx_set_interrupt(nullptr, nullptr); }

 private:
  std::unique_ptr<std::function<bool()>> requested_;
};

namespace detail {

// One reference to a handle of C, given back at the end.
template <class T, void (*Release)(T *)>
class Handle {
 public:
  Handle() = default;
  explicit Handle(T *pointer) : pointer_(pointer) {}
  Handle(Handle &&other) noexcept : pointer_(std::exchange(other.pointer_, nullptr)) {}
  Handle &operator=(Handle &&other) noexcept {
    if (this != &other) {
      if (pointer_ != nullptr) Release(pointer_);
      pointer_ = std::exchange(other.pointer_, nullptr);
    }
    return *this;
  }
  Handle(const Handle &) = delete;
  Handle &operator=(const Handle &) = delete;
  ~Handle() {
    if (pointer_ != nullptr) Release(pointer_);
  }
  T *get() const { return pointer_; }
  T *give_up() { return std::exchange(pointer_, nullptr); }

 private:
  T *pointer_ = nullptr;
};

template <class Call>
phx_status without_exceptions(Call call) noexcept {
#if PHALANX_PRIVATE_RESULTS
  return call();
#else
  try {
    return call();
  } catch (const Error &error) {
    return error.status();
  } catch (...) {
    return PHX_ERR_INTERNAL;
  }
#endif
}

}  // namespace detail

// ---- stores ------------------------------------------------------------------------------------------------------

// A store of one's own, for Store::wrap. What it throws is the failure of the call.
class StoreBackend {
 public:
  virtual ~StoreBackend() = default;
  virtual phx_status set(std::string_view key, std::string_view value) = 0;
  // Waits for the key; PHX_ERR_TIMEOUT if it does not come.
  virtual phx_status get(std::string_view key, Milliseconds timeout, std::string *value) = 0;
  // Adds to a decimal counter that starts at 0.
  virtual phx_status add(std::string_view key, int64_t delta, int64_t *result) = 0;
  virtual phx_status remove(std::string_view key) {
    static_cast<void>(key);
    return PHX_ERR_UNSUPPORTED;
  }
};

class Store {
 public:
  static Outcome<Store> memory() {
    return made([](phx_store **out) { return phx_store_memory(out); });
  }
  static Outcome<Store> file(const std::string &path) {
    return made([&](phx_store **out) { return phx_store_file(path.c_str(), out); });
  }
  struct Served;
  static Outcome<Served> tcp_serve(const std::string &bind_address, std::string_view token, uint16_t port = 0);
  static Outcome<Store> tcp_connect(const std::string &address, uint16_t port, std::string_view token,
                                    Milliseconds timeout = {}) {
    return made([&](phx_store **out) {
      return phx_store_tcp_connect(address.c_str(), port, token.data(), token.size(), timeout.count(), out);
    });
  }
  static Outcome<Store> wrap(std::unique_ptr<StoreBackend> backend) {
    phx_store_ops ops = PHX_STORE_OPS_INIT;
    ops.set = [](void *self, const char *key, const void *value, size_t size) {
      return detail::without_exceptions([&] { return of(self)->set(key, {static_cast<const char *>(value), size}); });
    };
    ops.get = [](void *self, const char *key, void *value, size_t capacity, size_t *size, int64_t timeout_ms) {
      return detail::without_exceptions([&] {
        std::string found;
        const phx_status status = of(self)->get(key, Milliseconds(timeout_ms), &found);
        if (status != PHX_OK) return status;
        *size = found.size();
        found.copy(static_cast<char *>(value), capacity);
        return status;
      });
    };
    ops.add = [](void *self, const char *key, int64_t delta, int64_t *result) {
      return detail::without_exceptions([&] { return of(self)->add(key, delta, result); });
    };
    ops.remove = [](void *self, const char *key) {
      return detail::without_exceptions([&] { return of(self)->remove(key); });
    };
    ops.destroy = [](void *self) { delete of(self); };
    phx_store *out = nullptr;
    const phx_status status = phx_store_wrap(&ops, backend.get(), &out);
    if (status == PHX_OK) static_cast<void>(backend.release());  // the store's now
    return detail::made(status, [&] { return Store(out); });
  }

  Outcome<Store> prefix(const std::string &prefix) const {
    return made([&](phx_store **out) { return phx_store_prefix(get(), prefix.c_str(), out); });
  }
  Store share() const { return Store(phx_store_retain(get())); }  // one more handle of the same store

  Outcome<void> set(const std::string &key, std::string_view value) const {
    return detail::done(phx_store_set(get(), key.c_str(), value.data(), value.size()));
  }
  // Waits until the key is there.
  Outcome<std::string> get(const std::string &key, Milliseconds timeout = {}) const {
    std::string value(64, '\0');
    size_t size = 0;
    phx_status status = PHX_OK;
    for (;;) {
      status = phx_store_get(get(), key.c_str(), value.data(), value.size(), &size, timeout.count());
      if (status != PHX_OK || size <= value.size()) break;
      value.resize(size);
    }
    return detail::made(status, [&] {
      value.resize(size);
      return std::move(value);
    });
  }
  Outcome<void> wait(const std::vector<std::string> &keys, Milliseconds timeout = {}) const {
    std::vector<const char *> pointers;
    for (const std::string &key : keys) pointers.push_back(key.c_str());
    return detail::done(phx_store_wait(get(), pointers.data(), pointers.size(), timeout.count()));
  }
  Outcome<int64_t> add(const std::string &key, int64_t delta) const {
    int64_t result = 0;
    const phx_status status = phx_store_add(get(), key.c_str(), delta, &result);
    return detail::made(status, [&] { return result; });
  }
  Outcome<void> remove(const std::string &key) const { return detail::done(phx_store_remove(get(), key.c_str())); }

  phx_store *get() const { return handle_.get(); }

 private:
  explicit Store(phx_store *store) : handle_(store) {}
  static StoreBackend *of(void *self) { return static_cast<StoreBackend *>(self); }
  template <class Make>
  static Outcome<Store> made(Make make) {
    phx_store *out = nullptr;
    const phx_status status = make(&out);
    return detail::made(status, [&] { return Store(out); });
  }
  detail::Handle<phx_store, phx_store_release> handle_;
};

struct Store::Served {
  Store store;
  uint16_t port;
};
inline Outcome<Store::Served> Store::tcp_serve(const std::string &bind_address, std::string_view token, uint16_t port) {
  phx_store *out = nullptr;
  const phx_status status = phx_store_tcp_serve(bind_address.c_str(), token.data(), token.size(), &port, &out);
  return detail::made(status, [&] { return Served{Store(out), port}; });
}

// ---- work --------------------------------------------------------------------------------------------------------

// What was started. Its buffers are in use until it is complete, so the destructor waits for it, with the default
// timeout, and then nobody hears of its failure: call wait().
class [[nodiscard]] Work {
 public:
  explicit Work(phx_work *work) : handle_(work) {}
  Work(Work &&) noexcept = default;
  Work &operator=(Work &&other) noexcept {
    if (this != &other) {
      settle();
      handle_ = std::move(other.handle_);
    }
    return *this;
  }
  ~Work() { settle(); }

  Outcome<void> wait(Milliseconds timeout = {}) { return detail::done(phx_work_wait(get(), timeout.count())); }
  // Whether it is complete. Never blocks.
  Outcome<bool> test() {
    const phx_status status = phx_work_test(get());
    return detail::made(status, [&] { return status == PHX_OK; });
  }
  Outcome<void> expire(Milliseconds timeout) { return detail::done(phx_work_expire(get(), timeout.count())); }
  // Why it has failed, if it has.
  std::optional<Error> error() const {
    phx_error_info info = PHX_ERROR_INFO_INIT;
    if (phx_work_get_error(get(), &info) != PHX_OK) return std::nullopt;
    return Error(info);
  }
  // The group rank from which a completed receive came.
  Outcome<int32_t> source() const {
    int32_t group_rank = -1;
    const phx_status status = phx_work_get_source(get(), &group_rank);
    return detail::made(status, [&] { return group_rank; });
  }
  // Waits for one of them, and says which. If that one has failed, so does this.
  static Outcome<size_t> wait_any(span<Work> works, Milliseconds timeout = {}) {
    std::vector<phx_work *> pointers;
    for (const Work &work : works) pointers.push_back(work.get());
    size_t index = 0;
    const phx_status status = phx_work_wait_any(pointers.data(), pointers.size(), timeout.count(), &index);
    return detail::made(status, [&] { return index; });
  }
  // Gives the handle up without waiting. The buffers must live until a later call on the group has completed the work.
  void detach() { phx_work_release(handle_.give_up()); }

  phx_work *get() const { return handle_.get(); }

 private:
  void settle() noexcept {
    if (get() != nullptr) static_cast<void>(phx_work_wait(get(), 0));
  }
  detail::Handle<phx_work, phx_work_release> handle_;
};

namespace detail {

// The two ways in which a call is made.
struct Blocking {
  using Type = Outcome<void>;
  template <class Call>
  static Type issue(Call call) {
    return done(call(nullptr));
  }
  static Type refuse(Error error) { return failed<void>(std::move(error)); }
};
struct Started {
  using Type = Outcome<Work>;
  template <class Call>
  static Type issue(Call call) {
    phx_work *work = nullptr;
    const phx_status status = call(&work);
    return made(status, [&] { return Work(work); });
  }
  static Type refuse(Error error) { return failed<Work>(std::move(error)); }
};

// What is wrong with the sizes of a call; empty: nothing.
inline std::string misfit(const ConstBuffer &in, size_t in_parts, const Buffer &out, size_t out_parts) {
  if (in.dtype() != out.dtype())
    return std::string("the input is ") + name_of(in.dtype()) + ", the output " + name_of(out.dtype()) +
           "; give both the same dtype";
  if (in.count() * out_parts != out.count() * in_parts)
    return "the input has " + std::to_string(in.count()) + " elements, the output " + std::to_string(out.count()) +
           "; they must be as " + std::to_string(in_parts) + " to " + std::to_string(out_parts);
  return {};
}
inline std::string misfit(span<const size_t> counts, size_t size, size_t count, const char *which) {
  if (counts.size() != size)
    return "there are " + std::to_string(counts.size()) + " counts for a group of " + std::to_string(size);
  size_t sum = 0;
  for (const size_t each : counts) sum += each;
  if (sum == count) return {};
  return std::string("the counts add up to ") + std::to_string(sum) + ", but the " + which + " has " +
         std::to_string(count) + " elements";
}

// `other`: the dtype of the other side.
template <class B>
std::string misfit(const BlockList<B> &blocks, size_t size, Dtype other) {
  if (blocks.size() != size)
    return "there are " + std::to_string(blocks.size()) + " blocks for a group of " + std::to_string(size);
  if (blocks.is_uniform() && blocks.dtype() == other) return {};
  return std::string("a block is not ") + name_of(other) + ", as the other side is; give all the same dtype";
}

// The collectives of a group, in one of the two ways.
template <class Form>
class Collectives {
 public:
  using Type = typename Form::Type;

  Type barrier(const Options &options = {}) const {
    return call("barrier", options, {}, [&](auto *o, auto **work) { return phx_barrier(group_, o, work); });
  }
  Type all_reduce(ConstBuffer in, Buffer out, Op op = Op::sum, const Options &options = {}) const {
    return call("all_reduce", options, misfit(in, 1, out, 1), [&](auto *o, auto **work) {
      return phx_all_reduce(group_, in.data(), out.data(), in.count(), in.code(), static_cast<phx_op>(op), o, work);
    });
  }
  Type all_gather(ConstBuffer in, Buffer out, const Options &options = {}) const {
    return call("all_gather", options, misfit(in, 1, out, size()), [&](auto *o, auto **work) {
      return phx_all_gather(group_, in.data(), out.data(), in.count(), in.code(), o, work);
    });
  }
  Type all_gather_v(ConstBuffer in, Buffer out, span<const size_t> counts, const Options &options = {}) const {
    return call("all_gather_v", options, misfit(counts, size(), out.count(), "output"), [&](auto *o, auto **work) {
      return phx_all_gather_v(group_, in.data(), out.data(), counts.data(), in.code(), o, work);
    });
  }
  Type reduce_scatter(ConstBuffer in, Buffer out, Op op = Op::sum, const Options &options = {}) const {
    return call("reduce_scatter", options, misfit(in, size(), out, 1), [&](auto *o, auto **work) {
      return phx_reduce_scatter(group_, in.data(), out.data(), out.count(), in.code(), static_cast<phx_op>(op), o,
                                work);
    });
  }
  Type reduce_scatter_v(ConstBuffer in, Buffer out, span<const size_t> counts, Op op = Op::sum,
                        const Options &options = {}) const {
    return call("reduce_scatter_v", options, misfit(counts, size(), in.count(), "input"), [&](auto *o, auto **work) {
      return phx_reduce_scatter_v(group_, in.data(), out.data(), counts.data(), in.code(), static_cast<phx_op>(op), o,
                                  work);
    });
  }
  Type all_to_all(ConstBuffer in, Buffer out, const Options &options = {}) const {
    std::string wrong = misfit(in, 1, out, 1);
    if (wrong.empty() && in.count() % size() != 0)
      wrong = std::to_string(in.count()) + " elements cannot be shared out among " + std::to_string(size()) + " ranks";
    return call("all_to_all", options, std::move(wrong), [&](auto *o, auto **work) {
      return phx_all_to_all(group_, in.data(), out.data(), in.count() / size(), in.code(), o, work);
    });
  }
  Type all_to_all_v(ConstBuffer in, span<const size_t> in_counts, Buffer out, span<const size_t> out_counts,
                    const Options &options = {}) const {
    std::string wrong = misfit(in_counts, size(), in.count(), "input");
    if (wrong.empty()) wrong = misfit(out_counts, size(), out.count(), "output");
    return call("all_to_all_v", options, std::move(wrong), [&](auto *o, auto **work) {
      return phx_all_to_all_v(group_, in.data(), in_counts.data(), out.data(), out_counts.data(), in.code(), o, work);
    });
  }
  Type broadcast(Buffer buffer, int32_t root_group_rank, const Options &options = {}) const {
    return call("broadcast", options, {}, [&](auto *o, auto **work) {
      return phx_broadcast(group_, buffer.data(), buffer.count(), buffer.code(), root_group_rank, o, work);
    });
  }
  // `out` may be empty where this is not the root.
  Type reduce(ConstBuffer in, Buffer out, int32_t root_group_rank, Op op = Op::sum, const Options &options = {}) const {
    const bool root = root_group_rank == phx_group_rank(group_);
    return call("reduce", options, root ? misfit(in, 1, out, 1) : "", [&](auto *o, auto **work) {
      return phx_reduce(group_, in.data(), out.data(), in.count(), in.code(), static_cast<phx_op>(op), root_group_rank,
                        o, work);
    });
  }
  // `out` may be empty where this is not the root.
  Type gather(ConstBuffer in, Buffer out, int32_t root_group_rank, const Options &options = {}) const {
    const bool root = root_group_rank == phx_group_rank(group_);
    return call("gather", options, root ? misfit(in, 1, out, size()) : "", [&](auto *o, auto **work) {
      return phx_gather(group_, in.data(), out.data(), in.count(), in.code(), root_group_rank, o, work);
    });
  }
  // `in` may be empty where this is not the root.
  Type scatter(ConstBuffer in, Buffer out, int32_t root_group_rank, const Options &options = {}) const {
    const bool root = root_group_rank == phx_group_rank(group_);
    return call("scatter", options, root ? misfit(in, size(), out, 1) : "", [&](auto *o, auto **work) {
      return phx_scatter(group_, in.data(), out.data(), out.count(), out.code(), root_group_rank, o, work);
    });
  }

  // The same with each rank's block where it lies.
  Type all_gather_blocks(ConstBuffer in, const Blocks &out, const Options &options = {}) const {
    return call("all_gather", options, misfit(out, size(), in.dtype()), [&](auto *o, auto **work) {
      return phx_all_gather_blocks(group_, in.data(), out.data(), in.code(), o, work);
    });
  }
  Type reduce_scatter_blocks(const ConstBlocks &in, Buffer out, Op op = Op::sum, const Options &options = {}) const {
    return call("reduce_scatter", options, misfit(in, size(), out.dtype()), [&](auto *o, auto **work) {
      return phx_reduce_scatter_blocks(group_, in.data(), out.data(), out.code(), static_cast<phx_op>(op), o, work);
    });
  }
  Type all_to_all_blocks(const ConstBlocks &in, const Blocks &out, const Options &options = {}) const {
    std::string wrong = misfit(in, size(), out.dtype());
    if (wrong.empty()) wrong = misfit(out, size(), in.dtype());
    return call("all_to_all_v", options, std::move(wrong), [&](auto *o, auto **work) {
      return phx_all_to_all_blocks(group_, in.data(), out.data(), in.code(), o, work);
    });
  }
  // `out` may be empty where this is not the root.
  Type gather_blocks(ConstBuffer in, const Blocks &out, int32_t root_group_rank, const Options &options = {}) const {
    const bool root = root_group_rank == phx_group_rank(group_);
    return call("gather", options, root ? misfit(out, size(), in.dtype()) : "", [&](auto *o, auto **work) {
      return phx_gather_blocks(group_, in.data(), out.data(), in.count(), in.code(), root_group_rank, o, work);
    });
  }
  // `in` may be empty where this is not the root.
  Type scatter_blocks(const ConstBlocks &in, Buffer out, int32_t root_group_rank, const Options &options = {}) const {
    const bool root = root_group_rank == phx_group_rank(group_);
    return call("scatter", options, root ? misfit(in, size(), out.dtype()) : "", [&](auto *o, auto **work) {
      return phx_scatter_blocks(group_, in.data(), out.data(), out.count(), out.code(), root_group_rank, o, work);
    });
  }

  // One message. The tags and dtypes of both sides must agree.
  Type send(ConstBuffer in, int32_t peer_group_rank, uint32_t tag = 0, const Options &options = {}) const {
    const phx_options o = options.raw();
    return Form::issue([&](phx_work **work) {
      return phx_send(group_, in.data(), in.count(), in.code(), peer_group_rank, tag, &o, work);
    });
  }
  // From kAnyRank: whoever sends first; Work::source says who that was.
  Type recv(Buffer out, int32_t peer_group_rank, uint32_t tag = 0, const Options &options = {}) const {
    const phx_options o = options.raw();
    return Form::issue([&](phx_work **work) {
      return phx_recv(group_, out.data(), out.count(), out.code(), peer_group_rank, tag, &o, work);
    });
  }

  // Several calls as one: see Calls.
  Type coalesced(span<const phx_call> calls, const Options &options = {}) const {
    return call("coalesced", options, {},
                [&](auto *o, auto **work) { return phx_coalesced(group_, calls.data(), calls.size(), o, work); });
  }

 protected:
  explicit Collectives(phx_group *group) : group_(group) {}
  size_t size() const { return static_cast<size_t>(phx_group_size(group_)); }
  phx_group *group_;

 private:
  template <class Call>
  Type call(const char *operation, const Options &options, std::string wrong, Call issue) const {
    if (!wrong.empty()) {
      wrong = std::string(operation) + ": " + wrong;
      static_cast<void>(phx_group_refuse(group_, options.channel, wrong.c_str()));
      return Form::refuse(Error(PHX_ERR_INVALID, operation, wrong));
    }
    const phx_options o = options.raw();
    return Form::issue([&](phx_work **work) { return issue(&o, work); });
  }
};

// The collectives of symmetric memory, whose input lies in each rank's block.
template <class Form>
class SymmCollectives;

}  // namespace detail

// A list of calls for Group::coalesced. Buffers must live until those are complete.
class Calls {
 public:
  Calls &all_reduce(ConstBuffer in, Buffer out, Op op = Op::sum) {
    return add(PHX_CALL_ALL_REDUCE, in, out, in.count(), op, 0);
  }
  Calls &all_gather(ConstBuffer in, Buffer out) { return add(PHX_CALL_ALL_GATHER, in, out, in.count(), {}, 0); }
  Calls &reduce_scatter(ConstBuffer in, Buffer out, Op op = Op::sum) {
    return add(PHX_CALL_REDUCE_SCATTER, in, out, out.count(), op, 0);
  }
  // Blocks of `count` elements.
  Calls &all_to_all(ConstBuffer in, Buffer out, size_t count) {
    return add(PHX_CALL_ALL_TO_ALL, in, out, count, {}, 0);
  }
  Calls &broadcast(Buffer buffer, int32_t root_group_rank) {
    const ConstBuffer in(buffer.data(), buffer.count(), buffer.dtype());
    return add(PHX_CALL_BROADCAST, in, buffer, buffer.count(), {}, root_group_rank);
  }
  Calls &reduce(ConstBuffer in, Buffer out, int32_t root_group_rank, Op op = Op::sum) {
    return add(PHX_CALL_REDUCE, in, out, in.count(), op, root_group_rank);
  }
  Calls &gather(ConstBuffer in, Buffer out, int32_t root_group_rank) {
    return add(PHX_CALL_GATHER, in, out, in.count(), {}, root_group_rank);
  }
  Calls &scatter(ConstBuffer in, Buffer out, int32_t root_group_rank) {
    const ConstBuffer given(in.data(), in.count(), out.dtype());
    return add(PHX_CALL_SCATTER, given, out, out.count(), {}, root_group_rank);
  }
  const phx_call *data() const { return calls_.data(); }
  size_t size() const { return calls_.size(); }

 private:
  Calls &add(int32_t kind, ConstBuffer in, Buffer out, size_t count, std::optional<Op> op, int32_t root) {
    phx_call call = PHX_CALL_INIT;
    call.kind = kind;
    call.in = in.data();
    call.out = out.data();
    call.count = count;
    call.dtype = in.code();
    call.op = op ? static_cast<phx_op>(*op) : 0;
    call.root_group_rank = root;
    calls_.push_back(call);
    return *this;
  }
  std::vector<phx_call> calls_;
};

// A list of messages for Group::messages.
class Messages {
 public:
  Messages &send(ConstBuffer in, int32_t peer_group_rank, uint32_t tag = 0) {
    return add(PHX_MESSAGE_SEND, const_cast<void *>(in.data()), in.count(), in.code(), peer_group_rank, tag);
  }
  Messages &recv(Buffer out, int32_t peer_group_rank, uint32_t tag = 0) {
    return add(PHX_MESSAGE_RECV, out.data(), out.count(), out.code(), peer_group_rank, tag);
  }
  const phx_message *data() const { return messages_.data(); }
  size_t size() const { return messages_.size(); }

 private:
  Messages &add(int32_t kind, void *buffer, size_t count, phx_dtype dtype, int32_t peer, uint32_t tag) {
    phx_message message = PHX_MESSAGE_INIT;
    message.kind = kind;
    message.buffer = buffer;
    message.count = count;
    message.dtype = dtype;
    message.peer_group_rank = peer;
    message.tag = tag;
    messages_.push_back(message);
    return *this;
  }
  std::vector<phx_message> messages_;
};

// ---- memory ------------------------------------------------------------------------------------------------------

// A block of a world's memory. It keeps the handle of the world, and is freed at the end.
class Memory {
 public:
  Memory(Memory &&other) noexcept : world_(std::move(other.world_)), data_(std::exchange(other.data_, nullptr)) {}
  Memory &operator=(Memory &&other) noexcept {
    if (this != &other) {
      drop();
      world_ = std::move(other.world_);
      data_ = std::exchange(other.data_, nullptr);
    }
    return *this;
  }
  ~Memory() { drop(); }

  void *data() const { return data_; }
  Outcome<phx_mem_info> info() const {
    phx_mem_info info = PHX_MEM_INFO_INIT;
    const phx_status status = phx_mem_find(world_.get(), data_, &info);
    return detail::made(status, [&] { return info; });
  }
  // The first `count` elements of it.
  template <class T>
  span<T> as(size_t count) const {
    return {static_cast<T *>(data_), count};
  }
  // One more owner of the same block.
  Outcome<Memory> share() const {
    const phx_status status = phx_mem_retain(world_.get(), data_);
    return detail::made(status, [&] { return Memory(world_, data_); });
  }

 private:
  friend class Group;
  friend class World;
  Memory(std::shared_ptr<phx_world> world, void *data) : world_(std::move(world)), data_(data) {}
  void drop() noexcept {
    if (data_ != nullptr) static_cast<void>(phx_mem_free(world_.get(), std::exchange(data_, nullptr)));
  }
  std::shared_ptr<phx_world> world_;
  void *data_;
};

// ---- symmetric memory --------------------------------------------------------------------------------------------

// Where the input of a collective on symmetric memory lies in each rank's block; in bytes from its start.
struct Region {
  size_t offset;
  size_t count;
  Dtype dtype;
};
template <class T>
constexpr Region region(size_t count, size_t offset = 0) {
  return {offset, count, DtypeOf<T>::value};
}

namespace detail {

template <class Form>
class SymmCollectives {
 public:
  using Type = typename Form::Type;

  // An empty `out` means in place.
  Type all_reduce(Region in, Buffer out = {}, Op op = Op::sum, const Options &options = {}) const {
    void *const to = out.count() == 0 && in.count != 0 ? static_cast<char *>(own_block()) + in.offset : out.data();
    return call(options, [&](auto *o, auto **work) {
      return phx_symm_all_reduce(symm_, in.offset, to, in.count, code(in), static_cast<phx_op>(op), o, work);
    });
  }
  // Gathers the `in` of every rank; `out` has room for all of them, in the order of the group.
  Type all_gather(Region in, Buffer out, const Options &options = {}) const {
    return call(options, [&](auto *o, auto **work) {
      return phx_symm_all_gather(symm_, in.offset, out.data(), in.count, code(in), o, work);
    });
  }
  Type all_gather_v(Region in, Buffer out, span<const size_t> counts, const Options &options = {}) const {
    return call(options, [&](auto *o, auto **work) {
      return phx_symm_all_gather_v(symm_, in.offset, out.data(), counts.data(), code(in), o, work);
    });
  }
  // in.count: of the whole input; each rank gets its part of it.
  Type reduce_scatter(Region in, Buffer out, Op op = Op::sum, const Options &options = {}) const {
    return call(options, [&](auto *o, auto **work) {
      return phx_symm_reduce_scatter(symm_, in.offset, out.data(), out.count(), code(in), static_cast<phx_op>(op), o,
                                     work);
    });
  }
  Type reduce_scatter_v(Region in, Buffer out, span<const size_t> counts, Op op = Op::sum,
                        const Options &options = {}) const {
    return call(options, [&](auto *o, auto **work) {
      return phx_symm_reduce_scatter_v(symm_, in.offset, out.data(), counts.data(), code(in), static_cast<phx_op>(op),
                                       o, work);
    });
  }
  // in.count: of one block.
  Type all_to_all(Region in, Buffer out, const Options &options = {}) const {
    return call(options, [&](auto *o, auto **work) {
      return phx_symm_all_to_all(symm_, in.offset, out.data(), in.count, code(in), o, work);
    });
  }
  Type all_to_all_v(Region in, span<const size_t> in_counts, Buffer out, span<const size_t> out_counts,
                    const Options &options = {}) const {
    return call(options, [&](auto *o, auto **work) {
      return phx_symm_all_to_all_v(symm_, in.offset, in_counts.data(), out.data(), out_counts.data(), code(in), o,
                                   work);
    });
  }
  Type broadcast(Region in, int32_t root_group_rank, const Options &options = {}) const {
    return call(options, [&](auto *o, auto **work) {
      return phx_symm_broadcast(symm_, in.offset, in.count, code(in), root_group_rank, o, work);
    });
  }
  Type reduce(Region in, Buffer out, int32_t root_group_rank, Op op = Op::sum, const Options &options = {}) const {
    return call(options, [&](auto *o, auto **work) {
      return phx_symm_reduce(symm_, in.offset, out.data(), in.count, code(in), static_cast<phx_op>(op), root_group_rank,
                             o, work);
    });
  }
  Type gather(Region in, Buffer out, int32_t root_group_rank, const Options &options = {}) const {
    return call(options, [&](auto *o, auto **work) {
      return phx_symm_gather(symm_, in.offset, out.data(), in.count, code(in), root_group_rank, o, work);
    });
  }
  // in.count: of what each rank gets.
  Type scatter(Region in, Buffer out, int32_t root_group_rank, const Options &options = {}) const {
    return call(options, [&](auto *o, auto **work) {
      return phx_symm_scatter(symm_, in.offset, out.data(), in.count, code(in), root_group_rank, o, work);
    });
  }

 protected:
  explicit SymmCollectives(phx_symm *symm) : symm_(symm) {}
  phx_symm *symm_;

 private:
  static phx_dtype code(const Region &in) { return static_cast<phx_dtype>(in.dtype); }
  void *own_block() const {
    phx_symm_info info = PHX_SYMM_INFO_INIT;
    return phx_symm_get_info(symm_, &info) == PHX_OK ? info.base : nullptr;
  }
  template <class Call>
  Type call(const Options &options, Call issue) const {
    const phx_options o = options.raw();
    return Form::issue([&](phx_work **work) { return issue(&o, work); });
  }
};

}  // namespace detail

// One allocation as every rank of a group sees it.
class Symm : public detail::SymmCollectives<detail::Blocking> {
 public:
  Symm(Symm &&other) noexcept : SymmCollectives(other.symm_), handle_(std::move(other.handle_)) {
    other.symm_ = nullptr;
  }
  Symm &operator=(Symm &&other) noexcept {
    handle_ = std::move(other.handle_);
    symm_ = std::exchange(other.symm_, nullptr);
    return *this;
  }

  Outcome<phx_symm_info> info() const {
    phx_symm_info info = PHX_SYMM_INFO_INIT;
    const phx_status status = phx_symm_get_info(get(), &info);
    return detail::made(status, [&] { return info; });
  }
  // The same collectives, which return at once.
  class Starter : public detail::SymmCollectives<detail::Started> {
    friend class Symm;
    explicit Starter(phx_symm *symm) : SymmCollectives(symm) {}
  };
  Starter start() const { return Starter(get()); }

  // The block of a rank.
  Outcome<span<std::byte>> block(int32_t group_rank) const { return block_as<std::byte>(group_rank); }
  // The elements of it.
  template <class T>
  Outcome<span<T>> block_as(int32_t group_rank) const {
    phx_symm_info info = PHX_SYMM_INFO_INIT;
    const phx_status status = phx_symm_get_info(get(), &info);
    void *const data = status == PHX_OK ? phx_symm_buffer(get(), group_rank) : nullptr;
    const phx_status found = status == PHX_OK && data == nullptr ? PHX_ERR_INVALID : status;
    return detail::made(found, [&] { return span<T>(static_cast<T *>(data), info.size / sizeof(T)); });
  }
  // This rank's own.
  template <class T>
  Outcome<span<T>> own() const {
    phx_symm_info info = PHX_SYMM_INFO_INIT;
    const phx_status status = phx_symm_get_info(get(), &info);
    return detail::made(status, [&] { return span<T>(static_cast<T *>(info.base), info.size / sizeof(T)); });
  }
  // The signal pad of a rank: word [r * pad_stride + channel] is written by group rank r alone.
  Outcome<span<uint32_t>> signal_pad(int32_t group_rank) const {
    phx_symm_info info = PHX_SYMM_INFO_INIT;
    const phx_status status = phx_symm_get_info(get(), &info);
    uint32_t *const pad = status == PHX_OK ? phx_symm_signal_pad(get(), group_rank) : nullptr;
    const phx_status found = status == PHX_OK && pad == nullptr ? PHX_ERR_INVALID : status;
    return detail::made(found, [&] { return span<uint32_t>(pad, info.signal_pad_bytes / sizeof(uint32_t)); });
  }
  Outcome<void> put_signal(int32_t group_rank, uint32_t channel = 0) const {
    return detail::done(phx_symm_put_signal(get(), group_rank, channel));
  }
  Outcome<void> wait_signal(int32_t group_rank, uint32_t channel = 0, Milliseconds timeout = {}) const {
    return detail::done(phx_symm_wait_signal(get(), group_rank, channel, timeout.count()));
  }
  Outcome<void> barrier(uint32_t channel = 0, Milliseconds timeout = {}) const {
    return detail::done(phx_symm_barrier(get(), channel, timeout.count()));
  }
  // For kernels: phalanx/device.h. Lives as long as this.
  Outcome<phx_team> team() const {
    phx_team team = PHX_TEAM_INIT;
    const phx_status status = phx_symm_get_team(get(), &team);
    return detail::made(status, [&] { return team; });
  }

  // The same part of every rank's block, one after another by group rank; unmapped at the end.
  class Gathered {
   public:
    Gathered(Gathered &&other) noexcept
        : handle_(std::move(other.handle_)), range_(std::exchange(other.range_, span<std::byte>())) {}
    Gathered &operator=(Gathered &&other) noexcept {
      if (this != &other) {
        unmap();
        handle_ = std::move(other.handle_);
        range_ = std::exchange(other.range_, span<std::byte>());
      }
      return *this;
    }
    ~Gathered() { unmap(); }
    span<std::byte> bytes() const { return range_; }
    template <class T>
    span<T> as() const {
      return {reinterpret_cast<T *>(range_.data()), range_.size() / sizeof(T)};
    }

   private:
    friend class Symm;
    Gathered(phx_symm *symm, span<std::byte> range) : handle_(symm), range_(range) {}
    void unmap() noexcept {
      if (range_.data() != nullptr) static_cast<void>(phx_symm_unmap_gathered(handle_.get(), range_.data()));
    }
    detail::Handle<phx_symm, phx_symm_release> handle_;
    span<std::byte> range_;
  };
  Outcome<Gathered> map_gathered(size_t offset, size_t bytes) const {
    void *out = nullptr;
    phx_symm_info info = PHX_SYMM_INFO_INIT;
    phx_status status = phx_symm_get_info(get(), &info);
    if (status == PHX_OK) status = phx_symm_map_gathered(get(), offset, bytes, &out);
    return detail::made(status, [&] {
      const size_t all = bytes * static_cast<size_t>(info.group_size);
      return Gathered(phx_symm_retain(get()), {static_cast<std::byte *>(out), all});
    });
  }

  phx_symm *get() const { return handle_.get(); }

 private:
  friend class Group;
  explicit Symm(phx_symm *symm) : SymmCollectives(symm), handle_(symm) {}
  detail::Handle<phx_symm, phx_symm_release> handle_;
};

// ---- windows -----------------------------------------------------------------------------------------------------

// Memory of each rank of a group in which the others write and read without a call on its side. Offsets are in bytes.
class Window {
 public:
  // Writes into the window of a rank, and then counts one signal there if `signal` is true.
  Outcome<void> put(int32_t group_rank, size_t offset, ConstBuffer data, bool signal = false,
                    Milliseconds timeout = {}) const {
    return detail::done(phx_window_put(get(), group_rank, offset, data.data(), data.count() * size_of(data.dtype()),
                                       signal, timeout.count()));
  }
  // The signal alone.
  Outcome<void> put_signal(int32_t group_rank, Milliseconds timeout = {}) const {
    return detail::done(phx_window_put(get(), group_rank, 0, nullptr, 0, 1, timeout.count()));
  }
  Outcome<void> read(int32_t group_rank, size_t offset, Buffer to, Milliseconds timeout = {}) const {
    return detail::done(
        phx_window_get(get(), group_rank, offset, to.data(), to.count() * size_of(to.dtype()), timeout.count()));
  }
  Outcome<void> wait_signal(int32_t group_rank, Milliseconds timeout = {}) const {
    return detail::done(phx_window_wait_signal(get(), group_rank, timeout.count()));
  }
  // How many signals of a rank have come and were not taken.
  Outcome<uint32_t> signals(int32_t group_rank) const {
    uint32_t out = 0;
    const phx_status status = phx_window_get_signals(get(), group_rank, &out);
    return detail::made(status, [&] { return out; });
  }
  Outcome<void> flush(Milliseconds timeout = {}) const {
    return detail::done(phx_window_flush(get(), timeout.count()));
  }
  // The window of a rank of this host, as it is mapped here.
  Outcome<std::byte *> memory(int32_t group_rank) const {
    auto *const found = static_cast<std::byte *>(phx_window_memory(get(), group_rank));
    phx_error_info info = PHX_ERROR_INFO_INIT;
    const bool known = found != nullptr || phx_last_error_info(&info) != PHX_OK;
    return detail::made(known ? PHX_OK : info.status, [&] { return found; });
  }
  phx_window *get() const { return handle_.get(); }

 private:
  friend class Group;
  explicit Window(phx_window *window) : handle_(window) {}
  detail::Handle<phx_window, phx_window_release> handle_;
};

// ---- groups ------------------------------------------------------------------------------------------------------

class Group : public detail::Collectives<detail::Blocking> {
 public:
  Group(Group &&other) noexcept : Collectives(other.group_), handle_(std::move(other.handle_)) {
    other.group_ = nullptr;
  }
  Group &operator=(Group &&other) noexcept {
    handle_ = std::move(other.handle_);
    group_ = std::exchange(other.group_, nullptr);
    return *this;
  }
  Group share() const { return Group(phx_group_retain(get())); }  // one more handle of the same group

  int32_t rank() const { return phx_group_rank(get()); }
  int32_t size() const { return phx_group_size(get()); }
  // Its strings and lists live as long as the group.
  Outcome<phx_group_info> info() const {
    phx_group_info info = PHX_GROUP_INFO_INIT;
    const phx_status status = phx_group_get_info(get(), &info);
    return detail::made(status, [&] { return info; });
  }
  // The first cause of its failure, if it has failed.
  std::optional<Error> error() const {
    phx_error_info info = PHX_ERROR_INFO_INIT;
    if (phx_group_get_error(get(), &info) != PHX_OK) return std::nullopt;
    return Error(info);
  }
  Outcome<void> revoke(const std::string &reason) const {
    return detail::done(phx_group_revoke(get(), reason.c_str()));
  }
  Outcome<void> refuse(const std::string &why, uint32_t channel = 0) const {
    return detail::done(phx_group_refuse(get(), channel, why.c_str()));
  }
  Outcome<void> set_timeout(Milliseconds timeout) const {
    return detail::done(phx_group_set_timeout(get(), timeout.count()));
  }

  // The same collectives and messages, which return at once.
  class Starter : public detail::Collectives<detail::Started> {
    friend class Group;
    explicit Starter(phx_group *group) : Collectives(group) {}
  };
  Starter start() const { return Starter(get()); }

  // All at once; returns when all are complete.
  Outcome<void> messages(const Messages &list, const Options &options = {}) const {
    const phx_options raw = options.raw();
    return detail::done(phx_messages(get(), list.data(), list.size(), &raw));
  }

  // Nothing for a rank that gives a negative color. name empty: that of this group.
  Outcome<std::optional<Group>> split(int32_t color, int32_t key = 0, const std::string &name = {},
                                      Milliseconds timeout = {}) const {
    phx_group *out = nullptr;
    const phx_status status =
        phx_group_split(get(), color, key, name.empty() ? nullptr : name.c_str(), timeout.count(), &out);
    return detail::made(status, [&] { return out == nullptr ? std::nullopt : std::optional<Group>(Group(out)); });
  }
  // Makes a group of the ranks that are alive, also when this one has failed.
  Outcome<Group> shrink(const std::string &name = {}, Milliseconds timeout = {}) const {
    phx_group *out = nullptr;
    const phx_status status = phx_group_shrink(get(), name.empty() ? nullptr : name.c_str(), timeout.count(), &out);
    return detail::made(status, [&] { return Group(out); });
  }
  struct Agreement {
    uint64_t bits;            // the AND of what the ranks gave that took part
    std::vector<bool> alive;  // by group rank: who took part
  };
  Outcome<Agreement> agree(uint64_t bits, Milliseconds timeout = {}) const {
    std::vector<uint8_t> alive(static_cast<size_t>(size()));
    const phx_status status = phx_group_agree(get(), &bits, alive.data(), timeout.count());
    return detail::made(status, [&] { return Agreement{bits, {alive.begin(), alive.end()}}; });
  }

  // New symmetric memory, of so many bytes on each rank.
  Outcome<Symm> allocate(size_t bytes, phx_device device = kCpu, Milliseconds timeout = {}) const {
    return symm([&](phx_symm **out) { return phx_symm_alloc(get(), &device, bytes, timeout.count(), out); });
  }
  // Makes blocks symmetric that the ranks have allocated.
  Outcome<Symm> rendezvous(const Memory &memory, Milliseconds timeout = {}) const {
    return symm([&](phx_symm **out) { return phx_symm_rendezvous(get(), memory.data(), timeout.count(), out); });
  }
  Outcome<Symm> find(const void *pointer) const {
    return symm([&](phx_symm **out) { return phx_symm_find(get(), pointer, out); });
  }
  // Offers `bytes` bytes of the memory, from `offset` on, to the others.
  Outcome<Window> window(const Memory &memory, size_t offset, size_t bytes, Milliseconds timeout = {}) const {
    phx_window *out = nullptr;
    const phx_status status = phx_window_create(
        get(), memory.world_.get(), static_cast<std::byte *>(memory.data()) + offset, bytes, timeout.count(), &out);
    return detail::made(status, [&] { return Window(out); });
  }

  phx_group *get() const { return handle_.get(); }

 private:
  friend class World;
  explicit Group(phx_group *group) : Collectives(group), handle_(group) {}
  template <class Make>
  static Outcome<Symm> symm(Make make) {
    phx_symm *out = nullptr;
    const phx_status status = make(&out);
    return detail::made(status, [&] { return Symm(out); });
  }
  detail::Handle<phx_group, phx_group_release> handle_;
};

// ---- worlds ------------------------------------------------------------------------------------------------------

// phx_world_params but for rank, size and store.
struct GroupOptions {
  Milliseconds timeout{0};
  int32_t reduction_order = PHX_REDUCTION_ORDER_DEFAULT;
};

struct WorldOptions {
  Milliseconds timeout{0};
  uint64_t host_id = 0;
  uint64_t staging_bytes = 0;
  uint32_t signal_channels = 0;
  uint32_t channels = 0;
  uint32_t recorder_entries = 0;
  bool progress = false;  // PHX_WORLD_PROGRESS
  std::string job;
};

// This rank's context. The destructor leaves the world; blocks of memory may outlive it.
class World {
 public:
  // The store is kept as long as the world needs it.
  static Outcome<World> create(int32_t rank, int32_t size, const Store &store, const WorldOptions &options = {}) {
    return create(rank, size, store.get(), options);
  }
  // A world of one.
  static Outcome<World> alone(const WorldOptions &options = {}) { return create(0, 1, nullptr, options); }
  World(World &&) noexcept = default;
  World &operator=(World &&other) noexcept {
    if (this != &other) {
      leave();
      world_ = std::move(other.world_);
    }
    return *this;
  }
  ~World() { leave(); }

  int32_t rank() const { return phx_world_rank(get()); }
  int32_t size() const { return phx_world_size(get()); }
  uint64_t host_id() const { return phx_world_host_id(get()); }
  Outcome<void> set_timeout(Milliseconds timeout) const {
    return detail::done(phx_world_set_timeout(get(), timeout.count()));
  }
  Outcome<void> check() const { return detail::done(phx_world_check(get())); }
  Outcome<void> check_peer(int32_t peer) const { return detail::done(phx_world_check_peer(get(), peer)); }
  Outcome<void> abort(const std::string &reason) const { return detail::done(phx_world_abort(get(), reason.c_str())); }
  Outcome<void> finalize() const { return detail::done(phx_world_finalize(get())); }
  // The flight recorder, as JSON.
  Outcome<std::string> dump() const {
    std::string json(size_t{1} << 16, '\0');
    size_t length = 0;
    phx_status status = PHX_OK;
    for (;;) {
      status = phx_world_dump(get(), json.data(), json.size(), &length);
      if (status != PHX_OK || length < json.size()) break;
      json.resize(2 * length + 1);
    }
    return detail::made(status, [&] {
      json.resize(length);
      return std::move(json);
    });
  }

  // A group of these ranks, or of all.
  Outcome<Group> group(const std::string &name, span<const int32_t> ranks, const GroupOptions &options) const {
    return make_group([&](phx_group **out) {
      const phx_group_options how = c_options(options);
      return phx_group_create_with_options(get(), name.c_str(), ranks.data(), static_cast<int32_t>(ranks.size()), &how,
                                           options.timeout.count(), out);
    });
  }
  Outcome<Group> group(const std::string &name, span<const int32_t> ranks, Milliseconds timeout = {}) const {
    return group(name, ranks, GroupOptions{timeout});
  }
  Outcome<Group> group(const std::string &name, const GroupOptions &options) const {
    std::vector<int32_t> all;
    for (int32_t i = 0; i < size(); ++i) all.push_back(i);
    return group(name, all, options);
  }
  Outcome<Group> group(const std::string &name, Milliseconds timeout = {}) const {
    return group(name, GroupOptions{timeout});
  }
  // A group that need not be part of the world.
  Outcome<Group> attach(const std::string &name, int32_t group_rank, int32_t group_size, const Store &store,
                        const GroupOptions &options) const {
    return make_group([&](phx_group **out) {
      const phx_group_options how = c_options(options);
      return phx_group_attach_with_options(get(), name.c_str(), group_rank, group_size, store.get(), &how,
                                           options.timeout.count(), out);
    });
  }
  Outcome<Group> attach(const std::string &name, int32_t group_rank, int32_t group_size, const Store &store,
                        Milliseconds timeout = {}) const {
    return attach(name, group_rank, group_size, store, GroupOptions{timeout});
  }

  Outcome<Memory> allocate(size_t bytes, phx_device device = kCpu) const {
    return memory([&](void **out) { return phx_mem_alloc(get(), &device, bytes, out); });
  }
  // Kept when freed: the same id gives the same address again. scope: the name of a group, or empty.
  Outcome<Memory> allocate_persistent(size_t bytes, uint64_t id, const std::string &scope = {},
                                      phx_device device = kCpu) const {
    return memory([&](void **out) {
      return phx_mem_alloc_persistent(get(), &device, bytes, scope.empty() ? nullptr : scope.c_str(), id, out);
    });
  }
  Outcome<void> drop_persistent(uint64_t id, const std::string &scope = {}, phx_device device = kCpu) const {
    return detail::done(phx_mem_drop(get(), &device, scope.empty() ? nullptr : scope.c_str(), id));
  }
  Outcome<phx_mem_info> find(const void *pointer) const {
    phx_mem_info info = PHX_MEM_INFO_INIT;
    const phx_status status = phx_mem_find(get(), pointer, &info);
    return detail::made(status, [&] { return info; });
  }
  struct Usage {
    size_t blocks;
    size_t bytes;
  };
  Outcome<Usage> usage() const {
    Usage usage{};
    const phx_status status = phx_mem_count(get(), &usage.blocks, &usage.bytes);
    return detail::made(status, [&] { return usage; });
  }
  // The allocator of a device type, as a table of C functions, which take `self`.
  Outcome<void> register_allocator(phx_device_type type, const phx_allocator_ops &ops, void *self) const {
    return detail::done(phx_allocator_register(get(), type, &ops, self));
  }
  Outcome<void> unregister_allocator(phx_device_type type) const {
    return detail::done(phx_allocator_unregister(get(), type));
  }

  phx_world *get() const { return world_.get(); }

 private:
  explicit World(phx_world *world) : world_(world, phx_world_release) {}
  static Outcome<World> create(int32_t rank, int32_t size, phx_store *store, const WorldOptions &options) {
    phx_world_params params = PHX_WORLD_PARAMS_INIT;
    params.rank = rank;
    params.size = size;
    params.flags = options.progress ? uint32_t{PHX_WORLD_PROGRESS} : 0;
    params.store = store;
    params.timeout_ms = options.timeout.count();
    params.host_id = options.host_id;
    params.staging_bytes = options.staging_bytes;
    params.signal_channels = options.signal_channels;
    params.channels = options.channels;
    params.recorder_entries = options.recorder_entries;
    params.job = options.job.empty() ? nullptr : options.job.c_str();
    phx_world *out = nullptr;
    const phx_status status = phx_world_create(&params, &out);
    return detail::made(status, [&] { return World(out); });
  }
  static phx_group_options c_options(const GroupOptions &options) {
    phx_group_options made = PHX_GROUP_OPTIONS_INIT;
    made.reduction_order = options.reduction_order;
    return made;
  }
  template <class Make>
  static Outcome<Group> make_group(Make make) {
    phx_group *out = nullptr;
    const phx_status status = make(&out);
    return detail::made(status, [&] { return Group(out); });
  }
  template <class Make>
  Outcome<Memory> memory(Make make) const {
    void *out = nullptr;
    const phx_status status = make(&out);
    return detail::made(status, [&] { return Memory(world_, out); });
  }
  void leave() noexcept {
    if (world_ != nullptr) static_cast<void>(phx_world_finalize(world_.get()));
  }
  std::shared_ptr<phx_world> world_;  // shared with blocks of memory
};

}  // inline namespace
}  // namespace phalanx

#endif
