// Counts, sums, extremes and the SQNR of each row, for a tally. measure.h walks over bands and adds histograms on
// request. Looks with and without histograms take these numbers from here, so their bits are the same.
//
// Counts are exact. Sums: fp32 in the lanes of a vector for at most 1024 columns, then fp64 lanes for 32 rows.

#pragma once

#include "base.h"
#include "cast.h"
#include "extent.h"
#include "floats.h"
#include "simd.h"

#if OTTAVA_WIDE  // few rows need the careful path then
#define OTTAVA_CAREFUL __attribute__((noinline, cold))
#else
#define OTTAVA_CAREFUL __attribute__((noinline))
#endif

extern "C" struct Job {  // native.measure._Job
  const void* x;
  const uint8_t* codes;    // null: cast x first, with the settings of `cast`
  const float* scale_inv;  // null if codes is
  const Cast* cast;
  const float* given;      // the scale of that cast; null: the current one
  const double* extent;    // the extent of the whole tensor, see Extent
  int64_t rows, cols, x_row, x_col, code_row, code_col;  // strides in elements; one of each pair is 1
  int64_t block_rows, block_cols, grid_cols, scale_count;
  int32_t mantissa_bits, bias, bits, special_code, detail, tie_clips, predicted, by_whole;
  double clip;
  const float* squares;  // for a sample: amaxes of the 128x128 blocks around its rows; null: x is the whole tensor
  int64_t square_rows;   // rows of x from each of these blocks
  double* sums;      // (width), zeros
  double* extremes;  // see OTTAVA_EXTREMES
};

namespace {

enum Detail { NUMBERS, EXPONENTS, BLOCKS };  // native.measure.DETAILS: each includes those before it
// The sums, by their names in measure/tally.py, and the bins of histograms. The library exports this list.
#define OTTAVA_SUMS(X) \
  X(n, 0) X(n_nonzero, 0) X(n_underflow, 0) X(n_subnormal, 0) X(n_overflow, 0) X(n_rows, 0) \
  X(sx, 0) X(sabs, 0) X(sxx, 0) X(sx4, 0) X(see, 0) X(sxe, 0) X(srel, 0) \
  X(row_sqnr, 128) X(channel_sqnr, 128) X(n_dead, 0) X(block_spread, 32) X(exponents, 1024) \
  X(below_row, 164) X(energy_below_row, 164) X(below_1x128, 164) X(energy_below_1x128, 164) \
  X(below_1x32, 164) X(energy_below_1x32, 164) X(below_128x128, 164) X(energy_below_128x128, 164) \
  X(n_scales, 0) X(scale_log2, 0) X(scale_log2_squared, 0) \
  X(n_total, 0) X(n_casts, 0) X(n_nonfinite, 0) X(n_predicted, 0) X(scale_error, 0)
// The extremes, merged by the largest, with minima negated, in the order of measure/tally.py.
#define OTTAVA_EXTREMES(X) \
  X(amax, 0) X(amin, 0) X(max_error, 0) X(scale_max, 0) X(scale_min, 0) X(scale_error_max, 0) X(scale_error_min, 0) \
  X(top_channel, 0)

#define OTTAVA_NUMBER(name, bins) name,
#define OTTAVA_BINS(name, bins) constexpr int name = bins;
namespace sum { enum { OTTAVA_SUMS(OTTAVA_NUMBER) }; }
namespace extreme { enum { OTTAVA_EXTREMES(OTTAVA_NUMBER) COUNT }; }
namespace bins { OTTAVA_SUMS(OTTAVA_BINS) }
constexpr int SUMS = 7, SQNR_BINS = bins::row_sqnr, SPREAD_BINS = bins::block_spread;
constexpr int64_t PIECE = 32, STRETCH = 1024, GROUP = 32;  // columns of a piece, columns of a sum in fp32, rows of a group

#if !OTTAVA_WIDE
inline Doubles as_doubles(Floats v) {
  HalfFloats halves[2];
  std::memcpy(halves, &v, sizeof(v));
  return __builtin_convertvector(halves[0], Doubles) + __builtin_convertvector(halves[1], Doubles);
}

inline double total(Doubles d) {  // as a tree
  for (int step = LANES / 4; step > 0; step /= 2)
    for (int l = 0; l < step; l++) d[l] += d[l + step];
  return d[0];
}
#endif

struct Decibels {  // the lower edges of SQNR bins, as error over signal
  double begin[SQNR_BINS];

