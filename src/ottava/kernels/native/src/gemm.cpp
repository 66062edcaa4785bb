// y (M, N) = epilogue(sum over k of a[m, k] * b[n, k]) on codes of up to 8 bits, with fp32 accumulation and ONE rounding.
//
// Codes and their products are exact in bf16 x bf16 -> fp32, so AVX512-BF16 multiplies them without loss. On other CPUs
// the same walk multiplies in fp32. Packing decodes both operands by table, or widens operands that are bf16 numbers:
//
//   b   panels of NR columns of y:   words[panel][unit][NR]     a unit is 2 steps of k in bf16 (one word), 1 in fp32
//   a   blocks of rows of y:         words[row][unit], or words[rows of MR][unit][MR] if a lies column by column
//
// The tile multiplies a broadcast word of a with NR words of b. Scales enter in one of three ways:
//   plain   one scale a row of a and of b: they multiply the finished sum
//   fold    power-of-two scales along k: a row's largest goes to the epilogue, the rest into the operand's exponents,
//           exactly. If the smallest product would leave fp32's normal range, `steps` runs instead
//   steps   any scales along k: they multiply the sum of each step
// One thread computes a tile from first k to last, so the bits do not depend on the number of threads.
#include "gemm.h"

namespace {

// --- the epilogue: scales, bias, one rounding ------------------------------------------------------------------------

inline uint16_t to_fp16(float x) {
#if defined(__F16C__)
  typedef float Four __attribute__((vector_size(16)));
  Four halves{x};
  __asm__("vcvtps2ph $0, %0, %0" : "+x"(halves));
  return (uint16_t)bits_of(halves[0]);
#else
  uint16_t sign = (uint16_t)((uint32_t)bits_of(x) >> 16 & 0x8000);
  float m = float_of(bits_of(x) & MAGNITUDE);
  if (is_nan(m)) return sign | 0x7E00;
  if (m >= 65520.0f) return sign | 0x7C00;
  int e = larger(exponent_of(m), -14);                          // subnormals share the exponent of 2**-14
  int steps = bits_of(m * power(10 - e) + 0x1p23f) & 0x7FFFFF;  // at most 2048, in the sum's low bits: ties to even
  return sign | (uint16_t)(((e + 14) << 10) + steps);           // a carry moves into the exponent by itself
#endif
}

// Rounds some vectors of finished values to bf16 and stores them.
template <int N, class V>
inline __attribute__((always_inline)) void put_bf16(const V* v, uint16_t* to) {
  constexpr int LANES = sizeof(V) / 4;
#if OTTAVA_LEVEL == 3
  uint32_t special = 0;  // the instruction flushes subnormals and keeps the payload of a NaN
#pragma GCC unroll 4
  for (int j = 0; j < N; j++) special |= is_nan_or_subnormal((Z)v[j]);
  if (__builtin_expect(special == 0, 1)) {
#pragma GCC unroll 4
    for (int j = 0; j < N; j++) store_half(to + j * LANES, as_bf16((Z)v[j]));
    return;
  }
#endif
#pragma GCC unroll 4
  for (int j = 0; j < N; j++) {
    const V x = v[j];  // a copy: sums indexed at run time would not stay in registers
    for (int i = 0; i < LANES; i++) to[j * LANES + i] = to_bf16(x[i]);
  }
}

// Turns the sums of a tile into rows of y: times the scales of rows and columns, plus the bias.
struct Epilogue {
  const float *of_a, *of_b, *bias;  // for the panel's columns, one entry a column
  char* y;                          // the first element of the tile
  int64_t type, stride, rows, columns;
};

// --- the register tile: MR rows of a against NR columns of y, over units of k ----------------------------------------

// The job of a tile: its sums over some units, with or without scales a step, added to earlier sums or not.
struct Tile {
  float* sums;          // MR x NR, row by row
  bool more;            // whether there are earlier sums to add to
  const float* of_a;    // STEPS: scales of the rows of a, and of the rows of b (columns of y); else null
  const float* of_b;
  const Epilogue* end;  // null: more units follow
  const char* ahead;    // the bytes that the next block of tiles reads, and how many of them each unit prefetches
  int64_t ahead_step;
};

// Stores values in fp32 or fp16, or those of a narrow last panel.
template <int NR>
void put_rows(const float* values, const Epilogue& e) {
  for (int64_t r = 0; r < e.rows; r++, values += NR) {
    char* y = e.y + r * e.stride;
    uint16_t v[NR];
    if (e.type == 1)
      for (int j = 0; j < NR; j++) v[j] = to_bf16(values[j]);
    else if (e.type == 2)
      for (int j = 0; j < NR; j++) v[j] = to_fp16(values[j]);
    if (e.type)
      std::memcpy(y, v, e.columns * 2);
    else
      std::memcpy(y, values, e.columns * 4);
  }
}

template <class Isa>
void tile_sum(const typename Isa::Word* a, const Layout& layout, const typename Isa::Word* b, int64_t units,
              const Tile& tile) {
  typedef typename Isa::V V;
  constexpr int N = Isa::VECTORS;
  const int64_t row = layout.row, unit = layout.unit;
  V s[MR][N];
#pragma GCC unroll 6
  for (int i = 0; i < MR; i++)
#pragma GCC unroll 4
    for (int j = 0; j < N; j++) s[i][j] = V{};
  const char* ahead = tile.ahead;
  for (int64_t u = 0; u < units; u++, a += unit, b += Isa::NR, ahead += tile.ahead_step) {
    __builtin_prefetch(ahead, 0, 2);
    V x[N];
#pragma GCC unroll 4
    for (int j = 0; j < N; j++) x[j] = ((const V*)b)[j];
#pragma GCC unroll 6
    for (int i = 0; i < MR; i++)
#pragma GCC unroll 4
      for (int j = 0; j < N; j++) s[i][j] = Isa::step(s[i][j], x[j], a + i * row);
  }
  V* to = (V*)tile.sums;
  if (tile.of_a) {
    V y[N];
#pragma GCC unroll 4
    for (int j = 0; j < N; j++) y[j] = ((const V*)tile.of_b)[j];
#pragma GCC unroll 6
    for (int i = 0; i < MR; i++)
#pragma GCC unroll 4
      for (int j = 0; j < N; j++) s[i][j] = s[i][j] * tile.of_a[i] * y[j];
  }
  if (tile.more)
#pragma GCC unroll 6
    for (int i = 0; i < MR; i++)
#pragma GCC unroll 4
      for (int j = 0; j < N; j++) s[i][j] = to[i * N + j] + s[i][j];
  if (const Epilogue* e = tile.end) {
    const V *of_b = (const V*)e->of_b, *bias = (const V*)e->bias;
#pragma GCC unroll 6
    for (int i = 0; i < MR; i++)
#pragma GCC unroll 4
      for (int j = 0; j < N; j++) s[i][j] = s[i][j] * e->of_a[i] * of_b[j] + bias[j];
    if (e->type == 1 && e->columns == Isa::NR) {
#pragma GCC unroll 6
      for (int i = 0; i < MR; i++) {
        if (i == e->rows) return;
        put_bf16<N>(s[i], (uint16_t*)(e->y + i * e->stride));
      }
      return;
    }
  }
#pragma GCC unroll 6
  for (int i = 0; i < MR; i++)
#pragma GCC unroll 4
    for (int j = 0; j < N; j++) to[i * N + j] = s[i][j];
  if (tile.end) put_rows<Isa::NR>(tile.sums, *tile.end);
}

// The same for a tile whose sums are in memory.
template <int NR>
void end_in_memory(float* sums, const Epilogue& e) {
  for (int i = 0; i < MR; i++)
    for (int j = 0; j < NR; j++) sums[i * NR + j] = sums[i * NR + j] * e.of_a[i] * e.of_b[j] + e.bias[j];
  put_rows<NR>(sums, e);
}

}  // namespace

