// A split of a task with few rows: memory is the limit, and nothing else may hold it up.
//
// Keys are read as one stream, and values as another, in the order of memory and with little between one line and the next: that is
// what processors fetch ahead of its use while they compute. So all scores of a split come first, then all its weights, then its
// values; all in the order of reduction that holds everywhere, so rows are those of attention_block.hpp to the bit. Reading keys and
// values of 64 keys in turn takes a fifth longer. By hand some tiles are fetched ahead, for where a stream ends or jumps, and while
// weights are computed. Where there is no stream of keys, as blocks of a request do not follow each other or are few, four tiles are
// read at a time.
//
// What is fetched by hand goes to the second-level cache, and while keys and values are read it is asked for when a line of before has
// come. A processor runs ahead of what it waits for, and its first-level cache waits for few lines at a time (two dozen on Zen 4):
// requests for tiles to come would take the places of lines that are needed now, and are dropped where no place is left. Zen 4 reads at
// 60 to 75 % of the memory's rate with requests to the first level, at 80 to 85 with those to the second, and at 90 to 95 with such that
// wait.
//
// Include only from files compiled for one instruction set.
#pragma once

#include "attention_block.hpp"

namespace tercet {
namespace {

constexpr int kStreamRows = 12;  // at most, of a task
constexpr int kSplitTiles = kSplitKeys / kTileKeys;
constexpr int kSplitGroups = kSplitKeys / kGroupKeys;
constexpr int kAheadTiles = 4;   // fetched ahead
constexpr int kGapLines = 96;    // fetched while weights are computed

// The tiles of a split that hold keys which exist and are seen. Behind the last ones stand those that are read next.
struct SplitTiles {
    int start;  // first key of the split
    int first;  // tiles [first, last)
    int last;
    const char* k[kSplitTiles + kAheadTiles];
    const char* v[kSplitTiles + kAheadTiles];
};

// Scores, then weights, of all rows of a task in a split.
template <class C>
struct alignas(64) SplitValues {
    float scores[kStreamRows][kSplitTiles][16];
    float weights[kStreamRows][kSplitKeys];  // as C stores them
    float shrink[kStreamRows][16];           // of each group
};

// Returns `p`, but not before `line` has come.
template <class Line>
TERCET_INLINE const char* once_here(const Line& line, const char* p) {
    std::int64_t bits;
    static_assert(sizeof line >= sizeof bits);
    std::memcpy(&bits, &line, sizeof bits);
    std::int64_t nothing = 0;
    asm("" : "+r"(nothing));  // so that compilers do not know it
    return p + (bits & nothing);
}

TERCET_INLINE void fetch_second(const char* p) { __builtin_prefetch(p, 0, 2); }

// Scores of T tiles from t on, line by line in turn.
template <class C, int M, int T>
TERCET_INLINE void score(const SplitTiles& tiles, int t, const typename C::Step* q, int steps, bool fetch, float (*s)[kSplitTiles][16]) {
    F16 sum[M][T];
    const char* k[T];
    const char* ahead[T];
#pragma GCC unroll 4
    for (int j = 0; j < T; ++j) {
#pragma GCC unroll 8
        for (int m = 0; m < M; ++m) sum[m][j] = F16{};
        k[j] = tiles.k[t + j];
        ahead[j] = fetch ? tiles.k[t + j + kAheadTiles] : k[j];
    }
    for (int step = 0; step < steps; ++step) {
        typename C::Line line[T];
#pragma GCC unroll 4
        for (int j = 0; j < T; ++j) {
            line[j] = C::load(k[j] + 64 * step);
            fetch_second(once_here(line[j], ahead[j]) + 64 * step);
        }
#pragma GCC unroll 8
        for (int m = 0; m < M; ++m) {
#pragma GCC unroll 4
            for (int j = 0; j < T; ++j) sum[m][j] = C::dot(sum[m][j], line[j], q + step * M + m);
        }
    }
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
#pragma GCC unroll 4
        for (int j = 0; j < T; ++j) store16(s[m][t + j], sum[m][j]);
    }
}

template <class C, int M>
__attribute__((noinline)) static void score_tiles(const SplitTiles& tiles, const typename C::Step* q, int steps, bool fetch,
                                                  float (*s)[kSplitTiles][16]) {
    int t = tiles.first;
    while (t < tiles.last) {
        if constexpr (kScoreTiles == 4) {
            const bool stream = tiles.last - tiles.first == kSplitTiles && tiles.k[t + 1] - tiles.k[t] == 64 * steps;
            if (!stream && t + 4 <= tiles.last) {
                score<C, M, 4>(tiles, t, q, steps, fetch, s);
                t += 4;
                continue;
            }
        }
        score<C, M, 1>(tiles, t, q, steps, fetch, s);
        ++t;
    }
}

// Takes a split of keys into the online softmax of a row, which begins with it. Meanwhile lines from `ahead` on are
// fetched, `lines` in a whole split.
template <class C>
TERCET_INLINE void weigh_row(const Geometry& g, const SplitTiles& tiles, const float (*scores)[16], int first_key, int last_key,
                             float* max, float* lanes, float* shrink, float* weights, const char* ahead, int lines) {
    F16 sums[kSplitGroups];
    alignas(64) float exponents[16] = {};
    const int begin = tiles.first / kGroupTiles;
    const int end = (tiles.last + kGroupTiles - 1) / kGroupTiles;
    for (int group = begin; group < end; ++group) {
        const int start = tiles.start + group * kGroupKeys;
        for (int i = 0; i < lines / kSplitGroups; ++i, ahead += 64) fetch_second(ahead);
        F16 s[kGroupTiles];
#pragma GCC unroll 4
        for (int t = 0; t < kGroupTiles; ++t) s[t] = load16(scores[group * kGroupTiles + t]);
        const bool mask = last_key < start + kGroupKeys - 1 || first_key > start;
        auto* to = reinterpret_cast<char*>(weights) + group * kGroupKeys / C::kStepKeys * static_cast<int>(sizeof(typename C::Step));
        sums[group] = soften<C>(g, s, start, mask, first_key, last_key, max, exponents + group, to);
    }
    store16(shrink, exp2_16<5>(load16(exponents)));
    F16 sum = load16(lanes);
    for (int group = begin; group < end; ++group) sum = fma16(sum, splat16(shrink[group]), sums[group]);
    store16(lanes, sum);
}

// Adds the weighted values of tiles [first, last) of a split to those of the tiles before them, which are in `acc`.
template <class C, int M, int ND>
TERCET_INLINE void sum_values(const SplitTiles& tiles, int first, int last, int begin, int end, const float (*weights)[kSplitKeys],
                              const float (*shrink)[16], bool fetch, float* acc, int head_size, int column) {
    constexpr int kTileSteps = kTileKeys / C::kStepKeys;
    F16 sum[M][ND];
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
#pragma GCC unroll 8
        for (int d = 0; d < ND; ++d) sum[m][d] = first == tiles.first ? F16{} : load16(acc + m * head_size + column + 16 * d);
    }
    for (int t = first; t < last; ++t) {
        if (t % kGroupTiles == 0 || t == tiles.first) {
#pragma GCC unroll 8
            for (int m = 0; m < M; ++m) {
                const float by = shrink[m][t / kGroupTiles];
#pragma GCC unroll 8
                for (int d = 0; d < ND; ++d) sum[m][d] = mul16(sum[m][d], by);
            }
        }
        const int from = larger(begin - t * kTileSteps, 0);
        const int to = smaller(end - t * kTileSteps, kTileSteps);
        const char* row = tiles.v[t] + 4 * column;
        const char* next = fetch ? tiles.v[t + kAheadTiles] + 4 * column : row;
        for (int step = from; step < to; ++step) {
            typename C::Line line[ND];
#pragma GCC unroll 8
            for (int d = 0; d < ND; ++d) {
                const int at = step * 4 * head_size + 64 * d;
                line[d] = C::load(row + at);
                fetch_second(once_here(line[d], next) + at);
            }
            add_lines<C>(line, weights, t * kTileSteps + step, sum);
        }
    }
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
#pragma GCC unroll 8
        for (int d = 0; d < ND; ++d) store16(acc + m * head_size + column + 16 * d, sum[m][d]);
    }
}

