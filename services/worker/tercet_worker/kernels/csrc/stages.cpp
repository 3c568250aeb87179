#include "stages.hpp"

namespace tercet {
namespace {

constexpr std::uint64_t kLow = 0xffff;

std::uint64_t left_of(std::uint32_t stage, std::int32_t first, std::int32_t end) {
    return static_cast<std::uint64_t>(stage) << 32 | static_cast<std::uint64_t>(first) << 16 | static_cast<std::uint64_t>(end);
}

}  // namespace

void Stages::reset() {
    for (std::int32_t thread = 0; thread < size_; ++thread) {
        Place& place = places_[static_cast<std::size_t>(thread)];
        place.left.store(0, std::memory_order_relaxed);
        for (auto& state : place.states) state.store(0, std::memory_order_relaxed);
    }
}

std::int32_t Stages::take(std::uint32_t stage, std::int32_t count, std::int32_t thread) {
    for (std::int32_t i = 0; i < size_; ++i) {
        const std::int32_t owner = thread + i < size_ ? thread + i : thread + i - size_;
        std::atomic<std::uint64_t>& left = places_[static_cast<std::size_t>(owner)].left;
        std::uint64_t seen = left.load(std::memory_order_acquire);
        for (;;) {
            const auto tag = static_cast<std::uint32_t>(seen >> 32);
            if (tag > stage) return -1;  // it is over
            std::int32_t first = 0;
            std::int32_t end = (count - owner + size_ - 1) / size_;
            if (tag == stage) {
                first = static_cast<std::int32_t>(seen >> 16 & kLow);
                end = static_cast<std::int32_t>(seen & kLow);
            }
            if (first >= end) break;
            const std::int32_t place = i == 0 ? first++ : --end;
            if (left.compare_exchange_weak(seen, left_of(stage, first, end), std::memory_order_acq_rel, std::memory_order_acquire)) {
                return place * size_ + owner;
            }
        }
    }
    return -1;
}

bool Stages::claim(std::uint32_t stage, std::int32_t unit) {
    std::atomic<std::uint32_t>& at = state(unit);
    std::uint32_t seen = at.load(std::memory_order_relaxed);
    return seen < 2 * stage && at.compare_exchange_strong(seen, 2 * stage, std::memory_order_acq_rel, std::memory_order_relaxed);
}

void Stages::written(std::uint32_t stage, std::int32_t unit) {
    // Ordered before the look at the sleepers, as their count is before their look at the unit.
    state(unit).store(2 * stage + 1, std::memory_order_seq_cst);
    if (sleepers_.load(std::memory_order_seq_cst) == 0) return;
    changes_.fetch_add(1, std::memory_order_seq_cst);
    Team::wake(changes_);
}

void Stages::sleep(std::uint32_t stage, std::int32_t unit) {
    sleepers_.fetch_add(1, std::memory_order_seq_cst);
    for (;;) {
        const std::uint32_t seen = changes_.load(std::memory_order_seq_cst);
        if (state(unit).load(std::memory_order_seq_cst) > 2 * stage) break;
        Team::sleep(changes_, seen);
    }
    sleepers_.fetch_sub(1, std::memory_order_relaxed);
}

}  // namespace tercet
