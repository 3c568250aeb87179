// Products of bfloat16 rows with packed weights on AMX tiles.
//
// The packed layout (linear_types.hpp) is the one that the tile product reads: sixteen lines of a panel, one per step, are a tile of
// 32 k by 16 outputs. A tile of rows takes 32 k of up to sixteen rows. So a block of 32 k costs one load per tile of rows and one
// per panel, and the processor multiplies all of them.
//
// Order of reduction. The processor sums the 32 k of a block in its own fixed order and adds that to the output's accumulator;
// blocks come in ascending order. A row's result depends on that row and the weights alone, as everywhere, but differs in the last
// bits from that of other instruction sets.
//
// Include only from files compiled with AMX.
#pragma once

#include "linear_kernel.hpp"
#include "tiles_amx.hpp"

namespace tercet {
namespace {

constexpr int kTileSteps = 16;             // steps of a block: 32 k
constexpr int kTileBytes = kTileSteps * kLineBytes;
constexpr int kAheadBytes = 8 * 1024;      // how far ahead weights are fetched where they come from memory

// Sums of up to four tiles, as the tiles are stored.
struct alignas(64) TileSums {
    float of[4][kTileHeight][kPanel];
};

// Tiles: 0 to 3 hold sums, 4 and 5 rows, 6 and 7 panels; with one tile of rows, 5 holds panels as well.

// One tile of rows by up to four panels.
TERCET_INLINE void configure_narrow(int rows) {
    TileConfig config{};
    config.palette = 1;
    for (int tile = 0; tile < 4; ++tile) set_tile(config, tile, rows);
    set_tile(config, 4, rows);
    for (int tile = 5; tile < 8; ++tile) set_tile(config, tile, kTileSteps);
    load_config(config);
}

// Two tiles of rows by two panels.
TERCET_INLINE void configure_wide(int second_rows) {
    TileConfig config{};
    config.palette = 1;
    for (int tile = 0; tile < 2; ++tile) set_tile(config, tile, kTileHeight);
    for (int tile = 2; tile < 4; ++tile) set_tile(config, tile, second_rows);
    set_tile(config, 4, kTileHeight);
    set_tile(config, 5, second_rows);
    for (int tile = 6; tile < 8; ++tile) set_tile(config, tile, kTileSteps);
    load_config(config);
}

// The last block where K is no multiple of 32: rows and lines are copied and filled up with zeros, so that nothing is read that
// belongs to another row or matrix.
struct alignas(64) Tail {
    char rows[2 * kTileHeight][kLineBytes];
    char lines[4][kTileSteps][kLineBytes];
};

TERCET_INLINE void copy_tail(Tail& tail, const char* x, std::int64_t x_stride, int rows, int elements, const char* lines,
                             std::int64_t line_stride, int panels) {
    const int steps = (elements + 1) / 2;
    for (int r = 0; r < rows; ++r) {
        std::memset(tail.rows[r], 0, kLineBytes);
        std::memcpy(tail.rows[r], x + r * x_stride, static_cast<std::size_t>(elements) * 2);
    }
    for (int p = 0; p < panels; ++p) {
        for (int step = 0; step < steps; ++step) {
            std::memcpy(tail.lines[p][step], lines + step * line_stride + p * kLineBytes, kLineBytes);
        }
        std::memset(tail.lines[p][steps], 0, static_cast<std::size_t>(kTileSteps - steps) * kLineBytes);
    }
}

// Sums of one tile of rows with P panels. kFromMemory: the weights are not in a cache, and are fetched ahead.
template <int P, bool kFromMemory>
TERCET_INLINE void accumulate_narrow(const char* x, std::int64_t x_stride, const char* lines, std::int64_t line_stride, int blocks,
                                     const Tail* tail) {
    publish(tail);
    _tile_zero(0);
    if constexpr (P > 1) _tile_zero(1);
    if constexpr (P > 2) {
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int block = 0; block <= blocks; ++block) {
        const char* panel = lines;
        std::int64_t stride = line_stride, pitch = kLineBytes;
        if (block == blocks) {
            if (tail == nullptr) break;
            panel = tail->lines[0][0];
            stride = kLineBytes;
            pitch = kTileBytes;
            _tile_loadd(4, tail->rows[0], kLineBytes);
        } else {
            _tile_loadd(4, x, x_stride);
        }
        if constexpr (kFromMemory) {
#pragma GCC unroll 16
            for (int step = 0; step < kTileSteps; ++step) {
                for (int p = 0; p < P; ++p) {
                    __builtin_prefetch(lines + kAheadBytes + step * line_stride + p * kLineBytes, 0, 3);
                }
            }
        }
        _tile_loadd(5, panel, stride);
        _tile_dpbf16ps(0, 4, 5);
        if constexpr (P > 1) {
            _tile_loadd(6, panel + pitch, stride);
            _tile_dpbf16ps(1, 4, 6);
        }
        if constexpr (P > 2) {
            _tile_loadd(7, panel + 2 * pitch, stride);
            _tile_dpbf16ps(2, 4, 7);
            _tile_loadd(5, panel + 3 * pitch, stride);
            _tile_dpbf16ps(3, 4, 5);
        }
        x += kLineBytes;
        lines += kTileSteps * line_stride;
    }
}

// Sums of two tiles of rows with two panels.
TERCET_INLINE void accumulate_wide(const char* x, std::int64_t x_stride, const char* lines, std::int64_t line_stride, int blocks,
                                   const Tail* tail) {
    const char* second = x + kTileHeight * x_stride;
    publish(tail);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int block = 0; block < blocks; ++block) {
        _tile_loadd(4, x, x_stride);
        _tile_loadd(6, lines, line_stride);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, lines + kLineBytes, line_stride);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(5, second, x_stride);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
        x += kLineBytes;
        second += kLineBytes;
        lines += kTileSteps * line_stride;
    }
    if (tail == nullptr) return;
    _tile_loadd(4, tail->rows[0], kLineBytes);
    _tile_loadd(5, tail->rows[kTileHeight], kLineBytes);
    _tile_loadd(6, tail->lines[0][0], kLineBytes);
    _tile_loadd(7, tail->lines[1][0], kLineBytes);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
}

