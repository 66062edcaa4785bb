// The extent of a tensor from one reading, and copies of some of its rows. Every measurement of a cast starts here.

#include "base.h"
#include "extent.h"
#include "floats.h"
#include "simd.h"

#ifndef OTTAVA_TYPE  // the type of x: each has its own library
#define OTTAVA_TYPE BFloat16
#define OTTAVA_TAKES_CODES
#endif

namespace {

// The extent of a matrix whose rows of `cols` elements lie `stride` apart.
template <class T>
void survey(const void* x, int64_t rows, int64_t cols, int64_t stride, double* extent, int threads) {
  using Int = typename T::Int;
  constexpr int64_t SPAN = 1 << 14;
  if (stride == cols) cols *= rows, rows = 1;
  const int64_t spans = (cols + SPAN - 1) / SPAN;
  Int largest = 0, finite = 0;
  int64_t lost = 0;
#pragma omp parallel for reduction(max : largest, finite) reduction(+ : lost) num_threads(threads) if (threads > 1)
  for (int64_t unit = 0; unit < rows * spans; unit++) {
    const int64_t left = unit % spans * SPAN, n = smaller(SPAN, cols - left);
    const Int* from = static_cast<const Int*>(x) + unit / spans * stride + left;
    Int most = 0;
    for (int64_t i = 0; i < n; i++) most = larger(most, Int(from[i] & T::mask));
    largest = larger(largest, most);
    if (most < T::infinity) {
      finite = larger(finite, most);
      continue;
    }
    for (int64_t i = 0; i < n; i++) {
      const Int magnitude = from[i] & T::mask;
      if (magnitude < T::infinity) finite = larger(finite, magnitude);
      else lost++;
    }
  }
  extent[LARGEST] = double(T::value(largest));
  extent[LARGEST_FINITE] = double(T::value(finite));
  extent[NOT_FINITE] = double(lost);
}

// To the nearest number with so many mantissa bits, ties to even; infinity beyond the largest.
double rounded(float x, int mantissa_bits, int emin, float largest) {
  const int32_t exponent = larger((bits_of(x) >> 23) - 127, emin);
  const double magic = __builtin_ldexp(1.0, exponent + 52 - mantissa_bits), result = (double(x) + magic) - magic;
  return result <= double(largest) ? result : __builtin_inf();
}

struct Byte {  // a code: it is only copied
  using Int = uint8_t;
};

// The largest finite magnitude of each 128 of `cols` columns, at most WIDTH, of a band.
constexpr int64_t WIDTH = 1024;
template <class T>
void squares_of(const typename T::Int* x, int64_t row_step, int64_t col_step, int64_t rows, int64_t cols, float* out) {
  using Int = typename T::Int;
  const bool in_rows = col_step == 1;
  const int64_t width = in_rows ? cols : rows, lines = in_rows ? rows : smaller(CHUNK, cols);
  for (int64_t left = 0; left < cols; left += in_rows ? cols : CHUNK) {
    Int most[WIDTH];
    fill(most, width, Int(0));
    for (int64_t i = 0; i < smaller(lines, in_rows ? rows : cols - left); i++) {
      const Int* __restrict line = x + (in_rows ? i * row_step : (left + i) * col_step);
      Int* __restrict largest = most;
      for (int64_t k = 0; k < width; k++) {
        const Int magnitude = line[k] & T::mask, finite = magnitude >= T::infinity ? Int(0) : magnitude;
        largest[k] = larger(largest[k], finite);
      }
    }
    for (int64_t first = 0; first < width; first += CHUNK) {
      Int all = 0;
      for (int64_t k = first; k < smaller(first + CHUNK, width); k++) all = larger(all, most[k]);
      *out++ = T::value(all);
    }
  }
}

// Takes item number `at` of each group of sizeof(Wide) / sizeof(Item) items; it reads a group as one wide number.
template <class Wide, class Item>
void narrow(const Item* from, int64_t at, int64_t n, Item* __restrict to) {
  if constexpr (sizeof(Wide) > sizeof(Item)) {
    typedef Wide Group __attribute__((aligned(1), may_alias));
    const Group* groups = reinterpret_cast<const Group*>(from);
    const int bits = int(at * int64_t(sizeof(Item)) * 8);
    for (int64_t i = 0; i < n; i++) to[i] = Item(groups[i] >> bits);
  }
}

// Turns columns into rows: `stride` items from column to column, every `step`-th of `height` items from item `at` on.
template <class Item>
void transpose_some(const Item* from, int64_t stride, int64_t height, int64_t at, int64_t step, int64_t rows, int64_t cols,
                    Item* to, int64_t to_stride) {
  if (step == 1) return (void)transpose(from + at, stride, rows, cols, to, to_stride);
  constexpr int64_t GROUP = 64, SIZE = sizeof(Item);
  Item close[GROUP * BAND];
  const int64_t wide = step * SIZE, whole = wide == 2 || wide == 4 || wide == 8 ? smaller(height / step, rows) : 0;
  for (int64_t left = 0; left < cols; left += GROUP) {
    const int64_t n = smaller(GROUP, cols - left);
    for (int64_t col = 0; col < n; col++) {
      const Item* items = from + (left + col) * stride;
      Item* out = close + col * rows;
      if (wide == 2) narrow<uint16_t>(items, at, whole, out);
      if (wide == 4) narrow<uint32_t>(items, at, whole, out);
      if (wide == 8) narrow<uint64_t>(items, at, whole, out);
      for (int64_t row = whole; row < rows; row++) out[row] = items[at + row * step];
    }
    transpose(close, rows, rows, n, to + left, to_stride);
  }
}

// Copies the rows of n bands (first, end, step) of a matrix of `height` rows, one below the other; with `squares` also
// the largest finite magnitudes of the 128x128 blocks around each band.
template <class T>
void take(const void* from, int64_t row_step, int64_t col_step, int64_t height, int64_t cols, const int64_t* bands,
          int64_t n, void* to, float* squares, int threads) {
  using Int = typename T::Int;
  // takes few columns at a time, for all bands: each column lies in another page of memory
  const int64_t width = col_step == 1 ? WIDTH : CHUNK, strips = (cols + width - 1) / width;
  const int64_t chunks = (cols + CHUNK - 1) / CHUNK;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (int64_t strip = 0; strip < strips; strip++) {
    const int64_t left = strip * width, here = smaller(width, cols - left);
    Int* out = static_cast<Int*>(to) + left;
    for (int64_t i = 0; i < n; i++) {
      const int64_t first = bands[3 * i], step = bands[3 * i + 2], rows = (bands[3 * i + 1] - first + step - 1) / step;
      const int64_t top = first / BAND * BAND, bottom = smaller(top + BAND, height), from_row = first - first % step;
      const Int* x = static_cast<const Int*>(from) + left * col_step;
      if constexpr (sizeof(Int) > 1)
        if (squares != nullptr)
          squares_of<T>(x + top * row_step, row_step, col_step, bottom - top, here,
                        squares + i * chunks + left / CHUNK);
      if (col_step != 1)
        transpose_some(x + from_row * row_step, col_step, bottom - from_row, first % step, step, rows, here, out, cols);
      else
        for (int64_t row = 0; row < rows; row++)
          std::memcpy(out + row * cols, x + (first + row * step) * row_step, size_t(here) * sizeof(Int));
      out += rows * cols;
    }
  }
}

}  // namespace

