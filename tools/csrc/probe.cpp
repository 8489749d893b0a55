// What the machine can do between its cores: the latency of a cache line and the time to move bytes. No collective can
// beat the sum of its parts, so `phalanx bench` prints that sum beside each row.
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "clock.h"
#include "phalanx_bench.h"

namespace {

// GCC and Clang make a version for each instruction set and choose when the library is loaded. Sanitizers start later
// than that choice, so they get the plain version.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(__SANITIZE_ADDRESS__) && \
    !defined(__SANITIZE_THREAD__)
#define PHXB_VECTOR __attribute__((target_clones("default", "avx2", "avx512f")))
#else
#define PHXB_VECTOR
#endif

constexpr size_t kLine = 128;  // two lines: the neighbour line is fetched too
constexpr size_t kPage = 4096;
constexpr size_t kChunk = PHXB_PROBE_CHUNK;
constexpr int kWays = 4;  // pages that a wide loop keeps in flight

struct alignas(kLine) Flag {
  std::atomic<uint64_t> count;
};
// Barriers take turns on as many lines of each rank: on one alone, the store of the next barrier would have to wait for
// a peer that still reads that of the last one.
constexpr size_t kLines = 4;

struct Header {  // all zero at first
  Flag ping, pong;
  Flag stop;
  Flag barriers[PHXB_MAX_RANKS];         // at which the rank has arrived: read by itself alone
  Flag arrived[kLines][PHXB_MAX_RANKS];  // the same, each in its turn
  Flag took[PHXB_MAX_RANKS];             // nanoseconds
};

constexpr size_t rank_bytes() { return kChunk + 2 * size_t{PHXB_PROBE_MAX}; }
constexpr size_t header_bytes() { return (sizeof(Header) + kPage - 1) / kPage * kPage; }

Header &header(const phxb_probe &probe) { return *static_cast<Header *>(probe.shared); }
char *staging(const phxb_probe &probe, int rank) {
  return static_cast<char *>(probe.shared) + header_bytes() + rank_bytes() * static_cast<size_t>(rank);
}
char *block(const phxb_probe &probe, int rank) { return staging(probe, rank) + kChunk; }

inline void pause_core() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

// How often to look before the core is given away. With a core of its own, a rank gives it away only when something
// else seems to run on the other's. Else it does at once when it waits for one on its own core, and for one on another
// only after about as long as the switch would take.
constexpr uint32_t kOwnCore = 2000, kSameCore = 0, kOtherCore = 100;

// Pairs with the release stores of barrier() and the round trip.
inline void wait_for(const std::atomic<uint64_t> &count, uint64_t value, uint32_t most) {
  for (uint32_t spins = 0; count.load(std::memory_order_acquire) < value; ++spins) {
    if (spins >= most)
      sched_yield();
    else
      pause_core();
  }
}

void barrier(const phxb_probe &probe) {
  Header &shared = header(probe);
  std::atomic<uint64_t> &done = shared.barriers[probe.rank].count;
  const uint64_t value = done.load(std::memory_order_relaxed) + 1;
  done.store(value, std::memory_order_relaxed);
  Flag *const line = shared.arrived[value % kLines];
  line[probe.rank].count.store(value, std::memory_order_release);  // pairs with the acquire in wait_for
  if (probe.cores == 0) {
    for (int rank = 0; rank < probe.ranks; ++rank) wait_for(line[rank].count, value, kOwnCore);
    return;
  }
  for (int rank = probe.rank % probe.cores; rank < probe.ranks; rank += probe.cores)
    wait_for(line[rank].count, value, kSameCore);
  for (int rank = 0; rank < probe.ranks; ++rank) wait_for(line[rank].count, value, kOtherCore);
}

// A little time, by chance. Barriers one after the other keep the difference with which two ranks arrive, for ever, up
// to the time that a line takes between them: a median of such barriers would be that of one difference.
void stray(const phxb_probe &probe) {
  static thread_local uint32_t state = 1;
  state = state * 1664525u + 1013904223u + static_cast<uint32_t>(probe.rank);
  for (uint32_t i = (state >> 16) % 64; i > 0; --i) phxb::fence();  // some nanoseconds
}

// Collective: nanoseconds of `body` and a barrier, on the slowest rank.
template <class Body>
double slowest_ns(const phxb_probe &probe, Body &&body) {
  Header &shared = header(probe);
  stray(probe);
  barrier(probe);
  phxb::fence();
  const uint64_t started = phxb::now_ns();
  body();
  phxb::fence();
  barrier(probe);
  shared.took[probe.rank].count.store(phxb::now_ns() - started, std::memory_order_relaxed);
  // Orders the stores before the loads; the first barrier of the next call, the loads before the next stores.
  barrier(probe);
  uint64_t most = 0;
  for (int rank = 0; rank < probe.ranks; ++rank)
    most = std::max(most, shared.took[rank].count.load(std::memory_order_relaxed));
  return static_cast<double>(most);
}

// Collective: whether rank 0 has used up its time, so that a busy machine makes few turns and not a long wait. There
// must be a barrier between two calls.
constexpr uint64_t kBudgetNs = 400 * 1000 * 1000;
bool out_of_time(const phxb_probe &probe, uint64_t started_ns) {
  std::atomic<uint64_t> &stop = header(probe).stop.count;
  if (probe.rank == 0) stop.store(phxb::now_ns() - started_ns > kBudgetNs ? 1 : 0, std::memory_order_relaxed);
  barrier(probe);  // orders the store before the loads
  return stop.load(std::memory_order_relaxed) != 0;
}

// Collective: nanoseconds of a barrier alone, on its slowest rank; one in `part` takes no longer.
double part_of_barriers(const phxb_probe &probe, uint32_t repeats, size_t part) {
  const uint64_t begun = phxb::now_ns();
  std::vector<double> slowest;
  do {
    for (int i = 0; i < 100; ++i) slowest.push_back(slowest_ns(probe, [] {}));
  } while (!out_of_time(probe, begun) && slowest.size() < repeats);
  std::sort(slowest.begin(), slowest.end());
  return slowest[slowest.size() / part];
}

bool valid(const phxb_probe *probe) {
  return probe != nullptr && probe->struct_size == sizeof *probe && probe->shared != nullptr && probe->ranks >= 1 &&
         probe->ranks <= PHXB_MAX_RANKS && probe->rank >= 0 && probe->rank < probe->ranks;
}

// ---- moving bytes -------------------------------------------------------------------------------------------------

PHXB_VECTOR void add(float *__restrict out, const float *__restrict a, const float *__restrict b, size_t count) {
  for (size_t i = 0; i < count; ++i) out[i] = a[i] + b[i];
}

// A core keeps more misses in flight when it reads several pages at once: each page has a prefetch stream of its own.
PHXB_VECTOR void add_wide(float *__restrict out, const float *__restrict a, const float *__restrict b, size_t pages) {
  constexpr size_t kFloats = kPage / sizeof(float), kStep = 64 / sizeof(float);
  for (size_t page = 0; page + kWays <= pages; page += kWays)
    for (size_t at = 0; at < kFloats; at += kStep)
      for (size_t way = 0; way < kWays; ++way) {
        const size_t from = (page + way) * kFloats + at;
        for (size_t i = 0; i < kStep; ++i) out[from + i] = a[from + i] + b[from + i];
      }
}

PHXB_VECTOR void copy_wide(char *__restrict out, const char *__restrict in, size_t pages) {
  for (size_t page = 0; page + kWays <= pages; page += kWays)
    for (size_t at = 0; at < kPage; at += 64)
      for (size_t way = 0; way < kWays; ++way)
        __builtin_memcpy(out + (page + way) * kPage + at, in + (page + way) * kPage + at, 64);
}

// Stores past the caches, for results that would not stay there: they spare the read of the lines they overwrite.
// As above else. x86-64 only: elsewhere compilers have no portable name for them.
#if defined(__x86_64__)
constexpr bool kStreams = true;
inline __m128i sum_of(const char *a, const char *b) {
  return _mm_castps_si128(
      _mm_add_ps(_mm_loadu_ps(reinterpret_cast<const float *>(a)), _mm_loadu_ps(reinterpret_cast<const float *>(b))));
}

// out = in, or a + in where there is an a.
void stream_wide(char *out, const char *a, const char *in, size_t pages) {
  for (size_t page = 0; page + kWays <= pages; page += kWays)
    for (size_t at = 0; at < kPage; at += 64)
      for (size_t way = 0; way < kWays; ++way)
        for (size_t i = 0; i < 64; i += 16) {
          const size_t from = (page + way) * kPage + at + i;
          const __m128i value = a != nullptr ? sum_of(a + from, in + from)
                                             : _mm_loadu_si128(reinterpret_cast<const __m128i *>(in + from));
          _mm_stream_si128(reinterpret_cast<__m128i *>(out + from), value);
        }
  _mm_sfence();
}
#else
constexpr bool kStreams = false;
void stream_wide(char *, const char *, const char *, size_t) {}
#endif

// The same as add, with the sum also in the lines that b came from: the exchange of an all-reduce in place.
PHXB_VECTOR void add_to_both(float *__restrict a, float *__restrict b, size_t count) {
  for (size_t i = 0; i < count; ++i) a[i] = b[i] = a[i] + b[i];
}

PHXB_VECTOR void add_to_both_wide(float *__restrict a, float *__restrict b, size_t pages) {
  constexpr size_t kFloats = kPage / sizeof(float), kStep = 64 / sizeof(float);
  for (size_t page = 0; page + kWays <= pages; page += kWays)
    for (size_t at = 0; at < kFloats; at += kStep)
      for (size_t way = 0; way < kWays; ++way) {
        const size_t from = (page + way) * kFloats + at;
        for (size_t i = 0; i < kStep; ++i) a[from + i] = b[from + i] = a[from + i] + b[from + i];
      }
}

void write_anew(char *memory, size_t bytes, uint32_t value) {
  auto *words = reinterpret_cast<float *>(memory);
  const float written = static_cast<float>(value & 15);
  for (size_t i = 0; i < bytes / sizeof(float); ++i) words[i] = written;
  phxb::fence();
}

// ---- timing them --------------------------------------------------------------------------------------------------

enum class Move { kCopy, kAdd, kAddToBoth };

// One way to move: what loops, and how much is staged at a time.
enum class Loop { kStraight, kWide, kStream };
struct Way {
  Loop loop;
  size_t chunk;
};
constexpr Way kTried[] = {{Loop::kStraight, size_t{32} << 10},
                          {Loop::kStraight, kChunk},
                          {Loop::kWide, size_t{64} << 10},
                          {Loop::kWide, kChunk},
                          {Loop::kStream, kChunk}};
constexpr size_t kTriedCount = sizeof kTried / sizeof kTried[0];
constexpr int kMostTurns = 63;

void move(Move how, Loop loop, char *out, char *own, char *in, size_t bytes) {
  const size_t pages = loop == Loop::kStraight ? 0 : bytes / kPage / kWays * kWays, done = pages * kPage,
               first = done / sizeof(float);
  const size_t rest = (bytes - done) / sizeof(float);
  auto *a = reinterpret_cast<float *>(own), *b = reinterpret_cast<float *>(in), *sum = reinterpret_cast<float *>(out);
  const bool streams = loop == Loop::kStream && how != Move::kAddToBoth;
  if (streams) stream_wide(out, how == Move::kAdd ? own : nullptr, in, pages);
  switch (how) {
    case Move::kCopy:
      if (!streams) copy_wide(out, in, pages);
      std::memcpy(out + done, in + done, bytes - done);
      return;
    case Move::kAdd:
      if (!streams) add_wide(sum, a, b, pages);
      add(sum + first, a + first, b + first, rest);
      return;
    case Move::kAddToBoth:
      add_to_both_wide(a, b, pages);
      add_to_both(a + first, b + first, rest);
      return;
  }
}

class Mover {
 public:
  Mover(const phxb_probe &probe, char *in, char *own, char *out, size_t bytes)
      : probe_(probe), in_(in), own_(own), out_(out), bytes_(bytes), clock_ns_(phxb_clock_ns()) {
    if (probe.cores == 0) barrier_ns_ = part_of_barriers(probe, 300, 2);
  }

