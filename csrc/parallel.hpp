// A parallel loop whose threads live for one call: nothing to break in a forked child, nothing shared between
// callers, no state at import.
#pragma once

#include <cstdint>
#include <functional>

namespace peaksim {

// Calls body(task, worker) for every task in [0, tasks), worker in [0, threads). Tasks are handed out in
// ascending order; the calling thread is worker 0. `body` must not throw. If the system grants fewer threads,
// those there are do the work.
void parallel_for(int64_t tasks, int threads, const std::function<void(int64_t task, int worker)>& body);

// How many of `threads` are worth starting for `work` multiply-adds.
int useful_threads(double work, int threads);

}  // namespace peaksim
