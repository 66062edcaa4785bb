// Scales from amaxes, bit for bit as scaling.compute_scale gives them. Each format has one loop without branches,
// because blocks may be as small as 16.
#pragma once

#include <cfloat>

#include "base.h"
#include "cast.h"
#include "floats.h"

namespace {

enum ScaleFormat : int32_t { FP32 = 0, POW2 = 1, E8M0_UP = 2, E8M0_FLOOR = 3, TWO_LEVEL = 4 };

inline bool usable(float amax) { return bits_of(amax) > 0 && bits_of(amax) < INFINITE; }

// A power of two in fp32 from its exponent, down to 2**-127, the smallest scale, which is subnormal.
inline float power_of_two(int32_t exponent) { return float_of(exponent > -127 ? (exponent + 127) << 23 : 1 << 22); }

inline float floor_power_of_two(float x) {
  const int32_t normal = bits_of(x) & INFINITE, subnormal = bits_of(x * 16777216.0f) & INFINITE;  // 2**24
  return normal ? float_of(normal) : float_of(subnormal) * (1 / 16777216.0f);
}

void e8m0_scales(const float* amax, int64_t n, const Cast& c, float* scale, float* scale_inv) {
  const int32_t top = bits_of(c.max) & 0x7fffff, up = c.scale_format == E8M0_UP, offset = c.margin - c.emax;
  OTTAVA_ROLLED
  for (int64_t i = 0; i < n; i++) {
    const float a = usable(amax[i]) ? amax[i] : 1.0f;
    const bool tiny = bits_of(a) < (1 << 23);
    const int32_t b = tiny ? bits_of(a * 16777216.0f) : bits_of(a);
    // one octave more exactly where amax's significand exceeds that of the largest number
    const int32_t wanted = (b >> 23) - (tiny ? 127 + 24 : 127) + offset + (up & int32_t((b & 0x7fffff) > top));
    const int32_t exponent = between(wanted, -127, 127);
    scale_inv[i] = usable(amax[i]) ? power_of_two(exponent) : 1.0f;
    scale[i] = usable(amax[i]) ? power_of_two(-exponent) : 1.0f;
  }
}

void float_scales(const float* amax, int64_t n, const Cast& c, float* scale, float* scale_inv) {
  const bool rounded = c.scale_format == POW2;
  OTTAVA_ROLLED
  for (int64_t i = 0; i < n; i++) {
    const float a = usable(amax[i]) ? amax[i] : 1.0f;
    const float exact = smaller(c.top / a, FLT_MAX), s = rounded ? floor_power_of_two(exact) : exact;
    scale[i] = usable(amax[i]) ? s : 1.0f;
    scale_inv[i] = 1.0f / scale[i];
  }
}

// NVFP4: a scale in E4M3 for the block times one in fp32 for the tensor
void two_level_scales(const float* amax, int64_t n, const Cast& c, float* scale, float* scale_inv) {
  float tensor = 0;
  OTTAVA_ROLLED
  for (int64_t i = 0; i < n; i++) tensor = usable(amax[i]) ? larger(tensor, amax[i]) : tensor;
  const float encode = tensor > 0 ? smaller(c.tensor_top / tensor, FLT_MAX) : 1.0f;
  const float per_block = encode * (1.0f / c.top), decode = 1.0f / encode;
  OTTAVA_ROLLED
  for (int64_t i = 0; i < n; i++) {
    const float a = usable(amax[i]) ? amax[i] : 1.0f, wanted = smaller(a * per_block, 448.0f);
    const float magic = float_of(larger(bits_of(wanted) & INFINITE, 121 << 23) + (20 << 23));  // see Encoder
    const float inverse = ((wanted + magic) - magic) * decode;
    scale_inv[i] = usable(amax[i]) ? inverse : 1.0f;
    scale[i] = smaller(1.0f / scale_inv[i], FLT_MAX);
  }
}

void current_scales(const float* amax, int64_t n, const Cast& c, float* scale, float* scale_inv) {
  if (c.scale_format == E8M0_UP || c.scale_format == E8M0_FLOOR) e8m0_scales(amax, n, c, scale, scale_inv);
  else if (c.scale_format == TWO_LEVEL) two_level_scales(amax, n, c, scale, scale_inv);
  else float_scales(amax, n, c, scale, scale_inv);
}

void scales(const float* amax, int64_t n, const Cast& c, const float* given, float* scale, float* scale_inv) {
  current_scales(amax, n, c, scale, scale_inv);
  if (given == nullptr || !(*given > 0)) return;
  OTTAVA_ROLLED
  for (int64_t i = 0; i < n; i++) {
    const float reached = amax[i] * *given;
    const bool inside = reached <= c.max && reached >= c.guard_floor;
    if (c.guarded && !inside && amax[i] != 0) continue;
    scale[i] = *given;
    scale_inv[i] = 1.0f / *given;
  }
}

}  // namespace
