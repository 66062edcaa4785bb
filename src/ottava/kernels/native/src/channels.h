// How each channel, a column of x, survives the cast: a huge one sets the scale of all others, and carries the energy
// by which everything else judges a cast. Sums are fp64, in the order of the rows, so that threads change no bit.

#pragma once

#include "numbers.h"

namespace {

constexpr double DEAD = 0x1p-80;  // of the energy of the largest channel, as in measure/walk.py
constexpr int64_t CHANNELS = 64;  // of a thread at a time

// Returns false if there is no memory.
template <class T>
bool measure_channels(const Job& job, const int64_t* places, int team) {
  using Int = typename T::Int;
  const Array<double> signal(job.cols), noise(job.cols);
  if (!signal || !noise) return false;
  const Decoder decode(job.mantissa_bits, job.bias, job.bits, job.special_code);
  float numbers[256];
  for (int code = 0; code < 256; code++) numbers[code] = float_of(decode(code));
#pragma omp parallel for schedule(static) num_threads(team) if (team > 1)
  for (int64_t left = 0; left < job.cols; left += CHANNELS) {
    const int64_t n = smaller(CHANNELS, job.cols - left);
    alignas(64) double energy[CHANNELS] = {}, error[CHANNELS] = {};
    alignas(64) float scale[CHANNELS];
    int64_t block_row = -1;
    for (int64_t row = 0; row < job.rows; row++) {
      if (row / job.block_rows != block_row) {
        block_row = row / job.block_rows;
        for (int64_t i = 0; i < n; i++)
          scale[i] = job.scale_inv[block_row * job.grid_cols + (job.grid_cols == 1 ? 0 : (left + i) / job.block_cols)];
      }
      const Int* x = static_cast<const Int*>(job.x) + row * job.x_row + left * job.x_col;
      const uint8_t* codes = job.codes + row * job.code_row + left * job.code_col;
      for (int64_t i = 0; i < n; i++) {
        const Int bits = x[i * job.x_col];
        const bool finite = (bits & T::mask) < T::infinity;
        const float value = finite ? T::value(bits) : 0.0f;
        const float lost = finite ? value - numbers[codes[i * job.code_col]] * scale[i] : 0.0f;
        energy[i] += double(value) * double(value);
        error[i] += double(lost) * double(lost);
      }
    }
    for (int64_t i = 0; i < n; i++) signal[left + i] = energy[i], noise[left + i] = error[i];
  }
  double most = 0, all = 0;
  for (int64_t i = 0; i < job.cols; i++) most = larger(most, signal[i]), all += signal[i];
  for (int64_t i = 0; i < job.cols; i++) {
    if (signal[i] > DEAD * most) job.sums[places[sum::channel_sqnr] + DECIBELS.bin(noise[i] / signal[i])]++;
    else job.sums[places[sum::n_dead]]++;
  }
  // in steps of a millionth: sums in another order have other last bits
  job.extremes[extreme::top_channel] = all > 0 ? __builtin_floor(most / all * 0x1p20 + 0.5) * 0x1p-20 : 0.0;
  return true;
}

}  // namespace
