// The numbers of a tally that rows add up to: counts, sums, extremes and each row's own SQNR. native_measure.h walks over
// bands and adds histograms where they are asked for; both tiers have these from here, so their bits are the same.
//
// Counts are exact. Sums: fp32 in the lanes of a vector for at most 1024 columns, then fp64 lanes for 32 rows.

#pragma once

#include "native_base.h"
#include "native_float.h"
#include "native_vectors.h"

#if defined(__AVX512VBMI__) && defined(__AVX512BW__) && defined(__AVX512DQ__)
#include <immintrin.h>
#define OTTAVA_SWIFT 1
#else
#define OTTAVA_SWIFT 0
#endif

extern "C" struct Job {  // native_measure._Job
  const void* x;
  const uint8_t* codes;    // null: cast x first, as `cast` says
  const float* scale_inv;  // null with them
  const void* cast;        // native_quantize.cpp's Cast
  const float* given;      // the scale of that cast; null: the current one
  const double* extent;    // of the tensor that x is part of, see Extent
  int64_t rows, cols, x_row, x_col, code_row, code_col;  // strides in elements; one of each pair is 1
  int64_t block_rows, block_cols, grid_cols, scale_count;
  int32_t mantissa_bits, bias, bits, special_code, detail, tie_clips, predicted, by_whole;
  double clip;
  double* sums;      // (width), zeros
  double* extremes;  // see Extreme
};

namespace {

enum Detail { NUMBERS, EXPONENTS, BLOCKS };  // native_measure.DETAILS: each has what those before it have
enum Field {  // native_measure.FIELDS
  N, NONZERO, UNDERFLOW_, SUBNORMAL, OVERFLOW_, ROWS, SX, SABS, SXX, SX4, SEE, SXE, SREL,
  ROW_SQNR, SPREAD, QUARTERS, BELOW, SCALES = BELOW + 8, SCALE_LOG2, SCALE_LOG2_SQUARED,
  TOTAL, CASTS, NONFINITE, PREDICTED, SCALE_ERROR
};
enum Extreme { AMAX, AMIN, MAX_ERROR, SCALE_MAX, SCALE_MIN, SCALE_ERROR_MAX, SCALE_ERROR_MIN };  // minima negated
enum Extent { LARGEST, LARGEST_FINITE, NOT_FINITE, ELEMENTS };  // LARGEST: inf or NaN where an element is
constexpr int SUMS = 7, SQNR_BINS = 128, SPREAD_BINS = 32;
constexpr int64_t CHUNK = 128, STRETCH = 1024, GROUP = 32;  // columns; columns summed in fp32; rows summed in one go

typedef double D __attribute__((vector_size(LANES * 4)));  // half as many
typedef float HalfV __attribute__((vector_size(LANES * 2)));

inline D doubles(V v) {
  HalfV halves[2];
  std::memcpy(halves, &v, sizeof(v));
  return __builtin_convertvector(halves[0], D) + __builtin_convertvector(halves[1], D);
}

inline double total(D d) {  // as a tree
  for (int step = LANES / 4; step > 0; step /= 2)
    for (int l = 0; l < step; l++) d[l] += d[l + step];
  return d[0];
}

// Exponent of the power of two that brings an amax into [1, 2); a subnormal one as far as can be.
inline int32_t exponent_of_unit(float amax) {
  return between(127 - (amax > 0 ? larger(bits_of(amax) >> 23, 1) : 127), -126, 126);
}
inline float unit_of(float amax) { return float_of((exponent_of_unit(amax) + 127) << 23); }

struct Group {  // of at most 32 rows
  D sums[SUMS];
  int64_t nonzero, kept, subnormal, infinite;
};

struct Stretch {  // of a row, and of the thread that is there
  alignas(64) float scale[STRETCH + LANES];  // of each column, times `factor`; or, if there is one for all, of LANES
  float least[STRETCH / CHUNK];              // the smallest of each chunk
  int32_t lowest, highest;                   // bits of the smallest and the largest of all
};

template <class T>
struct Rows {
  using Int = typename T::Int;
  const Job& job;
  const int64_t* places;
  const Decoder decode;
  const float amax;
  const bool clean;  // all of the tensor is finite
#if OTTAVA_SWIFT
  alignas(64) uint8_t low[128], high[128];  // bytes of codes as BF16 numbers, which they are exactly; but for bit 7
#endif

