// A fixed team of threads that does one job at a time, with barriers inside.
//
// A step has hundreds of barriers with microseconds between them, so threads spin at them, but not for long: whoever waits longer
// than running threads are ever apart waits for a thread that has lost its processor, and offers it its own.
#pragma once

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

    // Within a job: returns when every thread of the team has called it.
    void barrier();

  private:
    // A number that threads wait on until it changes.
    struct alignas(128) Turn {
        std::atomic<std::uint32_t> count{0};
        std::atomic<std::uint32_t> sleepers{0};

        void advance();
        // Spins, then yields, and sleeps once `patience` ns are over.
        void wait(std::uint32_t seen, std::int64_t patience);
    };

    void work(std::int32_t thread);

    std::int32_t size_;
    Turn job_;
    Turn phase_;
    alignas(128) std::atomic<std::int32_t> arrived_{0};
    void (*body_)(void*, std::int32_t) = nullptr;
    void* context_ = nullptr;
    bool stopping_ = false;
    std::vector<std::thread> threads_;
};

}  // namespace tercet
