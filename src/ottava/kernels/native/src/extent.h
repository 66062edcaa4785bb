// What samples of a tensor and the sums about it agree on.
#pragma once

#include "base.h"

namespace {

enum Extent { LARGEST, LARGEST_FINITE, NOT_FINITE, ELEMENTS };  // LARGEST: inf or NaN where an element is
constexpr int64_t BAND = 128, CHUNK = 128;                      // rows and columns of the largest block

}  // namespace