  Rows(const Job& j, const int64_t* p)
      : job(j), places(p), decode(j.mantissa_bits, j.bias, j.bits, j.special_code),
        amax(float(j.extent[LARGEST_FINITE])), clean(j.extent[NOT_FINITE] == 0) {
#if OTTAVA_SWIFT
    for (int code = 0; code < 128; code++) {
      const uint32_t bits = uint32_t(decode(code));
      low[code] = uint8_t(bits >> 16), high[code] = uint8_t(bits >> 24);
    }
#endif
  }

  static inline Int finite(Int bits) {
    const Int magnitude = bits & T::mask;
    return magnitude >= T::infinity ? Int(0) : magnitude;
  }

  // Counts a block of 1x128 by the octaves that its amax lies below the tensor's.
  inline void count_spread(float most, double* out) const {
    constexpr int32_t normal = 1 << 23;
    if (!(most > 0)) return;
    const int32_t octaves = bits_of(most) >= normal ? (bits_of(amax) - bits_of(most)) >> 23  // rounds down, as it should
                                                    : (bits_of(amax / most) >> 23) - 127;
    out[places[SPREAD] + between(octaves, 0, SPREAD_BINS - 1)]++;
  }

  // Amaxes of the chunks of a row; gives that of all of it.
  float look(const Int* x, float* chunks, double* out) const {
    Int most_of_all = 0;
    for (int64_t left = 0, c = 0; left < job.cols; left += CHUNK, c++) {
      const Int most = largest_of(x + left, smaller(CHUNK, job.cols - left));
      most_of_all = larger(most_of_all, most);
      chunks[c] = T::value(most);
      count_spread(chunks[c], out);
    }
    return T::value(most_of_all);
  }

  inline Int largest_of(const Int* x, int64_t n) const {
    Int most = 0;
#if OTTAVA_SWIFT
    if (n == CHUNK && clean) return largest_word(x, CHUNK);
#endif
    for (int64_t i = 0; i < n; i++) most = larger(most, finite(x[i]));
    return most;
  }

  // Adds a row. largest, chunks: its amax, and those of its chunks.
  void add(const Int* x, const uint8_t* codes, int64_t number, float largest, const float* chunks, Stretch& s, Group& group,
           double* out, double* extremes) const {
    const int32_t exponent = exponent_of_unit(largest);
    const double once = __builtin_ldexp(1.0, -exponent), twice = once * once;
    const double units[] = {once, once, twice, twice * twice, twice, twice, 1.0};  // sums are of x * unit, x ** 2 ...
    Row row{};
    if (!swift(x, codes, number, exponent, s, row)) {
      row = Row{};
      careful(x, codes, number, unit_of(largest), s, row);
    }
    clipped(x, codes, number, chunks, largest, s, out);
    for (int k = 0; k < SUMS; k++) group.sums[k] += row.sums[k] * units[k];
    group.nonzero += row.nonzero, group.kept += row.kept, group.subnormal += row.subnormal, group.infinite += row.infinite;
    if (row.smallest > 0) extremes[AMIN] = larger(extremes[AMIN], -double(row.smallest));
    extremes[MAX_ERROR] = larger(extremes[MAX_ERROR], double(row.max_error));
    const double signal = total(row.sums[2]);  // sxx
    if (!(signal > 0)) return;
    const double bin = -10 * __builtin_log10(total(row.sums[4]) / signal) / 0.5;
    out[places[ROWS]]++;
    out[places[ROW_SQNR] + (bin > 0 ? int(smaller(bin, SQNR_BINS - 1.0)) : 0)]++;
  }

  // Adds rows that were summed, of so many elements; gives how many of these are not zero.
  int64_t finish(const Group& group, int64_t elements, double* out) const {
    for (int k = 0; k < SUMS; k++) out[places[SX + k]] += total(group.sums[k]);
    out[places[N]] += double(elements - group.infinite);
    out[places[NONZERO]] += double(group.nonzero);
    out[places[UNDERFLOW_]] += double(group.nonzero - group.kept);
    out[places[SUBNORMAL]] += double(group.subnormal);
    return group.nonzero;
  }

