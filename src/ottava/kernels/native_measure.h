// The walk of native_measure.cpp over one band of 128 rows: what debug/measure.py adds up in tensors, element by element
// in registers.
//
// Counts and histograms are exact. Sums: fp32 in the lanes of a vector for at most 1024 columns, then fp64; each band
// of 128 rows has sums of its own, which are added in the order of the bands, so that threads change no bit.

#pragma once

#include <new>

#include "native_base.h"
#include "native_float.h"
#include "native_take.h"
#include "native_vectors.h"

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
  const float* squares;  // of a sample: amaxes of the 128x128 blocks that its rows are from; null: x is all there is
  int64_t square_rows;   // of x from each of them
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
// Additions to memory are what a histogram costs. Where numbers lie close together, which they do, two are done in one:
// bins below amax that are NEAR, STEPS from the bin of an element in one block to that in another, a WINDOW of exponents.
constexpr int NEAR = 96, STEPS = 32, WINDOW = 64;
constexpr int QUARTER_OCTAVE = 21, TOP_BIN = (127 << 23) >> QUARTER_OCTAVE;
constexpr int64_t FLUSH = 8, WAVE = 16;  // chunks, bands in flight

typedef double D2 __attribute__((vector_size(16), may_alias));
typedef uint16_t Half __attribute__((may_alias));

struct Lanes {  // what is summed while chunks of a row go by
  V sums[SUMS], max_error;
  I nonzero, kept, subnormal, infinite, smallest;
};

struct Scratch {  // of one thread
  Array<float> blocks[GRANULARITIES];  // amaxes: row, 1x128, 1x32, 128x128 of a band
  Array<char> x;                       // a band in rows, where it lies in columns
  Array<uint8_t> codes;
  alignas(64) D2 below[GRANULARITIES][RELATIVE_BINS];  // energy and count
  D2 joint[2][(NEAR + 1) * (STEPS + 1)];  // of two granularities at once: place in the larger block, steps to that in the other
  uint32_t exponents[EXPONENT_BINS], pairs[WINDOW * WINDOW];  // of two neighbours at once
  alignas(64) int32_t places[CHUNK], bins[CHUNK];  // for each element: where it is in `pairs`; in `joint`, or in `below`
  alignas(64) float square[CHUNK], scale[CHUNK];
  float least_scale;
  const float* squares;  // amaxes of the blocks of 128x128 that a row is in
  alignas(64) D2 energy[CHUNK];
};

template <class T>
struct Walk {
  using Int = typename T::Int;
  const Job& job;
  const int64_t* places;
  const Decoder decode;
  const float amax;
  const int32_t lowest;  // beyond this one, bins of exponents are in the window

  Walk(const Job& j, const int64_t* p)
      : job(j), places(p), decode(j.mantissa_bits, j.bias, j.bits, j.special_code),
        amax(float(j.extent[LARGEST_FINITE])), lowest(larger((bits_of(amax) >> QUARTER_OCTAVE) - WINDOW + 1, 0)) {}

  void band(int64_t number, Scratch& s, double* out, double* extremes) const {
    const int64_t top = number * BAND, rows = smaller(BAND, job.rows - top);
    const Int* x = static_cast<const Int*>(job.x) + top * job.x_row;
    const uint8_t* codes = job.codes + top * job.code_row;
    int64_t x_row = job.x_row, code_row = job.code_row;
    if (job.x_col != 1)
      x = transpose(x, job.x_col, rows, job.cols, reinterpret_cast<Int*>(s.x.get()), job.cols), x_row = job.cols;
    if (job.code_col != 1)
      codes = transpose(codes, job.code_col, rows, job.cols, s.codes.get(), job.cols), code_row = job.cols;
    look(x, x_row, rows, s, out);
    std::memset(s.below, 0, sizeof(s.below));
    std::memset(s.exponents, 0, sizeof(s.exponents));
    std::memset(s.pairs, 0, sizeof(s.pairs));
    if (job.fine) std::memset(s.joint, 0, sizeof(s.joint));
    int64_t infinite = 0, nonzero = 0;
    for (int64_t row = 0; row < rows; row++)
      this->row(x + row * x_row, codes + row * code_row, top + row, row, s, out, extremes, infinite, nonzero);
    const int64_t size = rows * job.cols;
    out[places[N]] = double(size - infinite);
    apart(s);
    for (int i = 0; i < EXPONENT_BINS; i++) out[places[EXPONENTS] + i] = double(s.exponents[i]);
    if (!job.fine) return;
    for (int g = 0; g < GRANULARITIES; g++) {
      double *count = out + places[BELOW + 2 * g], *energy = out + places[BELOW + 2 * g + 1];
      for (int i = 0; i < RELATIVE_BINS; i++) {
        energy[i] = s.below[g][i][0];
        count[i] = s.below[g][i][1];
      }
      count[RELATIVE_BINS - 1] -= double(size - nonzero);
    }
  }

