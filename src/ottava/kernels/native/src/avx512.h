// The instructions of AVX512 that kernels name, a function each. Compilers have all there are in immintrin.h, which takes
// them longer to read (0.2 to 0.35 s) than most kernels take to compile; the builtins behind it change from version to
// version. What C++ itself says of vectors (&, |, +, <<, a number in all places) is not here.
#pragma once

#include "base.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define OTTAVA_INLINE inline __attribute__((always_inline))

namespace {

typedef int64_t Z __attribute__((vector_size(64)));  // 64 bytes, of whatever
typedef uint8_t Bytes __attribute__((vector_size(64)));
typedef int16_t Words __attribute__((vector_size(64)));
typedef int32_t Doubles __attribute__((vector_size(64)));

OTTAVA_INLINE Z load(const void* from) { Z z; std::memcpy(&z, from, 64); return z; }
OTTAVA_INLINE void store(void* to, Z z) { std::memcpy(to, &z, 64); }
OTTAVA_INLINE void store_half(void* to, Z z) { __asm__("vmovdqu64 %t1, %0" : "=m"(*(char(*)[32])to) : "v"(z)); }
OTTAVA_INLINE Z bytes(uint8_t x) { return (Z)(Bytes{} + x); }
OTTAVA_INLINE Z words(int16_t x) { return (Z)(Words{} + x); }
OTTAVA_INLINE Z doubles(int32_t x) { return (Z)(Doubles{} + x); }
OTTAVA_INLINE Z plus16(Z a, Z b) { return (Z)((Words)a + (Words)b); }
OTTAVA_INLINE Z minus16(Z a, Z b) { return (Z)((Words)a - (Words)b); }

#define OTTAVA_OF_TWO(name, instruction) \
  OTTAVA_INLINE Z name(Z a, Z b) { Z z; __asm__(instruction " %2, %1, %0" : "=v"(z) : "v"(a), "v"(b)); return z; }
OTTAVA_OF_TWO(max16, "vpmaxsw")
OTTAVA_OF_TWO(min16_unsigned, "vpminuw")
OTTAVA_OF_TWO(min8_unsigned, "vpminub")
OTTAVA_OF_TWO(add8_saturated, "vpaddusb")
OTTAVA_OF_TWO(subtract8_saturated, "vpsubusb")
OTTAVA_OF_TWO(subtract16_saturated, "vpsubusw")
OTTAVA_OF_TWO(packed_unsigned, "vpackuswb")  // 16 bits to 8, saturated: of each 128 bits those of a, then those of b
OTTAVA_OF_TWO(packed_signed, "vpacksswb")
OTTAVA_OF_TWO(low8, "vpunpcklbw")  // of the lower half of each 128 bits: an element of a, one of b, ..
OTTAVA_OF_TWO(high8, "vpunpckhbw")
OTTAVA_OF_TWO(low32, "vpunpckldq")
OTTAVA_OF_TWO(high32, "vpunpckhdq")
OTTAVA_OF_TWO(low64, "vpunpcklqdq")
OTTAVA_OF_TWO(high64, "vpunpckhqdq")
OTTAVA_OF_TWO(even128, "vshufi32x4 $0x88,")  // the first and third 128 bits of a, then of b
OTTAVA_OF_TWO(odd128, "vshufi32x4 $0xdd,")
OTTAVA_OF_TWO(ordered64, "vpermq")  // b in the order that a gives
#undef OTTAVA_OF_TWO

OTTAVA_INLINE Z a_or_b_and_c(Z a, Z b, Z c) { __asm__("vpternlogd $0xf8, %2, %1, %0" : "+v"(a) : "v"(b), "v"(c)); return a; }

template <int N>  // 32 bits each: from the Nth of a on, then of b
OTTAVA_INLINE Z from32(Z a, Z b) { Z z; __asm__("valignd %3, %1, %2, %0" : "=v"(z) : "v"(a), "v"(b), "i"(N)); return z; }

// What index says of 64 words: those of a, and past them those of b.
OTTAVA_INLINE Z chosen16(Z a, Z index, Z b) { __asm__("vpermi2w %2, %1, %0" : "+v"(index) : "v"(a), "v"(b)); return index; }

#if defined(__AVX512VBMI__)  // of 128 bytes
OTTAVA_INLINE Z chosen8(Z a, Z index, Z b) { __asm__("vpermi2b %2, %1, %0" : "+v"(index) : "v"(a), "v"(b)); return index; }
#endif

// Masks have a bit for each element. Where one is 0: nothing is read or written, the element is 0.
OTTAVA_INLINE Z load8(const void* from, uint64_t mask) {
  Z z;
  __asm__("vmovdqu8 %1, %0%{%2%}%{z%}" : "=v"(z) : "m"(*(const char(*)[64])from), "Yk"(mask));
  return z;
}
OTTAVA_INLINE Z load16(const void* from, uint32_t mask) {
  Z z;
  __asm__("vmovdqu16 %1, %0%{%2%}%{z%}" : "=v"(z) : "m"(*(const char(*)[64])from), "Yk"(mask));
  return z;
}
OTTAVA_INLINE void store8(void* to, uint64_t mask, Z z) {
  __asm__("vmovdqu8 %1, %0%{%2%}" : "+m"(*(char(*)[64])to) : "v"(z), "Yk"(mask));
}
OTTAVA_INLINE uint32_t less16_unsigned(Z a, Z b) {
  uint32_t mask;
  __asm__("vpcmpltuw %2, %1, %0" : "=k"(mask) : "v"(a), "v"(b));
  return mask;
}
OTTAVA_INLINE uint32_t differs16(Z a, Z b) {
  uint32_t mask;
  __asm__("vpcmpneqw %2, %1, %0" : "=k"(mask) : "v"(a), "v"(b));
  return mask;
}
OTTAVA_INLINE uint64_t is_zero8(Z a) {
  uint64_t mask;
  __asm__("vptestnmb %1, %1, %0" : "=k"(mask) : "v"(a));
  return mask;
}
#if defined(__AVX512BF16__) && defined(__AVX512DQ__)
OTTAVA_INLINE uint32_t is_nan_or_subnormal(Z a) {  // 16 numbers in fp32
  uint32_t mask;
  __asm__("vfpclassps $0xa1, %1, %0" : "=k"(mask) : "v"(a));
  return mask;
}
OTTAVA_INLINE Z as_bf16(Z a) { __asm__("vcvtneps2bf16 %0, %t0" : "+v"(a)); return a; }  // in the lower half
#endif
OTTAVA_INLINE Z replaced8(Z a, uint64_t mask, Z b) { __asm__("vmovdqu8 %1, %0%{%2%}" : "+v"(a) : "v"(b), "Yk"(mask)); return a; }
OTTAVA_INLINE Z plus16_where(uint32_t mask, Z a, Z b) {
  __asm__("vpaddw %1, %0, %0%{%2%}" : "+v"(a) : "v"(b), "Yk"(mask));
  return a;
}

// The largest of words that are not negative.
OTTAVA_INLINE int16_t largest16(Z a) {
  Z half, quarter;
  __asm__("vextracti64x4 $1, %1, %t0\n\tvpmaxsw %t1, %t0, %t0" : "=&v"(half) : "v"(a));
  __asm__("vextracti64x2 $1, %t1, %x0\n\tvpmaxsw %x1, %x0, %x0" : "=&v"(quarter) : "v"(half));
  int32_t least;  // there is an instruction for the smallest of eight, none for the largest
  __asm__("vpxor %x2, %x1, %x1\n\tvphminposuw %x1, %x1\n\tvmovd %x1, %0" : "=r"(least), "+x"(quarter) : "x"(words(0x7fff)));
  return int16_t(0x7fff - least);
}

}  // namespace
#endif