 private:
  struct Row {
    D sums[SUMS];
    int64_t nonzero, kept, subnormal, infinite;
    float smallest, max_error;  // smallest: 0 if all are
  };

  // Scales of some columns, times a power of two.
  void scales(int64_t row, int64_t left, int64_t n, float factor, Stretch& s) const {
    const float* from = job.scale_inv + row / job.block_rows * job.grid_cols;
    const bool each = job.grid_cols > 1;
    if (!each) n = LANES;
    fill(s.least, STRETCH / CHUNK, __builtin_inff());
    s.lowest = MAGNITUDE, s.highest = 0;
    int64_t block = each ? left / job.block_cols : 0;
    for (int64_t i = 0; i < n; block++) {
      const int64_t end = each ? smaller((block + 1) * job.block_cols - left, n) : n;
      const V scale = spread(from[block] * factor);
      const int32_t bits = bits_of(from[block]);
      s.lowest = smaller(s.lowest, bits), s.highest = larger(s.highest, bits);
      for (int64_t c = i / CHUNK; c <= (end - 1) / CHUNK; c++) s.least[c] = smaller(s.least[c], from[block]);
      for (; i < end; i += LANES) std::memcpy(s.scale + i, &scale, sizeof(scale));  // the next block writes over what is its
      i = end;
    }
    if (!each) fill(s.least, STRETCH / CHUNK, from[0]);
  }

  // Elements beyond the largest number of the format, in chunks whose amax is near it.
  void clipped(const Int* x, const uint8_t* codes, int64_t number, const float* chunks, float largest, Stretch& s,
               double* out) const {
    const double near = job.clip * (1 - 1.0 / 64);
    const bool each = job.grid_cols > 1;
    if (!each && largest < near * job.scale_inv[number / job.block_rows]) return;
    for (int64_t left = 0; left < job.cols; left += STRETCH) {
      const int64_t n = smaller(STRETCH, job.cols - left);
      if (left == 0 || each) scales(number, left, n, 1.0f, s);
      for (int64_t i = 0; i < n; i += CHUNK) {
        const float most = chunks[(left + i) / CHUNK];
        if (most > 0 && !(most < near * s.least[i / CHUNK]))
          count_clipped(x + left + i, codes + left + i, smaller(CHUNK, n - i), s.scale + (each ? i : 0), each, out);
      }
    }
  }

  void count_clipped(const Int* x, const uint8_t* codes, int64_t n, const float* scales, bool each, double* out) const {
    for (int64_t i = 0; i < n; i++) {
      const float scale = scales[each ? i : 0];
      const int32_t bits = bits_of(T::value(x[i])) & MAGNITUDE;
      const double magnitude = double(float_of(bits)), end = job.clip * double(scale);
      const bool clips = job.tie_clips ? magnitude >= end : magnitude > end;
      // where even the scale of a block underflowed, an element is lost, not clipped
      if (bits < INFINITE && clips && float_of(decode(codes[i])) * scale != 0) out[places[OVERFLOW_]]++;
    }
  }

  // --- any numbers, on any CPU ---------------------------------------------------------------------------------------

  struct Lanes {
    V sums[SUMS], max_error;
    I nonzero, kept, subnormal, infinite, smallest;
  };

  void careful(const Int* x, const uint8_t* codes, int64_t number, float unit, Stretch& s, Row& row) const {
    alignas(64) Int some_x[LANES];
    alignas(64) uint8_t some_codes[LANES];
    Lanes lanes{};
    lanes.smallest += MAGNITUDE;
    const int64_t step = job.grid_cols > 1;
    for (int64_t left = 0; left < job.cols; left += STRETCH) {
      const int64_t n = smaller(STRETCH, job.cols - left), whole = n / LANES * LANES;
      if (left == 0 || step) scales(number, left, n, 1.0f, s);
      vectors(x + left, codes + left, whole, s.scale, step, unit, lanes);
      if (whole < n) {  // zeros change nothing: they are not counted
        std::memset(some_x, 0, sizeof(some_x));
        std::memset(some_codes, 0, sizeof(some_codes));
        std::memcpy(some_x, x + left + whole, size_t(n - whole) * sizeof(Int));
        std::memcpy(some_codes, codes + left + whole, size_t(n - whole));
        for (int64_t i = n; step && i < whole + LANES; i++) s.scale[i] = 1.0f;
        vectors(some_x, some_codes, LANES, s.scale + whole * step, step, unit, lanes);
      }
      for (int k = 0; k < SUMS; k++) row.sums[k] += doubles(lanes.sums[k]), lanes.sums[k] = V{};
    }
    int32_t smallest = MAGNITUDE;
    for (int l = 0; l < LANES; l++) {
      row.nonzero -= lanes.nonzero[l];
      row.kept -= lanes.kept[l];
      row.infinite -= lanes.infinite[l];
      row.subnormal -= lanes.subnormal[l];
      smallest = smaller(smallest, lanes.smallest[l]);
      row.max_error = larger(row.max_error, lanes.max_error[l]);
    }
    row.smallest = smallest < MAGNITUDE ? float_of(smallest + 1) : 0.0f;
  }

