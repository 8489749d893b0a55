// phx_random_*: checks the arguments and computes the settings of the kernels.
#include <cmath>

#include "api/entry.h"
#include "gpu/random.h"
#include "kernels/random.h"
#include "kernels/random_elements.h"

using namespace phx;
using namespace phx::random;

namespace {

// Rounds a value to the type. One that is too large becomes infinite, which the checks refuse.
double rounded(double value, int32_t dtype) {
  const float real = static_cast<float>(value);
  switch (dtype) {
    case PHX_DTYPE_F64: return value;
    case PHX_DTYPE_F16: return kernels::Element<kernels::F16>::widen(f16_of(real));
    case PHX_DTYPE_BF16: return kernels::Element<kernels::BF16>::widen(bf16_of(real));
    default: return real;
  }
}

struct Format {
  int bits, least;  // of the significand; and the exponent of the smallest normal number
};
Format format_of(int32_t dtype) {
  switch (dtype) {
    case PHX_DTYPE_F16: return {11, -14};
    case PHX_DTYPE_BF16: return {8, -126};
    case PHX_DTYPE_F32: return {24, -126};
    default: return {53, -1022};
  }
}

// The largest number of the type that is less than `value`, which is itself a number of the type.
double below(double value, int32_t dtype) {
  const Format format = format_of(dtype);
  int exponent = 0;
  const double significand = std::frexp(value, &exponent);  // in [1/2, 1)
  if (value == 0) exponent = format.least + 1;
  if (significand == 0.5) --exponent;  // the numbers below a power of two are twice as dense
  if (exponent < format.least + 1) exponent = format.least + 1;
  return value - std::ldexp(1.0, exponent - format.bits);
}

phx_status settings_of(int32_t kind, int32_t dtype, double a, double b, Settings *settings, const char *operation) {
  switch (kind) {
    case PHX_RANDOM_UNIFORM: {
      const double low = rounded(a, dtype), high = rounded(b, dtype), width = rounded(high - low, dtype);
      if (!(a <= b) || !std::isfinite(width))
        return fail(PHX_ERR_INVALID, operation,
                    "uniform numbers of %s in [%g, %g): a must not be above b, and b - a must be finite",
                    phx_dtype_name(dtype), a, b);
      *settings = {low, width, low < high ? below(high, dtype) : low, 0, 0, 0};
      return PHX_OK;
    }
    case PHX_RANDOM_NORMAL:
    case PHX_RANDOM_LOG_NORMAL:
      if (!(b >= 0))
        return fail(PHX_ERR_INVALID, operation, "the standard deviation, b, is %g; it must be 0 or more", b);
      *settings = {a, b, 0, 0, 0, 0};
      return PHX_OK;
    case PHX_RANDOM_CAUCHY:
      if (!(b > 0)) return fail(PHX_ERR_INVALID, operation, "the scale, b, is %g; it must be above 0", b);
      *settings = {a, b, 0, 0, 0, 0};
      return PHX_OK;
    case PHX_RANDOM_EXPONENTIAL:
      if (!(a > 0)) return fail(PHX_ERR_INVALID, operation, "the rate, a, is %g; it must be above 0", a);
      *settings = {0, 1 / a, std::ldexp(1.0, dtype == PHX_DTYPE_F16 ? -24 : format_of(dtype).least), 0, 0, 0};
      return PHX_OK;
    case PHX_RANDOM_BERNOULLI:
      if (!(a >= 0 && a <= 1))
        return fail(PHX_ERR_INVALID, operation, "the probability, a, is %g; it must be in [0, 1]", a);
      *settings = {0, 1, 0, static_cast<uint64_t>(std::nearbyint(std::ldexp(a, 32))), 0, 0};
      return PHX_OK;
    default: *settings = {}; return PHX_OK;
  }
}

// Where the elements are written: to host memory, or to memory of a GPU on a stream.
struct Target {
  void *out;
  const phx_device *device;
  void *stream;
};

phx_status fill(const char *operation, int32_t kind, const Target &target, int32_t dtype, uint64_t key,
                const Settings &settings, const Box &box) {
  const FillFn kernel = find_fill(kind, dtype);
  if (kernel == nullptr)
    return fail(PHX_ERR_UNSUPPORTED, operation, "no kind %d for dtype %s (%d); see PHX_RANDOM_* in phalanx.h",
                kind < kNarrowIntegers ? kind : 0, phx_dtype_name(dtype), dtype);
  PHX_TRY(check_box(box, target.out, operation));
  const int32_t type = target.device == nullptr ? PHX_DEVICE_CPU : target.device->type;
  if (type == PHX_DEVICE_CUDA)
    return fill_on_gpu(operation, *target.device, target.stream, kind, dtype, target.out, key, settings, box);
  if (type != PHX_DEVICE_CPU)
    return fail(PHX_ERR_INVALID, operation, "unknown device type %d; use PHX_DEVICE_CPU or PHX_DEVICE_CUDA", type);
  if (target.stream != nullptr)
    return fail(PHX_ERR_INVALID, operation, "a stream is given, but the memory is not on a GPU; set stream to NULL");
  fill_box(kernel, target.out, phx_dtype_size(dtype), key, settings, box);
  return PHX_OK;
}

phx_status fill_kind(const char *operation, const Target &target, int32_t dtype, int32_t kind, double a, double b,
                     uint64_t key, const Box &box) {
  return guarded(operation, [&]() -> phx_status {
    if (kind < PHX_RANDOM_BITS || kind > PHX_RANDOM_LOG_NORMAL)
      return fail(PHX_ERR_INVALID, operation, "unknown kind %d; use a PHX_RANDOM_* constant", kind);
    Settings settings;
    const phx_status status = settings_of(kind, dtype, a, b, &settings, operation);
    return status != PHX_OK ? status : fill(operation, kind, target, dtype, key, settings, box);
  });
}

// The largest range that is drawn from 32 bits. In larger ones it would show that some numbers get one of the 2^32
// words more than others.
constexpr uint64_t kNarrow = 1 << 16;

phx_status fill_integers(const char *operation, const Target &target, int32_t dtype, int64_t low, uint64_t range,
                         uint64_t key, const Box &box) {
  Settings settings;
  settings.low = low;
  settings.range = range;
  const int32_t kind = range != 0 && range <= kNarrow ? kNarrowIntegers : kWideIntegers;
  return guarded(operation, [&] { return fill(operation, kind, target, dtype, key, settings, box); });
}

}  // namespace

