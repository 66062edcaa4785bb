// Each group of `size` columns times diag(signs) H / sqrt(size), bit for bit as transforms.Hadamard: sums in fp64, by
// butterflies whose distance doubles, one product with 1 / sqrt(size), one rounding to fp32, and one more to bf16.

#include "base.h"
#include "floats.h"
#include "philox.h"

#ifndef OTTAVA_TYPE  // the type of x
#define OTTAVA_TYPE BFloat16
#endif

extern "C" struct Job {  // native.rotate._JOB
  const void* x;        // (rows, cols) of OTTAVA_TYPE
  double* signs;        // of `size` columns, padded to whole PIECEs
  void* out;            // (rows, cols padded to whole groups), contiguous
  int64_t rows, cols, row_stride, col_stride, size;  // strides in elements
  int64_t to_bf16, threads;
  int64_t drawn, seed;  // whether the signs are to be drawn from `seed`
  double factor;
};

namespace {

constexpr int LANES = 8;  // rows that are turned together
constexpr int64_t SMALLEST_SHARE = 16384;

template <class T>
void load(const Job& job, int64_t row, int64_t begin, double* __restrict to) {  // (size, LANES)
  const auto* x = static_cast<const typename T::Int*>(job.x) + row * job.row_stride + begin * job.col_stride;
  const int64_t lanes = smaller<int64_t>(LANES, job.rows - row), n = smaller(job.size, job.cols - begin);
  if (lanes < LANES || n < job.size) fill(to, job.size * LANES, 0.0);
  if (job.row_stride == 1 && lanes == LANES) {
    for (int64_t k = 0; k < n; k++)
      for (int w = 0; w < LANES; w++) to[k * LANES + w] = double(T::value(x[k * job.col_stride + w])) * job.signs[k];
    return;
  }
  for (int64_t k = 0; k < n; k++)
    for (int64_t w = 0; w < lanes; w++)
      to[k * LANES + w] = double(T::value(x[w * job.row_stride + k * job.col_stride])) * job.signs[k];
}

inline void turn(double* __restrict x, int64_t size) {
  for (int64_t apart = 1; apart < size; apart *= 2)
    for (int64_t from = 0; from < size; from += 2 * apart)
      for (int64_t i = from * LANES; i < (from + apart) * LANES; i += LANES)
        for (int w = 0; w < LANES; w++) {
          const double a = x[i + w], b = x[i + apart * LANES + w];
          x[i + w] = a + b;
          x[i + apart * LANES + w] = a - b;
        }
}

void store(const Job& job, int64_t row, int64_t begin, int64_t width, const double* __restrict x) {
  const int64_t lanes = smaller<int64_t>(LANES, job.rows - row);
  for (int64_t w = 0; w < lanes; w++) {
    const int64_t to = (row + w) * width + begin;
    auto* narrow = static_cast<uint16_t*>(job.out) + to;
    auto* wide = static_cast<float*>(job.out) + to;
    for (int64_t k = 0; k < job.size; k++) {
      const float y = float(x[k * LANES + w] * job.factor + 0.0);  // -0 becomes 0
      if (job.to_bf16) narrow[k] = to_bf16(y);
      else wide[k] = y;
    }
  }
}

void draw(const Job& job, const Keys& keys) {  // the lowest bit of each word
  for (int64_t at = 0; at < job.size; at += PIECE) {
    uint32_t words[PIECE];
    random_words(keys, uint64_t(at) / 4, words);
    for (int64_t k = 0; k < PIECE; k++) job.signs[at + k] = words[k] & 1 ? -1.0 : 1.0;
  }
}

}  // namespace

extern "C" int ottava_rotate(const Job* job) {
  const int64_t groups = (job->cols + job->size - 1) / job->size, bands = (job->rows + LANES - 1) / LANES;
  const int64_t team = between(job->rows * job->cols / SMALLEST_SHARE, int64_t(1), smaller(job->threads, larger<int64_t>(bands, 1)));
  Array<double> room(team * job->size * LANES);
  if (!room) return 1;
  if (job->drawn) draw(*job, Keys(uint64_t(job->seed)));
#pragma omp parallel for schedule(static) num_threads(int(team))
  for (int64_t i = 0; i < team; i++) {
    double* own = room.get() + i * job->size * LANES;
    for (int64_t band = bands * i / team; band < bands * (i + 1) / team; band++)
      for (int64_t group = 0; group < groups; group++) {
        load<OTTAVA_TYPE>(*job, band * LANES, group * job->size, own);
        turn(own, job->size);
        store(*job, band * LANES, group * job->size, groups * job->size, own);
      }
  }
  return 0;
}
