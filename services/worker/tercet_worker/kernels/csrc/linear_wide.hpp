// Products of bfloat16 rows where the processor multiplies float32 only, and has few registers: AVX2.
//
// One row: weights pass from memory, four panels at a time, and are widened on their way. Several rows would widen them again for
// every tile, and registers hold small tiles only. So the lines of some k of a group are widened once, and so are the rows, into a few
// pages that stay in the caches; then six rows meet one panel at a time, the tile that asks least of the loads: the panel's lines stay
// in the first-level cache, and the rows come from the second. Sums are kept in memory between one span of k and the next. Every sum
// is added up as in linear_kernel.hpp, so results are the same to the bit.
// Include only from files compiled for one instruction set.
#pragma once

#include <type_traits>

#include "linear_kernel.hpp"

namespace tercet {
namespace {

#if defined(TERCET_WIDE)

constexpr int kWideSpan = 96;  // k at a time: 24 KiB of weights
constexpr int kWideRows = 96;  // at a time
constexpr int kWideTile = 6;   // rows of a tile: twelve sums, a line and a value

// Rows, and a group of panels, over one span of k.
struct alignas(64) WideSpan {
    float x[kWideRows][kWideSpan];
    float lines[kGroupPanels][kWideSpan][kPanel];
    float sums[kGroupPanels][kWideRows][kPanel];  // over all spans so far
};

// `count` values of a row; an odd one is followed by a zero.
TERCET_INLINE void widen_values(const char* x, int count, float* to) {
    int i = 0;
    for (; i + kPanel <= count; i += kPanel) store16(to + i, widen16_bf16(x + 2 * i));
    for (; i < count; ++i) {
        std::uint16_t bits;
        std::memcpy(&bits, x + 2 * i, 2);
        to[i] = from_bf16(bits);
    }
    if (count % 2 != 0) to[count] = 0.0f;
}

// Adds the products of `count` k to the sums of R rows.
template <int R>
TERCET_INLINE void wide_products(const float (*lines)[kPanel], const float (*x)[kWideSpan], int count, F16 (&sums)[R]) {
#pragma GCC unroll 2
    for (int k = 0; k < count; ++k) {
        const F16 line = load16(lines[k]);
#pragma GCC unroll 6
        for (int r = 0; r < R; ++r) sums[r] = fma16(line, splat16(x[r][k]), sums[r]);
    }
}

// Calls `tile(row, size)` for tiles of `rows` rows; size is a constant.
template <class Tile>
TERCET_INLINE void wide_tiles(int rows, const Tile& tile) {
    const int tiles = (rows + kWideTile - 1) / kWideTile;
    for (int i = 0, row = 0; i < tiles; ++i) {
        const int size = (rows - row + tiles - i - 1) / (tiles - i);
        switch (size) {
            case 1: tile(row, std::integral_constant<int, 1>{}); break;
            case 2: tile(row, std::integral_constant<int, 2>{}); break;
            case 3: tile(row, std::integral_constant<int, 3>{}); break;
            case 4: tile(row, std::integral_constant<int, 4>{}); break;
            case 5: tile(row, std::integral_constant<int, 5>{}); break;
            default: tile(row, std::integral_constant<int, 6>{}); break;
        }
        row += size;
    }
}

// Calls `row(panels, panel)` for the panels of a part with one row, as many of a group at a time as there are; panels is a constant.
template <class Row>
TERCET_INLINE void single_row(const LinearPart& part, const Row& row) {
    for (int panel = part.panel_begin; panel < part.panel_end;) {
        const int panels = tile_panels(1, panel, part.panel_end, (panel / kGroupPanels + 1) * kGroupPanels);
        if (panels == 4) row(std::integral_constant<int, 4>{}, panel);
        if (panels == 2) row(std::integral_constant<int, 2>{}, panel);
        if (panels == 1) row(std::integral_constant<int, 1>{}, panel);
        panel += panels;
    }
}

template <int R>
__attribute__((noinline)) static void wide_tile(const float (*lines)[kPanel], const float (*x)[kWideSpan], int count,
                                                float (*kept)[kPanel]) {
    F16 sums[R];
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) sums[r] = load16(kept[r]);
    wide_products<R>(lines, x, count, sums);
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) store16(kept[r], sums[r]);
}

