// Decodes 64 codes at a time for gemm.h into words of two bf16 numbers, which level 3 reads. AVX512-VBMI looks the bytes
// up in a table.
#pragma once

namespace {

#if OTTAVA_LEVEL == 3 && defined(__AVX512VBMI__)
#define OTTAVA_FAST_PACK 1
struct Decoder {  // 64 codes -> 2 x 32 bf16 numbers, by two tables of bytes
  Z low0, low1, high0, high1, order, sign;
  bool lone_nan;  // the sign alone is no -0 but NaN (FNUZ)
  explicit Decoder(const Tables& t)
      : low0(load(t.low)), low1(load(t.low + 64)), high0(load(t.high)), high1(load(t.high + 64)),
        order(Z{0, 4, 1, 5, 2, 6, 3, 7}), sign(all8(0x80)), lone_nan(is_nan(t.fp32[128])) {}
  OTTAVA_INLINE void operator()(const uint8_t* codes, int64_t n, Z& x, Z& y) const {
    const Z c = ordered64(order, n >= 64 ? load(codes) : load8(codes, n <= 0 ? 0 : ~0ull >> (64 - n)));
    Z l = chosen8(low0, c, low1), h = a_or_b_and_c(chosen8(high0, c, high1), c, sign);
    if (lone_nan) {
      const uint64_t nans = is_zero8(c ^ sign);
      l = replaced8(l, nans, all8(0xC0)), h = replaced8(h, nans, all8(0x7F));
    }
    x = low8(l, h);
    y = high8(l, h);
  }
};

// bf16 numbers times 2**e: e is added to the exponent, but zero, infinity and NaN stay
OTTAVA_INLINE Z shift(Z x, Z e) {
  const Z field = all16(0x7F80), exponent = x & field;
  return plus16_where(differs16(exponent, Z{}) & differs16(exponent, field), x, e);
}

inline Z exponent_words(const int32_t* e) {  // 16 rows -> both halves of a word, at the place of the exponent
  const I32x16 v = (I32x16)load(e) << 7;
  return (Z)(v << 16 | (v & 0xFFFF));
}

OTTAVA_INLINE void transpose(const uint32_t* in, int64_t in_stride, uint32_t* out, int64_t stride) {
  Z r[16], t[16];
  for (int i = 0; i < 16; i++) r[i] = load(in + i * in_stride);
  for (int i = 0; i < 8; i++) {
    t[2 * i] = low32(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = high32(r[2 * i], r[2 * i + 1]);
  }
  for (int i = 0; i < 4; i++) {
    r[4 * i] = low64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 1] = high64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 2] = low64(t[4 * i + 1], t[4 * i + 3]);
    r[4 * i + 3] = high64(t[4 * i + 1], t[4 * i + 3]);
  }
  for (int i = 0; i < 4; i++) {
    t[i] = even128(r[i], r[4 + i]);
    t[4 + i] = odd128(r[i], r[4 + i]);
    t[8 + i] = even128(r[8 + i], r[12 + i]);
    t[12 + i] = odd128(r[8 + i], r[12 + i]);
  }
  for (int i = 0; i < 4; i++) {
    store(out + i * stride, even128(t[i], t[8 + i]));
    store(out + (4 + i) * stride, even128(t[4 + i], t[12 + i]));
    store(out + (8 + i) * stride, odd128(t[i], t[8 + i]));
    store(out + (12 + i) * stride, odd128(t[4 + i], t[12 + i]));
  }
}

