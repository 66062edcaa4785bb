// The NEON-BF16 level of gemm.cpp: BFMMLA, 2 x 2 sums over 4 steps of k in one instruction.
//
// An instruction computes twice the products of BFDOT and four times those of BFMLALB. It rounds to odd: a rounding may
// be off by one ulp instead of half an ulp, but there are half as many roundings, so the bound of one fp32 accumulation
// holds. It flushes subnormal numbers. None occur: sums are multiples of the smallest product, a normal number
// (FOLD_OCTAVES).
#pragma once

namespace {

// Words of two rows lie side by side, as the instruction wants them; MR and NR are even.
template <>
void tile_sum<Bfmmla>(const uint64_t* a, const Layout&, const uint64_t* b, int64_t units, const Tile& tile) {
  constexpr int NR = Bfmmla::NR, ROWS2 = MR / 2, COLUMNS2 = NR / 2;
  float32x4_t s[ROWS2][COLUMNS2];
#pragma GCC unroll 3
  for (int i = 0; i < ROWS2; i++)
#pragma GCC unroll 8
    for (int j = 0; j < COLUMNS2; j++) s[i][j] = vdupq_n_f32(0.0f);
  for (int64_t u = 0; u < units; u++, a += MR, b += NR) {
    bfloat16x8_t rows[ROWS2];
#pragma GCC unroll 3
    for (int i = 0; i < ROWS2; i++) rows[i] = vreinterpretq_bf16_u64(vld1q_u64(a + 2 * i));
#pragma GCC unroll 8
    for (int j = 0; j < COLUMNS2; j++) {
      bfloat16x8_t columns = vreinterpretq_bf16_u64(vld1q_u64(b + 2 * j));
#pragma GCC unroll 3
      for (int i = 0; i < ROWS2; i++) s[i][j] = vbfmmlaq_f32(s[i][j], rows[i], columns);
    }
  }
#pragma GCC unroll 3
  for (int i = 0; i < ROWS2; i++)
#pragma GCC unroll 4
    for (int j = 0; j < COLUMNS2; j += 2) {
      float32x4_t of_rows[2] = {vcombine_f32(vget_low_f32(s[i][j]), vget_low_f32(s[i][j + 1])),
                                vcombine_f32(vget_high_f32(s[i][j]), vget_high_f32(s[i][j + 1]))};
#pragma GCC unroll 2
      for (int h = 0; h < 2; h++) {
        float* to = tile.sums + (2 * i + h) * NR + 2 * j;
        float32x4_t y = of_rows[h];
        if (tile.of_a) y = vmulq_f32(vmulq_n_f32(y, tile.of_a[2 * i + h]), vld1q_f32(tile.of_b + 2 * j));
        vst1q_f32(to, tile.more ? vaddq_f32(vld1q_f32(to), y) : y);
      }
    }
  if (tile.end) end_in_memory<NR>(tile.sums, *tile.end);
}

}  // namespace
