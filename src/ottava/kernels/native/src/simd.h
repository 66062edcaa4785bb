// Vectors for all kernels: first the extensions that GCC and clang share, then AVX512's instructions, one function each.
// Compilers offer these in immintrin.h, but reading it takes 0.2 to 0.35 s, longer than compiling most kernels.
//
//   Floats, Ints, Shorts, Bytes   LANES elements, as many as fp32 numbers fit a register; Doubles: half as many, HalfFloats
//   Z                             64 bytes of AVX512, elements of any type
//   U8x64, I16x32, ..             elements by kind, bits and number; C8x64: bytes as GCC's builtins call them
//
// In names of functions 8, 16, 32 and 64 are bits of an element: all16(x) has x in every 16 bits.
#pragma once

#include "base.h"
#include "floats.h"

namespace {

#ifdef __AVX512F__
constexpr int LANES = 16;
#else
constexpr int LANES = 8;
#endif
typedef float Floats __attribute__((vector_size(LANES * 4)));
typedef float HalfFloats __attribute__((vector_size(LANES * 2)));
typedef double Doubles __attribute__((vector_size(LANES * 4)));
typedef int32_t Ints __attribute__((vector_size(LANES * 4)));
typedef int16_t Shorts __attribute__((vector_size(LANES * 2)));
typedef uint8_t Bytes __attribute__((vector_size(LANES)));

typedef int64_t Z __attribute__((vector_size(64)));
typedef uint8_t U8x64 __attribute__((vector_size(64)));
typedef char C8x64 __attribute__((vector_size(64)));
typedef int16_t I16x32 __attribute__((vector_size(64)));
typedef uint16_t U16x32 __attribute__((vector_size(64)));
typedef int32_t I32x16 __attribute__((vector_size(64)));
typedef int16_t I16x16 __attribute__((vector_size(32)));
typedef int16_t I16x8 __attribute__((vector_size(16)));
typedef double HalfDoubles __attribute__((vector_size(32)));

template <class To, class From> inline To as(From from) { To to; std::memcpy(&to, &from, sizeof(to)); return to; }
template <class To> inline To load(const void* from) { To to; std::memcpy(&to, from, sizeof(to)); return to; }
inline Floats spread(float f) { return Floats{} + f; }
inline Ints spread(int32_t i) { return Ints{} + i; }

// GCC 12 converts vectors of integers one element at a time, except by these instructions
#if defined(__AVX512F__) && !defined(__clang__)
typedef char C __attribute__((vector_size(16)));
inline Ints widened(Shorts x) { return as<Ints>(__builtin_ia32_pmovsxwd512_mask(x, Ints{}, -1)); }
inline Ints widened(Bytes x) { return as<Ints>(__builtin_ia32_pmovzxbd512_mask(as<C>(x), Ints{}, -1)); }
#elif defined(__AVX2__) && !defined(__clang__)
typedef char C __attribute__((vector_size(16)));
inline Ints widened(Shorts x) { return as<Ints>(__builtin_ia32_pmovsxwd256(x)); }
inline Ints widened(Bytes x) { C wide{}; std::memcpy(&wide, &x, sizeof(x)); return as<Ints>(__builtin_ia32_pmovzxbd256(wide)); }
#else
template <class Narrow> inline Ints widened(Narrow x) { return __builtin_convertvector(x, Ints); }
#endif

template <class T> inline Ints fp32_bits(const typename T::Int* x);
template <> inline Ints fp32_bits<Float32>(const int32_t* x) { return load<Ints>(x); }
template <> inline Ints fp32_bits<BFloat16>(const int16_t* x) { return widened(load<Shorts>(x)) << 16; }
template <> inline Ints fp32_bits<Float16>(const int16_t* x) {
  const Ints half = widened(load<Shorts>(x)), magnitude = (half & 0x7fff) << 13;
  const Ints rebias = magnitude >= (31 << 23) ? spread(224 << 23) : spread(112 << 23);
  const Ints subnormal = as<Ints>(as<Floats>(magnitude + (113 << 23)) - spread(float_of(113 << 23)));
  return (magnitude < (1 << 23) ? subnormal : magnitude + rebias) | (half & ~MAGNITUDE);
}

// --- columns into rows ------------------------------------------------------------------------------------------------

#ifdef __clang__
#define SHUFFLED(V, a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLED(V, a, b, ...) __builtin_shuffle(a, b, V{__VA_ARGS__})
#endif
typedef uint8_t X1 __attribute__((vector_size(16)));
typedef int16_t X2 __attribute__((vector_size(16)));
typedef int32_t X4 __attribute__((vector_size(16)));
template <class Item> struct Line;
template <> struct Line<uint8_t> {
  using V = X1;
  static inline V low(V a, V b) { return SHUFFLED(V, a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23); }
  static inline V high(V a, V b) {
    return SHUFFLED(V, a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
  }
};
template <> struct Line<int16_t> {
  using V = X2;
  static inline V low(V a, V b) { return SHUFFLED(V, a, b, 0, 8, 1, 9, 2, 10, 3, 11); }
  static inline V high(V a, V b) { return SHUFFLED(V, a, b, 4, 12, 5, 13, 6, 14, 7, 15); }
};
template <> struct Line<int32_t> {
  using V = X4;
  static inline V low(V a, V b) { return SHUFFLED(V, a, b, 0, 4, 1, 5); }
  static inline V high(V a, V b) { return SHUFFLED(V, a, b, 2, 6, 3, 7); }
};

// Transposes N x N items in N vectors: log2(N) rounds, each interleaves the vectors like two halves of a pack of cards.
template <class Item, int N>
inline void transpose_square(const Item* from, int64_t stride, Item* to, int64_t to_stride) {
  using V = typename Line<Item>::V;
  V cards[N], shuffled[N];
#pragma GCC unroll 16
  for (int i = 0; i < N; i++) cards[i] = load<V>(from + i * stride);
#pragma GCC unroll 4
  for (int times = 1; times < N; times *= 2) {
#pragma GCC unroll 8
    for (int i = 0; i < N / 2; i++) {
      shuffled[2 * i] = Line<Item>::low(cards[i], cards[i + N / 2]);
      shuffled[2 * i + 1] = Line<Item>::high(cards[i], cards[i + N / 2]);
    }
#pragma GCC unroll 16
    for (int i = 0; i < N; i++) cards[i] = shuffled[i];
  }
#pragma GCC unroll 16
  for (int i = 0; i < N; i++) std::memcpy(to + i * to_stride, &cards[i], sizeof(V));
}

// A stride longer than a row of n items, so that rows below each other do not share cache sets.
template <class Item> constexpr int64_t padded(int64_t n) { return n + 64 / int64_t(sizeof(Item)); }

template <class Item>  // columns `stride` apart -> rows; takes enough columns at a time to write whole cache lines
const Item* transpose(const Item* from, int64_t stride, int64_t rows, int64_t cols, Item* to, int64_t to_stride) {
  constexpr int N = 16 / int(sizeof(Item)), LINE = 4 * N;
  const int64_t high = rows / N * N, wide = cols / N * N;
  const int64_t tall = to_stride * int64_t(sizeof(Item)) % 512 ? LINE : N;  // or to read whole cache lines, where that pays
  for (int64_t left = 0; left < wide; left += LINE)
    for (int64_t top = 0; top < high; top += tall)
      for (int64_t col = left; col < smaller(left + LINE, wide); col += N)
        for (int64_t row = top; row < smaller(top + tall, high); row += N)
          transpose_square<Item, N>(from + col * stride + row, stride, to + row * to_stride + col, to_stride);
  for (int64_t col = 0; col < cols; col++)
    for (int64_t row = col < wide ? high : 0; row < rows; row++) to[row * to_stride + col] = from[col * stride + row];
  return to;
}

}  // namespace

// --- AVX512, by GCC's and clang's inline assembly ---------------------------------------------------------------------

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define OTTAVA_INLINE inline __attribute__((always_inline))

namespace {


OTTAVA_INLINE Z load(const void* from) { Z z; std::memcpy(&z, from, 64); return z; }
OTTAVA_INLINE void store(void* to, Z z) { std::memcpy(to, &z, 64); }
OTTAVA_INLINE void store_half(void* to, Z z) { __asm__("vmovdqu64 %t1, %0" : "=m"(*(char(*)[32])to) : "v"(z)); }
OTTAVA_INLINE Z all8(uint8_t x) { return (Z)(U8x64{} + x); }
OTTAVA_INLINE Z all16(int16_t x) { return (Z)(I16x32{} + x); }
OTTAVA_INLINE Z all32(int32_t x) { return (Z)(I32x16{} + x); }
OTTAVA_INLINE Z plus16(Z a, Z b) { return (Z)((I16x32)a + (I16x32)b); }
OTTAVA_INLINE Z minus16(Z a, Z b) { return (Z)((I16x32)a - (I16x32)b); }

#define OTTAVA_OF_TWO(name, instruction) \
  OTTAVA_INLINE Z name(Z a, Z b) { Z z; __asm__(instruction " %2, %1, %0" : "=v"(z) : "v"(a), "v"(b)); return z; }
OTTAVA_OF_TWO(max16, "vpmaxsw")
OTTAVA_OF_TWO(min16_unsigned, "vpminuw")
OTTAVA_OF_TWO(min8_unsigned, "vpminub")
OTTAVA_OF_TWO(add8_saturated, "vpaddusb")
OTTAVA_OF_TWO(subtract8_saturated, "vpsubusb")
OTTAVA_OF_TWO(subtract16_saturated, "vpsubusw")
OTTAVA_OF_TWO(packed_unsigned, "vpackuswb")  // 16 bits to 8, saturated: in each 128 bits first a's, then b's
OTTAVA_OF_TWO(packed_signed, "vpacksswb")
OTTAVA_OF_TWO(low8, "vpunpcklbw")  // in the lower half of each 128 bits: an element of a, an element of b, ..
OTTAVA_OF_TWO(high8, "vpunpckhbw")
OTTAVA_OF_TWO(low32, "vpunpckldq")
OTTAVA_OF_TWO(high32, "vpunpckhdq")
OTTAVA_OF_TWO(low64, "vpunpcklqdq")
OTTAVA_OF_TWO(high64, "vpunpckhqdq")
OTTAVA_OF_TWO(even128, "vshufi32x4 $0x88,")  // the first and third 128 bits of a, then of b
OTTAVA_OF_TWO(odd128, "vshufi32x4 $0xdd,")
OTTAVA_OF_TWO(ordered64, "vpermq")  // the elements of b in the order of the indices in a
#undef OTTAVA_OF_TWO

OTTAVA_INLINE Z a_or_b_and_c(Z a, Z b, Z c) { __asm__("vpternlogd $0xf8, %2, %1, %0" : "+v"(a) : "v"(b), "v"(c)); return a; }

template <int N>  // 32-bit elements: from the Nth of a on, then from b
OTTAVA_INLINE Z from32(Z a, Z b) { Z z; __asm__("valignd %3, %1, %2, %0" : "=v"(z) : "v"(a), "v"(b), "i"(N)); return z; }

// The words at these indices of 64 words: first those of a, then those of b.
OTTAVA_INLINE Z chosen16(Z a, Z index, Z b) { __asm__("vpermi2w %2, %1, %0" : "+v"(index) : "v"(a), "v"(b)); return index; }

#if defined(__AVX512VBMI__)  // indices into 128 bytes
OTTAVA_INLINE Z chosen8(Z a, Z index, Z b) { __asm__("vpermi2b %2, %1, %0" : "+v"(index) : "v"(a), "v"(b)); return index; }
#endif

// Masks have a bit for each element. An element with bit 0 is not read or written; it is 0.
OTTAVA_INLINE Z load8(const void* from, uint64_t mask) {
  Z z;
  __asm__("vmovdqu8 %1, %0%{%2%}%{z%}" : "=v"(z) : "m"(*(const char(*)[64])from), "Yk"(mask));
  return z;
}
OTTAVA_INLINE Z load16(const void* from, uint32_t mask) {
  Z z;
  __asm__("vmovdqu16 %1, %0%{%2%}%{z%}" : "=v"(z) : "m"(*(const char(*)[64])from), "Yk"(mask));
  return z;
}
OTTAVA_INLINE void store8(void* to, uint64_t mask, Z z) {
  __asm__("vmovdqu8 %1, %0%{%2%}" : "+m"(*(char(*)[64])to) : "v"(z), "Yk"(mask));
}
OTTAVA_INLINE uint32_t less16_unsigned(Z a, Z b) {
  uint32_t mask;
  __asm__("vpcmpltuw %2, %1, %0" : "=k"(mask) : "v"(a), "v"(b));
  return mask;
}
OTTAVA_INLINE uint32_t differs16(Z a, Z b) {
  uint32_t mask;
  __asm__("vpcmpneqw %2, %1, %0" : "=k"(mask) : "v"(a), "v"(b));
  return mask;
}
OTTAVA_INLINE uint64_t is_zero8(Z a) {
  uint64_t mask;
  __asm__("vptestnmb %1, %1, %0" : "=k"(mask) : "v"(a));
  return mask;
}
#if defined(__AVX512BF16__) && defined(__AVX512DQ__)
OTTAVA_INLINE uint32_t is_nan_or_subnormal(Z a) {  // 16 numbers in fp32
  uint32_t mask;
  __asm__("vfpclassps $0xa1, %1, %0" : "=k"(mask) : "v"(a));
  return mask;
}
OTTAVA_INLINE Z as_bf16(Z a) { __asm__("vcvtneps2bf16 %0, %t0" : "+v"(a)); return a; }  // in the lower half
#endif
OTTAVA_INLINE Z replaced8(Z a, uint64_t mask, Z b) { __asm__("vmovdqu8 %1, %0%{%2%}" : "+v"(a) : "v"(b), "Yk"(mask)); return a; }
OTTAVA_INLINE Z plus16_where(uint32_t mask, Z a, Z b) {
  __asm__("vpaddw %1, %0, %0%{%2%}" : "+v"(a) : "v"(b), "Yk"(mask));
  return a;
}

// The largest of words; none is negative.
OTTAVA_INLINE int16_t largest16(Z a) {
  Z half, quarter;
  __asm__("vextracti64x4 $1, %1, %t0\n\tvpmaxsw %t1, %t0, %t0" : "=&v"(half) : "v"(a));
  __asm__("vextracti64x2 $1, %t1, %x0\n\tvpmaxsw %x1, %x0, %x0" : "=&v"(quarter) : "v"(half));
  int32_t least;  // there is an instruction for the smallest of eight, none for the largest
  __asm__("vpxor %x2, %x1, %x1\n\tvphminposuw %x1, %x1\n\tvmovd %x1, %0" : "=r"(least), "+x"(quarter) : "x"(all16(0x7fff)));
  return int16_t(0x7fff - least);
}

}  // namespace
#endif

// --- AVX512 with VBMI, by builtins of GCC, which some versions rename; OTTAVA_WIDE is 1 if this compiler has them -----

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
    __has_builtin(__builtin_ia32_vpermt2varqi512_mask)  // some versions of GCC rename them
#undef OTTAVA_WIDE
#define OTTAVA_WIDE 1
#endif
#endif

#if OTTAVA_WIDE

namespace {


constexpr int NEAREST = 4;  // rounding by the current mode

template <class To, class From> inline To low_part(const From& from) { To to; std::memcpy(&to, &from, sizeof(to)); return to; }
inline HalfFloats high_half(Floats v) { return __builtin_ia32_extractf32x8_mask(v, 1, HalfFloats{}, -1); }
inline HalfDoubles high_half(Doubles d) { return __builtin_ia32_extractf64x4_mask(d, 1, HalfDoubles{}, -1); }
inline I16x16 high_half(I16x32 w) { return as<I16x16>(high_half(as<Doubles>(w))); }

// codes[i] of the bytes 0 .. 63 of a and 64 .. 127 of b
inline C8x64 looked_up(C8x64 codes, C8x64 a, C8x64 b) { return __builtin_ia32_vpermt2varqi512_mask(codes, a, b, -1); }
inline C8x64 reordered(C8x64 x, C8x64 order) { return __builtin_ia32_permvarqi512_mask(x, order, C8x64{}, -1); }
inline C8x64 mixed_low(C8x64 a, C8x64 b) { return __builtin_ia32_punpcklbw512_mask(a, b, C8x64{}, -1); }
inline C8x64 mixed_high(C8x64 a, C8x64 b) { return __builtin_ia32_punpckhbw512_mask(a, b, C8x64{}, -1); }
// BF16 numbers as fp32: words order[1], order[3], .. above zeros
inline Floats numbers(I16x32 x, I16x32 order) { return as<Floats>(__builtin_ia32_permvarhi512_mask(x, order, I16x32{}, 0xaaaaaaaa)); }
inline Floats from_fp16(const int16_t* x) { return __builtin_ia32_vcvtph2ps512_mask(load<I16x16>(x), Floats{}, -1, NEAREST); }

inline int64_t count_of_any(C8x64 x, C8x64 bits) { return __builtin_popcountll(__builtin_ia32_ptestmb512(x, bits, -1)); }
inline uint32_t not_zero(I16x32 x) { return __builtin_ia32_ptestmw512(x, x, -1); }
inline uint32_t not_zero(Ints x) { return __builtin_ia32_ptestmd512(x, x, -1); }
inline bool any_not_below(Floats a, Floats b) { return __builtin_ia32_cmpps512_mask(a, b, 29, -1, NEAREST) != 0; }

inline I16x32 larger_of(I16x32 a, I16x32 b) { return __builtin_ia32_pmaxsw512_mask(a, b, I16x32{}, -1); }
inline Ints larger_of(Ints a, Ints b) { return __builtin_ia32_pmaxsd512_mask(a, b, Ints{}, -1); }
inline Floats larger_of(Floats a, Floats b) { return __builtin_ia32_maxps512_mask(a, b, Floats{}, -1, NEAREST); }
inline I16x32 smaller_unsigned(I16x32 a, I16x32 b) { return __builtin_ia32_pminuw512_mask(a, b, I16x32{}, -1); }
inline Ints smaller_unsigned(Ints a, Ints b) { return __builtin_ia32_pminud512_mask(a, b, Ints{}, -1); }
inline Floats added_product(Floats a, Floats b, Floats to) { return __builtin_ia32_vfmaddps512_mask(a, b, to, -1, NEAREST); }
inline Floats inverse_to_14_bits(Floats x, uint32_t where) { return __builtin_ia32_rcp14ps512_mask(x, Floats{}, uint16_t(where)); }

inline Doubles as_doubles(Floats v) {
  return __builtin_ia32_cvtps2pd512_mask(low_part<HalfFloats>(v), Doubles{}, -1, NEAREST) +
         __builtin_ia32_cvtps2pd512_mask(high_half(v), Doubles{}, -1, NEAREST);
}

inline double total(Doubles d) {  // as a tree
  const HalfDoubles half = low_part<HalfDoubles>(d) + high_half(d);
  return (half[0] + half[2]) + (half[1] + half[3]);
}

inline int32_t smallest_of(I16x8 x) { return uint16_t(as<I16x8>(__builtin_ia32_phminposuw128(x))[0]); }

inline int16_t largest_of_all(I16x32 x) {  // of magnitudes
  const I16x16 half = __builtin_ia32_pmaxsw256(low_part<I16x16>(x), high_half(x));
  const I16x16 swapped = as<I16x16>(__builtin_shuffle(as<HalfDoubles>(half), HalfDoubles{}, (int64_t __attribute__((vector_size(32)))){2, 3, 0, 1}));
  const I16x8 most = low_part<I16x8>(I16x16(__builtin_ia32_pmaxsw256(half, swapped)));
  return int16_t(0x7fff - smallest_of(most ^ 0x7fff));  // there is no instruction for the largest
}

inline uint16_t smallest_of_all(I16x32 x) {
  const I16x16 half = __builtin_ia32_pminuw256(low_part<I16x16>(x), high_half(x));
  const I16x16 swapped = as<I16x16>(__builtin_shuffle(as<HalfDoubles>(half), HalfDoubles{}, (int64_t __attribute__((vector_size(32)))){2, 3, 0, 1}));
  return uint16_t(smallest_of(low_part<I16x8>(I16x16(__builtin_ia32_pminuw256(half, swapped)))));
}

inline int32_t largest_of_all(Ints x) {
  int32_t most = x[0];
  for (int l = 1; l < LANES; l++) most = larger(most, x[l]);
  return most;
}

inline uint32_t smallest_of_all(Ints x) {
  uint32_t least = uint32_t(x[0]);
  for (int l = 1; l < LANES; l++) least = smaller(least, uint32_t(x[l]));
  return least;
}

}  // namespace

#endif