 private:
  // Adds what was counted two at once to the histograms.
  void apart(Scratch& s) const {
    for (int second = 0; second < WINDOW; second++)  // in place 0 are zeros
      for (int first = 0; first < WINDOW; first++) {
        const uint32_t count = s.pairs[second * WINDOW + first];
        if (count && first) s.exponents[lowest + first] += count;
        if (count && second) s.exponents[lowest + second] += count;
      }
    if (!job.fine) return;
    for (int which = 0; which < 2; which++) {  // row and 1x32, 128x128 and 1x128
      D2 *wide = s.below[which ? 3 : 0], *narrow = s.below[which ? 1 : 2];
      const D2* from = s.joint[which];
      wide[RELATIVE_BINS - 1] += from[0];  // zeros
      narrow[RELATIVE_BINS - 1] += from[0];
      for (int bin = 0; bin < NEAR; bin++)
        for (int steps = 0; steps < smaller(STEPS, bin + 1); steps++) {
          const D2 both = from[(NEAR - bin) * (STEPS + 1) + steps];
          wide[bin] += both;
          narrow[bin - steps] += both;
        }
    }
  }

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
    s.squares = job.squares ? job.squares + number / job.square_rows * chunks : s.blocks[3].get();
    for (int64_t c = 0; c < chunks; c++) {
      const int64_t left = c * CHUNK, n = smaller(CHUNK, job.cols - left);
      if (c == 0 || job.grid_cols > 1) scales(number, left, n, s);
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
    int64_t kept = 0, here = 0, subnormal = 0;
    int32_t smallest = MAGNITUDE;
    float max_error = 0;
    for (int l = 0; l < LANES; l++) {
      here -= lanes.nonzero[l];
      kept -= lanes.kept[l];
      infinite -= lanes.infinite[l];
      subnormal -= lanes.subnormal[l];
      smallest = smaller(smallest, lanes.smallest[l]);
      max_error = larger(max_error, lanes.max_error[l]);
    }
    out[places[SUBNORMAL]] += double(subnormal);
    if (smallest < MAGNITUDE) extremes[AMIN] = larger(extremes[AMIN], -double(float_of(smallest + 1)));
    extremes[MAX_ERROR] = larger(extremes[MAX_ERROR], double(max_error));
    nonzero += here;
    out[places[NONZERO]] += double(here);
    out[places[UNDERFLOW_]] += double(here - kept);
  }

