// y (M, N) = sums of a[m, k] * b[n, k] as the accumulator of a tensor core makes them; kernels/accumulate.py is the truth.
//
// Rows of b are packed 64 at a time, a column of y in each lane: numbers in fp32, exponents in bytes. A group of products
// is read twice: first its exponents, 64 of them in an instruction, for the largest one; then products times
// 2**(fraction - largest), which conversion to integers truncates toward zero. Those are exact, and so are their sums: in
// 32 bits for as many products as cannot overflow them, then in fp64 with the accumulator so far. The bits depend neither on
// threads nor on instruction sets.
//
// Where the instruction scales blocks (`inside`), the exponents of scales are added to those of products, and dots of
// several products become terms in fp64.
#include "simd.h"

extern "C" {
struct Side {             // as accumulate.py lays it out: eight bytes each
  const uint8_t* codes;   // (rows, k)
  int64_t rows, row_stride, col_stride;
  const float* scale_inv;
  int64_t scale_row_stride, scale_col_stride;
  int64_t block_rows, block_cols;  // of one scale
  const float* numbers;            // of 256 codes
  int64_t smallest;                // exponent of the format's smallest normal number
};
struct Rule {
  int64_t group, fraction_bits, kept_bits, nearest, promotion;  // promotion 0: none
  int64_t inside, dot, smallest_scale;  // whether scales are the instruction's; exponent of the smallest normal one
};
struct Call {
  Side a, b;
  Rule rule;
  float* y;           // (M, N), contiguous
  const float* c;     // likewise, or null
  const float* bias;  // (N,), or null
  int64_t k, step;    // step: number of k over which no scale changes
  int64_t threads;
};
}

namespace {

constexpr int64_t WIDTH = 64;           // columns of y that are computed together
constexpr int64_t ROWS = 128;           // rows of y for which packed rows of b serve
constexpr int64_t SPAN = 512;           // steps of k that are packed at once: they stay in L2
constexpr int64_t MOST_DOTS = 16;       // in a group
constexpr int FOUR = 4;                 // vectors of sums in registers
constexpr int8_t NOTHING = -60;         // exponent of a zero: below all others, also with another one added
constexpr int32_t NO_PRODUCT = -40, LEAST = -126;  // a sum of exponents below the first is a product that is zero

typedef int8_t I8x64 __attribute__((vector_size(64)));
typedef int64_t Longs __attribute__((vector_size(LANES * 4)));
typedef int32_t HalfInts __attribute__((vector_size(LANES * 2)));

struct Coded {  // what a code stands for
  float number[256];
  int8_t exponent[256];
  bool special[256];  // infinity or NaN: a zero among finite numbers, and added up on its own

