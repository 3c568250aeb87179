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

constexpr std::uint64_t kLongTurn = 5'000'000;  // ns; by default they have up to 3 ms

constexpr std::uint64_t kResetOnFork = 1;           // what this thread starts has the usual turns

// The kernel's struct sched_attr, in its first version; headers of some systems lack it, of others define it twice.
struct Scheduling {
    std::uint32_t size = 0;
    std::uint32_t policy = 0;
    std::uint64_t flags = 0;
    std::int32_t nice = 0;
    std::uint32_t priority = 0;
    std::uint64_t runtime = 0;
    std::uint64_t deadline = 0;
    std::uint64_t period = 0;
};

constexpr std::int64_t kJobPatience = 60'000;  // ns; what follows a step at once: sampling from what it computed

void futex(std::atomic<std::uint32_t>& word, int operation, std::uint32_t value) {
    static_assert(sizeof word == 4);
    syscall(SYS_futex, &word, operation | FUTEX_PRIVATE_FLAG, value, nullptr, nullptr, 0);
}

}  // namespace

void Team::pause() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

void Team::yield() { sched_yield(); }

std::int64_t Team::now() {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

void Team::take_long_turns() {
    static_assert(sizeof(Scheduling) == 48);
    Scheduling own;
    if (syscall(SYS_sched_getattr, 0, &own, sizeof own, 0) != 0) return;
    if (own.policy != SCHED_OTHER && own.policy != SCHED_BATCH) return;
    own.flags |= kResetOnFork;
    own.runtime = kLongTurn;  // elsewhere it means nothing for these policies
    syscall(SYS_sched_setattr, 0, &own, 0);  // refused: it has the usual turns
}

void Team::sleep(std::atomic<std::uint32_t>& word, std::uint32_t value) { futex(word, FUTEX_WAIT, value); }

void Team::wake(std::atomic<std::uint32_t>& word) { futex(word, FUTEX_WAKE, INT_MAX); }

void Team::Turn::advance() {
    // Ordered before the look at the sleepers, as their count is before their look at the number.
    count.fetch_add(1, std::memory_order_seq_cst);
    if (sleepers.load(std::memory_order_seq_cst) != 0) wake(count);
}

template <class Late>
void Team::Turn::wait(std::uint32_t seen, std::int64_t patience, Late late) {
    const std::int64_t start = now();
    std::int64_t waited = 0;
    do {
        for (int i = 0; i < kPausesPerLook; ++i) {
            if (count.load(std::memory_order_acquire) != seen) return;
            pause();
        }
        // Whoever is late has lost its processor, perhaps to this very thread.
        if (waited > kSpin && !late()) yield();
        waited = now() - start;
    } while (waited < patience);
    sleepers.fetch_add(1, std::memory_order_seq_cst);
    while (count.load(std::memory_order_seq_cst) == seen) sleep(count, seen);
    sleepers.fetch_sub(1, std::memory_order_relaxed);
}

Team::Team(std::int32_t size) : size_(size) {
    // The process's mask: that of the creating thread may be narrower.
    cpu_set_t allowed;
    const bool known = sched_getaffinity(getpid(), sizeof allowed, &allowed) == 0;
    places_ = known && size <= CPU_COUNT(&allowed) && size >= CPU_COUNT(&allowed) - 1;
    CPU_ZERO(&home_);
    std::vector<int> own(static_cast<std::size_t>(size), -1);
    std::int32_t passed = 0;
    for (int cpu = 0; places_ && cpu < CPU_SETSIZE; ++cpu) {
        if (!CPU_ISSET(cpu, &allowed)) continue;
        if (passed > 0 && passed < size) {
            own[static_cast<std::size_t>(passed)] = cpu;
        } else {
            CPU_SET(cpu, &home_);
        }
        ++passed;
    }
    threads_.reserve(static_cast<std::size_t>(size - 1));
    try {
        for (std::int32_t thread = 1; thread < size; ++thread) {
            threads_.emplace_back(&Team::work, this, thread, own[static_cast<std::size_t>(thread)]);
        }
    } catch (...) {
        stop();
        throw;
    }
}

Team::~Team() {
    settle();
    stop();
}

void Team::stop() {
    stopping_ = true;
    job_.advance();
    for (std::thread& thread : threads_) thread.join();
}

void Team::work(std::int32_t thread, int cpu) {
    pthread_setname_np(pthread_self(), "tercet-kernels");
    take_long_turns();
    if (cpu >= 0) {
        cpu_set_t one;
        CPU_ZERO(&one);
        CPU_SET(cpu, &one);
        pthread_setaffinity_np(pthread_self(), sizeof one, &one);  // refused: it runs where it may
    }
    for (std::uint32_t seen = 0;; ++seen) {
        job_.wait(seen, kJobPatience, [] { return false; });
        if (stopping_) return;
        body_(context_, thread);
        if (left_.fetch_add(1, std::memory_order_acq_rel) == size_ - 2) {
            left_.store(0, std::memory_order_relaxed);
            done_.advance();
        }
    }
}

void Team::start(void (*body)(void*, std::int32_t), void* context) {
    thread_local const bool asked = (take_long_turns(), true);
    static_cast<void>(asked);
    settle();
    body_ = body;
    context_ = context;
    unsettled_ = size_ > 1;
    job_.advance();
    body(context, 0);
}

void Team::settle() {
    if (!unsettled_) return;
    done_.wait(job_.count.load(std::memory_order_relaxed) - 1, kPatience, [this] { return go_home(0); });
    unsettled_ = false;
}

bool Team::go_home(std::int32_t thread) const {
    // A helper with a processor of its own is there.
    if (thread != 0 || !places_ || CPU_ISSET(sched_getcpu(), &home_)) return false;
    // Only to be moved: threads and processes that the caller starts would inherit a narrow mask.
    cpu_set_t before;
    if (sched_getaffinity(0, sizeof before, &before) != 0) return false;
    cpu_set_t reachable;
    CPU_AND(&reachable, &before, &home_);
    if (CPU_COUNT(&reachable) == 0 || sched_setaffinity(0, sizeof reachable, &reachable) != 0) return false;
    sched_setaffinity(0, sizeof before, &before);
    return true;
}

}  // namespace tercet