  void scales(int64_t row, int64_t left, int64_t n, Scratch& s) const {
    const float* from = job.scale_inv + row / job.block_rows * job.grid_cols;
    s.least_scale = from[left / job.block_cols];
    for (int64_t i = 0; i < n;) {
      const int64_t block = (left + i) / job.block_cols, end = smaller((block + 1) * job.block_cols - left, n);
      fill(s.scale + i, end - i, from[block]);
      s.least_scale = smaller(s.least_scale, from[block]);
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
    const int64_t chunks = (job.cols + CHUNK - 1) / CHUNK, thirties = (job.cols + 31) / 32;
    const Blocks blocks(s.blocks[0][row], s.blocks[1][row * chunks + c], s.squares[c],
                        s.blocks[2].get() + row * thirties + 4 * c, (n + 31) / 32);
    int32_t smallest;
    vectors(x, codes, n, blocks, unit, a, s, smallest);
    if (smallest && !(blocks.chunk < job.clip * (1 - 1.0 / 64) * s.least_scale)) count_clipped(x, codes, n, s, out);
    count_exponents(x, n, smallest, blocks.chunk, s);
    if (job.fine) count_below(x, n, smallest, blocks, 1 / (double(unit) * double(unit)), s);
  }

  static inline float one_if_zero(float f) { return f > 0 ? f : 1.0f; }

  struct Blocks {  // the amaxes of the blocks that a chunk is part of
    float row, chunk, square;
    const float* thirty;
    bool close;  // so that any element is in bins of `joint`

    Blocks(float r, float c, float s, const float* t, int64_t n)
        : row(one_if_zero(r)), chunk(one_if_zero(c)), square(one_if_zero(s)), thirty(t), close(!(c > 0) || steps(c, s)) {
      for (int64_t i = 0; i < n; i++) close = close && (!(t[i] > 0) || steps(t[i], r));
    }
    static bool steps(float inner, float outer) {  // bins grow a little apart: they are quarters of octaves, not their roots
      return TOP_BIN - (bits_of(inner / outer) >> QUARTER_OCTAVE) < STEPS - 3;
    }
  };

  // Divides magnitudes by the amax of their block, as exactly as bins need it.
  struct Divided {
    static constexpr bool SHORT = sizeof(Int) == 2;
    float by;

    // Quotients of numbers of 11 bits or fewer lie on the edge of a bin or 2**-14 off it: a product with an inverse that
    // is 2**-16 too large is in the same bin. `unit` brings blocks that are close to where inverses are normal numbers.
    Divided(float amax, float unit) : by(SHORT ? 1 / (amax * unit) * (1 + 0x1p-16f) : amax) {}
    inline I operator()(V magnitude, V in_units) const {
      return as<I>(SHORT ? in_units * by : magnitude / by) >> QUARTER_OCTAVE;
    }
  };

  // Sums of a chunk, and for each element the places it is counted at.
  inline void vectors(const Int* x, const uint8_t* codes, int64_t n, const Blocks& blocks, float unit, Lanes& lanes,
                      Scratch& s, int32_t& smallest) const {
    Lanes a = lanes;
    const Decoder d = decode;
    const bool fine = job.fine;
    const Divided by_row(blocks.row, unit), by_chunk(blocks.chunk, unit), by_square(blocks.square, unit);
    const int32_t lowest = this->lowest;
    I second{}, low = spread(MAGNITUDE);
    for (int l = 1; l < LANES; l += 2) second[l] = 6;
    for (int64_t i = 0; i < n; i += LANES) {
      const I raw = fp32_bits<T>(x + i), beyond = (raw & MAGNITUDE) >= INFINITE;
      const I bits = raw & ~beyond, magnitude_bits = bits & MAGNITUDE;
      const I code = widened(load<B>(codes + i)), fields = (code & d.magnitudes) << d.shift;
      const I normal = fields + (fields >= d.special ? spread(2 * d.rebias) : spread(d.rebias));
      const I tiny = as<I>(as<V>(fields + d.smallest_normal) - spread(float_of(d.smallest_normal)));
      const I number = ((fields < (1 << 23) ? tiny : normal) | ((code << d.sign_shift) & ~MAGNITUDE)) & ~beyond;
      const V value = as<V>(bits), magnitude = as<V>(magnitude_bits), scale = load<V>(s.scale + i);
      const V q = as<V>(number) * scale, error = value - q, size = as<V>(as<I>(error) & MAGNITUDE);
      const V y = value * unit, e = error * unit, square = y * y, in_units = magnitude * unit;
      const I nonzero = magnitude_bits != 0;
      a.sums[0] += y;
      a.sums[1] += in_units;
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
      low = below_zero_last < low ? below_zero_last : low;
      const I exponent = (magnitude_bits >> QUARTER_OCTAVE) - lowest, place = (exponent > 0 ? exponent : I{}) << second;
      std::memcpy(s.places + i, &place, sizeof(place));
      if (!fine) continue;
      const I row = by_row(magnitude, in_units), square_ = by_square(magnitude, in_units);
      const I thirty = Divided(one_if_zero(blocks.thirty[i / 32]), unit)(magnitude, in_units);
      const I first = from_the_top(row) * (STEPS + 1) + (thirty - row);
      const I other = from_the_top(square_) * (STEPS + 1) + (by_chunk(magnitude, in_units) - square_);
      const I bins = (first | other << 16) << 4;  // in bytes
      std::memcpy(s.bins + i, &bins, sizeof(bins));
      std::memcpy(s.square + i, &square, sizeof(square));
    }
    a.smallest = low < a.smallest ? low : a.smallest;
    lanes = a;
    smallest = MAGNITUDE;
    for (int l = 0; l < LANES; l++) smallest = smaller(smallest, low[l]);
    smallest = smallest < MAGNITUDE ? smallest + 1 : 0;
  }

  static inline I from_the_top(I bin) {  // NEAR for an amax, 0 for what is not near
    const I place = bin - (TOP_BIN - NEAR);
    return place > 0 ? place : I{};
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

  // smallest: the bits of that magnitude but for zeros, 0 if all are.
  void count_exponents(const Int* x, int64_t n, int32_t smallest, float largest, Scratch& s) const {
    const int32_t bottom = smallest >> QUARTER_OCTAVE, top = bits_of(largest) >> QUARTER_OCTAVE;
    if (smallest == 0) return;
    if (bottom > lowest && top < lowest + WINDOW) {
      for (int64_t i = 0; i < n; i += 2) s.pairs[s.places[i] + s.places[i + 1]]++;  // after the last one there is a zero
      return;
    }
    for (int64_t i = 0; i < n; i++) {
      const int32_t bits = bits_of(T::value(x[i])) & MAGNITUDE;
      if (bits && bits < INFINITE) s.exponents[bits >> QUARTER_OCTAVE]++;
    }
  }

  void count_below(const Int* x, int64_t n, int32_t smallest, const Blocks& blocks, double energy, Scratch& s) const {
    double* both = reinterpret_cast<double*>(s.energy);
    for (int64_t i = 0; i < CHUNK; i++) {
      both[2 * i] = double(s.square[i]) * energy;
      both[2 * i + 1] = 1;
    }
    const float least = float_of(smallest);
    if (blocks.close && (smallest == 0 || (is_near(least, blocks.row) && is_near(least, blocks.square)))) {
      const Half* places = reinterpret_cast<const Half*>(s.bins);
      char *first = reinterpret_cast<char*>(s.joint[0]), *other = reinterpret_cast<char*>(s.joint[1]);
      for (int64_t i = 0; i < n; i++) {
        const D2 both = s.energy[i];
        *reinterpret_cast<D2*>(first + places[2 * i]) += both;
        *reinterpret_cast<D2*>(other + places[2 * i + 1]) += both;
      }
      return;
    }
    find_bins(x, n, blocks, s);
    for (int64_t i = 0; i < n; i++) {
      const uint32_t bins = uint32_t(s.bins[i]);
      s.below[0][bins & 0xff] += s.energy[i];
      s.below[1][bins >> 8 & 0xff] += s.energy[i];
      s.below[2][bins >> 16 & 0xff] += s.energy[i];
      s.below[3][bins >> 24] += s.energy[i];
    }
  }

  static bool is_near(float least, float amax) { return TOP_BIN - (bits_of(least / amax) >> QUARTER_OCTAVE) < NEAR; }

  __attribute__((noinline)) void find_bins(const Int* x, int64_t n, const Blocks& blocks, Scratch& s) const {
    for (int64_t i = 0; i < n; i++) {
      const int32_t bits = bits_of(T::value(x[i])) & MAGNITUDE;
      const float magnitude = bits < INFINITE ? float_of(bits) : 0.0f;
      s.bins[i] = bin(magnitude / blocks.row) | bin(magnitude / blocks.chunk) << 8 |
                  bin(magnitude / one_if_zero(blocks.thirty[i / 32])) << 16 | bin(magnitude / blocks.square) << 24;
    }
  }

  static inline int32_t bin(float relative) {
    return between(TOP_BIN - (bits_of(relative) >> QUARTER_OCTAVE), 0, RELATIVE_BINS - 1);
  }
};

}  // namespace