  explicit Coded(const Side& side) {
    for (int i = 0; i < 256; i++) {
      const float x = side.numbers[i];
      special[i] = !is_finite(x);
      number[i] = special[i] ? 0.0f : x;
      const int32_t field = (bits_of(x) & MAGNITUDE) >> 23;
      exponent[i] = number[i] == 0 ? NOTHING : int8_t(larger<int64_t>(field - 127, side.smallest));
    }
  }
};

// The exponent of a scale; zero has that of accumulators.
inline int32_t exponent_of(float scale, int64_t smallest) {
  return scale == 0 ? LEAST : int32_t(larger<int64_t>(((bits_of(scale) & MAGNITUDE) >> 23) - 127, smallest));
}

struct Group {  // products that are summed at once
  int64_t from, to, step;
  bool promoted, last;  // whether a chain, and a step, ends with it
};

// What a row of y has so far, a column in each lane.
struct State {
  alignas(64) float carry[WIDTH], part[WIDTH], y[WIDTH];
};

// The accumulator `carry` after one more group of `count` products; `shift`: the exponents of their scales.
void add_group(const float* a, const int8_t* a_exponent, const float* b, const int8_t* b_exponent, const int32_t* shift,
               int64_t count, const Rule& rule, float* carry) {
  const int32_t fraction = int32_t(rule.fraction_bits);
  const int64_t dropped = 52 - rule.kept_bits, half = rule.nearest ? (int64_t(1) << (dropped - 1)) - 1 : 0;
  const int64_t odd = rule.nearest ? 1 : 0, kept = ~((int64_t(1) << dropped) - 1);
  const int64_t exact = int64_t(1) << (29 - fraction);  // products are below 2**(largest + 2)
  I8x64 most = I8x64{} + int8_t(-128);
  for (int64_t k = 0; k < count; k++) {
    const I8x64 sum = load<I8x64>(b_exponent + k * WIDTH) + a_exponent[k];
    most = sum > most ? sum : most;
  }
  alignas(64) uint8_t shifted[WIDTH];
  const I8x64 positive = most ^ int8_t(-128);
  std::memcpy(shifted, &positive, WIDTH);
  for (int64_t j = 0; j < WIDTH; j += FOUR * LANES) {
    Ints largest[FOUR];
    Floats unit[FOUR];
    Doubles low[FOUR], high[FOUR];
    for (int v = 0; v < FOUR; v++) {
      const Ints products = widened(load<Bytes>(shifted + j + v * LANES)) - 128;
      const Ints field = (load<Ints>(carry + j + v * LANES) & MAGNITUDE) >> 23;
      const Ints own = (field > 1 ? field : spread(1)) - 127;
      const Ints moved = load<Ints>(shift + j + v * LANES);
      const Ints of_products = products < NO_PRODUCT ? spread(LEAST) : products + moved;
      largest[v] = own > of_products ? own : of_products;
      const Ints power = (127 + fraction) - largest[v] + moved, most = power > 254 ? spread(254) : power;
      unit[v] = as<Floats>((most < 0 ? spread(0) : most) << 23);  // above 254 there are no products, below 0 none counts
      low[v] = high[v] = Doubles{};
    }
    for (int64_t k0 = 0; k0 < count; k0 += exact) {
      Ints sum[FOUR] = {};
      for (int64_t k = k0, end = smaller(count, k0 + exact); k < end; k++) {
        const Floats x = spread(a[k]);
#pragma GCC unroll 4
        for (int v = 0; v < FOUR; v++)
          sum[v] += __builtin_convertvector(x * load<Floats>(b + k * WIDTH + j + v * LANES) * unit[v], Ints);
      }
      for (int v = 0; v < FOUR; v++) {
        HalfInts halves[2];
        std::memcpy(halves, &sum[v], sizeof(halves));
        low[v] += __builtin_convertvector(halves[0], Doubles);
        high[v] += __builtin_convertvector(halves[1], Doubles);
      }
    }
    for (int v = 0; v < FOUR; v++) {
      // 2**(fraction - largest) and its inverse leave fp32's range: in two factors
      Floats powers[2] = {as<Floats>((128 - largest[v]) << 23), as<Floats>((127 + largest[v]) << 23)};
      HalfFloats up[2], down[2], before[2];
      std::memcpy(up, &powers[0], sizeof(up));
      std::memcpy(down, &powers[1], sizeof(down));
      std::memcpy(before, carry + j + v * LANES, sizeof(before));
      for (int h = 0; h < 2; h++) {
        const Doubles scaled = __builtin_convertvector(before[h], Doubles) * __builtin_convertvector(up[h], Doubles) *
                               double(int64_t(1) << (fraction - 1));
        const Doubles sum = (h ? high[v] : low[v]) + __builtin_convertvector(__builtin_convertvector(scaled, HalfInts), Doubles);
        Longs bits = as<Longs>(sum * __builtin_convertvector(down[h], Doubles) * (1.0 / double(int64_t(1) << fraction)));
        bits = (bits + half + (bits >> dropped & odd)) & kept;
        before[h] = __builtin_convertvector(as<Doubles>(bits), HalfFloats);
      }
      std::memcpy(carry + j + v * LANES, before, sizeof(before));
    }
  }
}

// The same of dots: each is summed exactly and multiplied by its two scales; the exponents of those count.
void add_dots(const float* a, const float* b, const float* a_scale, const float* b_scale, int64_t count, const Rule& rule,
              float* carry) {
  const int64_t dropped = 52 - rule.kept_bits, half = rule.nearest ? (int64_t(1) << (dropped - 1)) - 1 : 0;
  const int64_t odd = rule.nearest ? 1 : 0, kept = ~((int64_t(1) << dropped) - 1);
  alignas(64) double terms[MOST_DOTS][WIDTH];
  alignas(64) int32_t largest[WIDTH];
  for (int64_t j = 0; j < WIDTH; j++) largest[j] = exponent_of(carry[j], LEAST);
  const int64_t dots = (count + rule.dot - 1) / rule.dot;
  for (int64_t d = 0; d < dots; d++) {
    alignas(64) float sum[WIDTH] = {};
    for (int64_t k = d * rule.dot; k < smaller(count, (d + 1) * rule.dot); k++)
      for (int64_t j = 0; j < WIDTH; j++) sum[j] += a[k] * b[k * WIDTH + j];
    const int32_t own = exponent_of(a_scale[d], rule.smallest_scale);
    for (int64_t j = 0; j < WIDTH; j++) {
      const float scale = b_scale[d * WIDTH + j];
      largest[j] = larger(largest[j], own + exponent_of(scale, rule.smallest_scale));
      terms[d][j] = double(sum[j]) * (double(a_scale[d]) * double(scale));
    }
  }
  for (int64_t j = 0; j < WIDTH; j++) {
    const int64_t power = rule.fraction_bits - largest[j];
    const double up = as<double>(int64_t(1023 + power) << 52), down = as<double>(int64_t(1023 - power) << 52);
    double sum = __builtin_trunc(double(carry[j]) * up);
    for (int64_t d = 0; d < dots; d++) sum += __builtin_trunc(terms[d][j] * up);
    const int64_t bits = as<int64_t>(sum * down);
    carry[j] = float(as<double>((bits + half + (bits >> dropped & odd)) & kept));
  }
}

struct Walk {
  const Call& call;
  const Coded &of_a, &of_b;
  const Array<float>& a_numbers;      // (M, K)
  const Array<int8_t>& a_exponents;
  const Array<Group>& groups;
  int64_t count;
  const Array<bool>&a_special, &b_special;  // of rows