  // One turn of every kind of move.
  void turn(const Way &way, double ns[PHXB_PROBE_KINDS]) {
    ns[PHXB_PULL_STAGED] = staged(Move::kCopy, way, &ns[PHXB_STAGE]);
    ns[PHXB_REDUCE_STAGED] = staged(Move::kAdd, way, &ns[PHXB_STAGE]);
    ns[PHXB_PULL] = direct(Move::kCopy, way);
    ns[PHXB_REDUCE] = direct(Move::kAdd, way);
    ns[PHXB_EXCHANGE] = direct(Move::kAddToBoth, way);
    write_anew(in_, bytes_, ++value_);
    barrier(probe_);
    ns[PHXB_COPY] = timed(Move::kCopy, way, out_, nullptr, in_, bytes_);
  }

 private:
  int neighbour() const { return (probe_.rank + 1) % probe_.ranks; }

  double timed(Move how, const Way &way, char *to, char *own, char *from, size_t bytes) const {
    phxb::fence();
    const uint64_t started = phxb::now_ns();
    move(how, way.loop, to, own, from, bytes);
    phxb::fence();
    const double taken = static_cast<double>(phxb::now_ns() - started) - clock_ns_;
    return taken > 0 ? taken : 0;
  }

  // The same for stores to lines that others have: until these can see them, which is later than the last of them has
  // been given to the core's store buffer. What a barrier takes longer with them before it, on the slowest rank. (Where
  // ranks share cores it takes many times as long, and the kernel has emptied the buffer before another one looks.)
  double timed_until_seen(Move how, const Way &way, char *to, char *own, char *from, size_t bytes) const {
    if (probe_.cores != 0) return timed(how, way, to, own, from, bytes);
    const double taken = slowest_ns(probe_, [&] { move(how, way.loop, to, own, from, bytes); }) - barrier_ns_;
    return taken > 0 ? taken : 0;
  }

