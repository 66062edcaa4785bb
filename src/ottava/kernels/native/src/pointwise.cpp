// Work between GEMMs that torch does in many passes over memory, here in one: SwiGLU and its gradient in bf16, and the
// rotation of heads. Every number is rounded where torch's operations round it, so the bits are theirs.
#include "base.h"
#include "floats.h"

extern "C" {
struct Slope {  // the two factors of silu's gradient: sigmoid(x), and 1 + x (1 - sigmoid(x))
  float sigmoid, rest;
};
struct Gated {           // as native.pointwise packs it
  const uint16_t* x;     // rows x 2 width, bf16: gates, then ups
  const uint16_t* dy;    // rows x width; null: forward
  uint16_t* out;         // y, rows x width, or dx, rows x 2 width
  const uint16_t* silu;  // of each of the 65,536 bf16 numbers
  const Slope* slope;    // at each of them
  int64_t rows, width, threads;
};
struct Rotation {
  const void* x;  // tokens x heads x size
  int64_t in_bf16;  // whether x is bf16; else it is fp32
  int64_t tokens, heads, size, token_stride, head_stride;
  void* y;  // the same without gaps
  int64_t out_bf16;
  const float *cos, *sin;  // angles x dim
  int64_t angles, dim;     // token t turns by row t % angles: the first dim entries of each head
  int64_t interleaved;     // whether neighbours are a pair
  int64_t back;            // whether it turns back
  int64_t threads;
};
}

namespace {

inline float of_bf16(uint16_t bits) { return BFloat16::value((int16_t)bits); }

void gate_row(const Gated& call, const uint16_t* gate, uint16_t* __restrict y) {
  const uint16_t* up = gate + call.width;
#pragma omp simd
  for (int64_t i = 0; i < call.width; i++) y[i] = to_bf16(of_bf16(call.silu[gate[i]]) * of_bf16(up[i]));
}

void gate_row_back(const Gated& call, const uint16_t* gate, const uint16_t* dy, uint16_t* __restrict d_gate) {
  const uint16_t* up = gate + call.width;
  uint16_t* __restrict d_up = d_gate + call.width;
#pragma omp simd
  for (int64_t i = 0; i < call.width; i++) {
    const uint16_t at = gate[i];
    const float d = of_bf16(dy[i]), d_act = of_bf16(to_bf16(d * of_bf16(up[i])));
    d_gate[i] = to_bf16(d_act * call.slope[at].sigmoid * call.slope[at].rest);
    d_up[i] = to_bf16(d * of_bf16(call.silu[at]));
  }
}

// One number in memory, fp32 or bf16.
inline float get(const float* at) { return *at; }
inline float get(const uint16_t* at) { return of_bf16(*at); }
inline void put(float* at, float x) { *at = x; }
inline void put(uint16_t* at, float x) { *at = to_bf16(x); }

// APART: entries between both of a pair; 0: half of those that turn. Then pairs lie side by side, which makes vectors.
template <int APART, class In, class Out>
void turn_head(const Rotation& call, const In* x, const float* cos, const float* sin, Out* __restrict y) {
  const int64_t pairs = call.dim / 2, apart = APART ? APART : pairs;
  const float *sin_first = sin + (call.back ? apart : 0), *sin_second = sin + (call.back ? 0 : apart);
#pragma omp simd
  for (int64_t i = 0; i < pairs; i++) {
    const int64_t at = APART ? 2 * i : i;
    const float first = get(x + at), second = get(x + at + apart);
    put(y + at, first * cos[at] + second * sin_first[at]);
    put(y + at + apart, second * cos[at + apart] + first * sin_second[at]);
  }
  for (int64_t i = call.dim; i < call.size; i++) put(y + i, get(x + i));
}

template <class In, class Out>
void turn(const Rotation& call) {
#pragma omp parallel for num_threads((int)call.threads) schedule(static)
  for (int64_t t = 0; t < call.tokens; t++) {
    const int64_t angle = t % call.angles * call.dim;
    const auto head = call.interleaved ? turn_head<1, In, Out> : turn_head<0, In, Out>;
    for (int64_t h = 0; h < call.heads; h++)
      head(call, (const In*)call.x + t * call.token_stride + h * call.head_stride, call.cos + angle, call.sin + angle,
           (Out*)call.y + (t * call.heads + h) * call.size);
  }
}

}  // namespace

extern "C" {

void ottava_swiglu(const Gated* call) {
  const int64_t width = call->width;
#pragma omp parallel for num_threads((int)call->threads) schedule(static)
  for (int64_t r = 0; r < call->rows; r++) {
    const uint16_t* gate = call->x + r * 2 * width;
    if (call->dy)
      gate_row_back(*call, gate, call->dy + r * width, call->out + r * 2 * width);
    else
      gate_row(*call, gate, call->out + r * width);
  }
}

void ottava_rotate_heads(const Rotation* call) {
  if (call->in_bf16)
    call->out_bf16 ? turn<uint16_t, uint16_t>(*call) : turn<uint16_t, float>(*call);
  else
    call->out_bf16 ? turn<float, uint16_t>(*call) : turn<float, float>(*call);
}
}
