// The walk of measure.cpp over bands of 128 rows. It computes in registers, element by element, the sums that
// measure/walk.py computes with tensors. This file has the histograms, numbers.h the sums of a row.
//
// Counts and histograms are exact. Each band has its own sums, which are added in the order of the bands, so the number
// of threads changes no bit.

#pragma once

#include <new>

#include "numbers.h"

extern "C" {
typedef int Quantize(const CastJob* job);
typedef void Scales(const float* amax, int64_t n, const Cast* cast, float* scale, float* scale_inv);
}

extern "C" struct Library {  // native.measure._Library: functions of quantize.cpp, and the layout of tally.py
  Quantize* quantize;  // null if no job casts
  Scales* scales;
  const int64_t* places;  // the first place of each of OTTAVA_SUMS in a vector of `width` numbers
  int64_t width;
};

namespace {

constexpr int GRANULARITIES = 4, EXPONENT_BINS = bins::exponents, RELATIVE_BINS = bins::below_row;
// A histogram costs additions to memory. Most numbers lie close together, so one addition counts two of them: bins within
// NEAR of the amax, at most STEPS between the bins of an element in two blocks, exponents in one WINDOW.
constexpr int NEAR = 96, STEPS = 32, WINDOW = 64;
constexpr int QUARTER_OCTAVE = 21, TOP_BIN = (127 << 23) >> QUARTER_OCTAVE;
constexpr int64_t WAVE = 16;  // bands in flight

typedef double D2 __attribute__((vector_size(16), may_alias));
typedef uint16_t Half __attribute__((may_alias));

struct Scratch {  // one thread's
  Stretch stretch;
  Array<float> blocks[GRANULARITIES];  // the amaxes of a band: row, 1x128, 1x32, 128x128
  Array<char> x;                       // a band turned into rows, if it lies in columns
  Array<uint8_t> codes;
  alignas(64) D2 below[GRANULARITIES][RELATIVE_BINS];  // energy and count
  D2 joint[2][(NEAR + 1) * (STEPS + 1)];  // two granularities at once: a bin, and steps to the other's
  uint32_t exponents[EXPONENT_BINS], pairs[WINDOW * WINDOW];  // two neighbours at once
  alignas(64) int32_t places[CHUNK], bins[CHUNK];  // of each element: its index in `pairs`; in `joint` or in `below`
  alignas(64) float square[CHUNK];
  alignas(64) D2 energy[CHUNK];
};

template <class T>
struct Walk {
  using Int = typename T::Int;
  const Job& job;
  const int64_t* places;
  const Rows<T> numbers;
  const float amax;
  const int32_t lowest;  // the window holds the bins of exponents above this one

  Walk(const Job& j, const int64_t* p)
      : job(j), places(p), numbers(j, p), amax(float(j.extent[LARGEST_FINITE])),
        lowest(larger((bits_of(amax) >> QUARTER_OCTAVE) - WINDOW + 1, 0)) {}

  // Walks over a band of rows or, without histograms, over some groups of a band.
  void band(int64_t top, int64_t rows, Scratch& s, double* out, double* extremes) const {
    const Int* x = static_cast<const Int*>(job.x) + top * job.x_row;
    const uint8_t* codes = job.codes + top * job.code_row;
    int64_t x_row = job.x_row, code_row = job.code_row, nonzero = 0;
    const int64_t chunks = (job.cols + CHUNK - 1) / CHUNK;
    if (job.x_col != 1) {
      x_row = padded<Int>(job.cols);
      x = transpose(x, job.x_col, rows, job.cols, reinterpret_cast<Int*>(s.x.get()), x_row);
    }
    if (job.code_col != 1) {
      code_row = padded<uint8_t>(job.cols);
      codes = transpose(codes, job.code_col, rows, job.cols, s.codes.get(), code_row);
    }
    const bool histograms = job.detail >= EXPONENTS;
    std::memset(s.stretch.spread, 0, sizeof(s.stretch.spread));
    if (histograms) {
      look(x, x_row, rows, s);
      std::memset(s.exponents, 0, sizeof(s.exponents));
      std::memset(s.pairs, 0, sizeof(s.pairs));
      if (job.detail >= BLOCKS) std::memset(s.below, 0, sizeof(s.below)), std::memset(s.joint, 0, sizeof(s.joint));
    }
    for (int64_t first = 0; first < rows; first += GROUP) {
      const int64_t last = smaller(first + GROUP, rows);
      Group group{};
      for (int64_t row = first; row < last; row++) {
        const Int* here = x + row * x_row;
        float* amaxes = histograms ? s.blocks[1].get() + row * chunks : s.blocks[1].get();
        const float largest = histograms ? s.blocks[0][row] : numbers.look(here, amaxes, s.stretch);
        numbers.add(here, codes + row * code_row, top + row, largest, amaxes, s.stretch, group, out, extremes);
        if (histograms) this->row(here, top + row, row, s);
      }
      nonzero += numbers.finish(group, (last - first) * job.cols, s.stretch, out, extremes);
    }
    if (!histograms) return;
    apart(s);
    for (int i = 0; i < EXPONENT_BINS; i++) out[places[sum::exponents] + i] = double(s.exponents[i]);
    if (job.detail < BLOCKS) return;
    for (int g = 0; g < GRANULARITIES; g++) {
      double *count = out + places[sum::below_row + 2 * g], *energy = out + places[sum::below_row + 2 * g + 1];
      for (int i = 0; i < RELATIVE_BINS; i++) {
        energy[i] = s.below[g][i][0];
        count[i] = s.below[g][i][1];
      }
      count[RELATIVE_BINS - 1] -= double(rows * job.cols - nonzero);
    }
  }

