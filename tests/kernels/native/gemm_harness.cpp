// gemm.cpp without Python, for CPUs that an emulator stands in for: test_gemm_levels.py compiles and runs it.
// Prints "ok" and how many of 16,384 bf16 outputs are not the correctly rounded ones (K = 1024), or the first thing wrong.
#include <cmath>
#include <cstdio>
#include <vector>

#include "gemm.cpp"

namespace {

struct Random {  // a linear congruential generator
  uint64_t state = 1;
  uint32_t operator()(uint32_t below) {
    state = state * 6364136223846793005ull + 1442695040888963407ull;
    return (uint32_t)(state >> 33) % below;
  }
};

uint8_t nearest_e4m3(double x) {
  int e;
  std::frexp(x, &e);
  e = larger(e - 1, -6);
  int code = (int)std::nearbyint(std::fabs(std::ldexp(x, 3 - e))) + ((e + 6) << 3);  // a carry moves into the exponent
  return (uint8_t)(code | (x < 0 ? 128 : 0));
}

enum Numbers { CODES, INTEGERS, NORMAL };

struct Matrix {  // codes, and scales of blocks of 1 x cols
  int64_t rows, k, cols, blocks;
  std::vector<uint8_t> codes;
  std::vector<float> scales;
  float table[256];

  // any codes of E4M3, integers from -8 to 8, or nearly normal numbers; scales any, or powers of two
  Matrix(int64_t rows, int64_t k, int64_t cols, Numbers numbers, bool powers, Random& random)
      : rows(rows), k(k), cols(cols), blocks(ceil_div(k, cols)), codes(rows * k), scales(rows * blocks) {
    for (int c = 0; c < 256; c++) {
      int e = c >> 3 & 15, m = c & 7;
      float magnitude = e ? std::ldexp(1.0f + m / 8.0f, e - 7) : std::ldexp(m / 8.0f, -6);
      if (numbers == INTEGERS) magnitude = c & 127;
      table[c] = c > 127 ? -magnitude : magnitude;
    }
    for (uint8_t& c : codes) {
      double sum = -600;
      for (int i = 0; i < 12 && numbers == NORMAL; i++) sum += random(101);
      c = numbers == NORMAL ? nearest_e4m3(sum * 0.937 + random(1000) / 1000.0) : (uint8_t)(random(numbers == INTEGERS ? 9 : 120) + 128 * random(2));
    }
    const int octaves = numbers == INTEGERS ? 3 : 20;
    for (float& s : scales) s = std::ldexp(powers ? 1.0f : 1.0f + random(1000) / 1000.0f, (int)random(octaves) - 2);
  }
  double value(int64_t r, int64_t i) const { return (double)table[codes[r * k + i]] * scales[r * blocks + i / cols]; }
  std::vector<uint8_t> transposed() const {
    std::vector<uint8_t> t(rows * k);
    for (int64_t r = 0; r < rows; r++)
      for (int64_t i = 0; i < k; i++) t[i * rows + r] = codes[r * k + i];
    return t;
  }
  Side side(const uint8_t* data, bool by_columns) const {
    return {data, rows, by_columns ? 1 : k, by_columns ? rows : 1, scales.data(), blocks, 1, 1, cols, table};
  }
};

template <class T>
std::vector<T> multiply(const Matrix& a, const Matrix& b, int type, int layout, int exact, int threads, int* mode) {
  std::vector<uint8_t> at = a.transposed(), bt = b.transposed();
  std::vector<T> y(a.rows * b.rows, (T)7);
  Call call{layout & 1 ? a.side(at.data(), true) : a.side(a.codes.data(), false),
            layout & 2 ? b.side(bt.data(), true) : b.side(b.codes.data(), false),
            {y.data(), type, nullptr}, a.k, smaller(a.cols, b.cols), exact, threads};
  *mode = ottava_gemm(&call);
  return y;
}

int wrong(const char* what, int64_t m, int64_t n, int64_t k, int64_t cols, int mode) {
  std::printf("%s: (%d, %d, %d), blocks of %d, mode %d\n", what, (int)m, (int)n, (int)k, (int)cols, mode);
  return 1;
}

int sums_are_right(int64_t m, int64_t n, int64_t k, int64_t cols, Numbers numbers, bool powers, Random& random) {
  Matrix a(m, k, cols, numbers, powers, random), b(n, k, cols, numbers, powers, random);
  int mode;
  std::vector<float> y = multiply<float>(a, b, 0, 0, powers, 1, &mode);
  if (mode != (cols >= k ? PLAIN : powers ? FOLD : STEPS)) return wrong("another mode", m, n, k, cols, mode);
  for (int64_t i = 0; i < m; i++)
    for (int64_t j = 0; j < n; j++) {
      double exact = 0, magnitude = 0;
      for (int64_t l = 0; l < k; l++) {
        double product = a.value(i, l) * b.value(j, l);
        exact += product, magnitude += std::fabs(product);
      }
      double allowed = numbers == INTEGERS && powers ? 0 : (k + 6) * 0x1p-24 * magnitude;
      if (!(std::fabs(y[i * n + j] - exact) <= allowed)) return wrong("off by more than a bound", m, n, k, cols, mode);
    }
  for (int layout = 1; layout < 4; layout++) {  // with as many threads
    std::vector<float> again = multiply<float>(a, b, 0, layout, powers, layout, &mode);
    if (std::memcmp(again.data(), y.data(), 4 * y.size())) return wrong("other bits", m, n, k, cols, layout);
  }
  return 0;
}

int outputs_wrongly_rounded(Random& random) {
  Matrix a(256, 1024, 1024, NORMAL, true, random), b(64, 1024, 1024, NORMAL, true, random);
  int mode, count = 0;
  std::vector<uint16_t> y = multiply<uint16_t>(a, b, 1, 0, 1, 1, &mode);
  for (int64_t i = 0; i < a.rows; i++)
    for (int64_t j = 0; j < b.rows; j++) {
      double exact = 0;
      for (int64_t l = 0; l < a.k; l++) exact += a.value(i, l) * b.value(j, l);
      int e;
      std::frexp(exact, &e);
      count += float_of((uint32_t)y[i * b.rows + j] << 16) != std::ldexp(std::nearbyint(std::ldexp(exact, 8 - e)), e - 8);
    }
  return count;
}

}  // namespace

int main() {
  Random random;
  const int64_t sizes[][3] = {{1, 1, 1}, {5, 3, 7}, {16, 32, 128}, {33, 17, 300}, {2, 130, 1}, {13, 65, 1030}};
  for (auto& size : sizes)
    for (int64_t cols : {size[2], (int64_t)16, (int64_t)32, (int64_t)128})
      for (int kind = 0; kind < 4; kind++)
        if (sums_are_right(size[0], size[1], size[2], cols, kind & 1 ? INTEGERS : CODES, kind & 2, random)) return 1;
  std::printf("ok %d\n", outputs_wrongly_rounded(random));
}
