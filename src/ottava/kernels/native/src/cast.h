// What quantize.cpp is asked for: by Python, and by measure.cpp.
#pragma once

#include <cstdint>

extern "C" struct Cast {  // native.quantize._Cast
  int32_t mantissa_bits, emin, emax, bias, bits, nan_code;  // nan_code -1: NaN becomes the largest number
  int32_t scale_format, guarded, margin;
  float max, top, guard_floor, tensor_top;
};

extern "C" struct CastJob {  // native.quantize._JOB
  const void* x;  // (rows, cols) of the dtype that the library is for, `stride` elements from row to row
  int64_t rows, cols, stride, block_rows, block_cols;
  const Cast* cast;
  const float* given;      // the scale to use, or null
  uint8_t* out;            // (rows, cols), contiguous
  float *scale_inv, *amax;  // one a block, column by column where `turned`
  float* staged;  // of a cast with one scale, or null: raised to amax, whether that is not finite, and whether another
                  // scale than the given one was taken
  int64_t turned, threads;
};
