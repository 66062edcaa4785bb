// Constants that sample.cpp and measure.cpp share.
#pragma once

#include "base.h"

namespace {

enum Extent { LARGEST, LARGEST_FINITE, NOT_FINITE, ELEMENTS };  // LARGEST: inf or NaN if an element is inf or NaN
constexpr int64_t BAND = 128, CHUNK = 128;                      // rows and columns of the largest block

}  // namespace
