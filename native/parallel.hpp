// Runs f(0) .. f(count - 1) on up to `threads` threads, the caller's included. Threads are started
// for the call and joined before it returns: nothing outlives it, so fork() stays safe.
// A new thread inherits the caller's floating-point mode (flush to zero, rounding).
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <system_error>
#include <thread>
#include <vector>

namespace zfunc {

template <class F>
void parallel_for(std::size_t count, int threads, const F& f) {
    std::atomic<std::size_t> next{0};
    const auto work = [&] {
        for (std::size_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < count;) f(i);
    };
    const std::size_t workers = std::min<std::size_t>(std::max(threads, 1), count);
    std::vector<std::thread> others;
    others.reserve(workers);
    try {
        while (others.size() + 1 < workers) others.emplace_back(work);
    } catch (const std::system_error&) {  // the system has no thread left: fewer do the same work
    }
    work();
    for (auto& other : others) other.join();
}

}  // namespace zfunc