#if OTTAVA_LEVEL == 5
#include "gemm_neon.h"
typedef Bfmmla Chosen;
#elif OTTAVA_LEVEL == 4
typedef Fp32<4, 3> Chosen;
#elif OTTAVA_LEVEL == 3
typedef Bf16 Chosen;
#elif OTTAVA_LEVEL == 2
typedef Fp32<16, 4> Chosen;
#elif OTTAVA_LEVEL == 1
typedef Fp32<8, 2> Chosen;
#else
typedef Fp32<4, 2> Chosen;
#endif

namespace {

// --- the walk --------------------------------------------------------------------------------------------------------

inline int thread_number() {
#if defined(_OPENMP)
  return omp_get_thread_num();
#else
  return 0;
#endif
}

struct Memory {
  const void* at;
  int64_t bytes;
};

template <class Isa>
struct Walk {
  typedef typename Isa::Word Word;
  const Operand &a, &b;
  const Result& y;
  Mode mode;
  int64_t units, chunk;  // chunk: units of one sum
  Layout layout;

  int64_t spans() const { return larger<int64_t>(SPAN / (chunk * Isa::NR * 4), 1) * chunk; }

  // Rows [m0, m0 + rows) of y x one panel that begins at column n0. `after`: the bytes that it prefetches meanwhile.
  void block(const Word* packed_a, int64_t m0, int64_t rows, const Word* panel, int64_t n0, float* sums,
             const Memory& after) const {
    const int64_t width = b.side.rows, columns = smaller<int64_t>(Isa::NR, width - n0), size = y.type == 0 ? 4 : 2;
    float bias[Isa::NR];
    fill(bias, Isa::NR, -0.0f);  // x + -0 is x
    for (int64_t j = 0; y.bias && j < columns; j++) bias[j] = number(y.bias, y.bias_type, n0 + j);
    Epilogue end{nullptr, b.row_scale.get() + n0, bias, nullptr, y.type, width * size, 0, columns};
    const int64_t span = spans();
    for (int64_t from = 0, to; from < units; from = to) {
      to = smaller(units, from + span);
      const Memory next = to < units ? Memory{panel + to * Isa::NR, span * Isa::NR * 4} : after;
      const int64_t share = ceil_div(next.bytes, ceil_div(rows, MR) * (to - from));  // for one unit of one tile
      const char* ahead = (const char*)next.at;
      for (int64_t i = 0; i < rows; i += MR)
        for (int64_t u = from; u < to; u += chunk) {
          const int64_t count = smaller(chunk, to - u);
          Tile tile{sums + (units > span ? i * Isa::NR : 0), u > 0, nullptr, nullptr, nullptr, ahead, share};
          ahead += share * count;
          if (mode == STEPS) {
            tile.of_a = a.step_scale.get() + u / chunk * a.padded + m0 + i;
            tile.of_b = b.step_scale.get() + u / chunk * b.padded + n0;
          }
          if (u + chunk >= units) {
            end.of_a = a.row_scale.get() + m0 + i;
            end.y = (char*)y.data + ((m0 + i) * width + n0) * size;
            end.rows = smaller<int64_t>(MR, rows - i);
            for (int64_t r = 0; r < end.rows; r++)
              for (int64_t at = 0; at < columns * size; at += 64) __builtin_prefetch(end.y + r * end.stride + at, 1);
            tile.end = &end;
          }
          tile_sum<Isa>(packed_a + i / MR * layout.tile + u * layout.unit, layout, panel + u * Isa::NR, count, tile);
        }
    }
  }

