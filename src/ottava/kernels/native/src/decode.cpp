// Codes of at most 8 bits times the scales of their blocks, bit for bit as `QuantizedTensor.dequantize` has it:
//
//   y = round_once(decode(code) * scale_inv)      the product in fp32; fp32 or bf16 comes out

#include "base.h"
#include "floats.h"

namespace {

constexpr int64_t SPAN = 8192;             // elements of a flat tensor that a thread takes at once
constexpr int64_t SMALLEST_SHARE = 16384;  // elements that pay for waking another thread

inline float finished(float v, float*) { return v; }
inline uint16_t finished(float v, uint16_t*) {
  const uint32_t u = uint32_t(bits_of(v)), rounded = (u + 0x7FFF + (u >> 16 & 1)) >> 16;
  return uint16_t(is_nan(v) ? u >> 16 | 0x40 : rounded);
}

template <int N, bool EACH, class Out>  // EACH: a factor for each column
inline void piece(const uint8_t* __restrict codes, Out* __restrict out, const float* __restrict factor, Decoder decode) {
  const float one = *factor;
  for (int i = 0; i < N; i++) out[i] = finished(float_of(decode(codes[i])) * (EACH ? factor[i] : one), out);
  if (decode.lone_nan())
    for (int i = 0; i < N; i++) out[i] = codes[i] == decode.magnitudes + 1 ? finished(float_of(INFINITE + 1), out) : out[i];
}

template <bool EACH, class Out>  // the last piece ends with the row, over elements already done
inline void decode_row(const uint8_t* codes, Out* out, int64_t n, const float* factor, Decoder decode) {
  if (n < 16) {
    for (int64_t i = 0; i < n; i++) piece<1, EACH>(codes + i, out + i, factor + EACH * i, decode);
    return;
  }
  if (n == 32) return piece<32, EACH>(codes, out, factor, decode);
  int64_t i = 0;
  for (; i + 64 <= n; i += 64) piece<64, EACH>(codes + i, out + i, factor + EACH * i, decode);
  for (; i < n; i += 16) {
    const int64_t at = smaller(i, n - 16);
    piece<16, EACH>(codes + at, out + at, factor + EACH * at, decode);
  }
}

template <class Out>
void walk(const uint8_t* codes, int64_t rows, int64_t cols, int64_t block_rows, int64_t block_cols, const float* scales,
          Decoder decode, Out* out, int threads) {
  const int64_t grid_cols = (cols + block_cols - 1) / block_cols;
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int64_t row = 0; row < rows; row++) {
    const float* scale = scales + row / block_rows * grid_cols;
    const uint8_t* from = codes + row * cols;
    Out* to = out + row * cols;
    if (block_cols == 1) {
      decode_row<true>(from, to, cols, scale, decode);
      continue;
    }
    for (int64_t left = 0; left < cols; left += block_cols, scale++)
      decode_row<false>(from + left, to + left, smaller(block_cols, cols - left), scale, decode);
  }
}

}  // namespace

// codes, out: (rows, cols), contiguous; scales: one a block. special: the first code that is no number, -1 if there is
// none. half: whether out is bf16 instead of fp32
extern "C" void ottava_decode(const uint8_t* codes, int64_t rows, int64_t cols, int64_t block_rows, int64_t block_cols,
                              const float* scales, int mantissa_bits, int bias, int bits, int special, void* out,
                              int half, int threads) {
  if (block_rows >= rows && block_cols >= cols) {  // flat, cut into spans that threads share
    const int64_t n = rows * cols;
    const Decoder decode(mantissa_bits, bias, bits, special);
    const int team = int(between<int64_t>(n / SMALLEST_SHARE, 1, larger(threads, 1)));
#pragma omp parallel for schedule(static) num_threads(team)
    for (int64_t at = 0; at < n; at += SPAN) {
      const int64_t count = smaller(SPAN, n - at);
      if (half) decode_row<false>(codes + at, static_cast<uint16_t*>(out) + at, count, scales, decode);
      else decode_row<false>(codes + at, static_cast<float*>(out) + at, count, scales, decode);
    }
    return;
  }
  const Decoder decode(mantissa_bits, bias, bits, special);
  const int team = int(between<int64_t>(rows * cols / SMALLEST_SHARE, 1, larger(threads, 1)));
  if (half) walk(codes, rows, cols, block_rows, block_cols, scales, decode, static_cast<uint16_t*>(out), team);
  else walk(codes, rows, cols, block_rows, block_cols, scales, decode, static_cast<float*>(out), team);
}
