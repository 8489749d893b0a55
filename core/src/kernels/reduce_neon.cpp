// The kernels for 64-bit ARM with NEON, which every such processor has.
//
// They can be tested on x86-64 with the Debian packages g++-aarch64-linux-gnu and qemu-user-static:
//
//   cmake -S core -B build-aarch64 -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64
//         -DCMAKE_C_COMPILER=aarch64-linux-gnu-gcc -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++ -DBUILD_TESTING=ON
//         "-DCMAKE_CROSSCOMPILING_EMULATOR=qemu-aarch64-static;-L;/usr/aarch64-linux-gnu"
//   cmake --build build-aarch64 && ctest --test-dir build-aarch64 -R test_kernels
#include <arm_neon.h>

#include "kernels/vector_kernel.h"

namespace phx::kernels {
namespace {

struct Neon {
  static constexpr int kBytes = 16;
  static constexpr bool kStreams = false;
  using Halves = Vector<uint16_t, kBytes>::Type;

  // fmin is the IEEE 754-2019 minimum: NaN if an operand is NaN, and -0 is less than +0.
  static PHX_ALWAYS_INLINE float32x4_t minimum(float32x4_t a, float32x4_t b) { return vminq_f32(a, b); }
  static PHX_ALWAYS_INLINE float64x2_t minimum(float64x2_t a, float64x2_t b) { return vminq_f64(a, b); }

  // An operation on NaNs returns one of them, so every NaN becomes the same one.
  static PHX_ALWAYS_INLINE float32x4_t canonical(float32x4_t v) {
    return vbslq_f32(vceqq_f32(v, v), v, vreinterpretq_f32_u32(vdupq_n_u32(0x7fc00000)));
  }
  static PHX_ALWAYS_INLINE float64x2_t canonical(float64x2_t v) {
    return vbslq_f64(vceqq_f64(v, v), v, vreinterpretq_f64_u64(vdupq_n_u64(0x7ff8000000000000)));
  }

  static PHX_ALWAYS_INLINE float32x4_t widen_f16(const char *from) {
    return vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(reinterpret_cast<const uint8_t *>(from))));
  }
  static PHX_ALWAYS_INLINE void narrow_f16(char *to, float32x4_t v) {
    vst1_u8(reinterpret_cast<uint8_t *>(to), vreinterpret_u8_f16(vcvt_f16_f32(v)));
  }
  static PHX_ALWAYS_INLINE float32x4_t widen_lower(Halves v) {
    return vcvt_f32_f16(vget_low_f16(vreinterpretq_f16_u16((uint16x8_t)v)));
  }
  static PHX_ALWAYS_INLINE float32x4_t widen_upper(Halves v) {
    return vcvt_high_f32_f16(vreinterpretq_f16_u16((uint16x8_t)v));
  }
  static PHX_ALWAYS_INLINE Halves narrow(float32x4_t lower, float32x4_t upper) {
    return (Halves)vreinterpretq_u16_f16(vcvt_high_f16_f32(vcvt_f16_f32(lower), upper));
  }

  // For complex numbers: both parts become the real part, both become the imaginary part, or the two are swapped.
  static PHX_ALWAYS_INLINE float32x4_t real(float32x4_t v) { return vtrn1q_f32(v, v); }
  static PHX_ALWAYS_INLINE float32x4_t imaginary(float32x4_t v) { return vtrn2q_f32(v, v); }
  static PHX_ALWAYS_INLINE float32x4_t swapped(float32x4_t v) { return vrev64q_f32(v); }
  static PHX_ALWAYS_INLINE float64x2_t real(float64x2_t v) { return vdupq_laneq_f64(v, 0); }
  static PHX_ALWAYS_INLINE float64x2_t imaginary(float64x2_t v) { return vdupq_laneq_f64(v, 1); }
  static PHX_ALWAYS_INLINE float64x2_t swapped(float64x2_t v) { return vextq_f64(v, v, 1); }
};

}  // namespace

ReduceFn find_neon(int32_t dtype, int32_t op, Results results) { return find<Neon>(dtype, op, results); }

}  // namespace phx::kernels