  constexpr Decibels() : begin() {
    double ratio = 1;
    for (int bin = 0; bin < SQNR_BINS; bin++, ratio *= 0.89125093813374552995) begin[bin] = ratio;  // 10 ** -0.05
  }

  // A logarithm costs as much as a hundred elements. The bits of a float are a logarithm in straight lines between powers
  // of two; it is at most half a bin too large.
  int bin(double ratio) const {
    const float bins = (float(127 << 23) - float(bits_of(float(ratio)))) * float(6.0205999132796239 / (1 << 23)) + 1e-4f;
    const int most = int(between(bins, 0.0f, SQNR_BINS - 1.0f));
    return larger(most - int(ratio > begin[most]), 0);
  }
};
constexpr Decibels DECIBELS;

// The exponent of the power of two that brings an amax into [1, 2), or a subnormal amax as near as possible.
inline int32_t exponent_of_unit(float amax) {
  return between(127 - (amax > 0 ? larger(bits_of(amax) >> 23, 1) : 127), -126, 126);
}
inline float unit_of(float amax) { return float_of((exponent_of_unit(amax) + 127) << 23); }

struct Group {  // at most 32 rows
  Doubles sums[SUMS];
  int64_t nonzero, kept, subnormal, infinite;
  Floats max_error;  // in lanes
};

struct Stretch {  // a part of a row, and scratch of its thread
  alignas(64) float scale[STRETCH + LANES];  // one a column, times `factor`; LANES of them if all columns share one
  float least[STRETCH / PIECE];              // the smallest of each piece
  uint32_t spread[4][SPREAD_BINS];           // of chunks, in turns: alike neighbours would wait for one counter
};

template <class T>
struct Rows {
  using Int = typename T::Int;
  const Job& job;
  const int64_t* places;
  const Decoder decode;
  const float amax;
  const bool clean;  // all of the tensor is finite
#if OTTAVA_WIDE
  alignas(64) uint8_t low[128], high[128];  // the two bytes of each code as a BF16 number (exact), without bit 7
#endif

