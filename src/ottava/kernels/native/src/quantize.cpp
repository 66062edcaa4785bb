// Quantize on a CPU: amax, scale and codes of a row-major matrix, bit for bit those of kernels/reference.py.
//
//   scale = top / amax         one a block, rounded as the scale format asks; 1 where amax is 0, infinite or NaN
//   code  = round(x * scale)   in fp32, nearest even, saturating; NaN where x is infinite or NaN. A format without NaN
//                              has the NaN in the scale that decodes the block
//
// Floats are taken apart as signed integers throughout: magnitudes are ordered like their bits, NaN on top, and SSE2
// and AVX2 have signed compares only. No loop sums anything, so neither threads nor vector widths can change a bit.

#ifndef OTTAVA_TYPE  // the type of x: each has its own library, because most programs need only one
#define OTTAVA_TYPE BFloat16
#define OTTAVA_CASTS_BF16
#endif

#include "base.h"
#include "encode.h"
#include "scales.h"

namespace {

constexpr int64_t SPAN = 8192;             // elements of a flat tensor that a thread takes at once
constexpr int64_t SMALLEST_SHARE = 16384;  // elements that pay for waking another thread
constexpr int64_t WORTH_STEPS = 2048;      // elements of one factor that pay for a table of steps
constexpr int64_t CLOSE_BYTES = 1 << 14;   // of bands that a thread takes together
constexpr int64_t UNIT_BYTES = 1 << 18;   // of x, read twice: for amax and for the codes

// --- the walk --------------------------------------------------------------------------------------------------------

struct Walk {
  const void* x;
  uint8_t* out;  // null: factors are all that is wanted
  int64_t rows, cols, stride, block_rows, block_cols, grid_rows, grid_cols;
  const Cast* cast;
  const float* given;
  float *scale_inv, *amax, *factor;
  const Steps* steps;  // for factor 1: powers of two share them
  int threads;
};

template <class T>
inline void row_amax(const Walk& w, const typename T::Int* x, typename T::Int* most, int64_t first, int64_t last) {
  using Int = typename T::Int;
  if (w.block_cols == 1) {
    for (int64_t i = 0; i < last - first; i++) {
      const Int magnitude = x[i] & T::mask;
      most[i] = magnitude > most[i] ? magnitude : most[i];
    }
    return;
  }
#if OTTAVA_WORDS
  if (w.block_cols % 32 == 0)
    for (; first < last && (first + 1) * w.block_cols <= w.cols; first++, x += w.block_cols, most++)
      *most = larger(*most, largest_word(x, w.block_cols));
#endif
  for (int64_t g = first; g < last; g++, x += w.block_cols, most++) {
    const int64_t n = smaller(w.block_cols, w.cols - g * w.block_cols);
    const Int here = n == 16    ? largest_of<T>(x, 16)  // known lengths need no loop for the rest
                     : n == 32  ? largest_of<T>(x, 32)
                     : n == 128 ? largest_of<T>(x, 128)
                                : largest_of_many<T>(x, n);
    *most = larger(*most, here);
  }
}

template <class T>
void row_encode(const Walk& w, const typename T::Int* x, uint8_t* out, const float* factor, int64_t first, int64_t last,
                bool nans, Encoder code) {
  if (w.block_cols == 1) {
    encode<T>(x, out, last - first, FactorEach{factor}, code);
    if (nans) encode_nans<T>(x, out, last - first, FactorEach{factor}, code);
    return;
  }
  for (int64_t g = first; g < last; g++, x += w.block_cols, out += w.block_cols, factor++) {
    const int64_t n = smaller(w.block_cols, w.cols - g * w.block_cols);
    if (n == 16) encode_piece<T, 16>(x, out, OneFactor{*factor}, code);  // a call would cost more than the work
    else encode<T>(x, out, n, OneFactor{*factor}, code);
    if (nans) encode_nans<T>(x, out, n, OneFactor{*factor}, code);
  }
}

inline bool bases_of(const Walk& w, const float* factor, int64_t n, int16_t* base) {
  return w.steps->made && (w.block_cols >= 32 || w.block_cols == 1) && w.steps->bases(factor, n, base);
}

// Whether a code may be NaN: x has an infinity or a NaN, or 0 meets an infinite scale. If the format has none, NaN goes to
// the scales that decode such blocks.
__attribute__((noinline)) bool may_have_nan(const float* amax, const float* factor, int64_t n, const Cast& c, float* scale_inv) {
  int32_t largest = 0, largest_factor = 0;  // as bits, without branches: blocks may be small
  OTTAVA_ROLLED
  for (int64_t i = 0; i < n; i++) {
    largest = larger(largest, bits_of(amax[i]) & MAGNITUDE);
    largest_factor = larger(largest_factor, bits_of(factor[i]) & MAGNITUDE);
  }
  if (largest >= INFINITE && c.nan_code < 0) {
    OTTAVA_ROLLED
    for (int64_t i = 0; i < n; i++) scale_inv[i] = is_finite(amax[i]) ? scale_inv[i] : float_of(QUIET_NAN);
  }
  return largest >= INFINITE || largest_factor >= INFINITE;
}

enum Phase { AMAX = 1, SCALE = 2, ENCODE = 4, ALL = 7 };

struct Area {  // bands of block_rows rows, and blocks of each
  int64_t top, bottom, first, last;
};

// The rows of one band; base: those of its factors, or null.
template <class T>
void encode_band(const Walk& w, int64_t band, int64_t first, int64_t last, bool nans, const int16_t* base, Encoder code) {
  const int64_t top = band * w.block_rows, bottom = smaller(top + w.block_rows, w.rows), left = first * w.block_cols;
  const int64_t n = smaller(last * w.block_cols, w.cols) - left;
  const auto* x = static_cast<const typename T::Int*>(w.x) + top * w.stride + left;
  const float* factor = w.factor + band * w.grid_cols + first;
  uint8_t* out = w.out + top * w.cols + left;
  if (base != nullptr) {
    for (int64_t row = top; row < bottom; row++, x += w.stride, out += w.cols)
      encode_words<false>(reinterpret_cast<const int16_t*>(x), out, n, Bases{base, w.block_cols}, *w.steps);
  } else if (!nans && w.steps->made && w.block_cols * (bottom - top) >= WORTH_STEPS) {
    for (int64_t g = first; g < last; g++, x += w.block_cols, out += w.block_cols, factor++) {
      const Steps own = steps_of(*factor, *w.cast);
      const int64_t width = smaller(w.block_cols, w.cols - g * w.block_cols);
      for (int64_t row = 0; row < bottom - top; row++)
        encode_by<T>(own, x + row * w.stride, out + row * w.cols, width, *factor, code);
    }
  } else {
    for (int64_t row = top; row < bottom; row++, x += w.stride, out += w.cols)
      row_encode<T>(w, x, out, factor, first, last, nans, code);
  }
}

template <class T>
void blocks(const Walk& w, int phases, Area a, typename T::Int* most, Encoder code) {  // `most`: one amax a block
  using Int = typename T::Int;
  const int64_t n = a.last - a.first, step = n == w.grid_cols ? a.bottom - a.top : 1;  // scales of bands are neighbours
  const Int* x = static_cast<const Int*>(w.x) + a.first * w.block_cols;
  if (phases & AMAX) {
    fill(most, (a.bottom - a.top) * n, Int(0));
    for (int64_t row = a.top * w.block_rows; row < smaller(a.bottom * w.block_rows, w.rows); row++)
      row_amax<T>(w, x + row * w.stride, most + (row / w.block_rows - a.top) * n, a.first, a.last);
    for (int64_t band = a.top; band < a.bottom; band += step)
      for (int64_t i = 0; i < step * n; i++)
        w.amax[band * w.grid_cols + a.first + i] = T::value(most[(band - a.top) * n + i]);
  }
  int16_t* const base = reinterpret_cast<int16_t*>(most);
  bool nans = false, by_bases = true;
  for (int64_t band = a.top; band < a.bottom; band += step) {
    const int64_t place = band * w.grid_cols + a.first;
    if (phases & SCALE) scales(w.amax + place, step * n, *w.cast, w.given, w.factor + place, w.scale_inv + place);
    nans |= may_have_nan(w.amax + place, w.factor + place, step * n, *w.cast, w.scale_inv + place);
    by_bases = by_bases && !nans && bases_of(w, w.factor + place, step * n, base + (band - a.top) * n);
  }
  for (int64_t band = a.top; phases & ENCODE && band < a.bottom; band++)
    encode_band<T>(w, band, a.first, a.last, nans, by_bases ? base + (band - a.top) * n : nullptr, code);
}

inline int thread_number() {
#ifdef _OPENMP
  return omp_get_thread_num();
#else
  return 0;
#endif
}

// Takes bands in groups, or a band in groups of columns, small enough to stay in a cache between the phases.
template <class T>
bool bands(const Walk& w, int phases) {
  using Int = typename T::Int;
  const int64_t height = smaller(w.block_rows, w.rows), row_bytes = w.cols * int64_t(sizeof(Int));
  const int64_t columns = larger<int64_t>(UNIT_BYTES / (height * int64_t(sizeof(Int))), 64);
  const int64_t group = smaller(larger<int64_t>(columns / w.block_cols, 1), w.grid_cols);
  const int64_t groups = (w.grid_cols + group - 1) / group;
  const int64_t together = groups > 1 ? 1 : larger<int64_t>(CLOSE_BYTES / (height * row_bytes), 1);
  const Array<Int> scratch(w.threads * group * together);
  if (!scratch) return false;
#pragma omp parallel for schedule(static) num_threads(w.threads)
  for (int64_t unit = 0; unit < (w.grid_rows + together - 1) / together * groups; unit++) {
    const int64_t top = unit / groups * together, first = unit % groups * group;
    const Area area{top, smaller(top + together, w.grid_rows), first, smaller(first + group, w.grid_cols)};
    blocks<T>(w, phases, area, scratch.get() + thread_number() * group * together, Encoder(*w.cast));
  }
  return true;
}

// Makes both casts tile by tile, so that the second finds its elements in a cache. A tile holds whole blocks of both.
template <class T>
bool bands_of_both(const Walk& a, const Walk& b, int64_t tile_rows, int64_t tile_cols) {
  using Int = typename T::Int;
  const int64_t across = (a.cols + tile_cols - 1) / tile_cols, down = (a.rows + tile_rows - 1) / tile_rows;
  const Walk* const walks[2] = {&a, &b};
  int64_t most = 0;  // blocks of a tile
  for (const Walk* w : walks)
    most = larger(most, ((tile_rows + w->block_rows - 1) / w->block_rows) * ((tile_cols + w->block_cols - 1) / w->block_cols));
  const Array<Int> scratch(a.threads * most);
  if (!scratch) return false;
#pragma omp parallel for schedule(static) num_threads(a.threads)
  for (int64_t tile = 0; tile < across * down; tile++) {
    const int64_t top = tile / across * tile_rows, left = tile % across * tile_cols;
    for (const Walk* w : walks) {
      const int64_t bottom = smaller(top + tile_rows, w->rows), right = smaller(left + tile_cols, w->cols);
      const int64_t first = left / w->block_cols, last = (right + w->block_cols - 1) / w->block_cols;
      const int64_t together = larger<int64_t>(CLOSE_BYTES / (w->block_rows * (right - left) * int64_t(sizeof(Int))), 1);
      const int64_t end = (bottom + w->block_rows - 1) / w->block_rows;
      for (int64_t band = top / w->block_rows; band < end; band += together)
        blocks<T>(*w, ALL, Area{band, smaller(band + together, end), first, last}, scratch.get() + thread_number() * most,
                  Encoder(*w->cast));
    }
  }
  return true;
}

// Blocks as tall as the matrix: each thread finds the amaxes of some rows, their maxima give the scales, then the threads
// cast the rows.
template <class T>
bool tall(const Walk& w) {
  using Int = typename T::Int;
  const bool flat = w.grid_cols == 1 && (w.stride == w.cols || w.rows == 1);
  const int64_t total = w.rows * w.cols, length = flat ? SPAN : w.cols, step = flat ? SPAN : w.stride;
  const int64_t lines = flat ? (total + SPAN - 1) / SPAN : w.rows;
  const auto numbers = [=](int64_t line) { return flat ? smaller(SPAN, total - line * SPAN) : length; };
  const Int* x = static_cast<const Int*>(w.x);
  const Encoder code(*w.cast);
  const bool known = w.out && w.grid_cols == 1 && w.given != nullptr && *w.given > 0 && !w.cast->guarded;
  const Array<Int> scratch(w.threads * w.grid_cols);
  if (!scratch) return false;
  fill(scratch.get(), w.threads * w.grid_cols, Int(0));
  Steps steps = known ? steps_of(*w.given, *w.cast) : Steps();
#pragma omp parallel for schedule(static) num_threads(w.threads)
  for (int thread = 0; thread < w.threads; thread++) {
    Int* most = scratch.get() + thread * w.grid_cols;
    for (int64_t i = lines * thread / w.threads; i < lines * (thread + 1) / w.threads; i++) {
      const Int* line = x + i * step;
      uint8_t* out = w.out + i * length;
      if (known) *most = larger(*most, encode_and_look<T>(steps, line, out, numbers(i), *w.given, code));
      else if (w.grid_cols == 1) *most = larger(*most, largest_of_many<T>(line, numbers(i)));
      else row_amax<T>(w, line, most, 0, w.grid_cols);
    }
  }
  for (int64_t g = 0; g < w.grid_cols; g++) {
    Int all = 0;
    for (int t = 0; t < w.threads; t++) all = larger(all, scratch[t * w.grid_cols + g]);
    w.amax[g] = T::value(all);
  }
  scales(w.amax, w.grid_cols, *w.cast, w.given, w.factor, w.scale_inv);
  const bool nans = may_have_nan(w.amax, w.factor, w.grid_cols, *w.cast, w.scale_inv), one = w.grid_cols == 1;
  if (known || !w.out) return true;
  int16_t* const base = reinterpret_cast<int16_t*>(scratch.get());  // the amaxes are used up
  const bool by_bases = !one && !nans && bases_of(w, w.factor, w.grid_cols, base);
  if (one && !nans && total >= WORTH_STEPS) steps = steps_of(*w.factor, *w.cast);
#pragma omp parallel for schedule(static) num_threads(w.threads)
  for (int thread = 0; thread < w.threads; thread++) {
    for (int64_t i = lines * thread / w.threads; i < lines * (thread + 1) / w.threads; i++) {
      const Int* line = x + i * step;
      uint8_t* out = w.out + i * length;
      const auto* words = reinterpret_cast<const int16_t*>(line);
      if (by_bases) encode_words<false>(words, out, length, Bases{base, w.block_cols}, *w.steps);
      else if (!one) row_encode<T>(w, line, out, w.factor, 0, w.grid_cols, nans, code);
      else encode_by<T>(steps, line, out, numbers(i), *w.factor, code);
      if (one && nans) encode_nans<T>(line, out, numbers(i), OneFactor{*w.factor}, code);
    }
  }
  return true;
}

template <class T>
bool walk(const Walk& w) {
  if (w.grid_rows == 1) return tall<T>(w);
  if (w.cast->scale_format != TWO_LEVEL) return bands<T>(w, w.out ? ALL : AMAX | SCALE);
  if (!bands<T>(w, AMAX)) return false;
  scales(w.amax, w.grid_rows * w.grid_cols, *w.cast, w.given, w.factor, w.scale_inv);
  if (w.out) return bands<T>(w, ENCODE);
  may_have_nan(w.amax, w.factor, w.grid_rows * w.grid_cols, *w.cast, w.scale_inv);  // NaN into the scales of such blocks
  return true;
}

__attribute__((noinline)) void turn(const float* from, int64_t rows, int64_t cols, float* to) {  // in strips as wide as a cache line
  for (int64_t left = 0; left < cols; left += 16)
    for (int64_t row = 0; row < rows; row++) {
      const float* line = from + row * cols + left;
      float* out = to + left * rows + row;
      if (left + 16 <= cols) {
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++) out[i * rows] = line[i];
      } else {
        OTTAVA_ROLLED
        for (int64_t i = 0; i < cols - left; i++) out[i * rows] = line[i];
      }
    }
}

}  // namespace