// What becomes of `rows` rows of P panels whose sums start at tile `first`.
template <int P>
TERCET_INLINE void finish_tiles(const LinearCall& call, const TileSums& sums, int first, int panel, int row, int rows) {
    for (int r = 0; r < rows; ++r) {
        F16 values[1][P];
        for (int p = 0; p < P; ++p) values[0][p] = load16(sums.of[first + p][r]);
        finish<BFloat16Linear, 1, P>(call, values, panel, row + r);
    }
}

// Where a group of panels lies, and how its k are divided.
struct AmxGroup {
    const char* lines;
    std::int64_t line_stride;
    int blocks;
    int tail_elements;
};

template <int P>
TERCET_INLINE void run_narrow(const LinearCall& call, const AmxGroup& group, int panel, int row, int rows, bool from_memory) {
    Tail tail;
    TileSums sums;
    const char* x = call.x + row * call.x_stride;
    if (group.tail_elements > 0) {
        copy_tail(tail, x + static_cast<std::int64_t>(group.blocks) * kLineBytes, call.x_stride, rows, group.tail_elements,
                  group.lines + static_cast<std::int64_t>(group.blocks) * kTileSteps * group.line_stride, group.line_stride, P);
    }
    const Tail* rest = group.tail_elements > 0 ? &tail : nullptr;
    if (from_memory) {
        accumulate_narrow<P, true>(x, call.x_stride, group.lines, group.line_stride, group.blocks, rest);
    } else {
        accumulate_narrow<P, false>(x, call.x_stride, group.lines, group.line_stride, group.blocks, rest);
    }
    _tile_stored(0, sums.of[0], kLineBytes);
    if constexpr (P > 1) _tile_stored(1, sums.of[1], kLineBytes);
    if constexpr (P > 2) {
        _tile_stored(2, sums.of[2], kLineBytes);
        _tile_stored(3, sums.of[3], kLineBytes);
    }
    finish_tiles<P>(call, sums, 0, panel, row, rows);
}

