#include "parallel.hpp"

#include <algorithm>
#include <atomic>
#include <system_error>
#include <thread>
#include <vector>

namespace peaksim {

void parallel_for(int64_t tasks, int threads, const std::function<void(int64_t, int)>& body) {
    threads = static_cast<int>(std::min<int64_t>(threads, tasks));
    std::atomic<int64_t> next{0};
    const auto work = [&](int worker) {
        for (int64_t task = next.fetch_add(1); task < tasks; task = next.fetch_add(1)) body(task, worker);
    };
    std::vector<std::thread> others;
    others.reserve(static_cast<size_t>(std::max(threads - 1, 0)));
    for (int worker = 1; worker < threads; ++worker) {
        try {
            others.emplace_back(work, worker);
        } catch (const std::system_error&) {
            break;
        }
    }
    work(0);
    for (std::thread& other : others) other.join();
}

int useful_threads(double work, int threads) {
    // Starting a thread costs some tens of microseconds; a core does a few million multiply-adds in that time.
    constexpr double kWorkPerThread = 4e6;
    return std::max(1, static_cast<int>(std::min<double>(threads, work / kWorkPerThread)));
}

}  // namespace peaksim