  // All bytes through staging chunks. *stage and the result are the times of the two halves of it. What is added to is
  // not what was staged: a rank stages what others sum, and sums the rest, which it has not read before.
  double staged(Move how, const Way &way, double *stage) {
    write_anew(in_, bytes_, ++value_);
    if (how == Move::kAdd) write_anew(own_, bytes_, value_);
    const Way into_cache{way.loop == Loop::kStream ? Loop::kWide : way.loop, way.chunk};
    double taken = 0;
    *stage = 0;
    for (size_t at = 0; at < bytes_; at += way.chunk) {
      const size_t length = bytes_ - at < way.chunk ? bytes_ - at : way.chunk;
      *stage += timed_until_seen(Move::kCopy, into_cache, staging(probe_, probe_.rank), nullptr, in_ + at, length);
      barrier(probe_);
      taken += timed(how, way, out_ + at, own_ + at, staging(probe_, neighbour()), length);
      barrier(probe_);
    }
    return taken;
  }

  // The first half of a rank's block is for its neighbour to read, or to write; the second half is its own part.
  double direct(Move how, const Way &way) {
    char *mine = block(probe_, probe_.rank);
    write_anew(mine, bytes_, ++value_);
    write_anew(mine + PHXB_PROBE_MAX, bytes_, value_);
    barrier(probe_);
    char *const own = mine + PHXB_PROBE_MAX, *const theirs = block(probe_, neighbour());
    const double taken = how == Move::kAddToBoth ? timed_until_seen(how, way, out_, own, theirs, bytes_)
                                                 : timed(how, way, out_, own, theirs, bytes_);
    barrier(probe_);
    return taken;
  }

