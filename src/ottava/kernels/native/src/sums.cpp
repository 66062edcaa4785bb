// The rest of a Linear beside GEMMs and casts, at the speed of memory: the checksum for its weight cache, and the sum of
// a gradient's rows, which is the gradient of the bias. Both give the same bits for any number of threads.
#include "base.h"
#include "floats.h"

extern "C" {
struct Sums {     // as native.sums packs it
  const void* x;  // rows one after the other, columns side by side
  int64_t type;   // 0 fp32, 1 bf16, 2 fp16
  int64_t rows, columns, row_stride;
  void* out;
  int64_t in_bf16;  // whether out is bf16; else it is fp32
  int64_t threads;
};
}

namespace {

constexpr int64_t SEGMENT = 1 << 18;  // bytes of one hash; native.sums._SEGMENT
constexpr int LANES = 32;             // 64-bit words hashed side by side
constexpr int64_t ROWS = 64;          // rows of one partial sum: shorter chains, less error
constexpr int64_t COLUMNS = 4096;     // columns of one task: its partial sums stay in a first-level cache

// Multiplication by an odd number and the shift are both one to one, so one changed bit always changes the hash.
inline uint64_t mix(uint64_t hash, uint64_t word) {
  hash = (hash ^ word) * 0x9E3779B97F4A7C15ull;
  return hash ^ hash >> 32;
}

uint64_t hash_segment(const uint8_t* bytes, int64_t n) {
  uint64_t lane[LANES];
  for (int i = 0; i < LANES; i++) lane[i] = (uint64_t)(i + 1) * 0xD1B54A32D192ED03ull;
  int64_t at = 0;
  for (; at + LANES * 8 <= n; at += LANES * 8) {
    uint64_t words[LANES];
    std::memcpy(words, bytes + at, sizeof words);
    for (int i = 0; i < LANES; i++) lane[i] = mix(lane[i], words[i]);
  }
  uint64_t tail[LANES] = {};
  std::memcpy(tail, bytes + at, n - at);
  uint64_t hash = (uint64_t)n;
  for (int i = 0; i < LANES; i++) hash = mix(mix(hash, lane[i]), tail[i]);
  return hash;
}

template <class Type>
void sum_band(const typename Type::Int* x, int64_t rows, int64_t row_stride, int64_t columns, float* __restrict out) {
  fill(out, columns, 0.0f);
  for (int64_t r = 0; r < rows; r++, x += row_stride)
    for (int64_t c = 0; c < columns; c++) out[c] += Type::value(x[c]);
}

// Each task reads whole cache lines of some rows. The sums of the bands are added in their order.
template <class Type>
bool sum_columns(const Sums& call) {
  const auto* x = static_cast<const typename Type::Int*>(call.x);
  const int64_t rows = call.rows, columns = call.columns;
  const int64_t bands = (rows + ROWS - 1) / ROWS, across = (columns + COLUMNS - 1) / COLUMNS;
  const Array<float> parts((bands + 1) * columns);
  if (!parts) return false;
#pragma omp parallel for num_threads((int)call.threads) schedule(static)
  for (int64_t task = 0; task < bands * across; task++) {
    const int64_t band = task / across, c0 = task % across * COLUMNS;
    sum_band<Type>(x + band * ROWS * call.row_stride + c0, smaller(ROWS, rows - band * ROWS), call.row_stride,
                   smaller(COLUMNS, columns - c0), parts.get() + band * columns + c0);
  }
  float* sums = call.in_bf16 ? parts.get() + bands * columns : static_cast<float*>(call.out);
  fill(sums, columns, 0.0f);
  for (int64_t band = 0; band < bands; band++)
    for (int64_t c = 0; c < columns; c++) sums[c] += parts[band * columns + c];
  if (call.in_bf16)
    for (int64_t c = 0; c < columns; c++) static_cast<uint16_t*>(call.out)[c] = to_bf16(sums[c]);
  return true;
}

}  // namespace

extern "C" {

// hashes: room for one number a segment
uint64_t ottava_checksum(const uint8_t* bytes, int64_t n, uint64_t* hashes, int threads) {
  const int64_t segments = (n + SEGMENT - 1) / SEGMENT;
  uint64_t hash = (uint64_t)n;
  if (segments == 1) return mix(hash, hash_segment(bytes, n));
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t i = 0; i < segments; i++) hashes[i] = hash_segment(bytes + i * SEGMENT, smaller(SEGMENT, n - i * SEGMENT));
  for (int64_t i = 0; i < segments; i++) hash = mix(hash, hashes[i]);
  return hash;
}

// Returns 0, or 1 if there was no memory.
int ottava_column_sums(const Sums* call) {
  const auto sum = call->type == 0 ? sum_columns<Float32> : call->type == 1 ? sum_columns<BFloat16> : sum_columns<Float16>;
  return sum(*call) ? 0 : 1;
}
}
