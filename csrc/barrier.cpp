// A barrier of processes that share memory. Each has a cache line with its generation, which it alone writes: how many barriers it
// has reached. It waits for the others' to be as many: first by looking, then asleep on their words.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <climits>
#include <cstddef>

#include "context.h"
#include "plan.h"

#ifdef __linux__
#include <ctime>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#else
#include <thread>
#endif

namespace qk {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::nanoseconds;

constexpr int64_t LINE = 64;
constexpr auto LOOK = std::chrono::milliseconds(20);  // how long a sleeper sleeps before it looks at the abort word

struct Line {
    std::atomic<uint32_t> generation;
    std::atomic<uint32_t> sleepers;  // on the generation
    std::atomic<uint64_t> barriers, waited_ns;
};
static_assert(sizeof(Line) <= LINE && std::atomic<uint32_t>::is_always_lock_free && std::atomic<uint64_t>::is_always_lock_free);

void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

void sleep_while(std::atomic<uint32_t>& word, uint32_t value) {
#ifdef __linux__
    const timespec limit{0, long(nanoseconds(LOOK).count())};
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT, value, &limit, nullptr, 0);
#else
    if (word.load() == value) std::this_thread::sleep_for(std::chrono::microseconds(50));
#endif
}

void wake(std::atomic<uint32_t>& word) {
#ifdef __linux__
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
#else
    (void)word;
#endif
}

int32_t barrier(const qk_barrier_args& args) {
    char* const words = static_cast<char*>(args.words);
    const auto line = [&](int32_t rank) -> Line& { return *reinterpret_cast<Line*>(words + (1 + rank) * LINE); };
    const std::atomic<uint32_t>& aborted = *reinterpret_cast<std::atomic<uint32_t>*>(words);
    Line& own = line(args.rank);
    const uint32_t generation = own.generation.load(std::memory_order_relaxed) + 1;
    own.generation.store(generation, std::memory_order_seq_cst);
    if (own.sleepers.load(std::memory_order_seq_cst)) wake(own.generation);
    const auto start = Clock::now(), spin_end = start + nanoseconds(args.spin_ns), end = start + std::chrono::milliseconds(args.timeout_ms);
    int32_t failure = 0;
    for (int32_t step = 1; step < args.size && !failure; ++step) {
        Line& other = line((args.rank + step) % args.size);
        const auto missing = [&](uint32_t found) { return int32_t(found - generation) < 0; };
        for (uint32_t found; !failure && missing(found = other.generation.load(std::memory_order_acquire));) {
            if (aborted.load(std::memory_order_relaxed)) failure = QK_BARRIER_ABORTED;
            for (int i = 0; i < 32 && !failure && args.spin_ns && missing(other.generation.load(std::memory_order_acquire)); ++i) relax();
            const auto now = Clock::now();
            if (now < spin_end || failure) continue;
            if (now > end) failure = QK_BARRIER_LATE;
            other.sleepers.fetch_add(1, std::memory_order_seq_cst);
            found = other.generation.load(std::memory_order_seq_cst);
            if (missing(found) && !failure) sleep_while(other.generation, found);
            other.sleepers.fetch_sub(1, std::memory_order_seq_cst);
        }
    }
    own.barriers.fetch_add(1, std::memory_order_relaxed);
    own.waited_ns.fetch_add(uint64_t(nanoseconds(Clock::now() - start).count()), std::memory_order_relaxed);
    if (!failure && aborted.load(std::memory_order_relaxed)) failure = QK_BARRIER_ABORTED;
    return failure;
}

}  // namespace
}  // namespace qk

int32_t qk_barrier(qk_context* context, const qk_barrier_args* args) {
    if (!context->recording) return qk::barrier(*args);
    context->recording->add(*args);
    return 0;
}
