// Shared by the C++ kernels: the bits of floats, and the exact conversion of an element of x to fp32.

#pragma once

#include <cstdint>
#include <cstring>

#ifdef _OPENMP
#include <omp.h>
#endif

constexpr int32_t MAGNITUDE = 0x7fffffff, INFINITE = 0x7f800000, QUIET_NAN = 0x7fc00000;

inline float float_of(int32_t bits) { float f; std::memcpy(&f, &bits, 4); return f; }
inline int32_t bits_of(float f) { int32_t bits; std::memcpy(&bits, &f, 4); return bits; }
inline bool is_nan(float f) { return (bits_of(f) & MAGNITUDE) > INFINITE; }
inline bool is_finite(float f) { return (bits_of(f) & MAGNITUDE) < INFINITE; }

struct Float32 {
  using Int = int32_t;
  static constexpr Int mask = MAGNITUDE, infinity = INFINITE;
  static inline float value(Int bits) { return float_of(bits); }
};

struct BFloat16 {
  using Int = int16_t;
  static constexpr Int mask = 0x7fff, infinity = 0x7f80;
  static inline float value(Int bits) { return float_of(int32_t(uint32_t(bits) << 16)); }
};

struct Float16 {
  using Int = int16_t;
  static constexpr Int mask = 0x7fff, infinity = 0x7c00;
  static inline float value(Int bits) {
    const int32_t sign = int32_t(bits) & int32_t(0x80000000), magnitude = (int32_t(bits) & 0x7fff) << 13;
    const int32_t rebias = 112 << 23, smallest_normal = 113 << 23;
    const int32_t normal = magnitude + (magnitude >= (31 << 23) ? 2 * rebias : rebias);
    const int32_t subnormal = bits_of(float_of(magnitude + smallest_normal) - float_of(smallest_normal));
    return float_of((magnitude < (1 << 23) ? subnormal : normal) | sign);
  }
};

// Element i of numbers of a type: 0 fp32, 1 bf16, 2 fp16.
inline float number(const void* at, int64_t type, int64_t i) {
  if (type == 0) return static_cast<const float*>(at)[i];
  const int16_t bits = static_cast<const int16_t*>(at)[i];
  return type == 1 ? BFloat16::value(bits) : Float16::value(bits);
}

// fp32 -> bf16, to nearest even.
inline uint16_t to_bf16(float x) {
  if (is_nan(x)) return 0x7FC0;
  uint32_t u = (uint32_t)bits_of(x);
  return (uint16_t)((u + 0x7FFF + (u >> 16 & 1)) >> 16);
}

// codes of at most 8 bits -> the bits of an fp32 number, exactly
struct Decoder {
  int32_t shift, sign_shift, magnitudes, rebias, smallest_normal, special;

  // special: the first magnitude that is infinity or NaN; beyond all magnitudes if the format has neither
  Decoder(int mantissa_bits, int bias, int bits, int special_code) {
    shift = 23 - mantissa_bits;
    sign_shift = 32 - bits;
    magnitudes = (1 << (bits - 1)) - 1;
    rebias = (127 - bias) << 23;
    smallest_normal = rebias + (1 << 23);
    special = special_code < 0 ? MAGNITUDE : special_code << shift;
  }

  // Whether the sign alone is the NaN of the format (FNUZ); the operator below takes it for -0.
  inline bool lone_nan() const { return special == (magnitudes + 1) << shift; }

  inline int32_t operator()(int32_t code) const {
    const int32_t magnitude = (code & magnitudes) << shift, sign = int32_t(uint32_t(code) << sign_shift) & ~MAGNITUDE;
    const int32_t normal = magnitude + (magnitude >= special ? 2 * rebias : rebias);
    const int32_t subnormal = bits_of(float_of(magnitude + smallest_normal) - float_of(smallest_normal));
    return (magnitude < (1 << 23) ? subnormal : normal) | sign;
  }
};
