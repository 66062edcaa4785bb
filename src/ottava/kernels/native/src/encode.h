// Codes and amaxes of a row of numbers, for quantize.cpp.
#pragma once

#include "cast.h"
#include "floats.h"
#include "words.h"

namespace {

constexpr int64_t CLOSE = 2048;  // elements that stay in a first-level cache until they are read again

struct Encoder {  // constants of a format, by value: a store through uint8_t* may alias anything behind a pointer
  int32_t shift, largest, smallest, magic, nan_code, sign_shift, sign_bit, nan_sign;
  bool lone_nan;  // where others have -0 this format has its NaN (FNUZ), and -0 becomes 0
  bool has_nan;   // then an infinity becomes NaN, too

  explicit Encoder(const Cast& c) {
    shift = 23 - c.mantissa_bits;
    largest = bits_of(c.max);
    smallest = (127 + c.emin) << 23;
    const int32_t bias = -((127 + c.emin) << c.mantissa_bits) & 0xff;  // even, so ties still go to even
    magic = (shift << 23) | bias;
    sign_shift = 32 - c.bits;
    sign_bit = 1 << (c.bits - 1);
    nan_code = c.nan_code < 0 ? (1 << (c.bits - 1)) - 1 : c.nan_code;  // without a NaN code: the largest number
    nan_sign = c.nan_code < 0 ? 0 : sign_bit;
    lone_nan = c.nan_code == sign_bit;
    has_nan = c.nan_code >= 0;
  }

  // Adding 2**(e + 23 - mantissa bits) to a number of exponent e rounds it to a whole number of quanta, which the sum's
  // low bits then count, with the implied bit: that bit carries into the exponent field, which starts one too low.
  inline int32_t operator()(float v) const {  // not of NaN
    const int32_t b = bits_of(v), a = b & MAGNITUDE, clamped = smaller(a, largest);
    const int32_t exponent = larger(clamped & INFINITE, smallest);
    const int32_t quanta = bits_of(float_of(clamped) + float_of(exponent + magic));  // + bias, in the low byte
    return ((quanta + (exponent >> shift)) & ~sign_bit) | ((b >> sign_shift) & sign_bit);
  }

  inline uint8_t without_sign_of_zero(uint8_t code) const { return lone_nan && code == sign_bit ? 0 : code; }

  // Whether x becomes NaN. An infinite product of a finite x saturates.
  inline bool loses(float x, float product) const { return is_nan(product) || (has_nan && !is_finite(x)); }

