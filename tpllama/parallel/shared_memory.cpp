// The hot path of shared_memory.py, which describes the protocol: copy in, count in, wait, combine.
//
// Ranks are processes that map the same memory. A rank stores its counter after all that it did to slots, and others
// load it before they touch them: that is all the ordering there is, on any processor.
//
// No call waits for long: it returns the rank that is late, its caller looks whether that one still lives, and calls
// again with the same arguments. `State` knows how far it was.

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "../team.h"

// The loops are compiled for each of these, and the processor's best is chosen when the library is loaded.
#if defined(__x86_64__) && __GNUC__ >= 12
#define FOR_EACH_PROCESSOR __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#elif defined(__x86_64__)
#define FOR_EACH_PROCESSOR __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define FOR_EACH_PROCESSOR
#endif
#define INLINE inline __attribute__((always_inline))  // into each of the clones
#pragma GCC optimize("no-trapping-math")  // nobody asks for floating point's exceptions; more is vectorized without

namespace {

using Counter = std::atomic<int64_t>;
using Clock = std::chrono::steady_clock;
static_assert(Counter::is_always_lock_free);

constexpr int64_t NOBODY = DONE, COUNTER_STRIDE = 8;  // a cache line each
// From here on a rank adds up its share of a message and takes the other shares from the ranks that added those: two
// waits in place of one, but less to read.
constexpr int64_t SHARED_BYTES = 1 << 13;
// While waiting, give way for so long, then sleep; return when this long has gone by.
constexpr std::chrono::milliseconds YIELDING{5};
constexpr timespec PATIENCE{0, 200'000'000};

struct State {  // `_State` in shared_memory.py
  int64_t rank, size, slot_bytes, spins;
  Counter* counters;  // one per rank, then how many ranks sleep
  char* slots;        // [size, 2, slot_bytes]
  int64_t operation;  // the last one that this rank has entered
  // How far an unfinished call is: bytes that are finished, operations entered for the next ones, who is waited for.
  int64_t done, entered, late;
};

char* slot(const State& s, int64_t rank, int64_t operation) {
  return s.slots + (2 * rank + (operation & 1)) * s.slot_bytes;
}
char* next_slot(const State& s) { return slot(s, s.rank, s.operation + 1); }

Counter& counter(const State& s, int64_t index) { return s.counters[index * COUNTER_STRIDE]; }
bool is_in(const State& s, int64_t rank) { return counter(s, rank).load(std::memory_order_acquire) >= s.operation; }

bool futex(const State& s, int64_t rank, int operation, uint32_t value) {
  auto* low = reinterpret_cast<uint32_t*>(&counter(s, rank)) + (__BYTE_ORDER__ == __ORDER_BIG_ENDIAN__);
  return syscall(SYS_futex, low, operation, value, &PATIENCE) >= 0 || errno == EAGAIN;
}

// Either this sees that a rank sleeps, or that rank sees the count before it falls asleep: all four accesses are
// sequentially consistent.
void enter(State& s) {
  counter(s, s.rank).store(++s.operation);
  if (counter(s, s.size).load() > 0) futex(s, s.rank, FUTEX_WAKE, INT32_MAX);
}

// Whether `rank` is in before patience ends, or a signal wants to be seen.
bool wait(State& s, int64_t rank) {
  if (s.spins > 0 && s.late != rank) {  // with cores for all, and not after a sleep
    for (int64_t spins = s.spins; spins > 0 && !is_in(s, rank); --spins) relax();
    if (!is_in(s, rank))
      for (const auto end = Clock::now() + YIELDING; !is_in(s, rank) && Clock::now() < end;) sched_yield();
  }
  if (!is_in(s, rank)) {
    counter(s, s.size).fetch_add(1);
    int64_t seen;
    while ((seen = counter(s, rank).load()) < s.operation && futex(s, rank, FUTEX_WAIT, uint32_t(seen))) {}
    counter(s, s.size).fetch_sub(1);
  }
  s.late = is_in(s, rank) ? NOBODY : rank;
  return s.late == NOBODY;
}

// Prepares a slot, enters and waits for all: then their slots may be read until the next operation is entered. Does
// only what is left to do if this is a call's `nth` operation and it was entered before.
template <class Prepare> bool meet(State& s, int64_t nth, Prepare prepare) {
  if (s.entered < nth) {
    prepare(next_slot(s));
    enter(s);
    s.entered = nth;
  }
  for (int64_t rank = 0; rank < s.size; ++rank)
    if (!wait(s, rank)) return false;
  return true;
}

template <class To, class From> INLINE To bits_of(From from) {
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

// Both round to the nearest, ties to even, as torch does. Written without branches, so that loops become vectors.
struct BFloat16 {
  uint16_t bits;
  INLINE operator float() const { return bits_of<float>(uint32_t{bits} << 16); }
  static INLINE BFloat16 of(float value) {
    const uint32_t wide = bits_of<uint32_t>(value);
    const uint32_t rounded = (wide + 0x7fff + ((wide >> 16) & 1)) >> 16;
    return {uint16_t(value != value ? 0x7fc0 : rounded)};
  }
};

struct Float16 {
  uint16_t bits;
  INLINE operator float() const {
    const uint32_t magnitude = uint32_t(bits & 0x7fff) << 13, sign = uint32_t(bits & 0x8000) << 16;
    const uint32_t normal = magnitude + (112u << 23);  // the difference of the exponents' biases
    const float tiny = bits_of<float>(normal + (1u << 23)) - bits_of<float>(113u << 23);
    const uint32_t finite = magnitude < (1u << 23) ? bits_of<uint32_t>(tiny) : normal;
    return bits_of<float>(sign | (magnitude >= (0x7c00u << 13) ? magnitude + (224u << 23) : finite));
  }
  static INLINE Float16 of(float value) {
    const uint32_t wide = bits_of<uint32_t>(value), magnitude = wide & 0x7fffffff;
    // Adding 0.5 leaves a multiple of 2^-24, the smallest Float16, in the lowest bits.
    const uint32_t tiny = bits_of<uint32_t>(bits_of<float>(magnitude) + 0.5f) - bits_of<uint32_t>(0.5f);
    const uint32_t normal = (magnitude - (112u << 23) + 0xfff + ((magnitude >> 13) & 1)) >> 13;
    const uint32_t huge = magnitude > (255u << 23) ? 0x7e00 : 0x7c00;  // NaN or infinity
    const uint32_t finite = magnitude < (113u << 23) ? tiny : normal;
    return {uint16_t((wide >> 16 & 0x8000) | (magnitude >= (143u << 23) ? huge : finite))};
  }
};

template <class T> INLINE T sum(T a, T b) {
  if constexpr (std::is_floating_point_v<T>) return a + b;
  else if constexpr (std::is_integral_v<T>) return T(std::make_unsigned_t<T>(a) + std::make_unsigned_t<T>(b));  // wraps
  else return T::of(sum<float>(a, b));
}

template <class T> INLINE T max(T a, T b) {
  if constexpr (std::is_arithmetic_v<T>) return a > b || a != a ? a : b;  // NaN, where either is
  else return T::of(max<float>(a, b));
}

// out = a + b or max(a, b). out may be a.
template <class T> INLINE void combine_as(bool is_max, char* to, const char* left, const char* right, int64_t bytes) {
  T* out = reinterpret_cast<T*>(to);
  const T *a = reinterpret_cast<const T*>(left), *b = reinterpret_cast<const T*>(right);
  const int64_t count = bytes / int64_t{sizeof(T)};
  if (is_max)
#pragma GCC ivdep
    for (int64_t i = 0; i < count; ++i) out[i] = max(a[i], b[i]);
  else
#pragma GCC ivdep
    for (int64_t i = 0; i < count; ++i) out[i] = sum(a[i], b[i]);
}

FOR_EACH_PROCESSOR void combine(int64_t kind, bool is_max, char* out, const char* a, const char* b, int64_t bytes) {
  switch (kind) {  // `_NATIVE_DTYPES` in shared_memory.py
    case 0: return combine_as<BFloat16>(is_max, out, a, b, bytes);
    case 1: return combine_as<Float16>(is_max, out, a, b, bytes);
    case 2: return combine_as<float>(is_max, out, a, b, bytes);
    case 3: return combine_as<double>(is_max, out, a, b, bytes);
    case 4: return combine_as<int64_t>(is_max, out, a, b, bytes);
    case 5: return combine_as<int32_t>(is_max, out, a, b, bytes);
    case 6: return combine_as<int16_t>(is_max, out, a, b, bytes);
    case 7: return combine_as<int8_t>(is_max, out, a, b, bytes);
    case 8: return combine_as<uint8_t>(is_max, out, a, b, bytes);
  }
}

// Bytes [begin, end) of all ranks' messages, in rank order, which makes for the same bits wherever it is done.
void combine_all(const State& s, const char* own, int64_t kind, bool is_max, char* out, int64_t begin, int64_t end) {
  const auto from = [&](int64_t rank) { return (rank == s.rank ? own : slot(s, rank, s.operation)) + begin; };
  out += begin;
  combine(kind, is_max, out, from(0), from(1), end - begin);
  for (int64_t rank = 2; rank < s.size; ++rank) combine(kind, is_max, out, out, from(rank), end - begin);
}

bool reduce_small(State& s, char* x, int64_t bytes, int64_t kind, bool is_max) {
  if (!meet(s, 1, [=](char* own) { std::memcpy(own, x, bytes); })) return false;
  combine_all(s, slot(s, s.rank, s.operation), kind, is_max, x, 0, bytes);  // not from x, which is written to
  return true;
}

bool reduce_shared(State& s, char* x, int64_t bytes, int64_t kind, bool is_max) {
  const int64_t share = (bytes / s.size / 64 + 1) * 64;
  const auto border = [=](int64_t rank) { return std::min(rank * share, bytes); };
  const int64_t begin = border(s.rank), end = border(s.rank + 1);
  const auto give_others_shares = [=](char* own) {
    std::memcpy(own, x, begin);
    std::memcpy(own + end, x + end, bytes - end);
  };
  const auto give_result = [&](char* own) { combine_all(s, x, kind, is_max, own, begin, end); };
  if (!meet(s, 1, give_others_shares) || !meet(s, 2, give_result)) return false;
  for (int64_t rank = 0; rank < s.size; ++rank)
    std::memcpy(x + border(rank), slot(s, rank, s.operation) + border(rank), border(rank + 1) - border(rank));
  return true;
}

// Does `step(done, bytes)` for one part of a message after the other, none longer than a slot. NOBODY when all are
// done, or the rank that is late.
template <class Step> int64_t in_parts(State& s, int64_t total, Step step) {
  while (s.done < total) {
    const int64_t bytes = std::min(s.slot_bytes, total - s.done);
    if (!step(s.done, bytes)) return s.late;
    s.done += bytes;
    s.entered = 0;
  }
  s.done = 0;
  return NOBODY;
}

}  // namespace

// What is asked of a function; `_Message` in shared_memory.py.
struct Message {
  int64_t bytes, kind, is_max;
  State* state;
  char* x;
  char* out;  // gathered
};

extern "C" Size reduce(const Message& asked, Team&) {
  return in_parts(*asked.state, asked.bytes, [&](int64_t done, int64_t part) {
    const auto way = part < SHARED_BYTES ? reduce_small : reduce_shared;
    return way(*asked.state, asked.x + done, part, asked.kind, asked.is_max != 0);
  });
}

extern "C" Size gather(const Message& asked, Team&) {
  State& s = *asked.state;
  return in_parts(s, asked.bytes, [&](int64_t done, int64_t part) {
    if (!meet(s, 1, [&](char* own) { std::memcpy(own, asked.x + done, part); })) return false;
    for (int64_t rank = 0; rank < s.size; ++rank)
      std::memcpy(asked.out + rank * asked.bytes + done, slot(s, rank, s.operation), part);
    return true;
  });
}

// For messages that the caller copies in and out itself.
extern "C" Size exchange(const Message& asked, Team&) {
  return in_parts(*asked.state, 1, [&](int64_t, int64_t) { return meet(*asked.state, 1, [](char*) {}); });
}