// Returns 0, or 1 if there was no memory.
extern "C" int ottava_cast(const CastJob* job) {
  const auto [x, rows, cols, stride, block_rows, block_cols, cast, given, out, scale_inv, amax, staged, turned, threads] = *job;
  const int64_t grid_rows = (rows + block_rows - 1) / block_rows, grid_cols = (cols + block_cols - 1) / block_cols;
  const int64_t share = larger<int64_t>(rows * cols / SMALLEST_SHARE, 1);
  const int64_t blocks = grid_rows * grid_cols;
  const bool apart = turned && grid_rows > 1 && grid_cols > 1;
  const Array<float> factor(apart ? 3 * blocks : blocks);
  if (!factor) return 1;
  float *const inverses = apart ? factor.get() + blocks : scale_inv, *const amaxes = apart ? inverses + blocks : amax;
  const Steps steps = blocks > 1 ? steps_of(1.0f, *cast) : Steps();
  const Walk w{x,    out,   rows,     cols,   stride,       block_rows, block_cols, grid_rows, grid_cols,
               cast, given, inverses, amaxes, factor.get(), &steps,     int(smaller<int64_t>(larger<int64_t>(threads, 1), share))};
  if (!walk<OTTAVA_TYPE>(w)) return 1;
  if (staged != nullptr) {
    const bool fired = given != nullptr && *given > 0 && !(*scale_inv == 1.0f / *given);
    staged[0] = is_finite(*amax) ? larger(staged[0], *amax) : staged[0];
    staged[1] = larger(staged[1], is_finite(*amax) ? 0.0f : 1.0f);
    staged[2] = larger(staged[2], fired ? 1.0f : 0.0f);
  }
  if (apart) turn(inverses, grid_rows, grid_cols, scale_inv), turn(amaxes, grid_rows, grid_cols, amax);
  return 0;
}

