// Intel's tiles in plain C++, for CPUs without: what gemm_amx.h asks of them, as the "Intel 64 and IA-32
// Architectures Software Developer's Manual" has it (TDPBF16PS: even and odd numbers summed apart from zero by fused
// multiply-adds, their sum added to the destination; DAZ, FTZ, ties to even, MXCSR not consulted). Tiles are a thread's
// own; without a configuration, or with row sizes other than those configured, it stops the process, as the CPU does.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>

namespace model {

struct Tiles {
  uint8_t config[64];  // palette 0: none
  alignas(64) uint8_t data[8][16][64];
};

inline Tiles& tiles() {
  static thread_local Tiles own;
  return own;
}

inline int rows_of(int tile) {
  if (tiles().config[0] != 1) std::abort();
  return tiles().config[48 + tile];
}
inline int bytes_of(int tile) {
  if (tiles().config[0] != 1) std::abort();
  return tiles().config[16 + 2 * tile] | tiles().config[17 + 2 * tile] << 8;
}

inline float flush(float x) { return __builtin_fabsf(x) < 0x1p-126f ? __builtin_copysignf(0.0f, x) : x; }
inline float number(uint32_t bf16) {
  uint32_t bits = bf16 << 16;
  float x;
  std::memcpy(&x, &bits, 4);
  return flush(x);
}
inline float fused(float x, float y, float sum) { return flush(__builtin_fmaf(x, y, sum)); }

inline void configure(const void* config) {
  std::memset(&tiles(), 0, sizeof(Tiles));
  std::memcpy(tiles().config, config, 64);
}
inline void release() { std::memset(&tiles(), 0, sizeof(Tiles)); }
inline void zero(int tile) { std::memset(tiles().data[tile], 0, 64 * rows_of(tile)); }
inline void load(int tile, const void* from, int64_t stride) {
  int rows = rows_of(tile), bytes = bytes_of(tile);
  std::memset(tiles().data[tile], 0, 1024);
  for (int r = 0; r < rows; r++) std::memcpy(tiles().data[tile][r], (const char*)from + r * stride, bytes);
}
inline void store(int tile, void* to, int64_t stride) {
  for (int r = 0; r < rows_of(tile); r++) std::memcpy((char*)to + r * stride, tiles().data[tile][r], bytes_of(tile));
}
inline void multiply(int c, int a, int b) {
  int rows = rows_of(c), columns = bytes_of(c) / 4, pairs = bytes_of(a) / 4;
  if (rows != rows_of(a) || columns != bytes_of(b) / 4 || pairs != rows_of(b)) std::abort();  // the CPU: #UD
  Tiles& t = tiles();
  for (int m = 0; m < rows; m++) {
    float even[16] = {}, odd[16] = {}, sum[16];
    std::memcpy(sum, t.data[c][m], 64);
    for (int k = 0; k < pairs; k++) {
      uint32_t x, y[16];
      std::memcpy(&x, t.data[a][m] + 4 * k, 4);
      std::memcpy(y, t.data[b][k], 64);
      for (int n = 0; n < 16; n++) {
        even[n] = fused(number(x & 0xFFFF), number(y[n] & 0xFFFF), even[n]);
        odd[n] = fused(number(x >> 16), number(y[n] >> 16), odd[n]);
      }
    }
    for (int n = 0; n < columns; n++) sum[n] = flush(flush(sum[n]) + flush(even[n] + odd[n]));
    std::memcpy(t.data[c][m], sum, 64);
  }
}

}  // namespace model

#define amx_configure(config) model::configure(config)
#define amx_release() model::release()
#define amx_zero(tile) model::zero(tile)
#define amx_load(tile, from, stride) model::load(tile, from, stride)
#define amx_store(tile, to, stride) model::store(tile, to, stride)
#define amx_multiply(sums, a, b) model::multiply(sums, a, b)
#ifndef OTTAVA_AMX_REFUSAL
#define OTTAVA_AMX_REFUSAL 0
#endif
inline int amx_refusal() { return OTTAVA_AMX_REFUSAL; }