  inline void vectors(const Int* x, const uint8_t* codes, int64_t n, const float* scales, int64_t step, float unit,
                      Lanes& lanes) const {
    Lanes a = lanes;
    const Decoder d = decode;
    for (int64_t i = 0; i < n; i += LANES) {
      const I raw = fp32_bits<T>(x + i), beyond = (raw & MAGNITUDE) >= INFINITE;
      const I bits = raw & ~beyond, magnitude_bits = bits & MAGNITUDE;
      const I code = widened(load<B>(codes + i)), fields = (code & d.magnitudes) << d.shift;
      const I normal = fields + (fields >= d.special ? spread(2 * d.rebias) : spread(d.rebias));
      const I tiny = as<I>(as<V>(fields + d.smallest_normal) - spread(float_of(d.smallest_normal)));
      const I number = ((fields < (1 << 23) ? tiny : normal) | ((code << d.sign_shift) & ~MAGNITUDE)) & ~beyond;
      const V value = as<V>(bits), magnitude = as<V>(magnitude_bits), scale = load<V>(scales + i * step);
      const V q = as<V>(number) * scale, error = value - q, size = as<V>(as<I>(error) & MAGNITUDE);
      const V y = value * unit, e = error * unit, square = y * y;
      const I nonzero = magnitude_bits != 0;
      a.sums[0] += y;
      a.sums[1] += magnitude * unit;
      a.sums[2] += square;
      a.sums[3] += square * square;
      a.sums[4] += e * e;
      a.sums[5] += y * e;
      a.sums[6] += size / (nonzero ? magnitude : spread(__builtin_inff()));
      a.max_error = size > a.max_error ? size : a.max_error;
      a.nonzero += nonzero;
      a.kept += q != 0;
      a.subnormal += (fields > 0) & (fields < (1 << 23)) & ~beyond;
      a.infinite += beyond;
      const I below_zero_last = (magnitude_bits - 1) & MAGNITUDE;  // zeros wrap around to the top
      a.smallest = below_zero_last < a.smallest ? below_zero_last : a.smallest;
    }
    lanes = a;
  }

  // --- numbers that keep their bits when they are multiplied with a power of two, 64 at a time -------------------------

#if OTTAVA_SWIFT
  static constexpr bool WORDS = sizeof(Int) == 2;

  static inline __m512i magnitudes(__m512i x) {
    return _mm512_and_si512(x, WORDS ? _mm512_set1_epi16(0x7fff) : _mm512_set1_epi32(MAGNITUDE));
  }
  static inline __m512i larger_of(__m512i a, __m512i b) { return WORDS ? _mm512_max_epi16(a, b) : _mm512_max_epi32(a, b); }