  const phxb_probe &probe_;
  char *in_, *own_, *out_;
  size_t bytes_;
  double clock_ns_;
  double barrier_ns_ = 0;  // bare, and timed as the others are
  uint32_t value_ = 0;
};

double median(double *times, int count) {
  std::sort(times, times + count);
  return times[count / 2];
}

}  // namespace

size_t phxb_probe_bytes(int32_t ranks) { return header_bytes() + rank_bytes() * static_cast<size_t>(ranks); }

double phxb_probe_round_trip(const phxb_probe *probe, uint32_t repeats) {
  if (!valid(probe) || probe->rank > 1 || probe->ranks < 2 || repeats == 0) return -1;
  Header &shared = header(*probe);
  auto &mine = probe->rank == 0 ? shared.ping.count : shared.pong.count;
  auto &theirs = probe->rank == 0 ? shared.pong.count : shared.ping.count;
  const uint64_t base = mine.load(std::memory_order_relaxed);
  const uint64_t started = phxb::now_ns();
  for (uint64_t i = base + 1; i <= base + repeats; ++i) {
    if (probe->rank == 1) wait_for(theirs, i, kOwnCore);
    mine.store(i, std::memory_order_release);  // pairs with the acquire in wait_for
    if (probe->rank == 0) wait_for(theirs, i, kOwnCore);
  }
  return static_cast<double>(phxb::now_ns() - started) / repeats;
}

