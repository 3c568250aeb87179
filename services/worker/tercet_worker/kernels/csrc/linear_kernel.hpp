// Products of rows with packed weights: register tiles, the loops around them, and what becomes of a tile.
//
// A tile is R rows by P panels, whose sums are held in registers while the steps go by: per step P lines are loaded and R values
// spread, for R * P multiplications. With one tile of rows the weights come from memory, and are the limit; they pass by the caches,
// in which the rest of the system has its code and tables. With several, those of one group pass from the second-level cache once
// per tile, and the next group is fetched there meanwhile, spread evenly over the tiles, so that memory and arithmetic overlap.
// (Several bfloat16 rows with AVX2: linear_wide.hpp.)
// Include only from files compiled for one instruction set.
#pragma once

#include "linear_elements.hpp"
#include "linear_types.hpp"

namespace tercet {
namespace {

#if defined(__AVX512BF16__)
template <class C>
constexpr int kTileRows = 6;
constexpr int kTilePanels = 4;
#elif defined(__AVX512F__)
template <class C>
constexpr int kTileRows = C::kStepElements == 2 ? 4 : 6;  // widened pairs take twice the registers
constexpr int kTilePanels = 4;
#elif defined(__AVX2__)
template <class C>
constexpr int kTileRows = 3;  // twelve sums, three values and a line: all sixteen registers. (Of bfloat16 one row comes here.)
constexpr int kTilePanels = 2;
#else
template <class C>
constexpr int kTileRows = 2;
constexpr int kTilePanels = 2;
#endif
constexpr int kBlockSteps = 1024;   // steps taken at once where several tiles share a group: 256 KiB of weights
constexpr int kFewTiles = 3;        // so many tiles share weights in the first-level cache, which come there past the others
constexpr int kFewSteps = 64;       // taken at once then: 16 KiB
constexpr int kFewAhead = 2;        // lines fetched ahead per step then
constexpr int kBlockRows = 96;      // rows whose sums are kept between blocks
constexpr int kPassing = -1;        // instead of lines fetched ahead: all lines are used once, and are fetched past the caches
constexpr int kPassingBytes = 4096;  // so far before they are used
constexpr int kPrefetchTiles = 12;  // with more tiles than this, fetching the next group early gains nothing

constexpr int least(int a, int b) { return a < b ? a : b; }

// Where a tile reads weights: `line_stride` bytes from step to step. `ahead` is fetched into the second-level cache.
struct TileWeights {
    const char* lines;
    std::int64_t line_stride;
    const char* ahead;
    std::int64_t ahead_stride;
};

// Sums of a tile over `steps` steps, on top of what is in `sums`. kAhead: lines fetched ahead per step, or kPassing.
template <class C, int R, int P, int kAhead>
TERCET_INLINE void accumulate(F16 (&sums)[R][P], const TileWeights& w, const char* x, std::int64_t x_stride, int steps,
                              bool last_is_half) {
    const char* lines = w.lines;
    const char* ahead = w.ahead;
    const int whole = steps - (last_is_half ? 1 : 0);
    for (int step = 0; step < whole; ++step) {
        typename C::Line line[P];
#pragma GCC unroll 4
        for (int p = 0; p < P; ++p) line[p] = C::load(lines + kLineBytes * p);
        if constexpr (kAhead == kPassing) {
#pragma GCC unroll 4
            for (int p = 0; p < P; ++p) __builtin_prefetch(lines + kPassingBytes + kLineBytes * p, 0, 0);
        } else if constexpr (kAhead > 0) {
#pragma GCC unroll 4
            for (int a = 0; a < kAhead; ++a) __builtin_prefetch(ahead + kLineBytes * a, 0, kAhead == kFewAhead ? 0 : 2);
            ahead += w.ahead_stride;
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            const typename C::Spread value = C::spread(x + r * x_stride);
#pragma GCC unroll 4
            for (int p = 0; p < P; ++p) sums[r][p] = C::dot(sums[r][p], line[p], value);
        }
        lines += w.line_stride;
        x += C::kStepElements * sizeof(typename C::Element);
    }
    if (last_is_half) {
        for (int r = 0; r < R; ++r) {
            const typename C::Spread value = C::spread_last(x + r * x_stride);
            for (int p = 0; p < P; ++p) sums[r][p] = C::dot(sums[r][p], C::load(lines + kLineBytes * p), value);
        }
    }
}

TERCET_INLINE F16 silu_times(const F16& gate, const F16& up) {
    F16 r;
    TERCET_EACH {
        // Bounded, so that the power stays finite; operands are ordered so that not-a-number stays.
        const vf x = min_part(splat(126.0f), gate.part[i] * splat(-1.44269504088896340736f));
        r.part[i] = gate.part[i] / (splat(1.0f) + exp2_part<5>(x)) * up.part[i];
    }
    return r;
}

// Stores 16 columns, or the first `count` of them.
template <class C>
TERCET_INLINE void store_columns(char* to, const F16& x, int count) {
    if (count >= kPanel) return C::store(to, x);
    char whole[64];
    C::store(whole, x);
    std::memcpy(to, whole, static_cast<std::size_t>(count) * sizeof(typename C::Element));
}

template <class C>
TERCET_INLINE void finish_panel(const LinearCall& call, const F16& sum, int panel, int row) {
    const int column = panel * kPanel;
    const int count = call.out_features - column;
    char* y = call.y + row * call.y_stride;
    switch (call.epilogue) {
        case Epilogue::store:
            return store_columns<C>(y + column * static_cast<int>(sizeof(typename C::Element)), sum, count);
        case Epilogue::store_float:
            return store_columns<Float32Linear>(y + column * 4, sum, count);
        default: {
            char* at = y + column * 4;
            if (count >= kPanel) return store16(at, add16(load16(at), sum));
            float values[kPanel];
            store16(values, sum);
            for (int i = 0; i < count; ++i) reinterpret_cast<float*>(at)[i] += values[i];
        }
    }
}

template <class C, int R, int P>
TERCET_INLINE void finish(const LinearCall& call, F16 (&sums)[R][P], int panel, int row) {
    if (call.bias != nullptr) {
        for (int p = 0; p < P; ++p) {
            const F16 bias = load16(call.bias + (panel + p) * kPanel);
            for (int r = 0; r < R; ++r) sums[r][p] = add16(sums[r][p], bias);
        }
    }
    if constexpr (P % 2 == 0) {
        if (call.epilogue == Epilogue::gated_silu) {
            for (int r = 0; r < R; ++r) {
                for (int p = 0; p < P; p += 2) {
                    const int column = (panel + p) / 2 * kPanel;
                    store_columns<C>(call.y + (row + r) * call.y_stride + column * static_cast<int>(sizeof(typename C::Element)),
                                     silu_times(sums[r][p], sums[r][p + 1]), call.out_features - column);
                }
            }
            return;
        }
    }
    for (int r = 0; r < R; ++r) {
        for (int p = 0; p < P; ++p) finish_panel<C>(call, sums[r][p], panel + p, row + r);
    }
}

// One tile over one block of steps.
struct TileJob {
    TileWeights weights;
    int panel;
    int row;
    int first_step;
    int steps;
    bool last_is_half;
    float* kept;  // [R][P][16] sums between blocks; null: there is only one block
    bool first;
    bool last;
};

template <class C, int R, int P, int kAhead>
__attribute__((noinline)) static void run_tile(const LinearCall& call, const TileJob& job) {
    F16 sums[R][P];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
        for (int p = 0; p < P; ++p) sums[r][p] = job.first ? F16{} : load16(job.kept + (r * P + p) * kPanel);
    }
    const char* x = call.x + job.row * call.x_stride +
                    static_cast<std::int64_t>(job.first_step) * C::kStepElements * static_cast<int>(sizeof(typename C::Element));
    accumulate<C, R, P, kAhead>(sums, job.weights, x, call.x_stride, job.steps, job.last_is_half);
    if (job.last) return finish<C, R, P>(call, sums, job.panel, job.row);
    for (int r = 0; r < R; ++r) {
        for (int p = 0; p < P; ++p) store16(job.kept + (r * P + p) * kPanel, sums[r][p]);
    }
}

// One row takes four panels where that is more than a tile has: as many sums, and memory is read in its order.
constexpr int kRowPanels = kWidth > 4 ? 4 : kTilePanels;

template <class C, int R, int P>
TERCET_INLINE void run_tile_ahead(const LinearCall& call, const TileJob& job, int ahead) {
    if constexpr (P == 4) {
        switch (ahead) {
            case kPassing: return run_tile<C, R, P, kPassing>(call, job);
            case 1: return run_tile<C, R, P, 1>(call, job);
            case 2: return run_tile<C, R, P, 2>(call, job);
            default: break;
        }
    }
    run_tile<C, R, P, 0>(call, job);
}

template <class C, int P>
TERCET_INLINE void run_tile_rows(const LinearCall& call, const TileJob& job, int rows, int ahead) {
    switch (rows) {
        case 1: return run_tile_ahead<C, 1, P>(call, job, ahead);
        case 2: return run_tile_ahead<C, 2, P>(call, job, ahead);
#if defined(__AVX2__)
        case 3:
            if constexpr (kTileRows<C> >= 3) return run_tile_ahead<C, 3, P>(call, job, ahead);
            break;
#endif
#if defined(__AVX512F__)
        case 4: return run_tile_ahead<C, 4, P>(call, job, ahead);
        case 5:
            if constexpr (kTileRows<C> >= 5) return run_tile_ahead<C, 5, P>(call, job, ahead);
            break;
        case 6:
            if constexpr (kTileRows<C> >= 6) return run_tile_ahead<C, 6, P>(call, job, ahead);
            break;
#endif
        default: break;
    }
    __builtin_unreachable();
}

template <class C>
TERCET_INLINE void run_tile_panels(const LinearCall& call, const TileJob& job, int rows, int panels,
                                   [[maybe_unused]] int ahead) {
    switch (panels) {
#if defined(__AVX512F__)
        case 4: return run_tile_rows<C, 4>(call, job, rows, ahead);
#elif defined(__AVX2__)
        case 4: return run_tile_ahead<C, 1, 4>(call, job, ahead);
#endif
        case 2: return run_tile_rows<C, 2>(call, job, rows, 0);
        default: return run_tile_rows<C, 1>(call, job, rows, 0);
    }
}

// The largest tile width that lies within one group and the part.
TERCET_INLINE int tile_panels(int rows, int panel, int end, int group_end) {
    const int left = least(end, group_end) - panel;
    const int most = rows == 1 ? kRowPanels : kTilePanels;
    return left >= most ? most : left >= 2 ? 2 : 1;
}

template <class C>
static void linear(const LinearCall& call, const LinearPart& part) {
    const int steps = (call.in_features + C::kStepElements - 1) / C::kStepElements;
    const bool half = call.in_features % C::kStepElements != 0;
    const std::int64_t group_bytes = static_cast<std::int64_t>(steps) * kLineBytes * kGroupPanels;
    alignas(64) float kept[kBlockRows * kTilePanels * kPanel];

    for (int row_begin = part.row_begin; row_begin < part.row_end;) {
        int rows = part.row_end - row_begin;
        int block_steps = steps;
        const int most = rows <= kFewTiles * kTileRows<C> ? kFewSteps : kBlockSteps;
        if (rows > kTileRows<C> && steps > most) {
            block_steps = most;
            rows = least(rows, kBlockRows);
        }
        const int tiles = (rows + kTileRows<C> - 1) / kTileRows<C>;
        for (int panel = part.panel_begin; panel < part.panel_end;) {
            const int group = panel / kGroupPanels;
            const int group_panels = least(kGroupPanels, call.panels - group * kGroupPanels);
            const int panels = tile_panels(rows, panel, part.panel_end, group * kGroupPanels + group_panels);
            TileJob job{};
            job.panel = panel;
            job.weights.line_stride = kLineBytes * group_panels;
            const char* lines = call.weights + group * group_bytes + kLineBytes * (panel % kGroupPanels);
            for (job.first_step = 0; job.first_step < steps; job.first_step += block_steps) {
                job.steps = least(block_steps, steps - job.first_step);
                job.first = job.first_step == 0;
                job.last = job.first_step + job.steps == steps;
                job.last_is_half = half && job.last;
                job.weights.lines = lines + job.first_step * job.weights.line_stride;
                // What follows in memory is what comes next, in this group or another, of this matrix or another.
                const std::int64_t block_bytes = job.steps * job.weights.line_stride;
                const int ahead = tiles > kPrefetchTiles ? 0 : tiles == 1 ? kPassing : tiles <= kFewTiles ? kFewAhead : 1;
                job.weights.ahead_stride = job.weights.line_stride / tiles;
                job.row = row_begin;
                for (int tile = 0; tile < tiles; ++tile) {
                    const int size = (row_begin + rows - job.row + tiles - tile - 1) / (tiles - tile);
                    job.weights.ahead = job.weights.lines + block_bytes + tile * job.steps * job.weights.ahead_stride;
                    job.kept = kept + (job.row - row_begin) * panels * kPanel;
                    run_tile_panels<C>(call, job, size, panels, ahead);
                    job.row += size;
                }
            }
            panel += panels;
        }
        row_begin += rows;
    }
}

}  // namespace
}  // namespace tercet