  static inline Int largest_word(const Int* x, int64_t n) {
    constexpr int64_t EACH = 64 / sizeof(Int);
    __m512i most = magnitudes(_mm512_loadu_si512(x));
    for (int64_t i = EACH; i < n; i += EACH) most = larger_of(most, magnitudes(_mm512_loadu_si512(x + i)));
    if (!WORDS) return Int(_mm512_reduce_max_epi32(most));
    const __m256i half = _mm256_max_epi16(_mm512_castsi512_si256(most), _mm512_extracti64x4_epi64(most, 1));
    const __m128i quarter = _mm_max_epi16(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
    const __m128i smallest = _mm_minpos_epu16(_mm_xor_si128(quarter, _mm_set1_epi16(0x7fff)));  // there is no maxpos
    return Int(0x7fff - _mm_cvtsi128_si32(smallest));
  }

  struct Swift {
    V sums[SUMS], max_error;
    __m512i smallest;  // less 1, so that zeros are the largest
    int64_t nonzero, kept, normal;
  };

  // False where a product might be subnormal or infinite.
  bool swift(const Int* x, const uint8_t* codes, int64_t number, int32_t exponent, Stretch& s, Row& row) const {
    if (!clean) return false;
    const int32_t least_code = smaller(1 - job.bias - job.mantissa_bits, 0);  // exponents of codes: the smallest ..
    const int32_t last_code = larger((1 << (job.bits - 1 - job.mantissa_bits)) - job.bias, 0);  // .. and beyond the largest
    const int32_t low_scale = 1 - least_code - smaller(exponent, 0), high_scale = 253 - last_code - larger(exponent, 0);
    const float unit = float_of((exponent + 127) << 23);
    Swift a{};
    a.smallest = _mm512_set1_epi32(-1);
    const int64_t step = job.grid_cols > 1;
    for (int64_t left = 0; left < job.cols; left += STRETCH) {
      const int64_t n = smaller(STRETCH, job.cols - left), whole = n / 64 * 64;
      if (left == 0 || step) scales(number, left, n, unit, s);
      if (s.lowest < low_scale << 23 || s.highest >= high_scale << 23) return false;
      words(x + left, codes + left, whole, s.scale, step, unit, a);
      if (whole < n) {
        alignas(64) Int some_x[64] = {};
        alignas(64) uint8_t some_codes[64] = {};
        std::memcpy(some_x, x + left + whole, size_t(n - whole) * sizeof(Int));
        std::memcpy(some_codes, codes + left + whole, size_t(n - whole));
        for (int64_t i = n; step && i < whole + 64; i++) s.scale[i] = 1.0f;
        words(some_x, some_codes, 64, s.scale + whole * step, step, unit, a);
      }
      for (int k = 0; k < SUMS; k++) row.sums[k] += doubles(a.sums[k]), a.sums[k] = V{};
    }
    Int least[64 / sizeof(Int)];
    _mm512_storeu_si512(least, a.smallest);
    using Unsigned = decltype(as_unsigned(Int()));
    Unsigned smallest = Unsigned(-1);
    for (Int one : least) smallest = smaller(smallest, Unsigned(one));
    row.smallest = T::value(Int(Unsigned(smallest + 1)));
    if (row.smallest > 0 && bits_of(row.smallest) < (1 + larger(-exponent, 0)) << 23) return false;
    row.nonzero = a.nonzero, row.kept = a.kept, row.subnormal = a.kept - a.normal;
    for (int l = 0; l < LANES; l++) row.max_error = larger(row.max_error, a.max_error[l]);
    row.max_error /= unit;
    return true;
  }
  static inline uint16_t as_unsigned(int16_t x) { return uint16_t(x); }
  static inline uint32_t as_unsigned(int32_t x) { return uint32_t(x); }

  // noinline: its registers are all taken
  __attribute__((noinline)) void words(const Int* x, const uint8_t* codes, int64_t n, const float* scales, int64_t step,
                                       float in_units, Swift& sums) const {
    Swift a = sums;
    const __m512i low0 = _mm512_load_si512(low), low1 = _mm512_load_si512(low + 64);
    const __m512i high0 = _mm512_load_si512(high), high1 = _mm512_load_si512(high + 64);
    const __m512i order = _mm512_set_epi64(0x3f3e3d3c3b3a3938, 0x1f1e1d1c1b1a1918, 0x3736353433323130, 0x1716151413121110,
                                           0x2f2e2d2c2b2a2928, 0x0f0e0d0c0b0a0908, 0x2726252423222120, 0x0706050403020100);
    const __m512i first = _mm512_set_epi64(0x000f000f000e000e, 0x000d000d000c000c, 0x000b000b000a000a, 0x0009000900080008,
                                           0x0007000700060006, 0x0005000500040004, 0x0003000300020002, 0x0001000100000000);
    const __m512i second = _mm512_add_epi16(first, _mm512_set1_epi16(16)), sign = _mm512_set1_epi8(char(0x80));
    const __m512i magnitude = _mm512_set1_epi8(char((1 << (job.bits - 1)) - 1));
    const __m512i exponents = _mm512_set1_epi8(char((1 << (job.bits - 1)) - (1 << job.mantissa_bits)));
    const __m512 unit = _mm512_set1_ps(in_units), two = _mm512_set1_ps(2.0f);
    for (int64_t i = 0; i < n; i += 64) {
      const __m512i code = _mm512_loadu_si512(codes + i), shuffled = _mm512_permutexvar_epi8(order, code);
      a.kept += __builtin_popcountll(_mm512_test_epi8_mask(code, magnitude));
      a.normal += __builtin_popcountll(_mm512_test_epi8_mask(code, exponents));
      const __m512i lower = _mm512_permutex2var_epi8(low0, shuffled, low1);
      const __m512i upper = _mm512_permutex2var_epi8(high0, shuffled, high1);
      const __m512i signed_upper = _mm512_ternarylogic_epi32(upper, shuffled, sign, 0xf8);  // upper | (code & sign)
      const __m512i halves[] = {_mm512_unpacklo_epi8(lower, signed_upper), _mm512_unpackhi_epi8(lower, signed_upper)};
#pragma GCC unroll 4
      for (int j = 0; j < 4; j++) {
        const __m512i word = _mm512_maskz_permutexvar_epi16(0xaaaaaaaa, j % 2 ? second : first, halves[j / 2]);
        __mmask16 nonzero;
        const __m512 value = values(x + i, j, first, second, a, nonzero);
        const __m512 y = _mm512_mul_ps(value, unit);
        const __m512 q = _mm512_mul_ps(_mm512_castsi512_ps(word), _mm512_loadu_ps(scales + (i + 16 * j) * step));
        const __m512 e = _mm512_sub_ps(y, q), size = _mm512_abs_ps(e), most = _mm512_abs_ps(y), square = _mm512_mul_ps(y, y);
        a.sums[0] += y;
        a.sums[1] += most;
        a.sums[2] += square;
        a.sums[3] = _mm512_fmadd_ps(square, square, a.sums[3]);
        a.sums[4] = _mm512_fmadd_ps(e, e, a.sums[4]);
        a.sums[5] = _mm512_fmadd_ps(y, e, a.sums[5]);
        // one step of Newton's makes 28 bits of 14: size / most = size * r * (2 - most * r)
        const __m512 r = _mm512_maskz_rcp14_ps(nonzero, most), better = _mm512_fnmadd_ps(most, r, two);
        a.sums[6] = _mm512_fmadd_ps(_mm512_mul_ps(size, r), better, a.sums[6]);
        a.max_error = _mm512_max_ps(size, a.max_error);
      }
    }
    sums = a;
  }

  // Numbers 16 j to 16 j + 15 of 64.
  static inline __m512 values(const Int* x, int j, __m512i first, __m512i second, Swift& a, __mmask16& nonzero) {
    if (!WORDS) {
      const __m512i bits = _mm512_loadu_si512(x + 16 * j), size = magnitudes(bits);
      nonzero = _mm512_test_epi32_mask(size, size);
      a.nonzero += __builtin_popcount(nonzero);
      a.smallest = _mm512_min_epu32(a.smallest, _mm512_sub_epi32(size, _mm512_set1_epi32(1)));
      return _mm512_castsi512_ps(bits);
    }
    const __m512i both = _mm512_loadu_si512(x + 32 * (j / 2)), size = magnitudes(both);
    const __mmask32 alive = _mm512_test_epi16_mask(size, size);
    nonzero = __mmask16(j % 2 ? alive >> 16 : alive);
    if (j % 2 == 0) {
      a.nonzero += __builtin_popcount(alive);
      a.smallest = _mm512_min_epu16(a.smallest, _mm512_sub_epi16(size, _mm512_set1_epi16(1)));
    }
    if (T::infinity == 0x7c00) return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + 16 * j)));
    return _mm512_castsi512_ps(_mm512_maskz_permutexvar_epi16(0xaaaaaaaa, j % 2 ? second : first, both));
  }
#else
  bool swift(const Int*, const uint8_t*, int64_t, int32_t, Stretch&, Row&) const { return false; }
#endif
};

}  // namespace