  Rows(const Job& j, const int64_t* p)
      : job(j), places(p), decode(j.mantissa_bits, j.bias, j.bits, j.special_code),
        amax(float(j.extent[LARGEST_FINITE])), clean(j.extent[NOT_FINITE] == 0) {
#if OTTAVA_WIDE
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

  // Octaves from the amax of a 1x128 block up to the tensor's amax.
  inline int32_t spread_of(float most) const {
    const int32_t octaves = bits_of(most) >= 1 << 23 ? (bits_of(amax) - bits_of(most)) >> 23  // the shift rounds down
                                                     : (bits_of(amax / most) >> 23) - 127;
    return between(octaves, 0, SPREAD_BINS - 1);
  }

  // Fills the amaxes of the chunks of a row; returns the amax of the row.
  __attribute__((noinline)) float look(const Int* x, float* chunks, Stretch& s) const {
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
#if OTTAVA_WIDE
    if (n == CHUNK && clean) return largest_of_chunk(x);
#endif
    for (int64_t i = 0; i < n; i++) most = larger(most, finite(x[i]));
    return most;
  }

  // Adds a row. largest, chunks: the amaxes of the row and of its chunks.
  __attribute__((noinline)) void add(const Int* x, const uint8_t* codes, int64_t number, float largest, const float* chunks, Stretch& s, Group& group,
           double* out, double* extremes) const {
    const int32_t exponent = exponent_of_unit(largest);
    const int64_t once_bits = int64_t(1023 - exponent) << 52;
    double once;
    std::memcpy(&once, &once_bits, sizeof(once));
    const double twice = once * once;
    const double units[] = {once, once, twice, twice * twice, twice, twice, 1.0};  // rows sum x * unit, (x * unit) ** 2 ..
    Row row;
    if (!swift(x, codes, number, exponent, s, row)) careful(x, codes, number, unit_of(largest), s, row = Row{});
    if (row.clipped < 0) clipped(x, codes, number, chunks, largest, s, out);
    else out[places[sum::n_overflow]] += double(row.clipped);
#pragma GCC unroll 7
    for (int k = 0; k < SUMS; k++) group.sums[k] += row.sums[k] * units[k];
    group.nonzero += row.nonzero, group.kept += row.kept, group.subnormal += row.subnormal, group.infinite += row.infinite;
    if (row.smallest > 0) extremes[extreme::amin] = larger(extremes[extreme::amin], -double(row.smallest));
    group.max_error = row.max_error > group.max_error ? row.max_error : group.max_error;
    const double signal = total(row.sums[2]);  // sxx
    if (!(signal > 0)) return;
    out[places[sum::n_rows]]++;
    out[places[sum::row_sqnr] + DECIBELS.bin(total(row.sums[4]) / signal)]++;
  }

  // Adds the sums of rows with so many elements; returns how many elements are not zero.
  __attribute__((noinline)) int64_t finish(const Group& group, int64_t elements, Stretch& s, double* out, double* extremes) const {
    double& worst = extremes[extreme::max_error];
    for (int l = 0; l < LANES; l++) worst = larger(worst, double(group.max_error[l]));
    for (auto& counts : s.spread)
      for (int i = 0; i < SPREAD_BINS; i++) out[places[sum::block_spread] + i] += counts[i];
    std::memset(s.spread, 0, sizeof(s.spread));
    for (int k = 0; k < SUMS; k++) out[places[sum::sx + k]] += total(group.sums[k]);
    out[places[sum::n]] += double(elements - group.infinite);
    out[places[sum::n_nonzero]] += double(group.nonzero);
    out[places[sum::n_underflow]] += double(group.nonzero - group.kept);
    out[places[sum::n_subnormal]] += double(group.subnormal);
    return group.nonzero;
  }

 private:
  struct Row {
    Doubles sums[SUMS];
    int64_t nonzero, kept, subnormal, infinite, clipped;  // clipped: -1 if not counted
    float smallest;                                       // 0 if all elements are zeros
    Floats max_error;
  };

  struct Range {
    int32_t low, high;  // bits of the smallest and the largest
  };

  // Scales of some columns, times a power of two.
  __attribute__((noinline)) Range scales(int64_t row, int64_t left, int64_t n, float factor, Stretch& s) const {
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
      const Floats scale = spread(one * factor);
      for (int64_t k = i; k < end; k += LANES) std::memcpy(s.scale + k, &scale, sizeof(scale));  // excess is overwritten
    }
    return range;
  }

