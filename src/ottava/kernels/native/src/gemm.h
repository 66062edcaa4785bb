// Operands of gemm.cpp: it reads their scales and decodes their codes into words for the register tiles.
#pragma once
// Instruction sets, as `native.gemm.LEVELS` numbers them: 0 any; x86-64 1 to 3; aarch64 4 and 5.
#if defined(__AVX512BF16__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define OTTAVA_BEST 3
#elif defined(__AVX512F__)
#define OTTAVA_BEST 2
#elif defined(__AVX2__) && defined(__FMA__)
#define OTTAVA_BEST 1
#elif defined(__aarch64__) && defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define OTTAVA_BEST 5
#elif defined(__aarch64__) && defined(__ARM_NEON)
#define OTTAVA_BEST 4
#else
#define OTTAVA_BEST 0
#endif
#ifndef OTTAVA_LEVEL  // the instruction set of this library
#define OTTAVA_LEVEL OTTAVA_BEST
#elif OTTAVA_LEVEL > OTTAVA_BEST || (OTTAVA_BEST > 3 && OTTAVA_LEVEL > 0 && OTTAVA_LEVEL < 4)
#error "OTTAVA_LEVEL: this CPU has no such instruction set"
#endif

#include "base.h"
#include "floats.h"
#include "simd.h"
#if defined(__aarch64__)
#include <arm_neon.h>
#endif

extern "C" {
struct Side {             // as gemm.py packs it: eight bytes a field
  const uint8_t* codes;   // (rows, k), or bf16 numbers
  int64_t rows, row_stride, col_stride;  // one of the strides is 1
  const float* scale_inv;
  int64_t scale_row_stride, scale_col_stride;
  int64_t block_rows, block_cols;  // size of the block of one scale; block_cols >= k: one block a row
  const float* table;              // the value of each of 256 codes; null: `codes` points to bf16 numbers
};
struct Result {  // y
  void* data;
  int64_t type;  // 0 fp32, 1 bf16, 2 fp16
  const void* bias;
  int64_t bias_type;  // as type
};
struct Call {
  Side a, b;
  Result y;
  int64_t k;
  int64_t step;   // steps of k over which no scale changes, in whole units; k or more: no scale changes along k
  int64_t exact;  // whether the scales along k are powers of two
  int64_t threads;
};
}

