// The arguments of quantize.cpp, for Python and for measure.cpp.
#pragma once

#include <cstdint>

extern "C" struct Cast {  // native.quantize._Cast
  int32_t mantissa_bits, emin, emax, bias, bits, nan_code;  // nan_code -1: there is none, and NaN becomes the largest number
  int32_t scale_format, guarded, margin;
  float max, top, guard_floor, tensor_top;
};

extern "C" struct CastJob {  // native.quantize._JOB
  const void* x;  // (rows, cols) in the library's dtype, `stride` elements from row to row
  int64_t rows, cols, stride, block_rows, block_cols;
  const Cast* cast;
  const float* given;      // the scale to use; null: compute it
  uint8_t* out;            // (rows, cols), contiguous
  float *scale_inv, *amax;  // one a block, column by column where `turned`
  float* staged;  // three maxima of a cast with one scale, or null: amax, 1 if it is not finite, 1 if another scale than
                  // the given one was used
  int64_t turned, threads;
};