  float scale(const Side& side, int64_t row, int64_t k) const {
    return side.scale_inv[row / side.block_rows * side.scale_row_stride + k / side.block_cols * side.scale_col_stride];
  }

  // Columns below one scale.
  int64_t unit() const { return call.rule.dot > 1 ? call.rule.dot : call.rule.group; }

  // Rows of b from n0 on, k from k0 to k1: numbers, exponents and the instruction's scales with a row in each lane.
  void pack(int64_t n0, int64_t columns, int64_t k0, int64_t k1, float* numbers, int8_t* exponents, float* scales) const {
    const Side& side = call.b;
    for (int64_t k = k0; call.rule.inside && k < k1; k += unit())
      for (int64_t j = 0; j < WIDTH; j++)
        scales[(k - k0) / unit() * WIDTH + j] = j < columns ? scale(side, n0 + j, k) : 0.0f;
    for (int64_t k = k0; k < k1; k += 64)
      for (int64_t j = 0; j < WIDTH; j++)
        for (int64_t at = k, end = smaller(k + 64, k1); at < end; at++) {
          const uint8_t code = j < columns ? side.codes[(n0 + j) * side.row_stride + at * side.col_stride] : 0;
          numbers[(at - k0) * WIDTH + j] = j < columns ? of_b.number[code] : 0.0f;
          exponents[(at - k0) * WIDTH + j] = j < columns ? of_b.exponent[code] : NOTHING;
        }
  }