// The factors of a cast, into job->out as floats, with their inverses and the amaxes, but no codes; the job is not turned.
extern "C" int ottava_factors(const CastJob* job) {
  const int64_t grid_rows = (job->rows + job->block_rows - 1) / job->block_rows;
  const int64_t grid_cols = (job->cols + job->block_cols - 1) / job->block_cols;
  const int64_t share = larger<int64_t>(job->rows * job->cols / SMALLEST_SHARE, 1);
  Steps steps;  // none are made
  const Walk w{job->x,    nullptr,    job->rows,      job->cols, job->stride, job->block_rows, job->block_cols,
               grid_rows, grid_cols,  job->cast,      job->given, job->scale_inv, job->amax,
               reinterpret_cast<float*>(job->out), &steps, int(smaller<int64_t>(larger<int64_t>(job->threads, 1), share))};
  return walk<OTTAVA_TYPE>(w) ? 0 : 1;
}

// Current scales of n amaxes.
extern "C" void ottava_scales(const float* amax, int64_t n, const Cast* cast, float* scale, float* scale_inv) {
  current_scales(amax, n, *cast, scale, scale_inv);
}

struct Side {  // one of the two casts from one reading of x
  int64_t block_rows, block_cols;
  const Cast* cast;
  uint8_t* out;
  float *scale_inv, *amax;
};