  // For few rows: each thread has all of a, packs a panel of b, and multiplies it while the panel is in L2.
  bool run_few(int threads) const {
    const int64_t m = a.side.rows, panels = ceil_div(b.side.rows, Isa::NR), tiles = ceil_div(m, MR);
    const int64_t a_words = ceil_div(tiles * layout.tile, 16) * 16 + 64;  // whole cache lines: the panel follows
    const int64_t own = a_words + units * Isa::NR + tiles * MR * Isa::NR;
    Array<Word> memory(threads * own);
    if (!memory) return false;
#pragma omp parallel num_threads(threads)
    {
      Word* packed_a = memory.get() + thread_number() * own;
      Word* panel = packed_a + a_words;
      float* sums = (float*)(panel + units * Isa::NR);
      pack_block<Isa>(a, 0, m, layout, packed_a);
#pragma omp for schedule(dynamic, 1)
      for (int64_t p = 0; p < panels; p++) {
        pack_panel<Isa>(b, p * Isa::NR, 0, units, panel);
        block(packed_a, 0, m, panel, p * Isa::NR, sums, codes(b, (p + threads) * Isa::NR, Isa::NR));
      }
    }
    return true;
  }

  // The scales of some rows, if they lie together.
  static Memory codes(const Operand& o, int64_t r0, int64_t rows) {
    const int64_t size = o.side.table ? 1 : 2;
    return {o.side.codes + r0 * o.side.row_stride * size, o.side.col_stride == 1 ? rows * o.k * size : 0};
  }