  void begin(int64_t row, int64_t n0, int64_t columns, State& s) const {
    fill(s.carry, WIDTH, 0.0f);
    fill(s.part, WIDTH, 0.0f);
    fill(s.y, WIDTH, 0.0f);
    if (!call.c) return;
    const bool one = call.step >= call.k;
    float* to = !one ? s.y : call.rule.promotion ? s.part : s.carry;
    for (int64_t j = 0; j < columns; j++) {
      const float c = call.c[row * call.b.rows + n0 + j];
      to[j] = !is_finite(c) ? 0.0f : one && !call.rule.inside ? c / scale(call.a, row, 0) / scale(call.b, n0 + j, 0) : c;
    }
  }

  void add(const Group& g, int64_t row, int64_t n0, int64_t columns, int64_t k0, const float* numbers,
           const int8_t* exponents, const float* scales, State& s) const {
    const Rule& rule = call.rule;
    const int64_t at = row * call.k + g.from, in_b = (g.from - k0) * WIDTH, count = g.to - g.from;
    if (rule.dot > 1) {
      float own[MOST_DOTS];
      for (int64_t k = g.from; k < g.to; k += rule.dot) own[(k - g.from) / rule.dot] = scale(call.a, row, k);
      add_dots(a_numbers.get() + at, numbers + in_b, own, scales + in_b / rule.dot, count, rule, s.carry);
    } else {
      alignas(64) int32_t shift[WIDTH] = {};
      if (rule.inside) {
        const int32_t own = exponent_of(scale(call.a, row, g.from), rule.smallest_scale);
        for (int64_t j = 0; j < WIDTH; j++) shift[j] = own + exponent_of(scales[in_b / rule.group + j], rule.smallest_scale);
      }
      add_group(a_numbers.get() + at, a_exponents.get() + at, numbers + in_b, exponents + in_b, shift, count, rule, s.carry);
    }
    if (g.promoted)
      for (int64_t j = 0; j < WIDTH; j++) {
        s.part[j] += s.carry[j];
        s.carry[j] = 0.0f;
      }
    if (!g.last) return;
    const float* part = call.rule.promotion ? s.part : s.carry;
    const float x = scale(call.a, row, g.from);
    for (int64_t j = 0; j < columns; j++) {
      if (rule.inside) {
        s.y[j] = part[j];
        continue;
      }
      const float z = scale(call.b, n0 + j, g.from);
      s.y[j] = call.step >= call.k ? part[j] * x * z : __builtin_fmaf(x * z, part[j], s.y[j]);
    }
    fill(s.part, WIDTH, 0.0f);
    fill(s.carry, WIDTH, 0.0f);
  }

  // The sum of what is infinite or NaN among c and the products; 0: nothing is.
  double special(int64_t row, int64_t column) const {
    double sum = 0;
    if (call.c) {
      const float c = call.c[row * call.b.rows + column];
      sum = is_finite(c) ? 0.0 : double(c);
    }
    if (!a_special[row] && !b_special[column]) return sum;
    for (int64_t k = 0; k < call.k; k++) {
      const float product = call.a.numbers[call.a.codes[row * call.a.row_stride + k * call.a.col_stride]] *
                            call.b.numbers[call.b.codes[column * call.b.row_stride + k * call.b.col_stride]];
      if (!is_finite(product)) sum += product;
    }
    return sum;
  }

  void finish(int64_t row, int64_t n0, int64_t columns, const State& s) const {
    float* y = call.y + row * call.b.rows + n0;
    for (int64_t j = 0; j < columns; j++) {
      const double other = special(row, n0 + j);
      y[j] = (other == 0 ? s.y[j] : float(other)) + (call.bias ? call.bias[n0 + j] : -0.0f);
    }
  }

