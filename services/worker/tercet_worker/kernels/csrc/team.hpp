// A fixed team of threads that does one job at a time; how a job is divided is for stages.hpp.
//
// A step has hundreds of stages with microseconds between them, so threads spin, but not for long: whoever waits longer than running
// threads are ever apart waits for a thread that has lost its processor.
//
// Where the team has the machine to itself, each helper is kept on a processor of its own. The caller, the first of the team, is not:
// threads and processes that it starts would inherit that. But the system may put it beside a helper, and leave it there for as long
// as the two give way to each other, while its own processor is idle: a step then takes as long as with one thread. So a caller that
// waits in vain looks where it is, and moves.
#pragma once

#include <sched.h>

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

namespace tercet {

class Team {
  public:
    // Starts size - 1 threads; the caller of start() is the first. Throws std::bad_alloc and std::system_error.
    explicit Team(std::int32_t size);
    ~Team();
    Team(const Team&) = delete;
    Team& operator=(const Team&) = delete;

    std::int32_t size() const { return size_; }

    // Calls body(context, thread) on every thread, and returns when the caller's has returned: helpers may still be inside. settle() waits
    // until they have left; so do the next job and the end of the team. One caller at a time.
    void start(void (*body)(void*, std::int32_t), void* context);
    void settle();

    // Within a job, of a thread that waits in vain: leaves a helper's processor. Returns whether it was on one that is not its own.
    bool go_home(std::int32_t thread) const;

    // How threads of a job wait for each other: they spin for kSpin ns, then yield, and sleep after kPatience.
    static constexpr std::int64_t kSpin = 10'000;  // longer than threads that all run are ever apart
    static constexpr std::int64_t kPatience = 200'000;
    static constexpr int kPausesPerLook = 32;      // at the clock
    static void pause();
    static void yield();
    static std::int64_t now();  // ns
    // Asks for long turns of the processor for this thread, which computes for milliseconds: on Linux from 6.12 on, who wakes up and
    // has only a little to do gets it at once, not when the turn of the thread that has it is over, which the kernel looks at every
    // few milliseconds. It gets no more of the processor for it, and no less.
    static void take_long_turns();
    // Sleeps unless `word` is not `value` any more; wakes all who sleep on it.
    static void sleep(std::atomic<std::uint32_t>& word, std::uint32_t value);
    static void wake(std::atomic<std::uint32_t>& word);

  private:
    // A number that threads wait on until it changes.
    struct alignas(128) Turn {
        std::atomic<std::uint32_t> count{0};
        std::atomic<std::uint32_t> sleepers{0};

        void advance();
        // Spins, then yields unless `late` has found something better to do, and sleeps once `patience` ns are over.
        template <class Late>
        void wait(std::uint32_t seen, std::int64_t patience, Late late);
    };

    void work(std::int32_t thread, int cpu);
    void stop();  // ends all threads, which have no job

    std::int32_t size_;
    bool places_ = false;  // whether helpers have processors of their own
    cpu_set_t home_;       // all others
    Turn job_;
    Turn done_;  // jobs that all helpers have left
    alignas(128) std::atomic<std::int32_t> left_{0};
    void (*body_)(void*, std::int32_t) = nullptr;
    void* context_ = nullptr;
    bool stopping_ = false;
    bool unsettled_ = false;
    std::vector<std::thread> threads_;
};

}  // namespace tercet
