#include "team.hpp"

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <chrono>
#include <climits>

namespace tercet {
namespace {

// Nanoseconds.
constexpr std::int64_t kSpin = 10'000;            // longer than threads that all run are ever apart
constexpr std::int64_t kBarrierPatience = 200'000;
constexpr std::int64_t kJobPatience = 60'000;     // what follows a step at once: sampling from what it computed

void pause() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

std::int64_t now() {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

void futex(std::atomic<std::uint32_t>& word, int operation, std::uint32_t value) {
    static_assert(sizeof word == 4);
    syscall(SYS_futex, &word, operation | FUTEX_PRIVATE_FLAG, value, nullptr, nullptr, 0);
}

// Keeps a helper on a processor of its own where the team has the machine to itself. Two threads of a team that meet on one
// processor, as the scheduler lets them for milliseconds, make a step as slow as one thread. The caller, the first of the team,
// is not pinned: threads and processes that it starts would inherit that.
void settle(std::int32_t thread, std::int32_t size) {
    cpu_set_t allowed;
    // The process's mask: that of the creating thread may be narrower.
    if (sched_getaffinity(getpid(), sizeof allowed, &allowed) != 0) return;
    if (size > CPU_COUNT(&allowed) || size < CPU_COUNT(&allowed) - 1) return;
    std::int32_t passed = 0;
    for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
        if (!CPU_ISSET(cpu, &allowed) || passed++ != thread) continue;
        cpu_set_t one;
        CPU_ZERO(&one);
        CPU_SET(cpu, &one);
        pthread_setaffinity_np(pthread_self(), sizeof one, &one);  // refused: it runs where it may
        return;
    }
}

}  // namespace

void Team::Turn::advance() {
    // Ordered before the look at the sleepers, as their count is before their look at the number.
    count.fetch_add(1, std::memory_order_seq_cst);
    if (sleepers.load(std::memory_order_seq_cst) != 0) futex(count, FUTEX_WAKE, INT_MAX);
}

void Team::Turn::wait(std::uint32_t seen, std::int64_t patience) {
    constexpr int kPausesPerLook = 32;
    const std::int64_t start = now();
    std::int64_t waited = 0;
    do {
        for (int i = 0; i < kPausesPerLook; ++i) {
            if (count.load(std::memory_order_acquire) != seen) return;
            pause();
        }
        // Whoever is late has lost its processor, perhaps to this very thread.
        if (waited > kSpin) sched_yield();
        waited = now() - start;
    } while (waited < patience);
    sleepers.fetch_add(1, std::memory_order_seq_cst);
    while (count.load(std::memory_order_seq_cst) == seen) futex(count, FUTEX_WAIT, seen);
    sleepers.fetch_sub(1, std::memory_order_relaxed);
}

Team::Team(std::int32_t size) : size_(size) {
    threads_.reserve(static_cast<std::size_t>(size - 1));
    for (std::int32_t thread = 1; thread < size; ++thread) threads_.emplace_back(&Team::work, this, thread);
}

Team::~Team() {
    stopping_ = true;
    job_.advance();
    for (std::thread& thread : threads_) thread.join();
}

void Team::work(std::int32_t thread) {
    pthread_setname_np(pthread_self(), "tercet-kernels");
    settle(thread, size_);
    for (std::uint32_t seen = 0;; ++seen) {
        job_.wait(seen, kJobPatience);
        if (stopping_) return;
        body_(context_, thread);
        barrier();
    }
}

void Team::run(void (*body)(void*, std::int32_t), void* context) {
    body_ = body;
    context_ = context;
    job_.advance();
    body(context, 0);
    barrier();
}

void Team::barrier() {
    if (size_ == 1) return;
    const std::uint32_t seen = phase_.count.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) == size_ - 1) {
        arrived_.store(0, std::memory_order_relaxed);
        phase_.advance();
    } else {
        phase_.wait(seen, kBarrierPatience);
    }
}

}  // namespace tercet
