// The AMX level of gemm.cpp: 32 x 64 of y by tiles of 16 rows x 64 bytes. It has not run on hardware yet: tests run
// it on a model of the tiles (OTTAVA_AMX_MODEL names a header with the functions below).
//
// One multiplication sums 32 steps of k, even and odd ones apart, from zero, and adds that to the tile's sums.
#pragma once

#if defined(OTTAVA_AMX_MODEL)
#include OTTAVA_AMX_MODEL
#else
#define amx_configure(config) __asm__ volatile("ldtilecfg %0" : : "m"(config))
#define amx_release() __asm__ volatile("tilerelease")
#define amx_zero(tile) __asm__ volatile("tilezero %%tmm" #tile ::)
#define amx_load(tile, from, stride) \
  __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #tile : : "r"(from), "r"(int64_t(stride)))
#define amx_store(tile, to, stride) \
  __asm__ volatile("tilestored %%tmm" #tile ", (%0,%1,1)" : : "r"(to), "r"(int64_t(stride)) : "memory")
#define amx_multiply(sums, a, b) __asm__ volatile("tdpbf16ps %%tmm" #b ", %%tmm" #a ", %%tmm" #sums ::)
#if defined(__linux__)
#include <cerrno>
#include <sys/syscall.h>
#include <unistd.h>
#endif
// Linux gives a process the state of the tiles when it asks, for good and for all its threads; a tile instruction
// before that ends it. ENOSPC: a thread's alternative signal stack is too small for the state.
inline int amx_refusal() {
#if defined(__linux__)
  constexpr long ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
  return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) ? errno : 0;
#else
  return -1;
#endif
}
#endif

namespace {

// g++ 12 does not know that tile instructions read memory: what they are to read is written before this.
inline __attribute__((always_inline)) void amx_memory() { __asm__ volatile("" ::: "memory"); }

constexpr int AMX_UNITS = 16;  // units of k in a tile: rows of b's, words in a row of a's

template <>
struct Session<Amx> {  // a thread's tiles: nobody pays for saving them once it has ended
  Session() {
    alignas(64) static const uint8_t config[64] = {
        1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,         // palette
        64, 0, 64, 0, 64, 0, 64, 0, 64, 0, 64, 0, 64, 0, 64, 0,  // bytes in a row of each of 8 tiles
        0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
        16, 16, 16, 16, 16, 16, 16, 16};  // rows
    amx_configure(config);
  }
  ~Session() { amx_release(); }
};

// 32 rows of a x 32 columns of y into tiles 0 to 3, over 16 units; strides in words.
inline __attribute__((always_inline)) void amx_units(const uint32_t* a, int64_t a_stride, const uint32_t* b,
                                                     int64_t b_stride) {
  amx_load(4, a, a_stride * 4);
  amx_load(6, b, b_stride * 4);
  amx_load(7, b + 16, b_stride * 4);
  amx_multiply(0, 4, 6);
  amx_multiply(1, 4, 7);
  amx_load(5, a + 16 * a_stride, a_stride * 4);
  amx_multiply(2, 5, 6);
  amx_multiply(3, 5, 7);
}

// The last units: what lies behind them belongs to others, and 0 times that may be NaN.
inline void amx_rest(const uint32_t* a, int64_t a_stride, const uint32_t* b, int64_t units) {
  alignas(64) uint32_t rest_a[MR * AMX_UNITS], rest_b[AMX_UNITS * 32];
  std::memset(rest_a, 0, sizeof rest_a);
  std::memset(rest_b, 0, sizeof rest_b);
  for (int i = 0; i < MR; i++) std::memcpy(rest_a + i * AMX_UNITS, a + i * a_stride, units * 4);
  for (int64_t u = 0; u < units; u++) std::memcpy(rest_b + u * 32, b + u * Amx::NR, 32 * 4);
  amx_memory();
  amx_units(rest_a, AMX_UNITS, rest_b, 32);
}

template <>
void tile_sum<Amx>(const uint32_t* a, const Layout& layout, const uint32_t* b, int64_t units, const Tile& tile) {
  constexpr int64_t NR = Amx::NR, ROW = NR * 4;
  alignas(64) float steps[MR * NR];
  float* to = tile.of_a ? steps : tile.sums;
  amx_memory();
  for (int half = 0; half < NR; half += 32) {
    float* sums = to + half;
    if (tile.more && !tile.of_a) {
      amx_load(0, sums, ROW);
      amx_load(1, sums + 16, ROW);
      amx_load(2, sums + 16 * NR, ROW);
      amx_load(3, sums + 16 * NR + 16, ROW);
    } else {
      amx_zero(0);
      amx_zero(1);
      amx_zero(2);
      amx_zero(3);
    }
    int64_t u = 0;
    for (; u + AMX_UNITS <= units; u += AMX_UNITS) amx_units(a + u, layout.row, b + u * NR + half, NR);
    if (u < units) amx_rest(a + u, layout.row, b + u * NR + half, units - u);
    amx_store(0, sums, ROW);
    amx_store(1, sums + 16, ROW);
    amx_store(2, sums + 16 * NR, ROW);
    amx_store(3, sums + 16 * NR + 16, ROW);
  }
  amx_memory();
  for (int i = 0; i < MR && tile.of_a; i++)
    for (int j = 0; j < NR; j++) {
      float scaled = steps[i * NR + j] * tile.of_a[i] * tile.of_b[j];
      tile.sums[i * NR + j] = tile.more ? tile.sums[i * NR + j] + scaled : scaled;
    }
  if (tile.end) end_in_memory<NR>(tile.sums, *tile.end);
}

}  // namespace
