// Instructions of AVX512 (with VBMI) under plain names, for GCC: reading <immintrin.h> takes as long as compiling all that
// uses it. OTTAVA_WIDE is 1 where they are there.
#pragma once

#include "vectors.h"

#define OTTAVA_WIDE 0
#if defined(__AVX512VBMI__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__has_builtin) && !defined(__clang__)
#if __has_builtin(__builtin_ia32_cmpps512_mask) && __has_builtin(__builtin_ia32_cvtps2pd512_mask) && \
    __has_builtin(__builtin_ia32_extractf32x8_mask) && __has_builtin(__builtin_ia32_extractf64x4_mask) && \
    __has_builtin(__builtin_ia32_maxps512_mask) && __has_builtin(__builtin_ia32_permvarhi512_mask) && \
    __has_builtin(__builtin_ia32_permvarqi512_mask) && __has_builtin(__builtin_ia32_phminposuw128) && \
    __has_builtin(__builtin_ia32_pmaxsd512_mask) && __has_builtin(__builtin_ia32_pmaxsw256) && \
    __has_builtin(__builtin_ia32_pmaxsw512_mask) && __has_builtin(__builtin_ia32_pminud512_mask) && \
    __has_builtin(__builtin_ia32_pminuw256) && __has_builtin(__builtin_ia32_pminuw512_mask) && \
    __has_builtin(__builtin_ia32_ptestmb512) && __has_builtin(__builtin_ia32_ptestmd512) && \
    __has_builtin(__builtin_ia32_ptestmw512) && __has_builtin(__builtin_ia32_punpckhbw512_mask) && \
    __has_builtin(__builtin_ia32_punpcklbw512_mask) && __has_builtin(__builtin_ia32_rcp14ps512_mask) && \
    __has_builtin(__builtin_ia32_vcvtph2ps512_mask) && __has_builtin(__builtin_ia32_vfmaddps512_mask) && \
    __has_builtin(__builtin_ia32_vpermt2varqi512_mask)  // GCC changes their names at times
#undef OTTAVA_WIDE
#define OTTAVA_WIDE 1
#endif
#endif

#if OTTAVA_WIDE

