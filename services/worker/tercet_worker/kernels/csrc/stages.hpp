// A job of a team as a row of stages, in which nobody waits for a thread that has lost its processor if it can do that thread's part.
//
// A stage is a number of units, which threads take; it is over when all are written. Of its own units a thread takes the first, of
// others' the last, so that threads which all run read memory in order. A stage may say that its units can be done again: whoever has
// nothing left to take, and waits longer than threads that run are ever apart, does what is missing, too. So a unit is computed into
// memory of the thread's own, and then claimed; the first to claim it writes it to where the others look. Computing again reads only
// what does not change until the stage is over, so both results are the same. But a thread that was away for long computes from what
// later stages have written meanwhile, and reads it while they do: any value may come out, none is used, because its claim fails.
//
// Everything carries the number of its stage. A thread that comes back stages later finds nothing left to do in each, and catches up.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>

#include "team.hpp"

namespace tercet {

class Stages {
  public:
    // Units of one thread in one stage.
    static constexpr std::int32_t kMost = 96;

    // Throws std::bad_alloc. The team outlives it.
    explicit Stages(Team& team) : team_(team), size_(team.size()), places_(new Place[static_cast<std::size_t>(team.size())]) {}

    // Before a job, while no thread is in a stage.
    void reset();

    // Where a thread is in a job. All threads go through the same stages.
    struct Walk {
        std::int32_t thread;
        std::uint32_t stage = 0;
    };

    // Units of a stage.
    std::int32_t most() const { return size_ * kMost; }
    std::int32_t owner(std::int32_t unit) const { return unit % size_; }
    std::int32_t place(std::int32_t unit) const { return unit / size_; }

    // The next stage: does units [0, count), each once, and returns when all are done. Unit i is the i / size-th of thread i % size.
    template <class Work>
    void once(Walk& walk, std::int32_t count, const Work& work) {
        go(walk, count, false, work, [](std::int32_t) {});
    }

    // The same for units that can be done again: `compute` leaves a unit where only this thread sees it, `write` puts it in its place.
    template <class Compute, class Write>
    void again(Walk& walk, std::int32_t count, const Compute& compute, const Write& write) {
        go(walk, count, true, compute, write);
    }

  private:
    // Of one thread: what is left of its units in the stage that has asked last, and how far each unit is.
    struct alignas(128) Place {
        std::atomic<std::uint64_t> left{0};  // [32 bits stage][16 bits first][16 bits end]
        alignas(128) std::atomic<std::uint32_t> states[kMost]{};  // twice the stage that has claimed it last, plus one once written
    };

    std::atomic<std::uint32_t>& state(std::int32_t unit) const {
        return places_[static_cast<std::size_t>(owner(unit))].states[place(unit)];
    }
    bool is_written(std::uint32_t stage, std::int32_t unit) const {
        return state(unit).load(std::memory_order_acquire) > 2 * stage;
    }
    // Returns -1 where nothing is left.
    std::int32_t take(std::uint32_t stage, std::int32_t count, std::int32_t thread);
    bool claim(std::uint32_t stage, std::int32_t unit);
    void written(std::uint32_t stage, std::int32_t unit);
    // Sleeps until the unit is written.
    void sleep(std::uint32_t stage, std::int32_t unit);

    template <class Compute, class Write>
    void go(Walk& walk, std::int32_t count, bool again, const Compute& compute, const Write& write) {
        const std::uint32_t stage = ++walk.stage;
        const auto finish = [&](std::int32_t unit) {
            compute(unit);
            if (!claim(stage, unit)) return;
            write(unit);
            written(stage, unit);
        };
        std::int64_t last = again ? Team::now() : 0;
        std::int64_t longest = 0;  // of the units that this thread has done
        for (std::int32_t unit = take(stage, count, walk.thread); unit >= 0; unit = take(stage, count, walk.thread)) {
            finish(unit);
            if (!again) continue;
            const std::int64_t now = Team::now();
            longest = std::max(longest, now - last);
            last = now;
        }
        std::int32_t first = 0;  // not known to be written
        const auto over = [&] {
            while (first < count && is_written(stage, first)) ++first;
            return first == count;
        };
        if (over()) return;
        const std::int64_t begin = Team::now();
        // What runs beside this thread is at most one unit behind, and units are of a size. Who has done none cannot know their size.
        std::int64_t apart = Team::kSpin;
        if (again) apart = longest > 0 ? std::max(apart, 2 * longest) : Team::kPatience;
        for (;;) {
            for (int i = 0; i < Team::kPausesPerLook; ++i) {
                Team::pause();
                if (over()) return;
            }
            const std::int64_t waited = Team::now() - begin;
            if (waited < apart || team_.go_home(walk.thread)) continue;
            std::int32_t open = again ? first : count;
            while (open < count && state(open).load(std::memory_order_relaxed) >= 2 * stage) ++open;
            if (open < count) {
                finish(open);
            } else if (waited < Team::kPatience) {
                Team::yield();
            } else {
                sleep(stage, first);
            }
        }
    }

    Team& team_;
    std::int32_t size_;
    std::unique_ptr<Place[]> places_;
    alignas(128) std::atomic<std::uint32_t> changes_{0};
    std::atomic<std::uint32_t> sleepers_{0};
};

}  // namespace tercet
