// The few things that the C++ kernels need from a standard library. Its headers take the compiler longer than a whole
// kernel does, and a first call waits for the compiler.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>

#ifdef __clang__  // it unrolls loops eight times, which takes 0.1 s and gains nothing here
#define OTTAVA_ROLLED _Pragma("clang loop unroll(disable) interleave(disable)")
#else
#define OTTAVA_ROLLED
#endif

template <class T>
constexpr T smaller(T a, T b) { return b < a ? b : a; }

template <class T>
constexpr T larger(T a, T b) { return a < b ? b : a; }

template <class T>
constexpr T between(T x, T low, T high) { return smaller(larger(x, low), high); }

// n uninitialized numbers, aligned to a cache line; false if there was no memory.
template <class T>
class Array {
 public:
  Array() = default;
  explicit Array(int64_t n) { make(n); }
  Array(const Array&) = delete;
  Array& operator=(const Array&) = delete;
  ~Array() { std::free(first); }

  bool make(int64_t n) {
    std::free(first);
    first = static_cast<T*>(std::aligned_alloc(64, (size_t(n) * sizeof(T) + 127) / 64 * 64));
    return first != nullptr;
  }
  void drop() {
    std::free(first);
    first = nullptr;
  }
  explicit operator bool() const { return first != nullptr; }
  T* get() const { return first; }
  T& operator[](int64_t i) const { return first[i]; }

 private:
  T* first = nullptr;
};

template <class T>
void fill(T* to, int64_t n, T value) {
  for (int64_t i = 0; i < n; i++) to[i] = value;
}