static void wide_finish(const LinearCall& call, const WideSpan& span, int panel, int panels, int row_begin, int rows) {
    for (int p = 0; p < panels; p += 2) {
        for (int r = 0; r < rows; ++r) {
            if (p + 1 < panels) {
                F16 pair[1][2] = {{load16(span.sums[p][r]), load16(span.sums[p + 1][r])}};
                finish<BFloat16Linear, 1, 2>(call, pair, panel + p, row_begin + r);
            } else {
                F16 one[1][1] = {{load16(span.sums[p][r])}};
                finish<BFloat16Linear, 1, 1>(call, one, panel + p, row_begin + r);
            }
        }
    }
}

// Goes over the groups of a part and its rows. `sum(span, group, panel, panels, row_begin, rows)` adds up panels [panel, panel + panels)
// of a group for some rows, from zeros on.
template <class Sum>
TERCET_INLINE void wide_groups(const LinearCall& call, const LinearPart& part, const Sum& sum) {
    WideSpan span;
    for (int row_begin = part.row_begin; row_begin < part.row_end; row_begin += kWideRows) {
        const int rows = least(kWideRows, part.row_end - row_begin);
        for (int panel = part.panel_begin; panel < part.panel_end;) {
            const int group = panel / kGroupPanels;
            const int panels = least(part.panel_end, (group + 1) * kGroupPanels) - panel;
            for (int p = 0; p < panels; ++p) std::memset(span.sums[p], 0, sizeof(span.sums[p][0]) * static_cast<std::size_t>(rows));
            sum(span, group, panel, panels, row_begin, rows);
            wide_finish(call, span, panel, panels, row_begin, rows);
            panel += panels;
        }
    }
}

// Weights that are read next, which tiles fetch into the second-level cache between their products, so that memory and arithmetic
// overlap.
struct WideNext {
    const char* begin;
    std::int64_t bytes;
};

class WideAhead {
public:
    WideAhead(const WideNext& next, int tiles) : at_(next.begin), each_((next.bytes / kLineBytes + tiles - 1) / tiles) {}

    void fetch() {
        for (std::int64_t i = 0; i < each_; ++i, at_ += kLineBytes) __builtin_prefetch(at_, 0, 2);
    }

private:
    const char* at_;
    std::int64_t each_;
};

TERCET_INLINE void widen_pair(const I16& bits, WideSpan& span, int panel, int step) {
    const BFloat16Linear::Line pair = BFloat16Linear::split(bits);
    store16(span.lines[panel][2 * step], pair.even);
    store16(span.lines[panel][2 * step + 1], pair.odd);
}

// Adds up all steps of some panels for some rows. Lines(steps) widens the lines of the next steps into the span, and returns where
// those after them lie.
template <class Lines>
TERCET_INLINE void add_spans(const LinearCall& call, WideSpan& span, int panels, int row_begin, int rows, const Lines& lines) {
    constexpr int kSpanSteps = kWideSpan / 2;
    const int steps = (call.in_features + 1) / 2;
    for (int step = 0; step < steps; step += kSpanSteps) {
        const int count = least(kSpanSteps, steps - step);
        const int values = least(kWideSpan, call.in_features - 2 * step);
        WideAhead ahead(lines(count), panels * ((rows + kWideTile - 1) / kWideTile));
        for (int r = 0; r < rows; ++r) widen_values(call.x + (row_begin + r) * call.x_stride + 4 * step, values, span.x[r]);
        for (int p = 0; p < panels; ++p) {
            wide_tiles(rows, [&](int row, auto size) {
                ahead.fetch();
                wide_tile<size>(span.lines[p], span.x + row, 2 * count, span.sums[p] + row);
            });
        }
    }
}

// Several rows.
static void linear_wide(const LinearCall& call, const LinearPart& part) {
    const int steps = (call.in_features + 1) / 2;
    wide_groups(call, part, [&](WideSpan& span, int group, int panel, int panels, int row_begin, int rows) {
        const int group_panels = least(kGroupPanels, call.panels - group * kGroupPanels);
        const std::int64_t stride = static_cast<std::int64_t>(kLineBytes) * group_panels;
        const char* line = call.weights + static_cast<std::int64_t>(kLineBytes) * steps * kGroupPanels * group +
                           kLineBytes * (panel % kGroupPanels);
        add_spans(call, span, panels, row_begin, rows, [&](int count) {
            for (int step = 0; step < count; ++step, line += stride) {
                for (int p = 0; p < panels; ++p) widen_pair(load16i(line + kLineBytes * p), span, p, step);
            }
            return WideNext{line, panels == group_panels ? count * stride : 0};
        });
    });
}

#endif

}  // namespace
}  // namespace tercet
