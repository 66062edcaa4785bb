// Codes of BF16 numbers by 16-bit words, 64 at a time: three times as fast as in fp32. It needs a CPU that looks bytes up
// in a table (AVX512-VBMI: Ice Lake, Zen 4 and later). On others `Steps::make` returns false, and the fp32 loops run.
//
// A BF16 number has 7 bits of mantissa, and among normal codes a step in its exponent is 2**mantissa bits codes. So
//
//   code = (exponent - first exponent) * 2**mantissa bits + table[mantissa]
//
// holds exactly, rounded product and ties included, if the fp32 loop makes the table, for one binade. Each of the few
// codes below begins at some number: if any of the 64 numbers is that small, the code counts the beginnings passed. All
// powers of two share one table: such a scale only moves it.
#pragma once

#include "simd.h"

#if defined(OTTAVA_CASTS_BF16) && defined(__AVX512VBMI__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define OTTAVA_WORDS 1
#else
#define OTTAVA_WORDS 0
#endif

constexpr int32_t LEAST_FACTOR = 27 << 23, LARGEST_FACTOR = 227 << 23;  // beyond, products may be subnormal or infinite

struct Steps {  // for one factor
  bool made = false;
  bool lone_nan = false;           // -0 becomes 0, see Encoder
  alignas(64) uint8_t table[128];  // for each mantissa: the addend to the magnitude's upper bits
  int16_t first;                   // from base: the magnitude at which code 1 begins
  // For codes 1, 2, .. with equal steps between them: from_on has the distance from the code's origin, an earlier code or
  // itself; counted_from has the distance of a code that is an origin from `first`, else -1.
  uint32_t from_on[16];
  int32_t counted_from[16];
  int16_t base;                    // the bits of a power of two
  int32_t normal, count, shift;    // normal: from base, the first magnitude with a normal product in the format
  uint8_t largest, sign;

  // Finds the bases of n factors, for steps made with factor 1; false if a factor is no power of two or out of range.
  __attribute__((noinline)) bool bases(const float* factor, int64_t n, int16_t* out) const {
    int32_t others = 0;
    OTTAVA_ROLLED
    for (int64_t i = 0; i < n; i++) {
      const int32_t bits = bits_of(factor[i]);
      others |= (bits & 0x7fffff) | int32_t(bits < LEAST_FACTOR) | int32_t(bits > LARGEST_FACTOR);
      out[i] = int16_t(base + 0x3f80 - (bits >> 16));
    }
    return others == 0;
  }

  template <class Encode>  // encode(bits of BF16 numbers, codes, count) casts with that factor in fp32
  bool make(float factor, int mantissa_bits, int emin, uint8_t largest_code, uint8_t sign_bit, Encode encode) {
    const bool fits = bits_of(factor) >= LEAST_FACTOR && bits_of(factor) <= LARGEST_FACTOR;
    if (!fits || mantissa_bits < 1 || mantissa_bits > 4) return false;
    count = 1 << mantissa_bits, shift = 7 - mantissa_bits, largest = largest_code, sign = sign_bit;
    int16_t near[64];  // the step to code k lies at (k - 1/2) quanta, give or take a rounding of the quotient
    uint8_t codes[128];
    for (int i = 0; i < 64; i++) {
      const float quanta = float(smaller(i / 4, count - 1)) + 0.5f;
      near[i] = int16_t((bits_of(quanta * float_of((127 + emin - mantissa_bits) << 23) / factor) >> 16) + i % 4 - 1);
    }
    encode(near, codes, 64);
    for (int k = 0, at = 0, start = 0, zero = 0; k < count; k++) {
      at = near[4 * k];
      for (int i = 0; i < 4; i++) at += codes[4 * k + i] <= k;
      if (k == 0) first = int16_t(start = zero = at);
      counted_from[k] = at - start > 254 || k == 0 ? (start = at) - zero : -1;
      from_on[k] = uint32_t(at - start) * 0x01010101;  // the same in each byte
    }
    const float smallest = float_of((127 + emin) << 23);
    normal = (bits_of(smallest / factor) >> 16) - 1;
    while (float_of(normal << 16) * factor < smallest) normal++;
    base = int16_t(normal & 0x7f80);
    normal -= base;
    first = int16_t(first - base);
    int16_t binade[128];  // the first binade of normal numbers only
    for (int m = 0; m < 128; m++) binade[m] = int16_t(base + 0x80 + m);
    encode(binade, codes, 128);
    for (int m = 0; m < 128; m++) table[m] = uint8_t(codes[m] - count - (m >> shift));
    return made = true;
  }
};

struct Bases {
  const int16_t* first;
  int64_t block;  // numbers of one factor
};

#if OTTAVA_WORDS

struct Table {  // the constants of encoding, in registers
  const Steps& steps;
  const Z low_table, high_table, low_bytes, order, before_first, steps_end, largest, sign;
  const int sign_shift;

