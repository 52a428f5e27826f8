#include "pool.h"

#include <algorithm>

#ifdef __linux__
#include <linux/futex.h>
#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace qk {
namespace {

constexpr uint32_t OPEN = 1u << 31, CALLER_SLEEPS = 1u << 30, COUNT = CALLER_SLEEPS - 1;
using std::chrono::microseconds;
using std::chrono::milliseconds;

constexpr auto SPIN = microseconds(50);  // a little longer than the gaps between the kernels of a step
constexpr auto STALL = microseconds(150);
constexpr auto MIN_BACKOFF = milliseconds(4), MAX_BACKOFF = milliseconds(250);

void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// True once `ready()`; false when it has spun for a while.
template <class Ready>
bool spin_until(Ready ready) {
    const auto deadline = std::chrono::steady_clock::now() + SPIN;
    do {
        for (int i = 0; i < 32; ++i) {
            if (ready()) return true;
            relax();
        }
    } while (std::chrono::steady_clock::now() < deadline);
    return false;
}

#ifdef __linux__
void sleep_while(std::atomic<uint32_t>& word, uint32_t value) {
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
}
void wake(std::atomic<uint32_t>& word) {
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE_PRIVATE, INT32_MAX, nullptr, nullptr, 0);
}
#else
void sleep_while(std::atomic<uint32_t>& word, uint32_t value) {
    if (word.load() == value) std::this_thread::sleep_for(std::chrono::microseconds(50));
}
void wake(std::atomic<uint32_t>&) {}
#endif

}  // namespace

Pool::Pool(int num_threads) {
    for (int thread = 1; thread < num_threads; ++thread) {
        threads_.emplace_back([this, thread] { help(thread); });
#ifdef __linux__
        pthread_setname_np(threads_.back().native_handle(), "quire-kernels");
#endif
    }
}

Pool::~Pool() {
    stopping_.store(true);
    epoch_.fetch_add(1);
    wake(epoch_);
    for (auto& thread : threads_) thread.join();
}

void Pool::run(int64_t items, int64_t grain, Task task, void* argument) {
    if (items <= 0) return;
    if (threads_.empty() || items <= grain) return task(argument, 0, items, 0);
    const auto start = Clock::now();
    if (start < alone_until_) return task(argument, 0, items, 0);
    task_ = task;
    argument_ = argument;
    items_ = items;
    grain_ = grain;
    next_.store(0, std::memory_order_relaxed);
    inside_.store(OPEN, std::memory_order_release);
    epoch_.fetch_add(1, std::memory_order_seq_cst);
    if (sleepers_.load(std::memory_order_seq_cst)) wake(epoch_);
    work(0);
    const auto worked = Clock::now();
    await_helpers();
    learn(start, worked);
}

// A stall is a wait that is long in itself and beside the job. The backoff doubles with each, and fades with every job
// that goes well.
void Pool::learn(Clock::time_point start, Clock::time_point worked) {
    const auto now = Clock::now();
    if (now - worked > STALL && now - worked > (worked - start) / 4) {
        backoff_ = std::min<Clock::duration>(std::max<Clock::duration>(2 * backoff_, MIN_BACKOFF), MAX_BACKOFF);
        alone_until_ = now + backoff_;
    } else {
        backoff_ -= backoff_ / 64;
    }
}

// Guided self-scheduling: pieces shrink as the work runs out, so that all end at about the same time.
void Pool::work(int thread) {
    const int64_t share = 2 * int64_t(num_threads());
    int64_t begin = next_.load(std::memory_order_relaxed);
    while (begin < items_) {
        int64_t size = (items_ - begin) / share;
        if (size < grain_) size = grain_;
        const int64_t end = begin + size < items_ ? begin + size : items_;
        if (!next_.compare_exchange_weak(begin, end, std::memory_order_relaxed)) continue;
        task_(argument_, begin, end, thread);
        begin = next_.load(std::memory_order_relaxed);
    }
}

// No helper may enter after this, and none is inside when it returns.
void Pool::await_helpers() {
    uint32_t state = inside_.fetch_and(~OPEN, std::memory_order_acq_rel) & ~OPEN;
    if (!(state & COUNT)) return;
    if (spin_until([this] { return !(inside_.load(std::memory_order_acquire) & COUNT); })) return;
    state = inside_.fetch_or(CALLER_SLEEPS, std::memory_order_acq_rel) | CALLER_SLEEPS;
    while (state & COUNT) {
        sleep_while(inside_, state);
        state = inside_.load(std::memory_order_acquire);
    }
}

bool Pool::await_job(uint32_t seen) {
    if (spin_until([&] { return epoch_.load(std::memory_order_acquire) != seen; })) return !stopping_.load();
    sleepers_.fetch_add(1, std::memory_order_seq_cst);
    while (epoch_.load(std::memory_order_seq_cst) == seen) sleep_while(epoch_, seen);
    sleepers_.fetch_sub(1, std::memory_order_seq_cst);
    return !stopping_.load();
}

void Pool::help(int thread) {
    uint32_t seen = 0;
    while (await_job(seen)) {
        seen = epoch_.load(std::memory_order_acquire);
        uint32_t state = inside_.load(std::memory_order_relaxed);
        while ((state & OPEN) && !inside_.compare_exchange_weak(state, state + 1, std::memory_order_acquire)) {
        }
        if (!(state & OPEN)) continue;  // it was done before this thread woke up
        work(thread);
        state = inside_.fetch_sub(1, std::memory_order_acq_rel) - 1;
        if ((state & CALLER_SLEEPS) && !(state & COUNT)) wake(inside_);
    }
}

}  // namespace qk