  // Elements beyond the largest number of the format, in pieces whose amax is near it.
  __attribute__((noinline, cold)) void clipped(const Int* x, const uint8_t* codes, int64_t number, const float* chunks, float largest, Stretch& s,
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
        out[places[sum::n_overflow]] +=
            double(count_clipped(x + left + i, codes + left + i, count, s.scale + (each ? i : 0), each, 1.0f));
      }
    }
  }

  // scales: times unit.
  __attribute__((noinline, cold)) int64_t count_clipped(const Int* x, const uint8_t* codes, int64_t n, const float* scales,
                                                  bool each, float unit) const {
    int64_t count = 0;
    for (int64_t i = 0; i < n; i++) {
      const float scale = scales[each ? i : 0], magnitude = float_of(bits_of(T::value(x[i])) & MAGNITUDE);
      const double end = job.clip * double(scale), size = double(magnitude * unit);
      const bool clips = job.tie_clips ? size >= end : size > end;
      // if the scale of the block underflowed, the element is lost, not clipped
      count += bits_of(magnitude) < INFINITE && clips && float_of(decode(codes[i])) * scale != 0;
    }
    return count;
  }

  // --- any numbers, on any CPU ---------------------------------------------------------------------------------------

  struct Lanes {
    Floats sums[SUMS], max_error;
    Ints nonzero, kept, subnormal, infinite, smallest;
  };

  OTTAVA_CAREFUL void careful(const Int* x, const uint8_t* codes, int64_t number, float unit, Stretch& s, Row& row) const {
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
      for (int k = 0; k < SUMS; k++) row.sums[k] += as_doubles(lanes.sums[k]), lanes.sums[k] = Floats{};
    }
    int32_t smallest = MAGNITUDE;
    for (int l = 0; l < LANES; l++) {
      row.nonzero -= lanes.nonzero[l];
      row.kept -= lanes.kept[l];
      row.infinite -= lanes.infinite[l];
      row.subnormal -= lanes.subnormal[l];
      smallest = smaller(smallest, lanes.smallest[l]);
    }
    row.max_error = lanes.max_error, row.clipped = -1;
    row.smallest = smallest < MAGNITUDE ? float_of(smallest + 1) : 0.0f;
  }

  OTTAVA_CAREFUL void vectors(const Int* x, const uint8_t* codes, int64_t n, const float* scales, int64_t step, float unit,
                      Lanes& lanes) const {
    Lanes a = lanes;
    const Decoder d = decode;
    for (int64_t i = 0; i < n; i += LANES) {
      const Ints raw = fp32_bits<T>(x + i), beyond = (raw & MAGNITUDE) >= INFINITE;
      const Ints bits = raw & ~beyond, magnitude_bits = bits & MAGNITUDE;
      const Ints code = widened(load<Bytes>(codes + i)), fields = (code & d.magnitudes) << d.shift;
      const Ints normal = fields + (fields >= d.special ? spread(2 * d.rebias) : spread(d.rebias));
      const Ints tiny = as<Ints>(as<Floats>(fields + d.smallest_normal) - spread(float_of(d.smallest_normal)));
      const Ints number = ((fields < (1 << 23) ? tiny : normal) | ((code << d.sign_shift) & ~MAGNITUDE)) & ~beyond;
      const Floats value = as<Floats>(bits), magnitude = as<Floats>(magnitude_bits), scale = load<Floats>(scales + i * step);
      const Floats q = as<Floats>(number) * scale, error = value - q, size = as<Floats>(as<Ints>(error) & MAGNITUDE);
      const Floats y = value * unit, e = error * unit, square = y * y;
      const Ints nonzero = magnitude_bits != 0;
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
      const Ints below_zero_last = (magnitude_bits - 1) & MAGNITUDE;  // zeros wrap around to the top
      a.smallest = below_zero_last < a.smallest ? below_zero_last : a.smallest;
    }
    lanes = a;
  }

  // --- numbers that keep their bits when they are multiplied with a power of two, 64 at a time -------------------------

