// A few threads that share loops. One job at a time; the thread that starts it works too, and is never made to wait for a
// helper that has not begun. It must wait for one that has: where neighbours on the machine take the processor away from a
// helper in the middle of its piece, that costs a time slice, far more than the help was worth. So after such a stall the
// caller works alone for a while, the longer the more often it happens.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>
#include <vector>

namespace qk {

// Works on items [begin, end). `thread` is below Pool::num_threads and is used by no other thread during the call.
using Task = void (*)(void* argument, int64_t begin, int64_t end, int thread);

class Pool {
  public:
    // `num_threads` counts the caller, so one starts no threads at all.
    explicit Pool(int num_threads);
    ~Pool();
    Pool(const Pool&) = delete;
    Pool& operator=(const Pool&) = delete;

    int num_threads() const { return int(threads_.size()) + 1; }

    // Runs `task` over [0, items), in pieces of `grain` items or more, and returns when all are done. Items are handed out as
    // threads ask for them: which thread computes an item changes from run to run, so no result may depend on it.
    void run(int64_t items, int64_t grain, Task task, void* argument);

  private:
    using Clock = std::chrono::steady_clock;

    void help(int thread);
    void work(int thread);
    bool await_job(uint32_t seen);
    void await_helpers();
    void learn(Clock::time_point start, Clock::time_point worked);

    // The job. Written only while no helper is inside.
    Task task_ = nullptr;
    void* argument_ = nullptr;
    int64_t items_ = 0, grain_ = 1;

    // How helpers have been doing lately.
    Clock::time_point alone_until_{};
    Clock::duration backoff_{};

    alignas(64) std::atomic<int64_t> next_{0};
    // Bit 31: a job is open; bit 30: the caller sleeps until the helpers are out; below: how many helpers are inside.
    alignas(64) std::atomic<uint32_t> inside_{0};
    alignas(64) std::atomic<uint32_t> epoch_{0};  // grows with every job; helpers sleep on it
    std::atomic<uint32_t> sleepers_{0};
    std::atomic<bool> stopping_{false};
    std::vector<std::thread> threads_;
};

}  // namespace qk