  bool run() const {
    const int64_t m = call.a.rows, n = call.b.rows, panels = (n + WIDTH - 1) / WIDTH;
    const int64_t wanted = larger<int64_t>((m + ROWS - 1) / ROWS, (2 * call.threads + panels - 1) / panels);
    const int64_t rows = (m + wanted - 1) / wanted, blocks = (m + rows - 1) / rows;
    bool memory = true;
#pragma omp parallel num_threads((int)call.threads)
    {
      Array<float> numbers((SPAN + call.rule.group) * WIDTH);
      Array<int8_t> exponents((SPAN + call.rule.group) * WIDTH);
      Array<float> scales((SPAN + call.rule.group) / unit() * WIDTH + WIDTH);
      Array<State> states(rows);
      const bool here = numbers && exponents && scales && states;
      if (!here) memory = false;
#pragma omp for schedule(dynamic, 1)
      for (int64_t task = 0; task < panels * blocks; task++) {
        if (!here) continue;
        const int64_t n0 = task / blocks * WIDTH, columns = smaller(WIDTH, n - n0);
        const int64_t m0 = task % blocks * rows, m1 = smaller(m, m0 + rows);
        for (int64_t row = m0; row < m1; row++) begin(row, n0, columns, states[row - m0]);
        for (int64_t g0 = 0, g1; g0 < count; g0 = g1) {
          const int64_t k0 = groups[g0].from;
          for (g1 = g0 + 1; g1 < count && groups[g1].from - k0 < SPAN;) g1++;
          pack(n0, columns, k0, groups[g1 - 1].to, numbers.get(), exponents.get(), scales.get());
          for (int64_t row = m0; row < m1; row++)
            for (int64_t g = g0; g < g1; g++)
              add(groups[g], row, n0, columns, k0, numbers.get(), exponents.get(), scales.get(), states[row - m0]);
        }
        for (int64_t row = m0; row < m1; row++) finish(row, n0, columns, states[row - m0]);
      }
    }
    return memory;
  }
};

void note_special(const Side& side, int64_t k, const Coded& coded, Array<bool>& rows) {
  bool any = false;
  for (bool special : coded.special) any |= special;
  for (int64_t i = 0; i < side.rows; i++) {
    rows[i] = false;
    for (int64_t at = 0; any && at < k; at++) rows[i] |= coded.special[side.codes[i * side.row_stride + at * side.col_stride]];
  }
}

}  // namespace

extern "C" {

// 0, or 1 if there was no memory.
int ottava_accumulate(const Call* call) {
  const Side &a = call->a, &b = call->b;
  const Rule& rule = call->rule;
  const int64_t k = call->k;
  const Coded of_a(a), of_b(b);
  Array<float> numbers(a.rows * k);
  Array<int8_t> exponents(a.rows * k);
  Array<bool> a_special(a.rows), b_special(b.rows);
  Array<Group> groups(k / smaller(rule.group, call->step) + k / call->step + 2);
  if (!numbers || !exponents || !a_special || !b_special || !groups) return 1;
  for (int64_t i = 0; i < a.rows; i++)
    for (int64_t at = 0; at < k; at++) {
      const uint8_t code = a.codes[i * a.row_stride + at * a.col_stride];
      numbers[i * k + at] = of_a.number[code];
      exponents[i * k + at] = of_a.exponent[code];
    }
  note_special(a, k, of_a, a_special);
  note_special(b, k, of_b, b_special);
  int64_t count = 0;
  for (int64_t from = 0; from < k; from += call->step) {
    const int64_t end = smaller(k, from + call->step);
    for (int64_t at = from; at < end; at += rule.group) {
      const int64_t to = smaller(end, at + rule.group);
      const bool last = to == end;
      groups[count++] = {at, to, from, rule.promotion && (last || (to - from) % rule.promotion == 0), last};
    }
  }
  return Walk{*call, of_a, of_b, numbers, exponents, groups, count, a_special, b_special}.run() ? 0 : 1;
}
}
