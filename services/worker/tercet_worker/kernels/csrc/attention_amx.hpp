// Attention of one task on AMX tiles: both products of a group of 64 keys, with the online softmax between them in vectors.
//
// Both layouts (attention_types.hpp) are what a tile product reads: a K tile is 32 elements of D by 16 keys per 16 lines, and a V
// tile sixteen keys by 16 columns per 8 lines. Rows are taken in tiles of 16, or fewer where the task has no more; rows beyond the
// task's are computed on whatever the working memory holds, and dropped.
//
// Order of reduction: as everywhere by groups and splits; within a group of keys the processor's own, which is fixed.
// Include only from files compiled with AMX.
#pragma once

#include "attention_kernel.hpp"
#include "tiles_amx.hpp"

namespace tercet {
namespace {

constexpr int kHalfWidth = 32;   // bytes of a row that meets 8 lines
constexpr int kHalfLines = 8;
constexpr int kValueTiles = 4;   // 16-column parts of the output accumulated at once

// Tiles: 0 to 3 sums; 4 rows and 5 sixteen lines; 6 rows and 7 eight lines.
TERCET_INLINE void configure_attention(int rows) {
    TileConfig config{};
    config.palette = 1;
    for (int tile = 0; tile < 4; ++tile) set_tile(config, tile, rows);
    set_tile(config, 4, rows);
    set_tile(config, 5, 2 * kHalfLines);
    set_tile(config, 6, rows, kHalfWidth);
    set_tile(config, 7, kHalfLines);
    load_config(config);
}

// The tiles of keys [start, start + 64), of which [first, context) exist.
struct KeyTiles {
    const char* k[kGroupTiles];
    const char* v[kGroupTiles];
};

// Copies a V tile of whose keys only [begin, end) exist, with zeros for the others: what lies there may be anything, and
// 0 * NaN is NaN.
TERCET_INLINE const char* clean_values(const char* tile, char* to, int head_size, int begin, int end) {
    const auto* from = reinterpret_cast<const std::uint16_t*>(tile);
    auto* copy = reinterpret_cast<std::uint16_t*>(to);
    for (int step = 0; step < kHalfLines; ++step) {
        for (int half = 0; half < 2; ++half) {
            const int key = 2 * step + half;
            const std::uint16_t keep = key >= begin && key < end ? 0xffffu : 0u;
            const int at = 2 * step * head_size + half;
            for (int i = 0; i < 2 * head_size; i += 2) copy[at + i] = from[at + i] & keep;
        }
    }
    return to;
}

// Finds the tiles of a group. Those outside the context repeat one inside it: their keys are masked.
TERCET_INLINE void locate_tiles(const Geometry& g, const LayerCall& call, const Task& task, int start, int first, char* edge,
                                KeyTiles& tiles) {
    const int tile_first = larger(first - start, 0) / kTileKeys;
    const int tile_last = (smaller(task.context - start, kGroupKeys) - 1) / kTileKeys;
    for (int t = tile_first; t <= tile_last; ++t) {
        const int key = start + kTileKeys * t;
        const char* tile = key_tile(g, call, task, key);
        tiles.k[t] = tile;
        tiles.v[t] = tile + g.value_bytes;
        if (key < first || key + kTileKeys > task.context) {
            tiles.v[t] = clean_values(tiles.v[t], edge + (t == tile_first ? 0 : g.tile_bytes), g.head_size, first - key,
                                      task.context - key);
        }
    }
    for (int t = 0; t < kGroupTiles; ++t) {
        if (t >= tile_first && t <= tile_last) continue;
        const int other = t < tile_first ? tile_first : tile_last;
        tiles.k[t] = tiles.k[other];
        tiles.v[t] = tiles.v[other];
    }
}

// Fetches the tiles of keys [start, end), at most a group, into the second-level cache.
TERCET_INLINE void fetch_tiles(const Geometry& g, const LayerCall& call, const Task& task, int start, int end) {
    for (int key = start; key < smaller(end, start + kGroupKeys); key += kTileKeys) {
        const char* tile = key_tile(g, call, task, key);
        for (std::int64_t at = 0; at < g.tile_bytes; at += kTileWidth) {
            __builtin_prefetch(tile + at, 0, 2);
            __builtin_prefetch(tile + g.value_bytes + at, 0, 2);
        }
    }
}

// Working memory of a tile of rows.
struct alignas(64) TileValues {
    float of[4][kTileHeight][16];              // sums as tiles are stored: scores of four key tiles, or four column parts
    std::uint16_t p[kTileHeight][kGroupKeys];  // weights of the keys
    float shrink[kTileHeight];
};

// Scores of a tile of rows for a group, [key tile][row][key].
TERCET_INLINE void score_tiles(const KeyTiles& tiles, const char* q, int head_size, TileValues& values) {
    const std::int64_t q_stride = 2 * head_size;
    publish(&values);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    int d = 0;
    for (; d + 32 <= head_size; d += 32) {
        const int lines = kTileWidth * (d / 2);
        _tile_loadd(4, q + 2 * d, q_stride);
        _tile_loadd(5, tiles.k[0] + lines, kTileWidth);
        _tile_dpbf16ps(0, 4, 5);
        _tile_loadd(5, tiles.k[1] + lines, kTileWidth);
        _tile_dpbf16ps(1, 4, 5);
        _tile_loadd(5, tiles.k[2] + lines, kTileWidth);
        _tile_dpbf16ps(2, 4, 5);
        _tile_loadd(5, tiles.k[3] + lines, kTileWidth);
        _tile_dpbf16ps(3, 4, 5);
    }
    if (d < head_size) {  // sixteen elements are left
        const int lines = kTileWidth * (d / 2);
        _tile_loadd(6, q + 2 * d, q_stride);
        _tile_loadd(7, tiles.k[0] + lines, kTileWidth);
        _tile_dpbf16ps(0, 6, 7);
        _tile_loadd(7, tiles.k[1] + lines, kTileWidth);
        _tile_dpbf16ps(1, 6, 7);
        _tile_loadd(7, tiles.k[2] + lines, kTileWidth);
        _tile_dpbf16ps(2, 6, 7);
        _tile_loadd(7, tiles.k[3] + lines, kTileWidth);
        _tile_dpbf16ps(3, 6, 7);
    }
    _tile_stored(0, values.of[0], kTileWidth);
    _tile_stored(1, values.of[1], kTileWidth);
    _tile_stored(2, values.of[2], kTileWidth);
    _tile_stored(3, values.of[3], kTileWidth);
}

// One part of 16 columns of the output: the sum in tile T of the weighted values.
#define TERCET_ADD_TILE(T)                                       \
    _tile_loadd(7, tiles.v[t] + 4 * (column + 16 * (T)), stride); \
    _tile_dpbf16ps(T, 6, 7)

// acc = acc * shrink + weights * values for `parts` (1 to 4) parts of 16 columns from `column` on.
template <int P>
TERCET_INLINE void value_tiles(const KeyTiles& tiles, TileValues& values, float* acc, int head_size, int column, int rows) {
    const std::int64_t stride = 4 * head_size;
    publish(&values);
    _tile_zero(0);
    if constexpr (P > 1) _tile_zero(1);
    if constexpr (P > 2) _tile_zero(2);
    if constexpr (P > 3) _tile_zero(3);
    for (int t = 0; t < kGroupTiles; ++t) {
        _tile_loadd(6, reinterpret_cast<const char*>(values.p) + t * kHalfWidth, 2 * kGroupKeys);
        TERCET_ADD_TILE(0);
        if constexpr (P > 1) { TERCET_ADD_TILE(1); }
        if constexpr (P > 2) { TERCET_ADD_TILE(2); }
        if constexpr (P > 3) { TERCET_ADD_TILE(3); }
    }
    _tile_stored(0, values.of[0], kTileWidth);
    if constexpr (P > 1) _tile_stored(1, values.of[1], kTileWidth);
    if constexpr (P > 2) _tile_stored(2, values.of[2], kTileWidth);
    if constexpr (P > 3) _tile_stored(3, values.of[3], kTileWidth);
    for (int m = 0; m < rows; ++m) {
        float* row = acc + m * head_size + column;
        const F16 shrink = splat16(values.shrink[m]);
        for (int part = 0; part < P; ++part) {
            store16(row + 16 * part, fma16(load16(row + 16 * part), shrink, load16(values.of[part][m])));
        }
    }
}

#undef TERCET_ADD_TILE

// Takes one group of keys into the online softmax of a tile of rows, of which the first `rows` count.
TERCET_INLINE void attend_tile(const Geometry& g, const KeyTiles& tiles, int start, const RowLimits& limits, const Scratch& scratch,
                               int first, int rows, TileValues& values) {
    const int head_size = g.head_size;
    score_tiles(tiles, static_cast<const char*>(scratch.q) + static_cast<std::int64_t>(first) * 2 * head_size, head_size, values);
    bool mask = false;
    for (int r = first; r < first + rows; ++r) {
        mask |= limits.last_key[r] < start + kGroupKeys - 1 || limits.first_key[r] > start;
    }
    F16 sums[kTileHeight];
    for (int m = 0; m < rows; ++m) {
        F16 s[kGroupTiles];
        for (int t = 0; t < kGroupTiles; ++t) s[t] = load16(values.of[t][m]);
        sums[m] = soften<BFloat16Kv>(g, s, start, mask, limits.first_key[first + m], limits.last_key[first + m],
                                     scratch.max + first + m, values.shrink + m, values.p[m]);
    }
    store16(values.shrink, exp2_16<5>(load16(values.shrink)));
    for (int m = 0; m < rows; ++m) {
        float* lanes = scratch.lanes + 16 * (first + m);
        store16(lanes, fma16(load16(lanes), splat16(values.shrink[m]), sums[m]));
    }
    float* acc = scratch.acc + static_cast<std::int64_t>(first) * head_size;
    int column = 0;
    for (; column + 16 * kValueTiles <= head_size; column += 16 * kValueTiles) {
        value_tiles<4>(tiles, values, acc, head_size, column, rows);
    }
    switch ((head_size - column) / 16) {
        case 3: return value_tiles<3>(tiles, values, acc, head_size, column, rows);
        case 2: return value_tiles<2>(tiles, values, acc, head_size, column, rows);
        case 1: return value_tiles<1>(tiles, values, acc, head_size, column, rows);
        default: return;
    }
}

static void run_amx(const Geometry& g, const LayerCall& call, const Task& task, const Task*, const Scratch& scratch) {
    const int head_size = g.head_size;
    const int rows = task.tokens * g.group_heads;
    const int height = smaller(rows, kTileHeight);
    RowLimits limits;
    set_limits(g, call, task, rows, limits);
    for (int r = 0; r < rows; ++r) {
        std::memcpy(static_cast<char*>(scratch.q) + static_cast<std::int64_t>(r) * 2 * head_size,
                    query_row<BFloat16Kv>(g, call, task, r), static_cast<std::size_t>(head_size) * 2);
    }
    configure_attention(height);
    const int first_key = limits.first_key[0];
    const int last_key = limits.last_key[rows - 1];
    const bool several = task.split_end - task.split_begin > 1;
    TileValues values;
    std::memset(&values, 0, sizeof values);
    KeyTiles tiles{};
    begin_task(scratch, rows);
    for (int split = task.split_begin; split < task.split_end; ++split) {
        begin_split(scratch, rows, head_size);
        const int begin = larger(split * kSplitKeys, first_key / kGroupKeys * kGroupKeys);
        const int end = smaller((split + 1) * kSplitKeys, last_key + 1);
        for (int start = begin; start < end; start += kGroupKeys) {
            locate_tiles(g, call, task, start, first_key, scratch.edge, tiles);
            // Keys that few rows meet come from memory faster than the processor asks for them by itself.
            if (rows <= kTileHeight) fetch_tiles(g, call, task, start + kGroupKeys, last_key + 1);
            for (int first = 0; first < rows; first += kTileHeight) {
                const int count = smaller(rows - first, kTileHeight);
                if (limits.last_key[first + count - 1] < start || limits.first_key[first] >= start + kGroupKeys) continue;
                attend_tile(g, tiles, start, limits, scratch, first, count, values);
            }
        }
        end_split(g, task, scratch, split, rows, several);
    }
    _tile_release();
    if (task.partials == nullptr) write_out<BFloat16Kv>(g, call, task, several ? scratch.total : scratch.acc, scratch.total_sum);
}

}  // namespace
}  // namespace tercet