namespace {

constexpr int MR = 6;             // rows of a register tile
constexpr int ROWS = 96;          // rows of a that one task decodes, at most
constexpr int64_t CHUNK = 512;    // steps of k in one fp32 sum; sums of chunks are added: shorter chains, less error
constexpr int64_t SPAN = 128 << 10;   // bytes of a panel: each tile in turn reads them from L2
constexpr int64_t FEW_ROWS = 512, FEW_BYTES = 1 << 20;  // limits of a: every thread packs all of it for itself
constexpr int64_t PANEL_BYTES = 8 << 20;  // of packed b at a time: it should stay in a last-level cache
constexpr int FOLD_OCTAVES = 94;  // 126 - 16 (E5M2 x E5M2's smallest product is 2**-32)

enum Mode { PLAIN = 0, FOLD = 1, STEPS = 2 };

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// --- instruction sets: vectors of fp32, and the sum of one unit of k -------------------------------------------------

template <int LANES>
struct Vector {
  typedef float type __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
};

template <int LANES_, int VECTORS_>
struct Fp32 {  // words are fp32 numbers
  static constexpr int LANES = LANES_, VECTORS = VECTORS_, NR = LANES * VECTORS, UNIT = 1;
  typedef typename Vector<LANES>::type V;
  typedef float Word;
  static inline __attribute__((always_inline)) V step(V sum, V b, const Word* a) {
    V x = *a - V{};  // *a in all lanes; minus costs no addition, while plus would: -0 + 0 is 0
#if defined(__FMA__)
    if constexpr (LANES >= 8) {
      __asm__("vfmadd231ps %2, %1, %0" : "+v"(sum) : "v"(x), "v"(b));
      return sum;
    }
#endif
#if defined(__aarch64__)
    if constexpr (LANES == 4) return (V)vfmaq_f32((float32x4_t)sum, (float32x4_t)x, (float32x4_t)b);
#endif
    return sum + x * b;  // the same bits: products of codes are exact
  }
};

#if OTTAVA_LEVEL == 3
struct Bf16 {  // words are pairs of bf16 numbers, k and k + 1
  static constexpr int LANES = 16, VECTORS = 4, NR = 64, UNIT = 2;
  typedef typename Vector<16>::type V;
  typedef uint32_t Word;
  static inline __attribute__((always_inline)) V step(V sum, V b, const Word* a) {
    __asm__("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(all32((int32_t)*a)), "v"(b));
    return sum;
  }
};
#endif

#if OTTAVA_LEVEL == 5
struct Bfmmla {  // words are four bf16 numbers, k to k + 3
  static constexpr int NR = 16, UNIT = 4;
  typedef uint64_t Word;
};
#endif

// The exponent of a positive number, and 2**e, subnormal numbers included.
int exponent_of(float x) {
  int bits = bits_of(x);
  return bits >> 23 ? (bits >> 23) - 127 : 31 - __builtin_clz(bits | 1) - 149;
}
float power(int e) { return float_of(e >= -126 ? (e + 127) << 23 : 1 << (e + 149)); }

// --- one operand: scales and decoding --------------------------------------------------------------------------------

struct Tables {
  float fp32[256];
  uint16_t bf16[256];
  alignas(64) uint8_t low[128], high[128];
};

Tables make_tables(const float* values) {
  Tables t;
  if (!values) return t;
  for (int i = 0; i < 256; i++) {
    uint32_t bits;
    t.fp32[i] = values[i];
    std::memcpy(&bits, &values[i], 4);
    t.bf16[i] = (uint16_t)(bits >> 16);  // exact
    if (i < 128) t.low[i] = (uint8_t)t.bf16[i], t.high[i] = (uint8_t)(t.bf16[i] >> 8);
  }
  return t;
}

// One element of an operand, as fp32.
struct Codes {
  const uint8_t* codes;
  const float* table;
  static constexpr int64_t LINE = 64;  // numbers of a cache line
  float operator[](int64_t at) const { return table[codes[at]]; }
  void prefetch(int64_t at) const { __builtin_prefetch(codes + at); }
};
struct Bf16s {
  const uint16_t* numbers;
  static constexpr int64_t LINE = 32;
  float operator[](int64_t at) const { return float_of((int32_t)((uint32_t)numbers[at] << 16)); }
  void prefetch(int64_t at) const { __builtin_prefetch(numbers + at); }
};

struct Operand {
  Side side;
  Tables tables;
  int64_t k, steps;               // steps: blocks along k
  int64_t padded;           // rows, to a whole number of panels
  Array<float> row_scale;   // PLAIN, FOLD: for the epilogue
  Array<float> step_scale;  // STEPS: [chunk][row]
  Array<int32_t> exponent;  // FOLD: [step][row], at most 0, none if there is one step

  Operand(const Side& side, int64_t k)  // row_scale is false if there was no memory
      : side(side), tables(make_tables(side.table)), k(k), steps(ceil_div(k, side.block_cols)),
        padded(ceil_div(side.rows, 64) * 64 + 64), row_scale(padded) {
    if (!row_scale) return;
    fill(row_scale.get(), padded, 1.0f);
    if (steps == 1) scales_at(0, row_scale.get());
  }