 private:
  // Adds the counts of pairs to the histograms.
  void apart(Scratch& s) const {
    for (int second = 0; second < WINDOW; second++)  // place 0 counts zeros
      for (int first = 0; first < WINDOW; first++) {
        const uint32_t count = s.pairs[second * WINDOW + first];
        if (count && first) s.exponents[lowest + first] += count;
        if (count && second) s.exponents[lowest + second] += count;
      }
    if (job.detail < BLOCKS) return;
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
  void look(const Int* x, int64_t stride, int64_t rows, Scratch& s) const {
    const int64_t thirties = (job.cols + 31) / 32, chunks = (job.cols + CHUNK - 1) / CHUNK;
    fill(s.blocks[3].get(), chunks, 0.0f);
    for (int64_t row = 0; row < rows; row++, x += stride) {
      float* small = s.blocks[2].get() + row * thirties;
      for (int64_t b = 0; b < thirties; b++) {
        const int64_t n = smaller<int64_t>(32, job.cols - b * 32);
        Int most = 0;
        if (n == 32) {
          for (int64_t i = 0; i < 32; i++) most = larger(most, Rows<T>::finite(x[b * 32 + i]));
        } else {
          for (int64_t i = 0; i < n; i++) most = larger(most, Rows<T>::finite(x[b * 32 + i]));
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
        if (most > 0) s.stretch.spread[c % 4][numbers.spread_of(most)]++;
      }
      s.blocks[0][row] = whole;
    }
  }

  // Adds a row to the histograms; number: of the row in x, row: in the band.
  void row(const Int* x, int64_t number, int64_t row, Scratch& s) const {
    const float unit = unit_of(s.blocks[0][row]);
    const int64_t chunks = (job.cols + CHUNK - 1) / CHUNK, thirties = (job.cols + 31) / 32;
    const float* squares = job.squares ? job.squares + number / job.square_rows * chunks : s.blocks[3].get();
    for (int64_t c = 0; c < chunks; c++) {
      const int64_t n = smaller(CHUNK, job.cols - c * CHUNK);
      const Blocks blocks(s.blocks[0][row], s.blocks[1][row * chunks + c], squares[c],
                          s.blocks[2].get() + row * thirties + 4 * c, (n + 31) / 32);
      chunk(x + c * CHUNK, n, blocks, unit, s);
    }
  }

  struct Blocks;

  void chunk(const Int* x, int64_t n, const Blocks& blocks, float unit, Scratch& s) const {
    alignas(64) Int some[CHUNK];
    if (n % LANES) {  // the padding is zeros, which count nowhere
      std::memset(some, 0, sizeof(some));
      std::memcpy(some, x, size_t(n) * sizeof(Int));
      x = some;
    }
    const int32_t smallest = vectors(x, n, blocks, unit, s);
    count_exponents(x, n, smallest, blocks.chunk, s);
    if (job.detail >= BLOCKS) count_below(x, n, smallest, blocks, 1 / (double(unit) * double(unit)), s);
  }

  static inline float one_if_zero(float f) { return f > 0 ? f : 1.0f; }

  struct Blocks {  // the amaxes of the blocks around a chunk
    float row, chunk, square;
    const float* thirty;
    bool close;  // close enough for the bins of `joint`, for every element

    Blocks(float r, float c, float s, const float* t, int64_t n)
        : row(one_if_zero(r)), chunk(one_if_zero(c)), square(c > 0 ? s : 1.0f), thirty(t), close(!(c > 0) || steps(c, s)) {
      for (int64_t i = 0; i < n; i++) close = close && (!(t[i] > 0) || steps(t[i], r));
    }
    static bool steps(float inner, float outer) {  // quarters of octaves, not their roots, so bins grow
      return TOP_BIN - (bits_of(inner / outer) >> QUARTER_OCTAVE) < STEPS - 3;
    }
  };

  // Divides magnitudes by the amax of their block, as exactly as the bins need.
  struct Divided {
    static constexpr bool SHORT = sizeof(Int) == 2;
    float by;

    // Quotients of numbers of 11 bits or fewer lie on the edge of a bin or 2**-14 off it: a product with an inverse that
    // is 2**-16 too large is in the same bin. `unit` moves close blocks to magnitudes with normal inverses.
    Divided(float amax, float unit) : by(SHORT ? 1 / (amax * unit) * (1 + 0x1p-16f) : amax) {}
    inline Ints operator()(Floats magnitude, Floats in_units) const {
      return as<Ints>(SHORT ? in_units * by : magnitude / by) >> QUARTER_OCTAVE;
    }
  };

  // Finds the counters of each element of a chunk; returns the bits of the smallest magnitude above zero.
  inline int32_t vectors(const Int* x, int64_t n, const Blocks& blocks, float unit, Scratch& s) const {
    const bool in_blocks = job.detail >= BLOCKS;
    const Divided by_row(blocks.row, unit), by_chunk(blocks.chunk, unit), by_square(blocks.square, unit);
    const int32_t lowest = this->lowest;
    Ints second{}, low = spread(MAGNITUDE);
    for (int l = 1; l < LANES; l += 2) second[l] = 6;
    for (int64_t i = 0; i < n; i += LANES) {
      const Ints raw = fp32_bits<T>(x + i) & MAGNITUDE, bits = raw & ~(raw >= INFINITE);
      const Floats magnitude = as<Floats>(bits), in_units = magnitude * unit, square = in_units * in_units;
      const Ints below_zero_last = (bits - 1) & MAGNITUDE;  // zeros wrap around to the top
      low = below_zero_last < low ? below_zero_last : low;
      const Ints exponent = (bits >> QUARTER_OCTAVE) - lowest, place = (exponent > 0 ? exponent : Ints{}) << second;
      std::memcpy(s.places + i, &place, sizeof(place));
      if (!in_blocks) continue;
      const Ints row = by_row(magnitude, in_units), square_ = by_square(magnitude, in_units);
      const Ints thirty = Divided(one_if_zero(blocks.thirty[i / 32]), unit)(magnitude, in_units);
      const Ints first = from_the_top(row) * (STEPS + 1) + (thirty - row);
      const Ints other = from_the_top(square_) * (STEPS + 1) + (by_chunk(magnitude, in_units) - square_);
      const Ints bins = (first | other << 16) << 4;  // in bytes
      std::memcpy(s.bins + i, &bins, sizeof(bins));
      std::memcpy(s.square + i, &square, sizeof(square));
    }
    int32_t smallest = MAGNITUDE;
    for (int l = 0; l < LANES; l++) smallest = smaller(smallest, low[l]);
    return smallest < MAGNITUDE ? smallest + 1 : 0;
  }

  static inline Ints from_the_top(Ints bin) {  // NEAR for an amax, 0 for bins that are not near
    const Ints place = bin - (TOP_BIN - NEAR);
    return place > 0 ? place : Ints{};
  }

  // smallest: the bits of the smallest magnitude above zero, 0 if all elements are zeros.
  void count_exponents(const Int* x, int64_t n, int32_t smallest, float largest, Scratch& s) const {
    const int32_t bottom = smallest >> QUARTER_OCTAVE, top = bits_of(largest) >> QUARTER_OCTAVE;
    if (smallest == 0) return;
    if (bottom > lowest && top < lowest + WINDOW) {
      for (int64_t i = 0; i < n; i += 2) s.pairs[s.places[i] + s.places[i + 1]]++;  // a zero follows the last element
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
