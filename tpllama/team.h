// The threads of a call. Either one makes it, and OpenMP's others join it for loops; or all of a team make it together,
// as they make all calls of a recorded step (replay.cpp). Then each computes its parts, and what all of them compute
// it has for itself; what only one may write is done `by_one`.

#pragma once
#include <atomic>
#include <cstddef>
#include <sched.h>
#include <vector>

namespace {

using Size = std::ptrdiff_t;

struct alignas(64) Arrival { std::atomic<Size> meetings{0}; };
struct alignas(64) Taken { std::atomic<Size> parts{0}; };

struct Team {  // `_Team` in recording.py
    Size size;          // threads
    Size rank;          // of this thread in a team, or -1: it makes the call alone
    Size turn;          // of those who do something alone, in a team
    Size shares;        // how often a team took shares
    Arrival *arrivals;  // of a team's threads
    Taken *taken;       // of shares, in turns: [TURNS, size]
};

constexpr Size TURNS = 4;

constexpr Size SPINS = 20000;  // then a thread gives way: there may be fewer cores than threads

inline void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

// All of a team come here, and see what each wrote before it did.
inline void meet(const Team &team) {
    const Size meeting = team.arrivals[team.rank].meetings.load(std::memory_order_relaxed) + 1;
    team.arrivals[team.rank].meetings.store(meeting, std::memory_order_release);
    for (Size other = 0; other < team.size; other++)
        for (Size spins = 0; team.arrivals[other].meetings.load(std::memory_order_acquire) < meeting; spins++)
            spins < SPINS ? relax() : void(sched_yield());
}

inline bool is_together(const Team &team) { return team.rank >= 0; }

// part(0) to part(parts - 1), by all threads. Together, thread t does every part t modulo their number.
template <class Part> void share_out(Team &team, Size parts, const Part &part) {
    if (!is_together(team)) {
        #pragma omp parallel for num_threads(team.size) schedule(dynamic, 1) if (team.size > 1 && parts > 1)
        for (Size i = 0; i < parts; i++) part(i);
        return;
    }
    for (Size i = team.rank; i < parts; i += team.size) part(i);
    if (team.size > 1) meet(team);
}

// Parts that threads do one after another: first each its own share, then what others haven't begun, so that they end
// together although one of them may be slower.
class Shares {
public:
    Shares(Team &team, Size parts) : threads(team.size), parts(parts), own(is_together(team) ? 0 : threads) {
        taken = own.data();
        if (!is_together(team)) return;
        taken = team.taken + team.shares++ % TURNS * threads;
        // Nobody has come to those yet, and all are done with what they were used for before.
        team.taken[(team.shares + 1) % TURNS * threads + team.rank].parts.store(0, std::memory_order_relaxed);
    }
    // The next part for a thread; -1 when all are taken.
    Size next(Size thread) {
        for (Size i = 0; i < threads; i++) {
            const Size other = (thread + i) % threads, first = parts * other / threads;
            const Size count = parts * (other + 1) / threads - first;
            if (taken[other].parts.load(std::memory_order_relaxed) >= count) continue;
            const Size part = taken[other].parts.fetch_add(1, std::memory_order_relaxed);
            if (part < count) return first + part;
        }
        return -1;
    }

private:
    Size threads, parts;
    std::vector<Taken> own;
    Taken *taken;
};

// Together, threads take turns.
template <class Work> void by_one(Team &team, const Work &work) {
    if (!is_together(team) || team.turn++ % team.size == team.rank) work();
    if (is_together(team) && team.size > 1) meet(team);
}

constexpr Size DONE = -1;  // what functions return that a step may be made of
}  // namespace
