// Vectors of a register's width in what GCC and clang share, with no header of intrinsics; columns turned into rows.

#pragma once

#include "base.h"
#include "floats.h"

namespace {

#ifdef __AVX512F__
constexpr int LANES = 16;
#else
constexpr int LANES = 8;
#endif
typedef float V __attribute__((vector_size(LANES * 4)));
typedef int32_t I __attribute__((vector_size(LANES * 4)));
typedef int16_t H __attribute__((vector_size(LANES * 2)));
typedef uint8_t B __attribute__((vector_size(LANES)));

template <class To, class From> inline To as(From from) { To to; std::memcpy(&to, &from, sizeof(to)); return to; }
template <class To> inline To load(const void* from) { To to; std::memcpy(&to, from, sizeof(to)); return to; }
inline V spread(float f) { return V{} + f; }
inline I spread(int32_t i) { return I{} + i; }

// GCC 12 converts vectors of integers one by one, but by the instructions that do it
#if defined(__AVX512F__) && !defined(__clang__)
typedef char C __attribute__((vector_size(16)));
inline I widened(H x) { return as<I>(__builtin_ia32_pmovsxwd512_mask(x, I{}, -1)); }
inline I widened(B x) { return as<I>(__builtin_ia32_pmovzxbd512_mask(as<C>(x), I{}, -1)); }
#elif defined(__AVX2__) && !defined(__clang__)
typedef char C __attribute__((vector_size(16)));
inline I widened(H x) { return as<I>(__builtin_ia32_pmovsxwd256(x)); }
inline I widened(B x) { C wide{}; std::memcpy(&wide, &x, sizeof(x)); return as<I>(__builtin_ia32_pmovzxbd256(wide)); }
#else
template <class Narrow> inline I widened(Narrow x) { return __builtin_convertvector(x, I); }
#endif

template <class T> inline I fp32_bits(const typename T::Int* x);
template <> inline I fp32_bits<Float32>(const int32_t* x) { return load<I>(x); }
template <> inline I fp32_bits<BFloat16>(const int16_t* x) { return widened(load<H>(x)) << 16; }
template <> inline I fp32_bits<Float16>(const int16_t* x) {
  const I half = widened(load<H>(x)), magnitude = (half & 0x7fff) << 13;
  const I rebias = magnitude >= (31 << 23) ? spread(224 << 23) : spread(112 << 23);
  const I subnormal = as<I>(as<V>(magnitude + (113 << 23)) - spread(float_of(113 << 23)));
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

// N x N items, N vectors of N: shuffled like cards log2(N) times, rows are columns.
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

// More than a row of n items has, so that rows below each other are not in the same places of a cache.
template <class Item> constexpr int64_t padded(int64_t n) { return n + 64 / int64_t(sizeof(Item)); }

template <class Item>  // columns `stride` apart -> rows; so many columns at a time that lines of a cache are written whole
const Item* transpose(const Item* from, int64_t stride, int64_t rows, int64_t cols, Item* to, int64_t to_stride) {
  constexpr int N = 16 / int(sizeof(Item)), LINE = 4 * N;
  const int64_t high = rows / N * N, wide = cols / N * N;
  const int64_t tall = to_stride * int64_t(sizeof(Item)) % 512 ? LINE : N;  // or lines that are read whole, where it pays
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
