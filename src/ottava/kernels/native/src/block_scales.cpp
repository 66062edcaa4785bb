// NVFP4's casts by rules for block scales, to nearest, bit for bit those of numerics/block_scales.py and `reference`:
//
//   FOUR_OVER_SIX  a block's amax goes to 6 or to 4, whichever gives the smaller squared error
//   TE_MAE, TE_MSE the same by TransformerEngine's sums of errors in fp32
//   MS_EDEN        each group of blocks is corrected by <z, z> / <z, q>, its scales are rounded to E4M3 stochastically
//
// Sums of squares are fp64, folded in halves (`folded`), as in the reference.

#include "base.h"
#include "floats.h"
#include "philox.h"

#ifndef OTTAVA_TYPE  // the type of x
#define OTTAVA_TYPE BFloat16
#endif

extern "C" struct Job {  // native.block_scales._JOB
  const void* x;  // (rows, cols) of OTTAVA_TYPE, contiguous
  uint8_t* out;
  float *scale_inv, *amax;  // one a block
  int64_t rows, cols, block_rows, block_cols;
  int64_t group;  // columns of a rotation; a multiple of block_cols under MS_EDEN
  int64_t seed, threads, rule;
  float tensor_top, tops[2];  // a candidate brings a block's amax to one of `tops`
};

namespace {

enum Rule { FOUR_OVER_SIX, MS_EDEN, TE_MAE, TE_MSE };
constexpr int64_t SMALLEST_SHARE = 16384;  // elements that pay for waking another thread
constexpr float MOST = 3.40282347e38f;

struct Grid {
  int64_t rows, cols;
  explicit Grid(const Job& job)
      : rows((job.rows + job.block_rows - 1) / job.block_rows), cols((job.cols + job.block_cols - 1) / job.block_cols) {}
};

// v rounded to E2M1 (magnitudes 0, 0.5, 1, 1.5, 2, 3, 4, 6), and its code; NaN becomes 6.
inline float e2m1(float v, int32_t& code) {
  const int32_t b = bits_of(v), a = b & MAGNITUDE, clamped = smaller(a, 0x40c00000);  // 6.0
  const int32_t exponent = larger(clamped & INFINITE, 127 << 23), sign = a > INFINITE ? 0 : b & ~MAGNITUDE;
  const float magic = float_of(exponent + (22 << 23));  // its ulp is the quantum
  const float sum = float_of(clamped) + magic;
  code = ((bits_of(sum) & 7) + ((exponent - (127 << 23)) >> 22)) | int32_t(uint32_t(sign) >> 28);
  return float_of(bits_of(sum - magic) | sign);
}

inline float e4m3(float v) {  // of a number that is not negative
  const float clamped = smaller(v, 448.0f), magic = float_of(larger(bits_of(clamped) & INFINITE, 121 << 23) + (20 << 23));
  return (clamped + magic) - magic;
}

inline double e4m3_at_random(float v, int32_t random) {  // of a number that is not negative, or NaN
  const int32_t exponent = between((bits_of(v) >> 23) - 127, -6, 8);
  const double quantum = double(float_of((exponent - 3 + 127) << 23)), steps = double(v) / quantum + random * 0x1p-24;
  return is_nan(v) ? double(v) : smaller(__builtin_floor(steps) * quantum, 448.0);
}

// The scale that decodes a block of zeros; NaN where the block has an infinity or a NaN.
inline float unusable(float amax) { return is_finite(amax) ? 1.0f : float_of(QUIET_NAN); }

inline bool usable(float amax) { return bits_of(amax) > 0 && bits_of(amax) < INFINITE; }

inline double folded_16(double* x) {  // as `folded`, without loops of unknown length
  for (int i = 0; i < 8; i++) x[i] += x[8 + i];
  for (int i = 0; i < 4; i++) x[i] += x[4 + i];
  return (x[0] + x[2]) + (x[1] + x[3]);
}

// The sum of n numbers: the last half is added to the first, until one is left. It overwrites them.
inline double folded(double* x, int64_t n) {
  while (n > 1) {
    if (n == 16) return folded_16(x);
    const int64_t half = n / 2, rest = n - half;
    for (int64_t i = 0; i < half; i++) x[i] += x[rest + i];
    n = rest;
  }
  return x[0];
}

struct Scales {
  float block, scale, scale_inv;
};

struct Level {  // the inverse of the tensor's scale, and what brings an amax to each candidate's top
  float encode, decode, factors[2], top, largest;

