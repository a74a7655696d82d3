// The threads of a call. Either one makes it, and OpenMP's others join it for loops; or all of a team make it together,
// as they make all calls of a recorded step (replay.cpp). Then each computes its parts, and what all of them compute
// it has for itself; what only one may write is done `by_one`.

#pragma once
#include <atomic>
#include <cstddef>
#include <sched.h>

namespace {

using Size = std::ptrdiff_t;

struct alignas(64) Arrival { std::atomic<Size> meetings{0}; };

struct Team {  // `_Team` in recording.py
    Size size;          // threads
    Size rank;          // of this thread in a team, or -1: it makes the call alone
    Size turn;          // of those who do something alone, in a team
    Arrival *arrivals;  // of a team's threads
};

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
        #pragma omp parallel for num_threads(team.size) schedule(static, 1) if (team.size > 1 && parts > 1)
        for (Size i = 0; i < parts; i++) part(i);
        return;
    }
    for (Size i = team.rank; i < parts; i += team.size) part(i);
    if (team.size > 1) meet(team);
}

// Together, threads take turns.
template <class Work> void by_one(Team &team, const Work &work) {
    if (!is_together(team) || team.turn++ % team.size == team.rank) work();
    if (is_together(team) && team.size > 1) meet(team);
}

constexpr Size DONE = -1;  // what functions return that a step may be made of
}  // namespace