// Rows that lie row by row, as words[row][unit]; units [u0, u1), u0 a multiple of 32, whole 32s are written. `ahead`: the
// distance from a code to the codes that it prefetches.
void decode_rows(const Operand& o, const Decoder& decode, int64_t r0, int64_t count, int64_t u0, int64_t u1,
                 uint32_t* out, int64_t stride, int64_t ahead) {
  for (int64_t i = 0; i < count; i++) {
    const uint8_t* codes = o.side.codes + (r0 + i) * o.side.row_stride;
    for (int64_t u = u0; u < u1; u += 32) {
      Z x, y;
      __builtin_prefetch(codes + 2 * u + ahead);
      decode(codes + 2 * u, o.k - 2 * u, x, y);
      if (o.exponent) {
        int64_t row = r0 + i, cols = o.side.block_cols;
        if (cols % 32 == 0) {
          x = shift(x, all16(int16_t(o.exponents(2 * u)[row] * 128)));
          if (2 * u + 32 < o.k) y = shift(y, all16(int16_t(o.exponents(2 * u + 32)[row] * 128)));
        } else {
          alignas(64) int16_t e[64];
          for (int64_t j = 0; j < 64; j++)
            e[j] = (int16_t)(2 * u + j < o.k ? o.exponents(2 * u + j)[row] * 128 : 0);
          x = shift(x, load(e)), y = shift(y, load(e + 32));
        }
      }
      store(out + i * stride + u - u0, x);
      store(out + i * stride + u - u0 + 16, y);
    }
  }
}

constexpr int64_t AHEAD = 16;
// 64 rows that lie column by column, one unit: 64 words in x
OTTAVA_INLINE void decode_unit(const Operand& o, const Decoder& decode, int64_t r0, int64_t u,
                                                       Z* x) {
  const uint8_t* codes = o.side.codes + r0 + 2 * u * o.side.col_stride;
  int64_t n = o.side.rows - r0;
  for (int64_t at = AHEAD * 2; at < AHEAD * 2 + 2; at++) {  // columns lie far apart, so no hardware prefetches them
    __builtin_prefetch(codes + at * o.side.col_stride, 0, 2);
    __builtin_prefetch(codes + at * o.side.col_stride + 63, 0, 2);
  }
  Z p, q, r{}, s{};
  decode(codes, n, p, q);
  if (2 * u + 1 < o.k) decode(codes + o.side.col_stride, n, r, s);
  alignas(64) static const uint16_t index[64] = {
      0,  32, 1,  33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39, 8,  40, 9,  41, 10, 42,
      11, 43, 12, 44, 13, 45, 14, 46, 15, 47, 16, 48, 17, 49, 18, 50, 19, 51, 20, 52, 21, 53,
      22, 54, 23, 55, 24, 56, 25, 57, 26, 58, 27, 59, 28, 60, 29, 61, 30, 62, 31, 63};
  Z low = load(index), high = load(index + 32);
  x[0] = chosen16(p, low, r);
  x[1] = chosen16(p, high, r);
  x[2] = chosen16(q, low, s);
  x[3] = chosen16(q, high, s);
  if (const int32_t* e = o.exponents(2 * u))
    for (int j = 0; j < 4; j++) x[j] = shift(x[j], exponent_words(e + r0 + 16 * j));
}

// Stores one unit's words of 64 rows into the first `tiles` tiles of 6. Each store writes 2 words too many, and the next
// unit's store overwrites them: units come in ascending order, and there is room between two tiles.
OTTAVA_INLINE void store_tiles(const Z* x, int64_t tiles, uint32_t* to, int64_t stride) {
  static_assert(MR == 6, "the shifts below");
#define OTTAVA_TILE(t)                                                                                          \
  if (t >= tiles) return;                                                                                       \
  store_half(to + t * stride, from32<t * 6 % 16>(x[t * 6 / 16], x[t * 6 / 16 + 1]))
  OTTAVA_TILE(0); OTTAVA_TILE(1); OTTAVA_TILE(2); OTTAVA_TILE(3); OTTAVA_TILE(4);
  OTTAVA_TILE(5); OTTAVA_TILE(6); OTTAVA_TILE(7); OTTAVA_TILE(8); OTTAVA_TILE(9);
#undef OTTAVA_TILE
}
#endif

}  // namespace