  Level(float encode, float largest, const Job& job)
      : encode(encode), decode(1.0f / encode), factors{encode / job.tops[0], encode / job.tops[1]}, top(job.tensor_top), largest(largest) {}

  template <int RULE>
  inline float block(float amax, int candidate) const {  // of a usable block
    if constexpr (RULE >= TE_MAE) return e4m3(amax / 6.0f * encode * (candidate ? 1.5f : 1.0f));
    return e4m3(amax * factors[candidate]);
  }
  inline Scales with(float block) const {
    const float scale_inv = block * decode, scale = 1.0f / scale_inv;
    return {block, smaller(scale, MOST), scale_inv};
  }
};

template <int N>
struct Width {
  constexpr operator int() const { return N; }
};

// A loop of 16 steps is a few instructions if the compiler knows that it has 16.
template <class Step>
inline void in_pieces(int64_t n, Step step) {
  int64_t k = 0;
  for (; k + 16 <= n; k += 16) step(k, Width<16>());
  for (; k < n; k++) step(k, Width<1>());
}

template <class T>
inline typename T::Int largest_of(const typename T::Int* x, int64_t n) {
  typename T::Int most = 0;
  in_pieces(n, [&](int64_t k, auto width) {
    for (int i = 0; i < width; i++) most = larger<typename T::Int>(most, x[k + i] & T::mask);
  });
  return most;
}

template <class T>
void amaxes(const Job& job, int64_t row) {  // of a row of blocks
  const Grid grid(job);
  const int64_t end = smaller((row + 1) * job.block_rows, job.rows);
  for (int64_t j = 0; j < grid.cols; j++) {
    const int64_t begin = j * job.block_cols, width = smaller(job.block_cols, job.cols - begin);
    typename T::Int most = 0;
    for (int64_t i = row * job.block_rows; i < end; i++)
      most = larger(most, largest_of<T>(static_cast<const typename T::Int*>(job.x) + i * job.cols + begin, width));
    job.amax[row * grid.cols + j] = T::value(most);
  }
}

// Codes of a row of a block, and what its errors count.
template <class T, int RULE>
inline void with_errors(const typename T::Int* x, int64_t n, Scales s, const Level& level, uint8_t* __restrict out,
                        double* __restrict errors) {
  const float top = level.top, largest = level.largest;
  in_pieces(n, [=](int64_t k, auto width) {
    for (int i = 0; i < width; i++) {
      int32_t code;
      const float number = T::value(x[k + i]), q = e2m1(number * s.scale, code);
      const float value = RULE >= TE_MAE ? q * s.block * largest / top : q * s.scale_inv, error = value - number;
      out[k + i] = uint8_t(code);
      if (RULE == TE_MAE) errors[k + i] = double(float_of(bits_of(error) & MAGNITUDE));
      else errors[k + i] = RULE == TE_MSE ? double(error * error) : double(error) * double(error);
    }
  });
}

// Their sum over a block; it overwrites them. TransformerEngine adds a row from left to right, then rows in halves, in fp32.
template <int RULE>
inline double sum_of(double* errors, int64_t rows, int64_t cols) {
  if constexpr (RULE < TE_MAE) return folded(errors, rows * cols);
  for (int64_t i = 0; i < rows; i++) {
    float line = 0;
    for (int64_t k = 0; k < cols; k++) line += float(errors[i * cols + k]);
    errors[i] = double(line);
  }
  for (int64_t n = rows; n > 1; n -= n / 2)
    for (int64_t i = 0, half = n / 2; i < half; i++) errors[i] = double(float(errors[i]) + float(errors[n - half + i]));
  return errors[0];
}

// Codes of a row of a block, z * z and z * q.
template <class T>
inline void with_lengths(const typename T::Int* x, int64_t n, float scale, uint8_t* __restrict out, double* __restrict squares,
                         double* __restrict products) {
  in_pieces(n, [=](int64_t k, auto width) {
    for (int i = 0; i < width; i++) {
      int32_t code;
      const float z = T::value(x[k + i]) * scale, q = e2m1(z, code);
      out[k + i] = uint8_t(code);
      squares[k + i] = double(z) * double(z);
      products[k + i] = double(z) * double(q);
    }
  });
}

// Blocks of 1x16 by themselves: nearly all there are, and twice as fast with sizes that the compiler knows.
template <class T, int RULE>
inline float better_16(const typename T::Int* x, float amax, const Level& level, uint8_t* out) {
  double errors[2], squares[16];
  uint8_t codes[2][16];
  Scales s[2];
  for (int candidate = 0; candidate < 2; candidate++) {
    s[candidate] = usable(amax) ? level.with(level.block<RULE>(amax, candidate)) : Scales{1, 1, unusable(amax)};
    with_errors<T, RULE>(x, 16, s[candidate], level, codes[candidate], squares);
    errors[candidate] = RULE >= TE_MAE ? sum_of<RULE>(squares, 1, 16) : folded_16(squares);
  }
  const int best = errors[1] < errors[0];
  std::memcpy(out, codes[best], 16);
  return s[best].scale_inv;
}

template <class T, int RULE>
void four_over_six(const Job& job, const Level& level, int64_t row, double* squares, uint8_t* codes) {
  const Grid grid(job);
  const int64_t first = row * job.block_rows, height = smaller(job.block_rows, job.rows - first);
  for (int64_t j = 0; j < grid.cols; j++) {
    const int64_t begin = j * job.block_cols, width = smaller(job.block_cols, job.cols - begin), n = job.block_rows * job.block_cols;
    const float amax = job.amax[row * grid.cols + j];
    if (job.block_rows == 1 && width == 16 && job.block_cols == 16) {
      const auto* x = static_cast<const typename T::Int*>(job.x) + first * job.cols + begin;
      job.scale_inv[row * grid.cols + j] = better_16<T, RULE>(x, amax, level, job.out + first * job.cols + begin);
      continue;
    }
    double least = 0;
    for (int candidate = 0; candidate < 2; candidate++) {
      const Scales s = usable(amax) ? level.with(level.block<RULE>(amax, candidate)) : Scales{1, 1, unusable(amax)};
      if (height < job.block_rows || width < job.block_cols) fill(squares, n, 0.0);
      for (int64_t i = 0; i < height; i++)
        with_errors<T, RULE>(static_cast<const typename T::Int*>(job.x) + (first + i) * job.cols + begin, width, s, level,
                    codes + i * job.block_cols, squares + i * job.block_cols);
      const double error = sum_of<RULE>(squares, job.block_rows, job.block_cols);
      if (candidate > 0 && !(error < least)) break;  // also where one is NaN
      least = error;
      for (int64_t i = 0; i < height; i++)
        std::memcpy(job.out + (first + i) * job.cols + begin, codes + i * job.block_cols, size_t(width));
      job.scale_inv[row * grid.cols + j] = s.scale_inv;
    }
  }
}

// Codes, and in place of the scales what will be rounded at random.
template <class T>
void ms_eden(const Job& job, Level level, int64_t row, double* squares, double* products) {
  const Grid grid(job);
  const auto* x = static_cast<const typename T::Int*>(job.x) + row * job.cols;
  uint8_t* out = job.out + row * job.cols;
  float* wanted = job.scale_inv + row * grid.cols;
  for (int64_t begin = 0; begin < job.cols; begin += job.group) {
    const int64_t end = smaller(begin + job.group, job.cols);
    if (end < begin + job.group) fill(squares, job.group, 0.0), fill(products, job.group, 0.0);
    for (int64_t from = begin; from < end; from += job.block_cols) {
      const int64_t j = from / job.block_cols, until = smaller(from + job.block_cols, end);
      const float amax = job.amax[row * grid.cols + j], block = usable(amax) ? level.block<MS_EDEN>(amax, 0) : 1.0f;
      const Scales s = usable(amax) ? level.with(block > 0 ? block : 1.0f) : Scales{1, 1, 1};
      wanted[j] = s.block;
      with_lengths<T>(x + from, until - from, s.scale, out + from, squares + (from - begin), products + (from - begin));
    }
    const double length = folded(squares, job.group), overlap = folded(products, job.group);
    const float correction = overlap > 0 ? float(length / overlap) : 1.0f;
    for (int64_t j = begin / job.block_cols; j * job.block_cols < end; j++) wanted[j] *= correction;
  }
}

void round_at_random(const Job& job, Level level, const Keys& keys, int64_t begin, int64_t end) {  // blocks, in pieces
  for (int64_t at = begin; at < end; at += PIECE) {
    uint32_t random[PIECE];
    random_words(keys, uint64_t(at) / 4, random);
    for (int64_t i = at; i < smaller(at + PIECE, end); i++) {
      const float stored = float(e4m3_at_random(job.scale_inv[i], int32_t(random[i - at] >> 8)));
      job.scale_inv[i] = usable(job.amax[i]) ? stored * level.decode : unusable(job.amax[i]);
    }
  }
}

int64_t team_of(const Job& job, int64_t parts) {
  return between(job.rows * job.cols / SMALLEST_SHARE, int64_t(1), smaller(job.threads, larger<int64_t>(parts, 1)));
}

template <class T>
bool cast(const Job& job) {
  const Grid grid(job);
  const int64_t blocks = grid.rows * grid.cols, team = team_of(job, grid.rows);
  const int64_t room = job.rule == MS_EDEN ? job.group : job.block_rows * job.block_cols;
  Array<double> sums(2 * room * team);
  Array<uint8_t> codes(room * team);
  if (!sums || !codes) return false;
#pragma omp parallel for schedule(static) num_threads(int(team))
  for (int64_t row = 0; row < grid.rows; row++) amaxes<T>(job, row);
  float largest = 0;
  for (int64_t i = 0; i < blocks; i++) largest = usable(job.amax[i]) ? larger(largest, job.amax[i]) : largest;
  const float encode = largest > 0 ? smaller(job.tensor_top / largest, MOST) : 1.0f;
  const Level level(encode, largest, job);
#pragma omp parallel for schedule(static) num_threads(int(team))
  for (int64_t i = 0; i < team; i++)
    for (int64_t row = grid.rows * i / team; row < grid.rows * (i + 1) / team; row++) {
      double* own = sums.get() + 2 * room * i;
      if (job.rule == MS_EDEN) ms_eden<T>(job, level, row, own, own + room);
      else if (job.rule == TE_MAE) four_over_six<T, TE_MAE>(job, level, row, own, codes.get() + room * i);
      else if (job.rule == TE_MSE) four_over_six<T, TE_MSE>(job, level, row, own, codes.get() + room * i);
      else four_over_six<T, FOUR_OVER_SIX>(job, level, row, own, codes.get() + room * i);
    }
  const Keys keys{uint64_t(job.seed)};
  if (job.rule == MS_EDEN) round_at_random(job, level, keys, 0, blocks);
  return true;
}

}  // namespace

extern "C" int ottava_cast_by_rule(const Job* job) { return cast<OTTAVA_TYPE>(*job) ? 0 : 1; }
