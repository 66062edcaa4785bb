// The walk of native_measure.cpp over one band of 128 rows: what debug/measure.py adds up in tensors, element by element
// in registers.
//
// Counts and histograms are exact. Sums: fp32 in the lanes of a vector for at most 1024 columns, then fp64; each band
// of 128 rows has sums of its own, which are added in the order of the bands, so that threads change no bit.

#pragma once

#include <new>

#include "native_base.h"
#include "native_float.h"

extern "C" struct Job {  // native_measure._Job
  const void* x;
  const uint8_t* codes;    // null: cast x first, as `cast` says
  const float* scale_inv;  // null with them
  const void* cast;        // native_quantize.cpp's Cast
  const float* given;      // the scale of that cast; null: the current one
  const double* extent;    // of the tensor that x is part of, see Extent
  int64_t rows, cols, x_row, x_col, code_row, code_col;  // strides in elements; one of each pair is 1
  int64_t block_rows, block_cols, grid_cols, scale_count;
  int32_t mantissa_bits, bias, bits, special_code, fine, tie_clips, predicted, by_whole;
  double clip;
  double* sums;      // (width), zeros
  double* extremes;  // see Extreme
};

extern "C" {
typedef int Quantize(const void* x, int64_t rows, int64_t cols, int64_t stride, int64_t block_rows, int64_t block_cols,
                     const void* cast, const float* given, uint8_t* out, float* scale_inv, float* amax, int threads);
typedef void Scales(const float* amax, int64_t n, const void* cast, float* scale, float* scale_inv);
}

extern "C" struct Library {  // native_measure._Library: of native_quantize.cpp, and of tally.py
  Quantize* quantize;  // null where no job asks for it
  Scales* scales;
  const int64_t* places;  // where each of Field begins in a vector of `width` numbers
  int64_t width;
};

