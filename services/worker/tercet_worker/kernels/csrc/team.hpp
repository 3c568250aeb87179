// A fixed team of threads that does one job at a time, with barriers inside.
//
// A step has hundreds of barriers with microseconds between them, so threads spin at them, but not for long: whoever waits longer
// than running threads are ever apart waits for a thread that has lost its processor, and offers it its own.
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
    // Starts size - 1 threads; the caller of run() is the first. Throws std::system_error.
    explicit Team(std::int32_t size);
    ~Team();
    Team(const Team&) = delete;
    Team& operator=(const Team&) = delete;

    std::int32_t size() const { return size_; }

    // Calls body(context, thread) on every thread and returns when all have returned. One caller at a time.
    void run(void (*body)(void*, std::int32_t), void* context);

    // Within a job: returns when every thread of the team has called it, with its number.
    void barrier(std::int32_t thread);

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
    template <class Late>
    void meet(Late late);
    // Of the caller: leaves a helper's processor. Returns whether it was on one.
    bool go_home() const;

    std::int32_t size_;
    bool places_ = false;  // whether helpers have processors of their own
    cpu_set_t home_;       // all others
    Turn job_;
    Turn phase_;
    alignas(128) std::atomic<std::int32_t> arrived_{0};
    void (*body_)(void*, std::int32_t) = nullptr;
    void* context_ = nullptr;
    bool stopping_ = false;
    std::vector<std::thread> threads_;
};

}  // namespace tercet