  bool run(int threads) const {
    int64_t m = a.side.rows, panels = ceil_div(b.side.rows, Isa::NR), panel_words = units * Isa::NR;
    const int64_t a_bytes = ceil_div(m, MR) * layout.tile * (int64_t)sizeof(Word);
    const bool shared_evenly = panels % threads == 0 || panels >= 16 * threads;
    if (m <= FEW_ROWS && a_bytes <= FEW_BYTES && shared_evenly) return run_few(threads);
    int64_t at_once = between<int64_t>(PANEL_BYTES / (panel_words * 4), 1, panels);
    at_once = ceil_div(panels, ceil_div(panels, at_once));
    int64_t blocks = ceil_div(m, ROWS);
    if (blocks > 1) blocks = ceil_div(blocks, threads) * threads;
    int64_t rows = ceil_div(ceil_div(m, blocks), MR) * MR;
    blocks = ceil_div(m, rows);
    int64_t groups = between<int64_t>(ceil_div(2 * threads, blocks), 1, at_once);  // few rows: share out columns
    if (blocks % threads == 0) groups = 1;
    Array<Word> packed(at_once * panel_words);
    int64_t a_words = ceil_div(rows, MR) * layout.tile + 64;
    Array<Word> blocks_of_a(threads * a_words);
    Array<float> sums(threads * rows * Isa::NR);
    if (!packed || !blocks_of_a || !sums) return false;
    int64_t pieces = ceil_div(units, 512);
#pragma omp parallel num_threads(threads)
    {
      const int me = thread_number();
      Word* own = blocks_of_a.get() + me * a_words;
      for (int64_t p0 = 0; p0 < panels; p0 += at_once) {
        int64_t p1 = smaller(panels, p0 + at_once), per_group = ceil_div(p1 - p0, groups);
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < (p1 - p0) * pieces; i++) {
          int64_t p = i / pieces, u0 = i % pieces * 512, u1 = smaller(units, u0 + 512);
          pack_panel<Isa>(b, (p0 + p) * Isa::NR, u0, u1, packed.get() + p * panel_words + u0 * Isa::NR);
        }
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < blocks * groups; i++) {
          int64_t m0 = i / groups * rows, count = smaller(rows, m - m0), first = p0 + i % groups * per_group;
          pack_block<Isa>(a, m0, count, layout, own);
          const Memory later = codes(a, m0 + threads * rows, rows);
          for (int64_t p = first, end = smaller(p1, first + per_group); p < end; p++) {
            const Word* panel = packed.get() + (p - p0) * panel_words;
            block(own, m0, count, panel, p * Isa::NR, sums.get() + me * rows * Isa::NR,
                  p + 1 < end ? Memory{panel + panel_words, smaller(spans(), units) * Isa::NR * 4} : later);
          }
        }
      }
    }
    return true;
  }
};

template <class Isa>
bool walk(Operand& a, Operand& b, const Result& y, Mode mode, int64_t step, int threads) {
  int64_t chunk = mode == STEPS ? step : CHUNK;
  return Walk<Isa>{a, b, y, mode, ceil_div(a.k, Isa::UNIT), ceil_div(chunk, Isa::UNIT), layout_of_a<Isa>(a)}.run(threads);
}

}  // namespace

extern "C" {

int ottava_gemm_level() { return OTTAVA_LEVEL; }

// Steps of k in a word: scales change between words.
int ottava_gemm_unit() { return Chosen::UNIT; }

// Returns the mode that ran, or -1 if there was no memory.
int ottava_gemm(const Call* call) {
  const int64_t k = call->k, step = call->step;
  Operand a(call->a, k), b(call->b, k);
  if (!a.row_scale || !b.row_scale) return -1;
  Mode mode = step >= k ? PLAIN : STEPS;
  if (mode == STEPS && call->exact) {
    int octaves = fold(a) + fold(b);
    if (octaves >= NO_MEMORY) return -1;
    if (octaves <= FOLD_OCTAVES) mode = FOLD;
  }
  if (mode == STEPS && !(scale_steps(a, step) && scale_steps(b, step))) return -1;
  return walk<Chosen>(a, b, call->y, mode, step, (int)call->threads) ? mode : -1;
}
}