#if OTTAVA_WIDE
  template <bool TWO_BYTES, class = void> struct Choose { using Type = I16x32; };
  template <class Unused> struct Choose<false, Unused> { using Type = Ints; };
  using Wide = typename Choose<sizeof(Int) == 2>::Type;
  static inline Wide magnitudes(Wide x) { return x & T::mask; }

  static inline Int largest_of_chunk(const Int* x) {
    constexpr int64_t EACH = 64 / sizeof(Int);
    Wide most = magnitudes(load<Wide>(x));
#pragma GCC unroll 8
    for (int64_t i = EACH; i < CHUNK; i += EACH) most = larger_of(most, magnitudes(load<Wide>(x + i)));
    return largest_of_all(most);
  }

  struct Counts {
    Wide smallest;  // less 1, so that zeros are the largest
    int64_t nonzero, kept, normal, clipped;
  };
  struct Swift {
    Floats sums[SUMS], max_error;
    Counts counts;
  };

  __attribute__((noinline, cold)) bool all_finite(const Int* x) const {
    bool finite = true;
    for (int64_t i = 0; i < job.cols; i++) finite &= (x[i] & T::mask) < T::infinity;
    return finite;
  }

  // False if a product might be subnormal or infinite.
  __attribute__((noinline)) bool swift(const Int* x, const uint8_t* codes, int64_t number, int32_t exponent, Stretch& s, Row& row) const {
    if (!clean && !all_finite(x)) return false;  // by row: the same sums in a part of a tensor
    const int32_t least_code = smaller(1 - job.bias - job.mantissa_bits, 0);  // exponents of codes: the smallest ..
    const int32_t last_code = larger((1 << (job.bits - 1 - job.mantissa_bits)) - job.bias, 0);  // .. and beyond the largest
    const int32_t low_scale = 1 - least_code - smaller(exponent, 0), high_scale = 253 - last_code - larger(exponent, 0);
    const float unit = float_of((exponent + 127) << 23);
    const bool each = job.grid_cols > 1;
    Swift a;
    a.max_error = Floats{};
    a.counts = {Wide{} - 1, 0, 0, 0, 0};
    for (int64_t left = 0; left < job.cols; left += STRETCH) {
      const int64_t n = smaller(STRETCH, job.cols - left), whole = n / 64 * 64;
      if (left == 0 || each) {
        const Range range = scales(number, left, n, unit, s);
        if (range.low < low_scale << 23 || range.high >= high_scale << 23) return false;
      }
#pragma GCC unroll 7
      for (Floats& sum : a.sums) sum = Floats{};
      words(x + left, codes + left, whole, s.scale, each, unit, a);
      if (whole < n) {
        alignas(64) Int some_x[64] = {};
        alignas(64) uint8_t some_codes[64] = {};
        std::memcpy(some_x, x + left + whole, size_t(n - whole) * sizeof(Int));
        std::memcpy(some_codes, codes + left + whole, size_t(n - whole));
        for (int64_t i = n; each && i < whole + 64; i++) s.scale[i] = 1.0f;
        words(some_x, some_codes, 64, s.scale + (each ? whole : 0), each, unit, a);
      }
#pragma GCC unroll 7
      for (int k = 0; k < SUMS; k++) row.sums[k] = left ? row.sums[k] + as_doubles(a.sums[k]) : as_doubles(a.sums[k]);
    }
    row.smallest = T::value(Int(smallest_of_all(a.counts.smallest) + 1));
    if (row.smallest > 0 && bits_of(row.smallest) < (1 + larger(-exponent, 0)) << 23) return false;
    row.infinite = 0, row.nonzero = a.counts.nonzero, row.kept = a.counts.kept, row.subnormal = a.counts.kept - a.counts.normal;
    row.clipped = each ? a.counts.clipped : -1;
    row.max_error = a.max_error * float_of((127 - exponent) << 23);
    return true;
  }

  // noinline: its registers are all taken
  __attribute__((noinline)) void words(const Int* x, const uint8_t* codes, int64_t n, const float* scales, bool each,
                                       float unit, Swift& sums) const {
    Floats sx = sums.sums[0], sabs = sums.sums[1], sxx = sums.sums[2], sx4 = sums.sums[3], see = sums.sums[4];
    Floats sxe = sums.sums[5], srel = sums.sums[6], max_error = sums.max_error;
    Counts a = sums.counts;
    const C8x64 low0 = load<C8x64>(low), low1 = load<C8x64>(low + 64), high0 = load<C8x64>(high), high1 = load<C8x64>(high + 64);
    C8x64 order;
    for (int i = 0; i < 64; i++) order[i] = char(i % 8 + i / 16 * 8 + i / 8 % 2 * 32);  // the code below mixes bytes like this
    I16x32 first;
    for (int i = 0; i < 32; i++) first[i] = int16_t(i / 2);
    const I16x32 second = first + 16;
    const char magnitude = char((1 << (job.bits - 1)) - 1), exponent = char((1 << (job.bits - 1)) - (1 << job.mantissa_bits));
    const C8x64 magnitude_bits = C8x64{} + magnitude, exponent_bits = C8x64{} + exponent, sign = C8x64{} + char(0x80);
    const Floats near = spread(float(job.clip * (1 - 1.0 / 64))), two = spread(2.0f);
    for (int64_t i = 0; i < n; i += 64) {
      const C8x64 code = load<C8x64>(codes + i), shuffled = reordered(code, order);
      a.kept += count_of_any(code, magnitude_bits);
      a.normal += count_of_any(code, exponent_bits);
      const C8x64 lower = looked_up(shuffled, low0, low1), upper = looked_up(shuffled, high0, high1) | (shuffled & sign);
      const I16x32 halves[] = {as<I16x32>(mixed_low(lower, upper)), as<I16x32>(mixed_high(lower, upper))};
      bool near_the_end = false;
#pragma GCC unroll 4
      for (int j = 0; j < 4; j++) {
        uint32_t nonzero;
        const Floats y = values(x + i, j, first, second, unit, a, nonzero);
        const Floats scale = load<Floats>(scales + (each ? i + 16 * j : 0)), q = numbers(halves[j / 2], j % 2 ? second : first) * scale;
        const Floats e = y - q, size = as<Floats>(as<Ints>(e) & MAGNITUDE), most = as<Floats>(as<Ints>(y) & MAGNITUDE), square = y * y;
        sx += y, sabs += most, sxx += square;
        sx4 = added_product(square, square, sx4);
        see = added_product(e, e, see);
        sxe = added_product(y, e, sxe);
        // one step of Newton's makes 28 bits of 14: size / most = size * r * (2 - most * r)
        const Floats r = inverse_to_14_bits(most, nonzero);
        srel = added_product(size * r, added_product(-most, r, two), srel);
        max_error = larger_of(size, max_error);
        if (each) near_the_end |= any_not_below(most, scale * near);
      }
      if (near_the_end) a.clipped += count_clipped(x + i, codes + i, 64, scales + i, true, unit);
    }
    sums = {{sx, sabs, sxx, sx4, see, sxe, srel}, max_error, a};
  }

  // Numbers 16 j to 16 j + 15 of 64, times unit.
  static inline Floats values(const int32_t* x, int j, I16x32, I16x32, float unit, Counts& a, uint32_t& nonzero) {
    const Ints bits = load<Ints>(x + 16 * j), size = magnitudes(bits);
    nonzero = not_zero(size);
    a.nonzero += __builtin_popcount(nonzero);
    a.smallest = smaller_unsigned(a.smallest, size - 1);
    return as<Floats>(bits) * unit;
  }
  static inline Floats values(const int16_t* x, int j, I16x32 first, I16x32 second, float unit, Counts& a, uint32_t& nonzero) {
    const I16x32 both = load<I16x32>(x + 32 * (j / 2)), size = magnitudes(both);
    const uint32_t alive = not_zero(size);
    nonzero = j % 2 ? alive >> 16 : alive;
    if (j % 2 == 0) {
      a.nonzero += __builtin_popcount(alive);
      a.smallest = smaller_unsigned(a.smallest, size - 1);
    }
    return (T::infinity == 0x7c00 ? from_fp16(x + 16 * j) : numbers(both, j % 2 ? second : first)) * unit;
  }
#else
  bool swift(const Int*, const uint8_t*, int64_t, int32_t, Stretch&, Row&) const { return false; }
#endif
};

}  // namespace
