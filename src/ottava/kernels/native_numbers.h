// The numbers of a tally that rows add up to: counts, sums, extremes and each row's own SQNR. native_measure.h walks over
// bands and adds histograms where they are asked for; both tiers have these from here, so their bits are the same.
//
// Counts are exact. Sums: fp32 in the lanes of a vector for at most 1024 columns, then fp64 lanes for 32 rows.

#pragma once

#include "native_base.h"
#include "native_cast.h"
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
  const Cast* cast;
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
constexpr int64_t CHUNK = 128, PIECE = 32, STRETCH = 1024, GROUP = 32;  // columns, those summed in fp32 last; rows

typedef double D __attribute__((vector_size(LANES * 4)));  // half as many
typedef float HalfV __attribute__((vector_size(LANES * 2)));

inline D doubles(V v) {
#if OTTAVA_SWIFT
  return _mm512_cvtps_pd(_mm512_castps512_ps256(v)) + _mm512_cvtps_pd(_mm512_extractf32x8_ps(v, 1));
#else
  HalfV halves[2];
  std::memcpy(halves, &v, sizeof(v));
  return __builtin_convertvector(halves[0], D) + __builtin_convertvector(halves[1], D);
#endif
}

inline double total(D d) {  // as a tree
#if OTTAVA_SWIFT
  return _mm512_reduce_add_pd(d);
#else
  for (int step = LANES / 4; step > 0; step /= 2)
    for (int l = 0; l < step; l++) d[l] += d[l + step];
  return d[0];
#endif
}

struct Decibels {  // where bins of SQNR begin, as error over signal
  double begin[SQNR_BINS];

  constexpr Decibels() : begin() {
    double ratio = 1;
    for (int bin = 0; bin < SQNR_BINS; bin++, ratio *= 0.89125093813374552995) begin[bin] = ratio;  // 10 ** -0.05
  }