  inline uint8_t of_nan(float x, float product) const {  // positive, but for 0 times an infinite scale
    return uint8_t(nan_code | (is_finite(x) ? (bits_of(product) >> sign_shift) & nan_sign : 0));
  }
};

template <class T>
inline typename T::Int largest_of(const typename T::Int* x, int64_t n) {
  typename T::Int most = 0;
  for (int64_t i = 0; i < n; i++) {
    const typename T::Int magnitude = x[i] & T::mask;
    most = magnitude > most ? magnitude : most;
  }
  return most;
}

template <class T>
__attribute__((noinline)) typename T::Int largest_of_many(const typename T::Int* x, int64_t n) { return largest_of<T>(x, n); }

struct OneFactor {
  float factor;
  inline float operator[](int64_t) const { return factor; }
  inline OneFactor from(int64_t) const { return *this; }
};

struct FactorEach {  // a factor for each column
  const float* factor;
  inline float operator[](int64_t i) const { return factor[i]; }
  inline FactorEach from(int64_t i) const { return {factor + i}; }
};

template <class T, int N, class Factor>
inline void encode_piece(const typename T::Int* __restrict x, uint8_t* __restrict out, Factor factor, Encoder code) {
  for (int i = 0; i < N; i++) out[i] = uint8_t(code(T::value(x[i]) * factor[i]));
  if (code.lone_nan)  // a pass of its own: other formats need not wait for it
    for (int i = 0; i < N; i++) out[i] = code.without_sign_of_zero(out[i]);
}

template <class T, int N, class Factor>  // the last piece ends with the row, over elements already done
inline void encode_pieces(const typename T::Int* x, uint8_t* out, int64_t n, Factor factor, Encoder code) {
  for (int64_t i = 0; i + N <= n; i += N) encode_piece<T, N>(x + i, out + i, factor.from(i), code);
  if (n % N) encode_piece<T, N>(x + n - N, out + n - N, factor.from(n - N), code);
}

template <class T>
__attribute__((noinline)) uint8_t encode_one(typename T::Int x, float factor, Encoder code) {
  const float v = T::value(x) * factor;
  return code.loses(T::value(x), v) ? code.of_nan(T::value(x), v) : code.without_sign_of_zero(uint8_t(code(v)));
}

// Pieces of a known length: the compiler would repeat a loop of unknown length for each length of its rest.
template <class T, class Factor>
__attribute__((noinline)) void encode(const typename T::Int* x, uint8_t* out, int64_t n, Factor factor, Encoder code) {
  if (n >= 64) return encode_pieces<T, 64>(x, out, n, factor, code);
  if (!OTTAVA_WORDS && n >= 32) return encode_pieces<T, 32>(x, out, n, factor, code);
  if (n >= 16) return encode_pieces<T, 16>(x, out, n, factor, code);
  OTTAVA_ROLLED
  for (int64_t i = 0; i < n; i++) out[i] = encode_one<T>(x[i], factor[i], code);
}

template <class T, class Factor>  // corrects codes after `encode`: what is not finite is too rare for a check of every number
__attribute__((noinline)) void encode_nans(const typename T::Int* x, uint8_t* out, int64_t n, Factor factor, Encoder code) {
  OTTAVA_ROLLED
  for (int64_t i = 0; i < n; i++)
    if (const float v = T::value(x[i]) * factor[i]; code.loses(T::value(x[i]), v)) out[i] = code.of_nan(T::value(x[i]), v);
}

// The state of encoding by words, see words.h; empty if that way does not run.
Steps steps_of([[maybe_unused]] float factor, [[maybe_unused]] const Cast& c) {
  Steps steps;
#if OTTAVA_WORDS
  const Encoder code(c);
  const auto encode_some = [=](const int16_t* x, uint8_t* out, int64_t n) {
    encode<BFloat16>(x, out, n, OneFactor{factor}, code);
  };
  const uint8_t largest = encode_one<BFloat16>(BFloat16::infinity - 1, 1.0f, code);  // the largest finite number
  steps.lone_nan = code.lone_nan;
  steps.make(factor, c.mantissa_bits, c.emin, largest, uint8_t(code.sign_bit), encode_some);
#endif
  return steps;
}

// As `encode`, of finite numbers; `steps`: of that factor, or not made.
template <class T>
inline void encode_by(const Steps& steps, const typename T::Int* x, uint8_t* out, int64_t n, float factor, Encoder code) {
  if (!steps.made) return encode<T>(x, out, n, OneFactor{factor}, code);
  encode_words<false>(reinterpret_cast<const int16_t*>(x), out, n, Bases{&steps.base, n}, steps);
}

template <class T>  // for a known scale: one pass
__attribute__((noinline)) typename T::Int encode_and_look(const Steps& steps, const typename T::Int* x, uint8_t* out, int64_t n,
                                                          float factor, Encoder code) {
  typename T::Int most = 0;
  if (steps.made) most = encode_words<true>(reinterpret_cast<const int16_t*>(x), out, n, Bases{&steps.base, n}, steps);
  for (int64_t i = steps.made ? n : 0; i < n; i += CLOSE) {
    const int64_t count = smaller(CLOSE, n - i);
    most = larger(most, largest_of_many<T>(x + i, count));
    encode<T>(x + i, out + i, count, OneFactor{factor}, code);
  }
  if (!is_finite(T::value(most)) || !is_finite(factor)) encode_nans<T>(x, out, n, OneFactor{factor}, code);
  return most;
}

}  // namespace