TERCET_INLINE void run_wide(const LinearCall& call, const AmxGroup& group, int panel, int row, int rows) {
    Tail tail;
    TileSums sums;
    const char* x = call.x + row * call.x_stride;
    if (group.tail_elements > 0) {
        copy_tail(tail, x + static_cast<std::int64_t>(group.blocks) * kLineBytes, call.x_stride, rows, group.tail_elements,
                  group.lines + static_cast<std::int64_t>(group.blocks) * kTileSteps * group.line_stride, group.line_stride, 2);
    }
    accumulate_wide(x, call.x_stride, group.lines, group.line_stride, group.blocks, group.tail_elements > 0 ? &tail : nullptr);
    _tile_stored(0, sums.of[0], kLineBytes);
    _tile_stored(1, sums.of[1], kLineBytes);
    _tile_stored(2, sums.of[2], kLineBytes);
    _tile_stored(3, sums.of[3], kLineBytes);
    finish_tiles<2>(call, sums, 0, panel, row, kTileHeight);
    finish_tiles<2>(call, sums, 2, panel, row + kTileHeight, rows - kTileHeight);
}

// All rows of the part with `panels` panels of a group. Rows go by in tiles while the weights stay in the first-level cache.
TERCET_INLINE void run_panels(const LinearCall& call, const LinearPart& part, const AmxGroup& group, int panel, int panels) {
    int configured = 0;  // rows of the second tile, negative: those of the only one
    const int count = part.row_end - part.row_begin;
    const bool once = count <= kTileHeight;  // otherwise the rows after the first sixteen find the weights in a cache
    for (int row = part.row_begin; row < part.row_end;) {
        const int left = part.row_end - row;
        if (left > kTileHeight && panels == 2) {
            const int rows = least(left, 2 * kTileHeight);
            if (configured != rows - kTileHeight) {
                configured = rows - kTileHeight;
                configure_wide(configured);
            }
            run_wide(call, group, panel, row, rows);
            row += rows;
            continue;
        }
        const int rows = least(left, kTileHeight);
        if (configured != -rows) {
            configured = -rows;
            configure_narrow(rows);
        }
        switch (panels) {
            case 4: run_narrow<4>(call, group, panel, row, rows, once); break;
            case 2: run_narrow<2>(call, group, panel, row, rows, once); break;
            default: run_narrow<1>(call, group, panel, row, rows, once); break;
        }
        row += rows;
    }
}

static void linear_amx(const LinearCall& call, const LinearPart& part) {
    const int steps = (call.in_features + 1) / 2;
    const std::int64_t group_bytes = static_cast<std::int64_t>(steps) * kLineBytes * kGroupPanels;
    // With one tile of rows, four panels share its loads; with more, two panels and two tiles of rows share each other's.
    const int widest = part.row_end - part.row_begin <= kTileHeight ? 4 : 2;
    for (int panel = part.panel_begin; panel < part.panel_end;) {
        const int number = panel / kGroupPanels;
        const int group_panels = least(kGroupPanels, call.panels - number * kGroupPanels);
        const int left = least(part.panel_end, number * kGroupPanels + group_panels) - panel;
        const int panels = left >= widest ? widest : left >= 2 ? 2 : 1;
        AmxGroup group{};
        group.lines = call.weights + number * group_bytes + kLineBytes * (panel % kGroupPanels);
        group.line_stride = kLineBytes * group_panels;
        group.blocks = call.in_features / (2 * kTileSteps);
        group.tail_elements = call.in_features % (2 * kTileSteps);
        run_panels(call, part, group, panel, panels);
        panel += panels;
    }
    _tile_release();  // so that a switch of threads does not save eight KiB of tiles
}

}  // namespace
}  // namespace tercet
