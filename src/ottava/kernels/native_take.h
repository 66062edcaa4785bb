// Samples of rows for native_measure.cpp: copies of them, and what is told of the blocks that they are from.

#pragma once

#include "native_numbers.h"

namespace {

constexpr int64_t BAND = 128;  // rows

struct Byte {  // what is only copied
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

// One item in sizeof(Wide) / sizeof(Item), the one that lies `at` in its group: out of numbers as wide as a group.
template <class Wide, class Item>
void narrow(const Item* from, int64_t at, int64_t n, Item* __restrict to) {
  if constexpr (sizeof(Wide) > sizeof(Item)) {
    typedef Wide Group __attribute__((aligned(1), may_alias));
    const Group* groups = reinterpret_cast<const Group*>(from);
    const int bits = int(at * int64_t(sizeof(Item)) * 8);
    for (int64_t i = 0; i < n; i++) to[i] = Item(groups[i] >> bits);
  }
}

// Columns `stride` apart, of whose `height` items one in `step` is taken, from item `at` on -> rows.
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

// Rows of a matrix of `height` rows, those of n bands (first, the one after the last, step), one below the other; where
// `squares` is given also the largest finite magnitudes of the blocks of 128x128 that each band is in.
template <class T>
void take(const void* from, int64_t row_step, int64_t col_step, int64_t height, int64_t cols, const int64_t* bands,
          int64_t n, void* to, float* squares, int threads) {
  using Int = typename T::Int;
  // of columns few at a time for all bands: each lies in a page of memory of its own
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