  // Not by a logarithm, which costs as much as a hundred elements: bits of a float are one, of straight lines between
  // powers of two, and at most half a bin too many.
  int bin(double ratio) const {
    const float bins = (float(127 << 23) - float(bits_of(float(ratio)))) * float(6.0205999132796239 / (1 << 23)) + 1e-4f;
    const int most = int(between(bins, 0.0f, SQNR_BINS - 1.0f));
    return larger(most - int(ratio > begin[most]), 0);
  }
};
constexpr Decibels DECIBELS;

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
  alignas(64) float scale[STRETCH + LANES];  // of each column, times `factor`; where there is one for all, of LANES
  float least[STRETCH / PIECE];              // the smallest of each piece
  uint32_t spread[4][SPREAD_BINS];           // of chunks: neighbours, which are alike, do not wait for each other
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

  // The octaves that the amax of a block of 1x128 lies below the tensor's.
  inline int32_t spread_of(float most) const {
    const int32_t octaves = bits_of(most) >= 1 << 23 ? (bits_of(amax) - bits_of(most)) >> 23  // rounds down, as it should
                                                     : (bits_of(amax / most) >> 23) - 127;
    return between(octaves, 0, SPREAD_BINS - 1);
  }

  // Amaxes of the chunks of a row; gives that of all of it.
  float look(const Int* x, float* chunks, Stretch& s) const {
    Int most_of_all = 0;
    for (int64_t left = 0, c = 0; left < job.cols; left += CHUNK, c++) {
      const Int most = largest_of(x + left, smaller(CHUNK, job.cols - left));
      most_of_all = larger(most_of_all, most);
      chunks[c] = T::value(most);
      if (most > 0) s.spread[c % 4][spread_of(chunks[c])]++;
    }
    return T::value(most_of_all);
  }

  inline Int largest_of(const Int* x, int64_t n) const {
    Int most = 0;
#if OTTAVA_SWIFT
    if (n == CHUNK && clean) return largest_word<CHUNK>(x);
#endif
    for (int64_t i = 0; i < n; i++) most = larger(most, finite(x[i]));
    return most;
  }

  // Adds a row. largest, chunks: its amax, and those of its chunks.
  void add(const Int* x, const uint8_t* codes, int64_t number, float largest, const float* chunks, Stretch& s, Group& group,
           double* out, double* extremes) const {
    const int32_t exponent = exponent_of_unit(largest);
    const int64_t once_bits = int64_t(1023 - exponent) << 52;
    double once;
    std::memcpy(&once, &once_bits, sizeof(once));
    const double twice = once * once;
    const double units[] = {once, once, twice, twice * twice, twice, twice, 1.0};  // sums are of x * unit, x ** 2 ...
    Row row{};
    if (!swift(x, codes, number, exponent, s, row)) {
      row = Row{};
      row.clipped = -1;
      careful(x, codes, number, unit_of(largest), s, row);
    }
    if (row.clipped < 0) clipped(x, codes, number, chunks, largest, s, out);
    else out[places[OVERFLOW_]] += double(row.clipped);
#pragma GCC unroll 7
    for (int k = 0; k < SUMS; k++) group.sums[k] += row.sums[k] * units[k];
    group.nonzero += row.nonzero, group.kept += row.kept, group.subnormal += row.subnormal, group.infinite += row.infinite;
    if (row.smallest > 0) extremes[AMIN] = larger(extremes[AMIN], -double(row.smallest));
    extremes[MAX_ERROR] = larger(extremes[MAX_ERROR], double(row.max_error));
    const double signal = total(row.sums[2]);  // sxx
    if (!(signal > 0)) return;
    out[places[ROWS]]++;
    out[places[ROW_SQNR] + DECIBELS.bin(total(row.sums[4]) / signal)]++;
  }

  // Adds rows that were summed, of so many elements; gives how many of these are not zero.
  int64_t finish(const Group& group, int64_t elements, Stretch& s, double* out) const {
    for (auto& counts : s.spread)
      for (int i = 0; i < SPREAD_BINS; i++) out[places[SPREAD] + i] += counts[i];
    std::memset(s.spread, 0, sizeof(s.spread));
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
    int64_t nonzero, kept, subnormal, infinite, clipped;  // clipped: -1 where nobody looked
    float smallest, max_error;                            // smallest: 0 if all are
  };

  struct Range {
    int32_t low, high;  // bits of the smallest and the largest
  };

  // Scales of some columns, times a power of two.
  Range scales(int64_t row, int64_t left, int64_t n, float factor, Stretch& s) const {
    const float* from = job.scale_inv + row / job.block_rows * job.grid_cols;
    if (job.grid_cols == 1) {
      fill(s.scale, LANES, *from * factor);
      fill(s.least, STRETCH / PIECE, *from);
      return {bits_of(*from), bits_of(*from)};
    }
    Range range = {MAGNITUDE, 0};
    fill(s.least, STRETCH / PIECE, __builtin_inff());
    int64_t block = left / job.block_cols;
    for (int64_t i = 0, end; i < n; i = end, block++) {
      end = smaller((block + 1) * job.block_cols - left, n);
      const float one = from[block];
      range = {smaller(range.low, bits_of(one)), larger(range.high, bits_of(one))};
      for (int64_t piece = i / PIECE; piece * PIECE < end; piece++) s.least[piece] = smaller(s.least[piece], one);
      const V scale = spread(one * factor);
      for (int64_t k = i; k < end; k += LANES) std::memcpy(s.scale + k, &scale, sizeof(scale));  // the next one writes over it
    }
    return range;
  }

  // Elements beyond the largest number of the format, in pieces whose amax is near it.
  void clipped(const Int* x, const uint8_t* codes, int64_t number, const float* chunks, float largest, Stretch& s,
               double* out) const {
    const double near = job.clip * (1 - 1.0 / 64);
    const bool each = job.grid_cols > 1;
    if (!each && largest < near * job.scale_inv[number / job.block_rows]) return;
    for (int64_t left = 0; left < job.cols; left += STRETCH) {
      const int64_t n = smaller(STRETCH, job.cols - left);
      if (left == 0 || each) scales(number, left, n, 1.0f, s);
      for (int64_t i = 0; i < n; i += PIECE) {
        const double far = near * s.least[i / PIECE];
        if (!(chunks[(left + i) / CHUNK] > 0) || chunks[(left + i) / CHUNK] < far) continue;
        const int64_t count = smaller(PIECE, n - i);
        if (double(T::value(largest_of(x + left + i, count))) < far) continue;
        out[places[OVERFLOW_]] +=
            double(count_clipped(x + left + i, codes + left + i, count, s.scale + (each ? i : 0), each, 1.0f));
      }
    }
  }

  // scales: times unit.
  __attribute__((noinline)) int64_t count_clipped(const Int* x, const uint8_t* codes, int64_t n, const float* scales,
                                                  bool each, float unit) const {
    int64_t count = 0;
    for (int64_t i = 0; i < n; i++) {
      const float scale = scales[each ? i : 0], magnitude = float_of(bits_of(T::value(x[i])) & MAGNITUDE);
      const double end = job.clip * double(scale), size = double(magnitude * unit);
      const bool clips = job.tie_clips ? size >= end : size > end;
      // where even the scale of a block underflowed, an element is lost, not clipped
      count += bits_of(magnitude) < INFINITE && clips && float_of(decode(codes[i])) * scale != 0;
    }
    return count;
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

  template <int64_t COUNT>
  static inline Int largest_word(const Int* x) {
    constexpr int64_t EACH = 64 / sizeof(Int);
    __m512i most = magnitudes(_mm512_loadu_si512(x));
#pragma GCC unroll 8
    for (int64_t i = EACH; i < COUNT; i += EACH) most = larger_of(most, magnitudes(_mm512_loadu_si512(x + i)));
    if (!WORDS) return Int(_mm512_reduce_max_epi32(most));
    const __m256i half = _mm256_max_epi16(_mm512_castsi512_si256(most), _mm512_extracti64x4_epi64(most, 1));
    const __m128i quarter = _mm_max_epi16(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
    const __m128i smallest = _mm_minpos_epu16(_mm_xor_si128(quarter, _mm_set1_epi16(0x7fff)));  // there is no maxpos
    return Int(0x7fff - _mm_cvtsi128_si32(smallest));
  }

  struct Words {
    __m512i smallest;  // less 1, so that zeros are the largest
    int64_t nonzero, kept, normal, clipped;
  };
  struct Swift {
    V sums[SUMS], max_error;
    Words words;
  };

  __attribute__((noinline)) bool all_finite(const Int* x) const {
    bool finite = true;
    for (int64_t i = 0; i < job.cols; i++) finite &= (x[i] & T::mask) < T::infinity;
    return finite;
  }

  // False where a product might be subnormal or infinite.
  bool swift(const Int* x, const uint8_t* codes, int64_t number, int32_t exponent, Stretch& s, Row& row) const {
    if (!clean && !all_finite(x)) return false;  // by row, so that a part of a tensor adds up as it does in the whole
    const int32_t least_code = smaller(1 - job.bias - job.mantissa_bits, 0);  // exponents of codes: the smallest ..
    const int32_t last_code = larger((1 << (job.bits - 1 - job.mantissa_bits)) - job.bias, 0);  // .. and beyond the largest
    const int32_t low_scale = 1 - least_code - smaller(exponent, 0), high_scale = 253 - last_code - larger(exponent, 0);
    const float unit = float_of((exponent + 127) << 23);
    const bool each = job.grid_cols > 1;
    Swift a{};
    a.words.smallest = _mm512_set1_epi32(-1);
    for (int64_t left = 0; left < job.cols; left += STRETCH) {
      const int64_t n = smaller(STRETCH, job.cols - left), whole = n / 64 * 64;
      if (left == 0 || each) {
        const Range range = scales(number, left, n, unit, s);
        if (range.low < low_scale << 23 || range.high >= high_scale << 23) return false;
      }
      if (each) words<true>(x + left, codes + left, whole, s.scale, unit, a);
      else words<false>(x + left, codes + left, whole, s.scale, unit, a);
      if (whole < n) {
        alignas(64) Int some_x[64] = {};
        alignas(64) uint8_t some_codes[64] = {};
        std::memcpy(some_x, x + left + whole, size_t(n - whole) * sizeof(Int));
        std::memcpy(some_codes, codes + left + whole, size_t(n - whole));
        for (int64_t i = n; each && i < whole + 64; i++) s.scale[i] = 1.0f;
        if (each) words<true>(some_x, some_codes, 64, s.scale + whole, unit, a);
        else words<false>(some_x, some_codes, 64, s.scale, unit, a);
      }
#pragma GCC unroll 7
      for (int k = 0; k < SUMS; k++) row.sums[k] += doubles(a.sums[k]), a.sums[k] = V{};
    }
    row.smallest = T::value(smallest_word(a.words.smallest));
    if (row.smallest > 0 && bits_of(row.smallest) < (1 + larger(-exponent, 0)) << 23) return false;
    row.nonzero = a.words.nonzero, row.kept = a.words.kept, row.subnormal = a.words.kept - a.words.normal;
    row.clipped = each ? a.words.clipped : -1;
    row.max_error = _mm512_reduce_max_ps(a.max_error) / unit;
    return true;
  }

  // Of magnitudes less 1: plus 1.
  static inline Int smallest_word(__m512i less_one) {
    if (!WORDS) return Int(_mm512_reduce_min_epu32(less_one) + 1);
    const __m256i half = _mm256_min_epu16(_mm512_castsi512_si256(less_one), _mm512_extracti64x4_epi64(less_one, 1));
    const __m128i quarter = _mm_min_epu16(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
    return Int(_mm_cvtsi128_si32(_mm_minpos_epu16(quarter)) + 1);
  }

  // noinline: its registers are all taken
  template <bool EACH>
  __attribute__((noinline)) void words(const Int* x, const uint8_t* codes, int64_t n, const float* scales, float in_units,
                                       Swift& sums) const {
    V sx = sums.sums[0], sabs = sums.sums[1], sxx = sums.sums[2], sx4 = sums.sums[3], see = sums.sums[4];
    V sxe = sums.sums[5], srel = sums.sums[6], max_error = sums.max_error;
    Words a = sums.words;
    const __m512i low0 = _mm512_load_si512(low), low1 = _mm512_load_si512(low + 64);
    const __m512i high0 = _mm512_load_si512(high), high1 = _mm512_load_si512(high + 64);
    const __m512i order = _mm512_set_epi64(0x3f3e3d3c3b3a3938, 0x1f1e1d1c1b1a1918, 0x3736353433323130, 0x1716151413121110,
                                           0x2f2e2d2c2b2a2928, 0x0f0e0d0c0b0a0908, 0x2726252423222120, 0x0706050403020100);
    const __m512i first = _mm512_set_epi64(0x000f000f000e000e, 0x000d000d000c000c, 0x000b000b000a000a, 0x0009000900080008,
                                           0x0007000700060006, 0x0005000500040004, 0x0003000300020002, 0x0001000100000000);
    const __m512i second = _mm512_add_epi16(first, _mm512_set1_epi16(16)), sign = _mm512_set1_epi8(char(0x80));
    const __m512i magnitude = _mm512_set1_epi8(char((1 << (job.bits - 1)) - 1));
    const __m512i exponents = _mm512_set1_epi8(char((1 << (job.bits - 1)) - (1 << job.mantissa_bits)));
    const __m512 unit = _mm512_set1_ps(in_units), two = _mm512_set1_ps(2.0f), one_scale = _mm512_loadu_ps(scales);
    const __m512 near = _mm512_set1_ps(float(job.clip * (1 - 1.0 / 64)));
    for (int64_t i = 0; i < n; i += 64) {
      const __m512i code = _mm512_loadu_si512(codes + i), shuffled = _mm512_permutexvar_epi8(order, code);
      a.kept += __builtin_popcountll(_mm512_test_epi8_mask(code, magnitude));
      a.normal += __builtin_popcountll(_mm512_test_epi8_mask(code, exponents));
      const __m512i lower = _mm512_permutex2var_epi8(low0, shuffled, low1);
      const __m512i upper = _mm512_permutex2var_epi8(high0, shuffled, high1);
      const __m512i signed_upper = _mm512_ternarylogic_epi32(upper, shuffled, sign, 0xf8);  // upper | (code & sign)
      const __m512i halves[] = {_mm512_unpacklo_epi8(lower, signed_upper), _mm512_unpackhi_epi8(lower, signed_upper)};
      __mmask16 far = __mmask16(-1);
#pragma GCC unroll 4
      for (int j = 0; j < 4; j++) {
        const __m512i word = _mm512_maskz_permutexvar_epi16(0xaaaaaaaa, j % 2 ? second : first, halves[j / 2]);
        __mmask16 nonzero;
        const __m512 value = values(x + i, j, first, second, a, nonzero);
        const __m512 y = _mm512_mul_ps(value, unit), scale = EACH ? _mm512_loadu_ps(scales + i + 16 * j) : one_scale;
        const __m512 q = _mm512_mul_ps(_mm512_castsi512_ps(word), scale);
        const __m512 e = _mm512_sub_ps(y, q), size = _mm512_abs_ps(e), most = _mm512_abs_ps(y), square = _mm512_mul_ps(y, y);
        sx += y, sabs += most, sxx += square;
        sx4 = _mm512_fmadd_ps(square, square, sx4);
        see = _mm512_fmadd_ps(e, e, see);
        sxe = _mm512_fmadd_ps(y, e, sxe);
        // one step of Newton's makes 28 bits of 14: size / most = size * r * (2 - most * r)
        const __m512 r = _mm512_maskz_rcp14_ps(nonzero, most), better = _mm512_fnmadd_ps(most, r, two);
        srel = _mm512_fmadd_ps(_mm512_mul_ps(size, r), better, srel);
        max_error = _mm512_max_ps(size, max_error);
        if (EACH) far &= _mm512_cmp_ps_mask(most, _mm512_mul_ps(scale, near), _CMP_LT_OQ);
      }
      if (EACH && far != __mmask16(-1)) a.clipped += count_clipped(x + i, codes + i, 64, scales + i, true, in_units);
    }
    sums = {{sx, sabs, sxx, sx4, see, sxe, srel}, max_error, a};
  }

  // Numbers 16 j to 16 j + 15 of 64.
  static inline __m512 values(const Int* x, int j, __m512i first, __m512i second, Words& a, __mmask16& nonzero) {
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