// x: (rows, cols). Fills extent with amaxes rounded to bf16 (as == 1), fp16 (2) or not at all (0). Rounding is monotonic, so
// they are the amaxes of x in that dtype, unless an element rounds to infinity. Returns whether all are finite.
extern "C" int ottava_survey(const void* x, int as, int64_t rows, int64_t cols, int64_t stride, double* extent,
                             int threads) {
  const int team = int(between<int64_t>(rows * cols / 65536, 1, larger(threads, 1)));
  survey<OTTAVA_TYPE>(x, rows, cols, stride, extent, team);
  extent[ELEMENTS] = double(rows * cols);
  double& largest = extent[LARGEST];
  if (as == 1) largest = extent[LARGEST_FINITE] = rounded(float(largest), 7, -126, 3.3895314e38f);
  if (as == 2) largest = extent[LARGEST_FINITE] = rounded(float(largest), 10, -14, 65504.0f);
  return largest <= __FLT_MAX__;
}

// Copies rows of x or, in one of the libraries, of codes (1 byte each), see `take`.
extern "C" void ottava_take(const void* from, int bytes, int64_t row_step, int64_t col_step, int64_t rows, int64_t cols,
                            const int64_t* bands, int64_t n, void* to, float* squares, int threads) {
#ifdef OTTAVA_TAKES_CODES
  if (bytes == 1) return take<Byte>(from, row_step, col_step, rows, cols, bands, n, to, nullptr, threads);
#endif
  if (bytes == sizeof(OTTAVA_TYPE::Int)) take<OTTAVA_TYPE>(from, row_step, col_step, rows, cols, bands, n, to, squares, threads);
}