extern "C" struct Both {  // native.quantize._BOTH: x and threads as in CastJob
  const void* x;
  int64_t rows, cols, stride;
  int64_t tile_rows, tile_cols;  // multiples of the blocks of either side, or the matrix's own
  int64_t threads;
  Side sides[2];  // of x, and of x.T: its scales and amaxes go out column by column
};

// Both casts with current scales, tile by tile. Returns 0, or 1 if there was no memory.
extern "C" int ottava_cast_both(const Both* both) {
  const auto [x, rows, cols, stride, tile_rows, tile_cols, threads, sides] = *both;
  const int team = int(smaller<int64_t>(larger<int64_t>(threads, 1), larger<int64_t>(rows * cols / SMALLEST_SHARE, 1)));
  Array<float> factor[2], column;
  Steps steps[2];
  Walk walks[2];
  for (int i = 0; i < 2; i++) {
    const Side& s = sides[i];
    const int64_t grid_rows = (rows + s.block_rows - 1) / s.block_rows, grid_cols = (cols + s.block_cols - 1) / s.block_cols;
    if (!factor[i].make(grid_rows * grid_cols) || (i && !column.make(2 * grid_rows * grid_cols))) return 1;
    float *const inverses = i ? column.get() : s.scale_inv, *const amaxes = i ? inverses + grid_rows * grid_cols : s.amax;
    steps[i] = steps_of(1.0f, *s.cast);
    walks[i] = Walk{x,         s.out,  rows,    cols,        stride, s.block_rows,    s.block_cols, grid_rows,
                    grid_cols, s.cast, nullptr, inverses, amaxes, factor[i].get(), &steps[i],    team};
  }
  if (!bands_of_both<OTTAVA_TYPE>(walks[0], walks[1], tile_rows, tile_cols)) return 1;
  const Walk& w = walks[1];
  turn(w.scale_inv, w.grid_rows, w.grid_cols, sides[1].scale_inv), turn(w.amax, w.grid_rows, w.grid_cols, sides[1].amax);
  return 0;
}