  explicit Table(const Steps& s)
      : steps(s),
        low_table(load(s.table)),
        high_table(load(s.table + 64)),
        low_bytes(Z{0x0e0c0a0806040200, 0x4e4c4a4846444240, 0x1e1c1a1816141210, 0x5e5c5a5856545250,
                    0x2e2c2a2826242220, 0x6e6c6a6866646260, 0x3e3c3a3836343230, 0x7e7c7a7876747270}),
        order(Z{0, 2, 4, 6, 1, 3, 5, 7}),
        before_first(all16(int16_t(s.first - 1))),
        steps_end(all16(int16_t(s.normal - s.first + 1))),
        largest(all8(s.largest)),
        sign(all8(s.sign)),
        sign_shift(__builtin_clz(s.sign) - 24) {}

  static OTTAVA_INLINE Z shifted(Z x, int n) { return (Z)((U16x32)x >> n); }

  // 64 finite numbers, and how far their magnitudes are from the base. Bytes are packed in the order of 128
  // bits of a, 128 of b, ..; the last step puts them right.
  OTTAVA_INLINE Z codes(Z a, Z b, Z from_a, Z from_b) const {
    const Z past_a = minus16(from_a, before_first), past_b = minus16(from_b, before_first);
    const Z upper = packed_unsigned(shifted(from_a, steps.shift), shifted(from_b, steps.shift));
    const Z mantissas = chosen8(a, low_bytes, b);  // and a bit that the table's look-up ignores
    Z code = add8_saturated(upper, chosen8(low_table, mantissas, high_table));
    code = min8_unsigned(code, largest);
    code = min8_unsigned(code, packed_unsigned(past_a, past_b));  // 0 before the first step, 255 where all are equal
    if (less16_unsigned(min16_unsigned(past_a, past_b), steps_end)) code = counted(past_a, past_b, code);
    Z with_sign = a_or_b_and_c(code, shifted(packed_signed(a, b), sign_shift), sign);
    if (steps.lone_nan) with_sign = replaced8(with_sign, is_zero8(code), Z{});
    return ordered64(order, with_sign);
  }

  // Counts steps for the numbers among them. Past the last step `code` is right.
  OTTAVA_INLINE Z counted(Z past_a, Z past_b, Z code) const {
    const Z zero{}, one = all8(1), a = max16(past_a, zero), b = max16(past_b, zero);
    Z count = zero, past = zero;
    for (int k = 0; k < steps.count; k++) {
      if (steps.counted_from[k] >= 0) {
        const Z start = all16(int16_t(steps.counted_from[k]));
        past = packed_unsigned(subtract16_saturated(a, start), subtract16_saturated(b, start));
      }
      const Z reached = subtract8_saturated(past, all32(int32_t(steps.from_on[k])));
      count = (Z)((U8x64)count + (U8x64)min8_unsigned(reached, one));
    }
    const Z left = packed_unsigned(subtract16_saturated(steps_end, a), subtract16_saturated(steps_end, b));
    return replaced8(count, is_zero8(left), code);
  }
};

// Encodes n numbers of a row. LOOK: returns their largest magnitude; if it is not finite, some codes mean nothing.
template <bool LOOK>
__attribute__((noinline)) int16_t encode_words(const int16_t* x, uint8_t* out, int64_t n, Bases bases, const Steps& steps) {
  Table table(steps);  // not const: g++ 12 would keep it in memory
  const Z magnitude = all16(0x7fff);
  const bool each = bases.block == 1;
  Z most{};
  for (const int16_t* base = bases.first; n > 0; base += !each) {
    const int64_t count = each || bases.block == 32 ? n : smaller(bases.block, n);
    for (int64_t i = 0; i < count; i += 64) {
      const bool whole = i + 64 <= count;
      const uint64_t inside = ~uint64_t(0) >> (whole ? 0 : i + 64 - count);
      const uint32_t low = uint32_t(inside), high = uint32_t(inside >> 32);
      const auto read = [=](const int16_t* from, uint32_t mask) { return whole ? load(from) : load16(from, mask); };
      const Z a = read(x + i, low), b = read(x + i + 32, high);
      const Z size_a = a & magnitude, size_b = b & magnitude;
      if (LOOK) most = max16(most, max16(size_a, size_b));
      const Z base_a = each ? read(base + i, low) : all16(*base);
      base += bases.block == 32 && high;
      const Z base_b = each ? read(base + i + 32, high) : all16(*base);
      base += bases.block == 32;
      const Z code = table.codes(a, b, minus16(size_a, base_a), minus16(size_b, base_b));
      if (whole) store(out + i, code);  // a masked store takes several times as long
      else store8(out + i, inside, code);
    }
    n -= count, x += count, out += count;
  }
  return LOOK ? largest16(most) : 0;
}

// The largest magnitude of 32, 64, .. numbers.
OTTAVA_INLINE int16_t largest_word(const int16_t* x, int64_t n) {
  const Z magnitude = all16(0x7fff);
  Z most = load(x) & magnitude;
  for (int64_t i = 32; i < n; i += 32) most = max16(most, load(x + i) & magnitude);
  return largest16(most);
}

#else  // `make` always returns false

template <bool LOOK>
inline int16_t encode_words(const int16_t*, uint8_t*, int64_t, Bases, const Steps&) { return 0; }

#endif
