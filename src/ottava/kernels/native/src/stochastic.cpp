// Codes of x * factor, rounded stochastically, bit for bit those of `rounding`:
//
//   |x * factor| = (quanta + fraction) * quantum,   code = quanta + (fraction + random / 2**24 >= 1)
//
// The random bits of an element are a word of Philox4x32-10, keyed by a seed and counted by the element's place.

#include "base.h"
#include "floats.h"

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

constexpr int PIECE = 64;  // elements of one round; a multiple of four, because four elements share a counter
constexpr int64_t SMALLEST_SHARE = 16384;  // elements that pay for waking another thread

struct Keys {
  uint32_t first[10], second[10];

  explicit Keys(uint64_t seed) {
    for (int i = 0; i < 10; i++) {
      first[i] = uint32_t(seed) + uint32_t(i) * 0x9E3779B9u;
      second[i] = uint32_t(seed >> 32) + uint32_t(i) * 0xBB67AE85u;
    }
  }
};

inline void random_bits(const Keys& keys, uint64_t number, int32_t* __restrict out) {  // 24 of them each
  uint32_t a[PIECE / 4], b[PIECE / 4], c[PIECE / 4], d[PIECE / 4];
  for (int i = 0; i < PIECE / 4; i++) {
    a[i] = uint32_t(number) + uint32_t(i);  // pieces begin at multiples of 16: no carry
    b[i] = uint32_t(number >> 32);
    c[i] = d[i] = 0;
  }
  for (int round = 0; round < 10; round++) {
    const uint32_t first = keys.first[round], second = keys.second[round];
    uint32_t low[PIECE / 4], low_top[PIECE / 4], high[PIECE / 4], high_top[PIECE / 4];
    for (int i = 0; i < PIECE / 4; i++) {
      low[i] = a[i] * 0xD2511F53u;
      low_top[i] = uint32_t(uint64_t(a[i]) * 0xD2511F53u >> 32);
      high[i] = c[i] * 0xCD9E8D57u;
      high_top[i] = uint32_t(uint64_t(c[i]) * 0xCD9E8D57u >> 32);
    }
    for (int i = 0; i < PIECE / 4; i++) {
      a[i] = high_top[i] ^ b[i] ^ first;
      c[i] = low_top[i] ^ d[i] ^ second;
      b[i] = high[i];
      d[i] = low[i];
    }
  }
  for (int i = 0; i < PIECE / 4; i++) {
    out[4 * i] = int32_t(a[i] >> 8);
    out[4 * i + 1] = int32_t(b[i] >> 8);
    out[4 * i + 2] = int32_t(c[i] >> 8);
    out[4 * i + 3] = int32_t(d[i] >> 8);
  }
}

struct Encoder {
  uint32_t to_fixed;  // too large for an int32_t until an exponent is subtracted
  int32_t largest, smallest, shift, sign_shift, sign_bit, nan_code, nan_sign;

  explicit Encoder(const Job& job) {
    largest = bits_of(job.max);
    smallest = (127 + job.emin) << 23;
    to_fixed = uint32_t(127 + 24 + job.mantissa_bits + 127) << 23;
    shift = 23 - job.mantissa_bits;
    sign_shift = 32 - job.bits;
    sign_bit = 1 << (job.bits - 1);
    nan_code = job.nan_code < 0 ? sign_bit - 1 : job.nan_code;
    nan_sign = job.nan_code < 0 ? 0 : sign_bit;
  }

  // Quanta with 24 bits behind the point: the product is exact, and no random number reaches the bits that are cut off.
  inline uint8_t operator()(float v, int32_t random) const {
    const int32_t b = bits_of(v), a = b & MAGNITUDE, clamped = smaller(a, largest);
    const int32_t exponent = larger(clamped & INFINITE, smallest);
    const int32_t quanta = (int32_t(float_of(clamped) * float_of(int32_t(to_fixed - uint32_t(exponent)))) + random) >> 24;
    const int32_t sign = b >> sign_shift;
    const int32_t code = (quanta + ((exponent - smallest) >> shift)) | (sign & sign_bit);
    return uint8_t(a > INFINITE ? nan_code | (sign & nan_sign) : code);
  }
};

template <class T>
void cast(const Job& job, const Keys& keys, Encoder code, int64_t begin, int64_t end) {  // elements, in pieces
  const auto* x = static_cast<const typename T::Int*>(job.x);
  const int64_t grid_cols = (job.cols + job.block_cols - 1) / job.block_cols;
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
    int32_t random[PIECE];
    random_bits(keys, uint64_t(at) / 4, random);
    uint8_t codes[PIECE];
    for (int i = 0; i < n; i++) v[i] *= T::value(x[at + i]);
    for (int i = 0; i < PIECE; i++) codes[i] = code(v[i], random[i]);
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
