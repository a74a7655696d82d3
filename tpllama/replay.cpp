// The calls of a recorded step, made again by a team of threads: see recording.py.

#include <omp.h>

#include <vector>

#include "team.h"

struct Call {  // `_Call` in recording.py
    Size is_by_one;  // one thread makes it; else all do
    Size (*function)(const void *arguments, Team &team);
    const void *arguments;
};

extern "C" {

// Makes calls `first` to `count`. Where one ends with anything but DONE that is `*ended`, and its number is returned, to
// begin with it again; else `count`.
Size replay(const Call *calls, Size first, Size count, Size threads, Size *ended) {
    std::vector<Arrival> arrivals(threads);
    std::vector<Taken> taken(TURNS * threads);
    std::atomic<Size> stopped{count};
    *ended = DONE;
    #pragma omp parallel num_threads(threads) if (threads > 1)
    {
        Team team{omp_get_num_threads(), omp_get_thread_num(), 0, 0, arrivals.data(), taken.data()};
        for (Size i = first; i < count; i++) {
            const Call &call = calls[i];
            if (!call.is_by_one) {
                call.function(call.arguments, team);
                continue;
            }
            if (team.rank == 0 && (*ended = call.function(call.arguments, team)) != DONE) stopped = i;
            if (team.size > 1) meet(team);
            if (stopped == i) break;
        }
    }
    return stopped;
}
}