template <class C, int M>
__attribute__((noinline)) static void value_tiles(const Geometry& g, const SplitTiles& tiles, const RowBlock& block, bool fetch,
                                                  const float (*weights)[kSplitKeys], const float (*shrink)[16], float* acc) {
    const int head_size = g.head_size;
    const int begin = larger(block.min_key - tiles.start, 0) / C::kStepKeys;
    const int end = (smaller(block.max_key + 1 - tiles.start, kSplitKeys) + C::kStepKeys - 1) / C::kStepKeys;
    // Where a pass does not take whole lines of values, a tile is finished before the next: memory is to be read once, and in order.
    const int each = 16 * kValueLines < head_size ? 1 : kSplitTiles;
    for (int t = tiles.first; t < tiles.last; t += each) {
        const int last = smaller(t + each, tiles.last);
        const auto sum = [&](auto lines, int column) __attribute__((always_inline)) {
            sum_values<C, M, lines>(tiles, t, last, begin, end, weights, shrink, fetch, acc, head_size, column);
        };
        int column = 0;
        for (; column + 16 * kValueLines <= head_size; column += 16 * kValueLines) {
            sum(std::integral_constant<int, kValueLines>{}, column);
        }
        if constexpr (kValueLines == 4) {
            if (head_size - column == 48) sum(std::integral_constant<int, 3>{}, column);
            if (head_size - column == 32) sum(std::integral_constant<int, 2>{}, column);
        }
        if (head_size - column == 16) sum(std::integral_constant<int, 1>{}, column);
    }
}

