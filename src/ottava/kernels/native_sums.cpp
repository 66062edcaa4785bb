// What a Linear does besides GEMMs and casts, at the speed of memory: the checksum that its weight cache believes, and
// the sum of a gradient's rows, which is the gradient of the bias. Both give the same bits for any number of threads.
#include "native_base.h"
#include "native_float.h"

namespace {

constexpr int64_t SEGMENT = 1 << 18;  // bytes hashed on their own; native_sums._SEGMENT
constexpr int LANES = 32;             // 64-bit words that are hashed side by side
constexpr int64_t ROWS = 64;          // rows of one partial sum: shorter chains, less error
constexpr int64_t COLUMNS = 256;      // columns that one task sums: its partial sums stay in a first-level cache

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
void sum_columns(const typename Type::Int* x, int64_t rows, int64_t row_stride, int64_t c0, int64_t count, float* out) {
  float total[COLUMNS] = {};
  for (int64_t r0 = 0; r0 < rows; r0 += ROWS) {
    float part[COLUMNS] = {};
    for (int64_t r = r0; r < smaller(rows, r0 + ROWS); r++) {
      const typename Type::Int* row = x + r * row_stride + c0;
      for (int64_t c = 0; c < count; c++) part[c] += Type::value(row[c]);
    }
    for (int64_t c = 0; c < count; c++) total[c] += part[c];
  }
  std::memcpy(out + c0, total, count * 4);
}

}  // namespace

extern "C" {

// hashes: room for one number a segment
uint64_t ottava_checksum(const uint8_t* bytes, int64_t n, uint64_t* hashes, int threads) {
  int64_t segments = (n + SEGMENT - 1) / SEGMENT;
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t i = 0; i < segments; i++) hashes[i] = hash_segment(bytes + i * SEGMENT, smaller(SEGMENT, n - i * SEGMENT));
  uint64_t hash = (uint64_t)n;
  for (int64_t i = 0; i < segments; i++) hash = mix(hash, hashes[i]);
  return hash;
}

// type: 0 fp32, 1 bf16, 2 fp16; rows lie one after the other, columns side by side
void ottava_column_sums(const void* x, int type, int64_t rows, int64_t columns, int64_t row_stride, float* out, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t c0 = 0; c0 < columns; c0 += COLUMNS) {
    int64_t count = smaller(COLUMNS, columns - c0);
    if (type == 0) sum_columns<Float32>((const int32_t*)x, rows, row_stride, c0, count, out);
    if (type == 1) sum_columns<BFloat16>((const int16_t*)x, rows, row_stride, c0, count, out);
    if (type == 2) sum_columns<Float16>((const int16_t*)x, rows, row_stride, c0, count, out);
  }
}
}