  // Scales of all rows at column k0.
  void scales_at(int64_t k0, float* to) const {
    const float* at = side.scale_inv + k0 / side.block_cols * side.scale_col_stride;
    for (int64_t r = 0; r < side.rows; r += side.block_rows, at += side.scale_row_stride)
      fill(to + r, smaller(side.block_rows, side.rows - r), *at);
  }
  Codes coded() const { return {side.codes, tables.fp32}; }
  Bf16s bf16s() const { return {(const uint16_t*)side.codes}; }
  const int32_t* exponents(int64_t k0) const {
    return exponent ? exponent.get() + k0 / side.block_cols * padded : nullptr;
  }
};

constexpr int NO_POWER = 1000, NO_MEMORY = 1000000;  // more octaves than any two scales are apart

// Fills row_scale and exponent; the largest number of octaves between two scales of a row, or one of the above.
int fold(Operand& o) {
  if (o.steps == 1) return 0;
  const Side& side = o.side;
  if (!o.exponent.make(o.steps * o.padded)) return NO_MEMORY;
  fill(o.exponent.get(), o.steps * o.padded, 0);
  int spread = 0;
  for (int64_t r = 0, block = 0; r < side.rows; r += side.block_rows, block++) {
    const int64_t rows = smaller(side.block_rows, side.rows - r);
    const float* scales = side.scale_inv + block * side.scale_row_stride;
    int32_t* exponents = o.exponent.get() + r;
    int top = -10000, bottom = 10000;
    for (int64_t s = 0; s < o.steps; s++) {
      const float scale = scales[s * side.scale_col_stride];
      const int e = exponent_of(scale);
      if (!(scale > 0) || !is_finite(scale) || scale != power(e)) return NO_POWER;
      exponents[s * o.padded] = e;
      top = larger(top, e), bottom = smaller(bottom, e);
    }
    for (int64_t s = 0; s < o.steps; s++, exponents += o.padded) {
      *exponents -= top;
      for (int64_t i = 1; i < rows; i++) exponents[i] = *exponents;
    }
    fill(o.row_scale.get() + r, rows, power(top));
    spread = larger(spread, top - bottom);
  }
  return spread;
}

bool scale_steps(Operand& o, int64_t chunk) {
  int64_t chunks = ceil_div(o.k, chunk);
  if (!o.step_scale.make(chunks * o.padded)) return false;
  fill(o.step_scale.get(), chunks * o.padded, 0.0f);
  fill(o.row_scale.get(), o.padded, 1.0f);
  o.exponent.drop();
  for (int64_t c = 0; c < chunks; c++) o.scales_at(c * chunk, o.step_scale.get() + c * o.padded);
  return true;
}

// Words of `count` rows from row r0, units [u0, u1), any layout: word of row i, unit u at out[(i / w * w * n + i % w) +
// (u - u0) * w] for w = width; n units in a row.
template <class Isa>
void pack_slowly(const Operand& o, int64_t r0, int64_t count, int64_t u0, int64_t u1, int width, int64_t stride,
                 typename Isa::Word* out) {
  const Side& s = o.side;
  for (int64_t i = 0; i < count; i++)
    for (int64_t u = u0; u < u1; u++) {
      typename Isa::Word word = 0;
      for (int h = 0; h < Isa::UNIT; h++) {
        int64_t k = u * Isa::UNIT + h, r = r0 + i;
        if (k >= o.k || r >= s.rows) continue;
        const int64_t at = r * s.row_stride + k * s.col_stride;
        const int32_t* e = o.exponents(k);
        float x = s.table ? o.coded()[at] : o.bf16s()[at];
        if (e) x *= power(e[r]);
        if constexpr (Isa::UNIT == 1) {
          word = x;
        } else {
          uint32_t bits;
          std::memcpy(&bits, &x, 4);
          word |= (typename Isa::Word)(bits >> 16) << (16 * h);
        }
      }
      out[i / width * width * stride + i % width + (u - u0) * width] = word;
    }
}

// The same for words of one fp32 number without scales: W rows side by side, of `count` in all.
template <int W, class Numbers>
void pack_fp32(const Operand& o, const Numbers numbers, int64_t r0, int64_t count, int64_t u0, int64_t u1,
               int64_t stride, float* out) {
  const Side& s = o.side;
  constexpr int64_t AT_ONCE = 64;  // units: the words written for them stay in L1
  for (int64_t i = 0; i < count; i += W, out += W * stride) {
    const int64_t r = r0 + i, rows = between<int64_t>(s.rows - r, 0, W);
    if (rows < W) fill(out, (u1 - u0) * W, 0.0f);
    if (s.row_stride == 1)
      for (int64_t u = u0; u < u1; u++) {
        float* to = out + (u - u0) * W;
        const int64_t from = r + u * s.col_stride;
        if (rows == W)
          for (int j = 0; j < W; j++) to[j] = numbers[from + j];
        else
          for (int64_t j = 0; j < rows; j++) to[j] = numbers[from + j];
      }
    else
      for (int64_t u = u0; u < u1; u += AT_ONCE)
        for (int64_t j = 0; j < rows; j++) {
          const int64_t from = (r + j) * s.row_stride, end = smaller(u + AT_ONCE, u1);
          float* to = out + (u - u0) * W + j;
          for (int64_t v = u; v < end; v++, to += W) *to = numbers[from + v];
        }
  }
}

// n numbers one after the other, as fp32.
template <class Numbers>
inline void copy_numbers(const Numbers numbers, int64_t from, int64_t n, float* to) {
  constexpr int AT_ONCE = 16;  // a compiler makes vectors of a loop with a known end
  int64_t i = 0;
  for (; i + AT_ONCE <= n; i += AT_ONCE)
    for (int j = 0; j < AT_ONCE; j++) to[i + j] = numbers[from + i + j];
  for (; i < n; i++) to[i] = numbers[from + i];
}

// Tiles of rows that lie column by column: some columns of many tiles become fp32 side by side, then go to their tiles.
template <class Numbers>
void pack_tiles(const Operand& o, const Numbers numbers, int64_t r0, int64_t tiles, int64_t units, float* out) {
  constexpr int64_t DEEP = 16, AT_ONCE = ROWS / MR;  // columns, and tiles, whose numbers stay in L1
  float fp32[DEEP * ROWS] = {};
  const int64_t column = o.side.col_stride;
  for (int64_t t0 = 0; t0 < tiles; t0 += AT_ONCE, r0 += ROWS) {
    const int64_t rows = smaller<int64_t>(ROWS, o.side.rows - r0), count = smaller(AT_ONCE, tiles - t0);
    if (rows < ROWS) fill(fp32, DEEP * ROWS, 0.0f);
    for (int64_t u = 0; u < units; u += DEEP) {
      const int64_t deep = smaller(DEEP, units - u);
      for (int64_t v = 0; v < deep; v++) {
        const int64_t from = r0 + (u + v) * column;
        for (int64_t r = 0; r < rows; r += numbers.LINE) numbers.prefetch(from + DEEP * column + r);  // no hardware does
        copy_numbers(numbers, from, rows, fp32 + v * ROWS);
      }
      for (int64_t t = 0; t < count; t++)
        for (int64_t v = 0; v < deep; v++)
          std::memcpy(out + ((t0 + t) * units + u + v) * MR, fp32 + v * ROWS + t * MR, MR * sizeof(float));
    }
  }
}

// A block of a without scales along k, in fp32: see `layout_of_a`.
template <class Numbers>
void pack_block_fp32(const Operand& o, const Numbers numbers, int64_t r0, int64_t tiles, int64_t units, int64_t stride,
                     float* out) {
  if (o.side.col_stride != 1) return pack_tiles(o, numbers, r0, tiles, units, out);
  const int64_t rows = smaller(tiles * MR, o.side.rows - r0);
  for (int64_t i = 0; i < rows; i++) copy_numbers(numbers, (r0 + i) * o.side.row_stride, units, out + i * stride);
  fill(out + rows * stride, (tiles * MR - rows) * stride, 0.0f);
}

// Words of any kind, by the fastest way without AVX512-VBMI.
template <class Isa, int W>
void pack_any(const Operand& o, int64_t r0, int64_t count, int64_t u0, int64_t u1, int64_t stride,
              typename Isa::Word* out) {
  if constexpr (Isa::UNIT == 1)
    if (!o.exponent) {
      if (o.side.table) return pack_fp32<W>(o, o.coded(), r0, count, u0, u1, stride, out);
      return pack_fp32<W>(o, o.bf16s(), r0, count, u0, u1, stride, out);
    }
  pack_slowly<Isa>(o, r0, count, u0, u1, W, stride, out);
}

}  // namespace

#include "gemm_decode.h"

namespace {

// One panel of b, units [u0, u1).
template <class Isa>
void pack_panel(const Operand& o, int64_t r0, int64_t u0, int64_t u1, typename Isa::Word* out) {
#if defined(OTTAVA_FAST_PACK)
  if (o.side.table) {
    Decoder decode(o.tables);
    if (o.side.col_stride != 1) {
      for (int64_t u = u0; u < u1; u++, out += Isa::NR) {
        Z x[4];
        decode_unit(o, decode, r0, u, x);
        for (int j = 0; j < 4; j++) store(out + 16 * j, x[j]);
      }
      return;
    }
    alignas(64) uint32_t rows[64 * 32];
    int64_t count = smaller<int64_t>(64, o.side.rows - r0);
    if (count < 64) std::memset(rows, 0, sizeof rows);
    for (int64_t u = u0; u < u1; u += 32) {
      decode_rows(o, decode, r0, count, u, u + 1, rows, 32, 64);
      alignas(64) uint32_t last[16 * 64];
      for (int64_t v = u; v < smaller(u + 32, u1); v += 16) {
        bool whole = v + 16 <= u1;
        uint32_t* to = whole ? out + (v - u0) * Isa::NR : last;
        for (int64_t g = 0; g < 64; g += 16) transpose(rows + g * 32 + v - u, 32, to + g, Isa::NR);
        if (!whole) std::memcpy(out + (v - u0) * Isa::NR, last, (u1 - v) * Isa::NR * 4);
      }
    }
    return;
  }
#endif
  pack_any<Isa, Isa::NR>(o, r0, Isa::NR, u0, u1, u1 - u0, out);
}

// The layout of a packed block of a: the word of row i of tile t and unit u is at [t * tile + i * row + u * unit].
struct Layout {
  int64_t tile, row, unit;
};

template <class Isa>
Layout layout_of_a(const Operand& o) {
  const int64_t units = ceil_div(o.k, Isa::UNIT);
#if defined(OTTAVA_FAST_PACK)
  if (o.side.table) {  // the stride is no power of two, because rows would share cache sets
    const int64_t stride = ceil_div(units, 32) * 32 + 16;
    return o.side.col_stride == 1 ? Layout{MR * stride, stride, 1} : Layout{MR * units + 8, 1, MR};
  }
#endif
  if (Isa::UNIT == 1 && !o.exponent && o.side.col_stride == 1) {
    const int64_t stride = ceil_div(units, 16) * 16 + 16;
    return {MR * stride, stride, 1};
  }
  return {MR * units, 1, MR};
}

template <class Isa>
void pack_block(const Operand& o, int64_t r0, int64_t count, const Layout& layout, typename Isa::Word* out) {
  int64_t units = ceil_div(o.k, Isa::UNIT);
#if defined(OTTAVA_FAST_PACK)
  if (o.side.table) {
    Decoder decode(o.tables);
    if (o.side.col_stride == 1) {
      decode_rows(o, decode, r0, count, 0, units, out, layout.row, ceil_div(1024, o.k) * o.side.row_stride);
      for (int64_t i = count; i % MR; i++) std::memset(out + i * layout.row, 0, layout.row * 4);
      return;
    }
    constexpr int TILES = 64 / MR;  // decoding takes 64 rows at a time; 60 of them are whole tiles
    for (int64_t i = 0; i < count; i += TILES * MR)
      for (int64_t u = 0; u < units; u++) {
        Z x[5] = {};
        decode_unit(o, decode, r0 + i, u, x);
        store_tiles(x, smaller<int64_t>(TILES, ceil_div(count - i, MR)), out + i / MR * layout.tile + u * MR, layout.tile);
      }
    return;
  }
#endif
  const int64_t tiles = ceil_div(count, MR);
  if constexpr (Isa::UNIT == 1)
    if (!o.exponent) {
      if (o.side.table) return pack_block_fp32(o, o.coded(), r0, tiles, units, layout.row, out);
      return pack_block_fp32(o, o.bf16s(), r0, tiles, units, layout.row, out);
    }
  pack_any<Isa, MR>(o, r0, tiles * MR, 0, units, units, out);
}

}  // namespace
