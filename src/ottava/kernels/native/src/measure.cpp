// Sums over casts, see measure.h. It makes the casts first if the caller has none.

#include "channels.h"
#include "measure.h"

#ifndef OTTAVA_TYPE  // the type of x: each has its own library
#define OTTAVA_TYPE BFloat16
#endif

namespace {

struct Team {
  Scratch* each;

  explicit Team(int size) : each(new (std::nothrow) Scratch[size]) {}
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;
  ~Team() { delete[] each; }
};

inline int thread_number() {
#ifdef _OPENMP
  return omp_get_thread_num();
#else
  return 0;
#endif
}

inline void need(bool there) {
  if (!there) throw std::bad_alloc();
}

void measure_scales(const Job& job, const Library& library) {
  const int64_t* places = library.places;
  double &count = job.sums[places[sum::n_scales]], &first = job.sums[places[sum::scale_log2]];
  double& second = job.sums[places[sum::scale_log2_squared]];
  for (int64_t i = 0; i < job.scale_count; i++) {
    const double scale_inv = double(job.scale_inv[i]);
    if (!(scale_inv > 0)) continue;
    const int32_t bits = bits_of(job.scale_inv[i]);
    const bool power = (bits & 0x7fffff) == 0 && bits < INFINITE;  // a power of two: the exponent is its logarithm
    const double octaves = power ? double(127 - (bits >> 23)) : -__builtin_log2(scale_inv);
    count++;
    first += octaves;
    second += octaves * octaves;
    job.extremes[extreme::scale_max] = larger(job.extremes[extreme::scale_max], 1 / scale_inv);
    job.extremes[extreme::scale_min] = larger(job.extremes[extreme::scale_min], -1 / scale_inv);
  }
  const float amax = float(job.extent[LARGEST_FINITE]);
  if (!job.predicted || !(amax > 0)) return;
  float scale, scale_inv;  // an inverse has exactly one scale, so an unchanged amax gives no error
  library.scales(&amax, 1, job.cast, &scale, &scale_inv);
  const double error = first + __builtin_log2(double(scale_inv));
  job.sums[places[sum::n_predicted]] = 1;
  job.sums[places[sum::scale_error]] = job.extremes[extreme::scale_error_max] = error;
  job.extremes[extreme::scale_error_min] = -error;
}

// scratch: one a thread.
template <class T>
void measure(const Job& job, const Library& library, Scratch* scratch, int threads) {
  const int64_t bands = (job.rows + BAND - 1) / BAND, chunks = (job.cols + CHUNK - 1) / CHUNK;
  const bool histograms = job.detail >= EXPONENTS;
  const int share = int(between<int64_t>(job.rows * job.cols / 16384, 1, threads));
  // without histograms threads share a band: the sums of its groups are added in the same order
  const int64_t span = histograms || bands >= 2 * share ? BAND : GROUP, spans = (job.rows + span - 1) / span;
  const int team = int(smaller<int64_t>(spans, share));
  for (int i = 0; i < team; i++) {
    Scratch& s = scratch[i];
    need(s.blocks[1].make(histograms ? BAND * chunks : chunks));
    need(!histograms || (s.blocks[0].make(BAND) && s.blocks[2].make(BAND * ((job.cols + 31) / 32)) && s.blocks[3].make(chunks)));
    need(job.x_col == 1 || s.x.make(span * padded<typename T::Int>(job.cols) * int64_t(sizeof(typename T::Int))));
    need(job.code_col == 1 || s.codes.make(span * padded<uint8_t>(job.cols)));
  }
  const int64_t width = library.width, wave = smaller(spans, WAVE);
  const Array<double> slots((wave + 1) * (width + 3));
  need(bool(slots));
  double* whole = slots.get() + wave * (width + 3);  // of a band
  const Walk<T> walk(job, library.places);
  for (int64_t start = 0; start < spans; start += wave) {
    const int64_t count = smaller(wave, spans - start);
    fill(slots.get(), count * (width + 3), 0.0);
#pragma omp parallel for schedule(dynamic, 1) num_threads(team) if (team > 1)
    for (int64_t i = 0; i < count; i++) {
      const int thread = team > 1 ? thread_number() : 0;
      double* slot = slots.get() + i * (width + 3);
      slot[width + extreme::amin] = -__builtin_inf();
      const int64_t top = (start + i) * span;
      walk.band(top, smaller(span, job.rows - top), scratch[thread], slot, slot + width);
    }
    for (int64_t i = 0; i < count; i++) {
      const double* slot = slots.get() + i * (width + 3);
      const int64_t end = (start + i + 1) * span;
      if ((end - span) % BAND == 0) fill(whole, width, 0.0);
      for (int64_t k = 0; k < width; k++) whole[k] += slot[k];
      for (int64_t k = 0; k < width && (end % BAND == 0 || end >= job.rows); k++) job.sums[k] += whole[k];
      job.extremes[extreme::amin] = larger(job.extremes[extreme::amin], slot[width + extreme::amin]);
      job.extremes[extreme::max_error] = larger(job.extremes[extreme::max_error], slot[width + extreme::max_error]);
    }
  }
  const int64_t* places = library.places;
  job.sums[places[sum::n_total]] = job.extent[ELEMENTS];
  job.sums[places[sum::n_casts]] = 1;
  job.sums[places[sum::n_nonfinite]] = job.extent[NOT_FINITE];
  job.extremes[extreme::amax] = job.extent[LARGEST_FINITE];
  measure_scales(job, library);
  need(job.rows == 0 || measure_channels<T>(job, places, team));
}

// Casts a sample of rows, with the scale of the whole tensor where there is one for all of it.
template <class T>
void cast_and_measure(Job job, const Library& library, Scratch* scratch, int threads) {
  using Int = typename T::Int;
  const int64_t rows = job.rows, cols = job.cols;
  Array<Int> in_rows;
  if (job.x_col != 1) {
    const int64_t stride = padded<Int>(cols);
    need(in_rows.make(rows * stride));
    job.x = transpose(static_cast<const Int*>(job.x), job.x_col, rows, cols, in_rows.get(), stride);
    job.x_row = stride, job.x_col = 1;
  }
  float scale, scale_inv;
  const float largest = float(job.extent[LARGEST]);
  if (job.by_whole) {
    library.scales(&largest, 1, job.cast, &scale, &scale_inv);
    job.given = &scale;
  }
  const Array<uint8_t> codes(rows * cols);
  const Array<float> scales(job.scale_count), amaxes(job.scale_count);
  need(codes && scales && amaxes);
  const CastJob cast{job.x,     rows,        cols,         job.x_row,    job.block_rows, job.block_cols, job.cast,
                     job.given, codes.get(), scales.get(), amaxes.get(), nullptr,        0,              threads};
  need(library.quantize(&cast) == 0);
  for (int64_t i = 0; i < job.scale_count; i++) scales[i] = is_nan(scales[i]) ? 1.0f : scales[i];  // measure._with_scales
  job.codes = codes.get(), job.code_row = cols, job.code_col = 1;
  job.scale_inv = scales.get();
  measure<T>(job, library, scratch, threads);
}

// Returns 0, or 1 if there was no memory.
template <class T>
int run(const Job& job, const Library& library, Scratch* scratch, int threads) {
  for (int k = 0; k < extreme::COUNT; k++) job.extremes[k] = -__builtin_inf();  // of nothing
  job.extremes[extreme::amax] = job.extremes[extreme::max_error] = job.extremes[extreme::scale_max] = job.extremes[extreme::top_channel] = 0;
  try {
    if (job.codes == nullptr) cast_and_measure<T>(job, library, scratch, threads);
    else measure<T>(job, library, scratch, threads);
  } catch (const std::bad_alloc&) {
    return 1;
  }
  return 0;
}

}  // namespace

#define OTTAVA_NAME(name, bins) #name " " #bins " "
// Names and bins of the sums, in the order of `Library::places`; then the names of the extremes.
extern "C" const char* ottava_sums() { return OTTAVA_SUMS(OTTAVA_NAME); }
extern "C" const char* ottava_extremes() { return OTTAVA_EXTREMES(OTTAVA_NAME); }

// Fills sums and extremes of n jobs. All threads share a single job; several jobs are dealt to the threads. Returns 0, or
// 1 if there was no memory.
extern "C" int ottava_measure(const Job* jobs, int64_t n, const Library* library, int threads) {
  const int team = int(between<int64_t>(n, 1, threads));
  const Team scratch(n == 1 ? threads : team);
  if (scratch.each == nullptr) return 1;
  // not inside a region of one thread: libgomp makes new threads for every nested region
  if (n == 1) return run<OTTAVA_TYPE>(*jobs, *library, scratch.each, threads);
  int failed = 0;
#pragma omp parallel for schedule(dynamic, 1) num_threads(team) reduction(| : failed)
  for (int64_t i = 0; i < n; i++) failed |= run<OTTAVA_TYPE>(jobs[i], *library, scratch.each + thread_number(), 1);
  return failed;
}
