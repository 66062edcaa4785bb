// The part of OpenMP that our kernels use, on pthreads: ThreadSanitizer sees how pthreads wait for each other, but not how
// libgomp's threads do, and would call every region a race. Hidden, so that a library finds these and not libgomp's.

#include <pthread.h>

#include <mutex>
#include <vector>

#pragma GCC visibility push(hidden)

namespace {

struct Team {
  void (*run)(void*);
  void* data;
  int size;
  pthread_barrier_t barrier;
  std::mutex lock;
  std::vector<long> next;  // of each loop of the region, the first iteration that nobody has taken
};

struct Member {
  Team* team = nullptr;
  int number = 0;
  size_t loop = 0;  // loops that this thread has begun
  long end = 0, step = 0, chunk = 0;
};

thread_local Member self;

void* work(void* given) {
  self = *static_cast<Member*>(given);
  self.team->run(self.team->data);
  return nullptr;
}

bool take(long* first, long* last) {
  std::lock_guard<std::mutex> held(self.team->lock);
  long& next = self.team->next[self.loop - 1];
  if (self.step > 0 ? next >= self.end : next <= self.end) return false;
  *first = next;
  next += self.step * self.chunk;
  *last = (self.step > 0 ? next < self.end : next > self.end) ? next : self.end;
  return true;
}

void begin(long start, long end, long step, long chunk) {
  std::lock_guard<std::mutex> held(self.team->lock);
  self.end = end, self.step = step, self.chunk = chunk;
  if (self.team->next.size() == self.loop) self.team->next.push_back(start);
  self.loop++;
}

}  // namespace

extern "C" {

int omp_get_thread_num() { return self.number; }
int omp_get_num_threads() { return self.team ? self.team->size : 1; }
int omp_get_max_threads() { return 4; }

void GOMP_barrier() {
  if (self.team) pthread_barrier_wait(&self.team->barrier);
}

void GOMP_parallel(void (*run)(void*), void* data, unsigned threads, unsigned) {
  Team team{run, data, threads ? int(threads) : omp_get_max_threads(), {}, {}, {}};
  pthread_barrier_init(&team.barrier, nullptr, team.size);
  const Member before = self;
  std::vector<Member> members(team.size);
  std::vector<pthread_t> others(team.size);
  for (int i = 0; i < team.size; i++) members[i].team = &team, members[i].number = i;
  for (int i = 1; i < team.size; i++) pthread_create(&others[i], nullptr, work, &members[i]);
  work(&members[0]);
  for (int i = 1; i < team.size; i++) pthread_join(others[i], nullptr);
  self = before;
  pthread_barrier_destroy(&team.barrier);
}

bool GOMP_loop_nonmonotonic_dynamic_start(long start, long end, long step, long chunk, long* first, long* last) {
  begin(start, end, step, chunk);
  return take(first, last);
}

bool GOMP_loop_nonmonotonic_dynamic_next(long* first, long* last) { return take(first, last); }
void GOMP_loop_end() { GOMP_barrier(); }
void GOMP_loop_end_nowait() {}

static std::mutex atomic;
void GOMP_atomic_start() { atomic.lock(); }
void GOMP_atomic_end() { atomic.unlock(); }

}  // extern "C"
