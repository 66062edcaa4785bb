// The stream of random bits of `rounding.random_bits`: Philox4x32-10, keyed by a seed and counted by places.
#pragma once

#include <cstdint>

namespace {

constexpr int PIECE = 64;  // elements of one round; a multiple of four, because four elements share a counter

struct Keys {
  uint32_t first[10], second[10];

  explicit Keys(uint64_t seed) {
    for (int i = 0; i < 10; i++) {
      first[i] = uint32_t(seed) + uint32_t(i) * 0x9E3779B9u;
      second[i] = uint32_t(seed >> 32) + uint32_t(i) * 0xBB67AE85u;
    }
  }
};

inline void random_words(const Keys& keys, uint64_t number, uint32_t* __restrict out) {  // PIECE of them, from 4 * number
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
    out[4 * i] = a[i];
    out[4 * i + 1] = b[i];
    out[4 * i + 2] = c[i];
    out[4 * i + 3] = d[i];
  }
}

}  // namespace