extern "C" {

phx_status phx_random_fill(void *out, int32_t dtype, int32_t kind, double a, double b, uint64_t key, uint64_t first,
                           int32_t ndim, const int64_t *sizes, const int64_t *index_strides,
                           const int64_t *out_strides) {
  return fill_kind("random_fill", {out, nullptr, nullptr}, dtype, kind, a, b, key,
                   {first, ndim, sizes, index_strides, out_strides});
}

phx_status phx_random_integers(void *out, int32_t dtype, int64_t low, uint64_t range, uint64_t key, uint64_t first,
                               int32_t ndim, const int64_t *sizes, const int64_t *index_strides,
                               const int64_t *out_strides) {
  return fill_integers("random_integers", {out, nullptr, nullptr}, dtype, low, range, key,
                       {first, ndim, sizes, index_strides, out_strides});
}

phx_status phx_random_fill_on(const phx_device *device, void *stream, void *out, int32_t dtype, int32_t kind, double a,
                              double b, uint64_t key, uint64_t first, int32_t ndim, const int64_t *sizes,
                              const int64_t *index_strides, const int64_t *out_strides) {
  return fill_kind("random_fill_on", {out, device, stream}, dtype, kind, a, b, key,
                   {first, ndim, sizes, index_strides, out_strides});
}

phx_status phx_random_integers_on(const phx_device *device, void *stream, void *out, int32_t dtype, int64_t low,
                                  uint64_t range, uint64_t key, uint64_t first, int32_t ndim, const int64_t *sizes,
                                  const int64_t *index_strides, const int64_t *out_strides) {
  return fill_integers("random_integers_on", {out, device, stream}, dtype, low, range, key,
                       {first, ndim, sizes, index_strides, out_strides});
}
}
