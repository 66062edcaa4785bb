// Codes of x * factor, rounded stochastically, bit for bit those of `rounding`:
//
//   |x * factor| = (quanta + fraction) * quantum,   code = quanta + (fraction + random / 2**24 >= 1)
//
// If the format has NaN, an infinity becomes NaN. A product that overflows saturates.
// The random bits of an element are a word of Philox4x32-10, keyed by a seed and counted by the element's place.

#include "base.h"
#include "floats.h"
#include "philox.h"

#ifndef OTTAVA_TYPE  // the type of x
#define OTTAVA_TYPE BFloat16
#endif

extern "C" struct Job {  // native.stochastic._Job
  const void* x;  // (rows, cols) of OTTAVA_TYPE, contiguous
  const float* factor;  // one a block
  uint8_t* out;
  int64_t rows, cols, block_rows, block_cols;
  int64_t seed, threads;
  int32_t mantissa_bits, emin, bits, nan_code;  // nan_code -1: NaN becomes the largest number
  float max;
};

namespace {

constexpr int64_t SMALLEST_SHARE = 16384;  // elements that pay for waking another thread

struct Encoder {
  uint32_t to_fixed;  // too large for an int32_t until an exponent is subtracted
  int32_t largest, smallest, shift, sign_shift, sign_bit, nan_code, nan_sign, no_code;

  explicit Encoder(const Job& job) {
    largest = bits_of(job.max);
    smallest = (127 + job.emin) << 23;
    to_fixed = uint32_t(127 + 24 + job.mantissa_bits + 127) << 23;
    shift = 23 - job.mantissa_bits;
    sign_shift = 32 - job.bits;
    sign_bit = 1 << (job.bits - 1);
    nan_code = job.nan_code < 0 ? sign_bit - 1 : job.nan_code;
    nan_sign = job.nan_code < 0 ? 0 : sign_bit;
    no_code = job.nan_code == sign_bit ? sign_bit : -1;  // FNUZ has its NaN there, and -0 becomes 0
  }

  // Quanta with 24 bits behind the point: the product is exact, and no random number reaches the bits that are cut off.
  inline uint8_t operator()(float v, int32_t random) const {
    const int32_t b = bits_of(v), a = b & MAGNITUDE, clamped = smaller(a, largest);
    const int32_t exponent = larger(clamped & INFINITE, smallest);
    const int32_t quanta = (int32_t(float_of(clamped) * float_of(int32_t(to_fixed - uint32_t(exponent)))) + random) >> 24;
    const int32_t sign = b >> sign_shift;
    const int32_t code = (quanta + ((exponent - smallest) >> shift)) | (sign & sign_bit);
    return uint8_t(a > INFINITE ? nan_code | (sign & nan_sign) : code == no_code ? 0 : code);
  }
};

template <class T>
void cast(const Job& job, const Keys& keys, Encoder code, int64_t begin, int64_t end) {  // elements, in pieces
  const auto* x = static_cast<const typename T::Int*>(job.x);
  const int64_t grid_cols = (job.cols + job.block_cols - 1) / job.block_cols;
  const bool has_nan = job.nan_code >= 0;
  int64_t row = begin / job.cols, col = begin % job.cols;
  for (int64_t at = begin; at < end; at += PIECE) {
    const int n = int(smaller<int64_t>(PIECE, end - at));
    float v[PIECE] = {};
    for (int i = 0; i < n;) {  // the factors first
      const int64_t block = col / job.block_cols, until = smaller((block + 1) * job.block_cols, job.cols);
      const int run = int(smaller<int64_t>(until - col, n - i));
      const float factor = job.factor[row / job.block_rows * grid_cols + block];
      for (int k = 0; k < run; k++) v[i + k] = factor;
      i += run, col += run;
      if (col == job.cols) row++, col = 0;
    }
    uint32_t random[PIECE];
    random_words(keys, uint64_t(at) / 4, random);
    uint8_t codes[PIECE];
    for (int i = 0; i < n; i++) v[i] *= T::value(x[at + i]);
    for (int i = 0; has_nan && i < n; i++) v[i] = is_finite(T::value(x[at + i])) ? v[i] : float_of(QUIET_NAN);
    for (int i = 0; i < PIECE; i++) codes[i] = code(v[i], int32_t(random[i] >> 8));
    std::memcpy(job.out + at, codes, size_t(n));
  }
}

}  // namespace

extern "C" void ottava_cast_stochastic(const Job* job) {
  const int64_t pieces = (job->rows * job->cols + PIECE - 1) / PIECE;
  const int64_t team = smaller(job->threads, larger<int64_t>(pieces * PIECE / SMALLEST_SHARE, 1));
  const Keys keys{uint64_t(job->seed)};
#pragma omp parallel for schedule(static) num_threads(int(team))
  for (int64_t i = 0; i < team; i++)
    cast<OTTAVA_TYPE>(*job, keys, Encoder(*job), pieces * i / team * PIECE,
                      smaller(pieces * (i + 1) / team * PIECE, job->rows * job->cols));
}