double phxb_probe_barrier(const phxb_probe *probe, uint32_t repeats) {
  if (!valid(probe) || repeats == 0) return -1;
  constexpr uint32_t kAtOnce = 100;
  const uint64_t begun = phxb::now_ns();
  uint64_t taken = 0, done = 0;
  do {
    barrier(*probe);
    const uint64_t started = phxb::now_ns();
    for (uint32_t i = 0; i < kAtOnce; ++i) barrier(*probe);
    taken += phxb::now_ns() - started;
    done += kAtOnce;
  } while (!out_of_time(*probe, begun) && done < repeats);
  return static_cast<double>(taken) / static_cast<double>(done);
}

double phxb_probe_barrier_once(const phxb_probe *probe, uint32_t repeats) {
  if (!valid(probe) || repeats == 0) return -1;
  return part_of_barriers(*probe, repeats, 10);
}

int32_t phxb_probe_move(const phxb_probe *probe, size_t bytes, double ns[PHXB_PROBE_KINDS]) {
  if (!valid(probe) || bytes == 0 || bytes > PHXB_PROBE_MAX || bytes % 64 != 0) return PHXB_BAD_PLAN;
  auto *memory = static_cast<char *>(phxb_alloc(3 * bytes));
  if (memory == nullptr) return PHXB_BAD_PLAN;
  Mover mover(*probe, memory, memory + bytes, memory + 2 * bytes, bytes);
  const int turns = bytes >= (size_t{4} << 20) ? 3 : bytes > (size_t{64} << 10) ? 15 : kMostTurns;
  double times[PHXB_PROBE_KINDS][kMostTurns];
  for (size_t tried = 0; tried < kTriedCount; ++tried) {
    const Way &way = kTried[tried];
    // Small moves do not tell chunks apart, and stores past the caches cannot win.
    if (bytes <= kTried[0].chunk && tried > 0 && (way.loop != Loop::kWide || way.chunk != kChunk)) continue;
    if (way.loop == Loop::kStream && (!kStreams || bytes < (size_t{1} << 20))) continue;
    const uint64_t begun = phxb::now_ns();
    int done = 0;
    for (int turn = -1; turn < turns; ++turn) {  // the first one warms up
      double taken[PHXB_PROBE_KINDS];
      mover.turn(way, taken);
      for (int kind = 0; turn >= 0 && kind < PHXB_PROBE_KINDS; ++kind) times[kind][done] = taken[kind];
      if (turn >= 0) ++done;
      if (out_of_time(*probe, begun) && done > 0) break;
    }
    for (int kind = 0; kind < PHXB_PROBE_KINDS; ++kind) {
      const double found = median(times[kind], done);
      if (tried == 0 || found < ns[kind]) ns[kind] = found;
    }
  }
  phxb_free(memory, 3 * bytes);
  return PHXB_OK;
}