namespace {

enum Field {
  N, NONZERO, UNDERFLOW_, SUBNORMAL, OVERFLOW_, ROWS, SX, SABS, SXX, SX4, SEE, SXE, SREL,
  EXPONENTS, ROW_SQNR, SPREAD, BELOW, SCALES = BELOW + 8, SCALE_LOG2, SCALE_LOG2_SQUARED,
  TOTAL, CASTS, NONFINITE, PREDICTED, SCALE_ERROR
};
enum Extreme { AMAX, AMIN, MAX_ERROR, SCALE_MAX, SCALE_MIN, SCALE_ERROR_MAX, SCALE_ERROR_MIN };  // minima negated
enum Extent { LARGEST, LARGEST_FINITE, NOT_FINITE, ELEMENTS };  // LARGEST: inf or NaN where an element is
constexpr int SUMS = 7, GRANULARITIES = 4, EXPONENT_BINS = 1024, RELATIVE_BINS = 164, SQNR_BINS = 128, SPREAD_BINS = 32;
constexpr int QUARTER_OCTAVE = 21, TOP_BIN = (127 << 23) >> QUARTER_OCTAVE;
constexpr int64_t BAND = 128, CHUNK = 128, FLUSH = 8, WAVE = 16;  // rows, columns, chunks, bands in flight

#ifdef __AVX512F__
constexpr int LANES = 16;
#else
constexpr int LANES = 8;
#endif
typedef float V __attribute__((vector_size(LANES * 4)));
typedef int32_t I __attribute__((vector_size(LANES * 4)));
typedef int16_t H __attribute__((vector_size(LANES * 2)));
typedef uint8_t B __attribute__((vector_size(LANES)));
typedef double D2 __attribute__((vector_size(16)));

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

inline bool any(I mask) {
  int64_t parts[LANES / 2], all = 0;
  std::memcpy(parts, &mask, sizeof(mask));
  for (int64_t part : parts) all |= part;
  return all != 0;
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

template <class Item>  // columns `stride` apart -> rows; along few columns at a time, of which each line is read once
const Item* transpose(const Item* from, int64_t stride, int64_t rows, int64_t cols, Item* to) {
  constexpr int N = 16 / int(sizeof(Item));
  const int64_t whole = rows / N * N;
  int64_t left = 0;
  for (; left + N <= cols; left += N) {
    const Item* column = from + left * stride;
    for (int64_t row = 0; row < whole; row += N) transpose_square<Item, N>(column + row, stride, to + row * cols + left, cols);
    for (int64_t row = whole; row < rows; row++)
      for (int64_t col = 0; col < N; col++) to[row * cols + left + col] = column[col * stride + row];
  }
  for (; left < cols; left++)
    for (int64_t row = 0; row < rows; row++) to[row * cols + left] = from[left * stride + row];
  return to;
}

// Some rows of a matrix, one below the other.
template <class Item>
void take(const void* from, int64_t row_step, int64_t col_step, int64_t cols, const int64_t* bands, int64_t n, void* to) {
  Item* out = static_cast<Item*>(to);
  for (int64_t i = 0; i < n; i++, bands += 2) {
    const Item* first = static_cast<const Item*>(from) + bands[0] * row_step;
    const int64_t rows = bands[1] - bands[0];
    if (col_step != 1) transpose(first, col_step, rows, cols, out);
    else
      for (int64_t row = 0; row < rows; row++)
        std::memcpy(out + row * cols, first + row * row_step, size_t(cols) * sizeof(Item));
    out += rows * cols;
  }
}

struct Lanes {  // what is summed while chunks of a row go by
  V sums[SUMS], max_error;
  I nonzero, kept, subnormal, infinite, smallest;
};

struct Scratch {  // of one thread
  Array<float> blocks[GRANULARITIES];  // amaxes: row, 1x128, 1x32, 128x128 of a band
  Array<char> x;                       // a band in rows, where it lies in columns
  Array<uint8_t> codes;
  alignas(64) D2 below[2][GRANULARITIES][RELATIVE_BINS];  // energy and count; two, so that equal neighbours do not wait
  uint32_t exponents[2][EXPONENT_BINS];
  alignas(64) int32_t exponent[CHUNK], relative[CHUNK];
  alignas(64) float square[CHUNK], scale[CHUNK], largest[CHUNK];
};

template <class T>
struct Walk {
  using Int = typename T::Int;
  const Job& job;
  const int64_t* places;
  const Decoder decode;
  const float amax;

  Walk(const Job& j, const int64_t* p)
      : job(j), places(p), decode(j.mantissa_bits, j.bias, j.bits, j.special_code),
        amax(float(j.extent[LARGEST_FINITE])) {}

  void band(int64_t number, Scratch& s, double* out, double* extremes) const {
    const int64_t top = number * BAND, rows = smaller(BAND, job.rows - top);
    const Int* x = static_cast<const Int*>(job.x) + top * job.x_row;
    const uint8_t* codes = job.codes + top * job.code_row;
    int64_t x_row = job.x_row, code_row = job.code_row;
    if (job.x_col != 1)
      x = transpose(x, job.x_col, rows, job.cols, reinterpret_cast<Int*>(s.x.get())), x_row = job.cols;
    if (job.code_col != 1) codes = transpose(codes, job.code_col, rows, job.cols, s.codes.get()), code_row = job.cols;
    look(x, x_row, rows, s, out);
    std::memset(s.below, 0, sizeof(s.below));
    std::memset(s.exponents, 0, sizeof(s.exponents));
    int64_t infinite = 0, nonzero = 0;
    for (int64_t row = 0; row < rows; row++)
      this->row(x + row * x_row, codes + row * code_row, top + row, row, s, out, extremes, infinite, nonzero);
    const int64_t size = rows * job.cols;
    out[places[N]] = double(size - infinite);
    for (int i = 0; i < EXPONENT_BINS; i++)
      out[places[EXPONENTS] + i] = double(s.exponents[0][i]) + double(s.exponents[1][i]);
    out[places[EXPONENTS]] -= double(size - nonzero);  // zeros, and what is not finite
    if (!job.fine) return;
    for (int g = 0; g < GRANULARITIES; g++) {
      double *count = out + places[BELOW + 2 * g], *energy = out + places[BELOW + 2 * g + 1];
      for (int i = 0; i < RELATIVE_BINS; i++) {
        const D2 both = s.below[0][g][i] + s.below[1][g][i];
        energy[i] = both[0];
        count[i] = both[1];
      }
      count[RELATIVE_BINS - 1] -= double(size - nonzero);
    }
  }

 private:
  // The largest finite magnitude of every block of the band.
  void look(const Int* x, int64_t stride, int64_t rows, Scratch& s, double* out) const {
    const int64_t thirties = (job.cols + 31) / 32, chunks = (job.cols + CHUNK - 1) / CHUNK;
    fill(s.blocks[3].get(), chunks, 0.0f);
    for (int64_t row = 0; row < rows; row++, x += stride) {
      float* small = s.blocks[2].get() + row * thirties;
      for (int64_t b = 0; b < thirties; b++) {
        const int64_t n = smaller<int64_t>(32, job.cols - b * 32);
        Int most = 0;
        if (n == 32) {
          for (int64_t i = 0; i < 32; i++) most = larger(most, finite(x[b * 32 + i]));
        } else {
          for (int64_t i = 0; i < n; i++) most = larger(most, finite(x[b * 32 + i]));
        }
        small[b] = T::value(most);
      }
      float whole = 0;
      for (int64_t c = 0; c < chunks; c++) {
        float most = 0;
        for (int64_t b = 4 * c; b < smaller(4 * c + 4, thirties); b++) most = larger(most, small[b]);
        s.blocks[1][row * chunks + c] = most;
        s.blocks[3][c] = larger(s.blocks[3][c], most);
        whole = larger(whole, most);
        if (!(most > 0)) continue;
        out[places[SPREAD] + between((bits_of(amax / most) >> 23) - 127, 0, SPREAD_BINS - 1)]++;
      }
      s.blocks[0][row] = whole;
    }
  }

  static inline Int finite(Int bits) {
    const Int magnitude = bits & T::mask;
    return magnitude >= T::infinity ? Int(0) : magnitude;
  }

  void row(const Int* x, const uint8_t* codes, int64_t number, int64_t in_band, Scratch& s, double* out,
           double* extremes, int64_t& infinite, int64_t& nonzero) const {
    const float largest = s.blocks[0][in_band];
    const int32_t field = largest > 0 ? larger(bits_of(largest) >> 23, 1) : 127;
    const int32_t exponent = between(127 - field, -126, 126);
    const float unit = float_of((exponent + 127) << 23);  // largest * unit is in [1, 2), or less if it is subnormal
    Lanes lanes{};
    lanes.smallest += MAGNITUDE;
    double sums[SUMS] = {};
    const int64_t chunks = (job.cols + CHUNK - 1) / CHUNK;
    for (int64_t c = 0; c < chunks; c++) {
      const int64_t left = c * CHUNK, n = smaller(CHUNK, job.cols - left);
      scales(number, left, n, s.scale);
      chunk(x + left, codes + left, n, in_band, c, unit, lanes, s, out);
      if (c % FLUSH == FLUSH - 1 || c + 1 == chunks)
        for (int k = 0; k < SUMS; k++) {
          for (int l = 0; l < LANES; l++) sums[k] += double(lanes.sums[k][l]);
          lanes.sums[k] = V{};
        }
    }
    const double once = __builtin_ldexp(1.0, -exponent), twice = once * once;
    const double units[] = {once, once, twice, twice * twice, twice, twice, 1.0};  // sums are of x * unit, x ** 2 ...
    for (int k = 0; k < SUMS; k++) out[places[SX + k]] += sums[k] * units[k];
    if (sums[2] > 0) {  // sxx
      const double bin = -10 * __builtin_log10(sums[4] / sums[2]) / 0.5;
      out[places[ROWS]]++;
      out[places[ROW_SQNR] + (bin > 0 ? int(smaller(bin, SQNR_BINS - 1.0)) : 0)]++;
    }
    int64_t kept = 0, here = 0;
    for (int l = 0; l < LANES; l++) {
      here -= lanes.nonzero[l];
      kept -= lanes.kept[l];
      infinite -= lanes.infinite[l];
      out[places[SUBNORMAL]] -= lanes.subnormal[l];
      if (lanes.smallest[l] < MAGNITUDE)
        extremes[AMIN] = larger(extremes[AMIN], -double(float_of(lanes.smallest[l] + 1)));
      extremes[MAX_ERROR] = larger(extremes[MAX_ERROR], double(lanes.max_error[l]));
    }
    nonzero += here;
    out[places[NONZERO]] += double(here);
    out[places[UNDERFLOW_]] += double(here - kept);
  }

  void scales(int64_t row, int64_t left, int64_t n, float* scale) const {
    const float* from = job.scale_inv + row / job.block_rows * job.grid_cols;
    for (int64_t i = 0; i < n;) {
      const int64_t block = (left + i) / job.block_cols, end = smaller((block + 1) * job.block_cols - left, n);
      fill(scale + i, end - i, from[block]);
      i = end;
    }
  }

  void chunk(const Int* x, const uint8_t* codes, int64_t n, int64_t row, int64_t c, float unit, Lanes& a, Scratch& s,
             double* out) const {
    alignas(64) Int some_x[CHUNK];
    alignas(64) uint8_t some_codes[CHUNK];
    if (n % LANES) {  // zeros change nothing: they are not counted
      std::memset(some_x, 0, sizeof(some_x));
      std::memset(some_codes, 0, sizeof(some_codes));
      std::memcpy(some_x, x, size_t(n) * sizeof(Int));
      std::memcpy(some_codes, codes, size_t(n));
      fill(s.scale + n, CHUNK - n, 1.0f);
      x = some_x, codes = some_codes;
    }
    const bool clipped = vectors(x, codes, n, row, c, unit, a, s);
    if (clipped) count_clipped(x, codes, n, s, out);
    scatter(n, 1 / (double(unit) * double(unit)), s);
  }

  // Sums of a chunk, and for each element the bins it falls into. Returns whether something may have been clipped.
  inline bool vectors(const Int* x, const uint8_t* codes, int64_t n, int64_t row, int64_t c, float unit, Lanes& lanes,
                      Scratch& s) const {
    Lanes a = lanes;
    const Decoder d = decode;
    const bool fine = job.fine;
    const float nearly = float(job.clip * (1 - 1.0 / 64));
    const int64_t chunks = (job.cols + CHUNK - 1) / CHUNK, thirties = (job.cols + 31) / 32;
    const float by_row = one_if_zero(s.blocks[0][row]), by_chunk = one_if_zero(s.blocks[1][row * chunks + c]);
    const float by_square = one_if_zero(s.blocks[3][c]);
    const float* by_thirty = s.blocks[2].get() + row * thirties + 4 * c;
    I candidates{};
    for (int64_t i = 0; i < n; i += LANES) {
      const I raw = fp32_bits<T>(x + i), beyond = (raw & MAGNITUDE) >= INFINITE;
      const I bits = raw & ~beyond, magnitude_bits = bits & MAGNITUDE;
      const I code = widened(load<B>(codes + i)), fields = (code & d.magnitudes) << d.shift;
      const I normal = fields + (fields >= d.special ? spread(2 * d.rebias) : spread(d.rebias));
      const I tiny = as<I>(as<V>(fields + d.smallest_normal) - spread(float_of(d.smallest_normal)));
      const I number = ((fields < (1 << 23) ? tiny : normal) | ((code << d.sign_shift) & ~MAGNITUDE)) & ~beyond;
      const V value = as<V>(bits), magnitude = as<V>(magnitude_bits), scale = load<V>(s.scale + i);
      const V q = as<V>(number) * scale, error = value - q, size = as<V>(as<I>(error) & MAGNITUDE);
      const V y = value * unit, e = error * unit, square = y * y;
      const I nonzero = magnitude_bits != 0;
      a.sums[0] += y;
      a.sums[1] += magnitude * unit;
      a.sums[2] += square;
      a.sums[3] += square * square;
      a.sums[4] += e * e;
      a.sums[5] += y * e;
      a.sums[6] += size / (nonzero ? magnitude : spread(1.0f));
      a.max_error = size > a.max_error ? size : a.max_error;
      a.nonzero += nonzero;
      a.kept += q != 0;
      a.subnormal += (fields > 0) & (fields < (1 << 23)) & ~beyond;
      a.infinite += beyond;
      const I below_zero_last = (magnitude_bits - 1) & MAGNITUDE;  // zeros wrap around to the top
      a.smallest = below_zero_last < a.smallest ? below_zero_last : a.smallest;
      candidates |= magnitude >= nearly * scale;
      const I exponent = magnitude_bits >> QUARTER_OCTAVE;
      std::memcpy(s.exponent + i, &exponent, sizeof(exponent));
      if (!fine) continue;
      const I bins = bin(magnitude / by_row) | bin(magnitude / by_chunk) << 8 |
                     bin(magnitude / one_if_zero(by_thirty[i / 32])) << 16 | bin(magnitude / by_square) << 24;
      std::memcpy(s.relative + i, &bins, sizeof(bins));
      std::memcpy(s.square + i, &square, sizeof(square));
    }
    lanes = a;
    return any(candidates);
  }

  static inline float one_if_zero(float f) { return f > 0 ? f : 1.0f; }

  static inline I bin(V relative) {
    const I below = TOP_BIN - (as<I>(relative) >> QUARTER_OCTAVE);
    const I low = below > 0 ? below : I{};
    return low < RELATIVE_BINS - 1 ? low : spread(RELATIVE_BINS - 1);
  }

  void count_clipped(const Int* x, const uint8_t* codes, int64_t n, const Scratch& s, double* out) const {
    for (int64_t i = 0; i < n; i++) {
      const int32_t bits = bits_of(T::value(x[i])) & MAGNITUDE;
      const double magnitude = double(float_of(bits)), end = job.clip * double(s.scale[i]);
      const bool clips = job.tie_clips ? magnitude >= end : magnitude > end;
      // where even the scale of a block underflowed, an element is lost, not clipped
      if (bits < INFINITE && clips && float_of(decode(codes[i])) * s.scale[i] != 0) out[places[OVERFLOW_]]++;
    }
  }

  void scatter(int64_t n, double energy, Scratch& s) const {
    for (int64_t i = 0; i < n; i++) s.exponents[i & 1][s.exponent[i]]++;
    if (!job.fine) return;
    for (int64_t i = 0; i < n; i++) {
      const uint32_t bins = uint32_t(s.relative[i]);
      const D2 both = {double(s.square[i]) * energy, 1.0};
      D2(*below)[RELATIVE_BINS] = s.below[i & 1];
      below[0][bins & 0xff] += both;
      below[1][bins >> 8 & 0xff] += both;
      below[2][bins >> 16 & 0xff] += both;
      below[3][bins >> 24] += both;
    }
  }
};

}  // namespace