// Finds the tiles of a split of a task, of which keys [first_key, last_key] are seen, at least one of them in the split. A V tile that
// pairs an existing key with one that does not is copied with the other's half zeroed: what lies there may be anything, and 0 * NaN is
// NaN.
template <class C>
TERCET_INLINE void locate_split(const Geometry& g, const LayerCall& call, const Task& task, int split, int first_key, int last_key,
                                char* edge, const char* const* next, SplitTiles& tiles) {
    const int begin = larger(split * kSplitKeys, first_key);
    const int end = smaller((split + 1) * kSplitKeys, last_key + 1);
    tiles.start = split * kSplitKeys;
    tiles.first = (begin - tiles.start) / kTileKeys;
    tiles.last = (end - tiles.start + kTileKeys - 1) / kTileKeys;
    const int count = tiles.last - tiles.first;
    tiles_from(g, call, task, tiles.start + tiles.first * kTileKeys, count, tiles.k + tiles.first);
    for (int t = tiles.first; t < tiles.last; ++t) tiles.v[t] = tiles.k[t] + g.value_bytes;
    if constexpr (C::kStepKeys == 2) {
        const auto clean = [&](int key, int gone, char* to) {
            const int t = (key - tiles.start) / kTileKeys;
            if (tiles.v[t] != to) std::memcpy(to, tiles.v[t], static_cast<std::size_t>(g.tile_bytes));
            auto* line = reinterpret_cast<std::uint16_t*>(to) + key % kTileKeys / 2 * 2 * g.head_size;
            for (int i = gone; i < 2 * g.head_size; i += 2) line[i] = 0;
            tiles.v[t] = to;
        };
        if (end == task.context && end % 2 == 1) clean(end - 1, 1, edge);
        if (begin == first_key && begin % 2 == 1) {
            const bool same = tiles.first == tiles.last - 1 && tiles.v[tiles.first] == edge;
            clean(begin, 0, same ? edge : edge + g.tile_bytes);
        }
    }
    for (int t = 0; t < kAheadTiles; ++t) {
        tiles.k[tiles.last + t] = tiles.v[smaller(tiles.first + t, tiles.last - 1)];
        tiles.v[tiles.last + t] = next[t];
    }
}

// Takes a split into the rows of a task, whose state begins with it. `next`: the tiles that are read afterwards, kAheadTiles of them.
template <class C>
TERCET_INLINE void attend_split(const Geometry& g, const LayerCall& call, const Task& task, int split, const RowLimits& limits,
                                const RowBlock* blocks, int count, const char* const* next, const Scratch& scratch, SplitValues<C>& values) {
    const int steps = g.head_size / C::kStepKeys;
    SplitTiles tiles;
    if (split + 1 < task.split_end) {  // nobody has read it in this layer
        __builtin_prefetch(task.blocks + (split + 1) * kSplitKeys / g.block_size, 0, 3);
    }
    const int rows = blocks[count - 1].first + blocks[count - 1].rows;
    locate_split<C>(g, call, task, split, limits.first_key[0], limits.last_key[rows - 1], scratch.edge, next, tiles);
    // Tiles of a group that hold nothing are masked.
    for (int t = tiles.first / kGroupTiles * kGroupTiles; t < tiles.first; ++t) {
        for (int r = 0; r < rows; ++r) store16(values.scores[r][t], F16{});
    }
    for (int t = tiles.last; t % kGroupTiles != 0; ++t) {
        for (int r = 0; r < rows; ++r) store16(values.scores[r][t], F16{});
    }
    for (int b = 0; b < count; ++b) {
        const int first = blocks[b].first;
        const auto* q = static_cast<const typename C::Step*>(scratch.q) + first * steps;
        with_rows(blocks[b].rows, [&](auto m) { score_tiles<C, m>(tiles, q, steps, b == 0, values.scores + first); });
    }
    // Tiles behind those that the last keys have fetched.
    const int tile_lines = static_cast<int>(g.tile_bytes / 64);
    const int gap = smaller(kGapLines / tile_lines, rows);
#pragma GCC unroll 1
    for (int r = 0; r < rows; ++r) {
        const int t = tiles.first + kAheadTiles + r;
        const int lines = r < gap && t < tiles.last ? tile_lines : 0;
        weigh_row<C>(g, tiles, values.scores[r], limits.first_key[r], limits.last_key[r], scratch.max + r, scratch.lanes + 16 * r,
                     values.shrink[r], values.weights[r], tiles.v[smaller(t, tiles.last)], lines);
    }
    for (int b = 0; b < count; ++b) {
        const int first = blocks[b].first;
        with_rows(blocks[b].rows, [&](auto m) {
            value_tiles<C, m>(g, tiles, blocks[b], b == 0, values.weights + first, values.shrink + first,
                              scratch.acc + first * g.head_size);
        });
    }
}

}  // namespace
}  // namespace tercet