namespace {

typedef char Bytes __attribute__((vector_size(64)));
typedef int16_t Words __attribute__((vector_size(64)));
typedef int16_t HalfWords __attribute__((vector_size(32)));
typedef int16_t QuarterWords __attribute__((vector_size(16)));
typedef float HalfV __attribute__((vector_size(32)));
typedef double D __attribute__((vector_size(64)));
typedef double HalfD __attribute__((vector_size(32)));

constexpr int NEAREST = 4;  // rounding as the mode says

template <class To, class From> inline To low_part(const From& from) { To to; std::memcpy(&to, &from, sizeof(to)); return to; }
inline HalfV high_half(V v) { return __builtin_ia32_extractf32x8_mask(v, 1, HalfV{}, -1); }
inline HalfD high_half(D d) { return __builtin_ia32_extractf64x4_mask(d, 1, HalfD{}, -1); }
inline HalfWords high_half(Words w) { return as<HalfWords>(high_half(as<D>(w))); }

// codes[i] of the bytes 0 .. 63 of a and 64 .. 127 of b
inline Bytes looked_up(Bytes codes, Bytes a, Bytes b) { return __builtin_ia32_vpermt2varqi512_mask(codes, a, b, -1); }
inline Bytes reordered(Bytes x, Bytes order) { return __builtin_ia32_permvarqi512_mask(x, order, Bytes{}, -1); }
inline Bytes mixed_low(Bytes a, Bytes b) { return __builtin_ia32_punpcklbw512_mask(a, b, Bytes{}, -1); }
inline Bytes mixed_high(Bytes a, Bytes b) { return __builtin_ia32_punpckhbw512_mask(a, b, Bytes{}, -1); }
// BF16 numbers as fp32: words order[1], order[3], .. above zeros
inline V numbers(Words x, Words order) { return as<V>(__builtin_ia32_permvarhi512_mask(x, order, Words{}, 0xaaaaaaaa)); }
inline V from_fp16(const int16_t* x) { return __builtin_ia32_vcvtph2ps512_mask(load<HalfWords>(x), V{}, -1, NEAREST); }

inline int64_t count_of_any(Bytes x, Bytes bits) { return __builtin_popcountll(__builtin_ia32_ptestmb512(x, bits, -1)); }
inline uint32_t not_zero(Words x) { return __builtin_ia32_ptestmw512(x, x, -1); }
inline uint32_t not_zero(I x) { return __builtin_ia32_ptestmd512(x, x, -1); }
inline bool any_not_below(V a, V b) { return __builtin_ia32_cmpps512_mask(a, b, 29, -1, NEAREST) != 0; }

inline Words larger_of(Words a, Words b) { return __builtin_ia32_pmaxsw512_mask(a, b, Words{}, -1); }
inline I larger_of(I a, I b) { return __builtin_ia32_pmaxsd512_mask(a, b, I{}, -1); }
inline V larger_of(V a, V b) { return __builtin_ia32_maxps512_mask(a, b, V{}, -1, NEAREST); }
inline Words smaller_unsigned(Words a, Words b) { return __builtin_ia32_pminuw512_mask(a, b, Words{}, -1); }
inline I smaller_unsigned(I a, I b) { return __builtin_ia32_pminud512_mask(a, b, I{}, -1); }
inline V added_product(V a, V b, V to) { return __builtin_ia32_vfmaddps512_mask(a, b, to, -1, NEAREST); }
inline V inverse_to_14_bits(V x, uint32_t where) { return __builtin_ia32_rcp14ps512_mask(x, V{}, uint16_t(where)); }

inline D doubles(V v) {
  return __builtin_ia32_cvtps2pd512_mask(low_part<HalfV>(v), D{}, -1, NEAREST) +
         __builtin_ia32_cvtps2pd512_mask(high_half(v), D{}, -1, NEAREST);
}

inline double total(D d) {  // as a tree
  const HalfD half = low_part<HalfD>(d) + high_half(d);
  return (half[0] + half[2]) + (half[1] + half[3]);
}

inline int32_t smallest_of(QuarterWords x) { return uint16_t(as<QuarterWords>(__builtin_ia32_phminposuw128(x))[0]); }

inline int16_t largest_of_all(Words x) {  // of magnitudes
  const HalfWords half = __builtin_ia32_pmaxsw256(low_part<HalfWords>(x), high_half(x));
  const HalfWords swapped = as<HalfWords>(__builtin_shuffle(as<HalfD>(half), HalfD{}, (int64_t __attribute__((vector_size(32)))){2, 3, 0, 1}));
  const QuarterWords most = low_part<QuarterWords>(HalfWords(__builtin_ia32_pmaxsw256(half, swapped)));
  return int16_t(0x7fff - smallest_of(most ^ 0x7fff));  // there is no instruction for the largest
}

inline uint16_t smallest_of_all(Words x) {
  const HalfWords half = __builtin_ia32_pminuw256(low_part<HalfWords>(x), high_half(x));
  const HalfWords swapped = as<HalfWords>(__builtin_shuffle(as<HalfD>(half), HalfD{}, (int64_t __attribute__((vector_size(32)))){2, 3, 0, 1}));
  return uint16_t(smallest_of(low_part<QuarterWords>(HalfWords(__builtin_ia32_pminuw256(half, swapped)))));
}

inline int32_t largest_of_all(I x) {
  int32_t most = x[0];
  for (int l = 1; l < LANES; l++) most = larger(most, x[l]);
  return most;
}

inline uint32_t smallest_of_all(I x) {
  uint32_t least = uint32_t(x[0]);
  for (int l = 1; l < LANES; l++) least = smaller(least, uint32_t(x[l]));
  return least;
}

}  // namespace

#endif
